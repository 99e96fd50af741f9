/* Expressions. The grammar and its oddities (** binds to the left, unary minus takes no filter, `not` may
 * stand before comparisons) are jinja2's. */
#include "text/jinja_parse.h"

#include <stdarg.h>
#include <stdio.h>

static bool no_memory(parser *p) {
    return fail(p->e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory");
}

bool parse_fail(parser *p, const char *fmt, ...) {
    char msg[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    return syntax_fail(p->e, cur(p)->line, "%s", msg);
}

bool parse_unexpected(parser *p, const char *wanted) {
    const token *t = cur(p);
    const char *what = t->type == T_EOF         ? "end of template"
                       : t->type == T_VAR_END   ? "end of print statement"
                       : t->type == T_BLOCK_END ? "end of statement block"
                       : t->type == T_DATA      ? "template text"
                                                : NULL;
    if (what) return parse_fail(p, "expected %s, got %s", wanted, what);
    return parse_fail(p, "expected %s, got '" STR_FMT "'", wanted, STR_ARG(t->text));
}

bool parse_expect(parser *p, token_type type, const char *wanted) {
    if (cur(p)->type != type) return parse_unexpected(p, wanted);
    skip(p);
    return true;
}

bool parse_enter(parser *p) {
    if (++p->nest <= PARSE_MAX_NEST) return true;
    return fail(p->e, ERR_INPUT, "E-TEMPLATE-LIMIT", "chat template line %d: nested deeper than %d", cur(p)->line,
                PARSE_MAX_NEST);
}

node *parse_node(parser *p, node_kind kind, int line) {
    node *n = arena_zero(&p->t->mem, 1, sizeof *n);
    if (!n) {
        no_memory(p);
        return NULL;
    }
    n->kind = (uint8_t)kind;
    n->line = line;
    return n;
}

bool parse_list_add(parser *p, node_list *l, node *n) {
    if (!n) return false;
    if (l->n == l->cap) {
        const size_t cap = l->cap ? l->cap * 2 : 4;
        node **v = arena_take(&p->t->mem, cap, sizeof *v);
        if (!v) return no_memory(p);
        if (l->n) memcpy(v, l->v, l->n * sizeof *v);
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = n;
    return true;
}

/* Record that `n` stands over `below`; long chains such as a+b+c+... are deep on their left side. */
static node *over(parser *p, node *n, const node *below) {
    if (!n) return NULL;
    if (below && below->depth + 1 > n->depth) n->depth = below->depth + 1;
    if (n->depth <= NODE_MAX_DEPTH) return n;
    fail(p->e, ERR_INPUT, "E-TEMPLATE-LIMIT", "chat template line %d: expression of more than %d chained operations",
         n->line, NODE_MAX_DEPTH);
    return NULL;
}

static node *binary(parser *p, node_kind kind, int op, int line, node *a, node *b) {
    node *n = b ? parse_node(p, kind, line) : NULL;
    if (!n) return NULL;
    n->op = (uint8_t)op;
    n->a = a;
    n->b = b;
    return over(p, over(p, n, a), b);
}

static bool skip_name(parser *p, const char *name) {
    if (!is_name(cur(p), name)) return false;
    skip(p);
    return true;
}

/* CALL arguments; the current token is the opening parenthesis. */
static call_args_node *parse_call_args(parser *p, node *owner) {
    call_args_node *a = arena_zero(&p->t->mem, 1, sizeof *a);
    if (!a) {
        no_memory(p);
        return NULL;
    }
    skip(p);
    bool comma = false;
    while (cur(p)->type != T_RPAREN) {
        if (comma) {
            if (!parse_expect(p, T_COMMA, "','")) return NULL;
            if (cur(p)->type == T_RPAREN) break;
        }
        const token *t = cur(p);
        node *v;
        bool ok = !a->star2;
        if (t->type == T_MUL) {
            skip(p);
            ok = ok && !a->star;
            v = a->star = parse_expression(p, true);
        } else if (t->type == T_POW) {
            skip(p);
            v = a->star2 = parse_expression(p, true);
        } else if (t->type == T_NAME && peek(p)->type == T_ASSIGN) {
            skip(p);
            skip(p);
            v = parse_expression(p, true);
            if (v && a->n_kw == a->cap_kw) {
                const size_t cap = a->cap_kw ? a->cap_kw * 2 : 4;
                keyword *kw = arena_take(&p->t->mem, cap, sizeof *kw);
                if (!kw) {
                    no_memory(p);
                    return NULL;
                }
                if (a->n_kw) memcpy(kw, a->kw, a->n_kw * sizeof *kw);
                a->kw = kw;
                a->cap_kw = cap;
            }
            if (v) a->kw[a->n_kw++] = (keyword){ t->text, v };
        } else {
            ok = ok && !a->star && !a->n_kw;
            v = parse_expression(p, true);
            if (v && !parse_list_add(p, &a->pos, v)) return NULL;
        }
        if (v && !ok) {
            syntax_fail(p->e, t->line, "invalid syntax for function call expression");
            return NULL;
        }
        if (!v || !over(p, owner, v)) return NULL;
        comma = true;
    }
    skip(p);
    return a;
}

static node *parse_call(parser *p, node *fn) {
    node *n = parse_node(p, N_CALL, cur(p)->line);
    if (!n) return NULL;
    n->a = fn;
    n->args = parse_call_args(p, n);
    return n->args ? over(p, n, fn) : NULL;
}

/* One subscript between the brackets: an expression, or a slice (a = start, b = stop, c = step). */
static node *parse_subscribed(parser *p) {
    const int line = cur(p)->line;
    node *part[3] = { 0 };
    if (cur(p)->type != T_COLON) {
        part[0] = parse_expression(p, true);
        if (!part[0] || cur(p)->type != T_COLON) return part[0];
    }
    skip(p);
    for (int i = 1; i < 3; i++) {
        const token_type t = cur(p)->type;
        if (i == 2) {
            if (t != T_COLON) break;
            skip(p);
        }
        const token_type u = cur(p)->type;
        if (u == T_COLON && i == 1) continue;
        if (u == T_RBRACKET || u == T_COMMA) continue;
        if (!(part[i] = parse_expression(p, true))) return NULL;
    }
    node *n = parse_node(p, N_SLICE, line);
    if (!n) return NULL;
    n->a = part[0];
    n->b = part[1];
    n->c = part[2];
    return over(p, over(p, over(p, n, n->a), n->b), n->c);
}

static node *parse_subscript(parser *p, node *on) {
    const int line = cur(p)->line;
    if (cur(p)->type == T_DOT) {
        skip(p);
        const token *t = cur(p);
        if (t->type != T_NAME && t->type != T_INT) {
            parse_unexpected(p, "name or number");
            return NULL;
        }
        node *n = parse_node(p, t->type == T_NAME ? N_ATTR : N_ITEM, line);
        if (!n) return NULL;
        n->a = on;
        if (t->type == T_NAME) {
            n->text = t->text;
        } else {
            if (!(n->b = parse_node(p, N_CONST, line))) return NULL;
            n->b->value = t->value;
        }
        skip(p);
        return over(p, n, on);
    }
    skip(p);
    node *arg = NULL, *tuple = NULL;
    size_t count = 0;
    while (cur(p)->type != T_RBRACKET) {
        if (count && !parse_expect(p, T_COMMA, "','")) return NULL;
        arg = parse_subscribed(p);
        if (!arg) return NULL;
        if (!tuple && !(tuple = parse_node(p, N_TUPLE, line))) return NULL;
        if (!parse_list_add(p, &tuple->list, arg) || !over(p, tuple, arg)) return NULL;
        count++;
    }
    skip(p);
    if (!tuple && !(tuple = parse_node(p, N_TUPLE, line))) return NULL;
    return binary(p, N_ITEM, 0, line, on, count == 1 ? arg : tuple);
}

static node *parse_postfix(parser *p, node *n) {
    while (n) {
        const token_type t = cur(p)->type;
        if (t == T_DOT || t == T_LBRACKET)
            n = parse_subscript(p, n);
        else if (t == T_LPAREN)
            n = parse_call(p, n);
        else
            break;
    }
    return n;
}

/* Name of a filter or test; dots are part of it. */
static bool parse_dotted(parser *p, str *out) {
    if (cur(p)->type != T_NAME) return parse_unexpected(p, "name");
    *out = cur(p)->text;
    skip(p);
    while (cur(p)->type == T_DOT) {
        skip(p);
        if (cur(p)->type != T_NAME) return parse_unexpected(p, "name");
        const str part = cur(p)->text;
        char *s = arena_take(&p->t->mem, out->n + part.n + 1, 1);
        if (!s) return no_memory(p);
        memcpy(s, out->p, out->n);
        s[out->n] = '.';
        memcpy(s + out->n + 1, part.p, part.n);
        *out = (str){ s, out->n + part.n + 1 };
        skip(p);
    }
    return true;
}

static bool no_args(parser *p, node *n) {
    n->args = arena_zero(&p->t->mem, 1, sizeof *n->args);
    return n->args || no_memory(p);
}

node *parse_filters(parser *p, node *on, bool start_inline) {
    while (start_inline || cur(p)->type == T_PIPE) {
        if (!start_inline) skip(p);
        start_inline = false;
        node *n = parse_node(p, N_FILTER, cur(p)->line);
        if (!n || !parse_dotted(p, &n->text)) return NULL;
        n->filter = filter_find(n->text);
        n->a = on;
        if (cur(p)->type == T_LPAREN) {
            if (!(n->args = parse_call_args(p, n))) return NULL;
        } else if (!no_args(p, n)) {
            return NULL;
        }
        if (!(on = over(p, n, on))) return NULL;
    }
    return on;
}

static node *parse_test(parser *p, node *on) {
    const int line = cur(p)->line;
    skip(p);
    const bool negated = skip_name(p, "not");
    node *n = parse_node(p, N_TEST, line);
    if (!n || !parse_dotted(p, &n->text)) return NULL;
    n->test = test_find(n->text);
    n->a = on;
    const token *t = cur(p);
    const bool starts = t->type == T_NAME || t->type == T_STRING || t->type == T_INT || t->type == T_FLOAT ||
                        t->type == T_LBRACKET || t->type == T_LBRACE;
    if (t->type == T_LPAREN) {
        if (!(n->args = parse_call_args(p, n))) return NULL;
    } else if (!no_args(p, n)) {
        return NULL;
    } else if (starts && !is_name(t, "else") && !is_name(t, "or") && !is_name(t, "and")) {
        if (is_name(t, "is")) {
            parse_fail(p, "you cannot chain multiple tests with is");
            return NULL;
        }
        node *arg = parse_postfix(p, parse_primary(p, false));
        if (!parse_list_add(p, &n->args->pos, arg) || !over(p, n, arg)) return NULL;
    }
    if (!over(p, n, on)) return NULL;
    return negated ? binary(p, N_NOT, 0, line, NULL, n) : n;
}

static node *parse_filter_expr(parser *p, node *n) {
    while (n) {
        const token *t = cur(p);
        if (t->type == T_PIPE)
            n = parse_filters(p, n, false);
        else if (is_name(t, "is"))
            n = parse_test(p, n);
        else if (t->type == T_LPAREN)
            n = parse_call(p, n);
        else
            break;
    }
    return n;
}

static node *parse_list(parser *p) {
    node *n = parse_node(p, N_LIST, cur(p)->line);
    skip(p);
    while (n && cur(p)->type != T_RBRACKET) {
        if (n->list.n && !parse_expect(p, T_COMMA, "','")) return NULL;
        if (cur(p)->type == T_RBRACKET) break;
        node *item = parse_expression(p, true);
        if (!parse_list_add(p, &n->list, item) || !over(p, n, item)) return NULL;
    }
    skip(p);
    return n;
}

/* DICT: list holds key, value, key, value ... */
static node *parse_dict(parser *p) {
    node *n = parse_node(p, N_DICT, cur(p)->line);
    skip(p);
    while (n && cur(p)->type != T_RBRACE) {
        if (n->list.n && !parse_expect(p, T_COMMA, "','")) return NULL;
        if (cur(p)->type == T_RBRACE) break;
        node *key = parse_expression(p, true);
        if (!parse_list_add(p, &n->list, key) || !over(p, n, key) || !parse_expect(p, T_COLON, "':'")) return NULL;
        node *item = parse_expression(p, true);
        if (!parse_list_add(p, &n->list, item) || !over(p, n, item)) return NULL;
    }
    skip(p);
    return n;
}

static node *parse_string(parser *p) {
    node *n = parse_node(p, N_CONST, cur(p)->line);
    if (!n) return NULL;
    str s = cur(p)->text;
    skip(p);
    if (cur(p)->type == T_STRING) { /* neighbours join */
        buf b = { 0 };
        buf_str(&b, s);
        for (; cur(p)->type == T_STRING; skip(p)) buf_str(&b, cur(p)->text);
        s = arena_str(&p->t->mem, buf_view(&b));
        buf_free(&b);
        if (!s.p) {
            no_memory(p);
            return NULL;
        }
    }
    n->value = v_str(s);
    return n;
}

static node *parse_name(parser *p, bool with_namespace) {
    const token *t = cur(p);
    skip(p);
    node *n = parse_node(p, N_NAME, t->line);
    if (!n) return NULL;
    const bool yes = str_is(t->text, "true") || str_is(t->text, "True");
    if (yes || str_is(t->text, "false") || str_is(t->text, "False")) {
        n->kind = N_CONST;
        n->value = v_bool(yes);
        return n;
    }
    if (str_is(t->text, "none") || str_is(t->text, "None")) {
        n->kind = N_CONST;
        n->value = v_none();
        return n;
    }
    n->name = jinja_intern(p->t, t->text);
    n->text = t->text;
    if (with_namespace && cur(p)->type == T_DOT) {
        skip(p);
        if (cur(p)->type != T_NAME) {
            parse_unexpected(p, "name");
            return NULL;
        }
        n->kind = N_NSREF;
        n->text = cur(p)->text;
        skip(p);
        return n;
    }
    p->n_loop += str_is(t->text, "loop");
    p->n_caller += str_is(t->text, "caller");
    p->n_kwargs += str_is(t->text, "kwargs");
    p->n_varargs += str_is(t->text, "varargs");
    return n;
}

node *parse_primary(parser *p, bool with_namespace) {
    const token *t = cur(p);
    node *n;
    switch (t->type) {
    case T_NAME: return parse_name(p, with_namespace);
    case T_STRING: return parse_string(p);
    case T_INT:
    case T_FLOAT:
        if (!(n = parse_node(p, N_CONST, t->line))) return NULL;
        n->value = t->value;
        skip(p);
        return n;
    case T_LPAREN:
        skip(p);
        n = parse_tuple(p, false, true, true, false);
        return n && parse_expect(p, T_RPAREN, "')'") ? n : NULL;
    case T_LBRACKET: return parse_list(p);
    case T_LBRACE: return parse_dict(p);
    default: parse_unexpected(p, "an expression"); return NULL;
    }
}

node *parse_tuple(parser *p, bool simple, bool with_cond, bool parens, bool with_namespace) {
    const int line = cur(p)->line;
    node *first = NULL, *tuple = NULL;
    for (;;) {
        if (first && !parse_expect(p, T_COMMA, "','")) return NULL;
        const token_type t = cur(p)->type;
        if (t == T_VAR_END || t == T_BLOCK_END || t == T_RPAREN) break;
        node *n = simple ? parse_primary(p, with_namespace) : parse_expression(p, with_cond);
        if (!n) return NULL;
        if (!first) first = n;
        if (tuple && (!parse_list_add(p, &tuple->list, n) || !over(p, tuple, n))) return NULL;
        if (cur(p)->type != T_COMMA) break;
        if (!tuple) {
            if (!(tuple = parse_node(p, N_TUPLE, line))) return NULL;
            if (!parse_list_add(p, &tuple->list, first) || !over(p, tuple, first)) return NULL;
        }
    }
    if (tuple) return tuple;
    if (first) return first;
    if (!parens) {
        parse_unexpected(p, "an expression");
        return NULL;
    }
    return parse_node(p, N_TUPLE, line);
}

static node *parse_unary(parser *p, bool with_filter) {
    const token *t = cur(p);
    node *n;
    if (t->type == T_SUB || t->type == T_ADD) {
        skip(p);
        if (!parse_enter(p)) return NULL;
        n = parse_unary(p, false);
        p->nest--;
        n = binary(p, t->type == T_SUB ? N_NEG : N_POS, 0, t->line, NULL, n);
    } else {
        n = parse_primary(p, false);
    }
    n = parse_postfix(p, n);
    return with_filter ? parse_filter_expr(p, n) : n;
}

static node *parse_pow(parser *p) {
    int line = cur(p)->line;
    node *left = parse_unary(p, true);
    while (left && cur(p)->type == T_POW) {
        skip(p);
        left = binary(p, N_BIN, T_POW, line, left, parse_unary(p, true));
        line = cur(p)->line;
    }
    return left;
}

static node *parse_math2(parser *p) {
    int line = cur(p)->line;
    node *left = parse_pow(p);
    while (left) {
        const token_type t = cur(p)->type;
        if (t != T_MUL && t != T_DIV && t != T_FLOORDIV && t != T_MOD) break;
        skip(p);
        left = binary(p, N_BIN, t, line, left, parse_pow(p));
        line = cur(p)->line;
    }
    return left;
}

static node *parse_concat(parser *p) {
    const int line = cur(p)->line;
    node *first = parse_math2(p);
    if (!first || cur(p)->type != T_TILDE) return first;
    node *n = parse_node(p, N_CONCAT, line);
    if (!n || !parse_list_add(p, &n->list, first) || !over(p, n, first)) return NULL;
    while (cur(p)->type == T_TILDE) {
        skip(p);
        node *part = parse_math2(p);
        if (!parse_list_add(p, &n->list, part) || !over(p, n, part)) return NULL;
    }
    return n;
}

static node *parse_math1(parser *p) {
    int line = cur(p)->line;
    node *left = parse_concat(p);
    while (left && (cur(p)->type == T_ADD || cur(p)->type == T_SUB)) {
        const token_type t = cur(p)->type;
        skip(p);
        left = binary(p, N_BIN, t, line, left, parse_concat(p));
        line = cur(p)->line;
    }
    return left;
}

static int comparison(parser *p) {
    const token *t = cur(p);
    if (t->type >= T_EQ && t->type <= T_GE) {
        skip(p);
        return C_EQ + (int)(t->type - T_EQ);
    }
    if (skip_name(p, "in")) return C_IN;
    if (is_name(t, "not") && is_name(peek(p), "in")) {
        skip(p);
        skip(p);
        return C_NOTIN;
    }
    return -1;
}

/* COMPARE: a = first operand, list = the others, ops[i] stands before list[i]. */
static node *parse_compare(parser *p) {
    const int line = cur(p)->line;
    node *first = parse_math1(p);
    node *n = NULL;
    int op;
    while (first && (op = comparison(p)) >= 0) {
        if (!n) {
            if (!(n = parse_node(p, N_COMPARE, line))) return NULL;
            n->a = first;
            if (!over(p, n, first)) return NULL;
        }
        node *right = parse_math1(p);
        const size_t before = n->list.cap;
        if (!parse_list_add(p, &n->list, right) || !over(p, n, right)) return NULL;
        if (n->list.cap != before) {
            uint8_t *ops = arena_take(&p->t->mem, n->list.cap, 1);
            if (!ops) {
                no_memory(p);
                return NULL;
            }
            if (n->list.n > 1) memcpy(ops, n->ops, n->list.n - 1);
            n->ops = ops;
        }
        n->ops[n->list.n - 1] = (uint8_t)op;
    }
    return n ? n : first;
}

static node *parse_not(parser *p) {
    const token *t = cur(p);
    if (!is_name(t, "not")) return parse_compare(p);
    skip(p);
    if (!parse_enter(p)) return NULL;
    node *n = parse_not(p);
    p->nest--;
    return binary(p, N_NOT, 0, t->line, NULL, n);
}

static node *parse_and(parser *p) {
    int line = cur(p)->line;
    node *left = parse_not(p);
    while (left && skip_name(p, "and")) {
        left = binary(p, N_AND, 0, line, left, parse_not(p));
        line = cur(p)->line;
    }
    return left;
}

static node *parse_or(parser *p) {
    int line = cur(p)->line;
    node *left = parse_and(p);
    while (left && skip_name(p, "or")) {
        left = binary(p, N_OR, 0, line, left, parse_and(p));
        line = cur(p)->line;
    }
    return left;
}

/* COND: a if b else c; without else, c is NULL. */
static node *parse_condexpr(parser *p) {
    int line = cur(p)->line;
    node *n = parse_or(p);
    while (n && skip_name(p, "if")) {
        node *test = parse_or(p), *other = NULL;
        if (!test) return NULL;
        if (skip_name(p, "else")) {
            if (!parse_enter(p) || !(other = parse_condexpr(p))) return NULL;
            p->nest--;
        }
        node *c = binary(p, N_COND, 0, line, n, test);
        if (!c) return NULL;
        c->c = other;
        n = over(p, c, other);
        line = cur(p)->line;
    }
    return n;
}

node *parse_expression(parser *p, bool with_cond) {
    if (!parse_enter(p)) return NULL;
    node *n = with_cond ? parse_condexpr(p) : parse_or(p);
    p->nest--;
    return n;
}
