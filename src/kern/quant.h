/* quant.h - inner loops of quantization: a table of its own beside kern.h, filled once, read-only afterwards.
 *
 * quant_kern_init fills every member with the reference (num/nvfp4.h, num/fp8.h, num/stats.h: the executable rule) and
 * overwrites upward with what the CPU has, capped by --isa. Every member returns THE SAME BYTES at every level, also
 * for NaN, Inf, subnormal and zero inputs and any scale bytes (a NaN float result is any NaN). Divisions are IEEE.
 * Single-threaded, no allocation; outputs do not overlap inputs unless said. Inputs are aligned to their element.
 * NVFP4 members: n % 16 == 0, a matrix is n = rows * cols; operands as in num/nvfp4.h. Others: any n >= 0. */
#ifndef NIBBLE_QUANT_H
#define NIBBLE_QUANT_H

#include "kern/kern.h"
#include "num/nvfp4.h"
#include "num/stats.h"

typedef struct quant_kern {
    kern_isa isa;

    /* ---- statistics: as in num/stats.h ---- */
    float (*amax_bf16)(const uint16_t *x, int64_t n);
    float (*amax_f32)(const float *x, int64_t n);
    int64_t (*nonfinite_bf16)(const uint16_t *x, int64_t n);
    int64_t (*nonfinite_f32)(const float *x, int64_t n);
    void (*block_amax_bf16)(float *b, const uint16_t *x, int64_t n);
    void (*block_amax_f32)(float *b, const float *x, int64_t n);
    void (*error_bf16)(stats_error *s, const uint16_t *x, const float *y, int64_t n);
    void (*error_f32)(stats_error *s, const float *x, const float *y, int64_t n);
    void (*blocks)(stats_blocks *s, const float *b, const uint8_t *scales, int64_t n_blocks, float s2);

    /* ---- NVFP4: as in num/nvfp4.h ---- */
    void (*encode_bf16)(uint8_t *codes, uint8_t *scales, const uint16_t *w, int64_t n, float s2, quant_arith arith);
    void (*encode_f32)(uint8_t *codes, uint8_t *scales, const float *w, int64_t n, float s2, quant_arith arith);
    void (*codes_bf16)(uint8_t *codes, const uint8_t *scales, const uint16_t *w, int64_t n, float s2);
    void (*codes_f32)(uint8_t *codes, const uint8_t *scales, const float *w, int64_t n, float s2);
    void (*block_errors)(double *err2, const float *x, const float *den, int n);
    void (*act_encode)(uint8_t *codes, uint8_t *scales, const float *x, int64_t n, float g);
    void (*decode_f32)(float *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2);
    void (*decode_bf16)(uint16_t *y, const uint8_t *codes, const uint8_t *scales, int64_t n, float s2);

    /* ---- FP8 per tensor: scale, m, divisor > 0 and finite (else only the sign of NaN codes is the machine's) ---- */
    /* y = E4M3(sat(fl(x / scale))): K, V and activations as the engine stores them. */
    void (*fp8_div)(uint8_t *y, const float *x, int64_t n, float scale);
    /* y = E4M3(sat(fl(x * m))): ModelOpt's simulation, m = fp8_sim_multiplier(amax). */
    void (*fp8_mul)(uint8_t *y, const float *x, int64_t n, float m);
    /* y = fp8_weight_code(w, divisor): rounds twice, NaN above 464. */
    void (*fp8_weight)(uint8_t *y, const uint16_t *w, int64_t n, float divisor);
    /* y = fl(E4M3 value * scale). */
    void (*fp8_decode)(float *y, const uint8_t *x, int64_t n, float scale);
} quant_kern;

/* Fill the table for the best level the CPU has that is <= cap (ISA_COUNT = no cap; a cap of another
 * architecture falls back to ISA_REF). AMX has nothing to add here: it gives the AVX-512 table. */
void quant_kern_init(quant_kern *k, kern_isa cap);

/* ---- built from the table ---- */

/* How the block scales of a weight are chosen (quant_search.c; rules and sources in docs/NVFP4.md, 5). */
typedef enum quant_algorithm {
    QUANT_MAX,          /* the block's maximum maps to 6: encode_bf16, encode_f32 */
    QUANT_MSE,          /* the E4M3 scale with the least squared error; a tie keeps MAX's, else the smallest */
    QUANT_FOUR_OVER_SIX /* the maximum maps to 6 or to 4, whichever errs less; a tie keeps 6 */
} quant_algorithm;
extern const char *const quant_algorithms[]; /* "max", "mse", "four-over-six", NULL */

/* weight_scale_2 for a tensor (or group) maximum: amax / 2688, for FOUR_OVER_SIX amax / 1536, in the machine's arithmetic. */
float quant_scale_2(quant_algorithm how, float amax, quant_arith arith);
/* The same operands and alignment as encode_*; x must be finite. */
void quant_encode_bf16(const quant_kern *k, quant_algorithm how, uint8_t *codes, uint8_t *scales, const uint16_t *w,
                       int64_t n, float s2, quant_arith arith);
void quant_encode_f32(const quant_kern *k, quant_algorithm how, uint8_t *codes, uint8_t *scales, const float *w,
                      int64_t n, float s2, quant_arith arith);

/* ModelOpt's simulated activations (num/nvfp4.h nvfp4_act_sim, the same bits); y may be x. */
void quant_act_sim(const quant_kern *k, float *y, const float *x, int64_t n, float g);

/* What became of a tensor: error sums and block counts of n more elements (n % 16 == 0), in order. Start from {0}. */
typedef struct quant_stats {
    stats_error error;
    stats_blocks blocks;
} quant_stats;
void quant_stats_bf16(const quant_kern *k, quant_stats *s, const uint16_t *w, const uint8_t *codes,
                      const uint8_t *scales, int64_t n, float s2);
void quant_stats_f32(const quant_kern *k, quant_stats *s, const float *w, const uint8_t *codes, const uint8_t *scales,
                     int64_t n, float s2);
/* FP8 per tensor: error sums only. */
void quant_stats_fp8(const quant_kern *k, stats_error *s, const uint16_t *w, const uint8_t *codes, int64_t n,
                     float scale);

/* The levels; each overwrites what it has. For quant_kern_init and tests only. */
void quant_init_ref(quant_kern *k);
void quant_init_avx2(quant_kern *k);
void quant_init_avx512(quant_kern *k);
void quant_init_neon(quant_kern *k);

#endif
