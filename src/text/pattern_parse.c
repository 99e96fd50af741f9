/* The pattern parser: recursive descent with bounded depth over the constructs that mean the same thing in Oniguruma's
 * Ruby syntax and in PCRE2. */
#include <stdio.h>

#include "text/pattern.h"

enum { DEPTH_MAX = 48, REPEAT_MAX = 1000 };

typedef struct parser {
    pattern_tree *t;
    const uint8_t *p;
    size_t n, i;
    int depth;
    bool fold; /* inside (?i:...) */
    err *e;
} parser;

static int parse_alt(parser *q);

static int no(parser *q, const char *what) {
    fail(q->e, ERR_INPUT, "E-TOK-PATTERN", "tokenizer.json: split pattern, byte %zu: %s", q->i, what);
    return -1;
}

static bool more(const parser *q) { return q->i < q->n; }
static uint8_t peek(const parser *q) { return more(q) ? q->p[q->i] : 0; }
static bool looking_at(const parser *q, const char *s) {
    return str_starts((str){ (const char *)q->p + q->i, q->n - q->i }, str_of(s));
}
static bool eat(parser *q, const char *s) {
    if (!looking_at(q, s)) return false;
    return q->i += strlen(s), true;
}

static int new_node(parser *q, node_kind kind) {
    if (q->t->nodes == PATTERN_NODES) return no(q, "the pattern is too long");
    q->t->node[q->t->nodes] = (pattern_node){ .kind = (uint8_t)kind, .child = -1, .next = -1 };
    return q->t->nodes++;
}

/* ---- sets ---- */

static bool add_item(parser *q, set_item item) {
    if (q->t->items == PATTERN_ITEMS) return no(q, "too many characters in sets") >= 0;
    q->t->item[q->t->items++] = item;
    return true;
}

static bool same_set(const pattern_tree *t, const char_set *a, const char_set *b) {
    if (a->negative != b->negative || a->count != b->count) return false;
    for (int i = 0; i < a->count; i++) {
        const set_item *x = &t->item[a->first + i], *y = &t->item[b->first + i];
        if (x->kind != y->kind || x->negative != y->negative || x->lo != y->lo || x->hi != y->hi) return false;
    }
    return true;
}

/* The items from `first` on become a set; an equal one is shared. Returns a SET node. */
static int set_node(parser *q, int first, bool negative) {
    pattern_tree *t = q->t;
    const char_set s = { first, t->items - first, negative };
    int k = 0;
    while (k < t->sets && !same_set(t, &t->set[k], &s)) k++;
    if (k == PATTERN_SETS) return no(q, "too many different characters and sets");
    if (k == t->sets)
        t->set[t->sets++] = s;
    else
        t->items = first;
    const int node = new_node(q, NODE_SET);
    if (node >= 0) t->node[node].set = k;
    return node;
}

static bool letter(uint32_t c) { return (c | 32) >= 'a' && (c | 32) <= 'z'; }

/* One character; under (?i) with its simple case folds: long s and the Kelvin sign belong to s and k. */
static int literal_node(parser *q, uint32_t c) {
    const int first = q->t->items;
    if (q->fold && c >= 0x80) return no(q, "a non-ASCII character under (?i) is not supported");
    const bool folded = q->fold && letter(c);
    if (!add_item(q, (set_item){ .kind = ITEM_RANGE, .lo = c, .hi = c })) return -1;
    if (folded) {
        const uint32_t low = c | 32, extra = low == 's' ? 0x17F : low == 'k' ? 0x212A : 0;
        q->t->item[first].lo = q->t->item[first].hi = low;
        if (!add_item(q, (set_item){ .kind = ITEM_RANGE, .lo = low - 32, .hi = low - 32 })) return -1;
        if (extra && !add_item(q, (set_item){ .kind = ITEM_RANGE, .lo = extra, .hi = extra })) return -1;
    }
    const int node = set_node(q, first, false);
    if (node >= 0) q->t->node[node].folded = folded;
    return node;
}

static const char *const long_names[][2] = {
    { "L", "letter" },
    { "M", "mark" },
    { "N", "number" },
    { "P", "punctuation" },
    { "S", "symbol" },
    { "Z", "separator" },
    { "C", "other" },
    { "Lu", "uppercaseletter" },
    { "Ll", "lowercaseletter" },
    { "Lt", "titlecaseletter" },
    { "Lm", "modifierletter" },
    { "Lo", "otherletter" },
    { "Nd", "decimalnumber" },
};

/* Categories named by a property: a general category, a group of them, or one of the long names; 0 = unknown. */
static uint32_t category_mask(const char *name) {
    uint32_t mask = 0;
    for (size_t k = 0; k < ARRAY_LEN(long_names); k++)
        if (strcmp(name, long_names[k][1]) == 0) name = long_names[k][0];
    for (int k = 0; k < UNICODE_GC_COUNT; k++) {
        const char *g = unicode_gc_name[k];
        const bool first = (g[0] | 32) == (name[0] | 32);
        if (first && (name[1] == 0 || ((name[1] | 32) == g[1] && name[2] == 0))) mask |= 1u << k;
        if (strcmp(name, "lc") == 0 && g[0] == 'L' && (g[1] == 'u' || g[1] == 'l' || g[1] == 't')) mask |= 1u << k;
    }
    return mask;
}

/* Behind \p or \P. */
static bool property(parser *q, bool negative) {
    char name[32];
    size_t n = 0;
    if (!eat(q, "{")) return no(q, "\\p without {...}") >= 0;
    if (eat(q, "^")) negative = !negative;
    for (; more(q) && peek(q) != '}'; q->i++) {
        const uint8_t c = peek(q);
        if (c == ' ' || c == '_' || c == '-') continue;
        if (!letter(c) || n + 1 >= sizeof name) return no(q, "unsupported \\p{...} (general categories only)") >= 0;
        name[n++] = (char)(c | 32);
    }
    name[n] = 0;
    const uint32_t mask = n ? category_mask(name) : 0;
    if (!eat(q, "}") || !mask) return no(q, "unsupported \\p{...} (general categories only)") >= 0;
    return add_item(q, (set_item){ .kind = ITEM_GC, .negative = negative, .lo = mask });
}

static int hex_value(uint8_t c) {
    return c >= '0' && c <= '9' ? c - '0' : letter(c) && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* \xHH, \x{H...}, \uHHHH behind the letter. */
static bool hex_escape(parser *q, bool braces, int digits, uint32_t *out) {
    uint32_t v = 0;
    int k = 0;
    for (; more(q) && hex_value(peek(q)) >= 0 && k < digits; k++, q->i++) v = v * 16 + (uint32_t)hex_value(peek(q));
    if (k == 0 || (!braces && k < digits) || (braces && !eat(q, "}")) || v >= UNICODE_CODES ||
        (v >= 0xD800 && v < 0xE000))
        return no(q, "malformed hexadecimal escape") >= 0;
    *out = v;
    return true;
}

/* Behind a backslash: a set (item added, *code = UINT32_MAX) or one character. */
static bool escape(parser *q, uint32_t *code) {
    if (!more(q)) return no(q, "the pattern ends in a backslash") >= 0;
    const uint8_t c = q->p[q->i++];
    *code = UINT32_MAX;
    switch (c) {
    case 'p':
    case 'P': return property(q, c == 'P');
    case 's':
    case 'S': return add_item(q, (set_item){ .kind = ITEM_SPACE, .negative = c == 'S' });
    case 'w':
    case 'W': return add_item(q, (set_item){ .kind = ITEM_WORD, .negative = c == 'W' });
    case 'd':
    case 'D': return add_item(q, (set_item){ .kind = ITEM_GC, .negative = c == 'D', .lo = category_mask("nd") });
    case 'r': return *code = '\r', true;
    case 'n': return *code = '\n', true;
    case 't': return *code = '\t', true;
    case 'f': return *code = '\f', true;
    case 'v': return *code = '\v', true;
    case 'a': return *code = '\a', true;
    case 'e': return *code = 27, true;
    case 'u': return hex_escape(q, false, 4, code);
    case 'x':
        if (eat(q, "{")) return hex_escape(q, true, 8, code);
        if (!hex_escape(q, false, 2, code)) return false;
        return *code < 0x80 || no(q, "\\x above 7F names a byte, not a character") >= 0;
    default:
        if (c >= 0x80 || letter(c) || (c >= '0' && c <= '9')) return no(q, "unsupported escape") >= 0;
        return *code = c, true;
    }
}

static uint32_t take_code(parser *q) {
    size_t len;
    const uint32_t c = utf8_get(q->p + q->i, &len);
    q->i += len;
    return c;
}

/* One member of [...]; *code as in escape(). */
static bool member(parser *q, uint32_t *code) {
    if (looking_at(q, "&&")) return no(q, "set intersection && is not supported") >= 0;
    if (peek(q) == '[') return no(q, "sets within sets are not supported") >= 0;
    if (eat(q, "\\")) {
        const int item = q->t->items;
        if (!escape(q, code)) return false;
        if (*code == UINT32_MAX && q->t->item[item].kind == ITEM_WORD) q->t->item[item].lo = 1;
        return true;
    }
    *code = take_code(q);
    return true;
}

static int bracket(parser *q) {
    const int first = q->t->items;
    const bool negative = eat(q, "^");
    if (q->fold) return no(q, "a set under (?i) is not supported");
    if (peek(q) == ']') return no(q, "an empty set, or a set that begins with ], is not supported");
    while (more(q) && peek(q) != ']') {
        uint32_t lo, hi;
        const size_t from = q->i;
        if (!member(q, &lo)) return -1;
        hi = lo;
        const bool range = peek(q) == '-' && q->i + 1 < q->n && q->p[q->i + 1] != ']';
        if (range && q->i > from + 1 && lo == UINT32_MAX) return no(q, "a range that begins with a class");
        if (range) {
            q->i++;
            if (!member(q, &hi)) return -1;
            if (hi == UINT32_MAX || hi < lo) return no(q, "a range that ends before it begins");
        }
        if (lo != UINT32_MAX && !add_item(q, (set_item){ .kind = ITEM_RANGE, .lo = lo, .hi = hi })) return -1;
    }
    if (!eat(q, "]")) return no(q, "] is missing");
    return set_node(q, first, negative);
}

/* ---- structure ---- */

static int group(parser *q) {
    static const struct {
        const char *open;
        uint8_t kind;
        bool behind, negative;
    } kinds[] = {
        { "?=", NODE_LOOK, false, false }, { "?!", NODE_LOOK, false, true },    { "?<=", NODE_LOOK, true, false },
        { "?<!", NODE_LOOK, true, true },  { "?>", NODE_ATOMIC, false, false },
    };
    const bool fold = q->fold;
    int wrap = -1;
    if (++q->depth > DEPTH_MAX) return no(q, "groups nest too deep");
    if (eat(q, "?i:")) {
        q->fold = true;
    } else if (peek(q) == '?' && !eat(q, "?:")) {
        for (size_t k = 0; k < ARRAY_LEN(kinds) && wrap < 0; k++) {
            if (!eat(q, kinds[k].open)) continue;
            if ((wrap = new_node(q, (node_kind)kinds[k].kind)) < 0) return -1;
            q->t->node[wrap].behind = kinds[k].behind;
            q->t->node[wrap].negative = kinds[k].negative;
        }
        if (wrap < 0) return no(q, "unsupported group (?...");
    }
    const int inner = parse_alt(q);
    if (inner < 0) return -1;
    if (!eat(q, ")")) return no(q, ") is missing");
    q->fold = fold;
    q->depth--;
    if (wrap < 0) return inner;
    q->t->node[wrap].child = inner;
    return wrap;
}

static int atom(parser *q) {
    uint32_t code;
    const int first = q->t->items;
    switch (peek(q)) {
    case '(': q->i++; return group(q);
    case '[': q->i++; return bracket(q);
    case '.':
        q->i++;
        if (!add_item(q, (set_item){ .kind = ITEM_RANGE, .lo = '\n', .hi = '\n' })) return -1;
        return set_node(q, first, true);
    case '\\':
        q->i++;
        if (!escape(q, &code)) return -1;
        if (code != UINT32_MAX) return literal_node(q, code);
        if (q->fold) return no(q, "a class under (?i) is not supported");
        return set_node(q, first, false);
    case '^':
    case '$': return no(q, "anchors are not supported");
    case '*':
    case '+':
    case '?':
    case '{': return no(q, "nothing to repeat");
    case ']':
    case '}': return no(q, "unpaired bracket");
    default: return literal_node(q, take_code(q));
    }
}

static bool number(parser *q, int *out) {
    int v = 0;
    const size_t from = q->i;
    for (; peek(q) >= '0' && peek(q) <= '9'; q->i++)
        if ((v = v * 10 + peek(q) - '0') > REPEAT_MAX) return no(q, "repeat counts are limited to 1000") >= 0;
    *out = v;
    return q->i > from || no(q, "malformed repeat {...}") >= 0;
}

/* {n}, {n,}, {n,m} behind the brace. */
static bool interval(parser *q, int *min, int *max) {
    if (!number(q, min)) return false;
    *max = *min;
    if (eat(q, ",")) {
        *max = PATTERN_INF;
        if (peek(q) != '}' && !number(q, max)) return false;
        if (*max != PATTERN_INF && *max < *min) return no(q, "malformed repeat {...}") >= 0;
    } else if (looking_at(q, "}?")) {
        return no(q, "{n}? means something else in every dialect") >= 0;
    }
    if (!eat(q, "}")) return no(q, "malformed repeat {...}") >= 0;
    return peek(q) != '+' || no(q, "{...}+ is not supported") >= 0;
}

/* atom, then at most one repeat operator. */
static int repeated(parser *q) {
    const int inner = atom(q);
    int min = 0, max = PATTERN_INF;
    if (inner < 0) return -1;
    const bool braces = peek(q) == '{';
    if (eat(q, "?"))
        max = 1;
    else if (eat(q, "+"))
        min = 1;
    else if (braces ? !(q->i++, interval(q, &min, &max)) : !eat(q, "*"))
        return braces ? -1 : inner;
    const pattern_node *a = &q->t->node[inner];
    if (a->kind == NODE_LOOK || a->kind == NODE_EMPTY) return no(q, "a repeated assertion or empty group");
    if (a->folded) return no(q, "a repeated letter under (?i) is not supported");
    const int node = new_node(q, NODE_REPEAT);
    if (node < 0) return -1;
    pattern_node *r = &q->t->node[node];
    r->child = inner;
    r->min = min;
    r->max = max;
    r->mode = eat(q, "?") ? REPEAT_LAZY : !braces && eat(q, "+") ? REPEAT_POSSESSIVE : REPEAT_GREEDY;
    if (peek(q) == '?' || peek(q) == '*' || peek(q) == '+' || peek(q) == '{') return no(q, "a repeat of a repeat");
    return node;
}

/* Oniguruma folds some pairs of letters to one character (ss and the sharp s): refuse to guess. */
static bool folds_together(const pattern_tree *t, int a, int b) {
    if (a < 0 || !t->node[a].folded || !t->node[b].folded) return false;
    const uint32_t x = t->item[t->set[t->node[a].set].first].lo, y = t->item[t->set[t->node[b].set].first].lo;
    return (x == 's' && (y == 's' || y == 't')) || (x == 'f' && (y == 'f' || y == 'i' || y == 'l'));
}

static int parse_cat(parser *q) {
    int first = -1, last = -1;
    while (more(q) && peek(q) != '|' && peek(q) != ')') {
        const int node = repeated(q);
        if (node < 0) return -1;
        if (folds_together(q->t, last, node)) return no(q, "these letters under (?i) fold to one character");
        if (first < 0)
            first = node;
        else
            q->t->node[last].next = node;
        last = node;
    }
    if (first < 0) return new_node(q, NODE_EMPTY);
    /* A lone node is wrapped too: an inner group's node may already have siblings elsewhere. */
    const int cat = new_node(q, NODE_CAT);
    if (cat >= 0) q->t->node[cat].child = first;
    return cat;
}

static int parse_alt(parser *q) {
    const int first = parse_cat(q);
    if (first < 0 || peek(q) != '|') return first;
    const int alt = new_node(q, NODE_ALT);
    if (alt < 0) return -1;
    q->t->node[alt].child = first;
    for (int last = first; eat(q, "|");) {
        const int node = parse_cat(q);
        if (node < 0) return -1;
        q->t->node[last].next = node;
        last = node;
    }
    return alt;
}

static int parse_text(parser *q) {
    int first = -1, last = -1;
    while (more(q)) {
        const int node = literal_node(q, take_code(q));
        if (node < 0) return -1;
        if (first < 0)
            first = node;
        else
            q->t->node[last].next = node;
        last = node;
    }
    const int cat = new_node(q, NODE_CAT);
    if (cat >= 0) q->t->node[cat].child = first;
    return cat;
}

bool pattern_parse(pattern_tree *t, str pattern, bool literal, err *e) {
    parser q = { .t = t, .p = (const uint8_t *)pattern.p, .n = pattern.n, .e = e };
    t->nodes = t->items = t->sets = 0;
    if (pattern.n == 0) return no(&q, "the pattern is empty") >= 0;
    if (utf8_valid(pattern) != pattern.n || pattern.n > 8192) return no(&q, "the pattern is too long") >= 0;
    t->root = literal ? parse_text(&q) : parse_alt(&q);
    if (t->root < 0) return false;
    return !more(&q) || no(&q, "unpaired )") >= 0;
}
