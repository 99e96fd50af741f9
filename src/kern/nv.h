/* nv.h - inner loops over NVFP4 weights in the packed layout: a table of its own beside kern.h.
 *
 * Packed layout. A panel is 16 output rows; along K it is a stream of groups of 64 columns, 576 bytes each, 64-byte
 * aligned:
 *     bytes 0..63    scale[b][r]  b = 0..3 (blocks of 16 columns), r = 0..15      E4M3 as in the checkpoint
 *     bytes 64..575  word[o][r]   o = 0..7 (octets of 8 columns), r = 0..15       4 bytes = the row's codes, as stored
 * Rows beyond N and columns beyond K are zero codes under zero scales. It is the checkpoint transposed at 4-byte
 * granularity: one vector holds the same octet of 16 rows, so a lane's sum is a row's block sum.
 *
 * Inputs are quantized once per row into an nv_act. Sums over blocks are exact 64-bit integers rounded to float32
 * once (docs/NUMERICS.md "Quantized linears"), so every level, order and split returns the same bits.
 * Single-threaded, no allocation. */
#ifndef NIBBLE_NV_H
#define NIBBLE_NV_H

#include "kern/kern.h"
#include "num/act_int8.h"
#include "num/fp8_inline.h"

enum { NV_ROWS = 16, NV_COLS = 64, NV_GROUP_BYTES = 576 };

static inline int nv_padded(int K) { return (K + NV_COLS - 1) / NV_COLS * NV_COLS; }
static inline int64_t nv_panel_bytes(int K) { return (int64_t)nv_padded(K) / NV_COLS * NV_GROUP_BYTES; }
static inline int nv_panels(int N) { return (N + NV_ROWS - 1) / NV_ROWS; }
static inline int64_t nv_matrix_bytes(int N, int K) { return nv_panels(N) * nv_panel_bytes(K); }

/* One quantized input row; Kp = nv_padded(K). */
typedef struct nv_act {
    int8_t *codes;  /* [Kp] per octet of columns: 0 2 4 6 | 1 3 5 7; FP4: doubled E2M1 values; INT8: codes */
    int32_t *scale; /* [Kp / 16] FP4: E4M3 value x 512; INT8: the block's integer */
    int32_t *bias;  /* [Kp / 16] -12 x the sum of the block's codes */
    float *x;       /* [Kp] float inputs (weight-only mode); shares memory with the others */
    float factor;   /* INT8: the row's t; else 1 */
    bool bad;       /* a NaN went in: the row's outputs are NaN */
} nv_act;

/* Bytes behind one nv_act, a multiple of 64; nv_act_at points the members into them. */
size_t nv_act_bytes(int K);
nv_act nv_act_at(void *mem, int K);
/* The columns behind K of the integer form: zero codes under zero scales. */
void nv_act_clear_tail(nv_act *a, int K);

typedef struct nv_kern {
    kern_isa isa;

    /* One panel from rows [0, rows <= 16) of a checkpoint matrix: codes at row stride K / 2, scales at K / 16. */
    void (*pack)(uint8_t *panel, const uint8_t *codes, const uint8_t *scales, int rows, int K);

    /* Codes as nvfp4_act_encode wrote them (packed [K / 2], scales [K / 16]) -> a. Sets bad. */
    void (*act_fp4)(nv_act *a, const uint8_t *codes, const uint8_t *scales, int K);
    /* x [K] -> a in INT8 form: t = amax / (127 * 960), per block the smallest integer of at most 4 significant bits in
     * [1, 960] under which no code clips, codes RNE(fl(x / fl(t * integer))). Sets factor = t. */
    void (*act_int8)(nv_act *a, const float *x, int K);

    /* y[m * ldy + 16 p + r] = fl32(sum_b isum * as * ws x 512) for panels p < n and rows m < M. Panels lie
     * `stride` bytes apart. Writes 16 floats a panel. */
    void (*dot)(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a, int M);
    /* Weight-only mode: per block an fma chain over its columns, acc = fma(p, ws, acc) over blocks. */
    void (*dot_float)(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a,
                      int M);

    /* What dot computes, same bits, for many rows (from about 8 up); NULL at a level that has no better way than dot.
     * The inputs first become planes, which only depend on the rows: tile after tile of 16 rows (the last may have
     * fewer), nv_tile_bytes(Kp) each, 64-byte aligned, to be shared by matrices and threads. `planes` makes one tile of
     * n <= 16 rows, which need not lie side by side. `work`: gemm_bytes, 64-byte aligned, the caller's alone. */
    void (*planes)(void *tile, const nv_act *const *rows, int n, int Kp);
    void (*gemm)(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const void *planes, int M,
                 void *work);
    size_t gemm_bytes;
} nv_kern;

/* Bytes of the planes of 16 rows: shifts, marks, three digits of every value. A multiple of 64. */
static inline int64_t nv_tile_bytes(int Kp) {
    const int64_t groups = Kp / NV_COLS;
    return 64 + (groups + 64) / 64 * 64 + groups * 3 * 1024;
}

/* Fill the table for the best level the CPU has that is <= cap, as kern_init. */
void nv_kern_init(nv_kern *k, kern_isa cap);

/* The levels; each overwrites what it has. For nv_kern_init and tests only. */
void nv_init_ref(nv_kern *k);
void nv_init_avx2(nv_kern *k);
void nv_init_avx512(nv_kern *k);
void nv_init_amx(nv_kern *k); /* AVX-512 and gemm */
void nv_init_neon(nv_kern *k);
void nv_init_dotprod(nv_kern *k); /* NEON and sdot */

#endif
