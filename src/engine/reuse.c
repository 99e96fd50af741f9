/* What the loop keeps for later requests, what it takes up, and who has to go when memory ends.
 *
 * Entries are left where another request is likely to begin: behind the first and the last message of a prompt, behind the
 * whole prompt, behind the answer, every `prefix_every` tokens, and where this prompt leaves an earlier one. */
#include "engine/loop_impl.h"

/* A state is as large as the KV of thousands of tokens: not kept for the first words that all requests share. */
enum { LEAST_BRANCH = 64 };

static int slot_of(const loop *l, const seq *s) { return l->slot_of[s->slot]; }

static bool uses_cache(const loop *l, const seq *s) { return l->prefix && !s->r->own && !score_wanted(s->r); }

static float *kept(const loop *l, const seq *s, int p) {
    return l->keep + ((int64_t)s->slot * LOOP_KEEP_ROWS + (p - s->keep_pos)) * l->g->config.hidden;
}

/* Pages that nobody has and that no session has laid claim to. */
static int unused(const loop *l) {
    const kv_pages *p = &l->g->st.pages;
    int claimed = p->pages - l->pages;
    if (claimed == 0) return p->n_unused;
    for (int i = 0; i < p->running; i++) claimed -= p->held[i];
    for (int i = 0; i < l->slots; i++) claimed += p->held[l->slot_of[i]];
    return p->n_unused - claimed;
}

/* Entries but x go until `n` pages are unused; none of them when that would not be enough. */
static bool room_beside(loop *l, int n, const prefix_entry *x) {
    const int have = unused(l);
    if (have >= n) return true;
    if (!l->prefix) return false;
    const int but = x && prefix_load_pages(x) == 0 ? prefix_slot(l->prefix, x) : -1;
    if (have + kv_pages_only_kept(&l->g->st.pages, but) < n) return false;
    while (unused(l) < n)
        if (!prefix_evict(l->prefix, x)) return false;
    return true;
}

bool reuse_room(loop *l, int n) { return room_beside(l, n, NULL); }

bool reuse_grow(loop *l, seq *s, int positions) {
    kv_pages *p = &l->g->st.pages;
    const int slot = slot_of(l, s);
    return reuse_room(l, kv_pages_for(positions) - p->held[slot]) && kv_pages_grow(p, slot, positions);
}

static void took_up(loop *l, seq *s, int length) {
    s->done = length;
    s->mtp_done = s->drafting ? length - 1 : 0;
    if (s->first_entry == 0 || length < s->first_entry) s->first_entry = length;
    l->counts.prefix_hits++;
    l->counts.prefix_tokens += length;
    if (s->out.output_tokens > 0) return; /* again, after preemption */
    /* Also what was taken up whole: its last position yields the first token, like one that was computed. */
    s->out.cached_tokens = length < s->n_tokens ? length : s->n_tokens - 1;
    if (s->r->q.on_prompt) s->r->q.on_prompt(s->r->q.ctx, s->choice, length, s->n_tokens);
}

/* The deepest entry; its pages are shared, so that the slot takes fewer of its own. */
static bool take_up(loop *l, seq *s, int positions, int spare) {
    int shared;
    prefix_entry *x = prefix_find(l->prefix, &shared, s->tokens, s->n_tokens);
    s->tried = prefix_version(l->prefix);
    s->branch = x && shared - prefix_length(x) < LEAST_BRANCH ? 0 : shared;
    if (!x) return false;
    const int load = prefix_load_pages(x);
    if (load > 0 && !(room_beside(l, load, x) && prefix_load(l->prefix, x))) return false;
    const int length = prefix_length(x), held = kv_pages_for(length) - prefix_restore_pages(l->prefix, x);
    if (!room_beside(l, kv_pages_for(positions) - held + spare, x)) return false;
    s->keep_pos = length - 1;
    if (!prefix_restore(l->prefix, x, slot_of(l, s), kept(l, s, length - 1))) return false;
    took_up(l, s, length);
    return true;
}

bool reuse_start(loop *l, seq *s, int spare) {
    seq_state *st = &l->g->st;
    const int slot = slot_of(l, s), positions = (int)min_i64(s->n_tokens + 1, st->capacity);
    kv_pages_drop(&st->pages, slot);
    if (!uses_cache(l, s) || !take_up(l, s, positions, spare)) {
        if (!reuse_room(l, kv_pages_for(positions) + spare)) return false;
        state_reset(st, slot);
    }
    CHECK(kv_pages_grow(&st->pages, slot, positions), "no pages for %d positions", positions);
    return true;
}

bool reuse_retry(loop *l, seq *s) {
    if (!uses_cache(l, s) || s->done > 0 || s->tried == prefix_version(l->prefix)) return true;
    return reuse_start(l, s, 0);
}

/* The marks count from the last entry on the way, so that a long conversation leaves few. */
static int next_mark(const loop *l, const seq *s) {
    const loop_request *q = &s->r->q;
    int last = 0;
    for (int i = 0; i < q->n_marks; i++) {
        const int at = q->marks[i];
        const bool wanted = i == 0 || i == q->n_marks - 1 || at - last >= l->opt.prefix_every;
        if (wanted && at > s->done) return at;
        if (wanted) last = at;
    }
    return s->n_tokens;
}

int reuse_stop(const loop *l, const seq *s) {
    int at = s->n_tokens;
    if (!uses_cache(l, s)) return at;
    const int every = l->opt.prefix_every, candidates[] = { next_mark(l, s), s->branch, (s->done / every + 1) * every };
    for (size_t i = 0; i < ARRAY_LEN(candidates); i++)
        if (candidates[i] > s->done && candidates[i] < at) at = candidates[i];
    return at;
}

static void leave(loop *l, seq *s, int length) {
    if (!reuse_room(l, state_copy_pages(&l->g->st, length, length - 1))) return;
    if (!prefix_put(l->prefix, s->tokens, length, slot_of(l, s), kept(l, s, length - 1))) return;
    if (s->first_entry == 0 || length < s->first_entry) s->first_entry = length;
}

void reuse_leave_prompt(loop *l, seq *s) {
    if (uses_cache(l, s) && s->done == s->stop_at && !(s->done == s->n_tokens && s->out.output_tokens > 0))
        leave(l, s, s->done);
}

/* Draft slots up to that of the position in front of the last become final. */
static void catch_up(loop *l, seq *s, int length) {
    const int first = s->mtp_done, rows = length - 1 - first;
    if (!s->drafting || rows <= 0) return;
    const ops_span span = { .slot = slot_of(l, s), .rows = rows, .pos0 = first };
    forward_mtp(&l->g->sc, &l->g->st, s->tokens + first + 1, kept(l, s, first), &span, 1);
    s->mtp_done = first + rows;
}

void reuse_leave_answer(loop *l, seq *s) {
    if (!uses_cache(l, s) || s->slot < 0 || s->phase != SEQ_DECODE) return;
    /* What a stop cut off behind the last token has gone through the trunk, but is no part of the sequence. */
    const int length = s->done < s->n_tokens ? s->done : s->n_tokens, cut = s->done - length;
    CHECK(cut == 0 || cut < s->pending, "%d positions behind the end, %d pending", cut, s->pending);
    state_commit(&l->g->st, slot_of(l, s), s->pending - cut);
    s->pending = 0;
    catch_up(l, s, length);
    leave(l, s, length);
}

void reuse_forget(loop *l, const seq *s) {
    if (l->prefix) prefix_forget(l->prefix, s->tokens, s->n_tokens, s->first_entry);
}
