/* One split pattern: parsed, resolved to classes, matched by the direct scanner or by PCRE2 over class bytes. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "text/pattern.h"
#include "text/pretok.h"

/* A match attempt may take this many backtracking steps, and all attempts on one text this much processor time: far
 * above what sane patterns need, so only a hostile one fails. */
enum {
    MATCH_STEPS = 5000000,
    HEAP_KIB = 1 << 16,
    SECONDS_BASE = 2,
    NANOSECONDS_PER_BYTE = 5000,
    JIT_STACK_MAX = 16 << 20
};

struct splitter {
    class_map map;
    scanner scan;
    bool direct;
    pcre2_code *code;
};

/* ---- translation ---- */

typedef struct emitter {
    const pattern_tree *t;
    const class_map *m;
    buf out;
} emitter;

static void emit_set(emitter *x, int set) {
    const uint64_t bit = 1ull << set;
    size_t at = x->out.n;
    bool any = false;
    buf_puts(&x->out, "[");
    for (int c = 0; c < x->m->classes; c++) {
        if (!(x->m->members[c] & bit)) continue;
        buf_printf(&x->out, "\\x%02x", c);
        any = true;
    }
    buf_puts(&x->out, "]");
    if (any) return;
    x->out.n = at;
    buf_puts(&x->out, "(?!)");
}

static void emit(emitter *x, int i);

static void emit_group(emitter *x, const char *open, const pattern_node *n, const char *between) {
    buf_puts(&x->out, open);
    for (int c = n->child; c >= 0; c = x->t->node[c].next) {
        if (c != n->child) buf_puts(&x->out, between);
        emit(x, c);
    }
    buf_puts(&x->out, ")");
}

/* Recursion is as deep as the parser's. */
static void emit(emitter *x, int i) {
    static const char *const looks[] = { "(?=", "(?!", "(?<=", "(?<!" }, *const modes[] = { "", "?", "+" };
    const pattern_node *n = &x->t->node[i];
    switch ((node_kind)n->kind) {
    case NODE_EMPTY: break;
    case NODE_SET: emit_set(x, n->set); break;
    case NODE_CAT: emit_group(x, "(?:", n, ""); break;
    case NODE_ALT: emit_group(x, "(?:", n, "|"); break;
    case NODE_LOOK: emit_group(x, looks[2 * n->behind + n->negative], n, ""); break;
    case NODE_ATOMIC: emit_group(x, "(?>", n, ""); break;
    case NODE_REPEAT:
        emit(x, n->child);
        if (n->max == PATTERN_INF)
            buf_printf(&x->out, "{%d,}%s", n->min, modes[n->mode]);
        else
            buf_printf(&x->out, "{%d,%d}%s", n->min, n->max, modes[n->mode]);
        break;
    }
}

static bool compile(splitter *s, const pattern_tree *t, err *e) {
    emitter x = { .t = t, .m = &s->map };
    emit(&x, t->root);
    int code = 0;
    PCRE2_SIZE at = 0;
    s->code = pcre2_compile((PCRE2_SPTR)x.out.p, x.out.n, PCRE2_ANCHORED | PCRE2_NEVER_UTF, &code, &at, NULL);
    buf_free(&x.out);
    if (!s->code) {
        char why[200] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return fail(e, ERR_INPUT, "E-TOK-PATTERN", "tokenizer.json: split pattern: %s", why);
    }
    pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE); /* without it the interpreter does the same, slower */
    return true;
}

bool splitter_open(splitter **out, str pattern, bool literal, err *e) {
    pattern_tree *t = xmalloc(sizeof *t);
    splitter *s = xcalloc(1, sizeof *s);
    bool ok = pattern_parse(t, pattern, literal, e) && class_map_build(&s->map, t, e) && compile(s, t, e);
    if (ok) s->direct = scanner_build(&s->scan, t, &s->map);
    free(t);
    if (ok) return *out = s, true;
    splitter_close(s);
    return false;
}

void splitter_close(splitter *s) {
    if (!s) return;
    pcre2_code_free(s->code);
    class_map_free(&s->map);
    free(s);
}

bool splitter_is_direct(const splitter *s) { return s->direct; }

bool splitter_matches_empty(const splitter *s) {
    uint32_t empty = 1;
    pcre2_pattern_info(s->code, PCRE2_INFO_MATCHEMPTY, &empty);
    return empty != 0;
}

/* ---- matching ---- */

static void add_span(spans *s, size_t end, bool match) {
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 16;
        s->v = xrealloc(s->v, s->cap * sizeof *s->v);
    }
    s->v[s->n++] = (span){ end, match };
}

void spans_free(spans *s) {
    free(s->v);
    *s = (spans){ 0 };
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct matcher {
    const splitter *s;
    uint8_t *class; /* one byte for each character */
    size_t n;
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    double deadline; /* processor time */
    double looked;   /* wall-clock time (cheap to read) of the last look at processor time (not cheap) */
} matcher;

static bool matcher_open(matcher *x, const splitter *s, str text, err *e) {
    *x = (matcher){ .s = s, .class = malloc(text.n ? text.n : 1) };
    const uint8_t *p = (const uint8_t *)text.p;
    if (!x->class) return fail(e, ERR_MACHINE, "E-TEXT-MEMORY", "no memory to tokenize %zu bytes", text.n);
    for (size_t i = 0, len; i < text.n; i += len) x->class[x->n++] = (uint8_t)class_of(&s->map, utf8_get(p + i, &len));
    x->data = pcre2_match_data_create(1, NULL);
    x->context = pcre2_match_context_create(NULL);
    CHECK(x->data && x->context, "out of memory");
    pcre2_set_match_limit(x->context, MATCH_STEPS);
    pcre2_set_heap_limit(x->context, HEAP_KIB);
    x->looked = clock_seconds();
    x->deadline = cpu_seconds() + SECONDS_BASE + 1e-9 * NANOSECONDS_PER_BYTE * (double)text.n;
    return true;
}

static void matcher_close(matcher *x) {
    pcre2_match_data_free(x->data);
    pcre2_match_context_free(x->context);
    if (x->stack) pcre2_jit_stack_free(x->stack);
    free(x->class);
}

static bool is_late(matcher *x) {
    const double now = clock_seconds();
    if (now - x->looked < 0.05) return false;
    x->looked = now;
    return cpu_seconds() > x->deadline;
}

/* Characters matched at character `at`, or -1. */
static bool match_here(matcher *x, size_t at, ptrdiff_t *len, err *e) {
    int rc = pcre2_match(x->s->code, x->class, x->n, at, 0, x->data, x->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && !x->stack) { /* the default is 32 KiB of the caller's stack */
        x->stack = pcre2_jit_stack_create(64 << 10, JIT_STACK_MAX, NULL);
        if (x->stack) pcre2_jit_stack_assign(x->context, NULL, x->stack);
        rc = pcre2_match(x->s->code, x->class, x->n, at, 0, x->data, x->context);
    }
    const bool late = is_late(x);
    if (late || (rc < 0 && rc != PCRE2_ERROR_NOMATCH))
        return fail(e, ERR_INPUT, "E-TOK-PATTERN",
                    "the split pattern of tokenizer.json needs unreasonable %s on this text",
                    late                                                              ? "time"
                    : rc == PCRE2_ERROR_JIT_STACKLIMIT || rc == PCRE2_ERROR_HEAPLIMIT ? "memory"
                                                                                      : "time");
    *len = -1;
    if (rc >= 0) *len = (ptrdiff_t)(pcre2_get_ovector_pointer(x->data)[1] - at);
    return true;
}

/* Byte length of `count` characters at p. */
static size_t bytes_of(const uint8_t *p, size_t count) {
    size_t n = 0, len;
    for (; count; count--, n += len) utf8_get(p + n, &len);
    return n;
}

/* Leftmost matches one after another; an empty match cuts. */
static bool run_general(matcher *x, spans *out, const uint8_t *p, err *e) {
    size_t at = 0, byte = 0, done = 0; /* characters, bytes, bytes that are in spans already */
    while (at < x->n) {
        ptrdiff_t len = -1;
        if (!match_here(x, at, &len, e)) return false;
        if (len == 0 && byte > done) add_span(out, done = byte, false);
        if (len <= 0) {
            byte += bytes_of(p + byte, 1);
            at++;
            continue;
        }
        if (byte > done) add_span(out, byte, false);
        byte += bytes_of(p + byte, (size_t)len);
        at += (size_t)len;
        add_span(out, done = byte, true);
    }
    if (byte > done) add_span(out, byte, false);
    return true;
}

size_t splitter_next(const splitter *s, str text, size_t at) {
    bool match;
    return scanner_next(&s->scan, &s->map, (const uint8_t *)text.p, text.n, at, &match);
}

bool splitter_run(const splitter *s, spans *out, str text, bool general, err *e) {
    const uint8_t *p = (const uint8_t *)text.p;
    if (s->direct && !general) {
        for (size_t at = 0; at < text.n;) {
            bool match;
            at = scanner_next(&s->scan, &s->map, p, text.n, at, &match);
            add_span(out, at, match);
        }
        return true;
    }
    matcher x;
    bool ok = matcher_open(&x, s, text, e);
    ok = ok && run_general(&x, out, p, e);
    if (x.class) matcher_close(&x);
    return ok;
}
