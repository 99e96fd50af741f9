/* Statements, and the entry points of compilation. */
#include "text/jinja_parse.h"

#include <stdio.h>
#include <stdlib.h>

enum { SOURCE_MAX_BYTES = 1 << 20 };

typedef node *statement_fn(parser *p, int line);

static bool at_any(const parser *p, const char *const *ends) {
    for (; *ends; ends++)
        if (is_name(cur(p), *ends)) return true;
    return false;
}

static node *parse_statement(parser *p);

/* Text, prints and statements up to one of `ends` (the current token then) or the end of the template. */
static bool subparse(parser *p, node_list *body, const char *const *ends) {
    if (!parse_enter(p)) return false;
    for (;;) {
        const token *t = cur(p);
        node *n = NULL;
        if (t->type == T_EOF) {
            break;
        } else if (t->type == T_DATA) {
            if ((n = parse_node(p, N_DATA, t->line))) n->text = t->text;
            skip(p);
        } else if (t->type == T_VAR_BEGIN) {
            skip(p);
            node *x = parse_tuple(p, false, true, false, false);
            if (!x || !parse_expect(p, T_VAR_END, "end of print statement")) return false;
            if ((n = parse_node(p, N_PRINT, t->line)) && !parse_list_add(p, &n->list, x)) return false;
        } else {
            skip(p);
            if (ends && at_any(p, ends)) break;
            if (!(n = parse_statement(p)) || !parse_expect(p, T_BLOCK_END, "end of statement block")) return false;
        }
        if (!parse_list_add(p, body, n)) return false;
    }
    p->nest--;
    return true;
}

bool parse_statements(parser *p, node_list *body, const char *const *ends) {
    if (cur(p)->type == T_COLON) skip(p);
    if (!parse_expect(p, T_BLOCK_END, "end of statement block") || !subparse(p, body, ends)) return false;
    if (cur(p)->type == T_EOF) return parse_fail(p, "unexpected end of template, looking for '%s'", *ends);
    return true;
}

static bool parse_body(parser *p, node_list *body, const char *end) {
    const char *const ends[] = { end, NULL };
    if (!parse_statements(p, body, ends)) return false;
    skip(p);
    return true;
}

static bool store(parser *p, node *n) {
    n->flag = true;
    if (n->kind != N_NAME) return true;
    p->n_loop -= str_is(n->text, "loop"); /* counted as loads when parsed */
    p->n_caller -= str_is(n->text, "caller");
    p->n_kwargs -= str_is(n->text, "kwargs");
    p->n_varargs -= str_is(n->text, "varargs");
    if (p->loops && str_is(n->text, "loop"))
        return syntax_fail(p->e, n->line, "can't assign to special loop variable in a for-loop");
    return true;
}

/* Turn an expression into something assignable: a name, ns.attr, or a tuple of them. */
static bool make_target(parser *p, node *n) {
    if (n->kind == N_NAME || n->kind == N_NSREF) return store(p, n);
    if (n->kind != N_TUPLE) return syntax_fail(p->e, n->line, "can't assign to this expression");
    if (!parse_enter(p)) return false;
    for (size_t i = 0; i < n->list.n; i++)
        if (!make_target(p, n->list.v[i])) return false;
    p->nest--;
    return true;
}

static node *parse_target(parser *p, bool with_namespace) {
    node *n = parse_tuple(p, true, true, false, with_namespace);
    return n && make_target(p, n) ? n : NULL;
}

static bool parse_target_name(parser *p, uint32_t *name, str *text) {
    const token *t = cur(p);
    if (t->type != T_NAME) return parse_unexpected(p, "name");
    static const char *const reserved[] = { "true", "false", "none", "True", "False", "None" };
    for (size_t i = 0; i < ARRAY_LEN(reserved); i++)
        if (str_is(t->text, reserved[i])) return parse_fail(p, "can't assign to '%s'", reserved[i]);
    *name = jinja_intern(p->t, t->text);
    if (text) *text = t->text;
    skip(p);
    return true;
}

/* FOR: a = target, b = iterable, c = filter; list = body, list2 = else. */
static node *parse_for(parser *p, int line) {
    node *n = parse_node(p, N_FOR, line);
    p->loops++; /* the target, too, must not be called loop */
    if (!n || !(n->a = parse_target(p, false))) return NULL;
    if (!is_name(cur(p), "in")) {
        parse_unexpected(p, "'in'");
        return NULL;
    }
    skip(p);
    if (!(n->b = parse_tuple(p, false, false, false, false))) return NULL;
    if (is_name(cur(p), "if")) {
        skip(p);
        if (!(n->c = parse_expression(p, true))) return NULL;
    }
    if (is_name(cur(p), "recursive")) {
        n->recursive = true;
        skip(p);
    }
    const uint32_t mentions = p->n_loop;
    static const char *const ends[] = { "endfor", "else", NULL };
    if (!parse_statements(p, &n->list, ends)) return NULL;
    n->uses_loop = n->recursive || p->n_loop != mentions;
    const bool other = is_name(cur(p), "else");
    skip(p);
    p->loops--; /* a break in the else part belongs to a loop outside */
    if (other && !parse_body(p, &n->list2, "endfor")) return NULL;
    return n;
}

/* IF: b = test, list = body, c = the next elif (a chain of IF nodes); the first one's list2 = else. */
static node *parse_if(parser *p, int line) {
    static const char *const ends[] = { "elif", "else", "endif", NULL };
    node *first = NULL, *last = NULL;
    for (;;) {
        node *n = parse_node(p, N_IF, line);
        if (!n) return NULL;
        if (last)
            last->c = n;
        else
            first = n;
        last = n;
        if (!(n->b = parse_tuple(p, false, false, false, false))) return NULL;
        if (!parse_statements(p, &n->list, ends)) return NULL;
        line = cur(p)->line;
        const bool again = is_name(cur(p), "elif"), other = is_name(cur(p), "else");
        skip(p);
        if (again) continue;
        if (other && !parse_body(p, &first->list2, "endif")) return NULL;
        return first;
    }
}

/* SET: a = target, b = value. SETBLOCK: a = target, b = filters (their innermost `a` is NULL), list = body. */
static node *parse_set(parser *p, int line) {
    node *n = parse_node(p, N_SET, line);
    if (!n || !(n->a = parse_target(p, true))) return NULL;
    if (cur(p)->type == T_ASSIGN) {
        skip(p);
        return (n->b = parse_tuple(p, false, true, false, false)) ? n : NULL;
    }
    n->kind = N_SETBLOCK;
    if (cur(p)->type == T_PIPE && !(n->b = parse_filters(p, NULL, false))) return NULL;
    return parse_body(p, &n->list, "endset") ? n : NULL;
}

static bool parse_signature(parser *p, signature *s) {
    size_t cap = 0;
    if (!parse_expect(p, T_LPAREN, "'('")) return false;
    while (cur(p)->type != T_RPAREN) {
        if (s->n && !parse_expect(p, T_COMMA, "','")) return false;
        if (s->n == cap) {
            cap = cap ? cap * 2 : 4;
            uint32_t *v = arena_take(&p->t->mem, cap, sizeof *v);
            if (!v) return fail(p->e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory");
            if (s->n) memcpy(v, s->names, s->n * sizeof *v);
            s->names = v;
        }
        str name;
        if (!parse_target_name(p, &s->names[s->n], &name)) return false;
        s->explicit_caller = s->explicit_caller || str_is(name, "caller");
        for (size_t i = 0; i < s->n; i++)
            if (s->names[i] == s->names[s->n]) return parse_fail(p, "duplicate argument '" STR_FMT "'", STR_ARG(name));
        s->n++;
        if (cur(p)->type == T_ASSIGN) {
            skip(p);
            if (!parse_list_add(p, &s->defaults, parse_expression(p, true))) return false;
        } else if (s->defaults.n) {
            return parse_fail(p, "non-default argument follows default argument");
        }
    }
    skip(p);
    return true;
}

/* The body of a macro or call block, and which of caller, kwargs and varargs it mentions. */
static bool parse_macro_body(parser *p, node *n, const char *end) {
    const uint32_t callers = p->n_caller, kwargs = p->n_kwargs, varargs = p->n_varargs;
    const int loops = p->loops;
    p->loops = 0;
    if (!parse_body(p, &n->list, end)) return false;
    p->loops = loops;
    signature *s = n->sig;
    s->wants_caller = p->n_caller != callers;
    s->wants_kwargs = p->n_kwargs != kwargs;
    s->wants_varargs = p->n_varargs != varargs;
    for (size_t i = 0; i < s->n; i++) {
        const str name = p->t->names[s->names[i]];
        if (str_is(name, "kwargs")) s->wants_kwargs = false;
        if (str_is(name, "varargs")) s->wants_varargs = false;
        if (str_is(name, "caller") && s->wants_caller && i + s->defaults.n < s->n)
            return syntax_fail(p->e, n->line, "the special caller argument must be omitted or be given a default");
    }
    return true;
}

static node *new_macro(parser *p, node_kind kind, int line) {
    node *n = parse_node(p, kind, line);
    if (!n) return NULL;
    n->sig = arena_zero(&p->t->mem, 1, sizeof *n->sig);
    if (n->sig) return n;
    fail(p->e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory");
    return NULL;
}

static node *parse_macro(parser *p, int line) {
    node *n = new_macro(p, N_MACRO, line);
    if (!n || !parse_target_name(p, &n->name, &n->text) || !parse_signature(p, n->sig)) return NULL;
    return parse_macro_body(p, n, "endmacro") ? n : NULL;
}

/* CALLBLOCK: b = the call, list = body. */
static node *parse_call_block(parser *p, int line) {
    node *n = new_macro(p, N_CALLBLOCK, line);
    if (!n || (cur(p)->type == T_LPAREN && !parse_signature(p, n->sig))) return NULL;
    if (!(n->b = parse_expression(p, true))) return NULL;
    if (n->b->kind != N_CALL) {
        syntax_fail(p->e, line, "expected call");
        return NULL;
    }
    return parse_macro_body(p, n, "endcall") ? n : NULL;
}

/* FILTERBLOCK: b = filters, list = body. */
static node *parse_filter_block(parser *p, int line) {
    node *n = parse_node(p, N_FILTERBLOCK, line);
    if (!n || !(n->b = parse_filters(p, NULL, true))) return NULL;
    return parse_body(p, &n->list, "endfilter") ? n : NULL;
}

/* WITH: list2 = target, value, target, value ...; list = body. */
static node *parse_with(parser *p, int line) {
    node *n = parse_node(p, N_WITH, line);
    while (n && cur(p)->type != T_BLOCK_END) {
        if (n->list2.n && !parse_expect(p, T_COMMA, "','")) return NULL;
        if (!parse_list_add(p, &n->list2, parse_target(p, false)) || !parse_expect(p, T_ASSIGN, "'='") ||
            !parse_list_add(p, &n->list2, parse_expression(p, true)))
            return NULL;
    }
    return n && parse_body(p, &n->list, "endwith") ? n : NULL;
}

/* HF marks the assistant's part with {% generation %}; for rendering it is a scope and nothing else. */
static node *parse_generation(parser *p, int line) {
    node *n = parse_node(p, N_SCOPE, line);
    return n && parse_body(p, &n->list, "endgeneration") ? n : NULL;
}

static node *parse_autoescape(parser *p, int line) {
    node *n = parse_node(p, N_SCOPE, line), *x = parse_expression(p, true);
    if (!n || !x) return NULL;
    if (x->kind != N_CONST || v_truth(&x->value)) {
        syntax_fail(p->e, line, "autoescape is not supported (chat templates render plain text)");
        return NULL;
    }
    return parse_body(p, &n->list, "endautoescape") ? n : NULL;
}

static node *parse_block(parser *p, int line) {
    node *n = parse_node(p, N_BLOCK, line);
    if (!n || !parse_target_name(p, &n->name, &n->text)) return NULL;
    if (is_name(cur(p), "scoped")) {
        n->flag = true;
        skip(p);
    }
    if (is_name(cur(p), "required")) skip(p);
    const int loops = p->loops;
    p->loops = n->flag ? loops : 0;
    if (!parse_body(p, &n->list, "endblock")) return NULL;
    p->loops = loops;
    if (cur(p)->type == T_NAME && str_eq(cur(p)->text, n->text)) skip(p);
    return n;
}

static node *parse_print(parser *p, int line) {
    node *n = parse_node(p, N_PRINT, line);
    while (n && cur(p)->type != T_BLOCK_END) {
        if (n->list.n && !parse_expect(p, T_COMMA, "','")) return NULL;
        if (!parse_list_add(p, &n->list, parse_expression(p, true))) return NULL;
    }
    return n;
}

static node *parse_do(parser *p, int line) {
    node *n = parse_node(p, N_DO, line);
    return n && (n->b = parse_tuple(p, false, true, false, false)) ? n : NULL;
}

static node *parse_loop_control(parser *p, int line, node_kind kind) {
    if (p->loops) return parse_node(p, kind, line);
    syntax_fail(p->e, line, "'%s' outside loop", kind == N_BREAK ? "break" : "continue");
    return NULL;
}
static node *parse_break(parser *p, int line) { return parse_loop_control(p, line, N_BREAK); }
static node *parse_continue(parser *p, int line) { return parse_loop_control(p, line, N_CONTINUE); }

static node *parse_refused(parser *p, int line) {
    (void)line;
    p->at--;
    parse_fail(p, "{%% " STR_FMT " %%} needs other template files, and a chat template stands alone",
               STR_ARG(cur(p)->text));
    return NULL;
}

static node *parse_statement(parser *p) {
    static const struct {
        const char *tag;
        statement_fn *fn;
    } tags[] = {
        { "if", parse_if },           { "for", parse_for },
        { "set", parse_set },         { "macro", parse_macro },
        { "call", parse_call_block }, { "filter", parse_filter_block },
        { "with", parse_with },       { "generation", parse_generation },
        { "print", parse_print },     { "do", parse_do },
        { "break", parse_break },     { "continue", parse_continue },
        { "block", parse_block },     { "autoescape", parse_autoescape },
        { "include", parse_refused }, { "import", parse_refused },
        { "from", parse_refused },    { "extends", parse_refused },
    };
    const token *t = cur(p);
    if (t->type != T_NAME) {
        parse_unexpected(p, "tag name");
        return NULL;
    }
    for (size_t i = 0; i < ARRAY_LEN(tags); i++)
        if (str_is(t->text, tags[i].tag)) {
            skip(p);
            return tags[i].fn(p, t->line);
        }
    parse_fail(p, "encountered unknown tag '" STR_FMT "'", STR_ARG(t->text));
    return NULL;
}

bool jinja_parse(jinja *t, const token *tokens, size_t n, err *e) {
    parser p = { .t = t, .v = tokens, .n = n, .e = e };
    return subparse(&p, &t->body, NULL);
}

/* ---- names ---- */

static bool index_grow(jinja *t) {
    const uint32_t size = t->name_mask ? (t->name_mask + 1) * 2 : 64;
    uint32_t *index = arena_zero(&t->mem, size, sizeof *index);
    if (!index) return false;
    for (uint32_t i = 0; i < t->n_names; i++) {
        uint32_t at = (uint32_t)str_hash(t->names[i]) & (size - 1);
        while (index[at]) at = (at + 1) & (size - 1);
        index[at] = i + 1;
    }
    t->name_index = index;
    t->name_mask = size - 1;
    return true;
}

static uint32_t name_find(const jinja *t, str name, uint32_t *slot) {
    uint32_t at = (uint32_t)str_hash(name) & t->name_mask;
    while (t->name_index[at]) {
        if (str_eq(t->names[t->name_index[at] - 1], name)) return t->name_index[at];
        at = (at + 1) & t->name_mask;
    }
    *slot = at;
    return 0;
}

/* The arena has no limit while compiling (the source has one), so only true exhaustion can fail here. */
uint32_t jinja_intern(jinja *t, str name) {
    uint32_t slot = 0;
    if (!t->name_index || t->n_names * 2 > t->name_mask) CHECK(index_grow(t), "out of memory");
    const uint32_t found = name_find(t, name, &slot);
    if (found) return found - 1;
    if (t->n_names == t->cap_names) {
        const uint32_t cap = t->cap_names ? t->cap_names * 2 : 32;
        str *v = arena_take(&t->mem, cap, sizeof *v);
        CHECK(v, "out of memory");
        if (t->n_names) memcpy(v, t->names, t->n_names * sizeof *v);
        t->names = v;
        t->cap_names = cap;
    }
    t->names[t->n_names++] = name;
    t->name_index[slot] = t->n_names;
    return t->n_names - 1;
}

/* ---- compile ---- */

bool jinja_compile(jinja **out, str source, err *e) {
    *out = NULL;
    if (source.n > SOURCE_MAX_BYTES)
        return fail(e, ERR_INPUT, "E-TEMPLATE-LIMIT", "chat template: %zu bytes of source (at most %d)", source.n,
                    SOURCE_MAX_BYTES);
    jinja *t = calloc(1, sizeof *t);
    if (!t) return fail(e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory");
    token *tokens = NULL;
    size_t n = 0;
    jinja_intern(t, STR("loop"));
    if (!jinja_lex(&t->mem, source, &tokens, &n, e) || !jinja_parse(t, tokens, n, e) || !jinja_resolve(t, e)) {
        jinja_free(t);
        return false;
    }
    *out = t;
    return true;
}

void jinja_free(jinja *t) {
    if (!t) return;
    arena_free(&t->mem);
    free(t);
}
