/* BF16 Linears: four threads hold the 32 lanes of a dot32, eight each, so that every load is 16 bytes. */
#include "ops/cuda/fast.cuh"

/* y[n] for 8 rows of the matrix per warp and M rows of inputs. x in shared memory as float32. */
template <int M, int AHEAD>
static __global__ void __launch_bounds__(256)
    bf16_kernel(float *y, int64_t ldy, const float *x, int64_t ldx, const uint16_t *w, int N, int K, int rows) {
    extern __shared__ __align__(16) float in[]; /* [M][K] */
    dependents_may_start();
    const int lane = threadIdx.x % 32, quarter = lane % 4, warps = (int)blockDim.x / 32;
    const int n = ((int)blockIdx.x * warps + (int)threadIdx.x / 32) * 8 + lane / 4, steps = K / 32;
    const uint4 *from = (const uint4 *)(w + (int64_t)(n < N ? n : N - 1) * K) + quarter;
    uint4 ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i < steps) ahead[i] = __ldcs(from + i * 4);
    wait_for_inputs();
    const int m0 = (int)blockIdx.y * M;
    for (int i = 4 * (int)threadIdx.x; i < M * K; i += 4 * (int)blockDim.x) {
        const int m = i / K, row = m0 + m < rows ? m0 + m : rows - 1;
        const float *p = x + row * ldx + i % K;
        *(float4 *)(in + i) = ((uintptr_t)p & 15) == 0 ? *(const float4 *)p : make_float4(p[0], p[1], p[2], p[3]);
    }
    __syncthreads();
    float l[M][8] = {};
    for (int s = 0; s < steps; s += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (s + i >= steps) break;
            const uint4 c = ahead[i];
            if (s + i + AHEAD < steps) ahead[i] = __ldcs(from + (s + i + AHEAD) * 4);
            const uint32_t h[4] = { c.x, c.y, c.z, c.w };
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float4 *p = (const float4 *)(in + m * K + (s + i) * 32 + quarter * 8);
                const float4 a = p[0], b = p[1];
                const float v[8] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w };
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    l[m][2 * j] = fmaf(v[2 * j], __uint_as_float(h[j] << 16), l[m][2 * j]);
                    l[m][2 * j + 1] = fmaf(v[2 * j + 1], __uint_as_float(h[j] & 0xffff0000u), l[m][2 * j + 1]);
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
}

template <int M>
static void bf16(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    /* Small matrices spread over more blocks. */
    const int threads = w->rows >= 64 * g->multiprocessors ? 256 : 32;
    launch(g, bf16_kernel<M, 8>, dim3(blocks_of(w->rows, threads / 4), blocks_of(rows, M)), threads,
           (size_t)M * w->cols * sizeof(float), y, ldy, x, ldx, (const uint16_t *)w->data, w->rows, w->cols, rows);
}

bool fast_plain(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    if (w->format != GPU_BF16 || w->cols % 32 || ((uintptr_t)w->data & 15) || w->cols > 8192) return false;
    if (rows == 1)
        bf16<1>(g, y, ldy, x, ldx, w, rows);
    else if (rows == 2 || w->cols > 4096)
        bf16<2>(g, y, ldy, x, ldx, w, rows);
    else
        bf16<4>(g, y, ldy, x, ldx, w, rows);
    return true;
}
