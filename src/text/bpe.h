/* bpe.h - byte-pair encoding: the model section of a tokenizer.json (internal to src/text).
 *
 * Tokens are kept as raw bytes. A vocabulary key that is not written in the byte alphabet (GPT-2's printable stand-ins
 * for the 256 bytes) is an "odd" token: it has an id and a text, but no byte sequence leads to it. */
#ifndef NIBBLE_BPE_H
#define NIBBLE_BPE_H

#include <stdatomic.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "text/tokenizer.h"

enum { BPE_WORD_MAX = 1 << 30, BPE_INDEX_MAX = (1 << 24) - 2 };

typedef enum token_kind { TOKEN_ABSENT, TOKEN_PLAIN, TOKEN_ODD } token_kind;

typedef struct bpe_token {
    uint32_t offset; /* into bytes */
    uint32_t length : 30;
    uint32_t kind : 2; /* token_kind */
} bpe_token;

typedef struct bpe_result {
    uint32_t rank; /* UINT32_MAX: no such merge */
    int32_t id;    /* what the pair becomes */
} bpe_result;

typedef struct bpe_merge {
    uint32_t left, right;
    bpe_result result;
} bpe_merge;

/* Hash tables hold 8 bits of the hash above a 24-bit index + 1 (0 = free): small enough to stay in the cache, and most
 * failing look-ups end there. */
typedef struct bpe {
    int n_ids;              /* highest id + 1 */
    int count;              /* ids that exist: HF's vocabulary size */
    bpe_token *token;       /* [n_ids] */
    _Atomic uint8_t *whole; /* [n_ids] does encoding the token's bytes give the token: 0 not known yet, 1 yes, 2 no */
    uint8_t *bytes;
    size_t n_bytes;
    uint32_t *slot; /* ids by bytes and kind */
    uint32_t slot_mask;
    bpe_merge *merge; /* in the order of the file */
    uint32_t merges;
    uint32_t *pair; /* merges by pair */
    uint32_t pair_mask;
    bpe_result *byte_pair; /* [65536] merges of two single bytes */
    int32_t byte_id[256];  /* -1: this byte has no token and is dropped, as HF does */
    uint32_t longest;      /* bytes of the longest plain token */
    bool ignore_merges;
} bpe;

/* Build from `model`. Warns W-TOK-BYTES when bytes have no token. Errors: E-TOK-MODEL (not a byte-level BPE this code
 * runs), E-TOK-VOCAB (a key without an id, duplicate, negative or far out of range ids), E-TOK-MERGE. */
NODISCARD bool bpe_build(bpe *m, const json *model, err *e);
void bpe_free(bpe *m);

/* Text in the byte alphabet to raw bytes appended to out; false (out unchanged) when some character is not in it. */
bool bpe_from_alphabet(buf *out, str text);
/* Id of a token by raw bytes and kind, or -1. */
int32_t bpe_find(const bpe *m, str bytes, token_kind kind);
static inline str bpe_bytes(const bpe *m, int32_t id) {
    return (str){ (const char *)m->bytes + m->token[id].offset, m->token[id].length };
}
static inline bool bpe_is(const bpe *m, int32_t id, str bytes, token_kind kind) {
    const bpe_token t = m->token[id];
    return t.length == bytes.n && t.kind == (uint32_t)kind && memcmp(m->bytes + t.offset, bytes.p, bytes.n) == 0;
}

/* ---- encoding ---- */

typedef struct bpe_symbol {
    uint32_t id;
    bpe_result with_next; /* merging with the next symbol */
    int32_t prev, next;   /* -1 = none */
} bpe_symbol;

/* A word seen before in the same text, and where its ids stand in the output. */
typedef struct bpe_memo {
    const uint8_t *p;
    uint32_t n, count;
    size_t at;
} bpe_memo;

/* Scratch of one encode call. */
typedef struct bpe_scratch {
    bpe_symbol *symbol;
    size_t symbols; /* capacity */
    uint64_t *heap; /* rank << 32 | position */
    size_t heap_n, heap_cap;
    bpe_memo *memo; /* direct-mapped; NULL = off */
    uint32_t memo_mask;
} bpe_scratch;

/* Room for remembering words of a text of n bytes. Words must stay where they are until bpe_forget. */
void bpe_remember(bpe_scratch *s, size_t n);
void bpe_forget(bpe_scratch *s);
void bpe_scratch_free(bpe_scratch *s);

/* Append the ids of one word (at most BPE_WORD_MAX bytes). O(n log n). */
void bpe_encode(const bpe *m, bpe_scratch *s, id_list *out, const uint8_t *p, size_t n);

/* ---- shared by the two halves ---- */

static inline uint64_t bpe_mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0x9E3779B97F4A7C15u;
    return x ^ x >> 29;
}

/* Hash of n bytes; a few multiplications, because almost every word and token is shorter than 16 bytes. */
static inline uint32_t bpe_hash(const uint8_t *p, size_t n) {
    uint64_t h = n * 0xD6E8FEB86659FD93u, w = 0;
    for (; n > 8; p += 8, n -= 8) {
        memcpy(&w, p, 8);
        h = bpe_mix(h ^ w) * 0xC2B2AE3D27D4EB4Fu;
    }
    w = 0;
    for (size_t i = 0; i < n; i++) w |= (uint64_t)p[i] << (8 * i);
    return (uint32_t)(bpe_mix(bpe_mix(h ^ w) * 0xC2B2AE3D27D4EB4Fu) >> 16);
}

static inline uint32_t bpe_pair_hash(uint32_t left, uint32_t right) {
    return (uint32_t)(bpe_mix(((uint64_t)left << 32 | right) * 0x9FB21C651E98DF25u) >> 20);
}

/* The hash's part of a slot; table positions come from its low bits. */
static inline uint32_t bpe_tag(uint32_t hash) { return hash & 0xFF000000u; }
static inline bool bpe_tag_is(uint32_t slot, uint32_t hash) { return ((slot ^ hash) & 0xFF000000u) == 0; }
static inline uint32_t bpe_index(uint32_t slot) { return (slot & 0xFFFFFFu) - 1; }

/* No sane table has runs of this length (load is at most one half); a table that does was made to. */
enum { BPE_PROBES = 512 };

static inline bpe_result bpe_pair(const bpe *m, uint32_t left, uint32_t right) {
    const uint32_t hash = bpe_pair_hash(left, right);
    for (uint32_t i = hash & m->pair_mask, x; (x = m->pair[i]) != 0; i = (i + 1) & m->pair_mask) {
        if (!bpe_tag_is(x, hash)) continue;
        const bpe_merge *y = &m->merge[bpe_index(x)];
        if (y->left == left && y->right == right) return y->result;
    }
    return (bpe_result){ UINT32_MAX, -1 };
}

#endif
