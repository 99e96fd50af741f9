/* against.h - an export against the model it was made from (private to check/).
 *
 * Each quantized matrix is decoded and compared with the source, and encoded anew from the source by the rules of `quantize`
 * and compared byte by byte. Verbatim tensors must be equal. */
#ifndef NIBBLE_AGAINST_H
#define NIBBLE_AGAINST_H

#include "check/scan_values.h"
#include "kern/quant.h"

/* How a matrix was made, as far as its scale tells. */
typedef enum made_by { MADE_CUDA, MADE_CPU, MADE_BOTH, MADE_UNKNOWN, MADE_COUNT } made_by;
extern const char *const made_names[]; /* "cuda", "cpu", "either", "unknown" */

typedef struct compare_family {
    int matrices, equal; /* equal: every byte is what quantize writes */
    double mean, worst;  /* relative error */
    str worst_name;      /* module; in the view's memory */
} compare_family;

typedef struct compare_result {
    bool done;
    compare_family family[2][QM_COUNT]; /* [trunk, draft head] */
    int matrices, equal, made[MADE_COUNT];
    quant_algorithm algorithm; /* that most of the matrices were made with */
    int by_algorithm[3];
    int copies, copies_equal;                /* verbatim tensors */
    int64_t bytes_compared, bytes_different; /* of codes and block scales */
    uint64_t source_bytes;                   /* read */
} compare_result;

/* C-SRC-*. The source must be a sound BF16, F16 or F32 checkpoint. Errors: those of ckpt_open and config_read;
 * E-QUANT-ALREADY when the source is quantized itself; ERR_INTERRUPTED E-CHECK-STOPPED. */
NODISCARD bool view_compare(compare_result *out, check_view *v, const char *source, pool *p, kern_isa isa,
                            const check_progress *progress, err *e);

#endif
