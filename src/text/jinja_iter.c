/* Iteration, lazy where Python's is: a generator made by map or select runs when something reads it. */
#include "text/jinja_ast.h"
#include "text/jinja_uni.h"

bool iter_is_iterable(const val *v) {
    switch ((val_type)v->type) {
    case V_UNDEF:
    case V_STR:
    case V_LIST:
    case V_TUPLE:
    case V_DICT:
    case V_VIEW:
    case V_RANGE:
    case V_ITER:
    case V_LOOP: return true;
    default: return false;
    }
}

bool iter_begin(run *r, iter *it, const val *v) {
    memset(it, 0, sizeof *it);
    switch ((val_type)v->type) {
    case V_UNDEF: it->kind = I_EMPTY; return true;
    case V_LIST:
    case V_TUPLE:
        it->kind = I_SEQ;
        it->v = v->u.v;
        it->n = v->n;
        return true;
    case V_STR:
        it->kind = I_STR;
        it->p = v->u.s;
        it->end = v->u.s + v->n;
        return true;
    case V_DICT:
    case V_VIEW:
        it->kind = I_DICT;
        it->d = v->u.d;
        it->view = v->type == V_DICT ? VIEW_KEYS : v->flag;
        return true;
    case V_RANGE:
        it->kind = I_RANGE;
        it->range = *v->u.range;
        return true;
    case V_ITER:
        it->kind = I_PROXY;
        it->src = v->u.it;
        return true;
    case V_LOOP: return rt_fail(r, "TypeError: a loop variable cannot be iterated here");
    default: return rt_fail(r, "TypeError: '%s' object is not iterable", type_name(v));
    }
}

bool iter_new(run *r, iter_kind kind, const val *source, const char *label, iter **out, val *value) {
    iter *it = rt_take(r, 1, sizeof *it);
    if (!it) return false;
    memset(it, 0, sizeof *it);
    it->kind = kind;
    it->label = label;
    if (source) it->source = *source;
    *out = it;
    *value = (val){ .type = V_ITER, .u.it = it };
    return true;
}

/* The generator's first step: start on its source. A falsy source (jinja2 tests it) yields nothing. */
static bool start(run *r, iter *it) {
    if (it->started) return true;
    it->started = true;
    if (it->kind != I_UNIQUE && !v_truth(&it->source)) {
        it->kind = I_EMPTY;
        return true;
    }
    if (!(it->src = rt_take(r, 1, sizeof *it->src)) || !iter_begin(r, it->src, &it->source)) return false;
    return it->kind != I_UNIQUE || (it->seen = dict_new(r, 0));
}

static bool next_select(run *r, iter *it, val *out, bool *more) {
    for (;;) {
        val verdict;
        if (!iter_next(r, it->src, out, more)) return false;
        if (!*more) return true;
        if (!mapper_apply(r, it->map, out, &verdict)) return false;
        if (v_truth(&verdict) != it->negate) return true;
    }
}

static bool next_unique(run *r, iter *it, val *out, bool *more) {
    for (;;) {
        val key;
        const val *seen, yes = v_bool(true);
        if (!iter_next(r, it->src, out, more)) return false;
        if (!*more) return true;
        if (!path_get(r, out, it->map->path, it->map->n_path, NULL, &key)) return false;
        if (it->fold && key.type == V_STR && !s_case(r, s_of(&key), CASE_LOWER, &key)) return false;
        if (!dict_find(r, it->seen, &key, &seen)) return false;
        if (!seen) return dict_put(r, it->seen, &key, &yes);
    }
}

static bool next_loop_test(run *r, iter *it, val *out, bool *more) {
    for (;;) {
        val verdict;
        if (!iter_next(r, it->src, out, more)) return false;
        if (!*more) return true;
        if (!jinja_assign(r, it->fr, it->loop->target_test, out) || !jinja_eval(r, it->fr, it->loop->c, &verdict))
            return false;
        if (v_truth(&verdict)) return true;
    }
}

static bool next_dict(run *r, iter *it, val *out) {
    const dict_entry *e = &it->d->e[it->at++];
    if (it->view == VIEW_KEYS)
        *out = e->key;
    else if (it->view == VIEW_VALUES)
        *out = e->value;
    else {
        val *pair = rt_take(r, 2, sizeof *pair);
        if (!pair) return false;
        pair[0] = e->key;
        pair[1] = e->value;
        *out = v_seq(V_TUPLE, pair, 2);
    }
    return true;
}

static bool next_lazy(run *r, iter *it, val *out, bool *more) {
    if (!start(r, it)) return false;
    switch (it->kind) {
    case I_MAP: {
        val item;
        if (!iter_next(r, it->src, &item, more)) return false;
        return !*more || mapper_apply(r, it->map, &item, out);
    }
    case I_SELECT: return next_select(r, it, out, more);
    case I_UNIQUE: return next_unique(r, it, out, more);
    default: *more = false; return true;
    }
}

static bool next_any(run *r, iter *it, val *out, bool *more) {
    *more = true;
    switch (it->kind) {
    case I_EMPTY: *more = false; return true;
    case I_FILL:
        if (!it->started) {
            it->started = true;
            if (!it->fill(r, it)) return false;
        } /* fall through */
    case I_SEQ:
        if ((*more = it->at < it->n)) *out = it->v[it->at++];
        return true;
    case I_REVERSED:
        if ((*more = it->at < it->n)) *out = it->v[it->n - 1 - it->at++];
        return true;
    case I_STR:
        if ((*more = it->p < it->end)) {
            const char *from = it->p;
            uni_next(&it->p, it->end);
            *out = v_str((str){ from, (size_t)(it->p - from) });
        }
        return true;
    case I_DICT: return (*more = it->at < it->d->n) ? next_dict(r, it, out) : true;
    case I_RANGE:
        if ((*more = (int64_t)it->at < it->range.n)) *out = v_int(it->range.start + (int64_t)it->at++ * it->range.step);
        return true;
    case I_PROXY: return iter_next(r, it->src, out, more);
    case I_LOOP_TEST: return next_loop_test(r, it, out, more);
    default: return next_lazy(r, it, out, more);
    }
}

bool iter_next(run *r, iter *it, val *out, bool *more) {
    if (!rt_enter(r) || !next_any(r, it, out, more)) return false;
    rt_leave(r);
    return true;
}

bool iter_collect(run *r, const val *v, val_type t, val *out) {
    if (is_seq(v)) {
        *out = v_seq(t, v->u.v, v->n);
        return true;
    }
    iter it;
    vec a = { 0 };
    val x;
    bool more;
    if (!iter_begin(r, &it, v)) return false;
    for (;;) {
        if (!iter_next(r, &it, &x, &more)) return false;
        if (!more) break;
        if (!vec_add(r, &a, &x)) return false;
    }
    *out = v_seq(t, a.v, a.n);
    return true;
}
