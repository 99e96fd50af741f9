#include "model/weights_quant.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"

static st_tensor *companion(ckpt *c, str stem, const char *tail) {
    char name[512];
    const int n = snprintf(name, sizeof name, STR_FMT "%s", STR_ARG(stem), tail);
    return n > 0 && (size_t)n < sizeof name ? ckpt_find(c, (str){ name, (size_t)n }) : NULL;
}

static bool bad(const ckpt *c, const st_tensor *t, const char *what, err *e) {
    return fail(e, ERR_INPUT, "E-LOAD-SCALE", "%s: %s: %s (the export is broken: quantize again)",
                ckpt_shard_path(c, t), t->name.p, what);
}

/* A finite positive float32 scalar; shape [] or [1]. */
static bool scalar(float *out, const ckpt *c, st_tensor *t, err *e) {
    if (t->type != DT_F32 || t->elems != 1) return bad(c, t, "expected one F32 value", e);
    memcpy(out, t->data, sizeof *out);
    t->uses++;
    return isfinite(*out) && *out > 0 ? true
                                      : bad(c, t,
                                            isnan(*out) ? "NaN"
                                            : *out == 0 ? "zero"
                                                        : "negative or infinite",
                                            e);
}

static bool required(float *out, ckpt *c, const st_tensor *weight, str stem, const char *tail, err *e) {
    st_tensor *t = companion(c, stem, tail);
    if (!t)
        return fail(e, ERR_INPUT, "E-LOAD-SCALE", "%s: %s: quantized, but " STR_FMT "%s is missing",
                    ckpt_shard_path(c, weight), weight->name.p, STR_ARG(stem), tail);
    return scalar(out, c, t, e);
}

/* E4M3 block scales must be positive numbers: zero, a sign or NaN would poison every product of the block. */
static bool wrong_scale(uint8_t s) { return s == 0 || s >= 0x7f; }

/* Is any of n scales wrong? A ninth of all weights' bytes are scales, and they are looked at by one thread: eight at a time. */
static bool any_wrong(const uint8_t *s, uint64_t n) {
    const uint64_t low = 0x7f7f7f7f7f7f7f7f, one = 0x0101010101010101;
    uint64_t bad = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t x;
        memcpy(&x, s + i, sizeof x);
        const uint64_t m = x & low;              /* no sum below carries into the next byte */
        bad |= x | (m + one) | ~(m + 127 * one); /* top bits: sign, 7f, zero (or 80) */
    }
    bad &= ~low;
    for (; i < n; i++) bad |= wrong_scale(s[i]);
    return bad != 0;
}

static bool check_block_scales(const ckpt *c, const st_tensor *t, err *e) {
    if (!any_wrong(t->data, t->elems)) return true;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < t->elems; i++) wrong += wrong_scale(t->data[i]);
    uint64_t i = 0;
    while (!wrong_scale(t->data[i])) i++;
    char what[120];
    snprintf(what, sizeof what, "%llu block scales are NaN, zero or negative, the first (byte %02X) at index %llu",
             (unsigned long long)wrong, t->data[i], (unsigned long long)i);
    return bad(c, t, what, e);
}

static bool shape_is(const st_tensor *t, int64_t rows, int64_t cols) {
    return t->rank == 2 && t->shape[0] == rows && t->shape[1] == cols;
}

static bool wrong_shape(const ckpt *c, const st_tensor *t, int64_t rows, int64_t cols, err *e) {
    return fail(e, ERR_INPUT, "E-LOAD-SHAPE", "%s: %s: not [%lld, %lld] as config.json makes it", ckpt_shard_path(c, t),
                t->name.p, (long long)rows, (long long)cols);
}

static bool bind_nvfp4(wquant *q, ckpt *c, const st_tensor *t, str stem, int rows, int cols, err *e) {
    st_tensor *s = companion(c, stem, "weight_scale");
    if (!s && shape_is(t, rows, cols))
        return fail(e, ERR_INPUT, "E-LOAD-DTYPE",
                    "%s: %s: dtype U8 without scales is no weight (BF16, F16, F32, or a quantized form)",
                    ckpt_shard_path(c, t), t->name.p);
    if (cols % 16 != 0 || !shape_is(t, rows, cols / 2)) return wrong_shape(c, t, rows, cols / 2, e);
    if (!s)
        return fail(e, ERR_INPUT, "E-LOAD-SCALE", "%s: %s: packed codes, but " STR_FMT "weight_scale is missing",
                    ckpt_shard_path(c, t), t->name.p, STR_ARG(stem));
    if (s->type != DT_F8_E4M3) return bad(c, s, "block scales must be F8_E4M3", e);
    if (!shape_is(s, rows, cols / 16)) return wrong_shape(c, s, rows, cols / 16, e);
    s->uses++;
    q->format = WF_NVFP4;
    q->scales = s->data;
    return check_block_scales(c, s, e) && required(&q->scale_2, c, t, stem, "weight_scale_2", e);
}

bool quant_bind(wquant *q, ckpt *c, const st_tensor *t, int rows, int cols, err *e) {
    const str stem = { t->name.p, t->name.n - (str_ends(t->name, STR("weight")) ? 6 : 0) };
    *q = (wquant){ .format = WF_FP8 };
    if (t->type == DT_U8) {
        if (!bind_nvfp4(q, c, t, stem, rows, cols, e)) return false;
    } else {
        if (!shape_is(t, rows, cols)) return wrong_shape(c, t, rows, cols, e);
        if (!required(&q->scale_2, c, t, stem, "weight_scale", e)) return false;
    }
    st_tensor *in = companion(c, stem, "input_scale");
    return !in || scalar(&q->input_scale, c, in, e);
}

bool quant_bind_kv(float *k, float *v, ckpt *c, str attn, err *e) {
    st_tensor *ks = companion(c, attn, "k_proj.k_scale"), *vs = companion(c, attn, "v_proj.v_scale");
    *k = *v = 0;
    if (!ks != !vs)
        return fail(e, ERR_INPUT, "E-LOAD-KV", STR_FMT ": one of k_scale and v_scale is there, the other is not",
                    STR_ARG(attn));
    if (!ks) return true;
    if (!scalar(k, c, ks, e) || !scalar(v, c, vs, e)) return false;
    for (int i = 0; i < 2; i++) {
        const float s = i ? *v : *k;
        if (s >= 1.0f || s < 1e-4f)
            log_say("W-LOAD-KV-SCALE",
                    STR_FMT "%c: scale %g looks like a placeholder (sound ones lie between 1e-4 and 1)", STR_ARG(attn),
                    i ? 'v' : 'k', (double)s);
    }
    return true;
}

bool quant_kv_declared(bool *fp8, const ckpt *c, err *e) {
    const json *hf = json_get(c->hf_quant, "quantization"), *own = json_get(c->config, "quantization_config");
    const json *algo = json_get(hf, "kv_cache_quant_algo"), *scheme = json_get(own, "kv_cache_scheme");
    *fp8 = false;
    if (json_is(algo, JSON_STRING)) {
        *fp8 = str_is(json_str(algo), "FP8");
        if (!*fp8)
            return fail(e, ERR_INPUT, "E-LOAD-KV",
                        "%s/hf_quant_config.json: kv_cache_quant_algo " STR_FMT " is not supported (FP8 is)", c->dir,
                        STR_ARG(json_str(algo)));
    } else if (json_is(scheme, JSON_OBJECT)) {
        const json *bits = json_get(scheme, "num_bits");
        *fp8 = json_is(bits, JSON_INT) && bits->u.i == 8;
        if (!*fp8) return fail(e, ERR_INPUT, "E-LOAD-KV", "%s/config.json: kv_cache_scheme is not 8-bit float", c->dir);
    }
    return true;
}
