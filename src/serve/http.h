/* http.h - HTTP/1.1 in and out; the only file that knows libevent's evhttp.
 *
 * Everything here runs on the event thread. A call is one request being answered: a handler gets it with its body
 * complete and answers now or later, with one reply or with a stream. A peer that goes away (reset, failed write, both
 * directions closed) is noticed whether or not anything is being written; one that only closes its sending side is still
 * answered. A peer that does not read is cut off after the write timeout. */
#ifndef NIBBLE_HTTP_H
#define NIBBLE_HTTP_H

#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"
#include "serve/fault.h"

typedef struct http http;
typedef struct http_call http_call;
struct event_base;

typedef struct http_limits {
    size_t max_body_bytes, max_header_bytes,
        max_backlog_bytes; /* backlog: written to a call but not yet taken by the peer */
    int max_connections;
    double header_seconds; /* a request must be complete this long after its first byte or the connection */
    double idle_seconds;   /* keep-alive connections without a request */
    double write_seconds;  /* without progress */
} http_limits;

typedef struct http_hooks {
    void (*request)(void *ctx, http_call *c); /* must answer, at once or later */
    /* Once per call: its answer is complete and its last bytes have not left yet, or the peer is gone before that. */
    void (*answered)(void *ctx, http_call *c);
    /* The peer has the answer or is gone; the call is freed after this. */
    void (*over)(void *ctx, http_call *c);
    void *ctx;
} http_hooks;

/* Listens on host:port (port 0: any). Errors: E-SERVE-BIND. */
NODISCARD bool http_open(http **out, struct event_base *base, const char *host, int port, const http_limits *l,
                         const http_hooks *hooks, err *e);
void http_close(http *h);
int http_port(const http *h);
/* No new connections; new requests on old ones still arrive. */
void http_stop_accepting(http *h);
int http_connections(const http *h);

/* ---- one call ---- */

typedef enum http_method { HTTP_GET, HTTP_POST, HTTP_HEAD, HTTP_OPTIONS, HTTP_OTHER } http_method;

http_method http_call_method(const http_call *c);
const char *http_call_method_name(const http_call *c);
/* Without query; %XX decoded, several '/' in a row as one, none at the end of a longer path. */
str http_call_path(const http_call *c);
const char *http_call_header(const http_call *c, const char *name); /* or NULL */
const char *http_call_peer(const http_call *c);                     /* address */
/* The request's body, valid as long as the call. */
str http_call_body(const http_call *c);

/* The handler's own data, and what tells it that the peer is gone (once, before `over`; the handler must not use the call
 * afterwards). */
void http_call_own(http_call *c, void *own, void (*gone)(void *own));
void *http_call_owner(const http_call *c);

/* Before the reply; takes the place of an earlier one of that name; value is copied, control characters in it become '?'. */
void http_reply_header(http_call *c, const char *name, const char *value);
/* One reply; the call is over once the peer has it. HEAD gets no body. */
void http_reply(http_call *c, int status, const char *content_type, str body);
void http_reply_json(http_call *c, int status, const buf *body);
void http_reply_fault(http_call *c, const fault *f); /* OpenAI's shape */
/* The same status and headers, with the body given. */
void http_reply_fault_json(http_call *c, const fault *f, const buf *body);

/* A stream: headers now, pieces later, the end. */
void http_stream_open(http_call *c, int status, const char *content_type);
void http_stream_write(http_call *c, str piece);
void http_stream_end(http_call *c);
/* More than max_backlog_bytes wait for the peer: write no more until `drained` was called (once). */
bool http_stream_full(const http_call *c);
void http_stream_on_drained(http_call *c, void (*drained)(void *own));
double http_stream_last_write(const http_call *c); /* clock_seconds */

int http_call_status(const http_call *c); /* of the reply, 0 = none yet */
size_t http_call_bytes_out(const http_call *c);
double http_call_started(const http_call *c);

#endif
