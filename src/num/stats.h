/* stats.h - what the quantizer and the checker measure: amax, non-finite values, error, bad blocks.
 *
 * Reference versions; kern/quant.h has the same for each ISA with the same bits. Deterministic: sums keep 16 lanes
 * (element i of a call goes to lane i % 16), so a tensor fed in pieces of whole blocks, in order, gives the bits of one
 * call, and lanes of different tensors or threads merge in the order the caller fixes. */
#ifndef NIBBLE_STATS_H
#define NIBBLE_STATS_H

#include "base/base.h"

/* max |x|, exact; NaN if any x is NaN; 0 for n == 0. */
float stats_amax_bf16(const uint16_t *x, int64_t n);
float stats_amax_f32(const float *x, int64_t n);
/* Index of the first NaN or Inf, or -1. */
int64_t stats_nonfinite_bf16(const uint16_t *x, int64_t n);
int64_t stats_nonfinite_f32(const float *x, int64_t n);
/* The 16-wide block maxima: b[i] = amax of block i; n % 16 == 0. */
void stats_block_amax_bf16(float *b, const uint16_t *x, int64_t n);
void stats_block_amax_f32(float *b, const float *x, int64_t n);

/* Squared error and squared reference. Start from {0}. d = fl32(x - y); lane += d * d in float64 (the product is
 * exact), likewise x * x. */
typedef struct stats_error {
    double err2[16], ref2[16];
} stats_error;
void stats_error_bf16(stats_error *s, const uint16_t *x, const float *y, int64_t n); /* x the original, y decoded */
void stats_error_f32(stats_error *s, const float *x, const float *y, int64_t n);
void stats_error_merge(stats_error *s, const stats_error *add);
/* sqrt(sum of err2 / sum of ref2), lanes added in the tree order of dot32 (8, 4, 2, 1); 0 when nothing differs. */
double stats_error_relative(const stats_error *s);

/* Blocks of an NVFP4 tensor, judged from their maxima b (of the original), scale bytes and s2; n_blocks of each. */
typedef struct stats_blocks {
    int64_t blocks;
    int64_t zero; /* b == 0 */
    int64_t
        saturated; /* scale byte 7E because the wanted scale fl(b / fl(6 s2)) is above 464: the clamp at 448 changed it */
    int64_t floored; /* scale byte 01 because the wanted scale is <= 2^-10 (and b > 0): the clamp at 2^-9 changed it */
    int64_t clipped; /* b > fl(7 den), den = fl(E4M3 value * s2): the code 6 is more than half a step short */
    int64_t nan;     /* scale byte 7F or FF, or b not a number */
} stats_blocks;
void stats_blocks_add(stats_blocks *s, const float *b, const uint8_t *scales, int64_t n_blocks, float s2);

#endif
