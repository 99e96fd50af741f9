/* ops_cuda.h - inside of the CUDA backend's host side. Internal to ops_cuda*.c. */
#ifndef NIBBLE_OPS_CUDA_H
#define NIBBLE_OPS_CUDA_H

#include "ops/cuda/gpu.h"
#include "ops/ops_head.h"
#include "ops/ops_impl.h"

/* A host range that lies on the device: several handles may be parts of one matrix (embedding, head, its real rows). */
typedef struct shared_data {
    const char *host;
    char *device;
    size_t bytes;
    int users;
} shared_data;

/* A recorded series of ops, or one that was seen once. */
typedef struct series {
    const void *what, *with;
    int rows, n_spans, tiles;
    bool tentative;
    unsigned work_changes; /* work memory moved since: the record is void */
    gpu_graph *graph;      /* NULL: seen once */
    uint64_t used;
} series;
enum { MOST_SERIES = 64, MOST_SERIES_ROWS = 64 };

typedef struct cuda {
    gpu *g;
    series all[MOST_SERIES];
    series *recording;
    int n_series;
    uint64_t clock;
    bool record; /* NIBBLE_CUDA_GRAPHS=0: no */
    gpu_info info;
    char isa[16];
    shared_data *shared;
    int n_shared;
    /* spans that lie in GPU_WORK_SPANS */
    ops_span *spans;
    gpu_span *host_spans;
    gpu_row *host_rows;
    int n_spans, cap_spans, cap_rows;
    unsigned moves; /* how often the spans' places changed */
    gpu_spans on_device;
    bool capturing; /* what is enqueued is recorded, not run */
    int threads;    /* of `host` */
    kern_isa cap;
    ops *host; /* the CPU backend, for experts that stay there; NULL until there are any */
} cuda;

typedef struct cuda_linear {
    linear base;
    gpu_mat m;
    int share; /* index in shared, or -1: m.data is its own block */
} cuda_linear;

/* A batch through experts that stay with the CPU: everything lies in gpu_host_work. */
typedef struct host_job host_job;

typedef struct cuda_experts {
    experts base;
    gpu_experts x;
    void *block, *mats;
    experts *on_cpu; /* of `host`; then nothing lies on the device */
    host_job *jobs;  /* those that records call */
} cuda_experts;

typedef struct cuda_head {
    lm_head base;
    const cuda_linear *full;
} cuda_head;
static inline cuda *cuda_of(ops *o) { return o->self; }
static inline gpu *gpu_of(ops *o) { return cuda_of(o)->g; }
static inline const gpu_mat *mat_of(const linear *w) { return &((const cuda_linear *)w)->m; }
static inline size_t cuda_aligned(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

bool cuda_out_of_memory(cuda *c, size_t bytes, err *e); /* false, E-MACHINE-MEMORY */

/* ops_cuda_weights.c */
bool cuda_linear_new(ops *o, linear **out, const linear_desc *d, err *e);
void cuda_linear_free(ops *o, linear *base);
bool cuda_experts_new(ops *o, experts **out, const experts_desc *d, err *e);
void cuda_experts_free(ops *o, experts *base);

/* ops_cuda_host.c: experts that stay with the CPU */
bool cuda_host_experts_new(cuda *c, cuda_experts *x, const experts_desc *d, err *e);
void cuda_host_experts_free(cuda *c, cuda_experts *x);
void cuda_host_moe(cuda *c, float *y, float *hidden, const float *x, cuda_experts *ex, const int32_t *idx,
                   const float *wt, int rows, int k);

/* ops_cuda_head.c */
enum { CUDA_HEAD_GROUP = 8 }; /* rows of which all logits are there at once */
bool cuda_head_new(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e);
void cuda_head_free(ops *o, lm_head *h);
void cuda_head_top(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *base, const float *hidden,
                   int rows, int k, const head_query *q);

#endif
