/* Lexer: template text to tokens. Newlines are normalised, one trailing newline is dropped, and the white
 * space rules of trim_blocks, lstrip_blocks and the - and + signs are settled here, so the parser never
 * thinks about white space. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

typedef struct lexer {
    arena *a;
    const char *p, *end, *begin;
    int line;
    bool line_start; /* the previous match ended in a newline (or nothing came before) */
    token *v;
    size_t n, cap;
    uint8_t *open; /* brackets that wait for their closing one */
    size_t n_open, cap_open;
    buf scratch;
    err *e;
} lexer;

bool syntax_fail(err *e, int line, const char *fmt, ...) {
    char msg[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    return fail(e, ERR_INPUT, "E-TEMPLATE-SYNTAX", "chat template line %d: %s", line, msg);
}

static bool no_memory(err *e) { return fail(e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory"); }

static bool add(lexer *l, token t) {
    if (l->n == l->cap) {
        const size_t cap = l->cap ? l->cap * 2 : 256;
        token *v = arena_take(l->a, cap, sizeof *v);
        if (!v) return no_memory(l->e);
        if (l->n) memcpy(v, l->v, l->n * sizeof *v);
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = t;
    return true;
}

static bool add_plain(lexer *l, token_type type, str text) {
    return add(l, (token){ .type = type, .line = l->line, .text = text });
}

static bool at(const lexer *l, const char *p, const char *text) {
    const size_t n = strlen(text);
    return (size_t)(l->end - p) >= n && memcmp(p, text, n) == 0;
}

static const char *skip_space(const lexer *l, const char *p) {
    while (p < l->end) {
        const char *q = p;
        if (!uni_space(uni_next(&q, l->end))) break;
        p = q;
    }
    return p;
}

/* Move to `to`, counting lines on the way. */
static void advance(lexer *l, const char *to) {
    for (const char *p = l->p; p < to; p++) l->line += *p == '\n';
    if (to > l->p) l->line_start = to[-1] == '\n';
    l->p = to;
}

/* Text before a tag, shortened as the tag's sign asks: '-' strips white space, and without '+' the
 * indentation of a block tag that begins its line goes too. */
static bool add_data(lexer *l, const char *to, char sign, bool is_variable) {
    str s = { l->p, (size_t)(to - l->p) };
    if (sign == '-') {
        const char *q = s.p + s.n;
        while (q > s.p) {
            const char *w = q;
            if (!uni_space(uni_prev(s.p, &w))) break;
            q = w;
        }
        s.n = (size_t)(q - s.p);
    } else if (sign != '+' && !is_variable) {
        const char *nl = s.n ? memrchr(s.p, '\n', s.n) : NULL;
        const char *from = nl ? nl + 1 : s.p;
        if ((nl || l->line_start) && from < to) {
            const char *q = from;
            while (q < to) {
                const char *w = q;
                if (!uni_space(uni_next(&w, to))) break;
                q = w;
            }
            if (q == to) s.n = (size_t)(from - s.p);
        }
    }
    return s.n == 0 || add_plain(l, T_DATA, s);
}

/* {% raw %} at p? Its end, and its sign. */
static const char *raw_open(const lexer *l, const char *p, char *sign) {
    if (!at(l, p, "{%")) return NULL;
    p += 2;
    *sign = 0;
    if (p < l->end && (*p == '-' || *p == '+')) *sign = *p++;
    p = skip_space(l, p);
    if (!at(l, p, "raw")) return NULL;
    p = skip_space(l, p + 3);
    if (at(l, p, "-%}")) return skip_space(l, p + 3);
    return at(l, p, "%}") ? p + 2 : NULL;
}

/* End of a tag whose last bytes start at p: +%} keeps, -%} strips, %} eats one newline. */
static const char *block_close(const lexer *l, const char *p, const char *mark) {
    const bool plus = p < l->end && *p == '+', minus = p < l->end && *p == '-';
    const char *q = p + (plus || minus);
    if (!at(l, q, mark)) return NULL;
    q += 2;
    if (minus) return skip_space(l, q);
    return !plus && q < l->end && *q == '\n' ? q + 1 : q;
}

static bool lex_raw(lexer *l, const char *body) {
    advance(l, body);
    for (const char *p = l->p; p < l->end; p++) {
        if (!at(l, p, "{%")) continue;
        char sign = 0;
        const char *q = p + 2;
        if (q < l->end && (*q == '-' || *q == '+')) sign = *q++;
        q = skip_space(l, q);
        if (!at(l, q, "endraw")) continue;
        q = block_close(l, skip_space(l, q + 6), "%}");
        if (!q) continue;
        if (!add_data(l, p, sign, false)) return false;
        advance(l, q);
        return true;
    }
    return l->p == l->end || syntax_fail(l->e, l->line, "missing end of raw directive");
}

static bool lex_comment(lexer *l, const char *body) {
    advance(l, body);
    const char *p = memmem(l->p, (size_t)(l->end - l->p), "#}", 2);
    if (!p) return l->p == l->end || syntax_fail(l->e, l->line, "missing end of comment tag");
    if (p > l->p && (p[-1] == '-' || p[-1] == '+')) p--;
    advance(l, block_close(l, p, "#}"));
    return true;
}

/* ---- inside a tag ---- */

static const char *digits(const lexer *l, const char *p, bool hex, const char *allowed) {
    const char *start = p;
    while (p < l->end) {
        const char *q = p;
        if (*q == '_' && (q > start || hex)) q++;
        if (q >= l->end || !*q || !strchr(allowed, *q)) break;
        p = q + 1;
    }
    return p;
}

static bool big_literal(lexer *l, str text, val *out) {
    char *s = arena_take(l->a, text.n + 1, 1);
    if (!s) return no_memory(l->e);
    size_t n = 0;
    for (size_t i = 0; i < text.n; i++)
        if (text.p[i] != '_') s[n++] = text.p[i];
    s[n] = 0;
    char *end;
    errno = 0;
    const int base = n > 2 && s[0] == '0' ? (s[1] | 32) == 'x'   ? 16
                                            : (s[1] | 32) == 'o' ? 8
                                            : (s[1] | 32) == 'b' ? 2
                                                                 : 10
                                          : 10;
    const long long v = strtoll(base == 10 || base == 16 ? s : s + 2, &end, base);
    if (errno != ERANGE) {
        *out = v_int(v);
        return true;
    }
    if (base != 10) return syntax_fail(l->e, l->line, "integer literal beyond 64 bits");
    *out = (val){ .type = V_BIG, .n = n, .u.s = s };
    return true;
}

static bool lex_number(lexer *l) {
    static const char dec[] = "0123456789";
    const char *p = l->p, *q = digits(l, p, false, dec), *f = q;
    const bool after_dot = p > l->begin && p[-1] == '.';
    bool is_float = false;
    if (!after_dot) {
        if (f + 1 < l->end && *f == '.' && f[1] >= '0' && f[1] <= '9') {
            f = digits(l, f + 1, false, dec);
            is_float = true;
        }
        if (f < l->end && (*f == 'e' || *f == 'E')) {
            const char *x = f + 1;
            if (x < l->end && (*x == '+' || *x == '-')) x++;
            if (x < l->end && *x >= '0' && *x <= '9') {
                f = digits(l, x, false, dec);
                is_float = true;
            }
        }
    }
    token t = { .line = l->line };
    if (is_float) {
        buf_clear(&l->scratch);
        for (const char *c = p; c < f; c++)
            if (*c != '_') buf_byte(&l->scratch, *c);
        t.type = T_FLOAT;
        t.value = v_float(strtod(l->scratch.p, NULL));
        q = f;
    } else {
        if (*p == '0') {
            const char kind = p + 1 < l->end ? p[1] | 32 : 0;
            const char *set = kind == 'x'   ? "0123456789abcdefABCDEF"
                              : kind == 'o' ? "01234567"
                              : kind == 'b' ? "01"
                                            : NULL;
            const char *x = set ? digits(l, p + 2, true, set) : NULL;
            if (set && x > p + 2)
                q = x;
            else
                q = digits(l, p, false, "0");
        }
        t.type = T_INT;
        if (!big_literal(l, (str){ p, (size_t)(q - p) }, &t.value)) return false;
    }
    t.text = (str){ p, (size_t)(q - p) };
    l->p = q;
    l->line_start = false;
    return add(l, t);
}

static bool put_cp(lexer *l, uint32_t cp) {
    if (cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
        return syntax_fail(l->e, l->line, "escape in a string is no Unicode character");
    char out[4];
    buf_add(&l->scratch, out, uni_put(out, (int32_t)cp));
    return true;
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* One escape; *pp stands behind the backslash. Python's unicode-escape: unknown ones stay as they are. */
static bool unescape(lexer *l, const char **pp, const char *end) {
    const char *p = *pp;
    const char c = *p++;
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *k = c ? strchr(from, c) : NULL;
    if (c == '\n') {
        *pp = p;
        return true;
    }
    if (k) {
        buf_byte(&l->scratch, to[k - from]);
        *pp = p;
        return true;
    }
    if (c >= '0' && c <= '7') {
        uint32_t v = (uint32_t)(c - '0');
        for (int i = 0; i < 2 && p < end && *p >= '0' && *p <= '7'; i++) v = v * 8 + (uint32_t)(*p++ - '0');
        *pp = p;
        return put_cp(l, v);
    }
    const int want = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (want) {
        uint32_t v = 0;
        for (int i = 0; i < want; i++) {
            const int d = p < end ? hex_digit(*p) : -1;
            if (d < 0) return syntax_fail(l->e, l->line, "truncated \\%c escape in a string", c);
            v = v << 4 | (uint32_t)d;
            p++;
        }
        *pp = p;
        return put_cp(l, v);
    }
    if (c == 'N') return syntax_fail(l->e, l->line, "\\N{...} escapes are not supported");
    if ((unsigned char)c >= 0x80) { /* jinja2 escapes non-ASCII first, so the backslash eats that one's */
        p--;
        const uint32_t cp = (uint32_t)uni_next(&p, end);
        buf_printf(&l->scratch, cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x", cp);
        *pp = p;
        return true;
    }
    buf_byte(&l->scratch, '\\');
    buf_byte(&l->scratch, c);
    *pp = p;
    return true;
}

static bool lex_string(lexer *l) {
    const char quote = *l->p, *p = l->p + 1;
    const char *close = p;
    while (close < l->end && *close != quote) close += *close == '\\' && close + 1 < l->end ? 2 : 1;
    if (close >= l->end) return syntax_fail(l->e, l->line, "unexpected char %c (string is never closed)", quote);
    buf_clear(&l->scratch);
    while (p < close) {
        if (*p != '\\') {
            const char *q = memchr(p, '\\', (size_t)(close - p));
            if (!q) q = close;
            buf_add(&l->scratch, p, (size_t)(q - p));
            p = q;
            continue;
        }
        p++;
        if (p >= close) return syntax_fail(l->e, l->line, "\\ at end of string");
        if (!unescape(l, &p, close)) return false;
    }
    const str s = arena_str(l->a, buf_view(&l->scratch));
    if (!s.p) return no_memory(l->e);
    if (!add_plain(l, T_STRING, s)) return false;
    advance(l, close + 1);
    return true;
}

static bool lex_name(lexer *l) {
    const char *p = l->p;
    bool good = true;
    while (p < l->end) {
        const char *q = p;
        const int32_t c = uni_next(&q, l->end);
        if (!uni_word(c)) break;
        good = good && (p > l->p ? uni_word_continue(c) : uni_word_start(c));
        p = q;
    }
    const str s = { l->p, (size_t)(p - l->p) };
    if (!good) return syntax_fail(l->e, l->line, "invalid character in identifier '" STR_FMT "'", STR_ARG(s));
    if (!add_plain(l, T_NAME, s)) return false;
    l->p = p;
    l->line_start = false;
    return true;
}

static token_type operator_type(const lexer *l, size_t *n) {
    static const struct {
        char text[3];
        token_type type;
    } ops[] = {
        { "//", T_FLOORDIV }, { "**", T_POW },   { "==", T_EQ },      { "!=", T_NE },      { "<=", T_LE },
        { ">=", T_GE },       { "+", T_ADD },    { "-", T_SUB },      { "*", T_MUL },      { "/", T_DIV },
        { "%", T_MOD },       { "~", T_TILDE },  { "<", T_LT },       { ">", T_GT },       { "=", T_ASSIGN },
        { ".", T_DOT },       { ":", T_COLON },  { ",", T_COMMA },    { "|", T_PIPE },     { ";", T_SEMICOLON },
        { "(", T_LPAREN },    { ")", T_RPAREN }, { "[", T_LBRACKET }, { "]", T_RBRACKET }, { "{", T_LBRACE },
        { "}", T_RBRACE },
    };
    for (size_t i = 0; i < ARRAY_LEN(ops); i++)
        if (at(l, l->p, ops[i].text)) {
            *n = strlen(ops[i].text);
            return ops[i].type;
        }
    return T_EOF;
}

static bool lex_operator(lexer *l) {
    size_t n = 0;
    const token_type type = operator_type(l, &n);
    if (type == T_EOF) {
        const char *q = l->p;
        const int32_t c = uni_next(&q, l->end);
        return syntax_fail(l->e, l->line, "unexpected char U+%04X '" STR_FMT "'", (unsigned)c,
                           STR_ARG(((str){ l->p, (size_t)(q - l->p) })));
    }
    if (type == T_LPAREN || type == T_LBRACKET || type == T_LBRACE) {
        if (l->n_open == l->cap_open) {
            const size_t cap = l->cap_open ? l->cap_open * 2 : 64;
            uint8_t *v = arena_take(l->a, cap, 1);
            if (!v) return no_memory(l->e);
            if (l->n_open) memcpy(v, l->open, l->n_open);
            l->open = v;
            l->cap_open = cap;
        }
        l->open[l->n_open++] = (uint8_t)(type + 1); /* the closing one follows in the enumeration */
    } else if (type == T_RPAREN || type == T_RBRACKET || type == T_RBRACE) {
        if (!l->n_open) return syntax_fail(l->e, l->line, "unexpected '%c'", *l->p);
        if (l->open[--l->n_open] != type)
            return syntax_fail(l->e, l->line, "unexpected '%c', expected another bracket to close", *l->p);
    }
    if (!add_plain(l, type, (str){ l->p, n })) return false;
    l->p += n;
    l->line_start = false;
    return true;
}

/* The tag from behind its opening mark to behind its end. */
static bool lex_tag(lexer *l, bool is_variable) {
    while (l->p < l->end) {
        if (!l->n_open) {
            const char *q = NULL;
            if (!is_variable)
                q = block_close(l, l->p, "%}");
            else if (at(l, l->p, "-}}"))
                q = skip_space(l, l->p + 3);
            else if (at(l, l->p, "}}"))
                q = l->p + 2;
            if (q) {
                if (!add_plain(l, is_variable ? T_VAR_END : T_BLOCK_END, (str){ l->p, 2 })) return false;
                advance(l, q);
                return true;
            }
        }
        const char *q = l->p;
        const int32_t c = uni_next(&q, l->end);
        bool ok = true;
        if (uni_space(c))
            advance(l, skip_space(l, l->p));
        else if (c >= '0' && c <= '9')
            ok = lex_number(l);
        else if (uni_word(c))
            ok = lex_name(l);
        else if (c == '\'' || c == '"')
            ok = lex_string(l);
        else
            ok = lex_operator(l);
        if (!ok) return false;
    }
    return true; /* the parser meets the end of the template and says what was open */
}

static const char *find_tag(const lexer *l) {
    for (const char *p = l->p; p + 1 < l->end; p++) {
        p = memchr(p, '{', (size_t)(l->end - p - 1));
        if (!p) return NULL;
        if (p[1] == '{' || p[1] == '%' || p[1] == '#') return p;
    }
    return NULL;
}

static bool lex_all(lexer *l) {
    while (l->p < l->end) {
        const char *tag = find_tag(l);
        if (!tag) {
            if (!add_plain(l, T_DATA, (str){ l->p, (size_t)(l->end - l->p) })) return false;
            advance(l, l->end);
            break;
        }
        char sign = 0;
        const char *body = raw_open(l, tag, &sign);
        if (body) {
            if (!add_data(l, tag, sign, false) || !lex_raw(l, body)) return false;
            continue;
        }
        const char kind = tag[1];
        body = tag + 2;
        if (body < l->end && (*body == '-' || *body == '+')) sign = *body++;
        if (!add_data(l, tag, sign, kind == '{')) return false;
        if (kind == '#') {
            if (!lex_comment(l, body)) return false;
            continue;
        }
        advance(l, tag);
        if (!add_plain(l, kind == '{' ? T_VAR_BEGIN : T_BLOCK_BEGIN, (str){ tag, 2 })) return false;
        advance(l, body);
        if (!lex_tag(l, kind == '{')) return false;
    }
    return add_plain(l, T_EOF, (str){ l->p, 0 });
}

/* CR and CRLF become LF; one trailing newline goes. */
static bool normalise(lexer *l, str source) {
    char *s = arena_take(l->a, source.n + 1, 1);
    if (!s) return no_memory(l->e);
    size_t n = 0;
    for (size_t i = 0; i < source.n; i++) {
        if (source.p[i] == '\r') {
            s[n++] = '\n';
            if (i + 1 < source.n && source.p[i + 1] == '\n') i++;
        } else {
            s[n++] = source.p[i];
        }
    }
    if (n && s[n - 1] == '\n') n--;
    l->begin = l->p = s;
    l->end = s + n;
    return true;
}

bool jinja_lex(arena *a, str source, token **out, size_t *n, err *e) {
    lexer l = { .a = a, .line = 1, .line_start = true, .e = e };
    if (!uni_valid(source)) return fail(e, ERR_INPUT, "E-TEMPLATE-SYNTAX", "chat template: not valid UTF-8");
    const bool ok = normalise(&l, source) && lex_all(&l);
    buf_free(&l.scratch);
    *out = l.v;
    *n = l.n;
    return ok;
}
