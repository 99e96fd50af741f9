/* buf.h - a growable byte string. A zeroed buf is empty and valid; buf_free may be called twice.
 * Always NUL-terminated behind its length once something was added. Aborts when memory ends;
 * callers that grow by hostile amounts check a limit first. */
#ifndef NIBBLE_BUF_H
#define NIBBLE_BUF_H

#include <stdarg.h>

#include "base/base.h"
#include "base/str.h"

typedef struct buf {
    char *p;
    size_t n, cap;
} buf;

void buf_reserve(buf *b, size_t extra);
void buf_add(buf *b, const void *p, size_t n);
void buf_byte(buf *b, char c);
void buf_puts(buf *b, const char *s);
void buf_printf(buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
void buf_vprintf(buf *b, const char *fmt, va_list ap);
static inline void buf_str(buf *b, str s) { buf_add(b, s.p, s.n); }
static inline void buf_clear(buf *b) {
    b->n = 0;
    if (b->p) b->p[0] = 0;
}
/* Shorten to n <= b->n bytes. */
static inline void buf_truncate(buf *b, size_t n) {
    b->n = n;
    if (b->p) b->p[n] = 0;
}
static inline str buf_view(const buf *b) { return (str){ b->p ? b->p : "", b->n }; }
void buf_free(buf *b);

#endif
