/* The screened head: one pass over the 8-bit copy bounds every logit; the rows whose upper bound reaches the k-th largest
 * lower bound are computed exactly. Threads own ranges of ids, then equal parts of the candidates. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "num/bf16.h"
#include "ops/ops_cpu.h"
#include "ops/ops_head.h"

/* ---- the copy ---- */

typedef struct pack_job {
    const cpu *c;
    lm_head *h;
    bool *bad; /* [threads] NaN or Inf was seen */
} pack_job;

static void pack_part(void *ctx, int thread, int threads) {
    const pack_job *j = ctx;
    lm_head *h = j->h;
    int64_t begin, end;
    float *row = cpu_own(j->c, thread);
    pool_share(h->rows, 64, thread, threads, &begin, &end);
    for (int64_t n = begin; n < end; n++) {
        cpu_upcast_row(j->c, row, &h->full, n);
        if (!head_pack_row(h, &j->c->s, (int)n, row)) j->bad[thread] = true;
    }
}

bool cpu_head_new(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e) {
    cpu *c = o->self;
    lm_head *h = head_plain(full, rows);
    if (screen && full->q.format == LINEAR_PLAIN && full->cols <= SCREEN_MAX_COLS) {
        if (!head_room(h, o, e)) {
            free(h);
            return false;
        }
        cpu_own_need(c, (size_t)h->cols * sizeof(float));
        pack_job j = { c, h, xcalloc((size_t)c->threads, sizeof *j.bad) };
        cpu_run(c, pack_part, &j, (double)rows * h->cols);
        bool bad = false;
        for (int t = 0; t < c->threads; t++) bad = bad || j.bad[t];
        free(j.bad);
        h->finite = !bad;
    }
    *out = h;
    return true;
}

/* ---- one group of rows ---- */

enum {
    BLOCK = 64,     /* ids bounded at a time; a word of the mask. Their codes stay in the second-level cache */
    GROUP_ROWS = 16 /* rows of inputs that share one reading of the copy from memory */
};

/* One row of inputs and what becomes of it. */
typedef struct query {
    int row;        /* of the call */
    const float *x; /* [K] */
    const head_query *q;
    int n_extra;
    head_input in;
    uint64_t *mask;
    float *upper;  /* [rows] */
    int32_t *list; /* [rows]: each thread's candidates from its first id on */
    float *exact;  /* extra ids, then all candidates in order */
    float *extra_logits;
    bool full;
} query;

/* The k largest lower bounds that one thread saw, descending, and how many candidates it listed. */
typedef struct share {
    float low[HEAD_MAX_TOP];
    int n, found;
} share;

typedef struct top_job {
    cpu *c;
    lm_head *h;
    query v[GROUP_ROWS];    /* those that can be screened first */
    int all, m, k, threads; /* queries, screened ones */
    share *shares;          /* [threads][m] */
} top_job;

static void keep_low(share *s, int k, float low) {
    int at = s->n < k ? s->n++ : k - 1;
    for (; at > 0 && s->low[at - 1] < low; at--) s->low[at] = s->low[at - 1];
    s->low[at] = low;
}

static void scan_block(const query *v, share *s, int k, const lm_head *h, const int64_t *dots, int64_t n, int count) {
    float low[BLOCK];
    head_bound(low, v->upper + n, h, &v->in, dots, (int)n, count);
    float least = s->n == k ? s->low[k - 1] : -INFINITY;
    const uint64_t may = v->mask[n / BLOCK];
    for (int i = 0; i < count; i++)
        if (low[i] > least && (may >> i & 1)) {
            keep_low(s, k, low[i]);
            if (s->n == k) least = s->low[k - 1];
        }
}

static void scan(const top_job *j, share *mine, int64_t begin, int64_t end) {
    const lm_head *h = j->h;
    screen_act x[GROUP_ROWS];
    int64_t dots[GROUP_ROWS * BLOCK];
    const int calls = (j->m + SCREEN_MAX_ROWS - 1) / SCREEN_MAX_ROWS;
    for (int m = 0; m < j->m; m++) {
        x[m] = (screen_act){ j->v[m].in.q, j->v[m].in.high, j->v[m].in.low };
        mine[m].n = mine[m].found = 0;
    }
    for (int64_t n = begin; n < end; n += BLOCK) {
        const int count = (int)min_i64(BLOCK, end - n);
        for (int i = 0; i < calls; i++) { /* equal parts */
            const int m0 = j->m * i / calls, m1 = j->m * (i + 1) / calls;
            j->c->s.dots(dots + m0 * BLOCK, BLOCK, h->codes + n * h->stride, h->sums + n, x + m0, m1 - m0, count,
                         h->stride);
        }
        for (int m = 0; m < j->m; m++) scan_block(&j->v[m], &mine[m], j->k, h, dots + m * BLOCK, n, count);
    }
}

/* The k-th largest lower bound of all threads: at least k logits are not below it. */
static float threshold(const top_job *j, int m, int threads) {
    share all = { .n = 0 };
    for (int t = 0; t < threads; t++) {
        const share *s = &j->shares[t * j->m + m];
        for (int i = 0; i < s->n && (all.n < j->k || s->low[i] > all.low[j->k - 1]); i++)
            keep_low(&all, j->k, s->low[i]);
    }
    return all.n == j->k ? all.low[j->k - 1] : -INFINITY;
}

static int collect(const query *v, float least, int64_t begin, int64_t end) {
    int32_t *out = v->list + begin;
    int found = 0;
    for (int64_t n = begin; n < end; n++)
        if (v->upper[n] >= least && (v->mask[n / BLOCK] >> n % BLOCK & 1)) out[found++] = (int32_t)n;
    return found;
}

static int64_t found_by_all(const top_job *j, int m, int threads) {
    int64_t all = 0;
    for (int t = 0; t < threads; t++) all += j->shares[t * j->m + m].found;
    return all;
}

static bool too_many(const lm_head *h, int64_t candidates) { return candidates > h->rows / 4; }

/* exact[at..] for places [from, to) of one list that starts at place `first`. */
static void compute(const top_job *j, const query *v, const int32_t *ids, int64_t first, int64_t count, int64_t from,
                    int64_t to) {
    const lm_head *h = j->h;
    const int64_t lo = max_i64(from, first), hi = min_i64(to, first + count);
    for (int64_t i = lo; i < hi; i++)
        cpu_gemm(j->c, h->full.type, v->exact + i, 1, v->x, h->cols,
                 elem_at(h->full.data, h->full.type, (int64_t)ids[i - first] * h->cols), 1, 1, h->cols);
}

static void rescore(const top_job *j, int m, int thread, int threads) {
    const query *v = &j->v[m];
    const int64_t all = found_by_all(j, m, threads);
    if (too_many(j->h, all)) return;
    int64_t from, to, at = v->n_extra;
    pool_share(all + v->n_extra, 1, thread, threads, &from, &to);
    if (v->n_extra) compute(j, v, v->q->extra, 0, v->n_extra, from, to);
    for (int t = 0; t < threads; t++) {
        int64_t begin, end;
        pool_share(j->h->rows, BLOCK, t, threads, &begin, &end);
        const int found = j->shares[t * j->m + m].found;
        compute(j, v, v->list + begin, at, found, from, to);
        at += found;
    }
}

static void top_part(void *ctx, int thread, int threads) {
    top_job *j = ctx;
    share *mine = j->shares + (int64_t)thread * j->m;
    int64_t begin, end;
    if (thread == 0) j->threads = threads;
    pool_share(j->h->rows, BLOCK, thread, threads, &begin, &end);
    scan(j, mine, begin, end);
    cpu_barrier(j->c, threads);
    for (int m = 0; m < j->m; m++) mine[m].found = collect(&j->v[m], threshold(j, m, threads), begin, end);
    cpu_barrier(j->c, threads);
    for (int m = 0; m < j->m; m++) rescore(j, m, thread, threads);
}

/* The best of what was computed. */
static void choose(const top_job *j, int m, int32_t *ids, float *logits) {
    const query *v = &j->v[m];
    const float *exact = v->exact + v->n_extra;
    int n = 0;
    for (int t = 0; t < j->threads; t++) {
        int64_t begin, end;
        pool_share(j->h->rows, BLOCK, t, j->threads, &begin, &end);
        const int found = j->shares[t * j->m + m].found;
        for (int i = 0; i < found; i++) head_take(ids, logits, j->k, &n, v->list[begin + i], *exact++);
    }
    head_no_more(ids, logits, n, j->k);
}

/* All logits of one row: its extra ones to `exact`, the best of the others. */
static void choose_full(const query *v, const float *all, int rows, int k, int32_t *ids, float *logits) {
    int n = 0;
    for (int i = 0; i < v->n_extra; i++) v->exact[i] = all[v->q->extra[i]];
    for (int32_t id = 0; id < rows; id++)
        if (v->mask[id / BLOCK] >> id % BLOCK & 1) head_take(ids, logits, k, &n, id, all[id]);
    head_no_more(ids, logits, n, k);
}

/* Cut `bytes` off the work memory, on a cache line; NULL base: only count. */
static void *cut(char *base, size_t *at, size_t bytes) {
    void *p = base ? base + *at : NULL;
    *at += (bytes + 63) & ~(size_t)63;
    return p;
}

static size_t lay_out(top_job *j, char *base) {
    const size_t rows = (size_t)j->h->rows, stride = (size_t)j->h->stride;
    size_t at = 0;
    j->shares = cut(base, &at, (size_t)j->c->threads * (size_t)j->all * sizeof *j->shares);
    for (int m = 0; m < j->all; m++) {
        query *v = &j->v[m];
        v->in.q = cut(base, &at, stride * sizeof *v->in.q);
        v->in.high = cut(base, &at, stride);
        v->in.low = cut(base, &at, stride);
        v->mask = cut(base, &at, (rows + 63) / 64 * sizeof *v->mask);
        v->upper = cut(base, &at, rows * sizeof *v->upper);
        v->list = cut(base, &at, rows * sizeof *v->list);
        v->exact = cut(base, &at, (rows / 4 + (size_t)v->n_extra + 1) * sizeof *v->exact);
    }
    return at;
}

static void run_full(ops *o, top_job *j, int32_t *ids, float *logits) {
    cpu *c = o->self;
    const int rows = j->h->rows, K = j->h->cols;
    int n = 0;
    for (int m = 0; m < j->all; m++) n += j->v[m].full;
    if (n == 0) return;
    float *x = work_need(&c->full, ((size_t)n * (size_t)rows + (size_t)n * (size_t)K + 16) * sizeof *x);
    float *all = x + ((int64_t)n * K + 15) / 16 * 16;
    n = 0;
    for (int m = 0; m < j->all; m++)
        if (j->v[m].full) memcpy(x + (int64_t)n++ * K, j->v[m].x, (size_t)K * sizeof *x);
    o->linear(o, all, rows, x, K, &j->h->full, n);
    for (int m = 0; m < j->all; m++) {
        const query *v = &j->v[m];
        if (!v->full) continue;
        choose_full(v, all, rows, j->k, ids + (int64_t)v->row * j->k, logits + (int64_t)v->row * j->k);
        all += rows;
    }
    j->h->counts.full += n;
}

/* The queries of v, which have their row, x, q and n_extra; extra_logits [row] = where its extra logits go. */
static void run_group(ops *o, top_job *j, int32_t *ids, float *logits) {
    cpu *c = j->c;
    lm_head *h = j->h;
    lay_out(j, work_need(&c->screen, lay_out(j, NULL)));
    j->m = 0;
    for (int m = 0; m < j->all; m++) {
        head_mask(j->v[m].mask, h->rows, j->v[m].q);
        if (!h->block || !head_input_make(&j->v[m].in, h, j->v[m].x)) continue;
        const query v = j->v[m];
        j->v[m] = j->v[j->m];
        j->v[j->m++] = v;
    }
    if (j->m > 0) cpu_run(c, top_part, j, (double)h->rows * (double)h->stride * 0.1);
    for (int m = 0; m < j->all; m++) {
        query *v = &j->v[m];
        const int64_t found = m < j->m ? found_by_all(j, m, j->threads) : 0;
        h->counts.rows++;
        v->full = m >= j->m || too_many(h, found);
        if (v->full) continue;
        h->counts.candidates += found;
        choose(j, m, ids + (int64_t)v->row * j->k, logits + (int64_t)v->row * j->k);
    }
    run_full(o, j, ids, logits);
}

/* ---- only the extra ids ---- */

typedef struct extra_job {
    const cpu *c;
    const lm_head *h;
    const float *hidden;
    const head_query *q;
    float *out;
    int rows;
    int64_t all; /* extra ids of all rows */
} extra_job;

static void extra_part(void *ctx, int thread, int threads) {
    const extra_job *j = ctx;
    const lm_head *h = j->h;
    int64_t from, to, at = 0;
    pool_share(j->all, 1, thread, threads, &from, &to);
    for (int r = 0; r < j->rows && at < to; at += j->q[r++].n_extra) {
        const int64_t lo = max_i64(from, at), hi = min_i64(to, at + j->q[r].n_extra);
        const float *x = j->hidden + (int64_t)r * h->cols;
        const bool finite = lo < hi && head_finite(x, h->cols);
        for (int64_t i = lo; i < hi; i++) {
            const int32_t id = j->q[r].extra[i - at];
            CHECK(id >= 0 && id < h->rows, "extra id %d of %d", id, h->rows);
            if (finite)
                cpu_gemm(j->c, h->full.type, j->out + i, 1, x, h->cols,
                         elem_at(h->full.data, h->full.type, (int64_t)id * h->cols), 1, 1, h->cols);
            else
                j->out[i] = NAN;
        }
    }
}

static void head_extra(cpu *c, float *out, const lm_head *h, const float *hidden, int rows, const head_query *q) {
    extra_job j = { .c = c, .h = h, .hidden = hidden, .q = q, .out = out, .rows = rows };
    for (int r = 0; q && r < rows; r++) j.all += q[r].n_extra;
    CHECK(h->full.q.format == LINEAR_PLAIN, "single rows of a quantized head");
    if (j.all > 0) cpu_run(c, extra_part, &j, (double)j.all * h->cols);
}

void cpu_head_top(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *h, const float *hidden, int rows,
                  int k, const head_query *q) {
    CHECK(k >= 0 && k <= HEAD_MAX_TOP, "top %d of a head", k);
    if (k == 0) {
        head_extra(o->self, extra_logits, h, hidden, rows, q);
        return;
    }
    top_job j = { .c = o->self, .h = h, .k = k };
    for (int r = 0; r < rows; r++) {
        const float *x = hidden + (int64_t)r * h->cols;
        const int n_extra = q ? q[r].n_extra : 0;
        if (head_finite(x, h->cols)) {
            j.v[j.all++] =
                (query){ .row = r, .x = x, .q = q ? &q[r] : NULL, .n_extra = n_extra, .extra_logits = extra_logits };
        } else {
            head_no_more(ids + (int64_t)r * k, logits + (int64_t)r * k, 0, k);
            for (int i = 0; i < n_extra; i++) extra_logits[i] = NAN;
        }
        if (n_extra) extra_logits += n_extra;
        if (j.all < GROUP_ROWS && r < rows - 1) continue;
        if (j.all > 0) run_group(o, &j, ids, logits);
        for (const query *v = j.v; v < j.v + j.all; v++)
            if (v->n_extra) memcpy(v->extra_logits, v->exact, (size_t)v->n_extra * sizeof *v->exact);
        j.all = 0;
    }
}
