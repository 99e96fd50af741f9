/* act_int8.h - the block integers of int8 inputs (NUMERICS "Quantized Linears"). */
#ifndef NIBBLE_ACT_INT8_H
#define NIBBLE_ACT_INT8_H

#include <math.h>
#include <stdint.h>

#include "num/num_fn.h"

/* The smallest integer of at most 4 significant bits that is >= v, within [1, 960]. */
NUM_FN int32_t nv_round_up_4_bits(float v) {
    int32_t n = (int32_t)ceilf(v < 960.0f ? v : 960.0f);
    if (n < 1) n = 1;
    int shift = 0;
    while (n >> shift > 15) shift++;
    int32_t m = (n + (1 << shift) - 1) >> shift;
    if (m > 15) m = (m + 1) >> 1, shift++;
    const int32_t up = m << shift;
    return up > 960 ? 960 : up;
}

#endif
