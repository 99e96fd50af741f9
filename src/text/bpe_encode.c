/* Merging one word. The result is HF's: again and again the pair of lowest rank, the leftmost among equals. */
#include <stdlib.h>

#include "text/bpe.h"

/* Words up to SHORT bytes are merged by searching the lowest rank each time, longer ones with a heap. */
enum { SHORT = 40, MEMO_WORD_MAX = 128, MEMO_MIN_TEXT = 1024, MEMO_MAX = 1 << 13 };

/* ---- remembered words ---- */

void bpe_remember(bpe_scratch *s, size_t n) {
    if (s->memo || n < MEMO_MIN_TEXT) return;
    uint32_t size = 64;
    while (size < MEMO_MAX && size < n / 16) size *= 2;
    s->memo = xcalloc(size, sizeof *s->memo);
    s->memo_mask = size - 1;
}

void bpe_forget(bpe_scratch *s) {
    if (s->memo) memset(s->memo, 0, ((size_t)s->memo_mask + 1) * sizeof *s->memo);
}

void bpe_scratch_free(bpe_scratch *s) {
    free(s->symbol);
    free(s->heap);
    free(s->memo);
    *s = (bpe_scratch){ 0 };
}

/* ---- short words ---- */

/* Arrays move together, so that the search for the lowest rank runs over contiguous memory. */
typedef struct short_word {
    uint32_t id[SHORT], rank[SHORT];
    int32_t merged[SHORT];
    int n;
} short_word;

static inline void set_pair(short_word *w, int i, bpe_result r) {
    w->rank[i] = r.rank;
    w->merged[i] = r.id;
}

static int lowest(const short_word *w) {
    int best = 0;
    for (int i = 1; i + 1 < w->n; i++)
        if (w->rank[i] < w->rank[best]) best = i;
    return best;
}

static void merge_short(const bpe *m, id_list *out, const uint8_t *p, size_t n) {
    short_word w;
    w.n = 0;
    for (size_t i = 0, last = 0; i < n; i++) {
        if (UNLIKELY(m->byte_id[p[i]] < 0)) continue;
        w.id[w.n] = (uint32_t)m->byte_id[p[i]];
        if (w.n) set_pair(&w, w.n - 1, m->byte_pair[last << 8 | p[i]]);
        last = p[i];
        w.n++;
    }
    while (w.n > 1) {
        const int i = lowest(&w);
        if (w.rank[i] == UINT32_MAX) break;
        w.id[i] = (uint32_t)w.merged[i];
        w.n--;
        for (int k = i + 1; k < w.n; k++) {
            w.id[k] = w.id[k + 1];
            w.rank[k] = w.rank[k + 1];
            w.merged[k] = w.merged[k + 1];
        }
        if (i + 1 < w.n) set_pair(&w, i, bpe_pair(m, w.id[i], w.id[i + 1]));
        if (i) set_pair(&w, i - 1, bpe_pair(m, w.id[i - 1], w.id[i]));
    }
    for (int i = 0; i < w.n; i++) ids_add(out, (int32_t)w.id[i]);
}

/* ---- long words: symbols in a list, candidate merges in a heap; entries that no longer hold are skipped ---- */

static void sift_down(uint64_t *h, size_t n, size_t i) {
    const uint64_t x = h[i];
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && h[c + 1] < h[c]) c++;
        if (h[c] >= x) break;
        h[i] = h[c];
    }
    h[i] = x;
}

static void push(bpe_scratch *s, uint64_t x) {
    if (s->heap_n == s->heap_cap) {
        s->heap_cap = s->heap_cap ? 2 * s->heap_cap : 256;
        s->heap = xrealloc(s->heap, s->heap_cap * sizeof *s->heap);
    }
    size_t i = s->heap_n++;
    for (; i && s->heap[(i - 1) / 2] > x; i = (i - 1) / 2) s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = x;
}

static uint64_t pop(bpe_scratch *s) {
    const uint64_t top = s->heap[0];
    s->heap[0] = s->heap[--s->heap_n];
    if (s->heap_n) sift_down(s->heap, s->heap_n, 0);
    return top;
}

static size_t fill_symbols(const bpe *m, bpe_scratch *s, const uint8_t *p, size_t n) {
    size_t k = 0;
    if (s->symbols < n) {
        s->symbols = n;
        s->symbol = xrealloc(s->symbol, n * sizeof *s->symbol);
    }
    for (size_t i = 0; i < n; i++) {
        if (m->byte_id[p[i]] < 0) continue;
        s->symbol[k] = (bpe_symbol){ (uint32_t)m->byte_id[p[i]], { UINT32_MAX, -1 }, (int32_t)k - 1, -1 };
        if (k) s->symbol[k - 1].next = (int32_t)k;
        k++;
    }
    return k;
}

static uint64_t heap_entry(const bpe_symbol *x, int32_t at) { return (uint64_t)x->with_next.rank << 32 | (uint32_t)at; }

static void pair_at(const bpe *m, bpe_scratch *s, int32_t at) {
    bpe_symbol *x = &s->symbol[at];
    x->with_next = bpe_pair(m, x->id, s->symbol[x->next].id);
    if (x->with_next.rank != UINT32_MAX) push(s, heap_entry(x, at));
}

static void merge_long(const bpe *m, bpe_scratch *s, id_list *out, const uint8_t *p, size_t n) {
    const size_t count = fill_symbols(m, s, p, n);
    bpe_symbol *v = s->symbol;
    s->heap_n = 0;
    for (size_t i = 0; i + 1 < count; i++) pair_at(m, s, (int32_t)i);
    while (s->heap_n) {
        const uint64_t top = pop(s);
        const int32_t at = (int32_t)(uint32_t)top;
        bpe_symbol *x = &v[at];
        if (x->with_next.rank != (uint32_t)(top >> 32)) continue;
        const int32_t gone = x->next;
        x->id = (uint32_t)x->with_next.id;
        x->with_next = (bpe_result){ UINT32_MAX, -1 };
        x->next = v[gone].next;
        v[gone].with_next = (bpe_result){ UINT32_MAX, -1 };
        if (x->next >= 0) {
            v[x->next].prev = at;
            pair_at(m, s, at);
        }
        if (x->prev >= 0) pair_at(m, s, x->prev);
    }
    if (count)
        for (int32_t i = 0; i >= 0; i = v[i].next) ids_add(out, (int32_t)v[i].id);
}

/* ---- words ---- */

static void merge(const bpe *m, bpe_scratch *s, id_list *out, const uint8_t *p, size_t n) {
    if (n <= SHORT)
        merge_short(m, out, p, n);
    else
        merge_long(m, s, out, p, n);
}

/* A word that is a token: usually, but not always, encoding it gives that token. Found out once for each token; threads
 * that find out at the same time store the same value. */
static bool encode_token(const bpe *m, bpe_scratch *s, id_list *out, const uint8_t *p, size_t n, int32_t id) {
    const uint8_t known = m->ignore_merges ? 1 : atomic_load_explicit(&m->whole[id], memory_order_relaxed);
    if (known == 1) return ids_add(out, id), true;
    if (known == 2) return false;
    const size_t before = out->n;
    merge(m, s, out, p, n);
    const bool whole = out->n == before + 1 && out->v[before] == id;
    atomic_store_explicit(&m->whole[id], whole ? 1 : 2, memory_order_relaxed);
    return true;
}

static int32_t find_token(const bpe *m, const uint8_t *p, size_t n, uint32_t hash) {
    for (uint32_t i = hash & m->slot_mask, s; (s = m->slot[i]) != 0; i = (i + 1) & m->slot_mask)
        if (bpe_tag_is(s, hash) && bpe_is(m, (int32_t)bpe_index(s), (str){ (const char *)p, n }, TOKEN_PLAIN))
            return (int32_t)bpe_index(s);
    return -1;
}

void bpe_encode(const bpe *m, bpe_scratch *s, id_list *out, const uint8_t *p, size_t n) {
    if (n == 1) {
        if (m->byte_id[p[0]] >= 0) ids_add(out, m->byte_id[p[0]]);
        return;
    }
    const bool memo = s->memo && n <= MEMO_WORD_MAX;
    if (!memo && n > m->longest) {
        merge(m, s, out, p, n);
        return;
    }
    const uint32_t hash = bpe_hash(p, n);
    bpe_memo *seen = memo ? &s->memo[(hash >> 8) & s->memo_mask] : NULL;
    if (seen && seen->n == n && memcmp(seen->p, p, n) == 0) {
        for (uint32_t i = 0; i < seen->count; i++) ids_add(out, out->v[seen->at + i]);
        return;
    }
    const size_t before = out->n;
    const int32_t id = n <= m->longest ? find_token(m, p, n, hash) : -1;
    if (id < 0 || !encode_token(m, s, out, p, n, id)) merge(m, s, out, p, n);
    if (seen) *seen = (bpe_memo){ p, (uint32_t)n, (uint32_t)(out->n - before), before };
}
