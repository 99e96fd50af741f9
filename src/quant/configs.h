/* configs.h - what stands beside the shards: config.json, hf_quant_config.json, sidecars, model-card fragment.
 *
 * Fields that ModelOpt defines come out as ModelOpt writes them; differences by design (docs/NVFP4.md): the dtype is pinned
 * twice, excludes are repeated in the namespaces of stock loaders, mtp.fc is always listed, and `nibble` keys say where
 * every scale came from. */
#ifndef NIBBLE_CONFIGS_H
#define NIBBLE_CONFIGS_H

#include "quant/plan.h"
#include "quant/pretty.h"

/* Logits of an export against its source (quant/kl.h). */
typedef struct kl_figures {
    double mean, worst; /* KL(source || export) per position, nats, in float64 */
    double same_top;    /* share of positions with the same most likely token */
    int positions;
} kl_figures;

typedef struct provenance {
    const char *calibration;  /* e.g. "built-in corpus, 64 samples of 512 tokens", "amax file x", "none (data-free)" */
    const char *mtp_scales;   /* "calibrated", "borrow", "generous:4", "" */
    const char *arith;        /* "cuda" or "cpu" */
    const char *algorithm;    /* "max", "mse", "four-over-six" */
    const kl_figures *kl;     /* of the export against its source; NULL: not measured */
    const kl_figures *kl_max; /* of the same export by algorithm max; NULL: not measured */
} provenance;

/* Patterns of modules that stay unquantized. `modelopt_only`: exactly ModelOpt's list. *n strings in `mem`. */
const str *configs_excludes(const plan *p, arena *mem, bool modelopt_only, int *n);

/* The patterns of the draft head alone, the same in every namespace. p->recipe.mtp and p->has_mtp decide. */
const str *configs_head_excludes(const plan *p, arena *mem, int *n);
/* "NVFP4", "W4A16_NVFP4", "FP8". */
const char *configs_algo(qformat f);
/* Name under which a module is listed: all experts of a layer are one entry. */
str configs_listed_name(const qmodule *m);
/* Members of `quantized_layers` for the quantized modules of the plan. */
void configs_layer_entries(pretty *o, const plan *p);

/* Write config.json, hf_quant_config.json, the index (when sharded) and every sidecar of the source into `dir`.
 * W-QUANT-CARD when the source has no README or licence. Errors: E-FILE-*. */
NODISCARD bool configs_write(const char *dir, plan *p, const provenance *from, err *e);

#endif
