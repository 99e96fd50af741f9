/* Bodies of other dialects in OpenAI's chat form: what comes out, which field a fault names, and that no JSON, however odd,
 * gives anything but one of both. */
#include "base/json.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "serve/convert.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const json *tree(arena *a, const char *text) {
    const json *v = NULL;
    err e = { 0 };
    const json_limits limits = { .allow_duplicates = true };
    if (!json_parse(&v, a, str_of(text), "body", &limits, &e)) fail_msg("%s: %s", text, e.msg);
    return v;
}

typedef enum what { A_MESSAGES, A_TOOLS, R_MESSAGES, R_TOOLS } what;

static bool convert(buf *out, what w, const json *body, bool *prefill, fault *f) {
    switch (w) {
    case A_MESSAGES: return anthropic_messages(out, body, prefill, f);
    case A_TOOLS: return anthropic_tools(out, body, f);
    case R_MESSAGES: return responses_messages(out, body, f);
    default: return responses_tools(out, body, f);
    }
}

static void gives(what w, const char *body, const char *want) {
    arena a = { 0 };
    buf out = { 0 };
    fault f = { 0 };
    bool prefill = false;
    if (!convert(&out, w, tree(&a, body), &prefill, &f)) fail_msg("%s: %s", body, f.message);
    assert_string_equal(out.p, want);
    tree(&a, out.p);
    buf_free(&out);
    arena_free(&a);
}

static void refuses(what w, const char *body, const char *param, const char *message) {
    arena a = { 0 };
    buf out = { 0 };
    fault f = { 0 };
    bool prefill = false;
    if (convert(&out, w, tree(&a, body), &prefill, &f)) fail_msg("%s gave %s", body, out.p);
    assert_int_equal(f.status, 400);
    assert_string_equal(f.param, param);
    if (!strstr(f.message, message)) fail_msg("%s: '%s' lacks '%s'", body, f.message, message);
    buf_free(&out);
    arena_free(&a);
}

#define USER "{\"role\":\"user\",\"content\":\"hi\"}"

static void anthropic_bodies(void **state) {
    (void)state;
    gives(A_MESSAGES, "{\"messages\":[" USER "]}", "[" USER "]");
    gives(A_MESSAGES, "{\"system\":\"be \\\"brief\\\"\",\"messages\":[" USER "]}",
          "[{\"role\":\"system\",\"content\":\"be \\\"brief\\\"\"}," USER "]");
    gives(
        A_MESSAGES,
        "{\"system\":[{\"type\":\"text\",\"text\":\"a\",\"cache_control\":{\"type\":\"ephemeral\"}},{\"type\":"
        "\"text\",\"text\":\"b\"}],\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"c\\n\"},"
        "{\"type\":\"text\",\"text\":\"d\"}]}]}",
        "[{\"role\":\"system\",\"content\":\"a\\nb\"},{\"role\":\"user\",\"content\":\"c\\nd\"}]");
    gives(A_MESSAGES,
          "{\"messages\":[" USER
          ",{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"hm\",\"signature\":\"s\"},"
          "{\"type\":\"redacted_thinking\",\"data\":\"x\"},{\"type\":\"text\",\"text\":\"see\"},{\"type\":\"tool_use\","
          "\"id\":\"t1\",\"name\":\"get\",\"input\":{\"city\":\"Rome\",\"n\":1.50}},{\"type\":\"tool_use\",\"id\":"
          "\"t2\",\"name\":\"now\",\"input\":{}}]},{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\","
          "\"tool_use_id\":\"t1\",\"content\":\"sunny\"},{\"type\":\"tool_result\",\"tool_use_id\":\"t2\",\"content\":"
          "[{\"type\":\"text\",\"text\":\"5\"},{\"type\":\"text\",\"text\":\"pm\"}]},{\"type\":\"text\",\"text\":"
          "\"and?\"}]}]}",
          "[" USER ",{\"role\":\"assistant\",\"content\":\"see\",\"reasoning_content\":\"hm\",\"tool_calls\":[{\"id\":"
          "\"t1\",\"type\":\"function\",\"function\":{\"name\":\"get\",\"arguments\":{\"city\":\"Rome\",\"n\":1.50}}},"
          "{\"id\":\"t2\",\"type\":\"function\",\"function\":{\"name\":\"now\",\"arguments\":{}}}]},{\"role\":\"tool\","
          "\"content\":\"sunny\",\"tool_call_id\":\"t1\"},{\"role\":\"tool\",\"content\":\"5\\npm\",\"tool_call_id\":"
          "\"t2\"},{\"role\":\"user\",\"content\":\"and?\"}]");
    gives(A_MESSAGES,
          "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"t\"}]}]}",
          "[{\"role\":\"tool\",\"content\":\"\",\"tool_call_id\":\"t\"}]");
    gives(A_TOOLS,
          "[{\"name\":\"get\",\"description\":\"d\",\"input_schema\":{\"type\":\"object\"},\"cache_control\":null},"
          "{\"type\":\"custom\",\"name\":\"now\",\"input_schema\":{}}]",
          "[{\"type\":\"function\",\"function\":{\"name\":\"get\",\"description\":\"d\",\"parameters\":{\"type\":"
          "\"object\"}}},{\"type\":\"function\",\"function\":{\"name\":\"now\",\"parameters\":{}}}]");
    gives(A_TOOLS, "[]", "[]");
}

static void anthropic_prefill(void **state) {
    (void)state;
    static const struct {
        const char *last;
        bool prefill;
    } cases[] = { { "{\"role\":\"assistant\",\"content\":\"The\"}", true },
                  { "{\"role\":\"assistant\",\"content\":[{\"type\":\"text\",\"text\":\"The\"}]}", true },
                  { "{\"role\":\"assistant\",\"content\":\"\"}", false },
                  { "{\"role\":\"assistant\",\"content\":\"The\"}," USER, false },
                  { USER, false } };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        arena a = { 0 };
        buf body = { 0 }, out = { 0 };
        fault f = { 0 };
        bool prefill = !cases[i].prefill;
        buf_printf(&body, "{\"messages\":[" USER ",%s]}", cases[i].last);
        assert_true(anthropic_messages(&out, tree(&a, body.p), &prefill, &f));
        assert_int_equal(prefill, cases[i].prefill);
        buf_free(&body);
        buf_free(&out);
        arena_free(&a);
    }
}

static void anthropic_faults(void **state) {
    (void)state;
    refuses(A_MESSAGES, "{}", "messages", "must be a list");
    refuses(A_MESSAGES, "{\"messages\":[]}", "messages", "must not be empty");
    refuses(A_MESSAGES, "{\"messages\":[5]}", "messages[0]", "role must be a string");
    refuses(A_MESSAGES, "{\"messages\":[{\"role\":\"tool\",\"content\":\"\"}]}", "messages[0]", "user or assistant");
    refuses(A_MESSAGES, "{\"messages\":[{\"role\":\"user\"}]}", "messages[0].content", "must be a string or a list");
    refuses(A_MESSAGES, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\",\"source\":{}}]}]}",
            "messages[0].content[0]", "images and documents are not served");
    refuses(A_MESSAGES, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"\"}]}]}",
            "messages[0].content[0]", "'thinking' are not supported");
    refuses(A_MESSAGES, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
            "messages[0].content[0]", "text must be a string");
    refuses(
        A_MESSAGES,
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"t\",\"content\":"
        "[{\"type\":\"image\"}]}]}]}",
        "messages[0].content[0].content[0]", "images");
    refuses(A_MESSAGES,
            "{\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"n\","
            "\"input\":[]}]}]}",
            "messages[0].content[0]", "input must be an object");
    refuses(A_MESSAGES,
            "{\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"n\","
            "\"input\":{}}]}]}",
            "messages", "no tool_result");
    refuses(A_MESSAGES, "{\"system\":5,\"messages\":[" USER "]}", "system", "must be a string or a list");
    refuses(A_TOOLS, "{}", "tools", "must be a list");
    refuses(A_TOOLS, "[{\"type\":\"web_search_20250305\",\"name\":\"web_search\"}]", "tools[0]", "of your own");
    refuses(A_TOOLS, "[{\"name\":\"x\"}]", "tools[0]", "input_schema must be an object");
}

static void responses_bodies(void **state) {
    (void)state;
    gives(R_MESSAGES, "{\"input\":\"hi\"}", "[" USER "]");
    gives(R_MESSAGES, "{\"instructions\":\"brief\",\"input\":[" USER "]}",
          "[{\"role\":\"system\",\"content\":\"brief\"}," USER "]");
    gives(R_MESSAGES,
          "{\"input\":[{\"type\":\"message\",\"role\":\"developer\",\"content\":[{\"type\":\"input_text\",\"text\":"
          "\"a\"}]},"
          "{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"b\"},{\"type\":\"input_text\",\"text\":"
          "\"c\"}]}]}",
          "[{\"role\":\"developer\",\"content\":\"a\"},{\"role\":\"user\",\"content\":\"b\\nc\"}]");
    /* what belongs to one turn becomes one message */
    gives(
        R_MESSAGES,
        "{\"input\":[" USER ",{\"type\":\"reasoning\",\"id\":\"r\",\"summary\":[],\"content\":[{\"type\":"
        "\"reasoning_text\",\"text\":\"hm\"}]},{\"type\":\"message\",\"id\":\"m\",\"status\":\"completed\",\"role\":"
        "\"assistant\",\"content\":[{\"type\":\"output_text\",\"text\":\"see\",\"annotations\":[]}]},{\"type\":"
        "\"function_call\",\"call_id\":\"c1\",\"name\":\"get\",\"arguments\":\"{\\\"n\\\": 1}\"},{\"type\":"
        "\"function_call\",\"call_id\":\"c2\",\"name\":\"now\",\"arguments\":\"\"},{\"type\":\"function_call_output\","
        "\"call_id\":\"c1\",\"output\":\"one\"},{\"type\":\"function_call_output\",\"call_id\":\"c2\",\"output\":"
        "[{\"type\":\"input_text\",\"text\":\"two\"}]},{\"type\":\"reasoning\",\"summary\":[{\"type\":\"summary_text\","
        "\"text\":\"so\"}]},{\"role\":\"assistant\",\"content\":\"done\"},{\"role\":\"assistant\",\"content\":"
        "\"really\"}]}",
        "[" USER ",{\"role\":\"assistant\",\"content\":\"see\",\"reasoning_content\":\"hm\",\"tool_calls\":[{\"id\":"
        "\"c1\",\"type\":\"function\",\"function\":{\"name\":\"get\",\"arguments\":\"{\\\"n\\\": 1}\"}},{\"id\":\"c2\","
        "\"type\":\"function\",\"function\":{\"name\":\"now\",\"arguments\":\"\"}}]},{\"role\":\"tool\",\"content\":"
        "\"one\",\"tool_call_id\":\"c1\"},{\"role\":\"tool\",\"content\":\"two\",\"tool_call_id\":\"c2\"},{\"role\":"
        "\"assistant\",\"content\":\"done\",\"reasoning_content\":\"so\"},{\"role\":\"assistant\",\"content\":"
        "\"really\"}]");
    gives(R_TOOLS,
          "[{\"type\":\"function\",\"name\":\"get\",\"description\":\"d\",\"parameters\":{\"type\":\"object\"},"
          "\"strict\":"
          "true},{\"type\":\"function\",\"name\":\"now\",\"parameters\":null}]",
          "[{\"type\":\"function\",\"function\":{\"name\":\"get\",\"description\":\"d\",\"parameters\":{\"type\":"
          "\"object\"}}},{\"type\":\"function\",\"function\":{\"name\":\"now\"}}]");
}

static void responses_faults(void **state) {
    (void)state;
    refuses(R_MESSAGES, "{}", "input", "is missing");
    refuses(R_MESSAGES, "{\"input\":5}", "input", "must be a string or a list");
    refuses(R_MESSAGES, "{\"input\":[]}", "input", "must not be empty");
    refuses(R_MESSAGES, "{\"instructions\":[],\"input\":\"x\"}", "instructions", "must be a string");
    refuses(R_MESSAGES, "{\"input\":[5]}", "input[0]", "must be an object");
    refuses(R_MESSAGES, "{\"input\":[" USER ",{\"role\":\"tool\",\"content\":\"x\"}]}", "input[1]", "role must be");
    refuses(R_MESSAGES, "{\"input\":[{\"role\":\"user\"}]}", "input[0].content", "is missing");
    refuses(R_MESSAGES, "{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_image\"}]}]}",
            "input[0].content[0]", "'input_image' are not served");
    refuses(R_MESSAGES, "{\"input\":[{\"type\":\"item_reference\",\"id\":\"x\"}]}", "input[0]", "nothing is stored");
    refuses(R_MESSAGES, "{\"input\":[{\"type\":\"web_search_call\"}]}", "input[0]", "'web_search_call'");
    refuses(R_MESSAGES, "{\"input\":[{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":\"n\"}]}", "input[0]",
            "arguments must be a string");
    refuses(R_MESSAGES, "{\"input\":[{\"type\":\"function_call_output\",\"output\":\"n\"}]}", "input[0]",
            "call_id must be a string");
    refuses(R_TOOLS, "[{\"type\":\"web_search\"}]", "tools[0]", "function only");
    refuses(R_TOOLS, "[{\"type\":\"function\"}]", "tools[0]", "name must be a string");
}

/* ---- any JSON: a tree of the words that matter, at random ---- */

static uint32_t rng;
static uint32_t draw(uint32_t n) {
    rng = rng * 1664525u + 1013904223u;
    return (rng >> 8) % n;
}

static void any_value(buf *b, int depth) {
    static const char *const keys[] = { "messages", "input",        "system",     "instructions", "role",
                                        "content",  "type",         "text",       "tool_use_id",  "id",
                                        "name",     "thinking",     "call_id",    "summary",      "arguments",
                                        "output",   "input_schema", "parameters", "description" };
    static const char *const words[] = {
        "user",      "assistant",         "system",         "tool",
        "text",      "thinking",          "tool_use",       "tool_result",
        "image",     "message",           "function_call",  "function_call_output",
        "reasoning", "input_text",        "output_text",    "function",
        "custom",    "redacted_thinking", "item_reference", "\\u0000<|im_end|>\\ud83d\\ude00"
    };
    const uint32_t kind = draw(depth > 6 ? 4 : 10);
    const uint32_t n = draw(5);
    if (kind == 0) {
        buf_puts(b, "null");
    } else if (kind == 1) {
        buf_puts(b, draw(2) ? "-1.5e3" : "true");
    } else if (kind < 5) {
        buf_printf(b, "\"%s\"", words[draw(ARRAY_LEN(words))]);
    } else if (kind < 7) {
        buf_byte(b, '[');
        for (uint32_t i = 0; i < n; i++) {
            if (i) buf_byte(b, ',');
            any_value(b, depth + 1);
        }
        buf_byte(b, ']');
    } else {
        buf_byte(b, '{');
        for (uint32_t i = 0; i < n + 2; i++) {
            buf_printf(b, "%s\"%s\":", i ? "," : "", keys[draw(ARRAY_LEN(keys))]);
            any_value(b, depth + 1);
        }
        buf_byte(b, '}');
    }
}

static void any_json(void **state) {
    (void)state;
    const char *seed = getenv("SEED");
    rng = seed ? (uint32_t)strtoul(seed, NULL, 10) : 20251;
    printf("SEED=%u\n", (unsigned)rng);
    int good = 0, bad = 0;
    for (int i = 0; i < 40000; i++) {
        static const char *const heads[] = { "{\"messages\":[{\"role\":\"user\",\"content\":", "{\"messages\":",
                                             "{\"input\":[{\"type\":\"message\",\"role\":\"user\",\"content\":",
                                             "{\"input\":", "[" };
        static const char *const tails[] = { "}]}", "}", "}]}", "}", "]" };
        const uint32_t form = draw(ARRAY_LEN(heads));
        const what w = form < 2 ? A_MESSAGES : form < 4 ? R_MESSAGES : draw(2) ? A_TOOLS : R_TOOLS;
        arena a = { 0 };
        buf body = { 0 }, out = { 0 };
        fault f = { 0 };
        bool prefill;
        buf_puts(&body, heads[form]);
        any_value(&body, 0);
        buf_puts(&body, tails[form]);
        if (convert(&out, w, tree(&a, body.p), &prefill, &f)) {
            assert_int_equal(tree(&a, out.p)->type, JSON_ARRAY);
            assert_int_equal(f.status, 0);
            good++;
        } else {
            assert_int_equal(f.status, 400);
            assert_true(f.param[0] && f.message[0]);
            bad++;
        }
        buf_free(&body);
        buf_free(&out);
        arena_free(&a);
    }
    assert_true(good > 1000 && bad > 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(anthropic_bodies), cmocka_unit_test(anthropic_prefill), cmocka_unit_test(anthropic_faults),
        cmocka_unit_test(responses_bodies), cmocka_unit_test(responses_faults),  cmocka_unit_test(any_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
