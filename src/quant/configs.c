#include "quant/configs.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/log.h"

/* ---- what is quantized ---- */

const char *configs_algo(qformat f) { return f == QF_NVFP4 ? "NVFP4" : f == QF_NVFP4_W ? "W4A16_NVFP4" : "FP8"; }

typedef struct summary {
    bool used[4]; /* by qformat */
    int kinds;
    qformat only;
    const str *excludes;
    int n_excludes;
} summary;

static summary summarize(const plan *p, arena *mem) {
    summary s = { 0 };
    for (int i = 0; i < p->n_modules; i++) {
        const qformat f = p->modules[i].format;
        if (f == QF_KEEP || p->modules[i].is_mtp || s.used[f]) continue;
        s.used[f] = true;
        s.kinds++;
        s.only = f;
    }
    s.excludes = configs_excludes(p, mem, false, &s.n_excludes);
    return s;
}

str configs_listed_name(const qmodule *m) {
    const ptrdiff_t at = m->family == QM_EXPERTS ? str_find(m->name, STR(".experts.")) : -1;
    return at < 0 ? m->name : (str){ m->name.p, (size_t)at + 8 };
}

void configs_layer_entries(pretty *o, const plan *p) {
    str last = { 0 };
    for (int i = 0; i < p->n_modules; i++) {
        const qmodule *m = &p->modules[i];
        const str name = configs_listed_name(m);
        if (m->format == QF_KEEP || str_eq(name, last)) continue;
        last = name;
        pretty_key(o, name);
        pretty_open(o, '{');
        pretty_text(o, "quant_algo", str_of(configs_algo(m->format)));
        if (m->format != QF_FP8) pretty_raw(o, "group_size", "16");
        pretty_close(o, '}');
    }
}

static void quantized_layers(pretty *o, const plan *p) {
    pretty_key(o, STR("quantized_layers"));
    pretty_open(o, '{');
    configs_layer_entries(o, p);
    pretty_close(o, '}');
}

static void number_format(pretty *o, const char *k, qformat f) {
    pretty_key(o, str_of(k));
    pretty_open(o, '{');
    pretty_raw(o, "dynamic", "false");
    pretty_raw(o, "num_bits", f == QF_FP8 ? "8" : "4");
    pretty_text(o, "type", STR("float"));
    if (f != QF_FP8) pretty_raw(o, "group_size", "16");
    pretty_close(o, '}');
}

static int by_text(const void *a, const void *b) { return str_cmp(*(const str *)a, *(const str *)b); }

static void targets(pretty *o, const plan *p, qformat f) {
    str *v = xmalloc((size_t)p->n_modules * sizeof *v);
    int n = 0;
    for (int i = 0; i < p->n_modules; i++) {
        const str name = configs_listed_name(&p->modules[i]);
        if (p->modules[i].format == f && (n == 0 || !str_eq(v[n - 1], name))) v[n++] = name;
    }
    qsort(v, (size_t)n, sizeof *v, by_text);
    pretty_strings(o, "targets", v, n);
    free(v);
}

static void config_groups(pretty *o, const plan *p, const summary *s) {
    static const str linear = { "Linear", 6 };
    bool done[4] = { false };
    int g = 0;
    pretty_key(o, STR("config_groups"));
    pretty_open(o, '{');
    for (int i = 0; i < p->n_modules; i++) { /* in order of first appearance */
        const qformat f = p->modules[i].format;
        char name[24];
        if (f == QF_KEEP || done[f] || (p->modules[i].is_mtp && !s->used[f])) continue;
        done[f] = true;
        snprintf(name, sizeof name, "group_%d", g++);
        pretty_key(o, str_of(name));
        pretty_open(o, '{');
        if (f != QF_NVFP4_W) number_format(o, "input_activations", f);
        number_format(o, "weights", f);
        if (s->kinds == 1)
            pretty_strings(o, "targets", &linear, 1);
        else
            targets(o, p, f);
        pretty_close(o, '}');
    }
    pretty_close(o, '}');
}

static void producer(pretty *o) {
    pretty_key(o, STR("producer")); /* the tag by which loaders know the layout; who wrote it stands under "nibble" */
    pretty_open(o, '{');
    pretty_text(o, "name", STR("modelopt"));
    pretty_text(o, "version", STR("0.47.0"));
    pretty_close(o, '}');
}

static void quantization_config(pretty *o, const plan *p, const summary *s) {
    pretty_key(o, STR("quantization_config"));
    pretty_open(o, '{');
    config_groups(o, p, s);
    if (s->kinds > 1) quantized_layers(o, p);
    pretty_strings(o, "ignore", s->excludes, s->n_excludes);
    pretty_text(o, "quant_algo", str_of(s->kinds > 1 ? "MIXED_PRECISION" : configs_algo(s->only)));
    if (p->recipe.kv != KV_NONE) {
        pretty_key(o, STR("kv_cache_scheme"));
        pretty_open(o, '{');
        pretty_raw(o, "dynamic", "false");
        pretty_raw(o, "num_bits", "8");
        pretty_text(o, "type", STR("float"));
        pretty_close(o, '}');
    }
    producer(o);
    pretty_text(o, "quant_method", STR("modelopt"));
    pretty_close(o, '}');
}

/* ---- files ---- */

static bool is_dtype_key(str k) { return str_is(k, "dtype") || str_is(k, "torch_dtype"); }

/* The source's config with the dtype pinned (a missing one makes loaders take float32 or float16), then our section. */
static void config_text(pretty *o, const plan *p, const summary *s) {
    const json *c = p->src->config;
    pretty_open(o, '{');
    for (uint32_t i = 0; i < c->n; i++) {
        const json_member *m = &c->u.members[i];
        if (is_dtype_key(m->key) || str_is(m->key, "quantization_config")) continue;
        pretty_key(o, m->key);
        if (!str_is(m->key, "text_config") || m->value.type != JSON_OBJECT) {
            pretty_tree(o, &m->value);
            continue;
        }
        pretty_open(o, '{');
        for (uint32_t k = 0; k < m->value.n; k++)
            if (!is_dtype_key(m->value.u.members[k].key))
                pretty_key(o, m->value.u.members[k].key), pretty_tree(o, &m->value.u.members[k].value);
        pretty_text(o, "dtype", STR("bfloat16"));
        pretty_close(o, '}');
    }
    pretty_text(o, "dtype", STR("bfloat16"));
    pretty_text(o, "torch_dtype", STR("bfloat16"));
    quantization_config(o, p, s);
    pretty_close(o, '}');
    buf_byte(&o->b, '\n');
}

static void hf_quant_text(pretty *o, const plan *p, const summary *s, const provenance *from) {
    static const char *const kv[] = { "calibrated", "cast (scale 1)", "none" }, *const mtp[] = { "nvfp4", "bf16",
                                                                                                 "none" };
    pretty_open(o, '{');
    producer(o);
    pretty_key(o, STR("quantization"));
    pretty_open(o, '{');
    pretty_text(o, "quant_algo", str_of(s->kinds > 1 ? "MIXED_PRECISION" : configs_algo(s->only)));
    if (p->recipe.kv == KV_NONE)
        pretty_raw(o, "kv_cache_quant_algo", "null");
    else
        pretty_text(o, "kv_cache_quant_algo", STR("FP8"));
    if (s->kinds > 1)
        quantized_layers(o, p);
    else if (s->only != QF_FP8)
        pretty_raw(o, "group_size", "16");
    pretty_strings(o, "exclude_modules", s->excludes, s->n_excludes);
    pretty_close(o, '}');
    pretty_key(o, STR("nibble"));
    pretty_open(o, '{');
    pretty_text(o, "recipe", str_of(recipe_names[p->recipe.preset]));
    pretty_text(o, "algorithm", str_of(from->algorithm));
    pretty_text(o, "arithmetic", str_of(from->arith));
    pretty_text(o, "calibration", str_of(from->calibration));
    pretty_text(o, "kv_scales", str_of(kv[p->recipe.kv]));
    pretty_text(o, "mtp", str_of(p->has_mtp ? mtp[p->recipe.mtp] : "none"));
    pretty_text(o, "mtp_scales", str_of(from->mtp_scales));
    pretty_close(o, '}');
    pretty_close(o, '}');
    buf_byte(&o->b, '\n');
}

static bool put(const char *dir, const char *name, str content, err *e) {
    char *path = path_join(dir, name);
    const bool ok = file_write_atomic(path, content.p, content.n, e);
    free(path);
    return ok;
}

/* Weights, their index and the configs are made anew; everything else of the source's folder goes along. */
static bool is_sidecar(const char *name) {
    const str s = str_of(name);
    if (name[0] == '.' || str_ends(s, STR(".safetensors")) || str_ends(s, STR(".safetensors.index.json")) ||
        str_ends(s, STR(".bin")) || str_ends(s, STR(".gguf")) || str_ends(s, STR(".pt")) || str_ends(s, STR(".pth")))
        return false;
    return strcmp(name, "config.json") != 0 && strcmp(name, "hf_quant_config.json") != 0;
}

enum { SIDECAR_MAX = 256 << 20 };

/* What is not worth failing for at the end of the work: FIFOs, links to nothing, archives left in the folder. */
static bool is_copyable(const char *path) {
    struct stat s;
    if (stat(path, &s) == 0 && S_ISDIR(s.st_mode)) return false;
    if (stat(path, &s) == 0 && S_ISREG(s.st_mode) && s.st_size <= SIDECAR_MAX) return true;
    log_say("W-QUANT-SIDECAR", "%s: not copied (no regular file, or over %d MB)", path, SIDECAR_MAX >> 20);
    return false;
}

static bool sidecars(const char *dir, const char *src, err *e) {
    DIR *d = opendir(src);
    if (!d) return fail(e, ERR_INPUT, "E-FILE-OPEN", "%s: %s", src, strerror(errno));
    bool ok = true, card = false, licence = false;
    for (struct dirent *f; ok && (f = readdir(d));) {
        if (!is_sidecar(f->d_name)) continue;
        char *path = path_join(src, f->d_name);
        buf content = { 0 };
        if (is_copyable(path))
            ok = file_read(&content, path, SIDECAR_MAX, e) && put(dir, f->d_name, buf_view(&content), e);
        card |= strcasecmp(f->d_name, "README.md") == 0;
        licence |= strncasecmp(f->d_name, "LICEN", 5) == 0;
        buf_free(&content);
        free(path);
    }
    closedir(d);
    if (ok && !card)
        log_say("W-QUANT-CARD", "%s: no README.md: the export carries no model card (add one before publishing)", src);
    if (ok && !licence)
        log_say("W-QUANT-LICENCE", "%s: no LICENSE file: the export carries none (add the base model's)", src);
    return ok;
}

bool configs_write(const char *dir, plan *p, const provenance *from, err *e) {
    arena mem = { 0 };
    const summary s = summarize(p, &mem);
    pretty config = { .first = true }, quant = { .first = true };
    config_text(&config, p, &s);
    hf_quant_text(&quant, p, &s, from);
    size_t n = 0;
    const char *index = plan_index_json(p, &n);
    const bool ok = sidecars(dir, p->src->dir, e) && put(dir, "config.json", buf_view(&config.b), e) &&
                    put(dir, "hf_quant_config.json", buf_view(&quant.b), e) &&
                    (!index || put(dir, "model.safetensors.index.json", (str){ index, n }, e));
    buf_free(&config.b);
    buf_free(&quant.b);
    arena_free(&mem);
    return ok;
}
