/* fp8_inline.h - E4M3 conversions as inline code, for fp8.c and for GPU code. Rules: fp8.h. */
#ifndef NIBBLE_FP8_INLINE_H
#define NIBBLE_FP8_INLINE_H

#include "num/mathf_inline.h"

/* Magnitude bits u of a float32 <= 464 -> code 0..0x7E. */
NUM_FN uint8_t e4m3_round_magnitude(uint32_t u) {
    if (u < 0x3c800000u) { /* below 2^-6: multiples of 2^-9, which the sum with 2^14 rounds to */
        return (uint8_t)(num_bits(num_float(u) + 0x1p14f) - num_bits(0x1p14f));
    }
    const uint32_t r = (u + 0x7ffffu + (u >> 20 & 1)) >> 20; /* keep 3 bits of mantissa */
    return (uint8_t)(r - (120u << 3));
}

NUM_FN uint8_t e4m3_from_f32_inline(float x) {
    const uint32_t u = num_bits(x), mag = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    if (mag > 0x7f800000u) return (uint8_t)(sign | 0x7f);
    return (uint8_t)(sign | e4m3_round_magnitude(mag < 0x43e00000u ? mag : 0x43e00000u)); /* 448 */
}

NUM_FN float e4m3_to_f32_inline(uint8_t c) {
    const uint32_t sign = (uint32_t)(c & 0x80) << 24, mag = c & 0x7f;
    if (mag == 0x7f) return num_float(sign | 0x7fc00000u);
    if (mag < 8) return num_float(sign | num_bits((float)mag * 0x1p-9f));
    return num_float(sign | ((mag << 20) + (120u << 23)));
}

/* E4M3 value times 512: an integer, since the smallest step is 2^-9. NaN (refused by the loader) counts as 0. */
NUM_FN int32_t e4m3_times_512(uint8_t c) {
    const int exp = c >> 3 & 15, man = c & 7;
    if ((c & 0x7f) == 0x7f) return 0;
    const int32_t mag = exp ? (8 + man) << (exp - 1) : man;
    return c & 0x80 ? -mag : mag;
}

#endif
