/* BF16 Linears in the order of dot32. */
#include "ops/cuda/fast.cuh"

/* ---- large matrices: four threads hold the 32 lanes of a dot32, eight each, so that every load is 16 bytes ---- */

enum { AHEAD = 8, LARGE_THREADS = 256, LARGE_WARPS = LARGE_THREADS / 32 };

/* Blocks stay and take group after group of 64 rows of the matrix; what is ahead reaches into the next group. x in shared
 * memory [M][K]; K is a multiple of 32 AHEAD. */
template <int M>
static __global__ void __launch_bounds__(LARGE_THREADS)
    bf16_large(float *y, int64_t ldy, const float *x, int64_t ldx, const uint16_t *w, int N, int K, int rows) {
    extern __shared__ __align__(16) float in[];
    const int lane = threadIdx.x % 32, quarter = lane % 4, chunks = K / (32 * AHEAD), groups = (N + 63) / 64;
    const int own = (int)threadIdx.x / 32 * 8 + lane / 4, m0 = (int)blockIdx.y * M;
    int group = (int)blockIdx.x;
    int n = group * 64 + own;
    const uint4 *from = (const uint4 *)(w + (int64_t)(n < N ? n : N - 1) * K) + quarter;
    uint4 ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ahead[i] = __ldcs(from + i * 4);
    wait_for_inputs();
#pragma unroll
    for (int m = 0; m < M; m++) {
        const float *row = x + (m0 + m < rows ? m0 + m : rows - 1) * ldx;
        for (int i = threadIdx.x; i < K; i += LARGE_THREADS) in[m * K + i] = row[i];
    }
    __syncthreads();
    for (; group < groups; group += (int)gridDim.x) {
        const int next = group + (int)gridDim.x < groups ? group + (int)gridDim.x : group, nn = next * 64 + own;
        const uint4 *from_next = (const uint4 *)(w + (int64_t)(nn < N ? nn : N - 1) * K) + quarter;
        float l[M][8] = {};
        for (int c = 0; c < chunks; c++) {
            const uint4 *p = c + 1 < chunks ? from + (c + 1) * AHEAD * 4 : from_next;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const uint4 v = ahead[i];
                ahead[i] = __ldcs(p + i * 4);
                const uint32_t h[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const float4 *q = (const float4 *)(in + m * K + (c * AHEAD + i) * 32 + quarter * 8);
                    const float4 a = q[0], b = q[1];
                    const float e[8] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w };
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        l[m][2 * j] = fmaf(e[2 * j], __uint_as_float(h[j] << 16), l[m][2 * j]);
                        l[m][2 * j + 1] = fmaf(e[2 * j + 1], __uint_as_float(h[j] & 0xffff0000u), l[m][2 * j + 1]);
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int j = 0; j < 8; j++) l[m][j] = l[m][j] + __shfl_xor_sync(0xffffffffu, l[m][j], 2);
#pragma unroll
            for (int j = 0; j < 8; j++) l[m][j] = l[m][j] + __shfl_xor_sync(0xffffffffu, l[m][j], 1);
#pragma unroll
            for (int half = 4; half >= 1; half /= 2)
#pragma unroll
                for (int j = 0; j < half; j++) l[m][j] = l[m][j] + l[m][j + half];
            if (quarter == 0 && n < N && m0 + m < rows) y[(m0 + m) * ldy + n] = l[m][0];
        }
        from = from_next;
        n = nn;
    }
}

template <int M> static void large(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    const unsigned groups = blocks_of(w->rows, 64), most = 3 * (unsigned)g->multiprocessors;
    launch(g, bf16_large<M>, dim3(groups < most ? groups : most, blocks_of(rows, M)), LARGE_THREADS,
           (size_t)M * w->cols * sizeof(float), y, ldy, x, ldx, (const uint16_t *)w->data, w->rows, w->cols, rows);
}

/* ---- small ones: a warp per row, so that many blocks share the work ---- */

enum { SMALL_WARPS = 2, FIRST = 32 };

template <int M>
static __global__ void __launch_bounds__(32 * SMALL_WARPS)
    bf16_small(float *y, int64_t ldy, const float *x, int64_t ldx, const uint16_t *w, int N, int K, int rows) {
    const int lane = threadIdx.x % 32, n = (int)blockIdx.x * SMALL_WARPS + (int)threadIdx.x / 32, steps = K / 32;
    const int m0 = (int)blockIdx.y * M;
    const uint16_t *p = w + (int64_t)(n < N ? n : N - 1) * K + lane;
    uint16_t first[FIRST];
#pragma unroll
    for (int i = 0; i < FIRST; i++) first[i] = i < steps ? p[i * 32] : (uint16_t)0;
    wait_for_inputs();
    const float *in[M];
    float l[M] = {};
#pragma unroll
    for (int m = 0; m < M; m++) in[m] = x + (m0 + m < rows ? m0 + m : rows - 1) * ldx + lane;
#pragma unroll
    for (int i = 0; i < FIRST; i++)
        if (i < steps)
#pragma unroll
            for (int m = 0; m < M; m++)
                l[m] = fmaf(in[m][i * 32], __uint_as_float((uint32_t)first[i] << 16), l[m]);
#pragma unroll 16
    for (int i = FIRST; i < steps; i++) {
        const float e = __uint_as_float((uint32_t)p[i * 32] << 16);
#pragma unroll
        for (int m = 0; m < M; m++) l[m] = fmaf(in[m][i * 32], e, l[m]);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        const float v = tree32(l[m]);
        if (lane == 0 && n < N && m0 + m < rows) y[(m0 + m) * ldy + n] = v;
    }
}

template <int M> static void small(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    launch(g, bf16_small<M>, dim3(blocks_of(w->rows, SMALL_WARPS), blocks_of(rows, M)), 32 * SMALL_WARPS, 0, y, ldy, x,
           ldx, (const uint16_t *)w->data, w->rows, w->cols, rows);
}

bool fast_plain(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    if (w->format != GPU_BF16 || w->cols % 32 || ((uintptr_t)w->data & 15)) return false;
    if (w->cols % (32 * AHEAD) == 0 && w->cols <= 4096 && w->rows >= 64 * g->multiprocessors / 2) {
        if (rows == 1)
            large<1>(g, y, ldy, x, ldx, w, rows);
        else if (rows == 2)
            large<2>(g, y, ldy, x, ldx, w, rows);
        else
            large<4>(g, y, ldy, x, ldx, w, rows);
        return true;
    }
    if (rows == 1)
        small<1>(g, y, ldy, x, ldx, w, rows);
    else
        small<4>(g, y, ldy, x, ldx, w, rows);
    return true;
}
