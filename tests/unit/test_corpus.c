/* The built-in calibration corpus and prompts: every line is a sample that the embedded model's template renders, nothing is
 * there twice, every kind is there, and the sizes stay within bounds. */
#include "base/file.h"
#include "quant/calib_data.h"
#include "text/template.h"

#include "support.h"

#define CORPUS "assets/calibration.jsonl"
#define PROMPTS "assets/calibration-prompts.jsonl"

enum { MAX_LINES = 400, MAX_LINE_BYTES = 16384 };

static const struct {
    const char *kind;
    int at_least;
} kinds[] = { { "language", 40 }, { "code", 25 },   { "math", 25 }, { "tools", 10 }, { "thinking", 12 }, { "chat", 10 },
              { "prose", 10 },    { "letter", 1 },  { "drama", 1 }, { "csv", 1 },    { "json", 3 },      { "yaml", 1 },
              { "toml", 1 },      { "xml", 1 },     { "html", 1 },  { "log", 3 },    { "markdown", 1 },  { "sql", 1 },
              { "diff", 1 },      { "hexdump", 1 }, { "fasta", 1 }, { "table", 1 },  { "trace", 1 } };

typedef struct lines {
    arena mem;
    buf file;
    int n;
    str line[MAX_LINES];
    const json *v[MAX_LINES];
} lines;

static lines corpus, prompts;

static void read_lines(lines *l, const char *path) {
    err e = { 0 };
    OK(file_read(&l->file, path, 1 << 20, &e));
    str rest = buf_view(&l->file);
    while (rest.n > 0) {
        const char *end = memchr(rest.p, '\n', rest.n);
        assert_non_null(end); /* the last line is closed too */
        const str one = { rest.p, (size_t)(end - rest.p) };
        assert_true(l->n < MAX_LINES && one.n > 0 && one.n <= MAX_LINE_BYTES);
        OK(json_parse(&l->v[l->n], &l->mem, one, path, NULL, &e));
        l->line[l->n++] = one;
        rest = str_skip(rest, one.n + 1);
    }
}

static int setup(void **state) {
    (void)state;
    log_set_level(0);
    read_lines(&corpus, CORPUS);
    read_lines(&prompts, PROMPTS);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    buf_free(&corpus.file), buf_free(&prompts.file);
    arena_free(&corpus.mem), arena_free(&prompts.mem);
    return 0;
}

static void test_bounds(void **state) {
    (void)state;
    assert_in_range(corpus.n, 100, 250);
    assert_in_range(corpus.file.n, 120 << 10, 400 << 10);
    assert_in_range(prompts.n, 50, 80);
    assert_in_range(prompts.file.n, 4 << 10, 40 << 10);
}

/* Kinds are known and present, and one of each comes first, so that a small `--samples` sees many. */
static void test_kinds(void **state) {
    (void)state;
    int count[ARRAY_LEN(kinds)] = { 0 }, early = 0;
    for (int i = 0; i < corpus.n; i++) {
        const json *kind = json_get(corpus.v[i], "kind");
        assert_true(json_is(kind, JSON_STRING));
        size_t k = 0;
        while (k < ARRAY_LEN(kinds) && !str_eq(json_str(kind), str_of(kinds[k].kind))) k++;
        if (k == ARRAY_LEN(kinds)) fail_msg("line %d: unknown kind " STR_FMT, i + 1, STR_ARG(json_str(kind)));
        if (i < (int)ARRAY_LEN(kinds)) early += count[k] == 0;
        count[k]++;
    }
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++)
        if (count[k] < kinds[k].at_least) fail_msg("%s: only %d samples", kinds[k].kind, count[k]);
    assert_int_equal(early, ARRAY_LEN(kinds));
}

static void renders(const lines *l, bool texts) {
    err e = { 0 };
    chat_template *t;
    OK(template_open(&t, TINY, &e));
    for (int i = 0; i < l->n; i++) {
        const json *text = json_get(l->v[i], "text"), *messages = json_get(l->v[i], "messages");
        if (texts && json_is(text, JSON_STRING)) {
            assert_null(messages);
            assert_true(text->n >= 20);
            continue;
        }
        buf out = { 0 };
        if (!template_render(t, &out, l->v[i], &e)) fail_msg("line %d: %s", i + 1, e.msg);
        for (uint32_t m = 0; m < messages->n; m++) { /* nothing empty but a turn that only calls tools */
            const json *content = json_get(&messages->u.items[m], "content");
            assert_true(json_is(content, JSON_STRING));
            if (content->n == 0) assert_non_null(json_get(&messages->u.items[m], "tool_calls"));
        }
        buf_free(&out);
    }
    template_close(t);
}

static void test_renders(void **state) {
    (void)state;
    renders(&corpus, true);
    renders(&prompts, false);
}

static void no_duplicates(const lines *l) {
    for (int i = 0; i < l->n; i++)
        for (int k = 0; k < i; k++)
            if (str_eq(l->line[i], l->line[k])) fail_msg("lines %d and %d are the same", k + 1, i + 1);
}

static void test_duplicates(void **state) {
    (void)state;
    no_duplicates(&corpus);
    no_duplicates(&prompts);
}

/* The loader takes every line of both files. */
static void test_loads(void **state) {
    (void)state;
    err e = { 0 };
    calib_data d;
    const calib_source s = { .model_dir = TINY };
    OK(calib_data_file(&d, &s, CORPUS, "corpus", &e));
    assert_int_equal(d.n, corpus.n);
    printf("%s\n", d.what);
    calib_data_free(&d);
    OK(calib_data_file(&d, &s, PROMPTS, "prompts", &e));
    assert_int_equal(d.n, prompts.n);
    printf("%s\n", d.what);
    calib_data_free(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_bounds), cmocka_unit_test(test_kinds),
                                        cmocka_unit_test(test_renders), cmocka_unit_test(test_duplicates),
                                        cmocka_unit_test(test_loads) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
