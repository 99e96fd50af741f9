/* The CUDA backend: fills ops.h with the launchers of ops/cuda/gpu.h. Host code only; without CUDA at build time it only says
 * so. */
#include "ops/ops_cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef NIBBLE_CUDA

bool ops_cuda_open(ops **out, int threads, kern_isa isa, err *e) {
    (void)threads, (void)isa;
    *out = NULL;
    return fail(
        e, ERR_MACHINE, "E-CUDA-BUILD",
        "--device cuda: this program was built without CUDA (install the CUDA toolkit, so that nvcc is found, and "
        "build again)");
}

#else

/* ---- memory ---- */

bool cuda_out_of_memory(cuda *c, size_t bytes, err *e) {
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY",
                "%s: cannot get %zu bytes, %.2f GB are free (use a shorter context or --kv fp8)", c->info.name, bytes,
                (double)gpu_free_bytes(c->g) / 1e9);
}

static bool cuda_mem_new(ops *o, void **out, size_t bytes, err *e) {
    alloc_counted();
    *out = gpu_alloc(gpu_of(o), bytes);
    return *out || cuda_out_of_memory(cuda_of(o), bytes, e);
}
static void cuda_mem_free(ops *o, void *p) { gpu_free(gpu_of(o), p); }
static void cuda_upload(ops *o, void *dst, const void *src, size_t bytes) { gpu_upload(gpu_of(o), dst, src, bytes); }
static void cuda_download(ops *o, void *dst, const void *src, size_t bytes) {
    gpu_download(gpu_of(o), dst, src, bytes);
}
static void cuda_zero(ops *o, void *dst, size_t bytes) { gpu_zero(gpu_of(o), dst, bytes); }
static void cuda_copy(ops *o, void *dst, const void *src, size_t bytes) { gpu_copy(gpu_of(o), dst, src, bytes); }

static int64_t cuda_memory_available(ops *o) { return (int64_t)gpu_free_bytes(gpu_of(o)); }

/* Attention's parts, logits and masks of the head, and what recorded passes and small blocks take. */
static int64_t cuda_work_bytes(ops *o, int vocab, int head_dim, int positions) {
    return (int64_t)gpu_attention_bytes(gpu_of(o), head_dim, positions) + CUDA_HEAD_GROUP * (int64_t)vocab * 6 +
           ((int64_t)64 << 20);
}

static bool cuda_sync(ops *o, err *e) {
    char why[256];
    if (gpu_sync(gpu_of(o), why)) return true;
    return fail(e, ERR_MACHINE, "E-CUDA-FAILED", "%s: %s", cuda_of(o)->info.name, why);
}

/* ---- spans ---- */

static void room_for_spans(cuda *c, int n, int rows) {
    if (n <= c->cap_spans && rows <= c->cap_rows) return;
    c->moves++;
    c->cap_spans = n > c->cap_spans ? n + 8 : c->cap_spans;
    c->cap_rows = rows > c->cap_rows ? rows + 64 : c->cap_rows;
    c->spans = xrealloc(c->spans, (size_t)c->cap_spans * sizeof *c->spans);
    c->host_rows = xrealloc(c->host_rows, (size_t)c->cap_rows * sizeof *c->host_rows);
    c->host_spans = xrealloc(c->host_spans,
                             (size_t)c->cap_spans * sizeof *c->host_spans + (size_t)c->cap_rows * sizeof *c->host_rows);
}

static bool same_spans(const cuda *c, const ops_span *s, int n) {
    if (n != c->n_spans) return false;
    for (int i = 0; i < n; i++) {
        const ops_span *a = &s[i], *b = &c->spans[i];
        if (a->slot != b->slot || a->row0 != b->row0 || a->rows != b->rows || a->pos0 != b->pos0 ||
            a->commit != b->commit || a->tentative != b->tentative)
            return false;
    }
    return true;
}

/* The spans on the device: uploaded once per pass, since all ops of a pass have the same. */
static const gpu_spans *spans_of(cuda *c, const ops_span *s, int n) {
    if (same_spans(c, s, n)) return &c->on_device;
    int rows = 0;
    gpu_spans d = { .n = n };
    for (int i = 0; i < n; i++) {
        if (s[i].row0 + s[i].rows > rows) rows = s[i].row0 + s[i].rows;
        if (s[i].pos0 + s[i].rows - 1 > d.max_pos) d.max_pos = s[i].pos0 + s[i].rows - 1;
        d.tentative = d.tentative || s[i].tentative;
    }
    room_for_spans(c, n, rows);
    for (int r = 0; r < rows; r++) c->host_rows[r] = (gpu_row){ -1, 0 };
    for (int i = 0; i < n; i++) {
        c->spans[i] = s[i];
        c->host_spans[i] = (gpu_span){ s[i].slot, s[i].row0, s[i].rows, s[i].pos0, s[i].commit, s[i].tentative };
        for (int r = 0; r < s[i].rows; r++) c->host_rows[s[i].row0 + r] = (gpu_row){ s[i].slot, s[i].pos0 + r };
    }
    const size_t first = (size_t)c->cap_spans * sizeof(gpu_span); /* one upload: the rows behind the spans */
    char *at = gpu_work(c->g, GPU_WORK_SPANS, first + (size_t)c->cap_rows * sizeof(gpu_row));
    if (at && rows + n > 0) { /* without memory the error is kept, and nothing is launched any more */
        memcpy(c->host_spans + c->cap_spans, c->host_rows, (size_t)rows * sizeof *c->host_rows);
        gpu_upload(c->g, at, c->host_spans, first + (size_t)rows * sizeof *c->host_rows);
        d.spans = (const gpu_span *)(const void *)at;
        d.of_row = (const gpu_row *)(const void *)(at + first);
    }
    d.rows = rows;
    /* Grids and strides depend on positions through this bound only: a power of two of tiles serves many passes. */
    int tiles = 1;
    while (tiles * OPS_TILE <= d.max_pos) tiles *= 2;
    d.max_pos = tiles * OPS_TILE - 1;
    c->n_spans = at ? n : -1;
    c->on_device = d;
    return &c->on_device;
}

/* ---- series ---- */

/* Grows whenever an address moved that a record holds. */
static unsigned changes(const cuda *c) { return gpu_work_changes(c->g) + c->moves; }

static series *find_series(cuda *c, const void *what, const void *with, const gpu_spans *d) {
    series *oldest = &c->all[0];
    for (int i = 0; i < c->n_series; i++) {
        series *s = &c->all[i];
        if (s->what == what && s->with == with && s->rows == d->rows && s->n_spans == d->n &&
            s->tiles == d->max_pos / OPS_TILE && s->tentative == d->tentative)
            return s;
        if (s->used < oldest->used) oldest = s;
    }
    if (c->n_series < MOST_SERIES) oldest = &c->all[c->n_series++];
    gpu_graph_free(oldest->graph);
    *oldest = (series){ .what = what,
                        .with = with,
                        .rows = d->rows,
                        .n_spans = d->n,
                        .tiles = d->max_pos / OPS_TILE,
                        .tentative = d->tentative };
    return oldest;
}

/* The first time a series runs as it is, which gives its ops their work memory; the second time it is recorded. */
static bool cuda_series_begin(ops *o, const void *what, const void *with, const ops_span *spans, int n_spans) {
    cuda *c = cuda_of(o);
    ops_check_state_spans(spans, n_spans);
    const gpu_spans *d = spans_of(c, spans, n_spans);
    if (!c->record || d->rows > MOST_SERIES_ROWS) return false;
    series *s = find_series(c, what, with, d);
    const bool seen = s->used > 0 && s->work_changes == changes(c);
    s->used = ++c->clock;
    if (!seen) {
        gpu_graph_free(s->graph);
        s->graph = NULL;
    } else if (s->graph) {
        return gpu_graph_run(c->g, s->graph), true;
    } else {
        gpu_graph_begin(c->g);
        c->capturing = true;
    }
    c->recording = s;
    s->work_changes = seen ? s->work_changes : 0;
    return false;
}

static void cuda_series_end(ops *o) {
    cuda *c = cuda_of(o);
    series *s = c->recording;
    if (!s) return;
    c->recording = NULL;
    if (s->work_changes == 0) {
        s->work_changes = changes(c);
        return;
    }
    c->capturing = false;
    s->graph = gpu_graph_end(c->g);
    CHECK(s->graph, "a series of ops that cannot be recorded");
    gpu_graph_run(c->g, s->graph);
}

/* ---- rows ---- */

static void cuda_embed(ops *o, float *y, const linear *table, const int32_t *ids, int rows) {
    gpu_embed(gpu_of(o), y, mat_of(table), ids, rows);
}
static void cuda_rmsnorm(ops *o, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps) {
    gpu_rmsnorm(gpu_of(o), y, x, ldx, w, rows, n, eps);
}
static void cuda_linear_op(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    gpu_linear(gpu_of(o), y, ldy, x, ldx, mat_of(w), rows);
}
static void cuda_add(ops *o, float *y, const float *x, int64_t n) { gpu_add(gpu_of(o), y, x, n); }
static void cuda_silu_mul(ops *o, float *y, const float *g, const float *u, int64_t n) {
    gpu_silu_mul(gpu_of(o), y, g, u, n);
}
static void cuda_gather_rows(ops *o, float *y, const float *x, const int32_t *index, int rows, int n) {
    gpu_gather_rows(gpu_of(o), y, x, index, rows, n);
}
static void cuda_argmax(ops *o, int32_t *out, const float *x, int rows, int n) {
    gpu_argmax(gpu_of(o), out, x, rows, n);
}
static void cuda_gated_norm(ops *o, float *y, const float *x, const float *z, const float *w, int rows, int heads,
                            int dim, float eps) {
    gpu_gated_norm(gpu_of(o), y, x, z, w, (int64_t)rows * heads, dim, eps);
}

/* ---- state ---- */

static void cuda_conv(ops *o, float *c, const float *u, const float *w, ops_conv *st, const ops_span *spans,
                      int n_spans) {
    ops_check_state_spans(spans, n_spans);
    gpu_conv(gpu_of(o), c, u, w, st->window, st->pending, st->channels, st->taps, OPS_MAX_PENDING,
             spans_of(cuda_of(o), spans, n_spans));
}

static void cuda_gdn(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                     const float *dt_bias, ops_gdn *st, const ops_span *spans, int n_spans) {
    ops_check_state_spans(spans, n_spans);
    const gpu_gdn d = { .state = st->state,
                        .pend_k = st->pend_k,
                        .pend_v = st->pend_v,
                        .pend_beta = st->pend_beta,
                        .pend_decay = st->pend_decay,
                        .k_heads = st->k_heads,
                        .v_heads = st->v_heads,
                        .k_dim = st->k_dim,
                        .v_dim = st->v_dim,
                        .max_pending = OPS_MAX_PENDING };
    gpu_gdn_step(gpu_of(o), out, c, a, b, neg_a, dt_bias, &d, spans_of(cuda_of(o), spans, n_spans),
                 (float)(1.0 / sqrt((double)st->k_dim)));
}

static void cuda_qk_rope(ops *o, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                         const int32_t *pos3, const ops_rope *rope, int rows, int heads, int kv_heads, int dim,
                         bool gated, float eps) {
    CHECK(2 * rope->half <= dim, "rotary %d of head %d", 2 * rope->half, dim);
    gpu_qk_rope(gpu_of(o), q_out, k, qg, q_norm, k_norm, pos3, rope->cos, rope->sin, rope->axis, rope->half, rows,
                heads, kv_heads, dim, gated, eps);
}

static gpu_kv kv_of(const ops_kv *kv) {
    return (gpu_kv){ .type = kv->type == DT_F32       ? GPU_F32
                             : kv->type == DT_F8_E4M3 ? GPU_FP8
                                                      : GPU_BF16,
                     .k = kv->k,
                     .v = kv->v,
                     .pages = kv->pages,
                     .slot_pages = kv->slot_pages,
                     .kv_heads = kv->kv_heads,
                     .dim = kv->dim,
                     .k_scale = kv->k_scale,
                     .v_scale = kv->v_scale };
}

static void cuda_kv_append(ops *o, ops_kv *kv, const float *k, const float *v, const ops_span *spans, int n_spans) {
    ops_check_kv_spans(kv, spans, n_spans);
    const gpu_kv d = kv_of(kv);
    gpu_kv_append(gpu_of(o), &d, k, v, spans_of(cuda_of(o), spans, n_spans));
}

static void cuda_attention(ops *o, float *y, const float *q, const float *qg, const ops_kv *kv, int heads, float scale,
                           const ops_span *spans, int n_spans) {
    ops_check_kv_spans(kv, spans, n_spans);
    CHECK(heads % kv->kv_heads == 0, "%d heads over %d", heads, kv->kv_heads);
    const gpu_kv d = kv_of(kv);
    gpu_attention(gpu_of(o), y, q, qg, &d, heads, scale, spans_of(cuda_of(o), spans, n_spans));
}

/* ---- experts ---- */

static void cuda_route(ops *o, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k) {
    CHECK(k >= 1 && k <= n_experts, "top %d of %d", k, n_experts);
    gpu_route(gpu_of(o), idx, wt, logits, rows, n_experts, k);
}
static void cuda_moe_hidden(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx,
                            const float *wt, int rows, int k) {
    cuda_experts *own = (cuda_experts *)ex;
    if (own->on_cpu)
        cuda_host_moe(cuda_of(o), y, hidden, x, own, idx, wt, rows, k);
    else
        gpu_moe(gpu_of(o), y, hidden, x, &own->x, idx, wt, rows, k);
}
static void cuda_moe(ops *o, float *y, const float *x, const experts *ex, const int32_t *idx, const float *wt, int rows,
                     int k) {
    cuda_moe_hidden(o, y, NULL, x, ex, idx, wt, rows, k);
}
static void cuda_moe_combine(ops *o, float *x, const float *routed, const float *shared, const float *gate, int rows,
                             int n) {
    gpu_moe_combine(gpu_of(o), x, routed, shared, gate, rows, n);
}

/* ---- several at once ---- */

enum { MOST_LINEARS = 8 };

static bool cuda_norm_linears(ops *o, float *const *y, float *h, const linear *const *w, int n, const float *x,
                              const float *norm, float eps, int rows) {
    const gpu_mat *m[MOST_LINEARS];
    if (n > MOST_LINEARS || h) return false;
    for (int i = 0; i < n; i++) m[i] = mat_of(w[i]);
    return gpu_norm_linears(gpu_of(o), y, m, n, x, norm, eps, rows);
}

static bool cuda_linear_add(ops *o, float *x, const float *h, const linear *w, int rows) {
    return gpu_linear_add(gpu_of(o), x, h, mat_of(w), rows);
}

static bool cuda_gated_linear_add(ops *o, float *x, const float *in, const float *z, const float *norm, int heads,
                                  int dim, float eps, const linear *w, int rows) {
    return gpu_gated_linear_add(gpu_of(o), x, in, z, norm, heads, dim, eps, mat_of(w), rows);
}

static bool cuda_moe_block(ops *o, float *x, const ops_moe_block *b, int rows) {
    if (((const cuda_experts *)b->ex)->on_cpu) return false;
    const gpu_moe_block d = { .norm = b->norm,
                              .eps = b->eps,
                              .router = *mat_of(b->router),
                              .shared_gate = *mat_of(b->shared_gate),
                              .gate = *mat_of(b->gate),
                              .up = *mat_of(b->up),
                              .down = *mat_of(b->down),
                              .ex = ((const cuda_experts *)b->ex)->x,
                              .k = b->k };
    return gpu_moe_all(gpu_of(o), x, &d, rows);
}

static void cuda_close(ops *o) {
    cuda *c = o->self;
    for (int i = 0; i < c->n_series; i++) gpu_graph_free(c->all[i].graph);
    gpu_close(c->g);
    if (c->host) c->host->close(c->host);
    free(c->shared);
    free(c->spans);
    free(c->host_spans);
    free(c->host_rows);
    free(c);
    free(o);
}

static const ops CUDA = {
    .device = "cuda",
    .threads = 1,
    .mem_new = cuda_mem_new,
    .mem_free = cuda_mem_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .fill_zero = cuda_zero,
    .copy = cuda_copy,
    .linear_new = cuda_linear_new,
    .linear_free = cuda_linear_free,
    .experts_new = cuda_experts_new,
    .experts_free = cuda_experts_free,
    .head_new = cuda_head_new,
    .head_free = cuda_head_free,
    .sync = cuda_sync,
    .close = cuda_close,
    .memory_available = cuda_memory_available,
    .work_bytes = cuda_work_bytes,
    .series_begin = cuda_series_begin,
    .series_end = cuda_series_end,
    .embed = cuda_embed,
    .rmsnorm = cuda_rmsnorm,
    .linear = cuda_linear_op,
    .add = cuda_add,
    .silu_mul = cuda_silu_mul,
    .gather_rows = cuda_gather_rows,
    .argmax = cuda_argmax,
    .head_top = cuda_head_top,
    .conv = cuda_conv,
    .gdn = cuda_gdn,
    .gated_norm = cuda_gated_norm,
    .qk_rope = cuda_qk_rope,
    .kv_append = cuda_kv_append,
    .attention = cuda_attention,
    .route = cuda_route,
    .moe = cuda_moe,
    .moe_hidden = cuda_moe_hidden,
    .moe_combine = cuda_moe_combine,
    .norm_linears = cuda_norm_linears,
    .linear_add = cuda_linear_add,
    .gated_linear_add = cuda_gated_linear_add,
    .moe_block = cuda_moe_block,
};

static bool refuse(gpu_fault f, const gpu_info *i, const char *why, err *e) {
    switch (f) {
    case GPU_NO_DRIVER:
        return fail(e, ERR_MACHINE, "E-CUDA-DRIVER",
                    "--device cuda: no NVIDIA driver is installed (install it, or use "
                    "--device cpu)");
    case GPU_OLD_DRIVER:
        return fail(e, ERR_MACHINE, "E-CUDA-DRIVER",
                    "--device cuda: the driver knows CUDA %d.%d, this program needs %d.%d (install a newer driver)",
                    i->driver / 1000, i->driver % 1000 / 10, i->runtime / 1000, i->runtime % 1000 / 10);
    case GPU_NO_DEVICE:
        return fail(e, ERR_MACHINE, "E-CUDA-DEVICE",
                    "--device cuda: no GPU can be used: %s (look at nvidia-smi and CUDA_VISIBLE_DEVICES)", why);
    case GPU_NO_CODE:
        return fail(e, ERR_MACHINE, "E-CUDA-ARCH",
                    "%s: compute capability %d.%d, for which this program holds no code (it needs 8.0 or newer)",
                    i->name, i->major, i->minor);
    default: return fail(e, ERR_MACHINE, "E-CUDA-FAILED", "--device cuda: %s", why);
    }
}

bool ops_cuda_open(ops **out, int threads, kern_isa isa, err *e) {
    cuda *c = xcalloc(1, sizeof *c);
    char why[256];
    const gpu_fault f = gpu_open(&c->g, &c->info, why);
    *out = NULL;
    if (f != GPU_OK) {
        const gpu_info info = c->info;
        free(c);
        return refuse(f, &info, why, e);
    }
    c->n_spans = -1;
    c->threads = threads;
    c->cap = isa;
    const char *graphs = getenv("NIBBLE_CUDA_GRAPHS");
    c->record = !(graphs && graphs[0] == '0');
    snprintf(c->isa, sizeof c->isa, "sm_%d%d", c->info.major, c->info.minor);
    ops *o = xmalloc(sizeof *o);
    *o = CUDA;
    o->isa = c->isa;
    /* Longer pieces read the experts fewer times, and keep more work memory. */
    o->prompt_rows = c->info.total_bytes >= (size_t)40 << 30 ? 1024 : 512;
    o->shared_memory = c->info.unified;
    o->self = c;
    *out = o;
    return true;
}

#endif
