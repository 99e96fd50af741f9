/* Experts over packed NVFP4 panels, and what they share with Linears (ops_cpu_project.c). */
#include <math.h>
#include <string.h>

#include "ops/ops_cpu_moe.h"
#include "ops/ops_cpu_packed.h"

void packed_act(const cpu *c, nv_act *a, const float *x, int K, const linear_quant *q) {
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

bool packed_same_act(const linear_quant *a, const linear_quant *b) {
    return a->act == b->act && (a->act != LINEAR_ACT_FP4 || a->input_scale == b->input_scale);
}

char *packed_planes(const cpu *c, char *space, const nv_act *a, int M, int Kp) {
    for (int m = 0; m < M; m += 16, space += nv_tile_bytes(Kp)) {
        const nv_act *rows[16];
        const int count = M - m < 16 ? M - m : 16;
        for (int i = 0; i < count; i++) rows[i] = &a[m + i];
        c->nv.planes(space, rows, count, Kp);
    }
    return space;
}

void packed_sums(const cpu *c, float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int K,
                 const nv_act *a, int M, linear_act act) {
    (act == LINEAR_ACT_FLOAT ? c->nv.dot_float : c->nv.dot)(y, ldy, panels, stride, n, nv_padded(K), a, M);
}

void packed_finish(float *y, const float *s, int n, const linear_quant *q, const nv_act *a) {
    const float unit = q->act == LINEAR_ACT_FLOAT ? 1.0f : q->act == LINEAR_ACT_INT8 ? 0x1p-9f : 0x1p-18f;
    const float factor = q->act == LINEAR_ACT_FLOAT  ? q->scale_2
                         : q->act == LINEAR_ACT_INT8 ? q->scale_2 * a->factor * 0.5f
                                                     : q->scale_2 * q->input_scale * 0.25f;
    int i = 0;
    for (; i + NV_ROWS <= n; i += NV_ROWS) { /* a fixed count and a copy, since y may be s: this becomes vectors */
        float t[NV_ROWS];
        for (int l = 0; l < NV_ROWS; l++) t[l] = s[i + l] * unit * factor;
        memcpy(y + i, t, sizeof t);
    }
    for (; i < n; i++) y[i] = s[i] * unit * factor;
    for (i = 0; i < n && a->bad; i++) y[i] = NAN;
}

/* ---- experts ---- */

nv_act *packed_acts_at(char *mem, int count, int K) {
    const size_t each = nv_act_bytes(K);
    nv_act *a = (nv_act *)(void *)mem;
    mem += ((size_t)count * sizeof *a + 63) & ~(size_t)63;
    for (int i = 0; i < count; i++) a[i] = nv_act_at(mem + (size_t)i * each, K);
    return a;
}

size_t packed_acts_bytes(size_t count, int K) {
    return ((count * sizeof(nv_act) + 63) & ~(size_t)63) + count * nv_act_bytes(K);
}

enum {
    PAIRS_AT_ONCE = 32,   /* rows of an expert at a time */
    PLANES_AT_ONCE = 128, /* the same through planes, which all of them share with one expansion of the weights */
    EXPERT_GEMM_K = 8192
};

/* Rows of an expert on their way through `n` panels of width K. Planes are made again for every share of an expert's
 * outputs: they pay for a few panels and more. */
typedef struct pass {
    const cpu *c;
    const uint8_t *panels;
    int64_t stride;
    int K, at_once, panels_at_once;
    linear_act act;
    char *space; /* planes, then what gemm needs; NULL: dot */
} pass;

static pass pass_of(const cpu *c, const uint8_t *panels, int n, int K, int rows, linear_act act, char *space) {
    const bool many = c->nv.gemm && act != LINEAR_ACT_FLOAT && rows >= PACKED_GEMM_ROWS && n >= 4 && K <= EXPERT_GEMM_K;
    const int pieces = (rows + PLANES_AT_ONCE - 1) / PLANES_AT_ONCE;
    return (pass){ .c = c,
                   .panels = panels,
                   .stride = nv_panel_bytes(K),
                   .K = K,
                   .at_once = many ? ((rows + pieces - 1) / pieces + 15) / 16 * 16 : PAIRS_AT_ONCE,
                   .panels_at_once = many ? PACKED_PANELS : n,
                   .act = act,
                   .space = many ? space : NULL };
}

/* Sums of panels [p, p + n) for M rows, whose planes end at `behind`. */
static void pass_sums(const pass *s, float *y, int p, int n, const nv_act *a, int M, char *behind) {
    const uint8_t *panels = s->panels + p * s->stride;
    if (s->space)
        s->c->nv.gemm(y, n * NV_ROWS, panels, s->stride, n, nv_padded(s->K), s->space, M, behind);
    else
        packed_sums(s->c, y, n * NV_ROWS, panels, s->stride, n, s->K, a, M, s->act);
}

int packed_inputs(const moe_job *j) { return j->ex->same_in ? j->rows : j->rows * j->k; }

size_t packed_act_bytes(const moe_job *j) {
    const size_t pairs = (size_t)j->rows * (size_t)j->k;
    const size_t in = packed_acts_bytes((size_t)packed_inputs(j), j->ex->hidden);
    return (j->ex->same_in ? in : 2 * in) + packed_acts_bytes(pairs, j->ex->inter);
}

void packed_act_layout(moe_job *j, char *mem) {
    const size_t in = packed_acts_bytes((size_t)packed_inputs(j), j->ex->hidden);
    j->gate_act = j->up_act = packed_acts_at(mem, packed_inputs(j), j->ex->hidden);
    mem += in;
    if (!j->ex->same_in) {
        j->up_act = packed_acts_at(mem, packed_inputs(j), j->ex->hidden);
        mem += in;
    }
    j->down_act = packed_acts_at(mem, j->rows * j->k, j->ex->inter);
}

/* Of one thread: gathered rows, sums, then space for planes and gemm. */
static size_t gathered_bytes(void) { return (PLANES_AT_ONCE * sizeof(nv_act) + 63) & ~(size_t)63; }

static size_t sums_bytes(const experts *ex) {
    const int wide =
        nv_panels(ex->inter) * 2 > nv_panels(ex->hidden) ? nv_panels(ex->inter) * 2 : nv_panels(ex->hidden);
    const size_t few = PAIRS_AT_ONCE * (size_t)wide, many = PLANES_AT_ONCE * PACKED_PANELS;
    return (few > many ? few : many) * NV_ROWS * sizeof(float);
}

size_t packed_own_bytes(const cpu *c, const experts *ex) {
    const int K = ex->hidden > ex->inter ? ex->hidden : ex->inter;
    const size_t both = gathered_bytes() + sums_bytes(ex);
    if (!c->nv.gemm || K > EXPERT_GEMM_K) return both;
    return both + PLANES_AT_ONCE / 16 * (size_t)nv_tile_bytes(nv_padded(K)) + c->nv.gemm_bytes;
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

/* Are gate and up of an expert given the same codes? */
static bool one_input(const experts *ex, int e) {
    return ex->gate_q[e].act != LINEAR_ACT_FP4 || ex->gate_q[e].input_scale == ex->up_q[e].input_scale;
}

void packed_quantize_in(const moe_job *j, int begin, int end) {
    const experts *ex = j->ex;
    for (int i = begin; i < end; i++) {
        if (ex->same_in) {
            packed_act(j->c, &j->gate_act[i], j->x + (int64_t)i * ex->hidden, ex->hidden, &ex->gate_q[0]);
            continue;
        }
        const int e = expert_at(j, i);
        const float *x = j->x + (int64_t)(j->pair[i] / j->k) * ex->hidden;
        packed_act(j->c, &j->gate_act[i], x, ex->hidden, &ex->gate_q[e]);
        if (!one_input(ex, e)) packed_act(j->c, &j->up_act[i], x, ex->hidden, &ex->up_q[e]);
    }
}

void packed_quantize_down(const moe_job *j, int begin, int end) {
    const experts *ex = j->ex;
    for (int i = begin; i < end; i++)
        packed_act(j->c, &j->down_act[i], j->h + (int64_t)i * ex->inter, ex->inter, &ex->down_q[expert_at(j, i)]);
}

/* h = silu(gate) * up for panels [p, p + n) of M pairs from `pair` on; sums of gate and up lie by turns. */
static void gated(const moe_job *j, const group *g, float *sum, int pair, int M, int c0, int cols, const nv_act *ga,
                  const nv_act *ua) {
    const experts *ex = j->ex;
    enum { PIECE = 16 * NV_ROWS };
    const int width = nv_panels(cols) * 2 * NV_ROWS;
    float up[PIECE];
    for (int i = 0; i < M; i++, sum += width) {
        float *h = j->h + (int64_t)(pair + i) * ex->inter + c0;
        for (int c = 0; c < cols; c += NV_ROWS) {
            const int w = (int)min_i64(NV_ROWS, cols - c), at = c % PIECE;
            packed_finish(h + c, sum + c * 2, w, &ex->gate_q[g->expert], &ga[i]);
            packed_finish(up + at, sum + c * 2 + NV_ROWS, w, &ex->up_q[g->expert], &ua[i]);
            if (c + w == cols || at + w == PIECE) j->c->k.silu_mul(h + c - at, h + c - at, up, at + w);
        }
        if (j->hidden_out)
            memcpy(j->hidden_out + (int64_t)j->pair[pair + i] * ex->inter + c0, h, (size_t)cols * sizeof *h);
    }
}

/* One input for gate and up: one stream over both. */
static void gate_up_one_input(const moe_job *j, const group *g, int i0, int i1, const uint8_t *panels, float *own) {
    const experts *ex = j->ex;
    const int n = nv_panels(i1) - i0 / NV_ROWS;
    nv_act *gathered = (nv_act *)(void *)own;
    float *sum = (float *)(void *)((char *)own + gathered_bytes());
    const pass s = pass_of(j->c, panels, 2 * n, ex->hidden, g->end - g->begin, ex->gate_q[g->expert].act,
                           (char *)sum + sums_bytes(ex));
    for (int p = g->begin; p < g->end; p += s.at_once) {
        const int m = (int)min_i64(s.at_once, g->end - p);
        for (int i = 0; i < m && ex->same_in; i++) gathered[i] = j->gate_act[j->pair[p + i] / j->k];
        const nv_act *acts = ex->same_in ? gathered : &j->gate_act[p];
        char *behind = s.space ? packed_planes(j->c, s.space, acts, m, nv_padded(ex->hidden)) : NULL;
        for (int q = 0; q < 2 * n; q += s.panels_at_once) {
            const int some = (int)min_i64(s.panels_at_once, 2 * n - q), c0 = i0 + q / 2 * NV_ROWS;
            pass_sums(&s, sum, q, some, acts, m, behind);
            gated(j, g, sum, p, m, c0, (int)min_i64(some / 2 * NV_ROWS, i1 - c0), acts, acts);
        }
    }
}

void packed_gate_up(const moe_job *j, const group *g, int i0, int i1, float *own) {
    const experts *ex = j->ex;
    const int n = nv_panels(i1) - i0 / NV_ROWS, width = 2 * n * NV_ROWS;
    const int64_t stride = nv_panel_bytes(ex->hidden);
    const uint8_t *panels = ex->packed_in + ((int64_t)g->expert * nv_panels(ex->inter) + i0 / NV_ROWS) * 2 * stride;
    const linear_act gate = ex->gate_q[g->expert].act, up = ex->up_q[g->expert].act;
    if (one_input(ex, g->expert)) {
        gate_up_one_input(j, g, i0, i1, panels, own);
        return;
    }
    for (int p = g->begin; p < g->end; p += PAIRS_AT_ONCE) {
        const int m = (int)min_i64(PAIRS_AT_ONCE, g->end - p);
        const nv_act *ga = &j->gate_act[p], *ua = &j->up_act[p];
        for (int q = 0; q < n; q++) {
            packed_sums(j->c, own + q * 32, width, panels + q * 2 * stride, stride, 1, ex->hidden, ga, m, gate);
            packed_sums(j->c, own + q * 32 + 16, width, panels + (q * 2 + 1) * stride, stride, 1, ex->hidden, ua, m,
                        up);
        }
        gated(j, g, own, p, m, i0, i1 - i0, ga, ua);
    }
}

/* The expert's outputs [c0, c0 + cols) for M pairs from `pair` on, weighted, onto their rows. */
static void down_added(const moe_job *j, const group *g, float *sum, int pair, int M, int c0, int cols) {
    const int width = nv_panels(cols) * NV_ROWS;
    for (int i = pair; i < pair + M; i++, sum += width) {
        packed_finish(sum, sum, cols, &j->ex->down_q[g->expert], &j->down_act[i]);
        j->c->k.add_scaled(j->y + (int64_t)(j->pair[i] / j->k) * j->ex->hidden + c0, j->wt[j->pair[i]], sum, cols);
    }
}

void packed_down(const moe_job *j, int c0, int c1, float *own) {
    const experts *ex = j->ex;
    const int n = nv_panels(c1) - c0 / NV_ROWS, Kp = nv_padded(ex->inter);
    for (int64_t r = 0; r < j->rows; r++) memset(j->y + r * ex->hidden + c0, 0, (size_t)(c1 - c0) * sizeof(float));
    for (const group *g = j->groups; g < j->groups + j->n_groups; g++) {
        const uint8_t *panels =
            ex->packed_down + ((int64_t)g->expert * nv_panels(ex->hidden) + c0 / NV_ROWS) * nv_panel_bytes(ex->inter);
        const pass s = pass_of(j->c, panels, n, ex->inter, g->end - g->begin, ex->down_q[g->expert].act,
                               (char *)own + sums_bytes(ex));
        for (int p = g->begin; p < g->end; p += s.at_once) {
            const int m = (int)min_i64(s.at_once, g->end - p);
            char *behind = s.space ? packed_planes(j->c, s.space, &j->down_act[p], m, Kp) : NULL;
            for (int q = 0; q < n; q += s.panels_at_once) {
                const int some = (int)min_i64(s.panels_at_once, n - q), at = c0 + q * NV_ROWS;
                pass_sums(&s, own, q, some, &j->down_act[p], m, behind);
                down_added(j, g, own, p, m, at, (int)min_i64(some * NV_ROWS, c1 - at));
            }
        }
    }
}
