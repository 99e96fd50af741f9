/* Heads of the CUDA backend. */
#include "ops/ops_cuda.h"

#ifdef NIBBLE_CUDA

#include <stdlib.h>
#include <string.h>

/* ---- heads: all logits, then the best of them ---- */

bool cuda_head_new(ops *o, lm_head **out, const linear *full, int rows, bool screen, err *e) {
    (void)o, (void)screen, (void)e;
    lm_head *plain = head_plain(full, rows);
    cuda_head *h = xmalloc(sizeof *h);
    *h = (cuda_head){ .base = *plain, .full = (const cuda_linear *)full };
    free(plain);
    *out = &h->base;
    return true;
}

void cuda_head_free(ops *o, lm_head *h) {
    (void)o;
    free(h);
}

/* What one group of rows needs on the device, cut from one block. */
typedef struct head_parts {
    float *logits;
    uint64_t *allowed;
    int32_t *extra; /* ids, then the row of each */
    char *out;      /* read back at once: finite [rows], ids [rows, k], logits [rows, k], extra logits */
} head_parts;

static size_t cut_parts(head_parts *r, char *base, int rows, int n, int k, int extra) {
    size_t at = 0;
    const size_t words = ((size_t)n + 63) / 64;
    struct {
        void **p;
        size_t bytes;
    } parts[] = { { (void **)&r->logits, (size_t)rows * (size_t)n * sizeof(float) },
                  { (void **)&r->allowed, (size_t)rows * words * sizeof(uint64_t) },
                  { (void **)&r->extra, 2 * (size_t)extra * sizeof(int32_t) },
                  { (void **)&r->out, (size_t)(rows * (2 * k + 1) + extra) * sizeof(float) } };
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        if (base) *parts[i].p = base + at;
        at += cuda_aligned(parts[i].bytes);
    }
    return at;
}

static void upload_masks(gpu *g, uint64_t *to, const head_query *q, int rows, int n) {
    const size_t words = ((size_t)n + 63) / 64;
    uint64_t *mask = xmalloc((size_t)rows * words * sizeof *mask);
    for (int r = 0; r < rows; r++) head_mask(mask + (size_t)r * words, n, &q[r]);
    gpu_upload(g, to, mask, (size_t)rows * words * sizeof *mask);
    free(mask);
}

static void upload_extra(gpu *g, int32_t *to, const head_query *q, int rows, int n_extra, int n) {
    int32_t *list = xmalloc(2 * (size_t)n_extra * sizeof *list);
    for (int r = 0, at = 0; r < rows; r++)
        for (int i = 0; i < q[r].n_extra; i++, at++) {
            CHECK(q[r].extra[i] >= 0 && q[r].extra[i] < n, "extra id %d of %d", q[r].extra[i], n);
            list[at] = q[r].extra[i];
            list[n_extra + at] = r;
        }
    gpu_upload(g, to, list, 2 * (size_t)n_extra * sizeof *list);
    free(list);
}

static void head_group(ops *o, int32_t *ids, float *logits, float *extra, cuda_head *h, const float *hidden, int rows,
                       int k, const head_query *q) {
    gpu *g = gpu_of(o);
    const int n = h->base.rows, cols = h->base.cols;
    int n_extra = 0;
    bool masked = false;
    for (int r = 0; q && r < rows; r++) n_extra += q[r].n_extra, masked = masked || q[r].n_extra || q[r].allowed;
    head_parts m = { 0 };
    const int words = rows * (2 * k + 1) + n_extra;
    char *base = gpu_work(g, GPU_WORK_C, cut_parts(&m, NULL, rows, n, k, n_extra));
    float *host = xcalloc((size_t)words, sizeof *host);
    if (base) {
        cut_parts(&m, base, rows, n, k, n_extra);
        gpu_mat w = h->full->m;
        w.rows = n;
        int32_t *finite = (int32_t *)(void *)m.out;
        float *out = (float *)(void *)m.out + rows;
        if (masked && k > 0) upload_masks(g, m.allowed, q, rows, n);
        if (n_extra) upload_extra(g, m.extra, q, rows, n_extra, n);
        gpu_finite(g, finite, hidden, rows, cols);
        if (k > 0) {
            gpu_linear(g, m.logits, n, hidden, cols, &w, rows);
            gpu_top(g, (int32_t *)(void *)out, out + rows * k, m.logits, masked ? m.allowed : NULL, finite, rows, n, k);
        }
        if (n_extra)
            gpu_linear_some(g, out + 2 * rows * k, hidden, cols, &w, m.extra, m.extra + n_extra, n_extra, finite);
        gpu_download(g, host, m.out, (size_t)words * sizeof *host);
    }
    const int32_t *finite = (const int32_t *)(const void *)host;
    for (int r = 0; r < rows && k > 0; r++) {
        h->base.counts.rows += finite[r];
        h->base.counts.full += finite[r];
    }
    if (k > 0) {
        memcpy(ids, host + rows, (size_t)rows * (size_t)k * sizeof *ids);
        memcpy(logits, host + rows * (1 + k), (size_t)rows * (size_t)k * sizeof *logits);
    }
    if (n_extra) memcpy(extra, host + rows * (1 + 2 * k), (size_t)n_extra * sizeof *extra);
    free(host);
}

void cuda_head_top(ops *o, int32_t *ids, float *logits, float *extra_logits, lm_head *base, const float *hidden,
                   int rows, int k, const head_query *q) {
    CHECK(k >= 0 && k <= HEAD_MAX_TOP, "top %d of a head", k);
    cuda_head *h = (cuda_head *)base;
    for (int r = 0; r < rows; r += CUDA_HEAD_GROUP) {
        const int m = rows - r < CUDA_HEAD_GROUP ? rows - r : CUDA_HEAD_GROUP;
        head_group(o, k ? ids + (int64_t)r * k : NULL, k ? logits + (int64_t)r * k : NULL, extra_logits, h,
                   hidden + (int64_t)r * base->cols, m, k, q ? q + r : NULL);
        for (int i = 0; q && i < m; i++)
            if (q[r + i].n_extra) extra_logits += q[r + i].n_extra;
    }
}

#endif
