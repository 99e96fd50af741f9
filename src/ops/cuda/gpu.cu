/* Device, memory, errors, graphs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ops/cuda/dev.cuh"

enum { STAGE_BYTES = 1 << 20, PIECE_BYTES = 4 << 20, AHEAD_BYTES = 32 << 20 };

static gpu_fault fault_of(cudaError_t e) {
    switch (e) {
    case cudaSuccess: return GPU_OK;
    case cudaErrorInsufficientDriver: return GPU_OLD_DRIVER;
    case cudaErrorNoDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorInvalidDevice: return GPU_NO_DEVICE;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion: return GPU_NO_CODE;
    default: return GPU_FAILED;
    }
}

static __global__ void probe_kernel(int *p) { *p = 1; }

static gpu_fault look(gpu_info *info, cudaError_t *why) {
    int count = 0, driver = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&info->runtime);
    info->driver = driver;
    if (driver == 0) return *why = cudaErrorNoDevice, GPU_NO_DRIVER;
    *why = cudaGetDeviceCount(&count);
    if (*why != cudaSuccess) return fault_of(*why);
    if (count == 0) return *why = cudaErrorNoDevice, GPU_NO_DEVICE;
    cudaDeviceProp p;
    *why = cudaGetDeviceProperties(&p, 0);
    if (*why != cudaSuccess) return fault_of(*why);
    snprintf(info->name, sizeof info->name, "%.79s", p.name);
    info->major = p.major;
    info->minor = p.minor;
    info->multiprocessors = p.multiProcessorCount;
    info->total_bytes = p.totalGlobalMem;
    info->unified = p.integrated != 0;
    return GPU_OK;
}

/* A program without code for the device shows only when a kernel starts. */
static cudaError_t probe(gpu *g) {
    int *p = NULL;
    cudaError_t e = cudaMalloc(&p, sizeof *p);
    if (e != cudaSuccess) return e;
    probe_kernel<<<1, 1, 0, g->stream>>>(p);
    e = cudaGetLastError();
    if (e == cudaSuccess) e = cudaStreamSynchronize(g->stream);
    cudaFree(p);
    return e;
}

gpu_fault gpu_open(gpu **out, gpu_info *info, char *why) {
    cudaError_t e = cudaSuccess;
    *out = NULL;
    *info = gpu_info();
    const gpu_fault f = look(info, &e);
    if (f != GPU_OK) return snprintf(why, 256, "%s", cudaGetErrorString(e)), f;
    gpu *g = (gpu *)calloc(1, sizeof *g);
    e = g ? cudaSetDevice(0) : cudaErrorMemoryAllocation;
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = probe(g);
    if (e == cudaSuccess) e = cudaMallocHost(&g->stage, STAGE_BYTES);
    if (e == cudaSuccess) e = cudaMemGetInfo(&info->free_bytes, &info->total_bytes);
    if (e != cudaSuccess) {
        snprintf(why, 256, "%s", cudaGetErrorString(e));
        gpu_close(g);
        return fault_of(e);
    }
    g->work_changes = 1;
    g->multiprocessors = info->multiprocessors;
    cudaDeviceGetAttribute(&g->smem_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    const char *pdl = getenv("NIBBLE_CUDA_PDL");
    g->pdl = info->major >= 9 && !(pdl && pdl[0] == '0');
    const char *many = getenv("NIBBLE_CUDA_MANY");
    g->many = many ? atoi(many) : 64;
    *out = g;
    return GPU_OK;
}

static void ring_close(gpu *g) {
    for (int i = 0; i < GPU_RING; i++)
        if (g->ring_free[i]) cudaEventDestroy(g->ring_free[i]);
    if (g->ring) cudaFreeHost(g->ring);
}

void gpu_close(gpu *g) {
    if (!g) return;
    if (g->stream) cudaStreamSynchronize(g->stream);
    for (int i = 0; i < GPU_WORKS; i++) cudaFree(g->work[i].p);
    ring_close(g);
    if (g->host_work) cudaFreeHost(g->host_work);
    if (g->stage) cudaFreeHost(g->stage);
    if (g->stream) cudaStreamDestroy(g->stream);
    free(g);
}

/* ---- memory ---- */

void *gpu_alloc(gpu *g, size_t bytes) {
    void *p = NULL;
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    gpu_note(g, cudaMemsetAsync(p, 0, bytes, g->stream), "memset");
    return p;
}

void gpu_free(gpu *g, void *p) {
    if (!p) return;
    gpu_note(g, cudaStreamSynchronize(g->stream), "free");
    cudaFree(p);
}

size_t gpu_free_bytes(gpu *g) {
    size_t free_bytes = 0, total = 0;
    gpu_note(g, cudaMemGetInfo(&free_bytes, &total), "memory");
    return free_bytes;
}

/* Small sources go through a pinned ring, so that they may change at once and nothing waits until the ring is full. */
void gpu_upload(gpu *g, void *dst, const void *src, size_t bytes) {
    if (bytes == 0) return;
    if (bytes > STAGE_BYTES / 4) {
        gpu_note(g, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, g->stream), "upload");
        gpu_note(g, cudaStreamSynchronize(g->stream), "upload");
        return;
    }
    if (g->stage_at + bytes > STAGE_BYTES) {
        gpu_note(g, cudaStreamSynchronize(g->stream), "upload");
        g->stage_at = 0;
    }
    char *at = (char *)g->stage + g->stage_at;
    memcpy(at, src, bytes);
    g->stage_at += (bytes + 63) & ~(size_t)63;
    gpu_note(g, cudaMemcpyAsync(dst, at, bytes, cudaMemcpyHostToDevice, g->stream), "upload");
}

static bool ring_open(gpu *g) {
    if (g->ring) return true;
    cudaError_t e = cudaMallocHost(&g->ring, GPU_RING * PIECE_BYTES);
    for (int i = 0; i < GPU_RING && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&g->ring_free[i], cudaEventDisableTiming);
    if (e == cudaSuccess) return true;
    gpu_note(g, e, "upload");
    return false;
}

/* The kernel starts to read [p, p + bytes) of a mapping; other memory takes no notice. */
static void read_ahead(const char *p, size_t bytes) {
    const uintptr_t page = 4096, from = (uintptr_t)p / page * page;
    madvise((void *)from, (uintptr_t)p + bytes - from, MADV_WILLNEED);
}

void gpu_upload_bulk(gpu *g, void *dst, const void *src, size_t bytes) {
    if (bytes == 0 || !ring_open(g)) return;
    const char *from = (const char *)src;
    for (size_t at = 0; at < bytes && g->fault == cudaSuccess; at += PIECE_BYTES) {
        const size_t n = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES, ahead = at + AHEAD_BYTES;
        if (at == 0)
            read_ahead(from, bytes < AHEAD_BYTES + PIECE_BYTES ? bytes : AHEAD_BYTES + PIECE_BYTES);
        else if (ahead < bytes)
            read_ahead(from + ahead, bytes - ahead < PIECE_BYTES ? bytes - ahead : PIECE_BYTES);
        const unsigned i = g->ring_at++ % GPU_RING;
        char *piece = (char *)g->ring + i * (size_t)PIECE_BYTES;
        gpu_note(g, cudaEventSynchronize(g->ring_free[i]), "upload"); /* at once when never recorded */
        memcpy(piece, from + at, n);
        gpu_note(g, cudaMemcpyAsync((char *)dst + at, piece, n, cudaMemcpyHostToDevice, g->stream), "upload");
        gpu_note(g, cudaEventRecord(g->ring_free[i], g->stream), "upload");
    }
}

void gpu_download(gpu *g, void *dst, const void *src, size_t bytes) {
    if (bytes == 0) return;
    gpu_note(g, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, g->stream), "download");
    gpu_note(g, cudaStreamSynchronize(g->stream), "download");
    g->stage_at = 0;
}

void gpu_copy(gpu *g, void *dst, const void *src, size_t bytes) {
    if (bytes && dst != src)
        gpu_note(g, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, g->stream), "copy");
}

void gpu_zero(gpu *g, void *dst, size_t bytes) {
    if (bytes) gpu_note(g, cudaMemsetAsync(dst, 0, bytes, g->stream), "zero");
}

void *gpu_work(gpu *g, int place, size_t bytes) {
    if (g->work[place].bytes >= bytes) return g->work[place].p;
    gpu_note(g, cudaStreamSynchronize(g->stream), "work memory");
    cudaFree(g->work[place].p);
    g->work[place].p = NULL;
    g->work_changes++;
    g->work[place].bytes = 0;
    const size_t want = bytes + bytes / 4 + 4096;
    const cudaError_t e = cudaMalloc(&g->work[place].p, want);
    if (e != cudaSuccess) return gpu_note(g, e, "work memory"), (void *)NULL;
    g->work[place].bytes = want;
    return g->work[place].p;
}

unsigned gpu_work_changes(const gpu *g) { return g->work_changes; }

void *gpu_host_work(gpu *g, size_t bytes) {
    if (g->host_work_bytes >= bytes) return g->host_work;
    gpu_note(g, cudaStreamSynchronize(g->stream), "host work memory");
    if (g->host_work) cudaFreeHost(g->host_work);
    g->host_work = NULL;
    g->host_work_bytes = 0;
    g->work_changes++;
    const size_t want = bytes + bytes / 4 + 4096;
    const cudaError_t e = cudaMallocHost(&g->host_work, want);
    if (e != cudaSuccess) return gpu_note(g, e, "host work memory"), (void *)NULL;
    g->host_work_bytes = want;
    return g->host_work;
}

void gpu_fetch(gpu *g, void *host, const void *src, size_t bytes) {
    if (bytes) gpu_note(g, cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, g->stream), "fetch");
}

void gpu_send(gpu *g, void *dst, const void *host, size_t bytes) {
    if (bytes) gpu_note(g, cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, g->stream), "send");
}

void gpu_call(gpu *g, void (*fn)(void *ctx), void *ctx) {
    gpu_note(g, cudaLaunchHostFunc(g->stream, fn, ctx), "call");
}

bool gpu_wait(gpu *g) {
    gpu_note(g, cudaStreamSynchronize(g->stream), "step");
    return g->fault == cudaSuccess;
}

bool gpu_sync(gpu *g, char *why) {
    gpu_note(g, cudaStreamSynchronize(g->stream), "step");
    gpu_note(g, cudaGetLastError(), "step");
    g->stage_at = 0;
    if (g->fault == cudaSuccess) return true;
    snprintf(why, 256, "%s: %s", g->where, cudaGetErrorString(g->fault));
    return false;
}

/* ---- graphs ---- */

struct gpu_graph {
    cudaGraphExec_t exec;
};

void gpu_graph_begin(gpu *g) {
    gpu_note(g, cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal), "capture");
}

gpu_graph *gpu_graph_end(gpu *g) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaError_t e = cudaStreamEndCapture(g->stream, &graph);
    if (e == cudaSuccess && g->fault == cudaSuccess) e = cudaGraphInstantiate(&exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (!exec) {
        cudaGetLastError();
        g->fault = cudaSuccess;
        return NULL;
    }
    gpu_graph *out = (gpu_graph *)malloc(sizeof *out);
    out->exec = exec;
    return out;
}

void gpu_graph_run(gpu *g, const gpu_graph *graph) {
    gpu_note(g, cudaGraphLaunch(graph->exec, g->stream), "graph");
}

void gpu_graph_free(gpu_graph *graph) {
    if (!graph) return;
    cudaGraphExecDestroy(graph->exec);
    free(graph);
}
