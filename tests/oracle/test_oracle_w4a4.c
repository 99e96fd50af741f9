/* The exported tiny model run again, against ModelOpt's simulated passes (tests/oracle/qwen36-tiny/nvfp4/README.md):
 * activation and KV codes, layers from the same input, whole prompts. */
#include <unistd.h>

#include "engine/teacher.h"

#include "export.h"

#define NVFP4 "tests/oracle/qwen36-tiny/nvfp4/"
enum { PROMPTS = 8, LEN = 64, LAST = 16 };

static char folder[] = "/tmp/nibble-w4a4-XXXXXX", model_dir[64];
static st_file want, trace;
static amax_table amax;
static int32_t prompts[PROMPTS][LEN];

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    log_set_level(0);
    assert_non_null(mkdtemp(folder));
    snprintf(model_dir, sizeof model_dir, "%s/model", folder);
    OK(amax_load(&amax, NVFP4 "modelopt-cuda/amax.safetensors", &e));
    OK(st_open(&want, NVFP4 "fakequant.safetensors", &e));
    OK(st_open(&trace, NVFP4 "fakequant-trace.safetensors", &e));
    export_tiny(model_dir);
    int32_t *all = oracle_ids(st_find(&want, STR("ids")));
    memcpy(prompts, all, sizeof prompts);
    free(all);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char command[128];
    amax_free(&amax);
    st_close(&want);
    st_close(&trace);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static engine *open_export(act_mode act, kv_mode kv) {
    err e = { 0 };
    engine *g;
    const engine_options o = {
        .ctx = LEN, .chunk = LEN, .act = act, .kv = kv, .no_text = true, .ops = { .isa = ISA_COUNT }
    };
    OK(engine_open(&g, model_dir, &o, &e));
    return g;
}

/* ---- codes ---- */

static float input_scale_of(str quantizer) {
    const float a = amax_get(&amax, quantizer);
    assert_true(a > 0);
    return nvfp4_scale_2(a, ARITH_CUDA);
}

static void test_activation_codes(void **state) {
    (void)state;
    int tensors = 0;
    for (int i = 0; i < trace.count; i++) {
        const st_tensor *in_t = &trace.tensors[i];
        if (!str_ends(in_t->name, STR(".input_quantizer.in"))) continue;
        char name[300];
        str stem = { in_t->name.p, in_t->name.n - 3 };
        snprintf(name, sizeof name, STR_FMT ".out", STR_ARG(stem));
        float *in = oracle_floats(in_t), *out = oracle_floats(st_find(&trace, str_of(name))),
              *got = malloc(in_t->bytes);
        const int64_t n = (int64_t)in_t->elems;
        uint8_t *codes = malloc((size_t)n / 2), *scales = malloc((size_t)n / 16);
        const float g = input_scale_of(stem);
        nvfp4_act_encode(codes, scales, in, n, g);
        nvfp4_decode_f32(got, codes, scales, n, g);
        for (int64_t k = 0; k < n; k++)
            if (got[k] != out[k])
                fail_msg(STR_FMT ": element %lld: %g, ModelOpt has %g", STR_ARG(in_t->name), (long long)k,
                         (double)got[k], (double)out[k]);
        free(in);
        free(out);
        free(got);
        free(codes);
        free(scales);
        tensors++;
    }
    assert_int_equal(tensors, 8);
}

static void test_kv_codes(void **state) {
    (void)state;
    for (int v = 0; v < 2; v++) {
        char name[200];
        const int n =
            snprintf(name, sizeof name, "model.language_model.layers.3.self_attn.%c_bmm_quantizer", v ? 'v' : 'k');
        const float a = amax_get(&amax, (str){ name, (size_t)n }), scale = fp8_scale(a, ARITH_CUDA),
                    m = fp8_sim_multiplier(a);
        snprintf(name + n, sizeof name - (size_t)n, ".in");
        const st_tensor *in_t = st_find(&trace, str_of(name));
        float *in = oracle_floats(in_t);
        snprintf(name + n, sizeof name - (size_t)n, ".out");
        float *out = oracle_floats(st_find(&trace, str_of(name)));
        for (uint64_t k = 0; k < in_t->elems; k++) {
            assert_true(fp8_sim(in[k], m) == out[k]);
            assert_int_equal(e4m3_from_f32(in[k] / scale) & 0x7f ? e4m3_from_f32(in[k] / scale) : 0,
                             e4m3_from_f32(out[k] / scale) & 0x7f ? e4m3_from_f32(out[k] / scale) : 0);
        }
        free(in);
        free(out);
    }
}

/* ---- layers from the same input ---- */

/* Distance of a code's quotient to the nearest rounding boundary, relative; small = the code could have gone either way. */
static double tie_distance(const float *x, int n, float g) {
    static const double ties[] = { 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 };
    double best = 1;
    for (int b = 0; b < n / 16; b++) {
        uint8_t codes[8], scale;
        float amax_b = 0;
        nvfp4_act_encode(codes, &scale, x + 16 * b, 16, g);
        const float den = e4m3_to_f32(scale) * g;
        for (int i = 0; i < 16; i++) {
            const double q = fabs((double)x[16 * b + i]) / den;
            if (fabsf(x[16 * b + i]) > amax_b) amax_b = fabsf(x[16 * b + i]);
            for (size_t t = 0; den > 0 && t < ARRAY_LEN(ties); t++)
                if (fabs(q - ties[t]) / ties[t] < best) best = fabs(q - ties[t]) / ties[t];
        }
        /* the block scale itself is a rounded E4M3 */
        const double s = (double)amax_b / (6.0 * g);
        for (int up = 0; up < 2; up++) {
            const int other = up ? scale + 1 : scale - 1;
            if (other < 0 || other > 0x7e || s == 0) continue;
            const double mid = 0.5 * ((double)e4m3_to_f32(scale) + e4m3_to_f32((uint8_t)other));
            if (fabs(s - mid) / mid < best) best = fabs(s - mid) / mid;
        }
    }
    return best;
}

typedef struct nearness {
    double near[LEN]; /* per token: the smallest distance of any code of any quantized input */
} nearness;

static void note_row(nearness *w, int row, const float *x, int n, float g) {
    const double d = tie_distance(x, n, g);
    if (d < w->near[row]) w->near[row] = d;
}

static float scale_named(const char *fmt, const char *name) {
    char key[400];
    snprintf(key, sizeof key, fmt, name);
    const float a = amax_get(&amax, str_of(key));
    return a > 0 ? nvfp4_scale_2(a, ARITH_CUDA) : 0;
}

static void on_op(void *ctx, ops *inner, const ops_event *ev) {
    nearness *w = ctx;
    (void)inner;
    if (strcmp(ev->op, "linear") == 0) {
        char module[400];
        snprintf(module, sizeof module, "%s", linear_name(ev->w));
        module[strlen(module) - 7] = 0;
        const float g = scale_named("%s.input_quantizer", module);
        for (int r = 0; g > 0 && r < ev->rows; r++) note_row(w, r, ev->in + r * ev->in_ld, ev->in_cols, g);
    } else if (strcmp(ev->op, "moe") == 0) {
        const float gu = scale_named("%s.gate_up_proj_input_quantizer", experts_name(ev->ex));
        const float gd = scale_named("%s.down_proj_input_quantizer", experts_name(ev->ex));
        for (int r = 0; r < ev->rows; r++) {
            note_row(w, r, ev->in + r * ev->in_ld, ev->in_cols, gu);
            for (int j = 0; j < ev->k; j++)
                note_row(w, r, ev->in2 + ((int64_t)r * ev->k + j) * ev->in2_cols, ev->in2_cols, gd);
        }
    }
}

static void test_layers(void **state) {
    (void)state;
    err e = { 0 };
    engine *g = open_export(ACT_AUTO, KV_CACHE_AUTO);
    const int h = g->config.hidden, layers = g->config.layers;
    float *got = malloc((size_t)LEN * (size_t)h * sizeof *got);
    int exact = 0, total = 0;
    for (int l = 0; l < layers - 1; l++) {
        char name[64];
        nearness w;
        ops *tap, *plain = g->n.o;
        for (int t = 0; t < LEN; t++) w.near[t] = 1;
        snprintf(name, sizeof name, "w4a4_kv8.hidden.%d", l);
        float *in = oracle_floats(st_find(&want, str_of(name)));
        snprintf(name, sizeof name, "w4a4_kv8.hidden.%d", l + 1);
        float *out = oracle_floats(st_find(&want, str_of(name)));
        const ops_span span = { .rows = LEN };
        OK(ops_tap_open(&tap, plain, on_op, &w, &e));
        state_reset(&g->st, 0);
        g->n.o = tap;
        const pass p = forward_begin(&g->sc, &g->st, prompts[0], NULL, &span, 1);
        plain->upload(plain, g->sc.x, in, (size_t)LEN * (size_t)h * sizeof *in);
        forward_layer(&p, l);
        plain->download(plain, got, g->sc.x, (size_t)LEN * (size_t)h * sizeof *got);
        g->n.o = plain;
        tap->close(tap);
        double nearest = 1; /* a flipped code of an earlier token reaches later ones through state or cache */
        for (int t = 0; t < LEN; t++) {
            const double rms = relative_rms(got + (int64_t)t * h, out + (int64_t)t * h, h);
            if (w.near[t] < nearest) nearest = w.near[t];
            total++;
            if (rms <= 1e-6)
                exact++;
            else {
                print_message("layer %d token %d: relative RMS %.2e, nearest code %.1e from a tie\n", l, t, rms,
                              nearest);
                assert_true(nearest <= 1e-5);
            }
        }
        free(in);
        free(out);
    }
    print_message("%d of %d tokens within 1e-6\n", exact, total);
    assert_true(exact * 100 >= total * 99);
    free(got);
    engine_close(g);
}

/* ---- whole prompts ---- */

static void run_prompt(engine *g, int i, float *logits) {
    err e = { 0 };
    teacher_result r;
    OK(teacher_run(&r, g, prompts[i], LEN, false, false, &e));
    OK(teacher_logits(g, logits, r.final_norm + (int64_t)(LEN - LAST) * g->config.hidden, LAST, &e));
    teacher_free(&r);
}

static void test_w4a4_prompts(void **state) {
    (void)state;
    engine *g = open_export(ACT_AUTO, KV_CACHE_AUTO);
    const int v = g->config.vocab;
    assert_int_equal(g->kv_type, DT_F8_E4M3);
    float *all = oracle_floats(st_find(&want, STR("w4a4_kv8.logits_last16"))),
          *got = malloc((size_t)LAST * (size_t)v * sizeof *got);
    int close = 0, same_top = 0;
    for (int i = 0; i < PROMPTS; i++) {
        const float *ref = all + (int64_t)i * LAST * v;
        run_prompt(g, i, got);
        double sum = 0, worst = 0;
        for (int64_t k = 0; k < (int64_t)LAST * v; k++) sum += ((double)got[k] - ref[k]) * ((double)got[k] - ref[k]);
        const double rms = sqrt(sum / (LAST * v));
        for (int t = 0; t < LAST; t++) {
            const double kl = mean_kl(got + (int64_t)t * v, ref + (int64_t)t * v, 1, v);
            int a = 0, b = 0;
            for (int k = 1; k < v; k++) {
                if (got[(int64_t)t * v + k] > got[(int64_t)t * v + a]) a = k;
                if (ref[(int64_t)t * v + k] > ref[(int64_t)t * v + b]) b = k;
            }
            if (kl > worst) worst = kl;
            same_top += a == b;
        }
        print_message("prompt %d: logit RMS %.2e, worst KL %.1e\n", i, rms, worst);
        if (rms <= 1e-5)
            close++;
        else /* a code flipped on the way: the band of the issue for such a prompt */
            assert_true(worst <= 1e-2);
    }
    assert_true(close >= 4);
    assert_true(same_top * 100 >= PROMPTS * LAST * 97);
    free(all);
    free(got);
    engine_close(g);
}

static void compare_w4a16(kv_mode kv, const char *name) {
    engine *g = open_export(ACT_BF16, kv);
    const int v = g->config.vocab;
    float *all = oracle_floats(st_find(&want, str_of(name))), *got = malloc((size_t)LAST * (size_t)v * sizeof *got);
    for (int i = 0; i < PROMPTS; i++) {
        run_prompt(g, i, got);
        const double rms = relative_rms(got, all + (int64_t)i * LAST * v, (int64_t)LAST * v);
        print_message("%s prompt %d: relative RMS %.2e\n", name, i, rms);
        if (kv == KV_CACHE_F32) assert_true(rms <= 1e-5);
    }
    free(all);
    free(got);
    engine_close(g);
}

static void test_w4a16_prompts(void **state) {
    (void)state;
    compare_w4a16(KV_CACHE_F32, "w4a16.logits_last16");
    compare_w4a16(KV_CACHE_AUTO, "w4a16_kv8.logits_last16");
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_activation_codes), cmocka_unit_test(test_kv_codes),
                                        cmocka_unit_test(test_layers), cmocka_unit_test(test_w4a4_prompts),
                                        cmocka_unit_test(test_w4a16_prompts) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
