/* Tests: x is defined, x is string, ... */
#include <math.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

static bool yes(bool *out, bool v) {
    *out = v;
    return true;
}

#define TYPE_TEST(name, expr)                                           \
    static bool name(run *r, const val *x, const val *arg, bool *out) { \
        (void)r;                                                        \
        (void)arg;                                                      \
        return yes(out, expr);                                          \
    }
TYPE_TEST(t_defined, x->type != V_UNDEF)
TYPE_TEST(t_undefined, x->type == V_UNDEF)
TYPE_TEST(t_none, x->type == V_NONE)
TYPE_TEST(t_boolean, x->type == V_BOOL)
TYPE_TEST(t_true, x->type == V_BOOL && x->u.i)
TYPE_TEST(t_false, x->type == V_BOOL && !x->u.i)
TYPE_TEST(t_integer, x->type == V_INT || x->type == V_BIG)
TYPE_TEST(t_float, x->type == V_FLOAT)
TYPE_TEST(t_number, is_intlike(x) || x->type == V_FLOAT || x->type == V_BIG)
TYPE_TEST(t_string, x->type == V_STR)
TYPE_TEST(t_mapping, x->type == V_DICT)
TYPE_TEST(t_sequence, x->type == V_STR || is_seq(x) || x->type == V_DICT || x->type == V_RANGE || x->type == V_UNDEF)
TYPE_TEST(t_iterable, iter_is_iterable(x))
TYPE_TEST(t_callable, x->type == V_FUNC || x->type == V_METHOD || x->type == V_MACRO || x->type == V_LOOP ||
                          x->type == V_JOINER || x->type == V_UNDEF)
TYPE_TEST(t_escaped, x->type == V_STR && (x->flag & VF_MARKUP))
TYPE_TEST(t_sameas, v_same(x, arg))

static bool t_filter(run *r, const val *x, const val *arg, bool *out) {
    (void)arg;
    uint64_t h; /* a lookup in a dict of names: lists and dicts cannot be asked for */
    return v_hash(r, x, &h) && yes(out, x->type == V_STR && filter_find(s_of(x)));
}
static bool t_test(run *r, const val *x, const val *arg, bool *out) {
    (void)arg;
    uint64_t h;
    return v_hash(r, x, &h) && yes(out, x->type == V_STR && test_find(s_of(x)));
}

static bool modulo(run *r, const val *x, const val *by, int64_t want, bool *out) {
    val rest;
    const val w = v_int(want);
    return op_binary(r, T_MOD, x, by, &rest) && v_equal(r, &rest, &w, out);
}
static bool t_odd(run *r, const val *x, const val *arg, bool *out) {
    (void)arg;
    const val two = v_int(2);
    return modulo(r, x, &two, 1, out);
}
static bool t_even(run *r, const val *x, const val *arg, bool *out) {
    (void)arg;
    const val two = v_int(2);
    return modulo(r, x, &two, 0, out);
}
static bool t_divisibleby(run *r, const val *x, const val *arg, bool *out) { return modulo(r, x, arg, 0, out); }

static bool cased(run *r, const val *x, const char *method, bool *out) {
    val t, v;
    if (!v_to_str(r, x, &t)) return false;
    const args none = { 0 };
    if (!method_find(&t, str_of(method))->fn(r, &t, &none, &v)) return false;
    return yes(out, v_truth(&v));
}
static bool t_lower(run *r, const val *x, const val *arg, bool *out) {
    (void)arg;
    return cased(r, x, "islower", out);
}
static bool t_upper(run *r, const val *x, const val *arg, bool *out) {
    (void)arg;
    return cased(r, x, "isupper", out);
}

static bool t_eq(run *r, const val *x, const val *arg, bool *out) { return v_equal(r, x, arg, out); }
static bool t_ne(run *r, const val *x, const val *arg, bool *out) { return v_equal(r, x, arg, out) && yes(out, !*out); }
static bool t_lt(run *r, const val *x, const val *arg, bool *out) { return v_order(r, C_LT, x, arg, out); }
static bool t_le(run *r, const val *x, const val *arg, bool *out) { return v_order(r, C_LE, x, arg, out); }
static bool t_gt(run *r, const val *x, const val *arg, bool *out) { return v_order(r, C_GT, x, arg, out); }
static bool t_ge(run *r, const val *x, const val *arg, bool *out) { return v_order(r, C_GE, x, arg, out); }
static bool t_in(run *r, const val *x, const val *arg, bool *out) { return v_contains(r, x, arg, out); }

static const test_def tests[] = {
    { "boolean", t_boolean, 0 },
    { "callable", t_callable, 0 },
    { "defined", t_defined, 0 },
    { "divisibleby", t_divisibleby, 1 },
    { "eq", t_eq, 1 },
    { "equalto", t_eq, 1 },
    { "==", t_eq, 1 },
    { "escaped", t_escaped, 0 },
    { "even", t_even, 0 },
    { "false", t_false, 0 },
    { "filter", t_filter, 0 },
    { "float", t_float, 0 },
    { "ge", t_ge, 1 },
    { ">=", t_ge, 1 },
    { "gt", t_gt, 1 },
    { "greaterthan", t_gt, 1 },
    { ">", t_gt, 1 },
    { "in", t_in, 1 },
    { "integer", t_integer, 0 },
    { "iterable", t_iterable, 0 },
    { "le", t_le, 1 },
    { "<=", t_le, 1 },
    { "lower", t_lower, 0 },
    { "lt", t_lt, 1 },
    { "lessthan", t_lt, 1 },
    { "<", t_lt, 1 },
    { "mapping", t_mapping, 0 },
    { "ne", t_ne, 1 },
    { "!=", t_ne, 1 },
    { "none", t_none, 0 },
    { "number", t_number, 0 },
    { "odd", t_odd, 0 },
    { "sameas", t_sameas, 1 },
    { "sequence", t_sequence, 0 },
    { "string", t_string, 0 },
    { "test", t_test, 0 },
    { "true", t_true, 0 },
    { "undefined", t_undefined, 0 },
    { "upper", t_upper, 0 },
};

const test_def *test_find(str name) {
    for (size_t i = 0; i < ARRAY_LEN(tests); i++)
        if (str_is(name, tests[i].name)) return &tests[i];
    return NULL;
}

bool test_apply(run *r, const test_def *t, const val *x, const args *a, bool *out) {
    if (a->n_kw && !(t->n_args == 1 && a->n == 0 && a->n_kw == 1))
        return rt_fail(r, "TypeError: test '%s' got an unexpected keyword argument", t->name);
    const size_t n = a->n + a->n_kw;
    if (n != t->n_args)
        return rt_fail(r, "TypeError: test '%s' takes %d argument(s) (%zu given)", t->name, t->n_args, n);
    return t->fn(r, x, a->n ? a->pos : a->n_kw ? &a->kw[0].v : NULL, out);
}
