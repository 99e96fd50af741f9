/* What must not change the output: chunk size, speculation, threads, ISA, backend, batch mates, continued sessions. Bits of
 * logits and ids are compared with memcmp. The seed of the random prompts is printed; SEED=n takes another. */
#include "base/rng.h"
#include "engine/teacher.h"
#include "support.h"

static uint64_t seed;

static uint32_t draw(uint32_t at, uint32_t below) { return (uint32_t)(rng_uniform(seed, 7, at, 1) * below); }

/* Random ids, but from a model's own running text where possible: here any real id will do. */
static void random_prompt(int32_t *v, int n, uint32_t salt) {
    for (int i = 0; i < n; i++) v[i] = (int32_t)draw(salt * 4096u + (uint32_t)i, 1544);
}

typedef struct out {
    int32_t v[300];
    int n;
} out;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    out *o = ctx;
    assert_in_range(o->n, 0, 299);
    o->v[o->n++] = id;
    return true;
}

static engine *open_with(int threads, kern_isa isa, const char *device, int chunk, int slots, kv_mode kv) {
    return open_tiny((engine_options){ .ctx = 1024,
                                       .kv = kv,
                                       .chunk = chunk,
                                       .slots = slots,
                                       .no_text = true,
                                       .ops = { .threads = threads, .isa = isa, .device = device } });
}

static out generate(engine *g, const int32_t *prompt, int n, int depth, double temperature, int tokens) {
    err e = { 0 };
    session s;
    gen_result r;
    out o = { .n = 0 };
    OK(session_open(&s, g, depth > 0, &e));
    OK(session_set(&s, prompt, n, &e));
    const gen_options opt = { .max_tokens = tokens,
                              .depth = depth,
                              .on_token = on_token,
                              .ctx = &o,
                              .sampling = { .temperature = temperature, .top_k = 20, .top_p = 0.95, .seed = seed } };
    OK(session_generate(&s, &opt, &r, &e));
    session_close(&s);
    return o;
}

static void same(const out *a, const out *b, const char *what) {
    if (a->n != b->n || memcmp(a->v, b->v, (size_t)a->n * sizeof a->v[0]) != 0) fail_msg("%s changed the output", what);
}

/* Final-norm hidden states of a teacher-forced pass: any difference in bits anywhere in the trunk shows here. */
static float *hidden_of(engine *g, const int32_t *prompt, int n) {
    err e = { 0 };
    teacher_result r;
    OK(teacher_run(&r, g, prompt, n, false, true, &e));
    float *all = malloc((size_t)n * (size_t)g->config.hidden * 3 * sizeof *all);
    const size_t part = (size_t)n * (size_t)g->config.hidden;
    memcpy(all, r.final_norm, part * sizeof *all);
    memcpy(all + part, r.mtp1, part * sizeof *all);
    memcpy(all + 2 * part, r.mtp2, part * sizeof *all);
    teacher_free(&r);
    return all;
}

static void test_hidden_bits(void **state) {
    (void)state;
    enum { MOST = 150 };
    const int N = is_short() ? 20 : MOST;
    int32_t prompt[MOST];
    random_prompt(prompt, N, 1);
    engine *base = open_with(1, ISA_COUNT, NULL, 256, 2, KV_CACHE_F32);
    const size_t bytes = (size_t)N * (size_t)base->config.hidden * 3 * sizeof(float);
    float *want = hidden_of(base, prompt, N);
    engine_close(base);
    const struct {
        int threads, chunk;
        kern_isa isa;
        const char *device, *what;
    } variants[] = {
        { 2, 256, ISA_COUNT, NULL, "two threads" },
        { 5, 256, ISA_COUNT, NULL, "five threads" },
        { 2, 64, ISA_COUNT, NULL, "chunks of 64" },
        { 2, 1, ISA_COUNT, NULL, "one row at a time" },
        { 2, 37, ISA_AVX2, NULL, "AVX2" },
        { 2, 29, ISA_AVX512, NULL, "AVX-512" },
        { 2, 41, ISA_NEON, NULL, "NEON" },
        { 2, 256, ISA_REF, NULL, "reference kernels" },
        { 1, 100, ISA_COUNT, "ref", "the ref backend" },
    };
    for (size_t i = 0; i < ARRAY_LEN(variants); i++) {
        engine *g =
            open_with(variants[i].threads, variants[i].isa, variants[i].device, variants[i].chunk, 2, KV_CACHE_F32);
        float *got = hidden_of(g, prompt, N);
        if (memcmp(got, want, bytes) != 0) fail_msg("%s changed bits", variants[i].what);
        free(got);
        engine_close(g);
    }
    free(want);
}

static void test_speculation_is_invisible(void **state) {
    (void)state;
    const uint32_t prompts = is_short() ? 1 : 2;
    const int tokens = is_short() ? 10 : 44;
    for (int kv = 0; kv < 2; kv++) {
        engine *g = open_with(2, ISA_COUNT, NULL, 0, 1, kv ? KV_CACHE_BF16 : KV_CACHE_F32);
        for (uint32_t p = 0; p < prompts; p++) {
            int32_t prompt[40];
            const int n = 1 + (int)draw(900 + p, 39);
            random_prompt(prompt, n, 10 + p);
            for (int t = 0; t < 2; t++) {
                const out off = generate(g, prompt, n, 0, t * 0.9, tokens);
                for (int depth = 1; depth <= ENGINE_MAX_DRAFT; depth++) {
                    if (is_short() && depth != 1 + kv && depth != 3 + t) continue;
                    const out on = generate(g, prompt, n, depth, t * 0.9, tokens);
                    same(&off, &on, "speculation");
                }
            }
        }
        engine_close(g);
    }
}

/* The screened head and a draft head of a part of the vocabulary: the full head's tokens, drafted or not. */
static void test_heads_are_invisible(void **state) {
    (void)state;
    engine *full = open_with(2, ISA_COUNT, NULL, 0, 1, KV_CACHE_F32);
    static const char *const devices[] = { NULL, "ref" };
    for (size_t d = 0; d < ARRAY_LEN(devices); d++) {
        const engine_options opt = { .ctx = 1024,
                                     .no_text = true,
                                     .kv = KV_CACHE_F32,
                                     .heads = { .mode = HEAD_SCREENED, .draft_rows = 500 },
                                     .ops = { .threads = 2, .isa = ISA_COUNT, .device = devices[d] } };
        engine *g = open_tiny(opt);
        assert_non_null(g->n.heads.top);
        assert_int_equal(g->n.heads.draft_rows, 500 + DRAFT_HEAD_LAST);
        const int tokens = is_short() ? 6 : devices[d] ? 10 : 50;
        for (uint32_t p = 0; p < (devices[d] || is_short() ? 1u : 3u); p++) {
            int32_t prompt[30];
            random_prompt(prompt, 30, 50 + p);
            for (int t = 0; t < 2; t++) {
                const out want = generate(full, prompt, 30, 0, t * 0.9, tokens);
                for (int depth = 0; depth <= 3; depth += is_short() ? 3 : 1) {
                    const out got = generate(g, prompt, 30, depth, t * 0.9, tokens);
                    same(&want, &got, "a screened head");
                }
            }
        }
        if (!devices[d]) assert_true(head_counted(g->n.heads.top).rows > 0);
        engine_close(g);
    }
    engine_close(full);
}

/* ---- penalties ---- */

typedef struct counted {
    out o;
    int count[1700];
    const sampler_params *p;
    bool greedy;
} counted;

/* Presence and frequency penalties do not care that a log-probability is a logit less a constant: the greedy choice must be
 * the best of the raw log-probabilities less what the tokens before it cost. */
static bool on_counted(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    counted *c = ctx;
    assert_in_range(c->o.n, 0, 299);
    c->o.v[c->o.n++] = id;
    if (c->greedy && c->p->repetition == 1) {
        const double mine = logprob - c->p->frequency * c->count[id] - (c->count[id] > 0 ? c->p->presence : 0);
        for (int i = 0; i < 64; i++) {
            const int n = c->count[top[i]];
            const double other = values[i] - c->p->frequency * n - (n > 0 ? c->p->presence : 0);
            if (!(mine > other - 1e-5)) fail_msg("token %d: id %d, but %d is better", c->o.n - 1, id, top[i]);
        }
    }
    c->count[id]++;
    return true;
}

static gen_result penalized(counted *c, engine *g, const int32_t *prompt, int n, int depth, const sampler_params *p) {
    err e = { 0 };
    session s;
    gen_result r;
    *c = (counted){ .p = p, .greedy = sampler_is_greedy(p) };
    OK(session_open(&s, g, depth > 0, &e));
    OK(session_set(&s, prompt, n, &e));
    const gen_options opt = { .max_tokens = is_short() ? 34 : 60,
                              .depth = depth,
                              .on_token = on_counted,
                              .ctx = c,
                              .sampling = *p,
                              .logprobs = 64 };
    OK(session_generate(&s, &opt, &r, &e));
    session_close(&s);
    return r;
}

static void test_penalties_and_drafts(void **state) {
    (void)state;
    const sampler_bias bias[] = { { 17, 2 }, { 300, -100 } };
    const int32_t stops[] = { 17, 198 };
    const sampler_params all[] = {
        { .repetition = 1, .presence = 1.5, .frequency = 0.3 },
        { .repetition = 1.2 },
        { .temperature = 0.8, .top_k = 20, .top_p = 0.95, .repetition = 1, .presence = 1.5, .seed = seed },
        { .temperature = 1, .top_p = 0.9, .repetition = 1.1, .frequency = 0.2, .seed = seed, .choice = 1 },
        { .temperature = 1,
          .top_p = 1,
          .min_p = 0.05,
          .repetition = 1,
          .presence = -0.5,
          .bias = bias,
          .n_bias = 2,
          .stop_ids = stops,
          .n_stop_ids = 2,
          .min_tokens = 31,
          .seed = seed },
    };
    engine *g = open_with(2, ISA_COUNT, NULL, 0, 1, KV_CACHE_F32);
    int64_t accepted = 0;
    int changed = 0;
    for (uint32_t i = 0; i < ARRAY_LEN(all); i++) {
        int32_t prompt[40];
        counted off, on;
        const int n = 1 + (int)draw(1900 + i, 39);
        random_prompt(prompt, n, 30 + i);
        penalized(&off, g, prompt, n, 0, &all[i]);
        for (int t = 0; t < 31 && all[i].min_tokens; t++) assert_true(off.o.v[t] != 17 && off.o.v[t] != 198);
        const out plain = generate(g, prompt, n, 0, all[i].temperature, is_short() ? 34 : 60);
        changed += memcmp(plain.v, off.o.v, sizeof plain.v) != 0;
        for (int depth = is_short() ? 3 : 1; depth <= (is_short() ? 3 : ENGINE_MAX_DRAFT);
             depth += depth == 3 ? 2 : 1) {
            const gen_result r = penalized(&on, g, prompt, n, depth, &all[i]);
            same(&off.o, &on.o, "speculation with penalties");
            accepted += r.accepted;
        }
    }
    printf("%lld drafts accepted under penalties\n", (long long)accepted);
    assert_true(accepted > (is_short() ? 4 : 20) && changed >= (is_short() ? 2 : 3)); /* else nothing was tested */
    engine_close(g);
}

/* What a small draft head may propose: its rows, and what the sequence holds. */
typedef struct proposals {
    out o;
    const int32_t *prompt;
    const net_heads *heads;
    int n_prompt, rare, rare_accepted, late; /* late: output tokens that nothing could have proposed */
} proposals;

static bool was_said(const proposals *p, int32_t id) {
    for (int i = 0; i < p->n_prompt; i++)
        if (p->prompt[i] == id) return true;
    for (int i = 0; i < p->o.n; i++)
        if (p->o.v[i] == id) return true;
    return false;
}

static bool on_proposed_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    proposals *p = ctx;
    p->late += !heads_drafts(p->heads, id) && !was_said(p, id);
    return on_token(&p->o, id, logprob, top, values);
}

/* Called before the round's tokens are. */
static void on_proposal(void *ctx, const gen_round *r) {
    proposals *p = ctx;
    for (int i = 0; i < r->depth; i++) {
        if (heads_drafts(p->heads, r->draft[i])) continue;
        assert_true(was_said(p, r->draft[i]));
        p->rare++;
        p->rare_accepted += i < r->accepted;
    }
}

static void test_own_ids_are_drafted(void **state) {
    (void)state;
    err e = { 0 };
    int rare = 0, rare_accepted = 0;
    for (int screened = 0; screened < 2; screened++) {
        engine *g =
            open_tiny((engine_options){ .ctx = 200,
                                        .no_text = true,
                                        .heads = { .mode = screened ? HEAD_SCREENED : HEAD_FULL, .draft_rows = 1 },
                                        .ops = { .threads = 2, .isa = ISA_COUNT } });
        const int tokens = is_short() ? 40 : 100;
        for (uint32_t i = 0; i < (is_short() ? 1 : 4); i++) {
            int32_t prompt[40];
            random_prompt(prompt, 40, 200 + i);
            const out off = generate(g, prompt, 40, 0, 0, tokens);
            proposals p = { .prompt = prompt, .n_prompt = 40, .heads = &g->n.heads };
            session s;
            gen_result r;
            OK(session_open(&s, g, true, &e));
            OK(session_set(&s, prompt, 40, &e));
            OK(session_generate(&s,
                                &(gen_options){ .max_tokens = tokens,
                                                .depth = 3,
                                                .on_token = on_proposed_token,
                                                .on_round = on_proposal,
                                                .ctx = &p },
                                &r, &e));
            session_close(&s);
            same(&off, &p.o, "a draft head of few rows");
            assert_int_equal(r.out_of_list, p.late);
            rare += p.rare;
            rare_accepted += p.rare_accepted;
        }
        engine_close(g);
    }
    printf("%d drafts of a sequence's own ids, %d accepted\n", rare, rare_accepted);
    assert_true(rare_accepted > (is_short() ? 2 : 20));
}

/* Two sequences in one batch, interleaved with another's rows, against each alone. */
static void test_batch_mates(void **state) {
    (void)state;
    enum { MOST = 90 };
    const int N = is_short() ? 40 : MOST;
    err e = { 0 };
    engine *g = open_with(2, ISA_COUNT, NULL, 256, 3, KV_CACHE_F32);
    const int h = g->config.hidden;
    int32_t prompt[3][MOST], ids_v[256];
    float *alone[3], *row = malloc((size_t)N * 3 * (size_t)h * sizeof *row);
    for (int i = 0; i < 3; i++) {
        teacher_result r;
        random_prompt(prompt[i], N, 100 + (uint32_t)i);
        OK(teacher_run(&r, g, prompt[i], N, false, false, &e));
        alone[i] = r.final_norm;
        r.final_norm = NULL;
        teacher_free(&r);
    }
    for (int i = 0; i < 3; i++) state_reset(&g->st, i);
    int at[3] = { 0, 0, 0 };
    for (uint32_t step = 0; at[0] < N || at[1] < N || at[2] < N; step++) {
        ops_span spans[3];
        int n_spans = 0, rows = 0;
        for (int i = 0; i < 3; i++) {
            int m = (int)draw(2000 + step * 3 + (uint32_t)i, 12);
            if (m > N - at[i]) m = N - at[i];
            if (m == 0) continue;
            spans[n_spans++] = (ops_span){ .slot = i, .row0 = rows, .rows = m, .pos0 = at[i] };
            memcpy(ids_v + rows, prompt[i] + at[i], (size_t)m * sizeof *ids_v);
            rows += m;
        }
        if (rows == 0) continue;
        forward_trunk(&g->sc, &g->st, ids_v, NULL, spans, n_spans);
        g->o->download(g->o, row, g->sc.hidden + h, (size_t)rows * (size_t)h * sizeof *row);
        for (int i = 0; i < n_spans; i++) {
            const ops_span *sp = &spans[i];
            assert_memory_equal(row + (int64_t)sp->row0 * h, alone[sp->slot] + (int64_t)sp->pos0 * h,
                                (size_t)sp->rows * (size_t)h * sizeof *row);
            at[sp->slot] += sp->rows;
        }
    }
    for (int i = 0; i < 3; i++) free(alone[i]);
    free(row);
    engine_close(g);
}

/* A session that goes on after an answer gives the bytes of a fresh one. */
static void test_continued_session(void **state) {
    (void)state;
    err e = { 0 };
    engine *g = open_with(2, ISA_COUNT, NULL, 16, 2, KV_CACHE_F32);
    for (int depth = 0; depth <= 3; depth += is_short() ? 2 : 1) {
        int32_t prompt[200];
        random_prompt(prompt, 30, 50 + (uint32_t)depth);
        int n = 30;
        session s;
        OK(session_open(&s, g, depth > 0, &e));
        for (int turn = 0; turn < 3; turn++) {
            out o = { .n = 0 };
            gen_result r;
            OK(session_set(&s, prompt, n, &e));
            const gen_options opt = { .max_tokens = 17 + turn, .depth = depth, .on_token = on_token, .ctx = &o };
            OK(session_generate(&s, &opt, &r, &e));
            if (turn > 0) assert_true(r.cached_tokens > 0);
            const out fresh = generate(g, prompt, n, depth, 0, 17 + turn);
            same(&fresh, &o, "continuing a session");
            memcpy(prompt + n, o.v, (size_t)o.n * sizeof *prompt);
            n += o.n;
            random_prompt(prompt + n, 5, 60 + (uint32_t)turn);
            n += 5;
        }
        session_close(&s);
    }
    engine_close(g);
}

/* The context ends inside a draft round: as many tokens as without drafts, and the same. */
static void test_end_of_context(void **state) {
    (void)state;
    int32_t prompt[20];
    random_prompt(prompt, 20, 70);
    engine *g =
        open_tiny((engine_options){ .ctx = 50, .kv = KV_CACHE_F32, .no_text = true, .ops = { .isa = ISA_COUNT } });
    const out off = generate(g, prompt, 20, 0, 0, 0);
    assert_int_equal(off.n, 31); /* 30 positions are left, and the last one still yields a token */
    for (int depth = 1; depth <= 5; depth += is_short() ? 2 : 1) {
        const out on = generate(g, prompt, 20, depth, 0, 0);
        same(&off, &on, "speculation at the end of the context");
    }
    engine_close(g);
}

int main(void) {
    const char *s = getenv("SEED");
    seed = s ? strtoull(s, NULL, 0) : 20261202;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hidden_bits),         cmocka_unit_test(test_speculation_is_invisible),
        cmocka_unit_test(test_heads_are_invisible), cmocka_unit_test(test_penalties_and_drafts),
        cmocka_unit_test(test_batch_mates),         cmocka_unit_test(test_continued_session),
        cmocka_unit_test(test_end_of_context),      cmocka_unit_test(test_own_ids_are_drafted)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
