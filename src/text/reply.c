#include "text/reply.h"

static void on_event(void *ctx, split_kind kind, str text) {
    reply *r = ctx;
    switch (kind) {
    case SPLIT_THOUGHT: buf_str(&r->thought, text); break;
    case SPLIT_TEXT: buf_str(&r->text, text); break;
    case SPLIT_CALL:
        if (r->n_calls) buf_byte(&r->calls, ',');
        buf_printf(&r->calls, "{\"id\":\"call_%d\",\"type\":\"function\",\"function\":{\"name\":", r->n_calls);
        json_write_str(&r->calls, text);
        buf_clear(&r->args);
        r->n_calls++;
        break;
    case SPLIT_ARGS: buf_str(&r->args, text); break;
    case SPLIT_CALL_END:
    case SPLIT_CALL_CUT:
        buf_puts(&r->calls, ",\"arguments\":");
        json_write_str(&r->calls, buf_view(&r->args));
        buf_puts(&r->calls, "}}");
        r->cut = kind == SPLIT_CALL_CUT;
        break;
    }
    if (r->on_piece) r->on_piece(r->ctx, kind, text);
}

void reply_init(reply *r, const tokenizer *t, bool thinking, const json *tools, const char *const *stops, int n_stops) {
    *r = (reply){ .t = t, .stops = stops, .n_stops = n_stops, .stop = -1 };
    r->s = split_new(thinking, tools, on_event, r);
}

void reply_init_plain(reply *r, const tokenizer *t, const char *const *stops, int n_stops) {
    *r = (reply){ .t = t, .stops = stops, .n_stops = n_stops, .stop = -1 };
}

/* Offset of the first completed stop string, or -1; *which it is; *keep = bytes at the end that may begin one. */
static ptrdiff_t find_stop(const reply *r, int *which, size_t *keep) {
    const str raw = buf_view(&r->raw);
    ptrdiff_t first = -1;
    *keep = 0;
    for (int i = 0; i < r->n_stops; i++) {
        const str stop = str_of(r->stops[i]);
        if (stop.n == 0) continue;
        const ptrdiff_t at = str_find(raw, stop);
        if (at >= 0 && (first < 0 || at < first)) {
            first = at;
            *which = i;
        }
        for (size_t n = stop.n - 1 < raw.n ? stop.n - 1 : raw.n; n > *keep; n--)
            if (memcmp(raw.p + raw.n - n, stop.p, n) == 0) *keep = n;
    }
    return first;
}

static void release(reply *r, size_t n) {
    if (n == 0) return;
    if (r->s)
        split_push(r->s, (str){ r->raw.p, n });
    else /* whole characters: the detokenizer yields nothing else, and stop strings begin and end with one */
        on_event(r, SPLIT_TEXT, (str){ r->raw.p, n });
    memmove(r->raw.p, r->raw.p + n, r->raw.n - n);
    r->raw.n -= n;
}

static void drain(reply *r) {
    size_t keep;
    const ptrdiff_t at = find_stop(r, &r->stop, &keep);
    if (at >= 0) {
        release(r, (size_t)at);
        r->raw.n = 0;
        r->stopped = true;
    } else if (r->raw.n > keep) {
        release(r, r->raw.n - keep);
    }
}

bool reply_push(reply *r, int32_t id) {
    if (r->stopped) return false;
    detok_push(r->t, &r->d, id, true, &r->raw);
    if (++r->n_tokens <= r->min_tokens)
        release(r, r->raw.n);
    else
        drain(r);
    return !r->stopped;
}

void reply_end(reply *r) {
    if (!r->stopped) {
        detok_end(&r->d, &r->raw);
        drain(r);
        if (r->raw.n) release(r, r->raw.n);
    }
    if (r->s) split_end(r->s);
}

void reply_free(reply *r) {
    if (r->s) split_free(r->s);
    buf_free(&r->raw);
    buf_free(&r->text);
    buf_free(&r->thought);
    buf_free(&r->calls);
    buf_free(&r->args);
}
