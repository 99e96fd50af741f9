/* Any schema and any tools: refused, or a grammar in which no walk gets stuck and every end is JSON. The first byte chooses what
 * is compiled; the text is also what chooses the way of the walks. */
#include <stdint.h>

#include "text/grammar_impl.h"

enum { WALK = 200 };

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static uint32_t choose(const uint8_t *p, size_t n, uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u + p[*seed % n];
    return *seed >> 8;
}

static void walk(const grammar *g, const uint8_t *p, size_t n, bool is_json) {
    machine m;
    buf text = { 0 };
    uint32_t seed = (uint32_t)n;
    machine_open(&m, g);
    for (uint32_t at = m.start, i = 0; i < WALK; i++) {
        uint32_t to[256], count = 0;
        uint8_t byte[256];
        if (m.configs[at].accept && is_json) {
            arena a = { .limit = 16u << 20 };
            const json *v;
            err e = { 0 };
            const bool ok = json_parse(&v, &a, buf_view(&text), "walk", &(json_limits){ .allow_duplicates = true }, &e);
            CHECK(ok, "%s: " STR_FMT, e.msg, STR_ARG(buf_view(&text)));
            arena_free(&a);
        }
        for (int b = 0; b < 256; b++) {
            const uint32_t next = machine_step(&m, at, (uint8_t)b);
            if (next != MACHINE_DEAD) to[count] = next, byte[count++] = (uint8_t)b;
        }
        CHECK(count > 0 || m.configs[at].accept, "stuck after " STR_FMT, STR_ARG(buf_view(&text)));
        if (count == 0) break;
        const uint32_t k = choose(p, n, &seed) % count;
        at = to[k];
        buf_byte(&text, (char)byte[k]);
        if (machine_is_full(&m)) machine_compact(&m, &at, 1);
    }
    buf_free(&text);
    machine_close(&m);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    arena a = { .limit = 64u << 20 };
    err e = { 0 };
    const json *v;
    grammar *g;
    if (n < 2 || n > 65536 || !json_parse(&v, &a, (str){ (const char *)p + 1, n - 1 }, "fuzz", NULL, &e)) {
        arena_free(&a);
        return 0;
    }
    e = (err){ 0 };
    const bool tools = p[0] == 't';
    const grammar_options o = { .thinking = p[0] == 'k' };
    if (tools ? grammar_tool_calls(&g, v, &(grammar_calls){ .parallel = true }, NULL, &e)
              : grammar_json_schema(&g, v, &o, &e)) {
        walk(g, p, n, !tools && !o.thinking);
        grammar_free(g);
    } else {
        CHECK(e.kind == ERR_INPUT && e.id, "failed without a reason");
    }
    arena_free(&a);
    return 0;
}
