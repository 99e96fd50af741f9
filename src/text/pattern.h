/* pattern.h - the split pattern of a tokenizer.json, parsed and compiled (internal to src/text).
 *
 * HF runs the pattern through Oniguruma with Unicode 16.0. Here every set of characters in the pattern is resolved
 * with our own tables, the code points that no set tells apart form one class (a few dozen in all), and PCRE2 matches
 * bytes that are classes: what is a letter cannot depend on the library's Unicode version, and matching is as fast as
 * on ASCII. Patterns made of simple runs (GPT-2, Llama-3, Qwen) are also turned into rules for a direct scanner. */
#ifndef NIBBLE_PATTERN_H
#define NIBBLE_PATTERN_H

#include "base/err.h"
#include "base/str.h"
#include "text/unicode.h"

enum { PATTERN_SETS = 64, PATTERN_NODES = 2048, PATTERN_ITEMS = 1024, PATTERN_CLASSES = 255, PATTERN_INF = -1 };

/* ---- the parsed form ---- */

typedef enum item_kind { ITEM_RANGE, ITEM_GC, ITEM_SPACE, ITEM_WORD } item_kind;

typedef struct set_item {
    uint8_t kind; /* item_kind */
    bool negative;
    uint32_t lo, hi; /* RANGE: inclusive; GC: lo is a bit mask of categories; WORD: lo is 1 within brackets */
} set_item;

typedef struct char_set {
    int first, count; /* items; a code point is in the set when any item holds it */
    bool negative;
} char_set;

typedef enum node_kind { NODE_EMPTY, NODE_SET, NODE_CAT, NODE_ALT, NODE_REPEAT, NODE_LOOK, NODE_ATOMIC } node_kind;
typedef enum repeat_mode { REPEAT_GREEDY, REPEAT_LAZY, REPEAT_POSSESSIVE } repeat_mode;

typedef struct pattern_node {
    uint8_t kind, mode; /* node_kind, repeat_mode */
    bool behind, negative;
    bool folded; /* SET: an ASCII letter under (?i:...) */
    int set;
    int child, next; /* node indices, -1 = none */
    int min, max;    /* REPEAT; PATTERN_INF = unbounded */
} pattern_node;

typedef struct pattern_tree {
    pattern_node node[PATTERN_NODES];
    set_item item[PATTERN_ITEMS];
    char_set set[PATTERN_SETS];
    int nodes, items, sets, root;
} pattern_tree;

/* Parse an Oniguruma (Ruby syntax) pattern; a construct whose meaning could differ there is refused, not guessed:
 * E-TOK-PATTERN names it and its byte offset. literal: the pattern is plain text. */
NODISCARD bool pattern_parse(pattern_tree *t, str pattern, bool literal, err *e);

/* ---- classes ---- */

typedef struct class_map {
    uint16_t block[UNICODE_CODES >> 8]; /* code >> 8 -> row of `row` */
    uint8_t (*row)[256];
    int rows, classes;
    uint64_t members[PATTERN_CLASSES + 1]; /* class -> bit mask of the sets that hold it */
} class_map;

/* Errors: E-TOK-PATTERN (more than PATTERN_CLASSES classes). */
NODISCARD bool class_map_build(class_map *m, const pattern_tree *t, err *e);
void class_map_free(class_map *m);
static inline unsigned class_of(const class_map *m, uint32_t code) { return m->row[m->block[code >> 8]][code & 255]; }

/* ---- the direct scanner ---- */

typedef enum rule_kind {
    RULE_LITERALS,  /* one of some fixed sequences */
    RULE_RUN,       /* optional prefix, one to max of run, any number of tail */
    RULE_STAR_PLUS, /* any number of run, then one or more of tail; tail is part of run */
    RULE_LOOK       /* one or more of run, not followed by anything outside run */
} rule_kind;

typedef struct scan_rule {
    rule_kind kind;
    uint32_t prefix, run, tail; /* one bit each, 0 = none */
    size_t max;                 /* SIZE_MAX = unbounded */
    int first, count;           /* LITERALS: rows of scanner.literal */
} scan_rule;

enum { SCAN_RULES = 32, SCAN_LITERALS = 32, SCAN_LITERAL_MAX = 8 };

typedef struct scanner {
    scan_rule rule[SCAN_RULES];
    int rules, literals;
    uint32_t literal[SCAN_LITERALS][SCAN_LITERAL_MAX]; /* set bits, 0 ends */
    uint32_t mask[PATTERN_CLASSES + 1];                /* class -> sets that hold it */
    uint32_t start[PATTERN_CLASSES + 1];               /* class -> rules that may begin with it */
    uint32_t ascii_mask[128], ascii_start[128];
} scanner;

/* False when the pattern is not of the simple kind (the PCRE2 path serves it). */
bool scanner_build(scanner *s, const pattern_tree *t, const class_map *m);

/* End of the next piece of p[0..n) from `at` (< n) on; *match tells a match from text between matches. */
size_t scanner_next(const scanner *s, const class_map *m, const uint8_t *p, size_t n, size_t at, bool *match);

#endif
