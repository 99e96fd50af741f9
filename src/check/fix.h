/* fix.h - the safe repairs, on a copy: what can be derived from the tensors or taken from the source, and changes no weight. */
#ifndef NIBBLE_FIX_H
#define NIBBLE_FIX_H

#include "check/view.h"

/* Make the folder `out` from an opened, laid-out and declared view: dtype pinned, exclude lists that fit the tensors, an index
 * of the shards that can be read, sidecars of `source` (or NULL) that are missing. Files that do not change are hard links, else
 * copies; weights that belong to no index are left out. Built in OUT.partial, then renamed. *done gets one line for each repair.
 * Errors: E-CHECK-OUT (out exists, or lies nowhere), E-FILE-*. */
NODISCARD bool view_fix(buf *done, check_view *v, const char *out, const char *source, err *e);

#endif
