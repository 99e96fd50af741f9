#include "eval/arms.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void float_inputs(wlayer *l) {
    wmat *const mats[] = { &l->q, &l->k, &l->v, &l->o, &l->ffn.gate, &l->ffn.up, &l->ffn.down };
    for (size_t i = 0; i < ARRAY_LEN(mats); i++) mats[i]->q.input_scale = 0;
    const wexperts *x = &l->ffn.experts;
    for (int i = 0; i < x->count; i++) {
        if (x->gate_q) x->gate_q[i].input_scale = 0;
        if (x->up_q) x->up_q[i].input_scale = 0;
        if (x->down_q) x->down_q[i].input_scale = 0;
    }
}

static void edit_head(void *ctx, weights *w) {
    const arm *a = ctx;
    if (a->edit == ARM_HEAD_KV_ONE) w->mtp.layer.k_scale = w->mtp.layer.v_scale = 1;
    if (a->edit == ARM_HEAD_KV_WRONG) w->mtp.layer.k_scale /= 1000, w->mtp.layer.v_scale /= 1000;
    if (a->edit == ARM_HEAD_W4A16) float_inputs(&w->mtp.layer);
}

typedef struct open_arm {
    engine *g;
    session s;
} open_arm;

static void close_arm(open_arm *o) {
    if (o->g) session_close(&o->s);
    engine_close(o->g);
    *o = (open_arm){ 0 };
}

static bool open_one(open_arm *o, arm *a, const arms_options *opt, err *e) {
    engine_options eo = opt->engine;
    eo.edit = edit_head;
    eo.edit_ctx = a;
    if (!engine_open(&o->g, a->dir, &eo, e)) return false;
    if (opt->depth > 0 && !o->g->n.has_mtp)
        return fail(e, ERR_INPUT, "E-LOAD-NO-HEAD", "%s: the checkpoint has no draft head (use --depth 0)", a->dir);
    const wmat *q = &o->g->w.mtp.layer.q;
    const dtype kv = o->g->st.mtp_kv.type;
    snprintf(a->formats, sizeof a->formats, "%s%s%s",
             q->q.format == WF_NVFP4 ? "NVFP4"
             : q->data               ? dtype_name(q->type)
                                     : "none",
             q->q.format == WF_NVFP4 ? q->q.input_scale > 0 ? " W4A4, KV " : " W4A16, KV " : ", KV ", dtype_name(kv));
    return session_open(&o->s, o->g, opt->depth > 0, e);
}

static bool keep(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    ids_add(ctx, id);
    return true;
}

static bool answer(open_arm *o, arm *a, const workload *w, int i, const arms_options *opt, err *e) {
    const engine *g = o->g;
    gen_options gen = { .max_tokens = opt->max_tokens,
                        .depth = opt->depth,
                        .sampling = opt->sampling,
                        .stop_ids = g->config.stop_ids,
                        .n_stop_ids = g->config.stop_count,
                        .on_token = keep,
                        .ctx = &a->outputs[i],
                        .cancel = opt->cancel };
    gen.sampling.choice = (uint32_t)i;
    session_reset(&o->s);
    if (opt->cancel && *opt->cancel) return fail(e, ERR_INTERRUPTED, "E-EVAL-STOPPED", "eval: stopped");
    return (session_set(&o->s, w->v[i].ids, w->v[i].n, e) && session_generate(&o->s, &gen, &a->results[i], e)) ||
           fail_prefix(e, "%s, prompt %d", a->name, i);
}

/* In turn: every prompt to all arms, another one first each time, so that what the machine does besides hits all alike. */
static bool in_turn(open_arm *open, arm *arms, int n, const workload *w, const arms_options *o, err *e) {
    for (int k = 0; k < n; k++)
        if (!open_one(&open[k], &arms[k], o, e)) return false;
    for (int i = 0; i < w->n; i++)
        for (int k = 0; k < n; k++) {
            const int at = (i + k) % n;
            if (!answer(&open[at], &arms[at], w, i, o, e)) return false;
            if (o->on_prompt) o->on_prompt(o->ctx, i * n + k + 1, w->n * n);
        }
    return true;
}

static bool one_by_one(open_arm *open, arm *arms, int n, const workload *w, const arms_options *o, err *e) {
    for (int k = 0; k < n; k++) {
        if (!open_one(&open[k], &arms[k], o, e)) return false;
        for (int i = 0; i < w->n; i++) {
            if (!answer(&open[k], &arms[k], w, i, o, e)) return false;
            if (o->on_prompt) o->on_prompt(o->ctx, k * w->n + i + 1, w->n * n);
        }
        close_arm(&open[k]);
    }
    return true;
}

bool arms_run(arm *arms, int n, const workload *w, const arms_options *o, err *e) {
    open_arm *open = xcalloc((size_t)n, sizeof *open);
    for (int k = 0; k < n; k++) {
        arms[k].results = xcalloc((size_t)w->n, sizeof *arms[k].results);
        arms[k].outputs = xcalloc((size_t)w->n, sizeof *arms[k].outputs);
    }
    const bool ok = o->one_at_a_time ? one_by_one(open, arms, n, w, o, e) : in_turn(open, arms, n, w, o, e);
    for (int k = 0; k < n; k++) close_arm(&open[k]);
    free(open);
    return ok;
}

void arms_free(arm *arms, int n, int prompts) {
    for (int k = 0; k < n; k++) {
        for (int i = 0; arms[k].outputs && i < prompts; i++) ids_free(&arms[k].outputs[i]);
        free(arms[k].outputs);
        free(arms[k].results);
        arms[k].outputs = NULL;
        arms[k].results = NULL;
    }
}

typedef struct series {
    double *made, *rounds, *tokens, *seconds;
} series;

static series series_of(const arm *a, int n) {
    double *all = xcalloc(4 * (size_t)n + 1, sizeof *all);
    const series s = { all, all + n, all + 2 * n, all + 3 * n };
    for (int i = 0; i < n; i++) {
        const gen_result *r = &a->results[i];
        s.made[i] = (double)(r->accepted + r->rounds);
        s.rounds[i] = (double)r->rounds;
        s.tokens[i] = (double)r->output_tokens;
        s.seconds[i] = r->decode_seconds;
    }
    return s;
}

arm_figures arms_compare(const arm *a, const arm *first, int n, uint64_t seed) {
    arm_figures f = { .accept_difference = { NAN, NAN, NAN }, .rate_difference = { NAN, NAN, NAN } };
    const series x = series_of(a, n), y = series_of(first, n);
    f.accept = stat_ratio(x.made, x.rounds, n, seed);
    f.rate = stat_ratio(x.tokens, x.seconds, n, seed);
    if (a != first) {
        f.accept_difference = stat_ratio_difference(y.made, y.rounds, x.made, x.rounds, n, seed);
        f.rate_difference = stat_ratio_difference(y.tokens, y.seconds, x.tokens, x.seconds, n, seed);
    }
    for (int i = 0; i < n; i++) {
        const gen_result *r = &a->results[i];
        f.tokens += r->output_tokens;
        f.rounds += r->rounds;
        for (int k = 0; k < ENGINE_MAX_DRAFT; k++)
            f.accepted_at[k] += r->accepted_at[k], f.drafted_at[k] += r->drafted_at[k];
        const id_list *p = &a->outputs[i], *q = &first->outputs[i];
        f.different += p->n != q->n || memcmp(p->v, q->v, p->n * sizeof *p->v) != 0;
    }
    free(x.made);
    free(y.made);
    return f;
}
