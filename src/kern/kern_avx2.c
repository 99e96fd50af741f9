/* The vector words of AVX2 with FMA and F16C; the families themselves are in vec_*.inc. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kern/kern_isa.h"

typedef __m256 vf;
#define VL 8
/* 16 registers: 4 x 3 of one part leave 4 for operands. */
#define MR 4
#define NR 3
#define NB 96
#define KB 1024
#define TILE_MAX 12
#define GEMV_MAX 3
#define GEMV_ROWS(m) ((m) == 1 ? 2 : 1)
enum { nv_max = 4 };
#define PIN(v) __asm__("" : "+x"(v))
#define KERN_INIT kern_init_avx2
#define KERN_LEVEL ISA_AVX2

INLINE __m256i first(int n) {
    static const int32_t window[16] = { -1, -1, -1, -1, -1, -1, -1, -1 };
    return _mm256_loadu_si256((const __m256i *)(const void *)(window + 8 - n));
}
INLINE __m256i as_int(vf v) { return _mm256_castps_si256(v); }
INLINE vf as_float(__m256i v) { return _mm256_castsi256_ps(v); }

INLINE vf v_set1(float f) { return _mm256_set1_ps(f); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_fma_n(vf a, vf b, vf c, int n) { return _mm256_blendv_ps(c, v_fma(a, b, c), as_float(first(n))); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_neg(vf a) { return _mm256_xor_ps(a, v_set1(-0.0f)); }
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE vf v_load_n(const float *p, int n) { return _mm256_maskload_ps(p, first(n)); }
INLINE void v_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
INLINE void v_store_n(float *p, vf v, int n) { _mm256_maskstore_ps(p, first(n), v); }

INLINE __m128i load_half(const uint16_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }
INLINE __m128i load_half_n(const uint16_t *p, int n) {
    uint16_t t[8] = { 0 };
    for (int i = 0; i < n; i++) t[i] = p[i];
    return load_half(t);
}
INLINE vf widen_bf16(__m128i h) { return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
INLINE vf v_bf16(const uint16_t *p) { return widen_bf16(load_half(p)); }
INLINE vf v_bf16_n(const uint16_t *p, int n) { return widen_bf16(load_half_n(p, n)); }
INLINE vf v_f16(const uint16_t *p) { return _mm256_cvtph_ps(load_half(p)); }
INLINE vf v_f16_n(const uint16_t *p, int n) { return _mm256_cvtph_ps(load_half_n(p, n)); }

INLINE void v_halves(uint16_t *to, const uint8_t *from) {
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)from));
    _mm256_storeu_si256((__m256i *)(void *)to,
                        _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((int16_t)0xbf80)));
}
INLINE bool v_has_nan_code(const uint8_t *from) {
    const __m256i mag = _mm256_set1_epi8(0x7f), x = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(x, mag), mag)) != 0;
}

INLINE void v_to_bf16(uint16_t *p, vf v) {
    const __m256i u = as_int(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = as_int(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i q = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    const __m256i h = _mm256_srli_epi32(q, 16);
    _mm_storeu_si128((__m128i *)(void *)p, _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}
INLINE void v_to_bf16_n(uint16_t *p, vf v, int n) {
    uint16_t t[8];
    v_to_bf16(t, v);
    for (int i = 0; i < n; i++) p[i] = t[i];
}

INLINE vf v_is_neg_inf(vf x, vf yes, vf no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, v_set1(-__builtin_inff()), _CMP_EQ_OQ));
}
INLINE bool v_any_nan(vf x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
INLINE int v_first_equal(vf a, vf b) {
    return __builtin_ctz((uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)) | 0x100u);
}
INLINE int v_count_nonfinite(vf x) {
    const __m256i inf = _mm256_set1_epi32(0x7f800000);
    const __m256i eq = _mm256_cmpeq_epi32(_mm256_and_si256(as_int(x), inf), inf);
    return __builtin_popcount((uint32_t)_mm256_movemask_ps(as_float(eq)));
}
/* 2^n as two normal factors: see num_exp. */
INLINE vf v_scale_exp2(vf p, vf n, vf t) {
    (void)n;
    const __m256i i = _mm256_sub_epi32(as_int(t), as_int(v_set1(0x1.8p+23f))), half = _mm256_srai_epi32(i, 1);
    const __m256i bias = _mm256_set1_epi32(127), rest = _mm256_sub_epi32(i, half);
    const vf a = as_float(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const vf b = as_float(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return v_mul(v_mul(p, a), b);
}

/* Pairs are chosen so that the results come out in order; each step adds lanes that are 4, 2, 1 apart. */
INLINE vf v_tree(const vf *t) {
    vf u[4], z[2];
    UNROLL for (int i = 0; i < 4; i++) u[i] =
        v_add(_mm256_permute2f128_ps(t[i], t[i + 4], 0x20), _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
    UNROLL for (int i = 0; i < 2; i++) z[i] =
        v_add(_mm256_shuffle_ps(u[2 * i], u[2 * i + 1], 0x44), _mm256_shuffle_ps(u[2 * i], u[2 * i + 1], 0xee));
    return v_add(_mm256_shuffle_ps(z[0], z[1], 0x88), _mm256_shuffle_ps(z[0], z[1], 0xdd));
}

INLINE void v_load4(vf *out, const float *p) {
    const vf a = v_load(p), b = v_load(p + 8), c = v_load(p + 16), d = v_load(p + 24);
    const vf r0 = _mm256_permute2f128_ps(a, c, 0x20), r1 = _mm256_permute2f128_ps(a, c, 0x31);
    const vf r2 = _mm256_permute2f128_ps(b, d, 0x20), r3 = _mm256_permute2f128_ps(b, d, 0x31);
    const vf l0 = _mm256_unpacklo_ps(r0, r1), l1 = _mm256_unpacklo_ps(r2, r3);
    const vf h0 = _mm256_unpackhi_ps(r0, r1), h1 = _mm256_unpackhi_ps(r2, r3);
    out[0] = _mm256_shuffle_ps(l0, l1, 0x44);
    out[1] = _mm256_shuffle_ps(l0, l1, 0xee);
    out[2] = _mm256_shuffle_ps(h0, h1, 0x44);
    out[3] = _mm256_shuffle_ps(h0, h1, 0xee);
}

#include "kern/vec_math.inc"
#include "kern/vec_table.inc"
