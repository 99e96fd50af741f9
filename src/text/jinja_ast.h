/* jinja_ast.h - the syntax tree of a template, shared by lexer, parser, scoping and evaluation.
 *
 * Everything lives in the template's arena. Names are interned: a name id indexes jinja.names and, at run
 * time, the table of context variables. */
#ifndef NIBBLE_JINJA_AST_H
#define NIBBLE_JINJA_AST_H

#include "base/arena.h"
#include "text/jinja.h"
#include "text/jinja_val.h"

typedef enum token_type {
    T_EOF,
    T_DATA,
    T_VAR_BEGIN,
    T_VAR_END,
    T_BLOCK_BEGIN,
    T_BLOCK_END,
    T_NAME,
    T_STRING,
    T_INT,
    T_FLOAT,
    T_ADD,
    T_SUB,
    T_MUL,
    T_DIV,
    T_FLOORDIV,
    T_MOD,
    T_POW,
    T_TILDE,
    T_EQ,
    T_NE,
    T_LT,
    T_LE,
    T_GT,
    T_GE,
    T_ASSIGN,
    T_DOT,
    T_COLON,
    T_COMMA,
    T_PIPE,
    T_SEMICOLON,
    T_LPAREN,
    T_RPAREN,
    T_LBRACKET,
    T_RBRACKET,
    T_LBRACE,
    T_RBRACE
} token_type;

typedef struct token {
    token_type type;
    int line;
    str text;  /* DATA, NAME, STRING: the value; numbers and operators: as written */
    val value; /* INT, FLOAT */
} token;

typedef enum node_kind {
    /* expressions */
    N_CONST,
    N_NAME,
    N_NSREF,
    N_TUPLE,
    N_LIST,
    N_DICT,
    N_NEG,
    N_POS,
    N_NOT,
    N_AND,
    N_OR,
    N_BIN,
    N_CONCAT,
    N_COMPARE,
    N_COND,
    N_ATTR,
    N_ITEM,
    N_SLICE,
    N_CALL,
    N_FILTER,
    N_TEST,
    /* statements */
    N_DATA,
    N_PRINT,
    N_FOR,
    N_IF,
    N_SET,
    N_SETBLOCK,
    N_MACRO,
    N_CALLBLOCK,
    N_FILTERBLOCK,
    N_WITH,
    N_SCOPE,
    N_BLOCK,
    N_DO,
    N_BREAK,
    N_CONTINUE
} node_kind;

typedef enum compare_op { C_EQ, C_NE, C_LT, C_LE, C_GT, C_GE, C_IN, C_NOTIN } compare_op;

/* Where a variable lives: `hops` functions up the closure chain, then a slot of that activation. */
typedef struct ref {
    uint32_t hops, slot;
} ref;

/* What entering a scope does with one of its own variables. */
typedef enum load_action { LOAD_PARAM, LOAD_RESOLVE, LOAD_ALIAS, LOAD_UNDEFINED } load_action;
typedef struct load {
    load_action action;
    uint32_t slot; /* in the current activation */
    ref from;      /* ALIAS */
    uint32_t name; /* RESOLVE: context variable */
} load;
typedef struct scope {
    load *loads;
    size_t n;
} scope;

typedef struct node node;
typedef struct node_list {
    node **v;
    size_t n, cap;
} node_list;

typedef struct keyword {
    str name;
    node *value;
} keyword;
typedef struct call_args_node {
    node_list pos;
    keyword *kw;
    size_t n_kw, cap_kw;
    node *star, *star2; /* *args and **kwargs or NULL */
} call_args_node;

/* Parameters of a macro or call block. Defaults belong to the last n_defaults parameters. */
typedef struct signature {
    uint32_t *names;
    ref *refs;
    size_t n;
    node_list defaults;
    bool wants_caller, wants_kwargs, wants_varargs, explicit_caller;
    ref caller, kwargs, varargs;
} signature;

/* One code body with its own activation: the template, a macro, a recursive loop, a loop's filter. */
typedef struct unit {
    uint32_t n_slots;
} unit;

struct node {
    uint8_t kind;   /* node_kind */
    uint8_t op;     /* BIN: token_type; COMPARE: see ops; CONST unused */
    bool flag;      /* SET, SETBLOCK, MACRO: also a context variable; BLOCK: scoped; NAME: a store */
    bool uses_loop; /* FOR: the body mentions `loop` */
    bool recursive; /* FOR */
    int line;
    uint32_t depth;                  /* of the expression below, for the limit */
    uint32_t name;                   /* NAME, NSREF, MACRO */
    ref at;                          /* NAME, NSREF, MACRO: resolved by scoping */
    str text;                        /* DATA; ATTR, NSREF: attribute; FILTER, TEST: name as written */
    val value;                       /* CONST */
    node *a, *b, *c;                 /* operands; see jinja_parse.c beside each constructor */
    node_list list;                  /* items, concat parts, compare operands, body */
    node_list list2;                 /* else branch; WITH: targets */
    uint8_t *ops;                    /* COMPARE: compare_op per operand in list */
    call_args_node *args;            /* CALL, FILTER, TEST */
    const struct filter_def *filter; /* FILTER: NULL = unknown (an error when evaluated) */
    const struct test_def *test;
    signature *sig;             /* MACRO, CALLBLOCK */
    scope in, in_else, in_test; /* FOR, WITH, SCOPE, MACRO, ... */
    unit unit_body, unit_test;  /* MACRO, CALLBLOCK, BLOCK, recursive FOR; FOR with a filter */
    node *target_test;          /* FOR with a filter: the target again, resolved inside the filter */
    ref loop_at;                /* FOR: slot of `loop` */
};

struct jinja {
    arena mem;
    str *names; /* interned */
    uint32_t n_names, cap_names;
    uint32_t *name_index; /* open addressing, value = id + 1 */
    uint32_t name_mask;
    node_list body;
    scope in;
    unit root;
};

/* jinja_lex.c: tokens of a whole source, ending in T_EOF. */
NODISCARD bool jinja_lex(arena *a, str source, token **out, size_t *n, err *e);
/* jinja_parse*.c: fill t->body from tokens. */
NODISCARD bool jinja_parse(jinja *t, const token *tokens, size_t n, err *e);
uint32_t jinja_intern(jinja *t, str name);
/* jinja_scope.c: resolve every name and lay out activations. */
NODISCARD bool jinja_resolve(jinja *t, err *e);

bool syntax_fail(err *e, int line, const char *fmt, ...) PRINTF_LIKE(3, 4);

#endif
