/* Gated delta net: threads own channels (conv) or columns of the state (recurrence), and take all rows of a span
 * through their part while it is in the cache. */
#include <math.h>
#include <string.h>

#include "num/mathf.h"
#include "ops/ops_cpu.h"

/* ---- conv ---- */

enum { MAX_TAPS = 16 };

typedef struct conv_job {
    cpu *c;
    float *out;
    const float *u, *w;
    ops_conv *st;
    const ops_span *spans;
    int n_spans;
} conv_job;

/* The window moves past n rows at `next` (row stride = channels); channels [0, len) from the pointers on. */
static void advance(float *window, const float *next, int n, int keep, int64_t channels, int64_t len) {
    for (int j = 0; j < keep && n > 0; j++) {
        const float *from = j + n < keep ? window + (j + n) * channels : next + (j + n - keep) * channels;
        memcpy(window + j * channels, from, (size_t)len * sizeof *window);
    }
}

static void conv_part(void *ctx, int thread, int threads) {
    const conv_job *j = ctx;
    const int taps = j->st->taps, keep = taps - 1;
    const int64_t n = j->st->channels;
    int64_t begin, end;
    pool_share(n, 64, thread, threads, &begin, &end);
    const int64_t len = end - begin;
    if (len <= 0) return;
    for (const ops_span *s = j->spans; s < j->spans + j->n_spans; s++) {
        float *window = j->st->window + (int64_t)s->slot * keep * n + begin;
        float *pending = j->st->pending + (int64_t)s->slot * OPS_MAX_PENDING * n + begin;
        const float *u = j->u + (int64_t)s->row0 * n + begin;
        float *out = j->out + (int64_t)s->row0 * n + begin;
        advance(window, pending, s->commit, keep, n, len);
        for (int i = 0; i < s->rows; i++) {
            const float *in[MAX_TAPS];
            for (int t = 0; t < taps; t++) in[t] = i + t < keep ? window + (i + t) * n : u + (i + t - keep) * n;
            j->c->k.conv_silu(out + i * n, in, j->w + begin * taps, taps, (int)len);
        }
        if (!s->tentative)
            advance(window, u, s->rows, keep, n, len);
        else
            for (int i = 0; i < s->rows; i++) memcpy(pending + i * n, u + i * n, (size_t)len * sizeof *u);
    }
}

static int count_rows(const ops_span *spans, int n_spans, bool with_commits) {
    int rows = 0;
    for (int i = 0; i < n_spans; i++) rows += spans[i].rows + (with_commits ? spans[i].commit : 0);
    return rows;
}

void cpu_conv(ops *o, float *c, const float *u, const float *w, ops_conv *st, const ops_span *spans, int n_spans) {
    ops_check_state_spans(spans, n_spans);
    CHECK(st->taps >= 1 && st->taps <= MAX_TAPS, "%d taps", st->taps);
    conv_job j = { .c = o->self, .out = c, .u = u, .w = w, .st = st, .spans = spans, .n_spans = n_spans };
    cpu_run(j.c, conv_part, &j, 0.8 * st->channels * (count_rows(spans, n_spans, false) + n_spans));
}

/* ---- recurrence ---- */

enum { ROW_BLOCK = 64 }; /* rows whose q and k are normalised at a time */

typedef struct gdn_job {
    cpu *c;
    float *out;
    const float *in, *a, *b, *neg_a, *dt_bias;
    ops_gdn *st;
    const ops_span *spans;
    int n_spans;
    float q_scale;
    bool any_tentative;
} gdn_job;

/* What one thread keeps at hand for a block of rows. */
typedef struct gdn_own {
    float *q, *k;        /* [ROW_BLOCK][k_dim], normalised, of key head kh */
    float *beta, *decay; /* [ROW_BLOCK] of the value head at work */
    float *work;         /* [k_dim][KERN_GDN_COLS] */
    int kh;
} gdn_own;

static size_t gdn_own_floats(const ops_gdn *st) {
    return (size_t)ROW_BLOCK * 2 * (size_t)st->k_dim + 2 * ROW_BLOCK + (size_t)st->k_dim * KERN_GDN_COLS;
}

static void gates(const gdn_job *j, float *beta, float *decay, int64_t row, int h) {
    const int64_t at = row * j->st->v_heads + h;
    *beta = num_sigmoid(j->b[at]);
    *decay = num_exp(j->neg_a[h] * num_softplus(j->a[at] + j->dt_bias[h]));
}

static int64_t in_ld(const ops_gdn *st) {
    return 2 * (int64_t)st->k_heads * st->k_dim + (int64_t)st->v_heads * st->v_dim;
}

/* Rows [0, n) from batch row `row0` on: q, k of head kh unless they are there already, beta and decay of head h. */
static void prepare(const gdn_job *j, gdn_own *own, int64_t row0, int n, int h) {
    const ops_gdn *st = j->st;
    const int dk = st->k_dim, kh = h / (st->v_heads / st->k_heads);
    for (int i = 0; i < n; i++) gates(j, &own->beta[i], &own->decay[i], row0 + i, h);
    if (own->kh == kh) return;
    own->kh = kh;
    for (int i = 0; i < n; i++) {
        const float *row = j->in + (row0 + i) * in_ld(st) + (int64_t)kh * dk;
        j->c->k.l2norm(own->q + (int64_t)i * dk, row, dk, 1e-6f, j->q_scale);
        j->c->k.l2norm(own->k + (int64_t)i * dk, row + (int64_t)st->k_heads * dk, dk, 1e-6f, 1.0f);
    }
}

/* The rows of the last tentative span that were accepted, as tokens for the columns of head h from c0 on. */
static int accepted(const gdn_job *j, gdn_token *t, const ops_span *s, int h, int c0) {
    const ops_gdn *st = j->st;
    const int kh = h / (st->v_heads / st->k_heads);
    for (int i = 0; i < s->commit; i++) {
        const int64_t p = (int64_t)s->slot * OPS_MAX_PENDING + i, gate = p * st->v_heads + h;
        t[i] = (gdn_token){ .k = st->pend_k + (p * st->k_heads + kh) * st->k_dim,
                            .v = st->pend_v + gate * st->v_dim + c0,
                            .beta = st->pend_beta[gate],
                            .decay = st->pend_decay[gate] };
    }
    return s->commit;
}

/* Rows [r0, r0 + n) of a span through columns [c0, c0 + cols) of head h; before the first the accepted ones. */
static void columns(const gdn_job *j, const gdn_own *own, const ops_span *s, int r0, int n, int h, int c0, int cols) {
    const ops_gdn *st = j->st;
    const int dk = st->k_dim, dv = st->v_dim;
    const int64_t v_at = 2 * (int64_t)st->k_heads * dk + (int64_t)h * dv + c0;
    gdn_token t[OPS_MAX_PENDING + ROW_BLOCK];
    const int first = r0 == 0 ? accepted(j, t, s, h, c0) : 0;
    for (int i = 0; i < n; i++) {
        const int64_t row = s->row0 + r0 + i;
        t[first + i] = (gdn_token){ .q = own->q + (int64_t)i * dk,
                                    .k = own->k + (int64_t)i * dk,
                                    .v = j->in + row * in_ld(st) + v_at,
                                    .o = j->out + (row * st->v_heads + h) * dv + c0,
                                    .beta = own->beta[i],
                                    .decay = own->decay[i] };
    }
    if (first + n > 0)
        j->c->k.gdn_steps(st->state + ((int64_t)s->slot * st->v_heads + h) * dk * dv + c0, dv, t, first + n,
                          s->tentative ? first : first + n, own->work, dk, cols);
}

/* Keep row i of a tentative span for a later commit: the same k, beta and decay that entered the recurrence. */
static void pend(const gdn_job *j, const ops_span *s, int i) {
    ops_gdn *st = j->st;
    const int64_t p = (int64_t)s->slot * OPS_MAX_PENDING + i, row = s->row0 + i;
    const int64_t kd = (int64_t)st->k_heads * st->k_dim, vd = (int64_t)st->v_heads * st->v_dim;
    const float *in = j->in + row * in_ld(st);
    for (int h = 0; h < st->k_heads; h++)
        j->c->k.l2norm(st->pend_k + p * kd + (int64_t)h * st->k_dim, in + kd + (int64_t)h * st->k_dim, st->k_dim, 1e-6f,
                       1.0f);
    memcpy(st->pend_v + p * vd, in + 2 * kd, (size_t)vd * sizeof *in);
    for (int h = 0; h < st->v_heads; h++)
        gates(j, &st->pend_beta[p * st->v_heads + h], &st->pend_decay[p * st->v_heads + h], row, h);
}

/* All rows of a span through the thread's columns [begin, end), counted over all heads. */
static void span_part(const gdn_job *j, gdn_own *own, const ops_span *s, int64_t begin, int64_t end) {
    const int dv = j->st->v_dim;
    int r0 = 0;
    do {
        const int n = (int)min_i64(ROW_BLOCK, s->rows - r0);
        own->kh = -1;
        for (int64_t at = begin; at < end;) {
            const int h = (int)(at / dv), first = (int)(at % dv), last = (int)min_i64(dv, end - (int64_t)h * dv);
            prepare(j, own, s->row0 + r0, n, h);
            columns(j, own, s, r0, n, h, first, last - first);
            at = (int64_t)h * dv + last;
        }
        r0 += n;
    } while (r0 < s->rows);
}

static void gdn_part(void *ctx, int thread, int threads) {
    const gdn_job *j = ctx;
    const ops_gdn *st = j->st;
    const int64_t all = (int64_t)st->v_heads * st->v_dim;
    float *p = cpu_own(j->c, thread);
    gdn_own own = { .q = p, .k = p + (int64_t)ROW_BLOCK * st->k_dim, .kh = -1 };
    own.beta = own.k + (int64_t)ROW_BLOCK * st->k_dim;
    own.decay = own.beta + ROW_BLOCK;
    own.work = own.decay + ROW_BLOCK;
    int64_t begin, end;
    const bool wide = all / KERN_GDN_COLS >= 4 * threads && st->v_dim % KERN_GDN_COLS == 0;
    pool_share(all, wide ? KERN_GDN_COLS : 16, thread, threads, &begin, &end);
    for (int i = 0; i < j->n_spans && begin < end; i++) span_part(j, &own, &j->spans[i], begin, end);
    if (!j->any_tentative) return;
    cpu_barrier(j->c, threads); /* every thread has read what it commits */
    int64_t count = 0;
    for (const ops_span *s = j->spans; s < j->spans + j->n_spans; s++)
        for (int i = 0; s->tentative && i < s->rows; i++)
            if (count++ % threads == thread) pend(j, s, i);
}

void cpu_gdn(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
             const float *dt_bias, ops_gdn *st, const ops_span *spans, int n_spans) {
    ops_check_state_spans(spans, n_spans);
    CHECK(st->k_heads > 0 && st->v_heads % st->k_heads == 0, "%d value heads, %d key heads", st->v_heads, st->k_heads);
    gdn_job j = { .c = o->self,
                  .out = out,
                  .in = c,
                  .a = a,
                  .b = b,
                  .neg_a = neg_a,
                  .dt_bias = dt_bias,
                  .st = st,
                  .spans = spans,
                  .n_spans = n_spans };
    j.q_scale = (float)(1.0 / sqrt((double)st->k_dim));
    for (int i = 0; i < n_spans; i++) j.any_tentative |= spans[i].tentative && spans[i].rows > 0;
    cpu_own_need(j.c, gdn_own_floats(st) * sizeof(float));
    cpu_run(j.c, gdn_part, &j, 0.1 * st->v_heads * st->k_dim * st->v_dim * count_rows(spans, n_spans, true));
}

/* ---- output norm ---- */

typedef struct norm_job {
    cpu *c;
    float *y;
    const float *x, *z, *w;
    int64_t heads;
    int dim;
    float eps;
} norm_job;

static void gated_norm_part(void *ctx, int thread, int threads) {
    const norm_job *j = ctx;
    int64_t begin, end;
    pool_share(j->heads, 1, thread, threads, &begin, &end);
    for (int64_t at = begin * j->dim; at < end * j->dim; at += j->dim)
        j->c->k.gated_norm(j->y + at, j->x + at, j->z + at, j->w, j->dim, j->eps);
}

void cpu_gated_norm(ops *o, float *y, const float *x, const float *z, const float *w, int rows, int heads, int dim,
                    float eps) {
    norm_job j = {
        .c = o->self, .y = y, .x = x, .z = z, .w = w, .heads = (int64_t)rows * heads, .dim = dim, .eps = eps
    };
    cpu_run(j.c, gated_norm_part, &j, 1.0 * (double)j.heads * dim);
}
