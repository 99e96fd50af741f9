/* jinja_val.h - values, the state of one render, and what the evaluator's files offer each other.
 *
 * Values are Python's as a template sees them: immutable but for namespaces, loops, iterators, cyclers and
 * joiners. They live in the render's arena and are freed with it; slices of lists and strings share memory.
 * A function that returns false has recorded an error; nothing catches errors. */
#ifndef NIBBLE_JINJA_VAL_H
#define NIBBLE_JINJA_VAL_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

typedef enum val_type {
    V_MISSING, /* an unset slot or an argument not given; never seen by templates */
    V_UNDEF,
    V_NONE,
    V_BOOL,
    V_INT,
    V_BIG, /* an integer beyond int64: kept as decimal text, no arithmetic */
    V_FLOAT,
    V_STR,
    V_LIST,
    V_TUPLE,
    V_DICT,
    V_VIEW, /* dict.keys(), .values(), .items() */
    V_RANGE,
    V_NAMESPACE,
    V_ITER,
    V_LOOP,
    V_MACRO,
    V_FUNC,
    V_METHOD,
    V_CYCLER,
    V_JOINER
} val_type;

enum { VF_MARKUP = 1, VF_GROUP = 2 };        /* STR already escaped; TUPLE made by groupby */
enum { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS }; /* flag of V_VIEW */

typedef struct val val;
typedef struct dict dict;
typedef struct iter iter;
typedef struct loop_state loop_state;
typedef struct undef_info undef_info;
typedef struct range_info range_info;
typedef struct macro_val macro_val;
typedef struct method_val method_val;
typedef struct cycler_val cycler_val;

struct val {
    uint8_t type, flag;
    size_t n; /* STR, BIG: bytes; LIST, TUPLE: items; FUNC: which */
    union {
        int64_t i; /* BOOL, INT */
        double f;
        const char *s;
        const val *v;
        dict *d; /* DICT, VIEW, NAMESPACE */
        iter *it;
        loop_state *loop;
        const undef_info *undef;
        const range_info *range;
        macro_val *macro;
        const method_val *method;
        cycler_val *cycler; /* also JOINER */
    } u;
};

struct undef_info {
    str hint;        /* the whole message, or empty */
    const char *obj; /* type name of the object without that attribute, or NULL: a plain variable */
    val name;
    bool unsafe; /* calling it is a SecurityError */
};
struct range_info {
    int64_t start, stop, step, n;
};

typedef struct dict_entry {
    val key, value;
} dict_entry;
struct dict {
    dict_entry *e;
    size_t n, cap;
    uint32_t *index; /* hash index once n > 8: entry + 1 */
    size_t mask;
};

struct scope;
typedef struct frame frame;
struct frame {
    frame *up; /* closure */
    val slots[];
};
struct macro_val {
    const struct node *def; /* N_MACRO or N_CALLBLOCK */
    frame *closure;
};
typedef struct method_def method_def;
struct method_val {
    val self;
    const method_def *def;
};
struct cycler_val {
    const val *items;
    size_t n, at;
};

typedef struct run {
    const struct jinja *t;
    arena mem;
    buf *out; /* everything printed; captures take the tail */
    buf tmp;  /* scratch for building strings, used as a stack */
    err *e;
    val *ctx; /* context variables by name id */
    int line, depth, max_depth;
    uint64_t steps, max_steps, next_clock;
    size_t out_base, max_output;
    double deadline;
    struct text_tail {
        char *end;
        size_t room;
    } tails[4]; /* ends of long concatenations, with room behind them */
    unsigned next_tail;
} run;

typedef struct kwarg {
    str name;
    val v;
} kwarg;
typedef struct args {
    const val *pos;
    size_t n;
    const kwarg *kw;
    size_t n_kw;
} args;

/* ---- errors and limits (jinja_run.c) ---- */
bool rt_fail(run *r, const char *fmt, ...) PRINTF_LIKE(2, 3); /* E-TEMPLATE-RUN at r->line */
bool rt_limit(run *r, const char *what);                      /* E-TEMPLATE-LIMIT */
void *rt_take(run *r, size_t count, size_t size);             /* NULL: failure recorded */
bool rt_work(run *r, size_t units);                           /* count steps, check the clock */
bool rt_enter(run *r);                                        /* one level deeper; rt_leave after success */
static inline void rt_leave(run *r) { r->depth--; }
bool rt_emit(run *r, buf *b, const char *p, size_t n); /* add to r->out or r->tmp within the limit */
static inline bool rt_emits(run *r, buf *b, const char *s) { return rt_emit(r, b, s, strlen(s)); }
/* Take what was added to b since `mark` as a new string value. */
bool rt_cut(run *r, buf *b, size_t mark, val *out);

/* ---- making and reading values (jinja_val.c) ---- */
static inline val v_none(void) { return (val){ .type = V_NONE }; }
static inline val v_bool(bool b) { return (val){ .type = V_BOOL, .u.i = b }; }
static inline val v_int(int64_t i) { return (val){ .type = V_INT, .u.i = i }; }
static inline val v_float(double f) { return (val){ .type = V_FLOAT, .u.f = f }; }
static inline val v_str(str s) { return (val){ .type = V_STR, .n = s.n, .u.s = s.p }; }
extern const val jinja_no_items[1]; /* where empty sequences point: never NULL, so that adding 0 is defined */
static inline val v_seq(val_type t, const val *v, size_t n) {
    return (val){ .type = (uint8_t)t, .n = n, .u.v = v ? v : jinja_no_items };
}
static inline str s_of(const val *v) { return (str){ v->u.s, v->n }; }
static inline bool is_intlike(const val *v) { return v->type == V_INT || v->type == V_BOOL; }
static inline bool is_seq(const val *v) { return v->type == V_LIST || v->type == V_TUPLE; }
static inline bool is_given(const val *v) { return v->type != V_MISSING; }
bool v_copy_str(run *r, str s, val *out);
bool v_undef(run *r, val *out, str name); /* 'name' is undefined */
bool v_undef_hint(run *r, val *out, const char *hint);
bool undef_fail(run *r, const val *undef); /* raises what using it raises */
const char *type_name(const val *v);       /* Python's */
bool v_truth(const val *v);
bool v_equal(run *r, const val *a, const val *b, bool *out);
bool v_same(const val *a, const val *b); /* `is` */
/* a < b etc.; op is a compare_op C_LT..C_GE. Fails on types that have no order. */
bool v_order(run *r, int op, const val *a, const val *b, bool *out);
bool v_contains(run *r, const val *item, const val *in, bool *out);
bool v_len(run *r, const val *v, size_t *out);    /* TypeError when it has none */
bool v_hash(run *r, const val *v, uint64_t *out); /* TypeError: unhashable */
bool v_from_json(run *r, const json *j, val *out);
bool as_index(run *r, const val *v, int64_t *out); /* int or bool, else TypeError */

dict *dict_new(run *r, size_t cap);
bool dict_put(run *r, dict *d, const val *key, const val *v);
bool dict_find(run *r, const dict *d, const val *key, const val **out); /* *out NULL when absent */
bool dict_get_str(run *r, const dict *d, str key, const val **out);

/* A list under construction. */
typedef struct vec {
    val *v;
    size_t n, cap;
} vec;
bool vec_add(run *r, vec *a, const val *v);

/* ---- iteration (jinja_iter.c) ---- */
typedef enum iter_kind {
    I_EMPTY,
    I_SEQ,
    I_REVERSED,
    I_STR,
    I_DICT,
    I_RANGE,
    I_PROXY,
    I_MAP,
    I_SELECT,
    I_UNIQUE,
    I_FILL,
    I_LOOP_TEST
} iter_kind;
typedef struct mapper mapper; /* what map and select apply to each item */
struct iter {
    iter_kind kind;
    uint8_t view;
    bool negate, fold, started;
    const val *v;
    size_t n, at;
    const char *p, *end;
    const dict *d;
    range_info range;
    iter *src;  /* PROXY, MAP, SELECT, UNIQUE, LOOP_TEST */
    val source; /* MAP, SELECT, UNIQUE, FILL: iterated at the first step, as a generator does */
    mapper *map;
    dict *seen;
    bool (*fill)(run *r, iter *it); /* FILL: sets v, n at the first step */
    val x[2];                       /* FILL: its arguments */
    const struct node *loop;        /* LOOP_TEST */
    frame *fr;
    const char *label; /* for repr */
};
/* Iterate v; TypeError when it cannot be. `it` may live on the stack: iterators in values are proxied. */
bool iter_begin(run *r, iter *it, const val *v);
bool iter_next(run *r, iter *it, val *out, bool *more);
bool iter_is_iterable(const val *v);
bool iter_new(run *r, iter_kind kind, const val *source, const char *label, iter **out, val *value);
bool iter_collect(run *r, const val *v, val_type t, val *out); /* list(v) or tuple(v) */

/* ---- text of values (jinja_repr.c) ---- */
bool v_write_str(run *r, buf *b, const val *v); /* str(v) */
bool v_write_repr(run *r, buf *b, const val *v);
bool v_to_str(run *r, const val *v, val *out); /* as a value; strings keep their Markup flag */
size_t float_repr(double f, char out[32]);     /* Python's repr */
typedef struct json_style {
    bool ascii, sort_keys, pretty;
    str indent, item_sep, key_sep;
} json_style;
bool v_write_json(run *r, buf *b, const val *v, const json_style *s, int depth);

/* ---- operators and access (jinja_op.c) ---- */
bool op_binary(run *r, int token, const val *a, const val *b, val *out);
bool op_negate(run *r, const val *a, bool minus, val *out);
bool op_concat(run *r, const val *a, const val *b, val *out); /* of two V_STR */
bool op_item(run *r, const val *obj, const val *key, val *out);
bool op_attr(run *r, const val *obj, str name, val *out);
bool op_python_attr(run *r, const val *obj, str name, val *out, bool *found); /* getattr without the fallback */
bool op_slice(run *r, const val *obj, const val *start, const val *stop, const val *step, val *out);

/* ---- calls (jinja_call.c) ---- */
bool call_value(run *r, const val *fn, const args *a, val *out);
bool call_macro(run *r, const macro_val *m, const args *a, val *out);
/* Bind to parameters named in `params` ("a b c"), the first `required` of which must be there; absent ones
 * become V_MISSING. out holds at most 8. */
bool args_bind(run *r, const char *what, const args *a, const char *params, size_t required, bool kw_ok, val *out);
extern const char *const jinja_globals[]; /* names of V_FUNC values, NULL at the end */
bool call_function(run *r, size_t which, const args *a, val *out);
bool loop_attr(run *r, loop_state *l, str name, val *out, bool *found);
bool loop_next(run *r, loop_state *l, val *out, bool *more);
bool loop_length(run *r, loop_state *l, size_t *out);
bool loop_call(run *r, loop_state *l, const args *a, val *out);
bool loop_cycle(run *r, loop_state *l, const args *a, val *out);
bool loop_changed(run *r, loop_state *l, const args *a, val *out);

struct loop_state {
    iter it;
    val source; /* for len() */
    bool sized, has_after, has_changed;
    val after, current, before, last_changed;
    int64_t index0;
    size_t length;
    bool has_length;
    int depth0;
    const struct node *node; /* a recursive loop, or NULL */
    frame *closure;
};

/* ---- evaluation (jinja_eval.c) ---- */
bool jinja_eval(run *r, frame *f, const struct node *n, val *out);
typedef enum flow { FLOW_FAIL, FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE } flow;
flow jinja_exec(run *r, frame *f, const struct node *const *v, size_t n);
bool frame_new(run *r, uint32_t n_slots, frame *up, frame **out);
bool scope_enter(run *r, frame *f, const struct scope *s);
bool jinja_assign(run *r, frame *f, const struct node *target, const val *v);
bool recursive_loop(run *r, const struct node *n, frame *closure, const val *items, int depth0);

/* ---- filters, tests, methods ---- */
typedef struct filter_def {
    const char *name;
    bool (*fn)(run *r, const val *x, const args *a, val *out);
    const char *params; /* bound to a->pos[0..] (V_MISSING when absent); NULL: arguments as given */
    uint8_t required;
} filter_def;
const filter_def *filter_find(str name);
bool filter_apply(run *r, const filter_def *f, const val *x, const args *a, val *out);
extern const filter_def jinja_filters_text[], jinja_filters_seq[]; /* end: name NULL */

typedef struct test_def {
    const char *name;
    bool (*fn)(run *r, const val *x, const val *arg, bool *out);
    uint8_t n_args;
} test_def;
const test_def *test_find(str name);
bool test_apply(run *r, const test_def *t, const val *x, const args *a, bool *out);

struct mapper {
    const filter_def *filter; /* map(name) */
    const test_def *test;     /* select(name) */
    bool has_attr, has_default;
    const val *path; /* attribute path */
    size_t n_path;
    val dflt;
    args a;
    const char *unknown; /* name of a filter or test that does not exist: fails when applied */
    str unknown_name;
};
bool path_parse(run *r, const val *attr, const val **path, size_t *n);
bool path_get(run *r, const val *item, const val *path, size_t n, const val *dflt, val *out);
bool mapper_apply(run *r, const mapper *m, const val *item, val *out);

struct method_def {
    const char *name;
    uint32_t types;                                               /* bit per val_type */
    bool (*fn)(run *r, const val *self, const args *a, val *out); /* NULL: known but not offered */
    const char *params;
    uint8_t required;
    bool kw_ok;
    bool mutates;
};
const method_def *method_find(const val *self, str name);
extern const method_def jinja_str_methods[];

bool format_percent(run *r, const val *fmt, const val *arg, val *out);     /* str % arg */
bool format_braces(run *r, str fmt, const args *a, bool markup, val *out); /* str.format */

/* ---- text helpers used by filters and methods (jinja_str.c) ---- */
typedef enum case_kind { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITALIZE, CASE_SWAP, CASE_FOLD } case_kind;
bool s_case(run *r, str s, case_kind how, val *out);
bool s_strip(run *r, str s, const val *chars, bool left, bool right, str *out);
bool s_replace(run *r, str s, str old, str fresh, int64_t count, val *out);
bool s_escape(run *r, const val *v, val *out); /* HTML; Markup as it is */
bool s_lines(run *r, str s, bool keep, val *out);
bool s_pad(run *r, str s, int64_t width, int align, const char *fill, size_t fill_n, val *out);
bool s_substr(str s, int64_t start, int64_t stop, str *out); /* code points, Python slice bounds */
bool s_parse_int(run *r, str s, int base, val *out);         /* false: not an integer, or (recorded) too long */
bool s_parse_float(str s, double *out);
static inline val v_like(val made, const val *from) {
    made.flag = from->type == V_STR ? from->flag : 0;
    return made;
}

#endif
