/* calib.h - activation statistics of a model over token sequences, through the tap table.
 *
 * The network is walked layer by layer with the hidden states of all sequences kept, so each layer's weights are needed
 * once and a model far larger than memory calibrates on a small machine. What is collected, under the oracle's names
 * (quant/amax.h): the largest |input| of every Linear (routed experts share one per layer and projection), of K after
 * norm and rotation and of V as produced. Every value is a maximum over float32 numbers that do not depend on chunking,
 * threads or ISA, so neither do the results; no padding exists. */
#ifndef NIBBLE_CALIB_H
#define NIBBLE_CALIB_H

#include "engine/engine.h"
#include "quant/amax.h"

enum { CALIB_KIND = 16 };

typedef struct calib_data { /* token sequences; calib_data_free */
    id_list *v;
    char (*kind)[CALIB_KIND]; /* [n] what sort of text it is ("code", "math"), "" when its line does not say */
    int n;
    int64_t tokens;
    char what[200]; /* for the export's provenance: "built-in corpus, 64 samples, 20480 tokens" */
} calib_data;
void calib_data_add(calib_data *d, const int32_t *tokens, size_t n); /* copies; empty ones are ignored */
void calib_data_free(calib_data *d);

typedef struct calib_options {
    ops_options ops;
    int chunk; /* rows per pass; 0 = 512 */
    int64_t
        max_ram_bytes; /* > 0: hidden states beyond it go to a temporary file, and weights leave memory after their layer */
    int rank, ranks; /* this process's share of the sequences: every ranks-th from `rank`; 0 or 1 ranks: all */
    int mtp_steps;   /* draft steps to run through the head: 0 (no head), 1 or 2 */
    void (*on_progress)(void *ctx, int layer, int layers); /* after each layer; the head counts as one; may be NULL */
    void *ctx;
    volatile const int *cancel;
} calib_options;

typedef struct calib_report {
    int layers, experts; /* rows x columns of `routed`; the last row is the draft head's when it was run */
    int64_t *routed;     /* [layers][experts] (token, expert) pairs, of this share */
    int64_t tokens;
    double seconds;
    bool spilled;
} calib_report;

/* Runs the model in `dir` over the sequences. Errors: those of engine_open; E-CALIB-EMPTY, E-CALIB-LONG (a sequence longer
 * than the model's context), E-CALIB-NONFINITE (names the quantizer), E-CALIB-SPILL, E-ENGINE-TOKEN. */
NODISCARD bool calib_run(amax_table *out, calib_report *report, const char *dir, const calib_data *data,
                         const calib_options *opt, err *e);
void calib_report_free(calib_report *r);
/* Experts that no token reached, over all layers. */
int calib_unseen(const calib_report *r);

#endif
