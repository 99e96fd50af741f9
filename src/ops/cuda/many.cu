/* NVFP4 Linears and experts with quantized inputs for many rows: int8 products of tensor cores per block of 16, each times its
 * two scales into 64-bit sums. All sums are integers, so tiles and order do not show. */
#include "ops/cuda/many.cuh"
#include "ops/cuda/quant.cuh"

/* A block of threads computes 128 rows of the matrix against 32 WN rows of inputs, a warp 32 x 32; K in steps of 64, which are
 * four blocks of 16. A row of a step in shared memory is 64 bytes and 16 of padding: eight rows then meet all banks. */
enum { STEP = 64, PITCH = STEP + 16, PER_STEP = STEP / 16, WM = 4, TILE_N = 32 * WM };

typedef struct many_in {
    const int8_t *codes;   /* [rows][K] */
    const int32_t *scales; /* [rows][K / 16] */
    const float *factor;   /* [rows] */
} many_in;

/* Rows of inputs that one expert has, as far as they fit a tile: from `first` in the order by expert. */
typedef struct many_tile {
    int expert, first, n;
} many_tile;

typedef struct many_args {
    float *y;
    int64_t ldy;
    gpu_mat w; /* dense */
    many_in in;
    int rows, K, N;
    bool add;
    /* experts */
    gpu_experts ex;
    const many_tile *tiles;
    const int *n_tiles;
    const int32_t *order; /* pairs by expert */
    int in_div;           /* pair / in_div is its row of inputs */
} many_args;

enum many_kind { DENSE, MOE_IN, MOE_DOWN };

template <int WN> struct __align__(16) many_mem {
    int8_t w[2][TILE_N * PITCH], x[2][32 * WN * PITCH];
    int32_t ws[2][PER_STEP][TILE_N]; /* row 32 a + 8 j + g at 32 a + 4 g + j */
    int32_t xs[2][PER_STEP][32 * WN]; /* row 32 a + 8 j + 2 t + e at 32 a + 8 t + 2 j + e */
    int32_t row[32 * WN];            /* of the outputs; -1: none */
};
static __device__ __forceinline__ int ws_at(int r) { return (r & ~31) + (r & 7) * 4 + (r >> 3 & 3); }
static __device__ __forceinline__ int xs_at(int r) {
    return (r & ~31) + (r >> 1 & 3) * 8 + (r >> 3 & 3) * 2 + (r & 1);
}

/* Eight codes as int8. decode8 gives them plus 12. */
static __device__ __forceinline__ uint2 signed8(uint32_t w) {
    const codes8 c = decode8(w);
    return make_uint2(((c.lo | 0x80808080u) - 0x0c0c0c0cu) ^ 0x80808080u,
                      ((c.hi | 0x80808080u) - 0x0c0c0c0cu) ^ 0x80808080u);
}

/* What a thread brings into shared memory per step: 32 codes of a row of the matrix, 16 of a row of inputs, their scales. */
template <int WN> struct carrier {
    enum { THREADS = 32 * WM * WN, WEIGHTS = 2 * TILE_N / THREADS };
    const uint8_t *codes[WEIGHTS], *scales[WEIGHTS];
    const int8_t *x;
    const int32_t *xs;
    uint4 c[WEIGHTS], xc;
    uint16_t s[WEIGHTS];
    int32_t xsc;

    __device__ __forceinline__ void load(int step) {
#pragma unroll
        for (int i = 0; i < WEIGHTS; i++) {
            c[i] = *(const uint4 *)(codes[i] + (int64_t)step * (STEP / 2));
            s[i] = *(const uint16_t *)(scales[i] + (int64_t)step * PER_STEP);
        }
        xc = *(const uint4 *)(x + (int64_t)step * STEP);
        xsc = xs[step * PER_STEP];
    }
    __device__ __forceinline__ void store(many_mem<WN> *m, int buf) const {
#pragma unroll
        for (int i = 0; i < WEIGHTS; i++) {
            const int at = (int)threadIdx.x + i * THREADS, r = at / 2, half = at % 2;
            const uint2 a = signed8(c[i].x), b = signed8(c[i].y), d = signed8(c[i].z), e = signed8(c[i].w);
            uint4 *to = (uint4 *)&m->w[buf][r * PITCH + half * 32];
            to[0] = make_uint4(a.x, a.y, b.x, b.y);
            to[1] = make_uint4(d.x, d.y, e.x, e.y);
            m->ws[buf][2 * half][ws_at(r)] = e4m3_times_512((uint8_t)s[i]);
            m->ws[buf][2 * half + 1][ws_at(r)] = e4m3_times_512((uint8_t)(s[i] >> 8));
        }
        const int r = (int)threadIdx.x / 4, b = (int)threadIdx.x % 4;
        *(uint4 *)&m->x[buf][r * PITCH + b * 16] = xc;
        m->xs[buf][b][xs_at(r)] = xsc;
    }
};

/* acc[half of the warp's rows][8 columns each][as mma_s8 has c] */
template <int WN>
static __device__ __forceinline__ void many_step(int64_t (*acc)[4][4], const many_mem<WN> *m, int buf, int groups) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp % WM * 32, wn = warp / WM * 32;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int b = 0; b < PER_STEP; b++) {
        uint32_t a[4], x[4];
        load_rows32(a, &m->w[buf][(wm + lane) * PITCH + b * 16]);
        load_rows32(x, &m->x[buf][(wn + lane) * PITCH + b * 16]);
        const int4 ws = *(const int4 *)&m->ws[buf][b][wm + 4 * g];
        const int4 s0 = *(const int4 *)&m->xs[buf][b][wn + 8 * t], s1 = *(const int4 *)&m->xs[buf][b][wn + 8 * t + 4];
        const int xs[8] = { s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= groups) continue; /* the same for the whole warp */
            int c[4], d[4];
            mma_s8(c, a[0], a[1], x[j]);
            mma_s8(d, a[2], a[3], x[j]);
            const int e = xs[2 * j], f = xs[2 * j + 1]; /* products below 2^31 in either mode */
            acc[0][j][0] += (int64_t)(c[0] * e) * ws.x;
            acc[0][j][1] += (int64_t)(c[1] * f) * ws.x;
            acc[0][j][2] += (int64_t)(c[2] * e) * ws.y;
            acc[0][j][3] += (int64_t)(c[3] * f) * ws.y;
            acc[1][j][0] += (int64_t)(d[0] * e) * ws.z;
            acc[1][j][1] += (int64_t)(d[1] * f) * ws.z;
            acc[1][j][2] += (int64_t)(d[2] * e) * ws.w;
            acc[1][j][3] += (int64_t)(d[3] * f) * ws.w;
        }
    }
}

template <int WN, many_kind KIND, gpu_act ACT>
static __global__ void __launch_bounds__(32 * WM * WN, 4 / WN) many_kernel(many_args p) {
    enum { THREADS = 32 * WM * WN, WEIGHTS = carrier<WN>::WEIGHTS };
    __shared__ many_mem<WN> mem;
    wait_for_inputs();
    many_tile tile = { 0, (int)blockIdx.y * 32 * WN, p.rows - (int)blockIdx.y * 32 * WN };
    if (KIND != DENSE) {
        if ((int)blockIdx.y >= *p.n_tiles) return;
        tile = p.tiles[blockIdx.y];
    }
    const int n = tile.n < 32 * WN ? tile.n : 32 * WN;
    for (int i = threadIdx.x; i < 32 * WN; i += THREADS)
        mem.row[i] = i >= n ? -1 : KIND == DENSE ? tile.first + i : p.order[tile.first + i];
    /* rows of the matrix */
    carrier<WN> c;
    const uint8_t *block = KIND == DENSE ? NULL : p.ex.block + (int64_t)tile.expert * p.ex.stride;
    const uint8_t *codes = KIND == DENSE    ? (const uint8_t *)p.w.data
                           : KIND == MOE_IN ? block
                                            : block + p.ex.down_codes;
    const uint8_t *scales = KIND == DENSE    ? p.w.scales
                            : KIND == MOE_IN ? block + p.ex.gate_scales
                                             : block + p.ex.down_scales;
    const int n0 = (int)blockIdx.x * (KIND == MOE_IN ? TILE_N / 2 : TILE_N);
#pragma unroll
    for (int i = 0; i < WEIGHTS; i++) {
        const int at = (int)threadIdx.x + i * THREADS, r = at / 2, half = at % 2;
        /* gate and up: sixteen rows each per warp, so that a thread gets both of an output */
        int row = KIND == MOE_IN ? n0 + r / 32 * 16 + r % 16 : n0 + r;
        row = row < p.N ? row : p.N - 1;
        const bool up = KIND == MOE_IN && r % 32 >= 16;
        c.codes[i] = (up ? block + p.ex.up_codes : codes) + (int64_t)row * (p.K / 2) + half * 16;
        c.scales[i] = (up ? block + p.ex.up_scales : scales) + (int64_t)row * (p.K / 16) + half * 2;
    }
    {
        const int i = (int)threadIdx.x / 4, b = (int)threadIdx.x % 4, own = i < n ? i : n - 1;
        const int64_t from = KIND == DENSE ? tile.first + own : p.order[tile.first + own] / p.in_div;
        c.x = p.in.codes + from * p.K + b * 16;
        c.xs = p.in.scales + from * (p.K / 16) + b;
    }
    const int warp = threadIdx.x / 32, left = n - warp / WM * 32, groups = left <= 0 ? 0 : left >= 32 ? 4 : (left + 7) / 8;
    int64_t acc[2][4][4] = {};
    const int steps = p.K / STEP;
    c.load(0);
    for (int s = 0; s < steps; s++) {
        c.store(&mem, s % 2);
        __syncthreads(); /* one is enough: who writes a buffer again has passed the barrier behind its last reader */
        if (s + 1 < steps) c.load(s + 1);
        many_step<WN>(acc, &mem, s % 2, groups);
    }
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, wm = warp % WM, wn = warp / WM * 32;
    float s2 = p.w.scale_2, up_s2 = 0, in_scale = p.w.input_scale;
    if (KIND == MOE_IN) {
        s2 = p.ex.gate[tile.expert].scale_2;
        up_s2 = p.ex.up[tile.expert].scale_2;
        in_scale = p.ex.gate[tile.expert].input_scale;
    } else if (KIND == MOE_DOWN) {
        s2 = p.ex.down[tile.expert].scale_2;
        in_scale = p.ex.down[tile.expert].input_scale;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j >= groups) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = mem.row[wn + 8 * j + 2 * t + e];
            if (row < 0) continue;
            const float f = p.in.factor[KIND == DENSE ? row : row / p.in_div];
            float *y = p.y + row * p.ldy;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (KIND == MOE_IN) {
                    const int at = n0 + wm * 16 + 8 * h + g;
                    const float gate = finish_int(acc[0][j][2 * h + e], f, ACT, s2, in_scale);
                    const float up = finish_int(acc[1][j][2 * h + e], f, ACT, up_s2, in_scale);
                    if (at < p.N) y[at] = num_silu_inline(gate) * up;
                } else {
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const int at = n0 + wm * 32 + 16 * m + 8 * h + g;
                        const float v = finish_int(acc[m][j][2 * h + e], f, ACT, s2, in_scale);
                        if (at < p.N) y[at] = p.add ? y[at] + v : v;
                    }
                }
            }
        }
    }
}

/* ---- inputs ---- */

typedef struct quant_args {
    int8_t *codes;
    int32_t *scales;
    float *factor;
    const float *x;
    int64_t ldx;
    int K, div; /* row i is row i / div of x */
    float g;
    const gpu_mat *mats; /* not NULL: under input_scale of matrix idx[i] */
    const int32_t *idx;
} quant_args;

template <gpu_act ACT> static __global__ void quant_kernel(quant_args p) {
    extern __shared__ __align__(16) char act[];
    wait_for_inputs();
    const int64_t r = blockIdx.x;
    const float *x = p.x + r / p.div * p.ldx, g = p.mats ? p.mats[p.idx[r]].input_scale : p.g;
    const float factor =
        ACT == GPU_ACT_INT8 ? quantize_int8(act, x, p.K) : quantize_fp4(act, x, p.K, g) ? quiet_nan() : 1.0f;
    __syncthreads();
    for (int b = threadIdx.x; b < p.K / 16; b += blockDim.x) {
        *(uint4 *)(p.codes + r * p.K + b * 16) = *(const uint4 *)(act + code_at(b * 16));
        p.scales[r * (p.K / 16) + b] = act_blocks(act, p.K)[b].x;
    }
    if (threadIdx.x == 0) p.factor[r] = factor;
}

static size_t up256(size_t n) { return (n + 255) & ~(size_t)255; }

/* Work memory for `rows` quantized rows of K; false: out of memory, noted. */
static bool room(gpu *g, quant_args *q, int64_t rows, int K) {
    const size_t codes = up256((size_t)rows * K), scales = up256((size_t)rows * (K / 16) * 4);
    char *p = (char *)gpu_work(g, GPU_WORK_E, codes + scales + up256((size_t)rows * 4));
    if (!p) return false;
    q->codes = (int8_t *)p;
    q->scales = (int32_t *)(p + codes);
    q->factor = (float *)(p + codes + scales);
    q->K = K;
    return true;
}

static many_in quantize_rows(gpu *g, const quant_args &q, int64_t rows, gpu_act act) {
    int threads = (q.K / 8 + 31) / 32 * 32;
    if (threads > 512) threads = 512;
    const size_t smem = (size_t)act_row_bytes(q.K, act);
    if (act == GPU_ACT_INT8)
        launch(g, quant_kernel<GPU_ACT_INT8>, dim3((unsigned)rows), threads, smem, q);
    else
        launch(g, quant_kernel<GPU_ACT_FP4>, dim3((unsigned)rows), threads, smem, q);
    const many_in in = { q.codes, q.scales, q.factor };
    return in;
}

template <int WN, many_kind KIND> static void many_launch(gpu *g, const many_args &p, dim3 grid, gpu_act act) {
    if (act == GPU_ACT_INT8)
        launch(g, many_kernel<WN, KIND, GPU_ACT_INT8>, grid, 32 * WM * WN, 0, p);
    else
        launch(g, many_kernel<WN, KIND, GPU_ACT_FP4>, grid, 32 * WM * WN, 0, p);
}

static bool fits(const gpu_mat *w) {
    return w->format == GPU_NVFP4 && (w->act == GPU_ACT_FP4 || w->act == GPU_ACT_INT8) && w->cols % STEP == 0 &&
           ((uintptr_t)w->data & 15) == 0 && ((uintptr_t)w->scales & 1) == 0;
}

bool many_nvfp4(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows, bool add) {
    if (!g->many || rows < g->many || !fits(w)) return false;
    quant_args q = {};
    if (!room(g, &q, rows, w->cols)) return true;
    q.x = x;
    q.ldx = ldx;
    q.div = 1;
    q.g = w->input_scale;
    many_args p = {};
    p.y = y;
    p.ldy = ldy;
    p.w = *w;
    p.in = quantize_rows(g, q, rows, w->act);
    p.rows = rows;
    p.K = w->cols;
    p.N = w->rows;
    p.add = add;
    const unsigned across = blocks_of(w->rows, TILE_N), wide = blocks_of(rows, 64);
    if (rows > 32 && (int)(across * wide) >= g->multiprocessors)
        many_launch<2, DENSE>(g, p, dim3(across, wide), w->act);
    else
        many_launch<1, DENSE>(g, p, dim3(across, blocks_of(rows, 32)), w->act);
    return true;
}

/* ---- experts ---- */

enum { GROUP_THREADS = 1024, WIDTH = 32 };

/* Pairs in the order of their experts, and tiles of up to WIDTH of them. One block; the order of an expert's pairs is any. */
static __global__ void __launch_bounds__(GROUP_THREADS)
    group_pairs(int32_t *order, many_tile *tiles, int *n_tiles, const int32_t *idx, int pairs) {
    __shared__ int n[GROUP_THREADS], t[GROUP_THREADS];
    wait_for_inputs();
    const int e = (int)threadIdx.x;
    n[e] = 0;
    __syncthreads();
    for (int i = e; i < pairs; i += GROUP_THREADS) atomicAdd(&n[idx[i]], 1);
    __syncthreads();
    const int own = n[e], own_t = (own + WIDTH - 1) / WIDTH;
    t[e] = own_t;
    for (int d = 1; d < GROUP_THREADS; d *= 2) { /* sums up to and with e */
        __syncthreads();
        const int a = e >= d ? n[e - d] : 0, b = e >= d ? t[e - d] : 0;
        __syncthreads();
        n[e] += a;
        t[e] += b;
    }
    const int first = n[e] - own;
    for (int i = 0; i < own_t; i++) {
        const many_tile tile = { e, first + i * WIDTH, own - i * WIDTH };
        tiles[t[e] - own_t + i] = tile;
    }
    if (e == GROUP_THREADS - 1) *n_tiles = t[e];
    __syncthreads();
    n[e] = first;
    __syncthreads();
    for (int i = e; i < pairs; i += GROUP_THREADS) order[atomicAdd(&n[idx[i]], 1)] = i;
}

/* y [rows, n] = the weighted sum of each row's k outputs, in their order. */
static __global__ void weigh_kernel(float *y, const float *z, const float *wt, int n, int k) {
    wait_for_inputs();
    const int64_t r = blockIdx.y;
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    float out = 0;
    for (int j = 0; j < k; j++) out = out + wt[r * k + j] * z[(r * k + j) * n + i];
    y[r * n + i] = out;
}

bool many_moe(gpu *g, float *y, float *hidden, const float *x, const gpu_experts *ex, const int32_t *idx,
              const float *wt, int rows, int k) {
    if (!g->many || rows < g->many || !fits(&ex->like_in) || !fits(&ex->like_down) || !ex->uniform || !ex->same_in ||
        ex->count > GROUP_THREADS)
        return false;
    const int pairs = rows * k;
    const int64_t most = pairs / WIDTH + (pairs < ex->count ? pairs : ex->count) + 1;
    const size_t order = up256((size_t)pairs * 4), tiles = up256((size_t)most * sizeof(many_tile));
    const size_t out = up256((size_t)pairs * ex->hidden * 4);
    char *at = (char *)gpu_work(g, GPU_WORK_F, 256 + order + tiles + out);
    quant_args q = {};
    const int wide = ex->hidden > ex->inter ? ex->hidden : ex->inter;
    if (!at || !room(g, &q, pairs, wide)) return true;
    many_args p = {};
    p.n_tiles = (const int *)at;
    p.order = (const int32_t *)(at + 256);
    p.tiles = (const many_tile *)(at + 256 + order);
    float *z = (float *)(at + 256 + order + tiles);
    launch(g, group_pairs, dim3(1), GROUP_THREADS, 0, (int32_t *)p.order, (many_tile *)p.tiles, (int *)p.n_tiles, idx,
           pairs);
    p.ex = *ex;
    /* gate and up */
    q.x = x;
    q.ldx = q.K = ex->hidden;
    q.div = ex->one_in_scale ? 1 : k;
    q.g = ex->like_in.input_scale;
    q.mats = ex->one_in_scale ? NULL : ex->gate;
    q.idx = idx;
    p.in = quantize_rows(g, q, ex->one_in_scale ? rows : pairs, ex->like_in.act);
    p.in_div = ex->one_in_scale ? k : 1;
    p.y = hidden;
    p.ldy = p.N = ex->inter;
    p.K = ex->hidden;
    many_launch<1, MOE_IN>(g, p, dim3(blocks_of(ex->inter, TILE_N / 2), (unsigned)most), ex->like_in.act);
    /* down */
    q.x = hidden;
    q.ldx = q.K = ex->inter;
    q.div = 1;
    q.mats = ex->down;
    p.in = quantize_rows(g, q, pairs, ex->like_down.act);
    p.in_div = 1;
    p.y = z;
    p.ldy = p.N = ex->hidden;
    p.K = ex->inter;
    many_launch<1, MOE_DOWN>(g, p, dim3(blocks_of(ex->hidden, TILE_N), (unsigned)most), ex->like_down.act);
    launch(g, weigh_kernel, dim3(blocks_of(ex->hidden, 256), (unsigned)rows), 256, 0, y, (const float *)z, wt,
           ex->hidden, k);
    return true;
}

/* ---- BF16 ---- */

enum { PLAIN_WARPS = 4, PLAIN_M = 8, PLAIN_R = 4 };

/* A warp: four rows of the matrix against eight rows of inputs; lane l has the products of columns l, l + 32 ... */
static __global__ void __launch_bounds__(32 * PLAIN_WARPS)
    plain_many(float *y, int64_t ldy, const float *x, int64_t ldx, const uint16_t *w, int N, int K, int rows) {
    const int lane = threadIdx.x % 32, m0 = (int)blockIdx.y * PLAIN_M;
    const int n0 = ((int)blockIdx.x * PLAIN_WARPS + (int)threadIdx.x / 32) * PLAIN_R;
    wait_for_inputs();
    if (n0 >= N) return;
    const float *in[PLAIN_M];
    const uint16_t *from[PLAIN_R];
    float l[PLAIN_R * PLAIN_M] = {};
#pragma unroll
    for (int m = 0; m < PLAIN_M; m++) in[m] = x + (m0 + m < rows ? m0 + m : rows - 1) * ldx + lane;
#pragma unroll
    for (int r = 0; r < PLAIN_R; r++) from[r] = w + (int64_t)(n0 + r < N ? n0 + r : N - 1) * K + lane;
#pragma unroll 2
    for (int i = 0; i < K; i += 32) {
        float a[PLAIN_M], b[PLAIN_R];
#pragma unroll
        for (int m = 0; m < PLAIN_M; m++) a[m] = in[m][i];
#pragma unroll
        for (int r = 0; r < PLAIN_R; r++) b[r] = __uint_as_float((uint32_t)from[r][i] << 16);
#pragma unroll
        for (int r = 0; r < PLAIN_R; r++)
#pragma unroll
            for (int m = 0; m < PLAIN_M; m++) l[r * PLAIN_M + m] = fmaf(a[m], b[r], l[r * PLAIN_M + m]);
    }
    /* tree32 of all 32 sums at once: half of them go to the other lanes in each step. */
#pragma unroll
    for (int s = 0; s < 5; s++) {
        const int h = 16 >> s;
        const bool upper = lane & h;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (i >= h) continue;
            const float keep = upper ? l[i + h] : l[i], send = upper ? l[i] : l[i + h];
            l[i] = keep + __shfl_xor_sync(0xffffffffu, send, h);
        }
    }
    const int n = n0 + lane / PLAIN_M, m = m0 + lane % PLAIN_M;
    if (n < N && m < rows) y[m * ldy + n] = l[0];
}

bool many_plain(gpu *g, float *y, int64_t ldy, const float *x, int64_t ldx, const gpu_mat *w, int rows) {
    if (!g->many || rows < g->many || w->format != GPU_BF16 || w->cols % 32) return false;
    launch(g, plain_many, dim3(blocks_of(w->rows, PLAIN_WARPS * PLAIN_R), blocks_of(rows, PLAIN_M)), 32 * PLAIN_WARPS, 0,
           y, ldy, x, ldx, (const uint16_t *)w->data, w->rows, w->cols, rows);
    return true;
}
