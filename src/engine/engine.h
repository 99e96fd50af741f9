/* engine.h - the door: a loaded model and its sequences.
 *
 * An engine owns the mapped checkpoint, the device and the state of `slots` sequences. A session is one sequence, driven
 * call by call; a loop serves many requests at once. Same request, same seed, same bytes: generation does not depend on
 * chunk size, threads, ISA, on whether drafts are used, or on what else is being served.
 *
 * One thread at a time owns an engine and everything made from it: the caller's, or between loop_start and loop_stop the
 * loop's. Functions marked "any thread" are the exceptions; tok and tmpl are immutable. Close in the order loop or session,
 * engine; NULL (of a session: a zeroed one) and what failed to open may be closed. What can fail fills an err (zeroed by the
 * caller) and leaves nothing half open. An engine is never in a failed state: a request fails, or with a device error all
 * that run, and the next one is tried anew. docs/EMBEDDING.md, examples/embed.c. */
#ifndef NIBBLE_ENGINE_H
#define NIBBLE_ENGINE_H

#include "engine/forward.h"
#include "engine/memory.h"
#include "engine/rule.h"
#include "engine/sampler.h"
#include "text/template.h"
#include "text/tokenizer.h"

enum { ENGINE_MAX_DRAFT = 5, ENGINE_TEST_TOKENS = 32 };

/* KV_CACHE_AUTO: FP8 when the export declares it, else float32. */
typedef enum kv_mode { KV_CACHE_AUTO, KV_CACHE_F32, KV_CACHE_BF16, KV_CACHE_FP8 } kv_mode;

/* Copied, but not the strings in ops: they live as long as the engine. A zeroed one with ops.isa = ISA_COUNT is all defaults. */
typedef struct engine_options {
    ops_options ops;
    int ctx;      /* positions per sequence; 0 = min(the model's limit, 32768) */
    int slots;    /* sequences; 0 = 1 */
    int chunk;    /* prompt rows per pass; 0 = 512, or what the device wishes */
    kv_mode kv;   /* KV cache */
    act_mode act; /* inputs of quantized Linears */
    heads_options heads;
    int64_t kv_bytes; /* KV of all sequences; less than full contexts makes a loop preempt; 0 = full contexts */
    int64_t prefix_kv_bytes, prefix_state_bytes; /* for what a loop keeps of finished prompts; 0 = nothing */
    int64_t memory_bytes;                        /* refuse to plan for more; 0 = what is available */
    bool need_text;  /* tokenizer and template must be there; otherwise they are loaded when present */
    bool no_text;    /* do not look for them: every vocabulary row counts as real */
    bool any_values; /* for those who look for NaN and Inf: routers that hold them are no E-ENGINE-ROUTER */
    void (*edit)(void *ctx,
                 weights *w); /* for experiments: change bound weights before they are prepared; may be NULL */
    void *edit_ctx;
} engine_options;

/* Callers read files, config, tok, tmpl, kv_type, plan; the rest is the engine's own affair. */
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
    act_mode act;
    dtype kv_type;      /* of the trunk's caches */
    float *host_logits; /* [scratch head_rows, real_vocab] */
    uint8_t *slot_used; /* [slots] */
    int pages_left;     /* of KV that neither a session nor a loop has laid claim to */
    int prefix_pages;   /* the most of them that a loop's prefix cache holds */
    uint64_t *masks;    /* [scratch head_rows, rule_words]; NULL until a request has a rule */
    head_query *asked;  /* [scratch head_rows] with allowed in masks or NULL */
    memory_plan plan;
} engine;

/* Errors: those of ckpt, config, weights, tokenizer, template, ops; E-ENGINE-ROUTER, E-MACHINE-MEMORY. */
NODISCARD bool engine_open(engine **out, const char *dir, const engine_options *opt, err *e);
/* The same over weights that are already in memory, without tokenizer and template. `name` stands for the directory in
 * messages. Takes *w over (it is zeroed, also on failure); what its matrices point to must outlive the engine. */
NODISCARD bool engine_open_weights(engine **out, const char *name, weights *w, const model_config *c,
                                   const engine_options *opt, err *e);
void engine_close(engine *g);
/* Row `row` of g->asked: what a rule allows behind ahead[0..n). A zeroed rule allows all. False: it allows nothing, or
 * fails. Allocates at the first call with a rule. */
NODISCARD bool engine_ask(engine *g, int row, const token_rule *rule, int choice, const int32_t *ahead, int n, err *e);
/* A draft (row `row` of the forward_draft just done, made from `hidden`) that the rule does not allow behind ahead[0..n)
 * becomes one that it does. */
NODISCARD bool engine_redraft(engine *g, int32_t *id, int row, const float *hidden, const token_rule *rule, int choice,
                              const int32_t *ahead, int n, err *e);
/* Greedy answers of `tokens` tokens (1 to ENGINE_TEST_TOKENS) to built-in prompts, as many together as there are slots: with
 * up to `depth` drafts per round they must be those without, and the draft layer's memory must differ from the model's. Needs a
 * slot that is not in use. Errors: E-SPEC-CORRUPT, E-ENGINE-NONFINITE, E-ENGINE-SLOTS, E-MACHINE-MEMORY, device errors. */
NODISCARD bool engine_selftest(engine *g, int depth, int tokens, err *e);
/* The same with ENGINE_TEST_TOKENS tokens, then each answer once more alone: the same again. Says N-SPEC-TESTED with what was
 * compared and the seconds. */
NODISCARD bool engine_selftest_all(engine *g, int depth, err *e);
/* Can these tokens be a prompt? Errors: E-ENGINE-EMPTY, E-ENGINE-CONTEXT (n >= ctx), E-ENGINE-TOKEN (id outside the
 * vocabulary). */
NODISCARD bool engine_check_prompt(const engine *g, const int32_t *ids, int n, err *e);

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
    id_set own;   /* of the tokens: those the draft head has no row for; closed without one */
} session;

/* A fresh sequence. `drafting` needs a model with an MTP head. Errors: E-ENGINE-SLOTS, E-MACHINE-MEMORY. */
NODISCARD bool session_open(session *out, engine *g, bool drafting, err *e);
void session_close(session *s);
void session_reset(session *s);
/* Make the known tokens equal ids[0..n). What is already processed is kept when it is a prefix, else all is recomputed
 * (a recurrent state cannot be cut back). Errors: those of engine_check_prompt. */
NODISCARD bool session_set(session *s, const int32_t *ids, int n, err *e);

typedef struct gen_round { /* one verification, as in the oracle's greedy.json */
    int32_t known, draft[ENGINE_MAX_DRAFT], target[ENGINE_MAX_DRAFT + 1];
    int depth, accepted;
} gen_round;

typedef struct gen_options {
    int max_tokens; /* 0 = until the context is full */
    int depth;      /* drafts per round, 0..ENGINE_MAX_DRAFT; 0 when the session does not draft */
    sampler_params sampling;
    token_rule rule;     /* what may be generated, as choice 0; zeroed = anything */
    const int *stop_ids; /* generation ends with (and includes) one of these */
    int n_stop_ids;
    int logprobs; /* top entries per token, 0 = off */
    /* Each new token in order; return false to end. logprobs NULL unless asked: [n] best first. */
    bool (*on_token)(void *ctx, int32_t id, double logprob, const int32_t *top_ids, const double *top_logprobs);
    void (*on_round)(void *ctx, const gen_round *r); /* may be NULL */
    /* For benchmarks of models that were never trained: how many of a round's `depth` drafts count as accepted, whatever was
     * drawn; these drafts are then the output. NULL: as verified. */
    int (*simulate)(void *ctx, int depth);
    void *ctx;
    volatile const int *cancel; /* set to non-zero from a signal handler or another thread; may be NULL */
} gen_options;

typedef enum gen_finish { GEN_STOP, GEN_LENGTH, GEN_CONTEXT, GEN_CALLER, GEN_CANCEL, GEN_DEADLINE } gen_finish;

typedef struct gen_result {
    gen_finish finish;
    int prompt_tokens, cached_tokens, output_tokens;
    double prompt_seconds, decode_seconds; /* prompt: until the first token is known */
    /* Speculation, counted before a stop cuts a round (ruling 3). */
    int64_t rounds, drafted, accepted;
    int64_t accepted_at[ENGINE_MAX_DRAFT]; /* rounds that accepted their draft i */
    int64_t drafted_at[ENGINE_MAX_DRAFT];  /* rounds that proposed a draft i */
    int64_t out_of_list;                   /* output tokens that no draft could be: no row, and not said before */
} gen_result;

/* Process what session_set left unprocessed, then generate. Errors: E-SAMPLE-PARAM, E-SAMPLE-MASKED, E-ENGINE-NONFINITE,
 * E-MACHINE-MEMORY, those of the rule, device errors. */
NODISCARD bool session_generate(session *s, const gen_options *opt, gen_result *out, err *e);
/* (accepted + rounds) / rounds, or 0 without rounds. */
double gen_accept_length(const gen_result *r);
const char *gen_finish_name(gen_finish f); /* "stop" "length" ... in OpenAI's words */

/* ---- many requests at once ---- */

/* Serves requests in one pass per step: a few rows of every sequence that generates, and pieces of the prompts that wait, so
 * that neither holds up the other. A request is served in the order of arrival within its priority. When all slots are
 * taken, one of higher priority takes the slot of the newest of the lowest priority, which is recomputed later: the same
 * bytes. A request that fails (E-ENGINE-NONFINITE) fails alone. No step allocates once its buffers have grown. */
typedef struct loop loop;

/* Copied, but not prefix_dir: it lives as long as the loop. A zeroed one is all defaults, without drafts. */
typedef struct loop_options {
    int budget_rows; /* rows of a pass; 0 = as many as the engine's scratch holds (chunk + slots). Raised to one row per
                      * sequence and one of a prompt, the least with which everything goes on */
    int depth;       /* most drafts per round, 0..ENGINE_MAX_DRAFT; 0 without a draft head */
    bool
        fixed_depth; /* always that many; else as many as the measured acceptance and seconds per step make worthwhile */
    int max_queue;   /* choices that may wait for a slot; 0 = 1024 */
    /* A folder that takes the prefix cache's entries when they go for room or the loop is closed, and gives them back, also
     * to a later process with the same model and settings; at most so many bytes, 0 = 16 GB. NULL: none */
    const char *prefix_dir;
    int64_t prefix_dir_bytes;
    int prefix_every; /* with a prefix cache (engine_options): tokens between states kept of a long prompt; 0 = 4096 */
    /* As in gen_options, for benchmarks of models that were never trained; without penalties and rules. NULL: as verified */
    int (*simulate)(void *ctx, int depth);
    void *simulate_ctx;
    /* On the thread that steps the loop, at the end of a step, when its callbacks were called and loop_counted tells of it;
     * NULL: none */
    void (*on_step)(void *ctx);
    void *on_step_ctx;
} loop_options;

/* A request. Callbacks run on the thread that steps the loop, in the middle of a step and without a lock held: they may submit
 * and cancel, not step, stop or close; their time is everyone's. What they are given lives until they return. ctx and rule.ctx
 * live until on_done of the last choice, the rest may go when loop_submit returns. A zeroed one is greedy, without drafts. */
typedef struct loop_request {
    const int32_t *prompt; /* [n_prompt] copied */
    int n_prompt;
    const int *marks; /* [n_marks] copied: lengths in (0, n_prompt], rising, at which others may go on in another way
                              * (ends of messages): the prefix cache keeps the state there. NULL: none */
    int n_marks;
    sampler_params sampling; /* bias and stop ids are copied; choice i draws as sampling.choice + i */
    token_rule rule;         /* what may be generated; zeroed = anything */
    int choices;             /* answers to the one prompt, which is processed once when they start together; 0 = 1 */
    int max_tokens;          /* 0 = until the context is full */
    int depth;               /* most drafts per round of this request; -1 = the loop's */
    int priority;            /* higher goes first */
    double deadline_seconds; /* on clock_seconds; what is not done by then ends with GEN_DEADLINE; 0 = none */
    const int *stop_ids;     /* [n_stop_ids] copied; generation ends with (and includes) one of these */
    int n_stop_ids;
    int logprobs; /* top entries per token, at most 64; 0 = off */
    /* As in gen_options, for choice 0.. of `choices`. */
    bool (*on_token)(void *ctx, int choice, int32_t id, double logprob, const int32_t *top_ids,
                     const double *top_logprobs);
    void (*on_prompt)(void *ctx, int choice, int done, int total); /* progress of a long prompt; may be NULL */
    /* With logprobs above 0: once for every token prompt[at], at > 0, in order and before the first token of any choice: its
     * log-probability behind those in front of it, and the best entries there, as in on_token. The request takes nothing
     * from the prefix cache and leaves nothing there. May be NULL. */
    void (*on_prompt_token)(void *ctx, int at, int32_t id, double logprob, const int32_t *top_ids,
                            const double *top_logprobs);
    /* As in gen_options; may be NULL. It makes rounds whole and draws at all their positions. */
    void (*on_round)(void *ctx, int choice, const gen_round *r);
    /* Draft as deep as ever where max_tokens is near, so that rounds are those of the oracle's traces; else as much as may
     * still be wanted. The tokens are the same. */
    bool whole_rounds;
    /* Once per choice; then nothing more of it is called. e->id is NULL unless the choice failed: E-ENGINE-NONFINITE,
     * E-SAMPLE-MASKED, E-MACHINE-MEMORY, those of the rule, device errors. */
    void (*on_done)(void *ctx, int choice, const gen_result *r, const err *e);
    void *ctx;
} loop_request;

enum { LOOP_ROWS_CLASSES = 16 };
/* Passes of 1 to 8 rows are told apart; then up to 16, 32, 64 ... rows; the last place has all that is larger. */
int loop_rows_class(int rows);
/* The most rows of a class below the last. */
int loop_rows_class_most(int class);

typedef struct loop_stats {
    int running, waiting;                  /* choices */
    int slots, kv_pages, kv_used, kv_kept; /* kept: of the used pages those that the prefix cache holds */
    int64_t submitted, finished, cancelled, failed, expired, preempted, shared; /* choices; shared: prompt taken over */
    int64_t steps, prompt_rows, decode_rows, output_tokens;
    /* The prefix cache: prompts that took up an entry, and the tokens saved; entries, their bytes; entries left so far, gone
     * for room, gone because their sequence came out not finite. */
    int64_t prefix_hits, prefix_tokens, prefix_entries, prefix_bytes, prefix_made, prefix_evicted, prefix_forgotten;
    int64_t prefix_files, prefix_file_bytes, prefix_loaded; /* in the folder; read from it so far */
    int64_t rounds, drafted, accepted;                      /* a draft that is not accepted is a wasted row */
    int64_t drafted_at[ENGINE_MAX_DRAFT], accepted_at[ENGINE_MAX_DRAFT];
    int64_t depth_steps[ENGINE_MAX_DRAFT + 1]; /* passes with generating sequences, by drafts per round */
    /* Routed experts read: of the trunk's passes with about so many rows (places as in loop_rows_class), layers, and the
     * different experts that these read. 0 where the device does not count. */
    int64_t moe_layers[LOOP_ROWS_CLASSES], moe_experts[LOOP_ROWS_CLASSES];
    /* Alarms, each also said once in the log. Windows of 200 rounds with an accept length below 1.2 (W-SPEC-FLOOR); windows of
     * 200 rounds and four prompts of which 99 % accepted all drafts (W-SPEC-PINNED), the 1st, 2nd, 4th ... of which starts a
     * self-test; self-tests that failed (E-SPEC-CORRUPT): then choices that drafted and still run fail with it, the prefix
     * cache is emptied, and the loop goes on without drafts. */
    int64_t spec_floor, spec_pinned, spec_corrupt;
    double step_seconds; /* in steps that did something */
    double work_seconds; /* of these: in the model (with what moves its rows), in sampling and in callbacks */
} loop_stats;

/* Takes all slots of the engine that no session holds. Errors: E-ENGINE-SLOTS (none), E-MACHINE-MEMORY. */
NODISCARD bool loop_open(loop **out, engine *g, const loop_options *opt, err *e);
/* What is not finished ends with GEN_CANCEL: callbacks come from here. The owner thread, or the one that called loop_start; NULL
 * is fine. */
void loop_close(loop *l);
/* Any thread. *handle (may be NULL) names the request for loop_cancel; callbacks can come before this returns. Errors:
 * E-SAMPLE-PARAM, E-ENGINE-EMPTY, E-ENGINE-CONTEXT, E-ENGINE-TOKEN, E-ENGINE-REQUEST, E-ENGINE-QUEUE, E-MACHINE-MEMORY. */
NODISCARD bool loop_submit(loop *l, uint64_t *handle, const loop_request *r, err *e);
/* Any thread. All choices end with GEN_CANCEL before their next token; nothing happens when the request is over. */
void loop_cancel(loop *l, uint64_t handle);
/* Any thread: as of the end of the last step or choice; a choice is counted before its on_done. */
loop_stats loop_counted(loop *l);
/* Any thread: a sign of life from the thread of loop_start. It beats between steps, and ten times a second while there is
 * nothing to do; a step, however long, takes processor time. When neither changes the thread is stuck. Takes no lock. */
typedef struct loop_pulse {
    uint64_t beats;
    int64_t cpu_ns; /* -1: the thread is gone */
} loop_pulse;
loop_pulse loop_feel_pulse(const loop *l);
/* One step, on the owner thread; false when there was nothing to do. */
bool loop_step(loop *l);
/* For benchmarks, between steps: depth and fixed_depth of the options for requests that come after this. */
void loop_set_depth(loop *l, int depth, bool fixed);
/* A thread that steps, and sleeps while there is nothing to do; it is the owner until loop_stop, which ends it between two
 * steps. Error: E-MACHINE-THREADS. */
NODISCARD bool loop_start(loop *l, err *e);
void loop_stop(loop *l);

#endif
