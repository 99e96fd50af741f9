/* Reference attention over one tile of at most 64 positions, and the merge of tiles. */
#include <math.h>

#include "kern/dot32.h"
#include "kern/kern_isa.h"
#include "num/bf16.h"
#include "num/fp8.h"
#include "num/mathf_inline.h"

static float same(float f) { return f; }

/* s[0..n) scores in, p out. */
static void softmax_tile(float *max, float *sum, float *s, int n) {
    float top = -INFINITY, lane[32] = { 0 };
    for (int j = 0; j < n; j++)
        if (s[j] > top || isnan(s[j])) top = s[j]; /* once NaN nothing is larger: it stays NaN */
    top = top + 0.0f;                              /* a maximum of zero is +0, in whatever order it was found */
    for (int j = 0; j < n; j++) {
        s[j] = num_exp_inline(s[j] - top);
        lane[j % 32] = lane[j % 32] + s[j];
    }
    *max = top;
    *sum = tree32(lane);
}

#define TILE(name, type, upcast)                                                                                 \
    static void name(float *o, float *max, float *sum, const float *q, const type *k, const type *v, int64_t ld, \
                     int n, int G, int D, float scale) {                                                         \
        for (int64_t g = 0; g < G; g++) {                                                                        \
            float s[64];                                                                                         \
            for (int64_t j = 0; j < n; j++) {                                                                    \
                float lane[32] = { 0 };                                                                          \
                for (int64_t d = 0; d < D; d++)                                                                  \
                    lane[d % 32] = fmaf(q[g * D + d], upcast(k[j * ld + d]), lane[d % 32]);                      \
                s[j] = tree32(lane) * scale;                                                                     \
            }                                                                                                    \
            softmax_tile(&max[g], &sum[g], s, n);                                                                \
            for (int64_t d = 0; d < D; d++) {                                                                    \
                float acc = 0;                                                                                   \
                for (int64_t j = 0; j < n; j++) acc = fmaf(s[j], upcast(v[j * ld + d]), acc);                    \
                o[g * D + d] = acc;                                                                              \
            }                                                                                                    \
        }                                                                                                        \
    }

TILE(attn_tile_f32, float, same)
TILE(attn_tile_bf16, uint16_t, bf16_to_f32)

static void attn_tile_fp8(float *o, float *max, float *sum, const float *q, const uint8_t *k, const uint8_t *v,
                          int64_t ld, int n, int G, int D, float scale, float *work) {
    float *kf = work, *vf = work + (int64_t)64 * D;
    for (int64_t j = 0; j < n; j++)
        for (int64_t d = 0; d < D; d++) {
            kf[j * D + d] = e4m3_to_f32(k[j * ld + d]);
            vf[j * D + d] = e4m3_to_f32(v[j * ld + d]);
        }
    attn_tile_f32(o, max, sum, q, kf, vf, D, n, G, D, scale);
}

static void attn_merge(float *O, float *M, float *L, const float *o, float max, float sum, int D) {
    const float top = max > *M ? max : *M;
    const float a = num_exp_inline(*M - top), b = num_exp_inline(max - top);
    *L = fmaf(*L, a, sum * b);
    *M = top;
    for (int d = 0; d < D; d++) O[d] = fmaf(O[d], a, o[d] * b);
}

void KERN_REF(attn_init)(kern *k) {
    k->attn_tile_f32 = attn_tile_f32;
    k->attn_tile_bf16 = attn_tile_bf16;
    k->attn_tile_fp8 = attn_tile_fp8;
    k->attn_merge = attn_merge;
}
