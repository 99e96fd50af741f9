/* Fast linears and experts. */
#include "ops/cuda/fast.cuh"

bool fast_linear(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    (void)g, (void)y, (void)ldy, (void)x, (void)ldx, (void)w, (void)rows;
    return false;
}
bool fast_moe(gpu *g, float *y, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx,
              const float *wt, int rows, int k) {
    (void)g, (void)y, (void)hidden, (void)x, (void)ex, (void)idx, (void)wt, (void)rows, (void)k;
    return false;
}
