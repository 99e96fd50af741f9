/* The 23 greedy continuations of transformers and their NEXTN round traces, exactly. */
#include "support.h"

typedef struct seen {
    int32_t out[512];
    int n;
    gen_round rounds[256];
    int n_rounds;
} seen;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    seen *s = ctx;
    assert_in_range(s->n, 0, 511);
    s->out[s->n++] = id;
    return true;
}

static void on_round(void *ctx, const gen_round *r) {
    seen *s = ctx;
    assert_in_range(s->n_rounds, 0, 255);
    s->rounds[s->n_rounds++] = *r;
}

static int64_t number(const json *v) {
    assert_true(json_is(v, JSON_INT));
    return v->u.i;
}

static void compare_round(const gen_round *r, const json *want) {
    const json *draft = json_get(want, "draft"), *target = json_get(want, "target");
    assert_int_equal(r->known, number(json_get(want, "known")));
    assert_int_equal(r->depth, draft->n);
    for (int i = 0; i < r->depth; i++) assert_int_equal(r->draft[i], number(&draft->u.items[i]));
    assert_int_equal(r->depth + 1, target->n);
    for (int i = 0; i <= r->depth; i++) assert_int_equal(r->target[i], number(&target->u.items[i]));
    assert_int_equal(r->accepted, number(json_get(want, "accepted")));
}

static int run_case(engine *g, session *s, const json *c, int depth, int64_t *taken, int64_t *rounds) {
    err e = { 0 };
    const json *prompt = json_get(c, "prompt_ids"), *want = json_get(c, "output_ids"), *trace = json_get(c, "rounds");
    int32_t ids_v[1024];
    for (uint32_t i = 0; i < prompt->n; i++) ids_v[i] = (int32_t)number(&prompt->u.items[i]);
    seen *got = calloc(1, sizeof *got);
    gen_result r;
    session_reset(s);
    OK(session_set(s, ids_v, (int)prompt->n, &e));
    const gen_options opt = { .max_tokens = (int)want->n,
                              .depth = depth,
                              .stop_ids = g->config.stop_ids,
                              .n_stop_ids = g->config.stop_count,
                              .on_token = on_token,
                              .on_round = on_round,
                              .ctx = got };
    OK(session_generate(s, &opt, &r, &e));
    assert_int_equal(got->n, want->n);
    for (int i = 0; i < got->n; i++) assert_int_equal(got->out[i], number(&want->u.items[i]));
    if (depth == 2) {
        assert_int_equal(got->n_rounds, trace->n);
        for (int i = 0; i < got->n_rounds; i++) compare_round(&got->rounds[i], &trace->u.items[i]);
        *taken += r.accepted + r.rounds;
        *rounds += r.rounds;
    }
    free(got);
    return 1;
}

static void all_cases(int depth, kern_isa isa, const char *device, int chunk) {
    err e = { 0 };
    arena mem = { 0 };
    const json *file;
    OK(json_parse_file(&file, &mem, ORACLE "greedy.json", NULL, &e));
    const json *cases = json_get(file, "cases");
    assert_int_equal(cases->n, 23);
    engine *g = open_tiny(
        (engine_options){ .ctx = 1024, .kv = KV_CACHE_F32, .chunk = chunk, .ops = { .isa = isa, .device = device } });
    session s;
    OK(session_open(&s, g, depth > 0, &e));
    int64_t taken = 0, rounds = 0;
    /* An emulator runs all cases once, with rounds and text compared, and a few at the other depths. */
    const uint32_t step = is_emulated() && depth != 2 ? 5 : 1;
    for (uint32_t i = 0; i < cases->n; i += step) run_case(g, &s, &cases->u.items[i], depth, &taken, &rounds);
    if (depth == 2) {
        const double want = json_double(json_get(file, "mean_accept_length"));
        print_message("accept length %.4f, the oracle's %.4f\n", (double)taken / (double)rounds, want);
        assert_true(fabs((double)taken / (double)rounds - want) < 1e-12);
    }
    session_close(&s);
    engine_close(g);
    arena_free(&mem);
}

static void test_rounds(void **state) {
    (void)state;
    all_cases(2, ISA_COUNT, NULL, 0);
}
static void test_without_speculation(void **state) {
    (void)state;
    all_cases(0, ISA_COUNT, NULL, 0);
}
static void test_depth_one(void **state) {
    (void)state;
    all_cases(1, ISA_COUNT, NULL, 0);
}
static void test_depth_five(void **state) {
    (void)state;
    all_cases(5, ISA_COUNT, NULL, 7);
}

/* ---- all of them at once, through the loop ---- */

typedef struct served {
    seen got;
    gen_result result;
    err fault;
    int ended;
} served;

static bool on_served(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)choice;
    return on_token(&((served *)ctx)->got, id, logprob, top, values);
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    (void)choice;
    served *s = ctx;
    s->result = *r;
    s->fault = *e;
    s->ended++;
}

/* The oracle's last round may be one that max_tokens or a stop cut; the loop does not draft behind max_tokens. So rounds are
 * compared up to the last one, with what was left for that. */
static void compare_counts(const served *s, const json *c) {
    const json *trace = json_get(c, "rounds");
    int64_t accepted = 0, depth_at[ENGINE_MAX_DRAFT] = { 0 }, accepted_at[ENGINE_MAX_DRAFT] = { 0 };
    for (uint32_t i = 0; i + 1 < trace->n; i++) {
        const int64_t n = number(json_get(&trace->u.items[i], "accepted"));
        accepted += n;
        for (int k = 0; k < 2; k++) depth_at[k]++, accepted_at[k] += k < n;
    }
    assert_in_range(s->result.rounds, (int64_t)trace->n - 1, trace->n);
    for (int k = 0; k < 2; k++) {
        assert_in_range(s->result.drafted_at[k], depth_at[k], depth_at[k] + 1);
        assert_in_range(s->result.accepted_at[k], accepted_at[k], accepted_at[k] + 1);
    }
    assert_in_range(s->result.accepted, accepted, accepted + 2);
}

static void test_through_the_loop(void **state) {
    (void)state;
    err e = { 0 };
    arena mem = { 0 };
    const json *file;
    loop *l;
    OK(json_parse_file(&file, &mem, ORACLE "greedy.json", NULL, &e));
    const json *cases = json_get(file, "cases");
    const uint32_t step = is_short() ? 4 : 1;
    engine *g = open_tiny((engine_options){ .ctx = 1024,
                                            .kv = KV_CACHE_F32,
                                            .slots = 5,
                                            .chunk = 64,
                                            .heads = { .mode = HEAD_FULL, .draft_rows = DRAFT_HEAD_FULL },
                                            .ops = { .threads = 1, .isa = ISA_COUNT } });
    OK(loop_open(&l, g, &(loop_options){ .depth = 2, .fixed_depth = true }, &e));
    served *all = calloc(cases->n, sizeof *all);
    for (uint32_t i = 0; i < cases->n; i += step) {
        const json *prompt = json_get(&cases->u.items[i], "prompt_ids");
        int32_t v[1024];
        for (uint32_t k = 0; k < prompt->n; k++) v[k] = (int32_t)number(&prompt->u.items[k]);
        const loop_request q = { .prompt = v,
                                 .n_prompt = (int)prompt->n,
                                 .max_tokens = (int)json_get(&cases->u.items[i], "output_ids")->n,
                                 .depth = -1,
                                 .stop_ids = g->config.stop_ids,
                                 .n_stop_ids = g->config.stop_count,
                                 .on_token = on_served,
                                 .on_done = on_done,
                                 .ctx = &all[i] };
        OK(loop_submit(l, NULL, &q, &e));
    }
    while (loop_step(l)) continue;
    loop_close(l);
    for (uint32_t i = 0; i < cases->n; i += step) {
        const json *want = json_get(&cases->u.items[i], "output_ids");
        assert_int_equal(all[i].ended, 1);
        assert_null(all[i].fault.id);
        assert_int_equal(all[i].got.n, want->n);
        for (int k = 0; k < all[i].got.n; k++) assert_int_equal(all[i].got.out[k], number(&want->u.items[k]));
        compare_counts(&all[i], &cases->u.items[i]);
    }
    free(all);
    engine_close(g);
    arena_free(&mem);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_rounds), cmocka_unit_test(test_without_speculation),
                                        cmocka_unit_test(test_depth_one), cmocka_unit_test(test_depth_five),
                                        cmocka_unit_test(test_through_the_loop) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
