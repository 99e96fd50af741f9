/* layout.c - names, shapes and dtypes against config.json: what weights_bind demands, but to the end. */
#include <stdio.h>
#include <stdlib.h>

#include "check/view.h"
#include "model/names.h"

enum { NAME_MAX_BYTES = 512 };

typedef struct walk {
    check_view *v;
    bool is_mtp;
    int layer;
    char base[NAME_MAX_BYTES]; /* "model.language_model.layers.3." */
} walk;

static str join(char *out, const char *a, const char *b) {
    const int n = snprintf(out, NAME_MAX_BYTES, "%s%s", a, b);
    return (str){ out, n < NAME_MAX_BYTES ? (size_t)n : NAME_MAX_BYTES - 1 };
}

static st_tensor *take(check_view *v, str name) {
    const int at = view_number(v, name);
    if (at < 0) return NULL;
    v->used[at] = 1;
    return v->all[at];
}

static void missing(walk *w, str name, const char *what) {
    if (!w->v->incomplete)
        finding_add(w->v->found, "C-TENSOR-MISSING", w->is_mtp ? "mtp" : NULL, name, "config.json describes %s%s", what,
                    w->is_mtp ? ", which the draft head lacks" : " that no tensor fills");
}

static void shape_text(char *out, size_t n, int rank, const int64_t *shape) {
    size_t at = (size_t)snprintf(out, n, "[");
    for (int i = 0; i < rank && at < n; i++)
        at += (size_t)snprintf(out + at, n - at, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (at < n) snprintf(out + at, n - at, "]");
}

static bool shape_is(const st_tensor *t, int rank, const int64_t *want) {
    if (t->rank != rank) return false;
    for (int i = 0; i < rank; i++)
        if (t->shape[i] != want[i]) return false;
    return true;
}

static bool check_shape(check_view *v, const st_tensor *t, int rank, const int64_t *want) {
    if (shape_is(t, rank, want)) return true;
    char have[120], need[120];
    shape_text(have, sizeof have, t->rank, t->shape);
    shape_text(need, sizeof need, rank, want);
    finding_add(v->found, "C-TENSOR-SHAPE", need, t->name, "shape %s, but config.json makes it %s", have, need);
    return false;
}

static bool is_plain(dtype t) { return t == DT_BF16 || t == DT_F16 || t == DT_F32; }

static void bad_dtype(check_view *v, const st_tensor *t) {
    finding_add(v->found, "C-TENSOR-DTYPE", dtype_name(t->type), t->name,
                "dtype %s is no weight here (BF16, F16 or F32)", dtype_name(t->type));
}

static const st_tensor *vector(walk *w, const char *tail, int64_t n) {
    char name[NAME_MAX_BYTES];
    const str full = join(name, w->base, tail);
    const st_tensor *t = take(w->v, full);
    if (!t) return missing(w, full, "a parameter"), NULL;
    if (!is_plain(t->type)) return bad_dtype(w->v, t), NULL;
    return check_shape(w->v, t, 1, &n) ? t : NULL;
}

/* ---- scales of a Linear ---- */

static bool scalar(check_view *v, str module, const char *tail, float *out, bool *found) {
    char name[NAME_MAX_BYTES];
    const int n = snprintf(name, sizeof name, STR_FMT ".%s", STR_ARG(module), tail);
    const st_tensor *t = take(v, (str){ name, (size_t)n });
    *found = false;
    if (!t) return false;
    if (t->type != DT_F32 || t->elems != 1)
        finding_add(v->found, "C-SCALE-DTYPE", tail, t->name, "%s of %llu elements where one F32 is needed",
                    dtype_name(t->type), (unsigned long long)t->elems);
    else
        memcpy(out, t->data, 4), *found = true;
    return true;
}

static void scale_missing(check_view *v, str module, const char *tail) {
    if (!v->incomplete) finding_add(v->found, "C-SCALE-MISSING", tail, module, "quantized, but .%s is not there", tail);
}

static void block_scales(check_view *v, linear *l) {
    char name[NAME_MAX_BYTES];
    const int n = snprintf(name, sizeof name, STR_FMT ".weight_scale", STR_ARG(l->name));
    const st_tensor *t = take(v, (str){ name, (size_t)n });
    const int64_t want[] = { l->rows, l->cols / 16 };
    if (!t)
        scale_missing(v, l->name, "weight_scale");
    else if (t->type != DT_F8_E4M3)
        finding_add(v->found, "C-SCALE-DTYPE", "weight_scale", t->name, "%s where block scales are F8_E4M3",
                    dtype_name(t->type));
    else if (check_shape(v, t, 2, want))
        l->scale = t;
}

static void formats(check_view *v, linear *l) {
    const st_tensor *t = l->weight;
    const int64_t plain[] = { l->rows, l->cols }, packed[] = { l->rows, l->cols / 2 };
    char probe[NAME_MAX_BYTES];
    const int n = snprintf(probe, sizeof probe, STR_FMT ".weight_scale", STR_ARG(l->name));
    l->format = LIN_BROKEN;
    if (t->type == DT_U8) {
        if (!view_find(v, (str){ probe, (size_t)n }) && shape_is(t, 2, plain)) return bad_dtype(v, t);
        const bool ok = l->cols % 16 == 0 && check_shape(v, t, 2, packed);
        if (l->cols % 16 != 0)
            finding_add(v->found, "C-TENSOR-SHAPE", "block", t->name, "%d columns are no whole number of blocks of 16",
                        l->cols);
        block_scales(v, l);
        if (!scalar(v, l->name, "weight_scale_2", &l->scale_2, &l->has_scale_2))
            scale_missing(v, l->name, "weight_scale_2");
        scalar(v, l->name, "input_scale", &l->input_scale, &l->has_input);
        if (ok && l->scale) l->format = LIN_NVFP4;
    } else if (t->type == DT_F8_E4M3) {
        const bool ok = check_shape(v, t, 2, plain);
        if (!scalar(v, l->name, "weight_scale", &l->scale_2, &l->has_scale_2))
            scale_missing(v, l->name, "weight_scale");
        scalar(v, l->name, "input_scale", &l->input_scale, &l->has_input);
        if (ok) l->format = LIN_FP8;
    } else if (!is_plain(t->type)) {
        bad_dtype(v, t);
    } else if (check_shape(v, t, 2, plain)) {
        l->format = LIN_PLAIN;
    }
}

static linear *push(check_view *v, linear l) {
    if (v->n_linears == v->cap_linears) {
        v->cap_linears = v->cap_linears ? 2 * v->cap_linears : 512;
        v->linears = xrealloc(v->linears, (size_t)v->cap_linears * sizeof *v->linears);
    }
    v->linears[v->n_linears] = l;
    return &v->linears[v->n_linears++];
}

/* "<base><tail>.weight" as a Linear. */
static void matrix(walk *w, const char *tail, const char *role, int rows, int cols, qfamily family, int fusion,
                   const char *norm) {
    char name[NAME_MAX_BYTES], full[NAME_MAX_BYTES];
    const str module = join(name, w->base, tail);
    const str wname = join(full, name, ".weight");
    const st_tensor *t = take(w->v, wname);
    if (!t) return missing(w, wname, "a matrix");
    linear l = { .name = { t->name.p, module.n },
                 .role = role,
                 .family = family,
                 .layer = w->layer,
                 .expert = name_expert(wname),
                 .is_mtp = w->is_mtp,
                 .rows = rows,
                 .cols = cols,
                 .fusion = fusion,
                 .norm = norm,
                 .weight = t };
    formats(w->v, &l);
    push(w->v, l);
}

/* ---- the parts of a layer ---- */

static void kv_scales(walk *w) {
    char name[NAME_MAX_BYTES];
    const int slot = w->is_mtp ? CONFIG_MAX_LAYERS : w->layer;
    float x;
    bool found;
    if (scalar(w->v, join(name, w->base, "self_attn.k_proj"), "k_scale", &x, &found) && found)
        w->v->kv[slot].has_k = true, w->v->kv[slot].k = x;
    if (scalar(w->v, join(name, w->base, "self_attn.v_proj"), "v_scale", &x, &found) && found)
        w->v->kv[slot].has_v = true, w->v->kv[slot].v = x;
}

#define NORM1 "input_layernorm.weight"
#define NORM2 "post_attention_layernorm.weight"

static void attention(walk *w) {
    const model_config *c = &w->v->model;
    const int q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, fusion = w->v->fusions++;
    matrix(w, "self_attn.q_proj", "self_attn.q_proj", q * (c->attn_gate ? 2 : 1), c->hidden, QM_ATTN, fusion, NORM1);
    matrix(w, "self_attn.k_proj", "self_attn.k_proj", kv, c->hidden, QM_ATTN, fusion, NORM1);
    matrix(w, "self_attn.v_proj", "self_attn.v_proj", kv, c->hidden, QM_ATTN, fusion, NORM1);
    matrix(w, "self_attn.o_proj", "self_attn.o_proj", c->hidden, q, QM_ATTN, -1, NULL);
    vector(w, "self_attn.q_norm.weight", c->head_dim);
    vector(w, "self_attn.k_norm.weight", c->head_dim);
    kv_scales(w);
}

static void conv(walk *w) {
    const model_config *c = &w->v->model;
    const int64_t want[] = { config_conv_dim(c), 1, c->conv_kernel }, flat[] = { want[0], want[2] };
    char name[NAME_MAX_BYTES];
    const str full = join(name, w->base, "linear_attn.conv1d.weight");
    const st_tensor *t = take(w->v, full);
    if (!t)
        missing(w, full, "a convolution");
    else if (!is_plain(t->type))
        bad_dtype(w->v, t);
    else if (!shape_is(t, 2, flat))
        check_shape(w->v, t, 3, want);
}

static void delta_net(walk *w) {
    const model_config *c = &w->v->model;
    const int fusion = w->v->fusions++, h = c->hidden, key = config_key_dim(c), value = config_value_dim(c);
    char name[NAME_MAX_BYTES];
    if (c->is_next && view_find(w->v, join(name, w->base, "linear_attn.in_proj_qkvz.weight"))) {
        matrix(w, "linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkvz", 2 * key + 2 * value, h, QM_GDN, -1, NORM1);
        matrix(w, "linear_attn.in_proj_ba", "linear_attn.in_proj_ba", 2 * c->lin_v_heads, h, QM_GDN_SMALL, -1, NORM1);
    } else {
        matrix(w, "linear_attn.in_proj_qkv", "linear_attn.in_proj_qkv", config_conv_dim(c), h, QM_GDN, fusion, NORM1);
        matrix(w, "linear_attn.in_proj_z", "linear_attn.in_proj_z", value, h, QM_GDN, fusion, NORM1);
        matrix(w, "linear_attn.in_proj_b", "linear_attn.in_proj_b", c->lin_v_heads, h, QM_GDN_SMALL, -1, NORM1);
        matrix(w, "linear_attn.in_proj_a", "linear_attn.in_proj_a", c->lin_v_heads, h, QM_GDN_SMALL, -1, NORM1);
    }
    matrix(w, "linear_attn.out_proj", "linear_attn.out_proj", h, value, QM_GDN, -1, NULL);
    conv(w);
    vector(w, "linear_attn.A_log", c->lin_v_heads);
    vector(w, "linear_attn.dt_bias", c->lin_v_heads);
    vector(w, "linear_attn.norm.weight", c->lin_v_dim);
}

static void fused_experts(walk *w, const char *tail, const char *role, int64_t rows, int64_t cols, const char *norm) {
    const int64_t want[] = { w->v->model.experts, rows, cols };
    char name[NAME_MAX_BYTES];
    const str full = join(name, w->base, tail);
    const st_tensor *t = take(w->v, full);
    if (!t) return missing(w, full, "experts");
    linear l = { .name = t->name,
                 .role = role,
                 .family = QM_EXPERTS,
                 .layer = w->layer,
                 .expert = -1,
                 .is_mtp = w->is_mtp,
                 .fused = true,
                 .rows = (int)rows,
                 .cols = (int)cols,
                 .fusion = -1,
                 .norm = norm,
                 .format = LIN_BROKEN,
                 .weight = t };
    if (!is_plain(t->type))
        bad_dtype(w->v, t);
    else if (check_shape(w->v, t, 3, want))
        l.format = LIN_PLAIN;
    push(w->v, l);
}

static void experts(walk *w) {
    const model_config *c = &w->v->model;
    char name[NAME_MAX_BYTES];
    bool split = false;
    for (int i = 0; i < c->experts && !split; i++) {
        char tail[64];
        snprintf(tail, sizeof tail, "mlp.experts.%d.down_proj.weight", i);
        split = view_find(w->v, join(name, w->base, tail)) != NULL;
    }
    if (!split || view_find(w->v, join(name, w->base, "mlp.experts.gate_up_proj"))) {
        fused_experts(w, "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", 2 * (int64_t)c->moe_inter, c->hidden,
                      NORM2);
        fused_experts(w, "mlp.experts.down_proj", "mlp.experts.down_proj", c->hidden, c->moe_inter, NULL);
        return;
    }
    for (int i = 0; i < c->experts; i++) {
        const int fusion = w->v->fusions++;
        char tail[64];
        snprintf(tail, sizeof tail, "mlp.experts.%d.gate_proj", i);
        matrix(w, tail, "mlp.experts.gate_proj", c->moe_inter, c->hidden, QM_EXPERTS, fusion, NORM2);
        snprintf(tail, sizeof tail, "mlp.experts.%d.up_proj", i);
        matrix(w, tail, "mlp.experts.up_proj", c->moe_inter, c->hidden, QM_EXPERTS, fusion, NORM2);
        snprintf(tail, sizeof tail, "mlp.experts.%d.down_proj", i);
        matrix(w, tail, "mlp.experts.down_proj", c->hidden, c->moe_inter, QM_EXPERTS, -1, NULL);
    }
}

static void gated(walk *w, const char *gate, const char *up, const char *down, int inter, qfamily family) {
    const int fusion = w->v->fusions++, h = w->v->model.hidden;
    matrix(w, gate, gate, inter, h, family, fusion, NORM2);
    matrix(w, up, up, inter, h, family, fusion, NORM2);
    matrix(w, down, down, h, inter, family, -1, NULL);
}

static void ffn(walk *w) {
    const model_config *c = &w->v->model;
    if (!c->is_moe) return gated(w, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", c->inter, QM_DENSE);
    matrix(w, "mlp.gate", "mlp.gate", c->experts, c->hidden, QM_ROUTER, -1, NORM2);
    experts(w);
    if (!c->shared_inter) return;
    matrix(w, "mlp.shared_expert_gate", "mlp.shared_expert_gate", 1, c->hidden, QM_ROUTER, -1, NORM2);
    gated(w, "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj", c->shared_inter,
          QM_SHARED);
}

static void one_layer(walk *w, bool attn) {
    vector(w, NORM1, w->v->model.hidden);
    vector(w, NORM2, w->v->model.hidden);
    attn ? attention(w) : delta_net(w);
    ffn(w);
}

/* ---- the whole ---- */

static void find_prefix(check_view *v) {
    char name[NAME_MAX_BYTES];
    for (int i = 0; i < NAME_PREFIXES && !v->prefix; i++)
        if (view_find(v, join(name, name_prefixes[i], "embed_tokens.weight"))) v->prefix = name_prefixes[i];
    for (int i = 0; i < NAME_PREFIXES && !v->prefix; i++)
        if (view_find(v, join(name, name_prefixes[i], "layers.0.input_layernorm.weight"))) v->prefix = name_prefixes[i];
}

static void embedding(walk *w) {
    const model_config *c = &w->v->model;
    const int64_t want[] = { c->vocab, c->hidden };
    char name[NAME_MAX_BYTES];
    const str full = join(name, w->base, "embed_tokens.weight");
    const st_tensor *t = take(w->v, full);
    if (!t)
        missing(w, full, "an embedding");
    else if (!is_plain(t->type))
        bad_dtype(w->v, t);
    else
        check_shape(w->v, t, 2, want);
}

static void output_head(walk *w) {
    const model_config *c = &w->v->model;
    snprintf(w->base, sizeof w->base, "%s",
             view_find(w->v, STR("language_model.lm_head.weight")) ? "language_model." : "");
    char name[NAME_MAX_BYTES];
    if (!c->tied) return matrix(w, "lm_head", "lm_head", c->vocab, c->hidden, QM_HEAD, -1, NULL);
    const st_tensor *t = take(w->v, join(name, w->base, "lm_head.weight")), *embed = NULL;
    if (t) embed = view_find(w->v, join(name, w->v->prefix, "embed_tokens.weight"));
    if (t && embed && (t->bytes != embed->bytes || memcmp(t->data, embed->data, t->bytes) != 0))
        finding_add(w->v->found, "C-TENSOR-UNUSED", "tied", t->name,
                    "config.json ties the head to the embedding, but this one differs from it");
}

static void draft_head(walk *w) {
    check_view *v = w->v;
    const int h = v->model.hidden;
    if (!v->mtp_tensors) {
        const json *record = json_get(json_get(v->hf_quant, "nibble"), "mtp");
        const bool meant = json_is(record, JSON_STRING) && str_is(json_str(record), "none");
        if (v->model.mtp_layers && !v->incomplete)
            finding_add_as(
                v->found, meant ? SEV_NOTE : SEV_WARNING, "C-MTP-ABSENT", NULL, STR("mtp.*"),
                "config.json declares a draft head (mtp_num_hidden_layers %d), and no mtp.* tensor is there%s",
                v->model.mtp_layers, meant ? ", as its own record says" : "");
        return;
    }
    if (!v->model.mtp_layers)
        finding_add(v->found, "C-MTP-UNDECLARED", NULL, STR("config.json"),
                    "%d mtp.* tensors are there, but mtp_num_hidden_layers is not", v->mtp_tensors);
    w->is_mtp = true;
    w->layer = -1;
    snprintf(w->base, sizeof w->base, "mtp.");
    matrix(w, "fc", "mtp.fc", h, 2 * h, QM_MTP_FC, -1, NULL);
    vector(w, "pre_fc_norm_embedding.weight", h);
    vector(w, "pre_fc_norm_hidden.weight", h);
    vector(w, "norm.weight", h);
    snprintf(w->base, sizeof w->base, "mtp.layers.0.");
    w->layer = 0;
    one_layer(w, true);
    for (int i = 0; i < v->n_linears; i++)
        if (v->linears[i].family == QM_MTP_FC && v->linears[i].format != LIN_PLAIN &&
            v->linears[i].format != LIN_BROKEN)
            finding_add(v->found, "C-MTP-FC", NULL, v->linears[i].name, "quantized (%s): every engine runs it in BF16",
                        lin_format_names[v->linears[i].format]);
}

static void unused(check_view *v) {
    for (int i = 0; i < v->n; i++) {
        const str name = v->all[i]->name;
        if (v->used[i] || name_is_vision(name)) continue;
        if (name_is_scale(name))
            finding_add(v->found, "C-TENSOR-UNUSED", "scale", name, "a scale without a quantized weight beside it");
        else
            finding_add(v->found, "C-TENSOR-UNUSED", NULL, name, "config.json describes no such parameter");
    }
}

void view_layout(check_view *v) {
    walk w = { .v = v, .layer = -1 };
    if (!v->has_model || !v->n) return;
    find_prefix(v);
    if (!v->prefix) {
        finding_add(v->found, "C-TENSOR-MISSING", "prefix", STR("embed_tokens.weight"),
                    "no embedding under model.language_model., language_model.model. or model. (first tensor: %s)",
                    v->all[0]->name.p);
        return;
    }
    snprintf(w.base, sizeof w.base, "%s", v->prefix);
    embedding(&w);
    vector(&w, "norm.weight", v->model.hidden);
    for (int i = 0; i < v->model.layers; i++) {
        w.layer = i;
        snprintf(w.base, sizeof w.base, "%slayers.%d.", v->prefix, i);
        one_layer(&w, v->model.layer[i] == LAYER_ATTN);
    }
    w.layer = -1;
    output_head(&w);
    draft_head(&w);
    unused(v);
}
