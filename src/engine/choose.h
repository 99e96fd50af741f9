/* choose.h - a token for one position from the few best logits of its row, where nothing else could be drawn. Private to
 * engine/.
 *
 * A request that edits logits (penalties, bias, stop ids below min_tokens) edits those of known ids. These are computed apart,
 * exactly, and left out of the best; what may be drawn from the whole edited row is then among the two. */
#ifndef NIBBLE_CHOOSE_H
#define NIBBLE_CHOOSE_H

#include "engine/engine.h"

/* Few tokens can be chosen, nobody wants to see more of them, and there is a screened head. */
bool choose_few(const engine *g, const sampler_params *p, int logprobs);
/* The same without edits. */
bool choose_uses_top(const engine *g, const sampler_params *p, int logprobs);
/* How many of the best are needed, 1 .. HEAD_MAX_TOP. */
int choose_top_count(const engine *g, const sampler_params *p);

/* Ids whose logits one sequence edits; a set that is not complete asks for the whole row. */
int choose_most_edits(const engine *g);
/* All that `p` can edit so far; `seen` as in sampler_row. Error: E-MACHINE-MEMORY. */
NODISCARD bool choose_edits_open(id_set *edits, const engine *g, const sampler_params *p, const history *seen, err *e);
/* A token was generated. */
void choose_edits_push(id_set *edits, const engine *g, const sampler_params *p, int32_t id);

/* Where two lists become one row. */
typedef struct choose_room {
    int32_t *ids; /* [choose_most_edits + ENGINE_MAX_DRAFT + HEAD_MAX_TOP] */
    float *logits;
} choose_room;

typedef struct choose_row {
    int32_t *ids;  /* [k] the choose_top_count best as head_top returns them; both are reordered */
    float *logits; /* [k] */
    int k;
    const int32_t *edit_ids; /* [n_edits] ascending: what head_top left out of them */
    const float *edit_logits;
    int n_edits;
    const history *seen;
    const uint64_t *allowed; /* of edited ids; the best are allowed. NULL: all */
    int64_t position;
    int generated;
} choose_row;

/* The id that sampler_draw would return for the whole row. room may be NULL without edits. Errors: those of sampler_draw. */
NODISCARD bool choose_from_top(engine *g, int32_t *id, const sampler_params *p, const choose_row *r,
                               const choose_room *room, err *e);

#endif
