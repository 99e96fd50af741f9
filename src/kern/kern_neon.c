/* The vector words of AArch64 Advanced SIMD; the families themselves are in vec_*.inc. */
#include <arm_neon.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kern/kern_isa.h"

typedef float32x4_t vf;
#define VL 4
#define MR 8
#define NR 3
#define NB 96
#define KB 1024
#define TILE_MAX 24
#define GEMV_MAX 3
#define GEMV_ROWS(m) ((m) == 1 ? 2 : 1)
enum { nv_max = 8 };
#define PIN(v) __asm__("" : "+w"(v))
#define KERN_INIT kern_init_neon
#define KERN_LEVEL ISA_NEON

INLINE uint32x4_t first(int n) {
    static const uint32_t window[8] = { ~0u, ~0u, ~0u, ~0u };
    return vld1q_u32(window + 4 - n);
}
INLINE uint32x4_t as_int(vf v) { return vreinterpretq_u32_f32(v); }
INLINE vf as_float(uint32x4_t v) { return vreinterpretq_f32_u32(v); }

INLINE vf v_set1(float f) { return vdupq_n_f32(f); }
INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf v_fma_n(vf a, vf b, vf c, int n) { return vbslq_f32(first(n), v_fma(a, b, c), c); }
/* Not vminq/vmaxq: those return NaN when the first operand is NaN, and order the zeros. */
INLINE vf v_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE vf v_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE vf v_neg(vf a) { return vnegq_f32(a); }
INLINE vf v_load(const float *p) { return vld1q_f32(p); }
INLINE vf v_load_n(const float *p, int n) {
    float t[4] = { 0 };
    for (int i = 0; i < n; i++) t[i] = p[i];
    return v_load(t);
}
INLINE void v_store(float *p, vf v) { vst1q_f32(p, v); }
INLINE void v_store_n(float *p, vf v, int n) {
    float t[4];
    v_store(t, v);
    for (int i = 0; i < n; i++) p[i] = t[i];
}

INLINE uint16x4_t load_half_n(const uint16_t *p, int n) {
    uint16_t t[4] = { 0 };
    for (int i = 0; i < n; i++) t[i] = p[i];
    return vld1_u16(t);
}
INLINE vf widen_bf16(uint16x4_t h) { return as_float(vshll_n_u16(h, 16)); }
INLINE vf widen_f16(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
INLINE vf v_bf16(const uint16_t *p) { return widen_bf16(vld1_u16(p)); }
INLINE vf v_bf16_n(const uint16_t *p, int n) { return widen_bf16(load_half_n(p, n)); }
INLINE vf v_f16(const uint16_t *p) { return widen_f16(vld1_u16(p)); }
INLINE vf v_f16_n(const uint16_t *p, int n) { return widen_f16(load_half_n(p, n)); }

INLINE void v_halves(uint16_t *to, const uint8_t *from) {
    const uint16x8_t x = vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(from))));
    vst1q_u16(to, vandq_u16(vshlq_n_u16(x, 7), vdupq_n_u16(0xbf80)));
}
INLINE bool v_has_nan_code(const uint8_t *from) {
    return vmaxvq_u8(vandq_u8(vld1q_u8(from), vdupq_n_u8(0x7f))) == 0x7f;
}

INLINE void v_to_bf16(uint16_t *p, vf v) {
    const uint32x4_t u = as_int(v), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t r = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t q = vbslq_u32(vceqq_f32(v, v), r, vorrq_u32(u, vdupq_n_u32(0x400000)));
    vst1_u16(p, vshrn_n_u32(q, 16));
}
INLINE void v_to_bf16_n(uint16_t *p, vf v, int n) {
    uint16_t t[4];
    v_to_bf16(t, v);
    for (int i = 0; i < n; i++) p[i] = t[i];
}

INLINE vf v_is_neg_inf(vf x, vf yes, vf no) { return vbslq_f32(vceqq_f32(x, v_set1(-__builtin_inff())), yes, no); }
INLINE bool v_any_nan(vf x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }
INLINE int v_first_equal(vf a, vf b) {
    const uint64_t m = vget_lane_u64(vreinterpret_u64_u16(vmovn_u32(vceqq_f32(a, b))), 0);
    return m ? __builtin_ctzll(m) / 16 : 4;
}
INLINE int v_count_nonfinite(vf x) {
    const uint32x4_t inf = vdupq_n_u32(0x7f800000);
    return (int)vaddvq_u32(vshrq_n_u32(vceqq_u32(vandq_u32(as_int(x), inf), inf), 31));
}
/* 2^n as two normal factors: see num_exp. */
INLINE vf v_scale_exp2(vf p, vf n, vf t) {
    (void)n;
    const int32x4_t i = vreinterpretq_s32_u32(vsubq_u32(as_int(t), as_int(v_set1(0x1.8p+23f))));
    const int32x4_t half = vshrq_n_s32(i, 1), bias = vdupq_n_s32(127), rest = vsubq_s32(i, half);
    const vf a = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    const vf b = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23));
    return v_mul(v_mul(p, a), b);
}

INLINE vf halves(vf a, vf b) { /* [a0 + a2, a1 + a3, b0 + b2, b1 + b3] */
    const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
    return v_add(vreinterpretq_f32_f64(vtrn1q_f64(x, y)), vreinterpretq_f32_f64(vtrn2q_f64(x, y)));
}
INLINE vf v_tree(const vf *t) {
    const vf a = halves(t[0], t[1]), b = halves(t[2], t[3]);
    return v_add(vuzp1q_f32(a, b), vuzp2q_f32(a, b));
}

INLINE void v_load4(vf *out, const float *p) {
    const float32x4x4_t v = vld4q_f32(p);
    UNROLL for (int j = 0; j < 4; j++) out[j] = v.val[j];
}

#include "kern/vec_math.inc"
#include "kern/vec_table.inc"
