/* ops_cpu_packed.h - steps from float rows to outputs of packed NVFP4 weights, shared by Linears and experts. Internal to
 * ops_cpu*.c. */
#ifndef NIBBLE_OPS_CPU_PACKED_H
#define NIBBLE_OPS_CPU_PACKED_H

#include "ops/ops_cpu.h"

enum {
    PACKED_PANELS = 16,   /* panels whose sums wait for their factor */
    PACKED_GEMM_ROWS = 8, /* from here on planes pay */
};

/* `count` quantized rows of K in `mem`, which has packed_acts_bytes (a multiple of 64) and is 64-byte aligned. */
size_t packed_acts_bytes(size_t count, int K);
nv_act *packed_acts_at(char *mem, int count, int K);

/* Quantize one row x [K] as the weights' mode asks. */
void packed_act(const cpu *c, nv_act *a, const float *x, int K, const linear_quant *q);
/* Do two matrices of as many columns quantize a row in the same way? */
bool packed_same_act(const linear_quant *a, const linear_quant *b);
/* Planes of M rows at `space`, tile after tile; returns what is behind them. */
char *packed_planes(const cpu *c, char *space, const nv_act *a, int M, int Kp);
/* Sums of panels [0, n), `stride` bytes apart, for M rows -> y, [M] rows of n * 16 at stride ldy. */
void packed_sums(const cpu *c, float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int K,
                 const nv_act *a, int M, linear_act act);
/* From n sums of a row to its outputs: exact power of two first, then one product (NUMERICS). y may be s. */
void packed_finish(float *y, const float *s, int n, const linear_quant *q, const nv_act *a);

#endif
