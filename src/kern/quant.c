#include "kern/quant.h"

#include <string.h>

void quant_kern_init(quant_kern *k, kern_isa cap) {
    quant_init_ref(k);
#if defined(__x86_64__)
    if (cap == ISA_NEON || cap == ISA_DOTPROD) return;
    if (cap >= ISA_AVX2 && kern_isa_supported(ISA_AVX2)) quant_init_avx2(k);
    if (cap >= ISA_AVX512 && kern_isa_supported(ISA_AVX512)) quant_init_avx512(k);
#elif defined(__aarch64__)
    if (cap >= ISA_NEON && kern_isa_supported(ISA_NEON)) quant_init_neon(k);
#else
    (void)cap;
#endif
}

enum { CHUNK = 1024 }; /* elements decoded at a time: stays in the first-level cache */

void quant_act_sim(const quant_kern *k, float *y, const float *x, int64_t n, float g) {
    if (!(g > 0)) g = 1e-12f;
    uint8_t codes[CHUNK / 2], scales[CHUNK / 16];
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t m = min_i64(CHUNK, n - at);
        k->act_encode(codes, scales, x + at, m, g);
        /* Blocks below the smallest scale keep their codes at 0 but are rounded to whole E2M1 steps in the simulation. */
        uint8_t tiny[CHUNK / 16];
        float kept[CHUNK];
        int tinies = 0;
        for (int64_t b = 0; b < m / 16; b++)
            if ((tiny[b] = e4m3_to_f32(scales[b]) * g < NVFP4_ACT_TINY)) {
                memcpy(kept + b * 16, x + at + b * 16, sizeof(float[16]));
                tinies++;
            }
        k->decode_f32(y + at, codes, scales, m, g);
        for (int64_t b = 0; tinies && b < m / 16; b++)
            if (tiny[b]) nvfp4_act_sim(y + at + b * 16, kept + b * 16, 16, g);
    }
}

void quant_stats_bf16(const quant_kern *k, quant_stats *s, const uint16_t *w, const uint8_t *codes,
                      const uint8_t *scales, int64_t n, float s2) {
    float y[CHUNK], b[CHUNK / 16];
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t m = min_i64(CHUNK, n - at);
        k->decode_f32(y, codes + at / 2, scales + at / 16, m, s2);
        k->error_bf16(&s->error, w + at, y, m);
        k->block_amax_bf16(b, w + at, m);
        k->blocks(&s->blocks, b, scales + at / 16, m / 16, s2);
    }
}

void quant_stats_f32(const quant_kern *k, quant_stats *s, const float *w, const uint8_t *codes, const uint8_t *scales,
                     int64_t n, float s2) {
    float y[CHUNK], b[CHUNK / 16];
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t m = min_i64(CHUNK, n - at);
        k->decode_f32(y, codes + at / 2, scales + at / 16, m, s2);
        k->error_f32(&s->error, w + at, y, m);
        k->block_amax_f32(b, w + at, m);
        k->blocks(&s->blocks, b, scales + at / 16, m / 16, s2);
    }
}

void quant_stats_fp8(const quant_kern *k, stats_error *s, const uint16_t *w, const uint8_t *codes, int64_t n,
                     float scale) {
    float y[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t m = min_i64(CHUNK, n - at);
        k->fp8_decode(y, codes + at, m, scale);
        k->error_bf16(s, w + at, y, m);
    }
}
