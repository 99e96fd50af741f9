/* Direct scanner for patterns whose alternatives are fixed sequences and simple runs: the GPT-2, Llama-3 and Qwen
 * families. Ordered choice and greedy repetition only, so each rule needs at most one step back, and what a rule looks
 * at is what it (or a later rule at the same place) takes: linear time. Equal to the PCRE2 path by test. */
#include "text/pattern.h"

/* ---- recognition ---- */

static const pattern_node *node_at(const pattern_tree *t, int i) { return i < 0 ? NULL : &t->node[i]; }

/* Peel groups that hold one thing. */
static int unwrap(const pattern_tree *t, int i) {
    while (t->node[i].kind == NODE_CAT && t->node[t->node[i].child].next < 0) i = t->node[i].child;
    return i;
}

/* A single set, or a greedy repeat of one. */
static bool set_run(const pattern_tree *t, int i, uint32_t *bit, int *min, int *max) {
    i = unwrap(t, i);
    const pattern_node *n = &t->node[i];
    *min = *max = 1;
    if (n->kind == NODE_REPEAT) {
        if (n->mode != REPEAT_GREEDY) return false;
        *min = n->min;
        *max = n->max;
        n = &t->node[unwrap(t, n->child)];
    }
    if (n->kind != NODE_SET) return false;
    *bit = 1u << n->set;
    return true;
}

static bool add_literal(scanner *s, const pattern_tree *t, int cat) {
    if (s->literals == SCAN_LITERALS || t->node[cat].kind != NODE_CAT) return false;
    int n = 0;
    for (const pattern_node *c = node_at(t, t->node[cat].child); c; c = node_at(t, c->next)) {
        if (c->kind != NODE_SET || n == SCAN_LITERAL_MAX - 1) return false;
        s->literal[s->literals][n++] = 1u << c->set;
    }
    s->literal[s->literals++][n] = 0;
    return true;
}

static bool literal_rule(scanner *s, const pattern_tree *t, int i, scan_rule *r) {
    const int saved = s->literals;
    *r = (scan_rule){ .kind = RULE_LITERALS, .first = s->literals };
    bool ok = true;
    if (t->node[i].kind == NODE_CAT && t->node[unwrap(t, i)].kind == NODE_ALT) i = unwrap(t, i);
    if (t->node[i].kind == NODE_ALT) {
        for (int c = t->node[i].child; ok && c >= 0; c = t->node[c].next) ok = add_literal(s, t, c);
    } else {
        ok = add_literal(s, t, i);
    }
    r->count = s->literals - saved;
    if (!ok) s->literals = saved;
    return ok;
}

static bool subset(const class_map *m, uint32_t a, uint32_t b) {
    for (int c = 0; c < m->classes; c++)
        if ((m->members[c] & a) && !(m->members[c] & b)) return false;
    return true;
}

static bool complements(const class_map *m, uint32_t a, uint32_t b) {
    for (int c = 0; c < m->classes; c++)
        if (!(m->members[c] & a) == !(m->members[c] & b)) return false;
    return true;
}

/* prefix? run{1,max} tail*, with prefix and tail optional. */
static bool run_rule(const uint32_t *bit, const int *min, const int *max, int n, scan_rule *r) {
    int k = 0;
    *r = (scan_rule){ .kind = RULE_RUN };
    if (n > 1 && min[0] == 0 && max[0] == 1) r->prefix = bit[k++];
    if (min[k] != 1) return false;
    r->run = bit[k];
    r->max = max[k] == PATTERN_INF ? SIZE_MAX : (size_t)max[k];
    if (++k == n) return true;
    r->tail = bit[k];
    return k + 1 == n && min[k] == 0 && max[k] == PATTERN_INF;
}

static bool simple_rule(const pattern_tree *t, const class_map *m, int cat, scan_rule *r) {
    uint32_t bit[3] = { 0 };
    int min[3], max[3], n = 0;
    const pattern_node *look = NULL;
    const int single = unwrap(t, cat);
    const int begin = t->node[single].kind == NODE_CAT ? t->node[single].child : single;
    for (int c = begin; c >= 0; c = c == single ? -1 : t->node[c].next) {
        if (look) return false;
        if (t->node[c].kind == NODE_LOOK)
            look = &t->node[c];
        else if (n == 3 || !set_run(t, c, &bit[n], &min[n], &max[n]))
            return false;
        else
            n++;
    }
    if (look) {
        uint32_t other;
        int lo, hi;
        *r = (scan_rule){ .kind = RULE_LOOK, .run = bit[0] };
        return n == 1 && min[0] == 1 && max[0] == PATTERN_INF && look->negative && !look->behind &&
               set_run(t, look->child, &other, &lo, &hi) && lo == 1 && hi == 1 && complements(m, bit[0], other);
    }
    if (n == 2 && min[0] == 0 && max[0] == PATTERN_INF && min[1] == 1 && max[1] == PATTERN_INF) {
        *r = (scan_rule){ .kind = RULE_STAR_PLUS, .run = bit[0], .tail = bit[1] };
        return subset(m, bit[1], bit[0]);
    }
    return n > 0 && run_rule(bit, min, max, n, r);
}

/* What STAR_PLUS looked at in vain has to be taken by a later rule, or time would not be linear. */
static bool is_linear(const scanner *s) {
    for (int i = 0; i < s->rules; i++) {
        bool ok = s->rule[i].kind != RULE_STAR_PLUS;
        for (int k = i + 1; k < s->rules && !ok; k++)
            ok = s->rule[k].run == s->rule[i].run &&
                 (s->rule[k].kind == RULE_LOOK || (s->rule[k].kind == RULE_RUN && s->rule[k].max == SIZE_MAX));
        if (!ok) return false;
    }
    return true;
}

static uint32_t first_sets(const scanner *s, const scan_rule *r) {
    uint32_t bits = r->prefix | r->run;
    for (int k = 0; k < r->count; k++) bits |= s->literal[r->first + k][0];
    return bits; /* the tail of STAR_PLUS is part of its run */
}

bool scanner_build(scanner *s, const pattern_tree *t, const class_map *m) {
    memset(s, 0, sizeof *s);
    if (t->sets > 32) return false;
    const int root = t->root;
    const bool several = t->node[root].kind == NODE_ALT;
    for (int c = several ? t->node[root].child : root; c >= 0; c = several ? t->node[c].next : -1) {
        if (s->rules == SCAN_RULES) return false;
        scan_rule *r = &s->rule[s->rules++];
        if (!simple_rule(t, m, c, r) && !literal_rule(s, t, c, r)) return false;
    }
    if (!is_linear(s)) return false;
    for (int c = 0; c < m->classes; c++) {
        s->mask[c] = (uint32_t)m->members[c];
        for (int k = 0; k < s->rules; k++)
            if (s->mask[c] & first_sets(s, &s->rule[k])) s->start[c] |= 1u << k;
    }
    for (uint32_t c = 0; c < 128; c++) {
        s->ascii_mask[c] = s->mask[class_of(m, c)];
        s->ascii_start[c] = s->start[class_of(m, c)];
    }
    return true;
}

/* ---- scanning ---- */

typedef struct view {
    const scanner *s;
    const class_map *m;
    const uint8_t *p;
    size_t n;
} view;

/* Sets that hold the character at i < n; *next is the place behind it. */
static inline uint32_t sets_at(const view *v, size_t i, size_t *next) {
    const uint8_t a = v->p[i];
    if (LIKELY(a < 0x80)) return *next = i + 1, v->s->ascii_mask[a];
    size_t len;
    const uint32_t code = utf8_get(v->p + i, &len);
    *next = i + len;
    return v->s->mask[class_of(v->m, code)];
}

/* End of the run of at most `max` characters of `set` from i on. */
static inline size_t run_end(const view *v, size_t i, uint32_t set, size_t max) {
    size_t next = i;
    for (; max && i < v->n && (sets_at(v, i, &next) & set); max--) i = next;
    return i;
}

/* Each returns the end of the match, or `at` for none. */

static size_t match_literals(const view *v, const scan_rule *r, size_t at) {
    for (int k = 0; k < r->count; k++) {
        const uint32_t *bit = v->s->literal[r->first + k];
        size_t i = at;
        while (*bit && i < v->n) {
            size_t next;
            if (!(sets_at(v, i, &next) & *bit)) break;
            i = next;
            bit++;
        }
        if (!*bit) return i;
    }
    return at;
}

static size_t match_run(const view *v, const scan_rule *r, size_t at) {
    size_t next, behind;
    const uint32_t sets = sets_at(v, at, &next);
    size_t i = at;
    if ((sets & r->prefix) && next < v->n && (sets_at(v, next, &behind) & r->run))
        i = next;
    else if (!(sets & r->run))
        return at;
    i = run_end(v, i, r->run, r->max);
    return r->tail ? run_end(v, i, r->tail, SIZE_MAX) : i;
}

static size_t match_star_plus(const view *v, const scan_rule *r, size_t at) {
    size_t end = at, next;
    for (size_t i = at; i < v->n; i = next) {
        const uint32_t sets = sets_at(v, i, &next);
        if (sets & r->tail) end = next;
        if (!(sets & r->run)) break;
    }
    return end;
}

static size_t match_look(const view *v, const scan_rule *r, size_t at) {
    size_t last = at, i = at, next;
    while (i < v->n && (sets_at(v, i, &next) & r->run)) {
        last = i;
        i = next;
    }
    return i == v->n ? i : last; /* `last` is `at` when there is one character: no match */
}

static size_t match_at(const view *v, size_t at) {
    const uint8_t a = v->p[at];
    size_t len;
    uint32_t rules = a < 0x80 ? v->s->ascii_start[a] : v->s->start[class_of(v->m, utf8_get(v->p + at, &len))];
    for (; rules; rules &= rules - 1) {
        const scan_rule *r = &v->s->rule[__builtin_ctz(rules)];
        size_t end = at;
        switch (r->kind) {
        case RULE_LITERALS: end = match_literals(v, r, at); break;
        case RULE_RUN: end = match_run(v, r, at); break;
        case RULE_STAR_PLUS: end = match_star_plus(v, r, at); break;
        case RULE_LOOK: end = match_look(v, r, at); break;
        }
        if (end > at) return end;
    }
    return at;
}

size_t scanner_next(const scanner *s, const class_map *m, const uint8_t *p, size_t n, size_t at, bool *match) {
    const view v = { s, m, p, n };
    size_t end = match_at(&v, at), gap = at;
    *match = end > at;
    if (*match) return end;
    do {
        size_t next;
        sets_at(&v, gap, &next);
        gap = next;
    } while (gap < n && match_at(&v, gap) == gap);
    return gap;
}
