/* Operators, attribute and item access, slices. */
#include <math.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

enum { TAIL_MIN = 256 };

static const char *op_text(int op) {
    switch (op) {
    case T_ADD: return "+";
    case T_SUB: return "-";
    case T_MUL: return "*";
    case T_DIV: return "/";
    case T_FLOORDIV: return "//";
    case T_MOD: return "%";
    default: return "** or pow()";
    }
}

static bool bad_operands(run *r, int op, const val *a, const val *b) {
    if (op == T_ADD && a->type == V_STR)
        return rt_fail(r, "TypeError: can only concatenate str (not \"%s\") to str", type_name(b));
    if (op == T_ADD && is_seq(a))
        return rt_fail(r, "TypeError: can only concatenate %s (not \"%s\") to %s", type_name(a), type_name(b),
                       type_name(a));
    return rt_fail(r, "TypeError: unsupported operand type(s) for %s: '%s' and '%s'", op_text(op), type_name(a),
                   type_name(b));
}

static bool overflow(run *r) { return rt_fail(r, "OverflowError: integers are limited to 64 bits"); }
static bool by_zero(run *r) { return rt_fail(r, "ZeroDivisionError: division by zero"); }

/* Building text piece by piece is the one thing templates do in loops: leave room behind long concatenations and
 * extend one in place when it is the left operand of the next. What is in front of the end never changes, so
 * earlier values that share it stay as they are. */
bool op_concat(run *r, const val *a, const val *b, val *out) {
    const size_t n = a->n + b->n;
    if (b->n == 0 || a->n == 0) {
        *out = b->n == 0 ? *a : *b;
        return true;
    }
    if (!rt_work(r, 1 + b->n / 32)) return false;
    struct text_tail *t = NULL;
    for (size_t i = 0; i < ARRAY_LEN(r->tails); i++)
        if (r->tails[i].end == a->u.s + a->n) t = &r->tails[i];
    if (t && b->n <= t->room) {
        memcpy(t->end, b->u.s, b->n);
        t->end += b->n;
        t->room -= b->n;
        *out = v_str((str){ a->u.s, n });
        return true;
    }
    const size_t cap = n < TAIL_MIN ? n : n + n / 2;
    char *p = rt_take(r, cap, 1);
    if (!p || !rt_work(r, a->n / 32)) return false;
    memcpy(p, a->u.s, a->n);
    memcpy(p + a->n, b->u.s, b->n);
    if (n >= TAIL_MIN) {
        if (!t) t = &r->tails[r->next_tail++ % ARRAY_LEN(r->tails)];
        *t = (struct text_tail){ p + n, cap - n };
    }
    *out = v_str((str){ p, n });
    return true;
}

static bool add_text(run *r, const val *a, const val *b, val *out) {
    val x = *a, y = *b;
    const bool markup = (a->flag | b->flag) & VF_MARKUP;
    if (markup && (!s_escape(r, a, &x) || !s_escape(r, b, &y))) return false;
    if (!op_concat(r, &x, &y, out)) return false;
    out->flag = markup ? VF_MARKUP : 0;
    return true;
}

static bool add_seq(run *r, const val *a, const val *b, val *out) {
    val *v = rt_take(r, a->n + b->n, sizeof *v);
    if (!v || !rt_work(r, (a->n + b->n) / 8)) return false;
    if (a->n) memcpy(v, a->u.v, a->n * sizeof *v);
    if (b->n) memcpy(v + a->n, b->u.v, b->n * sizeof *v);
    *out = v_seq((val_type)a->type, v, a->n + b->n);
    return true;
}

static bool repeat(run *r, const val *a, int64_t times, val *out) {
    const size_t width = a->type == V_STR ? 1 : sizeof(val);
    size_t n;
    if (times < 0) times = 0;
    if (__builtin_mul_overflow(a->n, (uint64_t)times, &n)) return rt_limit(r, "values take too much memory");
    char *p = rt_take(r, n + (width == 1), width);
    if (!p || !rt_work(r, n * width / 32)) return false;
    for (int64_t i = 0; i < times && a->n; i++)
        memcpy(p + (size_t)i * a->n * width, width == 1 ? (const void *)a->u.s : (const void *)a->u.v, a->n * width);
    if (width == 1) p[n] = 0;
    *out = *a;
    out->n = n;
    out->u.v = (const val *)(const void *)p;
    return true;
}

static int64_t floor_div(int64_t a, int64_t b) { return a % b != 0 && (a < 0) != (b < 0) ? a / b - 1 : a / b; }

/* The sign of the divisor, as in Python. */
static int64_t floor_mod(int64_t a, int64_t b) {
    const int64_t m = a % b;
    return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}

/* Correctly rounded also where a or b does not fit a double: a quotient of at least 63 bits, with the
 * remainder folded into its last bit. */
static double true_divide(int64_t a, int64_t b) {
    const uint64_t x = a < 0 ? 0 - (uint64_t)a : (uint64_t)a, y = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
    if ((x | y) >> 53 == 0) return (double)a / (double)b;
    if (x == 0) return b < 0 ? -0.0 : 0.0;
    const int shift = 62 + __builtin_clzll(x);
    const unsigned __int128 wide = (unsigned __int128)x << shift;
    const unsigned __int128 q = wide / y | (wide % y != 0);
    const double d = ldexp((double)q, -shift);
    return (a < 0) != (b < 0) ? -d : d;
}

static bool int_power(run *r, int64_t base, int64_t e, val *out) {
    if (e < 0) {
        if (base == 0) return rt_fail(r, "ZeroDivisionError: 0.0 cannot be raised to a negative power");
        *out = v_float(pow((double)base, (double)e));
        return true;
    }
    int64_t x = 1;
    while (e) {
        if ((e & 1) && __builtin_mul_overflow(x, base, &x)) return overflow(r);
        e >>= 1;
        if (e && __builtin_mul_overflow(base, base, &base)) {
            return overflow(r);
        }
    }
    *out = v_int(x);
    return true;
}

static bool int_op(run *r, int op, int64_t a, int64_t b, val *out) {
    int64_t x = 0;
    switch (op) {
    case T_ADD:
        if (__builtin_add_overflow(a, b, &x)) return overflow(r);
        break;
    case T_SUB:
        if (__builtin_sub_overflow(a, b, &x)) return overflow(r);
        break;
    case T_MUL:
        if (__builtin_mul_overflow(a, b, &x)) return overflow(r);
        break;
    case T_DIV:
        if (b == 0) return by_zero(r);
        *out = v_float(true_divide(a, b));
        return true;
    case T_FLOORDIV:
        if (b == 0) return rt_fail(r, "ZeroDivisionError: integer division or modulo by zero");
        if (b == -1) {
            if (__builtin_sub_overflow((int64_t)0, a, &x)) return overflow(r);
            break;
        }
        x = floor_div(a, b);
        break;
    case T_MOD:
        if (b == 0) return rt_fail(r, "ZeroDivisionError: integer modulo by zero");
        x = b == -1 ? 0 : floor_mod(a, b);
        break;
    default: return int_power(r, a, b, out);
    }
    *out = v_int(x);
    return true;
}

static bool float_op(run *r, int op, double a, double b, val *out) {
    double x = 0;
    switch (op) {
    case T_ADD: x = a + b; break;
    case T_SUB: x = a - b; break;
    case T_MUL: x = a * b; break;
    case T_DIV:
        if (b == 0) return rt_fail(r, "ZeroDivisionError: float division by zero");
        x = a / b;
        break;
    case T_FLOORDIV:
    case T_MOD: {
        if (b == 0) return rt_fail(r, "ZeroDivisionError: float floor division by zero");
        double mod = fmod(a, b), div = (a - mod) / b;
        if (mod != 0) {
            if ((b < 0) != (mod < 0)) {
                mod += b;
                div -= 1;
            }
        } else {
            mod = copysign(0.0, b);
        }
        if (div != 0) {
            double whole = floor(div);
            if (div - whole > 0.5) whole += 1;
            div = whole;
        } else {
            div = copysign(0.0, a / b);
        }
        x = op == T_MOD ? mod : div;
        break;
    }
    default:
        if (a == 0 && b < 0) return rt_fail(r, "ZeroDivisionError: 0.0 cannot be raised to a negative power");
        if (a < 0 && isfinite(a) && isfinite(b) && b != floor(b))
            return rt_fail(r, "complex numbers are not supported");
        x = pow(a, b);
        if (isinf(x) && isfinite(a) && isfinite(b)) return rt_fail(r, "OverflowError: numerical result out of range");
    }
    *out = v_float(x);
    return true;
}

bool op_binary(run *r, int op, const val *a, const val *b, val *out) {
    if (a->type == V_UNDEF) return undef_fail(r, a);
    if (op == T_MOD && a->type == V_STR) return format_percent(r, a, b, out);
    if (b->type == V_UNDEF) return undef_fail(r, b);
    if (is_intlike(a) && is_intlike(b)) return int_op(r, op, a->u.i, b->u.i, out);
    const bool num_a = is_intlike(a) || a->type == V_FLOAT, num_b = is_intlike(b) || b->type == V_FLOAT;
    if (num_a && num_b)
        return float_op(r, op, a->type == V_FLOAT ? a->u.f : (double)a->u.i,
                        b->type == V_FLOAT ? b->u.f : (double)b->u.i, out);
    if ((a->type == V_BIG && (num_b || b->type == V_BIG)) || (b->type == V_BIG && num_a)) return overflow(r);
    if (op == T_ADD && a->type == V_STR && b->type == V_STR) return add_text(r, a, b, out);
    if (op == T_ADD && is_seq(a) && a->type == b->type) return add_seq(r, a, b, out);
    if (op == T_MUL && (a->type == V_STR || is_seq(a)) && is_intlike(b)) return repeat(r, a, b->u.i, out);
    if (op == T_MUL && (b->type == V_STR || is_seq(b)) && is_intlike(a)) return repeat(r, b, a->u.i, out);
    return bad_operands(r, op, a, b);
}

bool op_negate(run *r, const val *a, bool minus, val *out) {
    if (a->type == V_UNDEF) return undef_fail(r, a);
    if (a->type == V_FLOAT) {
        *out = v_float(minus ? -a->u.f : a->u.f);
        return true;
    }
    if (a->type == V_BIG && !minus) {
        *out = *a;
        return true;
    }
    if (a->type == V_BIG) {
        val text;
        if (*a->u.s == '-')
            text = v_str(str_skip(s_of(a), 1));
        else {
            const val sign = v_str(STR("-")), rest = v_str(s_of(a));
            if (!op_concat(r, &sign, &rest, &text)) return false;
        }
        return s_parse_int(r, s_of(&text), 10, out) || overflow(r);
    }
    if (!is_intlike(a))
        return rt_fail(r, "TypeError: bad operand type for unary %c: '%s'", minus ? '-' : '+', type_name(a));
    return int_op(r, T_SUB, minus ? 0 : a->u.i, minus ? a->u.i : 0, out);
}

/* ---- attributes and items ---- */

static bool unsafe_attr(run *r, const val *obj, str name, val *out) {
    undef_info *u = rt_take(r, 1, sizeof *u);
    if (!u) return false;
    *u = (undef_info){ .obj = type_name(obj), .name = v_str(name), .unsafe = true };
    *out = (val){ .type = V_UNDEF, .u.undef = u };
    return true;
}

static bool missing_attr(run *r, const val *obj, const val *name, val *out) {
    undef_info *u = rt_take(r, 1, sizeof *u);
    if (!u) return false;
    *u = (undef_info){ .obj = type_name(obj), .name = *name };
    *out = (val){ .type = V_UNDEF, .u.undef = u };
    return true;
}

static bool macro_attr(run *r, const macro_val *m, str name, val *out, bool *found) {
    const node *def = m->def;
    *found = true;
    if (str_is(name, "name"))
        *out = def->kind == N_MACRO ? v_str(def->text) : v_none();
    else if (str_is(name, "catch_kwargs"))
        *out = v_bool(def->sig->wants_kwargs);
    else if (str_is(name, "catch_varargs"))
        *out = v_bool(def->sig->wants_varargs);
    else if (str_is(name, "caller"))
        *out = v_bool(def->sig->wants_caller);
    else if (str_is(name, "arguments")) {
        val *v = rt_take(r, def->sig->n, sizeof *v);
        if (!v) return false;
        for (size_t i = 0; i < def->sig->n; i++) v[i] = v_str(r->t->names[def->sig->names[i]]);
        *out = v_seq(V_TUPLE, v, def->sig->n);
    } else {
        *found = false;
    }
    return true;
}

static bool number_attr(const val *obj, str name, val *out) {
    if (!is_intlike(obj) && obj->type != V_FLOAT) return false;
    if (str_is(name, "imag"))
        *out = obj->type == V_FLOAT ? v_float(0) : v_int(0);
    else if (str_is(name, "real"))
        *out = obj->type == V_FLOAT ? *obj : v_int(obj->u.i);
    else if (obj->type != V_FLOAT && str_is(name, "numerator"))
        *out = v_int(obj->u.i);
    else if (obj->type != V_FLOAT && str_is(name, "denominator"))
        *out = v_int(1);
    else
        return false;
    return true;
}

bool op_python_attr(run *r, const val *obj, str name, val *out, bool *found) {
    *found = true;
    if (obj->type == V_NAMESPACE) {
        const val *v;
        if (!dict_get_str(r, obj->u.d, name, &v)) return false;
        if (v) {
            *out = *v;
            return name.p[0] != '_' || unsafe_attr(r, obj, name, out);
        }
        *found = false;
        return true;
    }
    const bool dunder = name.n > 4 && str_starts(name, STR("__")) && str_ends(name, STR("__"));
    if (dunder && (str_is(name, "__class__") || str_is(name, "__init__") || str_is(name, "__doc__") ||
                   str_is(name, "__dict__") || str_is(name, "__module__") || str_is(name, "__len__") ||
                   str_is(name, "__iter__") || str_is(name, "__getitem__")))
        return unsafe_attr(r, obj, name, out);
    if (obj->type == V_TUPLE && (obj->flag & VF_GROUP) && obj->n == 2) {
        if (str_is(name, "grouper") || str_is(name, "list")) {
            *out = obj->u.v[str_is(name, "list")];
            return true;
        }
    }
    if (obj->type == V_LOOP) return loop_attr(r, obj->u.loop, name, out, found);
    if (obj->type == V_MACRO) return macro_attr(r, obj->u.macro, name, out, found);
    if (obj->type == V_CYCLER && str_is(name, "current")) {
        *out = obj->u.cycler->items[obj->u.cycler->at];
        return true;
    }
    if (obj->type == V_RANGE && (str_is(name, "start") || str_is(name, "stop") || str_is(name, "step"))) {
        const range_info *g = obj->u.range;
        *out = v_int(str_is(name, "start") ? g->start : str_is(name, "stop") ? g->stop : g->step);
        return true;
    }
    if (number_attr(obj, name, out)) return true;
    const method_def *m = method_find(obj, name);
    if (!m) {
        *found = false;
        return true;
    }
    if (m->mutates) return unsafe_attr(r, obj, name, out);
    method_val *mv = rt_take(r, 1, sizeof *mv);
    if (!mv) return false;
    *mv = (method_val){ *obj, m };
    *out = (val){ .type = V_METHOD, .u.method = mv };
    return true;
}

/* obj[key], or *found false where Python raises TypeError or LookupError. */
static bool python_item(run *r, const val *obj, const val *key, val *out, bool *found) {
    *found = false;
    if (obj->type == V_UNDEF) return undef_fail(r, obj);
    if (obj->type == V_DICT) {
        const val *v;
        if (key->type == V_LIST || key->type == V_DICT) return true;
        if (!dict_find(r, obj->u.d, key, &v)) return false;
        if (v) {
            *out = *v;
            *found = true;
        }
        return true;
    }
    if (!is_intlike(key)) return true;
    int64_t i = key->u.i, n;
    if (is_seq(obj))
        n = (int64_t)obj->n;
    else if (obj->type == V_STR)
        n = (int64_t)uni_len(s_of(obj));
    else if (obj->type == V_RANGE)
        n = obj->u.range->n;
    else
        return true;
    if (i < 0) i += n;
    if (i < 0 || i >= n) return true;
    *found = true;
    if (is_seq(obj))
        *out = obj->u.v[i];
    else if (obj->type == V_RANGE)
        *out = v_int(obj->u.range->start + i * obj->u.range->step);
    else {
        const char *p = uni_at(s_of(obj), (size_t)i), *q = p;
        uni_next(&q, obj->u.s + obj->n);
        *out = v_like(v_str((str){ p, (size_t)(q - p) }), obj);
        return rt_work(r, obj->n / 32);
    }
    return true;
}

bool op_item(run *r, const val *obj, const val *key, val *out) {
    bool found;
    if (!python_item(r, obj, key, out, &found)) return false;
    if (!found && key->type == V_STR && !op_python_attr(r, obj, s_of(key), out, &found)) return false;
    return found || missing_attr(r, obj, key, out);
}

bool op_attr(run *r, const val *obj, str name, val *out) {
    bool found;
    if (obj->type == V_UNDEF) return undef_fail(r, obj);
    if (!op_python_attr(r, obj, name, out, &found)) return false;
    const val key = v_str(name);
    if (!found && obj->type == V_DICT && !python_item(r, obj, &key, out, &found)) return false;
    return found || missing_attr(r, obj, &key, out);
}

/* ---- slices ---- */

static bool slice_bound(run *r, const val *v, int64_t absent, int64_t low, int64_t high, int64_t n, int64_t *out) {
    *out = absent;
    if (!v || v->type == V_NONE) return true;
    if (v->type == V_UNDEF) return undef_fail(r, v);
    if (!is_intlike(v))
        return rt_fail(r, "TypeError: slice indices must be integers or None or have an __index__ method");
    int64_t i = v->u.i;
    if (i < 0) i = i < -n ? low : i + n;
    *out = i < low ? low : i > high ? high : i;
    return true;
}

static bool slice_text(run *r, const val *s, int64_t start, int64_t step, int64_t count, int64_t n, val *out) {
    const str text = s_of(s);
    if (!rt_work(r, s->n / 16)) return false;
    if (step == 1) {
        const char *p = uni_at(text, (size_t)start);
        const str rest = { p, (size_t)(text.p + text.n - p) };
        *out = v_like(v_str((str){ p, (size_t)(uni_at(rest, (size_t)count) - p) }), s);
        return true;
    }
    /* Positions of the picked characters in one forward walk. */
    char *dst = rt_take(r, s->n + 1, 1);
    const char **at = rt_take(r, (size_t)n + 1, sizeof *at);
    if (!dst || !at) return false;
    const char *p = text.p, *end = text.p + text.n;
    for (int64_t i = 0; i < n; i++) {
        at[i] = p;
        uni_next(&p, end);
    }
    at[n] = end;
    size_t len = 0;
    for (int64_t k = 0; k < count; k++) {
        const int64_t i = start + k * step;
        const size_t w = (size_t)(at[i + 1] - at[i]);
        memcpy(dst + len, at[i], w);
        len += w;
    }
    *out = v_like(v_str((str){ dst, len }), s);
    return true;
}

bool op_slice(run *r, const val *obj, const val *vstart, const val *vstop, const val *vstep, val *out) {
    int64_t n, start, stop, step = 1;
    if (obj->type == V_UNDEF) return undef_fail(r, obj);
    if (is_seq(obj))
        n = (int64_t)obj->n;
    else if (obj->type == V_STR)
        n = (int64_t)uni_len(s_of(obj));
    else if (obj->type == V_RANGE)
        n = obj->u.range->n;
    else if (obj->type == V_DICT)
        return rt_fail(r, "TypeError: unhashable type: 'slice'");
    else
        return rt_fail(r, "TypeError: '%s' object is not subscriptable", type_name(obj));
    if (vstep && vstep->type != V_NONE) { /* far steps are all alike, so clamping keeps -step in range */
        if (!slice_bound(r, vstep, 1, INT64_MIN / 2, INT64_MAX / 2, INT64_MAX, &step)) return false;
        step = vstep->u.i < -INT64_MAX / 2 ? -INT64_MAX / 2 : vstep->u.i;
    }
    if (step == 0) return rt_fail(r, "ValueError: slice step cannot be zero");
    const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    if (!slice_bound(r, vstart, step < 0 ? high : low, low, high, n, &start)) return false;
    if (!slice_bound(r, vstop, step < 0 ? low : high, low, high, n, &stop)) return false;
    int64_t count = 0;
    if (step > 0 && stop > start) count = (stop - start - 1) / step + 1;
    if (step < 0 && start > stop) count = (start - stop - 1) / -step + 1;
    if (obj->type == V_STR) return slice_text(r, obj, start, step, count, n, out);
    if (obj->type == V_RANGE) {
        range_info *g = rt_take(r, 1, sizeof *g);
        if (!g) return false;
        const range_info *o = obj->u.range;
        const uint64_t first = (uint64_t)o->start, by = (uint64_t)o->step; /* the end may lie beyond int64: wrap */
        *g = (range_info){ (int64_t)(first + (uint64_t)start * by), (int64_t)(first + (uint64_t)stop * by),
                           (int64_t)(by * (uint64_t)step), count };
        *out = (val){ .type = V_RANGE, .u.range = g };
        return true;
    }
    if (step == 1) {
        *out = v_seq((val_type)obj->type, obj->u.v + (count ? start : 0), (size_t)count);
        return true;
    }
    val *v = rt_take(r, (size_t)count, sizeof *v);
    if (!v || !rt_work(r, (size_t)count)) return false;
    for (int64_t k = 0; k < count; k++) v[k] = obj->u.v[start + k * step];
    *out = v_seq((val_type)obj->type, v, (size_t)count);
    return true;
}
