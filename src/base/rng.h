/* rng.h - Philox 4x32-10 (Salmon et al., SC'11): a counter-based generator, so that a draw depends only on its key
 * and counter, never on how many draws came before. */
#ifndef NIBBLE_RNG_H
#define NIBBLE_RNG_H

#include <stdint.h>

static inline void rng_philox(uint32_t out[4], const uint32_t counter[4], uint64_t key) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Uniform in [0, 1) with 53 bits for one (seed, choice, position, purpose). */
static inline double rng_uniform(uint64_t seed, uint32_t choice, uint64_t position, uint32_t purpose) {
    const uint32_t counter[4] = { (uint32_t)position, (uint32_t)(position >> 32), choice, purpose };
    uint32_t r[4];
    rng_philox(r, counter, seed);
    return (double)(((uint64_t)r[0] << 32 | r[1]) >> 11) * 0x1p-53;
}

#endif
