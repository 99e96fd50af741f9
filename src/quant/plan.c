#include "quant/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/names.h"

const char *qfamily_name(qfamily f) {
    static const char *const names[QM_COUNT] = { "gdn",           "gdn a,b", "attention", "router", "experts",
                                                 "shared expert", "mlp",     "lm_head",   "mtp.fc" };
    return names[f];
}

const char *qformat_name(qformat f) {
    static const char *const names[] = { "BF16", "NVFP4", "NVFP4 W4A16", "FP8" };
    return names[f];
}

/* What the walk carries: growing lists, and the first failure. */
typedef struct walk {
    plan *p;
    err *e;
    int cap_modules, cap_tensors, fusions;
    uint8_t *hit; /* [n_include + n_exclude] globs that matched a Linear */
} walk;

static str name_of(walk *w, const char *fmt, ...) PRINTF_LIKE(2, 3);
static str name_of(walk *w, const char *fmt, ...) {
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    const int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    CHECK(n > 0 && (size_t)n < sizeof text, "name of %d bytes", n);
    const str s = arena_str(&w->p->mem, (str){ text, (size_t)n });
    CHECK(s.p, "out of memory");
    return s;
}

static qtensor *add_tensor(walk *w, str name, qpart part, dtype type, int module) {
    plan *p = w->p;
    if (p->n_tensors == w->cap_tensors) {
        w->cap_tensors = w->cap_tensors ? w->cap_tensors * 2 : 1024;
        p->tensors = xrealloc(p->tensors, (size_t)w->cap_tensors * sizeof *p->tensors);
    }
    qtensor *t = &p->tensors[p->n_tensors++];
    *t = (qtensor){ .name = name, .type = type, .part = part, .module = module };
    return t;
}

static void shape2(qtensor *t, int64_t rows, int64_t cols) {
    t->rank = 2;
    t->shape[0] = rows;
    t->shape[1] = cols;
    t->bytes = (uint64_t)(rows * cols) * (uint64_t)dtype_bytes(t->type);
}

static void copy_tensor(walk *w, const st_tensor *src) {
    qtensor *t = add_tensor(w, src->name, QP_COPY, src->type, -1);
    t->src = src;
    t->rank = src->rank;
    memcpy(t->shape, src->shape, sizeof t->shape);
    t->bytes = src->bytes;
}

static const st_tensor *find(walk *w, const char *name) { return ckpt_find(w->p->src, str_of(name)); }

/* Copy "<prefix><tail>" when it is there. */
static void copy_named(walk *w, str prefix, const char *tail) {
    char name[400];
    snprintf(name, sizeof name, STR_FMT "%s", STR_ARG(prefix), tail);
    const st_tensor *t = find(w, name);
    if (t) copy_tensor(w, t);
}

static void scalar(walk *w, str module, const char *tail, qpart part, int index) {
    qtensor *t = add_tensor(w, name_of(w, STR_FMT ".%s", STR_ARG(module), tail), part, DT_F32, index);
    t->bytes = 4;
}

static void note_globs(walk *w, str module) {
    const recipe *r = &w->p->recipe;
    for (int i = 0; i < r->n_include; i++) w->hit[i] |= recipe_glob(r->include[i], module);
    for (int i = 0; i < r->n_exclude; i++) w->hit[r->n_include + i] |= recipe_glob(r->exclude[i], module);
}

static bool check_source(walk *w, const qmodule *m) {
    if (m->src->type != DT_BF16 && m->src->type != DT_F16 && m->src->type != DT_F32)
        return fail(w->e, ERR_INPUT, "E-QUANT-DTYPE", STR_FMT ": %s cannot be quantized (BF16, F16 or F32 is needed)",
                    STR_ARG(m->src->name), dtype_name(m->src->type));
    if (m->format != QF_FP8 && m->cols % 16 != 0)
        return fail(w->e, ERR_INPUT, "E-QUANT-SHAPE",
                    STR_FMT ": %d input columns are not divisible by the block size 16 (--exclude it)",
                    STR_ARG(m->name), m->cols);
    return true;
}

/* A Linear that becomes codes and scales. */
static void quantized_tensors(walk *w, const qmodule *m, int index) {
    const bool fp8 = m->format == QF_FP8;
    qtensor *t =
        add_tensor(w, name_of(w, STR_FMT ".weight", STR_ARG(m->name)), QP_WEIGHT, fp8 ? DT_F8_E4M3 : DT_U8, index);
    shape2(t, m->rows, fp8 ? m->cols : m->cols / 2);
    if (m->format != QF_NVFP4_W) scalar(w, m->name, "input_scale", QP_INPUT_SCALE, index);
    if (fp8) {
        scalar(w, m->name, "weight_scale", QP_SCALE_2, index);
        return;
    }
    t = add_tensor(w, name_of(w, STR_FMT ".weight_scale", STR_ARG(m->name)), QP_SCALE, DT_F8_E4M3, index);
    shape2(t, m->rows, m->cols / 16);
    scalar(w, m->name, "weight_scale_2", QP_SCALE_2, index);
}

static int add_module(walk *w, const qmodule *m) {
    plan *p = w->p;
    if (p->n_modules == w->cap_modules) {
        w->cap_modules = w->cap_modules ? w->cap_modules * 2 : 512;
        p->modules = xrealloc(p->modules, (size_t)w->cap_modules * sizeof *p->modules);
    }
    p->modules[p->n_modules] = *m;
    return p->n_modules++;
}

static void account(plan *p, const qmodule *m) {
    const uint64_t elems = (uint64_t)m->rows * (uint64_t)m->cols;
    p->family_bytes_before[m->family] += elems * (uint64_t)dtype_bytes(m->src->type);
    if (m->format == QF_KEEP)
        p->family_bytes_after[m->family] += elems * (uint64_t)dtype_bytes(m->src->type);
    else
        p->family_bytes_after[m->family] += m->format == QF_FP8 ? elems + 8 : elems / 2 + elems / 16 + 8;
    p->family_modules[m->family] += m->format != QF_KEEP;
}

/* A Linear that is a tensor of its own: "<prefix><tail>.weight". Missing ones are skipped (weights_bind knows better). */
static bool linear(walk *w, str prefix, const char *tail, qfamily family, int layer, bool is_mtp, int fusion) {
    const str name = name_of(w, STR_FMT "%s", STR_ARG(prefix), tail);
    char full[512];
    snprintf(full, sizeof full, STR_FMT ".weight", STR_ARG(name));
    const st_tensor *src = find(w, full);
    if (!src) return true;
    qmodule m = { .name = name,
                  .family = family,
                  .is_mtp = is_mtp,
                  .src = src,
                  .rows = (int)src->shape[0],
                  .cols = src->rank == 2 ? (int)src->shape[1] : 0,
                  .fusion = fusion,
                  .layer = layer };
    note_globs(w, name);
    m.format = src->rank == 2 ? recipe_format(&w->p->recipe, family, name, is_mtp) : QF_KEEP;
    m.weight_key = name_of(w, STR_FMT ".weight_quantizer", STR_ARG(name));
    m.input_key = name_of(w, STR_FMT ".input_quantizer", STR_ARG(name));
    account(w->p, &m);
    if (m.format == QF_KEEP) {
        copy_tensor(w, src);
        add_module(w, &m);
        return true;
    }
    if (!check_source(w, &m)) return false;
    quantized_tensors(w, &m, add_module(w, &m));
    return true;
}

/* One projection of one routed expert. kept_fused: nothing of this layer's experts changes, the fused tensor is copied. */
static bool expert(walk *w, str base, int e, const char *proj, const st_tensor *src, int64_t row0, int rows, int cols,
                   int layer, bool is_mtp, int fusion) {
    const str name = name_of(w, STR_FMT "%d.%s_proj", STR_ARG(base), e, proj);
    const char *fused = strcmp(proj, "down") == 0 ? "down_proj" : "gate_up_proj";
    const str experts_name = { base.p, base.n - 1 };
    qmodule m = { .name = name,
                  .family = QM_EXPERTS,
                  .is_mtp = is_mtp,
                  .src = src,
                  .row0 = row0,
                  .rows = rows,
                  .cols = cols,
                  .fusion = fusion,
                  .layer = layer };
    note_globs(w, name);
    m.format = recipe_format(&w->p->recipe, QM_EXPERTS, name, is_mtp);
    m.weight_key = name_of(w, STR_FMT ".%s_weight_quantizers.%d", STR_ARG(experts_name), fused, e);
    m.input_key = name_of(w, STR_FMT ".%s_input_quantizer", STR_ARG(experts_name), fused);
    account(w->p, &m);
    if (m.format != QF_KEEP && !check_source(w, &m)) return false;
    const int index = add_module(w, &m);
    if (m.format != QF_KEEP) {
        quantized_tensors(w, &m, index);
    } else {
        qtensor *t = add_tensor(w, name_of(w, STR_FMT ".weight", STR_ARG(name)), QP_SLICE, src->type, index);
        shape2(t, rows, cols);
    }
    return true;
}

static bool all_kept(walk *w, str base, int count, bool is_mtp) {
    static const char *const proj[] = { "gate", "up", "down" };
    for (int e = 0; e < count; e++)
        for (int i = 0; i < 3; i++) {
            char name[400];
            const int n = snprintf(name, sizeof name, STR_FMT "%d.%s_proj", STR_ARG(base), e, proj[i]);
            if (recipe_format(&w->p->recipe, QM_EXPERTS, (str){ name, (size_t)n }, is_mtp) != QF_KEEP) return false;
        }
    return true;
}

static bool split_expert(walk *w, str base, int e, const char *proj, int layer, bool is_mtp, int fusion) {
    char name[400];
    snprintf(name, sizeof name, STR_FMT "%d.%s_proj.weight", STR_ARG(base), e, proj);
    const st_tensor *src = find(w, name);
    CHECK(src, "%s: bound, and now gone", name);
    return expert(w, base, e, proj, src, 0, (int)src->shape[0], (int)src->shape[1], layer, is_mtp, fusion);
}

/* `base` ends in "experts.". */
static bool experts(walk *w, str base, int layer, bool is_mtp) {
    const model_config *c = w->p->config;
    const int inter = c->moe_inter, hidden = c->hidden;
    char name[400];
    snprintf(name, sizeof name, STR_FMT "gate_up_proj", STR_ARG(base));
    const st_tensor *gate_up = find(w, name);
    snprintf(name, sizeof name, STR_FMT "down_proj", STR_ARG(base));
    const st_tensor *down = find(w, name);
    if (gate_up && down && all_kept(w, base, c->experts, is_mtp)) {
        copy_tensor(w, down);
        copy_tensor(w, gate_up);
        return true;
    }
    for (int e = 0; e < c->experts; e++) {
        const int fusion = w->fusions++;
        if (gate_up) {
            const int64_t at = (int64_t)e * 2 * inter;
            if (!expert(w, base, e, "gate", gate_up, at, inter, hidden, layer, is_mtp, fusion) ||
                !expert(w, base, e, "up", gate_up, at + inter, inter, hidden, layer, is_mtp, fusion) ||
                !expert(w, base, e, "down", down, (int64_t)e * hidden, hidden, inter, layer, is_mtp, -1))
                return false;
        } else if (!split_expert(w, base, e, "gate", layer, is_mtp, fusion) ||
                   !split_expert(w, base, e, "up", layer, is_mtp, fusion) ||
                   !split_expert(w, base, e, "down", layer, is_mtp, -1)) {
            return false;
        }
    }
    return true;
}

static bool mlp(walk *w, str base, int layer, bool is_mtp) {
    const model_config *c = w->p->config;
    const int fusion = w->fusions++;
    if (!c->is_moe)
        return linear(w, base, "mlp.gate_proj", QM_DENSE, layer, is_mtp, fusion) &&
               linear(w, base, "mlp.up_proj", QM_DENSE, layer, is_mtp, fusion) &&
               linear(w, base, "mlp.down_proj", QM_DENSE, layer, is_mtp, -1);
    return linear(w, base, "mlp.gate", QM_ROUTER, layer, is_mtp, -1) &&
           experts(w, name_of(w, STR_FMT "mlp.experts.", STR_ARG(base)), layer, is_mtp) &&
           linear(w, base, "mlp.shared_expert.gate_proj", QM_SHARED, layer, is_mtp, fusion) &&
           linear(w, base, "mlp.shared_expert.up_proj", QM_SHARED, layer, is_mtp, fusion) &&
           linear(w, base, "mlp.shared_expert.down_proj", QM_SHARED, layer, is_mtp, -1) &&
           linear(w, base, "mlp.shared_expert_gate", QM_ROUTER, layer, is_mtp, -1);
}

static bool attention(walk *w, str base, int layer, bool is_mtp) {
    const int fusion = w->fusions++;
    const bool kv = w->p->recipe.kv == KV_FP8 && (!is_mtp || w->p->recipe.mtp == MTP_NVFP4);
    if (!linear(w, base, "self_attn.q_proj", QM_ATTN, layer, is_mtp, fusion) ||
        !linear(w, base, "self_attn.k_proj", QM_ATTN, layer, is_mtp, fusion))
        return false;
    if (kv)
        scalar(w, name_of(w, STR_FMT "self_attn.k_proj", STR_ARG(base)), "k_scale", QP_K_SCALE, w->p->n_modules - 1);
    if (!linear(w, base, "self_attn.v_proj", QM_ATTN, layer, is_mtp, fusion)) return false;
    if (kv)
        scalar(w, name_of(w, STR_FMT "self_attn.v_proj", STR_ARG(base)), "v_scale", QP_V_SCALE, w->p->n_modules - 1);
    if (!linear(w, base, "self_attn.o_proj", QM_ATTN, layer, is_mtp, -1)) return false;
    copy_named(w, base, "self_attn.q_norm.weight");
    copy_named(w, base, "self_attn.k_norm.weight");
    return true;
}

static bool delta_net(walk *w, str base, int layer) {
    const int fusion = w->fusions++;
    copy_named(w, base, "linear_attn.dt_bias");
    copy_named(w, base, "linear_attn.A_log");
    copy_named(w, base, "linear_attn.conv1d.weight");
    copy_named(w, base, "linear_attn.norm.weight");
    return linear(w, base, "linear_attn.out_proj", QM_GDN, layer, false, -1) &&
           linear(w, base, "linear_attn.in_proj_qkv", QM_GDN, layer, false, fusion) &&
           linear(w, base, "linear_attn.in_proj_z", QM_GDN, layer, false, fusion) &&
           linear(w, base, "linear_attn.in_proj_b", QM_GDN_SMALL, layer, false, -1) &&
           linear(w, base, "linear_attn.in_proj_a", QM_GDN_SMALL, layer, false, -1);
}

static bool one_layer(walk *w, str base, int layer, bool attn, bool is_mtp) {
    if (!(attn ? attention(w, base, layer, is_mtp) : delta_net(w, base, layer)) || !mlp(w, base, layer, is_mtp))
        return false;
    copy_named(w, base, "input_layernorm.weight");
    copy_named(w, base, "post_attention_layernorm.weight");
    return true;
}

/* ---- vision: verbatim, in the order in which its modules are declared ---- */

static int vision_rank(str name) {
    static const char *const order[] = { "patch_embed.", "pos_embed.", "blocks.", "merger." };
    for (size_t i = 0; i < ARRAY_LEN(order); i++)
        if (str_find(name, str_of(order[i])) >= 0) return (int)i;
    return (int)ARRAY_LEN(order);
}

static int part_rank(str name) {
    static const char *const order[] = { ".norm1.", ".norm2.",      ".attn.qkv.",  ".attn.proj.",
                                         ".norm.",  ".linear_fc1.", ".linear_fc2." };
    for (size_t i = 0; i < ARRAY_LEN(order); i++)
        if (str_find(name, str_of(order[i])) >= 0) return (int)i;
    return -1;
}

static int block_number(str name) {
    const ptrdiff_t at = str_find(name, STR("blocks."));
    return at < 0 ? -1 : atoi(name.p + at + 7);
}

static int by_vision_order(const void *pa, const void *pb) {
    const str a = (*(const st_tensor *const *)pa)->name, b = (*(const st_tensor *const *)pb)->name;
    int d = vision_rank(a) - vision_rank(b);
    if (!d) d = block_number(a) - block_number(b);
    if (!d) d = part_rank(a) - part_rank(b);
    if (!d) d = str_ends(a, STR("bias")) - str_ends(b, STR("bias"));
    return d ? d : str_cmp(a, b);
}

static void vision(walk *w) {
    const ckpt *c = w->p->src;
    const st_tensor **v = xmalloc((size_t)c->tensor_count * sizeof *v);
    int n = 0;
    for (int i = 0; i < c->tensor_count; i++)
        if (name_is_vision(ckpt_at(c, i)->name)) v[n++] = ckpt_at(c, i);
    qsort(v, (size_t)n, sizeof *v, by_vision_order);
    for (int i = 0; i < n; i++) copy_tensor(w, v[i]);
    free(v);
}

/* ---- the draft head ---- */

static int by_name(const void *a, const void *b) {
    return str_cmp(((const qtensor *)a)->name, ((const qtensor *)b)->name);
}

static bool draft_head(walk *w) {
    plan *p = w->p;
    const int first = p->n_tensors;
    if (p->recipe.mtp == MTP_NONE || !p->has_mtp) return true;
    const str mtp = STR("mtp.");
    if (!linear(w, mtp, "fc", QM_MTP_FC, -1, true, -1) || !one_layer(w, STR("mtp.layers.0."), 0, true, true))
        return false;
    copy_named(w, mtp, "norm.weight");
    copy_named(w, mtp, "pre_fc_norm_embedding.weight");
    copy_named(w, mtp, "pre_fc_norm_hidden.weight");
    /* ModelOpt appends the head as a dictionary in name order. */
    qsort(p->tensors + first, (size_t)(p->n_tensors - first), sizeof *p->tensors, by_name);
    return true;
}

/* ---- all of it ---- */

/* Members of a fusion set that are quantized alike share scales; FP8 ones never do. */
static void make_groups(plan *p) {
    for (int i = 0; i < p->n_modules; i++) {
        qmodule *m = &p->modules[i];
        m->group = i;
        if (m->fusion < 0 || (m->format != QF_NVFP4 && m->format != QF_NVFP4_W)) continue;
        for (int j = i - 1; j >= 0 && j >= i - 4; j--)
            if (p->modules[j].fusion == m->fusion && p->modules[j].format == m->format) m->group = p->modules[j].group;
    }
}

static bool check_globs(walk *w) {
    const recipe *r = &w->p->recipe;
    for (int i = 0; i < r->n_include + r->n_exclude; i++)
        if (!w->hit[i])
            return fail(w->e, ERR_USAGE, "E-QUANT-EMPTY",
                        "--%s %s: matches no Linear of this model (patterns match whole name components)",
                        i < r->n_include ? "include" : "exclude",
                        i < r->n_include ? r->include[i] : r->exclude[i - r->n_include]);
    int any = 0;
    for (int f = 0; f < QM_COUNT; f++) any += w->p->family_modules[f];
    if (!any)
        return fail(w->e, ERR_USAGE, "E-QUANT-EMPTY", "recipe %s: quantizes nothing in this model (%s)",
                    recipe_names[r->preset],
                    w->p->config->is_moe ? "everything is excluded" : "a dense model has no experts");
    return true;
}

static bool check_model(plan *p, err *e) {
    if (p->config->is_next)
        return fail(e, ERR_INPUT, "E-QUANT-FAMILY", "%s: qwen3_next runs, but cannot be quantized yet", p->src->dir);
    for (int i = 0; i < p->src->tensor_count; i++)
        if (name_is_scale(ckpt_at(p->src, i)->name))
            return fail(e, ERR_INPUT, "E-QUANT-ALREADY",
                        "%s: " STR_FMT ": the source is quantized already (give the BF16 checkpoint)", p->src->dir,
                        STR_ARG(ckpt_at(p->src, i)->name));
    p->has_mtp = ckpt_find(p->src, STR("mtp.fc.weight")) != NULL;
    return true;
}

static bool walk_model(walk *w) {
    plan *p = w->p;
    const model_config *c = p->config;
    vision(w);
    copy_named(w, p->prefix, "embed_tokens.weight");
    for (int l = 0; l < c->layers; l++) {
        if (c->layer[l] == LAYER_ATTN) p->last_attn = l;
        if (!one_layer(w, name_of(w, STR_FMT "layers.%d.", STR_ARG(p->prefix), l), l, c->layer[l] == LAYER_ATTN, false))
            return false;
    }
    copy_named(w, p->prefix, "norm.weight");
    return linear(w, STR(""), "lm_head", QM_HEAD, -1, false, -1) && draft_head(w);
}

/* Nothing but the draft head; the trunk is only asked where its last attention layer is. */
static bool walk_head(walk *w) {
    const model_config *c = w->p->config;
    for (int l = 0; l < c->layers; l++)
        if (c->layer[l] == LAYER_ATTN) w->p->last_attn = l;
    return draft_head(w);
}

/* Every source tensor must come out somewhere: nothing is lost by a name the walk does not know. */
static bool check_total(plan *p, err *e) {
    uint64_t elems = 0, want = 0;
    for (int i = 0; i < p->n_modules; i++)
        if (p->modules[i].format != QF_KEEP || p->modules[i].family == QM_EXPERTS)
            elems += (uint64_t)p->modules[i].rows * (uint64_t)p->modules[i].cols;
    for (int i = 0; i < p->n_tensors; i++)
        if (p->tensors[i].part == QP_COPY) elems += p->tensors[i].src->elems;
    for (int i = 0; i < p->src->tensor_count; i++) {
        const st_tensor *t = ckpt_at(p->src, i);
        const bool mtp = name_is_mtp(t->name);
        if (mtp ? p->recipe.mtp != MTP_NONE : !p->head_file) want += t->elems;
    }
    if (elems == want) return true;
    return fail(e, ERR_INPUT, "E-QUANT-LOST",
                "%s: %lld elements of the source have no place in the export (a tensor name this version "
                "does not know)",
                p->src->dir, (long long)(want - elems));
}

static bool make(plan *out, const ckpt *src, const model_config *config, const recipe *r, uint64_t shard_bytes,
                 const char *head_file, err *e) {
    *out = (plan){ .src = src, .config = config, .recipe = *r, .last_attn = -1, .head_file = head_file };
    walk w = { .p = out, .e = e, .hit = xcalloc((size_t)r->n_include + (size_t)r->n_exclude, 1) };
    for (int i = 0; i < NAME_PREFIXES && !out->prefix.p; i++) {
        char name[200];
        snprintf(name, sizeof name, "%sembed_tokens.weight", name_prefixes[i]);
        if (find(&w, name)) out->prefix = str_of(name_prefixes[i]);
    }
    bool ok = out->prefix.p ? check_model(out, e)
                            : fail(e, ERR_INPUT, "E-QUANT-FAMILY", "%s: no embed_tokens.weight", src->dir);
    if (ok && !out->has_mtp && (r->mtp == MTP_NVFP4 || head_file))
        ok =
            fail(e, ERR_INPUT, "E-QUANT-MTP", "%s: --mtp %s, but the checkpoint has no draft head (%s)", src->dir,
                 r->mtp == MTP_NVFP4 ? "nvfp4" : "bf16", head_file ? "give the original BF16 model" : "use --mtp none");
    ok = ok && (head_file ? walk_head(&w) : walk_model(&w) && check_globs(&w)) && check_total(out, e);
    free(w.hit);
    if (ok) make_groups(out);
    ok = ok && plan_layout(out, shard_bytes, e);
    if (!ok) plan_free(out);
    return ok;
}

bool plan_make(plan *out, const ckpt *src, const model_config *config, const recipe *r, uint64_t shard_bytes, err *e) {
    return make(out, src, config, r, shard_bytes, NULL, e);
}

bool plan_make_head(plan *out, const ckpt *src, const model_config *config, const recipe *r, const char *file, err *e) {
    return make(out, src, config, r, UINT64_MAX, file, e);
}

void plan_free(plan *p) {
    free(p->modules);
    free(p->tensors);
    free(p->shards);
    arena_free(&p->mem);
    *p = (plan){ 0 };
}

const qmodule *plan_find(const plan *p, str name) {
    for (int i = 0; i < p->n_modules; i++)
        if (str_eq(p->modules[i].name, name)) return &p->modules[i];
    return NULL;
}
