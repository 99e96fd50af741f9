#include "eval/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/teacher.h"

enum { PIECE = 32 }; /* rows of logits held at once */

bool compare_open(compare_source *out, const char *path, const engine_options *opt, err *e) {
    struct stat st;
    *out = (compare_source){ .name = path };
    if (stat(path, &st) == 0 && !S_ISDIR(st.st_mode)) return st_open(&out->saved, path, e);
    return engine_open(&out->g, path, opt, e);
}

void compare_close(compare_source *s) {
    engine_close(s->g);
    st_close(&s->saved);
    *s = (compare_source){ 0 };
}

void compare_free(compare_result *r) {
    free(r->rows);
    *r = (compare_result){ 0 };
}

/* ---- one position ---- */

static int top_of(const float *x, int n) {
    int top = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[top]) top = i;
    return top;
}

static double log_sum(const float *x, int n, float top) {
    double sum = 0;
    int i = 0;
    do sum += exp((double)x[i] - (double)top);
    while (++i < n);
    return (double)top + log(sum);
}

compare_row compare_logits(const float *got, const float *want, int vocab, int next) {
    compare_row r = { .kl = NAN, .nll = NAN, .want = NAN };
    const int a = top_of(got, vocab);
    const double la = log_sum(got, vocab, got[a]);
    if (next >= 0) r.nll = la - (double)got[next];
    if (!want) return r;
    const int b = top_of(want, vocab);
    const double lb = log_sum(want, vocab, want[b]);
    if (next >= 0) r.want = lb - (double)want[next];
    r.same_top = a == b;
    r.kl = 0;
    for (int i = 0; i < vocab; i++) {
        const double p = (double)want[i] - lb;
        r.kl += exp(p) * (p - ((double)got[i] - la));
    }
    return r;
}

/* ---- a sequence ---- */

typedef struct both {
    compare_result *out;
    engine *got;
    const compare_source *ref;
    float *x, *y; /* [PIECE, vocab] */
    int vocab, skip;
} both;

/* The saved rows of sequence i: the last so many of its positions. */
static bool saved_rows(const float **first, int *rows, const both *b, int i, int n, err *e) {
    char name[40];
    snprintf(name, sizeof name, "%d.logits", i);
    const st_tensor *t = st_find(&b->ref->saved, str_of(name));
    if (!t || t->type != DT_F32 || t->rank != 2 || t->shape[1] != b->vocab || t->shape[0] < 1 || t->shape[0] > n)
        return fail(e, ERR_INPUT, "E-EVAL-LOGITS",
                    "%s: no F32 `%s` of at most %d x %d (make it with `nibble logits` from the same ids)", b->ref->name,
                    name, n, b->vocab);
    *first = (const float *)(const void *)t->data;
    *rows = (int)t->shape[0];
    return true;
}

static void add_rows(both *b, int seq, int pos0, int rows, const float *want, const id_list *ids) {
    compare_result *r = b->out;
    r->rows = xrealloc(r->rows, (size_t)(r->n + rows) * sizeof *r->rows);
    for (int i = 0; i < rows; i++) {
        const int pos = pos0 + i;
        compare_row row = compare_logits(b->x + (int64_t)i * b->vocab, want ? want + (int64_t)i * b->vocab : NULL,
                                         b->vocab, pos + 1 < (int)ids->n ? ids->v[pos + 1] : -1);
        row.seq = seq;
        row.pos = pos;
        r->rows[r->n++] = row;
    }
}

static bool one_sequence(both *b, int seq, const id_list *ids, err *e) {
    const int n = (int)ids->n, h = b->got->config.hidden;
    engine *ref = b->ref ? b->ref->g : NULL;
    teacher_result got = { 0 }, want = { 0 };
    const float *saved = NULL;
    int first = b->skip, saved_n = 0;
    bool ok = true;
    if (b->ref && !ref) {
        ok = saved_rows(&saved, &saved_n, b, seq, n, e);
        if (ok && n - saved_n > first) first = n - saved_n;
    }
    ok = ok && teacher_run(&got, b->got, ids->v, n, false, false, e) &&
         (!ref || teacher_run(&want, ref, ids->v, n, false, false, e));
    for (int at = first; ok && at < n; at += PIECE) {
        const int rows = n - at < PIECE ? n - at : PIECE;
        ok = teacher_logits(b->got, b->x, got.final_norm + (int64_t)at * h, rows, e) &&
             (!ref || teacher_logits(ref, b->y, want.final_norm + (int64_t)at * ref->config.hidden, rows, e));
        if (saved)
            memcpy(b->y, saved + (int64_t)(at - (n - saved_n)) * b->vocab,
                   (size_t)rows * (size_t)b->vocab * sizeof *b->y);
        if (ok) add_rows(b, seq, at, rows, b->ref ? b->y : NULL, ids);
    }
    teacher_free(&got);
    teacher_free(&want);
    return ok;
}

bool compare_run(compare_result *out, engine *got, const compare_source *ref, const calib_data *d, int skip,
                 volatile const int *cancel, err *e) {
    both b = { .out = out, .got = got, .ref = ref, .vocab = got->config.vocab, .skip = skip };
    *out = (compare_result){ .vocab = b.vocab };
    if (ref && ref->g && ref->g->config.vocab != b.vocab)
        return fail(e, ERR_INPUT, "E-EVAL-VOCAB",
                    "%s: %d logits, the reference %s has %d (compare models of one family)", got->files.dir, b.vocab,
                    ref->name, ref->g->config.vocab);
    b.x = malloc((size_t)PIECE * (size_t)b.vocab * sizeof *b.x);
    b.y = malloc((size_t)PIECE * (size_t)b.vocab * sizeof *b.y);
    bool ok = (b.x && b.y) || fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "no memory for %d rows of logits", 2 * PIECE);
    for (int i = 0; ok && i < d->n; i++) {
        ok = !(cancel && *cancel) ? one_sequence(&b, i, &d->v[i], e)
                                  : fail(e, ERR_INTERRUPTED, "E-EVAL-STOPPED", "eval: stopped");
        if (!ok && e->kind == ERR_INPUT) ok = fail_prefix(e, "text %d", i);
    }
    free(b.x);
    free(b.y);
    if (!ok) compare_free(out);
    return ok;
}

/* ---- figures ---- */

typedef struct sums { /* per sequence */
    double *kl, *nll, *want, *n, *n_next;
    int sequences;
} sums;

static sums sums_new(int sequences) {
    const size_t n = (size_t)sequences + 1;
    double *all = xcalloc(5 * n, sizeof *all);
    return (sums){ all, all + n, all + 2 * n, all + 3 * n, all + 4 * n, 0 };
}

compare_figures compare_summary(const compare_result *r, bool (*pick)(const void *ctx, const compare_row *row),
                                const void *ctx, uint64_t seed) {
    compare_figures f = { 0 };
    int64_t same = 0;
    double *kl = xmalloc((size_t)(r->n + 1) * sizeof *kl);
    sums s = sums_new(r->n);
    int last = -1;
    for (int i = 0; i < r->n; i++) {
        const compare_row *row = &r->rows[i];
        if (pick && !pick(ctx, row)) continue;
        if (row->seq != last) s.sequences++, last = row->seq;
        const int at = s.sequences - 1;
        kl[f.positions++] = row->kl;
        s.kl[at] += row->kl;
        s.n[at]++;
        same += row->same_top;
        if (isnan(row->nll)) continue;
        s.nll[at] += row->nll;
        s.want[at] += row->want;
        s.n_next[at]++;
    }
    f.sequences = s.sequences;
    f.kl = stat_ratio(s.kl, s.n, s.sequences, seed);
    f.nll = stat_ratio(s.nll, s.n_next, s.sequences, seed);
    f.want_nll = stat_ratio(s.want, s.n_next, s.sequences, seed);
    f.nll_difference = stat_ratio_difference(s.want, s.n_next, s.nll, s.n_next, s.sequences, seed);
    f.top = stat_wilson(same, f.positions);
    f.kl_median = stat_quantile(kl, f.positions, 0.5);
    f.kl_p99 = stat_quantile(kl, f.positions, 0.99);
    f.kl_worst = stat_quantile(kl, f.positions, 1);
    free(s.kl);
    free(kl);
    return f;
}
