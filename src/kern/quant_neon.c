/* NEON (AArch64 base) level of quant.h. Four blocks at a time: their maxima and scales fill one register. */
#include "kern/quant.h"

#include <arm_neon.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { GROUP = 64 }; /* elements of 4 blocks */

INLINE float32x4_t as_f(uint32x4_t u) { return vreinterpretq_f32_u32(u); }
INLINE uint32x4_t as_u(float32x4_t x) { return vreinterpretq_u32_f32(x); }
INLINE float32x4_t widen(uint16x4_t h) { return as_f(vshlq_n_u32(vmovl_u16(h), 16)); }

INLINE float32x4_t load4(const void *x, int64_t at, bool bf16) {
    return bf16 ? widen(vld1_u16((const uint16_t *)x + at)) : vld1q_f32((const float *)x + at);
}

INLINE uint32x4_t magnitude(float32x4_t x) { return vandq_u32(as_u(x), vdupq_n_u32(0x7fffffff)); }
INLINE uint32x4_t not_a_number(float32x4_t x) { return vmvnq_u32(vceqq_f32(x, x)); }

INLINE float32x4_t block_max_bf16(const uint16_t *x) {
    const uint16x8_t mask = vdupq_n_u16(0x7fff);
    uint16x8_t m[4];
    for (int i = 0; i < 4; i++)
        m[i] = vmaxq_u16(vandq_u16(mask, vld1q_u16(x + 16 * i)), vandq_u16(mask, vld1q_u16(x + 16 * i + 8)));
    const uint16x8_t p = vpmaxq_u16(vpmaxq_u16(m[0], m[1]), vpmaxq_u16(m[2], m[3]));
    return widen(vget_low_u16(vpmaxq_u16(p, p)));
}

INLINE float32x4_t block_max_f32(const float *x) {
    uint32x4_t m[4];
    for (int i = 0; i < 4; i++) {
        const float *at = x + 16 * i;
        m[i] = vmaxq_u32(vmaxq_u32(magnitude(vld1q_f32(at)), magnitude(vld1q_f32(at + 4))),
                         vmaxq_u32(magnitude(vld1q_f32(at + 8)), magnitude(vld1q_f32(at + 12))));
    }
    return as_f(vpmaxq_u32(vpmaxq_u32(m[0], m[1]), vpmaxq_u32(m[2], m[3])));
}

INLINE float32x4_t block_max(const void *x, bool bf16) { return bf16 ? block_max_bf16(x) : block_max_f32(x); }

/* Bits u of 0 <= a <= 448 -> E4M3 code; *value is what the code stands for. Adding 2^(e+20), e = max(exponent of a, -6),
 * leaves a's rounding to 3 mantissa bits in the lowest bits of the sum. */
INLINE uint32x4_t e4m3_round(uint32x4_t u, float32x4_t *value) {
    const uint32x4_t e = vmaxq_u32(vandq_u32(u, vdupq_n_u32(0x7f800000)), vdupq_n_u32(121u << 23));
    const uint32x4_t m = vaddq_u32(e, vdupq_n_u32(20u << 23));
    const float32x4_t r = vaddq_f32(as_f(u), as_f(m));
    *value = vsubq_f32(r, as_f(m));
    return vaddq_u32(vsubq_u32(as_u(r), m), vsubq_u32(vshrq_n_u32(m, 20), vdupq_n_u32(141 << 3)));
}

/* E2M1 codes of q, the same way: 2^(e+22), e = max(exponent, 0). As integers NaN is above 6, and it is not negative. */
INLINE uint32x4_t e2m1_round(float32x4_t q) {
    const uint32x4_t a = vminq_u32(magnitude(q), as_u(vdupq_n_f32(6)));
    const uint32x4_t e = vmaxq_u32(vandq_u32(a, vdupq_n_u32(0x7f800000)), vdupq_n_u32(127u << 23));
    const uint32x4_t m = vaddq_u32(e, vdupq_n_u32(22u << 23));
    const uint32x4_t r = as_u(vaddq_f32(as_f(a), as_f(m)));
    const uint32x4_t code = vaddq_u32(vsubq_u32(r, m), vsubq_u32(vshrq_n_u32(m, 22), vdupq_n_u32(149 << 1)));
    return vorrq_u32(code, vandq_u32(vcltzq_f32(q), vdupq_n_u32(8)));
}

/* Values of 4 E4M3 bytes: one place up in a half float they are the value times 2^-8, subnormals included. */
INLINE float32x4_t values_of(uint16x4_t c) {
    const uint16x4_t mag = vand_u16(c, vdup_n_u16(0x7f));
    const uint16x4_t nan = vand_u16(vceq_u16(mag, vdup_n_u16(0x7f)), vdup_n_u16(0x7c00));
    const uint16x4_t sign = vshl_n_u16(vand_u16(c, vdup_n_u16(0x80)), 8);
    const uint16x4_t half = vorr_u16(vorr_u16(vshl_n_u16(mag, 7), sign), nan);
    return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), 256);
}

INLINE float32x4_t scale_values(const uint8_t *scales) {
    uint32_t four;
    memcpy(&four, scales, 4);
    return values_of(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}

/* Low byte of each lane of two registers. */
INLINE uint8x8_t low_bytes(uint32x4_t a, uint32x4_t b) { return vmovn_u16(vcombine_u16(vmovn_u32(a), vmovn_u32(b))); }

INLINE void store4(uint8_t *out, uint32x4_t codes) {
    const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(low_bytes(codes, codes)), 0);
    memcpy(out, &four, 4);
}

INLINE float32x4_t with_nan(float32x4_t x, uint32x4_t nan) {
    return as_f(vbslq_u32(nan, vdupq_n_u32(0x7fc00000), as_u(x)));
}

/* Weight scales of 4 blocks: bytes out, returns den. */
INLINE float32x4_t weight_scales(uint8_t *scales, float32x4_t b, float s2, quant_arith arith) {
    const float32x4_t d = vdupq_n_f32(6.0f * s2), s = vdivq_f32(b, d);
    const uint32x4_t nan_in = vorrq_u32(not_a_number(b), not_a_number(d)), nan = not_a_number(s);
    const float32x4_t one_for_zero = vbslq_f32(vceqzq_f32(s), vdupq_n_f32(1), s);
    /* as signed integers: negative values and NaNs, whose lanes are replaced below, come out inside the range */
    int32x4_t u = vreinterpretq_s32_f32(one_for_zero);
    u = vmaxq_s32(u, vreinterpretq_s32_f32(vdupq_n_f32(0x1p-9f)));
    u = vminq_s32(u, vreinterpretq_s32_f32(vdupq_n_f32(448)));
    float32x4_t value;
    uint32x4_t code = e4m3_round(vreinterpretq_u32_s32(u), &value);
    code = vbslq_u32(nan, vdupq_n_u32(arith == ARITH_CPU ? 0xff : 0x7f), code);
    code = vbslq_u32(nan_in, vdupq_n_u32(0x7f), code);
    store4(scales, code);
    return vmulq_n_f32(with_nan(value, nan), s2);
}

/* Activation scales: no floor; *tiny is all ones in blocks whose codes are 0. */
INLINE float32x4_t act_scales(uint8_t *scales, float32x4_t b, float g, uint32x4_t *tiny) {
    const float32x4_t s = vdivq_f32(b, vdupq_n_f32(6.0f * g));
    const uint32x4_t nan = not_a_number(s);
    float32x4_t value;
    const uint32x4_t code = e4m3_round(vminq_u32(magnitude(s), as_u(vdupq_n_f32(448))), &value);
    store4(scales, vbslq_u32(nan, vdupq_n_u32(0x7f), code));
    const float32x4_t den = vmulq_n_f32(with_nan(value, nan), g);
    *tiny = vcltq_f32(den, vdupq_n_f32(NVFP4_ACT_TINY));
    return den;
}

INLINE uint8x8_t codes_of_block(const void *w, int64_t at, float den, bool bf16) {
    const float32x4_t d = vdupq_n_f32(den);
    uint32x4_t c[4];
    for (int i = 0; i < 4; i++) c[i] = e2m1_round(vdivq_f32(load4(w, at + 4 * i, bf16), d));
    const uint8x8_t lo = low_bytes(c[0], c[1]), hi = low_bytes(c[2], c[3]);
    return vsli_n_u8(vuzp1_u8(lo, hi), vuzp2_u8(lo, hi), 4); /* odd elements above even ones */
}

/* One group of 4 blocks, in one of three ways. */
typedef enum mode { WEIGHT, GIVEN, ACT } mode;

INLINE void group(uint8_t *codes, uint8_t *scales, const void *w, float s2, quant_arith arith, bool bf16, mode how) {
    uint32x4_t tiny = vdupq_n_u32(0);
    float32x4_t den4;
    if (how == WEIGHT)
        den4 = weight_scales(scales, block_max(w, bf16), s2, arith);
    else if (how == ACT)
        den4 = act_scales(scales, block_max(w, bf16), s2, &tiny);
    else
        den4 = vmulq_n_f32(scale_values(scales), s2);
    float den[4];
    uint32_t drop[4];
    vst1q_f32(den, den4);
    vst1q_u32(drop, tiny);
    for (int i = 0; i < 4; i++) {
        const uint8x8_t c = codes_of_block(w, 16 * i, den[i], bf16);
        vst1_u8(codes + 8 * i, how == ACT ? vbic_u8(c, vreinterpret_u8_u32(vdup_n_u32(drop[i]))) : c);
    }
}

INLINE void encode(uint8_t *codes, uint8_t *scales, const void *w, int64_t n, float s2, quant_arith arith, bool bf16,
                   mode how) {
    const size_t size = bf16 ? 2 : 4;
    const uint8_t *at = w;
    for (; n >= GROUP; n -= GROUP, at += GROUP * size, codes += GROUP / 2, scales += GROUP / 16)
        group(codes, scales, at, s2, arith, bf16, how);
    if (n == 0) return;
    uint32_t rest[GROUP] = { 0 };
    uint8_t c[GROUP / 2], s[GROUP / 16] = { 0 };
    memcpy(rest, at, (size_t)n * size);
    memcpy(s, scales, (size_t)n / 16);
    group(c, s, rest, s2, arith, bf16, how);
    memcpy(codes, c, (size_t)n / 2);
    if (how != GIVEN) memcpy(scales, s, (size_t)n / 16);
}

static void encode_bf16(uint8_t *codes, uint8_t *scales, const uint16_t *w, int64_t n, float s2, quant_arith arith) {
    encode(codes, scales, w, n, s2, arith, true, WEIGHT);
}

static void encode_f32(uint8_t *codes, uint8_t *scales, const float *w, int64_t n, float s2, quant_arith arith) {
    encode(codes, scales, w, n, s2, arith, false, WEIGHT);
}

static void codes_bf16(uint8_t *codes, const uint8_t *scales, const uint16_t *w, int64_t n, float s2) {
    encode(codes, (uint8_t *)scales, w, n, s2, ARITH_CUDA, true, GIVEN); /* scales are only read */
}

static void codes_f32(uint8_t *codes, const uint8_t *scales, const float *w, int64_t n, float s2) {
    encode(codes, (uint8_t *)scales, w, n, s2, ARITH_CUDA, false, GIVEN);
}

static void act_encode(uint8_t *codes, uint8_t *scales, const float *x, int64_t n, float g) {
    encode(codes, scales, x, n, g, ARITH_CUDA, false, ACT);
}

/* ---- decoding ---- */

INLINE uint16x4_t to_bf16(float32x4_t x) {
    const uint32x4_t u = as_u(x), lsb = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(u, vaddq_u32(vdupq_n_u32(0x7fff), lsb));
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(not_a_number(x), quiet, up), 16);
}

INLINE void put4(void *y, int64_t at, float32x4_t v, bool bf16) {
    if (bf16)
        vst1_u16((uint16_t *)y + at, to_bf16(v));
    else
        vst1q_f32((float *)y + at, v);
}

/* The 16 values of E2M1 are BF16 numbers: one table for each of their bytes. */
INLINE void decode_block(void *y, int64_t at, const uint8_t *codes, float den, bool bf16) {
    static const uint8_t upper[16] = { 0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                       0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0 };
    static const uint8_t lower[16] = { 0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0,
                                       0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0 };
    const uint8x8_t c = vld1_u8(codes), even = vand_u8(c, vdup_n_u8(15)), odd = vshr_n_u8(c, 4);
    const uint8x16_t code = vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd));
    const uint8x16_t u = vqtbl1q_u8(vld1q_u8(upper), code), l = vqtbl1q_u8(vld1q_u8(lower), code);
    const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(l, u)), b = vreinterpretq_u16_u8(vzip2q_u8(l, u));
    put4(y, at, vmulq_n_f32(widen(vget_low_u16(a)), den), bf16);
    put4(y, at + 4, vmulq_n_f32(widen(vget_high_u16(a)), den), bf16);
    put4(y, at + 8, vmulq_n_f32(widen(vget_low_u16(b)), den), bf16);
    put4(y, at + 12, vmulq_n_f32(widen(vget_high_u16(b)), den), bf16);
}

INLINE void decode(void *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2, bool bf16) {
    for (int64_t b = 0; b < n / 16; b += 4) {
        uint8_t s[4] = { 0 };
        float den[4];
        const int blocks = n / 16 - b < 4 ? (int)(n / 16 - b) : 4;
        memcpy(s, scales + b, (size_t)blocks);
        vst1q_f32(den, vmulq_n_f32(scale_values(s), s2));
        for (int i = 0; i < blocks; i++) decode_block(y, 16 * (b + i), codes + 8 * (b + i), den[i], bf16);
    }
}

static void decode_f32(float *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    decode(y, codes, scales, n, s2, false);
}

static void decode_bf16(uint16_t *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    decode(y, codes, scales, n, s2, true);
}

/* ---- FP8: eight at a time, the rest through a padded copy ---- */

/* Saturating, or torch's cast with NaN above 464. */
INLINE uint32x4_t e4m3_codes(float32x4_t x, bool cast) {
    const uint32x4_t a = magnitude(x), nan = vcgtq_u32(a, vdupq_n_u32(cast ? 0x43e80000u : 0x7f800000u));
    float32x4_t value;
    const uint32x4_t round = e4m3_round(vminq_u32(a, as_u(vdupq_n_f32(448))), &value);
    const uint32x4_t sign = vandq_u32(vshrq_n_u32(as_u(x), 24), vdupq_n_u32(0x80));
    return vorrq_u32(vbslq_u32(nan, vdupq_n_u32(0x7f), round), sign);
}

typedef enum fp8_mode { DIV, MUL, TWICE } fp8_mode;

INLINE uint32x4_t fp8_4(const void *x, int64_t at, float s, fp8_mode how) {
    if (how == DIV) return e4m3_codes(vdivq_f32(load4(x, at, false), vdupq_n_f32(s)), false);
    if (how == MUL) return e4m3_codes(vmulq_n_f32(load4(x, at, false), s), false);
    return e4m3_codes(widen(to_bf16(vdivq_f32(load4(x, at, true), vdupq_n_f32(s)))), true);
}

INLINE void fp8(uint8_t *y, const void *x, int64_t n, float s, fp8_mode how) {
    const size_t size = how == TWICE ? 2 : 4;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) vst1_u8(y + i, low_bytes(fp8_4(x, i, s, how), fp8_4(x, i + 4, s, how)));
    if (i == n) return;
    uint32_t rest[8] = { 0 };
    uint8_t c[8];
    memcpy(rest, (const uint8_t *)x + (size_t)i * size, (size_t)(n - i) * size);
    vst1_u8(c, low_bytes(fp8_4(rest, 0, s, how), fp8_4(rest, 4, s, how)));
    memcpy(y + i, c, (size_t)(n - i));
}

static void fp8_div(uint8_t *y, const float *x, int64_t n, float scale) { fp8(y, x, n, scale, DIV); }
static void fp8_mul(uint8_t *y, const float *x, int64_t n, float m) { fp8(y, x, n, m, MUL); }
static void fp8_weight(uint8_t *y, const uint16_t *w, int64_t n, float divisor) { fp8(y, w, n, divisor, TWICE); }

static void fp8_decode(float *y, const uint8_t *x, int64_t n, float scale) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(y + i, vmulq_n_f32(scale_values(x + i), scale));
    for (; i < n; i++) y[i] = e4m3_to_f32(x[i]) * scale;
}

/* ---- statistics ---- */

static float amax_bf16(const uint16_t *x, int64_t n) {
    const uint16x8_t mask = vdupq_n_u16(0x7fff);
    uint16x8_t m[4] = { vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0) };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; j++) m[j] = vmaxq_u16(m[j], vandq_u16(mask, vld1q_u16(x + i + 8 * j)));
    const uint16_t top = vmaxvq_u16(vmaxq_u16(vmaxq_u16(m[0], m[1]), vmaxq_u16(m[2], m[3])));
    const uint32_t u = (uint32_t)top << 16;
    float f, rest = stats_amax_bf16(x + i, n - i);
    memcpy(&f, &u, 4);
    return rest > f || rest != rest ? rest : f;
}

static float amax_f32(const float *x, int64_t n) {
    uint32x4_t m[4] = { vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0) };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 4; j++) m[j] = vmaxq_u32(m[j], magnitude(vld1q_f32(x + i + 4 * j)));
    const uint32_t u = vmaxvq_u32(vmaxq_u32(vmaxq_u32(m[0], m[1]), vmaxq_u32(m[2], m[3])));
    float f, rest = stats_amax_f32(x + i, n - i);
    memcpy(&f, &u, 4);
    return rest > f || rest != rest ? rest : f;
}

static int64_t nonfinite_bf16(const uint16_t *x, int64_t n) {
    const uint16x8_t inf = vdupq_n_u16(0x7f80);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        if (vmaxvq_u16(vceqq_u16(vandq_u16(vld1q_u16(x + i), inf), inf))) break;
    const int64_t at = stats_nonfinite_bf16(x + i, n - i);
    return at < 0 ? -1 : i + at;
}

static int64_t nonfinite_f32(const float *x, int64_t n) {
    const uint32x4_t inf = vdupq_n_u32(0x7f800000);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        if (vmaxvq_u32(vceqq_u32(vandq_u32(as_u(vld1q_f32(x + i)), inf), inf))) break;
    const int64_t at = stats_nonfinite_f32(x + i, n - i);
    return at < 0 ? -1 : i + at;
}

INLINE void block_amax(float *b, const void *x, int64_t n, bool bf16) {
    const size_t size = bf16 ? 2 : 4;
    const uint8_t *at = x;
    for (; n >= GROUP; n -= GROUP, at += GROUP * size, b += 4) vst1q_f32(b, block_max(at, bf16));
    if (n == 0) return;
    uint32_t rest[GROUP] = { 0 };
    float last[4];
    memcpy(rest, at, (size_t)n * size);
    vst1q_f32(last, block_max(rest, bf16));
    memcpy(b, last, (size_t)n / 16 * sizeof *b);
}

static void block_amax_bf16(float *b, const uint16_t *x, int64_t n) { block_amax(b, x, n, true); }
static void block_amax_f32(float *b, const float *x, int64_t n) { block_amax(b, x, n, false); }

INLINE void square_into(float64x2_t acc[2], float32x4_t x) { /* the product of float32 values is exact in float64 */
    const float64x2_t lo = vcvt_f64_f32(vget_low_f32(x)), hi = vcvt_high_f64_f32(x);
    acc[0] = vfmaq_f64(acc[0], lo, lo);
    acc[1] = vfmaq_f64(acc[1], hi, hi);
}

INLINE void error16(float64x2_t e[8], float64x2_t r[8], const void *x, const float *y, int64_t at, bool bf16) {
    for (int i = 0; i < 4; i++) {
        const float32x4_t v = load4(x, at + 4 * i, bf16);
        square_into(e + 2 * i, vsubq_f32(v, vld1q_f32(y + at + 4 * i)));
        square_into(r + 2 * i, v);
    }
}

INLINE void error(stats_error *s, const void *x, const float *y, int64_t n, bool bf16) {
    float64x2_t e[8], r[8];
    for (int j = 0; j < 8; j++) {
        e[j] = vld1q_f64(s->err2 + 2 * j);
        r[j] = vld1q_f64(s->ref2 + 2 * j);
    }
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) error16(e, r, x, y, i, bf16);
    if (i < n) { /* absent elements add +0 */
        const size_t size = bf16 ? 2 : 4;
        uint32_t rest[16] = { 0 };
        float last[16] = { 0 };
        memcpy(rest, (const uint8_t *)x + (size_t)i * size, (size_t)(n - i) * size);
        memcpy(last, y + i, (size_t)(n - i) * 4);
        error16(e, r, rest, last, 0, bf16);
    }
    for (int j = 0; j < 8; j++) {
        vst1q_f64(s->err2 + 2 * j, e[j]);
        vst1q_f64(s->ref2 + 2 * j, r[j]);
    }
}

static void error_bf16(stats_error *s, const uint16_t *x, const float *y, int64_t n) { error(s, x, y, n, true); }
static void error_f32(stats_error *s, const float *x, const float *y, int64_t n) { error(s, x, y, n, false); }

void quant_init_neon(quant_kern *k) {
    *k = (quant_kern){
        .isa = ISA_NEON,
        .amax_bf16 = amax_bf16,
        .amax_f32 = amax_f32,
        .nonfinite_bf16 = nonfinite_bf16,
        .nonfinite_f32 = nonfinite_f32,
        .block_amax_bf16 = block_amax_bf16,
        .block_amax_f32 = block_amax_f32,
        .error_bf16 = error_bf16,
        .error_f32 = error_f32,
        .blocks = stats_blocks_add,
        .encode_bf16 = encode_bf16,
        .encode_f32 = encode_f32,
        .codes_bf16 = codes_bf16,
        .codes_f32 = codes_f32,
        .block_errors = nvfp4_block_errors,
        .act_encode = act_encode,
        .decode_f32 = decode_f32,
        .decode_bf16 = decode_bf16,
        .fp8_div = fp8_div,
        .fp8_mul = fp8_mul,
        .fp8_weight = fp8_weight,
        .fp8_decode = fp8_decode,
    };
}
