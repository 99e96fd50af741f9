/* Reference row operations. */
#include <math.h>

#include "kern/dot32.h"
#include "kern/kern_isa.h"
#include "num/bf16.h"
#include "num/mathf_inline.h"

static float square_sum(const float *x, int64_t n) {
    float lane[32] = { 0 };
    for (int64_t i = 0; i < n; i++) lane[i % 32] = fmaf(x[i], x[i], lane[i % 32]);
    return tree32(lane);
}

static void upcast(float *y, const uint16_t *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = bf16_to_f32(x[i]);
}

static void downcast(uint16_t *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = bf16_from_f32(x[i]);
}

static void rmsnorm(float *y, const float *x, const float *w, int n, float eps) {
    const float r = 1.0f / sqrtf(square_sum(x, n) / (float)n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

static void gated_norm(float *y, const float *x, const float *z, const float *w, int n, float eps) {
    const float r = 1.0f / sqrtf(square_sum(x, n) / (float)n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * r * w[i] * num_silu_inline(z[i]);
}

static void l2norm(float *y, const float *x, int n, float eps, float scale) {
    const float r = 1.0f / sqrtf(square_sum(x, n) + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * r * scale;
}

static void silu_mul(float *y, const float *g, const float *u, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = num_silu_inline(g[i]) * u[i];
}

static void sigmoid_mul(float *y, const float *x, const float *g, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * num_sigmoid_inline(g[i]);
}

static void add(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] + x[i];
}

static void add_scaled(float *y, float a, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] + a * x[i];
}

static void exp_row(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = num_exp_inline(x[i]);
}

static void scale_div(float *y, const float *x, float d, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / d;
}

static int64_t argmax(const float *x, int64_t n) {
    int64_t best = n > 0 ? 0 : -1;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best] || (isnan(x[best]) && !isnan(x[i]))) best = i;
    return best;
}

static int64_t nonfinite(const float *x, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += (num_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return count;
}

static bool block_max(float *max, const float *x, int64_t n) {
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        float *m = &max[i / KERN_BLOCK];
        if (i % KERN_BLOCK == 0) *m = -INFINITY;
        if (x[i] > *m) *m = x[i] + 0.0f;
        finite &= isfinite(x[i]) != 0;
    }
    return finite;
}

void KERN_REF(row_init)(kern *k) {
    k->bf16_to_f32 = upcast;
    k->f32_to_bf16 = downcast;
    k->rmsnorm = rmsnorm;
    k->gated_norm = gated_norm;
    k->l2norm = l2norm;
    k->silu_mul = silu_mul;
    k->sigmoid_mul = sigmoid_mul;
    k->add = add;
    k->add_scaled = add_scaled;
    k->exp = exp_row;
    k->scale_div = scale_div;
    k->argmax = argmax;
    k->nonfinite = nonfinite;
    k->block_max = block_max;
}
