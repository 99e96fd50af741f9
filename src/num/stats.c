#include "num/stats.h"

#include <math.h>
#include <string.h>

#include "num/bf16.h"
#include "num/fp8.h"

float stats_amax_bf16(const uint16_t *x, int64_t n) {
    uint16_t m = 0; /* magnitudes order like integers, and NaN is above Inf */
    for (int64_t i = 0; i < n; i++) {
        const uint16_t a = x[i] & 0x7fff;
        if (a > m) m = a;
    }
    return bf16_to_f32(m);
}

float stats_amax_f32(const float *x, int64_t n) {
    uint32_t m = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, 4);
        u &= 0x7fffffffu;
        if (u > m) m = u;
    }
    float f;
    memcpy(&f, &m, 4);
    return f;
}

int64_t stats_nonfinite_bf16(const uint16_t *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if ((x[i] & 0x7f80) == 0x7f80) return i;
    return -1;
}

int64_t stats_nonfinite_f32(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return i;
    return -1;
}

void stats_block_amax_bf16(float *b, const uint16_t *x, int64_t n) {
    for (int64_t i = 0; i < n / 16; i++) b[i] = stats_amax_bf16(x + i * 16, 16);
}

void stats_block_amax_f32(float *b, const float *x, int64_t n) {
    for (int64_t i = 0; i < n / 16; i++) b[i] = stats_amax_f32(x + i * 16, 16);
}

static void error_add(stats_error *s, int64_t i, float x, float y) {
    const float d = x - y;
    s->err2[i & 15] += (double)d * d;
    s->ref2[i & 15] += (double)x * x;
}

void stats_error_bf16(stats_error *s, const uint16_t *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) error_add(s, i, bf16_to_f32(x[i]), y[i]);
}

void stats_error_f32(stats_error *s, const float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) error_add(s, i, x[i], y[i]);
}

void stats_error_merge(stats_error *s, const stats_error *add) {
    for (int l = 0; l < 16; l++) {
        s->err2[l] += add->err2[l];
        s->ref2[l] += add->ref2[l];
    }
}

static double tree(const double lanes[16]) {
    double l[16];
    memcpy(l, lanes, sizeof l);
    for (int step = 8; step >= 1; step /= 2)
        for (int j = 0; j < step; j++) l[j] += l[j + step];
    return l[0];
}

double stats_error_relative(const stats_error *s) {
    const double e = tree(s->err2);
    return e == 0 ? 0 : sqrt(e / tree(s->ref2));
}

void stats_blocks_add(stats_blocks *s, const float *b, const uint8_t *scales, int64_t n_blocks, float s2) {
    const float d = 6.0f * s2;
    int64_t zero = 0, clipped = 0, nan = 0;
    for (int64_t i = 0; i < n_blocks; i++) {
        const uint8_t c = scales[i];
        zero += b[i] == 0;
        clipped += b[i] > 7.0f * (e4m3_to_f32(c) * s2);
        nan += (c & 0x7f) == 0x7f || isnan(b[i]);
        if (c == 0x7e) s->saturated += b[i] / d > 464.0f;
        if (c == 0x01) s->floored += b[i] > 0 && b[i] / d <= 0x1p-10f;
    }
    s->blocks += n_blocks;
    s->zero += zero;
    s->clipped += clipped;
    s->nan += nan;
}
