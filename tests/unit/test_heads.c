/* The heads that opening makes beside lm_head: the draft head has the bytes of the codec's reference, run by one thread over
 * all rows; the screened one those of one thread; NaN and Inf anywhere are seen. usage: [SEED=N] test_heads */
#include "base/rng.h"
#include "kern/nv.h"
#include "num/bf16.h"
#include "num/nvfp4.h"
#include "ops/ops_head.h"

#include "support.h"

enum { VOCAB = 1237, K = 208, DRAFT = 300, ROWS = DRAFT + DRAFT_HEAD_LAST, REAL = VOCAB - 10 };
static const int threads[] = { 1, 2, 5 };
static uint64_t seed;

/* What wrong values a head may hold, and where. */
typedef enum fill { SOUND, ZERO, NAN_DRAFTED, INF_DRAFTED, NAN_LAST, NAN_BETWEEN, NAN_PADDING, FILLS } fill;
static const int bad_row[] = {
    [NAN_DRAFTED] = 17, [INF_DRAFTED] = 171, [NAN_LAST] = REAL - 1, [NAN_BETWEEN] = 500, [NAN_PADDING] = REAL
};

static float value(fill how, int row, int i, uint64_t at) {
    if (how == ZERO) return 0;
    if (how != SOUND && row == bad_row[how] && i == 33) return how == INF_DRAFTED ? -INFINITY : NAN;
    return (float)((rng_uniform(seed, at, 0, 3) - 0.5) * (row % 7 + 1));
}

static void *tensor(float **wide, dtype t, fill how) {
    float *v = xmalloc(sizeof(float) * VOCAB * K);
    uint16_t *h = xmalloc(sizeof(uint16_t) * VOCAB * K);
    for (int i = 0; i < VOCAB * K; i++) {
        v[i] = value(how, i / K, i % K, (uint64_t)i);
        if (t == DT_BF16) h[i] = bf16_from_f32(v[i]), v[i] = bf16_to_f32(h[i]);
        if (t == DT_F16) h[i] = f16_from_f32(v[i]), v[i] = f16_to_f32(h[i]);
    }
    *wide = v;
    if (t != DT_F32) return h;
    memcpy(h = xrealloc(h, sizeof(float) * VOCAB * K), v, sizeof(float) * VOCAB * K);
    return h;
}

/* The draft head's weights in one go: largest magnitude of all drafted rows that have no NaN, then every block. */
static void reference(uint8_t *codes, uint8_t *scales, float *s2, const float *wide) {
    static float rows[ROWS * K];
    float amax = 0;
    memcpy(rows, wide, sizeof(float) * DRAFT * K);
    memcpy(rows + DRAFT * K, wide + (REAL - DRAFT_HEAD_LAST) * K, sizeof(float) * DRAFT_HEAD_LAST * K);
    for (int r = 0; r < ROWS; r++) {
        bool nan = false;
        float top = 0;
        for (int i = 0; i < K; i++) {
            nan = nan || isnan(rows[r * K + i]);
            top = fmaxf(top, fabsf(rows[r * K + i]));
        }
        if (!nan) amax = fmaxf(amax, top);
    }
    *s2 = amax > 0 && !isinf(amax) ? nvfp4_scale_2(amax, ARITH_CUDA) : 1;
    nvfp4_encode_f32(codes, scales, rows, ROWS * K, *s2, ARITH_CUDA);
    for (int i = 0; i < ROWS * K / 16; i++)
        if (scales[i] >= 0x7f) scales[i] = 0;
}

static void same_draft(ops *o, const net_heads *h, const float *wide) {
    static uint8_t codes[ROWS * K / 2], scales[ROWS * K / 16];
    err e = { 0 };
    linear *w;
    linear_desc d = { .name = "", .type = DT_U8, .rows = ROWS, .cols = K, .data = codes };
    reference(codes, scales, &d.q.scale_2, wide);
    d.q.format = LINEAR_NVFP4, d.q.act = LINEAR_ACT_INT8, d.q.scales = scales;
    OK(o->linear_new(o, &w, &d, &e));
    assert_int_equal(h->draft->rows, ROWS);
    assert_memory_equal(&h->draft->q.scale_2, &d.q.scale_2, sizeof(float));
    if (w->packed) {
        assert_memory_equal(h->draft->packed, w->packed, (size_t)nv_matrix_bytes(ROWS, K));
    } else {
        assert_memory_equal(h->codes, codes, sizeof codes);
        assert_memory_equal(h->scales, scales, sizeof scales);
    }
    o->linear_free(o, w);
}

typedef struct copy { /* of the first screened head, to compare the others with */
    uint8_t *v;
    size_t bytes;
} copy;

static void same_screen(copy *first, const lm_head *top, fill how, dtype t) {
    const bool sound = how == SOUND || how == ZERO || how == NAN_PADDING;
    if (sound != (top != NULL)) fail_msg("fill %d, %s: screened %d", how, dtype_name(t), top != NULL);
    if (!top || !top->block) return;
    if (!first->v) memcpy(first->v = xmalloc(first->bytes = top->bytes), top->block, top->bytes);
    assert_int_equal(first->bytes, top->bytes);
    assert_memory_equal(first->v, top->block, top->bytes);
}

static void one(copy *first, const char *device, int n, kern_isa isa, dtype t, fill how) {
    err e = { 0 };
    ops *o;
    net_heads h;
    linear *head;
    float *wide;
    void *data = tensor(&wide, t, how);
    OK(ops_open(&o, &(ops_options){ .device = device, .threads = n, .isa = isa }, &e));
    const linear_desc d = { .name = "", .type = t, .rows = VOCAB, .cols = K, .data = data };
    const wmat m = { .name = "", .type = t, .rows = VOCAB, .cols = K, .data = data };
    const heads_options opt = { .mode = HEAD_SCREENED, .draft_rows = DRAFT };
    OK(o->linear_new(o, &head, &d, &e));
    OK(heads_open(&h, o, head, &m, REAL, &opt, &e));
    assert_int_equal(wmat_finite(&m, REAL), how == SOUND || how == ZERO || how == NAN_PADDING);
    assert_int_equal(wmat_finite(&m, VOCAB), how == SOUND || how == ZERO);
    same_draft(o, &h, wide);
    same_screen(first, h.top, how, t);
    heads_close(&h);
    o->linear_free(o, head);
    o->close(o);
    free(data);
    free(wide);
}

static void test_bytes(void **state) {
    (void)state;
    static const dtype types[] = { DT_BF16, DT_F32, DT_F16 };
    for (size_t t = 0; t < ARRAY_LEN(types); t++)
        for (int how = 0; how < FILLS; how++) {
            copy first = { 0 };
            for (size_t i = 0; i < ARRAY_LEN(threads); i++)
                one(&first, "cpu", threads[i], i == 2 ? ISA_REF : ISA_COUNT, types[t], (fill)how);
            one(&first, "ref", 1, ISA_COUNT, types[t], (fill)how);
            free(first.v);
        }
}

int main(void) {
    const char *s = getenv("SEED");
    seed = s ? strtoull(s, NULL, 10) : 20260303;
    printf("SEED=%llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_bytes) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
