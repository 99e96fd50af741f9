/* ops_cpu.h - inside of the CPU backend: kern's loops, shared out over a pool. Internal to ops_cpu*.c.
 *
 * Work is divided by a static rule and every output element is computed by one kern call whose operands do not depend
 * on the division, so any number of threads returns the same bits. */
#ifndef NIBBLE_OPS_CPU_H
#define NIBBLE_OPS_CPU_H

#include "base/pool.h"
#include "kern/nv.h"
#include "kern/quant.h"
#include "kern/screen.h"
#include "ops/ops_impl.h"
#include "ops/ops_slab.h"

typedef struct cpu {
    kern k;
    quant_kern q;
    nv_kern nv;
    screen_kern s;
    pool *pool;
    int threads;
    double dispatch_ns;               /* work below this estimate is done by the caller alone */
    work shared, units, screen, full; /* sized by the caller before the pool runs */
    work own;                         /* threads x own_bytes */
    size_t own_bytes;
    slab weights; /* packed */
} cpu;

/* Run fn(ctx, thread, threads) on all threads, or on the caller alone when about `ns` of work on one thread is not
 * worth handing out. fn uses cpu_barrier. */
void cpu_run(cpu *c, pool_fn *fn, void *ctx, double ns);
static inline void cpu_barrier(cpu *c, int threads) {
    if (threads > 1) pool_barrier(c->pool);
}

/* At least `bytes` of work memory for each thread; call before cpu_run. */
void cpu_own_need(cpu *c, size_t bytes);
static inline void *cpu_own(const cpu *c, int thread) { return (char *)c->own.p + (size_t)thread * c->own_bytes; }

/* y[m * ldy + n] = dot32(x[m], w[n]), w of type t. */
static inline void cpu_gemm(const cpu *c, dtype t, float *y, int64_t ldy, const float *x, int64_t ldx, const void *w,
                            int M, int N, int K) {
    if (M <= 0 || N <= 0) return;
    if (t == DT_BF16)
        c->k.gemm_bf16(y, ldy, x, ldx, w, M, N, K);
    else if (t == DT_F16)
        c->k.gemm_f16(y, ldy, x, ldx, w, M, N, K);
    else
        c->k.gemm_f32(y, ldy, x, ldx, w, M, N, K);
}

/* Handles whose NVFP4 weights are repacked into panels (ops_cpu_pack.c). */
bool cpu_linear_new(ops *o, linear **out, const linear_desc *d, err *e);
void cpu_linear_free(ops *o, linear *w);
bool cpu_experts_new(ops *o, experts **out, const experts_desc *d, err *e);
void cpu_experts_free(ops *o, experts *x);

/* Row `row` of a plain matrix as float32, y [cols]. */
void cpu_upcast_row(const cpu *c, float *y, const linear *w, int64_t row);

void cpu_linear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows);
void cpu_qlinear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows);
bool cpu_norm_linears(ops *o, float *const *y, float *h, const linear *const *w, int n, const float *x,
                      const float *norm, float eps, int rows);
bool cpu_linear_add(ops *o, float *x, const float *h, const linear *w, int rows);
bool cpu_gated_linear_add(ops *o, float *x, const float *in, const float *z, const float *norm, int heads, int dim,
                          float eps, const linear *w, int rows);
void cpu_qmoe(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx, const float *wt,
              int rows, int k);
bool cpu_head_new(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e);
void cpu_head_top(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *h, const float *hidden, int rows,
                  int k, const head_query *q);
void cpu_conv(ops *o, float *c, const float *u, const float *w, ops_conv *st, const ops_span *spans, int n_spans);
void cpu_gdn(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
             const float *dt_bias, ops_gdn *st, const ops_span *spans, int n_spans);
void cpu_gated_norm(ops *o, float *y, const float *x, const float *z, const float *w, int rows, int heads, int dim,
                    float eps);
void cpu_qk_rope(ops *o, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                 const int32_t *pos3, const ops_rope *rope, int rows, int heads, int kv_heads, int dim, bool gated,
                 float eps);
void cpu_kv_append(ops *o, ops_kv *kv, const float *k, const float *v, const ops_span *spans, int n_spans);
void cpu_attention(ops *o, float *y, const float *q, const float *qg, const ops_kv *kv, int heads, float scale,
                   const ops_span *spans, int n_spans);
void cpu_route(ops *o, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k);
void cpu_moe(ops *o, float *y, const float *x, const experts *ex, const int32_t *idx, const float *wt, int rows, int k);
void cpu_moe_hidden(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx,
                    const float *wt, int rows, int k);
void cpu_moe_combine(ops *o, float *x, const float *routed, const float *shared, const float *gate, int rows, int n);

#endif
