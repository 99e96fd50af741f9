/* strtab.h - hash table from strings to indices of an array that the caller owns.
 *
 * For names that come from files and requests: the hash is SipHash-1-3 (Aumasson and Bernstein) under a
 * random key drawn once per process, so nobody can prepare names that collide. Results never depend on
 * the key. Stores no strings: the caller says how to reach the string of an index. Reading from many
 * threads is safe; filling is for one owner. A zeroed table is empty and valid. */
#ifndef NIBBLE_STRTAB_H
#define NIBBLE_STRTAB_H

#include "base/base.h"
#include "base/str.h"

typedef str strtab_key(const void *ctx, uint32_t index); /* the string of an index given to strtab_put */

typedef struct strtab {
    uint64_t *slots; /* [mask + 1]: upper half of the hash | index + 1; 0 = free */
    size_t mask;
} strtab;

enum { STRTAB_NONE = UINT32_MAX };

/* Room for n strings (fixed; emptied first, memory reused when it suffices). False: out of memory. */
NODISCARD bool strtab_init(strtab *t, size_t n);
/* Enter `key` under `index`; the index that already holds an equal key is returned, else `index`. */
uint32_t strtab_put(strtab *t, str key, uint32_t index, strtab_key *key_of, const void *ctx);
/* Index of the key or STRTAB_NONE. */
uint32_t strtab_get(const strtab *t, str key, strtab_key *key_of, const void *ctx);
void strtab_free(strtab *t);

#endif
