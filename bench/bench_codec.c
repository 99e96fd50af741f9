/* bench_codec - rates of the quantization kernels, one thread, every level this CPU has.
 * usage: bench_codec [--isa NAME] [--seconds S] [--mb N]
 * Two working sets: one that stays in the second-level cache, one of N MB (default 256) that comes from memory.
 * GB/s counts the full-precision side: BF16 or float32 bytes in when encoding, out when decoding. Levels are
 * interleaved and the best of several rounds is shown, since neighbours on the machine only ever slow a run down. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kern/quant.h"
#include "num/bf16.h"

static uint16_t *h;
static float *f;
static uint8_t *codes, *scales, *bytes;
static float s2;
static volatile float sink;

typedef void run_fn(const quant_kern *k, int64_t n);

static void amax_bf16(const quant_kern *k, int64_t n) { sink = k->amax_bf16(h, n); }
static void amax_f32(const quant_kern *k, int64_t n) { sink = k->amax_f32(f, n); }
static void nonfinite_bf16(const quant_kern *k, int64_t n) { sink = (float)k->nonfinite_bf16(h, n); }
static void encode_bf16(const quant_kern *k, int64_t n) { k->encode_bf16(codes, scales, h, n, s2, ARITH_CUDA); }
static void encode_f32(const quant_kern *k, int64_t n) { k->encode_f32(codes, scales, f, n, s2, ARITH_CUDA); }
static void codes_bf16(const quant_kern *k, int64_t n) { k->codes_bf16(codes, scales, h, n, s2); }
static void search_mse(const quant_kern *k, int64_t n) {
    quant_encode_bf16(k, QUANT_MSE, codes, scales, h, n, s2, ARITH_CUDA);
}
static void search_4_6(const quant_kern *k, int64_t n) {
    quant_encode_bf16(k, QUANT_FOUR_OVER_SIX, codes, scales, h, n, s2, ARITH_CUDA);
}
static void act_encode(const quant_kern *k, int64_t n) { k->act_encode(codes, scales, f, n, s2); }
static void decode_f32(const quant_kern *k, int64_t n) { k->decode_f32(f, codes, scales, n, s2); }
static void decode_bf16(const quant_kern *k, int64_t n) { k->decode_bf16(h, codes, scales, n, s2); }
static void fp8_div(const quant_kern *k, int64_t n) { k->fp8_div(bytes, f, n, 0.01f); }
static void fp8_weight(const quant_kern *k, int64_t n) { k->fp8_weight(bytes, h, n, 0.01f); }
static void fp8_decode(const quant_kern *k, int64_t n) { k->fp8_decode(f, bytes, n, 0.01f); }
static void stats_bf16(const quant_kern *k, int64_t n) {
    quant_stats s = { 0 };
    quant_stats_bf16(k, &s, h, codes, scales, n, s2);
    sink = (float)stats_error_relative(&s.error);
}

static const struct {
    const char *name;
    int bytes; /* per element */
    run_fn *run;
} kernels[] = {
    { "amax_bf16", 2, amax_bf16 },     { "amax_f32", 4, amax_f32 },     { "nonfinite_bf16", 2, nonfinite_bf16 },
    { "encode_bf16", 2, encode_bf16 }, { "encode_f32", 4, encode_f32 }, { "codes_bf16", 2, codes_bf16 },
    { "act_encode", 4, act_encode },   { "stats_bf16", 2, stats_bf16 }, { "decode_f32", 4, decode_f32 },
    { "decode_bf16", 2, decode_bf16 }, { "fp8_div", 4, fp8_div },       { "fp8_weight", 2, fp8_weight },
    { "fp8_decode", 4, fp8_decode },   { "search mse", 2, search_mse }, { "search 4/6", 2, search_4_6 },
};

static void refill(int64_t n) {
    uint64_t x = 1;
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int j = 0; j < 4; j++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(x >> 40) * 0x1p-24f;
        }
        f[i] = (sum - 2) * 0.05f;
        h[i] = bf16_from_f32(f[i]);
    }
}

static void measure(const quant_kern *all, int levels, int64_t n, double seconds) {
    for (size_t j = 0; j < ARRAY_LEN(kernels); j++) {
        double best[ISA_COUNT] = { 0 };
        for (int round = 0; round < 5; round++)
            for (int l = 0; l < levels; l++) {
                const double t0 = clock_seconds(), end = t0 + seconds / 5;
                double t = t0, done = 0;
                do {
                    kernels[j].run(&all[l], n);
                    done += (double)n * kernels[j].bytes;
                    t = clock_seconds();
                } while (t < end);
                const double rate = done / (t - t0) * 1e-9;
                if (rate > best[l]) best[l] = rate;
            }
        printf("%-16s", kernels[j].name);
        for (int l = 0; l < levels; l++) printf(" %9.2f", best[l]);
        printf("\n");
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    kern_isa only = ISA_COUNT;
    double seconds = 0.25;
    int64_t mb = 256;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--isa") == 0 && kern_isa_parse(&only, argv[i + 1])) continue;
        if (strcmp(argv[i], "--seconds") == 0 && (seconds = atof(argv[i + 1])) > 0) continue;
        if (strcmp(argv[i], "--mb") == 0 && (mb = atoi(argv[i + 1])) > 0) continue;
        fprintf(stderr, "usage: bench_codec [--isa NAME] [--seconds S] [--mb N]\n");
        return 2;
    }
    quant_kern all[ISA_COUNT];
    int levels = 0;
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        quant_kern k;
        quant_kern_init(&k, (kern_isa)isa);
        if (k.isa == (kern_isa)isa && (only == ISA_COUNT || only == k.isa)) all[levels++] = k;
    }
    const int64_t small = 64 * 1024, n = mb * 1024 * 1024 / 2;
    h = xmalloc((size_t)n * 2);
    f = xmalloc((size_t)n * 4);
    codes = xmalloc((size_t)n / 2);
    scales = xmalloc((size_t)n / 16);
    bytes = xcalloc((size_t)n, 1);
    refill(n);
    s2 = nvfp4_scale_2(stats_amax_bf16(h, n), ARITH_CUDA);
    for (int big = 0; big < 2 && levels; big++) {
        const int64_t m = big ? n : small;
        all[levels - 1].encode_bf16(codes, scales, h, m, s2, ARITH_CUDA);
        printf("%s%lld K elements, GB/s\n%-16s", big ? "\n" : "", (long long)m / 1024, "");
        for (int l = 0; l < levels; l++) printf(" %9s", kern_isa_name(all[l].isa));
        printf("\n");
        measure(all, levels, m, big ? seconds * 2 : seconds);
    }
    free(h);
    free(f);
    free(codes);
    free(scales);
    free(bytes);
    return 0;
}
