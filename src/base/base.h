/* base.h - the few macros every module may use.
 *
 * CHECK is for bugs (a broken invariant inside nibble): always on, prints and aborts.
 * What input, the machine or a client can cause is a failure and goes through err.h. */
#ifndef NIBBLE_BASE_H
#define NIBBLE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#define NODISCARD __attribute__((warn_unused_result))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Abort with file, line and message when `cond` is false. */
#define CHECK(cond, ...)                                                             \
    do {                                                                             \
        if (UNLIKELY(!(cond))) check_failed(__FILE__, __LINE__, #cond, __VA_ARGS__); \
    } while (0)

_Noreturn void check_failed(const char *file, int line, const char *cond, const char *fmt, ...) PRINTF_LIKE(4, 5);

/* malloc family that aborts on exhaustion: for small host-side structures whose size does not come
 * from outside. Sizes that come from a file or a request use plain malloc and return an err. */
void *xmalloc(size_t bytes);
void *xcalloc(size_t count, size_t size);
void *xrealloc(void *p, size_t bytes);
char *xstrdup(const char *s);

/* How many blocks the functions above and the work memory of the ops took so far, in all threads: what a test of "nothing
 * allocates in here" reads before and after. Whoever takes memory another way on such a path counts itself. */
int64_t alloc_count(void);
void alloc_counted(void);

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
