#include "base/buf.h"

#include <stdio.h>
#include <stdlib.h>

void buf_reserve(buf *b, size_t extra) {
    CHECK(extra < SIZE_MAX / 2 - b->n, "buffer too large");
    const size_t need = b->n + extra + 1;
    if (need <= b->cap) return;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need) cap *= 2;
    b->p = xrealloc(b->p, cap);
    b->cap = cap;
}

void buf_add(buf *b, const void *p, size_t n) {
    buf_reserve(b, n);
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}

void buf_byte(buf *b, char c) { buf_add(b, &c, 1); }
void buf_puts(buf *b, const char *s) { buf_add(b, s, strlen(s)); }

void buf_vprintf(buf *b, const char *fmt, va_list ap) {
    va_list again;
    va_copy(again, ap);
    const int n = vsnprintf(NULL, 0, fmt, ap);
    CHECK(n >= 0, "bad format %s", fmt);
    buf_reserve(b, (size_t)n);
    vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
    va_end(again);
    b->n += (size_t)n;
}

void buf_printf(buf *b, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    buf_vprintf(b, fmt, ap);
    va_end(ap);
}

void buf_free(buf *b) {
    free(b->p);
    *b = (buf){ 0 };
}
