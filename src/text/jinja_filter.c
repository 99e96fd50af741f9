/* Filters on text and numbers, and the dispatch of all filters. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

static bool put(val *out, val v) {
    *out = v;
    return true;
}
static const val *arg(const args *a, size_t i) { return &a->pos[i]; }
static bool arg_int(run *r, const args *a, size_t i, int64_t dflt, int64_t *out) {
    *out = dflt;
    return !is_given(arg(a, i)) || as_index(r, arg(a, i), out);
}
static bool arg_true(const args *a, size_t i, bool dflt) { return is_given(arg(a, i)) ? v_truth(arg(a, i)) : dflt; }

bool filter_apply(run *r, const filter_def *f, const val *x, const args *a, val *out) {
    char what[60];
    if (!f->params) return f->fn(r, x, a, out);
    val bound[8];
    const args b = { .pos = bound, .n = 8 };
    snprintf(what, sizeof what, "filter '%s'", f->name);
    return args_bind(r, what, a, f->params, f->required, true, bound) && f->fn(r, x, &b, out);
}

const filter_def *filter_find(str name) {
    const filter_def *const tables[] = { jinja_filters_text, jinja_filters_seq };
    for (size_t t = 0; t < ARRAY_LEN(tables); t++)
        for (const filter_def *f = tables[t]; f->name; f++)
            if (str_is(name, f->name)) return f;
    return NULL;
}

/* ---- text ---- */

static bool f_string(run *r, const val *x, const args *a, val *out) {
    (void)a;
    return v_to_str(r, x, out);
}

#define CASE_FILTER(name, how)                                                   \
    static bool name(run *r, const val *x, const args *a, val *out) {            \
        (void)a;                                                                 \
        val t;                                                                   \
        if (!v_to_str(r, x, &t) || !s_case(r, s_of(&t), how, out)) return false; \
        return put(out, v_like(*out, &t));                                       \
    }
CASE_FILTER(f_upper, CASE_UPPER)
CASE_FILTER(f_lower, CASE_LOWER)
CASE_FILTER(f_capitalize, CASE_CAPITALIZE)

/* Words begin after white space and opening brackets; unlike str.title(), apostrophes do not end them. */
static bool f_title(run *r, const val *x, const args *a, val *out) {
    (void)a;
    val t, low, one;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    if (!v_to_str(r, x, &t)) return false;
    const char *p = t.u.s, *end = p + t.n;
    while (p < end) {
        const char *from = p, *q = p;
        while (p < end) {
            const int32_t c = uni_next(&q, end);
            if (!uni_space(c) && !strchr("-({[<", c < 0x80 && c ? c : 'x')) break;
            p = q;
        }
        if (!rt_emit(r, b, from, (size_t)(p - from))) return false;
        from = p;
        for (q = p; p < end; p = q) {
            const int32_t c = uni_next(&q, end);
            if (uni_space(c) || strchr("-({[<", c < 0x80 && c ? c : 'x')) break;
        }
        if (p == from) continue;
        q = from;
        uni_next(&q, end);
        if (!s_case(r, (str){ from, (size_t)(q - from) }, CASE_UPPER, &one) ||
            !s_case(r, (str){ q, (size_t)(p - q) }, CASE_LOWER, &low) || !rt_emit(r, b, one.u.s, one.n) ||
            !rt_emit(r, b, low.u.s, low.n))
            return false;
    }
    return rt_cut(r, b, mark, out);
}

static bool f_trim(run *r, const val *x, const args *a, val *out) {
    val t;
    str s;
    return v_to_str(r, x, &t) && s_strip(r, s_of(&t), arg(a, 0), true, true, &s) && put(out, v_like(v_str(s), &t));
}

static bool f_replace(run *r, const val *x, const args *a, val *out) {
    val s, old, fresh;
    int64_t count = -1;
    if (!v_to_str(r, x, &s) || !v_to_str(r, arg(a, 0), &old) || !v_to_str(r, arg(a, 1), &fresh)) return false;
    if (is_given(arg(a, 2)) && arg(a, 2)->type != V_NONE && !as_index(r, arg(a, 2), &count)) return false;
    return s_replace(r, s_of(&s), s_of(&old), s_of(&fresh), count, out);
}

static bool f_center(run *r, const val *x, const args *a, val *out) {
    val t;
    int64_t width;
    if (!v_to_str(r, x, &t) || !arg_int(r, a, 0, 80, &width)) return false;
    return s_pad(r, s_of(&t), width, 0, " ", 1, out) && put(out, v_like(*out, &t));
}

static bool f_indent(run *r, const val *x, const args *a, val *out) {
    str pad = STR("    ");
    val made, lines;
    if (is_given(arg(a, 0)) && arg(a, 0)->type == V_STR)
        pad = s_of(arg(a, 0));
    else if (is_given(arg(a, 0))) {
        int64_t width;
        if (!as_index(r, arg(a, 0), &width) || !s_pad(r, STR(""), width, 1, " ", 1, &made)) return false;
        pad = s_of(&made);
    }
    const bool first = arg_true(a, 1, false), blank = arg_true(a, 2, false);
    if (x->type != V_STR) {
        if (x->type == V_UNDEF) return undef_fail(r, x);
        return rt_fail(r, "TypeError: can only concatenate str (not \"%s\") to str", type_name(x));
    }
    const val nl = v_str(STR("\n"));
    val all;
    if (!op_concat(r, x, &nl, &all) || !s_lines(r, s_of(&all), false, &lines)) return false;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    for (size_t i = 0; i < lines.n; i++) {
        const val *line = &lines.u.v[i];
        if (i && !rt_emit(r, b, "\n", 1)) return false;
        if ((i ? blank || line->n : first) && !rt_emit(r, b, pad.p, pad.n)) return false;
        if (!rt_emit(r, b, line->u.s, line->n)) return false;
    }
    return rt_cut(r, b, mark, out) && put(out, v_like(*out, x));
}

static bool f_truncate(run *r, const val *x, const args *a, val *out) {
    int64_t length, leeway = 5;
    str end = STR("...");
    if (!arg_int(r, a, 0, 255, &length)) return false;
    if (is_given(arg(a, 2))) {
        if (arg(a, 2)->type != V_STR) return rt_fail(r, "TypeError: truncate wants a string as its end");
        end = s_of(arg(a, 2));
    }
    if (is_given(arg(a, 3)) && arg(a, 3)->type != V_NONE && !as_index(r, arg(a, 3), &leeway)) return false;
    const int64_t end_n = (int64_t)uni_len(end);
    if (length < end_n)
        return rt_fail(r, "AssertionError: expected length >= %" PRId64 ", got %" PRId64, end_n, length);
    if (leeway < 0) return rt_fail(r, "AssertionError: expected leeway >= 0, got %" PRId64, leeway);
    size_t n;
    if (!v_len(r, x, &n)) return false;
    if ((__int128)n <= (__int128)length + leeway) return put(out, *x);
    if (x->type != V_STR) return rt_fail(r, "TypeError: truncate wants a string, not %s", type_name(x));
    str s;
    s_substr(s_of(x), 0, length - end_n, &s);
    if (!arg_true(a, 1, false)) {
        const char *cut = s.n ? memrchr(s.p, ' ', s.n) : NULL;
        if (cut) s.n = (size_t)(cut - s.p);
    }
    const val head = v_like(v_str(s), x), tail = v_str(end);
    return op_binary(r, T_ADD, &head, &tail, out);
}

static bool f_wordcount(run *r, const val *x, const args *a, val *out) {
    (void)a;
    val t;
    int64_t n = 0;
    bool in = false;
    if (!v_to_str(r, x, &t) || !rt_work(r, 1 + t.n / 16)) return false;
    for (const char *p = t.u.s, *end = p + t.n; p < end;) {
        const bool w = uni_word(uni_next(&p, end));
        n += w && !in;
        in = w;
    }
    return put(out, v_int(n));
}

static bool f_escape(run *r, const val *x, const args *a, val *out) {
    (void)a;
    return s_escape(r, x, out);
}
static bool f_forceescape(run *r, const val *x, const args *a, val *out) {
    (void)a;
    val t;
    if (!v_to_str(r, x, &t)) return false;
    t.flag = 0;
    return s_escape(r, &t, out);
}
static bool f_safe(run *r, const val *x, const args *a, val *out) {
    (void)a;
    if (!v_to_str(r, x, out)) return false;
    out->flag = VF_MARKUP;
    return true;
}

/* The characters that HTML text writes as entities by rule; others are rare in what was escaped before. */
static size_t entity(const char *p, const char *end, const char **text) {
    static const struct {
        const char *name, *text;
    } known[] = {
        { "&amp;", "&" },  { "&lt;", "<" },  { "&gt;", ">" },   { "&quot;", "\"" },
        { "&#34;", "\"" }, { "&#39;", "'" }, { "&apos;", "'" }, { "&nbsp;", "\xc2\xa0" },
    };
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        const size_t n = strlen(known[i].name);
        if ((size_t)(end - p) >= n && memcmp(p, known[i].name, n) == 0) {
            *text = known[i].text;
            return n;
        }
    }
    return 0;
}

static bool f_striptags(run *r, const val *x, const args *a, val *out) {
    (void)a;
    val t;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    if (!v_to_str(r, x, &t) || !rt_work(r, 1 + t.n / 4)) return false;
    const char *p = t.u.s, *end = p + t.n;
    bool space = false;
    while (p < end) {
        const char *close = NULL;
        if (end - p >= 4 && memcmp(p, "<!--", 4) == 0) {
            close = memmem(p, (size_t)(end - p), "-->", 3);
            if (close)
                close += 3;
            else
                break;
        } else if (*p == '<' && (close = memchr(p, '>', (size_t)(end - p)))) {
            close++;
        }
        if (close) {
            p = close;
            continue;
        }
        const char *from = p, *plain;
        if (uni_space(uni_next(&p, end))) {
            space = true;
            continue;
        }
        if (space && b->n > mark && !rt_emit(r, b, " ", 1)) return false;
        space = false;
        const size_t n = entity(from, end, &plain);
        if (n) p = from + n;
        if (!(n ? rt_emits(r, b, plain) : rt_emit(r, b, from, (size_t)(p - from)))) return false;
    }
    return rt_cut(r, b, mark, out);
}

static bool quote_url(run *r, buf *b, const val *v, bool query) {
    val t;
    char tmp[4];
    if (!v_to_str(r, v, &t)) return false;
    for (size_t i = 0; i < t.n; i++) {
        const unsigned char c = (unsigned char)t.u.s[i];
        const bool safe = (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || (c && strchr("_.-~", c)) ||
                          (c == '/' && !query);
        size_t n = 1;
        if (safe)
            tmp[0] = (char)c;
        else if (c == ' ' && query)
            tmp[0] = '+';
        else
            n = (size_t)sprintf(tmp, "%%%02X", c);
        if (!rt_emit(r, b, tmp, n)) return false;
    }
    return true;
}

static bool f_urlencode(run *r, const val *x, const args *a, val *out) {
    (void)a;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    if (x->type == V_STR || !iter_is_iterable(x)) return quote_url(r, b, x, false) && rt_cut(r, b, mark, out);
    val items = *x, pair, one;
    if (x->type == V_DICT) items = (val){ .type = V_VIEW, .flag = VIEW_ITEMS, .u.d = x->u.d };
    iter it;
    bool more;
    if (!iter_begin(r, &it, &items)) return false;
    for (bool first = true;; first = false) {
        if (!iter_next(r, &it, &one, &more)) return false;
        if (!more) break;
        if (!iter_collect(r, &one, V_TUPLE, &pair)) return false;
        if (pair.n != 2) return rt_fail(r, "ValueError: urlencode wants pairs");
        if ((!first && !rt_emit(r, b, "&", 1)) || !quote_url(r, b, &pair.u.v[0], true) || !rt_emit(r, b, "=", 1) ||
            !quote_url(r, b, &pair.u.v[1], true))
            return false;
    }
    return rt_cut(r, b, mark, out);
}

static bool f_xmlattr(run *r, const val *x, const args *a, val *out) {
    buf *b = &r->tmp;
    const size_t mark = b->n;
    if (x->type != V_DICT) return x->type == V_UNDEF ? undef_fail(r, x) : rt_fail(r, "xmlattr wants a mapping");
    const bool space = arg_true(a, 0, true);
    for (size_t i = 0; i < x->u.d->n; i++) {
        const dict_entry *e = &x->u.d->e[i];
        val k, v;
        if (e->value.type == V_NONE || e->value.type == V_UNDEF) continue;
        if (e->key.type != V_STR) return rt_fail(r, "TypeError: expected string or bytes-like object");
        for (size_t c = 0; c < e->key.n; c++)
            if (strchr(" \t\n\r\f\v/>=", e->key.u.s[c] ? e->key.u.s[c] : 'x'))
                return rt_fail(r, "ValueError: Invalid character in attribute name");
        if (!s_escape(r, &e->key, &k) || !s_escape(r, &e->value, &v)) return false;
        if ((b->n > mark || space) && !rt_emit(r, b, " ", 1)) return false;
        if (!rt_emit(r, b, k.u.s, k.n) || !rt_emits(r, b, "=\"") || !rt_emit(r, b, v.u.s, v.n) || !rt_emits(r, b, "\""))
            return false;
    }
    return rt_cut(r, b, mark, out);
}

static bool f_format(run *r, const val *x, const args *a, val *out) {
    val t, arg_v = v_seq(V_TUPLE, a->pos, a->n);
    if (a->n && a->n_kw) return rt_fail(r, "can't handle positional and keyword arguments at the same time");
    if (a->n_kw) {
        dict *d = dict_new(r, a->n_kw);
        if (!d) return false;
        for (size_t i = 0; i < a->n_kw; i++) {
            const val k = v_str(a->kw[i].name);
            if (!dict_put(r, d, &k, &a->kw[i].v)) return false;
        }
        arg_v = (val){ .type = V_DICT, .u.d = d };
    }
    return v_to_str(r, x, &t) && format_percent(r, &t, &arg_v, out);
}

/* ---- json ---- */

static bool f_tojson(run *r, const val *x, const args *a, val *out) {
    json_style s = { .item_sep = STR(", "), .key_sep = STR(": ") };
    val made;
    s.ascii = arg_true(a, 0, false);
    const val *indent = arg(a, 1), *seps = arg(a, 2);
    if (is_given(indent) && indent->type != V_NONE) {
        s.pretty = true;
        s.item_sep = STR(",");
        if (indent->type == V_STR)
            s.indent = s_of(indent);
        else {
            int64_t width;
            if (!as_index(r, indent, &width) || !s_pad(r, STR(""), width, 1, " ", 1, &made)) return false;
            s.indent = s_of(&made);
        }
    }
    if (is_given(seps) && seps->type != V_NONE) {
        if (!iter_is_iterable(seps) || !iter_collect(r, seps, V_TUPLE, &made))
            return rt_fail(r, "TypeError: separators must be a pair");
        if (made.n != 2 || made.u.v[0].type != V_STR || made.u.v[1].type != V_STR)
            return rt_fail(r, "TypeError: separators must be a pair of strings");
        s.item_sep = s_of(&made.u.v[0]);
        s.key_sep = s_of(&made.u.v[1]);
    }
    s.sort_keys = arg_true(a, 3, false);
    const size_t mark = r->tmp.n;
    return v_write_json(r, &r->tmp, x, &s, 0) && rt_cut(r, &r->tmp, mark, out);
}

/* ---- numbers ---- */

static bool f_abs(run *r, const val *x, const args *a, val *out) {
    (void)a;
    if (x->type == V_FLOAT) return put(out, v_float(fabs(x->u.f)));
    if (x->type == V_BIG) return *x->u.s == '-' ? op_negate(r, x, true, out) : put(out, *x);
    if (is_intlike(x)) return x->u.i < 0 ? op_negate(r, x, true, out) : put(out, v_int(x->u.i));
    if (x->type == V_UNDEF) return undef_fail(r, x);
    return rt_fail(r, "TypeError: bad operand type for abs(): '%s'", type_name(x));
}

static bool int_of_double(run *r, double d, val *out) {
    char text[400];
    if (fabs(d) < 9.2e18) return put(out, v_int((int64_t)d));
    snprintf(text, sizeof text, "%.0f", d);
    return s_parse_int(r, str_of(text), 10, out);
}

static bool f_int(run *r, const val *x, const args *a, val *out) {
    int64_t base;
    const val dflt = is_given(arg(a, 0)) ? *arg(a, 0) : v_int(0);
    if (!arg_int(r, a, 1, 10, &base)) return false;
    if (x->type == V_UNDEF) return undef_fail(r, x);
    if (x->type == V_INT || x->type == V_BIG) return put(out, *x);
    if (x->type == V_BOOL) return put(out, v_int(x->u.i));
    if (x->type == V_FLOAT) {
        if (isinf(x->u.f)) return rt_fail(r, "OverflowError: cannot convert float infinity to integer");
        return isnan(x->u.f) ? put(out, dflt) : int_of_double(r, x->u.f, out);
    }
    if (x->type != V_STR) return put(out, dflt);
    double d;
    if ((base == 0 || (base >= 2 && base <= 36)) && s_parse_int(r, s_of(x), (int)base, out)) return true;
    if (r->e->kind != ERR_NONE) return false;
    return s_parse_float(s_of(x), &d) && isfinite(d) ? int_of_double(r, d, out) : put(out, dflt);
}

static bool f_float(run *r, const val *x, const args *a, val *out) {
    double d;
    if (x->type == V_UNDEF) return undef_fail(r, x);
    if (x->type == V_FLOAT) return put(out, *x);
    if (is_intlike(x)) return put(out, v_float((double)x->u.i));
    if ((x->type == V_STR || x->type == V_BIG) && s_parse_float(s_of(x), &d)) return put(out, v_float(d));
    return put(out, is_given(arg(a, 0)) ? *arg(a, 0) : v_float(0));
}

static bool round_int(run *r, int64_t v, int64_t digits, val *out) {
    if (digits >= 0) return put(out, v_int(v));
    if (digits < -18) return put(out, v_int(0));
    int64_t p = 1;
    for (int64_t i = digits; i < 0; i++) p *= 10;
    int64_t rest = v % p;
    if (rest < 0) rest += p;
    const __int128 low = (__int128)v - rest;
    const bool odd = (low / p) % 2 != 0, up = rest > p - rest || (rest == p - rest && odd);
    const __int128 x = low + (up ? p : 0);
    if (x > INT64_MAX || x < INT64_MIN) return rt_fail(r, "OverflowError: integers are limited to 64 bits");
    return put(out, v_int((int64_t)x));
}

/* round() works on the exact decimal value of the double, as printf does. */
static double round_double(double v, int64_t digits) {
    char text[720];
    if (!isfinite(v) || digits > 323) return v;
    if (digits >= 0) {
        snprintf(text, sizeof text, "%.*f", (int)digits, v);
        return strtod(text, NULL);
    }
    if (digits < -308) return copysign(0.0, v);
    const double whole = floor(fabs(v));
    const size_t n = (size_t)snprintf(text, sizeof text, "0%.0f", whole), cut = (size_t)-digits;
    if (cut >= n) return copysign(0.0, v);
    char *tail = text + n - cut;
    const bool beyond = strspn(tail + 1, "0") != cut - 1 || fabs(v) != whole, odd = (tail[-1] - '0') & 1;
    const bool up = *tail > '5' || (*tail == '5' && (beyond || odd));
    memset(tail, '0', cut);
    for (char *c = tail - 1; up; c--) { /* the leading 0 takes the last carry */
        if (*c != '9') {
            ++*c;
            break;
        }
        *c = '0';
    }
    return copysign(strtod(text, NULL), v);
}

static bool f_round(run *r, const val *x, const args *a, val *out) {
    int64_t digits;
    const val *method = arg(a, 1);
    const str how = !is_given(method) ? STR("common") : method->type == V_STR ? s_of(method) : STR("");
    const bool common = str_is(how, "common"), ceiling = str_is(how, "ceil");
    if (!arg_int(r, a, 0, 0, &digits)) return false;
    if (!common && !ceiling && !str_is(how, "floor")) return rt_fail(r, "method must be common, ceil or floor");
    if (x->type == V_UNDEF) return undef_fail(r, x);
    if (!is_intlike(x) && x->type != V_FLOAT)
        return rt_fail(r, "TypeError: type %s doesn't define __round__ method", type_name(x));
    if (common && x->type != V_FLOAT) return round_int(r, x->u.i, digits, out);
    const double v = x->type == V_FLOAT ? x->u.f : (double)x->u.i;
    if (common) return put(out, v_float(round_double(v, digits)));
    if (!isfinite(v)) return rt_fail(r, "OverflowError: cannot convert float infinity to integer");
    const double p = pow(10, (double)digits);
    /* Python goes through an integer here, so a negative zero loses its sign. */
    return put(out, v_float(((ceiling ? ceil(v * p) : floor(v * p)) + 0.0) / p));
}

static bool f_filesizeformat(run *r, const val *x, const args *a, val *out) {
    const bool binary = arg_true(a, 0, false);
    val v;
    char text[80];
    const val nan = v_none();
    const args dflt = { .pos = &nan, .n = 1 };
    if (!f_float(r, x, &dflt, &v)) return false;
    if (v.type != V_FLOAT) return rt_fail(r, "TypeError: could not convert to a number: '%s'", type_name(x));
    const double base = binary ? 1024 : 1000, bytes = v.u.f;
    if (bytes == 1) return v_copy_str(r, STR("1 Byte"), out);
    if (bytes < base) {
        snprintf(text, sizeof text, "%" PRId64 " Bytes", (int64_t)(bytes > -9e18 ? bytes : 0));
        return v_copy_str(r, str_of(text), out);
    }
    double size = base * base;
    const char *p = "kMGTPEZY";
    while (p[1] && !(bytes < size)) {
        size *= base;
        p++;
    }
    snprintf(text, sizeof text, "%.1f %c%s", base * bytes / size, binary && *p == 'k' ? 'K' : *p, binary ? "iB" : "B");
    return v_copy_str(r, str_of(text), out);
}

static bool f_default(run *r, const val *x, const args *a, val *out) {
    (void)r;
    const bool use = x->type == V_UNDEF || (arg_true(a, 1, false) && !v_truth(x));
    return put(out, !use ? *x : is_given(arg(a, 0)) ? *arg(a, 0) : v_str(STR("")));
}

/* foo|attr("bar"): the attribute, never the item. */
static bool f_attr(run *r, const val *x, const args *a, val *out) {
    bool found;
    if (arg(a, 0)->type != V_STR) return rt_fail(r, "TypeError: attribute name must be string");
    if (x->type == V_UNDEF) return undef_fail(r, x);
    if (!op_python_attr(r, x, s_of(arg(a, 0)), out, &found)) return false;
    return found || v_undef(r, out, s_of(arg(a, 0)));
}

const filter_def jinja_filters_text[] = {
    { "abs", f_abs, "", 0 },
    { "attr", f_attr, "name", 1 },
    { "capitalize", f_capitalize, "", 0 },
    { "center", f_center, "width", 0 },
    { "d", f_default, "default_value boolean", 0 },
    { "default", f_default, "default_value boolean", 0 },
    { "e", f_escape, "", 0 },
    { "escape", f_escape, "", 0 },
    { "filesizeformat", f_filesizeformat, "binary", 0 },
    { "float", f_float, "default", 0 },
    { "forceescape", f_forceescape, "", 0 },
    { "format", f_format, NULL, 0 },
    { "indent", f_indent, "width first blank", 0 },
    { "int", f_int, "default base", 0 },
    { "lower", f_lower, "", 0 },
    { "replace", f_replace, "old new count", 2 },
    { "round", f_round, "precision method", 0 },
    { "safe", f_safe, "", 0 },
    { "string", f_string, "", 0 },
    { "striptags", f_striptags, "", 0 },
    { "title", f_title, "", 0 },
    { "tojson", f_tojson, "ensure_ascii indent separators sort_keys", 0 },
    { "trim", f_trim, "chars", 0 },
    { "truncate", f_truncate, "length killwords end leeway", 0 },
    { "upper", f_upper, "", 0 },
    { "urlencode", f_urlencode, "", 0 },
    { "wordcount", f_wordcount, "", 0 },
    { "xmlattr", f_xmlattr, "autospace", 0 },
    { 0 },
};
