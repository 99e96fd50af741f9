/* The interpreter: the oracle's cases, errors and their lines, scoping, limits.
 * With --lines it is a driver for the differential test: JSON lines {"template", "context"} in,
 * {"text"} or {"error", "id"} out. */
#include "base/file.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "base/json.h"
#include "text/jinja.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ORACLE "tests/oracle/qwen36-tiny/"

static bool render_vars(str source, const json *context, const jinja_limits *l, buf *out, err *e) {
    jinja *t;
    char *copy = malloc(source.n ? source.n : 1); /* exact size: reads behind it are seen by ASan */
    if (source.n) memcpy(copy, source.p, source.n);
    bool ok = jinja_compile(&t, (str){ copy, source.n }, e);
    free(copy); /* a compiled template does not point into its source */
    if (!ok) return false;
    const uint32_t n = context ? context->n : 0;
    jinja_var *v = malloc((n + 1) * sizeof *v);
    for (uint32_t i = 0; i < n; i++) v[i] = (jinja_var){ .name = context->u.members[i].key, .value = &context->u.members[i].value };
    ok = jinja_render(t, out, v, n, l, e);
    free(v);
    jinja_free(t);
    return ok;
}

static bool render(const char *source, const char *context, const jinja_limits *l, buf *out, err *e) {
    arena a = { 0 };
    const json *v = NULL;
    if (context && !json_parse(&v, &a, str_of(context), "context", NULL, e)) fail_msg("context: %s", e->msg);
    const bool ok = render_vars(str_of(source), v, l, out, e);
    arena_free(&a);
    return ok;
}

static void gives(const char *source, const char *context, const char *want) {
    buf b = { 0 };
    err e = { 0 };
    if (!render(source, context, NULL, &b, &e)) fail_msg("%s: %s: %s", source, e.id, e.msg);
    if (!str_is(buf_view(&b), want)) fail_msg("%s: got '%s', want '%s'", source, b.p, want);
    buf_free(&b);
}

/* Fails with this id and with `part` in its message; the output keeps what it had. */
static void fails(const char *source, const char *context, const jinja_limits *l, const char *id, const char *part) {
    buf b = { 0 };
    err e = { 0 };
    buf_puts(&b, "before");
    if (render(source, context, l, &b, &e)) fail_msg("%s: accepted, gives '%s'", source, b.p);
    if (strcmp(e.id, id) != 0 || !strstr(e.msg, part)) fail_msg("%s: %s: %s (want %s with '%s')", source, e.id, e.msg, id, part);
    assert_string_equal(b.p, "before");
    buf_free(&b);
}

static void oracle_cases(void **state) {
    (void)state;
    arena a = { 0 };
    const json *all;
    err e = { 0 };
    if (!json_parse_file(&all, &a, ORACLE "jinja.json", NULL, &e)) fail_msg("%s", e.msg);
    assert_int_equal(all->n, 53);
    for (uint32_t i = 0; i < all->n; i++) {
        const json *c = &all->u.items[i], *text = json_get(c, "text");
        const str source = json_str(json_get(c, "template"));
        buf b = { 0 };
        err why = { 0 };
        const bool ok = render_vars(source, json_get(c, "context"), NULL, &b, &why);
        if (ok != (text != NULL)) fail_msg("case %u: %s: %s", i, source.p, ok ? b.p : why.msg);
        if (ok && !str_eq(buf_view(&b), json_str(text))) fail_msg("case %u: %s: got '%s', want '%s'", i, source.p, b.p, text->u.s);
        if (!ok) assert_non_null(strstr(why.msg, "line 1"));
        buf_free(&b);
    }
    arena_free(&a);
}

static void smoke(void **state) {
    (void)state;
    gives("{{ 1 }}", NULL, "1");
    fails("\n{{ 1 + 'a' }}", NULL, NULL, "E-TEMPLATE-RUN", "line 2");
}

/* ---- driver ---- */

static void answer(const json *c) {
    buf b = { 0 }, out = { 0 };
    err e = { 0 };
    if (render_vars(json_str(json_get(c, "template")), json_get(c, "context"), NULL, &b, &e)) {
        buf_puts(&out, "{\"text\": ");
        json_write_str(&out, buf_view(&b));
    } else {
        buf_puts(&out, "{\"id\": ");
        json_write_str(&out, str_of(e.id));
        buf_puts(&out, ", \"error\": ");
        json_write_str(&out, str_of(e.msg));
    }
    buf_puts(&out, "}\n");
    fputs(out.p, stdout);
    buf_free(&out);
    buf_free(&b);
}

static int drive(void) {
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, stdin)) > 0) {
        arena a = { 0 };
        const json *c;
        err e = { 0 };
        if (!json_parse(&c, &a, (str){ line, (size_t)n }, "stdin", NULL, &e)) {
            fprintf(stderr, "%s\n", e.msg);
            return 1;
        }
        answer(c);
        fflush(stdout);
        arena_free(&a);
    }
    free(line);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--lines") == 0) return drive();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_cases), cmocka_unit_test(smoke),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
