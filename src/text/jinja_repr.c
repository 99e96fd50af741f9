/* Text of values: str(), repr() and json.dumps(), byte for byte as Python writes them. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

enum { WRITE_MAX_DEPTH = 300 };

/* Decimal digits of |f| that read back as f, as few as possible, the nearest among those: d.ddd x 10^exp.
 * A power of two has a lower neighbour half as far away, so the correctly rounded digits can miss where the
 * next ones up still hit. */
static int shortest_digits(double f, char digits[20], int *exp10) {
    char text[40];
    for (int p = 1; p <= 17; p++) {
        snprintf(text, sizeof text, "%.*e", p - 1, f);
        for (int bump = 0; bump < 2; bump++) {
            if (strtod(text, NULL) == f) {
                int n = 0;
                for (const char *c = text; *c != 'e'; c++)
                    if (*c != '.') digits[n++] = *c;
                while (n > 1 && digits[n - 1] == '0') n--;
                digits[n] = 0;
                *exp10 = atoi(strchr(text, 'e') + 1);
                return n;
            }
            char *c = strchr(text, 'e') - 1;
            while (c >= text && (*c == '9' || *c == '.')) {
                if (*c == '9') *c = '0';
                c--;
            }
            if (c < text) break;
            ++*c;
        }
    }
    return 0;
}

size_t float_repr(double f, char out[32]) {
    if (isnan(f)) return (size_t)sprintf(out, "nan");
    if (isinf(f)) return (size_t)sprintf(out, f < 0 ? "-inf" : "inf");
    char d[20], *o = out;
    int exp10 = 0, n = 1;
    if (signbit(f)) *o++ = '-';
    f = fabs(f);
    if (f == 0)
        strcpy(d, "0");
    else
        n = shortest_digits(f, d, &exp10);
    if (exp10 < -4 || exp10 >= 16) {
        *o++ = d[0];
        if (n > 1) {
            *o++ = '.';
            memcpy(o, d + 1, (size_t)n - 1);
            o += n - 1;
        }
        o += sprintf(o, "e%c%02d", exp10 < 0 ? '-' : '+', abs(exp10));
    } else if (exp10 < 0) {
        o += sprintf(o, "0.");
        for (int i = -1; i > exp10; i--) *o++ = '0';
        memcpy(o, d, (size_t)n);
        o += n;
    } else {
        for (int i = 0; i <= exp10; i++) *o++ = i < n ? d[i] : '0';
        *o++ = '.';
        if (n > exp10 + 1) {
            memcpy(o, d + exp10 + 1, (size_t)(n - exp10 - 1));
            o += n - exp10 - 1;
        } else {
            *o++ = '0';
        }
    }
    *o = 0;
    return (size_t)(o - out);
}

static bool write_quoted(run *r, buf *b, str s) {
    const bool has_single = memchr(s.p, '\'', s.n), has_double = memchr(s.p, '"', s.n);
    const char q = has_single && !has_double ? '"' : '\'';
    char tmp[16];
    if (!rt_emit(r, b, &q, 1)) return false;
    const char *p = s.p, *end = s.p + s.n, *plain = p;
    while (p < end) {
        const char *from = p;
        const int32_t c = uni_next(&p, end);
        int n = 0;
        if (c == q || c == '\\')
            n = sprintf(tmp, "\\%c", (char)c);
        else if (c == '\n')
            n = sprintf(tmp, "\\n");
        else if (c == '\r')
            n = sprintf(tmp, "\\r");
        else if (c == '\t')
            n = sprintf(tmp, "\\t");
        else if (c < 0x20 || c == 0x7f)
            n = sprintf(tmp, "\\x%02x", (unsigned)c);
        else if (c >= 0x80 && !uni_printable(c))
            n = sprintf(tmp, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)c);
        if (!n) continue;
        if (!rt_emit(r, b, plain, (size_t)(from - plain)) || !rt_emit(r, b, tmp, (size_t)n)) return false;
        plain = p;
    }
    return rt_emit(r, b, plain, (size_t)(p - plain)) && rt_emit(r, b, &q, 1);
}

static bool repr_at(run *r, buf *b, const val *v, int depth);

static bool repr_items(run *r, buf *b, const val *v, size_t n, const char *open, const char *close, int depth) {
    if (!rt_emits(r, b, open)) return false;
    for (size_t i = 0; i < n; i++)
        if ((i && !rt_emits(r, b, ", ")) || !repr_at(r, b, &v[i], depth)) return false;
    return rt_emits(r, b, close);
}

static bool repr_dict(run *r, buf *b, const dict *d, int depth) {
    if (!rt_emits(r, b, "{")) return false;
    for (size_t i = 0; i < d->n; i++)
        if ((i && !rt_emits(r, b, ", ")) || !repr_at(r, b, &d->e[i].key, depth) || !rt_emits(r, b, ": ") ||
            !repr_at(r, b, &d->e[i].value, depth))
            return false;
    return rt_emits(r, b, "}");
}

static bool repr_view(run *r, buf *b, const val *v, int depth) {
    const dict *d = v->u.d;
    if (!rt_emits(r, b, type_name(v)) || !rt_emits(r, b, "([")) return false;
    for (size_t i = 0; i < d->n; i++) {
        if (i && !rt_emits(r, b, ", ")) return false;
        if (v->flag == VIEW_ITEMS) {
            const val pair[2] = { d->e[i].key, d->e[i].value };
            if (!repr_items(r, b, pair, 2, "(", ")", depth)) return false;
        } else if (!repr_at(r, b, v->flag == VIEW_KEYS ? &d->e[i].key : &d->e[i].value, depth)) {
            return false;
        }
    }
    return rt_emits(r, b, "])");
}

/* Objects with an identity print what they are; Python adds an address, which would differ on every run. */
static bool repr_object(run *r, buf *b, const val *v, int depth) {
    char text[160];
    switch ((val_type)v->type) {
    case V_RANGE: {
        const range_info *g = v->u.range;
        if (g->step == 1)
            snprintf(text, sizeof text, "range(%" PRId64 ", %" PRId64 ")", g->start, g->stop);
        else
            snprintf(text, sizeof text, "range(%" PRId64 ", %" PRId64 ", %" PRId64 ")", g->start, g->stop, g->step);
        break;
    }
    case V_NAMESPACE: return rt_emits(r, b, "<Namespace ") && repr_dict(r, b, v->u.d, depth) && rt_emits(r, b, ">");
    case V_ITER: snprintf(text, sizeof text, "<%s object>", v->u.it->label ? v->u.it->label : "generator"); break;
    case V_LOOP: {
        size_t n;
        if (!loop_length(r, v->u.loop, &n)) return false;
        snprintf(text, sizeof text, "<LoopContext %" PRId64 "/%zu>", v->u.loop->index0 + 1, n);
        break;
    }
    case V_MACRO:
        if (v->u.macro->def->kind == N_CALLBLOCK)
            snprintf(text, sizeof text, "<Macro anonymous>");
        else
            snprintf(text, sizeof text, "<Macro '" STR_FMT "'>", STR_ARG(v->u.macro->def->text));
        break;
    case V_FUNC: snprintf(text, sizeof text, "<function %s>", jinja_globals[v->n]); break;
    case V_METHOD: snprintf(text, sizeof text, "<built-in method of %s object>", type_name(&v->u.method->self)); break;
    default: snprintf(text, sizeof text, "<%s object>", type_name(v)); break;
    }
    return rt_emits(r, b, text);
}

static bool repr_at(run *r, buf *b, const val *v, int depth) {
    char text[40];
    if (depth > WRITE_MAX_DEPTH) return rt_limit(r, "values nested too deeply to print");
    if (!rt_work(r, 1)) return false;
    switch ((val_type)v->type) {
    case V_MISSING:
    case V_UNDEF: return rt_emits(r, b, "Undefined");
    case V_NONE: return rt_emits(r, b, "None");
    case V_BOOL: return rt_emits(r, b, v->u.i ? "True" : "False");
    case V_INT: return rt_emit(r, b, text, (size_t)sprintf(text, "%" PRId64, v->u.i));
    case V_BIG: return rt_emit(r, b, v->u.s, v->n);
    case V_FLOAT: return rt_emit(r, b, text, float_repr(v->u.f, text));
    case V_STR:
        if (!(v->flag & VF_MARKUP)) return write_quoted(r, b, s_of(v));
        return rt_emits(r, b, "Markup(") && write_quoted(r, b, s_of(v)) && rt_emits(r, b, ")");
    case V_LIST: return repr_items(r, b, v->u.v, v->n, "[", "]", depth + 1);
    case V_TUPLE: return repr_items(r, b, v->u.v, v->n, "(", v->n == 1 ? ",)" : ")", depth + 1);
    case V_DICT: return repr_dict(r, b, v->u.d, depth + 1);
    case V_VIEW: return repr_view(r, b, v, depth + 1);
    default: return repr_object(r, b, v, depth + 1);
    }
}

bool v_write_repr(run *r, buf *b, const val *v) { return repr_at(r, b, v, 0); }

bool v_write_str(run *r, buf *b, const val *v) {
    if (v->type == V_STR) return rt_emit(r, b, v->u.s, v->n);
    return v->type == V_UNDEF || repr_at(r, b, v, 0);
}

bool v_to_str(run *r, const val *v, val *out) {
    if (v->type == V_STR) {
        *out = *v;
        return true;
    }
    const size_t mark = r->tmp.n;
    return v_write_str(r, &r->tmp, v) && rt_cut(r, &r->tmp, mark, out);
}

/* ---- json.dumps ---- */

static bool json_string(run *r, buf *b, str s, bool ascii) {
    char tmp[16];
    if (!rt_emits(r, b, "\"")) return false;
    const char *p = s.p, *end = s.p + s.n, *plain = p;
    while (p < end) {
        const char *from = p;
        const int32_t c = uni_next(&p, end);
        int n = 0;
        if (c == '"' || c == '\\')
            n = sprintf(tmp, "\\%c", (char)c);
        else if (c == '\n')
            n = sprintf(tmp, "\\n");
        else if (c == '\r')
            n = sprintf(tmp, "\\r");
        else if (c == '\t')
            n = sprintf(tmp, "\\t");
        else if (c == '\f')
            n = sprintf(tmp, "\\f");
        else if (c == '\b')
            n = sprintf(tmp, "\\b");
        else if (c < 0x20)
            n = sprintf(tmp, "\\u%04x", (unsigned)c);
        else if (ascii && c >= 0x10000)
            n = sprintf(tmp, "\\u%04x\\u%04x", 0xd800u + (((unsigned)c - 0x10000) >> 10),
                        0xdc00u + ((unsigned)c & 0x3ff));
        else if (ascii && c >= 0x7f)
            n = sprintf(tmp, "\\u%04x", (unsigned)c);
        if (!n) continue;
        if (!rt_emit(r, b, plain, (size_t)(from - plain)) || !rt_emit(r, b, tmp, (size_t)n)) return false;
        plain = p;
    }
    return rt_emit(r, b, plain, (size_t)(p - plain)) && rt_emits(r, b, "\"");
}

static bool json_float(run *r, buf *b, double f) {
    char text[40];
    if (isnan(f)) return rt_emits(r, b, "NaN");
    if (isinf(f)) return rt_emits(r, b, f < 0 ? "-Infinity" : "Infinity");
    return rt_emit(r, b, text, float_repr(f, text));
}

static bool json_break(run *r, buf *b, const json_style *s, int depth) {
    if (!s->pretty) return true;
    if (!rt_emits(r, b, "\n")) return false;
    for (int i = 0; i < depth; i++)
        if (!rt_emit(r, b, s->indent.p, s->indent.n)) return false;
    return true;
}

static bool json_key(run *r, buf *b, const val *k, const json_style *s) {
    if (k->type == V_STR) return json_string(r, b, s_of(k), s->ascii);
    if (k->type == V_NONE || k->type == V_BOOL || k->type == V_INT || k->type == V_BIG || k->type == V_FLOAT)
        return rt_emits(r, b, "\"") && v_write_json(r, b, k, s, 0) && rt_emits(r, b, "\"");
    return rt_fail(r, "TypeError: keys must be str, int, float, bool or None, not %s", type_name(k));
}

static bool sort_entries(run *r, dict_entry *e, size_t n) {
    for (size_t width = 1; width < n; width *= 2) { /* bottom-up merge sort on a scratch copy */
        dict_entry *t = rt_take(r, n, sizeof *t);
        if (!t) return false;
        for (size_t lo = 0; lo < n; lo += 2 * width) {
            const size_t mid = lo + width < n ? lo + width : n, hi = mid + width < n ? mid + width : n;
            for (size_t i = lo, j = mid, k = lo; k < hi; k++) {
                bool right = i >= mid;
                if (!right && j < hi && !v_order(r, C_LT, &e[j].key, &e[i].key, &right)) return false;
                t[k] = right ? e[j++] : e[i++];
            }
        }
        memcpy(e, t, n * sizeof *e);
    }
    return true;
}

static bool json_dict(run *r, buf *b, const dict *d, const json_style *s, int depth) {
    const dict_entry *e = d->e;
    if (!d->n) return rt_emits(r, b, "{}");
    if (s->sort_keys) {
        dict_entry *copy = rt_take(r, d->n, sizeof *copy);
        if (!copy) return false;
        memcpy(copy, e, d->n * sizeof *copy);
        if (!sort_entries(r, copy, d->n)) return false;
        e = copy;
    }
    if (!rt_emits(r, b, "{")) return false;
    for (size_t i = 0; i < d->n; i++)
        if ((i && !rt_emit(r, b, s->item_sep.p, s->item_sep.n)) || !json_break(r, b, s, depth + 1) ||
            !json_key(r, b, &e[i].key, s) || !rt_emit(r, b, s->key_sep.p, s->key_sep.n) ||
            !v_write_json(r, b, &e[i].value, s, depth + 1))
            return false;
    return json_break(r, b, s, depth) && rt_emits(r, b, "}");
}

static bool json_list(run *r, buf *b, const val *v, const json_style *s, int depth) {
    if (!v->n) return rt_emits(r, b, "[]");
    if (!rt_emits(r, b, "[")) return false;
    for (size_t i = 0; i < v->n; i++)
        if ((i && !rt_emit(r, b, s->item_sep.p, s->item_sep.n)) || !json_break(r, b, s, depth + 1) ||
            !v_write_json(r, b, &v->u.v[i], s, depth + 1))
            return false;
    return json_break(r, b, s, depth) && rt_emits(r, b, "]");
}

bool v_write_json(run *r, buf *b, const val *v, const json_style *s, int depth) {
    if (depth > WRITE_MAX_DEPTH) return rt_limit(r, "values nested too deeply to print");
    if (!rt_work(r, 1)) return false;
    switch ((val_type)v->type) {
    case V_NONE: return rt_emits(r, b, "null");
    case V_BOOL: return rt_emits(r, b, v->u.i ? "true" : "false");
    case V_INT:
    case V_BIG: return v_write_repr(r, b, v);
    case V_FLOAT: return json_float(r, b, v->u.f);
    case V_STR: return json_string(r, b, s_of(v), s->ascii);
    case V_LIST:
    case V_TUPLE: return json_list(r, b, v, s, depth);
    case V_DICT: return json_dict(r, b, v->u.d, s, depth);
    default: return rt_fail(r, "TypeError: Object of type %s is not JSON serializable", type_name(v));
    }
}
