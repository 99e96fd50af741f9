/* POST /v1/responses: OpenAI's newer dialect, without anything stored between requests. */
#include <stdlib.h>
#include <string.h>

#include "serve/api.h"
#include "serve/convert.h"
#include "serve/sse.h"

typedef enum item_kind { ITEM_REASONING, ITEM_MESSAGE, ITEM_CALL } item_kind;
typedef struct item { /* of the output */
    item_kind kind;
    int call;
    size_t from, n; /* of the choice's reasoning or text */
} item;
typedef struct state {
    const json *body;
    item *items;
    int n_items, cap_items;
    bool open; /* the last item still grows */
    int sequence;
} state;

/* ---- reading ---- */

static const char *const known[] = { "model",
                                     "input",
                                     "instructions",
                                     "stream",
                                     "stream_options",
                                     "max_output_tokens",
                                     "temperature",
                                     "top_p",
                                     "top_k",
                                     "min_p",
                                     "presence_penalty",
                                     "frequency_penalty",
                                     "repetition_penalty",
                                     "logit_bias",
                                     "seed",
                                     "stop",
                                     "stop_token_ids",
                                     "ignore_eos",
                                     "min_tokens",
                                     "tools",
                                     "tool_choice",
                                     "parallel_tool_calls",
                                     "reasoning",
                                     "text",
                                     "include",
                                     "store",
                                     "previous_response_id",
                                     "conversation",
                                     "background",
                                     "prompt",
                                     "truncation",
                                     "top_logprobs",
                                     "service_tier",
                                     "metadata",
                                     "user",
                                     "safety_identifier",
                                     "prompt_cache_key",
                                     "prompt_cache_retention",
                                     "prompt_cache_options",
                                     "background_options",
                                     "context_management",
                                     "access_programs",
                                     "moderation",
                                     "image",
                                     "max_tool_calls",
                                     "chat_template_kwargs",
                                     "priority",
                                     NULL };

static const char *const unserved[] = {
    "background_options", "context_management", "access_programs", "moderation", "image", NULL
};

static bool read_unstored(const json *body, fault *f) {
    static const char *const names[] = { "previous_response_id", "conversation", "prompt", NULL };
    bool store = false, background = false;
    for (const char *const *k = names; *k; k++)
        if (body_get(body, *k))
            return fault_field(f, *k, "%s: this server stores nothing between requests (send the items in input)", *k);
    if (!body_bool(body, "store", &store, f) || !body_bool(body, "background", &background, f)) return false;
    if (store) return fault_field(f, "store", "store: nothing is stored by this server");
    if (background) return fault_field(f, "background", "background: only answers that are waited for are served");
    return true;
}

static bool read_indifferent(const json *body, fault *f) {
    str truncation = STR("disabled"), tier = STR("auto");
    const json *include = NULL, *metadata = NULL;
    int top_logprobs = 0, calls = 0;
    if (!body_str(body, "truncation", &truncation, f) || !body_str(body, "service_tier", &tier, f) ||
        !body_array(body, "include", &include, f) || !body_object(body, "metadata", &metadata, f) ||
        !api_check_indifferent(body, f) || !body_int(body, "top_logprobs", 0, 0, &top_logprobs, f) ||
        !body_int(body, "max_tool_calls", 1, INT32_MAX, &calls, f))
        return false;
    if (!str_is(truncation, "disabled"))
        return fault_field(f, "truncation", "truncation: only disabled (what is too long is refused, not cut)");
    if (!str_is(tier, "auto") && !str_is(tier, "default"))
        return fault_field(f, "service_tier", "service_tier: there is one tier (auto or default)");
    for (uint32_t i = 0; include && i < include->n; i++) {
        const json *v = &include->u.items[i];
        if (!json_is(v, JSON_STRING)) return fault_field(f, "include", "include must be a list of strings");
        if (str_is(json_str(v), "message.output_text.logprobs"))
            return fault_field(f, "include", "include: logprobs are served by /v1/chat/completions only");
    }
    return true;
}

static bool read_reasoning(chat_request *r, const json *body, fault *f) {
    const json *v = NULL;
    str effort = { 0 };
    return body_object(body, "reasoning", &v, f) && (!v || body_str(v, "effort", &effort, f)) &&
           (effort.n == 0 || api_set_effort(r, effort, "reasoning.effort", f));
}

static bool read_text(chat_request *r, const json *body, fault *f) {
    const json *text = NULL, *format = NULL;
    str type = STR("text"), verbosity = STR("medium");
    if (!body_object(body, "text", &text, f)) return false;
    if (!text) return true;
    if (!body_object(text, "format", &format, f) || !body_str(text, "verbosity", &verbosity, f)) return false;
    if (!str_is(verbosity, "medium"))
        return fault_field(f, "text.verbosity", "verbosity: only medium (this model has no such switch)");
    if (format && !body_str(format, "type", &type, f)) return false;
    if (str_is(type, "text")) return true;
    if (str_is(type, "json_object")) return r->format = FORMAT_JSON_OBJECT, true;
    if (!str_is(type, "json_schema"))
        return fault_field(f, "text.format", "text.format.type must be text, json_object or json_schema");
    r->format = FORMAT_JSON_SCHEMA;
    r->schema = json_get(format, "schema");
    return json_is(r->schema, JSON_OBJECT) || fault_field(f, "text.format", "text.format.schema must be an object");
}

static bool read_tool_choice(chat_request *r, const json *body, fault *f) {
    const json *v = body_get(body, "tool_choice");
    str type;
    if (!v) return true;
    if (v->type == JSON_STRING) {
        type = json_str(v);
        if (str_is(type, "none"))
            r->tool_choice = TOOLS_NONE;
        else if (str_is(type, "required"))
            r->tool_choice = TOOLS_REQUIRED;
        else if (!str_is(type, "auto"))
            return fault_field(f, "tool_choice", "tool_choice must be none, auto, required or a function");
        return r->tool_choice != TOOLS_REQUIRED || r->tools ||
               fault_field(f, "tool_choice", "tool_choice required needs tools");
    }
    if (!convert_str(v, "type", "tool_choice", &type, f)) return false;
    if (!str_is(type, "function"))
        return fault_field(f, "tool_choice", "tool_choice must be none, auto, required or a function");
    r->tool_choice = TOOLS_NAMED;
    return convert_str(v, "name", "tool_choice", &r->tool_name, f) &&
           (api_has_tool(r, r->tool_name) ||
            fault_field(f, "tool_choice", "tool_choice names a function that is not among the tools"));
}

/* Text of a converter to a tree in the request's arena. */
static const json *keep(chat *c, const buf *text, const char *param, fault *f) {
    const json *v = chat_json(&c->mem, text);
    if (!v) fault_field(f, param, "%s: nested too deeply or too large", param);
    return v;
}

static bool read_tools(chat *c, const json *body, fault *f) {
    chat_request *r = &c->request;
    const json *tools = NULL, *v = NULL;
    bool ok = body_array(body, "tools", &tools, f);
    if (ok && tools) {
        buf text = { 0 };
        ok = responses_tools(&text, tools, f) && (v = keep(c, &text, "tools", f)) != NULL &&
             chat_set_tools(r, v, "tools", f);
        buf_free(&text);
    }
    return ok && read_tool_choice(r, body, f) && body_bool(body, "parallel_tool_calls", &r->parallel_tool_calls, f);
}

static bool read_input(chat *c, const json *body, fault *f) {
    buf text = { 0 };
    const json *v = NULL;
    const bool ok = responses_messages(&text, body, f) && (v = keep(c, &text, "input", f)) != NULL &&
                    chat_set_messages(&c->request, v, "input", f);
    buf_free(&text);
    return ok;
}

static bool parse(chat *c, const json *body, fault *f) {
    chat_request *r = &c->request;
    state *s = xcalloc(1, sizeof *s);
    s->body = body;
    c->own = s;
    chat_ignored(c, body, known);
    return api_refuse(body, unserved, f) && read_unstored(body, f) && chat_check_model(c, body, f) &&
           body_bool(body, "stream", &r->stream, f) &&
           body_int(body, "max_output_tokens", 1, INT32_MAX, &r->max_tokens, f) &&
           body_int(body, "priority", -1000, 1000, &r->priority, f) &&
           body_object(body, "chat_template_kwargs", &r->template_args, f) &&
           chat_read_sampling(r, body, c->model->g->n.real_vocab, f) && read_indifferent(body, f) &&
           read_reasoning(r, body, f) && read_text(r, body, f) && read_tools(c, body, f) && read_input(c, body, f);
}

static void free_state(void *own) {
    state *s = own;
    free(s->items);
    free(s);
}

/* ---- writing: items ---- */

static item *add_item(state *s, item it) {
    if (s->n_items == s->cap_items) {
        s->cap_items = s->cap_items ? 2 * s->cap_items : 4;
        s->items = xrealloc(s->items, (size_t)s->cap_items * sizeof *s->items);
    }
    s->items[s->n_items] = it;
    return &s->items[s->n_items++];
}

static str text_of(const chat_choice *ch, const item *it) {
    const str whole = buf_view(it->kind == ITEM_REASONING ? &ch->reasoning : &ch->text);
    return (str){ whole.p + it->from, it->n };
}

static void write_item_id(buf *b, const chat *c, const item *it, int index) {
    static const char *const prefixes[] = { "rs", "msg", "fc" };
    buf_printf(b, "\"%s_%s%d\"", prefixes[it->kind], c->id, index);
}

static void write_part(buf *b, const item *it, str text) {
    buf_puts(b, it->kind == ITEM_REASONING ? "{\"type\":\"reasoning_text\",\"text\":"
                                           : "{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[],\"text\":");
    json_write_str(b, text);
    buf_byte(b, '}');
}

/* status: "in_progress" (nothing in it yet), "completed", "incomplete". */
static void write_item(buf *b, const chat *c, int index, const char *status) {
    const chat_choice *ch = &c->choices[0];
    const item *it = &((state *)c->own)->items[index];
    const bool begun = strcmp(status, "in_progress") == 0;
    buf_puts(b, "{\"id\":");
    write_item_id(b, c, it, index);
    if (it->kind == ITEM_CALL) {
        const chat_call *call = &ch->calls[it->call];
        buf_printf(b, ",\"type\":\"function_call\",\"status\":\"%s\",\"call_id\":\"%s\",\"name\":", status, call->id);
        json_write_str(b, str_of(call->name));
        buf_puts(b, ",\"arguments\":");
        json_write_str(b, begun ? STR("") : buf_view(&call->arguments));
        buf_byte(b, '}');
        return;
    }
    buf_puts(b, it->kind == ITEM_REASONING ? ",\"type\":\"reasoning\",\"summary\":[]"
                                           : ",\"type\":\"message\",\"role\":\"assistant\"");
    buf_printf(b, ",\"status\":\"%s\",\"content\":[", status);
    if (!begun) write_part(b, it, text_of(ch, it));
    buf_puts(b, "]}");
}

/* ---- writing: the response ---- */

/* A member of the request as it was sent, or what stands for its absence. */
static void echo(buf *b, const chat *c, const char *name, const char *absent) {
    const json *v = body_get(((state *)c->own)->body, name);
    buf_printf(b, ",\"%s\":", name);
    if (v)
        json_write(b, v);
    else
        buf_puts(b, absent);
}

static void write_usage(buf *b, const chat_usage *u) {
    buf_printf(b,
               "{\"input_tokens\":%d,\"input_tokens_details\":{\"cached_tokens\":%d},\"output_tokens\":%d,"
               "\"output_tokens_details\":{\"reasoning_tokens\":%d},\"total_tokens\":%d",
               u->prompt_tokens, u->cached_tokens, u->completion_tokens, u->reasoning_tokens,
               u->prompt_tokens + u->completion_tokens);
    api_write_speculative(b, u);
    buf_byte(b, '}');
}

static bool was_cut(const chat_choice *ch) { return ch->finish == CHAT_LENGTH || ch->finish == CHAT_DEADLINE; }

static void write_output(buf *b, const chat *c) {
    const state *s = c->own;
    buf_puts(b, ",\"output\":[");
    for (int i = 0; i < s->n_items; i++) {
        if (i) buf_byte(b, ',');
        write_item(b, c, i, i + 1 == s->n_items && was_cut(&c->choices[0]) ? "incomplete" : "completed");
    }
    buf_byte(b, ']');
}

/* status: "in_progress", "failed" (with f), "completed", "incomplete". */
static void write_response(buf *b, const chat *c, const char *status, const fault *f) {
    const sampler_params *p = &c->request.sampling;
    const bool ended = c->choices && c->choices[0].finish != CHAT_OPEN && !f;
    buf_printf(b, "{\"id\":\"resp_%s\",\"object\":\"response\",\"created_at\":%lld,\"status\":\"%s\",\"model\":", c->id,
               (long long)c->created, status);
    json_write_str(b, str_of(c->model->name));
    buf_puts(b, ",\"background\":false,\"store\":false,\"previous_response_id\":null,\"truncation\":\"disabled\"");
    buf_printf(b, ",\"parallel_tool_calls\":%s", c->request.parallel_tool_calls ? "true" : "false");
    echo(b, c, "instructions", "null");
    echo(b, c, "max_output_tokens", "null");
    echo(b, c, "metadata", "{}");
    echo(b, c, "reasoning", "{\"effort\":null,\"summary\":null}");
    echo(b, c, "text", "{\"format\":{\"type\":\"text\"}}");
    echo(b, c, "tool_choice", "\"auto\"");
    echo(b, c, "tools", "[]");
    echo(b, c, "user", "null");
    buf_puts(b, ",\"temperature\":");
    json_write_double(b, p->temperature);
    buf_puts(b, ",\"top_p\":");
    json_write_double(b, p->top_p);
    buf_puts(b, ",\"service_tier\":\"default\",\"error\":");
    if (f) {
        buf_printf(b, "{\"code\":\"server_error\",\"message\":");
        json_write_str(b, str_of(f->message));
        buf_byte(b, '}');
    } else {
        buf_puts(b, "null");
    }
    buf_printf(b, ",\"incomplete_details\":%s",
               ended && was_cut(&c->choices[0]) ? "{\"reason\":\"max_output_tokens\"}" : "null");
    if (ended) {
        write_output(b, c);
        buf_puts(b, ",\"usage\":");
        write_usage(b, &c->choices[0].usage);
    } else {
        buf_puts(b, ",\"output\":[],\"usage\":null");
    }
    buf_byte(b, '}');
}

static const char *status_of(const chat_choice *ch) { return was_cut(ch) ? "incomplete" : "completed"; }

static void reply_whole(chat *c) {
    const chat_choice *ch = &c->choices[0];
    state *s = c->own;
    buf b = { 0 };
    if (ch->reasoning.n) add_item(s, (item){ .kind = ITEM_REASONING, .n = ch->reasoning.n });
    if (ch->text.n) add_item(s, (item){ .kind = ITEM_MESSAGE, .n = ch->text.n });
    for (int i = 0; i < ch->n_calls; i++) add_item(s, (item){ .kind = ITEM_CALL, .call = i });
    write_response(&b, c, status_of(ch), NULL);
    chat_reply_headers(c);
    http_reply_json(c->call, 200, &b);
    buf_free(&b);
}

/* ---- streaming ---- */

/* {"type":name,"sequence_number":N; more members and the brace follow. */
static void begin(buf *b, chat *c, const char *name) {
    *b = (buf){ 0 };
    buf_printf(b, "{\"type\":\"%s\",\"sequence_number\":%d", name, ((state *)c->own)->sequence++);
}

static void send(chat *c, const char *name, buf *b) {
    buf_byte(b, '}');
    sse_event(c->call, name, buf_view(b));
    buf_free(b);
}

static void send_response(chat *c, const char *name, const char *status, const fault *f) {
    buf b;
    begin(&b, c, name);
    buf_puts(&b, ",\"response\":");
    write_response(&b, c, status, f);
    send(c, name, &b);
}

static void begin_in_item(buf *b, chat *c, const char *name) {
    const state *s = c->own;
    const item *it = &s->items[s->n_items - 1];
    begin(b, c, name);
    buf_puts(b, ",\"item_id\":");
    write_item_id(b, c, it, s->n_items - 1);
    buf_printf(b, ",\"output_index\":%d", s->n_items - 1);
    if (it->kind != ITEM_CALL) buf_puts(b, ",\"content_index\":0");
}

static void send_item(chat *c, const char *name, const char *status) {
    const state *s = c->own;
    buf b;
    begin(&b, c, name);
    buf_printf(&b, ",\"output_index\":%d,\"item\":", s->n_items - 1);
    write_item(&b, c, s->n_items - 1, status);
    send(c, name, &b);
}

static void send_part(chat *c, const char *name, str text) {
    const state *s = c->own;
    buf b;
    begin_in_item(&b, c, name);
    buf_puts(&b, ",\"part\":");
    write_part(&b, &s->items[s->n_items - 1], text);
    send(c, name, &b);
}

static const char *const delta_names[] = { "response.reasoning_text.delta", "response.output_text.delta",
                                           "response.function_call_arguments.delta" };
static const char *const done_names[] = { "response.reasoning_text.done", "response.output_text.done",
                                          "response.function_call_arguments.done" };

static void send_text(chat *c, const char *name, const char *field, str text) {
    const state *s = c->own;
    const item *it = &s->items[s->n_items - 1];
    buf b;
    begin_in_item(&b, c, name);
    if (it->kind == ITEM_MESSAGE) buf_puts(&b, ",\"logprobs\":[]");
    if (it->kind == ITEM_CALL && strcmp(field, "arguments") == 0) {
        buf_puts(&b, ",\"name\":");
        json_write_str(&b, str_of(c->choices[0].calls[it->call].name));
    }
    buf_printf(&b, ",\"%s\":", field);
    json_write_str(&b, text);
    send(c, name, &b);
}

static void close_item(chat *c, const char *status) {
    state *s = c->own;
    if (!s->open) return;
    const chat_choice *ch = &c->choices[0];
    const item *it = &s->items[s->n_items - 1];
    s->open = false;
    if (it->kind == ITEM_CALL) {
        send_text(c, done_names[it->kind], "arguments", buf_view(&ch->calls[it->call].arguments));
    } else {
        send_text(c, done_names[it->kind], "text", text_of(ch, it));
        send_part(c, "response.content_part.done", text_of(ch, it));
    }
    send_item(c, "response.output_item.done", status);
}

static void open_item(chat *c, item it) {
    state *s = c->own;
    if (s->open && it.kind != ITEM_CALL && s->items[s->n_items - 1].kind == it.kind) return;
    close_item(c, "completed");
    add_item(s, it);
    s->open = true;
    send_item(c, "response.output_item.added", "in_progress");
    if (it.kind != ITEM_CALL) send_part(c, "response.content_part.added", STR(""));
}

static void start(chat *c) {
    if (!c->request.stream) return;
    chat_reply_headers(c);
    sse_open(c->call);
    c->streaming = true;
    send_response(c, "response.created", "in_progress", NULL);
    send_response(c, "response.in_progress", "in_progress", NULL);
}

static void event(chat *c, const chat_event *ev) {
    state *s = c->own;
    const item_kind kind = ev->kind == EVENT_REASONING ? ITEM_REASONING : ITEM_MESSAGE;
    switch (ev->kind) {
    case EVENT_REASONING:
    case EVENT_TEXT: {
        /* several events may be told after the texts grew: an item begins where the one of its kind before it ended */
        size_t from = 0;
        for (int i = 0; i < s->n_items; i++)
            if (s->items[i].kind == kind) from = s->items[i].from + s->items[i].n;
        open_item(c, (item){ .kind = kind, .from = from });
        s->items[s->n_items - 1].n += ev->text.n;
        send_text(c, delta_names[kind], "delta", ev->text);
        break;
    }
    case EVENT_CALL_BEGIN: open_item(c, (item){ .kind = ITEM_CALL, .call = ev->call }); break;
    case EVENT_CALL_ARGS: send_text(c, delta_names[ITEM_CALL], "delta", ev->text); break;
    case EVENT_CALL_END: break; /* how it ended is known at the finish, or when another item follows */
    case EVENT_PROMPT: break;
    case EVENT_FINISH: close_item(c, status_of(ev->choice)); break;
    }
}

static void finish(chat *c) {
    if (!c->streaming) {
        reply_whole(c);
        return;
    }
    const chat_choice *ch = &c->choices[0];
    send_response(c, was_cut(ch) ? "response.incomplete" : "response.completed", status_of(ch), NULL);
    sse_close(c->call);
}

static void fail_stream(chat *c, const fault *f) {
    send_response(c, "response.failed", "failed", f);
    sse_close(c->call);
}

const chat_dialect api_responses = { .path = "/v1/responses",
                                     .parse = parse,
                                     .start = start,
                                     .event = event,
                                     .finish = finish,
                                     .fail = fail_stream,
                                     .free = free_state };
