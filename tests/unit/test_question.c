/* Numbers found in answers: GSM8K's forms and what models write around them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "eval/client.h"
#include "eval/question.h"

#include <cmocka.h>

static void forms(void **state) {
    (void)state;
    static const struct {
        const char *text, *strict, *flexible;
    } cases[] = {
        { "26 + 18 = 44.\n#### 44", "44", "44" },
        { "#### 1,234", "1234", "1234" },
        { "#### $12.50 each", "12.5", "12.5" },
        { "####-7", "-7", "-7" },
        { "#### 007.00", "7", "7" },
        { "#### 0.50", "0.5", "0.5" },
        { "#### -0", "0", "0" },
        { "#### 1\n#### 2 eggs", "2", "2" },
        { "#### many", NULL, NULL },
        { "The answer is 18.", NULL, "18" },
        { "So 3-1 is 2 and that is all", NULL, "2" },
        { "We get $-40$", NULL, "-40" },
        { "\\boxed{1{,}000} then 10,000,000 in all", NULL, "10000000" },
        { "1,23 is no thousands group", NULL, "23" },
        { "12,345,67", NULL, "67" },
        { "3.14.15", NULL, "15" },
        { "", NULL, NULL },
        { "####", NULL, NULL },
        { "no digits - at all, $ -", NULL, NULL },
        { "#### 5 and then 9", "5", "9" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char got[QUESTION_NUMBER];
        const bool strict = question_number(got, str_of(cases[i].text), true);
        if (strict != (cases[i].strict != NULL) || (strict && strcmp(got, cases[i].strict) != 0))
            fail_msg("strict: %s: %s", cases[i].text, strict ? got : "none");
        const bool flexible = question_number(got, str_of(cases[i].text), false);
        if (flexible != (cases[i].flexible != NULL) || (flexible && strcmp(got, cases[i].flexible) != 0))
            fail_msg("flexible: %s: %s", cases[i].text, flexible ? got : "none");
    }
}

static void lengths(void **state) {
    (void)state;
    char text[400] = "#### ", got[QUESTION_NUMBER];
    memset(text + 5, '9', 300);
    assert_true(question_number(got, str_of(text), true));
    assert_true(strlen(got) < QUESTION_NUMBER);
    assert_true(question_number(got, str_of(text), false));
    text[5] = '-';
    assert_true(question_number(got, str_of(text), true));
    assert_true(strlen(got) < QUESTION_NUMBER && got[0] == '-');
}

static void expected(void **state) {
    (void)state;
    char got[QUESTION_NUMBER];
    assert_true(question_expected(got, STR("works 3 out\n#### 12")));
    assert_string_equal(got, "12");
    assert_true(question_expected(got, STR("1,000")));
    assert_string_equal(got, "1000");
    assert_false(question_expected(got, STR("3 is not it: #### none")));
    assert_false(question_expected(got, STR("")));
}

static void collect(void *ctx, str data) {
    buf_str(ctx, data);
    buf_byte(ctx, '|');
}

/* An event stream cut at every byte reads the same. */
static void streams(void **state) {
    (void)state;
    static const char text[] = ": keep-alive\n\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n";
    for (size_t step = 1; step <= sizeof text; step++) {
        buf got = { 0 };
        sse_reader r = { .on_data = collect, .ctx = &got };
        for (size_t at = 0; at < sizeof text - 1; at += step) {
            const size_t left = sizeof text - 1 - at;
            sse_reader_push(&r, (str){ text + at, left < step ? left : step });
        }
        assert_string_equal(got.p, "{\"a\":1}|two|[DONE]|");
        sse_reader_free(&r);
        buf_free(&got);
    }
}

static void addresses(void **state) {
    (void)state;
    static const char *const bad[] = { "",        "127.0.0.1:80", "https://x/v1", "ftp://x",
                                       "http://", "http://[::1",  "http:///v1" };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        client *c;
        err e = { 0 };
        if (client_open(&c, bad[i], NULL, 1, &e)) fail_msg("%s: taken", bad[i]);
        assert_string_equal(e.id, "E-EVAL-URL");
    }
    client *c;
    err e = { 0 };
    assert_true(client_open(&c, "http://127.0.0.1:9/v1/", "key", 1, &e));
    assert_false(client_step(c));
    client_close(c);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(forms), cmocka_unit_test(lengths), cmocka_unit_test(expected),
                                        cmocka_unit_test(streams), cmocka_unit_test(addresses) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
