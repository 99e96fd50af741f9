/* Handles and memory of the backends that live in plain memory. */
#include <stdlib.h>
#include <string.h>

#include "ops/ops_head.h"
#include "ops/ops_slab.h"

/* In front of each block: how to give it back. 64 bytes keep the alignment. */
typedef struct block_head {
    void *base;
    size_t mapped_bytes; /* 0: from malloc */
    char pad[64 - sizeof(void *) - sizeof(size_t)];
} block_head;

/* Large blocks are mapped: their zero pages cost nothing until written (a KV cache for the whole context). */
static const size_t MAP_FROM_BYTES = 1 << 20;

static bool host_mem_new(ops *o, void **out, size_t bytes, err *e) {
    (void)o;
    alloc_counted();
    const size_t total = bytes + sizeof(block_head);
    block_head *h = NULL;
    size_t mapped = 0;
    if (total > bytes && total >= MAP_FROM_BYTES) {
        h = slab_map(total);
        mapped = total;
    } else if (total > bytes) {
        void *p = NULL;
        if (posix_memalign(&p, 64, total) == 0) h = memset(p, 0, total);
    }
    if (!h)
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "cannot get %zu bytes (use a shorter context or free memory)",
                    bytes);
    h->base = h;
    h->mapped_bytes = mapped;
    *out = h + 1;
    return true;
}

static void host_mem_free(ops *o, void *p) {
    (void)o;
    if (!p) return;
    block_head *h = (block_head *)p - 1;
    CHECK(h->base == h, "not a block of mem_new");
    h->base = NULL;
    if (h->mapped_bytes)
        slab_unmap(h, h->mapped_bytes);
    else
        free(h);
}

static void host_copy(ops *o, void *dst, const void *src, size_t bytes) {
    (void)o;
    if (bytes) memmove(dst, src, bytes);
}

static void host_fill_zero(ops *o, void *dst, size_t bytes) {
    (void)o;
    if (bytes) memset(dst, 0, bytes);
}

static void check_type(dtype t, linear_format f, const char *name) {
    const bool ok = f == LINEAR_NVFP4 ? t == DT_U8
                    : f == LINEAR_FP8 ? t == DT_F8_E4M3
                                      : t == DT_BF16 || t == DT_F16 || t == DT_F32;
    CHECK(ok, "%s: type %s", name, dtype_name(t));
}

static void check_quant(const linear_quant *q, int cols, const char *name) {
    if (q->format == LINEAR_PLAIN) return;
    CHECK(q->scale_2 > 0 && (q->format == LINEAR_FP8 || (q->scales && cols % 16 == 0)), "%s: scales", name);
    CHECK(q->input_scale > 0 || q->act == LINEAR_ACT_FLOAT || q->act == LINEAR_ACT_INT8, "%s: no input_scale", name);
    CHECK((q->format == LINEAR_FP8) == (q->act == LINEAR_ACT_FP8) || q->act == LINEAR_ACT_FLOAT, "%s: act mode", name);
}

static void check_data(const void *p, dtype t, const char *name) {
    CHECK(p && (uintptr_t)p % (size_t)dtype_bytes(t) == 0, "%s: data %p not aligned to its element", name, p);
}

bool host_linear_new(ops *o, linear **out, const linear_desc *d, err *e) {
    (void)o, (void)e;
    const char *name = d->name ? d->name : "";
    check_type(d->type, d->q.format, name);
    check_quant(&d->q, d->cols, name);
    check_data(d->data, d->type, name);
    CHECK(d->rows > 0 && d->cols > 0, "%s: [%d, %d]", name, d->rows, d->cols);
    linear *w = xmalloc(sizeof *w);
    *w = (linear){
        .name = xstrdup(name), .type = d->type, .rows = d->rows, .cols = d->cols, .data = d->data, .q = d->q
    };
    *out = w;
    return true;
}

void host_linear_free(ops *o, linear *w) {
    (void)o;
    if (!w) return;
    free(w->name);
    free(w);
}

static const void **copy_pointers(const void *const *p, int n, dtype t, const char *name) {
    const void **q = xcalloc((size_t)n, sizeof *q);
    for (int i = 0; i < n; i++) {
        check_data(p[i], t, name);
        q[i] = p[i];
    }
    return q;
}

static linear_quant *copy_quants(const linear_quant *q, int n, int cols, const char *name) {
    if (!q) return NULL;
    linear_quant *own = xmalloc((size_t)n * sizeof *own);
    for (int i = 0; i < n; i++) {
        check_quant(&q[i], cols, name);
        own[i] = q[i];
    }
    return own;
}

bool host_experts_new(ops *o, experts **out, const experts_desc *d, err *e) {
    (void)o, (void)e;
    const char *name = d->name ? d->name : "";
    check_type(d->type, d->gate_q ? d->gate_q[0].format : LINEAR_PLAIN, name);
    CHECK(d->count > 0 && d->inter > 0 && d->hidden > 0, "%s: %d experts of [%d, %d]", name, d->count, d->inter,
          d->hidden);
    experts *x = xmalloc(sizeof *x);
    *x = (experts){ .name = xstrdup(name), .type = d->type, .count = d->count, .inter = d->inter, .hidden = d->hidden };
    x->gate = copy_pointers(d->gate, d->count, d->type, name);
    x->up = copy_pointers(d->up, d->count, d->type, name);
    x->down = copy_pointers(d->down, d->count, d->type, name);
    x->gate_q = copy_quants(d->gate_q, d->count, d->hidden, name);
    x->up_q = copy_quants(d->up_q, d->count, d->hidden, name);
    x->down_q = copy_quants(d->down_q, d->count, d->inter, name);
    *out = x;
    return true;
}

void host_experts_free(ops *o, experts *x) {
    (void)o;
    if (!x) return;
    free(x->gate);
    free(x->up);
    free(x->down);
    free(x->gate_q);
    free(x->up_q);
    free(x->down_q);
    free(x->name);
    free(x);
}

static void host_head_free(ops *o, lm_head *h) {
    if (!h) return;
    host_mem_free(o, h->block);
    free(h);
}

static bool host_sync(ops *o, err *e) {
    (void)o, (void)e;
    return true;
}

void ops_host_fill(ops *o) {
    o->mem_new = host_mem_new;
    o->mem_free = host_mem_free;
    o->upload = o->download = o->copy = host_copy;
    o->fill_zero = host_fill_zero;
    o->linear_new = host_linear_new;
    o->linear_free = host_linear_free;
    o->experts_new = host_experts_new;
    o->experts_free = host_experts_free;
    o->head_free = host_head_free;
    o->sync = host_sync;
}

void *work_need(work *s, size_t bytes) {
    if (s->bytes >= bytes) return s->p;
    alloc_counted();
    free(s->p);
    s->bytes = bytes + bytes / 4 + 4096;
    void *p = NULL;
    CHECK(posix_memalign(&p, 64, s->bytes) == 0, "out of memory for %zu bytes of work space", s->bytes);
    return s->p = p;
}

void work_free(work *s) {
    free(s->p);
    *s = (work){ 0 };
}

void ops_check_state_spans(const ops_span *spans, int n_spans) {
    for (int i = 0; i < n_spans; i++) {
        const ops_span *s = &spans[i];
        CHECK(s->slot >= 0 && s->row0 >= 0 && s->rows >= 0, "span %d: slot %d rows %d+%d", i, s->slot, s->row0,
              s->rows);
        CHECK(s->commit >= 0 && s->commit <= OPS_MAX_PENDING, "span %d: commit %d", i, s->commit);
        CHECK(!s->tentative || s->rows <= OPS_MAX_PENDING, "span %d: %d tentative rows", i, s->rows);
        for (int j = 0; j < i; j++) CHECK(spans[j].slot != s->slot, "slot %d in spans %d and %d", s->slot, j, i);
    }
}

void ops_check_kv_spans(const ops_kv *kv, const ops_span *spans, int n_spans) {
    CHECK(kv->type == DT_F32 || kv->type == DT_BF16 || kv->type == DT_F8_E4M3, "KV type %s", dtype_name(kv->type));
    for (int i = 0; i < n_spans; i++) {
        const ops_span *s = &spans[i];
        CHECK(s->slot >= 0 && s->row0 >= 0 && s->rows >= 0 && s->pos0 >= 0 && s->rows <= kv->capacity - s->pos0,
              "span %d: slot %d positions %d+%d of %d", i, s->slot, s->pos0, s->rows, kv->capacity);
    }
}
