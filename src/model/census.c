#include "model/census.h"

#include "model/names.h"
#include "num/bf16.h"

/* Does `name` with `cut` bytes taken from its end and `tail` added name an E4M3 tensor? */
static bool e4m3_companion(const ckpt *c, str name, size_t cut, const char *tail) {
    char other[512];
    const size_t n = strlen(tail);
    if (name.n < cut || name.n - cut + n >= sizeof other) return false;
    memcpy(other, name.p, name.n - cut);
    memcpy(other + name.n - cut, tail, n);
    const st_tensor *t = ckpt_find(c, (str){ other, name.n - cut + n });
    return t && t->type == DT_F8_E4M3;
}

/* U8 codes are NVFP4 when block scales stand beside them, in any of the three spellings. */
static bool is_nvfp4(const ckpt *c, const st_tensor *t) {
    if (t->type != DT_U8 || t->rank < 2) return false;
    const str packed = STR("_packed");
    return e4m3_companion(c, t->name, 0, "_scale") || e4m3_companion(c, t->name, 0, "_weight_scale") ||
           (str_ends(t->name, packed) && e4m3_companion(c, t->name, packed.n, "_scale"));
}

static void count(census_class *k, const ckpt *c, const st_tensor *t) {
    k->tensors++;
    k->bytes += t->bytes;
    if (name_is_scale(t->name)) return;
    const bool packed = is_nvfp4(c, t);
    k->params += (int64_t)t->elems * (packed ? 2 : 1);
    k->format_bytes[packed ? (int)CENSUS_NVFP4 : (int)t->type] += t->bytes;
}

static float scalar(const st_tensor *t) {
    float f = 0;
    uint16_t h;
    if (t->elems < 1) return 0;
    if (t->type == DT_F32) return memcpy(&f, t->data, 4), f;
    if (t->type != DT_BF16 && t->type != DT_F16) return 0;
    memcpy(&h, t->data, 2);
    return t->type == DT_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

static void note_kv_scale(census *out, const st_tensor *t) {
    const int layer = name_layer(t->name);
    const bool mtp = name_is_mtp(t->name), k = str_ends(t->name, STR(".k_scale"));
    if (!mtp && (layer < 0 || layer >= CONFIG_MAX_LAYERS)) return;
    kv_scale *s = mtp ? &out->kv_mtp : &out->kv[layer];
    *(k ? &s->has_k : &s->has_v) = true;
    *(k ? &s->k : &s->v) = scalar(t);
    out->kv_scales++;
}

/* What the config files declare; hf_quant_config.json first, as its producer means it. */
static void note_declared(census *out, const ckpt *c) {
    const json *hf = json_get(c->hf_quant, "quantization"), *own = json_get(c->config, "quantization_config");
    const json *kv = json_get(hf, "kv_cache_quant_algo"), *algo = json_get(hf, "quant_algo");
    if (!json_is(kv, JSON_STRING)) kv = json_get(own, "kv_cache_quant_algo");
    if (!json_is(algo, JSON_STRING)) algo = json_get(own, "quant_algo");
    if (json_is(kv, JSON_STRING)) out->kv_declared = kv->u.s;
    if (json_is(algo, JSON_STRING)) out->quant_algo = algo->u.s;
    const json *scheme = json_get(own, "kv_cache_scheme"), *bits = json_get(scheme, "num_bits");
    if (!out->kv_declared && json_is(scheme, JSON_OBJECT))
        out->kv_declared = json_is(bits, JSON_INT) && bits->u.i == 8 ? "FP8" : "unknown";
}

static uint64_t read_per_token(const census *a, const model_config *cfg) {
    uint64_t n = 0;
    for (int k = 0; k < WC_COUNT; k++)
        if (k != WC_EMBED && k != WC_EXPERTS && k != WC_MTP && k != WC_VISION) n += a->of[k].bytes;
    if (cfg->experts) n += (uint64_t)((double)a->of[WC_EXPERTS].bytes * cfg->topk / cfg->experts);
    if (!a->of[WC_HEAD].bytes) n += a->of[WC_EMBED].bytes;   /* tied */
    return n + a->of[WC_EMBED].bytes / (uint64_t)cfg->vocab; /* one row */
}

void census_take(census *out, const ckpt *c, const model_config *config) {
    *out = (census){ 0 };
    for (int s = 0; s < c->shard_count; s++)
        for (int i = 0; i < c->shards[s].count; i++) {
            const st_tensor *t = &c->shards[s].tensors[i];
            count(&out->of[weight_class_of(t->name)], c, t);
            count(&out->total, c, t);
            if (name_is_kv_scale(t->name)) note_kv_scale(out, t);
            if (!name_is_mtp(t->name) || !name_is_scale(t->name)) continue;
            if (str_ends(t->name, STR("input_scale")) || str_ends(t->name, STR("input_global_scale")))
                out->mtp_input_scales++;
            else if (!name_is_kv_scale(t->name))
                out->mtp_weight_scales++;
        }
    note_declared(out, c);
    out->bytes_per_token = read_per_token(out, config);
}

static const char *format_name(int f) {
    return f == CENSUS_NVFP4 ? "NVFP4" : f == DT_F8_E4M3 ? "FP8" : dtype_name((dtype)f);
}

void census_format_text(buf *out, const census_class *k) {
    bool done[CENSUS_FORMATS] = { false };
    const size_t start = out->n;
    for (;;) {
        int best = -1;
        for (int f = 0; f < CENSUS_FORMATS; f++)
            if (!done[f] && k->format_bytes[f] && (best < 0 || k->format_bytes[f] > k->format_bytes[best])) best = f;
        if (best < 0) break;
        done[best] = true;
        buf_printf(out, "%s%s", out->n > start ? "+" : "", format_name(best));
    }
    if (out->n == start) buf_puts(out, "-");
}
