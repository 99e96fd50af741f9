/* NEON (AArch64 base): codes widened to 16 bits against q itself. */
#include "kern/kern_isa.h"
#include "kern/screen.h"

#include <arm_neon.h>

/* A lane of 32 bits holds 512 products of at most 127 * 32767: two of them in 16 columns. */
enum { CHUNK = 4096, AHEAD = 4096 };

INLINE void dots_m(int64_t *y, int64_t ldy, const int8_t *codes, const screen_act *x, int N, int64_t stride,
                   const int M) {
    for (int n = 0; n < N; n++, codes += stride) {
        int64_t sums[SCREEN_MAX_ROWS] = { 0 };
        for (int64_t from = 0; from < stride; from += CHUNK) {
            const int64_t to = min_i64(stride, from + CHUNK);
            int32x4_t acc[2 * SCREEN_MAX_ROWS];
            for (int a = 0; a < 2 * M; a++) acc[a] = vdupq_n_s32(0);
            for (int64_t i = from; i < to; i += 16) {
                const int8x16_t w = vld1q_s8(codes + i);
                const int16x8_t w0 = vmovl_s8(vget_low_s8(w)), w1 = vmovl_high_s8(w);
                __builtin_prefetch(codes + i + AHEAD);
                for (int m = 0; m < M; m++) {
                    const int16x8_t a = vld1q_s16(x[m].q + i), b = vld1q_s16(x[m].q + i + 8);
                    acc[2 * m] = vmlal_s16(acc[2 * m], vget_low_s16(w0), vget_low_s16(a));
                    acc[2 * m + 1] = vmlal_high_s16(acc[2 * m + 1], w0, a);
                    acc[2 * m] = vmlal_s16(acc[2 * m], vget_low_s16(w1), vget_low_s16(b));
                    acc[2 * m + 1] = vmlal_high_s16(acc[2 * m + 1], w1, b);
                }
            }
            for (int m = 0; m < M; m++) sums[m] += vaddlvq_s32(acc[2 * m]) + vaddlvq_s32(acc[2 * m + 1]);
        }
        for (int m = 0; m < M; m++) y[m * ldy + n] = sums[m];
    }
}

static void dots(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int M, int N,
                 int64_t stride) {
    (void)sums;
    switch (M) {
    case 1: dots_m(y, ldy, codes, x, N, stride, 1); return;
    case 2: dots_m(y, ldy, codes, x, N, stride, 2); return;
    case 3: dots_m(y, ldy, codes, x, N, stride, 3); return;
    default: dots_m(y, ldy, codes, x, N, stride, 4); return;
    }
}

/* Packing happens once per start: the reference's loop is kept. */
void screen_init_neon(screen_kern *k) {
    k->isa = ISA_NEON;
    k->dots = dots;
}
