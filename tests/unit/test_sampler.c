/* The sampler against a plain reimplementation in double: order of options, edits, masks, ties, errors, determinism over ISAs,
 * and drawn distributions by chi-square. Seeds are fixed. */
#include "engine/sampler.h"

#include <float.h>

#include "base/clock.h"
#include "num/mathf.h"
#include "support.h"

static uint64_t state_bits = 20261202;
static uint32_t rng(void) {
    state_bits = state_bits * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state_bits >> 33);
}
static float uniform(void) { return (float)(rng() & 0xffffff) * 0x1p-24f; }

static sampler opened(int vocab, kern_isa isa) {
    sampler s;
    err e = { 0 };
    OK(sampler_open(&s, vocab, isa, &e));
    return s;
}

static int32_t draw(sampler *s, const sampler_params *p, const sampler_row *r) {
    err e = { 0 };
    int32_t id = -1;
    OK(sampler_check(p, r->n, &e));
    OK(sampler_draw(s, &id, p, r, &e));
    return id;
}

static void refused(sampler *s, const sampler_params *p, const sampler_row *r, const char *want) {
    err e = { 0 };
    int32_t id = -7;
    assert_false(sampler_draw(s, &id, p, r, &e));
    assert_string_equal(e.id, want);
    assert_int_equal(id, -7);
}

/* ---- the plain reimplementation ---- */

typedef struct plain {
    int id[4096];
    double logit[4096], p[4096];
    int n;
} plain;

static int by_order(const void *a, const void *b) {
    const double *x = a, *y = b;
    return x[0] > y[0] ? -1 : x[0] < y[0] ? 1 : x[1] < y[1] ? -1 : x[1] > y[1];
}

/* Probability of every id, in double, straight from the words of NUMERICS 8. prompt [n] and output [n] flags/counts. */
static void expected(double *out, const sampler_params *p, const sampler_row *r, const int *in_prompt,
                     const int *count) {
    static double v[4096][2], q[4096];
    int n = 0;
    for (int i = 0; i < r->n; i++) {
        double x = r->logits[i];
        const double rep = p->repetition != 0 ? p->repetition : 1;
        if (in_prompt && (in_prompt[i] || count[i])) x = x > 0 ? x / rep : x * rep;
        if (in_prompt && count[i]) x -= p->frequency * count[i] + p->presence;
        for (int b = 0; b < p->n_bias; b++)
            if (p->bias[b].id == i) x += p->bias[b].value;
        bool banned = r->allowed && !(r->allowed[i / 64] >> (i % 64) & 1);
        for (int b = 0; b < p->n_stop_ids; b++) banned |= p->stop_ids[b] == i && r->generated < p->min_tokens;
        out[i] = 0;
        if (!banned) v[n][0] = x, v[n++][1] = i;
    }
    qsort(v, (size_t)n, sizeof v[0], by_order);
    if (sampler_is_greedy(p)) {
        out[(int)v[0][1]] = 1;
        return;
    }
    if (p->top_k > 0 && p->top_k < n) n = p->top_k;
    double total = 0, sum = 0;
    for (int i = 0; i < n; i++) total += q[i] = exp((v[i][0] - v[0][0]) / p->temperature);
    if (p->top_p < 1) {
        int keep = 0;
        while (keep < n && (keep == 0 || sum < p->top_p * total)) sum += q[keep++];
        n = keep;
    }
    total = 0;
    for (int i = 0; i < n; i++)
        if (q[i] >= p->min_p * q[0]) total += q[i];
    for (int i = 0; i < n; i++)
        if (q[i] >= p->min_p * q[0]) out[(int)v[i][1]] = q[i] / total;
}

/* Probability that chi-square with df degrees of freedom exceeds x: the regularized upper incomplete gamma function
 * Q(df / 2, x / 2), by its series below df + 2 and its continued fraction (Lentz) above. */
static double chi2_tail(int df, double x) {
    const double a = df / 2.0, z = x / 2, front = exp(a * log(z) - z - lgamma(a));
    if (z < a + 1) {
        double term = 1 / a, sum = term;
        for (int k = 1; k < 10000 && term > sum * 1e-15; k++) sum += term *= z / (a + k);
        return 1 - front * sum;
    }
    double b = z + 1 - a, c = 1e300, d = 1 / b, h = d;
    for (int k = 1; k < 10000; k++) {
        const double an = k * (a - k);
        b += 2;
        d = 1 / (an * d + b);
        c = b + an / c;
        h *= d * c;
        if (fabs(d * c - 1) < 1e-14) break;
    }
    return front * h;
}

/* Draws at positions 0.. against the probabilities; cells below 10 expected draws are pooled. */
static void chi2(const char *name, sampler *s, const sampler_params *p, sampler_row r, const double *want, int draws) {
    int *got = calloc((size_t)r.n, sizeof *got);
    double sum = 0, pool_want = 0, pool_got = 0;
    int cells = 0;
    for (int i = 0; i < draws; i++) {
        r.position = i;
        got[draw(s, p, &r)]++;
    }
    for (int i = 0; i < r.n; i++) {
        const double e = want[i] * draws;
        if (want[i] == 0 && got[i]) fail_msg("%s: id %d was drawn %d times, and may not be", name, i, got[i]);
        if (e < 10) {
            pool_want += e, pool_got += got[i];
            continue;
        }
        sum += (got[i] - e) * (got[i] - e) / e;
        cells++;
    }
    if (pool_want >= 10) sum += (pool_got - pool_want) * (pool_got - pool_want) / pool_want, cells++;
    assert_true(cells > 1);
    const double tail = chi2_tail(cells - 1, sum);
    print_message("%s: chi2 %.2f, %d cells, p %.2g\n", name, sum, cells, tail);
    if (!(tail > 1e-6)) fail_msg("%s: chi2 %.2f with %d cells: p %.2g", name, sum, cells, tail);
    free(got);
}

/* ---- tests ---- */

static const float EIGHT[8] = { 1.0f, 3.0f, 2.0f, 3.0f, -1.0f, 0.5f, 2.5f, -4.0f };

static void test_chi2_tail(void **state) {
    (void)state;
    const struct {
        int df;
        double x, p;
    } known[] = { { 2, 27.631021115928547, 1e-6 },
                  { 2, 1, 0.60653065971263342 },
                  { 1, 3.8414588206941236, 0.05 },
                  { 100, 124.34211340400407, 0.05 } };
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        assert_true(fabs(chi2_tail(known[i].df, known[i].x) / known[i].p - 1) < 1e-9);
}

static void test_distribution(void **state) {
    (void)state;
    static const sampler_params all[] = {
        { .temperature = 1, .top_p = 1, .seed = 1 },
        { .temperature = 0.7, .top_p = 1, .top_k = 3, .seed = 2 },
        { .temperature = 1.5, .top_p = 0.8, .seed = 3 },
        { .temperature = 1, .top_p = 0.9, .top_k = 5, .min_p = 0.3, .seed = 4 },
        { .temperature = 3, .top_p = 1, .min_p = 0.2, .seed = 5 },
        { .temperature = 1, .top_p = 0.95, .top_k = 20, .seed = 6, .presence = 1.5 },
        { .temperature = 1, .top_p = 1, .seed = 7, .frequency = 0.4, .choice = 3 },
        { .temperature = 0.9, .top_p = 0.95, .seed = 8, .repetition = 1.3 },
        { .temperature = 0.9, .top_p = 0.97, .seed = 9, .repetition = 0.8, .presence = -0.5, .frequency = 0.3 },
    };
    enum { DRAWS = 100000 };
    sampler s = opened(8, ISA_COUNT);
    history h;
    err e = { 0 };
    OK(history_open(&h, 8, &e));
    history_prompt(&h, (const int32_t[]){ 1, 4, 1, 5 }, 4);
    const int prompt[8] = { 0, 1, 0, 0, 1, 1, 0, 0 }, count[8] = { 0, 0, 0, 2, 1, 0, 1, 0 };
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < count[i]; j++) history_push(&h, i);
    for (size_t c = 0; c < ARRAY_LEN(all); c++) {
        char name[32];
        double want[8];
        float logits[8];
        memcpy(logits, EIGHT, sizeof logits);
        snprintf(name, sizeof name, "case %zu", c);
        const sampler_row r = { .logits = logits, .n = 8, .seen = &h };
        expected(want, &all[c], &r, prompt, count);
        chi2(name, &s, &all[c], r, want, DRAWS);
        assert_memory_equal(logits, EIGHT, sizeof logits);
    }
    history_close(&h);
    sampler_close(&s);
}

/* Bias, mask and ban together, through the bucket path and the selection path, over a vocabulary of several blocks. */
static void test_distribution_of_many(void **state) {
    (void)state;
    enum { N = 2900, DRAWS = 8000 };
    static float logits[N];
    static double want[N];
    uint64_t allowed[(N + 63) / 64];
    for (int i = 0; i < N; i++) logits[i] = uniform() * 9 - 6 + (i % 700 == 3 ? 5 : 0);
    for (size_t i = 0; i < ARRAY_LEN(allowed); i++)
        allowed[i] = i % 5 == 0 ? 0 : i % 5 == 1 ? UINT64_MAX : (rng() ^ rng() << 31) * 2 + 1;
    const sampler_bias bias[] = { { 40, 4 }, { 41, -100 }, { 2899, 3 }, { 40, -2 }, { 7, 5 } };
    const int32_t stops[] = { 703, 2899 };
    static const sampler_params all[] = {
        { .temperature = 1, .top_p = 1, .seed = 11 },
        { .temperature = 1, .top_p = 0.9, .seed = 12 },
        { .temperature = 1, .top_p = 0.95, .top_k = 20, .seed = 13 },
        { .temperature = 1.2, .top_p = 0.95, .top_k = 200, .seed = 14 },
        { .temperature = 2, .top_p = 1, .min_p = 0.05, .seed = 15 },
        { .temperature = 4, .top_p = 0.99, .seed = 16 },
    };
    sampler s = opened(N, ISA_COUNT);
    for (size_t c = 0; c < ARRAY_LEN(all); c++)
        for (int masked = 0; masked < 2; masked++) {
            if (is_short() && (c + (size_t)masked) % 3 != 0) continue; /* each way once */
            char name[32];
            sampler_params p = all[c];
            p.bias = bias, p.n_bias = ARRAY_LEN(bias);
            p.stop_ids = stops, p.n_stop_ids = ARRAY_LEN(stops), p.min_tokens = masked ? 5 : 0;
            const sampler_row r = { .logits = logits, .n = N, .allowed = masked ? allowed : NULL, .generated = 4 };
            snprintf(name, sizeof name, "case %zu%s", c, masked ? " masked" : "");
            expected(want, &p, &r, NULL, NULL);
            chi2(name, &s, &p, r, want, DRAWS);
        }
    sampler_close(&s);
}

static void test_greedy(void **state) {
    (void)state;
    sampler s = opened(3000, ISA_COUNT);
    float v[3000];
    memcpy(v, EIGHT, sizeof EIGHT);
    const sampler_params greedy = { 0 }, one = { .temperature = 2, .top_k = 1, .top_p = 1 },
                         cold = { .temperature = 1e-6, .top_p = 1 };
    sampler_row r = { .logits = v, .n = 8 };
    assert_int_equal(draw(&s, &greedy, &r), 1); /* of two equal ones, the lower id */
    assert_int_equal(draw(&s, &one, &r), 1);
    assert_int_equal(draw(&s, &cold, &r), 1);
    for (int round = 0; round < 3000; round++) {
        r.n = 1 + (int)(rng() % 3000);
        int best = 0;
        for (int i = 0; i < r.n; i++) {
            v[i] = round % 3 == 0 ? (float)(rng() % 3) - 1 : round % 3 == 1 ? -uniform() : (rng() % 2 ? 0.0f : -0.0f);
            if (v[i] > v[best]) best = i;
        }
        assert_int_equal(draw(&s, &greedy, &r), best);
    }
    sampler_close(&s);
}

/* Does a request with these options edit the logit of `id`? */
static bool edits(const sampler_params *p, const history *h, int32_t id) {
    for (int i = 0; i < p->n_bias; i++)
        if (p->bias[i].id == id) return true;
    for (int i = 0; i < p->n_stop_ids; i++)
        if (p->stop_ids[i] == id) return true;
    return h->state[id] != 0;
}

/* The k best of those that are allowed and not edited, and all that are edited: what is drawn from that is what is drawn from
 * the whole row, with ties everywhere, edits that lift and sink, masks. */
static void test_partial_rows(void **state) {
    (void)state;
    enum { MOST = 1500 };
    static float v[MOST], part[MOST];
    static int32_t ids[MOST];
    uint64_t allowed[(MOST + 63) / 64];
    err e = { 0 };
    history h;
    sampler s = opened(MOST, ISA_COUNT);
    OK(history_open(&h, MOST, &e));
    int edited = 0;
    for (int round = 0; round < 2000; round++) {
        const int n = 1 + (int)(rng() % MOST), levels = round % 3 ? 1 << 20 : 1 + (int)(rng() % 9);
        sampler_bias bias[4];
        int32_t stops[3];
        for (int i = 0; i < 4; i++) bias[i] = (sampler_bias){ (int32_t)(rng() % (uint32_t)n), uniform() * 8 - 3 };
        for (int i = 0; i < 3; i++) stops[i] = (int32_t)(rng() % (uint32_t)n);
        for (int i = 0; i < n; i++) v[i] = (float)(rng() % (uint32_t)levels) * 6 / (float)levels - 2;
        for (size_t i = 0; i < ARRAY_LEN(allowed); i++)
            allowed[i] = ((uint64_t)rng() << 32 | rng()) | (round % 2 ? 0 : (uint64_t)rng() << 17);
        history_reset(&h);
        for (uint32_t i = rng() % 60; i > 0; i--) history_push(&h, (int32_t)(rng() % (uint32_t)n));
        for (uint32_t i = rng() % 60; i > 0; i--) history_prompt(&h, (int32_t[]){ (int32_t)(rng() % (uint32_t)n) }, 1);
        const sampler_params p = { .temperature = rng() % 3 ? 0.3 + uniform() : 0,
                                   .top_k = 1 + (int)(rng() % 64),
                                   .top_p = rng() % 2 ? 0.9 : 1,
                                   .min_p = rng() % 3 ? 0 : 0.1,
                                   .presence = rng() % 2 ? uniform() * 4 - 2 : 0,
                                   .frequency = rng() % 2 ? 0.3 : 0,
                                   .repetition = rng() % 2 ? 0.5 + uniform() : 1,
                                   .seed = rng(),
                                   .bias = bias,
                                   .n_bias = (int)(rng() % 5),
                                   .stop_ids = stops,
                                   .n_stop_ids = (int)(rng() % 4),
                                   .min_tokens = 5 };
        const int k = sampler_is_greedy(&p) ? 1 : p.top_k;
        const bool masked = round % 4 == 0;
        sampler_row whole = { .logits = v, .n = n, .generated = (int)(rng() % 8), .seen = &h },
                    few = { .logits = part, .ids = ids, .generated = whole.generated, .seen = &h };
        if (masked) whole.allowed = few.allowed = allowed;
        for (int32_t id = 0; id < n; id++) {
            int above = 0; /* others that stand before it */
            for (int32_t i = 0; i < n && above < k; i++)
                above += (v[i] > v[id] || (v[i] == v[id] && i < id)) && !edits(&p, &h, i) &&
                         (!masked || (allowed[i / 64] >> i % 64 & 1));
            const bool own = edits(&p, &h, id);
            edited += own;
            if (!own && (above >= k || (masked && !(allowed[id / 64] >> id % 64 & 1)))) continue;
            part[few.n] = v[id];
            ids[few.n++] = id;
        }
        for (int i = 0; i < 5; i++) {
            int32_t a = -1, b = -1;
            err ea = { 0 }, eb = { 0 };
            whole.position = few.position = i;
            const bool ok = sampler_draw(&s, &a, &p, &whole, &ea);
            assert_true(few.n > 0 ? sampler_draw(&s, &b, &p, &few, &eb) == ok : !ok);
            if (a != b) fail_msg("round %d: %d of the whole row, %d of %d of it", round, a, b, few.n);
        }
    }
    assert_true(edited > 10000);
    history_close(&h);
    sampler_close(&s);
}

static void test_not_finite(void **state) {
    (void)state;
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    static const sampler_params all[] = { { 0 },
                                          { .temperature = 1, .top_p = 1 },
                                          { .temperature = 1, .top_p = 0.9, .top_k = 20, .presence = 1 } };
    static float v[2500];
    sampler s = opened(2500, ISA_COUNT);
    for (int round = 0; round < 600; round++) {
        const sampler_row r = { .logits = v, .n = 1 + (int)(rng() % 2500) };
        for (int i = 0; i < r.n; i++) v[i] = uniform() - 0.5f;
        const int at = round % 4 ? (int)(rng() % (uint32_t)r.n) : r.n - 1;
        draw(&s, &all[round % 3], &r);
        v[at] = bad[rng() % 3];
        refused(&s, &all[round % 3], &r, "E-ENGINE-NONFINITE");
    }
    sampler_close(&s);
}

static void test_nothing_left(void **state) {
    (void)state;
    float v[8], before[8];
    memcpy(v, EIGHT, sizeof v);
    memcpy(before, v, sizeof v);
    uint64_t none = 0xffffff00u, some = 0x10; /* bits behind the vocabulary mean nothing */
    const int32_t stops[] = { 4 };
    sampler s = opened(8, ISA_COUNT);
    sampler_params p = { .temperature = 1, .top_p = 1, .stop_ids = stops, .n_stop_ids = 1, .min_tokens = 2 };
    sampler_row r = { .logits = v, .n = 8, .allowed = &none, .generated = 2 };
    refused(&s, &p, &r, "E-SAMPLE-MASKED");
    r.allowed = &some;
    assert_int_equal(draw(&s, &p, &r), 4);
    r.generated = 1; /* the only allowed token is a stop id that may not come yet */
    refused(&s, &p, &r, "E-SAMPLE-MASKED");
    p.temperature = 0;
    refused(&s, &p, &r, "E-SAMPLE-MASKED");
    assert_memory_equal(v, before, sizeof v); /* restored after a refusal too */
    sampler_close(&s);
}

static void test_extremes(void **state) {
    (void)state;
    sampler s = opened(600, ISA_COUNT);
    static float v[600];
    for (int i = 0; i < 600; i++) v[i] = i % 2 ? -FLT_MAX : FLT_MAX;
    const sampler_bias bias[] = { { 0, 100 } };
    const sampler_params all[] = { { .temperature = 100, .top_p = 1 },
                                   { .temperature = 1e-5, .top_p = 1 },
                                   { .temperature = 1, .top_p = 1, .top_k = 400, .repetition = 0.01 },
                                   { .temperature = 1, .top_p = 1, .top_k = 30, .bias = bias, .n_bias = 1 } };
    history h;
    err e = { 0 };
    OK(history_open(&h, 600, &e));
    history_prompt(&h, (const int32_t[]){ 0, 1, 2 }, 3);
    for (size_t c = 0; c < ARRAY_LEN(all); c++) {
        const sampler_row r = { .logits = v, .n = 600, .seen = &h };
        for (int i = 0; i < 200; i++) {
            sampler_row at = r;
            at.position = i;
            assert_int_equal(draw(&s, &all[c], &at) % 2, 0);
        }
    }
    for (int i = 0; i < 600; i++) v[i] = 7; /* nothing but ties */
    const sampler_params top5 = { .temperature = 1, .top_p = 1, .top_k = 5 }, half = { .temperature = 1, .top_p = 0.5 },
                         all_equal = { .temperature = 1, .top_p = 1, .min_p = 1 };
    bool last = false;
    for (int i = 0; i < 3000; i++) {
        const sampler_row r = { .logits = v, .n = 600, .position = i };
        assert_in_range(draw(&s, &top5, &r), 0, 4);
        assert_in_range(draw(&s, &half, &r), 0, 299);
        last |= draw(&s, &all_equal, &r) >= 590;
    }
    assert_true(last);
    const sampler_row single = { .logits = v, .n = 1 };
    assert_int_equal(draw(&s, &top5, &single), 0);
    history_close(&h);
    sampler_close(&s);
}

/* The same draws from every ISA, every position independent of what was drawn before, keys that matter. */
static void test_reproducible(void **state) {
    (void)state;
    enum { N = 5003 };
    static float v[N];
    for (int i = 0; i < N; i++) v[i] = uniform() * 12;
    static const sampler_params all[] = { { .temperature = 1, .top_p = 1, .seed = 42 },
                                          { .temperature = 1, .top_p = 0.95, .top_k = 20, .seed = 42 },
                                          { .temperature = 2, .top_p = 0.9, .min_p = 0.01, .seed = 42 } };
    sampler base = opened(N, ISA_REF);
    for (int isa = ISA_REF; isa <= ISA_COUNT; isa++) {
        sampler s = opened(N, (kern_isa)isa);
        for (size_t c = 0; c < ARRAY_LEN(all); c++) {
            int moved[3] = { 0 };
            for (int i = 0; i < 120; i++) {
                const sampler_row r = { .logits = v, .n = N, .position = i },
                                  next = { .logits = v, .n = N, .position = i + 1 };
                sampler_params seed = all[c], choice = all[c];
                seed.seed++, choice.choice++;
                const int32_t id = draw(&base, &all[c], &r);
                moved[0] += draw(&s, &all[c], &next) != id;
                moved[1] += draw(&s, &seed, &r) != id;
                moved[2] += draw(&s, &choice, &r) != id;
                assert_int_equal(draw(&s, &all[c], &r), id);
            }
            for (int i = 0; i < 3; i++) assert_true(moved[i] > 60);
            int32_t ids[2][200];
            double lp[2][200];
            const double a = sampler_logprobs(&base, ids[0], lp[0], 200, v, N, 17);
            const double b = sampler_logprobs(&s, ids[1], lp[1], 200, v, N, 17);
            assert_memory_equal(&a, &b, sizeof a);
            assert_memory_equal(ids[0], ids[1], sizeof ids[0]);
            assert_memory_equal(lp[0], lp[1], sizeof lp[0]);
        }
        sampler_close(&s);
    }
    sampler_close(&base);
}

static void test_logprobs(void **state) {
    (void)state;
    sampler s = opened(3000, ISA_COUNT);
    int32_t top[300];
    double values[300];
    const double few = sampler_logprobs(&s, top, values, 10, EIGHT, 8, 2);
    double sum = 0;
    for (int i = 0; i < 8; i++) sum += exp(EIGHT[i]);
    assert_true(fabs(few - (2.0 - log(sum))) < 2e-7);
    assert_int_equal(top[0], 1);
    assert_int_equal(top[1], 3);
    assert_int_equal(top[7], 7);
    assert_int_equal(top[8], -1);
    static float v[3000];
    for (int round = 0; round < 50; round++) {
        const int n = 1 + (int)(rng() % 3000), count = round % 2 ? 20 : 300;
        double exact = 0, most = -1e9;
        for (int i = 0; i < n; i++) v[i] = (uniform() - 0.5f) * 40, most = v[i] > most ? v[i] : most;
        for (int i = 0; i < n; i++) exact += exp(v[i] - most);
        const int32_t id = (int32_t)(rng() % (uint32_t)n);
        const double lp = sampler_logprobs(&s, top, values, count, v, n, id);
        assert_true(fabs(lp - (v[id] - most - log(exact))) < 2e-7);
        for (int i = 0; i + 1 < count && top[i + 1] >= 0; i++) assert_true(v[top[i]] >= v[top[i + 1]]);
    }
    sampler_close(&s);
}

static void test_log(void **state) {
    (void)state;
    assert_true(num_log(1) == 0 && num_log(INFINITY) == INFINITY && isnan(num_log(0)) && isnan(num_log(-1)) &&
                isnan(num_log(NAN)));
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        const double x =
            i % 2 ? ldexp(1 + (double)rng() * 0x1p-31, (int)(rng() % 2000) - 1000) : 1 + (uniform() - 0.5) * 0.5;
        const double want = log(x), err_ulp = fabs(num_log(x) - want) / (nextafter(fabs(want), INFINITY) - fabs(want));
        if (err_ulp > worst) worst = err_ulp;
    }
    print_message("log: at most %.1f ulp from libm\n", worst);
    assert_true(worst <= 3); /* ours within 2, libm's within 1 */
}

/* Any sequence of pushes is undone by pops in reverse, prompt marks or not. */
static void test_history(void **state) {
    (void)state;
    enum { V = 40, STEPS = 4000 };
    history h, copy;
    err e = { 0 };
    OK(history_open(&h, V, &e));
    OK(history_open(&copy, V, &e));
    int32_t stack[STEPS];
    for (int round = 0; round < 50; round++) {
        const int kept = (int)(rng() % 60), drafts = (int)(rng() % 60);
        history_reset(&h);
        history_reset(&copy);
        for (int i = 0; i < 10; i++) {
            const int32_t id = (int32_t)(rng() % (V + 10)) - 5; /* some outside the vocabulary */
            history_prompt(&h, &id, 1);
            history_prompt(&copy, &id, 1);
        }
        for (int i = 0; i < kept; i++) {
            const int32_t id = (int32_t)(rng() % (V + 10)) - 5;
            history_push(&h, id);
            history_push(&copy, id);
        }
        for (int i = 0; i < drafts; i++) history_push(&h, stack[i] = (int32_t)(rng() % (V + 10)) - 5);
        for (int i = drafts - 1; i >= 0; i--) history_pop(&h, stack[i]);
        assert_int_equal(h.n_ids, copy.n_ids);
        assert_memory_equal(h.ids, copy.ids, (size_t)h.n_ids * sizeof *h.ids);
        assert_memory_equal(h.state, copy.state, V * sizeof *h.state);
    }
    history_close(&h);
    history_close(&copy);
}

static void test_parameters(void **state) {
    (void)state;
    const sampler_bias far = { 8, 1 }, loud = { 1, 101 };
    const int32_t stop = -1;
    const sampler_params bad[] = { { .temperature = -1 },
                                   { .temperature = NAN },
                                   { .top_k = -1 },
                                   { .top_p = 1.1 },
                                   { .min_p = -0.1 },
                                   { .presence = 2.1 },
                                   { .frequency = INFINITY },
                                   { .repetition = -1 },
                                   { .min_tokens = -1 },
                                   { .bias = &far, .n_bias = 1 },
                                   { .bias = &loud, .n_bias = 1 },
                                   { .stop_ids = &stop, .n_stop_ids = 1 } };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        err e = { 0 };
        assert_false(sampler_check(&bad[i], 8, &e));
        assert_string_equal(e.id, "E-SAMPLE-PARAM");
    }
}

/* Large vocabulary: what is chosen is among the best, and how long it takes (shown, not judged: machines differ). */
static void test_large_vocabulary(void **state) {
    (void)state;
    enum { N = 248320, ROUNDS = 20 };
    float *v = malloc(N * sizeof *v);
    for (int i = 0; i < N; i++) v[i] = (uniform() + uniform() + uniform() + uniform() - 2) * 8;
    static const struct {
        const char *name;
        sampler_params p;
    } all[] = { { "greedy", { .temperature = 0 } },
                { "top-k 20, top-p 0.95", { .temperature = 1, .top_k = 20, .top_p = 0.95 } },
                { "top-p 0.95", { .temperature = 1, .top_p = 0.95 } },
                { "temperature 1", { .temperature = 1, .top_p = 1 } } };
    sampler s = opened(N, ISA_COUNT);
    float twentieth = 0;
    {
        int32_t ids[20];
        double lp[20];
        sampler_logprobs(&s, ids, lp, 20, v, N, 0);
        int above = 0;
        twentieth = v[ids[19]];
        for (int i = 0; i < N; i++) above += v[i] > twentieth;
        assert_in_range(above, 0, 19);
    }
    for (size_t c = 0; c < ARRAY_LEN(all); c++) {
        double best = 1;
        for (int i = 0; i < ROUNDS; i++) {
            const sampler_row r = { .logits = v, .n = N, .position = i };
            const double t0 = clock_seconds();
            const int32_t id = draw(&s, &all[c].p, &r);
            const double t = clock_seconds() - t0;
            if (t < best) best = t;
            if (c < 2) assert_true(v[id] >= twentieth);
        }
        print_message("%s over %d ids: %.1f us (%s)\n", all[c].name, N, best * 1e6, kern_isa_name(s.k.isa));
    }
    free(v);
    sampler_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chi2_tail),
        cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_distribution_of_many),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_partial_rows),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_nothing_left),
        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_reproducible),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_history),
        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_large_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
