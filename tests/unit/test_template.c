/* Templates of checkpoints: the oracle's chats, sources, special tokens, traits. */
#include "base/file.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "lib/scratch.h"
#include "text/template.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TINY "assets/qwen36-tiny"
#define ORACLE "tests/oracle/qwen36-tiny/"

static void oracle_chats(void **state) {
    (void)state;
    arena a = { 0 };
    const json *all;
    chat_template *t;
    err e = { 0 };
    if (!template_open(&t, TINY, &e)) fail_msg("%s", e.msg);
    if (!json_parse_file(&all, &a, ORACLE "chat.json", NULL, &e)) fail_msg("%s", e.msg);
    assert_int_equal(all->n, 37);
    for (uint32_t i = 0; i < all->n; i++) {
        const json *c = &all->u.items[i], *text = json_get(c, "text"), *error = json_get(c, "error");
        const char *name = json_get(c, "name")->u.s;
        buf b = { 0 };
        err why = { 0 };
        const bool ok = template_render(t, &b, json_get(c, "request"), &why);
        if (ok != (text != NULL)) fail_msg("%s: %s", name, ok ? b.p : why.msg);
        if (ok && !str_eq(buf_view(&b), json_str(text))) fail_msg("%s: got '%s', want '%s'", name, b.p, text->u.s);
        if (!ok) {
            assert_string_equal(why.id, "E-TEMPLATE-RAISE");
            if (!strstr(why.msg, error->u.s) || !strstr(why.msg, "line "))
                fail_msg("%s: '%s', want '%s'", name, why.msg, error->u.s);
        }
        buf_free(&b);
    }
    template_close(t);
    arena_free(&a);
}

static char *render_dir(const char *dir, const char *request) {
    arena a = { 0 };
    const json *v;
    chat_template *t;
    err e = { 0 };
    buf b = { 0 };
    if (!template_open(&t, dir, &e) || !json_parse(&v, &a, str_of(request), "request", NULL, &e))
        fail_msg("%s: %s", e.id, e.msg);
    if (!template_render(t, &b, v, &e)) fail_msg("%s: %s", e.id, e.msg);
    template_close(t);
    arena_free(&a);
    buf_puts(&b, "");
    return b.p;
}

static void renders(const char *dir, const char *request, const char *want) {
    char *got = render_dir(dir, request);
    assert_string_equal(got, want);
    free(got);
}

static void sources(void **state) {
    (void)state;
    char *d = scratch_new();
    free(scratch_puts(
        d, "tokenizer_config.json",
        "{\"bos_token\": \"<s>\", \"eos_token\": {\"content\": \"</s>\", \"special\": true}, \"pad_token\": null,"
        "\"add_bos_token\": true, \"additional_special_tokens\": [\"<x>\", \"<y>\"],"
        "\"extra_special_tokens\": {\"image_token\": \"<img>\"},"
        "\"chat_template\": \"C{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ image_token }}"
        "{{ additional_special_tokens[1] }}\"}"));
    renders(d, "{}", "C<s></s>False<img><y>");
    renders(d, "{\"bos_token\": \"mine\"}", "Cmine</s>False<img><y>"); /* the request wins */
    free(scratch_puts(d, "chat_template.jinja",
                      "J{{ bos_token }}{{ add_generation_prompt }}{{ tools }}{{ documents is none }}\n"));
    renders(d, "{}", "J<s>TrueNoneTrue"); /* the file wins over the config */
    renders(d, "{\"add_generation_prompt\": false, \"tools\": [1]}", "J<s>False[1]True");
    scratch_free(d);
}

static void named_templates(void **state) {
    (void)state;
    char *d = scratch_new();
    free(scratch_puts(d, "tokenizer_config.json",
                      "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"T{{ tools | length }}\"},"
                      "{\"name\": \"default\", \"template\": \"D\"}]}"));
    renders(d, "{}", "D");
    renders(d, "{\"tools\": []}", "D");
    renders(d, "{\"tools\": null}", "D");
    renders(d, "{\"tools\": [{}]}", "T1");
    scratch_free(d);
}

static void refused(const char *dir, const char *id, const char *part) {
    chat_template *t = (chat_template *)1;
    err e = { 0 };
    assert_false(template_open(&t, dir, &e));
    assert_null(t);
    assert_string_equal(e.id, id);
    if (!strstr(e.msg, part)) fail_msg("'%s' without '%s'", e.msg, part);
}

static void bad_sources(void **state) {
    (void)state;
    char *d = scratch_new();
    refused("/nonexistent/model", "E-FILE-OPEN", "/nonexistent/model");
    refused(d, "E-TEMPLATE-MISSING", d);
    free(scratch_puts(d, "tokenizer_config.json", "{\"chat_template\": 5}"));
    refused(d, "E-TEMPLATE-MISSING", "chat_template");
    free(scratch_puts(d, "tokenizer_config.json",
                      "{\"chat_template\": [{\"name\": \"other\", \"template\": \"\"}, 7]}"));
    refused(d, "E-TEMPLATE-MISSING", "chat_template");
    free(scratch_puts(d, "tokenizer_config.json", "{\"chat_template\": \"\\n\\n{% if %}\"}"));
    refused(d, "E-TEMPLATE-SYNTAX", "line 3");
    free(scratch_puts(d, "tokenizer_config.json", "{"));
    refused(d, "E-JSON-SYNTAX", "tokenizer_config.json");
    free(scratch_puts(d, "tokenizer_config.json", "[]"));
    free(scratch_puts(d, "chat_template.jinja", "a\n{{ 'x' | nope }}"));
    refused(d, "E-TEMPLATE-SYNTAX", "line 2: no filter named 'nope'");
    free(scratch_put(d, "chat_template.jinja", "a\xff", 2));
    refused(d, "E-TEMPLATE-SYNTAX", "UTF-8");
    scratch_free(d);
}

static void request_must_be_object(void **state) {
    (void)state;
    chat_template *t;
    err e = { 0 };
    buf b = { 0 };
    arena a = { 0 };
    const json *v;
    assert_true(template_open(&t, TINY, &e) && json_parse(&v, &a, STR("[1]"), "r", NULL, &e));
    assert_false(template_render(t, &b, v, &e));
    assert_string_equal(e.id, "E-TEMPLATE-REQUEST");
    template_close(t);
    arena_free(&a);
    buf_free(&b);
}

static void file_with_tokens(void **state) {
    (void)state;
    char *d = scratch_new(),
         *path = scratch_puts(d, "t.txt", "{{ eos_token }}{# image 'system' #}{{ reasoning_content }}");
    chat_template *t;
    err e = { 0 };
    buf b = { 0 };
    arena a = { 0 };
    const json *v;
    assert_true(template_open_file(&t, path, &e) && json_parse(&v, &a, STR("{}"), "r", NULL, &e));
    assert_true(template_render(t, &b, v, &e) && b.n == 0);
    assert_true(template_read_tokens(t, TINY, &e) && template_render(t, &b, v, &e));
    assert_string_equal(b.p, "<|im_end|>");
    const template_traits x = template_describe(t);
    assert_true(x.reasoning_content && !x.images && !x.system && !x.tools && !x.thinking_switch);
    template_close(t);
    assert_true(template_open(&t, TINY, &e));
    const template_traits y = template_describe(t);
    assert_true(y.tools && y.thinking_switch && y.system && y.images && y.reasoning_content);
    template_close(t);
    assert_false(template_open_file(&t, "/nonexistent/template", &e));
    assert_string_equal(e.id, "E-FILE-OPEN");
    arena_free(&a);
    buf_free(&b);
    free(path);
    scratch_free(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_chats),           cmocka_unit_test(sources),
        cmocka_unit_test(named_templates),        cmocka_unit_test(bad_sources),
        cmocka_unit_test(request_must_be_object), cmocka_unit_test(file_with_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
