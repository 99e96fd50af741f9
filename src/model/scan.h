/* scan.h - NaN and Inf in the tensors of a checkpoint. */
#ifndef NIBBLE_SCAN_H
#define NIBBLE_SCAN_H

#include "base/pool.h"
#include "ckpt/ckpt.h"

typedef struct scan_finding {
    const st_tensor *tensor;
    int64_t count, first; /* non-finite elements; flat index of the first */
} scan_finding;

typedef struct scan_result {
    scan_finding *found; /* [n] in the order of the tensors; owned */
    int n;
    int64_t count; /* non-finite elements in all */
    int tensors;   /* floating-point tensors read */
    uint64_t bytes;
} scan_result;

/* Reads every element of every F32, F64, F16, BF16, F8_E4M3 and F8_E5M2 tensor once, with all threads of the pool (NULL:
 * this thread). The result does not depend on their number. */
void scan_checkpoint(scan_result *out, const ckpt *c, pool *p);
void scan_free(scan_result *r);
/* Non-finite elements among n of type t at p (any alignment); *first is set to the index of the first. */
int64_t scan_elements(const uint8_t *p, dtype t, int64_t n, int64_t *first);

#endif
