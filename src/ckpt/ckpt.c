#include "ckpt/ckpt.h"

#include <dirent.h>
#include <stdlib.h>

#include "ckpt/index.h"

enum { CONFIG_MAX_BYTES = 16 << 20, REF_MAX_BYTES = 256 };

struct ckpt_table {
    st_tensor **all; /* [tensor_count] shard by shard, in file order */
    strtab names;
};

static str table_name(const void *ctx, uint32_t i) { return ((const struct ckpt_table *)ctx)->all[i]->name; }

/* ---- the directory ---- */

static bool plain_component(str s) {
    if (s.n == 0 || s.n > 255 || s.p[0] == '.') return false;
    for (size_t i = 0; i < s.n; i++) {
        const char c = s.p[i];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '-' ||
              c == '_'))
            return false;
    }
    return true;
}

/* The revision that refs/main of a Hugging Face cache folder names; NULL when there is none. */
static char *read_ref(const char *dir) {
    char *refs = path_join(dir, "refs/main");
    buf b = { 0 };
    err ignored = { 0 };
    char *revision = NULL;
    if (file_read(&b, refs, REF_MAX_BYTES, &ignored)) {
        while (b.n && (b.p[b.n - 1] == '\n' || b.p[b.n - 1] == '\r' || b.p[b.n - 1] == ' ')) b.p[--b.n] = 0;
        if (plain_component(buf_view(&b))) revision = xstrdup(b.p);
    }
    buf_free(&b);
    free(refs);
    return revision;
}

/* The only folder below snapshots/; *count tells how many there are. */
static char *only_snapshot(const char *snapshots, int *count) {
    char *name = NULL;
    DIR *d = opendir(snapshots);
    *count = 0;
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *entry; d && (entry = readdir(d));) {
        if (entry->d_name[0] == '.') continue;
        ++*count;
        if (!name) name = xstrdup(entry->d_name);
    }
    if (d) closedir(d);
    return name;
}

/* models--org--name/snapshots/<revision>: refs/main decides, else there must be just one. */
static bool resolve_cache(char **out, const char *dir, err *e) {
    char *snapshots = path_join(dir, "snapshots"), *revision = read_ref(dir), *path = NULL;
    int count = 1;
    if (!revision) revision = only_snapshot(snapshots, &count);
    bool ok = revision && count == 1;
    if (!ok)
        fail(e, ERR_INPUT, "E-CKPT-DIR",
             "%s: a Hugging Face cache folder with %d snapshots and no refs/main (name one: %s/...)", dir, count,
             snapshots);
    else {
        path = path_join(snapshots, revision);
        ok = file_is_dir(path);
        if (!ok)
            fail(e, ERR_INPUT, "E-CKPT-DIR",
                 "%s: refs/main names snapshot %s, which is not there (download the model again)", dir, revision);
    }
    free(snapshots);
    free(revision);
    if (ok)
        *out = path;
    else
        free(path);
    return ok;
}

static bool resolve_dir(char **out, const char *dir, err *e) {
    const str name = str_of(dir);
    if (name.n == 0) return fail(e, ERR_INPUT, "E-CKPT-DIR", "'': no model directory (give its path)");
    if (!file_exists(dir)) return fail(e, ERR_INPUT, "E-CKPT-DIR", "%s: no such directory (check the path)", dir);
    if (!file_is_dir(dir)) {
        const bool gguf = str_ends(name, STR(".gguf"));
        return fail(e, ERR_INPUT, "E-CKPT-DIR", "%s: is a file (%s)", dir,
                    gguf ? "GGUF is not read here: give the directory of the safetensors model"
                         : "give the directory that holds config.json and the *.safetensors files");
    }
    if (!ckpt_entry_exists(dir, "config.json") && ckpt_entry_exists(dir, "snapshots"))
        return resolve_cache(out, dir, e);
    *out = xstrdup(dir);
    return true;
}

/* ---- configs ---- */

static bool read_config(const json **out, ckpt *c, const char *name, err *e) {
    char *path = path_join(c->dir, name);
    err je = { 0 };
    bool ok =
        json_parse_file(out, &c->mem, path, &(json_limits){ .max_bytes = CONFIG_MAX_BYTES, .max_depth = 64 }, &je);
    if (!ok)
        fail(e, je.kind, strncmp(je.id, "E-JSON-", 7) == 0 ? "E-CKPT-CONFIG" : je.id, "%s", je.msg);
    else if (!json_is(*out, JSON_OBJECT))
        ok = fail(e, ERR_INPUT, "E-CKPT-CONFIG", "%s: is not a JSON object (download it again)", path);
    free(path);
    return ok;
}

static bool read_optional(const json **out, ckpt *c, const char *name, err *e) {
    return !ckpt_entry_exists(c->dir, name) || read_config(out, c, name, e);
}

static bool read_configs(ckpt *c, err *e) {
    if (!ckpt_entry_exists(c->dir, "config.json")) {
        char *weights = ckpt_unlisted(c->dir, NULL, 0);
        fail(e, ERR_INPUT, weights ? "E-CKPT-CONFIG" : "E-CKPT-DIR", "%s: no config.json%s (%s)", c->dir,
             weights ? "" : " and no *.safetensors file: not a model directory",
             weights ? "copy the one that belongs to the weights" : "give the directory of a model");
        free(weights);
        return false;
    }
    return read_config(&c->config, c, "config.json", e) &&
           read_optional(&c->generation, c, "generation_config.json", e) &&
           read_optional(&c->hf_quant, c, "hf_quant_config.json", e);
}

/* ---- shards ---- */

static bool open_shards(ckpt *c, const char *const *files, int count, err *e) {
    c->shards = xcalloc((size_t)count, sizeof *c->shards);
    for (int i = 0; i < count; i++) {
        char *path = path_join(c->dir, files[i]);
        const bool ok = st_open(&c->shards[i], path, e);
        free(path);
        if (!ok) return false;
        st_file *f = &c->shards[c->shard_count++];
        if (f->count > INT32_MAX - c->tensor_count)
            return fail(e, ERR_INPUT, "E-CKPT-INDEX", "%s: more than %d tensors (is it the right folder?)", c->dir,
                        INT32_MAX);
        c->tensor_count += f->count;
        for (int k = 0; k < f->count; k++) {
            f->tensors[k].shard = i;
            c->tensor_bytes += f->tensors[k].bytes;
        }
    }
    return true;
}

static bool fill_table(ckpt *c, err *e) {
    struct ckpt_table *t = c->table = xcalloc(1, sizeof *t);
    t->all = arena_take(&c->mem, (size_t)c->tensor_count + 1, sizeof(st_tensor *));
    if (!t->all || !strtab_init(&t->names, (size_t)c->tensor_count))
        return fail(e, ERR_MACHINE, "E-CKPT-INDEX", "%s: no memory for %d tensor names (free some)", c->dir,
                    c->tensor_count);
    uint32_t n = 0;
    for (int s = 0; s < c->shard_count; s++)
        for (int k = 0; k < c->shards[s].count; k++, n++) {
            st_tensor *tensor = t->all[n] = &c->shards[s].tensors[k];
            const uint32_t first = strtab_put(&t->names, tensor->name, n, table_name, t);
            if (first != n)
                return fail(e, ERR_INPUT, "E-CKPT-DUP",
                            "%s: tensor %.160s is in %s and also in this file (remove the stale copy)",
                            c->shards[s].path, tensor->name.p, strrchr(c->shards[t->all[first]->shard].path, '/') + 1);
        }
    return true;
}

/* The index dies with its tree; its small metadata stays. */
static bool keep_metadata(ckpt *c, const ckpt_index *x, err *e) {
    if (!x->metadata) return true;
    buf text = { 0 };
    json_write(&text, x->metadata);
    const bool ok = json_parse(&c->index_metadata, &c->mem, buf_view(&text), CKPT_INDEX, NULL, e);
    buf_free(&text);
    return ok;
}

static bool open_indexed(ckpt *c, err *e) {
    char *path = path_join(c->dir, CKPT_INDEX);
    ckpt_index x;
    bool ok = index_read(&x, path, e);
    free(path);
    if (!ok) return false;
    ok = index_check_files(&x, c->dir, e) && open_shards(c, x.files, x.file_count, e) && fill_table(c, e) &&
         index_check_tensors(&x, c, e) && keep_metadata(c, &x, e);
    index_free(&x);
    return ok;
}

static bool open_single(ckpt *c, err *e) {
    static const char *const files[] = { CKPT_SINGLE };
    const bool present = ckpt_entry_exists(c->dir, CKPT_SINGLE);
    char *other = ckpt_unlisted(c->dir, files, 1);
    bool ok = false;
    if (!present && !other)
        fail(e, ERR_INPUT, "E-CKPT-DIR", "%s: holds no model: neither " CKPT_SINGLE " nor " CKPT_INDEX "%s", c->dir,
             ckpt_entry_exists(c->dir, "pytorch_model.bin") || ckpt_entry_exists(c->dir, "pytorch_model.bin.index.json")
                 ? " (convert pytorch_model.bin to safetensors)"
                 : " (download the weights)");
    else if (!present)
        fail(e, ERR_INPUT, "E-CKPT-INDEX",
             "%s: holds %s, but " CKPT_INDEX " is missing (download it, or rename a single file to " CKPT_SINGLE ")",
             c->dir, other);
    else if (other)
        fail(e, ERR_INPUT, "E-CKPT-SHARD-EXTRA",
             "%s: %s stands beside " CKPT_SINGLE ", and no " CKPT_INDEX " says what it is "
             "(move it away)",
             c->dir, other);
    else
        ok = open_shards(c, files, 1, e) && fill_table(c, e);
    free(other);
    return ok;
}

/* ---- the door ---- */

bool ckpt_open_configs(ckpt *out, const char *dir, err *e) {
    *out = (ckpt){ 0 };
    if (resolve_dir(&out->dir, dir, e) && read_configs(out, e)) return true;
    ckpt_close(out);
    return false;
}

bool ckpt_open(ckpt *out, const char *dir, err *e) {
    if (!ckpt_open_configs(out, dir, e)) return false;
    if (ckpt_entry_exists(out->dir, CKPT_INDEX) ? open_indexed(out, e) : open_single(out, e)) return true;
    ckpt_close(out);
    return false;
}

void ckpt_close(ckpt *c) {
    for (int i = 0; i < c->shard_count; i++) st_close(&c->shards[i]);
    free(c->shards);
    if (c->table) strtab_free(&c->table->names);
    free(c->table);
    arena_free(&c->mem);
    free(c->dir);
    *c = (ckpt){ 0 };
}

int ckpt_number(const ckpt *c, str name) {
    if (!c->table) return -1;
    const uint32_t i = strtab_get(&c->table->names, name, table_name, c->table);
    return i == STRTAB_NONE ? -1 : (int)i;
}

st_tensor *ckpt_find(const ckpt *c, str name) {
    const int i = ckpt_number(c, name);
    return i < 0 ? NULL : c->table->all[i];
}

st_tensor *ckpt_at(const ckpt *c, int i) {
    CHECK(i >= 0 && i < c->tensor_count, "tensor %d of %d", i, c->tensor_count);
    return c->table->all[i];
}

const char *ckpt_shard_path(const ckpt *c, const st_tensor *t) { return c->shards[t->shard].path; }
