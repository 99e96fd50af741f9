#include "eval/swap.h"

#include <stdlib.h>
#include <string.h>

const char *swap_family_name(swap_family f) {
    static const char *const names[SWAP_FAMILIES] = { "gdn", "attention", "experts", "shared", "router", "head" };
    return names[f];
}

static void take_layer(net_layer *to, const net_layer *from, int family) {
    const bool all = family < 0;
    if (all || family == SWAP_GDN) {
        to->in_qkv = from->in_qkv;
        to->in_z = from->in_z;
        to->in_b = from->in_b;
        to->in_a = from->in_a;
        to->gdn_out = from->gdn_out;
    }
    if (all || family == SWAP_ATTN) {
        to->q = from->q;
        to->k = from->k;
        to->v = from->v;
        to->o = from->o;
    }
    if (all || family == SWAP_EXPERTS) to->ffn.experts = from->ffn.experts;
    if (all || family == SWAP_FFN) {
        to->ffn.gate = from->ffn.gate;
        to->ffn.up = from->ffn.up;
        to->ffn.down = from->ffn.down;
    }
    if (all || family == SWAP_ROUTER) {
        to->ffn.router = from->ffn.router;
        to->ffn.shared_gate = from->ffn.shared_gate;
    }
}

static bool same_shape(const model_config *a, const model_config *b) {
    if (a->layers != b->layers || a->hidden != b->hidden || a->vocab != b->vocab) return false;
    for (int i = 0; i < a->layers; i++)
        if (a->layer[i] != b->layer[i]) return false;
    return a->experts == b->experts && a->moe_inter == b->moe_inter && a->heads == b->heads &&
           a->kv_heads == b->kv_heads && a->head_dim == b->head_dim && a->lin_v_heads == b->lin_v_heads &&
           a->lin_k_heads == b->lin_k_heads && a->lin_v_dim == b->lin_v_dim && a->lin_k_dim == b->lin_k_dim;
}

bool swap_in(swap *s, engine *into, const engine *from, swap_part part, err *e) {
    const int n = into->config.layers;
    *s = (swap){ 0 };
    if (!same_shape(&into->config, &from->config))
        return fail(e, ERR_INPUT, "E-EVAL-SHAPE", "%s: not the shape of %s (compare models of one family)",
                    from->files.dir, into->files.dir);
    CHECK(part.layer < n, "layer %d of %d", part.layer, n);
    s->into = into;
    s->saved = into->n;
    s->layers = xmalloc((size_t)n * sizeof *s->layers);
    memcpy(s->layers, into->n.layers, (size_t)n * sizeof *s->layers);
    for (int i = 0; i < n; i++)
        if (part.layer < 0 || part.layer == i) take_layer(&into->n.layers[i], &from->n.layers[i], part.family);
    if (part.layer < 0 && (part.family < 0 || part.family == SWAP_HEAD)) {
        into->n.head = from->n.head;
        into->n.head_real = from->n.head_real;
    }
    return true;
}

void swap_out(swap *s) {
    if (!s->into) return;
    memcpy(s->into->n.layers, s->layers, (size_t)s->into->config.layers * sizeof *s->layers);
    s->into->n.head = s->saved.head;
    s->into->n.head_real = s->saved.head_real;
    free(s->layers);
    *s = (swap){ 0 };
}
