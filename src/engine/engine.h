/* engine.h - the door: a loaded model and its sequences.
 *
 * An engine owns the mapped checkpoint, the device and the state of `slots` sequences; a session is one sequence. One
 * thread owns an engine and everything made from it. Same request, same seed, same bytes: generation does not depend on
 * chunk size, threads, ISA or on whether drafts are used. */
#ifndef NIBBLE_ENGINE_H
#define NIBBLE_ENGINE_H

#include "engine/forward.h"
#include "engine/sampler.h"
#include "text/template.h"
#include "text/tokenizer.h"

enum { ENGINE_MAX_DRAFT = 5 };

/* KV_CACHE_AUTO: FP8 when the export declares it, else float32. */
typedef enum kv_mode { KV_CACHE_AUTO, KV_CACHE_F32, KV_CACHE_BF16, KV_CACHE_FP8 } kv_mode;

typedef struct engine_options {
    ops_options ops;
    int ctx;      /* positions per sequence; 0 = min(the model's limit, 32768) */
    int slots;    /* sequences; 0 = 1 */
    int chunk;    /* prompt rows per pass; 0 = 256 */
    kv_mode kv;   /* KV cache */
    act_mode act; /* inputs of quantized Linears */
    heads_options heads;
    bool need_text; /* tokenizer and template must be there; otherwise they are loaded when present */
    bool no_text;   /* do not look for them: every vocabulary row counts as real */
} engine_options;

typedef struct engine {
    ckpt files;
    model_config config;
    weights w;
    ops *o;
    net n;
    seq_state st;
    scratch sc;
    sampler sm;
    tokenizer *tok;      /* NULL when the directory has none */
    chat_template *tmpl; /* NULL when there is none */
    int chunk;
    dtype kv_type;      /* of the trunk's caches */
    float *host_logits; /* [scratch head_rows, real_vocab] */
    uint8_t *slot_used; /* [slots] */
} engine;

/* Errors: those of ckpt, config, weights, tokenizer, template, ops; E-MACHINE-MEMORY. */
NODISCARD bool engine_open(engine **out, const char *dir, const engine_options *opt, err *e);
void engine_close(engine *g);

typedef struct session {
    engine *g;
    int slot;
    int32_t *tokens; /* known tokens: prompt and output */
    int n_tokens, cap;
    int done;      /* positions [0, done) went through the trunk */
    int pending;   /* the last `pending` of them are not yet part of the stored GDN and conv state */
    bool drafting; /* the draft layer follows along */
    int mtp_done;  /* draft slots [0, mtp_done) are final */
    float *keep;   /* device: final-norm hidden of positions [done - kept, done) */
    int kept;
    history seen; /* of the tokens; closed unless the request has penalties */
} session;

/* A fresh sequence. `drafting` needs a model with an MTP head. Errors: E-ENGINE-SLOTS, E-MACHINE-MEMORY. */
NODISCARD bool session_open(session *out, engine *g, bool drafting, err *e);
void session_close(session *s);
void session_reset(session *s);
/* Make the known tokens equal ids[0..n). What is already processed is kept when it is a prefix, else all is recomputed
 * (a recurrent state cannot be cut back). Errors: E-ENGINE-CONTEXT (n >= ctx), E-ENGINE-TOKEN (id outside the
 * vocabulary), E-ENGINE-EMPTY. */
NODISCARD bool session_set(session *s, const int32_t *ids, int n, err *e);

typedef struct gen_round { /* one verification, as in the oracle's greedy.json */
    int32_t known, draft[ENGINE_MAX_DRAFT], target[ENGINE_MAX_DRAFT + 1];
    int depth, accepted;
} gen_round;

typedef struct gen_options {
    int max_tokens; /* 0 = until the context is full */
    int depth;      /* drafts per round, 0..ENGINE_MAX_DRAFT; 0 when the session does not draft */
    sampler_params sampling;
    const int *stop_ids; /* generation ends with (and includes) one of these */
    int n_stop_ids;
    int logprobs; /* top entries per token, 0 = off */
    /* Each new token in order; return false to end. logprobs NULL unless asked: [n] best first. */
    bool (*on_token)(void *ctx, int32_t id, double logprob, const int32_t *top_ids, const double *top_logprobs);
    void (*on_round)(void *ctx, const gen_round *r); /* may be NULL */
    /* Progress of a long prompt; may be NULL. */
    void (*on_prompt)(void *ctx, int done, int total);
    void *ctx;
    volatile const int *cancel; /* set to non-zero from a signal handler or another thread; may be NULL */
} gen_options;

typedef enum gen_finish { GEN_STOP, GEN_LENGTH, GEN_CONTEXT, GEN_CALLER, GEN_CANCEL } gen_finish;

typedef struct gen_result {
    gen_finish finish;
    int prompt_tokens, cached_tokens, output_tokens;
    double prompt_seconds, decode_seconds; /* prompt: until the first token is known */
    /* Speculation, counted before a stop cuts a round (ruling 3). */
    int64_t rounds, drafted, accepted;
    int64_t accepted_at[ENGINE_MAX_DRAFT]; /* rounds that accepted their draft i */
    int64_t drafted_at[ENGINE_MAX_DRAFT];  /* rounds that proposed a draft i */
    int64_t out_of_list;                   /* output tokens that the draft head has no row for */
} gen_result;

/* Process what session_set left unprocessed, then generate. Errors: E-SAMPLE-PARAM, E-SAMPLE-MASKED, E-ENGINE-NONFINITE,
 * E-MACHINE-MEMORY, device errors. */
NODISCARD bool session_generate(session *s, const gen_options *opt, gen_result *out, err *e);
/* (accepted + rounds) / rounds, or 0 without rounds. */
double gen_accept_length(const gen_result *r);
const char *gen_finish_name(gen_finish f); /* "stop" "length" ... in OpenAI's words */

#endif
