#include "quant/kl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/teacher.h"

void kl_texts(calib_data *d) {
    calib_data few = { 0 };
    const int n = d->n < KL_TEXTS ? d->n : KL_TEXTS;
    for (int i = 0; i < n; i++) {
        const id_list *t = &d->v[(int64_t)i * d->n / n];
        calib_data_add(&few, t->v, t->n < KL_TOKENS ? t->n : KL_TOKENS);
    }
    memcpy(few.what, d->what, sizeof few.what);
    calib_data_free(d);
    *d = few;
}

static int last_rows(const id_list *t) { return t->n < KL_LAST ? (int)t->n : KL_LAST; }

bool kl_logits(float **logits, int *rows, int *vocab, const char *dir, const calib_data *d, const ops_options *backend,
               err *e) {
    engine *g;
    const engine_options opt = { .ops = *backend, .ctx = KL_TOKENS, .chunk = KL_TOKENS, .no_text = true };
    if (!engine_open(&g, dir, &opt, e)) return false;
    bool ok = true;
    int total = 0, at = 0;
    for (int i = 0; i < d->n; i++) total += last_rows(&d->v[i]);
    *rows = total;
    *vocab = g->config.vocab;
    *logits = xmalloc(((size_t)total * (size_t)*vocab + 1) * sizeof **logits);
    for (int i = 0; ok && i < d->n; i++) {
        const int n = (int)d->v[i].n, last = last_rows(&d->v[i]);
        teacher_result r;
        ok = teacher_run(&r, g, d->v[i].v, n, false, false, e);
        if (!ok) break;
        ok = teacher_logits(g, *logits + (int64_t)at * *vocab, r.final_norm + (int64_t)(n - last) * g->config.hidden,
                            last, e);
        teacher_free(&r);
        at += last;
    }
    engine_close(g);
    if (!ok) free(*logits), *logits = NULL;
    return ok;
}

static int top_of(const float *x, int n) {
    int top = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[top]) top = i;
    return top;
}

static double log_sum(const float *x, int n, float top) {
    double sum = 0;
    int i = 0;
    do sum += exp((double)x[i] - top);
    while (++i < n);
    return (double)top + log(sum);
}

kl_figures kl_compare(const float *got, const float *want, int rows, int vocab) {
    kl_figures k = { .positions = rows };
    for (int r = 0; r < rows; r++, got += vocab, want += vocab) {
        const int a = top_of(got, vocab), b = top_of(want, vocab);
        const double la = log_sum(got, vocab, got[a]), lb = log_sum(want, vocab, want[b]);
        double kl = 0;
        for (int i = 0; i < vocab; i++) {
            const double p = (double)want[i] - lb, q = (double)got[i] - la;
            kl += exp(p) * (p - q);
        }
        k.mean += kl / rows;
        if (!(kl <= k.worst)) k.worst = kl;
        k.same_top += (double)(a == b) / rows;
    }
    return k;
}
