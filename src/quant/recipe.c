#include "quant/recipe.h"

#include <fnmatch.h>
#include <string.h>

const char *const recipe_names[] = { "nvfp4", "nvfp4-mlp", "nvfp4-experts", "nvfp4-w4a16", "mixed", NULL };

enum { MAX_PARTS = 32, MAX_PART = 128 };

typedef struct parts {
    char v[MAX_PARTS][MAX_PART];
    int n;
} parts;

/* Names and patterns too long for the table match nothing: no module of the family comes near. */
static bool cut(parts *out, str s) {
    out->n = 0;
    while (true) {
        const char *dot = memchr(s.p, '.', s.n);
        const size_t n = dot ? (size_t)(dot - s.p) : s.n;
        if (out->n == MAX_PARTS || n >= MAX_PART) return false;
        memcpy(out->v[out->n], s.p, n);
        out->v[out->n++][n] = 0;
        if (!dot) return true;
        s = str_skip(s, n + 1);
    }
}

/* Does pattern[p..] match a run that starts exactly at name[m]? */
static bool match_at(const parts *pattern, int p, const parts *name, int m) {
    if (p == pattern->n) return true;
    if (strcmp(pattern->v[p], "**") == 0) {
        for (int skip = m; skip <= name->n; skip++)
            if (match_at(pattern, p + 1, name, skip)) return true;
        return false;
    }
    return m < name->n && fnmatch(pattern->v[p], name->v[m], 0) == 0 && match_at(pattern, p + 1, name, m + 1);
}

bool recipe_glob(const char *pattern, str module) {
    parts p, m;
    if (!cut(&p, str_of(pattern)) || !cut(&m, module)) return false;
    int stars = 0;
    for (int i = 0; i < p.n; i++) stars += strcmp(p.v[i], "**") == 0;
    if (stars > 3) return false; /* nothing needs more, and each multiplies the work */
    for (int at = 0; at < m.n; at++)
        if (match_at(&p, 0, &m, at)) return true;
    return false;
}

static bool any_glob(const char *const *globs, int n, str module) {
    for (int i = 0; i < n; i++)
        if (recipe_glob(globs[i], module)) return true;
    return false;
}

static qformat preset_format(recipe_preset preset, qfamily f) {
    static const qformat table[][QM_COUNT] = {
        [RECIPE_NVFP4] = { [QM_GDN] = QF_NVFP4,
                           [QM_ATTN] = QF_NVFP4,
                           [QM_EXPERTS] = QF_NVFP4,
                           [QM_SHARED] = QF_NVFP4,
                           [QM_DENSE] = QF_NVFP4 },
        [RECIPE_NVFP4_MLP] = { [QM_EXPERTS] = QF_NVFP4, [QM_SHARED] = QF_NVFP4, [QM_DENSE] = QF_NVFP4 },
        [RECIPE_NVFP4_EXPERTS] = { [QM_EXPERTS] = QF_NVFP4 },
        [RECIPE_NVFP4_W4A16] = { [QM_GDN] = QF_NVFP4_W,
                                 [QM_ATTN] = QF_NVFP4_W,
                                 [QM_EXPERTS] = QF_NVFP4_W,
                                 [QM_SHARED] = QF_NVFP4_W,
                                 [QM_DENSE] = QF_NVFP4_W },
        [RECIPE_MIXED] = { [QM_GDN] = QF_FP8,
                           [QM_ATTN] = QF_FP8,
                           [QM_EXPERTS] = QF_NVFP4_W,
                           [QM_SHARED] = QF_NVFP4_W,
                           [QM_DENSE] = QF_NVFP4_W,
                           [QM_HEAD] = QF_NVFP4_W },
    };
    return table[preset][f];
}

/* The head of a uniform W4A4 export is W4A4 itself, whatever the trunk keeps: attention and experts, never fc, norms or
 * router. A weight-only trunk gets a weight-only head. */
static qformat mtp_format(const recipe *r, qfamily f) {
    if (r->mtp != MTP_NVFP4) return QF_KEEP;
    if (f != QM_ATTN && f != QM_EXPERTS && f != QM_SHARED && f != QM_DENSE) return QF_KEEP;
    return r->preset == RECIPE_NVFP4_W4A16 || r->preset == RECIPE_MIXED ? QF_NVFP4_W : QF_NVFP4;
}

qformat recipe_format(const recipe *r, qfamily family, str module, bool is_mtp) {
    if (any_glob(r->exclude, r->n_exclude, module)) return QF_KEEP;
    const qformat f = is_mtp ? mtp_format(r, family) : preset_format(r->preset, family);
    if (r->keep_qkv && family == QM_ATTN && !str_ends(module, STR(".o_proj"))) return QF_KEEP;
    if (f != QF_KEEP || (is_mtp && r->mtp != MTP_NVFP4)) return f;
    if (!any_glob(r->include, r->n_include, module)) return QF_KEEP;
    return r->preset == RECIPE_NVFP4_W4A16 || r->preset == RECIPE_MIXED || family == QM_HEAD ? QF_NVFP4_W : QF_NVFP4;
}
