/* Calling: argument binding, macros, global functions, the loop variable. */
#include <stdio.h>
#include <time.h>

#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

enum { MAX_RANGE = 100000 }; /* the sandbox's own limit */

static const char *word(const char *p, str *out) {
    while (*p == ' ') p++;
    const char *q = p;
    while (*q && *q != ' ') q++;
    *out = (str){ p, (size_t)(q - p) };
    return q;
}

bool args_bind(run *r, const char *what, const args *a, const char *params, size_t required, bool kw_ok, val *out) {
    str names[8];
    size_t n = 0;
    for (const char *p = word(params, &names[0]); names[n].n; p = word(p, &names[n])) {
        n++;
        CHECK(n < ARRAY_LEN(names), "too many parameters for %s", what);
    }
    if (a->n > n) return rt_fail(r, "TypeError: %s takes at most %zu arguments (%zu given)", what, n, a->n);
    if (a->n_kw && !kw_ok) return rt_fail(r, "TypeError: %s takes no keyword arguments", what);
    for (size_t i = 0; i < n; i++) out[i] = i < a->n ? a->pos[i] : (val){ .type = V_MISSING };
    for (size_t k = 0; k < a->n_kw; k++) {
        size_t i = 0;
        while (i < n && !str_eq(names[i], a->kw[k].name)) i++;
        if (i == n)
            return rt_fail(r, "TypeError: %s got an unexpected keyword argument '" STR_FMT "'", what,
                           STR_ARG(a->kw[k].name));
        if (is_given(&out[i]))
            return rt_fail(r, "TypeError: %s got multiple values for argument '" STR_FMT "'", what, STR_ARG(names[i]));
        out[i] = a->kw[k].v;
    }
    for (size_t i = 0; i < required; i++)
        if (!is_given(&out[i]))
            return rt_fail(r, "TypeError: %s missing required argument '" STR_FMT "'", what, STR_ARG(names[i]));
    return true;
}

/* ---- macros ---- */

static size_t keyword_find(const args *a, str name) {
    size_t i = 0;
    while (i < a->n_kw && !str_eq(a->kw[i].name, name)) i++;
    return i;
}

static bool macro_name(const macro_val *m, char *out, size_t cap) {
    if (m->def->kind == N_CALLBLOCK) return snprintf(out, cap, "caller") > 0;
    return snprintf(out, cap, "macro '" STR_FMT "'", STR_ARG(m->def->text)) > 0;
}

/* Keyword arguments that name no parameter: **kwargs, caller, or an error. */
static bool bind_extra(run *r, const macro_val *m, const args *a, const bool *used, frame *f) {
    const signature *s = m->def->sig;
    char name[120];
    dict *rest = s->wants_kwargs ? dict_new(r, 0) : NULL;
    if (s->wants_kwargs && !rest) return false;
    bool caller_done = s->explicit_caller || !s->wants_caller;
    if (s->wants_caller && !s->explicit_caller && !v_undef_hint(r, &f->slots[s->caller.slot], "No caller defined"))
        return false;
    for (size_t k = 0; k < a->n_kw; k++) {
        if (used[k]) continue;
        const val key = v_str(a->kw[k].name);
        if (!caller_done && str_is(a->kw[k].name, "caller")) {
            caller_done = true;
            if (a->kw[k].v.type != V_NONE) f->slots[s->caller.slot] = a->kw[k].v;
        } else if (rest) {
            if (!dict_put(r, rest, &key, &a->kw[k].v)) return false;
        } else {
            macro_name(m, name, sizeof name);
            return rt_fail(r, "TypeError: %s takes no keyword argument '" STR_FMT "'", name, STR_ARG(a->kw[k].name));
        }
    }
    if (rest) f->slots[s->kwargs.slot] = (val){ .type = V_DICT, .u.d = rest };
    return true;
}

static bool bind_macro(run *r, const macro_val *m, const args *a, frame *f) {
    const signature *s = m->def->sig;
    char name[120];
    bool *used = rt_take(r, a->n_kw, 1);
    if (!used) return false;
    if (a->n_kw) memset(used, 0, a->n_kw);
    if (a->n > s->n && !s->wants_varargs) {
        macro_name(m, name, sizeof name);
        return rt_fail(r, "TypeError: %s takes not more than %zu argument(s)", name, s->n);
    }
    for (size_t i = 0; i < s->n; i++) {
        val *slot = &f->slots[s->refs[i].slot];
        const size_t k = i < a->n ? a->n_kw : keyword_find(a, r->t->names[s->names[i]]);
        if (i < a->n)
            *slot = a->pos[i];
        else if (k < a->n_kw) {
            *slot = a->kw[k].v;
            used[k] = true;
        }
    }
    if (!bind_extra(r, m, a, used, f)) return false;
    if (s->wants_varargs) {
        const size_t skip = s->n < a->n ? s->n : a->n;
        f->slots[s->varargs.slot] = v_seq(V_TUPLE, a->pos ? a->pos + skip : NULL, a->n - skip);
    }
    return true;
}

static bool macro_defaults(run *r, const signature *s, frame *f) {
    for (size_t i = 0; i < s->n; i++) {
        val *slot = &f->slots[s->refs[i].slot], v;
        if (is_given(slot)) continue;
        if (i + s->defaults.n >= s->n) {
            if (!jinja_eval(r, f, s->defaults.v[i + s->defaults.n - s->n], &v)) return false;
        } else {
            char hint[160];
            snprintf(hint, sizeof hint, "parameter '" STR_FMT "' was not provided", STR_ARG(r->t->names[s->names[i]]));
            val text;
            if (!v_copy_str(r, str_of(hint), &text) || !v_undef_hint(r, &v, text.u.s)) return false;
        }
        *slot = v;
    }
    return true;
}

bool call_macro(run *r, const macro_val *m, const args *a, val *out) {
    frame *f;
    if (!rt_enter(r) || !frame_new(r, m->def->unit_body.n_slots, m->closure, &f)) return false;
    if (!bind_macro(r, m, a, f) || !scope_enter(r, f, &m->def->in) || !macro_defaults(r, m->def->sig, f)) return false;
    const size_t mark = r->out->n;
    if (jinja_exec(r, f, (const node *const *)m->def->list.v, m->def->list.n) == FLOW_FAIL) return false;
    rt_leave(r);
    return rt_cut(r, r->out, mark, out);
}

/* ---- the loop variable ---- */

bool loop_next(run *r, loop_state *l, val *out, bool *more) {
    if (l->has_after) {
        *out = l->after;
        *more = true;
        l->has_after = false;
    } else if (!iter_next(r, &l->it, out, more)) {
        return false;
    }
    if (!*more) return true;
    l->index0++;
    l->before = l->current;
    l->current = *out;
    return true;
}

static bool loop_peek(run *r, loop_state *l, bool *more) {
    *more = l->has_after;
    if (*more) return true;
    if (!iter_next(r, &l->it, &l->after, more)) return false;
    l->has_after = *more;
    return true;
}

/* What has no length is read to its end, as Python does. */
bool loop_length(run *r, loop_state *l, size_t *out) {
    if (!l->has_length && l->sized) {
        if (!v_len(r, &l->source, &l->length)) return false;
    } else if (!l->has_length) {
        vec rest = { 0 };
        val x;
        bool more;
        for (;;) {
            if (!iter_next(r, &l->it, &x, &more)) return false;
            if (!more) break;
            if (!vec_add(r, &rest, &x)) return false;
        }
        l->length = rest.n + (size_t)(l->index0 + 1) + l->has_after;
        const val list = v_seq(V_LIST, rest.v, rest.n);
        if (!iter_begin(r, &l->it, &list)) return false;
    }
    l->has_length = true;
    *out = l->length;
    return true;
}

bool loop_attr(run *r, loop_state *l, str name, val *out, bool *found) {
    static const char *const names[] = { "index",    "index0",   "first",  "depth",    "depth0",   "last",
                                         "previtem", "nextitem", "length", "revindex", "revindex0" };
    size_t which = 0, n;
    bool more;
    while (which < ARRAY_LEN(names) && !str_is(name, names[which])) which++;
    *found = true;
    if (which >= 8 && which < ARRAY_LEN(names) && !loop_length(r, l, &n)) return false;
    switch (which) {
    case 0: *out = v_int(l->index0 + 1); return true;
    case 1: *out = v_int(l->index0); return true;
    case 2: *out = v_bool(l->index0 == 0); return true;
    case 3: *out = v_int(l->depth0 + 1); return true;
    case 4: *out = v_int(l->depth0); return true;
    case 5:
        if (!loop_peek(r, l, &more)) return false;
        *out = v_bool(!more);
        return true;
    case 6:
        if (l->index0 == 0) return v_undef_hint(r, out, "there is no previous item");
        *out = l->before;
        return true;
    case 7:
        if (!loop_peek(r, l, &more)) return false;
        if (!more) return v_undef_hint(r, out, "there is no next item");
        *out = l->after;
        return true;
    case 8: *out = v_int((int64_t)n); return true;
    case 9: *out = v_int((int64_t)n - l->index0); return true;
    case 10: *out = v_int((int64_t)n - l->index0 - 1); return true;
    default: break;
    }
    const val self = { .type = V_LOOP, .u.loop = l };
    const method_def *m = method_find(&self, name);
    *found = m != NULL;
    if (!m) return true;
    method_val *mv = rt_take(r, 1, sizeof *mv);
    if (!mv) return false;
    *mv = (method_val){ self, m };
    *out = (val){ .type = V_METHOD, .u.method = mv };
    return true;
}

bool loop_cycle(run *r, loop_state *l, const args *a, val *out) {
    if (a->n_kw) return rt_fail(r, "TypeError: cycle() takes no keyword arguments");
    if (!a->n) return rt_fail(r, "TypeError: no items for cycling given");
    *out = a->pos[(size_t)l->index0 % a->n];
    return true;
}

bool loop_changed(run *r, loop_state *l, const args *a, val *out) {
    const val now = v_seq(V_TUPLE, a->pos, a->n);
    bool same = false;
    if (a->n_kw) return rt_fail(r, "TypeError: changed() takes no keyword arguments");
    if (l->has_changed && !v_equal(r, &l->last_changed, &now, &same)) return false;
    l->has_changed = true;
    l->last_changed = now;
    *out = v_bool(!same);
    return true;
}

bool loop_call(run *r, loop_state *l, const args *a, val *out) {
    val items;
    if (!args_bind(r, "loop()", a, "iterable", 1, true, &items)) return false;
    if (!l->node) return rt_fail(r, "TypeError: the loop must have the 'recursive' marker to be called recursively");
    const size_t mark = r->out->n;
    return recursive_loop(r, l->node, l->closure, &items, l->depth0 + 1) && rt_cut(r, r->out, mark, out);
}

/* ---- global functions ---- */

enum { G_RANGE, G_DICT, G_NAMESPACE, G_CYCLER, G_JOINER, G_LIPSUM, G_RAISE, G_STRFTIME };
const char *const jinja_globals[] = { "range",           "dict",         "namespace", "cycler", "joiner", "lipsum",
                                      "raise_exception", "strftime_now", NULL };

static bool make_range(run *r, const args *a, val *out) {
    int64_t v[3] = { 0, 0, 1 };
    if (a->n_kw) return rt_fail(r, "TypeError: range() takes no keyword arguments");
    if (a->n < 1 || a->n > 3) return rt_fail(r, "TypeError: range expected 1 to 3 arguments, got %zu", a->n);
    for (size_t i = 0; i < a->n; i++)
        if (!as_index(r, &a->pos[i], &v[a->n == 1 ? 1 : i])) return false;
    if (v[2] == 0) return rt_fail(r, "ValueError: range() arg 3 must not be zero");
    const __int128 span = v[2] > 0 ? (__int128)v[1] - v[0] : (__int128)v[0] - v[1];
    const __int128 step = v[2] > 0 ? v[2] : -(__int128)v[2];
    const __int128 n = span > 0 ? (span - 1) / step + 1 : 0;
    if (n > MAX_RANGE)
        return rt_fail(r, "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d)",
                       MAX_RANGE);
    range_info *g = rt_take(r, 1, sizeof *g);
    if (!g) return false;
    *g = (range_info){ v[0], v[1], v[2], (int64_t)n };
    *out = (val){ .type = V_RANGE, .u.range = g };
    return true;
}

/* dict(mapping or pairs, **kwargs), also for namespace(). */
static bool fill_dict(run *r, const char *what, const args *a, dict *d) {
    if (a->n > 1) return rt_fail(r, "TypeError: %s expected at most 1 argument, got %zu", what, a->n);
    if (a->n && a->pos[0].type == V_UNDEF) return undef_fail(r, &a->pos[0]);
    if (a->n && a->pos[0].type == V_DICT) {
        const dict *from = a->pos[0].u.d;
        for (size_t i = 0; i < from->n; i++)
            if (!dict_put(r, d, &from->e[i].key, &from->e[i].value)) return false;
    } else if (a->n) {
        iter it;
        val x, pair;
        bool more;
        if (!iter_begin(r, &it, &a->pos[0])) return false;
        for (;;) {
            if (!iter_next(r, &it, &x, &more)) return false;
            if (!more) break;
            if (!iter_collect(r, &x, V_LIST, &pair)) return false;
            if (pair.n != 2)
                return rt_fail(r, "ValueError: dictionary update sequence element has length %zu; 2 is required",
                               pair.n);
            if (!dict_put(r, d, &pair.u.v[0], &pair.u.v[1])) return false;
        }
    }
    for (size_t i = 0; i < a->n_kw; i++) {
        const val key = v_str(a->kw[i].name);
        if (!dict_put(r, d, &key, &a->kw[i].v)) return false;
    }
    return true;
}

static bool make_cycler(run *r, const args *a, val *out) {
    if (a->n_kw) return rt_fail(r, "TypeError: cycler() takes no keyword arguments");
    if (!a->n) return rt_fail(r, "RuntimeError: at least one item has to be provided");
    cycler_val *c = rt_take(r, 1, sizeof *c);
    if (!c) return false;
    *c = (cycler_val){ a->pos, a->n, 0 };
    *out = (val){ .type = V_CYCLER, .u.cycler = c };
    return true;
}

static bool make_joiner(run *r, const args *a, val *out) {
    val *sep = rt_take(r, 1, sizeof *sep);
    cycler_val *c = rt_take(r, 1, sizeof *c);
    if (!sep || !c || !args_bind(r, "joiner()", a, "sep", 0, true, sep)) return false;
    if (!is_given(sep)) *sep = v_str(STR(", "));
    *c = (cycler_val){ sep, 1, 0 };
    *out = (val){ .type = V_JOINER, .u.cycler = c };
    return true;
}

static bool raise_exception(run *r, const args *a) {
    val message, text;
    if (!args_bind(r, "raise_exception()", a, "message", 1, true, &message) || !v_to_str(r, &message, &text))
        return false;
    return fail(r->e, ERR_INPUT, "E-TEMPLATE-RAISE", "%.*s (raised by the chat template, line %d)",
                (int)(text.n > 500 ? 500 : text.n), text.u.s, r->line);
}

/* datetime.now().strftime(format): local time without a zone, so %z and %Z are empty. */
static bool strftime_now(run *r, const args *a, val *out) {
    val fmt;
    if (!args_bind(r, "strftime_now()", a, "format", 1, true, &fmt)) return false;
    if (fmt.type != V_STR) return rt_fail(r, "TypeError: strftime() argument 1 must be str, not %s", type_name(&fmt));
    struct timespec now;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &now);
    localtime_r(&now.tv_sec, &tm);
    buf *b = &r->tmp;
    const size_t mark = b->n;
    for (size_t i = 0; i < fmt.n; i++) {
        char one[8] = { fmt.u.s[i] }, text[256];
        if (one[0] != '%' || i + 1 >= fmt.n) {
            if (!rt_emit(r, b, one, 1)) return false;
            continue;
        }
        size_t k = 1;
        one[k++] = fmt.u.s[++i];
        if (strchr("-_0^#EO", one[1]) && one[1] && i + 1 < fmt.n) one[k++] = fmt.u.s[++i];
        if (one[1] == 'z' || one[1] == 'Z') continue;
        size_t n;
        if (one[1] == 'f')
            n = (size_t)snprintf(text, sizeof text, "%06ld", now.tv_nsec / 1000);
        else
            n = strftime(text, sizeof text, one, &tm);
        if (!rt_emit(r, b, text, n)) return false;
    }
    return rt_cut(r, b, mark, out);
}

bool call_function(run *r, size_t which, const args *a, val *out) {
    switch (which) {
    case G_RANGE: return make_range(r, a, out);
    case G_DICT:
    case G_NAMESPACE: {
        dict *d = dict_new(r, 0);
        if (!d || !fill_dict(r, which == G_DICT ? "dict" : "namespace", a, d)) return false;
        *out = (val){ .type = which == G_DICT ? V_DICT : V_NAMESPACE, .u.d = d };
        return true;
    }
    case G_CYCLER: return make_cycler(r, a, out);
    case G_JOINER: return make_joiner(r, a, out);
    case G_RAISE: return raise_exception(r, a);
    case G_STRFTIME: return strftime_now(r, a, out);
    default: return rt_fail(r, "%s() is not supported", jinja_globals[which]);
    }
}

static bool call_method(run *r, const method_val *m, const args *a, val *out) {
    const method_def *d = m->def;
    char what[60];
    snprintf(what, sizeof what, "%s.%s()", type_name(&m->self), d->name);
    if (!d->fn) return rt_fail(r, "method %s is not supported", what);
    if (!d->params) return d->fn(r, &m->self, a, out);
    val bound[8];
    const args b = { .pos = bound, .n = 8 };
    return args_bind(r, what, a, d->params, d->required, d->kw_ok, bound) && d->fn(r, &m->self, &b, out);
}

bool call_value(run *r, const val *fn, const args *a, val *out) {
    switch ((val_type)fn->type) {
    case V_UNDEF: return undef_fail(r, fn);
    case V_MACRO: return call_macro(r, fn->u.macro, a, out);
    case V_FUNC: return call_function(r, fn->n, a, out);
    case V_METHOD: return call_method(r, fn->u.method, a, out);
    case V_LOOP: return loop_call(r, fn->u.loop, a, out);
    case V_JOINER: {
        if (a->n || a->n_kw) return rt_fail(r, "TypeError: a joiner takes no arguments");
        *out = fn->u.cycler->at ? fn->u.cycler->items[0] : v_str(STR(""));
        fn->u.cycler->at = 1;
        return true;
    }
    default: return rt_fail(r, "TypeError: '%s' object is not callable", type_name(fn));
    }
}
