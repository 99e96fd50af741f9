/* quant_linear.h - Linears with quantized weights, shared by the host backends. docs/NUMERICS.md "Quantized linears".
 *
 * The sum over blocks is exact (64-bit integers) and rounded to float32 once, so any order, split or instruction gives the
 * same bits. Inputs are quantized once per row (qact), then any range of output rows is computed from that. */
#ifndef NIBBLE_QUANT_LINEAR_H
#define NIBBLE_QUANT_LINEAR_H

#include "kern/quant.h"
#include "ops/ops.h"

/* Bytes of work memory that one quantized row of K inputs needs, any mode. */
size_t qact_bytes(int K);

/* Quantize one row for weights of this kind. `act` [qact_bytes(K)], 16-byte aligned.
 *   LINEAR_ACT_FLOAT  the row itself (float32)
 *   LINEAR_ACT_FP4    E2M1 codes and E4M3 block scales under input_scale g (num/nvfp4.h nvfp4_act_encode)
 *   LINEAR_ACT_INT8   int8 codes, an integer per block, one float32 per row
 *   LINEAR_ACT_FP8    E4M3 codes under input_scale */
void qact_make(const quant_kern *k, void *act, const float *x, int K, linear_act mode, float input_scale);

/* y[n - n0] for output rows n0 <= n < n1. */
void qlinear_rows(float *y, const linear_desc *d, const void *act, int n0, int n1);

#endif
