#include "base/base.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Noreturn void check_failed(const char *file, int line, const char *cond, const char *fmt, ...) {
    va_list ap;
    fprintf(stderr, "nibble: bug at %s:%d: %s: ", file, line, cond);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    abort();
}

static _Atomic int64_t allocations;

int64_t alloc_count(void) { return atomic_load_explicit(&allocations, memory_order_relaxed); }
void alloc_counted(void) { atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed); }

void *xmalloc(size_t bytes) {
    alloc_counted();
    void *p = malloc(bytes ? bytes : 1);
    CHECK(p, "out of memory for %zu bytes", bytes);
    return p;
}

void *xcalloc(size_t count, size_t size) {
    alloc_counted();
    void *p = calloc(count ? count : 1, size ? size : 1);
    CHECK(p, "out of memory for %zu x %zu bytes", count, size);
    return p;
}

void *xrealloc(void *old, size_t bytes) {
    alloc_counted();
    void *p = realloc(old, bytes ? bytes : 1);
    CHECK(p, "out of memory for %zu bytes", bytes);
    return p;
}

char *xstrdup(const char *s) {
    const size_t n = strlen(s) + 1;
    return memcpy(xmalloc(n), s, n);
}
