/* One render: its limits, its memory, its errors. */
#include <stdarg.h>
#include <stdio.h>

#include "base/clock.h"
#include "text/jinja_ast.h"

enum { CLOCK_EVERY = 4096 };

bool rt_fail(run *r, const char *fmt, ...) {
    char msg[480];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    return fail(r->e, ERR_INPUT, "E-TEMPLATE-RUN", "chat template line %d: %s", r->line, msg);
}

bool rt_limit(run *r, const char *what) {
    return fail(r->e, ERR_INPUT, "E-TEMPLATE-LIMIT", "chat template line %d: %s", r->line, what);
}

void *rt_take(run *r, size_t count, size_t size) {
    void *p = arena_take(&r->mem, count, size);
    if (!p) rt_limit(r, "values take too much memory");
    return p;
}

bool rt_work(run *r, size_t units) {
    r->steps += units;
    if (r->steps < r->next_clock) return true;
    if (r->steps > r->max_steps) return rt_limit(r, "too many steps");
    if (clock_seconds() > r->deadline) return rt_limit(r, "takes too long");
    r->next_clock = r->steps + CLOCK_EVERY;
    return true;
}

bool rt_enter(run *r) {
    if (r->depth >= r->max_depth) return rt_limit(r, "evaluation or calls nested too deeply");
    r->depth++;
    return rt_work(r, 1);
}

bool rt_emit(run *r, buf *b, const char *p, size_t n) {
    const size_t have = r->out->n - r->out_base + r->tmp.n;
    if (n > r->max_output || have > r->max_output - n) return rt_limit(r, "writes too much text");
    buf_add(b, p, n);
    return n < 64 || rt_work(r, n / 64);
}

bool rt_cut(run *r, buf *b, size_t mark, val *out) {
    const size_t n = b->n - mark;
    char *p = rt_take(r, n + 1, 1);
    if (!p) return false;
    if (n) memcpy(p, b->p + mark, n);
    p[n] = 0;
    b->n = mark;
    if (b->p) b->p[mark] = 0;
    *out = v_str((str){ p, n });
    return true;
}

static void set_limits(run *r, const jinja_limits *l) {
    const jinja_limits none = { 0 };
    if (!l) l = &none;
    r->max_steps = l->max_steps ? l->max_steps : 50u * 1000 * 1000;
    r->mem.limit = l->max_memory_bytes ? l->max_memory_bytes : (size_t)256 << 20;
    r->max_output = l->max_output_bytes ? l->max_output_bytes : (size_t)64 << 20;
    r->max_depth = l->max_depth ? l->max_depth : 2000;
    r->deadline = clock_seconds() + (l->max_seconds > 0 ? l->max_seconds : 10);
    r->next_clock = r->max_steps < CLOCK_EVERY ? r->max_steps + 1 : CLOCK_EVERY;
}

/* The context by name id: globals first, so that variables may hide them, as in jinja2. */
static bool fill_context(run *r, const jinja_var *vars, size_t n_vars) {
    const jinja *t = r->t;
    if (!(r->ctx = rt_take(r, t->n_names, sizeof *r->ctx))) return false;
    for (uint32_t i = 0; i < t->n_names; i++) {
        r->ctx[i] = (val){ .type = V_MISSING };
        for (size_t g = 0; jinja_globals[g]; g++)
            if (str_is(t->names[i], jinja_globals[g])) r->ctx[i] = (val){ .type = V_FUNC, .n = g };
        for (size_t k = n_vars; k-- > 0;) {
            if (!str_eq(t->names[i], vars[k].name)) continue;
            if (vars[k].value) {
                if (!v_from_json(r, vars[k].value, &r->ctx[i])) return false;
            } else {
                r->ctx[i] = v_str(vars[k].text);
            }
            break;
        }
    }
    return true;
}

bool jinja_render(const jinja *t, buf *out, const jinja_var *vars, size_t n_vars, const jinja_limits *limits, err *e) {
    run r = { .t = t, .out = out, .out_base = out->n, .e = e, .line = 1 };
    frame *f = NULL;
    set_limits(&r, limits);
    const bool ok = fill_context(&r, vars, n_vars) && frame_new(&r, t->root.n_slots, NULL, &f) &&
                    scope_enter(&r, f, &t->in) &&
                    jinja_exec(&r, f, (const node *const *)t->body.v, t->body.n) != FLOW_FAIL;
    if (!ok) {
        out->n = r.out_base;
        if (out->p) out->p[out->n] = 0;
    }
    buf_free(&r.tmp);
    arena_free(&r.mem);
    return ok;
}
