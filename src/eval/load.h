/* load.h - requests to an OpenAI-compatible server as clients make them, timed piece by piece. */
#ifndef NIBBLE_LOAD_H
#define NIBBLE_LOAD_H

#include "eval/client.h"
#include "eval/workload.h"

typedef struct load_request {
    str messages, tools; /* JSON arrays, borrowed; tools may be empty */
    double at;           /* open loop: seconds after the start */
    int max_tokens;
} load_request;

typedef struct load_result {
    bool done, failed;
    double start, first, end;             /* clock_seconds; first = 0: no token came */
    int64_t prompt_tokens, output_tokens; /* as `usage` says; 0: it does not */
    double *gaps;                         /* [n_gaps] seconds between pieces of the answer */
    int n_gaps, cap_gaps;
    buf text; /* thought and answer */
    char error[160];
} load_result;

typedef struct load_options {
    const char *model;
    int concurrency; /* closed loop: requests under way at once; 0: open loop, each at its time */
    bool ignore_eos; /* answers of exactly max_tokens, where the server knows the field */
    bool greedy;
    int64_t seed;
    void (*on_done)(void *ctx, int done, int total);
    void *ctx;
    volatile const int *cancel;
} load_options;

/* results [n], zeroed. *seconds: from the first request to the last answer. Failed requests are results. Errors:
 * E-EVAL-STOPPED. */
NODISCARD bool load_run(load_result *results, const load_request *requests, int n, client *c, const load_options *o,
                        double *seconds, err *e);
void load_free(load_result *results, int n);

/* Signs that a model or an engine is broken although tokens come fast. Words are what stands between white space. */
typedef struct load_health {
    int answers;       /* with 20 words or more: others tell nothing */
    double type_token; /* lowest share of different words among the first 100 of an answer */
    double top_word;   /* largest share that one word has of an answer */
    double repeated;   /* largest share of an answer's runs of eight words that occurred in it before */
    int loops;         /* answers of whose runs more than half did */
    int same_length;   /* most answers of one length in bytes */
    int same_text;     /* most answers that are one text, of different prompts */
} load_health;
load_health load_check(const load_result *results, const load_request *requests, int n);

#endif
