#include "text/tokenizer_added.h"

#include <stdlib.h>

#include "text/unicode.h"

/* ---- the trie: edges in one hash table. Contents are short (ADDED_CONTENT_MAX), so walking it from every place of a
 * text is linear in the text. ---- */

static uint32_t edge_slot(const token_trie *t, uint64_t key) {
    uint32_t i = (uint32_t)((key * 0x9E3779B97F4A7C15u) >> 32) & t->edge_mask;
    while (t->edge[i].key && t->edge[i].key != key) i = (i + 1) & t->edge_mask;
    return i;
}

static uint32_t new_node(token_trie *t) {
    if (t->nodes == t->node_cap) {
        t->node_cap *= 2;
        t->token = xrealloc(t->token, t->node_cap * sizeof *t->token);
    }
    t->token[t->nodes] = -1;
    return t->nodes++;
}

void trie_init(token_trie *t) {
    *t = (token_trie){ .edge_mask = 255, .node_cap = 64, .only_first = -1 };
    t->edge = xcalloc((size_t)t->edge_mask + 1, sizeof *t->edge);
    t->token = xmalloc(t->node_cap * sizeof *t->token);
    new_node(t);
}

void trie_free(token_trie *t) {
    free(t->edge);
    free(t->token);
    t->edge = NULL;
    t->token = NULL;
}

static void grow_edges(token_trie *t) {
    trie_edge *old = t->edge;
    const uint32_t size = t->edge_mask + 1;
    t->edge_mask = 2 * size - 1;
    t->edge = xcalloc((size_t)t->edge_mask + 1, sizeof *t->edge);
    for (uint32_t i = 0; i < size; i++)
        if (old[i].key) t->edge[edge_slot(t, old[i].key)] = old[i];
    free(old);
}

static uint64_t edge_key(uint32_t node, uint8_t byte) { return ((uint64_t)node << 8 | byte) + 1; }

void trie_add(token_trie *t, str s, int32_t token) {
    uint32_t node = 0;
    for (size_t k = 0; k < s.n; k++) {
        const uint64_t key = edge_key(node, (uint8_t)s.p[k]);
        uint32_t i = edge_slot(t, key);
        if (!t->edge[i].key) {
            if (2 * ++t->edges > t->edge_mask) {
                grow_edges(t);
                i = edge_slot(t, key);
            }
            t->edge[i] = (trie_edge){ key, new_node(t) };
        }
        node = t->edge[i].child;
    }
    t->token[node] = token;
    t->first[(uint8_t)s.p[0]] = true;
    int n = 0;
    for (int c = 0; c < 256; c++) {
        if (!t->first[c]) continue;
        n++;
        t->only_first = c;
    }
    if (n != 1) t->only_first = -1;
}

/* Longest token that begins at p: its length, or 0. */
static size_t longest_at(const token_trie *t, const char *p, size_t n, int32_t *token) {
    uint32_t node = 0;
    size_t best = 0;
    for (size_t k = 0; k < n; k++) {
        const trie_edge *x = &t->edge[edge_slot(t, edge_key(node, (uint8_t)p[k]))];
        if (!x->key) break;
        node = x->child;
        if (t->token[node] < 0) continue;
        *token = t->token[node];
        best = k + 1;
    }
    return best;
}

/* The next token at or behind `at`: its length (0 = none) and place. */
static size_t next_token(const token_trie *t, str text, size_t at, size_t *start, int32_t *token) {
    while (at < text.n) {
        if (t->only_first >= 0) {
            const char *hit = memchr(text.p + at, t->only_first, text.n - at);
            if (!hit) return 0;
            at = (size_t)(hit - text.p);
        } else {
            while (at < text.n && !t->first[(uint8_t)text.p[at]]) at++;
            if (at == text.n) return 0;
        }
        const size_t len = longest_at(t, text.p + at, text.n - at, token);
        if (len) return *start = at, len;
        at++;
    }
    return 0;
}

/* ---- flags ---- */

static uint32_t code_before(str text, size_t at) {
    size_t i = at - 1, len;
    while (i && ((uint8_t)text.p[i] & 0xC0) == 0x80) i--;
    return utf8_get((const uint8_t *)text.p + i, &len);
}

static bool is_alone(str text, size_t start, size_t end) {
    size_t len;
    if (start && unicode_is_word(code_before(text, start))) return false;
    return end == text.n || !unicode_is_word(utf8_get((const uint8_t *)text.p + end, &len));
}

static size_t spaces_before(str text, size_t at, size_t floor) {
    while (at > floor && unicode_is_space(code_before(text, at))) {
        at--;
        while (((uint8_t)text.p[at] & 0xC0) == 0x80) at--;
    }
    return at;
}

static size_t spaces_behind(str text, size_t at) {
    for (size_t len; at < text.n && unicode_is_space(utf8_get((const uint8_t *)text.p + at, &len));) at += len;
    return at;
}

bool added_split(const token_trie *t, const added_token *v, str text, const added_sink *sink, err *e) {
    size_t done = 0;                       /* handed on up to here */
    size_t spaces_from = 1, spaces_to = 0; /* the last run of spaces that was skipped: looked at once only */
    if (t->nodes > 1 && !sink->no_added) {
        int32_t token;
        for (size_t at = 0, start, len; (len = next_token(t, text, at, &start, &token)) != 0; at = start + len) {
            const added_token *a = &v[token];
            size_t from = start, to = start + len;
            if (a->special && sink->no_special) continue;
            if (a->single_word && !is_alone(text, start, to)) continue;
            if (a->lstrip) from = spaces_before(text, start, done < start ? done : start);
            if (a->lstrip && from < done) from = done;
            if (a->rstrip) {
                if (to < spaces_from || to > spaces_to) {
                    spaces_from = to;
                    spaces_to = spaces_behind(text, to);
                }
                to = spaces_to;
            }
            if (from >= to) continue; /* the token before has taken all of it */
            if (done < from && !sink->text(sink->ctx, (str){ text.p + done, from - done }, e)) return false;
            sink->token(sink->ctx, a->id);
            done = to;
        }
    }
    return done >= text.n || sink->text(sink->ctx, str_skip(text, done), e);
}
