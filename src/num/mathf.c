#include "num/mathf.h"

#include "num/mathf_inline.h"

float num_exp(float x) { return num_exp_inline(x); }
float num_sigmoid(float x) { return num_sigmoid_inline(x); }
float num_silu(float x) { return num_silu_inline(x); }
float num_softplus(float x) { return x > 20.0f ? x : num_log1p(num_exp(x)); }

/* (log1p(f) - f + f^2 / 2) / f^3 on [-0.25, 0.5], lowest power first. */
static const float log_c[9] = { 0x1.55555ap-2f,  -0x1.00007p-2f, 0x1.999752p-3f,  -0x1.551b1ep-3f, 0x1.2470cep-3f,
                                -0x1.04ded0p-3f, 0x1.de9ba6p-4f, -0x1.701a30p-4f, 0x1.280838p-5f };

static float log1p_poly(float f) {
    float p = log_c[8];
    for (int i = 7; i >= 0; i--) p = fmaf(p, f, log_c[i]);
    p = fmaf(p, f, -0.5f);
    return fmaf(p, f * f, f);
}

float num_log1p(float x) {
    if (x == INFINITY) return x;
    if (x == -1.0f) return -INFINITY;
    if (!(x > -1.0f)) return NAN;
    const float u = 1.0f + x;
    /* 1 + x = 2^k * m with m in [0.75, 1.5); m - 1 is formed from x itself, so what u lost is not missing. */
    const int32_t k = ((int32_t)num_bits(u) - 0x3f400000) >> 23;
    if (k == 0) return log1p_poly(x);
    float f;
    if (k > 100) {
        f = num_float(num_bits(u) - ((uint32_t)k << 23)) - 1.0f; /* the 1 in 1 + x is long gone */
    } else {
        const float s = num_float((uint32_t)(127 - k) << 23); /* 2^-k */
        f = fmaf(x, s, s - 1.0f);
    }
    const float n = (float)k;
    return fmaf(n, NUM_LN2_HI, fmaf(n, NUM_LN2_LO, log1p_poly(f)));
}

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
