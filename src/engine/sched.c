/* Who runs, and how many rows each gets in a pass. */
#include "base/clock.h"
#include "engine/loop_impl.h"

/* The order of service. Arrival numbers are unique, so this is total; a preempted choice comes back to its old place. */
static bool before(const seq *a, const seq *b) {
    return a->r->q.priority != b->r->q.priority ? a->r->q.priority > b->r->q.priority : a->order < b->order;
}

void sched_enqueue(loop *l, seq *s) {
    seq **at = &l->queue;
    while (*at && before(*at, s)) at = &(*at)->next;
    s->next = *at;
    *at = s;
    s->phase = SEQ_QUEUED;
    l->n_queue++;
}

void sched_unqueue(loop *l, seq *s) {
    seq **at = &l->queue;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    l->n_queue--;
}

void sched_release(loop *l, seq *s) {
    int i = 0;
    while (l->active[i] != s) i++;
    for (l->n_active--; i < l->n_active; i++) l->active[i] = l->active[i + 1];
    l->by_slot[s->slot] = NULL;
    kv_pages_drop(&l->g->st.pages, l->slot_of[s->slot]);
    s->slot = -1;
}

static bool over(loop *l, seq *s, double now) {
    if (atomic_load_explicit(&s->r->cancelled, memory_order_relaxed))
        request_end(l, s, GEN_CANCEL);
    else if (s->r->q.deadline_seconds > 0 && now >= s->r->q.deadline_seconds)
        request_end(l, s, GEN_DEADLINE);
    else
        return false;
    return true;
}

void sched_reap(loop *l) {
    const double now = clock_seconds();
    for (int i = l->n_active - 1; i >= 0; i--) (void)over(l, l->active[i], now);
    for (seq *s = l->queue, *next; s; s = next) {
        next = s->next;
        (void)over(l, s, now);
    }
}

/* ---- admission ---- */

/* The first choice of the request while its prompt is still being processed from the start. */
static bool leader_at_work(const seq *s) {
    const seq *first = &s->r->seqs[0];
    return s != first && first->phase == SEQ_PROMPT && first->out.output_tokens == 0 && s->out.output_tokens == 0;
}

/* Kept through preemption: what was generated goes on counting. */
static bool open_history(const loop *l, seq *s) {
    const sampler_params *p = &s->sampling;
    if (sampler_has_penalties(p) && !s->seen.state) {
        if (!history_open(&s->seen, l->g->config.vocab, &s->fault)) return false;
        history_prompt(&s->seen, s->tokens, s->n_tokens);
    }
    return s->edits.v || sampler_is_plain(p) || !choose_few(l->g, p, s->r->q.logprobs) ||
           choose_edits_open(&s->edits, l->g, p, &s->seen, &s->fault);
}

/* False, and nothing has changed, when there are no pages for what is known. Who runs must be able to grow a little. */
static bool admit(loop *l, seq *s, int slot) {
    s->slot = slot;
    s->done = s->pending = s->mtp_done = s->keep_pos = 0;
    const bool shares = leader_at_work(s);
    if (!shares && !reuse_start(l, s, l->n_active)) {
        kv_pages_drop(&l->g->st.pages, l->slot_of[slot]);
        s->slot = -1;
        return false;
    }
    sched_unqueue(l, s);
    s->phase = shares ? SEQ_SHARES : SEQ_PROMPT;
    l->by_slot[slot] = s;
    int i = l->n_active++;
    for (; i > 0 && before(s, l->active[i - 1]); i--) l->active[i] = l->active[i - 1];
    l->active[i] = s;
    if (!open_history(l, s)) request_fail(l, s);
    return true;
}

/* The newest of the lowest priority below `s`, or NULL. */
static seq *victim(const loop *l, const seq *s) {
    seq *last = l->n_active > 0 ? l->active[l->n_active - 1] : NULL;
    return last && last->r->q.priority < s->r->q.priority ? last : NULL;
}

static void preempt(loop *l, seq *s) {
    sched_release(l, s);
    sched_enqueue(l, s);
    l->counts.preempted++;
}

void sched_admit(loop *l) {
    while (l->queue) {
        seq *s = l->queue;
        int slot = 0;
        while (slot < l->slots && l->by_slot[slot]) slot++;
        if (slot < l->slots && admit(l, s, slot)) continue;
        seq *out = victim(l, s);
        if (!out) return;
        preempt(l, out);
    }
}

/* ---- the plan of a pass ---- */

static int cap_of(const loop *l, const seq *s) {
    const loop_request *q = &s->r->q;
    int cap = s->drafting ? l->opt.depth : 0;
    const int room = l->g->st.capacity - s->done - 1;
    const bool whole = q->whole_rounds || q->on_round;
    const int left = q->max_tokens > 0 && !whole ? q->max_tokens - s->out.output_tokens - 1 : cap;
    if (q->depth >= 0 && q->depth < cap) cap = q->depth;
    if (room < cap) cap = room;
    return left < cap ? left : cap;
}

/* Prompts get what generation leaves, at least a quarter of the pass; the oldest at least half of that, so that short ones
 * behind a long one still come soon. */
static int plan_prompts(loop *l, int left, int waiting) {
    int rows = 0, others = waiting;
    bool first = true;
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->phase != SEQ_PROMPT) continue;
        others -= s->n_tokens - s->done;
        s->stop_at = reuse_stop(l, s);
        const int want = s->stop_at - s->done;
        int most = left;
        if (first && others > 0) most = left - (int)min_i64(left / 2, others);
        first = false;
        s->rows = want < most ? want : most;
        left -= s->rows;
        rows += s->rows;
    }
    return rows;
}

static bool have_pages(loop *l, seq *s) {
    if (s->phase == SEQ_DECODE) return reuse_grow(l, s, s->done + 1 + cap_of(l, s));
    if (s->phase == SEQ_PROMPT) return reuse_retry(l, s);
    if (!reuse_start(l, s, 0)) return false; /* it waited in vain for another's prompt */
    s->phase = SEQ_PROMPT;
    return true;
}

/* Every running choice gets the pages that this pass may write; when there are none left, the newest of the lowest priority
 * goes back to the queue. The first one always stays: the pages are enough for one whole context. */
static void plan_pages(loop *l) {
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->phase == SEQ_SHARES && leader_at_work(s)) continue;
        while (s->slot >= 0 && !have_pages(l, s)) {
            CHECK(l->n_active > 1, "no pages for one sequence");
            preempt(l, l->active[l->n_active - 1]);
        }
    }
}

int sched_plan(loop *l) {
    int n = 0, can = 0, cap = 0, waiting = 0, rows = 0, ready = 0; /* ready: taken up whole */
    plan_pages(l);
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        s->rows = s->depth = 0;
        ready += s->phase == SEQ_PROMPT && s->done == s->n_tokens;
        if (s->phase == SEQ_PROMPT) waiting += s->n_tokens - s->done;
        if (s->phase != SEQ_DECODE) continue;
        n++;
        s->depth = cap_of(l, s);
        can += s->depth > 0;
        if (s->depth > cap) cap = s->depth;
    }
    const int least = n + (waiting > 0);
    const int budget = l->opt.budget_rows > least ? l->opt.budget_rows : least;
    const int reserve = waiting > 0 ? (int)min_i64(waiting, max_i64(1, budget / 4)) : 0;
    if (n > 0) cap = (int)min_i64(cap, max_i64(0, (budget - reserve) / n - 1));
    l->n_decode = n;
    const bool all = waiting == 0 && can == n && !l->test; /* such steps tell what drafts cost */
    l->step_depth = n == 0 || l->opt.fixed_depth ? cap : depth_pick(&l->model, n, can, cap, all);
    l->timed = !l->opt.fixed_depth && waiting == 0 && !l->test && (all || l->step_depth == 0);
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->phase != SEQ_DECODE) continue;
        const int most = s->r->own ? cap : l->step_depth; /* a test of drafts needs some */
        if (s->depth > most) s->depth = most;
        s->rows = 1 + s->depth;
        rows += s->rows;
    }
    if (waiting > 0) rows += plan_prompts(l, budget - rows, waiting);
    return rows + ready;
}
