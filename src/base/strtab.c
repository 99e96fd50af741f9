#include "base/strtab.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/random.h>

static uint64_t hash_key[2];

static void draw_key(void) {
    /* Without entropy (early boot, a sandbox) the table still works, it only loses its protection. */
    if (getrandom(hash_key, sizeof hash_key, GRND_NONBLOCK) != (ssize_t)sizeof hash_key)
        hash_key[0] = (uint64_t)(uintptr_t)&draw_key, hash_key[1] = (uint64_t)(uintptr_t)malloc;
}

static inline uint64_t rotl(uint64_t x, int k) { return x << k | x >> (64 - k); }

static inline void sip_round(uint64_t v[4]) {
    v[0] += v[1], v[1] = rotl(v[1], 13) ^ v[0], v[0] = rotl(v[0], 32);
    v[2] += v[3], v[3] = rotl(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = rotl(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = rotl(v[1], 17) ^ v[2], v[2] = rotl(v[2], 32);
}

/* Words are read in host order: the value is private to the process, so byte order does not matter. */
static uint64_t hash(str s) {
    uint64_t v[4] = { hash_key[0] ^ 0x736f6d6570736575u, hash_key[1] ^ 0x646f72616e646f6du,
                      hash_key[0] ^ 0x6c7967656e657261u, hash_key[1] ^ 0x7465646279746573u };
    size_t i = 0;
    uint64_t m;
    for (; i + 8 <= s.n; i += 8) {
        memcpy(&m, s.p + i, 8);
        v[3] ^= m;
        sip_round(v);
        v[0] ^= m;
    }
    m = (uint64_t)s.n << 56;
    for (int shift = 0; i < s.n; i++, shift += 8) m |= (uint64_t)(unsigned char)s.p[i] << shift;
    v[3] ^= m;
    sip_round(v);
    v[0] ^= m;
    v[2] ^= 0xff;
    for (int r = 0; r < 3; r++) sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

bool strtab_init(strtab *t, size_t n) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, draw_key);
    CHECK(n < STRTAB_NONE, "too many strings for one table: %zu", n);
    size_t cap = 16;
    while (cap < n + n / 2) cap *= 2;
    if (t->slots && t->mask + 1 >= cap && t->mask + 1 <= 4 * cap) {
        memset(t->slots, 0, (t->mask + 1) * sizeof *t->slots);
        return true;
    }
    strtab_free(t);
    t->slots = calloc(cap, sizeof *t->slots);
    if (t->slots) t->mask = cap - 1;
    return t->slots != NULL;
}

/* The slot that holds the key, or the free one where it belongs. */
static uint64_t *slot_of(const strtab *t, str key, uint64_t h, strtab_key *key_of, const void *ctx) {
    for (size_t i = (size_t)h & t->mask;; i = (i + 1) & t->mask) {
        uint64_t *s = &t->slots[i];
        if (*s == 0 || (*s >> 32 == h >> 32 && str_eq(key_of(ctx, (uint32_t)*s - 1), key))) return s;
    }
}

uint32_t strtab_put(strtab *t, str key, uint32_t index, strtab_key *key_of, const void *ctx) {
    const uint64_t h = hash(key);
    uint64_t *s = slot_of(t, key, h, key_of, ctx);
    if (*s == 0) *s = (h >> 32 << 32) | (index + 1u);
    return (uint32_t)*s - 1;
}

uint32_t strtab_get(const strtab *t, str key, strtab_key *key_of, const void *ctx) {
    if (!t->slots) return STRTAB_NONE;
    const uint64_t *s = slot_of(t, key, hash(key), key_of, ctx);
    return *s ? (uint32_t)*s - 1 : STRTAB_NONE;
}

void strtab_free(strtab *t) {
    free(t->slots);
    *t = (strtab){ 0 };
}
