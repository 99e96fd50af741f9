#include "model/names.h"

#include "model/weights.h"

const char *const name_prefixes[NAME_PREFIXES] = { "model.language_model.", "language_model.model.", "model." };

bool name_is_vision(str n) { return str_starts(n, STR("model.visual.")) || str_starts(n, STR("visual.")); }
bool name_is_mtp(str n) { return str_starts(n, STR("mtp.")); }

int name_prefix(str n) {
    if (name_is_vision(n) || str_starts(n, STR("model.mtp."))) return -1;
    for (int i = 0; i < NAME_PREFIXES; i++)
        if (str_starts(n, str_of(name_prefixes[i]))) return i;
    return -1;
}

/* The number behind the first `mark`, at most 7 digits and followed by a dot; or -1. */
static int number_behind(str n, str mark) {
    const ptrdiff_t at = str_find(n, mark);
    if (at < 0) return -1;
    int v = 0, digits = 0;
    for (size_t i = (size_t)at + mark.n; i < n.n; i++, digits++) {
        if (n.p[i] == '.' && digits) return v;
        if (n.p[i] < '0' || n.p[i] > '9' || digits == 7) return -1;
        v = v * 10 + (n.p[i] - '0');
    }
    return -1;
}

int name_layer(str n) { return number_behind(n, STR("layers.")); }
int name_expert(str n) { return number_behind(n, STR(".experts.")); }

bool name_is_kv_scale(str n) { return str_ends(n, STR(".k_scale")) || str_ends(n, STR(".v_scale")); }

bool name_is_scale(str n) {
    static const char *const ends[] = {
        "weight_scale",        "weight_scale_2",     "input_scale", "weight_scale_inv",
        "weight_global_scale", "input_global_scale", "proj_scale",  "proj_global_scale"
    };
    if (name_is_kv_scale(n)) return true;
    for (int i = 0; i < (int)ARRAY_LEN(ends); i++)
        if (str_ends(n, str_of(ends[i]))) return true;
    return false;
}

const char *weight_class_name(weight_class c) {
    static const char *const names[WC_COUNT + 1] = { "embed",  "head",    "gdn",           "attention",
                                                     "router", "experts", "shared_expert", "dense_ffn",
                                                     "norm",   "mtp",     "vision",        "other" };
    return names[c >= 0 && c < WC_COUNT ? c : WC_COUNT];
}

static bool has(str n, const char *part) { return str_find(n, str_of(part)) >= 0; }

weight_class weight_class_of(str n) {
    if (name_is_vision(n)) return WC_VISION;
    if (name_is_mtp(n)) return WC_MTP;
    if (str_starts(n, STR("lm_head.")) || str_starts(n, STR("language_model.lm_head."))) return WC_HEAD;
    const int p = name_prefix(n);
    if (p < 0) return WC_COUNT;
    const str rest = str_skip(n, strlen(name_prefixes[p]));
    if (str_starts(rest, STR("embed_tokens."))) return WC_EMBED;
    if (str_is(rest, "norm.weight") || has(rest, "_layernorm.")) return WC_NORM;
    if (has(rest, ".linear_attn.")) return WC_GDN;
    if (has(rest, ".self_attn.")) return WC_ATTN;
    if (has(rest, ".mlp.experts.")) return WC_EXPERTS;
    if (has(rest, ".mlp.shared_expert.")) return WC_SHARED;
    if (has(rest, ".mlp.gate.") || has(rest, ".mlp.shared_expert_gate.")) return WC_ROUTER;
    if (has(rest, ".mlp.")) return WC_DENSE;
    return WC_COUNT;
}
