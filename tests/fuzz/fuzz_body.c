/* A request body through the reading half of every dialect: a chat request or a fault that names a status, never a crash.
 * First byte: which dialect; the rest is the body. */
#include <stdlib.h>

#include "base/json.h"
#include "serve/api.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void check_tree(const json *v) {
    buf b = { 0 };
    arena a = { 0 };
    const json *again;
    err e = { 0 };
    const json_limits limits = { .max_depth = 1000, .allow_duplicates = true };
    json_write(&b, v);
    CHECK(json_parse(&again, &a, buf_view(&b), "tree", &limits, &e), "%s", e.msg);
    arena_free(&a);
    buf_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    static const chat_dialect *const dialects[] = { &api_chat, &api_completions, &api_responses, &api_anthropic,
                                                    &api_anthropic_count };
    static engine g = { .n.real_vocab = 1000 };
    const chat_model m = { .name = "m", .g = &g, .ctx = 4096, .max_choices = 4, .thinking = -1, .think_end = -1 };
    if (n < 1) return 0;
    const chat_dialect *d = dialects[p[0] % ARRAY_LEN(dialects)];
    chat *c = chat_new(d, &m, NULL);
    fault f = { 0 };
    const json *body;
    err e = { 0 };
    const json_limits limits = { .max_depth = 64 };
    const str text = { (const char *)p + 1, n - 1 };
    if (json_parse(&body, &c->mem, text, "body", &limits, &e) && body->type == JSON_OBJECT) {
        if (d->parse(c, body, &f)) {
            CHECK(f.status == 0, "accepted with a fault: %s", f.message);
            if (c->request.messages) check_tree(c->request.messages);
            if (c->request.tools) check_tree(c->request.tools);
        } else {
            CHECK(f.status >= 400 && f.message[0], "refused without a reason");
        }
        buf b = { 0 };
        (d->write_fault ? d->write_fault : fault_write)(&b, &f);
        if (f.status) CHECK(b.p[0] == '{' && b.p[b.n - 1] == '}', "a fault that is no object");
        buf_free(&b);
    }
    chat_free(c);
    return 0;
}
