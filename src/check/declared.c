/* declared.c - what the configs say about quantization against what the tensors are. */
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>

#include "check/view.h"
#include "model/names.h"

enum { NAME_MAX_BYTES = 512 };

/* ---- exclude patterns ---- */

bool exclude_matches(str pattern, str module) {
    char p[NAME_MAX_BYTES], m[NAME_MAX_BYTES];
    size_t fixed = 0;
    while (fixed < pattern.n && !strchr("*?[", pattern.p[fixed])) fixed++;
    if (module.n < fixed || memcmp(pattern.p, module.p, fixed) != 0) return false;
    if (fixed == pattern.n) return module.n == fixed || module.p[fixed] == '.';
    if (pattern.n >= sizeof p || module.n >= sizeof m) return false;
    memcpy(p, pattern.p, pattern.n);
    memcpy(m, module.p, module.n);
    p[pattern.n] = m[module.n] = 0;
    return fnmatch(p, m, 0) == 0;
}

str runtime_name(char *out, str name, int which) {
    static const char *const to[] = { "", "model.", "language_model.model." };
    const int prefix = name_prefix(name);
    int n;
    if (which == 0 || (prefix < 0 && !str_starts(name, STR("model.visual"))))
        n = snprintf(out, NAME_MAX_BYTES, STR_FMT, STR_ARG(name));
    else if (prefix < 0)
        n = snprintf(out, NAME_MAX_BYTES, STR_FMT, STR_ARG(str_skip(name, 6)));
    else
        n = snprintf(out, NAME_MAX_BYTES, "%s" STR_FMT, to[which],
                     STR_ARG(str_skip(name, strlen(name_prefixes[prefix]))));
    return (str){ out, n < NAME_MAX_BYTES ? (size_t)n : NAME_MAX_BYTES - 1 };
}

static bool listed(const json *list, str module) {
    for (uint32_t i = 0; json_is(list, JSON_ARRAY) && i < list->n; i++)
        if (list->u.items[i].type == JSON_STRING && exclude_matches(json_str(&list->u.items[i]), module)) return true;
    return false;
}

bool view_excludes(const check_view *v, str module) {
    return v->hf ? listed(json_get(v->hf, "exclude_modules"), module) : listed(json_get(v->quant, "ignore"), module);
}

static const char *covering(const json *list, str module) {
    for (uint32_t i = 0; json_is(list, JSON_ARRAY) && i < list->n; i++)
        if (list->u.items[i].type == JSON_STRING && exclude_matches(json_str(&list->u.items[i]), module))
            return list->u.items[i].u.s;
    return NULL;
}

static bool same_list(const json *a, const json *b) {
    const uint32_t n = json_is(a, JSON_ARRAY) ? a->n : 0, m = json_is(b, JSON_ARRAY) ? b->n : 0;
    if (n != m) return false;
    for (uint32_t i = 0; i < n; i++) {
        if (a->u.items[i].type != JSON_STRING || b->u.items[i].type != JSON_STRING) return false;
        bool found = str_eq(json_str(&a->u.items[i]), json_str(&b->u.items[i])); /* mostly in the same order */
        for (uint32_t k = 0; k < m && !found; k++)
            found = b->u.items[k].type == JSON_STRING && str_eq(json_str(&a->u.items[i]), json_str(&b->u.items[k]));
        if (!found) return false;
    }
    return true;
}

/* One list (of one file) against the modules. `uniform`: everything that is not on it counts as quantized. */
static void check_list(check_view *v, const json *list, const char *file, bool uniform) {
    char name[NAME_MAX_BYTES];
    for (int i = 0; i < v->n_linears; i++) {
        const linear *l = &v->linears[i];
        if (l->format == LIN_BROKEN) continue;
        if (l->format != LIN_PLAIN) {
            for (int k = 0; k < 3; k++) {
                const char *p = covering(list, runtime_name(name, l->name, k));
                if (!p) continue;
                finding_add(v->found, "C-EXCL-QUANTIZED", file, l->name, "%s excludes it by \"%s\", but it is %s", file,
                            p, lin_format_names[l->format]);
                break;
            }
        } else if (uniform && !listed(list, l->name)) {
            if (l->family == QM_MTP_FC)
                finding_add(v->found, "C-EXCL-FC", file, l->name,
                            "%s does not exclude it: some loaders build it quantized", file);
            else
                finding_add(v->found, "C-EXCL-PLAIN", file, l->name,
                            "not quantized, but %s does not exclude it: loaders build it quantized", file);
        } else if (uniform && !l->is_mtp &&
                   (!listed(list, runtime_name(name, l->name, 1)) || !listed(list, runtime_name(name, l->name, 2)))) {
            finding_add(v->found, "C-EXCL-NAMESPACE", file, l->name,
                        "%s excludes it under the checkpoint's name only, not under those of SGLang and vLLM", file);
        }
    }
    for (int i = 0; uniform && i < v->n; i++) {
        const str t = v->all[i]->name;
        if (v->all[i]->rank != 2 || !name_is_vision(t) || !str_ends(t, STR(".weight"))) continue;
        if (!listed(list, (str){ t.p, t.n - 7 }))
            finding_add(v->found, "C-EXCL-PLAIN", "vision", (str){ t.p, t.n - 7 },
                        "the vision tower is not quantized, but %s does not exclude it", file);
    }
}

/* ---- formats ---- */

static str algo_of(const json *section) {
    const json *a = json_get(section, "quant_algo");
    return json_is(a, JSON_STRING) ? json_str(a) : (str){ 0 };
}

static bool algo_fits(str algo, const linear *l) {
    if (str_is(algo, "NVFP4")) return l->format == LIN_NVFP4 && l->has_input;
    if (str_is(algo, "W4A16_NVFP4")) return l->format == LIN_NVFP4 && !l->has_input;
    return str_is(algo, "FP8") && l->format == LIN_FP8;
}

static const char *format_of(const linear *l) {
    if (l->format == LIN_NVFP4) return l->has_input ? "NVFP4" : "W4A16_NVFP4";
    return lin_format_names[l->format];
}

static void check_uniform(check_view *v, str algo) {
    for (int i = 0; i < v->n_linears; i++) {
        const linear *l = &v->linears[i];
        if (l->format == LIN_PLAIN || l->format == LIN_BROKEN || algo_fits(algo, l)) continue;
        if (l->format == LIN_NVFP4 && !l->has_input)
            finding_add(v->found, "C-SCALE-MISSING", "input_scale", l->name,
                        "quant_algo is " STR_FMT ", but .input_scale is not there", STR_ARG(algo));
        else
            finding_add(v->found, "C-QUANT-AGREE", "format", l->name, "quant_algo is " STR_FMT ", but this is %s",
                        STR_ARG(algo), format_of(l));
    }
}

static const json *listed_layer(const json *layers, str module) {
    const json *x = json_get_str(layers, module);
    const ptrdiff_t at = x ? -1 : str_find(module, STR(".experts."));
    return at < 0 ? x : json_get_str(layers, (str){ module.p, (size_t)at + 8 });
}

static void check_mixed(check_view *v, const json *section, const char *file) {
    const json *layers = json_get(section, "quantized_layers");
    if (!json_is(layers, JSON_OBJECT)) {
        finding_add(v->found, "C-QUANT-LAYERS", file, str_of(file), "MIXED_PRECISION without a table quantized_layers");
        return;
    }
    for (int i = 0; i < v->n_linears; i++) {
        const linear *l = &v->linears[i];
        if (l->format == LIN_BROKEN) continue;
        const str algo = algo_of(listed_layer(layers, l->name));
        if (l->format == LIN_PLAIN ? algo.p != NULL : !algo_fits(algo, l))
            finding_add(v->found, "C-QUANT-LAYERS", file, l->name, "quantized_layers of %s %s" STR_FMT ", but it is %s",
                        file, algo.p ? "says " : "does not list it", STR_ARG(algo), format_of(l));
    }
}

static bool known_algo(str a) {
    return str_is(a, "NVFP4") || str_is(a, "W4A16_NVFP4") || str_is(a, "FP8") || str_is(a, "MIXED_PRECISION");
}

static void check_section(check_view *v, const json *section, const char *file, const char *list) {
    const str algo = algo_of(section);
    const json *group = json_get(section, "group_size");
    if (!known_algo(algo)) {
        finding_add(v->found, "C-QUANT-ALGO", file, str_of(file),
                    "quant_algo \"" STR_FMT "\" is none that is known here", STR_ARG(algo));
        return;
    }
    if (json_is(group, JSON_INT) && group->u.i != 16)
        finding_add(v->found, "C-QUANT-GROUP", file, str_of(file), "group_size %lld", (long long)group->u.i);
    const bool mixed = str_is(algo, "MIXED_PRECISION");
    mixed ? check_mixed(v, section, file) : check_uniform(v, algo);
    check_list(v, json_get(section, list), file, !mixed);
}

/* ---- KV cache ---- */

static str kv_declared(const check_view *v) {
    const json *a = json_get(v->hf, "kv_cache_quant_algo"), *s = json_get(v->quant, "kv_cache_scheme"),
               *bits = json_get(s, "num_bits");
    if (json_is(a, JSON_STRING)) return json_str(a);
    if (!json_is(s, JSON_OBJECT)) return (str){ 0 };
    return json_is(bits, JSON_INT) && bits->u.i == 8 ? STR("FP8") : STR("other than 8 bits");
}

static void kv_value(check_view *v, int slot, bool is_v, float s) {
    char name[80];
    if (slot == CONFIG_MAX_LAYERS)
        snprintf(name, sizeof name, "mtp.layers.0.self_attn.%s", is_v ? "v_proj.v_scale" : "k_proj.k_scale");
    else
        snprintf(name, sizeof name, "layers.%d.self_attn.%s", slot, is_v ? "v_proj.v_scale" : "k_proj.k_scale");
    if (s != s || s <= 0)
        finding_add(v->found,
                    s != s   ? "C-SCALE-NAN"
                    : s == 0 ? "C-SCALE-ZERO"
                             : "C-SCALE-NEGATIVE",
                    "kv", str_of(name), "%g", (double)s);
    else if (s >= 1.0f || s < 1e-4f)
        finding_add(v->found, "C-KV-RANGE", NULL, str_of(name), "%g looks like a placeholder", (double)s);
}

static void check_kv(check_view *v) {
    const str declared = kv_declared(v);
    int with = 0, attn = 0;
    if (declared.p && !str_is(declared, "FP8"))
        finding_add(v->found, "C-KV-FORMAT", NULL, STR("hf_quant_config.json"), "KV cache format " STR_FMT,
                    STR_ARG(declared));
    for (int i = 0; i < v->model.layers; i++)
        attn += v->model.layer[i] == LAYER_ATTN, with += v->kv[i].has_k || v->kv[i].has_v;
    for (int i = 0; i <= CONFIG_MAX_LAYERS; i++) {
        if (v->kv[i].has_k) kv_value(v, i, false, v->kv[i].k);
        if (v->kv[i].has_v) kv_value(v, i, true, v->kv[i].v);
        const bool wanted =
            i < v->model.layers ? with && v->model.layer[i] == LAYER_ATTN : v->kv[i].has_k || v->kv[i].has_v;
        if (!wanted || (v->kv[i].has_k && v->kv[i].has_v) || v->incomplete) continue;
        char name[64];
        snprintf(name, sizeof name, i == CONFIG_MAX_LAYERS ? "mtp.layers.0.self_attn" : "layers.%d.self_attn", i);
        finding_add(v->found, "C-KV-MISSING", NULL, str_of(name),
                    "%s is not there, though %d of %d layers have K and V scales",
                    v->kv[i].has_k   ? "v_scale"
                    : v->kv[i].has_v ? "k_scale"
                                     : "its pair of K and V scales",
                    with, attn);
    }
    if (with && !declared.p)
        finding_add(v->found, "C-KV-UNDECLARED", NULL, STR("hf_quant_config.json"),
                    "%d layers have K and V scales, but no config declares an FP8 cache", with);
    if (!with && declared.p && !v->incomplete)
        finding_add(v->found, "C-KV-CAST", NULL, STR("hf_quant_config.json"), "FP8 KV cache declared without scales");
}

/* ---- the whole ---- */

static bool kv_agree(const check_view *v) {
    const json *a = json_get(v->hf, "kv_cache_quant_algo"), *s = json_get(v->quant, "kv_cache_scheme");
    return json_is(a, JSON_STRING) == json_is(s, JSON_OBJECT);
}

static void check_agreement(check_view *v) {
    const str a = algo_of(v->quant), b = algo_of(v->hf);
    if (!v->quant || !v->hf) {
        finding_add(v->found, "C-QUANT-ONE", NULL, v->hf ? STR("config.json") : STR("hf_quant_config.json"),
                    "the other file declares the quantization, this one %s",
                    v->hf ? "has no quantization_config" : "does not");
        return;
    }
    if (!str_eq(a, b))
        finding_add(v->found, "C-QUANT-AGREE", NULL, STR("quant_algo"),
                    "config.json says \"" STR_FMT "\", hf_quant_config.json \"" STR_FMT "\"", STR_ARG(a), STR_ARG(b));
    if (!kv_agree(v))
        finding_add(v->found, "C-QUANT-AGREE", "kv", STR("kv_cache_quant_algo"),
                    "only one of config.json (kv_cache_scheme) and hf_quant_config.json declares a KV cache format");
    if (!same_list(json_get(v->quant, "ignore"), json_get(v->hf, "exclude_modules")))
        finding_add_as(v->found, SEV_WARNING, "C-QUANT-AGREE", "excludes", STR("exclude_modules"),
                       "\"ignore\" of config.json and exclude_modules of hf_quant_config.json are not the same list");
}

void view_declared(check_view *v) {
    int quantized = 0, broken = 0;
    for (int i = 0; i < v->n_linears; i++) {
        quantized += v->linears[i].format == LIN_NVFP4 || v->linears[i].format == LIN_FP8;
        broken += v->linears[i].format == LIN_BROKEN;
    }
    if (!v->has_model || !v->prefix) return;
    check_kv(v);
    if (!v->quant && !v->hf) {
        if (quantized)
            finding_add(v->found, "C-QUANT-UNDECLARED", NULL, STR("config.json"),
                        "%d matrices are quantized, and neither config.json nor hf_quant_config.json says so",
                        quantized);
        return;
    }
    if (!quantized && !broken && !v->incomplete) {
        finding_add(v->found, "C-QUANT-NOTHING", NULL, STR("config.json"),
                    "declares a quantization, but no matrix is quantized");
        return;
    }
    check_agreement(v);
    if (v->hf) check_section(v, v->hf, "hf_quant_config.json", "exclude_modules");
    if (v->quant && (!v->hf || !str_eq(algo_of(v->quant), algo_of(v->hf)) ||
                     !same_list(json_get(v->quant, "ignore"), json_get(v->hf, "exclude_modules"))))
        check_section(v, v->quant, "config.json", "ignore");
}
