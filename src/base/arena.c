#include "base/arena.h"

#include <stdlib.h>

struct arena_chunk {
    arena_chunk *next;
    size_t used, cap;
    _Alignas(16) uint8_t data[];
};

enum { CHUNK_MIN = 4 << 10, CHUNK_MAX = 1 << 20 };

/* Chunks double with the arena's size, so small parses stay small and large ones cost few mallocs. */
static arena_chunk *chunk_new(arena *a, size_t need) {
    size_t cap = a->total < CHUNK_MIN ? CHUNK_MIN : a->total;
    if (cap > CHUNK_MAX) cap = CHUNK_MAX;
    if (cap < need) cap = need;
    if (a->limit && (cap > a->limit || a->total > a->limit - cap)) {
        if (need > a->limit || a->total > a->limit - need) return NULL;
        cap = need;
    }
    if (cap > SIZE_MAX - sizeof(arena_chunk)) return NULL;
    arena_chunk *c = malloc(sizeof *c + cap);
    if (!c) return NULL;
    c->next = a->head;
    c->used = 0;
    c->cap = cap;
    a->head = c;
    a->total += cap;
    return c;
}

void *arena_take(arena *a, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - 16) return NULL;
    bytes = (bytes + 15) & ~(size_t)15;
    arena_chunk *c = a->head;
    if (!c || bytes > c->cap - c->used) c = chunk_new(a, bytes);
    if (!c) return NULL;
    void *p = c->data + c->used;
    c->used += bytes;
    return p;
}

void *arena_zero(arena *a, size_t count, size_t size) {
    void *p = arena_take(a, count, size);
    if (p) memset(p, 0, count * size);
    return p;
}

char *arena_copy(arena *a, const void *p, size_t n) {
    if (n == SIZE_MAX) return NULL;
    char *s = arena_take(a, n + 1, 1);
    if (!s) return NULL;
    if (n) memcpy(s, p, n);
    s[n] = 0;
    return s;
}

str arena_str(arena *a, str s) { return (str){ arena_copy(a, s.p, s.n), s.n }; }

void arena_free(arena *a) {
    for (arena_chunk *c = a->head, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    a->head = NULL;
    a->total = 0;
}
