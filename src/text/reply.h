/* reply.h - generated ids to what a person or an API sees: thought, text, tool calls, stop strings.
 *
 * Chains the streaming detokenizer, the stop-string filter and the splitter. What might still become a stop string
 * is held back; a completed one is not shown. */
#ifndef NIBBLE_REPLY_H
#define NIBBLE_REPLY_H

#include "text/split.h"
#include "text/tokenizer.h"

typedef struct reply {
    const tokenizer *t;
    detok d;
    split *s;          /* NULL: plain */
    buf raw;           /* decoded, not yet released: may begin a stop string */
    buf text, thought; /* all so far */
    buf calls;         /* JSON array elements, comma-separated: OpenAI's tool_calls */
    buf args;          /* of the call that is being read */
    int n_calls;
    bool cut; /* the generation ended inside the last call */
    const char *const *stops;
    int n_stops;
    int min_tokens, n_tokens; /* stop strings are looked for in what comes behind the first min_tokens ids */
    bool stopped;             /* a stop string completed */
    int stop;                 /* which of stops, else -1 */
    void (*on_piece)(void *ctx, split_kind kind, str piece); /* the splitter's events as they come; may be NULL */
    void *ctx;
} reply;

/* thinking: the prompt ends inside a thinking block. tools: the request's array or NULL. stops [n] borrowed. */
void reply_init(reply *r, const tokenizer *t, bool thinking, const json *tools, const char *const *stops, int n_stops);
/* Nothing is parted from the text: all is SPLIT_TEXT, tags too. */
void reply_init_plain(reply *r, const tokenizer *t, const char *const *stops, int n_stops);
/* False when a stop string completed: the generation should end. */
bool reply_push(reply *r, int32_t id);
void reply_end(reply *r); /* flush everything held back */
void reply_free(reply *r);

#endif
