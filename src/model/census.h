/* census.h - what a checkpoint holds, by class and format, from its tensors alone. Nothing is bound, so quantized
 * exports and files that do not load can be described as well. */
#ifndef NIBBLE_CENSUS_H
#define NIBBLE_CENSUS_H

#include "ckpt/ckpt.h"
#include "model/config.h"
#include "model/weights.h"

enum {
    CENSUS_NVFP4 = DT_COUNT,
    CENSUS_FORMATS
}; /* a format is a dtype, or NVFP4: U8 codes with F8_E4M3 block scales */

typedef struct census_class {
    int tensors;
    int64_t params;                        /* packed codes count as two each; scales are no parameters */
    uint64_t bytes;                        /* scales included */
    uint64_t format_bytes[CENSUS_FORMATS]; /* without scales */
} census_class;

typedef struct kv_scale {
    bool has_k, has_v;
    float k, v;
} kv_scale;

typedef struct census {
    census_class of[WC_COUNT + 1]; /* the last: names no part of the family has */
    census_class total;
    kv_scale kv[CONFIG_MAX_LAYERS], kv_mtp;
    int kv_scales; /* tensors */
    int mtp_weight_scales, mtp_input_scales;
    const char *kv_declared;  /* "FP8" ... of hf_quant_config.json or config.json, or NULL */
    const char *quant_algo;   /* likewise */
    uint64_t bytes_per_token; /* weights read per decoded token at batch 1, without the draft head */
} census;

void census_take(census *out, const ckpt *c, const model_config *config);
/* Formats of a class by falling share, joined by '+': "NVFP4+BF16"; "-" for none. Appends. */
void census_format_text(buf *out, const census_class *k);

#endif
