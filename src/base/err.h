/* err.h - an error is a value. What can fail returns bool and takes `err *e` last.
 *
 * The caller zeroes the err (`err e = {0};`). The first failure wins: what cleanup trips over never
 * hides the cause. Nothing is printed where it is raised; main prints it once as
 * `nibble: E-SOME-ID: object: what is wrong (remedy)`. Every id stands in docs/ERRORS.md. */
#ifndef NIBBLE_ERR_H
#define NIBBLE_ERR_H

#include "base/base.h"

typedef enum err_kind {
    ERR_NONE,
    ERR_NEGATIVE,   /* a verdict: exit 1 */
    ERR_USAGE,      /* exit 2 */
    ERR_INPUT,      /* a bad file, model, prompt or request: exit 3, HTTP 400 */
    ERR_MACHINE,    /* memory, disk, device, port: exit 4, HTTP 503 */
    ERR_INTERRUPTED /* exit 130 */
} err_kind;

typedef struct err {
    err_kind kind;
    const char *id; /* string literal such as "E-LOAD-UNUSED" */
    char msg[600];  /* one line: the object, what is wrong with it, (the remedy) */
} err;

/* Record a failure and return false, so `return fail(e, ...)` is one thought. Keeps an earlier one.
 * Control characters in the formatted text are replaced by '?', so a message stays one line. */
bool fail(err *e, err_kind kind, const char *id, const char *fmt, ...) PRINTF_LIKE(4, 5);

/* Put "prefix: " before the message of a failure that already happened (context on the way up);
 * returns false. */
bool fail_prefix(err *e, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* Process exit code of a kind: 0 1 2 3 4 130. */
int err_exit_code(err_kind kind);

#endif
