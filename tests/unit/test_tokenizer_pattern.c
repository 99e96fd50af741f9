/* Split patterns: the direct scanner and PCRE2 give the same spans, what could mean something else is refused, and no
 * text takes long. */
#include "lib/toytok.h"
#include "text/pretok.h"
#include "text/unicode.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define SPACES "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* Families whose patterns are runs, and some that only look like it. */
static const struct {
    const char *pattern;
    bool direct;
} patterns[] = {
    { CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" SPACES,
      true },                                                                                              /* Qwen3.5 */
    { CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES, true }, /* Qwen2 */
    { CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES,
      true },                                                                                       /* Llama-3 */
    { "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", true }, /* GPT-2 */
    { "\\p{N}{1,3}", true },
    { "[a-z]+|\\s+", true },
    { "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+" CONTRACTIONS "?|"
      "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*" CONTRACTIONS "?|"
      "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES,
      false },                      /* o200k */
    { "\\s*[\\r\\n]+", false },     /* nothing takes what it looks at: not linear */
    { "\\s+?(?!\\S)|\\s+", false }, /* lazy */
    { "\\s+(?!\\w)|\\s+", false },  /* looks at something else */
    { "\\p{L}*", false },           /* empty matches */
    { "(?<=a)b+|.", false },
    { "(?>a+)b|\\w++|\\d{2,4}", false },
};

static splitter *opened(const char *pattern) {
    splitter *s = NULL;
    err e = { 0 };
    if (!splitter_open(&s, str_of(pattern), false, &e)) fail_msg("%s: %s", e.id, e.msg);
    return s;
}

/* Text in which every alternative and its neighbours come up. */
static void random_text(buf *out, rnd *r) {
    static const uint32_t hot[] = { ' ',     ' ',    ' ',    '\n',    '\n',   '\r',    '\t',   '\'',     '\'',
                                    's',     'S',    't',    'r',     'e',    'v',     'm',    'l',      'L',
                                    'd',     'a',    'Z',    '0',     '9',    '.',     '-',    '/',      0x17F,
                                    0x212A,  0x85,   0xA0,   0x180E,  0x200B, 0x2028,  0x3000, 0x301,    0x94D,
                                    0x663,   0xB2,   0x216B, 0x4E2D,  0xAC00, 0x1F642, 0xE000, 0x10FFFF, 0x1C89,
                                    0x10D40, 0xA7CB, 0x897,  0x1E5F1, 0xFFFF, 0,       0x1C5 };
    buf_clear(out);
    for (uint32_t n = rnd_below(r, 24); n; n--) {
        uint32_t c = hot[rnd_below(r, ARRAY_LEN(hot))];
        if (rnd_below(r, 16) == 0) c = rnd_below(r, UNICODE_CODES);
        if (c >= 0xD800 && c < 0xE000) c = 'x';
        for (uint32_t k = rnd_below(r, 6) ? 1 : rnd_below(r, 5); k; k--) toytok_code(out, c);
    }
}

static void both_ways(const splitter *s, str text, const char *pattern) {
    spans a = { 0 }, b = { 0 };
    err e = { 0 };
    assert_true(splitter_run(s, &a, text, false, &e));
    assert_true(splitter_run(s, &b, text, true, &e));
    bool same = a.n == b.n;
    for (size_t i = 0; same && i < a.n; i++) same = a.v[i].end == b.v[i].end && a.v[i].match == b.v[i].match;
    if (!same) {
        for (size_t i = 0; i < text.n; i++) print_error("\\x%02X", (unsigned)(uint8_t)text.p[i]);
        fail_msg(": spans differ for %s", pattern);
    }
    assert_true(text.n == 0 || (a.n && a.v[a.n - 1].end == text.n));
    spans_free(&a);
    spans_free(&b);
}

static void scanner_equals_pcre2(void **state) {
    (void)state;
    rnd r = rnd_open(35);
    buf text = { 0 };
    for (size_t i = 0; i < ARRAY_LEN(patterns); i++) {
        splitter *s = opened(patterns[i].pattern);
        if (splitter_is_direct(s) != patterns[i].direct) fail_msg("direct is wrong for %s", patterns[i].pattern);
        for (int k = 0; k < (patterns[i].direct ? 20000 : 500); k++) {
            random_text(&text, &r);
            both_ways(s, buf_view(&text), patterns[i].pattern);
        }
        splitter_close(s);
    }
    buf_free(&text);
}

/* Random patterns of the scanner's grammar: also sets that overlap in unusual ways. */
static void random_patterns(void **state) {
    (void)state;
    static const char *const sets[] = { "a",   "[ab]", "[^a]",   "\\s",          "\\p{L}", "[\\r\\n]",
                                        "\\S", "[ a]", "\\p{N}", "[^\\s\\p{L}]", "." };
    rnd r = rnd_open(36);
    buf text = { 0 };
    int direct = 0;
    for (int round = 0; round < 400; round++) {
        buf p = { 0 };
        for (uint32_t n = 1 + rnd_below(&r, 5); n; n--) {
#define SET sets[rnd_below(&r, ARRAY_LEN(sets))]
            if (p.n) buf_byte(&p, '|');
            switch (rnd_below(&r, 6)) {
            case 0: buf_printf(&p, "%s?%s+", SET, SET); break;
            case 1: buf_printf(&p, "%s?%s{1,3}%s*", SET, SET, SET); break;
            case 2: buf_printf(&p, "%s", SET); break;
            case 3: buf_puts(&p, "\\s*[\\r\\n]+|\\s+(?!\\S)"); break;
            case 4: buf_printf(&p, "(?i:'s|a%s|'ll)", SET); break;
            default: buf_printf(&p, "%s+", SET); break;
            }
        }
        splitter *s = NULL;
        err e = { 0 };
        if (splitter_open(&s, buf_view(&p), false, &e)) { /* a set under (?i) is refused */
            direct += splitter_is_direct(s);
            for (int k = 0; k < 60; k++) {
                random_text(&text, &r);
                both_ways(s, buf_view(&text), p.p);
            }
            splitter_close(s);
        }
        buf_free(&p);
    }
    assert_true(direct > 100);
    buf_free(&text);
}

/* Spans as "a|b", matches in brackets. */
static void splits(const char *pattern, const char *text, const char *want) {
    splitter *s = opened(pattern);
    for (int general = 0; general < 2; general++) {
        spans x = { 0 };
        buf out = { 0 };
        err e = { 0 };
        assert_true(splitter_run(s, &x, str_of(text), general, &e));
        for (size_t i = 0, at = 0; i < x.n; at = x.v[i++].end)
            buf_printf(&out, x.v[i].match ? "[%.*s]" : "%.*s|", (int)(x.v[i].end - at), text + at);
        assert_string_equal(out.p ? out.p : "", want);
        buf_free(&out);
        spans_free(&x);
    }
    splitter_close(s);
}

static void meanings(void **state) {
    (void)state;
    splits("b+", "abbcb", "a|[bb]c|[b]");
    splits("(?i:'s|k)", "'\xC5\xBFx'S\xE2\x84\xAAK", "['\xC5\xBF]x|['S][\xE2\x84\xAA][K]"); /* long s, Kelvin sign */
    splits("\\p{L}+", "a\xE1\xB2\x89 b", "[a\xE1\xB2\x89] |[b]");                           /* U+1C89: Unicode 16 */
    splits("\\s+",
           "a\xC2\x85\xC2\xA0\xE1\xA0\x8E"
           "b",
           "a|[\xC2\x85\xC2\xA0]\xE1\xA0\x8E"
           "b|");
    splits("[\\x41-\\x{43}\\u0044\\]-]+", "ABCDE]-", "[ABCD]E|[]-]");
    splits("[^\\S\\n]+", "a \n\t", "a|[ ]\n|[\t]");
    splits("\\P{L}|\\p{^N}", "1a", "[1][a]");
    splits("\\p{Uppercase_Letter}\\p{ letter }*", "AbCd", "[AbCd]");
    splits("\\w+", "a_1\xC2\xB2\xE2\x80\x8D", "[a_1\xC2\xB2]\xE2\x80\x8D|");
    splits("[\\w]+", "a_1\xC2\xB2", "[a_1]\xC2\xB2|"); /* within brackets it is another set there */
    splits("a{2}|a{3,}", "aaaaa", "[aa][aa]a|");
    splits("a++b|a", "aab", "[aab]");
    splits("a+?b??", "aab", "[a][a]b|");
    splits("(?<!a)b", "abb", "ab|[b]");
    splits("a|b|", "ab", "[a][b]");
    splits("\\.\\*", "a.*b", "a|[.*]b|");
}

static void refused(void **state) {
    (void)state;
    static const char *const bad[] = {
        "",
        "(",
        ")",
        "a)",
        "(a",
        "[a",
        "a**",
        "*a",
        "a{2",
        "a{,3}",
        "a{3,2}",
        "a{2000}",
        "a{2}?",
        "a{2}+",
        "a{2}{3}",
        "\\",
        "\\q",
        "\\b",
        "\\A",
        "\\1",
        "\\x{110000}",
        "\\x{D800}",
        "\\xFF",
        "\\u12",
        "^a",
        "a$",
        "\\p{Han}",
        "\\p{Foo}",
        "\\pL",
        "\\p{",
        "[[:alpha:]]",
        "[a&&b]",
        "[z-a]",
        "[\\s-z]",
        "[]a]",
        "[]",
        "[a-\\d]",
        "(?i)a",
        "(?i:[a-z])",
        "(?i:\\p{L})",
        "(?i:\xC3\xA9)",
        "(?i:ss)",
        "(?i:fl)",
        "(?i:s+)",
        "(?m:a)",
        "(?<n>a)",
        "(?=a)*",
        "(?:)*",
        "a?*",
        "]",
        "}",
        "{",
        "(?<=a+)b",
        "\xFF",
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        splitter *s = NULL;
        err e = { 0 };
        if (splitter_open(&s, str_of(bad[i]), false, &e)) fail_msg("accepted: %s", bad[i]);
        assert_string_equal(e.id, "E-TOK-PATTERN");
        assert_int_equal(e.kind, ERR_INPUT);
    }
    /* Size, depth and blow-up. */
    buf deep = { 0 }, wide = { 0 }, nested = { 0 }, literal = { 0 };
    for (int i = 0; i < 4000; i++) buf_byte(&deep, '(');
    for (int i = 0; i < 400; i++) toytok_code(&literal, 0x4E00 + (uint32_t)i);
    for (int i = 0; i < 9000; i++) buf_byte(&wide, 'a');
    buf_puts(&nested, "((((a{999}){999}){999}){999})");
    const buf *const big[] = { &deep, &wide, &nested, &literal };
    for (size_t i = 0; i < ARRAY_LEN(big); i++) {
        splitter *s = NULL;
        err e = { 0 };
        assert_false(splitter_open(&s, buf_view(big[i]), false, &e));
        assert_string_equal(e.id, "E-TOK-PATTERN");
    }
    buf_free(&deep);
    buf_free(&wide);
    buf_free(&nested);
    buf_free(&literal);
}

/* Exponential backtracking ends in an error, not in a hang. */
static void explosive(void **state) {
    (void)state;
    static const char *const bad[] = { "(?:a+)+b", "(?:a|a)*b", "(?:a|aa)+b", "(?:a*)*b", "(?:(?:a?){20}){20}b" };
    buf text = { 0 };
    for (int i = 0; i < 60; i++) buf_byte(&text, 'a');
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        splitter *s = opened(bad[i]);
        spans x = { 0 };
        err e = { 0 };
        if (!splitter_run(s, &x, buf_view(&text), true, &e)) assert_string_equal(e.id, "E-TOK-PATTERN");
        spans_free(&x);
        splitter_close(s);
    }
    buf_free(&text);
}

/* Time for one character (or unit) repeated: sixteen times the text may take at most 40 times as long. */
static void linear(void **state) {
    (void)state;
    static const char *const units[] = { "a",        " ",   "\n", "\r\n", "1",        "_",  "'", " a", "\xE4\xB8\xAD",
                                         "\xCC\x81", " \n", "a ", "'s",   "\xC2\xA0", "\t." };
    for (size_t p = 0; p < 4; p++) {
        for (size_t u = 0; u < ARRAY_LEN(units) * 2; u++) {
            const bool general = u >= ARRAY_LEN(units);
            const char *unit = units[u % ARRAY_LEN(units)];
            splitter *s = opened(patterns[p].pattern);
            buf text = { 0 };
            double spent[2];
            for (int i = 0; i < 2; i++) {
                while (text.n < (i ? 320000u : 20000u)) buf_puts(&text, unit);
                spent[i] = 1e9;
                for (int k = 0; k < 3; k++) {
                    spans x = { 0 };
                    err e = { 0 };
                    const double t0 = cpu_seconds();
                    assert_true(splitter_run(s, &x, buf_view(&text), general, &e));
                    const double t1 = cpu_seconds() - t0;
                    if (t1 < spent[i]) spent[i] = t1;
                    spans_free(&x);
                }
            }
            if (spent[1] > 40 * spent[0] + 0.02)
                fail_msg("\"%s\": %.4f s, then %.4f s for 16 times as much", unit, spent[0], spent[1]);
            buf_free(&text);
            splitter_close(s);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scanner_equals_pcre2),
        cmocka_unit_test(random_patterns),
        cmocka_unit_test(meanings),
        cmocka_unit_test(refused),
        cmocka_unit_test(explosive),
        cmocka_unit_test(linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
