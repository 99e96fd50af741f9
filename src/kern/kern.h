/* kern.h - inner loops of the CPU backend: one table, filled once, read-only afterwards.
 *
 * kern_init fills every member with the reference (kern_init_ref: plain C, the executable arithmetic contract of
 * docs/NUMERICS.md) and overwrites upward with what the CPU has, capped by --isa. Every member returns THE SAME
 * BITS at every level (NaN results: any NaN). Single-threaded, no allocation, no global state; outputs never
 * overlap inputs unless said. Float matrices are row-major. "dot32" is the 32-lane dot product of NUMERICS 2. */
#ifndef NIBBLE_KERN_H
#define NIBBLE_KERN_H

#include "base/base.h"

typedef enum kern_isa { ISA_REF, ISA_AVX2, ISA_AVX512, ISA_AMX, ISA_NEON, ISA_DOTPROD, ISA_COUNT } kern_isa;

enum {
    KERN_BLOCK = 256,  /* elements per maximum of block_max */
    KERN_GDN_COLS = 64 /* columns of a state that gdn_steps takes at a time, at most */
};

#define KERN_ATTN_WORK(G, D) (((int64_t)(G) + 128) * (D))

/* One token of gdn_steps. */
typedef struct gdn_token {
    const float *q, *k; /* [dk]; q is not read when o is NULL */
    const float *v;     /* [cols] */
    float *o;           /* [cols]; NULL: the state only advances (pending rows that were accepted) */
    float beta, decay;
} gdn_token;

typedef struct kern {
    kern_isa isa;

    /* ---- linear: y[m * ldy + n] = dot32(x[m], w[n]); x [M, K] at row stride ldx, w [N, K] contiguous; K >= 1 ---- */
    void (*gemm_bf16)(float *y, int64_t ldy, const float *x, int64_t ldx, const uint16_t *w, int M, int N, int K);
    void (*gemm_f16)(float *y, int64_t ldy, const float *x, int64_t ldx, const uint16_t *w, int M, int N, int K);
    void (*gemm_f32)(float *y, int64_t ldy, const float *x, int64_t ldx, const float *w, int M, int N, int K);

    /* ---- rows ---- */
    void (*bf16_to_f32)(float *y, const uint16_t *x, int64_t n);
    void (*f32_to_bf16)(uint16_t *y, const float *x, int64_t n); /* RNE */
    /* ss = dot32(x, x); r = 1 / sqrt(ss / n + eps); y = (x * r) * w. y may be x. */
    void (*rmsnorm)(float *y, const float *x, const float *w, int n, float eps);
    /* r as in rmsnorm; y = ((x * r) * w) * silu(z). y may be x. */
    void (*gated_norm)(float *y, const float *x, const float *z, const float *w, int n, float eps);
    /* r = 1 / sqrt(dot32(x, x) + eps); y = (x * r) * scale. y may be x. */
    void (*l2norm)(float *y, const float *x, int n, float eps, float scale);
    void (*silu_mul)(float *y, const float *g, const float *u, int64_t n);    /* y = silu(g) * u; y may be g or u */
    void (*sigmoid_mul)(float *y, const float *x, const float *g, int64_t n); /* y = x * sigmoid(g); y may be x */
    void (*add)(float *y, const float *x, int64_t n);                         /* y = y + x */
    void (*add_scaled)(float *y, float a, const float *x, int64_t n);         /* y = y + fl(a * x) */
    void (*exp)(float *y, const float *x, int64_t n);                         /* num_exp elementwise; y may be x */
    /* Index of the largest, lowest index on ties, NaN below everything; -1 only for n == 0. */
    int64_t (*argmax)(const float *x, int64_t n);
    /* Count of NaN or Inf. */
    int64_t (*nonfinite)(const float *x, int64_t n);
    /* max[b] = largest number among x[b * KERN_BLOCK ..), a zero counting as +0; NaN is passed over, -inf when nothing
     * else is there; ceil(n / KERN_BLOCK) values. True when every x is finite. */
    bool (*block_max)(float *max, const float *x, int64_t n);

    /* ---- GDN ---- */
    /* c[ch] = silu(acc), acc = +0, then for j = 0..taps-1: acc = fma(w[ch * taps + j], u[j][ch], acc); channels [0, n). */
    void (*conv_silu)(float *c, const float *const *u, const float *w, int taps, int n);
    /* n >= 1 tokens one after the other, one value head, columns [0, cols) of a state S[dk][ld] (pointers are already at
     * the first column). Each token, the state being S0 before the first:
     *   s = S * decay;  m = +0, i ascending: m = fma(s[i], k[i], m);  d = beta * (v - m);
     *   S[i] = fma(k[i], d, s[i]);  o = +0, i ascending: o = fma(S[i], q[i], o) unless o is NULL.
     * Stored in S is what the first `keep` <= n tokens make of it; keep 0 leaves it untouched. The state is read once and
     * written at most once. work: dk * KERN_GDN_COLS floats of any content, best 64-byte aligned. */
    void (*gdn_steps)(float *S, int64_t ld, const gdn_token *t, int n, int keep, float *work, int dk, int cols);

    /* ---- attention: one tile of up to 64 consecutive positions, G query heads that share a KV head ----
     * s[j] = dot32(q, k[j]) * scale; max = max over j < n; p[j] = exp(s[j] - max);
     * sum = 32 lanes of p in the manner of dot32 (lane j%32 adds p[j], then the tree);
     * o[d] = +0, j ascending: o = fma(p[j], v[j][d], o).
     * q [G, D], o [G, D], max [G], sum [G]; k, v: n rows at element stride `ld`, float32 or BF16 (upcast exactly).
     * A NaN score makes that head's max, sum and o NaN. */
    void (*attn_tile_f32)(float *o, float *max, float *sum, const float *q, const float *k, const float *v, int64_t ld,
                          int n, int G, int D, float scale);
    void (*attn_tile_bf16)(float *o, float *max, float *sum, const float *q, const uint16_t *k, const uint16_t *v,
                           int64_t ld, int n, int G, int D, float scale);
    /* The same for E4M3 codes (0x7f and 0xff: NaN). work: KERN_ATTN_WORK(G, D) floats of any content, best 64-byte aligned. */
    void (*attn_tile_fp8)(float *o, float *max, float *sum, const float *q, const uint8_t *k, const uint8_t *v,
                          int64_t ld, int n, int G, int D, float scale, float *work);
    /* Merge a tile into a running (O, M, L), one head: M2 = max(M, max); a = exp(M - M2); b = exp(max - M2);
     * L = fma(L, a, sum * b); O[d] = fma(O[d], a, o[d] * b); M = M2. */
    void (*attn_merge)(float *O, float *M, float *L, const float *o, float max, float sum, int D);
    void (*scale_div)(float *y, const float *x, float d, int64_t n); /* y = x / d; y may be x */
} kern;

/* Fill the table for the best level the CPU has that is <= cap (ISA_COUNT = no cap; a cap of another
 * architecture falls back to ISA_REF). */
void kern_init(kern *k, kern_isa cap);
bool kern_isa_supported(kern_isa isa); /* by this CPU and OS */
const char *kern_isa_name(kern_isa isa);
bool kern_isa_parse(kern_isa *out, const char *name); /* "ref" "avx2" "avx512" "amx" "neon" "dotprod" */
/* Human CPU model name ("Intel Xeon ..."), static storage. */
const char *kern_cpu_name(void);

#endif
