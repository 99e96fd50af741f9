/* sampler.h - logits to a token id, reproducibly.
 *
 * The draw depends only on (seed, choice, position, logits): never on batching, chunking or on how many drafts were
 * verified (NUMERICS 8). Order: temperature, top-k, renormalise, top-p, renormalise, min-p; candidates by (logit
 * descending, id ascending); probabilities from num_exp, prefix sums in float64, inverse CDF. */
#ifndef NIBBLE_SAMPLER_H
#define NIBBLE_SAMPLER_H

#include "base/base.h"

typedef struct sampler_params {
    double temperature; /* 0 = greedy */
    int top_k;          /* 0 = off */
    double top_p;       /* 1 = off */
    double min_p;       /* 0 = off */
    uint64_t seed;
    uint32_t choice; /* index of the completion when several share a prompt */
} sampler_params;

typedef struct sampler_entry {
    float logit;
    int32_t id;
} sampler_entry;

typedef struct sampler {
    sampler_entry *entries; /* scratch, one per vocabulary id */
    double *mass;           /* scratch, cumulative */
    int cap;
} sampler;

void sampler_free(sampler *s);
static inline bool sampler_is_greedy(const sampler_params *p) { return p->temperature <= 0 || p->top_k == 1; }
/* Token for absolute position `position` from logits[0..n). NaN logits are never chosen; greedy takes the largest logit,
 * lowest id on ties. */
int32_t sampler_draw(sampler *s, const sampler_params *p, const float *logits, int n, int64_t position);
/* The `count` most likely ids with their raw log-softmax (before any sampling option), best first: ids[count],
 * logprobs[count]; and the log-probability of `chosen`. */
double sampler_logprobs(sampler *s, int32_t *ids, double *logprobs, int count, const float *logits, int n,
                        int32_t chosen);

#endif
