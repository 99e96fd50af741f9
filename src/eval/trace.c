#include "eval/trace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"

typedef struct tensor { /* an output that -o keeps */
    char name[TRACE_NAME];
    int rows, cols;
    float *v;
} tensor;

typedef struct watch {
    trace_result *r;
    const trace_options *o;
    engine *g;
    tensor *kept;
    int n_kept, layer;
    float *rows; /* host copy of one output */
    size_t cap;
    bool over;
} watch;

/* The reference's tensor of this name, when it has the shape. */
static const float *reference(const watch *w, const char *name, int rows, int cols) {
    char other[TRACE_NAME + 2];
    if (!w->o->against) return NULL;
    const st_tensor *t = st_find(w->o->against, str_of(name));
    snprintf(other, sizeof other, "0.%s", name);
    if (!t) t = st_find(w->o->against, str_of(other));
    if (!t || t->type != DT_F32 || t->rank != 2 || t->shape[0] != rows || t->shape[1] != cols) return NULL;
    return (const float *)(const void *)t->data;
}

static void measure(trace_entry *t, const float *x, const float *want) {
    double sum = 0, sq = 0, all_e = 0, all_y = 0, worst = -1;
    int64_t finite = 0;
    for (int r = 0; r < t->rows; r++) {
        double row_e = 0, row_y = 0;
        for (int c = 0; c < t->cols; c++) {
            const float v = x[(int64_t)r * t->cols + c];
            if (!isfinite(v)) {
                if (t->nonfinite++ == 0) t->bad_row = r, t->bad_col = c;
                continue;
            }
            finite++;
            sum += (double)v;
            sq += (double)v * (double)v;
            if (fabs((double)v) > t->absmax) t->absmax = fabs((double)v);
            if (!want) continue;
            const double y = (double)want[(int64_t)r * t->cols + c], d = (double)v - y;
            row_e += d * d;
            row_y += y * y;
        }
        all_e += row_e;
        all_y += row_y;
        const double mine = row_e > 0 ? row_e / (row_y > 0 ? row_y : 1) : 0;
        if (want && (mine > worst || isnan(mine))) worst = mine, t->worst_row = r;
    }
    if (finite) t->mean = sum / (double)finite, t->rms = sqrt(sq / (double)finite);
    t->compared = want != NULL;
    if (want) t->error = all_e > 0 ? sqrt(all_e / all_y) : all_e;
}

static void keep(watch *w, const trace_entry *t, const float *x) {
    w->kept = xrealloc(w->kept, (size_t)(w->n_kept + 1) * sizeof *w->kept);
    tensor *k = &w->kept[w->n_kept++];
    const size_t n = (size_t)t->rows * (size_t)t->cols;
    snprintf(k->name, sizeof k->name, "%s", t->name);
    k->rows = t->rows;
    k->cols = t->cols;
    k->v = xmalloc(n * sizeof *k->v);
    memcpy(k->v, x, n * sizeof *k->v);
}

/* One output: x device [rows, cols] at row stride ld. */
static void add(watch *w, const char *name, const char *op, const float *x, int64_t ld, int rows, int cols) {
    ops *o = w->g->o;
    trace_result *r = w->r;
    if (w->over || !x || rows <= 0 || cols <= 0) return;
    const size_t n = (size_t)rows * (size_t)cols;
    if (n > w->cap) {
        w->rows = xrealloc(w->rows, n * sizeof *w->rows);
        w->cap = n;
    }
    for (int i = 0; i < rows && ld != cols; i++)
        o->download(o, w->rows + (int64_t)i * cols, x + i * ld, (size_t)cols * sizeof *x);
    if (ld == cols) o->download(o, w->rows, x, n * sizeof *x);
    r->v = xrealloc(r->v, (size_t)(r->n + 1) * sizeof *r->v);
    trace_entry *t = &r->v[r->n++];
    *t = (trace_entry){ .op = op, .rows = rows, .cols = cols, .bad_row = -1, .bad_col = -1 };
    snprintf(t->name, sizeof t->name, "%s", name);
    const float *want = reference(w, t->name, rows, cols);
    measure(t, w->rows, want);
    r->compared += want != NULL;
    if (w->o->out) keep(w, t, w->rows);
    if (t->nonfinite) {
        r->bad = r->n - 1;
        w->over = true;
    }
}

/* "layers.3.rmsnorm", "layers.3.rmsnorm.1": what has no tensor's name is called by its layer, op and place. */
static void name_op(watch *w, char *out, const char *op) {
    int before = 0;
    snprintf(out, TRACE_NAME, "layers.%d.%s", w->layer, op);
    const size_t n = strlen(out);
    for (int i = 0; i < w->r->n; i++) {
        const char *other = w->r->v[i].name;
        before += strncmp(other, out, n) == 0 && (other[n] == 0 || other[n] == '.');
    }
    if (before) snprintf(out + n, TRACE_NAME - n, ".%d", before);
}

static void on_op(void *ctx, ops *inner, const ops_event *ev) {
    watch *w = ctx;
    char name[TRACE_NAME];
    (void)inner;
    if (w->layer < 0 || w->over) return;
    if (strcmp(ev->op, "kv_append") == 0) {
        name_op(w, name, "kv.k");
        add(w, name, ev->op, ev->in, ev->in_cols, ev->rows, ev->in_cols);
        name_op(w, name, "kv.v");
        add(w, name, ev->op, ev->in2, ev->in_cols, ev->rows, ev->in_cols);
        return;
    }
    if (ev->w)
        snprintf(name, sizeof name, "%s", linear_name(ev->w));
    else if (ev->ex)
        snprintf(name, sizeof name, "%s", experts_name(ev->ex));
    else
        name_op(w, name, ev->op);
    add(w, name, ev->op, ev->out, ev->out_ld ? ev->out_ld : ev->out_cols, ev->rows, ev->out_cols);
}

static void state(watch *w, const char *name, const float *x, int rows) {
    add(w, name, "state", x, w->g->config.hidden, rows, w->g->config.hidden);
}

static void run_pass(watch *w, const int32_t *ids, int n) {
    engine *g = w->g;
    const ops_span span = { .rows = n };
    char name[TRACE_NAME];
    w->layer = -1;
    state_reset(&g->st, 0);
    const pass p = forward_begin(&g->sc, &g->st, ids, NULL, &span, 1);
    forward_embed(&p);
    for (int k = 0; k < g->config.layers && !w->over; k++) {
        snprintf(name, sizeof name, "hidden.%d", k);
        state(w, name, g->sc.x, n);
        w->layer = k;
        forward_layer(&p, k);
    }
    w->layer = -1;
    if (w->over) return;
    forward_norm(&p);
    state(w, "final_norm", g->sc.hidden + g->config.hidden, n);
    snprintf(name, sizeof name, "hidden.%d", g->config.layers); /* transformers' name for the same */
    if (reference(w, name, n, g->config.hidden)) state(w, name, g->sc.hidden + g->config.hidden, n);
    const int last = n < g->sc.head_rows ? n : g->sc.head_rows; /* the last rows: what is chosen from */
    if (w->over) return;
    forward_logits(&g->sc, g->sc.hidden + (int64_t)(1 + n - last) * g->config.hidden, last);
    add(w, "logits", "head", g->sc.logits, g->config.vocab, last, g->config.vocab);
}

static bool write_kept(const watch *w, err *e) {
    st_out *t = xcalloc((size_t)w->n_kept + 1, sizeof *t);
    for (int i = 0; i < w->n_kept; i++)
        t[i] = (st_out){ .name = w->kept[i].name,
                         .type = DT_F32,
                         .rank = 2,
                         .shape = { w->kept[i].rows, w->kept[i].cols },
                         .data = w->kept[i].v };
    const bool ok = st_write(w->o->out, t, w->n_kept, e);
    free(t);
    return ok;
}

bool trace_run(trace_result *out, engine *g, const int32_t *ids, int n, const trace_options *o, err *e) {
    watch w = { .r = out, .o = o, .g = g, .layer = -1 };
    ops *tap, *plain = g->n.o;
    *out = (trace_result){ .bad = -1 };
    if (n > g->chunk) return fail(e, ERR_INPUT, "E-ENGINE-CONTEXT", "trace: %d tokens in a pass of %d", n, g->chunk);
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= g->config.vocab)
            return fail(e, ERR_INPUT, "E-ENGINE-TOKEN", "trace: id %d at position %d is outside the vocabulary of %d",
                        ids[i], i, g->config.vocab);
    if (n <= 0) return fail(e, ERR_INPUT, "E-ENGINE-EMPTY", "trace: no tokens");
    if (!ops_tap_open(&tap, plain, on_op, &w, e)) return false;
    g->n.o = tap;
    run_pass(&w, ids, n);
    g->n.o = plain;
    tap->close(tap);
    bool ok = plain->sync(plain, e);
    if (ok && o->out) ok = write_kept(&w, e);
    for (int i = 0; i < w.n_kept; i++) free(w.kept[i].v);
    free(w.kept);
    free(w.rows);
    if (!ok) trace_free(out);
    return ok;
}

void trace_free(trace_result *r) {
    free(r->v);
    *r = (trace_result){ 0 };
}
