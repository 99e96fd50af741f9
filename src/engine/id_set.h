/* id_set.h - a bounded set of token ids in ascending order: what one sequence wants of the head beside its usual rows.
 *
 * Allocates when it is opened, then never. Single-threaded. */
#ifndef NIBBLE_ID_SET_H
#define NIBBLE_ID_SET_H

#include "base/err.h"

typedef struct id_set {
    int32_t *v; /* [n] ascending, no id twice */
    int n, cap;
    bool complete; /* nothing was left out for want of room */
} id_set;

/* Room for `cap` ids. False without memory. */
NODISCARD bool id_set_open(id_set *s, int cap);
void id_set_close(id_set *s); /* of a zeroed one too */
bool id_set_has(const id_set *s, int32_t id);
/* Nothing happens to an id that is there; without room it is left out and the set is no longer complete. */
void id_set_add(id_set *s, int32_t id);

#endif
