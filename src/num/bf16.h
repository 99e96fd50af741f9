/* bf16.h - BF16 and F16 <-> float32. Upcasts are exact; downcasts round to nearest even, NaN stays NaN (quiet). */
#ifndef NIBBLE_BF16_H
#define NIBBLE_BF16_H

#include <stdint.h>
#include <string.h>

#include "num/num_fn.h"

NUM_FN float bf16_to_f32(uint16_t h) {
    const uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

NUM_FN uint16_t bf16_from_f32(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

float f16_to_f32(uint16_t h);
uint16_t f16_from_f32(float f);

#endif
