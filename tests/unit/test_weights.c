#include "model/weights.h" /* before cmocka.h, which defines a macro `fail` */

#include "base/clock.h"
#include "base/log.h"
#include "lib/synth.h"
#include "model/census.h"
#include "model/names.h"
#include "model/scan.h"
#include "num/bf16.h"
#include "num/mathf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- helpers ---- */

static buf notices;

static void sink(void *ctx, const char *id, const char *line) {
    (void)ctx;
    buf_printf(&notices, "%s %s\n", id, line);
}

static bool said(const char *part) { return strstr(notices.p ? notices.p : "", part) != NULL; }

typedef struct model {
    char *dir;
    ckpt c;
    model_config cfg;
    weights w;
} model;

static bool model_load(model *m, err *e) {
    *e = (err){ 0 };
    buf_clear(&notices);
    log_set_sink(sink, NULL);
    const bool ok = ckpt_open(&m->c, m->dir, e) && config_read(&m->cfg, m->c.config, m->c.generation, m->dir, e) &&
                    weights_bind(&m->w, &m->c, &m->cfg, e);
    log_set_sink(NULL, NULL);
    return ok;
}

static bool model_open(model *m, synth *s, int shards, int pad, err *e) {
    *m = (model){ .dir = synth_temp_dir() };
    synth_write(s, m->dir, shards, pad);
    return model_load(m, e);
}

static void model_close(model *m) {
    weights_free(&m->w);
    ckpt_close(&m->c);
    synth_remove_dir(m->dir);
}

static void open_spec(model *m, const synth_spec *spec, int shards) {
    synth s;
    err e;
    synth_make(&s, spec);
    if (!model_open(m, &s, shards, 0, &e)) fail_msg("%s: %s", e.id, e.msg);
    synth_free(&s);
}

/* ---- equality of two models as the rest of the program sees them ---- */

static void same_matrix(const wmat *a, const wmat *b, const char *what) {
    if (!a->data && !b->data) return;
    if (!a->data || !b->data || a->rows != b->rows || a->cols != b->cols || a->type != b->type ||
        memcmp(a->data, b->data, (size_t)a->rows * (size_t)a->cols * (size_t)dtype_bytes(a->type)))
        fail_msg("%s differs (%s, %s)", what, a->name ? a->name : "-", b->name ? b->name : "-");
}

static void same_vector(const float *a, const float *b, int n, const char *what) {
    if (!a && !b) return;
    if (!a || !b || memcmp(a, b, (size_t)n * sizeof *a)) fail_msg("%s differs", what);
}

static void same_ffn(const model_config *c, const wffn *a, const wffn *b) {
    same_matrix(&a->router, &b->router, "router");
    same_matrix(&a->shared_gate_in, &b->shared_gate_in, "shared_expert_gate");
    same_matrix(&a->gate, &b->gate, "gate");
    same_matrix(&a->up, &b->up, "up");
    same_matrix(&a->down, &b->down, "down");
    assert_int_equal(a->experts.count, b->experts.count);
    if (!a->experts.count) return;
    assert_int_equal(a->experts.type, b->experts.type);
    const size_t bytes = (size_t)c->moe_inter * (size_t)c->hidden * (size_t)dtype_bytes(a->experts.type);
    for (int i = 0; i < a->experts.count; i++) {
        assert_memory_equal(a->experts.gate[i], b->experts.gate[i], bytes);
        assert_memory_equal(a->experts.up[i], b->experts.up[i], bytes);
        assert_memory_equal(a->experts.down[i], b->experts.down[i], bytes);
    }
}

static void same_layer(const model_config *c, const wlayer *a, const wlayer *b) {
    assert_int_equal(a->kind, b->kind);
    same_vector(a->norm1, b->norm1, c->hidden, "norm1");
    same_vector(a->norm2, b->norm2, c->hidden, "norm2");
    same_matrix(&a->in_qkv, &b->in_qkv, "in_qkv");
    same_matrix(&a->in_z, &b->in_z, "in_z");
    same_matrix(&a->in_b, &b->in_b, "in_b");
    same_matrix(&a->in_a, &b->in_a, "in_a");
    same_vector(a->conv, b->conv, config_conv_dim(c) * c->conv_kernel, "conv");
    same_vector(a->neg_a, b->neg_a, c->lin_v_heads, "neg_a");
    same_vector(a->dt_bias, b->dt_bias, c->lin_v_heads, "dt_bias");
    same_vector(a->gdn_norm, b->gdn_norm, c->lin_v_dim, "gdn_norm");
    same_matrix(&a->gdn_out, &b->gdn_out, "gdn_out");
    same_matrix(&a->q, &b->q, "q");
    same_matrix(&a->k, &b->k, "k");
    same_matrix(&a->v, &b->v, "v");
    same_matrix(&a->o, &b->o, "o");
    same_vector(a->q_norm, b->q_norm, c->head_dim, "q_norm");
    same_vector(a->k_norm, b->k_norm, c->head_dim, "k_norm");
    same_ffn(c, &a->ffn, &b->ffn);
}

static void same_model(const model *a, const model *b) {
    const model_config *c = &a->cfg;
    same_matrix(&a->w.embed, &b->w.embed, "embed");
    same_matrix(&a->w.head, &b->w.head, "head");
    same_vector(a->w.norm, b->w.norm, c->hidden, "norm");
    for (int i = 0; i < c->layers; i++) same_layer(c, &a->w.layers[i], &b->w.layers[i]);
    assert_int_equal(a->w.mtp.present, b->w.mtp.present);
    if (!a->w.mtp.present) return;
    same_matrix(&a->w.mtp.fc, &b->w.mtp.fc, "fc");
    same_vector(a->w.mtp.norm, b->w.mtp.norm, c->hidden, "mtp norm");
    same_vector(a->w.mtp.norm_embed, b->w.mtp.norm_embed, c->hidden, "norm_embed");
    same_vector(a->w.mtp.norm_hidden, b->w.mtp.norm_hidden, c->hidden, "norm_hidden");
    same_layer(c, &a->w.mtp.layer, &b->w.mtp.layer);
}

/* ---- good checkpoints ---- */

static float stored(const synth_tensor *t, size_t i) {
    uint16_t h;
    memcpy(&h, t->data + 2 * i, 2);
    return bf16_to_f32(h);
}

static void plain(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    synth s;
    model m;
    err e;
    synth_make(&s, &spec);
    if (!model_open(&m, &s, 3, 0, &e)) fail_msg("%s: %s", e.id, e.msg);
    assert_int_equal(notices.n, 0);
    assert_int_equal(m.w.vision_tensors, 2);
    assert_int_equal(m.w.vision_bytes, (24 * 8 + 24) * 2);
    assert_int_equal(m.w.fused_experts, 6); /* five layers and the draft head */
    assert_true(m.w.mtp.present);

    const wlayer *g = &m.w.layers[0], *a = &m.w.layers[1];
    assert_int_equal(g->kind, LAYER_GDN);
    assert_int_equal(a->kind, LAYER_ATTN);
    assert_null(g->q.data);
    assert_null(a->in_qkv.data);
    assert_int_equal(a->q.rows, 2 * 4 * 16);
    assert_string_equal(a->q.name, "model.language_model.layers.1.self_attn.q_proj.weight");
    assert_string_equal(g->ffn.experts.name, "model.language_model.layers.0.mlp.experts");
    /* views: inside the mapping */
    const st_file *f = &m.c.shards[0];
    assert_true((const uint8_t *)m.w.embed.data >= f->map.data &&
                (const uint8_t *)m.w.embed.data < f->map.data + f->map.size);
    /* vectors: 1 + w, plain, -exp */
    const synth_tensor *norm = synth_find(&s, "model.language_model.layers.0.input_layernorm.weight");
    const synth_tensor *gdn = synth_find(&s, "model.language_model.layers.0.linear_attn.norm.weight");
    const synth_tensor *a_log = synth_find(&s, "model.language_model.layers.0.linear_attn.A_log");
    const synth_tensor *fused = synth_find(&s, "model.language_model.layers.0.mlp.experts.gate_up_proj");
    for (size_t i = 0; i < 8; i++) {
        assert_true(g->norm1[i] == 1.0f + stored(norm, i));
        assert_true(g->gdn_norm[i] == stored(gdn, i));
        if (i < 4) assert_true(g->neg_a[i] == -num_exp(stored(a_log, i)) && g->neg_a[i] < 0);
    }
    assert_memory_equal(g->ffn.experts.up[2], fused->data + 5 * 16 * 32 * 2, 16 * 32 * 2);
    synth_free(&s);
    model_close(&m);
}

static void tiny_model(void **state) {
    (void)state;
    model m = { .dir = xstrdup("assets/qwen36-tiny") };
    err e;
    if (!model_load(&m, &e)) fail_msg("%s: %s", e.id, e.msg);
    assert_true(m.w.mtp.present);
    assert_int_equal(m.w.fused_experts, 9);
    assert_int_equal(m.w.head.rows, 1664);
    assert_ptr_not_equal(m.w.head.data, m.w.embed.data);
    assert_true(m.w.vision_tensors > 0);
    weights_free(&m.w);
    ckpt_close(&m.c);
    free(m.dir);
}

static void layouts(void **state) {
    (void)state;
    const synth_spec base = synth_default();
    model plain_model;
    open_spec(&plain_model, &base, 1);
    for (int v = 0; v < 6; v++) {
        synth_spec spec = base;
        if (v == 0) spec.split_experts = true;
        if (v == 1) spec.split_mtp_experts = true;
        if (v == 2) spec.prefix = "model.", spec.text_only = true, spec.vision = false;
        if (v == 3) spec.prefix = "language_model.model.";
        if (v == 4) spec.f32_vectors = true;
        if (v == 5) spec.next = true, spec.prefix = "model.", spec.vision = false, spec.split_experts = true;
        model m;
        open_spec(&m, &spec, v % 2 ? 1 : 4);
        same_model(&plain_model, &m);
        assert_int_equal(m.w.fused_experts, v == 0 || v == 5 ? 1 : v == 1 ? 5 : 6);
        model_close(&m);
    }
    model_close(&plain_model);
}

/* qwen3_next stores the GDN projections interleaved per key head: the views equal the plain model's. */
static void interleaved(void **state) {
    (void)state;
    for (int ratio = 1; ratio <= 4; ratio++) {
        synth_spec spec = synth_default();
        spec.lin_k_heads = 3;
        spec.lin_v_heads = 3 * ratio;
        spec.lin_k_dim = 8;
        spec.lin_v_dim = 5;
        spec.hidden = 24;
        spec.type = ratio == 2 ? DT_F32 : DT_BF16;
        model a, b;
        open_spec(&a, &spec, 1);
        spec.next = true;
        open_spec(&b, &spec, 1);
        assert_true(b.cfg.is_next && !a.cfg.is_next);
        same_model(&a, &b);
        assert_int_equal(b.w.layers[0].in_qkv.rows, 2 * 24 + 15 * ratio);
        model_close(&a);
        model_close(&b);
    }
}

static void float_types(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    model a, b;
    open_spec(&a, &spec, 1);
    for (int k = 0; k < 2; k++) {
        spec.type = k ? DT_F16 : DT_F32;
        open_spec(&b, &spec, 1);
        assert_int_equal(b.w.layers[1].q.type, spec.type);
        if (!k) same_vector(a.w.layers[0].neg_a, b.w.layers[0].neg_a, 4, "neg_a");
        if (!k) same_vector(a.w.layers[0].conv, b.w.layers[0].conv, config_conv_dim(&a.cfg) * 4, "conv");
        model_close(&b);
    }
    model_close(&a);
}

static void dense_and_tied(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    spec.dense = spec.tied = true;
    spec.no_gate = true;
    model m;
    open_spec(&m, &spec, 1);
    assert_int_equal(m.w.layers[0].ffn.experts.count, 0);
    assert_null(m.w.layers[0].ffn.router.data);
    assert_int_equal(m.w.layers[0].ffn.down.cols, 40);
    assert_int_equal(m.w.mtp.layer.ffn.gate.rows, 40);
    assert_ptr_equal(m.w.head.data, m.w.embed.data);
    assert_int_equal(m.w.layers[1].q.rows, 64);
    model_close(&m);

    spec = synth_default(); /* no shared expert */
    spec.shared_inter = 0;
    open_spec(&m, &spec, 1);
    assert_null(m.w.layers[0].ffn.gate.data);
    assert_null(m.w.layers[0].ffn.shared_gate_in.data);
    model_close(&m);
}

/* A tied checkpoint may hold the head once more, if it is the same. */
static void tied_with_head(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    spec.tied = true;
    synth s;
    synth_make(&s, &spec);
    const synth_tensor embed = *synth_find(&s, "model.language_model.embed_tokens.weight");
    synth_tensor *head = synth_add(&s, "lm_head.weight", DT_BF16, 2, embed.shape);
    memcpy(head->data, embed.data, embed.bytes);
    model m;
    err e;
    assert_true(model_open(&m, &s, 1, 0, &e));
    assert_ptr_equal(m.w.head.data, m.w.embed.data);
    model_close(&m);
    synth_find(&s, "lm_head.weight")->data[100] ^= 1;
    assert_false(model_open(&m, &s, 1, 0, &e));
    assert_string_equal(e.id, "E-LOAD-UNUSED");
    assert_non_null(strstr(
        e.msg, "lm_head.weight (config.json says tie_word_embeddings = true, but its bytes are not the embedding's)"));
    model_close(&m);
    synth_free(&s);
}

static void draft_head(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    spec.no_mtp = true;
    synth s;
    model m;
    err e;
    synth_make(&s, &spec);
    assert_true(model_open(&m, &s, 1, 0, &e)); /* absent and undeclared: fine, said */
    assert_false(m.w.mtp.present);
    assert_true(said("N-LOAD-NO-MTP") && !said("declares"));
    model_close(&m);
    synth_config_set(&s, "mtp_num_hidden_layers", "1"); /* declared and absent */
    assert_true(model_open(&m, &s, 1, 0, &e));
    assert_false(m.w.mtp.present);
    assert_true(said("N-LOAD-NO-MTP") && said("though config.json declares one"));
    model_close(&m);
    synth_free(&s);
    spec.no_mtp = false;
    synth_make(&s, &spec);
    synth_config_set(&s, "mtp_num_hidden_layers", "0"); /* there, not declared */
    assert_true(model_open(&m, &s, 1, 0, &e));
    assert_true(m.w.mtp.present);
    assert_true(said("N-LOAD-MTP"));
    model_close(&m);
    synth_free(&s);
}

static void unaligned(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    synth s;
    model a, b;
    err e;
    synth_make(&s, &spec);
    assert_true(model_open(&a, &s, 2, 0, &e));
    assert_false(said("W-LOAD-UNALIGNED"));
    assert_true(model_open(&b, &s, 2, 3, &e));
    assert_true(said("W-LOAD-UNALIGNED"));
    same_model(&a, &b);
    assert_int_equal((uintptr_t)b.w.embed.data % 2, 0);
    model_close(&a);
    model_close(&b);
    synth_free(&s);
}

static void declared_type(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    synth s;
    model m;
    err e;
    synth_make(&s, &spec);
    synth_config_set(&s, "dtype", "\"float16\"");
    assert_true(model_open(&m, &s, 1, 0, &e));
    assert_int_equal(m.w.embed.type, DT_BF16); /* the tensors count */
    assert_true(said("W-LOAD-DTYPE"));
    model_close(&m);
    synth_free(&s);
}

/* ---- bad checkpoints ---- */

static void refuse(synth *s, const char *id, const char *part) {
    model m;
    err e;
    if (model_open(&m, s, 1, 0, &e)) fail_msg("accepted, expected %s: %s", id, part);
    if (strcmp(e.id, id) || !strstr(e.msg, part)) fail_msg("expected %s: %s\n     got %s: %s", id, part, e.id, e.msg);
    assert_int_equal(e.kind, ERR_INPUT);
    model_close(&m);
    synth_free(s);
}

#define L "model.language_model.layers."

static void each_tensor(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    synth all;
    synth_make(&all, &spec);
    for (int i = 0; i < all.n; i++) {
        const char *name = all.t[i].name;
        if (name_is_vision(str_of(name))) continue;
        synth s;
        model m;
        err e;
        /* missing */
        synth_make(&s, &spec);
        synth_drop(&s, name);
        assert_false(model_open(&m, &s, 1, 0, &e));
        if (strcmp(e.id, "E-LOAD-UNFILLED") || !strstr(e.msg, name)) fail_msg("%s missing: %s: %s", name, e.id, e.msg);
        model_close(&m);
        synth_free(&s);
        /* a row more, another rank */
        for (int k = 0; k < 2; k++) {
            synth_make(&s, &spec);
            const synth_tensor t = *synth_find(&s, name);
            synth_drop(&s, name);
            int64_t shape[4] = { t.shape[0] + !k, t.shape[1], t.shape[2], 1 };
            synth_add(&s, name, t.type, t.rank + k, k && t.rank < 3 ? (int64_t[]){ 1, t.shape[0], t.shape[1] } : shape);
            assert_false(model_open(&m, &s, 1, 0, &e));
            if (strcmp(e.id, "E-LOAD-SHAPE") || !strstr(e.msg, name) || !strstr(e.msg, "config.json makes it"))
                fail_msg("%s shape %d: %s: %s", name, k, e.id, e.msg);
            model_close(&m);
            synth_free(&s);
        }
        /* a type that is no weight */
        synth_make(&s, &spec);
        const synth_tensor t = *synth_find(&s, name);
        synth_drop(&s, name);
        synth_add(&s, name, i % 2 ? DT_I16 : DT_U8, t.rank, t.shape);
        assert_false(model_open(&m, &s, 1, 0, &e));
        if (strcmp(e.id, "E-LOAD-DTYPE") || !strstr(e.msg, name)) fail_msg("%s dtype: %s: %s", name, e.id, e.msg);
        model_close(&m);
        synth_free(&s);
    }
    synth_free(&all);
}

static void guesses(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    synth s;
    synth_make(&s, &spec);
    synth_rename(&s, "model.language_model.", "transformer.");
    refuse(&s, "E-LOAD-UNFILLED", "found transformer.embed_tokens.weight: a prefix nibble does not know");
    synth_make(&s, &spec);
    synth_rename(&s, L "3.", "model.layers.3.");
    refuse(&s, "E-LOAD-UNFILLED", "no tensor " L "3.input_layernorm.weight");
    synth_make(&s, &spec);
    synth_add(&s, "model.layers.3.mlp.gate.weight", DT_BF16, 2, (int64_t[]){ 4, 32 });
    refuse(&s, "E-LOAD-UNUSED", "two prefixes are mixed");
    synth_make(&s, &spec);
    synth_drop(&s, "lm_head.weight");
    refuse(&s, "E-LOAD-UNFILLED", "tie_word_embeddings = false, so a head must be there");
    synth_make(&s, &spec);
    synth_config_set(&s, "num_hidden_layers", "7");
    refuse(&s, "E-LOAD-UNFILLED", "the file ends with layer 4, config.json says num_hidden_layers = 7");
    synth_make(&s, &spec);
    synth_config_set(&s, "num_hidden_layers", "4");
    refuse(&s, "E-LOAD-UNUSED", "config.json says num_hidden_layers = 4");
    synth_make(&s, &spec);
    synth_config_set(&s, "full_attention_interval", "3");
    refuse(&s, "E-LOAD-UNFILLED", "this layer holds full attention");
    synth_make(&s, &spec);
    synth_config_set(&s, "full_attention_interval", "1");
    refuse(&s, "E-LOAD-UNFILLED", "this layer holds linear attention");
    synth_make(&s, &spec);
    synth_config_set(&s, "shared_expert_intermediate_size", "0");
    refuse(&s, "E-LOAD-UNUSED", "shared_expert_intermediate_size = 0");
    synth_make(&s, &spec);
    synth_rename(&s, "mtp.", "model.mtp.");
    refuse(&s, "E-LOAD-UNUSED", "19 tensors that nothing uses: model.mtp.fc.weight, model.mtp.");
    synth_make(&s, &spec);
    synth_add(&s, "mtp.layers.1.input_layernorm.weight", DT_BF16, 1, (int64_t[]){ 32 });
    refuse(&s, "E-LOAD-UNUSED", "a draft head of one layer is supported");
    synth_make(&s, &spec);
    synth_add(&s, L "1.self_attn.q_proj.bias", DT_BF16, 1, (int64_t[]){ 128 });
    refuse(&s, "E-LOAD-UNUSED",
           "1 tensor that nothing uses: " L "1.self_attn.q_proj.bias (a bias: this family has none)");
    synth_make(&s, &spec);
    synth_add(&s, "something.else", DT_BF16, 1, (int64_t[]){ 2 });
    refuse(&s, "E-LOAD-UNUSED", "no part of this family has such a name");
}

static void expert_layouts(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    synth s;
    synth_make(&s, &spec); /* neither */
    synth_drop(&s, L "2.mlp.experts.gate_up_proj");
    synth_drop(&s, L "2.mlp.experts.down_proj");
    refuse(&s, "E-LOAD-UNFILLED", "neither fused experts nor experts.0.gate_proj.weight are there");
    synth_make(&s, &spec); /* both */
    synth_add(&s, L "2.mlp.experts.0.gate_proj.weight", DT_BF16, 2, (int64_t[]){ 16, 32 });
    refuse(&s, "E-LOAD-UNUSED", "fused and split experts at once");
    spec.split_experts = true;
    synth_make(&s, &spec); /* one expert lacks a part; one too few; one too many */
    synth_drop(&s, L "2.mlp.experts.3.up_proj.weight");
    refuse(&s, "E-LOAD-UNFILLED", "no tensor " L "2.mlp.experts.3.up_proj.weight");
    synth_make(&s, &spec);
    synth_config_set(&s, "num_experts", "3");
    for (int i = 0; i < 5; i++) {
        char name[80];
        snprintf(name, sizeof name, L "%d.mlp.gate.weight", i);
        synth_drop(&s, name);
        synth_add(&s, name, DT_BF16, 2, (int64_t[]){ 3, 32 });
    }
    synth_drop(&s, "mtp.layers.0.mlp.gate.weight");
    synth_add(&s, "mtp.layers.0.mlp.gate.weight", DT_BF16, 2, (int64_t[]){ 3, 32 });
    synth_drop(&s, "mtp.layers.0.mlp.experts.gate_up_proj");
    synth_add(&s, "mtp.layers.0.mlp.experts.gate_up_proj", DT_BF16, 3, (int64_t[]){ 3, 32, 32 });
    synth_drop(&s, "mtp.layers.0.mlp.experts.down_proj");
    synth_add(&s, "mtp.layers.0.mlp.experts.down_proj", DT_BF16, 3, (int64_t[]){ 3, 32, 16 });
    refuse(&s, "E-LOAD-UNUSED", "15 tensors that nothing uses");
    synth_make(&s, &spec); /* types within a layer */
    synth_drop(&s, L "2.mlp.experts.3.up_proj.weight");
    synth_add(&s, L "2.mlp.experts.3.up_proj.weight", DT_F32, 2, (int64_t[]){ 16, 32 });
    refuse(&s, "E-LOAD-DTYPE", "dtype F32, but the layer's first expert is BF16");
    /* a dense file under an MoE config, and the reverse */
    spec = synth_default();
    spec.dense = true;
    synth_make(&s, &spec);
    synth t;
    const synth_spec moe = synth_default();
    synth_make(&t, &moe);
    const buf dense_config = s.config;
    s.config = t.config;
    t.config = dense_config;
    refuse(&s, "E-LOAD-UNFILLED", "this layer holds a dense MLP, config.json describes experts");
    refuse(&t, "E-LOAD-UNFILLED", "this layer holds experts, config.json describes a dense model");
}

static void quantized(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    synth s;
    synth_make(&s, &spec);
    synth_add(&s, L "0.linear_attn.out_proj.weight_scale", DT_F8_E4M3, 2, (int64_t[]){ 32, 2 });
    refuse(&s, "E-LOAD-UNUSED", "0.linear_attn.out_proj.weight_scale"); /* a scale without its codes */
    synth_make(&s, &spec);
    synth_drop(&s, L "0.linear_attn.out_proj.weight");
    synth_add(&s, L "0.linear_attn.out_proj.weight", DT_U8, 2, (int64_t[]){ 32, 16 });
    refuse(&s, "E-LOAD-SCALE", "weight_scale is missing");
    synth_make(&s, &spec); /* vision has no say in it */
    synth_add(&s, "model.visual.blocks.0.attn.qkv.weight_scale", DT_F8_E4M3, 2, (int64_t[]){ 32, 2 });
    model m;
    err e;
    assert_true(model_open(&m, &s, 1, 0, &e));
    assert_int_equal(m.w.vision_tensors, 3);
    model_close(&m);
    synth_free(&s);
}

/* ---- names, census, scan ---- */

static void names(void **state) {
    (void)state;
    static const struct {
        const char *name;
        weight_class c;
        int layer;
        bool scale;
    } cases[] = { { "model.language_model.embed_tokens.weight", WC_EMBED, -1, false },
                  { "model.embed_tokens.weight", WC_EMBED, -1, false },
                  { "language_model.model.embed_tokens.weight", WC_EMBED, -1, false },
                  { "lm_head.weight", WC_HEAD, -1, false },
                  { "language_model.lm_head.weight", WC_HEAD, -1, false },
                  { "model.norm.weight", WC_NORM, -1, false },
                  { "model.layers.7.input_layernorm.weight", WC_NORM, 7, false },
                  { "model.layers.12.post_attention_layernorm.weight", WC_NORM, 12, false },
                  { "model.layers.0.linear_attn.norm.weight", WC_GDN, 0, false },
                  { "model.layers.0.linear_attn.A_log", WC_GDN, 0, false },
                  { "model.layers.3.self_attn.k_proj.k_scale", WC_ATTN, 3, true },
                  { "model.layers.3.self_attn.q_norm.weight", WC_ATTN, 3, false },
                  { "model.layers.3.mlp.gate.weight", WC_ROUTER, 3, false },
                  { "model.layers.3.mlp.gate_proj.weight", WC_DENSE, 3, false },
                  { "model.layers.3.mlp.shared_expert_gate.weight", WC_ROUTER, 3, false },
                  { "model.layers.3.mlp.shared_expert.gate_proj.weight", WC_SHARED, 3, false },
                  { "model.layers.3.mlp.experts.gate_up_proj", WC_EXPERTS, 3, false },
                  { "model.layers.3.mlp.experts.9.down_proj.weight_scale_2", WC_EXPERTS, 3, true },
                  { "model.layers.3.mlp.experts.gate_up_proj_weight_scale", WC_EXPERTS, 3, true },
                  { "mtp.layers.0.mlp.experts.9.down_proj.input_scale", WC_MTP, 0, true },
                  { "mtp.fc.weight", WC_MTP, -1, false },
                  { "model.visual.blocks.3.attn.qkv.weight", WC_VISION, -1, false },
                  { "visual.pos_embed.weight", WC_VISION, -1, false },
                  { "model.mtp.fc.weight", WC_COUNT, -1, false },
                  { "other", WC_COUNT, -1, false },
                  { "", WC_COUNT, -1, false },
                  { "model.layers.99999999.mlp.gate.weight", WC_ROUTER, -1, false },
                  { "model.layers.x.mlp.gate.weight", WC_ROUTER, -1, false } };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const str n = str_of(cases[i].name);
        if (weight_class_of(n) != cases[i].c)
            fail_msg("%s is %s", cases[i].name, weight_class_name(weight_class_of(n)));
        assert_int_equal(name_layer(n), cases[i].layer);
        assert_int_equal(name_is_scale(n), cases[i].scale);
    }
    assert_int_equal(name_expert(STR("model.layers.3.mlp.experts.255.down_proj.weight")), 255);
    assert_int_equal(name_expert(STR("model.layers.3.mlp.experts.down_proj")), -1);
    assert_string_equal(weight_class_name(WC_COUNT), "other");
}

static void census_of_plain(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    model m;
    census a;
    open_spec(&m, &spec, 2);
    census_take(&a, &m.c, &m.cfg);
    assert_int_equal(a.total.tensors, m.c.tensor_count);
    assert_int_equal(a.total.bytes, m.c.tensor_bytes);
    assert_int_equal(a.total.params * 2, (int64_t)a.total.bytes);
    assert_int_equal(a.of[WC_EXPERTS].params, 5 * 4 * 3 * 16 * 32);
    assert_int_equal(a.of[WC_EMBED].params, 48 * 32);
    assert_int_equal(a.of[WC_NORM].params, 11 * 32);
    assert_int_equal(a.of[WC_COUNT].tensors, 0);
    assert_int_equal(a.kv_scales, 0);
    uint64_t expect = 2 * (48 * 32 /* head */ + 32 /* embedding row */ + 11 * 32) + a.of[WC_GDN].bytes +
                      a.of[WC_ATTN].bytes + a.of[WC_ROUTER].bytes + a.of[WC_SHARED].bytes + a.of[WC_EXPERTS].bytes / 2;
    assert_int_equal(a.bytes_per_token, expect);
    buf b = { 0 };
    census_format_text(&b, &a.of[WC_GDN]);
    assert_string_equal(b.p, "BF16");
    buf_clear(&b);
    census_format_text(&b, &a.of[WC_DENSE]);
    assert_string_equal(b.p, "-");
    buf_free(&b);
    model_close(&m);
}

/* Names and types of a quantized export: described though it does not bind. */
static void census_of_export(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    spec.split_experts = true;
    synth s;
    synth_make(&s, &spec);
    for (int i = 0; i < 5; i++)
        for (int x = 0; x < 4; x++) {
            char name[120];
            snprintf(name, sizeof name, L "%d.mlp.experts.%d.down_proj.weight", i, x);
            synth_drop(&s, name);
            synth_add(&s, name, DT_U8, 2, (int64_t[]){ 32, 8 });
            snprintf(name, sizeof name, L "%d.mlp.experts.%d.down_proj.weight_scale", i, x);
            synth_add(&s, name, DT_F8_E4M3, 2, (int64_t[]){ 32, 1 });
            snprintf(name, sizeof name, L "%d.mlp.experts.%d.down_proj.weight_scale_2", i, x);
            synth_add(&s, name, DT_F32, 0, NULL);
        }
    const float k = 0.0398f, v = 0.02f;
    memcpy(synth_add(&s, L "1.self_attn.k_proj.k_scale", DT_F32, 0, NULL)->data, &k, 4);
    memcpy(synth_add(&s, L "1.self_attn.v_proj.v_scale", DT_F32, 1, (int64_t[]){ 1 })->data, &v, 4);
    memcpy(synth_add(&s, "mtp.layers.0.self_attn.k_proj.k_scale", DT_F32, 0, NULL)->data, &k, 4);
    synth_add(&s, "mtp.layers.0.mlp.shared_expert.up_proj.input_scale", DT_F32, 0, NULL);
    synth_drop(&s, L "1.self_attn.o_proj.weight");
    synth_add(&s, L "1.self_attn.o_proj.weight", DT_F8_E4M3, 2, (int64_t[]){ 32, 64 });
    synth_config_set(&s, "vocab_size",
                     "48, \"quantization_config\": {\"quant_algo\": \"NVFP4\", \"kv_cache_scheme\": {\"num_bits\": 8, "
                     "\"type\": \"float\"}}");
    model m;
    err e;
    assert_false(model_open(&m, &s, 1, 0, &e));
    assert_string_equal(e.id, "E-LOAD-SCALE"); /* scales are left out here on purpose */
    census a;
    census_take(&a, &m.c, &m.cfg);
    buf b = { 0 };
    census_format_text(&b, &a.of[WC_EXPERTS]);
    assert_string_equal(b.p, "BF16+NVFP4");
    buf_clear(&b);
    census_format_text(&b, &a.of[WC_ATTN]);
    assert_string_equal(b.p, "BF16+FP8");
    buf_free(&b);
    assert_int_equal(a.of[WC_EXPERTS].params, 5 * 4 * 3 * 16 * 32);
    assert_true(a.kv[1].has_k && a.kv[1].has_v && !a.kv[0].has_k && a.kv_mtp.has_k && !a.kv_mtp.has_v);
    assert_true(a.kv[1].k == k && a.kv[1].v == v);
    assert_int_equal(a.kv_scales, 3);
    assert_int_equal(a.mtp_input_scales, 1);
    model_close(&m);
    synth_free(&s);
}

static void scan_types(void **state) {
    (void)state;
    static const struct {
        dtype t;
        uint64_t bad[3], good[3];
    } cases[] = { { DT_BF16, { 0x7f80, 0xff80, 0x7fc1 }, { 0x7f7f, 0xff7f, 0x0001 } },
                  { DT_F16, { 0x7c00, 0xfc00, 0x7e01 }, { 0x7bff, 0xfbff, 0x0001 } },
                  { DT_F32, { 0x7f800000, 0xff800000, 0x7f800001 }, { 0x7f7fffff, 0xff7fffff, 1 } },
                  { DT_F64,
                    { 0x7ff0000000000000, 0xfff0000000000000, 0x7ff0000000000001 },
                    { 0x7fefffffffffffff, 0xffefffffffffffff, 1 } },
                  { DT_F8_E4M3, { 0x7f, 0xff, 0x7f }, { 0x7e, 0xfe, 0x78 } },
                  { DT_F8_E5M2, { 0x7c, 0xfc, 0x7f }, { 0x7b, 0xfb, 0x01 } } };
    uint8_t raw[8 * 40 + 1], *p = raw + 1; /* odd address */
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        const int size = dtype_bytes(cases[c].t);
        for (int n = 0; n <= 37; n++)
            for (int at = -1; at < n; at++) {
                for (int i = 0; i < n; i++) memcpy(p + i * size, &cases[c].good[i % 3], (size_t)size);
                if (at >= 0) memcpy(p + at * size, &cases[c].bad[at % 3], (size_t)size);
                if (at >= 2) memcpy(p + (at - 2) * size, &cases[c].bad[(at + 1) % 3], (size_t)size);
                int64_t first = -1;
                assert_int_equal(scan_elements(p, cases[c].t, n, &first), at < 0 ? 0 : at < 2 ? 1 : 2);
                assert_int_equal(first, at < 2 ? at : at - 2);
            }
    }
    int64_t first;
    assert_int_equal(scan_elements((const uint8_t *)"\xff\xff\xff\xff", DT_U8, 4, &first), 0);
}

static void scan_model(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    synth s;
    synth_make(&s, &spec);
    const char *a = L "3.mlp.experts.gate_up_proj", *b = "model.language_model.norm.weight";
    memcpy(synth_find(&s, a)->data + 2 * 1000, &(uint16_t){ 0x7fc0 }, 2);
    memcpy(synth_find(&s, a)->data + 2 * 4000, &(uint16_t){ 0xff80 }, 2);
    memcpy(synth_find(&s, b)->data + 2 * 31, &(uint16_t){ 0x7f80 }, 2);
    model m;
    err e;
    assert_true(model_open(&m, &s, 2, 0, &e)); /* loading does not look; scanning does */
    for (int threads = 0; threads <= 7; threads += threads ? 2 : 1) {
        pool *p = NULL;
        scan_result r;
        if (threads) assert_true(pool_new(&p, threads, &e));
        scan_checkpoint(&r, &m.c, p);
        assert_int_equal(r.count, 3);
        assert_int_equal(r.n, 2);
        assert_int_equal(r.tensors, m.c.tensor_count);
        assert_int_equal(r.bytes, m.c.tensor_bytes);
        for (int i = 0; i < 2; i++) {
            const bool is_a = str_is(r.found[i].tensor->name, a);
            assert_true(is_a || str_is(r.found[i].tensor->name, b));
            assert_int_equal(r.found[i].count, is_a ? 2 : 1);
            assert_int_equal(r.found[i].first, is_a ? 1000 : 31);
        }
        scan_free(&r);
        if (p) pool_free(p);
    }
    model_close(&m);
    synth_free(&s);
}

/* The layout of the 35B with split experts, at toy widths: tens of thousands of names. */
static void many_tensors(void **state) {
    (void)state;
    synth_spec spec = synth_default();
    spec.layers = 40;
    spec.interval = 4;
    spec.experts = 256;
    spec.topk = 8;
    spec.hidden = 2;
    spec.vocab = 8;
    spec.moe_inter = spec.shared_inter = 1;
    spec.split_experts = spec.split_mtp_experts = true;
    synth s;
    model m;
    err e;
    synth_make(&s, &spec);
    assert_true(model_open(&m, &s, 1, 0, &e));
    assert_true(m.c.tensor_count > 31000);
    weights_free(&m.w);
    const double t0 = clock_seconds();
    assert_true(weights_bind(&m.w, &m.c, &m.cfg, &e));
    const double seconds = clock_seconds() - t0;
    print_message("bound %d tensors in %.1f ms\n", m.c.tensor_count, 1e3 * seconds);
    assert_true(seconds < 1.0); /* measured: about 20 ms; a second would mean a search per name */
    model_close(&m);
    synth_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain),           cmocka_unit_test(tiny_model),       cmocka_unit_test(layouts),
        cmocka_unit_test(interleaved),     cmocka_unit_test(float_types),      cmocka_unit_test(dense_and_tied),
        cmocka_unit_test(tied_with_head),  cmocka_unit_test(draft_head),       cmocka_unit_test(unaligned),
        cmocka_unit_test(declared_type),   cmocka_unit_test(each_tensor),      cmocka_unit_test(guesses),
        cmocka_unit_test(expert_layouts),  cmocka_unit_test(quantized),        cmocka_unit_test(names),
        cmocka_unit_test(census_of_plain), cmocka_unit_test(census_of_export), cmocka_unit_test(scan_types),
        cmocka_unit_test(scan_model),      cmocka_unit_test(many_tensors),
    };
    const int bad = cmocka_run_group_tests(tests, NULL, NULL);
    buf_free(&notices);
    return bad;
}
