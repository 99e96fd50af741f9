#include "ops/ops_slab.h"

#include <sys/mman.h>

enum { PAGE = 4096 };
static const size_t CHUNK = 64 << 20, HUGE_PAGE = 2 << 20;

/* At the start of its own mapping. */
struct slab_chunk {
    void *base;
    size_t bytes, used;
    int pieces;
};

/* In front of each piece: whose it is. */
typedef struct piece_head {
    slab_chunk *chunk;
} piece_head;

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

void *slab_map(size_t bytes) {
    if (bytes > SIZE_MAX - 2 * HUGE_PAGE) return NULL;
    bytes = pages(bytes);
    /* cppcheck-suppress invalidFunctionArg ; -1 is what MAP_ANONYMOUS asks for */
    char *p = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    const size_t before = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(p, before);
    if (before < HUGE_PAGE) munmap(p + before + bytes, HUGE_PAGE - before); /* the surplus at both ends */
    p += before;
#ifdef MADV_HUGEPAGE
    const size_t whole = bytes / HUGE_PAGE * HUGE_PAGE;
    if (whole) madvise(p, whole, MADV_HUGEPAGE); /* advice: nothing to do when refused */
#endif
    /* cppcheck-suppress deallocret ; only the surplus was given back */
    return p;
}

void slab_unmap(void *p, size_t bytes) { munmap(p, pages(bytes)); }

static slab_chunk *chunk_new(size_t bytes) {
    alloc_counted();
    bytes = pages(bytes);
    slab_chunk *c = slab_map(bytes);
    if (c) *c = (slab_chunk){ .base = c, .bytes = bytes, .used = sizeof *c };
    return c;
}

bool slab_take(slab *s, void **out, size_t bytes, err *e) {
    const size_t need = bytes < SIZE_MAX / 2 ? pages(bytes) + PAGE : 0; /* its head ends where a page begins */
    slab_chunk *c = s->last;
    if (need && (!c || need > c->bytes - pages(c->used))) {
        c = chunk_new(need + PAGE > CHUNK ? need + PAGE : CHUNK);
        if (c && c->bytes == CHUNK) s->last = c;
    }
    if (!need || !c)
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "cannot get %zu bytes for weights (free memory)", bytes);
    char *p = (char *)c->base + pages(c->used + sizeof(piece_head));
    ((piece_head *)(void *)p)[-1].chunk = c;
    c->used = (size_t)(p - (char *)c->base) + bytes;
    c->pieces++;
    *out = p;
    return true;
}

void slab_drop(slab *s, void *p) {
    if (!p) return;
    slab_chunk *c = ((piece_head *)p)[-1].chunk;
    if (--c->pieces > 0) return;
    if (s->last == c) s->last = NULL;
    slab_unmap(c->base, c->bytes);
}
