#include "model/weights_why.h"

#include <stdio.h>

#include "model/names.h"

/* Is there a tensor whose name is `name` with the part from `from` on replaced by `to`? */
static bool sibling(const ckpt *c, str name, const char *from, const char *to) {
    char other[512];
    const ptrdiff_t at = str_find(name, str_of(from));
    if (at < 0 || (size_t)at + strlen(to) >= sizeof other) return false;
    memcpy(other, name.p, (size_t)at);
    memcpy(other + at, to, strlen(to));
    return ckpt_find(c, (str){ other, (size_t)at + strlen(to) }) != NULL;
}

static int last_layer(const ckpt *c, int prefix) {
    int last = -1;
    for (int s = 0; s < c->shard_count; s++)
        for (int i = 0; i < c->shards[s].count; i++) {
            const str n = c->shards[s].tensors[i].name;
            if (name_prefix(n) == prefix && name_layer(n) > last) last = name_layer(n);
        }
    return last;
}

static void guess_unfilled(char *out, size_t n, const ckpt *c, const model_config *cfg, int prefix, str name) {
    const int layer = name_is_mtp(name) ? -1 : name_layer(name), last = layer >= 0 ? last_layer(c, prefix) : -1;
    out[0] = 0;
    if (str_find(name, STR("lm_head")) >= 0)
        snprintf(out, n, "config.json says tie_word_embeddings = false, so a head must be there");
    else if (layer > last)
        snprintf(out, n, "the file ends with layer %d, config.json says num_hidden_layers = %d", last, cfg->layers);
    else if (sibling(c, name, "linear_attn.", "self_attn.q_proj.weight"))
        snprintf(out, n,
                 "this layer holds full attention: layer_types or full_attention_interval of config.json is wrong");
    else if (sibling(c, name, "self_attn.", "linear_attn.A_log"))
        snprintf(out, n,
                 "this layer holds linear attention: layer_types or full_attention_interval of config.json is wrong");
    else if (sibling(c, name, "linear_attn.in_proj_qkv.", "linear_attn.in_proj_qkvz.weight"))
        snprintf(out, n, "the file has the fused in_proj_qkvz of qwen3_next");
    else if (cfg->is_moe && sibling(c, name, "mlp.", "mlp.gate_proj.weight"))
        snprintf(out, n, "this layer holds a dense MLP, config.json describes experts");
    else if (!cfg->is_moe && sibling(c, name, "mlp.", "mlp.gate.weight"))
        snprintf(out, n, "this layer holds experts, config.json describes a dense model");
    else if (str_find(name, STR(".experts.gate_up_proj")) >= 0)
        snprintf(out, n, "neither fused experts nor experts.0.gate_proj.weight are there");
    else if (name_expert(name) >= 0)
        snprintf(out, n, "experts are split in this layer, config.json says num_experts = %d", cfg->experts);
}

bool why_unfilled(const ckpt *c, const model_config *cfg, int prefix, str name, err *e) {
    char why[200];
    guess_unfilled(why, sizeof why, c, cfg, prefix, name);
    return fail(e, ERR_INPUT, "E-LOAD-UNFILLED", "%s: no tensor " STR_FMT "%s%s%s", c->dir, STR_ARG(name),
                why[0] ? " (" : "", why, why[0] ? ")" : "");
}

bool why_no_model(const ckpt *c, err *e) {
    for (int s = 0; s < c->shard_count; s++)
        for (int i = 0; i < c->shards[s].count; i++) {
            const str n = c->shards[s].tensors[i].name;
            if (str_ends(n, STR("embed_tokens.weight")))
                return fail(
                    e, ERR_INPUT, "E-LOAD-UNFILLED",
                    "%s: no tensor model.language_model.embed_tokens.weight (found " STR_FMT
                    ": a prefix nibble does not know; known are model.language_model., model., language_model.model.)",
                    c->dir, STR_ARG(n));
        }
    return fail(
        e, ERR_INPUT, "E-LOAD-UNFILLED",
        "%s: no tensor model.language_model.embed_tokens.weight nor model.embed_tokens.weight (the first tensor is %s)",
        c->dir, c->tensor_count ? ckpt_at(c, 0)->name.p : "absent");
}

static void guess_unused(char *out, size_t n, const ckpt *c, const model_config *cfg, int prefix, str name) {
    const int layer = name_layer(name), other = name_prefix(name);
    out[0] = 0;
    if (str_find(name, STR(".mtp.")) >= 0)
        snprintf(out, n, "tensors of the draft head start with mtp.");
    else if (other >= 0 && other != prefix)
        snprintf(out, n, "the model stands behind %s: two prefixes are mixed", name_prefixes[prefix]);
    else if (str_find(name, STR("lm_head")) >= 0)
        snprintf(out, n, "config.json says tie_word_embeddings = %s",
                 cfg->tied ? "true, but its bytes are not the embedding's" : "false");
    else if (name_is_mtp(name) && layer > 0)
        snprintf(out, n, "a draft head of one layer is supported");
    else if (!name_is_mtp(name) && layer >= cfg->layers)
        snprintf(out, n, "config.json says num_hidden_layers = %d", cfg->layers);
    else if (name_expert(name) >= 0 && sibling(c, name, ".experts.", ".experts.gate_up_proj"))
        snprintf(out, n, "the layer has fused and split experts at once");
    else if (name_expert(name) >= cfg->experts && cfg->is_moe)
        snprintf(out, n, "config.json says num_experts = %d", cfg->experts);
    else if (str_ends(name, STR(".bias")))
        snprintf(out, n, "a bias: this family has none");
    else if (str_find(name, STR(".shared_expert")) >= 0 && cfg->shared_inter == 0)
        snprintf(out, n, "config.json says shared_expert_intermediate_size = 0");
    else if (other < 0 && !name_is_mtp(name))
        snprintf(out, n, "no part of this family has such a name");
}

bool why_unused(const ckpt *c, const model_config *cfg, int prefix, const st_tensor *const *first, int shown, int count,
                err *e) {
    char why[200], more[400] = "";
    guess_unused(why, sizeof why, c, cfg, prefix, first[0]->name);
    for (int i = 1, at = 0; i < shown && at < (int)sizeof more; i++)
        at += snprintf(more + at, sizeof more - (size_t)at, ", %.120s", first[i]->name.p);
    return fail(e, ERR_INPUT, "E-LOAD-UNUSED", "%s: %d tensor%s that nothing uses: %.120s%s%s%s%s%s", c->dir, count,
                count == 1 ? "" : "s", first[0]->name.p, more, count > shown ? ", ..." : "", why[0] ? " (" : "", why,
                why[0] ? ")" : "");
}
