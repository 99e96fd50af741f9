/* screen.h - inner loops of the screened head: an 8-bit copy of a weight matrix whose products bound the exact ones.
 *
 * A table of its own beside kern.h, filled once, read-only afterwards; every member returns THE SAME BITS at every level.
 * Single-threaded, no allocation. A row of weights w [K] becomes codes Q in [-127, 127] and a scale s; a row of inputs h
 * becomes integers q in [-32767, 32767] and a step t. Q . q is an integer, computed exactly, and docs/NUMERICS.md 8 gives the
 * distance between s t (Q . q) and the float32 logit. */
#ifndef NIBBLE_SCREEN_H
#define NIBBLE_SCREEN_H

#include "kern/kern.h"

enum {
    SCREEN_STEP = 64,        /* codes and inputs are padded with zeros to a multiple of it */
    SCREEN_MAX_COLS = 65536, /* 32-bit sums of 65536 * 255 * 127 still fit */
    SCREEN_MAX_ROWS = 4      /* rows of inputs that share one read of the codes */
};

static inline int screen_stride(int cols) { return (cols + SCREEN_STEP - 1) / SCREEN_STEP * SCREEN_STEP; }

/* What is known of one row of weights beside its codes. NaN or Inf in the row: finite = false, scale and codes 0. */
typedef struct screen_row {
    float scale;   /* s >= 0; 0: all codes are 0 (the row is zero, or too small to divide by) */
    int32_t sum;   /* of the codes */
    double norm2;  /* sum of w^2: at most K / 16 + 6 roundings of float64 */
    double err2;   /* sum of (w - s Q)^2: likewise, each term within 3 roundings */
    int32_t code2; /* sum of Q^2 */
    bool finite;
} screen_row;

/* One row of inputs in the three forms that kernels read, each [screen_stride(K)], 64-byte aligned, zero q behind K:
 * q itself, and the bytes of q + 32768 = 256 high + low. */
typedef struct screen_act {
    const int16_t *q;
    const uint8_t *high, *low;
} screen_act;

typedef struct screen_kern {
    kern_isa isa;
    /* Codes of one row, codes [screen_stride(K)]: amax = max|w|, s = fl(amax / 127), Q = RNE(fl(w * fl(127 / amax))), clamped.
     * norm2 and err2 in 16 float64 lanes (element i in lane i % 16: one multiplication, one addition each, ascending), then
     * lane l + lane l + 8, then 4, 2, 1. */
    void (*pack)(int8_t *codes, screen_row *row, const float *w, int K);
    /* y[m * ldy + n] = Q[n] . q[m], exact. codes: N rows of `stride` bytes, 64-byte aligned; sums [N] as in screen_row.
     * 1 <= M <= SCREEN_MAX_ROWS; stride = screen_stride(K), K <= SCREEN_MAX_COLS. */
    void (*dots)(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int M, int N,
                 int64_t stride);
} screen_kern;

/* Fill the table for the best level the CPU has that is <= cap (ISA_COUNT = no cap; a cap of another architecture falls back
 * to ISA_REF). */
void screen_kern_init(screen_kern *k, kern_isa cap);

/* One level each; only for CPUs that have it. */
void screen_init_ref(screen_kern *k);
void screen_init_avx2(screen_kern *k);
void screen_init_avx512(screen_kern *k);
void screen_init_neon(screen_kern *k);

#endif
