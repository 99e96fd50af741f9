#include "text/toolcall.h"

#include "base/arena.h"
#include "text/jinja_uni.h"

enum { SCHEMA_MAX_DEPTH = 16, LITERAL_MAX_DEPTH = 64, TYPES_MAX = 16, SCHEMAS_MAX = 1000 };

const json *toolcall_find(const json *tools, str name) {
    if (!json_is(tools, JSON_ARRAY)) return NULL;
    for (uint32_t i = 0; i < tools->n; i++) {
        const json *fn = json_get(&tools->u.items[i], "function");
        if (!json_is(fn, JSON_OBJECT)) fn = &tools->u.items[i];
        const json *n = json_get(fn, "name");
        if (json_is(n, JSON_STRING) && str_eq(json_str(n), name)) return fn;
    }
    return NULL;
}

const json *toolcall_schema(const json *tools, str name) {
    const json *fn = toolcall_find(tools, name), *p = json_get(fn, "parameters");
    return p ? p : json_get(fn, "input_schema");
}

bool toolcall_declares(const json *tools, str name, str key) {
    return json_get_str(json_get(toolcall_schema(tools, name), "properties"), key) != NULL;
}

/* ---- which types a schema allows, in order ---- */

typedef enum value_type { T_STRING, T_INTEGER, T_NUMBER, T_BOOLEAN, T_OBJECT, T_ARRAY, T_NULL } value_type;
typedef struct types {
    value_type v[TYPES_MAX];
    int n;
    int looked; /* schemas looked at: bounds what unions of unions cost */
} types;

static void types_add(types *t, value_type x) {
    for (int i = 0; i < t->n; i++)
        if (t->v[i] == x) return;
    if (t->n < TYPES_MAX) t->v[t->n++] = x;
}

static void types_add_name(types *t, const json *name) {
    static const char *const names[] = { "string", "integer", "number", "boolean", "object", "array", "null" };
    if (!json_is(name, JSON_STRING)) return;
    for (int i = 0; i < (int)ARRAY_LEN(names); i++)
        if (str_is(json_str(name), names[i])) types_add(t, (value_type)i);
}

static void types_add_value(types *t, const json *v) {
    switch ((json_type)v->type) {
    case JSON_NULL: types_add(t, T_NULL); break;
    case JSON_FALSE:
    case JSON_TRUE: types_add(t, T_BOOLEAN); break;
    case JSON_INT: types_add(t, T_INTEGER); break;
    case JSON_REAL: types_add(t, T_NUMBER); break;
    case JSON_STRING: types_add(t, T_STRING); break;
    case JSON_ARRAY: types_add(t, T_ARRAY); break;
    case JSON_OBJECT: types_add(t, T_OBJECT); break;
    }
}

/* A local JSON pointer such as #/$defs/City. */
static const json *pointer(const json *root, str ref) {
    if (!str_starts(ref, STR("#"))) return NULL;
    ref = str_skip(ref, 1);
    while (root && ref.n && *ref.p == '/') {
        ref = str_skip(ref, 1);
        const ptrdiff_t slash = str_find(ref, STR("/"));
        const str part = { ref.p, slash < 0 ? ref.n : (size_t)slash };
        root = json_get_str(root, part);
        ref = str_skip(ref, part.n);
    }
    return ref.n ? NULL : root;
}

static void types_of(types *t, const json *schema, const json *root, int depth) {
    static const char *const unions[] = { "anyOf", "oneOf", "allOf" };
    if (!json_is(schema, JSON_OBJECT) || depth > SCHEMA_MAX_DEPTH || t->looked++ >= SCHEMAS_MAX) return;
    const json *ref = json_get(schema, "$ref"), *type = json_get(schema, "type"), *e = json_get(schema, "enum");
    if (json_is(ref, JSON_STRING)) types_of(t, pointer(root, json_str(ref)), root, depth + 1);
    if (json_is(type, JSON_ARRAY))
        for (uint32_t i = 0; i < type->n; i++) types_add_name(t, &type->u.items[i]);
    else
        types_add_name(t, type);
    for (size_t k = 0; k < ARRAY_LEN(unions); k++) {
        const json *u = json_get(schema, unions[k]);
        if (json_is(u, JSON_ARRAY))
            for (uint32_t i = 0; i < u->n; i++) types_of(t, &u->u.items[i], root, depth + 1);
    }
    if (t->n == 0 && json_is(e, JSON_ARRAY))
        for (uint32_t i = 0; i < e->n; i++) types_add_value(t, &e->u.items[i]);
    if (t->n == 0 && json_get(schema, "const")) types_add_value(t, json_get(schema, "const"));
    if (t->n == 0 && json_is(json_get(schema, "properties"), JSON_OBJECT)) types_add(t, T_OBJECT);
    if (json_is(json_get(schema, "nullable"), JSON_TRUE)) types_add(t, T_NULL);
}

/* ---- texts that are values ---- */

static str trim(str s) {
    while (s.n && strchr(" \t\r\n", *s.p) && *s.p) s = str_skip(s, 1);
    while (s.n && s.p[s.n - 1] && strchr(" \t\r\n", s.p[s.n - 1])) s.n--;
    return s;
}

static size_t digits(str s, size_t at) {
    size_t n = 0;
    while (at + n < s.n && s.p[at + n] >= '0' && s.p[at + n] <= '9') n++;
    return n;
}

/* JSON's number grammar over all of s; *whole: it has no fraction but zeros and no exponent. */
static bool is_number(str s, bool *whole) {
    size_t i = s.n && *s.p == '-';
    const size_t lead = digits(s, i);
    if (!lead || (lead > 1 && s.p[i] == '0')) return false;
    i += lead;
    *whole = true;
    if (i < s.n && s.p[i] == '.') {
        const size_t n = digits(s, i + 1);
        if (!n) return false;
        for (size_t k = 0; k < n; k++) *whole = *whole && s.p[i + 1 + k] == '0';
        i += 1 + n;
    }
    if (i < s.n && (s.p[i] | 32) == 'e') {
        i++;
        if (i < s.n && (s.p[i] == '+' || s.p[i] == '-')) i++;
        const size_t n = digits(s, i);
        if (!n) return false;
        *whole = false;
        i += n;
    }
    return i == s.n;
}

static bool is_word(str s, const char *word) { return s.n == strlen(word) && strncasecmp(s.p, word, s.n) == 0; }

/* ---- Python literals to JSON ---- */

typedef struct literal {
    const char *p, *end;
    buf *out;
} literal;

static void skip_space(literal *l) {
    while (l->p < l->end && *l->p && strchr(" \t\r\n", *l->p)) l->p++;
}

static int hex(literal *l, int n) {
    int v = 0;
    for (int i = 0; i < n; i++) {
        const char c = l->p < l->end ? *l->p : 0;
        const int d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
        l->p++;
    }
    return v;
}

static bool literal_escape(literal *l, buf *s) {
    static const char from[] = "nrtbf\\'\"/0av", to[] = "\n\r\t\b\f\\'\"/\0\a\v";
    if (l->p >= l->end) return false;
    const char c = *l->p++;
    if (c == '\n') return true;
    if (c == 'x' || c == 'u') {
        int v = hex(l, c == 'x' ? 2 : 4);
        if (v >= 0xd800 && v < 0xdc00 && l->end - l->p >= 6 && l->p[0] == '\\' && l->p[1] == 'u') {
            l->p += 2;
            const int low = hex(l, 4);
            if (low < 0xdc00 || low > 0xdfff) return false;
            v = 0x10000 + ((v - 0xd800) << 10) + (low - 0xdc00);
        }
        if (v < 0 || (v >= 0xd800 && v < 0xe000)) return false;
        char tmp[4];
        buf_add(s, tmp, uni_put(tmp, v));
        return true;
    }
    const char *k = c ? strchr(from, c) : NULL;
    if (k) {
        buf_byte(s, to[k - from]);
    } else {
        buf_byte(s, '\\');
        buf_byte(s, c);
    }
    return true;
}

static bool literal_string(literal *l) {
    const char quote = *l->p++;
    buf s = { 0 };
    bool ok = false;
    while (l->p < l->end) {
        const char c = *l->p++;
        if (c == quote) {
            ok = true;
            break;
        }
        if (c != '\\')
            buf_byte(&s, c);
        else if (!literal_escape(l, &s))
            break;
    }
    if (ok) json_write_str(l->out, buf_view(&s));
    buf_free(&s);
    return ok;
}

static bool literal_word(literal *l) {
    static const struct {
        const char *word, *json;
    } words[] = {
        { "True", "true" }, { "False", "false" }, { "None", "null" },
        { "true", "true" }, { "false", "false" }, { "null", "null" },
    };
    const char *q = l->p;
    bool whole;
    while (q < l->end &&
           (*q == '+' || *q == '-' || *q == '.' || (*q >= '0' && *q <= '9') || ((*q | 32) >= 'a' && (*q | 32) <= 'z')))
        q++;
    const str s = { l->p, (size_t)(q - l->p) };
    l->p = q;
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        if (str_is(s, words[i].word)) {
            buf_puts(l->out, words[i].json);
            return true;
        }
    if (!is_number(s, &whole)) return false;
    buf_str(l->out, s);
    return true;
}

static bool literal_value(literal *l, int depth);

static bool literal_items(literal *l, char close, bool pairs, int depth) {
    l->p++;
    buf_byte(l->out, pairs ? '{' : '[');
    for (bool first = true;; first = false) {
        skip_space(l);
        if (l->p < l->end && *l->p == close) break;
        if (!first) buf_byte(l->out, ',');
        if (pairs) {
            if (l->p >= l->end || (*l->p != '\'' && *l->p != '"') || !literal_string(l)) return false;
            skip_space(l);
            if (l->p >= l->end || *l->p++ != ':') return false;
            buf_byte(l->out, ':');
        }
        if (!literal_value(l, depth + 1)) return false;
        skip_space(l);
        if (l->p < l->end && *l->p == ',')
            l->p++;
        else if (l->p >= l->end || *l->p != close)
            return false;
    }
    l->p++;
    buf_byte(l->out, pairs ? '}' : ']');
    return true;
}

static bool literal_value(literal *l, int depth) {
    skip_space(l);
    if (l->p >= l->end || depth > LITERAL_MAX_DEPTH) return false;
    switch (*l->p) {
    case '{': return literal_items(l, '}', true, depth);
    case '[': return literal_items(l, ']', false, depth);
    case '(': return literal_items(l, ')', false, depth);
    case '\'':
    case '"': return literal_string(l);
    default: return literal_word(l);
    }
}

/* An object or array, as JSON or else as Python writes it. */
static bool write_container(buf *out, str text) {
    const json_limits limits = { .max_depth = LITERAL_MAX_DEPTH, .allow_duplicates = true };
    const size_t mark = out->n;
    arena mem = { 0 };
    const json *v;
    err e = { 0 };
    if (!text.n || !strchr("{[(", *text.p) || !*text.p) return false;
    bool ok = json_parse(&v, &mem, text, "argument", &limits, &e);
    if (ok) json_write(out, v);
    arena_free(&mem);
    if (ok) return true;
    literal l = { text.p, text.p + text.n, out };
    ok = literal_value(&l, 0);
    skip_space(&l);
    if (ok && l.p == l.end) return true;
    out->n = mark;
    if (out->p) out->p[mark] = 0;
    return false;
}

static bool write_as(buf *out, value_type t, str raw) {
    const str s = trim(raw);
    bool whole;
    switch (t) {
    case T_STRING: json_write_str(out, raw); return true;
    case T_INTEGER:
    case T_NUMBER:
        if (!is_number(s, &whole) || (t == T_INTEGER && !whole)) return false;
        buf_str(out, s);
        return true;
    case T_BOOLEAN:
        if (!is_word(s, "true") && !is_word(s, "false")) return false;
        buf_puts(out, is_word(s, "true") ? "true" : "false");
        return true;
    case T_NULL:
        if (!is_word(s, "null") && !is_word(s, "none")) return false;
        buf_puts(out, "null");
        return true;
    default: return write_container(out, s);
    }
}

void toolcall_value(buf *out, const json *schema, const json *root, str text) {
    types t = { .n = 0 };
    types_of(&t, schema, root, 0);
    bool has_string = false, has_null = false;
    for (int i = 0; i < t.n; i++) {
        has_string = has_string || t.v[i] == T_STRING;
        has_null = has_null || t.v[i] == T_NULL;
    }
    if (t.n && (has_null || !has_string) && write_as(out, T_NULL, text)) return;
    for (int i = 0; i < t.n; i++)
        if (t.v[i] != T_NULL && write_as(out, t.v[i], text)) return;
    if (t.n == 0 && schema && write_container(out, trim(text))) return;
    json_write_str(out, text);
}

toolcall_form toolcall_form_of(const json *schema, const json *root) {
    types t = { .n = 0 };
    types_of(&t, schema, root, 0);
    bool has_null = false;
    value_type first = T_NULL; /* of the others */
    for (int i = t.n - 1; i >= 0; i--) {
        if (t.v[i] == T_NULL)
            has_null = true;
        else
            first = t.v[i];
    }
    if (t.n == 0) return schema ? FORM_OTHER : FORM_STRING;
    if (first != T_STRING) return FORM_OTHER;
    return has_null ? FORM_STRING_OR_NULL : FORM_STRING;
}

str toolcall_strip(str s) {
    if (str_starts(s, STR("\r\n")))
        s = str_skip(s, 2);
    else if (str_starts(s, STR("\n")))
        s = str_skip(s, 1);
    if (str_ends(s, STR("\r\n")))
        s.n -= 2;
    else if (str_ends(s, STR("\n")))
        s.n -= 1;
    return s;
}
