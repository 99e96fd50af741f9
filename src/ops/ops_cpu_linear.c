/* Matrices of one input: each row is made (normed where that is asked) and quantized while it is in the first-level cache,
 * once for all matrices that quantize alike; then threads own outputs of every matrix, so that each weight is read once, by
 * one thread. A single row is made by every thread for itself, which is sooner done than waiting for another. */
#include <string.h>

#include "ops/ops_cpu_packed.h"

enum { MOST = 4, ROWS_AT_ONCE = 64, GEMM_AT_ONCE = 256 /* rows that share an expansion of the weights */ };

/* One way to quantize the rows. */
typedef struct input {
    const linear_quant *q;
    nv_act *acts; /* [rows] */
    char *planes; /* NULL: dot */
} input;

typedef struct linears_job {
    cpu *c;
    const float *x;
    int64_t ldx;
    int rows, K;
    const float *norm, *z; /* norm NULL: rows as they are; z: gated norm of heads of dim, else rmsnorm */
    float eps;
    int dim;
    float *h; /* NULL or [rows, K] of the normed rows */
    int n;
    const linear *const *w;
    float *const *y;
    int64_t ldy; /* 0: as wide as each matrix is high */
    bool add;    /* y += */
    bool plain, alone, many;
    int n_inputs, input_of[MOST];
    input inputs[MOST];
} linears_job;

static size_t round_64(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* What a thread keeps at hand, one after the other: sums, what gemm needs, a row, the row's codes. */
static size_t sums_bytes(const linears_job *j) {
    return (j->many ? GEMM_AT_ONCE : ROWS_AT_ONCE) * PACKED_PANELS * NV_ROWS * sizeof(float);
}
static size_t row_at(const linears_job *j) { return sums_bytes(j) + (j->many ? round_64(j->c->nv.gemm_bytes) : 0); }
static size_t codes_at(const linears_job *j) {
    return row_at(j) + (j->norm ? round_64((size_t)j->K * sizeof(float)) : 0);
}

/* ---- inputs ---- */

static const float *row_made(const linears_job *j, float *own, int64_t r) {
    const float *x = j->x + r * j->ldx;
    if (!j->norm) return x;
    float *to = j->h && !j->alone ? j->h + r * j->K : own;
    if (!j->z) j->c->k.rmsnorm(to, x, j->norm, j->K, j->eps);
    for (int at = 0; j->z && at < j->K; at += j->dim)
        j->c->k.gated_norm(to + at, x + at, j->z + r * j->K + at, j->norm, j->dim, j->eps);
    return to;
}

/* Rows [begin, end), begin a multiple of 16 where planes are made. Returns the last row. */
static const float *inputs_made(const linears_job *j, const input *in, float *own, int64_t begin, int64_t end) {
    const int Kp = nv_padded(j->K);
    const float *x = NULL;
    for (int64_t r = begin; r < end; r++) {
        x = row_made(j, own, r);
        for (int i = 0; i < j->n_inputs; i++) packed_act(j->c, &in[i].acts[r], x, j->K, in[i].q);
    }
    for (int i = 0; i < j->n_inputs && begin < end; i++)
        if (in[i].planes)
            packed_planes(j->c, in[i].planes + begin / 16 * nv_tile_bytes(Kp), in[i].acts + begin, (int)(end - begin),
                          Kp);
    return x;
}

/* ---- outputs ---- */

static void packed_share(const linears_job *j, int i, const input *in, char *own, int thread, int threads) {
    const linear *w = j->w[i];
    const int64_t stride = nv_panel_bytes(j->K), ldy = j->ldy ? j->ldy : w->rows;
    const int at_once = in->planes ? GEMM_AT_ONCE : ROWS_AT_ONCE, Kp = nv_padded(j->K);
    float *sum = (float *)(void *)own;
    int64_t begin, end;
    pool_share(nv_panels(w->rows), 1, thread, threads, &begin, &end);
    for (int64_t p = begin; p < end; p += PACKED_PANELS) {
        const int n = (int)min_i64(PACKED_PANELS, end - p), width = n * NV_ROWS;
        const int cols = (int)min_i64(width, w->rows - p * NV_ROWS);
        for (int r = 0; r < j->rows; r += at_once) {
            const int m = (int)min_i64(at_once, j->rows - r);
            const uint8_t *panels = w->packed + p * stride;
            if (in->planes)
                j->c->nv.gemm(sum, width, panels, stride, n, Kp, in->planes + r / 16 * nv_tile_bytes(Kp), m,
                              own + sums_bytes(j));
            else
                packed_sums(j->c, sum, width, panels, stride, n, j->K, in->acts + r, m, w->q.act);
            for (int k = 0; k < m; k++) {
                float *s = sum + (int64_t)k * width, *y = j->y[i] + (r + k) * ldy + p * NV_ROWS;
                packed_finish(j->add ? s : y, s, cols, &w->q, &in->acts[r + k]);
                if (j->add) j->c->k.add(y, s, cols);
            }
        }
    }
}

/* Whole register tiles (16 outputs for few rows, 48 for many), as long as every thread gets several; rows of x instead for
 * a matrix with very few outputs and a long batch. */
static void plain_share(const linears_job *j, int i, const float *x, int64_t ldx, int thread, int threads) {
    const linear *w = j->w[i];
    const int64_t ldy = j->ldy ? j->ldy : w->rows;
    const bool by_rows = w->rows < 16 * threads && j->rows >= 8 * threads;
    int grain = by_rows ? 8 : j->rows <= 4 ? 16 : 48;
    while (!by_rows && grain > 4 && w->rows < 4 * grain * threads) grain /= 2;
    int64_t begin, end;
    pool_share(by_rows ? j->rows : w->rows, grain, thread, threads, &begin, &end);
    if (by_rows)
        cpu_gemm(j->c, w->type, j->y[i] + begin * ldy, ldy, x + begin * ldx, ldx, w->data, (int)(end - begin), w->rows,
                 w->cols);
    else
        cpu_gemm(j->c, w->type, j->y[i] + begin, ldy, x, ldx, elem_at(w->data, w->type, begin * w->cols), j->rows,
                 (int)(end - begin), w->cols);
}

static void linears_part(void *ctx, int thread, int threads) {
    const linears_job *j = ctx;
    char *own = cpu_own(j->c, thread);
    float *row = (float *)(void *)(own + row_at(j));
    const float *x = j->norm ? j->h : j->x;
    input in[MOST];
    int64_t begin, end;
    memcpy(in, j->inputs, sizeof in);
    if (j->alone) {
        for (int i = 0; i < j->n_inputs; i++)
            in[i].acts = packed_acts_at(own + codes_at(j) + (size_t)i * packed_acts_bytes(1, j->K), 1, j->K);
        x = inputs_made(j, in, row, 0, 1);
        if (j->norm && j->h && thread == 0) memcpy(j->h, x, (size_t)j->K * sizeof *x);
    } else if (j->n_inputs > 0 || j->norm) {
        pool_share(j->rows, j->many ? 16 : 1, thread, threads, &begin, &end);
        inputs_made(j, in, row, begin, end);
        cpu_barrier(j->c, threads);
    }
    for (int i = 0; i < j->n; i++) {
        if (j->w[i]->packed)
            packed_share(j, i, &in[j->input_of[i]], own, thread, threads);
        else
            plain_share(j, i, x, j->norm ? j->K : j->ldx, thread, threads);
    }
}

/* ---- the job ---- */

static double cost(const linear *w, int rows) {
    const double size = (double)w->rows * w->cols;
    if (w->packed) return 0.03 * size * (1 + 0.5 * rows);
    return size * dtype_bytes(w->type) * 0.05 + size * rows * 0.02;
}

/* Which matrices quantize alike. */
static void find_inputs(linears_job *j) {
    for (int i = 0; i < j->n; i++) {
        int at = 0;
        j->plain |= !j->w[i]->packed;
        if (!j->w[i]->packed) continue;
        while (at < j->n_inputs && !packed_same_act(j->inputs[at].q, &j->w[i]->q)) at++;
        if (at == j->n_inputs) j->inputs[j->n_inputs++] = (input){ .q = &j->w[i]->q };
        j->input_of[i] = at;
    }
}

static bool by_planes(const linears_job *j, const input *in) {
    return j->rows >= PACKED_GEMM_ROWS && j->c->nv.gemm && in->q->act != LINEAR_ACT_FLOAT && j->K <= 32768;
}

/* Memory that all threads see: codes and planes of every input, normed rows that plain matrices read. */
static void shared_layout(linears_job *j) {
    const size_t acts = packed_acts_bytes((size_t)j->rows, j->K);
    const size_t planes = (size_t)(j->rows + 15) / 16 * (size_t)nv_tile_bytes(nv_padded(j->K));
    const size_t h = j->norm && j->plain && !j->h ? (size_t)j->rows * (size_t)j->K * sizeof(float) : 0;
    size_t all = h;
    for (int i = 0; i < j->n_inputs; i++) all += acts + (by_planes(j, &j->inputs[i]) ? planes : 0);
    char *mem = work_need(&j->c->shared, all);
    for (int i = 0; i < j->n_inputs; i++) {
        j->inputs[i].acts = packed_acts_at(mem, j->rows, j->K);
        mem += acts;
        if (!by_planes(j, &j->inputs[i])) continue;
        j->inputs[i].planes = mem;
        j->many = true;
        mem += planes;
    }
    if (h) j->h = (float *)(void *)mem;
}

static void run_linears(linears_job *j) {
    double ns = 0;
    if (j->rows <= 0) return;
    find_inputs(j);
    j->alone = j->rows == 1 && (j->n_inputs > 0 || j->norm);
    if (!j->alone) shared_layout(j);
    cpu_own_need(j->c, codes_at(j) + (j->alone ? MOST * packed_acts_bytes(1, j->K) : 0));
    for (int i = 0; i < j->n; i++) ns += cost(j->w[i], j->rows);
    cpu_run(j->c, linears_part, j, ns);
}

void cpu_linear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    if (w->q.format != LINEAR_PLAIN && !w->packed) {
        cpu_qlinear(o, y, ldy, x, ldx, w, rows);
        return;
    }
    linears_job j = {
        .c = o->self, .x = x, .ldx = ldx, .rows = rows, .K = w->cols, .n = 1, .w = &w, .y = &y, .ldy = ldy
    };
    run_linears(&j);
}

bool cpu_norm_linears(ops *o, float *const *y, float *h, const linear *const *w, int n, const float *x,
                      const float *norm, float eps, int rows) {
    if (n < 1 || n > MOST) return false;
    for (int i = 0; i < n; i++)
        if ((w[i]->q.format != LINEAR_PLAIN && !w[i]->packed) || w[i]->cols != w[0]->cols) return false;
    const int K = w[0]->cols;
    linears_job j = { .c = o->self, .x = x, .ldx = K, .rows = rows, .K = K, .norm = norm, .eps = eps, .h = h };
    j.n = n;
    j.w = w;
    j.y = y;
    run_linears(&j);
    return true;
}

/* x += what j's inputs become in w. */
static void run_add(linears_job j, float *x, const linear *w) {
    j.n = 1;
    j.w = &w;
    j.y = &x;
    j.add = true;
    run_linears(&j);
}

bool cpu_linear_add(ops *o, float *x, const float *h, const linear *w, int rows) {
    if (!w->packed) return false;
    run_add((linears_job){ .c = o->self, .x = h, .ldx = w->cols, .rows = rows, .K = w->cols }, x, w);
    return true;
}

bool cpu_gated_linear_add(ops *o, float *x, const float *in, const float *z, const float *norm, int heads, int dim,
                          float eps, const linear *w, int rows) {
    CHECK(heads * dim == w->cols, "%d heads of %d for %d columns", heads, dim, w->cols);
    if (!w->packed) return false;
    linears_job j = { .c = o->self, .x = in, .ldx = w->cols, .rows = rows, .K = w->cols, .norm = norm, .eps = eps };
    j.z = z;
    j.dim = dim;
    run_add(j, x, w);
    return true;
}
