/* quantcheck - every member of quant.h at every level this CPU has, against the reference, byte for byte.
 * usage: [SEED=N] quantcheck [--full]      --full: every float32 through the conversions (a minute or two) */
#include "base/rng.h"
#include "kern/quant.h"
#include "num/bf16.h"
#include "num/fp4.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t seed;
static bool full;
static quant_kern ref, all[ISA_COUNT];
static int levels;

static uint64_t draws;
static uint32_t draw(void) {
    uint32_t out[4];
    const uint32_t counter[4] = { (uint32_t)draws, (uint32_t)(draws >> 32), 0, 0 };
    draws++;
    rng_philox(out, counter, seed);
    return out[0];
}
static float uniform(void) { return (float)(draw() >> 8) * 0x1p-24f; }
static float normal(void) {
    float s = 0;
    for (int i = 0; i < 6; i++) s += uniform();
    return (s - 3) * 1.41f;
}

static float f32_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

/* ---- data ---- */

typedef enum fill {
    NORMAL, /* Gaussian, 0.05 */
    BITS,   /* any bit pattern: NaN, Inf and subnormals too */
    ZEROS,  /* both zeros */
    TIES,   /* boundaries between codes at the block's own scale, and their neighbours */
    SUBNORMAL,
    OUTLIERS, /* heavy tails, now and then a huge value */
    RANGES,   /* each block at its own power of two, from underflow to the top */
    ONE_NAN,  /* ordinary, a NaN in some blocks */
    ONE_INF,
    LARGEST, /* +-largest finite */
    FILLS
} fill;

static float tie(void) {
    static const float v[] = { 0, .25f, .5f, .75f, 1, 1.25f, 1.5f, 1.75f, 2, 2.5f, 3, 3.5f, 4, 5, 6, 6.5f, 7, 7.5f };
    const float s = f32_of(bits_of(v[draw() % 18]) + (draw() % 8 == 0 ? (draw() & 2) - 1 : 0));
    return draw() & 1 ? s : -s;
}

static float sample(fill how, int64_t i) {
    const float sign = draw() & 1 ? 1.0f : -1.0f;
    switch (how) {
    case NORMAL: return normal() * 0.05f;
    case BITS: return f32_of(draw());
    case ZEROS: return sign * 0;
    case TIES: return tie() * ldexpf(1, (int)(i / 16 % 24) - 12) * (i / 16 % 3 ? 1 : 1.625f);
    case SUBNORMAL: return f32_of((draw() & 0x80000000u) | (draw() % 3 ? draw() & 0xffffu : (draw() & 0x7fu) << 16));
    case OUTLIERS: return sign * powf(uniform(), -2) * 0.01f * (draw() % 500 ? 1 : 1e6f);
    case RANGES: return sign * ldexpf(1 + uniform(), (int)(i / 16 * 7 % 277) - 149);
    case ONE_NAN: return draw() % 40 ? normal() : f32_of(0x7f800001u | (draw() & 0x807fffffu));
    case ONE_INF: return draw() % 40 ? normal() : sign * INFINITY;
    default: return sign * f32_of(0x7f7fffffu);
    }
}

/* Buffers end in a guard zone, and start off any vector's alignment. */
enum { GUARD = 64, MAX_N = 5000, OFF = 4 };
typedef struct data {
    float *f;
    uint16_t *h;
    void *base_f, *base_h;
} data;

static void fill_data(data *d, int64_t n, fill how) {
    d->base_f = malloc((size_t)n * 4 + OFF);
    d->base_h = malloc((size_t)n * 2 + OFF);
    d->f = (float *)((char *)d->base_f + OFF);
    d->h = (uint16_t *)((char *)d->base_h + 2);
    for (int64_t i = 0; i < n; i++) {
        d->f[i] = sample(how, i);
        d->h[i] = how == BITS || how == SUBNORMAL ? (uint16_t)draw() & (how == BITS ? 0xffff : 0x807f)
                                                  : bf16_from_f32(d->f[i]);
    }
}

static void free_data(data *d) {
    free(d->base_f);
    free(d->base_h);
}

/* Two outputs of `bytes` bytes with guard zones: [0] reference, [1] tested. */
static uint8_t *out_new(size_t bytes) {
    uint8_t *p = malloc(bytes + 2 * GUARD);
    memset(p, 0xa5, bytes + 2 * GUARD);
    return p;
}
static uint8_t *out_at(uint8_t *p) { return p + GUARD - 4; }

static const char *where;
static int64_t where_n;
static fill where_fill;

/* Byte equality; float32 (4) and bfloat16 (2) results may differ in the bits of a NaN. */
static void same(const quant_kern *k, uint8_t *a, uint8_t *b, size_t bytes, int nan_size) {
    if (memcmp(a, b, bytes + 2 * GUARD) != 0) {
        for (size_t i = 0; i < bytes + 2 * GUARD; i++) {
            if (a[i] == b[i]) continue;
            const ptrdiff_t at = (ptrdiff_t)i - (GUARD - 4);
            if (nan_size && at >= 0 && at < (ptrdiff_t)bytes) {
                const size_t e = (size_t)at / (size_t)nan_size;
                float x, y;
                if (nan_size == 4) {
                    memcpy(&x, out_at(a) + 4 * e, 4);
                    memcpy(&y, out_at(b) + 4 * e, 4);
                } else {
                    uint16_t hx, hy;
                    memcpy(&hx, out_at(a) + 2 * e, 2);
                    memcpy(&hy, out_at(b) + 2 * e, 2);
                    x = bf16_to_f32(hx);
                    y = bf16_to_f32(hy);
                }
                if (isnan(x) && isnan(y)) continue;
            }
            fail_msg("%s %s, fill %d, n %lld: byte %td is %02x, not %02x (seed %llu)", kern_isa_name(k->isa), where,
                     (int)where_fill, (long long)where_n, at, b[i], a[i], (unsigned long long)seed);
        }
    }
    free(a);
    free(b);
}

static void same_float(const quant_kern *k, float a, float b) {
    if (bits_of(a) == bits_of(b) || (isnan(a) && isnan(b))) return;
    fail_msg("%s %s, fill %d, n %lld: %a, not %a (seed %llu)", kern_isa_name(k->isa), where, (int)where_fill,
             (long long)where_n, (double)b, (double)a, (unsigned long long)seed);
}

#define TWO(bytes) uint8_t *a = out_new(bytes), *b = out_new(bytes)

/* ---- one size, one fill, one level ---- */

static void weights(const quant_kern *k, const data *d, int64_t n, float s2, quant_arith arith) {
    const size_t c = (size_t)n / 2, s = (size_t)n / 16;
    for (int f32 = 0; f32 < 2; f32++) {
        where = f32 ? "encode_f32" : "encode_bf16";
        TWO(c);
        uint8_t *sa = out_new(s), *sb = out_new(s);
        if (f32) {
            ref.encode_f32(out_at(a), out_at(sa), d->f, n, s2, arith);
            k->encode_f32(out_at(b), out_at(sb), d->f, n, s2, arith);
        } else {
            ref.encode_bf16(out_at(a), out_at(sa), d->h, n, s2, arith);
            k->encode_bf16(out_at(b), out_at(sb), d->h, n, s2, arith);
        }
        same(k, a, b, c, 0);
        same(k, sa, sb, s, 0);
    }
}

static void given_scales(const quant_kern *k, const data *d, int64_t n, float s2) {
    const size_t c = (size_t)n / 2;
    uint8_t *scales = malloc((size_t)n / 16 + 1);
    for (int64_t i = 0; i < n / 16; i++) scales[i] = (uint8_t)draw();
    for (int f32 = 0; f32 < 2; f32++) {
        where = f32 ? "codes_f32" : "codes_bf16";
        TWO(c);
        if (f32) {
            ref.codes_f32(out_at(a), scales, d->f, n, s2);
            k->codes_f32(out_at(b), scales, d->f, n, s2);
        } else {
            ref.codes_bf16(out_at(a), scales, d->h, n, s2);
            k->codes_bf16(out_at(b), scales, d->h, n, s2);
        }
        same(k, a, b, c, 0);
    }
    uint8_t *codes = malloc(c + 1);
    for (size_t i = 0; i < c; i++) codes[i] = (uint8_t)draw();
    where = "decode_f32";
    {
        TWO((size_t)n * 4);
        ref.decode_f32((float *)out_at(a), codes, scales, n, s2);
        k->decode_f32((float *)out_at(b), codes, scales, n, s2);
        same(k, a, b, (size_t)n * 4, 4);
    }
    where = "decode_bf16";
    {
        TWO((size_t)n * 2);
        ref.decode_bf16((uint16_t *)out_at(a), codes, scales, n, s2);
        k->decode_bf16((uint16_t *)out_at(b), codes, scales, n, s2);
        same(k, a, b, (size_t)n * 2, 2);
    }
    quant_stats p = { 0 }, q = { 0 };
    where = "quant_stats_bf16";
    quant_stats_bf16(&ref, &p, d->h, codes, scales, n, s2);
    quant_stats_bf16(k, &q, d->h, codes, scales, n, s2);
    quant_stats_f32(&ref, &p, d->f, codes, scales, n, s2);
    quant_stats_f32(k, &q, d->f, codes, scales, n, s2);
    if (memcmp(&p.blocks, &q.blocks, sizeof p.blocks) != 0)
        fail_msg("%s %s: other counts", kern_isa_name(k->isa), where);
    for (int l = 0; l < 32; l++) {
        const double x = p.error.err2[l % 16], y = q.error.err2[l % 16], u = p.error.ref2[l % 16],
                     v = q.error.ref2[l % 16];
        if (!(x == y || (isnan(x) && isnan(y))) || !(u == v || (isnan(u) && isnan(v))))
            fail_msg("%s %s, fill %d, n %lld: lane %d (seed %llu)", kern_isa_name(k->isa), where, (int)where_fill,
                     (long long)n, l, (unsigned long long)seed);
    }
    free(codes);
    free(scales);
}

/* Searched scales; quantize never meets NaN or Inf, but any bytes must do no harm. */
static void searched(const quant_kern *k, const data *d, int64_t n, float s2) {
    float den[20];
    double x[20], y[20];
    where = "block_errors";
    for (int i = 0; i < 20; i++) den[i] = e4m3_to_f32((uint8_t)(draw() % 127)) * s2;
    for (int64_t b = 0; b < n / 16; b++) {
        const int count = (int)(draw() % 21);
        ref.block_errors(x, d->f + 16 * b, den, count);
        k->block_errors(y, d->f + 16 * b, den, count);
        for (int i = 0; i < count; i++)
            if (!(x[i] == y[i] || (isnan(x[i]) && isnan(y[i]))))
                fail_msg("%s block_errors, fill %d: %a, reference %a (seed %llu)", kern_isa_name(k->isa),
                         (int)where_fill, y[i], x[i], (unsigned long long)seed);
    }
    if (n > 512 || stats_nonfinite_f32(d->f, n) >= 0 || stats_nonfinite_bf16(d->h, n) >= 0) return;
    for (int how = QUANT_MAX; how <= QUANT_FOUR_OVER_SIX; how++)
        for (int f32 = 0; f32 < 2; f32++) {
            const size_t c = (size_t)n / 2, s = (size_t)n / 16;
            where = quant_algorithms[how];
            TWO(c);
            uint8_t *sa = out_new(s), *sb = out_new(s);
            if (f32) {
                quant_encode_f32(&ref, (quant_algorithm)how, out_at(a), out_at(sa), d->f, n, s2, ARITH_CPU);
                quant_encode_f32(k, (quant_algorithm)how, out_at(b), out_at(sb), d->f, n, s2, ARITH_CPU);
            } else {
                quant_encode_bf16(&ref, (quant_algorithm)how, out_at(a), out_at(sa), d->h, n, s2, ARITH_CUDA);
                quant_encode_bf16(k, (quant_algorithm)how, out_at(b), out_at(sb), d->h, n, s2, ARITH_CUDA);
            }
            same(k, sa, sb, s, 0);
            same(k, a, b, c, 0);
        }
}

static void activations(const quant_kern *k, const data *d, int64_t n, float g) {
    const size_t c = (size_t)n / 2, s = (size_t)n / 16;
    where = "act_encode";
    {
        TWO(c);
        uint8_t *sa = out_new(s), *sb = out_new(s);
        ref.act_encode(out_at(a), out_at(sa), d->f, n, g);
        k->act_encode(out_at(b), out_at(sb), d->f, n, g);
        same(k, a, b, c, 0);
        same(k, sa, sb, s, 0);
    }
    where = "quant_act_sim";
    {
        TWO((size_t)n * 4);
        nvfp4_act_sim((float *)out_at(a), d->f, n, g);
        memcpy(out_at(b), d->f, (size_t)n * 4);
        quant_act_sim(k, (float *)out_at(b), (float *)out_at(b), n, g);
        same(k, a, b, (size_t)n * 4, 4);
    }
}

static void fp8(const quant_kern *k, const data *d, int64_t n, float s) {
    const size_t bytes = (size_t)n;
    for (int i = 0; i < 3; i++) {
        where = i == 0 ? "fp8_div" : i == 1 ? "fp8_mul" : "fp8_weight";
        TWO(bytes);
        if (i == 0)
            ref.fp8_div(out_at(a), d->f, n, s), k->fp8_div(out_at(b), d->f, n, s);
        else if (i == 1)
            ref.fp8_mul(out_at(a), d->f, n, s), k->fp8_mul(out_at(b), d->f, n, s);
        else
            ref.fp8_weight(out_at(a), d->h, n, s), k->fp8_weight(out_at(b), d->h, n, s);
        /* The bytes of a NaN made by the division itself carry the machine's sign. */
        for (size_t j = 0; j < bytes; j++)
            if ((out_at(a)[j] & 0x7f) == 0x7f && (out_at(b)[j] & 0x7f) == 0x7f) out_at(a)[j] = out_at(b)[j];
        same(k, a, b, bytes, 0);
    }
    uint8_t *codes = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) codes[i] = (uint8_t)draw();
    where = "fp8_decode";
    TWO(bytes * 4);
    ref.fp8_decode((float *)out_at(a), codes, n, s);
    k->fp8_decode((float *)out_at(b), codes, n, s);
    same(k, a, b, bytes * 4, 4);
    free(codes);
}

static void statistics(const quant_kern *k, const data *d, int64_t n) {
    where = "amax_bf16";
    same_float(k, ref.amax_bf16(d->h, n), k->amax_bf16(d->h, n));
    where = "amax_f32";
    same_float(k, ref.amax_f32(d->f, n), k->amax_f32(d->f, n));
    where = "nonfinite";
    if (ref.nonfinite_bf16(d->h, n) != k->nonfinite_bf16(d->h, n) ||
        ref.nonfinite_f32(d->f, n) != k->nonfinite_f32(d->f, n))
        fail_msg("%s nonfinite, n %lld (seed %llu)", kern_isa_name(k->isa), (long long)n, (unsigned long long)seed);
    where = "error";
    float *y = malloc((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; i++) y[i] = d->f[i] * (1 + normal() * 0.1f);
    stats_error p = { .err2 = { 1 } }, q = p;
    ref.error_bf16(&p, d->h, y, n);
    k->error_bf16(&q, d->h, y, n);
    ref.error_f32(&p, d->f, y, n);
    k->error_f32(&q, d->f, y, n);
    for (int l = 0; l < 16; l++)
        if (!(p.err2[l] == q.err2[l] || (isnan(p.err2[l]) && isnan(q.err2[l]))) ||
            !(p.ref2[l] == q.ref2[l] || (isnan(p.ref2[l]) && isnan(q.ref2[l]))))
            fail_msg("%s error, fill %d, n %lld: lane %d (seed %llu)", kern_isa_name(k->isa), (int)where_fill,
                     (long long)n, l, (unsigned long long)seed);
    free(y);
    if (n % 16) return;
    for (int f32 = 0; f32 < 2; f32++) {
        where = f32 ? "block_amax_f32" : "block_amax_bf16";
        TWO((size_t)n / 4);
        if (f32)
            ref.block_amax_f32((float *)out_at(a), d->f, n), k->block_amax_f32((float *)out_at(b), d->f, n);
        else
            ref.block_amax_bf16((float *)out_at(a), d->h, n), k->block_amax_bf16((float *)out_at(b), d->h, n);
        same(k, a, b, (size_t)n / 4, 0);
    }
}

/* Any maxima (also NaN, Inf, negative ones) with any scale bytes, the ones that are counted often. */
static void block_counts(const quant_kern *k, int64_t n) {
    static const uint8_t often[] = { 0x7e, 0x01, 0x7f, 0xff, 0x00, 0x38 };
    static const float scale[] = { 1, 1.0f / 64, 0x1p-140f, 1e30f, 0, INFINITY, NAN, 1e-8f };
    float *b = malloc((size_t)n * 4 + 4);
    uint8_t *c = malloc((size_t)n + 1);
    for (size_t i = 0; i < ARRAY_LEN(scale); i++) {
        for (int64_t at = 0; at < n; at++) {
            const uint32_t u = (uint32_t)draw() & 15;
            c[at] = u < ARRAY_LEN(often) ? often[u] : (uint8_t)draw();
            b[at] = u == 6   ? NAN
                    : u == 7 ? INFINITY
                    : u == 8 ? 0
                             : 6 * scale[i] * ldexpf(1 + uniform(), (int)(draw() % 24) - 13);
            if (u == 9) b[at] = 7 * (e4m3_to_f32(c[at]) * scale[i]); /* at the edge of clipped */
            if (u == 0) b[at] = draw() & 1 ? 464 * (6 * scale[i]) : b[at];
            if (u == 1) b[at] = draw() & 1 ? 0x1p-10f * (6 * scale[i]) : b[at];
        }
        stats_blocks p = { .zero = 3, .nan = 1 }, q = p;
        ref.blocks(&p, b, c, n, scale[i]);
        k->blocks(&q, b, c, n, scale[i]);
        if (memcmp(&p, &q, sizeof p) != 0)
            fail_msg("%s blocks, n %lld, scale %g (seed %llu)", kern_isa_name(k->isa), (long long)n, (double)scale[i],
                     (unsigned long long)seed);
    }
    free(b);
    free(c);
}

/* ---- cases ---- */

static float any_scale(const data *d, int64_t n, int i) {
    static const float fixed[] = { 1, 1.0f / 64, 0x1p-140f, 1e30f, 0, INFINITY, NAN, 1e-8f };
    if (i == 0) return nvfp4_scale_2(stats_amax_f32(d->f, n), ARITH_CUDA);
    if (i == 1) return nvfp4_scale_2(stats_amax_bf16(d->h, n), ARITH_CPU);
    if (i == 2) return ldexpf(1 + uniform(), (int)(draw() % 40) - 30);
    return fixed[i - 3];
}

static void kernels(void **state) {
    (void)state;
    static const int64_t blocks[] = { 0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 67, 200 };
    for (int how = 0; how < FILLS; how++)
        for (size_t s = 0; s < ARRAY_LEN(blocks); s++) {
            const int64_t n = where_n = blocks[s] * 16;
            where_fill = (fill)how;
            data d;
            fill_data(&d, n, (fill)how);
            for (int l = 0; l < levels; l++) {
                statistics(&all[l], &d, n);
                for (int i = 0; i < 11; i++) {
                    const float s2 = any_scale(&d, n, i);
                    weights(&all[l], &d, n, s2, i & 1 ? ARITH_CPU : ARITH_CUDA);
                    given_scales(&all[l], &d, n, s2);
                    searched(&all[l], &d, n, s2);
                    if (s2 > 0) activations(&all[l], &d, n, s2);
                }
            }
            free_data(&d);
        }
}

static void tails(void **state) {
    (void)state;
    for (int how = 0; how < FILLS; how++)
        for (int64_t n = 0; n < 140; n++) {
            where_n = n;
            where_fill = (fill)how;
            data d;
            fill_data(&d, n, (fill)how);
            for (int l = 0; l < levels; l++) {
                statistics(&all[l], &d, n);
                block_counts(&all[l], n);
                for (int i = 1; i < 4; i++) fp8(&all[l], &d, n, any_scale(&d, n, i));
            }
            free_data(&d);
        }
}

/* Pieces of whole blocks give the bits of one call. */
static void pieces(void **state) {
    (void)state;
    data d;
    fill_data(&d, MAX_N / 16 * 16, NORMAL);
    const int64_t n = MAX_N / 16 * 16, cut = 16 * (1 + draw() % 100);
    const float s2 = nvfp4_scale_2(stats_amax_bf16(d.h, n), ARITH_CUDA);
    uint8_t *codes = malloc((size_t)n / 2), *scales = malloc((size_t)n / 16);
    for (int l = 0; l < levels; l++) {
        const quant_kern *k = &all[l];
        quant_stats one = { 0 }, two = { 0 };
        k->encode_bf16(codes, scales, d.h, n, s2, ARITH_CUDA);
        quant_stats_bf16(k, &one, d.h, codes, scales, n, s2);
        quant_stats_bf16(k, &two, d.h, codes, scales, cut, s2);
        quant_stats_bf16(k, &two, d.h + cut, codes + cut / 2, scales + cut / 16, n - cut, s2);
        assert_memory_equal(&one, &two, sizeof one);
        assert_true(stats_error_relative(&one.error) > 0.08 && stats_error_relative(&one.error) < 0.12 &&
                    one.blocks.saturated + one.blocks.clipped == 0);
    }
    free(codes);
    free(scales);
    free_data(&d);
}

/* Every bfloat16 as weight, as block maximum and through the FP8 rules, with a spread of scales. */
static void every_bf16(void **state) {
    (void)state;
    static uint16_t h[65536], blocks[65536 * 16];
    static uint8_t a[65536], b[65536], sa[65536], sb[65536], ca[65536 * 8], cb[65536 * 8];
    for (int i = 0; i < 65536; i++) {
        h[i] = (uint16_t)i;
        for (int j = 0; j < 16; j++)
            blocks[16 * i + j] = j == i % 16 ? (uint16_t)i : (uint16_t)(draw() % (1 + (i & 0x7fff)));
    }
    memset(sa, 0x38, sizeof sa);
    for (int l = 0; l < levels; l++) {
        const quant_kern *k = &all[l];
        for (int i = 0; i < 6; i++) {
            const float s2 = i == 0 ? 1 : i == 1 ? 1.0f / 6 : ldexpf(1 + uniform(), -4 * i);
            ref.codes_bf16(a, sa, h, 65536, s2);
            k->codes_bf16(b, sa, h, 65536, s2);
            assert_memory_equal(a, b, 32768);
            if (i == 0)
                for (int j = 0; j < 65536; j++)
                    assert_int_equal(b[j / 2] >> (j & 1) * 4 & 15, e2m1_from_f32(bf16_to_f32(h[j])));
            ref.fp8_weight(a, h, 65536, s2);
            k->fp8_weight(b, h, 65536, s2);
            assert_memory_equal(a, b, 65536);
            for (quant_arith arith = ARITH_CUDA; arith <= ARITH_CPU; arith++) {
                ref.encode_bf16(ca, a, blocks, 65536 * 16, s2, arith);
                k->encode_bf16(cb, sb, blocks, 65536 * 16, s2, arith);
                assert_memory_equal(a, sb, 65536);
                assert_memory_equal(ca, cb, sizeof ca);
            }
        }
    }
}

/* Float32 through the conversions: with m = 1 the rounding is bare. Chunks of consecutive bit patterns; the reference is
 * the scalar function (test_codec checks that against float64). */
enum { RUN = 4096 };
static void run_of(uint32_t first) {
    static float x[RUN], blocks[RUN * 16];
    static uint8_t eight[RUN], four[RUN], scale[RUN], b[RUN], ones[RUN / 16], scales[RUN], codes[RUN * 8];
    memset(ones, 0x38, sizeof ones);
    for (uint32_t i = 0; i < RUN; i++) {
        x[i] = f32_of(first + i);
        blocks[16 * i] = x[i];
        eight[i] = e4m3_from_f32(x[i]);
        four[i] = e2m1_from_f32(x[i]);
        scale[i] = isnan(x[i]) ? 0x7f : e4m3_block_scale(x[i] == 0 ? 1 : fabsf(x[i]));
    }
    for (int l = levels > 1 ? 1 : 0; l < levels; l++) {
        const quant_kern *k = &all[l];
        k->fp8_mul(b, x, RUN, 1);
        for (int i = 0; i < RUN; i++)
            if (eight[i] != b[i])
                fail_msg("%s fp8_mul: %08x gives %02x, not %02x", kern_isa_name(k->isa), first + (uint32_t)i, b[i],
                         eight[i]);
        k->codes_f32(b, ones, x, RUN, 1);
        for (int i = 0; i < RUN; i++)
            if ((b[i / 2] >> (i & 1) * 4 & 15) != four[i])
                fail_msg("%s codes_f32: %08x does not give %x", kern_isa_name(k->isa), first + (uint32_t)i, four[i]);
        if (full && first >> 31) continue;
        k->encode_f32(codes, scales, blocks, RUN * 16, 1.0f / 6,
                      ARITH_CUDA); /* fl(6 * fl(1/6)) = 1: the scale is bare */
        for (int i = 0; i < RUN; i++)
            if (scales[i] != scale[i])
                fail_msg("%s block scale: %08x gives %02x, not %02x", kern_isa_name(k->isa), first + (uint32_t)i,
                         scales[i], scale[i]);
    }
}

static void every_f32(void **state) {
    (void)state;
    if (full) {
        for (uint64_t u = 0; u < 1ull << 32; u += RUN) run_of((uint32_t)u);
        return;
    }
    /* values and midpoints of both formats, 2048 neighbours below and above, both signs; then random runs */
    for (int c = 1; c < 0x7f; c++)
        for (int half = 0; half < 2; half++) {
            const float v = e4m3_to_f32((uint8_t)c), next = c < 0x7e ? e4m3_to_f32((uint8_t)(c + 1)) : 480;
            const uint32_t u = bits_of(half ? (v + next) / 2 : v) - RUN / 2;
            run_of(u);
            if (c % 8 == 0) run_of(u | 0x80000000u);
        }
    run_of(0);
    run_of(0x80000000u);
    run_of(0x7f800000u - RUN / 2);
    run_of(0xffffffffu - RUN + 1);
    for (int i = 0; i < 100; i++) run_of(draw());
}

static void table(void **state) {
    (void)state;
    quant_kern k;
    quant_kern_init(&k, ISA_REF);
    assert_int_equal(k.isa, ISA_REF);
    quant_kern_init(&k, ISA_COUNT);
    assert_int_equal(k.isa, all[levels - 1].isa);
#if defined(__x86_64__)
    quant_kern_init(&k, ISA_NEON);
    assert_int_equal(k.isa, ISA_REF);
    quant_kern_init(&k, ISA_AVX2);
    assert_int_equal(k.isa, kern_isa_supported(ISA_AVX2) ? ISA_AVX2 : ISA_REF);
#else
    quant_kern_init(&k, ISA_AVX512);
    assert_int_equal(k.isa, ISA_REF);
#endif
}

int main(int argc, char **argv) {
    const char *given = getenv("SEED");
    seed = given ? strtoull(given, NULL, 0) : 20261202;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--full") == 0) full = true;
    quant_init_ref(&ref);
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        quant_kern k;
        quant_kern_init(&k, (kern_isa)isa);
        if (levels == 0 || k.isa > all[levels - 1].isa) all[levels++] = k;
    }
    printf("quantcheck: seed %llu, levels", (unsigned long long)seed);
    for (int l = 0; l < levels; l++) printf(" %s", kern_isa_name(all[l].isa));
    printf("\n");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(table),  cmocka_unit_test(kernels),    cmocka_unit_test(tails),
        cmocka_unit_test(pieces), cmocka_unit_test(every_bf16), cmocka_unit_test(every_f32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
