/* The decorator of ops.h: forwards every call to `inner`, then reports it. */
#include <stdlib.h>

#include "ops/ops_head.h"

typedef struct tap {
    ops *inner;
    ops_tap_fn *fn;
    void *ctx;
    float *hidden; /* device, of inner: what the down projections of one MoE call read */
    size_t hidden_bytes;
    err failed; /* reported by the next sync */
} tap;

static ops *inner_of(ops *o) { return ((tap *)o->self)->inner; }

static void report(ops *o, const ops_event *ev) {
    tap *t = o->self;
    if (t->fn) t->fn(t->ctx, t->inner, ev);
}

/* Rows that the spans reach: conv, gdn, attention and kv_append get no row count of their own. */
static int span_rows(const ops_span *spans, int n_spans) {
    int end = 0;
    for (int i = 0; i < n_spans; i++)
        if (spans[i].row0 + spans[i].rows > end) end = spans[i].row0 + spans[i].rows;
    return end;
}

/* Elementwise ops report one row; a count beyond int is cut into what an int holds. */
static int row_len(int64_t n) { return n > INT32_MAX ? INT32_MAX : (int)n; }

/* ---- memory: forwarded ---- */

static bool tap_mem_new(ops *o, void **out, size_t bytes, err *e) {
    return inner_of(o)->mem_new(inner_of(o), out, bytes, e);
}
static void tap_mem_free(ops *o, void *p) { inner_of(o)->mem_free(inner_of(o), p); }
static void tap_upload(ops *o, void *dst, const void *src, size_t bytes) {
    inner_of(o)->upload(inner_of(o), dst, src, bytes);
}
static void tap_download(ops *o, void *dst, const void *src, size_t bytes) {
    inner_of(o)->download(inner_of(o), dst, src, bytes);
}
static void tap_fill_zero(ops *o, void *dst, size_t bytes) { inner_of(o)->fill_zero(inner_of(o), dst, bytes); }
static void tap_copy(ops *o, void *dst, const void *src, size_t bytes) {
    inner_of(o)->copy(inner_of(o), dst, src, bytes);
}
static bool tap_linear_new(ops *o, linear **out, const linear_desc *d, err *e) {
    return inner_of(o)->linear_new(inner_of(o), out, d, e);
}
static void tap_linear_free(ops *o, linear *w) { inner_of(o)->linear_free(inner_of(o), w); }
static bool tap_experts_new(ops *o, experts **out, const experts_desc *d, err *e) {
    return inner_of(o)->experts_new(inner_of(o), out, d, e);
}
static void tap_experts_free(ops *o, experts *x) { inner_of(o)->experts_free(inner_of(o), x); }

static bool tap_head_new(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e) {
    return inner_of(o)->head_new(inner_of(o), out, full, rows, screen, e);
}
static void tap_head_free(ops *o, lm_head *h) { inner_of(o)->head_free(inner_of(o), h); }

static bool tap_sync(ops *o, err *e) {
    tap *t = o->self;
    const bool ok = t->inner->sync(t->inner, e);
    if (t->failed.kind == ERR_NONE) return ok;
    const err first = t->failed;
    t->failed = (err){ 0 };
    return ok ? fail(e, first.kind, first.id, "%s", first.msg) : false;
}

/* ---- rows ---- */

static void tap_embed(ops *o, float *y, const linear *table, const int32_t *ids, int rows) {
    inner_of(o)->embed(inner_of(o), y, table, ids, rows);
    const int n = linear_cols(table);
    report(o,
           &(ops_event){ .op = "embed", .w = table, .out = y, .out_ld = n, .out_cols = n, .rows = rows, .index = ids });
}

static void tap_rmsnorm(ops *o, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps) {
    inner_of(o)->rmsnorm(inner_of(o), y, x, ldx, w, rows, n, eps);
    report(o, &(ops_event){ .op = "rmsnorm",
                            .in = x == y ? NULL : x,
                            .in_ld = ldx,
                            .in_cols = n,
                            .in2 = w,
                            .in2_cols = n,
                            .out = y,
                            .out_ld = n,
                            .out_cols = n,
                            .rows = rows });
}

static void tap_linear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    inner_of(o)->linear(inner_of(o), y, ldy, x, ldx, w, rows);
    report(o, &(ops_event){ .op = "linear",
                            .w = w,
                            .in = x,
                            .in_ld = ldx,
                            .in_cols = linear_cols(w),
                            .out = y,
                            .out_ld = ldy,
                            .out_cols = linear_rows(w),
                            .rows = rows });
}

static void tap_add(ops *o, float *y, const float *x, int64_t n) {
    inner_of(o)->add(inner_of(o), y, x, n);
    report(o, &(ops_event){ .op = "add",
                            .in = x,
                            .in_ld = n,
                            .in_cols = row_len(n),
                            .out = y,
                            .out_ld = n,
                            .out_cols = row_len(n),
                            .rows = 1 });
}

static void tap_silu_mul(ops *o, float *y, const float *g, const float *u, int64_t n) {
    inner_of(o)->silu_mul(inner_of(o), y, g, u, n);
    report(o, &(ops_event){ .op = "silu_mul",
                            .in = g == y ? NULL : g,
                            .in_ld = n,
                            .in_cols = row_len(n),
                            .in2 = u,
                            .in2_cols = row_len(n),
                            .out = y,
                            .out_ld = n,
                            .out_cols = row_len(n),
                            .rows = 1 });
}

static void tap_gather_rows(ops *o, float *y, const float *x, const int32_t *index, int rows, int n) {
    inner_of(o)->gather_rows(inner_of(o), y, x, index, rows, n);
    report(o, &(ops_event){ .op = "gather_rows",
                            .in = x,
                            .in_ld = n,
                            .in_cols = n,
                            .out = y,
                            .out_ld = n,
                            .out_cols = n,
                            .rows = rows,
                            .index = index });
}

static void tap_argmax(ops *o, int32_t *out, const float *x, int rows, int n) {
    inner_of(o)->argmax(inner_of(o), out, x, rows, n);
    report(o, &(ops_event){ .op = "argmax", .in = x, .in_ld = n, .in_cols = n, .rows = rows, .index = out });
}

static void tap_head_top(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *h, const float *hidden,
                         int rows, int k, const head_query *q) {
    inner_of(o)->head_top(inner_of(o), ids, logits, extra_logits, h, hidden, rows, k, q);
    const int n = head_cols(h);
    report(o, &(ops_event){ .op = "head_top", .in = hidden, .in_ld = n, .in_cols = n, .rows = rows, .k = k });
}

/* ---- GDN ---- */

static void tap_conv(ops *o, float *c, const float *u, const float *w, ops_conv *st, const ops_span *spans,
                     int n_spans) {
    inner_of(o)->conv(inner_of(o), c, u, w, st, spans, n_spans);
    const int n = st->channels;
    report(o, &(ops_event){ .op = "conv",
                            .in = u,
                            .in_ld = n,
                            .in_cols = n,
                            .in2 = w,
                            .in2_cols = st->taps,
                            .out = c,
                            .out_ld = n,
                            .out_cols = n,
                            .rows = span_rows(spans, n_spans),
                            .spans = spans,
                            .n_spans = n_spans });
}

static void tap_gdn(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                    const float *dt_bias, ops_gdn *st, const ops_span *spans, int n_spans) {
    inner_of(o)->gdn(inner_of(o), out, c, a, b, neg_a, dt_bias, st, spans, n_spans);
    const int vd = st->v_heads * st->v_dim, cd = 2 * st->k_heads * st->k_dim + vd;
    report(o, &(ops_event){ .op = "gdn",
                            .in = c,
                            .in_ld = cd,
                            .in_cols = cd,
                            .out = out,
                            .out_ld = vd,
                            .out_cols = vd,
                            .rows = span_rows(spans, n_spans),
                            .spans = spans,
                            .n_spans = n_spans });
}

static void tap_gated_norm(ops *o, float *y, const float *x, const float *z, const float *w, int rows, int heads,
                           int dim, float eps) {
    inner_of(o)->gated_norm(inner_of(o), y, x, z, w, rows, heads, dim, eps);
    const int n = heads * dim;
    report(o, &(ops_event){ .op = "gated_norm",
                            .in = x == y ? NULL : x,
                            .in_ld = n,
                            .in_cols = n,
                            .in2 = z,
                            .in2_cols = n,
                            .out = y,
                            .out_ld = n,
                            .out_cols = n,
                            .rows = rows });
}

/* ---- attention ---- */

static void tap_qk_rope(ops *o, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                        const int32_t *pos3, const ops_rope *rope, int rows, int heads, int kv_heads, int dim,
                        bool gated, float eps) {
    inner_of(o)->qk_rope(inner_of(o), q_out, k, qg, q_norm, k_norm, pos3, rope, rows, heads, kv_heads, dim, gated, eps);
    const int q_cols = heads * dim, qg_cols = gated ? 2 * q_cols : q_cols;
    report(o, &(ops_event){ .op = "qk_rope",
                            .in = qg,
                            .in_ld = qg_cols,
                            .in_cols = qg_cols,
                            .in2 = k,
                            .in2_cols = kv_heads * dim,
                            .out = q_out,
                            .out_ld = q_cols,
                            .out_cols = q_cols,
                            .rows = rows });
}

static void tap_kv_append(ops *o, ops_kv *kv, const float *k, const float *v, const ops_span *spans, int n_spans) {
    inner_of(o)->kv_append(inner_of(o), kv, k, v, spans, n_spans);
    const int n = kv->kv_heads * kv->dim;
    report(o, &(ops_event){ .op = "kv_append",
                            .in = k,
                            .in_ld = n,
                            .in_cols = n,
                            .in2 = v,
                            .in2_cols = n,
                            .rows = span_rows(spans, n_spans),
                            .spans = spans,
                            .n_spans = n_spans });
}

static void tap_attention(ops *o, float *y, const float *q, const float *qg, const ops_kv *kv, int heads, float scale,
                          const ops_span *spans, int n_spans) {
    inner_of(o)->attention(inner_of(o), y, q, qg, kv, heads, scale, spans, n_spans);
    const int n = heads * kv->dim;
    report(o, &(ops_event){ .op = "attention",
                            .in = q,
                            .in_ld = n,
                            .in_cols = n,
                            .in2 = qg,
                            .in2_cols = qg ? 2 * n : 0,
                            .out = y,
                            .out_ld = n,
                            .out_cols = n,
                            .rows = span_rows(spans, n_spans),
                            .spans = spans,
                            .n_spans = n_spans });
}

/* ---- MoE ---- */

static void tap_route(ops *o, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k) {
    inner_of(o)->route(inner_of(o), idx, wt, logits, rows, n_experts, k);
    report(o, &(ops_event){ .op = "route",
                            .in = logits,
                            .in_ld = n_experts,
                            .in_cols = n_experts,
                            .out = wt,
                            .out_ld = k,
                            .out_cols = k,
                            .rows = rows,
                            .index = idx,
                            .k = k });
}

static bool hidden_need(tap *t, size_t bytes) {
    if (t->hidden_bytes >= bytes) return true;
    t->inner->mem_free(t->inner, t->hidden);
    t->hidden = NULL;
    t->hidden_bytes = 0;
    void *p;
    if (!t->inner->mem_new(t->inner, &p, bytes, &t->failed)) return false;
    t->hidden = p;
    t->hidden_bytes = bytes;
    return true;
}

static void moe_event(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx,
                      const float *wt, int rows, int k) {
    inner_of(o)->moe_hidden(inner_of(o), y, hidden, x, ex, idx, wt, rows, k);
    const int n = experts_hidden(ex);
    report(o, &(ops_event){ .op = "moe",
                            .ex = ex,
                            .in = x,
                            .in_ld = n,
                            .in_cols = n,
                            .in2 = hidden,
                            .in2_cols = experts_inter(ex),
                            .out = y,
                            .out_ld = n,
                            .out_cols = n,
                            .rows = rows,
                            .index = idx,
                            .weight = wt,
                            .k = k });
}

static void tap_moe(ops *o, float *y, const float *x, const experts *ex, const int32_t *idx, const float *wt, int rows,
                    int k) {
    tap *t = o->self;
    const size_t bytes = (size_t)rows * (size_t)k * (size_t)experts_inter(ex) * sizeof(float);
    if (t->fn && hidden_need(t, bytes))
        moe_event(o, y, t->hidden, x, ex, idx, wt, rows, k);
    else
        t->inner->moe(t->inner, y, x, ex, idx, wt, rows, k);
}

static void tap_moe_combine(ops *o, float *x, const float *routed, const float *shared, const float *gate, int rows,
                            int n) {
    inner_of(o)->moe_combine(inner_of(o), x, routed, shared, gate, rows, n);
    report(o, &(ops_event){ .op = "moe_combine",
                            .in = routed,
                            .in_ld = n,
                            .in_cols = n,
                            .in2 = shared,
                            .in2_cols = shared ? n : 0,
                            .out = x,
                            .out_ld = n,
                            .out_cols = n,
                            .rows = rows });
}

static void tap_close(ops *o) {
    tap *t = o->self;
    t->inner->mem_free(t->inner, t->hidden);
    free(t);
    free(o);
}

static const ops TAP = {
    .mem_new = tap_mem_new,
    .mem_free = tap_mem_free,
    .upload = tap_upload,
    .download = tap_download,
    .fill_zero = tap_fill_zero,
    .copy = tap_copy,
    .linear_new = tap_linear_new,
    .linear_free = tap_linear_free,
    .experts_new = tap_experts_new,
    .experts_free = tap_experts_free,
    .head_new = tap_head_new,
    .head_free = tap_head_free,
    .sync = tap_sync,
    .close = tap_close,
    .embed = tap_embed,
    .rmsnorm = tap_rmsnorm,
    .linear = tap_linear,
    .add = tap_add,
    .silu_mul = tap_silu_mul,
    .gather_rows = tap_gather_rows,
    .argmax = tap_argmax,
    .head_top = tap_head_top,
    .conv = tap_conv,
    .gdn = tap_gdn,
    .gated_norm = tap_gated_norm,
    .qk_rope = tap_qk_rope,
    .kv_append = tap_kv_append,
    .attention = tap_attention,
    .route = tap_route,
    .moe = tap_moe,
    .moe_hidden = moe_event,
    .moe_combine = tap_moe_combine,
};

bool ops_tap_open(ops **out, ops *inner, ops_tap_fn *fn, void *ctx, err *e) {
    *out = NULL;
    tap *t = calloc(1, sizeof *t);
    ops *o = malloc(sizeof *o);
    if (!t || !o) {
        free(t);
        free(o);
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "no memory for an op tap");
    }
    *t = (tap){ .inner = inner, .fn = fn, .ctx = ctx };
    *o = TAP;
    o->device = inner->device;
    o->isa = inner->isa;
    o->threads = inner->threads;
    o->self = t;
    *out = o;
    return true;
}
