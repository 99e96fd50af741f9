/* layer_set: what is read, what is refused. */
#include "base/layer_set.h"

#include "support.h"

static void test_read(void **state) {
    (void)state;
    layer_set s;
    assert_true(layer_set_parse(&s, "3"));
    assert_true(layer_set_has(&s, 3) && !layer_set_has(&s, 2) && !layer_set_has(&s, 4));
    assert_int_equal(s.top, 4);
    assert_true(layer_set_parse(&s, "0-19,30,63-64"));
    for (int i = -1; i < 2000; i++)
        assert_int_equal(layer_set_has(&s, i), (i >= 0 && i <= 19) || i == 30 || i == 63 || i == 64);
    assert_int_equal(s.top, 65);
    assert_true(layer_set_parse(&s, "1023,5-5"));
    assert_true(layer_set_has(&s, 1023) && layer_set_has(&s, 5));
    assert_int_equal(s.top, 1024);
}

static void test_refused(void **state) {
    (void)state;
    static const char *const bad[] = { "",    "a",     "1,",   ",1",     "1-",
                                       "-1",  "3-2",   "1024", "1 ,2",   "1--2",
                                       "0x1", "1-2-3", "1,,2", "0-1024", "99999999999999999999" };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        layer_set s;
        if (layer_set_parse(&s, bad[i])) fail_msg("'%s' was read", bad[i]);
    }
}

static void test_empty(void **state) {
    (void)state;
    layer_set s = { 0 };
    assert_true(layer_set_empty(&s) && !layer_set_has(&s, 0));
    s.all = true;
    assert_true(!layer_set_empty(&s) && layer_set_has(&s, 0) && layer_set_has(&s, 5000));
    assert_true(layer_set_parse(&s, "0") && !layer_set_empty(&s));
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_read), cmocka_unit_test(test_refused),
                                        cmocka_unit_test(test_empty) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
