/* prefix.h - what sequences left for those that begin with the same tokens.
 *
 * KV can be cut at any length, a recurrent state cannot: a prefix can be taken up only where a whole state was kept. An
 * entry is such a state: a spare slot (state.h) that holds GDN states and conv windows behind `length` tokens, the pages
 * of KV in front of it (shared with whoever else holds them), and the final-norm hidden row of the last position, from
 * which the draft layer goes on and the next token can be drawn. Its draft slots [0, length - 1) are final. A radix tree
 * over token ids finds the deepest entry that a sequence begins with. KV without a state behind it would be of no use, so
 * pages live as long as the entries that hold them; the least recently used entry goes first. Owner thread only. */
#ifndef NIBBLE_PREFIX_H
#define NIBBLE_PREFIX_H

#include "engine/prefix_disk.h"
#include "engine/state.h"

typedef struct prefix prefix;
typedef struct prefix_entry prefix_entry; /* valid until something is put, evicted or forgotten */

typedef struct prefix_counts {
    int entries, pages; /* pages: that an entry holds */
    int64_t made, evicted, forgotten, loaded;
    int files;
    int64_t file_bytes;
} prefix_counts;

/* Over the spare slots of *st, for at most `pages` pages of its pool. Error: E-MACHINE-MEMORY. */
NODISCARD bool prefix_open(prefix **out, seq_state *st, int spare, int pages, err *e);
/* Entries that go for room are from now on kept in a folder, at most so many bytes, and found there again. Takes d over. */
void prefix_use_disk(prefix *p, prefix_disk *d, int64_t most_bytes);
/* Entries go to the folder, if there is one. */
void prefix_close(prefix *p);
/* The deepest entry of at most n tokens that are tokens[0..), or NULL. *shared (may be NULL): how many tokens are also the
 * beginning of some entry. */
prefix_entry *prefix_find(prefix *p, int *shared, const int32_t *tokens, int n);
int prefix_length(const prefix_entry *x);
/* Its spare slot. */
int prefix_slot(const prefix *p, const prefix_entry *x);
/* An entry that is only in a file comes into memory, for which others may go. False: it is gone, or there is no room. */
NODISCARD bool prefix_load(prefix *p, prefix_entry *x);
/* Pages that loading takes; 0 when it is in memory. */
int prefix_load_pages(const prefix_entry *x);
/* Running slot dst, any pages of which go, becomes the entry; hidden [H] gets its row. False, dst without pages, when too
 * few are unused. */
NODISCARD bool prefix_restore(prefix *p, prefix_entry *x, int dst, float *hidden);
/* Pages that restoring takes. */
int prefix_restore_pages(const prefix *p, const prefix_entry *x);
/* Keep slot src, which has processed tokens[0..n), its draft slots [0, n - 1) and has no pending rows; hidden [H] is the row
 * of position n - 1. Others may go for it. False when there is no room, or when it would not fit alone. */
bool prefix_put(prefix *p, const int32_t *tokens, int n, int src, const float *hidden);
/* The least recently used entry but `keep` goes; false when there is none. */
bool prefix_evict(prefix *p, const prefix_entry *keep);
/* Entries that tokens[0..n) begins with go, and all that begin with its first `from` tokens when one of them had this
 * length or more (from 0: no others). */
void prefix_forget(prefix *p, const int32_t *tokens, int n, int from);
/* All entries go, from the folder too. */
void prefix_clear(prefix *p);
prefix_counts prefix_counted(const prefix *p);
/* Grows whenever an entry was added. */
uint64_t prefix_version(const prefix *p);

#endif
