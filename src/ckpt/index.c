#include "ckpt/index.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/log.h"

enum { INDEX_MAX_BYTES = 256 << 20, INDEX_MAX_FILES = 10000, FILE_NAME_MAX = 255 };

#define NAME_ARG(s) ((int)((s).n > 160 ? 160 : (s).n)), (s).p

/* ---- reading ---- */

/* A plain name: nothing that could lead out of the directory. */
static bool plain_name(str s) {
    return s.n > 0 && s.n <= FILE_NAME_MAX && s.p[0] != '.' && !memchr(s.p, '/', s.n) && !memchr(s.p, 0, s.n) &&
           str_ends(s, STR(".safetensors"));
}

typedef struct ranked {
    const char *name;
    uint32_t number; /* order of first appearance */
} ranked;

static str ranked_name(const void *ctx, uint32_t i) { return str_of(((const ranked *)ctx)[i].name); }
static int ranked_order(const void *a, const void *b) {
    return strcmp(((const ranked *)a)->name, ((const ranked *)b)->name);
}

/* Fills x->file_of with numbers in order of appearance and `found` with the names. */
static bool collect_files(ckpt_index *x, ranked *found, strtab *seen, const char *path, err *e) {
    const char *last = NULL;
    uint32_t number = 0;
    for (uint32_t i = 0; i < x->map->n; i++) {
        const json_member *m = &x->map->u.members[i];
        if (!json_is(&m->value, JSON_STRING))
            return fail(e, ERR_INPUT, "E-CKPT-INDEX", "%s: tensor %.*s: its file is not a string (rebuild the index)",
                        path, NAME_ARG(m->key));
        const str name = json_str(&m->value);
        if (name.p != last) { /* equal neighbours share their bytes: the tree interns short strings */
            if (!plain_name(name))
                return fail(e, ERR_INPUT, "E-CKPT-INDEX",
                            "%s: tensor %.*s: '%.*s' is no plain *.safetensors file name (rebuild the index)", path,
                            NAME_ARG(m->key), NAME_ARG(name));
            if (x->file_count == INDEX_MAX_FILES)
                return fail(e, ERR_INPUT, "E-CKPT-INDEX", "%s: names more than %d files (use larger shards)", path,
                            INDEX_MAX_FILES);
            found[x->file_count] = (ranked){ name.p, (uint32_t)x->file_count };
            number = strtab_put(seen, name, (uint32_t)x->file_count, ranked_name, found);
            x->file_count += number == (uint32_t)x->file_count;
            last = name.p;
        }
        x->file_of[i] = number;
    }
    return true;
}

static bool rank_files(ckpt_index *x, ranked *found, uint32_t *rank, err *e, const char *path) {
    qsort(found, (size_t)x->file_count, sizeof *found, ranked_order);
    x->files = arena_take(&x->mem, (size_t)x->file_count, sizeof *x->files);
    if (!x->files) return fail(e, ERR_MACHINE, "E-CKPT-INDEX", "%s: no memory for its file list (free some)", path);
    for (int i = 0; i < x->file_count; i++) {
        x->files[i] = found[i].name;
        rank[found[i].number] = (uint32_t)i;
    }
    for (uint32_t i = 0; i < x->map->n; i++) x->file_of[i] = rank[x->file_of[i]];
    return true;
}

static bool list_files(ckpt_index *x, const char *path, err *e) {
    strtab seen = { 0 };
    ranked *found = xmalloc((INDEX_MAX_FILES + 1) * sizeof *found);
    uint32_t *rank = xmalloc(INDEX_MAX_FILES * sizeof *rank);
    x->file_of = arena_take(&x->mem, x->map->n, sizeof *x->file_of);
    bool ok = x->file_of && strtab_init(&seen, INDEX_MAX_FILES);
    if (!ok) fail(e, ERR_MACHINE, "E-CKPT-INDEX", "%s: no memory for its table (free some)", path);
    ok = ok && collect_files(x, found, &seen, path, e) && rank_files(x, found, rank, e, path);
    strtab_free(&seen);
    free(rank);
    free(found);
    return ok;
}

static bool find_map(ckpt_index *x, const json *root, const char *path, err *e) {
    x->map = json_get(root, "weight_map");
    x->metadata = json_get(root, "metadata");
    if (!json_is(x->map, JSON_OBJECT) || x->map->n == 0)
        return fail(e, ERR_INPUT, "E-CKPT-INDEX", "%s: no weight_map that names files (rebuild the index)", path);
    if (x->metadata && x->metadata->type == JSON_NULL) x->metadata = NULL;
    if (x->metadata && x->metadata->type != JSON_OBJECT)
        return fail(e, ERR_INPUT, "E-CKPT-INDEX", "%s: metadata is not an object (rebuild the index)", path);
    return true;
}

bool index_read(ckpt_index *out, const char *path, err *e) {
    mapping text;
    err je = { 0 };
    *out = (ckpt_index){ 0 };
    if (!mapping_open(&text, path, e)) return false;
    /* An honest index takes 1 to 3.5 times its text. */
    out->mem.limit = 5 * text.size + (1 << 20);
    const json *root;
    const json_limits limits = { .max_bytes = INDEX_MAX_BYTES, .max_depth = 32 };
    bool ok =
        json_parse(&root, &out->mem, (str){ text.size ? (const char *)text.data : "", text.size }, path, &limits, &je);
    mapping_close(&text);
    if (!ok) fail(e, je.kind, "E-CKPT-INDEX", "%s", je.msg);
    ok = ok && find_map(out, root, path, e) && list_files(out, path, e);
    if (!ok) index_free(out);
    return ok;
}

void index_free(ckpt_index *x) {
    arena_free(&x->mem);
    *x = (ckpt_index){ 0 };
}

/* ---- the directory ---- */

bool ckpt_entry_exists(const char *dir, const char *name) {
    struct stat st;
    char *path = path_join(dir, name);
    const bool yes = lstat(path, &st) == 0;
    free(path);
    return yes;
}

static int name_order(const void *key, const void *item) { return strcmp(key, *(const char *const *)item); }

/* "model-00003-of-00005.safetensors", "model.safetensors": names of weights, whatever is inside. */
static bool is_shard_name(str name) { return str_is(name, CKPT_SINGLE) || str_find(name, STR("-of-")) >= 0; }

/* Could a model of the family own this tensor? Maxima bear the names of modules, but end as quantizers. */
static bool is_weight_name(str name) {
    static const char *const starts[] = { "model.",  "language_model.", "mtp.",          "lm_head.",
                                          "visual.", "layers.",         "embed_tokens.", "norm." };
    if (str_find(name, STR("_quantizer")) >= 0) return false;
    for (size_t i = 0; i < ARRAY_LEN(starts); i++)
        if (str_starts(name, str_of(starts[i]))) return true;
    return false;
}

/* A sound file of other things, such as saved maxima: none of the model's business. */
static bool is_foreign(const char *dir, const char *name) {
    st_file f;
    err unsound = { 0 };
    if (is_shard_name(str_of(name))) return false;
    char *path = path_join(dir, name);
    bool foreign = st_open(&f, path, &unsound);
    if (foreign) {
        for (int i = 0; foreign && i < f.count; i++) foreign = !is_weight_name(f.tensors[i].name);
        st_close(&f);
    }
    if (foreign) log_say("N-CKPT-IGNORED", "%s: no part of the model: not read", path);
    free(path);
    return foreign;
}

char *ckpt_unlisted(const char *dir, const char *const *files, int count) {
    char *first = NULL;
    DIR *d = opendir(dir);
    if (!d) return NULL;
    /* The stream is ours alone, and glibc's readdir is safe on separate streams. */
    /* cppcheck-suppress readdirCalled */
    for (struct dirent *entry; (entry = readdir(d));) {
        const char *name = entry->d_name;
        if (!plain_name(str_of(name)) || (first && strcmp(name, first) >= 0)) continue;
        if (count && (bsearch(name, files, (size_t)count, sizeof *files, name_order) || is_foreign(dir, name)))
            continue;
        free(first);
        first = xstrdup(name);
    }
    closedir(d);
    return first;
}

static bool fail_missing(const ckpt_index *x, const char *dir, int file, int missing, const char *extra, err *e) {
    uint32_t tensors = 0;
    for (uint32_t i = 0; i < x->map->n; i++) tensors += x->file_of[i] == (uint32_t)file;
    const bool link = ckpt_entry_exists(dir, x->files[file]);
    return fail(
        e, ERR_INPUT, "E-CKPT-SHARD-MISSING",
        "%s: %s, which " CKPT_INDEX " names for %u tensors, %s; %d of %d files are missing%s%s%s", dir, x->files[file],
        tensors, link ? "is a symbolic link to nothing" : "is not there", missing, x->file_count,
        extra ? ", and " : " (download again)", extra ? extra : "",
        extra ? " is not in the index: the index may belong to another version (download again, or rebuild the index)"
              : "");
}

bool index_check_files(const ckpt_index *x, const char *dir, err *e) {
    int missing = 0, first = -1;
    for (int i = 0; i < x->file_count; i++) {
        char *path = path_join(dir, x->files[i]);
        if (!file_exists(path)) {
            missing++;
            if (first < 0) first = i;
        }
        free(path);
    }
    char *extra = ckpt_unlisted(dir, x->files, x->file_count);
    bool ok = !extra;
    if (missing)
        ok = fail_missing(x, dir, first, missing, extra, e);
    else if (extra && strcmp(extra, CKPT_SINGLE) == 0)
        fail(e, ERR_INPUT, "E-CKPT-SHARD-EXTRA",
             "%s: " CKPT_SINGLE " and " CKPT_INDEX " are both there, but the index names "
             "other files (%s, ...): two models in one folder (remove one of them)",
             dir, x->files[0]);
    else if (extra)
        fail(e, ERR_INPUT, "E-CKPT-SHARD-EXTRA", "%s: %s is not in " CKPT_INDEX " (move it away, or rebuild the index)",
             dir, extra);
    free(extra);
    return ok;
}

/* ---- the tensors ---- */

static bool fail_elsewhere(const ckpt_index *x, const ckpt *c, uint32_t member, int wrong, const st_tensor *t, err *e) {
    return fail(e, ERR_INPUT, "E-CKPT-INDEX",
                "%s: tensor %.*s: the index puts it in %s, but it is in %s; %d of %u tensors lie "
                "elsewhere (swapped or renamed shards: download again, or rebuild the index)",
                c->dir, NAME_ARG(t->name), x->files[x->file_of[member]], x->files[t->shard], wrong, x->map->n);
}

static bool fail_absent(const ckpt_index *x, const ckpt *c, uint32_t member, int absent, err *e) {
    return fail(e, ERR_INPUT, "E-CKPT-TENSOR-MISSING",
                "%s: tensor %.*s: the index puts it in %s, but no file holds it; %d of %u "
                "tensors are missing (download again, or rebuild the index)",
                c->dir, NAME_ARG(x->map->u.members[member].key), x->files[x->file_of[member]], absent, x->map->n);
}

/* Every member of the index was found, so the tensors that it does not reach are the unlisted ones. */
static bool fail_unlisted(const ckpt_index *x, const ckpt *c, err *e) {
    bool *listed = xcalloc((size_t)c->tensor_count, sizeof *listed);
    for (uint32_t i = 0; i < x->map->n; i++) listed[ckpt_number(c, x->map->u.members[i].key)] = true;
    int first = -1;
    for (int i = c->tensor_count; i-- > 0;)
        if (!listed[i]) first = i;
    free(listed);
    const st_tensor *t = ckpt_at(c, first);
    return fail(e, ERR_INPUT, "E-CKPT-TENSOR-EXTRA",
                "%s: tensor %.*s is in %s, but not in " CKPT_INDEX "; %d of %d tensors are not listed "
                "(rebuild the index)",
                c->dir, NAME_ARG(t->name), x->files[t->shard], c->tensor_count - (int)x->map->n, c->tensor_count);
}

static void check_total(const ckpt_index *x, const ckpt *c) {
    const json *total = json_get(x->metadata, "total_size");
    if (!total || (total->type == JSON_INT && total->u.i >= 0 && (uint64_t)total->u.i == c->tensor_bytes)) return;
    buf said = { 0 };
    json_write(&said, total);
    log_say("W-CKPT-TOTAL", "%s/" CKPT_INDEX ": total_size is %.*s, the tensors have %llu bytes", c->dir,
            (int)(said.n > 40 ? 40 : said.n), said.p, (unsigned long long)c->tensor_bytes);
    buf_free(&said);
}

bool index_check_tensors(const ckpt_index *x, const ckpt *c, err *e) {
    int absent = 0, wrong = 0;
    uint32_t first_absent = 0, first_wrong = 0;
    for (uint32_t i = x->map->n; i-- > 0;) {
        const st_tensor *t = ckpt_find(c, x->map->u.members[i].key);
        if (!t) {
            absent++;
            first_absent = i;
        } else if ((uint32_t)t->shard != x->file_of[i]) {
            wrong++;
            first_wrong = i;
        }
    }
    if (wrong) return fail_elsewhere(x, c, first_wrong, wrong, ckpt_find(c, x->map->u.members[first_wrong].key), e);
    if (absent) return fail_absent(x, c, first_absent, absent, e);
    if ((uint32_t)c->tensor_count != x->map->n) return fail_unlisted(x, c, e);
    check_total(x, c);
    return true;
}
