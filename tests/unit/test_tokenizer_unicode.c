/* UTF-8 and Unicode helpers of the tokenizer. What agrees with HF on every code point is tests/e2e's part. */
#include "base/buf.h"
#include "lib/toytok.h"
#include "text/unicode.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>
#include <stdlib.h>

/* Every code point goes out and comes back; surrogates and beyond are no UTF-8. */
static void all_codes(void **state) {
    (void)state;
    for (uint32_t c = 0; c < UNICODE_CODES; c++) {
        uint8_t p[4];
        size_t len;
        const int n = utf8_put(p, c);
        if (c >= 0xD800 && c < 0xE000) {
            assert_true(utf8_step(p, 3) < 0);
            continue;
        }
        if (utf8_step(p, 4) != n || utf8_get(p, &len) != c || len != (size_t)n) fail_msg("U+%04X", (unsigned)c);
        for (int k = 1; k < n; k++)
            if (utf8_step(p, (size_t)k) != 0) fail_msg("U+%04X cut after %d", (unsigned)c, k);
    }
}

/* All sequences of three bytes against the table of well-formed sequences (Unicode, table 3-7). */
static bool well_formed(const uint8_t *p, int n) {
    if (n == 1) return p[0] < 0x80;
    if (n == 2) return p[0] >= 0xC2 && p[0] <= 0xDF && (p[1] & 0xC0) == 0x80;
    const uint8_t lo = p[0] == 0xE0 ? 0xA0 : 0x80, hi = p[0] == 0xED ? 0x9F : 0xBF;
    return p[0] >= 0xE0 && p[0] <= 0xEF && p[1] >= lo && p[1] <= hi && (p[2] & 0xC0) == 0x80;
}

static void all_triples(void **state) {
    (void)state;
    for (uint32_t v = 0; v < 1u << 24; v++) {
        const uint8_t p[3] = { (uint8_t)(v >> 16), (uint8_t)(v >> 8), (uint8_t)v };
        const int k = utf8_step(p, 3);
        int want = 0;
        for (int n = 1; n <= 3 && !want; n++)
            if (well_formed(p, n)) want = n;
        if (want ? k != want : k > 0) fail_msg("%06X gives %d", (unsigned)v, k);
        if (k == 0 && (p[0] < 0xF0 || p[0] > 0xF4)) fail_msg("%06X is no prefix", (unsigned)v);
    }
}

static void spaces_and_words(void **state) {
    (void)state;
    int spaces = 0, words = 0;
    for (uint32_t c = 0; c < UNICODE_CODES; c++) {
        spaces += unicode_is_space(c);
        words += unicode_is_word(c);
    }
    assert_int_equal(spaces, 25);
    assert_int_equal(words, 144667); /* Unicode 16.0 */
    assert_true(unicode_is_space(0x85) && unicode_is_space(0xA0) && unicode_is_space(0x3000));
    assert_false(unicode_is_space(0x180E) || unicode_is_space(0x200B) || unicode_is_space(0xFEFF));
    assert_true(unicode_is_word('_') && unicode_is_word('z') && unicode_is_word(0x301) && unicode_is_word(0x200D));
    assert_false(unicode_is_word('-') || unicode_is_word(0xB2) || unicode_is_word(' '));
}

/* ---- NFC ---- */

static void nfc_is(const char *text, const char *want) {
    buf out = { 0 };
    buf_puts(&out, "-");
    const bool changed = unicode_nfc_append(&out, str_of(text));
    assert_string_equal(changed ? out.p + 1 : text, want);
    assert_int_equal(out.n, 1 + (changed ? strlen(want) : 0));
    buf_free(&out);
}

static void nfc(void **state) {
    (void)state;
    nfc_is("", "");
    buf none = { 0 };
    assert_false(unicode_nfc_append(&none, STR("caf\u00E9 \u4E2D\u0928\u094D"))); /* no work for ordinary text */
    nfc_is("plain ASCII", "plain ASCII");
    nfc_is("\u00E9", "\u00E9");
    nfc_is("xe\u0301y", "x\u00E9y");
    nfc_is("\u212B", "\u00C5");
    nfc_is("\u1E9B\u0323", "\u1E9B\u0323");
    nfc_is("\u00BD\uFF11", "\u00BD\uFF11");   /* not NFKC */
    nfc_is("q\u0307\u0323", "q\u0323\u0307"); /* reordered */
    nfc_is("a\u0328\u0301", "\u0105\u0301");
    nfc_is("\u0301e\u0301", "\u0301\u00E9");
    nfc_is("\u1100\u1161\u11A8", "\uAC01"); /* Hangul */
    nfc_is("\uAC00\u11A8\u11A8", "\uAC01\u11A8");
    nfc_is("\u0958", "\u0915\u093C"); /* excluded from composition */
    nfc_is("\u0344", "\u0308\u0301");
    nfc_is("\u0928\u094D\u0926", "\u0928\u094D\u0926");     /* marks in order: nothing to do */
    nfc_is("\U00011935\U00011930", "\U00011935\U00011930"); /* HF's tables are older than this composition */
    nfc_is("a\u0897\u0301\u0323b", "a\u0897\u0323\u0301b"); /* a mark that HF does not know bounds reordering */
    nfc_is("e\u1AC1\u0301", "e\u1AC1\u0301");
    nfc_is("\U000105D2\u0307", "\U000105D2\u0307");
}

/* A run of marks in the worst order, hundreds of thousands long: sorted, in linear time. */
static void long_runs(void **state) {
    (void)state;
    buf text = { 0 }, out = { 0 };
    const double t0 = cpu_seconds();
    buf_puts(&text, "q");
    for (int i = 0; i < 200000; i++) buf_puts(&text, "\u0301\u0323");
    assert_true(unicode_nfc_append(&out, buf_view(&text)));
    assert_int_equal(out.n, text.n);
    for (size_t i = 0; i < 400000; i++) assert_memory_equal(out.p + 1 + 2 * i, i < 200000 ? "\u0323" : "\u0301", 2);
    assert_true(cpu_seconds() - t0 < 20); /* quadratic: minutes */
    buf_free(&text);
    buf_free(&out);
}

/* Normalizing twice is normalizing once; parts that begin with an inert character are independent. */
static void random_nfc(void **state) {
    (void)state;
    static const uint32_t pool[] = { 'a',     'e',     'q',    0x301,   0x323,  0x307,  0x328, 0x345,
                                     0x344,   0x1100,  0x1161, 0x11A8,  0xAC00, 0x915,  0x93C, 0x94D,
                                     0x958,   0xE9,    0x1E69, 0x212B,  0x3099, 0x30AB, 0x897, 0x1AC1,
                                     0x11935, 0x11930, 0x4E2D, 0x1F642, 0xF71,  0xF72,  0xF74 };
    rnd r = rnd_open(3);
    for (int round = 0; round < 20000; round++) {
        buf a = { 0 }, b = { 0 }, na = { 0 }, nb = { 0 }, whole = { 0 }, nwhole = { 0 };
        for (uint32_t n = rnd_below(&r, 10); n; n--) toytok_code(&a, pool[rnd_below(&r, ARRAY_LEN(pool))]);
        toytok_code(&b, '-');
        for (uint32_t n = rnd_below(&r, 10); n; n--) toytok_code(&b, pool[rnd_below(&r, ARRAY_LEN(pool))]);
        if (!unicode_nfc_append(&na, buf_view(&a))) buf_str(&na, buf_view(&a));
        if (!unicode_nfc_append(&nb, buf_view(&b))) buf_str(&nb, buf_view(&b));
        buf_str(&whole, buf_view(&a));
        buf_str(&whole, buf_view(&b));
        if (!unicode_nfc_append(&nwhole, buf_view(&whole))) buf_str(&nwhole, buf_view(&whole));
        buf_clear(&b);
        if (unicode_nfc_append(&b, buf_view(&nwhole))) assert_true(str_eq(buf_view(&b), buf_view(&nwhole)));
        buf_str(&na, buf_view(&nb));
        assert_true(str_eq(buf_view(&na), buf_view(&nwhole)));
        buf_free(&a);
        buf_free(&b);
        buf_free(&na);
        buf_free(&nb);
        buf_free(&whole);
        buf_free(&nwhole);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_codes), cmocka_unit_test(all_triples), cmocka_unit_test(spaces_and_words),
        cmocka_unit_test(nfc),       cmocka_unit_test(long_runs),   cmocka_unit_test(random_nfc),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
