#include "check/target.h"

#include <stdio.h>
#include <stdlib.h>

#include "ckpt/index.h"
#include "model/names.h"

const char *const outcome_names[] = { "works", "works, degraded", "works without drafts", "wrong output",
                                      "does not load" };

/* Properties of a checkpoint that some engine cares about. */
enum {
    HAS_QUANT = 1 << 0,        /* anything quantized */
    HAS_ATTN4 = 1 << 1,        /* attention or delta net in NVFP4 */
    HAS_GDN4 = 1 << 2,         /* in_proj_qkv in NVFP4 */
    HAS_MTP4 = 1 << 3,         /* a quantized draft head */
    HAS_MTP_OPEN = 1 << 4,     /* a BF16 draft layer that no exclude pattern covers */
    HAS_FC_OPEN = 1 << 5,      /* likewise mtp.fc */
    HAS_KV = 1 << 6,           /* K and V scales */
    HAS_MIXED = 1 << 7,        /* MIXED_PRECISION */
    HAS_MIXED_A16 = 1 << 8,    /* with weight-only NVFP4 in it */
    HAS_A16 = 1 << 9,          /* W4A16_NVFP4 all over */
    HAS_HEAD4 = 1 << 10,       /* a quantized lm_head */
    HAS_NO_DTYPE = 1 << 11,    /* config.json pins none */
    HAS_VISION_OPEN = 1 << 12, /* a vision tower that is not excluded as visual* */
    HAS_UP_SCALE = 1 << 13,    /* gate and up of an expert differ in weight_scale_2 */
    HAS_FP8 = 1 << 14          /* FP8 weights */
};

typedef struct behaviour {
    const char *engine;
    int needs; /* any of these */
    outcome out;
    const char *since; /* first version with it; NULL: all */
    const char *until; /* first version without it; NULL: the newest known has it */
    const char *what, *remedy, *source;
} behaviour;

/* Versions behind "until" are those of the sources; where a source names no release, the first one after it was merged. */
static const behaviour table[] = {
    { "sglang", HAS_ATTN4, OUT_FAILS, NULL, "0.5.17",
      "attention and delta net of Qwen3.5 are built in BF16 for every modelopt_fp4 checkpoint: shapes do not match",
      "upgrade to 0.5.17, or quantize --recipe nvfp4-experts (--portable)",
      "https://github.com/sgl-project/sglang/pull/31220" },
    { "sglang", HAS_GDN4, OUT_WRONG, NULL, "0.5.16",
      "one scale of the fused in_proj_qkv fills one of three slots, and the maximum is taken over uninitialised ones",
      "upgrade to 0.5.16, or quantize --recipe nvfp4-experts (--portable)",
      "https://github.com/sgl-project/sglang/pull/29151" },
    { "sglang", HAS_KV, OUT_DEGRADES, NULL, "0.5.17",
      "K and V scales are not loaded: an FP8 cache runs at scale 1, silently",
      "upgrade to 0.5.17, serve with --kv-cache-dtype auto, or quantize --kv none",
      "https://github.com/sgl-project/sglang/pull/31220" },
    { "sglang", HAS_MTP4, OUT_NO_DRAFTS, NULL, NULL,
      "the draft head is built in BF16 for every serialized modelopt_fp4 and modelopt_mixed checkpoint: NEXTN does not "
      "load",
      "nibble requant-mtp DIR --source SRC --mtp bf16, or quantize --mtp bf16 (--portable)",
      "https://github.com/sgl-project/sglang/pull/36158" },
    { "sglang", HAS_MIXED, OUT_FAILS, NULL, "0.5.15",
      "MIXED_PRECISION goes to another format's loader, and W4A16_NVFP4 is not recognised (KeyError w2_weight_scale_2)",
      "upgrade to 0.5.15, or quantize --recipe nvfp4-experts (--portable)",
      "https://github.com/sgl-project/sglang/pull/27906" },
    { "sglang", HAS_A16, OUT_FAILS, NULL, NULL, "weight-only NVFP4 as the whole model's format is not supported",
      "quantize --recipe nvfp4-experts (--portable)", "https://github.com/NVIDIA/Model-Optimizer/pull/1313" },
    { "sglang", HAS_UP_SCALE, OUT_WRONG, NULL, NULL,
      "the MoE kernel takes gate's weight_scale_2 for up too (the trtllm back end reads both since 0.5.14)",
      "quantize again", "https://github.com/sgl-project/sglang/pull/27588" },
    { "sglang", HAS_NO_DTYPE, OUT_FAILS, NULL, NULL,
      "without a dtype the model is built in float16: BFloat16 != Half at graph capture",
      "check --fix (pins dtype), or serve with --dtype bfloat16", "https://github.com/vroomfondel/dgxarley" },
    { "sglang", HAS_VISION_OPEN, OUT_FAILS, NULL, NULL,
      "excludes are asked under the runtime's names: a tower that is not excluded as visual* is built quantized",
      "check --fix (adds visual*)", "https://github.com/vroomfondel/dgxarley" },

    { "vllm", HAS_KV, OUT_DEGRADES, NULL, NULL,
      "the Qwen3.5 family never loads K and V scales: an FP8 cache runs at scale 1, with a warning in the log",
      "serve with --kv-cache-dtype auto, or quantize --kv none (--portable)",
      "https://github.com/vllm-project/vllm/issues/54623" },
    { "vllm", HAS_FC_OPEN, OUT_NO_DRAFTS, NULL, "0.19",
      "mtp.fc is built as NVFP4 when no pattern excludes it: an assertion while the draft head is loaded",
      "check --fix (adds mtp.fc*), or upgrade to 0.19", "https://github.com/vllm-project/vllm/pull/38832" },
    { "vllm", HAS_MTP_OPEN, OUT_NO_DRAFTS, NULL, NULL, "a BF16 draft layer that no pattern excludes is built as NVFP4",
      "check --fix (adds mtp*)", "https://github.com/vllm-project/vllm/pull/38650" },
    { "vllm", HAS_MIXED, OUT_FAILS, NULL, "0.18", "quant_algo MIXED_PRECISION is not on the list of known ones",
      "upgrade to 0.18, or quantize --recipe nvfp4-experts (--portable)",
      "https://github.com/vllm-project/vllm/issues/37854" },
    { "vllm", HAS_MIXED_A16 | HAS_A16, OUT_FAILS, NULL, "0.22", "no fused MoE for weight-only NVFP4",
      "upgrade to 0.22, or quantize --recipe nvfp4-experts (--portable)",
      "https://github.com/vllm-project/vllm/pull/42566" },
    { "vllm", HAS_HEAD4, OUT_FAILS, NULL, "0.28",
      "a quantized lm_head: no module or parameter named lm_head.weight_scale",
      "upgrade to 0.28, or quantize --exclude lm_head", "https://github.com/vllm-project/vllm/issues/45102" },
    { "vllm", HAS_UP_SCALE, OUT_WRONG, NULL, NULL, "gate's weight_scale_2 is used for up too, after a warning",
      "quantize again", "https://github.com/vllm-project/vllm/issues/54974" },

    { "llama.cpp", HAS_QUANT, OUT_FAILS, NULL, "b8400",
      "convert_hf_to_gguf.py cannot map Qwen3.5's NVFP4 tensors, and delta net rows are not reordered",
      "convert with a newer version", "https://github.com/ggml-org/llama.cpp/pull/20505" },
    { "llama.cpp", HAS_FP8, OUT_DEGRADES, NULL, NULL,
      "FP8 weights are converted to BF16 or F32: a larger file, the same values",
      "quantize --recipe nvfp4-experts (--portable)", "https://github.com/ggml-org/llama.cpp/issues/22346" },

    { "transformers", HAS_QUANT, OUT_FAILS, NULL, NULL,
      "quant_method modelopt is unknown: packed weights do not fit the BF16 modules", "use the BF16 source model",
      "https://github.com/huggingface/transformers/issues/46772" },
};

static const char *const engines[] = { "sglang", "vllm", "llama.cpp", "transformers" };

const char *target_name(int i) { return i >= 0 && i < (int)ARRAY_LEN(engines) ? engines[i] : NULL; }

/* ---- versions ---- */

enum { VERSION_PARTS = 4 };

/* "0.5.15.post1" -> 0 5 15 0, "b8400" -> 8400; false: no number at all. */
static bool parse_version(int out[VERSION_PARTS], const char *s) {
    int n = 0;
    memset(out, 0, VERSION_PARTS * sizeof *out);
    if (*s == 'v' || *s == 'b') s++;
    while (n < VERSION_PARTS && *s >= '0' && *s <= '9') {
        char *end;
        const long part = strtol(s, &end, 10);
        out[n++] = part > 1000000 ? 1000000 : (int)part;
        s = end;
        if (*s == '.') s++;
    }
    return n > 0;
}

/* Is version a before b? "" and "main" are the newest. */
static bool before(const char *a, const char *b) {
    int x[VERSION_PARTS], y[VERSION_PARTS];
    if (!*a || !parse_version(x, a) || !parse_version(y, b)) return false;
    for (int i = 0; i < VERSION_PARTS; i++)
        if (x[i] != y[i]) return x[i] < y[i];
    return false;
}

bool target_parse(target *out, const char *text, err *e) {
    const char *at = strchr(text, '@');
    const size_t n = at ? (size_t)(at - text) : strlen(text);
    int parts[VERSION_PARTS];
    *out = (target){ 0 };
    for (size_t i = 0; i < ARRAY_LEN(engines); i++)
        if (strlen(engines[i]) == n && strncmp(engines[i], text, n) == 0) out->name = engines[i];
    if (!out->name)
        return fail(e, ERR_USAGE, "E-USAGE",
                    "--target: %.60s: no such engine (sglang, vllm, llama.cpp, transformers, all, list)", text);
    if (!at || strcmp(at + 1, "main") == 0) return true;
    if (!parse_version(parts, at + 1) || strlen(at + 1) >= sizeof out->version)
        return fail(e, ERR_USAGE, "E-USAGE", "--target: %.60s: the version is no number (such as %s@0.5.17)", text,
                    out->name);
    snprintf(out->version, sizeof out->version, "%s", at + 1);
    return true;
}

/* ---- the checkpoint's properties ---- */

static bool is_algo(const check_view *v, const char *algo) {
    const json *a = json_get(v->hf ? v->hf : v->quant, "quant_algo");
    return json_is(a, JSON_STRING) && str_is(json_str(a), algo);
}

static int linear_facts(const check_view *v, const linear *l, bool mixed) {
    const bool fp4 = l->format == LIN_NVFP4, quantized = fp4 || l->format == LIN_FP8;
    int f = quantized ? HAS_QUANT : 0;
    if (l->format == LIN_FP8) f |= HAS_FP8;
    if (l->is_mtp) {
        if (quantized) f |= HAS_MTP4;
        if (l->format == LIN_PLAIN && !mixed && !view_excludes(v, l->name))
            f |= l->family == QM_MTP_FC ? HAS_FC_OPEN : HAS_MTP_OPEN;
    } else if (fp4) {
        if (l->family == QM_ATTN || l->family == QM_GDN) f |= HAS_ATTN4;
        if (l->family == QM_GDN) f |= HAS_GDN4;
        if (l->family == QM_HEAD) f |= HAS_HEAD4;
        if (mixed && !l->has_input) f |= HAS_MIXED_A16;
    }
    return f;
}

static int facts_of(const check_view *v) {
    const bool mixed = is_algo(v, "MIXED_PRECISION");
    int f = (mixed ? HAS_MIXED : 0) | (is_algo(v, "W4A16_NVFP4") ? HAS_A16 : 0);
    for (int i = 0; i < v->n_linears; i++) {
        const linear *a = &v->linears[i], *b = a + 1;
        f |= linear_facts(v, a, mixed);
        if (i + 1 < v->n_linears && a->family == QM_EXPERTS && a->fusion >= 0 && b->fusion == a->fusion &&
            a->has_scale_2 && b->has_scale_2 && !same_scale(a->scale_2, b->scale_2))
            f |= HAS_UP_SCALE;
    }
    for (int i = 0; i <= CONFIG_MAX_LAYERS; i++)
        if (v->kv[i].has_k || v->kv[i].has_v) f |= HAS_KV;
    if (!(f & HAS_QUANT)) return f & HAS_KV;
    if (findings_has(v->found, "C-CONFIG-DTYPE")) f |= HAS_NO_DTYPE;
    if (v->vision_tensors && !mixed && !view_excludes(v, STR("visual.blocks.0.attn.qkv"))) f |= HAS_VISION_OPEN;
    return f;
}

/* ---- predictions ---- */

static const char *rule_of(outcome o) {
    return o == OUT_FAILS       ? "C-TARGET-FAILS"
           : o == OUT_WRONG     ? "C-TARGET-WRONG"
           : o == OUT_NO_DRAFTS ? "C-TARGET-DRAFTS"
                                : "C-TARGET-DEGRADED";
}

void target_predict(target *t, check_view *v) {
    const int facts = facts_of(v);
    char object[64];
    snprintf(object, sizeof object, "%s@%s", t->name, *t->version ? t->version : "main");
    t->worst = OUT_WORKS;
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        const behaviour *b = &table[i];
        if (strcmp(b->engine, t->name) != 0 || !(b->needs & facts)) continue;
        if ((b->until && !before(t->version, b->until)) || (b->since && before(t->version, b->since))) continue;
        if (b->out > t->worst) t->worst = b->out;
        char cause[80];
        snprintf(cause, sizeof cause, "%s %zu", object, i);
        finding_add(v->found, rule_of(b->out), cause, str_of(object), "%s (%s)", b->what, b->source);
        finding_set_remedy(v->found, b->remedy);
    }
}

void target_list(buf *out) {
    for (size_t k = 0; k < ARRAY_LEN(engines); k++) {
        buf_printf(out, "%s\n", engines[k]);
        for (size_t i = 0; i < ARRAY_LEN(table); i++) {
            const behaviour *b = &table[i];
            if (strcmp(b->engine, engines[k]) != 0) continue;
            buf_printf(out, "  %-20s  %s%-8s  %s\n%34s%s\n", outcome_names[b->out], b->until ? "before " : "all    ",
                       b->until ? b->until : "", b->what, "", b->source);
        }
    }
}
