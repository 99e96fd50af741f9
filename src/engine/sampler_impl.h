/* sampler_impl.h - the parts of the sampler; private to engine/sampler*.c and their tests.
 *
 * Candidates come best first from rank_at, which sorts no more than is looked at. Masses of one list add up exactly in 64
 * bits in any order: at most 2^40 each, vocabularies stay below 2^23. */
#ifndef NIBBLE_SAMPLER_IMPL_H
#define NIBBLE_SAMPLER_IMPL_H

#include "engine/sampler.h"

#define SAMPLER_UNIT 0x1p40    /* mass of the best candidate */
enum { SAMPLER_SELECT = 128 }; /* top-k up to here is selected by block maxima; beyond it, everything is ranked */

/* Block maxima of a row into s->maxima; false when a logit is not finite. */
bool sampler_scan(sampler *s, const float *x, int n);
/* The largest of the maxima; -inf when no id may be chosen. */
float sampler_top(const sampler *s, int n);
/* First id with this logit; it must occur. */
int32_t sampler_find(const sampler *s, const float *x, int n, float logit);

/* The k <= SAMPLER_SELECT best of x in their order into s->list (fewer when fewer are above -inf), without masses. */
void rank_select(sampler *s, const float *x, int n, int k);
/* Every id of positive mass, unsorted, into s->list; returns the total mass. `top` is the largest logit. */
uint64_t rank_all(sampler *s, const float *x, int n, float top, float temperature);
/* Candidate i < s->n_list in the order (logit descending, id ascending). */
const sampler_entry *rank_at(sampler *s, int i);
/* Mass of the selected candidates, in place; returns the total. */
uint64_t rank_weigh(sampler *s, float temperature);
/* exp((x[i] - top) / temperature) for i < n <= KERN_BLOCK. */
void rank_exp(const sampler *s, float *y, const float *x, int n, float top, float temperature);
/* Every logit at or below top - rank_reach has no mass. */
float rank_reach(float temperature);

#endif
