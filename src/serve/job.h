/* job.h - one engine request between two threads: the engine thread puts tokens in, the event thread takes them out.
 *
 * Each job has its own queue; it cannot grow beyond the tokens its request may make. The engine never waits for a reader.
 * A bridge is the one place where jobs with news are listed, and what wakes the event loop. */
#ifndef NIBBLE_JOB_H
#define NIBBLE_JOB_H

#include "engine/engine.h"

struct event_base;
typedef struct job_bridge job_bridge;
typedef struct job job;

NODISCARD bool job_bridge_open(job_bridge **out, struct event_base *base, err *e);
void job_bridge_close(job_bridge *b); /* when no job is left */
/* Any thread: run fn(ctx) on the event thread. */
void job_bridge_post(job_bridge *b, void (*fn)(void *ctx), void *ctx);
/* Engine thread, at the end of a step (loop_options.on_step, ctx: the bridge): the event thread is told of what the step made.
 * Not before: woken by a step's first token it takes the engine's processor from it, and again for each of the others. */
void job_bridge_step(void *bridge);
/* Run what was posted now. */
void job_bridge_flush(job_bridge *b);

typedef struct job_token {
    int choice; /* -1: a token of the prompt */
    int32_t id; /* -1: the choice is over, see job_result */
    double logprob;
    size_t top; /* its entries: job_news.top_ids and top_logprobs from here */
} job_token;

typedef struct job_result {
    bool over;
    gen_result r;
    err fault; /* id NULL: none */
} job_result;

/* What arrived since the last look. */
typedef struct job_news {
    job_token *v;
    size_t n, cap;
    int32_t *top_ids;
    double *top_logprobs;
    size_t n_top, cap_top;
} job_news;

typedef struct job_spec {
    loop_request request; /* callbacks and ctx are filled in */
    bool score_prompt;    /* all tokens of the prompt but the first come too, before the others */
    /* Stop strings, looked for on the engine thread too, so that nothing is generated behind one. */
    const tokenizer *tok;
    const char *const *stops; /* [n_stops], copied */
    int n_stops, min_tokens;
    /* The same with the end of the first tool call; NULL: there may be any number of calls. */
    const json *one_call_of; /* the request's tools array, copied */
    bool thinking;           /* the prompt ends inside a thought */
    bool calls_first;        /* see split.h */
    void *held; /* what the request needs as long as it runs; given to held_free at the end of the job; may be NULL */
    void (*held_free)(void *held);
    void (*ready)(void *owner); /* event thread: there is news */
    void *owner;
} job_spec;

/* Takes s->held over, also on failure. Errors: those of loop_submit. */
NODISCARD bool job_submit(job **out, job_bridge *b, loop *l, const job_spec *s, err *e);
/* Swap the queue with *news, whose memory is used again. */
void job_take(job *j, job_news *news);
void job_news_free(job_news *news);
/* Event thread, of a choice whose end was taken. */
const job_result *job_result_of(const job *j, int choice);
/* Prompt rows processed so far, of all; 0 of 0 when nothing is known yet. */
void job_progress(job *j, int *done, int *total);
/* Nobody listens any more: the generation ends before its next token and the job frees itself. */
void job_abandon(job *j);
/* After the end of all choices was taken. */
void job_free(job *j);
int job_bridge_jobs(const job_bridge *b);

#endif
