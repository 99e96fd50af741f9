/* Messages and tools in OpenAI's form, checked and brought into the form that templates expect. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/chat.h"

enum { TREE_DEPTH = 512 };

const json *chat_json(arena *mem, const buf *text) {
    const json *v;
    err e = { 0 };
    const json_limits limits = { .max_depth = TREE_DEPTH, .allow_duplicates = true };
    return json_parse(&v, mem, buf_view(text), "request", &limits, &e) ? v : NULL;
}

str chat_copy(arena *mem, str s) {
    char *p = arena_copy(mem, s.p, s.n);
    CHECK(p, "no memory for %zu bytes of a request", s.n);
    return (str){ p, s.n };
}

/* ---- content ---- */

static bool is_media(str type) {
    static const char *const kinds[] = { "image_url", "input_image", "image", "input_audio", "audio_url",
                                         "video_url", "video",       "file",  "input_file" };
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (str_is(type, kinds[i])) return true;
    return false;
}

/* Append the text of a content value: a string, null, or a list of text parts. */
static bool add_content(buf *out, const json *v, const char *where, fault *f) {
    if (!v || v->type == JSON_NULL) return true;
    if (v->type == JSON_STRING) return buf_str(out, json_str(v)), true;
    if (v->type != JSON_ARRAY) return fault_field(f, where, "%s must be a string or a list of parts", where);
    for (uint32_t i = 0; i < v->n; i++) {
        const json *part = &v->u.items[i], *type = json_get(part, "type"), *text = json_get(part, "text");
        if (json_is(part, JSON_STRING)) {
            buf_str(out, json_str(part));
            continue;
        }
        if (!json_is(part, JSON_OBJECT) || !json_is(type, JSON_STRING))
            return fault_field(f, where, "%s[%u] must be an object with a type", where, i);
        if (is_media(json_str(type)))
            return fault_field(f, where, "%s[%u]: images, audio, video and files are not served (text only)", where, i);
        if (str_is(json_str(type), "refusal")) text = json_get(part, "refusal");
        if (!json_is(text, JSON_STRING))
            return fault_field(f, where, "%s[%u] must be a text part with a text", where, i);
        buf_str(out, json_str(text));
    }
    return true;
}

static void write_pair(buf *out, const char *key, str value) {
    buf_printf(out, ",\"%s\":", key);
    json_write_str(out, value);
}

/* ---- tool calls of an assistant ---- */

/* The arguments as an object: given as one, or as JSON text. */
static bool add_arguments(chat_request *r, buf *out, const json *v, const char *where, fault *f) {
    if (!v || v->type == JSON_NULL) return buf_puts(out, "{}"), true;
    if (v->type == JSON_STRING) {
        const str text = json_str(v);
        err e = { 0 };
        const json_limits limits = { .max_depth = 64, .allow_duplicates = true };
        size_t n = 0;
        while (n < text.n && strchr(" \t\r\n", text.p[n])) n++;
        if (n == text.n) return buf_puts(out, "{}"), true;
        if (!json_parse(&v, r->mem, text, where, &limits, &e)) return fault_field(f, where, "%s", e.msg);
    }
    if (v->type != JSON_OBJECT) return fault_field(f, where, "%s must be a JSON object", where);
    json_write(out, v);
    return true;
}

static bool add_calls(chat_request *r, buf *out, const json *calls, uint32_t at, fault *f) {
    char where[80];
    snprintf(where, sizeof where, "messages[%u].tool_calls", at);
    if (!json_is(calls, JSON_ARRAY)) return fault_field(f, where, "%s must be a list", where);
    if (calls->n == 0) return true;
    buf_puts(out, ",\"tool_calls\":[");
    for (uint32_t i = 0; i < calls->n; i++) {
        snprintf(where, sizeof where, "messages[%u].tool_calls[%u].function", at, i);
        const json *fn = json_get(&calls->u.items[i], "function"), *name = json_get(fn, "name"),
                   *id = json_get(&calls->u.items[i], "id");
        if (!json_is(name, JSON_STRING)) return fault_field(f, where, "%s.name must be a string", where);
        buf_printf(out, "%s{\"type\":\"function\"", i ? "," : "");
        if (json_is(id, JSON_STRING)) write_pair(out, "id", json_str(id));
        buf_puts(out, ",\"function\":{\"name\":");
        json_write_str(out, json_str(name));
        buf_puts(out, ",\"arguments\":");
        snprintf(where, sizeof where, "messages[%u].tool_calls[%u].function.arguments", at, i);
        if (!add_arguments(r, out, json_get(fn, "arguments"), where, f)) return false;
        buf_puts(out, "}}");
    }
    buf_byte(out, ']');
    return true;
}

/* ---- messages ---- */

/* What is wrong with a role, or NULL. */
static const char *const roles[] = { "user", "assistant", "tool" };

static bool add_message(chat_request *r, buf *out, const json *m, str role, uint32_t at, fault *f) {
    char where[80];
    buf text = { 0 };
    bool ok = false, known = false;
    snprintf(where, sizeof where, "messages[%u].role", at);
    for (size_t i = 0; i < ARRAY_LEN(roles); i++) known |= str_is(role, roles[i]);
    if (!known) return fault_field(f, where, "%s must be one of system, developer, user, assistant, tool", where);
    const bool assistant = str_is(role, "assistant");
    const json *content = body_get(m, "content"), *calls = body_get(m, "tool_calls"),
               *thought = body_get(m, "reasoning_content");
    if (!thought) thought = body_get(m, "reasoning");
    snprintf(where, sizeof where, "messages[%u].content", at);
    /* Clients send back what they got: an answer cut inside its thought, a tool without a result. */
    if (!content && str_is(role, "user")) return fault_field(f, where, "%s is missing", where);
    if (body_get(m, "function_call")) {
        snprintf(where, sizeof where, "messages[%u].function_call", at);
        return fault_field(f, where, "%s is not supported by this server (use tool_calls)", where);
    }
    if (!add_content(&text, content, where, f)) goto done;
    buf_puts(out, "{\"role\":");
    json_write_str(out, role);
    write_pair(out, "content", buf_view(&text));
    if (assistant && thought) {
        snprintf(where, sizeof where, "messages[%u].reasoning_content", at);
        if (!json_is(thought, JSON_STRING)) {
            fault_field(f, where, "%s must be a string", where);
            goto done;
        }
        write_pair(out, "reasoning_content", json_str(thought));
    }
    if (assistant && calls && !add_calls(r, out, calls, at, f)) goto done;
    static const char *const extra[] = { "name", "tool_call_id" };
    for (size_t i = 0; i < ARRAY_LEN(extra); i++) {
        const json *v = body_get(m, extra[i]);
        snprintf(where, sizeof where, "messages[%u].%s", at, extra[i]);
        if (v && v->type != JSON_STRING) {
            fault_field(f, where, "%s must be a string", where);
            goto done;
        }
        if (v) write_pair(out, extra[i], json_str(v));
    }
    buf_byte(out, '}');
    ok = true;
done:
    buf_free(&text);
    return ok;
}

static bool is_system(const json *m) {
    const json *role = json_get(m, "role");
    return json_is(role, JSON_STRING) && (str_is(json_str(role), "system") || str_is(json_str(role), "developer"));
}

/* All system and developer messages as one at the start: templates accept no other place. */
static bool add_system(buf *out, const json *messages, fault *f) {
    buf text = { 0 };
    bool any = false, ok = true;
    char where[48];
    for (uint32_t i = 0; ok && i < messages->n; i++) {
        const json *m = &messages->u.items[i], *content = body_get(m, "content");
        if (!is_system(m)) continue;
        snprintf(where, sizeof where, "messages[%u].content", i);
        if (any && text.n) buf_puts(&text, "\n\n");
        any = true;
        ok = content ? add_content(&text, content, where, f) : fault_field(f, where, "%s is missing", where);
    }
    if (ok && any) {
        buf_puts(out, "{\"role\":\"system\"");
        write_pair(out, "content", buf_view(&text));
        buf_byte(out, '}');
    }
    buf_free(&text);
    return ok;
}

bool chat_set_messages(chat_request *r, const json *messages, const char *param, fault *f) {
    if (!json_is(messages, JSON_ARRAY)) return fault_field(f, param, "%s must be a list of messages", param);
    if (messages->n == 0) return fault_field(f, param, "%s must not be empty", param);
    buf out = { 0 };
    buf_byte(&out, '[');
    for (uint32_t i = 0; i < messages->n; i++) {
        const json *role = json_get(&messages->u.items[i], "role");
        char where[48];
        snprintf(where, sizeof where, "messages[%u].role", i);
        if (!json_is(role, JSON_STRING)) {
            buf_free(&out);
            return fault_field(f, where, "%s must be a string", where);
        }
    }
    bool ok = add_system(&out, messages, f);
    for (uint32_t i = 0; ok && i < messages->n; i++) {
        const json *m = &messages->u.items[i];
        if (is_system(m)) continue;
        if (out.n > 1) buf_byte(&out, ',');
        ok = add_message(r, &out, m, json_str(json_get(m, "role")), i, f);
    }
    buf_byte(&out, ']');
    if (ok) r->messages = chat_json(r->mem, &out);
    buf_free(&out);
    return ok && (r->messages || fault_field(f, param, "%s are nested too deeply or too large", param));
}

/* ---- tools ---- */

static bool is_name(const json *v) {
    if (!json_is(v, JSON_STRING) || v->n == 0 || v->n > 128) return false;
    const str s = json_str(v);
    for (size_t i = 0; i < s.n; i++)
        if (s.p[i] <= ' ' || strchr("<>=/\"'", s.p[i])) return false;
    return true;
}

bool chat_set_tools(chat_request *r, const json *tools, const char *param, fault *f) {
    char where[80];
    if (!json_is(tools, JSON_ARRAY)) return fault_field(f, param, "%s must be a list", param);
    if (tools->n > 1024) return fault_field(f, param, "%s: at most 1024", param);
    for (uint32_t i = 0; i < tools->n; i++) {
        const json *t = &tools->u.items[i], *type = json_get(t, "type"), *fn = json_get(t, "function"),
                   *parameters = body_get(fn, "parameters");
        snprintf(where, sizeof where, "%s[%u].type", param, i);
        if (!json_is(type, JSON_STRING) || !str_is(json_str(type), "function"))
            return fault_field(f, where, "%s must be \"function\"", where);
        snprintf(where, sizeof where, "%s[%u].function.name", param, i);
        if (!is_name(json_get(fn, "name")))
            return fault_field(f, where, "%s must be a name of 1 to 128 characters", where);
        for (uint32_t k = 0; k < i; k++)
            if (str_eq(json_str(json_get(json_get(&tools->u.items[k], "function"), "name")),
                       json_str(json_get(fn, "name"))))
                return fault_field(f, where, "%s occurs twice", where);
        snprintf(where, sizeof where, "%s[%u].function.parameters", param, i);
        if (parameters && parameters->type != JSON_OBJECT) return fault_field(f, where, "%s must be an object", where);
    }
    r->tools = tools->n ? tools : NULL;
    return true;
}
