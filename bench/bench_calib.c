/* bench_calib - calibration beside a plain prefill of the same tokens.
 *
 * Both go over the same sequences with the same chunk, one after the other, --runs times in turn: the prefill through the
 * trunk as generation does it, calibration layer by layer with every activation's maximum taken (no draft head). The time is
 * processor time of all threads less what opening the model takes, so neighbours matter little; medians and spread of the
 * ratio are printed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/args.h"
#include "base/clock.h"
#include "base/log.h"
#include "quant/calib.h"

#include "report.h"

typedef struct taken {
    double cpu, wall;
} taken;

static taken now(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (taken){ (double)u.ru_utime.tv_sec + (double)u.ru_utime.tv_usec * 1e-6, clock_seconds() };
}

static taken since(taken from) {
    const taken t = now();
    return (taken){ t.cpu - from.cpu, t.wall - from.wall };
}

static void fill(calib_data *d, int samples, int seq, int vocab) {
    int32_t *ids = xmalloc((size_t)seq * sizeof *ids);
    uint64_t s = 88172645463325252u;
    for (int i = 0; i < samples; i++) {
        for (int k = 0; k < seq; k++) {
            s ^= s << 13, s ^= s >> 7, s ^= s << 17;
            ids[k] = (int32_t)(s % (uint64_t)vocab);
        }
        calib_data_add(d, ids, (size_t)seq);
    }
    free(ids);
}

static bool prefill(taken *t, engine *g, const calib_data *d, int chunk, err *e) {
    const taken start = now();
    for (int i = 0; i < d->n; i++) {
        const int n = (int)d->v[i].n;
        state_reset(&g->st, 0);
        for (int at = 0; at < n; at += chunk) {
            const int rows = n - at < chunk ? n - at : chunk;
            const ops_span span = { .rows = rows, .pos0 = at };
            forward_trunk(&g->sc, &g->st, d->v[i].v + at, NULL, &span, 1);
            if (!g->o->sync(g->o, e)) return false;
        }
    }
    *t = since(start);
    return true;
}

static bool measure(const char *dir, int samples, int seq, int threads, int runs, err *e) {
    enum { CHUNK = 512, MAX_RUNS = 99 };
    const calib_options o = { .ops = { .threads = threads, .isa = ISA_COUNT }, .chunk = CHUNK };
    const engine_options eo = { .ops = o.ops, .ctx = seq, .chunk = CHUNK, .kv = KV_CACHE_F32, .no_text = true };
    engine *g;
    calib_data one = { 0 }, d = { 0 };
    const int32_t zero = 0;
    double ratio[MAX_RUNS];
    if (!engine_open(&g, dir, &eo, e)) return false;
    calib_data_add(&one, &zero, 1);
    fill(&d, samples, seq, g->config.vocab);
    bool ok = true;
    for (int r = 0; ok && r <= runs; r++) { /* the first round warms up */
        taken plain, open, calib;
        amax_table t;
        calib_report report;
        ok = prefill(&plain, g, &d, CHUNK, e);
        taken start = now();
        ok = ok && calib_run(&t, &report, dir, &one, &o, e);
        open = since(start);
        if (ok) amax_free(&t), calib_report_free(&report);
        start = now();
        ok = ok && calib_run(&t, &report, dir, &d, &o, e);
        calib = since(start);
        if (!ok || r == 0) {
            if (ok) amax_free(&t), calib_report_free(&report);
            continue;
        }
        amax_free(&t), calib_report_free(&report);
        ratio[r - 1] = (calib.cpu - open.cpu) / plain.cpu;
        printf("prefill %.3f s (%.0f tokens/s), calibration %.3f s (%.0f tokens/s), opening %.3f s; ratio %.3f, wall "
               "%.3f\n",
               plain.cpu, (double)d.tokens / plain.wall, calib.cpu - open.cpu,
               (double)d.tokens / (calib.wall - open.wall), open.cpu, ratio[r - 1],
               (calib.wall - open.wall) / plain.wall);
    }
    if (ok) {
        qsort(ratio, (size_t)runs, sizeof *ratio, by_value);
        printf("%d x %d tokens: calibration takes %.3f of a prefill's processor time (%.3f..%.3f)\n", samples, seq,
               ratio[runs / 2], ratio[0], ratio[runs - 1]);
    }
    calib_data_free(&one);
    calib_data_free(&d);
    engine_close(g);
    return ok;
}

int main(int argc, char **argv) {
    int samples = 8, seq = 512, threads = 0, runs = 5;
    const arg_opt opts[] = {
        { .type = ARG_INT,
          .name = "samples",
          .meta = "N",
          .dst = &samples,
          .lo = 1,
          .hi = 100000,
          .help = "sequences" },
        { .type = ARG_INT, .name = "seq", .meta = "N", .dst = &seq, .lo = 2, .hi = 1 << 20, .help = "tokens of each" },
        { .type = ARG_INT, .name = "threads", .meta = "N", .dst = &threads, .lo = 0, .hi = 256, .help = "0: all" },
        { .type = ARG_INT, .name = "runs", .meta = "N", .dst = &runs, .lo = 1, .hi = 99, .help = "measured rounds" },
    };
    const arg_spec spec = { .usage = "bench_calib [options] MODEL",
                            .about = "Calibration beside a plain prefill of the same tokens.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .min_positional = 1,
                            .max_positional = 1 };
    arg_strings pos = { 0 };
    err e = { 0 };
    bool help = false;
    bool ok = args_parse(&spec, argc, argv, &pos, &help, &e);
    if (ok && help) {
        print_help(&spec);
        arg_strings_free(&pos);
        return 0;
    }
    log_set_level(0);
    ok = ok && measure(pos.v[0], samples, seq, threads, runs, &e);
    if (!ok) fprintf(stderr, "bench_calib: %s: %s\n", e.id, e.msg);
    arg_strings_free(&pos);
    return err_exit_code(e.kind);
}
