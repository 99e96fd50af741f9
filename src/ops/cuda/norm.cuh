/* norm.cuh - several matrices over one normalised input, one launch. */
#pragma once

#include "ops/cuda/fast.cuh"

/* As gpu_norm_linears; h (NULL: not wanted) [rows, K] receives the normalised rows. */
bool norm_group(gpu *g, float *const *y, const gpu_mat *const *w, int n, const float *x, const float *norm, float eps,
                int rows, float *h);
