/* batch.h - many prompts answered by one engine, so many at a time: what accept, ab and gsm8k run on. */
#ifndef NIBBLE_BATCH_H
#define NIBBLE_BATCH_H

#include "engine/engine.h"

typedef struct batch_item {
    /* in, borrowed */
    const int32_t *prompt;
    int n_prompt;
    sampler_params sampling;
    int max_tokens; /* 0 = until the context is full */
    /* out; batch_free */
    id_list output;
    gen_result result;
    err error; /* id NULL: answered */
    bool done;
} batch_item;

typedef struct batch_options {
    int concurrency; /* prompts in work at once, at most the engine's slots */
    int depth;       /* drafts per round; fixed */
    const int *stop_ids;
    int n_stop_ids;
    void (*on_item)(void *ctx, int index, int done); /* after each; may be NULL */
    void *ctx;
    volatile const int *cancel;
} batch_options;

/* Answers items[0..n) in order; a failed item keeps its error and the others go on. *seconds: wall time. Errors: those of
 * loop_open; E-EVAL-STOPPED. */
NODISCARD bool batch_run(engine *g, batch_item *items, int n, const batch_options *o, double *seconds, err *e);
void batch_free(batch_item *items, int n); /* what batch_run put into them */

#endif
