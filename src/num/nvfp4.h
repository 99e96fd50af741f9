/* nvfp4.h - NVFP4 rows: E2M1 codes in blocks of 16, one E4M3 scale per block, one float32 scale per tensor.
 *
 * These are the reference versions (plain C, the executable rule); kern/quant.h has the same functions with the same
 * bits for each ISA. Rules and sources: docs/NVFP4.md.
 *
 * Operands: n elements, n % 16 == 0; since a row is a whole number of blocks, a matrix [N, K] is simply n = N * K.
 * codes [n / 2]: element 2j in the low nibble of byte j. scales [n / 16]. Outputs do not overlap inputs.
 * Inputs need not be aligned beyond their element. Every byte pattern is accepted; nothing is refused here:
 * that is the business of whoever knows the tensor's name (stats.h finds NaN and Inf). */
#ifndef NIBBLE_NVFP4_H
#define NIBBLE_NVFP4_H

#include "base/base.h"
#include "num/fp8.h"

enum { NVFP4_BLOCK = 16 };

/* Below this product of block scale and input_scale an activation block counts as zero. */
#define NVFP4_ACT_TINY 1e-5f

/* weight_scale_2 or input_scale of a tensor: amax / 2688 (= 6 * 448), one rounding; CUDA: amax * fl(1/2688).
 * For a weight that is all zero (amax 0) use 1.0 instead: then the encoder writes scales 0x38 and codes 0. */
float nvfp4_scale_2(float amax, quant_arith arith);

/* Scale byte of a weight block with maximum b >= 0: s = fl(b / fl(6 s2)); 0 becomes 1; clamped to [2^-9, 448]; RNE.
 * NaN in b or s2 gives 7F; 0/0 and Inf/Inf give 7F on CUDA and FF on a CPU, as the hardware's own NaN has it. */
uint8_t nvfp4_block_scale(float b, float s2, quant_arith arith);

/* Weights: scale byte as above, den = fl(E4M3 value * s2), code = E2M1 of fl(w / den). */
void nvfp4_encode_bf16(uint8_t *codes, uint8_t *scales, const uint16_t *w, int64_t n, float s2, quant_arith arith);
void nvfp4_encode_f32(uint8_t *codes, uint8_t *scales, const float *w, int64_t n, float s2, quant_arith arith);
/* The same with scale bytes that are already chosen (searched scales). */
void nvfp4_codes_bf16(uint8_t *codes, const uint8_t *scales, const uint16_t *w, int64_t n, float s2);
void nvfp4_codes_f32(uint8_t *codes, const uint8_t *scales, const float *w, int64_t n, float s2);

/* Squared error of one block x[16] under each of n divisors den >= 0: y = fl(E2M1 value of fl(x / den) * den), e = fl(x - y);
 * in float64, where e * e is exact: t[j] = e[j]^2 + e[j+8]^2 for j < 8, then t[j] += t[j+4], [j+2], [j+1]; err2 = t[0]. */
void nvfp4_block_errors(double *err2, const float *x, const float *den, int n);

/* y = fl(E2M1 value * fl(E4M3 value * s2)); a code of -0 gives -0. The bf16 version rounds y once more. */
void nvfp4_decode_f32(float *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2);
void nvfp4_decode_bf16(uint16_t *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2);

/* Activations, per-tensor input_scale g > 0, dynamic block scales (no floor at 2^-9, unlike weights):
 * scale byte = E4M3(min(fl(b / fl(6 g)), 448)); den = fl(E4M3 value * g); den < 1e-5: codes 0; else code = E2M1 of
 * fl(x / den). A block that holds a NaN gets scale 7F and codes 7; an Inf saturates like any outlier. */
void nvfp4_act_encode(uint8_t *codes, uint8_t *scales, const float *x, int64_t n, float g);
/* ModelOpt's simulation of the same: y = E2M1(fl(x / den)) * den, with den = 1 where it is < 1e-5 and g = 1e-12 where
 * it is not > 0. Equals decoding what nvfp4_act_encode wrote, except that in blocks with den < 1e-5 (codes 0 there)
 * elements above 0.25 survive here: such a block needs amax / input_scale beyond any calibrated range.
 * The sign of a zero is unspecified in ModelOpt; here it is that of the code. y may be x. */
void nvfp4_act_sim(float *y, const float *x, int64_t n, float g);

#endif
