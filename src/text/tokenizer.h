/* tokenizer.h - byte-level BPE from tokenizer.json: text to ids and back, identical to HF tokenizers.
 *
 * Immutable and thread-safe after loading; scratch lives in the calls. */
#ifndef NIBBLE_TOKENIZER_H
#define NIBBLE_TOKENIZER_H

#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

typedef struct tokenizer tokenizer;

/* dir/tokenizer.json (+ tokenizer_config.json where it adds flags). Errors: E-FILE-*, E-TOK-JSON, E-TOK-MODEL (not
 * BPE, unknown pre-tokenizer, normalizer or decoder), E-TOK-VOCAB (duplicate or out-of-range ids), E-TOK-MERGE
 * (a part or a result missing from the vocabulary), E-TOK-PATTERN. */
NODISCARD bool tokenizer_open(tokenizer **out, const char *dir, err *e);
void tokenizer_close(tokenizer *t);

typedef struct ids { int32_t *v; size_t n, cap; } ids; /* zeroed = empty; ids_free */
void ids_add(ids *a, int32_t id);
void ids_free(ids *a);

typedef struct encode_options {
    bool lossy;            /* invalid UTF-8 becomes U+FFFD; otherwise E-TEXT-UTF8 names the byte offset */
    bool no_special;       /* text that spells an added special token is ordinary text (untrusted input) */
} encode_options;
/* Appends to out. No BOS is ever added (add_bos_token in tokenizer_config is honoured). Linear in n. */
NODISCARD bool tokenizer_encode(const tokenizer *t, ids *out, str text, const encode_options *o, err *e);

int tokenizer_vocab(const tokenizer *t);               /* highest id + 1 */
/* Raw bytes of one id (added tokens: their content); empty for ids that do not exist. */
str tokenizer_bytes(const tokenizer *t, int32_t id);
bool tokenizer_is_special(const tokenizer *t, int32_t id);
bool tokenizer_exists(const tokenizer *t, int32_t id);
int32_t tokenizer_find(const tokenizer *t, str token); /* id of an added or plain token by content, or -1 */

/* Whole decode: appends the bytes; special tokens skipped when asked. E-TOK-ID for an id that does not exist. */
NODISCARD bool tokenizer_decode(const tokenizer *t, buf *out, const int32_t *v, size_t n, bool skip_special, err *e);

/* Streaming decode: emits only whole UTF-8 sequences; holds back up to 3 bytes of an unfinished one.
 * Invalid bytes come out as U+FFFD (one per maximal subpart), so the concatenation is always valid UTF-8. */
typedef struct detok { uint8_t held[4]; int n; } detok;
void detok_push(const tokenizer *t, detok *d, int32_t id, bool skip_special, buf *out);
void detok_end(detok *d, buf *out);   /* flush: a held part becomes U+FFFD */

#endif
