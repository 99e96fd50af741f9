/* read_bw.h - the fastest streaming read found for the machines these benchmarks ran on: what kernels are compared with.
 *
 * Four pages at a time, in turn, each line fetched 16 KB ahead: one plain stream gets 0.7 to 0.8 of it, because hardware
 * prefetchers stop at page borders. The loads are what counts, so they feed sums that wait for nothing else. */
#ifndef NIBBLE_READ_BW_H
#define NIBBLE_READ_BW_H

#include <stdint.h>

typedef uint64_t read_vec __attribute__((vector_size(16), aligned(1), may_alias));

/* Read bytes at p (any alignment); the result depends on all of them, so that no read can be left out. */
static inline read_vec read_bw(const void *from, int64_t bytes) {
    enum { PAGE = 4096, GROUP = 4 * PAGE };
    const uint8_t *p = from;
    read_vec a = { 0 }, b = { 0 }, c = { 0 }, d = { 0 };
    int64_t at = 0;
    for (; at + GROUP <= bytes; at += GROUP)
        for (int64_t i = 0; i < GROUP; i += 64) {
            const uint8_t *line = p + at + i % 256 / 64 * PAGE + i / 256 * 64;
            const read_vec *q = (const read_vec *)line;
            __builtin_prefetch((const void *)((uintptr_t)line + GROUP));
            a += q[0];
            b += q[1];
            c += q[2];
            d += q[3];
        }
    for (; at + 16 <= bytes; at += 16) a += *(const read_vec *)(p + at);
    return a + b + c + d;
}

#endif
