#include "serve/convert.h"

void convert_begin(convert_out *o, const char *role, str text) {
    if (o->any) buf_byte(o->out, ',');
    o->any = true;
    buf_printf(o->out, "{\"role\":\"%s\",\"content\":", role);
    json_write_str(o->out, text);
}

void convert_join(buf *to, str text) {
    if (to->n && text.n && to->p[to->n - 1] != '\n') buf_byte(to, '\n');
    buf_str(to, text);
}

bool convert_str(const json *v, const char *name, const char *where, str *out, fault *f) {
    const json *s = json_get(v, name);
    if (!json_is(s, JSON_STRING)) return fault_field(f, where, "%s.%s must be a string", where, name);
    return *out = json_str(s), true;
}

void convert_tool(buf *out, str name, const json *description, const json *parameters) {
    buf_puts(out, "{\"type\":\"function\",\"function\":{\"name\":");
    json_write_str(out, name);
    if (json_is(description, JSON_STRING)) {
        buf_puts(out, ",\"description\":");
        json_write(out, description);
    }
    if (parameters) {
        buf_puts(out, ",\"parameters\":");
        json_write(out, parameters);
    }
    buf_puts(out, "}}");
}
