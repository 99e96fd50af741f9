/* Several matrices over one normalised input of 2048 values, few rows: every block normalises for itself. */
#include "ops/cuda/gemv.cuh"
#include "ops/cuda/norm.cuh"

enum { K = 2048, IT = 2, MOST = 6, STEPS = K / 32 };

typedef struct group_mat {
    const void *data;
    const uint8_t *scales;
    float *y;
    float s2, g;
    int rows, first, nvfp4; /* first: chunk */
} group_mat;

typedef struct group_args {
    group_mat m[MOST];
    int n, chunks;
    const float *x, *norm;
    float *h;
    float eps;
    int rows;
} group_args;

/* Rows m of x normalised: 8 values per thread, and in shared memory. */
template <int M>
static __device__ __forceinline__ void normalise(float (*v)[8], float (*xs)[K], const group_args &a, const float *w) {
    __shared__ float factor[M];
    const int at = 8 * (int)threadIdx.x, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int row = m < a.rows ? m : a.rows - 1;
        load8(v[m], a.x + (int64_t)row * K, at, K);
        *(float4 *)&xs[m][at] = make_float4(v[m][0], v[m][1], v[m][2], v[m][3]);
        *(float4 *)&xs[m][at + 4] = make_float4(v[m][4], v[m][5], v[m][6], v[m][7]);
    }
    __syncthreads();
    if (warp < M) {
        float l = 0;
#pragma unroll 16
        for (int i = 0; i < STEPS; i++) {
            const float e = xs[warp][i * 32 + threadIdx.x % 32];
            l = fmaf(e, e, l);
        }
        l = tree32(l);
        if (threadIdx.x % 32 == 0) factor[warp] = 1.0f / sqrtf(l / (float)K + a.eps);
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; m++) {
        const float r = factor[m];
#pragma unroll
        for (int i = 0; i < 8; i++) v[m][i] = v[m][i] * r * w[i];
        *(float4 *)&xs[m][at] = make_float4(v[m][0], v[m][1], v[m][2], v[m][3]);
        *(float4 *)&xs[m][at + 4] = make_float4(v[m][4], v[m][5], v[m][6], v[m][7]);
    }
}

static __device__ __forceinline__ int matrix_of(const group_args &a, int chunk) {
    int which = 0;
#pragma unroll
    for (int i = 1; i < MOST; i++)
        if (i < a.n && chunk >= a.m[i].first) which = i;
    return which;
}

template <int R>
static __device__ __forceinline__ void load_chunk(weights<IT> *own, const group_mat &w, int row, int lane) {
    const int64_t last = w.rows - 1;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t n = row + r < last ? row + r : last;
        load_row<32, IT>(&own[r], (const uint8_t *)w.data + n * (K / 2), w.scales + n * (K / 16), lane);
    }
}

template <int R>
static __device__ __forceinline__ void load_of(weights<IT> *own, const group_args &a, int c, int warp, int lane) {
    const group_mat &w = a.m[matrix_of(a, c)];
    if (w.nvfp4) load_chunk<R>(own, w, ((c - w.first) * GEMV_WARPS + warp) * R, lane);
}

/* One warp, one row of a BF16 matrix. */
template <int M>
static __device__ __forceinline__ void plain_row(const group_mat &w, const float (*xs)[K], int n, int rows, int lane) {
    const uint16_t *p = (const uint16_t *)w.data + (int64_t)n * K + lane;
    float l[M] = {};
#pragma unroll 32
    for (int i = 0; i < STEPS; i++) {
        const float e = __uint_as_float((uint32_t)p[i * 32] << 16);
#pragma unroll
        for (int m = 0; m < M; m++) l[m] = fmaf(xs[m][i * 32 + lane], e, l[m]);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        const float y = tree32(l[m]);
        if (lane == 0 && m < rows) w.y[(int64_t)m * w.rows + n] = y;
    }
}

/* Chunks of rows, R per warp (BF16: one), in one list over all matrices; a block has an equal, connected part of it, so that
 * the inputs are normalised and quantized few times. */
template <int M, int R, gpu_act ACT> static __global__ void __launch_bounds__(GEMV_THREADS) group_kernel(group_args a) {
    extern __shared__ __align__(16) char mem[];
    float(*xs)[K] = (float(*)[K])mem;
    char *act = mem + M * K * sizeof(float);
    enum { BYTES = K + K / 2 };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = (int)((int64_t)blockIdx.x * a.chunks / gridDim.x),
              end = (int)((int64_t)(blockIdx.x + 1) * a.chunks / gridDim.x);
    weights<IT> own[R], next[R]; /* of chunk c and of the one behind it */
    if (begin < end) load_of<R>(own, a, begin, warp, lane);
    if (begin + 1 < end) load_of<R>(next, a, begin + 1, warp, lane);
    float nw[8];
    load8(nw, a.norm, 8 * (int)threadIdx.x, K);
    wait_for_inputs();
    float v[M][8], factor[M], g = -1; /* the scale the codes are under; int8 has none (0) */
    normalise<M>(v, xs, a, nw);
    if (a.h && blockIdx.x == 0)
#pragma unroll
        for (int m = 0; m < M; m++)
            if (m < a.rows)
#pragma unroll
                for (int i = 0; i < 8; i++) a.h[(int64_t)m * K + 8 * (int)threadIdx.x + i] = v[m][i];
    __syncthreads();
    for (int c = begin; c < end; c++) {
        const group_mat &w = a.m[matrix_of(a, c)];
        if (!w.nvfp4) {
            const int n = (c - w.first) * GEMV_WARPS + warp;
            if (n < w.rows) plain_row<M>(w, xs, n, a.rows, lane);
        } else {
            if (g != w.g) {
                g = w.g;
                __syncthreads(); /* the codes under another scale are done with */
#pragma unroll
                for (int m = 0; m < M; m++) {
                    if (ACT == GPU_ACT_INT8) {
                        factor[m] = quantize_int8(act + m * BYTES, xs[m], K);
                    } else {
                        const bool bad = fp4_half_block(act + m * BYTES, v[m], 8 * (int)threadIdx.x, K, g);
                        factor[m] = __syncthreads_or(bad) ? quiet_nan() : 1.0f;
                    }
                }
            }
            int64_t sum[R][M] = {};
            dot_rows<32, IT, R, M>(sum, own, act, BYTES, K, lane);
            const int64_t total = sum_many<R * M, 32>(&sum[0][0]);
            const int at = lane / (32 / (R * M)), n = ((c - w.first) * GEMV_WARPS + warp) * R + at / M, m = at % M;
            float f = factor[0];
#pragma unroll
            for (int i = 1; i < M; i++) f = m == i ? factor[i] : f;
            if (lane % (32 / (R * M)) == 0 && n < w.rows && m < a.rows)
                w.y[(int64_t)m * w.rows + n] = finish_int(total, f, ACT, w.s2, w.g);
        }
#pragma unroll
        for (int r = 0; r < R; r++) own[r] = next[r];
        if (c + 2 < end) load_of<R>(next, a, c + 2, warp, lane);
    }
}

template <int M, int R> static void group(gpu *g, group_args *a, gpu_act act) {
    a->chunks = 0;
    for (int i = 0; i < a->n; i++) {
        a->m[i].first = a->chunks;
        a->chunks += (int)blocks_of(a->m[i].rows, GEMV_WARPS * (a->m[i].nvfp4 ? R : 1));
    }
    const int most = 2 * g->multiprocessors;
    const dim3 grid((unsigned)(a->chunks < most ? a->chunks : most));
    const size_t smem = M * (K * sizeof(float) + K + K / 2);
    if (act == GPU_ACT_INT8)
        launch(g, group_kernel<M, R, GPU_ACT_INT8>, grid, GEMV_THREADS, smem, *a);
    else
        launch(g, group_kernel<M, R, GPU_ACT_FP4>, grid, GEMV_THREADS, smem, *a);
}

bool norm_group(gpu *g, float *const *y, const gpu_mat *const *w, int n, const float *x, const float *norm, float eps,
                int rows, float *h) {
    gpu_act act = GPU_ACT_FLOAT;
    group_args a = {};
    if (n > MOST || rows > 4) return false;
    for (int i = 0; i < n; i++) {
        const bool nvfp4 = w[i]->format == GPU_NVFP4;
        if (w[i]->cols != K || ((uintptr_t)w[i]->data & 15) || (!nvfp4 && w[i]->format != GPU_BF16)) return false;
        if (nvfp4 &&
            ((w[i]->act != GPU_ACT_FP4 && w[i]->act != GPU_ACT_INT8) || (act != GPU_ACT_FLOAT && act != w[i]->act)))
            return false;
        if (nvfp4) act = w[i]->act;
        a.m[i].data = w[i]->data;
        a.m[i].scales = w[i]->scales;
        a.m[i].y = y[i];
        a.m[i].s2 = w[i]->scale_2;
        a.m[i].g = w[i]->input_scale;
        a.m[i].rows = w[i]->rows;
        a.m[i].nvfp4 = nvfp4;
    }
    a.n = n;
    a.x = x;
    a.norm = norm;
    a.h = h;
    a.eps = eps;
    a.rows = rows;
    if (rows == 1)
        group<1, 2>(g, &a, act);
    else if (rows == 2)
        group<2, 2>(g, &a, act);
    else
        group<4, 2>(g, &a, act);
    return true;
}

bool gpu_norm_linears(gpu *g, float *const *y, const gpu_mat *const *w, int n, const float *x, const float *norm,
                      float eps, int rows) {
    return norm_group(g, y, w, n, x, norm, eps, rows, NULL);
}

/* ---- a gated norm, then one matrix, added ---- */

/* Sixteen warps: what every block does for itself, norm and quantization, is shared by more. */
enum { GATED_K = 4096, GATED_IT = 4, DIM = 128, GATED_WARPS = 16, GATED_THREADS = 32 * GATED_WARPS };

typedef struct gated_args {
    float *x;
    const float *in, *z, *norm;
    gpu_mat w;
    float eps;
    int rows;
} gated_args;

template <int R, int M, gpu_act ACT>
static __global__ void __launch_bounds__(GATED_THREADS) gated_kernel(gated_args a) {
    extern __shared__ __align__(16) char mem[];
    enum { BYTES = GATED_K + GATED_K / 2, EACH = DIM / 32 };
    float *xs = (float *)mem;
    char *act = mem + GATED_K * sizeof(float);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = (int)blockIdx.y * M;
    const int first = ((int)blockIdx.x * GATED_WARPS + warp) * R;
    weights<GATED_IT> own[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t n = first + r < a.w.rows ? first + r : a.w.rows - 1;
        load_row<32, GATED_IT>(&own[r], (const uint8_t *)a.w.data + n * (GATED_K / 2), a.w.scales + n * (GATED_K / 16),
                               lane);
    }
    float nw[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) nw[i] = a.norm[i * 32 + lane];
    wait_for_inputs();
    float factor[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int64_t row = (int64_t)(m0 + m < a.rows ? m0 + m : a.rows - 1) * GATED_K;
        if (m > 0) __syncthreads();
#pragma unroll
        for (int i8 = 0; i8 < GATED_K / DIM / GATED_WARPS; i8++) { /* all loads first */
            const int h = i8 * GATED_WARPS + warp;
            float e[EACH], z[EACH], l = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                e[i] = a.in[row + h * DIM + i * 32 + lane];
                z[i] = a.z[row + h * DIM + i * 32 + lane];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) l = fmaf(e[i], e[i], l);
            const float r = 1.0f / sqrtf(tree32(l) / (float)DIM + a.eps);
#pragma unroll
            for (int i = 0; i < EACH; i++) xs[h * DIM + i * 32 + lane] = e[i] * r * nw[i] * num_silu_inline(z[i]);
        }
        __syncthreads();
        factor[m] = quantize<ACT>(act + m * BYTES, xs, GATED_K, a.w.input_scale);
    }
    int64_t sum[R][M] = {};
    dot_rows<32, GATED_IT, R, M>(sum, own, act, BYTES, GATED_K, lane);
    const int64_t total = sum_many<R * M, 32>(&sum[0][0]);
    const int at = lane / (32 / (R * M)), n = first + at / M, m = at % M;
    float f = factor[0];
#pragma unroll
    for (int i = 1; i < M; i++) f = m == i ? factor[i] : f;
    if (lane % (32 / (R * M)) == 0 && n < a.w.rows && m0 + m < a.rows) {
        float *to = a.x + (int64_t)(m0 + m) * a.w.rows + n;
        *to = *to + finish_int(total, f, ACT, a.w.scale_2, a.w.input_scale);
    }
}

template <int M> static void gated(gpu *g, const gated_args &a) {
    const dim3 grid(blocks_of(a.w.rows, GATED_WARPS), blocks_of(a.rows, M));
    const size_t smem = GATED_K * sizeof(float) + M * (GATED_K + GATED_K / 2);
    if (a.w.act == GPU_ACT_INT8)
        launch(g, gated_kernel<1, M, GPU_ACT_INT8>, grid, GATED_THREADS, smem, a);
    else
        launch(g, gated_kernel<1, M, GPU_ACT_FP4>, grid, GATED_THREADS, smem, a);
}

bool gpu_gated_linear_add(gpu *g, float *x, const float *in, const float *z, const float *norm, int heads, int dim,
                          float eps, const gpu_mat *w, int rows) {
    if (w->format != GPU_NVFP4 || (w->act != GPU_ACT_FP4 && w->act != GPU_ACT_INT8) || w->cols != GATED_K ||
        dim != DIM || heads * dim != GATED_K || ((uintptr_t)w->data & 15) || rows > 4)
        return false;
    const gated_args a = { x, in, z, norm, *w, eps, rows };
    if (rows == 1)
        gated<1>(g, a);
    else
        gated<2>(g, a);
    return true;
}
