/* The bare loop: N requests at once with callbacks that do nothing, tokens per second. What `bench_serve.py` compares the
 * server with: the same model, prompt and sampling, without HTTP, JSON, text or a second thread. */
#include <string.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "report.h"

typedef struct state {
    int open;
    int64_t tokens;
    double first; /* when every request had a token */
    int started, n;
} state;

typedef struct one {
    state *s;
    bool started;
} one;

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top_ids,
                     const double *top_logprobs) {
    one *o = ctx;
    (void)choice, (void)id, (void)logprob, (void)top_ids, (void)top_logprobs;
    if (!o->started) {
        o->started = true;
        if (++o->s->started == o->s->n) o->s->first = clock_seconds();
    }
    if (o->s->first > 0) o->s->tokens++;
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    (void)choice, (void)r, (void)e;
    ((one *)ctx)->s->open--;
}

static bool run(loop *l, const id_list *prompt, int n, int max_tokens, double *rate, err *e) {
    state s = { .open = n, .n = n };
    one *all = xcalloc((size_t)n, sizeof *all);
    for (int i = 0; i < n; i++) {
        all[i].s = &s;
        const loop_request q = { .prompt = prompt->v,
                                 .n_prompt = (int)prompt->n,
                                 .max_tokens = max_tokens,
                                 .depth = -1,
                                 .on_token = on_token,
                                 .on_done = on_done,
                                 .ctx = &all[i] };
        if (!loop_submit(l, NULL, &q, e)) return false;
    }
    while (s.open > 0) loop_step(l);
    *rate = (double)s.tokens / (clock_seconds() - s.first);
    free(all);
    return true;
}

int main(int argc, char **argv) {
    const char *text = "Tom has 3 apples and buys 4. How many?";
    int n = 1, max_tokens = 128, repeat = 3, threads = 0, depth = 2;
    const arg_opt opts[] = {
        { .type = ARG_INT, .name = "requests", .dst = &n, .lo = 1, .hi = 4096, .help = "at the same time" },
        { .type = ARG_INT, .name = "max-tokens", .dst = &max_tokens, .lo = 2, .hi = 1 << 20, .help = "of each" },
        { .type = ARG_INT,
          .name = "repeat",
          .dst = &repeat,
          .lo = 1,
          .hi = 1000,
          .help = "runs, the median is printed" },
        { .type = ARG_INT, .name = "threads", .dst = &threads, .lo = 0, .hi = 1024, .help = "0: all CPUs" },
        { .type = ARG_INT, .name = "spec", .dst = &depth, .lo = 0, .hi = ENGINE_MAX_DRAFT, .help = "drafts per round" },
    };
    const arg_spec spec = { .usage = "bench_loop [options] MODEL_DIR",
                            .about = "Tokens per second of the loop alone.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .min_positional = 1,
                            .max_positional = 1 };
    arg_strings pos = { 0 };
    bool help;
    err e = { 0 };
    engine *g = NULL;
    loop *l = NULL;
    id_list prompt = { 0 };
    double rates[1000];
    bool ok = args_parse(&spec, argc, argv, &pos, &help, &e);
    if (ok && help) return print_help(&spec), 0;
    const engine_options eo = { .ops = { .device = "cpu", .threads = threads, .isa = ISA_COUNT },
                                .slots = n,
                                .ctx = 512 + max_tokens,
                                .need_text = true };
    const loop_options lo = { .depth = depth };
    ok = ok && engine_open(&g, pos.v[0], &eo, &e) && loop_open(&l, g, &lo, &e) &&
         tokenizer_encode(g->tok, &prompt, str_of(text), NULL, &e);
    for (int i = 0; ok && i < repeat; i++) ok = run(l, &prompt, n, max_tokens, &rates[i], &e);
    if (ok) printf("%.3f\n", median(rates, repeat));
    loop_close(l);
    engine_close(g);
    ids_free(&prompt);
    arg_strings_free(&pos);
    if (!ok) fprintf(stderr, "bench_loop: %s: %s\n", e.id, e.msg);
    return ok ? 0 : err_exit_code(e.kind);
}
