/* jinja_parse.h - the two halves of the parser: expressions (jinja_parse.c) and statements (jinja_stmt.c). */
#ifndef NIBBLE_JINJA_PARSE_H
#define NIBBLE_JINJA_PARSE_H

#include "text/jinja_ast.h"

/* Deeper templates are refused: recursion is bounded by the parser, not by the machine's stack. */
enum { PARSE_MAX_NEST = 200, NODE_MAX_DEPTH = 1000 };

typedef struct parser {
    jinja *t;
    const token *v;
    size_t n, at;
    int nest;
    int loops;                                      /* FOR statements around this point */
    uint32_t n_loop, n_caller, n_kwargs, n_varargs; /* loads of these names so far: what a body mentions */
    err *e;
} parser;

static inline const token *cur(const parser *p) { return &p->v[p->at]; }
static inline const token *peek(const parser *p) { return &p->v[p->at + 1 < p->n ? p->at + 1 : p->at]; }
static inline void skip(parser *p) {
    if (p->at + 1 < p->n) p->at++;
}
static inline bool is_name(const token *t, const char *name) { return t->type == T_NAME && str_is(t->text, name); }

node *parse_node(parser *p, node_kind kind, int line); /* NULL: out of memory, recorded */
bool parse_list_add(parser *p, node_list *l, node *n);
bool parse_fail(parser *p, const char *fmt, ...) PRINTF_LIKE(2, 3); /* at the current token */
bool parse_unexpected(parser *p, const char *wanted);
bool parse_expect(parser *p, token_type type, const char *wanted);
bool parse_enter(parser *p);

/* All return NULL after a recorded failure. */
node *parse_expression(parser *p, bool with_cond);
node *parse_primary(parser *p, bool with_namespace);
node *parse_tuple(parser *p, bool simple, bool with_cond, bool parens, bool with_namespace);
node *parse_filters(parser *p, node *on, bool start_inline); /* on may be NULL: a filter block */
bool parse_statements(parser *p, node_list *body, const char *const *ends);

#endif
