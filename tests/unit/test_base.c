#include "base/arena.h" /* project headers before cmocka.h, whose macro fail() would hide ours */
#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "base/strtab.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Raised here because cmocka.h turns fail() into its own. */
#undef fail

/* ---- err ---- */

static void test_first_failure_wins(void **state) {
    (void)state;
    err e = { 0 };
    assert_int_equal(e.kind, ERR_NONE);
    assert_false(fail(&e, ERR_INPUT, "E-FIRST", "file %s: %d", "x", 7));
    assert_false(fail(&e, ERR_MACHINE, "E-SECOND", "later"));
    assert_int_equal(e.kind, ERR_INPUT);
    assert_string_equal(e.id, "E-FIRST");
    assert_string_equal(e.msg, "file x: 7");
    assert_false(fail_prefix(&e, "while %s", "loading"));
    assert_string_equal(e.msg, "while loading: file x: 7");
    assert_string_equal(e.id, "E-FIRST");
}

static void test_messages_stay_one_line(void **state) {
    (void)state;
    err e = { 0 };
    fail(&e, ERR_INPUT, "E-X", "%s", "a\nb\x1b[31mc\td\x7f\xc3\xa9");
    assert_string_equal(e.msg, "a?b?[31mc?d?\xc3\xa9");
    fail_prefix(&e, "p\r");
    assert_string_equal(e.msg, "p?: a?b?[31mc?d?\xc3\xa9");
}

static void test_messages_are_bounded(void **state) {
    (void)state;
    char *big = malloc(5000);
    memset(big, 'x', 4999);
    big[4999] = 0;
    err e = { 0 };
    fail(&e, ERR_INPUT, "E-X", "%s", big);
    assert_int_equal(strlen(e.msg), sizeof e.msg - 1);
    fail_prefix(&e, "%s", big);
    assert_true(strlen(e.msg) < sizeof e.msg);
    free(big);
}

static void test_exit_codes(void **state) {
    (void)state;
    static const int codes[] = { 0, 1, 2, 3, 4, 130 };
    for (int k = ERR_NONE; k <= ERR_INTERRUPTED; k++) assert_int_equal(err_exit_code((err_kind)k), codes[k]);
}

/* ---- arena ---- */

static void test_arena(void **state) {
    (void)state;
    arena a = { 0 };
    uint8_t *last = NULL;
    for (size_t n = 0; n < 3000; n++) {
        uint8_t *p = arena_take(&a, n, 1);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 16, 0);
        memset(p, (int)n, n); /* ASan and valgrind watch the ends */
        if (last && n > 1) assert_int_equal(last[n - 2], (uint8_t)(n - 1));
        last = p;
    }
    assert_non_null(arena_take(&a, 5 << 20, 1));
    const uint8_t *z = arena_zero(&a, 100, 10);
    for (int i = 0; i < 1000; i++) assert_int_equal(z[i], 0);
    assert_string_equal(arena_copy(&a, "abc", 3), "abc");
    assert_string_equal(arena_copy(&a, NULL, 0), "");
    const str s = arena_str(&a, (str){ "a\0b", 3 });
    assert_memory_equal(s.p, "a\0b", 4);
    arena_free(&a);
    assert_int_equal(a.total, 0);
    assert_non_null(arena_take(&a, 1, 1)); /* usable again */
    arena_free(&a);
    arena_free(&a);
}

static void test_arena_limits(void **state) {
    (void)state;
    arena a = { .limit = 10000 };
    assert_null(arena_take(&a, SIZE_MAX / 2, 3));
    assert_null(arena_take(&a, SIZE_MAX, 1));
    assert_null(arena_take(&a, SIZE_MAX - 20, 1));
    assert_null(arena_copy(&a, "", SIZE_MAX));
    assert_null(arena_take(&a, 10001, 1));
    size_t got = 0;
    while (arena_take(&a, 100, 1)) got += 100;
    assert_true(got >= 8000 && a.total <= 10000);
    assert_non_null(a.head);
    arena_free(&a);
    assert_non_null(arena_take(&a, 9000, 1)); /* the limit stays, the room is back */
    arena_free(&a);
}

/* ---- buf ---- */

static void test_buf(void **state) {
    (void)state;
    buf b = { 0 };
    assert_string_equal(buf_view(&b).p, "");
    buf_add(&b, NULL, 0);
    assert_string_equal(b.p, "");
    for (int i = 0; i < 10000; i++) buf_byte(&b, (char)('a' + i % 26));
    assert_int_equal(b.n, 10000);
    for (int i = 0; i < 10000; i++) assert_int_equal(b.p[i], 'a' + i % 26);
    assert_int_equal(b.p[b.n], 0);
    buf_clear(&b);
    buf_printf(&b, "%s-%d", "x", 12345);
    buf_puts(&b, "!");
    buf_str(&b, STR("a\0b"));
    assert_int_equal(b.n, 11);
    assert_memory_equal(b.p, "x-12345!a\0b", 12);
    buf_reserve(&b, 100000);
    assert_memory_equal(b.p, "x-12345!a\0b", 12);
    assert_true(b.cap > 100000);
    buf_free(&b);
    buf_free(&b);
    assert_null(b.p);
    buf_clear(&b);
}

/* ---- str ---- */

static void test_str(void **state) {
    (void)state;
    const str none = { NULL, 0 };
    assert_true(str_eq(none, STR("")) && str_is(none, "") && str_eq(str_of(NULL), none));
    assert_true(str_eq(STR("a\0b"), STR("a\0b")) && !str_eq(STR("a\0b"), STR("a\0c")) && !str_eq(STR("a"), STR("ab")));
    assert_true(str_starts(STR("abc"), STR("ab")) && str_starts(none, none) && !str_starts(STR("a"), STR("ab")));
    assert_true(str_ends(STR("abc"), STR("bc")) && str_ends(none, none) && !str_ends(STR("c"), STR("bc")));
    assert_true(str_is(str_skip(STR("abc"), 1), "bc"));
    assert_int_equal(str_find(STR("hello"), STR("lo")), 3);
    assert_int_equal(str_find(STR("hello"), STR("")), 0);
    assert_int_equal(str_find(STR("hello"), STR("x")), -1);
    assert_int_equal(str_find(none, STR("x")), -1);
    assert_int_equal(str_find(STR("a\0b"), STR("\0b")), 1);
    assert_true(str_cmp(STR("a"), STR("b")) < 0 && str_cmp(STR("ab"), STR("a")) > 0 && str_cmp(none, STR("")) == 0);
    assert_true(str_cmp(STR("\xff"), STR("a")) > 0); /* bytes, not chars */
    assert_true(str_hash(STR("ab")) != str_hash(STR("ba")));
}

/* ---- strtab ---- */

typedef struct names {
    char (*text)[24];
} names;

static str name_at(const void *ctx, uint32_t i) { return str_of(((const names *)ctx)->text[i]); }

static void test_strtab(void **state) {
    (void)state;
    enum { N = 20000 };
    strtab t = { 0 };
    names n = { malloc(N * sizeof *n.text) };
    assert_int_equal(strtab_get(&t, STR("x"), name_at, &n), STRTAB_NONE);
    for (int round = 0; round < 3; round++) { /* emptied and reused: a smaller table, then the full one again */
        const uint32_t count = round == 1 ? 100 : N;
        assert_true(strtab_init(&t, count));
        for (uint32_t i = 0; i < count; i++) {
            snprintf(n.text[i], sizeof n.text[i], "%*s-%u", (int)(i % 15), "", i);
            assert_int_equal(strtab_get(&t, name_at(&n, i), name_at, &n), STRTAB_NONE);
            assert_int_equal(strtab_put(&t, name_at(&n, i), i, name_at, &n), i);
        }
        for (uint32_t i = 0; i < count; i++) {
            assert_int_equal(strtab_get(&t, name_at(&n, i), name_at, &n), i);
            assert_int_equal(strtab_put(&t, name_at(&n, i), 0, name_at, &n), i); /* the first stays */
        }
        assert_int_equal(strtab_get(&t, STR("none"), name_at, &n), STRTAB_NONE);
        assert_int_equal(strtab_get(&t, STR(""), name_at, &n), STRTAB_NONE);
    }
    strtab_free(&t);
    strtab_free(&t);
    free(n.text);
}

/* ---- log ---- */

typedef struct lines {
    int n;
    char id[40], text[1100];
} lines;

static void keep_line(void *ctx, const char *id, const char *line) {
    lines *l = ctx;
    l->n++;
    snprintf(l->id, sizeof l->id, "%s", id);
    snprintf(l->text, sizeof l->text, "%s", line);
}

static void test_log(void **state) {
    (void)state;
    lines l = { 0 };
    log_set_sink(keep_line, &l);
    log_say("W-CKPT-TOTAL", "a %s\n%d\x1b", "b", 3);
    assert_int_equal(l.n, 1);
    assert_string_equal(l.id, "W-CKPT-TOTAL");
    assert_string_equal(l.text, "a b?3?");
    char *big = malloc(5000);
    memset(big, 'x', 4999);
    big[4999] = 0;
    log_say("W-CKPT-TOTAL", "%s", big);
    assert_int_equal(strlen(l.text), 999);
    free(big);
    log_set_sink(NULL, NULL);
    const int old = log_level();
    log_set_level(0);
    assert_int_equal(log_level(), 0);
    log_set_level(old);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_failure_wins),
        cmocka_unit_test(test_messages_stay_one_line),
        cmocka_unit_test(test_messages_are_bounded),
        cmocka_unit_test(test_exit_codes),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_arena_limits),
        cmocka_unit_test(test_buf),
        cmocka_unit_test(test_str),
        cmocka_unit_test(test_strtab),
        cmocka_unit_test(test_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
