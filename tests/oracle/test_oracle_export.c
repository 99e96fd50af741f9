/* Exports of the tiny model with ModelOpt's own amax, byte for byte: uniform NVFP4 under both arithmetic rules, the mixed
 * recipe's FP8 tensors, and the draft head; resumed and sharded runs give the same bytes. */
#include <sys/stat.h>
#include <unistd.h>

#include "quant/quantize.h"

#include "support.h"

#define NVFP4 "tests/oracle/qwen36-tiny/nvfp4/"

static ckpt files;
static model_config config;
static weights bound;
static char folder[] = "/tmp/nibble-export-XXXXXX";
static int exports;

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    log_set_level(0);
    OK(ckpt_open(&files, TINY, &e));
    OK(config_read(&config, files.config, files.generation, TINY, &e));
    OK(weights_bind(&bound, &files, &config, &e));
    assert_non_null(mkdtemp(folder));
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char command[128];
    weights_free(&bound);
    ckpt_close(&files);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

typedef struct made {
    plan p;
    char *dst;
    st_file *shards;
    quantize_result r;
} made;

static made export_model(const recipe *r, const amax_table *amax, quant_arith arith, uint64_t shard_bytes,
                         int threads) {
    err e = { 0 };
    made m = { 0 };
    char *partial, dst[64];
    snprintf(dst, sizeof dst, "%s/%d", folder, exports++);
    m.dst = xstrdup(dst);
    const quantize_options o = { .arith = arith, .amax = amax, .threads = threads, .isa = ISA_COUNT, .ranks = 1 };
    OK(plan_make(&m.p, &files, &config, r, shard_bytes, &e));
    OK(quantize_shards(&m.r, &partial, &m.p, dst, &o, &e));
    OK(quantize_commit(partial, dst, &e));
    free(partial);
    m.shards = xcalloc((size_t)m.p.n_shards, sizeof *m.shards);
    for (int i = 0; i < m.p.n_shards; i++) {
        char path[160];
        snprintf(path, sizeof path, "%s/%s", dst, m.p.shards[i].file.p);
        OK(st_open(&m.shards[i], path, &e));
    }
    return m;
}

static void drop(made *m) {
    for (int i = 0; i < m->p.n_shards; i++) st_close(&m->shards[i]);
    free(m->shards);
    free(m->dst);
    quantize_result_free(&m->r);
    plan_free(&m->p);
}

static const st_tensor *find_in(const made *m, str name) {
    for (int i = 0; i < m->p.n_shards; i++) {
        const st_tensor *t = st_find(&m->shards[i], name);
        if (t) return t;
    }
    return NULL;
}

/* Every tensor of `want` is in the export with the same bytes, unless `instead` (may be NULL) has another version. */
static int same_bytes(const made *m, const st_file *want, const st_file *instead) {
    int n = 0;
    for (int i = 0; i < want->count; i++) {
        const st_tensor *w = &want->tensors[i], *other = instead ? st_find(instead, w->name) : NULL;
        if (other) w = other;
        const st_tensor *got = find_in(m, w->name);
        if (!got) fail_msg(STR_FMT " was not exported", STR_ARG(w->name));
        assert_int_equal(got->type, w->type);
        assert_int_equal(got->bytes, w->bytes);
        if (memcmp(got->data, w->data, w->bytes) != 0) fail_msg(STR_FMT ": bytes differ", STR_ARG(w->name));
        n++;
    }
    return n;
}

static const recipe UNIFORM = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_BF16 };

static void test_uniform_cuda(void **state) {
    (void)state;
    err e = { 0 };
    amax_table amax;
    st_file want;
    OK(amax_load(&amax, NVFP4 "modelopt-cuda/amax.safetensors", &e));
    OK(st_open(&want, NVFP4 "modelopt-cuda/quantized.safetensors", &e));
    made m = export_model(&UNIFORM, &amax, ARITH_CUDA, 10000000000u, 2);
    assert_int_equal(same_bytes(&m, &want, NULL), 434 * 4 + 4);
    for (int i = 0; i < m.p.n_tensors; i++) { /* and the rest is the source's own */
        const qtensor *t = &m.p.tensors[i];
        if (t->part != QP_COPY) continue;
        const st_tensor *got = find_in(&m, t->name);
        assert_memory_equal(got->data, t->src->data, t->bytes);
    }
    drop(&m);
    st_close(&want);
    amax_free(&amax);
}

static void test_uniform_cpu(void **state) {
    (void)state;
    err e = { 0 };
    amax_table amax;
    st_file cuda, differs;
    OK(amax_load(&amax, NVFP4 "modelopt-cpu/amax.safetensors", &e));
    OK(st_open(&cuda, NVFP4 "modelopt-cuda/quantized.safetensors", &e));
    OK(st_open(&differs, NVFP4 "modelopt-cpu/differs.safetensors", &e));
    made m = export_model(&UNIFORM, &amax, ARITH_CPU, 10000000000u, 1);
    same_bytes(&m, &cuda, &differs);
    drop(&m);
    st_close(&cuda);
    st_close(&differs);
    amax_free(&amax);
}

static void test_mixed_fp8(void **state) {
    (void)state;
    const char *const dirs[] = { NVFP4 "mixed/cuda/", NVFP4 "mixed/cpu/" };
    const recipe r = { .preset = RECIPE_MIXED, .kv = KV_FP8_CAST, .mtp = MTP_BF16 };
    for (int cpu = 0; cpu < 2; cpu++) {
        err e = { 0 };
        char path[200];
        amax_table amax;
        st_file want;
        snprintf(path, sizeof path, "%samax.safetensors", dirs[cpu]);
        OK(amax_load(&amax, path, &e));
        snprintf(path, sizeof path, "%sfp8_layers_0_3.safetensors", dirs[cpu]);
        OK(st_open(&want, path, &e));
        made m = export_model(&r, &amax, cpu ? ARITH_CPU : ARITH_CUDA, 10000000000u, 2);
        assert_true(same_bytes(&m, &want, NULL) > 0);
        drop(&m);
        st_close(&want);
        amax_free(&amax);
    }
}

/* mtp.json's rule: 4 x the input amax of the same role in the last full-attention layer, K and V scales borrowed. */
static void generous(amax_table *amax) {
    static const char *const roles[] = { "self_attn.q_proj.input_quantizer",
                                         "self_attn.k_proj.input_quantizer",
                                         "self_attn.v_proj.input_quantizer",
                                         "self_attn.o_proj.input_quantizer",
                                         "mlp.shared_expert.gate_proj.input_quantizer",
                                         "mlp.shared_expert.up_proj.input_quantizer",
                                         "mlp.shared_expert.down_proj.input_quantizer",
                                         "mlp.experts.gate_up_proj_input_quantizer",
                                         "mlp.experts.down_proj_input_quantizer" };
    char from[200], to[200];
    for (size_t i = 0; i < ARRAY_LEN(roles) + 2; i++) {
        const char *role = i < ARRAY_LEN(roles)    ? roles[i]
                           : i == ARRAY_LEN(roles) ? "self_attn.k_bmm_quantizer"
                                                   : "self_attn.v_bmm_quantizer";
        snprintf(from, sizeof from, "model.language_model.layers.7.%s", role);
        snprintf(to, sizeof to, "mtp.layers.0.%s", role);
        const float a = amax_get(amax, str_of(from));
        assert_true(a > 0);
        amax_raise(amax, str_of(to), i < ARRAY_LEN(roles) ? 4 * a : a);
    }
}

static void test_draft_head(void **state) {
    (void)state;
    err e = { 0 };
    amax_table amax;
    st_file want;
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_NVFP4 };
    OK(amax_load(&amax, NVFP4 "modelopt-cuda/amax.safetensors", &e));
    generous(&amax);
    OK(st_open(&want, NVFP4 "mtp/quantized.safetensors", &e));
    made m = export_model(&r, &amax, ARITH_CUDA, 10000000000u, 2);
    assert_true(same_bytes(&m, &want, NULL) > 100);
    drop(&m);
    st_close(&want);
    amax_free(&amax);
}

static void test_shards_and_threads(void **state) {
    (void)state;
    err e = { 0 };
    amax_table amax;
    st_file want;
    OK(amax_load(&amax, NVFP4 "modelopt-cuda/amax.safetensors", &e));
    OK(st_open(&want, NVFP4 "modelopt-cuda/quantized.safetensors", &e));
    for (int threads = 1; threads <= 5; threads += 2) {
        made m = export_model(&UNIFORM, &amax, ARITH_CUDA, threads == 5 ? 1 : 2000000, threads);
        same_bytes(&m, &want, NULL);
        drop(&m);
    }
    st_close(&want);
    amax_free(&amax);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_uniform_cuda), cmocka_unit_test(test_uniform_cpu),
                                        cmocka_unit_test(test_mixed_fp8), cmocka_unit_test(test_draft_head),
                                        cmocka_unit_test(test_shards_and_threads) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
