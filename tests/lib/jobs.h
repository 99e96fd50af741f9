/* jobs.h - random requests, what each yields alone, and the same in a loop: for tests whose whole claim is that nothing else may
 * change an answer. An answer is compared by ids, by the bits of its log-probabilities, and by the bits of whole rows of logits
 * where the engine computed them. No cmocka in here: what differs is returned in words. */
#ifndef NIBBLE_TEST_JOBS_H
#define NIBBLE_TEST_JOBS_H

#include "engine/engine.h"
#include "lib/toytok.h"
#include "text/grammar.h"
#include "text/reply.h"

enum { JOB_PROMPT = 90, JOB_TOKENS = 40, JOB_CHOICES = 3, JOB_TOP = 4 };

/* What may be said: anything; about one id in `job.narrow` behind what was said; JSON objects; answers to a schema. */
typedef enum job_rule { JOB_FREE, JOB_CHAIN, JOB_JSON, JOB_SCHEMA } job_rule;

typedef struct job_answer {
    int32_t id[JOB_TOKENS], top_id[JOB_TOKENS][JOB_TOP];
    double p[JOB_TOKENS], top[JOB_TOKENS][JOB_TOP];
    int n;
    gen_finish finish;
    float *rows; /* [JOB_TOKENS, vocab] logits of each token's row; NULL: not kept */
} job_answer;

typedef struct job {
    int32_t prompt[JOB_PROMPT];
    int n_prompt, mark; /* a length at which others may go on otherwise; 0: none */
    int max_tokens, choices, logprobs, narrow;
    job_rule rule;
    int stops[3], n_stops;
    char stop_text[64]; /* a stop string, looked for in the text of the answer; "": none */
    sampler_params sampling;
    job_answer alone[JOB_CHOICES];
} job;

/* What jobs of one model are made from. */
typedef struct job_world {
    int vocab; /* ids of prompts are below it */
    bool rows; /* keep logits */
    /* With a tokenizer there are stop strings and grammars; NULL without. */
    const tokenizer *tok;
    grammar_vocab *words;
    grammar *json, *schema;
} job_world;

/* `g` (opened with text or without) outlives the world. */
NODISCARD bool jobs_open(job_world *out, const engine *g, bool rows, err *e);
void jobs_close(job_world *w);

/* all[n] becomes a random job, which may go on from one of those before it, and is run alone on `g` (a free slot, the full head,
 * no drafts). */
NODISCARD bool job_make(job *all, int n, const job_world *w, engine *g, rnd *r, err *e);
void job_free(job *j);

/* One use of a job. */
typedef struct job_run {
    const job *j;
    const job_world *w;
    engine *g;
    job_answer got[JOB_CHOICES];
    reply text[JOB_CHOICES]; /* where there is a stop string */
    const char *stop_texts[1];
    uint64_t chain[JOB_CHOICES];
    grammar_run *grammar;
    gen_result result[JOB_CHOICES];
    err fault[JOB_CHOICES];
    int ended, odd_rows; /* tokens whose logits were not among the engine's */
    /* Leave after so many tokens of all choices, by cancelling; 0: stay. */
    int leave_after;
    loop *l;
    uint64_t handle;
    /* Called behind the last choice, on the owner's thread; may be NULL. */
    void (*on_over)(struct job_run *run);
    void *user;
} job_run;

typedef struct job_submit {
    int depth, priority;
    double deadline_seconds;
} job_submit;

/* A zeroed job_run becomes this job in a loop over `g`. False: refused, with e. */
NODISCARD bool job_start(job_run *run, loop *l, engine *g, const job *j, const job_world *w, const job_submit *s,
                         err *e);
/* The job once more, alone, with `depth` drafts a round. */
NODISCARD bool job_alone(job_run *run, engine *g, const job *j, const job_world *w, int depth, err *e);
/* NULL: the same as alone (a beginning of it where it was cancelled, late or left), else what differs, in a static buffer. */
const char *job_differs(const job_run *run);
void job_run_free(job_run *run);

#endif
