#include "engine/net.h"

#include <stdlib.h>

static bool quant_of(linear_quant *out, const net *n, const wquant *q, const char *name, err *e) {
    *out = (linear_quant){ .scales = q->scales, .scale_2 = q->scale_2, .input_scale = q->input_scale };
    if (q->format == WF_PLAIN) return true;
    const bool has = q->input_scale > 0 && n->act != ACT_BF16;
    if (q->format == WF_FP8) {
        out->format = LINEAR_FP8;
        out->act = has ? LINEAR_ACT_FP8 : LINEAR_ACT_FLOAT;
        return true;
    }
    out->format = LINEAR_NVFP4;
    out->act = n->act == ACT_INT8 ? LINEAR_ACT_INT8 : has ? LINEAR_ACT_FP4 : LINEAR_ACT_FLOAT;
    if (n->act == ACT_FP4 && !has)
        return fail(e, ERR_INPUT, "E-NET-ACT", "%s: --act fp4, but there is no input_scale (use --act int8 or bf16)",
                    name);
    return true;
}

static bool prepare(net *n, linear **out, const wmat *m, err *e) {
    linear_quant q;
    if (!m->data) return true;
    if (!quant_of(&q, n, &m->q, m->name, e)) return false;
    const linear_desc d = {
        .name = m->name, .type = m->type, .rows = m->rows, .cols = m->cols, .data = m->data, .q = q, .mapped = true
    };
    return n->o->linear_new(n->o, out, &d, e);
}

static bool vector(net *n, float **out, const float *v, int64_t count, err *e) {
    if (!v) return true;
    void *p = NULL;
    if (!n->o->mem_new(n->o, &p, (size_t)count * sizeof *v, e)) return false;
    *out = p;
    n->o->upload(n->o, p, v, (size_t)count * sizeof *v);
    return true;
}

/* One projection's scales for all experts, or NULL when they are plain. */
static bool quants_of(linear_quant **out, const net *n, const wquant *q, int count, const char *name, err *e) {
    *out = NULL;
    if (!q) return true;
    *out = xcalloc((size_t)count, sizeof **out);
    for (int i = 0; i < count; i++)
        if (!quant_of(&(*out)[i], n, &q[i], name, e)) return false; /* the caller frees */
    return true;
}

static bool prepare_experts(net *n, experts **out, const wexperts *x, int layer, err *e) {
    linear_quant *gate = NULL, *up = NULL, *down = NULL;
    bool ok = quants_of(&gate, n, x->gate_q, x->count, x->name, e) &&
              quants_of(&up, n, x->up_q, x->count, x->name, e) && quants_of(&down, n, x->down_q, x->count, x->name, e);
    if (ok) {
        const experts_desc d = { .name = x->name,
                                 .type = x->type,
                                 .count = x->count,
                                 .inter = x->inter,
                                 .hidden = x->hidden,
                                 .gate = (const void *const *)x->gate,
                                 .up = (const void *const *)x->up,
                                 .down = (const void *const *)x->down,
                                 .gate_q = gate,
                                 .up_q = up,
                                 .down_q = down,
                                 .mapped = true,
                                 .on_cpu = layer_set_has(&n->cpu_experts, layer) };
        ok = n->o->experts_new(n->o, out, &d, e);
    }
    free(gate);
    free(up);
    free(down);
    return ok;
}

static bool prepare_ffn(net *n, net_ffn *f, const wffn *w, int layer, err *e) {
    f->inter = w->gate.rows;
    if (w->experts.count > 0 && !prepare_experts(n, &f->experts, &w->experts, layer, e)) return false;
    return prepare(n, &f->router, &w->router, e) && prepare(n, &f->shared_gate, &w->shared_gate_in, e) &&
           prepare(n, &f->gate, &w->gate, e) && prepare(n, &f->up, &w->up, e) && prepare(n, &f->down, &w->down, e);
}

static bool prepare_gdn(net *n, net_layer *l, const wlayer *w, err *e) {
    const model_config *c = n->c;
    return prepare(n, &l->in_qkv, &w->in_qkv, e) && prepare(n, &l->in_z, &w->in_z, e) &&
           prepare(n, &l->in_b, &w->in_b, e) && prepare(n, &l->in_a, &w->in_a, e) &&
           prepare(n, &l->gdn_out, &w->gdn_out, e) &&
           vector(n, &l->conv, w->conv, (int64_t)config_conv_dim(c) * c->conv_kernel, e) &&
           vector(n, &l->neg_a, w->neg_a, c->lin_v_heads, e) && vector(n, &l->dt_bias, w->dt_bias, c->lin_v_heads, e) &&
           vector(n, &l->gdn_norm, w->gdn_norm, c->lin_v_dim, e);
}

static bool prepare_attn(net *n, net_layer *l, const wlayer *w, err *e) {
    return prepare(n, &l->q, &w->q, e) && prepare(n, &l->k, &w->k, e) && prepare(n, &l->v, &w->v, e) &&
           prepare(n, &l->o, &w->o, e) && vector(n, &l->q_norm, w->q_norm, n->c->head_dim, e) &&
           vector(n, &l->k_norm, w->k_norm, n->c->head_dim, e);
}

static bool prepare_layer(net *n, net_layer *l, const wlayer *w, int layer, err *e) {
    l->kind = w->kind;
    return vector(n, &l->norm1, w->norm1, n->c->hidden, e) && vector(n, &l->norm2, w->norm2, n->c->hidden, e) &&
           (w->kind == LAYER_GDN ? prepare_gdn(n, l, w, e) : prepare_attn(n, l, w, e)) &&
           prepare_ffn(n, &l->ffn, &w->ffn, layer, e);
}

static bool prepare_mtp(net *n, const wmtp *m, err *e) {
    const int h = n->c->hidden;
    n->has_mtp = m->present;
    if (!m->present) return true;
    return vector(n, &n->mtp_norm_embed, m->norm_embed, h, e) && vector(n, &n->mtp_norm_hidden, m->norm_hidden, h, e) &&
           vector(n, &n->mtp_norm, m->norm, h, e) && prepare(n, &n->mtp_fc, &m->fc, e) &&
           prepare_layer(n, &n->mtp, &m->layer, n->c->layers, e);
}

static bool prepare_all(net *n, const weights *w, int real_vocab, const heads_options *ho, err *e) {
    const model_config *c = n->c;
    wmat real = w->head;
    real.rows = n->real_vocab = real_vocab > 0 && real_vocab < c->vocab ? real_vocab : c->vocab;
    if (!prepare(n, &n->embed, &w->embed, e) || !prepare(n, &n->head, &w->head, e) ||
        !prepare(n, &n->head_real, &real, e) || !vector(n, &n->norm, w->norm, c->hidden, e) ||
        !heads_open(&n->heads, n->o, n->head, &w->head, n->real_vocab, ho, e))
        return false;
    int kinds[2] = { 0, 0 };
    for (int i = 0; i < c->layers; i++) {
        n->layers[i].index = kinds[w->layers[i].kind]++;
        if (!prepare_layer(n, &n->layers[i], &w->layers[i], i, e)) return false;
    }
    const size_t half = (size_t)c->rotary_dim / 2;
    void *axis = NULL;
    if (!n->o->mem_new(n->o, &axis, half + 1, e)) return false;
    n->rope_axis = axis;
    n->o->upload(n->o, axis, c->rope_axis, half);
    return prepare_mtp(n, &w->mtp, e);
}

bool net_open(net *out, ops *o, const model_config *c, const weights *w, int real_vocab, act_mode act,
              const heads_options *ho, const layer_set *cpu_experts, err *e) {
    *out = (net){
        .o = o, .c = c, .act = act, .cpu_experts = *cpu_experts, .layers = xcalloc((size_t)c->layers, sizeof(net_layer))
    };
    if (prepare_all(out, w, real_vocab, ho, e)) return true;
    net_close(out);
    return false;
}

static void release(ops *o, linear *const *lin, size_t n_lin, float *const *vec, size_t n_vec) {
    for (size_t i = 0; i < n_lin; i++)
        if (lin[i]) o->linear_free(o, lin[i]);
    for (size_t i = 0; i < n_vec; i++)
        if (vec[i]) o->mem_free(o, vec[i]);
}

static void release_layer(ops *o, net_layer *l) {
    linear *lin[] = { l->in_qkv, l->in_z,    l->in_b, l->in_a,       l->gdn_out,         l->q,
                      l->k,      l->v,       l->o,    l->ffn.router, l->ffn.shared_gate, l->ffn.gate,
                      l->ffn.up, l->ffn.down };
    float *vec[] = { l->norm1, l->norm2, l->conv, l->neg_a, l->dt_bias, l->gdn_norm, l->q_norm, l->k_norm };
    release(o, lin, ARRAY_LEN(lin), vec, ARRAY_LEN(vec));
    if (l->ffn.experts) o->experts_free(o, l->ffn.experts);
}

void net_close(net *n) {
    if (!n->o) return;
    linear *lin[] = { n->embed, n->head, n->head_real, n->mtp_fc };
    float *vec[] = { n->norm, n->mtp_norm_embed, n->mtp_norm_hidden, n->mtp_norm };
    release(n->o, lin, ARRAY_LEN(lin), vec, ARRAY_LEN(vec));
    heads_close(&n->heads);
    if (n->rope_axis) n->o->mem_free(n->o, n->rope_axis);
    for (int i = 0; i < n->c->layers; i++) release_layer(n->o, &n->layers[i]);
    release_layer(n->o, &n->mtp);
    free(n->layers);
    *n = (net){ 0 };
}
