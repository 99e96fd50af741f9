/* JSON's own parts as rules: white space, strings, numbers, any value; and the raw text of a tool's parameter. */
#include <stdio.h>

#include "text/grammar_impl.h"

uint32_t grammar_space(grammar *g) {
    const uint32_t r = grammar_add_rule(g, 0, 32);
    const uint32_t line = grammar_add_state(g, r), more = grammar_add_state(g, r), end = grammar_add_state(g, r);
    if (g->full) return 0;
    const uint32_t start = g->rules[r].start;
    g->states[start].final = g->states[line].final = g->states[end].final = true;
    grammar_add_bytes(g, start, ' ', ' ', end);
    grammar_add_bytes(g, start, '\n', '\n', line);
    grammar_add_edge(g, line, EDGE_INC, more);
    grammar_add_bytes(g, more, ' ', ' ', line);
    return r;
}

/* ---- the four tags that no value holds ---- */

static const char *const tags[] = { "</parameter>", "<parameter=", "</function>", "</tool_call>" };
enum { TAG_NODES = 48 };

/* What was read of tags so far, as Aho and Corasick do it: all tags begin with '<', which no tag has within, so another '<'
 * begins anew and anything else that does not go on leads to node 0. */
typedef struct tag_trie {
    int n, next[TAG_NODES][128]; /* -1: a tag would be complete */
} tag_trie;

static void tag_trie_make(tag_trie *t) {
    memset(t, 0, sizeof *t);
    t->n = 1;
    for (size_t k = 0; k < ARRAY_LEN(tags); k++) {
        int at = 0;
        for (const char *p = tags[k]; *p; p++) {
            int *to = &t->next[at][(int)*p];
            if (!p[1])
                *to = -1;
            else if (*to <= 0)
                *to = t->n++;
            at = *to;
        }
    }
    for (int i = 1; i < t->n; i++) t->next[i]['<'] = t->next[0]['<'];
}

void dfa_no_tags(dfa *out) {
    tag_trie t;
    tag_trie_make(&t);
    for (int i = 0; i < t.n; i++) {
        (void)dfa_state(out, true);
        for (uint32_t c = 0; c < 128; c++)
            if (t.next[i][c] >= 0) dfa_link(out, c, c, (uint32_t)t.next[i][c]);
        dfa_link(out, 128, 0x10ffff, 0);
    }
}

/* ---- strings ---- */

/* Bytes of one character above 0x7f, from `from` to `to`. */
static void add_wide(grammar *g, uint32_t from, uint32_t to) {
    const uint32_t r = g->states[from].rule, t1 = grammar_add_state(g, r), t2 = grammar_add_state(g, r),
                   t3 = grammar_add_state(g, r), e0 = grammar_add_state(g, r), ed = grammar_add_state(g, r),
                   f0 = grammar_add_state(g, r), f4 = grammar_add_state(g, r);
    const struct {
        uint32_t from, to;
        int lo, hi;
    } v[] = { { from, t1, 0xc2, 0xdf }, { from, e0, 0xe0, 0xe0 }, { from, t2, 0xe1, 0xec }, { from, ed, 0xed, 0xed },
              { from, t2, 0xee, 0xef }, { from, f0, 0xf0, 0xf0 }, { from, t3, 0xf1, 0xf3 }, { from, f4, 0xf4, 0xf4 },
              { e0, t1, 0xa0, 0xbf },   { ed, t1, 0x80, 0x9f },   { f0, t2, 0x90, 0xbf },   { f4, t2, 0x80, 0x8f },
              { t3, t2, 0x80, 0xbf },   { t2, t1, 0x80, 0xbf },   { t1, to, 0x80, 0xbf } };
    for (size_t i = 0; i < ARRAY_LEN(v); i++) grammar_add_bytes(g, v[i].from, v[i].lo, v[i].hi, v[i].to);
}

static void add_hex(grammar *g, uint32_t from, uint32_t to) {
    grammar_add_bytes(g, from, '0', '9', to);
    grammar_add_bytes(g, from, 'A', 'F', to);
    grammar_add_bytes(g, from, 'a', 'f', to);
}

/* `n` hex digits. */
static void add_hexes(grammar *g, uint32_t from, int n, uint32_t to) {
    for (; n > 1 && !g->full; n--) {
        const uint32_t next = grammar_add_state(g, g->states[from].rule);
        add_hex(g, from, next);
        from = next;
    }
    add_hex(g, from, to);
}

static void add_either(grammar *g, uint32_t from, const char *bytes, uint32_t to) {
    for (; *bytes; bytes++) grammar_add_bytes(g, from, *bytes, *bytes, to);
}

/* Behind a backslash. */
static void add_escape(grammar *g, uint32_t from, uint32_t to) {
    const uint32_t r = g->states[from].rule, u = grammar_add_text(g, from, STR("u")), d = grammar_add_state(g, r),
                   three = grammar_add_state(g, r), two = grammar_add_state(g, r), high = grammar_add_state(g, r),
                   pair = grammar_add_state(g, r), low = grammar_add_state(g, r), rest = grammar_add_state(g, r);
    add_either(g, from, "\"\\/bfnrt", to);
    if (g->full) return;
    grammar_add_bytes(g, u, '0', '9', three);
    add_either(g, u, "abcefABCEF", three);
    add_either(g, u, "dD", d);
    add_hexes(g, three, 3, to);
    grammar_add_bytes(g, d, '0', '7', two);
    add_hexes(g, two, 2, to);
    add_either(g, d, "89abAB", high);
    add_hexes(g, high, 2, pair);
    const uint32_t low_u = grammar_add_text(g, pair, STR("\\u"));
    if (g->full) return;
    add_either(g, low_u, "dD", low);
    add_either(g, low, "cdefCDEF", rest);
    add_hexes(g, rest, 2, to);
}

/* A counted character from each of `body` (by tag node) back to one of them. */
static void add_characters(grammar *g, const uint32_t *body, int nodes, const tag_trie *t, bool quoted) {
    const uint32_t r = g->states[body[0]].rule, esc = grammar_add_state(g, r);
    if (g->full) return;
    if (quoted) add_escape(g, esc, body[0]);
    for (int i = 0; i < nodes && !g->full; i++) {
        const uint32_t c = grammar_add_state(g, r);
        if (g->full) return;
        grammar_add_edge(g, body[i], EDGE_INC, c);
        g->states[c].plain = i == 0;
        if (quoted) grammar_add_bytes(g, c, '\\', '\\', esc);
        for (int b = 0; b < 128; b++) {
            if (quoted ? b < 0x20 || b == '"' || b == '\\'
                       : (b < 0x20 && b != '\t' && b != '\n' && b != '\r') || b == 0x7f)
                continue;
            const int to = t ? t->next[i][b] : 0;
            int end = b;
            while (to == 0 && end + 1 < 127 && end + 1 != '"' && end + 1 != '\\' && end >= 0x20 &&
                   (!t || t->next[i][end + 1] == 0))
                end++;
            if (to >= 0) grammar_add_bytes(g, c, b, end, body[to]);
            b = end;
        }
        add_wide(g, c, body[0]);
    }
}

uint32_t grammar_string(grammar *g, int64_t min, int64_t max, bool no_tags) {
    tag_trie t;
    tag_trie_make(&t);
    const uint32_t r = grammar_add_rule(g, min, max), end = grammar_add_state(g, r), close = grammar_add_state(g, r);
    const int nodes = no_tags ? t.n : 1;
    uint32_t body[TAG_NODES] = { 0 };
    for (int i = 0; i < nodes; i++) body[i] = grammar_add_state(g, r);
    if (g->full) return 0;
    grammar_add_bytes(g, g->rules[r].start, '"', '"', body[0]);
    for (int i = 0; i < nodes; i++) grammar_add_edge(g, body[i], EDGE_EXIT, close);
    grammar_add_bytes(g, close, '"', '"', end);
    add_characters(g, body, nodes, no_tags ? &t : NULL, true);
    if (!g->full) g->states[end].final = true;
    return r;
}

uint32_t grammar_text(grammar *g, int64_t min, int64_t max) {
    tag_trie t;
    tag_trie_make(&t);
    const uint32_t r = grammar_add_rule(g, min, max), close = grammar_add_state(g, r);
    uint32_t body[TAG_NODES] = { 0 };
    for (int i = 0; i < t.n; i++) body[i] = grammar_add_state(g, r);
    const uint32_t end = grammar_add_text(g, close, STR("\n</parameter>"));
    if (g->full) return 0;
    grammar_add_edge(g, g->rules[r].start, EDGE_EPS, body[0]);
    for (int i = 0; i < t.n; i++) grammar_add_edge(g, body[i], EDGE_EXIT, close);
    add_characters(g, body, t.n, &t, false);
    if (!g->full) g->states[end].final = true;
    return r;
}

/* ---- numbers ---- */

/* 1..n digits (0..n when `none`) from `from`; each place where they may end leads to `to`. */
static void add_digits(grammar *g, uint32_t from, int n, bool none, uint32_t to) {
    if (none) grammar_add_edge(g, from, EDGE_EPS, to);
    for (int i = 0; i < n && !g->full; i++) {
        const uint32_t next = grammar_add_state(g, g->states[from].rule);
        grammar_add_bytes(g, from, '0', '9', next);
        grammar_add_edge(g, next, EDGE_EPS, to);
        from = next;
    }
}

/* 0 or a digit and up to 19 more. */
static void add_whole(grammar *g, uint32_t from, bool zero, uint32_t to) {
    const uint32_t lead = grammar_add_state(g, g->states[from].rule);
    if (zero) grammar_add_bytes(g, from, '0', '0', to);
    grammar_add_bytes(g, from, '1', '9', lead);
    if (!g->full) add_digits(g, lead, 19, true, to);
}

/* Places of a number that are free: tail[k] is k more digits before the end; 0: not made yet. */
typedef struct free_digits {
    uint32_t tail[24];
} free_digits;

static uint32_t free_tail(grammar *g, free_digits *f, uint32_t rule, size_t k, uint32_t to) {
    for (size_t i = 0; i <= k && !g->full; i++) {
        if (f->tail[i]) continue;
        f->tail[i] = i == 0 ? to : grammar_add_state(g, rule);
        if (i > 0) grammar_add_bytes(g, f->tail[i], '0', '9', f->tail[i - 1]);
    }
    return f->tail[k];
}

static bool all_are(const char *s, char c) { return strspn(s, (char[]){ c, 0 }) == strlen(s); }

/* Digits lo..hi of the same length, from place i on; at_lo, at_hi: the number's digits so far are the bound's. */
static void add_between(grammar *g, free_digits *f, uint32_t from, const char *lo, const char *hi, bool at_lo,
                        bool at_hi, uint32_t to) {
    if (g->full) return;
    const uint32_t r = g->states[from].rule;
    if (!*lo || (!at_lo && !at_hi)) {
        grammar_add_edge(g, from, EDGE_EPS, free_tail(g, f, r, strlen(lo), to));
        return;
    }
    int a = at_lo ? *lo : '0', b = at_hi ? *hi : '9';
    if (a == b && at_lo && at_hi) {
        const uint32_t next = grammar_add_state(g, r);
        grammar_add_bytes(g, from, a, a, next);
        add_between(g, f, next, lo + 1, hi + 1, true, true, to);
        return;
    }
    if (at_lo && !all_are(lo + 1, '0')) {
        const uint32_t next = grammar_add_state(g, r);
        grammar_add_bytes(g, from, a, a, next);
        add_between(g, f, next, lo + 1, hi + 1, true, false, to);
        a++;
    }
    if (at_hi && !all_are(hi + 1, '9')) {
        const uint32_t next = grammar_add_state(g, r);
        grammar_add_bytes(g, from, b, b, next);
        add_between(g, f, next, lo + 1, hi + 1, false, true, to);
        b--;
    }
    if (a <= b) grammar_add_bytes(g, from, a, b, free_tail(g, f, r, strlen(lo) - 1, to));
}

/* lo..hi, without sign. */
static void add_range(grammar *g, uint32_t from, uint64_t lo, uint64_t hi, uint32_t to) {
    uint64_t first = 0, last = 9;
    free_digits f = { { 0 } };
    for (int n = 1; n <= 20 && !g->full; n++) {
        const uint64_t a = lo > first ? lo : first, b = hi < last ? hi : last;
        char x[24], y[24];
        if (a <= b) {
            snprintf(x, sizeof x, "%llu", (unsigned long long)a);
            snprintf(y, sizeof y, "%llu", (unsigned long long)b);
            add_between(g, &f, from, x, y, true, true, to);
        }
        if (n == 20) break;
        first = last + 1;
        last = n == 19 ? UINT64_MAX : last * 10 + 9;
    }
}

static uint64_t magnitude(int64_t v) { return v < 0 ? 0 - (uint64_t)v : (uint64_t)v; }

static void add_bounded(grammar *g, uint32_t from, const number_form *f, uint32_t to) {
    if (f->hi >= 0) add_range(g, from, f->lo > 0 ? magnitude(f->lo) : 0, magnitude(f->hi), to);
    if (f->lo >= 0 || g->full) return;
    const uint32_t minus = grammar_add_text(g, from, STR("-"));
    if (!g->full) add_range(g, minus, f->hi < 0 ? magnitude(f->hi) : 1, magnitude(f->lo), to);
}

uint32_t grammar_number(grammar *g, const number_form *f) {
    const uint32_t r = grammar_add_rule(g, 0, 0), whole = grammar_add_state(g, r), end = grammar_add_state(g, r);
    if (g->full) return 0;
    const uint32_t start = g->rules[r].start;
    g->states[end].final = true;
    if (f->bounded) {
        add_bounded(g, start, f, whole);
    } else {
        add_whole(g, start, true, whole);
        if (!f->no_sign) {
            const uint32_t minus = grammar_add_text(g, start, STR("-"));
            if (!g->full) add_whole(g, minus, !f->integer, whole);
        }
    }
    grammar_add_edge(g, whole, EDGE_EPS, end);
    if (f->integer || g->full) return r;
    const uint32_t point = grammar_add_text(g, whole, STR(".")), fraction = grammar_add_state(g, r),
                   power = grammar_add_state(g, r), sign = grammar_add_state(g, r);
    if (g->full) return r;
    add_digits(g, point, 20, false, fraction);
    grammar_add_edge(g, whole, EDGE_EPS, fraction);
    grammar_add_edge(g, fraction, EDGE_EPS, end);
    add_either(g, fraction, "eE", power);
    add_either(g, power, "+-", sign);
    grammar_add_edge(g, power, EDGE_EPS, sign);
    add_digits(g, sign, 3, false, end);
    return r;
}

/* ---- any value ---- */

static void add_members(grammar *g, uint32_t rule, char open, char close, const json_rules *j, bool keys) {
    const uint32_t in = grammar_add_state(g, rule), item = grammar_add_state(g, rule),
                   after = grammar_add_state(g, rule), last = grammar_add_state(g, rule),
                   end = grammar_add_state(g, rule), first = grammar_add_state(g, rule);
    if (g->full) return;
    grammar_add_bytes(g, g->rules[rule].start, open, open, in);
    grammar_add_call(g, in, j->space, first);
    grammar_add_bytes(g, first, close, close, end);
    grammar_add_edge(g, first, EDGE_EPS, item);
    if (keys) {
        const uint32_t colon = grammar_add_state(g, rule);
        grammar_add_call(g, item, j->string, colon);
        const uint32_t behind = grammar_add_text(g, colon, STR(":")), value = grammar_add_state(g, rule);
        if (g->full) return;
        grammar_add_call(g, behind, j->space, value);
        grammar_add_call(g, value, j->value, after);
    } else {
        grammar_add_call(g, item, j->value, after);
    }
    const uint32_t comma = grammar_add_text(g, after, STR(","));
    if (g->full) return;
    grammar_add_call(g, comma, j->space, item);
    grammar_add_call(g, after, j->space, last);
    grammar_add_bytes(g, last, close, close, end);
    g->states[end].final = true;
}

void grammar_json(grammar *g, json_rules *j, bool no_tags) {
    j->space = grammar_space(g);
    j->string = grammar_string(g, 0, -1, no_tags);
    j->number = grammar_number(g, &(number_form){ 0 });
    j->value = grammar_add_rule(g, 0, 0);
    j->object = grammar_add_rule(g, 0, 0);
    j->array = grammar_add_rule(g, 0, 0);
    const uint32_t end = grammar_add_state(g, j->value);
    if (g->full) return;
    g->states[end].final = true;
    const uint32_t start = g->rules[j->value].start, calls[] = { j->string, j->number, j->object, j->array };
    for (size_t i = 0; i < ARRAY_LEN(calls); i++) grammar_add_call(g, start, calls[i], end);
    static const char *const words[] = { "true", "false", "null" };
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        grammar_add_edge(g, grammar_add_text(g, start, str_of(words[i])), EDGE_EPS, end);
    add_members(g, j->object, '{', '}', j, true);
    add_members(g, j->array, '[', ']', j, false);
}

bool grammar_json_object(grammar **out, const grammar_options *o, err *e) {
    json_rules j;
    *out = grammar_begin();
    grammar_json(*out, &j, false);
    return grammar_finish(out, j.object, o, e);
}
