#include "serve/sse.h"

void sse_open(http_call *c) {
    http_reply_header(c, "Cache-Control", "no-cache");
    http_reply_header(c, "X-Accel-Buffering", "no");
    http_stream_open(c, 200, "text/event-stream; charset=utf-8");
}

void sse_event(http_call *c, const char *name, str json) {
    buf b = { 0 };
    if (name) buf_printf(&b, "event: %s\n", name);
    buf_puts(&b, "data: ");
    buf_str(&b, json);
    buf_puts(&b, "\n\n");
    http_stream_write(c, buf_view(&b));
    buf_free(&b);
}

void sse_comment(http_call *c, const char *text) {
    buf b = { 0 };
    buf_printf(&b, ": %s\n\n", text);
    http_stream_write(c, buf_view(&b));
    buf_free(&b);
}

void sse_done(http_call *c) { http_stream_write(c, STR("data: [DONE]\n\n")); }

void sse_close(http_call *c) { http_stream_end(c); }
