/* NVFP4 weights repacked at load: panels of kern/nv.h in memory of their own, the checkpoint's pages given back. */
#include <sys/mman.h>
#include <unistd.h>

#include "ops/ops_cpu.h"

/* Pages wholly inside [p, p + bytes) of a file mapping; a later read finds them in the file again. */
static void drop_pages(const void *p, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)p + page - 1) / page * page, end = ((uintptr_t)p + bytes) / page * page;
    if (end > begin) madvise((void *)begin, end - begin, MADV_DONTNEED); /* advice: nothing to do when refused */
}

static bool packed_new(ops *o, uint8_t **out, size_t bytes, err *e) {
    cpu *c = o->self;
    void *p = NULL;
    if (!slab_take(&c->weights, &p, bytes, e)) return false;
    *out = p;
    return true;
}

static void packed_free(ops *o, uint8_t *p) {
    cpu *c = o->self;
    slab_drop(&c->weights, p);
}

/* ---- one matrix ---- */

typedef struct pack_job {
    cpu *c;
    uint8_t *to;
    linear_desc d;
} pack_job;

static void pack_part(void *ctx, int thread, int threads) {
    const pack_job *j = ctx;
    const int K = j->d.cols;
    int64_t begin, end;
    pool_share(nv_panels(j->d.rows), 1, thread, threads, &begin, &end);
    for (int64_t p = begin; p < end; p++) {
        const int64_t row = p * NV_ROWS;
        j->c->nv.pack(j->to + p * nv_panel_bytes(K), (const uint8_t *)j->d.data + row * (K / 2),
                      j->d.q.scales + row * (K / 16), (int)min_i64(NV_ROWS, j->d.rows - row), K);
    }
}

bool cpu_linear_new(ops *o, linear **out, const linear_desc *d, err *e) {
    if (!host_linear_new(o, out, d, e)) return false;
    if (d->q.format != LINEAR_NVFP4) return true;
    const size_t bytes = (size_t)nv_matrix_bytes(d->rows, d->cols);
    if (!packed_new(o, &(*out)->packed, bytes, e)) {
        host_linear_free(o, *out);
        *out = NULL;
        return false;
    }
    pack_job j = { .c = o->self, .to = (*out)->packed, .d = *d };
    cpu_run(j.c, pack_part, &j, (double)bytes);
    if (d->mapped) drop_pages(d->data, (size_t)d->rows * (size_t)d->cols / 2);
    if (d->mapped) drop_pages(d->q.scales, (size_t)d->rows * (size_t)d->cols / 16);
    return true;
}

void cpu_linear_free(ops *o, linear *w) {
    if (w) packed_free(o, w->packed);
    host_linear_free(o, w);
}

/* ---- routed experts ---- */

typedef struct pack_experts_job {
    cpu *c;
    experts *x;
    bool mapped;
} pack_experts_job;

/* Panel i of an [N, K] matrix into `to`; past its rows nothing. */
static void pack_panel(const cpu *c, uint8_t *to, const void *data, const linear_quant *q, int i, int N, int K) {
    const int64_t row = (int64_t)i * NV_ROWS;
    c->nv.pack(to, (const uint8_t *)data + row * (K / 2), q->scales + row * (K / 16), (int)min_i64(NV_ROWS, N - row),
               K);
}

static void pack_experts_part(void *ctx, int thread, int threads) {
    const pack_experts_job *j = ctx;
    experts *x = j->x;
    const int in = nv_panels(x->inter), down = nv_panels(x->hidden);
    const int64_t in_bytes = nv_panel_bytes(x->hidden), down_bytes = nv_panel_bytes(x->inter);
    const size_t codes = (size_t)x->inter * (size_t)x->hidden / 2;
    int64_t begin, end;
    pool_share(x->count, 1, thread, threads, &begin, &end);
    for (int64_t e = begin; e < end; e++) {
        uint8_t *to = x->packed_in + e * 2 * in * in_bytes;
        for (int i = 0; i < in; i++, to += 2 * in_bytes) {
            pack_panel(j->c, to, x->gate[e], &x->gate_q[e], i, x->inter, x->hidden);
            pack_panel(j->c, to + in_bytes, x->up[e], &x->up_q[e], i, x->inter, x->hidden);
        }
        to = x->packed_down + e * down * down_bytes;
        for (int i = 0; i < down; i++, to += down_bytes)
            pack_panel(j->c, to, x->down[e], &x->down_q[e], i, x->hidden, x->inter);
        const void *sources[] = { x->gate[e], x->up[e], x->down[e] };
        const linear_quant *quants[] = { &x->gate_q[e], &x->up_q[e], &x->down_q[e] };
        for (int i = 0; j->mapped && i < 3; i++) {
            drop_pages(sources[i], codes);
            drop_pages(quants[i]->scales, codes / 8);
        }
    }
}

static bool all_same_in(const experts *x) {
    const linear_quant *a = &x->gate_q[0];
    for (int e = 0; e < x->count; e++) {
        const linear_quant *q[] = { &x->gate_q[e], &x->up_q[e] };
        for (int i = 0; i < 2; i++)
            if (q[i]->act != a->act || (a->act == LINEAR_ACT_FP4 && q[i]->input_scale != a->input_scale)) return false;
    }
    return true;
}

static bool all_nvfp4(const experts *x) {
    if (!x->gate_q) return false;
    for (int e = 0; e < x->count; e++)
        if (x->gate_q[e].format != LINEAR_NVFP4 || x->up_q[e].format != LINEAR_NVFP4 ||
            x->down_q[e].format != LINEAR_NVFP4 || x->gate_q[e].act != x->up_q[e].act)
            return false;
    return true;
}

bool cpu_experts_new(ops *o, experts **out, const experts_desc *d, err *e) {
    if (!host_experts_new(o, out, d, e)) return false;
    experts *x = *out;
    if (!all_nvfp4(x)) return true;
    const size_t in = (size_t)x->count * 2 * (size_t)nv_matrix_bytes(x->inter, x->hidden);
    const size_t down = (size_t)x->count * (size_t)nv_matrix_bytes(x->hidden, x->inter);
    if (!packed_new(o, &x->packed_in, in, e) || !packed_new(o, &x->packed_down, down, e)) {
        cpu_experts_free(o, x);
        *out = NULL;
        return false;
    }
    x->same_in = all_same_in(x);
    pack_experts_job j = { .c = o->self, .x = x, .mapped = d->mapped };
    cpu_run(j.c, pack_experts_part, &j, (double)(in + down));
    return true;
}

void cpu_experts_free(ops *o, experts *x) {
    if (x) {
        packed_free(o, x->packed_in);
        packed_free(o, x->packed_down);
    }
    host_experts_free(o, x);
}
