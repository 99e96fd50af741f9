/* sse.h - server-sent events over a call's stream. A comment is sent by the server whenever a stream was silent for 5 s. */
#ifndef NIBBLE_SSE_H
#define NIBBLE_SSE_H

#include "serve/http.h"

enum { SSE_KEEP_ALIVE_SECONDS = 5 };

/* Status and headers (text/event-stream, no caching, no proxy buffering). */
void sse_open(http_call *c);
/* One event: `event: name` when name is not NULL, then `data:`; json holds no newline. */
void sse_event(http_call *c, const char *name, str json);
void sse_comment(http_call *c, const char *text);
void sse_done(http_call *c); /* data: [DONE] */
void sse_close(http_call *c);

#endif
