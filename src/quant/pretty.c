#include "quant/pretty.h"

void pretty_line(pretty *o) {
    if (!o->first) buf_byte(&o->b, ',');
    buf_byte(&o->b, '\n');
    for (int i = 0; i < o->depth * 4; i++) buf_byte(&o->b, ' ');
    o->first = false;
}

void pretty_key(pretty *o, str k) {
    pretty_line(o);
    json_write_str(&o->b, k);
    buf_puts(&o->b, ": ");
}

void pretty_open(pretty *o, char c) {
    buf_byte(&o->b, c);
    o->depth++;
    o->first = true;
}

void pretty_close(pretty *o, char c) {
    const bool empty = o->first;
    o->depth--;
    if (!empty) {
        o->first = true;
        pretty_line(o);
    }
    o->first = false;
    buf_byte(&o->b, c);
}

void pretty_tree(pretty *o, const json *v) {
    if (v->type == JSON_OBJECT) {
        pretty_open(o, '{');
        for (uint32_t i = 0; i < v->n; i++) pretty_key(o, v->u.members[i].key), pretty_tree(o, &v->u.members[i].value);
        pretty_close(o, '}');
    } else if (v->type == JSON_ARRAY) {
        pretty_open(o, '[');
        for (uint32_t i = 0; i < v->n; i++) pretty_line(o), pretty_tree(o, &v->u.items[i]);
        pretty_close(o, ']');
    } else {
        json_write(&o->b, v);
    }
}

void pretty_text(pretty *o, const char *k, str v) {
    pretty_key(o, str_of(k));
    json_write_str(&o->b, v);
}

void pretty_raw(pretty *o, const char *k, const char *v) {
    pretty_key(o, str_of(k));
    buf_puts(&o->b, v);
}

void pretty_strings(pretty *o, const char *k, const str *v, int n) {
    pretty_key(o, str_of(k));
    pretty_open(o, '[');
    for (int i = 0; i < n; i++) pretty_line(o), json_write_str(&o->b, v[i]);
    pretty_close(o, ']');
}
