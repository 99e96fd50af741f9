#include "engine/identity.h"

#include "engine/prefix_file.h"

typedef struct sum {
    uint64_t h;
} sum;

static void add(sum *s, const void *p, size_t n) {
    if (p) s->h = prefix_sum(p, n, s->h);
}

static void add_int(sum *s, int64_t v) { add(s, &v, sizeof v); }

/* Three short pieces of a matrix: reading all would take as long as loading. */
static void add_pieces(sum *s, const void *p, int64_t bytes) {
    enum { PIECE = 256 };
    if (!p || bytes <= 0) return;
    const size_t n = (size_t)(bytes < PIECE ? bytes : PIECE);
    const int64_t at[] = { 0, (bytes - (int64_t)n) / 2, bytes - (int64_t)n };
    for (size_t i = 0; i < ARRAY_LEN(at); i++) add(s, (const uint8_t *)p + at[i], n);
}

static void add_matrix(sum *s, const void *data, int64_t rows, int64_t cols, dtype type, const wquant *q) {
    const bool nvfp4 = q && q->format == WF_NVFP4;
    add_int(s, rows), add_int(s, cols), add_int(s, type);
    if (!data) return;
    add_pieces(s, data, nvfp4 ? rows * cols / 2 : rows * cols * dtype_bytes(type));
    if (!q || q->format == WF_PLAIN) return;
    add_int(s, q->format);
    if (nvfp4) add_pieces(s, q->scales, rows * cols / 16);
    add(s, &q->scale_2, sizeof q->scale_2);
    add(s, &q->input_scale, sizeof q->input_scale);
}

static void add_mat(sum *s, const wmat *m) { add_matrix(s, m->data, m->rows, m->cols, m->type, &m->q); }

static void add_experts(sum *s, const wexperts *x) {
    add_int(s, x->count);
    for (int i = 0; i < x->count; i++) {
        add_matrix(s, x->gate[i], x->inter, x->hidden, x->type, x->gate_q ? &x->gate_q[i] : NULL);
        add_matrix(s, x->up[i], x->inter, x->hidden, x->type, x->up_q ? &x->up_q[i] : NULL);
        add_matrix(s, x->down[i], x->hidden, x->inter, x->type, x->down_q ? &x->down_q[i] : NULL);
    }
}

static void add_layer(sum *s, const model_config *c, const wlayer *l) {
    const wmat *all[LAYER_MATS];
    const size_t h = (size_t)c->hidden * sizeof(float);
    add_int(s, l->kind);
    add(s, l->norm1, h);
    add(s, l->norm2, h);
    wlayer_mats(all, l);
    for (int i = 0; i < LAYER_MATS; i++) add_mat(s, all[i]);
    add_experts(s, &l->ffn.experts);
    add(s, &l->k_scale, sizeof l->k_scale);
    add(s, &l->v_scale, sizeof l->v_scale);
    if (l->kind != LAYER_GDN) return;
    const size_t heads = (size_t)c->lin_v_heads * sizeof(float);
    add(s, l->conv, (size_t)config_conv_dim(c) * (size_t)c->conv_kernel * sizeof(float));
    add(s, l->neg_a, heads);
    add(s, l->dt_bias, heads);
}

uint64_t engine_identity(const engine *g, bool drafting) {
    const model_config *c = &g->config;
    sum s = { 0 };
    const int64_t facts[] = { OPS_KV_PAGE,    g->kv_type,   g->act,       drafting,       c->layers,
                              c->hidden,      c->heads,     c->kv_heads,  c->head_dim,    c->rotary_dim,
                              c->attn_gate,   c->experts,   c->topk,      c->conv_kernel, c->lin_k_heads,
                              c->lin_v_heads, c->lin_k_dim, c->lin_v_dim, c->vocab,       g->n.has_mtp };
    add(&s, facts, sizeof facts);
    add(&s, &c->rms_eps, sizeof c->rms_eps);
    add(&s, &c->rope_scaling, sizeof c->rope_scaling);
    add(&s, c->inv_freq, (size_t)(c->rotary_dim / 2) * sizeof *c->inv_freq);
    add(&s, g->w.norm, (size_t)c->hidden * sizeof(float));
    add_mat(&s, &g->w.embed);
    for (int i = 0; i < c->layers; i++) add_layer(&s, c, &g->w.layers[i]);
    if (g->w.mtp.present && drafting) {
        add_mat(&s, &g->w.mtp.fc);
        add_layer(&s, c, &g->w.mtp.layer);
    }
    return s.h;
}
