/* loop_impl.h - the parts of the loop: requests, the queue and what a step does. Private to engine/.
 *
 * One step = take what was submitted, drop what was cancelled, admit, plan, draft, one trunk pass, the draft layer over the
 * prompts' rows, choose and hand out. Everything but the inbox belongs to the owner thread. */
#ifndef NIBBLE_LOOP_IMPL_H
#define NIBBLE_LOOP_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/choose.h"
#include "engine/depth.h"
#include "engine/prefix.h"

enum { LOOP_KEEP_ROWS = 128, LOOP_MAX_CHOICES = 128, LOOP_MAX_LOGPROBS = 64 };
enum { SPEC_WATCH_PROMPTS = 4, ALARM_PROMPTS = 4 };

typedef struct request request;

typedef enum seq_phase {
    SEQ_QUEUED,
    SEQ_SHARES, /* has a slot and waits for the prompt of its request's first choice */
    SEQ_PROMPT,
    SEQ_DECODE,
    SEQ_ENDED
} seq_phase;

/* One choice of a request. */
typedef struct seq {
    request *r;
    struct seq *next; /* in the queue */
    int choice;
    seq_phase phase;
    uint64_t order; /* of arrival */
    int slot;       /* -1 in the queue */
    sampler_params sampling;
    int32_t *tokens; /* known tokens: prompt and output */
    int n_tokens, cap;
    int done;      /* positions [0, done) went through the trunk */
    int pending;   /* the last `pending` of them are not yet part of the stored GDN and conv state */
    bool drafting; /* the draft layer follows along */
    int mtp_done;  /* draft slots [0, mtp_done) are final */
    int keep_pos;  /* the slot's kept hidden rows are those of positions [keep_pos, done) */
    history seen;  /* closed unless the request has penalties */
    id_set own;    /* tokens that the draft head has no row for; closed unless there is one to draft with */
    id_set edits;  /* whose logits the request edits; closed unless they are computed apart from the best */
    /* of the prefix cache (reuse.c) */
    uint64_t tried;  /* its version when it was last asked */
    int branch;      /* tokens that are the beginning of an entry too */
    int stop_at;     /* where this step's rows of a prompt end at the latest */
    int first_entry; /* length of the shortest entry that was taken up or left; 0 = none */
    gen_result out;
    /* of this step */
    int rows, row0, depth;
    int32_t draft[ENGINE_MAX_DRAFT];
    err fault;
} seq;

/* What a submitter made; read-only afterwards but for `cancelled` and what the owner counts. */
struct request {
    uint64_t handle;
    request *next, *prev; /* all requests that are not over (under the lock) */
    request *inbox_next;
    loop_request q; /* with its own copies of bias, stop ids and marks */
    int32_t *prompt;
    sampler_bias *bias;
    int32_t *ban_ids; /* sampling.stop_ids */
    int *stop_ids, *marks;
    seq *seqs;  /* [choices] */
    int open;   /* choices that are not over */
    int scored; /* on_prompt_token was called for prompt[1 .. scored] */
    bool own;   /* the loop's: not counted, takes nothing from the prefix cache and leaves nothing there */
    double submitted_at;
    atomic_bool cancelled;
};

/* Acceptance since the last look: at the floor, and at the ceiling. */
typedef struct spec_watch {
    int64_t rounds, accepted, pin_rounds, pin_full;
    uint64_t prompts[SPEC_WATCH_PROMPTS]; /* of the latter, by their sums */
    int n_prompts;
    bool test_due;
    int64_t next_test; /* windows at the ceiling until then */
} spec_watch;

typedef struct spec_test spec_test;

struct loop {
    engine *g;
    loop_options opt;
    int slots;     /* that the loop may use */
    int *slot_of;  /* [slots] the engine's */
    seq **by_slot; /* [slots] NULL: free */
    /* Running choices by (priority descending, arrival). */
    seq **active; /* [slots] */
    int n_active;
    seq *queue; /* in the same order */
    int n_queue;
    int pages;      /* of KV that the loop may use */
    prefix *prefix; /* NULL: nothing is kept */
    depth_model model;
    bool timed; /* this step's seconds say something about its depth */
    int step_depth, n_decode;
    double work_seconds;       /* of this step */
    loop_stats counts, unseen; /* unseen: of its own requests */
    spec_watch watch;
    spec_test *test; /* running, or NULL */
    bool alone;      /* there is nothing but a test */
    /* buffers */
    float *keep;       /* device [slots, LOOP_KEEP_ROWS, H] */
    float *stage;      /* device [scratch rows, H]: inputs of the draft layer, of the head */
    float *drafts;     /* device [slots, H]: what the newest draft of each was made from */
    int32_t *ids;      /* [scratch rows] */
    int32_t *top_ids;  /* [head rows, HEAD_MAX_TOP] */
    float *top_logits; /* of the same */
    /* For requests that edit logits, with a screened head; NULL without. */
    int32_t *edit_ids;  /* [slots, edits_cap]: of each of the group */
    float *edit_logits; /* [head rows, edits_cap] */
    choose_room room;
    int edits_cap;
    int32_t *choice;     /* [slots] */
    ops_span *spans;     /* [slots] */
    seq **group, **todo; /* [slots] */
    const id_set **own;  /* [slots] of the group */
    /* shared with submitters, under the lock */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    request *all, *inbox, **inbox_end;
    uint64_t last_handle, last_order;
    int open; /* choices submitted and not over: bounds the queue */
    loop_stats published;
    atomic_uint_fast64_t beats;
    bool threaded, stop;
    pthread_t thread;
};

/* ---- loop.c ---- */

/* Let others see what was counted so far. */
void loop_publish(loop *l);

/* ---- request.c ---- */

NODISCARD bool request_new(request **out, loop *l, const loop_request *q, err *e);
void request_free(request *r);
/* A request of the loop's own, made on the owner thread, joins the queue. */
void request_adopt(loop *l, request *r);
static inline loop_stats *request_counts(loop *l, const seq *s) { return s->r->own ? &l->unseen : &l->counts; }
/* The choice is over: its slot and place go, on_done is called, the request is freed with its last choice. */
void request_end(loop *l, seq *s, gen_finish finish);
/* The same with s->fault. */
void request_fail(loop *l, seq *s);
/* Hand one token to the caller; logits [real_vocab] of its position when logprobs are asked for. False: it was the last. */
bool request_emit(loop *l, seq *s, int32_t id, const float *logits);

/* ---- sched.c ---- */

void sched_enqueue(loop *l, seq *s);
/* Cancelled and expired choices go. */
void sched_reap(loop *l);
void sched_admit(loop *l);
/* Rows and depth of every running choice in this pass; returns the rows, 0 when nothing runs. */
int sched_plan(loop *l);
/* Take a choice from its slot and the running ones. */
void sched_release(loop *l, seq *s);
/* Remove from the queue. */
void sched_unqueue(loop *l, seq *s);

/* ---- score.c ---- */

/* Of a request with on_prompt_token: what this pass's rows of the prompt say. s->fault when they are not finite; false: the
 * device's error. */
NODISCARD bool score_prompt(loop *l, seq *s, err *e);
static inline bool score_wanted(const request *r) { return r->q.on_prompt_token && r->q.logprobs > 0; }

/* ---- reuse.c ---- */

/* The slot begins: the deepest entry of the prefix cache, or nothing, and pages for all known tokens. False, to be tried
 * again later, when there are too few, or fewer than `spare` besides. */
NODISCARD bool reuse_start(loop *l, seq *s, int spare);
/* The same for a choice that has not begun yet, when the cache has got something new. */
NODISCARD bool reuse_retry(loop *l, seq *s);
/* `n` pages for what a slot is about to take over; entries may go. */
NODISCARD bool reuse_room(loop *l, int n);
/* Pages for positions [0, positions), for which entries may go. */
NODISCARD bool reuse_grow(loop *l, seq *s, int positions);
/* Where the next rows of a prompt must end, because an entry is to be left there: behind s->done, at most n_tokens. */
int reuse_stop(const loop *l, const seq *s);
/* Leave an entry behind the prompt's rows, when they end where one is wanted. */
void reuse_leave_prompt(loop *l, seq *s);
/* The same behind an answer that is complete. */
void reuse_leave_answer(loop *l, seq *s);
/* The choice came out not finite: what it took up or left goes. */
void reuse_forget(loop *l, const seq *s);

/* ---- round.c ---- */

/* Drafts for those with a depth; the draft layer catches up where too many rows wait for it. */
NODISCARD bool round_draft(loop *l, err *e);
void round_trunk(loop *l);
/* Prompt rows through the draft layer; prompts that are complete are shared out to waiting choices. */
NODISCARD bool round_prompts(loop *l, err *e);
/* Tokens for what the pass yielded. */
NODISCARD bool round_choose(loop *l, err *e);

/* ---- alarm.c ---- */

/* A round of s->depth drafts was verified. */
void alarm_round(loop *l, const seq *s, int accepted);
/* Begin the test that plain and drafted answers agree, of so many tokens each. */
NODISCARD bool alarm_test(loop *l, int tokens, err *e);
/* After it, in a loop with nothing else: each answer once more, one request at a time. */
NODISCARD bool alarm_test_alone(loop *l, int tokens, err *e);
/* Its outcome once it is over, true before. Errors: E-SPEC-CORRUPT, those of its requests. */
NODISCARD bool alarm_tested(loop *l, err *e);
/* At the end of a step: tests that are due begin, and what failed one has consequences. */
void alarm_step(loop *l);
void alarm_close(loop *l);

#endif
