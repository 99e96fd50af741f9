/* nibble bench kernels: one op at a time over the model's shapes, each over as many weights as no cache holds. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cmd/bench.h"

static const bench_column columns[] = {
    { "kernel", "kernel", -1, BENCH_MAIN },
    { "shape", "shape", -1, BENCH_MAIN },
    { "rows", "rows", 0, BENCH_MAIN },
    { "gb_s", "GB/s", 2, BENCH_MAIN },
    { "gb_s_min", "min", 2, BENCH_MAIN },
    { "gb_s_max", "max", 2, BENCH_MAIN },
    { "gmac_s", "GMAC/s", 1, BENCH_MAIN },
    { "us", "us", 1, BENCH_MAIN },
    { "read_gb_s_before", "read GB/s", 2, BENCH_MAIN },
    { "read_gb_s_after", "after", 2, BENCH_MAIN },
    { "share", "of the read", 3, BENCH_MAIN },
};

enum { COPIES_MAX = 512, HEAD_ROWS_MAX = 8, CONTEXT = 4096 };

typedef struct bench {
    const bench_options *o;
    mock s;
    bench_reader reader;
    ops *dev;
    bench_report report;
    size_t beyond; /* bytes of weights that calls go through in turn */
    float *x, *y;  /* device */
    size_t x_floats, y_floats;
    double before;
    volatile const int *cancel;
} bench;

/* One kind of call; `at` counts calls, so that each takes other weights than the last. */
typedef struct call {
    bench *b;
    int rows;
    void (*run)(const struct call *c, int at);
    double bytes, macs; /* of one call */
    linear **w;
    int n;
    experts *ex;
    int32_t *idx, *all_idx; /* device [rows, k]; host [n][rows, k] */
    float *wt;
    lm_head *head;
    ops_kv *kv;
    ops_gdn *gdn;
    float *vec;
} call;

static bool measure(bench *b, call *c, const char *kernel, const char *shape, err *e) {
    bench_series gb = { .n = 0 };
    double us = 0;
    int at = 0;
    for (int i = -1; i < b->o->repeat && !*b->cancel; i++) {
        const double t0 = clock_seconds();
        int calls = 0;
        double t;
        do {
            c->run(c, at++);
            calls++;
            if (!b->dev->sync(b->dev, e)) return false;
            t = clock_seconds() - t0;
        } while (t < b->o->ms * 1e-3 && !*b->cancel);
        if (i < 0) continue; /* warms up */
        gb.v[gb.n++] = calls * c->bytes / t / 1e9;
    }
    if (*b->cancel) return true;
    const double after = bench_read(&b->reader);
    const bench_spread v = bench_spread_of(&gb);
    us = c->bytes / v.median / 1e3;
    bench_text(&b->report.table, kernel);
    bench_text(&b->report.table, shape);
    const double row[] = { c->rows,
                           v.median,
                           v.min,
                           v.max,
                           c->macs > 0 ? c->macs / us / 1e3 : (double)NAN,
                           us,
                           b->before / 1e9,
                           after / 1e9,
                           v.median * 1e9 / ((b->before + after) / 2) };
    for (size_t i = 0; i < ARRAY_LEN(row); i++) bench_number(&b->report.table, row[i]);
    b->before = after;
    return true;
}

static bool room(bench *b, int64_t x, int64_t y, err *e) {
    ops *o = b->dev;
    void *p = NULL;
    if ((size_t)x > b->x_floats) {
        o->mem_free(o, b->x);
        b->x = NULL;
        if (!o->mem_new(o, &p, (size_t)x * sizeof(float), e)) return false;
        b->x = p;
        b->x_floats = (size_t)x;
        float *v = xmalloc((size_t)x * sizeof *v);
        for (int64_t i = 0; i < x; i++) v[i] = (float)((unsigned)i * 2654435761u >> 16 & 0xfff) / 2048.0f - 1;
        o->upload(o, b->x, v, (size_t)x * sizeof *v);
        free(v);
    }
    if ((size_t)y > b->y_floats) {
        o->mem_free(o, b->y);
        b->y = NULL;
        if (!o->mem_new(o, &p, (size_t)y * sizeof(float), e)) return false;
        b->y = p;
        b->y_floats = (size_t)y;
    }
    return true;
}

/* ---- NVFP4 and BF16 matrices ---- */

static void run_linear(const call *c, int at) {
    ops *o = c->b->dev;
    const linear *w = c->w[at % c->n];
    o->linear(o, c->b->y, linear_rows(w), c->b->x, linear_cols(w), w, c->rows);
}

static linear_act act_of(const bench_options *o) {
    return o->act == ACT_INT8 ? LINEAR_ACT_INT8 : o->act == ACT_BF16 ? LINEAR_ACT_FLOAT : LINEAR_ACT_FP4;
}

static linear_quant quant_of(const bench_options *o, const wquant *q) {
    return (linear_quant){ .format = LINEAR_NVFP4,
                           .act = act_of(o),
                           .scales = q->scales,
                           .scale_2 = q->scale_2,
                           .input_scale = q->input_scale };
}

static bool matrix(bench *b, int rows, int cols, err *e) {
    linear *copies[COPIES_MAX] = { NULL };
    call c = { .b = b, .run = run_linear, .w = copies };
    const wmat m = mock_matrix(&b->s, "matrix", rows, cols);
    const double bytes = (double)rows * cols * 9 / 16;
    bool ok = true;
    while (ok && c.n < COPIES_MAX && (c.n == 0 || c.n * bytes < (double)b->beyond)) {
        const linear_desc d = {
            .name = m.name, .type = DT_U8, .rows = rows, .cols = cols, .data = m.data, .q = quant_of(b->o, &m.q)
        };
        ok = b->dev->linear_new(b->dev, &copies[c.n], &d, e);
        c.n += ok;
    }
    char shape[40];
    snprintf(shape, sizeof shape, "%dx%d", rows, cols);
    for (int i = 0; ok && i < b->o->rows.n && !*b->cancel; i++) {
        c.rows = b->o->rows.v[i];
        c.bytes = bytes;
        c.macs = (double)rows * cols * c.rows;
        ok = room(b, (int64_t)c.rows * cols, (int64_t)c.rows * rows, e) && measure(b, &c, "nvfp4", shape, e);
    }
    for (int i = 0; i < c.n; i++) b->dev->linear_free(b->dev, copies[i]);
    return ok;
}

/* Each shape of the model's NVFP4 Linears once. */
static bool matrices(bench *b, err *e) {
    const model_config *c = &b->s.config;
    const int q = c->heads * c->head_dim;
    const int shapes[][2] = { { config_conv_dim(c), c->hidden },        { config_value_dim(c), c->hidden },
                              { c->hidden, config_value_dim(c) },       { q * (c->attn_gate ? 2 : 1), c->hidden },
                              { c->kv_heads * c->head_dim, c->hidden }, { c->hidden, q },
                              { c->shared_inter, c->hidden },           { c->hidden, c->shared_inter } };
    for (int i = 0; i < (int)ARRAY_LEN(shapes) && !*b->cancel; i++) {
        bool seen = false;
        for (int j = 0; j < i; j++) seen = seen || memcmp(shapes[i], shapes[j], sizeof shapes[i]) == 0;
        if (!seen && !matrix(b, shapes[i][0], shapes[i][1], e)) return false;
    }
    return true;
}

/* ---- experts ---- */

static void run_experts(const call *c, int at) {
    ops *o = c->b->dev;
    const int k = c->b->s.config.topk;
    const size_t n = (size_t)c->rows * (size_t)k;
    o->upload(o, c->idx, c->all_idx + (size_t)(at % c->n) * n, n * sizeof(int32_t));
    o->moe(o, c->b->y, c->b->x, c->ex, c->idx, c->wt, c->rows, k);
}

/* c->n routings of c->rows rows, k distinct experts each in increasing order; mean number of distinct ones of a routing. */
static double make_routes(call *c, int n_experts, int k) {
    uint8_t *used = xcalloc((size_t)n_experts, 1);
    double distinct = 0;
    uint32_t r = 1;
    for (int i = 0; i < c->n; i++) {
        memset(used, 0, (size_t)n_experts);
        for (int row = 0; row < c->rows; row++) {
            int32_t *to = c->all_idx + ((size_t)i * (size_t)c->rows + (size_t)row) * (size_t)k;
            for (int j = 0; j < k;) {
                r = r * 1664525u + 1013904223u;
                const int32_t x = (int32_t)((uint64_t)r * (uint64_t)n_experts >> 32);
                int at = j;
                while (at > 0 && to[at - 1] > x) at--;
                if (at > 0 && to[at - 1] == x) continue;
                memmove(to + at + 1, to + at, (size_t)(j - at) * sizeof *to);
                to[at] = x;
                j++;
                distinct += !used[x];
                used[x] = 1;
            }
        }
    }
    free(used);
    return distinct / c->n;
}

static bool route_room(call *c, int k, err *e) {
    ops *o = c->b->dev;
    const size_t n = (size_t)c->rows * (size_t)k;
    void *idx = NULL, *wt = NULL;
    if (!o->mem_new(o, &idx, n * sizeof(int32_t), e) || !o->mem_new(o, &wt, n * sizeof(float), e))
        return o->mem_free(o, idx), false;
    float *v = xmalloc(n * sizeof *v);
    for (size_t i = 0; i < n; i++) v[i] = 1.0f / (float)k;
    o->upload(o, wt, v, n * sizeof *v);
    free(v);
    c->idx = idx;
    c->wt = wt;
    c->all_idx = xmalloc((size_t)c->n * n * sizeof *c->all_idx);
    return true;
}

static bool experts_rows(call *c, const char *shape, err *e) {
    bench *b = c->b;
    const model_config *m = &b->s.config;
    c->n = 64;
    bool ok = route_room(c, m->topk, e);
    if (ok) {
        const double one = 3.0 * m->moe_inter * m->hidden;
        c->bytes = make_routes(c, m->experts, m->topk) * one * 9 / 16;
        c->macs = one * m->topk * c->rows;
        ok = room(b, (int64_t)c->rows * m->hidden, (int64_t)c->rows * m->hidden, e) &&
             measure(b, c, "experts", shape, e);
    }
    b->dev->mem_free(b->dev, c->idx);
    b->dev->mem_free(b->dev, c->wt);
    free(c->all_idx);
    c->idx = c->all_idx = NULL;
    c->wt = NULL;
    return ok;
}

static bool experts_op(bench *b, err *e) {
    const wexperts *x = &b->s.w.layers[0].ffn.experts;
    call c = { .b = b, .run = run_experts };
    const size_t n = (size_t)x->count;
    linear_quant *q = xcalloc(3 * n, sizeof *q);
    for (size_t i = 0; i < n; i++) {
        q[i] = quant_of(b->o, &x->gate_q[i]);
        q[n + i] = quant_of(b->o, &x->up_q[i]);
        q[2 * n + i] = quant_of(b->o, &x->down_q[i]);
    }
    const experts_desc d = { .name = x->name,
                             .type = x->type,
                             .count = x->count,
                             .inter = x->inter,
                             .hidden = x->hidden,
                             .gate = (const void *const *)x->gate,
                             .up = (const void *const *)x->up,
                             .down = (const void *const *)x->down,
                             .gate_q = q,
                             .up_q = q + n,
                             .down_q = q + 2 * n };
    bool ok = b->dev->experts_new(b->dev, &c.ex, &d, e);
    char shape[40];
    snprintf(shape, sizeof shape, "%d of %d", b->s.config.topk, x->count);
    for (int i = 0; ok && i < b->o->rows.n && !*b->cancel; i++) {
        c.rows = b->o->rows.v[i];
        ok = experts_rows(&c, shape, e);
    }
    if (c.ex) b->dev->experts_free(b->dev, c.ex);
    free(q);
    return ok;
}

/* ---- the output head ---- */

static void run_head(const call *c, int at) {
    int32_t ids[HEAD_ROWS_MAX];
    float logits[HEAD_ROWS_MAX];
    (void)at;
    c->b->dev->head_top(c->b->dev, ids, logits, NULL, c->head, c->b->x, c->rows, 1, NULL);
}

static bool head_rows(bench *b, call *c, const char *shape, err *e) {
    const wmat *m = &b->s.w.head;
    c->bytes = (double)m->rows * m->cols * 2;
    c->macs = (double)m->rows * m->cols * c->rows;
    c->run = run_linear;
    if (!room(b, (int64_t)c->rows * m->cols, (int64_t)c->rows * m->rows, e) || !measure(b, c, "bf16 head", shape, e))
        return false;
    /* Its bytes as the candidates of a first call make them. */
    const head_counts before = head_counted(c->head);
    run_head(c, 0);
    const head_counts after = head_counted(c->head);
    const double exact = (double)(after.candidates - before.candidates) + (double)(after.full - before.full) * m->rows;
    c->bytes = (double)head_bytes(c->head) + exact * m->cols * 2;
    c->run = run_head;
    return measure(b, c, "screened head", shape, e);
}

static bool head_op(bench *b, err *e) {
    const wmat *m = &b->s.w.head;
    linear *full = NULL;
    call c = { .b = b, .w = &full, .n = 1 };
    const linear_desc d = { .name = m->name, .type = m->type, .rows = m->rows, .cols = m->cols, .data = m->data };
    bool ok = b->dev->linear_new(b->dev, &full, &d, e) && b->dev->head_new(b->dev, &c.head, full, m->rows, true, e);
    char shape[40];
    snprintf(shape, sizeof shape, "%dx%d", m->rows, m->cols);
    for (int i = 0; ok && i < b->o->rows.n && !*b->cancel; i++) {
        c.rows = b->o->rows.v[i];
        if (c.rows <= HEAD_ROWS_MAX) ok = head_rows(b, &c, shape, e);
    }
    if (c.head) b->dev->head_free(b->dev, c.head);
    if (full) b->dev->linear_free(b->dev, full);
    return ok;
}

/* ---- attention and GDN: as many states as no cache holds ---- */

static bool device_floats(bench *b, float **out, size_t n, err *e) {
    void *p = NULL;
    const bool ok = b->dev->mem_new(b->dev, &p, n * sizeof(float), e);
    *out = p;
    if (ok) memset(p, 0x3d, n * sizeof(float)); /* host memory on CPUs: 0.046 */
    return ok;
}

static void run_attention(const call *c, int at) {
    const model_config *m = &c->b->s.config;
    const ops_span span = { .slot = at % c->n, .rows = c->rows, .pos0 = CONTEXT - c->rows };
    c->b->dev->attention(c->b->dev, c->b->y, c->b->x, NULL, c->kv, m->heads, 1.0f / sqrtf((float)m->head_dim), &span,
                         1);
}

static bool attention_op(bench *b, err *e) {
    const model_config *m = &b->s.config;
    const size_t one = (size_t)CONTEXT * (size_t)(m->kv_heads * m->head_dim);
    ops_kv kv = { .type = DT_F8_E4M3,
                  .kv_heads = m->kv_heads,
                  .dim = m->head_dim,
                  .capacity = CONTEXT,
                  .k_scale = 0.02f,
                  .v_scale = 0.02f };
    call c = { .b = b, .run = run_attention, .kv = &kv, .n = (int)min_i64(64, (int64_t)(b->beyond / (2 * one) + 1)) };
    enum { PAGES = CONTEXT / OPS_KV_PAGE };
    float *k = NULL, *v = NULL;
    int32_t table[64 * PAGES]; /* one after the other */
    void *pages = NULL;
    bool ok = device_floats(b, &k, (size_t)c.n * one / 4, e) && device_floats(b, &v, (size_t)c.n * one / 4, e) &&
              b->dev->mem_new(b->dev, &pages, sizeof table, e);
    for (int i = 0; i < c.n * PAGES; i++) table[i] = i;
    if (ok) b->dev->upload(b->dev, pages, table, (size_t)(c.n * PAGES) * sizeof *table);
    kv.k = k;
    kv.v = v;
    kv.pages = pages;
    kv.slot_pages = PAGES;
    const int heads = m->heads * m->head_dim;
    for (int i = 0; ok && i < b->o->rows.n && !*b->cancel; i++) {
        c.rows = b->o->rows.v[i];
        if (c.rows > CONTEXT) continue;
        c.bytes = 2.0 * (double)one;
        c.macs = 2.0 * heads * c.rows * (CONTEXT - c.rows / 2.0);
        ok = room(b, (int64_t)c.rows * heads, (int64_t)c.rows * heads, e) &&
             measure(b, &c, "attention fp8", "context 4096", e);
    }
    b->dev->mem_free(b->dev, k);
    b->dev->mem_free(b->dev, v);
    if (pages) b->dev->mem_free(b->dev, pages);
    return ok;
}

static void run_gdn(const call *c, int at) {
    const model_config *m = &c->b->s.config;
    const ops_span span = { .slot = at % c->n, .rows = c->rows };
    c->b->dev->gdn(c->b->dev, c->b->y, c->b->x, c->vec, c->vec, c->vec, c->vec + (int64_t)c->rows * m->lin_v_heads,
                   c->gdn, &span, 1);
}

static bool gdn_op(bench *b, err *e) {
    const model_config *m = &b->s.config;
    ops_gdn g = { .k_heads = m->lin_k_heads, .v_heads = m->lin_v_heads, .k_dim = m->lin_k_dim, .v_dim = m->lin_v_dim };
    const size_t one = (size_t)m->lin_v_heads * (size_t)m->lin_k_dim * (size_t)m->lin_v_dim;
    call c = { .b = b, .run = run_gdn, .gdn = &g, .n = (int)min_i64(256, (int64_t)(b->beyond / (4 * one) + 1)) };
    const size_t pend = (size_t)c.n * OPS_MAX_PENDING;
    bool ok = device_floats(b, &g.state, (size_t)c.n * one, e) &&
              device_floats(b, &g.pend_k, pend * (size_t)config_key_dim(m), e) &&
              device_floats(b, &g.pend_v, pend * (size_t)config_value_dim(m), e) &&
              device_floats(b, &g.pend_beta, pend * (size_t)m->lin_v_heads, e) &&
              device_floats(b, &g.pend_decay, pend * (size_t)m->lin_v_heads, e);
    char shape[40];
    snprintf(shape, sizeof shape, "%d of %dx%d", m->lin_v_heads, m->lin_k_dim, m->lin_v_dim);
    for (int i = 0; ok && i < b->o->rows.n && !*b->cancel; i++) {
        c.rows = b->o->rows.v[i];
        c.bytes = 8.0 * (double)one; /* read and written */
        c.macs = 3.0 * (double)one * c.rows;
        ok = device_floats(b, &c.vec, (size_t)(c.rows + 1) * (size_t)m->lin_v_heads, e) &&
             room(b, (int64_t)c.rows * config_conv_dim(m), (int64_t)c.rows * config_value_dim(m), e) &&
             measure(b, &c, "gdn", shape, e);
        b->dev->mem_free(b->dev, c.vec);
        c.vec = NULL;
    }
    float *all[] = { g.state, g.pend_k, g.pend_v, g.pend_beta, g.pend_decay };
    for (size_t i = 0; i < ARRAY_LEN(all); i++) b->dev->mem_free(b->dev, all[i]);
    return ok;
}

/* ---- the whole ---- */

static bool open_all(bench *b, err *e) {
    const int64_t left = memory_available();
    const ops_options oo = cmd_ops_options();
    /* One layer of each kind is enough. */
    if (!mock_plan(&b->s, b->o->synthetic, b->o->layers ? b->o->layers : 4, e)) return false;
    const mock *s = &b->s;
    b->beyond = (size_t)min_i64(512 << 20, (int64_t)s->nvfp4_bytes);
    const int64_t need =
        (int64_t)(s->plain_bytes + s->source_bytes + b->beyond + s->plain_bytes / 2 + s->nvfp4_bytes / 4);
    if (need > left)
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "bench kernels: %.1f GB needed, %.1f GB available (free some)",
                    (double)need / 1e9, (double)left / 1e9);
    pool *p;
    if (!pool_new(&p, oo.threads, e)) return false;
    const bool ok = mock_build(&b->s, p, e);
    pool_free(p);
    return ok && ops_open(&b->dev, &oo, e) && bench_reader_open(&b->reader, b->dev->threads, b->beyond * 2, e);
}

static bool run(bench *b, err *e) {
    if (!open_all(b, e)) return false;
    char name[80];
    snprintf(name, sizeof name, "shapes of %s, --act %s", mock_presets[b->o->synthetic], cmd_act_choices[b->o->act]);
    bench_machine(&b->report, name, b->dev);
    bench_note(&b->report,
               "bytes: weights (experts: the distinct ones), KV, GDN state read and written, the screened head "
               "as its candidates make it; weights of %.0f MB in turn",
               (double)b->beyond / 1e6);
    b->before = bench_read(&b->reader);
    if (!matrices(b, e) || !experts_op(b, e) || !head_op(b, e) || !attention_op(b, e) || !gdn_op(b, e)) return false;
    static const bench_plot plot = { .title = "Kernels over weights beyond the caches",
                                     .x = "rows of input",
                                     .y = "10^9 multiply-accumulates per second",
                                     .group_col = 0,
                                     .group2_col = 1,
                                     .x_col = 2,
                                     .y_col = 6,
                                     .lo_col = -1,
                                     .hi_col = -1,
                                     .ref_col = -1 };
    return bench_report_write(&b->report, b->o, e) && bench_plot_write(&b->report.table, &plot, b->o, e);
}

int bench_kernels(const bench_options *o, err *e) {
    bench b = { .o = o,
                .report = { .what = "kernels", .table = { .cols = columns, .n_cols = ARRAY_LEN(columns) } },
                .cancel = cmd_interrupt() };
    const bool ok = run(&b, e);
    const int code = ok && *b.cancel ? 130 : 0;
    if (b.dev) {
        b.dev->mem_free(b.dev, b.x);
        b.dev->mem_free(b.dev, b.y);
        b.dev->close(b.dev);
    }
    bench_reader_close(&b.reader);
    mock_free(&b.s);
    bench_report_free(&b.report);
    return code;
}
