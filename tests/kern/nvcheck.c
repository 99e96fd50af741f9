/* nvcheck - packed NVFP4 kernels: every level this CPU has against the unpacked definition, byte for byte.
 * usage: [SEED=N] nvcheck */
#include "base/rng.h"
#include "kern/nv.h"
#include "num/fp8.h"
#include "num/nvfp4.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t seed = 1, draws;
static nv_kern level[ISA_COUNT];
static int levels;

static uint32_t draw(void) {
    uint32_t out[4];
    const uint32_t counter[4] = { (uint32_t)draws, (uint32_t)(draws >> 32), 7, 0 };
    draws++;
    rng_philox(out, counter, seed);
    return out[0];
}
static float normal(void) {
    float s = 0;
    for (int i = 0; i < 6; i++) s += (float)(draw() >> 8) * 0x1p-24f;
    return (s - 3) * 1.41f;
}

typedef enum fill { GAUSS, BYTES, WIDE, ZERO, EXTREME, FILLS } fill;

/* A checkpoint matrix; scales never have a sign or NaN (the loader refuses both). */
typedef struct matrix {
    int N, K;
    uint8_t *codes, *scales;
} matrix;

static matrix matrix_new(int N, int K, fill f) {
    matrix m = { N, K, xmalloc((size_t)N * (size_t)K / 2 + 1), xmalloc((size_t)N * (size_t)K / 16 + 1) };
    for (int64_t i = 0; i < (int64_t)N * K / 2; i++)
        m.codes[i] = f == ZERO ? (uint8_t)(draw() & 0x88) : f == EXTREME ? (draw() & 1 ? 0x77 : 0xff) : (uint8_t)draw();
    for (int64_t i = 0; i < (int64_t)N * K / 16; i++)
        m.scales[i] = f == GAUSS ? (uint8_t)(0x70 + draw() % 15) : f == EXTREME ? 0x7e : (uint8_t)(draw() % 0x7f);
    return m;
}
static void matrix_free(matrix *m) {
    free(m->codes);
    free(m->scales);
}

static void row_new(float *x, int K, fill f) {
    for (int i = 0; i < K; i++) {
        x[i] = normal();
        if (f == WIDE) x[i] *= ldexpf(1, (int)(draw() % 40) - 20);
        if (f == ZERO) x[i] = draw() & 1 ? 0.0f : -0.0f;
        if (f == EXTREME) x[i] = draw() & 1 ? 6.0f : -6.0f;
        if (f == BYTES && draw() % 8 == 0) x[i] *= ldexpf(1, -140);
    }
}

static const int8_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

/* The definition on the checkpoint's own layout; int8 codes in natural order. */
static float expect_int(const matrix *w, int n, const int *codes, const int32_t *scale) {
    int64_t sum = 0;
    for (int b = 0; b < w->K / 16; b++) {
        int32_t dot = 0;
        for (int i = b * 16; i < b * 16 + 16; i++) {
            const uint8_t c = w->codes[((int64_t)n * w->K + i) / 2];
            dot += twice[i % 2 ? c >> 4 : c & 15] * codes[i];
        }
        sum += (int64_t)dot * scale[b] * e4m3_times_512(w->scales[(int64_t)n * w->K / 16 + b]);
    }
    return (float)sum;
}
static float expect_float(const matrix *w, int n, const float *x) {
    float acc = 0;
    for (int b = 0; b < w->K / 16; b++) {
        float p = 0;
        for (int i = b * 16; i < b * 16 + 16; i++) {
            const uint8_t c = w->codes[((int64_t)n * w->K + i) / 2];
            p = fmaf(0.5f * (float)twice[i % 2 ? c >> 4 : c & 15], x[i], p);
        }
        acc = fmaf(p, e4m3_to_f32(w->scales[(int64_t)n * w->K / 16 + b]), acc);
    }
    return acc;
}

enum { MAX_M = 6 };

typedef enum mode { FP4, INT8, FLOAT } mode;

static void inputs(nv_act *a, char *mem, const nv_kern *k, const float *x, int K, mode how) {
    *a = nv_act_at(mem, K);
    if (how == FLOAT) {
        memcpy(a->x, x, (size_t)K * sizeof *x);
        memset(a->x + K, 0, (size_t)(nv_padded(K) - K) * sizeof *x);
    } else if (how == INT8) {
        k->act_int8(a, x, K);
    } else {
        uint8_t *codes = xmalloc((size_t)K), *scales = codes + K / 2;
        nvfp4_act_encode(codes, scales, x, K, 0.01f);
        k->act_fp4(a, codes, scales, K);
        free(codes);
    }
}

static void one_shape(int N, int K, fill f, mode how) {
    const matrix w = matrix_new(N, K, f);
    const int panels = nv_panels(N), Kp = nv_padded(K);
    const int64_t stride = nv_panel_bytes(K);
    const size_t act = nv_act_bytes(K), y_bytes = (size_t)MAX_M * (size_t)panels * 16 * sizeof(float);
    uint8_t *packed = NULL, *again = NULL;
    char *mem = NULL;
    assert_int_equal(posix_memalign((void **)&packed, 64, (size_t)(stride * panels)), 0);
    assert_int_equal(posix_memalign((void **)&again, 64, (size_t)(stride * panels)), 0);
    assert_int_equal(posix_memalign((void **)&mem, 64, act * MAX_M * 2), 0);
    float *x = xmalloc((size_t)MAX_M * (size_t)K * sizeof *x), *y = xmalloc(y_bytes);
    for (int m = 0; m < MAX_M; m++) row_new(x + (int64_t)m * K, K, f);
    for (int l = 0; l < levels; l++) {
        for (int p = 0; p < panels; p++)
            level[l].pack(again + p * stride, w.codes + (int64_t)p * 8 * K, w.scales + (int64_t)p * K,
                          N - p * 16 < 16 ? N - p * 16 : 16, K);
        if (l == 0) memcpy(packed, again, (size_t)(stride * panels));
        assert_memory_equal(packed, again, (size_t)(stride * panels));
        nv_act a[MAX_M], first[MAX_M];
        for (int m = 0; m < MAX_M; m++) {
            inputs(&a[m], mem + act * (size_t)m, &level[l], x + (int64_t)m * K, K, how);
            inputs(&first[m], mem + act * (size_t)(MAX_M + m), &level[0], x + (int64_t)m * K, K, how);
            const size_t used = how == FLOAT ? (size_t)Kp * 4 : (size_t)Kp * 3 / 2;
            assert_memory_equal(a[m].codes, first[m].codes, used);
            assert_memory_equal(&a[m].factor, &first[m].factor, sizeof a[m].factor);
            assert_int_equal(a[m].bad, first[m].bad);
        }
        for (int M = 1; M <= MAX_M; M++) {
            const int64_t ldy = panels * 16;
            memset(y, 0xff, y_bytes);
            (how == FLOAT ? level[l].dot_float : level[l].dot)(y, ldy, packed, stride, panels, Kp, a, M);
            for (int m = 0; m < M; m++)
                for (int n = 0; n < panels * 16; n++) {
                    float want = 0;
                    int codes[4096];
                    for (int i = 0; i < K; i++) codes[i] = a[m].codes[i / 8 * 8 + i % 8 / 2 + i % 2 * 4];
                    if (n < N)
                        want = how == FLOAT ? expect_float(&w, n, x + (int64_t)m * K)
                                            : expect_int(&w, n, codes, a[m].scale);
                    if (memcmp(&want, &y[m * ldy + n], sizeof want) != 0)
                        fail_msg("seed %llu: %s, N %d K %d fill %d mode %d M %d: y[%d][%d] = %a, want %a",
                                 (unsigned long long)seed, kern_isa_name(level[l].isa), N, K, f, how, M, m, n,
                                 (double)y[m * ldy + n], (double)want);
                }
        }
    }
    free(x);
    free(y);
    free(mem);
    free(packed);
    free(again);
    matrix_free((matrix *)&w);
}

static void shapes(void **state) {
    (void)state;
    static const int sizes[][2] = { { 16, 64 },  { 1, 16 },   { 17, 48 },   { 40, 80 },
                                    { 64, 256 }, { 33, 512 }, { 16, 2048 }, { 224, 320 } };
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++)
        for (fill f = 0; f < FILLS; f++)
            for (mode how = FP4; how <= FLOAT; how++) one_shape(sizes[i][0], sizes[i][1], f, how);
}

/* NaN in an input row is remembered; it must not become a number. */
static void nan_rows(void **state) {
    (void)state;
    float x[64];
    char *mem = NULL;
    assert_int_equal(posix_memalign((void **)&mem, 64, nv_act_bytes(64)), 0);
    for (int l = 0; l < levels; l++)
        for (mode how = FP4; how <= INT8; how++)
            for (int at = -1; at < 64; at++) {
                nv_act a;
                row_new(x, 64, GAUSS);
                if (at >= 0) x[at] = NAN;
                inputs(&a, mem, &level[l], x, 64, how);
                assert_int_equal(a.bad, at >= 0);
            }
    free(mem);
}

/* ---- gemm: what dot gives, for many rows ---- */

enum { GEMM_ROWS = 290 };

/* Inputs as bytes, so that scales of every size meet in one row; INT8 from floats of every size. */
static void gemm_inputs(nv_act *a, char *mem, const nv_kern *k, int K, fill f, mode how) {
    const matrix m = matrix_new(1, K, f);
    float *x = xmalloc((size_t)K * sizeof *x);
    row_new(x, K, f);
    *a = nv_act_at(mem, K);
    if (f == BYTES && draw() % 4 == 0) memset(m.scales, 0x38 + (int)(draw() % 3), (size_t)K / 16);
    if (how == INT8)
        k->act_int8(a, x, K);
    else
        k->act_fp4(a, m.codes, m.scales, K);
    free(x);
    matrix_free((matrix *)&m);
}

static void *aligned(size_t bytes) {
    void *p = NULL;
    assert_int_equal(posix_memalign(&p, 64, bytes), 0);
    return p;
}

typedef struct gemm_case {
    nv_act act[GEMM_ROWS];
    const nv_act *row[GEMM_ROWS]; /* in another order than in memory */
    char *mem;
    uint8_t *packed;
    int panels, K, M;
    const char *what;
} gemm_case;

static void gemm_equal(const gemm_case *c, const nv_kern *k) {
    const int Kp = nv_padded(c->K), tiles = (c->M + 15) / 16;
    const int64_t ldy = c->panels * 16 + 16, stride = nv_panel_bytes(c->K), tile = nv_tile_bytes(Kp);
    const size_t y_bytes = (size_t)(c->M * ldy) * sizeof(float);
    float *y = xmalloc(y_bytes), *want = xmalloc(y_bytes);
    uint8_t *planes = aligned((size_t)(tiles * tile)), *work = aligned(k->gemm_bytes);
    memset(planes, 0x5a, (size_t)(tiles * tile)); /* nothing may depend on what lay there before */
    memset(work, 0xa5, k->gemm_bytes);
    memset(y, 0xff, y_bytes);
    memset(want, 0xff, y_bytes);
    for (int m = 0; m < c->M; m++) level[0].dot(want + m * ldy, ldy, c->packed, stride, c->panels, Kp, c->row[m], 1);
    for (int t = 0; t < tiles; t++)
        k->planes(planes + t * tile, c->row + t * 16, c->M - t * 16 < 16 ? c->M - t * 16 : 16, Kp);
    k->gemm(y, ldy, c->packed, stride, c->panels, Kp, planes, c->M, work);
    for (int64_t i = 0; i < c->M * ldy; i++)
        if (memcmp(&y[i], &want[i], sizeof *y) != 0)
            fail_msg("seed %llu: %s gemm, %s, %d panels K %d M %d: y[%d][%d] = %a, want %a", (unsigned long long)seed,
                     kern_isa_name(k->isa), c->what, c->panels, c->K, c->M, (int)(i / ldy), (int)(i % ldy),
                     (double)y[i], (double)want[i]);
    free(y);
    free(want);
    free(planes);
    free(work);
}

static void gemm_levels(const gemm_case *c) {
    for (int l = 0; l < levels; l++)
        if (level[l].gemm) gemm_equal(c, &level[l]);
}

static void gemm_case_new(gemm_case *c, const matrix *w, int M, fill f, mode how) {
    static char what[64];
    const int64_t stride = nv_panel_bytes(w->K);
    const size_t act = nv_act_bytes(w->K);
    *c = (gemm_case){ .panels = nv_panels(w->N), .K = w->K, .M = M, .what = what };
    snprintf(what, sizeof what, "inputs %d mode %d", f, how);
    c->packed = aligned((size_t)(stride * c->panels));
    c->mem = aligned(act * (size_t)M);
    for (int p = 0; p < c->panels; p++)
        level[0].pack(c->packed + p * stride, w->codes + (int64_t)p * 8 * w->K, w->scales + (int64_t)p * w->K,
                      w->N - p * 16 < 16 ? w->N - p * 16 : 16, w->K);
    for (int m = 0; m < M; m++) {
        gemm_inputs(&c->act[m], c->mem + act * (size_t)m, &level[0], w->K, f, how);
        c->row[M - 1 - m] = &c->act[m];
    }
}
static void gemm_case_free(gemm_case *c) {
    free(c->mem);
    free(c->packed);
}

static bool any_gemm(void) {
    for (int l = 0; l < levels; l++)
        if (level[l].gemm) return true;
    printf("no level of this CPU has gemm (AMX int8 is needed): skipped\n");
    return false;
}

static void gemm_shapes(void **state) {
    (void)state;
    if (!any_gemm()) skip();
    static const struct {
        int N, K, M;
    } shape[] = { { 16, 64, 8 },    { 1, 16, 9 },    { 17, 80, 15 },   { 40, 512, 16 },  { 16, 528, 17 },
                  { 33, 1024, 31 }, { 16, 576, 32 }, { 20, 1088, 33 }, { 32, 2048, 40 }, { 16, 4096, 37 } };
    static gemm_case c;
    for (size_t i = 0; i < ARRAY_LEN(shape); i++)
        for (fill f = 0; f < FILLS; f++) {
            matrix w = matrix_new(shape[i].N, shape[i].K, f);
            for (fill g = 0; g < FILLS; g++)
                for (mode how = FP4; how <= INT8; how++) {
                    gemm_case_new(&c, &w, shape[i].M, g, how);
                    gemm_levels(&c);
                    gemm_case_free(&c);
                }
            matrix_free(&w);
        }
}

/* Every count of rows around one, two and many tiles; more than fit one chunk of them. */
static void gemm_rows(void **state) {
    (void)state;
    if (!any_gemm()) skip();
    static gemm_case c;
    for (int M = 1; M <= GEMM_ROWS; M += M < 40 ? 1 : 50) {
        matrix w = matrix_new(24, 192, M % 2 ? BYTES : GAUSS);
        gemm_case_new(&c, &w, M, M % 3 ? BYTES : GAUSS, M % 5 ? FP4 : INT8);
        gemm_levels(&c);
        gemm_case_free(&c);
        matrix_free(&w);
    }
}

/* The longest rows, all products of one sign: digits of -1 are 255 and -1, those of -30720 are 0 and -120. */
static void gemm_long(void **state) {
    (void)state;
    if (!any_gemm()) skip();
    enum { K = 32768 };
    static const uint8_t small[] = { 0x99, 0x01 }, large[] = { 0xff, 0x4a }, huge[] = { 0xff, 0x7d };
    static const uint8_t *const kinds[] = { small, large, huge };
    static gemm_case c;
    for (int i = 0; i < 9; i++) {
        matrix w = matrix_new(16, K, ZERO), x = matrix_new(1, K, ZERO);
        memset(w.codes, kinds[i % 3][0], (size_t)K * 8);
        memset(w.scales, kinds[i % 3][1], (size_t)K);
        memset(x.codes, kinds[i / 3][0], (size_t)K / 2);
        memset(x.scales, kinds[i / 3][1], (size_t)K / 16);
        w.scales[5] = x.scales[7] = 0x01; /* nothing can be shifted out */
        gemm_case_new(&c, &w, 8, ZERO, FP4);
        for (int m = 0; m < 8; m++) level[0].act_fp4(&c.act[m], x.codes, x.scales, K);
        gemm_levels(&c);
        gemm_case_free(&c);
        matrix_free(&w);
        matrix_free(&x);
    }
}

int main(void) {
    if (getenv("SEED")) seed = strtoull(getenv("SEED"), NULL, 0);
    printf("seed %llu, levels:", (unsigned long long)seed);
    static const kern_isa order[] = { ISA_REF, ISA_AVX2, ISA_AVX512, ISA_AMX, ISA_NEON, ISA_DOTPROD };
    for (size_t i = 0; i < ARRAY_LEN(order); i++) {
        nv_kern k;
        if (order[i] != ISA_REF && !kern_isa_supported(order[i])) continue;
        nv_kern_init(&k, order[i]);
        if (k.isa != order[i]) continue;
        level[levels++] = k;
        printf(" %s", kern_isa_name(k.isa));
    }
    printf("\n");
    const struct CMUnitTest tests[] = { cmocka_unit_test(shapes), cmocka_unit_test(nan_rows),
                                        cmocka_unit_test(gemm_shapes), cmocka_unit_test(gemm_rows),
                                        cmocka_unit_test(gemm_long) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
