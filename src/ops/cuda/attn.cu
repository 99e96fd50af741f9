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

/* ---- many rows: a block has four rows and the eight heads of a KV head, so that a tile is read and widened for all of them ---- */

enum { MANY_DIM = 256, MANY_ROWS = 4, MANY_HEADS = 8, MANY_Q = MANY_ROWS * MANY_HEADS, P_LD = TILE + 4, EACH = 4 };

template <typename T>
static __device__ __forceinline__ void widen_tile(float *to, const T *from, int64_t ld, int n) {
    const int d = (int)threadIdx.x;
#pragma unroll 8
    for (int j = 0; j < n; j++) to[j * MANY_DIM + d] = load_elem(from + d, j * ld);
}

/* tree32 of 32 values at once: lane l ends with that of v[l]. */
static __device__ __forceinline__ float tree_many(float *v) {
#pragma unroll
    for (int s = 0; s < 5; s++) {
        const int h = 16 >> s;
        const bool upper = threadIdx.x & h;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (i >= h) continue;
            const float keep = upper ? v[i + h] : v[i], send = upper ? v[i] : v[i + h];
            v[i] = keep + __shfl_xor_sync(0xffffffffu, send, h);
        }
    }
    return v[0];
}

/* One warp: scores of its four queries (heads side by side) against n positions of a tile -> p [EACH][P_LD]. */
static __device__ __forceinline__ void scores_many(float *p, const float *q, const float *k, int n, float scale) {
    const int lane = threadIdx.x % 32;
    float own[EACH][MANY_DIM / 32];
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int c = 0; c < MANY_DIM / 32; c++) own[i][c] = q[i * MANY_DIM + c * 32 + lane];
    for (int first = 0; first < n; first += 32 / EACH) {
        float s[32] = {};
#pragma unroll
        for (int j = 0; j < 32 / EACH; j++)
#pragma unroll
            for (int c = 0; c < MANY_DIM / 32; c++) {
                const float e = k[(first + j) * MANY_DIM + c * 32 + lane];
#pragma unroll
                for (int i = 0; i < EACH; i++) s[j * EACH + i] = fmaf(own[i][c], e, s[j * EACH + i]);
            }
        const float v = tree_many(s) * scale;
        if (first + lane / EACH < n) p[lane % EACH * P_LD + first + lane / EACH] = v;
    }
}

/* What tile_scores makes of scores, by one warp. */
static __device__ __forceinline__ tile_out soften(float *p, int n) {
    const int lane = threadIdx.x % 32;
    const float a = lane < n ? p[lane] : -INFINITY, b = lane + 32 < n ? p[lane + 32] : -INFINITY;
    const bool nan = __any_sync(0xffffffffu, isnan(a) || isnan(b));
    float m = b > a ? b : a;
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) {
        const float o = __shfl_xor_sync(0xffffffffu, m, half);
        m = o > m ? o : m;
    }
    m = nan ? quiet_nan() : m + 0.0f;
    float l = 0;
    if (lane < n) l = l + (p[lane] = num_exp_inline(a - m));
    if (lane + 32 < n) l = l + (p[lane + 32] = num_exp_inline(b - m));
    const tile_out t = { m, tree32(l) };
    return t;
}

static __device__ __forceinline__ int in_tile(int last, int pos) {
    const int n = last + 1 - pos;
    return n < 0 ? 0 : n < TILE ? n : TILE;
}

template <typename T> static __global__ void __launch_bounds__(THREADS, 2) attn_many_kernel(attn_args a) {
    extern __shared__ __align__(16) float mem[];
    __shared__ float fa[MANY_Q], fb[MANY_Q], total[MANY_Q];
    __shared__ gpu_row rows[MANY_ROWS];
    float *kv = mem, *p = mem + TILE * MANY_DIM;
    wait_for_inputs();
    const int kvh = (int)blockIdx.x, row0 = (int)blockIdx.y * MANY_ROWS, warp = threadIdx.x / 32, d = threadIdx.x;
    const int own = warp / 2; /* a warp's row; its four heads follow */
    const int64_t ld = (int64_t)a.kv.kv_heads * MANY_DIM;
    const gpu_row none = { -1, 0 };
    if (d < MANY_ROWS) rows[d] = row0 + d < a.s.rows ? a.s.of_row[row0 + d] : none;
    __syncthreads();
    const float *q = a.q + ((int64_t)(row0 + own) * a.heads + kvh * MANY_HEADS + warp % 2 * EACH) * MANY_DIM;
    float y[MANY_ROWS][MANY_HEADS] = {}, M[EACH], L[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) M[i] = -INFINITY, L[i] = 0;
    for (int first = 0, end; first < MANY_ROWS; first = end) { /* rows of one sequence have one page table */
        const int slot = rows[first].slot;
        int last = rows[first].pos;
        for (end = first + 1; end < MANY_ROWS && rows[end].slot == slot; end++)
            last = rows[end].pos > last ? rows[end].pos : last;
        if (slot < 0) continue;
        for (int pos = 0; pos <= last; pos += TILE) {
            const int64_t from = kv_at(a.kv, slot, pos, kvh);
            __syncthreads();
            widen_tile(kv, (const T *)a.kv.k + from, ld, in_tile(last, pos));
            __syncthreads();
            const int n = own >= first && own < end ? in_tile(rows[own].pos, pos) : 0;
            if (n > 0) {
                scores_many(p + warp * EACH * P_LD, q, kv, n, a.scale);
                __syncwarp();
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const tile_out t = soften(p + (warp * EACH + i) * P_LD, n);
                    float x, z;
                    merge_scalars(&M[i], &L[i], &x, &z, t.max, t.sum);
                    if (d % 32 == 0) fa[warp * EACH + i] = x, fb[warp * EACH + i] = z;
                }
            }
            __syncthreads();
            widen_tile(kv, (const T *)a.kv.v + from, ld, in_tile(last, pos));
            __syncthreads();
#pragma unroll
            for (int r = 0; r < MANY_ROWS; r++) {
                const int m = r >= first && r < end ? in_tile(rows[r].pos, pos) : 0;
                if (m == 0) continue;
                const float *w = p + r * MANY_HEADS * P_LD;
                float o[MANY_HEADS] = {};
                int j = 0;
                for (; j + 4 <= m; j += 4) {
                    float v[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) v[i] = kv[(j + i) * MANY_DIM + d];
#pragma unroll
                    for (int h = 0; h < MANY_HEADS; h++) {
                        const float4 s = *(const float4 *)&w[h * P_LD + j];
                        o[h] = fmaf(s.w, v[3], fmaf(s.z, v[2], fmaf(s.y, v[1], fmaf(s.x, v[0], o[h]))));
                    }
                }
                for (; j < m; j++) {
                    const float v = kv[j * MANY_DIM + d];
#pragma unroll
                    for (int h = 0; h < MANY_HEADS; h++) o[h] = fmaf(w[h * P_LD + j], v, o[h]);
                }
#pragma unroll
                for (int h = 0; h < MANY_HEADS; h++)
                    y[r][h] = fmaf(y[r][h], fa[r * MANY_HEADS + h], o[h] * fb[r * MANY_HEADS + h]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (d % 32 == 0) total[warp * EACH + i] = L[i];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < MANY_ROWS; r++) {
        if (rows[r].slot < 0) continue;
#pragma unroll
        for (int h = 0; h < MANY_HEADS; h++) {
            const int64_t at = (int64_t)(row0 + r) * a.heads + kvh * MANY_HEADS + h;
            a.y[at * MANY_DIM + d] = finish(a, y[r][h], total[r * MANY_HEADS + h], at, d);
        }
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
    const unsigned quads = blocks_of(rows, MANY_ROWS);
    if (g->many && rows >= g->many && dim == MANY_DIM && a.heads == MANY_HEADS * a.kv.kv_heads &&
        2 * (int)quads * a.kv.kv_heads >= g->multiprocessors) {
        launch(g, attn_many_kernel<T>, dim3((unsigned)a.kv.kv_heads, quads), THREADS,
               (TILE * MANY_DIM + MANY_Q * P_LD) * sizeof(float), a);
        return;
    }
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

/* Tiles as the caller's bound of positions has them, a power of two; work memory grows by a quarter more than is asked for. */
size_t gpu_attention_bytes(const gpu *g, int dim, int positions) {
    size_t tiles = 1;
    while (tiles * TILE < (size_t)positions) tiles *= 2;
    return tiles == 1 ? 0 : 4 * (size_t)g->multiprocessors * tiles * (size_t)(dim + 2) * sizeof(float) / 4 * 5;
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
