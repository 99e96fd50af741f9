/* The CPU backend: opening, closing and the row ops. */
#include "ops/ops_cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kern/selftest.h"
#include "num/bf16.h"

void cpu_run(cpu *c, pool_fn *fn, void *ctx, double ns) {
    if (ns < c->dispatch_ns)
        fn(ctx, 0, 1);
    else
        pool_run(c->pool, fn, ctx);
}

void cpu_own_need(cpu *c, size_t bytes) {
    bytes = (bytes + 127) & ~(size_t)127; /* no cache line (pair) of two threads */
    if (bytes > c->own_bytes) c->own_bytes = bytes;
    work_need(&c->own, c->own_bytes * (size_t)c->threads);
}

/* One struct serves the row ops: which members mean something is up to each. */
typedef struct rows_job {
    cpu *c;
    float *y;
    const float *x, *w, *u;
    const linear *table;
    const int32_t *ids;
    int32_t *out;
    int64_t ldx, n64;
    int rows, n;
    float eps;
} rows_job;

void cpu_upcast_row(const cpu *c, float *y, const linear *w, int64_t row) {
    const int64_t n = w->cols;
    const void *p = elem_at(w->data, w->type, row * n);
    if (w->type == DT_F32)
        memcpy(y, p, (size_t)n * sizeof *y);
    else if (w->type == DT_BF16)
        c->k.bf16_to_f32(y, p, n);
    else
        for (int64_t i = 0; i < n; i++) y[i] = f16_to_f32(((const uint16_t *)p)[i]);
}

static void embed_part(void *ctx, int thread, int threads) {
    const rows_job *j = ctx;
    const int n = j->n;
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        float *y = j->y + r * n;
        const int32_t id = j->ids[r];
        if (id < 0 || id >= j->table->rows)
            memset(y, 0, (size_t)n * sizeof *y);
        else
            cpu_upcast_row(j->c, y, j->table, id);
    }
}

static void cpu_embed(ops *o, float *y, const linear *table, const int32_t *ids, int rows) {
    rows_job j = { .c = o->self, .y = y, .table = table, .ids = ids, .rows = rows, .n = table->cols };
    cpu_run(j.c, embed_part, &j, 0.2 * rows * j.n);
}

static void rmsnorm_part(void *ctx, int thread, int threads) {
    const rows_job *j = ctx;
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (int64_t r = begin; r < end; r++) j->c->k.rmsnorm(j->y + r * j->n, j->x + r * j->ldx, j->w, j->n, j->eps);
}

static void cpu_rmsnorm(ops *o, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps) {
    rows_job j = { .c = o->self, .y = y, .x = x, .ldx = ldx, .w = w, .rows = rows, .n = n, .eps = eps };
    cpu_run(j.c, rmsnorm_part, &j, 0.25 * rows * n);
}

static void add_part(void *ctx, int thread, int threads) {
    const rows_job *j = ctx;
    int64_t begin, end;
    pool_share(j->n64, 64, thread, threads, &begin, &end);
    j->c->k.add(j->y + begin, j->x + begin, end - begin);
}

static void cpu_add(ops *o, float *y, const float *x, int64_t n) {
    rows_job j = { .c = o->self, .y = y, .x = x, .n64 = n };
    cpu_run(j.c, add_part, &j, 0.15 * (double)n);
}

static void silu_mul_part(void *ctx, int thread, int threads) {
    const rows_job *j = ctx;
    int64_t begin, end;
    pool_share(j->n64, 64, thread, threads, &begin, &end);
    j->c->k.silu_mul(j->y + begin, j->x + begin, j->u + begin, end - begin);
}

static void cpu_silu_mul(ops *o, float *y, const float *g, const float *u, int64_t n) {
    rows_job j = { .c = o->self, .y = y, .x = g, .u = u, .n64 = n };
    cpu_run(j.c, silu_mul_part, &j, (double)n);
}

static void gather_part(void *ctx, int thread, int threads) {
    const rows_job *j = ctx;
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (int64_t r = begin; r < end; r++)
        memcpy(j->y + r * j->n, j->x + (int64_t)j->ids[r] * j->n, (size_t)j->n * sizeof(float));
}

static void cpu_gather_rows(ops *o, float *y, const float *x, const int32_t *index, int rows, int n) {
    rows_job j = { .c = o->self, .y = y, .x = x, .ids = index, .rows = rows, .n = n };
    cpu_run(j.c, gather_part, &j, 0.15 * rows * n);
}

/* out [rows, threads]: each thread's best of its columns. */
static void argmax_part(void *ctx, int thread, int threads) {
    const rows_job *j = ctx;
    int64_t begin, end;
    pool_share(j->n, 64, thread, threads, &begin, &end);
    for (int64_t r = 0; r < j->rows; r++) {
        const int64_t best = j->c->k.argmax(j->x + r * j->n + begin, end - begin);
        j->out[r * j->c->threads + thread] = best < 0 ? -1 : (int32_t)(begin + best);
    }
}

static void cpu_argmax(ops *o, int32_t *out, const float *x, int rows, int n) {
    cpu *c = o->self;
    const size_t slots = (size_t)rows * (size_t)c->threads;
    int32_t *best = work_need(&c->shared, slots * sizeof *best);
    for (size_t i = 0; i < slots; i++) best[i] = -1;
    rows_job j = { .c = c, .out = best, .x = x, .rows = rows, .n = n };
    cpu_run(c, argmax_part, &j, 0.1 * rows * n);
    for (int64_t r = 0; r < rows; r++, x += n, best += c->threads) { /* lower columns first: they win ties */
        int32_t top = best[0];
        for (int t = 1; t < c->threads; t++)
            if (best[t] >= 0 && (x[best[t]] > x[top] || (isnan(x[top]) && !isnan(x[best[t]])))) top = best[t];
        out[r] = top;
    }
}

static void cpu_close(ops *o) {
    cpu *c = o->self;
    pool_free(c->pool);
    work_free(&c->shared);
    work_free(&c->units);
    work_free(&c->screen);
    work_free(&c->full);
    work_free(&c->own);
    free(c);
    free(o);
}

static const ops CPU = {
    .device = "cpu",
    .close = cpu_close,
    .embed = cpu_embed,
    .rmsnorm = cpu_rmsnorm,
    .linear = cpu_linear,
    .add = cpu_add,
    .silu_mul = cpu_silu_mul,
    .gather_rows = cpu_gather_rows,
    .argmax = cpu_argmax,
    .head_new = cpu_head_new,
    .head_top = cpu_head_top,
    .conv = cpu_conv,
    .gdn = cpu_gdn,
    .gated_norm = cpu_gated_norm,
    .qk_rope = cpu_qk_rope,
    .kv_append = cpu_kv_append,
    .attention = cpu_attention,
    .route = cpu_route,
    .moe = cpu_moe,
    .moe_hidden = cpu_moe_hidden,
    .moe_combine = cpu_moe_combine,
    .norm_linears = cpu_norm_linears,
    .linear_add = cpu_linear_add,
    .gated_linear_add = cpu_gated_linear_add,
};

bool ops_cpu_open(ops **out, int threads, kern_isa isa, err *e) {
    cpu *c = xcalloc(1, sizeof *c);
    if (!pool_new(&c->pool, threads, e)) {
        free(c);
        return false;
    }
    kern_init(&c->k, isa);
    quant_kern_init(&c->q, isa);
    nv_kern_init(&c->nv, isa);
    screen_kern_init(&c->s, isa);
    if (!kern_selftest(&c->k, &c->q, &c->nv, e)) {
        pool_free(c->pool);
        free(c);
        return false;
    }
    c->threads = pool_threads(c->pool);
    /* A hand-out costs about a microsecond while the workers spin; with more threads than CPUs each one is woken. */
    c->dispatch_ns = c->threads == 1 ? INFINITY : c->threads <= pool_cpus() ? 4e3 : 1e5;
    ops *o = xmalloc(sizeof *o);
    *o = CPU;
    o->self = c;
    o->isa = kern_isa_name(c->k.isa);
    o->threads = c->threads;
    ops_host_fill(o);
    o->linear_new = cpu_linear_new;
    o->linear_free = cpu_linear_free;
    o->experts_new = cpu_experts_new;
    o->experts_free = cpu_experts_free;
    *out = o;
    return true;
}
