/* AVX-512 with VNNI: 64 codes a step, unsigned bytes of q + 32768 against signed codes; 32768 * sum(Q) comes off at the end. */
#include "kern/kern_isa.h"
#include "kern/screen.h"

#include <immintrin.h>
#include <string.h>

enum { AHEAD = 16384 };

/* Lanes of 16 vectors added up: lane i of the result is the sum of v[i]. */
INLINE __m512i sums_of_16(const __m512i *v) {
    __m512i a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8; i++) a[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++) b[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    UNROLL for (int i = 0; i < 2; i++) c[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0x88),
                                                               _mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xdd));
}

/* R rows of codes against M of inputs. Several rows are several streams, on several pages: hardware prefetchers stop at page
 * borders. The lines of the rows R further on are asked for meanwhile. */
INLINE void dots_tile(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x,
                      int64_t stride, const int M, const int R) {
    __m512i high[16], low[16];
    UNROLL for (int a = 0; a < 16; a++) high[a] = low[a] = _mm512_setzero_si512();
    const int64_t ahead = R * stride > AHEAD ? AHEAD : R * stride;
    for (int64_t i = 0; i < stride; i += SCREEN_STEP) {
        __m512i w[8];
        UNROLL for (int r = 0; r < R; r++) {
            w[r] = _mm512_load_si512(codes + r * stride + i);
            _mm_prefetch((const char *)codes + r * stride + i + ahead, _MM_HINT_T0);
        }
        UNROLL for (int m = 0; m < M; m++) {
            const __m512i h = _mm512_load_si512(x[m].high + i), l = _mm512_load_si512(x[m].low + i);
            UNROLL for (int r = 0; r < R; r++) high[m * R + r] = _mm512_dpbusd_epi32(high[m * R + r], h, w[r]);
            UNROLL for (int r = 0; r < R; r++) low[m * R + r] = _mm512_dpbusd_epi32(low[m * R + r], l, w[r]);
        }
    }
    int32_t h[16], l[16];
    _mm512_storeu_si512(h, sums_of_16(high));
    _mm512_storeu_si512(l, sums_of_16(low));
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int r = 0; r < R; r++) y[m * ldy + r] =
        256 * (int64_t)h[m * R + r] + l[m * R + r] - 32768 * (int64_t)sums[r];
}

INLINE void dots_m(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int N,
                   int64_t stride, const int M, const int R) {
    int n = 0;
    for (; n + R <= N; n += R) dots_tile(y + n, ldy, codes + n * stride, sums + n, x, stride, M, R);
    for (; n < N; n++) dots_tile(y + n, ldy, codes + n * stride, sums + n, x, stride, M, 1);
}

static void dots(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int M, int N,
                 int64_t stride) {
    switch (M) {
    case 1: dots_m(y, ldy, codes, sums, x, N, stride, 1, 8); return;
    case 2: dots_m(y, ldy, codes, sums, x, N, stride, 2, 4); return;
    case 3: dots_m(y, ldy, codes, sums, x, N, stride, 3, 4); return;
    default: dots_m(y, ldy, codes, sums, x, N, stride, 4, 2); return;
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
