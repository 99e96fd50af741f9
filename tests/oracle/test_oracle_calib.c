/* Calibration of the tiny model on the sequences that ModelOpt calibrated on, against the maxima it found: the same
 * quantizers, and values within two bfloat16 steps. ModelOpt ran the model in bfloat16, nibble runs it in float32; its own
 * CUDA and CPU runs differ by one step in five places. */
#include <math.h>

#include "quant/calib.h"
#include "quant/calib_data.h"
#include "quant/plan.h"

#include "support.h"

#define NVFP4 "tests/oracle/qwen36-tiny/nvfp4/"

enum { SEQUENCES = 16, TOKENS = 2630, TRUNK_NAMES = 70, HEAD_NAMES = 11, LAYERS = 8, STEPS = 2 };

static calib_data data;
static amax_table once; /* with one draft step, as the oracle of the head had it */
static calib_report report;

static amax_table calibrate(int mtp_steps, calib_report *r) {
    err e = { 0 };
    amax_table t;
    const calib_options o = { .ops = { .threads = 2, .isa = ISA_COUNT }, .mtp_steps = mtp_steps };
    OK(calib_run(&t, r, TINY, &data, &o, &e));
    return t;
}

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    log_set_level(0);
    OK(calib_data_ids(&data, NVFP4 "calibration.json", 0, 0, &e));
    once = calibrate(1, &report);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    amax_free(&once);
    calib_report_free(&report);
    calib_data_free(&data);
    return 0;
}

static bool is_activation(str name) {
    return str_ends(name, STR("input_quantizer")) || str_ends(name, STR("_bmm_quantizer"));
}

/* |got - want| in steps of the bfloat16 numbers around want. */
static double steps_apart(float got, float want) {
    int exponent;
    frexpf(want, &exponent);
    return fabs((double)got - (double)want) / ldexp(1, exponent - 8);
}

/* Every activation maximum of the file has its counterpart, at most STEPS away; how many there are. */
static int compare(const amax_table *want) {
    int n = 0;
    for (int i = 0; i < want->n; i++) {
        const amax_entry *w = &want->v[i];
        if (!is_activation(w->name)) continue;
        const float got = amax_get(&once, w->name);
        if (got < 0) fail_msg(STR_FMT ": not calibrated", STR_ARG(w->name));
        if (!(steps_apart(got, w->value) <= STEPS))
            fail_msg(STR_FMT ": %.9g, the oracle has %.9g", STR_ARG(w->name), (double)got, (double)w->value);
        n++;
    }
    return n;
}

static void test_data(void **state) {
    (void)state;
    assert_int_equal(data.n, SEQUENCES);
    assert_int_equal(data.tokens, TOKENS);
    assert_int_equal(report.tokens, TOKENS);
}

static void test_trunk(void **state) {
    (void)state;
    static const char *const files[] = { NVFP4 "modelopt-cuda/amax.safetensors",
                                         NVFP4 "modelopt-cpu/amax.safetensors" };
    for (size_t i = 0; i < ARRAY_LEN(files); i++) {
        err e = { 0 };
        amax_table want;
        OK(amax_load(&want, files[i], &e));
        assert_int_equal(compare(&want), TRUNK_NAMES);
        amax_free(&want);
    }
}

static void test_head(void **state) {
    (void)state;
    err e = { 0 };
    amax_table want;
    OK(amax_load(&want, NVFP4 "mtp/amax.safetensors", &e));
    assert_int_equal(compare(&want), HEAD_NAMES);
    amax_free(&want);
}

/* The second draft step only adds rows: trunk as it was, head nowhere lower and somewhere higher. */
static void test_second_step(void **state) {
    (void)state;
    calib_report r;
    amax_table twice = calibrate(2, &r);
    int higher = 0;
    assert_int_equal(twice.n, once.n);
    for (int i = 0; i < once.n; i++) {
        const float one = once.v[i].value, two = amax_get(&twice, once.v[i].name);
        const bool head = str_starts(once.v[i].name, STR("mtp."));
        assert_true(head ? two >= one : two == one);
        higher += two > one;
    }
    assert_true(higher > 0);
    calib_report_free(&r);
    amax_free(&twice);
}

/* What calibration found beyond the oracle's quantizers are Linears that no recipe quantizes by default. */
static void test_names(void **state) {
    (void)state;
    static const char *const kept[] = { ".linear_attn.in_proj_a", ".linear_attn.in_proj_b", ".mlp.gate",
                                        ".mlp.shared_expert_gate", "mtp.fc" };
    err e = { 0 };
    amax_table trunk, head;
    OK(amax_load(&trunk, NVFP4 "modelopt-cuda/amax.safetensors", &e));
    OK(amax_load(&head, NVFP4 "mtp/amax.safetensors", &e));
    int known = 0;
    for (int i = 0; i < once.n; i++) {
        str name = once.v[i].name;
        if (amax_get(&trunk, name) >= 0 || amax_get(&head, name) >= 0) {
            known++;
            continue;
        }
        assert_true(str_ends(name, STR(".input_quantizer")));
        name.n -= strlen(".input_quantizer");
        bool expected = false;
        for (size_t k = 0; k < ARRAY_LEN(kept); k++) expected |= str_ends(name, str_of(kept[k]));
        if (!expected) fail_msg(STR_FMT ": the oracle has no such quantizer", STR_ARG(name));
    }
    assert_int_equal(known, TRUNK_NAMES + HEAD_NAMES);
    amax_free(&trunk);
    amax_free(&head);
}

/* Members of a fusion group read the same tensor, so their maxima are the same float32; routed experts share theirs. */
static void test_groups(void **state) {
    (void)state;
    err e = { 0 };
    ckpt files;
    model_config config;
    weights bound;
    plan p;
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_NVFP4 };
    OK(ckpt_open(&files, TINY, &e));
    OK(config_read(&config, files.config, files.generation, TINY, &e));
    OK(weights_bind(&bound, &files, &config, &e));
    OK(plan_make(&p, &files, &config, &r, 10000000000u, &e));
    int pairs = 0;
    for (int i = 0; i < p.n_modules; i++) {
        const qmodule *m = &p.modules[i], *first = &p.modules[m->group];
        if (m->format != QF_NVFP4) continue;
        const float a = amax_get(&once, m->input_key);
        if (!(a > 0)) fail_msg(STR_FMT ": no maximum", STR_ARG(m->input_key));
        assert_true(a == amax_get(&once, first->input_key));
        pairs += first != m;
    }
    assert_true(pairs > 0);
    for (int l = 0; l < LAYERS; l++) { /* routed and shared experts read the block's input */
        char routed[128], shared[128];
        snprintf(routed, sizeof routed, "model.language_model.layers.%d.mlp.experts.gate_up_proj_input_quantizer", l);
        snprintf(shared, sizeof shared, "model.language_model.layers.%d.mlp.shared_expert.gate_proj.input_quantizer",
                 l);
        assert_true(amax_get(&once, str_of(routed)) == amax_get(&once, str_of(shared)));
    }
    plan_free(&p);
    weights_free(&bound);
    ckpt_close(&files);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_data),        cmocka_unit_test(test_trunk), cmocka_unit_test(test_head),
        cmocka_unit_test(test_second_step), cmocka_unit_test(test_names), cmocka_unit_test(test_groups),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
