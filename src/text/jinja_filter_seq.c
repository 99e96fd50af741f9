/* Filters on sequences and mappings: map, select, sort and their kin. */
#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

static bool put(val *out, val v) {
    *out = v;
    return true;
}
static const val *arg(const args *a, size_t i) { return &a->pos[i]; }
static bool arg_true(const args *a, size_t i) { return is_given(arg(a, i)) && v_truth(arg(a, i)); }

/* ---- attribute paths: "a.b.0" ---- */

static bool path_part(run *r, str s, val *out) {
    bool digits = s.n > 0;
    for (const char *p = s.p, *end = s.p + s.n; p < end && digits;) digits = uni_digit(uni_next(&p, end));
    *out = v_str(s);
    return !digits || s_parse_int(r, s, 10, out) || rt_fail(r, "ValueError: invalid attribute");
}

bool path_parse(run *r, const val *attr, const val **path, size_t *n) {
    vec v = { 0 };
    val part;
    *n = 0;
    *path = NULL;
    if (!is_given(attr) || attr->type == V_NONE) return true;
    if (attr->type != V_STR) {
        if (!vec_add(r, &v, attr)) return false;
    } else {
        str s = s_of(attr);
        for (;;) {
            const ptrdiff_t dot = str_find(s, STR("."));
            if (!path_part(r, dot < 0 ? s : (str){ s.p, (size_t)dot }, &part) || !vec_add(r, &v, &part)) return false;
            if (dot < 0) break;
            s = str_skip(s, (size_t)dot + 1);
        }
    }
    *path = v.v;
    *n = v.n;
    return true;
}

bool path_get(run *r, const val *item, const val *path, size_t n, const val *dflt, val *out) {
    *out = *item;
    for (size_t i = 0; i < n; i++) {
        const val at = *out;
        if (!op_item(r, &at, &path[i], out)) return false;
        if (dflt && out->type == V_UNDEF) *out = *dflt;
    }
    return true;
}

/* Key of an item for sorting and comparing: the attribute, strings in lower case unless asked otherwise. */
static bool key_of(run *r, const val *item, const val *path, size_t n, const val *dflt, bool exact, val *out) {
    if (!path_get(r, item, path, n, dflt, out)) return false;
    return exact || out->type != V_STR || s_case(r, s_of(out), CASE_LOWER, out);
}

bool mapper_apply(run *r, const mapper *m, const val *item, val *out) {
    val x = *item;
    bool yes;
    if (m->has_attr && !path_get(r, item, m->path, m->n_path, m->has_default ? &m->dflt : NULL, &x)) return false;
    if (m->unknown) return rt_fail(r, "no %s named '" STR_FMT "'", m->unknown, STR_ARG(m->unknown_name));
    if (m->filter) return filter_apply(r, m->filter, &x, &m->a, out);
    if (!m->test) return put(out, x);
    if (!test_apply(r, m->test, &x, &m->a, &yes)) return false;
    return put(out, v_bool(yes));
}

/* Arguments outlive the call inside a generator; eval_args made them in the arena, so keeping them is safe. */
static bool map_spec(run *r, const args *a, mapper *m) {
    if (a->n == 0) {
        const val *attribute = NULL;
        for (size_t i = 0; i < a->n_kw; i++) {
            if (str_is(a->kw[i].name, "attribute"))
                attribute = &a->kw[i].v;
            else if (str_is(a->kw[i].name, "default")) {
                m->has_default = a->kw[i].v.type != V_NONE;
                m->dflt = a->kw[i].v;
            } else if (attribute || i + 1 < a->n_kw) {
                return rt_fail(r, "unexpected keyword argument '" STR_FMT "'", STR_ARG(a->kw[i].name));
            }
        }
        if (!attribute) return rt_fail(r, "map requires a filter argument");
        m->has_attr = true;
        return path_parse(r, attribute, &m->path, &m->n_path);
    }
    m->a = (args){ a->pos + 1, a->n - 1, a->kw, a->n_kw };
    m->filter = a->pos[0].type == V_STR ? filter_find(s_of(&a->pos[0])) : NULL;
    if (!m->filter) {
        m->unknown = "filter";
        m->unknown_name = a->pos[0].type == V_STR ? s_of(&a->pos[0]) : STR("?");
    }
    return true;
}

static bool new_generator(run *r, iter_kind kind, const val *x, const char *label, mapper *m, bool negate, val *out) {
    iter *it;
    if (!iter_new(r, kind, x, label, &it, out)) return false;
    it->map = m;
    it->negate = negate;
    return true;
}

static mapper *mapper_new(run *r) {
    mapper *m = rt_take(r, 1, sizeof *m);
    if (m) memset(m, 0, sizeof *m);
    return m;
}

/* jinja2 looks at the arguments of map and select only when there is something to apply them to. */
static bool nothing(run *r, const char *label, val *out) {
    iter *it;
    return iter_new(r, I_EMPTY, NULL, label, &it, out);
}

static bool f_map(run *r, const val *x, const args *a, val *out) {
    if (!v_truth(x)) return nothing(r, "generator object sync_do_map", out);
    mapper *m = mapper_new(r);
    return m && map_spec(r, a, m) && new_generator(r, I_MAP, x, "generator object sync_do_map", m, false, out);
}

static bool select_any(run *r, const val *x, const args *a, bool attr, bool negate, val *out) {
    if (!v_truth(x)) return nothing(r, "generator object select_or_reject", out);
    mapper *m = mapper_new(r);
    size_t off = 0;
    if (!m) return false;
    if (attr) {
        if (!a->n) return rt_fail(r, "missing parameter for attribute name");
        m->has_attr = true;
        if (!path_parse(r, &a->pos[0], &m->path, &m->n_path)) return false;
        off = 1;
    }
    if (a->n > off) {
        const val *name = &a->pos[off];
        m->test = name->type == V_STR ? test_find(s_of(name)) : NULL;
        m->a = (args){ a->pos + off + 1, a->n - off - 1, a->kw, a->n_kw };
        if (!m->test) {
            m->unknown = "test";
            m->unknown_name = name->type == V_STR ? s_of(name) : STR("?");
        }
    }
    return new_generator(r, I_SELECT, x, "generator object select_or_reject", m, negate, out);
}
static bool f_select(run *r, const val *x, const args *a, val *out) { return select_any(r, x, a, false, false, out); }
static bool f_reject(run *r, const val *x, const args *a, val *out) { return select_any(r, x, a, false, true, out); }
static bool f_selectattr(run *r, const val *x, const args *a, val *out) {
    return select_any(r, x, a, true, false, out);
}
static bool f_rejectattr(run *r, const val *x, const args *a, val *out) { return select_any(r, x, a, true, true, out); }

static bool f_unique(run *r, const val *x, const args *a, val *out) {
    mapper *m = mapper_new(r);
    if (!m || !path_parse(r, arg(a, 1), &m->path, &m->n_path)) return false;
    if (!new_generator(r, I_UNIQUE, x, "generator object sync_do_unique", m, false, out)) return false;
    out->u.it->fold = !arg_true(a, 0);
    return true;
}

/* ---- sorting: stable, by keys made once ---- */

typedef struct keyed {
    val key, item;
} keyed;

static bool sort_keyed(run *r, keyed *v, size_t n, bool reverse) {
    for (size_t width = 1; width < n; width *= 2) {
        keyed *t = rt_take(r, n, sizeof *t);
        if (!t) return false;
        for (size_t lo = 0; lo < n; lo += 2 * width) {
            const size_t mid = lo + width < n ? lo + width : n, hi = mid + width < n ? mid + width : n;
            for (size_t i = lo, j = mid, k = lo; k < hi; k++) {
                bool right = i >= mid;
                if (!right && j < hi) {
                    const val *a = reverse ? &v[i].key : &v[j].key, *b = reverse ? &v[j].key : &v[i].key;
                    if (!v_order(r, C_LT, a, b, &right)) return false;
                }
                t[k] = right ? v[j++] : v[i++];
            }
        }
        memcpy(v, t, n * sizeof *v);
    }
    return true;
}

/* Items of x with their keys; several attributes separated by commas give a list as key. */
static bool collect_keyed(run *r, const val *x, const val *attribute, bool multi, bool exact, const val *dflt,
                          keyed **out, size_t *n) {
    val items;
    if (!iter_collect(r, x, V_LIST, &items)) return false;
    vec attrs = { 0 };
    if (multi && is_given(attribute) && attribute->type == V_STR) {
        str s = s_of(attribute);
        for (;;) {
            const ptrdiff_t comma = str_find(s, STR(","));
            const val part = v_str(comma < 0 ? s : (str){ s.p, (size_t)comma });
            if (!vec_add(r, &attrs, &part)) return false;
            if (comma < 0) break;
            s = str_skip(s, (size_t)comma + 1);
        }
    } else if (!vec_add(r, &attrs, attribute)) {
        return false;
    }
    const val **paths = rt_take(r, attrs.n, sizeof *paths);
    size_t *lens = rt_take(r, attrs.n, sizeof *lens);
    keyed *v = rt_take(r, items.n, sizeof *v);
    if (!paths || !lens || !v) return false;
    for (size_t k = 0; k < attrs.n; k++)
        if (!path_parse(r, &attrs.v[k], &paths[k], &lens[k])) return false;
    for (size_t i = 0; i < items.n; i++) {
        v[i].item = items.u.v[i];
        val *keys = &v[i].key;
        if (multi) {
            if (!(keys = rt_take(r, attrs.n, sizeof *keys))) return false;
            v[i].key = v_seq(V_LIST, keys, attrs.n);
        }
        for (size_t k = 0; k < attrs.n; k++)
            if (!key_of(r, &v[i].item, paths[k], lens[k], dflt, exact, &keys[k])) return false;
    }
    *out = v;
    *n = items.n;
    return true;
}

static bool list_of(run *r, const keyed *v, size_t n, val *out) {
    val *list = rt_take(r, n, sizeof *list);
    if (!list) return false;
    for (size_t i = 0; i < n; i++) list[i] = v[i].item;
    return put(out, v_seq(V_LIST, list, n));
}

/* sorted() takes its reverse flag as an integer. */
static bool reverse_flag(run *r, const val *v, bool *out) {
    int64_t i = 0;
    if (is_given(v) && !as_index(r, v, &i)) return false;
    *out = i != 0;
    return true;
}

static bool f_sort(run *r, const val *x, const args *a, val *out) {
    keyed *v;
    size_t n;
    bool reverse;
    return reverse_flag(r, arg(a, 0), &reverse) && collect_keyed(r, x, arg(a, 2), true, arg_true(a, 1), NULL, &v, &n) &&
           sort_keyed(r, v, n, reverse) && list_of(r, v, n, out);
}

static bool f_groupby(run *r, const val *x, const args *a, val *out) {
    keyed *v;
    size_t n;
    const bool exact = arg_true(a, 2);
    const val *dflt = is_given(arg(a, 1)) && arg(a, 1)->type != V_NONE ? arg(a, 1) : NULL, *path;
    size_t n_path;
    vec groups = { 0 };
    if (!collect_keyed(r, x, arg(a, 0), false, exact, dflt, &v, &n) || !sort_keyed(r, v, n, false)) return false;
    if (!path_parse(r, arg(a, 0), &path, &n_path)) return false;
    for (size_t i = 0, j; i < n; i = j) {
        bool same = true;
        for (j = i + 1; j < n; j++) {
            if (!v_equal(r, &v[i].key, &v[j].key, &same)) return false;
            if (!same) break;
        }
        val *pair = rt_take(r, 2, sizeof *pair);
        if (!pair || !list_of(r, v + i, j - i, &pair[1])) return false;
        if (!key_of(r, &v[i].item, path, n_path, dflt, true, &pair[0])) return false;
        val group = v_seq(V_TUPLE, pair, 2);
        group.flag = VF_GROUP;
        if (!vec_add(r, &groups, &group)) return false;
    }
    return put(out, v_seq(V_LIST, groups.v, groups.n));
}

static bool f_dictsort(run *r, const val *x, const args *a, val *out) {
    if (x->type != V_DICT) {
        if (x->type == V_UNDEF) return undef_fail(r, x);
        return rt_fail(r, "AttributeError: '%s' object has no attribute 'items'", type_name(x));
    }
    const val *by = arg(a, 1);
    const bool value = is_given(by) && by->type == V_STR && str_is(s_of(by), "value");
    if (is_given(by) && !value && !(by->type == V_STR && str_is(s_of(by), "key")))
        return rt_fail(r, "you can only sort by either \"key\" or \"value\"");
    const dict *d = x->u.d;
    bool reverse;
    if (!reverse_flag(r, arg(a, 2), &reverse)) return false;
    keyed *v = rt_take(r, d->n, sizeof *v);
    if (!v) return false;
    for (size_t i = 0; i < d->n; i++) {
        val *pair = rt_take(r, 2, sizeof *pair);
        if (!pair) return false;
        pair[0] = d->e[i].key;
        pair[1] = d->e[i].value;
        v[i].item = v_seq(V_TUPLE, pair, 2);
        if (!key_of(r, &pair[value], NULL, 0, NULL, arg_true(a, 0), &v[i].key)) return false;
    }
    return sort_keyed(r, v, d->n, reverse) && list_of(r, v, d->n, out);
}

static bool extreme(run *r, const val *x, const args *a, int op, val *out) {
    iter it;
    val item, key, best;
    bool more, better;
    const val *path;
    size_t n_path;
    if (!path_parse(r, arg(a, 1), &path, &n_path) || !iter_begin(r, &it, x)) return false;
    for (bool first = true;; first = false) {
        if (!iter_next(r, &it, &item, &more)) return false;
        if (!more) return !first || v_undef_hint(r, out, "No aggregated item, sequence was empty.");
        if (!key_of(r, &item, path, n_path, NULL, arg_true(a, 0), &key)) return false;
        better = first;
        if (!first && !v_order(r, op, &key, &best, &better)) return false;
        if (!better) continue;
        best = key;
        *out = item;
    }
}
static bool f_min(run *r, const val *x, const args *a, val *out) {
    const val from = *x;
    return extreme(r, &from, a, C_LT, out);
}
static bool f_max(run *r, const val *x, const args *a, val *out) {
    const val from = *x;
    return extreme(r, &from, a, C_GT, out);
}

/* ---- reading sequences ---- */

static bool f_length(run *r, const val *x, const args *a, val *out) {
    (void)a;
    size_t n;
    return v_len(r, x, &n) && put(out, v_int((int64_t)n));
}

static bool f_list(run *r, const val *x, const args *a, val *out) {
    (void)a;
    return iter_collect(r, x, V_LIST, out);
}

static bool f_first(run *r, const val *x, const args *a, val *out) {
    (void)a;
    iter it;
    bool more;
    if (!iter_begin(r, &it, x) || !iter_next(r, &it, out, &more)) return false;
    return more || v_undef_hint(r, out, "No first item, sequence was empty.");
}

static bool reversible(run *r, const val *x, val *list) {
    if (x->type == V_UNDEF) return rt_fail(r, "TypeError: 'Undefined' object is not reversible");
    if (x->type == V_ITER || !iter_is_iterable(x))
        return rt_fail(r, "TypeError: '%s' object is not reversible", type_name(x));
    return iter_collect(r, x, V_LIST, list);
}

static bool f_last(run *r, const val *x, const args *a, val *out) {
    (void)a;
    val list;
    if (x->type == V_UNDEF) return v_undef_hint(r, out, "No last item, sequence was empty.");
    if (!reversible(r, x, &list)) return false;
    return list.n ? put(out, list.u.v[list.n - 1]) : v_undef_hint(r, out, "No last item, sequence was empty.");
}

static bool f_reverse(run *r, const val *x, const args *a, val *out) {
    (void)a;
    if (x->type == V_STR) {
        const val none = v_none(), back = v_int(-1);
        return op_slice(r, x, &none, &none, &back, out);
    }
    val list;
    if (!iter_is_iterable(x)) return rt_fail(r, "argument must be iterable");
    if (!iter_collect(r, x, V_LIST, &list)) return false;
    if (x->type == V_ITER) { /* no reversed(): jinja2 makes a list */
        const val none = v_none(), back = v_int(-1);
        return op_slice(r, &list, &none, &none, &back, out);
    }
    iter *it;
    if (!iter_new(r, I_REVERSED, NULL, "reversed", &it, out)) return false;
    it->v = list.u.v;
    it->n = list.n;
    return true;
}

static bool f_join(run *r, const val *x, const args *a, val *out) {
    iter it;
    val item, part, sep = v_str(STR(""));
    bool more;
    const val *path;
    size_t n_path;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    if (is_given(arg(a, 0)) && !v_to_str(r, arg(a, 0), &sep)) return false;
    if (!path_parse(r, arg(a, 1), &path, &n_path) || !iter_begin(r, &it, x)) return false;
    for (bool first = true;; first = false) {
        if (!iter_next(r, &it, &item, &more)) return false;
        if (!more) break;
        if (!path_get(r, &item, path, n_path, NULL, &part)) return false;
        if ((!first && !rt_emit(r, b, sep.u.s, sep.n)) || !v_write_str(r, b, &part)) return false;
    }
    return rt_cut(r, b, mark, out);
}

static bool f_sum(run *r, const val *x, const args *a, val *out) {
    iter it;
    val item, part, all = is_given(arg(a, 1)) ? *arg(a, 1) : v_int(0);
    bool more;
    const val *path;
    size_t n_path;
    if (all.type == V_STR) return rt_fail(r, "TypeError: sum() can't sum strings [use ''.join(seq) instead]");
    if (!path_parse(r, arg(a, 0), &path, &n_path) || !iter_begin(r, &it, x)) return false;
    for (;;) {
        if (!iter_next(r, &it, &item, &more)) return false;
        if (!more) return put(out, all);
        const val before = all;
        if (!path_get(r, &item, path, n_path, NULL, &part) || !op_binary(r, T_ADD, &before, &part, &all)) return false;
    }
}

static bool f_items(run *r, const val *x, const args *a, val *out) {
    (void)a;
    iter *it;
    const bool ok = x->type == V_DICT || x->type == V_UNDEF;
    if (!iter_new(r, ok && x->type == V_DICT ? I_DICT : I_EMPTY, NULL, "generator object do_items", &it, out))
        return false;
    if (!ok) return rt_fail(r, "TypeError: can only get item pairs from a mapping");
    if (x->type == V_DICT) {
        it->d = x->u.d;
        it->view = VIEW_ITEMS;
    }
    return true;
}

/* ---- batch and slice: lists of lists, made when first read ---- */

static bool fill_batch(run *r, iter *it) {
    val items, row;
    vec rows = { 0 };
    int64_t width = 0;
    if (!iter_collect(r, &it->source, V_LIST, &items)) return false;
    const bool is_int = is_intlike(&it->x[0]);
    if (is_int) width = it->x[0].u.i;
    const bool fill = is_given(&it->x[1]) && it->x[1].type != V_NONE;
    if (!is_int && items.n && fill) return rt_fail(r, "TypeError: batch wants a number of items");
    if (is_int && width == 0 && items.n) { /* an empty first row, then everything in one */
        row = v_seq(V_LIST, NULL, 0);
        if (!vec_add(r, &rows, &row)) return false;
    }
    for (size_t i = 0; i < items.n;) {
        size_t n = items.n - i;
        if (width > 0 && n > (size_t)width) n = (size_t)width;
        row = v_seq(V_LIST, items.u.v + i, n);
        i += n;
        if (fill && width > 0 && n < (size_t)width) {
            val *v = rt_take(r, (size_t)width, sizeof *v);
            if (!v || !rt_work(r, (size_t)width)) return false;
            for (size_t k = 0; k < (size_t)width; k++) v[k] = k < n ? row.u.v[k] : it->x[1];
            row = v_seq(V_LIST, v, (size_t)width);
        }
        if (!vec_add(r, &rows, &row)) return false;
    }
    it->v = rows.v;
    it->n = rows.n;
    return true;
}

static bool fill_slice(run *r, iter *it) {
    val items;
    int64_t slices;
    if (!iter_collect(r, &it->source, V_LIST, &items) || !as_index(r, &it->x[0], &slices)) return false;
    if (slices == 0) return rt_fail(r, "ZeroDivisionError: integer division or modulo by zero");
    if (slices < 0) return true;
    const size_t each = items.n / (size_t)slices, extra = items.n % (size_t)slices;
    val *rows = rt_take(r, (size_t)slices, sizeof *rows);
    const bool fill = is_given(&it->x[1]) && it->x[1].type != V_NONE;
    if (!rows || !rt_work(r, (size_t)slices)) return false;
    for (size_t i = 0, from = 0; i < (size_t)slices; i++) {
        const size_t n = each + (i < extra);
        rows[i] = v_seq(V_LIST, items.u.v + (n ? from : 0), n);
        if (fill && i >= extra) {
            val *v = rt_take(r, n + 1, sizeof *v);
            if (!v) return false;
            if (n) memcpy(v, rows[i].u.v, n * sizeof *v);
            v[n] = it->x[1];
            rows[i] = v_seq(V_LIST, v, n + 1);
        }
        from += n;
    }
    it->v = rows;
    it->n = (size_t)slices;
    return true;
}

static bool rows_of(run *r, const val *x, const args *a, bool (*fill)(run *, iter *), const char *label, val *out) {
    iter *it;
    if (!iter_new(r, I_FILL, x, label, &it, out)) return false;
    it->fill = fill;
    it->x[0] = *arg(a, 0);
    it->x[1] = *arg(a, 1);
    return true;
}
static bool f_batch(run *r, const val *x, const args *a, val *out) {
    return rows_of(r, x, a, fill_batch, "generator object do_batch", out);
}
static bool f_slice(run *r, const val *x, const args *a, val *out) {
    return rows_of(r, x, a, fill_slice, "generator object sync_do_slice", out);
}

const filter_def jinja_filters_seq[] = {
    { "batch", f_batch, "linecount fill_with", 1 },
    { "count", f_length, "", 0 },
    { "dictsort", f_dictsort, "case_sensitive by reverse", 0 },
    { "first", f_first, "", 0 },
    { "groupby", f_groupby, "attribute default case_sensitive", 1 },
    { "items", f_items, "", 0 },
    { "join", f_join, "d attribute", 0 },
    { "last", f_last, "", 0 },
    { "length", f_length, "", 0 },
    { "list", f_list, "", 0 },
    { "map", f_map, NULL, 0 },
    { "max", f_max, "case_sensitive attribute", 0 },
    { "min", f_min, "case_sensitive attribute", 0 },
    { "reject", f_reject, NULL, 0 },
    { "rejectattr", f_rejectattr, NULL, 0 },
    { "reverse", f_reverse, "", 0 },
    { "select", f_select, NULL, 0 },
    { "selectattr", f_selectattr, NULL, 0 },
    { "slice", f_slice, "slices fill_with", 1 },
    { "sort", f_sort, "reverse case_sensitive attribute", 0 },
    { "sum", f_sum, "attribute start", 0 },
    { "unique", f_unique, "case_sensitive attribute", 0 },
    { 0 },
};
