/* Methods of strings, dicts, lists and the few other objects. Methods that would change a list or dict exist
 * but are refused when called, as the immutable sandbox does. */
#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

#define BIT(t) (1u << (t))

static str self_of(const val *self) { return s_of(self); }
static bool put(val *out, val v) {
    *out = v;
    return true;
}

static bool want_str(run *r, const val *v, str *out) {
    *out = STR("");
    if (v->type != V_STR) return rt_fail(r, "TypeError: must be str, not %s", type_name(v));
    *out = s_of(v);
    return true;
}
static bool opt_int(run *r, const val *v, int64_t dflt, int64_t *out) {
    *out = dflt;
    return !is_given(v) || as_index(r, v, out);
}

#define CASE_METHOD(name, how)                                           \
    static bool name(run *r, const val *self, const args *a, val *out) { \
        (void)a;                                                         \
        if (!s_case(r, self_of(self), how, out)) return false;           \
        return put(out, v_like(*out, self));                             \
    }
CASE_METHOD(m_upper, CASE_UPPER)
CASE_METHOD(m_lower, CASE_LOWER)
CASE_METHOD(m_title, CASE_TITLE)
CASE_METHOD(m_capitalize, CASE_CAPITALIZE)
CASE_METHOD(m_swapcase, CASE_SWAP)
CASE_METHOD(m_casefold, CASE_FOLD)

static bool strip(run *r, const val *self, const args *a, bool left, bool right, val *out) {
    str s;
    return s_strip(r, self_of(self), &a->pos[0], left, right, &s) && put(out, v_like(v_str(s), self));
}
static bool m_strip(run *r, const val *self, const args *a, val *out) { return strip(r, self, a, true, true, out); }
static bool m_lstrip(run *r, const val *self, const args *a, val *out) { return strip(r, self, a, true, false, out); }
static bool m_rstrip(run *r, const val *self, const args *a, val *out) { return strip(r, self, a, false, true, out); }

/* ---- splitting ---- */

static bool add_piece(run *r, vec *v, const char *from, const char *to, const val *self) {
    const val piece = v_like(v_str((str){ from, (size_t)(to - from) }), self);
    return vec_add(r, v, &piece) && rt_work(r, 1);
}

static bool split_space(run *r, const val *self, int64_t max, vec *v) {
    const char *p = self->u.s, *end = p + self->n;
    for (;;) {
        const char *q = p;
        while (q < end && uni_space(uni_next(&q, end))) p = q;
        if (p >= end) return true;
        if (max-- == 0) return add_piece(r, v, p, end, self); /* the rest keeps its own white space */
        const char *from = p;
        for (q = p; p < end; p = q)
            if (uni_space(uni_next(&q, end))) break;
        if (!add_piece(r, v, from, p, self)) return false;
    }
}

static bool rsplit_space(run *r, const val *self, int64_t max, vec *v) {
    const char *begin = self->u.s, *end = begin + self->n;
    for (;;) {
        const char *q = end;
        while (q > begin && uni_space(uni_prev(begin, &q))) end = q;
        if (end <= begin) return true;
        if (max-- == 0) return add_piece(r, v, begin, end, self);
        const char *to = end;
        for (q = end; end > begin; end = q)
            if (uni_space(uni_prev(begin, &q))) break;
        if (!add_piece(r, v, end, to, self)) return false;
    }
}

static const char *find_last(const char *begin, const char *end, str sep) {
    for (const char *p = end - sep.n; p >= begin; p--)
        if (memcmp(p, sep.p, sep.n) == 0) return p;
    return NULL;
}

static void reverse(vec *v) {
    for (size_t i = 0; i < v->n / 2; i++) {
        const val t = v->v[i];
        v->v[i] = v->v[v->n - 1 - i];
        v->v[v->n - 1 - i] = t;
    }
}

static bool split_any(run *r, const val *self, const args *a, bool from_right, val *out) {
    int64_t max;
    str sep;
    vec v = { 0 };
    if (!opt_int(r, &a->pos[1], -1, &max) || !rt_work(r, 1 + self->n / 8)) return false;
    if (!is_given(&a->pos[0]) || a->pos[0].type == V_NONE) {
        if (!(from_right ? rsplit_space(r, self, max, &v) : split_space(r, self, max, &v))) return false;
    } else {
        if (!want_str(r, &a->pos[0], &sep)) return false;
        if (!sep.n) return rt_fail(r, "ValueError: empty separator");
        const char *p = self->u.s, *end = p + self->n;
        while (max-- != 0) {
            if ((size_t)(end - p) < sep.n) break;
            const char *hit = from_right ? find_last(p, end, sep) : memmem(p, (size_t)(end - p), sep.p, sep.n);
            if (!hit) break;
            if (!(from_right ? add_piece(r, &v, hit + sep.n, end, self) : add_piece(r, &v, p, hit, self))) return false;
            if (from_right)
                end = hit;
            else
                p = hit + sep.n;
        }
        if (!add_piece(r, &v, p, end, self)) return false;
    }
    if (from_right) reverse(&v);
    return put(out, v_seq(V_LIST, v.v, v.n));
}
static bool m_split(run *r, const val *self, const args *a, val *out) { return split_any(r, self, a, false, out); }
static bool m_rsplit(run *r, const val *self, const args *a, val *out) { return split_any(r, self, a, true, out); }

static bool m_splitlines(run *r, const val *self, const args *a, val *out) {
    int64_t keep; /* an integer by contract, so an undefined value is an error */
    return opt_int(r, &a->pos[0], 0, &keep) && s_lines(r, self_of(self), keep != 0, out);
}

static bool partition(run *r, const val *self, const args *a, bool last, val *out) {
    str sep, s = self_of(self);
    val *v = rt_take(r, 3, sizeof *v);
    if (!v || !want_str(r, &a->pos[0], &sep) || !rt_work(r, 1 + s.n / 8)) return false;
    if (!sep.n) return rt_fail(r, "ValueError: empty separator");
    const char *hit = s.n < sep.n ? NULL : last ? find_last(s.p, s.p + s.n, sep) : memmem(s.p, s.n, sep.p, sep.n);
    v[0] = v[1] = v[2] = v_like(v_str(STR("")), self);
    if (!hit)
        v[last ? 2 : 0] = *self;
    else {
        v[0] = v_like(v_str((str){ s.p, (size_t)(hit - s.p) }), self);
        v[1] = v_like(v_str(sep), self);
        v[2] = v_like(v_str(str_skip(s, (size_t)(hit - s.p) + sep.n)), self);
    }
    return put(out, v_seq(V_TUPLE, v, 3));
}
static bool m_partition(run *r, const val *self, const args *a, val *out) { return partition(r, self, a, false, out); }
static bool m_rpartition(run *r, const val *self, const args *a, val *out) { return partition(r, self, a, true, out); }

/* ---- searching ---- */

/* The part of self that start and end select; *skipped = code points before it. False: nothing can match. */
static bool window(run *r, const val *self, const val *start, const val *end, str *out, int64_t *skipped, bool *none) {
    const int64_t n = (int64_t)uni_len(self_of(self));
    int64_t from = 0, to = n;
    if (is_given(start) && start->type != V_NONE && !as_index(r, start, &from)) return false;
    if (is_given(end) && end->type != V_NONE && !as_index(r, end, &to)) return false;
    if (from < 0) from = from + n < 0 ? 0 : from + n;
    if (to < 0) to = to + n < 0 ? 0 : to + n;
    if (to > n) to = n;
    *none = from > to || from > n;
    *skipped = from;
    if (*none)
        *out = (str){ "", 0 };
    else
        s_substr(self_of(self), from, to, out);
    return rt_work(r, 1 + self->n / 8);
}

static bool search(run *r, const val *self, const args *a, bool last, int64_t *out) {
    str needle, hay;
    int64_t skipped;
    bool none;
    *out = -1;
    if (!want_str(r, &a->pos[0], &needle) || !window(r, self, &a->pos[1], &a->pos[2], &hay, &skipped, &none))
        return false;
    if (none) return true;
    const char *hit = hay.n < needle.n ? NULL
                      : last           ? (needle.n ? find_last(hay.p, hay.p + hay.n, needle) : hay.p + hay.n)
                      : needle.n       ? memmem(hay.p, hay.n, needle.p, needle.n)
                                       : hay.p;
    if (hit) *out = skipped + (int64_t)uni_len((str){ hay.p, (size_t)(hit - hay.p) });
    return true;
}

static bool find_any(run *r, const val *self, const args *a, bool last, bool must, val *out) {
    int64_t at;
    if (!search(r, self, a, last, &at)) return false;
    if (must && at < 0) return rt_fail(r, "ValueError: substring not found");
    return put(out, v_int(at));
}
static bool m_find(run *r, const val *self, const args *a, val *out) { return find_any(r, self, a, false, false, out); }
static bool m_rfind(run *r, const val *self, const args *a, val *out) { return find_any(r, self, a, true, false, out); }
static bool m_index(run *r, const val *self, const args *a, val *out) { return find_any(r, self, a, false, true, out); }
static bool m_rindex(run *r, const val *self, const args *a, val *out) { return find_any(r, self, a, true, true, out); }

static bool m_count(run *r, const val *self, const args *a, val *out) {
    str needle, hay;
    int64_t skipped, n = 0;
    bool none;
    if (!want_str(r, &a->pos[0], &needle) || !window(r, self, &a->pos[1], &a->pos[2], &hay, &skipped, &none))
        return false;
    if (!needle.n) return put(out, v_int(none ? 0 : (int64_t)uni_len(hay) + 1));
    const char *p = hay.p, *end = hay.p + hay.n;
    while ((size_t)(end - p) >= needle.n && (p = memmem(p, (size_t)(end - p), needle.p, needle.n))) {
        n++;
        p += needle.n;
    }
    return put(out, v_int(n));
}

static bool affix(run *r, const val *self, const args *a, bool end, val *out) {
    str s;
    int64_t skipped;
    bool none;
    const val *what = &a->pos[0];
    if (!window(r, self, &a->pos[1], &a->pos[2], &s, &skipped, &none)) return false;
    const val *v = what->type == V_TUPLE ? what->u.v : what;
    const size_t n = what->type == V_TUPLE ? what->n : 1;
    for (size_t i = 0; i < n; i++) {
        if (v[i].type != V_STR)
            return rt_fail(r, "TypeError: %s first arg must be str or a tuple of str, not %s",
                           end ? "endswith" : "startswith", type_name(&v[i]));
        if (!none && (end ? str_ends(s, s_of(&v[i])) : str_starts(s, s_of(&v[i])))) return put(out, v_bool(true));
    }
    return put(out, v_bool(false));
}
static bool m_startswith(run *r, const val *self, const args *a, val *out) { return affix(r, self, a, false, out); }
static bool m_endswith(run *r, const val *self, const args *a, val *out) { return affix(r, self, a, true, out); }

static bool m_removeprefix(run *r, const val *self, const args *a, val *out) {
    str x, s = self_of(self);
    if (!want_str(r, &a->pos[0], &x)) return false;
    return put(out, v_like(v_str(str_starts(s, x) ? str_skip(s, x.n) : s), self));
}
static bool m_removesuffix(run *r, const val *self, const args *a, val *out) {
    str x, s = self_of(self);
    if (!want_str(r, &a->pos[0], &x)) return false;
    return put(out, v_like(v_str(str_ends(s, x) ? (str){ s.p, s.n - x.n } : s), self));
}

/* ---- making ---- */

static bool m_replace(run *r, const val *self, const args *a, val *out) {
    str old, fresh;
    int64_t count;
    if (!want_str(r, &a->pos[0], &old) || !want_str(r, &a->pos[1], &fresh) || !opt_int(r, &a->pos[2], -1, &count))
        return false;
    return s_replace(r, self_of(self), old, fresh, count, out) && put(out, v_like(*out, self));
}

static bool m_join(run *r, const val *self, const args *a, val *out) {
    iter it;
    val x;
    bool more, first = true;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    if (!iter_is_iterable(&a->pos[0])) return rt_fail(r, "TypeError: can only join an iterable");
    if (!iter_begin(r, &it, &a->pos[0])) return false;
    for (size_t i = 0;; i++) {
        if (!iter_next(r, &it, &x, &more)) return false;
        if (!more) break;
        if (x.type != V_STR)
            return rt_fail(r, "TypeError: sequence item %zu: expected str instance, %s found", i, type_name(&x));
        if (!first && !rt_emit(r, b, self->u.s, self->n)) return false;
        first = false;
        if (self->flag && !s_escape(r, &x, &x)) return false;
        if (!rt_emit(r, b, x.u.s, x.n)) return false;
    }
    return rt_cut(r, b, mark, out) && put(out, v_like(*out, self));
}

static bool pad(run *r, const val *self, const args *a, int align, val *out) {
    int64_t width;
    str fill = STR(" ");
    if (!as_index(r, &a->pos[0], &width) || (is_given(&a->pos[1]) && !want_str(r, &a->pos[1], &fill))) return false;
    if (uni_len(fill) != 1) return rt_fail(r, "TypeError: The fill character must be exactly one character long");
    return s_pad(r, self_of(self), width, align, fill.p, fill.n, out) && put(out, v_like(*out, self));
}
static bool m_center(run *r, const val *self, const args *a, val *out) { return pad(r, self, a, 0, out); }
static bool m_ljust(run *r, const val *self, const args *a, val *out) { return pad(r, self, a, -1, out); }
static bool m_rjust(run *r, const val *self, const args *a, val *out) { return pad(r, self, a, 1, out); }

static bool m_zfill(run *r, const val *self, const args *a, val *out) {
    int64_t width;
    str s = self_of(self);
    if (!as_index(r, &a->pos[0], &width)) return false;
    const bool sign = s.n && (*s.p == '-' || *s.p == '+');
    val digits;
    if (!s_pad(r, str_skip(s, sign), width > INT32_MAX ? INT32_MAX : width - sign, 1, "0", 1, &digits)) return false;
    const val head = v_str((str){ s.p, sign });
    val made;
    return op_concat(r, &head, &digits, &made) && v_copy_str(r, s_of(&made), out);
}

static bool m_expandtabs(run *r, const val *self, const args *a, val *out) {
    int64_t size, column = 0;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    if (!opt_int(r, &a->pos[0], 8, &size)) return false;
    if (size > 1 << 20) return rt_limit(r, "values take too much memory");
    const char *p = self->u.s, *end = p + self->n;
    while (p < end) {
        const char *from = p;
        const int32_t c = uni_next(&p, end);
        if (c != '\t') {
            column = c == '\n' || c == '\r' ? 0 : column + 1;
            if (!rt_emit(r, b, from, (size_t)(p - from))) return false;
            continue;
        }
        for (int64_t n = size > 0 ? size - column % size : 0; n > 0; n--, column++)
            if (!rt_emit(r, b, " ", 1)) return false;
    }
    return rt_cut(r, b, mark, out);
}

static bool m_format(run *r, const val *self, const args *a, val *out) {
    return format_braces(r, self_of(self), a, self->flag & VF_MARKUP, out);
}

/* ---- asking ---- */

static bool all_of(run *r, const val *self, bool (*is)(int32_t), bool if_empty, val *out) {
    const char *p = self->u.s, *end = p + self->n;
    bool yes = p < end || if_empty;
    while (p < end && yes) yes = is(uni_next(&p, end));
    return rt_work(r, 1 + self->n / 16) && put(out, v_bool(yes));
}
static bool is_ascii_char(int32_t c) { return c < 0x80; }
#define CLASS_METHOD(name, is, if_empty)                                 \
    static bool name(run *r, const val *self, const args *a, val *out) { \
        (void)a;                                                         \
        return all_of(r, self, is, if_empty, out);                       \
    }
CLASS_METHOD(m_isalpha, uni_alpha, false)
CLASS_METHOD(m_isalnum, uni_alnum, false)
CLASS_METHOD(m_isdigit, uni_digit, false)
CLASS_METHOD(m_isdecimal, uni_decimal, false)
CLASS_METHOD(m_isnumeric, uni_numeric, false)
CLASS_METHOD(m_isspace, uni_space, false)
CLASS_METHOD(m_isprintable, uni_printable, true)
CLASS_METHOD(m_isascii, is_ascii_char, true)

static bool m_isidentifier(run *r, const val *self, const args *a, val *out) {
    (void)a;
    const char *p = self->u.s, *end = p + self->n;
    bool yes = p < end && uni_word_start(uni_next(&p, end));
    while (p < end && yes) {
        const int32_t c = uni_next(&p, end);
        yes = uni_word_continue(c);
    }
    return rt_work(r, 1 + self->n / 16) && put(out, v_bool(yes));
}

static bool one_case(run *r, const val *self, bool upper, val *out) {
    const char *p = self->u.s, *end = p + self->n;
    bool some = false, other = false;
    while (p < end && !other) {
        const int32_t c = uni_next(&p, end);
        some = some || (upper ? uni_upper(c) : uni_lower(c));
        other = (upper ? uni_lower(c) : uni_upper(c)) || uni_title(c);
    }
    return rt_work(r, 1 + self->n / 16) && put(out, v_bool(some && !other));
}
static bool m_isupper(run *r, const val *self, const args *a, val *out) {
    (void)a;
    return one_case(r, self, true, out);
}
static bool m_islower(run *r, const val *self, const args *a, val *out) {
    (void)a;
    return one_case(r, self, false, out);
}
static bool m_istitle(run *r, const val *self, const args *a, val *out) {
    (void)a;
    const char *p = self->u.s, *end = p + self->n;
    bool word = false, some = false, bad = false;
    while (p < end && !bad) {
        const int32_t c = uni_next(&p, end);
        if (uni_upper(c) || uni_title(c)) {
            bad = word;
            word = some = true;
        } else if (uni_lower(c)) {
            bad = !word;
            word = some = true;
        } else {
            word = false;
        }
    }
    return rt_work(r, 1 + self->n / 16) && put(out, v_bool(some && !bad));
}

/* ---- dicts and lists ---- */

static bool m_get(run *r, const val *self, const args *a, val *out) {
    const val *v;
    if (!dict_find(r, self->u.d, &a->pos[0], &v)) return false;
    return put(out, v ? *v : is_given(&a->pos[1]) ? a->pos[1] : v_none());
}
static bool view(const val *self, uint8_t kind, val *out) {
    return put(out, (val){ .type = V_VIEW, .flag = kind, .u.d = self->u.d });
}
static bool m_keys(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    return view(self, VIEW_KEYS, out);
}
static bool m_values(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    return view(self, VIEW_VALUES, out);
}
static bool m_items(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    return view(self, VIEW_ITEMS, out);
}
static bool m_copy(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    return put(out, *self);
}

static bool m_seq_count(run *r, const val *self, const args *a, val *out) {
    iter it;
    val x;
    bool more, same;
    int64_t n = 0;
    if (!iter_begin(r, &it, self)) return false;
    for (;;) {
        if (!iter_next(r, &it, &x, &more)) return false;
        if (!more) return put(out, v_int(n));
        same = v_same(&x, &a->pos[0]);
        if (!same && !v_equal(r, &x, &a->pos[0], &same)) return false;
        n += same;
    }
}
static bool m_seq_index(run *r, const val *self, const args *a, val *out) {
    int64_t from, to;
    const int64_t n = self->type == V_RANGE ? self->u.range->n : (int64_t)self->n;
    if (!opt_int(r, &a->pos[1], 0, &from) || !opt_int(r, &a->pos[2], INT64_MAX, &to)) return false;
    if (from < 0) from = from + n < 0 ? 0 : from + n;
    if (to < 0) to += n;
    for (int64_t i = from; i < n && i < to; i++) {
        const val at = v_int(i);
        val x;
        bool same;
        if (!op_item(r, self, &at, &x) || !v_equal(r, &x, &a->pos[0], &same)) return false;
        if (same) return put(out, v_int(i));
    }
    return rt_fail(r, "ValueError: value is not in %s", type_name(self));
}

static bool m_is_integer(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    return put(out, v_bool(self->u.f - self->u.f == 0 && self->u.f == (double)__builtin_floor(self->u.f)));
}
static bool m_bit_length(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    const uint64_t u = self->u.i < 0 ? 0 - (uint64_t)self->u.i : (uint64_t)self->u.i;
    return put(out, v_int(u ? 64 - __builtin_clzll(u) : 0));
}
static bool m_self(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    return put(out, self->type == V_BOOL ? v_int(self->u.i) : *self);
}

/* ---- loops and cyclers ---- */

static bool m_loop_cycle(run *r, const val *self, const args *a, val *out) {
    return loop_cycle(r, self->u.loop, a, out);
}
static bool m_loop_changed(run *r, const val *self, const args *a, val *out) {
    return loop_changed(r, self->u.loop, a, out);
}
static bool m_next(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    cycler_val *c = self->u.cycler;
    *out = c->items[c->at];
    c->at = (c->at + 1) % c->n;
    return true;
}
static bool m_reset(run *r, const val *self, const args *a, val *out) {
    (void)r;
    (void)a;
    self->u.cycler->at = 0;
    return put(out, v_none());
}

enum {
    S = BIT(V_STR),
    D = BIT(V_DICT),
    L = BIT(V_LIST),
    T = BIT(V_TUPLE),
    R = BIT(V_RANGE),
    I = BIT(V_INT) | BIT(V_BOOL),
    F = BIT(V_FLOAT),
    LOOP = BIT(V_LOOP),
    C = BIT(V_CYCLER)
};

static const method_def methods[] = {
    { "strip", S, m_strip, "chars", 0, false, false },
    { "lstrip", S, m_lstrip, "chars", 0, false, false },
    { "rstrip", S, m_rstrip, "chars", 0, false, false },
    { "split", S, m_split, "sep maxsplit", 0, true, false },
    { "rsplit", S, m_rsplit, "sep maxsplit", 0, true, false },
    { "splitlines", S, m_splitlines, "keepends", 0, true, false },
    { "partition", S, m_partition, "sep", 1, false, false },
    { "rpartition", S, m_rpartition, "sep", 1, false, false },
    { "startswith", S, m_startswith, "prefix start end", 1, false, false },
    { "endswith", S, m_endswith, "suffix start end", 1, false, false },
    { "removeprefix", S, m_removeprefix, "prefix", 1, false, false },
    { "removesuffix", S, m_removesuffix, "suffix", 1, false, false },
    { "replace", S, m_replace, "old new count", 2, false, false },
    { "join", S, m_join, "iterable", 1, false, false },
    { "upper", S, m_upper, "", 0, false, false },
    { "lower", S, m_lower, "", 0, false, false },
    { "title", S, m_title, "", 0, false, false },
    { "capitalize", S, m_capitalize, "", 0, false, false },
    { "swapcase", S, m_swapcase, "", 0, false, false },
    { "casefold", S, m_casefold, "", 0, false, false },
    { "find", S, m_find, "sub start end", 1, false, false },
    { "rfind", S, m_rfind, "sub start end", 1, false, false },
    { "index", S, m_index, "sub start end", 1, false, false },
    { "rindex", S, m_rindex, "sub start end", 1, false, false },
    { "count", S, m_count, "sub start end", 1, false, false },
    { "center", S, m_center, "width fillchar", 1, false, false },
    { "ljust", S, m_ljust, "width fillchar", 1, false, false },
    { "rjust", S, m_rjust, "width fillchar", 1, false, false },
    { "zfill", S, m_zfill, "width", 1, false, false },
    { "expandtabs", S, m_expandtabs, "tabsize", 0, true, false },
    { "format", S, m_format, NULL, 0, true, false },
    { "isalpha", S, m_isalpha, "", 0, false, false },
    { "isalnum", S, m_isalnum, "", 0, false, false },
    { "isdigit", S, m_isdigit, "", 0, false, false },
    { "isdecimal", S, m_isdecimal, "", 0, false, false },
    { "isnumeric", S, m_isnumeric, "", 0, false, false },
    { "isspace", S, m_isspace, "", 0, false, false },
    { "isprintable", S, m_isprintable, "", 0, false, false },
    { "isascii", S, m_isascii, "", 0, false, false },
    { "isidentifier", S, m_isidentifier, "", 0, false, false },
    { "isupper", S, m_isupper, "", 0, false, false },
    { "islower", S, m_islower, "", 0, false, false },
    { "istitle", S, m_istitle, "", 0, false, false },
    { "encode", S, NULL, "", 0, false, false },
    { "translate", S, NULL, "", 0, false, false },
    { "maketrans", S, NULL, "", 0, false, false },
    { "format_map", S, NULL, "", 0, false, false },
    { "get", D, m_get, "key default", 1, false, false },
    { "keys", D, m_keys, "", 0, false, false },
    { "values", D, m_values, "", 0, false, false },
    { "items", D, m_items, "", 0, false, false },
    { "copy", D | L, m_copy, "", 0, false, false },
    { "fromkeys", D, NULL, "", 0, false, false },
    { "clear", D | L, NULL, "", 0, false, true },
    { "pop", D | L, NULL, "", 0, false, true },
    { "popitem", D, NULL, "", 0, false, true },
    { "setdefault", D, NULL, "", 0, false, true },
    { "update", D, NULL, "", 0, false, true },
    { "append", L, NULL, "", 0, false, true },
    { "reverse", L, NULL, "", 0, false, true },
    { "insert", L, NULL, "", 0, false, true },
    { "sort", L, NULL, "", 0, false, true },
    { "extend", L, NULL, "", 0, false, true },
    { "remove", L, NULL, "", 0, false, true },
    { "count", L | T | R, m_seq_count, "value", 1, false, false },
    { "index", L | T | R, m_seq_index, "value start stop", 1, false, false },
    { "is_integer", F, m_is_integer, "", 0, false, false },
    { "bit_length", I, m_bit_length, "", 0, false, false },
    { "conjugate", I | F, m_self, "", 0, false, false },
    { "hex", F, NULL, "", 0, false, false },
    { "as_integer_ratio", I | F, NULL, "", 0, false, false },
    { "to_bytes", I, NULL, "", 0, false, false },
    { "from_bytes", I, NULL, "", 0, false, false },
    { "bit_count", I, NULL, "", 0, false, false },
    { "fromhex", F, NULL, "", 0, false, false },
    { "cycle", LOOP, m_loop_cycle, NULL, 0, true, false },
    { "changed", LOOP, m_loop_changed, NULL, 0, true, false },
    { "next", C, m_next, "", 0, false, false },
    { "reset", C, m_reset, "", 0, false, false },
};

const method_def *method_find(const val *self, str name) {
    for (size_t i = 0; i < ARRAY_LEN(methods); i++)
        if ((methods[i].types & BIT(self->type)) && str_is(name, methods[i].name)) return &methods[i];
    return NULL;
}
