#include "text/tokenizer.h"

#include <stdlib.h>

#include "text/tokenizer_internal.h"
#include "text/unicode.h"

void ids_add(id_list *a, int32_t id) {
    if (UNLIKELY(a->n == a->cap)) {
        a->cap = a->cap ? 2 * a->cap : 32;
        a->v = xrealloc(a->v, a->cap * sizeof *a->v);
    }
    a->v[a->n++] = id;
}

void ids_free(id_list *a) {
    free(a->v);
    *a = (id_list){ 0 };
}

/* ---- encoding ---- */

typedef struct encoder {
    const tokenizer *t;
    id_list *out;
    bpe_scratch scratch;
    buf nfc; /* the current stretch between added tokens, if NFC changed it */
    added_sink inner;
} encoder;

static void on_piece(void *ctx, str piece) {
    encoder *x = ctx;
    bpe_encode(&x->t->model, &x->scratch, x->out, (const uint8_t *)piece.p, piece.n);
}

static void on_token(void *ctx, int32_t id) { ids_add(((encoder *)ctx)->out, id); }

/* Normalized text without any added token. */
static bool on_plain(void *ctx, str text, err *e) {
    encoder *x = ctx;
    return pretok_run(x->t->pre, text, on_piece, x, e);
}

/* Text as given, without the added tokens that are matched there. */
static bool on_text(void *ctx, str text, err *e) {
    encoder *x = ctx;
    if (x->t->nfc) {
        if (x->nfc.n) {
            buf_clear(&x->nfc);
            bpe_forget(&x->scratch);
        }
        if (unicode_nfc_append(&x->nfc, text)) text = buf_view(&x->nfc);
    }
    return added_split(&x->t->normalized, x->t->added, text, &x->inner, e);
}

static bool encode_valid(const tokenizer *t, id_list *out, str text, const encode_options *o, err *e) {
    encoder x = { .t = t, .out = out };
    x.inner = (added_sink){ on_plain, on_token, &x, o->no_special, o->no_added };
    const added_sink outer = { on_text, on_token, &x, o->no_special, o->no_added };
    if (!pretok_rewrites(t->pre)) bpe_remember(&x.scratch, text.n);
    const bool ok = added_split(&t->raw, t->added, text, &outer, e);
    bpe_scratch_free(&x.scratch);
    buf_free(&x.nfc);
    return ok;
}

bool tokenizer_encode(const tokenizer *t, id_list *out, str text, const encode_options *o, err *e) {
    const encode_options none = { 0 };
    const size_t before = out->n, valid = utf8_valid(text);
    buf replaced = { 0 };
    if (!o) o = &none;
    if (text.n > BPE_WORD_MAX / 3)
        return fail(e, ERR_INPUT, "E-TEXT-SIZE", "text of %zu bytes: at most %d can be tokenized at once", text.n,
                    BPE_WORD_MAX / 3);
    if (valid < text.n && !o->lossy)
        return fail(e, ERR_INPUT, "E-TEXT-UTF8",
                    "the text is not valid UTF-8 at byte %zu (fix it, or replace such bytes with "
                    "--lossy)",
                    valid);
    if (valid < text.n) {
        utf8_replace(&replaced, text);
        text = buf_view(&replaced);
    }
    if (o->bos && t->bos >= 0) ids_add(out, t->bos);
    const bool ok = encode_valid(t, out, text, o, e);
    buf_free(&replaced);
    if (!ok) out->n = before;
    return ok;
}

/* ---- ids ---- */

static const added_token *added_of(const tokenizer *t, int32_t id) {
    if (id < 0 || id >= t->vocab || t->added_at[id] == 0) return NULL;
    return &t->added[t->added_at[id] - 1];
}

static bool in_model(const tokenizer *t, int32_t id) {
    return id >= 0 && id < t->model.n_ids && t->model.token[id].kind != TOKEN_ABSENT;
}

int tokenizer_vocab(const tokenizer *t) { return t->vocab; }

str tokenizer_bytes(const tokenizer *t, int32_t id) {
    const added_token *a = added_of(t, id);
    if (a) return a->bytes;
    return in_model(t, id) ? bpe_bytes(&t->model, id) : STR("");
}

bool tokenizer_is_special(const tokenizer *t, int32_t id) {
    const added_token *a = added_of(t, id);
    return a && a->special;
}

int tokenizer_turns(const tokenizer *t, int marks[TOKENIZER_MAX_TURNS], const int32_t *v, int n) {
    int all = 0, found = 0;
    if (n == 0 || !tokenizer_is_special(t, v[0])) return 0;
    for (int i = 1; i < n; i++) all += v[i] == v[0];
    for (int i = 1; i < n; i++)
        if (v[i] == v[0] && all-- <= TOKENIZER_MAX_TURNS) marks[found++] = i;
    return found;
}

bool tokenizer_exists(const tokenizer *t, int32_t id) { return added_of(t, id) || in_model(t, id); }

static str added_key(const void *ctx, uint32_t index) { return ((const tokenizer *)ctx)->added[index].content; }

int32_t tokenizer_find(const tokenizer *t, str token) {
    const uint32_t i = strtab_get(&t->by_content, token, added_key, t);
    if (i != STRTAB_NONE) return t->added[i].id;
    return bpe_find(&t->model, token, TOKEN_PLAIN);
}

/* ---- decoding ---- */

bool tokenizer_decode(const tokenizer *t, buf *out, const int32_t *v, size_t n, bool skip_special, err *e) {
    const size_t before = out->n;
    for (size_t i = 0; i < n; i++) {
        if (!tokenizer_exists(t, v[i])) {
            out->n = before;
            if (out->p) out->p[before] = 0;
            return fail(e, ERR_INPUT, "E-TOK-ID", "token id %d at place %zu does not exist (ids are below %d)",
                        (int)v[i], i, t->vocab);
        }
        if (skip_special && tokenizer_is_special(t, v[i])) continue;
        buf_str(out, tokenizer_bytes(t, v[i]));
    }
    return true;
}

/* Emit from d->held what is decided: whole sequences and invalid parts. */
static void detok_settle(detok *d, buf *out) {
    while (d->n) {
        const int k = utf8_step(d->held, (size_t)d->n);
        if (k == 0) return;
        const int len = k > 0 ? k : -k;
        if (k > 0)
            buf_add(out, d->held, (size_t)len);
        else
            buf_add(out, "\xEF\xBF\xBD", 3);
        d->n -= len;
        memmove(d->held, d->held + len, (size_t)d->n);
    }
}

void detok_push(const tokenizer *t, detok *d, int32_t id, bool skip_special, buf *out) {
    if (skip_special && tokenizer_is_special(t, id)) return;
    str s = tokenizer_bytes(t, id);
    while (s.n) {
        if (d->n == 0) {
            const size_t ok = utf8_valid(s);
            buf_add(out, s.p, ok);
            s = str_skip(s, ok);
            if (s.n == 0) return;
        }
        d->held[d->n++] = (uint8_t)s.p[0]; /* an unfinished sequence has at most 3 bytes: there is room */
        s = str_skip(s, 1);
        detok_settle(d, out);
    }
}

void detok_end(detok *d, buf *out) {
    if (d->n) buf_add(out, "\xEF\xBF\xBD", 3); /* what is held is one unfinished sequence */
    d->n = 0;
}

void tokenizer_close(tokenizer *t) {
    if (!t) return;
    bpe_free(&t->model);
    pretok_close(t->pre);
    trie_free(&t->raw);
    trie_free(&t->normalized);
    arena_free(&t->mem);
    strtab_free(&t->by_content);
    free(t->added);
    free(t->added_at);
    free(t);
}
