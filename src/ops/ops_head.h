/* ops_head.h - what the backends share of heads: the handle, its bounds, choosing the largest. Internal to ops/. */
#ifndef NIBBLE_OPS_HEAD_H
#define NIBBLE_OPS_HEAD_H

#include "kern/screen.h"
#include "ops/ops_impl.h"

struct lm_head {
    linear full; /* the caller's data, `rows` rows of it */
    int rows, cols;
    int64_t stride; /* of a row of codes */
    void *block;    /* of mem_new: everything below; NULL: not screened */
    size_t bytes;
    int8_t *codes; /* [rows, stride] */
    /* |logit - scale step (Q . q)| <= per_norm |h| + per_rest |h - step q| + rounding (head_bound) */
    float *scale, *per_norm, *per_rest;
    int32_t *sums; /* of codes */
    bool finite;   /* no row of the copy has NaN or Inf */
    head_counts counts;
};

/* A handle without a copy. */
lm_head *head_plain(const linear *full, int rows);
/* Room for the copy of every row. */
NODISCARD bool head_room(lm_head *h, ops *o, err *e);
/* The copy of row n, already upcast to w [cols]. False: NaN or Inf in it. */
bool head_pack_row(lm_head *h, const screen_kern *k, int n, const float *w);
int head_cols(const lm_head *h);

/* One row of inputs against the copy. */
typedef struct head_input {
    int16_t *q;
    uint8_t *high, *low;     /* [stride] each */
    double step, norm, rest; /* norm >= |h|, rest >= |h - step q| */
} head_input;
/* Fill x (whose buffers are set) from h. False: too large or too small to be screened. */
bool head_input_make(head_input *x, const lm_head *h, const float *hidden);
/* lower[i] <= logit of row n + i <= upper[i] for i < count, from dots[i] = Q . q. */
void head_bound(float *lower, float *upper, const lm_head *h, const head_input *x, const int64_t *dots, int n,
                int count);

bool head_finite(const float *v, int n);
/* Ids that may be in the top: allowed and not extra. mask [(rows + 63) / 64]. CHECKs the extra ids. */
void head_mask(uint64_t *mask, int rows, const head_query *q);
/* a before b: value descending, id ascending, NaN last. */
static inline bool head_before(float a, int32_t ia, float b, int32_t ib) {
    if (a > b) return true;
    if (a < b) return false;
    const bool nan_a = a != a, nan_b = b != b;
    return nan_a == nan_b ? ia < ib : nan_b;
}
/* Insert into the best *n <= k so far, in order. */
static inline void head_take(int32_t *ids, float *logits, int k, int *n, int32_t id, float logit) {
    if (*n == k && !head_before(logit, id, logits[k - 1], ids[k - 1])) return;
    int at = *n < k ? (*n)++ : k - 1;
    for (; at > 0 && head_before(logit, id, logits[at - 1], ids[at - 1]); at--) {
        logits[at] = logits[at - 1];
        ids[at] = ids[at - 1];
    }
    logits[at] = logit;
    ids[at] = id;
}
/* The places behind the first n: id -1, logit NaN. */
void head_no_more(int32_t *ids, float *logits, int n, int k);

#endif
