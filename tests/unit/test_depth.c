/* The policy of drafts per round against made-up machines: costs of a step by batch and depth, acceptance by position,
 * noise, hiccups. What it promises is a bound on what it may cost and a share of what could be won. */
#include <math.h>

#include "base/rng.h"
#include "engine/depth.h"

#include "support.h"

typedef struct machine {
    double trunk, row, draft; /* seconds of a step without drafts, of each further row, of a draft */
    double accept[DEPTH_MAX];
    double noise, hiccups; /* relative; share of steps that take ten times as long, without being anyone's fault */
} machine;

static const uint64_t SEED = 20260302;

static double draw(int64_t *at) { return rng_uniform(SEED, (uint64_t)(*at)++, 0, 1); }

static double step_seconds(const machine *w, int n, int d) {
    return w->trunk + w->row * (n * (1 + d) - 1) + (w->draft + 0.2 * w->row * n) * d;
}

static int accepted(const machine *w, int d, int64_t *at) {
    int k = 0;
    while (k < d && draw(at) < w->accept[k]) k++;
    return k;
}

/* Tokens per second of `steps` steps; fixed < 0: as the model picks. What is measured is noisy, what counts is not. */
static double run(depth_model *m, const machine *w, int n, int cap, int fixed, int steps, int64_t *at) {
    double tokens = 0, seconds = 0;
    for (int i = 0; i < steps; i++) {
        const int d = fixed >= 0 ? fixed : depth_pick(m, n, n, cap, true);
        assert_in_range(d, 0, cap);
        const double s = step_seconds(w, n, d);
        for (int k = 0; k < n; k++) {
            const int a = accepted(w, d, at);
            if (fixed < 0 && d > 0) depth_accepted(m, d, a);
            tokens += 1 + a;
        }
        seconds += s;
        if (fixed >= 0) continue;
        const double seen = s * (1 + w->noise * (2 * draw(at) - 1)) * (draw(at) < w->hiccups ? 10 : 1);
        depth_timed(m, n, d, seen);
    }
    return tokens / seconds;
}

static double best_fixed(const machine *w, int n, int cap, int steps, int64_t *at) {
    double best = 0;
    for (int d = 0; d <= cap; d++) best = fmax(best, run(NULL, w, n, cap, d, steps, at));
    return best;
}

static const machine worlds[] = {
    { 1, 0.02, 0.05, { 0.9, 0.85, 0.8, 0.8, 0.8 }, 0, 0 }, /* good drafts, nearly free */
    { 1, 0.02, 0.05, { 0 }, 0, 0 },                        /* none is ever right */
    { 1, 0.02, 0.05, { 0.3, 0.2, 0.1 }, 0, 0 },            /* bad */
    { 1, 0.5, 0.6, { 0.9, 0.85, 0.8, 0.8, 0.8 }, 0, 0 },   /* good, but dear */
    { 1, 0.5, 0.6, { 0 }, 0, 0 },                          /* */
    { 1, 0.1, 0.2, { 0.7, 0.5, 0.5, 0.5, 0.5 }, 0.05, 0 }, /* in between, noisy */
    { 1, 0.3, 0.1, { 0.35, 0.3 }, 0.1, 0.01 },             /* about as good as without */
    { 1, 0.05, 0.1, { 0.85, 0.8, 0.8, 0.8, 0.8 }, 0.1, 0.02 },
    { 1, 0.05, 0.3, { 0.05 }, 0.1, 0.1 }, /* good, on a machine that others use */
};
static const int batches[] = { 1, 2, 3, 4, 8, 16, 32 };

/* Never slower than without drafts by more than 2 %, once the first steps are behind. */
static void test_never_slower_than_off(void **state) {
    (void)state;
    int64_t at = 0;
    for (size_t i = 0; i < ARRAY_LEN(worlds); i++)
        for (size_t b = 0; b < ARRAY_LEN(batches); b++)
            for (int cap = 1; cap <= DEPTH_MAX; cap++) {
                depth_model m;
                depth_init(&m);
                (void)run(&m, &worlds[i], batches[b], cap, -1, 200, &at);
                const double off = batches[b] / step_seconds(&worlds[i], batches[b], 0);
                const double got = run(&m, &worlds[i], batches[b], cap, -1, 4000, &at);
                if (got < 0.98 * off)
                    fail_msg("world %zu, batch %d, cap %d: %.4f of off", i, batches[b], cap, got / off);
            }
}

static void test_near_the_best(void **state) {
    (void)state;
    int64_t at = 1 << 30;
    for (size_t i = 0; i < ARRAY_LEN(worlds); i++)
        for (size_t b = 0; b < ARRAY_LEN(batches); b++) {
            depth_model m;
            depth_init(&m);
            (void)run(&m, &worlds[i], batches[b], 3, -1, 2000, &at);
            const double got = run(&m, &worlds[i], batches[b], 3, -1, 4000, &at);
            const double best = best_fixed(&worlds[i], batches[b], 3, 4000, &at);
            if (got < 0.95 * best) fail_msg("world %zu, batch %d: %.4f of the best depth", i, batches[b], got / best);
        }
}

/* Even a stranger costs little: nothing is known, no draft is right. */
static void test_first_steps(void **state) {
    (void)state;
    int64_t at = 0;
    for (size_t b = 0; b < ARRAY_LEN(batches); b++) {
        depth_model m;
        depth_init(&m);
        const double got = run(&m, &worlds[1], batches[b], 2, -1, 500, &at);
        const double off = batches[b] / step_seconds(&worlds[1], batches[b], 0);
        if (got < 0.96 * off) fail_msg("batch %d: %.4f of off over the first 500 steps", batches[b], got / off);
    }
}

/* Short runs of a stranger, at what drafts cost where the draft layer is a quarter of the model: on average never slower than
 * off by more than 2 %, and where drafts are good, faster. */
static void test_short_runs(void **state) {
    (void)state;
    enum { RUNS = 100 };
    static const double rates[] = { 0, 0.2, 0.5, 0.8 };
    static const int lengths[] = { 48, 256 };
    int64_t at = 0;
    for (size_t a = 0; a < ARRAY_LEN(rates); a++)
        for (size_t b = 0; b < ARRAY_LEN(batches); b++)
            for (size_t s = 0; s < ARRAY_LEN(lengths); s++) {
                machine w = { 1, 0.02, 0.28, { 0 }, 0.05, 0.002 };
                for (int i = 0; i < DEPTH_MAX; i++) w.accept[i] = rates[a];
                const double off = batches[b] / step_seconds(&w, batches[b], 0);
                double sum = 0;
                for (int i = 0; i < RUNS; i++) {
                    depth_model m;
                    depth_init(&m);
                    sum += run(&m, &w, batches[b], 2, -1, lengths[s], &at) / off;
                }
                if (getenv("SHOW")) printf("%g %d %d: %.4f\n", rates[a], batches[b], lengths[s], sum / RUNS);
                if (sum / RUNS < 0.98)
                    fail_msg("acceptance %g, batch %d, %d steps: %.4f of off", rates[a], batches[b], lengths[s],
                             sum / RUNS);
                if (rates[a] > 0.7 && batches[b] <= 4 && sum / RUNS < (lengths[s] > 100 ? 1.3 : 1.15))
                    fail_msg("good drafts, batch %d, %d steps: only %.4f of off", batches[b], lengths[s], sum / RUNS);
            }
}

/* What changes is noticed, in both directions and at every batch size. */
static void test_follows_a_change(void **state) {
    (void)state;
    int64_t at = 0;
    for (size_t b = 0; b < ARRAY_LEN(batches); b++) {
        const int n = batches[b];
        depth_model m;
        depth_init(&m);
        (void)run(&m, &worlds[1], n, 2, -1, 3000, &at);
        assert_int_equal(depth_pick(&m, n, n, 2, false), 0);
        (void)run(&m, &worlds[0], n, 2, -1, 12000, &at);
        assert_true(depth_pick(&m, n, n, 2, false) > 0);
        (void)run(&m, &worlds[1], n, 2, -1, 3000, &at);
        assert_int_equal(depth_pick(&m, n, n, 2, false), 0);
    }
}

/* The first steps of a batch size are without drafts, which cost nothing against off. */
static void first_steps(depth_model *m, const machine *w, int n) {
    for (int i = 0; i < 3; i++) {
        assert_int_equal(depth_pick(m, n, n, 2, true), 0);
        depth_timed(m, n, 0, step_seconds(w, n, 0));
    }
}

/* A new batch size goes on with what the others have taught. */
static void test_batches_learn_from_each_other(void **state) {
    (void)state;
    int64_t at = 0;
    depth_model m;
    depth_init(&m);
    (void)run(&m, &worlds[0], 4, 2, -1, 300, &at);
    first_steps(&m, &worlds[0], 5);
    assert_int_equal(depth_pick(&m, 5, 5, 2, true), 2);
    depth_init(&m);
    (void)run(&m, &worlds[4], 4, 2, -1, 3000, &at);
    first_steps(&m, &worlds[4], 6);
    assert_int_equal(depth_pick(&m, 6, 6, 2, true), 0);
}

/* When few of many sequences can draft, drafts that would pay for all may not pay for them. */
static void test_few_can_draft(void **state) {
    (void)state;
    int64_t at = 0;
    const machine w = { 1, 0.01, 0.4, { 0.8, 0.8 }, 0, 0 };
    depth_model m;
    depth_init(&m);
    (void)run(&m, &w, 8, 1, -1, 1000, &at);
    assert_int_equal(depth_pick(&m, 8, 8, 1, false), 1);
    assert_int_equal(depth_pick(&m, 8, 1, 1, false), 0);
}

/* It rests only when no drafts were best for a while, whatever was tried in between. */
static void test_rests(void **state) {
    (void)state;
    int64_t at = 0;
    depth_model m;
    depth_init(&m);
    assert_false(depth_rests(&m));
    (void)run(&m, &worlds[0], 1, 2, -1, 3000, &at);
    assert_false(depth_rests(&m));
    (void)run(&m, &worlds[4], 1, 2, -1, 3000, &at);
    assert_true(depth_rests(&m));
}

/* The same calls, the same picks; a cap is kept; what is not timed changes nothing that is known. */
static void test_pure(void **state) {
    (void)state;
    depth_model a, b;
    depth_init(&a);
    depth_init(&b);
    for (int i = 0; i < 3000; i++) {
        const int cap = i / 7 % 4, n = 1 + i / 50 % 32;
        const int d = depth_pick(&a, n, n, cap, i % 5 > 0);
        assert_int_equal(d, depth_pick(&b, n, n, cap, i % 5 > 0));
        assert_in_range(d, 0, cap);
        for (int k = 0; k < 2; k++) {
            depth_model *m = k ? &b : &a;
            if (d > 0) depth_accepted(m, d, i % (d + 1));
            if (i % 5 > 0) depth_timed(m, n, d, 0.001 * (1 + d) + 1e-6 * (i % 11));
        }
    }
    assert_memory_equal(a.accept, b.accept, sizeof a.accept);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_never_slower_than_off),
        cmocka_unit_test(test_near_the_best),
        cmocka_unit_test(test_first_steps),
        cmocka_unit_test(test_short_runs),
        cmocka_unit_test(test_follows_a_change),
        cmocka_unit_test(test_batches_learn_from_each_other),
        cmocka_unit_test(test_few_can_draft),
        cmocka_unit_test(test_rests),
        cmocka_unit_test(test_pure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
