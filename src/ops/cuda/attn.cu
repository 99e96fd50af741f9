/* Attention: rotary embedding, KV cache, tiles of 64 positions merged left to right (NUMERICS 5). */
#include "ops/cuda/dev.cuh"

/* ---- norm and rotation: one warp per head ---- */

typedef struct rope_args {
    float *q_out, *k;
    const float *qg, *q_norm, *k_norm;
    const int32_t *pos3;
    const float *cos, *sin;
    const uint8_t *axis;
    int half, heads, kv_heads, dim;
    bool gated;
    float eps;
} rope_args;

static __global__ void qk_rope_kernel(rope_args p) {
    extern __shared__ float mem[];
    wait_for_inputs();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = (int)blockIdx.x * (blockDim.x / 32) + warp;
    const int64_t r = blockIdx.y;
    if (h >= p.heads + p.kv_heads) return;
    const bool is_q = h < p.heads;
    const int dim = p.dim;
    const float *x = is_q ? p.qg + (r * p.heads + h) * dim * (p.gated ? 2 : 1)
                          : p.k + (r * p.kv_heads + h - p.heads) * dim;
    const float *w = is_q ? p.q_norm : p.k_norm;
    float *out = is_q ? p.q_out + (r * p.heads + h) * dim : p.k + (r * p.kv_heads + h - p.heads) * dim;
    float *row = mem + (int64_t)warp * dim;
    const float f = 1.0f / sqrtf(warp_dot32(x, x, dim) / (float)dim + p.eps);
    for (int i = lane; i < dim; i += 32) row[i] = x[i] * f * w[i];
    __syncwarp();
    for (int i = lane; i < dim; i += 32) {
        if (i >= 2 * p.half) {
            out[i] = row[i];
        } else if (i < p.half) {
            const int64_t at = (int64_t)p.pos3[r * 3 + p.axis[i]] * p.half + i;
            const float c = p.cos[at], s = p.sin[at], x1 = row[i], x2 = row[i + p.half];
            out[i] = fmaf(x1, c, -(x2 * s));
            out[i + p.half] = fmaf(x2, c, x1 * s);
        }
    }
}

void gpu_qk_rope(gpu *g, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                 const int32_t *pos3, const float *cos, const float *sin, const uint8_t *axis, int half, int rows,
                 int heads, int kv_heads, int dim, bool gated, float eps) {
    const rope_args p = { q_out, k, qg, q_norm, k_norm, pos3, cos, sin, axis, half, heads, kv_heads, dim, gated, eps };
    launch(g, qk_rope_kernel, dim3(blocks_of(heads + kv_heads, 4), (unsigned)rows), 128, (size_t)dim * 4 * 4, p);
}

/* ---- the cache ---- */

enum { TILE = 64, THREADS = 256 }; /* a tile is a page of the cache */

static __device__ __forceinline__ int64_t kv_at(const gpu_kv &kv, int slot, int pos, int head) {
    const int64_t page = kv.pages[(int64_t)slot * kv.slot_pages + pos / TILE];
    return ((page * TILE + pos % TILE) * kv.kv_heads + head) * kv.dim;
}

static __device__ __forceinline__ void kv_store(const gpu_kv &kv, void *to, int64_t at, float x, float scale) {
    if (kv.type == GPU_F32)
        ((float *)to)[at] = x;
    else if (kv.type == GPU_FP8)
        ((uint8_t *)to)[at] = e4m3_from_f32_inline(x / scale);
    else
        ((uint16_t *)to)[at] = bf16_from_f32(x);
}

static __global__ void kv_append_kernel(gpu_kv kv, const float *k, const float *v, gpu_spans s) {
    wait_for_inputs();
    const int n = kv.kv_heads * kv.dim;
    const gpu_row r = s.of_row[blockIdx.x];
    if (r.slot < 0) return;
    const int64_t at = kv_at(kv, r.slot, r.pos, 0), from = (int64_t)blockIdx.x * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        kv_store(kv, kv.k, at + i, k[from + i], kv.k_scale);
        kv_store(kv, kv.v, at + i, v[from + i], kv.v_scale);
    }
}

void gpu_kv_append(gpu *g, const gpu_kv *kv, const float *k, const float *v, const gpu_spans *s) {
    launch(g, kv_append_kernel, dim3((unsigned)s->rows), 256, 0, *kv, k, v, *s);
}

/* ---- attention ---- */

typedef struct attn_args {
    float *y;
    const float *q, *qg;
    gpu_kv kv;
    int heads;
    float scale; /* k_scale folded in */
    gpu_spans s;
    float *part; /* split: [row][head][tile][dim], then max and sum of each */
    float *part_ms;
    int tiles;
} attn_args;

/* What one tile makes of q (shared): p and the block's o per dimension. D: dimensions per thread are d, d + THREADS ... */
typedef struct tile_out {
    float max, sum;
} tile_out;

template <typename T>
static __device__ tile_out tile_scores(float *p, const float *q, const T *k, int64_t ld, int n, int dim, float scale) {
    __shared__ float ms[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int j = warp; j < n; j += THREADS / 32) {
        const float s = warp_dot32(q, k + j * ld, dim) * scale;
        if (lane == 0) p[j] = s;
    }
    __syncthreads();
    if (warp == 0) {
        const float a = lane < n ? p[lane] : -INFINITY, b = lane + 32 < n ? p[lane + 32] : -INFINITY;
        bool nan = isnan(a) || isnan(b);
        float m = b > a ? b : a;
        nan = __any_sync(0xffffffffu, nan);
        for (int half = 16; half >= 1; half /= 2) {
            const float o = __shfl_xor_sync(0xffffffffu, m, half);
            m = o > m ? o : m;
        }
        m = nan ? quiet_nan() : m + 0.0f;
        float l = 0;
        if (lane < n) l = l + (p[lane] = num_exp_inline(a - m));
        if (lane + 32 < n) l = l + (p[lane + 32] = num_exp_inline(b - m));
        l = tree32(l);
        if (lane == 0) ms[0] = m, ms[1] = l;
    }
    __syncthreads();
    const tile_out t = { ms[0], ms[1] };
    return t;
}

template <typename T>
static __device__ __forceinline__ float tile_value(const float *p, const T *v, int64_t ld, int n) {
    float o = 0;
#pragma unroll 8
    for (int j = 0; j < n; j++) o = fmaf(p[j], load_elem(v, j * ld), o);
    return o;
}

static __device__ __forceinline__ float finish(const attn_args &a, float y, float L, int64_t at, int d) {
    y = y / L;
    if (a.kv.type == GPU_FP8) y = y * a.kv.v_scale;
    return a.qg ? y * num_sigmoid_inline(a.qg[at * 2 * a.kv.dim + a.kv.dim + d]) : y;
}

static __device__ __forceinline__ void merge_scalars(float *M, float *L, float *fa, float *fb, float max, float sum) {
    const float M2 = max > *M ? max : *M;
    *fa = num_exp_inline(*M - M2);
    *fb = num_exp_inline(max - M2);
    *L = fmaf(*L, *fa, sum * *fb);
    *M = M2;
}

/* One block per row and head, tile after tile: for many rows. */
template <typename T, int PER> static __global__ void __launch_bounds__(THREADS) attn_kernel(attn_args a) {
    extern __shared__ float q[];
    __shared__ float p[TILE];
    wait_for_inputs();
    const int h = (int)blockIdx.x, dim = a.kv.dim, kv_head = h / (a.heads / a.kv.kv_heads);
    const int64_t at = (int64_t)blockIdx.y * a.heads + h, ld = (int64_t)a.kv.kv_heads * dim;
    const gpu_row r = a.s.of_row[blockIdx.y];
    if (r.slot < 0) return;
    for (int d = threadIdx.x; d < dim; d += THREADS) q[d] = a.q[at * dim + d];
    float y[PER] = {}, M = -INFINITY, L = 0;
    for (int pos = 0; pos <= r.pos; pos += TILE) {
        const int n = r.pos + 1 - pos < TILE ? r.pos + 1 - pos : TILE;
        const int64_t from = kv_at(a.kv, r.slot, pos, kv_head);
        __syncthreads();
        const tile_out t = tile_scores(p, q, (const T *)a.kv.k + from, ld, n, dim, a.scale);
        float fa, fb;
        merge_scalars(&M, &L, &fa, &fb, t.max, t.sum);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int d = (int)threadIdx.x + i * THREADS;
            if (d < dim) y[i] = fmaf(y[i], fa, tile_value(p, (const T *)a.kv.v + from + d, ld, n) * fb);
        }
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int d = (int)threadIdx.x + i * THREADS;
        if (d < dim) a.y[at * dim + d] = finish(a, y[i], L, at, d);
    }
}

/* One block per row, head and tile; the tiles of a row and head are merged by the kernel behind it: for few rows. */
template <typename T> static __global__ void __launch_bounds__(THREADS) attn_part_kernel(attn_args a) {
    extern __shared__ float q[];
    __shared__ float p[TILE];
    wait_for_inputs();
    const int h = (int)blockIdx.y, dim = a.kv.dim, kv_head = h / (a.heads / a.kv.kv_heads);
    const int64_t at = (int64_t)blockIdx.z * a.heads + h, ld = (int64_t)a.kv.kv_heads * dim;
    const gpu_row r = a.s.of_row[blockIdx.z];
    if (r.slot < 0) return;
    for (int d = threadIdx.x; d < dim; d += THREADS) q[d] = a.q[at * dim + d];
    for (int tile = (int)blockIdx.x; tile * TILE <= r.pos; tile += (int)gridDim.x) {
        const int pos = tile * TILE, n = r.pos + 1 - pos < TILE ? r.pos + 1 - pos : TILE;
        const int64_t from = kv_at(a.kv, r.slot, pos, kv_head), to = at * a.tiles + tile;
        __syncthreads();
        const tile_out t = tile_scores(p, q, (const T *)a.kv.k + from, ld, n, dim, a.scale);
        for (int d = threadIdx.x; d < dim; d += THREADS)
            a.part[to * dim + d] = tile_value(p, (const T *)a.kv.v + from + d, ld, n);
        if (threadIdx.x == 0) a.part_ms[to * 2] = t.max, a.part_ms[to * 2 + 1] = t.sum;
    }
}

static __global__ void __launch_bounds__(THREADS) attn_merge_kernel(attn_args a) {
    wait_for_inputs();
    const int h = (int)blockIdx.x, dim = a.kv.dim;
    const int64_t at = (int64_t)blockIdx.y * a.heads + h;
    const gpu_row r = a.s.of_row[blockIdx.y];
    if (r.slot < 0) return;
    for (int d = threadIdx.x; d < dim; d += THREADS) {
        float y = 0, M = -INFINITY, L = 0;
        for (int tile = 0; tile * TILE <= r.pos; tile++) {
            const int64_t from = at * a.tiles + tile;
            float fa, fb;
            merge_scalars(&M, &L, &fa, &fb, a.part_ms[from * 2], a.part_ms[from * 2 + 1]);
            y = fmaf(y, fa, a.part[from * dim + d] * fb);
        }
        a.y[at * dim + d] = finish(a, y, L, at, d);
    }
}

template <typename T> static void attend(gpu *g, attn_args a) {
    const int rows = a.s.rows, dim = a.kv.dim;
    const size_t smem = (size_t)dim * sizeof(float);
    a.tiles = a.s.max_pos / TILE + 1;
    if ((int64_t)rows * a.heads >= 4 * g->multiprocessors || a.tiles == 1) {
        const dim3 grid((unsigned)a.heads, (unsigned)rows);
        if (dim <= THREADS)
            launch(g, attn_kernel<T, 1>, grid, THREADS, smem, a);
        else if (dim <= 4 * THREADS)
            launch(g, attn_kernel<T, 4>, grid, THREADS, smem, a);
        else
            gpu_note(g, cudaErrorInvalidValue, "attention head");
        return;
    }
    const int64_t parts = (int64_t)rows * a.heads * a.tiles;
    a.part = (float *)gpu_work(g, GPU_WORK_B, (size_t)parts * (size_t)(dim + 2) * sizeof(float));
    if (!a.part) return;
    a.part_ms = a.part + parts * dim;
    const unsigned across = a.tiles < 1024 ? (unsigned)a.tiles : 1024u;
    launch(g, attn_part_kernel<T>, dim3(across, (unsigned)a.heads, (unsigned)rows), THREADS, smem, a);
    launch(g, attn_merge_kernel, dim3((unsigned)a.heads, (unsigned)rows), THREADS, 0, a);
}

void gpu_attention(gpu *g, float *y, const float *q, const float *qg, const gpu_kv *kv, int heads, float scale,
                   const gpu_spans *s) {
    const attn_args a = { y, q, qg, *kv, heads, kv->type == GPU_FP8 ? scale * kv->k_scale : scale, *s, NULL, NULL, 0 };
    if (kv->type == GPU_F32)
        attend<float>(g, a);
    else if (kv->type == GPU_FP8)
        attend<uint8_t>(g, a);
    else
        attend<uint16_t>(g, a);
}
