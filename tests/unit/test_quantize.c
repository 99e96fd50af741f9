/* The quantizing pipeline under bad input and interruption: named errors, nothing half-named, resumed bytes equal. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "lib/synth.h"
#include "quant/configs.h"
#include "quant/quantize.h"

#include "support.h"

typedef struct source {
    synth s;
    char *dir;
    ckpt files;
    model_config config;
    weights w;
} source;

static void open_source(source *x, int shards) {
    err e = { 0 };
    log_set_level(0);
    x->dir = synth_temp_dir();
    synth_write(&x->s, x->dir, shards, 0);
    OK(ckpt_open(&x->files, x->dir, &e));
    OK(config_read(&x->config, x->files.config, x->files.generation, x->dir, &e));
    OK(weights_bind(&x->w, &x->files, &x->config, &e));
}

static void close_source(source *x) {
    weights_free(&x->w);
    ckpt_close(&x->files);
    synth_free(&x->s);
    synth_remove_dir(x->dir);
}

static source make_source(void) {
    source x = { 0 };
    synth_spec spec = synth_default();
    spec.shared_inter = 32; /* every K a multiple of the block */
    synth_make(&x.s, &spec);
    return x;
}

static const recipe WEIGHTS_ONLY = { .preset = RECIPE_NVFP4_W4A16, .kv = KV_NONE, .mtp = MTP_BF16 };

/* All of "dst" and of "dst.partial" in one string, to see what is left behind. */
static char *in(const source *x, const char *name) {
    char *path = malloc(strlen(x->dir) + strlen(name) + 2);
    sprintf(path, "%s/%s", x->dir, name);
    return path;
}

static bool exists(const char *path) {
    struct stat s;
    return lstat(path, &s) == 0;
}

typedef struct outcome {
    bool ok;
    err e;
    char *partial;
    quantize_result r;
} outcome;

static outcome run(const source *x, const recipe *r, const char *dst, quantize_options o) {
    outcome out = { 0 };
    plan p;
    o.ranks = 1;
    o.isa = ISA_COUNT;
    out.ok = plan_make(&p, &x->files, &x->config, r, 20000, &out.e);
    if (!out.ok) return out;
    out.ok = quantize_shards(&out.r, &out.partial, &p, dst, &o, &out.e);
    plan_free(&p);
    return out;
}

static void drop(outcome *o) {
    free(o->partial);
    quantize_result_free(&o->r);
}

static void expect(source *x, const recipe *r, const quantize_options *o, const char *id, const char *says) {
    char *dst = in(x, "out");
    outcome got = run(x, r, dst, *o);
    assert_false(got.ok);
    assert_string_equal(got.e.id, id);
    if (!strstr(got.e.msg, says)) fail_msg("%s does not say '%s'", got.e.msg, says);
    assert_false(exists(dst)); /* never a folder of the final name */
    drop(&got);
    free(dst);
}

#define L "model.language_model.layers."

static void test_nonfinite(void **state) {
    (void)state;
    source x = make_source();
    synth_tensor *t = synth_find(&x.s, L "0.linear_attn.out_proj.weight");
    const uint16_t nan = 0x7fc0;
    memcpy(t->data + 2 * (t->shape[1] * 3 + 5), &nan, 2);
    open_source(&x, 1);
    expect(&x, &WEIGHTS_ONLY, &(quantize_options){ .threads = 2 }, "E-QUANT-NONFINITE", "row 3, column 5");
    close_source(&x);
}

static void test_shape(void **state) {
    (void)state;
    source x = { 0 };
    synth_spec spec = synth_default();
    spec.moe_inter = 24; /* down_proj has 24 inputs */
    synth_make(&x.s, &spec);
    open_source(&x, 1);
    expect(&x, &WEIGHTS_ONLY, &(quantize_options){ .threads = 1 }, "E-QUANT-SHAPE", "24 input columns");
    close_source(&x);
}

static void test_zero_tensor(void **state) {
    (void)state;
    err e = { 0 };
    source x = make_source();
    synth_tensor *t = synth_find(&x.s, L "0.linear_attn.out_proj.weight");
    memset(t->data, 0, t->bytes);
    open_source(&x, 1);
    char *dst = in(&x, "out");
    outcome got = run(&x, &WEIGHTS_ONLY, dst, (quantize_options){ .threads = 1 });
    assert_true(got.ok);
    assert_int_equal(got.r.zero_modules, 1);
    OK(quantize_commit(got.partial, dst, &e));
    assert_true(exists(dst));
    drop(&got);
    free(dst);
    close_source(&x);
}

/* Float32 weights too small for a float32 scale: written as zeros, with scales a loader takes. */
static void test_vanishing_tensor(void **state) {
    (void)state;
    err e = { 0 };
    source x = { 0 };
    synth_spec spec = synth_default();
    spec.shared_inter = 32;
    spec.type = DT_F32;
    synth_make(&x.s, &spec);
    synth_tensor *t = synth_find(&x.s, L "0.linear_attn.out_proj.weight");
    for (size_t i = 0; i < t->bytes / 4; i++) memcpy(t->data + 4 * i, &(float){ i % 2 ? -0x1p-140f : 0x1p-141f }, 4);
    open_source(&x, 1);
    for (int how = QUANT_MAX; how <= QUANT_FOUR_OVER_SIX; how++) {
        char name[8];
        snprintf(name, sizeof name, "out%d", how);
        char *dst = in(&x, name);
        outcome got =
            run(&x, &WEIGHTS_ONLY, dst, (quantize_options){ .threads = 1, .algorithm = (quant_algorithm)how });
        assert_true(got.ok);
        assert_int_equal(got.r.zero_modules, 1);
        OK(quantize_commit(got.partial, dst, &e));
        plan p;
        OK(plan_make(&p, &x.files, &x.config, &WEIGHTS_ONLY, 20000, &e));
        int found = 0;
        for (int i = 0; i < p.n_shards; i++) {
            char path[300];
            st_file f;
            snprintf(path, sizeof path, "%s/%s", dst, p.shards[i].file.p);
            OK(st_open(&f, path, &e));
            const st_tensor *s2 = st_find(&f, STR(L "0.linear_attn.out_proj.weight_scale_2")),
                            *s = st_find(&f, STR(L "0.linear_attn.out_proj.weight_scale")),
                            *c = st_find(&f, STR(L "0.linear_attn.out_proj.weight"));
            const float one = 1;
            if (s2) assert_memory_equal(s2->data, &one, 4), found++;
            for (uint64_t k = 0; s && k < s->bytes; k++) assert_int_equal(s->data[k], 0x38);
            for (uint64_t k = 0; c && k < c->bytes; k++) assert_int_equal(c->data[k], 0);
            found += (s != NULL) + (c != NULL);
            st_close(&f);
        }
        assert_int_equal(found, 3);
        plan_free(&p);
        drop(&got);
        free(dst);
    }
    close_source(&x);
}

static void test_missing_amax(void **state) {
    (void)state;
    source x = make_source();
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_BF16 };
    amax_table t = { 0 };
    open_source(&x, 1);
    expect(&x, &r, &(quantize_options){ .threads = 1, .amax = &t }, "E-QUANT-AMAX", "no maximum");
    amax_free(&t);
    close_source(&x);
}

static void test_destinations(void **state) {
    (void)state;
    source x = make_source();
    open_source(&x, 1);
    const quantize_options o = { .threads = 1 };
    outcome same = run(&x, &WEIGHTS_ONLY, x.dir, o);
    assert_false(same.ok);
    assert_string_equal(same.e.id, "E-QUANT-DST");
    char *there = in(&x, "there");
    assert_int_equal(mkdir(there, 0777), 0);
    outcome exists_already = run(&x, &WEIGHTS_ONLY, there, o);
    assert_string_equal(exists_already.e.id, "E-QUANT-DST");
    char *deep = in(&x, "no/such/parent");
    outcome no_parent = run(&x, &WEIGHTS_ONLY, deep, o);
    assert_string_equal(no_parent.e.id, "E-QUANT-DST");
    assert_int_equal(no_parent.e.kind, ERR_INPUT);
    outcome no_name = run(&x, &WEIGHTS_ONLY, "", o);
    assert_string_equal(no_name.e.id, "E-QUANT-DST");
    drop(&no_name);
    drop(&same);
    drop(&exists_already);
    drop(&no_parent);
    free(there);
    free(deep);
    close_source(&x);
}

/* A full disk, as far as a limit on file size can play it. */
static void test_no_room(void **state) {
    (void)state;
    source x = make_source();
    open_source(&x, 1);
    struct rlimit old, tight = { 4096, RLIM_INFINITY };
    getrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_IGN);
    tight.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_FSIZE, &tight);
    expect(&x, &WEIGHTS_ONLY, &(quantize_options){ .threads = 1 }, "E-FILE-WRITE", "File too large");
    setrlimit(RLIMIT_FSIZE, &old);
    close_source(&x);
}

/* ---- interruption ---- */

typedef struct stopper {
    volatile int stop;
    int calls, after;
} stopper;

static void count_down(void *ctx, uint64_t done, uint64_t total) {
    stopper *s = ctx;
    (void)done, (void)total;
    if (++s->calls >= s->after) s->stop = 1;
}

static void same_files(const plan *p, const char *a, const char *b) {
    for (int i = 0; i < p->n_shards; i++) {
        err e = { 0 };
        char path[2][300];
        buf x = { 0 }, y = { 0 };
        snprintf(path[0], sizeof path[0], "%s/%s", a, p->shards[i].file.p);
        snprintf(path[1], sizeof path[1], "%s/%s", b, p->shards[i].file.p);
        OK(file_read(&x, path[0], 1 << 30, &e));
        OK(file_read(&y, path[1], 1 << 30, &e));
        assert_int_equal(x.n, y.n);
        assert_memory_equal(x.p, y.p, x.n);
        buf_free(&x);
        buf_free(&y);
    }
}

static void test_resume(void **state) {
    (void)state;
    err e = { 0 };
    source x = make_source();
    open_source(&x, 2);
    char *whole = in(&x, "whole"), *parts = in(&x, "parts");
    outcome w = run(&x, &WEIGHTS_ONLY, whole, (quantize_options){ .threads = 1 });
    assert_true(w.ok);
    OK(quantize_commit(w.partial, whole, &e));
    stopper s = { .after = 3 };
    int stops = 0;
    for (;; stops++) { /* stopped again and again, each time a little later */
        s = (stopper){ .after = 3 };
        outcome got =
            run(&x, &WEIGHTS_ONLY, parts,
                (quantize_options){
                    .threads = 1, .resume = stops > 0, .on_progress = count_down, .ctx = &s, .cancel = &s.stop });
        if (got.ok) {
            assert_true(got.r.resumed_tasks > 0);
            OK(quantize_commit(got.partial, parts, &e));
            drop(&got);
            break;
        }
        assert_string_equal(got.e.id, "E-QUANT-STOPPED");
        assert_false(exists(parts));
        drop(&got);
        if (stops == 0) { /* not resumed: refused, not overwritten */
            outcome again = run(&x, &WEIGHTS_ONLY, parts, (quantize_options){ .threads = 1 });
            assert_string_equal(again.e.id, "E-QUANT-DST");
            drop(&again);
            const recipe other = { .preset = RECIPE_NVFP4_W4A16, .kv = KV_NONE, .mtp = MTP_NONE };
            outcome wrong = run(&x, &other, parts, (quantize_options){ .threads = 1, .resume = true });
            assert_string_equal(wrong.e.id, "E-QUANT-RESUME");
            drop(&wrong);
        }
        assert_in_range(stops, 0, 1000);
    }
    assert_true(stops >= 2);
    plan p;
    OK(plan_make(&p, &x.files, &x.config, &WEIGHTS_ONLY, 20000, &e));
    assert_true(p.n_shards > 2);
    same_files(&p, whole, parts);
    plan_free(&p);
    drop(&w);
    free(whole);
    free(parts);
    close_source(&x);
}

/* "X.partial" as the source of X: resuming would write into the source. */
static void test_source_is_partial(void **state) {
    (void)state;
    source x = make_source();
    open_source(&x, 1);
    char *dst = in(&x, "out"), *partial = in(&x, "out.partial");
    assert_int_equal(symlink(x.dir, partial), 0);
    outcome got = run(&x, &WEIGHTS_ONLY, dst, (quantize_options){ .threads = 1, .resume = true });
    assert_string_equal(got.e.id, "E-QUANT-DST");
    drop(&got);
    free(partial);
    free(dst);
    close_source(&x);
}

/* A shard of the unfinished folder that is gone, or has another length, is not quietly filled with zeros. */
static void test_tampered_shard(void **state) {
    (void)state;
    source x = make_source();
    open_source(&x, 1);
    char *dst = in(&x, "out");
    stopper s = { .after = 8 };
    outcome got = run(&x, &WEIGHTS_ONLY, dst,
                      (quantize_options){ .threads = 1, .on_progress = count_down, .ctx = &s, .cancel = &s.stop });
    assert_string_equal(got.e.id, "E-QUANT-STOPPED");
    char shard[300];
    plan p;
    err e = { 0 };
    OK(plan_make(&p, &x.files, &x.config, &WEIGHTS_ONLY, 20000, &e));
    snprintf(shard, sizeof shard, "%s/%s", got.partial, p.shards[0].file.p);
    plan_free(&p);
    assert_int_equal(truncate(shard, 100), 0);
    for (int i = 0; i < 2; i++) {
        outcome again = run(&x, &WEIGHTS_ONLY, dst, (quantize_options){ .threads = 1, .resume = true });
        assert_string_equal(again.e.id, "E-QUANT-RESUME");
        drop(&again);
        unlink(shard);
    }
    drop(&got);
    free(dst);
    close_source(&x);
}

/* Every algorithm gives the same bytes on every ISA, with any number of threads, and resumed; a run of another algorithm
 * is another job. */
static void test_algorithms(void **state) {
    (void)state;
    err e = { 0 };
    source x = make_source();
    open_source(&x, 1);
    plan p;
    OK(plan_make(&p, &x.files, &x.config, &WEIGHTS_ONLY, 20000, &e));
    static const kern_isa levels[] = { ISA_REF, ISA_AVX2, ISA_COUNT };
    double err2[3];
    for (int how = QUANT_MAX; how <= QUANT_FOUR_OVER_SIX; how++) {
        char *dirs[3], name[16];
        for (int i = 0; i < 3; i++) {
            quantize_options o = {
                .threads = 1 + 2 * i, .isa = levels[i], .ranks = 1, .algorithm = (quant_algorithm)how
            };
            snprintf(name, sizeof name, "algo%d%d", how, i);
            dirs[i] = in(&x, name);
            outcome got = { 0 };
            if (i == 2) { /* stopped once, resumed */
                stopper s = { .after = 3 };
                o.threads = 1;
                o.on_progress = count_down;
                o.ctx = &s;
                o.cancel = &s.stop;
                assert_false(quantize_shards(&got.r, &got.partial, &p, dirs[i], &o, &got.e));
                drop(&got);
                got = (outcome){ 0 };
                o.on_progress = NULL;
                o.cancel = NULL;
                o.resume = true;
                quantize_options other = o;
                other.algorithm = (quant_algorithm)((how + 1) % 3);
                assert_false(quantize_shards(&got.r, &got.partial, &p, dirs[i], &other, &got.e));
                assert_string_equal(got.e.id, "E-QUANT-RESUME");
                drop(&got);
                got = (outcome){ 0 };
            }
            OK(quantize_shards(&got.r, &got.partial, &p, dirs[i], &o, &e));
            OK(quantize_commit(got.partial, dirs[i], &e));
            if (i == 2) { /* the results of resumed tasks come from the journal */
                double sum = 0, max = 0;
                for (int m = 0; m < p.n_modules; m++)
                    for (int l = 0; l < 16; l++) {
                        sum += got.r.modules[m].stats.error.err2[l];
                        max += got.r.modules[m].max_error.err2[l];
                    }
                err2[how] = sum;
                assert_true(how == QUANT_MAX ? max == 0 : max == err2[QUANT_MAX]);
            }
            drop(&got);
        }
        same_files(&p, dirs[0], dirs[1]);
        same_files(&p, dirs[0], dirs[2]);
        for (int i = 0; i < 3; i++) free(dirs[i]);
    }
    assert_true(err2[QUANT_MSE] < err2[QUANT_FOUR_OVER_SIX] && err2[QUANT_FOUR_OVER_SIX] < err2[QUANT_MAX]);
    plan_free(&p);
    close_source(&x);
}

/* The tail of a journal that was cut or damaged is not trusted; what is whole still counts. */
static void test_damaged_journal(void **state) {
    (void)state;
    err e = { 0 };
    source x = make_source();
    open_source(&x, 1);
    char *whole = in(&x, "whole"), *parts = in(&x, "parts");
    outcome w = run(&x, &WEIGHTS_ONLY, whole, (quantize_options){ .threads = 1 });
    OK(quantize_commit(w.partial, whole, &e));
    stopper s = { .after = 8 };
    outcome got = run(&x, &WEIGHTS_ONLY, parts,
                      (quantize_options){ .threads = 1, .on_progress = count_down, .ctx = &s, .cancel = &s.stop });
    assert_false(got.ok);
    char journal[300];
    snprintf(journal, sizeof journal, "%s/.journal.0", got.partial);
    struct stat st;
    assert_int_equal(stat(journal, &st), 0);
    assert_int_equal(truncate(journal, st.st_size - 5), 0);
    drop(&got);
    outcome again = run(&x, &WEIGHTS_ONLY, parts, (quantize_options){ .threads = 2, .resume = true });
    assert_true(again.ok);
    OK(quantize_commit(again.partial, parts, &e));
    plan p;
    OK(plan_make(&p, &x.files, &x.config, &WEIGHTS_ONLY, 20000, &e));
    same_files(&p, whole, parts);
    plan_free(&p);
    drop(&w);
    drop(&again);
    free(whole);
    free(parts);
    close_source(&x);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_nonfinite),
                                        cmocka_unit_test(test_shape),
                                        cmocka_unit_test(test_zero_tensor),
                                        cmocka_unit_test(test_vanishing_tensor),
                                        cmocka_unit_test(test_algorithms),
                                        cmocka_unit_test(test_missing_amax),
                                        cmocka_unit_test(test_destinations),
                                        cmocka_unit_test(test_no_room),
                                        cmocka_unit_test(test_resume),
                                        cmocka_unit_test(test_damaged_journal),
                                        cmocka_unit_test(test_source_is_partial),
                                        cmocka_unit_test(test_tampered_shard) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
