/* bench_nv - packed NVFP4: few rows beside a plain read of the same bytes, many rows as dot and as gemm, a layer of
 * experts. What is compared runs in turn; medians. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/read_bw.h"
#include "kern/nv.h"

#include "report.h"

enum { MAX_RUNS = 99, MAX_THREADS = 256, MAX_M = 1024, EXPERTS = 256, TOP = 8, HIDDEN = 2048, INNER = 512 };

static uint64_t state = 0x9e3779b97f4a7c15u;
static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

/* Scale codes over three octaves, as blocks of Gaussian values have them; `wide`: of every size. */
static uint8_t scale_code(bool wide) { return wide ? (uint8_t)(draw() % 127) : (uint8_t)(0x66 + draw() % 24); }

typedef struct bench {
    nv_kern k;
    uint8_t *weights; /* panels */
    int64_t bytes;
    nv_act act[MAX_M];
    const nv_act *row[MAX_M];
    char *act_mem;
    uint8_t *planes[MAX_THREADS + 1], *work[MAX_THREADS];
    float *y[MAX_THREADS];
    uint64_t sums[MAX_THREADS][8];
    pool *pool;
    int threads, N, K, M, runs;
    bool wide, cpu_time, use_gemm, json;
    int shown;
} bench;

static void fill_weights(uint8_t *p, int64_t bytes) {
    for (int64_t g = 0; g < bytes; g += NV_GROUP_BYTES, p += NV_GROUP_BYTES) {
        for (int i = 0; i < 64; i++) p[i] = scale_code(false);
        for (int i = 64; i < NV_GROUP_BYTES; i += 8) {
            const uint64_t v = draw();
            memcpy(p + i, &v, 8);
        }
    }
}

static void fill_inputs(bench *b, int K, int M) {
    uint8_t codes[4096], scales[512];
    const size_t bytes = nv_act_bytes(K);
    b->K = K;
    b->M = M;
    for (int m = 0; m < M; m++) {
        for (int i = 0; i < K / 2; i++) codes[i] = (uint8_t)draw();
        for (int i = 0; i < K / 16; i++) scales[i] = scale_code(b->wide);
        b->act[m] = nv_act_at(b->act_mem + bytes * (size_t)m, K);
        b->k.act_fp4(&b->act[m], codes, scales, K);
        b->row[m] = &b->act[m];
    }
}

/* ---- what is timed ---- */

static void make_planes(const bench *b, uint8_t *out, const nv_act *const *rows, int M, int K) {
    for (int m = 0; m < M; m += 16) b->k.planes(out + m / 16 * nv_tile_bytes(K), rows + m, M - m < 16 ? M - m : 16, K);
}

static void dense(void *ctx, int thread, int threads) {
    bench *b = ctx;
    int64_t begin, end, first, last;
    const int64_t stride = nv_panel_bytes(b->K);
    pool_share(nv_panels(b->N), 1, thread, threads, &begin, &end);
    float *y = b->y[0] + begin * 16;
    if (!b->use_gemm) {
        b->k.dot(y, b->N, b->weights + begin * stride, stride, (int)(end - begin), b->K, b->act, b->M);
        return;
    }
    uint8_t *planes = b->planes[MAX_THREADS];
    pool_share(b->M, 16, thread, threads, &first, &last);
    if (last > first)
        make_planes(b, planes + first / 16 * nv_tile_bytes(b->K), b->row + first, (int)(last - first), b->K);
    if (threads > 1) pool_barrier(b->pool);
    b->k.gemm(y, b->N, b->weights + begin * stride, stride, (int)(end - begin), b->K, planes, b->M, b->work[thread]);
}

static void one_matrix(bench *b, int thread, const uint8_t *w, int N, int K, const nv_act *a, const nv_act *const *rows,
                       int M) {
    const int64_t stride = nv_panel_bytes(K);
    if (!b->use_gemm) {
        b->k.dot(b->y[thread], N, w, stride, nv_panels(N), K, a, M);
        return;
    }
    make_planes(b, b->planes[thread], rows, M, K);
    b->k.gemm(b->y[thread], N, w, stride, nv_panels(N), K, b->planes[thread], M, b->work[thread]);
}

/* All experts with an equal share of the rows; both matrices read their inputs from the same rows here. */
static void layer(void *ctx, int thread, int threads) {
    bench *b = ctx;
    int64_t begin, end;
    const int64_t up = nv_matrix_bytes(2 * INNER, HIDDEN), down = nv_matrix_bytes(HIDDEN, INNER);
    pool_share(EXPERTS, 1, thread, threads, &begin, &end);
    for (int64_t x = begin; x < end; x++) {
        const uint8_t *w = b->weights + x * (up + down);
        one_matrix(b, thread, w, 2 * INNER, HIDDEN, b->act, b->row, b->M);
        one_matrix(b, thread, w + up, HIDDEN, INNER, b->act, b->row, b->M);
    }
}

static void stream(void *ctx, int thread, int threads) {
    bench *b = ctx;
    int64_t begin, end;
    pool_share(nv_matrix_bytes(b->N, b->K), 4096, thread, threads, &begin, &end);
    const read_vec v = read_bw(b->weights + begin, end - begin);
    memcpy(b->sums[thread], &v, sizeof v);
}

/* CPU time of all threads, shared out, is what is left to compare on a machine with other work on it. */
static double now(const bench *b) {
    struct timespec t;
    if (!b->cpu_time) return clock_seconds();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return ((double)t.tv_sec + 1e-9 * (double)t.tv_nsec) / b->threads;
}

static double timed(bench *b, pool_fn *fn, bool use_gemm) {
    b->use_gemm = use_gemm;
    const double t0 = now(b);
    if (b->threads > 1)
        pool_run(b->pool, fn, b);
    else
        fn(b, 0, 1);
    return now(b) - t0;
}

/* ---- results ---- */

/* amount over median time of a, and of b where there is one; ratio: median of b's time over a's. */
static void show(bench *b, const char *what, const char *unit, double amount, double *ta, const char *other,
                 double *tb) {
    double ratio[MAX_RUNS];
    for (int i = 0; i < b->runs; i++) ratio[i] = tb ? tb[i] / ta[i] : 0;
    const double one = median(ta, b->runs), two = tb ? median(tb, b->runs) : 0, r = median(ratio, b->runs);
    const char *isa = kern_isa_name(b->k.isa);
    if (b->json) {
        printf("%s\n  "
               "{\"what\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"rows\":%d,\"ms\":%.4f,\"rate\":%.3f,\"unit\":\"%s\"",
               b->shown++ ? "," : "", what, isa, b->threads, b->M, one * 1e3, amount / one / 1e9, unit);
        if (tb) printf(",\"%s\":%.3f,\"ratio\":%.3f", other, amount / two / 1e9, r);
        printf("}");
    } else {
        printf("%-20s M %4d %-7s %d threads %9.3f ms %8.2f %s (best %.2f)", what, b->M, isa, b->threads, one * 1e3,
               amount / one / 1e9, unit, amount / ta[0] / 1e9);
        if (tb) printf("   %s %.2f, ratio %.3f", other, amount / two / 1e9, r);
        printf("\n");
    }
    fflush(stdout);
}

static void few_rows(bench *b) {
    double dot[MAX_RUNS], read[MAX_RUNS];
    b->N = 65536;
    for (int M = 1; M <= 4; M++) {
        fill_inputs(b, HIDDEN, M);
        for (int i = -1; i < b->runs; i++) {
            const double r = timed(b, stream, false), d = timed(b, dense, false);
            if (i >= 0) read[i] = r, dot[i] = d;
        }
        show(b, "dot 65536x2048", "GB/s", (double)(nv_matrix_bytes(b->N, b->K)), dot, "read", read);
    }
}

static void many_rows(bench *b, bool layers) {
    static const int shape[][3] = { { 128, 12288, 2048 }, { 512, 12288, 2048 }, { 512, 2048, 4096 }, { 512, 2048, 512 },
                                    { 16, 1024, 2048 },   { 16, 2048, 512 },    { 8, 12288, 2048 } };
    double fast[MAX_RUNS], dot[MAX_RUNS];
    const bool both = b->k.gemm != NULL;
    for (size_t s = 0; s < ARRAY_LEN(shape) && !layers; s++) {
        fill_inputs(b, shape[s][2], shape[s][0]);
        b->N = shape[s][1];
        for (int i = -1; i < b->runs; i++) {
            const double d = timed(b, dense, false), g = both ? timed(b, dense, true) : d;
            if (i >= 0) fast[i] = g, dot[i] = d;
        }
        char what[64];
        snprintf(what, sizeof what, "%s %dx%d", both ? "gemm" : "dot", b->N, b->K);
        show(b, what, "GMAC/s", (double)b->M * b->N * b->K, fast, "dot", both ? dot : NULL);
    }
    for (int M = 128; M <= 512 && layers; M *= 2) {
        fill_inputs(b, HIDDEN, M * TOP / EXPERTS);
        for (int i = -1; i < b->runs; i++) {
            const double d = timed(b, layer, false), g = both ? timed(b, layer, true) : d;
            if (i >= 0) fast[i] = g, dot[i] = d;
        }
        char what[64];
        snprintf(what, sizeof what, "experts, %d tokens", M);
        show(b, what, "GMAC/s", (double)M * TOP * 3 * INNER * HIDDEN, fast, "dot", both ? dot : NULL);
    }
}

static bool bench_new(bench *b, int threads, err *e) {
    const size_t planes = (size_t)(nv_tile_bytes(4096) * MAX_M / 16), y = (size_t)MAX_M * 65536;
    b->bytes = EXPERTS * 3 * nv_matrix_bytes(INNER, HIDDEN);
    b->weights = aligned_alloc(4096, (size_t)(b->bytes + 4095) / 4096 * 4096);
    b->act_mem = aligned_alloc(64, nv_act_bytes(4096) * MAX_M);
    bool ok = b->weights && b->act_mem;
    for (int t = 0; t < threads; t++) {
        b->work[t] = aligned_alloc(64, 1 << 20);
        b->planes[t] = aligned_alloc(64, planes / 8);
        b->y[t] = malloc((t ? y / 16 : y) * sizeof(float));
        ok = ok && b->work[t] && b->planes[t] && b->y[t];
    }
    b->planes[MAX_THREADS] = aligned_alloc(64, planes);
    if (!ok || !b->planes[MAX_THREADS]) return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "bench_nv: not enough memory");
    fill_weights(b->weights, b->bytes);
    return true;
}
static void bench_free(bench *b) {
    free(b->weights);
    free(b->act_mem);
    for (int t = 0; t <= MAX_THREADS; t++) free(b->planes[t]);
    for (int t = 0; t < MAX_THREADS; t++) free(b->work[t]), free(b->y[t]);
}

int main(int argc, char **argv) {
    static bench b;
    int threads = 0;
    const char *isa = NULL, *only = NULL;
    bool help;
    b.runs = 7;
    const arg_opt opts[] = {
        { .type = ARG_INT,
          .name = "threads",
          .dst = &threads,
          .hi = MAX_THREADS,
          .help = "most threads (0: all CPUs)" },
        { .type = ARG_INT, .name = "runs", .dst = &b.runs, .lo = 1, .hi = MAX_RUNS, .help = "runs per figure" },
        { .type = ARG_STR, .name = "isa", .dst = &isa, .help = "this level only: avx2 avx512 amx neon" },
        { .type = ARG_STR, .name = "only", .dst = &only, .help = "few | many | experts" },
        { .type = ARG_FLAG, .name = "wide", .dst = &b.wide, .help = "inputs that need a third digit everywhere" },
        { .type = ARG_FLAG, .name = "cpu-time", .dst = &b.cpu_time, .help = "CPU time instead of elapsed time" },
        { .type = ARG_FLAG, .name = "json", .dst = &b.json, .help = "one JSON object" },
    };
    const arg_spec spec = { .usage = "bench_nv [options]", .opts = opts, .count = ARRAY_LEN(opts) };
    arg_strings pos = { 0 };
    err e = { 0 };
    if (!args_parse(&spec, argc, argv, &pos, &help, &e)) return fprintf(stderr, "bench_nv: %s\n", e.msg), 2;
    if (help) {
        print_help(&spec);
        return 0;
    }
    if (threads <= 0) threads = pool_cpus();
    const bool ok = bench_new(&b, threads, &e);
    if (b.json) printf("{\"schema\":\"nibble.bench.nv/1\",\"cpu\":\"%s\",\"results\":[", kern_cpu_name());
    for (int level = ISA_AVX2; ok && level < ISA_COUNT; level++)
        for (int t = 1; t <= threads; t = t < threads && 2 * t > threads ? threads : 2 * t) {
            nv_kern_init(&b.k, (kern_isa)level);
            if ((int)b.k.isa != level || (isa && strcmp(isa, kern_isa_name(b.k.isa)) != 0)) continue;
            b.threads = t;
            if (t > 1 && !pool_new(&b.pool, t, &e)) break;
            if (!b.k.gemm && (!only || strcmp(only, "few") == 0)) few_rows(&b); /* gemm levels share another's dot */
            if (!only || strcmp(only, "many") == 0) many_rows(&b, false);
            if (!only || strcmp(only, "experts") == 0) many_rows(&b, true);
            if (t > 1) pool_free(b.pool);
        }
    if (b.json) printf("\n]}\n");
    if (e.kind != ERR_NONE) fprintf(stderr, "bench_nv: %s: %s\n", e.id, e.msg);
    bench_free(&b);
    arg_strings_free(&pos);
    return err_exit_code(e.kind);
}
