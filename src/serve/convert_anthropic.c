/* Anthropic's messages and tools in OpenAI's form. */
#include <stdio.h>

#include "serve/convert.h"

typedef struct turn { /* of the assistant, while its blocks are read; or texts of a user */
    buf text, thought, calls;
} turn;

static void turn_free(turn *t) {
    buf_free(&t->text);
    buf_free(&t->thought);
    buf_free(&t->calls);
}

static bool refuse_block(const char *where, str type, fault *f) {
    static const char *const media[] = { "image", "document", "container_upload" };
    for (size_t i = 0; i < ARRAY_LEN(media); i++)
        if (str_is(type, media[i]))
            return fault_field(f, where, "%s: images and documents are not served (text only)", where);
    return fault_field(f, where, "%s: blocks of type '" STR_FMT "' are not supported here", where,
                       (int)(type.n > 60 ? 60 : type.n), type.p);
}

/* A string, or a list of text blocks. */
static bool add_texts(buf *out, const json *v, const char *where, fault *f) {
    if (json_is(v, JSON_STRING)) return buf_str(out, json_str(v)), true;
    if (!json_is(v, JSON_ARRAY)) return fault_field(f, where, "%s must be a string or a list of text blocks", where);
    for (uint32_t i = 0; i < v->n; i++) {
        char at[128];
        str type, text;
        snprintf(at, sizeof at, "%s[%u]", where, i);
        if (!convert_str(&v->u.items[i], "type", at, &type, f)) return false;
        if (!str_is(type, "text")) return refuse_block(at, type, f);
        if (!convert_str(&v->u.items[i], "text", at, &text, f)) return false;
        convert_join(out, text);
    }
    return true;
}

/* ---- the user's side ---- */

static void flush_user(convert_out *o, turn *t) {
    if (!t->text.n) return;
    convert_begin(o, "user", buf_view(&t->text));
    buf_byte(o->out, '}');
    buf_clear(&t->text);
}

static bool tool_result(convert_out *o, const json *block, const char *where, fault *f) {
    const json *content = json_get(block, "content");
    buf text = { 0 };
    str id;
    char at[128];
    snprintf(at, sizeof at, "%s.content", where);
    bool ok = convert_str(block, "tool_use_id", where, &id, f);
    if (ok && content && content->type != JSON_NULL) ok = add_texts(&text, content, at, f);
    if (ok) {
        convert_begin(o, "tool", buf_view(&text));
        buf_puts(o->out, ",\"tool_call_id\":");
        json_write_str(o->out, id);
        buf_byte(o->out, '}');
    }
    buf_free(&text);
    return ok;
}

static bool user_block(convert_out *o, turn *t, const json *block, const char *where, fault *f) {
    str type, text;
    if (!convert_str(block, "type", where, &type, f)) return false;
    if (str_is(type, "tool_result")) {
        flush_user(o, t);
        return tool_result(o, block, where, f);
    }
    if (!str_is(type, "text")) return refuse_block(where, type, f);
    if (!convert_str(block, "text", where, &text, f)) return false;
    convert_join(&t->text, text);
    return true;
}

/* ---- the assistant's side ---- */

static bool tool_use(turn *t, const json *block, const char *where, fault *f) {
    const json *input = json_get(block, "input");
    str id, name;
    if (!convert_str(block, "id", where, &id, f) || !convert_str(block, "name", where, &name, f)) return false;
    if (input && input->type != JSON_OBJECT && input->type != JSON_NULL)
        return fault_field(f, where, "%s.input must be an object", where);
    buf_puts(&t->calls, t->calls.n ? ",{\"id\":" : "{\"id\":");
    json_write_str(&t->calls, id);
    buf_puts(&t->calls, ",\"type\":\"function\",\"function\":{\"name\":");
    json_write_str(&t->calls, name);
    buf_puts(&t->calls, ",\"arguments\":");
    if (json_is(input, JSON_OBJECT))
        json_write(&t->calls, input);
    else
        buf_puts(&t->calls, "{}");
    buf_puts(&t->calls, "}}");
    return true;
}

static bool assistant_block(turn *t, const json *block, const char *where, fault *f) {
    str type, text;
    if (!convert_str(block, "type", where, &type, f)) return false;
    if (str_is(type, "tool_use")) return tool_use(t, block, where, f);
    if (str_is(type, "redacted_thinking")) return true;
    const bool thought = str_is(type, "thinking");
    if (!thought && !str_is(type, "text")) return refuse_block(where, type, f);
    if (!convert_str(block, thought ? "thinking" : "text", where, &text, f)) return false;
    convert_join(thought ? &t->thought : &t->text, text);
    return true;
}

static void flush_assistant(convert_out *o, turn *t) {
    convert_begin(o, "assistant", buf_view(&t->text));
    if (t->thought.n) {
        buf_puts(o->out, ",\"reasoning_content\":");
        json_write_str(o->out, buf_view(&t->thought));
    }
    if (t->calls.n) {
        buf_puts(o->out, ",\"tool_calls\":[");
        buf_str(o->out, buf_view(&t->calls));
        buf_byte(o->out, ']');
    }
    buf_byte(o->out, '}');
}

/* ---- all of them ---- */

static bool add_message(convert_out *o, const json *m, uint32_t index, bool last, bool *prefill, fault *f) {
    turn t = { 0 };
    str role;
    char where[96];
    snprintf(where, sizeof where, "messages[%u]", index);
    if (!convert_str(m, "role", where, &role, f)) return false;
    const bool assistant = str_is(role, "assistant"), system = str_is(role, "system");
    const json *content = json_get(m, "content");
    if (!assistant && !system && !str_is(role, "user"))
        return fault_field(f, where, "%s.role must be user or assistant", where);
    snprintf(where, sizeof where, "messages[%u].content", index);
    bool ok = true;
    if (system || !json_is(content, JSON_ARRAY)) {
        ok = add_texts(&t.text, content, where, f);
    } else {
        for (uint32_t i = 0; ok && i < content->n; i++) {
            snprintf(where, sizeof where, "messages[%u].content[%u]", index, i);
            ok = assistant ? assistant_block(&t, &content->u.items[i], where, f)
                           : user_block(o, &t, &content->u.items[i], where, f);
        }
    }
    if (ok && assistant) {
        if (last && t.calls.n) {
            ok = fault_field(f, "messages", "messages: the last tool_use has no tool_result behind it");
        } else {
            *prefill = last && t.text.n > 0;
            flush_assistant(o, &t);
        }
    } else if (ok && (system || json_is(content, JSON_STRING))) {
        convert_begin(o, system ? "system" : "user", buf_view(&t.text));
        buf_byte(o->out, '}');
    } else if (ok) {
        flush_user(o, &t);
    }
    turn_free(&t);
    return ok;
}

bool anthropic_messages(buf *out, const json *body, bool *prefill, fault *f) {
    const json *messages = json_get(body, "messages"), *system = json_get(body, "system");
    convert_out o = { .out = out };
    bool ok = true;
    *prefill = false;
    if (!json_is(messages, JSON_ARRAY)) return fault_field(f, "messages", "messages must be a list of messages");
    buf_byte(out, '[');
    if (system && system->type != JSON_NULL) {
        buf text = { 0 };
        ok = add_texts(&text, system, "system", f);
        if (ok && text.n) {
            convert_begin(&o, "system", buf_view(&text));
            buf_byte(out, '}');
        }
        buf_free(&text);
    }
    for (uint32_t i = 0; ok && i < messages->n; i++)
        ok = add_message(&o, &messages->u.items[i], i, i + 1 == messages->n, prefill, f);
    buf_byte(out, ']');
    return ok && (messages->n || fault_field(f, "messages", "messages must not be empty"));
}

bool anthropic_tools(buf *out, const json *tools, fault *f) {
    if (!json_is(tools, JSON_ARRAY)) return fault_field(f, "tools", "tools must be a list");
    buf_byte(out, '[');
    for (uint32_t i = 0; i < tools->n; i++) {
        const json *t = &tools->u.items[i], *type = json_get(t, "type"), *schema = json_get(t, "input_schema");
        char where[48];
        str name;
        snprintf(where, sizeof where, "tools[%u]", i);
        if (type && type->type != JSON_NULL && !(json_is(type, JSON_STRING) && str_is(json_str(type), "custom")))
            return fault_field(f, where, "%s.type: only tools of your own are served (custom)", where);
        if (!convert_str(t, "name", where, &name, f)) return false;
        if (!json_is(schema, JSON_OBJECT)) return fault_field(f, where, "%s.input_schema must be an object", where);
        if (i) buf_byte(out, ',');
        convert_tool(out, name, json_get(t, "description"), schema);
    }
    buf_byte(out, ']');
    return true;
}
