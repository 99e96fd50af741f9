/* AVX2 (with F16C and FMA) level of quant.h. Eight blocks at a time: their maxima and scales fill one register. */
#include "kern/quant.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { GROUP = 128 }; /* elements of 8 blocks */

INLINE __m256 as_ps(__m256i u) { return _mm256_castsi256_ps(u); }
INLINE __m256i as_si(__m256 x) { return _mm256_castps_si256(x); }

INLINE __m256 load_bf16(const uint16_t *x) {
    return as_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

INLINE __m256 load8(const void *x, int64_t at, bool bf16) {
    return bf16 ? load_bf16((const uint16_t *)x + at) : _mm256_loadu_ps((const float *)x + at);
}

INLINE __m256 magnitude(__m256 x) { return as_ps(_mm256_and_si256(as_si(x), _mm256_set1_epi32(0x7fffffff))); }

INLINE __m256i max_of_halves32(__m256i a, __m256i b) {
    return _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

INLINE __m256i max_of_halves64(__m256i a, __m256i b) {
    return _mm256_max_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* Maxima of 8 blocks of BF16 magnitudes, as float32. Each step halves the words that stand for a block. */
INLINE __m256 block_max_bf16(const uint16_t *x) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i t[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) { /* two blocks into one vector: the first in even words */
        const __m256i a = _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i *)(x + 32 * i)));
        const __m256i b = _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i *)(x + 32 * i + 16)));
        t[i] = _mm256_max_epu16(_mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa),
                                _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa));
    }
    const __m256i u0 = _mm256_max_epu16(_mm256_unpacklo_epi32(t[0], t[1]), _mm256_unpackhi_epi32(t[0], t[1]));
    const __m256i u1 = _mm256_max_epu16(_mm256_unpacklo_epi32(t[2], t[3]), _mm256_unpackhi_epi32(t[2], t[3]));
    const __m256i v = _mm256_max_epu16(_mm256_unpacklo_epi64(u0, u1), _mm256_unpackhi_epi64(u0, u1));
    const __m128i w = _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return as_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(w), 16));
}

INLINE __m256 block_max_f32(const float *x) {
    __m256i p[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        p[i] = _mm256_max_epi32(as_si(magnitude(_mm256_loadu_ps(x + 16 * i))),
                                as_si(magnitude(_mm256_loadu_ps(x + 16 * i + 8))));
    const __m256i a = max_of_halves64(max_of_halves32(p[0], p[1]), max_of_halves32(p[2], p[3]));
    const __m256i b = max_of_halves64(max_of_halves32(p[4], p[5]), max_of_halves32(p[6], p[7]));
    return as_ps(_mm256_max_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)));
}

INLINE __m256 block_max(const void *x, bool bf16) { return bf16 ? block_max_bf16(x) : block_max_f32(x); }

/* 0 <= a <= 448, no NaN -> E4M3 code; *value is what the code stands for. Adding 2^(e+20), e = max(exponent of a, -6),
 * leaves a's rounding to 3 mantissa bits in the lowest bits of the sum. */
INLINE __m256i e4m3_round(__m256 a, __m256 *value) {
    const __m256i e =
        _mm256_max_epi32(_mm256_and_si256(as_si(a), _mm256_set1_epi32(0x7f800000)), _mm256_set1_epi32(121 << 23));
    const __m256i m = _mm256_add_epi32(e, _mm256_set1_epi32(20 << 23));
    const __m256 r = _mm256_add_ps(a, as_ps(m));
    *value = _mm256_sub_ps(r, as_ps(m));
    const __m256i step = _mm256_sub_epi32(as_si(r), m);
    return _mm256_add_epi32(step, _mm256_sub_epi32(_mm256_srli_epi32(m, 20), _mm256_set1_epi32(141 << 3)));
}

/* E2M1 codes of q, the same way: 2^(e+22), e = max(exponent, 0). NaN compares as 6 and as not negative. */
INLINE __m256i e2m1_round(__m256 q) {
    const __m256 a = _mm256_min_ps(magnitude(q), _mm256_set1_ps(6));
    const __m256i e =
        _mm256_max_epi32(_mm256_and_si256(as_si(a), _mm256_set1_epi32(0x7f800000)), _mm256_set1_epi32(127 << 23));
    const __m256i m = _mm256_add_epi32(e, _mm256_set1_epi32(22 << 23));
    const __m256i r = as_si(_mm256_add_ps(a, as_ps(m)));
    const __m256i base = _mm256_sub_epi32(_mm256_srli_epi32(m, 22), _mm256_set1_epi32(149 << 1));
    const __m256i code = _mm256_add_epi32(_mm256_sub_epi32(r, m), base);
    const __m256i negative = as_si(_mm256_cmp_ps(q, _mm256_setzero_ps(), _CMP_LT_OQ));
    return _mm256_or_si256(code, _mm256_and_si256(negative, _mm256_set1_epi32(8)));
}

/* Values of 8 E4M3 bytes in the low words of c: one place up in a half float they are the value times 2^-8. */
INLINE __m256 values_of(__m128i c) {
    const __m128i mag = _mm_and_si128(c, _mm_set1_epi16(0x7f));
    const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(mag, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7c00));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(c, _mm_set1_epi16(0x80)), 8);
    const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(mag, 7), sign), nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256));
}

INLINE __m256 scale_values(const uint8_t *scales) {
    return values_of(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)scales)));
}

/* Low byte of each of 8 dwords. */
INLINE __m128i low_bytes(__m256i codes) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    return _mm_packus_epi16(words, words);
}

INLINE __m256 quiet_nan(void) { return as_ps(_mm256_set1_epi32(0x7fc00000)); }

/* Weight scales of 8 blocks: bytes out, returns den. */
INLINE __m256 weight_scales(uint8_t *scales, __m256 b, float s2, quant_arith arith) {
    const __m256 d = _mm256_set1_ps(6.0f * s2);
    __m256 s = _mm256_div_ps(b, d), value;
    const __m256 nan_in = _mm256_cmp_ps(b, d, _CMP_UNORD_Q), nan = _mm256_cmp_ps(s, s, _CMP_UNORD_Q);
    s = _mm256_blendv_ps(s, _mm256_set1_ps(1), _mm256_cmp_ps(s, _mm256_setzero_ps(), _CMP_EQ_OQ));
    s = _mm256_min_ps(_mm256_max_ps(s, _mm256_set1_ps(0x1p-9f)), _mm256_set1_ps(448));
    __m256 code = as_ps(e4m3_round(s, &value));
    code = _mm256_blendv_ps(code, as_ps(_mm256_set1_epi32(arith == ARITH_CPU ? 0xff : 0x7f)), nan);
    code = _mm256_blendv_ps(code, as_ps(_mm256_set1_epi32(0x7f)), nan_in);
    _mm_storel_epi64((__m128i *)scales, low_bytes(as_si(code)));
    return _mm256_mul_ps(_mm256_blendv_ps(value, quiet_nan(), nan), _mm256_set1_ps(s2));
}

/* Activation scales: no floor; *tiny is all ones in blocks whose codes are 0. */
INLINE __m256 act_scales(uint8_t *scales, __m256 b, float g, __m256i *tiny) {
    const __m256 s = _mm256_div_ps(b, _mm256_set1_ps(6.0f * g)), nan = _mm256_cmp_ps(s, s, _CMP_UNORD_Q);
    __m256 value;
    __m256 code = as_ps(e4m3_round(_mm256_min_ps(magnitude(s), _mm256_set1_ps(448)), &value));
    code = _mm256_blendv_ps(code, as_ps(_mm256_set1_epi32(0x7f)), nan);
    _mm_storel_epi64((__m128i *)scales, low_bytes(as_si(code)));
    const __m256 den = _mm256_mul_ps(_mm256_blendv_ps(value, quiet_nan(), nan), _mm256_set1_ps(g));
    *tiny = as_si(_mm256_cmp_ps(den, _mm256_set1_ps(NVFP4_ACT_TINY), _CMP_LT_OQ));
    return den;
}

/* Codes of one half (8 columns) of 4 blocks, one byte each per lane; then the odd lane's nibble joins the even one's:
 * the low dword of qword j holds byte j of the 4 blocks' halves. */
INLINE __m256i codes_of_4(const void *w, int64_t block, int half, const float *den, bool bf16) {
    __m256i c[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        const __m256 x = load8(w, 16 * (block + i) + 8 * half, bf16);
        c[i] = e2m1_round(_mm256_div_ps(x, _mm256_set1_ps(den[block + i])));
    }
    const __m256i lo = _mm256_or_si256(c[0], _mm256_slli_epi32(c[1], 8));
    const __m256i hi = _mm256_or_si256(c[2], _mm256_slli_epi32(c[3], 8));
    const __m256i z = _mm256_or_si256(lo, _mm256_slli_epi32(hi, 16));
    return _mm256_or_si256(z, _mm256_srli_epi64(z, 28));
}

/* 8 blocks: 64 bytes of codes; blocks with ones in `drop` get zeros. */
INLINE void codes_of_8(uint8_t *codes, const void *w, __m256 den8, __m256i drop, bool bf16) {
    float den[8];
    int32_t gone[8];
    _mm256_storeu_ps(den, den8);
    _mm256_storeu_si256((__m256i *)gone, drop);
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
#pragma GCC unroll 8
    for (int h = 0; h < 2; h++) {
        const __m256i a = codes_of_4(w, 4 * h, 0, den, bf16), b = codes_of_4(w, 4 * h, 1, den, bf16);
        /* lane 0: bytes 0 1 4 5 of the rows, lane 1: bytes 2 3 6 7, each a dword of the 4 blocks */
        const __m256i both = as_si(_mm256_shuffle_ps(as_ps(a), as_ps(b), 0x88));
        const __m256i by_block = _mm256_shuffle_epi8(both, bytes);
        const __m128i l = _mm256_castsi256_si128(by_block), u = _mm256_extracti128_si256(by_block, 1);
        const __m128i keep01 = _mm_cvtepi32_epi64(_mm_loadl_epi64((const __m128i *)(gone + 4 * h)));
        const __m128i keep23 = _mm_cvtepi32_epi64(_mm_loadl_epi64((const __m128i *)(gone + 4 * h + 2)));
        _mm_storeu_si128((__m128i *)(codes + 32 * h), _mm_andnot_si128(keep01, _mm_unpacklo_epi16(l, u)));
        _mm_storeu_si128((__m128i *)(codes + 32 * h + 16), _mm_andnot_si128(keep23, _mm_unpackhi_epi16(l, u)));
    }
}

/* One group of 8 blocks, in one of three ways. */
typedef enum mode { WEIGHT, GIVEN, ACT } mode;

INLINE void group(uint8_t *codes, uint8_t *scales, const void *w, float s2, quant_arith arith, bool bf16, mode how) {
    __m256i tiny = _mm256_setzero_si256();
    __m256 den;
    if (how == WEIGHT)
        den = weight_scales(scales, block_max(w, bf16), s2, arith);
    else if (how == ACT)
        den = act_scales(scales, block_max(w, bf16), s2, &tiny);
    else
        den = _mm256_mul_ps(scale_values(scales), _mm256_set1_ps(s2));
    codes_of_8(codes, w, den, tiny, bf16);
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

/* |x| as its code decodes, in units of den: the same rounding, kept as a value. */
INLINE __m256 e2m1_value(__m256 q) {
    const __m256 a = _mm256_min_ps(q, _mm256_set1_ps(6));
    const __m256i e =
        _mm256_max_epi32(_mm256_and_si256(as_si(a), _mm256_set1_epi32(0x7f800000)), _mm256_set1_epi32(127 << 23));
    const __m256 m = as_ps(_mm256_add_epi32(e, _mm256_set1_epi32(22 << 23)));
    return _mm256_sub_ps(_mm256_add_ps(a, m), m);
}

INLINE __m256 error_of(__m256 a, __m256 d) {
    return _mm256_sub_ps(a, _mm256_mul_ps(e2m1_value(_mm256_div_ps(a, d)), d));
}

INLINE __m256d squares(__m128 lo, __m128 hi) {
    const __m256d a = _mm256_cvtps_pd(lo), b = _mm256_cvtps_pd(hi);
    return _mm256_add_pd(_mm256_mul_pd(a, a), _mm256_mul_pd(b, b));
}

static void block_errors(double *err2, const float *x, const float *den, int n) {
    const __m256 a = magnitude(_mm256_loadu_ps(x)), b = magnitude(_mm256_loadu_ps(x + 8)); /* signs do not matter */
    for (int k = 0; k < n; k++) {
        const __m256 d = _mm256_set1_ps(den[k]), e = error_of(a, d), f = error_of(b, d);
        const __m256d t0 = squares(_mm256_castps256_ps128(e), _mm256_castps256_ps128(f)),
                      t1 = squares(_mm256_extractf128_ps(e, 1), _mm256_extractf128_ps(f, 1)),
                      t4 = _mm256_add_pd(t0, t1);
        const __m128d t2 = _mm_add_pd(_mm256_castpd256_pd128(t4), _mm256_extractf128_pd(t4, 1));
        err2[k] = _mm_cvtsd_f64(_mm_add_sd(t2, _mm_unpackhi_pd(t2, t2)));
    }
}

static void act_encode(uint8_t *codes, uint8_t *scales, const float *x, int64_t n, float g) {
    encode(codes, scales, x, n, g, ARITH_CUDA, false, ACT);
}

/* ---- decoding ---- */

INLINE __m256 decode8(const uint8_t *codes, __m256 den) {
    const __m256 value = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    int32_t bits;
    memcpy(&bits, codes, 4);
    const __m256i c = _mm256_srlv_epi32(_mm256_set1_epi32(bits), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(c, _mm256_set1_epi32(8)), 28);
    return _mm256_mul_ps(_mm256_or_ps(_mm256_permutevar8x32_ps(value, c), as_ps(sign)), den);
}

INLINE __m128i to_bf16(__m256 x) {
    const __m256i u = as_si(x), lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), lsb));
    const __m256 quiet = as_ps(_mm256_or_si256(u, _mm256_set1_epi32(0x400000)));
    const __m256 y = _mm256_blendv_ps(as_ps(up), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i h = _mm256_srli_epi32(as_si(y), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

INLINE void decode(void *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2, bool bf16) {
    for (int64_t b = 0; b < n / 16; b += 8) {
        uint8_t s[8] = { 0 };
        float den[8];
        const int blocks = n / 16 - b < 8 ? (int)(n / 16 - b) : 8;
        memcpy(s, scales + b, (size_t)blocks);
        _mm256_storeu_ps(den, _mm256_mul_ps(scale_values(s), _mm256_set1_ps(s2)));
        for (int i = 0; i < 2 * blocks; i++) {
            const __m256 v = decode8(codes + 8 * b + 4 * i, _mm256_set1_ps(den[i / 2]));
            if (bf16)
                _mm_storeu_si128((__m128i *)((uint16_t *)y + 16 * b + 8 * i), to_bf16(v));
            else
                _mm256_storeu_ps((float *)y + 16 * b + 8 * i, v);
        }
    }
}

static void decode_f32(float *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    decode(y, codes, scales, n, s2, false);
}

static void decode_bf16(uint16_t *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    decode(y, codes, scales, n, s2, true);
}

/* ---- FP8: eight at a time, the rest through a padded copy ---- */

/* Codes of 8 floats in the low 8 bytes: saturating, or torch's cast with NaN above 464. */
INLINE __m128i e4m3_codes(__m256 x, bool cast) {
    const __m256 a = magnitude(x);
    __m256 value;
    const __m256 nan = cast ? _mm256_cmp_ps(a, _mm256_set1_ps(464), _CMP_NLE_UQ) : _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const __m256i round = e4m3_round(_mm256_min_ps(a, _mm256_set1_ps(448)), &value); /* min(NaN, 448) = 448 */
    const __m256i code = as_si(_mm256_blendv_ps(as_ps(round), as_ps(_mm256_set1_epi32(0x7f)), nan));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(as_si(x), 24), _mm256_set1_epi32(0x80));
    return low_bytes(_mm256_or_si256(code, sign));
}

typedef enum fp8_mode { DIV, MUL, TWICE } fp8_mode;

INLINE __m128i fp8_8(const void *x, int64_t at, float s, fp8_mode how) {
    if (how == DIV) return e4m3_codes(_mm256_div_ps(load8(x, at, false), _mm256_set1_ps(s)), false);
    if (how == MUL) return e4m3_codes(_mm256_mul_ps(load8(x, at, false), _mm256_set1_ps(s)), false);
    const __m128i h = to_bf16(_mm256_div_ps(load8(x, at, true), _mm256_set1_ps(s)));
    return e4m3_codes(as_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)), true);
}

INLINE void fp8(uint8_t *y, const void *x, int64_t n, float s, fp8_mode how) {
    const size_t size = how == TWICE ? 2 : 4;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm_storel_epi64((__m128i *)(y + i), fp8_8(x, i, s, how));
    if (i == n) return;
    uint32_t rest[8] = { 0 };
    uint8_t c[16];
    memcpy(rest, (const uint8_t *)x + (size_t)i * size, (size_t)(n - i) * size);
    _mm_storeu_si128((__m128i *)c, fp8_8(rest, 0, s, how));
    memcpy(y + i, c, (size_t)(n - i));
}

static void fp8_div(uint8_t *y, const float *x, int64_t n, float scale) { fp8(y, x, n, scale, DIV); }
static void fp8_mul(uint8_t *y, const float *x, int64_t n, float m) { fp8(y, x, n, m, MUL); }
static void fp8_weight(uint8_t *y, const uint16_t *w, int64_t n, float divisor) { fp8(y, w, n, divisor, TWICE); }

static void fp8_decode(float *y, const uint8_t *x, int64_t n, float scale) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_mul_ps(scale_values(x + i), _mm256_set1_ps(scale)));
    for (; i < n; i++) y[i] = e4m3_to_f32(x[i]) * scale;
}

/* ---- statistics ---- */

INLINE int32_t max_of_8(__m256i m) {
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
    return _mm_cvtsi128_si32(h);
}

static float amax_bf16(const uint16_t *x, int64_t n) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i m[4] = { _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256() };
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) {
            const __m256i v = _mm256_loadu_si256((const __m256i *)(x + i + 16 * j));
            m[j] = _mm256_max_epu16(m[j], _mm256_and_si256(mask, v));
        }
    if (i < n) {
        uint16_t rest[64] = { 0 };
        memcpy(rest, x + i, (size_t)(n - i) * 2);
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) {
            const __m256i v = _mm256_loadu_si256((const __m256i *)(rest + 16 * j));
            m[j] = _mm256_max_epu16(m[j], _mm256_and_si256(mask, v));
        }
    }
    const __m256i all = _mm256_max_epu16(_mm256_max_epu16(m[0], m[1]), _mm256_max_epu16(m[2], m[3]));
    const __m256i both =
        _mm256_max_epu16(all, _mm256_slli_epi32(all, 16)); /* the answer in the upper word of each pair */
    const int32_t top = max_of_8(_mm256_and_si256(both, _mm256_set1_epi32(0x7fff0000)));
    float f;
    memcpy(&f, &top, 4);
    return f;
}

static float amax_f32(const float *x, int64_t n) {
    __m256i m[4] = { _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256() };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) m[j] = _mm256_max_epi32(m[j], as_si(magnitude(_mm256_loadu_ps(x + i + 8 * j))));
    if (i < n) {
        float rest[32] = { 0 };
        memcpy(rest, x + i, (size_t)(n - i) * 4);
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) m[j] = _mm256_max_epi32(m[j], as_si(magnitude(_mm256_loadu_ps(rest + 8 * j))));
    }
    const int32_t top = max_of_8(_mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3])));
    float f;
    memcpy(&f, &top, 4);
    return f;
}

static int64_t nonfinite_bf16(const uint16_t *x, int64_t n) {
    const __m256i inf = _mm256_set1_epi16(0x7f80);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256i e = _mm256_and_si256(inf, _mm256_loadu_si256((const __m256i *)(x + i)));
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi16(e, inf))) break;
    }
    const int64_t at = stats_nonfinite_bf16(x + i, n - i);
    return at < 0 ? -1 : i + at;
}

static int64_t nonfinite_f32(const float *x, int64_t n) {
    const __m256i inf = _mm256_set1_epi32(0x7f800000);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i e = _mm256_and_si256(inf, as_si(_mm256_loadu_ps(x + i)));
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi32(e, inf))) break;
    }
    const int64_t at = stats_nonfinite_f32(x + i, n - i);
    return at < 0 ? -1 : i + at;
}

INLINE void block_amax(float *b, const void *x, int64_t n, bool bf16) {
    const size_t size = bf16 ? 2 : 4;
    const uint8_t *at = x;
    for (; n >= GROUP; n -= GROUP, at += GROUP * size, b += 8) _mm256_storeu_ps(b, block_max(at, bf16));
    if (n == 0) return;
    uint32_t rest[GROUP] = { 0 };
    float last[8];
    memcpy(rest, at, (size_t)n * size);
    _mm256_storeu_ps(last, block_max(rest, bf16));
    memcpy(b, last, (size_t)n / 16 * sizeof *b);
}

static void block_amax_bf16(float *b, const uint16_t *x, int64_t n) { block_amax(b, x, n, true); }
static void block_amax_f32(float *b, const float *x, int64_t n) { block_amax(b, x, n, false); }

INLINE void square_into(__m256d acc[2], __m256 x) { /* the product of float32 values is exact in float64 */
    const __m256d lo = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), hi = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    acc[0] = _mm256_fmadd_pd(lo, lo, acc[0]);
    acc[1] = _mm256_fmadd_pd(hi, hi, acc[1]);
}

INLINE void error16(__m256d e[4], __m256d r[4], const void *x, const float *y, int64_t at, bool bf16) {
#pragma GCC unroll 8
    for (int h = 0; h < 2; h++) {
        const __m256 v = load8(x, at + 8 * h, bf16);
        square_into(e + 2 * h, _mm256_sub_ps(v, _mm256_loadu_ps(y + at + 8 * h)));
        square_into(r + 2 * h, v);
    }
}

INLINE void error(stats_error *s, const void *x, const float *y, int64_t n, bool bf16) {
    __m256d e[4], r[4];
#pragma GCC unroll 8
    for (int j = 0; j < 4; j++) {
        e[j] = _mm256_loadu_pd(s->err2 + 4 * j);
        r[j] = _mm256_loadu_pd(s->ref2 + 4 * j);
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
#pragma GCC unroll 8
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_pd(s->err2 + 4 * j, e[j]);
        _mm256_storeu_pd(s->ref2 + 4 * j, r[j]);
    }
}

static void error_bf16(stats_error *s, const uint16_t *x, const float *y, int64_t n) { error(s, x, y, n, true); }
static void error_f32(stats_error *s, const float *x, const float *y, int64_t n) { error(s, x, y, n, false); }

void quant_init_avx2(quant_kern *k) {
    *k = (quant_kern){
        .isa = ISA_AVX2,
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
        .block_errors = block_errors,
        .act_encode = act_encode,
        .decode_f32 = decode_f32,
        .decode_bf16 = decode_bf16,
        .fp8_div = fp8_div,
        .fp8_mul = fp8_mul,
        .fp8_weight = fp8_weight,
        .fp8_decode = fp8_decode,
    };
}
