/* Statistics and comparisons of eval against values that were worked out elsewhere, and against brute force. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/rng.h"
#include "eval/compare.h"
#include "eval/stat.h"

#include <cmocka.h>

static void near(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance)) fail_msg("%.10g, not %.10g", got, want);
}

/* R: prop.test(k, n, correct = FALSE)$conf.int */
static void wilson(void **state) {
    (void)state;
    const stat_interval a = stat_wilson(8, 10), none = stat_wilson(0, 0), all = stat_wilson(100, 100),
                        zero = stat_wilson(0, 20);
    near(a.value, 0.8, 0);
    near(a.lo, 0.4901625, 1e-6);
    near(a.hi, 0.9433178, 1e-6);
    assert_true(isnan(none.value));
    near(all.lo, 0.9630065, 1e-6);
    near(all.hi, 1, 0);
    near(zero.lo, 0, 0);
    near(zero.hi, 0.1611252, 1e-6);
}

/* R: binom.test(b, b + c)$p.value */
static void mcnemar(void **state) {
    (void)state;
    near(stat_mcnemar(0, 0), 1, 0);
    near(stat_mcnemar(5, 5), 1, 0);
    near(stat_mcnemar(1, 9), 0.021484375, 1e-12);
    near(stat_mcnemar(9, 1), 0.021484375, 1e-12);
    near(stat_mcnemar(0, 6), 0.03125, 1e-12);
    assert_true(stat_mcnemar(400, 600) < 1e-9);
}

static void quantiles(void **state) {
    (void)state;
    double v[] = { 5, NAN, 1, 4, 2, 3 };
    near(stat_quantile(v, 5, 0.5), 3, 2); /* sorted in place */
    double w[] = { 3, 1, 2 };
    near(stat_quantile(w, 3, 0), 1, 0);
    near(stat_quantile(w, 3, 0.5), 2, 0);
    near(stat_quantile(w, 3, 1), 3, 0);
    assert_true(isnan(stat_quantile(w, 0, 0.5)));
}

/* The bootstrap's interval of a mean is close to the normal one, covers the value, and is the same each time. */
static void bootstrap(void **state) {
    (void)state;
    enum { N = 400 };
    double x[N], one[N], y[N], sum = 0, sq = 0;
    for (int i = 0; i < N; i++) {
        x[i] = rng_uniform(7, 0, (uint64_t)i, 1);
        y[i] = x[i] + 0.25; /* paired: the difference has no spread at all */
        one[i] = 1;
        sum += x[i];
        sq += x[i] * x[i];
    }
    const double mean = sum / N, half = 1.96 * sqrt((sq / N - mean * mean) / N);
    const stat_interval a = stat_ratio(x, one, N, 3), b = stat_ratio(x, one, N, 3),
                        d = stat_ratio_difference(x, one, y, one, N, 3);
    near(a.value, mean, 1e-12);
    near(a.lo, mean - half, 0.2 * half);
    near(a.hi, mean + half, 0.2 * half);
    assert_true(a.lo == b.lo && a.hi == b.hi);
    near(d.value, 0.25, 1e-12);
    near(d.lo, 0.25, 1e-12);
    near(d.hi, 0.25, 1e-12);
    assert_true(isnan(stat_ratio(x, one, 1, 3).lo));
    const double zero[2] = { 0, 0 };
    assert_true(isnan(stat_ratio(x, zero, 2, 3).value));
}

static void kl_of_rows(void **state) {
    (void)state;
    const float p[4] = { 0, 1, 2, 3 }, q[4] = { 3, 2, 1, 0 }, shifted[4] = { 10, 11, 12, 13 };
    double zp = 0, kl = 0;
    for (int i = 0; i < 4; i++) zp += exp(p[i]);
    for (int i = 0; i < 4; i++)
        kl += exp(p[i]) / zp * ((double)p[i] - (double)q[i]); /* both have the same normalizer */
    const compare_row a = compare_logits(q, p, 4, 1), same = compare_logits(shifted, p, 4, -1),
                      alone = compare_logits(p, NULL, 4, 3);
    near(a.kl, kl, 1e-12);
    near(a.nll, log(zp) - 2, 1e-12);
    near(a.want, log(zp) - 1, 1e-12);
    assert_false(a.same_top);
    near(same.kl, 0, 1e-12);
    assert_true(same.same_top && isnan(same.nll));
    assert_true(isnan(alone.kl));
    near(alone.nll, log(zp) - 3, 1e-12);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wilson),    cmocka_unit_test(mcnemar),    cmocka_unit_test(quantiles),
        cmocka_unit_test(bootstrap), cmocka_unit_test(kl_of_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
