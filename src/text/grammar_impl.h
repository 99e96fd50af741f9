/* grammar_impl.h - rules over bytes, how they are built and how they run. Private to text/grammar*.
 *
 * A rule is a graph of states. Edges read a byte, or nothing, or call another rule and go on behind it. A rule may count (its
 * register starts at 0 with every call): an INC edge needs count < max, an EXIT edge count >= min and ends the counting.
 *
 * The machine follows all readings at once. A configuration is a sorted list of items (state, count, stack set); a stack set
 * is a sorted list of frames (return state, count, stack set below). Equal ones are stored once, so configurations are
 * numbers, and what a byte does to one is remembered. Rules never call themselves before reading a byte unless it is the last
 * thing they do, which needs no frame: so no step loops. */
#ifndef NIBBLE_GRAMMAR_IMPL_H
#define NIBBLE_GRAMMAR_IMPL_H

#include "text/grammar.h"

enum {
    GRAMMAR_MAX_STATES = 1 << 18,
    GRAMMAR_MAX_EDGES = 1 << 20,
    GRAMMAR_MAX_RULES = 8192,
    GRAMMAR_MAX_FRAMES = 120, /* nesting of calls; a level of JSON takes one or two */
    GRAMMAR_NEVER = UINT16_MAX
};

typedef enum edge_kind { EDGE_BYTE, EDGE_EPS, EDGE_INC, EDGE_EXIT, EDGE_CALL } edge_kind;

typedef struct grammar_edge {
    uint8_t kind, lo, hi;
    uint32_t to, rule; /* CALL: `to` is where it goes on */
    uint32_t next;     /* of the same state; 0 = none */
} grammar_edge;

typedef struct grammar_state {
    uint32_t first, rule;
    uint16_t need; /* frames it takes to get to the rule's end; GRAMMAR_NEVER: there is no way */
    bool final;
    /* What is known without walking. plain: of plain characters (grammar_kind) any may follow, `run` of them and no more; or
     * run 0: each counting one and leading back here. Else: up to `run` characters of these kinds may follow, and other things
     * too. GRAMMAR_NEVER: any number. */
    bool plain;
    uint8_t kinds;
    uint16_t run;
} grammar_state;

typedef struct grammar_rule {
    uint32_t start;
    int64_t min, max; /* max -1: none */
} grammar_rule;

struct grammar {
    grammar_state *states; /* 0 is not used */
    grammar_edge *edges;   /* 0 is not used */
    grammar_rule *rules;
    uint32_t n_states, n_edges, n_rules, cap_states, cap_edges, cap_rules;
    uint32_t top; /* rule */
    bool full;    /* a limit was reached: the rules are not complete */
    uint8_t class_of[256];
    int classes;
};

/* Plain characters are those that JSON strings, texts and thoughts treat alike: no control, none of " \ <, no white space
 * above ASCII. Their kinds are what patterns mostly treat alike. */
enum { KIND_LOWER = 1, KIND_UPPER = 2, KIND_DIGIT = 4, KIND_SPACE = 8, KIND_MARK = 16, KIND_WIDE = 32, KINDS_ALL = 63 };
typedef struct kind_range {
    uint32_t lo, hi;
    uint8_t kind;
} kind_range;
extern const kind_range grammar_kinds[];
extern const size_t grammar_n_kinds;
uint8_t grammar_kind(uint32_t c); /* 0: not plain */

/* ---- building: after `full` everything is a no-op that returns 0 ---- */
grammar *grammar_begin(void);
uint32_t grammar_add_rule(grammar *g, int64_t min, int64_t max); /* with its start state */
uint32_t grammar_add_state(grammar *g, uint32_t rule);
void grammar_add_edge(grammar *g, uint32_t from, edge_kind kind, uint32_t to);
void grammar_add_bytes(grammar *g, uint32_t from, int lo, int hi, uint32_t to);
void grammar_add_call(grammar *g, uint32_t from, uint32_t rule, uint32_t to);
/* from, then these bytes; returns where that ends. */
uint32_t grammar_add_text(grammar *g, uint32_t from, str text);
/* UTF-8 of every code point lo..hi (surrogates left out). */
void grammar_add_codes(grammar *g, uint32_t from, uint32_t lo, uint32_t hi, uint32_t to);
/* Analysis; edges into nowhere go. E-GRAMMAR-SIZE, E-GRAMMAR-SCHEMA (no text at all). On failure *g is freed. */
NODISCARD bool grammar_finish(grammar **g, uint32_t body, const grammar_options *o, err *e);

/* ---- JSON ---- */
uint32_t grammar_space(grammar *g); /* the rule of white space; nullable */
/* A string of min..max characters. tags: none of the four tags of tool calls within. */
uint32_t grammar_string(grammar *g, int64_t min, int64_t max, bool tags);
/* Raw text of min..max characters and the "\n</parameter>" behind it. */
uint32_t grammar_text(grammar *g, int64_t min, int64_t max);
typedef struct number_form {
    bool integer, no_sign;
    bool bounded; /* integer: lo..hi */
    int64_t lo, hi;
} number_form;
uint32_t grammar_number(grammar *g, const number_form *f);
typedef struct json_rules {
    uint32_t space, string, number, value, object, array;
} json_rules;
void grammar_json(grammar *g, json_rules *r, bool tags);

/* ---- automata over characters ---- */
typedef struct dfa_edge {
    uint32_t from, lo, hi, to; /* code points; edges of a state are together, in order, without overlap */
} dfa_edge;
typedef struct dfa {
    uint32_t n, n_edges, cap_edges, cap;
    uint32_t *first; /* [n + 1] into edge */
    dfa_edge *edge;
    bool *accept;
} dfa; /* state 0 is the start; zeroed = empty */
void dfa_free(dfa *d);
uint32_t dfa_state(dfa *d, bool accept);                      /* appended; then its edges */
void dfa_link(dfa *d, uint32_t lo, uint32_t hi, uint32_t to); /* of the newest state */
/* Strings that contain a match. Errors: E-GRAMMAR-SCHEMA (what is not supported), E-GRAMMAR-SIZE. */
NODISCARD bool dfa_regex(dfa *out, str pattern, err *e);
NODISCARD bool dfa_length(dfa *out, int64_t min, int64_t max, err *e); /* E-GRAMMAR-SIZE */
void dfa_not_names(dfa *out, const str *names, size_t n);              /* everything but these */
void dfa_no_tags(dfa *out);
NODISCARD bool dfa_both(dfa *out, const dfa *a, const dfa *b, err *e); /* E-GRAMMAR-SIZE */
/* As a JSON string with its quotes, or raw. */
uint32_t grammar_dfa(grammar *g, const dfa *d, bool json);

/* ---- schemas ---- */
typedef struct schema_compiler schema_compiler;
schema_compiler *schema_begin(grammar *g, const json *root, bool tags);
void schema_free(schema_compiler *c);
/* The rule of a schema: as JSON, or (raw) as the value of a parameter with the "\n</parameter>" behind it. */
NODISCARD bool schema_rule(schema_compiler *c, uint32_t *rule, const json *schema, bool raw, err *e);

/* ---- running ---- */
typedef struct stack_frame {
    uint32_t state, count_lo, below; /* state UINT32_MAX: the bottom */
} stack_frame;
typedef struct stack_set {
    uint32_t first, n, depth, next; /* frames; chain of the table */
} stack_set;
typedef struct machine_item {
    uint32_t state, count, stack;
} machine_item;
typedef struct machine_config {
    uint32_t first, n, next;
    bool accept;
    int32_t mask;  /* the caller's; -1 = none */
    uint32_t *row; /* [classes]; UINT32_MAX = not known */
} machine_config;

typedef struct machine {
    const grammar *g;
    stack_frame *frames;
    stack_set *sets;
    machine_item *items, *work;
    machine_config *configs;
    uint32_t *set_table, *config_table;
    uint32_t n_frames, cap_frames, n_sets, cap_sets, n_items, cap_items, n_configs, cap_configs, n_work, cap_work;
    uint32_t start;
    uint32_t at;           /* of the closure being made: the work item that is followed */
    bool accept;           /* of the same */
    bool overflow;         /* a limit was reached: what seems dead need not be */
    uint32_t memo[3][512]; /* of unions */
} machine;

/* What is remembered at most before it is time to compact; a single walk may take four times that, then m->overflow is set. */
enum { MACHINE_DEAD = 0, MACHINE_SETS = 1 << 16, MACHINE_CONFIGS = 1 << 13 };

void machine_open(machine *m, const grammar *g);
void machine_close(machine *m);
uint32_t machine_step_slow(machine *m, uint32_t config, uint8_t byte);
static inline uint32_t machine_step(machine *m, uint32_t config, uint8_t byte) {
    const uint32_t *row = m->configs[config].row;
    const uint32_t to = row ? row[m->g->class_of[byte]] : UINT32_MAX;
    return to != UINT32_MAX ? to : machine_step_slow(m, config, byte);
}
/* More is remembered than should be: machine_compact keeps keep[0..n) alone, under new numbers. */
bool machine_is_full(const machine *m);
void machine_compact(machine *m, uint32_t *keep, int n);
/* Config of the items that can read one more byte in `c`, without those of plain states; 0: none is left. */
uint32_t machine_without_plain(machine *m, uint32_t c);

#endif
