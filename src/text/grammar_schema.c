/* JSON Schema to rules. What is compiled is a conjunction of schemas (of $ref, allOf, and the branch of an anyOf beside other
 * keywords); equal conjunctions share a rule, which is how recursion ends. */
#include <stdio.h>
#include <stdlib.h>

#include "text/grammar_impl.h"

enum {
    PARTS_MAX = 12,
    PROPERTIES_MAX = 1000,
    BRANCHES_MAX = 400,
    PREFIX_MAX = 256,
    DEPTH_MAX = 200,
    VALUE_PAIRS_MAX = 100000,
    CONJ_TABLE = 1 << 12,
    T_STRING = 1,
    T_INTEGER = 2,
    T_NUMBER = 4,
    T_BOOLEAN = 8,
    T_OBJECT = 16,
    T_ARRAY = 32,
    T_NULL = 64,
    T_ALL = 127
};

typedef struct part {
    const json *s;
    uint8_t used; /* 1: its anyOf, 2: its oneOf have been followed */
} part;

typedef struct conj {
    part v[PARTS_MAX];
    int n;
    bool never; /* a false among them */
} conj;

typedef struct known {
    conj c;
    bool raw;
    uint32_t rule, next;
} known;

struct schema_compiler {
    grammar *g;
    const json *root;
    bool tags;
    json_rules any;
    known *known;
    uint32_t n_known, cap_known, table[CONJ_TABLE];
    int depth;
    uint32_t strings_rule[2];
};

static const char *const type_names[] = { "string", "integer", "number", "boolean", "object", "array", "null" };

/* ---- messages ---- */

static bool find_path(buf *out, const json *at, const json *what, int depth) {
    if (at == what) return true;
    const size_t mark = out->n;
    for (uint32_t i = 0; depth < DEPTH_MAX && at->type >= JSON_ARRAY && i < at->n; i++) {
        if (at->type == JSON_OBJECT)
            buf_printf(out, "/" STR_FMT, STR_ARG(at->u.members[i].key));
        else
            buf_printf(out, "/%u", i);
        if (find_path(out, at->type == JSON_OBJECT ? &at->u.members[i].value : &at->u.items[i], what, depth + 1))
            return true;
        buf_truncate(out, mark);
    }
    return false;
}

static bool refuse(const schema_compiler *c, const json *where, const char *keyword, const char *what, err *e) {
    buf path = { 0 };
    buf_byte(&path, '#');
    if (!find_path(&path, c->root, where, 0)) buf_clear(&path);
    (void)fail(e, ERR_INPUT, "E-GRAMMAR-SCHEMA", "schema " STR_FMT ": %s: %s", STR_ARG(buf_view(&path)), keyword, what);
    buf_free(&path);
    return false;
}

/* ---- conjunctions ---- */

static const json *pointer(const json *root, str ref) {
    if (!str_starts(ref, STR("#"))) return NULL;
    ref = str_skip(ref, 1);
    while (root && ref.n) {
        if (*ref.p != '/') return NULL;
        ref = str_skip(ref, 1);
        const ptrdiff_t slash = str_find(ref, STR("/"));
        const str token = { ref.p, slash < 0 ? ref.n : (size_t)slash };
        buf key = { 0 };
        for (size_t i = 0; i < token.n; i++) {
            const bool tilde = token.p[i] == '~' && i + 1 < token.n && (token.p[i + 1] == '0' || token.p[i + 1] == '1');
            buf_byte(&key, tilde ? (token.p[i + 1] == '0' ? '~' : '/') : token.p[i]);
            i += tilde;
        }
        if (root->type == JSON_ARRAY) {
            const unsigned long k = strtoul(key.p ? key.p : "", NULL, 10);
            root = k < root->n ? &root->u.items[k] : NULL;
        } else {
            root = json_get_str(root, buf_view(&key));
        }
        buf_free(&key);
        ref = str_skip(ref, token.n);
    }
    return root;
}

static const char *const known_keys[] = { "type",
                                          "enum",
                                          "const",
                                          "properties",
                                          "required",
                                          "additionalProperties",
                                          "items",
                                          "prefixItems",
                                          "minItems",
                                          "maxItems",
                                          "minLength",
                                          "maxLength",
                                          "pattern",
                                          "minimum",
                                          "maximum",
                                          "exclusiveMinimum",
                                          "exclusiveMaximum",
                                          "anyOf",
                                          "oneOf",
                                          "allOf",
                                          "$ref",
                                          "$defs",
                                          "definitions",
                                          "nullable",
                                          "title",
                                          "description",
                                          "default",
                                          "examples",
                                          "example",
                                          "format",
                                          "deprecated",
                                          "discriminator",
                                          "readOnly",
                                          "writeOnly",
                                          "$id",
                                          "$schema",
                                          "$comment",
                                          "$anchor",
                                          "strict",
                                          "contentMediaType",
                                          "contentEncoding" };

static bool check_keys(const schema_compiler *c, const json *s, err *e) {
    for (uint32_t i = 0; i < s->n; i++) {
        const str key = s->u.members[i].key;
        bool ok = str_starts(key, STR("x-"));
        for (size_t k = 0; k < ARRAY_LEN(known_keys) && !ok; k++) ok = str_is(key, known_keys[k]);
        if (ok) continue;
        char name[128];
        snprintf(name, sizeof name, STR_FMT, key.n > 100 ? 100 : (int)key.n, key.p);
        return refuse(c, s, name, "this keyword is not supported", e);
    }
    return true;
}

static bool conj_add(const schema_compiler *c, conj *out, const json *s, int depth, err *e) {
    if (json_is(s, JSON_TRUE)) return true;
    if (json_is(s, JSON_FALSE)) return out->never = true, true;
    if (!json_is(s, JSON_OBJECT)) return refuse(c, s, "schema", "not an object, true or false", e);
    for (int i = 0; i < out->n; i++)
        if (out->v[i].s == s) return true;
    if (depth > 24 || out->n == PARTS_MAX)
        return refuse(c, s, "$ref", "too many schemas at once, or references in a circle", e);
    if (!check_keys(c, s, e)) return false;
    out->v[out->n++] = (part){ .s = s };
    const json *ref = json_get(s, "$ref"), *all = json_get(s, "allOf");
    if (ref) {
        const json *to = json_is(ref, JSON_STRING) ? pointer(c->root, json_str(ref)) : NULL;
        if (!to) return refuse(c, s, "$ref", "does not lead to a place in this schema", e);
        if (!conj_add(c, out, to, depth + 1, e)) return false;
    }
    if (all && !json_is(all, JSON_ARRAY)) return refuse(c, s, "allOf", "not a list", e);
    for (uint32_t i = 0; all && i < all->n; i++)
        if (!conj_add(c, out, &all->u.items[i], depth + 1, e)) return false;
    return true;
}

static int type_bit(const json *name) {
    for (size_t i = 0; json_is(name, JSON_STRING) && i < ARRAY_LEN(type_names); i++)
        if (str_is(json_str(name), type_names[i])) return 1 << i;
    return 0;
}

static bool has_any(const json *s, const char *const *keys, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (json_get(s, keys[i])) return true;
    return false;
}

/* Types by what else is there, when none is written: the usual meaning of sloppy schemas. */
static int implied_types(const json *s) {
    static const char *const object[] = { "properties", "required", "additionalProperties" };
    static const char *const array[] = { "items", "prefixItems", "minItems", "maxItems" };
    static const char *const string[] = { "minLength", "maxLength", "pattern" };
    static const char *const number[] = { "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum" };
    const int t = (has_any(s, object, 3) ? T_OBJECT : 0) | (has_any(s, array, 4) ? T_ARRAY : 0) |
                  (has_any(s, string, 3) ? T_STRING : 0) | (has_any(s, number, 4) ? T_INTEGER : 0);
    return t ? t : T_ALL;
}

static bool types_of(const schema_compiler *c, const conj *k, int *types, err *e) {
    *types = T_ALL;
    for (int i = 0; i < k->n; i++) {
        const json *s = k->v[i].s, *type = json_get(s, "type");
        int t = 0;
        if (!type) {
            t = implied_types(s);
        } else if (type->type == JSON_ARRAY) {
            for (uint32_t m = 0; m < type->n; m++) {
                const int bit = type_bit(&type->u.items[m]);
                if (!bit) return refuse(c, s, "type", "an unknown type", e);
                t |= bit;
            }
        } else if (!(t = type_bit(type))) {
            return refuse(c, s, "type", "an unknown type", e);
        }
        if (t & T_NUMBER) t |= T_INTEGER;
        if (json_is(json_get(s, "nullable"), JSON_TRUE)) t |= T_NULL;
        *types &= t;
    }
    return true;
}

/* ---- values that are written out ---- */

static int value_type(const json *v) {
    switch ((json_type)v->type) {
    case JSON_NULL: return T_NULL;
    case JSON_FALSE:
    case JSON_TRUE: return T_BOOLEAN;
    case JSON_INT: return T_INTEGER;
    case JSON_REAL: return T_NUMBER;
    case JSON_STRING: return T_STRING;
    case JSON_ARRAY: return T_ARRAY;
    case JSON_OBJECT: return T_OBJECT;
    }
    return 0;
}

static bool same_value(const json *a, const json *b) {
    buf x = { 0 }, y = { 0 };
    json_write(&x, a);
    json_write(&y, b);
    const bool same = str_eq(buf_view(&x), buf_view(&y));
    buf_free(&x);
    buf_free(&y);
    return same;
}

/* Is v among the values of s? `own`: it comes from the list of s. */
static bool listed(const json *s, const json *v, bool own) {
    const json *list = own ? NULL : json_get(s, "enum"), *one = json_get(s, "const");
    bool ok = !list;
    for (uint32_t i = 0; json_is(list, JSON_ARRAY) && i < list->n && !ok; i++) ok = same_value(&list->u.items[i], v);
    return ok && (!one || same_value(one, v));
}

/* Text behind `from` in a tree of texts: what texts share is written once. */
static uint32_t add_branch(grammar *g, uint32_t from, str text) {
    for (size_t i = 0; i < text.n && !g->full; i++) {
        const uint8_t b = (uint8_t)text.p[i];
        uint32_t k = g->states[from].first;
        while (k && !(g->edges[k].kind == EDGE_BYTE && g->edges[k].lo == b)) k = g->edges[k].next;
        if (!k) return grammar_add_text(g, from, str_skip(text, i));
        from = g->edges[k].to;
    }
    return from;
}

static bool has_tag(str s) {
    static const char *const tags[] = { "</parameter>", "<parameter=", "</function>", "</tool_call>" };
    for (size_t i = 0; i < ARRAY_LEN(tags); i++)
        if (str_find(s, str_of(tags[i])) >= 0) return true;
    return false;
}

static bool compile_values(schema_compiler *c, const conj *k, const json *source, bool raw, uint32_t start,
                           uint32_t end, err *e) {
    static const char *const beside[] = {
        "minLength", "maxLength", "pattern", "minimum",     "maximum",    "exclusiveMinimum", "exclusiveMaximum",
        "minItems",  "maxItems",  "items",   "prefixItems", "properties", "required",         "additionalProperties"
    };
    const json *list = json_get(source, "enum"), *one = json_get(source, "const");
    int types;
    if (list && (!json_is(list, JSON_ARRAY) || list->n == 0))
        return refuse(c, source, "enum", "not a list of values", e);
    if (!types_of(c, k, &types, e)) return false;
    for (int i = 0; i < k->n; i++)
        for (size_t m = 0; m < ARRAY_LEN(beside); m++)
            if (json_get(k->v[i].s, beside[m]))
                return refuse(c, k->v[i].s, beside[m], "not supported beside enum or const", e);
    for (int i = 0; i < k->n; i++) {
        const json *other = k->v[i].s != source ? json_get(k->v[i].s, "enum") : NULL;
        if (list && other && (uint64_t)list->n * other->n > VALUE_PAIRS_MAX)
            return fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "schema: two lists of values too long to be compared");
    }
    for (uint32_t i = 0; i < (list ? list->n : 1) && !c->g->full; i++) {
        const json *v = list ? &list->u.items[i] : one;
        bool fits = (value_type(v) & types) != 0;
        for (int m = 0; m < k->n && fits; m++) fits = listed(k->v[m].s, v, list && k->v[m].s == source);
        buf text = { 0 };
        if (raw && v->type == JSON_STRING)
            buf_str(&text, json_str(v));
        else
            json_write(&text, v);
        if (c->tags && has_tag(buf_view(&text))) fits = false;
        if (raw) buf_puts(&text, "\n</parameter>");
        if (fits) grammar_add_edge(c->g, add_branch(c->g, start, buf_view(&text)), EDGE_EPS, end);
        buf_free(&text);
    }
    return true;
}

/* ---- numbers of the schema ---- */

/* A count such as maxItems: the tightest of all parts. */
static bool tightest(const schema_compiler *c, const conj *k, const char *key, bool largest, int64_t *v, err *e) {
    for (int i = 0; i < k->n; i++) {
        const json *x = json_get(k->v[i].s, key);
        if (!x) continue;
        const double d = json_is_number(x) ? json_double(x) : -1;
        if (!(d >= 0) || d != (double)(int64_t)(d < 1e15 ? d : 0)) return refuse(c, k->v[i].s, key, "not a count", e);
        const int64_t n = (int64_t)d;
        if (n > 2000000000) return refuse(c, k->v[i].s, key, "too large", e);
        if (*v < 0 || (largest ? n > *v : n < *v)) *v = n;
    }
    return true;
}

static bool bound(const schema_compiler *c, const json *s, const char *key, number_form *f, err *e) {
    const json *x = json_get(s, key);
    if (!x) return true;
    const bool low = strstr(key, "inimum") != NULL, exclusive = key[0] == 'e';
    if (!json_is_number(x)) return refuse(c, s, key, "not a number", e);
    int64_t v;
    if (x->type == JSON_INT) {
        v = x->u.i;
        if (exclusive && v == (low ? INT64_MAX : INT64_MIN)) return refuse(c, s, key, "too large", e);
        if (exclusive) v += low ? 1 : -1;
    } else {
        const double d = json_double(x);
        if (!(d > -9e15 && d < 9e15))
            return refuse(c, s, key, "too large for a bound that is not written as an integer", e);
        v = (int64_t)d;
        if (low) {
            if ((double)v < d || (exclusive && (double)v == d)) v++;
        } else if ((double)v > d || (exclusive && (double)v == d)) {
            v--;
        }
    }
    f->bounded = true;
    if (low && v > f->lo) f->lo = v;
    if (!low && v < f->hi) f->hi = v;
    return true;
}

static bool compile_number(schema_compiler *c, const conj *k, bool integer, uint32_t *rule, err *e) {
    static const char *const keys[] = { "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum" };
    number_form f = { .integer = integer, .lo = INT64_MIN, .hi = INT64_MAX };
    for (int i = 0; i < k->n; i++)
        for (size_t m = 0; m < ARRAY_LEN(keys); m++) {
            const json *x = json_get(k->v[i].s, keys[m]);
            if (!x) continue;
            if (integer) {
                if (!bound(c, k->v[i].s, keys[m], &f, e)) return false;
            } else if (m == 0 && json_is_number(x) && json_double(x) == 0) {
                f.no_sign = true;
            } else {
                return refuse(c, k->v[i].s, keys[m],
                              "bounds of numbers are supported only for type integer (and minimum 0)", e);
            }
        }
    *rule = grammar_number(c->g, &f);
    return true;
}

static bool compile_string(schema_compiler *c, const conj *k, bool raw, uint32_t *rule, err *e) {
    int64_t min = -1, max = -1;
    const json *pattern = NULL;
    if (!tightest(c, k, "minLength", true, &min, e) || !tightest(c, k, "maxLength", false, &max, e)) return false;
    if (min < 0) min = 0;
    for (int i = 0; i < k->n; i++) {
        const json *p = json_get(k->v[i].s, "pattern");
        if (!p) continue;
        if (!json_is(p, JSON_STRING)) return refuse(c, k->v[i].s, "pattern", "not a string", e);
        if (pattern && !str_eq(json_str(p), json_str(pattern)))
            return refuse(c, k->v[i].s, "pattern", "two patterns for one string", e);
        pattern = p;
    }
    if (max >= 0 && min > max) return *rule = grammar_add_rule(c->g, 0, 0), true; /* nothing */
    if (!pattern) {
        uint32_t *keep = min == 0 && max < 0 ? &c->strings_rule[raw] : NULL;
        if (keep && *keep) return *rule = *keep, true;
        *rule = raw ? grammar_text(c->g, min, max) : grammar_string(c->g, min, max, c->tags);
        if (keep) *keep = *rule;
        return true;
    }
    dfa d = { 0 }, other = { 0 }, both = { 0 };
    bool ok = dfa_regex(&d, json_str(pattern), e);
    if (ok && (min > 0 || max >= 0)) {
        ok = dfa_length(&other, min, max, e) && dfa_both(&both, &d, &other, e);
        dfa_free(&d), dfa_free(&other);
        d = both, both = (dfa){ 0 };
    }
    if (ok && c->tags) {
        dfa_no_tags(&other);
        ok = dfa_both(&both, &d, &other, e);
        dfa_free(&d), dfa_free(&other);
        d = both, both = (dfa){ 0 };
    }
    if (ok) *rule = grammar_dfa(c->g, &d, !raw);
    dfa_free(&d), dfa_free(&other), dfa_free(&both);
    return ok;
}

/* ---- rules of conjunctions ---- */

static bool compile(schema_compiler *c, uint32_t *rule, const conj *k, bool raw, err *e);

/* The schema of item i (prefixItems first), as a conjunction; *given: some part says so. */
static bool item_conj(const schema_compiler *c, const conj *k, uint32_t i, conj *out, err *e) {
    *out = (conj){ .n = 0 };
    for (int m = 0; m < k->n; m++) {
        const json *s = k->v[m].s, *prefix = json_get(s, "prefixItems"), *items = json_get(s, "items");
        if (prefix && !json_is(prefix, JSON_ARRAY)) return refuse(c, s, "prefixItems", "not a list", e);
        if (json_is(items, JSON_ARRAY)) return refuse(c, s, "items", "a list (write prefixItems)", e);
        const json *at = prefix && i < prefix->n ? &prefix->u.items[i] : items;
        if (at && !conj_add(c, out, at, 0, e)) return false;
    }
    return true;
}

static bool compile_array(schema_compiler *c, const conj *k, uint32_t *rule, err *e) {
    grammar *g = c->g;
    int64_t min = -1, max = -1;
    uint32_t prefix = 0;
    conj tail;
    if (!tightest(c, k, "minItems", true, &min, e) || !tightest(c, k, "maxItems", false, &max, e)) return false;
    for (int m = 0; m < k->n; m++) {
        const json *p = json_get(k->v[m].s, "prefixItems");
        if (p && p->n > prefix) prefix = p->n;
    }
    if (min < 0) min = 0;
    if (prefix > PREFIX_MAX) return refuse(c, k->v[0].s, "prefixItems", "too many", e);
    if (!item_conj(c, k, prefix, &tail, e)) return false;
    if (tail.never && (max < 0 || max > prefix)) max = prefix;
    if (prefix > 0 && min > prefix)
        return refuse(c, k->v[0].s, "minItems", "more than prefixItems are not supported", e);
    const uint32_t r = *rule = grammar_add_rule(g, min, max);
    if ((max >= 0 && min > max) || g->full) return true; /* nothing */
    const uint32_t in = grammar_add_state(g, r), first = grammar_add_state(g, r), end = grammar_add_state(g, r);
    uint32_t after = first; /* where the array may close or go on */
    grammar_add_bytes(g, g->rules[r].start, '[', '[', in);
    grammar_add_call(g, in, c->any.space, first);
    if (min == 0) grammar_add_bytes(g, first, ']', ']', end);
    for (uint32_t i = 0; i <= prefix && !g->full; i++) {
        conj item;
        uint32_t of;
        if (!item_conj(c, k, i, &item, e)) return false;
        if (item.never || max == 0) break; /* with more to come the array is impossible: nothing leads out */
        if (!compile(c, &of, &item, false, e)) return false;
        /* an item is counted before its comma: there is none where no more may come */
        uint32_t value = grammar_add_state(g, r);
        const uint32_t behind = grammar_add_state(g, r), close = grammar_add_state(g, r),
                       last = grammar_add_state(g, r);
        grammar_add_edge(g, after, EDGE_INC, value);
        if (i > 0) {
            const uint32_t comma = grammar_add_text(g, value, STR(","));
            value = grammar_add_state(g, r);
            if (g->full) break;
            grammar_add_call(g, comma, c->any.space, value);
        }
        if (g->full) break;
        grammar_add_call(g, value, of, behind);
        if (i == prefix || i + 1 >= min) grammar_add_edge(g, behind, EDGE_EXIT, close);
        grammar_add_call(g, close, c->any.space, last);
        grammar_add_bytes(g, last, ']', ']', end);
        after = behind;
        if (i == prefix) { /* and again */
            const uint32_t more = grammar_add_state(g, r), comma = grammar_add_state(g, r),
                           next = grammar_add_state(g, r);
            if (g->full) break;
            grammar_add_edge(g, behind, EDGE_INC, more);
            grammar_add_bytes(g, more, ',', ',', comma);
            grammar_add_call(g, comma, c->any.space, next);
            grammar_add_call(g, next, of, behind);
        }
    }
    if (!g->full) g->states[end].final = true;
    return true;
}

typedef struct property {
    str key;
    bool required;
    uint32_t rule;
} property;

static bool is_required(const conj *k, str key) {
    for (int i = 0; i < k->n; i++) {
        const json *r = json_get(k->v[i].s, "required");
        for (uint32_t m = 0; json_is(r, JSON_ARRAY) && m < r->n; m++)
            if (json_is(&r->u.items[m], JSON_STRING) && str_eq(json_str(&r->u.items[m]), key)) return true;
    }
    return false;
}

/* The schema of a property; names that a part does not declare come under its additionalProperties. */
static bool property_conj(const schema_compiler *c, const conj *k, str key, conj *out, err *e) {
    *out = (conj){ .n = 0 };
    for (int i = 0; i < k->n; i++) {
        const json *s = k->v[i].s, *own = json_get_str(json_get(s, "properties"), key);
        const json *more = json_get(s, "additionalProperties");
        if (own ? !conj_add(c, out, own, 0, e) : more && !conj_add(c, out, more, 0, e)) return false;
    }
    return true;
}

static bool add_property(property *v, size_t *n, const conj *k, str key) {
    for (size_t i = 0; i < *n; i++)
        if (str_eq(v[i].key, key)) return true;
    if (*n == PROPERTIES_MAX) return false;
    v[(*n)++] = (property){ .key = key, .required = is_required(k, key) };
    return true;
}

static bool collect(const schema_compiler *c, const conj *k, property *v, size_t *n, err *e) {
    for (int i = 0; i < k->n; i++) {
        const json *p = json_get(k->v[i].s, "properties");
        if (p && !json_is(p, JSON_OBJECT)) return refuse(c, k->v[i].s, "properties", "not an object", e);
        for (uint32_t m = 0; p && m < p->n; m++)
            if (!add_property(v, n, k, p->u.members[m].key)) return refuse(c, k->v[i].s, "properties", "too many", e);
    }
    for (int i = 0; i < k->n; i++) {
        const json *r = json_get(k->v[i].s, "required");
        if (r && !json_is(r, JSON_ARRAY)) return refuse(c, k->v[i].s, "required", "not a list", e);
        for (uint32_t m = 0; r && m < r->n; m++) {
            if (!json_is(&r->u.items[m], JSON_STRING))
                return refuse(c, k->v[i].s, "required", "not a list of names", e);
            if (!add_property(v, n, k, json_str(&r->u.items[m])))
                return refuse(c, k->v[i].s, "required", "too many", e);
        }
    }
    return true;
}

/* The rule of values of further properties; *rule 0: there are none. */
static bool compile_further(schema_compiler *c, const conj *k, bool declared, uint32_t *rule, err *e) {
    conj more = { .n = 0 };
    bool given = false;
    for (int i = 0; i < k->n; i++) {
        const json *a = json_get(k->v[i].s, "additionalProperties");
        if (!a) continue;
        given = true;
        if (!conj_add(c, &more, a, 0, e)) return false;
    }
    *rule = 0;
    if (more.never || (!given && declared)) return true;
    return compile(c, rule, &more, false, e);
}

static void add_key(schema_compiler *c, uint32_t from, str key, uint32_t rule, uint32_t to) {
    grammar *g = c->g;
    buf text = { 0 };
    json_write_str(&text, key);
    buf_byte(&text, ':');
    const uint32_t colon = grammar_add_text(g, from, buf_view(&text)),
                   value = grammar_add_state(g, g->states[from].rule);
    buf_free(&text);
    if (g->full) return;
    grammar_add_call(g, colon, c->any.space, value);
    grammar_add_call(g, value, rule, to);
}

static void object_states(schema_compiler *c, uint32_t r, const property *v, size_t n, uint32_t further) {
    grammar *g = c->g;
    /* next[i]: one of the properties from i on comes; done[i]: properties before i are settled, one was there */
    uint32_t *next = xcalloc(n + 1, sizeof *next), *done = xcalloc(n + 1, sizeof *done);
    const uint32_t in = grammar_add_state(g, r), first = grammar_add_state(g, r);
    for (size_t i = 0; i <= n; i++) done[i] = grammar_add_state(g, r), next[i] = grammar_add_state(g, r);
    const uint32_t last = grammar_add_state(g, r), end = grammar_add_state(g, r);
    if (!g->full) {
        g->states[end].final = true;
        grammar_add_bytes(g, g->rules[r].start, '{', '{', in);
        grammar_add_call(g, in, c->any.space, first);
        grammar_add_edge(g, first, EDGE_EPS, next[0]);
        grammar_add_bytes(g, last, '}', '}', end);
    }
    bool needed = false; /* a required one comes from here on */
    for (size_t i = n + 1; i-- > 0 && !g->full;) {
        if (i < n) {
            needed = needed || v[i].required;
            add_key(c, next[i], v[i].key, v[i].rule, done[i + 1]);
            if (!v[i].required) grammar_add_edge(g, next[i], EDGE_EPS, next[i + 1]);
        }
        const uint32_t comma = grammar_add_text(g, done[i], STR(","));
        if (g->full) break;
        grammar_add_call(g, comma, c->any.space, next[i]);
        if (!needed) grammar_add_call(g, done[i], c->any.space, last);
    }
    if (!needed && !g->full) grammar_add_bytes(g, first, '}', '}', end);
    if (further && !g->full) {
        dfa d = { 0 }, tags = { 0 }, both = { 0 };
        err unused = { 0 };
        str *names = xcalloc(n + 1, sizeof *names);
        for (size_t i = 0; i < n; i++) names[i] = v[i].key;
        dfa_not_names(&d, names, n);
        free(names);
        uint32_t key = 0;
        if (!c->tags) {
            key = grammar_dfa(g, &d, true);
        } else {
            dfa_no_tags(&tags);
            if (dfa_both(&both, &d, &tags, &unused)) key = grammar_dfa(g, &both, true);
        }
        dfa_free(&d), dfa_free(&tags), dfa_free(&both);
        if (unused.id) g->full = true;
        const uint32_t colon = grammar_add_state(g, r), value = grammar_add_state(g, r);
        if (!g->full) {
            grammar_add_call(g, next[n], key, colon);
            const uint32_t behind = grammar_add_text(g, colon, STR(":"));
            if (!g->full) {
                grammar_add_call(g, behind, c->any.space, value);
                grammar_add_call(g, value, further, done[n]);
            }
        }
    }
    free(next);
    free(done);
}

static bool compile_object(schema_compiler *c, const conj *k, uint32_t *rule, err *e) {
    property *v = xcalloc(PROPERTIES_MAX, sizeof *v);
    size_t n = 0, kept = 0;
    uint32_t further = 0;
    bool ok = collect(c, k, v, &n, e), never = false;
    for (size_t i = 0; i < n && ok; i++) {
        conj p;
        property x = v[i];
        ok = property_conj(c, k, x.key, &p, e);
        if (!ok) break;
        if (p.never && x.required) never = true;
        if (p.never) continue; /* it may not be there */
        ok = compile(c, &x.rule, &p, false, e);
        v[kept++] = x;
    }
    bool declared = false;
    for (int i = 0; i < k->n; i++) declared = declared || json_get(k->v[i].s, "properties");
    ok = ok && compile_further(c, k, declared, &further, e);
    if (ok) {
        *rule = grammar_add_rule(c->g, 0, 0);
        if (!never && !c->g->full) object_states(c, *rule, v, kept, further);
    }
    free(v);
    return ok;
}

/* ---- oneOf: can a value fit two branches? ---- */

static const json *constant_values(const conj *k, bool *list) {
    for (int i = 0; i < k->n; i++) {
        const json *v = json_get(k->v[i].s, "const");
        if (v) return *list = false, v;
        v = json_get(k->v[i].s, "enum");
        if (json_is(v, JSON_ARRAY)) return *list = true, v;
    }
    return NULL;
}

static bool values_apart(const conj *a, const conj *b) {
    bool la, lb;
    const json *x = constant_values(a, &la), *y = constant_values(b, &lb);
    if (!x || !y) return false;
    const uint32_t n = la ? x->n : 1, m = lb ? y->n : 1;
    if ((uint64_t)n * m > 10000) return false;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < m; k++)
            if (same_value(la ? &x->u.items[i] : x, lb ? &y->u.items[k] : y)) return false;
    return true;
}

static int value_types(const schema_compiler *c, const conj *k, err *e) {
    int t;
    bool list;
    if (!types_of(c, k, &t, e)) return 0;
    const json *v = constant_values(k, &list);
    if (!v) return t;
    int seen = 0;
    for (uint32_t i = 0; i < (list ? v->n : 1); i++) seen |= value_type(list ? &v->u.items[i] : v);
    return t & (seen | (seen & T_NUMBER ? T_INTEGER : 0));
}

/* Both need a property whose values differ. */
static bool properties_apart(const schema_compiler *c, const conj *a, const conj *b, err *e) {
    for (int i = 0; i < a->n; i++) {
        const json *p = json_get(a->v[i].s, "properties");
        for (uint32_t m = 0; json_is(p, JSON_OBJECT) && m < p->n; m++) {
            const str key = p->u.members[m].key;
            conj x, y;
            if (!is_required(a, key) || !is_required(b, key)) continue;
            if (!property_conj(c, a, key, &x, e) || !property_conj(c, b, key, &y, e)) return false;
            if (values_apart(&x, &y) || !(value_types(c, &x, e) & value_types(c, &y, e))) return true;
        }
    }
    return false;
}

static bool check_one_of(const schema_compiler *c, const json *s, const json *list, err *e) {
    for (uint32_t i = 0; i < list->n; i++)
        for (uint32_t k = i + 1; k < list->n; k++) {
            conj a = { .n = 0 }, b = { .n = 0 };
            if (!conj_add(c, &a, &list->u.items[i], 0, e) || !conj_add(c, &b, &list->u.items[k], 0, e)) return false;
            const int both = value_types(c, &a, e) & value_types(c, &b, e);
            if (e->id) return false;
            if (!both || a.never || b.never || values_apart(&a, &b)) continue;
            if (both == T_OBJECT && properties_apart(c, &a, &b, e)) continue;
            char text[128];
            snprintf(text, sizeof text, "branches %u and %u may fit the same value (use anyOf)", i, k);
            return e->id ? false : refuse(c, s, "oneOf", text, e);
        }
    return true;
}

/* ---- the choice of what a value is ---- */

/* Nothing but this list and annotations: every known keyword that constrains stands before title in known_keys. */
static bool only_branches(const json *s, int bit) {
    for (size_t k = 0; !str_is(str_of(known_keys[k]), "title"); k++) {
        const bool this = str_is(str_of(known_keys[k]), bit == 1 ? "anyOf" : "oneOf");
        if (!this && !strstr(known_keys[k], "def") && json_get(s, known_keys[k])) return false;
    }
    return true;
}

/* The first anyOf or oneOf that is not followed yet becomes alternatives. */
static bool compile_branches(schema_compiler *c, const conj *k, bool raw, uint32_t start, uint32_t end, bool *done,
                             err *e) {
    *done = false;
    for (int i = 0; i < k->n; i++)
        for (int bit = 1; bit <= 2; bit++) {
            const json *s = k->v[i].s, *list = json_get(s, bit == 1 ? "anyOf" : "oneOf");
            if (!list || k->v[i].used & bit) continue;
            if (!json_is(list, JSON_ARRAY) || list->n == 0 || list->n > BRANCHES_MAX)
                return refuse(c, s, bit == 1 ? "anyOf" : "oneOf", "not a list of 1 to 400 schemas", e);
            if (bit == 2 && !check_one_of(c, s, list, e)) return false;
            *done = true;
            for (uint32_t m = 0; m < list->n; m++) {
                conj branch = *k;
                uint32_t rule;
                branch.v[i].used |= (uint8_t)bit;
                if (only_branches(s, bit)) branch.v[i] = branch.v[--branch.n]; /* it says nothing more */
                if (!conj_add(c, &branch, &list->u.items[m], 0, e)) return false;
                if (branch.never) continue;
                if (!compile(c, &rule, &branch, raw, e)) return false;
                grammar_add_call(c->g, start, rule, end);
            }
            return true;
        }
    return true;
}

static bool is_free(const conj *k) {
    static const char *const keys[] = { "type", "enum", "const", "nullable" };
    for (int i = 0; i < k->n; i++)
        if (has_any(k->v[i].s, keys, 4) || implied_types(k->v[i].s) != T_ALL) return false;
    return true;
}

/* A JSON value of a type, and for a parameter its end behind it. */
static void add_typed(schema_compiler *c, uint32_t start, uint32_t rule, bool raw, uint32_t end) {
    grammar *g = c->g;
    if (!raw) {
        grammar_add_call(g, start, rule, end);
        return;
    }
    const uint32_t behind = grammar_add_state(g, g->states[start].rule);
    grammar_add_call(g, start, rule, behind);
    grammar_add_edge(g, grammar_add_text(g, behind, STR("\n</parameter>")), EDGE_EPS, end);
}

static void add_words(schema_compiler *c, uint32_t start, int types, bool raw, uint32_t end) {
    static const char *const words[] = { "true", "false", "null" };
    for (int i = 0; i < 3; i++) {
        if (!(types & (i < 2 ? T_BOOLEAN : T_NULL))) continue;
        const uint32_t to = grammar_add_text(c->g, grammar_add_text(c->g, start, str_of(words[i])),
                                             raw ? STR("\n</parameter>") : STR(""));
        grammar_add_edge(c->g, to, EDGE_EPS, end);
    }
}

static bool compile_types(schema_compiler *c, const conj *k, bool raw, uint32_t start, uint32_t end, err *e) {
    int types;
    uint32_t rule;
    if (!types_of(c, k, &types, e)) return false;
    if (is_free(k)) {
        if (raw) return compile_string(c, k, true, &rule, e) && (grammar_add_call(c->g, start, rule, end), true);
        grammar_add_call(c->g, start, c->any.value, end);
        return true;
    }
    add_words(c, start, types, raw, end);
    if (types & T_STRING) {
        if (!compile_string(c, k, raw, &rule, e)) return false;
        grammar_add_call(c->g, start, rule, end);
    }
    if (types & (T_INTEGER | T_NUMBER)) {
        if (!compile_number(c, k, !(types & T_NUMBER), &rule, e)) return false;
        add_typed(c, start, rule, raw, end);
    }
    if (types & T_ARRAY) {
        if (!compile_array(c, k, &rule, e)) return false;
        add_typed(c, start, rule, raw, end);
    }
    if (types & T_OBJECT) {
        if (!compile_object(c, k, &rule, e)) return false;
        add_typed(c, start, rule, raw, end);
    }
    return true;
}

static bool same_conj(const conj *a, const conj *b) {
    if (a->n != b->n || a->never != b->never) return false;
    for (int i = 0; i < a->n; i++)
        if (a->v[i].s != b->v[i].s || a->v[i].used != b->v[i].used) return false;
    return true;
}

static uint32_t *slot_of(schema_compiler *c, const conj *k, bool raw) {
    uint64_t h = raw;
    for (int i = 0; i < k->n; i++) h = (h ^ (uintptr_t)k->v[i].s ^ k->v[i].used) * 0x9e3779b97f4a7c15u;
    return &c->table[(h >> 40) % CONJ_TABLE];
}

static bool compile_new(schema_compiler *c, uint32_t rule, const conj *k, bool raw, err *e) {
    grammar *g = c->g;
    const uint32_t end = grammar_add_state(g, rule);
    if (g->full || k->never) return true;
    const uint32_t start = g->rules[rule].start;
    g->states[end].final = true;
    for (int i = 0; i < k->n; i++)
        if (json_get(k->v[i].s, "enum") || json_get(k->v[i].s, "const"))
            return compile_values(c, k, k->v[i].s, raw, start, end, e);
    bool done;
    return compile_branches(c, k, raw, start, end, &done, e) && (done || compile_types(c, k, raw, start, end, e));
}

static bool compile(schema_compiler *c, uint32_t *rule, const conj *k, bool raw, err *e) {
    uint32_t *slot = slot_of(c, k, raw);
    for (uint32_t i = *slot; i; i = c->known[i - 1].next)
        if (c->known[i - 1].raw == raw && same_conj(&c->known[i - 1].c, k)) return *rule = c->known[i - 1].rule, true;
    *rule = grammar_add_rule(c->g, 0, 0);
    if (c->g->full)
        return fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "grammar: too many rules, states or edges (simplify it)");
    if (c->depth > DEPTH_MAX) return fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "schema: nested too deep");
    if (c->n_known == c->cap_known) {
        c->cap_known = c->cap_known ? 2 * c->cap_known : 64;
        c->known = xrealloc(c->known, c->cap_known * sizeof *c->known);
    }
    c->known[c->n_known] = (known){ .c = *k, .raw = raw, .rule = *rule, .next = *slot };
    *slot = ++c->n_known;
    c->depth++;
    const bool ok = compile_new(c, *rule, k, raw, e);
    c->depth--;
    return ok;
}

schema_compiler *schema_begin(grammar *g, const json *root, bool tags) {
    schema_compiler *c = xcalloc(1, sizeof *c);
    c->g = g;
    c->root = root;
    c->tags = tags;
    grammar_json(g, &c->any, tags);
    return c;
}

void schema_free(schema_compiler *c) {
    if (!c) return;
    free(c->known);
    free(c);
}

bool schema_rule(schema_compiler *c, uint32_t *rule, const json *schema, bool raw, err *e) {
    conj k = { .n = 0 };
    return conj_add(c, &k, schema, 0, e) && compile(c, rule, &k, raw, e);
}

bool grammar_json_schema(grammar **out, const json *schema, const grammar_options *o, err *e) {
    grammar *g = grammar_begin();
    schema_compiler *c = schema_begin(g, schema, false);
    uint32_t rule = 0;
    const bool ok = schema_rule(c, &rule, schema, false, e);
    schema_free(c);
    *out = g;
    if (ok) return grammar_finish(out, rule, o, e);
    grammar_free(g);
    *out = NULL;
    return false;
}
