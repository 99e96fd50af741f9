/* NVFP4 Linears with quantized inputs, rows in checkpoint order. A lane reads 16 bytes: 32 codes, two blocks. */
#include "ops/cuda/fast.cuh"

enum { GEMV_THREADS = 256, GEMV_WARPS = GEMV_THREADS / 32 };

/* Sums over LANES neighbouring lanes of n = 2^k values at once: at the end lane l holds value l / (LANES / n), n <= LANES. */
template <int N, int LANES> static __device__ __forceinline__ int64_t sum_many(int64_t *v) {
    int h = LANES / 2;
#pragma unroll
    for (int n = N; n > 1; n /= 2, h /= 2) {
        const bool upper = threadIdx.x & h;
#pragma unroll
        for (int i = 0; i < n / 2; i++) {
            const int64_t keep = upper ? v[i + n / 2] : v[i], send = upper ? v[i] : v[i + n / 2];
            v[i] = keep + (int64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)send, h);
        }
    }
#pragma unroll
    for (; h >= 1; h /= 2) v[0] += (int64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)v[0], h);
    return v[0];
}

/* What a lane holds of one weight row: IT pieces of 32 codes, LANES * 32 columns apart. */
template <int IT> struct weights {
    uint4 codes[IT];
    uint16_t scales[IT];
};

template <int LANES, int IT>
static __device__ __forceinline__ void load_row(weights<IT> *w, const uint8_t *codes, const uint8_t *scales, int lane) {
#pragma unroll
    for (int i = 0; i < IT; i++) {
        w->codes[i] = __ldcs((const uint4 *)codes + i * LANES + lane);
        w->scales[i] = __ldcs((const uint16_t *)scales + i * LANES + lane);
    }
}

/* sum[r][m] over this lane's pieces. */
template <int LANES, int IT, int R, int M>
static __device__ __forceinline__ void dot_rows(int64_t (*sum)[M], const weights<IT> *w, const char *act, int act_bytes,
                                                int K, int lane) {
#pragma unroll
    for (int i = 0; i < IT; i++) {
        const int at = 32 * (i * LANES + lane);
        uint4 x[M][2];
        int4 block[M]; /* scale, start of both blocks */
#pragma unroll
        for (int m = 0; m < M; m++) {
            const char *row = act + m * act_bytes;
            x[m][0] = *(const uint4 *)(row + code_at(at));
            x[m][1] = *(const uint4 *)(row + code_at(at + 16));
            block[m] = *(const int4 *)(act_blocks((void *)row, K) + at / 16);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            const uint4 c = w[r].codes[i];
            const codes8 c0 = decode8(c.x), c1 = decode8(c.y), c2 = decode8(c.z), c3 = decode8(c.w);
            const int ws0 = e4m3_times_512((uint8_t)w[r].scales[i]), ws1 = e4m3_times_512((uint8_t)(w[r].scales[i] >> 8));
#pragma unroll
            for (int m = 0; m < M; m++) {
                const int d0 = dot8(c1, x[m][0].z, x[m][0].w, dot8(c0, x[m][0].x, x[m][0].y, block[m].y));
                const int d1 = dot8(c3, x[m][1].z, x[m][1].w, dot8(c2, x[m][1].x, x[m][1].y, block[m].w));
                sum[r][m] += (int64_t)(d0 * block[m].x) * ws0; /* below 2^31 in either mode */
                sum[r][m] += (int64_t)(d1 * block[m].z) * ws1;
            }
        }
    }
}

template <gpu_act ACT> static __device__ __forceinline__ float quantize(void *row, const float *x, int K, float g) {
    if (ACT == GPU_ACT_INT8) return quantize_int8(row, x, K);
    return quantize_fp4(row, x, K, g) ? quiet_nan() : 1.0f;
}

/* Each warp R rows (times 32 / LANES) of the matrix against M rows of inputs. */
template <int LANES, int IT, int R, int M, gpu_act ACT>
static __global__ void __launch_bounds__(GEMV_THREADS)
    gemv_kernel(float *y, int64_t ldy, const float *x, int64_t ldx, gpu_mat w, int rows) {
    extern __shared__ __align__(16) char act[];
    enum { K = LANES * IT * 32, GROUPS = 32 / LANES, PER_WARP = R * GROUPS };
    dependents_may_start();
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
    if (lane % (LANES / (R * M)) == 0 && n < w.rows && m0 + m < rows)
        y[(m0 + m) * ldy + n] = finish_int(total, f, ACT, w.scale_2, w.input_scale);
}

template <int LANES, int IT, gpu_act ACT>
static void gemv(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    enum { K = LANES * IT * 32, GROUPS = 32 / LANES };
    const size_t one = (size_t)act_row_bytes(K, ACT);
    /* Few rows of the matrix: spread them over more blocks. */
    const bool few = w->rows < 4 * GEMV_WARPS * GROUPS * 2 * g->multiprocessors / 2;
    if (rows == 1 && few)
        launch(g, gemv_kernel<LANES, IT, 1, 1, ACT>, dim3(blocks_of(w->rows, GEMV_WARPS * GROUPS)), GEMV_THREADS, one, y,
               ldy, x, ldx, *w, rows);
    else if (rows == 1)
        launch(g, gemv_kernel<LANES, IT, 4, 1, ACT>, dim3(blocks_of(w->rows, 4 * GEMV_WARPS * GROUPS)), GEMV_THREADS, one,
               y, ldy, x, ldx, *w, rows);
    else if (rows == 2)
        launch(g, gemv_kernel<LANES, IT, 2, 2, ACT>, dim3(blocks_of(w->rows, 2 * GEMV_WARPS * GROUPS)), GEMV_THREADS,
               2 * one, y, ldy, x, ldx, *w, rows);
    else
        launch(g, gemv_kernel<LANES, IT, 2, 4, ACT>,
               dim3(blocks_of(w->rows, 2 * GEMV_WARPS * GROUPS), blocks_of(rows, 4)), GEMV_THREADS, 4 * one, y, ldy, x,
               ldx, *w, rows);
}

template <int LANES, int IT>
static void gemv_mode(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    if (w->act == GPU_ACT_INT8)
        gemv<LANES, IT, GPU_ACT_INT8>(g, y, ldy, x, ldx, w, rows);
    else
        gemv<LANES, IT, GPU_ACT_FP4>(g, y, ldy, x, ldx, w, rows);
}

static bool aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

bool fast_linear(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    if (w->format != GPU_NVFP4) return fast_plain(g, y, ldy, x, ldx, w, rows);
    if (w->act != GPU_ACT_FP4 && w->act != GPU_ACT_INT8) return false;
    if (!aligned16(w->data)) return false;
    switch (w->cols) {
    case 512: gemv_mode<16, 1>(g, y, ldy, x, ldx, w, rows); return true;
    case 1024: gemv_mode<32, 1>(g, y, ldy, x, ldx, w, rows); return true;
    case 2048: gemv_mode<32, 2>(g, y, ldy, x, ldx, w, rows); return true;
    case 4096: gemv_mode<32, 4>(g, y, ldy, x, ldx, w, rows); return true;
    default: return false;
    }
}

/* ---- experts ---- */

/* Gate and up rows of one expert and row of inputs, two of each per warp. */
template <int IT, gpu_act ACT>
static __global__ void __launch_bounds__(GEMV_THREADS)
    moe_in_fast(float *hidden, const float *x, gpu_experts ex, const int32_t *idx, int k) {
    extern __shared__ __align__(16) char act[];
    enum { K = 32 * IT * 32, R = 2 };
    dependents_may_start();
    wait_for_inputs();
    const int pair = (int)blockIdx.y, e = idx[pair], lane = threadIdx.x % 32;
    const int first = ((int)blockIdx.x * GEMV_WARPS + (int)threadIdx.x / 32) * R;
    const uint8_t *at = ex.block + (int64_t)e * ex.stride;
    weights<IT> own[2 * R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t n = first + r;
        load_row<32, IT>(&own[r], at + n * (K / 2), at + ex.gate_scales + n * (K / 16), lane);
        load_row<32, IT>(&own[R + r], at + ex.up_codes + n * (K / 2), at + ex.up_scales + n * (K / 16), lane);
    }
    const float gate_s2 = ex.gate[e].scale_2, up_s2 = ex.up[e].scale_2, g = ex.gate[e].input_scale;
    const float factor = quantize<ACT>(act, x + (int64_t)(pair / k) * K, K, g);
    int64_t sum[2 * R][1] = {};
    dot_rows<32, IT, 2 * R, 1>(sum, own, act, 0, K, lane);
    const int64_t total = sum_many<2 * R, 32>(&sum[0][0]);
    const float v = finish_int(total, factor, ACT, lane < 16 ? gate_s2 : up_s2, g);
    const float up = __shfl_xor_sync(0xffffffffu, v, 16);
    if (lane == 0 || lane == 8) hidden[(int64_t)pair * ex.inter + first + lane / 8] = num_silu_inline(v) * up;
}

/* Outputs of one row: the experts' down projections (half a warp each), weighted and summed in the order of idx. */
enum { DOWN_K = 512, DOWN_MOST = 16 };
template <gpu_act ACT, int TOP>
static __global__ void __launch_bounds__(GEMV_THREADS)
    moe_down_fast(float *y, const float *hidden, gpu_experts ex, const int32_t *idx, const float *wt) {
    extern __shared__ __align__(16) char act[];
    enum { R = 2, K = DOWN_K, BYTES = K + K / 2, PAIRS = TOP / 2 };
    __shared__ float factors[TOP];
    dependents_may_start();
    wait_for_inputs();
    const int r0 = (int)blockIdx.y, lane = threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    const int first = ((int)blockIdx.x * GEMV_WARPS + (int)threadIdx.x / 32) * R;
    weights<1> own[PAIRS][R];
    float s2[PAIRS], g[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int e = idx[r0 * TOP + 2 * j + half];
        const uint8_t *at = ex.block + (int64_t)e * ex.stride;
#pragma unroll
        for (int r = 0; r < R; r++)
            load_row<16, 1>(&own[j][r], at + ex.down_codes + (int64_t)(first + r) * (K / 2),
                            at + ex.down_scales + (int64_t)(first + r) * (K / 16), lane);
        s2[j] = ex.down[e].scale_2;
        g[j] = ex.down[e].input_scale;
    }
    for (int j = 0; j < TOP; j++) {
        const float f = quantize<ACT>(act + j * BYTES, hidden + (int64_t)(r0 * TOP + j) * K, K,
                                      ex.down[idx[r0 * TOP + j]].input_scale);
        if (threadIdx.x == 0) factors[j] = f;
    }
    __syncthreads();
    float z[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        int64_t sum[R][1] = {};
        dot_rows<16, 1, R, 1>(sum, own[j], act + (2 * j + half) * BYTES, 0, K, lane);
        const int64_t total = sum_many<R, 16>(&sum[0][0]); /* lanes 0..7: row 0, 8..15: row 1 */
        z[j] = finish_int(total, factors[2 * j + half], ACT, s2[j], g[j]);
    }
    float out = 0;
#pragma unroll
    for (int j = 0; j < TOP; j++) {
        const float mine = z[j / 2], v = __shfl_sync(0xffffffffu, mine, lane + j % 2 * 16);
        out = out + wt[r0 * TOP + j] * v;
    }
    if (half == 0 && lane % 8 == 0) y[(int64_t)r0 * ex.hidden + first + lane / 8] = out;
}

template <int IT, gpu_act IN>
static void moe_in_mode(gpu *g, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx, int pairs,
                        int k) {
    launch(g, moe_in_fast<IT, IN>, dim3((unsigned)ex->inter / (2 * GEMV_WARPS), (unsigned)pairs), GEMV_THREADS,
           (size_t)act_row_bytes(1024 * IT, IN), hidden, x, *ex, idx, k);
}

static bool moe_in(gpu *g, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx, int pairs, int k) {
    const gpu_mat *w = &ex->like_in;
    if (w->format != GPU_NVFP4 || !ex->uniform || !ex->same_in || ex->inter % (2 * GEMV_WARPS)) return false;
    if (w->act != GPU_ACT_FP4 && w->act != GPU_ACT_INT8) return false;
    const bool int8 = w->act == GPU_ACT_INT8;
    if (ex->hidden == 2048)
        int8 ? moe_in_mode<2, GPU_ACT_INT8>(g, hidden, x, ex, idx, pairs, k)
             : moe_in_mode<2, GPU_ACT_FP4>(g, hidden, x, ex, idx, pairs, k);
    else if (ex->hidden == 1024)
        int8 ? moe_in_mode<1, GPU_ACT_INT8>(g, hidden, x, ex, idx, pairs, k)
             : moe_in_mode<1, GPU_ACT_FP4>(g, hidden, x, ex, idx, pairs, k);
    else
        return false;
    return true;
}

static bool moe_down(gpu *g, float *y, const float *hidden, const gpu_experts *ex, const int32_t *idx, const float *wt,
                     int rows, int k) {
    const gpu_mat *w = &ex->like_down;
    if (w->format != GPU_NVFP4 || !ex->uniform || ex->inter != DOWN_K || ex->hidden % (2 * GEMV_WARPS) || k != 8)
        return false;
    const dim3 grid((unsigned)ex->hidden / (2 * GEMV_WARPS), (unsigned)rows);
    const size_t bytes = (size_t)k * (DOWN_K + DOWN_K / 2);
    if (w->act == GPU_ACT_FP4)
        launch(g, moe_down_fast<GPU_ACT_FP4, 8>, grid, GEMV_THREADS, bytes, y, hidden, *ex, idx, wt);
    else if (w->act == GPU_ACT_INT8)
        launch(g, moe_down_fast<GPU_ACT_INT8, 8>, grid, GEMV_THREADS, bytes, y, hidden, *ex, idx, wt);
    else
        return false;
    return true;
}

bool fast_moe_in(gpu *g, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx, int pairs, int k) {
    return moe_in(g, hidden, x, ex, idx, pairs, k);
}
bool fast_moe_down(gpu *g, float *y, const float *hidden, const gpu_experts *ex, const int32_t *idx, const float *wt,
                   int rows, int k) {
    return moe_down(g, y, hidden, ex, idx, wt, rows, k);
}
