/* Packed NVFP4 with NEON: quarter panels (4 output rows in the lanes). */
#include <arm_neon.h>
#include <string.h>

#include "kern/kern_isa.h"
#include "kern/nv.h"

enum { BLOCK = 16, QUARTER = 4, MB = 2 };

INLINE int8x16_t twice(void) {
    static const int8_t t[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    return vld1q_s8(t);
}

INLINE int8x16_t dword(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

/* E4M3 without sign as float: its bits as a half are the value / 256. */
INLINE float32x4_t scales(const uint8_t *s) {
    uint32_t v;
    memcpy(&v, s, 4);
    const uint16x4_t h = vshl_n_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(v)))), 7);
    return vcvt_f32_f16(vreinterpret_f16_u16(h));
}

/* Adds the products of one dword of 4 rows; int16 lanes hold at most 4 x 12 x 127 after the four dwords of a block. */
INLINE void products(int16x8_t *lo, int16x8_t *hi, int8x16_t w, int8x16_t x) {
    *lo = vmlal_s8(*lo, vget_low_s8(w), vget_low_s8(x));
    *hi = vmlal_high_s8(*hi, w, x);
}

/* Rows 4 q .. 4 q + 3 of a panel. */
INLINE void quarter_rows(float *y, int64_t ldy, const uint8_t *w, int Kp, const nv_act *a, const int M, int q) {
    const int8x16_t table = twice();
    const uint8x16_t nibble = vdupq_n_u8(15);
    int64x2_t low[MB], high[MB];
    for (int m = 0; m < M; m++) low[m] = high[m] = vdupq_n_s64(0);
    for (int k = 0; k < Kp; k += NV_COLS, w += NV_GROUP_BYTES)
        for (int b = 0; b < 4; b++) {
            int8x16_t e[2], o[2];
            for (int i = 0; i < 2; i++) {
                const uint8x16_t c = vld1q_u8(w + 64 + (b * 2 + i) * 64 + q * 16);
                e[i] = vqtbl1q_s8(table, vandq_u8(c, nibble));
                o[i] = vqtbl1q_s8(table, vshrq_n_u8(c, 4));
            }
            const int32x4_t ws = vcvtq_s32_f32(vmulq_n_f32(scales(w + b * 16 + q * 4), 131072.0f));
            const int at = k + b * BLOCK;
            for (int m = 0; m < M; m++) {
                const int8_t *x = a[m].codes + at;
                int16x8_t lo = vdupq_n_s16(0), hi = vdupq_n_s16(0);
                for (int i = 0; i < 2; i++) {
                    products(&lo, &hi, e[i], dword(x + 8 * i));
                    products(&lo, &hi, o[i], dword(x + 8 * i + 4));
                }
                const int32x4_t s = vmulq_n_s32(vpaddlq_s16(vpaddq_s16(lo, hi)), a[m].scale[at / BLOCK]);
                low[m] = vmlal_s32(low[m], vget_low_s32(s), vget_low_s32(ws));
                high[m] = vmlal_high_s32(high[m], s, ws);
            }
        }
    for (int m = 0; m < M; m++) {
        int64_t sums[QUARTER];
        vst1q_s64(sums, low[m]);
        vst1q_s64(sums + 2, high[m]);
        for (int r = 0; r < QUARTER; r++) y[m * ldy + q * QUARTER + r] = (float)sums[r];
    }
}

static void dot(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a, int M) {
    for (int p = 0; p < n; p++, y += NV_ROWS, panels += stride)
        for (int q = 0; q < 4; q++) {
            int m = 0;
            for (; m + 2 <= M; m += 2) quarter_rows(y + m * ldy, ldy, panels, Kp, a + m, 2, q);
            if (m < M) quarter_rows(y + m * ldy, ldy, panels, Kp, a + m, 1, q);
        }
}

/* ---- weight-only ---- */

/* fma of the four columns of byte i = 0..3: x[2 i] with the even codes, x[2 i + 1] with the odd ones. */
INLINE float32x4_t octet(float32x4_t p, int8x16_t e, int8x16_t o, const float *x) {
    int32x4_t ev = vreinterpretq_s32_s8(e), ov = vreinterpretq_s32_s8(o);
    for (int i = 0; i < 4; i++) {
        const int32x4_t shift = vdupq_n_s32(24 - 8 * i);
        const float32x4_t ve = vmulq_n_f32(vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(ev, shift), 24)), 0.5f);
        const float32x4_t vo = vmulq_n_f32(vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(ov, shift), 24)), 0.5f);
        p = vfmaq_n_f32(p, ve, x[2 * i]);
        p = vfmaq_n_f32(p, vo, x[2 * i + 1]);
    }
    return p;
}

static void quarter_float(float *y, const uint8_t *w, int Kp, const nv_act *a, int q) {
    const int8x16_t table = twice();
    float32x4_t acc = vdupq_n_f32(0);
    for (int k = 0; k < Kp; k += NV_COLS, w += NV_GROUP_BYTES)
        for (int b = 0; b < 4; b++) {
            float32x4_t p = vdupq_n_f32(0);
            for (int i = 0; i < 2; i++) {
                const uint8x16_t c = vld1q_u8(w + 64 + (b * 2 + i) * 64 + q * 16);
                const int8x16_t e = vqtbl1q_s8(table, vandq_u8(c, vdupq_n_u8(15)));
                p = octet(p, e, vqtbl1q_s8(table, vshrq_n_u8(c, 4)), a->x + k + b * BLOCK + i * 8);
            }
            acc = vfmaq_f32(acc, p, vmulq_n_f32(scales(w + b * 16 + q * 4), 256.0f));
        }
    vst1q_f32(y + q * QUARTER, acc);
}

static void dot_float(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a,
                      int M) {
    for (int p = 0; p < n; p++, y += NV_ROWS, panels += stride)
        for (int m = 0; m < M; m++)
            for (int q = 0; q < 4; q++) quarter_float(y + m * ldy, panels, Kp, a + m, q);
}

void nv_init_neon(nv_kern *k) {
    k->isa = ISA_NEON;
    k->dot = dot;
    k->dot_float = dot_float;
}
