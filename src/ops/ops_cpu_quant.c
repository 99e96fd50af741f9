/* Quantized Linears and experts as stored (FP8): inputs are quantized once per row, then threads own output rows.
 * NVFP4 is in ops_cpu_linear.c and ops_cpu_packed.c. */
#include <string.h>

#include "num/mathf.h"
#include "ops/ops_cpu.h"
#include "ops/quant_linear.h"

static size_t act_bytes(int K) { return (qact_bytes(K) + 63) & ~(size_t)63; }

/* ---- y = x W^T ---- */

typedef struct qlinear_job {
    cpu *c;
    float *y;
    const float *x;
    int64_t ldy, ldx;
    linear_desc d;
    int rows;
    char *acts; /* [rows] of act_bytes(K) */
} qlinear_job;

static void qlinear_part(void *ctx, int thread, int threads) {
    const qlinear_job *j = ctx;
    const size_t size = act_bytes(j->d.cols);
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (int64_t r = begin; r < end; r++)
        qact_make(&j->c->q, j->acts + (size_t)r * size, j->x + r * j->ldx, j->d.cols, j->d.q.act, j->d.q.input_scale);
    cpu_barrier(j->c, threads);
    pool_share(j->d.rows, 16, thread, threads, &begin, &end);
    for (int64_t r = 0; r < j->rows && begin < end; r++)
        qlinear_rows(j->y + r * j->ldy + begin, &j->d, j->acts + (size_t)r * size, (int)begin, (int)end);
}

void cpu_qlinear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    qlinear_job j = { .c = o->self, .y = y, .x = x, .ldy = ldy, .ldx = ldx, .d = linear_view(w), .rows = rows };
    j.acts = work_need(&j.c->shared, (size_t)rows * act_bytes(w->cols));
    cpu_run(j.c, qlinear_part, &j, 1.0 * rows * w->rows * w->cols);
}

/* ---- experts ---- */

enum { ROW_BLOCK = 16 };

typedef struct qmoe_job {
    cpu *c;
    float *y, *hidden; /* [rows, n]; [rows, k, inter] */
    const float *x, *wt;
    const experts *ex;
    const int32_t *idx;
    int rows, k;
    char *gate_act, *up_act, *down_act; /* [rows * k] */
} qmoe_job;

static void quantize_pairs(const qmoe_job *j, int thread, int threads, bool down) {
    const experts *ex = j->ex;
    const int n = ex->hidden, inter = ex->inter;
    int64_t begin, end;
    pool_share((int64_t)j->rows * j->k, 1, thread, threads, &begin, &end);
    for (int64_t p = begin; p < end; p++) {
        const int e = j->idx[p];
        if (down) {
            qact_make(&j->c->q, j->down_act + (size_t)p * act_bytes(inter), j->hidden + p * inter, inter,
                      ex->down_q[e].act, ex->down_q[e].input_scale);
            continue;
        }
        const float *x = j->x + p / j->k * n;
        qact_make(&j->c->q, j->gate_act + (size_t)p * act_bytes(n), x, n, ex->gate_q[e].act, ex->gate_q[e].input_scale);
        qact_make(&j->c->q, j->up_act + (size_t)p * act_bytes(n), x, n, ex->up_q[e].act, ex->up_q[e].input_scale);
    }
}

static void qmoe_part(void *ctx, int thread, int threads) {
    const qmoe_job *j = ctx;
    const experts *ex = j->ex;
    const int n = ex->hidden, inter = ex->inter;
    float *own = cpu_own(j->c, thread);
    int64_t begin, end;
    quantize_pairs(j, thread, threads, false);
    cpu_barrier(j->c, threads);
    pool_share(inter, 16, thread, threads, &begin, &end);
    for (int p = 0; p < j->rows * j->k && begin < end; p++) {
        const linear_desc gate = expert_view(ex, (const void *const *)ex->gate, ex->gate_q, j->idx[p], false);
        const linear_desc up = expert_view(ex, (const void *const *)ex->up, ex->up_q, j->idx[p], false);
        float *h = j->hidden + (int64_t)p * inter + begin;
        qlinear_rows(h, &gate, j->gate_act + (size_t)p * act_bytes(n), (int)begin, (int)end);
        qlinear_rows(own, &up, j->up_act + (size_t)p * act_bytes(n), (int)begin, (int)end);
        j->c->k.silu_mul(h, h, own, end - begin);
    }
    cpu_barrier(j->c, threads);
    quantize_pairs(j, thread, threads, true);
    cpu_barrier(j->c, threads);
    pool_share(n, 16, thread, threads, &begin, &end);
    for (int r = 0; r < j->rows && begin < end; r++) {
        float *y = j->y + (int64_t)r * n + begin;
        memset(y, 0, (size_t)(end - begin) * sizeof *y);
        for (int p = r * j->k; p < (r + 1) * j->k; p++) { /* in increasing expert index */
            const linear_desc down = expert_view(ex, (const void *const *)ex->down, ex->down_q, j->idx[p], true);
            qlinear_rows(own, &down, j->down_act + (size_t)p * act_bytes(inter), (int)begin, (int)end);
            j->c->k.add_scaled(y, j->wt[p], own, end - begin);
        }
    }
}

void cpu_qmoe(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx, const float *wt,
              int rows, int k) {
    cpu *c = o->self;
    const size_t pairs = (size_t)(rows < ROW_BLOCK ? rows : ROW_BLOCK) * (size_t)k;
    const size_t in = pairs * act_bytes(ex->hidden), down = pairs * act_bytes(ex->inter);
    const size_t h_bytes = pairs * (size_t)ex->inter * sizeof(float);
    const int wide = ex->inter > ex->hidden ? ex->inter : ex->hidden;
    char *p = work_need(&c->shared, 2 * in + down + h_bytes);
    cpu_own_need(c, (size_t)wide * sizeof(float));
    for (int r = 0; r < rows; r += ROW_BLOCK) {
        const int m = rows - r < ROW_BLOCK ? rows - r : ROW_BLOCK;
        const int64_t at = (int64_t)r * k;
        qmoe_job j = { .c = c,
                       .y = y + (int64_t)r * ex->hidden,
                       .x = x + (int64_t)r * ex->hidden,
                       .wt = wt + at,
                       .ex = ex,
                       .idx = idx + at,
                       .hidden = hidden ? hidden + at * ex->inter : (float *)(void *)(p + 2 * in + down),
                       .rows = m,
                       .k = k,
                       .gate_act = p,
                       .up_act = p + in,
                       .down_act = p + 2 * in };
        cpu_run(c, qmoe_part, &j, 3.0 * m * k * ex->inter * ex->hidden);
    }
}
