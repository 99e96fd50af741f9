/* The reference level: the functions of num/, and loops over its scalar FP8 rules. */
#include "kern/quant.h"

#ifndef KERN_REF_FMA /* nothing here multiplies and adds: a second build with FMA would be the same code */

static void fp8_div(uint8_t *y, const float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) y[i] = e4m3_from_f32(x[i] / scale);
}

static void fp8_mul(uint8_t *y, const float *x, int64_t n, float m) {
    for (int64_t i = 0; i < n; i++) y[i] = e4m3_from_f32(x[i] * m);
}

static void fp8_weight(uint8_t *y, const uint16_t *w, int64_t n, float divisor) {
    for (int64_t i = 0; i < n; i++) y[i] = fp8_weight_code(w[i], divisor);
}

static void fp8_decode(float *y, const uint8_t *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) y[i] = e4m3_to_f32(x[i]) * scale;
}

void quant_init_ref(quant_kern *k) {
    *k = (quant_kern){
        .isa = ISA_REF,
        .amax_bf16 = stats_amax_bf16,
        .amax_f32 = stats_amax_f32,
        .nonfinite_bf16 = stats_nonfinite_bf16,
        .nonfinite_f32 = stats_nonfinite_f32,
        .block_amax_bf16 = stats_block_amax_bf16,
        .block_amax_f32 = stats_block_amax_f32,
        .error_bf16 = stats_error_bf16,
        .error_f32 = stats_error_f32,
        .blocks = stats_blocks_add,
        .encode_bf16 = nvfp4_encode_bf16,
        .encode_f32 = nvfp4_encode_f32,
        .codes_bf16 = nvfp4_codes_bf16,
        .codes_f32 = nvfp4_codes_f32,
        .block_errors = nvfp4_block_errors,
        .act_encode = nvfp4_act_encode,
        .decode_f32 = nvfp4_decode_f32,
        .decode_bf16 = nvfp4_decode_bf16,
        .fp8_div = fp8_div,
        .fp8_mul = fp8_mul,
        .fp8_weight = fp8_weight,
        .fp8_decode = fp8_decode,
    };
}

#endif
