/* generate.c - one sequence by itself: prompt processing, plain decoding and draft-verify rounds. What the loop is compared with,
 * and what measures use that want nothing else in their way.
 *
 * Alignment (rulings 1-5): slot j of the draft layer holds (hidden of position j, token j + 1) and rotates at j; a draft
 * step appends at the next slot with the previous step's own output; verification runs [known, drafts...] through the
 * trunk as tentative rows, of which the accepted prefix is committed by the next pass. */
#include "base/clock.h"
#include "engine/choose.h"

typedef struct run {
    session *s;
    const gen_options *opt;
    gen_result *out;
    bool ended;
} run;

static bool cancelled(const run *r) { return r->opt->cancel && *r->opt->cancel; }

/* Remember the hidden states of the last `rows` processed positions; they sit in scratch rows 1 + from... */
static void keep_hidden(session *s, int from, int rows) {
    engine *g = s->g;
    const int64_t h = g->config.hidden;
    g->o->copy(g->o, s->keep, g->sc.hidden + (1 + from) * h, (size_t)(rows * h) * sizeof(float));
    s->kept = rows;
}

/* Draft slots that became final with the tokens known by now, during prompt processing: all but the newest position,
 * whose next token is not known yet. Hidden states: the kept one in row 0, the chunk's behind it. */
static void prompt_mtp(session *s, int chunk_rows) {
    engine *g = s->g;
    const int first = s->mtp_done, count = s->done + chunk_rows - 1 - first;
    if (count <= 0) return;
    const ops_span span = { .slot = s->slot, .rows = count, .pos0 = first };
    forward_mtp(&g->sc, &g->st, s->tokens + first + 1, g->sc.hidden + (int64_t)(first - s->done + 1) * g->config.hidden,
                &span, 1);
    s->mtp_done = first + count;
}

/* A sequence that goes on after an answer: the draft slots of its last round are still to be made final. */
static void catch_up(session *s) {
    engine *g = s->g;
    const int count = s->done - 1 - s->mtp_done;
    if (!s->drafting || count <= 0) return;
    CHECK(count < s->kept, "%d draft slots behind, %d hidden rows kept", count, s->kept);
    const ops_span span = { .slot = s->slot, .rows = count, .pos0 = s->mtp_done };
    forward_mtp(&g->sc, &g->st, s->tokens + s->mtp_done + 1,
                s->keep + (int64_t)(s->kept - 1 - count) * g->config.hidden, &span, 1);
    s->mtp_done += count;
}

static bool process_prompt(run *r, err *e) {
    session *s = r->s;
    engine *g = s->g;
    const int64_t h = g->config.hidden;
    catch_up(s);
    while (s->done < s->n_tokens) {
        if (cancelled(r)) {
            r->out->finish = GEN_CANCEL;
            r->ended = true;
            return true;
        }
        const int left = s->n_tokens - s->done, rows = left < g->chunk ? left : g->chunk;
        const ops_span span = { .slot = s->slot, .rows = rows, .pos0 = s->done, .commit = s->pending };
        s->pending = 0;
        if (s->kept > 0) g->o->copy(g->o, g->sc.hidden, s->keep + (s->kept - 1) * h, (size_t)h * sizeof(float));
        forward_trunk(&g->sc, &g->st, s->tokens + s->done, NULL, &span, 1);
        keep_hidden(s, rows - 1, 1);
        if (s->drafting) prompt_mtp(s, rows);
        s->done += rows;
        if (!g->o->sync(g->o, e)) return false;
    }
    return true;
}

/* One token from row `row` of the host's logits: as many drafts stand before it in this round. */
static bool pick(run *r, int32_t *id, int row, int64_t position, err *e) {
    engine *g = r->s->g;
    const sampler_row x = { .logits = g->host_logits + (int64_t)row * g->n.real_vocab,
                            .n = g->n.real_vocab,
                            .position = position,
                            .generated = r->out->output_tokens + row,
                            .seen = r->s->seen.state ? &r->s->seen : NULL,
                            .allowed = g->asked[row].allowed };
    return sampler_draw(&g->sm, id, &r->opt->sampling, &x, e);
}

/* Tokens behind the first mismatch are of interest to someone. */
static bool wants_all(const run *r) { return r->opt->on_round || r->opt->simulate; }

/* What the rule allows at each of `rows` positions. */
static bool ask(run *r, const int32_t *drafts, int rows, err *e) {
    for (int i = 0; i < rows; i++) {
        err unused = { 0 }; /* behind a draft that is not allowed, which no draw can agree with */
        if (!engine_ask(r->s->g, i, &r->opt->rule, 0, drafts, i, i == 0 ? e : &unused) && i == 0) return false;
    }
    return true;
}

/* As choose, from the best k of each row: the same ids, since nothing else could be drawn. */
static bool choose_top(run *r, int32_t *picked, const float *hidden, const int32_t *drafts, int rows, int64_t pos0,
                       err *e) {
    engine *g = r->s->g;
    const sampler_params *p = &r->opt->sampling;
    const int k = choose_top_count(g, p);
    int32_t ids[(ENGINE_MAX_DRAFT + 1) * HEAD_MAX_TOP];
    float logits[(ENGINE_MAX_DRAFT + 1) * HEAD_MAX_TOP];
    CHECK(rows <= ENGINE_MAX_DRAFT + 1, "%d rows to choose", rows);
    if (!forward_top(&g->sc, ids, logits, NULL, hidden, rows, k, r->opt->rule.mask ? g->asked : NULL, e)) return false;
    bool real = true;
    for (int i = 0; i < rows; i++) {
        picked[i] = -1;
        if (!real && !wants_all(r)) continue;
        err unused = { 0 }; /* of a position that is not reached */
        const choose_row x = { .ids = ids + i * k,
                               .logits = logits + i * k,
                               .k = k,
                               .position = pos0 + i,
                               .generated = r->out->output_tokens + i };
        const bool ok = choose_from_top(g, &picked[i], p, &x, NULL, real ? e : &unused);
        if (!ok && real) return false;
        if (i < rows - 1) real = real && picked[i] == drafts[i];
    }
    return true;
}

/* Tokens for `rows` consecutive positions from hidden rows [rows, H]: token i is drawn for absolute position pos0 + i,
 * with drafts[0..i) before it. Behind the first draft that is not what was drawn, tokens are only of interest to a trace
 * (and -1 without one). */
static bool choose(run *r, int32_t *picked, const float *hidden, const int32_t *drafts, int rows, int64_t pos0,
                   err *e) {
    if (!ask(r, drafts, rows, e)) return false;
    if (choose_uses_top(r->s->g, &r->opt->sampling, r->opt->logprobs))
        return choose_top(r, picked, hidden, drafts, rows, pos0, e);
    engine *g = r->s->g;
    const int v = g->n.real_vocab;
    const bool counting = r->s->seen.state != NULL;
    CHECK(rows <= g->sc.head_rows, "%d rows to choose", rows);
    forward_real_logits(&g->sc, hidden, rows);
    g->o->download(g->o, g->host_logits, g->sc.logits, (size_t)rows * (size_t)v * sizeof(float));
    if (!g->o->sync(g->o, e)) return false;
    bool ok = true, real = true;
    int pushed = 0;
    for (int i = 0; i < rows; i++) picked[i] = -1;
    for (int i = 0; i < rows && ok && (real || wants_all(r)); i++) {
        err unused = { 0 }; /* of a position that is not reached */
        const bool drawn = pick(r, &picked[i], i, pos0 + i, real ? e : &unused);
        ok = drawn || !real;
        if (i == rows - 1) break;
        real = real && picked[i] == drafts[i];
        if (counting) history_push(&r->s->seen, drafts[i]), pushed++;
    }
    while (pushed > 0) history_pop(&r->s->seen, drafts[--pushed]);
    return ok;
}

static bool is_stop(const gen_options *o, int32_t id) {
    for (int i = 0; i < o->n_stop_ids; i++)
        if (o->stop_ids[i] == id) return true;
    return false;
}

/* Hand one token to the caller; row = its row of host_logits when logprobs are asked for. Sets r->ended. */
static void emit(run *r, int32_t id, int row) {
    enum { MAX_TOP = 64 };
    const gen_options *o = r->opt;
    engine *g = r->s->g;
    int32_t top[MAX_TOP];
    double logprobs[MAX_TOP], logprob = 0;
    const int n = o->logprobs < MAX_TOP ? o->logprobs : MAX_TOP;
    if (n > 0)
        logprob = sampler_logprobs(&g->sm, top, logprobs, n, g->host_logits + (int64_t)row * g->n.real_vocab,
                                   g->n.real_vocab, id);
    r->out->output_tokens++;
    r->out->out_of_list += !heads_drafts(&g->n.heads, id) && !id_set_has(&r->s->own, id);
    heads_note(&g->n.heads, &r->s->own, &id, 1);
    if (r->s->seen.state) history_push(&r->s->seen, id);
    if (o->rule.accept) o->rule.accept(o->rule.ctx, 0, id);
    const bool go_on = o->on_token(o->ctx, id, logprob, n > 0 ? top : NULL, n > 0 ? logprobs : NULL);
    if (is_stop(o, id))
        r->out->finish = GEN_STOP;
    else if (!go_on)
        r->out->finish = GEN_CALLER;
    else if (o->max_tokens > 0 && r->out->output_tokens >= o->max_tokens)
        r->out->finish = GEN_LENGTH;
    else
        return;
    r->ended = true;
}

/* One token from the newest position, no drafts: its hidden state is the last kept one. */
static bool first_token(run *r, err *e) {
    session *s = r->s;
    int32_t id;
    if (!choose(r, &id, s->keep + (int64_t)(s->kept - 1) * s->g->config.hidden, NULL, 1, s->done, e)) return false;
    s->tokens[s->n_tokens++] = id;
    emit(r, id, 0);
    return true;
}

static bool plain_step(run *r, err *e) {
    session *s = r->s;
    engine *g = s->g;
    const ops_span span = { .slot = s->slot, .rows = 1, .pos0 = s->done, .commit = s->pending };
    s->pending = 0;
    forward_trunk(&g->sc, &g->st, s->tokens + s->done, NULL, &span, 1);
    keep_hidden(s, 0, 1);
    s->done++;
    return first_token(r, e);
}

/* Drafts d[0..depth) for the tokens after the newest known one. */
static bool draft(run *r, int32_t *d, int depth, err *e) {
    session *s = r->s;
    engine *g = s->g;
    const int64_t h = g->config.hidden;
    const int rows = s->done - s->mtp_done;
    CHECK(rows >= 1 && rows <= s->kept, "%d draft rows, %d kept", rows, s->kept);
    ops_span span = { .slot = s->slot, .rows = rows, .pos0 = s->mtp_done };
    forward_mtp(&g->sc, &g->st, s->tokens + s->mtp_done + 1, s->keep + (s->kept - rows) * h, &span, 1);
    s->mtp_done = s->done;
    const float *last = g->sc.mtp_hidden + (rows - 1) * h;
    const id_set *own = &s->own;
    for (int i = 0;; i++) {
        if (!forward_draft(&g->sc, &d[i], last, &own, 1, e) ||
            !engine_redraft(g, &d[i], 0, last, &r->opt->rule, 0, d, i, e))
            return false;
        if (i == depth - 1) return true;
        span = (ops_span){ .slot = s->slot, .rows = 1, .pos0 = s->done + i };
        forward_mtp(&g->sc, &g->st, &d[i], last, &span, 1);
        last = g->sc.mtp_hidden;
    }
}

static void count_round(gen_result *out, const gen_round *round) {
    out->rounds++;
    out->drafted += round->depth;
    out->accepted += round->accepted;
    for (int i = 0; i < round->depth; i++) {
        out->drafted_at[i]++;
        out->accepted_at[i] += i < round->accepted;
    }
}

/* Drafts that a benchmark wants accepted take the place of what was drawn. */
static void simulate(const run *r, gen_round *round) {
    int n = r->opt->simulate(r->opt->ctx, round->depth);
    while (n > 0 && round->target[n] < 0) n--; /* nothing could be drawn there */
    for (int i = 0; i < n; i++) round->target[i] = round->draft[i];
    round->accepted = n;
}

/* Draft, verify, accept. Acceptance compares each draft with the token that plain sampling draws at that position, so the
 * output cannot depend on the drafts (NUMERICS 8). */
static bool spec_round(run *r, int depth, err *e) {
    session *s = r->s;
    engine *g = s->g;
    gen_round round = { .known = s->tokens[s->done], .depth = depth };
    if (!draft(r, round.draft, depth, e)) return false;
    int32_t rows[ENGINE_MAX_DRAFT + 1];
    rows[0] = round.known;
    for (int i = 0; i < depth; i++) rows[i + 1] = round.draft[i];
    const ops_span span = {
        .slot = s->slot, .rows = depth + 1, .pos0 = s->done, .commit = s->pending, .tentative = true
    };
    forward_trunk(&g->sc, &g->st, rows, NULL, &span, 1);
    if (!choose(r, round.target, g->sc.hidden + g->config.hidden, round.draft, depth + 1, s->done + 1, e)) return false;
    while (round.accepted < depth && round.target[round.accepted] == round.draft[round.accepted]) round.accepted++;
    if (r->opt->simulate) simulate(r, &round);
    count_round(r->out, &round);
    if (r->opt->on_round) r->opt->on_round(r->opt->ctx, &round);
    int taken = 0;
    while (taken <= round.accepted && !r->ended) {
        s->tokens[s->n_tokens++] = round.target[taken];
        emit(r, round.target[taken], taken);
        taken++;
    }
    keep_hidden(s, 0, taken);
    s->done += taken;
    s->pending = taken;
    return true;
}

static bool decode(run *r, err *e) {
    session *s = r->s;
    const int want = s->drafting ? r->opt->depth : 0, capacity = s->g->st.capacity;
    while (!r->ended) {
        if (cancelled(r)) {
            r->out->finish = GEN_CANCEL;
            return true;
        }
        const int room = capacity - s->done; /* rows that still fit */
        if (room <= 0) {
            r->out->finish = GEN_CONTEXT;
            return true;
        }
        const int depth = want < room - 1 ? want : room - 1;
        if (depth < want || depth == 0) s->drafting = s->drafting && depth > 0;
        if (!(depth > 0 && s->drafting ? spec_round(r, depth, e) : plain_step(r, e))) return false;
    }
    return true;
}

/* Token counts of the sequence, when the request wants penalties. */
static bool open_history(run *r, err *e) {
    session *s = r->s;
    if (!sampler_has_penalties(&r->opt->sampling)) {
        history_close(&s->seen);
        return true;
    }
    if (!s->seen.state && !history_open(&s->seen, s->g->config.vocab, e)) return false;
    history_reset(&s->seen);
    history_prompt(&s->seen, s->tokens, s->n_tokens);
    return true;
}

bool session_generate(session *s, const gen_options *opt, gen_result *out, err *e) {
    run r = { .s = s, .opt = opt, .out = out };
    CHECK(opt->depth >= 0 && opt->depth <= ENGINE_MAX_DRAFT, "draft depth %d", opt->depth);
    *out = (gen_result){ .prompt_tokens = s->n_tokens, .cached_tokens = s->done };
    const double t0 = clock_seconds();
    if (!sampler_check(&opt->sampling, s->g->n.real_vocab, e) || !open_history(&r, e)) return false;
    if (!process_prompt(&r, e)) return false;
    if (!r.ended && !first_token(&r, e)) return false;
    const double t1 = clock_seconds();
    out->prompt_seconds = t1 - t0;
    if (!decode(&r, e)) return false;
    out->decode_seconds = clock_seconds() - t1;
    return true;
}

double gen_accept_length(const gen_result *r) {
    return r->rounds ? (double)(r->accepted + r->rounds) / (double)r->rounds : 0;
}

const char *gen_finish_name(gen_finish f) {
    switch (f) {
    case GEN_STOP: return "stop";
    case GEN_LENGTH: return "length";
    case GEN_CONTEXT: return "length";
    case GEN_CALLER: return "stop";
    case GEN_CANCEL: return "cancelled";
    case GEN_DEADLINE: return "deadline";
    }
    return "stop";
}
