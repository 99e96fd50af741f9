#include "num/nvfp4.h"

#include <math.h>

#include "num/bf16.h"
#include "num/fp4.h"
#include "num/stats.h"

float nvfp4_scale_2(float amax, quant_arith arith) {
    return arith == ARITH_CUDA ? amax * (1.0f / 2688.0f) : amax / 2688.0f;
}

uint8_t nvfp4_block_scale(float b, float s2, quant_arith arith) {
    const float d = 6.0f * s2;
    if (isnan(b) || isnan(d)) return 0x7f;
    const float s = b / d;
    if (isnan(s)) return arith == ARITH_CPU ? 0xff : 0x7f;
    return e4m3_block_scale(s == 0 ? 1.0f : s);
}

static void pack_block(uint8_t *codes, const float *x, float den) {
    for (int j = 0; j < NVFP4_BLOCK / 2; j++)
        codes[j] = (uint8_t)(e2m1_from_f32(x[2 * j] / den) | e2m1_from_f32(x[2 * j + 1] / den) << 4);
}

static void load_bf16(float *x, const uint16_t *w) {
    for (int i = 0; i < NVFP4_BLOCK; i++) x[i] = bf16_to_f32(w[i]);
}

static void encode_block(uint8_t *codes, uint8_t *scale, const float *x, float s2, quant_arith arith) {
    *scale = nvfp4_block_scale(stats_amax_f32(x, NVFP4_BLOCK), s2, arith);
    pack_block(codes, x, e4m3_to_f32(*scale) * s2);
}

void nvfp4_encode_bf16(uint8_t *codes, uint8_t *scales, const uint16_t *w, int64_t n, float s2, quant_arith arith) {
    for (int64_t b = 0; b < n / NVFP4_BLOCK; b++) {
        float x[NVFP4_BLOCK];
        load_bf16(x, w + b * NVFP4_BLOCK);
        encode_block(codes + b * 8, scales + b, x, s2, arith);
    }
}

void nvfp4_encode_f32(uint8_t *codes, uint8_t *scales, const float *w, int64_t n, float s2, quant_arith arith) {
    for (int64_t b = 0; b < n / NVFP4_BLOCK; b++)
        encode_block(codes + b * 8, scales + b, w + b * NVFP4_BLOCK, s2, arith);
}

void nvfp4_codes_bf16(uint8_t *codes, const uint8_t *scales, const uint16_t *w, int64_t n, float s2) {
    for (int64_t b = 0; b < n / NVFP4_BLOCK; b++) {
        float x[NVFP4_BLOCK];
        load_bf16(x, w + b * NVFP4_BLOCK);
        pack_block(codes + b * 8, x, e4m3_to_f32(scales[b]) * s2);
    }
}

void nvfp4_codes_f32(uint8_t *codes, const uint8_t *scales, const float *w, int64_t n, float s2) {
    for (int64_t b = 0; b < n / NVFP4_BLOCK; b++)
        pack_block(codes + b * 8, w + b * NVFP4_BLOCK, e4m3_to_f32(scales[b]) * s2);
}

void nvfp4_block_errors(double *err2, const float *x, const float *den, int n) {
    for (int k = 0; k < n; k++) {
        double t[NVFP4_BLOCK];
        for (int i = 0; i < NVFP4_BLOCK; i++) {
            const float y = e2m1_to_f32(e2m1_from_f32(x[i] / den[k])) * den[k];
            const double e = x[i] - y;
            t[i] = e * e;
        }
        for (int half = NVFP4_BLOCK / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) t[i] += t[i + half];
        err2[k] = t[0];
    }
}

static float decode_one(const uint8_t *codes, const uint8_t *scales, int64_t i, float s2) {
    const uint8_t code = (uint8_t)(codes[i / 2] >> (i & 1) * 4 & 15);
    return e2m1_to_f32(code) * (e4m3_to_f32(scales[i / NVFP4_BLOCK]) * s2);
}

void nvfp4_decode_f32(float *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    for (int64_t i = 0; i < n; i++) y[i] = decode_one(codes, scales, i, s2);
}

void nvfp4_decode_bf16(uint16_t *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2) {
    for (int64_t i = 0; i < n; i++) y[i] = bf16_from_f32(decode_one(codes, scales, i, s2));
}

static uint8_t act_scale(const float *x, float g) {
    const float s = stats_amax_f32(x, NVFP4_BLOCK) / (6.0f * g);
    return isnan(s) ? 0x7f : e4m3_from_f32(s);
}

void nvfp4_act_encode(uint8_t *codes, uint8_t *scales, const float *x, int64_t n, float g) {
    for (int64_t b = 0; b < n / NVFP4_BLOCK; b++, x += NVFP4_BLOCK, codes += 8) {
        scales[b] = act_scale(x, g);
        const float den = e4m3_to_f32(scales[b]) * g;
        if (den < NVFP4_ACT_TINY)
            memset(codes, 0, 8);
        else
            pack_block(codes, x, den);
    }
}

void nvfp4_act_sim(float *y, const float *x, int64_t n, float g) {
    if (!(g > 0)) g = 1e-12f;
    for (int64_t b = 0; b < n / NVFP4_BLOCK; b++) {
        float den = e4m3_to_f32(act_scale(x + b * NVFP4_BLOCK, g)) * g;
        if (den < NVFP4_ACT_TINY) den = 1;
        for (int64_t i = b * NVFP4_BLOCK; i < (b + 1) * NVFP4_BLOCK; i++)
            y[i] = e2m1_to_f32(e2m1_from_f32(x[i] / den)) * den;
    }
}
