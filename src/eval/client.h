/* client.h - many HTTP requests at once to an OpenAI-compatible server, from one thread: what gsm8k --url and load run on.
 * Plain HTTP only; https needs a local proxy. */
#ifndef NIBBLE_CLIENT_H
#define NIBBLE_CLIENT_H

#include "base/buf.h"
#include "base/err.h"

typedef struct client client;

/* url: "http://host[:port][/v1]"; key: sent as a bearer token, may be NULL. seconds: of silence after which a request fails.
 * Errors: E-EVAL-URL. */
NODISCARD bool client_open(client **out, const char *url, const char *key, double seconds, err *e);
void client_close(client *c); /* requests under way are dropped; their on_end is not called */

typedef struct client_call {
    const char *path; /* behind the URL's: "/chat/completions" */
    str body;         /* JSON, copied; empty: GET */
    /* Pieces of a successful answer as they come; may be NULL. */
    void (*on_data)(void *ctx, str piece);
    /* Once. status: 0 when there was no answer. body: of an answer that on_data did not take, or of an error. */
    void (*on_end)(void *ctx, int status, str body);
    void *ctx;
} client_call;
/* Callbacks may send more. A request that cannot even be begun ends with status 0 in the next client_step. */
void client_send(client *c, const client_call *call);
/* Call fn once, `seconds` from now. */
void client_after(client *c, double seconds, void (*fn)(void *ctx), void *ctx);
/* Works until something happened, at most about a tenth of a second. False: nothing is under way and no timer waits. */
bool client_step(client *c);
/* Requests without an end. */
int client_pending(const client *c);

/* The first model that the server at `url` lists, "default" when its answer names none. Waits. Errors: E-EVAL-URL,
 * E-EVAL-SERVER (no answer). */
NODISCARD bool client_first_model(char *out, size_t n, const char *url, const char *key, double seconds, err *e);

/* "data: ..." lines of an event stream out of pieces of any size. */
typedef struct sse_reader {
    buf line;
    void (*on_data)(void *ctx, str data); /* what stands behind "data: " */
    void *ctx;
} sse_reader;
void sse_reader_push(sse_reader *r, str piece);
void sse_reader_free(sse_reader *r);

#endif
