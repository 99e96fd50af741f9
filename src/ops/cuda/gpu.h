/* gpu.h - the CUDA side of the cuda backend, seen from C: device, memory, and one launcher per kernel. Internal to ops/.
 *
 * Every call only enqueues on one stream unless it says "waits". Pointers are device memory unless they say host. The first
 * error of the device is kept and comes out of gpu_sync. Results are those of docs/NUMERICS.md bit for bit. */
#ifndef NIBBLE_GPU_H
#define NIBBLE_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpu gpu;

typedef struct gpu_info {
    char name[80];
    int device, major, minor, multiprocessors;
    int driver, runtime; /* as CUDA numbers them: 13000 = 13.0 */
    size_t total_bytes, free_bytes;
    bool unified; /* shares the host's memory */
} gpu_info;

typedef enum gpu_fault {
    GPU_OK,
    GPU_NO_DRIVER,  /* none installed */
    GPU_OLD_DRIVER, /* older than the runtime in this program */
    GPU_NO_DEVICE,  /* a driver, but no GPU that may be used */
    GPU_NO_CODE,    /* this program holds no code for the GPU */
    GPU_FAILED      /* anything else */
} gpu_fault;

/* `why` [256] host: CUDA's own words. */
gpu_fault gpu_open(gpu **out, gpu_info *info, char *why);
void gpu_close(gpu *g);

/* ---- memory ---- */
void *gpu_alloc(gpu *g, size_t bytes); /* zeroed, 256-byte aligned; NULL when memory is out */
void gpu_free(gpu *g, void *p);        /* waits */
size_t gpu_free_bytes(gpu *g);
void gpu_upload(gpu *g, void *dst, const void *src, size_t bytes); /* src host, may change when this returns */
/* The same for large sources, through a ring of pinned pieces: a piece is read (from a disk, it may be) while earlier ones are
 * on their way. */
void gpu_upload_bulk(gpu *g, void *dst, const void *src, size_t bytes);
void gpu_download(gpu *g, void *dst, const void *src, size_t bytes); /* dst host; waits */
void gpu_copy(gpu *g, void *dst, const void *src, size_t bytes);
void gpu_zero(gpu *g, void *dst, size_t bytes);
/* Work memory shared by the ops: one block per place, contents lost on growth (which waits). NULL when memory is out: then
 * the error is kept, and the caller leaves out its launches. */
enum { GPU_WORK_A, GPU_WORK_B, GPU_WORK_C, GPU_WORK_D, GPU_WORK_E, GPU_WORK_F, GPU_WORK_SPANS, GPU_WORKS };
void *gpu_work(gpu *g, int place, size_t bytes);
unsigned gpu_work_changes(const gpu *g); /* grows whenever a block moved */
/* The most that a row's attention parts take for so many positions. */
size_t gpu_attention_bytes(const gpu *g, int dim, int positions);
/* One block of host memory that the device reads and writes by itself, grown in the same way. NULL: likewise. */
void *gpu_host_work(gpu *g, size_t bytes);
/* Copies between it and the device. */
void gpu_fetch(gpu *g, void *host, const void *src, size_t bytes);
void gpu_send(gpu *g, void *dst, const void *host, size_t bytes);
/* fn(ctx) on a thread of CUDA's when everything enqueued so far is done; what comes later waits for it. fn must not use the
 * device. Recorded like any other step. */
void gpu_call(gpu *g, void (*fn)(void *ctx), void *ctx);
bool gpu_wait(gpu *g);            /* waits; false when anything failed since open */
bool gpu_sync(gpu *g, char *why); /* waits; false and CUDA's words [256] when anything failed since open */

/* ---- graphs: what is enqueued between begin and end is recorded, not run; gpu_graph_run runs it ---- */
typedef struct gpu_graph gpu_graph;
void gpu_graph_begin(gpu *g);
gpu_graph *gpu_graph_end(gpu *g); /* NULL: could not be recorded (the error is not kept); nothing ran */
void gpu_graph_run(gpu *g, const gpu_graph *graph);
void gpu_graph_free(gpu_graph *graph);

/* ---- matrices ---- */
typedef enum gpu_format { GPU_BF16, GPU_F16, GPU_F32, GPU_NVFP4, GPU_FP8 } gpu_format;
typedef enum gpu_act { GPU_ACT_FLOAT, GPU_ACT_FP4, GPU_ACT_INT8, GPU_ACT_FP8 } gpu_act; /* as linear_act */

typedef struct gpu_mat {
    gpu_format format;
    gpu_act act;
    int rows, cols;
    const void *data;      /* [rows, cols], NVFP4: [rows, cols / 2] */
    const uint8_t *scales; /* NVFP4 [rows, cols / 16] */
    float scale_2, input_scale;
} gpu_mat;

/* Routed experts: arrays [count] of matrices in device memory. `like` is one of them on the host: formats, modes and shapes
 * are those of all. same_in: gate and up of each expert quantize a row in the same way. */
typedef struct gpu_experts {
    const gpu_mat *gate, *up, *down;
    gpu_mat like_in, like_down;
    const uint8_t *block; /* expert e at e * stride: gate codes at 0, the rest at these offsets */
    int64_t stride, gate_scales, up_codes, up_scales, down_codes, down_scales;
    int count, inter, hidden;
    bool one_in_scale;     /* gate and up of all experts quantize a row in the same way */
    bool same_in, uniform; /* uniform: `like` has the modes of all; else the largest room any of them needs */
} gpu_experts;

/* A span of ops.h, and its rows one by one. */
typedef struct gpu_span {
    int slot, row0, rows, pos0, commit, tentative;
} gpu_span;
typedef struct gpu_row {
    int slot, pos;
} gpu_row;
typedef struct gpu_spans {
    const gpu_span *spans; /* device [n] */
    const gpu_row *of_row; /* device [rows] */
    int n, rows;           /* rows: from 0 to the end of the last */
    int max_pos;           /* bound of the positions of all rows */
    bool tentative;        /* any */
} gpu_spans;

typedef struct gpu_kv {
    int type;             /* gpu_format: F32, BF16 or FP8 */
    void *k, *v;          /* [page][64][kv_head][dim] */
    const int32_t *pages; /* [slot][slot_pages] */
    int slot_pages, kv_heads, dim;
    float k_scale, v_scale;
} gpu_kv;

typedef struct gpu_gdn {
    float *state, *pend_k, *pend_v, *pend_beta, *pend_decay;
    int k_heads, v_heads, k_dim, v_dim, max_pending;
} gpu_gdn;

/* ---- rows (operands as in ops.h) ---- */
void gpu_embed(gpu *g, float *y, const gpu_mat *table, const int32_t *ids, int rows);
void gpu_rmsnorm(gpu *g, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps);
void gpu_gated_norm(gpu *g, float *y, const float *x, const float *z, const float *w, int64_t heads, int dim,
                    float eps);
void gpu_add(gpu *g, float *y, const float *x, int64_t n);
void gpu_silu_mul(gpu *g, float *y, const float *gate, const float *u, int64_t n);
void gpu_gather_rows(gpu *g, float *y, const float *x, const int32_t *index, int rows, int n);
void gpu_argmax(gpu *g, int32_t *out, const float *x, int rows, int n);
void gpu_route(gpu *g, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k);
void gpu_moe_combine(gpu *g, float *x, const float *routed, const float *shared, const float *gate, int rows, int n);

/* ---- linear ---- */
void gpu_linear(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows);
/* y [rows, N] += x W^T; false: no kernel for this one, nothing was launched (so for all that return bool below). */
bool gpu_linear_add(gpu *g, float *y, const float *x, const gpu_mat *w, int rows);
/* y[i] = rmsnorm(x) w[i]^T, i < n. */
bool gpu_norm_linears(gpu *g, float *const *y, const gpu_mat *const *w, int n, const float *x, const float *norm,
                      float eps, int rows);
/* x [rows, N] += linear(gated_norm(in, z)), heads of dim. */
bool gpu_gated_linear_add(gpu *g, float *x, const float *in, const float *z, const float *norm, int heads, int dim,
                          float eps, const gpu_mat *w, int rows);
/* hidden [rows * k, inter] as moe_hidden of ops.h. */
void gpu_moe(gpu *g, float *y, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx,
             const float *wt, int rows, int k);

typedef struct gpu_moe_block {
    const float *norm;
    float eps;
    gpu_mat router, shared_gate, gate, up, down;
    gpu_experts ex;
    int k;
} gpu_moe_block;
/* x += experts and shared expert of rmsnorm(x), router included. */
bool gpu_moe_all(gpu *g, float *x, const gpu_moe_block *b, int rows);

/* ---- heads ---- */
/* finite [rows]: is every element of the row of hidden [rows, cols]? */
void gpu_finite(gpu *g, int32_t *finite, const float *hidden, int rows, int cols);
/* The k best of each row of logits [rows, n] -> ids, values [rows, k]; allowed [rows, (n + 63) / 64] bits or NULL. ids are -1
 * where there are no more, and in rows that are not finite. */
void gpu_top(gpu *g, int32_t *ids, float *values, const float *logits, const uint64_t *allowed, const int32_t *finite,
             int rows, int n, int k);
/* y[i] = output ids[i] of row row_of[i], i < n: what gpu_linear computes; NaN where the row is not finite. */
void gpu_linear_some(gpu *g, float *y, const float *x, int64_t ldx, const gpu_mat *w, const int32_t *ids,
                     const int32_t *row_of, int n, const int32_t *finite);

/* ---- state ---- */
void gpu_conv(gpu *g, float *c, const float *u, const float *w, float *window, float *pending, int channels, int taps,
              int max_pending, const gpu_spans *s);
void gpu_gdn_step(gpu *g, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                  const float *dt_bias, const gpu_gdn *st, const gpu_spans *s, float q_scale);
void gpu_qk_rope(gpu *g, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                 const int32_t *pos3, const float *cos, const float *sin, const uint8_t *axis, int half, int rows,
                 int heads, int kv_heads, int dim, bool gated, float eps);
void gpu_kv_append(gpu *g, const gpu_kv *kv, const float *k, const float *v, const gpu_spans *s);
void gpu_attention(gpu *g, float *y, const float *q, const float *qg, const gpu_kv *kv, int heads, float scale,
                   const gpu_spans *s);

#ifdef __cplusplus
}
#endif

#endif
