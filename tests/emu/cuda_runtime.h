/* cuda_runtime.h - the part of CUDA that src/ops/cuda uses, on the CPU: every thread of a block is a fiber, warps run one after
 * the other up to the next barrier of the block. Slow and exact: it shows wrong indices, wrong arithmetic and missing barriers
 * without a GPU. scripts/cuda_emu.sh builds with it. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define NIBBLE_CUDA_EMU 1

struct uint2 {
    uint32_t x, y;
};
struct int2 {
    int32_t x, y;
};
struct float2 {
    float x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) int4 {
    int32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return { x, y }; }
static inline int2 make_int2(int x, int y) { return { x, y }; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return { x, y, z, w }; }
static inline int4 make_int4(int x, int y, int z, int w) { return { x, y, z, w }; }
static inline float2 make_float2(float x, float y) { return { x, y }; }
static inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

/* ---- the machine ---- */
extern dim3 emu_thread, blockIdx, blockDim, gridDim;
#define threadIdx emu_thread
extern char *emu_dyn;
void emu_run(dim3 grid, dim3 block, size_t smem, const std::function<void()> &kernel);
void __syncthreads();
int __syncthreads_or(int p);
enum { EMU_POST = 32 };
/* Every lane of mask posts up to EMU_POST bytes; returns what the lanes posted, [32][EMU_POST]. */
const char *emu_post(uint32_t mask, const void *v, size_t bytes);

template <typename T> static inline T emu_from(const char *all, int lane) {
    T v;
    memcpy(&v, all + (lane & 31) * EMU_POST, sizeof v);
    return v;
}
template <typename T> static inline T __shfl_xor_sync(uint32_t mask, T v, int x) {
    return emu_from<T>(emu_post(mask, &v, sizeof v), (int)(threadIdx.x % 32) ^ x);
}
template <typename T> static inline T __shfl_sync(uint32_t mask, T v, int lane) {
    return emu_from<T>(emu_post(mask, &v, sizeof v), lane);
}
static inline void __syncwarp() {
    char c = 0;
    emu_post(0xffffffffu, &c, 1);
}
/* The one use: neighbours of a pair, in code that the rest of the warp may have left. */
static inline uint32_t __activemask() { return 3u << (threadIdx.x & 30); }
static inline int __any_sync(uint32_t mask, int p) {
    const char *all = emu_post(mask, &p, sizeof p);
    int any = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) any |= emu_from<int>(all, i);
    return any != 0;
}
static inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t v) {
    const char *all = emu_post(mask, &v, sizeof v);
    for (int i = 0; i < 32; i++)
        if (emu_from<uint32_t>(all, i) > v) v = emu_from<uint32_t>(all, i);
    return v;
}
static inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t v) {
    const char *all = emu_post(mask, &v, sizeof v);
    for (int i = 0; i < 32; i++)
        if (emu_from<uint32_t>(all, i) < v) v = emu_from<uint32_t>(all, i);
    return v;
}
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline T __ldg(const T *p) { return *p; }
static inline int atomicAdd(int *p, int v) { return (*p += v) - v; }
static inline float __uint_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t __float_as_uint(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __ll2float_rn(long long v) { return (float)v; }
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return c;
}

/* ---- the runtime ---- */
typedef int cudaError_t;
enum {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorInsufficientDriver,
    cudaErrorNoDevice,
    cudaErrorDevicesUnavailable,
    cudaErrorInvalidDevice,
    cudaErrorNoKernelImageForDevice,
    cudaErrorUnsupportedPtxVersion
};
typedef void *cudaEvent_t, *cudaStream_t, *cudaGraph_t, *cudaGraphExec_t;
enum {
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaStreamNonBlocking,
    cudaEventDisableTiming,
    cudaStreamCaptureModeThreadLocal,
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount, integrated;
    size_t totalGlobalMem;
};
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    int numAttrs;
};
static inline const char *cudaGetErrorString(cudaError_t) { return "emulated"; }
static inline cudaError_t cudaDriverGetVersion(int *v) { return *v = 13000, cudaSuccess; }
static inline cudaError_t cudaRuntimeGetVersion(int *v) { return *v = 13000, cudaSuccess; }
static inline cudaError_t cudaGetDeviceCount(int *v) { return *v = 1, cudaSuccess; }
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    *p = {};
    strcpy(p->name, "emulated GPU");
    p->major = 8;
    p->multiProcessorCount = 4;
    p->totalGlobalMem = (size_t)1 << 34;
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceGetAttribute(int *v, int, int) { return *v = 200 << 10, cudaSuccess; }
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, int) { return *s = (void *)1, cudaSuccess; }
static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, int) { return *e = (void *)1, cudaSuccess; }
static inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <typename T> static inline cudaError_t cudaMalloc(T **p, size_t n) {
    *p = (T *)aligned_alloc(256, (n + 255) / 256 * 256);
    memset((void *)*p, 0xcb, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMallocHost(void **p, size_t n) { return cudaMalloc(p, n); }
static inline cudaError_t cudaFree(void *p) { return free(p), cudaSuccess; }
static inline cudaError_t cudaFreeHost(void *p) { return free(p), cudaSuccess; }
static inline cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { return *f = *t = (size_t)1 << 34, cudaSuccess; }
/* What comes on the stream runs at once, or is kept while a graph is recorded. */
typedef std::vector<std::function<void()>> emu_steps;
extern emu_steps *emu_recording;
template <typename F> static inline cudaError_t emu_do(F step) {
    if (emu_recording)
        emu_recording->push_back(step);
    else
        step();
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, int, cudaStream_t) {
    return emu_do([=]() { memcpy(d, s, n); });
}
static inline cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t) {
    return emu_do([=]() { memset(d, v, n); });
}
/* As on a GPU, where a wait inside of a record makes it void. */
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return emu_recording ? cudaErrorInvalidValue : cudaSuccess;
}
typedef void (*cudaHostFn_t)(void *);
static inline cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t fn, void *ctx) {
    return emu_do([=]() { fn(ctx); });
}
static inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) {
    if (emu_recording) return cudaErrorInvalidValue;
    return emu_recording = new emu_steps, cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g) {
    if (!emu_recording) return cudaErrorInvalidValue;
    *g = emu_recording;
    return emu_recording = NULL, cudaSuccess;
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, int) {
    return *e = new emu_steps(*(emu_steps *)g), cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t g) { return delete (emu_steps *)g, cudaSuccess; }
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { return delete (emu_steps *)e, cudaSuccess; }
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t) {
    for (const std::function<void()> &step : *(emu_steps *)e) step();
    return cudaSuccess;
}
template <typename K> static inline cudaError_t cudaFuncSetAttribute(K, int, int) { return cudaSuccess; }
template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(P...), A... args) {
    const dim3 grid = c->gridDim, block = c->blockDim;
    const size_t smem = c->dynamicSmemBytes;
    return emu_do([=]() { emu_run(grid, block, smem, [=]() { kernel(args...); }); });
}
#define EMU_LAUNCH(k, ...) (k)(__VA_ARGS__)
