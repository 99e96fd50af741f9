/* Requests: checked and copied by the submitter, handed out token by token and ended by the owner. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/loop_impl.h"

static bool check(const loop *l, const loop_request *q, err *e) {
    const engine *g = l->g;
    CHECK(q->on_token && q->on_done, "a request without callbacks");
    if (!sampler_check(&q->sampling, g->n.real_vocab, e)) return false;
    if (q->choices < 0 || q->choices > LOOP_MAX_CHOICES || q->max_tokens < 0 || q->depth < -1 ||
        q->depth > ENGINE_MAX_DRAFT || q->logprobs < 0 || q->logprobs > LOOP_MAX_LOGPROBS || q->n_stop_ids < 0 ||
        q->n_stop_ids > SAMPLER_MAX_STOPS)
        return fail(
            e, ERR_INPUT, "E-ENGINE-REQUEST",
            "request: choices %d (0 to %d), max_tokens %d, depth %d (-1 to %d), logprobs %d (0 to %d) or %d stop "
            "ids (at most %d) out of range",
            q->choices, LOOP_MAX_CHOICES, q->max_tokens, q->depth, ENGINE_MAX_DRAFT, q->logprobs, LOOP_MAX_LOGPROBS,
            q->n_stop_ids, SAMPLER_MAX_STOPS);
    for (int i = 0; i < q->n_marks; i++)
        if (q->marks[i] <= (i > 0 ? q->marks[i - 1] : 0) || q->marks[i] > q->n_prompt)
            return fail(e, ERR_INPUT, "E-ENGINE-REQUEST", "request: mark %d at %d of %d tokens is out of order", i,
                        q->marks[i], q->n_prompt);
    return engine_check_prompt(g, q->prompt, q->n_prompt, e);
}

static void *copy(const void *p, size_t bytes) {
    void *own = malloc(bytes ? bytes : 1);
    if (own && bytes) memcpy(own, p, bytes);
    return own;
}

/* The copies that a request owns; false when memory ends. */
static bool own(request *r, int choices) {
    loop_request *q = &r->q;
    sampler_params *p = &q->sampling;
    r->prompt = copy(q->prompt, (size_t)q->n_prompt * sizeof *r->prompt);
    r->bias = copy(p->bias, (size_t)p->n_bias * sizeof *r->bias);
    r->ban_ids = copy(p->stop_ids, (size_t)p->n_stop_ids * sizeof *r->ban_ids);
    r->stop_ids = copy(q->stop_ids, (size_t)q->n_stop_ids * sizeof *r->stop_ids);
    r->marks = copy(q->marks, (size_t)q->n_marks * sizeof *r->marks);
    r->seqs = calloc((size_t)choices, sizeof *r->seqs);
    if (!r->prompt || !r->bias || !r->ban_ids || !r->stop_ids || !r->marks || !r->seqs) return false;
    q->prompt = r->prompt;
    q->stop_ids = r->stop_ids;
    q->marks = r->marks;
    p->bias = r->bias;
    p->stop_ids = r->ban_ids;
    return true;
}

static bool make_seq(seq *s, request *r, const loop *l, int choice) {
    const loop_request *q = &r->q;
    const int capacity = l->g->st.capacity, room = capacity + 1 - q->n_prompt;
    *s = (seq){ .r = r, .choice = choice, .slot = -1, .n_tokens = q->n_prompt, .sampling = q->sampling };
    s->sampling.choice += (uint32_t)choice;
    /* What is kept must serve those who draft, too. */
    s->drafting = l->g->n.has_mtp && l->opt.depth > 0 && (q->depth != 0 || l->prefix);
    s->cap = q->n_prompt + (q->max_tokens > 0 && q->max_tokens < room ? q->max_tokens : room);
    s->tokens = malloc((size_t)s->cap * sizeof *s->tokens);
    if (!s->tokens) return false;
    if (s->drafting && l->g->n.heads.draft && !id_set_open(&s->own, DRAFT_HEAD_OWN)) return false;
    heads_note(&l->g->n.heads, &s->own, r->prompt, q->n_prompt);
    memcpy(s->tokens, r->prompt, (size_t)q->n_prompt * sizeof *s->tokens);
    s->out.prompt_tokens = q->n_prompt;
    return true;
}

bool request_new(request **out, loop *l, const loop_request *q, err *e) {
    if (!check(l, q, e)) return false;
    const int choices = q->choices > 0 ? q->choices : 1;
    request *r = calloc(1, sizeof *r);
    if (r) {
        r->q = *q;
        r->q.choices = r->open = choices;
        r->submitted_at = clock_seconds();
        bool ok = own(r, choices);
        for (int i = 0; ok && i < choices; i++) ok = make_seq(&r->seqs[i], r, l, i);
        if (ok) return *out = r, true;
        request_free(r);
    }
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "request: no memory for %d tokens", q->n_prompt);
}

void request_free(request *r) {
    for (int i = 0; r->seqs && i < r->q.choices; i++) {
        free(r->seqs[i].tokens);
        history_close(&r->seqs[i].seen);
        id_set_close(&r->seqs[i].own);
        id_set_close(&r->seqs[i].edits);
    }
    free(r->seqs);
    free(r->prompt);
    free(r->bias);
    free(r->ban_ids);
    free(r->stop_ids);
    free(r->marks);
    free(r);
}

void request_adopt(loop *l, request *r) {
    pthread_mutex_lock(&l->lock);
    l->open += r->q.choices;
    r->handle = ++l->last_handle;
    for (int i = 0; i < r->q.choices; i++) r->seqs[i].order = ++l->last_order;
    r->next = l->all;
    if (l->all) l->all->prev = r;
    l->all = r;
    pthread_mutex_unlock(&l->lock);
    r->own = true;
    for (int i = 0; i < r->q.choices; i++) sched_enqueue(l, &r->seqs[i]);
}

static void forget(loop *l, seq *s) {
    request *r = s->r;
    pthread_mutex_lock(&l->lock);
    l->open--;
    const bool last = --r->open == 0;
    if (last) {
        *(r->prev ? &r->prev->next : &l->all) = r->next;
        if (r->next) r->next->prev = r->prev;
    }
    pthread_mutex_unlock(&l->lock);
    if (last) request_free(r);
}

static void end(loop *l, seq *s) {
    if (s->slot >= 0)
        sched_release(l, s);
    else
        sched_unqueue(l, s);
    s->phase = SEQ_ENDED;
    if (s->out.output_tokens > 0) s->out.decode_seconds = clock_seconds() - s->r->submitted_at - s->out.prompt_seconds;
    loop_publish(l); /* who has its answer finds it counted */
    s->r->q.on_done(s->r->q.ctx, s->choice, &s->out, &s->fault);
    forget(l, s);
}

void request_end(loop *l, seq *s, gen_finish finish) {
    loop_stats *c = request_counts(l, s);
    s->out.finish = finish;
    if (finish == GEN_CANCEL)
        c->cancelled++;
    else if (finish == GEN_DEADLINE)
        c->expired++;
    else
        c->finished++, reuse_leave_answer(l, s);
    end(l, s);
}

void request_fail(loop *l, seq *s) {
    CHECK(s->fault.id, "a failure without a cause");
    s->out.finish = GEN_CANCEL;
    request_counts(l, s)->failed++;
    if (strcmp(s->fault.id, "E-ENGINE-NONFINITE") == 0) reuse_forget(l, s);
    end(l, s);
}

static bool is_stop(const loop_request *q, int32_t id) {
    for (int i = 0; i < q->n_stop_ids; i++)
        if (q->stop_ids[i] == id) return true;
    return false;
}

/* Ends the choice with its last token, so the caller must not touch it after false. */
bool request_emit(loop *l, seq *s, int32_t id, const float *logits) {
    const loop_request *q = &s->r->q;
    int32_t top[LOOP_MAX_LOGPROBS];
    double logprobs[LOOP_MAX_LOGPROBS], logprob = 0;
    const int n = q->logprobs;
    if (atomic_load_explicit(&s->r->cancelled, memory_order_relaxed)) return request_end(l, s, GEN_CANCEL), false;
    if (n > 0) logprob = sampler_logprobs(&l->g->sm, top, logprobs, n, logits, l->g->n.real_vocab, id);
    s->tokens[s->n_tokens++] = id;
    if (s->out.output_tokens++ == 0) s->out.prompt_seconds = clock_seconds() - s->r->submitted_at;
    s->out.out_of_list += !heads_drafts(&l->g->n.heads, id) && !id_set_has(&s->own, id);
    heads_note(&l->g->n.heads, &s->own, &id, 1);
    request_counts(l, s)->output_tokens++;
    if (s->seen.state) history_push(&s->seen, id);
    choose_edits_push(&s->edits, l->g, &s->sampling, id);
    if (q->rule.accept) q->rule.accept(q->rule.ctx, s->choice, id);
    const bool go_on = q->on_token(q->ctx, s->choice, id, logprob, n > 0 ? top : NULL, n > 0 ? logprobs : NULL);
    if (is_stop(q, id))
        request_end(l, s, GEN_STOP);
    else if (!go_on)
        request_end(l, s, GEN_CALLER);
    else if (q->max_tokens > 0 && s->out.output_tokens >= q->max_tokens)
        request_end(l, s, GEN_LENGTH);
    else
        return true;
    return false;
}
