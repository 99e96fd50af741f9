#include "quant/mtp_scales.h"

#include <stdio.h>

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
