#include "engine/heads.h"

#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "kern/quant.h"
#include "num/bf16.h"

static const int64_t SCREEN_FROM_BYTES = 64 << 20;
enum { AUTO_ROWS = 65536 };

int32_t heads_draft_id(const net_heads *h, int i) {
    return i < h->draft_first ? i : h->vocab - (h->draft_rows - h->draft_first) + (i - h->draft_first);
}

bool heads_drafts(const net_heads *h, int32_t id) {
    return !h->draft || id < h->draft_first || id >= h->vocab - (h->draft_rows - h->draft_first);
}

void heads_note(const net_heads *h, id_set *own, const int32_t *ids, int n) {
    for (int i = 0; i < n && own->v; i++)
        if (!heads_drafts(h, ids[i]) && ids[i] < h->vocab) id_set_add(own, ids[i]);
}

size_t heads_draft_bytes(const net_heads *h) {
    return h->draft ? (size_t)h->draft_rows * (size_t)linear_cols(h->draft) / 16 * 9 : 0;
}

/* ---- the draft head's copy ---- */

/* What the pool makes of the head's tensor. Every row is worked on by itself, so the bytes do not depend on the threads. */
typedef struct encode_job {
    const net_heads *h;
    const wmat *m;
    const quant_kern *q;
    float *amax;   /* [threads] */
    bool *bad;     /* [threads] */
    float *upcast; /* [threads][K]; only F16 needs it */
    int64_t rows;  /* for the look at NaN and Inf */
    float s2;
} encode_job;

static const void *row_of(const wmat *m, int64_t row) {
    return (const char *)m->data + row * m->cols * (m->type == DT_F32 ? 4 : 2);
}

/* The row as float32; NULL: it is BF16, which has kernels of its own. */
static const float *row_f32(const encode_job *j, int64_t row, int thread) {
    const void *w = row_of(j->m, row);
    if (j->m->type != DT_F16) return j->m->type == DT_F32 ? w : NULL;
    const int K = j->m->cols;
    float *x = j->upcast + (int64_t)thread * K;
    for (int i = 0; i < K; i++) x[i] = f16_to_f32(((const uint16_t *)w)[i]);
    return x;
}

static void amax_part(void *ctx, int thread, int threads) {
    const encode_job *j = ctx;
    const int K = j->m->cols;
    float amax = 0;
    int64_t begin, end;
    pool_share(j->h->draft_rows, 1, thread, threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) { /* row by row: a NaN hides no other row's maximum */
        const int32_t id = heads_draft_id(j->h, (int)i);
        const float *x = row_f32(j, id, thread);
        const float top = x ? j->q->amax_f32(x, K) : j->q->amax_bf16(row_of(j->m, id), K);
        if (top > amax) amax = top;
    }
    j->amax[thread] = amax;
}

static void encode_part(void *ctx, int thread, int threads) {
    const encode_job *j = ctx;
    const int64_t K = j->m->cols;
    int64_t begin, end;
    pool_share(j->h->draft_rows, 1, thread, threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const int32_t id = heads_draft_id(j->h, (int)i);
        uint8_t *codes = j->h->codes + i * K / 2, *scales = j->h->scales + i * K / 16;
        const float *x = row_f32(j, id, thread);
        if (x)
            j->q->encode_f32(codes, scales, x, K, j->s2, ARITH_CUDA);
        else
            j->q->encode_bf16(codes, scales, row_of(j->m, id), K, j->s2, ARITH_CUDA);
        for (int64_t b = 0; b < K / 16; b++)
            if (scales[b] >= 0x7f) scales[b] = 0; /* a row that is not finite is never drafted */
    }
}

/* Weight-only quantization, one tensor scale; what its rounding does to the order of tokens costs only acceptance. */
static float draft_encode(net_heads *h, pool *p, const wmat *m) {
    const size_t rows = (size_t)h->draft_rows, K = (size_t)m->cols, threads = (size_t)pool_threads(p);
    quant_kern q;
    quant_kern_init(&q, ISA_COUNT);
    h->codes = xmalloc(rows * K / 2);
    h->scales = xmalloc(rows * K / 16);
    encode_job j = { .h = h, .m = m, .q = &q, .amax = xcalloc(threads, sizeof *j.amax) };
    if (m->type == DT_F16) j.upcast = xcalloc(threads * K, sizeof *j.upcast);
    pool_run(p, amax_part, &j);
    float amax = 0;
    for (size_t t = 0; t < threads; t++) amax = j.amax[t] > amax ? j.amax[t] : amax;
    j.s2 = amax > 0 && amax < 3e38f ? nvfp4_scale_2(amax, ARITH_CUDA) : 1.0f;
    pool_run(p, encode_part, &j);
    free(j.amax);
    free(j.upcast);
    return j.s2;
}

static bool draft_open(net_heads *h, pool *p, const wmat *m, err *e) {
    const int K = m->cols;
    const float s2 = draft_encode(h, p, m);
    const linear_desc d = { .name = "draft head",
                            .type = DT_U8,
                            .rows = h->draft_rows,
                            .cols = K,
                            .data = h->codes,
                            .q = {
                                .format = LINEAR_NVFP4, .act = LINEAR_ACT_INT8, .scales = h->scales, .scale_2 = s2 } };
    if (!h->o->linear_new(h->o, &h->draft, &d, e)) return false;
    if (linear_owns_data(h->draft)) {
        free(h->codes);
        free(h->scales);
        h->codes = h->scales = NULL;
    }
    return true;
}

/* ---- NaN and Inf ---- */

static bool finite(const quant_kern *q, const wmat *m, int64_t row, int64_t rows) {
    const int64_t n = rows * m->cols;
    const void *w = row_of(m, row);
    if (m->type == DT_BF16) return q->nonfinite_bf16(w, n) < 0;
    if (m->type == DT_F32) return q->nonfinite_f32(w, n) < 0;
    for (int64_t i = 0; i < n; i++)
        if ((((const uint16_t *)w)[i] & 0x7c00) == 0x7c00) return false;
    return true;
}

bool wmat_finite(const wmat *m, int rows) {
    quant_kern q;
    quant_kern_init(&q, ISA_COUNT);
    return finite(&q, m, 0, rows);
}

static void finite_part(void *ctx, int thread, int threads) {
    const encode_job *j = ctx;
    int64_t begin, end;
    pool_share(j->rows, 1, thread, threads, &begin, &end);
    j->bad[thread] = !finite(j->q, j->m, begin, end - begin);
}

static bool all_finite(pool *p, const wmat *m, int rows) {
    const int threads = pool_threads(p);
    quant_kern q;
    quant_kern_init(&q, ISA_COUNT);
    encode_job j = { .m = m, .q = &q, .bad = xcalloc((size_t)threads, sizeof *j.bad), .rows = rows };
    pool_run(p, finite_part, &j);
    bool bad = false;
    for (int t = 0; t < threads; t++) bad = bad || j.bad[t];
    free(j.bad);
    return !bad;
}

/* ---- both heads ---- */

static bool wants_screen(const wmat *m, int vocab, const heads_options *opt) {
    const bool large = (int64_t)vocab * m->cols * (m->type == DT_F32 ? 4 : 2) >= SCREEN_FROM_BYTES;
    return m->q.format == WF_PLAIN && (opt->mode == HEAD_SCREENED || (opt->mode == HEAD_AUTO && large));
}

/* The first ids that get a row; 0: no draft head. */
static int wants_draft(const wmat *m, int vocab, const heads_options *opt) {
    int want = opt->draft_rows;
    if (want == DRAFT_HEAD_AUTO) want = vocab > 2 * AUTO_ROWS ? AUTO_ROWS : DRAFT_HEAD_FULL;
    return want == DRAFT_HEAD_FULL || m->q.format != WF_PLAIN || m->cols % 16 || want + DRAFT_HEAD_LAST >= vocab ? 0
                                                                                                                 : want;
}

void heads_bytes(int64_t *screen, int64_t *draft, const wmat *m, int vocab, const heads_options *opt) {
    const int rows = wants_draft(m, vocab, opt);
    *screen = wants_screen(m, vocab, opt) ? (int64_t)vocab * ((m->cols + 63) / 64 * 64 + 16) : 0;
    *draft = rows ? (int64_t)(rows + DRAFT_HEAD_LAST) * m->cols / 16 * 9 : 0;
}

/* A head with NaN or Inf is read in full: its logits must be seen to be refused. Who makes the copy
 * has looked at every row. */
static bool screen_open(net_heads *h, pool *p, const linear *head, const wmat *m, err *e) {
    if (!h->o->head_new(h->o, &h->top, head, h->vocab, true, e)) return false;
    if (head_known_finite(h->top) || all_finite(p, m, h->vocab)) return true;
    h->o->head_free(h->o, h->top);
    h->top = NULL;
    return true;
}

static bool heads_make(net_heads *h, pool *p, const linear *head, const wmat *m, const heads_options *opt, err *e) {
    if (wants_screen(m, h->vocab, opt) && !screen_open(h, p, head, m, e)) return false;
    const int want = wants_draft(m, h->vocab, opt);
    if (want == 0) return true;
    h->draft_first = want;
    h->draft_rows = want + DRAFT_HEAD_LAST;
    h->exact = h->top;
    return (h->top || h->o->head_new(h->o, &h->exact, head, h->vocab, false, e)) && draft_open(h, p, m, e);
}

bool heads_open(net_heads *h, ops *o, const linear *head, const wmat *m, int vocab, const heads_options *opt, err *e) {
    *h = (net_heads){ .o = o, .vocab = vocab };
    if (!wants_screen(m, vocab, opt) && wants_draft(m, vocab, opt) == 0) return true;
    pool *p; /* the device's own threads, if it has any, sleep meanwhile */
    if (!pool_new(&p, o->threads, e)) return false;
    const bool ok = heads_make(h, p, head, m, opt, e);
    pool_free(p);
    return ok;
}

void heads_close(net_heads *h) {
    if (h->exact && h->exact != h->top) h->o->head_free(h->o, h->exact);
    if (h->top) h->o->head_free(h->o, h->top);
    if (h->draft) h->o->linear_free(h->o, h->draft);
    free(h->codes);
    free(h->scales);
    *h = (net_heads){ 0 };
}
