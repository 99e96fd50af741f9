/* Compile and render hostile templates: bytes up to the first NUL are the template, the rest is its context (JSON). */
#include <stdlib.h>

#include "base/json.h"
#include "text/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    const jinja_limits limits = { .max_steps = 300000,
                                  .max_memory_bytes = 16 << 20,
                                  .max_output_bytes = 1 << 20,
                                  .max_depth = 400,
                                  .max_seconds = 5 };
    const json_limits small = { .max_bytes = 1 << 16, .max_depth = 40, .allow_duplicates = true };
    const uint8_t *nul = n ? memchr(p, 0, n) : NULL;
    const str source = { (const char *)p, nul ? (size_t)(nul - p) : n };
    const str context =
        nul ? (str){ (const char *)nul + 1, n - source.n - 1 } : STR("{\"a\": [1, \"b\", {\"c\": null}]}");
    arena mem = { 0 };
    const json *v = NULL;
    jinja *t;
    buf out = { 0 };
    err e = { 0 };
    jinja_var vars[16];
    size_t count = 0;
    if (json_parse(&v, &mem, context, "context", &small, &e) && v->type == JSON_OBJECT)
        for (uint32_t i = 0; i < v->n && count < ARRAY_LEN(vars); i++)
            vars[count++] = (jinja_var){ .name = v->u.members[i].key, .value = &v->u.members[i].value };
    e = (err){ 0 };
    if (jinja_compile(&t, source, &e)) {
        buf_puts(&out, "kept");
        if (!jinja_render(t, &out, vars, count, &limits, &e)) CHECK(out.n == 4, "output of a failed render");
        jinja_free(t);
    }
    buf_free(&out);
    arena_free(&mem);
    return 0;
}
