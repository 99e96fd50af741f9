/* ask.h - one request at a time through the engine's loop, as run and chat make it. */
#ifndef NIBBLE_ASK_H
#define NIBBLE_ASK_H

#include "base/buf.h"
#include "cmd/cmd.h"

/* The first member of the context that a request's callbacks get. */
typedef struct cmd_turn {
    gen_result r;
    err fault;
    bool ended;
} cmd_turn;

/* on_done of such a request. */
void cmd_turn_done(void *ctx, int choice, const gen_result *r, const err *e);
/* Submits q, whose ctx begins with *t, and steps until it is over; Ctrl-C ends it with GEN_CANCEL. Errors: those of
 * loop_submit and of the request. */
NODISCARD bool cmd_ask(loop *l, cmd_turn *t, const loop_request *q, err *e);
/* "usage":{...},"timings":{...},"speculative":{...}: of an answer that could have up to `depth` drafts per round. */
void cmd_write_result(buf *b, const gen_result *r, int depth, double load_seconds, const loop_stats *stats);

#endif
