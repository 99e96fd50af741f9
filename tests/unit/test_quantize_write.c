/* The writes of quantize: bytes in their place, and a disk that fails while the run goes on. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "lib/scratch.h"
#include "quant/quantize_write.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static int waits, starts, fate; /* fate: errno of the next call that waits */

/* In place of the C library's. */
int sync_file_range(int fd, off64_t at, off64_t n, unsigned flags) {
    (void)fd, (void)at, (void)n;
    if (!(flags & SYNC_FILE_RANGE_WAIT_AFTER)) return starts++, 0;
    waits++;
    if (!fate) return 0;
    errno = fate;
    return -1;
}

static char *folder;

static int begin(void **state) {
    (void)state;
    folder = scratch_new();
    waits = starts = fate = 0;
    return 0;
}

static int end(void **state) {
    (void)state;
    scratch_free(folder);
    return 0;
}

static int open_file(void) {
    char *path = scratch_path(folder, "shard");
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    free(path);
    return fd;
}

/* Longer than one write, at an odd offset, with the neighbours untouched. */
static void test_place(void **state) {
    (void)state;
    enum { N = (3 << 20) + 7, AT = 777 };
    const int fd = open_file();
    err e = { 0 };
    uint8_t *x = xmalloc(N), *y = xmalloc(N + AT + 1);
    for (size_t i = 0; i < N; i++) x[i] = (uint8_t)(i * 2654435761u >> 24);
    assert_int_equal(ftruncate(fd, N + AT + 1), 0);
    assert_true(write_place(fd, AT, x, N, STR("f"), &e));
    assert_int_equal(pread(fd, y, N + AT + 1, 0), N + AT + 1);
    assert_memory_equal(y + AT, x, N);
    for (int i = 0; i < AT; i++) assert_int_equal(y[i], 0);
    assert_int_equal(y[N + AT], 0);
    free(x);
    free(y);
    close(fd);
}

/* 64 MB and 1024 pieces stay behind, whichever is less; small writes are left alone. */
static void test_window(void **state) {
    (void)state;
    static write_behind b;
    const int fd = open_file();
    bool lost = false;
    err e = { 0 };
    memset(&b, 0, sizeof b);
    for (uint64_t i = 0; i < 100; i++) assert_true(write_started(&b, fd, i << 20, 1 << 20, STR("f"), &lost, &e));
    assert_int_equal(waits, 36);
    assert_int_equal(b.bytes, 64 << 20);
    for (int i = 0; i < 5000; i++) assert_true(write_started(&b, fd, 0, 100, STR("f"), &lost, &e));
    assert_int_equal(starts, 100);
    memset(&b, 0, sizeof b);
    waits = 0;
    for (uint64_t i = 0; i < 1500; i++) assert_true(write_started(&b, fd, i << 15, 1 << 15, STR("f"), &lost, &e));
    assert_int_equal(waits, 1500 - BEHIND_MAX);
    assert_true(write_started(&b, fd, 0, 200 << 20, STR("f"), &lost, &e)); /* larger than the window: all others go */
    assert_int_equal(b.n, 1);
    assert_false(lost);
    close(fd);
}

static void test_failures(void **state) {
    (void)state;
    static write_behind b;
    static const int real[] = { EIO, ENOSPC, EDQUOT }, other[] = { EINVAL, ENOSYS, ESPIPE };
    const int fd = open_file();
    for (size_t i = 0; i < ARRAY_LEN(real); i++) {
        bool lost = false;
        err e = { 0 };
        memset(&b, 0, sizeof b);
        fate = real[i];
        assert_true(write_started(&b, fd, 0, 64 << 20, STR("shard"), &lost, &e));
        assert_false(write_started(&b, fd, 0, 1 << 20, STR("shard"), &lost, &e));
        assert_true(lost);
        assert_string_equal(e.id, "E-FILE-WRITE");
        assert_non_null(strstr(e.msg, "shard: cannot be flushed"));
    }
    for (size_t i = 0; i < ARRAY_LEN(other); i++) { /* a filesystem that has no such call */
        bool lost = false;
        err e = { 0 };
        memset(&b, 0, sizeof b);
        fate = other[i];
        assert_true(write_started(&b, fd, 0, 64 << 20, STR("shard"), &lost, &e));
        assert_true(write_started(&b, fd, 0, 1 << 20, STR("shard"), &lost, &e));
        assert_false(lost);
    }
    close(fd);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test_setup_teardown(test_place, begin, end),
                                        cmocka_unit_test_setup_teardown(test_window, begin, end),
                                        cmocka_unit_test_setup_teardown(test_failures, begin, end) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
