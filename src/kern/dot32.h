/* dot32.h - the 32-lane reduction of NUMERICS 2 in plain C, for the reference kernels. */
#ifndef NIBBLE_DOT32_H
#define NIBBLE_DOT32_H

/* l[0..31] becomes garbage. */
static inline float tree32(float *l) {
    for (int half = 16; half >= 1; half /= 2)
        for (int j = 0; j < half; j++) l[j] = l[j] + l[j + half];
    return l[0];
}

#endif
