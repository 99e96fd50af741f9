#include "num/bf16.h"

/* Shift a 24-bit significand right by `drop` bits, nearest even. */
static uint32_t round_shift(uint32_t m, int drop) {
    const uint32_t half = 1u << (drop - 1), rest = m & ((1u << drop) - 1), q = m >> drop;
    return q + (rest > half || (rest == half && (q & 1)));
}

float f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 1023;
    uint32_t u;
    float f;
    if (exp == 0) { /* zero or subnormal: man * 2^-24, exact */
        f = (float)man * 0x1p-24f;
        memcpy(&u, &f, 4);
        u |= sign;
    } else if (exp == 31) {
        u = sign | 0x7f800000u | man << 13 | (man ? 0x400000u : 0);
    } else {
        u = sign | (exp + 112) << 23 | man << 13;
    }
    memcpy(&f, &u, 4);
    return f;
}

uint16_t f16_from_f32(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x47800000u) return (uint16_t)(sign | 0x7c00); /* >= 65536; 65520 and up round there below */
    const int exp = (int)(a >> 23);
    const uint32_t man = (a & 0x7fffffu) | 0x800000u;
    if (exp < 102) return (uint16_t)sign; /* < 2^-25; f32 subnormals have exp 0 */
    if (exp < 113) return (uint16_t)(sign | round_shift(man, 126 - exp));
    return (uint16_t)(sign | (((uint32_t)(exp - 113) << 10) + round_shift(man, 13)));
}
