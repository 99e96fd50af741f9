#include "engine/teacher.h"

#include <stdlib.h>
#include <string.h>

/* Layer inputs come from the tap table: the pre-mixer norm of layer k is the rmsnorm call 2k of a trunk pass. */
typedef struct trace {
    float *out; /* [layers][total, H] */
    int layers, hidden, total, row0, call;
} trace;

static void on_op(void *ctx, ops *inner, const ops_event *ev) {
    trace *t = ctx;
    if (strcmp(ev->op, "rmsnorm") != 0) return;
    const int call = t->call++;
    if (call % 2 || call / 2 >= t->layers) return;
    float *to = t->out + ((int64_t)(call / 2) * t->total + t->row0) * t->hidden;
    inner->download(inner, to, ev->in, (size_t)ev->rows * (size_t)t->hidden * sizeof(float));
}

static float *rows_new(int64_t n, int h) { return malloc((size_t)(n * h) * sizeof(float)); }

static bool trunk(teacher_result *r, engine *g, const int32_t *tokens, bool hidden, err *e) {
    const int h = g->config.hidden, n = r->rows;
    trace t = { r->hidden, g->config.layers, h, n, 0, 0 };
    ops *tap = NULL, *plain = g->n.o;
    if (hidden && !ops_tap_open(&tap, plain, on_op, &t, e)) return false;
    state_reset(&g->st, 0);
    if (tap) g->n.o = tap;
    for (int at = 0; at < n; at += g->chunk) {
        const int rows = n - at < g->chunk ? n - at : g->chunk;
        const ops_span span = { .rows = rows, .pos0 = at };
        t.row0 = at;
        t.call = 0;
        forward_trunk(&g->sc, &g->st, tokens + at, NULL, &span, 1);
        plain->download(plain, r->final_norm + (int64_t)at * h, g->sc.hidden + h,
                        (size_t)rows * (size_t)h * sizeof(float));
    }
    g->n.o = plain;
    if (tap) tap->close(tap);
    return plain->sync(plain, e);
}

/* One full pass of the draft layer in `slot`: out = layer(next, in). */
static bool draft_pass(float *out, engine *g, int slot, const int32_t *next, const float *in, int n, err *e) {
    const int h = g->config.hidden;
    ops *o = g->o;
    for (int at = 0; at < n; at += g->chunk) {
        const int rows = n - at < g->chunk ? n - at : g->chunk;
        const size_t bytes = (size_t)rows * (size_t)h * sizeof(float);
        const ops_span span = { .slot = slot, .rows = rows, .pos0 = at };
        o->upload(o, g->sc.hidden + h, in + (int64_t)at * h, bytes);
        forward_mtp(&g->sc, &g->st, next + at, g->sc.hidden + h, &span, 1);
        o->download(o, out + (int64_t)at * h, g->sc.mtp_hidden, bytes);
    }
    return o->sync(o, e);
}

/* tokens shifted by one, with the argmax of the last row's logits behind them. */
static bool shift(int32_t *next, engine *g, const int32_t *tokens, const float *last_hidden, int n, err *e) {
    float *row = xmalloc((size_t)g->config.vocab * sizeof *row);
    const bool ok = teacher_logits(g, row, last_hidden, 1, e);
    int best = 0;
    for (int i = 1; ok && i < g->config.vocab; i++)
        if (row[i] > row[best]) best = i;
    memmove(next, tokens + 1, (size_t)(n - 1) * sizeof *next);
    next[n - 1] = best;
    free(row);
    return ok;
}

static bool both_drafts(teacher_result *r, engine *g, const int32_t *tokens, err *e) {
    const int n = r->rows;
    const int64_t last = (int64_t)(n - 1) * g->config.hidden;
    CHECK(g->st.slots >= 2, "draft traces need a second slot");
    int32_t *next = xmalloc((size_t)n * sizeof *next);
    const bool ok = shift(next, g, tokens, r->final_norm + last, n, e) &&
                    draft_pass(r->mtp1, g, 0, next, r->final_norm, n, e) &&
                    shift(next, g, next, r->mtp1 + last, n, e) && draft_pass(r->mtp2, g, 1, next, r->mtp1, n, e);
    free(next);
    return ok;
}

bool teacher_run(teacher_result *out, engine *g, const int32_t *tokens, int n, bool hidden, bool mtp, err *e) {
    const int h = g->config.hidden;
    *out = (teacher_result){ .rows = n };
    if (n <= 0) return fail(e, ERR_INPUT, "E-ENGINE-EMPTY", "sequence: no tokens");
    if (n > g->st.capacity)
        return fail(e, ERR_INPUT, "E-ENGINE-CONTEXT", "sequence: %d tokens in a context of %d (raise --ctx)", n,
                    g->st.capacity);
    for (int i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= g->config.vocab)
            return fail(e, ERR_INPUT, "E-ENGINE-TOKEN",
                        "sequence: id %d at position %d is outside the vocabulary of %d", tokens[i], i,
                        g->config.vocab);
    out->final_norm = rows_new(n, h);
    if (hidden) out->hidden = rows_new((int64_t)n * g->config.layers, h);
    if (mtp) out->mtp1 = rows_new(n, h), out->mtp2 = rows_new(n, h);
    bool ok = out->final_norm && (!hidden || out->hidden) && (!mtp || (out->mtp1 && out->mtp2));
    if (!ok) fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "sequence of %d tokens: no memory for its hidden states", n);
    ok = ok && trunk(out, g, tokens, hidden, e) && (!mtp || both_drafts(out, g, tokens, e));
    if (!ok) teacher_free(out);
    return ok;
}

void teacher_free(teacher_result *r) {
    free(r->hidden);
    free(r->final_norm);
    free(r->mtp1);
    free(r->mtp2);
    *r = (teacher_result){ 0 };
}

bool teacher_logits(engine *g, float *logits, const float *hidden, int rows, err *e) {
    const int h = g->config.hidden, v = g->config.vocab;
    ops *o = g->o;
    for (int r = 0; r < rows; r += g->sc.head_rows) {
        const int m = rows - r < g->sc.head_rows ? rows - r : g->sc.head_rows;
        o->upload(o, g->sc.hidden + h, hidden + (int64_t)r * h, (size_t)m * (size_t)h * sizeof(float));
        forward_logits(&g->sc, g->sc.hidden + h, m);
        o->download(o, logits + (int64_t)r * v, g->sc.logits, (size_t)m * (size_t)v * sizeof(float));
    }
    return o->sync(o, e);
}
