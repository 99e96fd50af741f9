/* ops_impl.h - what the host backends (ref, cpu) share: handles, plain memory, span checks. Internal to ops/. */
#ifndef NIBBLE_OPS_IMPL_H
#define NIBBLE_OPS_IMPL_H

#include "ops/ops.h"

struct linear {
    char *name;
    dtype type;
    int rows, cols;
    const void *data;
};

struct experts {
    char *name;
    dtype type;
    int count, inter, hidden;
    const void **gate, **up, **down; /* [count] */
};

enum { OPS_TILE = 64 }; /* absolute positions per attention tile (NUMERICS 5) */

NODISCARD bool ops_ref_open(ops **out, err *e);
NODISCARD bool ops_cpu_open(ops **out, int threads, kern_isa isa, err *e);

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
