/* arena.h - one arena per lifetime (model, session, request, parse); freed as a whole.
 *
 * Grows by chunks up to `limit` bytes; memory is 16-byte aligned and not cleared. Not thread-safe:
 * one owner. A zeroed arena is valid and unlimited. */
#ifndef NIBBLE_ARENA_H
#define NIBBLE_ARENA_H

#include "base/base.h"
#include "base/str.h"

typedef struct arena_chunk arena_chunk;

typedef struct arena {
    arena_chunk *head; /* current chunk; older ones behind it */
    size_t total;      /* bytes handed to chunks */
    size_t limit;      /* 0 = none */
} arena;

/* count * size bytes, or NULL on overflow, exhaustion or limit. */
void *arena_take(arena *a, size_t count, size_t size);
/* The same, cleared. */
void *arena_zero(arena *a, size_t count, size_t size);
/* Copy of n bytes with a NUL behind them, or NULL. */
char *arena_copy(arena *a, const void *p, size_t n);
str arena_str(arena *a, str s); /* .p is NULL on failure */
void arena_free(arena *a);      /* everything; the arena is empty and usable again */

#endif
