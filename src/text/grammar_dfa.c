/* Deterministic automata over characters: made, crossed, and written as rules. */
#include <stdio.h>
#include <stdlib.h>

#include "text/grammar_impl.h"
#include "text/jinja_uni.h"

enum { DFA_MAX_STATES = 20000, DFA_MAX_EDGES = 400000, LAST_CODE = 0x10ffff, RUN_MAX = 64 };

void dfa_free(dfa *d) {
    free(d->first);
    free(d->edge);
    free(d->accept);
    *d = (dfa){ 0 };
}

uint32_t dfa_state(dfa *d, bool accept) {
    if (d->n + 1 >= d->cap) {
        d->cap = d->cap ? 2 * d->cap : 64;
        d->first = xrealloc(d->first, (size_t)d->cap * sizeof *d->first);
        d->accept = xrealloc(d->accept, (size_t)d->cap * sizeof *d->accept);
    }
    d->accept[d->n] = accept;
    d->first[d->n] = d->n_edges;
    d->first[d->n + 1] = d->n_edges;
    return d->n++;
}

void dfa_link(dfa *d, uint32_t lo, uint32_t hi, uint32_t to) {
    dfa_edge *last = d->n_edges > d->first[d->n - 1] ? &d->edge[d->n_edges - 1] : NULL;
    if (last && last->to == to && last->hi + 1 == lo) {
        last->hi = hi;
        return;
    }
    if (d->n_edges == d->cap_edges) {
        d->cap_edges = d->cap_edges ? 2 * d->cap_edges : 256;
        d->edge = xrealloc(d->edge, (size_t)d->cap_edges * sizeof *d->edge);
    }
    d->edge[d->n_edges++] = (dfa_edge){ d->n - 1, lo, hi, to };
    d->first[d->n] = d->n_edges;
}

static bool too_large(const dfa *d, err *e) {
    return (d->n > DFA_MAX_STATES || d->n_edges > DFA_MAX_EDGES) &&
           !fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "pattern: too many states (pattern and lengths together)");
}

bool dfa_length(dfa *d, int64_t min, int64_t max, err *e) {
    const int64_t n = max < 0 ? min : max;
    if (n > DFA_MAX_STATES - 2)
        return fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "pattern with a length of %lld", (long long)n);
    for (int64_t i = 0; i <= n; i++) {
        (void)dfa_state(d, i >= min);
        if (i < n)
            dfa_link(d, 0, LAST_CODE, (uint32_t)i + 1);
        else if (max < 0)
            dfa_link(d, 0, LAST_CODE, (uint32_t)i);
    }
    return true;
}

/* ---- everything but some names ---- */

typedef struct name_part {
    const str *names; /* sorted */
    size_t lo, hi;    /* these share their first `at` bytes */
    size_t at;
} name_part;

static int name_cmp(const void *a, const void *b) { return str_cmp(*(const str *)a, *(const str *)b); }

void dfa_not_names(dfa *d, const str *names, size_t n) {
    str *v = xcalloc(n + 1, sizeof *v);
    if (n) memcpy(v, names, n * sizeof *v);
    qsort(v, n, sizeof *v, name_cmp);
    size_t total = 1;
    for (size_t i = 0; i < n; i++) total += v[i].n;
    name_part *todo = xcalloc(total + 1, sizeof *todo);
    size_t have = 1;
    todo[0] = (name_part){ v, 0, n, 0 };
    /* state i is todo[i]; the last one is for names that are none of these. UTF-8 sorts as code points do. */
    for (size_t i = 0; i < have; i++) {
        name_part p = todo[i];
        const bool whole = p.lo < p.hi && v[p.lo].n == p.at;
        (void)dfa_state(d, !whole);
        while (p.lo < p.hi && v[p.lo].n == p.at) p.lo++;
        uint32_t from = 0;
        while (p.lo < p.hi) {
            const char *s = v[p.lo].p + p.at;
            const uint32_t c = (uint32_t)uni_next(&s, v[p.lo].p + v[p.lo].n);
            const size_t next = (size_t)(s - v[p.lo].p);
            size_t k = p.lo + 1;
            while (k < p.hi && v[k].n >= next && memcmp(v[k].p, v[p.lo].p, next) == 0) k++;
            if (c > from) dfa_link(d, from, c - 1, UINT32_MAX);
            dfa_link(d, c, c, (uint32_t)have);
            todo[have++] = (name_part){ v, p.lo, k, next };
            from = c + 1;
            p.lo = k;
        }
        if (from <= LAST_CODE) dfa_link(d, from, LAST_CODE, UINT32_MAX);
    }
    const uint32_t other = dfa_state(d, true);
    dfa_link(d, 0, LAST_CODE, other);
    for (uint32_t i = 0; i < d->n_edges; i++)
        if (d->edge[i].to == UINT32_MAX) d->edge[i].to = other;
    free(todo);
    free(v);
}

/* ---- both at once ---- */

typedef struct pair_map {
    uint32_t *a, *b, *next, *head, n, cap;
} pair_map;
enum { PAIR_TABLE = 1 << 14 };

static uint32_t pair_of(pair_map *m, uint32_t a, uint32_t b) {
    uint32_t *head = &m->head[(a * 0x9e3779b1u ^ b * 0x85ebca6bu) % PAIR_TABLE];
    for (uint32_t i = *head; i; i = m->next[i - 1])
        if (m->a[i - 1] == a && m->b[i - 1] == b) return i - 1;
    if (m->n == m->cap) {
        m->cap = m->cap ? 2 * m->cap : 256;
        m->a = xrealloc(m->a, m->cap * sizeof *m->a);
        m->b = xrealloc(m->b, m->cap * sizeof *m->b);
        m->next = xrealloc(m->next, m->cap * sizeof *m->next);
    }
    m->a[m->n] = a, m->b[m->n] = b, m->next[m->n] = *head;
    *head = ++m->n;
    return m->n - 1;
}

bool dfa_both(dfa *out, const dfa *a, const dfa *b, err *e) {
    pair_map m = { .head = xcalloc(PAIR_TABLE, sizeof(uint32_t)) };
    bool ok = true;
    (void)pair_of(&m, 0, 0);
    for (uint32_t i = 0; i < m.n && ok; i++) {
        const uint32_t x = m.a[i], y = m.b[i];
        (void)dfa_state(out, a->accept[x] && b->accept[y]);
        for (uint32_t p = a->first[x], q = b->first[y]; p < a->first[x + 1] && q < b->first[y + 1];) {
            const dfa_edge *s = &a->edge[p], *t = &b->edge[q];
            const uint32_t lo = s->lo > t->lo ? s->lo : t->lo, hi = s->hi < t->hi ? s->hi : t->hi;
            if (lo <= hi) dfa_link(out, lo, hi, pair_of(&m, s->to, t->to));
            if (s->hi < t->hi)
                p++;
            else
                q++;
        }
        ok = !too_large(out, e) && m.n <= DFA_MAX_STATES + 1;
        if (!ok && !e->id) (void)fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "pattern: too many states");
    }
    free(m.head);
    free(m.a);
    free(m.b);
    free(m.next);
    return ok;
}

/* ---- as a rule ---- */

/* One character as JSON writes it within quotes. */
static void add_quoted(grammar *g, uint32_t from, uint32_t lo, uint32_t hi, uint32_t to) {
    static const char from_c[] = "\b\f\n\r\t\"\\", to_c[] = "bfnrt\"\\";
    for (uint32_t c = lo; c <= hi && c <= '\\'; c++) {
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        char text[8] = { '\\' };
        const char *k = c ? strchr(from_c, (int)c) : NULL;
        if (k)
            text[1] = to_c[k - from_c];
        else
            snprintf(text, sizeof text, "\\u%04x", c);
        grammar_add_edge(g, grammar_add_text(g, from, str_of(text)), EDGE_EPS, to);
    }
    static const uint32_t plain[][2] = { { 0x20, 0x21 }, { 0x23, 0x5b }, { 0x5d, LAST_CODE } };
    for (size_t i = 0; i < ARRAY_LEN(plain); i++) {
        const uint32_t a = lo > plain[i][0] ? lo : plain[i][0], b = hi < plain[i][1] ? hi : plain[i][1];
        if (a <= b) grammar_add_codes(g, from, a, b, to);
    }
}

/* Where characters lo..hi lead: UINT32_MAX nowhere, UINT32_MAX - 1 not all to the same state. */
static uint32_t all_to(const dfa *d, const bool *live, uint32_t state, uint32_t lo, uint32_t hi) {
    uint32_t to = UINT32_MAX, covered = 0;
    for (uint32_t k = d->first[state]; k < d->first[state + 1]; k++) {
        const dfa_edge *x = &d->edge[k];
        const uint32_t a = x->lo > lo ? x->lo : lo, b = x->hi < hi ? x->hi : hi;
        if (a > b || !live[x->to]) continue;
        if (to != UINT32_MAX && to != x->to) return UINT32_MAX - 1;
        to = x->to;
        covered += b - a + 1;
    }
    return covered == 0 ? UINT32_MAX : covered == hi - lo + 1 ? to : UINT32_MAX - 1;
}

typedef struct dfa_look { /* of a state */
    uint32_t next;
    uint8_t kinds; /* that lead to `next` */
    bool closed;   /* no plain character leads anywhere */
} dfa_look;

static dfa_look look_at(const dfa *d, const bool *live, uint32_t state) {
    uint32_t to[8];
    dfa_look best = { .closed = true, .next = UINT32_MAX };
    for (int k = 0; k < 6; k++) {
        to[k] = UINT32_MAX;
        bool first = true;
        for (size_t i = 0; i < grammar_n_kinds; i++) {
            if (grammar_kinds[i].kind != 1u << k) continue;
            const uint32_t t = all_to(d, live, state, grammar_kinds[i].lo, grammar_kinds[i].hi);
            to[k] = first || t == to[k] ? t : UINT32_MAX - 1;
            first = false;
        }
        if (to[k] != UINT32_MAX) best.closed = false;
    }
    for (int k = 0; k < 6; k++) {
        uint8_t kinds = 0;
        for (int i = 0; i < 6; i++) kinds |= (uint8_t)(to[i] == to[k] ? 1u << i : 0);
        if (to[k] < UINT32_MAX - 1 && __builtin_popcount(kinds) > __builtin_popcount(best.kinds))
            best.kinds = kinds, best.next = to[k];
    }
    return best;
}

/* live[i]: something leads from i to an accepting state. */
static void find_live(const dfa *d, bool *live) {
    uint32_t *first = xcalloc(d->n + 2, sizeof *first), *from = xcalloc(d->n_edges + 1, sizeof *from),
             *todo = xcalloc(d->n + 1, sizeof *todo), n = 0;
    for (uint32_t k = 0; k < d->n_edges; k++) first[d->edge[k].to + 2]++;
    for (uint32_t i = 2; i < d->n + 2; i++) first[i] += first[i - 1];
    for (uint32_t k = 0; k < d->n_edges; k++) from[first[d->edge[k].to + 1]++] = d->edge[k].from;
    for (uint32_t i = 0; i < d->n; i++)
        if ((live[i] = d->accept[i])) todo[n++] = i;
    while (n > 0) {
        const uint32_t to = todo[--n];
        for (uint32_t k = first[to]; k < first[to + 1]; k++)
            if (!live[from[k]]) live[from[k]] = true, todo[n++] = from[k];
    }
    free(first);
    free(from);
    free(todo);
}

/* How many characters of its kinds may follow each state: along `next`, as long as the kinds stay. */
static void note_runs(grammar *g, const dfa *d, const uint32_t *at) {
    dfa_look *v = xcalloc(d->n + 1, sizeof *v);
    bool *live = xcalloc(d->n + 1, sizeof *live);
    find_live(d, live);
    for (uint32_t i = 0; i < d->n; i++) v[i] = look_at(d, live, i);
    for (uint32_t i = 0; i < d->n; i++) {
        grammar_state *s = &g->states[at[i]];
        uint32_t k = i;
        s->kinds = v[i].kinds;
        while (s->run < RUN_MAX && v[k].kinds && (v[i].kinds & ~v[k].kinds) == 0) {
            s->run = v[k].next == k ? GRAMMAR_NEVER : (uint16_t)(s->run + 1);
            k = v[k].next;
        }
        s->plain = s->run > 0 && s->kinds == KINDS_ALL && (s->run == GRAMMAR_NEVER || v[k].closed);
    }
    free(live);
    free(v);
}

uint32_t grammar_dfa(grammar *g, const dfa *d, bool json_form) {
    const uint32_t r = grammar_add_rule(g, 0, -1);
    uint32_t *at = xcalloc(d->n, sizeof *at);
    for (uint32_t i = 0; i < d->n; i++) at[i] = grammar_add_state(g, r);
    const uint32_t close = grammar_add_state(g, r),
                   end = grammar_add_text(g, close, json_form ? STR("\"") : STR("\n</parameter>"));
    if (!g->full) {
        if (json_form)
            grammar_add_bytes(g, g->rules[r].start, '"', '"', at[0]);
        else
            grammar_add_edge(g, g->rules[r].start, EDGE_EPS, at[0]);
        g->states[end].final = true;
    }
    for (uint32_t i = 0; i < d->n && !g->full; i++) {
        if (d->accept[i]) grammar_add_edge(g, at[i], EDGE_EPS, close);
        for (uint32_t k = d->first[i]; k < d->first[i + 1] && !g->full; k++) {
            const dfa_edge *x = &d->edge[k];
            if (json_form)
                add_quoted(g, at[i], x->lo, x->hi, at[x->to]);
            else
                grammar_add_codes(g, at[i], x->lo, x->hi, at[x->to]);
        }
    }
    if (!g->full) note_runs(g, d, at);
    free(at);
    return g->full ? 0 : r;
}
