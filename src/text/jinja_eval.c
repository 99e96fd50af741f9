/* The evaluator: expressions to values, statements to text. */
#include "text/jinja_ast.h"

/* ---- activations and scopes ---- */

bool frame_new(run *r, uint32_t n_slots, frame *up, frame **out) {
    frame *f = rt_take(r, 1, sizeof *f + n_slots * sizeof f->slots[0]);
    if (!f || !rt_work(r, n_slots / 4)) return false;
    f->up = up;
    for (uint32_t i = 0; i < n_slots; i++) f->slots[i] = (val){ .type = V_MISSING };
    *out = f;
    return true;
}

static val *slot_at(frame *f, ref at) {
    for (uint32_t i = 0; i < at.hops; i++) f = f->up;
    return &f->slots[at.slot];
}

bool scope_enter(run *r, frame *f, const scope *s) {
    for (size_t i = 0; i < s->n; i++) {
        const load *l = &s->loads[i];
        switch (l->action) {
        case LOAD_PARAM: break;
        case LOAD_RESOLVE: f->slots[l->slot] = r->ctx[l->name]; break;
        case LOAD_ALIAS: f->slots[l->slot] = *slot_at(f, l->from); break;
        case LOAD_UNDEFINED: f->slots[l->slot] = (val){ .type = V_MISSING }; break;
        }
    }
    return rt_work(r, s->n / 8);
}

static void scope_leave(frame *f, const scope *s) {
    for (size_t i = 0; i < s->n; i++) f->slots[s->loads[i].slot] = (val){ .type = V_MISSING };
}

static bool assign_namespace(run *r, frame *f, const node *target, const val *v) {
    const val *ns = slot_at(f, target->at), key = v_str(target->text);
    if (ns->type != V_NAMESPACE) return rt_fail(r, "cannot assign attribute on non-namespace object");
    return dict_put(r, ns->u.d, &key, v);
}

bool jinja_assign(run *r, frame *f, const node *target, const val *v) {
    r->line = target->line;
    if (target->kind == N_NAME) {
        *slot_at(f, target->at) = *v;
        return true;
    }
    if (target->kind == N_NSREF) return assign_namespace(r, f, target, v);
    val items;
    if (!is_seq(v) && !iter_is_iterable(v))
        return rt_fail(r, "TypeError: cannot unpack non-iterable %s object", type_name(v));
    if (!iter_collect(r, v, V_TUPLE, &items)) return false;
    const size_t want = target->list.n;
    if (items.n != want)
        return rt_fail(r,
                       items.n < want ? "ValueError: not enough values to unpack (expected %zu, got %zu)"
                                      : "ValueError: too many values to unpack (expected %zu, got %zu)",
                       want, items.n);
    for (size_t i = 0; i < want; i++)
        if (!jinja_assign(r, f, target->list.v[i], &items.u.v[i])) return false;
    return true;
}

/* A `set` at the top of the template also feeds what blocks see. */
static void export_target(run *r, frame *f, const node *target) {
    if (target->kind == N_NAME) r->ctx[target->name] = *slot_at(f, target->at);
    if (target->kind == N_TUPLE)
        for (size_t i = 0; i < target->list.n; i++) export_target(r, f, target->list.v[i]);
}

/* ---- expressions ---- */

static bool eval_items(run *r, frame *f, const node *n, val *out) {
    const size_t count = n->list.n;
    val *v = rt_take(r, count, sizeof *v);
    if (!v) return false;
    for (size_t i = 0; i < count; i++)
        if (!jinja_eval(r, f, n->list.v[i], &v[i])) return false;
    *out = v_seq(n->kind == N_LIST ? V_LIST : V_TUPLE, v, count);
    return true;
}

static bool eval_dict(run *r, frame *f, const node *n, val *out) {
    dict *d = dict_new(r, n->list.n / 2);
    val k, v;
    if (!d) return false;
    for (size_t i = 0; i < n->list.n; i += 2)
        if (!jinja_eval(r, f, n->list.v[i], &k) || !jinja_eval(r, f, n->list.v[i + 1], &v) || !dict_put(r, d, &k, &v))
            return false;
    *out = (val){ .type = V_DICT, .u.d = d };
    return true;
}

static bool eval_concat(run *r, frame *f, const node *n, val *out) {
    val all = v_str(STR("")), v, t;
    for (size_t i = 0; i < n->list.n; i++) {
        if (!jinja_eval(r, f, n->list.v[i], &v) || !v_to_str(r, &v, &t) || !op_concat(r, &all, &t, &all)) return false;
        all.flag = 0;
    }
    *out = all;
    return true;
}

static bool compare(run *r, int op, const val *a, const val *b, bool *out) {
    if (op == C_IN || op == C_NOTIN) {
        if (!v_contains(r, a, b, out)) return false;
    } else if (op == C_EQ || op == C_NE) {
        if (!v_equal(r, a, b, out)) return false;
    } else {
        return v_order(r, op, a, b, out);
    }
    *out ^= op == C_NE || op == C_NOTIN;
    return true;
}

static bool eval_compare(run *r, frame *f, const node *n, val *out) {
    val left, right;
    bool yes = true;
    if (!jinja_eval(r, f, n->a, &left)) return false;
    for (size_t i = 0; i < n->list.n && yes; i++) {
        if (!jinja_eval(r, f, n->list.v[i], &right)) return false;
        r->line = n->line;
        if (!compare(r, n->ops[i], &left, &right, &yes)) return false;
        left = right;
    }
    *out = v_bool(yes);
    return true;
}

static bool eval_slice(run *r, frame *f, const node *n, const val *obj, val *out) {
    val part[3] = { v_none(), v_none(), v_none() };
    const node *const src[3] = { n->a, n->b, n->c };
    for (int i = 0; i < 3; i++)
        if (src[i] && !jinja_eval(r, f, src[i], &part[i])) return false;
    r->line = n->line;
    return op_slice(r, obj, &part[0], &part[1], &part[2], out);
}

static bool add_star2(run *r, const val *v, kwarg **kw, size_t *n) {
    if (v->type != V_DICT) return rt_fail(r, "TypeError: argument after ** must be a mapping, not %s", type_name(v));
    kwarg *all = rt_take(r, *n + v->u.d->n, sizeof *all);
    if (!all) return false;
    if (*n) memcpy(all, *kw, *n * sizeof *all);
    for (size_t i = 0; i < v->u.d->n; i++) {
        const dict_entry *e = &v->u.d->e[i];
        if (e->key.type != V_STR) return rt_fail(r, "TypeError: keywords must be strings");
        for (size_t k = 0; k < *n; k++)
            if (str_eq(all[k].name, s_of(&e->key)))
                return rt_fail(r, "TypeError: got multiple values for keyword argument '" STR_FMT "'",
                               STR_ARG(s_of(&e->key)));
        all[*n + i] = (kwarg){ s_of(&e->key), e->value };
    }
    *n += v->u.d->n;
    *kw = all;
    return rt_work(r, *n);
}

static bool eval_args(run *r, frame *f, const call_args_node *a, const val *caller, args *out) {
    *out = (args){ 0 };
    vec pos = { 0 };
    val v;
    for (size_t i = 0; i < a->pos.n; i++)
        if (!jinja_eval(r, f, a->pos.v[i], &v) || !vec_add(r, &pos, &v)) return false;
    size_t n_kw = a->n_kw + (caller != NULL);
    kwarg *kw = n_kw ? rt_take(r, n_kw, sizeof *kw) : NULL;
    if (n_kw && !kw) return false;
    for (size_t i = 0; i < a->n_kw; i++) {
        kw[i].name = a->kw[i].name;
        if (!jinja_eval(r, f, a->kw[i].value, &kw[i].v)) return false;
        for (size_t k = 0; k < i; k++)
            if (str_eq(kw[k].name, kw[i].name))
                return rt_fail(r, "keyword argument repeated: '" STR_FMT "'", STR_ARG(kw[i].name));
    }
    if (caller) kw[a->n_kw] = (kwarg){ STR("caller"), *caller };
    if (a->star) {
        iter it;
        bool more;
        if (!jinja_eval(r, f, a->star, &v) || !iter_begin(r, &it, &v)) return false;
        for (;;) {
            val x;
            if (!iter_next(r, &it, &x, &more)) return false;
            if (!more) break;
            if (!vec_add(r, &pos, &x)) return false;
        }
    }
    if (a->star2 && (!jinja_eval(r, f, a->star2, &v) || !add_star2(r, &v, &kw, &n_kw))) return false;
    *out = (args){ pos.v, pos.n, kw, n_kw };
    return true;
}

static bool eval_call(run *r, frame *f, const node *n, const val *caller, val *out) {
    val fn;
    args a;
    if (!jinja_eval(r, f, n->a, &fn) || !eval_args(r, f, n->args, caller, &a)) return false;
    r->line = n->line;
    return call_value(r, &fn, &a, out);
}

/* With `captured`, the filter chain's innermost operand is that text: a filter or set block. */
static bool eval_filter(run *r, frame *f, const node *n, const val *captured, val *out) {
    val x;
    args a;
    if (n->a ? (captured && n->a->kind == N_FILTER ? !eval_filter(r, f, n->a, captured, &x)
                                                   : !jinja_eval(r, f, n->a, &x))
             : !captured)
        return n->a ? false : rt_fail(r, "filter without an operand");
    if (!n->a) x = *captured;
    if (!eval_args(r, f, n->args, NULL, &a)) return false;
    r->line = n->line;
    if (!n->filter) return rt_fail(r, "no filter named '" STR_FMT "' found", STR_ARG(n->text));
    return filter_apply(r, n->filter, &x, &a, out);
}

static bool eval_test(run *r, frame *f, const node *n, val *out) {
    val x;
    args a;
    bool yes;
    if (!jinja_eval(r, f, n->a, &x) || !eval_args(r, f, n->args, NULL, &a)) return false;
    r->line = n->line;
    if (!n->test) return rt_fail(r, "no test named '" STR_FMT "' found", STR_ARG(n->text));
    if (!test_apply(r, n->test, &x, &a, &yes)) return false;
    *out = v_bool(yes);
    return true;
}

static bool eval_binary(run *r, frame *f, const node *n, val *out) {
    val a, b;
    if (!jinja_eval(r, f, n->a, &a) || !jinja_eval(r, f, n->b, &b)) return false;
    r->line = n->line;
    return op_binary(r, n->op, &a, &b, out);
}

static bool eval_access(run *r, frame *f, const node *n, val *out) {
    val obj, key;
    if (!jinja_eval(r, f, n->a, &obj)) return false;
    if (n->kind == N_ITEM && n->b->kind == N_SLICE) return eval_slice(r, f, n->b, &obj, out);
    if (n->kind == N_ITEM && !jinja_eval(r, f, n->b, &key)) return false;
    r->line = n->line;
    return n->kind == N_ITEM ? op_item(r, &obj, &key, out) : op_attr(r, &obj, n->text, out);
}

static bool eval_any(run *r, frame *f, const node *n, val *out) {
    switch ((node_kind)n->kind) {
    case N_CONST: *out = n->value; return true;
    case N_NAME: *out = *slot_at(f, n->at); return is_given(out) || v_undef(r, out, n->text);
    case N_TUPLE:
    case N_LIST: return eval_items(r, f, n, out);
    case N_DICT: return eval_dict(r, f, n, out);
    case N_NEG:
    case N_POS: {
        val v;
        if (!jinja_eval(r, f, n->b, &v)) return false;
        r->line = n->line;
        return op_negate(r, &v, n->kind == N_NEG, out);
    }
    case N_NOT:
        if (!jinja_eval(r, f, n->b, out)) return false;
        *out = v_bool(!v_truth(out));
        return true;
    case N_AND:
    case N_OR:
        if (!jinja_eval(r, f, n->a, out)) return false;
        return v_truth(out) == (n->kind == N_OR) || jinja_eval(r, f, n->b, out);
    case N_BIN: return eval_binary(r, f, n, out);
    case N_CONCAT: return eval_concat(r, f, n, out);
    case N_COMPARE: return eval_compare(r, f, n, out);
    case N_COND:
        if (!jinja_eval(r, f, n->b, out)) return false;
        if (v_truth(out)) return jinja_eval(r, f, n->a, out);
        if (n->c) return jinja_eval(r, f, n->c, out);
        return v_undef_hint(r, out, "the inline if-expression evaluated to false and no else section was defined");
    case N_ATTR:
    case N_ITEM: return eval_access(r, f, n, out);
    case N_CALL: return eval_call(r, f, n, NULL, out);
    case N_FILTER: return eval_filter(r, f, n, NULL, out);
    case N_TEST: return eval_test(r, f, n, out);
    default: return rt_fail(r, "this is not an expression");
    }
}

bool jinja_eval(run *r, frame *f, const node *n, val *out) {
    r->line = n->line;
    if (!rt_enter(r) || !eval_any(r, f, n, out)) return false;
    r->depth--;
    return true;
}

/* ---- statements ---- */

static flow flow_of(bool ok) { return ok ? FLOW_NEXT : FLOW_FAIL; }

static flow body_of(run *r, frame *f, const node_list *l) { return jinja_exec(r, f, (const node *const *)l->v, l->n); }

/* Iterate `items` over the body of n in frame f; `outer` is the frame around it, for the loop's filter. */
static flow run_loop(run *r, frame *f, frame *outer, const node *n, const val *items, int depth0) {
    loop_state *l = rt_take(r, 1, sizeof *l);
    bool more, ended = false; /* jinja2 runs the else part unless a body ran to its end */
    val x;
    if (!l) return FLOW_FAIL;
    memset(l, 0, sizeof *l);
    l->source = *items;
    l->index0 = -1;
    l->depth0 = depth0;
    l->sized = !n->c && items->type != V_ITER;
    if (n->recursive) {
        l->node = n;
        l->closure = outer;
    }
    r->line = n->line;
    if (n->c) {
        if (!(l->it.src = rt_take(r, 1, sizeof(iter))) || !iter_begin(r, l->it.src, items)) return FLOW_FAIL;
        l->it.kind = I_LOOP_TEST;
        l->it.loop = n;
        if (!frame_new(r, n->unit_test.n_slots, outer, &l->it.fr) || !scope_enter(r, l->it.fr, &n->in_test))
            return FLOW_FAIL;
    } else if (!iter_begin(r, &l->it, items)) {
        return FLOW_FAIL;
    }
    for (;;) {
        if (!loop_next(r, l, &x, &more)) return FLOW_FAIL;
        if (!more) break;
        if (n->uses_loop) *slot_at(f, n->loop_at) = (val){ .type = V_LOOP, .u.loop = l };
        if (!jinja_assign(r, f, n->a, &x) || !scope_enter(r, f, &n->in)) return FLOW_FAIL;
        const flow w = body_of(r, f, &n->list);
        if (w == FLOW_FAIL) return w;
        if (w == FLOW_BREAK) break;
        if (w == FLOW_NEXT) ended = true;
    }
    scope_leave(f, &n->in);
    if (ended || !n->list2.n) return FLOW_NEXT;
    if (!scope_enter(r, f, &n->in_else)) return FLOW_FAIL;
    const flow w = body_of(r, f, &n->list2);
    scope_leave(f, &n->in_else);
    return w;
}

bool recursive_loop(run *r, const node *n, frame *closure, const val *items, int depth0) {
    frame *f;
    if (!rt_enter(r) || !frame_new(r, n->unit_body.n_slots, closure, &f)) return false;
    if (run_loop(r, f, closure, n, items, depth0) == FLOW_FAIL) return false;
    rt_leave(r);
    return true;
}

static flow exec_for(run *r, frame *f, const node *n) {
    val items;
    if (!jinja_eval(r, f, n->b, &items)) return FLOW_FAIL;
    if (n->recursive) return flow_of(recursive_loop(r, n, f, &items, 0));
    return run_loop(r, f, f, n, &items, 0);
}

static flow exec_if(run *r, frame *f, const node *first) {
    val v;
    for (const node *n = first; n; n = n->c) {
        if (!jinja_eval(r, f, n->b, &v)) return FLOW_FAIL;
        if (v_truth(&v)) return body_of(r, f, &n->list);
    }
    return body_of(r, f, &first->list2);
}

static bool check_namespaces(run *r, frame *f, const node *target) {
    if (target->kind == N_NSREF && slot_at(f, target->at)->type != V_NAMESPACE)
        return rt_fail(r, "cannot assign attribute on non-namespace object");
    for (size_t i = 0; target->kind == N_TUPLE && i < target->list.n; i++)
        if (!check_namespaces(r, f, target->list.v[i])) return false;
    return true;
}

static flow exec_set(run *r, frame *f, const node *n) {
    val v;
    if (!check_namespaces(r, f, n->a) || !jinja_eval(r, f, n->b, &v) || !jinja_assign(r, f, n->a, &v)) return FLOW_FAIL;
    if (n->flag) export_target(r, f, n->a);
    return FLOW_NEXT;
}

/* Run a body in its own scope and take what it printed. */
static flow capture(run *r, frame *f, const node *n, val *out) {
    const size_t mark = r->out->n;
    if (!scope_enter(r, f, &n->in)) return FLOW_FAIL;
    const flow w = body_of(r, f, &n->list);
    if (w == FLOW_FAIL) return w;
    return rt_cut(r, r->out, mark, out) ? w : FLOW_FAIL;
}

static flow exec_set_block(run *r, frame *f, const node *n) {
    val text;
    if (!check_namespaces(r, f, n->a)) return FLOW_FAIL;
    const flow w = capture(r, f, n, &text);
    if (w != FLOW_NEXT) return w;
    if (n->b && !eval_filter(r, f, n->b, &text, &text)) return FLOW_FAIL;
    if (!jinja_assign(r, f, n->a, &text)) return FLOW_FAIL;
    if (n->flag) export_target(r, f, n->a);
    scope_leave(f, &n->in);
    return FLOW_NEXT;
}

/* Filter and call blocks write what they get, and only text can be written. */
static bool write_text(run *r, const val *v) {
    if (v->type != V_STR) return rt_fail(r, "TypeError: expected str instance, %s found", type_name(v));
    return v_write_str(r, r->out, v);
}

static flow exec_filter_block(run *r, frame *f, const node *n) {
    val text;
    const flow w = capture(r, f, n, &text);
    if (w != FLOW_NEXT) return w;
    if (!eval_filter(r, f, n->b, &text, &text) || !write_text(r, &text)) return FLOW_FAIL;
    scope_leave(f, &n->in);
    return FLOW_NEXT;
}

static bool make_macro(run *r, frame *f, const node *n, val *out) {
    macro_val *m = rt_take(r, 1, sizeof *m);
    if (!m) return false;
    *m = (macro_val){ n, f };
    *out = (val){ .type = V_MACRO, .u.macro = m };
    return true;
}

static flow exec_macro(run *r, frame *f, const node *n) {
    val m;
    if (!make_macro(r, f, n, &m)) return FLOW_FAIL;
    *slot_at(f, n->at) = m;
    if (n->flag) r->ctx[n->name] = m;
    return FLOW_NEXT;
}

static flow exec_call_block(run *r, frame *f, const node *n) {
    val caller, text;
    return flow_of(make_macro(r, f, n, &caller) && eval_call(r, f, n->b, &caller, &text) && write_text(r, &text));
}

static flow exec_with(run *r, frame *f, const node *n) {
    val v;
    if (!scope_enter(r, f, &n->in)) return FLOW_FAIL;
    for (size_t i = 0; i < n->list2.n; i += 2)
        if (!jinja_eval(r, f, n->list2.v[i + 1], &v) || !jinja_assign(r, f, n->list2.v[i], &v)) return FLOW_FAIL;
    const flow w = body_of(r, f, &n->list);
    scope_leave(f, &n->in);
    return w;
}

static flow exec_scope(run *r, frame *f, const node *n) {
    if (!scope_enter(r, f, &n->in)) return FLOW_FAIL;
    const flow w = body_of(r, f, &n->list);
    scope_leave(f, &n->in);
    return w;
}

static flow exec_block(run *r, frame *f, const node *n) {
    if (n->flag) return exec_scope(r, f, n);
    frame *own;
    if (!frame_new(r, n->unit_body.n_slots, NULL, &own) || !scope_enter(r, own, &n->in)) return FLOW_FAIL;
    return body_of(r, own, &n->list) == FLOW_FAIL ? FLOW_FAIL : FLOW_NEXT;
}

static flow exec_print(run *r, frame *f, const node *n) {
    val v;
    for (size_t i = 0; i < n->list.n; i++)
        if (!jinja_eval(r, f, n->list.v[i], &v) || !v_write_str(r, r->out, &v)) return FLOW_FAIL;
    return FLOW_NEXT;
}

static flow exec(run *r, frame *f, const node *n) {
    val v;
    switch ((node_kind)n->kind) {
    case N_DATA: return flow_of(rt_emit(r, r->out, n->text.p, n->text.n));
    case N_PRINT: return exec_print(r, f, n);
    case N_FOR: return exec_for(r, f, n);
    case N_IF: return exec_if(r, f, n);
    case N_SET: return exec_set(r, f, n);
    case N_SETBLOCK: return exec_set_block(r, f, n);
    case N_MACRO: return exec_macro(r, f, n);
    case N_CALLBLOCK: return exec_call_block(r, f, n);
    case N_FILTERBLOCK: return exec_filter_block(r, f, n);
    case N_WITH: return exec_with(r, f, n);
    case N_SCOPE: return exec_scope(r, f, n);
    case N_BLOCK: return exec_block(r, f, n);
    case N_DO: return flow_of(jinja_eval(r, f, n->b, &v));
    case N_BREAK: return FLOW_BREAK;
    case N_CONTINUE: return FLOW_CONTINUE;
    default: return flow_of(rt_fail(r, "this is not a statement"));
    }
}

flow jinja_exec(run *r, frame *f, const node *const *v, size_t n) {
    if (!rt_enter(r)) return FLOW_FAIL;
    flow w = FLOW_NEXT;
    for (size_t i = 0; i < n && w == FLOW_NEXT; i++) {
        r->line = v[i]->line;
        if (!rt_work(r, 1)) return FLOW_FAIL;
        w = exec(r, f, v[i]);
    }
    if (w != FLOW_FAIL) rt_leave(r);
    return w;
}
