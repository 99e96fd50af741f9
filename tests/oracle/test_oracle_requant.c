/* The draft head of ModelOpt-shaped exports, by requant: the oracle's bytes, configs that let the head be found, a model that
 * drafts; and a kill after every single step. */
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "model/names.h"
#include "quant/mtp_scales.h"
#include "quant/requant.h"

#include "support.h"

#define NVFP4 "tests/oracle/qwen36-tiny/nvfp4/"

static ckpt files;
static model_config config;
static amax_table modelopt;
static char folder[] = "/tmp/nibble-requant-XXXXXX";

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    log_set_level(0);
    OK(ckpt_open(&files, TINY, &e));
    OK(config_read(&config, files.config, files.generation, TINY, &e));
    OK(amax_load(&modelopt, NVFP4 "modelopt-cuda/amax.safetensors", &e));
    assert_non_null(mkdtemp(folder));
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char command[128];
    amax_free(&modelopt);
    ckpt_close(&files);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static void sh(const char *fmt, const char *a, const char *b) {
    char command[400];
    snprintf(command, sizeof command, fmt, a, b);
    if (system(command) != 0) fail_msg("%s", command);
}

static char *place(const char *name) { return path_join(folder, name); }

/* ModelOpt's tensors (test_oracle_export) beside ModelOpt's own configs; without a head as older versions leave it, with
 * the "mtp*" in its excludes all the same. */
static char *modelopt_export(const char *name, recipe_mtp mtp, uint64_t shard_bytes) {
    err e = { 0 };
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = mtp };
    const quantize_options o = { .amax = &modelopt, .threads = 2, .isa = ISA_COUNT, .ranks = 1 };
    char *dir = place(name), *partial, *index = path_join(dir, "model.safetensors.index.json");
    plan p;
    quantize_result q;
    size_t n;
    OK(plan_make(&p, &files, &config, &r, shard_bytes, &e));
    OK(quantize_shards(&q, &partial, &p, dir, &o, &e));
    OK(quantize_commit(partial, dir, &e));
    const char *text = plan_index_json(&p, &n);
    if (text) OK(file_write_atomic(index, text, n, &e));
    sh("cp " NVFP4 "modelopt-cuda/*config.json %s%s", dir, "");
    free(index);
    free(partial);
    quantize_result_free(&q);
    plan_free(&p);
    return dir;
}

/* What the command does with --mtp-scales generous:4, with a stop wherever on_step wants one. */
static bool requant_head(const char *dir, recipe_mtp mtp, const char *out, void (*on_step)(void *, const char *),
                         void *ctx, err *e) {
    requant r;
    plan p = { 0 };
    quantize_result q = { 0 };
    amax_table t = { 0 };
    const provenance from = {
        .calibration = "the export's own scales", .mtp_scales = "generous:4", .arith = "cuda", .algorithm = "max"
    };
    if (!requant_open(&r, dir, mtp, false, e)) return false;
    bool ok = requant_match(&r, &files, &config, e);
    if (ok && mtp != MTP_NONE) ok = plan_make_head(&p, &files, &config, &r.recipe, r.head_file, e);
    if (ok && mtp == MTP_NVFP4) {
        mtp_scales_from_export(&t, &p, &r.dst, r.prefix, false, r.arith);
        ok = mtp_scales_fill(&t, &p, MTP_GENEROUS, 4, e);
    }
    const requant_job job = { .head = mtp == MTP_NONE ? NULL : &p,
                              .from = &from,
                              .options = { .amax = &t, .threads = 1, .isa = ISA_COUNT, .ranks = 1 },
                              .out = out,
                              .on_step = on_step,
                              .ctx = ctx };
    ok = ok && requant_run(&q, &r, &job, e);
    quantize_result_free(&q);
    amax_free(&t);
    if (p.n_tensors) plan_free(&p);
    requant_close(&r);
    return ok;
}

/* ---- what is there now ---- */

static void head_is_the_oracles(const char *dir) {
    err e = { 0 };
    ckpt c;
    st_file want;
    OK(ckpt_open(&c, dir, &e));
    OK(st_open(&want, NVFP4 "mtp/quantized.safetensors", &e));
    int heads = 0;
    for (int i = 0; i < want.count; i++) {
        const st_tensor *w = &want.tensors[i], *got = ckpt_find(&c, w->name);
        if (!got) fail_msg(STR_FMT " is missing", STR_ARG(w->name));
        assert_int_equal(got->type, w->type);
        assert_int_equal(got->bytes, w->bytes);
        if (memcmp(got->data, w->data, w->bytes) != 0) fail_msg(STR_FMT ": bytes differ", STR_ARG(w->name));
    }
    for (int i = 0; i < c.tensor_count; i++) { /* and what is not the oracle's is the source's own */
        const st_tensor *t = ckpt_at(&c, i);
        if (!name_is_mtp(t->name)) continue;
        heads++;
        if (st_find(&want, t->name)) continue;
        const st_tensor *src = ckpt_find(&files, t->name);
        assert_non_null(src);
        assert_int_equal(t->bytes, src->bytes);
        assert_memory_equal(t->data, src->data, t->bytes);
    }
    assert_int_equal(heads, want.count + 10);
    st_close(&want);
    ckpt_close(&c);
}

static bool lists(const json *list, const char *pattern) {
    for (uint32_t i = 0; i < list->n; i++)
        if (str_is(json_str(&list->u.items[i]), pattern)) return true;
    return false;
}

/* Both files say the same: the trunk's entries as they were, the head's by its format. */
static void excludes_are(const char *dir, bool bf16) {
    err e = { 0 };
    ckpt now, old;
    OK(ckpt_open_configs(&now, dir, &e));
    OK(ckpt_open_configs(&old, NVFP4 "modelopt-cuda", &e));
    const json *both[] = { json_get(json_get(now.config, "quantization_config"), "ignore"),
                           json_get(json_get(now.hf_quant, "quantization"), "exclude_modules") };
    const json *was = json_get(json_get(old.config, "quantization_config"), "ignore");
    for (int i = 0; i < 2; i++) {
        assert_non_null(both[i]);
        assert_true(lists(both[i], "mtp.fc*"));
        assert_int_equal(lists(both[i], "mtp*"), bf16);
        assert_int_equal(lists(both[i], "mtp.layers.0*"), bf16);
        assert_int_equal(lists(both[i], "mtp.layers.0.mlp.gate"), !bf16);
        assert_int_equal(both[i]->n, was->n + 1); /* two patterns left, three came */
        for (uint32_t k = 0; k + 2 < was->n; k++) assert_true(lists(both[i], was->u.items[k].u.s));
    }
    const json *record = json_get(now.hf_quant, "nibble");
    assert_string_equal(json_get(record, "mtp")->u.s, bf16 ? "bf16" : "nvfp4");
    assert_string_equal(json_get(record, "mtp_scales")->u.s, "generous:4");
    ckpt_close(&now);
    ckpt_close(&old);
}

static bool go_on(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)ctx, (void)id, (void)logprob, (void)top, (void)values;
    return true;
}

static double accept_length(const char *dir) {
    err e = { 0 };
    engine *g;
    session s;
    gen_result r;
    arena mem = { 0 };
    const json *file;
    int32_t ids[1024];
    int64_t taken = 0, rounds = 0;
    const engine_options opt = { .ctx = 512, .no_text = true, .ops = { .isa = ISA_COUNT } };
    OK(json_parse_file(&file, &mem, ORACLE "greedy.json", NULL, &e));
    OK(engine_open(&g, dir, &opt, &e));
    OK(session_open(&s, g, true, &e));
    for (uint32_t c = 0; c < 4; c++) {
        const json *prompt = json_get(&json_get(file, "cases")->u.items[c], "prompt_ids");
        for (uint32_t i = 0; i < prompt->n; i++) ids[i] = (int32_t)prompt->u.items[i].u.i;
        session_reset(&s);
        OK(session_set(&s, ids, (int)prompt->n, &e));
        const gen_options go = { .max_tokens = 48,
                                 .depth = 2,
                                 .stop_ids = g->config.stop_ids,
                                 .n_stop_ids = g->config.stop_count,
                                 .on_token = go_on };
        OK(session_generate(&s, &go, &r, &e));
        taken += r.accepted + r.rounds;
        rounds += r.rounds;
    }
    session_close(&s);
    engine_close(g);
    arena_free(&mem);
    return (double)taken / (double)rounds;
}

/* ---- tests ---- */

static void test_without_head(void **state) {
    (void)state;
    err e = { 0 };
    char *dir = modelopt_export("bare", MTP_NONE, 10000000000u), *before = place("bare-before");
    sh("cp -r %s %s", dir, before);
    OK(requant_head(dir, MTP_NVFP4, NULL, NULL, NULL, &e));
    sh("cmp %s/model.safetensors %s/model.safetensors", dir, before);
    head_is_the_oracles(dir);
    excludes_are(dir, false);
    const double length = accept_length(dir);
    if (!(length > 2)) fail_msg("accept length %.2f", length);
    free(dir);
    free(before);
}

/* ModelOpt's current form: the BF16 head in the same file, its tensors between the others. */
static void test_replaces_bf16(void **state) {
    (void)state;
    err e = { 0 };
    char *dir = modelopt_export("bf16", MTP_BF16, 10000000000u),
         *bare = modelopt_export("bare2", MTP_NONE, 10000000000u);
    OK(requant_head(dir, MTP_NVFP4, NULL, NULL, NULL, &e));
    sh("cmp %s/model.safetensors %s/model.safetensors", dir, bare); /* what is left is what an export without one has */
    head_is_the_oracles(dir);
    excludes_are(dir, false);
    OK(requant_head(dir, MTP_BF16, NULL, NULL, NULL, &e)); /* and back */
    excludes_are(dir, true);
    sh("cmp %s/model.safetensors %s/model.safetensors", dir, bare);
    assert_true(accept_length(dir) > 2);
    free(dir);
    free(bare);
}

/* ---- a kill after every step ---- */

typedef struct killer {
    int left;
} killer;

static void die(void *ctx, const char *what) {
    killer *k = ctx;
    (void)what;
    if (--k->left == 0) _exit(99);
}

/* 99: killed after that step; 0: done. Nothing of the parent's state is touched by the child. */
static int run_child(const char *dir, recipe_mtp mtp, int steps) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        err e = { 0 };
        killer k = { steps };
        _exit(requant_head(dir, mtp, NULL, die, &k, &e) ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static bool is_mixed_head(const ckpt *c) {
    bool codes = false, plain = false;
    for (int i = 0; i < c->tensor_count; i++) {
        const str n = ckpt_at(c, i)->name;
        if (!name_is_mtp(n) || !str_ends(n, STR("q_proj.weight"))) continue;
        codes |= ckpt_at(c, i)->type == DT_U8;
        plain |= ckpt_at(c, i)->type == DT_BF16;
    }
    return codes && plain;
}

/* Loads as a whole model, or says that it does not: then only the next run may touch it, and it can. */
static bool loads(const char *dir) {
    err e = { 0 };
    ckpt c;
    model_config mc;
    if (!ckpt_open(&c, dir, &e)) return false;
    OK(config_read(&mc, c.config, c.generation, dir, &e));
    OK(weights_check(&c, &mc, &e));
    assert_false(is_mixed_head(&c));
    ckpt_close(&c);
    return true;
}

static void kill_everywhere(const char *name, recipe_mtp from, uint64_t shard_bytes, recipe_mtp to, int least) {
    err e = { 0 };
    char *start = modelopt_export(name, from, shard_bytes), *whole = place("whole"), *work = place("work");
    sh("rm -rf %s %s", whole, work);
    sh("cp -r %s %s", start, whole);
    OK(requant_head(whole, to, NULL, NULL, NULL, &e));
    int steps = 1, unloadable = 0, as_before = 0;
    for (;; steps++) {
        assert_in_range(steps, 1, 100);
        sh("rm -rf %s%s", work, "");
        sh("cp -r %s %s", start, work);
        const int code = run_child(work, to, steps);
        assert_true(code == 99 || code == 0);
        if (code == 0) break;
        const bool decided = requant_is_unfinished(work), ok = loads(work);
        if (!decided) {
            assert_true(ok); /* nothing was touched, or all is in place */
            as_before++;
        }
        unloadable += !ok;
        OK(requant_head(work, to, NULL, NULL, NULL, &e));
        assert_true(loads(work));
        sh("diff -r %s %s", work, whole);
    }
    sh("diff -r %s %s", work, whole);
    assert_true(steps > least);
    assert_true(as_before >= 3);
    assert_true(unloadable < steps / 2); /* only between the first rename and the index's */
    free(start);
    free(whole);
    free(work);
}

static void test_kill_adding(void **state) {
    (void)state;
    kill_everywhere("kill-add", MTP_NONE, 10000000000u, MTP_NVFP4, 8);
}

static void test_kill_replacing(void **state) {
    (void)state;
    kill_everywhere("kill-replace", MTP_BF16, 2000000, MTP_NVFP4, 12);
}

static void test_kill_removing(void **state) {
    (void)state;
    kill_everywhere("kill-remove", MTP_BF16, 2000000, MTP_NONE, 8);
}

/* ---- what is refused leaves everything as it was ---- */

static void refused(const char *name, const char *script, const char *id) {
    err e = { 0 };
    char *dir = modelopt_export(name, MTP_NONE, 10000000000u), *before = place("refused-before");
    sh(script, dir, "");
    sh("rm -rf %s%s", before, "");
    sh("cp -r %s %s", dir, before);
    assert_false(requant_head(dir, MTP_NVFP4, NULL, NULL, NULL, &e));
    assert_string_equal(e.id, id);
    sh("diff -r %s %s", dir, before);
    free(dir);
    free(before);
}

static void test_refusals(void **state) {
    (void)state;
    refused("r1", "sed -i 's/\"ignore\": \\[/\"ignore\": [7,/' %s/config.json%s", "E-REQUANT-CONFIG");
    refused("r2", "sed -i 's/\"quantization\": {/\"quantized\": {/' %s/hf_quant_config.json%s", "E-REQUANT-CONFIG");
    refused("r3", "sed -i 's/\"quant_method\": \"modelopt\"/\"quant_method\": \"other\"/' %s/config.json%s",
            "E-REQUANT-EXPORT");
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_without_head),  cmocka_unit_test(test_replaces_bf16),
                                        cmocka_unit_test(test_kill_adding),   cmocka_unit_test(test_kill_replacing),
                                        cmocka_unit_test(test_kill_removing), cmocka_unit_test(test_refusals) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
