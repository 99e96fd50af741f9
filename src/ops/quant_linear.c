#include "ops/quant_linear.h"

#include <math.h>
#include <string.h>

#include "kern/nv.h"

enum { BLOCK = NVFP4_BLOCK };

/* E2M1 doubled is an integer. */
static const int16_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

/* A quantized row: integers that multiply the weight's integers. Layout of the work memory. */
typedef struct qact {
    int16_t *v;     /* [K] FP4: doubled codes; INT8: codes */
    int32_t *scale; /* [K / 16] FP4: E4M3 value x 512; INT8: the block's integer */
    int32_t *wide;  /* [K] FP8: E4M3 value x 512 */
    float *x;       /* [K] FLOAT: the inputs */
    float *factor;  /* INT8: the row's t; others unused */
} qact;

static qact parts(void *act, int K) {
    uint8_t *p = act;
    const size_t k = (size_t)(K + BLOCK - 1) / BLOCK * BLOCK;
    return (qact){ .v = (int16_t *)(void *)p,
                   .scale = (int32_t *)(void *)(p + 2 * k),
                   .wide = (int32_t *)(void *)(p + 3 * k),
                   .x = (float *)(void *)(p + 3 * k),
                   .factor = (float *)(void *)(p + 7 * k) };
}

size_t qact_bytes(int K) { return (size_t)(K + BLOCK - 1) / BLOCK * BLOCK * 7 + 64; }

static void make_fp4(const quant_kern *k, const qact *a, const float *x, int K, float g) {
    enum { PIECE = 256 };
    uint8_t codes[PIECE / 2], scales[PIECE / BLOCK];
    for (int at = 0; at < K; at += PIECE) {
        const int n = K - at < PIECE ? K - at : PIECE;
        k->act_encode(codes, scales, x + at, n, g);
        for (int i = 0; i < n; i++) a->v[at + i] = twice[i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15];
        for (int b = 0; b < n / BLOCK; b++) {
            const bool bad = (scales[b] & 0x7f) == 0x7f; /* a NaN in the block: it must not look like a zero */
            a->scale[at / BLOCK + b] = bad ? INT32_MIN : e4m3_times_512(scales[b]);
        }
    }
}

/* Per row t = amax / (127 * 960), so the largest block's integer fits; per block an integer that no code clips under. */
static void make_int8(const qact *a, const float *x, int K) {
    float amax = 0;
    bool nan = false;
    for (int i = 0; i < K; i++) {
        nan |= isnan(x[i]);
        if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
    }
    const float t = amax / 121920.0f;
    *a->factor = nan ? NAN : t; /* then every output of the row is NaN */
    for (int b = 0; b < K / BLOCK; b++) {
        float m = 0;
        for (int i = 0; i < BLOCK; i++) m = fabsf(x[b * BLOCK + i]) > m ? fabsf(x[b * BLOCK + i]) : m;
        a->scale[b] = t > 0 ? nv_round_up_4_bits(m / (127.0f * t)) : 1;
        const float den = t * (float)a->scale[b];
        for (int i = 0; i < BLOCK; i++) {
            float q = t > 0 ? rintf(x[b * BLOCK + i] / den) : 0;
            if (!(q <= 127)) q = 127;
            if (q < -127) q = -127;
            a->v[b * BLOCK + i] = (int16_t)q;
        }
    }
}

static void make_fp8(const quant_kern *k, const qact *a, const float *x, int K, float scale) {
    enum { PIECE = 256 };
    uint8_t codes[PIECE];
    for (int at = 0; at < K; at += PIECE) {
        const int n = K - at < PIECE ? K - at : PIECE;
        k->fp8_div(codes, x + at, n, scale);
        for (int i = 0; i < n; i++) a->wide[at + i] = (codes[i] & 0x7f) == 0x7f ? INT32_MIN : e4m3_times_512(codes[i]);
    }
}

void qact_make(const quant_kern *k, void *act, const float *x, int K, linear_act mode, float input_scale) {
    const qact a = parts(act, K);
    switch (mode) {
    case LINEAR_ACT_FLOAT: memcpy(a.x, x, (size_t)K * sizeof *x); break;
    case LINEAR_ACT_FP4: make_fp4(k, &a, x, K, input_scale); break;
    case LINEAR_ACT_INT8: make_int8(&a, x, K); break;
    case LINEAR_ACT_FP8: make_fp8(k, &a, x, K, input_scale); break;
    }
}

/* One output row against integers: exact in int64 (|block| <= 24384, scales < 2^18: 53 bits and some for the sum). */
static float nvfp4_row_int(const uint8_t *codes, const uint8_t *scales, const qact *a, int K, bool *bad) {
    int64_t sum = 0;
    for (int b = 0; b < K / BLOCK; b++) {
        int32_t dot = 0;
        for (int i = 0; i < BLOCK / 2; i++) {
            const uint8_t c = codes[b * BLOCK / 2 + i];
            dot += twice[c & 15] * a->v[b * BLOCK + 2 * i] + twice[c >> 4] * a->v[b * BLOCK + 2 * i + 1];
        }
        *bad |= a->scale[b] == INT32_MIN;
        sum += (int64_t)dot * e4m3_times_512(scales[b]) * a->scale[b];
    }
    return (float)sum;
}

/* W4A16: per block an fma chain over its columns, then one fma per block. */
static float nvfp4_row_float(const uint8_t *codes, const uint8_t *scales, const float *x, int K) {
    float acc = 0;
    for (int b = 0; b < K / BLOCK; b++) {
        float p = 0;
        for (int i = 0; i < BLOCK; i++) {
            const uint8_t c = codes[(b * BLOCK + i) / 2];
            p = fmaf(0.5f * (float)twice[i % 2 ? c >> 4 : c & 15], x[b * BLOCK + i], p);
        }
        acc = fmaf(p, e4m3_to_f32(scales[b]), acc);
    }
    return acc;
}

static float fp8_row_int(const uint8_t *w, const int32_t *a, int K, bool *bad) {
    int64_t sum = 0;
    for (int i = 0; i < K; i++) {
        *bad |= a[i] == INT32_MIN;
        sum += (int64_t)e4m3_times_512(w[i]) * a[i];
    }
    return (float)sum;
}

/* FP8 weights with float inputs: a plain chain in increasing k. */
static float fp8_row_float(const uint8_t *w, const float *x, int K) {
    float acc = 0;
    for (int i = 0; i < K; i++) acc = fmaf(e4m3_to_f32(w[i]), x[i], acc);
    return acc;
}

void qlinear_rows(float *y, const linear_desc *d, const void *act, int n0, int n1) {
    const int K = d->cols;
    const qact a = parts((void *)(uintptr_t)act, K);
    for (int n = n0; n < n1; n++, y++) {
        bool bad = false;
        if (d->q.format == LINEAR_FP8) {
            const uint8_t *w = (const uint8_t *)d->data + (int64_t)n * K;
            if (d->q.act == LINEAR_ACT_FLOAT)
                *y = fp8_row_float(w, a.x, K) * d->q.scale_2;
            else
                *y = fp8_row_int(w, a.wide, K, &bad) * 0x1p-18f * (d->q.scale_2 * d->q.input_scale);
        } else {
            const uint8_t *codes = (const uint8_t *)d->data + (int64_t)n * (K / 2),
                          *scales = d->q.scales + (int64_t)n * (K / BLOCK);
            if (d->q.act == LINEAR_ACT_FLOAT)
                *y = nvfp4_row_float(codes, scales, a.x, K) * d->q.scale_2;
            else if (d->q.act == LINEAR_ACT_INT8)
                *y = nvfp4_row_int(codes, scales, &a, K, &bad) * 0x1p-9f * (d->q.scale_2 * *a.factor * 0.5f);
            else
                *y = nvfp4_row_int(codes, scales, &a, K, &bad) * 0x1p-18f * (d->q.scale_2 * d->q.input_scale * 0.25f);
        }
        if (bad) *y = NAN;
    }
}
