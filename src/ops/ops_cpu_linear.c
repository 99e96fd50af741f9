/* y = x W^T: threads own weight rows (columns of y), so that each weight is read once, by one thread. */
#include "ops/ops_cpu.h"

typedef struct linear_job {
    cpu *c;
    float *y;
    const float *x;
    int64_t ldy, ldx;
    const linear *w;
    int rows;
    int grain;    /* weight rows, or rows of x */
    bool by_rows; /* share out rows of x instead: a matrix with very few rows and a long batch */
} linear_job;

static void linear_part(void *ctx, int thread, int threads) {
    const linear_job *j = ctx;
    const linear *w = j->w;
    int64_t begin, end;
    pool_share(j->by_rows ? j->rows : w->rows, j->grain, thread, threads, &begin, &end);
    if (j->by_rows)
        cpu_gemm(j->c, w->type, j->y + begin * j->ldy, j->ldy, j->x + begin * j->ldx, j->ldx, w->data,
                 (int)(end - begin), w->rows, w->cols);
    else
        cpu_gemm(j->c, w->type, j->y + begin, j->ldy, j->x, j->ldx, elem_at(w->data, w->type, begin * w->cols), j->rows,
                 (int)(end - begin), w->cols);
}

void cpu_linear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    cpu *c = o->self;
    if (w->q.format != LINEAR_PLAIN) {
        cpu_qlinear(o, y, ldy, x, ldx, w, rows);
        return;
    }
    linear_job j = { .c = c, .y = y, .x = x, .ldy = ldy, .ldx = ldx, .w = w, .rows = rows };
    j.by_rows = w->rows < 16 * c->threads && rows >= 8 * c->threads;
    /* Whole register tiles (16 outputs for few rows, 48 for many), as long as every thread gets several. */
    j.grain = j.by_rows ? 8 : rows <= 4 ? 16 : 48;
    while (!j.by_rows && j.grain > 4 && w->rows < 4 * j.grain * c->threads) j.grain /= 2;
    const double size = (double)w->rows * w->cols;
    cpu_run(c, linear_part, &j, size * dtype_bytes(w->type) * 0.05 + size * rows * 0.02);
}
