/* net.h - the network prepared for a device: one handle per weight, one device vector per norm.
 *
 * Built once over bound weights (which must outlive it); immutable afterwards. */
#ifndef NIBBLE_NET_H
#define NIBBLE_NET_H

#include "engine/heads.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/ops.h"

/* How inputs of NVFP4 Linears are quantized: as the file has it (fp4 where input_scale exists, else not at all), or by
 * request. FP8 Linears use their input_scale unless BF16 is asked for. */
typedef enum act_mode { ACT_AUTO, ACT_FP4, ACT_INT8, ACT_BF16 } act_mode;

typedef struct net_ffn {
    linear *router;           /* NULL when dense */
    experts *experts;         /* NULL when dense */
    linear *shared_gate;      /* [1, H] or NULL */
    linear *gate, *up, *down; /* shared expert, or the dense FFN; NULL when there is no shared expert */
    int inter;                /* rows of gate and up */
} net_ffn;

typedef struct net_layer {
    layer_kind kind;
    int index;            /* among the layers of its kind: which KV or GDN state it owns */
    float *norm1, *norm2; /* device [H] */
    linear *in_qkv, *in_z, *in_b, *in_a, *gdn_out;
    float *conv, *neg_a, *dt_bias, *gdn_norm;
    linear *q, *k, *v, *o;
    float *q_norm, *k_norm;
    net_ffn ffn;
} net_layer;

typedef struct net {
    ops *o;
    const model_config *c;
    linear *embed;
    linear *head;      /* [vocab, H] */
    linear *head_real; /* its first `real_vocab` rows: ids that exist, for choosing tokens */
    int real_vocab;
    net_heads heads; /* cheaper ways to read it */
    act_mode act;
    layer_set cpu_experts;
    float *norm;
    net_layer *layers; /* [c->layers] */
    bool has_mtp;
    float *mtp_norm_embed, *mtp_norm_hidden, *mtp_norm;
    linear *mtp_fc;
    net_layer mtp;
    uint8_t *rope_axis; /* device [rotary_dim / 2] */
} net;

/* real_vocab: ids >= it are never chosen (padding rows of the head); 0 = all are real. cpu_experts as in ops_options.
 * Errors: E-NET-ACT (fp4 asked for, but a Linear has no input_scale), E-MACHINE-MEMORY. */
NODISCARD bool net_open(net *out, ops *o, const model_config *c, const weights *w, int real_vocab, act_mode act,
                        const heads_options *ho, const layer_set *cpu_experts, err *e);
void net_close(net *n);

#endif
