/* nibble eval accept: accept length and per-position acceptance of the draft head, by workload, depth and concurrency. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmd/calibration.h"
#include "cmd/eval.h"
#include "eval/batch.h"
#include "eval/workload.h"

typedef struct options {
    arg_strings data;
    const char *depths, *concurrency;
    int limit, max_tokens, think, ctx, kv, act, sampling;
    int64_t seed, memory;
    const char *draft_head, *csv, *svg;
} options;

enum { GREEDY, MODEL, BOTH };
static const char *const sampling_choices[] = { "greedy", "model", "both", NULL };

typedef struct state {
    bench_report report;
    engine *g;
    const options *o;
    sampler_params model; /* as generation_config.json says */
} state;

/* ---- a cell of the sweep ---- */

static const bench_column columns[] = {
    { "workload", "workload", -1, 1 },
    { "sampling", "sampling", -1, 1 },
    { "concurrency", "seqs", 0, 1 },
    { "depth", "depth", 0, 1 },
    { "prompts", "prompts", 0, 1 },
    { "tokens", "tokens", 0, 1 },
    { "accept_length", "accept", 3, 1 },
    { "accept_length_95", "95 %", -1, 1 },
    { "rate_1", "1st", 3, 1 },
    { "rate_2", "2nd", 3, 1 },
    { "rate_3", "3rd", 3, 1 },
    { "rate_4", "4th", 3, 1 },
    { "rate_5", "5th", 3, 1 },
    { "tokens_per_second", "tokens/s", 1, 1 },
    { "gain", "x off", 2, 1 },
    { "out_of_list", "out of list", 4, BENCH_HIDDEN },
    { "seconds", "seconds", 2, BENCH_HIDDEN },
};

typedef struct cell {
    const workload *w;
    bool sampled;
    int concurrency, depth;
} cell;

static sampler_params sampling_of(const state *s, const cell *c, int index) {
    sampler_params p = c->sampled ? s->model : (sampler_params){ 0 };
    p.seed = (uint64_t)s->o->seed;
    p.choice = (uint32_t)index;
    return p;
}

typedef struct watch {
    eval_progress p;
    int total;
} watch;

static void on_item(void *ctx, int index, int done) {
    watch *w = ctx;
    (void)index;
    eval_progress_show(&w->p, "prompts", done, w->total);
}

static bool run_cell(state *s, const cell *c, double *off, err *e) {
    const engine *g = s->g;
    const int n = c->w->n;
    batch_item *items = xcalloc((size_t)n, sizeof *items);
    double *num = xcalloc((size_t)n, sizeof *num), *den = xcalloc((size_t)n, sizeof *den), seconds;
    watch w = { eval_progress_begin(), n };
    for (int i = 0; i < n; i++)
        items[i] = (batch_item){ .prompt = c->w->v[i].ids,
                                 .n_prompt = c->w->v[i].n,
                                 .sampling = sampling_of(s, c, i),
                                 .max_tokens = s->o->max_tokens };
    const batch_options bo = { .concurrency = c->concurrency,
                               .depth = c->depth,
                               .stop_ids = g->config.stop_ids,
                               .n_stop_ids = g->config.stop_count,
                               .on_item = on_item,
                               .ctx = &w,
                               .cancel = cmd_interrupt() };
    bool ok = batch_run(s->g, items, n, &bo, &seconds, e);
    eval_progress_end(&w.p);
    int64_t tokens = 0, at[ENGINE_MAX_DRAFT] = { 0 }, tried[ENGINE_MAX_DRAFT] = { 0 }, outside = 0;
    double decode = 0;
    for (int i = 0; ok && i < n; i++) {
        const gen_result *r = &items[i].result;
        if (items[i].error.id) {
            *e = items[i].error;
            ok = fail_prefix(e, "workload %s, prompt %d", c->w->name, i);
            break;
        }
        tokens += r->output_tokens;
        outside += r->out_of_list;
        decode += r->decode_seconds;
        num[i] = (double)(r->accepted + r->rounds);
        den[i] = (double)r->rounds;
        for (int k = 0; k < ENGINE_MAX_DRAFT; k++) at[k] += r->accepted_at[k], tried[k] += r->drafted_at[k];
    }
    if (ok) {
        bench_table *t = &s->report.table;
        /* One sequence: the time of decoding alone. Several share passes with prompts, so the whole time counts. */
        const double rate = c->concurrency == 1 ? (double)tokens / decode : (double)tokens / seconds;
        if (c->depth == 0) *off = rate;
        bench_text(t, c->w->name);
        bench_text(t, c->sampled ? "model's" : "greedy");
        bench_number(t, c->concurrency);
        bench_number(t, c->depth);
        bench_number(t, n);
        bench_number(t, (double)tokens);
        eval_table_interval(
            t, c->depth ? stat_ratio(num, den, n, (uint64_t)s->o->seed) : (stat_interval){ NAN, NAN, NAN }, 3);
        for (int k = 0; k < ENGINE_MAX_DRAFT; k++) bench_number(t, tried[k] ? (double)at[k] / (double)tried[k] : NAN);
        bench_number(t, rate);
        bench_number(t, *off > 0 ? rate / *off : NAN);
        bench_number(t, tokens ? (double)outside / (double)tokens : NAN);
        bench_number(t, seconds);
    }
    batch_free(items, n);
    free(items);
    free(num);
    free(den);
    return ok;
}

static bool sweep(state *s, const eval_works *w, const bench_list *depths, const bench_list *seqs, err *e) {
    for (int i = 0; i < w->n; i++)
        for (int m = 0; m < 2; m++)
            for (int q = 0; q < seqs->n; q++) {
                double off = 0;
                if (s->o->sampling != BOTH && s->o->sampling != m) continue;
                for (int d = 0; d < depths->n; d++) {
                    const cell c = { &w->v[i], m == MODEL, seqs->v[q], depths->v[d] };
                    if (!run_cell(s, &c, &off, e)) return false;
                }
            }
    return true;
}

static bool run(const options *o, const char *dir, const bench_list *depths, const bench_list *seqs, err *e) {
    state s = { .o = o };
    eval_works *w = xcalloc(1, sizeof *w);
    int most = 1, rows;
    for (int i = 0; i < seqs->n; i++) most = seqs->v[i] > most ? seqs->v[i] : most;
    bool ok = cmd_draft_head(&rows, o->draft_head, e);
    const engine_options eo = { .ops = cmd_ops_options(),
                                .ctx = o->ctx,
                                .slots = most,
                                .kv = (kv_mode)o->kv,
                                .act = (act_mode)o->act,
                                .heads = { .draft_rows = rows },
                                .memory_bytes = o->memory };
    ok = ok && engine_open(&s.g, dir, &eo, e);
    if (ok && !s.g->n.has_mtp) ok = fail(e, ERR_INPUT, "E-LOAD-NO-HEAD", "%s: the checkpoint has no draft head", dir);
    ok = ok && eval_read_works(w, &o->data, s.g, o->limit, o->think, true, e) && eval_model_sampling(&s.model, s.g, e);
    if (ok) {
        s.report = (bench_report){ .command = "eval",
                                   .what = "accept",
                                   .table = { .cols = columns, .n_cols = ARRAY_LEN(columns) } };
        bench_machine(&s.report, dir, s.g->o);
        bench_note(&s.report, "accept length = (accepted + rounds) / rounds, counted before a stop cuts a round; 95 %% "
                              "intervals over prompts; 1st.. = share of drafts at that place accepted");
        ok = sweep(&s, w, depths, seqs, e);
        const bench_options bo = { .csv = o->csv, .svg = o->svg };
        static const bench_plot plot = { .title = "accept length by depth",
                                         .x = "drafts per round",
                                         .y = "accept length",
                                         .group_col = 0,
                                         .group2_col = 1,
                                         .x_col = 3,
                                         .y_col = 6,
                                         .lo_col = -1,
                                         .hi_col = -1,
                                         .ref_col = -1 };
        ok = ok && bench_report_write(&s.report, &bo, e) &&
             (!o->svg || bench_plot_write(&s.report.table, &plot, &bo, e));
        bench_report_free(&s.report);
    }
    eval_works_free(w);
    free(w);
    engine_close(s.g);
    return ok;
}

int eval_accept(int argc, char **argv, err *e) {
    options o = { .limit = 64, .max_tokens = 256, .think = -1, .seed = 1, .depths = "0,1,2,3,4,5", .concurrency = "1" };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Workloads" },
        { .type = ARG_LIST,
          .name = "data",
          .meta = "[NAME=]FILE",
          .dst = &o.data,
          .none = "built-in math, code, chat, tools, stories",
          .help = "JSON lines with `question`, `prompt` or `messages`; repeatable" },
        { .type = ARG_INT,
          .name = "limit",
          .meta = "N",
          .dst = &o.limit,
          .lo = 0,
          .hi = INT32_MAX,
          .help = "prompts of each; 0 = all" },
        { .type = ARG_INT,
          .name = "max-tokens",
          .key = 'n',
          .meta = "N",
          .dst = &o.max_tokens,
          .lo = 1,
          .hi = 1 << 20,
          .help = "longest answer" },
        { .type = ARG_SET,
          .name = "think",
          .dst = &o.think,
          .value = 1,
          .none = "",
          .help = "let the model think first" },
        { .type = ARG_SET, .name = "no-think", .dst = &o.think, .value = 0, .none = "", .help = "do not" },
        { .type = ARG_GROUP, .help = "Sweep" },
        { .type = ARG_STR, .name = "depth", .meta = "LIST", .dst = &o.depths, .help = "drafts per round" },
        { .type = ARG_STR, .name = "concurrency", .meta = "LIST", .dst = &o.concurrency, .help = "sequences at once" },
        { .type = ARG_ENUM,
          .name = "sampling",
          .dst = &o.sampling,
          .choices = sampling_choices,
          .help = "greedy, or as generation_config.json says" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &o.seed,
          .lo = 0,
          .hi = INT64_MAX,
          .help = "of sampling and of the bootstrap" },
        { .type = ARG_GROUP, .help = "Engine" },
        { .type = ARG_INT,
          .name = "ctx",
          .meta = "N",
          .dst = &o.ctx,
          .lo = 1,
          .hi = 1 << 30,
          .none = "the model's limit, at most 32768",
          .help = "positions per sequence" },
        { .type = ARG_ENUM, .name = "kv", .dst = &o.kv, .choices = cmd_kv_choices, .help = "KV cache type" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &o.act,
          .choices = cmd_act_choices,
          .help = "inputs of quantized Linears" },
        { .type = ARG_STR,
          .name = "draft-head",
          .meta = "full|N",
          .dst = &o.draft_head,
          .none = "65536 of a large vocabulary",
          .help = "rows of the NVFP4 head that drafts come from" },
        { .type = ARG_BYTES,
          .name = "memory",
          .meta = "SIZE",
          .dst = &o.memory,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "what is available",
          .help = "refuse to plan for more" },
        { .type = ARG_GROUP, .help = "Output" },
        { .type = ARG_STR, .name = "csv", .meta = "FILE", .dst = &o.csv, .none = "", .help = "the table as CSV" },
        { .type = ARG_STR, .name = "svg", .meta = "FILE", .dst = &o.svg, .none = "", .help = "a plot as SVG" },
    };
    const arg_spec spec = {
        .usage = "eval accept [options] [MODEL_DIR]",
        .about = "How many drafts the model accepts: accept length with 95 % intervals over prompts, acceptance of "
                 "each place, and "
                 "tokens/s, by workload, depth, sampling and number of sequences.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble eval accept MODEL --data math=gsm8k.jsonl --data code=code.jsonl --depth 0,1,2,3\n"
                    "  nibble eval accept MODEL --concurrency 1,8 --sampling both --svg accept.svg\n"
    };
    arg_strings pos = { 0 };
    bool done;
    const char *dir;
    bench_list depths, seqs;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done &&
        bench_read_list(&depths, "depth", o.depths, 0, ENGINE_MAX_DRAFT, e) &&
        bench_read_list(&seqs, "concurrency", o.concurrency, 1, 256, e) && cmd_model_dir(&dir, &pos, 0, e) &&
        !run(&o, dir, &depths, &seqs, e))
        CHECK(e->kind != ERR_NONE, "a failure without a reason");
    arg_strings_free(&pos);
    arg_strings_free(&o.data);
    return 0;
}
