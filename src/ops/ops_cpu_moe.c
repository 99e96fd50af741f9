/* Routing, routed experts, and their sum with the shared expert. */
#include <math.h>
#include <string.h>

#include "num/mathf.h"
#include "ops/ops_cpu_moe.h"

/* ---- route ---- */

typedef struct route_job {
    int32_t *idx;
    float *wt;
    const float *logits;
    int rows, n, k;
    int32_t *order; /* [rows, k] by descending logit */
} route_job;

static void route_row(int32_t *idx, float *wt, int32_t *order, const float *x, int n, int k) {
    int have = 0;
    for (int i = 0; i < n; i++) {
        /* i comes after everything kept so far that is not less, because its index is higher. */
        if (have == k && !(x[i] > x[order[k - 1]] || (isnan(x[order[k - 1]]) && !isnan(x[i])))) continue;
        int at = have < k ? have++ : k - 1;
        for (; at > 0 && (x[i] > x[order[at - 1]] || (isnan(x[order[at - 1]]) && !isnan(x[i]))); at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    float sum = 0;
    for (int j = 0; j < k; j++) {
        wt[j] = num_exp(x[order[j]] - x[order[0]]);
        sum = sum + wt[j];
    }
    for (int j = 0; j < k; j++) { /* insertion sort of (index, weight) by index */
        const float w = wt[j] / sum;
        int at = j;
        for (; at > 0 && idx[at - 1] > order[j]; at--) {
            idx[at] = idx[at - 1];
            wt[at] = wt[at - 1];
        }
        idx[at] = order[j];
        wt[at] = w;
    }
}

static void route_part(void *ctx, int thread, int threads) {
    const route_job *j = ctx;
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (int64_t r = begin; r < end; r++)
        route_row(j->idx + r * j->k, j->wt + r * j->k, j->order + r * j->k, j->logits + r * j->n, j->n, j->k);
}

void cpu_route(ops *o, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k) {
    cpu *c = o->self;
    CHECK(k >= 1 && k <= n_experts, "top %d of %d", k, n_experts);
    route_job j = { .idx = idx, .wt = wt, .logits = logits, .rows = rows, .n = n_experts, .k = k };
    j.order = work_need(&c->shared, (size_t)rows * (size_t)k * sizeof *j.order);
    cpu_run(c, route_part, &j, rows * (2.0 * n_experts + 20.0 * k));
}

/* ---- experts ---- */

/* Cost of one row of gate and up for `pairs` inputs: reading it counts as much as eight products with it. */
static double row_cost(const group *g) { return 8.0 + (g->end - g->begin); }

static void sort_pairs(moe_job *j, int32_t *start, const int32_t *idx) {
    const int pairs = j->rows * j->k, count = j->ex->count;
    memset(start, 0, ((size_t)count + 1) * sizeof *start);
    for (int p = 0; p < pairs; p++) {
        CHECK(idx[p] >= 0 && idx[p] < count && (p % j->k == 0 || idx[p] > idx[p - 1]), "expert %d of %d", idx[p],
              count);
        start[idx[p] + 1]++;
    }
    for (int e = 0; e < count; e++) {
        if (start[e + 1]) {
            group *g = &j->groups[j->n_groups++];
            *g = (group){ .expert = e, .begin = start[e], .end = start[e] + start[e + 1], .before = j->cost };
            j->cost += row_cost(g) * j->ex->inter;
        }
        start[e + 1] += start[e];
    }
    for (int p = 0; p < pairs; p++) j->pair[start[idx[p]]++] = p;
}

/* Where thread t of `threads` begins: a group and a row of its gate and up. */
static void boundary(const moe_job *j, int t, int threads, int *g_out, int *row) {
    const double target = j->cost * t / threads;
    int g = 0;
    if (t == threads)
        g = j->n_groups;
    else
        while (g + 1 < j->n_groups && j->groups[g + 1].before <= target) g++;
    *g_out = g;
    *row = 0;
    if (g < j->n_groups) {
        const int units = (int)((target - j->groups[g].before) / row_cost(&j->groups[g]) / COL_GRAIN + 0.5);
        *row = (int)min_i64((int64_t)units * COL_GRAIN, j->ex->inter);
    }
}

/* Rows [i0, i1) of gate and up of one expert for all its pairs: h = silu(gate x) * up x. */
static void gate_up(const moe_job *j, const group *g, int i0, int i1, float *own) {
    const experts *ex = j->ex;
    const int n = ex->hidden, cols = i1 - i0;
    float *gathered = own, *up = own + (int64_t)PAIR_BLOCK * n;
    const void *gate_w = elem_at(ex->gate[g->expert], ex->type, (int64_t)i0 * n);
    const void *up_w = elem_at(ex->up[g->expert], ex->type, (int64_t)i0 * n);
    for (int p = g->begin; p < g->end; p += PAIR_BLOCK) {
        const int m = (int)min_i64(PAIR_BLOCK, g->end - p);
        const float *x = j->x + (int64_t)(j->pair[p] / j->k) * n;
        if (m > 1) {
            for (int i = 0; i < m; i++)
                memcpy(gathered + (int64_t)i * n, j->x + (int64_t)(j->pair[p + i] / j->k) * n, (size_t)n * sizeof *x);
            x = gathered;
        }
        float *h = j->h + (int64_t)p * ex->inter + i0;
        cpu_gemm(j->c, ex->type, h, ex->inter, x, n, gate_w, m, cols, n);
        cpu_gemm(j->c, ex->type, up, cols, x, n, up_w, m, cols, n);
        for (int64_t i = 0; i < m; i++, h += ex->inter) {
            j->c->k.silu_mul(h, h, up + i * cols, cols);
            if (j->hidden_out)
                memcpy(j->hidden_out + (int64_t)j->pair[p + i] * ex->inter + i0, h, (size_t)cols * sizeof *h);
        }
    }
}

/* Columns [c0, c1) of y: experts in increasing index, each with all its pairs. */
static void down(const moe_job *j, int c0, int c1, float *own) {
    const experts *ex = j->ex;
    const int n = ex->hidden, cols = c1 - c0;
    for (int64_t r = 0; r < j->rows; r++) memset(j->y + r * n + c0, 0, (size_t)cols * sizeof(float));
    for (const group *g = j->groups; g < j->groups + j->n_groups; g++) {
        const void *w = elem_at(ex->down[g->expert], ex->type, (int64_t)c0 * ex->inter);
        for (int p = g->begin; p < g->end; p += PAIR_BLOCK) {
            const int m = (int)min_i64(PAIR_BLOCK, g->end - p);
            cpu_gemm(j->c, ex->type, own, cols, j->h + (int64_t)p * ex->inter, ex->inter, w, m, cols, ex->inter);
            for (int64_t i = 0; i < m; i++) {
                const int32_t pair = j->pair[p + i];
                j->c->k.add_scaled(j->y + (int64_t)(pair / j->k) * n + c0, j->wt[pair], own + i * cols, cols);
            }
        }
    }
}

static void moe_part(void *ctx, int thread, int threads) {
    const moe_job *j = ctx;
    float *own = cpu_own(j->c, thread);
    const bool packed = j->ex->packed_in != NULL;
    int g, i, g_end, i_end;
    int64_t c0, c1;
    if (packed) {
        pool_share(packed_inputs(j), 1, thread, threads, &c0, &c1);
        packed_quantize_in(j, (int)c0, (int)c1);
        cpu_barrier(j->c, threads);
    }
    boundary(j, thread, threads, &g, &i);
    boundary(j, thread + 1, threads, &g_end, &i_end);
    for (; g < g_end || (g == g_end && i < i_end); g++, i = 0) {
        const int end = g < g_end ? j->ex->inter : i_end;
        if (i < end) (packed ? packed_gate_up : gate_up)(j, &j->groups[g], i, end, own);
    }
    cpu_barrier(j->c, threads);
    if (packed) {
        pool_share((int64_t)j->rows * j->k, 1, thread, threads, &c0, &c1);
        packed_quantize_down(j, (int)c0, (int)c1);
        cpu_barrier(j->c, threads);
    }
    pool_share(j->ex->hidden, COL_GRAIN, thread, threads, &c0, &c1);
    if (c0 < c1) (packed ? packed_down : down)(j, (int)c0, (int)c1, own);
}

void cpu_moe_hidden(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx,
                    const float *wt, int rows, int k) {
    cpu *c = o->self;
    if (rows <= 0) return;
    if (ex->gate_q && !ex->packed_in) {
        cpu_qmoe(o, y, hidden, x, ex, idx, wt, rows, k);
        return;
    }
    moe_job j = { .c = c, .y = y, .hidden_out = hidden, .x = x, .wt = wt, .ex = ex, .rows = rows, .k = k };
    const size_t pairs = (size_t)rows * (size_t)k, groups = pairs < (size_t)ex->count ? pairs : (size_t)ex->count;
    const size_t h_bytes = (pairs * (size_t)ex->inter * sizeof(float) + 63) & ~(size_t)63;
    const size_t g_bytes = groups * sizeof(group), p_bytes = pairs * sizeof(int32_t);
    const size_t act_bytes = ex->packed_in ? packed_act_bytes(&j) : 0;
    char *p =
        work_need(&c->shared, act_bytes + h_bytes + g_bytes + p_bytes + ((size_t)ex->count + 1) * sizeof(int32_t));
    if (ex->packed_in) packed_act_layout(&j, p);
    p += act_bytes;
    j.h = (float *)(void *)p;
    j.groups = (group *)(p + h_bytes);
    j.pair = (int32_t *)(p + h_bytes + g_bytes);
    sort_pairs(&j, (int32_t *)(p + h_bytes + g_bytes + p_bytes), idx);
    o->moe_calls++;
    o->moe_experts += j.n_groups;
    const size_t wide = (size_t)(ex->inter > ex->hidden ? ex->inter : ex->hidden);
    cpu_own_need(c, ex->packed_in ? packed_own_bytes(c, ex) : PAIR_BLOCK * ((size_t)ex->hidden + wide) * sizeof(float));
    cpu_run(c, moe_part, &j, j.cost * ex->hidden * 0.03);
}

void cpu_moe(ops *o, float *y, const float *x, const experts *ex, const int32_t *idx, const float *wt, int rows,
             int k) {
    cpu_moe_hidden(o, y, NULL, x, ex, idx, wt, rows, k);
}

/* ---- combine ---- */

typedef struct combine_job {
    cpu *c;
    float *x;
    const float *routed, *shared, *gate;
    int rows, n;
} combine_job;

static void combine_part(void *ctx, int thread, int threads) {
    const combine_job *j = ctx;
    const kern *k = &j->c->k;
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        const float a = j->gate ? num_sigmoid(j->gate[r]) : 1.0f;
        for (int64_t i = r * j->n, stop = i + j->n; i < stop;) {
            float t[256];
            const int64_t len = min_i64(256, stop - i);
            memcpy(t, j->routed + i, (size_t)len * sizeof *t);
            if (j->shared && j->gate)
                k->add_scaled(t, a, j->shared + i, len);
            else if (j->shared)
                k->add(t, j->shared + i, len);
            k->add(j->x + i, t, len);
            i += len;
        }
    }
}

void cpu_moe_combine(ops *o, float *x, const float *routed, const float *shared, const float *gate, int rows, int n) {
    combine_job j = { .c = o->self, .x = x, .routed = routed, .shared = shared, .gate = gate, .rows = rows, .n = n };
    cpu_run(j.c, combine_part, &j, 0.3 * rows * n);
}
