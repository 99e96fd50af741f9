#include "engine/prefix.h"

#include <stdlib.h>
#include <string.h>

/* A node of the tree: `n` tokens behind its parent. Leaves are entries; other nodes may be. */
struct prefix_entry {
    int32_t *edge;                       /* [n] */
    int n, length;                       /* length: from the root */
    prefix_entry *parent, *child, *next; /* next: of the same parent */
    int spare;                           /* index of the spare slot; -1: not in memory */
    int file;                            /* index in the list of files; -1: not on disk */
    size_t file_bytes;
    uint64_t used; /* by the clock of uses */
};

struct prefix {
    seq_state *st;
    int spare, pages;
    prefix_entry root;
    prefix_entry **by_spare; /* [spare] NULL: free */
    float *hidden;           /* device [spare, H] */
    uint64_t clock;
    prefix_counts counts;
    prefix_disk *disk;
    int64_t most_bytes;
    prefix_entry **files; /* [counts.files] */
    int files_cap;
};

bool prefix_open(prefix **out, seq_state *st, int spare, int pages, err *e) {
    prefix *p = xcalloc(1, sizeof *p);
    *p = (prefix){ .st = st, .spare = spare, .pages = pages, .root = { .spare = -1, .file = -1 } };
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
    x->spare = x->file = -1;
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

static bool is_entry(const prefix_entry *x) { return x->spare >= 0 || x->file >= 0; }

/* Nodes from x upwards that are of no use any more. */
static void tidy(prefix_entry *x) {
    while (x->parent && !is_entry(x) && !x->child) {
        prefix_entry *parent = x->parent;
        remove_node(x);
        x = parent;
    }
    if (x->parent && !is_entry(x) && !x->child->next) join(x);
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

/* ---- files ---- */

static int32_t *tokens_of(const prefix_entry *x) {
    int32_t *t = xmalloc((size_t)x->length * sizeof *t);
    for (; x->parent; x = x->parent) memcpy(t + x->length - x->n, x->edge, (size_t)x->n * sizeof *t);
    return t;
}

static void list_file(prefix *p, prefix_entry *x, size_t bytes) {
    if (p->counts.files == p->files_cap) {
        p->files_cap = 2 * p->files_cap + 64;
        p->files = xrealloc(p->files, (size_t)p->files_cap * sizeof(prefix_entry *));
    }
    x->file = p->counts.files;
    x->file_bytes = bytes;
    p->files[p->counts.files++] = x;
    p->counts.file_bytes += (int64_t)bytes;
}

static void unlist_file(prefix *p, prefix_entry *x) {
    prefix_entry *last = p->files[--p->counts.files];
    CHECK(last && x->file >= 0, "no file to take from the list");
    p->files[x->file] = last;
    last->file = x->file;
    x->file = -1;
    p->counts.file_bytes -= (int64_t)x->file_bytes;
}

static void remove_file(prefix *p, prefix_entry *x) {
    int32_t *t = tokens_of(x);
    prefix_disk_remove(p->disk, t, x->length);
    free(t);
    unlist_file(p, x);
    if (!is_entry(x)) tidy(x);
}

/* The least recently used files go until `bytes` more fit. */
static bool fit_file(prefix *p, int64_t bytes, const prefix_entry *keep) {
    while (p->counts.file_bytes + bytes > p->most_bytes) {
        prefix_entry *x = NULL;
        for (int i = 0; i < p->counts.files; i++)
            if (p->files[i] != keep && (!x || p->files[i]->used < x->used)) x = p->files[i];
        if (!x) return false;
        remove_file(p, x);
    }
    return true;
}

typedef struct cursor {
    ops *o;
    uint8_t *to;
    const uint8_t *from;
} cursor;

static void download_part(void *ctx, void *device, size_t bytes) {
    cursor *c = ctx;
    c->o->download(c->o, c->to, device, bytes);
    c->to += bytes;
}

static void upload_part(void *ctx, void *device, size_t bytes) {
    cursor *c = ctx;
    c->o->upload(c->o, device, c->from, bytes);
    c->from += bytes;
}

static size_t hidden_bytes(const prefix *p) { return (size_t)p->st->n->c->hidden * sizeof(float); }

static size_t payload_bytes(const prefix *p, int n) { return hidden_bytes(p) + (size_t)state_visit_bytes(p->st, n); }

/* An entry in memory gets a file as well, unless the disk is busy. */
static void keep_in_file(prefix *p, prefix_entry *x, const prefix_entry *keep, bool wait) {
    if (!p->disk || x->file >= 0) return;
    const size_t bytes = payload_bytes(p, x->length), all = bytes + prefix_file_head_bytes(x->length);
    if (!wait && prefix_disk_busy(p->disk)) return;
    if (!fit_file(p, (int64_t)all, keep)) return;
    uint8_t *payload = malloc(bytes);
    if (!payload) return;
    cursor c = { .o = p->st->n->o, .to = payload };
    download_part(&c, hidden_of(p, x), hidden_bytes(p));
    state_visit(p->st, prefix_slot(p, x), x->length, download_part, &c);
    int32_t *t = tokens_of(x);
    prefix_disk_write(p->disk, t, x->length, payload, bytes);
    list_file(p, x, all);
    free(t);
}

/* Entries for longer contexts wait for an engine that has one. */
static void found_file(void *ctx, const int32_t *tokens, int n, size_t bytes) {
    prefix *p = ctx;
    if (n > p->st->capacity || bytes != payload_bytes(p, n) + prefix_file_head_bytes(n)) return;
    prefix_entry *x = node_at(p, tokens, n);
    x->used = ++p->clock;
    if (x->file < 0) list_file(p, x, bytes);
}

void prefix_use_disk(prefix *p, prefix_disk *d, int64_t most_bytes) {
    p->disk = d;
    p->most_bytes = most_bytes;
    prefix_disk_scan(d, found_file, p);
    (void)fit_file(p, 0, NULL);
}

/* ---- room ---- */

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
    keep_in_file(p, x, keep, false);
    drop(p, x);
    p->counts.evicted++;
    return true;
}

prefix_entry *prefix_find(prefix *p, int *shared, const int32_t *tokens, int n) {
    int along;
    prefix_entry *x = walk(p, &along, tokens, n);
    if (shared) *shared = x->length + along;
    while (x && !is_entry(x)) x = x->parent;
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

/* A free spare slot; an entry but `keep` goes for it when there is none. */
static int take_spare(prefix *p, const prefix_entry *keep) {
    for (int tries = 0; tries < 2; tries++) {
        for (int i = 0; i < p->spare; i++)
            if (!p->by_spare[i]) return i;
        if (!prefix_evict(p, keep)) return -1;
    }
    return -1;
}

static void settle(prefix *p, prefix_entry *x, int spare) {
    x->spare = spare;
    x->used = ++p->clock;
    p->by_spare[spare] = x;
    p->counts.entries++;
    while (p->st->pages.n_kept > p->pages)
        if (!prefix_evict(p, x)) break;
}

int prefix_load_pages(const prefix_entry *x) { return x->spare >= 0 ? 0 : kv_pages_for(x->length); }

bool prefix_load(prefix *p, prefix_entry *x) {
    if (x->spare >= 0) return true;
    if (kv_pages_for(x->length) > p->pages) return false;
    const int spare = take_spare(p, x), slot = p->st->slots + spare;
    if (spare < 0 || !kv_pages_grow(&p->st->pages, slot, x->length)) return false;
    mapping map;
    const uint8_t *payload;
    int32_t *t = tokens_of(x);
    const bool ok = prefix_disk_read(p->disk, &map, &payload, t, x->length, payload_bytes(p, x->length));
    free(t);
    if (!ok) {
        kv_pages_drop(&p->st->pages, slot);
        unlist_file(p, x);
        tidy(x);
        return false;
    }
    settle(p, x, spare);
    cursor c = { .o = p->st->n->o, .from = payload };
    upload_part(&c, hidden_of(p, x), hidden_bytes(p));
    state_visit(p->st, slot, x->length, upload_part, &c);
    mapping_close(&map);
    p->counts.loaded++;
    return true;
}

bool prefix_put(prefix *p, const int32_t *tokens, int n, int src, const float *hidden) {
    ops *o = p->st->n->o;
    prefix_entry *x = prefix_find(p, NULL, tokens, n);
    if (x && x->length == n && x->spare >= 0) return x->used = ++p->clock, true;
    if (kv_pages_for(n) > p->pages) return false;
    const int spare = take_spare(p, NULL);
    if (spare < 0) return false;
    while (!state_copy(p->st, p->st->slots + spare, src, n, n - 1))
        if (!prefix_evict(p, NULL)) return false;
    x = node_at(p, tokens, n);
    settle(p, x, spare);
    p->counts.made++;
    o->copy(o, hidden_of(p, x), hidden, hidden_bytes(p));
    return true;
}

static bool below(const prefix_entry *x, const prefix_entry *top) {
    while (x && x != top) x = x->parent;
    return x != NULL;
}

void prefix_forget(prefix *p, const int32_t *tokens, int n, int from) {
    int along;
    const prefix_entry *end = walk(p, &along, tokens, n);
    const prefix_entry *top = NULL; /* the shallowest on the path that is `from` tokens or more */
    for (const prefix_entry *x = end; x && from > 0 && x->length >= from; x = x->parent) top = x;
    /* First gathered, because nodes go with their entries. */
    const int count = p->spare + p->counts.files;
    prefix_entry **bad = xcalloc((size_t)count, sizeof(prefix_entry *));
    int m = 0;
    for (int i = 0; i < count; i++) {
        prefix_entry *x = i < p->spare ? p->by_spare[i] : p->files[i - p->spare];
        const bool twice = x && i >= p->spare && x->spare >= 0;
        if (x && !twice && (below(end, x) || (top && below(x, top)))) bad[m++] = x;
    }
    for (int i = 0; i < m; i++) {
        if (bad[i]->spare >= 0) strip(p, bad[i]);
        if (bad[i]->file >= 0)
            remove_file(p, bad[i]);
        else
            tidy(bad[i]);
        p->counts.forgotten++;
    }
    free(bad);
}

void prefix_clear(prefix *p) {
    for (prefix_entry *x; (x = oldest(p, NULL)); p->counts.forgotten++) {
        strip(p, x);
        if (x->file >= 0)
            remove_file(p, x);
        else
            tidy(x);
    }
    for (; p->counts.files > 0; p->counts.forgotten++) remove_file(p, p->files[p->counts.files - 1]);
}

prefix_counts prefix_counted(const prefix *p) {
    prefix_counts c = p->counts;
    c.pages = p->st->pages.n_kept;
    return c;
}

uint64_t prefix_version(const prefix *p) { return (uint64_t)p->counts.made; }

static void free_below(prefix_entry *x) {
    for (prefix_entry *c = x->child, *next; c; c = next) {
        next = c->next;
        free_below(c);
        free(c->edge);
        free(c);
    }
}

void prefix_close(prefix *p) {
    if (!p) return;
    for (int i = 0; i < p->spare; i++) {
        if (!p->by_spare[i]) continue;
        keep_in_file(p, p->by_spare[i], NULL, true);
        strip(p, p->by_spare[i]);
    }
    prefix_disk_close(p->disk);
    free_below(&p->root);
    if (p->hidden) p->st->n->o->mem_free(p->st->n->o, p->hidden);
    free(p->by_spare);
    free(p->files);
    free(p);
}
