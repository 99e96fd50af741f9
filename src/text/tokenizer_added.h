/* tokenizer_added.h - added tokens: found in the text before anything else looks at it (internal to src/text). */
#ifndef NIBBLE_TOKENIZER_ADDED_H
#define NIBBLE_TOKENIZER_ADDED_H

#include "base/arena.h"
#include "base/err.h"
#include "base/str.h"

enum { ADDED_CONTENT_MAX = 512, ADDED_TOKENS_MAX = 1 << 20 };

typedef struct added_token {
    str content;
    str bytes; /* what decoding writes */
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
} added_token;

typedef struct trie_edge {
    uint64_t key; /* node << 8 | byte, plus 1; 0 = free */
    uint32_t child;
} trie_edge;

/* Finds the leftmost, among those the longest, of a set of strings. */
typedef struct token_trie {
    trie_edge *edge;
    uint32_t edge_mask, edges;
    int32_t *token; /* per node: index of the token that ends here, or -1 */
    uint32_t nodes, node_cap;
    bool first[256]; /* bytes that begin a token */
    int only_first;  /* the one such byte, -1 when there are none or several */
} token_trie;

void trie_init(token_trie *t);
void trie_free(token_trie *t);
/* A string added twice belongs to the later token. Strings are not empty. */
void trie_add(token_trie *t, str s, int32_t token);

/* What the text between added tokens, and a token, are handed to. */
typedef struct added_sink {
    bool (*text)(void *ctx, str text, err *e);
    void (*token)(void *ctx, int32_t id);
    void *ctx;
    bool no_special, no_added;
} added_sink;

/* Split text (valid UTF-8) at the tokens of the trie; v is what its indices mean. Linear in text.n. */
NODISCARD bool added_split(const token_trie *t, const added_token *v, str text, const added_sink *sink, err *e);

#endif
