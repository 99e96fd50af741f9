/* Patterns: ECMA-262 syntax without what is not regular -> states that read characters -> a deterministic automaton.
 *
 * A pattern is searched for: anything may stand before and behind a match, but for ^ and $, which hold only at the ends of
 * the string. Classes are ECMA's: \d [0-9], \w [0-9A-Za-z_], \s its white space. */
#include <stdlib.h>

#include "text/grammar_impl.h"
#include "text/jinja_uni.h"

enum {
    REGEX_MAX_BYTES = 4096,
    REGEX_MAX_NODES = 6000,
    REGEX_MAX_RANGES = 8192,
    REGEX_MAX_DEPTH = 64,
    REGEX_MAX_REPEAT = 2000,
    REGEX_MAX_DFA = 4000,
    REGEX_MAX_STEPS = 300000, /* groups within groups are read many times */
    REGEX_MAX_WORK = 20000000,
    LAST_CODE = 0x10ffff,
    NO_NODE = -1
};

typedef struct range {
    uint32_t lo, hi;
} range;

typedef enum node_type { N_SPLIT, N_SET, N_BEGIN, N_END, N_MATCH } node_type;
typedef struct node {
    uint8_t type;
    int out, out2;         /* SPLIT; the others use out */
    uint32_t first, count; /* SET: ranges */
} node;

typedef struct regex {
    const char *text, *p, *end;
    node *v;
    int n;
    range *r;
    uint32_t n_ranges;
    int depth, steps;
    err *e;
} regex;

static bool bad(regex *x, const char *what) {
    return fail(x->e, ERR_INPUT, "E-GRAMMAR-SCHEMA", "pattern: %s at byte %d of \"" STR_FMT "\"", what,
                (int)(x->p - x->text), STR_ARG(((str){ x->text, (size_t)(x->end - x->text) })));
}

static bool large(regex *x) { return fail(x->e, ERR_INPUT, "E-GRAMMAR-SIZE", "pattern: too large when written out"); }

static int add_node(regex *x, node_type type, int out, int out2) {
    if (x->n == REGEX_MAX_NODES) return large(x), NO_NODE;
    x->v[x->n] = (node){ .type = (uint8_t)type, .out = out, .out2 = out2 };
    return x->n++;
}

static bool add_range(regex *x, uint32_t lo, uint32_t hi) {
    if (x->n_ranges == REGEX_MAX_RANGES) return large(x);
    x->r[x->n_ranges++] = (range){ lo, hi };
    return true;
}

/* ---- sets ---- */

static int range_cmp(const void *a, const void *b) {
    const range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* Ranges from `first` on: sorted, joined, and turned around when asked. */
static bool tidy_ranges(regex *x, uint32_t first, bool negate) {
    qsort(x->r + first, x->n_ranges - first, sizeof *x->r, range_cmp);
    uint32_t n = first;
    for (uint32_t i = first; i < x->n_ranges; i++) {
        if (n > first && x->r[i].lo <= x->r[n - 1].hi + 1) {
            if (x->r[i].hi > x->r[n - 1].hi) x->r[n - 1].hi = x->r[i].hi;
        } else {
            x->r[n++] = x->r[i];
        }
    }
    x->n_ranges = n;
    if (!negate) return true;
    uint32_t from = 0;
    for (uint32_t i = first; i < n; i++) {
        const range was = x->r[i];
        if (was.lo > from && !add_range(x, from, was.lo - 1)) return false;
        from = was.hi + 1;
    }
    if (from <= LAST_CODE && !add_range(x, from, LAST_CODE)) return false;
    memmove(x->r + first, x->r + n, (x->n_ranges - n) * sizeof *x->r);
    x->n_ranges -= n - first;
    return true;
}

static bool add_class(regex *x, char c) {
    static const range digit[] = { { '0', '9' } }, word[] = { { '0', '9' }, { 'A', 'Z' }, { '_', '_' }, { 'a', 'z' } },
                       space[] = { { 9, 13 },          { 32, 32 },         { 0xa0, 0xa0 },     { 0x1680, 0x1680 },
                                   { 0x2000, 0x200a }, { 0x2028, 0x2029 }, { 0x202f, 0x202f }, { 0x205f, 0x205f },
                                   { 0x3000, 0x3000 }, { 0xfeff, 0xfeff } };
    const char k = c | 32;
    const range *v = k == 'd' ? digit : k == 'w' ? word : space;
    const size_t n = k == 'd' ? ARRAY_LEN(digit) : k == 'w' ? ARRAY_LEN(word) : ARRAY_LEN(space);
    uint32_t from = 0;
    for (size_t i = 0; i < n; i++) {
        if (k == c ? !add_range(x, v[i].lo, v[i].hi) : v[i].lo > from && !add_range(x, from, v[i].lo - 1)) return false;
        from = v[i].hi + 1;
    }
    return k == c || add_range(x, from, LAST_CODE);
}

static bool hex(regex *x, int n, uint32_t *c) {
    *c = 0;
    for (int i = 0; i < n; i++, x->p++) {
        const char k = x->p < x->end ? *x->p : 0;
        const int d = k >= '0' && k <= '9' ? k - '0' : (k | 32) >= 'a' && (k | 32) <= 'f' ? (k | 32) - 'a' + 10 : -1;
        if (d < 0) return bad(x, "a bad escape");
        *c = *c * 16 + (uint32_t)d;
    }
    return true;
}

/* Behind a backslash: a class (*is_class, its ranges added) or one character. */
static bool escape(regex *x, bool in_set, bool *is_class, uint32_t *c) {
    static const char from[] = "nrtfv", to[] = "\n\r\t\f\v";
    *is_class = false;
    if (x->p == x->end) return bad(x, "a lone backslash");
    const char k = *x->p;
    if (k && strchr("dDwWsS", k)) {
        x->p++;
        *is_class = true;
        return add_class(x, k);
    }
    const char *t = k ? strchr(from, k) : NULL;
    if (t) return x->p++, *c = (uint32_t)to[t - from], true;
    if (k == 'x' || k == 'u') {
        x->p++;
        if (!hex(x, k == 'x' ? 2 : 4, c)) return false;
        return (*c < 0xd800 || *c > 0xdfff) || bad(x, "a surrogate");
    }
    if (k == 'b' && in_set) return x->p++, *c = 8, true;
    if (k == '0' && (x->end - x->p < 2 || x->p[1] < '0' || x->p[1] > '9')) return x->p++, *c = 0, true;
    if ((k >= '0' && k <= '9') || (k >= 'a' && k <= 'z') || (k >= 'A' && k <= 'Z'))
        return bad(x, "an escape that is not supported (\\b, back references and \\p are not)");
    *c = (uint32_t)uni_next(&x->p, x->end);
    return true;
}

/* Behind '['. */
static bool bracket(regex *x, uint32_t first) {
    const bool negate = x->p < x->end && *x->p == '^';
    x->p += negate;
    while (x->p < x->end && *x->p != ']') {
        uint32_t lo, hi;
        bool is_class = false;
        if (*x->p == '\\') {
            x->p++;
            if (!escape(x, true, &is_class, &lo)) return false;
            if (is_class) continue;
        } else {
            lo = (uint32_t)uni_next(&x->p, x->end);
        }
        hi = lo;
        if (x->end - x->p >= 2 && x->p[0] == '-' && x->p[1] != ']') {
            x->p++;
            if (*x->p == '\\') {
                x->p++;
                if (!escape(x, true, &is_class, &hi)) return false;
                if (is_class) return bad(x, "a range that ends in a class");
            } else {
                hi = (uint32_t)uni_next(&x->p, x->end);
            }
            if (hi < lo) return bad(x, "a range backwards");
        }
        if (!add_range(x, lo, hi)) return false;
    }
    if (x->p == x->end) return bad(x, "a '[' without its ']'");
    x->p++;
    return tidy_ranges(x, first, negate);
}

/* ---- the parser: fragments are built backward, each onto what follows it, so text is parsed again for repeats ---- */

static bool alternatives(regex *x, int out, int *in);

static bool set_node(regex *x, uint32_t first, int out, int *in) {
    *in = add_node(x, N_SET, out, NO_NODE);
    if (*in == NO_NODE) return false;
    x->v[*in].first = first;
    x->v[*in].count = x->n_ranges - first;
    return true;
}

static bool group(regex *x, int out, int *in) {
    if (x->end - x->p >= 2 && x->p[0] == '?') {
        if (x->p[1] == ':') {
            x->p += 2;
        } else if (x->p[1] == '<' && x->end - x->p >= 3 && x->p[2] != '=' && x->p[2] != '!') {
            while (x->p < x->end && *x->p != '>') x->p++;
            if (x->p == x->end) return bad(x, "a group name without its '>'");
            x->p++;
        } else {
            return bad(x, "a group that is not supported (lookaround, flags)");
        }
    }
    if (++x->depth > REGEX_MAX_DEPTH) return bad(x, "groups too deep");
    if (!alternatives(x, out, in)) return false;
    x->depth--;
    if (x->p == x->end) return bad(x, "a '(' without its ')'");
    x->p++;
    return true;
}

/* One atom before `out`; x->p moves behind it. */
static bool atom(regex *x, int out, int *in) {
    const uint32_t first = x->n_ranges;
    const char c = *x->p;
    uint32_t code = 0;
    bool is_class;
    if (++x->steps > REGEX_MAX_STEPS) return large(x);
    switch (c) {
    case '(': x->p++; return group(x, out, in);
    case '[': x->p++; return bracket(x, first) && set_node(x, first, out, in);
    case '^': x->p++; return (*in = add_node(x, N_BEGIN, out, NO_NODE)) != NO_NODE;
    case '$': x->p++; return (*in = add_node(x, N_END, out, NO_NODE)) != NO_NODE;
    case '.':
        x->p++;
        return add_range(x, '\n', '\n') && add_range(x, '\r', '\r') && add_range(x, 0x2028, 0x2029) &&
               tidy_ranges(x, first, true) && set_node(x, first, out, in);
    case '\\':
        x->p++;
        if (!escape(x, false, &is_class, &code)) return false;
        return (is_class || add_range(x, code, code)) && tidy_ranges(x, first, false) && set_node(x, first, out, in);
    case '*':
    case '+':
    case '?': return bad(x, "nothing to repeat");
    case '{': return bad(x, "nothing to repeat (write \\{)");
    default: break;
    }
    code = (uint32_t)uni_next(&x->p, x->end);
    return add_range(x, code, code) && set_node(x, first, out, in);
}

/* {m,n} and the like; false in *any when none stands here. */
static bool quantifier(regex *x, int *min, int *max, bool *any) {
    *any = true;
    *min = 0, *max = -1;
    if (x->p == x->end) return *any = false, true;
    switch (*x->p) {
    case '*': x->p++; break;
    case '+': x->p++, *min = 1; break;
    case '?': x->p++, *max = 1; break;
    case '{': {
        x->p++;
        long v[2] = { 0, -1 };
        const char *from = x->p;
        for (; x->p < x->end && *x->p >= '0' && *x->p <= '9' && v[0] <= REGEX_MAX_REPEAT; x->p++)
            v[0] = v[0] * 10 + (*x->p - '0');
        if (x->p == from) return bad(x, "a '{' that is no quantifier (write \\{)");
        if (x->p < x->end && *x->p == ',') {
            x->p++;
            if (x->p < x->end && *x->p != '}') v[1] = 0;
            for (; x->p < x->end && *x->p >= '0' && *x->p <= '9' && v[1] <= REGEX_MAX_REPEAT; x->p++)
                v[1] = v[1] * 10 + (*x->p - '0');
        } else {
            v[1] = v[0];
        }
        if (x->p == x->end || *x->p != '}' || (v[1] >= 0 && v[1] < v[0])) return bad(x, "a malformed quantifier");
        if (v[0] > REGEX_MAX_REPEAT || v[1] > REGEX_MAX_REPEAT) return large(x);
        x->p++;
        *min = (int)v[0], *max = (int)v[1];
        break;
    }
    default: return *any = false, true;
    }
    if (x->p < x->end && *x->p == '?') x->p++; /* lazy: the same strings */
    if (x->p < x->end && (*x->p == '+' || *x->p == '*' || *x->p == '{')) return bad(x, "a second quantifier");
    return true;
}

/* Where the atom at x->p ends, without building it. */
static bool skip_atom(regex *x) {
    const int n = x->n, depth = x->depth;
    const uint32_t ranges = x->n_ranges;
    int in;
    const bool ok = atom(x, 0, &in);
    x->n = n, x->n_ranges = ranges, x->depth = depth;
    return ok;
}

static bool again(regex *x, const char *from, int out, int *in) {
    const char *keep = x->p;
    x->p = from;
    const bool ok = atom(x, out, in);
    x->p = keep;
    return ok;
}

/* The atom at `from`, min to max times, before `out`. */
static bool repeat(regex *x, const char *from, int min, int max, int out, int *in) {
    int at = out;
    if (max < 0) {
        const int loop = add_node(x, N_SPLIT, NO_NODE, out);
        int body;
        if (loop == NO_NODE || !again(x, from, loop, &body)) return false;
        x->v[loop].out = body;
        at = loop;
    }
    for (int i = min; i < max; i++) {
        int body;
        if (!again(x, from, at, &body)) return false;
        at = add_node(x, N_SPLIT, body, out);
        if (at == NO_NODE) return false;
    }
    for (int i = 0; i < min; i++)
        if (!again(x, from, at, &at)) return false;
    *in = at;
    return true;
}

typedef struct piece {
    const char *from;
    int min, max;
} piece;

/* A sequence up to | or ) before `out`. */
static bool sequence(regex *x, int out, int *in) {
    size_t n = 0, cap = 0;
    piece *v = NULL;
    bool ok = true;
    while (ok && x->p < x->end && *x->p != '|' && *x->p != ')') {
        if (n == cap) v = xrealloc(v, (cap = cap ? 2 * cap : 16) * sizeof *v);
        piece *k = &v[n++];
        bool any;
        k->from = x->p;
        ok = skip_atom(x) && quantifier(x, &k->min, &k->max, &any);
        if (ok && !any) k->min = k->max = 1;
    }
    *in = out;
    while (ok && n > 0) {
        n--;
        ok = repeat(x, v[n].from, v[n].min, v[n].max, *in, in);
    }
    free(v);
    return ok;
}

static bool alternatives(regex *x, int out, int *in) {
    if (!sequence(x, out, in)) return false;
    while (x->p < x->end && *x->p == '|') {
        int other;
        x->p++;
        if (!sequence(x, out, &other)) return false;
        *in = add_node(x, N_SPLIT, *in, other);
        if (*in == NO_NODE) return false;
    }
    return true;
}

/* ---- subsets ---- */

typedef struct subset {
    int *v, n;
} subset;

typedef struct builder {
    const regex *x;
    uint32_t *cut; /* starts of the stretches of characters that no set tells apart */
    uint32_t cuts;
    subset *set; /* [REGEX_MAX_DFA] */
    uint32_t n;
    int *stack;
    uint8_t *seen;
    int64_t work;
} builder;

/* What can be reached without reading: into b->stack[0..), sorted by marking. *match: the match is among it (at_end: $ holds). */
static int closure(builder *b, const int *from, int n, bool at_begin, bool at_end, int *out, bool *match) {
    const regex *x = b->x;
    int top = 0, count = 0;
    memset(b->seen, 0, (size_t)x->n);
    *match = false;
    for (int i = 0; i < n; i++)
        if (!b->seen[from[i]]) b->seen[from[i]] = 1, b->stack[top++] = from[i];
    while (top > 0) {
        const node *k = &x->v[b->stack[--top]];
        int next[2] = { NO_NODE, NO_NODE };
        if (k->type == N_MATCH) *match = true;
        if (k->type == N_SPLIT) next[0] = k->out, next[1] = k->out2;
        if (k->type == N_BEGIN && at_begin) next[0] = k->out;
        if (k->type == N_END && at_end) next[0] = k->out;
        for (int i = 0; i < 2; i++)
            if (next[i] != NO_NODE && !b->seen[next[i]]) b->seen[next[i]] = 1, b->stack[top++] = next[i];
    }
    for (int i = 0; i < x->n; i++)
        if (b->seen[i] && (x->v[i].type == N_SET || x->v[i].type == N_END || x->v[i].type == N_MATCH)) out[count++] = i;
    b->work += x->n;
    return count;
}

static uint32_t subset_of(builder *b, const int *v, int n) {
    for (uint32_t i = 0; i < b->n; i++) {
        b->work += 4;
        if (b->set[i].n == n && memcmp(b->set[i].v, v, (size_t)n * sizeof *v) == 0) return i;
    }
    if (b->n == REGEX_MAX_DFA) return UINT32_MAX;
    b->set[b->n].v = xmalloc((size_t)(n + 1) * sizeof *v);
    memcpy(b->set[b->n].v, v, (size_t)n * sizeof *v);
    b->set[b->n].n = n;
    return b->n++;
}

static bool holds(const regex *x, const node *k, uint32_t c) {
    for (uint32_t i = k->first; i < k->first + k->count; i++)
        if (c >= x->r[i].lo && c <= x->r[i].hi) return true;
    return false;
}

static int u32_cmp(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void find_cuts(builder *b) {
    const regex *x = b->x;
    b->cut = xmalloc((2 * (size_t)x->n_ranges + 1) * sizeof *b->cut);
    b->cut[b->cuts++] = 0;
    for (uint32_t i = 0; i < x->n_ranges; i++) {
        b->cut[b->cuts++] = x->r[i].lo;
        if (x->r[i].hi < LAST_CODE) b->cut[b->cuts++] = x->r[i].hi + 1;
    }
    qsort(b->cut, b->cuts, sizeof *b->cut, u32_cmp);
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->cuts; i++)
        if (n == 0 || b->cut[n - 1] != b->cut[i]) b->cut[n++] = b->cut[i];
    b->cuts = n;
}

/* The automaton's state `at`. */
static bool expand(builder *b, dfa *out, uint32_t at, int *now, int *next, err *e) {
    const regex *x = b->x;
    bool match, unused;
    (void)closure(b, b->set[at].v, b->set[at].n, false, true, now, &match);
    bool over = false; /* the match is behind: anything may follow */
    for (int i = 0; i < b->set[at].n; i++) over |= x->v[b->set[at].v[i]].type == N_MATCH;
    (void)dfa_state(out, match);
    if (over) {
        dfa_link(out, 0, LAST_CODE, at);
        return true;
    }
    for (uint32_t c = 0; c < b->cuts; c++) {
        int n = 0;
        for (int i = 0; i < b->set[at].n; i++) {
            const node *k = &x->v[b->set[at].v[i]];
            b->work += 1 + k->count;
            if (k->type == N_SET && holds(x, k, b->cut[c])) now[n++] = k->out;
        }
        if (n == 0) continue;
        const int m = closure(b, now, n, false, false, next, &unused);
        if (m == 0) continue;
        const uint32_t to = subset_of(b, next, m);
        if (to == UINT32_MAX || b->work > REGEX_MAX_WORK)
            return fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "pattern: too many states");
        dfa_link(out, b->cut[c], c + 1 < b->cuts ? b->cut[c + 1] - 1 : LAST_CODE, to);
    }
    return true;
}

static bool determinize(dfa *out, const regex *x, int start, err *e) {
    builder b = { .x = x };
    int *now = xmalloc((size_t)(x->n + 1) * sizeof *now), *next = xmalloc((size_t)(x->n + 1) * sizeof *next);
    b.stack = xmalloc((size_t)(x->n + 1) * sizeof *b.stack);
    b.seen = xcalloc((size_t)x->n + 1, 1);
    b.set = xcalloc(REGEX_MAX_DFA, sizeof *b.set);
    find_cuts(&b);
    bool ok = true, unused;
    const int n = closure(&b, &start, 1, true, false, now, &unused);
    /* the start keeps a place of its own: only there ^ holds */
    (void)subset_of(&b, now, n);
    for (uint32_t i = 0; i < b.n && ok; i++) ok = expand(&b, out, i, now, next, e);
    for (uint32_t i = 0; i < b.n; i++) free(b.set[i].v);
    free(b.set);
    free(b.stack);
    free(b.seen);
    free(b.cut);
    free(now);
    free(next);
    return ok;
}

bool dfa_regex(dfa *out, str pattern, err *e) {
    regex x = { .text = pattern.p, .p = pattern.p, .end = pattern.p + pattern.n, .e = e };
    if (pattern.n > REGEX_MAX_BYTES || !uni_valid(pattern))
        return fail(e, ERR_INPUT, "E-GRAMMAR-SIZE", "pattern: longer than %d bytes, or not UTF-8", REGEX_MAX_BYTES);
    x.v = xmalloc(REGEX_MAX_NODES * sizeof *x.v);
    x.r = xmalloc(REGEX_MAX_RANGES * sizeof *x.r);
    int in = NO_NODE;
    const int match = add_node(&x, N_MATCH, NO_NODE, NO_NODE);
    bool ok = alternatives(&x, match, &in) && (x.p == x.end || bad(&x, "a ')' without its '('"));
    if (ok) { /* anything may stand before a match */
        const uint32_t first = x.n_ranges;
        const int split = add_node(&x, N_SPLIT, NO_NODE, in);
        int any;
        ok = split != NO_NODE && add_range(&x, 0, LAST_CODE) && set_node(&x, first, split, &any);
        if (ok) x.v[split].out = any;
        ok = ok && determinize(out, &x, split, e);
    }
    free(x.v);
    free(x.r);
    return ok;
}
