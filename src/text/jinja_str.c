/* Text operations behind filters and string methods. */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

/* ---- case ---- */

/* Greek sigma at the end of a word has its own small letter: a cased letter before, none behind, with marks
 * and the like skipped. */
static bool final_sigma(str s, const char *at, const char *behind) {
    const char *p = at, *end = s.p + s.n;
    int32_t c = 0;
    while (p > s.p && uni_case_ignorable(c = uni_prev(s.p, &p))) c = 0;
    if (!c || !uni_cased(c)) return false;
    for (p = behind, c = 0; p < end; c = 0)
        if (!uni_case_ignorable(c = uni_next(&p, end))) break;
    return !c || !uni_cased(c);
}

static int lower_at(str s, int32_t c, const char *at, const char *behind, int32_t out[3]) {
    if (c == 0x3a3) {
        out[0] = final_sigma(s, at, behind) ? 0x3c2 : 0x3c3;
        return 1;
    }
    return uni_to_lower(c, out);
}

static bool case_ascii(run *r, str s, case_kind how, val *out) {
    char *p = rt_take(r, s.n + 1, 1);
    if (!p) return false;
    bool word = false;
    for (size_t i = 0; i < s.n; i++) {
        const unsigned char c = (unsigned char)s.p[i];
        const bool letter = (c | 32) >= 'a' && (c | 32) <= 'z';
        bool up = how == CASE_UPPER;
        if (how == CASE_TITLE) up = !word;
        if (how == CASE_CAPITALIZE) up = i == 0;
        if (how == CASE_SWAP) up = c & 32;
        word = letter;
        p[i] = (char)(!letter ? c : up ? c & ~32 : c | 32);
    }
    p[s.n] = 0;
    *out = v_str((str){ p, s.n });
    return true;
}

bool s_case(run *r, str s, case_kind how, val *out) {
    if (!rt_work(r, s.n / 16)) return false;
    if (uni_ascii(s)) return case_ascii(r, s, how, out);
    buf *b = &r->tmp;
    const size_t mark = b->n;
    const char *p = s.p, *end = s.p + s.n;
    bool word = false;
    while (p < end) {
        const char *at = p;
        const int32_t c = uni_next(&p, end);
        int32_t m[3];
        int n;
        const bool first = at == s.p;
        if (how == CASE_UPPER || (how == CASE_SWAP && uni_lower(c)))
            n = uni_to_upper(c, m);
        else if (how == CASE_FOLD)
            n = uni_to_fold(c, m);
        else if ((how == CASE_TITLE && !word) || (how == CASE_CAPITALIZE && first))
            n = uni_to_title(c, m);
        else if (how == CASE_SWAP && !uni_upper(c)) {
            m[0] = c;
            n = 1;
        } else {
            n = lower_at(s, c, at, p, m);
        }
        word = uni_cased(c);
        for (int i = 0; i < n; i++) {
            char tmp[4];
            if (!rt_emit(r, b, tmp, uni_put(tmp, m[i]))) return false;
        }
    }
    return rt_cut(r, b, mark, out);
}

/* ---- pieces ---- */

static bool in_set(int32_t c, const val *chars) {
    if (!chars || chars->type == V_NONE || !is_given(chars)) return uni_space(c);
    const char *p = chars->u.s, *end = p + chars->n;
    while (p < end)
        if (uni_next(&p, end) == c) return true;
    return false;
}

bool s_strip(run *r, str s, const val *chars, bool left, bool right, str *out) {
    if (chars && is_given(chars) && chars->type != V_NONE && chars->type != V_STR) {
        if (chars->type == V_UNDEF) return rt_fail(r, "TypeError: strip arg must be None or str");
        return rt_fail(r, "TypeError: strip arg must be None or str, not %s", type_name(chars));
    }
    const size_t set = chars && chars->type == V_STR ? chars->n : 1;
    const char *p = s.p, *end = s.p + s.n;
    size_t work = 0;
    while (left && p < end) {
        const char *q = p;
        if (!in_set(uni_next(&q, end), chars)) break;
        p = q;
        work += set;
    }
    while (right && end > p) {
        const char *q = end;
        if (!in_set(uni_prev(p, &q), chars)) break;
        end = q;
        work += set;
    }
    *out = (str){ p, (size_t)(end - p) };
    return rt_work(r, 1 + work / 8);
}

bool s_replace(run *r, str s, str old, str fresh, int64_t count, val *out) {
    buf *b = &r->tmp;
    const size_t mark = b->n;
    const char *p = s.p, *end = s.p + s.n;
    if (!rt_work(r, 1 + s.n / 16)) return false;
    while (count != 0) {
        const char *hit = old.n ? (p < end ? memmem(p, (size_t)(end - p), old.p, old.n) : NULL) : p;
        if (!hit) break;
        if (!rt_emit(r, b, p, (size_t)(hit - p)) || !rt_emit(r, b, fresh.p, fresh.n) || !rt_work(r, 1)) return false;
        p = hit + old.n;
        count -= count > 0;
        if (old.n) continue;
        if (p >= end) { /* the empty text is found once behind the last character */
            p = end;
            break;
        }
        const char *q = p;
        uni_next(&q, end);
        if (!rt_emit(r, b, p, (size_t)(q - p))) return false;
        p = q;
    }
    return rt_emit(r, b, p, (size_t)(end - p)) && rt_cut(r, b, mark, out);
}

static size_t plain_run(const char *p, size_t n) {
    size_t i = 0;
    while (i < n && p[i] != '&' && p[i] != '<' && p[i] != '>' && p[i] != '"' && p[i] != '\'') i++;
    return i;
}

bool s_escape(run *r, const val *v, val *out) {
    val t;
    if (!v_to_str(r, v, &t)) return false;
    if (t.flag & VF_MARKUP) {
        *out = t;
        return true;
    }
    buf *b = &r->tmp;
    const size_t mark = b->n;
    const char *p = t.u.s, *end = p + t.n;
    while (p < end) {
        const size_t plain = plain_run(p, (size_t)(end - p));
        if (!rt_emit(r, b, p, plain)) return false;
        if ((p += plain) == end) break;
        const char c = *p++;
        if (!rt_emits(r, b, c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&#34;" : "&#39;"))
            return false;
    }
    if (!rt_cut(r, b, mark, out)) return false;
    out->flag = VF_MARKUP;
    return true;
}

static bool line_break(int32_t c) {
    return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

bool s_lines(run *r, str s, bool keep, val *out) {
    vec a = { 0 };
    const char *p = s.p, *end = s.p + s.n;
    if (!rt_work(r, 1 + s.n / 16)) return false;
    while (p < end) {
        const char *from = p, *stop = p;
        while (p < end) {
            stop = p;
            const int32_t c = uni_next(&p, end);
            if (line_break(c)) {
                if (c == '\r' && p < end && *p == '\n') p++;
                break;
            }
            stop = p;
        }
        const val line = v_str((str){ from, (size_t)((keep ? p : stop) - from) });
        if (!vec_add(r, &a, &line)) return false;
    }
    *out = v_seq(V_LIST, a.v, a.n);
    return true;
}

/* align: -1 text left, 0 centre, 1 text right. */
bool s_pad(run *r, str s, int64_t width, int align, const char *fill, size_t fill_n, val *out) {
    const int64_t n = (int64_t)uni_len(s);
    if (width <= n) {
        *out = v_str(s);
        return true;
    }
    const int64_t pad = width - n;
    /* Python's centre puts the odd blank on the left when the width is odd. */
    const int64_t left = align < 0 ? 0 : align > 0 ? pad : pad / 2 + (pad & width & 1);
    if (pad > (int64_t)1 << 30) return rt_limit(r, "values take too much memory");
    char *p = rt_take(r, s.n + (size_t)pad * fill_n + 1, 1), *q = p;
    if (!p || !rt_work(r, 1 + (size_t)pad / 16)) return false;
    for (int64_t i = 0; i < left; i++, q += fill_n) memcpy(q, fill, fill_n);
    if (s.n) memcpy(q, s.p, s.n);
    q += s.n;
    for (int64_t i = left; i < pad; i++, q += fill_n) memcpy(q, fill, fill_n);
    *q = 0;
    *out = v_str((str){ p, (size_t)(q - p) });
    return true;
}

bool s_substr(str s, int64_t start, int64_t stop, str *out) {
    const int64_t n = (int64_t)uni_len(s);
    if (start < 0) start = start + n < 0 ? 0 : start + n;
    if (stop < 0) stop = stop + n < 0 ? 0 : stop + n;
    if (start > n) start = n;
    if (stop > n) stop = n;
    const char *p = uni_at(s, (size_t)start);
    const str rest = { p, (size_t)(s.p + s.n - p) };
    *out = (str){ p, stop > start ? (size_t)(uni_at(rest, (size_t)(stop - start)) - p) : 0 };
    return start <= stop;
}

/* ---- numbers from text, as int() and float() read them ---- */

/* int() and float() turn other scripts' white space and digits into ASCII first, then strip what C strips. */
static bool number_space(int32_t c) { return c < 0x80 ? c == ' ' || (c >= 9 && c <= 13) : uni_space(c); }

static bool strip_number(str s, char *to, size_t cap, size_t *n) {
    const char *p = s.p, *end = s.p + s.n;
    while (p < end) {
        const char *q = p;
        if (!number_space(uni_next(&q, end))) break;
        p = q;
    }
    while (end > p) {
        const char *q = end;
        if (!number_space(uni_prev(p, &q))) break;
        end = q;
    }
    *n = 0;
    while (p < end) {
        const int32_t c = uni_next(&p, end);
        const int d = c >= 0x80 ? uni_decimal_value(c) : -1;
        if (*n + 1 >= cap || (c >= 0x80 && d < 0)) return false;
        to[(*n)++] = (char)(d >= 0 ? '0' + d : c);
    }
    to[*n] = 0;
    return *n > 0;
}

bool s_parse_int(run *r, str s, int base, val *out) {
    char t[512];
    size_t n, i = 0;
    if (!strip_number(s, t, sizeof t, &n)) return false;
    const bool minus = t[0] == '-';
    if (t[0] == '-' || t[0] == '+') i++;
    const char kind = t[i] == '0' ? (char)(t[i + 1] | 32) : 0;
    const int prefix = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 0;
    bool after_prefix = false;
    if (prefix && (base == prefix || base == 0)) {
        base = prefix;
        i += 2;
        after_prefix = true;
    }
    const bool zeros_only = base == 0 && t[i] == '0';
    if (base == 0) base = 10;
    uint64_t v = 0;
    bool big = false, digit = after_prefix;
    size_t digits = 0;
    const size_t first = i;
    char *dst = t + first;
    for (; i < n; i++) {
        if (t[i] == '_') {
            if (!digit) return false;
            digit = false;
            continue;
        }
        const int d = t[i] >= '0' && t[i] <= '9'     ? t[i] - '0'
                      : isalpha((unsigned char)t[i]) ? (t[i] | 32) - 'a' + 10
                                                     : 99;
        if (d >= base || (zeros_only && d)) return false;
        digit = true;
        digits++;
        *dst++ = t[i];
        big = big || __builtin_mul_overflow(v, (uint64_t)base, &v) || __builtin_add_overflow(v, (uint64_t)d, &v);
    }
    if (!digits || !digit) return false;
    *dst = 0;
    if (!big && v <= (uint64_t)INT64_MAX + minus) {
        *out = v_int(minus ? (int64_t)(0 - v) : (int64_t)v);
        return true;
    }
    if (base != 10) return rt_fail(r, "OverflowError: integers are limited to 64 bits");
    char *text = t + first;
    while (*text == '0') text++;
    const val sign = v_str(minus ? STR("-") : STR("")), rest = v_str(str_of(text));
    val all;
    if (!v_copy_str(r, s_of(&rest), &all) || !op_concat(r, &sign, &all, out)) return false;
    out->type = V_BIG;
    return true;
}

bool s_parse_float(str s, double *out) {
    char t[1100];
    size_t n, k = 0;
    if (!strip_number(s, t, sizeof t, &n)) return false;
    const char *p = t + (*t == '-' || *t == '+');
    if (strcasecmp(p, "inf") == 0 || strcasecmp(p, "infinity") == 0 || strcasecmp(p, "nan") == 0) {
        *out = *p == 'n' || *p == 'N' ? NAN : *t == '-' ? -INFINITY : INFINITY;
        return true;
    }
    for (size_t i = 0; i < n; i++) { /* only what Python's grammar has: no hex, underscores between digits */
        if (t[i] == '_') {
            if (!i || !isdigit((unsigned char)t[i - 1]) || !isdigit((unsigned char)t[i + 1])) return false;
            continue;
        }
        if (!isdigit((unsigned char)t[i]) && !strchr("+-.eE", t[i])) return false;
        t[k++] = t[i];
    }
    t[k] = 0;
    char *end;
    *out = strtod(t, &end);
    return end != t && !*end;
}
