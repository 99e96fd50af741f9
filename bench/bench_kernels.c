/* bench_kernels - each kernel at each level of this CPU, beside a streaming read measured in the same run.
 *
 *   bench_kernels [--json] [--isa NAME] [--threads N] [--only TEXT] [--ms N]
 *
 * Decoding shapes read weights from memory (a matrix larger than the caches): best GB/s, best streaming read with as many
 * threads, and the median share of the two measured in turn. The other shapes run from the caches on one thread:
 * GMAC/s, GB/s of weights or elements per second. Rates are the best of several repetitions, which is what a shared
 * machine lets us compare. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/read_bw.h"
#include "kern/kern.h"
#include "num/bf16.h"

#include "report.h"

/* ---- operands, filled once with small numbers; no zeros, whose state rows would decay into slow subnormals ---- */

enum { FLOATS = 4 << 20 };
static float *src, *dst, *aux;
static uint16_t *weights; /* BF16 or F16 bits: all in [1, 2) as F16, about the same as BF16 */
static int64_t weight_bytes = 256 << 20;

static bool operands_new(void) {
    src = aligned_alloc(64, FLOATS * sizeof(float));
    dst = aligned_alloc(64, FLOATS * sizeof(float));
    aux = aligned_alloc(64, FLOATS * sizeof(float));
    weights = aligned_alloc(64, (size_t)weight_bytes);
    if (!src || !dst || !aux || !weights) return false;
    for (int i = 0; i < FLOATS; i++) {
        src[i] = ((float)(i % 61) - 30.5f) * 0x1p-6f;
        aux[i] = ((float)(i % 53) - 26.5f) * 0x1p-5f;
        dst[i] = 0;
    }
    /* As float32 these are pairs of BF16: finite either way. */
    for (int64_t i = 0; i < weight_bytes / 2; i++) weights[i] = (uint16_t)(0x3c00 + i % 509);
    return true;
}

/* ---- one measurement ---- */

typedef struct job {
    const kern *k;
    void (*run)(const struct job *j, int thread, int threads);
    int64_t M, N, K;
} job;

static pool *threads_pool;
static void job_fn(void *ctx, int thread, int threads) {
    const job *j = ctx;
    j->run(j, thread, threads);
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of one call; of the thread's own time when there is one thread and the call is long, so that other programs on the
 * machine count less. */
static double once(job *j, int threads, int calls, bool own) {
    const double t0 = own ? cpu_seconds() : clock_seconds();
    for (int i = 0; i < calls; i++) {
        if (threads == 1)
            j->run(j, 0, 1);
        else
            pool_run(threads_pool, job_fn, j);
    }
    return ((own ? cpu_seconds() : clock_seconds()) - t0) / calls;
}

static double min_double(double a, double b) { return a < b ? a : b; }
typedef struct timing {
    double best;       /* seconds of one call */
    double other_best; /* of the other job */
    double ratio;      /* median of other / own, measured in turn */
} timing;

/* `j`, and `other` in turn with it (may be NULL), for about `budget` seconds. Bandwidth moves with other programs on the
 * host, so only measurements next to each other are compared. */
static timing measure_job(job *j, job *other, int threads, double budget) {
    enum { MAX = 200 };
    double ratio[MAX];
    int n = 0;
    const double first = once(j, threads, 1, false);
    const bool own = threads == 1 && first > 2e-3;
    const int calls = first < 2e-5 ? (int)(2e-5 / (first + 1e-7)) + 1 : 1;
    timing t = { 1e9, 1e9, 0 };
    const double start = clock_seconds();
    for (int rep = 0; rep < 3 || clock_seconds() - start < budget; rep++) {
        const double b = other ? once(other, threads, 1, own) : 0, a = once(j, threads, calls, own);
        t.other_best = min_double(t.other_best, b);
        t.best = min_double(t.best, a);
        if (n < MAX) ratio[n++] = b / a;
    }
    t.ratio = median(ratio, n);
    return t;
}

/* ---- what is measured ---- */

static read_vec sink[256];

static void stream(const job *j, int thread, int threads) {
    int64_t at, end;
    pool_share(j->K, 4 * 4096, thread, threads, &at, &end);
    sink[thread] = read_bw((const uint8_t *)weights + at, end - at);
}

#define GEMM(member, type)                                                                                       \
    static void member(const job *j, int thread, int threads) {                                                  \
        int64_t n, end;                                                                                          \
        pool_share(j->N, 16, thread, threads, &n, &end);                                                         \
        const type *w = (const type *)(const void *)weights;                                                     \
        if (n < end) j->k->member(dst + n, j->N, src, j->K, w + n * j->K, (int)j->M, (int)(end - n), (int)j->K); \
    }
GEMM(gemm_bf16, uint16_t)
GEMM(gemm_f16, uint16_t)
GEMM(gemm_f32, float)

#define ROW(name, ...)                                        \
    static void name(const job *j, int thread, int threads) { \
        (void)thread, (void)threads;                          \
        const kern *k = j->k;                                 \
        const int64_t n = j->N;                               \
        __VA_ARGS__;                                          \
    }
ROW(upcast, k->bf16_to_f32(dst, weights, n))
ROW(downcast, k->f32_to_bf16((uint16_t *)(void *)dst, src, n))
ROW(rmsnorm, k->rmsnorm(dst, src, aux, (int)n, 1e-6f))
ROW(gated_norm, k->gated_norm(dst, src, aux, aux + n, (int)n, 1e-6f))
ROW(l2norm, k->l2norm(dst, src, (int)n, 1e-6f, 1.0f))
ROW(silu_mul, k->silu_mul(dst, src, aux, n))
ROW(sigmoid_mul, k->sigmoid_mul(dst, src, aux, n))
ROW(add, k->add(dst, src, n))
ROW(add_scaled, k->add_scaled(dst, 0.0f, src, n))
ROW(exp_row, k->exp(dst, src, n))
ROW(scale_div, k->scale_div(dst, src, 3.0f, n))
ROW(argmax, sink[0][0] += (uint64_t)k->argmax(src, n))
ROW(nonfinite, sink[0][0] += (uint64_t)k->nonfinite(src, n))
ROW(block_max, sink[0][0] += (uint64_t)k->block_max(dst, src, n))
ROW(conv, const float *u[4] = { src, src + n, aux, aux + n }; k->conv_silu(dst, u, aux + 2 * n, 4, (int)n))
ROW(merge, float M = 0; float L = 1; k->attn_merge(dst, &M, &L, src, -0.5f, 1.0f, (int)n))
/* 32 heads of a 128 x 128 state, as one GDN layer has them: 2 MB. */
static void gdn_heads(const kern *k, int64_t heads, int tokens) {
    gdn_token t[64];
    for (int i = 0; i < tokens; i++) t[i] = (gdn_token){ src, src + 128, src + 256, dst + 128 * i, 0.5f, 0.9f };
    for (int64_t h = 0; h < heads; h++) k->gdn_steps(aux + h * 16384, 128, t, tokens, tokens, dst + 16384, 128, 128);
}
ROW(gdn, gdn_heads(k, n, (int)j->M))
ROW(attn_f32, k->attn_tile_f32(dst, dst + 8192, dst + 8256, src, src + 65536, aux, 512, 64, (int)n, 256, 0.0625f))
ROW(attn_bf16,
    k->attn_tile_bf16(dst, dst + 8192, dst + 8256, src, weights, weights + 65536, 512, 64, (int)n, 256, 0.0625f))
static uint8_t codes[2][64 * 512]; /* zeros take the same time */
ROW(attn_fp8,
    k->attn_tile_fp8(dst, dst + 8192, dst + 8256, src, codes[0], codes[1], 512, 64, (int)n, 256, 0.0625f, dst + 16384))

enum { GB, GMAC, GELEM };
typedef struct line {
    const char *name;
    void (*run)(const job *j, int thread, int threads);
    int64_t M, N, K;
    int unit;
    double amount; /* bytes, MACs or elements of one call; 0: M * N * K */
    bool memory;   /* all thread counts, against the streaming read */
} line;

#define WIDE 32768 /* rows of 2048: 128 MB of BF16 */
static const line lines[] = {
    { "gemm_bf16 M=1", gemm_bf16, 1, WIDE, 2048, GB, 2.0 * WIDE * 2048, true },
    { "gemm_bf16 M=2", gemm_bf16, 2, WIDE, 2048, GB, 2.0 * WIDE * 2048, true },
    { "gemm_bf16 M=3", gemm_bf16, 3, WIDE, 2048, GB, 2.0 * WIDE * 2048, true },
    { "gemm_bf16 M=4", gemm_bf16, 4, WIDE, 2048, GB, 2.0 * WIDE * 2048, true },
    { "gemm_bf16 M=8", gemm_bf16, 8, WIDE, 2048, GB, 2.0 * WIDE * 2048, true },
    { "gemm_bf16 M=1 K=512", gemm_bf16, 1, 4 * WIDE, 512, GB, 2.0 * WIDE * 2048, true },
    { "gemm_bf16 M=1 K=4096", gemm_bf16, 1, WIDE / 2, 4096, GB, 2.0 * WIDE * 2048, true },
    { "gemm_f16 M=1", gemm_f16, 1, WIDE, 2048, GB, 2.0 * WIDE * 2048, true },
    { "gemm_f32 M=1", gemm_f32, 1, WIDE / 2, 2048, GB, 2.0 * WIDE * 2048, true },
    { "gemm_bf16 M=1 in L2", gemm_bf16, 1, 256, 2048, GB, 2.0 * 256 * 2048, false },
    { "gemm_bf16 M=4 in L2", gemm_bf16, 4, 256, 2048, GB, 2.0 * 256 * 2048, false },
    { "gemm_bf16 M=16", gemm_bf16, 16, 512, 2048, GMAC, 0, false },
    { "gemm_bf16 M=128", gemm_bf16, 128, 512, 2048, GMAC, 0, false },
    { "gemm_bf16 M=512", gemm_bf16, 512, 2048, 2048, GMAC, 0, false },
    { "gemm_bf16 M=128 K=512", gemm_bf16, 128, 2048, 512, GMAC, 0, false },
    { "gemm_f16 M=128", gemm_f16, 128, 512, 2048, GMAC, 0, false },
    { "gemm_f32 M=128", gemm_f32, 128, 512, 2048, GMAC, 0, false },
    { "bf16_to_f32", upcast, 0, 65536, 0, GELEM, 65536, false },
    { "f32_to_bf16", downcast, 0, 65536, 0, GELEM, 65536, false },
    { "rmsnorm 2048", rmsnorm, 0, 2048, 0, GELEM, 2048, false },
    { "gated_norm 128", gated_norm, 0, 128, 0, GELEM, 128, false },
    { "l2norm 128", l2norm, 0, 128, 0, GELEM, 128, false },
    { "silu_mul", silu_mul, 0, 4096, 0, GELEM, 4096, false },
    { "sigmoid_mul", sigmoid_mul, 0, 4096, 0, GELEM, 4096, false },
    { "add", add, 0, 2048, 0, GELEM, 2048, false },
    { "add_scaled", add_scaled, 0, 2048, 0, GELEM, 2048, false },
    { "exp", exp_row, 0, 4096, 0, GELEM, 4096, false },
    { "scale_div", scale_div, 0, 4096, 0, GELEM, 4096, false },
    { "argmax 248320", argmax, 0, 248320, 0, GELEM, 248320, false },
    { "nonfinite 248320", nonfinite, 0, 248320, 0, GELEM, 248320, false },
    { "block_max 248320", block_max, 0, 248320, 0, GELEM, 248320, false },
    { "conv_silu 8192", conv, 0, 8192, 0, GELEM, 8192, false },
    { "gdn 1 head, 1 token", gdn, 1, 1, 0, GMAC, 3.0 * 16384, false },
    { "gdn 32 heads, 1 token", gdn, 1, 32, 0, GMAC, 3.0 * 16384 * 32, false },
    { "gdn 32 heads, 3 tokens", gdn, 3, 32, 0, GMAC, 3.0 * 16384 * 32 * 3, false },
    { "gdn 32 heads, 64", gdn, 64, 32, 0, GMAC, 3.0 * 16384 * 32 * 64, false },
    { "attn_tile_f32 G=1", attn_f32, 0, 1, 0, GMAC, 2.0 * 64 * 256, false },
    { "attn_tile_f32 G=8", attn_f32, 0, 8, 0, GMAC, 2.0 * 64 * 256 * 8, false },
    { "attn_tile_bf16 G=8", attn_bf16, 0, 8, 0, GMAC, 2.0 * 64 * 256 * 8, false },
    { "attn_tile_fp8 G=8", attn_fp8, 0, 8, 0, GMAC, 2.0 * 64 * 256 * 8, false },
    { "attn_tile_fp8 G=24", attn_fp8, 0, 24, 0, GMAC, 2.0 * 64 * 256 * 24, false },
    { "attn_merge 256", merge, 0, 256, 0, GELEM, 256, false },
};

static const char *const units[] = { "GB/s", "GMAC/s", "Gelem/s" };

typedef struct settings {
    double budget;
    bool json;
    int shown;
} settings;

static void show(settings *s, const line *l, const char *isa, int threads, double rate, double read, double share) {
    if (s->json) {
        printf("%s\n  {\"kernel\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"rate\":%.3f,\"unit\":\"%s\"",
               s->shown++ ? "," : "", l->name, isa, threads, rate, units[l->unit]);
        if (l->memory) printf(",\"read_gb_s\":%.3f,\"share\":%.3f", read, share);
        printf("}");
    } else {
        printf("%-22s %-7s %d threads %8.2f %s", l->name, isa, threads, rate, units[l->unit]);
        if (l->memory) printf("  streaming read %.2f, share %.2f", read, share);
        printf("\n");
    }
    fflush(stdout);
}

static void measure(settings *s, const line *l, const kern *k, int max_threads) {
    job j = { .k = k, .run = l->run, .M = l->M, .N = l->N, .K = l->K }, read = { .run = stream, .K = 2 * WIDE * 2048 };
    const double amount = l->amount > 0 ? l->amount : (double)l->M * (double)l->N * (double)l->K;
    for (int t = 1; t <= (l->memory ? max_threads : 1);
         t = t < max_threads && 2 * t > max_threads ? max_threads : 2 * t) {
        err e = { 0 };
        if (t > 1 && !pool_new(&threads_pool, t, &e)) return;
        const timing r = measure_job(&j, l->memory ? &read : NULL, t, s->budget);
        show(s, l, kern_isa_name(k->isa), t, amount / r.best / 1e9, (double)read.K / r.other_best / 1e9, r.ratio);
        if (t > 1) pool_free(threads_pool);
    }
}

int main(int argc, char **argv) {
    int threads = 0, ms = 60;
    const char *isa = NULL, *only = NULL;
    settings s = { 0 };
    bool help;
    const arg_opt opts[] = {
        { .type = ARG_INT,
          .name = "threads",
          .dst = &threads,
          .lo = 0,
          .hi = 256,
          .help = "most threads (0: all CPUs)" },
        { .type = ARG_INT, .name = "ms", .dst = &ms, .lo = 1, .hi = 10000, .help = "time per figure" },
        { .type = ARG_STR, .name = "isa", .dst = &isa, .help = "this level only: ref avx2 avx512 neon" },
        { .type = ARG_STR, .name = "only", .dst = &only, .help = "kernels with this in their name" },
        { .type = ARG_FLAG, .name = "json", .dst = &s.json, .help = "one JSON object" },
    };
    const arg_spec spec = { .usage = "bench_kernels [options]", .opts = opts, .count = ARRAY_LEN(opts) };
    arg_strings pos = { 0 };
    err e = { 0 };
    if (!args_parse(&spec, argc, argv, &pos, &help, &e)) return fprintf(stderr, "bench_kernels: %s\n", e.msg), 2;
    if (help) {
        print_help(&spec);
        return 0;
    }
    s.budget = ms * 1e-3;
    if (threads <= 0) threads = pool_cpus();
    if (!operands_new()) return fprintf(stderr, "bench_kernels: not enough memory\n"), 4;
    if (s.json)
        printf("{\"schema\":\"nibble.bench.kernels/1\",\"cpu\":\"%s\",\"results\":[", kern_cpu_name());
    else
        printf("%s, up to %d threads\n", kern_cpu_name(), threads);
    for (size_t i = 0; i < ARRAY_LEN(lines); i++) {
        if (only && !strstr(lines[i].name, only)) continue;
        for (int level = 0; level < ISA_COUNT; level++) {
            kern k;
            kern_init(&k, (kern_isa)level);
            if ((int)k.isa != level || (isa && strcmp(isa, kern_isa_name(k.isa)) != 0)) continue;
            /* The reference is the specification; its large shapes would take minutes. */
            if (level == ISA_REF && !isa && (lines[i].memory || lines[i].M >= 128)) continue;
            measure(&s, &lines[i], &k, threads);
        }
    }
    if (s.json) printf("\n]}\n");
    return 0;
}
