/* Linears and experts of every format, shape and mode: one warp per output row. The fast kernels stand in gemv.cu. */
#include "ops/cuda/many.cuh"

/* ---- any matrix ---- */

enum { WARPS = 8, ROWS_PER_WARP = 4, ROWS_PER_BLOCK = WARPS * ROWS_PER_WARP };

static __global__ void linear_kernel(float *y, int64_t ldy, const float *x, int64_t ldx, gpu_mat w) {
    extern __shared__ __align__(16) char row[];
    wait_for_inputs();
    const float factor = quantize_row(row, x + blockIdx.y * ldx, w.cols, &w);
    for (int i = 0; i < ROWS_PER_WARP; i++) {
        const int n = (int)blockIdx.x * ROWS_PER_BLOCK + i * WARPS + (int)threadIdx.x / 32;
        if (n >= w.rows) return;
        const float v = warp_row(&w, n, row, factor);
        if (threadIdx.x % 32 == 0) y[blockIdx.y * ldy + n] = v;
    }
}

void gpu_linear(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    if (many_nvfp4(g, y, ldy, x, ldx, w, rows, false) || many_plain(g, y, ldy, x, ldx, w, rows) ||
        fast_nvfp4(g, y, ldy, x, ldx, w, rows, false) || fast_plain(g, y, ldy, x, ldx, w, rows)) return;
    launch(g, linear_kernel, dim3(blocks_of(w->rows, ROWS_PER_BLOCK), (unsigned)rows), 32 * WARPS,
           (size_t)act_row_bytes(w->cols, w->act), y, ldy, x, ldx, *w);
}

static __global__ void some_kernel(float *y, const float *x, int64_t ldx, gpu_mat w, const int32_t *ids,
                                   const int32_t *row_of, const int32_t *finite) {
    extern __shared__ __align__(16) char row[];
    wait_for_inputs();
    const int r = row_of[blockIdx.x];
    const float factor = quantize_row(row, x + r * ldx, w.cols, &w), v = warp_row(&w, ids[blockIdx.x], row, factor);
    if (threadIdx.x == 0) y[blockIdx.x] = finite[r] ? v : quiet_nan();
}

void gpu_linear_some(gpu *g, float *y, const float *x, int64_t ldx, const gpu_mat *w, const int32_t *ids,
                     const int32_t *row_of, int n, const int32_t *finite) {
    launch(g, some_kernel, dim3((unsigned)n), 32, (size_t)act_row_bytes(w->cols, w->act), y, x, ldx, *w, ids, row_of,
           finite);
}

/* ---- any experts ---- */

static __global__ void moe_in_kernel(float *hidden, const float *x, gpu_experts ex, const int32_t *idx, int k) {
    extern __shared__ __align__(16) char row[];
    wait_for_inputs();
    const int pair = (int)blockIdx.y, e = idx[pair];
    const float *in = x + (int64_t)(pair / k) * ex.hidden;
    const gpu_mat gate = ex.gate[e], up = ex.up[e];
    float g[ROWS_PER_WARP];
    float factor = quantize_row(row, in, ex.hidden, &gate);
    const int first = (int)blockIdx.x * ROWS_PER_BLOCK + (int)threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < ROWS_PER_WARP; i++) {
        const int n = first + i * WARPS;
        g[i] = n < ex.inter ? warp_row(&gate, n, row, factor) : 0.0f;
    }
    __syncthreads();
    factor = quantize_row(row, in, ex.hidden, &up);
#pragma unroll
    for (int i = 0; i < ROWS_PER_WARP; i++) {
        const int n = first + i * WARPS;
        if (n >= ex.inter) return;
        const float u = warp_row(&up, n, row, factor);
        if (threadIdx.x % 32 == 0) hidden[(int64_t)pair * ex.inter + n] = num_silu_inline(g[i]) * u;
    }
}

/* Outputs of one row; the experts one after the other in the order of idx, which increases. */
static __global__ void moe_down_kernel(float *y, const float *hidden, gpu_experts ex, const int32_t *idx,
                                       const float *wt, int k) {
    extern __shared__ __align__(16) char row[];
    wait_for_inputs();
    const int r = (int)blockIdx.y, first = (int)blockIdx.x * ROWS_PER_BLOCK + (int)threadIdx.x / 32;
    float acc[ROWS_PER_WARP] = {};
    for (int j = 0; j < k; j++) {
        const int pair = r * k + j;
        const gpu_mat down = ex.down[idx[pair]];
        const float weight = wt[pair];
        __syncthreads();
        const float factor = quantize_row(row, hidden + (int64_t)pair * ex.inter, ex.inter, &down);
#pragma unroll
        for (int i = 0; i < ROWS_PER_WARP; i++) {
            const int n = first + i * WARPS;
            if (n < ex.hidden) acc[i] = acc[i] + weight * warp_row(&down, n, row, factor);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_PER_WARP; i++) {
        const int n = first + i * WARPS;
        if (n < ex.hidden && threadIdx.x % 32 == 0) y[(int64_t)r * ex.hidden + n] = acc[i];
    }
}

void gpu_moe(gpu *g, float *y, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx,
             const float *wt, int rows, int k) {
    if (!hidden) hidden = (float *)gpu_work(g, GPU_WORK_A, (size_t)rows * k * ex->inter * sizeof(float));
    if (!hidden || many_moe(g, y, hidden, x, ex, idx, wt, rows, k)) return;
    if (!fast_moe_in(g, hidden, x, ex, idx, rows * k, k))
        launch(g, moe_in_kernel, dim3(blocks_of(ex->inter, ROWS_PER_BLOCK), (unsigned)(rows * k)), 32 * WARPS,
               (size_t)act_row_bytes(ex->hidden, ex->like_in.act), hidden, x, *ex, idx, k);
    if (!fast_moe_down(g, y, hidden, ex, idx, wt, rows, k))
        launch(g, moe_down_kernel, dim3(blocks_of(ex->hidden, ROWS_PER_BLOCK), (unsigned)rows), 32 * WARPS,
               (size_t)act_row_bytes(ex->inter, ex->like_down.act), y, (const float *)hidden, *ex, idx, wt, k);
}
