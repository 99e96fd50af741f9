#include "model/mock.h"

#include <math.h>
#include <stdio.h>
#include <sys/mman.h>

typedef struct preset {
    int layers, hidden, vocab, heads, kv_heads, head_dim, lin_k_heads, lin_v_heads, lin_dim, experts, topk, inter;
} preset;

const char *const mock_presets[] = { "tiny", "mid", "wide4", "full", NULL };

static const preset presets[] = {
    { 4, 128, 2048, 2, 1, 64, 2, 4, 32, 16, 4, 64 },
    { 8, 768, 8192, 8, 2, 256, 8, 16, 128, 32, 4, 256 },
    { 4, 2048, 248320, 16, 2, 256, 16, 32, 128, 256, 8, 512 },
    { 40, 2048, 248320, 16, 2, 256, 16, 32, 128, 256, 8, 512 },
};

/* ---- values: a counter hash, so that threads and order do not matter ---- */

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t word_at(uint64_t seed, uint64_t i) { return mix(seed + i * 0x9e3779b97f4a7c15u); }

typedef enum fill_kind { FILL_CODES, FILL_SCALES, FILL_BF16 } fill_kind;

typedef struct fill_job {
    uint64_t *to;
    int64_t words;
    uint64_t seed;
    fill_kind kind;
    int exponent; /* BF16: of the largest values */
} fill_job;

/* Four BF16: any sign and mantissa, exponents of four binades: rms 0.88 of 2^exponent. */
static uint64_t four_bf16(uint64_t r, int exponent) {
    const uint64_t ones = 0x0001000100010001u, e = (uint64_t)(exponent + 127 - 3) << 7;
    return (r & 0x807f807f807f807fu) | (ones * e + (r & 0x0180018001800180u));
}

static void fill_part(void *ctx, int thread, int threads) {
    const fill_job *j = ctx;
    int64_t i, end;
    pool_share(j->words, 512, thread, threads, &i, &end);
    for (; i < end; i++) {
        const uint64_t r = word_at(j->seed, (uint64_t)i);
        j->to[i] = j->kind == FILL_CODES    ? r
                   : j->kind == FILL_SCALES ? (r & 0x0707070707070707u) | 0x7070707070707070u /* 128 .. 240 */
                                            : four_bf16(r, j->exponent);
    }
}

static void fill(pool *p, void *to, size_t bytes, uint64_t seed, fill_kind kind, int exponent) {
    fill_job j = { .to = to, .words = (int64_t)(bytes / 8), .seed = mix(seed), .kind = kind, .exponent = exponent };
    pool_run(p, fill_part, &j);
}

/* ---- walking the model: once to count, once to build ---- */

typedef struct builder {
    mock *s;
    pool *p;        /* NULL: count only */
    size_t code_at; /* of the layer's next matrix */
    size_t plain_at;
    size_t code_bytes; /* most of any layer */
    size_t nvfp4_bytes;
    bool no_memory;
} builder;

static size_t source_codes(const mock *s) { return s->source_bytes / 9 * 8; }

wmat mock_matrix(const mock *s, const char *name, int rows, int cols) {
    CHECK((size_t)rows * (size_t)cols / 2 <= source_codes(s), "%d x %d does not fit the source", rows, cols);
    /* rms of uniform E2M1 codes 2.93, mean scale 184: together 1 / sqrt(cols). */
    return (wmat){ .name = name,
                   .data = s->source,
                   .type = DT_U8,
                   .rows = rows,
                   .cols = cols,
                   .q = { .format = WF_NVFP4,
                          .scales = s->source + source_codes(s),
                          .scale_2 = 1.0f / (2.93f * 184.0f * sqrtf((float)cols)),
                          .input_scale = 6.0f / (6.0f * 448.0f) } };
}

static void nvfp4(builder *b, wmat *m, const char *name, int rows, int cols) {
    const size_t at = b->code_at, bytes = (size_t)rows * (size_t)cols / 2;
    b->code_at += (bytes + 4095) / 4096 * 4096;
    if (b->code_at > b->code_bytes) b->code_bytes = b->code_at;
    b->nvfp4_bytes += bytes / 8 * 9;
    if (!b->p) return;
    *m = mock_matrix(b->s, name, rows, cols);
    m->data = b->s->source + at;
    m->q.scales += at / 8;
}

/* Inputs of rms 1 give outputs of about that (a power of two decides). */
static void plain(builder *b, wmat *m, const char *name, int rows, int cols) {
    const size_t at = b->plain_at, bytes = ((size_t)rows * (size_t)cols * 2 + 63) / 64 * 64;
    b->plain_at += bytes;
    if (!b->p) return;
    *m = (wmat){ .name = name, .data = b->s->plain + at, .type = DT_BF16, .rows = rows, .cols = cols };
    fill(b->p, b->s->plain + at, bytes, at + 1, FILL_BF16, (int)lroundf(-0.5f * log2f((float)cols)));
}

/* [n] values lo .. hi. */
static void vector(builder *b, float **out, int64_t n, float lo, float hi) {
    if (!b->p) return;
    float *v = arena_take(&b->s->w.mem, (size_t)n, sizeof *v);
    b->no_memory = b->no_memory || !v;
    for (int64_t i = 0; v && i < n; i++)
        v[i] = lo + (hi - lo) * (float)(word_at(mix((uint64_t)n), (uint64_t)i) >> 40) * 0x1p-24f;
    *out = v;
}

static void attention(builder *b, wlayer *l) {
    const model_config *c = &b->s->config;
    const int q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    nvfp4(b, &l->q, "self_attn.q_proj", q * (c->attn_gate ? 2 : 1), c->hidden);
    nvfp4(b, &l->k, "self_attn.k_proj", kv, c->hidden);
    nvfp4(b, &l->v, "self_attn.v_proj", kv, c->hidden);
    nvfp4(b, &l->o, "self_attn.o_proj", c->hidden, q);
    vector(b, &l->q_norm, c->head_dim, 1, 1);
    vector(b, &l->k_norm, c->head_dim, 1, 1);
    l->k_scale = 16.0f / 448.0f; /* a normed vector of 256 is not longer than 16 */
    l->v_scale = 8.0f / 448.0f;
}

static void gdn(builder *b, wlayer *l) {
    const model_config *c = &b->s->config;
    nvfp4(b, &l->in_qkv, "linear_attn.in_proj_qkv", config_conv_dim(c), c->hidden);
    nvfp4(b, &l->in_z, "linear_attn.in_proj_z", config_value_dim(c), c->hidden);
    plain(b, &l->in_b, "linear_attn.in_proj_b", c->lin_v_heads, c->hidden);
    plain(b, &l->in_a, "linear_attn.in_proj_a", c->lin_v_heads, c->hidden);
    vector(b, &l->conv, (int64_t)config_conv_dim(c) * c->conv_kernel, -0.5f, 0.5f);
    vector(b, &l->neg_a, c->lin_v_heads, -8, -0.25f);
    vector(b, &l->dt_bias, c->lin_v_heads, -6, -1);
    vector(b, &l->gdn_norm, c->lin_v_dim, 1, 1);
    nvfp4(b, &l->gdn_out, "linear_attn.out_proj", c->hidden, config_value_dim(c));
}

static void experts(builder *b, wexperts *x) {
    const model_config *c = &b->s->config;
    const size_t n = (size_t)c->experts;
    wexperts made = {
        .name = "mlp.experts", .count = c->experts, .inter = c->moe_inter, .hidden = c->hidden, .type = DT_U8
    };
    if (b->p) {
        arena *mem = &b->s->w.mem;
        made.gate = arena_take(mem, n, sizeof *made.gate);
        made.up = arena_take(mem, n, sizeof *made.up);
        made.down = arena_take(mem, n, sizeof *made.down);
        made.gate_q = arena_take(mem, n, sizeof *made.gate_q);
        made.up_q = arena_take(mem, n, sizeof *made.up_q);
        made.down_q = arena_take(mem, n, sizeof *made.down_q);
        b->no_memory =
            b->no_memory || !made.gate || !made.up || !made.down || !made.gate_q || !made.up_q || !made.down_q;
    }
    for (int i = 0; i < c->experts && !b->no_memory; i++) {
        wmat gate, up, down;
        nvfp4(b, &gate, "mlp.experts.gate_proj", c->moe_inter, c->hidden);
        nvfp4(b, &up, "mlp.experts.up_proj", c->moe_inter, c->hidden);
        nvfp4(b, &down, "mlp.experts.down_proj", c->hidden, c->moe_inter);
        if (!b->p) continue;
        made.gate[i] = gate.data, made.gate_q[i] = gate.q;
        made.up[i] = up.data, made.up_q[i] = up.q;
        made.down[i] = down.data, made.down_q[i] = down.q;
    }
    *x = made;
}

static void layer(builder *b, wlayer *l, layer_kind kind) {
    const model_config *c = &b->s->config;
    b->code_at = 0;
    *l = (wlayer){ .kind = kind };
    vector(b, &l->norm1, c->hidden, 1, 1);
    vector(b, &l->norm2, c->hidden, 1, 1);
    if (kind == LAYER_ATTN)
        attention(b, l);
    else
        gdn(b, l);
    plain(b, &l->ffn.router, "mlp.gate", c->experts, c->hidden);
    experts(b, &l->ffn.experts);
    plain(b, &l->ffn.shared_gate_in, "mlp.shared_expert_gate", 1, c->hidden);
    nvfp4(b, &l->ffn.gate, "mlp.shared_expert.gate_proj", c->shared_inter, c->hidden);
    nvfp4(b, &l->ffn.up, "mlp.shared_expert.up_proj", c->shared_inter, c->hidden);
    nvfp4(b, &l->ffn.down, "mlp.shared_expert.down_proj", c->hidden, c->shared_inter);
}

static void walk(builder *b) {
    const model_config *c = &b->s->config;
    weights *w = &b->s->w;
    wlayer counted;
    plain(b, &w->head, "lm_head", c->vocab, c->hidden);
    w->embed = w->head;
    vector(b, &w->norm, c->hidden, 1, 1);
    if (b->p) w->layers = arena_zero(&w->mem, (size_t)c->layers, sizeof *w->layers);
    b->no_memory = b->no_memory || (b->p && !w->layers);
    for (int i = 0; i < c->layers && !b->no_memory; i++) layer(b, b->p ? &w->layers[i] : &counted, c->layer[i]);
    w->mtp.present = true;
    vector(b, &w->mtp.norm_embed, c->hidden, 1, 1);
    vector(b, &w->mtp.norm_hidden, c->hidden, 1, 1);
    vector(b, &w->mtp.norm, c->hidden, 1, 1);
    plain(b, &w->mtp.fc, "mtp.fc", c->hidden, 2 * c->hidden);
    if (!b->no_memory) layer(b, &w->mtp.layer, LAYER_ATTN);
    w->quantized = w->kv_fp8 = true;
}

/* ---- the whole ---- */

static void config_text(buf *t, const preset *p, int layers) {
    buf_printf(t,
               "{\"model_type\":\"qwen3_5_moe_text\",\"architectures\":[\"Qwen3_5MoeForCausalLM\"],\"dtype\":"
               "\"bfloat16\",\"vocab_size\":%d,\"hidden_size\":%d,\"num_hidden_layers\":%d,\"num_attention_heads\":%d,"
               "\"num_key_value_heads\":%d,\"head_dim\":%d,\"hidden_act\":\"silu\",\"max_position_embeddings\":262144,"
               "\"rms_norm_eps\":1e-6,\"tie_word_embeddings\":false,\"attn_output_gate\":true,",
               p->vocab, p->hidden, layers, p->heads, p->kv_heads, p->head_dim);
    buf_printf(t,
               "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000000.0,\"partial_rotary_factor\":"
               "0.25},\"linear_conv_kernel_dim\":4,\"linear_key_head_dim\":%d,\"linear_value_head_dim\":%d,"
               "\"linear_num_key_heads\":%d,\"linear_num_value_heads\":%d,\"moe_intermediate_size\":%d,"
               "\"shared_expert_intermediate_size\":%d,\"num_experts\":%d,\"num_experts_per_tok\":%d,"
               "\"mtp_num_hidden_layers\":1,\"eos_token_id\":0,\"layer_types\":[",
               p->lin_dim, p->lin_dim, p->lin_k_heads, p->lin_v_heads, p->inter, p->inter, p->experts, p->topk);
    for (int i = 0; i < layers; i++)
        buf_printf(t, "%s\"%s\"", i ? "," : "", i % 4 == 3 ? "full_attention" : "linear_attention");
    buf_puts(t, "]}");
}

bool mock_plan(mock *out, int which, int layers, err *e) {
    const preset *p = &presets[which];
    *out = (mock){ 0 };
    if (layers == 0) layers = p->layers;
    if (layers < 4 || layers % 4 || layers > CONFIG_MAX_LAYERS)
        return fail(e, ERR_USAGE, "E-BENCH-LAYERS", "--layers %d: not a multiple of 4 within 4 and %d", layers,
                    CONFIG_MAX_LAYERS);
    buf text = { 0 };
    arena mem = { 0 };
    const json *tree;
    config_text(&text, p, layers);
    const bool ok = json_parse(&tree, &mem, buf_view(&text), "synthetic", NULL, e) &&
                    config_read(&out->config, tree, NULL, "synthetic", e);
    buf_free(&text);
    arena_free(&mem);
    if (!ok) return false;
    builder b = { .s = out };
    walk(&b);
    out->w = (weights){ 0 };
    out->plain_bytes = b.plain_at;
    out->source_bytes = (b.code_bytes + 4095) / 4096 * 4096 / 8 * 9;
    out->nvfp4_bytes = b.nvfp4_bytes;
    return true;
}

static void *map(size_t bytes, int flags) {
    /* cppcheck-suppress invalidFunctionArg ; what MAP_ANONYMOUS asks for */
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | flags, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE); /* advice */
    return p;
}

bool mock_build(mock *s, pool *p, err *e) {
    /* Shared: backends drop the pages of a matrix they have repacked, and the next layer reads the same ones again. */
    s->source = map(s->source_bytes, MAP_SHARED);
    s->plain = map(s->plain_bytes, MAP_PRIVATE);
    builder b = { .s = s, .p = p, .no_memory = !s->source || !s->plain };
    if (!b.no_memory) {
        const size_t codes = source_codes(s);
        fill(p, s->source, codes, 1, FILL_CODES, 0);
        fill(p, s->source + codes, codes / 8, 2, FILL_SCALES, 0);
        walk(&b);
    }
    if (!b.no_memory) return true;
    mock_free(s);
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "synthetic weights: no memory for %zu bytes",
                s->source_bytes + s->plain_bytes);
}

void mock_drop_source(mock *s) { madvise(s->source, s->source_bytes, MADV_REMOVE); }

void mock_free(mock *s) {
    if (s->source) munmap(s->source, s->source_bytes);
    if (s->plain) munmap(s->plain, s->plain_bytes);
    s->source = s->plain = NULL;
    weights_free(&s->w);
}
