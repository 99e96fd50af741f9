/* mock.h - a quantized model of real shape with made-up weights, built in memory: for benchmarks without a download.
 *
 * NVFP4 where an export of `quantize` has it (projections, experts, draft layer), BF16 elsewhere. Codes are uniform, block
 * scales lie within one binade near the top, tensor scales keep every projection's gain near 1 and input scales cover
 * what then comes in, so nothing overflows. Every layer's NVFP4 matrices are views of the same `source`: a backend that
 * repacks gives each its own memory. BF16 matrices have their own, but the embedding is the head's. Deterministic;
 * independent of threads. */
#ifndef NIBBLE_MOCK_H
#define NIBBLE_MOCK_H

#include "base/pool.h"
#include "model/weights.h"

typedef struct mock {
    model_config config;
    weights w; /* valid until mock_free; not to be given to weights_free by others unless zeroed here */
    uint8_t *source, *plain;
    size_t source_bytes, plain_bytes;
    size_t nvfp4_bytes; /* of all NVFP4 matrices, scales included: what repacking takes besides */
} mock;

typedef enum mock_preset { MOCK_TINY, MOCK_MID, MOCK_WIDE4, MOCK_FULL } mock_preset;
/* Their names, NULL-terminated. */
extern const char *const mock_presets[];

/* The shape alone, sizes filled in; `layers` 0 = the preset's, else a multiple of 4. Errors: E-BENCH-LAYERS. */
NODISCARD bool mock_plan(mock *out, int preset, int layers, err *e);
/* Memory and values of a planned model. Errors: E-MACHINE-MEMORY. */
NODISCARD bool mock_build(mock *s, pool *p, err *e);
/* Give the source back once everything is repacked; it reads as zeros from then on. */
void mock_drop_source(mock *s);
/* An NVFP4 matrix of any shape over the source (at most as large as a layer). */
wmat mock_matrix(const mock *s, const char *name, int rows, int cols);
void mock_free(mock *s);

#endif
