/* ops_slab.h - large memory in huge pages; for weights, which live as long as the model, side by side. Internal to ops/.
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

/* Zero pages that cost nothing until they are written, `bytes` of them, from a huge page's border on and in huge pages where
 * there are any; NULL when memory ends. */
void *slab_map(size_t bytes);
void slab_unmap(void *p, size_t bytes);

#endif
