/* arms.h - the same prompts and seeds to several models in turn: accept length, speed and outputs, paired. */
#ifndef NIBBLE_ARMS_H
#define NIBBLE_ARMS_H

#include "engine/engine.h"
#include "eval/stat.h"
#include "eval/workload.h"

/* Changes to a quantized draft head that no file is needed for. */
typedef enum arm_edit {
    ARM_AS_IS,
    ARM_HEAD_KV_ONE /* its K/V scales are 1.0 */,
    ARM_HEAD_KV_WRONG /* a thousandth: K and V saturate */,
    ARM_HEAD_W4A16 /* its inputs stay as they are */
} arm_edit;

typedef struct arm {
    const char *name, *dir; /* borrowed */
    arm_edit edit;
    /* what arms_run fills */
    gen_result *results; /* [prompts] */
    id_list *outputs;    /* [prompts] */
    char formats[96];
} arm;

typedef struct arms_options {
    engine_options engine; /* slots 1; text is loaded */
    int depth, max_tokens;
    sampler_params sampling; /* choice = the prompt's index */
    bool one_at_a_time;      /* never two models in memory: all prompts to one arm, then the next; else in turn */
    void (*on_prompt)(void *ctx, int done, int total);
    void *ctx;
    volatile const int *cancel;
} arms_options;

/* Errors: those of engine_open and session_generate (named by arm), E-LOAD-NO-HEAD, E-EVAL-STOPPED. */
NODISCARD bool arms_run(arm *arms, int n, const workload *w, const arms_options *o, err *e);
void arms_free(arm *arms, int n, int prompts);

typedef struct arm_figures {
    stat_interval accept, accept_difference; /* of arm 0: NaN */
    stat_interval rate, rate_difference;     /* tokens/s while decoding */
    int64_t accepted_at[ENGINE_MAX_DRAFT], drafted_at[ENGINE_MAX_DRAFT], tokens, rounds;
    int different; /* outputs that are not arm 0's, id by id */
} arm_figures;
arm_figures arms_compare(const arm *a, const arm *first, int prompts, uint64_t seed);

#endif
