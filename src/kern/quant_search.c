/* quant_search.c - block scales by least squared error instead of by the block's maximum. */
#include "kern/quant.h"
#include "num/bf16.h"

const char *const quant_algorithms[] = { "max", "mse", "four-over-six", NULL };

enum {
    TOP = 0x7e, /* largest finite E4M3 */
    NORMAL = 8, /* steps of a binade; codes from here on double their value every 8 */
    LINEAR = 15 /* up to here the values are multiples of the smallest one */
};

float quant_scale_2(quant_algorithm how, float amax, quant_arith arith) {
    if (how != QUANT_FOUR_OVER_SIX) return nvfp4_scale_2(amax, arith);
    return arith == ARITH_CUDA ? amax * (1.0f / 1536.0f) : amax / 1536.0f;
}

/* What every block of a tensor needs. */
typedef struct search {
    const quant_kern *k;
    quant_algorithm how;
    float s2, den[TOP + 1]; /* divisor of each scale code */
    quant_arith arith;
} search;

/* The clipped maximum alone errs by this much: no sum of the block's errors is smaller. */
static double clipping(float b, float den) {
    const float e = b - 6.0f * den;
    return e > 0 ? (double)e * e : 0;
}

/* Least error over the codes 1 .. TOP, ties to `start`, else to the smallest. A code that does not clip beats or equals
 * every code of twice its value, whose levels below the maximum are a part of its own; so a binade above suffices (all of
 * LINEAR where halves are missing). Below, the search ends where clipping alone is worse than the best so far. */
static uint8_t least_error(const search *s, const float *x, float b, uint8_t start) {
    double err[TOP + 1], best;
    const int last = start + NORMAL > LINEAR ? start + NORMAL : LINEAR, high = last < TOP ? last : TOP;
    int found = start, low = start;
    s->k->block_errors(err + start, x, s->den + start, high - start + 1);
    best = err[start];
    for (int c = start + 1; c <= high; c++)
        if (err[c] < best) best = err[c], found = c;
    while (low > 1 && clipping(b, s->den[low - 1]) <= best) low--;
    s->k->block_errors(err + low, x, s->den + low, start - low);
    for (int c = start - 1; c >= low; c--)
        if (err[c] < best || (err[c] == best && found != start)) best = err[c], found = c;
    return (uint8_t)found;
}

static uint8_t four_or_six(const search *s, const float *x, float b, uint8_t six) {
    const uint8_t four = nvfp4_block_scale(1.5f * b, s->s2, s->arith);
    if (four > TOP) return six; /* 1.5 b beyond float32 */
    const float den[2] = { s->den[six], s->den[four] };
    double err[2];
    s->k->block_errors(err, x, den, 2);
    return err[1] < err[0] ? four : six;
}

static uint8_t choose(const search *s, const float *x, float b) {
    const uint8_t six = nvfp4_block_scale(b, s->s2, s->arith);
    if (b == 0 || six > TOP) return six;
    return s->how == QUANT_MSE ? least_error(s, x, b, six) : four_or_six(s, x, b, six);
}

static search prepare(const quant_kern *k, quant_algorithm how, float s2, quant_arith arith) {
    search s = { .k = k, .how = how, .s2 = s2, .arith = arith };
    for (int c = 0; c <= TOP; c++) s.den[c] = e4m3_to_f32((uint8_t)c) * s2;
    return s;
}

void quant_encode_bf16(const quant_kern *k, quant_algorithm how, uint8_t *codes, uint8_t *scales, const uint16_t *w,
                       int64_t n, float s2, quant_arith arith) {
    if (how == QUANT_MAX) {
        k->encode_bf16(codes, scales, w, n, s2, arith);
        return;
    }
    const search s = prepare(k, how, s2, arith);
    for (int64_t i = 0; i < n; i += NVFP4_BLOCK) {
        float x[NVFP4_BLOCK], b = 0;
        for (int j = 0; j < NVFP4_BLOCK; j++) x[j] = bf16_to_f32(w[i + j]);
        k->block_amax_bf16(&b, w + i, NVFP4_BLOCK);
        scales[i / NVFP4_BLOCK] = choose(&s, x, b);
    }
    k->codes_bf16(codes, scales, w, n, s2);
}

void quant_encode_f32(const quant_kern *k, quant_algorithm how, uint8_t *codes, uint8_t *scales, const float *w,
                      int64_t n, float s2, quant_arith arith) {
    if (how == QUANT_MAX) {
        k->encode_f32(codes, scales, w, n, s2, arith);
        return;
    }
    const search s = prepare(k, how, s2, arith);
    for (int64_t i = 0; i < n; i += NVFP4_BLOCK) {
        float b = 0;
        k->block_amax_f32(&b, w + i, NVFP4_BLOCK);
        scales[i / NVFP4_BLOCK] = choose(&s, w + i, b);
    }
    k->codes_f32(codes, scales, w, n, s2);
}
