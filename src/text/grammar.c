/* Building rules, and what is known about them once they are complete. */
#include <stdlib.h>

#include "text/grammar_impl.h"

grammar *grammar_begin(void) {
    grammar *g = xcalloc(1, sizeof *g);
    g->n_states = g->n_edges = 1;
    return g;
}

void grammar_free(grammar *g) {
    if (!g) return;
    free(g->states);
    free(g->edges);
    free(g->rules);
    free(g);
}

/* Room for one more of n; false beyond `limit`. */
static bool room(void *array, uint32_t *cap, uint32_t n, uint32_t limit, size_t size) {
    void **p = array;
    if (n < *cap) return true;
    if (n >= limit) return false;
    const uint32_t more = *cap ? 2 * *cap : 64;
    void *grown = realloc(*p, (size_t)more * size);
    if (!grown) return false;
    *p = grown;
    *cap = more;
    return true;
}

uint32_t grammar_add_state(grammar *g, uint32_t rule) {
    if (g->full || !room(&g->states, &g->cap_states, g->n_states, GRAMMAR_MAX_STATES, sizeof *g->states))
        return g->full = true, 0;
    g->states[g->n_states] = (grammar_state){ .rule = rule, .need = GRAMMAR_NEVER };
    return g->n_states++;
}

uint32_t grammar_add_rule(grammar *g, int64_t min, int64_t max) {
    if (g->full || !room(&g->rules, &g->cap_rules, g->n_rules, GRAMMAR_MAX_RULES, sizeof *g->rules))
        return g->full = true, 0;
    const uint32_t r = g->n_rules++;
    g->rules[r] = (grammar_rule){ .min = min, .max = max };
    g->rules[r].start = grammar_add_state(g, r);
    return r;
}

static void add_edge(grammar *g, uint32_t from, grammar_edge x) {
    if (g->full || !room(&g->edges, &g->cap_edges, g->n_edges, GRAMMAR_MAX_EDGES, sizeof *g->edges)) {
        g->full = true;
        return;
    }
    x.next = g->states[from].first;
    g->edges[g->n_edges] = x;
    g->states[from].first = g->n_edges++;
}

void grammar_add_edge(grammar *g, uint32_t from, edge_kind kind, uint32_t to) {
    add_edge(g, from, (grammar_edge){ .kind = (uint8_t)kind, .to = to });
}

void grammar_add_bytes(grammar *g, uint32_t from, int lo, int hi, uint32_t to) {
    if (lo <= hi)
        add_edge(g, from, (grammar_edge){ .kind = EDGE_BYTE, .lo = (uint8_t)lo, .hi = (uint8_t)hi, .to = to });
}

void grammar_add_call(grammar *g, uint32_t from, uint32_t rule, uint32_t to) {
    add_edge(g, from, (grammar_edge){ .kind = EDGE_CALL, .to = to, .rule = rule });
}

uint32_t grammar_add_text(grammar *g, uint32_t from, str text) {
    for (size_t i = 0; i < text.n && !g->full; i++) {
        const uint32_t to = grammar_add_state(g, g->states[from].rule);
        grammar_add_bytes(g, from, (uint8_t)text.p[i], (uint8_t)text.p[i], to);
        from = to;
    }
    return from;
}

/* ---- UTF-8 ---- */

static void add_sequence(grammar *g, uint32_t from, const uint8_t lo[4], const uint8_t hi[4], int n, uint32_t to) {
    for (int i = 0; i < n && !g->full; i++) {
        const uint32_t next = i == n - 1 ? to : grammar_add_state(g, g->states[from].rule);
        grammar_add_bytes(g, from, lo[i], hi[i], next);
        from = next;
    }
}

static int encode(uint8_t out[4], uint32_t c) {
    if (c < 0x80) return out[0] = (uint8_t)c, 1;
    const int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = { 0, 0, 0xc0, 0xe0, 0xf0 };
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (uint8_t)(0x80 | (c & 0x3f));
    out[0] = (uint8_t)(lead[n] | c);
    return n;
}

/* Split where the length changes, around the surrogates, and until only the last bytes vary freely. */
void grammar_add_codes(grammar *g, uint32_t from, uint32_t lo, uint32_t hi, uint32_t to) {
    static const uint32_t ends[] = { 0x7f, 0x7ff, 0xd7ff, 0xffff };
    if (lo >= 0xd800 && lo <= 0xdfff) lo = 0xe000;
    if (hi >= 0xd800 && hi <= 0xdfff) hi = 0xd7ff;
    while (lo <= hi && !g->full) {
        uint32_t end = hi;
        for (size_t i = 0; i < ARRAY_LEN(ends); i++)
            if (lo <= ends[i] && end > ends[i]) end = ends[i];
        for (int shift = 18; shift > 0; shift -= 6) {
            const uint32_t low = ((uint32_t)1 << shift) - 1;
            if (lo >> shift == end >> shift || lo < 0x80) continue;
            if (lo & low)
                end = lo | low;
            else if ((end & low) != low)
                end = (end & ~low) - 1;
        }
        uint8_t a[4], b[4];
        const int n = encode(a, lo);
        (void)encode(b, end);
        add_sequence(g, from, a, b, n, to);
        lo = end + 1;
        if (lo == 0xd800) lo = 0xe000;
    }
}

/* ---- analysis ---- */

/* Frames that it takes to leave through this edge. */
static uint32_t edge_need(const grammar *g, const grammar_edge *x) {
    const uint32_t behind = g->states[x->to].need;
    if (x->kind != EDGE_CALL) return behind;
    const uint32_t callee = g->states[g->rules[x->rule].start].need;
    if (callee == GRAMMAR_NEVER || behind == GRAMMAR_NEVER) return GRAMMAR_NEVER;
    return callee + 1 > behind ? callee + 1 : behind;
}

/* Builders number states forward, so a few passes backward do; false when an odd grammar takes more. */
static bool find_needs(grammar *g) {
    enum { PASSES = 300 };
    for (uint32_t i = 1; i < g->n_states; i++)
        if (g->states[i].final) g->states[i].need = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        bool changed = false;
        for (uint32_t i = g->n_states - 1; i > 0; i--)
            for (uint32_t k = g->states[i].first; k; k = g->edges[k].next) {
                const uint32_t n = edge_need(g, &g->edges[k]);
                if (n < g->states[i].need) g->states[i].need = (uint16_t)n, changed = true;
            }
        if (!changed) return true;
    }
    return false;
}

/* Edges that lead nowhere go; bytes that no edge tells apart form a class. */
static void prune(grammar *g) {
    bool cut[257] = { 0 };
    for (uint32_t i = 1; i < g->n_states; i++)
        for (uint32_t *k = &g->states[i].first; *k;) {
            const grammar_edge *x = &g->edges[*k];
            if (edge_need(g, x) > GRAMMAR_MAX_FRAMES / 2) {
                *k = x->next;
                continue;
            }
            if (x->kind == EDGE_BYTE) cut[x->lo] = cut[x->hi + 1] = true;
            k = &g->edges[*k].next;
        }
    int n = -1;
    for (int b = 0; b < 256; b++) {
        n += b == 0 || cut[b];
        g->class_of[b] = (uint8_t)n;
    }
    g->classes = n + 1;
}

/* Free text until </think>; then at most two newlines. Returns where the answer begins. */
static uint32_t add_thought(grammar *g, uint32_t rule) {
    static const char tag[] = "</think>";
    enum { N = 8 };
    uint32_t at[N + 1];
    at[0] = g->rules[rule].start;
    for (int i = 1; i <= N; i++) at[i] = grammar_add_state(g, rule);
    if (g->full) return 0;
    g->states[at[0]].plain = true;
    for (int i = 0; i < N; i++)
        for (int b = 0; b < 256; b++) { /* the tag overlaps itself in nothing but '<' */
            const int to = b == tag[i] ? i + 1 : b == '<' ? 1 : 0;
            int end = b;
            if (to == 0)
                while (end < 255 && end + 1 != tag[i] && end + 1 != '<') end++;
            grammar_add_bytes(g, at[i], b, end, at[to]);
            b = end;
        }
    const uint32_t one = grammar_add_text(g, at[N], STR("\n")), two = grammar_add_text(g, one, STR("\n"));
    grammar_add_edge(g, at[N], EDGE_EPS, two);
    grammar_add_edge(g, one, EDGE_EPS, two);
    return two;
}

bool grammar_finish(grammar **out, uint32_t body, const grammar_options *o, err *e) {
    grammar *g = *out;
    g->top = grammar_add_rule(g, 0, 0);
    if (!g->full) {
        const uint32_t from = o && o->thinking ? add_thought(g, g->top) : g->rules[g->top].start;
        const uint32_t end = grammar_add_state(g, g->top);
        if (!g->full) {
            grammar_add_call(g, from, body, end);
            g->states[end].final = true;
        }
    }
    bool ok = (!g->full && find_needs(g)) ||
              fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "grammar: too many rules, states or edges (simplify it)");
    ok = ok && (g->states[g->rules[g->top].start].need <= GRAMMAR_MAX_FRAMES / 2 ||
                fail(e, ERR_INPUT, "E-GRAMMAR-SCHEMA", "schema: no value can fit it"));
    if (ok) {
        prune(g);
        return true;
    }
    grammar_free(g);
    *out = NULL;
    return false;
}

bool grammar_accepts(const grammar *g, str text, bool *complete) {
    machine m;
    machine_open(&m, g);
    uint32_t at = m.start;
    for (size_t i = 0; i < text.n && at != MACHINE_DEAD; i++) {
        at = machine_step(&m, at, (uint8_t)text.p[i]);
        if (machine_is_full(&m)) machine_compact(&m, &at, 1);
    }
    *complete = m.configs[at].accept;
    machine_close(&m);
    return at != MACHINE_DEAD;
}
