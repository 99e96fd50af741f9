/* forward.h - the model: embedding, layers, final norm, head, and the draft layer. No arithmetic here, only ops.
 *
 * A batch is a list of spans over rows. Every row's result depends only on its own sequence (NUMERICS), so chunking and
 * batching never change bits. */
#ifndef NIBBLE_FORWARD_H
#define NIBBLE_FORWARD_H

#include "engine/state.h"

/* Scratch for up to `rows` rows of one pass; owned by one thread. All pointers but `host` are device memory. */
typedef struct scratch {
    const net *n;
    int rows, head_rows; /* capacity in rows; rows that the head takes at once */
    int32_t *ids, *pos3, *idx;
    float *x;               /* [rows, H] residual stream */
    float *h;               /* [rows, H] normed input of a half layer */
    float *hidden;          /* [1 + rows, H]: row 0 is the caller's, rows 1.. are the trunk's final-norm output */
    float *pair;            /* [rows, 2H] the draft layer's [embedding | hidden] */
    float *mtp_hidden;      /* [rows, H] the draft layer's output after mtp.norm */
    float *wide[4];         /* [rows, widest projection] each */
    float *gate_a, *gate_b; /* [rows, lin_v_heads] */
    float *wt;              /* [rows, topk] */
    float *logits;          /* [head_rows, vocab] */
    int32_t *choice;        /* [head_rows] */
    int32_t *host;          /* [rows, 3] staging */
    float *draft_logits;    /* [head_rows] host */
    float *own_logits;      /* [head_rows, DRAFT_HEAD_OWN] host; NULL without a draft head */
    head_query *own;        /* [head_rows] */
} scratch;

/* Device memory that scratch_open will ask for. */
int64_t scratch_bytes(const model_config *c, int rows, int head_rows);
NODISCARD bool scratch_open(scratch *out, const net *n, int rows, int head_rows, err *e);
void scratch_close(scratch *s);

/* Trunk over the spans' rows: ids [rows] host. Leaves the final-norm output in s->hidden + H (row 1 on).
 * pos3 NULL: text positions (pos0 + i on all three axes), else [rows, 3] host. */
void forward_trunk(scratch *s, seq_state *st, const int32_t *ids, const int32_t *pos3, const ops_span *spans,
                   int n_spans);

/* The same in steps, for passes that go through the network layer by layer: begin uploads ids and positions and checks the
 * spans (host memory that must outlive the pass); embed fills s->x; each layer advances s->x; norm leaves the final-norm
 * output in s->hidden + H. */
typedef struct pass {
    scratch *s;
    seq_state *st;
    const ops_span *spans;
    int n_spans, rows;
} pass;
pass forward_begin(scratch *s, seq_state *st, const int32_t *ids, const int32_t *pos3, const ops_span *spans,
                   int n_spans);
void forward_embed(const pass *p);
void forward_layer(const pass *p, int layer);
void forward_norm(const pass *p);

/* Draft layer over the spans' rows: next [rows] host = the token AFTER each slot, hidden [rows, H] device = trunk or
 * draft output at the slot (post-norm both). Output in s->mtp_hidden; hidden may be s->mtp_hidden. KV goes to the draft
 * layer's own cache. */
void forward_mtp(scratch *s, seq_state *st, const int32_t *next, const float *hidden, const ops_span *spans,
                 int n_spans);

/* logits [rows, vocab] = head(hidden) into s->logits, rows <= head_rows. */
void forward_logits(scratch *s, const float *hidden, int rows);
/* The same over real ids only, at row stride real_vocab, rows <= head_rows. */
void forward_real_logits(scratch *s, const float *hidden, int rows);
/* The k best ids and logits of each row through the screened head: ops.h head_top -> host ids, logits [rows, k]; q [rows] and
 * extra as there, or NULL. Waits. */
NODISCARD bool forward_top(scratch *s, int32_t *ids, float *logits, float *extra, const float *hidden, int rows, int k,
                           const head_query *q, err *e);
/* A proposal for each row: the draft head's argmax or one of the row's own ids (heads_note; own [rows], host) whose exact
 * logit is larger; without a draft head the exact head's argmax. rows <= head_rows. Waits. */
NODISCARD bool forward_draft(scratch *s, int32_t *ids, const float *hidden, const id_set *const *own, int rows, err *e);
/* Another proposal for row `row` of the forward_draft just done, among the allowed ids (bits as in rule.h); some allowed id
 * when the draft head has none of them. hidden: its row; room [real_vocab] host floats. Waits. */
NODISCARD bool forward_redraft(scratch *s, int32_t *id, int row, const float *hidden, const uint64_t *allowed,
                               float *room, err *e);
/* forward_real_logits, then the argmax of each row -> host choice[rows]. Any number of rows. Waits. */
NODISCARD bool forward_argmax(scratch *s, int32_t *choice, const float *hidden, int rows, err *e);

#endif
