/* The page that says what was loaded. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "model/census.h"
#include "serve/server_impl.h"

/* ---- formats ---- */

static void add_formats(buf *b, const census *k, bool as_json) {
    for (int i = 0, n = 0; i <= WC_COUNT; i++) {
        const census_class *c = &k->of[i];
        if (!c->tensors) continue;
        buf format = { 0 };
        census_format_text(&format, c);
        if (as_json)
            buf_printf(b, "%s\"%s\":{\"format\":\"%s\",\"bytes\":%lld}", n++ ? "," : "",
                       weight_class_name((weight_class)i), format.p, (long long)c->bytes);
        else
            buf_printf(b, "%s%s %s", n++ ? ", " : "", weight_class_name((weight_class)i), format.p);
        buf_free(&format);
    }
}

static void add_scale(buf *b, bool has, float v) {
    if (has)
        json_write_double(b, (double)v);
    else
        buf_puts(b, "null");
}

static void add_kv_scales(buf *b, const census *k, int layers) {
    bool any = false;
    for (int i = 0; i < layers; i++) {
        const kv_scale *s = &k->kv[i];
        if (!s->has_k && !s->has_v) continue;
        buf_printf(b, "%s\"%d\":[", any ? "," : "", i);
        add_scale(b, s->has_k, s->k);
        buf_byte(b, ',');
        add_scale(b, s->has_v, s->v);
        buf_byte(b, ']');
        any = true;
    }
}

void server_write_formats(buf *b, const server *s) {
    census *k = xcalloc(1, sizeof *k);
    census_take(k, &s->g->files, &s->g->config);
    buf_puts(b, ",\"formats\":{");
    add_formats(b, k, true);
    buf_puts(b, "},\"kv_scales\":{");
    add_kv_scales(b, k, s->g->config.layers);
    buf_byte(b, '}');
    free(k);
}

/* ---- how inputs of quantized Linears are read ---- */

enum { ACT_IS_FP4 = 1, ACT_IS_FP8 = 2, ACT_IS_FLOAT = 4 };

static unsigned act_of_quant(const wquant *q) {
    if (q->format == WF_PLAIN) return 0;
    return q->input_scale == 0 ? ACT_IS_FLOAT : q->format == WF_FP8 ? ACT_IS_FP8 : ACT_IS_FP4;
}

static unsigned act_of_layer(const wlayer *l) {
    const wmat *mats[LAYER_MATS];
    const wexperts *x = &l->ffn.experts;
    unsigned is = 0;
    wlayer_mats(mats, l);
    for (int i = 0; i < LAYER_MATS; i++)
        if (mats[i]->data) is |= act_of_quant(&mats[i]->q);
    for (int i = 0; i < x->count && x->gate_q; i++)
        is |= act_of_quant(&x->gate_q[i]) | act_of_quant(&x->up_q[i]) | act_of_quant(&x->down_q[i]);
    return is;
}

const char *server_act_name(const engine *g) {
    static const char *const names[] = {
        "none", "fp4", "fp8", "fp4+fp8", "bf16", "fp4+bf16", "fp8+bf16", "fp4+fp8+bf16"
    };
    unsigned is = 0;
    if (g->n.act == ACT_INT8 && g->w.quantized) return "int8";
    for (int i = 0; i < g->config.layers; i++) is |= act_of_layer(&g->w.layers[i]);
    if (g->n.act == ACT_BF16 && is) return "bf16";
    return names[is];
}

/* ---- the page ---- */

void server_start_page(server *s) {
    const engine *g = s->g;
    const sampler_params *p = &s->model.defaults;
    char plan[500];
    buf formats = { 0 }, scales = { 0 };
    census *k = xcalloc(1, sizeof *k);
    census_take(k, &g->files, &g->config);
    add_formats(&formats, k, false);
    add_kv_scales(&scales, k, g->config.layers);
    memory_plan_text(plan, sizeof plan, &g->plan);
    log_say("N-SERVE-MODEL", "%s: loaded in %.1f s from %s", s->name, s->load_seconds, s->o->dir);
    log_say("N-SERVE-MODEL", "weights: %s; inputs of quantized ones: %s", formats.p, server_act_name(g));
    log_say("N-SERVE-MODEL", "KV cache: %s, %d sequences of %d tokens, scales by layer [k,v]: %s",
            dtype_name(g->kv_type), g->st.slots, s->model.ctx, scales.n ? scales.p : "none");
    log_say("N-SERVE-MODEL", "memory: %s", plan);
    log_say("N-SERVE-MODEL", "drafts: %s%d per round at most; self-test passed; %s, %d threads",
            g->n.has_mtp ? "" : "no draft head, ", g->n.has_mtp ? s->o->loop.depth : 0, g->o->isa, g->o->threads);
    log_say("N-SERVE-MODEL", "defaults: temperature %g, top_k %d, top_p %g, min_p %g; access: %d keys%s",
            p->temperature, p->top_k, p->top_p, p->min_p, s->o->api_keys.n, s->o->api_keys.n ? "" : " (open)");
    const bool v6 = strchr(s->o->host, ':') != NULL;
    fprintf(stderr, "ready http://%s%s%s:%d\n", v6 ? "[" : "", s->o->host, v6 ? "]" : "", http_port(s->h));
    fflush(stderr);
    free(k);
    buf_free(&formats);
    buf_free(&scales);
}
