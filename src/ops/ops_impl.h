/* ops_impl.h - what the host backends (ref, cpu) share: handles, plain memory, span checks. Internal to ops/. */
#ifndef NIBBLE_OPS_IMPL_H
#define NIBBLE_OPS_IMPL_H

#include "ops/ops.h"

struct linear {
    char *name;
    dtype type;
    int rows, cols;
    const void *data;
    linear_quant q;
    uint8_t *packed; /* cpu, NVFP4: panels of kern/nv.h, of a slab; NULL otherwise */
};

struct experts {
    char *name;
    dtype type;
    int count, inter, hidden;
    const void **gate, **up, **down;      /* [count] */
    linear_quant *gate_q, *up_q, *down_q; /* [count], or NULL: plain */
    /* cpu, NVFP4: per expert the panels of gate and up in turn, and those of down; NULL otherwise. */
    uint8_t *packed_in, *packed_down;
    bool same_in; /* gate and up of all experts quantize a row in the same way */
};

/* A quantized Linear as quant_linear.h wants it. */
static inline linear_desc linear_view(const linear *w) {
    return (linear_desc){ .type = w->type, .rows = w->rows, .cols = w->cols, .data = w->data, .q = w->q };
}
static inline linear_desc expert_view(const experts *x, const void *const *data, const linear_quant *q, int e,
                                      bool down) {
    return (linear_desc){ .type = x->type,
                          .rows = down ? x->hidden : x->inter,
                          .cols = down ? x->inter : x->hidden,
                          .data = data[e],
                          .q = q ? q[e] : (linear_quant){ .format = LINEAR_PLAIN } };
}

enum { OPS_TILE = OPS_KV_PAGE }; /* absolute positions per attention tile: a tile never leaves its page */

/* Where position pos of a slot lies in k and v: a row of kv_heads * dim. For backends whose device memory is plain. */
static inline int64_t kv_row(const ops_kv *kv, int slot, int pos) {
    return (int64_t)kv->pages[(int64_t)slot * kv->slot_pages + pos / OPS_KV_PAGE] * OPS_KV_PAGE + pos % OPS_KV_PAGE;
}

NODISCARD bool ops_ref_open(ops **out, err *e);
NODISCARD bool ops_cpu_open(ops **out, int threads, kern_isa isa, err *e);
NODISCARD bool ops_cuda_open(ops **out, int threads, kern_isa isa, err *e);

/* The handles of plain memory; a backend that prepares weights in its own way wraps them. */
bool host_linear_new(ops *o, linear **out, const linear_desc *d, err *e);
void host_linear_free(ops *o, linear *w);
bool host_experts_new(ops *o, experts **out, const experts_desc *d, err *e);
void host_experts_free(ops *o, experts *x);

/* Set the memory and handle members of a backend whose device memory is plain memory. */
void ops_host_fill(ops *o);

/* Grow-only work memory, 64-byte aligned, contents lost on growth. Aborts when memory ends: its size is bounded by the
 * batch, for which the caller already holds activations. */
typedef struct work {
    void *p;
    size_t bytes;
} work;
void *work_need(work *s, size_t bytes);
void work_free(work *s);

/* CHECK spans of conv/gdn: ranges, commits, tentative lengths, no slot twice. */
void ops_check_state_spans(const ops_span *spans, int n_spans);
/* CHECK that the spans fit the KV buffers. */
void ops_check_kv_spans(const ops_kv *kv, const ops_span *spans, int n_spans);

/* Element `at` of an array of type t. */
static inline const void *elem_at(const void *p, dtype t, int64_t at) { return (const char *)p + at * dtype_bytes(t); }

#endif
