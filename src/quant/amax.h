/* amax.h - calibration statistics: one running maximum of |x| per quantizer, by name.
 *
 * File layout (safetensors, F32 scalars) and names are those of the oracle (tests/oracle/qwen36-tiny/nvfp4/README.md):
 * `<module>.weight_quantizer`, `<module>.input_quantizer`, `<layer>.self_attn.{k,v}_bmm_quantizer`, for routed experts
 * `<layer>.mlp.experts.{gate_up_proj,down_proj}_input_quantizer` and `..._weight_quantizers.<expert>`. Maxima merge
 * exactly, so the result does not depend on order, batch, threads or processes. */
#ifndef NIBBLE_AMAX_H
#define NIBBLE_AMAX_H

#include "base/arena.h"
#include "base/err.h"

typedef struct amax_entry {
    str name;
    float value; /* >= 0, finite */
} amax_entry;

typedef struct amax_table {
    arena mem;
    amax_entry *v; /* [n] in order of insertion */
    int n, cap;
    int *slots; /* open hash over v; [slot_cap] */
    int slot_cap;
    const char *source; /* what made it, for the export's provenance: "calibrated", a file name ... ; borrowed */
} amax_table;

/* v[name] = max(v[name], value), inserting at need. value must be finite and >= 0 (CHECK): callers scan first. */
void amax_raise(amax_table *t, str name, float value);
/* v[name] = value, whatever it was. */
void amax_set(amax_table *t, str name, float value);
/* The value, or -1 when there is no such quantizer. */
float amax_get(const amax_table *t, str name);
void amax_merge(amax_table *t, const amax_table *other);
void amax_free(amax_table *t);

/* Errors: those of st_open; E-AMAX-ENTRY (not an F32/BF16 scalar, negative, NaN or Inf: names it). */
NODISCARD bool amax_load(amax_table *out, const char *path, err *e);
NODISCARD bool amax_save(const amax_table *t, const char *path, err *e);

#endif
