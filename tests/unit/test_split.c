/* Splitting generated text: every case whole, byte by byte, cut in two at every place, and in chunks; the events must
 * be the same. Then: what may leak when the generation ends at any byte, and values typed by schemas. */
#include "base/json.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "text/split.h"
#include "text/toolcall.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char TOOLS[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"get\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {"
    "\"city\": {\"type\": \"string\"}, \"n\": {\"type\": \"integer\"}, \"x\": {\"type\": \"number\"}, \"ok\": "
    "{\"type\": \"boolean\"},"
    "\"o\": {\"type\": \"object\"}, \"l\": {\"type\": \"array\"}, \"code\": {\"type\": \"string\"}, \"any\": {},"
    "\"sn\": {\"type\": [\"string\", \"null\"]}, \"is\": {\"type\": [\"integer\", \"string\"]}, \"si\": {\"type\": "
    "[\"string\", \"integer\"]},"
    "\"u\": {\"anyOf\": [{\"type\": \"integer\"}, {\"type\": \"null\"}]}, \"r\": {\"$ref\": \"#/$defs/T\"}, \"loop\": "
    "{\"$ref\": \"#/$defs/L\"},"
    "\"e\": {\"enum\": [\"5\", \"six\"]}, \"ei\": {\"enum\": [5, 6]}, \"one\": {\"oneOf\": [{\"type\": \"boolean\"}, "
    "{\"type\": \"array\"}]},"
    "\"opt\": {\"type\": \"integer\", \"nullable\": true}, \"props\": {\"properties\": {\"a\": {}}}, \"k\": "
    "{\"const\": 7}},"
    "\"$defs\": {\"T\": {\"type\": \"number\"}, \"L\": {\"$ref\": \"#/$defs/L\"}}}}},"
    "{\"name\": \"flat\", \"input_schema\": {\"properties\": {\"q\": {\"type\": \"integer\"}}}}]";

typedef struct log {
    buf b, args;
    int last;
} log_t;

static void check_object(str text) { /* arguments are one JSON object */
    arena a = { 0 };
    const json *v;
    err e = { 0 };
    if (!json_parse(&v, &a, text, "arguments", NULL, &e) || v->type != JSON_OBJECT)
        fail_msg("%.*s", (int)text.n, text.p);
    arena_free(&a);
}

static void on_event(void *ctx, split_kind kind, str text) {
    log_t *l = ctx;
    const bool end = kind == SPLIT_CALL_END || kind == SPLIT_CALL_CUT;
    assert_true(end ? text.n == 0 : text.n > 0);
    assert_int_equal(kind == SPLIT_ARGS || end, l->last == SPLIT_CALL || l->last == SPLIT_ARGS);
    if (kind == SPLIT_CALL) {
        buf_printf(&l->b, "|C:%.*s(", (int)text.n, text.p);
    } else if (kind == SPLIT_ARGS) {
        buf_str(&l->args, text);
        buf_str(&l->b, text);
    } else if (end) {
        check_object(buf_view(&l->args));
        buf_clear(&l->args);
        buf_puts(&l->b, kind == SPLIT_CALL_END ? ")" : "...)");
    } else {
        if (l->last != (int)kind) buf_puts(&l->b, kind == SPLIT_TEXT ? "|A:" : "|T:");
        buf_str(&l->b, text);
    }
    l->last = (int)kind;
}

static const json *tools_json(arena *a) {
    const json *v = NULL;
    err e = { 0 };
    if (!json_parse(&v, a, str_of(TOOLS), "tools", NULL, &e)) fail_msg("%s", e.msg);
    return v;
}

/* Events of text cut at the given places. */
static char *split_cuts(bool thinking, const json *tools, str text, const size_t *cuts, size_t n) {
    log_t l = { .last = -1 };
    split *s = split_new(thinking, tools, on_event, &l);
    size_t at = 0;
    for (size_t i = 0; i <= n; i++) {
        const size_t end = i < n ? cuts[i] : text.n;
        char *exact = malloc(end - at ? end - at : 1);
        memcpy(exact, text.p + at, end - at);
        split_push(s, (str){ exact, end - at });
        free(exact);
        at = end;
    }
    split_end(s);
    split_free(s);
    assert_true(l.last != SPLIT_CALL && l.last != SPLIT_ARGS);
    buf_free(&l.args);
    buf_puts(&l.b, "");
    return l.b.p;
}

static char *split_sized(bool thinking, const json *tools, str text, size_t size) {
    size_t *cuts = malloc((text.n + 1) * sizeof *cuts), n = 0;
    for (size_t at = size; at < text.n; at += size) cuts[n++] = at;
    char *r = split_cuts(thinking, tools, text, cuts, n);
    free(cuts);
    return r;
}

static void check_one(char *got, const char *want, const char *text, const char *how) {
    if (strcmp(got, want) != 0) fail_msg("%s: '%s'\n got '%s'\nwant '%s'", how, text, got, want);
    free(got);
}

static void gives_bytes(bool thinking, const json *tools, str text, const char *want) {
    check_one(split_cuts(thinking, tools, text, NULL, 0), want, text.p, "whole");
    static const size_t sizes[] = { 1, 2, 3, 4, 7 };
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++)
        check_one(split_sized(thinking, tools, text, sizes[i]), want, text.p, "chunks");
    for (size_t cut = 1; cut < text.n; cut++)
        check_one(split_cuts(thinking, tools, text, &cut, 1), want, text.p, "halves");
}

static void gives(bool thinking, bool with_tools, const char *text, const char *want) {
    arena a = { 0 };
    gives_bytes(thinking, with_tools ? tools_json(&a) : NULL, str_of(text), want);
    arena_free(&a);
}

#define CALL(args) "<tool_call>\n<function=get>\n" args "</function>\n</tool_call>"
#define P(k, v) "<parameter=" k ">\n" v "\n</parameter>\n"

static void thoughts(void **state) {
    (void)state;
    for (int tools = 0; tools < 2; tools++) {
        gives(true, tools, "hm\n</think>\n\nyes", "|T:hm\n|A:yes");
        gives(true, tools, "hm, no end", "|T:hm, no end");
        gives(true, tools, "", "");
        gives(true, tools, "</think>\n\n", "");
        gives(true, tools, "a </b> <think> c</think> d </think> e", "|T:a </b> <think> c|A:d </think> e");
        gives(true, tools, "\n<think>\nhm</think>x", "|T:\nhm|A:x");
        gives(true, tools, "a</think>\n</think>\n\nb", "|T:a|A:b");
        gives(true, tools, "a</think><think>b", "|T:a|A:<think>b");
        gives(false, tools, "plain", "|A:plain");
        gives(false, tools, "  \n plain\n", "|A:  \n plain\n");
        gives(false, tools, "\n<think>\nhm\n</think>\n\nyes", "|T:\nhm\n|A:yes");
        gives(false, tools, "</think>\nyes", "|A:yes");
        gives(false, tools, "so <think> is a tag", "|A:so <think> is a tag");
        gives(false, tools, " \n", "|A: \n");
        gives(true, tools, "x < y </ y </thin k</think>z", "|T:x < y </ y </thin k|A:z");
    }
    gives(false, false, "a <tool_call> b <", "|A:a <tool_call> b <");
    gives(false, false, CALL(P("n", "1")), "|A:" CALL(P("n", "1")));
}

static void calls(void **state) {
    (void)state;
    gives(false, true, CALL(P("city", "Rome") P("n", "3")), "|C:get({\"city\": \"Rome\", \"n\": 3})");
    gives(true, true, "t\n</think>\n\n" CALL(""), "|T:t\n|C:get({})");
    gives(false, true, "Let me see.\n\n" CALL(P("n", "1")), "|A:Let me see.|C:get({\"n\": 1})");
    gives(false, true, CALL(P("n", "1")) "\n" CALL(P("n", "2")) "\n", "|C:get({\"n\": 1})|C:get({\"n\": 2})");
    gives(false, true, "a " CALL("") "\n\nb\n", "|A:a|C:get({})|A:\n\nb\n");
    gives(false, true, CALL("") "\n\nb", "|C:get({})|A:b");
    gives(false, true, "<tool_call><function=other><parameter=p>v</parameter></function></tool_call>",
          "|C:other({\"p\": \"v\"})");
    gives(false, true, CALL(P("city", "\n two\nlines \n")), "|C:get({\"city\": \"\\n two\\nlines \\n\"})");
    gives(false, true, CALL(P("n", "1") P("n", "2")), "|C:get({\"n\": 1})");
    gives(false, true, "<tool_call>\n<function=flat>\n" P("q", "12345678901234567890123") "</function>\n</tool_call>",
          "|C:flat({\"q\": 12345678901234567890123})");
}

static void drift(void **state) {
    (void)state;
    /* no opener */
    gives(false, true, "<function=get>\n" P("n", "1") "</function>", "|C:get({\"n\": 1})");
    gives(false, true, "ok\n <function=get>\n" P("n", "1") "</function>\n</tool_call>", "|A:ok|C:get({\"n\": 1})");
    gives(false, true, "ok <function=get>\n" P("n", "1") "</function>",
          "|A:ok <function=get>\n" P("n", "1") "</function>");
    gives(false, true, "<function=nope>\n" P("n", "1") "</function>", "|A:<function=nope>\n" P("n", "1") "</function>");
    /* no </parameter> */
    gives(false, true, CALL("<parameter=city>\nRome\n<parameter=n>\n2\n"), "|C:get({\"city\": \"Rome\", \"n\": 2})");
    gives(false, true, CALL("<parameter=city>Rome<parameter=n>2"), "|C:get({\"city\": \"Rome\", \"n\": 2})");
    gives(false, true, CALL("<parameter=city>Rome<parameter=zz>2"), "|C:get({\"city\": \"Rome<parameter=zz>2\"})");
    /* no </function>, no </tool_call>, both wrong, next call at once */
    gives(false, true, "<tool_call>\n<function=get>\n" P("n", "1") "</tool_call>", "|C:get({\"n\": 1})");
    gives(false, true, "<tool_call>\n<function=get>\n" P("n", "1") "</function>", "|C:get({\"n\": 1})");
    gives(false, true, "<tool_call>\n<function=get>\n<parameter=n>1</tool_call>", "|C:get({\"n\": 1})");
    gives(false, true, "<tool_call>\n<function=get>\n" P("n", "1") CALL(P("n", "2")),
          "|C:get({\"n\": 1})|C:get({\"n\": 2})");
    /* stray closing tags */
    gives(false, true, CALL(P("n", "1") "</parameter>\n") "\n</tool_call>\n</function>x", "|C:get({\"n\": 1})|A:x");
    /* tags inside values */
    gives(false, true, CALL(P("code", "if a < b: x = \"</function>\" # <parameter=q> </tool_call>\n</div>")),
          "|C:get({\"code\": \"if a < b: x = \\\"</function>\\\" # <parameter=q> </tool_call>\\n</div>\"})");
    gives(false, true, CALL(P("code", "<tool_call>\n<function=get>\n</function>\nend")),
          "|C:get({\"code\": \"<tool_call>\\n<function=get>\\n</function>\\nend\"})");
    /* quoted and padded names */
    gives(false, true, "<tool_call><function= \"get\" ><parameter='n'>4</parameter></function></tool_call>",
          "|C:get({\"n\": 4})");
}

static void prose(void **state) {
    (void)state;
    gives(false, true, "the tag <tool_call> opens a call", "|A:the tag <tool_call> opens a call");
    gives(false, true, "ends with <tool_call>", "|A:ends with <tool_call>");
    gives(false, true, "<tool_call>\n{\"name\": 1}\n</tool_call>", "|A:<tool_call>\n{\"name\": 1}\n</tool_call>");
    gives(false, true, "<tool_call><function=get>says nothing", "|A:<tool_call><function=get>says nothing");
    gives(false, true, "<tool_call> <tool_call>" CALL(""), "|A:<tool_call> <tool_call>|C:get({})");
    gives(false, true, "`<tool_call>` and `<function=get>`", "|A:`<tool_call>` and `<function=get>`");
    gives(false, true, "a < b <c> <<tool_cal", "|A:a < b <c> <");
    gives(false, true, "less is <", "|A:less is <");
    gives(false, true, "```xml\n" CALL(P("n", "1")) "\n```\n" CALL(""),
          "|A:```xml\n" CALL(P("n", "1")) "\n```|C:get({})");
    gives(false, true, "~~~~\n```\n~~~\n" CALL("") "\n~~~~\n" CALL(""),
          "|A:~~~~\n```\n~~~\n" CALL("") "\n~~~~|C:get({})");
    gives(false, true, "  ```\n<tool_call>", "|A:  ```\n<tool_call>");
    gives(false, true, "```inline```\n" CALL(""), "|A:```inline```|C:get({})");
    gives(false, true, "```\nx\n``` y\n" CALL("") "\n```", "|A:```\nx\n``` y\n" CALL("") "\n```");
    gives(false, true, "` ``\n" CALL(""), "|A:` ``|C:get({})");
}

static void calls_in_thought(void **state) {
    (void)state;
    gives(true, true, "I call\n" CALL(P("n", "1")), "|T:I call\n|C:get({\"n\": 1})");
    gives(true, true, "I call\n" CALL(P("n", "1")) "\n" CALL(P("n", "2")) "\n",
          "|T:I call\n|C:get({\"n\": 1})|C:get({\"n\": 2})");
    gives(true, true, "x\n<function=get>\n" P("n", "1") "</function>", "|T:x\n|C:get({\"n\": 1})");
    gives(true, true, "maybe " CALL(P("n", "1")) " but no\n</think>\nno",
          "|T:maybe " CALL(P("n", "1")) " but no\n|A:no");
    gives(true, true, "maybe " CALL(P("n", "1")) "\n</think>\nno", "|T:maybe " CALL(P("n", "1")) "\n|A:no");
    gives(true, true, "the <tool_call> tag</think>a", "|T:the <tool_call> tag|A:a");
    gives(true, true, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
          "|T:<tool_call>\n<function=unknown>\n</function>\n</tool_call>");
    gives(true, true, "a <tool_call>\n<function=get>\n<parameter=n>\n1</think>b",
          "|T:a <tool_call>\n<function=get>\n<parameter=n>\n1|A:b");
    gives(true, true, "a <tool_call>\n<function=get>\n<parameter=n>\n1",
          "|T:a <tool_call>\n<function=get>\n<parameter=n>\n1");
    gives(true, false, "I call\n" CALL(P("n", "1")), "|T:I call\n" CALL(P("n", "1")));
}

static void utf8(void **state) {
    (void)state;
    gives(true, true, "\xe4\xbd\xa0\xf0\x9f\x99\x82</think>\xc3\xa9 \xe2\x82\xac",
          "|T:\xe4\xbd\xa0\xf0\x9f\x99\x82|A:\xc3\xa9 \xe2\x82\xac");
    gives(false, false,
          "a\xff"
          "b\xe2\x82",
          "|A:a\xef\xbf\xbd"
          "b\xef\xbf\xbd");
    gives(
        false, false, "\xe0\x80\xed\xa0\x80\xf5\xc0\xf4\x90",
        "|A:"
        "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    gives_bytes(false, NULL, (str){ "a\0b", 3 }, "|A:a"); /* compared up to the NUL */
}

/* The generation may end at any byte: no part of a tag in text, thought or arguments. */
static void cut_anywhere(void **state) {
    (void)state;
    arena a = { 0 };
    const json *tools = tools_json(&a);
    static const char text[] =
        "hm\n</think>\n\nfirst\n" CALL(P("city", "Rome") P("n", "3")) "\n" CALL(P("o", "{\"a\": [1]}"));
    for (size_t n = 0; n <= sizeof text - 1; n++) {
        char *got = split_cuts(true, tools, (str){ text, n }, NULL, 0);
        const char *lt = strchr(got, '<');
        if (lt && strncmp(lt, "<tool_call>", 11) == 0 && lt[11 + strspn(lt + 11, "\n")] == 0)
            lt = NULL; /* the bare words */
        if (lt) fail_msg("after %zu bytes: '%s'", n, got);
        if (strncmp(got, "|T:hm\n|A:first", strlen(got) < 14 ? strlen(got) : 14) != 0 && n > 3)
            fail_msg("after %zu bytes: '%s'", n, got);
        free(got);
    }
    arena_free(&a);
}

/* The generation ends inside a call. */
static void cut_calls(void **state) {
    (void)state;
#define HEAD "<tool_call>\n<function=get>\n"
    gives(false, true, HEAD, "");
    gives(false, true, "a\n" HEAD "<parameter=ci", "|A:a");
    gives(false, true, HEAD "<parameter=city>", "|C:get({}...)");
    gives(false, true, HEAD "<parameter=city>\nRo", "|C:get({\"city\": \"Ro\"}...)");
    gives(false, true, HEAD "<parameter=city>\nRome\n", "|C:get({\"city\": \"Rome\"}...)");
    gives(false, true, HEAD "<parameter=city>\nRome\n</param", "|C:get({\"city\": \"Rome\"}...)");
    gives(false, true, HEAD "<parameter=n>\n12", "|C:get({}...)");
    gives(false, true, HEAD "<parameter=sn>\nnul", "|C:get({}...)");
    gives(false, true, HEAD "<parameter=sn>\nnull a", "|C:get({\"sn\": \"null a\"}...)");
    gives(false, true, HEAD P("city", "Rome"), "|C:get({\"city\": \"Rome\"})");
    gives(false, true, HEAD P("city", "Rome") "</func", "|C:get({\"city\": \"Rome\"})");
    gives(false, true, HEAD P("city", "Rome") "<parameter=n", "|C:get({\"city\": \"Rome\"}...)");
    gives(false, true, HEAD P("city", "Rome") "<parameter=n>\n1", "|C:get({\"city\": \"Rome\"}...)");
    gives(false, true, HEAD P("city", "a") "<parameter=city>\nb", "|C:get({\"city\": \"a\"}...)");
    gives(false, true, CALL(P("n", "1")) "\n" HEAD "<parameter=code>\nx = \"",
          "|C:get({\"n\": 1})|C:get({\"code\": \"x = \\\"\"}...)");
}

typedef struct pieces {
    char shown[256];
} pieces;

static void on_piece(void *ctx, split_kind kind, str text) {
    pieces *p = ctx;
    const size_t n = strlen(p->shown);
    snprintf(p->shown + n, sizeof p->shown - n, kind == SPLIT_CALL ? "%.*s(" : "%.*s", (int)text.n, text.p);
}

/* Arguments come while they are written, not at the end. */
static void streamed(void **state) {
    (void)state;
    static const struct {
        const char *push, *shown;
    } steps[] = {
        { "<tool_call>\n<function=get>\n", "" },
        { "<parameter=city>", "get({" },
        { "\n", "get({\"city\": \"" },
        { "New \"Yo", "get({\"city\": \"New \\\"Yo" },
        { "rk\"\n", "get({\"city\": \"New \\\"York\\\"" },
        { "x</para", "get({\"city\": \"New \\\"York\\\"\\nx" },
        { "meter>\n", "get({\"city\": \"New \\\"York\\\"\\nx\"" },
        { "<parameter=n>\n4", "get({\"city\": \"New \\\"York\\\"\\nx\"" },
        { "2\n</parameter>", "get({\"city\": \"New \\\"York\\\"\\nx\", \"n\": 42" },
        { "\n</function>", "get({\"city\": \"New \\\"York\\\"\\nx\", \"n\": 42}" },
    };
    arena a = { 0 };
    pieces p = { "" };
    split *s = split_new(false, tools_json(&a), on_piece, &p);
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        split_push(s, str_of(steps[i].push));
        assert_string_equal(p.shown, steps[i].shown);
    }
    split_free(s); /* without an end: nothing is left behind */
    arena_free(&a);
}

/* An answer that begins with anything else has no calls, whatever it spells. */
static void calls_first(void **state) {
    (void)state;
    static const char call[] =
        "<tool_call>\n<function=get>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>";
    static const struct {
        bool thinking;
        const char *before, *shown;
    } cases[] = {
        { false, "", "get({\"city\": \"Rome\"}" },
        { false, "\n\n", "get({\"city\": \"Rome\"}" },
        { true, "Hm {</think>\n\n", "get({\"city\": \"Rome\"}" },
        { false, "{\"a\":\"", NULL },
        { true, "Hm</think>\n\n{\"a\":\"", NULL },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (int step = 1; step < 4; step += 2) {
            arena a = { 0 };
            pieces p = { "" };
            buf all = { 0 };
            buf_printf(&all, "%s%s", cases[i].before, call);
            split *s = split_new(cases[i].thinking, tools_json(&a), on_piece, &p);
            split_calls_first(s);
            for (size_t at = 0; at < all.n; at += (size_t)step)
                split_push(s, (str){ all.p + at, all.n - at < (size_t)step ? all.n - at : (size_t)step });
            split_end(s);
            if (cases[i].shown)
                assert_non_null(strstr(p.shown, cases[i].shown));
            else
                assert_non_null(strstr(p.shown, call));
            split_free(s);
            buf_free(&all);
            arena_free(&a);
        }
}

static void value(const char *key, const char *text, const char *want) {
    arena a = { 0 };
    const json *root = toolcall_schema(tools_json(&a), STR("get"));
    const json *schema = json_get(json_get(root, "properties"), key);
    buf b = { 0 };
    toolcall_value(&b, schema, root, toolcall_strip(str_of(text)));
    if (!str_is(buf_view(&b), want)) fail_msg("%s '%s': got %s, want %s", key, text, b.p, want);
    buf_free(&b);
    /* the same in a call, in every chunking */
    buf call = { 0 }, events = { 0 };
    buf_printf(&call, "<tool_call><function=get><parameter=%s>%s</parameter></function></tool_call>", key, text);
    buf_printf(&events, "|C:get({\"%s\": %s})", key, want);
    gives(false, true, call.p, events.p);
    buf_free(&call);
    buf_free(&events);
    arena_free(&a);
}

static void values(void **state) {
    (void)state;
    value("city", "03106", "\"03106\"");
    value("city", "null", "\"null\"");
    value("city", "\n\nx\n\n", "\"\\nx\\n\"");
    value("city", "\r\nx\r\n", "\"x\"");
    value("city", "", "\"\"");
    value("n", "\n -7 \n", "-7");
    value("n", "99999999999999999999999", "99999999999999999999999");
    value("n", "5.0", "5.0");
    value("n", "5.5", "\"5.5\"");
    value("n", "03", "\"03\"");
    value("n", "five", "\"five\"");
    value("n", "null", "null");
    value("n", "None", "null");
    value("n", "", "\"\"");
    value("x", "1e5", "1e5");
    value("x", "-0.10", "-0.10");
    value("x", ".5", "\".5\"");
    value("x", "NaN", "\"NaN\"");
    value("ok", "true", "true");
    value("ok", "False", "false");
    value("ok", "1", "\"1\"");
    value("o", "{\"a\": 1.50, \"b\": [null]}", "{\"a\":1.50,\"b\":[null]}");
    value("o", "{'a': True, 'b': (1, None,), 'c': 'it\\'s \\u00e9'}",
          "{\"a\":true,\"b\":[1,null],\"c\":\"it's \xc3\xa9\"}");
    value("o", "{'a': }", "\"{'a': }\"");
    value("o", "null", "null");
    value("l", "[1, 'x',]", "[1,\"x\"]");
    value("l", "[1, 2", "\"[1, 2\"");
    value("l", "\n[\n  1,\n  2\n]\n", "[1,2]");
    value("any", "5", "\"5\"");
    value("any", "[5]", "[5]");
    value("any", "{\"k\": \"v\"}", "{\"k\":\"v\"}");
    value("any", "null", "\"null\"");
    value("unknown", "[5]", "\"[5]\"");
    value("sn", "null", "null");
    value("sn", "5", "\"5\"");
    value("is", "5", "5");
    value("is", "05", "\"05\"");
    value("si", "5", "\"5\"");
    value("u", "7", "7");
    value("u", "null", "null");
    value("u", "x", "\"x\"");
    value("r", "2.5", "2.5");
    value("loop", "2.5", "\"2.5\"");
    value("e", "5", "\"5\"");
    value("ei", "5", "5");
    value("k", "7", "7");
    value("one", "true", "true");
    value("one", "[true]", "[true]");
    value("opt", "null", "null");
    value("props", "{\"a\": 1}", "{\"a\":1}");
}

/* A nest of brackets deeper than any limit stays text, and costs no stack. */
static void deep_values(void **state) {
    (void)state;
    buf b = { 0 }, out = { 0 };
    for (int i = 0; i < 100000; i++) buf_byte(&b, '[');
    arena a = { 0 };
    const json *root = toolcall_schema(tools_json(&a), STR("get"));
    toolcall_value(&out, json_get(json_get(root, "properties"), "l"), root, buf_view(&b));
    assert_int_equal(out.n, 100000 + strlen("\"\""));
    arena_free(&a);
    buf_free(&b);
    buf_free(&out);
}

/* Unions of unions cost a bounded time. */
static void deep_unions(void **state) {
    (void)state;
    buf b = { 0 };
    buf_puts(&b, "{\"$defs\": {\"u\": {\"anyOf\": [");
    for (int i = 0; i < 100; i++) buf_printf(&b, "%s{\"$ref\": \"#/$defs/u\"}", i ? "," : "");
    buf_puts(&b, "]}}}");
    arena a = { 0 };
    const json *root;
    err e = { 0 };
    assert_true(json_parse(&root, &a, buf_view(&b), "schema", NULL, &e));
    buf out = { 0 };
    toolcall_value(&out, json_get(json_get(root, "$defs"), "u"), root, STR("5"));
    assert_string_equal(out.p, "\"5\"");
    arena_free(&a);
    buf_free(&b);
    buf_free(&out);
}

/* What the model really wrote, by the oracle's record: in every chunking the same, and nothing lost. */
static void recorded(void **state) {
    (void)state;
    arena a = { 0 };
    const json *file;
    err e = { 0 };
    if (!json_parse_file(&file, &a, "tests/oracle/qwen36-tiny/greedy.json", NULL, &e)) fail_msg("%s", e.msg);
    const json *cases = json_get(file, "cases");
    int thoughts_seen = 0, calls_seen = 0;
    assert_true(json_is(cases, JSON_ARRAY) && cases->n > 20);
    for (uint32_t i = 0; i < cases->n; i++) {
        const str prompt = json_str(json_get(&cases->u.items[i], "prompt"));
        str text = json_str(json_get(&cases->u.items[i], "text"));
        if (str_ends(text, STR("<|im_end|>"))) text.n -= 10;
        const bool thinks = split_prompt_thinks(prompt);
        const ptrdiff_t list = str_find(prompt, STR("<tools>\n")), end = str_find(prompt, STR("\n</tools>"));
        const json *tools = NULL;
        buf want = { 0 }, b = { 0 };
        if (list >= 0) { /* one tool a line */
            buf_byte(&b, '[');
            for (ptrdiff_t k = list + 8; k < end; k++) buf_byte(&b, prompt.p[k] == '\n' ? ',' : prompt.p[k]);
            buf_byte(&b, ']');
            assert_true(json_parse(&tools, &a, buf_view(&b), "tools", NULL, &e));
        }
        if (list >= 0) {
            calls_seen++;
            buf_puts(&want, "|C:get_weather({\"city\": \"Paris\"})");
        } else if (thinks) {
            thoughts_seen++;
            const ptrdiff_t close = str_find(text, STR("</think>\n\n"));
            assert_true(close > 0);
            buf_puts(&want, "|T:");
            buf_add(&want, text.p, (size_t)close);
            buf_puts(&want, "|A:");
            buf_str(&want, str_skip(text, (size_t)close + 10));
        } else {
            buf_puts(&want, "|A:");
            buf_str(&want, text);
        }
        gives_bytes(thinks, tools, text, want.p);
        buf_free(&want);
        buf_free(&b);
    }
    assert_true(thoughts_seen >= 10 && calls_seen >= 1);
    arena_free(&a);
}

static void prompts(void **state) {
    (void)state;
    assert_true(split_prompt_thinks(STR("<|im_start|>assistant\n<think>\n")));
    assert_true(split_prompt_thinks(STR("<|im_start|>assistant\n<think>\nLet me")));
    assert_false(split_prompt_thinks(STR("<|im_start|>assistant\n<think>\n\n</think>\n\n")));
    assert_false(split_prompt_thinks(STR("<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n")));
    assert_true(split_prompt_thinks(STR("<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n<think>\n")));
    assert_false(split_prompt_thinks(STR("")));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(thoughts),
        cmocka_unit_test(calls),
        cmocka_unit_test(drift),
        cmocka_unit_test(prose),
        cmocka_unit_test(calls_in_thought),
        cmocka_unit_test(utf8),
        cmocka_unit_test(cut_anywhere),
        cmocka_unit_test(values),
        cmocka_unit_test(deep_values),
        cmocka_unit_test(deep_unions),
        cmocka_unit_test(cut_calls),
        cmocka_unit_test(streamed),
        cmocka_unit_test(calls_first),
        cmocka_unit_test(recorded),
        cmocka_unit_test(prompts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
