/* Scoping, settled before anything runs. jinja2 turns a template into Python functions and decides per scope,
 * from the code alone, where each name lives: a scope that stores a name has its own variable, filled on entry
 * from the scope outside (alias), from the context (resolve) or with nothing. What `set` inside a loop or an if
 * does, and what a macro sees, follows from that, so we decide in the same way. */
#include <stdlib.h>

#include "text/jinja_ast.h"

typedef struct entry {
    uint32_t name, slot;
    load_action action;
    bool stored;
} entry;

typedef struct symbols symbols;
struct symbols {
    symbols *parent; /* NULL: the template, or a block (which sees only the context) */
    unit *u;
    uint32_t unit_depth;
    entry *v;
    uint32_t n, cap;
    uint32_t *map; /* entry + 1 by name, open addressing */
    uint32_t mask;
    uint32_t *journal; /* entries in the order of their first store */
    uint32_t n_journal, cap_journal;
};

typedef struct resolver {
    jinja *t;
    arena mem; /* symbols; gone after resolving */
    err *e;
} resolver;

static bool no_memory(resolver *r) {
    return fail(r->e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory");
}

static uint32_t slot_of(const symbols *s, uint32_t name) {
    uint32_t at = name * 2654435761u & s->mask;
    while (s->map[at] && s->v[s->map[at] - 1].name != name) at = (at + 1) & s->mask;
    return at;
}

static entry *own(const symbols *s, uint32_t name) {
    if (!s->map) return NULL;
    const uint32_t k = s->map[slot_of(s, name)];
    return k ? &s->v[k - 1] : NULL;
}

static entry *find(const symbols *s, uint32_t name, const symbols **where) {
    for (; s; s = s->parent) {
        entry *x = own(s, name);
        if (x) {
            if (where) *where = s;
            return x;
        }
    }
    return NULL;
}

static bool define(resolver *r, symbols *s, uint32_t name, load_action action) {
    if (s->n * 2 >= s->mask) {
        const uint32_t size = s->mask ? (s->mask + 1) * 2 : 16;
        uint32_t *map = arena_zero(&r->mem, size, sizeof *map);
        entry *v = arena_take(&r->mem, size / 2 + 1, sizeof *v);
        if (!map || !v) return no_memory(r);
        if (s->n) memcpy(v, s->v, s->n * sizeof *v);
        s->v = v;
        s->map = map;
        s->mask = size - 1;
        for (uint32_t i = 0; i < s->n; i++) map[slot_of(s, v[i].name)] = i + 1;
    }
    s->v[s->n] = (entry){ name, s->u->n_slots++, action, false };
    s->n++;
    s->map[slot_of(s, name)] = s->n;
    return true;
}

static bool mark_stored(resolver *r, symbols *s, entry *x) {
    if (x->stored) return true;
    x->stored = true;
    if (s->n_journal == s->cap_journal) {
        const uint32_t cap = s->cap_journal ? s->cap_journal * 2 : 16;
        uint32_t *v = arena_take(&r->mem, cap, sizeof *v);
        if (!v) return no_memory(r);
        if (s->n_journal) memcpy(v, s->journal, s->n_journal * sizeof *v);
        s->journal = v;
        s->cap_journal = cap;
    }
    s->journal[s->n_journal++] = (uint32_t)(x - s->v);
    return true;
}

static bool declare(resolver *r, symbols *s, uint32_t name) {
    entry *x = own(s, name);
    if (!x && !define(r, s, name, LOAD_PARAM)) return false;
    x = own(s, name);
    x->action = LOAD_PARAM;
    return mark_stored(r, s, x);
}

static bool sym_store(resolver *r, symbols *s, uint32_t name) {
    if (!own(s, name)) {
        const bool outer = s->parent && find(s->parent, name, NULL);
        if (!define(r, s, name, outer ? LOAD_ALIAS : LOAD_UNDEFINED)) return false;
    }
    return mark_stored(r, s, own(s, name));
}

static bool sym_load(resolver *r, symbols *s, uint32_t name) {
    return find(s, name, NULL) || define(r, s, name, LOAD_RESOLVE);
}

/* ---- first pass over one scope: which names does it load and store (inner scopes are not entered) ---- */

static bool scan(resolver *r, symbols *s, const node *n);

static bool scan_list(resolver *r, symbols *s, const node_list *l) {
    for (size_t i = 0; i < l->n; i++)
        if (!scan(r, s, l->v[i])) return false;
    return true;
}

static bool scan_args(resolver *r, symbols *s, const call_args_node *a) {
    if (!a) return true;
    if (!scan_list(r, s, &a->pos)) return false;
    for (size_t i = 0; i < a->n_kw; i++)
        if (!scan(r, s, a->kw[i].value)) return false;
    return scan(r, s, a->star) && scan(r, s, a->star2);
}

/* Names first stored in a branch may be unset when it is not taken: they start as what the outside has. */
static bool scan_if(resolver *r, symbols *s, const node *first) {
    const uint32_t mark = s->n_journal;
    for (const node *n = first; n; n = n->c)
        if (!scan(r, s, n->b) || !scan_list(r, s, &n->list)) return false;
    if (!scan_list(r, s, &first->list2)) return false;
    for (uint32_t i = mark; i < s->n_journal; i++) {
        entry *x = &s->v[s->journal[i]];
        x->action = s->parent && find(s->parent, x->name, NULL) ? LOAD_ALIAS : LOAD_RESOLVE;
    }
    return true;
}

static bool scan(resolver *r, symbols *s, const node *n) {
    if (!n) return true;
    switch ((node_kind)n->kind) {
    case N_NAME: return n->flag ? sym_store(r, s, n->name) : sym_load(r, s, n->name);
    case N_NSREF: return sym_load(r, s, n->name);
    case N_IF: return scan_if(r, s, n);
    case N_FOR:
    case N_CALLBLOCK:
    case N_FILTERBLOCK: return scan(r, s, n->b);
    case N_SET: return scan(r, s, n->b) && scan(r, s, n->a);
    case N_SETBLOCK: return scan(r, s, n->a);
    case N_MACRO: return sym_store(r, s, n->name);
    case N_WITH:
        for (size_t i = 1; i < n->list2.n; i += 2)
            if (!scan(r, s, n->list2.v[i])) return false;
        return true;
    case N_SCOPE:
    case N_BLOCK:
    case N_BREAK:
    case N_CONTINUE:
    case N_DATA:
    case N_CONST: return true;
    default:
        return scan(r, s, n->a) && scan(r, s, n->b) && scan(r, s, n->c) && scan_list(r, s, &n->list) &&
               scan_args(r, s, n->args);
    }
}

static bool declare_target(resolver *r, symbols *s, const node *target) {
    if (target->kind == N_NAME) return declare(r, s, target->name);
    for (size_t i = 0; i < target->list.n; i++)
        if (!declare_target(r, s, target->list.v[i])) return false;
    return true;
}

/* ---- second pass: give every name its place ---- */

typedef struct where {
    bool top;  /* a `set` here is also a context variable */
    bool soft; /* inside an if: unknown filters fail only when reached */
} where;

static bool resolve(resolver *r, symbols *s, node *n, where w);

static ref place(const symbols *s, uint32_t name) {
    const symbols *owner = NULL;
    const entry *x = find(s, name, &owner);
    CHECK(x, "name without a place");
    return (ref){ s->unit_depth - owner->unit_depth, x->slot };
}

static symbols inner(symbols *parent, unit *u) {
    return (symbols){ .parent = parent, .u = u ? u : parent->u, .unit_depth = parent->unit_depth + (u != NULL) };
}

static bool freeze(resolver *r, const symbols *s, scope *out) {
    out->loads = arena_take(&r->t->mem, s->n, sizeof *out->loads);
    if (!out->loads) return no_memory(r);
    out->n = s->n;
    for (uint32_t i = 0; i < s->n; i++) {
        const entry *x = &s->v[i];
        load *l = &out->loads[i];
        *l = (load){ .action = x->action, .slot = x->slot, .name = x->name };
        if (x->action == LOAD_ALIAS) {
            l->from = place(s->parent, x->name);
            l->from.hops += s->unit_depth - s->parent->unit_depth;
        }
    }
    return true;
}

static bool resolve_list(resolver *r, symbols *s, const node_list *l, where w) {
    for (size_t i = 0; i < l->n; i++)
        if (!resolve(r, s, l->v[i], w)) return false;
    return true;
}

static bool resolve_args(resolver *r, symbols *s, const call_args_node *a, where w) {
    if (!a) return true;
    if (!resolve_list(r, s, &a->pos, w)) return false;
    for (size_t i = 0; i < a->n_kw; i++)
        if (!resolve(r, s, a->kw[i].value, w)) return false;
    return resolve(r, s, a->star, w) && resolve(r, s, a->star2, w);
}

static node *clone_target(resolver *r, const node *t) {
    node *n = arena_take(&r->t->mem, 1, sizeof *n);
    if (!n) return NULL;
    *n = *t;
    if (t->list.n) {
        n->list.v = arena_take(&r->t->mem, t->list.n, sizeof *n->list.v);
        if (!n->list.v) return NULL;
        for (size_t i = 0; i < t->list.n; i++)
            if (!(n->list.v[i] = clone_target(r, t->list.v[i]))) return NULL;
    }
    return n;
}

static bool resolve_for(resolver *r, symbols *s, node *n, where w) {
    const where in = { 0 };
    if (!resolve(r, s, n->b, w)) return false;
    unit *u = n->recursive ? &n->unit_body : NULL;
    symbols body = inner(s, u);
    const uint32_t loop = 0; /* the first name of every template */
    if (n->uses_loop && !declare(r, &body, loop)) return false;
    if (!declare_target(r, &body, n->a) || !scan_list(r, &body, &n->list) || !freeze(r, &body, &n->in)) return false;
    if (n->uses_loop) n->loop_at = place(&body, loop);
    if (!resolve(r, &body, n->a, in) || !resolve_list(r, &body, &n->list, in)) return false;
    if (n->list2.n) {
        symbols other = inner(s, u);
        if (!scan_list(r, &other, &n->list2) || !freeze(r, &other, &n->in_else)) return false;
        if (!resolve_list(r, &other, &n->list2, in)) return false;
    }
    if (!n->c) return true;
    symbols test = inner(s, &n->unit_test);
    if (!(n->target_test = clone_target(r, n->a))) return no_memory(r);
    return declare_target(r, &test, n->a) && scan(r, &test, n->c) && freeze(r, &test, &n->in_test) &&
           resolve(r, &test, n->target_test, in) && resolve(r, &test, n->c, in);
}

static bool resolve_macro(resolver *r, symbols *s, node *n) {
    const where in = { 0 };
    signature *sig = n->sig;
    symbols body = inner(s, &n->unit_body);
    for (size_t i = 0; i < sig->n; i++)
        if (!declare(r, &body, sig->names[i])) return false;
    const uint32_t caller = jinja_intern(r->t, STR("caller")), kwargs = jinja_intern(r->t, STR("kwargs")),
                   varargs = jinja_intern(r->t, STR("varargs"));
    if (sig->wants_caller && !declare(r, &body, caller)) return false;
    if (sig->wants_kwargs && !declare(r, &body, kwargs)) return false;
    if (sig->wants_varargs && !declare(r, &body, varargs)) return false;
    if (!scan_list(r, &body, &sig->defaults) || !scan_list(r, &body, &n->list) || !freeze(r, &body, &n->in))
        return false;
    sig->refs = arena_take(&r->t->mem, sig->n, sizeof *sig->refs);
    if (!sig->refs) return no_memory(r);
    for (size_t i = 0; i < sig->n; i++) sig->refs[i] = place(&body, sig->names[i]);
    if (sig->wants_caller) sig->caller = place(&body, caller);
    if (sig->wants_kwargs) sig->kwargs = place(&body, kwargs);
    if (sig->wants_varargs) sig->varargs = place(&body, varargs);
    return resolve_list(r, &body, &sig->defaults, in) && resolve_list(r, &body, &n->list, in);
}

static bool resolve_with(resolver *r, symbols *s, node *n, where w) {
    symbols body = inner(s, NULL);
    const where in = { 0 };
    for (size_t i = 0; i < n->list2.n; i += 2)
        if (!declare_target(r, &body, n->list2.v[i])) return false;
    if (!scan_list(r, &body, &n->list) || !freeze(r, &body, &n->in)) return false;
    for (size_t i = 0; i < n->list2.n; i += 2)
        if (!resolve(r, &body, n->list2.v[i], in) || !resolve(r, s, n->list2.v[i + 1], w)) return false;
    return resolve_list(r, &body, &n->list, in);
}

/* SCOPE, and the bodies of filter blocks and set blocks (b = their filters). */
static bool resolve_inner(resolver *r, symbols *s, node *n) {
    symbols body = inner(s, NULL);
    const where in = { 0 };
    return scan_list(r, &body, &n->list) && scan(r, &body, n->b) && freeze(r, &body, &n->in) &&
           resolve_list(r, &body, &n->list, in) && resolve(r, &body, n->b, in);
}

static bool resolve_block(resolver *r, symbols *s, node *n) {
    symbols body = n->flag ? inner(s, NULL) : (symbols){ .u = &n->unit_body };
    return scan_list(r, &body, &n->list) && freeze(r, &body, &n->in) && resolve_list(r, &body, &n->list, (where){ 0 });
}

static bool unknown(resolver *r, const node *n, where w) {
    if (w.soft) return true;
    return syntax_fail(r->e, n->line, "no %s named '" STR_FMT "'", n->kind == N_FILTER ? "filter" : "test",
                       STR_ARG(n->text));
}

static bool resolve(resolver *r, symbols *s, node *n, where w) {
    if (!n) return true;
    switch ((node_kind)n->kind) {
    case N_NAME:
    case N_NSREF: n->at = place(s, n->name); return true;
    case N_FOR: return resolve_for(r, s, n, w);
    case N_IF:
        w.soft = true;
        for (node *i = n; i; i = i->c)
            if (!resolve(r, s, i->b, w) || !resolve_list(r, s, &i->list, w)) return false;
        return resolve_list(r, s, &n->list2, w);
    case N_SET: n->flag = w.top; return resolve(r, s, n->b, w) && resolve(r, s, n->a, w);
    case N_SETBLOCK: n->flag = w.top; return resolve_inner(r, s, n) && resolve(r, s, n->a, w);
    case N_MACRO:
        n->flag = w.top;
        n->at = place(s, n->name);
        return resolve_macro(r, s, n);
    case N_CALLBLOCK: return resolve(r, s, n->b, w) && resolve_macro(r, s, n);
    case N_FILTERBLOCK:
    case N_SCOPE: return resolve_inner(r, s, n);
    case N_WITH: return resolve_with(r, s, n, w);
    case N_BLOCK: return resolve_block(r, s, n);
    case N_COND: w.soft = true; break;
    case N_FILTER:
        if (!n->filter && !unknown(r, n, w)) return false;
        break;
    case N_TEST:
        if (!n->test && !unknown(r, n, w)) return false;
        break;
    default: break;
    }
    return resolve(r, s, n->a, w) && resolve(r, s, n->b, w) && resolve(r, s, n->c, w) &&
           resolve_list(r, s, &n->list, w) && resolve_args(r, s, n->args, w);
}

bool jinja_resolve(jinja *t, err *e) {
    resolver r = { .t = t, .e = e };
    symbols root = { .u = &t->root };
    const bool ok = scan_list(&r, &root, &t->body) && freeze(&r, &root, &t->in) &&
                    resolve_list(&r, &root, &t->body, (where){ .top = true });
    arena_free(&r.mem);
    return ok;
}
