#include "serve/fault.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

static const char *type_of(int status) {
    switch (status) {
    case 401: return "authentication_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    case 503: return "service_unavailable";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

bool fault_field(fault *f, const char *param, const char *fmt, ...) {
    if (f->status) return false;
    *f = (fault){ .status = 400, .type = type_of(400) };
    snprintf(f->param, sizeof f->param, "%s", param ? param : "");
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->message, sizeof f->message, fmt, ap);
    va_end(ap);
    return false;
}

bool fault_set(fault *f, int status, const char *code, const char *fmt, ...) {
    if (f->status) return false;
    *f = (fault){ .status = status, .type = type_of(status), .code = code };
    if (status == 429 || status == 503) f->retry_after = 1;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->message, sizeof f->message, fmt, ap);
    va_end(ap);
    return false;
}

bool fault_of(fault *f, const err *e) {
    const char *id = e->id;
    CHECK(id, "a failure without a cause");
    if (e->kind == ERR_INPUT && strcmp(id, "E-ENGINE-NONFINITE") != 0) {
        if (strcmp(id, "E-ENGINE-CONTEXT") == 0) return fault_set(f, 400, "context_length_exceeded", "%s", e->msg);
        return fault_set(f, 400, id, "%s", e->msg);
    }
    if (strcmp(id, "E-ENGINE-QUEUE") == 0) return fault_set(f, 429, "queue_full", "%s", e->msg);
    if (e->kind == ERR_MACHINE) return fault_set(f, 503, id, "%s", e->msg);
    return fault_set(f, 500, id, "%s", e->msg);
}

void fault_write(buf *out, const fault *f) {
    buf_puts(out, "{\"error\":{\"message\":");
    json_write_str(out, str_of(f->message));
    buf_printf(out, ",\"type\":\"%s\",\"param\":", f->type);
    if (f->param[0])
        json_write_str(out, str_of(f->param));
    else
        buf_puts(out, "null");
    buf_puts(out, ",\"code\":");
    if (f->code)
        json_write_str(out, str_of(f->code));
    else
        buf_puts(out, "null");
    buf_puts(out, "}}");
}
