/* What of dist can be seen without a launcher, and how tasks are shared (tests/e2e/test_mpi.py starts real ranks). */
#include <stdlib.h>

#include "num/dtype.h"
#include "quant/dist.h"
#include "quant/tasks.h"
#include "support.h"

static void unset_all(void) {
    static const char *const names[] = { "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK" };
    for (size_t i = 0; i < ARRAY_LEN(names); i++) unsetenv(names[i]);
}

static void test_alone(void **state) {
    (void)state;
    err e = { 0 };
    dist d;
    amax_table t = { 0 };
    int64_t n = 5;
    unset_all();
    for (int k = 0; k < 2; k++) { /* without a launcher, and as the only process of one */
        if (k) setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
        OK(dist_open(&d, &e));
        assert_false(d.on);
        assert_int_equal(d.rank, 0);
        assert_int_equal(d.ranks, 1);
        OK(dist_same(&d, 77, "plan", &e));
        OK(dist_share(&d, "/nowhere", true, &e)); /* nothing is written */
        amax_raise(&t, STR("x"), 2);
        dist_merge_amax(&d, &t);
        dist_sum(&d, &n, 1);
        assert_int_equal(n, 5);
        assert_int_equal(t.n, 1);
        assert_int_equal(dist_progress(&d, 9), 9);
        dist_unshare(&d);
        assert_false(dist_agree(&d, false, &e));
        assert_int_equal(e.kind, ERR_NONE); /* the caller's own error is the reason */
        dist_wait_turn(&d, ERR_INPUT);      /* at once */
        dist_close(&d);
    }
    amax_free(&t);
    unset_all();
}

/* A program without MPI must not run as one of several: each would write everything. */
static void test_built_without(void **state) {
    (void)state;
    static const char *const settings[][2] = {
        { "OMPI_COMM_WORLD_SIZE", "2" }, { "PMI_SIZE", "4" }, { "PMIX_RANK", "0" }, { "PMI_RANK", "1" }
    };
    if (str_find(str_of(dist_build()), STR("Open MPI")) >= 0) skip();
    for (size_t i = 0; i < ARRAY_LEN(settings); i++) {
        err e = { 0 };
        dist d;
        unset_all();
        setenv(settings[i][0], settings[i][1], 1);
        assert_false(dist_open(&d, &e));
        assert_string_equal(e.id, "E-DIST-BUILD");
    }
    unset_all();
}

/* Every task has one owner, in order, and no share is further from equal than a task. */
static void test_shares(void **state) {
    (void)state;
    qtask v[200];
    uint32_t x = 1;
    for (int n = 0; n <= 200; n += 25)
        for (int ranks = 1; ranks <= 9; ranks++) {
            task_list t = { .v = v, .n = n };
            uint64_t biggest = 0;
            for (int i = 0; i < n; i++) {
                x = x * 1664525u + 1013904223u;
                v[i] = (qtask){ .source_bytes = n == 25 ? 0 : x >> 12 };
                t.source_bytes += v[i].source_bytes;
                if (v[i].source_bytes > biggest) biggest = v[i].source_bytes;
            }
            int end = 0;
            for (int r = 0; r < ranks; r++) {
                int first, last;
                uint64_t bytes = 0;
                tasks_share(&t, r, ranks, &first, &last);
                assert_int_equal(first, end);
                assert_true(last >= first);
                for (int i = first; i < last; i++) bytes += v[i].source_bytes;
                assert_true(bytes <= t.source_bytes / (unsigned)ranks + biggest + 1);
                end = last;
            }
            assert_int_equal(end, n);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_alone), cmocka_unit_test(test_built_without),
                                        cmocka_unit_test(test_shares) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
