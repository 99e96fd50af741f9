/* Searched block scales (kern/quant_search.c): the least error indeed, whatever way it is looked for; ties; 4 or 6. */
#include "base/rng.h"
#include "ckpt/ckpt.h"
#include "kern/quant.h"
#include "num/bf16.h"
#include "num/fp4.h"
#include "quant/kl.h"

#include "support.h"

static quant_kern fast, plain;

/* Error of a block under a scale code, the textbook way: in float64, to the nearest of the eight values. */
static double error_under(const uint16_t *w, uint8_t code, float s2) {
    static const double level[] = { 0, .5, 1, 1.5, 2, 3, 4, 6 };
    const double den = (double)e4m3_to_f32(code) * s2;
    double sum = 0;
    for (int i = 0; i < 16; i++) {
        const double x = fabs((double)bf16_to_f32(w[i]));
        double best = x;
        for (int l = 1; l < 8; l++)
            if (fabs(x - level[l] * den) < best) best = fabs(x - level[l] * den);
        sum += best * best;
    }
    return sum;
}

static double error_of_codes(const uint16_t *w, const uint8_t *codes, uint8_t scale, float s2) {
    double sum = 0;
    for (int i = 0; i < 16; i++) {
        const double y = (double)e2m1_to_f32((uint8_t)(codes[i / 2] >> (i & 1) * 4 & 15)) * e4m3_to_f32(scale) * s2;
        sum += (bf16_to_f32(w[i]) - y) * (bf16_to_f32(w[i]) - y);
    }
    return sum;
}

static uint8_t sweep(const uint16_t *w, float s2, double *least) {
    uint8_t found = 0;
    *least = INFINITY;
    for (int c = 1; c <= 126; c++) {
        const double e = error_under(w, (uint8_t)c, s2);
        if (e < *least) *least = e, found = (uint8_t)c;
    }
    return found;
}

static float amax_of(const uint16_t *w, int64_t n) { return plain.amax_bf16(w, n); }

typedef struct encoded {
    uint8_t *codes, *scales;
    float s2;
} encoded;

static encoded encode(const quant_kern *k, quant_algorithm how, const uint16_t *w, int64_t n, float amax) {
    encoded x = { malloc((size_t)n / 2), malloc((size_t)n / 16), quant_scale_2(how, amax, ARITH_CUDA) };
    quant_encode_bf16(k, how, x.codes, x.scales, w, n, x.s2, ARITH_CUDA);
    return x;
}

static void drop(encoded *x) {
    free(x->codes);
    free(x->scales);
}

static double total_error(const encoded *x, const uint16_t *w, int64_t n) {
    double sum = 0;
    for (int64_t b = 0; b < n / 16; b++) sum += error_of_codes(w + 16 * b, x->codes + 8 * b, x->scales[b], x->s2);
    return sum;
}

/* No code of all 126 does better, and MAX's own stays where nothing does. `amax` is that of the tensor or of its group. */
static void check_least(const uint16_t *w, int64_t n, float amax) {
    encoded mse = encode(&fast, QUANT_MSE, w, n, amax), max = encode(&fast, QUANT_MAX, w, n, amax);
    int moved = 0;
    for (int64_t b = 0; b < n / 16; b++) {
        double least;
        const uint8_t code = sweep(w + 16 * b, mse.s2, &least);
        const double got = error_of_codes(w + 16 * b, mse.codes + 8 * b, mse.scales[b], mse.s2);
        double ref2 = 0; /* float32 rounding of divisors and products moves each e by 1e-7 of x */
        for (int i = 0; i < 16; i++) ref2 += (double)bf16_to_f32(w[16 * b + i]) * bf16_to_f32(w[16 * b + i]);
        if (got > least + 4e-7 * sqrt(least * ref2) + 1e-13 * ref2)
            fail_msg("block %lld: scale %02x errs %g, %02x only %g", (long long)b, mse.scales[b], got, code, least);
        if (mse.scales[b] == max.scales[b]) continue;
        float x[16];
        double err2[2];
        const float den[2] = { e4m3_to_f32(mse.scales[b]) * mse.s2, e4m3_to_f32(max.scales[b]) * mse.s2 };
        for (int i = 0; i < 16; i++) x[i] = bf16_to_f32(w[16 * b + i]);
        plain.block_errors(err2, x, den, 2);
        assert_true(err2[0] < err2[1]); /* a tie would have kept it */
        moved++;
    }
    if (n >= 16000) assert_true(moved > n / 160); /* the search does something */
    drop(&mse);
    drop(&max);
}

static uint64_t draws;
static uint32_t draw(void) {
    uint32_t out[4];
    rng_philox(out, (const uint32_t[4]){ (uint32_t)draws++, 0, 0, 0 }, 20270301);
    return out[0];
}

enum { N = 16 * 1500 };
static uint16_t w[N];

static float random_weight(int how, int block) {
    const float u = (float)(int32_t)draw() * 0x1p-31f, v = (float)(int32_t)draw() * 0x1p-31f;
    switch (how) {
    case 0: return u + v;                                  /* triangular */
    case 1: return u * u * u * u * u;                      /* heavy tails */
    case 2: return ldexpf(u, block % 30 - 28);             /* every size of scale, down to the subnormal ones */
    case 3: return (float)((int)(draw() % 13) - 6) * 0.5f; /* on the grid */
    default: return draw() % 5 ? 0 : u;
    }
}

static void test_exhaustive(void **state) {
    (void)state;
    for (int how = 0; how < 5; how++) {
        for (int i = 0; i < N; i++) w[i] = bf16_from_f32(random_weight(how, i / 16));
        check_least(w, how == 3 ? 1600 : N, amax_of(w, N));
        check_least(w, 1600, amax_of(w, N) * 7);       /* a group's maximum above the tensor's */
        check_least(w, 1600, amax_of(w, N) * 0x1p-6f); /* and scales that must saturate */
    }
}

static void test_model(void **state) {
    (void)state;
    static const char *const names[] = { "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
                                         "model.language_model.layers.3.self_attn.o_proj.weight",
                                         "model.language_model.layers.5.mlp.shared_expert.down_proj.weight" };
    err e = { 0 };
    ckpt c;
    OK(ckpt_open(&c, TINY, &e));
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const st_tensor *t = ckpt_find(&c, str_of(names[i]));
        const int64_t n = (int64_t)t->elems;
        uint16_t *x = malloc(t->bytes);
        memcpy(x, t->data, t->bytes);
        const float amax = amax_of(x, n);
        check_least(x, n < N ? n : N, amax);
        double err2[3], ref2 = 0;
        for (int64_t k = 0; k < n; k++) ref2 += (double)bf16_to_f32(x[k]) * bf16_to_f32(x[k]);
        for (int how = 0; how < 3; how++) {
            encoded got = encode(&fast, (quant_algorithm)how, x, n, amax);
            err2[how] = sqrt(total_error(&got, x, n) / ref2);
            drop(&got);
        }
        print_message("%s: max %.4f, mse %.4f, four-over-six %.4f\n", names[i], err2[0], err2[1], err2[2]);
        assert_true(err2[QUANT_MSE] < 0.9 * err2[QUANT_MAX]);
        assert_true(err2[QUANT_FOUR_OVER_SIX] < 0.95 * err2[QUANT_MAX]);
        assert_true(err2[QUANT_MSE] < err2[QUANT_FOUR_OVER_SIX]);
        free(x);
    }
    ckpt_close(&c);
}

/* Two candidates only, the better of them, and 6 when they err alike; no scale above 384 of a tensor's own maximum. */
static void test_four_or_six(void **state) {
    (void)state;
    for (int how = 0; how < 5; how++) {
        for (int i = 0; i < N; i++) w[i] = bf16_from_f32(random_weight(how, i / 16));
        encoded got = encode(&fast, QUANT_FOUR_OVER_SIX, w, N, amax_of(w, N));
        int fours = 0;
        for (int b = 0; b < N / 16; b++) {
            const float m = amax_of(w + 16 * b, 16);
            const uint8_t six = nvfp4_block_scale(m, got.s2, ARITH_CUDA),
                          four = nvfp4_block_scale(1.5f * m, got.s2, ARITH_CUDA);
            const double e6 = error_under(w + 16 * b, six, got.s2), e4 = error_under(w + 16 * b, four, got.s2);
            assert_true(got.scales[b] == six || (m > 0 && got.scales[b] == four));
            assert_true(e4m3_to_f32(got.scales[b]) <= 384);
            if (fabs(e4 - e6) > 1e-6 * (e4 + e6)) assert_int_equal(got.scales[b], e4 < e6 ? four : six);
            if (e4 == e6) assert_int_equal(got.scales[b], six);
            fours += got.scales[b] != six;
        }
        if (how < 2) assert_true(fours > N / 160 && fours < N / 16 - N / 160);
        drop(&got);
    }
}

/* Worked by hand: s2 = 1, so the scale codes are the divisors. */
static void test_by_hand(void **state) {
    (void)state;
    const struct {
        float x[4]; /* the rest of the block is 0 */
        float max, mse, four_or_six;
    } cases[] = {
        { { 6, 3, 1, 0.5f }, 1, 1, 1 },      /* exact under 1: nothing to gain */
        { { 4, 3, 2, 1 }, 0.6875f, 1, 1 },   /* exact when 4 maps to 4; by its maximum the scale would be 4 / 6 */
        { { 4, 4, 4, 4 }, 0.6875f, 1, 1 },   /* exact under 1, 2, 4 and 8: the smallest of these */
        { { 6, 5, 5, 5 }, 1, 1.625f, 1.5f }, /* 5 lies between 4 and 6; 3 x 1.625 = 4.875, 4 x 1.625 = 6.5: 0.297 */
        { { 0, 0, 0, 0 }, 1, 1, 1 },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        uint16_t x[16] = { 0 };
        uint8_t codes[8], scale;
        for (int j = 0; j < 4; j++) x[j] = bf16_from_f32(cases[i].x[j]);
        const float want[] = { cases[i].max, cases[i].mse, cases[i].four_or_six };
        for (int how = 0; how < 3; how++) {
            quant_encode_bf16(&plain, (quant_algorithm)how, codes, &scale, x, 16, 1, ARITH_CPU);
            if (e4m3_to_f32(scale) != want[how])
                fail_msg("case %zu, %s: scale %g, not %g", i, quant_algorithms[how], (double)e4m3_to_f32(scale),
                         (double)want[how]);
        }
    }
}

static void test_scale_2(void **state) {
    (void)state;
    for (uint32_t m = 0; m < 128; m++) {
        const float amax = bf16_to_f32((uint16_t)(0x3f80 + m));
        for (int how = QUANT_MAX; how <= QUANT_MSE; how++)
            for (int a = 0; a < 2; a++)
                assert_true(quant_scale_2((quant_algorithm)how, amax, (quant_arith)a) ==
                            nvfp4_scale_2(amax, (quant_arith)a));
        assert_true(quant_scale_2(QUANT_FOUR_OVER_SIX, amax, ARITH_CPU) == amax / 1536.0f);
        assert_true(quant_scale_2(QUANT_FOUR_OVER_SIX, amax, ARITH_CUDA) == amax * (1.0f / 1536.0f));
    }
}

/* Float32 weights take the same way as bfloat16 ones. */
static void test_float32(void **state) {
    (void)state;
    float *f = malloc(N * sizeof *f);
    uint8_t *codes = malloc(N / 2), *scales = malloc(N / 16);
    for (int i = 0; i < N; i++) {
        w[i] = bf16_from_f32(random_weight(i % 2, i / 16));
        f[i] = bf16_to_f32(w[i]);
    }
    for (int how = 0; how < 3; how++) {
        encoded got = encode(&fast, (quant_algorithm)how, w, N, amax_of(w, N));
        quant_encode_f32(&plain, (quant_algorithm)how, codes, scales, f, N, got.s2, ARITH_CUDA);
        assert_memory_equal(scales, got.scales, N / 16);
        assert_memory_equal(codes, got.codes, N / 2);
        drop(&got);
    }
    free(f);
    free(codes);
    free(scales);
}

static void test_kl(void **state) {
    (void)state;
    const float want[] = { logf(0.5f), logf(0.25f), logf(0.25f), 0, 0, 0 }; /* two rows of three */
    const float got[] = { 7 + logf(0.25f), 7 + logf(0.25f), 7 + logf(0.5f), 90, 90, 90 };
    const kl_figures same = kl_compare(want, want, 2, 3), k = kl_compare(got, want, 2, 3);
    assert_true(same.mean == 0 && same.worst == 0 && same.same_top == 1 && same.positions == 2);
    const double first = 0.5 * log(2) - 0.25 * log(2); /* .5 ln(.5/.25) + .25 ln(.25/.25) + .25 ln(.25/.5) */
    assert_true(fabs(k.worst - first) < 1e-6 && fabs(k.mean - first / 2) < 1e-6);
    assert_true(k.same_top == 0.5);
}

int main(void) {
    quant_kern_init(&fast, ISA_COUNT);
    quant_kern_init(&plain, ISA_REF);
    log_set_level(0);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_exhaustive),  cmocka_unit_test(test_model),
                                        cmocka_unit_test(test_four_or_six), cmocka_unit_test(test_by_hand),
                                        cmocka_unit_test(test_scale_2),     cmocka_unit_test(test_float32),
                                        cmocka_unit_test(test_kl) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
