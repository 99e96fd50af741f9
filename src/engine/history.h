/* history.h - how often each token occurs in one sequence: what penalties are computed from.
 *
 * The prompt marks presence only (for the repetition penalty); generated tokens are counted. Drafts in front of a
 * position are pushed tentatively and popped again, newest first, so a verify row sees exactly the counts that plain
 * decoding would see there. Nothing allocates but open. Single-threaded. */
#ifndef NIBBLE_HISTORY_H
#define NIBBLE_HISTORY_H

#include "base/err.h"

typedef struct history {
    int vocab, n_ids;
    uint32_t *state; /* [vocab] HISTORY_PROMPT | times generated; 0 for every id that is not in ids */
    int32_t *ids;    /* [n_ids] distinct ids seen, in order of first occurrence; room for vocab */
} history;

#define HISTORY_PROMPT 0x80000000u

/* 8 bytes per id of the vocabulary (pages that no token touches stay unused). Errors: E-MACHINE-MEMORY. */
NODISCARD bool history_open(history *h, int vocab, err *e);
void history_close(history *h); /* of a zeroed one too */
void history_reset(history *h); /* cost: the distinct ids seen */
/* Ids outside [0, vocab) are passed over by all three. */
void history_prompt(history *h, const int32_t *ids, int n);
void history_push(history *h, int32_t id);
/* Undo the newest push that is not undone yet, which must have been of `id`. */
void history_pop(history *h, int32_t id);
static inline bool history_in_prompt(const history *h, int32_t id) { return (h->state[id] & HISTORY_PROMPT) != 0; }
static inline uint32_t history_count(const history *h, int32_t id) { return h->state[id] & ~HISTORY_PROMPT; }

#endif
