#include "engine/kvpages.h"

#include <stdlib.h>
#include <string.h>

bool kv_pages_open(kv_pages *out, ops *o, int slots, int running, int capacity, int pages, err *e) {
    *out =
        (kv_pages){ .o = o, .pages = pages, .slots = slots, .running = running, .slot_pages = kv_pages_for(capacity) };
    const size_t entries = (size_t)slots * (size_t)out->slot_pages;
    out->table = xcalloc(entries, sizeof *out->table);
    out->held = xcalloc((size_t)slots, sizeof *out->held);
    out->refs = xcalloc((size_t)pages, sizeof *out->refs);
    out->kept = xcalloc((size_t)pages, sizeof *out->kept);
    out->unused = xcalloc((size_t)pages, sizeof *out->unused);
    for (int i = 0; i < pages; i++) out->unused[out->n_unused++] = pages - 1 - i;
    void *device = NULL;
    if (!o->mem_new(o, &device, entries * sizeof *out->device, e)) {
        kv_pages_close(out);
        return false;
    }
    out->device = device;
    return true;
}

void kv_pages_close(kv_pages *p) {
    if (p->device) p->o->mem_free(p->o, p->device);
    free(p->table);
    free(p->held);
    free(p->refs);
    free(p->kept);
    free(p->unused);
    *p = (kv_pages){ 0 };
}

int kv_pages_for(int positions) { return (int)(((int64_t)positions + OPS_KV_PAGE - 1) / OPS_KV_PAGE); }

int32_t kv_page(const kv_pages *p, int slot, int index) {
    CHECK(index >= 0 && index < p->held[slot], "page %d of slot %d, which holds %d", index, slot, p->held[slot]);
    return p->table[(int64_t)slot * p->slot_pages + index];
}

bool kv_pages_own(const kv_pages *p, int slot, int first, int n) {
    for (int i = first / OPS_KV_PAGE; i < kv_pages_for(first + n); i++)
        if (p->refs[kv_page(p, slot, i)] != 1) return false;
    return true;
}

static bool only_kept(const kv_pages *p, int32_t page) { return p->kept[page] > 0 && p->kept[page] == p->refs[page]; }

int kv_pages_only_kept(const kv_pages *p, int but) {
    int n = 0;
    for (int32_t i = 0; i < p->pages; i++) n += only_kept(p, i);
    for (int i = 0; but >= 0 && i < p->held[but]; i++) n -= only_kept(p, kv_page(p, but, i));
    return n;
}

static void hold(kv_pages *p, int slot, int32_t page) {
    CHECK(p->held[slot] < p->slot_pages, "slot %d holds %d pages", slot, p->held[slot]);
    p->table[(int64_t)slot * p->slot_pages + p->held[slot]++] = page;
    p->refs[page]++;
    if (slot >= p->running) p->n_kept += p->kept[page]++ == 0;
}

/* Entries [from, held) for the ops; spare slots are never run. */
static void tell(kv_pages *p, int slot, int from) {
    const int64_t at = (int64_t)slot * p->slot_pages + from;
    const int n = p->held[slot] - from;
    if (slot < p->running && n > 0) p->o->upload(p->o, p->device + at, p->table + at, (size_t)n * sizeof *p->table);
}

bool kv_pages_grow(kv_pages *p, int slot, int positions) {
    const int from = p->held[slot], want = kv_pages_for(positions);
    if (want - from > p->n_unused) return false;
    for (int i = from; i < want; i++) hold(p, slot, p->unused[--p->n_unused]);
    tell(p, slot, from);
    return true;
}

void kv_pages_drop(kv_pages *p, int slot) {
    while (p->held[slot] > 0) {
        const int32_t page = p->table[(int64_t)slot * p->slot_pages + --p->held[slot]];
        if (slot >= p->running) p->n_kept -= --p->kept[page] == 0;
        if (--p->refs[page] == 0) p->unused[p->n_unused++] = page;
    }
}

void kv_pages_share(kv_pages *p, int dst, int src, int count) {
    CHECK(p->held[dst] == 0 && count <= p->held[src], "slot %d holds %d pages, slot %d is to share %d of %d", dst,
          p->held[dst], src, count, p->held[src]);
    for (int i = 0; i < count; i++) hold(p, dst, kv_page(p, src, i));
    tell(p, dst, 0);
}
