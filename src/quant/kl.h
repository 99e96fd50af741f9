/* kl.h - what quantization does to the logits: KL divergence of an export from its source over a few texts. */
#ifndef NIBBLE_KL_H
#define NIBBLE_KL_H

#include "quant/calib.h"
#include "quant/configs.h"

enum { KL_TEXTS = 8, KL_TOKENS = 64, KL_LAST = 16 }; /* of each text its first tokens, of these the last positions */

/* Cut `d` to KL_TEXTS of its sequences, spread evenly, of KL_TOKENS tokens each. */
void kl_texts(calib_data *d);
/* *logits (malloc'ed) [rows, vocab] of the last KL_LAST positions of each text; activations and cache as the export declares
 * them, float32 for a BF16 model. Errors: those of engine_open and teacher_run. */
NODISCARD bool kl_logits(float **logits, int *rows, int *vocab, const char *dir, const calib_data *d,
                         const ops_options *backend, err *e);
kl_figures kl_compare(const float *got, const float *want, int rows, int vocab);

#endif
