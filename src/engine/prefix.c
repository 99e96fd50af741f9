#include "engine/prefix.h"

#include <stdlib.h>
#include <string.h>

/* A node of the tree: `n` tokens behind its parent. Leaves are entries; other nodes may be. */
struct prefix_entry {
    int32_t *edge;                       /* [n] */
    int n, length;                       /* length: from the root */
    prefix_entry *parent, *child, *next; /* next: of the same parent */
    int spare;                           /* index of the spare slot; -1: no entry */
    uint64_t used;                       /* by the clock of uses */
};

struct prefix {
    seq_state *st;
    int spare, pages;
    prefix_entry root;
    prefix_entry **by_spare; /* [spare] NULL: free */
    float *hidden;           /* device [spare, H] */
    uint64_t clock;
    prefix_counts counts;
};

bool prefix_open(prefix **out, seq_state *st, int spare, int pages, err *e) {
    prefix *p = xcalloc(1, sizeof *p);
    *p = (prefix){ .st = st, .spare = spare, .pages = pages, .root = { .spare = -1 } };
    p->by_spare = xcalloc((size_t)spare, sizeof(prefix_entry *));
    void *hidden = NULL;
    const bool ok = st->n->o->mem_new(st->n->o, &hidden, (size_t)spare * (size_t)st->n->c->hidden * sizeof(float), e);
    p->hidden = hidden;
    if (!ok) prefix_close(p), p = NULL;
    *out = p;
    return ok;
}

int prefix_slot(const prefix *p, const prefix_entry *x) { return p->st->slots + x->spare; }

static float *hidden_of(const prefix *p, const prefix_entry *x) {
    return p->hidden + (int64_t)x->spare * p->st->n->c->hidden;
}

/* ---- the tree ---- */

static int common(const int32_t *a, const int32_t *b, int n) {
    int i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

static prefix_entry *child_with(const prefix_entry *x, int32_t token) {
    prefix_entry *c = x->child;
    while (c && c->edge[0] != token) c = c->next;
    return c;
}

/* The deepest node that tokens[0..n) passes through, and how far it goes along an edge behind it. */
static prefix_entry *walk(prefix *p, int *along, const int32_t *tokens, int n) {
    prefix_entry *x = &p->root;
    *along = 0;
    while (x->length < n) {
        prefix_entry *c = child_with(x, tokens[x->length]);
        if (!c) return x;
        const int left = n - x->length, same = common(c->edge, tokens + x->length, left < c->n ? left : c->n);
        if (same < c->n) return *along = same, x;
        x = c;
    }
    return x;
}

static void unlink_from(prefix_entry *parent, const prefix_entry *x) {
    prefix_entry **at = &parent->child;
    while (*at != x) at = &(*at)->next;
    *at = x->next;
}

static prefix_entry *add_child(prefix_entry *parent, const int32_t *tokens, int n) {
    prefix_entry *x = xcalloc(1, sizeof *x);
    x->edge = xmalloc((size_t)n * sizeof *x->edge);
    memcpy(x->edge, tokens, (size_t)n * sizeof *x->edge);
    x->n = n;
    x->length = parent->length + n;
    x->parent = parent;
    x->spare = -1;
    x->next = parent->child;
    parent->child = x;
    return x;
}

/* A node `at` tokens along the edge to x, which becomes its child. */
static prefix_entry *split(prefix_entry *x, int at) {
    prefix_entry *parent = x->parent;
    unlink_from(parent, x);
    prefix_entry *mid = add_child(parent, x->edge, at);
    memmove(x->edge, x->edge + at, (size_t)(x->n - at) * sizeof *x->edge);
    x->n -= at;
    x->parent = mid;
    x->next = NULL;
    mid->child = x;
    return mid;
}

static prefix_entry *node_at(prefix *p, const int32_t *tokens, int n) {
    int along;
    prefix_entry *x = walk(p, &along, tokens, n);
    if (along > 0) x = split(child_with(x, tokens[x->length]), along);
    return x->length < n ? add_child(x, tokens + x->length, n - x->length) : x;
}

static void remove_node(prefix_entry *x) {
    unlink_from(x->parent, x);
    free(x->edge);
    free(x);
}

/* x is its only child's beginning and no entry: one edge is enough. */
static void join(prefix_entry *x) {
    prefix_entry *c = x->child;
    int32_t *edge = xmalloc((size_t)(x->n + c->n) * sizeof *edge);
    memcpy(edge, x->edge, (size_t)x->n * sizeof *edge);
    memcpy(edge + x->n, c->edge, (size_t)c->n * sizeof *edge);
    free(c->edge);
    c->edge = edge;
    c->n += x->n;
    c->parent = x->parent;
    c->next = x->parent->child;
    x->parent->child = c;
    x->child = NULL;
    remove_node(x);
}

/* Nodes from x upwards that are of no use any more. */
static void tidy(prefix_entry *x) {
    while (x->parent && x->spare < 0 && !x->child) {
        prefix_entry *parent = x->parent;
        remove_node(x);
        x = parent;
    }
    if (x->parent && x->spare < 0 && !x->child->next) join(x);
}

/* ---- entries ---- */

static void strip(prefix *p, prefix_entry *x) {
    kv_pages_drop(&p->st->pages, prefix_slot(p, x));
    p->by_spare[x->spare] = NULL;
    x->spare = -1;
    p->counts.entries--;
}

static void drop(prefix *p, prefix_entry *x) {
    strip(p, x);
    tidy(x);
}

static prefix_entry *oldest(const prefix *p, const prefix_entry *keep) {
    prefix_entry *x = NULL;
    for (int i = 0; i < p->spare; i++) {
        prefix_entry *y = p->by_spare[i];
        if (y && y != keep && (!x || y->used < x->used)) x = y;
    }
    return x;
}

bool prefix_evict(prefix *p, const prefix_entry *keep) {
    prefix_entry *x = oldest(p, keep);
    if (!x) return false;
    drop(p, x);
    p->counts.evicted++;
    return true;
}

prefix_entry *prefix_find(prefix *p, int *shared, const int32_t *tokens, int n) {
    int along;
    prefix_entry *x = walk(p, &along, tokens, n);
    if (shared) *shared = x->length + along;
    while (x && x->spare < 0) x = x->parent;
    return x;
}

int prefix_length(const prefix_entry *x) { return x->length; }

int prefix_restore_pages(const prefix *p, const prefix_entry *x) {
    return state_copy_pages(p->st, x->length, x->length - 1);
}

bool prefix_restore(prefix *p, prefix_entry *x, int dst, float *hidden) {
    ops *o = p->st->n->o;
    x->used = ++p->clock;
    if (!state_copy(p->st, dst, prefix_slot(p, x), x->length, x->length - 1)) return false;
    o->copy(o, hidden, hidden_of(p, x), (size_t)p->st->n->c->hidden * sizeof *hidden);
    return true;
}

/* A free spare slot; an entry goes for it when there is none. */
static int take_spare(prefix *p) {
    for (int i = 0; i < p->spare; i++)
        if (!p->by_spare[i]) return i;
    const prefix_entry *x = oldest(p, NULL);
    const int spare = x ? x->spare : -1;
    if (x) prefix_evict(p, NULL);
    return spare;
}

bool prefix_put(prefix *p, const int32_t *tokens, int n, int src, const float *hidden) {
    ops *o = p->st->n->o;
    prefix_entry *x = prefix_find(p, NULL, tokens, n);
    if (x && x->length == n) return x->used = ++p->clock, true;
    if (kv_pages_for(n) > p->pages) return false;
    const int spare = take_spare(p);
    if (spare < 0) return false;
    while (!state_copy(p->st, p->st->slots + spare, src, n, n - 1))
        if (!prefix_evict(p, NULL)) return false;
    x = node_at(p, tokens, n);
    x->spare = spare;
    x->used = ++p->clock;
    p->by_spare[spare] = x;
    p->counts.entries++;
    p->counts.made++;
    o->copy(o, hidden_of(p, x), hidden, (size_t)p->st->n->c->hidden * sizeof *hidden);
    while (p->st->pages.n_kept > p->pages)
        if (!prefix_evict(p, x)) break;
    return true;
}

/* Entries below x and x itself. A removed node takes its empty ancestors along, so only the entries are visited. */
static bool below(const prefix_entry *x, const prefix_entry *top) {
    while (x && x != top) x = x->parent;
    return x != NULL;
}

void prefix_forget(prefix *p, const int32_t *tokens, int n, int from) {
    int along;
    const prefix_entry *end = walk(p, &along, tokens, n);
    bool *bad = xcalloc((size_t)p->spare, sizeof *bad);
    const prefix_entry *top = NULL; /* the shallowest on the path that is `from` tokens or more */
    for (const prefix_entry *x = end; x && from > 0 && x->length >= from; x = x->parent) top = x;
    for (int i = 0; i < p->spare; i++) {
        const prefix_entry *x = p->by_spare[i];
        bad[i] = x && (below(end, x) || (top && below(x, top)));
    }
    for (int i = 0; i < p->spare; i++)
        if (bad[i]) drop(p, p->by_spare[i]), p->counts.forgotten++;
    free(bad);
}

prefix_counts prefix_counted(const prefix *p) {
    prefix_counts c = p->counts;
    c.pages = p->st->pages.n_kept;
    return c;
}

uint64_t prefix_version(const prefix *p) { return (uint64_t)p->counts.made; }

void prefix_close(prefix *p) {
    if (!p) return;
    for (int i = 0; i < p->spare; i++)
        if (p->by_spare[i]) drop(p, p->by_spare[i]);
    if (p->hidden) p->st->n->o->mem_free(p->st->n->o, p->hidden);
    free(p->by_spare);
    free(p);
}
