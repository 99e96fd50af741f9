#include "lib/jobs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a rule: what may follow depends on all that was accepted or is ahead ---- */

static uint64_t chain_step(uint64_t h, int32_t id) { return (h ^ (uint64_t)id) * 0x9e3779b97f4a7c15u ^ h >> 29; }

static bool chain_allows(uint64_t h, int32_t id, int narrow, int vocab) {
    return (chain_step(h, id) >> 32) % (uint64_t)narrow == 0 || (uint64_t)id == h % (uint64_t)vocab; /* never none */
}

static bool chain_mask(void *ctx, int choice, const int32_t *ahead, int n, uint64_t *allowed, err *e) {
    const job_run *run = ctx;
    const int vocab = run->g->n.real_vocab;
    uint64_t h = run->chain[choice];
    for (int i = 0; i < n; i++) {
        if (!chain_allows(h, ahead[i], run->j->narrow, vocab))
            return fail(e, ERR_INPUT, "E-TEST-AHEAD", "draft %d is not allowed", i);
        h = chain_step(h, ahead[i]);
    }
    memset(allowed, 0, rule_words(vocab) * sizeof *allowed);
    for (int32_t i = 0; i < vocab; i++)
        allowed[i / 64] |= (uint64_t)chain_allows(h, i, run->j->narrow, vocab) << i % 64;
    return true;
}

static void chain_accept(void *ctx, int choice, int32_t id) {
    job_run *run = ctx;
    run->chain[choice] = chain_step(run->chain[choice], id);
}

static bool make_rule(token_rule *out, job_run *run, int choices, err *e) {
    const job *j = run->j;
    const job_world *w = run->w;
    *out = (token_rule){ 0 };
    if (j->rule == JOB_FREE) return true;
    if (j->rule == JOB_CHAIN) {
        *out = (token_rule){ chain_mask, chain_accept, run };
        return true;
    }
    if (!grammar_run_new(&run->grammar, j->rule == JOB_JSON ? w->json : w->schema, w->words, choices, j->stops,
                         j->n_stops, e))
        return false;
    *out = (token_rule){ grammar_mask, grammar_accept, run->grammar };
    return true;
}

/* ---- what comes ---- */

/* Is this row of logits among those that the engine has at hand? Another position's could only pass by having the same bits. */
static bool at_hand(const engine *g, const float *row) {
    const size_t n = (size_t)g->n.real_vocab;
    for (int i = 0; i < g->sc.head_rows; i++)
        if (memcmp(g->host_logits + (size_t)i * n, row, n * sizeof *row) == 0) return true;
    return false;
}

static bool take(job_run *run, int choice, int32_t id, double p, const int32_t *top, const double *values) {
    const job *j = run->j;
    job_answer *a = &run->got[choice];
    CHECK(a->n < JOB_TOKENS, "%d tokens", a->n);
    const job_answer *want = &j->alone[choice];
    const bool whole = j->logprobs > 0 || !run->g->n.heads.top;
    if (want->rows && whole && a->n < want->n && id == want->id[a->n])
        run->odd_rows += !at_hand(run->g, want->rows + (size_t)a->n * (size_t)run->g->n.real_vocab);
    for (int i = 0; i < j->logprobs; i++) a->top_id[a->n][i] = top[i], a->top[a->n][i] = values[i];
    a->p[a->n] = p;
    a->id[a->n++] = id;
    return !j->stop_text[0] || reply_push(&run->text[choice], id);
}

static void begin(job_run *run, const job *j, const job_world *w, engine *g) {
    run->j = j, run->w = w, run->g = g;
    run->stop_texts[0] = j->stop_text;
    for (int c = 0; c < j->choices; c++) {
        run->chain[c] = (uint64_t)c;
        run->got[c].finish = GEN_CANCEL;
        if (j->stop_text[0]) reply_init_plain(&run->text[c], w->tok, run->stop_texts, 1);
    }
}

void job_run_free(job_run *run) {
    for (int c = 0; run->j && run->j->stop_text[0] && c < run->j->choices; c++) reply_free(&run->text[c]);
    grammar_run_free(run->grammar);
    run->grammar = NULL;
    run->j = NULL;
}

/* ---- alone ---- */

typedef struct solo {
    job_run *run;
    int choice;
    float *rows; /* to be filled */
} solo;

static bool solo_token(void *ctx, int32_t id, double p, const int32_t *top, const double *values) {
    solo *s = ctx;
    const size_t n = (size_t)s->run->g->n.real_vocab;
    if (s->rows) memcpy(s->rows + (size_t)s->run->got[s->choice].n * n, s->run->g->host_logits, n * sizeof *s->rows);
    return take(s->run, s->choice, id, p, top, values);
}

static bool solo_mask(void *ctx, int choice, const int32_t *ahead, int n, uint64_t *allowed, err *e) {
    (void)choice;
    const solo *s = ctx;
    return (s->run->j->rule == JOB_CHAIN ? chain_mask : grammar_mask)(
        s->run->j->rule == JOB_CHAIN ? (void *)s->run : s->run->grammar, s->choice, ahead, n, allowed, e);
}

static void solo_accept(void *ctx, int choice, int32_t id) {
    (void)choice;
    const solo *s = ctx;
    (s->run->j->rule == JOB_CHAIN ? chain_accept : grammar_accept)(
        s->run->j->rule == JOB_CHAIN ? (void *)s->run : s->run->grammar, s->choice, id);
}

static bool one_alone(solo *s, int depth, err *e) {
    job_run *run = s->run;
    const job *j = run->j;
    session ses;
    gen_options o = { .max_tokens = j->max_tokens,
                      .depth = depth,
                      .sampling = j->sampling,
                      .stop_ids = j->stops,
                      .n_stop_ids = j->n_stops,
                      .logprobs = j->logprobs,
                      .on_token = solo_token,
                      .ctx = s };
    if (j->rule != JOB_FREE) o.rule = (token_rule){ solo_mask, solo_accept, s };
    o.sampling.choice += (uint32_t)s->choice;
    if (!session_open(&ses, run->g, depth > 0, e)) return false;
    const bool ok =
        session_set(&ses, j->prompt, j->n_prompt, e) && session_generate(&ses, &o, &run->result[s->choice], e);
    run->got[s->choice].finish = run->result[s->choice].finish;
    session_close(&ses);
    return ok;
}

bool job_alone(job_run *run, engine *g, const job *j, const job_world *w, int depth, err *e) {
    *run = (job_run){ 0 };
    begin(run, j, w, g);
    token_rule unused;
    if (!make_rule(&unused, run, j->choices, e)) return false;
    for (int c = 0; c < j->choices; c++) {
        solo s = { .run = run, .choice = c };
        if (!one_alone(&s, depth, e)) return false;
        run->ended++;
    }
    return true;
}

static bool settle(job *j, const job_world *w, engine *g, err *e) {
    job_run run = { 0 };
    token_rule unused;
    begin(&run, j, w, g);
    bool ok = make_rule(&unused, &run, j->choices, e);
    for (int c = 0; ok && c < j->choices; c++) {
        float *rows = j->alone[c].rows;
        j->alone[c].rows = NULL; /* nothing to compare with yet */
        if (w->rows && !rows) rows = xmalloc((size_t)JOB_TOKENS * (size_t)g->n.real_vocab * sizeof *rows);
        solo s = { .run = &run, .choice = c, .rows = rows };
        ok = one_alone(&s, 0, e);
        j->alone[c] = run.got[c];
        j->alone[c].rows = rows;
    }
    job_run_free(&run);
    return ok;
}

/* ---- in a loop ---- */

static bool loop_token(void *ctx, int choice, int32_t id, double p, const int32_t *top, const double *values) {
    job_run *run = ctx;
    const bool go_on = take(run, choice, id, p, top, values);
    int all = 0;
    for (int c = 0; c < run->j->choices; c++) all += run->got[c].n;
    if (run->leave_after > 0 && all >= run->leave_after) loop_cancel(run->l, run->handle);
    return go_on;
}

static void loop_done(void *ctx, int choice, const gen_result *r, const err *e) {
    job_run *run = ctx;
    run->result[choice] = *r;
    run->got[choice].finish = r->finish;
    run->fault[choice] = *e;
    if (++run->ended == run->j->choices && run->on_over) run->on_over(run);
}

bool job_start(job_run *run, loop *l, engine *g, const job *j, const job_world *w, const job_submit *s, err *e) {
    token_rule rule;
    begin(run, j, w, g);
    run->l = l;
    if (!make_rule(&rule, run, j->choices, e)) return false;
    const loop_request q = { .prompt = j->prompt,
                             .n_prompt = j->n_prompt,
                             .marks = &j->mark,
                             .n_marks = j->mark > 0,
                             .sampling = j->sampling,
                             .rule = rule,
                             .choices = j->choices,
                             .max_tokens = j->max_tokens,
                             .depth = s->depth,
                             .priority = s->priority,
                             .deadline_seconds = s->deadline_seconds,
                             .stop_ids = j->stops,
                             .n_stop_ids = j->n_stops,
                             .logprobs = j->logprobs,
                             .on_token = loop_token,
                             .on_done = loop_done,
                             .ctx = run };
    return loop_submit(l, &run->handle, &q, e);
}

/* ---- compared ---- */

static const char *choice_differs(const job_run *run, int c) {
    static char why[300];
    const job_answer *want = &run->j->alone[c], *got = &run->got[c];
    if (run->fault[c].id) {
        snprintf(why, sizeof why, "%s: %.200s", run->fault[c].id, run->fault[c].msg);
        return why;
    }
    const bool whole = got->finish != GEN_CANCEL && got->finish != GEN_DEADLINE;
    if (got->n > want->n || (whole && (got->n != want->n || got->finish != want->finish))) {
        snprintf(why, sizeof why, "choice %d: %d tokens, alone %d; ended by %d, alone by %d", c, got->n, want->n,
                 (int)got->finish, (int)want->finish);
        return why;
    }
    for (int i = 0; i < got->n; i++)
        if (got->id[i] != want->id[i]) {
            snprintf(why, sizeof why, "choice %d: token %d is %d, alone %d", c, i, got->id[i], want->id[i]);
            return why;
        }
    const size_t n = (size_t)got->n;
    if (memcmp(got->p, want->p, n * sizeof got->p[0]) != 0 ||
        memcmp(got->top, want->top, n * sizeof got->top[0]) != 0 ||
        memcmp(got->top_id, want->top_id, n * sizeof got->top_id[0]) != 0) {
        snprintf(why, sizeof why, "choice %d: other log-probabilities", c);
        return why;
    }
    return NULL;
}

const char *job_differs(const job_run *run) {
    static char why[80];
    if (run->ended != run->j->choices) {
        snprintf(why, sizeof why, "%d of %d choices ended", run->ended, run->j->choices);
        return why;
    }
    for (int c = 0; c < run->j->choices; c++) {
        const char *what = choice_differs(run, c);
        if (what) return what;
    }
    if (run->odd_rows == 0) return NULL;
    snprintf(why, sizeof why, "%d rows of logits have other bits", run->odd_rows);
    return why;
}

/* ---- made ---- */

static const sampler_bias bias[] = { { 17, 2 }, { 30, -100 } };
static const int32_t banned[] = { 17, 19 };

static sampler_params random_sampling(rnd *r) {
    sampler_params p = { .seed = rnd_next(r) };
    if (rnd_below(r, 3) == 0) p.presence = 1, p.frequency = 0.4, p.repetition = 1.1;
    if (rnd_below(r, 5) == 0) p.bias = bias, p.n_bias = 2;
    if (rnd_below(r, 5) == 0) p.stop_ids = banned, p.n_stop_ids = 2, p.min_tokens = 10;
    if (rnd_below(r, 3) == 0) return p; /* greedy */
    p.temperature = 0.5 + rnd_below(r, 8) / 10.0;
    p.top_k = rnd_below(r, 2) ? 20 : 0;
    p.top_p = rnd_below(r, 2) ? 0.9 : 1;
    p.min_p = rnd_below(r, 4) ? 0 : 0.05;
    return p;
}

/* New, or what another began, or what another began and got. */
static void random_prompt(job *j, const job *all, int n, const job_world *w, rnd *r) {
    const job *from = n > 0 && rnd_below(r, 2) ? &all[rnd_below(r, (uint32_t)n)] : NULL;
    if (from) {
        j->n_prompt = rnd_below(r, 2) ? from->n_prompt : 1 + (int)rnd_below(r, (uint32_t)from->n_prompt);
        memcpy(j->prompt, from->prompt, sizeof j->prompt);
        const job_answer *a = &from->alone[0];
        for (int i = 0; j->n_prompt == from->n_prompt && i < a->n && j->n_prompt < JOB_PROMPT; i++)
            j->prompt[j->n_prompt++] = a->id[i];
        j->mark = j->n_prompt;
    }
    int more = from ? (int)rnd_below(r, 12) : 1 + (int)rnd_below(r, JOB_PROMPT);
    for (; more > 0 && j->n_prompt < JOB_PROMPT; more--)
        j->prompt[j->n_prompt++] = (int32_t)rnd_below(r, (uint32_t)w->vocab);
}

/* A stop that is met: an id, or text of some tokens in the middle. */
static void random_stop(job *j, const job_world *w, rnd *r) {
    const job_answer *a = &j->alone[0];
    if (a->n < 8 || rnd_below(r, 2)) return;
    const int at = 3 + (int)rnd_below(r, 4);
    if (w->tok && rnd_below(r, 2)) {
        err e = { 0 };
        buf b = { 0 };
        if (tokenizer_decode(w->tok, &b, a->id + at, 2, true, &e) && b.n > 0 && b.n < sizeof j->stop_text &&
            !memchr(b.p, 0, b.n))
            memcpy(j->stop_text, b.p, b.n);
        buf_free(&b);
    } else if (j->rule <= JOB_CHAIN) {
        j->stops[j->n_stops++] = a->id[at];
    }
}

bool job_make(job *all, int n, const job_world *w, engine *g, rnd *r, err *e) {
    job *j = &all[n];
    *j = (job){ .max_tokens = 1 + (int)rnd_below(r, JOB_TOKENS),
                .choices = rnd_below(r, 4) ? 1 : 2 + (int)rnd_below(r, JOB_CHOICES - 1),
                .logprobs = rnd_below(r, 3) ? 0 : JOB_TOP,
                .narrow = 2 + (int)rnd_below(r, (uint32_t)w->vocab / 3),
                .sampling = random_sampling(r) };
    random_prompt(j, all, n, w, r);
    const uint32_t kind = rnd_below(r, 6);
    if (kind < 2) j->rule = JOB_CHAIN, j->sampling.min_tokens = 0; /* else both together could forbid everything */
    if (kind == 2 && w->json) {
        j->rule = rnd_below(r, 2) ? JOB_JSON : JOB_SCHEMA;
        j->sampling.min_tokens = 0;
        for (int i = 0; i < g->config.stop_count && j->n_stops < 2; i++) j->stops[j->n_stops++] = g->config.stop_ids[i];
    }
    if (!settle(j, w, g, e)) return false;
    const int before = j->n_stops;
    random_stop(j, w, r);
    return (j->n_stops == before && !j->stop_text[0]) || settle(j, w, g, e);
}

void job_free(job *j) {
    for (int c = 0; c < JOB_CHOICES; c++) free(j->alone[c].rows), j->alone[c].rows = NULL;
}

/* ---- the world ---- */

static const char *const a_schema =
    "{\"type\":\"object\",\"properties\":{\"n\":{\"type\":\"integer\"},\"on\":{\"type\":\"boolean\"},"
    "\"who\":{\"enum\":[\"ant\",\"bee\"]}},\"required\":[\"n\",\"who\"]}";

bool jobs_open(job_world *out, const engine *g, bool rows, err *e) {
    *out = (job_world){ .vocab = g->n.real_vocab, .rows = rows, .tok = g->tok };
    if (!g->tok) return true;
    arena mem = { 0 };
    const json *schema;
    const bool ok = grammar_vocab_new(&out->words, g->tok, g->n.real_vocab, e) &&
                    grammar_json_object(&out->json, NULL, e) &&
                    json_parse(&schema, &mem, str_of(a_schema), "schema", NULL, e) &&
                    grammar_json_schema(&out->schema, schema, NULL, e);
    arena_free(&mem);
    return ok;
}

void jobs_close(job_world *w) {
    grammar_free(w->json);
    grammar_free(w->schema);
    grammar_vocab_free(w->words);
    *w = (job_world){ 0 };
}
