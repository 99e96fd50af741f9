/* Row ops: embedding, norms, elementwise, choosing the largest. */
#include "ops/cuda/dev.cuh"

template <typename T>
static __global__ void embed_kernel(float *y, const T *table, const int32_t *ids, int n_rows, int n) {
    wait_for_inputs();
    const int32_t id = ids[blockIdx.x];
    const bool in = id >= 0 && id < n_rows;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        y[(int64_t)blockIdx.x * n + i] = in ? load_elem(table, (int64_t)id * n + i) : 0.0f;
}

void gpu_embed(gpu *g, float *y, const gpu_mat *t, const int32_t *ids, int rows) {
    const dim3 grid((unsigned)rows);
    if (t->format == GPU_BF16)
        launch(g, embed_kernel<uint16_t>, grid, 256, 0, y, (const uint16_t *)t->data, ids, t->rows, t->cols);
    else if (t->format == GPU_F16)
        launch(g, embed_kernel<__half>, grid, 256, 0, y, (const __half *)t->data, ids, t->rows, t->cols);
    else
        launch(g, embed_kernel<float>, grid, 256, 0, y, (const float *)t->data, ids, t->rows, t->cols);
}

/* ---- norms ---- */

/* dot32(x, x) by the first warp, for the whole block. */
static __device__ float block_square(const float *x, int n) {
    __shared__ float ss;
    if (threadIdx.x < 32) {
        const float s = warp_dot32(x, x, n);
        if (threadIdx.x == 0) ss = s;
    }
    __syncthreads();
    return ss;
}

static __device__ __forceinline__ float norm_factor(float ss, int n, float eps) {
    return 1.0f / sqrtf(ss / (float)n + eps);
}

static __global__ void rmsnorm_kernel(float *y, const float *x, int64_t ldx, const float *w, int n, float eps,
                                      bool staged) {
    extern __shared__ float row[];
    wait_for_inputs();
    x += blockIdx.x * ldx;
    y += (int64_t)blockIdx.x * n;
    if (staged) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
        __syncthreads();
    }
    const float *at = staged ? row : x;
    const float r = norm_factor(block_square(at, n), n, eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = at[i] * r * w[i];
}

void gpu_rmsnorm(gpu *g, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps) {
    const bool staged = n <= 8192;
    launch(g, rmsnorm_kernel, dim3((unsigned)rows), 256, staged ? (size_t)n * 4 : 0, y, x, ldx, w, n, eps, staged);
}

/* One warp per head. */
static __global__ void gated_norm_kernel(float *y, const float *x, const float *z, const float *w, int64_t heads,
                                         int dim, float eps) {
    wait_for_inputs();
    const int64_t h = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (h >= heads) return;
    x += h * dim, y += h * dim, z += h * dim;
    const float r = norm_factor(warp_dot32(x, x, dim), dim, eps);
    for (int i = threadIdx.x % 32; i < dim; i += 32) y[i] = x[i] * r * w[i] * num_silu_inline(z[i]);
}

void gpu_gated_norm(gpu *g, float *y, const float *x, const float *z, const float *w, int64_t heads, int dim,
                    float eps) {
    launch(g, gated_norm_kernel, dim3(blocks_of(heads, 4)), 128, 0, y, x, z, w, heads, dim, eps);
}

/* ---- elementwise ---- */

static __device__ __forceinline__ int64_t thread_of_grid() {
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __global__ void add_kernel(float *y, const float *x, int64_t n) {
    wait_for_inputs();
    const int64_t i = thread_of_grid();
    if (i < n) y[i] = y[i] + x[i];
}
void gpu_add(gpu *g, float *y, const float *x, int64_t n) {
    launch(g, add_kernel, dim3(blocks_of(n, 256)), 256, 0, y, x, n);
}

static __global__ void silu_mul_kernel(float *y, const float *a, const float *u, int64_t n) {
    wait_for_inputs();
    const int64_t i = thread_of_grid();
    if (i < n) y[i] = num_silu_inline(a[i]) * u[i];
}
void gpu_silu_mul(gpu *g, float *y, const float *gate, const float *u, int64_t n) {
    launch(g, silu_mul_kernel, dim3(blocks_of(n, 256)), 256, 0, y, gate, u, n);
}

static __global__ void gather_kernel(float *y, const float *x, const int32_t *index, int n) {
    wait_for_inputs();
    const int64_t from = index[blockIdx.x];
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[(int64_t)blockIdx.x * n + i] = x[from * n + i];
}
void gpu_gather_rows(gpu *g, float *y, const float *x, const int32_t *index, int rows, int n) {
    launch(g, gather_kernel, dim3((unsigned)rows), 256, 0, y, x, index, n);
}

static __global__ void combine_kernel(float *x, const float *routed, const float *shared, const float *gate, int n,
                                      int64_t all) {
    wait_for_inputs();
    const int64_t i = thread_of_grid();
    if (i >= all) return;
    if (!shared)
        x[i] = x[i] + routed[i];
    else if (!gate)
        x[i] = x[i] + (routed[i] + shared[i]);
    else
        x[i] = x[i] + (routed[i] + num_sigmoid_inline(gate[i / n]) * shared[i]);
}
void gpu_moe_combine(gpu *g, float *x, const float *routed, const float *shared, const float *gate, int rows, int n) {
    const int64_t all = (int64_t)rows * n;
    launch(g, combine_kernel, dim3(blocks_of(all, 256)), 256, 0, x, routed, shared, gate, n, all);
}

/* ---- the largest ---- */

static __device__ uint64_t block_max(uint64_t v) {
    __shared__ uint64_t part[32];
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0;
    return warp_max(v);
}

static __global__ void argmax_kernel(int32_t *out, const float *x, int n) {
    wait_for_inputs();
    x += (int64_t)blockIdx.x * n;
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const uint64_t key = rank_key(x[i], (uint32_t)i);
        best = key > best ? key : best;
    }
    best = block_max(best);
    if (threadIdx.x == 0) out[blockIdx.x] = n > 0 ? (int32_t)(0xffffffffu - (uint32_t)best) : -1;
}
void gpu_argmax(gpu *g, int32_t *out, const float *x, int rows, int n) {
    launch(g, argmax_kernel, dim3((unsigned)rows), 1024, 0, out, x, n);
}

/* One warp per row; the place of an expert among the chosen is the number of chosen ones with a smaller index. */
static __global__ void route_kernel(int32_t *idx, float *wt, const float *logits, int n, int k) {
    extern __shared__ int32_t order[];
    wait_for_inputs();
    const int lane = (int)threadIdx.x;
    logits += (int64_t)blockIdx.x * n;
    idx += (int64_t)blockIdx.x * k;
    wt += (int64_t)blockIdx.x * k;
    uint64_t last = ~(uint64_t)0;
    for (int j = 0; j < k; j++) {
        uint64_t best = 0;
        for (int i = lane; i < n; i += 32) {
            const uint64_t key = rank_key(logits[i], (uint32_t)i);
            if (key < last && key > best) best = key;
        }
        last = warp_max(best);
        if (lane == 0) order[j] = (int32_t)(0xffffffffu - (uint32_t)last);
    }
    __syncwarp();
    const float top = logits[order[0]];
    float sum = 0;
    for (int j = 0; j < k; j++) sum = sum + num_exp_inline(logits[order[j]] - top);
    for (int j = lane; j < k; j += 32) {
        int place = 0;
        for (int i = 0; i < k; i++) place += order[i] < order[j];
        idx[place] = order[j];
        wt[place] = num_exp_inline(logits[order[j]] - top) / sum;
    }
}
void gpu_route(gpu *g, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k) {
    launch(g, route_kernel, dim3((unsigned)rows), 32, (size_t)(k + 4) * sizeof(int32_t), idx, wt, logits, n_experts, k);
}

/* Keys of the k best of one slice of a row, descending; 0 where there are no more. The slices' keys are merged by the same
 * kernel over keys. */
enum { SLICE = 2048, TOP_THREADS = 256 };

static __device__ void choose(uint64_t *out, const uint64_t *keys, int n, int k) {
    uint64_t last = ~(uint64_t)0;
    for (int j = 0; j < k; j++) {
        uint64_t best = 0;
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            if (keys[i] < last && keys[i] > best) best = keys[i];
        last = block_max(best);
        if (threadIdx.x == 0) out[j] = last;
        if (last == 0) {
            for (int i = j + (int)threadIdx.x; i < k; i += blockDim.x) out[i] = 0;
            return;
        }
    }
}

static __global__ void top_slice_kernel(uint64_t *keys, const float *logits, const uint64_t *allowed, int n, int k) {
    __shared__ uint64_t mine[SLICE];
    wait_for_inputs();
    const int first = (int)blockIdx.x * SLICE, row = (int)blockIdx.y, words = (n + 63) / 64;
    for (int i = threadIdx.x; i < SLICE; i += blockDim.x) {
        const int id = first + i;
        bool in = id < n;
        if (in && allowed) in = allowed[(int64_t)row * words + id / 64] >> id % 64 & 1;
        mine[i] = in ? rank_key(logits[(int64_t)row * n + id], (uint32_t)id) : 0;
    }
    __syncthreads();
    choose(keys + ((int64_t)row * gridDim.x + blockIdx.x) * k, mine, SLICE, k);
}

static __global__ void top_merge_kernel(int32_t *ids, float *values, uint64_t *scratch, const uint64_t *keys,
                                        const float *logits, const int32_t *finite, int n, int per_row, int k) {
    wait_for_inputs();
    const int row = (int)blockIdx.x;
    uint64_t *best = scratch + (int64_t)row * k;
    choose(best, keys + (int64_t)row * per_row, per_row, k);
    __syncthreads();
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        const bool none = !finite[row] || best[j] == 0;
        const int32_t id = (int32_t)(0xffffffffu - (uint32_t)best[j]);
        ids[row * k + j] = none ? -1 : id;
        values[row * k + j] = none ? quiet_nan() : logits[(int64_t)row * n + id];
    }
}

static __global__ void finite_kernel(int32_t *finite, const float *hidden, int cols) {
    wait_for_inputs();
    bool odd = false;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) odd |= !isfinite(hidden[(int64_t)blockIdx.x * cols + i]);
    odd = __syncthreads_or(odd);
    if (threadIdx.x == 0) finite[blockIdx.x] = !odd;
}
void gpu_finite(gpu *g, int32_t *finite, const float *hidden, int rows, int cols) {
    launch(g, finite_kernel, dim3((unsigned)rows), 256, 0, finite, hidden, cols);
}

void gpu_top(gpu *g, int32_t *ids, float *values, const float *logits, const uint64_t *allowed, const int32_t *finite,
             int rows, int n, int k) {
    const int slices = (int)blocks_of(n, SLICE);
    uint64_t *keys = (uint64_t *)gpu_work(g, GPU_WORK_D, (size_t)rows * (slices + 1) * k * sizeof *keys);
    if (!keys) return;
    uint64_t *best = keys + (int64_t)rows * slices * k;
    launch(g, top_slice_kernel, dim3((unsigned)slices, (unsigned)rows), TOP_THREADS, 0, keys, logits, allowed, n, k);
    launch(g, top_merge_kernel, dim3((unsigned)rows), 1024, 0, ids, values, best, keys, logits, finite, n, slices * k,
           k);
}
