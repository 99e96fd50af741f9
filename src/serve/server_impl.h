/* server_impl.h - the server's own state, for server.c and the endpoints that report it. Private to serve/. */
#ifndef NIBBLE_SERVER_IMPL_H
#define NIBBLE_SERVER_IMPL_H

#include <pthread.h>

#include "serve/api.h"
#include "serve/metrics.h"
#include "serve/server.h"
#include "text/grammar.h"

typedef enum server_state { SERVER_LOADING, SERVER_READY, SERVER_DRAINING } server_state;

typedef struct server {
    const serve_options *o;
    struct event_base *base;
    http *h;
    job_bridge *bridge;
    server_state state;
    int code;
    err fault; /* why the server ends, when it does not end well */
    /* loading */
    pthread_t loader;
    bool loading;
    engine *g;
    loop *l;
    grammar_vocab *vocab;
    double started, load_seconds;
    chat_model model;
    char *name;
    /* preparing: a thread and its queue */
    pthread_t preparer;
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct prepared *queue, **queue_end;
    bool stop;
    int n_preparing;
    /* chats with a call */
    chat *chats;
    int n_chats;
    chat_env env;
    metrics counts;
    int log_fd;
    int64_t log_lost;          /* lines that could not be written */
    arg_strings ignored_names; /* unknown fields said already */
    struct event *tick, *sigterm, *sigint, *sighup;
    double drain_since;
    bool cut_off;       /* what ran longer than --drain was told so */
    int64_t last_steps; /* of the engine, and when they last changed */
    double last_progress;
    loop_pulse pulse; /* as last felt, and how many beats of `tick` ago it changed */
    int silent_ticks;
} server;

/* Is the engine thread getting somewhere? False: work is pending and no step ended for a while. */
bool server_engine_alive(server *s);

/* Does the engine thread live? False within a second of its getting stuck, also in the middle of a step; a step that takes
 * long is none. */
bool server_engine_beats(server *s);

/* admin.c: answers of GET endpoints; false when the path is none of them. */
bool admin_request(server *s, http_call *c, str path);
bool admin_has(str path); /* is there such an endpoint? */
void admin_preflight(server *s, http_call *c);
void admin_cors(server *s, http_call *c);
bool admin_authorized(server *s, http_call *c);

/* What was loaded, on standard error, and `ready http://...`. */
void server_start_page(server *s);
/* `,"formats":{...},"kv_scales":{...}` */
void server_write_formats(buf *b, const server *s);
/* What inputs of quantized Linears are rounded to: `fp4`, `int8`, `bf16` (not at all), ..., several joined by '+'. */
const char *server_act_name(const engine *g);

/* log.c: one line of the access log. */
void access_log(server *s, http_call *call, const chat *c);
NODISCARD bool access_log_open(server *s, err *e);

#endif
