#include "eval/stat.h"

#include <math.h>
#include <stdlib.h>

#include "base/base.h"
#include "base/rng.h"

enum { RESAMPLES = 2000, PURPOSE = 0x65766c };

static const double Z = 1.959963984540054; /* the normal distribution's 97.5 % quantile */

stat_interval stat_wilson(int64_t k, int64_t n) {
    if (n <= 0) return (stat_interval){ NAN, NAN, NAN };
    const double m = (double)n, p = (double)k / m, z2 = Z * Z, mid = (p + z2 / (2 * m)) / (1 + z2 / m),
                 half = Z * sqrt(p * (1 - p) / m + z2 / (4 * m * m)) / (1 + z2 / m);
    return (stat_interval){ p, k == 0 ? 0 : mid - half, k == n ? 1 : mid + half };
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    if (isnan(x) || isnan(y)) return isnan(x) - isnan(y);
    return (x > y) - (x < y);
}

double stat_quantile(double *v, int n, double q) {
    if (n <= 0) return NAN;
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[(int)(q * (n - 1))];
}

static double ratio(double num, double den) { return den > 0 ? num / den : NAN; }

/* One arm alone, or the second's ratio less the first's. */
static double figure(const double *num_a, const double *den_a, const double *num_b, const double *den_b,
                     const int *pick, int n) {
    double na = 0, da = 0, nb = 0, db = 0;
    for (int i = 0; i < n; i++) {
        const int j = pick ? pick[i] : i;
        na += num_a[j];
        da += den_a[j];
        if (num_b) nb += num_b[j], db += den_b[j];
    }
    return num_b ? ratio(nb, db) - ratio(na, da) : ratio(na, da);
}

static stat_interval bootstrap(const double *num_a, const double *den_a, const double *num_b, const double *den_b,
                               int n, uint64_t seed) {
    stat_interval r = { figure(num_a, den_a, num_b, den_b, NULL, n), NAN, NAN };
    if (n < 2 || isnan(r.value)) return r;
    double *v = xmalloc(RESAMPLES * sizeof *v);
    int *pick = xmalloc((size_t)n * sizeof *pick), found = 0;
    for (int s = 0; s < RESAMPLES; s++) {
        for (int i = 0; i < n; i++) pick[i] = (int)(rng_uniform(seed, (uint32_t)s, (uint64_t)i, PURPOSE) * n);
        const double x = figure(num_a, den_a, num_b, den_b, pick, n);
        if (!isnan(x)) v[found++] = x;
    }
    r.lo = stat_quantile(v, found, 0.025);
    r.hi = stat_quantile(v, found, 0.975);
    free(pick);
    free(v);
    return r;
}

stat_interval stat_ratio(const double *num, const double *den, int n, uint64_t seed) {
    return bootstrap(num, den, NULL, NULL, n, seed);
}

stat_interval stat_ratio_difference(const double *num_a, const double *den_a, const double *num_b, const double *den_b,
                                    int n, uint64_t seed) {
    return bootstrap(num_a, den_a, num_b, den_b, n, seed);
}

double stat_mcnemar(int64_t b, int64_t c) {
    const int64_t n = b + c, few = b < c ? b : c;
    if (n == 0 || b == c) return 1;
    double p = 0;
    for (int64_t k = 0; k <= few; k++)
        p += exp(lgamma((double)n + 1) - lgamma((double)k + 1) - lgamma((double)(n - k) + 1) - (double)n * log(2));
    return fmin(1, 2 * p);
}
