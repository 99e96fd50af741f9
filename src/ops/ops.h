/* ops.h - what a device can do: THE contract between the model (engine/) and a backend.
 *
 * The forward pass is written once against this table; `ref` (serial, plain loops: the executable specification),
 * `cpu` (kern + pool) and `cuda` fill it, `tap` decorates any of them. All backends return the same bits;
 * docs/NUMERICS.md defines them op by op.
 *
 * Memory: float*, int32_t* operands are DEVICE pointers from mem_new (plain memory on CPUs); only ops dereference
 * them. Structs (spans, views, descriptors) are host memory, read during the call. Float matrices are row-major,
 * contiguous. Outputs do not overlap inputs unless said. No op reads a value back to decide its control flow. Ops
 * are issued in order by one owner thread; results are valid on the host after sync.
 * Determinism: a row's result does not depend on the other rows of the call, on threads or on the backend.
 * Misuse (a shape that does not fit, a span outside its buffers) is a bug and ends in CHECK. */
#ifndef NIBBLE_OPS_H
#define NIBBLE_OPS_H

#include "base/err.h"
#include "base/layer_set.h"
#include "kern/kern.h"
#include "num/dtype.h"

typedef struct ops ops;
typedef struct linear linear;   /* prepared weight matrix [N, K] */
typedef struct experts experts; /* prepared routed experts of one layer */
typedef struct lm_head lm_head; /* an output matrix from which only the largest logits are wanted */

typedef enum linear_format {
    LINEAR_PLAIN, /* BF16, F16 or F32 elements */
    LINEAR_NVFP4, /* data: packed E2M1 codes [N, K/2] (low nibble first); scales: E4M3 [N, K/16]; scale_2 */
    LINEAR_FP8    /* data: E4M3 [N, K]; scale_2 = weight_scale */
} linear_format;

/* How the inputs of a quantized Linear are quantized (NUMERICS "Quantized linears"). */
typedef enum linear_act {
    LINEAR_ACT_FLOAT, /* not at all: W4A16, or FP8 weights alone */
    LINEAR_ACT_FP4,   /* as ModelOpt's W4A4: E2M1 codes, dynamic E4M3 block scales under input_scale */
    LINEAR_ACT_INT8, /* int8 codes, integer block scales, one float32 per row: better than FP4, not what others compute */
    LINEAR_ACT_FP8   /* E4M3 under input_scale; for LINEAR_FP8 only */
} linear_act;

typedef struct linear_quant {
    linear_format format;
    linear_act act;
    const uint8_t *scales; /* NVFP4 block scales [N, K/16] */
    float scale_2;         /* NVFP4 weight_scale_2; FP8 weight_scale */
    float input_scale;     /* 0 when the file has none */
} linear_quant;

typedef struct linear_desc {
    const char *name;
    dtype type;       /* DT_BF16, DT_F16 or DT_F32; DT_U8 (NVFP4) or DT_F8_E4M3 */
    int rows, cols;   /* N, K */
    const void *data; /* [N, K], aligned to its element; used in place on CPUs: must outlive the handle */
    linear_quant q;   /* zero for LINEAR_PLAIN */
    bool mapped; /* codes and scales lie in a read-only file mapping: a backend that repacks them may drop its pages */
} linear_desc;

typedef struct experts_desc {
    const char *name;
    dtype type;
    int count, inter, hidden;
    const void *const *gate, *const *up,
                                 *const *down;  /* [count] each: [inter,hidden], [inter,hidden], [hidden,inter] */
    const linear_quant *gate_q, *up_q, *down_q; /* [count] each, or NULL: plain */
    bool mapped;                                /* as in linear_desc */
    bool
        on_cpu; /* a backend with memory of its own leaves them in the machine's, for the CPU to compute: the same bits */
} experts_desc;

/* Consecutive rows of the batch that belong to one sequence. conv and gdn take a slot at most once per call, because
 * what a later span commits is known only after this call; rows may be 0 (commit only). */
typedef struct ops_span {
    int slot;       /* the sequence's place in KV and state buffers */
    int row0, rows; /* rows of the batch */
    int pos0;       /* absolute position (and KV slot) of its first row; rows are consecutive */
    int commit;     /* pending GDN/conv rows (from the last tentative span) to apply before these rows; the pending
                      * rows behind them are dropped */
    bool tentative; /* rows are kept pending instead of applied to the stored state (verification) */
} ops_span;

enum { OPS_MAX_PENDING = 8 };

enum { OPS_KV_PAGE = 64 }; /* positions per page: those of one tile of attention (NUMERICS 5) */

/* KV of one layer: k and v are [page][OPS_KV_PAGE][kv_head][dim]. Position p of a slot is row p % OPS_KV_PAGE of the page
 * pages[slot][p / OPS_KV_PAGE]. Slots may share a page as long as none of them writes to it; entries behind a span's last
 * position are not read. */
typedef struct ops_kv {
    dtype type;           /* DT_F32, DT_BF16 or DT_F8_E4M3 */
    void *k, *v;          /* device */
    const int32_t *pages; /* device [slot][slot_pages] */
    int slot_pages;
    int kv_heads, dim;
    int capacity;           /* positions per slot, at most slot_pages * OPS_KV_PAGE */
    float k_scale, v_scale; /* DT_F8_E4M3: code = E4M3(sat(fl(x / scale))); the scales are folded into the softmax scale
                             * (fl(scale * k_scale)) and the output (fl(o * v_scale)), once each (NUMERICS 5) */
} ops_kv;

/* Conv window of one GDN layer: window [slot][taps - 1][channels] (oldest first), pending
 * [slot][OPS_MAX_PENDING][channels]: the inputs u of tentative rows. */
typedef struct ops_conv {
    float *window, *pending;
    int channels, taps;
} ops_conv;

/* Recurrent state of one GDN layer: S [slot][v_heads][k_dim][v_dim]; pending rows as they entered the recurrence:
 * k [slot][OPS_MAX_PENDING][k_heads * k_dim] (normalised), v [..][v_heads * v_dim], beta, decay [..][v_heads]. */
typedef struct ops_gdn {
    float *state;
    float *pend_k, *pend_v, *pend_beta, *pend_decay;
    int k_heads, v_heads, k_dim, v_dim;
} ops_gdn;

/* Rotary table: cos, sin [positions][half] already multiplied by the attention factor; axis [half] picks which of a
 * row's three positions a frequency uses (text rows carry the same value thrice). */
typedef struct ops_rope {
    const float *cos, *sin; /* device */
    const uint8_t *axis;    /* device [half] */
    int half;               /* rotary_dim / 2; pairs (i, i + half) of the head's first 2*half elements */
} ops_rope;

enum { HEAD_MAX_TOP = 64 };

/* What head_top is asked for one row. All zero: the largest logits of all ids. Host memory. */
typedef struct head_query {
    const int32_t *extra; /* ids in [0, rows) to be computed always, returned apart and left out of the top */
    int n_extra;
    const uint64_t *allowed; /* [(rows + 63) / 64]: bit id % 64 of word id / 64 set = may be in the top; NULL: all */
} head_query;

/* What head_top did so far. A row is one row of inputs. */
typedef struct head_counts {
    int64_t rows;       /* with finite inputs */
    int64_t candidates; /* exact logits that the screened rows needed, without the extra ids */
    int64_t full;       /* rows for which all logits were computed: not screened, or the bounds did not help */
} head_counts;

/* The experts of one layer and what belongs to them. */
typedef struct ops_moe_block {
    const float *norm; /* device [hidden] */
    float eps;
    const linear *router, *shared_gate, *gate, *up, *down; /* of the shared expert */
    const experts *ex;
    int k;
} ops_moe_block;

struct ops {
    const char *device; /* "ref", "cpu" ... */
    const char *isa;
    int threads;
    int prompt_rows; /* rows of a prompt that a pass should have; 0: no wish */
    void *self;
    /* Calls of moe so far and the different experts that their batches needed; 0 where a backend does not count. */
    int64_t moe_calls, moe_experts;

    /* ---- memory ---- */
    bool (*mem_new)(ops *o, void **out, size_t bytes, err *e); /* zeroed, 64-byte aligned; E-MACHINE-MEMORY */
    void (*mem_free)(ops *o, void *p);
    void (*upload)(ops *o, void *dst, const void *src, size_t bytes);
    void (*download)(ops *o, void *dst, const void *src, size_t bytes); /* waits for earlier ops */
    void (*fill_zero)(ops *o, void *dst, size_t bytes);
    void (*copy)(ops *o, void *dst, const void *src, size_t bytes); /* device to device */
    bool (*linear_new)(ops *o, linear **out, const linear_desc *d, err *e);
    void (*linear_free)(ops *o, linear *w);
    bool (*experts_new)(ops *o, experts **out, const experts_desc *d, err *e);
    void (*experts_free)(ops *o, experts *x);
    /* A head over ids [0, rows) of `full`, which must outlive it; rows <= its rows. `screen`: keep an 8-bit copy beside it
     * (0.5 of the bytes of BF16) so that head_top reads that and few rows of `full`. Without an effect on results, and on
     * weights that cannot be screened (quantized, or more than 65536 columns). Errors: E-MACHINE-MEMORY. */
    bool (*head_new)(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e);
    void (*head_free)(ops *o, lm_head *h);
    bool (*sync)(ops *o, err *e); /* wait; the first error of the step surfaces here */
    void (*close)(ops *o);        /* frees `o` itself */
    /* Optional (NULL: weights stay where they are, in the machine's memory): bytes that the device can still give; all weights
     * are copied there. */
    int64_t (*memory_available)(ops *o);
    bool shared_memory; /* with memory_available: the device's memory is the machine's */
    /* Optional, with memory_available: what ops keep besides what grows with rows, for a context of `positions`. */
    int64_t (*work_bytes)(ops *o, int vocab, int head_dim, int positions);
    /* Optional (NULL): a series of ops that comes again and again with the same operands, except for the contents of device
     * buffers and for the numbers in the spans. `what` and `with` name it: same names, number of rows and of spans = same
     * series. begin true: it was recorded before and is enqueued as a whole; leave the ops and end out. False: issue the ops,
     * then call end. No up- and downloads in between. */
    bool (*series_begin)(ops *o, const void *what, const void *with, const ops_span *spans, int n_spans);
    void (*series_end)(ops *o);

    /* ---- rows ---- */
    /* y[r] = row ids[r] of table (upcast); an id outside [0, N) gives a row of zeros. */
    void (*embed)(ops *o, float *y, const linear *table, const int32_t *ids, int rows);
    /* y [rows, n] = rmsnorm of each row with w [n] (1 + w already added); x rows at stride ldx >= n. y may be x when
     * ldx == n. */
    void (*rmsnorm)(ops *o, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps);
    /* y [rows, N] = x [rows, K] W^T, rows of y at stride ldy (>= N), of x at stride ldx (>= K). */
    void (*linear)(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows);
    void (*add)(ops *o, float *y, const float *x, int64_t n);                      /* y += x */
    void (*silu_mul)(ops *o, float *y, const float *g, const float *u, int64_t n); /* y = silu(g) * u; y may be g */
    /* y[r] = x[index[r]], rows of n floats; index is device. */
    void (*gather_rows)(ops *o, float *y, const float *x, const int32_t *index, int rows, int n);
    /* out[r] = argmax of row r (kern argmax rule). */
    void (*argmax)(ops *o, int32_t *out, const float *x, int rows, int n);

    /* For each of `rows` rows of hidden [rows, K] (device): the k <= HEAD_MAX_TOP largest logits by (value descending, id
     * ascending; NaN last), exactly those of `linear` (NUMERICS 8) -> ids, logits [rows, k], host memory. Places that no
     * allowed id fills have id -1 and logit NaN; so have all places of a row whose hidden state is not finite.
     * extra_logits (host): the logits of q[0].extra, then of q[1].extra ... q NULL: no row asks for anything special. k = 0:
     * nothing but the extra ids is computed (ids and logits NULL) and nothing counted. Waits. */
    void (*head_top)(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *h, const float *hidden,
                     int rows, int k, const head_query *q);

    /* ---- GDN ---- */
    /* Causal depthwise conv + SiLU, in span order. For each span: apply `commit` pending rows to the window, then
     * c[r] = conv_silu over the last taps inputs. Tentative: the rows' inputs go to pending, the window stays;
     * else the window advances. u, c [rows, channels]; w [channels, taps]. */
    void (*conv)(ops *o, float *c, const float *u, const float *w, ops_conv *st, const ops_span *spans, int n_spans);
    /* c [rows, 2*k_heads*k_dim + v_heads*v_dim] (q | k | v after conv); a, b [rows, v_heads]; neg_a, dt_bias [v_heads].
     * q = l2norm(q, 1e-6, fl32(1 / sqrt(k_dim))), k = l2norm(k, 1e-6, 1) per key head; beta = sigmoid(b);
     * decay = exp(neg_a * softplus(a + dt_bias)). Then per span: commit pending rows into S, then step the rows
     * (value head h uses key head h / (v_heads / k_heads)) -> out [rows, v_heads * v_dim]. Tentative spans leave S as
     * after the commits and store k, v, beta, decay as pending (at most OPS_MAX_PENDING rows). */
    void (*gdn)(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                const float *dt_bias, ops_gdn *st, const ops_span *spans, int n_spans);
    /* y = gated_norm per head: y, x, z [rows, heads * dim], w [dim]; y may be x. */
    void (*gated_norm)(ops *o, float *y, const float *x, const float *z, const float *w, int rows, int heads, int dim,
                       float eps);

    /* ---- attention ---- */
    /* q_out [rows, heads * dim] = rope(rmsnorm(query part of qg)); k [rows, kv_heads * dim] likewise in place.
     * qg [rows, heads * dim * (gated ? 2 : 1)]: head h owns [query dim | gate dim] when gated. pos3 [rows, 3] device:
     * angle of frequency i at table row pos3[r][axis[i]]; x' = fma(x1, cos, -(x2 * sin)), y' = fma(x2, cos, x1 * sin). */
    void (*qk_rope)(ops *o, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                    const int32_t *pos3, const ops_rope *rope, int rows, int heads, int kv_heads, int dim, bool gated,
                    float eps);
    /* Store k, v [rows, kv_heads * dim] at each row's position. */
    void (*kv_append)(ops *o, ops_kv *kv, const float *k, const float *v, const ops_span *spans, int n_spans);
    /* y [rows, heads * dim] = softmax(scale q k^T) v over positions 0..pos of the row, in tiles of 64 absolute positions
     * merged left to right (NUMERICS 5); then times sigmoid(gate) when qg is not NULL (its gate parts). */
    void (*attention)(ops *o, float *y, const float *q, const float *qg, const ops_kv *kv, int heads, float scale,
                      const ops_span *spans, int n_spans);

    /* ---- MoE ---- */
    /* Per row: the k largest logits by (value descending, index ascending; NaN last) -> idx [rows, k] sorted by
     * INCREASING expert index, wt [rows, k] = softmax over the k (max subtracted, sum in descending-logit order). */
    void (*route)(ops *o, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k);
    /* y [rows, hidden] = +0, then over the row's experts in increasing index:
     * y = y + fl(wt * down(silu(gate x) * up x)). */
    void (*moe)(ops *o, float *y, const float *x, const experts *ex, const int32_t *idx, const float *wt, int rows,
                int k);
    /* The same op, and hidden [rows, k, inter] receives what each expert's down projection read:
     * hidden[r][j] = silu(gate x[r]) * up x[r] of expert idx[r][j]. y is the same bits as moe's. */
    void (*moe_hidden)(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx,
                       const float *wt, int rows, int k);
    /* x [rows, n] (residual) += routed[r] + fl(sigmoid(gate[r]) * shared[r]); gate NULL: plain routed + shared;
     * shared NULL: x += routed. */
    void (*moe_combine)(ops *o, float *x, const float *routed, const float *shared, const float *gate, int rows, int n);

    /* ---- several ops at once: optional (NULL). Exactly what the ops named compute one after the other. False: no way for
     * these shapes, formats and rows; nothing was done. ---- */
    /* y[i] [rows, N_i] = linear(rmsnorm(x, norm), w[i]) for i < n; h NULL or [rows, K] = rmsnorm(x, norm). */
    bool (*norm_linears)(ops *o, float *const *y, float *h, const linear *const *w, int n, const float *x,
                         const float *norm, float eps, int rows);
    /* x [rows, N] += linear(h, w). */
    bool (*linear_add)(ops *o, float *x, const float *h, const linear *w, int rows);
    /* x [rows, N] += linear(gated_norm(in, z, norm), w), heads of dim. */
    bool (*gated_linear_add)(ops *o, float *x, const float *in, const float *z, const float *norm, int heads, int dim,
                             float eps, const linear *w, int rows);
    /* x += what rmsnorm, linears, route, moe and moe_combine make of it. */
    bool (*moe_block)(ops *o, float *x, const ops_moe_block *b, int rows);
};

/* `threads` and `isa` of `cuda` are those of experts that stay with the CPU. */
typedef struct ops_options {
    const char *device; /* NULL or "cpu": kern + pool; "ref": the serial reference; "cuda": an NVIDIA GPU */
    int threads;        /* <= 0: all of the affinity mask */
    kern_isa isa;       /* cap; ISA_COUNT = best */
    /* "cuda": layers whose routed experts stay with the CPU, for GPUs with little memory; the draft layer's number is that of
     * the model's layers. Read by the engine. */
    layer_set cpu_experts;
} ops_options;
/* Errors: E-OPS-DEVICE (unknown), E-OPS-EXPERTS (cpu_experts of another device), E-MACHINE-THREADS, E-MACHINE-MEMORY;
 * E-CUDA-BUILD, -DRIVER, -DEVICE, -ARCH, -FAILED. */
NODISCARD bool ops_open(ops **out, const ops_options *opt, err *e);

/* A decorator over `inner` (not owned, must outlive the tap): every op runs as before and, when `fn` is set, is
 * reported after it ran with the operands a calibrator, tracer or NaN hunter needs. All pointers are device memory,
 * valid during the call only; `fn` may run ops of `inner` (download waits). Operands that an op does not have are NULL
 * and 0. Ops that write in place (add, moe_combine, gated_norm with y == x, ...) report the result as `out`; an `in`
 * that was overwritten is NULL.
 *
 *   op            in              in2                 out           also
 *   "embed"       -               -                   y             w = table, index = ids
 *   "rmsnorm"     x (in_ld)       w [n]               y
 *   "linear"      x (in_ld)       -                   y (out_ld)    w
 *   "add"         x               -                   y             one row of n
 *   "silu_mul"    g, NULL if y    u                   y             one row of n
 *   "gather_rows" x (ld n)        -                   y             index
 *   "argmax"      x               -                   -             index = the result [rows]
 *   "head_top"    hidden          -                   -             k
 *   "conv"        u               w [channels, taps]  c             spans; rows = up to the last span's end
 *   "gdn"         c               -                   out           spans
 *   "gated_norm"  x, NULL if y    z                   y             rows of heads * dim
 *   "qk_rope"     qg              k (roped)           q_out         in2_cols = kv_heads * dim
 *   "kv_append"   k               v                   -             spans; both [rows, kv_heads * dim]
 *   "attention"   q               qg or NULL          y             spans
 *   "route"       logits          -                   wt [rows, k]  index = idx [rows, k]
 *   "moe"         x               hidden [rows,k,inter] y           ex, index = idx, weight = wt, k
 *   "moe_combine" routed          shared or NULL      x
 *
 * A calibrator of routed experts takes row r of `in` as the input of gate and up of expert index[r * k + j], and row
 * r * k + j of `in2` as the input of its down. */
typedef struct ops_event {
    const char *op; /* "linear", "rmsnorm", ... as in the table */
    const linear *w;
    const experts *ex;
    const float *in, *in2, *out;
    int64_t in_ld, out_ld;                 /* row strides of in and out; in2 is contiguous */
    int rows, in_cols, in2_cols, out_cols; /* in2 has `rows` rows ("moe": rows * k; weights: one, or channels) */
    const int32_t *index;
    const float *weight;
    int k;
    const ops_span *spans; /* host */
    int n_spans;
} ops_event;
typedef void ops_tap_fn(void *ctx, ops *inner, const ops_event *ev);
/* Errors: E-MACHINE-MEMORY. An event whose buffer of hidden activations cannot be had makes the next sync fail so. */
NODISCARD bool ops_tap_open(ops **out, ops *inner, ops_tap_fn *fn, void *ctx, err *e);

const char *linear_name(const linear *w);
bool linear_owns_data(const linear *w); /* repacked: the data it was made from is not read again */
int linear_rows(const linear *w);
int linear_cols(const linear *w);
size_t head_bytes(const lm_head *h);      /* of the 8-bit copy; 0: none */
bool head_known_finite(const lm_head *h); /* its 8-bit copy was made of rows without NaN and Inf; false says nothing */
head_counts head_counted(const lm_head *h);
const char *experts_name(const experts *x);
int experts_count(const experts *x);
int experts_inter(const experts *x);
int experts_hidden(const experts *x);

#endif
