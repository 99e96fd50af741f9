/* What `nibble bench` measures with: medians, the streaming read, free memory, the model under test. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/read_bw.h"
#include "cmd/bench.h"

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bench_spread bench_spread_of(bench_series *s) {
    CHECK(s->n > 0, "no values");
    qsort(s->v, (size_t)s->n, sizeof *s->v, by_value);
    return (bench_spread){ s->n % 2 ? s->v[s->n / 2] : (s->v[s->n / 2 - 1] + s->v[s->n / 2]) / 2, s->v[0],
                           s->v[s->n - 1] };
}

/* ---- the streaming read ---- */

static void touch_part(void *ctx, int thread, int threads) {
    const bench_reader *r = ctx;
    int64_t at, end;
    pool_share((int64_t)r->bytes, 1 << 14, thread, threads, &at, &end);
    memset(r->mem + at, thread + 1, (size_t)(end - at));
}

static void read_part(void *ctx, int thread, int threads) {
    bench_reader *r = ctx;
    int64_t at, end;
    pool_share((int64_t)r->bytes, 1 << 14, thread, threads, &at, &end);
    const read_vec sum = read_bw(r->mem + at, end - at);
    r->sums[thread] = sum[0] + sum[1];
}

bool bench_reader_open(bench_reader *r, int threads, size_t like_bytes, err *e) {
    const int64_t least = 8 << 20, most = min_i64(1 << 30, memory_available() / 8);
    int64_t bytes = min_i64((int64_t)like_bytes, most);
    if (bytes < least) bytes = least;
    *r = (bench_reader){ .bytes = (size_t)bytes / 16384 * 16384 };
    /* cppcheck-suppress invalidFunctionArg ; what MAP_ANONYMOUS asks for */
    void *mem = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_PRIVATE, -1, 0);
    if (mem == MAP_FAILED)
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "bench: no memory for a read of %zu bytes", r->bytes);
    r->mem = mem;
    madvise(mem, r->bytes, MADV_HUGEPAGE); /* as weights have it */
    if (!pool_new(&r->p, threads, e)) return bench_reader_close(r), false;
    CHECK(pool_threads(r->p) <= (int)ARRAY_LEN(r->sums), "%d threads", pool_threads(r->p));
    pool_run(r->p, touch_part, r);
    return true;
}

double bench_read(bench_reader *r) {
    bench_series s = { .n = 0 };
    pool_run(r->p, read_part, r);
    while (s.n < 5) {
        const double t0 = clock_seconds();
        pool_run(r->p, read_part, r);
        s.v[s.n++] = (double)r->bytes / (clock_seconds() - t0);
    }
    return bench_spread_of(&s).median;
}

void bench_reader_close(bench_reader *r) {
    if (r->mem) munmap(r->mem, r->bytes);
    pool_free(r->p);
    *r = (bench_reader){ 0 };
}

/* ---- the model ---- */

/* Everything that opening takes at its height, roughly: weights packed and their source, screen, draft head, caches. */
static int64_t needs(const mock *s, int ctx, int slots) {
    const model_config *c = &s->config;
    const int64_t head = (int64_t)c->vocab * c->hidden;
    return (int64_t)(s->nvfp4_bytes + s->source_bytes + s->plain_bytes) + head * 3 / 4 +
           state_bytes(c, &(state_shape){ .slots = slots, .capacity = ctx, .kv_type = DT_F32 }, true) + (256 << 20) +
           (int64_t)s->nvfp4_bytes / 32;
}

static bool check_memory(const mock *s, const bench_options *o, int ctx, int slots, err *e) {
    const int64_t available = memory_available(), need = needs(s, ctx, slots);
    if (need <= available) return true;
    int fits = 0;
    for (int n = 4; n < s->config.layers; n += 4) {
        mock t;
        err unused = { 0 };
        if (mock_plan(&t, o->synthetic, n, &unused) && needs(&t, ctx, slots) <= available) fits = n;
    }
    char remedy[80] = "free some";
    if (fits) snprintf(remedy, sizeof remedy, "--layers %d fits", fits);
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY",
                "synthetic %s, %d layers: about %.1f GB of memory needed, %.1f GB available (%s)",
                mock_presets[o->synthetic], s->config.layers, (double)need / 1e9, (double)available / 1e9, remedy);
}

static bool open_synthetic(bench_model *m, const bench_options *o, const engine_options *eo, err *e) {
    if (!mock_plan(&m->s, o->synthetic, o->layers, e) || !check_memory(&m->s, o, eo->ctx, eo->slots, e)) return false;
    snprintf(m->name, sizeof m->name, "synthetic %s, %d layers", mock_presets[o->synthetic], m->s.config.layers);
    pool *p;
    if (!pool_new(&p, cmd_ops_options().threads, e)) return false;
    const bool ok = mock_build(&m->s, p, e);
    pool_free(p);
    if (!ok || !engine_open_weights(&m->g, m->name, &m->s.w, &m->s.config, eo, e)) return false;
    if (linear_owns_data(m->g->n.layers[0].ffn.gate)) mock_drop_source(&m->s);
    return true;
}

bool bench_model_open(bench_model *m, const bench_options *o, int ctx, int slots, err *e) {
    *m = (bench_model){ 0 };
    engine_options eo = { .ops = cmd_ops_options(),
                          .ctx = ctx,
                          .slots = slots,
                          .kv = (kv_mode)o->kv,
                          .act = (act_mode)o->act,
                          .heads = { .mode = (head_mode)o->head },
                          .no_text = true };
    if (!cmd_draft_head(&eo.heads.draft_rows, o->draft_head, e)) return false;
    size_t bytes;
    if (o->synthetic >= 0) {
        if (!open_synthetic(m, o, &eo, e)) return false;
        bytes = m->s.nvfp4_bytes + m->s.plain_bytes;
    } else {
        if (!engine_open(&m->g, o->dir, &eo, e)) return false;
        snprintf(m->name, sizeof m->name, "%s", o->dir);
        bytes = m->g->files.tensor_bytes;
    }
    return bench_reader_open(&m->reader, m->g->o->threads, bytes, e);
}

void bench_model_close(bench_model *m) {
    bench_reader_close(&m->reader);
    engine_close(m->g);
    mock_free(&m->s);
    m->g = NULL;
}

void bench_prompt(int32_t *ids, int from, int to, int vocab) {
    for (int i = from; i < to; i++) ids[i] = (int32_t)((uint64_t)(unsigned)i * 2654435761u % (uint64_t)vocab);
}
