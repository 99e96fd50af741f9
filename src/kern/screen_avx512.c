/* AVX-512 with VNNI: 64 codes a step, unsigned bytes of q + 32768 against signed codes; 32768 * sum(Q) comes off at the end. */
#include "kern/kern_isa.h"
#include "kern/screen.h"

#include <immintrin.h>
#include <string.h>

enum { ROWS = 2, AHEAD = 8192 };

/* The codes are one stream; hardware prefetchers stop at page borders, so lines far ahead are asked for here. */
INLINE void dots_m(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int N,
                   int64_t stride, const int M) {
    for (int n = 0; n < N; n += ROWS, codes += ROWS * stride) {
        const int8_t *second = codes + (n + 1 < N ? stride : 0);
        __m512i high[SCREEN_MAX_ROWS * ROWS], low[SCREEN_MAX_ROWS * ROWS];
        UNROLL for (int a = 0; a < M * ROWS; a++) high[a] = low[a] = _mm512_setzero_si512();
        for (int64_t i = 0; i < stride; i += SCREEN_STEP) {
            const __m512i w0 = _mm512_load_si512(codes + i), w1 = _mm512_load_si512(second + i);
            _mm_prefetch((const char *)codes + i + AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)second + i + AHEAD, _MM_HINT_T0);
            UNROLL for (int m = 0; m < M; m++) {
                const __m512i h = _mm512_load_si512(x[m].high + i), l = _mm512_load_si512(x[m].low + i);
                high[2 * m] = _mm512_dpbusd_epi32(high[2 * m], h, w0);
                high[2 * m + 1] = _mm512_dpbusd_epi32(high[2 * m + 1], h, w1);
                low[2 * m] = _mm512_dpbusd_epi32(low[2 * m], l, w0);
                low[2 * m + 1] = _mm512_dpbusd_epi32(low[2 * m + 1], l, w1);
            }
        }
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int r = 0; r < ROWS; r++) if (n + r < N) y[m * ldy + n + r] =
            256 * (int64_t)_mm512_reduce_add_epi32(high[2 * m + r]) + _mm512_reduce_add_epi32(low[2 * m + r]) -
            32768 * (int64_t)sums[n + r];
    }
}

static void dots(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int M, int N,
                 int64_t stride) {
    switch (M) {
    case 1: dots_m(y, ldy, codes, sums, x, N, stride, 1); return;
    case 2: dots_m(y, ldy, codes, sums, x, N, stride, 2); return;
    case 3: dots_m(y, ldy, codes, sums, x, N, stride, 3); return;
    default: dots_m(y, ldy, codes, sums, x, N, stride, 4); return;
    }
}

/* The largest magnitude; NaN and Inf compare above every finite one as integers. */
static float largest(const float *w, int K) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i top = _mm512_setzero_si512();
    for (int i = 0; i < K; i += 16) {
        const __mmask16 in = K - i >= 16 ? 0xffff : (__mmask16)((1u << (K - i)) - 1);
        top = _mm512_max_epi32(top, _mm512_and_si512(mask, _mm512_castps_si512(_mm512_maskz_loadu_ps(in, w + i))));
    }
    const int32_t bits = _mm512_reduce_max_epi32(top);
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE __m512d square_to(__m512d acc, __m512d v) { return _mm512_add_pd(acc, _mm512_mul_pd(v, v)); }

static double fold16(__m512d a, __m512d b) {
    double l[8];
    _mm512_storeu_pd(l, _mm512_add_pd(a, b));
    for (int half = 4; half >= 1; half /= 2)
        for (int j = 0; j < half; j++) l[j] = l[j] + l[j + half];
    return l[0];
}

static void pack(int8_t *codes, screen_row *row, const float *w, int K) {
    memset(codes, 0, (size_t)screen_stride(K));
    const float top = largest(w, K);
    *row = (screen_row){ .finite = top <= 0x1.fffffep+127f };
    if (!row->finite) return;
    const bool small = top < 0x1p-100f;
    row->scale = small ? 0 : top / 127;
    const __m512 inverse = _mm512_set1_ps(small ? 0 : 127 / top);
    const __m512d scale = _mm512_set1_pd((double)row->scale);
    __m512d n0 = _mm512_setzero_pd(), n1 = n0, e0 = n0, e1 = n0;
    __m512i sum = _mm512_setzero_si512(), code2 = sum;
    for (int i = 0; i < K; i += 16) { /* absent elements add +0 */
        const __mmask16 in = K - i >= 16 ? 0xffff : (__mmask16)((1u << (K - i)) - 1);
        const __m512 v = _mm512_maskz_loadu_ps(in, w + i);
        __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse));
        c = _mm512_max_epi32(_mm512_min_epi32(c, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
        _mm_mask_storeu_epi8(codes + i, in, _mm512_cvtepi32_epi8(c));
        sum = _mm512_add_epi32(sum, c);
        code2 = _mm512_add_epi32(code2, _mm512_mullo_epi32(c, c));
        const __m512d v0 = _mm512_cvtps_pd(_mm512_castps512_ps256(v)),
                      v1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
        const __m512d c0 = _mm512_cvtepi32_pd(_mm512_castsi512_si256(c)),
                      c1 = _mm512_cvtepi32_pd(_mm512_extracti32x8_epi32(c, 1));
        n0 = square_to(n0, v0);
        n1 = square_to(n1, v1);
        e0 = square_to(e0, _mm512_sub_pd(v0, _mm512_mul_pd(scale, c0)));
        e1 = square_to(e1, _mm512_sub_pd(v1, _mm512_mul_pd(scale, c1)));
    }
    row->sum = _mm512_reduce_add_epi32(sum);
    row->code2 = _mm512_reduce_add_epi32(code2);
    row->norm2 = fold16(n0, n1);
    row->err2 = fold16(e0, e1);
}

void screen_init_avx512(screen_kern *k) { *k = (screen_kern){ .isa = ISA_AVX512, .pack = pack, .dots = dots }; }
