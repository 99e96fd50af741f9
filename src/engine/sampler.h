/* sampler.h - one row of float32 logits to a token id, reproducibly (docs/NUMERICS.md 8).
 *
 * The draw depends only on (params, logits, history, mask, position): never on batching, chunking, threads, ISA or on
 * how many drafts were verified. Order: penalties, logit_bias, ban of the stop ids (min_tokens), mask, temperature,
 * top-k, top-p, min-p; candidates by (logit descending, id ascending); masses are integers, so sums are exact.
 *
 * A sampler is the workspace of one thread; it serves any sequence and any position, and allocates only when opened.
 * It knows nothing of engines, sessions or batches: a scheduler calls it row by row. For a verify row at draft i, push
 * the drafts before it into the history first, and pop them afterwards. */
#ifndef NIBBLE_SAMPLER_H
#define NIBBLE_SAMPLER_H

#include "engine/history.h"
#include "kern/kern.h"

enum { SAMPLER_MAX_BIAS = 4096, SAMPLER_MAX_STOPS = 256 };

typedef struct sampler_bias {
    int32_t id;
    float value; /* added to the logit */
} sampler_bias;

/* A zeroed struct is greedy. */
typedef struct sampler_params {
    double temperature; /* below 1e-5: greedy */
    int top_k;          /* 0 = off; 1 is greedy */
    double top_p;       /* 1 = off */
    double min_p;       /* 0 = off */
    double presence;    /* subtracted once from what was generated */
    double frequency;   /* subtracted for every time it was generated */
    double repetition;  /* divides a positive logit, multiplies another, of what the prompt or the output holds; 1 and
                           0 = off */
    uint64_t seed;
    uint32_t choice;          /* index of the completion when several share a prompt */
    const sampler_bias *bias; /* [n_bias] borrowed; of an id that occurs twice, both are added */
    int n_bias;
    const int32_t *stop_ids; /* [n_stop_ids] borrowed; banned while fewer than min_tokens were generated */
    int n_stop_ids, min_tokens;
} sampler_params;

typedef struct sampler_row {
    float *logits;       /* [n]; edited during the call, the same bits again when it returns */
    const int32_t *ids;  /* [n] ascending: whose logits they are, of a row of which the others are out of the question;
                              * all ids that are edited must be there; NULL: of id 0, 1, ... */
    int n;               /* <= the vocabulary given to sampler_open */
    int64_t position;    /* absolute, of the token to be chosen */
    int generated;       /* tokens generated before it */
    const history *seen; /* for penalties; NULL = none */
    const uint64_t *allowed; /* bit id % 64 of word id / 64 set: may be chosen; NULL = all */
} sampler_row;

/* A candidate. mass = trunc(2^40 exp((logit - the row's best) / temperature)). */
typedef struct sampler_entry {
    float logit;
    int32_t id;
    uint64_t mass;
} sampler_entry;

typedef struct sampler_undo {
    float old;
    int32_t id; /* its place in the row */
} sampler_undo;

enum { SAMPLER_BUCKETS = 512 };

typedef struct sampler {
    kern k;
    int vocab, blocks;
    float *maxima;              /* [blocks] of the edited row */
    uint8_t *stale;             /* [blocks] maxima that edits made out of date */
    float *masked;              /* [vocab] copy under a mask */
    sampler_undo *undo;         /* [vocab + bias + stops] */
    sampler_entry *list, *bins; /* [vocab] each: candidates as found; candidates by bucket */
    int n_undo, n_list;
    int sorted, bucket; /* list[0..sorted) is in its final order; next bucket to sort */
    int fill[SAMPLER_BUCKETS], ends[SAMPLER_BUCKETS];
} sampler;

/* `isa` caps the kernels (kern_init); results do not depend on it. Errors: E-MACHINE-MEMORY. */
NODISCARD bool sampler_open(sampler *s, int vocab, kern_isa isa, err *e);
void sampler_close(sampler *s); /* of a zeroed one too */

static inline bool sampler_is_greedy(const sampler_params *p) { return p->temperature < 1e-5 || p->top_k == 1; }
bool sampler_has_penalties(const sampler_params *p);
/* Nothing edits the logits: the greedy token is the argmax of the row. */
bool sampler_is_plain(const sampler_params *p);
/* Values in range, bias and stop ids inside the vocabulary. Error: E-SAMPLE-PARAM (names the field as APIs call it). */
NODISCARD bool sampler_check(const sampler_params *p, int vocab, err *e);

/* The token for row->position. Greedy: the largest edited logit, the lowest id on ties. Errors: E-ENGINE-NONFINITE (NaN
 * or Inf among the logits), E-SAMPLE-MASKED (no id may be chosen). `p` passed sampler_check. */
NODISCARD bool sampler_draw(sampler *s, int32_t *id, const sampler_params *p, const sampler_row *row, err *e);

/* The `count` most likely ids of a row with their log-probabilities, best first (ids -1 and -inf behind the n-th), and the
 * log-probability of `chosen`: log-softmax of the raw logits, before penalties, bias, mask, temperature and filters. The
 * row is one that sampler_draw accepted. Bits do not depend on ISA or threads. */
double sampler_logprobs(sampler *s, int32_t *ids, double *logprobs, int count, const float *logits, int n,
                        int32_t chosen);

#endif
