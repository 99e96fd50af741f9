/* nibble bench prefill: prompt tokens per second by prompt length. */
#include <stdlib.h>

#include "cmd/bench.h"

static const bench_column columns[] = {
    { "prompt_tokens", "prompt", 0, BENCH_MAIN },  { "tokens_s", "tokens/s", 1, BENCH_MAIN },
    { "tokens_s_min", "min", 1, BENCH_MAIN },      { "tokens_s_max", "max", 1, BENCH_MAIN },
    { "gmac_s", "GMAC/s", 1, BENCH_MAIN },         { "read_gb_s_before", "read GB/s", 2, BENCH_MAIN },
    { "read_gb_s_after", "after", 2, BENCH_MAIN },
};

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)ctx, (void)id, (void)logprob, (void)top, (void)values;
    return true;
}

static bool one_length(bench_model *m, const bench_options *o, session *s, int n, const int32_t *ids, bench_table *t,
                       volatile const int *cancel, err *e) {
    bench_series rate = { .n = 0 };
    const double before = bench_read(&m->reader);
    for (int i = -1; i < o->repeat && !*cancel; i++) {
        gen_result r;
        const gen_options opt = {
            .max_tokens = 1, .sampling = { .top_p = 1, .repetition = 1 }, .on_token = on_token, .cancel = cancel
        };
        session_reset(s);
        if (!session_set(s, ids, n, e) || !session_generate(s, &opt, &r, e)) return false;
        if (i >= 0) rate.v[rate.n++] = n / r.prompt_seconds;
    }
    if (*cancel) return true;
    const double after = bench_read(&m->reader);
    const bench_spread v = bench_spread_of(&rate);
    const double row[] = { n, v.median, v.min, v.max, v.median * bench_macs(m->g) / 1e9, before / 1e9, after / 1e9 };
    for (size_t i = 0; i < ARRAY_LEN(row); i++) bench_number(t, row[i]);
    return true;
}

static bool run(bench_model *m, const bench_options *o, bench_report *report, session *s, volatile const int *cancel,
                err *e) {
    int most = 0;
    for (int i = 0; i < o->prompt.n; i++)
        if (o->prompt.v[i] > most) most = o->prompt.v[i];
    if (!bench_model_open(m, o, most + 16, 1, e) || !session_open(s, m->g, false, e)) return false;
    bench_machine(report, m->name, m->g->o);
    int32_t *ids = xmalloc((size_t)most * sizeof *ids);
    bench_prompt(ids, 0, most, m->g->n.real_vocab);
    bool ok = true;
    for (int i = 0; i < o->prompt.n && ok && !*cancel; i++)
        ok = one_length(m, o, s, o->prompt.v[i], ids, &report->table, cancel, e);
    free(ids);
    static const bench_plot plot = { .title = "Processing a prompt",
                                     .x = "prompt tokens",
                                     .y = "tokens per second",
                                     .group_col = -1,
                                     .group2_col = -1,
                                     .x_col = 0,
                                     .y_col = 1,
                                     .lo_col = 2,
                                     .hi_col = 3,
                                     .ref_col = -1,
                                     .bars = true };
    return ok && bench_report_write(report, o, e) && bench_plot_write(&report->table, &plot, o, e);
}

int bench_prefill(const bench_options *o, err *e) {
    bench_model m = { 0 };
    session s = { 0 };
    bench_report report = { .what = "prefill", .table = { .cols = columns, .n_cols = ARRAY_LEN(columns) } };
    volatile const int *cancel = cmd_interrupt();
    const bool ok = run(&m, o, &report, &s, cancel, e);
    session_close(&s);
    bench_model_close(&m);
    bench_report_free(&report);
    return ok && *cancel ? 130 : 0;
}
