/* Routed experts of a device with memory of its own that stay with the CPU: the CPU backend's bits, whichever layers they are.
 * Needs NIBBLE_TEST_DEVICE=cuda (a GPU, or the emulator); without it only the refusals are tested. */
#include "base/file.h"
#include "base/rng.h"
#include "engine/teacher.h"
#include "export.h"
#include "lib/scratch.h"

enum { CTX = 64, PROMPT = 10, TOKENS = 4, MOST = 16 };

static const char *device(void) {
    const char *d = getenv("NIBBLE_TEST_DEVICE");
    return d && strcmp(d, "cuda") == 0 ? d : NULL;
}

static layer_set set_of(const char *text) {
    layer_set s = { 0 };
    if (strcmp(text, "all") == 0)
        s.all = true;
    else if (*text && !layer_set_parse(&s, text))
        fail_msg("layers %s", text);
    return s;
}

static engine_options options(const char *dev, const char *layers, int chunk, act_mode act) {
    return (engine_options){ .ctx = CTX,
                             .chunk = chunk,
                             .slots = 2,
                             .act = act,
                             .no_text = true,
                             .ops = { .device = dev, .threads = 2, .isa = ISA_COUNT, .cpu_experts = set_of(layers) } };
}

/* Everything that is compared: hidden states of a teacher-forced pass, then greedy and sampled answers at depths 0 and 2. */
typedef struct seen {
    float *states;
    size_t bytes;
    int32_t tokens[4][MOST];
    int n[4], at;
} seen;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    seen *s = ctx;
    assert_in_range(s->n[s->at], 0, MOST - 1);
    s->tokens[s->at][s->n[s->at]++] = id;
    return true;
}

static void watch(seen *s, engine *g, int tokens) {
    int32_t ids[PROMPT];
    err e = { 0 };
    teacher_result r;
    for (int i = 0; i < PROMPT; i++) ids[i] = (int32_t)(rng_uniform(11, 3, (uint64_t)i, 1) * 1500);
    OK(teacher_run(&r, g, ids, PROMPT, false, true, &e));
    const size_t part = (size_t)PROMPT * (size_t)g->config.hidden;
    *s = (seen){ .states = malloc(3 * part * sizeof(float)), .bytes = 3 * part * sizeof(float) };
    memcpy(s->states, r.final_norm, part * sizeof(float));
    memcpy(s->states + part, r.mtp1, part * sizeof(float));
    memcpy(s->states + 2 * part, r.mtp2, part * sizeof(float));
    teacher_free(&r);
    for (; tokens > 0 && s->at < (is_short() ? 2 : 4); s->at++) {
        session one;
        gen_result done;
        const gen_options o = { .max_tokens = tokens,
                                .depth = s->at % 2 * 2,
                                .on_token = on_token,
                                .ctx = s,
                                .sampling = { .temperature = s->at / 2, .top_p = 0.95, .top_k = 20, .seed = 5 } };
        OK(session_open(&one, g, o.depth > 0, &e));
        OK(session_set(&one, ids, PROMPT / 2, &e));
        OK(session_generate(&one, &o, &done, &e));
        session_close(&one);
    }
}

static void compare(const char *dir, act_mode act, const char *layers, const int *chunks, int n_chunks, int tokens) {
    err e = { 0 };
    engine *g;
    seen want, got;
    engine_options o = options("cpu", "", 0, act);
    OK(engine_open(&g, dir, &o, &e));
    watch(&want, g, tokens);
    engine_close(g);
    for (int i = 0; i < n_chunks; i++) {
        o = options("cuda", layers, chunks[i], act);
        OK(engine_open(&g, dir, &o, &e));
        assert_true(g->plan.on_device);
        assert_int_equal(g->plan.host_bytes > 0, *layers != 0);
        watch(&got, g, i == 0 ? tokens : 0);
        engine_close(g);
        if (memcmp(want.states, got.states, want.bytes) != 0)
            fail_msg("experts '%s', act %d, pieces of %d: other hidden states", layers, act, chunks[i]);
        for (int t = 0; t < 4 && i == 0; t++)
            if (want.n[t] != got.n[t] || memcmp(want.tokens[t], got.tokens[t], sizeof want.tokens[t]) != 0)
                fail_msg("experts '%s', act %d: other tokens in answer %d", layers, act, t);
        free(got.states);
    }
    free(want.states);
}

static void test_same_bits(void **state) {
    (void)state;
    if (!device()) skip();
    static const int chunks[] = { CTX, 7, 1 };
    static const char *const layers[] = { "all", "0,2-3", "" };
    char *folder = scratch_new(), *dir = scratch_path(folder, "export");
    export_tiny(dir);
    const act_mode acts[] = { ACT_AUTO, ACT_INT8, ACT_BF16 };
    for (size_t i = 0; i < ARRAY_LEN(layers); i++) {
        compare(TINY, ACT_AUTO, layers[i], chunks, i == 0 ? 3 : 1, i < 2 ? TOKENS : 0);
        for (size_t a = 0; a < ARRAY_LEN(acts); a++)
            compare(dir, acts[a], layers[i], chunks, i + a == 0 ? 3 : 1, i + a == 0 ? TOKENS : 0);
    }
    free(dir);
    scratch_free(folder);
}

/* The draft layer alone, named by the number behind the last layer. */
static void test_draft_layer(void **state) {
    (void)state;
    if (!device()) skip();
    err e = { 0 };
    engine *g;
    const int chunks[] = { CTX };
    char number[16];
    engine_options o = options("cuda", "", 0, ACT_AUTO);
    OK(engine_open(&g, TINY, &o, &e));
    snprintf(number, sizeof number, "%d", g->config.layers);
    const int64_t all = g->plan.total_bytes;
    engine_close(g);
    compare(TINY, ACT_AUTO, number, chunks, 1, TOKENS);
    /* What is kept is not on the device. */
    o = options("cuda", number, 0, ACT_AUTO);
    OK(engine_open(&g, TINY, &o, &e));
    assert_int_equal(g->plan.total_bytes + g->plan.host_packed_bytes + g->plan.host_mapped_bytes, all);
    assert_true(g->plan.host_packed_bytes + g->plan.host_mapped_bytes > 0);
    engine_close(g);
    o.ops.cpu_experts = set_of("1000");
    assert_false(engine_open(&g, TINY, &o, &e));
    assert_string_equal(e.id, "E-ENGINE-EXPERTS");
}

static void test_memory_too_small(void **state) {
    (void)state;
    if (!device()) skip();
    err e = { 0 };
    engine *g;
    engine_options o = options("cuda", "", 0, ACT_AUTO);
    OK(engine_open(&g, TINY, &o, &e));
    o.memory_bytes = g->plan.total_bytes - 1;
    engine_close(g);
    assert_false(engine_open(&g, TINY, &o, &e));
    assert_string_equal(e.id, "E-MACHINE-PLAN");
    assert_non_null(strstr(e.msg, "--experts cpu:LAYERS"));
    o.ops.cpu_experts = set_of("all");
    e = (err){ 0 };
    OK(engine_open(&g, TINY, &o, &e));
    engine_close(g);
}

static void test_refused(void **state) {
    (void)state;
    static const char *const others[] = { "cpu", "ref" };
    for (size_t i = 0; i < ARRAY_LEN(others); i++) {
        err e = { 0 };
        engine *g;
        const engine_options o = options(others[i], "0-1", 0, ACT_AUTO);
        assert_false(engine_open(&g, TINY, &o, &e));
        assert_string_equal(e.id, "E-OPS-EXPERTS");
        assert_int_equal(e.kind, ERR_USAGE);
        assert_non_null(strstr(e.msg, "--device cuda"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_draft_layer),
        cmocka_unit_test(test_memory_too_small),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
