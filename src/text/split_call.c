#include "text/split_call.h"

#include <stdlib.h>

#include "text/toolcall.h"

enum { NAME_MAX_BYTES = 256 };

tag_match tag_at(const buf *b, size_t at, const char *tag, size_t *n) {
    const size_t len = strlen(tag), have = at < b->n ? b->n - at : 0, k = have < len ? have : len;
    if (k == 0 || memcmp(b->p + at, tag, k) != 0) return TAG_NONE;
    if (k < len) return TAG_PART;
    *n = len;
    return TAG_WHOLE;
}

static bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static size_t blanks(const buf *b, size_t at) {
    while (at < b->n && blank(b->p[at])) at++;
    return at;
}

/* NAME> at `at`: WHOLE with the trimmed name and *end behind the '>'. Names hold no line breaks and no '<'. */
static tag_match read_name(const buf *b, size_t at, span *name, size_t *end) {
    size_t i = at;
    for (; i < b->n && b->p[i] != '>'; i++)
        if (i - at >= NAME_MAX_BYTES || (unsigned char)b->p[i] < 0x20 || b->p[i] == '<') return TAG_NONE;
    if (i - at > NAME_MAX_BYTES) return TAG_NONE;
    if (i == b->n) return TAG_PART;
    *end = i + 1;
    while (at < i && blank(b->p[at])) at++;
    while (i > at && blank(b->p[i - 1])) i--;
    if (i - at >= 2 && (b->p[at] == '"' || b->p[at] == '\'') && b->p[i - 1] == b->p[at]) {
        at++;
        i--;
    }
    *name = (span){ at, i - at };
    return i > at ? TAG_WHOLE : TAG_NONE;
}

static str text_of(const buf *b, span s) { return (str){ b->p + s.from, s.n }; }

tag_match call_opener(const buf *b, size_t at, bool line_start, const json *tools, size_t *n) {
    const tag_match m = tag_at(b, at, "<tool_call>", n);
    if (m != TAG_NONE || !line_start) return m;
    size_t len, end;
    span name;
    const tag_match f = tag_at(b, at, "<function=", &len);
    if (f != TAG_WHOLE) return f;
    const tag_match whole = read_name(b, at + len, &name, &end);
    *n = 0;
    return whole == TAG_WHOLE && !toolcall_find(tools, text_of(b, name)) ? TAG_NONE : whole;
}

tag_match call_closer(const buf *b, size_t at, size_t *n) {
    static const char *const tags[] = { "</tool_call>", "</function>", "</parameter>" };
    tag_match best = TAG_NONE;
    for (size_t i = 0; i < ARRAY_LEN(tags) && best != TAG_WHOLE; i++) {
        const tag_match m = tag_at(b, at, tags[i], n);
        if (m > best) best = m;
    }
    return best;
}

void call_begin(call_parser *c, size_t at, size_t opener) {
    c->active = true;
    c->wrapped = opener > 0;
    c->state = CALL_OPEN;
    c->at = at + opener;
    c->n = 0;
}

static void add_param(call_parser *c, size_t value_end) {
    if (c->n == c->cap) {
        c->cap = c->cap ? c->cap * 2 : 8;
        c->v = xrealloc(c->v, c->cap * sizeof *c->v);
    }
    c->v[c->n++] = (call_param){ c->key, { c->value_from, value_end - c->value_from } };
}

typedef enum advance { GO_ON, WAIT, REJECT, COMPLETE } advance;

static advance step_open(call_parser *c, const buf *b) {
    size_t n;
    c->at = blanks(b, c->at);
    if (c->at == b->n) return WAIT;
    const tag_match m = tag_at(b, c->at, "<function=", &n);
    if (m != TAG_WHOLE) return m == TAG_PART ? WAIT : REJECT;
    c->at += n;
    c->state = CALL_NAME;
    return GO_ON;
}

static advance step_name(call_parser *c, const buf *b, const json *tools, bool strict) {
    size_t end;
    const tag_match m = read_name(b, c->at, &c->name, &end);
    if (m != TAG_WHOLE) return m == TAG_PART ? WAIT : REJECT;
    if (strict && !toolcall_find(tools, text_of(b, c->name))) return REJECT;
    c->at = end;
    c->state = CALL_BODY;
    return GO_ON;
}

/* Between parameters. */
static advance step_body(call_parser *c, const buf *b, bool strict) {
    size_t n;
    c->at = blanks(b, c->at);
    if (c->at == b->n) return WAIT;
    const tag_match key = tag_at(b, c->at, "<parameter=", &n);
    if (key == TAG_WHOLE) {
        c->at += n;
        c->state = CALL_KEY;
        return GO_ON;
    }
    const tag_match close = call_closer(b, c->at, &n);
    if (close == TAG_WHOLE) {
        const bool parameter = b->p[c->at + 2] == 'p'; /* a stray </parameter> */
        if (!parameter) c->state = CALL_DONE;
        if (parameter || b->p[c->at + 2] == 'f') c->at += n;
        return parameter ? GO_ON : COMPLETE;
    }
    const tag_match next = tag_at(b, c->at, "<tool_call>", &n), fn = tag_at(b, c->at, "<function=", &n);
    if (key == TAG_PART || close == TAG_PART || next == TAG_PART || fn == TAG_PART) return WAIT;
    if (c->n == 0 || strict) return REJECT;
    if (next == TAG_WHOLE || fn == TAG_WHOLE) { /* the next call: this one lacks its end */
        c->state = CALL_DONE;
        return COMPLETE;
    }
    c->at++;
    return GO_ON;
}

static advance step_key(call_parser *c, const buf *b, bool strict) {
    size_t end;
    const tag_match m = read_name(b, c->at, &c->key, &end);
    if (m == TAG_PART) return WAIT;
    if (m == TAG_NONE) {
        c->state = CALL_BODY;
        return c->n == 0 || strict ? REJECT : GO_ON;
    }
    c->at = c->value_from = end;
    c->state = CALL_VALUE;
    return GO_ON;
}

/* A closing tag inside a value that lacks its </parameter>: is it the call's end? Only what follows can tell. */
static tag_match ends_call(const buf *b, size_t behind, bool function, bool final) {
    const size_t at = blanks(b, behind);
    size_t n;
    if (at == b->n) return final ? TAG_WHOLE : TAG_PART;
    tag_match best = tag_at(b, at, "<tool_call>", &n);
    tag_match m = tag_at(b, at, "<function=", &n);
    if (m > best) best = m;
    m = function ? tag_at(b, at, "</tool_call>", &n) : TAG_NONE;
    if (m > best) best = m;
    return best == TAG_PART && final ? TAG_WHOLE : best;
}

/* What the '<' at c->at means inside a value. */
static advance value_tag(call_parser *c, const buf *b, const json *tools, bool strict, bool final) {
    const size_t at = c->at;
    size_t n, end;
    tag_match m = tag_at(b, at, "</parameter>", &n);
    if (m == TAG_WHOLE) {
        add_param(c, at);
        c->at = at + n;
        c->state = CALL_BODY;
        return GO_ON;
    }
    if (m == TAG_PART) return WAIT;
    if (strict && (m = tag_at(b, at, "</think>", &n)) != TAG_NONE) return m == TAG_PART ? WAIT : REJECT;
    m = tag_at(b, at, "<parameter=", &n);
    if (m == TAG_WHOLE) {
        span key;
        const bool line = at == c->value_from || b->p[at - 1] == '\n';
        m = read_name(b, at + n, &key, &end);
        if (m == TAG_WHOLE && !line && !toolcall_declares(tools, text_of(b, c->name), text_of(b, key))) m = TAG_NONE;
    } else if (m == TAG_NONE) {
        m = tag_at(b, at, "</function>", &n);
        const bool function = m == TAG_WHOLE;
        if (m == TAG_NONE && c->wrapped) m = tag_at(b, at, "</tool_call>", &n);
        if (m == TAG_WHOLE) m = ends_call(b, at + n, function, final);
    }
    if (m == TAG_PART) return WAIT;
    if (m == TAG_WHOLE) { /* the value's own end is missing; the tag is read again between parameters */
        add_param(c, at);
        c->state = CALL_BODY;
    } else {
        c->at++;
    }
    return GO_ON;
}

static advance step_value(call_parser *c, const buf *b, const json *tools, bool strict, bool final) {
    const char *lt = c->at < b->n ? memchr(b->p + c->at, '<', b->n - c->at) : NULL;
    c->at = lt ? (size_t)(lt - b->p) : b->n;
    return lt ? value_tag(c, b, tools, strict, final) : WAIT;
}

call_verdict call_step(call_parser *c, const buf *b, const json *tools, bool strict, bool final) {
    for (;;) {
        advance a = REJECT;
        switch (c->state) {
        case CALL_OPEN: a = step_open(c, b); break;
        case CALL_NAME: a = step_name(c, b, tools, strict); break;
        case CALL_BODY: a = step_body(c, b, strict); break;
        case CALL_KEY: a = step_key(c, b, strict); break;
        case CALL_VALUE: a = step_value(c, b, tools, strict, final); break;
        case CALL_DONE: return CALL_COMPLETE;
        }
        if (a == WAIT) return CALL_WAIT;
        if (a == REJECT) return CALL_REJECT;
        if (a == COMPLETE) return CALL_COMPLETE;
    }
}

bool call_committed(const call_parser *c, const buf *b) { return c->state != CALL_OPEN || blanks(b, c->at) < b->n; }

str call_name(const call_parser *c, const buf *b) { return text_of(b, c->name); }

void call_free(call_parser *c) {
    free(c->v);
    *c = (call_parser){ 0 };
}
