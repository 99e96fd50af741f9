/* rule.h - a constraint on what a request may generate, asked position by position.
 *
 * The engine knows no text: whoever makes the request says which ids may come next (text/grammar.h does). What is drawn is
 * drawn from the allowed ids alone; drafts are chosen among them too, so they are accepted as often as without a rule. The
 * output does not depend on drafts, batching or preemption as long as a mask depends only on the tokens before it. */
#ifndef NIBBLE_RULE_H
#define NIBBLE_RULE_H

#include "base/err.h"

/* Called on the thread that steps the loop. mask NULL: no constraint. */
typedef struct token_rule {
    /* Which ids may follow what `choice` accepted and then ahead[0..n) (drafts, each allowed where it stands): bit id % 64 of
     * allowed[id / 64], (vocab + 63) / 64 words, at least one id. False ends the choice with this error. */
    bool (*mask)(void *ctx, int choice, const int32_t *ahead, int n, uint64_t *allowed, err *e);
    /* The choice got its next token; called before its on_token. May be NULL. */
    void (*accept)(void *ctx, int choice, int32_t id);
    void *ctx; /* outlives the request */
} token_rule;

static inline size_t rule_words(int vocab) { return ((size_t)vocab + 63) / 64; }
static inline bool rule_allows(const uint64_t *allowed, int32_t id) { return allowed[id / 64] >> (id % 64) & 1; }

#endif
