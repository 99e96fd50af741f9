#include "ckpt/safetensors.h"

#include <stdlib.h>

/* Where a tensor lies in the data section, and its place in header order. */
typedef struct span {
    uint64_t begin, end;
    uint32_t index;
} span;

typedef struct reader {
    st_file *f;
    const char *what; /* the path, or its end when it is very long: the reason must stay readable */
    const uint8_t *data;
    uint64_t header_bytes, data_bytes;
    span *spans;
    err *e;
} reader;

#define NAME_ARG(s) ((int)((s).n > 160 ? 160 : (s).n)), (s).p
#define FAIL_TENSOR(r, id, name, fmt, ...) \
    fail((r)->e, ERR_INPUT, id, "%s: tensor %.*s: " fmt, (r)->what, NAME_ARG(name), __VA_ARGS__)

static const char *path_end(const char *path) {
    const size_t n = strlen(path);
    return n > 240 ? path + n - 240 : path;
}

static bool fail_memory(reader *r) {
    return fail(r->e, ERR_MACHINE, "E-ST-HEADER", "%s: no memory for its tensor table (free some)", r->what);
}

/* ---- one entry of the header ---- */

static bool read_dtype(reader *r, st_tensor *t, const json *v) {
    if (!json_is(v, JSON_STRING))
        return FAIL_TENSOR(r, "E-ST-DTYPE", t->name, "%s (rewrite the file)",
                           v ? "dtype is not a string" : "has no dtype");
    if (dtype_parse(&t->type, json_str(v))) return true;
    return FAIL_TENSOR(r, "E-ST-DTYPE", t->name, "unknown dtype %.*s (convert it to BF16, F16 or F32)",
                       (int)(v->n > 40 ? 40 : v->n), v->u.s);
}

static bool read_shape(reader *r, st_tensor *t, const json *v) {
    if (!json_is(v, JSON_ARRAY))
        return FAIL_TENSOR(r, "E-ST-SHAPE", t->name, "%s (rewrite the file)",
                           v ? "shape is not a list" : "has no shape");
    if (v->n > ST_MAX_RANK)
        return FAIL_TENSOR(r, "E-ST-SHAPE", t->name, "%u dimensions, at most %d are supported (reshape it)", v->n,
                           ST_MAX_RANK);
    t->rank = (int)v->n;
    t->elems = 1;
    for (uint32_t i = 0; i < v->n; i++) {
        const json *d = &v->u.items[i];
        if (!json_is(d, JSON_INT) || d->u.i < 0)
            return FAIL_TENSOR(r, "E-ST-SHAPE", t->name,
                               "dimension %u is not a whole number in range (rewrite the file)", i);
        t->shape[i] = d->u.i;
        if (__builtin_mul_overflow(t->elems, (uint64_t)d->u.i, &t->elems))
            return FAIL_TENSOR(r, "E-ST-SHAPE", t->name,
                               "the product of its %u dimensions overflows (rewrite the file)", v->n);
    }
    if (__builtin_mul_overflow(t->elems, (uint64_t)dtype_bytes(t->type), &t->bytes))
        return FAIL_TENSOR(r, "E-ST-SHAPE", t->name,
                           "its size in bytes overflows with %u dimensions (rewrite the file)", v->n);
    return true;
}

static bool read_offsets(reader *r, const st_tensor *t, span *s, const json *v) {
    if (!json_is(v, JSON_ARRAY) || v->n != 2)
        return FAIL_TENSOR(r, "E-ST-OFFSETS", t->name, "%s (rewrite the file)",
                           v ? "data_offsets is not a list of two numbers" : "has no data_offsets");
    const json *b = &v->u.items[0], *n = &v->u.items[1];
    if (!json_is(b, JSON_INT) || !json_is(n, JSON_INT) || b->u.i < 0 || n->u.i < b->u.i)
        return FAIL_TENSOR(r, "E-ST-OFFSETS", t->name, "%s (rewrite the file)",
                           "data_offsets are not two whole numbers with 0 <= begin <= end");
    s->begin = (uint64_t)b->u.i;
    s->end = (uint64_t)n->u.i;
    if (s->end - s->begin == t->bytes) return true;
    return FAIL_TENSOR(r, "E-ST-SHAPE", t->name,
                       "its shape of %s needs %llu bytes, its offsets span %llu (rewrite the file)",
                       dtype_name(t->type), (unsigned long long)t->bytes, (unsigned long long)(s->end - s->begin));
}

static bool read_name(reader *r, st_tensor *t, str name) {
    if (name.n == 0 || name.n > ST_MAX_NAME || memchr(name.p, 0, name.n))
        return fail(r->e, ERR_INPUT, "E-ST-HEADER",
                    "%s: a tensor name is empty, longer than %d bytes or holds a NUL: '%.*s' (rename it)", r->what,
                    ST_MAX_NAME, NAME_ARG(name));
    t->name = arena_str(&r->f->mem, name);
    return t->name.p || fail_memory(r);
}

static bool read_entry(reader *r, st_tensor *t, span *s, const json_member *m) {
    const json *dtype_field = NULL, *shape = NULL, *offsets = NULL, *v = &m->value;
    *t = (st_tensor){ 0 };
    if (!read_name(r, t, m->key)) return false;
    if (!json_is(v, JSON_OBJECT))
        return FAIL_TENSOR(r, "E-ST-HEADER", t->name, "%s (rewrite the file)", "its entry is not an object");
    for (uint32_t i = 0; i < v->n; i++) {
        const json_member *field = &v->u.members[i];
        if (str_eq(field->key, STR("dtype")))
            dtype_field = &field->value;
        else if (str_eq(field->key, STR("shape")))
            shape = &field->value;
        else if (str_eq(field->key, STR("data_offsets")))
            offsets = &field->value;
        else
            return FAIL_TENSOR(r, "E-ST-HEADER", t->name, "unknown field '%.*s' (rewrite the file)",
                               (int)(field->key.n > 60 ? 60 : field->key.n), field->key.p);
    }
    return read_dtype(r, t, dtype_field) && read_shape(r, t, shape) && read_offsets(r, t, s, offsets);
}

/* ---- the header ---- */

/* The tree of the whole header dies after the table is built, so what is kept of it is copied. */
static bool read_metadata(reader *r, const json *v) {
    bool ok = json_is(v, JSON_OBJECT);
    for (uint32_t i = 0; ok && i < v->n; i++) ok = json_is(&v->u.members[i].value, JSON_STRING);
    if (!ok)
        return fail(r->e, ERR_INPUT, "E-ST-HEADER", "%s: __metadata__ is not an object of strings (rewrite the file)",
                    r->what);
    buf text = { 0 };
    json_write(&text, v);
    ok = json_parse(&r->f->metadata, &r->f->mem, buf_view(&text), r->what, NULL, r->e);
    buf_free(&text);
    return ok;
}

static bool read_entries(reader *r, const json *root) {
    st_file *f = r->f;
    const bool has_metadata = json_get(root, "__metadata__") != NULL;
    const size_t n = root->n - has_metadata;
    f->tensors = arena_take(&f->mem, n ? n : 1, sizeof *f->tensors);
    r->spans = calloc(n ? n : 1, sizeof *r->spans);
    if (!f->tensors || !r->spans || !strtab_init(&f->table, n)) return fail_memory(r);
    for (uint32_t i = 0; i < root->n; i++) {
        const json_member *m = &root->u.members[i];
        if (has_metadata && str_eq(m->key, STR("__metadata__"))) {
            if (!read_metadata(r, &m->value)) return false;
            continue;
        }
        const int k = f->count;
        r->spans[k].index = (uint32_t)k;
        if (!read_entry(r, &f->tensors[k], &r->spans[k], m)) return false;
        f->count++;
    }
    return true;
}

static int span_order(const void *a, const void *b) {
    const span *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1; /* empty tensors stand before the one that begins there */
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Tensors in the order of their data; most files have them so already. */
static bool sort_tensors(reader *r) {
    st_file *f = r->f;
    bool sorted = true;
    for (int i = 1; i < f->count && sorted; i++) sorted = span_order(&r->spans[i - 1], &r->spans[i]) < 0;
    if (sorted) return true;
    const size_t bytes = (size_t)f->count * sizeof *f->tensors;
    st_tensor *old = malloc(bytes);
    if (!old) return fail_memory(r);
    memcpy(old, f->tensors, bytes);
    qsort(r->spans, (size_t)f->count, sizeof *r->spans, span_order);
    for (int i = 0; i < f->count; i++) f->tensors[i] = old[r->spans[i].index];
    free(old);
    return true;
}

/* The data section is covered exactly: no gap, no overlap, nothing behind the last tensor. */
static bool check_layout(reader *r) {
    st_file *f = r->f;
    uint64_t at = 0;
    for (int i = 0; i < f->count; i++) {
        st_tensor *t = &f->tensors[i];
        const span *s = &r->spans[i];
        if (s->begin < at)
            return FAIL_TENSOR(r, "E-ST-OVERLAP", t->name,
                               "begins at %llu inside tensor %.*s, which ends at %llu (rewrite the file)",
                               (unsigned long long)s->begin, NAME_ARG(t[-1].name), (unsigned long long)at);
        if (s->begin > at)
            return FAIL_TENSOR(r, "E-ST-GAP", t->name, "%llu bytes before it belong to no tensor (rewrite the file)",
                               (unsigned long long)(s->begin - at));
        if (s->end > r->data_bytes)
            return FAIL_TENSOR(r, "E-ST-SHORT", t->name,
                               "%llu of its %llu bytes are missing, the file is cut off (download it again)",
                               (unsigned long long)(s->end - (r->data_bytes > s->begin ? r->data_bytes : s->begin)),
                               (unsigned long long)t->bytes);
        t->data = r->data + s->begin;
        at = s->end;
    }
    if (at == r->data_bytes) return true;
    return fail(r->e, ERR_INPUT, "E-ST-TRAILING",
                "%s: %llu bytes follow the last tensor (download or rewrite the file)", r->what,
                (unsigned long long)(r->data_bytes - at));
}

static str tensor_name(const void *ctx, uint32_t i) { return ((const st_tensor *)ctx)[i].name; }

static bool read_header(reader *r, str text) {
    /* Honest headers take 1 to 3.5 times their text; the limit keeps hostile ones near that. */
    arena tree = { .limit = 5 * text.n + (1 << 20) };
    const json *root;
    err je = { 0 };
    bool ok =
        json_parse(&root, &tree, text, r->what, &(json_limits){ .max_bytes = ST_MAX_HEADER, .max_depth = 4 }, &je);
    if (!ok)
        fail(r->e, je.kind, strcmp(je.id, "E-JSON-DUP") == 0 ? "E-ST-DUP" : "E-ST-JSON", "%s", je.msg);
    else
        ok = read_entries(r, root);
    arena_free(&tree);
    ok = ok && sort_tensors(r) && check_layout(r);
    for (int i = 0; ok && i < r->f->count; i++)
        strtab_put(&r->f->table, r->f->tensors[i].name, (uint32_t)i, tensor_name, r->f->tensors);
    free(r->spans);
    return ok;
}

/* ---- the file ---- */

static uint64_t read_u64(const uint8_t *p) {
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

static bool read_bytes(st_file *f, const uint8_t *p, size_t n, err *e) {
    reader r = { .f = f, .what = path_end(f->path), .e = e };
    if (n >= 8 && memcmp(p, "version ", 8) == 0)
        return fail(e, ERR_INPUT, "E-ST-HEADER", "%s: is a Git LFS pointer, not the file itself (run `git lfs pull`)",
                    r.what);
    if (n < 8)
        return fail(e, ERR_INPUT, "E-ST-SHORT", "%s: %zu bytes are no safetensors file (download it again)", r.what, n);
    r.header_bytes = read_u64(p);
    if (r.header_bytes < 2 || r.header_bytes > ST_MAX_HEADER)
        return fail(e, ERR_INPUT, "E-ST-HEADER",
                    "%s: header length %llu is not between 2 and %d (is it a safetensors file?)", r.what,
                    (unsigned long long)r.header_bytes, ST_MAX_HEADER);
    if (r.header_bytes > n - 8)
        return fail(e, ERR_INPUT, "E-ST-SHORT", "%s: its header of %llu bytes is cut off after %zu (download it again)",
                    r.what, (unsigned long long)r.header_bytes, n - 8);
    if (p[8] != '{')
        return fail(e, ERR_INPUT, "E-ST-HEADER", "%s: its header does not begin with '{' (is it a safetensors file?)",
                    r.what);
    r.data = p + 8 + r.header_bytes;
    r.data_bytes = n - 8 - r.header_bytes;
    return read_header(&r, (str){ (const char *)p + 8, r.header_bytes });
}

bool st_open_bytes(st_file *out, const uint8_t *p, size_t n, const char *what, err *e) {
    *out = (st_file){ .path = xstrdup(what) };
    if (read_bytes(out, p, n, e)) return true;
    st_close(out);
    return false;
}

bool st_open(st_file *out, const char *path, err *e) {
    *out = (st_file){ .path = xstrdup(path) };
    if (mapping_open(&out->map, path, e) && read_bytes(out, out->map.data, out->map.size, e)) return true;
    st_close(out);
    return false;
}

void st_close(st_file *f) {
    strtab_free(&f->table);
    mapping_close(&f->map);
    arena_free(&f->mem);
    free(f->path);
    *f = (st_file){ 0 };
}

st_tensor *st_find(const st_file *f, str name) {
    const uint32_t i = strtab_get(&f->table, name, tensor_name, f->tensors);
    return i == STRTAB_NONE ? NULL : &f->tensors[i];
}
