/* fast.cuh - kernels for the shapes and formats that matter; false: none for this one, nothing was launched. */
#pragma once

#include "ops/cuda/quant.cuh"

/* add: y += instead of y =. */
bool fast_nvfp4(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows, bool add);
bool fast_plain(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows);
bool fast_moe_in(gpu *g, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx, int pairs, int k);
bool fast_moe_down(gpu *g, float *y, const float *hidden, const gpu_experts *ex, const int32_t *idx, const float *wt,
                   int rows, int k);
