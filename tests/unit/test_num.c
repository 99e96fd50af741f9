/* The elementary functions and the 16-bit formats (NUMERICS 1).
 *
 * Bounds are tested on every 251st float32; NUM_ALL=1 takes all of them for exp and log1p (some minutes). SEED=n repeats random cases. */
#include "num/bf16.h"
#include "num/mathf.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

static uint64_t seed, state;
static uint64_t rng(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static double uniform(void) { return (double)(rng() >> 11) * 0x1p-53; }

static float f32_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
#define SAME(a, b) assert_int_equal(bits_of(a), bits_of(b))

#if LDBL_MANT_DIG > \
    64 /* software long double (and often an emulated machine): fewer cases, the golden covers the bits */
enum { QUICK = 2003, SINES = 4000 };
#else
enum { QUICK = 251, SINES = 60000 };
#endif
static uint32_t stride(void) { return getenv("NUM_ALL") ? 1 : QUICK; }

/* Units in the last place of the float32 nearest to `truth`. */
static double ulps(float got, long double truth) {
    const float near = fabsf((float)truth);
    int e;
    frexpf(near, &e);
    const double unit = near < 0x1p-126f ? 0x1p-149 : ldexp(1.0, e - 24);
    return (double)(fabsl((long double)got - truth) / (long double)unit);
}

/* Largest error of f over the float32 whose bits are in [from, to). */
static double worst(float (*f)(float), double (*truth)(double), uint32_t from, uint32_t to, uint32_t step) {
    double most = 0;
    float at = 0;
    for (uint64_t u = from; u < to; u += step) {
        const float x = f32_of((uint32_t)u);
        const double e = ulps(f(x), (long double)truth((double)x));
        if (!(e <= most)) most = e, at = x;
    }
    printf("    at most %.4f ulp, at %a\n", most, (double)at);
    return most;
}

/* ---- exp ---- */

static void exp_bounds(void **s) {
    (void)s;
    const uint32_t top = bits_of(88.72283f), bottom = bits_of(-103.97208f);
    assert_true(worst(num_exp, exp, 0, top + 1, stride()) <= 0.90);
    assert_true(worst(num_exp, exp, 0x80000000u, bottom + 1, stride()) <= 0.90);
}

static void exp_edges(void **s) {
    (void)s;
    SAME(num_exp(0.0f), 1.0f);
    SAME(num_exp(-0.0f), 1.0f);
    SAME(num_exp(INFINITY), INFINITY);
    SAME(num_exp(-INFINITY), 0.0f);
    assert_true(isnan(num_exp(NAN)));
    assert_true(isnan(num_exp(f32_of(0xff800001u))));
    for (int i = -300; i <= 300; i++) {
        /* Around overflow and around the smallest subnormal: as the double result rounds. */
        const float hi = f32_of(bits_of(88.722839f) + (uint32_t)i), lo = f32_of(bits_of(-103.972084f) + (uint32_t)i);
        const float want_hi = (float)exp((double)hi), want_lo = (float)exp((double)lo);
        assert_int_equal(isinf(num_exp(hi)), isinf(want_hi));
        SAME(num_exp(lo), want_lo);
    }
    for (float x = 88.8f; x < 3e38f; x *= 1.5f) {
        SAME(num_exp(x), INFINITY);
        SAME(num_exp(-x - 16), 0.0f);
    }
    SAME(num_exp(0x1p-149f), 1.0f);
    /* A result in the middle of the subnormal range. */
    SAME(num_exp(-95.0f), (float)exp(-95.0));
}

/* ---- log1p, softplus, sigmoid, silu ---- */

static void log1p_bounds(void **s) {
    (void)s;
    assert_true(worst(num_log1p, log1p, 0, 0x7f800000u, stride()) <= 0.88);
    assert_true(worst(num_log1p, log1p, 0x80000000u, bits_of(-1.0f), stride()) <= 0.95);
}

static void log1p_edges(void **s) {
    (void)s;
    SAME(num_log1p(0.0f), 0.0f);
    SAME(num_log1p(INFINITY), INFINITY);
    SAME(num_log1p(-1.0f), -INFINITY);
    assert_true(isnan(num_log1p(-1.0000001f)));
    assert_true(isnan(num_log1p(-INFINITY)));
    assert_true(isnan(num_log1p(NAN)));
    SAME(num_log1p(0x1p-149f), 0x1p-149f);
    assert_true(ulps(num_log1p(3.4028235e38f), logl(3.4028235e38L)) <= 1);
}

static double sigmoid_truth(double x) { return 1 / (1 + exp(-x)); }
static double silu_truth(double x) { return x / (1 + exp(-x)); }
static double softplus_truth(double x) { return x > 20 ? x : log1p(exp(x)); }

static void gates(void **s) {
    (void)s;
    SAME(num_sigmoid(0.0f), 0.5f);
    SAME(num_sigmoid(INFINITY), 1.0f);
    SAME(num_sigmoid(-INFINITY), 0.0f);
    SAME(num_silu(0.0f), 0.0f);
    SAME(num_silu(-0.0f), -0.0f);
    SAME(num_silu(INFINITY), INFINITY);
    SAME(num_silu(-INFINITY), -0.0f);
    SAME(num_silu(-3e38f), -0.0f);
    SAME(num_softplus(20.5f), 20.5f);
    SAME(num_softplus(INFINITY), INFINITY);
    SAME(num_softplus(-INFINITY), 0.0f);
    assert_true(isnan(num_sigmoid(NAN)) && isnan(num_silu(NAN)) && isnan(num_softplus(NAN)));
    /* 2.5 ulp: three roundings and an exp of 0.9 ulp, on the side where they do not cancel. Below -80 the quotient loses
     * what 1 + exp(-x) overflows. */
    const uint32_t twenty = bits_of(20.0f), low = bits_of(-80.0f);
    assert_true(worst(num_sigmoid, sigmoid_truth, 0, bits_of(100.0f), QUICK) <= 2.5);
    assert_true(worst(num_sigmoid, sigmoid_truth, 0x80000000u, low, QUICK) <= 2.5);
    assert_true(worst(num_silu, silu_truth, 0, bits_of(100.0f), QUICK) <= 2.5);
    assert_true(worst(num_silu, silu_truth, 0x80000000u, low, QUICK) <= 2.5);
    assert_true(worst(num_softplus, softplus_truth, 0, twenty + 1, QUICK) <= 2);
    assert_true(worst(num_softplus, softplus_truth, 0x80000000u, low, QUICK) <= 2);
}

static void definitions(void **s) {
    (void)s;
    for (int i = 0; i < 200000; i++) {
        const float x = i & 1 ? f32_of((uint32_t)rng()) : (float)(uniform() * 240 - 120);
        if (isnan(x) || isinf(x)) continue;
        const float d = 1.0f + num_exp(-x);
        SAME(num_sigmoid(x), 1.0f / d);
        SAME(num_silu(x), x / d);
        SAME(num_softplus(x), x > 20 ? x : num_log1p(num_exp(x)));
    }
}

/* ---- sincos ---- */

static double sine_worst;
static void sincos_case(double x) {
    float sn, cs;
    num_sincos(x, &sn, &cs);
    const double a = ulps(sn, sinl((long double)x)), b = ulps(cs, cosl((long double)x));
    const double e = a > b ? a : b;
    if (e > sine_worst) sine_worst = e;
    if (!(e <= 0.50001)) fail_msg("sincos(%a): %f ulp (seed %llu)", x, e, (unsigned long long)seed);
}

static void sincos_bounds(void **s) {
    (void)s;
    for (int i = 0; i < SINES; i++) {
        /* What rope asks for: float32 positions times float32 frequencies. */
        const float freq = (float)pow(1e7, -2.0 * (double)(rng() % 32) / 64);
        sincos_case((double)((float)(rng() % (1u << 20)) * freq));
        sincos_case((uniform() - 0.5) * 0x1p32);
        sincos_case(ldexp(uniform() - 0.5, (int)(rng() % 90) - 58));
        /* Next to a multiple of pi/2, as a double and as a float32: the reduction has to cancel. */
        const double near = (double)(rng() % 1367130550u) * 1.57079632679489661923;
        sincos_case(near);
        sincos_case((double)(float)near);
    }
    sincos_case(2147483648.0);
    sincos_case(-2147483648.0);
    printf("    at most %.6f ulp\n", sine_worst);
}

static void sincos_edges(void **s) {
    (void)s;
    float sn, cs;
    num_sincos(0.0, &sn, &cs);
    SAME(sn, 0.0f);
    SAME(cs, 1.0f);
    const double outside[] = { 2147483649.0, -2147483649.0, 1e300, INFINITY, -INFINITY, NAN };
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        num_sincos(outside[i], &sn, &cs);
        assert_true(isnan(sn) && isnan(cs));
    }
}

/* ---- the same bits on every machine ---- */

static uint64_t fold(uint64_t h, float f) { return (h ^ (isnan(f) ? 0x7fc00000u : bits_of(f))) * 1099511628211u; }

/* Golden: what this code returned when the page was written. A change of any bit is a change of the contract; the failing
 * test prints the new value. */
static void golden(void **s) {
    (void)s;
    uint64_t h[3] = { 1469598103934665603u, 1469598103934665603u, 1469598103934665603u };
    state = 2024;
    for (int i = 0; i < 100000; i++) {
        const float any = f32_of((uint32_t)rng()), x = (float)((double)(rng() >> 40) * 0x1p-24 * 220 - 112);
        float sn, cs;
        h[0] = fold(fold(h[0], num_exp(x)), num_exp(any));
        h[1] = fold(fold(fold(h[1], num_log1p(any)), num_softplus(x)), num_silu(x));
        h[1] = fold(fold(fold(h[1], num_sigmoid(x)), num_silu(any)), num_softplus(any));
        num_sincos((double)(int64_t)(rng() >> 31) * 0x1p-2, &sn, &cs);
        h[2] = fold(fold(h[2], sn), cs);
        num_sincos((double)(any * 0x1p-20f), &sn, &cs);
        h[2] = fold(fold(h[2], sn), cs);
    }
    const uint64_t want[3] = { 0x25ff653b3c6d960fu, 0xcf8e308572c95467u, 0x02de5ade00abcc5cu };
    for (int i = 0; i < 3; i++)
        if (h[i] != want[i]) printf("    golden %d: 0x%016llx\n", i, (unsigned long long)h[i]);
    for (int i = 0; i < 3; i++) assert_true(h[i] == want[i]);
    state = seed;
}

/* ---- F16 and BF16 ---- */

static void f16_upcast(void **s) {
    (void)s;
    for (uint32_t h = 0; h < 0x10000; h++) {
        const int e = (int)(h >> 10 & 31), m = (int)(h & 1023);
        const float got = f16_to_f32((uint16_t)h);
        if (e == 31 && m) {
            assert_true(isnan(got));
            continue;
        }
        const double size = e == 31 ? (double)INFINITY : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
        SAME(got, (float)(h & 0x8000 ? -size : size));
        assert_int_equal(f16_from_f32(got), h);
    }
}

/* The nearest of two neighbours a < b, the even one in the middle, for values at, next to and between them. */
static void check_neighbours(uint16_t (*down)(float), float a, float b, uint32_t code) {
    const float mid = (float)(((double)a + (double)b) / 2); /* exact: one more bit than the format has */
    for (uint32_t sign = 0; sign < 2; sign++) {
        const uint32_t top = sign ? 0x8000 : 0;
        const float f = sign ? -1.0f : 1.0f;
        assert_int_equal(down(f * a), top | code);
        assert_int_equal(down(f * mid), top | (code + (code & 1)));
        assert_int_equal(down(f * f32_of(bits_of(mid) - 1)), top | code);
        assert_int_equal(down(f * f32_of(bits_of(mid) + 1)), top | (code + 1));
    }
}

static uint16_t bf16_down(float f) { return bf16_from_f32(f); }

static void downcasts(void **s) {
    (void)s;
    for (uint32_t h = 0; h < 0x7bff; h++)
        check_neighbours(f16_from_f32, f16_to_f32((uint16_t)h), f16_to_f32((uint16_t)(h + 1)), h);
    check_neighbours(f16_from_f32, 65504.0f, 65536.0f, 0x7bff); /* 65520 rounds to inf */
    for (uint32_t h = 0; h < 0x7f7f; h++)
        check_neighbours(bf16_down, bf16_to_f32((uint16_t)h), bf16_to_f32((uint16_t)(h + 1)), h);
    assert_int_equal(f16_from_f32(3e38f), 0x7c00);
    assert_int_equal(f16_from_f32(-INFINITY), 0xfc00);
    assert_int_equal(bf16_from_f32(3.4028235e38f), 0x7f80);
    assert_int_equal(bf16_from_f32(-INFINITY), 0xff80);
    for (uint32_t u = 0x7f800001u; u < 0x80000000u; u += 0x1237) { /* NaN stays NaN, also when only low bits say so */
        assert_true(isnan(f16_to_f32(f16_from_f32(f32_of(u)))));
        assert_true(isnan(bf16_to_f32(bf16_from_f32(f32_of(u)))));
        assert_true(isnan(bf16_to_f32(bf16_from_f32(f32_of(u | 0x80000000u)))));
    }
    for (uint32_t h = 0; h < 0x10000; h++)
        assert_true(isnan(bf16_to_f32((uint16_t)h)) || bf16_from_f32(bf16_to_f32((uint16_t)h)) == h);
}

int main(void) {
    const char *given = getenv("SEED");
    seed = state = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    printf("SEED=%llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_bounds),    cmocka_unit_test(exp_edges),    cmocka_unit_test(log1p_bounds),
        cmocka_unit_test(log1p_edges),   cmocka_unit_test(gates),        cmocka_unit_test(definitions),
        cmocka_unit_test(sincos_bounds), cmocka_unit_test(sincos_edges), cmocka_unit_test(golden),
        cmocka_unit_test(f16_upcast),    cmocka_unit_test(downcasts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
