/* Routed experts that stay with the CPU: inputs and routing come over, the CPU backend's own op runs on them, the sums go
 * back. The bits are the same, since the op's inputs are.
 *
 * Recorded series hold the op as a call from the device's stream, so that a layer with such experts does not cut them. */
#include "ops/ops_cuda.h"

#ifdef NIBBLE_CUDA

#include <stdlib.h>
#include <string.h>

struct host_job {
    ops *host;
    const experts *ex;
    const float *x, *wt; /* [rows, hidden], [rows, k] */
    const int32_t *idx;
    float *y, *inner; /* [rows, hidden]; [rows, k, inter] or NULL */
    int rows, k;
    host_job *next;
};

bool cuda_host_experts_new(cuda *c, cuda_experts *x, const experts_desc *d, err *e) {
    if (!c->host && !ops_cpu_open(&c->host, c->threads, c->cap, e)) return false;
    return c->host->experts_new(c->host, &x->on_cpu, d, e);
}

void cuda_host_experts_free(cuda *c, cuda_experts *x) {
    if (x->on_cpu) c->host->experts_free(c->host, x->on_cpu);
    for (host_job *j = x->jobs, *next; j; j = next) {
        next = j->next;
        free(j);
    }
}

/* A device that failed leaves anything behind: no expert is looked up under such a number. */
static bool routed(const host_job *j) {
    const int count = experts_count(j->ex);
    for (int64_t p = 0; p < (int64_t)j->rows * j->k; p++)
        if (j->idx[p] < 0 || j->idx[p] >= count || (p % j->k && j->idx[p] <= j->idx[p - 1])) return false;
    return true;
}

static void run_job(void *ctx) {
    const host_job *j = ctx;
    if (!routed(j))
        memset(j->y, 0xff, (size_t)j->rows * (size_t)experts_hidden(j->ex) * sizeof *j->y); /* NaN */
    else if (j->inner)
        j->host->moe_hidden(j->host, j->y, j->inner, j->x, j->ex, j->idx, j->wt, j->rows, j->k);
    else
        j->host->moe(j->host, j->y, j->x, j->ex, j->idx, j->wt, j->rows, j->k);
}

/* A copy that lives as long as the experts: records call it again and again. One for each shape and place of memory. */
static host_job *keep(cuda_experts *ex, const host_job *j) {
    for (host_job *k = ex->jobs; k; k = k->next)
        if (k->x == j->x && k->rows == j->rows && k->k == j->k && k->inner == j->inner) return k;
    host_job *own = xmalloc(sizeof *own);
    *own = *j;
    own->next = ex->jobs;
    return ex->jobs = own;
}

void cuda_host_moe(cuda *c, float *y, float *hidden, const float *x, cuda_experts *ex, const int32_t *idx,
                   const float *wt, int rows, int k) {
    const size_t pairs = (size_t)rows * (size_t)k * 4, row_bytes = (size_t)rows * (size_t)ex->base.hidden * 4;
    const size_t inner = hidden ? pairs * (size_t)ex->base.inter : 0;
    const size_t p = cuda_aligned(pairs), r = cuda_aligned(row_bytes);
    char *at = gpu_host_work(c->g, 2 * r + 2 * p + inner);
    if (!at) return;
    float *in = (void *)at, *out = (void *)(at + r), *weight = (void *)(at + 2 * r + p);
    int32_t *chosen = (void *)(at + 2 * r);
    const host_job j = { .host = c->host,
                         .ex = ex->on_cpu,
                         .x = in,
                         .wt = weight,
                         .idx = chosen,
                         .y = out,
                         .inner = hidden ? (void *)(at + 2 * r + 2 * p) : NULL,
                         .rows = rows,
                         .k = k };
    gpu_fetch(c->g, in, x, row_bytes);
    gpu_fetch(c->g, chosen, idx, pairs);
    gpu_fetch(c->g, weight, wt, pairs);
    if (c->capturing)
        gpu_call(c->g, run_job, keep(ex, &j));
    else if (gpu_wait(c->g))
        run_job((void *)&j);
    gpu_send(c->g, y, out, row_bytes);
    if (hidden) gpu_send(c->g, hidden, j.inner, inner);
}

#endif
