/* tokenizer.h - byte-level BPE from tokenizer.json: text to ids and back, identical to HF tokenizers.
 *
 * Immutable and thread-safe after loading; scratch lives in the calls. */
#ifndef NIBBLE_TOKENIZER_H
#define NIBBLE_TOKENIZER_H

#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

typedef struct tokenizer tokenizer;

/* dir/tokenizer.json, and dir/tokenizer_config.json where it adds tokens, flags or a BOS. Everything in the file is
 * applied, refused, or (what does not change ids: truncation, padding) named by W-TOK-IGNORED. Errors: E-FILE-*,
 * E-JSON-*, E-TOK-MODEL (not byte-level BPE, a step or setting that is not supported), E-TOK-VOCAB (duplicate or
 * out-of-range ids), E-TOK-ADDED (an added token that is malformed or has an unexpected id), E-TOK-MERGE (a part or a
 * result missing from the vocabulary), E-TOK-PATTERN, E-TEXT-MEMORY. Warnings: W-TOK-IGNORED, W-TOK-BYTES. */
NODISCARD bool tokenizer_open(tokenizer **out, const char *dir, err *e);
void tokenizer_close(tokenizer *t);

typedef struct id_list {
    int32_t *v;
    size_t n, cap;
} id_list; /* zeroed = empty; ids_free */
void ids_add(id_list *a, int32_t id);
void ids_free(id_list *a);

typedef struct encode_options {
    bool lossy;      /* invalid UTF-8 becomes U+FFFD; otherwise E-TEXT-UTF8 names the byte offset */
    bool no_special; /* text that spells an added special token is ordinary text (untrusted input) */
    bool no_added;   /* the same for every added token, special or not */
    bool bos;        /* begin with the BOS if tokenizer_config.json asks for one (add_bos_token); templates write
                              their own, so this is for plain text only */
} encode_options;
/* Appends to out (on failure out is as before). o may be NULL: all false. NULs are ordinary characters. Time
 * O(n log n), in practice linear, whatever the text. Errors: E-TEXT-UTF8, E-TEXT-SIZE (over 1 GiB), E-TOK-PATTERN,
 * E-TEXT-MEMORY. */
NODISCARD bool tokenizer_encode(const tokenizer *t, id_list *out, str text, const encode_options *o, err *e);

int tokenizer_vocab(const tokenizer *t); /* highest id + 1 */
/* Raw bytes of one id, as decoding writes them; empty for ids that do not exist. An added token is its content, except
 * that HF reads one written wholly in the byte alphabet (all printable ASCII is) as bytes, and so do we. */
str tokenizer_bytes(const tokenizer *t, int32_t id);
bool tokenizer_is_special(const tokenizer *t, int32_t id);
bool tokenizer_exists(const tokenizer *t, int32_t id);
/* Id of an added token by content, or else of a plain one by its bytes, or -1. */
int32_t tokenizer_find(const tokenizer *t, str token);

/* Where the turns of a rendered chat begin, but the first: marks[0..result), rising, the last TOKENIZER_MAX_TURNS of them. A
 * turn begins with the token that the chat begins with; none when that is not a special one. */
enum { TOKENIZER_MAX_TURNS = 8 };
int tokenizer_turns(const tokenizer *t, int marks[TOKENIZER_MAX_TURNS], const int32_t *v, int n);

/* Whole decode: appends the bytes (which need not be valid UTF-8); special tokens skipped when asked. E-TOK-ID for an
 * id that does not exist (out is as before). */
NODISCARD bool tokenizer_decode(const tokenizer *t, buf *out, const int32_t *v, size_t n, bool skip_special, err *e);

/* Streaming decode: emits only whole UTF-8 sequences; holds back up to 3 bytes of an unfinished one. Ids that do not
 * exist (padding rows of the head) add nothing.
 * Invalid bytes come out as U+FFFD (one per maximal subpart), so the concatenation is always valid UTF-8. */
typedef struct detok {
    uint8_t held[4];
    int n;
} detok;
void detok_push(const tokenizer *t, detok *d, int32_t id, bool skip_special, buf *out);
void detok_end(detok *d, buf *out); /* flush: a held part becomes U+FFFD */

#endif
