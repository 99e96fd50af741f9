/* AVX-512 (F, BW, DQ, VL) level of quant.h. Sixteen blocks at a time: their maxima and scales fill one register. */
#include "kern/quant.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { GROUP = 256 }; /* elements of 16 blocks */

INLINE __m512 load_bf16(const uint16_t *x) {
    const __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}

INLINE __m512 load_tail_bf16(const uint16_t *x, __mmask16 m) {
    const __m512i u = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}

INLINE __m512 load16(const void *x, int64_t block, bool bf16) {
    return bf16 ? load_bf16((const uint16_t *)x + 16 * block) : _mm512_loadu_ps((const float *)x + 16 * block);
}

INLINE __m512 magnitude(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}

INLINE __m512i max_of_halves32(__m512i a, __m512i b) {
    return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

INLINE __m512i max_of_halves64_32(__m512i a, __m512i b) {
    return _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

INLINE __m512i max_of_lanes(__m512i a, __m512i b) {
    return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

/* Maxima of 16 blocks of BF16 magnitudes, as float32. Each step halves the words that stand for a block. */
INLINE __m512 block_max_bf16(const uint16_t *x) {
    const __m512i mask = _mm512_set1_epi16(0x7fff);
    const __mmask32 odd = 0xaaaaaaaau;
    __m512i t[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) { /* two vectors (blocks 4i .. 4i+3) into one: the first in even words */
        const __m512i a = _mm512_and_si512(mask, _mm512_loadu_si512(x + 64 * i));
        const __m512i b = _mm512_and_si512(mask, _mm512_loadu_si512(x + 64 * i + 32));
        t[i] = _mm512_max_epu16(_mm512_mask_blend_epi16(odd, a, _mm512_slli_epi32(b, 16)),
                                _mm512_mask_blend_epi16(odd, _mm512_srli_epi32(a, 16), b));
    }
    const __m512i u0 = _mm512_max_epu16(_mm512_unpacklo_epi32(t[0], t[1]), _mm512_unpackhi_epi32(t[0], t[1]));
    const __m512i u1 = _mm512_max_epu16(_mm512_unpacklo_epi32(t[2], t[3]), _mm512_unpackhi_epi32(t[2], t[3]));
    const __m512i v = _mm512_max_epu16(_mm512_unpacklo_epi64(u0, u1), _mm512_unpackhi_epi64(u0, u1));
    /* each 128-bit lane: 8 vectors' maxima over that lane; lanes 0+1 are the even blocks, 2+3 the odd ones */
    const __m512i w = _mm512_max_epu16(v, _mm512_shuffle_i32x4(v, v, 0xb1));
    const __m512i order = _mm512_set_epi16(23, 0, 7, 0, 22, 0, 6, 0, 21, 0, 5, 0, 20, 0, 4, 0, 19, 0, 3, 0, 18, 0, 2, 0,
                                           17, 0, 1, 0, 16, 0, 0, 0);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(odd, order, w));
}

INLINE __m512 block_max_f32(const float *x) {
    __m512i p[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        const float *at = x + 64 * i;
        const __m512i a = _mm512_castps_si512(magnitude(_mm512_loadu_ps(at)));
        const __m512i b = _mm512_castps_si512(magnitude(_mm512_loadu_ps(at + 16)));
        const __m512i c = _mm512_castps_si512(magnitude(_mm512_loadu_ps(at + 32)));
        const __m512i d = _mm512_castps_si512(magnitude(_mm512_loadu_ps(at + 48)));
        p[i] = max_of_halves64_32(max_of_halves32(a, b), max_of_halves32(c, d));
    }
    return _mm512_castsi512_ps(max_of_lanes(max_of_lanes(p[0], p[1]), max_of_lanes(p[2], p[3])));
}

INLINE __m512 block_max(const void *x, bool bf16) { return bf16 ? block_max_bf16(x) : block_max_f32(x); }

/* 0 <= a <= 448, no NaN -> E4M3 code; *value is what the code stands for. Adding 2^(e+20), e = max(exponent of a, -6),
 * leaves a's rounding to 3 mantissa bits in the lowest bits of the sum. */
INLINE __m512i e4m3_round(__m512 a, __m512 *value) {
    const __m512i e = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7f800000)),
                                       _mm512_set1_epi32(121 << 23));
    const __m512i m = _mm512_add_epi32(e, _mm512_set1_epi32(20 << 23));
    const __m512 r = _mm512_add_ps(a, _mm512_castsi512_ps(m));
    *value = _mm512_sub_ps(r, _mm512_castsi512_ps(m));
    const __m512i step = _mm512_sub_epi32(_mm512_castps_si512(r), m);
    return _mm512_add_epi32(step, _mm512_sub_epi32(_mm512_srli_epi32(m, 20), _mm512_set1_epi32(141 << 3)));
}

/* E2M1 codes of q, the same way: 2^(e+22), e = max(exponent, 0). NaN compares as 6 and as not negative. */
INLINE __m512i e2m1_round(__m512 q) {
    const __m512 a = _mm512_min_ps(magnitude(q), _mm512_set1_ps(6));
    const __m512i e = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7f800000)),
                                       _mm512_set1_epi32(127 << 23));
    const __m512i m = _mm512_add_epi32(e, _mm512_set1_epi32(22 << 23));
    const __m512i r = _mm512_castps_si512(_mm512_add_ps(a, _mm512_castsi512_ps(m)));
    const __m512i base = _mm512_sub_epi32(_mm512_srli_epi32(m, 22), _mm512_set1_epi32(149 << 1));
    const __m512i code = _mm512_add_epi32(_mm512_sub_epi32(r, m), base);
    const __mmask16 negative = _mm512_cmp_ps_mask(q, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_or_epi32(code, negative, code, _mm512_set1_epi32(8));
}

INLINE __m512 scale_values(const uint8_t *scales) {
    const __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)scales));
    const __m256i mag = _mm256_and_si256(c, _mm256_set1_epi16(0x7f));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(mag, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x80)), 8);
    /* the bits one place up in a half float are the value times 2^-8, subnormals included */
    const __m256i half =
        _mm256_mask_mov_epi16(_mm256_or_si256(_mm256_slli_epi16(mag, 7), sign), nan, _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256));
}

INLINE void store16(uint8_t *out, __m512i codes) { _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(codes)); }

/* Weight scales of 16 blocks: bytes out, returns den. */
INLINE __m512 weight_scales(uint8_t *scales, __m512 b, float s2, quant_arith arith) {
    const __m512 d = _mm512_set1_ps(6.0f * s2);
    __m512 s = _mm512_div_ps(b, d), value;
    const __mmask16 nan_in = _mm512_cmp_ps_mask(b, d, _CMP_UNORD_Q), nan = _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q);
    s = _mm512_mask_mov_ps(s, _mm512_cmp_ps_mask(s, _mm512_setzero_ps(), _CMP_EQ_OQ), _mm512_set1_ps(1));
    s = _mm512_min_ps(_mm512_max_ps(s, _mm512_set1_ps(0x1p-9f)), _mm512_set1_ps(448));
    __m512i code = e4m3_round(s, &value);
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(arith == ARITH_CPU ? 0xff : 0x7f));
    code = _mm512_mask_mov_epi32(code, nan_in, _mm512_set1_epi32(0x7f));
    value = _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    store16(scales, code);
    return _mm512_mul_ps(value, _mm512_set1_ps(s2));
}

/* Activation scales: no floor; *tiny marks blocks whose codes are 0. */
INLINE __m512 act_scales(uint8_t *scales, __m512 b, float g, __mmask16 *tiny) {
    __m512 s = _mm512_div_ps(b, _mm512_set1_ps(6.0f * g)), value;
    const __mmask16 nan = _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q);
    __m512i code = e4m3_round(_mm512_min_ps(magnitude(s), _mm512_set1_ps(448)), &value);
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
    value = _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    store16(scales, code);
    const __m512 den = _mm512_mul_ps(value, _mm512_set1_ps(g));
    *tiny = _mm512_cmp_ps_mask(den, _mm512_set1_ps(NVFP4_ACT_TINY), _CMP_LT_OQ);
    return den;
}

/* Codes of 4 blocks, one byte each per lane; then the odd lane's nibble joins the even one's: the low dword of qword j
 * holds byte j of the 4 blocks. */
INLINE __m512i codes_of_4(const void *w, int64_t block, const float *den, bool bf16) {
    __m512i c[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        c[i] = e2m1_round(_mm512_div_ps(load16(w, block + i, bf16), _mm512_set1_ps(den[block + i])));
    const __m512i lo = _mm512_or_si512(c[0], _mm512_slli_epi32(c[1], 8));
    const __m512i hi = _mm512_or_si512(c[2], _mm512_slli_epi32(c[3], 8));
    const __m512i z = _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
    return _mm512_or_si512(z, _mm512_srli_epi64(z, 28));
}

/* 16 blocks: 128 bytes of codes; blocks with their bit in `drop` get zeros. */
INLINE void codes_of_16(uint8_t *codes, const void *w, __m512 den16, __mmask16 drop, bool bf16) {
    float den[16];
    _mm512_storeu_ps(den, den16);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const __m512i words = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3,
                                           26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
#pragma GCC unroll 8
    for (int h = 0; h < 2; h++) {
        const __m512i a = codes_of_4(w, 8 * h, den, bf16), b = codes_of_4(w, 8 * h + 4, den, bf16);
        const __m512i both = _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32));
        const __m512i out = _mm512_permutexvar_epi16(words, _mm512_shuffle_epi8(both, bytes));
        _mm512_storeu_si512(codes + 64 * h, _mm512_maskz_mov_epi64((__mmask8)(~drop >> 8 * h), out));
    }
}

/* One group of 16 blocks, in one of three ways. */
typedef enum mode { WEIGHT, GIVEN, ACT } mode;

INLINE void group(uint8_t *codes, uint8_t *scales, const void *w, float s2, quant_arith arith, bool bf16, mode how) {
    __mmask16 tiny = 0;
    __m512 den;
    if (how == WEIGHT)
        den = weight_scales(scales, block_max(w, bf16), s2, arith);
    else if (how == ACT)
        den = act_scales(scales, block_max(w, bf16), s2, &tiny);
    else
        den = _mm512_mul_ps(scale_values(scales), _mm512_set1_ps(s2));
    codes_of_16(codes, w, den, tiny, bf16);
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
INLINE __m512 e2m1_value(__m512 q) {
    const __m512 a = _mm512_min_ps(q, _mm512_set1_ps(6));
    const __m512i e = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7f800000)),
                                       _mm512_set1_epi32(127 << 23));
    const __m512 m = _mm512_castsi512_ps(_mm512_add_epi32(e, _mm512_set1_epi32(22 << 23)));
    return _mm512_sub_ps(_mm512_add_ps(a, m), m);
}

static void block_errors(double *err2, const float *x, const float *den, int n) {
    const __m512 a = magnitude(_mm512_loadu_ps(x)); /* the sign goes through every step unchanged */
    for (int k = 0; k < n; k++) {
        const __m512 d = _mm512_set1_ps(den[k]);
        const __m512 e = _mm512_sub_ps(a, _mm512_mul_ps(e2m1_value(_mm512_div_ps(a, d)), d));
        const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(e));
        const __m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(e, 1));
        const __m512d t8 = _mm512_add_pd(_mm512_mul_pd(lo, lo), _mm512_mul_pd(hi, hi));
        const __m256d t4 = _mm256_add_pd(_mm512_castpd512_pd256(t8), _mm512_extractf64x4_pd(t8, 1));
        const __m128d t2 = _mm_add_pd(_mm256_castpd256_pd128(t4), _mm256_extractf128_pd(t4, 1));
        err2[k] = _mm_cvtsd_f64(_mm_add_sd(t2, _mm_unpackhi_pd(t2, t2)));
    }
}

static void act_encode(uint8_t *codes, uint8_t *scales, const float *x, int64_t n, float g) {
    encode(codes, scales, x, n, g, ARITH_CUDA, false, ACT);
}

/* ---- decoding ---- */

INLINE __m512 decode16(const uint8_t *codes, __m512 den) {
    const __m512 value = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    int32_t lo, hi;
    memcpy(&lo, codes, 4);
    memcpy(&hi, codes + 4, 4);
    const __m512i c = _mm512_mask_set1_epi32(_mm512_set1_epi32(lo), 0xff00, hi);
    return _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srlv_epi32(c, shift), value), den);
}

INLINE __m256i to_bf16(__m512 x) {
    const __m512i u = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    const __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(u, 16), one));
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(_mm512_add_epi32(u, up), nan, quiet), 16));
}

INLINE void decode(void *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2, bool bf16) {
    for (int64_t b = 0; b < n / 16; b += 16) {
        uint8_t s[16] = { 0 };
        float den[16];
        const int blocks = n / 16 - b < 16 ? (int)(n / 16 - b) : 16;
        memcpy(s, scales + b, (size_t)blocks);
        _mm512_storeu_ps(den, _mm512_mul_ps(scale_values(s), _mm512_set1_ps(s2)));
        for (int i = 0; i < blocks; i++) {
            const __m512 v = decode16(codes + 8 * (b + i), _mm512_set1_ps(den[i]));
            if (bf16)
                _mm256_storeu_si256((__m256i *)((uint16_t *)y + 16 * (b + i)), to_bf16(v));
            else
                _mm512_storeu_ps((float *)y + 16 * (b + i), v);
        }
    }
}

static void decode_f32(float *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    decode(y, codes, scales, n, s2, false);
}

static void decode_bf16(uint16_t *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    decode(y, codes, scales, n, s2, true);
}

/* ---- FP8 ---- */

INLINE __mmask16 tail_mask(int64_t left) { return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1); }

/* Codes of 16 floats: saturating, or torch's cast with NaN above 464. */
INLINE __m128i e4m3_codes(__m512 x, bool cast) {
    const __m512 a = magnitude(x);
    __m512 value;
    const __mmask16 nan =
        cast ? _mm512_cmp_ps_mask(a, _mm512_set1_ps(464), _CMP_NLE_UQ) : _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    __m512i code = e4m3_round(_mm512_min_ps(a, _mm512_set1_ps(448)), &value); /* min(NaN, 448) = 448 */
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 24), _mm512_set1_epi32(0x80));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

static void fp8_div(uint8_t *y, const float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = tail_mask(n - i);
        const __m512 q = _mm512_div_ps(_mm512_maskz_loadu_ps(m, x + i), _mm512_set1_ps(scale));
        _mm_mask_storeu_epi8(y + i, m, e4m3_codes(q, false));
    }
}

static void fp8_mul(uint8_t *y, const float *x, int64_t n, float mul) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = tail_mask(n - i);
        const __m512 q = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, x + i), _mm512_set1_ps(mul));
        _mm_mask_storeu_epi8(y + i, m, e4m3_codes(q, false));
    }
}

static void fp8_weight(uint8_t *y, const uint16_t *w, int64_t n, float divisor) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = tail_mask(n - i);
        const __m512 q = _mm512_div_ps(load_tail_bf16(w + i, m), _mm512_set1_ps(divisor));
        const __m512i h = _mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(q)), 16);
        _mm_mask_storeu_epi8(y + i, m, e4m3_codes(_mm512_castsi512_ps(h), true));
    }
}

static void fp8_decode(float *y, const uint8_t *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = tail_mask(n - i);
        uint8_t c[16];
        _mm_storeu_si128((__m128i *)c, _mm_maskz_loadu_epi8(m, x + i));
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(scale_values(c), _mm512_set1_ps(scale)));
    }
}

/* ---- statistics ---- */

static float amax_bf16(const uint16_t *x, int64_t n) {
    const __m512i mask = _mm512_set1_epi16(0x7fff);
    __m512i m[4] = { _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512() };
    int64_t i = 0;
    for (; i + 128 <= n; i += 128)
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++)
            m[j] = _mm512_max_epu16(m[j], _mm512_and_si512(mask, _mm512_loadu_si512(x + i + 32 * j)));
    for (; i < n; i += 32) {
        const __mmask32 left = n - i >= 32 ? 0xffffffffu : (1u << (n - i)) - 1;
        m[0] = _mm512_max_epu16(m[0], _mm512_and_si512(mask, _mm512_maskz_loadu_epi16(left, x + i)));
    }
    const __m512i all = _mm512_max_epu16(_mm512_max_epu16(m[0], m[1]), _mm512_max_epu16(m[2], m[3]));
    const __m512i both =
        _mm512_max_epu16(all, _mm512_slli_epi32(all, 16)); /* the answer in the upper word of each pair */
    const int32_t top = _mm512_reduce_max_epi32(_mm512_and_si512(both, _mm512_set1_epi32(0x7fff0000)));
    float f;
    memcpy(&f, &top, 4);
    return f;
}

static float amax_f32(const float *x, int64_t n) {
    __m512i m[4] = { _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512() };
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++)
            m[j] = _mm512_max_epi32(m[j], _mm512_castps_si512(magnitude(_mm512_loadu_ps(x + i + 16 * j))));
    for (; i < n; i += 16) {
        const __m512 v = _mm512_maskz_loadu_ps(tail_mask(n - i), x + i);
        m[0] = _mm512_max_epi32(m[0], _mm512_castps_si512(magnitude(v)));
    }
    const int32_t top =
        _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_max_epi32(m[0], m[1]), _mm512_max_epi32(m[2], m[3])));
    float f;
    memcpy(&f, &top, 4);
    return f;
}

static int64_t nonfinite_bf16(const uint16_t *x, int64_t n) {
    const __m512i inf = _mm512_set1_epi16(0x7f80);
    for (int64_t i = 0; i < n; i += 32) {
        const __mmask32 left = n - i >= 32 ? 0xffffffffu : (1u << (n - i)) - 1;
        const __m512i e = _mm512_and_si512(inf, _mm512_maskz_loadu_epi16(left, x + i));
        const __mmask32 bad = _mm512_cmpeq_epi16_mask(e, inf);
        if (bad) return i + __builtin_ctz(bad);
    }
    return -1;
}

static int64_t nonfinite_f32(const float *x, int64_t n) {
    const __m512i inf = _mm512_set1_epi32(0x7f800000);
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i e = _mm512_and_si512(inf, _mm512_castps_si512(_mm512_maskz_loadu_ps(tail_mask(n - i), x + i)));
        const __mmask16 bad = _mm512_cmpeq_epi32_mask(e, inf);
        if (bad) return i + __builtin_ctz(bad);
    }
    return -1;
}

INLINE void block_amax(float *b, const void *x, int64_t n, bool bf16) {
    const size_t size = bf16 ? 2 : 4;
    const uint8_t *at = x;
    for (; n >= GROUP; n -= GROUP, at += GROUP * size, b += 16) _mm512_storeu_ps(b, block_max(at, bf16));
    if (n == 0) return;
    uint32_t rest[GROUP] = { 0 };
    memcpy(rest, at, (size_t)n * size);
    _mm512_mask_storeu_ps(b, tail_mask(n / 16), block_max(rest, bf16));
}

static void block_amax_bf16(float *b, const uint16_t *x, int64_t n) { block_amax(b, x, n, true); }
static void block_amax_f32(float *b, const float *x, int64_t n) { block_amax(b, x, n, false); }

INLINE __m512d square(__m256 x, __m512d acc) { /* the product of float32 values is exact in float64 */
    const __m512d d = _mm512_cvtps_pd(x);
    return _mm512_fmadd_pd(d, d, acc);
}

INLINE void error(stats_error *s, const void *x, const float *y, int64_t n, bool bf16) {
    __m512d e0 = _mm512_loadu_pd(s->err2), e1 = _mm512_loadu_pd(s->err2 + 8);
    __m512d r0 = _mm512_loadu_pd(s->ref2), r1 = _mm512_loadu_pd(s->ref2 + 8);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = tail_mask(n - i); /* absent elements add +0 */
        const __m512 v =
            bf16 ? load_tail_bf16((const uint16_t *)x + i, m) : _mm512_maskz_loadu_ps(m, (const float *)x + i);
        const __m512 d = _mm512_sub_ps(v, _mm512_maskz_loadu_ps(m, y + i));
        e0 = square(_mm512_castps512_ps256(d), e0);
        e1 = square(_mm512_extractf32x8_ps(d, 1), e1);
        r0 = square(_mm512_castps512_ps256(v), r0);
        r1 = square(_mm512_extractf32x8_ps(v, 1), r1);
    }
    _mm512_storeu_pd(s->err2, e0);
    _mm512_storeu_pd(s->err2 + 8, e1);
    _mm512_storeu_pd(s->ref2, r0);
    _mm512_storeu_pd(s->ref2 + 8, r1);
}

static void error_bf16(stats_error *s, const uint16_t *x, const float *y, int64_t n) { error(s, x, y, n, true); }
static void error_f32(stats_error *s, const float *x, const float *y, int64_t n) { error(s, x, y, n, false); }

static void blocks(stats_blocks *s, const float *b, const uint8_t *scales, int64_t n_blocks, float s2) {
    const __m512 d = _mm512_set1_ps(6.0f * s2), zero = _mm512_setzero_ps();
    for (int64_t i = 0; i < n_blocks; i += 16) {
        const __mmask16 m = tail_mask(n_blocks - i);
        const __m128i c = _mm_maskz_loadu_epi8(m, scales + i);
        const __m512 v = _mm512_maskz_loadu_ps(m, b + i), wanted = _mm512_div_ps(v, d);
        uint8_t bytes[16];
        _mm_storeu_si128((__m128i *)bytes, c);
        const __m512 den = _mm512_mul_ps(scale_values(bytes), _mm512_set1_ps(s2));
        const __mmask16 clipped = _mm512_mask_cmp_ps_mask(m, v, _mm512_mul_ps(_mm512_set1_ps(7), den), _CMP_GT_OQ);
        const __mmask16 saturated = _mm512_mask_cmp_ps_mask(_mm_mask_cmpeq_epi8_mask(m, c, _mm_set1_epi8(0x7e)), wanted,
                                                            _mm512_set1_ps(464), _CMP_GT_OQ);
        const __mmask16 least = _mm512_mask_cmp_ps_mask(_mm_mask_cmpeq_epi8_mask(m, c, _mm_set1_epi8(0x01)), wanted,
                                                        _mm512_set1_ps(0x1p-10f), _CMP_LE_OQ);
        const __mmask16 nan_code = _mm_cmpeq_epi8_mask(_mm_and_si128(c, _mm_set1_epi8(0x7f)), _mm_set1_epi8(0x7f));
        s->zero += _mm_popcnt_u32(_mm512_mask_cmp_ps_mask(m, v, zero, _CMP_EQ_OQ));
        s->clipped += _mm_popcnt_u32(clipped);
        s->saturated += _mm_popcnt_u32(saturated);
        s->floored += _mm_popcnt_u32(_mm512_mask_cmp_ps_mask(least, v, zero, _CMP_GT_OQ));
        s->nan += _mm_popcnt_u32(m & (nan_code | _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q)));
    }
    s->blocks += n_blocks;
}

void quant_init_avx512(quant_kern *k) {
    *k = (quant_kern){
        .isa = ISA_AVX512,
        .amax_bf16 = amax_bf16,
        .amax_f32 = amax_f32,
        .nonfinite_bf16 = nonfinite_bf16,
        .nonfinite_f32 = nonfinite_f32,
        .block_amax_bf16 = block_amax_bf16,
        .block_amax_f32 = block_amax_f32,
        .error_bf16 = error_bf16,
        .error_f32 = error_f32,
        .blocks = blocks,
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
