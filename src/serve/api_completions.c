/* POST /v1/completions: text or token ids as they are, no template, nothing parted from the text. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "serve/api.h"
#include "serve/sse.h"

enum { DEFAULT_MAX_TOKENS = 16 };

static const char *const known[] = { "model",
                                     "prompt",
                                     "stream",
                                     "stream_options",
                                     "max_tokens",
                                     "temperature",
                                     "top_p",
                                     "top_k",
                                     "min_p",
                                     "presence_penalty",
                                     "frequency_penalty",
                                     "repetition_penalty",
                                     "logit_bias",
                                     "seed",
                                     "n",
                                     "best_of",
                                     "stop",
                                     "stop_token_ids",
                                     "ignore_eos",
                                     "min_tokens",
                                     "logprobs",
                                     "echo",
                                     "suffix",
                                     "return_token_ids",
                                     "priority",
                                     "user",
                                     NULL };

typedef struct own {
    bool echo;
    size_t *offsets; /* [n] characters told so far per choice, for text_offset */
} own;

static void own_free(void *p) {
    own *o = p;
    free(o->offsets);
    free(o);
}

bool api_read_ids(arena *mem, const json *v, const char *param, int vocab, const int32_t **out, int *n, fault *f) {
    if (v->n > 1 << 24) return fault_field(f, param, "%s: too many token ids", param);
    int32_t *ids = arena_take(mem, v->n ? v->n : 1, sizeof *ids);
    if (!ids) return fault_set(f, 503, NULL, "no memory for the request");
    for (uint32_t i = 0; i < v->n; i++) {
        const json *x = &v->u.items[i];
        if (!json_is(x, JSON_INT) || x->u.i < 0 || x->u.i >= vocab)
            return fault_field(f, param, "%s: element %u is not a token id (0 to %d)", param, i, vocab - 1);
        ids[i] = (int32_t)x->u.i;
    }
    *out = ids;
    *n = (int)v->n;
    return true;
}

static bool read_one(chat *c, chat_prompt *p, const json *v, fault *f) {
    *p = (chat_prompt){ 0 };
    if (v->type != JSON_STRING && v->type != JSON_ARRAY)
        return fault_field(f, "prompt", "prompt must be a string, a list of token ids, or a list of either");
    if (v->type == JSON_STRING) p->text = json_str(v);
    if (v->type == JSON_STRING ? p->text.n == 0 : v->n == 0)
        return fault_field(f, "prompt", "prompt must not be empty");
    return v->type == JSON_STRING ||
           api_read_ids(c->request.mem, v, "prompt", c->model->g->n.real_vocab, &p->ids, &p->n_ids, f);
}

/* A string, a list of ids, or a list of such. n is known. */
static bool read_prompts(chat *c, const json *body, fault *f) {
    chat_request *r = &c->request;
    const json *v = body_get(body, "prompt");
    if (!v) return fault_field(f, "prompt", "prompt is missing");
    const bool list = v->type == JSON_ARRAY && v->n > 0 && v->u.items[0].type != JSON_INT;
    const uint32_t count = list ? v->n : 1;
    if (count > 1 && (int64_t)count * r->n > c->model->max_answers)
        return fault_field(f, "prompt",
                           "prompt: %u prompts with n %d are more than the %d answers that can run or wait", count,
                           r->n, c->model->max_answers);
    chat_prompt *p = arena_take(r->mem, count, sizeof *p);
    if (!p) return fault_set(f, 503, NULL, "no memory for the request");
    for (uint32_t i = 0; i < count; i++) {
        if (read_one(c, &p[i], list ? &v->u.items[i] : v, f)) continue;
        return count > 1 ? chat_name_prompt(f, (int)i) : false;
    }
    r->prompts = p;
    r->n_prompts = (int)count;
    r->raw_special = true;
    return true;
}

static bool parse(chat *c, const json *body, fault *f) {
    static const char *const unserved[] = { "suffix", NULL };
    chat_request *r = &c->request;
    own *o = c->own = xcalloc(1, sizeof *o);
    int logprobs = -1, best_of = 0;
    chat_ignored(c, body, known);
    r->split = false;
    r->tool_choice = TOOLS_NONE;
    r->max_tokens = DEFAULT_MAX_TOKENS;
    if (!api_refuse(body, unserved, f) || !body_bool(body, "echo", &o->echo, f) ||
        !api_read_common(c, body, o->echo ? 0 : 1, f) ||
        !body_int(body, "logprobs", 0, CHAT_MAX_TOP_LOGPROBS, &logprobs, f) ||
        !body_int(body, "best_of", 1, CHAT_MAX_CHOICES, &best_of, f) || !read_prompts(c, body, f))
        return false;
    if (best_of && best_of != r->n) return fault_field(f, "best_of", "best_of must equal n");
    r->no_answer = r->max_tokens == 0;
    r->logprobs = logprobs >= 0;
    r->prompt_logprobs = r->logprobs && o->echo;
    r->top_logprobs = logprobs > 0 ? logprobs : 0;
    return true;
}

static void write_head(buf *b, const chat *c) {
    buf_printf(b, "{\"id\":\"cmpl-%s\",\"object\":\"text_completion\",\"created\":%lld,\"model\":", c->id,
               (long long)c->created);
    json_write_str(b, str_of(c->model->name));
}

static size_t characters(str s) {
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += ((unsigned char)s.p[i] & 0xc0) != 0x80;
    return n;
}

static void write_token_text(buf *b, const chat *c, int32_t id) {
    json_write_str(b, tokenizer_bytes(c->model->g->tok, id));
}

static void write_value(buf *b, double logprob) {
    if (isnan(logprob)) /* nothing stands in front of the first token */
        buf_puts(b, "null");
    else
        json_write_double(b, logprob);
}

static void write_top(buf *b, const chat *c, int32_t id, double logprob) {
    write_token_text(b, c, id);
    buf_byte(b, ':');
    json_write_double(b, logprob);
}

/* Tokens [first, first + n) of a choice, or of a prompt that was scored. */
typedef struct span {
    const chat_choice *of;
    int first, n;
} span;

/* The best at one position; the chosen token is always among them, as one more when need be. */
static void write_best(buf *b, const chat_choice *ch, int i) {
    const chat *c = ch->owner;
    const int k = c->request.top_logprobs;
    const chat_token *chosen = &ch->tokens[i];
    bool there = false;
    if (isnan(chosen->logprob)) {
        buf_puts(b, "null");
        return;
    }
    buf_byte(b, '{');
    for (int j = 0; j < k && ch->top_ids[i * k + j] >= 0; j++) {
        if (j) buf_byte(b, ',');
        write_top(b, c, ch->top_ids[i * k + j], ch->top_logprobs[i * k + j]);
        there |= ch->top_ids[i * k + j] == chosen->id;
    }
    if (!there) {
        buf_byte(b, ',');
        write_top(b, c, chosen->id, chosen->logprob);
    }
    buf_byte(b, '}');
}

typedef enum list { LIST_TOKENS, LIST_VALUES, LIST_BEST, LIST_OFFSETS } list;

/* One of the parallel lists, of two spans; *at counts characters for the last. */
static void write_list(buf *b, list what, const span s[2], size_t *at) {
    bool any = false;
    for (int part = 0; part < 2; part++) {
        const chat_choice *ch = s[part].of;
        for (int i = s[part].first; i < s[part].first + s[part].n; i++, any = true) {
            if (any) buf_byte(b, ',');
            if (what == LIST_TOKENS)
                write_token_text(b, ch->owner, ch->tokens[i].id);
            else if (what == LIST_VALUES)
                write_value(b, ch->tokens[i].logprob);
            else if (what == LIST_BEST)
                write_best(b, ch, i);
            else {
                buf_printf(b, "%zu", *at);
                *at += characters(tokenizer_bytes(ch->owner->model->g->tok, ch->tokens[i].id));
            }
        }
    }
}

/* The older form: parallel lists. */
static void write_logprobs(buf *b, const chat_choice *ch, bool echo, int first, int n) {
    const chat *c = ch->owner;
    const own *o = c->own;
    const chat_choice *prompt = &c->parts[ch->index / c->request.n].scored;
    const span spans[2] = { { prompt, 0, echo ? prompt->n_tokens : 0 }, { ch, first, n } };
    size_t *at = &o->offsets[ch->index];
    buf_puts(b, "{\"tokens\":[");
    write_list(b, LIST_TOKENS, spans, at);
    buf_puts(b, "],\"token_logprobs\":[");
    write_list(b, LIST_VALUES, spans, at);
    buf_puts(b, "],\"top_logprobs\":[");
    if (c->request.top_logprobs > 0) write_list(b, LIST_BEST, spans, at);
    buf_puts(b, "],\"text_offset\":[");
    write_list(b, LIST_OFFSETS, spans, at);
    buf_puts(b, "]}");
}

/* A prompt as text, into the caller's buffer; empty without echo. */
static void put_echo(buf *b, const chat_choice *ch) {
    const chat *c = ch->owner;
    const own *o = c->own;
    if (!o->echo) return;
    const int part = ch->index / c->request.n;
    const chat_prompt *p = &c->request.prompts[part];
    err e = { 0 };
    const size_t n = b->n;
    if (!p->ids)
        buf_str(b, p->text);
    else if (!tokenizer_decode(c->model->g->tok, b, p->ids, (size_t)p->n_ids, false, &e))
        buf_truncate(b, n);
}

static void write_choice(buf *b, const chat_choice *ch, bool echo, str text, int first, int n, bool ended) {
    const chat_request *r = &ch->owner->request;
    buf all = { 0 };
    if (echo) put_echo(&all, ch);
    buf_str(&all, text);
    buf_printf(b, "{\"index\":%d,\"text\":", ch->index);
    json_write_str(b, buf_view(&all));
    buf_puts(b, ",\"logprobs\":");
    if (r->logprobs)
        write_logprobs(b, ch, echo, first, n);
    else
        buf_puts(b, "null");
    if (ended)
        buf_printf(b, ",\"finish_reason\":\"%s\"", chat_finish_word(ch->finish));
    else
        buf_puts(b, ",\"finish_reason\":null");
    if (r->return_token_ids) {
        buf_puts(b, ",\"token_ids\":[");
        chat_write_ids(b, ch, first, n);
        buf_byte(b, ']');
    }
    buf_byte(b, '}');
    buf_free(&all);
}

/* Streams: the prompt as the first piece of each of its answers. */
static void tell_echo(chat *c, const chat_part *p) {
    for (int i = p->first; i < p->first + c->request.n; i++) {
        buf b = { 0 };
        write_head(&b, c);
        buf_puts(&b, ",\"choices\":[");
        write_choice(&b, &c->choices[i], true, (str){ "", 0 }, 0, 0, false);
        buf_puts(&b, "]}");
        sse_event(c->call, NULL, buf_view(&b));
        buf_free(&b);
    }
}

static void start(chat *c) {
    own *o = c->own;
    o->offsets = xcalloc((size_t)c->n_choices, sizeof *o->offsets);
    if (!c->request.stream) return;
    chat_reply_headers(c);
    sse_open(c->call);
    c->streaming = true;
    for (int i = 0; o->echo && i < c->n_parts; i++) /* with log-probabilities: when these are known */
        if (!c->request.prompt_logprobs || c->parts[i].n == 1) tell_echo(c, &c->parts[i]);
}

static void event(chat *c, const chat_event *ev) {
    if (ev->kind == EVENT_PROMPT) tell_echo(c, &c->parts[ev->choice->index / c->request.n]);
    if (ev->kind != EVENT_TEXT && ev->kind != EVENT_FINISH) return;
    buf b = { 0 };
    write_head(&b, c);
    buf_puts(&b, ",\"choices\":[");
    write_choice(&b, ev->choice, false, ev->text, ev->first_token, ev->n_tokens, ev->kind == EVENT_FINISH);
    buf_byte(&b, ']');
    if (c->request.continuous_usage) {
        const chat_usage u = chat_total_usage(c);
        buf_puts(&b, ",\"usage\":");
        chat_write_usage(&b, &u);
    } else if (c->request.include_usage) {
        buf_puts(&b, ",\"usage\":null");
    }
    buf_byte(&b, '}');
    sse_event(c->call, NULL, buf_view(&b));
    buf_free(&b);
}

static void finish(chat *c) {
    buf b = { 0 };
    const chat_usage u = chat_total_usage(c);
    if (!c->streaming) {
        write_head(&b, c);
        for (int i = 0; i < c->n_choices; i++) {
            const chat_choice *ch = &c->choices[i];
            buf_puts(&b, i ? "," : ",\"choices\":[");
            write_choice(&b, ch, true, buf_view(&ch->text), 0, ch->n_tokens, true);
        }
        buf_puts(&b, "],\"usage\":");
        chat_write_usage(&b, &u);
        buf_byte(&b, '}');
        chat_reply_headers(c);
        http_reply_json(c->call, 200, &b);
        buf_free(&b);
        return;
    }
    if (c->request.include_usage) {
        write_head(&b, c);
        buf_puts(&b, ",\"choices\":[],\"usage\":");
        chat_write_usage(&b, &u);
        buf_byte(&b, '}');
        sse_event(c->call, NULL, buf_view(&b));
        buf_free(&b);
    }
    sse_done(c->call);
    sse_close(c->call);
}

const chat_dialect api_completions = {
    .path = "/v1/completions", .parse = parse, .start = start, .event = event, .finish = finish, .free = own_free
};
