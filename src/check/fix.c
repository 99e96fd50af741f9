#include "check/fix.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "ckpt/index.h"
#include "model/names.h"
#include "quant/plan.h"
#include "quant/pretty.h"

enum { COPY_BYTES = 1 << 20, NAME_MAX_BYTES = 512 };

typedef struct fixer {
    check_view *v;
    const char *source;
    char *partial;
    buf *done;
    err *e;
} fixer;

/* ---- files ---- */

static bool put(const fixer *f, const char *name, str content) {
    char *path = path_join(f->partial, name);
    const bool ok = file_write_atomic(path, content.p, content.n, f->e);
    free(path);
    return ok;
}

static bool copy_bytes(file_out *to, int from, const char *path, err *e) {
    uint8_t *piece = xmalloc(COPY_BYTES);
    ssize_t n;
    bool ok = true;
    while (ok && (n = read(from, piece, COPY_BYTES)) != 0) {
        if (n < 0 && errno == EINTR) continue;
        ok = n > 0 ? file_out_write(to, piece, (size_t)n, e)
                   : fail(e, ERR_INPUT, "E-FILE-READ", "%s: %s", path, strerror(errno));
    }
    free(piece);
    return ok;
}

/* A hard link to the file itself, where links lead to it (caches); a copy across file systems. */
static bool take_file(const fixer *f, const char *dir, const char *name) {
    char *from = path_join(dir, name), *to = path_join(f->partial, name);
    bool ok = linkat(AT_FDCWD, from, AT_FDCWD, to, AT_SYMLINK_FOLLOW) == 0;
    if (!ok) {
        const int fd = open(from, O_RDONLY | O_CLOEXEC);
        file_out out = { 0 };
        ok = fd >= 0 || fail(f->e, ERR_INPUT, "E-FILE-OPEN", "%s: %s", from, strerror(errno));
        ok = ok && file_out_open(&out, to, f->e) && copy_bytes(&out, fd, from, f->e) && file_out_commit(&out, f->e);
        file_out_abort(&out);
        if (fd >= 0) close(fd);
    }
    free(from);
    free(to);
    return ok;
}

static bool is_regular(const char *dir, const char *name) {
    struct stat s;
    char *path = path_join(dir, name);
    const bool yes = stat(path, &s) == 0 && S_ISREG(s.st_mode);
    free(path);
    return yes;
}

static bool is_shard(const check_view *v, const char *name) {
    for (int i = 0; i < v->n_shards; i++) {
        const char *slash = strrchr(v->shards[i].path, '/');
        if (strcmp(slash ? slash + 1 : v->shards[i].path, name) == 0) return true;
    }
    return false;
}

/* Everything but what is written anew; of the weights those that were read as the model's. */
static bool take_files(const fixer *f) {
    DIR *d = opendir(f->v->dir);
    bool ok = d || fail(f->e, ERR_INPUT, "E-FILE-OPEN", "%s: %s", f->v->dir, strerror(errno));
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *x; ok && (x = readdir(d));) {
        const str name = str_of(x->d_name);
        if (name.p[0] == '.' || str_is(name, "config.json") || str_is(name, "hf_quant_config.json") ||
            str_is(name, CKPT_INDEX) || !is_regular(f->v->dir, x->d_name))
            continue;
        if (str_ends(name, STR(".safetensors")) && !is_shard(f->v, x->d_name))
            buf_printf(f->done, "%s: left out, it is no part of the model\n", x->d_name);
        else
            ok = take_file(f, f->v->dir, x->d_name);
    }
    if (d) closedir(d);
    return ok;
}

static bool take_sidecars(const fixer *f) {
    static const char *const names[] = { "tokenizer.json",
                                         "tokenizer_config.json",
                                         "vocab.json",
                                         "merges.txt",
                                         "special_tokens_map.json",
                                         "added_tokens.json",
                                         "chat_template.jinja",
                                         "generation_config.json",
                                         "preprocessor_config.json",
                                         "processor_config.json",
                                         "video_preprocessor_config.json" };
    for (size_t i = 0; f->source && i < ARRAY_LEN(names); i++) {
        if (ckpt_entry_exists(f->v->dir, names[i]) || !is_regular(f->source, names[i])) continue;
        if (!take_file(f, f->source, names[i])) return false;
        buf_printf(f->done, "%s: taken from the source\n", names[i]);
    }
    return true;
}

/* ---- exclude lists ---- */

typedef struct list {
    str *v; /* [n], in the view's memory */
    int n, cap;
} list;

static void push(list *l, arena *mem, str s) {
    if (l->n == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 64;
        l->v = xrealloc(l->v, (size_t)l->cap * sizeof *l->v);
    }
    l->v[l->n] = arena_str(mem, s);
    CHECK(l->v[l->n++].p, "out of memory");
}

static void add(list *l, arena *mem, str s) {
    for (int i = 0; i < l->n; i++)
        if (str_eq(l->v[i], s)) return;
    push(l, mem, s);
}

/* Names of all quantized modules, in every spelling. */
static list quantized_names(check_view *v) {
    list l = { 0 };
    char name[NAME_MAX_BYTES];
    for (int i = 0; i < v->n_linears; i++)
        for (int k = 0; k < (v->linears[i].is_mtp ? 1 : 3) && v->linears[i].format != LIN_PLAIN; k++)
            push(&l, &v->mem, runtime_name(name, v->linears[i].name, k));
    return l;
}

static bool covers_any(const list *names, str pattern) {
    for (int i = 0; i < names->n; i++)
        if (exclude_matches(pattern, names->v[i])) return true;
    return false;
}

static bool covered(const list *l, str module) {
    for (int i = 0; i < l->n; i++)
        if (exclude_matches(l->v[i], module)) return true;
    return false;
}

static void add_module(list *l, check_view *v, const linear *m) {
    char name[NAME_MAX_BYTES];
    for (int k = 0; k < (m->is_mtp ? 1 : 3); k++) {
        const str s = runtime_name(name, m->name, k);
        if (!covered(l, s)) add(l, &v->mem, s);
    }
}

/* The old patterns that hurt nothing, then what is missing, in every namespace. uniform: what is not listed is quantized. */
static list make_list(check_view *v, const json *old, bool uniform) {
    list l = { 0 }, names = quantized_names(v);
    int quantized_head = 0, open_head = 0;
    for (uint32_t i = 0; json_is(old, JSON_ARRAY) && i < old->n; i++)
        if (old->u.items[i].type == JSON_STRING && !covers_any(&names, json_str(&old->u.items[i])))
            add(&l, &v->mem, json_str(&old->u.items[i]));
    for (int i = 0; i < v->n_linears; i++) {
        const linear *m = &v->linears[i];
        quantized_head += m->is_mtp && m->format != LIN_PLAIN;
        open_head += m->is_mtp && m->format == LIN_PLAIN && !covered(&l, m->name);
    }
    if (open_head && !quantized_head) add(&l, &v->mem, STR("mtp*")), add(&l, &v->mem, STR("mtp.layers.0*"));
    if (v->mtp_tensors && !covered(&l, STR("mtp.fc"))) add(&l, &v->mem, STR("mtp.fc*"));
    free(names.v);
    if (!uniform) return l;
    if (v->vision_tensors) add(&l, &v->mem, STR("model.visual*")), add(&l, &v->mem, STR("visual*"));
    for (int i = 0; i < v->n_linears; i++)
        if (v->linears[i].format == LIN_PLAIN) add_module(&l, v, &v->linears[i]);
    return l;
}

static bool same(const list *l, const json *old) {
    if (!json_is(old, JSON_ARRAY) || (uint32_t)l->n != old->n) return false;
    for (int i = 0; i < l->n; i++)
        if (old->u.items[i].type != JSON_STRING || !str_eq(json_str(&old->u.items[i]), l->v[i])) return false;
    return true;
}

/* The members of a quantization section with another list under `key`. */
static void put_section(fixer *f, pretty *o, const json *q, const char *key, const char *file) {
    const json *algo = json_get(q, "quant_algo"), *old = json_get(q, key);
    list l = make_list(f->v, old, !json_is(algo, JSON_STRING) || !str_is(json_str(algo), "MIXED_PRECISION"));
    bool listed = false;
    if (!same(&l, old)) buf_printf(f->done, "%s: %s fits the tensors\n", file, key);
    pretty_open(o, '{');
    for (uint32_t i = 0; i < q->n; i++) {
        const json_member *m = &q->u.members[i];
        if (str_is(m->key, key)) {
            pretty_strings(o, key, l.v, l.n);
            listed = true;
        } else {
            pretty_key(o, m->key);
            pretty_tree(o, &m->value);
        }
    }
    if (!listed) pretty_strings(o, key, l.v, l.n);
    pretty_close(o, '}');
    free(l.v);
}

/* ---- configs ---- */

static bool is_dtype_key(str k) { return str_is(k, "dtype") || str_is(k, "torch_dtype"); }

static bool put_config(fixer *f) {
    check_view *v = f->v;
    pretty o = { .first = true };
    const bool pin = findings_has(v->found, "C-CONFIG-DTYPE");
    if (!v->config) return true;
    pretty_open(&o, '{');
    for (uint32_t i = 0; i < v->config->n; i++) {
        const json_member *m = &v->config->u.members[i];
        if (pin && is_dtype_key(m->key)) continue;
        pretty_key(&o, m->key);
        if (str_is(m->key, "quantization_config") && v->quant)
            put_section(f, &o, v->quant, "ignore", "config.json");
        else
            pretty_tree(&o, &m->value);
    }
    if (pin) {
        pretty_text(&o, "dtype", STR("bfloat16"));
        pretty_text(&o, "torch_dtype", STR("bfloat16"));
        buf_puts(f->done, "config.json: dtype and torch_dtype are bfloat16\n");
    }
    pretty_close(&o, '}');
    buf_byte(&o.b, '\n');
    const bool ok = put(f, "config.json", buf_view(&o.b));
    buf_free(&o.b);
    return ok;
}

static bool put_hf(fixer *f) {
    check_view *v = f->v;
    pretty o = { .first = true };
    if (!v->hf_quant) return true;
    pretty_open(&o, '{');
    for (uint32_t i = 0; i < v->hf_quant->n; i++) {
        const json_member *m = &v->hf_quant->u.members[i];
        pretty_key(&o, m->key);
        if (str_is(m->key, "quantization") && v->hf)
            put_section(f, &o, v->hf, "exclude_modules", "hf_quant_config.json");
        else
            pretty_tree(&o, &m->value);
    }
    pretty_close(&o, '}');
    buf_byte(&o.b, '\n');
    const bool ok = put(f, "hf_quant_config.json", buf_view(&o.b));
    buf_free(&o.b);
    return ok;
}

/* ---- index ---- */

static bool index_is_wrong(const findings *f) {
    static const char *const rules[] = { "C-INDEX-BAD",  "C-INDEX-ABSENT",   "C-INDEX-PLACE",
                                         "C-INDEX-LOST", "C-INDEX-UNLISTED", "C-INDEX-TOTAL" };
    for (size_t i = 0; i < ARRAY_LEN(rules); i++)
        if (findings_has(f, rules[i])) return true;
    return false;
}

static bool put_index(fixer *f) {
    const check_view *v = f->v;
    buf text = { 0 };
    uint64_t elems = 0;
    if (!index_is_wrong(v->found) || v->incomplete)
        return !ckpt_entry_exists(v->dir, CKPT_INDEX) || take_file(f, v->dir, CKPT_INDEX);
    index_entry *x = xmalloc(((size_t)v->n + 1) * sizeof *x);
    for (int i = 0; i < v->n; i++) {
        const char *path = v->shards[v->all[i]->shard].path, *slash = strrchr(path, '/');
        x[i] = (index_entry){ v->all[i]->name, slash ? slash + 1 : path };
        elems += v->all[i]->elems;
    }
    plan_index_text(&text, NULL, elems, v->bytes, x, v->n);
    buf_printf(f->done, "%s: made from the %d files of weights\n", CKPT_INDEX, v->n_shards);
    const bool ok = put(f, CKPT_INDEX, buf_view(&text));
    buf_free(&text);
    free(x);
    return ok;
}

/* ---- the whole ---- */

static void remove_folder(const char *path) {
    DIR *d = opendir(path);
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *x; d && (x = readdir(d));)
        if (strcmp(x->d_name, ".") != 0 && strcmp(x->d_name, "..") != 0) {
            char *file = path_join(path, x->d_name);
            unlink(file);
            free(file);
        }
    if (d) closedir(d);
    rmdir(path);
}

bool view_fix(buf *done, check_view *v, const char *out, const char *source, err *e) {
    buf name = { 0 };
    size_t n = strlen(out);
    struct stat s;
    while (n > 1 && out[n - 1] == '/') n--;
    if (!n || lstat(out, &s) == 0)
        return fail(e, ERR_INPUT, "E-CHECK-OUT", "%s: %s (name a new folder)", out, n ? "it exists" : "no name");
    buf_printf(&name, "%.*s.partial", (int)n, out);
    fixer f = { .v = v, .source = source, .partial = name.p, .done = done, .e = e };
    if (mkdir(name.p, 0777) != 0) {
        fail(e, ERR_INPUT, "E-CHECK-OUT", "%s: %s (an unfinished repair? remove it)", name.p, strerror(errno));
        buf_free(&name);
        return false;
    }
    bool ok = take_files(&f) && take_sidecars(&f) && put_config(&f) && put_hf(&f) && put_index(&f);
    if (ok && rename(name.p, out) != 0) ok = fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: %s", out, strerror(errno));
    if (!ok) remove_folder(name.p);
    buf_free(&name);
    return ok;
}
