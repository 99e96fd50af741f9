#include "serve/job.h"

#include <errno.h>
#include <event2/event.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "text/reply.h"

typedef struct post {
    struct post *next;
    void (*fn)(void *ctx);
    void *ctx;
} post;

/* Looks for what ends an answer: a stop string, the end of the one call that may be made. */
typedef struct watcher {
    reply r;
    bool called;
} watcher;

struct job_bridge {
    pthread_mutex_t lock;
    job *dirty, **dirty_end;
    post *posts, **posts_end;
    bool signalled;
    int fd;
    struct event *wake;
    int jobs; /* event thread */
};

struct job {
    job_bridge *b;
    loop *l;
    uint64_t handle;
    job *next_dirty; /* under the bridge's lock, as are dirty, news, done_rows, total_rows */
    bool dirty;
    job_news news;
    int done_rows, total_rows;
    int n_top, choices;
    job_result *results; /* [choices]: written before the token that says so */
    watcher *watch;      /* [choices] engine thread; NULL: nothing but the engine ends an answer */
    char **stops;        /* [n_stops] */
    int n_stops;
    arena mem; /* of tools */
    void *held;
    void (*held_free)(void *held);
    /* event thread */
    void (*ready)(void *owner); /* NULL: abandoned */
    void *owner;
    int open; /* choices whose end was not taken */
};

/* ---- the bridge ---- */

static void signal_now(job_bridge *b) {
    const uint64_t one = 1;
    while (write(b->fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

static void drain_abandoned(job *j) {
    job_news news = { 0 };
    job_take(j, &news);
    job_news_free(&news);
    if (j->open == 0) job_free(j);
}

void job_bridge_flush(job_bridge *b) {
    pthread_mutex_lock(&b->lock);
    b->signalled = false;
    post *p = b->posts;
    b->posts = NULL;
    b->posts_end = &b->posts;
    pthread_mutex_unlock(&b->lock);
    while (p) {
        post *next = p->next;
        p->fn(p->ctx);
        free(p);
        p = next;
    }
}

static void on_wake(evutil_socket_t fd, short what, void *arg) {
    (void)what;
    job_bridge *b = arg;
    uint64_t n;
    while (read(fd, &n, sizeof n) < 0 && errno == EINTR) {
    }
    job_bridge_flush(b);
    for (;;) { /* one at a time: `ready` may free any job */
        pthread_mutex_lock(&b->lock);
        job *j = b->dirty;
        if (j) {
            b->dirty = j->next_dirty;
            if (!b->dirty) b->dirty_end = &b->dirty;
            j->dirty = false;
        }
        pthread_mutex_unlock(&b->lock);
        if (!j) return;
        if (j->ready)
            j->ready(j->owner);
        else
            drain_abandoned(j);
    }
}

bool job_bridge_open(job_bridge **out, struct event_base *base, err *e) {
    job_bridge *b = xcalloc(1, sizeof *b);
    b->dirty_end = &b->dirty;
    b->posts_end = &b->posts;
    pthread_mutex_init(&b->lock, NULL);
    b->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    b->wake = b->fd < 0 ? NULL : event_new(base, b->fd, EV_READ | EV_PERSIST, on_wake, b);
    if (b->wake && event_add(b->wake, NULL) == 0) return *out = b, true;
    job_bridge_close(b);
    *out = NULL;
    return fail(e, ERR_MACHINE, "E-SERVE-EVENTS", "server: no event descriptor (too many open files?)");
}

void job_bridge_close(job_bridge *b) {
    if (!b) return;
    while (b->posts) {
        post *p = b->posts;
        b->posts = p->next;
        free(p);
    }
    while (b->dirty) { /* the loop is closed: what is left was abandoned and has ended */
        job *j = b->dirty;
        b->dirty = j->next_dirty;
        j->dirty = false;
        drain_abandoned(j);
    }
    if (b->wake) event_free(b->wake);
    if (b->fd >= 0) close(b->fd);
    pthread_mutex_destroy(&b->lock);
    free(b);
}

void job_bridge_post(job_bridge *b, void (*fn)(void *ctx), void *ctx) {
    post *p = xcalloc(1, sizeof *p);
    p->fn = fn;
    p->ctx = ctx;
    pthread_mutex_lock(&b->lock);
    *b->posts_end = p;
    b->posts_end = &p->next;
    const bool first = !b->signalled;
    b->signalled = true;
    pthread_mutex_unlock(&b->lock);
    if (first) signal_now(b);
}

int job_bridge_jobs(const job_bridge *b) { return b->jobs; }

/* ---- the engine's side ---- */

void job_bridge_step(void *bridge) {
    job_bridge *b = bridge;
    pthread_mutex_lock(&b->lock);
    const bool news = b->dirty && !b->signalled;
    if (news) b->signalled = true;
    pthread_mutex_unlock(&b->lock);
    if (news) signal_now(b); /* without the lock, which is what the other thread takes first */
}

static void put_locked(job *j, job_token t) {
    job_news *n = &j->news;
    if (n->n == n->cap) {
        n->cap = n->cap ? 2 * n->cap : 16;
        n->v = xrealloc(n->v, n->cap * sizeof *n->v);
    }
    n->v[n->n++] = t;
    if (j->dirty) return;
    j->dirty = true;
    j->next_dirty = NULL;
    *j->b->dirty_end = j;
    j->b->dirty_end = &j->next_dirty;
}

static void put_top_locked(job_news *n, const int32_t *ids, const double *values, int count) {
    if (n->n_top + (size_t)count > n->cap_top) {
        n->cap_top = 2 * (n->n_top + (size_t)count);
        n->top_ids = xrealloc(n->top_ids, n->cap_top * sizeof *n->top_ids);
        n->top_logprobs = xrealloc(n->top_logprobs, n->cap_top * sizeof *n->top_logprobs);
    }
    memcpy(n->top_ids + n->n_top, ids, (size_t)count * sizeof *ids);
    memcpy(n->top_logprobs + n->n_top, values, (size_t)count * sizeof *values);
    n->n_top += (size_t)count;
}

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top_ids,
                     const double *top_logprobs) {
    job *j = ctx;
    const bool go_on = !j->watch || (reply_push(&j->watch[choice].r, id) && !j->watch[choice].called);
    pthread_mutex_lock(&j->b->lock);
    const size_t top = j->news.n_top;
    if (top_ids) put_top_locked(&j->news, top_ids, top_logprobs, j->n_top);
    put_locked(j, (job_token){ choice, id, logprob, top });
    pthread_mutex_unlock(&j->b->lock);
    return go_on;
}

static void on_prompt_token(void *ctx, int at, int32_t id, double logprob, const int32_t *top_ids,
                            const double *top_logprobs) {
    (void)at;
    job *j = ctx;
    pthread_mutex_lock(&j->b->lock);
    const size_t top = j->news.n_top;
    put_top_locked(&j->news, top_ids, top_logprobs, j->n_top);
    put_locked(j, (job_token){ -1, id, logprob, top });
    pthread_mutex_unlock(&j->b->lock);
}

static void on_piece(void *ctx, split_kind kind, str text) {
    (void)text;
    watcher *w = ctx;
    if (kind == SPLIT_CALL_END) w->called = true;
}

static void on_prompt(void *ctx, int choice, int done, int total) {
    job *j = ctx;
    if (choice != 0) return;
    pthread_mutex_lock(&j->b->lock);
    j->done_rows = done;
    j->total_rows = total;
    pthread_mutex_unlock(&j->b->lock);
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    job *j = ctx;
    pthread_mutex_lock(&j->b->lock);
    j->results[choice] = (job_result){ .over = true, .r = *r };
    if (e->id) j->results[choice].fault = *e;
    put_locked(j, (job_token){ .choice = choice, .id = -1 });
    pthread_mutex_unlock(&j->b->lock);
}

/* ---- the event thread's side ---- */

/* The request's trees go when its client does, which may be while the engine is at work. */
static const json *copy_tree(arena *mem, const json *v) {
    static const json_limits limits = { .max_depth = JSON_DEPTH_MAX, .allow_duplicates = true };
    buf b = { 0 };
    err e = { 0 };
    const json *copy = NULL;
    json_write(&b, v);
    CHECK(json_parse(&copy, mem, buf_view(&b), "tools", &limits, &e), "%s", e.msg);
    buf_free(&b);
    return copy;
}

static void open_watch(job *j, const job_spec *s) {
    if (!s->n_stops && !s->one_call_of) return;
    const json *tools = s->one_call_of ? copy_tree(&j->mem, s->one_call_of) : NULL;
    j->n_stops = s->n_stops;
    j->stops = xcalloc((size_t)s->n_stops + 1, sizeof *j->stops);
    for (int i = 0; i < s->n_stops; i++) j->stops[i] = xstrdup(s->stops[i]);
    j->watch = xcalloc((size_t)j->choices, sizeof *j->watch);
    for (int i = 0; i < j->choices; i++) {
        watcher *w = &j->watch[i];
        const char *const *stops = (const char *const *)j->stops;
        if (tools)
            reply_init(&w->r, s->tok, s->thinking, tools, stops, s->n_stops);
        else
            reply_init_plain(&w->r, s->tok, stops, s->n_stops);
        if (tools && s->calls_first) split_calls_first(w->r.s);
        w->r.min_tokens = s->min_tokens;
        w->r.on_piece = on_piece;
        w->r.ctx = w;
    }
}

bool job_submit(job **out, job_bridge *b, loop *l, const job_spec *s, err *e) {
    job *j = xcalloc(1, sizeof *j);
    j->b = b;
    j->l = l;
    j->choices = j->open = s->request.choices > 0 ? s->request.choices : 1;
    j->n_top = s->request.logprobs;
    j->results = xcalloc((size_t)j->choices, sizeof *j->results);
    j->ready = s->ready;
    j->owner = s->owner;
    j->held = s->held;
    j->held_free = s->held_free;
    open_watch(j, s);
    loop_request q = s->request;
    q.choices = j->choices;
    q.on_token = on_token;
    q.on_prompt = on_prompt;
    q.on_prompt_token = s->score_prompt ? on_prompt_token : NULL;
    q.on_done = on_done;
    q.ctx = j;
    b->jobs++;
    if (loop_submit(l, &j->handle, &q, e)) return *out = j, true;
    *out = NULL;
    job_free(j);
    return false;
}

void job_take(job *j, job_news *news) {
    pthread_mutex_lock(&j->b->lock);
    const job_news mine = *news;
    *news = j->news;
    j->news = mine;
    j->news.n = j->news.n_top = 0;
    pthread_mutex_unlock(&j->b->lock);
    for (size_t i = 0; i < news->n; i++) j->open -= news->v[i].id < 0;
}

void job_news_free(job_news *n) {
    free(n->v);
    free(n->top_ids);
    free(n->top_logprobs);
    *n = (job_news){ 0 };
}

const job_result *job_result_of(const job *j, int choice) { return &j->results[choice]; }

void job_progress(job *j, int *done, int *total) {
    pthread_mutex_lock(&j->b->lock);
    *done = j->done_rows;
    *total = j->total_rows;
    pthread_mutex_unlock(&j->b->lock);
}

void job_abandon(job *j) {
    j->ready = NULL;
    loop_cancel(j->l, j->handle);
    drain_abandoned(j);
}

/* Out of the list of those with news. */
static void forget_news(job *j) {
    job_bridge *b = j->b;
    pthread_mutex_lock(&b->lock);
    job **at = &b->dirty;
    while (*at && *at != j) at = &(*at)->next_dirty;
    if (*at) {
        *at = j->next_dirty;
        b->dirty_end = &b->dirty;
        while (*b->dirty_end) b->dirty_end = &(*b->dirty_end)->next_dirty;
    }
    pthread_mutex_unlock(&b->lock);
}

void job_free(job *j) {
    forget_news(j);
    j->b->jobs--;
    for (int i = 0; i < j->n_stops; i++) free(j->stops[i]);
    free(j->stops);
    if (j->held) j->held_free(j->held);
    for (int i = 0; j->watch && i < j->choices; i++) reply_free(&j->watch[i].r);
    free(j->watch);
    free(j->results);
    arena_free(&j->mem);
    job_news_free(&j->news);
    free(j);
}
