/* What one step computes, for all running choices at once. The alignment of the draft layer is that of generate.c. */
#include <string.h>

#include "base/clock.h"
#include "engine/loop_impl.h"

static int slot_of(const loop *l, const seq *s) { return l->slot_of[s->slot]; }

/* Kept hidden row of position p, final-norm. */
static float *kept(const loop *l, const seq *s, int p) {
    return l->keep + ((int64_t)s->slot * LOOP_KEEP_ROWS + (p - s->keep_pos)) * l->g->config.hidden;
}

/* What the model takes is told apart from what the loop takes. */
static void timed(loop *l, double since) { l->work_seconds += clock_seconds() - since; }

/* Hidden rows on their way between trunk and draft layer: the model's data, and its time. Not within another timed part. */
static void copy_rows(loop *l, float *dst, const float *src, int rows) {
    const double t0 = clock_seconds();
    l->g->o->copy(l->g->o, dst, src, (size_t)rows * (size_t)l->g->config.hidden * sizeof(float));
    timed(l, t0);
}

static float *row_of(const loop *l, float *base, int row) { return base + (int64_t)row * l->g->config.hidden; }

/* Rows row0.. of the trunk's output belong to the `rows` newest positions. What the draft layer has not taken yet stays. */
static void keep_rows(loop *l, seq *s, int row0, int rows) {
    if (!s->drafting && !l->prefix) return;
    const int first = s->done;
    if (!s->drafting || s->mtp_done >= first) s->keep_pos = first;
    CHECK(first + rows - s->keep_pos <= LOOP_KEEP_ROWS, "%d hidden rows to keep", first + rows - s->keep_pos);
    copy_rows(l, kept(l, s, first), row_of(l, l->g->sc.hidden, 1 + row0), rows);
}

static void run_mtp(loop *l, int n) {
    const double t0 = clock_seconds();
    forward_mtp(&l->g->sc, &l->g->st, l->ids, l->stage, l->spans, n);
    timed(l, t0);
}

/* ---- drafts ---- */

/* Would the next round's rows still fit behind those that wait, and into one pass? */
static bool must_catch_up(const loop *l, const seq *s) {
    const int most = l->g->sc.rows < LOOP_KEEP_ROWS ? l->g->sc.rows : LOOP_KEEP_ROWS;
    return s->drafting && s->done - s->mtp_done + ENGINE_MAX_DRAFT + 1 > most;
}

/* The draft layer over the final rows of group[0..n): `rows` in all. The last output of each goes to l->drafts. */
static void extend(loop *l, int n) {
    engine *g = l->g;
    int rows = 0;
    for (int i = 0; i < n; i++) {
        seq *s = l->group[i];
        const int count = s->done - s->mtp_done;
        l->spans[i] = (ops_span){ .slot = slot_of(l, s), .row0 = rows, .rows = count, .pos0 = s->mtp_done };
        copy_rows(l, row_of(l, l->stage, rows), kept(l, s, s->mtp_done), count);
        for (int r = 0; r < count; r++) l->ids[rows + r] = s->tokens[s->mtp_done + 1 + r];
        rows += count;
        s->mtp_done = s->done;
    }
    run_mtp(l, n);
    for (int i = 0; i < n; i++)
        copy_rows(l, row_of(l, l->drafts, l->group[i]->slot),
                  row_of(l, g->sc.mtp_hidden, l->spans[i].row0 + l->spans[i].rows - 1), 1);
}

/* Drafts do not pay: rather than run the draft layer over what it was spared, the sequence drafts no more; the next ones will
 * show when that changes. What the prefix cache keeps must serve those who draft, so there all go on. */
static bool rests(const loop *l) { return !l->prefix && !l->opt.fixed_depth && depth_rests(&l->model); }

/* True: it had to be run. */
static bool extend_all(loop *l) {
    int n = 0, rows = 0;
    bool any = false;
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->phase != SEQ_DECODE || !(s->depth > 0 || must_catch_up(l, s))) continue;
        if (s->depth == 0 && rests(l)) {
            s->drafting = false;
            continue;
        }
        const int count = s->done - s->mtp_done;
        CHECK(count >= 1, "%d draft rows", count);
        if (rows + count > l->g->sc.rows) extend(l, n), n = rows = 0;
        l->group[n++] = s;
        rows += count;
        any = true;
    }
    if (n > 0) extend(l, n);
    return any;
}

/* Draft `at` of group[first .. first + n), from l->stage -> l->choice. */
static bool propose(loop *l, int first, int n, int at, err *e) {
    engine *g = l->g;
    if (!forward_draft(&g->sc, l->choice + first, row_of(l, l->stage, first), l->own + first, n, e)) return false;
    for (int r = 0; r < n; r++) {
        const seq *s = l->group[first + r];
        if (!engine_redraft(g, &l->choice[first + r], r, row_of(l, l->stage, first + r), &s->r->q.rule, s->choice,
                            s->draft, at, e))
            return false;
    }
    return true;
}

/* Draft `at` of everyone with a larger depth, from l->drafts; then, unless it is the last, one more row of the draft layer
 * behind it. */
static bool draft_one(loop *l, int at, bool *more, err *e) {
    engine *g = l->g;
    int n = 0, m = 0;
    for (int i = 0; i < l->n_active; i++)
        if (l->active[i]->depth > at) {
            copy_rows(l, row_of(l, l->stage, n), row_of(l, l->drafts, l->active[i]->slot), 1);
            l->own[n] = &l->active[i]->own;
            l->group[n++] = l->active[i];
        }
    if (n == 0) return *more = false, true;
    const double t0 = clock_seconds();
    for (int i = 0; i < n; i += g->sc.head_rows)
        if (!propose(l, i, (int)min_i64(n - i, g->sc.head_rows), at, e)) return false;
    timed(l, t0);
    for (int i = 0; i < n; i++) {
        seq *s = l->group[i];
        s->draft[at] = l->choice[i];
        if (s->depth == at + 1) continue;
        l->spans[m] = (ops_span){ .slot = slot_of(l, s), .row0 = m, .rows = 1, .pos0 = s->done + at };
        copy_rows(l, row_of(l, l->stage, m), row_of(l, l->drafts, s->slot), 1);
        l->ids[m] = s->draft[at];
        l->group[m++] = s;
    }
    *more = m > 0;
    if (m == 0) return true;
    run_mtp(l, m);
    for (int i = 0; i < m; i++)
        copy_rows(l, row_of(l, l->drafts, l->group[i]->slot), row_of(l, g->sc.mtp_hidden, i), 1);
    return true;
}

bool round_draft(loop *l, err *e) {
    const double t0 = clock_seconds();
    if (extend_all(l) && l->step_depth == 0 && l->n_decode > 0) { /* such a step is not like the others */
        depth_caught_up(&l->model, l->n_decode, clock_seconds() - t0);
        l->timed = false;
    }
    bool more = true;
    for (int at = 0; more; at++)
        if (!draft_one(l, at, &more, e)) return false;
    return true;
}

/* ---- the trunk ---- */

int loop_rows_class(int rows) {
    int c = 7;
    if (rows <= 8) return rows - 1;
    for (int limit = 8; limit < rows && c < LOOP_ROWS_CLASSES - 1; limit *= 2) c++;
    return c;
}

int loop_rows_class_most(int class) { return class < 8 ? class + 1 : 8 << (class - 7); }

void round_trunk(loop *l) {
    engine *g = l->g;
    int n = 0, rows = 0;
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->rows == 0) continue;
        s->row0 = rows;
        l->spans[n++] = (ops_span){ .slot = slot_of(l, s),
                                    .row0 = rows,
                                    .rows = s->rows,
                                    .pos0 = s->done,
                                    .commit = s->pending,
                                    .tentative = s->depth > 0 };
        s->pending = 0;
        const int known = s->rows - s->depth;
        for (int r = 0; r < s->rows; r++) l->ids[rows + r] = r < known ? s->tokens[s->done + r] : s->draft[r - known];
        *(s->phase == SEQ_PROMPT ? &l->counts.prompt_rows : &l->counts.decode_rows) += s->rows;
        rows += s->rows;
    }
    if (n == 0) return;
    const double t0 = clock_seconds();
    const int64_t layers = g->o->moe_calls, read = g->o->moe_experts;
    forward_trunk(&g->sc, &g->st, l->ids, NULL, l->spans, n);
    timed(l, t0);
    const int class = loop_rows_class(rows);
    l->counts.moe_layers[class] += g->o->moe_calls - layers;
    l->counts.moe_experts[class] += g->o->moe_experts - read;
}

/* ---- prompts ---- */

/* Draft slots that the chunk makes final: all but the newest position, whose next token is not known yet. */
static void mtp_of_prompts(loop *l) {
    engine *g = l->g;
    int n = 0, rows = 0;
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->phase != SEQ_PROMPT || s->rows == 0 || !s->drafting) continue;
        const int first = s->mtp_done, count = s->done + s->rows - 1 - first;
        if (count <= 0) continue;
        const int behind = s->done - first; /* 0 or 1: the position in front of the chunk */
        if (behind > 0) copy_rows(l, row_of(l, l->stage, rows), kept(l, s, first), behind);
        copy_rows(l, row_of(l, l->stage, rows + behind), row_of(l, g->sc.hidden, 1 + s->row0), count - behind);
        for (int r = 0; r < count; r++) l->ids[rows + r] = s->tokens[first + 1 + r];
        l->spans[n++] = (ops_span){ .slot = slot_of(l, s), .row0 = rows, .rows = count, .pos0 = first };
        rows += count;
        s->mtp_done = first + count;
    }
    if (n > 0) run_mtp(l, n);
}

/* Those who wait for this prompt go on as if they had processed it. */
static void share(loop *l, const seq *from) {
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->r != from->r || s->phase != SEQ_SHARES) continue;
        const int final = from->drafting ? from->mtp_done : from->done;
        if (!reuse_room(l, state_copy_pages(&l->g->st, from->done, final)) ||
            !state_copy(&l->g->st, slot_of(l, s), slot_of(l, from), from->done, final))
            continue; /* begins by itself, when there is room */
        s->done = from->done;
        s->mtp_done = from->mtp_done;
        s->keep_pos = from->keep_pos;
        s->out.cached_tokens = from->done - 1; /* as elsewhere: the last one is never said to be */
        if (s->drafting || l->prefix)
            copy_rows(l, kept(l, s, s->keep_pos), kept(l, from, from->keep_pos), s->done - s->keep_pos);
        s->phase = SEQ_PROMPT;
        s->rows = 1; /* of the trunk's output: the same last row */
        s->row0 = from->row0 + from->rows - 1;
        l->counts.shared++;
    }
}

static bool score_prompts(loop *l, err *e) {
    const double t0 = clock_seconds();
    bool any = false;
    for (int i = l->n_active - 1; i >= 0; i--) {
        seq *s = l->active[i];
        if (s->phase != SEQ_PROMPT || s->rows == 0 || !score_wanted(s->r)) continue;
        any = true;
        if (!score_prompt(l, s, e)) return false;
        if (s->fault.id) request_fail(l, s);
    }
    if (any) timed(l, t0);
    return true;
}

bool round_prompts(loop *l, err *e) {
    mtp_of_prompts(l);
    if (!score_prompts(l, e)) return false;
    for (int i = 0; i < l->n_active; i++) {
        seq *s = l->active[i];
        if (s->phase != SEQ_PROMPT || s->rows == 0 || s->done == s->n_tokens) continue;
        const int last = s->rows - 1;
        s->done += last;
        s->keep_pos = s->done;
        if (s->drafting || l->prefix)
            copy_rows(l, kept(l, s, s->done), row_of(l, l->g->sc.hidden, 1 + s->row0 + last), 1);
        s->done++;
        reuse_leave_prompt(l, s);
        if (s->r->q.on_prompt && s->out.output_tokens == 0)
            s->r->q.on_prompt(s->r->q.ctx, s->choice, s->done, s->n_tokens);
        if (s->done == s->n_tokens && s == &s->r->seqs[0] && s->out.output_tokens == 0) share(l, s);
    }
    return true;
}

/* ---- tokens ---- */

/* Rows whose logits choose tokens: of a generating choice all, of a complete prompt the last. */
static int rows_to_choose(const seq *s) {
    if (s->phase == SEQ_DECODE) return s->rows;
    return s->phase == SEQ_PROMPT && s->done == s->n_tokens ? 1 : 0;
}

/* What tokens are drawn from: whole rows of logits, or the best of each row. */
typedef struct drawn_from {
    float *logits;
    int32_t *ids;            /* NULL: whole rows */
    int k;                   /* entries per row of both */
    const head_query *asked; /* [rows] what rules allow, and what was computed apart from the best */
    const float *extra;      /* the logits of the latter, row by row */
} drawn_from;

static bool pick(loop *l, seq *s, int32_t *id, const drawn_from *f, int row, int64_t position, err *e) {
    const int generated = s->out.output_tokens + row;
    float *logits = f->logits + (int64_t)row * f->k;
    const history *seen = s->seen.state ? &s->seen : NULL;
    if (f->ids) {
        const int n = f->asked[row].n_extra; /* the same for all rows of a choice */
        const choose_row x = { .ids = f->ids + (int64_t)row * f->k,
                               .logits = logits,
                               .k = choose_top_count(l->g, &s->sampling),
                               .edit_ids = f->asked[row].extra,
                               .edit_logits = f->extra + (int64_t)row * n,
                               .n_edits = n,
                               .seen = seen,
                               .allowed = f->asked[row].allowed,
                               .position = position,
                               .generated = generated };
        return choose_from_top(l->g, id, &s->sampling, &x, &l->room, e);
    }
    const sampler_row x = { .logits = logits,
                            .n = f->k,
                            .position = position,
                            .generated = generated,
                            .seen = seen,
                            .allowed = f->asked[row].allowed };
    return sampler_draw(&l->g->sm, id, &s->sampling, &x, e);
}

/* Tokens behind the first mismatch are of interest to someone. */
static bool wants_all(const seq *s) { return s->r->q.on_round != NULL; }

/* picked[0..*n): the drafts that plain sampling draws too, and the token behind them; what is behind that is drawn on request,
 * and -1 where nothing can be. */
static bool draw(loop *l, seq *s, int32_t *picked, int *n, const drawn_from *f, int rows) {
    const int64_t pos0 = s->phase == SEQ_DECODE ? s->done + 1 : s->done;
    int pushed = 0;
    bool ok = true, real = true;
    *n = 0;
    for (int i = 0; i < rows; i++) picked[i] = -1;
    for (int i = 0; i < rows && ok && (real || wants_all(s)); i++) {
        err unused = { 0 }; /* of a position that is not reached */
        const bool drawn = pick(l, s, &picked[i], f, i, pos0 + i, real ? &s->fault : &unused);
        ok = drawn || !real;
        *n += real;
        if (i == rows - 1) break;
        real = real && picked[i] == s->draft[i];
        if (s->seen.state) history_push(&s->seen, s->draft[i]), pushed++;
    }
    while (pushed > 0) history_pop(&s->seen, s->draft[--pushed]);
    return ok;
}

/* The same when a benchmark says how many drafts are right: these are the output, and behind them what was drawn. */
static bool simulate(loop *l, seq *s, int32_t *picked, int *n, const drawn_from *f) {
    const int right = l->opt.simulate(l->opt.simulate_ctx, s->depth);
    for (int i = 0; i < right; i++) picked[i] = s->draft[i];
    for (int i = right; i <= s->depth; i++) picked[i] = -1;
    *n = right + 1;
    return pick(l, s, &picked[right], f, right, s->done + 1 + right, &s->fault);
}

static bool uses_top(const loop *l, const seq *s) {
    return choose_few(l->g, &s->sampling, s->r->q.logprobs) &&
           (sampler_is_plain(&s->sampling) || (s->edits.v && s->edits.complete));
}

/* What group[0..n) want computed apart: their edits, and of the drafts in front of a row those that then count. */
static void ask_edits(const loop *l, int n) {
    head_query *q = l->g->asked;
    for (int i = 0; i < n; i++) {
        const seq *s = l->group[i];
        id_set all = { .v = l->edit_ids + (int64_t)i * l->edits_cap, .n = s->edits.n, .cap = l->edits_cap };
        if (all.n > 0) memcpy(all.v, s->edits.v, (size_t)all.n * sizeof *all.v);
        for (int d = 0; d < s->depth && s->phase == SEQ_DECODE; d++)
            choose_edits_push(&all, l->g, &s->sampling, s->draft[d]);
        for (int r = rows_to_choose(s); r > 0; r--) q->extra = all.v, q++->n_extra = all.n;
    }
}

static void count_round(loop *l, seq *s, int accepted) {
    gen_result *o = &s->out;
    loop_stats *c = request_counts(l, s);
    o->rounds++, c->rounds++;
    o->drafted += s->depth, c->drafted += s->depth;
    o->accepted += accepted, c->accepted += accepted;
    for (int i = 0; i < s->depth; i++) {
        o->drafted_at[i]++, c->drafted_at[i]++;
        o->accepted_at[i] += i < accepted, c->accepted_at[i] += i < accepted;
    }
    depth_accepted(&l->model, s->depth, accepted);
    if (!s->r->own && !l->opt.simulate) alarm_round(l, s, accepted);
}

/* A round that yields picked[0..n) was verified. */
static void end_round(loop *l, seq *s, const int32_t *picked, int n) {
    const loop_request *q = &s->r->q;
    count_round(l, s, n - 1);
    if (!q->on_round) return;
    gen_round r = { .known = s->tokens[s->done], .depth = s->depth, .accepted = n - 1 };
    memcpy(r.draft, s->draft, (size_t)s->depth * sizeof *r.draft);
    memcpy(r.target, picked, (size_t)(s->depth + 1) * sizeof *r.target);
    q->on_round(q->ctx, s->choice, &r);
}

/* Draw for one choice from its rows, and hand out what was drawn. */
static void advance(loop *l, seq *s, const drawn_from *f, int rows) {
    int32_t picked[ENGINE_MAX_DRAFT + 1];
    int n;
    const bool decoding = s->phase == SEQ_DECODE;
    const bool simulated = decoding && s->depth > 0 && l->opt.simulate;
    if (!(simulated ? simulate(l, s, picked, &n, f) : draw(l, s, picked, &n, f, rows))) {
        request_fail(l, s);
        return;
    }
    if (decoding && s->depth > 0) end_round(l, s, picked, n);
    if (decoding) {
        keep_rows(l, s, s->row0, n);
        s->done += n;
        s->pending = s->depth > 0 ? n : 0;
    }
    s->phase = SEQ_DECODE;
    for (int i = 0; i < n; i++)
        if (!request_emit(l, s, picked[i], f->ids ? NULL : f->logits + (int64_t)i * f->k)) return;
    if (s->done >= l->g->st.capacity) request_end(l, s, GEN_CONTEXT);
}

/* Logits of the hidden states in l->stage for group[0..n), then a token or more for each. `top` best of each row, or whole
 * rows when 0. */
static bool choose_group(loop *l, int n, int rows, int top, err *e) {
    engine *g = l->g;
    if (n == 0) return true;
    drawn_from f = { .logits = l->top_logits, .ids = l->top_ids, .k = top, .asked = g->asked };
    const double t0 = clock_seconds();
    if (top > 0) {
        f.extra = l->edit_logits;
        ask_edits(l, n);
        if (!forward_top(&g->sc, f.ids, f.logits, l->edit_logits, l->stage, rows, top, g->asked, e)) return false;
    } else {
        f = (drawn_from){ .logits = g->host_logits, .k = g->n.real_vocab, .asked = g->asked };
        forward_real_logits(&g->sc, l->stage, rows);
        g->o->download(g->o, f.logits, g->sc.logits, (size_t)rows * (size_t)f.k * sizeof(float));
        if (!g->o->sync(g->o, e)) return false;
    }
    for (int i = 0; i < n; i++) {
        const int m = rows_to_choose(l->group[i]);
        advance(l, l->group[i], &f, m);
        f.logits += (int64_t)m * f.k;
        if (f.ids) {
            f.ids += (int64_t)m * f.k;
            f.extra += (int64_t)m * f.asked->n_extra;
        }
        f.asked += m;
    }
    timed(l, t0); /* draws and callbacks; what they are wrapped in is next to nothing */
    return true;
}

/* What the rule of a choice allows in its rows [row, row + n) of the group. */
static bool ask(loop *l, seq *s, int row, int n) {
    for (int i = 0; i < n; i++) {
        err unused = { 0 }; /* behind a draft that is not allowed, which no draw can agree with */
        if (!engine_ask(l->g, row + i, &s->r->q.rule, s->choice, s->draft, i, i == 0 ? &s->fault : &unused) && i == 0)
            return false;
    }
    return true;
}

/* Those of todo[0..all) that take the best logits only, or the others. */
static bool choose_some(loop *l, int all, bool by_top, err *e) {
    engine *g = l->g;
    int n = 0, rows = 0, top = 0;
    for (int i = 0; i < all; i++) {
        seq *s = l->todo[i];
        if (!s || uses_top(l, s) != by_top) continue;
        const int m = rows_to_choose(s);
        if (rows + m > g->sc.head_rows) {
            if (!choose_group(l, n, rows, top, e)) return false;
            n = rows = top = 0;
        }
        const bool whole = s->rows == 0; /* taken up whole: the hidden state came along */
        copy_rows(l, row_of(l, l->stage, rows),
                  whole ? kept(l, s, s->done - 1) : row_of(l, g->sc.hidden, 1 + s->row0 + s->rows - m), m);
        l->todo[i] = NULL; /* it may be over, and freed, before the others are looked at */
        if (!ask(l, s, rows, m)) {
            request_fail(l, s);
            continue;
        }
        l->group[n++] = s;
        rows += m;
        const int k = by_top ? choose_top_count(g, &s->sampling) : 0;
        if (k > top) top = k;
    }
    return choose_group(l, n, rows, top, e);
}

bool round_choose(loop *l, err *e) {
    int all = 0;
    for (int i = 0; i < l->n_active; i++)
        if (rows_to_choose(l->active[i]) > 0) l->todo[all++] = l->active[i];
    return choose_some(l, all, true, e) && choose_some(l, all, false, e);
}
