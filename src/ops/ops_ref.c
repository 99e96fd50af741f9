/* The serial reference backend: docs/NUMERICS.md in plain loops, one rounding per written operation. It is written
 * for reading and shares no arithmetic with kern/, so that it is a second opinion on every kernel. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "num/bf16.h"
#include "num/fp8.h"
#include "num/mathf.h"
#include "ops/ops_head.h"
#include "ops/quant_linear.h"

typedef struct ref {
    work a, b, c, d, act;
    quant_kern k; /* at reference level */
} ref;

static float *floats(work *s, int64_t n) { return work_need(s, (size_t)n * sizeof(float)); }

/* ---- arithmetic (NUMERICS 2 and 3) ---- */

static float tree32(float *l) {
    for (int half = 16; half >= 1; half /= 2)
        for (int j = 0; j < half; j++) l[j] = l[j] + l[j + half];
    return l[0];
}

static float dot32(const float *a, const float *b, int64_t n) {
    float l[32] = { 0 };
    for (int64_t i = 0; i < n; i++) l[i % 32] = fmaf(a[i], b[i], l[i % 32]);
    return tree32(l);
}

static float sum32(const float *a, int64_t n) {
    float l[32] = { 0 };
    for (int64_t i = 0; i < n; i++) l[i % 32] = l[i % 32] + a[i];
    return tree32(l);
}

/* n elements of an array of type t from element `at` on, as float32. */
static void load(float *y, const void *p, dtype t, int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (t == DT_F32)
            y[i] = ((const float *)p)[at + i];
        else if (t == DT_BF16)
            y[i] = bf16_to_f32(((const uint16_t *)p)[at + i]);
        else if (t == DT_F8_E4M3)
            y[i] = e4m3_to_f32(((const uint8_t *)p)[at + i]);
        else
            y[i] = f16_to_f32(((const uint16_t *)p)[at + i]);
    }
}

static float norm_factor(const float *x, int n, float eps) { return 1.0f / sqrtf(dot32(x, x, n) / (float)n + eps); }

static void rmsnorm_row(float *y, const float *x, const float *w, int n, float eps) {
    const float r = norm_factor(x, n, eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

static void l2norm_row(float *y, const float *x, int n, float eps, float scale) {
    const float r = 1.0f / sqrtf(dot32(x, x, n) + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * r * scale;
}

/* a before b in a descending order with ties by index and NaN last. */
static bool ranks_before(const float *x, int a, int b) {
    if (isnan(x[a]) != isnan(x[b])) return isnan(x[b]);
    if (isnan(x[a]) || x[a] == x[b]) return a < b;
    return x[a] > x[b];
}

/* ---- rows ---- */

static void ref_embed(ops *o, float *y, const linear *table, const int32_t *ids, int rows) {
    (void)o;
    const int n = table->cols;
    for (int r = 0; r < rows; r++, y += n) {
        if (ids[r] >= 0 && ids[r] < table->rows)
            load(y, table->data, table->type, (int64_t)ids[r] * n, n);
        else
            memset(y, 0, (size_t)n * sizeof *y);
    }
}

static void ref_rmsnorm(ops *o, float *y, const float *x, int64_t ldx, const float *w, int rows, int n, float eps) {
    (void)o;
    for (int r = 0; r < rows; r++) rmsnorm_row(y + (int64_t)r * n, x + r * ldx, w, n, eps);
}

/* y[r * ldy] for one weight row starting at element `at`. */
static void column(ref *f, float *y, int64_t ldy, const float *x, int64_t ldx, const void *w, dtype t, int64_t at,
                   int rows, int k) {
    float *row = floats(&f->a, k);
    load(row, w, t, at, k);
    for (int r = 0; r < rows; r++) y[r * ldy] = dot32(x + r * ldx, row, k);
}

/* One row through a quantized Linear. */
static void quantized_row(ref *f, float *y, const float *x, const linear_desc *d) {
    void *act = work_need(&f->act, qact_bytes(d->cols));
    qact_make(&f->k, act, x, d->cols, d->q.act, d->q.input_scale);
    qlinear_rows(y, d, act, 0, d->rows);
}

static void ref_linear(ops *o, float *y, int64_t ldy, const float *x, int64_t ldx, const linear *w, int rows) {
    if (w->q.format != LINEAR_PLAIN) {
        const linear_desc d = linear_view(w);
        for (int r = 0; r < rows; r++) quantized_row(o->self, y + r * ldy, x + r * ldx, &d);
        return;
    }
    for (int n = 0; n < w->rows; n++)
        column(o->self, y + n, ldy, x, ldx, w->data, w->type, (int64_t)n * w->cols, rows, w->cols);
}

static void ref_add(ops *o, float *y, const float *x, int64_t n) {
    (void)o;
    for (int64_t i = 0; i < n; i++) y[i] = y[i] + x[i];
}

static void ref_silu_mul(ops *o, float *y, const float *g, const float *u, int64_t n) {
    (void)o;
    for (int64_t i = 0; i < n; i++) y[i] = num_silu(g[i]) * u[i];
}

static void ref_gather_rows(ops *o, float *y, const float *x, const int32_t *index, int rows, int n) {
    (void)o;
    for (int r = 0; r < rows; r++) memcpy(y + (int64_t)r * n, x + (int64_t)index[r] * n, (size_t)n * sizeof *y);
}

static void ref_argmax(ops *o, int32_t *out, const float *x, int rows, int n) {
    (void)o;
    for (int r = 0; r < rows; r++, x += n) {
        int best = n > 0 ? 0 : -1;
        for (int i = 1; i < n; i++)
            if (ranks_before(x, i, best)) best = i;
        out[r] = best;
    }
}

static bool ref_head_new(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e) {
    (void)o, (void)screen, (void)e;
    *out = head_plain(full, rows);
    return true;
}

static bool has_bit(const uint64_t *bits, int i) { return bits[i / 64] >> i % 64 & 1; }

/* The best of the ids in `mask` by repeated selection. */
static void top_of(int32_t *ids, float *logits, const float *all, const uint64_t *mask, int rows, int k) {
    for (int j = 0; j < k; j++) {
        int best = -1;
        for (int i = 0; i < rows && (j == 0 || ids[j - 1] >= 0); i++)
            if (has_bit(mask, i) && (j == 0 || ranks_before(all, ids[j - 1], i)) &&
                (best < 0 || ranks_before(all, i, best)))
                best = i;
        ids[j] = best;
        logits[j] = best < 0 ? NAN : all[best];
    }
}

static void ref_head_top(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *h, const float *hidden,
                         int rows, int k, const head_query *q) {
    ref *f = o->self;
    CHECK(k >= 0 && k <= HEAD_MAX_TOP, "top %d of a head", k);
    float *all = floats(&f->b, h->rows);
    uint64_t *mask = work_need(&f->c, ((size_t)h->rows + 63) / 64 * sizeof *mask);
    for (int r = 0; r < rows; r++, hidden += h->cols) {
        const bool finite = head_finite(hidden, h->cols);
        head_mask(mask, h->rows, q ? &q[r] : NULL);
        ref_linear(o, all, h->rows, hidden, h->cols, &h->full, 1);
        for (int i = 0; q && i < q[r].n_extra; i++) *extra_logits++ = finite ? all[q[r].extra[i]] : NAN;
        if (k == 0) continue;
        if (finite)
            top_of(ids + r * k, logits + r * k, all, mask, h->rows, k);
        else
            head_no_more(ids + r * k, logits + r * k, 0, k);
        h->counts.rows += finite;
        h->counts.full += finite;
    }
}

/* ---- GDN ---- */

/* window [taps - 1][channels] followed by one more row: drop the oldest. */
static void push(float *window, const float *row, int keep, int channels) {
    if (keep == 0) return;
    memmove(window, window + channels, (size_t)(keep - 1) * (size_t)channels * sizeof *window);
    memcpy(window + (int64_t)(keep - 1) * channels, row, (size_t)channels * sizeof *window);
}

static void ref_conv(ops *o, float *c, const float *u, const float *w, ops_conv *st, const ops_span *spans,
                     int n_spans) {
    ref *f = o->self;
    ops_check_state_spans(spans, n_spans);
    const int n = st->channels, keep = st->taps - 1;
    const size_t window_bytes = (size_t)keep * (size_t)n * sizeof(float);
    for (const ops_span *s = spans; s < spans + n_spans; s++) {
        float *window = st->window + (int64_t)s->slot * keep * n;
        float *pending = st->pending + (int64_t)s->slot * OPS_MAX_PENDING * n;
        for (int i = 0; i < s->commit; i++) push(window, pending + (int64_t)i * n, keep, n);
        float *run = floats(&f->a, (int64_t)st->taps * n);
        memcpy(run, window, window_bytes);
        for (int i = 0; i < s->rows; i++) {
            const float *row = u + (int64_t)(s->row0 + i) * n;
            for (int ch = 0; ch < n; ch++) {
                float acc = 0;
                for (int j = 0; j < keep; j++) acc = fmaf(w[(int64_t)ch * st->taps + j], run[(int64_t)j * n + ch], acc);
                acc = fmaf(w[(int64_t)ch * st->taps + keep], row[ch], acc);
                c[(int64_t)(s->row0 + i) * n + ch] = num_silu(acc);
            }
            push(run, row, keep, n);
        }
        if (!s->tentative)
            memcpy(window, run, window_bytes);
        else if (s->rows)
            memcpy(pending, u + (int64_t)s->row0 * n, (size_t)s->rows * (size_t)n * sizeof *u);
    }
}

/* One token of one value head; q NULL: only advance the state. */
static void gdn_step(float *out, float *S, const float *q, const float *k, const float *v, float beta, float decay,
                     int dk, int dv) {
    for (int c = 0; c < dv; c++) {
        float m = 0, sum = 0;
        for (int i = 0; i < dk; i++) {
            S[i * dv + c] = S[i * dv + c] * decay;
            m = fmaf(S[i * dv + c], k[i], m);
        }
        const float d = beta * (v[c] - m);
        for (int i = 0; i < dk; i++) {
            S[i * dv + c] = fmaf(k[i], d, S[i * dv + c]);
            if (q) sum = fmaf(S[i * dv + c], q[i], sum);
        }
        if (q) out[c] = sum;
    }
}

/* The rows of one span through one value head. qk: normalised q | k of the span's rows; gates: beta | decay. */
static void gdn_head(ref *f, float *out, const float *c, const float *qk, const float *gates, const ops_gdn *st,
                     const ops_span *s, int h) {
    const int hk = st->k_heads, hv = st->v_heads, dk = st->k_dim, dv = st->v_dim, kh = h / (hv / hk);
    const int64_t kd = (int64_t)hk * dk, vd = (int64_t)hv * dv, first = (int64_t)s->slot * OPS_MAX_PENDING;
    float *S = st->state + ((int64_t)s->slot * hv + h) * dk * dv;
    for (int64_t p = first; p < first + s->commit; p++)
        gdn_step(NULL, S, NULL, st->pend_k + p * kd + kh * dk, st->pend_v + p * vd + h * dv, st->pend_beta[p * hv + h],
                 st->pend_decay[p * hv + h], dk, dv);
    float *T = S;
    if (s->tentative) T = memcpy(floats(&f->d, (int64_t)dk * dv), S, (size_t)dk * (size_t)dv * sizeof *S);
    for (int64_t i = 0; i < s->rows; i++) {
        const float *v = c + (s->row0 + i) * (2 * kd + vd) + 2 * kd + h * dv;
        gdn_step(out + (s->row0 + i) * vd + h * dv, T, qk + i * 2 * kd + kh * dk, qk + i * 2 * kd + kd + kh * dk, v,
                 gates[i * 2 * hv + h], gates[i * 2 * hv + hv + h], dk, dv);
    }
}

static void gdn_pend(const float *c, const float *qk, const float *gates, ops_gdn *st, const ops_span *s) {
    const int hv = st->v_heads;
    const int64_t kd = (int64_t)st->k_heads * st->k_dim, vd = (int64_t)hv * st->v_dim;
    for (int64_t i = 0; i < s->rows; i++) {
        const int64_t p = (int64_t)s->slot * OPS_MAX_PENDING + i;
        memcpy(st->pend_k + p * kd, qk + i * 2 * kd + kd, (size_t)kd * sizeof(float));
        memcpy(st->pend_v + p * vd, c + (s->row0 + i) * (2 * kd + vd) + 2 * kd, (size_t)vd * sizeof(float));
        memcpy(st->pend_beta + p * hv, gates + i * 2 * hv, (size_t)hv * sizeof(float));
        memcpy(st->pend_decay + p * hv, gates + i * 2 * hv + hv, (size_t)hv * sizeof(float));
    }
}

static void ref_gdn(ops *o, float *out, const float *c, const float *a, const float *b, const float *neg_a,
                    const float *dt_bias, ops_gdn *st, const ops_span *spans, int n_spans) {
    ref *f = o->self;
    ops_check_state_spans(spans, n_spans);
    const int hk = st->k_heads, hv = st->v_heads, dk = st->k_dim;
    const int64_t kd = (int64_t)hk * dk, vd = (int64_t)hv * st->v_dim;
    const float q_scale = (float)(1.0 / sqrt((double)dk));
    for (const ops_span *s = spans; s < spans + n_spans; s++) {
        float *qk = floats(&f->b, s->rows * 2 * kd), *gates = floats(&f->c, (int64_t)s->rows * 2 * hv);
        for (int64_t i = 0; i < s->rows; i++) {
            const float *row = c + (s->row0 + i) * (2 * kd + vd);
            const int64_t g = (s->row0 + i) * hv;
            for (int h = 0; h < 2 * hk; h++)
                l2norm_row(qk + i * 2 * kd + h * dk, row + h * dk, dk, 1e-6f, h < hk ? q_scale : 1.0f);
            for (int h = 0; h < hv; h++) {
                gates[i * 2 * hv + h] = num_sigmoid(b[g + h]);
                gates[i * 2 * hv + hv + h] = num_exp(neg_a[h] * num_softplus(a[g + h] + dt_bias[h]));
            }
        }
        for (int h = 0; h < hv; h++) gdn_head(f, out, c, qk, gates, st, s, h);
        if (s->tentative) gdn_pend(c, qk, gates, st, s);
    }
}

static void ref_gated_norm(ops *o, float *y, const float *x, const float *z, const float *w, int rows, int heads,
                           int dim, float eps) {
    (void)o;
    for (int64_t h = 0; h < (int64_t)rows * heads; h++, x += dim, y += dim, z += dim) {
        const float r = norm_factor(x, dim, eps);
        for (int i = 0; i < dim; i++) y[i] = x[i] * r * w[i] * num_silu(z[i]);
    }
}

/* ---- attention ---- */

static void rope_head(float *x, const ops_rope *rope, const int32_t *pos) {
    for (int i = 0; i < rope->half; i++) {
        const int64_t at = (int64_t)pos[rope->axis[i]] * rope->half + i;
        const float c = rope->cos[at], s = rope->sin[at], x1 = x[i], x2 = x[i + rope->half];
        x[i] = fmaf(x1, c, -(x2 * s));
        x[i + rope->half] = fmaf(x2, c, x1 * s);
    }
}

static void ref_qk_rope(ops *o, float *q_out, float *k, const float *qg, const float *q_norm, const float *k_norm,
                        const int32_t *pos3, const ops_rope *rope, int rows, int heads, int kv_heads, int dim,
                        bool gated, float eps) {
    (void)o;
    CHECK(2 * rope->half <= dim, "rotary %d of head %d", 2 * rope->half, dim);
    for (int r = 0; r < rows; r++, pos3 += 3) {
        for (int h = 0; h < heads; h++, q_out += dim, qg += gated ? 2 * dim : dim) {
            rmsnorm_row(q_out, qg, q_norm, dim, eps);
            rope_head(q_out, rope, pos3);
        }
        for (int h = 0; h < kv_heads; h++, k += dim) {
            rmsnorm_row(k, k, k_norm, dim, eps);
            rope_head(k, rope, pos3);
        }
    }
}

static void store_kv(const ops_kv *kv, void *dst, const float *x, int64_t at, int n) {
    const float scale = dst == kv->k ? kv->k_scale : kv->v_scale;
    for (int i = 0; i < n; i++) {
        if (kv->type == DT_F32)
            ((float *)dst)[at + i] = x[i];
        else if (kv->type == DT_F8_E4M3)
            ((uint8_t *)dst)[at + i] = e4m3_from_f32(x[i] / scale);
        else
            ((uint16_t *)dst)[at + i] = bf16_from_f32(x[i]);
    }
}

static void ref_kv_append(ops *o, ops_kv *kv, const float *k, const float *v, const ops_span *spans, int n_spans) {
    (void)o;
    ops_check_kv_spans(kv, spans, n_spans);
    const int n = kv->kv_heads * kv->dim;
    for (const ops_span *s = spans; s < spans + n_spans; s++)
        for (int i = 0; i < s->rows; i++) {
            const int64_t at = kv_row(kv, s->slot, s->pos0 + i) * n;
            store_kv(kv, kv->k, k + (int64_t)(s->row0 + i) * n, at, n);
            store_kv(kv, kv->v, v + (int64_t)(s->row0 + i) * n, at, n);
        }
}

/* One tile of n <= 64 positions whose first K and V element is `at`; row is work space [dim]. */
static void tile(float *out, float *max, float *sum, const float *q, const ops_kv *kv, int64_t at, int n, float scale,
                 float *row) {
    const int dim = kv->dim;
    const int64_t ld = (int64_t)kv->kv_heads * dim;
    CHECK(n >= 1 && n <= OPS_TILE, "tile of %d", n);
    float p[OPS_TILE] = { 0 };
    bool nan = false;
    for (int j = 0; j < n; j++) {
        load(row, kv->k, kv->type, at + j * ld, dim);
        p[j] = dot32(q, row, dim) * scale;
        nan |= isnan(p[j]) != 0;
    }
    float m = -INFINITY;
    for (int j = 0; j < n; j++)
        if (p[j] > m) m = p[j];
    m = nan ? NAN : m + 0.0f;
    for (int j = 0; j < n; j++) p[j] = num_exp(p[j] - m);
    for (int d = 0; d < dim; d++) out[d] = 0;
    for (int j = 0; j < n; j++) {
        load(row, kv->v, kv->type, at + j * ld, dim);
        for (int d = 0; d < dim; d++) out[d] = fmaf(p[j], row[d], out[d]);
    }
    *max = m;
    *sum = sum32(p, n);
}

/* Positions 0..pos of one slot for one query head. */
static void attend(ref *f, float *y, const float *q, const ops_kv *kv, int slot, int kv_head, int pos, float scale) {
    const int dim = kv->dim;
    float *row = floats(&f->a, dim), *out = floats(&f->b, dim), M = -INFINITY, L = 0;
    for (int d = 0; d < dim; d++) y[d] = 0;
    for (int p = 0; p <= pos; p += OPS_TILE) {
        const int n = pos + 1 - p < OPS_TILE ? pos + 1 - p : OPS_TILE;
        const int64_t at = (kv_row(kv, slot, p) * kv->kv_heads + kv_head) * dim;
        float max, sum;
        tile(out, &max, &sum, q, kv, at, n, scale, row);
        const float M2 = max > M ? max : M, a = num_exp(M - M2), b = num_exp(max - M2);
        L = fmaf(L, a, sum * b);
        for (int d = 0; d < dim; d++) y[d] = fmaf(y[d], a, out[d] * b);
        M = M2;
    }
    for (int d = 0; d < dim; d++) y[d] = y[d] / L;
}

static void ref_attention(ops *o, float *y, const float *q, const float *qg, const ops_kv *kv, int heads, float scale,
                          const ops_span *spans, int n_spans) {
    ops_check_kv_spans(kv, spans, n_spans);
    CHECK(heads % kv->kv_heads == 0, "%d heads over %d", heads, kv->kv_heads);
    const int dim = kv->dim;
    const bool fp8 = kv->type == DT_F8_E4M3;
    if (fp8) scale = scale * kv->k_scale;
    for (const ops_span *s = spans; s < spans + n_spans; s++)
        for (int i = 0; i < s->rows; i++)
            for (int h = 0; h < heads; h++) {
                const int64_t at = (int64_t)(s->row0 + i) * heads + h;
                float *out = y + at * dim;
                attend(o->self, out, q + at * dim, kv, s->slot, h / (heads / kv->kv_heads), s->pos0 + i, scale);
                for (int d = 0; fp8 && d < dim; d++) out[d] = out[d] * kv->v_scale;
                for (int d = 0; qg && d < dim; d++) out[d] = out[d] * num_sigmoid(qg[at * 2 * dim + dim + d]);
            }
}

/* ---- MoE ---- */

static void ref_route(ops *o, int32_t *idx, float *wt, const float *logits, int rows, int n_experts, int k) {
    ref *f = o->self;
    CHECK(k >= 1 && k <= n_experts, "top %d of %d", k, n_experts);
    int *order = work_need(&f->a, (size_t)k * sizeof *order);
    for (int r = 0; r < rows; r++, idx += k, wt += k, logits += n_experts) {
        for (int j = 0; j < k; j++) { /* the best that comes after the previous one */
            int best = -1;
            for (int i = 0; i < n_experts; i++)
                if ((j == 0 || ranks_before(logits, order[j - 1], i)) && (best < 0 || ranks_before(logits, i, best)))
                    best = i;
            order[j] = best;
        }
        float sum = 0;
        for (int j = 0; j < k; j++) sum = sum + num_exp(logits[order[j]] - logits[order[0]]);
        for (int j = 0; j < k; j++) {
            int place = 0;
            for (int i = 0; i < k; i++) place += order[i] < order[j];
            idx[place] = order[j];
            wt[place] = num_exp(logits[order[j]] - logits[order[0]]) / sum;
        }
    }
}

/* One projection of expert e for one row. */
static void expert_rows(ref *f, float *y, const float *x, const experts *ex, const void *const *data,
                        const linear_quant *q, int e, bool down) {
    const linear_desc d = expert_view(ex, data, q, e, down);
    if (d.q.format != LINEAR_PLAIN)
        quantized_row(f, y, x, &d);
    else
        for (int i = 0; i < d.rows; i++) column(f, y + i, 0, x, 0, d.data, d.type, (int64_t)i * d.cols, 1, d.cols);
}

static void ref_moe_hidden(ops *o, float *y, float *hidden, const float *x, const experts *ex, const int32_t *idx,
                           const float *wt, int rows, int k) {
    ref *f = o->self;
    const int inter = ex->inter, n = ex->hidden;
    float *up = floats(&f->b, inter), *out = floats(&f->c, n);
    if (!hidden) hidden = floats(&f->d, (int64_t)rows * k * inter);
    for (int r = 0; r < rows; r++, x += n, y += n) {
        for (int i = 0; i < n; i++) y[i] = 0;
        for (int j = 0; j < k; j++, hidden += inter) {
            const int e = idx[(int64_t)r * k + j];
            CHECK(e >= 0 && e < ex->count && (j == 0 || e > idx[(int64_t)r * k + j - 1]), "expert %d at %d", e, j);
            expert_rows(f, hidden, x, ex, (const void *const *)ex->gate, ex->gate_q, e, false);
            expert_rows(f, up, x, ex, (const void *const *)ex->up, ex->up_q, e, false);
            for (int i = 0; i < inter; i++) hidden[i] = num_silu(hidden[i]) * up[i];
            expert_rows(f, out, hidden, ex, (const void *const *)ex->down, ex->down_q, e, true);
            for (int i = 0; i < n; i++) y[i] = y[i] + wt[(int64_t)r * k + j] * out[i];
        }
    }
}

static void ref_moe(ops *o, float *y, const float *x, const experts *ex, const int32_t *idx, const float *wt, int rows,
                    int k) {
    ref_moe_hidden(o, y, NULL, x, ex, idx, wt, rows, k);
}

static void ref_moe_combine(ops *o, float *x, const float *routed, const float *shared, const float *gate, int rows,
                            int n) {
    (void)o;
    for (int r = 0; r < rows; r++)
        for (int64_t i = (int64_t)r * n; i < (int64_t)(r + 1) * n; i++) {
            if (!shared)
                x[i] = x[i] + routed[i];
            else if (!gate)
                x[i] = x[i] + (routed[i] + shared[i]);
            else
                x[i] = x[i] + (routed[i] + num_sigmoid(gate[r]) * shared[i]);
        }
}

static void ref_close(ops *o) {
    ref *f = o->self;
    work_free(&f->a);
    work_free(&f->b);
    work_free(&f->c);
    work_free(&f->d);
    work_free(&f->act);
    free(f);
    free(o);
}

static const ops REF = {
    .device = "ref",
    .isa = "ref",
    .threads = 1,
    .close = ref_close,
    .embed = ref_embed,
    .rmsnorm = ref_rmsnorm,
    .linear = ref_linear,
    .add = ref_add,
    .silu_mul = ref_silu_mul,
    .gather_rows = ref_gather_rows,
    .argmax = ref_argmax,
    .head_new = ref_head_new,
    .head_top = ref_head_top,
    .conv = ref_conv,
    .gdn = ref_gdn,
    .gated_norm = ref_gated_norm,
    .qk_rope = ref_qk_rope,
    .kv_append = ref_kv_append,
    .attention = ref_attention,
    .route = ref_route,
    .moe = ref_moe,
    .moe_hidden = ref_moe_hidden,
    .moe_combine = ref_moe_combine,
};

bool ops_ref_open(ops **out, err *e) {
    (void)e;
    ops *o = xmalloc(sizeof *o);
    *o = REF;
    ref *f = xcalloc(1, sizeof *f);
    quant_kern_init(&f->k, ISA_REF);
    o->self = f;
    ops_host_fill(o);
    *out = o;
    return true;
}
