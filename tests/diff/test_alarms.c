/* Acceptance that looks wrong is said: a damaged draft head, a model that says one thing whatever it is asked, and memory that
 * drafts and model share. Answers are right as long as only drafts are damaged. */
#include "lib/scratch.h"
#include "support.h"

enum { CTX = 256, TOKENS = 60, MOST_LINES = 16 };

static struct {
    char id[MOST_LINES][32];
    int n;
} said;

static void note(void *ctx, const char *id, const char *line) {
    (void)ctx, (void)line;
    if (said.n < MOST_LINES) snprintf(said.id[said.n++], sizeof said.id[0], "%s", id);
}

static int times(const char *id) {
    int n = 0;
    for (int i = 0; i < said.n; i++) n += strcmp(said.id[i], id) == 0;
    return n;
}

/* ---- models ---- */

static uint8_t *zeros;

static void zero(wmat *m) {
    assert_int_equal(m->type, DT_BF16);
    free(zeros);
    zeros = calloc((size_t)m->rows * (size_t)m->cols, 2);
    m->data = zeros;
}

static void no_draft_projection(void *ctx, weights *w) {
    (void)ctx;
    zero(&w->mtp.fc);
}

static void no_head(void *ctx, weights *w) {
    (void)ctx;
    zero(&w->head);
}

static engine *open_edited(void (*edit)(void *, weights *), int slots) {
    return open_tiny((engine_options){ .ctx = CTX,
                                       .slots = slots,
                                       .no_text = true,
                                       .edit = edit,
                                       .prefix_kv_bytes = 1 << 20,
                                       .prefix_state_bytes = 1 << 20,
                                       .ops = { .threads = 1, .isa = ISA_COUNT } });
}

/* ---- answers ---- */

typedef struct answer {
    int32_t ids[TOKENS];
    int n;
    bool ended;
    gen_result r;
    err fault;
} answer;

static bool on_token(void *ctx, int choice, int32_t id, double p, const int32_t *top, const double *values) {
    (void)choice, (void)p, (void)top, (void)values;
    answer *a = ctx;
    a->ids[a->n++] = id;
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    (void)choice;
    answer *a = ctx;
    a->ended = true;
    a->r = *r;
    a->fault = *e;
}

static void submit(loop *l, answer *a, int which) {
    err e = { 0 };
    int32_t prompt[12];
    for (int i = 0; i < 12; i++) prompt[i] = (which * 131 + i * 37) % 1500;
    *a = (answer){ .n = 0 };
    const loop_request q = { .prompt = prompt,
                             .n_prompt = 12,
                             .max_tokens = TOKENS,
                             .depth = -1,
                             .on_token = on_token,
                             .on_done = on_done,
                             .ctx = a };
    OK(loop_submit(l, NULL, &q, &e));
}

static void finish(loop *l) {
    for (int steps = 0; loop_step(l); steps++) assert_in_range(steps, 0, 20000);
}

static loop *open_loop(engine *g, int depth, bool fixed) {
    err e = { 0 };
    loop *l;
    said.n = 0;
    OK(loop_open(&l, g, &(loop_options){ .depth = depth, .fixed_depth = fixed }, &e));
    return l;
}

/* ---- tests ---- */

static void test_selftest_holds(void **state) {
    (void)state;
    err e = { 0 };
    for (int depth = 0; depth <= ENGINE_MAX_DRAFT; depth++) {
        engine *g = open_edited(NULL, depth % 2 ? 1 : 9);
        OK(engine_selftest(g, depth, 32, &e));
        OK(engine_selftest(g, depth, 1, &e));
        session s;
        OK(session_open(&s, g, false, &e)); /* everything was given back */
        session_close(&s);
        engine_close(g);
    }
    engine *g = open_tiny((engine_options){ .ctx = 8, .ops = { .isa = ISA_COUNT } }); /* less than it wants to say */
    OK(engine_selftest(g, 2, 32, &e));
    engine_close(g);
    g = open_tiny((engine_options){ .ctx = CTX, .ops = { .isa = ISA_COUNT } }); /* with texts for prompts */
    OK(engine_selftest(g, 3, 32, &e));
    engine_close(g);
}

/* What --selftest does: alone too, and said. */
static void test_all_of_it(void **state) {
    (void)state;
    err e = { 0 };
    for (int slots = 1; slots <= 9; slots += 4) {
        engine *g = open_edited(NULL, slots);
        said.n = 0;
        OK(engine_selftest_all(g, slots % 3, &e));
        assert_int_equal(times("N-SPEC-TESTED"), 1);
        session s;
        OK(session_open(&s, g, false, &e));
        session_close(&s);
        engine_close(g);
    }
}

/* A head that is never right: said once, and the tokens are those of the sound model. */
static void test_floor(void **state) {
    (void)state;
    engine *sound = open_edited(NULL, 4), *g = open_edited(no_draft_projection, 4);
    loop *a = open_loop(sound, 0, true);
    answer want[8], got[8];
    for (int i = 0; i < 8; i++) submit(a, &want[i], i);
    finish(a);
    loop_close(a);
    loop *l = open_loop(g, 2, true);
    for (int i = 0; i < 8; i++) submit(l, &got[i], i);
    for (int i = 0; i < 3; i++) loop_step(l);
    assert_int_equal(times("W-SPEC-FLOOR"), 0); /* too early to tell */
    finish(l);
    for (int i = 0; i < 8; i++) assert_memory_equal(got[i].ids, want[i].ids, sizeof want[i].ids);
    const loop_stats s = loop_counted(l);
    assert_true(s.rounds >= 400 && s.spec_floor >= 2);
    assert_int_equal(times("W-SPEC-FLOOR"), 1);
    assert_int_equal(s.spec_pinned + s.spec_corrupt, 0);
    loop_close(l);
    engine_close(g);
    /* The sound one has nothing to say of this kind. */
    l = open_loop(sound, 2, true);
    for (int i = 0; i < 8; i++) submit(l, &got[i], i);
    finish(l);
    assert_int_equal(times("W-SPEC-FLOOR"), 0);
    loop_close(l);
    engine_close(sound);
}

/* A model that says one thing, whatever it is asked: one prompt proves nothing, four start a test, which finds no fault. */
static void test_pinned(void **state) {
    (void)state;
    for (int slots = is_short() ? 3 : 1; slots <= 3; slots += 2) {
        engine *g = open_edited(no_head, slots);
        loop *l = open_loop(g, 2, true);
        answer got;
        for (int i = 0; i < 12; i++) submit(l, &got, 0), finish(l);
        assert_true(loop_counted(l).rounds > 200);
        assert_int_equal(loop_counted(l).spec_pinned, 0);
        for (int i = 0; i < 24; i++) submit(l, &got, i), finish(l);
        const loop_stats s = loop_counted(l);
        assert_true(s.spec_pinned >= 2);
        assert_int_equal(times("W-SPEC-PINNED"), 1);
        assert_int_equal(s.spec_corrupt + s.spec_floor + s.failed, 0);
        assert_int_equal(s.submitted, 36); /* the test's own are not counted */
        assert_int_equal(s.finished, 36);
        assert_int_equal(s.output_tokens, 36 * TOKENS);
        loop_close(l);
        engine_close(g);
    }
}

/* The test is cut off by the end of the loop. */
static void test_closed_while_testing(void **state) {
    (void)state;
    engine *g = open_edited(no_head, 1);
    loop *l = open_loop(g, 5, true);
    answer got;
    for (int i = 0; loop_counted(l).spec_pinned == 0; i++) {
        submit(l, &got, i);
        while (loop_counted(l).spec_pinned == 0 && loop_step(l)) continue;
    }
    for (int i = 0; i < 3; i++) loop_step(l);
    loop_close(l);
    assert_int_equal(times("E-SPEC-CORRUPT"), 0);
    engine_close(g);
}

/* Drafts and model share their KV: what runs with drafts fails, later answers are made without. */
static void test_corrupt(void **state) {
    (void)state;
    err e = { 0 };
    engine *g = open_edited(no_head, 2);
    const ops_kv own = g->st.mtp_kv;
    g->st.mtp_kv = g->st.kv[g->config.attn_layers - 1];
    assert_false(engine_selftest(g, 2, 4, &e));
    assert_string_equal(e.id, "E-SPEC-CORRUPT");
    loop *l = open_loop(g, 2, true);
    answer got[40];
    int failed = 0;
    for (int i = 0; i < 40; i++) {
        submit(l, &got[i], i);
        if (i % 2) finish(l);
    }
    const loop_stats s = loop_counted(l);
    for (int i = 0; i < 40; i++) {
        assert_true(got[i].ended);
        if (!got[i].fault.id) continue;
        assert_string_equal(got[i].fault.id, "E-SPEC-CORRUPT");
        failed++;
    }
    assert_int_equal(s.failed, failed);
    assert_int_equal(s.spec_corrupt, 1);
    assert_int_equal(times("E-SPEC-CORRUPT"), 1);
    assert_int_equal(got[39].r.rounds, 0);
    assert_int_equal(got[39].n, TOKENS);
    assert_true(s.prefix_forgotten > 0);
    g->st.mtp_kv = own;
    loop_close(l);
    OK(engine_selftest(g, 2, 4, &e));
    engine_close(g);
}

/* A device that forgets what was accepted. */
static void (*real_gdn)(ops *, float *, const float *, const float *, const float *, const float *, const float *,
                        ops_gdn *, const ops_span *, int);

static void forgetful_gdn(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                          const float *dt_bias, ops_gdn *st, const ops_span *spans, int n) {
    ops_span mine[64];
    assert_in_range(n, 0, 64);
    for (int i = 0; i < n; i++) mine[i] = spans[i], mine[i].commit = 0;
    real_gdn(o, out, c, a, b, neg_a, dt_bias, st, mine, n);
}

static void test_other_tokens(void **state) {
    (void)state;
    err e = { 0 };
    engine *g = open_edited(NULL, 2);
    real_gdn = g->o->gdn;
    g->o->gdn = forgetful_gdn;
    assert_false(engine_selftest(g, 2, 32, &e));
    assert_string_equal(e.id, "E-SPEC-CORRUPT");
    assert_non_null(strstr(e.msg, "other tokens with drafts than without"));
    said.n = 0;
    assert_false(engine_selftest_all(g, 2, &e));
    assert_string_equal(e.id, "E-SPEC-CORRUPT");
    assert_int_equal(times("N-SPEC-TESTED"), 0);
    g->o->gdn = real_gdn;
    e = (err){ 0 };
    OK(engine_selftest(g, 2, 32, &e));
    engine_close(g);
}

/* A device whose last sequence of several is wrong: with and without drafts alike, but not alone. */
static void crowded_gdn(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                        const float *dt_bias, ops_gdn *st, const ops_span *spans, int n) {
    real_gdn(o, out, c, a, b, neg_a, dt_bias, st, spans, n);
    int64_t values = 0;
    for (int i = 0; i < n; i++) values += spans[i].rows;
    values *= (int64_t)st->v_heads * st->v_dim;
    for (int64_t i = 0; n > 1 && i < values; i++) out[i] = 0;
}

static void test_other_tokens_alone(void **state) {
    (void)state;
    err e = { 0 };
    engine *g = open_edited(NULL, 8); /* all of the test's requests in each step */
    real_gdn = g->o->gdn;
    g->o->gdn = crowded_gdn;
    OK(engine_selftest(g, 0, 32, &e));
    assert_false(engine_selftest_all(g, 0, &e));
    assert_string_equal(e.id, "E-SPEC-CORRUPT");
    assert_non_null(strstr(e.msg, "other tokens alone than among others"));
    g->o->gdn = real_gdn;
    e = (err){ 0 };
    OK(engine_selftest_all(g, 0, &e));
    engine_close(g);
}

int main(void) {
    log_set_sink(note, NULL);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_selftest_holds),
                                        cmocka_unit_test(test_all_of_it),
                                        cmocka_unit_test(test_other_tokens_alone),
                                        cmocka_unit_test(test_floor),
                                        cmocka_unit_test(test_pinned),
                                        cmocka_unit_test(test_closed_while_testing),
                                        cmocka_unit_test(test_corrupt),
                                        cmocka_unit_test(test_other_tokens) };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(zeros);
    return failed;
}
