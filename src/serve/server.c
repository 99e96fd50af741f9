#include "serve/server.h"

#include <event2/event.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "serve/server_impl.h"
#include "serve/sse.h"

/* Ticks are counted, not seconds: when the whole process was stopped nobody missed a beat. */
enum {
    STALL_SECONDS = 30,
    STALL_ROWS = 256,
    TICK_MICROS = 250000,
    SILENT_TICKS = 3,
    BOOT_TEST_TOKENS = 4,
    LAST_WORDS_SECONDS = 2
};

static const chat_dialect *const dialects[] = {
    &api_chat,       &api_completions, &api_render,    &api_tokenize,
    &api_detokenize, &api_responses,   &api_anthropic, &api_anthropic_count
};

/* ---- preparing: JSON, template and tokenizer, off the event thread ---- */

typedef struct prepared {
    struct prepared *next;
    server *s;
    chat *c;
    str body;
    fault f;
} prepared;

static void list_add(server *s, chat *c) {
    c->next = s->chats;
    if (c->next) c->next->prev = c;
    s->chats = c;
    s->n_chats++;
}

static void list_remove(server *s, chat *c) {
    *(c->prev ? &c->prev->next : &s->chats) = c->next;
    if (c->next) c->next->prev = c->prev;
    s->n_chats--;
}

static void say_ignored(server *s, const chat *c) {
    if (c->ignored.n == 0 || s->ignored_names.n >= 100) return;
    for (int i = 0; i < s->ignored_names.n; i++)
        if (strcmp(s->ignored_names.v[i], c->ignored.p) == 0) return;
    arg_strings_add(&s->ignored_names, xstrdup(c->ignored.p));
    log_say("W-SERVE-IGNORED", "%s: unknown fields ignored: %s", c->dialect->path, c->ignored.p);
}

static void on_prepared(void *ctx) {
    prepared *p = ctx;
    server *s = p->s;
    chat *c = p->c;
    s->n_preparing--;
    c->preparing = false;
    if (s->cut_off) fault_set(&p->f, 503, "shutting_down", "the server is shutting down");
    if (c->orphan) {
        chat_free(c);
    } else if (p->f.status) {
        s->counts.refused++;
        chat_fail(c, &p->f);
    } else {
        say_ignored(s, c);
        chat_begin(c, &s->env);
    }
    free((char *)p->body.p);
    free(p);
}

static void *preparer_run(void *arg) {
    server *s = arg;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->queue && !s->stop) pthread_cond_wait(&s->work, &s->lock);
        prepared *p = s->queue;
        if (p && !(s->queue = p->next)) s->queue_end = &s->queue;
        const bool stop = s->stop;
        pthread_mutex_unlock(&s->lock);
        if (stop) {
            if (!p) return NULL;
            fault_set(&p->f, 503, "shutting_down", "the server is shutting down");
        } else if (!chat_prepare(p->c, p->body, &p->f)) {
            CHECK(p->f.status, "refused without a reason");
        }
        job_bridge_post(s->bridge, on_prepared, p);
    }
}

static void on_gone(void *own) {
    chat *c = own;
    if (c->preparing)
        c->orphan = true;
    else
        chat_gone(c);
    c->call = NULL;
}

static void begin_chat(server *s, http_call *call, const chat_dialect *d) {
    chat *c = chat_new(d, &s->model, call);
    http_call_own(call, c, on_gone);
    list_add(s, c);
    s->counts.requests++;
    if (s->n_preparing >= s->o->max_preparing) {
        fault f = { 0 };
        s->counts.refused++;
        fault_set(&f, 429, "queue_full", "%d requests are waiting already (try again later)", s->n_preparing);
        chat_fail(c, &f);
        return;
    }
    prepared *p = xcalloc(1, sizeof *p);
    const str body = http_call_body(call);
    char *copy = xmalloc(body.n + 1);
    memcpy(copy, body.p, body.n);
    copy[body.n] = 0;
    p->s = s;
    p->c = c;
    p->body = (str){ copy, body.n };
    c->preparing = true;
    s->n_preparing++;
    pthread_mutex_lock(&s->lock);
    *s->queue_end = p;
    s->queue_end = &p->next;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
}

/* ---- requests ---- */

static void refuse(http_call *c, const chat_dialect *d, int status, const char *code, const char *message, int retry) {
    fault f = { 0 };
    buf b = { 0 };
    fault_set(&f, status, code, "%s", message);
    f.retry_after = retry;
    (d && d->write_fault ? d->write_fault : fault_write)(&b, &f);
    http_reply_fault_json(c, &f, &b);
    buf_free(&b);
}

static const chat_dialect *find_dialect(str path) {
    for (size_t i = 0; i < ARRAY_LEN(dialects); i++)
        if (str_is(path, dialects[i]->path)) return dialects[i];
    return NULL;
}

static void refuse_path(http_call *c, str path) {
    if (admin_has(path)) {
        http_reply_header(c, "Allow", "GET, HEAD, OPTIONS");
        refuse(c, NULL, 405, "method_not_allowed", "this endpoint takes GET", 0);
    } else
        refuse(c, NULL, 404, "not_found", "no such endpoint (those of the OpenAI API are below /v1/)", 0);
}

static void on_request(void *ctx, http_call *c) {
    server *s = ctx;
    const str path = http_call_path(c);
    const http_method m = http_call_method(c);
    const chat_dialect *d = find_dialect(path);
    const char *coding = http_call_header(c, "Content-Encoding");
    char id[25];
    api_random_id(id);
    http_reply_header(c, "X-Request-Id", id); /* a generation puts its own in this place */
    admin_cors(s, c);
    if (m == HTTP_OPTIONS) {
        admin_preflight(s, c);
        return;
    }
    if (!d && (m == HTTP_GET || m == HTTP_HEAD) && admin_request(s, c, path)) return;
    if (!admin_authorized(s, c))
        refuse(c, d, 401, "invalid_api_key", "a valid key is needed: Authorization: Bearer KEY", 0);
    else if (!d)
        refuse_path(c, path);
    else if (m != HTTP_POST) {
        http_reply_header(c, "Allow", "POST, OPTIONS");
        refuse(c, d, 405, "method_not_allowed", "this endpoint takes POST", 0);
    } else if (coding && strcasecmp(coding, "identity") != 0)
        refuse(c, d, 415, "unsupported_encoding", "Content-Encoding: bodies have to come as they are", 0);
    else if (s->state == SERVER_LOADING)
        refuse(c, d, 503, "loading", "the model is being loaded", 5);
    else if (s->state == SERVER_DRAINING)
        refuse(c, d, 503, "shutting_down", "the server is shutting down", 30);
    else
        begin_chat(s, c, d);
}

static void on_answered(void *ctx, http_call *call) {
    server *s = ctx;
    const int status = http_call_status(call);
    s->counts.http[status >= 100 && status < 600 ? status / 100 : 0]++;
}

static void on_over(void *ctx, http_call *call) {
    server *s = ctx;
    chat *c = http_call_owner(call);
    access_log(s, call, c);
    if (!c) return;
    list_remove(s, c);
    c->call = NULL;
    if (!c->preparing) chat_free(c);
}

/* ---- time ---- */

bool server_engine_alive(server *s) {
    if (!s->l) return false;
    const loop_stats t = loop_counted(s->l);
    const double now = clock_seconds();
    if (t.steps != s->last_steps || job_bridge_jobs(s->bridge) == 0) {
        s->last_steps = t.steps;
        s->last_progress = now;
    }
    const int chunks = 1 + (s->g->chunk - 1) / STALL_ROWS; /* a step is as long as its rows are many */
    return now - s->last_progress < STALL_SECONDS * (double)chunks;
}

static bool feel_pulse(server *s) {
    const loop_pulse p = loop_feel_pulse(s->l);
    const bool changed = p.beats != s->pulse.beats || p.cpu_ns != s->pulse.cpu_ns;
    s->pulse = p;
    if (changed) s->silent_ticks = 0;
    return changed;
}

bool server_engine_beats(server *s) { return feel_pulse(s) || s->silent_ticks < SILENT_TICKS; }

/* The time for draining is over: who still waits for an answer is told so. */
static void cut_off(server *s) {
    s->cut_off = true;
    for (chat *c = s->chats, *next; c; c = next) {
        fault f = { 0 };
        next = c->next;
        if (c->open == 0 || !c->call) continue; /* being prepared, or answered and not yet sent */
        fault_set(&f, 503, "shutting_down", "the server is shutting down: this answer ends here");
        s->counts.failed++;
        c->counted = true;
        chat_fail(c, &f);
    }
}

static void finish_drain(server *s) {
    const double waited = clock_seconds() - s->drain_since, limit = s->o->drain_seconds;
    if (s->n_chats > 0 && (limit == 0 || waited < limit)) return;
    if (s->n_chats > 0 && !s->cut_off) cut_off(s);
    if (s->n_chats > 0 && waited < limit + LAST_WORDS_SECONDS) return;
    event_base_loopbreak(s->base);
}

static void on_tick(evutil_socket_t fd, short what, void *arg) {
    (void)fd;
    (void)what;
    server *s = arg;
    const double now = clock_seconds();
    for (chat *c = s->chats; c; c = c->next)
        if (c->streaming && c->open > 0 &&
            now - http_stream_last_write(c->call) >= SSE_KEEP_ALIVE_SECONDS - TICK_MICROS * 1e-6)
            sse_comment(c->call, "keep-alive");
    if (s->state != SERVER_LOADING) {
        server_engine_alive(s);
        if (!feel_pulse(s) && ++s->silent_ticks == SILENT_TICKS)
            log_say("W-SERVE-FROZEN", "the engine thread has stopped (not ready until it goes on)");
    }
    if (s->state == SERVER_DRAINING) finish_drain(s);
}

static void on_signal(evutil_socket_t sig, short what, void *arg) {
    (void)what;
    server *s = arg;
    if (sig == SIGHUP) {
        err e = { 0 };
        if (!access_log_open(s, &e)) log_say("W-SERVE-LOG", "%s", e.msg);
        return;
    }
    if (s->state == SERVER_DRAINING || s->state == SERVER_LOADING) {
        s->code = s->state == SERVER_DRAINING ? 130 : 0;
        if (s->loading) _exit(130); /* nothing was begun, and loading cannot be interrupted */
        event_base_loopbreak(s->base);
        return;
    }
    s->state = SERVER_DRAINING;
    s->drain_since = clock_seconds();
    http_stop_accepting(s->h);
    log_say("N-SERVE-DRAIN", "%d requests are still running (another signal ends at once)", s->n_chats);
    finish_drain(s);
}

/* ---- loading ---- */

static void fill_model(server *s) {
    const serve_options *o = s->o;
    engine *g = s->g;
    const int64_t answers = (int64_t)g->st.slots + o->loop.max_queue; /* that can run or wait */
    int32_t *special = xcalloc((size_t)tokenizer_vocab(g->tok) + 1, sizeof *special);
    int n = 0;
    for (int id = 0; id < tokenizer_vocab(g->tok); id++)
        if (tokenizer_is_special(g->tok, id) && tokenizer_bytes(g->tok, id).n > 1) special[n++] = id;
    s->model = (chat_model){ .name = s->name,
                             .aliases = o->aliases.v,
                             .n_aliases = o->aliases.n,
                             .g = g,
                             .defaults = s->model.defaults,
                             .ctx = g->st.capacity,
                             .max_choices = (int)min_i64(CHAT_MAX_CHOICES, answers),
                             .max_answers = (int)min_i64(INT32_MAX, answers),
                             .thinking = o->thinking,
                             .deadline_seconds = o->deadline_seconds,
                             .created = (int64_t)time(NULL),
                             .vocab = s->vocab,
                             .special = special,
                             .n_special = n,
                             .think_end = tokenizer_find(g->tok, STR("</think>")) };
    s->env = (chat_env){ .l = s->l, .bridge = s->bridge, .metrics = &s->counts };
}

static void on_loaded(void *ctx) {
    server *s = ctx;
    pthread_join(s->loader, NULL);
    s->loading = false;
    if (s->fault.id) {
        event_base_loopbreak(s->base);
        return;
    }
    s->load_seconds = clock_seconds() - s->started;
    s->last_progress = clock_seconds();
    fill_model(s);
    s->state = SERVER_READY;
    server_start_page(s);
}

static bool selftest(server *s) {
    const int depth = s->o->loop.depth;
    return s->o->selftest ? engine_selftest_all(s->g, depth, &s->fault)
                          : engine_selftest(s->g, depth, BOOT_TEST_TOKENS, &s->fault);
}

static void *loader_run(void *arg) {
    server *s = arg;
    const serve_options *o = s->o;
    loop_options lo = o->loop;
    lo.on_step = job_bridge_step;
    lo.on_step_ctx = s->bridge;
    if (engine_open(&s->g, o->dir, &o->engine, &s->fault) && o->defaults(o->ctx, &s->model.defaults, s->g, &s->fault) &&
        grammar_vocab_new(&s->vocab, s->g->tok, s->g->n.real_vocab, &s->fault) && selftest(s) &&
        loop_open(&s->l, s->g, &lo, &s->fault) && loop_start(s->l, &s->fault)) {
    }
    job_bridge_post(s->bridge, on_loaded, s);
    return NULL;
}

/* ---- the whole ---- */

static char *name_of(const serve_options *o) {
    if (o->name) return xstrdup(o->name);
    char *path = realpath(o->dir, NULL);
    const char *slash = path ? strrchr(path, '/') : NULL;
    char *name = xstrdup(slash && slash[1] ? slash + 1 : o->dir);
    free(path);
    return name;
}

static bool start_thread(pthread_t *t, void *(*run)(void *), server *s, err *e) {
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int rc = pthread_create(t, NULL, run, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc == 0 || fail(e, ERR_MACHINE, "E-MACHINE-THREADS", "server: cannot start a thread");
}

static bool open_events(server *s, err *e) {
    static const struct timeval ticking = { 0, TICK_MICROS };
    s->base = event_base_new();
    if (!s->base) return fail(e, ERR_MACHINE, "E-SERVE-EVENTS", "server: no event loop (too many open files?)");
    if (!job_bridge_open(&s->bridge, s->base, e)) return false;
    s->tick = event_new(s->base, -1, EV_PERSIST, on_tick, s);
    s->sigterm = evsignal_new(s->base, SIGTERM, on_signal, s);
    s->sigint = evsignal_new(s->base, SIGINT, on_signal, s);
    s->sighup = evsignal_new(s->base, SIGHUP, on_signal, s);
    if (!s->tick || !s->sigterm || !s->sigint || !s->sighup || event_add(s->tick, &ticking) < 0 ||
        event_add(s->sigterm, NULL) < 0 || event_add(s->sigint, NULL) < 0 || event_add(s->sighup, NULL) < 0)
        return fail(e, ERR_MACHINE, "E-SERVE-EVENTS", "server: no event loop (too many open files?)");
    return true;
}

static void warn_open(const serve_options *o) {
    static const char *const local[] = { "127.0.0.1", "localhost", "::1" };
    for (size_t i = 0; i < ARRAY_LEN(local); i++)
        if (strcmp(o->host, local[i]) == 0) return;
    if (o->api_keys.n == 0)
        log_say("W-SERVE-OPEN", "%s: anyone who reaches this address can use the model (give an --api-key)", o->host);
}

static void close_all(server *s) {
    if (s->loading) pthread_join(s->loader, NULL);
    if (s->queue_end) {
        pthread_mutex_lock(&s->lock);
        s->stop = true;
        pthread_cond_signal(&s->work);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->preparer, NULL);
        job_bridge_flush(s->bridge);
    }
    http_close(s->h);
    loop_close(s->l);
    job_bridge_close(s->bridge);
    engine_close(s->g);
    if (s->vocab) grammar_vocab_free(s->vocab);
    struct event *events[] = { s->tick, s->sigterm, s->sigint, s->sighup };
    for (size_t i = 0; i < ARRAY_LEN(events); i++)
        if (events[i]) event_free(events[i]);
    if (s->base) event_base_free(s->base);
    if (s->log_fd > 2) close(s->log_fd);
    for (int i = 0; i < s->ignored_names.n; i++) free((char *)s->ignored_names.v[i]);
    arg_strings_free(&s->ignored_names);
    free((int32_t *)s->model.special);
    free(s->name);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
}

bool server_run(const serve_options *o, int *code, err *e) {
    server s = { .o = o, .log_fd = -1, .started = clock_seconds(), .name = name_of(o) };
    const http_hooks hooks = { .request = on_request, .answered = on_answered, .over = on_over, .ctx = &s };
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.work, NULL);
    signal(SIGPIPE, SIG_IGN);
    bool ok = open_events(&s, e) && access_log_open(&s, e) &&
              http_open(&s.h, s.base, o->host, o->port, &o->limits, &hooks, e);
    if (ok) {
        warn_open(o);
        s.queue_end = &s.queue;
        ok = start_thread(&s.preparer, preparer_run, &s, e);
        if (!ok) s.queue_end = NULL;
    }
    if (ok && (ok = start_thread(&s.loader, loader_run, &s, e))) {
        s.loading = true;
        event_base_dispatch(s.base);
        if (s.fault.id) {
            *e = s.fault;
            ok = false;
        }
    }
    *code = s.code;
    close_all(&s);
    return ok;
}
