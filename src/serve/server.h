/* server.h - `nibble serve`: one event thread for HTTP, one that prepares prompts, and the engine's. */
#ifndef NIBBLE_SERVER_H
#define NIBBLE_SERVER_H

#include "base/args.h"
#include "engine/engine.h"
#include "serve/http.h"

typedef struct serve_options {
    const char *dir;  /* the model */
    const char *host; /* "127.0.0.1" */
    int port;
    const char *name;       /* under /v1/models; NULL: the directory's */
    arg_strings aliases;    /* other names */
    arg_strings api_keys;   /* none: open */
    arg_strings cors;       /* allowed origins, "*" for all; none: no CORS headers */
    const char *access_log; /* path, "-" for standard error, NULL: none */
    bool log_prompts;       /* the access log holds prompts */
    http_limits limits;
    int max_queue;           /* choices that may wait for a slot */
    int max_preparing;       /* requests that may wait to be prepared */
    double deadline_seconds; /* of a request; 0 = none */
    double drain_seconds;    /* after SIGTERM; 0: until all have finished */
    int thinking;            /* default of enable_thinking: -1 as the template has it */
    bool selftest;           /* engine_selftest_all before the first request, not the short one */
    engine_options engine;
    loop_options loop;
    const char *version, *commit;
    /* The sampling defaults of an opened engine; `ctx` is the caller's. Errors: E-SAMPLE-PARAM, E-USAGE. */
    bool (*defaults)(void *ctx, sampler_params *out, const engine *g, err *e);
    void *ctx;
} serve_options;

/* Listens, loads, serves; returns after SIGTERM or SIGINT and the drain. *code: 0, or 130 when a second signal cut it
 * short. Errors: E-SERVE-BIND, E-SERVE-EVENTS, those of engine_open and loop_open, E-SERVE-LOG. Says: N-SERVE-READY,
 * N-SERVE-DRAIN, W-SERVE-OPEN (reachable from outside without a key), W-SERVE-IGNORED. */
NODISCARD bool server_run(const serve_options *o, int *code, err *e);

#endif
