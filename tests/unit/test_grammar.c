/* Grammars: what is accepted and what is not, that every beginning of a valid text is alive, that nothing that is alive is
 * stuck, that hostile schemas and patterns end with an error soon, and that token masks say what bytes say.
 *
 * `test_grammar ask` reads lines of JSON [schema, text] and prints for each: bad (no grammar), dead, alive or whole. The
 * Python tests compare that with a validator of their own. */
#include "text/grammar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "lib/toytok.h"
#include "support.h"
#include "text/grammar_impl.h"

/* ---- helpers ---- */

static const json *tree(arena *a, const char *text) {
    const json *v;
    err e = { 0 };
    if (!json_parse(&v, a, str_of(text), "test", &(json_limits){ .max_depth = 1024 }, &e))
        fail_msg("%s: %s", text, e.msg);
    return v;
}

static grammar *compiled(const char *schema) {
    arena a = { 0 };
    grammar *g;
    err e = { 0 };
    if (!grammar_json_schema(&g, tree(&a, schema), NULL, &e)) fail_msg("%s: %s", schema, e.msg);
    arena_free(&a);
    return g;
}

static void fits(const grammar *g, const char *text) {
    bool whole;
    const size_t n = strlen(text);
    for (size_t i = 0; i <= n; i++)
        if (!grammar_accepts(g, (str){ text, i }, &whole)) fail_msg("'%.*s' is dead", (int)i, text);
    if (!whole) fail_msg("'%s' is not whole", text);
}

static void misfits(const grammar *g, const char *text) {
    bool whole;
    if (grammar_accepts(g, str_of(text), &whole) && whole) fail_msg("'%s' is accepted", text);
}

/* ---- schemas ---- */

typedef struct schema_case {
    const char *schema, *good[8], *bad[8];
} schema_case;

static const schema_case cases[] = {
    { "{}",
      { "1", "\"a\"", "[]", "{\"a\": [1, {}]}", "null", "-0.5e+10", "[\n  1,\n  2\n]" },
      { "", "01", "1.", "[1,]", "{\"a\"}", "\"\x01\"", "nul", "[  1]" } },
    { "{\"type\":\"string\"}",
      { "\"\"", "\"\\u00e4\\n\\\"\"", "\"\\ud83d\\ude00\"", "\"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\"" },
      { "\"\\ud83d\"", "\"\\ude00\"", "\"\xc3\"", "\"\xed\xa0\x80\"", "\"\xc0\x80\"", "\"\\x\"", "\"a\nb\"", "1" } },
    { "{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
      { "\"ab\"", "\"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\"", "\"\\n\\u0041\"", "\"\\ud83d\\ude00x\"" },
      { "\"a\"", "\"abcd\"", "\"\\ud83d\\ude00\"" } },
    { "{\"type\":\"integer\",\"minimum\":-12,\"exclusiveMaximum\":105}",
      { "-12", "-1", "0", "7", "99", "104" },
      { "-13", "105", "-0", "1.0", "007", "1e1", "-" } },
    { "{\"type\":\"integer\",\"minimum\":9223372036854775800}",
      { "9223372036854775800", "9223372036854775807" },
      { "9223372036854775799", "9223372036854775808", "-9223372036854775805" } },
    { "{\"type\":\"integer\",\"maximum\":-9223372036854775800}",
      { "-9223372036854775800", "-9223372036854775808" },
      { "-9223372036854775799", "-9223372036854775809", "1" } },
    { "{\"type\":\"number\",\"minimum\":0}", { "0", "1.50", "2E-3", "12" }, { "-1", ".5", "1e", "+1", "1e0001" } },
    { "{\"type\":[\"boolean\",\"null\"]}", { "true", "false", "null" }, { "0", "\"null\"", "tru", "truefalse" } },
    { "{\"enum\":[\"red\",\"green\",3,null,[1,{\"a\":2}]]}",
      { "\"red\"", "\"green\"", "3", "null", "[1,{\"a\":2}]" },
      { "\"blue\"", "\"re\"", "33", "[1]" } },
    { "{\"type\":\"string\",\"enum\":[\"a\",1,\"b\"]}", { "\"a\"", "\"b\"" }, { "1", "\"c\"" } },
    { "{\"const\":\"a\\\"\\n\"}", { "\"a\\\"\\n\"" }, { "\"a\"" } },
    { "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":\"string\"},\"c\":{}},"
      "\"required\":[\"b\"]}",
      { "{\"b\":\"x\"}", "{\"a\":1,\"b\":\"x\"}", "{\n  \"a\": 1,\n  \"b\": \"x\",\n  \"c\": [true]\n}",
        "{\"b\": \"\", \"c\": 1}", "{ \"b\":\"\" }" },
      { "{}", "{\"a\":1}", "{\"b\":1}", "{\"b\":\"x\",\"a\":1}", "{\"b\":\"x\",}", "{\"b\":\"x\",\"d\":1}",
        "{\"b\":\"x\",\"b\":\"y\"}" } },
    { "{\"type\":\"object\",\"properties\":{\"aa\":{\"type\":\"null\"},\"ab\":{\"type\":\"null\"},\"\\u00e4\":{"
      "\"type\":\"null\"}},"
      "\"additionalProperties\":{\"type\":\"integer\"}}",
      { "{}", "{\"aa\":null,\"x\":1,\"a\":2,\"abc\":3}", "{\"\xc3\xa5\":5}", "{\"\\n\":5}", "{\"\xc3\xa4\":null}" },
      { "{\"x\":null}", "{\"ab\":1}", "{\"\xc3\xa4\":1}", "{\"a\\u0062\":1}" } },
    { "{\"type\":\"object\",\"additionalProperties\":false}", { "{}", "{ }" }, { "{\"a\":1}" } },
    { "{\"type\":\"object\"}", { "{}", "{\"a\":{\"b\":[]}}" }, { "[]" } },
    { "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2,\"maxItems\":4}",
      { "[1,2]", "[1, 2, 3]", "[\n1,\n2,\n3,\n4]" },
      { "[]", "[1]", "[1,2,3,4,5]", "[1,\"a\"]" } },
    { "{\"type\":\"array\",\"items\":false}", { "[]" }, { "[1]" } },
    { "{\"type\":\"array\",\"maxItems\":1000000000}", { "[]", "[1,[2]]" }, { "[,]" } },
    { "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"string\"}],\"items\":{\"type\":\"null\"}"
      ","
      "\"minItems\":1}",
      { "[1]", "[1,\"a\"]", "[1,\"a\",null,null]" },
      { "[]", "[\"a\"]", "[1,null]", "[1,\"a\",1]" } },
    { "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"string\"}],\"items\":false,\"minItems\":"
      "2}",
      { "[1,\"a\"]" },
      { "[1]", "[1,\"a\",1]" } },
    { "{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"a\"},\"v\":{\"type\":\"integer\"}},"
      "\"required\":[\"k\",\"v\"]},"
      "{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"ab\"},\"w\":{\"type\":\"null\"}},\"required\":[\"k\","
      "\"w\"]}]}",
      { "{\"k\":\"a\",\"v\":1}", "{\"k\":\"ab\",\"w\":null}" },
      { "{\"k\":\"a\",\"w\":null}", "{\"k\":\"ab\",\"v\":1}" } },
    { "{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"integer\"}]}", { "\"a\"", "1" }, { "1.5", "null" } },
    { "{\"type\":\"string\",\"anyOf\":[{\"maxLength\":1},{\"pattern\":\"^ab+$\"}]}",
      { "\"a\"", "\"\"", "\"abb\"" },
      { "\"ac\"", "\"ba\"" } },
    { "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\",\"minimum\":3}},\"required\":["
      "\"a\"]},"
      "{\"properties\":{\"a\":{\"maximum\":5},\"b\":{\"type\":\"null\"}},\"additionalProperties\":false}]}",
      { "{\"a\":3}", "{\"a\":5,\"b\":null}" },
      { "{\"a\":2}", "{\"a\":6}", "{\"b\":null}" } },
    { "{\"$ref\":\"#/$defs/"
      "n\",\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"next\":{\"anyOf\":["
      "{\"$ref\":\"#/$defs/n\"},{\"type\":\"null\"}]}},\"required\":[\"v\",\"next\"],\"additionalProperties\":false}}}",
      { "{\"v\":1,\"next\":null}", "{\"v\":1,\"next\":{\"v\":2,\"next\":{\"v\":3,\"next\":null}}}" },
      { "{\"v\":1}", "{\"v\":1,\"next\":1}", "{\"v\":1,\"next\":{\"v\":2}}" } },
    { "{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}", { "[]", "[[],[[],[]]]" }, { "[1]", "[[]" } },
    { "{\"type\":\"string\",\"nullable\":true}", { "null", "\"a\"" }, { "1" } },
    { "{\"type\":\"string\",\"pattern\":\"^[A-Z]{2}-\\\\d+(\\\\.\\\\d)?$\"}",
      { "\"AB-1\"", "\"ZZ-123.4\"" },
      { "\"A-1\"", "\"AB-\"", "\"AB-1.\"", "\"AB-1.23\"", "\"xAB-1\"" } },
    /* wide ones, of which most is known without walking the vocabulary */
    { "{\"type\":\"string\",\"pattern\":\"^.*$\"}", { "\"a b\"", "\"<\xc3\xa4\"" }, { "\"\\n\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^.{1,40}$\"}", { "\"a b\"" }, { "\"\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^(\\\\w|\\\\s|[.,;:!?]){1,9}$\"}",
      { "\"A, b.\"" },
      { "\"\xc3\xa4\"", "\"0123456789\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^\\\\S+(\\\\s\\\\S+)*$\"}", { "\"Aa b\"" }, { "\" \"", "\"a  b\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^(?:[^x]|x[^y])*$\"}", { "\"yx \"" }, { "\"xy\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^[a-z ]{3,70}[0-9]{0,3}$\"}", { "\"abc12\"" }, { "\"ab1\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^[A-Za-z]{2,5}$\"}", { "\"abCde\"" }, { "\"abcdef\"" } },
    { "{\"type\":\"string\",\"pattern\":\"b|^c\"}", { "\"b\"", "\"abc\"", "\"cx\"" }, { "\"\"", "\"ac\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^[^a\\\\n]*$\",\"minLength\":1,\"maxLength\":2}",
      { "\"b\"", "\"\xf0\x9f\x98\x80\\t\"", "\"\\\"\\\\\"", "\"\\u0001\"" },
      { "\"\"", "\"a\"", "\"\\n\"", "\"bbb\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^(a|b(c|d)*)+?e{2,3}$\"}",
      { "\"abcdee\"", "\"aeee\"" },
      { "\"ee\"", "\"ae\"", "\"aeeee\"" } },
};

static void test_schemas(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        grammar *g = compiled(cases[i].schema);
        for (int k = 0; k < 8 && cases[i].good[k]; k++) fits(g, cases[i].good[k]);
        for (int k = 0; k < 8 && cases[i].bad[k]; k++) misfits(g, cases[i].bad[k]);
        grammar_free(g);
    }
}

static void test_refused(void **state) {
    (void)state;
    static const char *const v[][3] = {
        { "{\"type\":\"object\",\"properties\":{\"a/b\":{\"not\":{}}}}", "E-GRAMMAR-SCHEMA", "#/properties/a/b: not:" },
        { "{\"type\":\"object\",\"patternProperties\":{}}", "E-GRAMMAR-SCHEMA", "patternProperties" },
        { "{\"type\":\"array\",\"uniqueItems\":true}", "E-GRAMMAR-SCHEMA", "uniqueItems" },
        { "{\"type\":\"number\",\"maximum\":3}", "E-GRAMMAR-SCHEMA", "maximum" },
        { "{\"type\":\"number\",\"multipleOf\":3}", "E-GRAMMAR-SCHEMA", "multipleOf" },
        { "{\"type\":\"strin\"}", "E-GRAMMAR-SCHEMA", "type" },
        { "{\"$ref\":\"#/$defs/x\"}", "E-GRAMMAR-SCHEMA", "$ref" },
        { "{\"$ref\":\"http://a/b\"}", "E-GRAMMAR-SCHEMA", "$ref" },
        { "{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"number\"}]}", "E-GRAMMAR-SCHEMA", "oneOf" },
        { "{\"type\":\"string\",\"pattern\":\"(?=a)\"}", "E-GRAMMAR-SCHEMA", "pattern" },
        { "{\"type\":\"string\",\"pattern\":\"(a\"}", "E-GRAMMAR-SCHEMA", "pattern" },
        { "{\"type\":\"string\",\"pattern\":\"a\\\\1\"}", "E-GRAMMAR-SCHEMA", "pattern" },
        { "{\"type\":\"string\",\"pattern\":\"a**\"}", "E-GRAMMAR-SCHEMA", "pattern" },
        { "{\"enum\":[]}", "E-GRAMMAR-SCHEMA", "enum" },
        { "false", "E-GRAMMAR-SCHEMA", "no value" },
        { "{\"type\":\"string\",\"minLength\":3,\"maxLength\":2}", "E-GRAMMAR-SCHEMA", "no value" },
        { "{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", "E-GRAMMAR-SCHEMA", "no value" },
        { "{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}", "E-GRAMMAR-SCHEMA",
          "no value" },
        { "{\"type\":\"string\",\"pattern\":\"^ab$\",\"maxLength\":1}", "E-GRAMMAR-SCHEMA", "no value" },
        { "{\"type\":\"array\",\"prefixItems\":[{},{\"type\":\"string\",\"minLength\":2,\"maxLength\":1}],\"minItems\":"
          "2}",
          "E-GRAMMAR-SCHEMA", "no value" },
        { "{\"type\":\"array\",\"items\":{\"type\":\"string\",\"minLength\":2,\"maxLength\":1},\"minItems\":1}",
          "E-GRAMMAR-SCHEMA", "no value" },
        { "3", "E-GRAMMAR-SCHEMA", "schema" },
    };
    for (size_t i = 0; i < ARRAY_LEN(v); i++) {
        arena a = { 0 };
        grammar *g;
        err e = { 0 };
        if (grammar_json_schema(&g, tree(&a, v[i][0]), NULL, &e)) fail_msg("%s is accepted", v[i][0]);
        if (strcmp(e.id, v[i][1]) != 0 || !strstr(e.msg, v[i][2])) fail_msg("%s: %s: %s", v[i][0], e.id, e.msg);
        arena_free(&a);
    }
}

/* ---- hostile ones ---- */

static void bounded(const char *what, const char *schema) {
    arena a = { 0 };
    grammar *g = NULL;
    err e = { 0 };
    const double t0 = clock_seconds();
    const bool ok = grammar_json_schema(&g, tree(&a, schema), NULL, &e);
    const double t = clock_seconds() - t0;
    if (!ok && strcmp(e.id, "E-GRAMMAR-SIZE") != 0 && strcmp(e.id, "E-GRAMMAR-SCHEMA") != 0)
        fail_msg("%s: %s", what, e.id);
    print_message("%s: %s, %.0f ms\n", what, ok ? "compiled" : e.id, t * 1e3);
    if (ok) {
        bool whole;
        (void)grammar_accepts(g, STR("{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":[[[[\"aaaaaaaaaaaaaaaaaaaaaaaaaaa"), &whole);
    }
    assert_true(t < 20);
    grammar_free(g);
    arena_free(&a);
}

static void repeated(buf *b, const char *text, int n) {
    for (int i = 0; i < n; i++) buf_puts(b, text);
}

static void test_hostile(void **state) {
    (void)state;
    buf b = { 0 };
    repeated(&b, "{\"type\":\"array\",\"items\":", 500);
    buf_puts(&b, "{}");
    repeated(&b, "}", 500);
    bounded("nested arrays", b.p);
    buf_clear(&b);
    repeated(&b, "{\"anyOf\":[{\"type\":\"null\"},", 300);
    buf_puts(&b, "{}");
    repeated(&b, "]}", 300);
    bounded("nested anyOf", b.p);
    buf_clear(&b);
    buf_puts(&b, "{\"allOf\":[");
    for (int i = 0; i < 9; i++)
        buf_printf(&b, "%s{\"anyOf\":[{\"minLength\":1},{\"minLength\":2},{\"minLength\":3},{\"maxLength\":9}]}",
                   i ? "," : "");
    buf_puts(&b, "]}");
    bounded("anyOf to the power of nine", b.p);
    buf_clear(&b);
    bounded("recursion twice", "{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}}},{\"type\":"
                               "\"object\",\"properties\":{\"a\":{\"$ref\":"
                               "\"#\"},\"b\":{}}},{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}},{\"type\":\"array\","
                               "\"items\":{\"$ref\":\"#\"},\"minItems\":1},{\"type\":\"string\"}]}");
    bounded("huge counts", "{\"type\":\"array\",\"minItems\":1000000000,\"maxItems\":2000000000,\"items\":{\"type\":"
                           "\"string\",\"maxLength\":2000000000}}");
    bounded("count beyond all", "{\"type\":\"array\",\"minItems\":1e300}");
    bounded("circle", "{\"$ref\":\"#\"}");
    bounded("circle of two", "{\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"$ref\":\"#/$defs/"
                             "b\"},\"b\":{\"anyOf\":[{\"$ref\":\"#/$defs/a\"},{\"type\":\"null\"}]}}}");
    static const char *const patterns[] = { "(a+)+$",
                                            "^(a|a?)+b$",
                                            "(((((((((((((((((((((((((a)))))))))))))))))))))))))",
                                            "(a{1,2000}){1,2000}",
                                            "^(.*a.{12})$",
                                            ".*a.{30}$",
                                            "[\\\\u0000-\\\\uffff]{500}",
                                            "(x+x+)+y",
                                            "^((a{0,40}){0,40}){0,40}$" };
    for (size_t i = 0; i < ARRAY_LEN(patterns); i++) {
        buf_clear(&b);
        buf_printf(&b, "{\"type\":\"string\",\"pattern\":\"%s\"}", patterns[i]);
        bounded(patterns[i], b.p);
    }
    bounded("pattern and length", "{\"type\":\"string\",\"pattern\":\"^[a-z]+(b|c[d-f]){3}\",\"maxLength\":100000}");
    buf_clear(&b);
    buf_puts(&b, "{\"type\":\"object\",\"properties\":{");
    for (int i = 0; i < 900; i++)
        buf_printf(&b, "%s\"key%d\":{\"type\":\"integer\",\"minimum\":%d}", i ? "," : "", i, i);
    buf_puts(&b, "},\"additionalProperties\":true}");
    bounded("900 properties", b.p);
    buf_clear(&b);
    buf_puts(&b, "{\"enum\":[");
    for (int i = 0; i < 20000; i++) buf_printf(&b, "%s\"value %d\"", i ? "," : "", i * 7919);
    buf_puts(&b, "]}");
    bounded("20000 values", b.p);
    buf_free(&b);
}

/* ---- nothing that is alive is stuck ---- */

/* From many places of random walks, a way to the end is found by always taking the byte that needs the least. */
static void test_no_dead_end(void **state) {
    (void)state;
    rnd r = rnd_open(20261202);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        grammar *g = compiled(cases[i].schema);
        for (int walk = 0; walk < 12; walk++) {
            machine m;
            machine_open(&m, g);
            uint32_t at = m.start;
            for (int n = 0; n < 120; n++) {
                uint32_t next[256], count = 0;
                for (int b = 0; b < 256; b++) {
                    const uint32_t to = machine_step(&m, at, (uint8_t)b);
                    if (to != MACHINE_DEAD) next[count++] = to;
                }
                if (count == 0 && !m.configs[at].accept) fail_msg("%s: stuck after %d bytes", cases[i].schema, n);
                if (count == 0) break;
                at = next[rnd_below(&r, count)];
            }
            machine_close(&m);
        }
        grammar_free(g);
    }
}

/* Deep nesting stops in time to be closed. */
static void test_depth(void **state) {
    (void)state;
    grammar *g = compiled("{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}");
    buf b = { 0 };
    bool whole;
    int depth = 0;
    while (depth < 1000) {
        buf_byte(&b, '[');
        if (!grammar_accepts(g, buf_view(&b), &whole)) break;
        depth++;
    }
    assert_in_range(depth, 60, 128);
    buf_truncate(&b, (size_t)depth);
    for (int i = 0; i < depth; i++) buf_byte(&b, ']');
    assert_true(grammar_accepts(g, buf_view(&b), &whole) && whole);
    buf_free(&b);
    grammar_free(g);
}

/* ---- thoughts and tools ---- */

static void test_thinking(void **state) {
    (void)state;
    grammar *g;
    err e = { 0 };
    bool whole;
    assert_true(grammar_json_object(&g, &(grammar_options){ .thinking = true }, &e));
    fits(g, "So: \xff {\"a\"</thi</think>\n\n{\"a\":1}");
    fits(g, "</think>{}");
    assert_true(grammar_accepts(g, STR("no end"), &whole) && !whole);
    assert_false(grammar_accepts(g, STR("x</think>\n\n\n"), &whole));
    assert_false(grammar_accepts(g, STR("x</think> "), &whole));
    grammar_free(g);
}

static const char TOOLS[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"add\",\"parameters\":{\"type\":\"object\",\"properties\":{"
    "\"text\":{\"type\":\"string\"},\"n\":{\"type\":\"integer\"},\"kind\":{\"enum\":[\"x\",\"y\"]},"
    "\"list\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}},\"word\":{\"type\":\"string\",\"pattern\":\"^[a-z<>/"
    "=]*$\"}},"
    "\"required\":[\"text\"]}}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"now\"}}]";

static void test_tools(void **state) {
    (void)state;
    arena a = { 0 };
    const json *tools = tree(&a, TOOLS);
    grammar *g;
    err e = { 0 };
    bool whole;
    assert_true(grammar_tool_calls(&g, tools, &(grammar_calls){ .parallel = true }, NULL, &e));
    const char *call =
        "<tool_call>\n<function=add>\n<parameter=text>\na < b\n</p>\n\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
        "<parameter=kind>\ny\n</parameter>\n<parameter=list>\n[\"<b\", "
        "\"<\\/parameter>\"]\n</parameter>\n</function>\n</tool_call>";
    fits(g, call);
    fits(g, "<tool_call>\n<function=now>\n</function>\n</tool_call>");
    fits(g, "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</"
            "tool_call>");
    fits(g, "<tool_call>\n<function=add>\n<parameter=text>\n\n</parameter>\n<parameter=word>\n<a></parameter\n</"
            "parameter>\n</function>\n</tool_call>");
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=add>\n</function>"), &whole)); /* text is required */
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=add>\n<parameter=text>\na</parameter>"), &whole));
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=add>\n<parameter=text>\na</function>"), &whole));
    assert_false(grammar_accepts(
        g, STR("<tool_call>\n<function=add>\n<parameter=text>\na\n</parameter>\n<parameter=n>\nx"), &whole));
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=sub>"), &whole));
    assert_false(grammar_accepts(g, STR("Hello"), &whole));
    grammar_free(g);
    assert_true(grammar_tool_calls(&g, tools, &(grammar_calls){ .name = "now" }, NULL, &e));
    fits(g, "<tool_call>\n<function=now>\n</function>\n</tool_call>");
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=a"), &whole));
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=now>\n</function>\n</tool_call>\n"), &whole));
    grammar_free(g);
    static const char *const bad[] = { "[]", "[{\"name\":\"a b\"}]",
                                       "[{\"name\":\"f\",\"parameters\":{\"properties\":{\"a>\":{}}}}]",
                                       "[{\"name\":\"f\",\"parameters\":{\"properties\":{},\"required\":[\"z\"]}}]" };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        err f = { 0 };
        assert_false(grammar_tool_calls(&g, tree(&a, bad[i]), &(grammar_calls){ 0 }, NULL, &f));
        assert_string_equal(f.id, "E-GRAMMAR-TOOL");
    }
    assert_false(grammar_tool_calls(&g, tools, &(grammar_calls){ .name = "none" }, NULL, &e));
    assert_string_equal(e.id, "E-GRAMMAR-TOOL");
    arena_free(&a);
}

static void test_answer_or_calls(void **state) {
    (void)state;
    static const char call[] = "<tool_call>\n<function=now>\n</function>\n</tool_call>";
    arena a = { 0 };
    const json *tools = tree(&a, TOOLS),
               *schema = tree(&a, "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"}},"
                                  "\"required\":[\"a\"],\"additionalProperties\":false}");
    grammar *g;
    err e = { 0 };
    bool whole, in_tools;
    assert_true(grammar_answer_or_calls(&g, &in_tools, schema, tools, &(grammar_calls){ 0 }, NULL, &e));
    fits(g, "{\"a\": \"<tool_call>\\n<function=now>\\n</function>\"}");
    fits(g, call);
    assert_false(grammar_accepts(g, STR("{\"b"), &whole));
    assert_false(grammar_accepts(g, STR("Hello"), &whole));
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=now>\n</function>\n</tool_call>\n"), &whole));
    assert_false(grammar_accepts(g, STR("<tool_call>\n<function=now>\n</function>\n</tool_call>{"), &whole));
    assert_false(grammar_accepts(g, STR("{\"a\":\"\"}<"), &whole));
    grammar_free(g);
    const grammar_options thinking = { .thinking = true };
    assert_true(
        grammar_answer_or_calls(&g, &in_tools, NULL, tools, &(grammar_calls){ .parallel = true }, &thinking, &e));
    fits(g, "Hm.\n</think>\n\n{\"x\":[1]}");
    fits(g, "{\n</think>\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</"
            "function>"
            "\n</tool_call>");
    assert_false(grammar_accepts(g, STR("Hm.\n</think>\n\n[1"), &whole));
    grammar_free(g);
    assert_false(
        grammar_answer_or_calls(&g, &in_tools, tree(&a, "{\"not\":{}}"), tools, &(grammar_calls){ 0 }, NULL, &e));
    assert_string_equal(e.id, "E-GRAMMAR-SCHEMA");
    assert_false(in_tools);
    e = (err){ 0 };
    assert_false(grammar_answer_or_calls(&g, &in_tools, NULL, tree(&a, "[{\"name\":\"a b\"}]"), &(grammar_calls){ 0 },
                                         NULL, &e));
    assert_string_equal(e.id, "E-GRAMMAR-TOOL");
    assert_true(in_tools);
    arena_free(&a);
}

/* ---- tokens ---- */

/* Masks against feeding each token's bytes, along random walks with drafts ahead. */
static void test_masks(void **state) {
    (void)state;
    const char *dir = getenv("TOKENIZER_DIR") ? getenv("TOKENIZER_DIR") : "assets/qwen36-tiny";
    tokenizer *t;
    grammar_vocab *v;
    err e = { 0 };
    rnd r = rnd_open(20261203);
    if (!tokenizer_open(&t, dir, &e)) fail_msg("%s", e.msg);
    const int vocab = tokenizer_vocab(t);
    double t0 = clock_seconds();
    assert_true(grammar_vocab_new(&v, t, vocab, &e));
    print_message("vocabulary of %d: %.0f ms\n", vocab, (clock_seconds() - t0) * 1e3);
    const int32_t end = tokenizer_find(t, STR("<|im_end|>"));
    assert_true(end >= 0);
    uint64_t *mask = calloc((size_t)vocab / 64 + 1, sizeof *mask);
    double worst = 0, sum = 0;
    int asked = 0;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        grammar *g = compiled(cases[i].schema);
        grammar_run *run;
        buf text = { 0 };
        int32_t ahead[3];
        int n_ahead = 0;
        assert_true(grammar_run_new(&run, g, v, 2, &end, 1, &e));
        for (int step = 0; step < 40; step++) {
            t0 = clock_seconds();
            if (!grammar_mask(run, 1, ahead, n_ahead, mask, &e))
                fail_msg("%s after '%s': %s", cases[i].schema, text.p, e.msg);
            const double dt = clock_seconds() - t0;
            if (dt > worst) worst = dt;
            sum += dt, asked++;
            int32_t pick = -1;
            uint32_t seen = 0;
            const int tries = vocab > 5000 ? 1500 : vocab;
            for (int k = 0; k < tries; k++) {
                const int32_t id = tries < vocab ? (int32_t)rnd_below(&r, (uint32_t)vocab) : k;
                const str s = tokenizer_bytes(t, id);
                const bool allowed = mask[id / 64] >> (id % 64) & 1;
                const size_t mark = text.n;
                bool whole, want;
                buf_str(&text, s);
                want = s.n > 0 && !tokenizer_is_special(t, id) && !str_starts(s, STR("<|")) &&
                       grammar_accepts(g, buf_view(&text), &whole);
                buf_truncate(&text, mark);
                if (id == end) want = grammar_accepts(g, buf_view(&text), &whole) && whole;
                if (allowed != want)
                    fail_msg("%s: token %d '" STR_FMT "' after '%s'", cases[i].schema, id, STR_ARG(s), text.p);
                if (allowed && rnd_below(&r, ++seen) == 0) pick = id;
            }
            for (int32_t id = 0; pick < 0 && id < vocab; id++)
                if (mask[id / 64] >> (id % 64) & 1) pick = id;
            if (pick == end) break;
            buf_str(&text, tokenizer_bytes(t, pick));
            if (n_ahead < 3) {
                ahead[n_ahead++] = pick;
            } else {
                for (int k = 0; k < 3; k++) grammar_accept(run, 1, ahead[k]);
                ahead[0] = pick, n_ahead = 1;
            }
        }
        buf_free(&text);
        grammar_run_free(run);
        grammar_free(g);
    }
    print_message("%d masks: %.0f us on average, %.0f us at worst\n", asked, sum / asked * 1e6, worst * 1e6);
    free(mask);
    grammar_vocab_free(v);
    tokenizer_close(t);
}

/* Tokens ahead that the grammar forbids are an error, not a mask of everything; the run goes on as before. */
static void test_misfit(void **state) {
    (void)state;
    tokenizer *t;
    grammar_vocab *v;
    grammar_run *run;
    err e = { 0 };
    assert_true(tokenizer_open(&t, "assets/qwen36-tiny", &e));
    const int vocab = tokenizer_vocab(t);
    assert_true(grammar_vocab_new(&v, t, vocab, &e));
    const int32_t end = tokenizer_find(t, STR("<|im_end|>"));
    uint64_t *first = calloc((size_t)vocab / 64 + 1, sizeof *first),
             *again = calloc((size_t)vocab / 64 + 1, sizeof *again);
    grammar *g = compiled("{\"type\": \"object\"}");
    assert_true(grammar_run_new(&run, g, v, 1, &end, 1, &e));
    assert_true(grammar_mask(run, 0, NULL, 0, first, &e));
    int32_t bad = 0;
    while (first[bad / 64] >> (bad % 64) & 1) bad++;
    assert_false(grammar_mask(run, 0, &bad, 1, again, &e));
    assert_string_equal(e.id, "E-GRAMMAR-TOKEN");
    e = (err){ 0 };
    assert_true(grammar_mask(run, 0, NULL, 0, again, &e));
    assert_memory_equal(first, again, ((size_t)vocab + 63) / 64 * sizeof *first);
    free(first);
    free(again);
    grammar_run_free(run);
    grammar_free(g);
    grammar_vocab_free(v);
    tokenizer_close(t);
}

/* A long answer makes the machine forget, and nothing changes. */
static void test_compaction(void **state) {
    (void)state;
    grammar *g = compiled("{\"type\":\"array\",\"maxItems\":30000,\"items\":{\"type\":\"object\",\"properties\":{\"a\":"
                          "{\"type\":\"array\",\"items\":{"
                          "\"type\":\"integer\"},\"maxItems\":50}},\"required\":[\"a\"]}}");
    buf b = { 0 };
    bool whole;
    buf_byte(&b, '[');
    for (int i = 0; i < 3000; i++) buf_printf(&b, "%s{\"a\":[1,22, 3]}", i ? "," : "");
    buf_byte(&b, ']');
    assert_true(grammar_accepts(g, buf_view(&b), &whole) && whole);
    buf_free(&b);
    grammar_free(g);
}

/* ---- for the Python tests ---- */

static int ask(void) {
    char *line = NULL;
    size_t cap = 0;
    for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0;) {
        arena a = { 0 };
        const json *v;
        err e = { 0 };
        grammar *g;
        bool whole = false;
        if (!json_parse(&v, &a, (str){ line, (size_t)n }, "line", NULL, &e)) return 2;
        if (!grammar_json_schema(&g, &v->u.items[0], NULL, &e)) {
            printf("bad %s: %s\n", e.id, e.msg);
        } else {
            const bool alive = grammar_accepts(g, json_str(&v->u.items[1]), &whole);
            puts(!alive ? "dead" : whole ? "whole" : "alive");
            grammar_free(g);
        }
        arena_free(&a);
    }
    free(line);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "ask") == 0) return ask();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schemas), cmocka_unit_test(test_refused),         cmocka_unit_test(test_no_dead_end),
        cmocka_unit_test(test_depth),   cmocka_unit_test(test_thinking),        cmocka_unit_test(test_tools),
        cmocka_unit_test(test_masks),   cmocka_unit_test(test_misfit),          cmocka_unit_test(test_compaction),
        cmocka_unit_test(test_hostile), cmocka_unit_test(test_answer_or_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
