/* The two formatting languages of Python strings: "%s" % x and "{}".format(x). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

enum { FORMAT_MAX_WIDTH = 1 << 20, FORMAT_MAX_PRECISION = 300, FORMAT_MAX_NEST = 2 };

/* One conversion, of either language. */
typedef struct spec {
    bool left, plus, space, alt, zero, comma, underscore;
    char fill[5], align;      /* align: 0, '<', '>', '=', '^' */
    int64_t width, precision; /* -1: none */
    char type;
} spec;

static bool pad_out(run *r, str body, size_t sign_n, const spec *s, char dflt, val *out) {
    const char align = s->align ? s->align : dflt;
    const char *fill = s->fill[0] ? s->fill : " ";
    const int64_t n = (int64_t)uni_len(body);
    if (s->width <= n) return v_copy_str(r, body, out);
    if (align != '=') {
        val v;
        if (!v_copy_str(r, body, &v)) return false;
        if (align == '^') { /* format() puts the odd fill on the right, unlike center() */
            const int64_t left = (s->width - n) / 2;
            return s_pad(r, body, n + left, 1, fill, strlen(fill), &v) &&
                   s_pad(r, s_of(&v), s->width, -1, fill, strlen(fill), out);
        }
        return s_pad(r, s_of(&v), s->width, align == '<' ? -1 : 1, fill, strlen(fill), out);
    }
    val digits, sign = v_str((str){ body.p, sign_n }), all;
    if (!s_pad(r, str_skip(body, sign_n), s->width - (int64_t)sign_n, 1, fill, strlen(fill), &digits)) return false;
    return v_copy_str(r, s_of(&sign), &sign) && op_concat(r, &sign, &digits, &all) && v_copy_str(r, s_of(&all), out);
}

static size_t group_digits(char *text, size_t from, char mark, size_t n) {
    size_t end = from;
    while (text[end] >= '0' && text[end] <= '9') end++;
    for (size_t i = end; i > from + 3;) {
        i -= 3;
        memmove(text + i + 1, text + i, n - i + 1);
        text[i] = mark;
        n++;
    }
    return n;
}

/* Integer in base 10, 16, 8 or 2 with its sign and prefix. */
static bool format_int(run *r, int64_t v, const spec *s, bool percent, val *out) {
    char text[120];
    size_t n = 0;
    const uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    if (v < 0)
        text[n++] = '-';
    else if (s->plus)
        text[n++] = '+';
    else if (s->space)
        text[n++] = ' ';
    const char t = s->type;
    if (s->alt && (t == 'x' || t == 'X' || t == 'o' || t == 'b')) n += (size_t)sprintf(text + n, "0%c", t);
    const size_t sign_n = n;
    if (t == 'b') {
        char bits[66];
        int k = 65;
        uint64_t w = u;
        bits[k] = 0;
        do bits[--k] = (char)('0' + (w & 1));
        while (w >>= 1);
        n += (size_t)sprintf(text + n, "%s", bits + k);
    } else {
        const int prec = percent && s->precision > 0 ? (int)(s->precision > 64 ? 64 : s->precision) : 1;
        n += (size_t)sprintf(text + n,
                             t == 'x'   ? "%.*" PRIx64
                             : t == 'X' ? "%.*" PRIX64
                             : t == 'o' ? "%.*" PRIo64
                                        : "%.*" PRIu64,
                             prec, u);
    }
    if (s->comma || s->underscore) n = group_digits(text, sign_n, s->comma ? ',' : '_', n);
    return pad_out(r, (str){ text, n }, sign_n, s, percent && s->left ? '<' : percent && s->zero ? '=' : '>', out);
}

static bool format_float(run *r, double v, const spec *s, bool percent, val *out) {
    char text[720];
    size_t n = 0;
    char t = s->type ? s->type : 'r';
    const bool pct = t == '%';
    int prec = (int)(s->precision < 0 ? 6 : s->precision > FORMAT_MAX_PRECISION ? FORMAT_MAX_PRECISION : s->precision);
    if (signbit(v))
        text[n++] = '-';
    else if (s->plus)
        text[n++] = '+';
    else if (s->space)
        text[n++] = ' ';
    if (isnan(v) && signbit(v)) n = 0; /* NaN has no sign */
    const size_t sign_n = n;
    const double a = fabs(v);
    if (pct) t = 'f';
    if (t == 'n') t = 'g';
    const bool upper = t == 'F' || t == 'E' || t == 'G';
    if (!isfinite(a)) {
        n += (size_t)sprintf(text + n, "%s%s",
                             isnan(a) ? (upper ? "NAN" : "nan")
                             : upper  ? "INF"
                                      : "inf",
                             pct ? "%" : "");
    } else if (t == 'r') {
        if (s->precision < 0) {
            n += float_repr(a, text + n);
        } else { /* no type but a precision: like g, with a digit kept behind the point */
            const int p = prec ? prec : 1;
            char probe[400];
            snprintf(probe, sizeof probe, "%.*e", p - 1, a);
            const int e10 = atoi(strchr(probe, 'e') + 1);
            n += (size_t)snprintf(text + n, sizeof text - n, "%.*g", p, a);
            if (e10 == p - 1 && !strchr(text + sign_n, '.') && !strchr(text + sign_n, 'e')) {
                char *e = strchr(probe, 'e'), *end = e;
                while (strchr(probe, '.') && (end[-1] == '0' || end[-1] == '.') && *end != '.') end--;
                n = (size_t)snprintf(text + sign_n, sizeof text - sign_n, "%.*s%s", (int)(end - probe), probe, e) +
                    sign_n;
            } else if (!strchr(text + sign_n, '.') && !strchr(text + sign_n, 'e'))
                n += (size_t)sprintf(text + n, ".0");
        }
    } else {
        const char fmt[] = { '%', s->alt ? '#' : '.', s->alt ? '.' : '*', s->alt ? '*' : t, s->alt ? t : 0, 0 };
        n += (size_t)snprintf(text + n, sizeof text - n, fmt, prec, pct ? a * 100 : a);
        if (pct) text[n++] = '%';
        text[n] = 0;
    }
    if ((s->comma || s->underscore) && n < 400) n = group_digits(text, sign_n, s->comma ? ',' : '_', n);
    return pad_out(r, (str){ text, n }, sign_n, s,
                   percent && s->left                  ? '<'
                   : percent && s->zero && isfinite(v) ? '='
                                                       : '>',
                   out);
}

static bool format_text(run *r, str t, const spec *s, bool percent, val *out) {
    if (s->precision >= 0) s_substr(t, 0, s->precision, &t);
    return pad_out(r, t, 0, s, percent ? (s->left ? '<' : '>') : '<', out);
}

/* ---- "..." % x ---- */

typedef struct percent {
    run *r;
    const val *arg;
    size_t next;
    bool used; /* a lone value was taken */
} percent;

static bool next_arg(percent *p, const val **out) {
    if (p->arg->type == V_TUPLE) {
        if (p->next >= p->arg->n) return rt_fail(p->r, "TypeError: not enough arguments for format string");
        *out = &p->arg->u.v[p->next++];
        return true;
    }
    if (p->used) return rt_fail(p->r, "TypeError: not enough arguments for format string");
    p->used = true;
    *out = p->arg;
    return true;
}

static bool percent_number(percent *p, const char **at, const char *end, int64_t *out) {
    if (*at < end && **at == '*') {
        const val *v;
        ++*at;
        if (!next_arg(p, &v)) return false;
        if (!is_intlike(v)) return rt_fail(p->r, "TypeError: * wants int");
        *out = v->u.i;
    } else {
        *out = 0;
        while (*at < end && **at >= '0' && **at <= '9' && *out <= FORMAT_MAX_WIDTH) *out = *out * 10 + (*(*at)++ - '0');
    }
    return (*out >= -FORMAT_MAX_WIDTH && *out <= FORMAT_MAX_WIDTH) || rt_limit(p->r, "format width is too large");
}

static bool percent_int(percent *p, const val *v, const spec *s, val *out) {
    if (v->type == V_FLOAT && s->type != 'x' && s->type != 'X' && s->type != 'o') {
        if (!(fabs(v->u.f) < 9.2e18)) return rt_fail(p->r, "OverflowError: integers are limited to 64 bits");
        return format_int(p->r, (int64_t)v->u.f, s, true, out);
    }
    if (v->type == V_BIG && s->type == 'd') return format_text(p->r, s_of(v), s, true, out);
    if (v->type == V_UNDEF) return undef_fail(p->r, v);
    if (!is_intlike(v))
        return rt_fail(p->r, "TypeError: %%%c format: a real number is required, not %s", s->type, type_name(v));
    return format_int(p->r, v->u.i, s, true, out);
}

static bool percent_char(percent *p, const val *v, const spec *s, val *out) {
    char tmp[4];
    if (v->type == V_STR && uni_len(s_of(v)) == 1) return format_text(p->r, s_of(v), s, true, out);
    if (!is_intlike(v)) return rt_fail(p->r, "TypeError: %%c requires int or char");
    if (v->u.i < 0 || v->u.i > 0x10ffff || (v->u.i >= 0xd800 && v->u.i < 0xe000))
        return rt_fail(p->r, "OverflowError: %%c arg not in range(0x110000)");
    return format_text(p->r, (str){ tmp, uni_put(tmp, (int32_t)v->u.i) }, s, true, out);
}

static bool percent_one(percent *p, const val *v, spec *s, bool markup, val *out) {
    val t;
    switch (s->type) {
    case 's':
        return (markup ? s_escape(p->r, v, &t) : v_to_str(p->r, v, &t)) && format_text(p->r, s_of(&t), s, true, out);
    case 'r':
    case 'a': {
        const size_t mark = p->r->tmp.n;
        return v_write_repr(p->r, &p->r->tmp, v) && rt_cut(p->r, &p->r->tmp, mark, &t) &&
               format_text(p->r, s_of(&t), s, true, out);
    }
    case 'd':
    case 'i':
    case 'u':
    case 'x':
    case 'X':
    case 'o':
        if (s->type == 'i' || s->type == 'u') s->type = 'd';
        return percent_int(p, v, s, out);
    case 'f':
    case 'F':
    case 'e':
    case 'E':
    case 'g':
    case 'G':
        if (v->type == V_UNDEF) return undef_fail(p->r, v);
        if (!is_intlike(v) && v->type != V_FLOAT)
            return rt_fail(p->r, "TypeError: must be real number, not %s", type_name(v));
        return format_float(p->r, v->type == V_FLOAT ? v->u.f : (double)v->u.i, s, true, out);
    case 'c': return percent_char(p, v, s, out);
    default: return rt_fail(p->r, "ValueError: unsupported format character '%c'", s->type);
    }
}

static bool percent_field(percent *p, const char **pp, const char *end, bool markup, bool *keyed, val *out) {
    run *r = p->r;
    const char *c = *pp;
    const val *v = NULL;
    if (c < end && *c == '(') {
        int depth = 1;
        const char *from = ++c;
        for (; c < end; c++) {
            depth += (*c == '(') - (*c == ')');
            if (!depth) break;
        }
        if (c >= end) return rt_fail(r, "ValueError: incomplete format key");
        if (p->arg->type != V_DICT) return rt_fail(r, "TypeError: format requires a mapping");
        if (!dict_get_str(r, p->arg->u.d, (str){ from, (size_t)(c - from) }, &v)) return false;
        if (!v) return rt_fail(r, "KeyError: '" STR_FMT "'", STR_ARG(((str){ from, (size_t)(c - from) })));
        *keyed = true;
        c++;
    }
    spec s = { .precision = -1 };
    for (; c < end; c++) {
        if (*c == '-')
            s.left = true;
        else if (*c == '+')
            s.plus = true;
        else if (*c == ' ')
            s.space = true;
        else if (*c == '#')
            s.alt = true;
        else if (*c == '0')
            s.zero = true;
        else
            break;
    }
    if (!percent_number(p, &c, end, &s.width)) return false;
    if (s.width < 0) {
        s.left = true;
        s.width = -s.width;
    }
    if (c < end && *c == '.') {
        c++;
        if (!percent_number(p, &c, end, &s.precision)) return false;
        if (s.precision < 0) s.precision = 0;
    }
    while (c < end && (*c == 'h' || *c == 'l' || *c == 'L')) c++;
    if (c >= end) return rt_fail(r, "ValueError: incomplete format");
    s.type = *c++;
    *pp = c;
    if (s.type == '%') {
        *out = v_str(STR("%"));
        return true;
    }
    if (s.zero && !s.left && strchr("diuxXofFeEgG", s.type)) memcpy(s.fill, "0", 2);
    if (!v && !next_arg(p, &v)) return false;
    return percent_one(p, v, &s, markup, out);
}

bool format_percent(run *r, const val *fmt, const val *arg, val *out) {
    percent p = { .r = r, .arg = arg };
    const bool markup = fmt->flag & VF_MARKUP;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    const char *c = fmt->u.s, *end = c + fmt->n;
    bool keyed = false;
    while (c < end) {
        const char *q = memchr(c, '%', (size_t)(end - c));
        if (!rt_emit(r, b, c, (size_t)((q ? q : end) - c))) return false;
        if (!q) break;
        c = q + 1;
        val piece;
        if (!rt_work(r, 1) || !percent_field(&p, &c, end, markup, &keyed, &piece)) return false;
        if (!rt_emit(r, b, piece.u.s, piece.n)) return false;
    }
    const bool left_over = arg->type == V_TUPLE ? p.next < arg->n
                                                : !p.used && arg->type != V_DICT && arg->type != V_LIST &&
                                                      arg->type != V_UNDEF && arg->type != V_RANGE;
    if (left_over && !keyed) return rt_fail(r, "TypeError: not all arguments converted during string formatting");
    if (!rt_cut(r, b, mark, out)) return false;
    out->flag = markup ? VF_MARKUP : 0;
    return true;
}

/* ---- "...".format(...) ---- */

typedef struct braces {
    run *r;
    const args *a;
    int64_t next; /* automatic numbering; -1 once explicit numbers were used */
    bool markup;
} braces;

static bool field_value(braces *f, str name, val *out) {
    run *r = f->r;
    size_t k = 0;
    while (k < name.n && name.p[k] != '.' && name.p[k] != '[') k++;
    const str first = { name.p, k };
    val number;
    if (k == 0 || (uni_ascii(first) && s_parse_int(r, first, 10, &number) && first.p[0] != '+' && first.p[0] != '-')) {
        int64_t i;
        if (k == 0) {
            if (f->next < 0)
                return rt_fail(
                    r, "ValueError: cannot switch from manual field specification to automatic field numbering");
            i = f->next++;
        } else {
            if (f->next > 0)
                return rt_fail(
                    r, "ValueError: cannot switch from automatic field numbering to manual field specification");
            f->next = -1;
            i = number.type == V_INT ? number.u.i : INT64_MAX;
        }
        if (i < 0 || (uint64_t)i >= f->a->n)
            return rt_fail(r, "IndexError: Replacement index %" PRId64 " out of range for positional args tuple", i);
        *out = f->a->pos[i];
    } else {
        size_t i = 0;
        while (i < f->a->n_kw && !str_eq(f->a->kw[i].name, first)) i++;
        if (i == f->a->n_kw) return rt_fail(r, "KeyError: '" STR_FMT "'", STR_ARG(first));
        *out = f->a->kw[i].v;
    }
    const char *p = name.p + k, *end = name.p + name.n;
    while (p < end) {
        const bool item = *p++ == '[';
        const char *q = p;
        while (q < end && (item ? *q != ']' : *q != '.' && *q != '[')) q++;
        const str part = { p, (size_t)(q - p) };
        if (!part.n) return rt_fail(r, "ValueError: Empty attribute in format string");
        if (item && q >= end) return rt_fail(r, "ValueError: Missing ']' in format string");
        val key = v_str(part), obj = *out;
        if (item && s_parse_int(r, part, 10, &number) && part.p[0] != '-' && part.p[0] != '+') key = number;
        if (!(item ? op_item(r, &obj, &key, out) : op_attr(r, &obj, part, out))) return false;
        p = q + item;
        if (item && p < end && *p != '.' && *p != '[')
            return rt_fail(r, "ValueError: Only '.' or '[' may follow ']' in format field specifier");
    }
    return true;
}

static bool parse_spec(run *r, str t, spec *s) {
    *s = (spec){ .precision = -1 };
    const char *p = t.p, *end = t.p + t.n, *q = p;
    if (q < end) {
        uni_next(&q, end);
        if (q < end && strchr("<>=^", *q)) {
            memcpy(s->fill, p, (size_t)(q - p));
            s->align = *q;
            p = q + 1;
        } else if (strchr("<>=^", *p)) {
            s->align = *p++;
        }
    }
    if (p < end && (*p == '+' || *p == '-' || *p == ' ')) {
        s->plus = *p == '+';
        s->space = *p == ' ';
        p++;
    }
    if (p < end && *p == 'z') p++;
    if (p < end && *p == '#') {
        s->alt = true;
        p++;
    }
    if (p < end && *p == '0') {
        s->zero = true;
        if (!s->fill[0]) memcpy(s->fill, "0", 2);
        if (!s->align) s->align = '=';
        p++;
    }
    for (; p < end && *p >= '0' && *p <= '9' && s->width <= FORMAT_MAX_WIDTH; p++)
        s->width = s->width * 10 + (*p - '0');
    if (p < end && (*p == ',' || *p == '_')) {
        s->comma = *p == ',';
        s->underscore = *p == '_';
        p++;
    }
    if (p < end && *p == '.') {
        const char *digits = ++p;
        for (s->precision = 0; p < end && *p >= '0' && *p <= '9' && s->precision <= FORMAT_MAX_WIDTH; p++)
            s->precision = s->precision * 10 + (*p - '0');
        if (p == digits) return rt_fail(r, "ValueError: Format specifier missing precision");
    }
    if (p < end) s->type = *p++;
    if (s->width > FORMAT_MAX_WIDTH || s->precision > FORMAT_MAX_WIDTH) return rt_limit(r, "format width is too large");
    return p == end || rt_fail(r, "ValueError: Invalid format specifier");
}

static bool format_value(run *r, const val *v, str spec_text, val *out) {
    spec s;
    if (v->type != V_STR && !is_intlike(v) && v->type != V_FLOAT && v->type != V_BIG) {
        if (spec_text.n)
            return rt_fail(r, "TypeError: unsupported format string passed to %s.__format__", type_name(v));
        return v_to_str(r, v, out);
    }
    if (!parse_spec(r, spec_text, &s)) return false;
    if (v->type == V_STR || v->type == V_BIG || (v->type == V_BOOL && !s.type)) {
        val t;
        if (s.type && s.type != 's' && !(v->type == V_BIG && (s.type == 'd' || s.type == 'n')))
            return rt_fail(r, "ValueError: Unknown format code '%c' for object of type '%s'", s.type, type_name(v));
        if (v->type == V_STR && (s.align == '=' || s.plus || s.space || s.comma || s.underscore || s.alt)) {
            if (s.align != '=' || !s.zero) return rt_fail(r, "ValueError: format specifier not allowed for strings");
            s.align = '<'; /* since Python 3.10 a zero before the width only fills */
        }
        if (v->type == V_BOOL && spec_text.n) {
            s.type = 'd';
            return format_int(r, v->u.i, &s, false, out);
        }
        if (!v_to_str(r, v, &t)) return false;
        return v->type == V_BIG ? pad_out(r, s_of(&t), *t.u.s == '-', &s, '>', out)
                                : format_text(r, s_of(&t), &s, false, out);
    }
    if (is_intlike(v) && (!s.type || strchr("dxXobnc", s.type))) {
        if (s.precision >= 0) return rt_fail(r, "ValueError: Precision not allowed in integer format specifier");
        if (s.type == 'c') {
            percent p = { .r = r };
            return percent_char(&p, v, &s, out);
        }
        if (!s.type || s.type == 'n') s.type = 'd';
        return format_int(r, v->u.i, &s, false, out);
    }
    if (s.type && !strchr("eEfFgGn%", s.type))
        return rt_fail(r, "ValueError: Unknown format code '%c' for object of type '%s'", s.type, type_name(v));
    return format_float(r, v->type == V_FLOAT ? v->u.f : (double)v->u.i, &s, false, out);
}

static bool braces_text(braces *f, str text, int nest, val *out);

/* name[!conversion][:spec]; *pp stands behind the opening brace and moves behind the closing one. */
static bool braces_field(braces *f, const char **pp, const char *end, int nest, val *out) {
    run *r = f->r;
    const char *p = *pp, *name = p;
    while (p < end && *p != '}' && *p != ':' && *p != '!' && *p != '{') {
        if (*p == '[')
            while (p < end && *p != ']') p++;
        if (p < end) p++;
    }
    const str field = { name, (size_t)(p - name) };
    char conversion = 0;
    str spec_text = { "", 0 };
    if (p < end && *p == '!') {
        if (p + 1 >= end) return rt_fail(r, "ValueError: unmatched '{' in format spec");
        conversion = p[1];
        p += 2;
        if (p < end && *p != ':' && *p != '}') return rt_fail(r, "ValueError: expected ':' after conversion specifier");
    }
    if (p < end && *p == ':') {
        const char *from = ++p;
        int depth = 0;
        for (; p < end && (*p != '}' || depth); p++) depth += (*p == '{') - (*p == '}');
        spec_text = (str){ from, (size_t)(p - from) };
    }
    if (p >= end || *p != '}') return rt_fail(r, "ValueError: expected '}' before end of string");
    *pp = p + 1;
    val v, t;
    if (!field_value(f, field, &v)) return false;
    if (conversion == 'r' || conversion == 'a') {
        const size_t mark = r->tmp.n;
        if (!v_write_repr(r, &r->tmp, &v) || !rt_cut(r, &r->tmp, mark, &v)) return false;
    } else if (conversion == 's') {
        if (!v_to_str(r, &v, &v)) return false;
    } else if (conversion) {
        return rt_fail(r, "ValueError: Unknown conversion specifier '%c'", conversion);
    }
    if (spec_text.n && memchr(spec_text.p, '{', spec_text.n)) {
        if (!braces_text(f, spec_text, nest + 1, &t)) return false;
        spec_text = s_of(&t);
    }
    if (!format_value(r, &v, spec_text, out)) return false;
    if (!f->markup) return true;
    t = v_like(*out, &v);
    return s_escape(r, &t, out);
}

static bool braces_text(braces *f, str text, int nest, val *out) {
    run *r = f->r;
    buf *b = &r->tmp;
    const size_t mark = b->n;
    const char *p = text.p, *end = text.p + text.n;
    if (nest >= FORMAT_MAX_NEST) return rt_fail(r, "ValueError: Max string recursion exceeded");
    while (p < end) {
        const char c = *p++;
        if (c != '{' && c != '}') {
            const char *q = p;
            while (q < end && *q != '{' && *q != '}') q++;
            if (!rt_emit(r, b, p - 1, (size_t)(q - p + 1))) return false;
            p = q;
            continue;
        }
        if (p < end && *p == c) {
            if (!rt_emit(r, b, p++, 1)) return false;
            continue;
        }
        if (c == '}') return rt_fail(r, "ValueError: Single '}' encountered in format string");
        if (p >= end) return rt_fail(r, "ValueError: Single '{' encountered in format string");
        val piece;
        if (!rt_work(r, 1) || !braces_field(f, &p, end, nest, &piece) || !rt_emit(r, b, piece.u.s, piece.n))
            return false;
    }
    return rt_cut(r, b, mark, out);
}

bool format_braces(run *r, str fmt, const args *a, bool markup, val *out) {
    braces f = { .r = r, .a = a, .markup = markup };
    if (!braces_text(&f, fmt, 0, out)) return false;
    out->flag = markup ? VF_MARKUP : 0;
    return true;
}
