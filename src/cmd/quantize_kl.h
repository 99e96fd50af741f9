/* quantize_kl.h - `quantize --report-kl`: the new export run against its source before it gets its name. */
#ifndef NIBBLE_QUANTIZE_KL_H
#define NIBBLE_QUANTIZE_KL_H

#include "quant/configs.h"
#include "quant/quantize.h"

/* *got: of the export in `partial` (complete, configs too). When o->algorithm is not QUANT_MAX, *max: of a second export
 * `<out>.max.partial` made like it by QUANT_MAX and removed again. Errors: those of kl_logits, quantize_shards and
 * configs_write, E-QUANT-CORPUS. */
NODISCARD bool quantize_kl(kl_figures *got, kl_figures *max, plan *p, const char *src, const char *partial,
                           const char *out, const quantize_options *o, const provenance *from, err *e);

#endif
