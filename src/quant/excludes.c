/* excludes.c - ModelOpt's exclude patterns, rebuilt from its algorithm (docs/NVFP4.md), and our additions. */
#include <stdlib.h>

#include "model/names.h"
#include "quant/configs.h"

typedef struct list {
    str *v;
    int n, cap;
    arena *mem;
} list;

static void add(list *l, str s) {
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 64;
        l->v = xrealloc(l->v, (size_t)l->cap * sizeof *l->v);
    }
    const str own = arena_str(l->mem, s);
    CHECK(own.p, "out of memory");
    l->v[l->n++] = own;
}

static void add_joined(list *l, str a, const char *b) {
    buf text = { 0 };
    buf_str(&text, a);
    buf_puts(&text, b);
    add(l, buf_view(&text));
    buf_free(&text);
}

static bool has(const list *l, str s) {
    for (int i = 0; i < l->n; i++)
        if (str_eq(l->v[i], s)) return true;
    return false;
}

/* Some quantized trunk module starts with `prefix`: then "prefix*" would exclude it. */
static bool hits_quantized(const plan *p, str prefix) {
    for (int i = 0; i < p->n_modules; i++)
        if (p->modules[i].format != QF_KEEP && !p->modules[i].is_mtp && str_starts(p->modules[i].name, prefix))
            return true;
    return false;
}

static bool covered(const list *l, str name) {
    for (int i = 0; i < l->n; i++) {
        const str s = l->v[i];
        if (s.n && s.p[s.n - 1] == '*' ? str_starts(name, (str){ s.p, s.n - 1 }) : str_eq(name, s)) return true;
    }
    return false;
}

/* The shortest pattern at a component border that reaches `name` and nothing quantized, else the name itself. */
static void exclude(list *l, const plan *p, str name) {
    if (covered(l, name)) return;
    for (size_t i = 0; i < name.n; i++) {
        if (name.p[i] != '.') continue;
        if (!hits_quantized(p, (str){ name.p, i })) {
            add_joined(l, (str){ name.p, i }, "*");
            return;
        }
        if (!hits_quantized(p, (str){ name.p, i + 1 })) { /* "prefix.*" */
            add_joined(l, (str){ name.p, i }, ".*");
            return;
        }
    }
    add(l, name);
}

/* Module of a verbatim tensor that carries a (disabled) quantizer in ModelOpt: Linears, convolutions, the embedding. */
static bool is_quantizable(str name, const st_tensor *t) {
    return str_ends(name, STR(".weight")) && t->rank >= 2 && !name_is_mtp(name);
}

static int by_text(const void *a, const void *b) { return str_cmp(*(const str *)a, *(const str *)b); }

/* A routed expert that is kept while its tensor is fused has no module of its own: ModelOpt lists "…mlp.experts*". */
static void candidates(list *l, const plan *p) {
    for (int i = 0; i < p->n_tensors; i++) {
        const qtensor *t = &p->tensors[i];
        if (t->part == QP_COPY && is_quantizable(t->name, t->src)) exclude(l, p, (str){ t->name.p, t->name.n - 7 });
        if (t->part == QP_COPY && !name_is_mtp(t->name) &&
            (str_ends(t->name, STR(".experts.gate_up_proj")) || str_ends(t->name, STR(".experts.down_proj"))))
            exclude(l, p, t->name);
        if (t->part == QP_SLICE && !name_is_mtp(t->name)) exclude(l, p, (str){ t->name.p, t->name.n - 7 });
    }
}

static void draft_head(list *l, const plan *p, bool modelopt_only) {
    if (!p->has_mtp || p->recipe.mtp == MTP_NONE) return;
    if (p->recipe.mtp == MTP_BF16) {
        add(l, STR("mtp*"));
        add(l, STR("mtp.layers.0*"));
    }
    if (modelopt_only) return;
    add(l, STR("mtp.fc*"));
    for (int i = 0; i < p->n_modules && p->recipe.mtp == MTP_NVFP4; i++) {
        const qmodule *m = &p->modules[i];
        if (m->is_mtp && m->format == QF_KEEP && m->family != QM_MTP_FC) add(l, m->name);
    }
}

/* vLLM runs the text model as language_model.model.*, SGLang as model.*, both the tower as visual.*: their matchers see
 * those names. */
static void other_namespaces(list *l, const plan *p) {
    const int n = l->n;
    for (int i = 0; i < n; i++) {
        const str s = l->v[i];
        if (str_starts(s, STR("model.visual")) && !has(l, str_skip(s, 6))) add(l, str_skip(s, 6));
        if (!str_starts(s, p->prefix)) continue;
        static const char *const spellings[] = { "language_model.model.", "model." };
        for (size_t k = 0; k < ARRAY_LEN(spellings); k++) {
            buf text = { 0 };
            buf_puts(&text, spellings[k]);
            buf_str(&text, str_skip(s, p->prefix.n));
            if (!has(l, buf_view(&text))) add(l, buf_view(&text));
            buf_free(&text);
        }
    }
    if (has(l, STR("lm_head"))) add(l, STR("language_model.lm_head"));
}

static const str *finish(list *l, int *n) {
    str *out = arena_take(l->mem, (size_t)l->n + 1, sizeof *out);
    CHECK(out, "out of memory");
    if (l->n) memcpy(out, l->v, (size_t)l->n * sizeof *out);
    *n = l->n;
    free(l->v);
    return out;
}

const str *configs_head_excludes(const plan *p, arena *mem, int *n) {
    list l = { .mem = mem };
    draft_head(&l, p, false);
    return finish(&l, n);
}

const str *configs_excludes(const plan *p, arena *mem, bool modelopt_only, int *n) {
    list l = { .mem = mem };
    bool uniform = true; /* a mixed export lists what IS quantized instead */
    qformat first = QF_KEEP;
    for (int i = 0; i < p->n_modules; i++) {
        const qformat f = p->modules[i].format;
        if (f == QF_KEEP || p->modules[i].is_mtp) continue;
        if (first == QF_KEEP) first = f;
        uniform = uniform && f == first;
    }
    if (uniform) candidates(&l, p);
    if (l.n) qsort(l.v, (size_t)l.n, sizeof *l.v, by_text);
    draft_head(&l, p, modelopt_only);
    if (uniform && !modelopt_only) other_namespaces(&l, p);
    return finish(&l, n);
}
