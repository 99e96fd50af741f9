#include "engine/id_set.h"

#include <stdlib.h>
#include <string.h>

bool id_set_open(id_set *s, int cap) {
    *s = (id_set){ .v = malloc((size_t)(cap > 0 ? cap : 1) * sizeof *s->v), .cap = cap, .complete = true };
    return s->v != NULL;
}

void id_set_close(id_set *s) {
    free(s->v);
    *s = (id_set){ 0 };
}

/* The first place whose id is not below `id`. */
static int place(const id_set *s, int32_t id) {
    int lo = 0, hi = s->n;
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (s->v[mid] < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool id_set_has(const id_set *s, int32_t id) {
    const int at = place(s, id);
    return at < s->n && s->v[at] == id;
}

void id_set_add(id_set *s, int32_t id) {
    const int at = place(s, id);
    if (at < s->n && s->v[at] == id) return;
    if (s->n == s->cap) {
        s->complete = false;
        return;
    }
    memmove(s->v + at + 1, s->v + at, (size_t)(s->n - at) * sizeof *s->v);
    s->v[at] = id;
    s->n++;
}
