/* Items and tools of OpenAI's responses API in the form of its chat API. */
#include <stdio.h>

#include "serve/convert.h"

typedef struct turn { /* of the assistant, until something else comes */
    bool open;
    buf text, thought, calls;
} turn;

static void flush(convert_out *o, turn *t) {
    if (!t->open) return;
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
    t->open = false;
    buf_clear(&t->text);
    buf_clear(&t->thought);
    buf_clear(&t->calls);
}

/* A string, null, or parts with a text; `what` names the list. */
static bool add_parts(buf *out, const json *v, const char *where, fault *f) {
    static const char *const kinds[] = { "input_text", "output_text", "text", "reasoning_text", "summary_text" };
    if (!v || v->type == JSON_NULL) return true;
    if (v->type == JSON_STRING) return buf_str(out, json_str(v)), true;
    if (v->type != JSON_ARRAY) return fault_field(f, where, "%s must be a string or a list of parts", where);
    for (uint32_t i = 0; i < v->n; i++) {
        char at[128];
        str type, text;
        bool known = false;
        snprintf(at, sizeof at, "%s[%u]", where, i);
        if (!convert_str(&v->u.items[i], "type", at, &type, f)) return false;
        for (size_t k = 0; k < ARRAY_LEN(kinds); k++) known |= str_is(type, kinds[k]);
        const bool refusal = str_is(type, "refusal");
        if (!known && !refusal)
            return fault_field(f, at, "%s: parts of type '" STR_FMT "' are not served (text only)", at,
                               (int)(type.n > 60 ? 60 : type.n), type.p);
        if (!convert_str(&v->u.items[i], refusal ? "refusal" : "text", at, &text, f)) return false;
        convert_join(out, text);
    }
    return true;
}

static bool add_message(convert_out *o, turn *t, const json *item, const char *where, fault *f) {
    static const char *const roles[] = { "user", "system", "developer" };
    const json *content = json_get(item, "content");
    buf text = { 0 };
    str role;
    char at[128];
    snprintf(at, sizeof at, "%s.content", where);
    if (!convert_str(item, "role", where, &role, f)) return false;
    if (!content || content->type == JSON_NULL) return fault_field(f, at, "%s is missing", at);
    if (str_is(role, "assistant")) {
        if (t->text.n || t->calls.n) flush(o, t);
        t->open = true;
        return add_parts(&t->text, content, at, f);
    }
    const char *known = NULL;
    for (size_t i = 0; i < ARRAY_LEN(roles); i++)
        if (str_is(role, roles[i])) known = roles[i];
    if (!known) return fault_field(f, where, "%s.role must be user, assistant, system or developer", where);
    flush(o, t);
    const bool ok = add_parts(&text, content, at, f);
    if (ok) {
        convert_begin(o, known, buf_view(&text));
        buf_byte(o->out, '}');
    }
    buf_free(&text);
    return ok;
}

static bool add_call(turn *t, const json *item, const char *where, fault *f) {
    str id, name, arguments;
    if (!convert_str(item, "call_id", where, &id, f) || !convert_str(item, "name", where, &name, f) ||
        !convert_str(item, "arguments", where, &arguments, f))
        return false;
    t->open = true;
    buf_puts(&t->calls, t->calls.n ? ",{\"id\":" : "{\"id\":");
    json_write_str(&t->calls, id);
    buf_puts(&t->calls, ",\"type\":\"function\",\"function\":{\"name\":");
    json_write_str(&t->calls, name);
    buf_puts(&t->calls, ",\"arguments\":");
    json_write_str(&t->calls, arguments);
    buf_puts(&t->calls, "}}");
    return true;
}

static bool add_output(convert_out *o, turn *t, const json *item, const char *where, fault *f) {
    buf text = { 0 };
    str id;
    char at[128];
    snprintf(at, sizeof at, "%s.output", where);
    flush(o, t);
    const bool ok = convert_str(item, "call_id", where, &id, f) && add_parts(&text, json_get(item, "output"), at, f);
    if (ok) {
        convert_begin(o, "tool", buf_view(&text));
        buf_puts(o->out, ",\"tool_call_id\":");
        json_write_str(o->out, id);
        buf_byte(o->out, '}');
    }
    buf_free(&text);
    return ok;
}

static bool add_reasoning(convert_out *o, turn *t, const json *item, const char *where, fault *f) {
    const json *content = json_get(item, "content"), *summary = json_get(item, "summary");
    if (t->text.n || t->calls.n || t->thought.n) flush(o, t);
    t->open = true;
    return add_parts(&t->thought, json_is(content, JSON_ARRAY) && content->n ? content : summary, where, f);
}

static bool add_item(convert_out *o, turn *t, const json *item, const char *where, fault *f) {
    const json *type = json_get(item, "type");
    if (!json_is(item, JSON_OBJECT)) return fault_field(f, where, "%s must be an object", where);
    if (!type || type->type == JSON_NULL) return add_message(o, t, item, where, f);
    if (!json_is(type, JSON_STRING)) return fault_field(f, where, "%s.type must be a string", where);
    const str s = json_str(type);
    if (str_is(s, "message")) return add_message(o, t, item, where, f);
    if (str_is(s, "function_call")) return add_call(t, item, where, f);
    if (str_is(s, "function_call_output")) return add_output(o, t, item, where, f);
    if (str_is(s, "reasoning")) return add_reasoning(o, t, item, where, f);
    if (str_is(s, "item_reference"))
        return fault_field(f, where, "%s: nothing is stored here, so an item cannot be named by its id (send it whole)",
                           where);
    return fault_field(f, where, "%s: items of type '" STR_FMT "' are not supported here", where,
                       (int)(s.n > 60 ? 60 : s.n), s.p);
}

bool responses_messages(buf *out, const json *body, fault *f) {
    const json *input = json_get(body, "input"), *instructions = json_get(body, "instructions");
    convert_out o = { .out = out };
    turn t = { 0 };
    bool ok = true;
    buf_byte(out, '[');
    if (instructions && instructions->type != JSON_NULL) {
        if (instructions->type != JSON_STRING) return fault_field(f, "instructions", "instructions must be a string");
        convert_begin(&o, "system", json_str(instructions));
        buf_byte(out, '}');
    }
    if (json_is(input, JSON_STRING)) {
        convert_begin(&o, "user", json_str(input));
        buf_byte(out, '}');
    } else if (!json_is(input, JSON_ARRAY)) {
        return fault_field(f, "input", input ? "input must be a string or a list of items" : "input is missing");
    } else if (input->n == 0) {
        return fault_field(f, "input", "input must not be empty");
    }
    for (uint32_t i = 0; ok && input->type == JSON_ARRAY && i < input->n; i++) {
        char where[48];
        snprintf(where, sizeof where, "input[%u]", i);
        ok = add_item(&o, &t, &input->u.items[i], where, f);
    }
    if (ok) flush(&o, &t);
    buf_byte(out, ']');
    buf_free(&t.text);
    buf_free(&t.thought);
    buf_free(&t.calls);
    return ok;
}

bool responses_tools(buf *out, const json *tools, fault *f) {
    if (!json_is(tools, JSON_ARRAY)) return fault_field(f, "tools", "tools must be a list");
    buf_byte(out, '[');
    for (uint32_t i = 0; i < tools->n; i++) {
        const json *t = &tools->u.items[i], *parameters = json_get(t, "parameters");
        char where[48];
        str type, name;
        snprintf(where, sizeof where, "tools[%u]", i);
        if (!convert_str(t, "type", where, &type, f)) return false;
        if (!str_is(type, "function"))
            return fault_field(f, where, "%s: tools of type '" STR_FMT "' are not served (function only)", where,
                               (int)(type.n > 60 ? 60 : type.n), type.p);
        if (!convert_str(t, "name", where, &name, f)) return false;
        if (json_is(parameters, JSON_NULL)) parameters = NULL;
        if (i) buf_byte(out, ',');
        convert_tool(out, name, json_get(t, "description"), parameters);
    }
    buf_byte(out, ']');
    return true;
}
