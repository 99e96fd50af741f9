/* Generated text in any chunking gives the same events; texts are UTF-8, arguments are JSON objects.
 * First byte: bit 0 = inside thinking, bit 1 = with tools, the rest seeds the cuts. */
#include <stdlib.h>

#include "base/json.h"
#include "text/split.h"
#include "text/utf8_feed.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

typedef struct events {
    buf b, args;
    int last;
} events;

static void check_json(str s) {
    arena a = { 0 };
    const json *v;
    err e = { 0 };
    CHECK(json_parse(&v, &a, s, "arguments", NULL, &e) && v->type == JSON_OBJECT, "arguments: %s", e.msg);
    arena_free(&a);
}

static void on_event(void *ctx, split_kind kind, str text) {
    events *l = ctx;
    buf again = { 0 };
    utf8_feed f = { .n = 0 };
    utf8_feed_bytes(&f, text, &again);
    CHECK(f.n == 0 && str_eq(buf_view(&again), text), "not whole UTF-8");
    buf_free(&again);
    const bool in_call = l->last == SPLIT_CALL || l->last == SPLIT_ARGS, end = kind >= SPLIT_CALL_END;
    CHECK(in_call == (kind == SPLIT_ARGS || end), "event %d behind %d", (int)kind, l->last);
    CHECK(end ? text.n == 0 : text.n > 0, "event %d with %zu bytes", (int)kind, text.n);
    if (kind == SPLIT_ARGS) buf_str(&l->args, text);
    if (end) {
        check_json(buf_view(&l->args));
        buf_clear(&l->args);
    }
    if (l->last != (int)kind) buf_printf(&l->b, "\n%d:", (int)kind);
    buf_str(&l->b, text);
    l->last = (int)kind;
}

static events run(bool thinking, const json *tools, str text, uint32_t seed, size_t longest) {
    events l = { .last = -1 };
    split *s = split_new(thinking, tools, on_event, &l);
    while (text.n) {
        seed = seed * 1664525u + 1013904223u;
        size_t k = longest ? 1 + (seed >> 8) % longest : text.n;
        if (k > text.n) k = text.n;
        split_push(s, (str){ text.p, k });
        text = str_skip(text, k);
    }
    split_end(s);
    split_free(s);
    CHECK(l.last != SPLIT_CALL && l.last != SPLIT_ARGS, "a call without an end");
    buf_free(&l.args);
    return l;
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    static const char tools_text[] =
        "[{\"function\": {\"name\": \"f\", \"parameters\": {\"properties\": {\"a\": "
        "{\"type\": \"integer\"}, \"b\": {\"type\": \"object\"}, "
        "\"c\": {\"anyOf\": [{\"type\": \"array\"}, {\"$ref\": \"#\"}, {\"type\": "
        "[\"null\", \"string\"]}]}, \"d\": {}, \"e\": {\"type\": \"string\"}, \"h\": {\"type\": "
        "[\"string\", \"null\"]}}}}}, {\"name\": \"g\"}]";
    arena a = { 0 };
    const json *tools = NULL;
    err e = { 0 };
    if (n < 1) return 0;
    if (p[0] & 2) CHECK(json_parse(&tools, &a, str_of(tools_text), "tools", NULL, &e), "%s", e.msg);
    const str text = { (const char *)p + 1, n - 1 };
    const bool thinking = p[0] & 1;
    events whole = run(thinking, tools, text, 0, 0);
    static const size_t sizes[] = { 1, 3, 17 };
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        events cut = run(thinking, tools, text, p[0], sizes[i]);
        CHECK(str_eq(buf_view(&whole.b), buf_view(&cut.b)), "chunking changes events\n%s\n--\n%s", whole.b.p, cut.b.p);
        buf_free(&cut.b);
    }
    (void)split_prompt_thinks(text);
    buf_free(&whole.b);
    arena_free(&a);
    return 0;
}
