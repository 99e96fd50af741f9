/* Linears and experts over packed NVFP4 panels: inputs are quantized once per row, then threads own panels. */
#include <math.h>
#include <string.h>

#include "ops/ops_cpu_moe.h"

/* Quantize one row as the weights' mode asks. */
static void make_act(const cpu *c, nv_act *a, const float *x, int K, const linear_quant *q) {
    enum { PIECE = 1024 };
    if (q->act == LINEAR_ACT_FLOAT) {
        memcpy(a->x, x, (size_t)K * sizeof *x);
        memset(a->x + K, 0, (size_t)(nv_padded(K) - K) * sizeof *x);
        a->bad = false;
    } else if (q->act == LINEAR_ACT_INT8) {
        c->nv.act_int8(a, x, K);
    } else {
        /* The packed form lands behind the row's own integers: 4 K bytes are there, 1.5 K are used. */
        uint8_t *codes = (uint8_t *)a->codes + nv_padded(K) * 2, *scales = codes + nv_padded(K) / 2;
        c->q.act_encode(codes, scales, x, K, q->input_scale);
        c->nv.act_fp4(a, codes, scales, K);
    }
}

/* The same through planes made on the spot; `space` holds them and gemm's own. */
static void sums_by_planes(const cpu *c, float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp,
                           const nv_act *a, int M, char *space) {
    const int64_t tile = nv_tile_bytes(Kp);
    for (int m = 0; m < M; m += 16) {
        const nv_act *rows[16];
        const int count = M - m < 16 ? M - m : 16;
        for (int i = 0; i < count; i++) rows[i] = &a[m + i];
        c->nv.planes(space + m / 16 * tile, rows, count, Kp);
    }
    c->nv.gemm(y, ldy, panels, stride, n, Kp, space, M, space + (M + 15) / 16 * tile);
}

/* Sums of panels [0, n) for M rows -> y, [M] rows of n * 16. */
static void sums(const cpu *c, float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int K,
                 const nv_act *a, int M, linear_act act) {
    (act == LINEAR_ACT_FLOAT ? c->nv.dot_float : c->nv.dot)(y, ldy, panels, stride, n, nv_padded(K), a, M);
}

/* From a sum to an output: exact power of two first, then one product (NUMERICS). */
static void finish(float *y, const float *s, int n, const linear_quant *q, const nv_act *a) {
    const float unit = q->act == LINEAR_ACT_FLOAT ? 1.0f : q->act == LINEAR_ACT_INT8 ? 0x1p-9f : 0x1p-18f;
    const float factor = q->act == LINEAR_ACT_FLOAT  ? q->scale_2
                         : q->act == LINEAR_ACT_INT8 ? q->scale_2 * a->factor * 0.5f
                                                     : q->scale_2 * q->input_scale * 0.25f;
    for (int i = 0; i < n; i++) y[i] = a->bad ? NAN : s[i] * unit * factor;
}

/* ---- y = x W^T ---- */

enum {
    ROWS_AT_ONCE = 64,
    PANELS = 16,       /* outputs that wait for their factor */
    GEMM_ROWS = 8,     /* from here on planes pay */
    GEMM_AT_ONCE = 256 /* rows that share an expansion of the weights */
};

typedef struct packed_job {
    cpu *c;
    float *y;
    const float *x;
    int64_t ldy, ldx;
    const linear *w;
    int rows;
    nv_act *acts;
    char *planes; /* NULL: dot */
} packed_job;

/* Rows [begin, end), begin a multiple of 16, and their planes where they are used. */
static void packed_inputs_made(const packed_job *j, int64_t begin, int64_t end) {
    const int K = j->w->cols, Kp = nv_padded(K);
    for (int64_t r = begin; r < end; r++) make_act(j->c, &j->acts[r], j->x + r * j->ldx, K, &j->w->q);
    for (int64_t r = begin; r < end && j->planes; r += 16) {
        const nv_act *rows[16];
        const int n = (int)min_i64(16, end - r);
        for (int i = 0; i < n; i++) rows[i] = &j->acts[r + i];
        j->c->nv.planes(j->planes + r / 16 * nv_tile_bytes(Kp), rows, n, Kp);
    }
}

static void packed_part(void *ctx, int thread, int threads) {
    const packed_job *j = ctx;
    const linear *w = j->w;
    const int K = w->cols;
    const int64_t stride = nv_panel_bytes(K);
    int64_t begin, end;
    pool_share(j->rows, j->planes ? 16 : 1, thread, threads, &begin, &end);
    packed_inputs_made(j, begin, end);
    cpu_barrier(j->c, threads);
    pool_share(nv_panels(w->rows), 1, thread, threads, &begin, &end);
    float *own = cpu_own(j->c, thread);
    const int at_once = j->planes ? GEMM_AT_ONCE : ROWS_AT_ONCE;
    float *space = own + GEMM_AT_ONCE * PANELS * NV_ROWS;
    for (int64_t p = begin; p < end; p += PANELS) {
        const int n = (int)min_i64(PANELS, end - p);
        const int cols = (int)min_i64(n * NV_ROWS, w->rows - p * NV_ROWS);
        for (int r = 0; r < j->rows; r += at_once) {
            const int m = (int)min_i64(at_once, j->rows - r);
            const uint8_t *panels = w->packed + p * stride;
            if (j->planes)
                j->c->nv.gemm(own, n * NV_ROWS, panels, stride, n, nv_padded(K),
                              j->planes + r / 16 * nv_tile_bytes(nv_padded(K)), m, space);
            else
                sums(j->c, own, n * NV_ROWS, panels, stride, n, K, j->acts + r, m, w->q.act);
            for (int i = 0; i < m; i++)
                finish(j->y + (r + i) * j->ldy + p * NV_ROWS, own + (int64_t)i * n * NV_ROWS, cols, &w->q,
                       &j->acts[r + i]);
        }
    }
}

static nv_act *acts_at(char *mem, int count, int K) {
    const size_t each = nv_act_bytes(K);
    nv_act *a = (nv_act *)(void *)mem;
    mem += ((size_t)count * sizeof *a + 63) & ~(size_t)63;
    for (int i = 0; i < count; i++) a[i] = nv_act_at(mem + (size_t)i * each, K);
    return a;
}

static size_t acts_bytes(size_t count, int K) {
    return ((count * sizeof(nv_act) + 63) & ~(size_t)63) + count * nv_act_bytes(K);
}

void cpu_packed_linear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    packed_job j = { .c = o->self, .y = y, .x = x, .ldy = ldy, .ldx = ldx, .w = w, .rows = rows };
    if (rows <= 0) return;
    const bool many = rows >= GEMM_ROWS && j.c->nv.gemm && w->q.act != LINEAR_ACT_FLOAT && w->cols <= 32768;
    const size_t acts = (acts_bytes((size_t)rows, w->cols) + 63) & ~(size_t)63;
    const size_t planes = many ? (size_t)(rows + 15) / 16 * (size_t)nv_tile_bytes(nv_padded(w->cols)) : 0;
    char *mem = work_need(&j.c->shared, acts + planes);
    j.acts = acts_at(mem, rows, w->cols);
    j.planes = many ? mem + acts : NULL;
    const size_t sums_bytes = (many ? GEMM_AT_ONCE : ROWS_AT_ONCE) * PANELS * NV_ROWS * sizeof(float);
    cpu_own_need(j.c, sums_bytes + (many ? j.c->nv.gemm_bytes : 0));
    cpu_run(j.c, packed_part, &j, 0.03 * w->rows * w->cols * (1 + 0.5 * rows));
}

/* ---- experts ---- */

enum { PAIRS_AT_ONCE = 32, EXPERT_GEMM_K = 8192 };

/* Planes are made again for every share of an expert's outputs: they pay for a few panels and more. */
static void expert_sums(const cpu *c, float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int K,
                        const nv_act *a, int M, linear_act act, char *space) {
    if (c->nv.gemm && act != LINEAR_ACT_FLOAT && M >= GEMM_ROWS && n >= 4 && K <= EXPERT_GEMM_K)
        sums_by_planes(c, y, ldy, panels, stride, n, nv_padded(K), a, M, space);
    else
        sums(c, y, ldy, panels, stride, n, K, a, M, act);
}

int packed_inputs(const moe_job *j) { return j->ex->same_in ? j->rows : j->rows * j->k; }

size_t packed_act_bytes(const moe_job *j) {
    const size_t pairs = (size_t)j->rows * (size_t)j->k;
    const size_t in = acts_bytes((size_t)packed_inputs(j), j->ex->hidden);
    return (j->ex->same_in ? in : 2 * in) + acts_bytes(pairs, j->ex->inter);
}

void packed_act_layout(moe_job *j, char *mem) {
    const size_t in = acts_bytes((size_t)packed_inputs(j), j->ex->hidden);
    j->gate_act = j->up_act = acts_at(mem, packed_inputs(j), j->ex->hidden);
    mem += in;
    if (!j->ex->same_in) {
        j->up_act = acts_at(mem, packed_inputs(j), j->ex->hidden);
        mem += in;
    }
    j->down_act = acts_at(mem, j->rows * j->k, j->ex->inter);
}

/* Of one thread: sums, gathered rows, then space for planes and gemm. */
static size_t sums_bytes(const experts *ex) {
    const int wide =
        nv_panels(ex->inter) * 2 > nv_panels(ex->hidden) ? nv_panels(ex->inter) * 2 : nv_panels(ex->hidden);
    return (PAIRS_AT_ONCE * ((size_t)wide * NV_ROWS * sizeof(float) + sizeof(nv_act)) + 63) & ~(size_t)63;
}

size_t packed_own_bytes(const cpu *c, const experts *ex) {
    const int K = ex->hidden > ex->inter ? ex->hidden : ex->inter;
    if (!c->nv.gemm || K > EXPERT_GEMM_K) return sums_bytes(ex);
    return sums_bytes(ex) + PAIRS_AT_ONCE / 16 * (size_t)nv_tile_bytes(nv_padded(K)) + c->nv.gemm_bytes;
}

/* The expert of the pair that stands at `at` in the order of experts. */
static int expert_at(const moe_job *j, int at) {
    int lo = 0, hi = j->n_groups - 1;
    while (lo < hi) {
        const int mid = (lo + hi + 1) / 2;
        if (j->groups[mid].begin <= at)
            lo = mid;
        else
            hi = mid - 1;
    }
    return j->groups[lo].expert;
}

void packed_quantize_in(const moe_job *j, int begin, int end) {
    const experts *ex = j->ex;
    for (int i = begin; i < end; i++) {
        if (ex->same_in) {
            make_act(j->c, &j->gate_act[i], j->x + (int64_t)i * ex->hidden, ex->hidden, &ex->gate_q[0]);
            continue;
        }
        const int e = expert_at(j, i);
        const float *x = j->x + (int64_t)(j->pair[i] / j->k) * ex->hidden;
        make_act(j->c, &j->gate_act[i], x, ex->hidden, &ex->gate_q[e]);
        make_act(j->c, &j->up_act[i], x, ex->hidden, &ex->up_q[e]);
    }
}

void packed_quantize_down(const moe_job *j, int begin, int end) {
    const experts *ex = j->ex;
    for (int i = begin; i < end; i++)
        make_act(j->c, &j->down_act[i], j->h + (int64_t)i * ex->inter, ex->inter, &ex->down_q[expert_at(j, i)]);
}

void packed_gate_up(const moe_job *j, const group *g, int i0, int i1, float *own) {
    const experts *ex = j->ex;
    const int n = nv_panels(i1) - i0 / NV_ROWS, cols = i1 - i0, width = 2 * n * NV_ROWS;
    const int64_t stride = nv_panel_bytes(ex->hidden);
    const uint8_t *panels = ex->packed_in + ((int64_t)g->expert * nv_panels(ex->inter) + i0 / NV_ROWS) * 2 * stride;
    const linear_quant *gate_q = &ex->gate_q[g->expert], *up_q = &ex->up_q[g->expert];
    nv_act *acts = (nv_act *)(void *)(own + (int64_t)PAIRS_AT_ONCE * width);
    for (int p = g->begin; p < g->end; p += PAIRS_AT_ONCE) {
        const int m = (int)min_i64(PAIRS_AT_ONCE, g->end - p);
        const nv_act *ga = &j->gate_act[p], *ua = &j->up_act[p];
        if (ex->same_in) { /* one stream over gate and up */
            for (int i = 0; i < m; i++) acts[i] = j->gate_act[j->pair[p + i] / j->k];
            ga = ua = acts;
            expert_sums(j->c, own, width, panels, stride, 2 * n, ex->hidden, acts, m, gate_q->act,
                        (char *)own + sums_bytes(ex));
        } else {
            for (int q = 0; q < n; q++) {
                sums(j->c, own + q * 32, width, panels + q * 2 * stride, stride, 1, ex->hidden, ga, m, gate_q->act);
                sums(j->c, own + q * 32 + 16, width, panels + (q * 2 + 1) * stride, stride, 1, ex->hidden, ua, m,
                     up_q->act);
            }
        }
        for (int i = 0; i < m; i++) {
            float *h = j->h + (int64_t)(p + i) * ex->inter + i0;
            for (int c = 0; c < cols; c += NV_ROWS) {
                const int w = (int)min_i64(NV_ROWS, cols - c);
                float up[NV_ROWS], *s = own + (int64_t)i * width + c * 2;
                finish(h + c, s, w, gate_q, &ga[i]);
                finish(up, s + NV_ROWS, w, up_q, &ua[i]);
                j->c->k.silu_mul(h + c, h + c, up, w);
            }
            if (j->hidden_out)
                memcpy(j->hidden_out + (int64_t)j->pair[p + i] * ex->inter + i0, h, (size_t)cols * sizeof *h);
        }
    }
}

void packed_down(const moe_job *j, int c0, int c1, float *own) {
    const experts *ex = j->ex;
    const int n = nv_panels(c1) - c0 / NV_ROWS, cols = c1 - c0, width = n * NV_ROWS;
    const int64_t stride = nv_panel_bytes(ex->inter);
    for (int64_t r = 0; r < j->rows; r++) memset(j->y + r * ex->hidden + c0, 0, (size_t)cols * sizeof(float));
    for (const group *g = j->groups; g < j->groups + j->n_groups; g++) {
        const uint8_t *panels = ex->packed_down + ((int64_t)g->expert * nv_panels(ex->hidden) + c0 / NV_ROWS) * stride;
        const linear_quant *q = &ex->down_q[g->expert];
        for (int p = g->begin; p < g->end; p += PAIRS_AT_ONCE) {
            const int m = (int)min_i64(PAIRS_AT_ONCE, g->end - p);
            expert_sums(j->c, own, width, panels, stride, n, ex->inter, &j->down_act[p], m, q->act,
                        (char *)own + sums_bytes(ex));
            for (int i = 0; i < m; i++) {
                const int32_t pair = j->pair[p + i];
                float *s = own + (int64_t)i * width;
                finish(s, s, cols, q, &j->down_act[p + i]);
                j->c->k.add_scaled(j->y + (int64_t)(pair / j->k) * ex->hidden + c0, j->wt[pair], s, cols);
            }
        }
    }
}
