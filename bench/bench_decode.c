/* bench_decode - single-sequence decoding of a BF16 model beside the memory it has to read.
 *
 * In each run: a streaming read (read_bw.h) of the bytes one token needs (the same mapped weights, the same number of threads, other
 * experts each time, as decoding does), then N greedy tokens without drafts, then with drafts when there is a head. The
 * share is decode's bytes per second over the read's, run by run; medians and spread are printed. On a machine that others use,
 * too, the share of the fastest token and the fastest read of all runs says more: it is printed beside them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/args.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/read_bw.h"
#include "engine/engine.h"

#include "report.h"

typedef struct piece {
    const uint8_t *p;
    size_t bytes;
} piece;

typedef struct reader {
    piece *v;
    int n;
    size_t total;
    read_vec sums[256];
} reader;

static void add(reader *r, const void *p, size_t bytes) {
    if (!p || !bytes) return;
    r->v = xrealloc(r->v, (size_t)(r->n + 1) * sizeof *r->v);
    r->v[r->n++] = (piece){ p, bytes };
    r->total += bytes;
}

static void add_mat(reader *r, const wmat *m) {
    add(r, m->data, (size_t)m->rows * (size_t)m->cols * (size_t)dtype_bytes(m->type));
}

static void add_layer(reader *r, const wlayer *l, int topk, int salt) {
    const wmat *all[LAYER_MATS];
    wlayer_mats(all, l);
    for (int i = 0; i < LAYER_MATS; i++) add_mat(r, all[i]);
    const wexperts *x = &l->ffn.experts;
    const size_t bytes = (size_t)x->inter * (size_t)x->hidden * (size_t)dtype_bytes(x->type);
    for (int i = 0; i < topk && x->count > 0; i++) {
        const int at = (int)(((unsigned)salt * 2654435761u + (unsigned)i * 37u) % (unsigned)x->count);
        add(r, x->gate[at], bytes);
        add(r, x->up[at], bytes);
        add(r, x->down[at], bytes);
    }
}

/* The bytes of one token; `salt` picks the experts. */
static void collect(reader *r, const engine *g, int salt) {
    r->n = 0;
    r->total = 0;
    for (int i = 0; i < g->config.layers; i++) add_layer(r, &g->w.layers[i], g->config.topk, salt * 64 + i);
    wmat head = g->w.head;
    head.rows = g->n.real_vocab;
    add_mat(r, &head);
}

static void read_share(void *ctx, int thread, int threads) {
    reader *r = ctx;
    read_vec sum = { 0 };
    for (int i = 0; i < r->n; i++) {
        int64_t at, end;
        pool_share((int64_t)r->v[i].bytes, 4 * 4096, thread, threads, &at, &end);
        sum += read_bw(r->v[i].p + at, end - at);
    }
    r->sums[thread] = sum;
}

static double min_double(double a, double b) { return a < b ? a : b; }

/* Time between tokens: the shortest one is the token that nothing disturbed. */
typedef struct stopwatch {
    double last, best;
} stopwatch;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)id, (void)logprob, (void)top, (void)values;
    stopwatch *w = ctx;
    const double now = clock_seconds();
    if (w->last > 0) w->best = min_double(w->best, now - w->last);
    w->last = now;
    return true;
}

static double decode_rate(engine *g, int tokens, int depth, double *accept, double *best_token, err *e) {
    int32_t prompt[16];
    session s;
    gen_result r;
    stopwatch w = { 0, 1e9 };
    for (int i = 0; i < 16; i++) prompt[i] = i * 7 % g->n.real_vocab;
    if (!session_open(&s, g, depth > 0, e)) return 0;
    const gen_options opt = { .max_tokens = tokens, .depth = depth, .on_token = on_token, .ctx = &w };
    const bool ok = session_set(&s, prompt, 16, e) && session_generate(&s, &opt, &r, e);
    session_close(&s);
    if (accept) *accept = ok ? gen_accept_length(&r) : 0;
    if (best_token) *best_token = min_double(*best_token, w.best);
    return ok ? (r.output_tokens - 1) / r.decode_seconds : 0;
}

enum { MAX_RUNS = 99, READS = 8 };

typedef struct series {
    double read_gb[MAX_RUNS], rate[MAX_RUNS], share[MAX_RUNS], spec[MAX_RUNS], accept, gb_per_token;
    double best_read, best_token; /* seconds for the bytes of one token */
    int n;
} series;

static bool one_run(series *s, engine *g, pool *p, reader *r, int tokens, int salt, bool count, err *e) {
    double bytes = 0;
    const double t0 = clock_seconds();
    for (int k = 0; k < READS; k++) {
        collect(r, g, salt * READS + k);
        const double t = clock_seconds();
        pool_run(p, read_share, r);
        if (count) s->best_read = min_double(s->best_read, clock_seconds() - t);
        bytes += (double)r->total;
    }
    const double read = bytes / (clock_seconds() - t0) / 1e9;
    const double rate = decode_rate(g, tokens, 0, NULL, count ? &s->best_token : NULL, e);
    const double spec = g->n.has_mtp && e->kind == ERR_NONE ? decode_rate(g, tokens, 2, &s->accept, NULL, e) : 0;
    if (e->kind != ERR_NONE) return false;
    s->gb_per_token = (double)r->total / 1e9;
    if (!count) return true;
    s->read_gb[s->n] = read;
    s->rate[s->n] = rate;
    s->spec[s->n] = spec;
    s->share[s->n++] = rate * s->gb_per_token / read;
    return true;
}

/* Map every page once, so that page faults of the first touch count for neither side. */
static void touch(const engine *g) {
    volatile uint8_t sink = 0;
    for (int i = 0; i < g->files.shard_count; i++)
        for (size_t at = 0; at < g->files.shards[i].map.size; at += 4096) sink ^= g->files.shards[i].map.data[at];
    (void)sink;
}

static void report(series *s, const engine *g, bool as_json) {
    struct rusage ru;
    getrusage(RUSAGE_SELF, &ru);
    const double share = median(s->share, s->n), rate = median(s->rate, s->n), read = median(s->read_gb, s->n),
                 spec = median(s->spec, s->n);
    printf(as_json ? "{\"schema\":\"nibble.bench.decode/"
                     "1\",\"cpu\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"gb_per_token\":%.4f,"
                     "\"read_gb_s\":%.2f,\"tokens_s\":%.2f,\"share\":%.3f,\"share_min\":%.3f,\"share_max\":%.3f,"
                     "\"share_best\":%.3f,"
                     "\"spec2_tokens_s\":%.2f,\"accept_length\":%.3f,\"peak_rss_gb\":%.3f,\"tensors_gb\":%.3f}\n"
                   : "%s, %s, %d threads: %.4f GB per token, streaming read %.2f GB/s\n  decode %.2f tokens/s = %.3f "
                     "of the read "
                     "rate (%.3f..%.3f), fastest token %.3f of the fastest read\n  with 2 drafts %.2f tokens/s, accept "
                     "length %.3f\n  peak RSS %.3f GB, "
                     "tensors %.3f GB\n",
           kern_cpu_name(), g->o->isa, g->o->threads, s->gb_per_token, read, rate, share, s->share[0],
           s->share[s->n - 1], s->best_read / s->best_token, spec, s->accept, (double)ru.ru_maxrss / 1e6,
           (double)g->files.tensor_bytes / 1e9);
}

int main(int argc, char **argv) {
    int threads = 0, tokens = 48, runs = 5;
    const char *isa = NULL;
    bool as_json = false, help;
    const arg_opt opts[] = {
        { .type = ARG_INT, .name = "threads", .dst = &threads, .lo = 0, .hi = 256, .help = "compute threads" },
        { .type = ARG_INT, .name = "tokens", .dst = &tokens, .lo = 2, .hi = 4000, .help = "tokens per run" },
        { .type = ARG_INT, .name = "runs", .dst = &runs, .lo = 1, .hi = MAX_RUNS, .help = "runs" },
        { .type = ARG_STR, .name = "isa", .dst = &isa, .help = "cap" },
        { .type = ARG_FLAG, .name = "json", .dst = &as_json, .help = "one JSON object" },
    };
    const arg_spec spec = { .usage = "bench_decode [options] MODEL_DIR",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .min_positional = 1,
                            .max_positional = 1 };
    arg_strings pos = { 0 };
    err e = { 0 };
    engine *g = NULL;
    pool *p = NULL;
    static reader r;
    static series s = { .best_read = 1e9, .best_token = 1e9 };
    engine_options o = { .kv = KV_CACHE_AUTO, .ctx = 4096, .no_text = true, .ops = { .isa = ISA_COUNT } };
    o.heads = (heads_options){ .mode = HEAD_FULL, .draft_rows = DRAFT_HEAD_FULL }; /* the read counts the whole head */
    bool ok = args_parse(&spec, argc, argv, &pos, &help, &e);
    if (ok && help)
        return puts("usage: bench_decode [--threads N] [--tokens N] [--runs N] [--isa NAME] [--json] MODEL_DIR"), 0;
    o.ops.threads = threads;
    if (isa && !kern_isa_parse(&o.ops.isa, isa)) o.ops.isa = ISA_COUNT;
    ok = ok && engine_open(&g, pos.v[0], &o, &e) && pool_new(&p, g->o->threads, &e);
    if (ok) touch(g);
    /* The first run warms the page cache and is not counted. */
    for (int i = 0; ok && i <= runs; i++) ok = one_run(&s, g, p, &r, tokens, i, i > 0, &e);
    if (ok)
        report(&s, g, as_json);
    else
        fprintf(stderr, "bench_decode: %s: %s\n", e.id, e.msg);
    engine_close(g);
    pool_free(p);
    free(r.v);
    arg_strings_free(&pos);
    return err_exit_code(e.kind);
}
