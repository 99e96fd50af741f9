/* recipe.h - which module gets which format: presets, globs, and the table that is applied and printed. */
#ifndef NIBBLE_RECIPE_H
#define NIBBLE_RECIPE_H

#include "base/err.h"
#include "base/str.h"

typedef enum qformat {
    QF_KEEP,    /* verbatim */
    QF_NVFP4,   /* W4A4: codes, block scales, weight_scale_2, input_scale */
    QF_NVFP4_W, /* W4A16: the same without input_scale */
    QF_FP8      /* per tensor: E4M3 weights, weight_scale, input_scale */
} qformat;

/* Part of the network a Linear belongs to; what presets are written in. */
typedef enum qfamily {
    QM_GDN,       /* linear_attn in_proj_qkv, in_proj_z, out_proj */
    QM_GDN_SMALL, /* linear_attn in_proj_a, in_proj_b */
    QM_ATTN,      /* self_attn q, k, v, o */
    QM_ROUTER,    /* mlp.gate, mlp.shared_expert_gate */
    QM_EXPERTS,   /* routed */
    QM_SHARED,    /* shared expert */
    QM_DENSE,     /* mlp of a dense model */
    QM_HEAD,      /* lm_head */
    QM_MTP_FC,    /* mtp.fc */
    QM_COUNT
} qfamily;

typedef enum recipe_preset {
    RECIPE_NVFP4,
    RECIPE_NVFP4_MLP,
    RECIPE_NVFP4_EXPERTS,
    RECIPE_NVFP4_W4A16,
    RECIPE_MIXED
} recipe_preset;
extern const char *const recipe_names[]; /* in that order, NULL-terminated */
typedef enum recipe_kv { KV_FP8, KV_FP8_CAST, KV_NONE } recipe_kv;
typedef enum recipe_mtp { MTP_NVFP4, MTP_BF16, MTP_NONE } recipe_mtp;

typedef struct recipe {
    recipe_preset preset;
    recipe_kv kv;
    recipe_mtp mtp;
    bool keep_qkv; /* q, k and v of full attention stay BF16 (together: engines fuse them) */
    const char *const *include;
    int n_include; /* globs that quantize a family the preset leaves alone */
    const char *const *exclude;
    int n_exclude; /* globs that keep; exclude wins */
} recipe;

/* Format of a Linear by the preset and the globs (not by its shape). Never QF_* for QM_ROUTER, QM_GDN_SMALL and
 * QM_MTP_FC unless a glob includes them; the head only under `mixed` or by a glob. */
qformat recipe_format(const recipe *r, qfamily family, str module, bool is_mtp);

/* A pattern is dotted components, each a glob (* ? [..]); it matches a module when its components match a run of
 * consecutive whole components of the module's name, so `self_attn` means every module inside one and `layers.1` never
 * means layer 10. `**` stands for any number of components. */
bool recipe_glob(const char *pattern, str module);

#endif
