#include "engine/heads.h"

#include <stdlib.h>
#include <string.h>

#include "kern/quant.h"

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

/* Rows of the draft head a piece at a time, as float32 on the host: the device's own embedding op reads them. */
typedef struct rows_reader {
    const net_heads *h;
    const linear *head;
    void *ids, *x; /* device */
    float *host;   /* [PIECE, K] */
} rows_reader;
enum { PIECE = 256 };

static bool reader_open(rows_reader *r, const net_heads *h, const linear *head, err *e) {
    const size_t bytes = PIECE * (size_t)linear_cols(head) * sizeof(float);
    *r = (rows_reader){ .h = h, .head = head, .host = xmalloc(bytes) };
    return h->o->mem_new(h->o, &r->ids, PIECE * sizeof(int32_t), e) && h->o->mem_new(h->o, &r->x, bytes, e);
}

static void reader_close(rows_reader *r) {
    r->h->o->mem_free(r->h->o, r->ids);
    r->h->o->mem_free(r->h->o, r->x);
    free(r->host);
}

/* Rows [at, at + result) of the draft head -> host. */
static int read_rows(const rows_reader *r, int at) {
    ops *o = r->h->o;
    const int n = (int)min_i64(PIECE, r->h->draft_rows - at), K = linear_cols(r->head);
    int32_t ids[PIECE];
    for (int i = 0; i < n; i++) ids[i] = heads_draft_id(r->h, at + i);
    o->upload(o, r->ids, ids, (size_t)n * sizeof *ids);
    o->embed(o, r->x, r->head, r->ids, n);
    o->download(o, r->host, r->x, (size_t)n * (size_t)K * sizeof(float));
    return n;
}

/* Weight-only quantization, one tensor scale; what its rounding does to the order of tokens costs only acceptance. */
static float draft_encode(net_heads *h, const rows_reader *r, int K) {
    const int rows = h->draft_rows;
    quant_kern q;
    quant_kern_init(&q, ISA_COUNT);
    float amax = 0;
    for (int at = 0, n; at < rows; at += n) {
        n = read_rows(r, at);
        for (int i = 0; i < n; i++) { /* row by row: a NaN hides no other row's maximum */
            const float top = q.amax_f32(r->host + (int64_t)i * K, K);
            if (top > amax) amax = top;
        }
    }
    h->codes = xmalloc((size_t)rows * (size_t)K / 2);
    h->scales = xmalloc((size_t)rows * (size_t)K / 16);
    const float s2 = amax > 0 && amax < 3e38f ? nvfp4_scale_2(amax, ARITH_CUDA) : 1.0f;
    for (int at = 0, n; at < rows; at += n) {
        n = read_rows(r, at);
        const int64_t first = (int64_t)at * K;
        q.encode_f32(h->codes + first / 2, h->scales + first / 16, r->host, (int64_t)n * K, s2, ARITH_CUDA);
    }
    for (int64_t i = 0; i < (int64_t)rows * K / 16; i++)
        if (h->scales[i] >= 0x7f) h->scales[i] = 0; /* a row that is not finite is never drafted */
    return s2;
}

static bool draft_open(net_heads *h, const linear *head, err *e) {
    const int K = linear_cols(head);
    rows_reader r;
    const bool ok = reader_open(&r, h, head, e);
    const float s2 = ok ? draft_encode(h, &r, K) : 0;
    reader_close(&r);
    if (!ok) return false;
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

bool wmat_finite(const wmat *m, int rows) {
    quant_kern q;
    quant_kern_init(&q, ISA_COUNT);
    const int64_t n = (int64_t)rows * m->cols;
    if (m->type == DT_BF16) return q.nonfinite_bf16(m->data, n) < 0;
    if (m->type == DT_F32) return q.nonfinite_f32(m->data, n) < 0;
    for (int64_t i = 0; i < n; i++)
        if ((((const uint16_t *)m->data)[i] & 0x7c00) == 0x7c00) return false;
    return true;
}

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

bool heads_open(net_heads *h, ops *o, const linear *head, const wmat *m, int vocab, const heads_options *opt, err *e) {
    *h = (net_heads){ .o = o, .vocab = vocab };
    /* A head with NaN or Inf is read in full: its logits must be seen to be refused. */
    if (wants_screen(m, vocab, opt) && wmat_finite(m, vocab) && !o->head_new(o, &h->top, head, vocab, true, e))
        return false;
    const int want = wants_draft(m, vocab, opt);
    if (want == 0) return true;
    h->draft_first = want;
    h->draft_rows = want + DRAFT_HEAD_LAST;
    h->exact = h->top;
    return (h->top || o->head_new(o, &h->exact, head, vocab, false, e)) && draft_open(h, head, e);
}

void heads_close(net_heads *h) {
    if (h->exact && h->exact != h->top) h->o->head_free(h->o, h->exact);
    if (h->top) h->o->head_free(h->o, h->top);
    if (h->draft) h->o->linear_free(h->o, h->draft);
    free(h->codes);
    free(h->scales);
    *h = (net_heads){ 0 };
}
