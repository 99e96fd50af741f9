/* dev.cuh - what the kernels share: launching, the 32-lane reduction, loads, the context. */
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "num/act_int8.h"
#include "num/bf16.h"
#include "num/fp4.h"
#include "num/fp8_inline.h"
#include "ops/cuda/gpu.h"

enum { GPU_RING = 4 };

struct gpu {
    cudaStream_t stream;
    cudaError_t fault; /* the first */
    const char *where;
    bool pdl; /* programmatic dependent launch */
    int multiprocessors, smem_optin;
    int many; /* from this many rows on the kernels of many.cu; 0: never */
    struct {
        void *p;
        size_t bytes;
    } work[GPU_WORKS];
    void *host_work; /* pinned */
    size_t host_work_bytes;
    unsigned work_changes;
    void *ring; /* pinned, of large uploads; NULL until there was one */
    cudaEvent_t ring_free[GPU_RING]; /* recorded behind the copy out of each piece */
    unsigned ring_at;
    void *stage; /* pinned ring of uploads */
    size_t stage_at;
};

static inline void gpu_note(gpu *g, cudaError_t e, const char *where) {
    if (e != cudaSuccess && g->fault == cudaSuccess) {
        g->fault = e;
        g->where = where;
    }
}

/* Kernels of one pass follow each other closely: a kernel may start before its predecessor has ended, and read what never
 * changes (weights). Each one calls wait_for_inputs() before it touches anything that an earlier kernel wrote, or writes. The
 * next kernel may start from then on, not earlier: otherwise the blocks of several kernels wait side by side for room. */
static __device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename... P, typename... A>
static void launch(gpu *g, void (*kernel)(P...), dim3 grid, int threads, size_t smem, A... args) {
    if (g->fault != cudaSuccess || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = smem;
    c.stream = g->stream;
    cudaLaunchAttribute a[1];
    a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a[0].val.programmaticStreamSerializationAllowed = 1;
    c.attrs = a;
    c.numAttrs = g->pdl ? 1 : 0;
    if (smem > 48 * 1024)
        gpu_note(g, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem), "smem");
    gpu_note(g, cudaLaunchKernelEx(&c, kernel, P(args)...), "launch");
}

static inline unsigned blocks_of(int64_t n, int per) { return (unsigned)((n + per - 1) / per); }

enum { ALL_LANES = -1 };

static __device__ __forceinline__ float quiet_nan() { return __uint_as_float(0x7fc00000u); }

/* l[j] = l[j] + l[j + 16], then 8, 4, 2, 1 (NUMERICS 2): addition commutes, so every lane ends with l[0]. */
static __device__ __forceinline__ float tree32(float l) {
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) l = l + __shfl_xor_sync(0xffffffffu, l, half);
    return l;
}

static __device__ __forceinline__ float load_elem(const float *p, int64_t i) { return p[i]; }
static __device__ __forceinline__ float load_elem(const uint16_t *p, int64_t i) {
    return __uint_as_float((uint32_t)p[i] << 16);
}
static __device__ __forceinline__ float load_elem(const __half *p, int64_t i) { return __half2float(p[i]); }
/* E4M3 without branches: the exponent is rebased by a multiplication, which is right for subnormals as well. */
static __device__ __forceinline__ float load_elem(const uint8_t *p, int64_t i) {
    const uint32_t c = p[i], mag = c & 0x7f;
    const float v = __uint_as_float(mag << 20) * 0x1p120f;
    return __uint_as_float(__float_as_uint(mag == 0x7f ? quiet_nan() : v) | (c & 0x80) << 24);
}

/* One warp; every lane gets the result. */
template <typename T, typename U> static __device__ __forceinline__ float warp_dot32(const T *a, const U *b, int n) {
    float l = 0;
#pragma unroll 8
    for (int i = threadIdx.x % 32; i < n; i += 32) l = fmaf(load_elem(a, i), load_elem(b, i), l);
    return tree32(l);
}

/* a before b: value descending, index ascending, NaN last, as unsigned numbers of which the larger comes first. */
static __device__ __forceinline__ uint64_t rank_key(float v, uint32_t index) {
    uint32_t u = __float_as_uint(v + 0.0f); /* -0 becomes +0 */
    u = isnan(v) ? 0 : u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)u << 32 | (0xffffffffu - index);
}
static __device__ __forceinline__ uint64_t warp_max(uint64_t v) {
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) {
        const uint64_t o = __shfl_xor_sync(0xffffffffu, v, half);
        v = o > v ? o : v;
    }
    return v;
}
