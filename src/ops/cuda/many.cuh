/* many.cuh - many rows: words of the tensor cores, and what many.cu offers. */
#pragma once

#include "ops/cuda/fast.cuh"

/* c [16, 8] = a [16, 16] b [16, 8], int8. Lane 4 g + t holds of a: columns 4 t .. 4 t + 3 of rows g (a0) and g + 8 (a1); of b:
 * rows 4 t .. 4 t + 3 of column g; of c: row g, columns 2 t and 2 t + 1, then the same of row g + 8. */
static __device__ __forceinline__ void mma_s8(int *c, uint32_t a0, uint32_t a1, uint32_t b) {
#ifdef __CUDACC__
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
#else /* tests/emu */
    const uint32_t mine[3] = { a0, a1, b };
    struct lane_words {
        int8_t a[2][4], b[4];
    };
    const char *all = emu_post(0xffffffffu, mine, sizeof mine);
    const int g = (int)(threadIdx.x % 32) / 4, t = (int)threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        c[i] = 0;
        for (int k = 0; k < 16; k++) {
            const lane_words a = emu_from<lane_words>(all, 4 * g + k / 4);
            const lane_words x = emu_from<lane_words>(all, 4 * (2 * t + i % 2) + k / 4);
            c[i] += a.a[i / 2][k % 4] * x.b[k % 4];
        }
    }
#endif
}

/* Four matrices of 8 rows of 16 bytes: the address of row l comes from lane l; lane 4 g + t gets word t of row g of each. */
static __device__ __forceinline__ void load_rows32(uint32_t *r, const void *row) {
#ifdef __CUDACC__
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#else
    const char *all = emu_post(0xffffffffu, &row, sizeof row);
    const int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < 4; i++) r[i] = ((const uint32_t *)emu_from<const void *>(all, 8 * i + lane / 4))[lane % 4];
#endif
}

bool many_nvfp4(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows, bool add);
bool many_plain(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows);
bool many_moe(gpu *g, float *y, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx,
              const float *wt, int rows, int k);
