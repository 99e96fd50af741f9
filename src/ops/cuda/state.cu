/* Gated delta net: convolution and recurrence, with commits and pending rows (ops.h). */
#include "ops/cuda/dev.cuh"

/* ---- conv: one thread per channel and span ---- */

enum { MAX_TAPS = 8 };

static __global__ void conv_kernel(float *c, const float *u, const float *w, float *window, float *pending,
                                   int channels, int taps, int max_pending, gpu_spans s) {
    const int ch = (int)(blockIdx.x * blockDim.x + threadIdx.x), keep = taps - 1;
    float in[MAX_TAPS], weight[MAX_TAPS];
    if (ch < channels)
        for (int j = 0; j < taps; j++) weight[j] = w[(int64_t)ch * taps + j];
    wait_for_inputs();
    if (ch >= channels) return;
    const gpu_span span = s.spans[blockIdx.y];
    float *own = window + (int64_t)span.slot * keep * channels + ch;
    float *pend = pending + (int64_t)span.slot * max_pending * channels + ch;
    for (int j = 0; j < keep; j++) in[j] = own[(int64_t)j * channels];
    for (int i = 0; i < span.commit && keep > 0; i++) {
        for (int j = 0; j + 1 < keep; j++) in[j] = in[j + 1];
        in[keep - 1] = pend[(int64_t)i * channels];
    }
    if (span.tentative)
        for (int j = 0; j < keep; j++) own[(int64_t)j * channels] = in[j];
    for (int i = 0; i < span.rows; i++) {
        const int64_t at = (int64_t)(span.row0 + i) * channels + ch;
        float acc = 0;
        in[keep] = u[at];
        for (int j = 0; j < taps; j++) acc = fmaf(weight[j], in[j], acc);
        c[at] = num_silu_inline(acc);
        if (span.tentative) pend[(int64_t)i * channels] = in[keep];
        for (int j = 0; j < keep; j++) in[j] = in[j + 1];
    }
    if (!span.tentative)
        for (int j = 0; j < keep; j++) own[(int64_t)j * channels] = in[j];
}

/* The usual width, in registers. Rows in pieces of CONV_ROWS, blockIdx.z: a later one finds the inputs before its first row in
 * u; the first has the window, commits (tentative spans are shorter than a piece) and leaves the new window behind. */
enum { CONV_ROWS = 32 };
static __global__ void conv4_kernel(float *c, const float *u, const float *w, float *window, float *pending,
                                    int channels, int max_pending, gpu_spans s) {
    const int ch = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (ch >= channels) {
        wait_for_inputs();
        return;
    }
    const float w0 = w[(int64_t)ch * 4], w1 = w[(int64_t)ch * 4 + 1], w2 = w[(int64_t)ch * 4 + 2],
                w3 = w[(int64_t)ch * 4 + 3];
    wait_for_inputs();
    const gpu_span span = s.spans[blockIdx.y];
    float *own = window + (int64_t)span.slot * 3 * channels + ch;
    float *pend = pending + (int64_t)span.slot * max_pending * channels + ch;
    const int first = (int)blockIdx.z * CONV_ROWS, end = first + CONV_ROWS < span.rows ? first + CONV_ROWS : span.rows;
    const float *in = u + (int64_t)span.row0 * channels + ch;
    float a, b, d;
    if (first > 0) {
        if (first >= span.rows) return;
        a = in[(int64_t)(first - 3) * channels], b = in[(int64_t)(first - 2) * channels],
        d = in[(int64_t)(first - 1) * channels];
    } else {
        a = own[0], b = own[channels], d = own[(int64_t)2 * channels];
        for (int i = 0; i < span.commit; i++) a = b, b = d, d = pend[(int64_t)i * channels];
        if (span.tentative) own[0] = a, own[channels] = b, own[(int64_t)2 * channels] = d;
    }
#pragma unroll 4
    for (int i = first; i < end; i++) {
        const int64_t at = (int64_t)(span.row0 + i) * channels + ch;
        const float x = in[(int64_t)i * channels];
        c[at] = num_silu_inline(fmaf(w3, x, fmaf(w2, d, fmaf(w1, b, fmaf(w0, a, 0.0f)))));
        if (span.tentative) pend[(int64_t)i * channels] = x;
        a = b, b = d, d = x;
    }
    if (first > 0 || span.tentative) return;
    if (span.rows > CONV_ROWS)
        a = in[(int64_t)(span.rows - 3) * channels], b = in[(int64_t)(span.rows - 2) * channels],
        d = in[(int64_t)(span.rows - 1) * channels];
    own[0] = a, own[channels] = b, own[(int64_t)2 * channels] = d;
}

void gpu_conv(gpu *g, float *c, const float *u, const float *w, float *window, float *pending, int channels, int taps,
              int max_pending, const gpu_spans *s) {
    const dim3 grid(blocks_of(channels, 64), (unsigned)s->n);
    if (taps == 4)
        launch(g, conv4_kernel, dim3(grid.x, grid.y, s->rows ? blocks_of(s->rows, CONV_ROWS) : 1), 64, 0, c, u, w, window, pending, channels, max_pending, *s);
    else if (taps <= MAX_TAPS)
        launch(g, conv_kernel, grid, 64, 0, c, u, w, window, pending, channels, taps, max_pending, *s);
    else
        gpu_note(g, cudaErrorInvalidValue, "conv");
}

/* ---- the recurrence ---- */

/* q and k of one row and key head, normalised, in shared memory; by one warp. */
static __device__ void l2norm(float *y, const float *x, int n, float scale) {
    const float r = 1.0f / sqrtf(warp_dot32(x, x, n) + 1e-6f);
    for (int i = threadIdx.x % 32; i < n; i += 32) y[i] = x[i] * r * scale;
}

typedef struct gdn_args {
    float *out;
    const float *c, *a, *b, *neg_a, *dt_bias;
    gpu_gdn st;
    gpu_spans s;
    float q_scale;
} gdn_args;

static __device__ __forceinline__ void gates_of(float *beta, float *decay, const gdn_args &p, int64_t row, int h) {
    const int64_t at = row * p.st.v_heads + h;
    *beta = num_sigmoid_inline(p.b[at]);
    *decay = num_exp_inline(p.neg_a[h] * num_softplus_inline(p.a[at] + p.dt_bias[h]));
}

/* One warp: 32 columns of one value head's state, a column per thread. DK: rows of the state, kept in registers, and DV its
 * columns; 0: any numbers, and the state in shared memory [dk][32]. */
template <int DK> struct column {
    float s[DK];
    __device__ __forceinline__ float get(int i) const { return s[i]; }
    __device__ __forceinline__ void set(int i, float v) { s[i] = v; }
};
template <> struct column<0> {
    float *s;
    __device__ __forceinline__ float get(int i) const { return s[i * 32]; }
    __device__ __forceinline__ void set(int i, float v) { s[i * 32] = v; }
};

/* Four words of shared memory, read now: values that are kept instead would not fit the registers beside the state. */
static __device__ __forceinline__ float4 read4(const float *p) {
    float4 v;
#ifdef __CUDACC__
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"((uint32_t)__cvta_generic_to_shared(p)));
#else
    v = *(const float4 *)p;
#endif
    return v;
}

template <int DK>
static __device__ __forceinline__ float gdn_step(column<DK> &S, int dk, const float *q, const float *k, float v,
                                                 float beta, float decay) {
    float m = 0, o = 0;
    if constexpr (DK > 0) {
#pragma unroll
        for (int i = 0; i < DK; i += 4) {
            const float4 k4 = read4(k + i);
            const float kk[4] = { k4.x, k4.y, k4.z, k4.w };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                S.s[i + j] = S.s[i + j] * decay;
                m = fmaf(S.s[i + j], kk[j], m);
            }
        }
        const float d = beta * (v - m);
#pragma unroll
        for (int i = 0; i < DK; i += 4) {
            const float4 k4 = read4(k + i), q4 = read4(q + i);
            const float kk[4] = { k4.x, k4.y, k4.z, k4.w }, qq[4] = { q4.x, q4.y, q4.z, q4.w };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                S.s[i + j] = fmaf(kk[j], d, S.s[i + j]);
                o = fmaf(S.s[i + j], qq[j], o);
            }
        }
    } else {
        for (int i = 0; i < dk; i++) {
            const float s = S.get(i) * decay;
            S.set(i, s);
            m = fmaf(s, k[i], m);
        }
        const float d = beta * (v - m);
        for (int i = 0; i < dk; i++) {
            const float s = fmaf(k[i], d, S.get(i));
            S.set(i, s);
            o = fmaf(s, q[i], o);
        }
    }
    return o;
}

template <int DK, int DV> static __global__ void __launch_bounds__(32) gdn_kernel(gdn_args p) {
    extern __shared__ __align__(16) float mem[]; /* q, k [dk]; then the state when DK is 0 */
    wait_for_inputs();
    const gpu_gdn &st = p.st;
    const int hv = st.v_heads, hk = st.k_heads, dk = DK ? DK : st.k_dim, dv = DV ? DV : st.v_dim;
    const int h = (int)blockIdx.x % hv, col = (int)(blockIdx.x / hv) * 32 + (int)threadIdx.x, kh = h / (hv / hk);
    const bool in = col < dv;
    const int64_t kd = (int64_t)hk * dk, vd = (int64_t)hv * dv;
    const gpu_span span = p.s.spans[blockIdx.y];
    float *state = st.state + ((int64_t)span.slot * hv + h) * dk * dv + col;
    float *q = mem, *k = mem + dk;
    column<DK> S;
    if constexpr (DK == 0) S.s = mem + 2 * dk + threadIdx.x;
#pragma unroll
    for (int i = 0; i < dk; i++) S.set(i, in ? state[(int64_t)i * dv] : 0.0f);
    for (int i = 0; i < span.commit; i++) {
        const int64_t at = (int64_t)span.slot * st.max_pending + i;
        __syncwarp();
        for (int j = threadIdx.x; j < dk; j += 32) k[j] = q[j] = st.pend_k[at * kd + kh * dk + j];
        __syncwarp();
        gdn_step<DK>(S, dk, q, k, in ? st.pend_v[at * vd + h * dv + col] : 0.0f, st.pend_beta[at * hv + h],
                     st.pend_decay[at * hv + h]);
    }
    if (span.tentative && span.commit > 0 && in)
#pragma unroll
        for (int i = 0; i < dk; i++) state[(int64_t)i * dv] = S.get(i);
    for (int i = 0; i < span.rows; i++) {
        const int64_t r = span.row0 + i;
        const float *row = p.c + r * (2 * kd + vd);
        float beta, decay;
        gates_of(&beta, &decay, p, r, h);
        __syncwarp();
        l2norm(q, row + kh * dk, dk, p.q_scale);
        l2norm(k, row + kd + kh * dk, dk, 1.0f);
        __syncwarp();
        const float o = gdn_step<DK>(S, dk, q, k, in ? row[2 * kd + h * dv + col] : 0.0f, beta, decay);
        if (in) p.out[r * vd + h * dv + col] = o;
    }
    if (!span.tentative && in)
#pragma unroll
        for (int i = 0; i < dk; i++) state[(int64_t)i * dv] = S.get(i);
}

/* ---- the same for many rows: what does not depend on the state is computed before, for all rows at once ---- */

enum { LONG_K = 128 };

/* Per row: q and k of all key heads, normalised, then beta and decay of all value heads. */
typedef struct gdn_ready {
    float *qk; /* [rows][k_heads][q 128 | k 128] */
    float2 *gates; /* [rows][v_heads] */
} gdn_ready;

static __global__ void gdn_ready_kernel(gdn_args p, gdn_ready out) {
    wait_for_inputs();
    const int64_t r = blockIdx.x;
    const int hk = p.st.k_heads, hv = p.st.v_heads;
    const float *row = p.c + r * (2 * (int64_t)hk * LONG_K + (int64_t)hv * p.st.v_dim);
    float *to = out.qk + r * hk * 2 * LONG_K;
    for (int i = threadIdx.x / 32; i < 2 * hk; i += blockDim.x / 32) {
        const int h = i % hk, k = i / hk;
        l2norm(to + (2 * h + k) * LONG_K, row + (int64_t)i * LONG_K, LONG_K, k ? 1.0f : p.q_scale);
    }
    for (int h = threadIdx.x; h < hv; h += blockDim.x) {
        float beta, decay;
        gates_of(&beta, &decay, p, r, h);
        out.gates[r * hv + h] = make_float2(beta, decay);
    }
}

/* A column per thread as above. The sum o of a row and the sum m of the next one run side by side over the state: two chains
 * instead of one after the other. Rows are fetched two ahead. */
static __global__ void __launch_bounds__(32) gdn_long_kernel(gdn_args p, gdn_ready in) {
    enum { DK = LONG_K, AHEAD = 2, dv = LONG_K };
    __shared__ __align__(16) float mem[2][2 * DK]; /* q, k of a row and of the next */
    wait_for_inputs();
    const gpu_gdn &st = p.st;
    const int hv = st.v_heads, hk = st.k_heads, lane = (int)threadIdx.x;
    const int h = (int)blockIdx.x % hv, col = (int)(blockIdx.x / hv) * 32 + lane, kh = h / (hv / hk);
    const int64_t kd = (int64_t)hk * DK, vd = (int64_t)hv * dv;
    const gpu_span span = p.s.spans[blockIdx.y];
    float *state = st.state + ((int64_t)span.slot * hv + h) * DK * dv + col;
    column<DK> S;
#pragma unroll
    for (int i = 0; i < DK; i++) S.s[i] = state[(int64_t)i * dv];
    for (int i = 0; i < span.commit; i++) {
        const int64_t at = (int64_t)span.slot * st.max_pending + i;
        __syncwarp();
        for (int j = lane; j < DK; j += 32) mem[0][j] = st.pend_k[at * kd + kh * DK + j];
        __syncwarp();
        gdn_step<DK>(S, DK, mem[0], mem[0], st.pend_v[at * vd + h * dv + col], st.pend_beta[at * hv + h],
                     st.pend_decay[at * hv + h]);
    }
    if (span.tentative && span.commit > 0)
#pragma unroll
        for (int i = 0; i < DK; i++) state[(int64_t)i * dv] = S.s[i];
    if (span.rows > 0) {
        const int last = span.rows - 1;
        const float *qk = in.qk + (span.row0 * (int64_t)hk + kh) * 2 * DK + 4 * lane,
                    *v = p.c + span.row0 * (2 * kd + vd) + 2 * kd + h * dv + col;
        const float2 *gates = in.gates + span.row0 * (int64_t)hv + h;
        float4 q4[AHEAD], k4[AHEAD];
        float vs[AHEAD], v0;
        float2 gs[AHEAD], g0;
        /* row 0 into buffer 0, then rows 1 and 2 on their way */
        __syncwarp();
        *(float4 *)&mem[0][4 * lane] = *(const float4 *)qk;
        *(float4 *)&mem[0][DK + 4 * lane] = *(const float4 *)(qk + DK);
        v0 = v[0];
        g0 = gates[0];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int64_t r = 1 + a < last ? 1 + a : last;
            q4[a] = *(const float4 *)(qk + r * hk * 2 * DK);
            k4[a] = *(const float4 *)(qk + r * hk * 2 * DK + DK);
            vs[a] = v[r * (2 * kd + vd)];
            gs[a] = gates[r * hv];
        }
        __syncwarp();
        float m = 0;
#pragma unroll
        for (int i = 0; i < DK; i += 4) {
            const float4 k = read4(&mem[0][DK + i]);
            const float kk[4] = { k.x, k.y, k.z, k.w };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                S.s[i + j] = S.s[i + j] * g0.y;
                m = fmaf(S.s[i + j], kk[j], m);
            }
        }
        float *out = p.out + span.row0 * vd + h * dv + col;
        for (int t = 0; t < last; t++) {
            const float *now = mem[t & 1];
            float *next = mem[(t + 1) & 1];
            *(float4 *)&next[4 * lane] = q4[0];
            *(float4 *)&next[DK + 4 * lane] = k4[0];
            const float d = g0.x * (v0 - m), decay = gs[0].y;
            v0 = vs[0], g0 = gs[0];
            q4[0] = q4[1], k4[0] = k4[1], vs[0] = vs[1], gs[0] = gs[1];
            const int64_t r = t + 1 + AHEAD < last ? t + 1 + AHEAD : last;
            q4[1] = *(const float4 *)(qk + r * hk * 2 * DK);
            k4[1] = *(const float4 *)(qk + r * hk * 2 * DK + DK);
            vs[1] = v[r * (2 * kd + vd)];
            gs[1] = gates[r * hv];
            __syncwarp();
            float o = 0;
            m = 0;
#pragma unroll
            for (int i = 0; i < DK; i += 4) {
                const float4 q = read4(now + i), k = read4(now + DK + i), n = read4(next + DK + i);
                const float qq[4] = { q.x, q.y, q.z, q.w }, kk[4] = { k.x, k.y, k.z, k.w }, nn[4] = { n.x, n.y, n.z, n.w };
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float s = fmaf(kk[j], d, S.s[i + j]);
                    o = fmaf(s, qq[j], o);
                    S.s[i + j] = s * decay;
                    m = fmaf(S.s[i + j], nn[j], m);
                }
            }
            out[t * vd] = o;
            __syncwarp(); /* `now` is written in the next step */
        }
        const float *now = mem[last & 1];
        const float d = g0.x * (v0 - m);
        float o = 0;
#pragma unroll
        for (int i = 0; i < DK; i += 4) {
            const float4 q = read4(now + i), k = read4(now + DK + i);
            const float qq[4] = { q.x, q.y, q.z, q.w }, kk[4] = { k.x, k.y, k.z, k.w };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                S.s[i + j] = fmaf(kk[j], d, S.s[i + j]);
                o = fmaf(S.s[i + j], qq[j], o);
            }
        }
        out[last * vd] = o;
    }
    if (!span.tentative)
#pragma unroll
        for (int i = 0; i < DK; i++) state[(int64_t)i * dv] = S.s[i];
}

/* Pending rows are written when nobody reads the old ones any more: after the kernel above. One block per row of a span. */
static __global__ void gdn_pend_kernel(gdn_args p) {
    wait_for_inputs();
    const gpu_gdn &st = p.st;
    const gpu_span span = p.s.spans[blockIdx.y];
    const int i = (int)blockIdx.x, hv = st.v_heads, dk = st.k_dim;
    if (!span.tentative || i >= span.rows) return;
    const int64_t kd = (int64_t)st.k_heads * dk, vd = (int64_t)hv * st.v_dim, r = span.row0 + i,
                  at = (int64_t)span.slot * st.max_pending + i;
    const float *row = p.c + r * (2 * kd + vd);
    for (int h = threadIdx.x / 32; h < st.k_heads; h += blockDim.x / 32)
        l2norm(st.pend_k + at * kd + (int64_t)h * dk, row + kd + (int64_t)h * dk, dk, 1.0f);
    for (int64_t j = threadIdx.x; j < vd; j += blockDim.x) st.pend_v[at * vd + j] = row[2 * kd + j];
    for (int h = threadIdx.x; h < hv; h += blockDim.x)
        gates_of(&st.pend_beta[at * hv + h], &st.pend_decay[at * hv + h], p, r, h);
}

void gpu_gdn_step(gpu *g, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                  const float *dt_bias, const gpu_gdn *st, const gpu_spans *s, float q_scale) {
    const gdn_args p = { out, c, a, b, neg_a, dt_bias, *st, *s, q_scale };
    const dim3 grid((unsigned)st->v_heads * blocks_of(st->v_dim, 32), (unsigned)s->n);
    const size_t qk = 2 * (size_t)st->k_dim * sizeof(float);
    gdn_ready ready = {};
    if (g->many && s->rows >= g->many && st->k_dim == LONG_K && st->v_dim == LONG_K) {
        const size_t qk_bytes = (size_t)s->rows * st->k_heads * 2 * LONG_K * sizeof(float);
        char *at = (char *)gpu_work(g, GPU_WORK_E, qk_bytes + (size_t)s->rows * st->v_heads * sizeof(float2));
        if (!at) return;
        ready.qk = (float *)at;
        ready.gates = (float2 *)(at + qk_bytes);
        launch(g, gdn_ready_kernel, dim3((unsigned)s->rows), 256, 0, p, ready);
        launch(g, gdn_long_kernel, grid, 32, 0, p, ready);
    } else if (st->k_dim == 128 && st->v_dim == 128)
        launch(g, gdn_kernel<128, 128>, grid, 32, qk, p);
    else
        launch(g, gdn_kernel<0, 0>, grid, 32, qk + (size_t)st->k_dim * 32 * sizeof(float), p);
    if (s->tentative) launch(g, gdn_pend_kernel, dim3((unsigned)st->max_pending, (unsigned)s->n), 256, 0, p);
}
