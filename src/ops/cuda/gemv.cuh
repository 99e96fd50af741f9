/* gemv.cuh - NVFP4 rows in checkpoint order against quantized inputs in shared memory. A lane reads 16 bytes: 32 codes, two
 * blocks. */
#pragma once

#include "ops/cuda/fast.cuh"

enum { GEMV_THREADS = 256, GEMV_WARPS = GEMV_THREADS / 32 };

/* Sums over LANES neighbouring lanes of n = 2^k values at once: at the end lane l holds value l / (LANES / n), n <= LANES. */
template <int N, int LANES> static __device__ __forceinline__ int64_t sum_many(int64_t *v) {
    int h = LANES / 2;
#pragma unroll
    for (int n = N; n > 1; n /= 2, h /= 2) {
        const bool upper = threadIdx.x & h;
#pragma unroll
        for (int i = 0; i < n / 2; i++) {
            const int64_t keep = upper ? v[i + n / 2] : v[i], send = upper ? v[i] : v[i + n / 2];
            v[i] = keep + (int64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)send, h);
        }
    }
#pragma unroll
    for (; h >= 1; h /= 2) v[0] += (int64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)v[0], h);
    return v[0];
}

/* What a lane holds of one weight row: IT pieces of 32 codes, LANES * 32 columns apart. */
template <int IT> struct weights {
    uint4 codes[IT];
    uint16_t scales[IT];
};

template <int LANES, int IT>
static __device__ __forceinline__ void load_row(weights<IT> *w, const uint8_t *codes, const uint8_t *scales, int lane) {
#pragma unroll
    for (int i = 0; i < IT; i++) {
        w->codes[i] = __ldcs((const uint4 *)codes + i * LANES + lane);
        w->scales[i] = __ldcs((const uint16_t *)scales + i * LANES + lane);
    }
}

/* sum[r][m] over this lane's pieces. */
template <int LANES, int IT, int R, int M>
static __device__ __forceinline__ void dot_rows(int64_t (*sum)[M], const weights<IT> *w, const char *act, int act_bytes,
                                                int K, int lane) {
#pragma unroll
    for (int i = 0; i < IT; i++) {
        const int at = 32 * (i * LANES + lane);
        uint4 x[M][2];
        int4 block[M]; /* scale, start of both blocks */
#pragma unroll
        for (int m = 0; m < M; m++) {
            const char *row = act + m * act_bytes;
            x[m][0] = *(const uint4 *)(row + code_at(at));
            x[m][1] = *(const uint4 *)(row + code_at(at + 16));
            block[m] = *(const int4 *)(act_blocks((void *)row, K) + at / 16);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            const uint4 c = w[r].codes[i];
            const codes8 c0 = decode8(c.x), c1 = decode8(c.y), c2 = decode8(c.z), c3 = decode8(c.w);
            const int ws0 = e4m3_times_512((uint8_t)w[r].scales[i]),
                      ws1 = e4m3_times_512((uint8_t)(w[r].scales[i] >> 8));
#pragma unroll
            for (int m = 0; m < M; m++) {
                const int d0 = dot8(c1, x[m][0].z, x[m][0].w, dot8(c0, x[m][0].x, x[m][0].y, block[m].y));
                const int d1 = dot8(c3, x[m][1].z, x[m][1].w, dot8(c2, x[m][1].x, x[m][1].y, block[m].w));
                sum[r][m] += (int64_t)(d0 * block[m].x) * ws0; /* below 2^31 in either mode */
                sum[r][m] += (int64_t)(d1 * block[m].z) * ws1;
            }
        }
    }
}

template <gpu_act ACT> static __device__ __forceinline__ float quantize(void *row, const float *x, int K, float g) {
    if (ACT == GPU_ACT_INT8) return quantize_int8(row, x, K);
    return quantize_fp4(row, x, K, g) ? quiet_nan() : 1.0f;
}
