/* The vector words of AVX-512 (F, BW, DQ, VL); the families themselves are in vec_*.inc. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#include "kern/kern_isa.h"

typedef __m512 vf;
#define VL 16
/* Register tile 8 x 3 of one part: 24 accumulators, 3 weights, 1 activation. KB floats of 8 rows are 32 KB. */
#define MR 8
#define NR 3
#define NB 96
#define KB 1024
#define TILE_MAX 24
#define GEMV_MAX 4
#define GEMV_ROWS(m) ((m) == 1 ? 8 : (m) <= 3 ? 4 : 3)
enum { nv_max = 4 };
#define PIN(v) __asm__("" : "+v"(v))
#define KERN_INIT kern_init_avx512
#define KERN_LEVEL ISA_AVX512

INLINE __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
INLINE __m512i as_int(vf v) { return _mm512_castps_si512(v); }
INLINE vf as_float(__m512i v) { return _mm512_castsi512_ps(v); }

INLINE vf v_set1(float f) { return _mm512_set1_ps(f); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_fma_n(vf a, vf b, vf c, int n) { return _mm512_mask3_fmadd_ps(a, b, c, first(n)); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); } /* the second operand when either is NaN */
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_neg(vf a) { return as_float(_mm512_xor_si512(as_int(a), _mm512_set1_epi32(INT32_MIN))); }
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE void v_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
INLINE void v_store_n(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

INLINE vf widen_bf16(__m256i h) { return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
INLINE vf v_bf16(const uint16_t *p) { return widen_bf16(_mm256_loadu_si256((const __m256i *)(const void *)p)); }
INLINE vf v_bf16_n(const uint16_t *p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p)); }
INLINE vf v_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }
INLINE vf v_f16_n(const uint16_t *p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }

INLINE void v_halves(uint16_t *to, const uint8_t *from) {
    const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from));
    _mm512_storeu_si512(to, _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16((int16_t)0xbf80)));
}
INLINE bool v_has_nan_code(const uint8_t *from) {
    const __m512i mag = _mm512_set1_epi8(0x7f);
    return _mm512_cmpeq_epi8_mask(_mm512_and_si512(_mm512_loadu_si512(from), mag), mag) != 0;
}

INLINE __m256i narrow_bf16(vf v) {
    const __m512i u = as_int(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i q = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(q, 16));
}
INLINE void v_to_bf16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)(void *)p, narrow_bf16(v)); }
INLINE void v_to_bf16_n(uint16_t *p, vf v, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow_bf16(v)); }

INLINE vf v_is_neg_inf(vf x, vf yes, vf no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ), yes);
}
INLINE bool v_any_nan(vf x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
INLINE int v_first_equal(vf a, vf b) {
    return __builtin_ctz((uint32_t)_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) | 0x10000u);
}
INLINE int v_count_nonfinite(vf x) {
    const __m512i inf = _mm512_set1_epi32(0x7f800000);
    return __builtin_popcount(_mm512_cmpeq_epi32_mask(_mm512_and_si512(as_int(x), inf), inf));
}
/* One rounding, to subnormals too: the bits of the two products of num_exp. */
INLINE vf v_scale_exp2(vf p, vf n, vf t) {
    (void)t;
    return _mm512_scalef_ps(p, n);
}

/* Pairs are chosen so that the results come out in order; each step adds lanes that are 8, 4, 2, 1 apart. */
INLINE vf v_tree(const vf *t) {
    vf u[8], w[4], z[2];
    UNROLL for (int i = 0; i < 4; i++) {
        u[i] = v_add(_mm512_shuffle_f32x4(t[i], t[i + 4], 0x44), _mm512_shuffle_f32x4(t[i], t[i + 4], 0xee));
        u[i + 4] =
            v_add(_mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x44), _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xee));
    }
    UNROLL for (int i = 0; i < 4; i++) w[i] =
        v_add(_mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd));
    UNROLL for (int i = 0; i < 2; i++) z[i] =
        v_add(_mm512_shuffle_ps(w[2 * i], w[2 * i + 1], 0x44), _mm512_shuffle_ps(w[2 * i], w[2 * i + 1], 0xee));
    return v_add(_mm512_shuffle_ps(z[0], z[1], 0x88), _mm512_shuffle_ps(z[0], z[1], 0xdd));
}

/* 4-byte words of four vectors: even/odd of pairs twice is a stride of four. */
INLINE void v_load4(vf *out, const float *p) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const vf a = v_load(p), b = v_load(p + 16), c = v_load(p + 32), d = v_load(p + 48);
    const vf e0 = _mm512_permutex2var_ps(a, even, b), e1 = _mm512_permutex2var_ps(c, even, d);
    const vf o0 = _mm512_permutex2var_ps(a, odd, b), o1 = _mm512_permutex2var_ps(c, odd, d);
    out[0] = _mm512_permutex2var_ps(e0, even, e1);
    out[2] = _mm512_permutex2var_ps(e0, odd, e1);
    out[1] = _mm512_permutex2var_ps(o0, even, o1);
    out[3] = _mm512_permutex2var_ps(o0, odd, o1);
}

#include "kern/vec_math.inc"
#include "kern/vec_table.inc"
