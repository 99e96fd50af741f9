#include "check/view.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/file.h"
#include "ckpt/index.h"
#include "model/names.h"

const char *const lin_format_names[] = { "BF16", "NVFP4", "FP8", "unreadable" };

enum { CONFIG_MAX_BYTES = 16 << 20, MAX_FILES = 10000 };

/* ---- files ---- */

static const json *read_json(check_view *v, const char *name, const char *rule, bool needed) {
    const json *out = NULL;
    err e = { 0 };
    if (!ckpt_entry_exists(v->dir, name)) {
        if (needed) finding_add(v->found, rule, name, str_of(name), "there is no %s", name);
        return NULL;
    }
    char *path = path_join(v->dir, name);
    const json_limits limits = { .max_bytes = CONFIG_MAX_BYTES, .max_depth = 64 };
    if (!json_parse_file(&out, &v->mem, path, &limits, &e)) {
        finding_add(v->found, rule, name, str_of(name), "%s", e.msg);
        out = NULL;
    } else if (!json_is(out, JSON_OBJECT)) {
        finding_add(v->found, rule, name, str_of(name), "not a JSON object");
        out = NULL;
    }
    free(path);
    return out;
}

static void read_configs(check_view *v) {
    v->config = read_json(v, "config.json", "C-FILE-CONFIG", true);
    v->generation = read_json(v, "generation_config.json", "C-FILE-SIDE", false);
    v->hf_quant = read_json(v, "hf_quant_config.json", "C-FILE-SIDE", false);
    const json *q = json_get(v->config, "quantization_config"), *h = json_get(v->hf_quant, "quantization");
    v->quant = json_is(q, JSON_OBJECT) ? q : NULL;
    v->hf = json_is(h, JSON_OBJECT) ? h : NULL;
    if (!v->config) return;
    err e = { 0 };
    v->has_model = config_read(&v->model, v->config, v->generation, v->dir, &e);
    if (!v->has_model && v->generation) { /* whose fault is it? */
        err again = { 0 };
        v->bad_generation = v->has_model = config_read(&v->model, v->config, NULL, v->dir, &again);
    }
    if (!v->has_model)
        finding_add(v->found, "C-CONFIG-MODEL", NULL, STR("config.json"), "%s", e.msg);
    else if (v->bad_generation)
        finding_add(v->found, strstr(e.msg, "eos_token_id") ? "C-STOP-RANGE" : "C-FILE-SIDE", "generation_config.json",
                    STR("generation_config.json"), "%s", e.msg);
    const json *text = json_get(v->config, "text_config");
    if (json_is(json_get(v->config, "dtype"), JSON_STRING) ||
        json_is(json_get(v->config, "torch_dtype"), JSON_STRING) || json_is(json_get(text, "dtype"), JSON_STRING) ||
        json_is(json_get(text, "torch_dtype"), JSON_STRING))
        return;
    finding_add_as(v->found, v->quant || v->hf ? SEV_WARNING : SEV_NOTE, "C-CONFIG-DTYPE", NULL, STR("config.json"),
                   "neither dtype nor torch_dtype is set: some loaders then take float16 or float32");
}

/* Weights under the names of a model, or none of its business (saved maxima, logits)? */
static bool is_weights(const st_file *f) {
    static const char *const starts[] = { "model.", "language_model.", "mtp.", "lm_head.", "visual." };
    for (int i = 0; i < f->count; i++)
        for (size_t k = 0; k < ARRAY_LEN(starts); k++)
            if (str_starts(f->tensors[i].name, str_of(starts[k])) &&
                str_find(f->tensors[i].name, STR("_quantizer")) < 0)
                return true;
    return false;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int list_safetensors(char ***out, const char *dir) {
    DIR *d = opendir(dir);
    int n = 0;
    *out = xcalloc(MAX_FILES, sizeof **out);
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *f; d && n < MAX_FILES && (f = readdir(d));)
        if (f->d_name[0] != '.' && str_ends(str_of(f->d_name), STR(".safetensors"))) (*out)[n++] = xstrdup(f->d_name);
    if (d) closedir(d);
    qsort(*out, (size_t)n, sizeof **out, by_name);
    return n;
}

static bool indexed(const ckpt_index *x, const char *name) {
    for (int i = 0; i < x->file_count; i++)
        if (strcmp(x->files[i], name) == 0) return true;
    return false;
}

static void add_shard(check_view *v, const char *name, bool listed, bool has_index) {
    st_file *f = &v->shards[v->n_shards];
    err e = { 0 };
    char *path = path_join(v->dir, name);
    const bool part = listed || strcmp(name, CKPT_SINGLE) == 0 || str_find(str_of(name), STR("-of-")) >= 0;
    if (!st_open(f, path, &e)) {
        if (part) {
            finding_add(v->found, "C-FILE-SHARD", name, str_of(name), "%s: %s", e.id, e.msg);
            v->incomplete = true;
        }
    } else if (!listed && has_index) {
        if (part || is_weights(f))
            finding_add(v->found, "C-FILE-EXTRA", NULL, str_of(name), "%s names other files", CKPT_INDEX);
        st_close(f);
    } else if (!part && !is_weights(f)) {
        st_close(f);
    } else {
        v->n_shards++;
    }
    free(path);
}

static void check_missing(check_view *v, const ckpt_index *x) {
    for (int i = 0; i < x->file_count; i++) {
        char *path = path_join(v->dir, x->files[i]);
        if (!file_exists(path)) {
            v->incomplete = true;
            finding_add(v->found, "C-FILE-MISSING", NULL, str_of(x->files[i]),
                        "%s names this file, and it is not there", CKPT_INDEX);
        }
        free(path);
    }
}

static str name_of(const void *ctx, uint32_t i) { return ((const check_view *)ctx)->all[i]->name; }

static void fill_table(check_view *v) {
    int total = 0;
    for (int s = 0; s < v->n_shards; s++) total += v->shards[s].count;
    v->all = xcalloc((size_t)total + 1, sizeof *v->all);
    CHECK(strtab_init(&v->names, (size_t)total + 1), "out of memory");
    for (int s = 0; s < v->n_shards; s++)
        for (int i = 0; i < v->shards[s].count; i++) {
            st_tensor *t = &v->shards[s].tensors[i];
            t->shard = s;
            v->all[v->n] = t;
            if (strtab_put(&v->names, t->name, (uint32_t)v->n, name_of, v) != (uint32_t)v->n) {
                finding_add(v->found, "C-FILE-DUP", NULL, t->name, "in two files, one of them %s", v->shards[s].path);
                continue;
            }
            v->n++;
            v->bytes += t->bytes;
            v->mtp_tensors += name_is_mtp(t->name);
            v->vision_tensors += name_is_vision(t->name);
        }
    v->used = xcalloc((size_t)v->n + 1, 1);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void check_places(check_view *v, const ckpt_index *x) {
    uint8_t *listed = xcalloc((size_t)v->n + 1, 1);
    for (uint32_t i = 0; i < x->map->n; i++) {
        const str name = x->map->u.members[i].key;
        const char *file = x->files[x->file_of[i]];
        const int at = view_number(v, name);
        if (at >= 0) {
            listed[at] = 1;
            const char *in = base_name(v->shards[v->all[at]->shard].path);
            if (strcmp(in, file) != 0)
                finding_add(v->found, "C-INDEX-PLACE", NULL, name, "the index puts it in %s, but it is in %s", file,
                            in);
        } else if (!v->incomplete) {
            finding_add(v->found, "C-INDEX-LOST", NULL, name, "the index puts it in %s, but no file holds it", file);
        }
    }
    for (int i = 0; i < v->n; i++)
        if (!listed[i])
            finding_add(v->found, "C-INDEX-UNLISTED", NULL, v->all[i]->name, "in %s, but not in the index",
                        base_name(v->shards[v->all[i]->shard].path));
    const json *total = json_get(x->metadata, "total_size");
    if (!v->incomplete && total && (total->type != JSON_INT || (uint64_t)total->u.i != v->bytes))
        finding_add(v->found, "C-INDEX-TOTAL", NULL, STR(CKPT_INDEX),
                    "total_size is not the %llu bytes that the tensors have", (unsigned long long)v->bytes);
    free(listed);
}

static void read_shards(check_view *v) {
    err e = { 0 };
    ckpt_index x = { 0 };
    char **names, *path = path_join(v->dir, CKPT_INDEX);
    bool has_index = ckpt_entry_exists(v->dir, CKPT_INDEX);
    if (has_index && !index_read(&x, path, &e)) {
        finding_add(v->found, "C-INDEX-BAD", NULL, STR(CKPT_INDEX), "%s", e.msg);
        has_index = false;
    } else if (has_index) {
        check_missing(v, &x);
    }
    const int n = list_safetensors(&names, v->dir);
    v->shards = xcalloc((size_t)n + 1, sizeof *v->shards);
    for (int i = 0; i < n; i++) {
        add_shard(v, names[i], has_index && indexed(&x, names[i]), has_index);
        free(names[i]);
    }
    if (!has_index && v->n_shards > 1 && !findings_has(v->found, "C-INDEX-BAD"))
        finding_add(v->found, "C-INDEX-ABSENT", NULL, STR(CKPT_INDEX), "%d files of weights and no index", v->n_shards);
    else if (!has_index && v->n_shards == 1 && strcmp(base_name(v->shards[0].path), CKPT_SINGLE) != 0 && !v->incomplete)
        finding_add(v->found, "C-INDEX-ABSENT", NULL, STR(CKPT_INDEX),
                    "the weights are in %s, which loaders do not look for", base_name(v->shards[0].path));
    if (!v->n_shards && !v->incomplete)
        finding_add(v->found, "C-FILE-NONE", NULL, STR("*.safetensors"), "no weights in this folder");
    fill_table(v);
    if (has_index) check_places(v, &x);
    index_free(&x);
    free(names);
    free(path);
}

static void check_sidecars(check_view *v) {
    const json *tc = NULL;
    if (!ckpt_entry_exists(v->dir, "tokenizer.json"))
        finding_add(v->found, "C-SIDE-TOKENIZER", NULL, STR("tokenizer.json"), "not there: only token ids can be run");
    if (ckpt_entry_exists(v->dir, "tokenizer_config.json"))
        tc = read_json(v, "tokenizer_config.json", "C-FILE-SIDE", false);
    if (!ckpt_entry_exists(v->dir, "chat_template.jinja") && !json_get(tc, "chat_template"))
        finding_add(v->found, "C-SIDE-TEMPLATE", NULL, STR("chat_template.jinja"),
                    "no chat template, neither here nor in tokenizer_config.json");
    if (!ckpt_entry_exists(v->dir, "generation_config.json"))
        finding_add(v->found, "C-SIDE-GENERATION", NULL, STR("generation_config.json"),
                    "not there: stop ids and sampling defaults come from config.json, or from nowhere");
    if (v->vision_tensors && !ckpt_entry_exists(v->dir, "preprocessor_config.json"))
        finding_add(v->found, "C-SIDE-VISION", NULL, STR("preprocessor_config.json"),
                    "not there, though the vision tower is: engines that take images need it");
}

/* ---- the door ---- */

bool view_open(check_view *v, const char *dir, findings *found, err *e) {
    *v = (check_view){ .found = found };
    ckpt c;
    err ignored = { 0 };
    if (!file_exists(dir) || !file_is_dir(dir))
        return fail(e, ERR_INPUT, "E-CKPT-DIR", "%s: no such directory (check the path)", dir);
    if (ckpt_open_configs(&c, dir, &ignored)) { /* resolves the folders of a Hugging Face cache */
        v->dir = xstrdup(c.dir);
        ckpt_close(&c);
    } else {
        v->dir = xstrdup(dir);
    }
    read_configs(v);
    read_shards(v);
    check_sidecars(v);
    return true;
}

void view_close(check_view *v) {
    for (int i = 0; i < v->n_shards; i++) st_close(&v->shards[i]);
    free(v->shards);
    free(v->all);
    free(v->used);
    free(v->linears);
    free(v->dir);
    strtab_free(&v->names);
    arena_free(&v->mem);
    *v = (check_view){ 0 };
}

int view_number(const check_view *v, str name) {
    const uint32_t i = strtab_get(&v->names, name, name_of, v);
    return i == STRTAB_NONE ? -1 : (int)i;
}

st_tensor *view_find(const check_view *v, str name) {
    const int i = view_number(v, name);
    return i < 0 ? NULL : v->all[i];
}
