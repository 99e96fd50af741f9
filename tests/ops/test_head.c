/* The screened head against the full one: the same ids and the same bits, whatever the weights; its bounds against exact sums.
 * usage: [SEED=N] test_head */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "num/bf16.h"
#include "ops/ops.h"
#include "ops/ops_head.h"

#include <cmocka.h>

static uint64_t seed, counter;

static double uniform(void) { return rng_uniform(seed, 0, counter++, 7); }
static uint32_t draw(uint32_t below) { return (uint32_t)(uniform() * below); }
static int between(int lo, int hi) { return lo + (int)draw((uint32_t)(hi - lo + 1)); }
static float normal(void) {
    double s = 0;
    for (int i = 0; i < 6; i++) s += uniform();
    return (float)((s - 3) * 1.41);
}

/* ---- backends under test: every level with 1, 2 and 3 threads; the reference is apart ---- */

enum { MAX_BACKENDS = 16 };
static ops *ref, *backends[MAX_BACKENDS];
static int n_backends;

static void open_backends(void) {
    err e = { 0 };
    if (!ops_open(&ref, &(ops_options){ .device = "ref" }, &e)) fail_msg("%s", e.msg);
    const char *device = getenv("NIBBLE_TEST_DEVICE");
    if (device && strcmp(device, "cpu") != 0) {
        if (!ops_open(&backends[n_backends++], &(ops_options){ .device = device }, &e)) fail_msg("%s", e.msg);
        return;
    }
    for (int isa = ISA_REF; isa < ISA_COUNT; isa++) {
        if (!kern_isa_supported((kern_isa)isa) || isa == ISA_AMX) continue;
        for (int threads = 1; threads <= 3; threads++) {
            const ops_options opt = { .device = "cpu", .threads = threads, .isa = (kern_isa)isa };
            if (!ops_open(&backends[n_backends++], &opt, &e)) fail_msg("%s", e.msg);
        }
    }
}

/* Only the CPU backend keeps an 8-bit copy. */
static bool head_screens(const ops *o) { return strcmp(o->device, "cpu") == 0; }

/* ---- weights ---- */

typedef enum fill {
    NORMAL,
    NEAR_TIES, /* one row repeated, single elements one BF16 step apart */
    EQUAL,     /* three different rows */
    RANGES,    /* each row at its own power of two, from subnormal to huge */
    SUBNORMAL,
    ZEROS,     /* and a few ordinary rows */
    DOMINATED, /* one column far above the others */
    POISON,    /* some NaN and Inf */
    FILLS
} fill;

static float element(fill how, int n, int i) {
    switch (how) {
    case EQUAL: return (float)((n * 7 % 3 + 1) * ((i * 13) % 17 - 8)) * 0.01f;
    case RANGES: return normal() * ldexpf(1, n * 37 % 250 - 145);
    case SUBNORMAL: return normal() * 1e-39f;
    case ZEROS: return n % 29 == 3 ? normal() : draw(2) ? 0.0f : -0.0f;
    case DOMINATED: return normal() * (i == 5 ? 3000.0f : 0.02f);
    case POISON: return draw(4000) ? normal() : draw(3) ? (draw(2) ? INFINITY : -INFINITY) : NAN;
    default: return normal() * 0.02f;
    }
}

static void *weights_of(dtype t, fill how, int N, int K) {
    const size_t n = (size_t)N * (size_t)K;
    float *v = malloc(n * sizeof *v);
    uint16_t *h = malloc(n * sizeof *h);
    for (int r = 0; r < N; r++)
        for (int i = 0; i < K; i++) {
            float *at = v + (size_t)r * (size_t)K + i;
            *at = how == NEAR_TIES && r > 0 ? at[-K] : element(how, r, i);
            if (how == NEAR_TIES && r > 0 && draw((uint32_t)K) < 2) *at = *at * (draw(2) ? 1.008f : 0.992f);
        }
    for (size_t i = 0; i < n && t != DT_F32; i++) h[i] = t == DT_BF16 ? bf16_from_f32(v[i]) : f16_from_f32(v[i]);
    if (t == DT_F32) {
        free(h);
        return v;
    }
    free(v);
    return h;
}

static void fill_hidden(float *x, int M, int K) {
    for (int m = 0; m < M; m++) {
        static const float scales[] = { 1, 1, 1, 1, 30, 1e-3f, 1e-33f, 1e30f, 0 };
        const float s = scales[draw(ARRAY_LEN(scales))];
        for (int i = 0; i < K; i++) x[m * K + i] = normal() * s * (draw(200) ? 1 : 40);
    }
    if (draw(8) == 0) x[between(0, M * K - 1)] = draw(2) ? NAN : INFINITY;
}

/* ---- the comparison ---- */

enum { MAX_M = 19, MAX_EXTRA = 12, MAX_N = 700 };

typedef struct problem {
    int N, K, M, k;
    dtype type;
    void *w;
    float *x;
    head_query q[MAX_M];
    int32_t extra[MAX_M][MAX_EXTRA];
    uint64_t allowed[MAX_M][(MAX_N + 63) / 64];
    int n_extra;
} problem;

typedef struct answer {
    int32_t ids[MAX_M * HEAD_MAX_TOP];
    float logits[MAX_M * HEAD_MAX_TOP], extra[MAX_M * MAX_EXTRA];
    head_counts counts;
} answer;

static void make(problem *p, fill how) {
    static const int ks[] = { 1, 1, 2, 20, 64 };
    static const dtype types[] = { DT_BF16, DT_BF16, DT_F16, DT_F32 };
    *p = (problem){ .N = between(1, MAX_N), .K = between(1, 200), .M = between(1, MAX_M), .k = ks[draw(5)] };
    p->type = types[draw(4)];
    p->w = weights_of(p->type, how, p->N, p->K);
    p->x = malloc((size_t)(p->M * p->K) * sizeof *p->x);
    fill_hidden(p->x, p->M, p->K);
    for (int m = 0; m < p->M; m++) {
        p->q[m].extra = p->extra[m];
        p->q[m].n_extra = draw(2) ? between(0, MAX_EXTRA) : 0;
        p->n_extra += p->q[m].n_extra;
        for (int i = 0; i < p->q[m].n_extra; i++) p->extra[m][i] = between(0, p->N - 1);
        if (draw(3)) continue;
        const uint32_t rarity = 1 + draw(40); /* from all ids to fewer than k */
        for (int i = 0; i < p->N; i++)
            if (draw(rarity) == 0) p->allowed[m][i / 64] |= (uint64_t)1 << i % 64;
        p->q[m].allowed = p->allowed[m];
    }
}

static bool same_bits(const float *a, const float *b, int n) {
    for (int i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) != 0 && !(isnan(a[i]) && isnan(b[i]))) return false;
    return true;
}

static void solve(answer *a, ops *o, const problem *p, bool screen, bool queries) {
    err e = { 0 };
    linear *w = NULL;
    lm_head *h = NULL;
    memset(a, 0, sizeof *a);
    const linear_desc d = { .name = "head", .type = p->type, .rows = p->N, .cols = p->K, .data = p->w };
    if (!o->linear_new(o, &w, &d, &e) || !o->head_new(o, &h, w, p->N, screen, &e)) fail_msg("%s", e.msg);
    assert_int_equal(head_bytes(h) > 0, screen && head_screens(o));
    void *x = NULL;
    const size_t bytes = (size_t)(p->M * p->K) * sizeof *p->x;
    if (!o->mem_new(o, &x, bytes, &e)) fail_msg("%s", e.msg);
    o->upload(o, x, p->x, bytes);
    o->head_top(o, a->ids, a->logits, a->extra, h, x, p->M, p->k, queries ? p->q : NULL);
    a->counts = head_counted(h);
    if (queries) { /* the extra ids alone: the same bits */
        float apart[MAX_M * MAX_EXTRA];
        o->head_top(o, NULL, NULL, apart, h, x, p->M, 0, p->q);
        assert_true(same_bits(apart, a->extra, p->n_extra));
        assert_int_equal(head_counted(h).rows, a->counts.rows);
    }
    o->mem_free(o, x);
    o->head_free(o, h);
    o->linear_free(o, w);
}

/* Counts over everything: the test must have seen both paths. */
static int64_t screened_rows, full_rows, candidates;

static void compare(const problem *p, fill how) {
    static answer want, got;
    for (int queries = 0; queries < 2; queries++) {
        solve(&want, ref, p, true, queries);
        int64_t first = -1;
        for (int b = 0; b < n_backends; b++)
            for (int screen = 0; screen < 2; screen++) {
                solve(&got, backends[b], p, screen, queries);
                const bool ok = memcmp(want.ids, got.ids, sizeof want.ids) == 0 &&
                                same_bits(want.logits, got.logits, p->M * p->k) &&
                                (!queries || same_bits(want.extra, got.extra, p->n_extra));
                if (!ok)
                    fail_msg("%s, %d threads, weights %d, [%d, %d], %d rows, top %d, screen %d, queries %d (SEED=%llu)",
                             backends[b]->isa, backends[b]->threads, how, p->N, p->K, p->M, p->k, screen, queries,
                             (unsigned long long)seed);
                if (!screen) continue;
                /* Bounds are the same bits everywhere, so the same work is done everywhere. */
                if (first < 0) first = got.counts.candidates;
                assert_int_equal(got.counts.candidates, first);
                screened_rows += got.counts.rows - got.counts.full;
                full_rows += got.counts.full;
                candidates += got.counts.candidates;
            }
    }
}

static void screened_equals_full(void **state) {
    (void)state;
    for (int round = 0; round < 30; round++)
        for (int how = 0; how < FILLS; how++) {
            problem p;
            make(&p, (fill)how);
            compare(&p, (fill)how);
            free(p.w);
            free(p.x);
        }
    print_message("%lld rows screened with %lld candidates, %lld computed in full\n", (long long)screened_rows,
                  (long long)candidates, (long long)full_rows);
    assert_true((screened_rows > 1000 || !head_screens(backends[0])) && full_rows > 1000);
}

/* Rows as a real head has them: the bounds must leave few candidates. */
static void gaussian_rows_leave_few_candidates(void **state) {
    (void)state;
    if (!head_screens(backends[0])) skip();
    enum { N = 6000, K = 512 };
    err e = { 0 };
    linear *w = NULL;
    lm_head *h = NULL, *plain = NULL;
    float x[2 * K], logits[2 * 20], want[2 * 20];
    int32_t ids[2 * 20], want_ids[2 * 20];
    uint16_t *data = weights_of(DT_BF16, NORMAL, N, K);
    for (int i = 0; i < 2 * K; i++) x[i] = normal();
    ops *o = backends[n_backends - 1];
    const linear_desc d = { .name = "head", .type = DT_BF16, .rows = N, .cols = K, .data = data };
    if (!o->linear_new(o, &w, &d, &e) || !o->head_new(o, &h, w, N, true, &e) ||
        !o->head_new(o, &plain, w, N, false, &e))
        fail_msg("%s", e.msg);
    o->head_top(o, ids, logits, NULL, h, x, 2, 20, NULL);
    o->head_top(o, want_ids, want, NULL, plain, x, 2, 20, NULL);
    assert_memory_equal(ids, want_ids, sizeof ids);
    assert_memory_equal(logits, want, sizeof logits);
    const head_counts c = head_counted(h);
    assert_int_equal(c.rows, 2);
    assert_int_equal(c.full, 0);
    assert_in_range(c.candidates, 2 * 20, 2 * N / 20);
    o->head_free(o, h);
    o->head_free(o, plain);
    o->linear_free(o, w);
    free(data);
}

/* ---- the bound itself, against the sum in wider arithmetic ---- */

static float dot32(const float *a, const float *b, int n) {
    float l[32] = { 0 };
    for (int i = 0; i < n; i++) l[i % 32] = fmaf(a[i], b[i], l[i % 32]);
    for (int half = 16; half >= 1; half /= 2)
        for (int j = 0; j < half; j++) l[j] = l[j] + l[j + half];
    return l[0];
}

/* Only the handle's arithmetic: no backend in between. Returns the largest |logit - middle| / radius. */
static double check_bounds(const screen_kern *k, fill how, int N, int K) {
    err e = { 0 };
    float *w = weights_of(DT_F32, how, N, K), *x = malloc((size_t)K * sizeof *x);
    const linear full = { .type = DT_F32, .rows = N, .cols = K, .data = w };
    lm_head *h = head_plain(&full, N);
    if (!head_room(h, ref, &e)) fail_msg("%s", e.msg);
    for (int n = 0; n < N; n++) head_pack_row(h, k, n, w + (size_t)n * (size_t)K);
    void *block;
    if (posix_memalign(&block, 64, (size_t)h->stride * 4) != 0) fail_msg("no memory");
    head_input in = { .q = block };
    in.high = (uint8_t *)block + 2 * h->stride;
    in.low = in.high + h->stride;
    double worst = 0;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < K; i++) x[i] = normal() * (round == 2 ? 1e-28f : round == 3 && i % 50 ? 1e-4f : 1);
        if (!head_input_make(&in, h, x)) continue;
        const screen_act act = { in.q, in.high, in.low };
        for (int n = 0; n < N; n++) {
            int64_t sum, want = 0;
            float lower, upper;
            k->dots(&sum, 1, h->codes + n * h->stride, h->sums + n, &act, 1, 1, h->stride);
            for (int i = 0; i < K; i++) want += (int64_t)h->codes[n * h->stride + i] * in.q[i];
            assert_int_equal(sum, want);
            head_bound(&lower, &upper, h, &in, &sum, n, 1);
            const float logit = dot32(x, w + (size_t)n * (size_t)K, K);
            double exact = 0;
            for (int i = 0; i < K; i++) exact += (double)x[i] * (double)w[(size_t)n * (size_t)K + i];
            if (isnan(logit)) {
                assert_true(upper == INFINITY && lower == -INFINITY);
                continue;
            }
            assert_true(lower <= logit && logit <= upper);
            assert_true((double)lower <= exact && exact <= (double)upper);
            const double radius = ((double)upper - (double)lower) / 2;
            if (isfinite(radius)) worst = fmax(worst, fabs((double)logit - (double)upper + radius) / radius);
        }
    }
    free(block);
    ref->head_free(ref, h);
    free(w);
    free(x);
    return worst;
}

static void bounds_hold(void **state) {
    (void)state;
    double worst = 0;
    for (int isa = ISA_REF; isa < ISA_COUNT; isa++) {
        if (!kern_isa_supported((kern_isa)isa) || isa == ISA_AMX) continue;
        screen_kern k;
        screen_kern_init(&k, (kern_isa)isa);
        for (int how = 0; how < FILLS; how++) worst = fmax(worst, check_bounds(&k, (fill)how, 60, between(1, 700)));
        /* One or two columns: nothing averages out, the bound is nearly reached. */
        worst = fmax(worst, check_bounds(&k, NORMAL, 200, 1));
        worst = fmax(worst, check_bounds(&k, RANGES, 200, 2));
    }
    print_message("the bound was used up to %.3f\n", worst);
    assert_true(worst > 0.5 && worst <= 1);
}

/* ---- kernels ---- */

static void kernels_agree(void **state) {
    (void)state;
    screen_kern want_k;
    screen_kern_init(&want_k, ISA_REF);
    for (int isa = ISA_REF + 1; isa < ISA_COUNT; isa++) {
        if (!kern_isa_supported((kern_isa)isa) || isa == ISA_AMX) continue;
        screen_kern k;
        screen_kern_init(&k, (kern_isa)isa);
        for (int round = 0; round < 60; round++) {
            const int K = round == 0 ? SCREEN_MAX_COLS : between(1, 300), N = between(1, 20);
            const fill how = (fill)(round % FILLS);
            const int64_t stride = screen_stride(K);
            int8_t *codes = aligned_alloc(64, (size_t)stride * 40);
            int16_t *q = aligned_alloc(64, (size_t)stride * SCREEN_MAX_ROWS * 4);
            uint8_t *bytes = (uint8_t *)(q + stride * SCREEN_MAX_ROWS);
            screen_act act[SCREEN_MAX_ROWS];
            int32_t sums[20];
            for (int n = 0; n < N; n++) {
                screen_row a, b;
                memset(&a, 0, sizeof a);
                memset(&b, 0, sizeof b);
                float *w = weights_of(DT_F32, how, 1, K);
                for (int i = 0; i < K && round == 0; i++) w[i] = n % 2 ? -1 : 1; /* the largest sums */
                want_k.pack(codes + n * stride, &a, w, K);
                k.pack(codes + (20 + n) * stride, &b, w, K);
                assert_memory_equal(codes + n * stride, codes + (20 + n) * stride, (size_t)stride);
                assert_true(a.finite == b.finite && a.sum == b.sum && a.code2 == b.code2);
                assert_memory_equal(&a.scale, &b.scale, sizeof a.scale);
                assert_memory_equal(&a.norm2, &b.norm2, sizeof a.norm2);
                assert_memory_equal(&a.err2, &b.err2, sizeof a.err2);
                sums[n] = a.sum;
                free(w);
            }
            for (int m = 0; m < SCREEN_MAX_ROWS; m++) {
                for (int64_t i = 0; i < stride; i++) {
                    const int v = i >= K ? 0 : round == 0 ? (m % 2 ? 32767 : -32767) : between(-32767, 32767);
                    q[m * stride + i] = (int16_t)v;
                    bytes[2 * m * stride + i] = (uint8_t)((v + 32768) >> 8);
                    bytes[(2 * m + 1) * stride + i] = (uint8_t)(v + 32768);
                }
                act[m] = (screen_act){ q + m * stride, bytes + 2 * m * stride, bytes + (2 * m + 1) * stride };
            }
            for (int M = 1; M <= SCREEN_MAX_ROWS; M++) {
                int64_t y[SCREEN_MAX_ROWS * 21] = { 0 }, want[SCREEN_MAX_ROWS * 21] = { 0 };
                want_k.dots(want, 21, codes, sums, act, M, N, stride);
                k.dots(y, 21, codes, sums, act, M, N, stride);
                assert_memory_equal(y, want, sizeof y);
            }
            free(codes);
            free(q);
        }
    }
}

int main(void) {
    const char *s = getenv("SEED");
    seed = s ? strtoull(s, NULL, 10) : 20;
    printf("SEED=%llu\n", (unsigned long long)seed);
    open_backends();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_agree),
        cmocka_unit_test(bounds_hold),
        cmocka_unit_test(screened_equals_full),
        cmocka_unit_test(gaussian_rows_leave_few_candidates),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    for (int b = 0; b < n_backends; b++) backends[b]->close(backends[b]);
    ref->close(ref);
    return failed;
}
