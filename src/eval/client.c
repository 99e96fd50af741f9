#include "eval/client.h"

#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

enum { MAX_ANSWER = 64 << 20, MAX_HEADERS = 64 << 10 };

typedef struct pending pending;
struct pending {
    client *c;
    client_call call;
    buf body, refused; /* sent; the answer when it is an error */
    struct evhttp_connection *connection;
    pending *next, **self;
    bool ended;
};

typedef struct timer timer;
struct timer {
    client *c;
    void (*fn)(void *ctx);
    void *ctx;
    struct event *event;
    timer *next, **self;
};

struct client {
    struct event_base *base;
    char *host, *prefix, *authorization;
    int port, n;
    double seconds;
    pending *calls, *over; /* over: their connections are freed outside of their own callbacks */
    timer *timers;
};

/* ---- the address ---- */

static bool read_url(client *c, const char *url, err *e) {
    struct evhttp_uri *u = evhttp_uri_parse(url);
    const char *scheme = u ? evhttp_uri_get_scheme(u) : NULL, *host = u ? evhttp_uri_get_host(u) : NULL;
    bool ok = scheme && host && *host;
    if (!ok)
        fail(e, ERR_USAGE, "E-EVAL-URL", "%.200s: not an address such as http://127.0.0.1:8000", url);
    else if (strcmp(scheme, "http") != 0)
        ok = fail(e, ERR_USAGE, "E-EVAL-URL", "%.200s: only http is spoken (put a local proxy in front of it)", url);
    if (ok) {
        const char *path = evhttp_uri_get_path(u);
        size_t n = strlen(path);
        while (n > 0 && path[n - 1] == '/') n--;
        buf prefix = { 0 };
        buf_add(&prefix, path, n);
        if (n < 3 || strncmp(path + n - 3, "/v1", 3) != 0) buf_puts(&prefix, "/v1");
        c->prefix = xstrdup(prefix.p);
        buf_free(&prefix);
        c->host = xstrdup(host);
        c->port = evhttp_uri_get_port(u) > 0 ? evhttp_uri_get_port(u) : 80;
    }
    if (u) evhttp_uri_free(u);
    return ok;
}

bool client_open(client **out, const char *url, const char *key, double seconds, err *e) {
    client *c = xcalloc(1, sizeof *c);
    *out = NULL;
    c->seconds = seconds;
    bool ok = read_url(c, url, e);
    if (ok && key) {
        buf b = { 0 };
        buf_printf(&b, "Bearer %s", key);
        c->authorization = b.p;
    }
    if (ok) {
        c->base = event_base_new();
        if (!c->base) ok = fail(e, ERR_MACHINE, "E-EVAL-URL", "no event loop (too many open files?)");
    }
    if (ok)
        *out = c;
    else
        client_close(c);
    return ok;
}

/* ---- one request ---- */

static void unlink_call(pending *p) {
    if (p->next) p->next->self = p->self;
    *p->self = p->next;
}

static void free_call(pending *p) {
    if (p->connection) evhttp_connection_free(p->connection);
    buf_free(&p->body);
    buf_free(&p->refused);
    free(p);
}

static void end_call(pending *p, int status, str body) {
    if (p->ended) return;
    p->ended = true;
    client *c = p->c;
    unlink_call(p);
    c->n--;
    p->next = c->over;
    c->over = p;
    p->call.on_end(p->call.ctx, status, body);
}

static str drained(struct evhttp_request *r, buf *into) {
    struct evbuffer *in = evhttp_request_get_input_buffer(r);
    const size_t n = evbuffer_get_length(in);
    buf_reserve(into, n + 1);
    evbuffer_remove(in, into->p + into->n, n);
    into->n += n;
    into->p[into->n] = 0;
    return buf_view(into);
}

static void on_chunk(struct evhttp_request *r, void *ctx) {
    pending *p = ctx;
    if (p->ended) return;
    if (evhttp_request_get_response_code(r) != 200) { /* libevent drops what is not taken here */
        drained(r, &p->refused);
        return;
    }
    buf piece = { 0 };
    const str s = drained(r, &piece);
    if (s.n) p->call.on_data(p->call.ctx, s);
    buf_free(&piece);
}

static void on_answer(struct evhttp_request *r, void *ctx) {
    pending *p = ctx;
    const int status = r ? evhttp_request_get_response_code(r) : 0;
    buf body = { 0 };
    str rest = { "", 0 };
    if (r) rest = drained(r, status == 200 ? &body : &p->refused);
    if (status == 200 && p->call.on_data && rest.n) {
        p->call.on_data(p->call.ctx, rest);
        rest = (str){ "", 0 };
    }
    end_call(p, status, rest);
    buf_free(&body);
}

static void begin_failed(evutil_socket_t fd, short what, void *ctx) {
    (void)fd, (void)what;
    end_call(ctx, 0, (str){ "", 0 });
}

static bool begin(pending *p) {
    client *c = p->c;
    struct evhttp_request *r = evhttp_request_new(on_answer, p);
    p->connection = evhttp_connection_base_new(c->base, NULL, c->host, (uint16_t)c->port);
    if (!r || !p->connection) {
        if (r) evhttp_request_free(r);
        return false;
    }
    struct evkeyvalq *h = evhttp_request_get_output_headers(r);
    buf path = { 0 };
    buf_printf(&path, "%s%s", c->prefix, p->call.path);
    evhttp_connection_set_timeout(p->connection, (int)(c->seconds + 0.5));
    evhttp_connection_set_max_body_size(p->connection, MAX_ANSWER);
    evhttp_connection_set_max_headers_size(p->connection, MAX_HEADERS);
    if (p->call.on_data) evhttp_request_set_chunked_cb(r, on_chunk);
    evhttp_add_header(h, "Host", c->host);
    evhttp_add_header(h, "Connection", "close");
    if (c->authorization) evhttp_add_header(h, "Authorization", c->authorization);
    if (p->body.n) {
        evhttp_add_header(h, "Content-Type", "application/json");
        evbuffer_add(evhttp_request_get_output_buffer(r), p->body.p, p->body.n);
    }
    const bool ok = evhttp_make_request(p->connection, r, p->body.n ? EVHTTP_REQ_POST : EVHTTP_REQ_GET, path.p) == 0;
    buf_free(&path);
    return ok; /* on failure libevent has freed the request */
}

void client_send(client *c, const client_call *call) {
    pending *p = xcalloc(1, sizeof *p);
    p->c = c;
    p->call = *call;
    buf_str(&p->body, call->body);
    p->next = c->calls;
    p->self = &c->calls;
    if (p->next) p->next->self = &p->next;
    c->calls = p;
    c->n++;
    if (!begin(p)) {
        const struct timeval now = { 0, 0 };
        event_base_once(c->base, -1, EV_TIMEOUT, begin_failed, p, &now);
    }
}

/* ---- timers and the loop ---- */

static void free_timer(timer *t) {
    if (t->next) t->next->self = t->self;
    *t->self = t->next;
    event_free(t->event);
    free(t);
}

static void on_time(evutil_socket_t fd, short what, void *ctx) {
    (void)fd, (void)what;
    timer *t = ctx;
    void (*fn)(void *) = t->fn;
    void *arg = t->ctx;
    free_timer(t);
    fn(arg);
}

void client_after(client *c, double seconds, void (*fn)(void *ctx), void *ctx) {
    timer *t = xcalloc(1, sizeof *t);
    const struct timeval tv = { (time_t)seconds, (suseconds_t)((seconds - (double)(time_t)seconds) * 1e6) };
    *t = (timer){ .c = c, .fn = fn, .ctx = ctx, .next = c->timers, .self = &c->timers };
    t->event = evtimer_new(c->base, on_time, t);
    CHECK(t->event, "out of memory");
    if (t->next) t->next->self = &t->next;
    c->timers = t;
    evtimer_add(t->event, &tv);
}

static void wake(evutil_socket_t fd, short what, void *ctx) { (void)fd, (void)what, (void)ctx; }

static void free_over(client *c) {
    while (c->over) {
        pending *p = c->over;
        c->over = p->next;
        free_call(p);
    }
}

bool client_step(client *c) {
    free_over(c);
    if (c->n == 0 && !c->timers) return false;
    const struct timeval most = { 0, 100000 };
    event_base_once(c->base, -1, EV_TIMEOUT, wake, NULL, &most);
    event_base_loop(c->base, EVLOOP_ONCE);
    free_over(c);
    return true;
}

int client_pending(const client *c) { return c->n; }

void client_close(client *c) {
    if (!c) return;
    free_over(c);
    for (timer *t = c->timers, *next; t; t = next) {
        next = t->next;
        event_free(t->event);
        free(t);
    }
    for (pending *p = c->calls, *next; p; p = next) {
        next = p->next;
        p->ended = true;
        free_call(p);
    }
    if (c->base) event_base_free(c->base);
    free(c->host);
    free(c->prefix);
    free(c->authorization);
    free(c);
}

/* ---- the first model ---- */

typedef struct listing {
    char *out;
    size_t n;
    int status;
} listing;

static void on_models(void *ctx, int status, str body) {
    listing *l = ctx;
    arena mem = { 0 };
    const json *v;
    err none = { 0 };
    l->status = status;
    snprintf(l->out, l->n, "default");
    if (status == 200 && json_parse(&v, &mem, body, "models", NULL, &none)) {
        const json *data = json_get(v, "data");
        const json *id = json_is(data, JSON_ARRAY) && data->n ? json_get(&data->u.items[0], "id") : NULL;
        if (json_is(id, JSON_STRING)) snprintf(l->out, l->n, "%.*s", (int)id->n, id->u.s);
    }
    arena_free(&mem);
}

bool client_first_model(char *out, size_t n, const char *url, const char *key, double seconds, err *e) {
    client *c;
    listing l = { out, n, 0 };
    const client_call call = { .path = "/models", .on_end = on_models, .ctx = &l };
    if (!client_open(&c, url, key, seconds, e)) return false;
    client_send(c, &call);
    while (client_step(c)) {
    }
    client_close(c);
    return l.status != 0 || fail(e, ERR_MACHINE, "E-EVAL-SERVER",
                                 "%s: no answer (connection refused, closed, or silent for %.0f s)", url, seconds);
}

/* ---- event streams ---- */

static void one_line(sse_reader *r) {
    str line = buf_view(&r->line);
    if (line.n && line.p[line.n - 1] == '\r') line.n--;
    if (str_starts(line, STR("data:"))) {
        line = str_skip(line, 5);
        if (line.n && line.p[0] == ' ') line = str_skip(line, 1);
        r->on_data(r->ctx, line);
    }
    buf_clear(&r->line);
}

void sse_reader_push(sse_reader *r, str piece) {
    while (piece.n) {
        const char *end = memchr(piece.p, '\n', piece.n);
        buf_add(&r->line, piece.p, end ? (size_t)(end - piece.p) : piece.n);
        if (!end) return;
        piece = str_skip(piece, (size_t)(end - piece.p) + 1);
        one_line(r);
    }
}

void sse_reader_free(sse_reader *r) { buf_free(&r->line); }
