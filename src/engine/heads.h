/* heads.h - cheaper ways to read the output head: exact top logits through a screen, and a small head for drafts.
 *
 * The screened head returns the very logits of the full head (NUMERICS 8). The draft head only proposes: a token it
 * does not list, or ranks otherwise, costs acceptance and never changes the output. */
#ifndef NIBBLE_HEADS_H
#define NIBBLE_HEADS_H

#include "engine/id_set.h"
#include "model/weights.h"
#include "ops/ops.h"

typedef enum head_mode { HEAD_AUTO, HEAD_FULL, HEAD_SCREENED } head_mode; /* AUTO: screened from 64 MB on */

enum { DRAFT_HEAD_AUTO = 0, DRAFT_HEAD_FULL = -1, DRAFT_HEAD_LAST = 512, DRAFT_HEAD_OWN = 2048 };

typedef struct heads_options {
    head_mode mode;
    /* Rows of the draft head: the first ids (merges come in order of frequency) besides the last DRAFT_HEAD_LAST, where the
     * added tokens are. DRAFT_HEAD_AUTO: 65536 when the vocabulary has more than twice as many. */
    int draft_rows;
} heads_options;

typedef struct net_heads {
    ops *o;
    int vocab;     /* ids that may be chosen */
    lm_head *top;  /* exact top logits; NULL: the full head is read */
    linear *draft; /* NVFP4 [draft_rows, H]; NULL: drafts come from the exact head */
    int draft_first, draft_rows;
    lm_head *exact;          /* single rows of the full head beside those of `draft`; NULL without one */
    uint8_t *codes, *scales; /* of draft, when the device reads them in place */
} net_heads;

/* `head` is the prepared full head, `m` its tensor. Errors: E-MACHINE-MEMORY. */
NODISCARD bool heads_open(net_heads *h, ops *o, const linear *head, const wmat *m, int vocab, const heads_options *opt,
                          err *e);
/* Are the first rows of a plain matrix (BF16, F32, F16) finite? Reads them once. */
bool wmat_finite(const wmat *m, int rows);
/* What heads_open will allocate for them. */
void heads_bytes(int64_t *screen, int64_t *draft, const wmat *m, int vocab, const heads_options *opt);
void heads_close(net_heads *h);
size_t heads_draft_bytes(const net_heads *h);
/* The id behind row i of the draft head, and whether an id has a row. */
int32_t heads_draft_id(const net_heads *h, int i);
bool heads_drafts(const net_heads *h, int32_t id);
/* Ids that have no row go to `own` (of DRAFT_HEAD_OWN places): what a sequence has said or was told may come again, so its
 * drafts are chosen among these too, by exact rows of the full head. Nothing for a closed set. */
void heads_note(const net_heads *h, id_set *own, const int32_t *ids, int n);

#endif
