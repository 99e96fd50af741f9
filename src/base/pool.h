/* pool.h - a persistent compute pool: every thread runs the same function on its own share.
 *
 * Static partition only, so results cannot depend on timing. Workers spin briefly, then sleep; they
 * never spin when the pool has more threads than CPUs in the affinity mask. One owner thread calls
 * pool_run; calls do not nest. */
#ifndef NIBBLE_POOL_H
#define NIBBLE_POOL_H

#include "base/base.h"
#include "base/err.h"

typedef struct pool pool;
typedef void pool_fn(void *ctx, int thread, int threads); /* thread in [0, threads) */

/* threads <= 0: one per CPU of the affinity mask (cgroup CPU quota respected). The caller is thread
 * 0, so `threads - 1` are started. Errors: E-MACHINE-THREADS. */
NODISCARD bool pool_new(pool **out, int threads, err *e);
int pool_threads(const pool *p);
/* Run fn on all threads and return when all have finished; their writes are visible to the caller. */
void pool_run(pool *p, pool_fn *fn, void *ctx);
/* Inside fn: wait until all threads of this run arrive; their earlier writes are visible after it.
 * Every thread must call it the same number of times. */
void pool_barrier(pool *p);
void pool_free(pool *p);

/* Share [*begin, *end) of n items for one thread, multiples of `grain` except at the end. */
static inline void pool_share(int64_t n, int64_t grain, int thread, int threads, int64_t *begin, int64_t *end) {
    const int64_t units = (n + grain - 1) / grain;
    const int64_t b = units * thread / threads * grain, t = units * (thread + 1) / threads * grain;
    *begin = b < n ? b : n;
    *end = t < n ? t : n;
}

/* CPUs of the affinity mask, further limited by a cgroup quota; at least 1. */
int pool_cpus(void);

#endif
