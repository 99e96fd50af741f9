#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>

#include "base/rng.h"
#include "num/mathf.h"

enum { PURPOSE_TOKEN = 0 };

static void reserve(sampler *s, int n) {
    if (n <= s->cap) return;
    s->entries = xrealloc(s->entries, (size_t)n * sizeof *s->entries);
    s->mass = xrealloc(s->mass, (size_t)n * sizeof *s->mass);
    s->cap = n;
}

void sampler_free(sampler *s) {
    free(s->entries);
    free(s->mass);
    *s = (sampler){ 0 };
}

/* (logit descending, id ascending) is a total order, so the result never depends on the sort algorithm. */
static bool before(sampler_entry a, sampler_entry b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

static int compare(const void *pa, const void *pb) {
    const sampler_entry a = *(const sampler_entry *)pa, b = *(const sampler_entry *)pb;
    return before(a, b) ? -1 : before(b, a) ? 1 : 0;
}

static void sift_down(sampler_entry *heap, int n, int i) {
    for (;;) {
        int last = i;
        const int l = 2 * i + 1, r = l + 1;
        if (l < n && before(heap[last], heap[l])) last = l;
        if (r < n && before(heap[last], heap[r])) last = r;
        if (last == i) return;
        const sampler_entry t = heap[i];
        heap[i] = heap[last];
        heap[last] = t;
        i = last;
    }
}

/* The k best of logits, in order, into s->entries; returns how many (fewer when logits are NaN). A heap whose root is
 * the worst kept entry: one comparison per id that does not belong. */
static int best(sampler *s, const float *logits, int n, int k) {
    reserve(s, n);
    int kept = 0;
    for (int i = 0; i < n; i++) {
        if (isnan(logits[i])) continue;
        const sampler_entry x = { logits[i], i };
        if (kept < k) {
            s->entries[kept++] = x;
            if (kept == k)
                for (int j = k / 2 - 1; j >= 0; j--) sift_down(s->entries, k, j);
        } else if (before(x, s->entries[0])) {
            s->entries[0] = x;
            sift_down(s->entries, k, 0);
        }
    }
    qsort(s->entries, (size_t)kept, sizeof *s->entries, compare);
    return kept;
}

/* Cumulative mass of the first n entries at this temperature, relative to the first; returns the total. */
static double accumulate(sampler *s, int n, double temperature) {
    double sum = 0;
    const float top = s->entries[0].logit, t = (float)temperature;
    for (int i = 0; i < n; i++) {
        const float d = s->entries[i].logit - top;
        sum += i == 0 || d == 0 ? 1.0 : (double)num_exp(d / t);
        s->mass[i] = sum;
    }
    return sum;
}

static double mass_at(const sampler *s, int i) { return i ? s->mass[i] - s->mass[i - 1] : s->mass[0]; }

int32_t sampler_draw(sampler *s, const sampler_params *p, const float *logits, int n, int64_t position) {
    if (sampler_is_greedy(p)) {
        int32_t at = 0;
        for (int i = 1; i < n; i++)
            if (logits[i] > logits[at] || (isnan(logits[at]) && !isnan(logits[i]))) at = i;
        return at;
    }
    int count = best(s, logits, n, p->top_k > 0 && p->top_k < n ? p->top_k : n);
    if (count == 0) return 0;
    double total = accumulate(s, count, p->temperature);
    if (p->top_p < 1) { /* the shortest prefix that reaches top_p of the mass */
        int keep = 1;
        while (keep < count && s->mass[keep - 1] < p->top_p * total) keep++;
        count = keep;
        total = s->mass[count - 1];
    }
    if (p->min_p > 0) { /* relative to the best */
        int keep = 1;
        while (keep < count && mass_at(s, keep) >= p->min_p * mass_at(s, 0)) keep++;
        count = keep;
        total = s->mass[count - 1];
    }
    const double u = rng_uniform(p->seed, p->choice, (uint64_t)position, PURPOSE_TOKEN) * total;
    int i = 0;
    while (i < count - 1 && s->mass[i] <= u) i++;
    return s->entries[i].id;
}

double sampler_logprobs(sampler *s, int32_t *ids, double *logprobs, int count, const float *logits, int n,
                        int32_t chosen) {
    const int k = count < n ? count : n;
    const int kept = best(s, logits, n, k > 0 ? k : 1);
    const double top = kept ? s->entries[0].logit : 0;
    double sum = 0;
    for (int i = 0; i < n; i++)
        if (!isnan(logits[i])) sum += exp((double)logits[i] - top);
    const double norm = top + log(sum);
    for (int i = 0; i < count; i++) {
        ids[i] = i < kept ? s->entries[i].id : -1;
        logprobs[i] = i < kept ? (double)s->entries[i].logit - norm : -INFINITY;
    }
    return (double)logits[chosen] - norm;
}
