/* Preloaded by test_quantize_faults.py: the n-th call of a chosen kind meets a fault.
 *
 * FAULT_CALLS  names, such as "pwrite,fsync"       FAULT_N      which call, from 1 (0: none)
 * FAULT_MODE   errno as a number (the call fails), "short" (half is done), "kill" (SIGKILL before the call),
 *              "cut" (FAULT_FILE loses its second half), "touch" (FAULT_FILE gets a new time)
 * FAULT_STICKY the error stays from that call on   FAULT_COUNT  file that receives the number of calls at exit */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_int calls;
static const char *names, *mode, *file;
static int n, sticky;

__attribute__((constructor)) static void start(void) {
    names = getenv("FAULT_CALLS");
    mode = getenv("FAULT_MODE");
    file = getenv("FAULT_FILE");
    n = getenv("FAULT_N") ? atoi(getenv("FAULT_N")) : 0;
    sticky = getenv("FAULT_STICKY") != NULL;
}

__attribute__((destructor)) static void finish(void) {
    FILE *f = getenv("FAULT_COUNT") ? fopen(getenv("FAULT_COUNT"), "w") : NULL;
    if (!f) return;
    fprintf(f, "%d\n", atomic_load(&calls));
    fclose(f);
}

static int chosen(const char *name) {
    const size_t len = strlen(name);
    for (const char *s = names; s && *s; s += strcspn(s, ","), s += *s == ',')
        if (strncmp(s, name, len) == 0 && (s[len] == 0 || s[len] == ',')) return 1;
    return 0;
}

enum { PASS, FAIL, SHORT };

static int fate(const char *name) {
    struct stat s;
    if (!mode || !chosen(name)) return PASS;
    const int i = atomic_fetch_add(&calls, 1) + 1;
    if (n == 0 || (i != n && !(sticky && i > n))) return PASS;
    if (strcmp(mode, "kill") == 0) kill(getpid(), SIGKILL);
    if (strcmp(mode, "short") == 0) return SHORT;
    if (strcmp(mode, "cut") == 0) return stat(file, &s) != 0 || truncate(file, s.st_size / 2) != 0 ? abort(), 0 : PASS;
    if (strcmp(mode, "touch") == 0) return utimensat(AT_FDCWD, file, NULL, 0) != 0 ? abort(), 0 : PASS;
    errno = atoi(mode);
    return FAIL;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *p, size_t size) {
    const int f = fate("write");
    return f == FAIL ? -1 : REAL(ssize_t, write, int, const void *, size_t)(fd, p, f == SHORT ? (size + 1) / 2 : size);
}
ssize_t pwrite(int fd, const void *p, size_t size, off_t at) {
    const int f = fate("pwrite");
    return f == FAIL
               ? -1
               : REAL(ssize_t, pwrite, int, const void *, size_t, off_t)(fd, p, f == SHORT ? (size + 1) / 2 : size, at);
}
ssize_t pread(int fd, void *p, size_t size, off_t at) {
    const int f = fate("pread");
    return f == FAIL ? -1
                     : REAL(ssize_t, pread, int, void *, size_t, off_t)(fd, p, f == SHORT ? (size + 1) / 2 : size, at);
}
ssize_t read(int fd, void *p, size_t size) {
    const int f = fate("read");
    return f == FAIL ? -1 : REAL(ssize_t, read, int, void *, size_t)(fd, p, f == SHORT ? (size + 1) / 2 : size);
}
int fsync(int fd) { return fate("fsync") == FAIL ? -1 : REAL(int, fsync, int)(fd); }
int ftruncate(int fd, off_t size) {
    return fate("ftruncate") == FAIL ? -1 : REAL(int, ftruncate, int, off_t)(fd, size);
}
int mkdir(const char *path, mode_t m) {
    return fate("mkdir") == FAIL ? -1 : REAL(int, mkdir, const char *, mode_t)(path, m);
}
int rename(const char *a, const char *b) {
    return fate("rename") == FAIL ? -1 : REAL(int, rename, const char *, const char *)(a, b);
}
int open(const char *path, int flags, ...) {
    mode_t m = 0;
    if (flags & O_CREAT) {
        va_list ap;
        va_start(ap, flags);
        m = va_arg(ap, mode_t);
        va_end(ap);
    }
    if (flags & O_CREAT && fate("create") == FAIL) return -1;
    return REAL(int, open, const char *, int, ...)(path, flags, m);
}
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*run)(void *), void *x) {
    if (fate("pthread_create") == FAIL) return errno;
    return REAL(int, pthread_create, pthread_t *, const pthread_attr_t *, void *(*)(void *), void *)(t, a, run, x);
}
