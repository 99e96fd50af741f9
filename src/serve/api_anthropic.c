/* POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect. */
#include <stdlib.h>
#include <string.h>

#include "serve/api.h"
#include "serve/convert.h"
#include "serve/sse.h"

/* Clients keep it beside a thought and send it back; nothing here needs it. */
static const char SIGNATURE[] = "nibble";

typedef enum block_kind { BLOCK_NONE, BLOCK_THINKING, BLOCK_TEXT, BLOCK_TOOL } block_kind;
typedef struct state {
    block_kind open; /* the stream's open block */
    int index;       /* of it, or of the next one */
    bool omit_thinking;
} state;

/* ---- reading ---- */

static const char *const known[] = { "model",
                                     "messages",
                                     "system",
                                     "max_tokens",
                                     "stream",
                                     "temperature",
                                     "top_p",
                                     "top_k",
                                     "min_p",
                                     "stop_sequences",
                                     "tools",
                                     "tool_choice",
                                     "thinking",
                                     "metadata",
                                     "service_tier",
                                     "output_config",
                                     "output_format",
                                     "seed",
                                     "presence_penalty",
                                     "frequency_penalty",
                                     "repetition_penalty",
                                     "logit_bias",
                                     "ignore_eos",
                                     "stop_token_ids",
                                     "min_tokens",
                                     "cache_control",
                                     "container",
                                     "mcp_servers",
                                     "context_management",
                                     "inference_geo",
                                     "chat_template_kwargs",
                                     "priority",
                                     "speed",
                                     "diagnostics",
                                     "user_profile_id",
                                     "workspace_id",
                                     NULL };
static const char *const unserved[] = { "container", "mcp_servers", "context_management", NULL };

/* Text to the request's arena as JSON; faults that the text is too deep. */
static const json *keep(chat *c, buf *text, const char *param, fault *f) {
    const json *v = chat_json(&c->mem, text);
    if (!v) fault_field(f, param, "%s: nested too deeply or too large", param);
    return v;
}

static bool read_messages(chat *c, const json *body, fault *f) {
    buf text = { 0 };
    const json *v = NULL;
    bool ok = anthropic_messages(&text, body, &c->request.continue_final, f) &&
              (v = keep(c, &text, "messages", f)) != NULL && chat_set_messages(&c->request, v, "messages", f);
    buf_free(&text);
    return ok;
}

static bool read_tools(chat *c, const json *body, fault *f) {
    buf text = { 0 };
    const json *tools = NULL, *v = NULL;
    if (!body_array(body, "tools", &tools, f)) return false;
    if (!tools) return true;
    const bool ok = anthropic_tools(&text, tools, f) && (v = keep(c, &text, "tools", f)) != NULL &&
                    chat_set_tools(&c->request, v, "tools", f);
    buf_free(&text);
    return ok;
}

static bool read_tool_choice(chat_request *r, const json *body, fault *f) {
    const json *v = NULL;
    str type = { 0 };
    bool alone = false;
    if (!body_object(body, "tool_choice", &v, f)) return false;
    if (!v) return true;
    if (!body_str(v, "type", &type, f) || !body_bool(v, "disable_parallel_tool_use", &alone, f)) return false;
    r->parallel_tool_calls = !alone;
    if (str_is(type, "none")) return r->tool_choice = TOOLS_NONE, true;
    if (str_is(type, "auto")) return true;
    if (str_is(type, "any"))
        r->tool_choice = TOOLS_REQUIRED;
    else if (str_is(type, "tool"))
        r->tool_choice = TOOLS_NAMED;
    else
        return fault_field(f, "tool_choice", "tool_choice.type must be auto, any, tool or none");
    if (!r->tools) return fault_field(f, "tool_choice", "tool_choice needs tools");
    if (r->tool_choice == TOOLS_REQUIRED) return true;
    if (!convert_str(v, "name", "tool_choice", &r->tool_name, f)) return false;
    return api_has_tool(r, r->tool_name) ||
           fault_field(f, "tool_choice", "tool_choice names a tool that is not among the tools");
}

/* Without the field there is no thinking, which is what clients of this API expect. */
static bool read_thinking(chat *c, state *s, const json *body, fault *f) {
    const json *v = NULL;
    str type = { 0 }, display = { 0 };
    int budget = 0;
    if (!body_object(body, "thinking", &v, f)) return false;
    c->request.thinking = 0;
    if (!v) return true;
    if (!body_str(v, "type", &type, f) || !body_str(v, "display", &display, f) ||
        !body_int(v, "budget_tokens", 1, INT32_MAX, &budget, f))
        return false;
    const bool on = str_is(type, "enabled") || str_is(type, "adaptive") || str_is(type, "between_tools");
    if (!on && !str_is(type, "disabled"))
        return fault_field(f, "thinking", "thinking.type must be enabled, adaptive, between_tools or disabled");
    c->request.thinking = on;
    s->omit_thinking = str_is(display, "omitted");
    return true;
}

static bool read_format(chat_request *r, const json *v, fault *f) {
    str type = { 0 };
    if (!v) return true;
    if (!body_str(v, "type", &type, f)) return false;
    if (!str_is(type, "json_schema")) return fault_field(f, "output_config", "format.type must be json_schema");
    r->schema = json_get(v, "schema");
    r->format = FORMAT_JSON_SCHEMA;
    return json_is(r->schema, JSON_OBJECT) || fault_field(f, "output_config", "format.schema must be an object");
}

static bool read_output(chat_request *r, const json *body, fault *f) {
    const json *config = NULL, *format = NULL;
    str effort = { 0 };
    if (!body_object(body, "output_config", &config, f) || !body_object(body, "output_format", &format, f))
        return false;
    if (config && (!body_object(config, "format", &format, f) || !body_str(config, "effort", &effort, f))) return false;
    if (effort.n && !api_set_effort(r, effort, "output_config.effort", f)) return false;
    return read_format(r, format, f);
}

static bool read_rest(chat *c, const json *body, fault *f) {
    const json *metadata = NULL;
    str tier = STR("auto"), speed = STR("standard");
    chat_request *r = &c->request;
    if (!body_object(body, "metadata", &metadata, f) || !body_str(body, "service_tier", &tier, f) ||
        !body_str(body, "speed", &speed, f) || !body_object(body, "chat_template_kwargs", &r->template_args, f) ||
        !body_int(body, "priority", -1000, 1000, &r->priority, f))
        return false;
    if (!str_is(tier, "auto") && !str_is(tier, "standard_only"))
        return fault_field(f, "service_tier", "service_tier must be auto or standard_only");
    return str_is(speed, "standard") || fault_field(f, "speed", "speed: there is one speed (standard)");
}

static bool parse_prompt(chat *c, const json *body, fault *f) {
    state *s = arena_take(&c->mem, 1, sizeof *s);
    if (!s) return fault_set(f, 503, NULL, "no memory for the request");
    *s = (state){ .open = BLOCK_NONE };
    c->own = s;
    chat_ignored(c, body, known);
    return api_refuse(body, unserved, f) && chat_check_model(c, body, f) && read_tools(c, body, f) &&
           read_tool_choice(&c->request, body, f) && read_thinking(c, s, body, f) &&
           read_output(&c->request, body, f) && read_rest(c, body, f) && read_messages(c, body, f);
}

static bool parse(chat *c, const json *body, fault *f) {
    chat_request *r = &c->request;
    if (!body_bool(body, "stream", &r->stream, f) || !body_int(body, "max_tokens", 1, INT32_MAX, &r->max_tokens, f) ||
        !chat_read_sampling(r, body, c->model->g->n.real_vocab, f) || !chat_read_stops(r, body, "stop_sequences", f))
        return false;
    if (!r->max_tokens) return fault_field(f, "max_tokens", "max_tokens is missing");
    return parse_prompt(c, body, f);
}

/* ---- writing ---- */

static void write_usage(buf *b, const chat_usage *u) {
    buf_printf(b,
               "{\"input_tokens\":%d,\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":%d,"
               "\"output_tokens\":%d,\"output_tokens_details\":{\"thinking_tokens\":%d}",
               u->prompt_tokens - u->cached_tokens, u->cached_tokens, u->completion_tokens, u->reasoning_tokens);
    api_write_speculative(b, u);
    buf_byte(b, '}');
}

/* "stop_reason":...,"stop_sequence":... */
static void write_stop(buf *b, const chat_choice *ch) {
    const char *reason = "end_turn";
    const bool sequence = ch->finish == CHAT_STOP && ch->stop_index >= 0;
    if (ch->finish == CHAT_CALLS)
        reason = "tool_use";
    else if (ch->finish == CHAT_LENGTH || ch->finish == CHAT_DEADLINE)
        reason = "max_tokens";
    else if (sequence)
        reason = "stop_sequence";
    buf_printf(b, "\"stop_reason\":\"%s\",\"stop_sequence\":", reason);
    if (sequence)
        json_write_str(b, str_of(ch->owner->request.stops[ch->stop_index]));
    else
        buf_puts(b, "null");
}

static void write_head(buf *b, const chat *c) {
    buf_printf(b, "{\"id\":\"msg_%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":", c->id);
    json_write_str(b, str_of(c->model->name));
}

static void write_tool(buf *b, const chat_call *call, str input) {
    buf_printf(b, "{\"type\":\"tool_use\",\"id\":\"toolu_%s\",\"name\":", call->id + strlen("call_"));
    json_write_str(b, str_of(call->name));
    buf_puts(b, ",\"input\":");
    buf_str(b, input);
    buf_byte(b, '}');
}

static void write_content(buf *b, const chat_choice *ch) {
    const state *s = ch->owner->own;
    const char *comma = "";
    if (ch->reasoning.n) {
        buf_puts(b, "{\"type\":\"thinking\",\"thinking\":");
        json_write_str(b, s->omit_thinking ? STR("") : buf_view(&ch->reasoning));
        buf_printf(b, ",\"signature\":\"%s\"}", SIGNATURE);
        comma = ",";
    }
    if (ch->text.n) {
        buf_printf(b, "%s{\"type\":\"text\",\"text\":", comma);
        json_write_str(b, buf_view(&ch->text));
        buf_byte(b, '}');
        comma = ",";
    }
    for (int i = 0; i < ch->n_calls; i++) {
        buf_puts(b, comma);
        write_tool(b, &ch->calls[i], buf_view(&ch->calls[i].arguments));
        comma = ",";
    }
}

static void reply_whole(chat *c) {
    const chat_choice *ch = &c->choices[0];
    buf b = { 0 };
    write_head(&b, c);
    buf_puts(&b, ",\"content\":[");
    write_content(&b, ch);
    buf_puts(&b, "],");
    write_stop(&b, ch);
    buf_puts(&b, ",\"usage\":");
    write_usage(&b, &ch->usage);
    buf_byte(&b, '}');
    chat_reply_headers(c);
    http_reply_json(c->call, 200, &b);
    buf_free(&b);
}

/* ---- streaming ---- */

static void send(chat *c, const char *name, buf *b) {
    sse_event(c->call, name, buf_view(b));
    buf_free(b);
}

static void start(chat *c) {
    if (!c->request.stream) return;
    const chat_usage u = { .prompt_tokens = c->prompt_tokens };
    buf b = { 0 };
    chat_reply_headers(c);
    sse_open(c->call);
    c->streaming = true;
    buf_puts(&b, "{\"type\":\"message_start\",\"message\":");
    write_head(&b, c);
    buf_puts(&b, ",\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
    write_usage(&b, &u);
    buf_puts(&b, "}}");
    send(c, "message_start", &b);
    buf_puts(&b, "{\"type\":\"ping\"}");
    send(c, "ping", &b);
}

static void send_delta(chat *c, const char *type, const char *field, str text) {
    buf b = { 0 };
    buf_printf(&b, "{\"type\":\"content_block_delta\",\"index\":%d,\"delta\":{\"type\":\"%s\",\"%s\":",
               ((state *)c->own)->index, type, field);
    json_write_str(&b, text);
    buf_puts(&b, "}}");
    send(c, "content_block_delta", &b);
}

static void close_block(chat *c) {
    state *s = c->own;
    buf b = { 0 };
    if (s->open == BLOCK_NONE) return;
    if (s->open == BLOCK_THINKING) send_delta(c, "signature_delta", "signature", str_of(SIGNATURE));
    buf_printf(&b, "{\"type\":\"content_block_stop\",\"index\":%d}", s->index);
    send(c, "content_block_stop", &b);
    s->open = BLOCK_NONE;
    s->index++;
}

static void begin_block(buf *b, chat *c, block_kind kind) {
    state *s = c->own;
    close_block(c);
    s->open = kind;
    buf_printf(b, "{\"type\":\"content_block_start\",\"index\":%d,\"content_block\":", s->index);
}

static void open_tool(chat *c, const chat_call *call) {
    buf b = { 0 };
    begin_block(&b, c, BLOCK_TOOL);
    write_tool(&b, call, STR("{}"));
    buf_byte(&b, '}');
    send(c, "content_block_start", &b);
}

static void open_block(chat *c, block_kind kind) {
    buf b = { 0 };
    if (((state *)c->own)->open == kind) return;
    begin_block(&b, c, kind);
    buf_puts(&b, kind == BLOCK_TEXT ? "{\"type\":\"text\",\"text\":\"\"}}"
                                    : "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}}");
    send(c, "content_block_start", &b);
}

static void event(chat *c, const chat_event *ev) {
    switch (ev->kind) {
    case EVENT_REASONING:
        open_block(c, BLOCK_THINKING);
        if (!((state *)c->own)->omit_thinking) send_delta(c, "thinking_delta", "thinking", ev->text);
        break;
    case EVENT_TEXT:
        open_block(c, BLOCK_TEXT);
        send_delta(c, "text_delta", "text", ev->text);
        break;
    case EVENT_PROMPT: break;
    case EVENT_CALL_BEGIN: open_tool(c, &ev->choice->calls[ev->call]); break;
    case EVENT_CALL_ARGS: send_delta(c, "input_json_delta", "partial_json", ev->text); break;
    case EVENT_CALL_END:
    case EVENT_FINISH: close_block(c); break;
    }
}

static void finish(chat *c) {
    if (!c->streaming) {
        reply_whole(c);
        return;
    }
    const chat_choice *ch = &c->choices[0];
    buf b = { 0 };
    close_block(c);
    buf_puts(&b, "{\"type\":\"message_delta\",\"delta\":{");
    write_stop(&b, ch);
    buf_puts(&b, "},\"usage\":");
    write_usage(&b, &ch->usage);
    buf_byte(&b, '}');
    send(c, "message_delta", &b);
    buf_puts(&b, "{\"type\":\"message_stop\"}");
    send(c, "message_stop", &b);
    sse_close(c->call);
}

/* ---- faults ---- */

static const char *error_type(int status) {
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 503: return "overloaded_error";
    default: return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

static void write_fault(buf *out, const fault *f) {
    buf_printf(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", error_type(f->status));
    json_write_str(out, str_of(f->message));
    buf_puts(out, "},\"request_id\":null}");
}

static void fail_stream(chat *c, const fault *f) {
    buf b = { 0 };
    write_fault(&b, f);
    send(c, "error", &b);
    sse_close(c->call);
}

const chat_dialect api_anthropic = { .path = "/v1/messages",
                                     .parse = parse,
                                     .start = start,
                                     .event = event,
                                     .finish = finish,
                                     .fail = fail_stream,
                                     .write_fault = write_fault };

/* ---- counting ---- */

static void count_start(chat *c) {
    buf b = { 0 };
    buf_printf(&b, "{\"input_tokens\":%d}", c->prompt_tokens);
    chat_reply_headers(c);
    http_reply_json(c->call, 200, &b);
    buf_free(&b);
}

const chat_dialect api_anthropic_count = { .path = "/v1/messages/count_tokens",
                                           .parse = parse_prompt,
                                           .start = count_start,
                                           .write_fault = write_fault,
                                           .count_only = true };
