/* view.h - a checkpoint folder opened without stopping at what is wrong with it (private to check/).
 *
 * What cannot be read is a finding and is left out; everything else can be looked at. Nothing outside the folder is opened.
 * The Linears are those that config.json describes, found under the prefix the file uses. */
#ifndef NIBBLE_VIEW_H
#define NIBBLE_VIEW_H

#include "check/finding.h"
#include "ckpt/ckpt.h"
#include "model/config.h"
#include "quant/recipe.h"

typedef enum lin_format { LIN_PLAIN, LIN_NVFP4, LIN_FP8, LIN_BROKEN } lin_format;
extern const char *const lin_format_names[]; /* "BF16", ... */

typedef struct linear {
    str name;         /* module: the tensor's name without ".weight", or that of a fused expert tensor */
    const char *role; /* "mlp.experts.gate_proj": what it shares statistics with; static */
    qfamily family;
    int layer, expert;  /* -1: none */
    bool is_mtp, fused; /* fused: [experts, ...] in one plain tensor */
    int rows, cols;
    int fusion;       /* id of what reads one input under one scale, -1: none */
    const char *norm; /* tail of the norm that feeds it ("input_layernorm.weight"), or NULL */
    lin_format format;
    const st_tensor *weight, *scale; /* scale: NVFP4 block scales of the right shape and dtype, or NULL */
    bool has_scale_2, has_input;     /* a readable F32 scalar, whatever its value */
    float scale_2, input_scale;
} linear;

typedef struct check_view {
    char *dir;
    arena mem;
    findings *found;
    const json *config, *generation, *hf_quant; /* NULL: absent or unreadable */
    const json *quant;                          /* quantization_config of config.json, an object or NULL */
    const json *hf;                             /* "quantization" of hf_quant_config.json, an object or NULL */
    st_file *shards;
    int n_shards;
    bool incomplete; /* some shard could not be read: what is missing may be in it */
    st_tensor **all; /* [n] over all shards */
    int n;
    uint64_t bytes;
    uint8_t *used; /* [n] */
    strtab names;
    bool has_model;      /* config.json describes a model of the family */
    bool bad_generation; /* generation_config.json does not fit it and was left out: stop ids are not known */
    model_config model;
    const char *prefix; /* one of name_prefixes, or NULL: no embedding under any */
    int mtp_tensors, vision_tensors;
    linear *linears;
    int n_linears, cap_linears, fusions;
    struct {
        bool has_k, has_v;
        float k, v;
    } kv[CONFIG_MAX_LAYERS + 1]; /* the last: draft head */
} check_view;

/* Two scales are the same when their values are; NaN is the same as NaN. */
static inline bool same_scale(float a, float b) { return a == b || (a != a && b != b); }

/* Open what can be opened and look at the folder: C-FILE-*, C-INDEX-*, C-SIDE-*, C-CONFIG-*. Fails only when there is no such
 * folder. Errors: E-CKPT-DIR. */
NODISCARD bool view_open(check_view *v, const char *dir, findings *found, err *e);
void view_close(check_view *v);
st_tensor *view_find(const check_view *v, str name);
int view_number(const check_view *v, str name); /* or -1 */

/* Compare names, shapes and dtypes with what config.json describes; fills linears and kv: C-TENSOR-*, C-MTP-*, C-SCALE-MISSING,
 * C-SCALE-DTYPE (layout.c). */
void view_layout(check_view *v);
/* The quantization sections, exclude lists and KV declaration: C-QUANT-*, C-EXCL-*, C-KV-* (declared.c). */
void view_declared(check_view *v);
/* Tokenizer, template, stop ids: C-TEXT-*, C-STOP-* (text.c). */
void view_text(check_view *v);

/* Does an exclude pattern of a loader (a glob, or a dotted prefix) cover a module? */
bool exclude_matches(str pattern, str module);
/* Is a module on an exclude list (of hf_quant_config.json, else of config.json)? */
bool view_excludes(const check_view *v, str module);
/* `name` as the runtimes know it: 0 as written, 1 "model.", 2 "language_model.model."; into out[512]. */
str runtime_name(char *out, str name, int which);

#endif
