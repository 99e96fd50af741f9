#include "quant/mtp_scales.h"

#include <math.h>
#include <stdio.h>

#include "num/bf16.h"

/* Quantizers of a full-attention layer, behind "<layer>."; K and V first. */
static const char *const roles[] = {
    "self_attn.k_bmm_quantizer",
    "self_attn.v_bmm_quantizer",
    "self_attn.q_proj.input_quantizer",
    "self_attn.k_proj.input_quantizer",
    "self_attn.v_proj.input_quantizer",
    "self_attn.o_proj.input_quantizer",
    "mlp.shared_expert.gate_proj.input_quantizer",
    "mlp.shared_expert.up_proj.input_quantizer",
    "mlp.shared_expert.down_proj.input_quantizer",
    "mlp.experts.gate_up_proj_input_quantizer",
    "mlp.experts.down_proj_input_quantizer",
    "mlp.gate_proj.input_quantizer",
    "mlp.up_proj.input_quantizer",
    "mlp.down_proj.input_quantizer",
};
enum { KV_ROLES = 2 };

/* A role that the head's layer does not have (experts in a dense model) needs no value. */
static bool needed(const plan *p, const char *role) {
    for (int i = 0; i < p->n_modules; i++) {
        const qmodule *m = &p->modules[i];
        if (m->is_mtp && str_ends(m->input_key, str_of(role))) return true;
    }
    return false;
}

bool mtp_scales_fill(amax_table *t, const plan *p, mtp_scales how, double factor, err *e) {
    if (how == MTP_CALIBRATED) return true;
    for (size_t i = 0; i < (how == MTP_BORROW ? KV_ROLES : ARRAY_LEN(roles)); i++) {
        char from[400], to[400];
        const bool kv = i < KV_ROLES;
        if (kv ? p->recipe.kv != KV_FP8 : !needed(p, roles[i])) continue;
        const int n = snprintf(from, sizeof from, STR_FMT "layers.%d.%s", STR_ARG(p->prefix), p->last_attn, roles[i]);
        const int m = snprintf(to, sizeof to, "mtp.layers.0.%s", roles[i]);
        const float a = amax_get(t, (str){ from, (size_t)n });
        if (a < 0)
            return fail(e, ERR_INPUT, "E-QUANT-AMAX",
                        "%s: no maximum to make the draft head's from (calibrate the trunk, or --mtp bf16)", from);
        amax_set(t, (str){ to, (size_t)m }, kv ? a : (float)((double)a * factor));
    }
    return true;
}

/* ---- maxima out of the scales of an export ---- */

static bool gives(float amax, float scale, bool fp8, quant_arith arith) {
    return (fp8 ? fp8_scale(amax, arith) : nvfp4_scale_2(amax, arith)) == scale;
}

/* A maximum that this scale was made of: ModelOpt's are bfloat16 values, ours any float32. */
static float maximum_of(float scale, bool fp8, quant_arith arith) {
    const float near = (float)((double)scale * (fp8 ? 448 : 2688)), narrow = bf16_to_f32(bf16_from_f32(near));
    if (gives(narrow, scale, fp8, arith)) return narrow;
    float up = near, down = near;
    for (int i = 0; i < 4; i++) {
        if (gives(up, scale, fp8, arith)) return up;
        if (gives(down, scale, fp8, arith)) return down;
        up = nextafterf(up, INFINITY);
        down = nextafterf(down, 0);
    }
    return near; /* made under the other arithmetic: one ulp off */
}

/* An F32 scalar (rank 0 or one element) that is a sound scale, or -1. */
static float scale_at(const ckpt *c, const char *name) {
    const st_tensor *t = ckpt_find(c, str_of(name));
    float v;
    if (!t || t->type != DT_F32 || t->elems != 1) return -1;
    memcpy(&v, t->data, sizeof v);
    return isfinite(v) && v > 0 ? v : -1;
}

/* The scale of a role of one layer; `base` is "<prefix>layers.<n>.". Routed experts: the largest of all. */
static float role_scale(const ckpt *c, const char *base, const char *role, int experts) {
    char name[500];
    if (strcmp(role, roles[0]) == 0 || strcmp(role, roles[1]) == 0) {
        snprintf(name, sizeof name, "%sself_attn.%c_proj.%c_scale", base, role[10], role[10]);
        return scale_at(c, name);
    }
    if (strncmp(role, "mlp.experts.", 12) != 0) {
        snprintf(name, sizeof name, "%s%.*sinput_scale", base, (int)(strlen(role) - strlen("input_quantizer")), role);
        return scale_at(c, name);
    }
    float largest = -1;
    for (int e = 0; e < experts; e++) {
        snprintf(name, sizeof name, "%smlp.experts.%d.%s_proj.input_scale", base, e, role[12] == 'd' ? "down" : "gate");
        const float v = scale_at(c, name);
        if (v > largest) largest = v;
    }
    return largest;
}

void mtp_scales_from_export(amax_table *t, const plan *p, const ckpt *from, str prefix, bool kv_only,
                            quant_arith arith) {
    char base[300], key[500];
    snprintf(base, sizeof base, STR_FMT "layers.%d.", STR_ARG(prefix), p->last_attn);
    for (size_t i = 0; i < (kv_only ? KV_ROLES : ARRAY_LEN(roles)); i++) {
        const float scale = role_scale(from, base, roles[i], p->config->experts);
        if (!(scale > 0)) continue;
        const int n = snprintf(key, sizeof key, STR_FMT "layers.%d.%s", STR_ARG(p->prefix), p->last_attn, roles[i]);
        amax_set(t, (str){ key, (size_t)n }, maximum_of(scale, i < KV_ROLES, arith));
    }
}
