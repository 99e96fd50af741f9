#include "num/fp8.h"

#include <math.h>

#include "num/bf16.h"

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float f32_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Magnitude bits u of a float32 <= 464 -> code 0..0x7E. */
static uint8_t round_magnitude(uint32_t u) {
    if (u < 0x3c800000u) { /* below 2^-6: multiples of 2^-9, which the sum with 2^14 rounds to */
        return (uint8_t)(bits_of(f32_of(u) + 0x1p14f) - bits_of(0x1p14f));
    }
    const uint32_t r = (u + 0x7ffffu + (u >> 20 & 1)) >> 20; /* keep 3 bits of mantissa */
    return (uint8_t)(r - (120u << 3));
}

uint8_t e4m3_from_f32(float x) {
    const uint32_t u = bits_of(x), mag = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    if (mag > 0x7f800000u) return sign | 0x7f;
    return sign | round_magnitude(mag < 0x43e00000u ? mag : 0x43e00000u); /* 448 */
}

uint8_t e4m3_cast_f32(float x) {
    const uint32_t u = bits_of(x), mag = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    return sign | (mag > 0x43e80000u ? 0x7f : round_magnitude(mag)); /* 464 */
}

uint8_t e4m3_block_scale(float s) {
    if (isnan(s)) return e4m3_from_f32(s);
    return e4m3_from_f32(s < 0x1p-9f ? 0x1p-9f : s);
}

float e4m3_to_f32(uint8_t c) {
    const uint32_t sign = (uint32_t)(c & 0x80) << 24, mag = c & 0x7f;
    if (mag == 0x7f) return f32_of(sign | 0x7fc00000u);
    if (mag < 8) return f32_of(sign | bits_of((float)mag * 0x1p-9f));
    return f32_of(sign | ((mag << 20) + (120u << 23)));
}

float fp8_scale(float amax, quant_arith arith) { return arith == ARITH_CUDA ? amax * (1.0f / 448.0f) : amax / 448.0f; }

float fp8_weight_divisor(float scale, quant_arith arith) {
    return arith == ARITH_CUDA ? bf16_to_f32(bf16_from_f32(scale)) : scale;
}

uint8_t fp8_weight_code(uint16_t w_bf16, float divisor) {
    return e4m3_cast_f32(bf16_to_f32(bf16_from_f32(bf16_to_f32(w_bf16) / divisor)));
}

float fp8_sim_multiplier(float amax) { return 448.0f / amax; }

float fp8_sim(float x, float multiplier) { return e4m3_to_f32(e4m3_from_f32(x * multiplier)) * (1.0f / multiplier); }
