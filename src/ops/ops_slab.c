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

void slab_advise_huge(void *p, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t begin = ((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE,
                    end = ((uintptr_t)p + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)p;
    (void)bytes;
#endif
}

/* A mapping that begins on a huge page: the surplus at both ends goes back. */
static slab_chunk *chunk_new(size_t bytes) {
    alloc_counted();
    bytes = pages(bytes);
    if (bytes > SIZE_MAX - HUGE_PAGE) return NULL;
    /* cppcheck-suppress invalidFunctionArg ; -1 is what MAP_ANONYMOUS asks for */
    char *p = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    const size_t before = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(p, before);
    if (before < HUGE_PAGE) munmap(p + before + bytes, HUGE_PAGE - before);
    p += before;
    slab_advise_huge(p, bytes);
    slab_chunk *c = (slab_chunk *)(void *)p;
    *c = (slab_chunk){ .base = p, .bytes = bytes, .used = sizeof *c };
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
    munmap(c->base, c->bytes);
}
