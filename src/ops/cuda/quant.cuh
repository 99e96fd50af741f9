/* quant.cuh - a row of inputs quantized into shared memory, and one output row of a matrix against it. NUMERICS "Quantized
 * Linears". Every sum over blocks is an integer, so its order is free. */
#pragma once

#include "ops/cuda/dev.cuh"

/* Bytes of one row in shared memory. Integer modes: codes [K], then {scale, -12 times the sum of the codes} per block; others:
 * 4-byte words [K]. A multiple of 16. */
static __host__ __device__ __forceinline__ int act_row_bytes(int K, gpu_act act) {
    const int k32 = (K + 31) / 32 * 32; /* code_at moves codes within 32 */
    return act == GPU_ACT_FP4 || act == GPU_ACT_INT8 ? k32 + k32 / 2 : 4 * k32;
}
static __device__ __forceinline__ int2 *act_blocks(void *row, int K) {
    return (int2 *)((char *)row + (K + 31) / 32 * 32);
}

/* Where element i of the codes lies: the 16-byte halves of 32 codes change places in every second group of 128 codes, so that
 * eight lanes that read halves 32 bytes apart meet all banks. */
static __device__ __forceinline__ int code_at(int i) { return i ^ (i >> 3 & 16); }

static __device__ __forceinline__ uint32_t pack4(int a, int b, int c, int d) {
    return (uint32_t)(a & 255) | (uint32_t)(b & 255) << 8 | (uint32_t)(c & 255) << 16 | (uint32_t)d << 24;
}

static __device__ __forceinline__ int doubled_e2m1(float q) {
    const int code = e2m1_from_f32(q);
    const int mag = (int)(0x0c08060403020100ull >> (code & 7) * 8 & 255);
    return code & 8 ? -mag : mag;
}

/* doubled_e2m1(fl(x / den)) without the division: x * inv, with inv = fl(1 / den), is within 2 ulp of the quotient, and the
 * boundaries between codes (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5) end in 21 zero bits. A product that is not within 8 ulp of
 * such a number is on the quotient's side of every boundary; the others are divided. */
static __device__ __forceinline__ int doubled_quotient(float x, float den, float inv) {
    const float q = x * inv;
    const uint32_t bits = __float_as_uint(q);
    if (((bits + 8) & 0x1fffff) <= 16 && fabsf(q) > 0.125f) return doubled_e2m1(x / den);
    const float a = fminf(fabsf(q), 6.0f);
    /* Adding 1.5 * 2^22 rounds to multiples of 0.5, ties to even; below 4 to 1, above to 2. */
    const int shift = (a >= 2.0f) + (a >= 4.0f);
    const uint32_t magic = 0x4ac00000u + ((uint32_t)shift << 23);
    const int mag = (int)((__float_as_uint(a + __uint_as_float(magic)) & 15u) << shift);
    return bits >> 31 ? -mag : mag;
}

/* Eight consecutive elements of a block per thread; its neighbour has the others. */
static __device__ __forceinline__ void load8(float *v, const float *x, int at, int K) {
    if (at + 8 <= K && ((uintptr_t)(x + at) & 15) == 0) {
        const float4 a = *(const float4 *)(x + at), b = *(const float4 *)(x + at + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = at + i < K ? x[at + i] : 0.0f;
}

static __device__ __forceinline__ float max8(const float *v, bool *nan) {
    float m = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float a = fabsf(v[i]);
        *nan |= isnan(v[i]);
        m = a > m ? a : m;
    }
    return m;
}

static __device__ __forceinline__ int dot_ones(uint2 c) {
    return __dp4a((int)c.x, 0x01010101, __dp4a((int)c.y, 0x01010101, 0));
}

/* Half a block of codes and, once per block, its scale. The neighbour thread has the other half. */
static __device__ __forceinline__ void put_half_block(void *row, int K, int at, const int *q, int32_t scale) {
    const uint2 c = make_uint2(pack4(q[0], q[1], q[2], q[3]), pack4(q[4], q[5], q[6], q[7]));
    *(uint2 *)((char *)row + code_at(at)) = c;
    const int sum = dot_ones(c), other = __shfl_xor_sync(__activemask(), sum, 1);
    if (threadIdx.x % 2 == 0) act_blocks(row, K)[at / 16] = make_int2(scale, -12 * (sum + other));
}

/* Returns whether a NaN went in. Whole warps take part in a step, so the neighbour of an element's thread always does. */
static __device__ __forceinline__ bool fp4_half_block(void *row, const float *v, int at, int K, float g) {
    bool nan = false;
    float m = max8(v, &nan);
    const float o = __shfl_xor_sync(0xffffffffu, m, 1);
    m = o > m ? o : m;
    nan |= __shfl_xor_sync(0xffffffffu, (int)nan, 1) != 0;
    if (at >= K) return false;
    const float s = m / (6.0f * g);
    const uint8_t code = nan || isnan(s) ? 0x7f : e4m3_from_f32_inline(s);
    const float den = e4m3_to_f32_inline(code) * g;
    int q[8];
    const float inv = 1.0f / den;
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = den < 1e-5f ? 0 : doubled_quotient(v[i], den, inv);
    put_half_block(row, K, at, q, e4m3_times_512(code));
    return code == 0x7f;
}

static __device__ bool quantize_fp4(void *row, const float *x, int K, float g) {
    bool bad = false;
    for (int first = 0; first < K; first += 8 * (int)blockDim.x) {
        const int at = first + 8 * (int)threadIdx.x;
        float v[8];
        load8(v, x, at, K);
        bad |= fp4_half_block(row, v, at, K, g);
    }
    return __syncthreads_or(bad);
}

/* factor: the row's t; NaN when a NaN went in. */
static __device__ float quantize_int8(void *row, const float *x, int K) {
    __shared__ float part[32];
    float top = 0;
    bool any = false;
    for (int at = 8 * (int)threadIdx.x; at < K; at += 8 * (int)blockDim.x) {
        float v[8];
        load8(v, x, at, K);
        const float m = max8(v, &any);
        top = m > top ? m : top;
    }
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) {
        const float o = __shfl_xor_sync(0xffffffffu, top, half);
        top = o > top ? o : top;
    }
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = top;
    any = __syncthreads_or(any);
    for (int i = 0; i < (int)blockDim.x / 32; i++) top = part[i] > top ? part[i] : top;
    const float t = top / 121920.0f;
    for (int first = 0; first < K; first += 8 * (int)blockDim.x) {
        const int at = first + 8 * (int)threadIdx.x;
        float v[8];
        bool nan = false;
        load8(v, x, at, K);
        float m = max8(v, &nan);
        const float o = __shfl_xor_sync(0xffffffffu, m, 1);
        m = o > m ? o : m;
        if (at >= K) continue;
        const int32_t scale = t > 0 ? nv_round_up_4_bits(m / (127.0f * t)) : 1;
        const float den = t * (float)scale;
        int q[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float c = t > 0 ? rintf(v[i] / den) : 0.0f;
            if (!(c <= 127)) c = 127;
            if (c < -127) c = -127;
            q[i] = (int)c;
        }
        put_half_block(row, K, at, q, scale);
    }
    __syncthreads();
    return any ? quiet_nan() : t;
}

enum { FP8_BAD = -2147483647 - 1 };

static __device__ bool quantize_fp8(void *row, const float *x, int K, float s) {
    int32_t *wide = (int32_t *)row;
    bool bad = false;
    for (int i = threadIdx.x; i < K; i += blockDim.x) {
        const uint8_t code = e4m3_from_f32_inline(x[i] / s);
        bad |= (code & 0x7f) == 0x7f;
        wide[i] = e4m3_times_512(code);
    }
    return __syncthreads_or(bad);
}

/* The whole block quantizes a row; ends with a barrier. What the outputs are multiplied with, at last: NaN when a NaN went
 * in. `unit` is the power of two of the integer sum. */
static __device__ float quantize_row(void *row, const float *x, int K, const gpu_mat *w) {
    switch (w->act) {
    case GPU_ACT_FP4: return quantize_fp4(row, x, K, w->input_scale) ? quiet_nan() : 1.0f;
    case GPU_ACT_INT8: return quantize_int8(row, x, K);
    case GPU_ACT_FP8: return quantize_fp8(row, x, K, w->input_scale) ? quiet_nan() : 1.0f;
    default:
        for (int i = threadIdx.x; i < K; i += blockDim.x) ((float *)row)[i] = x[i];
        __syncthreads();
        return 1.0f;
    }
}

/* y from the exact integer sum; factor as quantize_row returned it. */
static __device__ __forceinline__ float finish_int(int64_t sum, float factor, gpu_act act, float s2, float g) {
    if (act == GPU_ACT_INT8) return __ll2float_rn(sum) * 0x1p-9f * (s2 * factor * 0.5f);
    const float y = act == GPU_ACT_FP8 ? __ll2float_rn(sum) * 0x1p-18f * (s2 * g)
                                       : __ll2float_rn(sum) * 0x1p-18f * (s2 * g * 0.25f);
    return isnan(factor) ? quiet_nan() : y;
}

/* ---- dots ---- */

static __device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t sel) {
    uint32_t d = 0;
#ifdef __CUDACC__
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sel));
#else /* tests/emu */
    const uint64_t both = (uint64_t)b << 32 | a;
    for (int i = 0; i < 4; i++) {
        const uint32_t s = sel >> 4 * i, v = (uint32_t)(both >> 8 * (s & 7)) & 255;
        d |= (s & 8 ? (v & 128 ? 255u : 0u) : v) << 8 * i;
    }
#endif
    return d;
}

static __device__ __forceinline__ int dp4a_us(uint32_t a, uint32_t b, int c) {
    int d = c;
#ifdef __CUDACC__
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
    for (int i = 0; i < 4; i++) d += (int)(a >> 8 * i & 255) * (int8_t)(b >> 8 * i);
#endif
    return d;
}

/* Four codes, doubled, plus 12: bytes 0 .. 24. The selector's top bit replicates the (clear) sign of the table's byte, so a
 * negative code selects 0 in the first table and a positive one in the second; n = w ^ 0x8888.... */
static __device__ __forceinline__ uint32_t decode4(uint32_t w, uint32_t n) {
    return prmt(0x0f0e0d0cu, 0x18141210u, w) | prmt(0x090a0b0cu, 0x00040608u, n);
}
typedef struct codes8 {
    uint32_t lo, hi;
} codes8;
static __device__ __forceinline__ codes8 decode8(uint32_t w) {
    const uint32_t n = w ^ 0x88888888u;
    const codes8 c = { decode4(w, n), decode4(w >> 16, n >> 16) };
    return c;
}
static __device__ __forceinline__ int dot8(codes8 w, uint32_t x0, uint32_t x1, int acc) {
    return dp4a_us(w.hi, x1, dp4a_us(w.lo, x0, acc));
}

static __device__ __forceinline__ int64_t warp_sum(int64_t v) {
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) v += (int64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)v, half);
    return v;
}

static __device__ __forceinline__ int64_t nvfp4_int(const uint8_t *codes, const uint8_t *scales, const void *row,
                                                    int K) {
    const int2 *blocks = act_blocks((void *)row, K);
    int64_t sum = 0;
    for (int b = threadIdx.x % 32; b < K / 16; b += 32) {
        const uint2 w = *(const uint2 *)(codes + b * 8);
        const uint4 x = *(const uint4 *)((const char *)row + code_at(b * 16));
        const int2 block = blocks[b];
        const int dot = dot8(decode8(w.y), x.z, x.w, dot8(decode8(w.x), x.x, x.y, block.y));
        sum += (int64_t)dot * block.x * e4m3_times_512(scales[b]);
    }
    return warp_sum(sum);
}

/* Weight-only: per block an fma chain, then one fma per block in order, which all lanes follow. */
static __device__ __forceinline__ float nvfp4_float(const uint8_t *codes, const uint8_t *scales, const float *x,
                                                    int K) {
    const int blocks = K / 16, lane = threadIdx.x % 32;
    float acc = 0;
    for (int first = 0; first < blocks; first += 32) {
        const int b = first + lane;
        float p = 0, s = 0;
        if (b < blocks) {
            for (int i = 0; i < 16; i++) {
                const int c = codes[(b * 16 + i) / 2] >> (i & 1) * 4 & 15;
                const int mag = (int)(0x0c08060403020100ull >> (c & 7) * 8 & 255);
                p = fmaf(0.5f * (float)(c & 8 ? -mag : mag), x[b * 16 + i], p);
            }
            s = e4m3_to_f32_inline(scales[b]);
        }
        for (int i = 0; i < 32 && first + i < blocks; i++)
            acc = fmaf(__shfl_sync(0xffffffffu, p, i), __shfl_sync(0xffffffffu, s, i), acc);
    }
    return acc;
}

static __device__ __forceinline__ int64_t fp8_int(const uint8_t *w, const int32_t *a, int K) {
    int64_t sum = 0;
    for (int i = threadIdx.x % 32; i < K; i += 32) sum += (int64_t)e4m3_times_512(w[i]) * a[i];
    return warp_sum(sum);
}

static __device__ __forceinline__ float fp8_float(const uint8_t *w, const float *x, int K) {
    float acc = 0;
    for (int i = 0; i < K; i++) acc = fmaf(e4m3_to_f32_inline(w[i]), x[i], acc);
    return acc;
}

/* Output row n of any matrix against a quantized row, by one warp; every lane gets it. */
static __device__ float warp_row(const gpu_mat *w, int n, const void *row, float factor) {
    const int K = w->cols;
    switch (w->format) {
    case GPU_BF16: return warp_dot32((const float *)row, (const uint16_t *)w->data + (int64_t)n * K, K);
    case GPU_F16: return warp_dot32((const float *)row, (const __half *)w->data + (int64_t)n * K, K);
    case GPU_F32: return warp_dot32((const float *)row, (const float *)w->data + (int64_t)n * K, K);
    case GPU_FP8: {
        const uint8_t *p = (const uint8_t *)w->data + (int64_t)n * K;
        if (w->act == GPU_ACT_FLOAT) return fp8_float(p, (const float *)row, K) * w->scale_2;
        return finish_int(fp8_int(p, (const int32_t *)row, K), factor, w->act, w->scale_2, w->input_scale);
    }
    default: {
        const uint8_t *p = (const uint8_t *)w->data + (int64_t)n * (K / 2), *s = w->scales + (int64_t)n * (K / 16);
        if (w->act == GPU_ACT_FLOAT) return nvfp4_float(p, s, (const float *)row, K) * w->scale_2;
        return finish_int(nvfp4_int(p, s, row, K), factor, w->act, w->scale_2, w->input_scale);
    }
    }
}
