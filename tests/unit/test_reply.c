/* Ids to text: stop strings are held back and never shown, whatever the chunking. */
#include "text/reply.h"

#include "support.h"

static tokenizer *t;

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    OK(tokenizer_open(&t, TINY, &e));
    return 0;
}

static int teardown(void **state) {
    (void)state;
    tokenizer_close(t);
    return 0;
}

static void check(const char *text, const char *const *stops, int n_stops, const char *want, bool stopped) {
    err e = { 0 };
    id_list v = { 0 };
    reply r;
    OK(tokenizer_encode(t, &v, str_of(text), NULL, &e));
    reply_init(&r, t, false, NULL, stops, n_stops);
    size_t pushed = 0;
    while (pushed < v.n && reply_push(&r, v.v[pushed])) pushed++;
    assert_int_equal(r.stopped, stopped);
    reply_end(&r);
    assert_string_equal(r.text.p ? r.text.p : "", want);
    reply_free(&r);
    ids_free(&v);
}

static void test_stop_strings(void **state) {
    (void)state;
    const char *const end[] = { "END", "stop here" };
    check("hello END world", end, 2, "hello ", true);
    check("hello EN world", end, 2, "hello EN world", false);
    check("a stop here b END", end, 2, "a ", true);
    check("ends with EN", end, 2, "ends with EN", false);
    check("\xc3\xa9\xf0\x9f\x99\x82 END", end, 2, "\xc3\xa9\xf0\x9f\x99\x82 ", true);
    const char *const overlap[] = { "abab" };
    check("xabaabab y", overlap, 1, "xaba", true);
}

static void test_special_tokens_do_not_show(void **state) {
    (void)state;
    check("one<|im_end|>two", NULL, 0, "onetwo", false);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_stop_strings),
                                        cmocka_unit_test(test_special_tokens_do_not_show) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
