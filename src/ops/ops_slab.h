/* ops_slab.h - memory for weights that live as long as the model: matrices side by side in huge pages. Internal to ops/.
 *
 * A matrix of a few megabytes in a mapping of its own lies mostly in small pages, and each of its 18 KB panels then costs
 * several page walks; side by side, the matrices of a layer are one stream through few pages. */
#ifndef NIBBLE_OPS_SLAB_H
#define NIBBLE_OPS_SLAB_H

#include "base/base.h"
#include "base/err.h"

typedef struct slab_chunk slab_chunk;

/* Zero: nothing yet. One owner thread. */
typedef struct slab {
    slab_chunk *last; /* where the next small piece goes, or NULL */
} slab;

/* `bytes` of zeros, 4096-byte aligned, for slab_drop. E-MACHINE-MEMORY. */
NODISCARD bool slab_take(slab *s, void **out, size_t bytes, err *e);
/* Give a piece back; its chunk goes with its last piece. p NULL: nothing. */
void slab_drop(slab *s, void *p);

/* Ask for huge pages in [p, p + bytes): advice, without effect where there are none. */
void slab_advise_huge(void *p, size_t bytes);

#endif
