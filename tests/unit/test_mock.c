/* A made-up model: its size, its values, and generation over it, simulated acceptance included. */
#include <stdlib.h>
#include <string.h>

#include "cmd/bench.h"
#include "support.h"

static mock build(int preset, int threads) {
    mock s;
    pool *p;
    err e = { 0 };
    assert_true(mock_plan(&s, preset, 0, &e));
    assert_true(pool_new(&p, threads, &e));
    assert_true(mock_build(&s, p, &e));
    pool_free(p);
    return s;
}

static void test_real_sizes(void **state) {
    (void)state;
    mock s;
    err e = { 0 };
    assert_true(mock_plan(&s, MOCK_FULL, 0, &e));
    assert_int_equal(s.config.layers, 40);
    assert_int_equal(s.config.attn_layers, 10);
    /* 40 layers and the draft layer: 256 experts and the shared one of three 512 x 2048 each; 30 GDN layers with 8192 + 4096
     * rows in and 4096 columns out; 11 attention layers with 8192 + 2 x 512 rows in and 4096 columns out. */
    const size_t ffn = 257 * 3 * (size_t)512 * 2048, gdn = (size_t)2048 * (8192 + 4096 + 4096),
                 attn = (size_t)2048 * (8192 + 1024 + 4096);
    assert_int_equal(s.nvfp4_bytes, (41 * ffn + 30 * gdn + 11 * attn) / 16 * 9);
    /* Head (and embedding), routers, shared gates, a and b of GDN, the draft layer's fc. */
    const size_t plain =
        (size_t)248320 * 2048 + 41 * (size_t)257 * 2048 + 30 * (size_t)64 * 2048 + 2 * (size_t)2048 * 2048;
    assert_int_equal(s.plain_bytes, 2 * plain);
    assert_true(s.source_bytes >= (ffn + gdn) / 16 * 9 && s.source_bytes < (ffn + gdn) / 16 * 9 + (4 << 20));
}

static void test_layers(void **state) {
    (void)state;
    mock s;
    const int bad[] = { -4, 1, 2, 3, 5, 1028 };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        err e = { 0 };
        assert_false(mock_plan(&s, MOCK_WIDE4, bad[i], &e));
        assert_string_equal(e.id, "E-BENCH-LAYERS");
    }
    err e = { 0 };
    assert_true(mock_plan(&s, MOCK_WIDE4, 12, &e));
    assert_int_equal(s.config.layers, 12);
    assert_int_equal(s.config.gdn_layers, 9);
}

static void test_threads_do_not_matter(void **state) {
    (void)state;
    mock a = build(MOCK_TINY, 1), b = build(MOCK_TINY, 3);
    assert_memory_equal(a.source, b.source, a.source_bytes);
    assert_memory_equal(a.plain, b.plain, a.plain_bytes);
    mock_free(&a);
    mock_free(&b);
}

static void test_values(void **state) {
    (void)state;
    mock s = build(MOCK_TINY, 2);
    const wexperts *x = &s.w.layers[1].ffn.experts;
    const size_t blocks = (size_t)x->inter * (size_t)x->hidden / 16;
    for (int i = 0; i < x->count; i++)
        for (size_t j = 0; j < blocks; j++) assert_in_range(x->up_q[i].scales[j], 0x70, 0x77);
    assert_true(x->gate[0] != x->gate[1] && memcmp(x->gate[0], x->gate[1], blocks * 8) != 0);
    const uint16_t *head = s.w.head.data;
    double sum = 0;
    for (int i = 0; i < s.w.head.rows * s.w.head.cols; i++) {
        const uint32_t bits = (uint32_t)head[i] << 16;
        float v;
        memcpy(&v, &bits, sizeof v);
        sum += (double)v * v;
    }
    /* Rows of norm 1, within a factor of two. */
    assert_in_range((int)(100 * sum / s.w.head.rows), 25, 400);
    mock_free(&s);
}

static engine *open_over(mock *s, const char *device) {
    engine *g;
    err e = { 0 };
    const engine_options o = { .ops = { .device = device, .threads = 2, .isa = ISA_COUNT },
                               .ctx = 256,
                               .no_text = true };
    if (!engine_open_weights(&g, "made up", &s->w, &s->config, &o, &e)) fail_msg("%s: %s", e.id, e.msg);
    assert_null(s->w.layers);
    return g;
}

typedef struct taken {
    int32_t ids[64];
    int n, rounds, wanted[8];
} taken;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    taken *t = ctx;
    t->ids[t->n++] = id;
    return true;
}

static int simulate(void *ctx, int depth) {
    taken *t = ctx;
    assert_int_equal(depth, 3);
    return t->wanted[t->rounds++ % 4];
}

static gen_result generate(engine *g, taken *t, int depth, int tokens) {
    int32_t ids[16];
    session s;
    gen_result r;
    err e = { 0 };
    bench_prompt(ids, 0, 16, g->n.real_vocab);
    assert_true(session_open(&s, g, depth > 0, &e) && session_set(&s, ids, 16, &e));
    const gen_options o = { .max_tokens = tokens,
                            .depth = depth,
                            .sampling = { .top_p = 1, .repetition = 1 },
                            .on_token = on_token,
                            .simulate = depth > 0 && t->wanted[3] ? simulate : NULL,
                            .ctx = t };
    if (!session_generate(&s, &o, &r, &e)) fail_msg("%s: %s", e.id, e.msg);
    session_close(&s);
    return r;
}

/* Repacked or in place, drafts or none: the same tokens, so the layers that share a source read it whole. */
static void test_same_tokens(void **state) {
    (void)state;
    mock a = build(MOCK_TINY, 2), b = build(MOCK_TINY, 2);
    engine *cpu = open_over(&a, "cpu"), *ref = open_over(&b, "ref");
    if (linear_owns_data(cpu->n.layers[0].ffn.gate)) mock_drop_source(&a);
    taken x = { .n = 0 }, y = { .n = 0 }, z = { .n = 0 };
    generate(cpu, &x, 0, 12);
    generate(cpu, &y, 2, 12);
    generate(ref, &z, 0, 12);
    assert_memory_equal(x.ids, y.ids, 12 * sizeof *x.ids);
    assert_memory_equal(x.ids, z.ids, 12 * sizeof *x.ids);
    bool varied = false;
    for (int i = 1; i < 12; i++) varied = varied || x.ids[i] != x.ids[0];
    assert_true(varied);
    engine_close(cpu);
    engine_close(ref);
    mock_free(&a);
    mock_free(&b);
}

static void test_simulated_acceptance(void **state) {
    (void)state;
    mock s = build(MOCK_TINY, 2);
    engine *g = open_over(&s, "cpu");
    taken t = { .wanted = { 0, 2, 1, 3 } };
    /* The first token, then rounds of 1, 3, 2 and 4 tokens, twice. */
    const gen_result r = generate(g, &t, 3, 21);
    assert_int_equal(r.output_tokens, 21);
    assert_int_equal(r.rounds, 8);
    assert_int_equal(r.accepted, 12);
    assert_int_equal(r.accepted_at[0], 6);
    assert_int_equal(r.accepted_at[2], 2);
    for (int i = 0; i < t.n; i++) assert_in_range(t.ids[i], 0, g->n.real_vocab - 1);
    engine_close(g);
    mock_free(&s);
}

static void test_bytes_of_a_token(void **state) {
    (void)state;
    mock s = build(MOCK_TINY, 1);
    engine *g = open_over(&s, "cpu");
    const bench_round one = { .sequences = 1, .yield = 1, .context = 100 };
    const bench_bytes b = bench_bytes_of(g, &one);
    /* tiny: hidden 128, 4 of 16 experts and a shared one of 64, GDN 2 x 32 keys and 4 x 32 values, attention 2 x 64 of 1. */
    const double ffn = 5 * 3.0 * 64 * 128, gdn = 128.0 * (256 + 128 + 128), attn = 128.0 * (256 + 64 + 64 + 128);
    assert_true(b.nvfp4 == (4 * ffn + 3 * gdn + attn) * 9 / 16);
    assert_true(b.plain == 2.0 * (4 * 17 * 128 + 3 * 8 * 128) + 3 * 4.0 * 256 * 4);
    assert_true(b.head == 2.0 * 2048 * 128);
    assert_true(b.kv == 100 * 2.0 * 64);
    assert_true(b.state == 2.0 * (double)config_state_bytes(&g->config));
    assert_true(b.draft == 0);
    /* Three rows of a round: experts are a union, dense weights are read once for all. */
    const bench_round drafted = { .sequences = 1, .depth = 2, .yield = 2, .context = 100 };
    const bench_bytes two = bench_bytes_of(g, &drafted);
    const double distinct = 16 * (1 - 0.75 * 0.75 * 0.75), more = (distinct - 4) * 3 * 64 * 128 * 4 * 9 / 16;
    assert_true(two.nvfp4 * 2 - b.nvfp4 > more - 1 && two.nvfp4 * 2 - b.nvfp4 < more + 1);
    assert_true(two.head == b.head / 2 && two.draft > 0);
    engine_close(g);
    mock_free(&s);
}

static void test_spread(void **state) {
    (void)state;
    bench_series odd = { .v = { 3, 1, 2 }, .n = 3 }, even = { .v = { 4, 1, 2, 9 }, .n = 4 };
    assert_true(bench_spread_of(&odd).median == 2 && bench_spread_of(&even).median == 3);
    assert_true(bench_spread_of(&even).min == 1 && bench_spread_of(&even).max == 9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real_sizes),
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_threads_do_not_matter),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_same_tokens),
        cmocka_unit_test(test_simulated_acceptance),
        cmocka_unit_test(test_bytes_of_a_token),
        cmocka_unit_test(test_spread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
