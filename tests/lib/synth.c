#include "lib/synth.h"

#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "num/bf16.h"

/* ---- numbers ---- */

static uint64_t mix(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Near-normal with deviation 1: the sum of four uniforms. */
static float normal(uint64_t *state) {
    const uint64_t r = mix(state);
    double sum = 0;
    for (int i = 0; i < 4; i++) sum += (double)(r >> 16 * i & 0xffff) / 65535.0 - 0.5;
    return (float)(sum * 1.7320508);
}

typedef struct maker {
    synth *s;
    const synth_spec *spec;
    char role[96]; /* "3", "mtp.0": where we are, without prefix */
    char base[96]; /* the same as the file names it */
} maker;

/* What a tensor is, independent of its storage. */
static float *values(const maker *m, const char *what, size_t n, float std, float mean) {
    char key[200];
    snprintf(key, sizeof key, "%s/%s", m->role, what);
    uint64_t state = str_hash(str_of(key)) ^ m->spec->seed * 0x9e3779b97f4a7c15u;
    float *v = xmalloc(n * sizeof *v);
    for (size_t i = 0; i < n; i++) v[i] = bf16_to_f32(bf16_from_f32(mean + std * normal(&state)));
    return v;
}

static void store(uint8_t *out, dtype type, const float *v, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const uint16_t h = type == DT_F16 ? f16_from_f32(v[i]) : bf16_from_f32(v[i]);
        memcpy(out + i * (size_t)dtype_bytes(type), type == DT_F32 ? (const void *)&v[i] : &h,
               (size_t)dtype_bytes(type));
    }
}

/* ---- the list ---- */

synth_tensor *synth_add(synth *s, const char *name, dtype type, int rank, const int64_t *shape) {
    if ((s->n & (s->n - 1)) == 0) /* full at 0, 1, 2, 4 ...: doubling, because one test makes tens of thousands */
        s->t = xrealloc(s->t, (size_t)(s->n ? 2 * s->n : 1) * sizeof *s->t);
    synth_tensor *t = &s->t[s->n++];
    *t = (synth_tensor){ .name = xstrdup(name), .type = type, .rank = rank, .bytes = (size_t)dtype_bytes(type) };
    for (int i = 0; i < rank; i++) t->shape[i] = shape[i], t->bytes *= (size_t)shape[i];
    t->data = xcalloc(t->bytes, 1);
    return t;
}

static int index_of(const synth *s, const char *name) {
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->t[i].name, name) == 0) return i;
    CHECK(false, "no tensor %s", name);
    return -1;
}

synth_tensor *synth_find(synth *s, const char *name) { return &s->t[index_of(s, name)]; }

void synth_drop(synth *s, const char *name) {
    const int i = index_of(s, name);
    free(s->t[i].name);
    free(s->t[i].data);
    memmove(&s->t[i], &s->t[i + 1], (size_t)(s->n - i - 1) * sizeof *s->t);
    s->n--;
}

void synth_rename(synth *s, const char *from, const char *to) {
    for (int i = 0; i < s->n; i++) {
        if (strncmp(s->t[i].name, from, strlen(from)) != 0) continue;
        buf b = { 0 };
        buf_printf(&b, "%s%s", to, s->t[i].name + strlen(from));
        free(s->t[i].name);
        s->t[i].name = b.p;
    }
}

static synth_tensor *put(maker *m, const char *param, dtype type, int rank, const int64_t *shape, const float *v) {
    char name[200];
    snprintf(name, sizeof name, "%s%s", m->base, param);
    synth_tensor *t = synth_add(m->s, name, type, rank, shape);
    if (v) store(t->data, type, v, t->bytes / (size_t)dtype_bytes(type));
    return t;
}

static void linear(maker *m, const char *param, int rows, int cols) {
    float *v = values(m, param, (size_t)rows * (size_t)cols, 1 / sqrtf((float)cols), 0);
    put(m, param, m->spec->type, 2, (int64_t[]){ rows, cols }, v);
    free(v);
}

static void vector(maker *m, const char *param, int n, float std, float mean, dtype type) {
    float *v = values(m, param, (size_t)n, std, mean);
    put(m, param, type, 1, (int64_t[]){ n }, v);
    free(v);
}

/* ---- layers ---- */

/* qwen3_next: per key head q, k, its value heads' v, their z. */
static void gdn_interleaved(maker *m) {
    const synth_spec *c = m->spec;
    const int r = c->lin_v_heads / c->lin_k_heads, kd = c->lin_k_dim, vd = r * c->lin_v_dim, key = c->lin_k_heads * kd,
              value = c->lin_k_heads * vd, h = c->hidden, group = 2 * kd + 2 * vd;
    const float std = 1 / sqrtf((float)h);
    float *qkv = values(m, "linear_attn.in_proj_qkv.weight", (size_t)(2 * key + value) * (size_t)h, std, 0);
    float *z = values(m, "linear_attn.in_proj_z.weight", (size_t)value * (size_t)h, std, 0);
    float *b = values(m, "linear_attn.in_proj_b.weight", (size_t)c->lin_v_heads * (size_t)h, std, 0);
    float *a = values(m, "linear_attn.in_proj_a.weight", (size_t)c->lin_v_heads * (size_t)h, std, 0);
    float *qkvz = xmalloc((size_t)(group * c->lin_k_heads) * (size_t)h * sizeof *qkvz);
    float *ba = xmalloc((size_t)(2 * c->lin_v_heads) * (size_t)h * sizeof *ba);
    float *out = qkvz, *out_ba = ba;
    for (int i = 0; i < c->lin_k_heads; i++) {
        for (int j = 0; j < kd * h; j++) *out++ = qkv[i * kd * h + j];
        for (int j = 0; j < kd * h; j++) *out++ = qkv[(key + i * kd) * h + j];
        for (int j = 0; j < vd * h; j++) *out++ = qkv[(2 * key + i * vd) * h + j];
        for (int j = 0; j < vd * h; j++) *out++ = z[i * vd * h + j];
        for (int j = 0; j < r * h; j++) *out_ba++ = b[i * r * h + j];
        for (int j = 0; j < r * h; j++) *out_ba++ = a[i * r * h + j];
    }
    put(m, "linear_attn.in_proj_qkvz.weight", c->type, 2, (int64_t[]){ group * c->lin_k_heads, h }, qkvz);
    put(m, "linear_attn.in_proj_ba.weight", c->type, 2, (int64_t[]){ 2 * c->lin_v_heads, h }, ba);
    free(qkv);
    free(z);
    free(b);
    free(a);
    free(qkvz);
    free(ba);
}

static void gdn(maker *m) {
    const synth_spec *c = m->spec;
    const int key = c->lin_k_heads * c->lin_k_dim, value = c->lin_v_heads * c->lin_v_dim, conv = 2 * key + value;
    const dtype vec = c->f32_vectors ? DT_F32 : c->type;
    if (c->next) {
        gdn_interleaved(m);
    } else {
        linear(m, "linear_attn.in_proj_qkv.weight", conv, c->hidden);
        linear(m, "linear_attn.in_proj_z.weight", value, c->hidden);
        linear(m, "linear_attn.in_proj_b.weight", c->lin_v_heads, c->hidden);
        linear(m, "linear_attn.in_proj_a.weight", c->lin_v_heads, c->hidden);
    }
    float *v = values(m, "linear_attn.conv1d.weight", (size_t)conv * 4, 0.5f, 0);
    put(m, "linear_attn.conv1d.weight", c->type, 3, (int64_t[]){ conv, 1, 4 }, v);
    free(v);
    vector(m, "linear_attn.A_log", c->lin_v_heads, 1, 1, vec);
    vector(m, "linear_attn.dt_bias", c->lin_v_heads, 0.5f, -4, c->type);
    vector(m, "linear_attn.norm.weight", c->lin_v_dim, 0.1f, 1, vec);
    linear(m, "linear_attn.out_proj.weight", c->hidden, value);
}

static void attention(maker *m) {
    const synth_spec *c = m->spec;
    const int q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    linear(m, "self_attn.q_proj.weight", q * (c->no_gate ? 1 : 2), c->hidden);
    linear(m, "self_attn.k_proj.weight", kv, c->hidden);
    linear(m, "self_attn.v_proj.weight", kv, c->hidden);
    linear(m, "self_attn.o_proj.weight", c->hidden, q);
    vector(m, "self_attn.q_norm.weight", c->head_dim, 0.1f, 0, c->type);
    vector(m, "self_attn.k_norm.weight", c->head_dim, 0.1f, 0, c->type);
}

static void experts(maker *m, bool split) {
    const synth_spec *c = m->spec;
    const size_t part = (size_t)c->moe_inter * (size_t)c->hidden, bytes = part * (size_t)dtype_bytes(c->type);
    static const char *const names[] = { "gate_proj", "up_proj", "down_proj" };
    synth_tensor gate_up = { 0 }, down = { 0 };
    if (!split) { /* copies: adding tensors moves the list, the data blocks stay */
        gate_up = *put(m, "mlp.experts.gate_up_proj", c->type, 3,
                       (int64_t[]){ c->experts, 2 * c->moe_inter, c->hidden }, NULL);
        down = *put(m, "mlp.experts.down_proj", c->type, 3, (int64_t[]){ c->experts, c->hidden, c->moe_inter }, NULL);
    }
    for (int i = 0; i < c->experts; i++)
        for (int k = 0; k < 3; k++) {
            char what[64];
            snprintf(what, sizeof what, "mlp.experts.%d.%s.weight", i, names[k]);
            const int rows = k < 2 ? c->moe_inter : c->hidden, cols = k < 2 ? c->hidden : c->moe_inter;
            if (split) {
                linear(m, what, rows, cols);
                continue;
            }
            float *v = values(m, what, part, 1 / sqrtf((float)cols), 0);
            store(k < 2 ? gate_up.data + (size_t)(2 * i + k) * bytes : down.data + (size_t)i * bytes, c->type, v, part);
            free(v);
        }
}

static void ffn(maker *m, bool split) {
    const synth_spec *c = m->spec;
    if (c->dense) {
        linear(m, "mlp.gate_proj.weight", c->inter, c->hidden);
        linear(m, "mlp.up_proj.weight", c->inter, c->hidden);
        linear(m, "mlp.down_proj.weight", c->hidden, c->inter);
        return;
    }
    linear(m, "mlp.gate.weight", c->experts, c->hidden);
    experts(m, split);
    if (!c->shared_inter) return;
    linear(m, "mlp.shared_expert_gate.weight", 1, c->hidden);
    linear(m, "mlp.shared_expert.gate_proj.weight", c->shared_inter, c->hidden);
    linear(m, "mlp.shared_expert.up_proj.weight", c->shared_inter, c->hidden);
    linear(m, "mlp.shared_expert.down_proj.weight", c->hidden, c->shared_inter);
}

static void layer(maker *m, bool full, bool split) {
    vector(m, "input_layernorm.weight", m->spec->hidden, 0.1f, 0, m->spec->type);
    vector(m, "post_attention_layernorm.weight", m->spec->hidden, 0.1f, 0, m->spec->type);
    full ? attention(m) : gdn(m);
    ffn(m, split);
}

/* ---- config ---- */

static void config_text(synth *s, const synth_spec *c) {
    buf *b = &s->config;
    const int half = c->head_dim / 8;
    const char *family = c->next ? "qwen3_next" : c->dense ? "qwen3_5" : "qwen3_5_moe";
    const char *model = c->next ? "Qwen3Next" : c->dense ? "Qwen3_5" : "Qwen3_5Moe";
    const bool flat = c->text_only || c->next;
    buf_printf(b, "{\"architectures\": [\"%s%s\"],\n", model, flat ? "ForCausalLM" : "ForConditionalGeneration");
    if (!flat)
        buf_printf(b, "\"model_type\": \"%s\", \"tie_word_embeddings\": %s,\n\"text_config\": {", family,
                   c->tied ? "true" : "false");
    buf_printf(b, "\"model_type\": \"%s%s\", \"dtype\": \"%s\",\n", family, c->next ? "" : "_text",
               c->type == DT_F32   ? "float32"
               : c->type == DT_F16 ? "float16"
                                   : "bfloat16");
    buf_printf(b, "\"vocab_size\": %d, \"hidden_size\": %d, \"num_hidden_layers\": %d,\n", c->vocab, c->hidden,
               c->layers);
    buf_printf(b, "\"full_attention_interval\": %d, \"tie_word_embeddings\": %s, \"rms_norm_eps\": 1e-06,\n",
               c->interval, c->tied ? "true" : "false");
    buf_printf(
        b, "\"num_attention_heads\": %d, \"num_key_value_heads\": %d, \"head_dim\": %d, \"attn_output_gate\": %s,\n",
        c->heads, c->kv_heads, c->head_dim, c->no_gate ? "false" : "true");
    buf_printf(b, "\"attention_bias\": false, \"hidden_act\": \"silu\", \"max_position_embeddings\": 1024,\n");
    buf_printf(b, "\"linear_num_key_heads\": %d, \"linear_num_value_heads\": %d, \"linear_key_head_dim\": %d,\n",
               c->lin_k_heads, c->lin_v_heads, c->lin_k_dim);
    buf_printf(b, "\"linear_value_head_dim\": %d, \"linear_conv_kernel_dim\": 4,\n", c->lin_v_dim);
    if (c->dense)
        buf_printf(b, "\"intermediate_size\": %d,\n", c->inter);
    else
        buf_printf(b,
                   "\"num_experts\": %d, \"num_experts_per_tok\": %d, \"moe_intermediate_size\": %d,\n"
                   "\"shared_expert_intermediate_size\": %d,\n",
                   c->experts, c->topk, c->moe_inter, c->shared_inter);
    if (c->next)
        buf_printf(b, "\"rope_theta\": 10000000.0, \"rope_scaling\": null, \"partial_rotary_factor\": 0.25,\n"
                      "\"norm_topk_prob\": true, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [],\n");
    else
        buf_printf(b,
                   "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 10000000.0, "
                   "\"partial_rotary_factor\": 0.25,\n"
                   "  \"mrope_interleaved\": true, \"mrope_section\": [%d, %d, %d]},\n",
                   half - 2 * (half / 3), half / 3, half / 3);
    buf_printf(b, "\"mtp_num_hidden_layers\": %d, \"eos_token_id\": %d%s\n", !c->no_mtp, c->vocab - 1,
               flat ? "" : "},");
    if (!flat) buf_printf(b, "\"vision_config\": {\"model_type\": \"%s_vision\", \"depth\": 1}\n", family);
    buf_puts(b, "}\n");
    buf_printf(
        &s->generation,
        "{\"eos_token_id\": [%d, %d], \"do_sample\": true, \"temperature\": 0.7, \"top_k\": 20, \"top_p\": 0.95}\n",
        c->vocab - 2, c->vocab - 1);
}

void synth_config_set(synth *s, const char *key, const char *json) {
    char quoted[100];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const ptrdiff_t at = str_find(buf_view(&s->config), str_of(quoted));
    CHECK(at >= 0, "no key %s in the config", key);
    size_t from = (size_t)at + strlen(quoted), to = from;
    for (int depth = 0; s->config.p[to]; to++) {
        const char c = s->config.p[to];
        if (depth == 0 && (c == ',' || c == '}')) break;
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    }
    buf b = { 0 };
    buf_printf(&b, "%.*s %s%s", (int)from, s->config.p, json, s->config.p + to);
    buf_free(&s->config);
    s->config = b;
}

/* ---- the whole ---- */

synth_spec synth_default(void) {
    return (synth_spec){ .vocab = 48,
                         .hidden = 32,
                         .layers = 5,
                         .interval = 2,
                         .heads = 4,
                         .kv_heads = 2,
                         .head_dim = 16,
                         .lin_k_heads = 2,
                         .lin_v_heads = 4,
                         .lin_k_dim = 8,
                         .lin_v_dim = 8,
                         .experts = 4,
                         .topk = 2,
                         .moe_inter = 16,
                         .shared_inter = 24,
                         .inter = 40,
                         .vision = true,
                         .prefix = "model.language_model.",
                         .type = DT_BF16,
                         .seed = 1 };
}

void synth_make(synth *s, const synth_spec *c) {
    *s = (synth){ 0 };
    maker m = { .s = s, .spec = c };
    snprintf(m.base, sizeof m.base, "%s", c->prefix);
    linear(&m, "embed_tokens.weight", c->vocab, c->hidden);
    for (int i = 0; i < c->layers; i++) {
        snprintf(m.role, sizeof m.role, "%d", i);
        snprintf(m.base, sizeof m.base, "%slayers.%d.", c->prefix, i);
        layer(&m, (i + 1) % c->interval == 0, c->split_experts);
    }
    m.role[0] = 0;
    snprintf(m.base, sizeof m.base, "%s", c->prefix);
    vector(&m, "norm.weight", c->hidden, 0.1f, 0, c->type);
    m.base[0] = 0;
    if (!c->tied) linear(&m, "lm_head.weight", c->vocab, c->hidden);
    if (!c->no_mtp) {
        snprintf(m.role, sizeof m.role, "mtp");
        snprintf(m.base, sizeof m.base, "mtp.");
        linear(&m, "fc.weight", c->hidden, 2 * c->hidden);
        vector(&m, "pre_fc_norm_embedding.weight", c->hidden, 0.1f, 0, c->type);
        vector(&m, "pre_fc_norm_hidden.weight", c->hidden, 0.1f, 0, c->type);
        vector(&m, "norm.weight", c->hidden, 0.1f, 0, c->type);
        snprintf(m.role, sizeof m.role, "mtp.0");
        snprintf(m.base, sizeof m.base, "mtp.layers.0.");
        layer(&m, true, c->split_mtp_experts);
    }
    if (c->vision) {
        snprintf(m.role, sizeof m.role, "vision");
        snprintf(m.base, sizeof m.base, "model.visual.");
        linear(&m, "blocks.0.attn.qkv.weight", 24, 8);
        vector(&m, "blocks.0.attn.qkv.bias", 24, 0.1f, 0, c->type);
    }
    config_text(s, c);
}

void synth_free(synth *s) {
    for (int i = 0; i < s->n; i++) free(s->t[i].name), free(s->t[i].data);
    free(s->t);
    buf_free(&s->config);
    buf_free(&s->generation);
    *s = (synth){ 0 };
}

/* ---- files ---- */

void synth_write_file(const char *dir, const char *name, const void *p, size_t n) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(p, 1, n, f) == n && fclose(f) == 0, "cannot write %s", path);
}

static void write_shard(const synth *s, const char *dir, const char *name, int begin, int end, int pad) {
    buf h = { 0 };
    size_t at = 0;
    buf_puts(&h, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = begin; i < end; i++) {
        const synth_tensor *t = &s->t[i];
        buf_printf(&h, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, dtype_name(t->type));
        for (int k = 0; k < t->rank; k++) buf_printf(&h, "%s%lld", k ? "," : "", (long long)t->shape[k]);
        buf_printf(&h, "],\"data_offsets\":[%zu,%zu]}", at, at + t->bytes);
        at += t->bytes;
    }
    buf_byte(&h, '}');
    while (h.n % 8) buf_byte(&h, ' ');
    for (int i = 0; i < pad; i++) buf_byte(&h, ' ');
    buf file = { 0 };
    const uint64_t n = h.n;
    for (int i = 0; i < 8; i++) buf_byte(&file, (char)(n >> 8 * i));
    buf_str(&file, buf_view(&h));
    for (int i = begin; i < end; i++) buf_add(&file, s->t[i].data, s->t[i].bytes);
    synth_write_file(dir, name, file.p, file.n);
    buf_free(&h);
    buf_free(&file);
}

void synth_write(const synth *s, const char *dir, int shards, int pad) {
    synth_write_file(dir, "config.json", s->config.p, s->config.n);
    if (s->generation.n) synth_write_file(dir, "generation_config.json", s->generation.p, s->generation.n);
    if (shards <= 1) {
        write_shard(s, dir, "model.safetensors", 0, s->n, pad);
        return;
    }
    buf index = { 0 };
    size_t total = 0;
    for (int i = 0; i < s->n; i++) total += s->t[i].bytes;
    buf_printf(&index, "{\"metadata\":{\"total_size\":%zu},\"weight_map\":{", total);
    for (int k = 0; k < shards; k++) {
        char name[64];
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", k + 1, shards);
        const int begin = s->n * k / shards, end = s->n * (k + 1) / shards;
        write_shard(s, dir, name, begin, end, pad);
        for (int i = begin; i < end; i++) buf_printf(&index, "%s\"%s\":\"%s\"", i ? "," : "", s->t[i].name, name);
    }
    buf_puts(&index, "}}");
    synth_write_file(dir, "model.safetensors.index.json", index.p, index.n);
    buf_free(&index);
}

char *synth_temp_dir(void) {
    const char *base = getenv("TMPDIR");
    buf b = { 0 };
    buf_printf(&b, "%s/nibble-test-XXXXXX", base && *base ? base : "/tmp");
    CHECK(mkdtemp(b.p), "cannot make %s", b.p);
    return b.p;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st, (void)kind, (void)at;
    return remove(path);
}

void synth_remove_dir(char *dir) {
    CHECK(strstr(dir, "nibble-test-"), "refusing to remove %s", dir);
    nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    free(dir);
}
