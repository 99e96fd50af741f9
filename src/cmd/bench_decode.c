/* nibble bench decode: tokens per second of one sequence, at growing contexts and with drafts, beside what memory allows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "cmd/bench.h"

static const bench_column columns[] = {
    { "frontier", "frontier", 0, BENCH_MAIN | BENCH_PARTS },
    { "depth", "depth", 0, BENCH_MAIN | BENCH_PARTS },
    { "context", "context", 0, BENCH_MAIN | BENCH_PARTS },
    { "tokens_s", "tokens/s", 2, BENCH_MAIN },
    { "tokens_s_min", "min", 2, BENCH_MAIN },
    { "tokens_s_max", "max", 2, BENCH_MAIN },
    { "accept_length", "accept", 2, BENCH_MAIN },
    { "mb_per_token", "MB/token", 2, BENCH_MAIN },
    { "read_gb_s_before", "read GB/s", 2, BENCH_MAIN },
    { "read_gb_s_after", "after", 2, BENCH_MAIN },
    { "roofline_tokens_s", "limit/s", 2, BENCH_MAIN },
    { "share", "share", 3, BENCH_MAIN },
    { "nvfp4_mb", "NVFP4", 2, BENCH_PARTS },
    { "plain_mb", "other weights", 2, BENCH_PARTS },
    { "head_mb", "head", 2, BENCH_PARTS },
    { "state_mb", "GDN state", 2, BENCH_PARTS },
    { "kv_mb", "KV", 2, BENCH_PARTS },
    { "draft_mb", "drafting", 2, BENCH_PARTS },
    { "head_candidates", "exact head rows", 1, BENCH_PARTS },
};

typedef struct bench {
    const bench_options *o;
    bench_model m;
    session plain, drafting; /* speculation is switched off for good in a session that once decoded without */
    bench_report report;
    int32_t *ids;
    int64_t simulated[ENGINE_MAX_DRAFT + 1]; /* rounds, by depth */
    volatile const int *cancel;
} bench;

typedef struct measured {
    bench_series rate;
    double context, yield;
} measured;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)ctx, (void)id, (void)logprob, (void)top, (void)values;
    return true;
}

/* Rounds spread evenly over the distribution (a golden-ratio sequence), so that few of them have its mean already. */
int bench_simulate(const bench_options *o, int64_t *count, int depth) {
    const double start = rng_uniform((uint64_t)o->seed, 0, 0, 1);
    const double u = fmod(start + 0.6180339887498949 * (double)count[depth]++, 1);
    double p = 1;
    int n = 0;
    while (n < depth && u < (p *= o->accept[n])) n++;
    return n;
}

static int simulated(void *ctx, int depth) {
    bench *b = ctx;
    return bench_simulate(b->o, b->simulated, depth);
}

static session *session_for(bench *b, int depth) { return depth > 0 ? &b->drafting : &b->plain; }

/* Known tokens of `s`, and made-up ones behind them up to `to`, go through the model; then `tokens` are generated. */
static bool generate(bench *b, session *s, int depth, int to, int tokens, gen_result *r, err *e) {
    memcpy(b->ids, s->tokens, (size_t)s->n_tokens * sizeof *b->ids);
    const int n = s->n_tokens > to ? s->n_tokens : to;
    bench_prompt(b->ids, s->n_tokens, n, b->m.g->n.real_vocab);
    const gen_options opt = { .max_tokens = tokens,
                              .depth = depth,
                              .sampling = { .top_p = 1, .repetition = 1 },
                              .on_token = on_token,
                              .simulate = b->o->has_accept && depth > 0 ? simulated : NULL,
                              .ctx = b,
                              .cancel = b->cancel };
    return session_set(s, b->ids, n, e) && session_generate(s, &opt, r, e);
}

static bool measure(bench *b, measured *m, int depth, bool count, err *e) {
    session *s = session_for(b, depth);
    const int before = s->n_tokens;
    gen_result r;
    if (!generate(b, s, depth, 0, b->o->tokens, &r, e)) return false;
    if (!count || *b->cancel) return true;
    /* Whole rounds: a limit may cut the last one, but its work is done. */
    const double made = depth > 0 ? (double)(r.rounds + r.accepted) : r.output_tokens - 1;
    m->rate.v[m->rate.n++] = made / r.decode_seconds;
    m->context += 0.5 * (before + s->n_tokens) / b->o->repeat;
    m->yield += (depth > 0 ? gen_accept_length(&r) : 1) / b->o->repeat;
    return true;
}

static void add_row(bench *b, measured *m, int at, int depth, double candidates, double before, double after) {
    bench_table *t = &b->report.table;
    const bench_spread rate = bench_spread_of(&m->rate);
    const bench_round round = {
        .sequences = 1, .depth = depth, .yield = m->yield, .context = m->context, .candidates = candidates
    };
    const bench_bytes bytes = bench_bytes_of(b->m.g, &round);
    const double total = bench_bytes_total(&bytes), limit = (before + after) / 2 / total;
    const double row[] = { at,
                           depth,
                           m->context,
                           rate.median,
                           rate.min,
                           rate.max,
                           m->yield,
                           total / 1e6,
                           before / 1e9,
                           after / 1e9,
                           limit,
                           rate.median / limit,
                           bytes.nvfp4 / 1e6,
                           bytes.plain / 1e6,
                           bytes.head / 1e6,
                           bytes.state / 1e6,
                           bytes.kv / 1e6,
                           bytes.draft / 1e6,
                           b->m.g->n.heads.top ? candidates : (double)NAN };
    for (size_t i = 0; i < ARRAY_LEN(row); i++) bench_number(t, row[i]);
}

double bench_candidates(const engine *g, head_counts from, head_counts to) {
    const double rows = (double)(to.rows - from.rows);
    return rows > 0
               ? ((double)(to.candidates - from.candidates) + (double)(to.full - from.full) * g->n.real_vocab) / rows
               : 0;
}

head_counts bench_head_counts(const engine *g) {
    const head_counts none = { 0 };
    return g->n.heads.top ? head_counted(g->n.heads.top) : none;
}

/* Depths in turn, so that a slow moment of the machine meets all of them. */
static bool frontier(bench *b, int at, err *e) {
    const bench_list *depths = &b->o->depth;
    engine *g = b->m.g;
    measured all[BENCH_MAX_LIST] = { { .context = 0 } };
    gen_result r;
    for (int i = 0; i < 2; i++) {
        session *s = i ? &b->drafting : &b->plain;
        if (s->g && !generate(b, s, i, at > 0 ? at : 16, 2, &r, e)) return false;
    }
    const double before = bench_read(&b->m.reader);
    const head_counts start = bench_head_counts(g);
    for (int i = -1; i < b->o->repeat && !*b->cancel; i++)
        for (int d = 0; d < depths->n && !*b->cancel; d++)
            if (!measure(b, &all[d], depths->v[d], i >= 0, e)) return false;
    const head_counts end = bench_head_counts(g);
    const double after = bench_read(&b->m.reader);
    for (int d = 0; d < depths->n && !*b->cancel; d++)
        add_row(b, &all[d], at, depths->v[d], bench_candidates(g, start, end), before, after);
    return true;
}

static bool open_sessions(bench *b, err *e) {
    const bench_list *d = &b->o->depth;
    bool plain = false, drafting = false;
    for (int i = 0; i < d->n; i++) *(d->v[i] > 0 ? &drafting : &plain) = true;
    if (drafting && !b->m.g->n.has_mtp)
        return fail(e, ERR_INPUT, "E-BENCH-DRAFT", "%s: no draft head (use --depth 0)", b->m.name);
    return (!plain || session_open(&b->plain, b->m.g, false, e)) &&
           (!drafting || session_open(&b->drafting, b->m.g, true, e));
}

/* Positions that the measurements may fill. */
static int context_of(const bench_options *o) {
    int most = 16;
    for (int i = 0; i < o->frontier.n; i++)
        if (o->frontier.v[i] > most) most = o->frontier.v[i];
    return most + o->frontier.n * ((o->repeat + 1) * o->depth.n * (o->tokens + ENGINE_MAX_DRAFT + 1) + 16) + 64;
}

void bench_note_made_up(bench_report *r, const bench_options *o) {
    if (o->has_accept)
        bench_note(r, "acceptance is simulated: drafts count as accepted with probability %g, %g, %g ..., seed %lld",
                   o->accept[0], o->accept[1], o->accept[2], (long long)o->seed);
    if (o->synthetic >= 0)
        bench_note(r,
                   "weights are made up; logits are as flat as chance makes them, so the screened head computes more "
                   "exact rows than for a trained model");
}

static bool run(bench *b, err *e) {
    const bench_options *o = b->o;
    const int ctx = context_of(o);
    if (!bench_model_open(&b->m, o, ctx, 2, e)) return false;
    b->ids = xmalloc((size_t)ctx * sizeof *b->ids);
    if (!open_sessions(b, e)) return false;
    bench_machine(&b->report, b->m.name, b->m.g->o);
    bench_note_made_up(&b->report, o);
    for (int i = 0; i < o->frontier.n && !*b->cancel; i++)
        if (!frontier(b, o->frontier.v[i], e)) return false;
    static const bench_plot plot = { .title = "Decoding, one sequence",
                                     .x = "tokens of context",
                                     .y = "tokens per second",
                                     .group_col = 1,
                                     .group2_col = -1,
                                     .x_col = 0,
                                     .y_col = 3,
                                     .lo_col = 4,
                                     .hi_col = 5,
                                     .ref_col = 10 };
    return bench_report_write(&b->report, o, e) && bench_plot_write(&b->report.table, &plot, o, e);
}

int bench_decode(const bench_options *o, err *e) {
    if (o->batch.n > 0) return bench_batch(o, e);
    bench b = { .o = o,
                .report = { .what = "decode", .table = { .cols = columns, .n_cols = ARRAY_LEN(columns) } },
                .cancel = cmd_interrupt() };
    const bool ok = run(&b, e);
    const int code = ok && *b.cancel ? 130 : 0;
    session_close(&b.plain);
    session_close(&b.drafting);
    bench_model_close(&b.m);
    bench_report_free(&b.report);
    free(b.ids);
    return code;
}
