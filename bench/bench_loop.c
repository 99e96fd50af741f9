/* The bare loop: N requests at once with callbacks that do nothing, tokens per second while all generate. What
 * `bench_serve.py` compares the server with: the same model, prompts, sampling and options, without HTTP, JSON, text or
 * another thread. The prompts end differently: rows in step with one another would read the same experts, and in the
 * server not all begin in the same step. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "report.h"

typedef struct state {
    int64_t tokens;
    int open, waiting; /* not over; without a first token */
} state;

typedef struct one {
    state *s;
    bool started;
} one;

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top_ids,
                     const double *top_logprobs) {
    one *o = ctx;
    (void)choice, (void)id, (void)logprob, (void)top_ids, (void)top_logprobs;
    o->s->waiting -= !o->started;
    o->started = true;
    o->s->tokens++;
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    (void)choice, (void)r, (void)e;
    ((one *)ctx)->s->open--;
}

static bool make_prompts(id_list **out, const engine *g, int n, err *e) {
    id_list *v = *out = xcalloc((size_t)n, sizeof *v);
    for (int i = 0; i < n; i++) {
        char text[80];
        /* Different last letters: a made model goes on by the last token, and rows in step read the same experts. */
        snprintf(text, sizeof text, "Tom has 3 apples and buys 4. How many has %c", 'A' + i % 26);
        for (int k = 0; k < i / 26 && k < 16; k++) strcat(text, "ab");
        if (!tokenizer_encode(g->tok, &v[i], str_of(text), NULL, e)) return false;
    }
    return true;
}

/* The rate from the end of the step that gave the last one its first token to the end of that in which the first one ended. */
static bool run(loop *l, const id_list *prompts, int n, int max_tokens, double *rate, err *e) {
    state s = { .open = n, .waiting = n };
    one *all = xcalloc((size_t)n, sizeof *all);
    for (int i = 0; i < n; i++) {
        all[i].s = &s;
        const loop_request q = { .prompt = prompts[i].v,
                                 .n_prompt = (int)prompts[i].n,
                                 .max_tokens = max_tokens,
                                 .depth = -1,
                                 .on_token = on_token,
                                 .on_done = on_done,
                                 .ctx = &all[i] };
        if (!loop_submit(l, NULL, &q, e)) return false;
    }
    while (s.waiting > 0 && s.open == n) loop_step(l);
    const int64_t before = s.tokens;
    const double t0 = clock_seconds();
    while (s.open == n) loop_step(l);
    *rate = (double)(s.tokens - before) / (clock_seconds() - t0);
    while (s.open > 0) loop_step(l);
    free(all);
    return true;
}

/* One run for each line of standard input; also the experts and layers counted so far. */
static bool run_lines(loop *l, const id_list *prompts, int n, int max_tokens, err *e) {
    double rate;
    for (int c; (c = getchar()) != EOF;) {
        if (c != '\n') continue;
        if (!run(l, prompts, n, max_tokens, &rate, e)) return false;
        const loop_stats s = loop_counted(l);
        int64_t read = 0, layers = 0;
        for (int i = 0; i < LOOP_ROWS_CLASSES; i++) {
            read += s.moe_experts[i];
            layers += s.moe_layers[i];
        }
        printf("%.3f %lld %lld\n", rate, (long long)read, (long long)layers);
        fflush(stdout);
    }
    return true;
}

int main(int argc, char **argv) {
    int n = 1, max_tokens = 128, repeat = 3, threads = 0, depth = 2, chunk = 0;
    bool lines = false;
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
        { .type = ARG_INT, .name = "chunk", .dst = &chunk, .lo = 0, .hi = 1 << 16, .help = "prompt rows per pass" },
        { .type = ARG_FLAG, .name = "lines", .dst = &lines, .help = "one run for each line of standard input" },
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
    id_list *prompts = NULL;
    double rates[1000];
    bool ok = args_parse(&spec, argc, argv, &pos, &help, &e);
    if (ok && help) return print_help(&spec), 0;
    const engine_options eo = { .ops = { .device = "cpu", .threads = threads, .isa = ISA_COUNT },
                                .slots = n,
                                .ctx = 512 + max_tokens,
                                .chunk = chunk,
                                .need_text = true };
    const loop_options lo = { .depth = depth };
    ok = ok && engine_open(&g, pos.v[0], &eo, &e) && loop_open(&l, g, &lo, &e) && make_prompts(&prompts, g, n, &e);
    if (ok && lines) ok = run_lines(l, prompts, n, max_tokens, &e);
    for (int i = 0; ok && !lines && i < repeat; i++) ok = run(l, prompts, n, max_tokens, &rates[i], &e);
    if (ok && !lines) printf("%.3f\n", median(rates, repeat));
    loop_close(l);
    engine_close(g);
    for (int i = 0; prompts && i < n; i++) ids_free(&prompts[i]);
    free(prompts);
    arg_strings_free(&pos);
    if (!ok) fprintf(stderr, "bench_loop: %s: %s\n", e.id, e.msg);
    return ok ? 0 : err_exit_code(e.kind);
}
