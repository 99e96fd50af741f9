/* pretok.h - the pre_tokenizer of a tokenizer.json: text to the pieces that byte-pair encoding works on.
 *
 * Immutable and thread-safe after opening. */
#ifndef NIBBLE_PRETOK_H
#define NIBBLE_PRETOK_H

#include "base/err.h"
#include "base/json.h"
#include "base/str.h"

/* ---- one split pattern ---- */

typedef struct splitter splitter;

/* Compile an Oniguruma pattern (or plain text when `literal`). Errors: E-TOK-PATTERN. */
NODISCARD bool splitter_open(splitter **out, str pattern, bool literal, err *e);
void splitter_close(splitter *s);

/* Whether the direct scanner serves this pattern; otherwise PCRE2 does. */
bool splitter_is_direct(const splitter *s);
/* Whether the pattern can match the empty string (such matches cut, but are in no span). */
bool splitter_matches_empty(const splitter *s);

typedef struct span {
    size_t end; /* begins where the one before it ends */
    bool match; /* a match of the pattern, or text between matches */
} span;
typedef struct spans {
    span *v;
    size_t n, cap;
} spans; /* zeroed = empty; spans_free */
void spans_free(spans *s);

/* Append the spans that cover text (valid UTF-8). general: use PCRE2 even when the scanner could (for tests).
 * Errors: E-TOK-PATTERN when a pattern needs unreasonable time or memory on this text. */
NODISCARD bool splitter_run(const splitter *s, spans *out, str text, bool general, err *e);

/* Direct patterns only: end of the span that begins at `at` < text.n. */
size_t splitter_next(const splitter *s, str text, size_t at);

/* ---- the whole pre_tokenizer ---- */

typedef struct pretok pretok;

/* v: Split, ByteLevel (last), or a Sequence of those. Errors: E-TOK-MODEL (anything else, by name), E-TOK-PATTERN. */
NODISCARD bool pretok_open(pretok **out, const json *v, err *e);
void pretok_close(pretok *t);

/* True when pieces may point into scratch memory that lives only during the call of the sink. */
bool pretok_rewrites(const pretok *t);

/* Call sink with every piece in order; none is empty. */
typedef void pretok_sink(void *ctx, str piece);
NODISCARD bool pretok_run(const pretok *t, str text, pretok_sink *sink, void *ctx, err *e);

#endif
