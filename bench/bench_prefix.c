/* bench_prefix - what the prefix cache is worth, and what it costs: seconds to the first token of a prompt that is new, that
 * was said before, and that goes on from one that was said before; and a new prompt beside an engine without the cache.
 *
 * All four run in turn, round by round, with new tokens in each round. */
#include <string.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "report.h"

enum { MOST = 99, MORE = 64, MOST_LENGTHS = 8 };

typedef struct setup {
    engine *g;
    loop *l;
} setup;

typedef struct asked {
    double first; /* clock of the first token */
    bool done;
    err fault;
} asked;

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top_ids,
                     const double *top_logprobs) {
    (void)choice, (void)id, (void)logprob, (void)top_ids, (void)top_logprobs;
    ((asked *)ctx)->first = clock_seconds();
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    (void)choice, (void)r;
    asked *a = ctx;
    a->done = true;
    a->fault = *e;
}

/* *first: to the first token. *whole: until the request is over and what it leaves is left. */
static bool ask(const setup *s, const int32_t *ids, int n, double *first, double *whole, err *e) {
    asked a = { 0 };
    const loop_request q = { .prompt = ids,
                             .n_prompt = n,
                             .max_tokens = 1,
                             .depth = -1,
                             .sampling = { .top_p = 1, .repetition = 1 },
                             .on_token = on_token,
                             .on_done = on_done,
                             .ctx = &a };
    const double t0 = clock_seconds();
    if (!loop_submit(s->l, NULL, &q, e)) return false;
    while (!a.done) (void)loop_step(s->l);
    *whole = clock_seconds() - t0;
    *first = a.first - t0;
    *e = a.fault;
    return e->id == NULL;
}

static bool open_one(setup *s, const char *dir, int threads, int ctx, bool keeps, err *e) {
    const engine_options eo = { .ops = { .device = "cpu", .threads = threads, .isa = ISA_COUNT },
                                .slots = 1,
                                .ctx = ctx,
                                .prefix_kv_bytes = keeps ? 512 << 20 : 0,
                                .prefix_state_bytes = keeps ? 512 << 20 : 0,
                                .no_text = true };
    const loop_options lo = { .depth = 2 };
    return engine_open(&s->g, dir, &eo, e) && loop_open(&s->l, s->g, &lo, e);
}

static void row(int n, const char *what, double *v, int rounds, double ratio) {
    const double m = median(v, rounds);
    printf("| %d | %s | %.1f | %.1f..%.1f | %.3f |\n", n, what, m * 1e3, v[0] * 1e3, v[rounds - 1] * 1e3, ratio);
}

static double ratio_of(const double *a, const double *b, int rounds) {
    double v[MOST];
    for (int i = 0; i < rounds; i++) v[i] = a[i] / b[i];
    return median(v, rounds);
}

static bool one_length(const setup *with, const setup *without, int n, int rounds, err *e) {
    double cold[MOST], hit[MOST], more[MOST], plain[MOST], whole[MOST], plain_whole[MOST], unused;
    int32_t *ids = xmalloc((size_t)(n + MORE) * sizeof *ids);
    const int64_t vocab = with->g->n.real_vocab;
    const loop_stats was = loop_counted(with->l);
    bool ok = true;
    for (int i = -1; i < rounds && ok; i++) {
        const int at = i < 0 ? 0 : i;
        for (int k = 0; k < n + MORE; k++)
            ids[k] = (int32_t)((k * 2654435761u + (unsigned)(i + 2) * 40503u + (unsigned)n * 977u) % vocab);
        ok = ask(with, ids, n, &cold[at], &whole[at], e) && ask(without, ids, n, &plain[at], &plain_whole[at], e) &&
             ask(with, ids, n, &hit[at], &unused, e) && ask(with, ids, n + MORE, &more[at], &unused, e);
    }
    free(ids);
    if (!ok) return false;
    const loop_stats now = loop_counted(with->l);
    const double r_hit = ratio_of(hit, cold, rounds), r_more = ratio_of(more, cold, rounds),
                 r_whole = ratio_of(whole, plain_whole, rounds);
    row(n, "new", cold, rounds, 1);
    row(n, "said before", hit, rounds, r_hit);
    row(n, "64 tokens behind one said before", more, rounds, r_more);
    row(n, "new, until its entries are left / the same without a cache", whole, rounds, r_whole);
    fprintf(stderr, "%d tokens: %lld hits, %lld tokens saved, %lld entries left\n", n,
            (long long)(now.prefix_hits - was.prefix_hits), (long long)(now.prefix_tokens - was.prefix_tokens),
            (long long)(now.prefix_made - was.prefix_made));
    return true;
}

static int read_lengths(int *v, const char *text) {
    int n = 0;
    for (char *end; n < MOST_LENGTHS && *text; text = *end ? end + 1 : end) {
        v[n] = (int)strtol(text, &end, 10);
        if (end == text || v[n] < 1 || v[n] > 1 << 17) return 0;
        n++;
    }
    return n;
}

int main(int argc, char **argv) {
    int rounds = 5, threads = 0, lengths[MOST_LENGTHS];
    const char *list = "1024,4096";
    const arg_opt opts[] = {
        { .type = ARG_INT, .name = "rounds", .dst = &rounds, .lo = 1, .hi = MOST, .help = "of all four" },
        { .type = ARG_INT, .name = "threads", .dst = &threads, .lo = 0, .hi = 1024, .help = "0: all CPUs" },
        { .type = ARG_STR, .name = "prompt", .meta = "LIST", .dst = &list, .help = "prompt lengths" },
    };
    const arg_spec spec = { .usage = "bench_prefix [options] MODEL_DIR",
                            .about = "Time to the first token with and without a hit of the prefix cache.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .min_positional = 1,
                            .max_positional = 1 };
    arg_strings pos = { 0 };
    bool help;
    err e = { 0 };
    setup with = { 0 }, without = { 0 };
    if (!args_parse(&spec, argc, argv, &pos, &help, &e))
        return fprintf(stderr, "bench_prefix: %s: %s\n", e.id, e.msg), err_exit_code(e.kind);
    if (help) return print_help(&spec), 0;
    const int n = read_lengths(lengths, list);
    if (n == 0) return fprintf(stderr, "bench_prefix: --prompt '%s': no list of lengths\n", list), 2;
    int most = 0;
    for (int i = 0; i < n; i++) most = lengths[i] > most ? lengths[i] : most;
    bool ok = open_one(&with, pos.v[0], threads, most + 2 * MORE, true, &e) &&
              open_one(&without, pos.v[0], threads, most + 2 * MORE, false, &e);
    if (ok) puts("| prompt | | ms | spread | to a new one, median of ratios |\n|---|---|---|---|---|");
    for (int i = 0; i < n && ok; i++) ok = one_length(&with, &without, lengths[i], rounds, &e);
    if (!ok) fprintf(stderr, "bench_prefix: %s: %s\n", e.id, e.msg);
    setup *all[] = { &with, &without };
    for (int i = 0; i < 2; i++) {
        loop_close(all[i]->l);
        engine_close(all[i]->g);
    }
    arg_strings_free(&pos);
    return ok ? 0 : err_exit_code(e.kind);
}
