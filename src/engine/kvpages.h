/* kvpages.h - which page of the KV caches holds which positions of which slot.
 *
 * A page is OPS_KV_PAGE positions in every layer's cache at once, so one table serves all layers. Slots take pages as they
 * grow and give them back; a page that several slots hold is written by none of them. Slots [0, running) run; those behind
 * them are spare: they only keep what a running slot left (prefix.h). Owner thread only. */
#ifndef NIBBLE_KVPAGES_H
#define NIBBLE_KVPAGES_H

#include "ops/ops.h"

typedef struct kv_pages {
    ops *o;
    int pages, slots, running, slot_pages;
    int32_t *table;  /* [slots][slot_pages]; entries [0, held) of a slot are pages */
    int32_t *device; /* the same for the ops */
    int32_t *held;   /* [slots] */
    int32_t *refs;   /* [pages] slots that hold it */
    int32_t *kept;   /* [pages] spare ones among them */
    int32_t *unused; /* [n_unused] */
    int n_unused;
    int n_kept; /* pages that a spare slot holds */
} kv_pages;

/* Error: E-MACHINE-MEMORY. */
NODISCARD bool kv_pages_open(kv_pages *out, ops *o, int slots, int running, int capacity, int pages, err *e);
void kv_pages_close(kv_pages *p);
/* Pages for positions [0, positions). */
int kv_pages_for(int positions);
/* The slot gets pages for positions [0, positions); false, with nothing changed, when too few are unused. */
NODISCARD bool kv_pages_grow(kv_pages *p, int slot, int positions);
void kv_pages_drop(kv_pages *p, int slot);
/* Slot dst, which holds none, gets the first `count` pages of src. */
void kv_pages_share(kv_pages *p, int dst, int src, int count);
/* Is positions [first, first + n) of the slot its own to write? */
bool kv_pages_own(const kv_pages *p, int slot, int first, int n);
/* Pages that spare slots hold and nobody else; not those of slot `but` (-1: none). */
int kv_pages_only_kept(const kv_pages *p, int but);
int32_t kv_page(const kv_pages *p, int slot, int index);

#endif
