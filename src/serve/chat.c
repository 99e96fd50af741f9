/* The life of a chat: prepared, begun, fed with tokens, finished or failed or abandoned. */
#include "serve/chat.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/clock.h"
#include "serve/api.h"
#include "serve/constrain.h"
#include "serve/metrics.h"
#include "serve/parser.h"
#include "serve/sse.h"

/* ---- making one ---- */

void api_random_id(char out[25]) {
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    uint8_t r[24] = { 0 };
    if (getrandom(r, sizeof r, 0) != (ssize_t)sizeof r) memset(r, 1, sizeof r);
    for (int i = 0; i < 24; i++) out[i] = letters[r[i] % 62];
    out[24] = 0;
}

void chat_request_init(chat_request *r, const chat_model *m, arena *mem) {
    *r = (chat_request){ .mem = mem,
                         .thinking = -1,
                         .generation_prompt = true,
                         .tool_choice = TOOLS_AUTO,
                         .parallel_tool_calls = true,
                         .sampling = m->defaults,
                         .n = 1,
                         .depth = -1,
                         .separate_reasoning = true,
                         .split = true };
}

chat *chat_new(const chat_dialect *d, const chat_model *m, http_call *call) {
    chat *c = xcalloc(1, sizeof *c);
    c->dialect = d;
    c->model = m;
    c->call = call;
    c->created = (int64_t)time(NULL);
    c->mem.limit = (size_t)1 << 30;
    api_random_id(c->id);
    chat_request_init(&c->request, m, &c->mem);
    return c;
}

bool chat_check_model(const chat *c, const json *body, fault *f) {
    str name = { 0 };
    if (!body_str(body, "model", &name, f)) return false;
    if (name.n == 0 || str_is(name, c->model->name)) return true;
    for (int i = 0; i < c->model->n_aliases; i++)
        if (str_is(name, c->model->aliases[i])) return true;
    fault_set(f, 404, "model_not_found", "the model '" STR_FMT "' is not served here (this is %s)",
              (int)(name.n > 100 ? 100 : name.n), name.p, c->model->name);
    snprintf(f->param, sizeof f->param, "model");
    return false;
}

bool chat_prepare(chat *c, str body, fault *f) {
    err e = { 0 };
    const json *v;
    const json_limits limits = { .max_depth = 64 };
    if (!json_parse(&v, &c->mem, body, "body", &limits, &e))
        return e.kind == ERR_INPUT ? fault_set(f, 400, "invalid_json", "%s", e.msg)
                                   : fault_set(f, 413, "body_too_large", "%s", e.msg);
    if (v->type != JSON_OBJECT) return fault_set(f, 400, "invalid_json", "body: not a JSON object");
    return c->dialect->parse(c, v, f) && chat_make_prompt(c, f) && (c->dialect->count_only || constrain_prepare(c, f));
}

/* ---- answers ---- */

const char *chat_finish_word(chat_finish f) {
    switch (f) {
    case CHAT_LENGTH:
    case CHAT_DEADLINE: return "length";
    case CHAT_CALLS: return "tool_calls";
    default: return "stop";
    }
}

static void end_job(chat_part *p) {
    if (!p->job) return;
    if (p->open > 0)
        job_abandon(p->job);
    else
        job_free(p->job);
    p->job = NULL;
}

static void end_jobs(chat *c) {
    for (int i = 0; i < c->n_parts; i++) end_job(&c->parts[i]);
    c->open = 0;
}

void chat_fail(chat *c, const fault *f) {
    end_jobs(c);
    if (!c->call) return;
    if (c->streaming && c->dialect->fail) {
        (c->dialect->fail)(c, f); /* tools/lint makes a macro of fail() */
    } else if (!c->streaming) {
        buf b = { 0 };
        (c->dialect->write_fault ? c->dialect->write_fault : fault_write)(&b, f);
        chat_reply_headers(c);
        http_reply_fault_json(c->call, f, &b);
        buf_free(&b);
    } else {
        buf b = { 0 };
        fault_write(&b, f);
        sse_event(c->call, NULL, buf_view(&b));
        sse_done(c->call);
        sse_close(c->call);
        buf_free(&b);
    }
}

static void count_end(chat *c, const chat_choice *ch) {
    metrics *m = c->env->metrics;
    m->finish[ch->finish]++;
    m->output_tokens += ch->usage.completion_tokens;
    m->reasoning_tokens += ch->usage.reasoning_tokens;
    metrics_tokens(&m->output_length, ch->usage.completion_tokens);
    if (ch->index % c->request.n == 0) m->cached_tokens += ch->usage.cached_tokens;
    metrics_seconds(&m->latency, clock_seconds() - c->submitted_at);
}

static chat_finish finish_of(const chat_choice *ch, gen_finish g) {
    switch (g) {
    case GEN_STOP:
    case GEN_CALLER: return ch->n_calls && !parser_was_cut(ch) ? CHAT_CALLS : CHAT_STOP;
    case GEN_LENGTH:
    case GEN_CONTEXT: return CHAT_LENGTH;
    case GEN_DEADLINE: return CHAT_DEADLINE;
    case GEN_CANCEL: break;
    }
    return CHAT_CANCELLED;
}

static bool choice_over(chat *c, chat_part *p, chat_choice *ch, fault *f) {
    const job_result *r = job_result_of(p->job, ch->index - p->first);
    c->open--;
    p->open--;
    if (r->fault.id) return fault_of(f, &r->fault);
    parser_end(ch);
    ch->stop_index = parser_stop(ch);
    ch->usage.prompt_tokens = r->r.prompt_tokens;
    ch->usage.cached_tokens = r->r.cached_tokens;
    ch->usage.rounds = r->r.rounds;
    ch->usage.drafted = r->r.drafted;
    ch->usage.accepted = r->r.accepted;
    ch->finish = finish_of(ch, r->r.finish);
    if (c->request.no_answer && ch->finish == CHAT_STOP) ch->finish = CHAT_LENGTH;
    if (ch->finish == CHAT_CANCELLED) return fault_set(f, 503, "shutting_down", "the server is shutting down");
    parser_finish(ch);
    count_end(c, ch);
    return true;
}

/* top_ids and top_logprobs: [top_logprobs of the request], NULL: there are none. */
static void add_token(chat_choice *ch, int32_t id, double logprob, const int32_t *top_ids, const double *top_logprobs) {
    const int k = ch->owner->request.top_logprobs;
    if (ch->n_tokens == ch->cap_tokens) {
        ch->cap_tokens = ch->cap_tokens ? 2 * ch->cap_tokens : 64;
        const size_t n = (size_t)ch->cap_tokens;
        ch->tokens = xrealloc(ch->tokens, n * sizeof *ch->tokens);
        ch->top_ids = xrealloc(ch->top_ids, (n * (size_t)k + 1) * sizeof *ch->top_ids);
        ch->top_logprobs = xrealloc(ch->top_logprobs, (n * (size_t)k + 1) * sizeof *ch->top_logprobs);
    }
    for (int i = 0; i < k; i++) {
        ch->top_ids[ch->n_tokens * k + i] = top_ids ? top_ids[i] : -1;
        ch->top_logprobs[ch->n_tokens * k + i] = top_ids ? top_logprobs[i] : 0;
    }
    ch->tokens[ch->n_tokens++] = (chat_token){ id, logprob };
}

static void take_token(chat *c, chat_part *p, const job_token *t) {
    const chat_request *r = &c->request;
    chat_choice *ch = t->choice < 0 ? &p->scored : &c->choices[p->first + t->choice];
    if (t->choice >= 0 && r->no_answer) return;
    if (r->logprobs || r->return_token_ids)
        add_token(ch, t->id, t->logprob, r->top_logprobs ? c->news.top_ids + t->top : NULL,
                  r->top_logprobs ? c->news.top_logprobs + t->top : NULL);
    if (t->choice >= 0) {
        parser_token(ch, t->id);
    } else if (ch->n_tokens == p->n && r->stream && c->call) {
        const chat_event ev = { .kind = EVENT_PROMPT, .choice = &c->choices[p->first] };
        c->dialect->event(c, &ev);
    }
}

static void count_news(chat *c, double now, int tokens) {
    metrics *m = c->env->metrics;
    if (tokens == 0) return;
    if (c->first_token_at == 0) {
        c->first_token_at = now;
        metrics_seconds(&m->ttft, now - c->submitted_at);
        tokens--;
    }
    for (int i = 0; i < tokens; i++) metrics_seconds(&m->inter_token, (now - c->last_news_at) / tokens);
    c->last_news_at = now;
}

/* False: the reader has to catch up first, or the chat is answered and may be gone. */
static bool take_news(chat_part *p);

static void on_drained(void *own) {
    chat *c = own;
    for (int i = 0, n = c->n_parts; i < n && take_news(&c->parts[i]); i++) {
    }
}

static bool take_news(chat_part *p) {
    chat *c = p->owner;
    if (!p->job) return true;
    if (c->streaming && http_stream_full(c->call)) { /* a slow reader: its tokens wait in the job */
        http_stream_on_drained(c->call, on_drained);
        return false;
    }
    fault f = { 0 };
    int tokens = 0;
    job_take(p->job, &c->news);
    for (size_t i = 0; i < c->news.n; i++) tokens += c->news.v[i].id >= 0 && c->news.v[i].choice >= 0;
    count_news(c, clock_seconds(), tokens);
    for (size_t i = 0; i < c->news.n; i++) {
        const job_token *t = &c->news.v[i];
        if (t->id >= 0)
            take_token(c, p, t);
        else if (!choice_over(c, p, &c->choices[p->first + t->choice], &f))
            break;
    }
    if (f.status) {
        c->env->metrics->failed++;
        c->counted = true;
        chat_fail(c, &f);
        return false;
    }
    for (int i = 0; i < c->request.n; i++) parser_flush(&c->choices[p->first + i]);
    if (p->open == 0) end_job(p);
    if (c->open > 0) return true;
    c->env->metrics->finished++;
    c->counted = true;
    c->dialect->finish(c);
    return false;
}

static void on_ready(void *owner) { (void)take_news(owner); }

/* ---- into the engine ---- */

static void stop_ids_of(const chat *c, int32_t *ids, int *stops, int *n) {
    const chat_request *r = &c->request;
    *n = 0;
    for (int i = 0; i < c->model->defaults.n_stop_ids && !r->ignore_eos; i++)
        ids[(*n)++] = c->model->defaults.stop_ids[i];
    for (int i = 0; i < r->n_stop_ids; i++) ids[(*n)++] = r->stop_ids[i];
    for (int i = 0; i < *n; i++) stops[i] = ids[i];
}

static bool submit(chat *c, chat_part *p, fault *f) {
    chat_request *r = &c->request;
    int32_t ids[SAMPLER_MAX_STOPS];
    int stops[SAMPLER_MAX_STOPS], marks[TOKENIZER_MAX_TURNS], n_stops, n_marks = 0;
    /* Where turns begin another request with the same history may go on differently. */
    if (r->messages) n_marks = tokenizer_turns(c->model->g->tok, marks, c->prompt.v + p->from, p->n);
    err e = { 0 };
    constraint *rule;
    stop_ids_of(c, ids, stops, &n_stops);
    if (c->grammar) r->sampling.min_tokens = 0; /* the end is where the grammar has it */
    if (!constraint_new(&rule, c, ids, n_stops, &e)) return fault_of(f, &e);
    if (!r->has_seed) {
        uint32_t seed = 0;
        if (getrandom(&seed, sizeof seed, 0) == (ssize_t)sizeof seed) r->sampling.seed = seed;
    }
    const bool one_call = r->split && constrain_may_call(r) && !r->parallel_tool_calls;
    job_spec s = { .request = { .prompt = c->prompt.v + p->from,
                                .n_prompt = p->n,
                                .marks = marks,
                                .n_marks = n_marks,
                                .sampling = r->sampling,
                                .rule = constraint_rule(rule),
                                .choices = r->n,
                                .max_tokens = r->no_answer ? 1 : r->max_tokens,
                                .depth = r->depth,
                                .priority = r->priority,
                                .stop_ids = stops,
                                .n_stop_ids = n_stops,
                                .logprobs = r->logprobs ? (r->top_logprobs > 0 ? r->top_logprobs : 1) : 0 },
                   .score_prompt = r->prompt_logprobs,
                   .tok = c->model->g->tok,
                   .stops = r->stops,
                   .n_stops = r->n_stops,
                   .min_tokens = r->sampling.min_tokens,
                   .one_call_of = one_call ? r->tools : NULL,
                   .thinking = c->thinks && r->separate_reasoning,
                   .calls_first = constrain_calls_first(r),
                   .held = rule,
                   .held_free = constraint_free,
                   .ready = on_ready,
                   .owner = p };
    s.request.sampling.stop_ids = ids;
    s.request.sampling.n_stop_ids = n_stops;
    if (c->model->deadline_seconds > 0) s.request.deadline_seconds = clock_seconds() + c->model->deadline_seconds;
    if (!job_submit(&p->job, c->env->bridge, c->env->l, &s, &e)) return fault_of(f, &e);
    p->scored.owner = c;
    if (r->prompt_logprobs) add_token(&p->scored, c->prompt.v[p->from], NAN, NULL, NULL);
    p->open = r->n;
    c->open += r->n;
    return true;
}

void chat_begin(chat *c, const chat_env *env) {
    fault f = { 0 };
    c->env = env;
    c->submitted_at = c->last_news_at = clock_seconds();
    if (c->dialect->count_only) {
        c->dialect->start(c);
        return;
    }
    c->choices = xcalloc((size_t)c->n_choices, sizeof *c->choices);
    for (int i = 0; i < c->n_choices; i++) {
        c->choices[i] = (chat_choice){ .owner = c, .index = i, .stop_index = -1, .stop_id = -1 };
        parser_begin(&c->choices[i]);
    }
    for (int i = 0; i < c->n_parts; i++) {
        if (submit(c, &c->parts[i], &f)) continue;
        env->metrics->refused++;
        chat_fail(c, &f);
        return;
    }
    env->metrics->prompt_tokens += c->prompt_tokens;
    for (int i = 0; i < c->n_parts; i++) metrics_tokens(&env->metrics->prompt_length, c->parts[i].n);
    c->dialect->start(c);
}

void chat_gone(chat *c) {
    c->call = NULL;
    if (c->env && c->open > 0 && !c->counted) {
        c->env->metrics->cancelled++;
        c->counted = true;
    }
    end_jobs(c);
}

static void free_tokens(chat_choice *ch) {
    free(ch->tokens);
    free(ch->top_ids);
    free(ch->top_logprobs);
}

void chat_free(chat *c) {
    if (!c) return;
    end_jobs(c);
    for (int i = 0; c->choices && i < c->n_choices; i++) {
        chat_choice *ch = &c->choices[i];
        parser_free(ch);
        for (int k = 0; k < ch->n_calls; k++) {
            buf_free(&ch->calls[k].arguments);
            free(ch->calls[k].name);
        }
        free(ch->calls);
        buf_free(&ch->text);
        buf_free(&ch->reasoning);
        free_tokens(ch);
    }
    for (int i = 0; i < c->n_parts; i++) free_tokens(&c->parts[i].scored);
    free(c->choices);
    free(c->parts);
    if (c->dialect->free && c->own) c->dialect->free(c->own);
    if (c->grammar) grammar_free(c->grammar);
    ids_free(&c->prompt);
    buf_free(&c->rendered);
    buf_free(&c->ignored);
    job_news_free(&c->news);
    arena_free(&c->mem);
    free(c);
}

/* ---- for the dialects ---- */

chat_usage chat_total_usage(const chat *c) {
    chat_usage u = { .prompt_tokens = c->prompt_tokens };
    for (int i = 0; i < c->n_choices; i++) {
        const chat_usage *x = &c->choices[i].usage;
        if (i % c->request.n == 0) u.cached_tokens += x->cached_tokens;
        u.completion_tokens += x->completion_tokens;
        u.reasoning_tokens += x->reasoning_tokens;
        u.rounds += x->rounds;
        u.drafted += x->drafted;
        u.accepted += x->accepted;
    }
    return u;
}

void chat_write_usage(buf *out, const chat_usage *u) {
    buf_printf(out,
               "{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d,\"prompt_tokens_details\":"
               "{\"cached_tokens\":%d},\"completion_tokens_details\":{\"reasoning_tokens\":%d}",
               u->prompt_tokens, u->completion_tokens, u->prompt_tokens + u->completion_tokens, u->cached_tokens,
               u->reasoning_tokens);
    api_write_speculative(out, u);
    buf_byte(out, '}');
}

void api_write_speculative(buf *out, const chat_usage *u) {
    if (u->rounds) {
        buf_printf(out, ",\"speculative\":{\"rounds\":%lld,\"drafted\":%lld,\"accepted\":%lld,\"accept_length\":",
                   (long long)u->rounds, (long long)u->drafted, (long long)u->accepted);
        json_write_double(out, (double)(u->accepted + u->rounds) / (double)u->rounds);
        buf_byte(out, '}');
    }
}

static void write_token(buf *out, const chat_choice *ch, int32_t id, double logprob) {
    const str bytes = tokenizer_bytes(ch->owner->model->g->tok, id);
    buf_puts(out, "{\"token\":");
    json_write_str(out, bytes);
    buf_puts(out, ",\"logprob\":");
    json_write_double(out, logprob < -9999 ? -9999 : logprob);
    buf_puts(out, ",\"bytes\":[");
    for (size_t i = 0; i < bytes.n; i++) buf_printf(out, "%s%u", i ? "," : "", (unsigned)(uint8_t)bytes.p[i]);
    buf_byte(out, ']');
}

void chat_write_logprobs(buf *out, const chat_choice *ch, int first, int n) {
    const int k = ch->owner->request.top_logprobs;
    for (int i = first; i < first + n; i++) {
        if (i > first) buf_byte(out, ',');
        write_token(out, ch, ch->tokens[i].id, ch->tokens[i].logprob);
        buf_puts(out, ",\"top_logprobs\":[");
        for (int j = 0; j < k && ch->top_ids[i * k + j] >= 0; j++) {
            if (j) buf_byte(out, ',');
            write_token(out, ch, ch->top_ids[i * k + j], ch->top_logprobs[i * k + j]);
            buf_byte(out, '}');
        }
        buf_puts(out, "]}");
    }
}

void chat_write_ids(buf *out, const chat_choice *ch, int first, int n) {
    for (int i = first; i < first + n; i++) buf_printf(out, "%s%d", i > first ? "," : "", ch->tokens[i].id);
}

void chat_reply_headers(chat *c) {
    http_reply_header(c->call, "X-Request-Id", c->id);
    if (c->ignored.n) http_reply_header(c->call, "X-Nibble-Ignored", c->ignored.p);
}
