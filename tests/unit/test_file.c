#include "base/file.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "lib/scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char *dir;

static int setup(void **state) {
    (void)state;
    dir = scratch_new();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    scratch_free(dir);
    return 0;
}

static int entries(void) {
    int n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *x; (x = readdir(d));) n += strcmp(x->d_name, ".") != 0 && strcmp(x->d_name, "..") != 0;
    closedir(d);
    return n;
}

static void expect(bool ok, const err *e, err_kind kind, const char *id, const char *object) {
    assert_false(ok);
    assert_string_equal(e->id, id);
    assert_int_equal(e->kind, kind);
    if (!strstr(e->msg, object)) fail_msg("'%s' does not name %s", e->msg, object);
}

static void refuse_read(const char *path, const char *id) {
    mapping m;
    buf b = { 0 };
    err e = { 0 };
    buf_puts(&b, "kept");
    expect(mapping_open(&m, path, &e), &e, ERR_INPUT, id, path);
    assert_null(m.data);
    e = (err){ 0 };
    expect(file_read(&b, path, 100, &e), &e, ERR_INPUT, id, path);
    assert_string_equal(b.p, "kept");
    buf_free(&b);
    mapping_close(&m);
}

static void test_read(void **state) {
    (void)state;
    char *path = scratch_put(dir, "a", "one\0two", 7), *link = scratch_path(dir, "link"),
         *empty = scratch_puts(dir, "e", "");
    assert_int_equal(symlink("a", link), 0);
    mapping m, n;
    err e = { 0 };
    assert_true(mapping_open(&m, path, &e));
    assert_int_equal(m.size, 7);
    assert_memory_equal(m.data, "one\0two", 7);
    assert_true(mapping_open(&n, link, &e));
    assert_true(m.dev == n.dev && m.inode == n.inode); /* one file under two names */
    mapping_close(&n);
    assert_true(mapping_open(&n, empty, &e));
    assert_null(n.data);
    assert_int_equal(n.size, 0);
    assert_false(m.inode == n.inode);
    mapping_close(&n);
    mapping_close(&n);
    mapping_close(&m);
    buf b = { 0 };
    buf_puts(&b, "x");
    assert_true(file_read(&b, path, 7, &e));
    assert_int_equal(b.n, 8);
    assert_memory_equal(b.p, "xone\0two", 9);
    assert_true(file_read(&b, empty, 0, &e));
    assert_int_equal(b.n, 8);
    expect(file_read(&b, path, 6, &e), &e, ERR_INPUT, "E-FILE-SIZE", path);
    assert_int_equal(b.n, 8);
    buf_free(&b);
    free(path);
    free(link);
    free(empty);
}

/* st_size says 0 there: the bytes must come all the same, and the limit must hold. */
static void test_read_proc(void **state) {
    (void)state;
    buf b = { 0 };
    err e = { 0 };
    assert_true(file_read(&b, "/proc/self/status", 1 << 20, &e));
    assert_true(b.n > 100);
    buf_clear(&b);
    expect(file_read(&b, "/proc/self/status", 50, &e), &e, ERR_INPUT, "E-FILE-SIZE", "/proc/self/status");
    buf_free(&b);
}

static void test_read_large(void **state) {
    (void)state;
    const size_t n = 3000001;
    char *p = malloc(n);
    for (size_t i = 0; i < n; i++) p[i] = (char)(i * 7 + i / 1000);
    char *path = scratch_put(dir, "large", p, n);
    buf b = { 0 };
    err e = { 0 };
    assert_true(file_read(&b, path, n, &e));
    assert_int_equal(b.n, n);
    assert_memory_equal(b.p, p, n);
    buf_free(&b);
    free(p);
    free(path);
}

static void test_read_refusals(void **state) {
    (void)state;
    char *none = scratch_path(dir, "none"), *fifo = scratch_path(dir, "fifo"), *loop = scratch_path(dir, "loop");
    char *sock = scratch_path(dir, "sock"), *under = scratch_path(dir, "e/x");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(symlink("loop", loop), 0);
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (strlen(sock) < sizeof name.sun_path) {
        strcpy(name.sun_path, sock);
        assert_int_equal(bind(fd, (struct sockaddr *)&name, sizeof name), 0);
        refuse_read(sock, "E-FILE-KIND");
    }
    close(fd);
    refuse_read(none, "E-FILE-OPEN");
    refuse_read("", "E-FILE-OPEN");
    refuse_read(loop, "E-FILE-OPEN");
    refuse_read(under, "E-FILE-OPEN");
    refuse_read(fifo, "E-FILE-KIND"); /* must not wait for a writer */
    refuse_read(dir, "E-FILE-KIND");
    refuse_read("/dev/null", "E-FILE-KIND");
    free(none);
    free(fifo);
    free(loop);
    free(sock);
    free(under);
}

static void test_read_unreadable(void **state) {
    (void)state;
    if (geteuid() == 0) skip();
    char *path = scratch_puts(dir, "secret", "x");
    chmod(path, 0);
    refuse_read(path, "E-FILE-OPEN");
    free(path);
}

static void check_content(const char *path, const char *text) {
    buf b = { 0 };
    err e = { 0 };
    assert_true(file_read(&b, path, 1 << 20, &e));
    assert_true(str_is(buf_view(&b), text));
    buf_free(&b);
}

static void test_write(void **state) {
    (void)state;
    char *path = scratch_path(dir, "out");
    err e = { 0 };
    assert_true(file_write_atomic(path, "first", 5, &e));
    check_content(path, "first");
    assert_true(file_write_atomic(path, "", 0, &e));
    check_content(path, "");
    assert_true(file_write_atomic(path, "2", 1, &e));
    check_content(path, "2");
    assert_int_equal(entries(), 1);
    struct stat st;
    const mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0666 & ~mask);
    free(path);
}

static void test_write_through_link(void **state) {
    (void)state;
    char *path = scratch_puts(dir, "target", "old"), *link = scratch_path(dir, "link");
    assert_int_equal(symlink("target", link), 0);
    err e = { 0 };
    assert_true(file_write_atomic(link, "new", 3, &e));
    check_content(path, "new");
    struct stat st;
    assert_int_equal(lstat(link, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    free(path);
    free(link);
}

static void test_write_here(void **state) {
    (void)state;
    char *old = realpath(".", NULL);
    assert_int_equal(chdir(dir), 0);
    err e = { 0 };
    assert_true(file_write_atomic("plain", "x", 1, &e));
    assert_true(file_write_atomic("./plain", "y", 1, &e));
    check_content("plain", "y");
    assert_int_equal(chdir(old), 0);
    free(old);
}

static void test_stream(void **state) {
    (void)state;
    char *path = scratch_puts(dir, "out", "old");
    file_out f = { 0 };
    err e = { 0 };
    file_out_abort(&f); /* zeroed: nothing to do */
    assert_true(file_out_open(&f, path, &e));
    assert_true(file_out_write(&f, "abc", 3, &e));
    assert_true(file_out_write(&f, "", 0, &e));
    check_content(path, "old"); /* until the commit */
    assert_true(file_out_write(&f, "def", 3, &e));
    assert_true(file_out_commit(&f, &e));
    check_content(path, "abcdef");
    file_out_abort(&f);
    file_out_abort(&f);
    check_content(path, "abcdef");
    assert_true(file_out_open(&f, path, &e));
    assert_true(file_out_write(&f, "half", 4, &e));
    assert_int_equal(entries(), 2);
    file_out_abort(&f);
    check_content(path, "abcdef");
    assert_int_equal(entries(), 1);
    free(path);
}

static void test_two_writers(void **state) {
    (void)state;
    char *path = scratch_path(dir, "out");
    file_out a = { 0 }, b = { 0 };
    err e = { 0 };
    assert_true(file_out_open(&a, path, &e) && file_out_open(&b, path, &e));
    assert_string_not_equal(a.temp, b.temp);
    assert_true(file_out_write(&a, "a", 1, &e) && file_out_write(&b, "b", 1, &e));
    assert_true(file_out_commit(&b, &e) && file_out_commit(&a, &e));
    check_content(path, "a");
    file_out_abort(&a);
    file_out_abort(&b);
    assert_int_equal(entries(), 1);
    free(path);
}

static void refuse_write(const char *path) {
    err e = { 0 };
    expect(file_write_atomic(path, "x", 1, &e), &e, ERR_INPUT, "E-FILE-WRITE", *path ? path : "''");
}

static void test_write_refusals(void **state) {
    (void)state;
    char *missing = scratch_path(dir, "no/such/dir"), *plain = scratch_puts(dir, "plain", ""),
         *slash = scratch_path(dir, "new/");
    char *below = scratch_path(dir, "plain/x"), *fifo = scratch_path(dir, "fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    refuse_write(missing);
    refuse_write(below);
    refuse_write(slash);
    refuse_write(dir);
    refuse_write(fifo);
    refuse_write("/dev/null"); /* as root, rename would replace the device */
    refuse_write("");
    assert_int_equal(entries(), 2);
    free(missing);
    free(plain);
    free(slash);
    free(below);
    free(fifo);
}

/* A full disk, played by RLIMIT_FSIZE: the old file stays, the temporary goes, the kind says "machine". */
static void test_write_full(void **state) {
    (void)state;
    char *path = scratch_puts(dir, "out", "old");
    struct rlimit old, low;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = (struct rlimit){ 1000, old.rlim_max };
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    char big[4000] = { 0 };
    err e = { 0 };
    const bool ok = file_write_atomic(path, big, sizeof big, &e);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    expect(ok, &e, ERR_MACHINE, "E-FILE-WRITE", path);
    check_content(path, "old");
    assert_int_equal(entries(), 1);
    free(path);
}

static void test_paths(void **state) {
    (void)state;
    static const char *const cases[][3] = {
        { "a", "b", "a/b" }, { "a/", "b", "a/b" }, { "/", "b", "/b" }, { "", "b", "b" }
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *s = path_join(cases[i][0], cases[i][1]);
        assert_string_equal(s, cases[i][2]);
        free(s);
    }
    char *plain = scratch_puts(dir, "f", "");
    assert_true(file_exists(dir) && file_is_dir(dir) && file_exists(plain) && !file_is_dir(plain));
    assert_false(file_exists("") || file_is_dir("") || file_exists("/no/such/file"));
    free(plain);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_read),
        CASE(test_read_proc),
        CASE(test_read_large),
        CASE(test_read_refusals),
        CASE(test_read_unreadable),
        CASE(test_write),
        CASE(test_write_through_link),
        CASE(test_write_here),
        CASE(test_stream),
        CASE(test_two_writers),
        CASE(test_write_refusals),
        CASE(test_write_full),
        CASE(test_paths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
