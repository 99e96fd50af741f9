/* nibble bench decode --batch: many sequences through the loop that serves requests. Batches and depths run in turn, round
 * by round, so that ratios compare what ran side by side. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cmd/bench.h"

enum { CTX_ROOM = 16, LEAST_STEPS = 8, MOST_CASES = BENCH_MAX_LIST * (BENCH_MAX_LIST + 1), ADAPTIVE = -1 };
static const double LONG_SECONDS = 1; /* a run ends after this and LEAST_STEPS, when its tokens take longer */

static const bench_column columns[] = {
    { "batch", "batch", 0, BENCH_MAIN | BENCH_PARTS },
    { "drafts", "drafts", -1, BENCH_MAIN | BENCH_PARTS },
    { "tokens_s", "tokens/s", 2, BENCH_MAIN },
    { "tokens_s_min", "min", 2, BENCH_MAIN },
    { "tokens_s_max", "max", 2, BENCH_MAIN },
    { "to_batch_1", "/ first", 2, BENCH_MAIN },
    { "to_off", "/ off", 3, BENCH_MAIN },
    { "depth", "depth", 2, BENCH_MAIN },
    { "accept_length", "accept", 2, BENCH_MAIN },
    { "experts", "experts", 1, BENCH_MAIN },
    { "mb_per_token", "MB/token", 2, BENCH_MAIN },
    { "read_gb_s_before", "read GB/s", 2, BENCH_MAIN },
    { "read_gb_s_after", "after", 2, BENCH_MAIN },
    { "roofline_tokens_s", "limit/s", 2, BENCH_MAIN },
    { "share", "share", 3, BENCH_MAIN },
    { "sched_us", "sched us", 1, BENCH_MAIN },
    { "allocations", "allocs", 2, BENCH_MAIN },
    { "steps", "steps", 0, BENCH_HIDDEN },
    { "context", "context", 0, BENCH_PARTS },
    { "nvfp4_mb", "NVFP4", 2, BENCH_PARTS },
    { "plain_mb", "other weights", 2, BENCH_PARTS },
    { "head_mb", "head", 2, BENCH_PARTS },
    { "state_mb", "GDN state", 2, BENCH_PARTS },
    { "kv_mb", "KV", 2, BENCH_PARTS },
    { "draft_mb", "drafting", 2, BENCH_PARTS },
    { "head_candidates", "exact head rows", 1, BENCH_PARTS },
};

typedef struct one_case { /* sums over the rounds that count */
    int batch, depth;     /* ADAPTIVE: as the loop chooses */
    double rate[BENCH_MAX_REPEAT];
    double seconds, tokens, steps, rounds, drafted, layers, experts, own_seconds, context, allocations;
    head_counts head;
} one_case;

typedef struct bench {
    const bench_options *o;
    bench_model m;
    loop *l;
    bench_report report;
    one_case cases[MOST_CASES];
    int n_cases, most_batch, deepest;
    int open, started; /* requests of this run: not over; with a first token */
    int64_t tokens;
    err fault;
    int64_t simulated[ENGINE_MAX_DRAFT + 1];
    volatile const int *cancel;
} bench;

typedef struct stream {
    bench *b;
    bool started;
    uint64_t handle;
} stream;

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    stream *s = ctx;
    (void)choice, (void)id, (void)logprob, (void)top, (void)values;
    if (!s->started) s->b->started++;
    s->started = true;
    s->b->tokens++;
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *fault) {
    stream *s = ctx;
    (void)choice, (void)r;
    s->b->open--;
    if (fault->id && !s->b->fault.id) s->b->fault = *fault;
}

static int simulated(void *ctx, int depth) {
    bench *b = ctx;
    return bench_simulate(b->o, b->simulated, depth);
}

/* Different prompts, since the same ones would go to the same experts. */
static bool submit(bench *b, stream *s, int n, err *e) {
    const int length = b->o->frontier.v[0] > 0 ? b->o->frontier.v[0] : CTX_ROOM;
    int32_t *ids = xmalloc((size_t)length * sizeof *ids);
    bool ok = true;
    for (int i = 0; i < n && ok; i++) {
        bench_prompt(ids, 0, length, b->m.g->n.real_vocab);
        for (int k = 0; k < length; k++) ids[k] = (int32_t)(((int64_t)ids[k] + 7919 * i) % b->m.g->n.real_vocab);
        s[i].b = b;
        const loop_request q = { .prompt = ids,
                                 .n_prompt = length,
                                 .sampling = { .top_p = 1, .repetition = 1 },
                                 .depth = -1,
                                 .on_token = on_token,
                                 .on_done = on_done,
                                 .ctx = &s[i] };
        ok = loop_submit(b->l, &s[i].handle, &q, e);
        b->open += ok;
    }
    free(ids);
    return ok;
}

static void finish(bench *b, const stream *s, int n) {
    for (int i = 0; i < n; i++)
        if (s[i].b) loop_cancel(b->l, s[i].handle);
    while (b->open > 0) (void)loop_step(b->l);
}

/* Whole steps: enough for the wanted tokens of each, or long enough. */
static void timed_steps(bench *b, one_case *c, int round) {
    const int64_t blocks = alloc_count(), tokens = b->tokens;
    const head_counts head = bench_head_counts(b->m.g);
    const loop_stats was = loop_counted(b->l);
    const double t0 = clock_seconds();
    double seconds = 0;
    int steps = 0;
    while (b->open == c->batch && !*b->cancel && b->tokens - tokens < (int64_t)c->batch * b->o->tokens &&
           (steps < LEAST_STEPS || seconds < LONG_SECONDS)) {
        (void)loop_step(b->l);
        seconds = clock_seconds() - t0;
        steps++;
    }
    if (round < 0 || steps == 0) return;
    const loop_stats now = loop_counted(b->l);
    const head_counts end = bench_head_counts(b->m.g);
    const double made = (double)(b->tokens - tokens);
    c->rate[round] = made / seconds;
    c->seconds += seconds;
    c->tokens += made;
    c->steps += steps;
    c->drafted += (double)(now.drafted - was.drafted);
    for (int i = 0; i < LOOP_ROWS_CLASSES; i++) {
        c->layers += (double)(now.moe_layers[i] - was.moe_layers[i]);
        c->experts += (double)(now.moe_experts[i] - was.moe_experts[i]);
    }
    c->own_seconds += (now.step_seconds - was.step_seconds) - (now.work_seconds - was.work_seconds);
    c->allocations += (double)(alloc_count() - blocks);
    c->context += made / c->batch / 2 / b->o->repeat;
    c->head.rows += end.rows - head.rows;
    c->head.candidates += end.candidates - head.candidates;
    c->head.full += end.full - head.full;
}

static bool run_case(bench *b, one_case *c, int round, err *e) {
    stream *s = xcalloc((size_t)c->batch, sizeof *s);
    b->started = b->open = 0;
    b->tokens = 0;
    loop_set_depth(b->l, c->depth == ADAPTIVE ? b->deepest : c->depth, c->depth != ADAPTIVE);
    const bool ok = submit(b, s, c->batch, e);
    while (ok && b->started < c->batch && b->open == c->batch) (void)loop_step(b->l);
    for (int i = 0; i < 2; i++) (void)loop_step(b->l); /* the first rounds differ from those that follow */
    if (ok) timed_steps(b, c, round);
    finish(b, s, c->batch);
    free(s);
    if (ok && b->fault.id) return fail(e, b->fault.kind, b->fault.id, "%s", b->fault.msg);
    return ok;
}

/* ---- the table ---- */

static const one_case *find(const bench *b, int batch, int depth) {
    for (int i = 0; i < b->n_cases; i++)
        if (b->cases[i].batch == batch && b->cases[i].depth == depth) return &b->cases[i];
    return NULL;
}

/* The median of the ratios of runs of the same round. */
static double ratio(const bench *b, const one_case *c, const one_case *to) {
    bench_series s = { .n = 0 };
    if (!to) return NAN;
    for (int i = 0; i < b->o->repeat; i++) s.v[s.n++] = c->rate[i] / to->rate[i];
    return bench_spread_of(&s).median;
}

static void add_row(bench *b, const one_case *c, double before, double after) {
    bench_table *t = &b->report.table;
    bench_series rates = { .n = b->o->repeat };
    memcpy(rates.v, c->rate, sizeof rates.v);
    const bench_spread rate = bench_spread_of(&rates);
    const double rounds = c->steps * c->batch;
    const head_counts zero = { 0 };
    const bench_round r = { .sequences = c->batch,
                            .depth = c->drafted / rounds,
                            .yield = c->tokens / rounds,
                            .context = c->context + (b->o->frontier.v[0] > 0 ? b->o->frontier.v[0] : CTX_ROOM),
                            .candidates = bench_candidates(b->m.g, zero, c->head),
                            .experts = c->layers > 0 ? c->experts / c->layers : 0 };
    const bench_bytes bytes = bench_bytes_of(b->m.g, &r);
    const double total = bench_bytes_total(&bytes), limit = (before + after) / 2 / total;
    char drafts[16] = "adaptive";
    if (c->depth != ADAPTIVE) snprintf(drafts, sizeof drafts, "%d", c->depth);
    bench_number(t, c->batch);
    bench_text(t, drafts);
    const double row[] = { rate.median,
                           rate.min,
                           rate.max,
                           ratio(b, c, find(b, b->o->batch.v[0], c->depth)),
                           ratio(b, c, find(b, c->batch, 0)),
                           r.depth,
                           r.yield,
                           c->layers > 0 ? r.experts : (double)NAN,
                           total / 1e6,
                           before / 1e9,
                           after / 1e9,
                           limit,
                           rate.median / limit,
                           c->own_seconds / c->steps * 1e6,
                           c->allocations / c->steps,
                           c->steps,
                           r.context,
                           bytes.nvfp4 / 1e6,
                           bytes.plain / 1e6,
                           bytes.head / 1e6,
                           bytes.state / 1e6,
                           bytes.kv / 1e6,
                           bytes.draft / 1e6,
                           b->m.g->n.heads.top ? r.candidates : (double)NAN };
    for (size_t i = 0; i < ARRAY_LEN(row); i++) bench_number(t, row[i]);
}

/* ---- all of it ---- */

static void list_cases(bench *b) {
    const bench_options *o = b->o;
    for (int i = 0; i < o->depth.n; i++)
        if (o->depth.v[i] > b->deepest) b->deepest = o->depth.v[i];
    for (int i = 0; i < o->batch.n; i++) {
        if (o->batch.v[i] > b->most_batch) b->most_batch = o->batch.v[i];
        for (int d = 0; d < o->depth.n + o->adaptive; d++)
            b->cases[b->n_cases++] =
                (one_case){ .batch = o->batch.v[i], .depth = d < o->depth.n ? o->depth.v[d] : ADAPTIVE };
    }
}

static bool open(bench *b, err *e) {
    const bench_options *o = b->o;
    const int ctx = o->frontier.v[0] + o->tokens + CTX_ROOM + 8 * (ENGINE_MAX_DRAFT + 1) * LEAST_STEPS;
    if (!bench_model_open(&b->m, o, ctx, b->most_batch, e)) return false;
    if (b->deepest > 0 && !b->m.g->n.has_mtp)
        return fail(e, ERR_INPUT, "E-BENCH-DRAFT", "%s: no draft head (use --depth 0)", b->m.name);
    const loop_options lo = {
        .depth = b->deepest, .fixed_depth = true, .simulate = o->has_accept ? simulated : NULL, .simulate_ctx = b
    };
    return loop_open(&b->l, b->m.g, &lo, e);
}

static bool run(bench *b, err *e) {
    const bench_options *o = b->o;
    list_cases(b);
    if (!open(b, e)) return false;
    bench_machine(&b->report, b->m.name, b->m.g->o);
    bench_note_made_up(&b->report, o);
    const double before = bench_read(&b->m.reader);
    for (int round = -1; round < o->repeat; round++)
        for (int i = 0; i < b->n_cases && !*b->cancel; i++)
            if (!run_case(b, &b->cases[i], round, e)) return false;
    if (*b->cancel) return true;
    const double after = bench_read(&b->m.reader);
    for (int i = 0; i < b->n_cases; i++) add_row(b, &b->cases[i], before, after);
    static const bench_plot plot = { .title = "Decoding, many sequences",
                                     .x = "sequences",
                                     .y = "tokens per second",
                                     .group_col = 1,
                                     .group2_col = -1,
                                     .x_col = 0,
                                     .y_col = 2,
                                     .lo_col = 3,
                                     .hi_col = 4,
                                     .ref_col = 13 };
    return bench_report_write(&b->report, o, e) && bench_plot_write(&b->report.table, &plot, o, e);
}

int bench_batch(const bench_options *o, err *e) {
    bench *b = xcalloc(1, sizeof *b);
    b->o = o;
    b->report = (bench_report){ .what = "batch", .table = { .cols = columns, .n_cols = ARRAY_LEN(columns) } };
    b->cancel = cmd_interrupt();
    const bool ok = run(b, e);
    const int code = ok && *b->cancel ? 130 : 0;
    loop_close(b->l);
    bench_model_close(&b->m);
    bench_report_free(&b->report);
    free(b);
    return code;
}
