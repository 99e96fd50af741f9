/* scan_values.h - every value of a checkpoint looked at once: NaN, zeros, holes, scales (private to check/). */
#ifndef NIBBLE_SCAN_VALUES_H
#define NIBBLE_SCAN_VALUES_H

#include "base/pool.h"
#include "check/view.h"

typedef struct check_progress {
    void (*report)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
    volatile const int *cancel;
} check_progress;

/* C-SCALE-*, C-INPUT-*, C-VALUE-* of an opened and laid-out view. The result does not depend on the number of threads.
 * Errors: ERR_INTERRUPTED E-CHECK-STOPPED. */
NODISCARD bool view_values(check_view *v, pool *p, const check_progress *progress, err *e);

#endif
