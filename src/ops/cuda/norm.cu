/* Several matrices over one normalised input of 2048 values, few rows: every block normalises for itself. */
#include "ops/cuda/gemv.cuh"
#include "ops/cuda/norm.cuh"

enum { K = 2048, IT = 2, MOST = 6, STEPS = K / 32 };

typedef struct group_mat {
    const void *data;
    const uint8_t *scales;
    float *y;
    float s2, g;
    int rows, first_block, nvfp4;
} group_mat;

typedef struct group_args {
    group_mat m[MOST];
    int n;
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

template <int M, int R, gpu_act ACT>
static __global__ void __launch_bounds__(GEMV_THREADS) group_kernel(group_args a) {
    extern __shared__ __align__(16) char mem[];
    float(*xs)[K] = (float(*)[K])mem;
    char *act = mem + M * K * sizeof(float);
    enum { BYTES = K + K / 2 };
    dependents_may_start();
    int which = 0;
#pragma unroll
    for (int i = 1; i < MOST; i++)
        if (i < a.n && (int)blockIdx.x >= a.m[i].first_block) which = i;
    const group_mat w = a.m[which];
    const int block = (int)blockIdx.x - w.first_block, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = w.nvfp4 ? (block * GEMV_WARPS + warp) * R : block * GEMV_WARPS + warp;
    const int64_t last = w.rows - 1;
    weights<IT> own[R];
    uint16_t plain[STEPS];
    if (w.nvfp4) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t n = first + r < last ? first + r : last;
            load_row<32, IT>(&own[r], (const uint8_t *)w.data + n * (K / 2), w.scales + n * (K / 16), lane);
        }
    } else {
        const uint16_t *p = (const uint16_t *)w.data + (first < last ? first : last) * K + lane;
#pragma unroll
        for (int i = 0; i < STEPS; i++) plain[i] = p[i * 32];
    }
    float nw[8];
    load8(nw, a.norm, 8 * (int)threadIdx.x, K);
    wait_for_inputs();
    float v[M][8];
    normalise<M>(v, xs, a, nw);
    if (a.h && blockIdx.x == 0)
#pragma unroll
        for (int m = 0; m < M; m++)
            if (m < a.rows)
#pragma unroll
                for (int i = 0; i < 8; i++) a.h[(int64_t)m * K + 8 * (int)threadIdx.x + i] = v[m][i];
    if (!w.nvfp4) {
        __syncthreads();
        float l[M] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const float e = __uint_as_float((uint32_t)plain[i] << 16);
#pragma unroll
            for (int m = 0; m < M; m++) l[m] = fmaf(xs[m][i * 32 + lane], e, l[m]);
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            const float y = tree32(l[m]);
            if (lane == 0 && first <= last && m < a.rows) w.y[(int64_t)m * w.rows + first] = y;
        }
        return;
    }
    float factor[M];
    if (ACT == GPU_ACT_INT8) __syncthreads();
#pragma unroll
    for (int m = 0; m < M; m++) {
        if (ACT == GPU_ACT_INT8) {
            factor[m] = quantize_int8(act + m * BYTES, xs[m], K);
        } else {
            const bool bad = fp4_half_block(act + m * BYTES, v[m], 8 * (int)threadIdx.x, K, w.g);
            factor[m] = __syncthreads_or(bad) ? quiet_nan() : 1.0f;
        }
    }
    int64_t sum[R][M] = {};
    dot_rows<32, IT, R, M>(sum, own, act, BYTES, K, lane);
    const int64_t total = sum_many<R * M, 32>(&sum[0][0]);
    const int at = lane / (32 / (R * M)), n = first + at / M, m = at % M;
    float f = factor[0];
#pragma unroll
    for (int i = 1; i < M; i++) f = m == i ? factor[i] : f;
    if (lane % (32 / (R * M)) == 0 && n <= last && m < a.rows)
        w.y[(int64_t)m * w.rows + n] = finish_int(total, f, ACT, w.s2, w.g);
}

template <int M, int R> static void group(gpu *g, group_args *a, gpu_act act) {
    int blocks = 0;
    for (int i = 0; i < a->n; i++) {
        a->m[i].first_block = blocks;
        blocks += (int)blocks_of(a->m[i].rows, GEMV_WARPS * (a->m[i].nvfp4 ? R : 1));
    }
    const size_t smem = M * (K * sizeof(float) + K + K / 2);
    if (act == GPU_ACT_INT8)
        launch(g, group_kernel<M, R, GPU_ACT_INT8>, dim3((unsigned)blocks), GEMV_THREADS, smem, *a);
    else
        launch(g, group_kernel<M, R, GPU_ACT_FP4>, dim3((unsigned)blocks), GEMV_THREADS, smem, *a);
}

bool norm_group(gpu *g, float *const *y, const gpu_mat *const *w, int n, const float *x, const float *norm, float eps,
                int rows, float *h) {
    gpu_act act = GPU_ACT_FLOAT;
    group_args a = {};
    if (n > MOST || rows > 4) return false;
    for (int i = 0; i < n; i++) {
        const bool nvfp4 = w[i]->format == GPU_NVFP4;
        if (w[i]->cols != K || ((uintptr_t)w[i]->data & 15) || (!nvfp4 && w[i]->format != GPU_BF16)) return false;
        if (nvfp4 && ((w[i]->act != GPU_ACT_FP4 && w[i]->act != GPU_ACT_INT8) || (act != GPU_ACT_FLOAT && act != w[i]->act)))
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
        group<1, 4>(g, &a, act);
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
