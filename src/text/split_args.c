#include "text/split_args.h"

static str text_of(const buf *b, span s) { return (str){ b->p + s.from, s.n }; }

bool args_may_begin(const call_parser *c) { return c->n > 0 || c->state == CALL_VALUE || c->state == CALL_DONE; }

void args_begin(call_args *a, buf *out, const json *tools, str name) {
    *a = (call_args){ .schema = toolcall_schema(tools, name) };
    buf_byte(out, '{');
}

static const json *schema_of(const call_args *a, str key) {
    return json_get_str(json_get(a->schema, "properties"), key);
}

static bool known(const call_parser *c, const buf *b, size_t n, str key) {
    for (size_t i = 0; i < n; i++)
        if (str_eq(text_of(b, c->v[i].key), key)) return true;
    return false;
}

static void write_key(call_args *a, buf *out, str key) {
    if (a->any) buf_puts(out, ", ");
    a->any = true;
    json_write_str(out, key);
    buf_puts(out, ": ");
}

static void write_inside(buf *out, str text) { /* of a string: without its quotes */
    buf tmp = { 0 };
    if (!text.n) return;
    json_write_str(&tmp, text);
    buf_add(out, tmp.p + 1, tmp.n - 2);
    buf_free(&tmp);
}

/* A value whose end is known. */
static void whole_value(call_args *a, buf *out, const buf *b, const call_param *p) {
    const str key = text_of(b, p->key), value = toolcall_strip(text_of(b, p->value));
    if (a->in_string) {
        const size_t end = value.p + value.n > b->p + a->sent ? (size_t)(value.p + value.n - b->p) : a->sent;
        write_inside(out, (str){ b->p + a->sent, end - a->sent });
        buf_byte(out, '"');
    } else {
        write_key(a, out, key);
        toolcall_value(out, schema_of(a, key), a->schema, value);
    }
}

/* The bytes of an unfinished value that are certain: without a line end that may be its last. */
static size_t certain(const buf *b, size_t from, size_t upto) {
    if (upto > from && b->p[upto - 1] == '\n') upto--;
    if (upto > from && b->p[upto - 1] == '\r') upto--;
    return upto;
}

static bool may_be_null(str s) {
    while (s.n && strchr(" \t\r\n", *s.p) && *s.p) s = str_skip(s, 1);
    while (s.n && s.p[s.n - 1] && strchr(" \t\r\n", s.p[s.n - 1])) s.n--;
    return s.n <= 4 && (strncasecmp(s.p, "null", s.n) == 0 || strncasecmp(s.p, "none", s.n) == 0);
}

/* Where a value's text begins: behind the one line end in front of it. False: too little is known. */
static bool value_begin(const buf *b, size_t from, size_t upto, size_t *begin) {
    if (from == upto || (b->p[from] == '\r' && from + 1 == upto)) return false;
    *begin = from + (b->p[from] == '\n' ? 1 : b->p[from] == '\r' && b->p[from + 1] == '\n' ? 2 : 0);
    return true;
}

static void open_string(call_args *a, buf *out, const call_parser *c, const buf *b) {
    if (!a->in_string) {
        if (!value_begin(b, c->value_from, c->at, &a->sent)) return;
        const size_t upto = certain(b, a->sent, c->at);
        if (a->form == FORM_STRING_OR_NULL && may_be_null((str){ b->p + a->sent, upto - a->sent })) return;
        write_key(a, out, text_of(b, c->key));
        buf_byte(out, '"');
        a->in_string = true;
    }
    const size_t upto = certain(b, a->sent, c->at);
    write_inside(out, (str){ b->p + a->sent, upto - a->sent });
    a->sent = upto;
}

void args_step(call_args *a, buf *out, const call_parser *c, const buf *b) {
    for (; a->done < c->n; a->done++) {
        if (!known(c, b, a->done, text_of(b, c->v[a->done].key))) whole_value(a, out, b, &c->v[a->done]);
        a->begun = a->in_string = false;
    }
    if (c->state != CALL_VALUE) return;
    if (!a->begun) {
        const str key = text_of(b, c->key);
        a->form = known(c, b, c->n, key) ? FORM_OTHER : toolcall_form_of(schema_of(a, key), a->schema);
        a->begun = true;
    }
    if (a->form != FORM_OTHER) open_string(a, out, c, b);
}

void args_end(call_args *a, buf *out, const call_parser *c, const buf *b) {
    args_step(a, out, c, b);
    if (a->in_string) buf_byte(out, '"');
    buf_byte(out, '}');
}
