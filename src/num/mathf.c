#include "num/mathf.h"

#include "num/mathf_inline.h"

float num_exp(float x) { return num_exp_inline(x); }
float num_sigmoid(float x) { return num_sigmoid_inline(x); }
float num_silu(float x) { return num_silu_inline(x); }
float num_log1p(float x) { return num_log1p_inline(x); }
float num_softplus(float x) { return num_softplus_inline(x); }

/* pi/2 in five parts: four of 22 bits, whose products with |n| < 2^31 are exact in double, and the rest. */
static const double pio2[5] = { 0x1.921fb00000000p+0, 0x1.5110b00000000p-22, 0x1.1846980000000p-44,
                                0x1.3198a00000000p-69, 0x1.701b839a25205p-92 };
#define TWO_OVER_PI 0x1.45f306dc9c883p-1

/* a + b = s + e exactly. */
static double two_sum(double a, double b, double *e) {
    const double s = a + b, t = s - a;
    *e = (a - (s - t)) + (b - t);
    return s;
}

/* x - n * pi/2 as hi + lo; absolute error below 2^-105. */
static double reduce(double x, double n, double *lo) {
    double hi = x, low = 0;
    for (int i = 0; i < 4; i++) {
        double e;
        hi = two_sum(hi, -(n * pio2[i]), &e);
        low += e;
    }
    low -= n * pio2[4];
    return two_sum(hi, low, lo);
}

void num_sincos(double x, float *sin_out, float *cos_out) {
    if (!(fabs(x) <= 2147483648.0)) {
        *sin_out = *cos_out = NAN;
        return;
    }
    const double magic = 0x1.8p+52, n = (x * TWO_OVER_PI + magic) - magic;
    double lo;
    const double r = reduce(x, n, &lo), z = r * r;
    /* Taylor to r^17 / r^18: the next term is below 2^-66 of the result on |r| <= pi/4. */
    double s = 0, c = 0;
    for (int i = 8; i >= 1; i--) {
        s = (s + 1) * -z / (double)(2 * i * (2 * i + 1));
        c = (c + 1) * -z / (double)(2 * i * (2 * i - 1));
    }
    const double sn = r + (r * s + lo * (1 - 0.5 * z)), cs = 1 + (c - lo * r);
    switch ((int64_t)n & 3) {
    case 0: *sin_out = (float)sn, *cos_out = (float)cs; break;
    case 1: *sin_out = (float)cs, *cos_out = (float)-sn; break;
    case 2: *sin_out = (float)-sn, *cos_out = (float)-cs; break;
    default: *sin_out = (float)-cs, *cos_out = (float)sn; break;
    }
}

/* x = 2^k m with m in [sqrt(1/2), sqrt(2)]; log m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.1716: the first term
 * left out is below 2^-65 of the result. */
double num_log(double x) {
    if (!(x >= 0x1p-1022)) return NAN;
    if (isinf(x)) return x;
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    int k = (int)(u >> 52) - 1023;
    u = (u & 0xfffffffffffffu) | (uint64_t)1023 << 52;
    double m;
    memcpy(&m, &u, sizeof m);
    if (m > 0x1.6a09e667f3bcdp+0) m *= 0.5, k++;
    const double s = (m - 1) / (m + 1), z = s * s;
    double p = 0;
    for (int i = 11; i >= 1; i--) p = (p + 1.0 / (2 * i + 1)) * z;
    /* ln 2 in two parts: the product with the first is exact. */
    return k * 0x1.62e42fee00000p-1 + (2 * s + (2 * s * p + k * 0x1.a39ef35793c76p-33));
}
