/* weights.h - every tensor of a checkpoint bound once: total, or refused.
 *
 * Matrices are views into the mapping (zero copy; [rows, cols] row-major, y = W x). Vectors are small
 * and upcast to float32 in the arena. Norm vectors are stored as transformers applies them: `1 + w` for
 * the zero-centred norms (float32 sum), plain `w` for linear_attn.norm. A matrix whose bytes are not
 * aligned to its element is copied (W-LOAD-UNALIGNED). */
#ifndef NIBBLE_WEIGHTS_H
#define NIBBLE_WEIGHTS_H

#include "base/arena.h"
#include "ckpt/ckpt.h"
#include "model/config.h"

typedef enum wformat { WF_PLAIN, WF_NVFP4, WF_FP8 } wformat;

typedef struct wquant { /* what belongs to a quantized matrix */
    wformat format;
    const uint8_t *scales; /* NVFP4: E4M3 [rows, cols / 16], no NaN, no sign */
    float scale_2;         /* NVFP4 weight_scale_2, FP8 weight_scale: finite, > 0 */
    float input_scale;     /* finite, > 0; 0 when the file has none */
} wquant;

typedef struct wmat { /* a matrix; data NULL = absent */
    const char *name; /* tensor name for messages */
    const void *data; /* [rows, cols] row-major, aligned to the element */
    dtype type;       /* DT_BF16, DT_F32 or DT_F16 */
    int rows, cols;
    wquant q; /* NVFP4: data is packed codes [rows, cols / 2], type DT_U8 */
} wmat;

typedef struct wexperts { /* routed experts of one layer, fused or split in the file alike */
    const char *name;     /* "…mlp.experts" */
    int count, inter, hidden;
    dtype type;                     /* one type for all */
    const void **gate;              /* [count] -> [inter, hidden] */
    const void **up;                /* [count] -> [inter, hidden] */
    const void **down;              /* [count] -> [hidden, inter] */
    wquant *gate_q, *up_q, *down_q; /* [count] each, NULL when plain */
} wexperts;

typedef struct wffn {
    /* MoE */
    wmat router;         /* [experts, hidden] */
    wexperts experts;    /* count 0 when dense */
    wmat shared_gate_in; /* shared_expert_gate [1, hidden] */
    /* shared expert (MoE) or the whole FFN (dense): */
    wmat gate, up; /* [inter, hidden] */
    wmat down;     /* [hidden, inter] */
} wffn;

typedef struct wlayer {
    layer_kind kind;
    float *norm1, *norm2; /* [hidden] 1 + w: input_layernorm, post_attention_layernorm */
    /* GDN */
    wmat in_qkv;     /* [conv_dim, hidden] rows q | k | v */
    wmat in_z;       /* [value_dim, hidden] */
    wmat in_b, in_a; /* [lin_v_heads, hidden] */
    float *conv;     /* [conv_dim, conv_kernel] */
    float *neg_a;    /* [lin_v_heads] -exp(A_log), num/mathf exp */
    float *dt_bias;  /* [lin_v_heads] */
    float *gdn_norm; /* [lin_v_dim] plain w */
    wmat gdn_out;    /* [hidden, value_dim] */
    /* attention */
    wmat q;                 /* [heads * head_dim * (gate ? 2 : 1), hidden] */
    wmat k, v;              /* [kv_heads * head_dim, hidden] */
    wmat o;                 /* [hidden, heads * head_dim] */
    float *q_norm, *k_norm; /* [head_dim] 1 + w */
    float k_scale, v_scale; /* of an FP8 KV cache; 0 when the file has none */
    wffn ffn;
} wlayer;

/* Every matrix of a layer outside its routed experts; absent ones have no data. */
enum { LAYER_MATS = 14 };
void wlayer_mats(const wmat *out[LAYER_MATS], const wlayer *l);

typedef struct wmtp { /* present == false: the checkpoint has no draft head */
    bool present;
    float *norm_embed, *norm_hidden, *norm; /* [hidden] 1 + w: pre_fc_norm_embedding, pre_fc_norm_hidden, norm */
    wmat fc;                                /* [hidden, 2 * hidden]: columns [embedding | hidden] */
    wlayer layer;                           /* LAYER_ATTN */
} wmtp;

typedef struct weights {
    arena mem;
    wmat embed;     /* [vocab, hidden] */
    wmat head;      /* [vocab, hidden]; the same view as embed when tied */
    float *norm;    /* [hidden] 1 + w */
    wlayer *layers; /* [config.layers] */
    wmtp mtp;
    int vision_tensors; /* skipped by rule */
    uint64_t vision_bytes;
    bool quantized;    /* some Linear is NVFP4 or FP8 */
    bool kv_fp8;       /* the export declares an FP8 KV cache; layers without scales then use 1.0 (its "cast" form) */
    int fused_experts; /* layers whose experts are fused in the file; the rest are split */
} weights;

/* Bind all. Fails with E-LOAD-UNFILLED (a parameter no tensor fills: names it and guesses why),
 * E-LOAD-UNUSED (a tensor nothing consumed: wrong prefix, extra layers, ...), E-LOAD-SHAPE, E-LOAD-DTYPE,
 * E-MACHINE-MEMORY. Says N-LOAD-NO-MTP, N-LOAD-MTP, W-LOAD-UNALIGNED, W-LOAD-DTYPE, W-LOAD-GROUP. One loading
 * thread per ckpt: the `uses` counters of its tensors are this function's. */
NODISCARD bool weights_bind(weights *out, ckpt *c, const model_config *config, err *e);
/* The same errors and notices without keeping anything, in little memory: unaligned matrices are not copied. */
NODISCARD bool weights_check(ckpt *c, const model_config *config, err *e);
void weights_free(weights *w);

/* Bytes and parameter counts by class, for `inspect` and memory plans. */
typedef enum weight_class {
    WC_EMBED,
    WC_HEAD,
    WC_GDN,
    WC_ATTN,
    WC_ROUTER,
    WC_EXPERTS,
    WC_SHARED,
    WC_DENSE,
    WC_NORM,
    WC_MTP,
    WC_VISION,
    WC_COUNT
} weight_class;
const char *weight_class_name(weight_class c);
/* Class of a tensor by its name (both prefixes), for any checkpoint of the family. */
weight_class weight_class_of(str tensor_name);

#endif
