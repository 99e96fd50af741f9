/* Where calibration tokens come from: JSON lines, plain text, ids, the model itself; and the file of maxima. */
#include <math.h>

#include "base/file.h"
#include "quant/calib_data.h"
#include "text/tokenizer.h"

#include "lib/scratch.h"
#include "support.h"

static char *folder;
static tokenizer *tok;
static const calib_source all = { .model_dir = TINY, .seed = 1 };

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    log_set_level(0);
    folder = scratch_new();
    OK(tokenizer_open(&tok, TINY, &e));
    return 0;
}

static int teardown(void **state) {
    (void)state;
    tokenizer_close(tok);
    scratch_free(folder);
    return 0;
}

static bool load(calib_data *d, const calib_source *s, const char *name, const char *text, err *e) {
    char *path = scratch_puts(folder, name, text);
    const bool ok = calib_data_file(d, s, path, "label", e);
    free(path);
    return ok;
}

static void is_text(const id_list *got, const char *text) {
    err e = { 0 };
    id_list want = { 0 };
    OK(tokenizer_encode(tok, &want, str_of(text), NULL, &e));
    assert_int_equal(got->n, want.n);
    assert_memory_equal(got->v, want.v, want.n * sizeof *want.v);
    ids_free(&want);
}

static void test_lines(void **state) {
    (void)state;
    err e = { 0 };
    calib_data d;
    OK(load(
        &d, &all, "a.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Yes?\"}], "
        "\"kind\": \"chat\"}\r\n"
        "\n"
        "{\"text\": \"plain\"}\n"
        "\"bare\"\n"
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n"
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Yes?\"}], "
        "\"add_generation_prompt\": true}",
        &e));
    assert_int_equal(d.n, 5);
    is_text(&d.v[0], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYes?<|im_end|>\n");
    is_text(&d.v[1], "plain");
    is_text(&d.v[2], "bare");
    is_text(&d.v[3], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n");
    is_text(&d.v[4], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYes?<|im_end|>\n"
                     "<|im_start|>assistant\n<think>\n");
    int64_t tokens = 0;
    for (int i = 0; i < d.n; i++) tokens += (int64_t)d.v[i].n;
    assert_int_equal(d.tokens, tokens);
    assert_non_null(strstr(d.what, "label: 5 sequences"));
    calib_data_free(&d);
}

/* What the template refuses is left out, what is no sample is an error with its line. */
static void test_bad_lines(void **state) {
    (void)state;
    err e = { 0 };
    calib_data d;
    OK(load(&d, &all, "b.jsonl",
            "{\"messages\": [{\"role\": \"robot\", \"content\": \"Hi\"}]}\n{\"messages\": []}\n{\"text\": \"x\"}\n",
            &e));
    assert_int_equal(d.n, 1);
    calib_data_free(&d);
    static const struct {
        const char *name, *text, *id, *part;
    } cases[] = {
        { "c.jsonl", "{\"text\": \"x\"}\n{\"text\": \"y\"\n", "E-CALIB-LINE", "line 2" },
        { "c.jsonl", "{\"text\": 3}", "E-CALIB-LINE", "line 1" },
        { "c.jsonl", "[1]", "E-CALIB-LINE", "line 1" },
        { "c.jsonl", "{\"text\": \"x\"}\n{\"words\": \"y\"}\n", "E-CALIB-LINE", "line 2" },
        { "c.jsonl", "", "E-CALIB-EMPTY", "" },
        { "c.jsonl", "\n\r\n", "E-CALIB-EMPTY", "" },
        { "c.jsonl", "{\"text\": \"\"}\n", "E-CALIB-EMPTY", "" },
        { "c.jsonl", "{\"messages\": [{\"role\": \"robot\", \"content\": \"Hi\"}]}", "E-CALIB-EMPTY", "" },
        { "c.txt", "", "E-CALIB-EMPTY", "" },
        { "c.txt", "abc \xff def", "E-TEXT-UTF8", "" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        err bad = { 0 };
        assert_false(load(&d, &all, cases[i].name, cases[i].text, &bad));
        assert_string_equal(bad.id, cases[i].id);
        if (!strstr(bad.msg, cases[i].part)) fail_msg("%s: no \"%s\"", bad.msg, cases[i].part);
        assert_null(d.v);
    }
    err missing = { 0 };
    assert_false(calib_data_file(&d, &all, "no/such/file.jsonl", "x", &missing));
    assert_string_equal(missing.id, "E-FILE-OPEN");
}

static void test_limits(void **state) {
    (void)state;
    err e = { 0 };
    calib_data d;
    id_list whole = { 0 };
    static const char text[] = "one two three four five six seven eight nine ten eleven twelve";
    OK(tokenizer_encode(tok, &whole, str_of(text), NULL, &e));
    assert_true(whole.n > 10);
    const calib_source four = { .model_dir = TINY, .seq = 4 }, two = { .model_dir = TINY, .seq = 4, .samples = 2 };
    OK(load(&d, &four, "d.txt", text, &e)); /* a text is split: nothing is lost, only the last piece is shorter */
    assert_int_equal(d.n, (whole.n + 3) / 4);
    assert_int_equal(d.tokens, whole.n);
    for (int i = 0; i < d.n; i++) assert_memory_equal(d.v[i].v, whole.v + i * 4, d.v[i].n * sizeof *whole.v);
    calib_data_free(&d);
    OK(load(&d, &two, "d.txt", text, &e));
    assert_int_equal(d.n, 2);
    calib_data_free(&d);
    OK(load(&d, &two, "d.jsonl", "{\"text\": \"one two three four five six seven\"}\n\"x\"\n\"y\"\nnot even JSON", &e));
    assert_int_equal(d.n, 2); /* a line is cut, and what is behind the last sample is not read */
    assert_int_equal(d.v[0].n, 4);
    calib_data_free(&d);
    ids_free(&whole);
}

static void test_ids(void **state) {
    (void)state;
    err e = { 0 };
    calib_data d;
    static const struct {
        const char *text;
        int n, tokens;
    } good[] = { { "[5, 6, 7, 8, 9]", 1, 4 },
                 { "[[1, 2], [], [3]]", 2, 3 },
                 { "{\"sequences\": [[1], [2], [3]]}", 2, 2 } };
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        char *path = scratch_puts(folder, "ids.json", good[i].text);
        OK(calib_data_ids(&d, path, 2, 4, &e));
        assert_int_equal(d.n, good[i].n);
        assert_int_equal(d.tokens, good[i].tokens);
        calib_data_free(&d);
        free(path);
    }
    static const char *const bad[][2] = {
        { "[]", "E-CMD-IDS" },       { "{}", "E-CMD-IDS" },           { "[1.5]", "E-CMD-IDS" },
        { "[-1]", "E-CMD-IDS" },     { "[[1], 2]", "E-CMD-IDS" },     { "[\"a\"]", "E-CMD-IDS" },
        { "[[]]", "E-CALIB-EMPTY" }, { "[[], []]", "E-CALIB-EMPTY" }, { "[4294967296]", "E-CMD-IDS" },
        { "[1", "E-JSON-SYNTAX" },
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        err refused = { 0 };
        char *path = scratch_puts(folder, "ids.json", bad[i][0]);
        assert_false(calib_data_ids(&d, path, 0, 0, &refused));
        assert_string_equal(refused.id, bad[i][1]);
        assert_null(d.v);
        free(path);
    }
}

/* ---- the model's own text ---- */

static calib_data own(uint64_t seed, int threads, int seq, const char *device) {
    err e = { 0 };
    calib_data d;
    char *path = scratch_puts(folder, "prompts.jsonl",
                              "{\"messages\": [{\"role\": \"user\", \"content\": \"Tell me a story.\"}]}\n"
                              "{\"messages\": [{\"role\": \"user\", \"content\": \"What is 3 + 4?\"}]}\n"
                              "{\"messages\": [{\"role\": \"user\", \"content\": \"Tell me a story.\"}]}\n");
    const calib_source s = { .model_dir = TINY, .seq = seq, .seed = seed };
    const ops_options backend = { .device = device, .threads = threads, .isa = ISA_COUNT };
    OK(calib_data_self(&d, &s, path, &backend, &e));
    free(path);
    return d;
}

static bool same(const calib_data *a, const calib_data *b) {
    bool equal = a->n == b->n;
    for (int i = 0; equal && i < a->n; i++)
        equal = a->v[i].n == b->v[i].n && memcmp(a->v[i].v, b->v[i].v, a->v[i].n * sizeof *a->v[i].v) == 0;
    return equal;
}

static void test_self(void **state) {
    (void)state;
    calib_data a = own(7, 1, 64, "cpu"), again = own(7, 2, 64, "cpu"), ref = own(7, 1, 64, "ref"),
               other = own(8, 1, 64, "cpu"), shorter = own(7, 1, 40, "cpu");
    assert_int_equal(a.n, 3);
    assert_true(same(&a, &again) && same(&a, &ref));
    assert_false(same(&a, &other));
    assert_non_null(strstr(a.what, "seed 7"));
    static const char opening[] = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n<think>\n";
    err e = { 0 };
    id_list prompt = { 0 };
    OK(tokenizer_encode(tok, &prompt, str_of(opening), NULL, &e));
    assert_true(a.v[0].n > prompt.n && a.v[0].n <= 64); /* the prompt, and something behind it */
    assert_memory_equal(a.v[0].v, prompt.v, prompt.n * sizeof *prompt.v);
    assert_memory_equal(a.v[2].v, prompt.v, prompt.n * sizeof *prompt.v);
    for (int i = 0; i < 3; i++) { /* a shorter limit only cuts */
        const size_t n = a.v[i].n < 40 ? a.v[i].n : 40;
        assert_int_equal(shorter.v[i].n, n);
        assert_memory_equal(shorter.v[i].v, a.v[i].v, n * sizeof *a.v[i].v);
    }
    /* the same prompt twice is answered twice, not copied */
    assert_true(a.v[0].n != a.v[2].n || memcmp(a.v[0].v, a.v[2].v, a.v[0].n * sizeof *a.v[0].v) != 0);
    ids_free(&prompt);
    calib_data_free(&a), calib_data_free(&again), calib_data_free(&ref);
    calib_data_free(&other), calib_data_free(&shorter);
}

static void test_self_errors(void **state) {
    (void)state;
    calib_data d;
    const ops_options backend = { .threads = 1, .isa = ISA_COUNT };
    const calib_source too_long = { .model_dir = TINY, .seq = 5000 };
    char *path = scratch_puts(folder, "p.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n");
    err e = { 0 }, missing = { 0 };
    assert_false(calib_data_self(&d, &too_long, path, &backend, &e));
    assert_string_equal(e.id, "E-CALIB-LONG");
    assert_null(d.v);
    assert_false(calib_data_self(&d, &all, "no/such/file", &backend, &missing));
    assert_string_equal(missing.id, "E-FILE-OPEN");
    free(path);
}

/* ---- the table of maxima ---- */

static void test_table(void **state) {
    (void)state;
    err e = { 0 };
    amax_table a = { 0 }, b = { 0 }, back;
    char name[32];
    assert_true(amax_get(&a, STR("x")) == -1);
    for (int i = 0; i < 5000; i++) { /* beyond several growths of the hash */
        snprintf(name, sizeof name, "q.%d", i * 7 % 5000);
        amax_raise(&a, str_of(name), (float)i);
        amax_raise(&a, str_of(name), (float)(i / 2));
    }
    assert_int_equal(a.n, 5000);
    for (int i = 0; i < 5000; i++) {
        snprintf(name, sizeof name, "q.%d", i * 7 % 5000);
        assert_true(amax_get(&a, str_of(name)) == (float)i);
    }
    amax_raise(&b, STR("q.1"), 0);
    amax_raise(&b, STR("q.2"), 1e9f);
    amax_raise(&b, STR("new"), 0);
    const float one = amax_get(&a, STR("q.1"));
    amax_merge(&a, &b);
    assert_true(amax_get(&a, STR("q.1")) == one && amax_get(&a, STR("q.2")) == 1e9f && amax_get(&a, STR("new")) == 0);
    amax_set(&a, STR("q.2"), 3);
    assert_true(amax_get(&a, STR("q.2")) == 3);
    char *path = scratch_path(folder, "t.safetensors");
    OK(amax_save(&a, path, &e));
    OK(amax_load(&back, path, &e));
    assert_int_equal(back.n, a.n);
    for (int i = 0; i < a.n; i++) assert_true(amax_get(&back, a.v[i].name) == a.v[i].value);
    free(path);
    amax_free(&a), amax_free(&b), amax_free(&back);
}

/* A file of maxima with one tensor. */
static char *one_tensor(const char *type, const char *shape, const void *p, size_t n) {
    buf b = { 0 };
    char header[128];
    int len = snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[0,%zu]}}", type,
                       shape, n);
    while (len % 8) header[len++] = ' ';
    const uint64_t size = (uint64_t)len;
    buf_add(&b, &size, sizeof size);
    buf_add(&b, header, (size_t)len);
    buf_add(&b, p, n);
    char *path = scratch_put(folder, "one.safetensors", b.p, b.n);
    buf_free(&b);
    return path;
}

static void test_table_files(void **state) {
    (void)state;
    const float values[] = { 2.5f, -1, NAN, INFINITY };
    const uint16_t half = 0x4020; /* 2.5 as BF16 */
    const struct {
        const char *type, *shape;
        const void *p;
        size_t n;
        bool good;
    } cases[] = { { "F32", "[]", &values[0], 4, true },   { "F32", "[1]", &values[0], 4, true },
                  { "BF16", "[]", &half, 2, true },       { "F32", "[]", &values[1], 4, false },
                  { "F32", "[]", &values[2], 4, false },  { "F32", "[]", &values[3], 4, false },
                  { "F32", "[2]", &values[0], 8, false }, { "F16", "[]", &half, 2, false } };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        err e = { 0 };
        amax_table t;
        char *path = one_tensor(cases[i].type, cases[i].shape, cases[i].p, cases[i].n);
        assert_int_equal(amax_load(&t, path, &e), cases[i].good);
        if (cases[i].good)
            assert_true(amax_get(&t, STR("x")) == 2.5f);
        else
            assert_string_equal(e.id, "E-AMAX-ENTRY");
        amax_free(&t);
        free(path);
    }
    err e = { 0 };
    amax_table t;
    assert_false(amax_load(&t, "no/such/file", &e));
    assert_string_equal(e.id, "E-FILE-OPEN");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines), cmocka_unit_test(test_bad_lines),   cmocka_unit_test(test_limits),
        cmocka_unit_test(test_ids),   cmocka_unit_test(test_self),        cmocka_unit_test(test_self_errors),
        cmocka_unit_test(test_table), cmocka_unit_test(test_table_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
