/* AVX2: codes widened to 16 bits against q itself. Byte products would saturate (2 * 255 * 127 > 32767). */
#include "kern/kern_isa.h"
#include "kern/screen.h"

#include <immintrin.h>
#include <string.h>

/* A lane of 32 bits holds 256 sums of two products of at most 127 * 32767; a chunk makes 128 in each. */
enum { CHUNK = 4096, AHEAD = 8192 };

INLINE int64_t sum_lanes(__m256i v) {
    const __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(v)),
                  high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(v, 1));
    const __m256i s = _mm256_add_epi64(low, high);
    const __m128i t = _mm_add_epi64(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    return _mm_cvtsi128_si64(t) + _mm_extract_epi64(t, 1);
}

INLINE void dots_m(int64_t *y, int64_t ldy, const int8_t *codes, const screen_act *x, int N, int64_t stride,
                   const int M) {
    for (int n = 0; n < N; n++, codes += stride) {
        int64_t sums[SCREEN_MAX_ROWS] = { 0 };
        for (int64_t from = 0; from < stride; from += CHUNK) {
            const int64_t to = min_i64(stride, from + CHUNK);
            __m256i acc[2 * SCREEN_MAX_ROWS];
            UNROLL for (int a = 0; a < 2 * M; a++) acc[a] = _mm256_setzero_si256();
            for (int64_t i = from; i < to; i += 32) {
                const __m256i w0 = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(const void *)(codes + i)));
                const __m256i w1 =
                    _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(const void *)(codes + i + 16)));
                _mm_prefetch((const char *)codes + i + AHEAD, _MM_HINT_T0);
                UNROLL for (int m = 0; m < M; m++) {
                    const __m256i *q = (const __m256i *)(const void *)(x[m].q + i);
                    acc[2 * m] = _mm256_add_epi32(acc[2 * m], _mm256_madd_epi16(w0, _mm256_load_si256(q)));
                    acc[2 * m + 1] = _mm256_add_epi32(acc[2 * m + 1], _mm256_madd_epi16(w1, _mm256_load_si256(q + 1)));
                }
            }
            UNROLL for (int m = 0; m < M; m++) sums[m] += sum_lanes(acc[2 * m]) + sum_lanes(acc[2 * m + 1]);
        }
        for (int m = 0; m < M; m++) y[m * ldy + n] = sums[m];
    }
}

static void dots(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int M, int N,
                 int64_t stride) {
    (void)sums;
    switch (M) {
    case 1: dots_m(y, ldy, codes, x, N, stride, 1); return;
    case 2: dots_m(y, ldy, codes, x, N, stride, 2); return;
    case 3: dots_m(y, ldy, codes, x, N, stride, 3); return;
    default: dots_m(y, ldy, codes, x, N, stride, 4); return;
    }
}

INLINE __m256 load_tail(const float *w, int left) {
    if (left >= 8) return _mm256_loadu_ps(w);
    float t[8] = { 0 };
    for (int i = 0; i < left; i++) t[i] = w[i];
    return _mm256_loadu_ps(t);
}

/* The largest magnitude; NaN and Inf compare above every finite one as integers. */
static float largest(const float *w, int K) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < K; i += 8)
        top = _mm256_max_epi32(top, _mm256_and_si256(mask, _mm256_castps_si256(load_tail(w + i, K - i))));
    int32_t l[8], bits = 0;
    _mm256_storeu_si256((__m256i *)(void *)l, top);
    for (int i = 0; i < 8; i++)
        if (l[i] > bits) bits = l[i];
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static double fold16(const __m256d *v) {
    double l[8];
    _mm256_storeu_pd(l, _mm256_add_pd(v[0], v[2]));
    _mm256_storeu_pd(l + 4, _mm256_add_pd(v[1], v[3]));
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
    const __m256 inverse = _mm256_set1_ps(small ? 0 : 127 / top);
    const __m256d scale = _mm256_set1_pd((double)row->scale);
    __m256d norm2[4], err2[4];
    for (int j = 0; j < 4; j++) norm2[j] = err2[j] = _mm256_setzero_pd();
    for (int i = 0; i < K; i += 8) { /* absent elements add +0 */
        const __m256 v = load_tail(w + i, K - i);
        __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse));
        c = _mm256_max_epi32(_mm256_min_epi32(c, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
        int32_t l[8];
        _mm256_storeu_si256((__m256i *)(void *)l, c);
        for (int j = 0; j < 8 && i + j < K; j++) {
            codes[i + j] = (int8_t)l[j];
            row->sum += l[j];
            row->code2 += l[j] * l[j];
        }
        for (int half = 0; half < 2; half++) {
            const __m256d x = _mm256_cvtps_pd(half ? _mm256_extractf128_ps(v, 1) : _mm256_castps256_ps128(v));
            const __m256d q = _mm256_cvtepi32_pd(half ? _mm256_extracti128_si256(c, 1) : _mm256_castsi256_si128(c));
            const __m256d d = _mm256_sub_pd(x, _mm256_mul_pd(scale, q));
            const int at = (i / 8 % 2) * 2 + half;
            norm2[at] = _mm256_add_pd(norm2[at], _mm256_mul_pd(x, x));
            err2[at] = _mm256_add_pd(err2[at], _mm256_mul_pd(d, d));
        }
    }
    row->norm2 = fold16(norm2);
    row->err2 = fold16(err2);
}

void screen_init_avx2(screen_kern *k) { *k = (screen_kern){ .isa = ISA_AVX2, .pack = pack, .dots = dots }; }
