/* trace.h - every op of one pass in the order it ran: magnitude, non-finite values, distance from a reference dump. */
#ifndef NIBBLE_TRACE_H
#define NIBBLE_TRACE_H

#include "ckpt/safetensors.h"
#include "engine/engine.h"

enum { TRACE_NAME = 160 };

typedef struct trace_entry {
    char name[TRACE_NAME]; /* "layers.3.attention", a weight's name, "hidden.4", "final_norm", "logits" */
    const char *op;
    int rows, cols;
    double absmax, mean, rms; /* of the finite values */
    int64_t nonfinite;
    int bad_row, bad_col; /* the first NaN or Inf; -1: none */
    bool compared;
    double error;  /* relative RMS against the dump: sqrt(sum (x - y)^2 / sum y^2) */
    int worst_row; /* row with the largest error of its own */
} trace_entry;

typedef struct trace_options {
    const st_file *against; /* compare with the tensors of equal name ("0." before it is allowed); may be NULL */
    const char *out;        /* keep every output as F32 under its name; may be NULL */
} trace_options;

typedef struct trace_result {
    trace_entry *v;
    int n;
    int bad;      /* index of the first op with a value that is not finite, where the trace ends; -1 */
    int compared; /* entries that the dump has too */
} trace_result;

/* Runs the trunk and the head over ids[0..n), n <= the engine's chunk, from an empty state, layer by layer. No two
 * outputs have one name. Errors: those of engine_check_prompt; E-FILE-WRITE. */
NODISCARD bool trace_run(trace_result *out, engine *g, const int32_t *ids, int n, const trace_options *o, err *e);
void trace_free(trace_result *r);

#endif
