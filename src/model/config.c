#include "model/config.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "model/config_rope.h"
#include "model/fields.h"

/* Bounds of the format, not of any machine: they keep every product below 2^63 and refuse nonsense early. */
enum {
    MAX_VOCAB = 1 << 24,
    MAX_WIDTH = 1 << 16,
    MAX_FFN = 1 << 18,
    MAX_HEADS = 1024,
    MAX_HEAD_DIM = 1024,
    MAX_EXPERTS = 4096,
    MAX_TOPK = 64,
    MAX_POSITION = 1 << 24,
    CONV_KERNEL = 4
};
static const int64_t MAX_STATE_BYTES = (int64_t)1 << 36;

typedef struct reader {
    model_config *c;
    fields text; /* text_config, then the top level */
    fields top;  /* the top level, then text_config */
    fields gen;  /* generation_config.json */
    bool nested;
} reader;

/* ---- which model ---- */

static const struct {
    const char *type, *architecture;
    bool moe, next;
} families[] = {
    { "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", true, false }, /* the longest architecture that fits comes first */
    { "qwen3_5_moe", "Qwen3_5Moe", true, false },
    { "qwen3_5_text", "Qwen3_5ForCausalLM", false, false },
    { "qwen3_5", "Qwen3_5", false, false },
    { "qwen3_next", "Qwen3Next", true, true },
};

static int family_of_type(str type) {
    for (int i = 0; i < (int)ARRAY_LEN(families); i++)
        if (str_is(type, families[i].type)) return i;
    return -1;
}

static int family_of_architecture(str a) {
    for (int i = 0; i < (int)ARRAY_LEN(families); i++)
        if (str_starts(a, str_of(families[i].architecture))) return i;
    return -1;
}

static bool unknown_type(const reader *r, const char *key, str type, err *e) {
    return fail(
        e, ERR_INPUT, "E-CONFIG-TYPE",
        "%s/%s: %s: \"%.60s\" is not a model nibble knows (qwen3_5_moe, qwen3_5, their _text variants, qwen3_next)",
        r->text.dir, r->text.file, key, type.p);
}

static bool read_type(reader *r, err *e) {
    const fields text_only = { r->text.inner, NULL, r->text.dir, r->text.file };
    const fields top_only = { r->top.inner, NULL, r->text.dir, r->text.file };
    str inner, outer, arch = { 0 };
    if (!field_str_opt(&text_only, "model_type", &inner, e) || !field_str_opt(&top_only, "model_type", &outer, e))
        return false;
    const json *list = field_get(&r->top, "architectures");
    if (json_is(list, JSON_ARRAY) && list->n && list->u.items[0].type == JSON_STRING)
        arch = json_str(&list->u.items[0]);

    if (outer.p && family_of_type(outer) < 0) return unknown_type(r, "model_type", outer, e);
    if (inner.p && family_of_type(inner) < 0)
        return unknown_type(r, r->nested ? "text_config.model_type" : "model_type", inner, e);
    if (!inner.p) inner = outer;
    int family = inner.p ? family_of_type(inner) : family_of_architecture(arch);
    if (family < 0)
        return fail(e, ERR_INPUT, "E-CONFIG-TYPE", "%s/%s: model_type is missing%s", r->text.dir, r->text.file,
                    arch.p ? " and architectures names no model nibble knows" : "");
    if (!inner.p) inner = str_of(families[family].type);
    const int of_outer = outer.p ? family_of_type(outer) : family;
    if (families[of_outer].moe != families[family].moe || families[of_outer].next != families[family].next)
        return fail(e, ERR_INPUT, "E-CONFIG-TYPE",
                    "%s/%s: model_type \"%.60s\" does not go with text_config's \"%.60s\"", r->text.dir, r->text.file,
                    outer.p, inner.p);
    if (arch.p && family_of_architecture(arch) < 0)
        log_say("N-CONFIG-ARCH", "%s/%s: architectures: \"%.60s\" is unknown; read as model_type \"%.60s\"",
                r->text.dir, r->text.file, arch.p, inner.p);
    snprintf(r->c->model_type, sizeof r->c->model_type, "%s", inner.p);
    snprintf(r->c->architecture, sizeof r->c->architecture, "%s", arch.p ? arch.p : "");
    r->c->is_moe = families[family].moe;
    r->c->is_next = families[family].next;
    r->c->has_vision = json_is(json_get(r->top.inner, "vision_config"), JSON_OBJECT);
    return true;
}

/* ---- what nibble does not do ---- */

static bool refuse_true(const reader *r, const char *key, err *e) {
    bool on = false;
    if (!field_bool_opt(&r->text, key, &on, NULL, e)) return false;
    if (on) return field_refuse(&r->text, "E-CONFIG-UNSUPPORTED", key, field_get(&r->text, key), "is not supported", e);
    return true;
}

static bool refuse_number(const reader *r, const char *key, int64_t harmless, err *e) {
    const json *v = field_get(&r->text, key);
    if (!v || (v->type == JSON_INT && v->u.i == harmless) || v->type == JSON_FALSE) return true;
    return field_refuse(&r->text, "E-CONFIG-UNSUPPORTED", key, v, "is not supported", e);
}

static bool check_text(const reader *r, const char *key, const char *const *known, const char *id, err *e) {
    const json *v = field_get(&r->text, key);
    if (!v) return true;
    for (int i = 0; v->type == JSON_STRING && known[i]; i++)
        if (str_is(json_str(v), known[i])) return true;
    return field_refuse(&r->text, id, key, v, "is not supported", e);
}

static bool read_refusals(const reader *r, err *e) {
    static const char *const silu[] = { "silu", "swish", NULL };
    if (!check_text(r, "hidden_act", silu, "E-CONFIG-ACT", e) ||
        !check_text(r, "output_gate_type", silu, "E-CONFIG-ACT", e))
        return false;
    static const char *const off[] = { "attention_bias", "mlp_bias", "linear_attention_bias", "use_sliding_window",
                                       "mtp_use_dedicated_embeddings" };
    for (int i = 0; i < (int)ARRAY_LEN(off); i++)
        if (!refuse_true(r, off[i], e)) return false;
    if (!refuse_number(r, "final_logit_softcapping", 0, e) || !refuse_number(r, "attn_logit_softcapping", 0, e))
        return false;
    bool norm_topk = true, found;
    if (!field_bool_opt(&r->text, "norm_topk_prob", &norm_topk, &found, e)) return false;
    if (!norm_topk)
        return field_refuse(&r->text, "E-CONFIG-UNSUPPORTED", "norm_topk_prob", field_get(&r->text, "norm_topk_prob"),
                            "is not supported (the router's weights are always renormalised)", e);
    if (r->c->is_moe && !refuse_number(r, "decoder_sparse_step", 1, e)) return false;
    const json *dense = field_get(&r->text, "mlp_only_layers");
    if (dense && !(dense->type == JSON_ARRAY && dense->n == 0))
        return field_refuse(&r->text, "E-CONFIG-UNSUPPORTED", "mlp_only_layers", dense,
                            "is not supported (every layer is alike)", e);
    const json *ssm = field_get(&r->text, "mamba_ssm_dtype");
    if (ssm && !(ssm->type == JSON_STRING && str_is(json_str(ssm), "float32")))
        log_say("N-CONFIG-SSM", "%s/%s: mamba_ssm_dtype: %.40s is not used: the recurrent state is float32",
                r->text.dir, r->text.file, ssm->type == JSON_STRING ? ssm->u.s : "the value");
    return true;
}

/* ---- dimensions ---- */

/* A field that all published models agree on; its absence is said. */
static bool int_or_said(const reader *r, const char *key, int lo, int hi, int fallback, int *out, err *e) {
    bool found;
    *out = fallback;
    if (!field_int_opt(&r->text, key, lo, hi, out, &found, e)) return false;
    if (!found)
        log_say("N-CONFIG-DEFAULT", "%s/%s: %s is missing: %d assumed", r->text.dir, r->text.file, key, fallback);
    return true;
}

static bool divides(const reader *r, const char *a, int va, const char *b, int vb, err *e) {
    if (va % vb == 0) return true;
    return fail(e, ERR_INPUT, "E-CONFIG-FIELD", "%s/%s: %s: %d is not a multiple of %s %d", r->text.dir, r->text.file,
                a, va, b, vb);
}

static bool read_widths(reader *r, err *e) {
    model_config *c = r->c;
    double eps = 1e-6;
    bool found;
    if (!field_int(&r->text, "vocab_size", 1, MAX_VOCAB, &c->vocab, e) ||
        !field_int(&r->text, "hidden_size", 1, MAX_WIDTH, &c->hidden, e) ||
        !field_int(&r->text, "num_hidden_layers", 1, CONFIG_MAX_LAYERS, &c->layers, e) ||
        !field_double_opt(&r->text, "rms_norm_eps", 1e-12, 0.1, &eps, &found, e) ||
        !field_bool_opt(&r->top, "tie_word_embeddings", &c->tied, NULL, e) ||
        !int_or_said(r, "max_position_embeddings", 1, MAX_POSITION, 32768, &c->max_position, e))
        return false;
    if (!found) log_say("N-CONFIG-DEFAULT", "%s/%s: rms_norm_eps is missing: 1e-06 assumed", r->text.dir, r->text.file);
    c->rms_eps = (float)eps;
    return true;
}

static bool read_attention(reader *r, err *e) {
    model_config *c = r->c;
    c->attn_gate = true;
    return field_int(&r->text, "num_attention_heads", 1, MAX_HEADS, &c->heads, e) &&
           field_int(&r->text, "num_key_value_heads", 1, MAX_HEADS, &c->kv_heads, e) &&
           divides(r, "num_attention_heads", c->heads, "num_key_value_heads", c->kv_heads, e) &&
           int_or_said(r, "head_dim", 2, MAX_HEAD_DIM, 256, &c->head_dim, e) &&
           field_bool_opt(&r->text, "attn_output_gate", &c->attn_gate, NULL, e);
}

static bool read_gdn(reader *r, err *e) {
    model_config *c = r->c;
    if (!field_int(&r->text, "linear_num_key_heads", 1, MAX_HEADS, &c->lin_k_heads, e) ||
        !field_int(&r->text, "linear_num_value_heads", 1, MAX_HEADS, &c->lin_v_heads, e) ||
        !divides(r, "linear_num_value_heads", c->lin_v_heads, "linear_num_key_heads", c->lin_k_heads, e) ||
        !int_or_said(r, "linear_key_head_dim", 1, MAX_HEAD_DIM, 128, &c->lin_k_dim, e) ||
        !int_or_said(r, "linear_value_head_dim", 1, MAX_HEAD_DIM, 128, &c->lin_v_dim, e) ||
        !int_or_said(r, "linear_conv_kernel_dim", 1, 64, CONV_KERNEL, &c->conv_kernel, e))
        return false;
    if (c->conv_kernel != CONV_KERNEL)
        return field_refuse(&r->text, "E-CONFIG-UNSUPPORTED", "linear_conv_kernel_dim",
                            field_get(&r->text, "linear_conv_kernel_dim"), "is not supported (4)", e);
    return true;
}

static bool read_ffn(reader *r, err *e) {
    model_config *c = r->c;
    if (!c->is_moe) return field_int(&r->text, "intermediate_size", 1, MAX_FFN, &c->inter, e);
    if (!field_int(&r->text, "num_experts", 1, MAX_EXPERTS, &c->experts, e) ||
        !field_int(&r->text, "num_experts_per_tok", 1, MAX_TOPK, &c->topk, e) ||
        !field_int(&r->text, "moe_intermediate_size", 1, MAX_FFN, &c->moe_inter, e) ||
        !field_int(&r->text, "shared_expert_intermediate_size", 0, MAX_FFN, &c->shared_inter, e))
        return false;
    if (c->topk > c->experts)
        return fail(e, ERR_INPUT, "E-CONFIG-FIELD", "%s/%s: num_experts_per_tok: %d is more than num_experts %d",
                    r->text.dir, r->text.file, c->topk, c->experts);
    return true;
}

/* Kinds of the layers: layer_types, else every full_attention_interval-th layer is full attention. */
static bool read_layers(reader *r, err *e) {
    model_config *c = r->c;
    const json *types = field_get(&r->text, "layer_types");
    int interval = 4;
    if (!field_int_opt(&r->text, "full_attention_interval", 1, CONFIG_MAX_LAYERS, &interval, NULL, e)) return false;
    if (types && (types->type != JSON_ARRAY || types->n != (uint32_t)c->layers)) {
        char why[64];
        snprintf(why, sizeof why, "does not go with num_hidden_layers %d", c->layers);
        return field_refuse(&r->text, "E-CONFIG-LAYER", "layer_types", types, why, e);
    }
    for (int i = 0; i < c->layers; i++) {
        bool full = (i + 1) % interval == 0;
        if (types) {
            const json *t = &types->u.items[i];
            full = t->type == JSON_STRING && str_is(json_str(t), "full_attention");
            if (!full && !(t->type == JSON_STRING && str_is(json_str(t), "linear_attention"))) {
                char key[40];
                snprintf(key, sizeof key, "layer_types[%d]", i);
                return field_refuse(&r->text, "E-CONFIG-LAYER", key, t,
                                    "is not supported (linear_attention or full_attention)", e);
            }
        }
        c->layer[i] = full ? LAYER_ATTN : LAYER_GDN;
        full ? c->attn_layers++ : c->gdn_layers++;
    }
    if (config_state_bytes(c) > MAX_STATE_BYTES)
        return fail(e, ERR_INPUT, "E-CONFIG-FIELD",
                    "%s/%s: linear_num_value_heads: %d heads of %d x %d in %d layers need %lld bytes of state",
                    r->text.dir, r->text.file, c->lin_v_heads, c->lin_k_dim, c->lin_v_dim, c->gdn_layers,
                    (long long)config_state_bytes(c));
    return true;
}

static bool read_mtp(reader *r, err *e) {
    int n = 0;
    bool found;
    if (!field_int_opt(&r->text, "mtp_num_hidden_layers", 0, 1 << 20, &n, &found, e)) return false;
    if (!found && !field_int_opt(&r->text, "num_nextn_predict_layers", 0, 1 << 20, &n, &found, e)) return false;
    if (n > 1)
        return fail(e, ERR_INPUT, "E-CONFIG-UNSUPPORTED", "%s/%s: mtp_num_hidden_layers: %d is not supported (0 or 1)",
                    r->text.dir, r->text.file, n);
    r->c->mtp_layers = n;
    return true;
}

/* ---- dtype, stop ids, sampling ---- */

static bool read_dtype(reader *r, err *e) {
    const fields levels[] = { { r->text.inner, NULL, r->text.dir, r->text.file },
                              { r->top.inner, NULL, r->text.dir, r->text.file } };
    static const char *const keys[] = { "dtype", "torch_dtype" };
    static const struct {
        const char *name;
        dtype type;
    } types[] = {
        { "bfloat16", DT_BF16 }, { "float16", DT_F16 }, { "half", DT_F16 }, { "float32", DT_F32 }, { "float", DT_F32 }
    };
    for (int i = 0; i < 4; i++) {
        str s;
        if (!field_str_opt(&levels[i / 2], keys[i % 2], &s, e)) return false;
        if (!s.p || str_is(s, "auto")) continue;
        const str bare = str_starts(s, STR("torch.")) ? str_skip(s, 6) : s;
        for (int k = 0; k < (int)ARRAY_LEN(types); k++)
            if (str_is(bare, types[k].name)) return r->c->type = types[k].type, true;
        return field_bad(&levels[i / 2], keys[i % 2], field_get(&levels[i / 2], keys[i % 2]),
                         "bfloat16, float16 or float32", e);
    }
    r->c->type = DT_BF16;
    log_say("N-CONFIG-DTYPE", "%s/%s: no dtype: bfloat16 assumed", r->text.dir, r->text.file);
    return true;
}

static bool add_stop(reader *r, const fields *f, const json *v, err *e) {
    model_config *c = r->c;
    if (v->type != JSON_INT || v->u.i < 0 || v->u.i >= c->vocab) {
        char want[64];
        snprintf(want, sizeof want, "a token id below vocab_size %d", c->vocab);
        return field_bad(f, "eos_token_id", v, want, e);
    }
    for (int i = 0; i < c->stop_count; i++)
        if (c->stop_ids[i] == v->u.i) return true;
    if (c->stop_count == CONFIG_MAX_STOPS)
        return fail(e, ERR_INPUT, "E-CONFIG-FIELD", "%s/%s: eos_token_id: more than %d ids", f->dir, f->file,
                    (int)CONFIG_MAX_STOPS);
    c->stop_ids[c->stop_count++] = (int)v->u.i;
    return true;
}

static bool read_stops(reader *r, err *e) {
    const fields *f = &r->gen;
    const json *v = field_get(f, "eos_token_id");
    if (!v) f = &r->text, v = field_get(f, "eos_token_id");
    if (v && v->type == JSON_ARRAY) {
        for (uint32_t i = 0; i < v->n; i++)
            if (!add_stop(r, f, &v->u.items[i], e)) return false;
    } else if (v && !add_stop(r, f, v, e)) {
        return false;
    }
    if (!r->c->stop_count)
        log_say("N-CONFIG-STOP", "%s/%s: no eos_token_id: an answer ends only at its token limit", r->text.dir,
                r->text.file);
    return true;
}

static bool read_sampling(reader *r, err *e) {
    model_config *c = r->c;
    if (!field_bool_opt(&r->gen, "do_sample", &c->gen.do_sample, NULL, e) ||
        !field_double_opt(&r->gen, "temperature", 0, 100, &c->gen.temperature, &c->gen.has_temperature, e) ||
        !field_int_opt(&r->gen, "top_k", 0, 1 << 24, &c->gen.top_k, &c->gen.has_top_k, e) ||
        !field_double_opt(&r->gen, "top_p", 0, 1, &c->gen.top_p, &c->gen.has_top_p, e) ||
        !field_double_opt(&r->gen, "min_p", 0, 1, &c->gen.min_p, &c->gen.has_min_p, e) ||
        !field_double_opt(&r->gen, "presence_penalty", -2, 2, &c->gen.presence, &c->gen.has_presence, e) ||
        !field_double_opt(&r->gen, "frequency_penalty", -2, 2, &c->gen.frequency, &c->gen.has_frequency, e) ||
        !field_double_opt(&r->gen, "repetition_penalty", 0.01, 100, &c->gen.repetition, &c->gen.has_repetition, e))
        return false;
    double typical = 1;
    if (!field_double_opt(&r->gen, "typical_p", -100, 100, &typical, NULL, e)) return false;
    if (typical != 1)
        log_say("N-CONFIG-SAMPLING", "%s/%s: typical_p %g is not applied", r->gen.dir, r->gen.file, typical);
    return true;
}

/* ---- all of it ---- */

bool config_read(model_config *out, const json *config, const json *generation, const char *dir, err *e) {
    *out = (model_config){ 0 };
    if (!json_is(config, JSON_OBJECT)) return fail(e, ERR_INPUT, "E-CONFIG-TYPE", "%s/config.json: not an object", dir);
    const json *text = json_get(config, "text_config");
    const bool nested = json_is(text, JSON_OBJECT);
    if (text && text->type != JSON_NULL && !nested)
        return fail(e, ERR_INPUT, "E-CONFIG-FIELD", "%s/config.json: text_config is not an object", dir);
    if (!nested) text = config;
    reader r = { .c = out,
                 .nested = nested,
                 .text = { text, nested ? config : NULL, dir, "config.json" },
                 .top = { config, nested ? text : NULL, dir, "config.json" },
                 .gen = { generation, NULL, dir, "generation_config.json" } };
    return read_type(&r, e) && read_refusals(&r, e) && read_widths(&r, e) && read_attention(&r, e) && read_gdn(&r, e) &&
           read_ffn(&r, e) && read_layers(&r, e) && config_read_rope(out, &r.text, e) && read_mtp(&r, e) &&
           read_dtype(&r, e) && read_stops(&r, e) && read_sampling(&r, e);
}

int64_t config_state_bytes(const model_config *c) {
    const int64_t state = (int64_t)c->lin_v_heads * c->lin_k_dim * c->lin_v_dim;
    const int64_t window = (int64_t)(c->conv_kernel - 1) * config_conv_dim(c);
    return c->gdn_layers * (state + window) * (int64_t)sizeof(float);
}

int64_t config_kv_bytes_per_token(const model_config *c, int bytes_per_elem, bool with_mtp) {
    return (int64_t)(c->attn_layers + with_mtp) * 2 * c->kv_heads * c->head_dim * bytes_per_elem;
}
