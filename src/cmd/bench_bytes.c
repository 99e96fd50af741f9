/* The byte model: what a round of decoding must move between memory and the cores. */
#include <math.h>

#include "cmd/bench.h"

static double quant_bytes(double elements, wformat f, dtype type) {
    return f == WF_NVFP4 ? elements * 9 / 16 : elements * (f == WF_FP8 ? 1 : dtype_bytes(type));
}

static void add_mat(bench_bytes *b, const wmat *m) {
    if (!m->data) return;
    *(m->q.format == WF_NVFP4 ? &b->nvfp4 : &b->plain) += quant_bytes((double)m->rows * m->cols, m->q.format, m->type);
}

/* Distinct experts that `rows` independent choices of k out of n touch. */
static double distinct(int n, int k, double rows) { return n * (1 - pow(1 - (double)k / n, rows)); }

/* `read`: experts of the layer's pass; 0: as `rows` choose them. */
static void add_layer(bench_bytes *b, const wlayer *l, const model_config *c, double rows, double read) {
    const wmat *all[LAYER_MATS];
    wlayer_mats(all, l);
    for (int i = 0; i < LAYER_MATS; i++) add_mat(b, all[i]);
    if (l->kind == LAYER_GDN) b->plain += 4.0 * config_conv_dim(c) * c->conv_kernel;
    const wexperts *x = &l->ffn.experts;
    if (x->count == 0) return;
    const wformat f = x->gate_q ? x->gate_q[0].format : WF_PLAIN;
    if (read <= 0) read = distinct(x->count, c->topk, rows);
    *(f == WF_NVFP4 ? &b->nvfp4 : &b->plain) += read * quant_bytes(3.0 * x->inter * x->hidden, f, x->type);
}

/* One reading of the output head for `rows` rows. */
static double head_pass(const engine *g, double rows, double candidates) {
    const wmat *m = &g->w.head;
    const double row = quant_bytes(m->cols, m->q.format, m->type), full = row * g->n.real_vocab;
    const size_t screen = g->n.heads.top ? head_bytes(g->n.heads.top) : 0;
    return screen ? fmin((double)screen + candidates * rows * row, (double)screen + full) : full;
}

static double draft_pass(const engine *g, double rows, double candidates) {
    const size_t bytes = heads_draft_bytes(&g->n.heads);
    return bytes ? (double)bytes : head_pass(g, rows, candidates);
}

static double kv_position(const ops_kv *kv) { return 2.0 * kv->kv_heads * kv->dim * dtype_bytes(kv->type); }

/* The draft layer over the accepted rows, then once for each further draft; each draft reads a head. */
static double drafting(const engine *g, const bench_round *r) {
    bench_bytes b = { 0 };
    add_layer(&b, &g->w.mtp.layer, &g->config, r->sequences * r->yield, 0);
    add_mat(&b, &g->w.mtp.fc);
    bench_bytes more = { 0 };
    add_layer(&more, &g->w.mtp.layer, &g->config, r->sequences, 0);
    add_mat(&more, &g->w.mtp.fc);
    const double each = r->sequences * r->context * kv_position(&g->st.mtp_kv);
    const double depth = fmax(r->depth, 1), share = fmin(r->depth, 1); /* below 1: some rounds draft nothing */
    return share * (b.nvfp4 + b.plain + (depth - 1) * (more.nvfp4 + more.plain) +
                    depth * (each + draft_pass(g, r->sequences, r->candidates)));
}

bench_bytes bench_bytes_of(const engine *g, const bench_round *r) {
    const model_config *c = &g->config;
    const double rows = r->sequences * (r->depth + 1);
    bench_bytes b = { 0 };
    for (int i = 0; i < c->layers; i++) add_layer(&b, &g->w.layers[i], c, rows, r->experts);
    for (int i = 0; i < c->attn_layers; i++) b.kv += r->sequences * r->context * kv_position(&g->st.kv[i]);
    b.head = head_pass(g, rows, r->candidates);
    b.state = 2.0 * r->sequences * (double)config_state_bytes(c); /* read and written once a round */
    if (r->depth > 0) b.draft = drafting(g, r);
    double *parts[] = { &b.nvfp4, &b.plain, &b.head, &b.state, &b.kv, &b.draft };
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) *parts[i] /= r->sequences * r->yield;
    return b;
}

double bench_bytes_total(const bench_bytes *b) { return b->nvfp4 + b->plain + b->head + b->state + b->kv + b->draft; }

double bench_macs(const engine *g) {
    double n = 0;
    for (int i = 0; i < g->config.layers; i++) {
        const wlayer *l = &g->w.layers[i];
        const wmat *all[LAYER_MATS];
        wlayer_mats(all, l);
        for (int j = 0; j < LAYER_MATS; j++)
            if (all[j]->data && all[j] != &l->ffn.shared_gate_in) n += (double)all[j]->rows * all[j]->cols;
        n += 3.0 * g->config.topk * l->ffn.experts.inter * l->ffn.experts.hidden;
    }
    return n;
}
