#include "num/fp8.h"

#include <math.h>

#include "num/bf16.h"
#include "num/fp8_inline.h"

uint8_t e4m3_from_f32(float x) { return e4m3_from_f32_inline(x); }
float e4m3_to_f32(uint8_t c) { return e4m3_to_f32_inline(c); }

uint8_t e4m3_cast_f32(float x) {
    const uint32_t u = num_bits(x), mag = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    return (uint8_t)(sign | (mag > 0x43e80000u ? 0x7f : e4m3_round_magnitude(mag))); /* 464 */
}

uint8_t e4m3_block_scale(float s) {
    if (isnan(s)) return e4m3_from_f32(s);
    return e4m3_from_f32(s < 0x1p-9f ? 0x1p-9f : s);
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
