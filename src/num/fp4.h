/* fp4.h - E2M1: sign, two exponent bits, one mantissa bit. Values 0 .5 1 1.5 2 3 4 6 and their negatives.
 *
 * ModelOpt's rule (tests/oracle/codec/e2m1.u8): round to nearest even, saturating at 6; the sign bit is set only if
 * q < 0, so both zeros give code 0 while a small negative gives code 8 (-0); any NaN gives 7. */
#ifndef NIBBLE_FP4_H
#define NIBBLE_FP4_H

#include <stdint.h>

#include "num/num_fn.h"

NUM_FN uint8_t e2m1_from_f32(float q) {
    const float a = q < 0 ? -q : q;
    /* A value on a boundary goes to the even code: 0.25, 1.25, 2.5 and 5 stay below, 0.75, 1.75 and 3.5 go up. */
    const int below = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    if (q != q) return 7;
    return (uint8_t)((q < 0 ? 8 : 0) | below);
}

static inline float e2m1_to_f32(uint8_t code) {
    static const float value[16] = { 0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f };
    return value[code & 15];
}

/* Twice the value: an integer, so that dot products of a block are exact in int32. */
static inline int8_t e2m1_doubled(uint8_t code) {
    static const int8_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    return twice[code & 15];
}

#endif
