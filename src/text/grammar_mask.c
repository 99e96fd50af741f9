/* From bytes to tokens: the vocabulary as a tree, walked together with the machine.
 *
 * Tokens of plain characters alone (most of a vocabulary) are a tree and bit masks of their own: inside a string all of
 * them fit, or those of few enough characters, so only the rest is walked there. */
#include <stdlib.h>

#include "text/grammar_impl.h"

enum { TOKEN_MAX_BYTES = 512, PLAIN_COUNTS = 16, MASKS = 48 };

/* Nodes in order of a walk; a node's descendants follow it. */
typedef struct token_tree {
    uint8_t *byte;
    uint16_t *depth;
    uint32_t *end;  /* behind the last descendant */
    uint8_t *kinds; /* of all tokens that end here or below, and the characters of the longest; only of plain ones */
    uint8_t *count;
    int32_t *id; /* first token that ends here, -1 = none; more in vocab->same */
    uint32_t n;
} token_tree;

struct grammar_vocab {
    int vocab;
    size_t words;
    token_tree plain, rest;
    int32_t *same;   /* [vocab] the next id of the same bytes, -1 = none */
    uint32_t *bytes; /* [vocab + 1] into pool: bytes of each text token; empty: it is none */
    char *pool;
    uint64_t *up_to[PLAIN_COUNTS + 1]; /* plain tokens of at most so many characters; [0]: all */
    int32_t *longer;                   /* plain tokens of more than PLAIN_COUNTS characters */
    uint16_t *longer_count;
    uint32_t n_longer;
    uint8_t *kinds, *count; /* [words * 64] of plain tokens; kinds 0: it is not plain; count stops at 255 */
};

/* ---- the vocabulary ---- */

static str token_bytes(const grammar_vocab *v, int32_t id) {
    return (str){ v->pool + v->bytes[id], v->bytes[id + 1] - v->bytes[id] };
}

const kind_range grammar_kinds[] = {
    { 'a', 'z', KIND_LOWER },       { 'A', 'Z', KIND_UPPER },      { '0', '9', KIND_DIGIT },
    { ' ', ' ', KIND_SPACE },       { '!', '!', KIND_MARK },       { '#', '/', KIND_MARK },
    { ':', ';', KIND_MARK },        { '=', '@', KIND_MARK },       { '[', '[', KIND_MARK },
    { ']', '`', KIND_MARK },        { '{', '~', KIND_MARK },       { 0x80, 0x84, KIND_WIDE },
    { 0x86, 0x9f, KIND_WIDE },      { 0xa1, 0x167f, KIND_WIDE },   { 0x1681, 0x1fff, KIND_WIDE },
    { 0x200b, 0x2027, KIND_WIDE },  { 0x202a, 0x202e, KIND_WIDE }, { 0x2030, 0x205e, KIND_WIDE },
    { 0x2060, 0x2fff, KIND_WIDE },  { 0x3001, 0xd7ff, KIND_WIDE }, { 0xe000, 0xfefe, KIND_WIDE },
    { 0xff00, 0x10ffff, KIND_WIDE }
};
const size_t grammar_n_kinds = ARRAY_LEN(grammar_kinds);

uint8_t grammar_kind(uint32_t c) {
    for (size_t i = 0; i < ARRAY_LEN(grammar_kinds); i++)
        if (c >= grammar_kinds[i].lo && c <= grammar_kinds[i].hi) return grammar_kinds[i].kind;
    return 0;
}

/* Characters of a plain token, and their kinds; 0: it is not plain. */
static uint32_t plain_count(str s, uint8_t *kinds) {
    uint32_t n = 0;
    *kinds = 0;
    for (size_t i = 0; i < s.n; n++) {
        const uint8_t c = (uint8_t)s.p[i];
        const size_t len = c < 0x80                ? 1
                           : c >= 0xc2 && c < 0xe0 ? 2
                           : c >= 0xe0 && c < 0xf0 ? 3
                           : c >= 0xf0 && c < 0xf5 ? 4
                                                   : 0;
        if (len == 0 || i + len > s.n) return 0;
        uint32_t code = len == 1 ? c : c & (0x7fu >> len);
        for (size_t k = 1; k < len; k++) {
            if (((uint8_t)s.p[i + k] & 0xc0) != 0x80) return 0;
            code = code << 6 | ((uint8_t)s.p[i + k] & 0x3f);
        }
        const uint8_t kind = grammar_kind(code);
        if (kind == 0) return 0;
        *kinds |= kind;
        const uint8_t d = len > 1 ? (uint8_t)s.p[i + 1] : 0;
        if ((c == 0xe0 && d < 0xa0) || (c == 0xed && d > 0x9f) || (c == 0xf0 && d < 0x90) || (c == 0xf4 && d > 0x8f))
            return 0;
        i += len;
    }
    return n;
}

static bool is_text(const tokenizer *t, int32_t id, str s) {
    return s.n > 0 && s.n <= TOKEN_MAX_BYTES && !tokenizer_is_special(t, id) &&
           !(s.n > 4 && str_starts(s, STR("<|")) && str_ends(s, STR("|>")));
}

static int by_bytes(const void *a, const void *b, void *ctx) {
    const grammar_vocab *v = ctx;
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    const int c = str_cmp(token_bytes(v, x), token_bytes(v, y));
    return c ? c : (x > y) - (x < y);
}

/* ids[0..n) in order of their bytes -> the tree. */
static void make_tree(grammar_vocab *v, token_tree *t, const int32_t *ids, uint32_t n) {
    uint32_t open[TOKEN_MAX_BYTES] = { 0 }, cap = 0;
    str before = { "", 0 };
    size_t depth = 0;
    *t = (token_tree){ 0 };
    for (uint32_t i = 0; i < n; i++) cap += (uint32_t)token_bytes(v, ids[i]).n;
    t->byte = xmalloc(cap + 1);
    t->depth = xmalloc((cap + 1) * sizeof *t->depth);
    t->end = xmalloc((cap + 1) * sizeof *t->end);
    t->id = xmalloc((cap + 1) * sizeof *t->id);
    for (uint32_t i = 0; i < n; i++) {
        const str s = token_bytes(v, ids[i]);
        size_t k = 0;
        while (k < s.n && k < before.n && s.p[k] == before.p[k]) k++;
        while (depth > k) t->end[open[--depth]] = t->n;
        for (; depth < s.n; depth++) {
            open[depth] = t->n;
            t->byte[t->n] = (uint8_t)s.p[depth];
            t->depth[t->n] = (uint16_t)depth;
            t->id[t->n++] = -1;
        }
        int32_t *at = &t->id[open[s.n - 1]];
        v->same[ids[i]] = *at;
        *at = ids[i];
        before = s;
    }
    while (depth > 0) t->end[open[--depth]] = t->n;
}

/* Every token is a descendant of the nodes in front of it, so one walk backward gathers. */
static void summarize(const grammar_vocab *v, token_tree *t) {
    t->kinds = xcalloc(t->n + 1, 1);
    t->count = xcalloc(t->n + 1, 1);
    for (uint32_t i = t->n; i-- > 0;) {
        for (int32_t id = t->id[i]; id >= 0; id = v->same[id]) {
            t->kinds[i] |= v->kinds[id];
            if (v->count[id] > t->count[i]) t->count[i] = v->count[id];
        }
        for (uint32_t k = i + 1; k < t->end[i]; k = t->end[k]) {
            t->kinds[i] |= t->kinds[k];
            if (t->count[k] > t->count[i]) t->count[i] = t->count[k];
        }
    }
}

static void tree_free(token_tree *t) {
    free(t->kinds);
    free(t->count);
    free(t->byte);
    free(t->depth);
    free(t->end);
    free(t->id);
}

static void set_bit(uint64_t *mask, int32_t id) { mask[id / 64] |= (uint64_t)1 << id % 64; }

static void note_plain(grammar_vocab *v, int32_t id, uint32_t count, uint8_t kinds) {
    v->kinds[id] = kinds;
    v->count[id] = (uint8_t)(count < UINT8_MAX ? count : UINT8_MAX);
    for (uint32_t k = count; k <= PLAIN_COUNTS; k++) set_bit(v->up_to[k], id);
    set_bit(v->up_to[0], id);
    if (count <= PLAIN_COUNTS) return;
    v->longer[v->n_longer] = id;
    v->longer_count[v->n_longer++] = (uint16_t)count;
}

bool grammar_vocab_new(grammar_vocab **out, const tokenizer *t, int vocab, err *e) {
    grammar_vocab *v = xcalloc(1, sizeof *v);
    const size_t n = (size_t)(vocab > 0 ? vocab : 0);
    uint64_t total = 0;
    v->vocab = vocab;
    v->words = (n + 63) / 64;
    v->same = xcalloc(n + 1, sizeof *v->same);
    v->kinds = xcalloc(v->words * 64 + 1, 1);
    v->count = xcalloc(v->words * 64 + 1, 1);
    v->longer = xcalloc(n + 1, sizeof *v->longer);
    v->longer_count = xcalloc(n + 1, sizeof *v->longer_count);
    v->bytes = xcalloc(n + 1, sizeof *v->bytes);
    for (int k = 0; k <= PLAIN_COUNTS; k++) v->up_to[k] = xcalloc(v->words + 1, sizeof(uint64_t));
    for (int32_t i = 0; i < vocab; i++) total += tokenizer_bytes(t, i).n;
    v->pool = total < 1u << 30 ? malloc(total + 1) : NULL;
    int32_t *plain = xcalloc(n + 1, sizeof *plain), *rest = xcalloc(n + 1, sizeof *rest);
    uint32_t n_plain = 0, n_rest = 0, at = 0;
    for (int32_t i = 0; v->pool && i < vocab; i++) {
        const str s = tokenizer_bytes(t, i);
        v->bytes[i] = at;
        if (is_text(t, i, s)) {
            memcpy(v->pool + at, s.p, s.n);
            at += (uint32_t)s.n;
            uint8_t kinds;
            const uint32_t count = plain_count(s, &kinds);
            if (count > 0) note_plain(v, i, count, kinds);
            *(count > 0 ? &plain[n_plain++] : &rest[n_rest++]) = i;
        }
        v->bytes[i + 1] = at;
    }
    if (v->pool) {
        qsort_r(plain, n_plain, sizeof *plain, by_bytes, v);
        qsort_r(rest, n_rest, sizeof *rest, by_bytes, v);
        make_tree(v, &v->plain, plain, n_plain);
        summarize(v, &v->plain);
        make_tree(v, &v->rest, rest, n_rest);
    }
    free(plain);
    free(rest);
    if (v->pool) return *out = v, true;
    grammar_vocab_free(v);
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "vocabulary: no memory for the bytes of %d tokens", vocab);
}

void grammar_vocab_free(grammar_vocab *v) {
    if (!v) return;
    tree_free(&v->plain);
    tree_free(&v->rest);
    for (int k = 0; k <= PLAIN_COUNTS; k++) free(v->up_to[k]);
    void *own[] = { v->same, v->longer, v->longer_count, v->kinds, v->count, v->bytes, v->pool, v };
    for (size_t i = 0; i < ARRAY_LEN(own); i++) free(own[i]);
}

/* ---- one request ---- */

struct grammar_run {
    const grammar_vocab *v;
    machine m;
    int choices, n_ends;
    uint32_t *at; /* [choices] configs */
    int32_t *ends;
    uint64_t *masks; /* [MASKS, words] of configs mask_of */
    uint32_t mask_of[MASKS];
    int next_mask;
};

bool grammar_run_new(grammar_run **out, const grammar *g, const grammar_vocab *v, int choices, const int32_t *end_ids,
                     int n_end_ids, err *e) {
    CHECK(choices > 0 && n_end_ids >= 0, "%d choices, %d end ids", choices, n_end_ids);
    grammar_run *r = xcalloc(1, sizeof *r);
    r->v = v;
    r->choices = choices;
    r->at = xcalloc((size_t)choices, sizeof *r->at);
    r->ends = xcalloc((size_t)n_end_ids + 1, sizeof *r->ends);
    for (int i = 0; i < n_end_ids; i++)
        if (end_ids[i] >= 0 && end_ids[i] < v->vocab) r->ends[r->n_ends++] = end_ids[i];
    r->masks = malloc((MASKS * v->words + 1) * sizeof *r->masks);
    machine_open(&r->m, g);
    for (int i = 0; i < choices; i++) r->at[i] = r->m.start;
    if (r->masks) return *out = r, true;
    grammar_run_free(r);
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "grammar: no memory for token masks");
}

void grammar_run_free(grammar_run *r) {
    if (!r) return;
    machine_close(&r->m);
    free(r->at);
    free(r->ends);
    free(r->masks);
    free(r);
}

/* Without plain tokens of these kinds and at most `run` characters, which are known. */
static void walk(machine *m, const grammar_vocab *v, const token_tree *t, uint32_t from, uint8_t kinds, uint32_t run,
                 uint64_t *mask) {
    uint32_t at[TOKEN_MAX_BYTES + 1];
    at[0] = from;
    for (uint32_t i = 0; i < t->n;) {
        if (run > 0 && (t->kinds[i] & ~kinds) == 0 && t->count[i] <= run) {
            i = t->end[i];
            continue;
        }
        const uint32_t d = t->depth[i], to = machine_step(m, at[d], t->byte[i]);
        if (to == MACHINE_DEAD) {
            i = t->end[i];
            continue;
        }
        at[d + 1] = to;
        for (int32_t id = t->id[i]; id >= 0; id = v->same[id]) set_bit(mask, id);
        i++;
    }
}

static void or_plain(const grammar_vocab *v, uint64_t left, uint64_t *mask) {
    const uint64_t *from = v->up_to[left > PLAIN_COUNTS ? PLAIN_COUNTS : left];
    for (size_t i = 0; i < v->words; i++) mask[i] |= from[i];
    for (uint32_t i = 0; left > PLAIN_COUNTS && i < v->n_longer; i++)
        if (v->longer_count[i] <= left) set_bit(mask, v->longer[i]);
}

static void or_known(const grammar_vocab *v, uint8_t kinds, uint32_t run, uint64_t *mask) {
    const uint8_t others = (uint8_t)~kinds;
    for (size_t w = 0; w < v->words; w++) {
        const uint8_t *k = v->kinds + 64 * w, *n = v->count + 64 * w;
        uint64_t bits = 0;
        for (int i = 0; i < 64; i++) bits |= (uint64_t)(k[i] != 0 && (k[i] & others) == 0 && n[i] <= run) << i;
        mask[w] |= bits;
    }
}

static void make_mask(grammar_run *r, uint32_t c, uint64_t *mask) {
    machine *m = &r->m;
    const grammar *g = m->g;
    const grammar_vocab *v = r->v;
    uint8_t kinds = 0;
    uint32_t run = 0;
    memset(mask, 0, v->words * sizeof *mask);
    for (uint32_t i = 0; i < m->configs[c].n; i++) {
        const machine_item it = m->items[m->configs[c].first + i];
        const grammar_state *q = &g->states[it.state];
        const grammar_rule *rule = &g->rules[q->rule];
        const uint32_t most = q->run < UINT8_MAX ? q->run : UINT8_MAX; /* longer tokens are walked, or there are none */
        if (!q->plain) {
            if (q->kinds == 0 || q->run == 0) continue;
            or_known(v, q->kinds, most, mask);
            if (__builtin_popcount(q->kinds) >= __builtin_popcount(kinds)) kinds = q->kinds, run = most;
            continue;
        }
        /* a thought does not count; a string's character has been counted when it may be read */
        const bool any = q->run == GRAMMAR_NEVER || (q->run == 0 && (rule->max < 0 || rule->start == it.state));
        if (any)
            for (size_t k = 0; k < v->words; k++) mask[k] |= v->up_to[0][k];
        else
            or_plain(v, q->run > 0 ? q->run : (uint64_t)(rule->max - it.count) + 1, mask);
    }
    const uint32_t others = machine_without_plain(m, c);
    if (others != MACHINE_DEAD) walk(m, v, &v->plain, others, kinds, run, mask);
    walk(m, v, &v->rest, c, 0, 0, mask);
    for (int i = 0; m->configs[c].accept && i < r->n_ends; i++) set_bit(mask, r->ends[i]);
}

static const uint64_t *mask_of(grammar_run *r, uint32_t c) {
    const int32_t have = r->m.configs[c].mask;
    if (have >= 0) return r->masks + (size_t)have * r->v->words;
    const int slot = r->next_mask;
    uint64_t *mask = r->masks + (size_t)slot * r->v->words;
    r->next_mask = (slot + 1) % MASKS;
    if (r->mask_of[slot]) r->m.configs[r->mask_of[slot]].mask = -1;
    make_mask(r, c, mask);
    r->mask_of[slot] = c;
    r->m.configs[c].mask = slot;
    return mask;
}

static bool is_end(const grammar_run *r, int32_t id) {
    for (int i = 0; i < r->n_ends; i++)
        if (r->ends[i] == id) return true;
    return false;
}

static uint32_t step_token(grammar_run *r, uint32_t c, int32_t id) {
    if (is_end(r, id)) return r->m.configs[c].accept ? c : MACHINE_DEAD;
    const str s = id >= 0 && id < r->v->vocab ? token_bytes(r->v, id) : (str){ "", 0 };
    if (s.n == 0) return MACHINE_DEAD;
    for (size_t i = 0; i < s.n && c != MACHINE_DEAD; i++) c = machine_step(&r->m, c, (uint8_t)s.p[i]);
    return c;
}

static void tidy(grammar_run *r) {
    if (!machine_is_full(&r->m)) return;
    machine_compact(&r->m, r->at, r->choices);
    memset(r->mask_of, 0, sizeof r->mask_of);
}

bool grammar_mask(void *ctx, int choice, const int32_t *ahead, int n, uint64_t *allowed, err *e) {
    grammar_run *r = ctx;
    CHECK(choice >= 0 && choice < r->choices, "choice %d of %d", choice, r->choices);
    tidy(r);
    uint32_t c = r->at[choice];
    for (int i = 0; i < n && c != MACHINE_DEAD; i++) c = step_token(r, c, ahead[i]);
    if (c == MACHINE_DEAD) return fail(e, ERR_INPUT, "E-GRAMMAR-TOKEN", "grammar: the tokens so far do not fit it");
    const uint64_t *mask = mask_of(r, c);
    uint64_t some = 0;
    for (size_t i = 0; i < r->v->words; i++) some |= allowed[i] = mask[i];
    if (r->m.overflow)
        return fail(e, ERR_INPUT, "E-GRAMMAR-SIZE",
                    "grammar: too many readings at once (make its alternatives differ sooner)");
    if (some) return true;
    return fail(e, ERR_INPUT, "E-GRAMMAR-TOKEN",
                "grammar: no token of the vocabulary fits (it lacks a single byte, or the request has no stop id)");
}

void grammar_accept(void *ctx, int choice, int32_t id) {
    grammar_run *r = ctx;
    CHECK(choice >= 0 && choice < r->choices, "choice %d of %d", choice, r->choices);
    tidy(r);
    r->at[choice] = step_token(r, r->at[choice], id);
}

bool grammar_complete(const grammar_run *r, int choice) { return r->m.configs[r->at[choice]].accept; }
