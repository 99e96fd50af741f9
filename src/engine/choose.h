/* choose.h - a token for one position from the few best logits of its row, where nothing else could be drawn. Private to
 * engine/. */
#ifndef NIBBLE_CHOOSE_H
#define NIBBLE_CHOOSE_H

#include "engine/engine.h"

/* The screened head will do: nothing edits the logits, nobody wants to see more of them, and few can be chosen. */
bool choose_uses_top(const engine *g, const sampler_params *p, int logprobs);
/* How many of the best are needed, 1 .. HEAD_MAX_TOP. */
int choose_top_count(const engine *g, const sampler_params *p);
/* The id that sampler_draw would return for the whole row, from its k = choose_top_count best (as head_top returns them;
 * both arrays are reordered). Errors: those of sampler_draw. */
NODISCARD bool choose_from_top(engine *g, int32_t *id, const sampler_params *p, int32_t *ids, float *logits, int k,
                               int64_t position, int generated, err *e);

#endif
