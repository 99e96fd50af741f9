/* Packed NVFP4 with the dot-product instructions of Armv8.2 (sdot): a whole panel at a time, 4 output rows to a vector. */
#include <arm_neon.h>
#include <string.h>

#include "kern/kern_isa.h"
#include "kern/nv.h"

enum { BLOCK = 16, QUARTERS = 4, MB = 2, AHEAD_BYTES = 2304 };

/* E4M3 of 4 rows without sign x 512, exact: its bits as a half are the value / 256. */
INLINE int32x4_t scale_ints(const uint8_t *s) {
    uint32_t v;
    memcpy(&v, s, 4);
    const uint16x4_t h = vshl_n_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(v)))), 7);
    return vcvtq_s32_f32(vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(h)), 131072.0f));
}

/* Block b of the group at w, whose columns start at `at`: exact 64-bit sums of 4 x 4 output rows and M inputs. */
INLINE void block(int64x2_t (*low)[QUARTERS], int64x2_t (*high)[QUARTERS], const uint8_t *w, int b, const nv_act *a,
                  int at, const int M) {
    static const int8_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    const int8x16_t table = vld1q_s8(twice);
    const uint8x16_t nibble = vdupq_n_u8(15);
    UNROLL for (int q = 0; q < QUARTERS; q++) {
        const uint8x16_t c0 = vld1q_u8(w + 64 + b * 128 + q * 16), c1 = vld1q_u8(w + 128 + b * 128 + q * 16);
        const int8x16_t e0 = vqtbl1q_s8(table, vandq_u8(c0, nibble)), o0 = vqtbl1q_s8(table, vshrq_n_u8(c0, 4));
        const int8x16_t e1 = vqtbl1q_s8(table, vandq_u8(c1, nibble)), o1 = vqtbl1q_s8(table, vshrq_n_u8(c1, 4));
        const int32x4_t ws = scale_ints(w + b * 16 + q * 4);
        UNROLL for (int m = 0; m < M; m++) {
            const int8x16_t x = vld1q_s8(a[m].codes + at);
            int32x4_t s = vdotq_laneq_s32(vdupq_n_s32(0), e0, x, 0);
            s = vdotq_laneq_s32(s, o0, x, 1);
            s = vdotq_laneq_s32(s, e1, x, 2);
            s = vdotq_laneq_s32(s, o1, x, 3);
            s = vmulq_n_s32(s, a[m].scale[at / BLOCK]);
            low[m][q] = vmlal_s32(low[m][q], vget_low_s32(s), vget_low_s32(ws));
            high[m][q] = vmlal_high_s32(high[m][q], s, ws);
        }
    }
}

INLINE void panel_rows(float *y, int64_t ldy, const uint8_t *w, int Kp, const nv_act *a, const int M) {
    int64x2_t low[MB][QUARTERS], high[MB][QUARTERS];
    UNROLL for (int i = 0; i < M * QUARTERS; i++) low[i / QUARTERS][i % QUARTERS] = high[i / QUARTERS][i % QUARTERS] =
        vdupq_n_s64(0);
    for (int k = 0; k < Kp; k += NV_COLS, w += NV_GROUP_BYTES) {
        UNROLL for (int i = 0; i < 9; i++)
            __builtin_prefetch((const void *)((uintptr_t)w + AHEAD_BYTES + (uintptr_t)i * 64));
        UNROLL for (int b = 0; b < 4; b++) block(low, high, w, b, a, k + b * BLOCK, M);
    }
    for (int m = 0; m < M; m++)
        for (int q = 0; q < QUARTERS; q++) { /* one rounding each */
            int64_t sums[4];
            vst1q_s64(sums, low[m][q]);
            vst1q_s64(sums + 2, high[m][q]);
            for (int r = 0; r < 4; r++) y[m * ldy + q * 4 + r] = (float)sums[r];
        }
}

static void dot(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a, int M) {
    for (int p = 0; p < n; p++, y += NV_ROWS, panels += stride) {
        int m = 0;
        for (; m + 2 <= M; m += 2) panel_rows(y + m * ldy, ldy, panels, Kp, a + m, 2);
        if (m < M) panel_rows(y + m * ldy, ldy, panels, Kp, a + m, 1);
    }
}

void nv_init_dotprod(nv_kern *k) {
    nv_init_neon(k);
    k->isa = ISA_DOTPROD;
    k->dot = dot;
}
