#include "serve/parser.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "serve/constrain.h"
#include "text/reply.h"

typedef struct chat_parser {
    reply r;
    bool thinking;        /* still inside the thought: for counting its tokens */
    chat_event_kind kind; /* of what is gathered */
    buf gathered;
    int told_tokens;
    bool enough; /* the one call that may be made was */
} chat_parser;

static void tell(chat_choice *ch, chat_event_kind kind, str text) {
    chat *c = ch->owner;
    chat_parser *p = ch->parser;
    if (!c->request.stream || !c->call) return;
    const chat_event ev = { .kind = kind,
                            .choice = ch,
                            .call = ch->n_calls - 1,
                            .text = text,
                            .first_token = p->told_tokens,
                            .n_tokens = ch->n_tokens - p->told_tokens };
    p->told_tokens = ch->n_tokens;
    c->dialect->event(c, &ev);
}

void parser_flush(chat_choice *ch) {
    chat_parser *p = ch->parser;
    if (!p->gathered.n) return;
    tell(ch, p->kind, buf_view(&p->gathered));
    buf_clear(&p->gathered);
}

static void gather(chat_choice *ch, chat_event_kind kind, str text) {
    chat_parser *p = ch->parser;
    if (!ch->owner->request.stream) return;
    if (p->kind != kind) parser_flush(ch);
    p->kind = kind;
    buf_str(&p->gathered, text);
}

/* ---- calls ---- */

static void call_begin(chat_choice *ch, str name) {
    chat_parser *p = ch->parser;
    parser_flush(ch);
    p->thinking = false;
    ch->calls = xrealloc(ch->calls, (size_t)(ch->n_calls + 1) * sizeof *ch->calls);
    chat_call *call = &ch->calls[ch->n_calls++];
    *call = (chat_call){ .name = xcalloc(name.n + 1, 1) };
    memcpy(call->name, name.p, name.n);
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    uint8_t r[24] = { 0 };
    if (getrandom(r, sizeof r, 0) != (ssize_t)sizeof r) memset(r, ch->n_calls, sizeof r);
    memcpy(call->id, "call_", 5);
    for (int i = 0; i < 24; i++) call->id[5 + i] = letters[r[i] % 62];
    tell(ch, EVENT_CALL_BEGIN, (str){ "", 0 });
}

static void on_piece(void *ctx, split_kind kind, str piece) {
    chat_choice *ch = ctx;
    if (ch->parser->enough) return;
    switch (kind) {
    case SPLIT_THOUGHT:
        buf_str(&ch->reasoning, piece);
        gather(ch, EVENT_REASONING, piece);
        break;
    case SPLIT_TEXT:
        ch->parser->thinking = false;
        buf_str(&ch->text, piece);
        gather(ch, EVENT_TEXT, piece);
        break;
    case SPLIT_CALL: call_begin(ch, piece); break;
    case SPLIT_ARGS:
        buf_str(&ch->calls[ch->n_calls - 1].arguments, piece);
        gather(ch, EVENT_CALL_ARGS, piece);
        break;
    case SPLIT_CALL_END:
    case SPLIT_CALL_CUT:
        parser_flush(ch);
        tell(ch, EVENT_CALL_END, (str){ "", 0 });
        ch->parser->enough = !ch->owner->request.parallel_tool_calls;
        break;
    }
}

/* ---- tokens ---- */

void parser_begin(chat_choice *ch) {
    const chat *c = ch->owner;
    const chat_request *r = &c->request;
    chat_parser *p = ch->parser = xcalloc(1, sizeof *p);
    const bool thinking = c->thinks && r->split && r->separate_reasoning;
    const json *tools = r->split && r->tool_choice != TOOLS_NONE ? r->tools : NULL;
    if (r->split)
        reply_init(&p->r, c->model->g->tok, thinking, tools, r->stops, r->n_stops);
    else
        reply_init_plain(&p->r, c->model->g->tok, r->stops, r->n_stops);
    if (r->split && constrain_calls_first(r)) split_calls_first(p->r.s);
    p->r.min_tokens = r->sampling.min_tokens;
    p->r.on_piece = on_piece;
    p->r.ctx = ch;
    p->thinking = thinking;
}

static bool is_stop(const chat_choice *ch, int32_t id) {
    const chat *c = ch->owner;
    const sampler_params *d = &c->model->defaults;
    for (int i = 0; i < d->n_stop_ids && !c->request.ignore_eos; i++)
        if (d->stop_ids[i] == id) return true;
    for (int i = 0; i < c->request.n_stop_ids; i++)
        if (c->request.stop_ids[i] == id) return true;
    return false;
}

void parser_token(chat_choice *ch, int32_t id) {
    chat_parser *p = ch->parser;
    ch->usage.completion_tokens++;
    ch->usage.reasoning_tokens += p->thinking;
    if (id == ch->owner->model->think_end) p->thinking = false;
    if (is_stop(ch, id)) { /* ends the answer and is not part of it */
        ch->stop_id = id;
        return;
    }
    reply_push(&p->r, id);
}

void parser_end(chat_choice *ch) {
    chat_parser *p = ch->parser;
    reply_end(&p->r);
    parser_flush(ch);
}

void parser_finish(chat_choice *ch) { tell(ch, EVENT_FINISH, (str){ "", 0 }); }

bool parser_was_cut(const chat_choice *ch) { return ch->parser->r.cut; }

int parser_stop(const chat_choice *ch) { return ch->parser->r.stop; }

void parser_free(chat_choice *ch) {
    if (!ch->parser) return;
    reply_free(&ch->parser->r);
    buf_free(&ch->parser->gathered);
    free(ch->parser);
}
