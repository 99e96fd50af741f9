/* Weights on the device. */
#include "ops/ops_cuda.h"

#ifdef NIBBLE_CUDA

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static gpu_format format_from(dtype t, linear_format f) {
    if (f == LINEAR_NVFP4) return GPU_NVFP4;
    if (f == LINEAR_FP8) return GPU_FP8;
    return t == DT_F32 ? GPU_F32 : t == DT_F16 ? GPU_F16 : GPU_BF16;
}

static gpu_mat mat_from(dtype t, int rows, int cols, const linear_quant *q) {
    static const gpu_act acts[] = { [LINEAR_ACT_FLOAT] = GPU_ACT_FLOAT,
                                    [LINEAR_ACT_FP4] = GPU_ACT_FP4,
                                    [LINEAR_ACT_INT8] = GPU_ACT_INT8,
                                    [LINEAR_ACT_FP8] = GPU_ACT_FP8 };
    return (gpu_mat){ .format = format_from(t, q->format),
                      .act = q->format == LINEAR_PLAIN ? GPU_ACT_FLOAT : acts[q->act],
                      .rows = rows,
                      .cols = cols,
                      .scale_2 = q->scale_2,
                      .input_scale = q->input_scale };
}

static size_t data_bytes(const gpu_mat *m, dtype t) {
    return (size_t)m->rows * (size_t)m->cols * (size_t)dtype_bytes(t) / (m->format == GPU_NVFP4 ? 2 : 1);
}
static size_t scale_bytes(const gpu_mat *m) {
    return m->format == GPU_NVFP4 ? (size_t)m->rows * (size_t)m->cols / 16 : 0;
}

/* To the device; where that is the same memory, a mapped file's pages leave it again: the weights would lie there twice. */
static void upload(cuda *c, void *to, const void *from, size_t bytes, bool mapped) {
    gpu_upload_bulk(c->g, to, from, bytes);
#ifdef MADV_PAGEOUT
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)from + page - 1) / page * page, end = ((uintptr_t)from + bytes) / page * page;
    if (c->info.unified && mapped && end > begin) madvise((void *)begin, end - begin, MADV_PAGEOUT); /* advice */
#else
    (void)mapped;
#endif
}

/* Codes, then scales, at `at`. */
static char *place(cuda *c, gpu_mat *m, char *at, dtype t, const void *data, const uint8_t *scales, bool mapped) {
    m->data = at;
    upload(c, at, data, data_bytes(m, t), mapped);
    at += cuda_aligned(data_bytes(m, t));
    m->scales = scale_bytes(m) ? (const uint8_t *)at : NULL;
    upload(c, at, scales, scale_bytes(m), mapped);
    return at + cuda_aligned(scale_bytes(m));
}

/* Shared memory holds one quantized row. */
static bool check_cols(const char *name, int cols, err *e) {
    if (cols <= 24576) return true;
    return fail(e, ERR_INPUT, "E-CUDA-SHAPE",
                "%s: %d columns, and the GPU kernels take at most 24576 (use --device cpu)", name, cols);
}

static bool share_data(cuda *c, cuda_linear *w, const void *data, size_t bytes, bool mapped, err *e) {
    const char *from = data;
    int free_place = -1;
    for (int i = 0; i < c->n_shared; i++) {
        shared_data *s = &c->shared[i];
        if (!s->users) {
            free_place = i;
        } else if (from >= s->host && from + bytes <= s->host + s->bytes && (from - s->host) % 256 == 0) {
            s->users++;
            w->share = i;
            w->m.data = s->device + (from - s->host);
            return true;
        }
    }
    char *p = gpu_alloc(c->g, bytes);
    if (!p) return cuda_out_of_memory(c, bytes, e);
    upload(c, p, data, bytes, mapped);
    if (free_place < 0) {
        c->shared = xrealloc(c->shared, (size_t)(c->n_shared + 1) * sizeof *c->shared);
        free_place = c->n_shared++;
    }
    c->shared[free_place] = (shared_data){ from, p, bytes, 1 };
    w->share = free_place;
    w->m.data = p;
    return true;
}

bool cuda_linear_new(ops *o, linear **out, const linear_desc *d, err *e) {
    cuda *c = cuda_of(o);
    linear *plain;
    if (!check_cols(d->name ? d->name : "", d->cols, e) || !host_linear_new(o, &plain, d, e)) return false;
    cuda_linear *w = xmalloc(sizeof *w);
    *w = (cuda_linear){ .base = *plain, .m = mat_from(d->type, d->rows, d->cols, &d->q), .share = -1 };
    free(plain);
    bool ok = true;
    if (d->q.format == LINEAR_PLAIN) {
        ok = share_data(c, w, d->data, data_bytes(&w->m, d->type), d->mapped, e);
    } else {
        const size_t bytes = cuda_aligned(data_bytes(&w->m, d->type)) + cuda_aligned(scale_bytes(&w->m));
        w->base.packed = gpu_alloc(c->g, bytes);
        ok = w->base.packed || cuda_out_of_memory(c, bytes, e);
        if (ok) place(c, &w->m, (char *)w->base.packed, d->type, d->data, d->q.scales, d->mapped);
    }
    if (ok) return *out = &w->base, true;
    host_linear_free(o, &w->base);
    return false;
}

void cuda_linear_free(ops *o, linear *base) {
    cuda *c = cuda_of(o);
    cuda_linear *w = (cuda_linear *)base;
    if (!w) return;
    gpu_free(c->g, base->packed);
    if (w->share >= 0 && --c->shared[w->share].users == 0) gpu_free(c->g, c->shared[w->share].device);
    host_linear_free(o, base);
}

static bool same_mode(const gpu_mat *a, const gpu_mat *b) {
    return a->act == b->act && a->input_scale == b->input_scale;
}

static const linear_quant *quant_of(const experts_desc *d, int kind, int e) {
    static const linear_quant none = { .format = LINEAR_PLAIN };
    const linear_quant *q = kind == 0 ? d->gate_q : kind == 1 ? d->up_q : d->down_q;
    return q ? &q[e] : &none;
}

static int64_t offset_of(const cuda_experts *x, const void *p) { return (const char *)p - (const char *)x->block; }

/* All experts of a layer in one block: gate, up, down of the first, codes before scales, then those of the next. */
static bool place_experts(cuda *c, cuda_experts *x, gpu_mat *mats, const experts_desc *d, err *e) {
    const int n = d->count;
    size_t bytes = 0;
    for (int i = 0; i < 3 * n; i++) {
        const bool down = i / n == 2;
        mats[i] =
            mat_from(d->type, down ? d->hidden : d->inter, down ? d->inter : d->hidden, quant_of(d, i / n, i % n));
        bytes += cuda_aligned(data_bytes(&mats[i], d->type)) + cuda_aligned(scale_bytes(&mats[i]));
    }
    x->block = gpu_alloc(c->g, bytes);
    x->mats = gpu_alloc(c->g, 3 * (size_t)n * sizeof *mats);
    if (!x->block || !x->mats) return cuda_out_of_memory(c, bytes, e);
    char *at = x->block;
    for (int i = 0; i < n; i++) {
        const void *data[3] = { d->gate[i], d->up[i], d->down[i] };
        for (int k = 0; k < 3; k++)
            at = place(c, &mats[k * n + i], at, d->type, data[k], quant_of(d, k, i)->scales, d->mapped);
    }
    gpu_upload(c->g, x->mats, mats, 3 * (size_t)n * sizeof *mats);
    const gpu_mat *on = x->mats;
    gpu_experts *g = &x->x;
    *g = (gpu_experts){ .gate = on,
                        .up = on + n,
                        .down = on + 2 * n,
                        .like_in = mats[0],
                        .like_down = mats[2 * n],
                        .block = x->block,
                        .stride = (int64_t)bytes / n,
                        .gate_scales = offset_of(x, mats[0].scales),
                        .up_codes = offset_of(x, mats[n].data),
                        .up_scales = offset_of(x, mats[n].scales),
                        .down_codes = offset_of(x, mats[2 * n].data),
                        .down_scales = offset_of(x, mats[2 * n].scales),
                        .count = n,
                        .inter = d->inter,
                        .hidden = d->hidden,
                        .one_in_scale = true,
                        .same_in = true,
                        .uniform = true };
    for (int i = 0; i < 2 * n; i++) {
        g->one_in_scale = g->one_in_scale && same_mode(&mats[i], &mats[0]);
        g->same_in = g->same_in && same_mode(&mats[i], &mats[i % n]);
        g->uniform = g->uniform && mats[i].act == mats[0].act && mats[2 * n + i % n].act == mats[2 * n].act;
    }
    if (!g->uniform) g->like_in.act = g->like_down.act = GPU_ACT_FLOAT; /* no mode takes more room */
    return true;
}

void cuda_experts_free(ops *o, experts *base) {
    cuda_experts *x = (cuda_experts *)base;
    if (!x) return;
    cuda_host_experts_free(cuda_of(o), x);
    gpu_free(gpu_of(o), x->block);
    gpu_free(gpu_of(o), x->mats);
    host_experts_free(o, base);
}

bool cuda_experts_new(ops *o, experts **out, const experts_desc *d, err *e) {
    experts *plain;
    const char *name = d->name ? d->name : "";
    if (!d->on_cpu && (!check_cols(name, d->hidden, e) || !check_cols(name, d->inter, e))) return false;
    if (!host_experts_new(o, &plain, d, e)) return false;
    cuda_experts *x = xmalloc(sizeof *x);
    *x = (cuda_experts){ .base = *plain };
    free(plain);
    if (d->on_cpu) {
        if (cuda_host_experts_new(cuda_of(o), x, d, e)) return *out = &x->base, true;
        cuda_experts_free(o, &x->base);
        return false;
    }
    gpu_mat *mats = xcalloc(3 * (size_t)d->count, sizeof *mats);
    const bool ok = place_experts(cuda_of(o), x, mats, d, e);
    free(mats);
    if (ok) return *out = &x->base, true;
    cuda_experts_free(o, &x->base);
    return false;
}

#endif
