/* NVFP4 experts of the usual shapes: gate and up, then down and the weighted sum; for few rows the whole block around them. */
#include "ops/cuda/gemv.cuh"
#include "ops/cuda/norm.cuh"

enum { TOP = 8, DOWN_K = 512, DOWN_BYTES = DOWN_K + DOWN_K / 2, MOST_EXPERTS = 256 };

/* ---- gate and up ---- */

/* Two gate and two up rows per warp: where an expert's rows lie. */
typedef struct in_rows {
    const uint8_t *gate, *gate_scales, *up, *up_scales;
    float gate_s2, up_s2, g;
} in_rows;

static __device__ __forceinline__ in_rows rows_of(const gpu_experts &ex, int e) {
    const uint8_t *at = ex.block + (int64_t)e * ex.stride;
    const in_rows r = { at,
                        at + ex.gate_scales,
                        at + ex.up_codes,
                        at + ex.up_scales,
                        ex.gate[e].scale_2,
                        ex.up[e].scale_2,
                        ex.gate[e].input_scale };
    return r;
}

enum { IN_R = 2 };
template <int IT>
static __device__ __forceinline__ void load_in(weights<IT> *own, const in_rows &p, int first, int K, int lane) {
#pragma unroll
    for (int r = 0; r < IN_R; r++) {
        const int64_t n = first + r;
        load_row<32, IT>(&own[r], p.gate + n * (K / 2), p.gate_scales + n * (K / 16), lane);
        load_row<32, IT>(&own[IN_R + r], p.up + n * (K / 2), p.up_scales + n * (K / 16), lane);
    }
}

template <int IT, gpu_act ACT>
static __device__ __forceinline__ void finish_in(float *hidden, const weights<IT> *own, const in_rows &p,
                                                 const char *act, float factor, int first, int K, int lane) {
    int64_t sum[2 * IN_R][1] = {};
    dot_rows<32, IT, 2 * IN_R, 1>(sum, own, act, 0, K, lane);
    const int64_t total = sum_many<2 * IN_R, 32>(&sum[0][0]);
    const float v = finish_int(total, factor, ACT, lane < 16 ? p.gate_s2 : p.up_s2, p.g);
    const float up = __shfl_xor_sync(0xffffffffu, v, 16);
    if (lane == 0 || lane == 8) hidden[first + lane / 8] = num_silu_inline(v) * up;
}

template <int IT, gpu_act ACT>
static __global__ void __launch_bounds__(GEMV_THREADS)
    moe_in_fast(float *hidden, const float *x, gpu_experts ex, const int32_t *idx, int k) {
    extern __shared__ __align__(16) char act[];
    enum { K = 32 * IT * 32 };
    wait_for_inputs();
    const int pair = (int)blockIdx.y, lane = threadIdx.x % 32;
    const int first = ((int)blockIdx.x * GEMV_WARPS + (int)threadIdx.x / 32) * IN_R;
    const in_rows p = rows_of(ex, idx[pair]);
    weights<IT> own[2 * IN_R];
    load_in<IT>(own, p, first, K, lane);
    const float factor = quantize<ACT>(act, x + (int64_t)(pair / k) * K, K, p.g);
    finish_in<IT, ACT>(hidden + (int64_t)pair * ex.inter, own, p, act, factor, first, K, lane);
}

/* ---- down: sixteen warps, which share the quantization that every block does for itself ---- */

enum { DOWN_WARPS = 16, DOWN_THREADS = 32 * DOWN_WARPS, DOWN_R = 1 };

/* N rows of hidden [N, 512] under their scales g (shared memory, filled by the first N threads just before); factors[j] becomes
 * what quantize_row would return. */
template <gpu_act ACT, int N>
static __device__ __forceinline__ void quantize_hidden(char *act, float *factors, const float *hidden, const float *g) {
    if constexpr (ACT == GPU_ACT_INT8) {
        __syncthreads();
        for (int j = 0; j < N; j++) {
            const float f = quantize_int8(act + j * DOWN_BYTES, hidden + j * DOWN_K, DOWN_K);
            if (threadIdx.x == 0) factors[j] = f;
        }
        __syncthreads();
    } else {
        enum { UNITS = N * (DOWN_K / 8), ROUNDS = (UNITS + DOWN_THREADS - 1) / DOWN_THREADS };
        float v[ROUNDS][8];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) load8(v[i], hidden, 8 * (i * DOWN_THREADS + (int)threadIdx.x), N * DOWN_K);
        if ((int)threadIdx.x < N) factors[threadIdx.x] = 1.0f;
        __syncthreads();
        /* A warp's 32 half blocks lie in one row. */
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const int u = i * DOWN_THREADS + (int)threadIdx.x, j = u / (DOWN_K / 8), at = u % (DOWN_K / 8) * 8;
            if (u < UNITS && fp4_half_block(act + j * DOWN_BYTES, v[i], at, DOWN_K, g[j])) factors[j] = quiet_nan();
        }
        __syncthreads();
    }
}

/* What down needs to know of one chosen expert: written where the experts were chosen, so that no chain of reads is left. */
typedef struct __align__(16) choice {
    int32_t expert;
    float weight, g, s2;
}
choice;

typedef struct down_args {
    float *y;             /* SHARED: the residual, advanced in place */
    const choice *chosen; /* SHARED: [rows][TOP]; else idx and wt */
    const float *hidden;
    gpu_experts ex;
    const int32_t *idx;
    const float *wt;
    gpu_mat shared;           /* SHARED: its hidden row stands behind the experts' */
    const float *shared_gate; /* logit of row r at r * gate_ld */
    int gate_ld;
} down_args;

/* Outputs of one row, one per warp: the experts' down projections, half a warp each, weighted and summed in the order of idx. */
template <gpu_act ACT, bool SHARED> static __global__ void __launch_bounds__(DOWN_THREADS) moe_down_fast(down_args a) {
    enum { R = DOWN_R, K = DOWN_K, PAIRS = TOP / 2, ALL = TOP + (SHARED ? 1 : 0) };
    __shared__ __align__(16) char act[ALL * DOWN_BYTES];
    __shared__ float factors[ALL], g[ALL], s2[ALL];
    const int r0 = (int)blockIdx.y, lane = threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    const int first = ((int)blockIdx.x * DOWN_WARPS + (int)threadIdx.x / 32) * R;
    __shared__ float weight[TOP];
    weights<1> own[PAIRS][R], shared[R];
    if (SHARED)
#pragma unroll
        for (int r = 0; r < R; r++)
            load_row<16, 1>(&shared[r], (const uint8_t *)a.shared.data + (int64_t)(first + r) * (K / 2),
                            a.shared.scales + (int64_t)(first + r) * (K / 16), lane);
    wait_for_inputs();
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = r0 * TOP + 2 * j + half;
        const uint8_t *at = a.ex.block + (int64_t)(SHARED ? a.chosen[i].expert : a.idx[i]) * a.ex.stride;
#pragma unroll
        for (int r = 0; r < R; r++)
            load_row<16, 1>(&own[j][r], at + a.ex.down_codes + (int64_t)(first + r) * (K / 2),
                            at + a.ex.down_scales + (int64_t)(first + r) * (K / 16), lane);
    }
    if (threadIdx.x < TOP) {
        const int i = r0 * TOP + (int)threadIdx.x;
        if (SHARED) {
            const choice c = a.chosen[i];
            g[threadIdx.x] = c.g, s2[threadIdx.x] = c.s2, weight[threadIdx.x] = c.weight;
        } else {
            const gpu_mat *m = &a.ex.down[a.idx[i]];
            g[threadIdx.x] = m->input_scale, s2[threadIdx.x] = m->scale_2, weight[threadIdx.x] = a.wt[i];
        }
    }
    if (SHARED && threadIdx.x == TOP) g[TOP] = a.shared.input_scale, s2[TOP] = a.shared.scale_2;
    quantize_hidden<ACT, ALL>(act, factors, a.hidden + (int64_t)r0 * ALL * K, g);
    float z[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int e = 2 * j + half;
        int64_t sum[R][1] = {};
        dot_rows<16, 1, R, 1>(sum, own[j], act + e * DOWN_BYTES, 0, K, lane);
        const int64_t total = sum_many<R, 16>(&sum[0][0]);
        z[j] = finish_int(total, factors[e], ACT, s2[e], g[e]);
    }
    float out = 0;
#pragma unroll
    for (int j = 0; j < TOP; j++) {
        const float mine = z[j / 2], v = __shfl_sync(0xffffffffu, mine, lane + j % 2 * 16);
        out = out + weight[j] * v;
    }
    float *to = a.y + (int64_t)r0 * a.ex.hidden + first + lane / (16 / R);
    if (SHARED) {
        int64_t sum[R][1] = {};
        dot_rows<16, 1, R, 1>(sum, shared, act + TOP * DOWN_BYTES, 0, K, lane);
        const float v = finish_int(sum_many<R, 16>(&sum[0][0]), factors[ALL - 1], ACT, s2[ALL - 1], g[ALL - 1]);
        out = *to + (out + num_sigmoid_inline(a.shared_gate[r0 * a.gate_ld]) * v);
    }
    if (half == 0 && lane % (16 / R) == 0) *to = out;
}

/* ---- the ops ---- */

static bool int_mode(const gpu_mat *w) {
    return w->format == GPU_NVFP4 && (w->act == GPU_ACT_FP4 || w->act == GPU_ACT_INT8);
}

template <int IT, gpu_act IN>
static void moe_in_mode(gpu *g, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx, int pairs,
                        int k) {
    launch(g, moe_in_fast<IT, IN>, dim3((unsigned)ex->inter / (IN_R * GEMV_WARPS), (unsigned)pairs), GEMV_THREADS,
           (size_t)act_row_bytes(1024 * IT, IN), hidden, x, *ex, idx, k);
}

bool fast_moe_in(gpu *g, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx, int pairs, int k) {
    const gpu_mat *w = &ex->like_in;
    if (!int_mode(w) || !ex->uniform || !ex->same_in || ex->inter % (IN_R * GEMV_WARPS)) return false;
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

static dim3 down_grid(const gpu_experts *ex, int rows) {
    return dim3((unsigned)ex->hidden / (DOWN_R * DOWN_WARPS), (unsigned)rows);
}
static bool down_fits(const gpu_experts *ex, int k) {
    return int_mode(&ex->like_down) && ex->uniform && ex->inter == DOWN_K && ex->hidden % (DOWN_R * DOWN_WARPS) == 0 &&
           k == TOP;
}

bool fast_moe_down(gpu *g, float *y, const float *hidden, const gpu_experts *ex, const int32_t *idx, const float *wt,
                   int rows, int k) {
    if (!down_fits(ex, k)) return false;
    const down_args a = { y, NULL, hidden, *ex, idx, wt, ex->like_down, NULL, 0 };
    if (ex->like_down.act == GPU_ACT_FP4)
        launch(g, moe_down_fast<GPU_ACT_FP4, false>, down_grid(ex, rows), DOWN_THREADS, 0, a);
    else
        launch(g, moe_down_fast<GPU_ACT_INT8, false>, down_grid(ex, rows), DOWN_THREADS, 0, a);
    return true;
}

/* ---- the whole block, few rows ---- */

/* The TOP best of n <= 256 logits by one warp, as route_kernel; in shared memory in the order of the expert index. */
static __device__ void route_warp(int32_t *idx, float *wt, const float *logits, int n) {
    const int lane = threadIdx.x % 32;
    uint32_t key[MOST_EXPERTS / 32]; /* 0: taken or none; a NaN is 1, below every number */
    float v[MOST_EXPERTS / 32];
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / 32; i++) {
        const int e = i * 32 + lane;
        v[i] = e < n ? logits[e] : 0.0f;
        const uint32_t rank = (uint32_t)(rank_key(v[i], 0) >> 32);
        key[i] = e >= n ? 0 : rank ? rank : 1;
    }
    int mine = 0; /* lane j: the expert of place j in the descending order, and its logit */
    float logit = 0;
#pragma unroll
    for (int j = 0; j < TOP; j++) {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < MOST_EXPERTS / 32; i++) top = key[i] > top ? key[i] : top;
        top = __reduce_max_sync(0xffffffffu, top);
        uint32_t at = 0xffffffffu;
        float l = 0;
#pragma unroll
        for (int i = MOST_EXPERTS / 32 - 1; i >= 0; i--)
            if (key[i] == top) at = (uint32_t)(i * 32 + lane), l = v[i];
        const uint32_t best = __reduce_min_sync(0xffffffffu, at);
        l = __shfl_sync(0xffffffffu, l, (int)(best % 32));
        if (lane == j) mine = (int)best, logit = l;
#pragma unroll
        for (int i = 0; i < MOST_EXPERTS / 32; i++)
            if (best == (uint32_t)(i * 32 + lane)) key[i] = 0;
    }
    const float top = __shfl_sync(0xffffffffu, logit, 0), e = num_exp_inline(logit - top);
    float sum = 0;
    int place = 0;
#pragma unroll
    for (int j = 0; j < TOP; j++) {
        sum = sum + __shfl_sync(0xffffffffu, e, j);
        place += __shfl_sync(0xffffffffu, mine, j) < mine;
    }
    if (lane < TOP) {
        idx[place] = mine;
        wt[place] = e / sum;
    }
}

typedef struct block_args {
    float *hidden; /* [rows * 9, 512] */
    const float *h, *logits;
    int ld_logits;
    choice *out; /* [rows][TOP] */
    gpu_experts ex;
    gpu_mat gate, up; /* of the shared expert, which comes last */
} block_args;

/* Experts are chosen by every block for itself: by its last warp, while the others quantize when all experts have one
 * input_scale. */
enum { IN_ALL_THREADS = GEMV_THREADS + 32 };
template <gpu_act ACT> static __global__ void __launch_bounds__(IN_ALL_THREADS, 3) moe_in_all(block_args a) {
    enum { IT = 2, K = 2048 };
    __shared__ __align__(16) char act[K + K / 2];
    __shared__ int32_t chosen[TOP];
    __shared__ float weight[TOP];
    const int r = (int)blockIdx.y / (TOP + 1), j = (int)blockIdx.y % (TOP + 1), lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, first = ((int)blockIdx.x * GEMV_WARPS + warp) * IN_R;
    const float *in = a.h + (int64_t)r * K;
    weights<IT> own[2 * IN_R];
    in_rows p = { (const uint8_t *)a.gate.data,
                  a.gate.scales,
                  (const uint8_t *)a.up.data,
                  a.up.scales,
                  a.gate.scale_2,
                  a.up.scale_2,
                  a.gate.input_scale };
    if (j == TOP && warp < GEMV_WARPS) load_in<IT>(own, p, first, K, lane);
    wait_for_inputs();
    float factor;
    if (j == TOP) {
        factor = quantize<ACT>(act, in, K, p.g);
    } else {
        if (warp == GEMV_WARPS) route_warp(chosen, weight, a.logits + r * a.ld_logits, a.ex.count);
        if (a.ex.one_in_scale) {
            factor = quantize<ACT>(act, in, K, a.ex.like_in.input_scale);
            p = rows_of(a.ex, chosen[j]);
            if (warp < GEMV_WARPS) load_in<IT>(own, p, first, K, lane);
        } else {
            __syncthreads();
            p = rows_of(a.ex, chosen[j]);
            if (warp < GEMV_WARPS) load_in<IT>(own, p, first, K, lane);
            factor = quantize<ACT>(act, in, K, p.g);
        }
    }
    if (warp < GEMV_WARPS) {
        finish_in<IT, ACT>(a.hidden + (int64_t)blockIdx.y * a.ex.inter, own, p, act, factor, first, K, lane);
    } else if (blockIdx.x == 0 && j < TOP && lane == 0) {
        const gpu_mat *m = &a.ex.down[chosen[j]];
        const choice c = { chosen[j], weight[j], m->input_scale, m->scale_2 };
        a.out[r * TOP + j] = c;
    }
}

static bool same_mode(const gpu_mat *a, const gpu_mat *b) {
    return a->format == b->format && a->act == b->act && a->input_scale == b->input_scale;
}

static bool block_fits(const gpu_moe_block *b, int rows) {
    const gpu_experts *ex = &b->ex;
    return rows <= 4 && down_fits(ex, b->k) && int_mode(&ex->like_in) && ex->like_in.act == ex->like_down.act &&
           ex->same_in && ex->hidden == 2048 && ex->count <= MOST_EXPERTS && b->gate.rows == DOWN_K &&
           same_mode(&b->gate, &b->up) && b->gate.format == GPU_NVFP4 && b->gate.act == ex->like_in.act &&
           b->down.format == GPU_NVFP4 && b->down.act == ex->like_down.act && b->router.format == GPU_BF16 &&
           b->shared_gate.format == GPU_BF16 && b->shared_gate.rows == 1;
}

bool gpu_moe_all(gpu *g, float *x, const gpu_moe_block *b, int rows) {
    if (!block_fits(b, rows)) return false;
    const int n = b->ex.count;
    /* h [rows, 2048], logits [rows, n], shared gate [rows], choices [rows, 8], hidden [9 rows, 512] */
    const int pairs = rows * (TOP + 1), n4 = (n + 3) / 4 * 4;
    float *h = (float *)gpu_work(g, GPU_WORK_A, (size_t)(rows * (2048 + n4 + 64 + 4 * TOP) + pairs * DOWN_K) * 4);
    if (!h) return true;
    float *logits = h + rows * 2048, *gate = logits + rows * n4;
    choice *chosen = (choice *)(gate + rows * 64);
    float *hidden = (float *)(chosen + rows * TOP);
    float *const outs[2] = { logits, gate };
    const gpu_mat *const mats[2] = { &b->router, &b->shared_gate };
    if (!norm_group(g, outs, mats, 2, x, b->norm, b->eps, rows, h)) return false;
    const block_args in = { hidden, h, logits, n, chosen, b->ex, b->gate, b->up };
    const dim3 in_grid(DOWN_K / (IN_R * GEMV_WARPS), (unsigned)pairs);
    const down_args down = { x, chosen, hidden, b->ex, NULL, NULL, b->down, gate, 1 };
    if (b->gate.act == GPU_ACT_FP4) {
        launch(g, moe_in_all<GPU_ACT_FP4>, in_grid, IN_ALL_THREADS, 0, in);
        launch(g, moe_down_fast<GPU_ACT_FP4, true>, down_grid(&b->ex, rows), DOWN_THREADS, 0, down);
    } else {
        launch(g, moe_in_all<GPU_ACT_INT8>, in_grid, IN_ALL_THREADS, 0, in);
        launch(g, moe_down_fast<GPU_ACT_INT8, true>, down_grid(&b->ex, rows), DOWN_THREADS, 0, down);
    }
    return true;
}
