/* Values: equality, order, hashing, dicts, conversion from JSON. Python's rules throughout. */
#include <math.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

enum { VALUE_MAX_DEPTH = 300 }; /* nesting that comparison and hashing follow */
enum { UNORDERED = 2 };         /* a comparison with NaN */

const val jinja_no_items[1] = { { .type = V_MISSING } };

const char *type_name(const val *v) {
    switch ((val_type)v->type) {
    case V_MISSING:
    case V_UNDEF: return "Undefined";
    case V_NONE: return "NoneType";
    case V_BOOL: return "bool";
    case V_INT:
    case V_BIG: return "int";
    case V_FLOAT: return "float";
    case V_STR: return v->flag & VF_MARKUP ? "Markup" : "str";
    case V_LIST: return "list";
    case V_TUPLE: return "tuple";
    case V_DICT: return "dict";
    case V_VIEW: return v->flag == VIEW_KEYS ? "dict_keys" : v->flag == VIEW_VALUES ? "dict_values" : "dict_items";
    case V_RANGE: return "range";
    case V_NAMESPACE: return "Namespace";
    case V_ITER: return "generator";
    case V_LOOP: return "LoopContext";
    case V_MACRO: return "Macro";
    case V_FUNC: return "function";
    case V_METHOD: return "builtin_function_or_method";
    case V_CYCLER: return "Cycler";
    case V_JOINER: return "Joiner";
    }
    return "object";
}

bool v_copy_str(run *r, str s, val *out) {
    char *p = rt_take(r, s.n + 1, 1);
    if (!p) return false;
    if (s.n) memcpy(p, s.p, s.n);
    p[s.n] = 0;
    *out = v_str((str){ p, s.n });
    return true;
}

static bool make_undef(run *r, val *out, undef_info info) {
    undef_info *u = rt_take(r, 1, sizeof *u);
    if (!u) return false;
    *u = info;
    *out = (val){ .type = V_UNDEF, .u.undef = u };
    return true;
}

bool v_undef(run *r, val *out, str name) { return make_undef(r, out, (undef_info){ .name = v_str(name) }); }
bool v_undef_hint(run *r, val *out, const char *hint) {
    return make_undef(r, out, (undef_info){ .hint = str_of(hint) });
}

bool undef_fail(run *r, const val *v) {
    const undef_info *u = v->u.undef;
    if (u->hint.n) return rt_fail(r, "UndefinedError: " STR_FMT, STR_ARG(u->hint));
    if (u->unsafe)
        return rt_fail(r, "SecurityError: access to attribute '" STR_FMT "' of '%s' object is unsafe",
                       STR_ARG(s_of(&u->name)), u->obj);
    if (!u->obj) return rt_fail(r, "UndefinedError: '" STR_FMT "' is undefined", STR_ARG(s_of(&u->name)));
    const bool attr = u->name.type == V_STR;
    const size_t mark = r->tmp.n;
    if (!v_write_str(r, &r->tmp, &u->name)) return false;
    rt_fail(r,
            attr ? "UndefinedError: '%s object' has no attribute '%s'" : "UndefinedError: %s object has no element %s",
            u->obj, r->tmp.p ? r->tmp.p + mark : "");
    r->tmp.n = mark;
    return false;
}

bool v_truth(const val *v) {
    switch ((val_type)v->type) {
    case V_MISSING:
    case V_UNDEF:
    case V_NONE: return false;
    case V_BOOL:
    case V_INT: return v->u.i != 0;
    case V_FLOAT: return v->u.f != 0;
    case V_STR:
    case V_LIST:
    case V_TUPLE: return v->n != 0;
    case V_DICT:
    case V_VIEW: return v->u.d->n != 0;
    case V_RANGE: return v->u.range->n != 0;
    default: return true;
    }
}

static bool is_number(const val *v) { return is_intlike(v) || v->type == V_FLOAT || v->type == V_BIG; }

static double to_double(const val *v) {
    if (v->type == V_FLOAT) return v->u.f;
    if (v->type == V_BIG) {
        double d = 0;
        return s_parse_float(s_of(v), &d) ? d : 0;
    }
    return (double)v->u.i;
}

/* -1, 0, 1, or UNORDERED. Exact also between int64 and double. */
static int compare_numbers(const val *a, const val *b) {
    if (is_intlike(a) && is_intlike(b)) return (a->u.i > b->u.i) - (a->u.i < b->u.i);
    if (a->type == V_BIG && b->type == V_BIG) {
        const bool na = *a->u.s == '-', nb = *b->u.s == '-';
        if (na != nb) return na ? -1 : 1;
        int c = (a->n > b->n) - (a->n < b->n);
        if (!c) c = str_cmp(s_of(a), s_of(b));
        c = (c > 0) - (c < 0);
        return na ? -c : c;
    }
    if (a->type == V_BIG && is_intlike(b)) return *a->u.s == '-' ? -1 : 1;
    if (b->type == V_BIG && is_intlike(a)) return *b->u.s == '-' ? 1 : -1;
    const double x = to_double(a), y = to_double(b);
    if (isnan(x) || isnan(y)) return UNORDERED;
    if (is_intlike(a) && fabs(y) < 9.3e18) { /* compare the integer with the integer part first */
        const double whole = floor(y);
        if (whole >= 9223372036854775808.0) return -1;
        if (whole < -9223372036854775808.0) return 1;
        const int64_t w = (int64_t)whole;
        return a->u.i != w ? (a->u.i > w) - (a->u.i < w) : y > whole ? -1 : 0;
    }
    if (is_intlike(b)) {
        const int c = compare_numbers(b, a);
        return c == UNORDERED ? c : -c;
    }
    return (x > y) - (x < y);
}

bool v_same(const val *a, const val *b) {
    if (a->type != b->type) return false;
    switch ((val_type)a->type) {
    case V_NONE: return true;
    case V_BOOL:
    case V_INT: return a->u.i == b->u.i;
    case V_FLOAT: return a->u.f == b->u.f;
    case V_BIG:
    case V_STR: return str_eq(s_of(a), s_of(b));
    case V_LIST:
    case V_TUPLE: return a->u.v == b->u.v && a->n == b->n && (a->n || a->type == V_TUPLE);
    case V_FUNC: return a->n == b->n;
    default: return a->u.v == b->u.v;
    }
}

static bool equal_at(run *r, const val *a, const val *b, bool *out, int depth);

static bool equal_seq(run *r, const val *a, const val *b, bool *out, int depth) {
    *out = a->n == b->n;
    if (a->u.v == b->u.v) return true;
    for (size_t i = 0; i < a->n && *out; i++)
        if (!equal_at(r, &a->u.v[i], &b->u.v[i], out, depth)) return false;
    return true;
}

static bool equal_dict(run *r, const dict *a, const dict *b, bool *out, int depth) {
    *out = a->n == b->n;
    if (a == b) return true;
    for (size_t i = 0; i < a->n && *out; i++) {
        const val *other;
        if (!dict_find(r, b, &a->e[i].key, &other)) return false;
        if (!other)
            *out = false;
        else if (!equal_at(r, &a->e[i].value, other, out, depth))
            return false;
    }
    return true;
}

static bool equal_at(run *r, const val *a, const val *b, bool *out, int depth) {
    if (!rt_work(r, 1)) return false;
    if (depth > VALUE_MAX_DEPTH) return rt_limit(r, "values nested too deeply to compare");
    if (is_number(a) && is_number(b)) {
        *out = compare_numbers(a, b) == 0;
        return true;
    }
    if (a->type != b->type) {
        *out = false;
        return true;
    }
    switch ((val_type)a->type) {
    case V_UNDEF: *out = true; return true;
    case V_STR: *out = str_eq(s_of(a), s_of(b)); return rt_work(r, a->n / 64);
    case V_LIST:
    case V_TUPLE: return equal_seq(r, a, b, out, depth + 1);
    case V_DICT: return equal_dict(r, a->u.d, b->u.d, out, depth + 1);
    case V_RANGE:
        *out = a->u.range->n == b->u.range->n &&
               (a->u.range->n == 0 || (a->u.range->start == b->u.range->start &&
                                       (a->u.range->n == 1 || a->u.range->step == b->u.range->step)));
        return true;
    case V_VIEW:
        if (a->flag == VIEW_VALUES || a->flag != b->flag) {
            *out = a->u.d == b->u.d && a->flag == b->flag;
            return true;
        }
        if (a->flag == VIEW_ITEMS) return equal_dict(r, a->u.d, b->u.d, out, depth + 1);
        *out = a->u.d->n == b->u.d->n;
        for (size_t i = 0; i < a->u.d->n && *out; i++) {
            const val *other;
            if (!dict_find(r, b->u.d, &a->u.d->e[i].key, &other)) return false;
            *out = other != NULL;
        }
        return true;
    default: *out = v_same(a, b); return true;
    }
}

bool v_equal(run *r, const val *a, const val *b, bool *out) { return equal_at(r, a, b, out, 0); }

static bool holds(int op, int c) {
    if (c == UNORDERED) return false;
    switch (op) {
    case C_LT: return c < 0;
    case C_LE: return c <= 0;
    case C_GT: return c > 0;
    default: return c >= 0;
    }
}

/* Views of keys and items are sets: `<` asks for a proper subset. */
static bool order_views(run *r, int op, const val *a, const val *b, bool *out) {
    const bool less = op == C_LT || op == C_LE, strict = op == C_LT || op == C_GT;
    const val *small = less ? a : b, *large = less ? b : a;
    iter it;
    val x;
    bool more;
    *out = strict ? small->u.d->n < large->u.d->n : small->u.d->n <= large->u.d->n;
    if (!iter_begin(r, &it, small)) return false;
    while (*out) {
        if (!iter_next(r, &it, &x, &more)) return false;
        if (!more) break;
        if (!v_contains(r, &x, large, out)) return false;
    }
    return true;
}

static bool order_at(run *r, int op, const val *a, const val *b, bool *out, int depth) {
    static const char *const text[] = { "==", "!=", "<", "<=", ">", ">=" };
    if (!rt_work(r, 1)) return false;
    if (depth > VALUE_MAX_DEPTH) return rt_limit(r, "values nested too deeply to compare");
    if (a->type == V_UNDEF) return undef_fail(r, a);
    if (b->type == V_UNDEF) return undef_fail(r, b);
    if (is_number(a) && is_number(b)) {
        *out = holds(op, compare_numbers(a, b));
        return true;
    }
    if (a->type == V_STR && b->type == V_STR) { /* byte order of UTF-8 is code point order */
        const int c = str_cmp(s_of(a), s_of(b));
        *out = holds(op, (c > 0) - (c < 0));
        return rt_work(r, (a->n < b->n ? a->n : b->n) / 64);
    }
    if (is_seq(a) && a->type == b->type) {
        const size_t n = a->n < b->n ? a->n : b->n;
        for (size_t i = 0; i < n; i++) {
            bool same = v_same(&a->u.v[i], &b->u.v[i]);
            if (!same && !equal_at(r, &a->u.v[i], &b->u.v[i], &same, depth + 1)) return false;
            if (!same) return order_at(r, op, &a->u.v[i], &b->u.v[i], out, depth + 1);
        }
        *out = holds(op, (a->n > b->n) - (a->n < b->n));
        return true;
    }
    if (a->type == V_VIEW && b->type == V_VIEW && a->flag != VIEW_VALUES && b->flag != VIEW_VALUES)
        return order_views(r, op, a, b, out);
    return rt_fail(r, "TypeError: '%s' not supported between instances of '%s' and '%s'", text[op], type_name(a),
                   type_name(b));
}

bool v_order(run *r, int op, const val *a, const val *b, bool *out) { return order_at(r, op, a, b, out, 0); }

bool v_contains(run *r, const val *item, const val *in, bool *out) {
    *out = false;
    switch ((val_type)in->type) {
    case V_STR:
        if (item->type != V_STR)
            return rt_fail(r, "TypeError: 'in <string>' requires string as left operand, not %s", type_name(item));
        *out = str_find(s_of(in), s_of(item)) >= 0;
        return rt_work(r, in->n / 32);
    case V_DICT: {
        const val *found;
        if (!dict_find(r, in->u.d, item, &found)) return false;
        *out = found != NULL;
        return true;
    }
    case V_VIEW:
        if (in->flag == VIEW_KEYS) {
            const val keys = { .type = V_DICT, .u.d = in->u.d };
            return v_contains(r, item, &keys, out);
        }
        break;
    default: break;
    }
    if (!iter_is_iterable(in)) return rt_fail(r, "TypeError: argument of type '%s' is not iterable", type_name(in));
    iter it;
    bool more;
    val x;
    if (!iter_begin(r, &it, in)) return false;
    while (!*out) {
        if (!iter_next(r, &it, &x, &more)) return false;
        if (!more) break;
        *out = v_same(&x, item);
        if (!*out && !v_equal(r, &x, item, out)) return false;
    }
    return true;
}

bool v_len(run *r, const val *v, size_t *out) {
    switch ((val_type)v->type) {
    case V_UNDEF: *out = 0; return true;
    case V_STR: *out = uni_len(s_of(v)); return rt_work(r, v->n / 64);
    case V_LIST:
    case V_TUPLE: *out = v->n; return true;
    case V_DICT:
    case V_VIEW: *out = v->u.d->n; return true;
    case V_RANGE: *out = (size_t)v->u.range->n; return true;
    case V_LOOP: return loop_length(r, v->u.loop, out);
    default: return rt_fail(r, "TypeError: object of type '%s' has no len()", type_name(v));
    }
}

bool as_index(run *r, const val *v, int64_t *out) {
    if (v->type == V_UNDEF) return undef_fail(r, v);
    if (!is_intlike(v)) return rt_fail(r, "TypeError: '%s' object cannot be interpreted as an integer", type_name(v));
    *out = v->u.i;
    return true;
}

/* ---- dicts ---- */

static uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    return x;
}

static bool hash_at(run *r, const val *v, uint64_t *out, int depth) {
    switch ((val_type)v->type) {
    case V_STR: *out = str_hash(s_of(v)); return rt_work(r, 1 + v->n / 64);
    case V_BIG: *out = str_hash(s_of(v)); return true;
    case V_BOOL:
    case V_INT: *out = mix((uint64_t)v->u.i); return true;
    case V_FLOAT: /* equal numbers hash alike */
        if (v->u.f >= -9.2e18 && v->u.f <= 9.2e18 && v->u.f == floor(v->u.f))
            *out = mix((uint64_t)(int64_t)v->u.f);
        else
            *out = 77;
        return true;
    case V_TUPLE: {
        uint64_t h = 3;
        if (depth > VALUE_MAX_DEPTH) return rt_limit(r, "values nested too deeply to hash");
        for (size_t i = 0; i < v->n; i++) {
            uint64_t one;
            if (!hash_at(r, &v->u.v[i], &one, depth + 1)) return false;
            h = mix(h * 31 + one);
        }
        *out = h;
        return rt_work(r, v->n);
    }
    case V_VIEW:
        if (v->flag == VIEW_VALUES) {
            *out = mix((uint64_t)(uintptr_t)v->u.d);
            return true;
        } /* fall through */
    case V_LIST:
    case V_DICT: return rt_fail(r, "TypeError: unhashable type: '%s'", type_name(v));
    case V_NONE:
    case V_UNDEF: *out = v->type; return true;
    case V_FUNC: *out = v->n; return true;
    default: *out = mix((uint64_t)(uintptr_t)v->u.v); return true;
    }
}

bool v_hash(run *r, const val *v, uint64_t *out) { return hash_at(r, v, out, 0); }

dict *dict_new(run *r, size_t cap) {
    dict *d = rt_take(r, 1, sizeof *d);
    if (!d) return NULL;
    *d = (dict){ .cap = cap };
    return !cap || (d->e = rt_take(r, cap, sizeof *d->e)) ? d : NULL;
}

static bool index_build(run *r, dict *d) {
    size_t size = 32;
    while (size < d->n * 4) size *= 2;
    uint32_t *index = rt_take(r, size, sizeof *index);
    if (!index) return false;
    memset(index, 0, size * sizeof *index);
    for (size_t i = 0; i < d->n; i++) {
        uint64_t h;
        if (!v_hash(r, &d->e[i].key, &h)) return false;
        size_t at = h & (size - 1), tries = 0;
        while (index[at]) {
            at = (at + 1) & (size - 1);
            tries++;
        }
        index[at] = (uint32_t)i + 1;
        if (!rt_work(r, 1 + tries)) return false;
    }
    d->index = index;
    d->mask = size - 1;
    return true;
}

/* Position of key, or n; *slot: where its index entry belongs. */
static bool dict_at(run *r, const dict *d, const val *key, size_t *at, size_t *slot) {
    uint64_t h;
    bool same;
    if (!v_hash(r, key, &h)) return false;
    if (!d->index) {
        for (*at = 0; *at < d->n; ++*at) {
            const val *k = &d->e[*at].key;
            if (k->type == V_STR && key->type == V_STR)
                same = str_eq(s_of(k), s_of(key));
            else if (!v_equal(r, k, key, &same))
                return false;
            if (same) break;
        }
        return true;
    }
    size_t s = h & d->mask;
    for (; d->index[s]; s = (s + 1) & d->mask) {
        const val *k = &d->e[d->index[s] - 1].key;
        if (k->type == V_STR && key->type == V_STR)
            same = str_eq(s_of(k), s_of(key));
        else if (!v_equal(r, k, key, &same))
            return false;
        if (same) {
            *at = d->index[s] - 1;
            return true;
        }
        if (!rt_work(r, 1)) return false;
    }
    *at = d->n;
    *slot = s;
    return true;
}

bool dict_find(run *r, const dict *d, const val *key, const val **out) {
    size_t at, slot;
    if (!dict_at(r, d, key, &at, &slot)) return false;
    *out = at < d->n ? &d->e[at].value : NULL;
    return true;
}

bool dict_get_str(run *r, const dict *d, str key, const val **out) {
    const val k = v_str(key);
    return dict_find(r, d, &k, out);
}

bool dict_put(run *r, dict *d, const val *key, const val *v) {
    size_t at, slot = 0;
    if (!dict_at(r, d, key, &at, &slot)) return false;
    if (at < d->n) {
        d->e[at].value = *v;
        return true;
    }
    if (d->n == d->cap) {
        const size_t cap = d->cap ? d->cap * 2 : 4;
        dict_entry *e = rt_take(r, cap, sizeof *e);
        if (!e) return false;
        if (d->n) memcpy(e, d->e, d->n * sizeof *e);
        d->e = e;
        d->cap = cap;
    }
    d->e[d->n++] = (dict_entry){ *key, *v };
    if (d->n > 8 && (!d->index || d->n * 2 > d->mask)) return index_build(r, d);
    if (d->index) d->index[slot] = (uint32_t)d->n;
    return true;
}

bool vec_add(run *r, vec *a, const val *v) {
    if (a->n == a->cap) {
        const size_t cap = a->cap ? a->cap * 2 : 8;
        val *p = rt_take(r, cap, sizeof *p);
        if (!p) return false;
        if (a->n) memcpy(p, a->v, a->n * sizeof *p);
        a->v = p;
        a->cap = cap;
    }
    a->v[a->n++] = *v;
    return true;
}

/* ---- from JSON ---- */

static bool number_from_json(run *r, const json *j, val *out) {
    (void)r;
    const str text = { j->u.s, j->n };
    for (size_t i = 0; i < text.n; i++)
        if (text.p[i] == '.' || text.p[i] == 'e' || text.p[i] == 'E') {
            *out = v_float(json_double(j));
            return true;
        }
    *out = str_is(text, "-0") ? v_int(0) : (val){ .type = V_BIG, .n = text.n, .u.s = text.p };
    return true;
}

/* Recursion is bounded: json_parse limits the depth of documents. */
bool v_from_json(run *r, const json *j, val *out) {
    if (!rt_work(r, 1)) return false;
    switch ((json_type)j->type) {
    case JSON_NULL: *out = v_none(); return true;
    case JSON_FALSE: *out = v_bool(false); return true;
    case JSON_TRUE: *out = v_bool(true); return true;
    case JSON_INT: *out = v_int(j->u.i); return true;
    case JSON_REAL: return number_from_json(r, j, out);
    case JSON_STRING: *out = v_str(json_str(j)); return true;
    case JSON_ARRAY: {
        val *v = rt_take(r, j->n, sizeof *v);
        if (!v) return false;
        for (uint32_t i = 0; i < j->n; i++)
            if (!v_from_json(r, &j->u.items[i], &v[i])) return false;
        *out = v_seq(V_LIST, v, j->n);
        return true;
    }
    case JSON_OBJECT: {
        dict *d = dict_new(r, j->n);
        if (!d) return false;
        for (uint32_t i = 0; i < j->n; i++) {
            val k = v_str(j->u.members[i].key), v;
            if (!v_from_json(r, &j->u.members[i].value, &v) || !dict_put(r, d, &k, &v)) return false;
        }
        *out = (val){ .type = V_DICT, .u.d = d };
        return true;
    }
    }
    return rt_fail(r, "unknown JSON value");
}
