/* Log-probabilities of the raw distribution, with sums that are exact and a logarithm of our own. */
#include <math.h>

#include "engine/sampler_impl.h"
#include "num/mathf.h"

/* log of the sum of exp(x - top): the masses at temperature 1 as integers, so that no order of summation shows. */
static double log_sum(sampler *s, const float *x, int n, float top) {
    const float limit = top - rank_reach(1);
    uint64_t total = 0;
    for (int first = 0; first < n; first += KERN_BLOCK) {
        float p[KERN_BLOCK];
        const int count = n - first < KERN_BLOCK ? n - first : KERN_BLOCK;
        if (s->maxima[first / KERN_BLOCK] < limit) continue;
        rank_exp(s, p, x + first, count, top, 1);
        for (int i = 0; i < count; i++) total += (uint64_t)(int64_t)(p[i] * (float)SAMPLER_UNIT);
    }
    return num_log((double)total * (1 / SAMPLER_UNIT));
}

double sampler_logprobs(sampler *s, int32_t *ids, double *logprobs, int count, const float *logits, int n,
                        int32_t chosen) {
    CHECK(n > 0 && n <= s->vocab && chosen >= 0 && chosen < n, "id %d of %d", chosen, n);
    const bool finite = sampler_scan(s, logits, n);
    CHECK(finite, "log-probabilities of a row that no token could be drawn from");
    const float top = sampler_top(s, n);
    const double norm = log_sum(s, logits, n, top);
    const int want = count < n ? count : n;
    if (want > SAMPLER_SELECT)
        rank_all(s, logits, n, top, 1);
    else if (want > 0)
        rank_select(s, logits, n, want);
    else
        s->n_list = 0;
    for (int i = 0; i < count; i++) {
        const sampler_entry *c = i < want && i < s->n_list ? rank_at(s, i) : NULL;
        ids[i] = c ? c->id : -1;
        logprobs[i] = c ? ((double)c->logit - (double)top) - norm : -INFINITY;
    }
    return ((double)logits[chosen] - (double)top) - norm;
}
