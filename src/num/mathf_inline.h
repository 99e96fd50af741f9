/* mathf_inline.h - the scalar elementary functions as inline code, for mathf.c, for kern files and for GPU code.
 *
 * kern/ compiles them with hardware FMA where the file's ISA has it; the bits are those of mathf.c, because
 * fmaf is exact by definition. NUMERICS 1 gives the derivation and the measured bounds. */
#ifndef NIBBLE_MATHF_INLINE_H
#define NIBBLE_MATHF_INLINE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "num/num_fn.h"

/* exp: clamps beyond which the result is inf or rounds to +0 whatever the argument. */
#define NUM_EXP_MAX 89.0f
#define NUM_EXP_MIN (-104.0f)
#define NUM_LOG2E 0x1.715476p+0f
/* 1.5 * 2^23: adding it rounds to an integer (nearest even), whose low bits then sit in the significand. */
#define NUM_ROUND_MAGIC 0x1.8p+23f
/* ln2 in two parts; the first has 15 significant bits, so its product with |n| <= 256 is exact. */
#define NUM_LN2_HI 0x1.62e4p-1f
#define NUM_LN2_LO 0x1.7f7d1cp-20f
/* (exp(r) - 1 - r) / r^2 on |r| <= ln2 / 2 */
#define NUM_EXP_C2 0x1.fffffcp-2f
#define NUM_EXP_C3 0x1.55548cp-3f
#define NUM_EXP_C4 0x1.555858p-5f
#define NUM_EXP_C5 0x1.123da6p-7f
#define NUM_EXP_C6 0x1.6ac36cp-10f

NUM_FN uint32_t num_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

NUM_FN float num_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

NUM_FN float num_exp_inline(float x) {
    float c = x > NUM_EXP_MAX ? NUM_EXP_MAX : x; /* NaN compares false and stays */
    c = c < NUM_EXP_MIN ? NUM_EXP_MIN : c;
    const float t = fmaf(c, NUM_LOG2E, NUM_ROUND_MAGIC);
    const float n = t - NUM_ROUND_MAGIC;
    const float r = fmaf(n, -NUM_LN2_LO, fmaf(n, -NUM_LN2_HI, c));
    float p = fmaf(NUM_EXP_C6, r, NUM_EXP_C5);
    p = fmaf(p, r, NUM_EXP_C4);
    p = fmaf(p, r, NUM_EXP_C3);
    p = fmaf(p, r, NUM_EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    /* 2^n in two normal factors: the first product is exact, the second rounds once (also to subnormals). */
    const uint32_t i = num_bits(t) - num_bits(NUM_ROUND_MAGIC);
    const uint32_t half = (i >> 1) | (i & 0x80000000u);
    return p * num_float((half + 127) << 23) * num_float((i - half + 127) << 23);
}

/* exp(-x) is inf for x < -88.7: x / inf is the wanted -0, except at -inf itself. */
NUM_FN float num_silu_inline(float x) {
    const float d = 1.0f + num_exp_inline(-x);
    return x == -INFINITY ? -0.0f : x / d;
}

NUM_FN float num_sigmoid_inline(float x) { return 1.0f / (1.0f + num_exp_inline(-x)); }

/* (log1p(f) - f + f^2 / 2) / f^3 on [-0.25, 0.5] by Horner, highest power first. */
NUM_FN float num_log1p_poly(float f) {
    float p = 0x1.280838p-5f;
    p = fmaf(p, f, -0x1.701a30p-4f);
    p = fmaf(p, f, 0x1.de9ba6p-4f);
    p = fmaf(p, f, -0x1.04ded0p-3f);
    p = fmaf(p, f, 0x1.2470cep-3f);
    p = fmaf(p, f, -0x1.551b1ep-3f);
    p = fmaf(p, f, 0x1.999752p-3f);
    p = fmaf(p, f, -0x1.00007p-2f);
    p = fmaf(p, f, 0x1.55555ap-2f);
    p = fmaf(p, f, -0.5f);
    return fmaf(p, f * f, f);
}

NUM_FN float num_log1p_inline(float x) {
    if (x == INFINITY) return x;
    if (x == -1.0f) return -INFINITY;
    if (!(x > -1.0f)) return NAN;
    const float u = 1.0f + x;
    /* 1 + x = 2^k * m with m in [0.75, 1.5); m - 1 is formed from x itself, so what u lost is not missing. */
    const int32_t k = ((int32_t)num_bits(u) - 0x3f400000) >> 23;
    if (k == 0) return num_log1p_poly(x);
    float f;
    if (k > 100) {
        f = num_float(num_bits(u) - ((uint32_t)k << 23)) - 1.0f; /* the 1 in 1 + x is long gone */
    } else {
        const float s = num_float((uint32_t)(127 - k) << 23); /* 2^-k */
        f = fmaf(x, s, s - 1.0f);
    }
    const float n = (float)k;
    return fmaf(n, NUM_LN2_HI, fmaf(n, NUM_LN2_LO, num_log1p_poly(f)));
}

NUM_FN float num_softplus_inline(float x) { return x > 20.0f ? x : num_log1p_inline(num_exp_inline(x)); }

#endif
