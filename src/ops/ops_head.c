/* Heads: the 8-bit copy and its bounds. The proof is in docs/NUMERICS.md 8; names here follow it. */
#include "ops/ops_head.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Above what float64 sums of 65536 squares and square roots can lose. */
static const double WIDER = 1 + 0x1p-30;
/* Norms of rows and inputs that are screened: no product or sum of the exact dot can overflow, no step is subnormal. */
static const double MAX_ROW_NORM = 0x1p100, MAX_INPUT_NORM = 0x1p26;
static const float MIN_INPUT = 0x1p-100f;

lm_head *head_plain(const linear *full, int rows) {
    CHECK(rows > 0 && rows <= full->rows, "a head of %d rows over %d", rows, full->rows);
    CHECK(full->q.format == LINEAR_PLAIN || rows == full->rows, "a part of a quantized head");
    lm_head *h = xcalloc(1, sizeof *h);
    *h = (lm_head){ .full = *full, .rows = rows, .cols = full->cols, .stride = screen_stride(full->cols) };
    h->full.rows = rows;
    return h;
}

bool head_room(lm_head *h, ops *o, err *e) {
    const size_t rows = (size_t)h->rows, part = (rows * sizeof(float) + 63) & ~(size_t)63;
    h->bytes = rows * (size_t)h->stride + 4 * part;
    if (!o->mem_new(o, &h->block, h->bytes, e)) return false;
    h->codes = h->block;
    char *at = (char *)h->block + rows * (size_t)h->stride;
    h->scale = (float *)(void *)at;
    h->per_norm = (float *)(void *)(at + part);
    h->per_rest = (float *)(void *)(at + 2 * part);
    h->sums = (int32_t *)(void *)(at + 3 * part);
    return true;
}

static float round_up(double x) {
    const float f = (float)x;
    return (double)f < x ? nextafterf(f, INFINITY) : f;
}

/* Relative rounding error of dot32 over K elements: K / 32 fmas of a lane, then 5 additions. */
static double dot32_gamma(int K) {
    const int steps = (K + 31) / 32 + 5;
    const double n = steps, u = 0x1p-24;
    return n * u / (1 - n * u);
}

bool head_pack_row(lm_head *h, const screen_kern *k, int n, const float *w) {
    screen_row r;
    k->pack(h->codes + n * h->stride, &r, w, h->cols);
    const double norm = sqrt(r.norm2) * WIDER, error = sqrt(r.err2) * WIDER;
    const bool usable = r.finite && norm < MAX_ROW_NORM;
    /* The last factors are for the rounding of the bound itself (head_bound). A row that cannot be bounded is computed. */
    h->scale[n] = usable ? r.scale : 0;
    h->sums[n] = r.sum;
    h->per_norm[n] = usable ? round_up((error + dot32_gamma(h->cols) * norm) * (1 + 0x1p-20)) : INFINITY;
    h->per_rest[n] = usable ? round_up((double)r.scale * sqrt(r.code2) * (1 + 0x1p-20)) : 0;
    return r.finite;
}

bool head_input_make(head_input *x, const lm_head *h, const float *hidden) {
    float top = 0;
    for (int i = 0; i < h->cols; i++)
        if (fabsf(hidden[i]) > top) top = fabsf(hidden[i]);
    if (top < MIN_INPUT) return false;
    const float step = top / 32767;
    double norm2 = 0, rest2 = 0;
    for (int i = 0; i < h->stride; i++) {
        const double v = i < h->cols ? (double)hidden[i] : 0, q = rint(v / step);
        const int c = q > 32767 ? 32767 : q < -32767 ? -32767 : (int)q;
        const double rest = v - (double)step * c; /* the product is exact */
        norm2 += v * v;
        rest2 += rest * rest;
        x->q[i] = (int16_t)c;
        x->high[i] = (uint8_t)((c + 32768) >> 8);
        x->low[i] = (uint8_t)((c + 32768) & 255);
    }
    x->step = (double)step;
    x->norm = sqrt(norm2) * WIDER;
    x->rest = sqrt(rest2) * WIDER;
    return x->norm < MAX_INPUT_NORM;
}

void head_bound(float *lower, float *upper, const lm_head *h, const head_input *x, const int64_t *dots, int n,
                int count) {
    /* Subnormal products lose up to 2^-150 each, the float32 results below up to 2^-150 more. */
    const double least = (double)h->cols * 0x1p-149 + 0x1p-148;
    const float *scale = h->scale + n, *per_norm = h->per_norm + n, *per_rest = h->per_rest + n;
    const double step = x->step, norm = x->norm, rest = x->rest;
    for (int i = 0; i < count; i++) {
        const double a = (double)scale[i] * step * (double)dots[i];
        const double r = (double)per_norm[i] * norm + (double)per_rest[i] * rest + fabs(a) * 0x1p-22 + least;
        lower[i] = (float)(a - r);
        upper[i] = (float)(a + r);
    }
}

bool head_finite(const float *v, int n) {
    for (int i = 0; i < n; i++)
        if (!isfinite(v[i])) return false;
    return true;
}

void head_mask(uint64_t *mask, int rows, const head_query *q) {
    const size_t words = ((size_t)rows + 63) / 64;
    if (q && q->allowed)
        memcpy(mask, q->allowed, words * sizeof *mask);
    else
        memset(mask, 0xff, words * sizeof *mask);
    if (rows % 64) mask[words - 1] &= ((uint64_t)1 << rows % 64) - 1;
    for (int i = 0; q && i < q->n_extra; i++) {
        const int32_t id = q->extra[i];
        CHECK(id >= 0 && id < rows, "extra id %d of %d", id, rows);
        mask[id / 64] &= ~((uint64_t)1 << id % 64);
    }
}

void head_no_more(int32_t *ids, float *logits, int n, int k) {
    for (int i = n; i < k; i++) {
        ids[i] = -1;
        logits[i] = NAN;
    }
}

int head_cols(const lm_head *h) { return h->cols; }
size_t head_bytes(const lm_head *h) { return h->block ? h->bytes : 0; }
bool head_known_finite(const lm_head *h) { return h->finite; }
head_counts head_counted(const lm_head *h) { return h->counts; }
