/* Attention: tiles of 64 absolute positions, computed anywhere, merged left to right. */
#include "ops/ops_cpu.h"

#include <math.h>
#include <string.h>

/* ---- q and k ---- */

typedef struct rope_job {
    cpu *c;
    float *q_out, *k;
    const float *qg, *q_norm, *k_norm;
    const int32_t *pos3;
    const ops_rope *rope;
    int rows, heads, kv_heads, dim;
    bool gated;
    float eps;
} rope_job;

static void rotate(float *x, const ops_rope *rope, const int32_t *pos) {
    const int half = rope->half;
    for (int i = 0; i < half; i++) {
        const int64_t at = (int64_t)pos[rope->axis[i]] * half + i;
        const float c = rope->cos[at], s = rope->sin[at], x1 = x[i], x2 = x[i + half];
        x[i] = fmaf(x1, c, -(x2 * s));
        x[i + half] = fmaf(x2, c, x1 * s);
    }
}

static void qk_rope_part(void *ctx, int thread, int threads) {
    const rope_job *j = ctx;
    const int dim = j->dim, step = j->gated ? 2 * dim : dim;
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        for (int64_t h = r * j->heads; h < (r + 1) * j->heads; h++) {
            j->c->k.rmsnorm(j->q_out + h * dim, j->qg + h * step, j->q_norm, dim, j->eps);
            rotate(j->q_out + h * dim, j->rope, j->pos3 + 3 * r);
        }
        for (int64_t h = r * j->kv_heads; h < (r + 1) * j->kv_heads; h++) {
            j->c->k.rmsnorm(j->k + h * dim, j->k + h * dim, j->k_norm, dim, j->eps);
            rotate(j->k + h * dim, j->rope, j->pos3 + 3 * r);
        }
    }
}

void cpu_qk_rope(ops *o, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                 const int32_t *pos3, const ops_rope *rope, int rows, int heads, int kv_heads, int dim, bool gated,
                 float eps) {
    CHECK(2 * rope->half <= dim, "rotary %d of head %d", 2 * rope->half, dim);
    rope_job j = { .c = o->self,
                   .q_out = q_out,
                   .k = k,
                   .qg = qg,
                   .q_norm = q_norm,
                   .k_norm = k_norm,
                   .pos3 = pos3,
                   .rope = rope,
                   .rows = rows,
                   .heads = heads,
                   .kv_heads = kv_heads,
                   .dim = dim,
                   .gated = gated,
                   .eps = eps };
    cpu_run(j.c, qk_rope_part, &j, (0.3 * dim + 5.0 * rope->half) * rows * (heads + kv_heads));
}

/* ---- KV ---- */

typedef struct append_job {
    cpu *c;
    ops_kv *kv;
    const float *k, *v;
    const ops_span *spans;
    int n_spans, rows;
} append_job;

static void put_row(const cpu *c, const ops_kv *kv, void *dst, int64_t at, const float *x, int n) {
    if (kv->type == DT_F8_E4M3)
        c->q.fp8_div((uint8_t *)dst + at, x, n, dst == kv->k ? kv->k_scale : kv->v_scale);
    else if (kv->type == DT_F32)
        memcpy((float *)dst + at, x, (size_t)n * sizeof *x);
    else
        c->k.f32_to_bf16((uint16_t *)dst + at, x, n);
}

static void append_part(void *ctx, int thread, int threads) {
    const append_job *j = ctx;
    const int n = j->kv->kv_heads * j->kv->dim;
    int64_t begin, end, first = 0; /* rows counted over all spans */
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (const ops_span *s = j->spans; s < j->spans + j->n_spans; first += s->rows, s++)
        for (int64_t i = max_i64(0, begin - first); i < min_i64(s->rows, end - first); i++) {
            const int64_t at = kv_row(j->kv, s->slot, (int)(s->pos0 + i)) * n;
            put_row(j->c, j->kv, j->kv->k, at, j->k + (s->row0 + i) * n, n);
            put_row(j->c, j->kv, j->kv->v, at, j->v + (s->row0 + i) * n, n);
        }
}

void cpu_kv_append(ops *o, ops_kv *kv, const float *k, const float *v, const ops_span *spans, int n_spans) {
    ops_check_kv_spans(kv, spans, n_spans);
    append_job j = { .c = o->self, .kv = kv, .k = k, .v = v, .spans = spans, .n_spans = n_spans };
    for (int i = 0; i < n_spans; i++) j.rows += spans[i].rows;
    cpu_run(j.c, append_part, &j, 0.4 * j.rows * kv->kv_heads * kv->dim);
}

/* ---- attention ---- */

enum { MAX_BLOCK = 16, WHOLE_UNITS = 16 };

static const size_t MAX_STORED_BYTES = 64u << 20;

/* Some consecutive rows of a span for one KV head. Its tiles run from the left; the thread that has tile 0 merges as it
 * goes. Where another thread continues, tiles from `split` on are stored and merged after the barrier. */
typedef struct unit {
    const ops_span *span;
    int row, rows; /* batch row of the first, count */
    int pos;       /* position of the first row */
    int kv_head;
    int tiles;     /* of the last row */
    int split;     /* tiles when one thread does all */
    double before; /* cost of the units in front */
    float *ml;     /* [rows][group] running max, then [rows][group] running sum */
    float *stored; /* [tiles - split] tile results */
} unit;

typedef struct attn_job {
    cpu *c;
    float *y;
    const float *q, *qg;
    const ops_kv *kv;
    unit *units;
    int n_units, n_split, heads, group;
    float scale;
    double cost;
} attn_job;

static int tiles_of(int pos) { return pos / OPS_TILE + 1; }

/* The result of a tile for all rows of a unit: o [rows * group][dim] | max [rows * group] | sum [rows * group]. */
static int64_t result_floats(const attn_job *j, int rows) { return (int64_t)rows * j->group * (j->kv->dim + 2); }

static int64_t query_floats(const attn_job *j) { return (int64_t)MAX_BLOCK * j->group * j->kv->dim; }

/* What a thread needs: a result, the kernel's work space, and the queries of the units at hand, each unit's next to each
 * other. */
static size_t own_floats(const attn_job *j) {
    return (size_t)(result_floats(j, MAX_BLOCK) + KERN_ATTN_WORK(MAX_BLOCK * j->group, j->kv->dim) +
                    j->kv->kv_heads * query_floats(j));
}

/* n positions of a tile for `rows` rows of a unit from `row` on. q: the unit's queries. */
static void tile_rows(const attn_job *j, const unit *u, int tile, int row, int rows, int n, float *result,
                      const float *q, float *space) {
    const ops_kv *kv = j->kv;
    const int dim = kv->dim, G = rows * j->group, done = row * j->group, all = u->rows * j->group;
    const int64_t ld = (int64_t)kv->kv_heads * dim;
    const int64_t at = kv_row(kv, u->span->slot, tile * OPS_TILE) * ld + (int64_t)u->kv_head * dim;
    const void *k = elem_at(kv->k, kv->type, at), *v = elem_at(kv->v, kv->type, at);
    float *o = result + (int64_t)done * dim, *max = result + (int64_t)all * dim + done, *sum = max + all;
    q += (int64_t)done * dim;
    if (kv->type == DT_F8_E4M3)
        j->c->k.attn_tile_fp8(o, max, sum, q, k, v, ld, n, G, dim, j->scale, space);
    else if (kv->type == DT_F32)
        j->c->k.attn_tile_f32(o, max, sum, q, k, v, ld, n, G, dim, j->scale);
    else
        j->c->k.attn_tile_bf16(o, max, sum, q, k, v, ld, n, G, dim, j->scale);
}

/* One tile for all rows of a unit that see it: those that see all of it share one reading. */
static void one_tile(const attn_job *j, const unit *u, int tile, float *result, const float *q, float *space) {
    const int seen = u->pos + 1 - tile * OPS_TILE; /* by row 0; one more by each row */
    const int full = seen >= OPS_TILE ? 0 : OPS_TILE - seen < u->rows ? OPS_TILE - seen : u->rows;
    for (int row = seen > 0 ? 0 : 1 - seen; row < full; row++)
        tile_rows(j, u, tile, row, 1, seen + row, result, q, space);
    if (full < u->rows) tile_rows(j, u, tile, full, u->rows - full, OPS_TILE, result, q, space);
}

static float *head_out(const attn_job *j, const unit *u, int row, int g) {
    return j->y + ((int64_t)(u->row + row) * j->heads + (int64_t)u->kv_head * j->group + g) * j->kv->dim;
}

static void merge(const attn_job *j, const unit *u, int row, int g, const float *result) {
    const int at = row * j->group + g, dim = j->kv->dim, all = u->rows * j->group;
    const float *max = result + (int64_t)all * dim;
    j->c->k.attn_merge(head_out(j, u, row, g), &u->ml[at], &u->ml[all + at], result + (int64_t)at * dim, max[at],
                       max[all + at], dim);
}

static void finish(const attn_job *j, const unit *u, int row, int g) {
    float *y = head_out(j, u, row, g);
    const int dim = j->kv->dim;
    j->c->k.scale_div(y, y, u->ml[(u->rows + row) * j->group + g], dim);
    for (int d = 0; j->kv->type == DT_F8_E4M3 && d < dim; d++) y[d] = y[d] * j->kv->v_scale;
    if (j->qg) j->c->k.sigmoid_mul(y, y, j->qg + 2 * (y - j->y) + dim, dim);
}

/* Before the first tile: the queries, and the running triples of the thread that has tile 0. */
static void unit_start(const attn_job *j, unit *u, bool first, float *q) {
    const int group = j->group, dim = j->kv->dim;
    for (int64_t row = 0; row < u->rows; row++)
        memcpy(q + row * group * dim, j->q + ((u->row + row) * j->heads + (int64_t)u->kv_head * group) * dim,
               sizeof *q * (size_t)group * (size_t)dim);
    for (int i = 0; first && i < u->rows * group; i++) {
        memset(head_out(j, u, i / group, i % group), 0, (size_t)dim * sizeof(float));
        u->ml[i] = -INFINITY;
        u->ml[u->rows * group + i] = 0;
    }
}

/* Tiles [begin, end) of one unit, or of several that are the same rows for other KV heads: tile by tile, since their K and V
 * stand between each other in memory. */
static void units_part(const attn_job *j, unit *units, int count, int begin, int end, float *own) {
    const int group = j->group;
    const bool first = begin == 0;
    float *space = own + result_floats(j, MAX_BLOCK), *q = space + KERN_ATTN_WORK(MAX_BLOCK * group, j->kv->dim);
    for (int i = 0; i < count; i++) unit_start(j, &units[i], first, q + i * query_floats(j));
    for (int t = begin; t < end; t++)
        for (int n = 0; n < count; n++) {
            const unit *u = &units[n];
            float *result = first ? own : u->stored + (t - u->split) * result_floats(j, u->rows);
            one_tile(j, u, t, result, q + n * query_floats(j), space);
            for (int i = 0; first && i < u->rows * group; i++)
                if (t < tiles_of(u->pos + i / group)) merge(j, u, i / group, i % group, result);
        }
    for (int n = 0; n < count && first && end == units->tiles; n++)
        for (int i = 0; i < units[n].rows * group; i++) finish(j, &units[n], i / group, i % group);
}

/* How many units from u on, all before `end`, are the same rows. */
static int same_rows(const attn_job *j, int u, int end) {
    int n = 1;
    while (u + n < end && j->units[u + n].row == j->units[u].row) n++;
    return n;
}

/* After the barrier: the stored tiles of one head. */
static void merge_stored(const attn_job *j, const unit *u, int row, int g) {
    for (int t = u->split; t < tiles_of(u->pos + row); t++)
        merge(j, u, row, g, u->stored + (t - u->split) * result_floats(j, u->rows));
    finish(j, u, row, g);
}

/* Where thread t of `threads` begins: a unit and a tile of it. Units stay whole when there are many. */
static void boundary(const attn_job *j, int t, int threads, int *unit_out, int *tile) {
    const double target = j->cost * t / threads;
    int u = 0;
    while (u + 1 < j->n_units && j->units[u + 1].before <= target) u++;
    if (t == threads) u = j->n_units;
    *unit_out = u;
    *tile = 0;
    if (u == j->n_units) return;
    const unit *at = &j->units[u];
    const int rounded = (int)((target - at->before) / at->rows + 0.5);
    *tile = rounded < at->tiles ? rounded : at->tiles;
    if (j->n_units >= WHOLE_UNITS * threads) *tile = 2 * *tile > at->tiles ? at->tiles : 0;
    if (*tile == at->tiles) *unit_out = u + 1, *tile = 0;
}

static void attn_part(void *ctx, int thread, int threads) {
    const attn_job *j = ctx;
    float *own = cpu_own(j->c, thread);
    int u, t, u_end, t_end;
    boundary(j, thread, threads, &u, &t);
    boundary(j, thread + 1, threads, &u_end, &t_end);
    for (int n; u < u_end || (u == u_end && t < t_end); u += n, t = 0) {
        n = t == 0 && u < u_end ? same_rows(j, u, u_end) : 1;
        units_part(j, &j->units[u], n, t, u < u_end ? j->units[u].tiles : t_end, own);
    }
    if (j->n_split == 0) return;
    cpu_barrier(j->c, threads);
    int64_t count = 0;
    for (const unit *s = j->units; s < j->units + j->n_units; s++)
        for (int i = 0; s->split < s->tiles && i < s->rows * j->group; i++)
            if (count++ % threads == thread) merge_stored(j, s, i / j->group, i % j->group);
}

/* Fill units of at most `block` rows; returns their count, or counts only when units is NULL. */
static int make_units(attn_job *j, unit *units, const ops_span *spans, int n_spans, int block) {
    int n = 0;
    j->cost = 0;
    for (const ops_span *s = spans; s < spans + n_spans; s++)
        for (int r = 0; r < s->rows; r += block)
            for (int h = 0; h < j->kv->kv_heads; h++, n++) {
                const int rows = (int)min_i64(block, s->rows - r), tiles = tiles_of(s->pos0 + r + rows - 1);
                if (units)
                    units[n] = (unit){ .span = s,
                                       .row = s->row0 + r,
                                       .rows = rows,
                                       .pos = s->pos0 + r,
                                       .kv_head = h,
                                       .tiles = tiles,
                                       .split = tiles,
                                       .before = j->cost };
                j->cost += (double)rows * tiles;
            }
    return n;
}

/* Mark what the boundaries cut; returns the floats that stored tiles take. */
static size_t mark_splits(attn_job *j, int threads) {
    size_t total = 0;
    int last = -1;
    j->n_split = 0;
    for (int t = 1; t < threads; t++) {
        int u, tile;
        boundary(j, t, threads, &u, &tile);
        if (tile == 0 || u == last) continue; /* the first cut of a unit is its lowest */
        last = u;
        j->units[u].split = tile;
        j->n_split++;
        total += (size_t)(j->units[u].tiles - tile) * (size_t)result_floats(j, j->units[u].rows);
    }
    return total;
}

/* Choose the rows per unit: many, because they share one reading of K and V, unless threads would have to store too
 * much at the cuts. Returns the floats of stored tiles. */
static size_t plan(attn_job *j, work *mem, const ops_span *spans, int n_spans, int threads) {
    int block = MAX_BLOCK;
    for (;; block /= 2) {
        j->n_units = make_units(j, NULL, spans, n_spans, block);
        j->units = work_need(mem, (size_t)j->n_units * sizeof *j->units);
        make_units(j, j->units, spans, n_spans, block);
        const size_t floats = mark_splits(j, threads);
        if (block == 1 || floats * sizeof(float) <= MAX_STORED_BYTES) return floats;
    }
}

void cpu_attention(ops *o, float *y, const float *q, const float *qg, const ops_kv *kv, int heads, float scale,
                   const ops_span *spans, int n_spans) {
    cpu *c = o->self;
    ops_check_kv_spans(kv, spans, n_spans);
    CHECK(heads % kv->kv_heads == 0, "%d heads over %d", heads, kv->kv_heads);
    attn_job j = {
        .c = c, .y = y, .q = q, .qg = qg, .kv = kv, .heads = heads, .group = heads / kv->kv_heads, .scale = scale
    };
    if (kv->type == DT_F8_E4M3) j.scale = scale * kv->k_scale;
    make_units(&j, NULL, spans, n_spans, MAX_BLOCK);
    const double ns = j.cost * OPS_TILE * j.group * kv->dim * 0.05;
    const bool alone = ns < c->dispatch_ns;
    const size_t stored = plan(&j, &c->units, spans, n_spans, alone ? 1 : c->threads);
    if (j.n_units == 0) return;
    size_t ml = 0;
    for (int i = 0; i < j.n_units; i++) ml += 2 * (size_t)j.units[i].rows * (size_t)j.group;
    float *p = work_need(&c->shared, (ml + stored) * sizeof *p);
    for (unit *u = j.units; u < j.units + j.n_units; u++) {
        u->ml = p;
        p += 2 * u->rows * j.group;
        u->stored = p;
        p += (u->tiles - u->split) * result_floats(&j, u->rows);
    }
    cpu_own_need(c, own_floats(&j) * sizeof(float));
    cpu_run(c, attn_part, &j, ns);
}
