/* str.h - borrowed byte slices. A str never owns its bytes and need not end in NUL. */
#ifndef NIBBLE_STR_H
#define NIBBLE_STR_H

#include <string.h>

#include "base/base.h"

typedef struct str {
    const char *p;
    size_t n;
} str;

#define STR(literal) ((str){ (literal), sizeof(literal) - 1 })
#define STR_FMT "%.*s"
#define STR_ARG(s) ((int)((s).n > 4096 ? 4096 : (s).n)), ((s).p ? (s).p : "")

static inline str str_of(const char *cstr) { return (str){ cstr, cstr ? strlen(cstr) : 0 }; }
static inline bool str_eq(str a, str b) { return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0); }
static inline bool str_is(str a, const char *cstr) { return str_eq(a, str_of(cstr)); }
static inline bool str_starts(str a, str prefix) {
    return a.n >= prefix.n && (prefix.n == 0 || memcmp(a.p, prefix.p, prefix.n) == 0);
}
static inline bool str_ends(str a, str suffix) {
    return a.n >= suffix.n && (suffix.n == 0 || memcmp(a.p + a.n - suffix.n, suffix.p, suffix.n) == 0);
}
static inline str str_skip(str a, size_t n) { return (str){ a.p + n, a.n - n }; }
/* Byte order, a prefix sorts first; for qsort-like uses. */
static inline int str_cmp(str a, str b) {
    const size_t n = a.n < b.n ? a.n : b.n;
    const int c = n ? memcmp(a.p, b.p, n) : 0;
    return c ? c : (a.n > b.n) - (a.n < b.n);
}
/* Offset of `needle` in `hay`, or -1. An empty needle is found at 0. */
static inline ptrdiff_t str_find(str hay, str needle) {
    if (needle.n == 0) return 0;
    if (hay.n < needle.n) return -1;
    const char *at = memmem(hay.p, hay.n, needle.p, needle.n);
    return at ? at - hay.p : -1;
}
/* FNV-1a, for hash tables over trusted sizes; not for security. */
static inline uint64_t str_hash(str s) {
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < s.n; i++) h = (h ^ (unsigned char)s.p[i]) * 1099511628211u;
    return h;
}

#endif
