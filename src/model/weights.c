#include "model/weights.h"

#include <stdio.h>

#include "base/log.h"
#include "model/names.h"
#include "model/weights_group.h"
#include "model/weights_quant.h"
#include "model/weights_why.h"
#include "num/bf16.h"
#include "num/mathf.h"

enum { NAME_MAX_BYTES = 256, UNUSED_SHOWN = 3 };

typedef struct binder {
    weights *w;
    ckpt *c;
    const model_config *cfg;
    err *e;
    int prefix;                /* index into name_prefixes */
    char name[NAME_MAX_BYTES]; /* name[0..base) is the module, behind it goes the parameter */
    size_t base;
    int mtp_tensors;
    bool check_only; /* nobody will read the matrices */
    int copied;      /* unaligned matrices */
    uint64_t copied_bytes;
    const char *copied_first;
} binder;

/* ---- names: built by copying, because a large model looks up tens of thousands ---- */

static void base_set(binder *b, const char *module) {
    b->base = strlen(module);
    CHECK(b->base < NAME_MAX_BYTES / 2, "module name too long: %s", module);
    memcpy(b->name, module, b->base);
}

static void base_add(binder *b, const char *part) {
    const size_t n = strlen(part);
    CHECK(b->base + n < NAME_MAX_BYTES / 2, "module name too long: %s", part);
    memcpy(b->name + b->base, part, n);
    b->base += n;
}

static void base_number(binder *b, int v) {
    char digits[12], *p = digits + sizeof digits;
    *--p = 0;
    do *--p = (char)('0' + v % 10);
    while (v /= 10);
    base_add(b, p);
}

static str full_name(binder *b, const char *param) {
    const size_t n = strlen(param);
    CHECK(b->base + n < NAME_MAX_BYTES, "parameter name too long: %s", param);
    memcpy(b->name + b->base, param, n + 1);
    return (str){ b->name, b->base + n };
}

static st_tensor *find(binder *b, const char *param) { return ckpt_find(b->c, full_name(b, param)); }

static st_tensor *take(binder *b, const char *param) {
    st_tensor *t = find(b, param);
    if (!t)
        why_unfilled(b->c, b->cfg, b->prefix, full_name(b, param), b->e);
    else
        t->uses++;
    return t;
}

static bool no_memory(binder *b, uint64_t bytes) {
    return fail(b->e, ERR_MACHINE, "E-MACHINE-MEMORY", "%s: no memory for %llu bytes", b->c->dir,
                (unsigned long long)bytes);
}

/* ---- shapes and types ---- */

static void shape_text(char *out, size_t n, const int64_t *shape, int rank) {
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

static bool check_shape(binder *b, const st_tensor *t, int rank, const int64_t *want) {
    if (shape_is(t, rank, want)) return true;
    char have[120], need[120];
    shape_text(have, sizeof have, t->shape, t->rank);
    shape_text(need, sizeof need, want, rank);
    return fail(b->e, ERR_INPUT, "E-LOAD-SHAPE", "%s: %s: shape %s, but config.json makes it %s",
                ckpt_shard_path(b->c, t), t->name.p, have, need);
}

static bool check_type(binder *b, const st_tensor *t) {
    if (t->type == DT_BF16 || t->type == DT_F16 || t->type == DT_F32) return true;
    return fail(b->e, ERR_INPUT, "E-LOAD-DTYPE", "%s: %s: dtype %s, but weights are BF16, F16 or F32",
                ckpt_shard_path(b->c, t), t->name.p, dtype_name(t->type));
}

/* The tensor's bytes, copied when they are not aligned to their element. */
static bool aligned_data(binder *b, const st_tensor *t, const void **out) {
    *out = t->data;
    if (b->check_only) return true;
    if ((uintptr_t)t->data % (uintptr_t)dtype_bytes(t->type) == 0) return true;
    void *copy = arena_take(&b->w->mem, t->bytes, 1);
    if (!copy) return no_memory(b, t->bytes);
    memcpy(copy, t->data, t->bytes);
    *out = copy;
    if (!b->copied++) b->copied_first = t->name.p;
    b->copied_bytes += t->bytes;
    return true;
}

static bool quantized_matrix(binder *b, wmat *m, const st_tensor *t, int rows, int cols) {
    *m = (wmat){ .name = t->name.p, .data = t->data, .type = t->type, .rows = rows, .cols = cols };
    b->w->quantized = true;
    return quant_bind(&m->q, b->c, t, rows, cols, b->e);
}

static bool matrix(binder *b, wmat *m, const char *param, int rows, int cols) {
    st_tensor *t = take(b, param);
    if (t && (t->type == DT_U8 || t->type == DT_F8_E4M3)) return quantized_matrix(b, m, t, rows, cols);
    if (!t || !check_type(b, t) || !check_shape(b, t, 2, (int64_t[]){ rows, cols })) return false;
    *m = (wmat){ .name = t->name.p, .type = t->type, .rows = rows, .cols = cols };
    return aligned_data(b, t, &m->data);
}

/* ---- vectors: float32 copies ---- */

static float element(const st_tensor *t, uint64_t i) {
    uint16_t h;
    float f;
    if (t->type == DT_F32) return memcpy(&f, t->data + 4 * i, 4), f;
    memcpy(&h, t->data + 2 * i, 2);
    return t->type == DT_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

typedef enum vec_form { VEC_PLAIN, VEC_ONE_PLUS, VEC_NEG_EXP } vec_form;

static bool upcast(binder *b, float **out, const st_tensor *t, vec_form form) {
    float *v = arena_take(&b->w->mem, t->elems, sizeof *v);
    if (!v) return no_memory(b, t->elems * sizeof *v);
    for (uint64_t i = 0; i < t->elems; i++) {
        const float x = element(t, i);
        v[i] = form == VEC_PLAIN ? x : form == VEC_ONE_PLUS ? 1.0f + x : -num_exp(x);
    }
    *out = v;
    return true;
}

static bool vector(binder *b, float **out, const char *param, int n, vec_form form) {
    st_tensor *t = take(b, param);
    return t && check_type(b, t) && check_shape(b, t, 1, (int64_t[]){ n }) && upcast(b, out, t, form);
}

/* conv1d.weight [channels, 1, taps], or the same bytes as [channels, taps]. */
static bool conv_weight(binder *b, float **out) {
    const int64_t want[] = { config_conv_dim(b->cfg), 1, b->cfg->conv_kernel }, flat[] = { want[0], want[2] };
    st_tensor *t = take(b, "conv1d.weight");
    return t && check_type(b, t) && (shape_is(t, 2, flat) || check_shape(b, t, 3, want)) &&
           upcast(b, out, t, VEC_PLAIN);
}

/* ---- GDN ---- */

/* qwen3_next stores rows per key head: q, k, then its r value heads' v, then their z (and b, a likewise). Copy them
 * into the plain order: all q, all k, all v | all z. */
static bool deinterleave_qkvz(binder *b, wlayer *l) {
    const model_config *c = b->cfg;
    const int r = c->lin_v_heads / c->lin_k_heads, group_v = r * c->lin_v_dim, group = 2 * c->lin_k_dim + 2 * group_v;
    st_tensor *t = take(b, "in_proj_qkvz.weight");
    if (!t || !check_type(b, t) || !check_shape(b, t, 2, (int64_t[]){ (int64_t)group * c->lin_k_heads, c->hidden }))
        return false;
    const size_t row = (size_t)c->hidden * (size_t)dtype_bytes(t->type);
    uint8_t *qkv = arena_take(&b->w->mem, (size_t)config_conv_dim(c), row),
            *z = arena_take(&b->w->mem, (size_t)config_value_dim(c), row);
    if (!qkv || !z) return no_memory(b, t->bytes);
    for (int h = 0; h < c->lin_k_heads; h++) {
        const uint8_t *from = t->data + (size_t)h * (size_t)group * row;
        const size_t k_rows = (size_t)c->lin_k_dim, v_rows = (size_t)group_v, hh = (size_t)h,
                     key = (size_t)config_key_dim(c);
        memcpy(qkv + hh * k_rows * row, from, k_rows * row);
        memcpy(qkv + (key + hh * k_rows) * row, from + k_rows * row, k_rows * row);
        memcpy(qkv + (2 * key + hh * v_rows) * row, from + 2 * k_rows * row, v_rows * row);
        memcpy(z + hh * v_rows * row, from + (2 * k_rows + v_rows) * row, v_rows * row);
    }
    l->in_qkv =
        (wmat){ .name = t->name.p, .data = qkv, .type = t->type, .rows = config_conv_dim(c), .cols = c->hidden };
    l->in_z = (wmat){ .name = t->name.p, .data = z, .type = t->type, .rows = config_value_dim(c), .cols = c->hidden };
    return true;
}

static bool deinterleave_ba(binder *b, wlayer *l) {
    const model_config *c = b->cfg;
    const int r = c->lin_v_heads / c->lin_k_heads;
    st_tensor *t = take(b, "in_proj_ba.weight");
    if (!t || !check_type(b, t) || !check_shape(b, t, 2, (int64_t[]){ 2 * c->lin_v_heads, c->hidden })) return false;
    const size_t row = (size_t)c->hidden * (size_t)dtype_bytes(t->type), part = (size_t)r * row;
    uint8_t *pb = arena_take(&b->w->mem, (size_t)c->lin_v_heads, row),
            *pa = arena_take(&b->w->mem, (size_t)c->lin_v_heads, row);
    if (!pb || !pa) return no_memory(b, t->bytes);
    for (int h = 0; h < c->lin_k_heads; h++) {
        memcpy(pb + (size_t)h * part, t->data + (size_t)h * 2 * part, part);
        memcpy(pa + (size_t)h * part, t->data + (size_t)h * 2 * part + part, part);
    }
    l->in_b = (wmat){ .name = t->name.p, .data = pb, .type = t->type, .rows = c->lin_v_heads, .cols = c->hidden };
    l->in_a = (wmat){ .name = t->name.p, .data = pa, .type = t->type, .rows = c->lin_v_heads, .cols = c->hidden };
    return true;
}

static bool bind_gdn(binder *b, wlayer *l) {
    const model_config *c = b->cfg;
    const size_t base = b->base;
    base_add(b, "linear_attn.");
    bool ok;
    if (c->is_next && find(b, "in_proj_qkvz.weight"))
        ok = deinterleave_qkvz(b, l) && deinterleave_ba(b, l);
    else
        ok = matrix(b, &l->in_qkv, "in_proj_qkv.weight", config_conv_dim(c), c->hidden) &&
             matrix(b, &l->in_z, "in_proj_z.weight", config_value_dim(c), c->hidden) &&
             matrix(b, &l->in_b, "in_proj_b.weight", c->lin_v_heads, c->hidden) &&
             matrix(b, &l->in_a, "in_proj_a.weight", c->lin_v_heads, c->hidden);
    ok = ok && conv_weight(b, &l->conv) && vector(b, &l->neg_a, "A_log", c->lin_v_heads, VEC_NEG_EXP) &&
         vector(b, &l->dt_bias, "dt_bias", c->lin_v_heads, VEC_PLAIN) &&
         vector(b, &l->gdn_norm, "norm.weight", c->lin_v_dim, VEC_PLAIN) &&
         matrix(b, &l->gdn_out, "out_proj.weight", c->hidden, config_value_dim(c));
    b->base = base;
    return ok;
}

static bool bind_attention(binder *b, wlayer *l) {
    const model_config *c = b->cfg;
    const size_t base = b->base;
    const int q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    base_add(b, "self_attn.");
    const bool ok = matrix(b, &l->q, "q_proj.weight", q * (c->attn_gate ? 2 : 1), c->hidden) &&
                    matrix(b, &l->k, "k_proj.weight", kv, c->hidden) &&
                    matrix(b, &l->v, "v_proj.weight", kv, c->hidden) &&
                    matrix(b, &l->o, "o_proj.weight", c->hidden, q) &&
                    vector(b, &l->q_norm, "q_norm.weight", c->head_dim, VEC_ONE_PLUS) &&
                    vector(b, &l->k_norm, "k_norm.weight", c->head_dim, VEC_ONE_PLUS) &&
                    quant_bind_kv(&l->k_scale, &l->v_scale, b->c, full_name(b, ""), b->e);
    b->base = base;
    return ok;
}

/* ---- FFN ---- */

static bool experts_fused(binder *b, wexperts *x) {
    st_tensor *gu = take(b, "experts.gate_up_proj"), *down = gu ? take(b, "experts.down_proj") : NULL;
    if (!gu || !down || !check_type(b, gu) || !check_type(b, down) ||
        !check_shape(b, gu, 3, (int64_t[]){ x->count, 2 * (int64_t)x->inter, x->hidden }) ||
        !check_shape(b, down, 3, (int64_t[]){ x->count, x->hidden, x->inter }))
        return false;
    if (gu->type != down->type)
        return fail(b->e, ERR_INPUT, "E-LOAD-DTYPE", "%s: %s: dtype %s, but %s is %s", ckpt_shard_path(b->c, down),
                    down->name.p, dtype_name(down->type), gu->name.p, dtype_name(gu->type));
    const void *gate_up, *downs;
    if (!aligned_data(b, gu, &gate_up) || !aligned_data(b, down, &downs)) return false;
    x->type = gu->type;
    const size_t part = (size_t)x->inter * (size_t)x->hidden * (size_t)dtype_bytes(x->type);
    for (int i = 0; i < x->count; i++) {
        x->gate[i] = (const uint8_t *)gate_up + 2 * (size_t)i * part;
        x->up[i] = (const uint8_t *)gate_up + (2 * (size_t)i + 1) * part;
        x->down[i] = (const uint8_t *)downs + (size_t)i * part;
    }
    b->w->fused_experts++;
    return true;
}

static bool expert_matrix(binder *b, wexperts *x, const void **out, wquant *q, const char *param, int rows, int cols,
                          bool first) {
    wmat m;
    if (!matrix(b, &m, param, rows, cols)) return false;
    *q = m.q;
    if (first) x->type = m.type;
    if (m.type != x->type)
        return fail(b->e, ERR_INPUT, "E-LOAD-DTYPE", "%s: %s: dtype %s, but the layer's first expert is %s", b->c->dir,
                    m.name, dtype_name(m.type), dtype_name(x->type));
    *out = m.data;
    return true;
}

static bool experts_split(binder *b, wexperts *x) {
    const size_t base = b->base;
    bool ok = true;
    for (int i = 0; ok && i < x->count; i++) {
        base_add(b, "experts.");
        base_number(b, i);
        ok = expert_matrix(b, x, &x->gate[i], &x->gate_q[i], ".gate_proj.weight", x->inter, x->hidden, i == 0) &&
             expert_matrix(b, x, &x->up[i], &x->up_q[i], ".up_proj.weight", x->inter, x->hidden, false) &&
             expert_matrix(b, x, &x->down[i], &x->down_q[i], ".down_proj.weight", x->hidden, x->inter, false);
        b->base = base;
    }
    return ok;
}

static bool bind_experts(binder *b, wexperts *x) {
    const model_config *c = b->cfg;
    *x = (wexperts){ .count = c->experts, .inter = c->moe_inter, .hidden = c->hidden };
    const bool split = find(b, "experts.0.gate_proj.weight") && !find(b, "experts.gate_up_proj");
    const size_t n = (size_t)c->experts;
    const str name = full_name(b, "experts");
    x->name = arena_copy(&b->w->mem, name.p, name.n);
    x->gate = arena_take(&b->w->mem, n, sizeof *x->gate);
    x->up = arena_take(&b->w->mem, n, sizeof *x->up);
    x->down = arena_take(&b->w->mem, n, sizeof *x->down);
    if (!x->name || !x->gate || !x->up || !x->down) return no_memory(b, 3 * n * sizeof *x->gate);
    if (!split) return experts_fused(b, x);
    x->gate_q = arena_zero(&b->w->mem, n, sizeof *x->gate_q);
    x->up_q = arena_zero(&b->w->mem, n, sizeof *x->up_q);
    x->down_q = arena_zero(&b->w->mem, n, sizeof *x->down_q);
    if (!x->gate_q || !x->up_q || !x->down_q) return no_memory(b, 3 * n * sizeof *x->gate_q);
    if (!experts_split(b, x)) return false;
    if (x->type != DT_U8 && x->type != DT_F8_E4M3) x->gate_q = x->up_q = x->down_q = NULL;
    return true;
}

static bool mlp(binder *b, wffn *f, const char *gate, const char *up, const char *down, int inter) {
    return matrix(b, &f->gate, gate, inter, b->cfg->hidden) && matrix(b, &f->up, up, inter, b->cfg->hidden) &&
           matrix(b, &f->down, down, b->cfg->hidden, inter);
}

static bool bind_ffn(binder *b, wffn *f) {
    const model_config *c = b->cfg;
    const size_t base = b->base;
    base_add(b, "mlp.");
    bool ok;
    if (!c->is_moe) {
        ok = mlp(b, f, "gate_proj.weight", "up_proj.weight", "down_proj.weight", c->inter);
    } else {
        ok = matrix(b, &f->router, "gate.weight", c->experts, c->hidden) && bind_experts(b, &f->experts);
        if (ok && c->shared_inter)
            ok = matrix(b, &f->shared_gate_in, "shared_expert_gate.weight", 1, c->hidden) &&
                 mlp(b, f, "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight",
                     "shared_expert.down_proj.weight", c->shared_inter);
    }
    b->base = base;
    return ok;
}

static bool bind_layer(binder *b, wlayer *l, layer_kind kind) {
    l->kind = kind;
    return vector(b, &l->norm1, "input_layernorm.weight", b->cfg->hidden, VEC_ONE_PLUS) &&
           vector(b, &l->norm2, "post_attention_layernorm.weight", b->cfg->hidden, VEC_ONE_PLUS) &&
           (kind == LAYER_GDN ? bind_gdn(b, l) : bind_attention(b, l)) && bind_ffn(b, &l->ffn);
}

/* ---- the whole ---- */

/* Which prefix the model stands behind, and how many tensors the draft head has: one pass over all names. */
static bool survey(binder *b) {
    for (int s = 0; s < b->c->shard_count; s++)
        for (int i = 0; i < b->c->shards[s].count; i++) {
            st_tensor *t = &b->c->shards[s].tensors[i];
            t->uses = 0;
            if (name_is_mtp(t->name)) b->mtp_tensors++;
        }
    for (b->prefix = 0; b->prefix < NAME_PREFIXES; b->prefix++) {
        base_set(b, name_prefixes[b->prefix]);
        if (find(b, "embed_tokens.weight")) return true;
    }
    return why_no_model(b->c, b->e);
}

static bool bind_head(binder *b) {
    weights *w = b->w;
    base_set(b, "");
    const char *name = "lm_head.weight";
    st_tensor *t = find(b, name);
    if (!t && find(b, "language_model.lm_head.weight")) t = find(b, name = "language_model.lm_head.weight");
    if (!b->cfg->tied) return matrix(b, &w->head, name, b->cfg->vocab, b->cfg->hidden);
    w->head = w->embed;
    /* A tied checkpoint may carry the head once more; only an equal one is harmless. */
    const uint64_t bytes = (uint64_t)b->cfg->vocab * (uint64_t)b->cfg->hidden * (uint64_t)dtype_bytes(w->embed.type);
    if (t && t->type == w->embed.type && t->bytes == bytes && memcmp(t->data, w->embed.data, bytes) == 0) t->uses++;
    return true;
}

static bool check_plain(binder *b, const wmat *m) {
    if (m->q.format == WF_PLAIN) return true;
    return fail(b->e, ERR_INPUT, "E-LOAD-DTYPE", "%s: %s: a quantized embedding is not supported", b->c->dir, m->name);
}

/* Ruling 16: a declared FP8 cache without any scale is the cast form; scales of some layers only are a broken export. */
static bool check_kv(binder *b) {
    weights *w = b->w;
    int with = 0, attn = 0;
    if (!quant_kv_declared(&w->kv_fp8, b->c, b->e)) return false;
    for (int i = 0; i < b->cfg->layers; i++)
        if (b->cfg->layer[i] == LAYER_ATTN) attn++, with += w->layers[i].k_scale > 0;
    if (with && with < attn)
        return fail(b->e, ERR_INPUT, "E-LOAD-KV", "%s: %d of %d attention layers have K/V scales (all or none must)",
                    b->c->dir, with, attn);
    if (with && !w->kv_fp8)
        log_say("W-LOAD-KV-UNDECLARED",
                "%s: K/V scales are there, but no config declares an FP8 cache: they are not used", b->c->dir);
    if (!with && w->kv_fp8)
        log_say("N-LOAD-KV-CAST", "%s: FP8 KV cache declared without scales: every scale is 1.0", b->c->dir);
    return true;
}

static bool bind_trunk(binder *b) {
    weights *w = b->w;
    const model_config *c = b->cfg;
    base_set(b, name_prefixes[b->prefix]);
    const size_t base = b->base;
    if (!matrix(b, &w->embed, "embed_tokens.weight", c->vocab, c->hidden) || !check_plain(b, &w->embed) ||
        !vector(b, &w->norm, "norm.weight", c->hidden, VEC_ONE_PLUS))
        return false;
    w->layers = arena_zero(&w->mem, (size_t)c->layers, sizeof *w->layers);
    if (!w->layers) return no_memory(b, (uint64_t)c->layers * sizeof *w->layers);
    for (int i = 0; i < c->layers; i++) {
        base_add(b, "layers.");
        base_number(b, i);
        base_add(b, ".");
        if (!bind_layer(b, &w->layers[i], c->layer[i])) return false;
        b->base = base;
    }
    return bind_head(b);
}

static bool bind_mtp(binder *b) {
    wmtp *m = &b->w->mtp;
    const int h = b->cfg->hidden;
    if (!b->mtp_tensors) {
        log_say("N-LOAD-NO-MTP", "%s: no draft head (no mtp.* tensors%s): no speculation", b->c->dir,
                b->cfg->mtp_layers ? ", though config.json declares one" : "");
        return true;
    }
    if (!b->cfg->mtp_layers)
        log_say("N-LOAD-MTP", "%s: a draft head is there, though config.json declares none: it is used", b->c->dir);
    base_set(b, "mtp.");
    m->present = matrix(b, &m->fc, "fc.weight", h, 2 * h) &&
                 vector(b, &m->norm_embed, "pre_fc_norm_embedding.weight", h, VEC_ONE_PLUS) &&
                 vector(b, &m->norm_hidden, "pre_fc_norm_hidden.weight", h, VEC_ONE_PLUS) &&
                 vector(b, &m->norm, "norm.weight", h, VEC_ONE_PLUS);
    if (!m->present) return false;
    base_add(b, "layers.0.");
    return bind_layer(b, &m->layer, LAYER_ATTN);
}

/* Total loading: what nothing bound is vision (skipped by rule, counted) or an error. */
static bool check_unused(binder *b) {
    const st_tensor *first[UNUSED_SHOWN];
    int count = 0;
    for (int s = 0; s < b->c->shard_count; s++)
        for (int i = 0; i < b->c->shards[s].count; i++) {
            const st_tensor *t = &b->c->shards[s].tensors[i];
            CHECK(t->uses <= 1, "%s bound %d times", t->name.p, t->uses);
            if (t->uses) continue;
            if (name_is_vision(t->name)) {
                b->w->vision_tensors++;
                b->w->vision_bytes += t->bytes;
            } else if (count++ < UNUSED_SHOWN) {
                first[count - 1] = t;
            }
        }
    return !count ||
           why_unused(b->c, b->cfg, b->prefix, first, count < UNUSED_SHOWN ? count : UNUSED_SHOWN, count, b->e);
}

static void say_notices(const binder *b) {
    group_check(b->w, b->cfg, b->c->dir);
    if (b->copied)
        log_say("W-LOAD-UNALIGNED",
                "%s: %d matrices (%llu bytes) are not aligned to their element and were copied, first %s", b->c->dir,
                b->copied, (unsigned long long)b->copied_bytes, b->copied_first);
    if (b->cfg->type != b->w->embed.type)
        log_say("W-LOAD-DTYPE", "%s: config.json says %s, the weights are %s: the weights count", b->c->dir,
                dtype_name(b->cfg->type), dtype_name(b->w->embed.type));
}

static bool bind_all(binder *b) {
    if (survey(b) && bind_trunk(b) && bind_mtp(b) && check_unused(b) && check_kv(b)) return say_notices(b), true;
    weights_free(b->w);
    return false;
}

bool weights_bind(weights *out, ckpt *c, const model_config *config, err *e) {
    *out = (weights){ 0 };
    binder b = { .w = out, .c = c, .cfg = config, .e = e };
    return bind_all(&b);
}

bool weights_check(ckpt *c, const model_config *config, err *e) {
    weights w = { 0 };
    binder b = { .w = &w, .c = c, .cfg = config, .e = e, .check_only = true };
    const bool ok = bind_all(&b);
    weights_free(&w);
    return ok;
}

void weights_free(weights *w) {
    arena_free(&w->mem);
    *w = (weights){ 0 };
}

void wlayer_mats(const wmat *out[LAYER_MATS], const wlayer *l) {
    const wmat *all[LAYER_MATS] = { &l->in_qkv,
                                    &l->in_z,
                                    &l->in_b,
                                    &l->in_a,
                                    &l->gdn_out,
                                    &l->q,
                                    &l->k,
                                    &l->v,
                                    &l->o,
                                    &l->ffn.router,
                                    &l->ffn.shared_gate_in,
                                    &l->ffn.gate,
                                    &l->ffn.up,
                                    &l->ffn.down };
    memcpy(out, all, sizeof all);
}
