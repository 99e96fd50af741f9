/* fault.h - what an API answers instead of a result: status, OpenAI's type and code, the field, a message.
 *
 * Built from err values or by hand; every dialect writes it in its own words. Messages are valid UTF-8 once written
 * (json_write_str replaces what is not). */
#ifndef NIBBLE_FAULT_H
#define NIBBLE_FAULT_H

#include "base/buf.h"
#include "base/err.h"

typedef struct fault {
    int status;              /* HTTP: 400 401 404 405 408 413 429 500 503; 0 = none */
    const char *type, *code; /* OpenAI's words; code may be NULL. String literals */
    char param[96];          /* field the fault lies in, or "" */
    char message[640];
    int retry_after; /* seconds, 0 = no such header */
} fault;

/* 400 invalid_request_error. `param` may be NULL. Like all of these: false, and an earlier fault stays. */
bool fault_field(fault *f, const char *param, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* Another status; type follows from it. */
bool fault_set(fault *f, int status, const char *code, const char *fmt, ...) PRINTF_LIKE(4, 5);
/* From a failure of another layer: ERR_INPUT is 400, a full queue 429, memory and machine 503, the rest 500. */
bool fault_of(fault *f, const err *e);
/* {"error":{"message","type","param","code"}} */
void fault_write(buf *out, const fault *f);

#endif
