#include "text/pretok.h"

#include <stdlib.h>

enum { STAGES_MAX = 16 };

typedef enum stage_kind { STAGE_SPLIT, STAGE_PREFIX } stage_kind;
typedef enum behavior { ISOLATED, REMOVED, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT, CONTIGUOUS } behavior;
static const char *const behavior_names[] = { "Isolated", "Removed", "MergedWithPrevious", "MergedWithNext",
                                              "Contiguous" };

typedef struct stage {
    stage_kind kind; /* PREFIX: a space before a piece that does not begin with one */
    behavior behavior;
    bool invert;
    splitter *split;
} stage;

struct pretok {
    stage stage[STAGES_MAX];
    int stages;
    bool byte_level, rewrites;
};

/* What ByteLevel uses when use_regex is set. */
static const char gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* ---- opening ---- */

static bool no(err *e, const char *what) {
    return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: pre_tokenizer: %s", what);
}

static bool add_stage(pretok *t, stage s, err *e) {
    if (t->stages == STAGES_MAX) {
        splitter_close(s.split);
        return no(e, "too many steps");
    }
    t->stage[t->stages++] = s;
    return true;
}

/* A boolean field; absent takes the default. */
static bool get_flag(const json *v, const char *key, bool absent, bool *out, err *e) {
    const json *f = json_get(v, key);
    *out = f ? f->type == JSON_TRUE : absent;
    if (!f || json_is_bool(f)) return true;
    return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: pre_tokenizer: %s is neither true nor false", key);
}

static bool open_byte_level(pretok *t, const json *v, err *e) {
    bool prefix, use_regex;
    if (!get_flag(v, "add_prefix_space", true, &prefix, e) || !get_flag(v, "use_regex", true, &use_regex, e))
        return false;
    t->byte_level = true;
    if (prefix && !add_stage(t, (stage){ .kind = STAGE_PREFIX }, e)) return false;
    t->rewrites |= prefix;
    if (!use_regex) return true;
    stage s = { .kind = STAGE_SPLIT };
    return splitter_open(&s.split, str_of(gpt2_pattern), false, e) && add_stage(t, s, e);
}

static bool open_split(pretok *t, const json *v, err *e) {
    const json *pattern = json_get(v, "pattern"), *name = json_get(v, "behavior");
    const json *regex = json_get(pattern, "Regex"), *text = json_get(pattern, "String");
    stage s = { .kind = STAGE_SPLIT };
    if (!pattern || pattern->type != JSON_OBJECT || pattern->n != 1 || !json_is(regex ? regex : text, JSON_STRING))
        return no(e, "Split without a Regex or String pattern");
    if (!get_flag(v, "invert", false, &s.invert, e)) return false;
    size_t k = 0;
    while (k < ARRAY_LEN(behavior_names) && !(json_is(name, JSON_STRING) && str_is(json_str(name), behavior_names[k])))
        k++;
    if (k == ARRAY_LEN(behavior_names)) return no(e, "Split with an unknown behavior");
    s.behavior = (behavior)k;
    if (!splitter_open(&s.split, json_str(regex ? regex : text), !regex, e)) return false;
    if (s.behavior != ISOLATED && splitter_matches_empty(s.split)) {
        splitter_close(s.split);
        return no(e, "a Split pattern that matches the empty string is supported with behavior Isolated only");
    }
    return add_stage(t, s, e);
}

static bool open_step(pretok *t, const json *v, err *e) {
    const json *type = json_get(v, "type");
    if (!json_is(type, JSON_STRING)) return no(e, "no type");
    if (t->byte_level) return no(e, "a step behind ByteLevel is not supported");
    if (str_is(json_str(type), "ByteLevel")) return open_byte_level(t, v, e);
    if (str_is(json_str(type), "Split")) return open_split(t, v, e);
    return fail(e, ERR_INPUT, "E-TOK-MODEL",
                "tokenizer.json: pre_tokenizer type \"" STR_FMT "\" is not supported (only Split, "
                "ByteLevel and a Sequence of them)",
                STR_ARG(json_str(type)));
}

static bool open_steps(pretok *t, const json *v, err *e) {
    const json *type = json_get(v, "type");
    if (!json_is(type, JSON_STRING) || !str_is(json_str(type), "Sequence")) return open_step(t, v, e);
    const json *list = json_get(v, "pretokenizers");
    if (!json_is(list, JSON_ARRAY)) return no(e, "Sequence without a list of pretokenizers");
    for (uint32_t i = 0; i < list->n; i++)
        if (!open_step(t, &list->u.items[i], e)) return false;
    return true;
}

bool pretok_open(pretok **out, const json *v, err *e) {
    pretok *t = xcalloc(1, sizeof *t);
    bool ok = json_is(v, JSON_OBJECT) ? open_steps(t, v, e) : no(e, "missing (a byte-level tokenizer needs ByteLevel)");
    if (ok && !t->byte_level) ok = no(e, "no ByteLevel step (only byte-level tokenizers are supported)");
    if (ok) return *out = t, true;
    pretok_close(t);
    return false;
}

void pretok_close(pretok *t) {
    if (!t) return;
    for (int i = 0; i < t->stages; i++) splitter_close(t->stage[i].split);
    free(t);
}

bool pretok_rewrites(const pretok *t) { return t->rewrites; }

/* ---- running ---- */

typedef struct runner {
    const pretok *t;
    pretok_sink *sink;
    void *ctx;
} runner;

/* Join spans as the behavior says, in place; `match` then means: left out. */
static void apply_behavior(const stage *s, spans *x) {
    size_t kept = 0;
    for (size_t i = 0; s->invert && i < x->n; i++) x->v[i].match = !x->v[i].match;
    bool last = false; /* the span before this one was a match */
    for (size_t i = 0; i < x->n; i++) {
        const bool match = x->v[i].match;
        bool join = false;
        if (s->behavior == MERGED_WITH_PREVIOUS) join = match && !last;
        if (s->behavior == CONTIGUOUS) join = match == last;
        /* From the end backwards, a match joins the text behind it, unless that is a match. */
        if (s->behavior == MERGED_WITH_NEXT) join = last && !match;
        last = match;
        if (join && kept)
            x->v[kept - 1].end = x->v[i].end;
        else
            x->v[kept++] = x->v[i];
        x->v[kept - 1].match = match && s->behavior == REMOVED;
    }
    x->n = kept;
}

static bool run_stage(const runner *r, int i, str text, err *e);

static bool run_prefix(const runner *r, int i, str text, err *e) {
    if (text.n && text.p[0] == ' ') return run_stage(r, i + 1, text, e);
    buf b = { 0 };
    buf_byte(&b, ' ');
    buf_str(&b, text);
    const bool ok = run_stage(r, i + 1, buf_view(&b), e);
    buf_free(&b);
    return ok;
}

static bool run_split(const runner *r, int i, str text, err *e) {
    const stage *s = &r->t->stage[i];
    spans x = { 0 };
    bool ok = splitter_run(s->split, &x, text, false, e);
    if (ok && s->behavior != ISOLATED) apply_behavior(s, &x);
    for (size_t k = 0, at = 0; ok && k < x.n; at = x.v[k++].end)
        if (s->behavior != REMOVED || !x.v[k].match) ok = run_stage(r, i + 1, (str){ text.p + at, x.v[k].end - at }, e);
    spans_free(&x);
    return ok;
}

/* Recursion is as deep as there are stages. */
static bool run_stage(const runner *r, int i, str text, err *e) {
    if (text.n == 0) return true;
    if (i == r->t->stages) return r->sink(r->ctx, text), true;
    const stage *s = &r->t->stage[i];
    if (s->kind == STAGE_PREFIX) return run_prefix(r, i, text, e);
    const bool direct = s->behavior == ISOLATED && splitter_is_direct(s->split);
    if (!direct) return run_split(r, i, text, e);
    for (size_t at = 0, end; at < text.n; at = end) {
        end = splitter_next(s->split, text, at);
        if (!run_stage(r, i + 1, (str){ text.p + at, end - at }, e)) return false;
    }
    return true;
}

bool pretok_run(const pretok *t, str text, pretok_sink *sink, void *ctx, err *e) {
    const runner r = { t, sink, ctx };
    return run_stage(&r, 0, text, e);
}
