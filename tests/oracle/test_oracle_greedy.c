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

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_rounds), cmocka_unit_test(test_without_speculation),
                                        cmocka_unit_test(test_depth_one), cmocka_unit_test(test_depth_five) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
