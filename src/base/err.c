#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Messages may quote bytes of a hostile file: keep them on one line and free of escape sequences. */
static void scrub(char *s) {
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f) *s = '?';
}

bool fail(err *e, err_kind kind, const char *id, const char *fmt, ...) {
    if (e->kind != ERR_NONE) return false;
    e->kind = kind;
    e->id = id;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    scrub(e->msg);
    return false;
}

bool fail_prefix(err *e, const char *fmt, ...) {
    char prefix[300], old[sizeof e->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    memcpy(old, e->msg, sizeof old);
    const size_t n = strlen(prefix);
    snprintf(e->msg, sizeof e->msg, "%s: %.*s", prefix, (int)(sizeof e->msg - n - 3), old);
    scrub(e->msg);
    return false;
}

int err_exit_code(err_kind kind) {
    switch (kind) {
    case ERR_NONE: return 0;
    case ERR_NEGATIVE: return 1;
    case ERR_USAGE: return 2;
    case ERR_INPUT: return 3;
    case ERR_MACHINE: return 4;
    case ERR_INTERRUPTED: return 130;
    }
    return 4;
}
