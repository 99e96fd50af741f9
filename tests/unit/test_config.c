#include "model/config.h" /* before cmocka.h, which defines a macro `fail` */

#include "base/log.h"
#include "lib/synth.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* ---- helpers ---- */

static buf notices; /* "N-ID\n" of every line said */

static void sink(void *ctx, const char *id, const char *line) {
    (void)ctx, (void)line;
    buf_printf(&notices, "%s\n", id);
}

static bool read_text(model_config *c, const char *config, const char *generation, err *e) {
    arena mem = { 0 };
    const json *j = NULL, *g = NULL;
    *e = (err){ 0 };
    buf_clear(&notices);
    log_set_sink(sink, NULL);
    bool ok = json_parse(&j, &mem, str_of(config), "config.json", NULL, e) &&
              (!generation || json_parse(&g, &mem, str_of(generation), "generation_config.json", NULL, e)) &&
              config_read(c, j, g, "DIR", e);
    log_set_sink(NULL, NULL);
    arena_free(&mem);
    return ok;
}

static bool said(const char *id) {
    char line[64];
    snprintf(line, sizeof line, "%s\n", id);
    return str_find(buf_view(&notices), str_of(line)) >= 0;
}

/* The default MoE config with `key` set to `value` (NULL: key renamed away, which is the same as missing). */
static bool read_with(model_config *c, const char *key, const char *value, err *e) {
    const synth_spec spec = synth_default();
    synth s;
    synth_make(&s, &spec);
    if (value) {
        synth_config_set(&s, key, value);
    } else {
        char quoted[100];
        snprintf(quoted, sizeof quoted, "\"%s\":", key);
        char *at = strstr(s.config.p, quoted);
        assert_non_null(at);
        at[1] = '_';
    }
    const bool ok = read_text(c, s.config.p, s.generation.p, e);
    synth_free(&s);
    return ok;
}

static void refuse(const char *key, const char *value, const char *id, const char *message) {
    model_config c;
    err e;
    if (read_with(&c, key, value, &e)) fail_msg("%s = %s was accepted", key, value);
    assert_string_equal(e.id, id);
    if (message) assert_string_equal(e.msg, message);
    assert_int_equal(e.kind, ERR_INPUT);
    assert_non_null(strstr(e.msg, key));
}

#define MOE35B(rope)                                                                                                \
    "{\"architectures\":[\"Qwen3_5MoeForConditionalGeneration\"],\"model_type\":\"qwen3_5_moe\",\"dtype\":"         \
    "\"bfloat16\","                                                                                                 \
    "\"tie_word_embeddings\":false,\"vision_config\":{\"depth\":27},\"text_config\":{\"model_type\":\"qwen3_5_moe_" \
    "text\","                                                                                                       \
    "\"vocab_size\":248320,\"hidden_size\":2048,\"num_hidden_layers\":40,\"num_attention_heads\":16,"               \
    "\"num_key_value_heads\":2,\"head_dim\":256,\"attn_output_gate\":true,\"attention_bias\":false,\"hidden_act\":" \
    "\"silu\","                                                                                                     \
    "\"rms_norm_eps\":1e-06,\"linear_num_key_heads\":16,\"linear_num_value_heads\":32,\"linear_key_head_dim\":128," \
    "\"linear_value_head_dim\":128,\"linear_conv_kernel_dim\":4,\"num_experts\":256,\"num_experts_per_tok\":8,"     \
    "\"moe_intermediate_size\":512,\"shared_expert_intermediate_size\":512,\"max_position_embeddings\":262144,"     \
    "\"mamba_ssm_dtype\":\"float32\",\"mtp_num_hidden_layers\":1,\"eos_token_id\":248044,"                          \
    "\"output_gate_type\":\"swish\"," rope "}}"
#define ROPE35B                                                                                              \
    "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000000,\"partial_rotary_factor\":0.25," \
    "\"mrope_interleaved\":true,\"mrope_section\":[11,11,10]}"

/* float32 values computed independently: 60-digit powers rounded to float32, then float32 steps as in transformers. */
static const uint32_t freq_1e7_64[32] = { 0x3f800000u, 0x3f1ab32bu, 0x3ebaf81bu, 0x3e61f835u, 0x3e088d77u, 0x3da50956u,
                                          0x3d47763fu, 0x3cf11177u, 0x3c91ad39u, 0x3c301052u, 0x3bd4ca15u, 0x3b80967du,
                                          0x3b1b690du, 0x3abbd3edu, 0x3a6301e2u, 0x3a092e02u, 0x39a5cb60u, 0x394860c1u,
                                          0x38f22ce2u, 0x3892587eu, 0x3830df52u, 0x37d5c441u, 0x37812dabu, 0x371c1fc4u,
                                          0x36bcb0c1u, 0x36640cc6u, 0x3609cf4au, 0x35a68e4cu, 0x35494c57u, 0x34f3499du,
                                          0x3493048eu, 0x3431af44u };
/* factor 4 from 262144, and factor 2.5 from 32768 with betas 16 and 2, not truncated */
static const uint32_t yarn_4[32] = { 0x3f800000u, 0x3f1ab32bu, 0x3ebaf81bu, 0x3e61f835u, 0x3e088d77u, 0x3da50956u,
                                     0x3d47763fu, 0x3cf11177u, 0x3c91ad39u, 0x3c301052u, 0x3bd4ca15u, 0x3b80967du,
                                     0x3b1b690du, 0x3abbd3edu, 0x3a6301e2u, 0x39f8a364u, 0x3986b53eu, 0x3910058bu,
                                     0x38975c0du, 0x381b7e06u, 0x379ac368u, 0x3712f6edu, 0x36812dabu, 0x361c1fc4u,
                                     0x35bcb0c1u, 0x35640cc6u, 0x3509cf4au, 0x34a68e4cu, 0x34494c57u, 0x33f3499du,
                                     0x3393048eu, 0x3331af44u };
static const uint32_t yarn_2_5[32] = { 0x3f800000u, 0x3f1ab32bu, 0x3ebaf81bu, 0x3e61f835u, 0x3e088d77u, 0x3da50956u,
                                       0x3d47763fu, 0x3cf11177u, 0x3c91ad39u, 0x3c301052u, 0x3bd4ca15u, 0x3b80967du,
                                       0x3b0fdc91u, 0x3a92927fu, 0x3a102778u, 0x39865990u, 0x3904a2b3u, 0x38a04d67u,
                                       0x3841bd81u, 0x37ea2730u, 0x378d7f75u, 0x372b0367u, 0x36ceaf79u, 0x3679cc6eu,
                                       0x3616f3cdu, 0x35b6709eu, 0x355c7eddu, 0x35053ea3u, 0x34a109dfu, 0x3442a14au,
                                       0x33eb3a7cu, 0x338e25d0u };

static void assert_bits(const float *v, const uint32_t *want, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &v[i], 4);
        if (u != want[i]) fail_msg("frequency %d: %08x, expected %08x", i, u, want[i]);
    }
}

/* ---- good files ---- */

static void real_35b(void **state) {
    (void)state;
    model_config c;
    err e;
    const bool ok = read_text(
        &c, MOE35B(ROPE35B),
        "{\"eos_token_id\":[248046,248044],\"do_sample\":true,\"temperature\":1.0,\"top_k\":20,\"top_p\":0.95}", &e);
    if (!ok) fail_msg("%s", e.msg);
    assert_int_equal(notices.n, 0);
    assert_true(c.is_moe && !c.is_next && c.has_vision && !c.tied && c.attn_gate);
    assert_string_equal(c.model_type, "qwen3_5_moe_text");
    assert_int_equal(c.type, DT_BF16);
    assert_int_equal(c.attn_layers, 10);
    for (int i = 0; i < 40; i++) assert_int_equal(c.layer[i], i % 4 == 3 ? LAYER_ATTN : LAYER_GDN);
    assert_int_equal(config_conv_dim(&c), 8192);
    assert_int_equal(c.rotary_dim, 64);
    assert_bits(c.inv_freq, freq_1e7_64, 32);
    assert_true(c.rope_scaling == 1.0f);
    int axes[3] = { 0 };
    for (int i = 0; i < 32; i++) {
        axes[c.rope_axis[i]]++;
        assert_int_equal(c.rope_axis[i], i % 3 == 1 ? 1 : i % 3 == 2 && i < 30 ? 2 : 0);
    }
    assert_true(axes[0] == 11 && axes[1] == 11 && axes[2] == 10);
    assert_int_equal(c.stop_count, 2);
    assert_int_equal(c.stop_ids[0], 248046);
    assert_int_equal(c.gen.top_k, 20);
    assert_true(c.gen.has_temperature && c.gen.do_sample && !c.gen.has_min_p);
    assert_int_equal(config_kv_bytes_per_token(&c, 2, false), 20480);
    assert_int_equal(config_kv_bytes_per_token(&c, 1, true), 10240 + 1024);
    assert_int_equal(config_state_bytes(&c), 30 * ((2 << 20) + 3 * 8192 * 4));
}

static void tiny_file(void **state) {
    (void)state;
    arena mem = { 0 };
    const json *j, *g;
    model_config c;
    err e = { 0 };
    buf_clear(&notices);
    log_set_sink(sink, NULL);
    assert_true(json_parse_file(&j, &mem, "assets/qwen36-tiny/config.json", NULL, &e));
    assert_true(json_parse_file(&g, &mem, "assets/qwen36-tiny/generation_config.json", NULL, &e));
    assert_true(config_read(&c, j, g, "assets/qwen36-tiny", &e));
    log_set_sink(NULL, NULL);
    arena_free(&mem);
    assert_string_equal(notices.p, "N-CONFIG-DTYPE\n"); /* its dtype is null everywhere */
    assert_int_equal(c.type, DT_BF16);
    assert_int_equal(c.layers, 8);
    assert_int_equal(c.topk, 4);
    assert_int_equal(c.rotary_dim, 16);
    assert_int_equal(c.max_position, 4096);
    assert_int_equal(c.stop_ids[0], 1546);
    assert_int_equal(c.stop_ids[1], 1544);
    assert_true(c.inv_freq[0] == 1.0f);
}

static void variants(void **state) {
    (void)state;
    for (int v = 0; v < 16; v++) {
        synth_spec spec = synth_default();
        spec.dense = v & 1;
        spec.text_only = v & 2;
        spec.tied = v & 4;
        spec.next = (v & 8) && !spec.dense;
        synth s;
        synth_make(&s, &spec);
        model_config c;
        err e;
        if (!read_text(&c, s.config.p, s.generation.p, &e)) fail_msg("variant %d: %s", v, e.msg);
        assert_int_equal(notices.n, 0);
        assert_int_equal(c.is_moe, !spec.dense);
        assert_int_equal(c.is_next, spec.next);
        assert_int_equal(c.tied, spec.tied);
        assert_int_equal(c.inter, spec.dense ? 40 : 0);
        assert_int_equal(c.experts, spec.dense ? 0 : 4);
        assert_int_equal(c.gdn_layers, 3);
        assert_int_equal(c.rotary_dim, 4);
        assert_int_equal(c.has_vision, !(spec.text_only || spec.next));
        synth_free(&s);
    }
}

static void layer_lists(void **state) {
    (void)state;
    model_config c;
    err e;
    /* an explicit list wins over the interval */
    assert_true(read_with(&c, "full_attention_interval",
                          "3, \"layer_types\": [\"full_attention\", \"linear_attention\", \"linear_attention\", "
                          "\"full_attention\", \"linear_attention\"]",
                          &e));
    assert_int_equal(c.attn_layers, 2);
    assert_int_equal(c.layer[0], LAYER_ATTN);
    assert_true(read_with(&c, "full_attention_interval", NULL, &e)); /* 4 */
    assert_int_equal(c.attn_layers, 1);
    assert_int_equal(c.layer[3], LAYER_ATTN);
}

static void layer_refusals(void **state) {
    (void)state;
    model_config c;
    err e;
    assert_false(read_with(&c, "full_attention_interval", "2, \"layer_types\": [\"full_attention\"]", &e));
    assert_string_equal(e.id, "E-CONFIG-LAYER");
    assert_string_equal(e.msg, "DIR/config.json: layer_types: a list of 1 does not go with num_hidden_layers 5");
    assert_false(read_with(&c, "full_attention_interval", "2, \"layer_types\": \"all\"", &e));
    assert_string_equal(e.id, "E-CONFIG-LAYER");
    assert_false(read_with(&c, "full_attention_interval",
                           "2, \"layer_types\": [\"linear_attention\", \"sliding_attention\", \"linear_attention\", "
                           "\"linear_attention\", \"linear_attention\"]",
                           &e));
    assert_string_equal(
        e.msg,
        "DIR/config.json: layer_types[1]: \"sliding_attention\" is not supported (linear_attention or full_attention)");
    assert_false(read_with(&c, "full_attention_interval", "2, \"layer_types\": [1, 2, 3, 4, 5]", &e));
    assert_string_equal(e.id, "E-CONFIG-LAYER");
}

static void dtypes(void **state) {
    (void)state;
    static const struct {
        const char *value;
        dtype type;
        bool notice;
    } cases[] = { { "\"bfloat16\"", DT_BF16, false },
                  { "\"torch.bfloat16\"", DT_BF16, false },
                  { "\"float16\"", DT_F16, false },
                  { "\"float32\"", DT_F32, false },
                  { "\"auto\"", DT_BF16, true },
                  { "null", DT_BF16, true },
                  { "null, \"torch_dtype\": \"float16\"", DT_F16, false } };
    model_config c;
    err e;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        assert_true(read_with(&c, "dtype", cases[i].value, &e));
        assert_int_equal(c.type, cases[i].type);
        assert_int_equal(said("N-CONFIG-DTYPE"), cases[i].notice);
    }
    assert_true(read_with(&c, "dtype", NULL, &e));
    assert_true(said("N-CONFIG-DTYPE"));
    refuse("dtype", "\"int8\"", "E-CONFIG-FIELD",
           "DIR/config.json: dtype: \"int8\" is not bfloat16, float16 or float32");
    refuse("dtype", "16", "E-CONFIG-FIELD", "DIR/config.json: dtype: 16 is not a text");
}

/* ---- rope ---- */

static void rope_forms(void **state) {
    (void)state;
    model_config c;
    err e;
    static const char *const same[] = {
        MOE35B("\"rope_theta\":1e7,\"partial_rotary_factor\":0.25"),
        MOE35B("\"rope_theta\":1e7"),
        MOE35B("\"rope_theta\":1e7,\"rope_scaling\":null,\"rope_parameters\":null"),
        MOE35B("\"rope_theta\":10000000,\"rope_scaling\":{\"type\":\"mrope\",\"mrope_section\":[11,11,10]}"),
        MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"type\":\"default\"},\"partial_rotary_factor\":0.25"),
        MOE35B("\"partial_rotary_factor\":0.5,\"rope_parameters\":{\"rope_theta\":1e7,\"partial_rotary_factor\":0.25}"),
    };
    for (size_t i = 0; i < ARRAY_LEN(same); i++) {
        if (!read_text(&c, same[i], NULL, &e)) fail_msg("form %zu: %s", i, e.msg);
        assert_int_equal(c.rope, ROPE_DEFAULT);
        assert_bits(c.inv_freq, freq_1e7_64, 32);
        assert_int_equal(c.rope_axis[1], 1); /* the family's sections, given or not */
        assert_int_equal(c.rope_axis[31], 1);
        assert_int_equal(c.rope_axis[29], 2);
    }
    /* a factor without yarn is ignored, and that is said */
    assert_true(read_text(
        &c, MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"default\",\"factor\":4.0}"), NULL, &e));
    assert_true(said("N-CONFIG-ROPE"));
    assert_bits(c.inv_freq, freq_1e7_64, 32);
}

static void rope_yarn(void **state) {
    (void)state;
    model_config c;
    err e;
    static const char *const four[] = {
        MOE35B("\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":1e7,\"factor\":4.0,\"original_max_position_"
               "embeddings\":262144,"
               "\"partial_rotary_factor\":0.25,\"mrope_interleaved\":true,\"mrope_section\":[11,11,10]}"),
        MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}"),
        MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"beta_fast\":null,\"beta_"
               "slow\":0,\"truncate\":true}"),
    };
    for (size_t i = 0; i < ARRAY_LEN(four); i++) {
        if (!read_text(&c, four[i], NULL, &e)) fail_msg("form %zu: %s", i, e.msg);
        assert_int_equal(c.rope, ROPE_YARN);
        assert_bits(c.inv_freq, yarn_4, 32);
        assert_true(c.rope_scaling == (float)(0.1 * log(4.0) + 1));
        assert_true(c.yarn_factor == 4);
        assert_int_equal(c.max_position, 1048576);
    }
    assert_int_equal(c.rope_axis[2], 2); /* sections stay */

    assert_true(
        read_text(&c,
                  MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2.5,\"beta_fast\":16,"
                         "\"beta_slow\":2,"
                         "\"truncate\":false,\"original_max_position_embeddings\":32768,\"attention_factor\":0.75}"),
                  NULL, &e));
    assert_bits(c.inv_freq, yarn_2_5, 32);
    assert_true(c.rope_scaling == 0.75f);
    assert_true(said("N-CONFIG-ROPE")); /* 2.5 x 32768 is not 262144: the factor counts */
    assert_int_equal(c.max_position, 262144);

    assert_true(read_text(&c,
                          MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":8,\"mscale\":"
                                 "0.5,\"mscale_all_dim\":0.8}"),
                          NULL, &e));
    assert_true(c.rope_scaling == 0.94651437f);
    /* no factor: the ratio of the two lengths */
    assert_true(read_text(&c,
                          MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":null,"
                                 "\"original_max_position_embeddings\":65536}"),
                          NULL, &e));
    assert_true(c.yarn_factor == 4);
    assert_int_equal(c.max_position, 262144);
}

static void rope_refusals(void **state) {
    (void)state;
    static const struct {
        const char *text, *id, *part;
    } cases[] = {
        { MOE35B("\"rope_parameters\":{\"rope_type\":\"longrope\",\"rope_theta\":1e7}"), "E-CONFIG-ROPE",
          "\"longrope\" is not supported" },
        { MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0}"), "E-CONFIG-ROPE",
          "\"linear\" is not supported" },
        { MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"type\":\"dynamic\"}"), "E-CONFIG-ROPE", "dynamic" },
        { MOE35B("\"rope_theta\":1e7,\"rope_scaling\":{\"type\":7}"), "E-CONFIG-FIELD", "type: 7 is not a text" },
        { MOE35B("\"rope_theta\":1e7,\"rope_scaling\":[1]"), "E-CONFIG-FIELD",
          "rope_scaling: a list of 1 is not an object" },
        { MOE35B("\"rope_parameters\":\"default\""), "E-CONFIG-FIELD", "rope_parameters" },
        { MOE35B("\"rope_parameters\":{}"), "E-CONFIG-FIELD", "rope_theta (in rope_parameters) is missing" },
        { MOE35B("\"rope_theta\":-1e7"), "E-CONFIG-FIELD", "rope_theta: -1e7" },
        { MOE35B("\"rope_theta\":1"), "E-CONFIG-FIELD", "rope_theta: 1 is not a number" },
        { MOE35B("\"rope_theta\":1e400"), "E-CONFIG-FIELD", "rope_theta" },
        { MOE35B("\"rope_theta\":\"1e7\""), "E-CONFIG-FIELD", "rope_theta: \"1e7\"" },
        { MOE35B("\"rope_theta\":1e7,\"partial_rotary_factor\":1.5"), "E-CONFIG-FIELD", "partial_rotary_factor: 1.5" },
        { MOE35B("\"rope_theta\":1e7,\"partial_rotary_factor\":0"), "E-CONFIG-ROPE",
          "partial_rotary_factor: 0 of head_dim 256 makes 0" },
        { MOE35B("\"rope_theta\":1e7,\"partial_rotary_factor\":0.012"), "E-CONFIG-ROPE", "makes 3 rotary dimensions" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"mrope_section\":[11,11,11]}"), "E-CONFIG-ROPE",
          "sums to 33" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"mrope_section\":[32,0]}"), "E-CONFIG-FIELD",
          "mrope_section" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"mrope_section\":[-1,17,16]}"), "E-CONFIG-FIELD",
          "mrope_section: -1" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"mrope_section\":[11,11,10],\"mrope_interleaved\":false}"),
          "E-CONFIG-ROPE", "mrope_interleaved" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"yarn\"}"), "E-CONFIG-FIELD",
          "factor (rope_type yarn) is missing" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"yarn\",\"factor\":0.5}"), "E-CONFIG-FIELD",
          "factor: 0.5" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"yarn\",\"factor\":1000}"), "E-CONFIG-ROPE",
          "beyond 16777216" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"yarn\",\"factor\":2,\"original_max_position_"
                 "embeddings\":0}"),
          "E-CONFIG-FIELD", "original_max_position_embeddings: 0" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"yarn\",\"factor\":2,\"beta_fast\":-3}"),
          "E-CONFIG-FIELD", "beta_fast: -3" },
        { MOE35B("\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"yarn\",\"factor\":2,\"truncate\":1}"),
          "E-CONFIG-FIELD", "truncate: 1 is not true or false" },
        { MOE35B(
              "\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":\"yarn\",\"factor\":2,\"attention_factor\":-1}"),
          "E-CONFIG-FIELD", "attention_factor: -1" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        model_config c;
        err e;
        if (read_text(&c, cases[i].text, NULL, &e)) fail_msg("case %zu was accepted", i);
        if (strcmp(e.id, cases[i].id) || !strstr(e.msg, cases[i].part)) fail_msg("case %zu: %s: %s", i, e.id, e.msg);
    }
}

/* ---- every field ---- */

static void every_number(void **state) {
    (void)state;
    static const struct {
        const char *key;
        int hi;
        bool required;
    } fields[] = { { "vocab_size", 1 << 24, true },
                   { "hidden_size", 1 << 16, true },
                   { "num_hidden_layers", 1024, true },
                   { "num_attention_heads", 1024, true },
                   { "num_key_value_heads", 1024, true },
                   { "head_dim", 1024, false },
                   { "linear_num_key_heads", 1024, true },
                   { "linear_num_value_heads", 1024, true },
                   { "linear_key_head_dim", 1024, false },
                   { "linear_value_head_dim", 1024, false },
                   { "linear_conv_kernel_dim", 64, false },
                   { "num_experts", 4096, true },
                   { "num_experts_per_tok", 64, true },
                   { "moe_intermediate_size", 1 << 18, true },
                   { "shared_expert_intermediate_size", 1 << 18, true },
                   { "max_position_embeddings", 1 << 24, false },
                   { "full_attention_interval", 1024, false } };
    static const char *const wrong[] = { "-1",
                                         "-9223372036854775808",
                                         "2147483648",
                                         "4294967297",
                                         "9223372036854775807",
                                         "1e3",
                                         "2.0",
                                         "\"16\"",
                                         "true",
                                         "[16]",
                                         "{}",
                                         "99999999999999999999999" };
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        for (size_t k = 0; k < ARRAY_LEN(wrong); k++) refuse(fields[i].key, wrong[k], "E-CONFIG-FIELD", NULL);
        if (strcmp(fields[i].key, "shared_expert_intermediate_size"))
            refuse(fields[i].key, "0", "E-CONFIG-FIELD", NULL);
        char text[32];
        snprintf(text, sizeof text, "%d", fields[i].hi + 1);
        refuse(fields[i].key, text, "E-CONFIG-FIELD", NULL);
        model_config c;
        err e;
        const bool missing_ok = read_with(&c, fields[i].key, NULL, &e),
                   null_ok = read_with(&c, fields[i].key, "null", &e);
        if (fields[i].required) {
            assert_false(missing_ok || null_ok);
            assert_string_equal(e.id, "E-CONFIG-FIELD");
            char want[100];
            snprintf(want, sizeof want, "DIR/config.json: %s is missing", fields[i].key);
            assert_string_equal(e.msg, want);
        } else if (strcmp(fields[i].key, "head_dim")) { /* 256 does not go with this file's sections */
            assert_true(missing_ok && null_ok);
            if (strcmp(fields[i].key, "full_attention_interval")) assert_true(said("N-CONFIG-DEFAULT"));
        }
    }
    refuse("hidden_size", "-5", "E-CONFIG-FIELD",
           "DIR/config.json: hidden_size: -5 is not a whole number from 1 to 65536");
}

static void relations(void **state) {
    (void)state;
    refuse("num_key_value_heads", "3", "E-CONFIG-FIELD",
           "DIR/config.json: num_attention_heads: 4 is not a multiple of num_key_value_heads 3");
    refuse("linear_num_value_heads", "3", "E-CONFIG-FIELD", NULL);
    refuse("num_experts_per_tok", "5", "E-CONFIG-FIELD",
           "DIR/config.json: num_experts_per_tok: 5 is more than num_experts 4");
    refuse("linear_conv_kernel_dim", "3", "E-CONFIG-UNSUPPORTED", NULL);
    model_config c;
    err e;
    /* state beyond any machine: bounded dimensions, unbounded product */
    assert_false(read_text(
        &c,
        "{\"model_type\":\"qwen3_5_text\",\"vocab_size\":9,\"hidden_size\":8,\"num_hidden_layers\":1024,"
        "\"num_attention_heads\":1,\"num_key_value_heads\":1,\"linear_num_key_heads\":1024,\"linear_num_value_heads\":"
        "1024,"
        "\"linear_key_head_dim\":1024,\"linear_value_head_dim\":1024,\"intermediate_size\":8,\"rope_theta\":1e4}",
        NULL, &e));
    assert_string_equal(e.id, "E-CONFIG-FIELD");
    assert_non_null(strstr(e.msg, "bytes of state"));
}

static void refusals(void **state) {
    (void)state;
    refuse("hidden_act", "\"gelu\"", "E-CONFIG-ACT", "DIR/config.json: hidden_act: \"gelu\" is not supported");
    refuse("hidden_act", "1", "E-CONFIG-ACT", NULL);
    refuse("attention_bias", "true", "E-CONFIG-UNSUPPORTED", "DIR/config.json: attention_bias: true is not supported");
    refuse("attention_bias", "1", "E-CONFIG-FIELD", NULL);
    refuse("rms_norm_eps", "0", "E-CONFIG-FIELD", NULL);
    refuse("rms_norm_eps", "-1e-6", "E-CONFIG-FIELD", NULL);
    refuse("rms_norm_eps", "1e300", "E-CONFIG-FIELD", NULL);
    refuse("rms_norm_eps", "\"1e-6\"", "E-CONFIG-FIELD", NULL);
    refuse("tie_word_embeddings", "\"no\"", "E-CONFIG-FIELD", NULL);
    refuse("attn_output_gate", "1", "E-CONFIG-FIELD", NULL);
    refuse("mtp_num_hidden_layers", "2", "E-CONFIG-UNSUPPORTED", NULL);
    refuse("mtp_num_hidden_layers", "-1", "E-CONFIG-FIELD", NULL);
}

static void refusals_by_name(void **state) {
    (void)state;
    static const struct {
        const char *extra, *id, *part;
    } cases[] = { { "\"mlp_only_layers\": [3]", "E-CONFIG-UNSUPPORTED", "mlp_only_layers: a list of 1" },
                  { "\"decoder_sparse_step\": 2", "E-CONFIG-UNSUPPORTED", "decoder_sparse_step: 2" },
                  { "\"norm_topk_prob\": false", "E-CONFIG-UNSUPPORTED", "norm_topk_prob: false" },
                  { "\"use_sliding_window\": true", "E-CONFIG-UNSUPPORTED", "use_sliding_window: true" },
                  { "\"mtp_use_dedicated_embeddings\": true", "E-CONFIG-UNSUPPORTED", "mtp_use_dedicated_embeddings" },
                  { "\"final_logit_softcapping\": 30.0", "E-CONFIG-UNSUPPORTED", "final_logit_softcapping: 30.0" },
                  { "\"output_gate_type\": \"sigmoid\"", "E-CONFIG-ACT", "output_gate_type: \"sigmoid\"" },
                  { "\"num_nextn_predict_layers\": 3", NULL, NULL }, /* mtp_num_hidden_layers is there and wins */
                  { "\"mlp_only_layers\": []", NULL, NULL },
                  { "\"decoder_sparse_step\": 1", NULL, NULL },
                  { "\"mamba_ssm_dtype\": \"bfloat16\"", NULL, "N-CONFIG-SSM" },
                  { "\"output_gate_type\": \"swish\"", NULL, NULL } };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char text[200];
        snprintf(text, sizeof text, "1, %s", cases[i].extra);
        model_config c;
        err e;
        const bool ok = read_with(&c, "mtp_num_hidden_layers", text, &e);
        if (ok != !cases[i].id) fail_msg("%s: %s", cases[i].extra, ok ? "accepted" : e.msg);
        if (ok)
            assert_true(!cases[i].part || said(cases[i].part));
        else if (strcmp(e.id, cases[i].id) || !strstr(e.msg, cases[i].part))
            fail_msg("%s: %s: %s", cases[i].extra, e.id, e.msg);
    }
}

static void model_types(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        { "{}", "model_type is missing" },
        { "[]", "not an object" },
        { "{\"model_type\":null}", "model_type is missing" },
        { "{\"model_type\":\"llama\"}", "model_type: \"llama\" is not a model nibble knows" },
        { "{\"model_type\":\"qwen4_exp\",\"text_config\":{\"model_type\":\"qwen3_5_moe_text\"}}",
          "model_type: \"qwen4_exp\"" },
        { "{\"model_type\":\"qwen3_5_moe\",\"text_config\":{\"model_type\":\"qwen2\"}}",
          "text_config.model_type: \"qwen2\"" },
        { "{\"model_type\":\"qwen3_5\",\"text_config\":{\"model_type\":\"qwen3_5_moe_text\"}}",
          "does not go with text_config's" },
        { "{\"architectures\":[\"LlamaForCausalLM\"]}", "architectures names no model" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        model_config c;
        err e;
        if (read_text(&c, cases[i].text, NULL, &e)) fail_msg("case %zu was accepted", i);
        if (strcmp(e.id, "E-CONFIG-TYPE") || !strstr(e.msg, cases[i].part))
            fail_msg("case %zu: %s: %s", i, e.id, e.msg);
    }
    model_config c;
    err e;
    assert_false(read_text(&c, "{\"model_type\":7}", NULL, &e));
    assert_string_equal(e.id, "E-CONFIG-FIELD");
    assert_false(read_text(&c, "{\"text_config\":7}", NULL, &e));
    assert_string_equal(e.id, "E-CONFIG-FIELD");
    /* known by its architecture alone; and an unknown architecture with a known type is said */
    synth_spec spec = synth_default();
    spec.text_only = true;
    synth s;
    synth_make(&s, &spec);
    synth_config_set(&s, "model_type", "null");
    assert_true(read_text(&c, s.config.p, NULL, &e));
    assert_string_equal(c.model_type, "qwen3_5_moe_text");
    assert_true(c.is_moe);
    synth_config_set(&s, "model_type", "\"qwen3_5_moe_text\"");
    synth_config_set(&s, "architectures", "[\"Other\"]");
    assert_true(read_text(&c, s.config.p, NULL, &e));
    assert_true(said("N-CONFIG-ARCH"));
    synth_free(&s);
}

/* ---- stops and sampling ---- */

static void generation(void **state) {
    (void)state;
    const synth_spec spec = synth_default();
    synth s;
    synth_make(&s, &spec);
    model_config c;
    err e;
    assert_true(read_text(&c, s.config.p, "{\"eos_token_id\": 5}", &e));
    assert_int_equal(c.stop_count, 1);
    assert_int_equal(c.stop_ids[0], 5);
    assert_true(read_text(&c, s.config.p, "{\"eos_token_id\": [5, 5, 7]}", &e));
    assert_int_equal(c.stop_count, 2);
    assert_true(read_text(&c, s.config.p, "{\"eos_token_id\": null}", &e)); /* then config.json's */
    assert_int_equal(c.stop_ids[0], 47);
    assert_true(read_text(&c, s.config.p, NULL, &e));
    assert_int_equal(c.stop_ids[0], 47);
    assert_false(c.gen.has_temperature || c.gen.do_sample);
    assert_false(c.gen.has_presence || c.gen.has_frequency || c.gen.has_repetition);
    assert_true(read_text(&c, s.config.p, "{\"repetition_penalty\": 1.05, \"presence_penalty\": -2}", &e));
    assert_true(c.gen.has_repetition && c.gen.repetition == 1.05 && c.gen.has_presence && c.gen.presence == -2);
    assert_false(c.gen.has_frequency);
    assert_false(said("N-CONFIG-SAMPLING"));
    assert_true(read_text(&c, s.config.p, "{\"typical_p\": 0.9}", &e));
    assert_true(said("N-CONFIG-SAMPLING"));
    synth_config_set(&s, "eos_token_id", "[]");
    assert_true(read_text(&c, s.config.p, NULL, &e));
    assert_int_equal(c.stop_count, 0);
    assert_true(said("N-CONFIG-STOP"));

    static const struct {
        const char *text, *part;
    } cases[] = { { "{\"eos_token_id\": -1}",
                    "generation_config.json: eos_token_id: -1 is not a token id below vocab_size 48" },
                  { "{\"eos_token_id\": 48}", "eos_token_id: 48" },
                  { "{\"eos_token_id\": [3, \"x\"]}", "eos_token_id: \"x\"" },
                  { "{\"eos_token_id\": 4294967301}", "eos_token_id" },
                  { "{\"eos_token_id\": {}}", "eos_token_id: an object of 0" },
                  { "{\"eos_token_id\": [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}", "more than 16 ids" },
                  { "{\"temperature\": -1}", "temperature: -1" },
                  { "{\"temperature\": 1e999}", "temperature" },
                  { "{\"temperature\": \"hot\"}", "temperature" },
                  { "{\"top_k\": -3}", "top_k: -3" },
                  { "{\"top_k\": 2.5}", "top_k: 2.5" },
                  { "{\"top_p\": 1.01}", "top_p: 1.01" },
                  { "{\"min_p\": -0.1}", "min_p: -0.1" },
                  { "{\"do_sample\": \"yes\"}", "do_sample" } };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        if (read_text(&c, s.config.p, cases[i].text, &e)) fail_msg("%s was accepted", cases[i].text);
        if (strcmp(e.id, "E-CONFIG-FIELD") || !strstr(e.msg, cases[i].part)) fail_msg("%s: %s", cases[i].text, e.msg);
    }
    synth_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_35b),         cmocka_unit_test(tiny_file),      cmocka_unit_test(variants),
        cmocka_unit_test(layer_lists),      cmocka_unit_test(layer_refusals), cmocka_unit_test(dtypes),
        cmocka_unit_test(rope_forms),       cmocka_unit_test(rope_yarn),      cmocka_unit_test(rope_refusals),
        cmocka_unit_test(every_number),     cmocka_unit_test(relations),      cmocka_unit_test(refusals),
        cmocka_unit_test(refusals_by_name), cmocka_unit_test(model_types),    cmocka_unit_test(generation),
    };
    const int bad = cmocka_run_group_tests(tests, NULL, NULL);
    buf_free(&notices);
    return bad;
}
