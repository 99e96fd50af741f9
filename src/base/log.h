/* log.h - notices and warnings (errors are values, see err.h).
 *
 * What is approximated, ignored or defaulted is said here, once, as one stderr line
 * `nibble: W-SOME-ID: object: text` (W- = warning) or `nibble: N-SOME-ID: ...` (N- = notice; hidden
 * by --quiet). E-: an error that ends no command, only some of what it serves. Ids stand in docs/ERRORS.md.
 * Thread-safe. */
#ifndef NIBBLE_LOG_H
#define NIBBLE_LOG_H

#include "base/base.h"

void log_say(const char *id, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* 0 quiet (warnings only), 1 normal, 2 verbose (-v). */
void log_set_level(int level);
int log_level(void);

/* Divert lines (tests, JSON reports). NULL restores stderr. `line` has no newline. */
typedef void log_sink(void *ctx, const char *id, const char *line);
void log_set_sink(log_sink *sink, void *ctx);

#endif
