/* Reference linears: one dot32 per output, nothing shared, nothing reordered. */
#include <math.h>

#include "kern/dot32.h"
#include "kern/kern_isa.h"
#include "num/bf16.h"

static float same(float f) { return f; }

#define GEMM(name, type, upcast)                                                                               \
    static void name(float *y, int64_t ldy, const float *x, int64_t ldx, const type *w, int M, int N, int K) { \
        for (int64_t m = 0; m < M; m++)                                                                        \
            for (int64_t n = 0; n < N; n++) {                                                                  \
                float lane[32] = { 0 };                                                                        \
                for (int64_t i = 0; i < K; i++)                                                                \
                    lane[i % 32] = fmaf(x[m * ldx + i], upcast(w[n * K + i]), lane[i % 32]);                   \
                y[m * ldy + n] = tree32(lane);                                                                 \
            }                                                                                                  \
    }

GEMM(gemm_bf16, uint16_t, bf16_to_f32)
GEMM(gemm_f16, uint16_t, f16_to_f32)
GEMM(gemm_f32, float, same)

void KERN_REF(linear_init)(kern *k) {
    k->gemm_bf16 = gemm_bf16;
    k->gemm_f16 = gemm_f16;
    k->gemm_f32 = gemm_f32;
}
