/* plan.h - the export laid out before a byte is written: every Linear, every output tensor, every shard and offset.
 *
 * Order of tensors, greedy sharding and order inside a file follow ModelOpt's unified export (docs/NVFP4.md; checked
 * against tests/oracle/qwen36-tiny/nvfp4/sharded.index.json): vision, embedding, layers, norm, head, draft head last. */
#ifndef NIBBLE_PLAN_H
#define NIBBLE_PLAN_H

#include "base/arena.h"
#include "ckpt/ckpt.h"
#include "model/config.h"
#include "quant/recipe.h"

typedef struct qmodule { /* one logical Linear, named as exported */
    str name;            /* "model.language_model.layers.3.mlp.experts.7.gate_proj" */
    qfamily family;
    qformat format;
    bool is_mtp;
    const st_tensor *src; /* source tensor, BF16/F16/F32 */
    int64_t row0;         /* its first row in src seen as [*, cols] */
    int rows, cols;
    int fusion;                /* id of its fusion set (what reads the same input under one scale), -1 for none */
    int group;                 /* index of the group's first module; members share weight amax and input amax */
    str weight_key, input_key; /* names in an amax table */
    int layer;                 /* number behind "layers.", -1 for lm_head */
} qmodule;

typedef enum qpart {
    QP_COPY,
    QP_SLICE /* rows of a fused tensor, verbatim */,
    QP_WEIGHT,
    QP_SCALE,
    QP_SCALE_2,
    QP_INPUT_SCALE,
    QP_K_SCALE,
    QP_V_SCALE
} qpart;

typedef struct qtensor { /* one tensor of the export */
    str name;
    dtype type;
    int rank;
    int64_t shape[ST_MAX_RANK];
    uint64_t bytes, offset; /* offset: in the data section of its shard */
    qpart part;
    int module;           /* of the plan, or -1 for QP_COPY */
    const st_tensor *src; /* QP_COPY */
    int shard;
} qtensor;

typedef struct qshard {
    str file;                          /* "model-00001-of-00004.safetensors", or "model.safetensors" */
    uint64_t data_bytes, header_bytes; /* header_bytes includes the 8-byte length */
    const char *header;                /* the JSON text, padded; header_bytes - 8 bytes */
} qshard;

typedef struct plan {
    arena mem;
    const ckpt *src;
    const model_config *config;
    recipe recipe;
    str prefix; /* "model.language_model." or "model." */
    qmodule *modules;
    int n_modules;
    qtensor *tensors;
    int n_tensors; /* in state-dict order */
    qshard *shards;
    int n_shards;
    bool has_mtp;          /* the source has a draft head */
    const char *head_file; /* plan_make_head: name of the only file, which holds the draft head; else NULL */
    int last_attn;         /* number of the last full-attention layer, -1 without one */
    uint64_t total_bytes, total_elems; /* the index's total_size and total_parameters */
    uint64_t family_bytes_before[QM_COUNT], family_bytes_after[QM_COUNT];
    int family_modules[QM_COUNT]; /* quantized ones */
} plan;

/* shard_bytes: limit of a shard's data (10 GB = 10^10 by default; a larger tensor gets one of its own). The source's weights
 * must have been bound before (weights_bind), so that names and shapes are known to be complete.
 * Errors: E-QUANT-SHAPE (K not divisible by 16: names the module), E-QUANT-DTYPE (source not BF16/F16/F32),
 * E-QUANT-EMPTY (a glob or a family that matches nothing), E-QUANT-ALREADY (the source is quantized), E-QUANT-MTP
 * (--mtp nvfp4 without a head), E-QUANT-SHARDS (more shards than a loader takes). */
NODISCARD bool plan_make(plan *out, const ckpt *src, const model_config *config, const recipe *r, uint64_t shard_bytes,
                         err *e);
/* Only the draft head, with the bytes that plan_make's export would have, in one file named `file` (borrowed). r->mtp is
 * not MTP_NONE; globs are not asked. Errors: as above; E-QUANT-MTP also for MTP_BF16 without a head. */
NODISCARD bool plan_make_head(plan *out, const ckpt *src, const model_config *config, const recipe *r, const char *file,
                              err *e);
void plan_free(plan *p);

/* plan_make's second half (plan_layout.c): shards, offsets, headers. */
NODISCARD bool plan_layout(plan *p, uint64_t shard_bytes, err *e);
typedef struct index_entry {
    str name; /* of a tensor */
    const char *file;
} index_entry;
/* Text of an index over v[n], which this sorts by name. parameters and bytes replace those of `metadata` (an object, or
 * NULL), whose other keys stay. */
void plan_index_text(buf *out, const json *metadata, uint64_t parameters, uint64_t bytes, index_entry *v, int n);
/* Text of model.safetensors.index.json; NULL for a single file. Lives in the plan. */
const char *plan_index_json(plan *p, size_t *n);

/* Does any module need an input maximum, or any layer a KV maximum? */
bool plan_needs_amax(const plan *p);

/* Module by exported name, or NULL. */
const qmodule *plan_find(const plan *p, str name);
const char *qfamily_name(qfamily f);
const char *qformat_name(qformat f);

#endif
