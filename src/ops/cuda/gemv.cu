/* NVFP4 Linears with quantized inputs, rows in checkpoint order. A lane reads 16 bytes: 32 codes, two blocks. */
#include "ops/cuda/gemv.cuh"
#include "ops/cuda/many.cuh"

/* Each warp R rows (times 32 / LANES) of the matrix against M rows of inputs. */
template <int LANES, int IT, int R, int M, gpu_act ACT>
static __global__ void __launch_bounds__(GEMV_THREADS)
    gemv_kernel(float *y, int64_t ldy, const float *x, int64_t ldx, gpu_mat w, int rows, bool add) {
    extern __shared__ __align__(16) char act[];
    enum { K = LANES * IT * 32, GROUPS = 32 / LANES, PER_WARP = R * GROUPS };
    const int lane = threadIdx.x % LANES, group = threadIdx.x % 32 / LANES;
    const int first = ((int)blockIdx.x * GEMV_WARPS + (int)threadIdx.x / 32) * PER_WARP + group * R;
    weights<IT> own[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t n = first + r < w.rows ? first + r : w.rows - 1;
        load_row<LANES, IT>(&own[r], (const uint8_t *)w.data + n * (K / 2), w.scales + n * (K / 16), lane);
    }
    wait_for_inputs();
    const int act_bytes = act_row_bytes(K, ACT), m0 = (int)blockIdx.y * M;
    float factor[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int row = m0 + m < rows ? m0 + m : rows - 1;
        factor[m] = quantize<ACT>(act + m * act_bytes, x + row * ldx, K, w.input_scale);
    }
    int64_t sum[R][M] = {};
    dot_rows<LANES, IT, R, M>(sum, own, act, act_bytes, K, lane);
    const int64_t total = sum_many<R * M, LANES>(&sum[0][0]);
    const int at = lane / (LANES / (R * M)), n = first + at / M, m = at % M;
    float f = factor[0];
#pragma unroll
    for (int i = 1; i < M; i++) f = m == i ? factor[i] : f;
    if (lane % (LANES / (R * M)) == 0 && n < w.rows && m0 + m < rows) {
        float *to = y + (m0 + m) * ldy + n;
        const float v = finish_int(total, f, ACT, w.scale_2, w.input_scale);
        *to = add ? *to + v : v;
    }
}

template <int LANES, int IT, gpu_act ACT>
static void gemv(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows,
                 bool add) {
    enum { K = LANES * IT * 32, GROUPS = 32 / LANES };
    const size_t one = (size_t)act_row_bytes(K, ACT);
    /* Few rows of the matrix: spread them over more blocks. */
    const bool few = w->rows < 4 * GEMV_WARPS * GROUPS * 2 * g->multiprocessors / 2;
    if (rows == 1 && few)
        launch(g, gemv_kernel<LANES, IT, 1, 1, ACT>, dim3(blocks_of(w->rows, GEMV_WARPS * GROUPS)), GEMV_THREADS, one, y,
               ldy, x, ldx, *w, rows, add);
    else if (rows == 1)
        launch(g, gemv_kernel<LANES, IT, 4, 1, ACT>, dim3(blocks_of(w->rows, 4 * GEMV_WARPS * GROUPS)), GEMV_THREADS, one,
               y, ldy, x, ldx, *w, rows, add);
    else if (rows == 2)
        launch(g, gemv_kernel<LANES, IT, 2, 2, ACT>, dim3(blocks_of(w->rows, 2 * GEMV_WARPS * GROUPS)), GEMV_THREADS,
               2 * one, y, ldy, x, ldx, *w, rows, add);
    else
        launch(g, gemv_kernel<LANES, IT, 2, 4, ACT>,
               dim3(blocks_of(w->rows, 2 * GEMV_WARPS * GROUPS), blocks_of(rows, 4)), GEMV_THREADS, 4 * one, y, ldy, x,
               ldx, *w, rows, add);
}

template <int LANES, int IT>
static void gemv_mode(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows, bool add) {
    if (w->act == GPU_ACT_INT8)
        gemv<LANES, IT, GPU_ACT_INT8>(g, y, ldy, x, ldx, w, rows, add);
    else
        gemv<LANES, IT, GPU_ACT_FP4>(g, y, ldy, x, ldx, w, rows, add);
}

static bool aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

bool fast_nvfp4(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows, bool add) {
    if (w->format != GPU_NVFP4 || (w->act != GPU_ACT_FP4 && w->act != GPU_ACT_INT8) || !aligned16(w->data)) return false;
    switch (w->cols) {
    case 512: gemv_mode<16, 1>(g, y, ldy, x, ldx, w, rows, add); return true;
    case 1024: gemv_mode<32, 1>(g, y, ldy, x, ldx, w, rows, add); return true;
    case 2048: gemv_mode<32, 2>(g, y, ldy, x, ldx, w, rows, add); return true;
    case 4096: gemv_mode<32, 4>(g, y, ldy, x, ldx, w, rows, add); return true;
    default: return false;
    }
}

bool gpu_linear_add(gpu *g, float *y, const float *x, const gpu_mat *w, int rows) {
    return many_nvfp4(g, y, w->rows, x, w->cols, w, rows, true) || fast_nvfp4(g, y, w->rows, x, w->cols, w, rows, true);
}
