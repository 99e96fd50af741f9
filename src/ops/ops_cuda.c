/* The CUDA backend: fills ops.h with the launchers of ops/cuda/gpu.h. Host code only; without CUDA at build time it only says
 * so. */
#include "ops/cuda/gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/ops_head.h"

#ifndef NIBBLE_CUDA

bool ops_cuda_open(ops **out, err *e) {
    *out = NULL;
    return fail(
        e, ERR_MACHINE, "E-CUDA-BUILD",
        "--device cuda: this program was built without CUDA (install the CUDA toolkit, so that nvcc is found, and "
        "build again)");
}

#else

/* A host range that lies on the device: several handles may be parts of one matrix (embedding, head, its real rows). */
typedef struct shared_data {
    const char *host;
    char *device;
    size_t bytes;
    int users;
} shared_data;

/* A recorded series of ops, or one that was seen once. */
typedef struct series {
    const void *what, *with;
    int rows, n_spans, tiles;
    bool tentative;
    unsigned work_changes; /* work memory moved since: the record is void */
    gpu_graph *graph;      /* NULL: seen once */
    uint64_t used;
} series;
enum { MOST_SERIES = 64, MOST_SERIES_ROWS = 64 };

typedef struct cuda {
    gpu *g;
    series all[MOST_SERIES];
    series *recording;
    int n_series;
    uint64_t clock;
    bool record; /* NIBBLE_CUDA_GRAPHS=0: no */
    gpu_info info;
    char isa[16];
    shared_data *shared;
    int n_shared;
    /* spans that lie in GPU_WORK_SPANS */
    ops_span *spans;
    gpu_span *host_spans;
    gpu_row *host_rows;
    int n_spans, cap_spans, cap_rows;
    unsigned moves; /* how often the spans' places changed */
    gpu_spans on_device;
} cuda;

typedef struct cuda_linear {
    linear base;
    gpu_mat m;
    int share; /* index in shared, or -1: m.data is its own block */
} cuda_linear;

typedef struct cuda_experts {
    experts base;
    gpu_experts x;
    void *block, *mats;
} cuda_experts;

typedef struct cuda_head {
    lm_head base;
    const cuda_linear *full;
} cuda_head;

static cuda *self(ops *o) { return o->self; }
static gpu *gpu_of(ops *o) { return self(o)->g; }
static const gpu_mat *mat(const linear *w) { return &((const cuda_linear *)w)->m; }

/* ---- memory ---- */

static bool out_of_memory(cuda *c, size_t bytes, err *e) {
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY",
                "%s: cannot get %zu bytes, %.2f GB are free (use a shorter context or --kv fp8)", c->info.name, bytes,
                (double)gpu_free_bytes(c->g) / 1e9);
}

static bool cuda_mem_new(ops *o, void **out, size_t bytes, err *e) {
    alloc_counted();
    *out = gpu_alloc(gpu_of(o), bytes);
    return *out || out_of_memory(self(o), bytes, e);
}
static void cuda_mem_free(ops *o, void *p) { gpu_free(gpu_of(o), p); }
static void cuda_upload(ops *o, void *dst, const void *src, size_t bytes) { gpu_upload(gpu_of(o), dst, src, bytes); }
static void cuda_download(ops *o, void *dst, const void *src, size_t bytes) {
    gpu_download(gpu_of(o), dst, src, bytes);
}
static void cuda_zero(ops *o, void *dst, size_t bytes) { gpu_zero(gpu_of(o), dst, bytes); }
static void cuda_copy(ops *o, void *dst, const void *src, size_t bytes) { gpu_copy(gpu_of(o), dst, src, bytes); }

static int64_t cuda_memory_available(ops *o) { return (int64_t)gpu_free_bytes(gpu_of(o)); }

static bool cuda_sync(ops *o, err *e) {
    char why[256];
    if (gpu_sync(gpu_of(o), why)) return true;
    return fail(e, ERR_MACHINE, "E-CUDA-FAILED", "%s: %s", self(o)->info.name, why);
}

/* ---- weights ---- */

static gpu_format format_of(dtype t, linear_format f) {
    if (f == LINEAR_NVFP4) return GPU_NVFP4;
    if (f == LINEAR_FP8) return GPU_FP8;
    return t == DT_F32 ? GPU_F32 : t == DT_F16 ? GPU_F16 : GPU_BF16;
}

static gpu_mat mat_of(dtype t, int rows, int cols, const linear_quant *q) {
    static const gpu_act acts[] = { [LINEAR_ACT_FLOAT] = GPU_ACT_FLOAT,
                                    [LINEAR_ACT_FP4] = GPU_ACT_FP4,
                                    [LINEAR_ACT_INT8] = GPU_ACT_INT8,
                                    [LINEAR_ACT_FP8] = GPU_ACT_FP8 };
    return (gpu_mat){ .format = format_of(t, q->format),
                      .act = q->format == LINEAR_PLAIN ? GPU_ACT_FLOAT : acts[q->act],
                      .rows = rows,
                      .cols = cols,
                      .scale_2 = q->scale_2,
                      .input_scale = q->input_scale };
}

static size_t aligned(size_t bytes) { return (bytes + 255) & ~(size_t)255; }
static size_t data_bytes(const gpu_mat *m, dtype t) {
    return (size_t)m->rows * (size_t)m->cols * (size_t)dtype_bytes(t) / (m->format == GPU_NVFP4 ? 2 : 1);
}
static size_t scale_bytes(const gpu_mat *m) {
    return m->format == GPU_NVFP4 ? (size_t)m->rows * (size_t)m->cols / 16 : 0;
}

/* Codes, then scales, at `at`. */
static char *place(cuda *c, gpu_mat *m, char *at, dtype t, const void *data, const uint8_t *scales) {
    m->data = at;
    gpu_upload_bulk(c->g, at, data, data_bytes(m, t));
    at += aligned(data_bytes(m, t));
    m->scales = scale_bytes(m) ? (const uint8_t *)at : NULL;
    gpu_upload_bulk(c->g, at, scales, scale_bytes(m));
    return at + aligned(scale_bytes(m));
}

/* Shared memory holds one quantized row. */
static bool check_cols(const char *name, int cols, err *e) {
    if (cols <= 24576) return true;
    return fail(e, ERR_INPUT, "E-CUDA-SHAPE",
                "%s: %d columns, and the GPU kernels take at most 24576 (use --device cpu)", name, cols);
}

static bool share_data(cuda *c, cuda_linear *w, const void *data, size_t bytes, err *e) {
    const char *from = data;
    int free_place = -1;
    for (int i = 0; i < c->n_shared; i++) {
        shared_data *s = &c->shared[i];
        if (!s->users) {
            free_place = i;
        } else if (from >= s->host && from + bytes <= s->host + s->bytes && (from - s->host) % 256 == 0) {
            s->users++;
            w->share = i;
            w->m.data = s->device + (from - s->host);
            return true;
        }
    }
    char *p = gpu_alloc(c->g, bytes);
    if (!p) return out_of_memory(c, bytes, e);
    gpu_upload_bulk(c->g, p, data, bytes);
    if (free_place < 0) {
        c->shared = xrealloc(c->shared, (size_t)(c->n_shared + 1) * sizeof *c->shared);
        free_place = c->n_shared++;
    }
    c->shared[free_place] = (shared_data){ from, p, bytes, 1 };
    w->share = free_place;
    w->m.data = p;
    return true;
}

static bool cuda_linear_new(ops *o, linear **out, const linear_desc *d, err *e) {
    cuda *c = self(o);
    linear *plain;
    if (!check_cols(d->name ? d->name : "", d->cols, e) || !host_linear_new(o, &plain, d, e)) return false;
    cuda_linear *w = xmalloc(sizeof *w);
    *w = (cuda_linear){ .base = *plain, .m = mat_of(d->type, d->rows, d->cols, &d->q), .share = -1 };
    free(plain);
    bool ok = true;
    if (d->q.format == LINEAR_PLAIN) {
        ok = share_data(c, w, d->data, data_bytes(&w->m, d->type), e);
    } else {
        const size_t bytes = aligned(data_bytes(&w->m, d->type)) + aligned(scale_bytes(&w->m));
        w->base.packed = gpu_alloc(c->g, bytes);
        ok = w->base.packed || out_of_memory(c, bytes, e);
        if (ok) place(c, &w->m, (char *)w->base.packed, d->type, d->data, d->q.scales);
    }
    if (ok) return *out = &w->base, true;
    host_linear_free(o, &w->base);
    return false;
}

static void cuda_linear_free(ops *o, linear *base) {
    cuda *c = self(o);
    cuda_linear *w = (cuda_linear *)base;
    if (!w) return;
    gpu_free(c->g, base->packed);
    if (w->share >= 0 && --c->shared[w->share].users == 0) gpu_free(c->g, c->shared[w->share].device);
    host_linear_free(o, base);
}

static bool same_mode(const gpu_mat *a, const gpu_mat *b) {
    return a->act == b->act && a->input_scale == b->input_scale;
}

static const linear_quant *quant_of(const experts_desc *d, int kind, int e) {
    static const linear_quant none = { .format = LINEAR_PLAIN };
    const linear_quant *q = kind == 0 ? d->gate_q : kind == 1 ? d->up_q : d->down_q;
    return q ? &q[e] : &none;
}

static int64_t offset_of(const cuda_experts *x, const void *p) { return (const char *)p - (const char *)x->block; }

/* All experts of a layer in one block: gate, up, down of the first, codes before scales, then those of the next. */
static bool place_experts(cuda *c, cuda_experts *x, gpu_mat *mats, const experts_desc *d, err *e) {
    const int n = d->count;
    size_t bytes = 0;
    for (int i = 0; i < 3 * n; i++) {
        const bool down = i / n == 2;
        mats[i] = mat_of(d->type, down ? d->hidden : d->inter, down ? d->inter : d->hidden, quant_of(d, i / n, i % n));
        bytes += aligned(data_bytes(&mats[i], d->type)) + aligned(scale_bytes(&mats[i]));
    }
    x->block = gpu_alloc(c->g, bytes);
    x->mats = gpu_alloc(c->g, 3 * (size_t)n * sizeof *mats);
    if (!x->block || !x->mats) return out_of_memory(c, bytes, e);
    char *at = x->block;
    for (int i = 0; i < n; i++) {
        const void *data[3] = { d->gate[i], d->up[i], d->down[i] };
        for (int k = 0; k < 3; k++) at = place(c, &mats[k * n + i], at, d->type, data[k], quant_of(d, k, i)->scales);
    }
    gpu_upload(c->g, x->mats, mats, 3 * (size_t)n * sizeof *mats);
    const gpu_mat *on = x->mats;
    gpu_experts *g = &x->x;
    *g = (gpu_experts){ .gate = on,
                        .up = on + n,
                        .down = on + 2 * n,
                        .like_in = mats[0],
                        .like_down = mats[2 * n],
                        .block = x->block,
                        .stride = (int64_t)bytes / n,
                        .gate_scales = offset_of(x, mats[0].scales),
                        .up_codes = offset_of(x, mats[n].data),
                        .up_scales = offset_of(x, mats[n].scales),
                        .down_codes = offset_of(x, mats[2 * n].data),
                        .down_scales = offset_of(x, mats[2 * n].scales),
                        .count = n,
                        .inter = d->inter,
                        .hidden = d->hidden,
                        .one_in_scale = true,
                        .same_in = true,
                        .uniform = true };
    for (int i = 0; i < 2 * n; i++) {
        g->one_in_scale = g->one_in_scale && same_mode(&mats[i], &mats[0]);
        g->same_in = g->same_in && same_mode(&mats[i], &mats[i % n]);
        g->uniform = g->uniform && mats[i].act == mats[0].act && mats[2 * n + i % n].act == mats[2 * n].act;
    }
    if (!g->uniform) g->like_in.act = g->like_down.act = GPU_ACT_FLOAT; /* no mode takes more room */
    return true;
}

static void cuda_experts_free(ops *o, experts *base) {
    cuda_experts *x = (cuda_experts *)base;
    if (!x) return;
    gpu_free(gpu_of(o), x->block);
    gpu_free(gpu_of(o), x->mats);
    host_experts_free(o, base);
}

static bool cuda_experts_new(ops *o, experts **out, const experts_desc *d, err *e) {
    experts *plain;
    const char *name = d->name ? d->name : "";
    if (!check_cols(name, d->hidden, e) || !check_cols(name, d->inter, e) || !host_experts_new(o, &plain, d, e))
        return false;
    cuda_experts *x = xmalloc(sizeof *x);
    *x = (cuda_experts){ .base = *plain };
    free(plain);
    gpu_mat *mats = xcalloc(3 * (size_t)d->count, sizeof *mats);
    const bool ok = place_experts(self(o), x, mats, d, e);
    free(mats);
    if (ok) return *out = &x->base, true;
    cuda_experts_free(o, &x->base);
    return false;
}

/* ---- heads: all logits, then the best of them ---- */

static bool cuda_head_new(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e) {
    (void)o, (void)screen, (void)e;
    lm_head *plain = head_plain(full, rows);
    cuda_head *h = xmalloc(sizeof *h);
    *h = (cuda_head){ .base = *plain, .full = (const cuda_linear *)full };
    free(plain);
    *out = &h->base;
    return true;
}

static void cuda_head_free(ops *o, lm_head *h) {
    (void)o;
    free(h);
}

enum { HEAD_GROUP = 8 };

/* What one group of rows needs on the device, cut from one block. */
typedef struct head_parts {
    float *logits;
    uint64_t *allowed;
    int32_t *extra; /* ids, then the row of each */
    char *out;      /* read back at once: finite [rows], ids [rows, k], logits [rows, k], extra logits */
} head_parts;

static size_t cut_parts(head_parts *r, char *base, int rows, int n, int k, int extra) {
    size_t at = 0;
    const size_t words = ((size_t)n + 63) / 64;
    struct {
        void **p;
        size_t bytes;
    } parts[] = { { (void **)&r->logits, (size_t)rows * (size_t)n * sizeof(float) },
                  { (void **)&r->allowed, (size_t)rows * words * sizeof(uint64_t) },
                  { (void **)&r->extra, 2 * (size_t)extra * sizeof(int32_t) },
                  { (void **)&r->out, (size_t)(rows * (2 * k + 1) + extra) * sizeof(float) } };
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        if (base) *parts[i].p = base + at;
        at += aligned(parts[i].bytes);
    }
    return at;
}

static void upload_masks(gpu *g, uint64_t *to, const head_query *q, int rows, int n) {
    const size_t words = ((size_t)n + 63) / 64;
    uint64_t *mask = xmalloc((size_t)rows * words * sizeof *mask);
    for (int r = 0; r < rows; r++) head_mask(mask + (size_t)r * words, n, &q[r]);
    gpu_upload(g, to, mask, (size_t)rows * words * sizeof *mask);
    free(mask);
}

static void upload_extra(gpu *g, int32_t *to, const head_query *q, int rows, int n_extra, int n) {
    int32_t *list = xmalloc(2 * (size_t)n_extra * sizeof *list);
    for (int r = 0, at = 0; r < rows; r++)
        for (int i = 0; i < q[r].n_extra; i++, at++) {
            CHECK(q[r].extra[i] >= 0 && q[r].extra[i] < n, "extra id %d of %d", q[r].extra[i], n);
            list[at] = q[r].extra[i];
            list[n_extra + at] = r;
        }
    gpu_upload(g, to, list, 2 * (size_t)n_extra * sizeof *list);
    free(list);
}

static void head_group(ops *o, int32_t *ids, float *logits, float *extra, cuda_head *h, const float *hidden, int rows,
                       int k, const head_query *q) {
    gpu *g = gpu_of(o);
    const int n = h->base.rows, cols = h->base.cols;
    int n_extra = 0;
    bool masked = false;
    for (int r = 0; q && r < rows; r++) n_extra += q[r].n_extra, masked = masked || q[r].n_extra || q[r].allowed;
    head_parts m = { 0 };
    const int words = rows * (2 * k + 1) + n_extra;
    char *base = gpu_work(g, GPU_WORK_C, cut_parts(&m, NULL, rows, n, k, n_extra));
    float *host = xcalloc((size_t)words, sizeof *host);
    if (base) {
        cut_parts(&m, base, rows, n, k, n_extra);
        gpu_mat w = h->full->m;
        w.rows = n;
        int32_t *finite = (int32_t *)(void *)m.out;
        float *out = (float *)(void *)m.out + rows;
        if (masked && k > 0) upload_masks(g, m.allowed, q, rows, n);
        if (n_extra) upload_extra(g, m.extra, q, rows, n_extra, n);
        gpu_finite(g, finite, hidden, rows, cols);
        if (k > 0) {
            gpu_linear(g, m.logits, n, hidden, cols, &w, rows);
            gpu_top(g, (int32_t *)(void *)out, out + rows * k, m.logits, masked ? m.allowed : NULL, finite, rows, n, k);
        }
        if (n_extra)
            gpu_linear_some(g, out + 2 * rows * k, hidden, cols, &w, m.extra, m.extra + n_extra, n_extra, finite);
        gpu_download(g, host, m.out, (size_t)words * sizeof *host);
    }
    const int32_t *finite = (const int32_t *)(const void *)host;
    for (int r = 0; r < rows && k > 0; r++) {
        h->base.counts.rows += finite[r];
        h->base.counts.full += finite[r];
    }
    if (k > 0) {
        memcpy(ids, host + rows, (size_t)rows * (size_t)k * sizeof *ids);
        memcpy(logits, host + rows * (1 + k), (size_t)rows * (size_t)k * sizeof *logits);
    }
    if (n_extra) memcpy(extra, host + rows * (1 + 2 * k), (size_t)n_extra * sizeof *extra);
    free(host);
}

static void cuda_head_top(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *base, const float *hidden,
                          int rows, int k, const head_query *q) {
    CHECK(k >= 0 && k <= HEAD_MAX_TOP, "top %d of a head", k);
    cuda_head *h = (cuda_head *)base;
    for (int r = 0; r < rows; r += HEAD_GROUP) {
        const int m = rows - r < HEAD_GROUP ? rows - r : HEAD_GROUP;
        head_group(o, k ? ids + (int64_t)r * k : NULL, k ? logits + (int64_t)r * k : NULL, extra_logits, h,
                   hidden + (int64_t)r * base->cols, m, k, q ? q + r : NULL);
        for (int i = 0; q && i < m; i++)
            if (q[r + i].n_extra) extra_logits += q[r + i].n_extra;
    }
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
    cuda *c = self(o);
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
    }
    c->recording = s;
    s->work_changes = seen ? s->work_changes : 0;
    return false;
}

static void cuda_series_end(ops *o) {
    cuda *c = self(o);
    series *s = c->recording;
    if (!s) return;
    c->recording = NULL;
    if (s->work_changes == 0) {
        s->work_changes = changes(c);
        return;
    }
    s->graph = gpu_graph_end(c->g);
    CHECK(s->graph, "a series of ops that cannot be recorded");
    gpu_graph_run(c->g, s->graph);
}

/* ---- rows ---- */

static void cuda_embed(ops *o, float *y, const linear *table, const int32_t *ids, int rows) {
    gpu_embed(gpu_of(o), y, mat(table), ids, rows);
}
static void cuda_rmsnorm(ops *o, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps) {
    gpu_rmsnorm(gpu_of(o), y, x, ldx, w, rows, n, eps);
}
static void cuda_linear_op(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    gpu_linear(gpu_of(o), y, ldy, x, ldx, mat(w), rows);
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
             spans_of(self(o), spans, n_spans));
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
    gpu_gdn_step(gpu_of(o), out, c, a, b, neg_a, dt_bias, &d, spans_of(self(o), spans, n_spans),
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
    gpu_kv_append(gpu_of(o), &d, k, v, spans_of(self(o), spans, n_spans));
}

static void cuda_attention(ops *o, float *y, const float *q, const float *qg, const ops_kv *kv, int heads, float scale,
                           const ops_span *spans, int n_spans) {
    ops_check_kv_spans(kv, spans, n_spans);
    CHECK(heads % kv->kv_heads == 0, "%d heads over %d", heads, kv->kv_heads);
    const gpu_kv d = kv_of(kv);
    gpu_attention(gpu_of(o), y, q, qg, &d, heads, scale, spans_of(self(o), spans, n_spans));
}

/* ---- experts ---- */

static void cuda_route(ops *o, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k) {
    CHECK(k >= 1 && k <= n_experts, "top %d of %d", k, n_experts);
    gpu_route(gpu_of(o), idx, wt, logits, rows, n_experts, k);
}
static void cuda_moe_hidden(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx,
                            const float *wt, int rows, int k) {
    gpu_moe(gpu_of(o), y, hidden, x, &((const cuda_experts *)ex)->x, idx, wt, rows, k);
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

static bool cuda_norm_linears(ops *o, float *const *y, const linear *const *w, int n, const float *x, const float *norm,
                              float eps, int rows) {
    const gpu_mat *m[MOST_LINEARS];
    if (n > MOST_LINEARS) return false;
    for (int i = 0; i < n; i++) m[i] = mat(w[i]);
    return gpu_norm_linears(gpu_of(o), y, m, n, x, norm, eps, rows);
}

static bool cuda_linear_add(ops *o, float *x, const float *h, const linear *w, int rows) {
    return gpu_linear_add(gpu_of(o), x, h, mat(w), rows);
}

static bool cuda_gated_linear_add(ops *o, float *x, const float *in, const float *z, const float *norm, int heads,
                                  int dim, float eps, const linear *w, int rows) {
    return gpu_gated_linear_add(gpu_of(o), x, in, z, norm, heads, dim, eps, mat(w), rows);
}

static bool cuda_moe_block(ops *o, float *x, const ops_moe_block *b, int rows) {
    const gpu_moe_block d = { .norm = b->norm,
                              .eps = b->eps,
                              .router = *mat(b->router),
                              .shared_gate = *mat(b->shared_gate),
                              .gate = *mat(b->gate),
                              .up = *mat(b->up),
                              .down = *mat(b->down),
                              .ex = ((const cuda_experts *)b->ex)->x,
                              .k = b->k };
    return gpu_moe_all(gpu_of(o), x, &d, rows);
}

static void cuda_close(ops *o) {
    cuda *c = o->self;
    for (int i = 0; i < c->n_series; i++) gpu_graph_free(c->all[i].graph);
    gpu_close(c->g);
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

bool ops_cuda_open(ops **out, err *e) {
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
    const char *graphs = getenv("NIBBLE_CUDA_GRAPHS");
    c->record = !(graphs && graphs[0] == '0');
    snprintf(c->isa, sizeof c->isa, "sm_%d%d", c->info.major, c->info.minor);
    ops *o = xmalloc(sizeof *o);
    *o = CUDA;
    o->isa = c->isa;
    /* Longer pieces read the experts fewer times, and keep more work memory. */
    o->prompt_rows = c->info.total_bytes >= (size_t)40 << 30 ? 1024 : 512;
    o->self = c;
    *out = o;
    return true;
}

#endif
