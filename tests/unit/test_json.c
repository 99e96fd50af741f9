#include "base/json.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "lib/scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static str text_of(const char *s) { return str_of(s); }

/* Parse from a heap block of the exact size, so that a read behind the text is seen by ASan. */
static bool parse(const json **out, arena *a, str s, const json_limits *l, err *e) {
    char *copy = malloc(s.n ? s.n : 1);
    if (s.n) memcpy(copy, s.p, s.n);
    const bool ok = json_parse(out, a, (str){ copy, s.n }, "t.json", l, e);
    free(copy);
    return ok;
}

static const json *good(arena *a, const char *s) {
    const json *v = NULL;
    err e = { 0 };
    if (!parse(&v, a, text_of(s), NULL, &e)) fail_msg("'%s': %s", s, e.msg);
    return v;
}

static void bad_bytes(str s, const char *id, long at, const json_limits *l) {
    arena a = { 0 };
    const json *v = (const json *)1;
    err e = { 0 };
    if (parse(&v, &a, s, l, &e)) fail_msg("accepted: '%.*s'", (int)s.n, s.p);
    assert_null(v);
    if (strcmp(e.id, id) != 0) fail_msg("'%.*s': %s (%s), expected %s", (int)s.n, s.p, e.id, e.msg, id);
    assert_int_equal(e.kind, ERR_INPUT);
    assert_non_null(strstr(e.msg, "t.json"));
    if (at >= 0) {
        char where[40];
        snprintf(where, sizeof where, "byte %ld (", at);
        if (!strstr(e.msg, where)) fail_msg("'%.*s': '%s' does not name %s", (int)s.n, s.p, e.msg, where);
    }
    arena_free(&a);
}

static void bad(const char *s, const char *id, long at) { bad_bytes(text_of(s), id, at, NULL); }

/* ---- values ---- */

static void test_scalars(void **state) {
    (void)state;
    arena a = { 0 };
    assert_int_equal(good(&a, "null")->type, JSON_NULL);
    assert_int_equal(good(&a, " true\n")->type, JSON_TRUE);
    assert_int_equal(good(&a, "\tfalse\r")->type, JSON_FALSE);
    assert_true(json_is_bool(good(&a, "false")));
    assert_false(json_is_bool(good(&a, "0")));
    assert_false(json_is_bool(NULL) || json_is(NULL, JSON_NULL) || json_is_number(NULL));
    const json *s = good(&a, "\"a\\u0000b\"");
    assert_int_equal(s->n, 3);
    assert_memory_equal(s->u.s, "a\0b", 4);
    assert_string_equal(good(&a, "\"\"")->u.s, "");
    arena_free(&a);
}

static void test_integers(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t value;
    } ints[] = { { "0", 0 },
                 { "7", 7 },
                 { "-1", -1 },
                 { "9223372036854775807", INT64_MAX },
                 { "-9223372036854775808", INT64_MIN } };
    arena a = { 0 };
    for (size_t i = 0; i < ARRAY_LEN(ints); i++) {
        const json *v = good(&a, ints[i].text);
        assert_int_equal(v->type, JSON_INT);
        assert_true(v->u.i == ints[i].value);
        assert_true(json_double(v) == (double)ints[i].value);
    }
    static const char *const reals[] = { "9223372036854775808",
                                         "-9223372036854775809",
                                         "-0",
                                         "0.0",
                                         "1e3",
                                         "1E-2",
                                         "123456789012345678901234567890",
                                         "1.5" };
    for (size_t i = 0; i < ARRAY_LEN(reals); i++) {
        const json *v = good(&a, reals[i]);
        assert_int_equal(v->type, JSON_REAL);
        assert_string_equal(v->u.s, reals[i]);
        assert_int_equal(v->n, strlen(reals[i]));
    }
    assert_true(signbit(json_double(good(&a, "-0"))));
    arena_free(&a);
}

static void test_doubles(void **state) {
    (void)state;
    arena a = { 0 };
    assert_true(json_double(good(&a, "1e999")) == INFINITY);
    assert_true(json_double(good(&a, "-1e999")) == -INFINITY);
    assert_true(json_double(good(&a, "1e-999")) == 0);
    assert_true(json_double(good(&a, "0.1")) == 0.1);
    assert_true(json_double(good(&a, "9007199254740993")) == 9007199254740992.0); /* a tie: to even */
    assert_true(json_double(good(&a, "9007199254740993.00000000000000000000000001")) == 9007199254740994.0);
    assert_true(json_double(good(&a, "2.2250738585072011e-308")) == 0x0.fffffffffffffp-1022);
    assert_true(json_double(good(&a, "5e-324")) == 0x1p-1074);
    assert_true(json_double(good(&a, "18446744073709551616")) == 0x1p64);
    arena_free(&a);
}

static void test_containers(void **state) {
    (void)state;
    arena a = { 0 };
    const json *v = good(&a, "{\"a\":[1,{\"b\":[]},\"x\"],\"\":{},\"z\":{\"a\":2}}");
    assert_int_equal(v->type, JSON_OBJECT);
    assert_int_equal(v->n, 3);
    assert_true(str_is(v->u.members[0].key, "a") && str_is(v->u.members[1].key, "") &&
                str_is(v->u.members[2].key, "z"));
    const json *list = json_get(v, "a");
    assert_int_equal(list->n, 3);
    assert_true(list->u.items[0].u.i == 1);
    assert_int_equal(json_get(&list->u.items[1], "b")->n, 0);
    assert_true(str_is(json_str(&list->u.items[2]), "x"));
    assert_int_equal(json_get(v, "")->type, JSON_OBJECT);
    assert_true(json_get(json_get(v, "z"), "a")->u.i == 2);
    assert_null(json_get(v, "b"));
    assert_null(json_get(list, "a"));
    assert_null(json_get(NULL, "a"));
    assert_null(json_get_str(v, (str){ "a\0", 2 }));
    arena_free(&a);
}

/* ---- what is refused ---- */

static void test_syntax_errors(void **state) {
    (void)state;
    static const char *const texts[] = {
        "",
        " ",
        "[",
        "]",
        "{",
        "}",
        "[1,]",
        "[,1]",
        "[1 2]",
        "[}",
        "{]",
        "{\"a\":1,}",
        "{\"a\"}",
        "{\"a\" 1}",
        "{1:2}",
        "{a:1}",
        "'a'",
        "nul",
        "nulll",
        "True",
        "NaN",
        "Infinity",
        "-Infinity",
        "-",
        "+1",
        "01",
        "-01",
        "1.",
        ".5",
        "1e",
        "1e+",
        "0x10",
        "1.e3",
        "\"abc",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12G4\"",
        "\"a\tb\"",
        "\"a\nb\"",
        "/*c*/1",
        "1//c",
        "# 1",
        "[1] x",
        "[1][2]",
        "1 2",
        "{}{}",
        "null null",
        "\v1",
        "1\f",
        "[1,\v2]",
        "\xef\xbb\xbf{}",
        "\\",
        "\"\\",
        "\\u0041",
        "tru e",
        "\"a\" \"b\"",
        ",",
        ":",
        "[1,,2]",
        "{\"a\":}",
        "{\"a\":1 \"b\":2}",
        "{,}",
        "\x7f",
    };
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) bad(texts[i], "E-JSON-SYNTAX", -1);
    bad_bytes((str){ "1\0", 2 }, "E-JSON-SYNTAX", 1, NULL);
    bad_bytes((str){ "\"a\0b\"", 5 }, "E-JSON-SYNTAX", 2, NULL);
}

static void test_positions(void **state) {
    (void)state;
    bad("[1] x", "E-JSON-SYNTAX", 5);
    bad("{\"a\":1}\n\v", "E-JSON-SYNTAX", 8);
    bad("[1,\n 2,\n \"\xff\"]", "E-JSON-UTF8", 10);
    arena a = { 0 };
    err e = { 0 };
    const json *v;
    assert_false(parse(&v, &a, STR("[1,\n 2,\n x]"), NULL, &e));
    assert_non_null(strstr(e.msg, "line 3, column "));
    arena_free(&a);
}

static void test_utf8(void **state) {
    (void)state;
    static const char *const bads[] = {
        "\"\xff\"",
        "\"\xc0\x80\"",
        "\"\xc1\xbf\"",
        "\"\xe0\x80\x80\"",
        "\"\xe0\x9f\xbf\"",
        "\"\xed\xa0\x80\"",
        "\"\xed\xbf\xbf\"",
        "\"\xf0\x80\x80\x80\"",
        "\"\xf0\x8f\xbf\xbf\"",
        "\"\xf4\x90\x80\x80\"",
        "\"\xf5\x80\x80\x80\"",
        "\"\xf8\x88\x80\x80\x80\"",
        "\"\x80\"",
        "\"\xc3\"",
        "\"\xe2\x82\"",
        "\"\xf0\x9f\x98\"",
        "\"\xc3(\"",
        "\"\xe2(\xa1\"",
        "\xc3\xa9\xff",
        "\"\xe2\x82",
        "\"\\ud800\"",
        "\"\\udc00\"",
        "\"\\ud800x\"",
        "\"\\ud800\\u0041\"",
        "\"\\ud83d\\ud83d\"",
        "\"\\udc00\\ud800\"",
        "\"\\uD800\\n\"",
        "\"\\uDBFF\\uE000\"",
        "{\"\\ud800\":1}",
        "\"\\\\\\ud800\"",
        "\"\\ud83d\\ude00\\ude00\"",
    };
    for (size_t i = 0; i < ARRAY_LEN(bads); i++) bad(bads[i], "E-JSON-UTF8", -1);
    arena a = { 0 };
    assert_string_equal(good(&a, "\"\\ud83d\\ude00\"")->u.s, "\xf0\x9f\x98\x80");
    assert_string_equal(good(&a, "\"\\uD83D\\uDE00\"")->u.s, "\xf0\x9f\x98\x80");
    assert_string_equal(good(&a, "\"\\\\ud800\"")->u.s, "\\ud800"); /* a backslash, then letters */
    assert_string_equal(good(&a, "\"\\u00e9\\u20ac\\/\\b\\f\\n\\r\\t\\\"\"")->u.s, "\xc3\xa9\xe2\x82\xac/\b\f\n\r\t\"");
    assert_string_equal(good(&a, "\"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf\xe0\xa0\x80\xf0\x90\x80\x80\x7f\"")->u.s,
                        "\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf\xe0\xa0\x80\xf0\x90\x80\x80\x7f");
    arena_free(&a);
}

/* A bad byte must be found wherever it stands relative to the words in which the text is scanned. */
static void test_bad_byte_anywhere(void **state) {
    (void)state;
    char text[64];
    for (int n = 3; n < 40; n++)
        for (int at = 1; at < n - 1; at++) {
            memset(text, 'a', sizeof text);
            text[0] = text[n - 1] = '"';
            text[at] = '\x01';
            bad_bytes((str){ text, (size_t)n }, "E-JSON-SYNTAX", at, NULL);
            text[at] = '\xbf';
            bad_bytes((str){ text, (size_t)n }, "E-JSON-UTF8", at, NULL);
            if (at + 1 < n - 1) {
                text[at] = '\xc3', text[at + 1] = '\xa9';
                arena a = { 0 };
                const json *v;
                err e = { 0 };
                assert_true(parse(&v, &a, (str){ text, (size_t)n }, NULL, &e));
                arena_free(&a);
            }
        }
}

static void test_duplicates(void **state) {
    (void)state;
    bad("{\"a\":1,\"b\":2,\"a\":3}", "E-JSON-DUP", -1);
    bad("[{\"a\":1,\"\\u0061\":3}]", "E-JSON-DUP", -1);
    bad("{\"\":1,\"\":1}", "E-JSON-DUP", -1);
    arena a = { 0 };
    good(&a, "{\"a\":{\"a\":{\"a\":1}},\"b\":{\"a\":1}}");
    good(&a, "[{\"a\":1},{\"a\":1}]");
    err e = { 0 };
    const json *v;
    assert_true(parse(&v, &a, STR("{\"a\":1,\"a\":2}"), &(json_limits){ .allow_duplicates = true }, &e));
    assert_int_equal(v->n, 2);
    assert_true(json_get(v, "a")->u.i == 2);
    arena_free(&a);
}

static void test_duplicates_large(void **state) {
    (void)state;
    for (int n = 10; n <= 20000; n = n < 20 ? n + 1 : n * 4) {
        buf b = { 0 };
        buf_byte(&b, '{');
        for (int i = 0; i < n; i++) buf_printf(&b, "%s\"key %d\":%d", i ? "," : "", i, i);
        const size_t open = b.n;
        buf_byte(&b, '}');
        arena a = { 0 };
        const json *v;
        err e = { 0 };
        assert_true(parse(&v, &a, buf_view(&b), NULL, &e));
        assert_int_equal(v->n, n);
        assert_true(json_get(v, "key 9")->u.i == 9);
        b.n = open;
        buf_printf(&b, ",\"key %d\":0}", n / 2);
        bad_bytes(buf_view(&b), "E-JSON-DUP", -1, NULL);
        arena_free(&a);
        buf_free(&b);
    }
}

static void nested(buf *b, int depth, const char *open, const char *close) {
    for (int i = 0; i < depth; i++) buf_puts(b, open);
    buf_byte(b, '0');
    for (int i = 0; i < depth; i++) buf_puts(b, close);
}

static void test_depth(void **state) {
    (void)state;
    static const struct { int asked, limit; } cases[] = { { 0, 128 }, { 1, 1 }, { 5, 5 }, { 100000, JSON_DEPTH_MAX } };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const json_limits l = { .max_depth = cases[i].asked };
        for (int object = 0; object < 2; object++) {
            arena a = { 0 };
            buf b = { 0 }, again = { 0 };
            err e = { 0 };
            const json *v;
            nested(&b, cases[i].limit, object ? "{\"a\":" : "[", object ? "}" : "]");
            assert_true(parse(&v, &a, buf_view(&b), &l, &e));
            json_write(&again, v);
            assert_true(str_eq(buf_view(&again), buf_view(&b)));
            buf_clear(&b);
            nested(&b, cases[i].limit + 1, object ? "{\"a\":" : "[", object ? "}" : "]");
            bad_bytes(buf_view(&b), "E-JSON-DEPTH", -1, &l);
            buf_clear(&b);
            for (int k = 0; k < 1000000; k++) buf_byte(&b, '[');
            bad_bytes(buf_view(&b), "E-JSON-DEPTH", -1, &l);
            arena_free(&a);
            buf_free(&b);
            buf_free(&again);
        }
    }
}

static void test_size(void **state) {
    (void)state;
    bad_bytes(STR("[1,2,3]"), "E-JSON-SIZE", -1, &(json_limits){ .max_bytes = 6 });
    arena a = { 0 };
    err e = { 0 };
    const json *v;
    assert_true(parse(&v, &a, STR("[1,2,3]"), &(json_limits){ .max_bytes = 7 }, &e));
    arena_free(&a);
    /* A length that no text has: refused before a byte is read. */
    assert_false(json_parse(&v, &a, (str){ "", SIZE_MAX }, "t.json", NULL, &e));
    assert_string_equal(e.id, "E-JSON-SIZE");
    e = (err){ 0 };
    assert_false(json_parse(&v, &a, (str){ "", UINT32_MAX }, "t.json", &(json_limits){ .max_bytes = SIZE_MAX }, &e));
    assert_string_equal(e.id, "E-JSON-SIZE");
    arena_free(&a);
}

/* The arena's limit bounds tree and scratch: [0,0,0,...] would take 24 times its text. */
static void test_memory_limit(void **state) {
    (void)state;
    static const char *const units[] = { "0,", "{},", "[],", "\"abc\"," };
    for (size_t u = 0; u < ARRAY_LEN(units); u++) {
        buf b = { 0 };
        buf_byte(&b, '[');
        for (int i = 0; i < 100000; i++) buf_puts(&b, units[u]);
        buf_puts(&b, "0]");
        arena a = { .limit = 1 << 20 };
        const json *v;
        err e = { 0 };
        assert_false(parse(&v, &a, buf_view(&b), NULL, &e));
        assert_string_equal(e.id, "E-JSON-SIZE");
        assert_true(a.total <= a.limit);
        arena_free(&a);
        buf_free(&b);
    }
}

/* ---- the tree outlives the text; strings of all lengths ---- */

static void test_strings_survive(void **state) {
    (void)state;
    enum { N = 3000 };
    arena a = { 0 };
    buf b = { 0 };
    buf_byte(&b, '[');
    for (int i = 0; i < N; i++) {
        buf_puts(&b, i ? ",\"" : "\"");
        for (int k = 0; k < (i * 37) % 300; k++) buf_byte(&b, (char)('a' + (i + k) % 26));
        buf_byte(&b, '"');
    }
    buf_puts(&b, ",\"");
    for (int k = 0; k < 300000; k++) buf_byte(&b, 'q');
    buf_puts(&b, "\"]");
    const json *v;
    err e = { 0 };
    assert_true(parse(&v, &a, buf_view(&b), NULL, &e));
    assert_int_equal(v->n, N + 1);
    for (int i = 0; i < N; i++) {
        const str s = json_str(&v->u.items[i]);
        assert_int_equal(s.n, (i * 37) % 300);
        assert_int_equal(s.p[s.n], 0);
        for (size_t k = 0; k < s.n; k++) assert_int_equal(s.p[k], 'a' + (i + (int)k) % 26);
    }
    assert_int_equal(v->u.items[N].n, 300000);
    assert_int_equal(v->u.items[N].u.s[299999], 'q');
    arena_free(&a);
    buf_free(&b);
}

/* ---- writing ---- */

static void test_write_tree(void **state) {
    (void)state;
    static const char *const same[] = {
        "null",
        "[true,false]",
        "{\"a\":[1,-2,3.50,1e+05,123456789012345678901],\"b\":{},\"c\":[],\"\":\"\"}",
        "-0",
        "[[],[[]]]",
        "\"\xc3\xa9\xf0\x9f\x98\x80\x7f\"",
        "-9223372036854775808",
    };
    for (size_t i = 0; i < ARRAY_LEN(same); i++) {
        arena a = { 0 };
        buf b = { 0 };
        json_write(&b, good(&a, same[i]));
        assert_string_equal(b.p, same[i]);
        buf_free(&b);
        arena_free(&a);
    }
}

static void test_write_str(void **state) {
    (void)state;
    buf b = { 0 };
    json_write_str(&b, (str){ "a\"\\/\b\f\n\r\t\x01\x1f\0z\xe2\x82\xac", 16 });
    assert_string_equal(b.p, "\"a\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\\u0000z\xe2\x82\xac\"");
    buf_clear(&b);
    json_write_str(&b, STR("\xff"
                           "a\xc3"));
    assert_string_equal(b.p, "\"\xef\xbf\xbd"
                             "a\xef\xbf\xbd\"");
    buf_clear(&b);
    json_write_str(&b, (str){ NULL, 0 });
    assert_string_equal(b.p, "\"\"");
    buf_free(&b);
}

static void write_double(double v, const char *text) {
    buf b = { 0 };
    json_write_double(&b, v);
    assert_string_equal(b.p, text);
    buf_free(&b);
}

static void test_write_double(void **state) {
    (void)state;
    write_double(0, "0");
    write_double(-0.0, "-0");
    write_double(0.1, "0.1");
    write_double(1.0 / 3, "0.3333333333333333");
    write_double(0.1f, "0.10000000149011612");
    write_double(1e22, "1e+22");
    write_double(123456789, "123456789");
    write_double(5e-324, "5e-324");
    write_double(1.5e-310, "1.5e-310");
    write_double(2.2250738585072014e-308, "2.2250738585072014e-308");
    write_double(1.7976931348623157e308, "1.7976931348623157e+308");
    write_double(NAN, "null");
    write_double(INFINITY, "null");
    write_double(-INFINITY, "null");
}

static uint64_t next_random(uint64_t *s) {
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

static void test_double_round_trip(void **state) {
    (void)state;
    uint64_t seed = (uint64_t)time(NULL) * 2654435761u + 1, s = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 20000; i++) {
        union {
            uint64_t u;
            double d;
        } x = { next_random(&s) };
        if (i % 4 == 0) x.u &= 0x800fffffffffffffu; /* subnormal */
        if (i % 4 == 1) x.d = (double)(int64_t)(x.u >> 20) / 1000;
        if (!isfinite(x.d)) continue;
        buf b = { 0 };
        arena a = { 0 };
        json_write_double(&b, x.d);
        const json *v = good(&a, b.p);
        /* integers are read as such; -0 keeps its sign */
        if (json_double(v) != x.d || signbit(json_double(v)) != signbit(x.d)) fail_msg("%a -> %s", x.d, b.p);
        buf_free(&b);
        arena_free(&a);
    }
}

static void test_locale(void **state) {
    (void)state;
    /* A locale with a decimal comma, if there is one; the C locale proves nothing but does no harm. */
    static const char *const names[] = { "de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "C" };
    size_t i = 0;
    while (!setlocale(LC_ALL, names[i])) i++;
    print_message("locale %s\n", names[i]);
    arena a = { 0 };
    assert_true(json_double(good(&a, "1.5")) == 1.5);
    write_double(1.5, "1.5");
    arena_free(&a);
    setlocale(LC_ALL, "C");
}

/* ---- random damage, and files ---- */

static void test_random_damage(void **state) {
    (void)state;
    static const char text[] =
        "{\"a\":[1,2.5e-3,-7,\"x\\u00e9\\ud83d\\ude00\xe2\x82\xac\\n\"],\"b\":{\"c\":null,\"d\":[true,false,{}]}}";
    uint64_t seed = (uint64_t)time(NULL) * 6364136223846793005u + 1, s = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    int accepted = 0, refused = 0;
    for (int i = 0; i < 20000; i++) {
        char copy[sizeof text];
        memcpy(copy, text, sizeof text);
        const size_t n = i % 2 ? sizeof text - 1 : (size_t)(next_random(&s) % sizeof text);
        for (int k = 0; k < 1 + i % 3; k++) copy[next_random(&s) % (sizeof text - 1)] = (char)next_random(&s);
        arena a = { 0 };
        err e = { 0 };
        const json *v;
        if (parse(&v, &a, (str){ copy, n }, NULL, &e)) {
            buf b = { 0 }, c = { 0 };
            const json *w;
            json_write(&b, v);
            assert_true(parse(&w, &a, buf_view(&b), NULL, &e)); /* what is written can be read, and stays */
            json_write(&c, w);
            assert_true(str_eq(buf_view(&b), buf_view(&c)));
            buf_free(&b);
            buf_free(&c);
            accepted++;
        } else {
            assert_int_equal(strncmp(e.id, "E-JSON-", 7), 0);
            refused++;
        }
        arena_free(&a);
    }
    assert_true(accepted > 100 && refused > 1000);
}

static void test_files(void **state) {
    (void)state;
    char *dir = scratch_new(), *path = scratch_puts(dir, "x.json", "{\"k\": [1]}"),
         *empty = scratch_puts(dir, "e.json", "");
    arena a = { 0 };
    err e = { 0 };
    const json *v;
    assert_true(json_parse_file(&v, &a, path, NULL, &e));
    assert_int_equal(json_get(v, "k")->n, 1);
    assert_false(json_parse_file(&v, &a, empty, NULL, &e));
    assert_string_equal(e.id, "E-JSON-SYNTAX");
    assert_non_null(strstr(e.msg, empty));
    e = (err){ 0 };
    assert_false(json_parse_file(&v, &a, dir, NULL, &e));
    assert_string_equal(e.id, "E-FILE-KIND");
    arena_free(&a);
    free(path);
    free(empty);
    scratch_free(dir);
}

/* The model's own files, and every file of the oracle that other programs wrote. */
static void test_real_files(void **state) {
    (void)state;
    static const char *const paths[] = { "assets/qwen36-tiny/tokenizer.json",
                                         "assets/qwen36-tiny/config.json",
                                         "tests/oracle/qwen36-tiny/chat.json",
                                         "tests/oracle/qwen36-tiny/jinja.json",
                                         "tests/oracle/qwen36-tiny/tokenizer.vectors.json",
                                         "tests/oracle/qwen36-tiny/nvfp4/sharded.index.json" };
    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        arena a = { 0 };
        buf b = { 0 }, c = { 0 };
        err e = { 0 };
        const json *v, *w;
        if (!json_parse_file(&v, &a, paths[i], NULL, &e)) fail_msg("%s", e.msg);
        json_write(&b, v);
        assert_true(parse(&w, &a, buf_view(&b), NULL, &e));
        json_write(&c, w);
        assert_true(str_eq(buf_view(&b), buf_view(&c)));
        arena_free(&a);
        buf_free(&b);
        buf_free(&c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scalars),       cmocka_unit_test(test_integers),
        cmocka_unit_test(test_doubles),       cmocka_unit_test(test_containers),
        cmocka_unit_test(test_syntax_errors), cmocka_unit_test(test_positions),
        cmocka_unit_test(test_utf8),          cmocka_unit_test(test_bad_byte_anywhere),
        cmocka_unit_test(test_duplicates),    cmocka_unit_test(test_duplicates_large),
        cmocka_unit_test(test_depth),         cmocka_unit_test(test_size),
        cmocka_unit_test(test_memory_limit),  cmocka_unit_test(test_strings_survive),
        cmocka_unit_test(test_write_tree),    cmocka_unit_test(test_write_str),
        cmocka_unit_test(test_write_double),  cmocka_unit_test(test_double_round_trip),
        cmocka_unit_test(test_locale),        cmocka_unit_test(test_random_damage),
        cmocka_unit_test(test_files),         cmocka_unit_test(test_real_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
