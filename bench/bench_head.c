/* bench_head - the screened head beside the full one and a plain read of the same bytes, interleaved; Gaussian weights. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/read_bw.h"
#include "base/rng.h"
#include "num/bf16.h"
#include "ops/ops.h"

#include "report.h"

enum { MAX_RUNS = 99, MAX_ROWS = 16, TOP = 20 };

typedef struct reader {
    const uint8_t *p;
    int64_t bytes;
    uint64_t sums[256][2];
} reader;

static void read_share(void *ctx, int thread, int threads) {
    reader *r = ctx;
    int64_t at, end;
    pool_share(r->bytes, 4096, thread, threads, &at, &end);
    const read_vec a = read_bw(r->p + at, end - at);
    memcpy(r->sums[thread], &a, sizeof a);
}

/* Sums of eight random bytes: near enough to Gaussian, and quick. Every part has a stream of its own. */
typedef struct filler {
    uint16_t *w;
    int64_t n;
} filler;

static void fill_share(void *ctx, int thread, int threads) {
    const filler *f = ctx;
    int64_t begin, end;
    pool_share(f->n, 4, thread, threads, &begin, &end);
    uint64_t s = 0x9e3779b97f4a7c15u * (uint64_t)(thread + 1);
    for (int64_t i = begin; i < end; i++) {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        int sum = 0;
        for (int k = 0; k < 64; k += 8) sum += (int)(s >> k & 255);
        f->w[i] = bf16_from_f32((float)(sum - 1020) * 1e-4f);
    }
}

typedef struct series {
    double read[MAX_RUNS], full[MAX_RUNS], top[MAX_ROWS][MAX_RUNS];
} series;

static double once(ops *o, lm_head *h, const float *x, int rows, int k) {
    int32_t ids[MAX_ROWS * TOP];
    float logits[MAX_ROWS * TOP];
    const double t0 = clock_seconds();
    o->head_top(o, ids, logits, NULL, h, x, rows, k, NULL);
    return clock_seconds() - t0;
}

static void measure(ops *o, pool *p, const uint16_t *w, int N, int K, int runs, err *e) {
    static series s;
    static reader r;
    linear *l;
    lm_head *screened, *full;
    float *x = malloc((size_t)K * MAX_ROWS * sizeof *x);
    const linear_desc d = { .name = "head", .type = DT_BF16, .rows = N, .cols = K, .data = w };
    const double t0 = clock_seconds();
    if (!o->linear_new(o, &l, &d, e) || !o->head_new(o, &screened, l, N, true, e) ||
        !o->head_new(o, &full, l, N, false, e))
        return;
    printf("%s, %s, %d threads, [%d, %d]: copy of %.3f GB made in %.2f s\n", kern_cpu_name(), o->isa, o->threads, N, K,
           (double)head_bytes(screened) / 1e9, clock_seconds() - t0);
    r = (reader){ .p = (const uint8_t *)w, .bytes = (int64_t)head_bytes(screened) };
    for (int i = -1; i < runs; i++) {
        for (int j = 0; j < K * MAX_ROWS; j++)
            x[j] = (float)(rng_uniform(7, (uint64_t)(i + 1), (uint64_t)j, 1) +
                           rng_uniform(7, (uint64_t)(i + 1), (uint64_t)j, 2) - 1);
        const int at = i < 0 ? 0 : i;
        for (int m = 1; m <= MAX_ROWS; m = m < 4 ? m + 1 : 2 * m) {
            const double t = clock_seconds();
            pool_run(p, read_share, &r);
            if (m == 1) s.read[at] = clock_seconds() - t;
            s.top[m - 1][at] = once(o, screened, x, m, TOP);
        }
        s.full[at] = once(o, full, x, 1, TOP);
    }
    double share[MAX_RUNS];
    for (int i = 0; i < runs; i++) share[i] = s.read[i] / s.top[0][i];
    const double one = median(share, runs);
    const head_counts c = head_counted(screened);
    const double read = median(s.read, runs);
    printf(
        "  read of as many bytes %.2f ms (%.2f GB/s), screened top-%d %.2f ms = %.3f of the read rate (%.3f..%.3f)\n",
        read * 1e3, (double)head_bytes(screened) / read / 1e9, TOP, median(s.top[0], runs) * 1e3, one, share[0],
        share[runs - 1]);
    printf("  full %.2f ms; screened 2, 3, 4, 8, 16 rows %.2f %.2f %.2f %.2f %.2f ms; %.0f candidates per row, %lld "
           "rows in full\n",
           median(s.full, runs) * 1e3, median(s.top[1], runs) * 1e3, median(s.top[2], runs) * 1e3,
           median(s.top[3], runs) * 1e3, median(s.top[7], runs) * 1e3, median(s.top[15], runs) * 1e3,
           (double)c.candidates / (double)c.rows, (long long)c.full);
    o->head_free(o, screened);
    o->head_free(o, full);
    o->linear_free(o, l);
    free(x);
}

int main(int argc, char **argv) {
    int threads = 0, runs = 7, N = 248320, K = 2048;
    const char *isa = NULL;
    bool help;
    const arg_opt opts[] = {
        { .type = ARG_INT, .name = "threads", .dst = &threads, .lo = 0, .hi = 256, .help = "compute threads" },
        { .type = ARG_INT, .name = "runs", .dst = &runs, .lo = 1, .hi = MAX_RUNS, .help = "runs" },
        { .type = ARG_INT, .name = "rows", .dst = &N, .lo = 1, .hi = 1000000, .help = "vocabulary" },
        { .type = ARG_INT, .name = "cols", .dst = &K, .lo = 1, .hi = 65536, .help = "hidden size" },
        { .type = ARG_STR, .name = "isa", .dst = &isa, .help = "cap" },
    };
    const arg_spec spec = { .usage = "bench_head [options]", .opts = opts, .count = ARRAY_LEN(opts) };
    arg_strings pos = { 0 };
    err e = { 0 };
    ops *o = NULL;
    pool *p = NULL;
    ops_options oo = { .isa = ISA_COUNT };
    bool ok = args_parse(&spec, argc, argv, &pos, &help, &e);
    if (ok && help) return puts("usage: bench_head [--threads N] [--runs N] [--rows N] [--cols K] [--isa NAME]"), 0;
    oo.threads = threads;
    if (isa && !kern_isa_parse(&oo.isa, isa)) oo.isa = ISA_COUNT;
    uint16_t *w = malloc((size_t)N * (size_t)K * sizeof *w);
    ok = ok && w && ops_open(&o, &oo, &e) && pool_new(&p, o->threads, &e);
    if (ok) {
        pool_run(p, fill_share, &(filler){ w, (int64_t)N * K });
        measure(o, p, w, N, K, runs, &e);
    }
    if (e.kind != ERR_NONE) fprintf(stderr, "bench_head: %s: %s\n", e.id, e.msg);
    if (o) o->close(o);
    pool_free(p);
    free(w);
    arg_strings_free(&pos);
    return err_exit_code(e.kind);
}
