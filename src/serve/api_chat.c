/* POST /v1/chat/completions. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/api.h"
#include "serve/sse.h"

/* ---- reading ---- */

static const char *const known[] = { "model",
                                     "messages",
                                     "stream",
                                     "stream_options",
                                     "max_tokens",
                                     "max_completion_tokens",
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
                                     "stop",
                                     "stop_token_ids",
                                     "ignore_eos",
                                     "min_tokens",
                                     "logprobs",
                                     "top_logprobs",
                                     "tools",
                                     "tool_choice",
                                     "parallel_tool_calls",
                                     "response_format",
                                     "chat_template_kwargs",
                                     "reasoning_effort",
                                     "separate_reasoning",
                                     "return_token_ids",
                                     "continue_final_message",
                                     "add_generation_prompt",
                                     "priority",
                                     "modalities",
                                     "verbosity",
                                     "service_tier",
                                     "store",
                                     "user",
                                     "metadata",
                                     "safety_identifier",
                                     "prompt_cache_key",
                                     "prompt_cache_retention",
                                     "prompt_cache_options",
                                     "functions",
                                     "function_call",
                                     "audio",
                                     "prediction",
                                     "web_search_options",
                                     "moderation",
                                     NULL };
static const char *const unserved[] = { "functions",          "function_call", "audio", "prediction",
                                        "web_search_options", "moderation",    NULL };

bool api_refuse(const json *body, const char *const *names, fault *f) {
    for (; *names; names++)
        if (body_get(body, *names)) return fault_field(f, *names, "%s is not supported by this server", *names);
    return true;
}

bool api_check_indifferent(const json *body, fault *f) {
    static const char *const texts[] = { "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention" };
    const json *options = NULL, *cache = NULL;
    bool padded = false;
    str unused;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        if (!body_str(body, texts[i], &unused, f)) return false;
    if (!body_object(body, "prompt_cache_options", &cache, f) || !body_object(body, "stream_options", &options, f))
        return false;
    if (options && !body_bool(options, "include_obfuscation", &padded, f))
        return snprintf(f->param, sizeof f->param, "stream_options"), false;
    return !padded || fault_field(f, "stream_options", "stream_options.include_obfuscation: nothing is padded here");
}

static bool read_stream_options(chat_request *r, const json *body, fault *f) {
    const json *v = NULL;
    if (!body_object(body, "stream_options", &v, f)) return false;
    if (!v) return true;
    if (!r->stream) return fault_field(f, "stream_options", "stream_options is allowed only with stream: true");
    return (body_bool(v, "include_usage", &r->include_usage, f) &&
            body_bool(v, "continuous_usage_stats", &r->continuous_usage, f)) ||
           (snprintf(f->param, sizeof f->param, "stream_options"), false);
}

bool api_read_common(chat *c, const json *body, int least_tokens, fault *f) {
    chat_request *r = &c->request;
    return chat_check_model(c, body, f) && api_check_indifferent(body, f) && body_bool(body, "stream", &r->stream, f) &&
           read_stream_options(r, body, f) && body_int(body, "n", 1, c->model->max_choices, &r->n, f) &&
           body_int(body, "max_tokens", least_tokens, INT32_MAX, &r->max_tokens, f) &&
           body_int(body, "priority", -1000, 1000, &r->priority, f) &&
           body_bool(body, "return_token_ids", &r->return_token_ids, f) &&
           chat_read_sampling(r, body, c->model->g->n.real_vocab, f);
}

static bool read_logprobs(chat_request *r, const json *body, fault *f) {
    if (!body_bool(body, "logprobs", &r->logprobs, f) ||
        !body_int(body, "top_logprobs", 0, CHAT_MAX_TOP_LOGPROBS, &r->top_logprobs, f))
        return false;
    if (r->top_logprobs > 0 && !r->logprobs) return fault_field(f, "top_logprobs", "top_logprobs needs logprobs: true");
    return true;
}

bool api_has_tool(const chat_request *r, str name) {
    for (uint32_t i = 0; r->tools && i < r->tools->n; i++)
        if (str_eq(json_str(json_get(json_get(&r->tools->u.items[i], "function"), "name")), name)) return true;
    return false;
}

static bool read_tool_choice(chat_request *r, const json *body, fault *f) {
    const json *v = body_get(body, "tool_choice");
    if (!v) return true;
    if (v->type == JSON_STRING) {
        const str s = json_str(v);
        if (str_is(s, "none"))
            r->tool_choice = TOOLS_NONE;
        else if (str_is(s, "required"))
            r->tool_choice = TOOLS_REQUIRED;
        else if (!str_is(s, "auto"))
            return fault_field(f, "tool_choice", "tool_choice must be none, auto, required or a function");
    } else {
        const json *name = json_get(json_get(v, "function"), "name"), *type = json_get(v, "type");
        if (!json_is(type, JSON_STRING) || !str_is(json_str(type), "function") || !json_is(name, JSON_STRING))
            return fault_field(f, "tool_choice", "tool_choice must be none, auto, required or a function");
        r->tool_choice = TOOLS_NAMED;
        r->tool_name = json_str(name);
        if (api_has_tool(r, r->tool_name)) return true;
        return fault_field(f, "tool_choice", "tool_choice names a function that is not among the tools");
    }
    if (r->tool_choice == TOOLS_REQUIRED && !r->tools)
        return fault_field(f, "tool_choice", "tool_choice required needs tools");
    return true;
}

static bool read_tools(chat_request *r, const json *body, fault *f) {
    const json *v = NULL;
    return body_array(body, "tools", &v, f) && (!v || chat_set_tools(r, v, "tools", f)) &&
           read_tool_choice(r, body, f) && body_bool(body, "parallel_tool_calls", &r->parallel_tool_calls, f);
}

static bool read_format(chat_request *r, const json *body, fault *f) {
    const json *v = NULL;
    str type = { 0 };
    if (!body_object(body, "response_format", &v, f)) return false;
    if (!v) return true;
    if (!body_str(v, "type", &type, f)) return false;
    if (str_is(type, "text")) return true;
    if (str_is(type, "json_object")) { /* some servers' form of json_schema has the schema here */
        r->format = body_get(v, "schema") ? FORMAT_JSON_SCHEMA : FORMAT_JSON_OBJECT;
        return body_object(v, "schema", &r->schema, f) ||
               (snprintf(f->param, sizeof f->param, "response_format.schema"), false);
    }
    if (!str_is(type, "json_schema"))
        return fault_field(f, "response_format", "response_format.type must be text, json_object or json_schema");
    const json *schema = json_get(json_get(v, "json_schema"), "schema");
    if (!json_is(schema, JSON_OBJECT))
        return fault_field(f, "response_format.json_schema.schema",
                           "response_format.json_schema.schema must be an object");
    r->format = FORMAT_JSON_SCHEMA;
    r->schema = schema;
    return true;
}

/* Values that ask for nothing special pass, others are refused. */
static bool read_indifferent(const json *body, fault *f) {
    str s = STR("auto");
    bool store = false;
    const json *v = NULL, *metadata = NULL;
    if (!body_array(body, "modalities", &v, f) || !body_bool(body, "store", &store, f) ||
        !body_object(body, "metadata", &metadata, f) || !body_str(body, "service_tier", &s, f))
        return false;
    for (uint32_t i = 0; v && i < v->n; i++)
        if (!json_is(&v->u.items[i], JSON_STRING) || !str_is(json_str(&v->u.items[i]), "text"))
            return fault_field(f, "modalities", "modalities: only text is served");
    if (store) return fault_field(f, "store", "store: nothing is stored by this server");
    if (!str_is(s, "auto") && !str_is(s, "default"))
        return fault_field(f, "service_tier", "service_tier: there is one tier (auto or default)");
    s = STR("medium");
    if (!body_str(body, "verbosity", &s, f)) return false;
    if (!str_is(s, "medium"))
        return fault_field(f, "verbosity", "verbosity: only medium (this model has no such switch)");
    return true;
}

bool api_set_effort(chat_request *r, str effort, const char *param, fault *f) {
    static const char *const levels[] = { "none", "minimal", "low", "medium", "high", "xhigh", "max" };
    for (size_t i = 0; i < ARRAY_LEN(levels); i++) {
        if (!str_is(effort, levels[i])) continue;
        if (i == 0) r->thinking = 0;
        r->reasoning_effort = effort;
        return true;
    }
    return fault_field(f, param, "%s must be none, minimal, low, medium, high, xhigh or max", param);
}

static bool read_effort(chat_request *r, const json *body, fault *f) {
    str s = { 0 };
    return body_str(body, "reasoning_effort", &s, f) && (s.n == 0 || api_set_effort(r, s, "reasoning_effort", f));
}

static bool parse(chat *c, const json *body, fault *f) {
    chat_request *r = &c->request;
    const json *messages = body_get(body, "messages");
    chat_ignored(c, body, known);
    if (!api_refuse(body, unserved, f) || !api_read_common(c, body, 1, f) ||
        !body_int(body, "max_completion_tokens", 1, INT32_MAX, &r->max_tokens, f) || !read_logprobs(r, body, f) ||
        !read_tools(r, body, f) || !read_format(r, body, f) || !read_indifferent(body, f) || !read_effort(r, body, f) ||
        !body_object(body, "chat_template_kwargs", &r->template_args, f) ||
        !body_bool(body, "separate_reasoning", &r->separate_reasoning, f) ||
        !body_bool(body, "continue_final_message", &r->continue_final, f) ||
        !body_bool(body, "add_generation_prompt", &r->generation_prompt, f))
        return false;
    if (!messages) return fault_field(f, "messages", "messages is missing");
    return chat_set_messages(r, messages, "messages", f);
}

/* ---- writing ---- */

static void write_head(buf *b, const chat *c, const char *object) {
    buf_printf(b, "{\"id\":\"chatcmpl-%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", c->id, object,
               (long long)c->created);
    json_write_str(b, str_of(c->model->name));
}

static void write_stop_reason(buf *b, const chat_choice *ch) {
    buf_puts(b, ",\"stop_reason\":");
    if (ch->stop_index >= 0)
        json_write_str(b, str_of(ch->owner->request.stops[ch->stop_index]));
    else if (ch->finish == CHAT_DEADLINE)
        buf_puts(b, "\"deadline\"");
    else
        buf_puts(b, "null");
}

static void write_reasoning(buf *b, str text) {
    buf_puts(b, "\"reasoning_content\":");
    json_write_str(b, text);
    buf_puts(b, ",\"reasoning\":");
    json_write_str(b, text);
}

static void write_calls(buf *b, const chat_choice *ch) {
    buf_puts(b, ",\"tool_calls\":[");
    for (int i = 0; i < ch->n_calls; i++) {
        const chat_call *call = &ch->calls[i];
        buf_printf(b, "%s{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", i ? "," : "", call->id);
        json_write_str(b, str_of(call->name));
        buf_puts(b, ",\"arguments\":");
        json_write_str(b, buf_view(&call->arguments));
        buf_puts(b, "}}");
    }
    buf_byte(b, ']');
}

static void write_choice(buf *b, const chat_choice *ch) {
    const chat_request *r = &ch->owner->request;
    buf_printf(b, "{\"index\":%d,\"message\":{\"role\":\"assistant\",\"content\":", ch->index);
    if (ch->text.n == 0 && (ch->n_calls || ch->reasoning.n))
        buf_puts(b, "null");
    else
        json_write_str(b, buf_view(&ch->text));
    buf_puts(b, ",\"refusal\":null");
    if (ch->reasoning.n) {
        buf_byte(b, ',');
        write_reasoning(b, buf_view(&ch->reasoning));
    }
    if (ch->n_calls) write_calls(b, ch);
    buf_puts(b, "},\"logprobs\":");
    if (r->logprobs) {
        buf_puts(b, "{\"content\":[");
        chat_write_logprobs(b, ch, 0, ch->n_tokens);
        buf_puts(b, "],\"refusal\":null}");
    } else {
        buf_puts(b, "null");
    }
    buf_printf(b, ",\"finish_reason\":\"%s\"", chat_finish_word(ch->finish));
    write_stop_reason(b, ch);
    if (r->return_token_ids) {
        buf_puts(b, ",\"token_ids\":[");
        chat_write_ids(b, ch, 0, ch->n_tokens);
        buf_byte(b, ']');
    }
    buf_byte(b, '}');
}

static void write_prompt_ids(buf *b, const chat *c) {
    buf_puts(b, ",\"prompt_token_ids\":[");
    for (size_t i = 0; i < c->prompt.n; i++) buf_printf(b, "%s%d", i ? "," : "", c->prompt.v[i]);
    buf_byte(b, ']');
}

static void reply_whole(chat *c) {
    buf b = { 0 };
    const chat_usage u = chat_total_usage(c);
    write_head(&b, c, "chat.completion");
    buf_puts(&b, ",\"choices\":[");
    for (int i = 0; i < c->request.n; i++) {
        if (i) buf_byte(&b, ',');
        write_choice(&b, &c->choices[i]);
    }
    buf_puts(&b, "],\"usage\":");
    chat_write_usage(&b, &u);
    if (c->request.return_token_ids) write_prompt_ids(&b, c);
    buf_puts(&b, ",\"service_tier\":\"default\",\"system_fingerprint\":null}");
    chat_reply_headers(c);
    http_reply_json(c->call, 200, &b);
    buf_free(&b);
}

/* ---- streaming ---- */

static void begin_chunk(buf *b, const chat *c, const chat_choice *ch) {
    write_head(b, c, "chat.completion.chunk");
    buf_printf(b, ",\"choices\":[{\"index\":%d,\"delta\":{", ch->index);
}

static void end_chunk(buf *b, chat *c, const chat_choice *ch, const chat_event *ev) {
    const chat_request *r = &c->request;
    buf_puts(b, "},\"logprobs\":");
    if (r->logprobs && ev && ev->n_tokens) {
        buf_puts(b, "{\"content\":[");
        chat_write_logprobs(b, ch, ev->first_token, ev->n_tokens);
        buf_puts(b, "],\"refusal\":null}");
    } else {
        buf_puts(b, "null");
    }
    if (ch->finish == CHAT_OPEN || !ev || ev->kind != EVENT_FINISH) {
        buf_puts(b, ",\"finish_reason\":null");
    } else {
        buf_printf(b, ",\"finish_reason\":\"%s\"", chat_finish_word(ch->finish));
        write_stop_reason(b, ch);
    }
    if (r->return_token_ids && ev) {
        buf_puts(b, ",\"token_ids\":[");
        chat_write_ids(b, ch, ev->first_token, ev->n_tokens);
        buf_byte(b, ']');
    }
    buf_puts(b, "}]");
    if (r->return_token_ids && !ev) write_prompt_ids(b, c);
    if (r->continuous_usage) {
        const chat_usage u = chat_total_usage(c);
        buf_puts(b, ",\"usage\":");
        chat_write_usage(b, &u);
    } else if (r->include_usage) {
        buf_puts(b, ",\"usage\":null");
    }
    buf_byte(b, '}');
    sse_event(c->call, NULL, buf_view(b));
}

static void start(chat *c) {
    if (!c->request.stream) return;
    chat_reply_headers(c);
    sse_open(c->call);
    c->streaming = true;
    for (int i = 0; i < c->request.n; i++) {
        buf b = { 0 };
        begin_chunk(&b, c, &c->choices[i]);
        buf_puts(&b, "\"role\":\"assistant\",\"content\":\"\"");
        end_chunk(&b, c, &c->choices[i], NULL);
        buf_free(&b);
    }
}

static void event(chat *c, const chat_event *ev) {
    const chat_choice *ch = ev->choice;
    buf b = { 0 };
    if (ev->kind == EVENT_CALL_END) return;
    begin_chunk(&b, c, ch);
    switch (ev->kind) {
    case EVENT_TEXT:
        buf_puts(&b, "\"content\":");
        json_write_str(&b, ev->text);
        break;
    case EVENT_REASONING: write_reasoning(&b, ev->text); break;
    case EVENT_CALL_BEGIN:
        buf_printf(&b, "\"tool_calls\":[{\"index\":%d,\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":",
                   ev->call, ch->calls[ev->call].id);
        json_write_str(&b, str_of(ch->calls[ev->call].name));
        buf_puts(&b, ",\"arguments\":\"\"}}]");
        break;
    case EVENT_CALL_ARGS:
        buf_printf(&b, "\"tool_calls\":[{\"index\":%d,\"function\":{\"arguments\":", ev->call);
        json_write_str(&b, ev->text);
        buf_puts(&b, "}}]");
        break;
    case EVENT_PROMPT:
    case EVENT_CALL_END:
    case EVENT_FINISH: break;
    }
    end_chunk(&b, c, ch, ev);
    buf_free(&b);
}

static void finish(chat *c) {
    if (!c->streaming) {
        reply_whole(c);
        return;
    }
    if (c->request.include_usage) {
        buf b = { 0 };
        const chat_usage u = chat_total_usage(c);
        write_head(&b, c, "chat.completion.chunk");
        buf_puts(&b, ",\"choices\":[],\"usage\":");
        chat_write_usage(&b, &u);
        buf_byte(&b, '}');
        sse_event(c->call, NULL, buf_view(&b));
        buf_free(&b);
    }
    sse_done(c->call);
    sse_close(c->call);
}

const chat_dialect api_chat = {
    .path = "/v1/chat/completions", .parse = parse, .start = start, .event = event, .finish = finish
};

/* ---- POST /render: what the model would see ---- */

static void render_start(chat *c) {
    buf b = { 0 };
    buf_puts(&b, "{\"prompt\":");
    json_write_str(&b, buf_view(&c->rendered));
    write_prompt_ids(&b, c);
    buf_printf(&b, ",\"prompt_tokens\":%d,\"thinking\":%s}", c->prompt_tokens, c->thinks ? "true" : "false");
    chat_reply_headers(c);
    http_reply_json(c->call, 200, &b);
    buf_free(&b);
}

const chat_dialect api_render = { .path = "/render", .parse = parse, .start = render_start, .count_only = true };
