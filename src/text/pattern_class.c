/* Sets to classes: the code points that no set of the pattern tells apart. */
#include <stdlib.h>

#include "text/pattern.h"

enum { EDGES_MAX = 16384 };

typedef struct edges {
    uint32_t v[EDGES_MAX];
    size_t n;
} edges;

static bool add_edge(edges *x, uint32_t code) {
    if (x->n == EDGES_MAX) return false;
    x->v[x->n++] = code;
    return true;
}

static int by_value(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Every code point at which the membership in some set may change. */
static bool collect_edges(edges *x, const pattern_tree *t) {
    static const uint32_t spaces[] = { 9,      14,     0x20,   0x21,   0x85,   0x86,   0xA0,   0xA1,   0x1680, 0x1681,
                                       0x2000, 0x200B, 0x2028, 0x202A, 0x202F, 0x2030, 0x205F, 0x2060, 0x3000, 0x3001 };
    static const uint32_t word_extra[] = { 0xB2, 0xB4, 0xB9, 0xBA, 0xBC, 0xBF, 0x200C, 0x200E };
    bool ok = add_edge(x, 0), gc = false, word = false, space = false;
    for (int i = 0; i < t->items; i++) {
        const set_item *m = &t->item[i];
        gc |= m->kind == ITEM_GC;
        word |= m->kind == ITEM_WORD;
        space |= m->kind == ITEM_SPACE;
        if (m->kind == ITEM_RANGE)
            ok = ok && add_edge(x, m->lo) && (m->hi + 1 == UNICODE_CODES || add_edge(x, m->hi + 1));
    }
    uint32_t first, end;
    int category;
    bool in;
    for (size_t i = 0; ok && gc && i < unicode_gc_runs(); i++) {
        unicode_gc_run(i, &first, &end, &category);
        ok = add_edge(x, first);
    }
    for (size_t i = 0; ok && word && i < unicode_word_runs(); i++) {
        unicode_word_run(i, &first, &end, &in);
        ok = add_edge(x, first);
    }
    for (size_t i = 0; ok && word && i < ARRAY_LEN(word_extra); i++) ok = add_edge(x, word_extra[i]);
    for (size_t i = 0; ok && space && i < ARRAY_LEN(spaces); i++) ok = add_edge(x, spaces[i]);
    qsort(x->v, x->n, sizeof *x->v, by_value);
    return ok;
}

/* \w of the split engine has no joiners, unlike the added-token matcher's. Outside brackets it also holds the
 * superscripts and fractions of Latin-1. */
static bool is_split_word(uint32_t c, bool in_brackets) {
    if (c == 0x200C || c == 0x200D) return false;
    return unicode_is_word(c) || (!in_brackets && (c == 0xB2 || c == 0xB3 || c == 0xB9 || (c >= 0xBC && c <= 0xBE)));
}

static bool holds(const set_item *m, uint32_t code, int category) {
    bool in = false;
    switch ((item_kind)m->kind) {
    case ITEM_RANGE: in = code >= m->lo && code <= m->hi; break;
    case ITEM_GC: in = m->lo >> category & 1; break;
    case ITEM_SPACE: in = unicode_is_space(code); break;
    case ITEM_WORD: in = is_split_word(code, m->lo == 1); break;
    }
    return in != m->negative;
}

static uint64_t sets_of(const pattern_tree *t, uint32_t code, int category) {
    uint64_t mask = 0;
    for (int k = 0; k < t->sets; k++) {
        const char_set *s = &t->set[k];
        bool in = false;
        for (int i = 0; i < s->count && !in; i++) in = holds(&t->item[s->first + i], code, category);
        if (in != s->negative) mask |= 1ull << k;
    }
    return mask;
}

/* A row of the table that is all one class, shared by every block of that class. */
static void uniform_row(class_map *m, int *shared, unsigned class, uint16_t *row) {
    if (shared[class] < 0) {
        shared[class] = m->rows;
        memset(m->row[m->rows++], (int)class, 256);
    }
    *row = (uint16_t)shared[class];
}

/* Class `class` for [first, end), which continues where the last call ended. */
static void fill(class_map *m, int *shared, int *open, uint32_t first, uint32_t end, unsigned class) {
    while (first < end) {
        const uint32_t block = first >> 8, stop = min_i64(end, (int64_t)(block + 1) << 8);
        if (stop - first == 256) {
            uniform_row(m, shared, class, &m->block[block]);
        } else {
            if ((first & 255) == 0) *open = m->rows++;
            m->block[block] = (uint16_t)*open;
            memset(m->row[*open] + (first & 255), (int)class, stop - first);
        }
        first = stop;
    }
}

bool class_map_build(class_map *m, const pattern_tree *t, err *e) {
    edges *x = xmalloc(sizeof *x);
    x->n = 0;
    int shared[PATTERN_CLASSES + 1], open = 0;
    memset(shared, -1, sizeof shared);
    memset(m, 0, sizeof *m);
    bool ok = collect_edges(x, t);
    /* At most one mixed row per edge and one uniform row per class. */
    m->row = xmalloc((x->n + PATTERN_CLASSES + 1) * sizeof *m->row);
    size_t run = 0;
    for (size_t i = 0; ok && i < x->n; i++) {
        const uint32_t code = x->v[i], end = i + 1 < x->n ? x->v[i + 1] : UNICODE_CODES;
        uint32_t first, stop;
        int category;
        if (end == code) continue;
        while (unicode_gc_run(run, &first, &stop, &category), stop <= code) run++;
        const uint64_t mask = sets_of(t, code, category);
        int class = 0;
        while (class < m->classes && m->members[class] != mask) class ++;
        if (class == PATTERN_CLASSES)
            ok = false;
        else if (class == m->classes)
            m->members[m->classes++] = mask;
        if (ok) fill(m, shared, &open, code, end, (unsigned)class);
    }
    free(x);
    if (ok) return m->row = xrealloc(m->row, (size_t)m->rows * sizeof *m->row), true;
    class_map_free(m);
    return fail(e, ERR_INPUT, "E-TOK-PATTERN", "tokenizer.json: split pattern: too many different characters");
}

void class_map_free(class_map *m) {
    free(m->row);
    m->row = NULL;
}
