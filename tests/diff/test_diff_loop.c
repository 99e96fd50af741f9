/* The loop serves each request the tokens it would get alone from session_generate, whatever else is being served: random
 * arrivals, budgets, slots, depths, priorities that preempt, neighbours that are cancelled or poisoned, BF16 and NVFP4. The
 * seed of the mixes is printed; SEED=n takes another, MIXES=n runs more. */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"

#include "export.h"
#include "lib/scratch.h"
#include "lib/toytok.h"

enum { CASES = 12, MOST_TOKENS = 48, MOST_PROMPT = 90, CTX = 160 };

static uint64_t seed;
static char *folder, *nvfp4;
static int mixes = 4;

/* ---- a rule: what may follow depends on all that was accepted or is ahead ---- */

typedef struct chain {
    uint64_t at[2]; /* by choice */
    int vocab;
} chain;

static uint64_t chain_step(uint64_t h, int32_t id) { return (h ^ (uint64_t)id) * 0x9e3779b97f4a7c15u ^ h >> 29; }

static bool chain_allows(uint64_t h, int32_t id) { return (chain_step(h, id) >> 32) % 6 == 0; }

static bool chain_mask(void *ctx, int choice, const int32_t *ahead, int n, uint64_t *allowed, err *e) {
    const chain *c = ctx;
    uint64_t h = c->at[choice];
    (void)e;
    for (int i = 0; i < n; i++) {
        assert_true(chain_allows(h, ahead[i]));
        h = chain_step(h, ahead[i]);
    }
    memset(allowed, 0, rule_words(c->vocab) * sizeof *allowed);
    for (int32_t i = 0; i < c->vocab; i++) allowed[i / 64] |= (uint64_t)chain_allows(h, i) << i % 64;
    return true;
}

static void chain_accept(void *ctx, int choice, int32_t id) {
    chain *c = ctx;
    assert_true(chain_allows(c->at[choice], id));
    c->at[choice] = chain_step(c->at[choice], id);
}

/* ---- the requests and what they yield alone ---- */

typedef struct tokens {
    int32_t v[CTX + 1];
    double logprob[CTX + 1];
    int n;
} tokens;

typedef struct wanted {
    int32_t prompt[MOST_PROMPT];
    int n_prompt, max_tokens, stop, choices, logprobs;
    bool ruled;
    int vocab;
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
    chain c = { .vocab = g->n.real_vocab };
    if (w->ruled) o.rule = (token_rule){ chain_mask, chain_accept, &c };
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
    if (rnd_below(r, 3) == 0) p.presence = 1, p.frequency = 0.4, p.repetition = 1.1;
    if (rnd_below(r, 3) == 0) return p; /* greedy */
    p.temperature = 0.5 + rnd_below(r, 8) / 10.0;
    p.top_k = rnd_below(r, 2) ? 20 : 0;
    p.top_p = rnd_below(r, 2) ? 0.9 : 1;
    if (rnd_below(r, 4) == 0) p.bias = bias, p.n_bias = 2;
    if (rnd_below(r, 4) == 0) p.stop_ids = banned, p.n_stop_ids = 2, p.min_tokens = 10;
    return p;
}

static void make_wanted(engine *g, wanted *w, rnd *r) {
    *w = (wanted){ .n_prompt = 1 + (int)rnd_below(r, MOST_PROMPT),
                   .max_tokens = rnd_below(r, 12) == 0 ? 0 : 1 + (int)rnd_below(r, MOST_TOKENS),
                   .stop = (int)rnd_below(r, 1544),
                   .choices = rnd_below(r, 4) == 0 ? 2 : 1,
                   .logprobs = rnd_below(r, 4) == 0 ? 3 : 0,
                   .ruled = rnd_below(r, 3) == 0,
                   .vocab = g->n.real_vocab,
                   .sampling = random_sampling(r) };
    for (int i = 0; i < w->n_prompt; i++) w->prompt[i] = (int32_t)rnd_below(r, 1544);
    for (int i = 0; i < w->choices; i++) run_alone(g, w, i);
    if (w->alone[0].n > 8 && rnd_below(r, 2)) { /* a stop id that is met, inside a round perhaps */
        w->stop = w->alone[0].v[4 + rnd_below(r, 4)];
        for (int i = 0; i < w->choices; i++) w->alone[i].n = 0, run_alone(g, w, i);
    }
}

/* ---- a request in the loop ---- */

typedef struct ticket {
    const wanted *w;
    tokens got[2];
    chain rule;
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

static token_rule rule_of(ticket *t) {
    t->rule = (chain){ .vocab = t->w->vocab };
    return t->w->ruled ? (token_rule){ chain_mask, chain_accept, &t->rule } : (token_rule){ 0 };
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
                             .rule = rule_of(t),
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

/* heads: 0 the full head, 1 the screened one, 2 a draft head that knows few tokens besides. */
static engine *open_engine(const char *dir, int slots, int chunk, int threads, int heads) {
    err e = { 0 };
    engine *g;
    const engine_options o = { .ctx = CTX,
                               .slots = slots,
                               .chunk = chunk,
                               .no_text = true,
                               .heads = { .mode = heads > 0 ? HEAD_SCREENED : HEAD_FULL,
                                          .draft_rows = heads > 1 ? 600 : DRAFT_HEAD_FULL },
                               .ops = { .threads = threads, .isa = ISA_COUNT } };
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
    const loop_options o = { .budget_rows = budget, .depth = (int)rnd_below(r, 6), .fixed_depth = rnd_below(r, 3) > 0 };
    const int n = 8 + (int)rnd_below(r, TICKETS - 8), spread = (int)rnd_below(r, 120),
              levels = 1 + (int)rnd_below(r, 3);
    ticket *t = calloc(TICKETS, sizeof *t);
    OK(loop_open(&l, g, &o, &e));
    for (int i = 0; i < n; i++) {
        t[i].at = (int)rnd_below(r, (uint32_t)spread + 1);
        if (rnd_below(r, 4) == 0) t[i].leave_after = 1 + (int)rnd_below(r, 20);
    }
    for (int step = 0, left = n; left > 0; step++) {
        for (int i = 0; i < n; i++)
            if (t[i].at == step) {
                submit(l, &t[i], &all[rnd_below(r, (uint32_t)count)], (int)rnd_below(r, 5) - 1,
                       (int)rnd_below(r, (uint32_t)levels));
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
    engine *g = open_engine(dir, 1, 0, 1, 0);
    for (int i = 0; i < CASES; i++) make_wanted(g, &all[i], &r);
    engine_close(g);
    loop_stats sum = { 0 };
    static const int slots[] = { 1, 2, 5, 12, 32 }, chunks[] = { 1, 7, 64, 256 }, threads[] = { 1, 1, 1, 2, 5 };
    for (int i = 0; i < rounds; i++) {
        const int n = slots[rnd_below(&r, ARRAY_LEN(slots))], chunk = chunks[rnd_below(&r, ARRAY_LEN(chunks))];
        g = open_engine(dir, n, chunk, threads[rnd_below(&r, 5)], (int)rnd_below(&r, 3));
        for (int k = 0; k < 2; k++) {
            const loop_stats s = one_mix(g, all, CASES, &r, k == 0 ? 0 : 1 + (int)rnd_below(&r, 80));
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
    assert_true(sum.output_tokens > 0); /* what else occurs depends on the seed; tests below force it */
    free(all);
}

static void test_mixes(void **state) {
    (void)state;
    mix_of(TINY, is_short() ? 2 : mixes);
}

static void test_mixes_nvfp4(void **state) {
    (void)state;
    mix_of(nvfp4, is_short() ? 1 : (mixes + 2) / 3);
}

/* ---- one by one ---- */

static wanted *few(int count, rnd *r) {
    wanted *all = calloc((size_t)count, sizeof *all);
    engine *g = open_engine(TINY, 1, 0, 1, 0);
    for (int i = 0; i < count; i++) make_wanted(g, &all[i], r);
    engine_close(g);
    return all;
}

static loop *open_loop(engine *g, const loop_options *o) {
    err e = { 0 };
    loop *l;
    OK(loop_open(&l, g, o, &e));
    return l;
}

/* Penalties, bias and banned stop ids leave the screened head in use, and the full head's tokens. */
static void test_edits_are_screened(void **state) {
    (void)state;
    enum { N = 12 };
    rnd r = rnd_open(seed + 9);
    wanted all[N];
    const sampler_params kinds[] = {
        { .repetition = 1.3 },
        { .presence = 1.5, .frequency = 0.5 },
        { .temperature = 1, .top_k = 64, .top_p = 1, .presence = 2, .repetition = 0.8, .seed = 3 },
        { .bias = bias, .n_bias = 2 },
        { .temperature = 0.7, .top_k = 20, .top_p = 0.9, .bias = bias, .n_bias = 2, .repetition = 1.1, .seed = 4 },
        { .temperature = 1, .top_k = 5, .top_p = 1, .stop_ids = banned, .n_stop_ids = 2, .min_tokens = 9, .seed = 5 },
    };
    engine *g = open_engine(TINY, 1, 0, 1, 0);
    for (int i = 0; i < N; i++) {
        all[i] = (wanted){ .n_prompt = 1 + (int)rnd_below(&r, MOST_PROMPT),
                           .max_tokens = 30,
                           .stop = -1,
                           .choices = 1,
                           .sampling = kinds[i % (int)ARRAY_LEN(kinds)] };
        for (int k = 0; k < all[i].n_prompt; k++) all[i].prompt[k] = (int32_t)rnd_below(&r, 1544);
        run_alone(g, &all[i], 0);
    }
    engine_close(g);
    for (int depth = 0; depth < 4; depth += 3) {
        g = open_engine(TINY, 5, 32, 2, 2);
        loop *l = open_loop(g, &(loop_options){ .depth = depth, .fixed_depth = true });
        ticket t[N] = { 0 };
        int64_t drawn = 0;
        for (int i = 0; i < N; i++) submit(l, &t[i], &all[i], -1, 0);
        finish(l, 10000);
        for (int i = 0; i < N; i++) check(&t[i], "edits through the screened head"), drawn += t[i].got[0].n;
        assert_true(head_counted(g->n.heads.top).rows >= drawn);
        loop_close(l);
        engine_close(g);
    }
}

/* The embedding of one id becomes NaN in this process's private copy of the page. */
static void poison(const engine *g, int32_t id) {
    const size_t row = (size_t)g->config.hidden * 2, page = 4096;
    uint16_t *at = (uint16_t *)(uintptr_t)g->w.embed.data + (size_t)id * row / 2;
    const uintptr_t first = (uintptr_t)at / page * page;
    assert_int_equal(mprotect((void *)first, (uintptr_t)at + row - first, PROT_READ | PROT_WRITE), 0);
    for (size_t i = 0; i < row / 2; i++) at[i] = 0x7fc0;
}

static void test_poison(void **state) {
    (void)state;
    enum { BAD = 1543, N = 10 };
    rnd r = rnd_open(seed + 1);
    wanted *all = few(N, &r), bad = { .n_prompt = 30, .max_tokens = 10, .stop = -1, .choices = 2 };
    for (int i = 0; i < bad.n_prompt; i++) bad.prompt[i] = 100 + i;
    wanted good = bad;
    bad.prompt[17] = BAD;
    for (int heads = 0; heads < 2; heads++) {
        engine *g = open_engine(TINY, 3, 16, 2, heads);
        for (int i = 0; i < 2 && heads == 0; i++) run_alone(g, &good, i); /* then as many slots are free as before */
        poison(g, BAD);
        loop *l = open_loop(g, &(loop_options){ .depth = 3 });
        ticket t[N] = { 0 }, first = { 0 }, second = { 0 }, after = { 0 };
        int sound = 0;
        for (int i = 0; i < N; i++) {
            bool clean = true;
            for (int k = 0; k < all[i].n_prompt; k++) clean = clean && all[i].prompt[k] != BAD;
            if (clean) submit(l, &t[i], &all[i], -1, 0), sound++;
            if (i == 1) submit(l, &first, &bad, -1, 0);
            if (i == 5) submit(l, &second, &bad, -1, 0);
        }
        finish(l, 10000);
        submit(l, &after, &good, -1, 0);
        finish(l, 10000);
        const ticket *failed[] = { &first, &second };
        for (size_t i = 0; i < 2; i++)
            for (int c = 0; c < 2; c++) {
                assert_int_equal(failed[i]->ended, 2);
                assert_string_equal(failed[i]->fault[c].id, "E-ENGINE-NONFINITE");
                assert_int_equal(failed[i]->got[c].n, 0);
            }
        for (int i = 0; i < N; i++)
            if (t[i].w) check(&t[i], "a poisoned neighbour");
        check(&after, "a poisoned predecessor");
        assert_true(sound > N / 2);
        assert_int_equal(loop_counted(l).failed, 4);
        loop_close(l);
        engine_close(g);
    }
    free(all);
}

/* Low priorities hold all slots; a higher one takes one in the middle of a prompt, another in the middle of an answer. */
static void preempt_twice(engine *g, int slots, const wanted *low, wanted *all, int n) {
    loop *l = open_loop(g, &(loop_options){ .depth = 2, .fixed_depth = true });
    ticket *t = calloc((size_t)(slots + n), sizeof *t), *newest = &t[slots - 1];
    for (int i = 0; i < slots; i++) submit(l, &t[i], low, -1, 0);
    loop_step(l);
    assert_int_equal(loop_counted(l).running, slots);
    assert_int_equal(newest->got[0].n, 0);
    submit(l, &t[slots], &all[0], -1, 1);
    loop_step(l);
    assert_true(loop_counted(l).preempted >= 1); /* a choice each */
    while (newest->got[0].n < 4) assert_true(loop_step(l));
    for (int i = 1; i < n; i++) submit(l, &t[slots + i], &all[i], -1, i);
    loop_step(l);
    assert_true(loop_counted(l).preempted >= 2 && !newest->ended);
    finish(l, 10000);
    for (int i = 0; i < slots + n; i++) check(&t[i], "preemption");
    loop_close(l);
    free(t);
}

/* One slot, taken from a low priority by a higher one in the prompt and in the middle of the answer; two choices that share. */
static void test_preemption_and_sharing(void **state) {
    (void)state;
    enum { N = 6 };
    rnd r = rnd_open(seed + 4);
    wanted *all = few(N, &r);
    wanted low = { .n_prompt = 60, .max_tokens = 40, .stop = -1, .choices = 1 };
    for (int i = 0; i < low.n_prompt; i++) low.prompt[i] = (int32_t)rnd_below(&r, 1544);
    engine *first = open_engine(TINY, 1, 0, 1, 0);
    run_alone(first, &low, 0);
    engine_close(first);
    for (int slots = 1; slots <= 2; slots++) {
        engine *g = open_engine(TINY, slots, 8, 1, 0);
        preempt_twice(g, slots, &low, all, N);
        engine_close(g);
    }
    engine *alone = open_engine(TINY, 1, 0, 1, 0), *g = open_engine(TINY, 2, 8, 1, 0);
    wanted w = {
        .n_prompt = 40, .max_tokens = 30, .stop = -1, .choices = 2, .sampling = { .temperature = 1, .top_p = 1 }
    };
    for (int i = 0; i < w.n_prompt; i++) w.prompt[i] = (int32_t)rnd_below(&r, 1544);
    for (int i = 0; i < 2; i++) run_alone(alone, &w, i);
    loop *l = open_loop(g, &(loop_options){ .depth = 2, .fixed_depth = true });
    ticket t = { 0 };
    submit(l, &t, &w, -1, 0);
    finish(l, 1000);
    check(&t, "a shared prompt");
    const loop_stats s = loop_counted(l);
    assert_int_equal(s.shared, 1);
    assert_int_equal(t.result[1].cached_tokens, w.n_prompt - 1);
    assert_int_equal(s.prompt_rows, w.n_prompt);
    assert_true(memcmp(t.got[0].v, t.got[1].v, sizeof t.got[0].v) != 0);
    loop_close(l);
    engine_close(g);
    engine_close(alone);
    free(all);
}

/* Pure decoding: nothing allocates. What a step costs besides the model (50 us are allowed) is printed: times are not asserted,
 * since sanitizers, emulators and busy machines stretch them. */
static void test_steady_state(void **state) {
    (void)state;
    enum { N = 16, WARM = 40, STEPS = 50 };
    engine *g = open_engine(TINY, N, 0, 1, 0);
    for (int depth = 0; depth <= 2; depth += 2) {
        loop *l = open_loop(g, &(loop_options){ .depth = depth, .fixed_depth = true });
        wanted w = { .n_prompt = 4, .stop = -1, .choices = 1, .sampling = { .temperature = 1, .top_p = 0.95 } };
        ticket t[N] = { 0 };
        for (int i = 0; i < N; i++) {
            w.sampling.seed = (uint64_t)i;
            if (i == 3) w.sampling.presence = 1;
            submit(l, &t[i], &w, -1, 0);
        }
        for (int i = 0; i < WARM - 30 * (depth > 0); i++) assert_true(loop_step(l));
        const loop_stats s0 = loop_counted(l);
        const int64_t blocks = alloc_count();
        double least = 1;
        for (int i = 0; i < STEPS - 20 * (depth > 0); i++) {
            const loop_stats a = loop_counted(l);
            assert_true(loop_step(l));
            const loop_stats b = loop_counted(l);
            const double own = b.step_seconds - a.step_seconds - (b.work_seconds - a.work_seconds);
            if (own < least) least = own;
        }
        assert_int_equal(alloc_count() - blocks, 0);
        const loop_stats s1 = loop_counted(l);
        assert_int_equal(s1.running, N);
        assert_int_equal(s1.prompt_rows, s0.prompt_rows);
        printf("a step of %d sequences besides the model: %.1f us at best, %.1f on average\n", N, least * 1e6,
               (s1.step_seconds - s0.step_seconds - s1.work_seconds + s0.work_seconds) / (double)(s1.steps - s0.steps) *
                   1e6);
        loop_close(l);
    }
    engine_close(g);
}

/* What ends a request before its time. */
static void test_deadline_and_cancel(void **state) {
    (void)state;
    err e = { 0 };
    engine *g = open_engine(TINY, 1, 8, 1, 0);
    loop *l = open_loop(g, &(loop_options){ .depth = 2, .max_queue = 3 });
    const wanted w = { .n_prompt = 20, .stop = -1, .choices = 1 };
    ticket running = { 0 }, waiting = { 0 }, late = { 0 }, queued = { 0 }, full = { 0 };
    submit(l, &running, &w, -1, 0);
    submit(l, &waiting, &w, -1, 0);
    submit(l, &queued, &w, -1, 0);
    loop_request q = { .prompt = w.prompt,
                       .n_prompt = 20,
                       .deadline_seconds = clock_seconds() - 1,
                       .on_token = on_token,
                       .on_done = on_done,
                       .ctx = &late };
    late.w = &w;
    OK(loop_submit(l, NULL, &q, &e));
    q.ctx = &full;
    assert_false(loop_submit(l, NULL, &q, &e));
    assert_string_equal(e.id, "E-ENGINE-QUEUE");
    loop_step(l);
    assert_int_equal(late.ended, 1);
    assert_int_equal(late.result[0].finish, GEN_DEADLINE);
    loop_cancel(l, waiting.handle);
    loop_cancel(l, 12345);
    loop_step(l);
    assert_int_equal(waiting.ended, 1);
    assert_int_equal(waiting.result[0].finish, GEN_CANCEL);
    while (running.got[0].n < 3) loop_step(l);
    loop_cancel(l, running.handle);
    loop_step(l);
    assert_int_equal(running.result[0].finish, GEN_CANCEL);
    assert_int_equal(running.ended, 1);
    loop_close(l); /* ends what is left */
    assert_int_equal(queued.ended, 1);
    assert_int_equal(queued.result[0].finish, GEN_CANCEL);
    assert_int_equal(full.ended, 0);
    engine_close(g);
}

static void refused(loop *l, const loop_request *q, const char *id) {
    err e = { 0 };
    assert_false(loop_submit(l, NULL, q, &e));
    assert_string_equal(e.id, id);
}

static void test_refusals(void **state) {
    (void)state;
    err e = { 0 };
    engine *g = open_engine(TINY, 2, 8, 1, 0);
    loop *l = open_loop(g, &(loop_options){ .depth = 2 }), *other;
    assert_false(loop_open(&other, g, &(loop_options){ .depth = 0 }, &e));
    assert_string_equal(e.id, "E-ENGINE-SLOTS");
    int32_t prompt[CTX] = { 0 };
    const loop_request good = { .prompt = prompt, .n_prompt = 3, .on_token = on_token, .on_done = on_done };
    loop_request q = good;
    q.n_prompt = 0, refused(l, &q, "E-ENGINE-EMPTY");
    q.n_prompt = CTX, refused(l, &q, "E-ENGINE-CONTEXT");
    q = good, q.choices = 1000, refused(l, &q, "E-ENGINE-REQUEST");
    q = good, q.depth = 6, refused(l, &q, "E-ENGINE-REQUEST");
    q = good, q.logprobs = 65, refused(l, &q, "E-ENGINE-REQUEST");
    q = good, q.max_tokens = -1, refused(l, &q, "E-ENGINE-REQUEST");
    q = good, q.sampling.top_p = 2, refused(l, &q, "E-SAMPLE-PARAM");
    prompt[1] = 1664;
    q = good, refused(l, &q, "E-ENGINE-TOKEN");
    assert_false(loop_step(l));
    loop_close(l);
    engine_close(g);
}

static bool forty(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    on_token(ctx, choice, id, logprob, top, values);
    return ((ticket *)ctx)->got[choice].n < 40;
}

static bool forty_alone(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    return forty(ctx, 0, id, logprob, top, values);
}

/* The draft layer sees the same rows too, so the very same drafts are accepted. */
static void test_acceptance(void **state) {
    (void)state;
    enum { N = 5 };
    rnd r = rnd_open(seed + 3);
    engine *one = open_engine(TINY, 1, 0, 1, 2), *g = open_engine(TINY, N - 1, 64, 1, 2);
    int64_t accepted = 0;
    for (int depth = 1; depth <= ENGINE_MAX_DRAFT; depth++) {
        wanted w[N] = { 0 };
        ticket t[N] = { 0 };
        loop *l = open_loop(
            g, &(loop_options){ .depth = depth,
                                .fixed_depth = true,
                                .budget_rows = 6 * (depth + 1) }); /* all drafts fit beside pieces of prompts */
        for (int i = 0; i < N; i++) {
            w[i].n_prompt = 1 + (int)rnd_below(&r, 60);
            for (int k = 0; k < w[i].n_prompt; k++) w[i].prompt[k] = (int32_t)rnd_below(&r, 1544);
            err e = { 0 };
            const loop_request q = { .prompt = w[i].prompt,
                                     .n_prompt = w[i].n_prompt,
                                     .depth = -1,
                                     .on_token = forty,
                                     .on_done = on_done,
                                     .ctx = &t[i] };
            OK(loop_submit(l, NULL, &q, &e));
            loop_step(l);
        }
        finish(l, 1000);
        loop_close(l);
        for (int i = 0; i < N; i++) {
            err e = { 0 };
            session s;
            gen_result alone;
            ticket x = { 0 };
            OK(session_open(&s, one, true, &e));
            OK(session_set(&s, w[i].prompt, w[i].n_prompt, &e));
            OK(session_generate(&s, &(gen_options){ .depth = depth, .on_token = forty_alone, .ctx = &x }, &alone, &e));
            session_close(&s);
            const gen_result *b = &t[i].result[0];
            assert_int_equal(t[i].got[0].n, 40);
            assert_int_equal(b->rounds, alone.rounds);
            assert_int_equal(b->accepted, alone.accepted);
            assert_int_equal(b->out_of_list, alone.out_of_list);
            assert_memory_equal(b->accepted_at, alone.accepted_at, sizeof b->accepted_at);
            assert_memory_equal(b->drafted_at, alone.drafted_at, sizeof b->drafted_at);
            accepted += alone.accepted;
        }
    }
    assert_true(accepted > 100);
    engine_close(g);
    engine_close(one);
}

/* A pass of few rows: the draft layer of a sequence that does not draft catches up before it owes more than that. */
static void test_catching_up_in_small_passes(void **state) {
    (void)state;
    err e = { 0 };
    engine *g;
    const engine_options o = { .ctx = CTX,
                               .slots = 1,
                               .chunk = 1,
                               .no_text = true,
                               .prefix_kv_bytes = 1 << 20,
                               .prefix_state_bytes = 1 << 20,
                               .ops = { .threads = 1, .isa = ISA_COUNT } };
    OK(engine_open(&g, TINY, &o, &e));
    loop *l = open_loop(g, &(loop_options){ .depth = 5, .fixed_depth = true });
    const wanted w = { .n_prompt = 3, .stop = -1, .choices = 1, .max_tokens = 60 };
    ticket a = { 0 }, b = { 0 };
    submit(l, &a, &w, 0, 0);
    finish(l, 100);
    submit(l, &b, &w, -1, 0);
    finish(l, 100);
    assert_int_equal(a.got[0].n, 60);
    assert_memory_equal(a.got[0].v, b.got[0].v, sizeof a.got[0].v);
    assert_true(b.result[0].accepted > 0);
    loop_close(l);
    engine_close(g);
}

/* One row reads as many experts as it is routed to; several share some, and never read more than there are. */
static void test_experts_counted(void **state) {
    (void)state;
    assert_int_equal(loop_rows_class(8), 7);
    assert_int_equal(loop_rows_class(9), 8);
    assert_int_equal(loop_rows_class(16), 8);
    assert_int_equal(loop_rows_class(17), 9);
    assert_int_equal(loop_rows_class(1 << 30), LOOP_ROWS_CLASSES - 1);
    for (int c = 0; c < LOOP_ROWS_CLASSES - 1; c++) {
        assert_int_equal(loop_rows_class(loop_rows_class_most(c)), c);
        assert_int_equal(loop_rows_class(loop_rows_class_most(c) + 1), c + 1);
    }
    engine *g = open_engine(TINY, 1, 64, 2, 0);
    loop *l = open_loop(g, &(loop_options){ .depth = 2, .fixed_depth = true });
    const wanted w = { .n_prompt = 40, .stop = -1, .choices = 1, .max_tokens = 12 };
    ticket a = { 0 }, b = { 0 };
    submit(l, &a, &w, 0, 0);
    finish(l, 100);
    submit(l, &b, &w, -1, 0);
    finish(l, 100);
    const loop_stats s = loop_counted(l);
    const int64_t topk = g->config.topk, most = g->config.experts;
    assert_true(s.moe_layers[0] >= 11 * g->config.layers);
    assert_int_equal(s.moe_experts[0], s.moe_layers[0] * topk);
    const int three = loop_rows_class(3), prompt = loop_rows_class(40);
    assert_true(s.moe_layers[three] > 0 && s.moe_layers[prompt] == 2 * g->config.layers);
    assert_true(s.moe_experts[three] > topk * s.moe_layers[three] &&
                s.moe_experts[three] < 3 * topk * s.moe_layers[three]);
    assert_true(s.moe_experts[prompt] <= most * s.moe_layers[prompt]);
    loop_close(l);
    engine_close(g);
}

/* A long prompt and short ones beside running sequences: every step yields a token for each of them and takes prompt rows. */
static void test_fairness(void **state) {
    (void)state;
    engine *g = open_engine(TINY, 4, 256, 1, 0);
    loop *l = open_loop(g, &(loop_options){ .depth = 2, .fixed_depth = true, .budget_rows = 12 });
    const wanted w = { .n_prompt = 5, .stop = -1, .choices = 1 }, big = { .n_prompt = 90, .stop = -1, .choices = 1 },
                 small = { .n_prompt = 4, .stop = -1, .choices = 1 };
    ticket a = { 0 }, b = { 0 }, c = { 0 }, d = { 0 };
    submit(l, &a, &w, -1, 0);
    submit(l, &b, &w, -1, 0);
    while (b.got[0].n < 2) loop_step(l);
    submit(l, &c, &big, -1, 0);
    submit(l, &d, &small, -1, 0);
    int steps = 0, small_at = 0;
    for (; c.got[0].n == 0; steps++) {
        const int na = a.got[0].n, nb = b.got[0].n;
        const int64_t rows = loop_counted(l).prompt_rows;
        loop_step(l);
        assert_true(a.got[0].n > na && b.got[0].n > nb);
        assert_true(loop_counted(l).prompt_rows > rows);
        if (d.got[0].n > 0 && !small_at) small_at = steps;
    }
    assert_in_range(small_at, 1, steps / 2);
    assert_in_range(steps, 10, 94 / 3);
    loop_close(l);
    engine_close(g);
}

/* ---- a thread of its own ---- */

typedef struct client {
    loop *l;
    const wanted *all;
    ticket t[12];
    pthread_mutex_t lock;
    pthread_cond_t done;
    int left;
    uint64_t salt;
} client;

static bool client_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    return on_token(ctx, choice, id, logprob, top, values);
}

static client *client_of[2];

static void client_done(void *ctx, int choice, const gen_result *r, const err *e) {
    ticket *t = ctx;
    client *c = client_of[t->at];
    pthread_mutex_lock(&c->lock);
    on_done(t, choice, r, e);
    c->left--;
    pthread_cond_signal(&c->done);
    pthread_mutex_unlock(&c->lock);
}

static void *client_run(void *arg) {
    client *c = arg;
    rnd r = rnd_open(seed + c->salt);
    c->left = 0;
    for (size_t i = 0; i < ARRAY_LEN(c->t); i++) {
        err e = { 0 };
        ticket *t = &c->t[i];
        const wanted *w = &c->all[rnd_below(&r, CASES)];
        *t = (ticket){ .w = w, .l = c->l, .at = (int)c->salt };
        const loop_request q = { .prompt = w->prompt,
                                 .n_prompt = w->n_prompt,
                                 .sampling = w->sampling,
                                 .choices = w->choices,
                                 .max_tokens = w->max_tokens,
                                 .depth = -1,
                                 .stop_ids = &w->stop,
                                 .n_stop_ids = 1,
                                 .logprobs = w->logprobs,
                                 .rule = rule_of(t),
                                 .on_token = client_token,
                                 .on_done = client_done,
                                 .ctx = t };
        pthread_mutex_lock(&c->lock);
        c->left += w->choices;
        pthread_mutex_unlock(&c->lock);
        uint64_t handle;
        if (!loop_submit(c->l, &handle, &q, &e)) abort();
        if (rnd_below(&r, 3) == 0) loop_cancel(c->l, handle - rnd_below(&r, 2));
        (void)loop_counted(c->l);
        if (rnd_below(&r, 2)) usleep(rnd_below(&r, 3000));
    }
    pthread_mutex_lock(&c->lock);
    while (c->left > 0) pthread_cond_wait(&c->done, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    err e = { 0 };
    rnd r = rnd_open(seed + 2);
    wanted *all = few(CASES, &r);
    engine *g = open_engine(TINY, 4, 32, 2, 0);
    loop *l = open_loop(g, &(loop_options){ .depth = 3 });
    OK(loop_start(l, &e));
    pthread_t id[2];
    client *c = calloc(2, sizeof *c);
    for (int i = 0; i < 2; i++) {
        client_of[i] = &c[i];
        c[i].l = l;
        c[i].all = all;
        c[i].salt = (uint64_t)i;
        pthread_mutex_init(&c[i].lock, NULL);
        pthread_cond_init(&c[i].done, NULL);
        assert_int_equal(pthread_create(&id[i], NULL, client_run, &c[i]), 0);
    }
    for (int i = 0; i < 2; i++) pthread_join(id[i], NULL);
    loop_stop(l);
    loop_close(l);
    int whole = 0;
    for (int i = 0; i < 2; i++)
        for (size_t k = 0; k < ARRAY_LEN(c[i].t); k++) {
            ticket *t = &c[i].t[k];
            t->leave_after = t->result[0].finish == GEN_CANCEL || t->result[1].finish == GEN_CANCEL;
            whole += !t->leave_after;
            check(t, "other threads");
        }
    assert_true(whole > 4);
    free(c);
    free(all);
    engine_close(g);
}

/* ---- the NVFP4 export ---- */

static int setup(void **state) {
    (void)state;
    log_set_level(0);
    folder = scratch_new();
    nvfp4 = scratch_path(folder, "nvfp4");
    export_tiny(nvfp4);
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
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_mixes),
                                        cmocka_unit_test(test_mixes_nvfp4),
                                        cmocka_unit_test(test_edits_are_screened),
                                        cmocka_unit_test(test_experts_counted),
                                        cmocka_unit_test(test_catching_up_in_small_passes),
                                        cmocka_unit_test(test_poison),
                                        cmocka_unit_test(test_preemption_and_sharing),
                                        cmocka_unit_test(test_steady_state),
                                        cmocka_unit_test(test_deadline_and_cancel),
                                        cmocka_unit_test(test_refusals),
                                        cmocka_unit_test(test_fairness),
                                        cmocka_unit_test(test_acceptance),
                                        cmocka_unit_test(test_threads) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
