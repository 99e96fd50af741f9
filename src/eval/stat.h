/* stat.h - error bars: what a figure measured on a few hundred items is worth.
 *
 * Intervals are at 95 %. The bootstrap resamples whole items (a prompt, a text), never tokens, since the tokens of one item
 * belong together; it draws from a counter-based generator, so one seed gives one interval. */
#ifndef NIBBLE_STAT_H
#define NIBBLE_STAT_H

#include <stdint.h>

typedef struct stat_interval {
    double value, lo, hi; /* NaN when there is nothing to measure */
} stat_interval;

/* Wilson's score interval (1927) of k successes in n. */
stat_interval stat_wilson(int64_t k, int64_t n);
/* Percentile bootstrap of sum(num) / sum(den) over n items; items without a denominator add nothing. */
stat_interval stat_ratio(const double *num, const double *den, int n, uint64_t seed);
/* The same of sum(num_b) / sum(den_b) - sum(num_a) / sum(den_a): item i of both is drawn together (paired). */
stat_interval stat_ratio_difference(const double *num_a, const double *den_a, const double *num_b, const double *den_b,
                                    int n, uint64_t seed);
/* Two-sided exact McNemar test: the probability, if both were equally good, of a split of the b + c discordant pairs at
 * least as uneven. 1 when there are none. */
double stat_mcnemar(int64_t b, int64_t c);
/* Quantile q in [0, 1] of v [n], which gets sorted; the lower of two neighbours. NaN for n == 0. NaN sorts last. */
double stat_quantile(double *v, int n, double q);

#endif
