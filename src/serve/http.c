/* evhttp does the parsing, chunking and keep-alive. What it does not do is added here:
 * - it stops reading while a request is answered, so it does not see the peer leave: each call watches its socket for
 *   EPOLLRDHUP. That event does not tell a closed connection from a half-closed one, so something harmless is written (an
 *   SSE comment, or an interim 100 response before a plain reply) and the socket is looked at: a closed one has been reset.
 * - while writing it reads, and takes a half-close for the end: reading is switched off after each write.
 * - it has no deadline for a whole request (only for a pause) and no limit of connections: every connection's bufferevent is
 *   kept in a list that a timer walks.
 * - a chunk costs it four system calls: while nothing waits to be written, a stream's chunks go to the socket at once, and only
 *   what the socket does not take goes through evhttp's buffer.
 * - its own error pages are HTML: they are replaced before they leave. */
#include "serve/http.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/keyvalq_struct.h>
#include <event2/listener.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"

typedef struct guard guard;

struct http {
    struct event_base *base;
    struct evhttp *ev;
    struct evconnlistener *listener; /* NULL: no longer accepting */
    struct evhttp_bound_socket *bound;
    http_limits limits;
    http_hooks hooks;
    guard *guards;
    int n_guards, port;
    bool accepting, paused;
    struct event *tick;
};

/* One connection. */
struct guard {
    http *h;
    guard *next, *prev;
    struct bufferevent *bev;
    http_call *call;    /* being answered, or NULL */
    double idle_since;  /* no request */
    double first_byte;  /* of a request that is not complete; 0 = none */
    size_t received;    /* since the last answer */
    struct event *page; /* pending look at an error page of evhttp's */
    bool replaced;
};

struct http_call {
    http *h;
    guard *g;
    struct evhttp_request *req;
    struct evhttp_connection *conn;
    struct event *hup;   /* something happened to the socket; NULL: no descriptor for it */
    struct event *probe; /* look whether it was reset */
    int probes;
    bool replied, streaming, ended, answered, half_closed;
    bool chunked, on_write; /* stream: each piece is a chunk; evhttp calls on_written when its buffer is empty */
    int status;
    size_t bytes_out;
    double started, last_write;
    http_method method;
    buf path;
    str body;
    char peer[64];
    void *own;
    void (*gone)(void *own);
    void (*drained)(void *own);
};

static const struct timeval ticking = { 0, 250000 };

/* ---- the end of calls and connections ---- */

static void call_free(http_call *c) {
    if (c->hup) {
        const int fd = (int)event_get_fd(c->hup);
        event_free(c->hup);
        close(fd);
    }
    if (c->probe) event_free(c->probe);
    buf_free(&c->path);
    if (c->g) {
        c->g->call = NULL;
        c->g->idle_since = clock_seconds();
        c->g->first_byte = 0;
        c->g->received = 0;
    }
    free(c);
}

static void answered(http_call *c) {
    if (c->answered) return;
    c->answered = true;
    c->h->hooks.answered(c->h->hooks.ctx, c);
}

static void call_over(http_call *c) {
    answered(c);
    c->h->hooks.over(c->h->hooks.ctx, c);
    call_free(c);
}

/* The peer is gone; conn is about to be freed, or (req left to us) was. */
static void call_gone(http_call *c) {
    c->ended = true;
    if (c->gone) {
        void (*gone)(void *) = c->gone;
        c->gone = NULL;
        gone(c->own);
    }
    call_over(c);
}

static void guard_free(guard *g) {
    http *h = g->h;
    *(g->prev ? &g->prev->next : &h->guards) = g->next;
    if (g->next) g->next->prev = g->prev;
    h->n_guards--;
    if (g->page) event_free(g->page);
    bufferevent_decref(g->bev);
    free(g);
    if (h->paused && h->accepting && h->n_guards < h->limits.max_connections) {
        h->paused = false;
        evconnlistener_enable(h->listener);
    }
}

/* Before evhttp frees a connection: it closes the descriptor, but the bufferevent lives on for its guard, and events of it that
 * are still waiting would read and write whatever connection gets the same number next. */
static void let_go(guard *g) {
    if (g) bufferevent_disable(g->bev, EV_READ | EV_WRITE);
}

/* evhttp closed the connection: by itself, after the last reply, or because of an error. */
static void on_connection_closed(struct evhttp_connection *conn, void *arg) {
    (void)conn;
    http_call *c = arg;
    let_go(c->g);
    struct evhttp_request *req = c->req;
    /* When the request was being answered evhttp has taken it off the connection and left it to us. */
    const bool ours = !c->ended && req && evhttp_request_get_connection(req) == NULL;
    c->conn = NULL;
    c->req = NULL;
    call_gone(c);
    if (ours) evhttp_request_free(req);
}

static void on_reply_complete(struct evhttp_request *req, void *arg) {
    (void)req;
    http_call *c = arg;
    let_go(c->g); /* evhttp closes the connection now, or switches reading on for the next request */
    if (c->conn) evhttp_connection_set_closecb(c->conn, NULL, NULL);
    call_over(c);
}

/* The peer was found gone: end everything. */
static void drop(http_call *c) {
    struct evhttp_connection *conn = c->conn;
    let_go(c->g);
    evhttp_connection_set_closecb(conn, NULL, NULL);
    evhttp_request_set_on_complete_cb(c->req, NULL, NULL);
    c->conn = NULL;
    c->req = NULL;
    call_gone(c);
    evhttp_connection_free(conn);
}

/* ---- is the peer still there? ---- */

static bool was_reset(const http_call *c) {
    struct pollfd p = { .fd = bufferevent_getfd(c->g->bev) };
    return p.fd < 0 || (poll(&p, 1, 0) > 0 && (p.revents & (POLLERR | POLLHUP | POLLNVAL)));
}

/* Something harmless, which a closed socket answers with a reset. False: it already was. */
static bool provoke(http_call *c) {
    static const char interim[] = "HTTP/1.1 100 Continue\r\n\r\n";
    if (c->streaming && !c->ended)
        http_stream_write(c, STR(": \n\n"));
    else if (!c->replied)
        return send(bufferevent_getfd(c->g->bev), interim, sizeof interim - 1, MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
    return true;
}

/* 10 ms after the half-close, so that quick answers come without a probe before them; then 5, 20, 80, 320 ms later, then
 * once a second for as long as the call lives. */
static void on_probe(evutil_socket_t fd, short what, void *arg) {
    (void)fd;
    (void)what;
    http_call *c = arg;
    static const long micros[] = { 5000, 20000, 80000, 320000 };
    const int n = c->probes++;
    const struct timeval t = { n < 4 ? 0 : 1, n < 4 ? micros[n] : 0 };
    if (was_reset(c) || (n == 0 && !provoke(c)))
        drop(c);
    else
        event_add(c->probe, &t);
}

/* Something changed: more bytes (a pipelined request), the peer closed its side, or the socket was reset. */
static void on_change(evutil_socket_t fd, short what, void *arg) {
    static const struct timeval soon = { 0, 10000 };
    (void)what;
    http_call *c = arg;
    struct pollfd p = { .fd = fd, .events = POLLRDHUP };
    if (was_reset(c))
        drop(c);
    else if (!c->half_closed && poll(&p, 1, 0) > 0 && (p.revents & POLLRDHUP)) {
        c->half_closed = true;
        event_add(c->probe, &soon);
    }
}

/* Edge-triggered, so on a descriptor of its own: libevent wants all events of a descriptor to be of one kind, and reports a
 * reset as readable, which level-triggered would also be every pipelined byte. */
static void watch_peer(http_call *c) {
    const int fd = fcntl(bufferevent_getfd(c->g->bev), F_DUPFD_CLOEXEC, 0);
    c->probe = event_new(c->h->base, -1, 0, on_probe, c);
    CHECK(c->probe, "no memory for events");
    if (fd < 0) return; /* too many open files: then only writing tells */
    c->hup = event_new(c->h->base, fd, EV_READ | EV_CLOSED | EV_ET | EV_PERSIST, on_change, c);
    CHECK(c->hup && event_add(c->hup, NULL) == 0, "no memory for events");
}

static void stop_reading(http_call *c) {
    if (c->g) bufferevent_disable(c->g->bev, EV_READ);
}

/* ---- requests ---- */

static guard *guard_of(http *h, const struct bufferevent *bev) {
    guard *g = h->guards;
    while (g && g->bev != bev) g = g->next;
    return g;
}

static http_method read_method(const struct evhttp_request *req) {
    switch (evhttp_request_get_command(req)) {
    case EVHTTP_REQ_GET: return HTTP_GET;
    case EVHTTP_REQ_POST: return HTTP_POST;
    case EVHTTP_REQ_HEAD: return HTTP_HEAD;
    case EVHTTP_REQ_OPTIONS: return HTTP_OPTIONS;
    default: return HTTP_OTHER;
    }
}

static void read_path(buf *out, const struct evhttp_request *req) {
    const struct evhttp_uri *parsed = evhttp_request_get_evhttp_uri(req);
    const char *uri = evhttp_request_get_uri(req), *path = parsed ? evhttp_uri_get_path(parsed) : NULL;
    char *own = NULL;
    size_t n = 0;
    if (uri[0] == '/') path = own = strndup(uri, strcspn(uri, "?#")); /* where a second '/' would mean a host */
    char *plain = path ? evhttp_uridecode(path, 0, &n) : NULL;
    for (size_t i = 0; plain && i < n; i++)
        if (plain[i] != '/' || i == 0 || plain[i - 1] != '/') buf_byte(out, plain[i]);
    if (out->n > 1 && out->p[out->n - 1] == '/') out->p[--out->n] = 0;
    if (out->n == 0) buf_byte(out, '/');
    free(plain);
    free(own);
}

/* What evhttp lets pass and a proxy before us may read in another way: two lengths, or a transfer coding it does not undo. */
static bool is_ambiguous(struct evhttp_request *req) {
    const struct evkeyvalq *headers = evhttp_request_get_input_headers(req);
    const char *length = NULL;
    for (const struct evkeyval *h = headers->tqh_first; h; h = h->next.tqe_next) {
        if (strcasecmp(h->key, "Content-Length") == 0) {
            if (length && strcmp(length, h->value) != 0) return true;
            length = h->value;
        }
        if (strcasecmp(h->key, "Transfer-Encoding") == 0 && strcasecmp(h->value, "chunked") != 0) return true;
    }
    return false;
}

static void refuse_ambiguous(http_call *c) {
    fault f = { 0 };
    fault_set(&f, 400, "malformed_request", "two lengths of the body, or a Transfer-Encoding other than chunked");
    http_reply_header(c, "Connection", "close");
    http_reply_fault(c, &f);
}

static void on_request(struct evhttp_request *req, void *arg) {
    http *h = arg;
    struct evhttp_connection *conn = evhttp_request_get_connection(req);
    guard *g = guard_of(h, evhttp_connection_get_bufferevent(conn));
    CHECK(g && !g->call, "a request on an unknown or busy connection");
    http_call *c = xcalloc(1, sizeof *c);
    c->h = h;
    c->g = g;
    c->req = req;
    c->conn = conn;
    c->started = clock_seconds();
    g->call = c;
    g->first_byte = 0;
    char *address = NULL;
    uint16_t port = 0;
    evhttp_connection_get_peer(conn, &address, &port);
    snprintf(c->peer, sizeof c->peer, "%s", address ? address : "");
    c->method = read_method(req);
    read_path(&c->path, req);
    struct evbuffer *in = evhttp_request_get_input_buffer(req);
    const size_t n = evbuffer_get_length(in);
    c->body = (str){ n ? (const char *)evbuffer_pullup(in, -1) : "", n };
    evhttp_connection_set_closecb(conn, on_connection_closed, c);
    evhttp_request_set_on_complete_cb(req, on_reply_complete, c);
    stop_reading(c);
    const double w = h->limits.write_seconds;
    const struct timeval wait = { (time_t)w, (suseconds_t)((w - (double)(time_t)w) * 1e6) };
    bufferevent_set_timeouts(g->bev, NULL, &wait);
    watch_peer(c);
    if (is_ambiguous(req))
        refuse_ambiguous(c);
    else
        h->hooks.request(h->hooks.ctx, c);
}

/* ---- evhttp's own error pages ---- */

/* evhttp closes the connection behind its page while the peer may still be sending: the kernel would answer that with a
 * reset, and the peer would never see the page. A second descriptor keeps the socket open and swallows the rest for a while. */
typedef struct lingering {
    struct event *ev;
    double since;
} lingering;

static void on_linger(evutil_socket_t fd, short what, void *arg) {
    lingering *l = arg;
    char sink[65536];
    ssize_t n = what & EV_READ ? recv(fd, sink, sizeof sink, MSG_DONTWAIT) : 0;
    if (n > 0 && clock_seconds() - l->since < 5) return;
    event_free(l->ev);
    close(fd);
    free(l);
}

static void linger_begin(guard *g) {
    static const struct timeval quiet = { 2, 0 };
    const int fd = fcntl(bufferevent_getfd(g->bev), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return;
    lingering *l = xcalloc(1, sizeof *l);
    l->since = clock_seconds();
    l->ev = event_new(g->h->base, fd, EV_READ | EV_PERSIST, on_linger, l);
    CHECK(l->ev && event_add(l->ev, &quiet) == 0, "no memory for events");
}

static void replace_page(evutil_socket_t fd, short what, void *arg) {
    (void)fd;
    (void)what;
    guard *g = arg;
    struct evbuffer *out = bufferevent_get_output(g->bev);
    char head[16] = { 0 };
    if (g->call || g->replaced || evbuffer_copyout(out, head, sizeof head - 1) < 12) return;
    int status = atoi(head + 9);
    if (status < 400) return;
    g->replaced = true;
    bufferevent_disable(g->bev, EV_READ); /* evhttp closes the connection behind its page: see let_go */
    fault f = { 0 };
    if (status == 413)
        fault_set(&f, 413, "body_too_large", "the body is larger than allowed, or its chunks are malformed");
    else if (g->received > g->h->limits.max_header_bytes)
        fault_set(&f, status = 431, "headers_too_large",
                  "the request line and headers are larger than allowed (%zu bytes)", g->h->limits.max_header_bytes);
    else if (status == 501)
        fault_set(&f, 405, "method_not_allowed", "no such method");
    else
        fault_set(&f, status, "malformed_request", "this is not a well-formed HTTP/1.1 request");
    if (status == 501) status = 405;
    buf body = { 0 };
    fault_write(&body, &f);
    evbuffer_drain(out, evbuffer_get_length(out));
    struct evbuffer *in = bufferevent_get_input(g->bev);
    evbuffer_drain(in, evbuffer_get_length(in)); /* nothing behind it is answered */
    evbuffer_add_printf(out,
                        "HTTP/1.1 %d Error\r\nContent-Type: application/json\r\nContent-Length: %zu\r\nConnection: "
                        "close\r\n\r\n",
                        status, body.n);
    evbuffer_add(out, body.p, body.n);
    buf_free(&body);
    linger_begin(g);
}

static void on_output(struct evbuffer *out, const struct evbuffer_cb_info *info, void *arg) {
    (void)out;
    guard *g = arg;
    if (info->n_added > 0 && !g->call) event_active(g->page, EV_TIMEOUT, 0);
}

static void on_input(struct evbuffer *in, const struct evbuffer_cb_info *info, void *arg) {
    (void)in;
    guard *g = arg;
    g->received += info->n_added;
    if (info->n_added > 0 && g->first_byte == 0 && !g->call) g->first_byte = clock_seconds();
}

static struct bufferevent *new_connection(struct event_base *base, void *arg) {
    http *h = arg;
    struct bufferevent *bev = bufferevent_socket_new(base, -1, 0);
    if (!bev) return NULL;
    guard *g = xcalloc(1, sizeof *g);
    g->h = h;
    g->bev = bev;
    g->idle_since = clock_seconds();
    g->page = event_new(base, -1, 0, replace_page, g);
    CHECK(g->page, "no memory for events");
    g->next = h->guards;
    if (g->next) g->next->prev = g;
    h->guards = g;
    h->n_guards++;
    bufferevent_incref(bev);
    evbuffer_add_cb(bufferevent_get_output(bev), on_output, g);
    evbuffer_add_cb(bufferevent_get_input(bev), on_input, g);
    if (h->n_guards >= h->limits.max_connections && !h->paused && h->accepting) {
        h->paused = true;
        evconnlistener_disable(h->listener);
    }
    return bev;
}

/* Freed by evhttp: it has taken its callbacks off. */
static bool is_dead(const guard *g) {
    bufferevent_event_cb on_event = NULL;
    bufferevent_getcb(g->bev, NULL, NULL, &on_event, NULL);
    return on_event == NULL;
}

static void on_tick(evutil_socket_t fd, short what, void *arg) {
    (void)fd;
    (void)what;
    http *h = arg;
    const double now = clock_seconds();
    for (guard *g = h->guards, *next; g; g = next) {
        next = g->next;
        if (g->call) continue;
        if (is_dead(g)) {
            guard_free(g);
            continue;
        }
        /* evhttp closes behind an error page of its own, but not after CONNECT. */
        const bool told = g->replaced && evbuffer_get_length(bufferevent_get_output(g->bev)) == 0;
        const bool late = g->first_byte > 0 ? now - g->first_byte > h->limits.header_seconds
                                            : now - g->idle_since > h->limits.idle_seconds;
        if (!late && !told) continue;
        shutdown(bufferevent_getfd(g->bev), SHUT_RDWR);
        bufferevent_enable(g->bev, EV_READ); /* which finds the end; off behind an error page */
    }
    event_add(h->tick, &ticking);
}

/* ---- opening ---- */

static bool listen_on(http *h, const char *host, int port, err *e) {
    char service[8];
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV }, *list = NULL;
    const int rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0) return fail(e, ERR_MACHINE, "E-SERVE-BIND", "%s port %d: %s", host, port, gai_strerror(rc));
    int cause = 0;
    for (const struct addrinfo *a = list; a && !h->listener; a = a->ai_next) {
        h->listener = evconnlistener_new_bind(h->base, NULL, NULL,
                                              LEV_OPT_CLOSE_ON_FREE | LEV_OPT_REUSEABLE | LEV_OPT_CLOSE_ON_EXEC, 512,
                                              a->ai_addr, (int)a->ai_addrlen);
        if (!h->listener) cause = EVUTIL_SOCKET_ERROR();
    }
    freeaddrinfo(list);
    if (!h->listener)
        return fail(e, ERR_MACHINE, "E-SERVE-BIND", "%s port %d: %s (is another server running there?)", host, port,
                    evutil_socket_error_to_string(cause));
    struct sockaddr_storage own;
    socklen_t n = sizeof own;
    char name[NI_MAXSERV] = "0";
    if (getsockname(evconnlistener_get_fd(h->listener), (struct sockaddr *)&own, &n) == 0)
        getnameinfo((struct sockaddr *)&own, n, NULL, 0, name, sizeof name, NI_NUMERICSERV);
    h->port = atoi(name);
    return true;
}

bool http_open(http **out, struct event_base *base, const char *host, int port, const http_limits *l,
               const http_hooks *hooks, err *e) {
    http *h = xcalloc(1, sizeof *h);
    h->base = base;
    h->limits = *l;
    h->hooks = *hooks;
    *out = NULL;
    if (!listen_on(h, host, port, e)) return free(h), false;
    h->ev = evhttp_new(base);
    h->tick = event_new(base, -1, 0, on_tick, h);
    CHECK(h->ev && h->tick, "no memory for the server");
    evhttp_set_max_headers_size(h->ev, (ev_ssize_t)l->max_header_bytes);
    evhttp_set_max_body_size(h->ev, (ev_ssize_t)l->max_body_bytes);
    evhttp_set_allowed_methods(h->ev, EVHTTP_REQ_GET | EVHTTP_REQ_POST | EVHTTP_REQ_HEAD | EVHTTP_REQ_PUT |
                                          EVHTTP_REQ_DELETE | EVHTTP_REQ_OPTIONS | EVHTTP_REQ_PATCH);
    evhttp_set_default_content_type(h->ev, NULL);
    evhttp_set_timeout(h->ev, (int)(l->idle_seconds + l->header_seconds));
    evhttp_set_bevcb(h->ev, new_connection, h);
    evhttp_set_gencb(h->ev, on_request, h);
    h->bound = evhttp_bind_listener(h->ev, h->listener);
    CHECK(h->bound, "no memory for the server");
    h->accepting = true;
    event_add(h->tick, &ticking);
    *out = h;
    return true;
}

void http_close(http *h) {
    if (!h) return;
    for (guard *g = h->guards; g; g = g->next)
        if (g->call) drop(g->call);
    evhttp_free(h->ev); /* frees the listener and all connections */
    for (guard *g = h->guards, *next; g; g = next) {
        next = g->next;
        guard_free(g);
    }
    event_free(h->tick);
    free(h);
}

int http_port(const http *h) { return h->port; }

void http_stop_accepting(http *h) {
    h->accepting = false;
    evhttp_del_accept_socket(h->ev, h->bound); /* closes it: clients are refused, not kept waiting */
    h->listener = NULL;
}

int http_connections(const http *h) { return h->n_guards; }

/* ---- reading a call ---- */

http_method http_call_method(const http_call *c) { return c->method; }

const char *http_call_method_name(const http_call *c) {
    static const char *const names[] = { "GET", "POST", "HEAD", "OPTIONS", "OTHER" };
    return names[c->method];
}

str http_call_path(const http_call *c) { return buf_view(&c->path); }
str http_call_body(const http_call *c) { return c->body; }
const char *http_call_peer(const http_call *c) { return c->peer; }
int http_call_status(const http_call *c) { return c->status; }
size_t http_call_bytes_out(const http_call *c) { return c->bytes_out; }
double http_call_started(const http_call *c) { return c->started; }
double http_stream_last_write(const http_call *c) { return c->last_write; }
void *http_call_owner(const http_call *c) { return c->own; }

const char *http_call_header(const http_call *c, const char *name) {
    return evhttp_find_header(evhttp_request_get_input_headers(c->req), name);
}

void http_call_own(http_call *c, void *own, void (*gone)(void *own)) {
    c->own = own;
    c->gone = gone;
}

/* ---- answering ---- */

void http_reply_header(http_call *c, const char *name, const char *value) {
    char *copy = xstrdup(value);
    for (char *p = copy; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f) *p = '?';
    struct evkeyvalq *headers = evhttp_request_get_output_headers(c->req);
    evhttp_remove_header(headers, name);
    evhttp_add_header(headers, name, copy);
    free(copy);
}

void http_reply(http_call *c, int status, const char *content_type, str body) {
    CHECK(!c->replied, "a second reply");
    c->replied = c->ended = true;
    c->status = status;
    c->bytes_out = body.n;
    c->last_write = clock_seconds();
    c->gone = NULL;
    if (content_type) http_reply_header(c, "Content-Type", content_type);
    answered(c);
    event_del(c->probe);
    struct evhttp_request *req = c->req;
    if (evhttp_request_get_command(req) == EVHTTP_REQ_HEAD) { /* evhttp would send it */
        char length[24];
        snprintf(length, sizeof length, "%zu", body.n);
        http_reply_header(c, "Content-Length", length);
        c->bytes_out = body.n = 0;
    }
    struct evbuffer *b = evbuffer_new();
    CHECK(b && evbuffer_add(b, body.p, body.n) == 0, "no memory for a reply");
    evhttp_send_reply(req, status, NULL, b);
    evbuffer_free(b);
    stop_reading(c);
}

void http_reply_json(http_call *c, int status, const buf *body) {
    http_reply(c, status, "application/json", buf_view(body));
}

void http_reply_fault_json(http_call *c, const fault *f, const buf *body) {
    char seconds[16];
    snprintf(seconds, sizeof seconds, "%d", f->retry_after);
    if (f->retry_after) http_reply_header(c, "Retry-After", seconds);
    if (f->status == 401) http_reply_header(c, "WWW-Authenticate", "Bearer");
    http_reply_json(c, f->status, body);
}

void http_reply_fault(http_call *c, const fault *f) {
    buf b = { 0 };
    fault_write(&b, f);
    http_reply_fault_json(c, f, &b);
    buf_free(&b);
}

void http_stream_open(http_call *c, int status, const char *content_type) {
    CHECK(!c->replied, "a second reply");
    c->replied = c->streaming = true;
    c->status = status;
    c->last_write = clock_seconds();
    http_reply_header(c, "Content-Type", content_type);
    evhttp_send_reply_start(c->req, status, NULL);
    c->chunked =
        evhttp_find_header(evhttp_request_get_output_headers(c->req), "Transfer-Encoding") != NULL; /* HTTP/1.1 */
    stop_reading(c);
}

static void on_written(struct evhttp_connection *conn, void *arg) {
    (void)conn;
    http_call *c = arg;
    stop_reading(c);
    if (!c->drained) return;
    void (*drained)(void *) = c->drained;
    c->drained = NULL;
    drained(c->own);
}

/* What the socket does not take now waits in the buffer. Errors are found there too, so they end the call as always. */
static void write_now(http_call *c, str piece) {
    char size[24] = "", crlf[] = "\r\n";
    const int n = c->chunked ? snprintf(size, sizeof size, "%zx\r\n", piece.n) : 0;
    struct iovec v[] = { { size, (size_t)n }, { (void *)(uintptr_t)piece.p, piece.n }, { crlf, c->chunked ? 2 : 0 } };
    const struct msghdr m = { .msg_iov = v, .msg_iovlen = ARRAY_LEN(v) };
    const ssize_t sent = sendmsg(bufferevent_getfd(c->g->bev), &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    size_t skip = sent > 0 ? (size_t)sent : 0;
    bool ok = true;
    for (size_t i = 0; ok && i < ARRAY_LEN(v); i++) {
        const size_t part = skip < v[i].iov_len ? skip : v[i].iov_len;
        skip -= part;
        if (part < v[i].iov_len)
            ok = bufferevent_write(c->g->bev, (char *)v[i].iov_base + part, v[i].iov_len - part) == 0;
    }
    CHECK(ok, "no memory for a reply");
}

void http_stream_write(http_call *c, str piece) {
    if (c->ended || piece.n == 0) return;
    if (c->on_write && evbuffer_get_length(bufferevent_get_output(c->g->bev)) == 0) {
        c->bytes_out += piece.n;
        c->last_write = clock_seconds();
        write_now(c, piece);
        return;
    }
    c->on_write = true;
    struct evbuffer *b = evbuffer_new();
    CHECK(b && evbuffer_add(b, piece.p, piece.n) == 0, "no memory for a reply");
    c->bytes_out += piece.n;
    c->last_write = clock_seconds();
    evhttp_send_reply_chunk_with_cb(c->req, b, on_written, c);
    evbuffer_free(b);
    stop_reading(c);
}

void http_stream_end(http_call *c) {
    if (c->ended) return;
    guard *g = c->g;
    c->ended = true;
    c->gone = NULL;
    answered(c);
    evhttp_send_reply_end(c->req); /* may be the end of the call */
    if (g->call == c) stop_reading(c);
}

bool http_stream_full(const http_call *c) {
    return evbuffer_get_length(bufferevent_get_output(c->g->bev)) > c->h->limits.max_backlog_bytes;
}

void http_stream_on_drained(http_call *c, void (*drained)(void *own)) { c->drained = drained; }
