#include "quant/configs.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/log.h"

/* ---- JSON with indentation, as Python's json.dumps(indent=4) lays it out ---- */

typedef struct out {
    buf b;
    int depth;
    bool first;
} out;

static void line(out *o) {
    if (!o->first) buf_byte(&o->b, ',');
    buf_byte(&o->b, '\n');
    for (int i = 0; i < o->depth * 4; i++) buf_byte(&o->b, ' ');
    o->first = false;
}

static void key(out *o, str k) {
    line(o);
    json_write_str(&o->b, k);
    buf_puts(&o->b, ": ");
}

static void open_(out *o, char c) {
    buf_byte(&o->b, c);
    o->depth++;
    o->first = true;
}

static void close_(out *o, char c) {
    const bool empty = o->first;
    o->depth--;
    if (!empty) {
        o->first = true;
        line(o);
    }
    o->first = false;
    buf_byte(&o->b, c);
}

static void tree(out *o, const json *v) {
    if (v->type == JSON_OBJECT) {
        open_(o, '{');
        for (uint32_t i = 0; i < v->n; i++) key(o, v->u.members[i].key), tree(o, &v->u.members[i].value);
        close_(o, '}');
    } else if (v->type == JSON_ARRAY) {
        open_(o, '[');
        for (uint32_t i = 0; i < v->n; i++) line(o), tree(o, &v->u.items[i]);
        close_(o, ']');
    } else {
        json_write(&o->b, v);
    }
}

static void text(out *o, const char *k, str v) {
    key(o, str_of(k));
    json_write_str(&o->b, v);
}

static void raw(out *o, const char *k, const char *v) {
    key(o, str_of(k));
    buf_puts(&o->b, v);
}

static void strings(out *o, const char *k, const str *v, int n) {
    key(o, str_of(k));
    open_(o, '[');
    for (int i = 0; i < n; i++) line(o), json_write_str(&o->b, v[i]);
    close_(o, ']');
}

/* ---- what is quantized ---- */

static const char *algo(qformat f) { return f == QF_NVFP4 ? "NVFP4" : f == QF_NVFP4_W ? "W4A16_NVFP4" : "FP8"; }

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

/* Name under which a module is listed: all experts of a layer are one entry. */
static str listed_name(const qmodule *m) {
    const ptrdiff_t at = m->family == QM_EXPERTS ? str_find(m->name, STR(".experts.")) : -1;
    return at < 0 ? m->name : (str){ m->name.p, (size_t)at + 8 };
}

static void quantized_layers(out *o, const plan *p) {
    str last = { 0 };
    key(o, STR("quantized_layers"));
    open_(o, '{');
    for (int i = 0; i < p->n_modules; i++) {
        const qmodule *m = &p->modules[i];
        const str name = listed_name(m);
        if (m->format == QF_KEEP || str_eq(name, last)) continue;
        last = name;
        key(o, name);
        open_(o, '{');
        text(o, "quant_algo", str_of(algo(m->format)));
        if (m->format != QF_FP8) raw(o, "group_size", "16");
        close_(o, '}');
    }
    close_(o, '}');
}

static void number_format(out *o, const char *k, qformat f) {
    key(o, str_of(k));
    open_(o, '{');
    raw(o, "dynamic", "false");
    raw(o, "num_bits", f == QF_FP8 ? "8" : "4");
    text(o, "type", STR("float"));
    if (f != QF_FP8) raw(o, "group_size", "16");
    close_(o, '}');
}

static int by_text(const void *a, const void *b) { return str_cmp(*(const str *)a, *(const str *)b); }

static void targets(out *o, const plan *p, qformat f) {
    str *v = xmalloc((size_t)p->n_modules * sizeof *v);
    int n = 0;
    for (int i = 0; i < p->n_modules; i++) {
        const str name = listed_name(&p->modules[i]);
        if (p->modules[i].format == f && (n == 0 || !str_eq(v[n - 1], name))) v[n++] = name;
    }
    qsort(v, (size_t)n, sizeof *v, by_text);
    strings(o, "targets", v, n);
    free(v);
}

static void config_groups(out *o, const plan *p, const summary *s) {
    static const str linear = { "Linear", 6 };
    bool done[4] = { false };
    int g = 0;
    key(o, STR("config_groups"));
    open_(o, '{');
    for (int i = 0; i < p->n_modules; i++) { /* in order of first appearance */
        const qformat f = p->modules[i].format;
        char name[24];
        if (f == QF_KEEP || done[f] || (p->modules[i].is_mtp && !s->used[f])) continue;
        done[f] = true;
        snprintf(name, sizeof name, "group_%d", g++);
        key(o, str_of(name));
        open_(o, '{');
        if (f != QF_NVFP4_W) number_format(o, "input_activations", f);
        number_format(o, "weights", f);
        if (s->kinds == 1)
            strings(o, "targets", &linear, 1);
        else
            targets(o, p, f);
        close_(o, '}');
    }
    close_(o, '}');
}

static void producer(out *o) {
    key(o, STR("producer")); /* the tag by which loaders know the layout; who wrote it stands under "nibble" */
    open_(o, '{');
    text(o, "name", STR("modelopt"));
    text(o, "version", STR("0.47.0"));
    close_(o, '}');
}

static void quantization_config(out *o, const plan *p, const summary *s) {
    key(o, STR("quantization_config"));
    open_(o, '{');
    config_groups(o, p, s);
    if (s->kinds > 1) quantized_layers(o, p);
    strings(o, "ignore", s->excludes, s->n_excludes);
    text(o, "quant_algo", str_of(s->kinds > 1 ? "MIXED_PRECISION" : algo(s->only)));
    if (p->recipe.kv != KV_NONE) {
        key(o, STR("kv_cache_scheme"));
        open_(o, '{');
        raw(o, "dynamic", "false");
        raw(o, "num_bits", "8");
        text(o, "type", STR("float"));
        close_(o, '}');
    }
    producer(o);
    text(o, "quant_method", STR("modelopt"));
    close_(o, '}');
}

/* ---- files ---- */

static bool is_dtype_key(str k) { return str_is(k, "dtype") || str_is(k, "torch_dtype"); }

/* The source's config with the dtype pinned (a missing one makes loaders take float32 or float16), then our section. */
static void config_text(out *o, const plan *p, const summary *s) {
    const json *c = p->src->config;
    open_(o, '{');
    for (uint32_t i = 0; i < c->n; i++) {
        const json_member *m = &c->u.members[i];
        if (is_dtype_key(m->key) || str_is(m->key, "quantization_config")) continue;
        key(o, m->key);
        if (!str_is(m->key, "text_config") || m->value.type != JSON_OBJECT) {
            tree(o, &m->value);
            continue;
        }
        open_(o, '{');
        for (uint32_t k = 0; k < m->value.n; k++)
            if (!is_dtype_key(m->value.u.members[k].key))
                key(o, m->value.u.members[k].key), tree(o, &m->value.u.members[k].value);
        text(o, "dtype", STR("bfloat16"));
        close_(o, '}');
    }
    text(o, "dtype", STR("bfloat16"));
    text(o, "torch_dtype", STR("bfloat16"));
    quantization_config(o, p, s);
    close_(o, '}');
    buf_byte(&o->b, '\n');
}

static void hf_quant_text(out *o, const plan *p, const summary *s, const provenance *from) {
    static const char *const kv[] = { "calibrated", "cast (scale 1)", "none" }, *const mtp[] = { "nvfp4", "bf16",
                                                                                                 "none" };
    open_(o, '{');
    producer(o);
    key(o, STR("quantization"));
    open_(o, '{');
    text(o, "quant_algo", str_of(s->kinds > 1 ? "MIXED_PRECISION" : algo(s->only)));
    if (p->recipe.kv == KV_NONE)
        raw(o, "kv_cache_quant_algo", "null");
    else
        text(o, "kv_cache_quant_algo", STR("FP8"));
    if (s->kinds > 1)
        quantized_layers(o, p);
    else if (s->only != QF_FP8)
        raw(o, "group_size", "16");
    strings(o, "exclude_modules", s->excludes, s->n_excludes);
    close_(o, '}');
    key(o, STR("nibble"));
    open_(o, '{');
    text(o, "recipe", str_of(recipe_names[p->recipe.preset]));
    text(o, "algorithm", str_of(from->algorithm));
    text(o, "arithmetic", str_of(from->arith));
    text(o, "calibration", str_of(from->calibration));
    text(o, "kv_scales", str_of(kv[p->recipe.kv]));
    text(o, "mtp", str_of(p->has_mtp ? mtp[p->recipe.mtp] : "none"));
    text(o, "mtp_scales", str_of(from->mtp_scales));
    close_(o, '}');
    close_(o, '}');
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
    out config = { .first = true }, quant = { .first = true };
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
