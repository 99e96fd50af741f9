/* bench_attn - attention over a long context and the gated delta net, with the real shapes, beside a streaming read.
 *
 *   bench_attn [--threads N] [--isa NAME] [--ms N] [--only TEXT] [--hot]
 *
 * Ops of the CPU backend run over many layers' caches in turn, so that KV and states come from memory as they do in a model.
 * GB/s counts the bytes of KV read once, or of the state read and written once; "share" is the median of (seconds of a
 * plain read of as many bytes) / (seconds of the op), measured in turn.
 * --hot: one layer's again and again, which shows what is left when memory costs nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/args.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/read_bw.h"
#include "num/bf16.h"
#include "ops/ops.h"

#include "report.h"

/* Qwen3.6-35B-A3B */
enum {
    HEADS = 16,
    KV_HEADS = 2,
    DIM = 256,
    K_HEADS = 16,
    V_HEADS = 32,
    STATE = 128,
    CHANNELS = 2 * K_HEADS * STATE + V_HEADS * STATE,
    MAX_ROWS = 512,
    MAX_PAGES = 1024
};
static const int64_t MEMORY = 256 << 20;

static uint8_t *memory; /* KV, states and the read's bytes */
static float *in, *out, *gates, *weights, *pend;
static ops *o;
static pool *readers;
static int threads = 2;
static bool hot;

static bool operands_new(void) {
    memory = aligned_alloc(4096, (size_t)MEMORY);
    in = aligned_alloc(64, sizeof(float) * MAX_ROWS * CHANNELS);
    out = aligned_alloc(64, sizeof(float) * MAX_ROWS * CHANNELS);
    gates = aligned_alloc(64, sizeof(float) * MAX_ROWS * V_HEADS);
    weights = aligned_alloc(64, sizeof(float) * CHANNELS * 4);
    pend = aligned_alloc(64, sizeof(float) * OPS_MAX_PENDING * CHANNELS * 4);
    if (!memory || !in || !out || !gates || !weights || !pend) return false;
    for (int i = 0; i < MAX_ROWS * CHANNELS; i++) in[i] = ((float)(i % 61) - 30.5f) * 0x1p-6f;
    for (int i = 0; i < MAX_ROWS * V_HEADS; i++) gates[i] = ((float)(i % 37) - 18.5f) * 0x1p-3f;
    for (int i = 0; i < CHANNELS * 4; i++) weights[i] = ((float)(i % 53) - 26.5f) * 0x1p-5f;
    for (int i = 0; i < OPS_MAX_PENDING * CHANNELS * 4; i++) pend[i] = ((float)(i % 29) - 14.5f) * 0x1p-5f;
    return true;
}

/* Codes or numbers of ordinary size, whatever they are read as. */
static void fill_memory(dtype t) {
    for (int64_t i = 0; i < MEMORY / 4; i++) {
        const uint32_t r = (uint32_t)i * 2654435761u;
        const float f = ((float)(r >> 8 & 0xffff) - 32767.5f) * 0x1p-15f;
        const uint32_t h = bf16_from_f32(f);
        if (t == DT_F32)
            memcpy(memory + 4 * i, &f, 4);
        else if (t == DT_BF16)
            memcpy(memory + 4 * i, &(uint32_t){ h | h << 16 }, 4);
        else
            memcpy(memory + 4 * i, &(uint32_t){ r & 0xbfbfbfbfu }, 4); /* below 2 */
    }
}

static read_vec sink[256];
static void read_part(void *ctx, int thread, int n) {
    int64_t at, end;
    const int64_t *bytes = ctx;
    pool_share(bytes[1], 4 * 4096, thread, n, &at, &end);
    sink[thread] += read_bw(memory + bytes[0] + at, end - at);
}

typedef struct job {
    void (*run)(const struct job *j, int layer);
    dtype type;
    int context, rows, commit;
    bool tentative;
    int64_t bytes; /* of one layer */
    int layers;
} job;

static void attention(const job *j, int layer) {
    uint8_t *at = memory + j->bytes * layer;
    const int pages = (j->context + j->rows + OPS_KV_PAGE - 1) / OPS_KV_PAGE;
    static int32_t table[MAX_PAGES];
    for (int i = 0; i < pages; i++) table[i] = i;
    const ops_kv kv = { .type = j->type,
                        .k = at,
                        .v = at + j->bytes / 2,
                        .kv_heads = KV_HEADS,
                        .dim = DIM,
                        .pages = table,
                        .slot_pages = pages,
                        .capacity = pages * OPS_KV_PAGE,
                        .k_scale = 1,
                        .v_scale = 1 };
    const ops_span s = { .rows = j->rows, .pos0 = j->context };
    o->attention(o, out, in, NULL, &kv, HEADS, 0.0625f, &s, 1);
}

static void gdn(const job *j, int layer) {
    static float neg_a[V_HEADS], dt[V_HEADS];
    for (int i = 0; i < V_HEADS; i++) neg_a[i] = -0.1f;
    float *p = pend;
    ops_gdn st = { .state = (float *)(void *)(memory + j->bytes * layer),
                   .k_heads = K_HEADS,
                   .v_heads = V_HEADS,
                   .k_dim = STATE,
                   .v_dim = STATE };
    st.pend_k = p, p += OPS_MAX_PENDING * CHANNELS;
    st.pend_v = p, p += OPS_MAX_PENDING * CHANNELS;
    st.pend_beta = p, p += OPS_MAX_PENDING * CHANNELS;
    st.pend_decay = p;
    const ops_span s = { .rows = j->rows, .commit = j->commit, .tentative = j->tentative };
    o->gdn(o, out, in, gates, gates, neg_a, dt, &st, &s, 1);
}

static void conv(const job *j, int layer) {
    float *at = (float *)(void *)(memory + j->bytes * layer);
    ops_conv st = { .window = at, .pending = at + 3 * CHANNELS, .channels = CHANNELS, .taps = 4 };
    const ops_span s = { .rows = j->rows };
    o->conv(o, out, in, weights, &st, &s, 1);
}

static void gated_norm(const job *j, int layer) {
    (void)layer;
    o->gated_norm(o, out, in, in + 64, weights, j->rows, V_HEADS, STATE, 1e-6f);
}

/* Of the thread's own time when there is one: other programs on the machine count less. */
static double seconds_now(void) {
    struct timespec t;
    if (threads > 1) return clock_seconds();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double seconds_of(const job *j, int layer, bool read) {
    int64_t bytes[2] = { j->bytes * ((layer + j->layers / 2) % j->layers), j->bytes };
    const double t = seconds_now();
    if (!read)
        j->run(j, layer);
    else if (threads == 1)
        read_part(bytes, 0, 1);
    else
        pool_run(readers, read_part, bytes);
    return seconds_now() - t;
}

static void measure(job j, const char *name, int traffic, double macs, double budget) {
    enum { MAX = 4000 };
    static double mine[MAX], read[MAX], ratio[MAX];
    j.layers = hot ? 1 : (int)(MEMORY / j.bytes);
    int n = 0;
    const double start = clock_seconds();
    for (; n < MAX && (n < 5 || clock_seconds() - start < budget); n++) {
        read[n] = seconds_of(&j, n % j.layers, true);
        mine[n] = seconds_of(&j, n % j.layers, false);
        ratio[n] = read[n] * traffic / mine[n];
    }
    const double share = median(ratio, n), t = median(mine, n), r = median(read, n);
    printf("%-26s rows %3d commit %d  %8.3f ms  %6.2f GB/s of %5.2f, share %.2f  %6.1f GMAC/s\n", name, j.rows,
           j.commit, t * 1e3, (double)j.bytes * traffic / t * 1e-9, (double)j.bytes / r * 1e-9, share, macs / t * 1e-9);
    fflush(stdout);
}

static void measure_attention(dtype t, double budget, const char *only) {
    static const int contexts[] = { 1024, 4096, 16384, 32768 }, rows[] = { 1, 3, 256 };
    char name[64];
    fill_memory(t);
    for (size_t c = 0; c < ARRAY_LEN(contexts); c++)
        for (size_t r = 0; r < ARRAY_LEN(rows); r++) {
            if (rows[r] > 3 && contexts[c] > 1024) continue;
            job j = { .run = attention, .type = t, .context = contexts[c], .rows = rows[r] };
            j.bytes = 2LL * (j.context + j.rows + OPS_KV_PAGE - 1) / OPS_KV_PAGE * OPS_KV_PAGE * KV_HEADS * DIM *
                      dtype_bytes(t);
            snprintf(name, sizeof name, "attention %s %d", dtype_name(t), j.context);
            if (only && !strstr(name, only)) continue;
            measure(j, name, 1, 2.0 * HEADS * DIM * j.rows * (j.context + 0.5 * j.rows), budget);
        }
}

static void measure_gdn(double budget, const char *only) {
    static const struct {
        int rows, commit;
        bool tentative;
    } cases[] = { { 1, 0, false }, { 3, 0, true },   { 3, 1, true },    { 3, 2, true },
                  { 3, 3, true },  { 16, 0, false }, { 128, 0, false }, { 512, 0, false } };
    for (size_t i = 0; i < ARRAY_LEN(cases) && (!only || strstr("gdn", only)); i++) {
        fill_memory(DT_F32);
        const job j = { .run = gdn,
                        .rows = cases[i].rows,
                        .commit = cases[i].commit,
                        .tentative = cases[i].tentative,
                        .bytes = sizeof(float) * V_HEADS * STATE * STATE };
        const int written = !j.tentative || j.commit > 0;
        measure(j, "gdn", 1 + written, 3.0 * V_HEADS * STATE * STATE * (j.rows + j.commit), budget);
    }
    static const int rows[] = { 1, 3, 512 };
    for (size_t i = 0; i < ARRAY_LEN(rows) && (!only || strstr("conv gated_norm", only)); i++) {
        const job c = { .run = conv, .rows = rows[i], .bytes = sizeof(float) * 11 * CHANNELS };
        measure(c, "conv", 1, 4.0 * CHANNELS * c.rows, budget);
        const job g = { .run = gated_norm, .rows = rows[i], .bytes = sizeof(float) * V_HEADS * STATE };
        measure(g, "gated_norm", 1, (double)V_HEADS * STATE * g.rows, budget);
    }
}

int main(int argc, char **argv) {
    int ms = 300;
    const char *isa_name = NULL, *only = NULL;
    bool help;
    const arg_opt opts[] = {
        { .type = ARG_INT, .name = "threads", .dst = &threads, .lo = 1, .hi = 256, .help = "threads (2)" },
        { .type = ARG_INT, .name = "ms", .dst = &ms, .lo = 1, .hi = 10000, .help = "time per figure" },
        { .type = ARG_STR, .name = "isa", .dst = &isa_name, .help = "cap: ref avx2 avx512 neon" },
        { .type = ARG_STR, .name = "only", .dst = &only, .help = "rows with this in their name" },
        { .type = ARG_FLAG, .name = "hot", .dst = &hot, .help = "KV and states stay in the caches" },
    };
    const arg_spec spec = { .usage = "bench_attn [options]", .opts = opts, .count = ARRAY_LEN(opts) };
    arg_strings pos = { 0 };
    err e = { 0 };
    if (!args_parse(&spec, argc, argv, &pos, &help, &e)) return fprintf(stderr, "bench_attn: %s\n", e.msg), 2;
    if (help) {
        print_help(&spec);
        return 0;
    }
    kern_isa isa = ISA_COUNT;
    if (isa_name && !kern_isa_parse(&isa, isa_name)) return fprintf(stderr, "bench_attn: unknown --isa\n"), 2;
    if (!operands_new()) return fprintf(stderr, "bench_attn: not enough memory\n"), 4;
    if (!ops_open(&o, &(ops_options){ .device = "cpu", .threads = threads, .isa = isa }, &e) ||
        !pool_new(&readers, threads, &e))
        return fprintf(stderr, "bench_attn: %s\n", e.msg), 4;
    printf("%s, %s, %d threads\n", kern_cpu_name(), o->isa, threads);
    static const dtype types[] = { DT_F8_E4M3, DT_BF16 };
    for (size_t i = 0; i < ARRAY_LEN(types); i++) measure_attention(types[i], ms * 1e-3, only);
    measure_gdn(ms * 1e-3, only);
    o->close(o);
    pool_free(readers);
    return 0;
}
