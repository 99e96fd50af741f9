#include "model/weights_group.h"

#include <stdio.h>

#include "base/log.h"

typedef struct finding {
    int groups;      /* that differ */
    char what[1024]; /* the first of them */
} finding;

static const char *format_name(wformat f) { return f == WF_NVFP4 ? "NVFP4" : f == WF_FP8 ? "FP8" : "not quantized"; }

/* Is there an NVFP4 member, and does the other not agree with it? */
static bool differ(finding *f, const char *name_a, const wquant *a, const char *name_b, const wquant *b) {
    if (a->format != WF_NVFP4 && b->format != WF_NVFP4) return false;
    const bool format = a->format != b->format, weight = a->scale_2 != b->scale_2;
    if (!format && !weight && a->input_scale == b->input_scale) return false;
    if (f->groups) return true;
    if (format)
        snprintf(f->what, sizeof f->what, "%s is %s, %s is %s", name_a, format_name(a->format), name_b,
                 format_name(b->format));
    else
        snprintf(f->what, sizeof f->what, "%s has %s %g, %s has %g", name_a, weight ? "weight_scale_2" : "input_scale",
                 (double)(weight ? a->scale_2 : a->input_scale), name_b,
                 (double)(weight ? b->scale_2 : b->input_scale));
    return true;
}

static bool pair(finding *f, const wmat *a, const wmat *b) { return differ(f, a->name, &a->q, b->name, &b->q); }

static void experts(finding *f, const wexperts *x) {
    for (int i = 0; x->gate_q && i < x->count; i++) {
        char a[400], b[400];
        snprintf(a, sizeof a, "%s.%d.gate_proj", x->name, i);
        snprintf(b, sizeof b, "%s.%d.up_proj", x->name, i);
        f->groups += differ(f, a, &x->gate_q[i], b, &x->up_q[i]);
    }
}

static void layer(finding *f, const wlayer *l) {
    if (l->kind == LAYER_GDN)
        f->groups += pair(f, &l->in_qkv, &l->in_z);
    else
        f->groups += pair(f, &l->q, &l->k) || pair(f, &l->q, &l->v) || pair(f, &l->k, &l->v);
    if (l->ffn.gate.data) f->groups += pair(f, &l->ffn.gate, &l->ffn.up);
    experts(f, &l->ffn.experts);
}

void group_check(const weights *w, const model_config *config, const char *dir) {
    finding f = { 0 };
    if (!w->quantized) return;
    for (int i = 0; i < config->layers; i++) layer(&f, &w->layers[i]);
    if (w->mtp.present) layer(&f, &w->mtp.layer);
    if (f.groups)
        log_say("W-LOAD-GROUP",
                "%s: %d groups of Linears with one input differ in their scales: %s; each is run with its own here, "
                "engines that fuse them may not (quantize again)",
                dir, f.groups, f.what);
}
