/* The export plan against what ModelOpt wrote: names, dtypes, shapes, file order, and the assignment to 2 MB shards. */
#include "quant/plan.h"

#include "support.h"

#define NVFP4 "tests/oracle/qwen36-tiny/nvfp4/"

static ckpt files;
static model_config config;
static weights bound;

static int setup(void **state) {
    (void)state;
    err e = { 0 };
    log_set_level(0);
    OK(ckpt_open(&files, TINY, &e));
    OK(config_read(&config, files.config, files.generation, TINY, &e));
    OK(weights_bind(&bound, &files, &config, &e));
    return 0;
}

static int teardown(void **state) {
    (void)state;
    weights_free(&bound);
    ckpt_close(&files);
    return 0;
}

static const qtensor *find_tensor(const plan *p, str name) {
    for (int i = 0; i < p->n_tensors; i++)
        if (str_eq(p->tensors[i].name, name)) return &p->tensors[i];
    return NULL;
}

/* rows of tensors.json: [name, dtype, shape, sha256, same_as_source], in file order */
static void same_tensors(const char *path, const recipe *r) {
    err e = { 0 };
    arena mem = { 0 };
    const json *file;
    plan p;
    OK(json_parse_file(&file, &mem, path, NULL, &e));
    OK(plan_make(&p, &files, &config, r, 10000000000u, &e));
    const json *rows = json_get(file, "tensors");
    assert_int_equal(p.n_shards, 1);
    assert_int_equal(p.n_tensors, rows->n);
    uint64_t offset = 0;
    for (uint32_t i = 0; i < rows->n; i++) {
        const json *row = rows->u.items[i].u.items;
        const qtensor *t = find_tensor(&p, json_str(&row[0]));
        if (!t) fail_msg(STR_FMT " is not in the plan", STR_ARG(json_str(&row[0])));
        assert_string_equal(dtype_name(t->type), row[1].u.s);
        assert_int_equal(t->rank, row[2].n);
        for (int d = 0; d < t->rank; d++) assert_int_equal(t->shape[d], row[2].u.items[d].u.i);
        assert_int_equal(t->offset, offset);
        assert_int_equal(t->part == QP_COPY, row[4].type == JSON_TRUE);
        offset += t->bytes;
    }
    assert_int_equal(offset, p.total_bytes);
    plan_free(&p);
    arena_free(&mem);
}

static void test_uniform(void **state) {
    (void)state;
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_BF16 };
    same_tensors(NVFP4 "modelopt-cuda/tensors.json", &r);
}

static void test_mixed(void **state) {
    (void)state;
    const recipe r = { .preset = RECIPE_MIXED, .kv = KV_FP8_CAST, .mtp = MTP_BF16 };
    same_tensors(NVFP4 "mixed/cuda/tensors.json", &r);
}

static void test_shards(void **state) {
    (void)state;
    err e = { 0 };
    arena mem = { 0 };
    const json *file, *mine;
    plan p;
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_BF16 };
    OK(json_parse_file(&file, &mem, NVFP4 "sharded.index.json", NULL, &e));
    OK(plan_make(&p, &files, &config, &r, 2000000, &e));
    size_t n;
    const char *text = plan_index_json(&p, &n);
    OK(json_parse(&mine, &mem, (str){ text, n }, "index", NULL, &e));
    const json *want = json_get(file, "weight_map"), *got = json_get(mine, "weight_map");
    assert_int_equal(got->n, want->n);
    for (uint32_t i = 0; i < want->n; i++) {
        const json *v = json_get_str(got, want->u.members[i].key);
        assert_non_null(v);
        assert_string_equal(v->u.s, want->u.members[i].value.u.s);
    }
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "total_size" : "total_parameters";
        assert_int_equal(json_get(json_get(mine, "metadata"), key)->u.i,
                         json_get(json_get(file, "metadata"), key)->u.i);
    }
    plan_free(&p);
    arena_free(&mem);
}

/* {q,k,v}, {in_proj_qkv,in_proj_z}, {gate,up} of shared and of each routed expert; all others alone. */
static void test_groups(void **state) {
    (void)state;
    err e = { 0 };
    plan p;
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_NVFP4 };
    OK(plan_make(&p, &files, &config, &r, 10000000000u, &e));
    const char *const pairs[][2] = {
        { "model.language_model.layers.3.self_attn.q_proj", "model.language_model.layers.3.self_attn.v_proj" },
        { "model.language_model.layers.0.linear_attn.in_proj_qkv",
          "model.language_model.layers.0.linear_attn.in_proj_z" },
        { "model.language_model.layers.5.mlp.experts.7.gate_proj",
          "model.language_model.layers.5.mlp.experts.7.up_proj" },
        { "model.language_model.layers.2.mlp.shared_expert.gate_proj",
          "model.language_model.layers.2.mlp.shared_expert.up_proj" },
        { "mtp.layers.0.self_attn.k_proj", "mtp.layers.0.self_attn.q_proj" },
    };
    for (size_t i = 0; i < ARRAY_LEN(pairs); i++)
        assert_int_equal(plan_find(&p, str_of(pairs[i][0]))->group, plan_find(&p, str_of(pairs[i][1]))->group);
    const char *const apart[][2] = {
        { "model.language_model.layers.3.self_attn.q_proj", "model.language_model.layers.3.self_attn.o_proj" },
        { "model.language_model.layers.5.mlp.experts.7.gate_proj",
          "model.language_model.layers.5.mlp.experts.8.gate_proj" },
        { "model.language_model.layers.5.mlp.experts.7.gate_proj",
          "model.language_model.layers.5.mlp.experts.7.down_proj" },
    };
    for (size_t i = 0; i < ARRAY_LEN(apart); i++)
        assert_int_not_equal(plan_find(&p, str_of(apart[i][0]))->group, plan_find(&p, str_of(apart[i][1]))->group);
    plan_free(&p);
}

static void test_globs(void **state) {
    (void)state;
    const str q = STR("model.language_model.layers.11.self_attn.q_proj");
    assert_true(recipe_glob("self_attn", q));
    assert_true(recipe_glob("layers.11", q));
    assert_true(recipe_glob("layers.*.self_attn.q_proj", q));
    assert_true(recipe_glob("model.**.q_proj", q));
    assert_true(recipe_glob("*_proj", q));
    assert_false(recipe_glob("layers.1", q));
    assert_false(recipe_glob("attn", q));
    assert_false(recipe_glob("self_attn.k_proj", q));
    assert_false(recipe_glob("", q));
    err e = { 0 };
    plan p;
    const char *const none[] = { "self_attention" };
    const recipe r = { .preset = RECIPE_NVFP4, .mtp = MTP_BF16, .exclude = none, .n_exclude = 1 };
    assert_false(plan_make(&p, &files, &config, &r, 10000000000u, &e));
    assert_string_equal(e.id, "E-QUANT-EMPTY");
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_uniform), cmocka_unit_test(test_mixed),
                                        cmocka_unit_test(test_shards), cmocka_unit_test(test_groups),
                                        cmocka_unit_test(test_globs) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
