/* The loop itself: opening, the inbox that other threads fill, the step, the thread. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/identity.h"
#include "engine/loop_impl.h"

enum { DEFAULT_QUEUE = 1024, DEFAULT_EVERY = 4096 };

static const int64_t DEFAULT_DIR_BYTES = 16000000000;

static bool device_rows(loop *l, float **out, int64_t rows, err *e) {
    void *p = NULL;
    const bool ok = l->g->o->mem_new(l->g->o, &p, (size_t)(rows * l->g->config.hidden) * sizeof **out, e);
    *out = p;
    return ok;
}

static bool take_slots(loop *l, err *e) {
    engine *g = l->g;
    l->slot_of = xcalloc((size_t)g->st.slots, sizeof *l->slot_of);
    for (int i = 0; i < g->st.slots; i++) {
        if (g->slot_used[i]) continue;
        g->slot_used[i] = 1;
        l->slot_of[l->slots++] = i;
    }
    l->pages = g->pages_left;
    g->pages_left = 0;
    if (l->slots > 0 && l->pages >= g->st.pages.slot_pages) return true;
    return fail(e, ERR_MACHINE, "E-ENGINE-SLOTS", "all %d sequences are in use (raise --max-seqs)", g->st.slots);
}

static bool open_buffers(loop *l, err *e) {
    const size_t n = (size_t)l->slots;
    const int rows = l->g->sc.rows > l->g->sc.head_rows ? l->g->sc.rows : l->g->sc.head_rows;
    l->by_slot = xcalloc(n, sizeof(seq *));
    l->active = xcalloc(n, sizeof(seq *));
    l->group = xcalloc(n, sizeof(seq *));
    l->todo = xcalloc(n, sizeof(seq *));
    l->own = xcalloc(n, sizeof(id_set *));
    l->spans = xcalloc(n, sizeof *l->spans);
    l->choice = xcalloc(n, sizeof *l->choice);
    l->ids = xcalloc((size_t)rows, sizeof *l->ids);
    const size_t top = (size_t)l->g->sc.head_rows * HEAD_MAX_TOP;
    l->top_ids = xcalloc(top, sizeof *l->top_ids);
    l->top_logits = xcalloc(top, sizeof *l->top_logits);
    if (l->g->n.heads.top) {
        l->edits_cap = choose_most_edits(l->g) + ENGINE_MAX_DRAFT;
        const size_t cap = (size_t)l->edits_cap, head_rows = (size_t)l->g->sc.head_rows;
        l->edit_ids = xcalloc(n * cap, sizeof *l->edit_ids);
        l->edit_logits = xcalloc(head_rows * cap, sizeof *l->edit_logits);
        l->room.ids = xcalloc(cap + HEAD_MAX_TOP, sizeof *l->room.ids);
        l->room.logits = xcalloc(cap + HEAD_MAX_TOP, sizeof *l->room.logits);
    }
    depth_init(&l->model);
    return device_rows(l, &l->keep, (int64_t)l->slots * LOOP_KEEP_ROWS, e) && device_rows(l, &l->stage, rows, e) &&
           device_rows(l, &l->drafts, l->slots, e);
}

static bool open_prefix(loop *l, err *e) {
    engine *g = l->g;
    const int spare = g->st.pages.slots - g->st.slots;
    if (spare == 0 && l->opt.prefix_dir)
        log_say("W-PREFIX-SMALL", "%s: not used, the prefix cache in memory holds no state", l->opt.prefix_dir);
    if (spare == 0) return true;
    if (!prefix_open(&l->prefix, &g->st, spare, g->prefix_pages, e)) return false;
    if (!l->opt.prefix_dir) return true;
    prefix_disk *d;
    const int64_t most = l->opt.prefix_dir_bytes > 0 ? l->opt.prefix_dir_bytes : DEFAULT_DIR_BYTES;
    if (!prefix_disk_open(&d, l->opt.prefix_dir, engine_identity(g, l->opt.depth > 0), e)) return false;
    prefix_use_disk(l->prefix, d, most);
    const prefix_counts c = prefix_counted(l->prefix);
    log_say("N-PREFIX-DIR", "%s: %d states in %.2f GB of at most %.2f", l->opt.prefix_dir, c.files,
            (double)c.file_bytes / 1e9, (double)most / 1e9);
    return true;
}

bool loop_open(loop **out, engine *g, const loop_options *opt, err *e) {
    CHECK(opt->depth >= 0 && opt->depth <= ENGINE_MAX_DRAFT && opt->budget_rows >= 0 && opt->max_queue >= 0 &&
              opt->prefix_every >= 0,
          "depth %d, budget %d, queue %d", opt->depth, opt->budget_rows, opt->max_queue);
    loop *l = xcalloc(1, sizeof *l);
    l->g = g;
    l->opt = *opt;
    if (!g->n.has_mtp) l->opt.depth = 0;
    if (l->opt.budget_rows == 0 || l->opt.budget_rows > g->sc.rows) l->opt.budget_rows = g->sc.rows;
    if (l->opt.max_queue == 0) l->opt.max_queue = DEFAULT_QUEUE;
    if (l->opt.prefix_every == 0) l->opt.prefix_every = DEFAULT_EVERY;
    l->inbox_end = &l->inbox;
    pthread_mutex_init(&l->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&l->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (take_slots(l, e) && open_buffers(l, e) && open_prefix(l, e)) {
        loop_publish(l); /* what an opened cache found is known before the first step */
        return *out = l, true;
    }
    loop_close(l);
    *out = NULL;
    return false;
}

/* ---- the inbox ---- */

bool loop_submit(loop *l, uint64_t *handle, const loop_request *q, err *e) {
    request *r;
    if (!request_new(&r, l, q, e)) return false;
    pthread_mutex_lock(&l->lock);
    const bool fits = l->open + r->q.choices <= l->slots + l->opt.max_queue;
    if (fits) {
        l->open += r->q.choices;
        r->handle = ++l->last_handle;
        if (handle) *handle = r->handle;
        for (int i = 0; i < r->q.choices; i++) r->seqs[i].order = ++l->last_order;
        r->next = l->all;
        if (l->all) l->all->prev = r;
        l->all = r;
        *l->inbox_end = r;
        l->inbox_end = &r->inbox_next;
        pthread_cond_signal(&l->wake);
    }
    pthread_mutex_unlock(&l->lock);
    if (fits) return true;
    request_free(r);
    return fail(e, ERR_MACHINE, "E-ENGINE-QUEUE", "request: %d are waiting already (try again later)",
                l->opt.max_queue);
}

void loop_cancel(loop *l, uint64_t handle) {
    pthread_mutex_lock(&l->lock);
    request *r = l->all;
    while (r && r->handle != handle) r = r->next;
    if (r) atomic_store_explicit(&r->cancelled, true, memory_order_relaxed);
    pthread_cond_signal(&l->wake);
    pthread_mutex_unlock(&l->lock);
}

static void take_inbox(loop *l) {
    pthread_mutex_lock(&l->lock);
    request *r = l->inbox;
    l->inbox = NULL;
    l->inbox_end = &l->inbox;
    pthread_mutex_unlock(&l->lock);
    for (request *next; r; r = next) {
        next = r->inbox_next;
        l->counts.submitted += r->q.choices;
        for (int i = 0; i < r->q.choices; i++) sched_enqueue(l, &r->seqs[i]);
    }
}

void loop_publish(loop *l) {
    const kv_pages *p = &l->g->st.pages;
    l->counts.slots = l->slots;
    l->counts.kv_pages = p->pages;
    l->counts.kv_used = p->pages - p->n_unused;
    l->counts.kv_kept = p->n_kept;
    l->counts.running = l->n_active;
    l->counts.waiting = l->n_queue;
    if (l->prefix) {
        const prefix_counts c = prefix_counted(l->prefix);
        l->counts.prefix_entries = c.entries;
        l->counts.prefix_bytes = c.entries * config_state_bytes(&l->g->config) +
                                 c.pages * state_page_bytes(&l->g->config, l->g->kv_type, l->g->n.has_mtp);
        l->counts.prefix_made = c.made;
        l->counts.prefix_evicted = c.evicted;
        l->counts.prefix_forgotten = c.forgotten;
        l->counts.prefix_files = c.files;
        l->counts.prefix_file_bytes = c.file_bytes;
        l->counts.prefix_loaded = c.loaded;
    }
    pthread_mutex_lock(&l->lock);
    l->published = l->counts;
    pthread_mutex_unlock(&l->lock);
}

loop_stats loop_counted(loop *l) {
    pthread_mutex_lock(&l->lock);
    const loop_stats s = l->published;
    pthread_mutex_unlock(&l->lock);
    return s;
}

/* ---- the step ---- */

/* One pass for everyone who runs. An error here is the device's: it is everyone's. */
static bool run_pass(loop *l, err *e) {
    if (!round_draft(l, e)) return false;
    round_trunk(l);
    return round_prompts(l, e) && round_choose(l, e);
}

static void fail_all(loop *l, const err *e) {
    while (l->n_active > 0) {
        seq *s = l->active[l->n_active - 1];
        s->fault = *e;
        request_fail(l, s);
    }
}

bool loop_step(loop *l) {
    const double t0 = clock_seconds();
    err e = { 0 };
    take_inbox(l);
    sched_reap(l);
    sched_admit(l);
    l->work_seconds = 0;
    const int rows = sched_plan(l);
    if (rows > 0) {
        l->counts.steps++; /* before the answers that it completes are handed out */
        if (l->n_decode > 0) l->counts.depth_steps[l->step_depth]++;
        if (!run_pass(l, &e)) fail_all(l, &e);
        if (l->timed && l->n_decode > 0) depth_timed(&l->model, l->n_decode, l->step_depth, l->work_seconds);
        l->counts.step_seconds += clock_seconds() - t0;
        l->counts.work_seconds += l->work_seconds;
    }
    alarm_step(l);
    loop_publish(l);
    if (l->opt.on_step) l->opt.on_step(l->opt.on_step_ctx);
    return rows > 0 || l->n_queue > 0;
}

void loop_set_depth(loop *l, int depth, bool fixed) {
    CHECK(depth >= 0 && depth <= ENGINE_MAX_DRAFT, "depth %d", depth);
    l->opt.depth = l->g->n.has_mtp ? depth : 0;
    l->opt.fixed_depth = fixed;
}

/* ---- the thread ---- */

static void wait_for_work(loop *l) {
    enum { BEAT_NS = 100000000 };
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += BEAT_NS;
    if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
    pthread_mutex_lock(&l->lock);
    if (!l->stop && !l->inbox) pthread_cond_timedwait(&l->wake, &l->lock, &t);
    pthread_mutex_unlock(&l->lock);
}

loop_pulse loop_feel_pulse(const loop *l) {
    loop_pulse p = { .beats = atomic_load_explicit(&l->beats, memory_order_relaxed), .cpu_ns = -1 };
    clockid_t clock;
    struct timespec t;
    if (l->threaded && pthread_getcpuclockid(l->thread, &clock) == 0 && clock_gettime(clock, &t) == 0)
        p.cpu_ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    return p;
}

static void *run(void *arg) {
    loop *l = arg;
    pthread_setname_np(pthread_self(), "engine");
    for (;;) {
        atomic_fetch_add_explicit(&l->beats, 1, memory_order_relaxed);
        pthread_mutex_lock(&l->lock);
        const bool stop = l->stop;
        pthread_mutex_unlock(&l->lock);
        if (stop) return NULL;
        /* When nothing runs and nothing waits, there is no deadline to watch either. */
        if (!loop_step(l)) wait_for_work(l);
    }
}

bool loop_start(loop *l, err *e) {
    CHECK(!l->threaded, "the loop has a thread already");
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* as in pool.c: signals belong to the threads that know what to do with them */
    l->stop = false;
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int rc = pthread_create(&l->thread, NULL, run, l);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) return fail(e, ERR_MACHINE, "E-MACHINE-THREADS", "loop: cannot start a thread");
    l->threaded = true;
    return true;
}

void loop_stop(loop *l) {
    if (!l->threaded) return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_signal(&l->wake);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    l->threaded = false;
}

static void end_all(loop *l) {
    take_inbox(l);
    while (l->n_active > 0) request_end(l, l->active[l->n_active - 1], GEN_CANCEL);
    while (l->queue) request_end(l, l->queue, GEN_CANCEL);
}

void loop_close(loop *l) {
    if (!l) return;
    loop_stop(l);
    do end_all(l);
    while (l->inbox); /* a callback may have submitted */
    for (int i = 0; i < l->slots; i++) l->g->slot_used[l->slot_of[i]] = 0;
    l->g->pages_left += l->pages;
    alarm_close(l);
    prefix_close(l->prefix);
    float *rows[] = { l->keep, l->stage, l->drafts };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++)
        if (rows[i]) l->g->o->mem_free(l->g->o, rows[i]);
    void *own[] = { l->slot_of,     l->by_slot,  l->active,      l->group,    l->todo,
                    (void *)l->own, l->spans,    l->choice,      l->ids,      l->top_ids,
                    l->top_logits,  l->edit_ids, l->edit_logits, l->room.ids, l->room.logits };
    for (size_t i = 0; i < ARRAY_LEN(own); i++) free(own[i]);
    pthread_cond_destroy(&l->wake);
    pthread_mutex_destroy(&l->lock);
    free(l);
}
