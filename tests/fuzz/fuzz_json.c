/* Any text: refused, or a tree whose own text gives the same tree. */
#include "base/json.h"

#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void check(str text, const json_limits *limits) {
    arena a = { .limit = 64u << 20 };
    err e = { 0 };
    const json *v, *w;
    if (json_parse(&v, &a, text, "fuzz", limits, &e)) {
        buf b = { 0 }, c = { 0 };
        json_write(&b, v);
        CHECK(json_parse(&w, &a, buf_view(&b), "again", limits, &e), "%s", e.msg);
        json_write(&c, w);
        CHECK(str_eq(buf_view(&b), buf_view(&c)), "written twice, two texts");
        if (json_is_number(v)) (void)json_double(v);
        if (json_is(v, JSON_OBJECT) && v->n) CHECK(json_get_str(v, v->u.members[0].key), "a key is lost");
        buf_free(&b);
        buf_free(&c);
    } else {
        CHECK(e.kind == ERR_INPUT || e.kind == ERR_MACHINE, "failed without a reason");
    }
    arena_free(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    const str text = { n ? (const char *)p : "", n };
    check(text, NULL);
    check(text, &(json_limits){ .max_depth = 4, .allow_duplicates = true });
    return 0;
}
