/* The loop serves each request the tokens it would get alone from session_generate, whatever else is being served: random
 * arrivals, budgets, slots, depths, priorities that preempt, neighbours that are cancelled or poisoned, BF16 and NVFP4. The
 * seed of the mixes is printed; SEED=n takes another, MIXES=n runs more. */
#include <unistd.h>

#include "base/clock.h"
#include "quant/configs.h"
#include "quant/quantize.h"

#include "lib/scratch.h"
#include "lib/toytok.h"
#include "support.h"

enum { CASES = 12, MOST_TOKENS = 48, MOST_PROMPT = 90, CTX = 160 };

static uint64_t seed;
static char *folder, *nvfp4;
static int mixes = 6;

static uint32_t below(rnd *r, uint32_t n) { return rnd_below(r, n); }

/* ---- the requests and what they yield alone ---- */

typedef struct tokens {
    int32_t v[CTX + 1];
    double logprob[CTX + 1];
    int n;
} tokens;

typedef struct wanted {
    int32_t prompt[MOST_PROMPT];
    int n_prompt, max_tokens, stop, choices, logprobs;
    sampler_params sampling;
    tokens alone[2]; /* by choice */
    gen_finish finish[2];
} wanted;

static bool collect(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)top, (void)values;
    tokens *t = ctx;
    assert_in_range(t->n, 0, CTX);
    t->logprob[t->n] = logprob;
    t->v[t->n++] = id;
    return true;
}

static void run_alone(engine *g, wanted *w, int choice) {
    err e = { 0 };
    session s;
    gen_result r;
    gen_options o = { .max_tokens = w->max_tokens,
                      .sampling = w->sampling,
                      .stop_ids = &w->stop,
                      .n_stop_ids = 1,
                      .logprobs = w->logprobs,
                      .on_token = collect,
                      .ctx = &w->alone[choice] };
    o.sampling.choice += (uint32_t)choice;
    OK(session_open(&s, g, false, &e));
    OK(session_set(&s, w->prompt, w->n_prompt, &e));
    OK(session_generate(&s, &o, &r, &e));
    w->finish[choice] = r.finish;
    session_close(&s);
}

static const sampler_bias bias[] = { { 17, 2 }, { 300, -100 } };
static const int32_t banned[] = { 17, 198 };

static sampler_params random_sampling(rnd *r) {
    sampler_params p = { .seed = rnd_next(r) };
    if (below(r, 3) == 0) return p; /* greedy */
    p.temperature = 0.5 + below(r, 8) / 10.0;
    p.top_k = below(r, 2) ? 20 : 0;
    p.top_p = below(r, 2) ? 0.9 : 1;
    if (below(r, 3) == 0) p.presence = 1.5, p.repetition = 1.1;
    if (below(r, 4) == 0) p.bias = bias, p.n_bias = 2;
    if (below(r, 4) == 0) p.stop_ids = banned, p.n_stop_ids = 2, p.min_tokens = 10;
    return p;
}

static void make_wanted(engine *g, wanted *w, rnd *r) {
    *w = (wanted){ .n_prompt = 1 + (int)below(r, MOST_PROMPT),
                   .max_tokens = below(r, 12) == 0 ? 0 : 1 + (int)below(r, MOST_TOKENS),
                   .stop = (int)below(r, 1544),
                   .choices = below(r, 4) == 0 ? 2 : 1,
                   .logprobs = below(r, 4) == 0 ? 3 : 0,
                   .sampling = random_sampling(r) };
    for (int i = 0; i < w->n_prompt; i++) w->prompt[i] = (int32_t)below(r, 1544);
    for (int i = 0; i < w->choices; i++) run_alone(g, w, i);
    if (w->alone[0].n > 8 && below(r, 2)) { /* a stop id that is met, inside a round perhaps */
        w->stop = w->alone[0].v[4 + below(r, 4)];
        for (int i = 0; i < w->choices; i++) w->alone[i].n = 0, run_alone(g, w, i);
    }
}

/* ---- a request in the loop ---- */

typedef struct ticket {
    const wanted *w;
    tokens got[2];
    int ended;
    gen_result result[2];
    err fault[2];
    int leave_after; /* tokens after which it is cancelled; 0 = never */
    loop *l;
    uint64_t handle;
    int at; /* step of its arrival */
} ticket;

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    ticket *t = ctx;
    collect(&t->got[choice], id, logprob, top, values);
    if (t->leave_after && t->got[0].n + t->got[1].n >= t->leave_after) loop_cancel(t->l, t->handle);
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    ticket *t = ctx;
    t->result[choice] = *r;
    t->fault[choice] = *e;
    t->ended++;
}

static void submit(loop *l, ticket *t, const wanted *w, int depth, int priority) {
    err e = { 0 };
    t->w = w;
    t->l = l;
    const loop_request q = { .prompt = w->prompt,
                             .n_prompt = w->n_prompt,
                             .sampling = w->sampling,
                             .choices = w->choices,
                             .max_tokens = w->max_tokens,
                             .depth = depth,
                             .priority = priority,
                             .stop_ids = &w->stop,
                             .n_stop_ids = 1,
                             .logprobs = w->logprobs,
                             .on_token = on_token,
                             .on_done = on_done,
                             .ctx = t };
    OK(loop_submit(l, &t->handle, &q, &e));
}

static void check(const ticket *t, const char *what) {
    assert_int_equal(t->ended, t->w->choices);
    for (int c = 0; c < t->w->choices; c++) {
        const tokens *want = &t->w->alone[c], *got = &t->got[c];
        if (t->fault[c].id) fail_msg("%s: %s: %s", what, t->fault[c].id, t->fault[c].msg);
        const bool all = !t->leave_after;
        if (all && (got->n != want->n || t->result[c].finish != t->w->finish[c]))
            fail_msg("%s: %d tokens, alone %d; ended by %d, alone by %d", what, got->n, want->n, t->result[c].finish,
                     t->w->finish[c]);
        assert_true(got->n <= want->n);
        if (memcmp(got->v, want->v, (size_t)got->n * sizeof got->v[0]) != 0) fail_msg("%s changed the tokens", what);
        if (memcmp(got->logprob, want->logprob, (size_t)got->n * sizeof got->logprob[0]) != 0)
            fail_msg("%s changed log-probabilities", what);
    }
}

static engine *open_engine(const char *dir, int slots, int chunk, int threads) {
    err e = { 0 };
    engine *g;
    const engine_options o = {
        .ctx = CTX, .slots = slots, .chunk = chunk, .no_text = true, .ops = { .threads = threads, .isa = ISA_COUNT }
    };
    OK(engine_open(&g, dir, &o, &e));
    return g;
}

static void finish(loop *l, int most) {
    int steps = 0;
    while (loop_step(l)) assert_true(steps++ < most);
}

/* ---- random mixes ---- */

static loop_stats one_mix(engine *g, const wanted *all, int count, rnd *r, int budget) {
    enum { TICKETS = 40 };
    err e = { 0 };
    loop *l;
    const loop_options o = { .budget_rows = budget, .depth = (int)below(r, 6), .fixed_depth = below(r, 3) > 0 };
    const int n = 8 + (int)below(r, TICKETS - 8), spread = (int)below(r, 120), levels = 1 + (int)below(r, 3);
    ticket *t = calloc(TICKETS, sizeof *t);
    OK(loop_open(&l, g, &o, &e));
    for (int i = 0; i < n; i++) {
        t[i].at = (int)below(r, (uint32_t)spread + 1);
        if (below(r, 4) == 0) t[i].leave_after = 1 + (int)below(r, 20);
    }
    for (int step = 0, left = n; left > 0; step++) {
        for (int i = 0; i < n; i++)
            if (t[i].at == step) {
                submit(l, &t[i], &all[below(r, (uint32_t)count)], (int)below(r, 5) - 1,
                       (int)below(r, (uint32_t)levels));
                left--;
            }
        loop_step(l);
    }
    finish(l, 100000);
    const loop_stats s = loop_counted(l);
    loop_close(l);
    int choices = 0;
    for (int i = 0; i < n; i++) {
        check(&t[i], "a mix");
        choices += t[i].w->choices;
    }
    assert_int_equal(s.running + s.waiting, 0);
    assert_int_equal(s.submitted, choices);
    assert_int_equal(s.finished + s.cancelled, choices);
    free(t);
    return s;
}

static void mix_of(const char *dir, int rounds) {
    rnd r = rnd_open(seed);
    wanted *all = calloc(CASES, sizeof *all);
    engine *g = open_engine(dir, 1, 0, 2);
    for (int i = 0; i < CASES; i++) make_wanted(g, &all[i], &r);
    engine_close(g);
    loop_stats sum = { 0 };
    static const int slots[] = { 1, 2, 5, 12, 32 }, chunks[] = { 1, 7, 64, 256 };
    for (int i = 0; i < rounds; i++) {
        const int n = slots[below(&r, ARRAY_LEN(slots))], chunk = chunks[below(&r, ARRAY_LEN(chunks))];
        g = open_engine(dir, n, chunk, 1 + (int)below(&r, 3));
        for (int k = 0; k < 2; k++) {
            const loop_stats s = one_mix(g, all, CASES, &r, k == 0 ? 0 : 1 + (int)below(&r, 80));
            sum.preempted += s.preempted;
            sum.shared += s.shared;
            sum.cancelled += s.cancelled;
            sum.accepted += s.accepted;
            sum.output_tokens += s.output_tokens;
        }
        engine_close(g);
    }
    printf("%lld tokens, %lld accepted, %lld preempted, %lld shared, %lld cancelled\n", (long long)sum.output_tokens,
           (long long)sum.accepted, (long long)sum.preempted, (long long)sum.shared, (long long)sum.cancelled);
    assert_true(sum.preempted > 0 && sum.shared > 0 && sum.cancelled > 0 && sum.accepted > 0);
    free(all);
}

static void test_mixes(void **state) {
    (void)state;
    mix_of(TINY, is_emulated() ? 2 : mixes);
}

static void test_mixes_nvfp4(void **state) {
    (void)state;
    mix_of(nvfp4, is_emulated() ? 1 : (mixes + 2) / 3);
}

static void export_model(const char *dir) {
    err e = { 0 };
    ckpt files;
    model_config config;
    weights w;
    plan p;
    quantize_result r;
    amax_table amax;
    char *partial;
    const recipe uniform = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_BF16 };
    const provenance from = { .calibration = "oracle", .mtp_scales = "", .arith = "cuda", .algorithm = "max" };
    OK(amax_load(&amax, ORACLE "nvfp4/modelopt-cuda/amax.safetensors", &e));
    OK(ckpt_open(&files, TINY, &e));
    OK(config_read(&config, files.config, files.generation, TINY, &e));
    OK(weights_bind(&w, &files, &config, &e));
    OK(plan_make(&p, &files, &config, &uniform, 10000000000u, &e));
    const quantize_options o = { .arith = ARITH_CUDA, .amax = &amax, .threads = 1, .isa = ISA_COUNT, .ranks = 1 };
    OK(quantize_shards(&r, &partial, &p, dir, &o, &e));
    OK(configs_write(partial, &p, &from, &e));
    OK(quantize_commit(partial, dir, &e));
    free(partial);
    quantize_result_free(&r);
    amax_free(&amax);
    plan_free(&p);
    weights_free(&w);
    ckpt_close(&files);
}

static int setup(void **state) {
    (void)state;
    log_set_level(0);
    folder = scratch_new();
    nvfp4 = scratch_path(folder, "nvfp4");
    export_model(nvfp4);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    free(nvfp4);
    scratch_free(folder);
    return 0;
}

int main(void) {
    const char *s = getenv("SEED"), *m = getenv("MIXES");
    seed = s ? strtoull(s, NULL, 0) : 20261202;
    if (m) mixes = atoi(m);
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_mixes), cmocka_unit_test(test_mixes_nvfp4) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
