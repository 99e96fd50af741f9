/* config.h - config.json understood: every field that changes the arithmetic, read and bounded.
 *
 * Accepts qwen3_5_moe, qwen3_5 (dense), their text-only variants (qwen3_5_moe_text, qwen3_5_text and
 * ...ForCausalLM files without text_config) and qwen3_next. Anything else that would change the result
 * (model_type, layer type, activation, rope type, a bias) is refused by name. */
#ifndef NIBBLE_CONFIG_H
#define NIBBLE_CONFIG_H

#include "base/err.h"
#include "base/json.h"
#include "num/dtype.h"

enum { CONFIG_MAX_LAYERS = 1024, CONFIG_MAX_STOPS = 16, CONFIG_MAX_ROPE = 512 };

typedef enum layer_kind { LAYER_GDN, LAYER_ATTN } layer_kind;
typedef enum rope_kind { ROPE_DEFAULT, ROPE_YARN } rope_kind;

typedef struct model_config {
    char model_type[48];   /* as written (text_config's where there is one) */
    char architecture[80]; /* architectures[0] or "" */
    bool is_moe, is_next;  /* is_next: qwen3_next, fused interleaved in_proj_qkvz / in_proj_ba */
    bool has_vision;       /* a vision_config is present */
    dtype type;            /* declared dtype; BF16 when missing (N-CONFIG-DTYPE) */

    int vocab, hidden, layers;
    uint8_t layer[CONFIG_MAX_LAYERS]; /* layer_kind of each layer */
    int attn_layers, gdn_layers;      /* how many of each */
    float rms_eps;
    bool tied; /* lm_head is embed_tokens */

    int heads, kv_heads, head_dim; /* full attention; heads % kv_heads == 0 */
    bool attn_gate;                /* attn_output_gate: q_proj is doubled, per head [query | gate] */

    int lin_k_heads, lin_v_heads, lin_k_dim, lin_v_dim; /* lin_v_heads % lin_k_heads == 0 */
    int conv_kernel;                                    /* 4 */

    int experts, topk, moe_inter, shared_inter; /* 0 when dense; shared_inter may be 0 */
    int inter;                                  /* dense FFN width; 0 for MoE */

    rope_kind rope;
    int rotary_dim; /* even, <= head_dim; NeoX pairing (i, i + rotary_dim/2) */
    double rope_theta;
    float inv_freq[CONFIG_MAX_ROPE];    /* [rotary_dim/2], float32 as transformers computes them (YaRN applied) */
    float rope_scaling;                 /* attention factor: multiplies cos and sin; 1 unless YaRN */
    uint8_t rope_axis[CONFIG_MAX_ROPE]; /* [rotary_dim/2] 0 = T, 1 = H, 2 = W (interleaved M-RoPE) */
    double yarn_factor;                 /* 0 unless YaRN */
    int max_position;                   /* context limit in tokens */

    int mtp_layers; /* declared mtp_num_hidden_layers (0 or 1) */

    int stop_count, stop_ids[CONFIG_MAX_STOPS]; /* generation_config's eos_token_id, else config's */
    struct {                                    /* generation_config.json; `set` false where it says nothing */
        bool do_sample, has_temperature, has_top_k, has_top_p, has_min_p, has_presence, has_frequency, has_repetition;
        double temperature, top_p, min_p, presence, frequency, repetition;
        int top_k;
    } gen;
} model_config;

/* `generation` may be NULL; `dir` names the model in messages ("DIR/config.json: hidden_size: -5 is ...").
 * Errors: E-CONFIG-TYPE (unknown model_type), E-CONFIG-FIELD (missing, wrong type, out of bounds: names the field
 * and the value), E-CONFIG-LAYER, E-CONFIG-ACT, E-CONFIG-ROPE, E-CONFIG-UNSUPPORTED. Says what it assumes:
 * N-CONFIG-DTYPE, N-CONFIG-DEFAULT, N-CONFIG-ROPE, N-CONFIG-ARCH, N-CONFIG-SSM, N-CONFIG-STOP, N-CONFIG-SAMPLING. */
NODISCARD bool config_read(model_config *out, const json *config, const json *generation, const char *dir, err *e);

/* Bytes of recurrent state (GDN float32 + conv window float32) per sequence, and of KV per token. */
int64_t config_state_bytes(const model_config *c);
int64_t config_kv_bytes_per_token(const model_config *c, int bytes_per_elem, bool with_mtp);

static inline int config_key_dim(const model_config *c) { return c->lin_k_heads * c->lin_k_dim; }
static inline int config_value_dim(const model_config *c) { return c->lin_v_heads * c->lin_v_dim; }
static inline int config_conv_dim(const model_config *c) { return 2 * config_key_dim(c) + config_value_dim(c); }

#endif
