/* weights_quant.h - internal to weights: what belongs to a quantized matrix or cache, found and checked. */
#ifndef NIBBLE_WEIGHTS_QUANT_H
#define NIBBLE_WEIGHTS_QUANT_H

#include "model/weights.h"

/* Fill q from the companions of `t` ("<stem>.weight"): weight_scale, weight_scale_2, input_scale; counts their uses.
 * t->type DT_U8: NVFP4, [rows, cols/2]; DT_F8_E4M3: FP8 per tensor, [rows, cols]. */
NODISCARD bool quant_bind(wquant *q, ckpt *c, const st_tensor *t, int rows, int cols, err *e);
/* K and V scales of an attention block whose names start with `attn` ("....self_attn."); 0 when absent. */
NODISCARD bool quant_bind_kv(float *k, float *v, ckpt *c, str attn, err *e);
/* Whether the configs declare an FP8 KV cache. Another format is an error (E-LOAD-KV). */
NODISCARD bool quant_kv_declared(bool *fp8, const ckpt *c, err *e);

#endif
