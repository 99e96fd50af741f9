/* fp8.h - E4M3 (the "fn" kind: no infinity, S.1111.111 is NaN, largest value 448) and its per-tensor scales.
 *
 * Every conversion rounds to nearest even from float32, once, subnormals (multiples of 2^-9 below 2^-6) included.
 * NaN gives 0x7F or 0xFF by the sign of its bit pattern, as ModelOpt 0.47 on torch 2.11 does. The vectors
 * tests/oracle/codec/e4m3_*.u8 fix all of it; docs/NVFP4.md explains each rule. Pure functions, no state. */
#ifndef NIBBLE_FP8_H
#define NIBBLE_FP8_H

#include <string.h>

#include "base/base.h"

/* Which machine ModelOpt ran on: torch turns "tensor / Python number" into a multiplication by the reciprocal on
 * CUDA and divides on a CPU. Published checkpoints follow CUDA. */
typedef enum quant_arith { ARITH_CUDA, ARITH_CPU } quant_arith;

#define E4M3_MAX 448.0f

uint8_t e4m3_from_f32(float x);    /* saturating: |x| > 448 (infinity too) gives +-448 */
uint8_t e4m3_cast_f32(float x);    /* torch's cast: |x| > 464 gives NaN; 464 itself is a tie and goes to 448 */
uint8_t e4m3_block_scale(float s); /* NVFP4 weight block scale: s clamped to [2^-9, 448]; never 0 */
float e4m3_to_f32(uint8_t c);      /* exact; 0x7F and 0xFF are NaN */

/* Per-tensor FP8 scale of a weight, an input or K/V: amax / 448, one rounding (CUDA: amax * fl(1/448)). */
float fp8_scale(float amax, quant_arith arith);

/* FP8 per-tensor weights round twice: code = E4M3cast(bf16(fl(w / divisor))), w BF16; the divisor is the scale on a
 * CPU, the scale rounded to BF16 on CUDA. The file stores the float32 scale in both cases. */
float fp8_weight_divisor(float scale, quant_arith arith);
uint8_t fp8_weight_code(uint16_t w_bf16, float divisor);

/* ModelOpt's simulation of FP8 activations, K and V with per-tensor amax A > 0:
 * y = E4M3(clamp(fl(x * m))) * fl(1 / m), m = fl(448 / A). */
float fp8_sim_multiplier(float amax);
float fp8_sim(float x, float multiplier);

#endif
