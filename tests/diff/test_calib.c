/* Calibration gives the same bytes whichever way it is run: chunks, threads, ISA, backend, order of the samples, one set or
 * merged parts, memory or disk. And what it counts adds up, and what it refuses it names. */
#include <unistd.h>

#include "base/file.h"
#include "base/rng.h"
#include "quant/calib.h"
#include "quant/calib_data.h"

#include "lib/scratch.h"
#include "lib/synth.h"
#include "support.h"

/* Sequences of these lengths from the oracle's calibration set: one of a single token (no draft row at all), one of two
 * (one draft step), one longer than a tile of attention. */
static const int lengths[] = { 37, 1, 80, 2, 16, 9 };
enum { SEQUENCES = 6, TOKENS = 145, LAYERS = 8, EXPERTS = 16, TOPK = 4 };

static char *folder;
static calib_data data;
static buf expected; /* the saved file of the plain run */
static calib_options plain = { .ops = { .threads = 1, .isa = ISA_COUNT }, .mtp_steps = 2 };

static buf saved(const amax_table *t) {
    err e = { 0 };
    buf b = { 0 };
    char *path = scratch_path(folder, "amax.safetensors");
    OK(amax_save(t, path, &e));
    OK(file_read(&b, path, 1 << 20, &e));
    unlink(path);
    free(path);
    return b;
}

static amax_table calibrate(const calib_data *d, const calib_options *o, calib_report *report) {
    err e = { 0 };
    amax_table t;
    calib_report own = { 0 };
    OK(calib_run(&t, report ? report : &own, TINY, d, o, &e));
    calib_report_free(&own);
    return t;
}

static void same_as_expected(amax_table *t, const char *what) {
    buf b = saved(t);
    if (b.n != expected.n || memcmp(b.p, expected.p, b.n) != 0) fail_msg("%s: the saved maxima differ", what);
    buf_free(&b);
    amax_free(t);
}

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    calib_data all;
    log_set_level(0);
    folder = scratch_new();
    OK(calib_data_ids(&all, ORACLE "nvfp4/calibration.json", 0, 0, &e));
    for (int i = 0; i < SEQUENCES; i++) calib_data_add(&data, all.v[i].v, (size_t)lengths[i]);
    calib_data_free(&all);
    amax_table t = calibrate(&data, &plain, NULL);
    expected = saved(&t);
    amax_free(&t);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    buf_free(&expected);
    calib_data_free(&data);
    scratch_free(folder);
    return 0;
}

static void test_chunks(void **state) {
    (void)state;
    static const int chunks[] = { 1, 7, 64, 80, 4096 };
    for (size_t i = 0; i < ARRAY_LEN(chunks); i += is_short() ? 3 : 1) {
        calib_options o = plain;
        o.chunk = chunks[i];
        amax_table t = calibrate(&data, &o, NULL);
        same_as_expected(&t, "chunk");
    }
}

static void test_threads(void **state) {
    (void)state;
    for (int threads = is_short() ? 3 : 2; threads <= 3; threads++) {
        calib_options o = plain;
        o.ops.threads = threads;
        amax_table t = calibrate(&data, &o, NULL);
        same_as_expected(&t, "threads");
    }
}

static void test_isa_and_backend(void **state) {
    (void)state;
    int ran = 0;
    for (int isa = ISA_REF; isa < ISA_COUNT; isa++) {
        if (!kern_isa_supported((kern_isa)isa)) continue;
        calib_options o = plain;
        o.ops.isa = (kern_isa)isa;
        amax_table t = calibrate(&data, &o, NULL);
        same_as_expected(&t, "isa");
        ran++;
    }
    assert_true(ran > 0);
    calib_options o = plain;
    o.ops.device = "ref";
    amax_table t = calibrate(&data, &o, NULL);
    same_as_expected(&t, "ref");
}

static void test_order(void **state) {
    (void)state;
    const char *given = getenv("SEED");
    const uint64_t seed = given ? strtoull(given, NULL, 0) : 5;
    printf("SEED=%llu\n", (unsigned long long)seed);
    for (int round = 0; round < (is_short() ? 1 : 3); round++) {
        int order[SEQUENCES];
        calib_data d = { 0 };
        for (int i = 0; i < SEQUENCES; i++) order[i] = i;
        for (int i = SEQUENCES - 1; i > 0; i--) {
            const int j = (int)(rng_uniform(seed, (uint32_t)round, (uint64_t)i, 0) * (i + 1)), keep = order[i];
            order[i] = order[j], order[j] = keep;
        }
        for (int i = 0; i < SEQUENCES; i++) calib_data_add(&d, data.v[order[i]].v, data.v[order[i]].n);
        amax_table t = calibrate(&d, &plain, NULL);
        same_as_expected(&t, "order");
        calib_data_free(&d);
    }
}

/* What processes do that share the samples: each its part, then the maxima of the maxima. */
static void test_parts_merge(void **state) {
    (void)state;
    for (int cut = is_short() ? 3 : 1; cut < (is_short() ? 4 : SEQUENCES); cut += 2) {
        calib_data part[2] = { 0 };
        for (int i = 0; i < SEQUENCES; i++) calib_data_add(&part[i >= cut], data.v[i].v, data.v[i].n);
        for (int first = 0; first < (is_short() ? 1 : 2); first++) {
            amax_table a = calibrate(&part[first], &plain, NULL), b = calibrate(&part[!first], &plain, NULL);
            amax_merge(&a, &b);
            amax_free(&b);
            same_as_expected(&a, "merged parts");
        }
        calib_data_free(&part[0]);
        calib_data_free(&part[1]);
    }
}

/* A sample given twice counts twice and changes nothing: there is no state between samples. */
static void test_repeated(void **state) {
    (void)state;
    calib_data d = { 0 };
    calib_report r;
    for (int i = 0; i < 2 * SEQUENCES; i++) calib_data_add(&d, data.v[i / 2].v, data.v[i / 2].n);
    amax_table t = calibrate(&d, &plain, &r);
    same_as_expected(&t, "repeated samples");
    assert_int_equal(r.tokens, 2 * TOKENS);
    calib_report_free(&r);
    calib_data_free(&d);
}

static void test_spill(void **state) {
    (void)state;
    static const struct {
        int64_t max_ram;
        bool spilled;
    } cases[] = { { 1, true }, { 1000, true }, { INT64_MAX, false }, { 0, false } };
    for (size_t i = 0; i < ARRAY_LEN(cases); i += is_short() ? 2 : 1) {
        calib_report r;
        calib_options o = plain;
        o.max_ram_bytes = cases[i].max_ram;
        amax_table t = calibrate(&data, &o, &r);
        same_as_expected(&t, "spilled");
        assert_int_equal(r.spilled, cases[i].spilled);
        calib_report_free(&r);
    }
}

/* Every token of every sample is routed to TOPK experts once a layer, and nothing else is: padding would show here. */
static void test_coverage(void **state) {
    (void)state;
    calib_report r;
    amax_table t = calibrate(&data, &plain, &r);
    int64_t draft = 0;
    int unseen = 0;
    for (int i = 0; i < SEQUENCES; i++)
        for (int step = 1; step <= 2; step++) draft += lengths[i] > step ? lengths[i] - step : 0;
    assert_int_equal(r.tokens, TOKENS);
    assert_int_equal(r.layers, LAYERS + 1);
    assert_int_equal(r.experts, EXPERTS);
    for (int l = 0; l < r.layers; l++) {
        int64_t pairs = 0;
        for (int x = 0; x < EXPERTS; x++) {
            pairs += r.routed[l * EXPERTS + x];
            unseen += r.routed[l * EXPERTS + x] == 0;
        }
        assert_int_equal(pairs, (l < LAYERS ? TOKENS : draft) * TOPK);
    }
    assert_int_equal(calib_unseen(&r), unseen);
    calib_report_free(&r);
    amax_free(&t);

    calib_data one = { 0 }; /* one token reaches TOPK experts a layer, and the head not at all */
    calib_data_add(&one, data.v[0].v, 1);
    t = calibrate(&one, &plain, &r);
    assert_int_equal(calib_unseen(&r), LAYERS * (EXPERTS - TOPK) + EXPERTS);
    calib_report_free(&r);
    calib_data_free(&one);
    amax_free(&t);
}

static void refused(const char *dir, const calib_data *d, const calib_options *o, const char *id) {
    err e = { 0 };
    amax_table t;
    calib_report r;
    assert_false(calib_run(&t, &r, dir, d, o, &e));
    assert_string_equal(e.id, id);
    assert_int_equal(t.n, 0); /* nothing to free */
    assert_null(r.routed);
}

static void test_refused(void **state) {
    (void)state;
    calib_data empty = { 0 }, longer = { 0 }, outside = { 0 };
    int32_t *ids = calloc(4097, sizeof *ids);
    refused(TINY, &empty, &plain, "E-CALIB-EMPTY");
    calib_data_add(&empty, ids, 0);
    refused(TINY, &empty, &plain, "E-CALIB-EMPTY");
    calib_data_add(&longer, ids, 3);
    calib_data_add(&longer, ids, 4097);
    refused(TINY, &longer, &plain, "E-CALIB-LONG");
    calib_data_add(&outside, ids, 3);
    ids[1] = 1 << 30;
    calib_data_add(&outside, ids, 3);
    refused(TINY, &outside, &plain, "E-ENGINE-TOKEN");
    refused("no/such/model", &data, &plain, "E-CKPT-DIR");
    calib_data_free(&longer);
    calib_data_free(&outside);
    free(ids);
}

static volatile int stop;
static int done, of;
static void on_progress(void *ctx, int layer, int layers) {
    (void)ctx;
    assert_int_equal(layer, done + 1);
    done = layer, of = layers;
    if (layer == 3) stop = *(const int *)ctx;
}

static void test_progress_and_stop(void **state) {
    (void)state;
    int when = 0;
    calib_options o = plain;
    o.on_progress = on_progress;
    o.ctx = &when;
    o.cancel = &stop;
    amax_table t = calibrate(&data, &o, NULL);
    amax_free(&t);
    assert_int_equal(done, LAYERS + 1);
    assert_int_equal(of, LAYERS + 1);
    when = 1;
    done = 0;
    refused(TINY, &data, &o, "E-CALIB-STOPPED");
    assert_int_equal(done, 3);
}

/* An Inf in a weight reaches the next Linear's input, and the error names that quantizer. */
static void test_nonfinite(void **state) {
    (void)state;
    synth s;
    synth_spec spec = synth_default();
    static const int32_t ids[] = { 1, 2, 3 };
    calib_data d = { 0 };
    char *dir = synth_temp_dir();
    synth_make(&s, &spec);
    synth_tensor *w = synth_find(&s, "model.language_model.layers.1.input_layernorm.weight");
    w->data[0] = 0x80, w->data[1] = 0x7F; /* +Inf as BF16 */
    synth_write(&s, dir, 1, 0);
    calib_data_add(&d, ids, ARRAY_LEN(ids));
    err e = { 0 };
    amax_table t;
    calib_report r;
    assert_false(calib_run(&t, &r, dir, &d, &plain, &e));
    assert_string_equal(e.id, "E-CALIB-NONFINITE");
    assert_non_null(strstr(e.msg, "layers.1."));
    calib_data_free(&d);
    synth_free(&s);
    synth_remove_dir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_isa_and_backend),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_parts_merge),
        cmocka_unit_test(test_repeated),
        cmocka_unit_test(test_spill),
        cmocka_unit_test(test_coverage),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_progress_and_stop),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
