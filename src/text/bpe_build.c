/* Vocabulary and merges from JSON to tables. This is most of the load time of a 250,000-token file: no allocation for
 * single tokens, one hash for each key, and merges resolved with two look-ups because results mostly come in order. The
 * tables are larger than the caches, so tokens and merges are taken a batch at a time: what one step of the batch will
 * read is requested in the step before. */
#include <stdlib.h>

#include "base/log.h"
#include "text/bpe.h"
#include "text/unicode.h"

enum { BATCH = 64 };

/* One part of a merge: raw bytes, or the text itself when it is not in the alphabet. */
typedef struct half {
    str text;
    size_t at, n; /* in builder.raw */
    token_kind kind;
    uint32_t hash;
} half;

typedef struct pending {
    half left, right; /* side by side in builder.raw */
    uint32_t rank, hash;
    bpe_merge merge;
} pending;

typedef struct builder {
    bpe *m;
    pending batch[BATCH];
    int n;
    buf raw;       /* bytes of the batch */
    int32_t guess; /* likely result of the next merge */
    err *e;
} builder;

static bool bad(err *e, const char *id, const char *what, str name) {
    return fail(e, ERR_INPUT, id, "tokenizer.json: %s: \"" STR_FMT "\"", what, STR_ARG(name));
}

/* ---- the byte alphabet ---- */

/* Byte of a character of the alphabet (code < 324), or -1. Bytes that print stand for themselves; the others, in order,
 * are U+0100 and up. */
static int alphabet_byte(uint32_t code) {
    if ((code >= 33 && code <= 126) || (code >= 161 && code <= 172) || (code >= 174 && code <= 255)) return (int)code;
    if (code < 256 || code >= 324) return -1;
    const int k = (int)code - 256; /* 0..32, 127..160, 173 */
    return k <= 32 ? k : k <= 66 ? k + 94 : 173;
}

/* Write at most text.n raw bytes; returns how many, or -1. */
static ptrdiff_t decode_alphabet(uint8_t *out, str text) {
    const uint8_t *p = (const uint8_t *)text.p, *end = p + text.n;
    uint8_t *o = out;
    while (p < end) {
        if (*p > 32 && *p < 127) {
            *o++ = *p++;
            continue;
        }
        if (*p < 0xC2 || *p > 0xC5) return -1;
        const int b = alphabet_byte((uint32_t)(*p & 31) << 6 | (p[1] & 63u));
        if (b < 0) return -1;
        *o++ = (uint8_t)b;
        p += 2;
    }
    return o - out;
}

bool bpe_from_alphabet(buf *out, str text) {
    buf_reserve(out, text.n + 1);
    const ptrdiff_t n = decode_alphabet((uint8_t *)out->p + out->n, text);
    if (n < 0) return false;
    out->n += (size_t)n;
    out->p[out->n] = 0;
    return true;
}

/* ---- vocabulary ---- */

/* The id, or -1 and the slot where it belongs (UINT32_MAX: the table is made to collide). */
static int32_t find_hashed(const bpe *m, str bytes, token_kind kind, uint32_t hash, uint32_t *free_slot) {
    uint32_t i = hash & m->slot_mask;
    for (int k = 0; k < BPE_PROBES; k++, i = (i + 1) & m->slot_mask) {
        const uint32_t s = m->slot[i];
        if (s == 0) return *free_slot = i, -1;
        if (bpe_tag_is(s, hash) && bpe_is(m, (int32_t)bpe_index(s), bytes, kind)) return (int32_t)bpe_index(s);
    }
    return *free_slot = UINT32_MAX, -1;
}

int32_t bpe_find(const bpe *m, str bytes, token_kind kind) {
    uint32_t ignored;
    return find_hashed(m, bytes, kind, bpe_hash((const uint8_t *)bytes.p, bytes.n), &ignored);
}

/* Highest id and total key bytes. Ids may have gaps, but the tables must stay in proportion to the file. */
static bool measure(bpe *m, const json *vocab, size_t *text, err *e) {
    const int64_t limit = min_i64(4 * (int64_t)vocab->n + 65536, BPE_INDEX_MAX);
    int64_t highest = -1;
    *text = 0;
    for (uint32_t i = 0; i < vocab->n; i++) {
        const json_member *v = &vocab->u.members[i];
        if (v->value.type != JSON_INT || v->value.u.i < 0)
            return bad(e, "E-TOK-VOCAB", "the id of a token is no natural number", v->key);
        if (v->value.u.i >= limit)
            return bad(e, "E-TOK-VOCAB", "the id of a token is far above the number of tokens", v->key);
        highest = max_i64(highest, v->value.u.i);
        *text += v->key.n;
    }
    if (vocab->n == 0 || *text >= 1u << 30)
        return fail(e, ERR_INPUT, "E-TOK-VOCAB", "tokenizer.json: the vocabulary is empty or too large");
    m->n_ids = (int)highest + 1;
    m->count = (int)vocab->n;
    return true;
}

/* A cleared table with room for n entries at a load of one half. */
static uint32_t *new_table(size_t n, uint32_t *mask) {
    uint32_t size = 16;
    while (size < 2 * n) size *= 2;
    *mask = size - 1;
    return calloc(size, sizeof(uint32_t));
}

static bool allocate(bpe *m, size_t text, err *e) {
    const size_t n = (size_t)m->n_ids;
    m->token = calloc(n, sizeof *m->token);
    m->whole = calloc(n, 1);
    m->bytes = malloc(text + 1);
    m->slot = new_table((size_t)m->count, &m->slot_mask);
    if (m->token && m->whole && m->bytes && m->slot) return true;
    return fail(e, ERR_MACHINE, "E-TEXT-MEMORY", "no memory for a vocabulary of %d tokens", m->count);
}

typedef struct new_token {
    str key, bytes;
    token_kind kind;
    uint32_t hash;
    int32_t id;
} new_token;

/* Raw bytes behind those that are there, at most as many as the key has (measure counted them). */
static new_token decode_token(bpe *m, const json_member *v) {
    uint8_t *to = m->bytes + m->n_bytes;
    new_token t = { .key = v->key, .kind = TOKEN_PLAIN, .id = (int32_t)v->value.u.i };
    ptrdiff_t n = decode_alphabet(to, v->key);
    if (n < 0) {
        t.kind = TOKEN_ODD;
        memcpy(to, v->key.p, (size_t)(n = (ptrdiff_t)v->key.n));
    }
    t.bytes = (str){ (const char *)to, (size_t)n };
    t.hash = bpe_hash(to, (size_t)n);
    m->n_bytes += (size_t)n;
    __builtin_prefetch(&m->slot[t.hash & m->slot_mask], 1);
    return t;
}

static bool add_token(bpe *m, const new_token *t, err *e) {
    bpe_token *to = &m->token[t->id];
    uint32_t slot;
    if (to->kind != TOKEN_ABSENT) return bad(e, "E-TOK-VOCAB", "two tokens have one id", t->key);
    if (find_hashed(m, t->bytes, t->kind, t->hash, &slot) >= 0)
        return bad(e, "E-TOK-VOCAB", "the vocabulary names a token twice", t->key);
    if (slot == UINT32_MAX) return bad(e, "E-TOK-VOCAB", "the vocabulary is made to collide", t->key);
    m->slot[slot] = bpe_tag(t->hash) | ((uint32_t)t->id + 1);
    *to = (bpe_token){ (uint32_t)((const uint8_t *)t->bytes.p - m->bytes), (uint32_t)t->bytes.n & 0x3FFFFFFF, t->kind };
    if (t->kind == TOKEN_PLAIN && to->length > m->longest) m->longest = to->length;
    return true;
}

static bool add_tokens(bpe *m, const json *vocab, err *e) {
    new_token batch[BATCH];
    for (uint32_t i = 0; i < vocab->n; i += BATCH) {
        const uint32_t n = vocab->n - i < BATCH ? vocab->n - i : BATCH;
        for (uint32_t k = 0; k < n; k++) batch[k] = decode_token(m, &vocab->u.members[i + k]);
        for (uint32_t k = 0; k < n; k++)
            if (!add_token(m, &batch[k], e)) return false;
    }
    return true;
}

static bool build_vocab(bpe *m, const json *vocab, bool has_unknown, err *e) {
    size_t text;
    if (!json_is(vocab, JSON_OBJECT))
        return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: model.vocab is missing or no object");
    if (!measure(m, vocab, &text, e) || !allocate(m, text, e) || !add_tokens(m, vocab, e)) return false;
    int missing = 0;
    for (int b = 0; b < 256; b++) {
        const char byte = (char)b;
        m->byte_id[b] = bpe_find(m, (str){ &byte, 1 }, TOKEN_PLAIN);
        missing += m->byte_id[b] < 0;
    }
    if (missing && has_unknown)
        return fail(e, ERR_INPUT, "E-TOK-MODEL",
                    "tokenizer.json: unk_token or byte_fallback with %d of 256 bytes missing from the "
                    "vocabulary is not supported",
                    missing);
    if (missing)
        log_say("W-TOK-BYTES", "tokenizer.json: %d of 256 bytes have no token; text with them loses them", missing);
    return true;
}

/* ---- merges ---- */

static half decode_half(builder *b, str text) {
    half h = { .text = text, .at = b->raw.n, .kind = TOKEN_PLAIN };
    if (!bpe_from_alphabet(&b->raw, text)) {
        h.kind = TOKEN_ODD;
        buf_str(&b->raw, text);
    }
    h.n = b->raw.n - h.at;
    h.hash = bpe_hash((const uint8_t *)b->raw.p + h.at, h.n);
    __builtin_prefetch(&b->m->slot[h.hash & b->m->slot_mask]);
    return h;
}

/* Request the token that the first slot names. */
static void expect_half(const bpe *m, const half *h) {
    const uint32_t s = m->slot[h->hash & m->slot_mask];
    if (s) __builtin_prefetch(&m->token[bpe_index(s)]);
}

static int32_t find_half(const builder *b, const half *h) {
    uint32_t ignored;
    return find_hashed(b->m, (str){ b->raw.p + h->at, h->n }, h->kind, h->hash, &ignored);
}

/* A pair that is there already takes the later rank, as in HF. */
static bool put_merge(bpe *m, const pending *x) {
    uint32_t i = x->hash & m->pair_mask;
    for (int k = 0; k < BPE_PROBES; k++, i = (i + 1) & m->pair_mask) {
        const uint32_t s = m->pair[i];
        bpe_merge *y = s ? &m->merge[bpe_index(s)] : &m->merge[m->merges++];
        if (s && (y->left != x->merge.left || y->right != x->merge.right)) continue;
        *y = x->merge;
        if (!s) m->pair[i] = bpe_tag(x->hash) | m->merges;
        return true;
    }
    return false;
}

/* Id of the token that a merge makes, or -1: the next one, if the file lists merges in the order of ids. */
static int32_t find_result(const builder *b, const pending *x, token_kind kind) {
    const bpe *m = b->m;
    buf joined = { 0 };
    str both = { b->raw.p + x->left.at, x->left.n + x->right.n };
    if (x->left.kind != x->right.kind) { /* one in raw bytes, one in text: the token is known by its text */
        buf_str(&joined, x->left.text);
        buf_str(&joined, x->right.text);
        both = buf_view(&joined);
    }
    const bool guessed = b->guess < m->n_ids && bpe_is(m, b->guess, both, kind);
    const int32_t id = guessed ? b->guess : bpe_find(m, both, kind);
    buf_free(&joined);
    return id;
}

static bool resolve(builder *b, pending *x) {
    const token_kind kind = x->left.kind == TOKEN_PLAIN && x->right.kind == TOKEN_PLAIN ? TOKEN_PLAIN : TOKEN_ODD;
    const int32_t l = find_half(b, &x->left), r = find_half(b, &x->right);
    if (l < 0 || r < 0)
        return bad(b->e, "E-TOK-MERGE", "a part of a merge is not in the vocabulary",
                   l < 0 ? x->left.text : x->right.text);
    const int32_t id = find_result(b, x, kind);
    if (id < 0) return bad(b->e, "E-TOK-MERGE", "the result of a merge is not in the vocabulary", x->left.text);
    b->guess = id + 1;
    x->merge = (bpe_merge){ (uint32_t)l, (uint32_t)r, { x->rank, kind == TOKEN_ODD ? -1 : id } };
    x->hash = bpe_pair_hash((uint32_t)l, (uint32_t)r);
    __builtin_prefetch(&b->m->pair[x->hash & b->m->pair_mask], 1);
    return true;
}

/* Enter the batch. */
static bool add_merges(builder *b) {
    for (int i = 0; i < b->n; i++) {
        expect_half(b->m, &b->batch[i].left);
        expect_half(b->m, &b->batch[i].right);
    }
    for (int i = 0; i < b->n; i++)
        if (!resolve(b, &b->batch[i])) return false;
    for (int i = 0; i < b->n; i++) {
        const pending *x = &b->batch[i];
        if (x->merge.result.id < 0) continue; /* no text leads to it */
        if (!put_merge(b->m, x)) return bad(b->e, "E-TOK-MERGE", "the merges are made to collide", x->left.text);
        if (x->left.n == 1 && x->right.n == 1)
            b->m->byte_pair[(uint8_t)b->raw.p[x->left.at] << 8 | (uint8_t)b->raw.p[x->right.at]] = x->merge.result;
    }
    b->n = 0;
    buf_clear(&b->raw);
    return true;
}

/* ["a", "b"] or "a b". */
static bool split_merge(const json *v, str *left, str *right) {
    if (v->type == JSON_ARRAY && v->n == 2 && v->u.items[0].type == JSON_STRING && v->u.items[1].type == JSON_STRING)
        return *left = json_str(&v->u.items[0]), *right = json_str(&v->u.items[1]), true;
    if (v->type != JSON_STRING) return false;
    const str s = json_str(v);
    const ptrdiff_t space = str_find(s, STR(" "));
    if (space < 0) return false;
    *left = (str){ s.p, (size_t)space };
    *right = str_skip(s, (size_t)space + 1);
    return str_find(*right, STR(" ")) < 0;
}

static bool read_merges(builder *b, const json *list) {
    uint32_t rank = 0;
    for (uint32_t i = 0; i < list->n; i++) {
        const json *v = &list->u.items[i];
        str left, right;
        if (v->type == JSON_STRING && str_starts(json_str(v), STR("#version"))) continue;
        /* HF refuses a mixture of the two forms, too. */
        if (v->type != list->u.items[0].type || !split_merge(v, &left, &right))
            return fail(b->e, ERR_INPUT, "E-TOK-MERGE", "tokenizer.json: merge %u is not a pair of tokens", i);
        pending *x = &b->batch[b->n++];
        x->left = decode_half(b, left);
        x->right = decode_half(b, right);
        x->rank = rank++;
        if (b->n == BATCH && !add_merges(b)) return false;
    }
    return add_merges(b);
}

static bool build_merges(bpe *m, const json *list, err *e) {
    if (!json_is(list, JSON_ARRAY))
        return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: model.merges is missing or no list");
    if (list->n > BPE_INDEX_MAX) return fail(e, ERR_INPUT, "E-TOK-MERGE", "tokenizer.json: too many merges");
    m->merge = malloc(((size_t)list->n + 1) * sizeof *m->merge);
    m->pair = new_table(list->n, &m->pair_mask);
    m->byte_pair = malloc(65536 * sizeof *m->byte_pair);
    if (!m->merge || !m->pair || !m->byte_pair)
        return fail(e, ERR_MACHINE, "E-TEXT-MEMORY", "no memory for %u merges", list->n);
    memset(m->byte_pair, 255, 65536 * sizeof *m->byte_pair);
    builder *b = xcalloc(1, sizeof *b);
    b->m = m;
    b->e = e;
    const bool ok = read_merges(b, list);
    buf_free(&b->raw);
    free(b);
    return ok;
}

/* ---- the model section ---- */

static bool is_off(const json *v) {
    return !v || v->type == JSON_NULL || v->type == JSON_FALSE || (v->type == JSON_STRING && v->n == 0) ||
           (json_is_number(v) && json_double(v) == 0);
}

bool bpe_build(bpe *m, const json *model, err *e) {
    static const char *const must_be_off[] = { "dropout", "continuing_subword_prefix", "end_of_word_suffix" };
    memset(m, 0, sizeof *m);
    const json *type = json_get(model, "type");
    if (type && !(type->type == JSON_STRING && str_is(json_str(type), "BPE")))
        return fail(e, ERR_INPUT, "E-TOK-MODEL",
                    "tokenizer.json: model type is not BPE (only byte-level BPE is supported)");
    for (size_t i = 0; i < ARRAY_LEN(must_be_off); i++)
        if (!is_off(json_get(model, must_be_off[i])))
            return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: model.%s is set, which is not supported",
                        must_be_off[i]);
    const json *ignore = json_get(model, "ignore_merges");
    if (ignore && ignore->type != JSON_NULL && !json_is_bool(ignore))
        return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: model.ignore_merges is neither true nor false");
    m->ignore_merges = json_is(ignore, JSON_TRUE);
    const bool unknown = !is_off(json_get(model, "unk_token")) || !is_off(json_get(model, "byte_fallback"));
    if (build_vocab(m, json_get(model, "vocab"), unknown, e) && build_merges(m, json_get(model, "merges"), e))
        return true;
    bpe_free(m);
    return false;
}

void bpe_free(bpe *m) {
    free(m->token);
    free(m->whole);
    free(m->bytes);
    free(m->slot);
    free(m->merge);
    free(m->pair);
    free(m->byte_pair);
    memset(m, 0, sizeof *m);
}
