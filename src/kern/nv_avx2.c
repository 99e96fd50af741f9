/* Packed NVFP4 with AVX2: half panels (8 output rows in the lanes). */
#include <immintrin.h>
#include <string.h>

#include "kern/kern_isa.h"
#include "kern/nv.h"

enum { BLOCK = 16, HALF = 8, MB = 2, AHEAD_BYTES = 2304 };

INLINE __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* E4M3 without sign x 512 of 8 rows, exact: its bits as a half are the value / 256. */
INLINE __m256 scale_halves(const uint8_t *s) {
    const __m128i h = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)s)), 7);
    return _mm256_cvtph_ps(h);
}

INLINE __m256i scale_ints(const uint8_t *s) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(scale_halves(s), _mm256_set1_ps(131072.0f)));
}

INLINE __m256i dword(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

/* Pairs of u8 x s8 products: at most 2 * 24 * 127, and four of those stay below 2^15. */
INLINE void half_rows(float *y, int64_t ldy, const uint8_t *w, int Kp, const nv_act *a, const int M, int h,
                      bool fetch) {
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i even[MB], odd[MB];
    for (int m = 0; m < M; m++) even[m] = odd[m] = _mm256_setzero_si256();
    for (int k = 0; k < Kp; k += NV_COLS, w += NV_GROUP_BYTES) {
        if (fetch)
            for (int i = 0; i < 9; i++) _mm_prefetch((const char *)w + AHEAD_BYTES + i * 64, _MM_HINT_T0);
        for (int b = 0; b < 4; b++) {
            const uint8_t *words = w + 64 + b * 128 + h * 32;
            const __m256i c0 = load(words), c1 = load(words + 64);
            const __m256i e0 = _mm256_shuffle_epi8(table, _mm256_and_si256(c0, nibble));
            const __m256i o0 = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(c0, 4), nibble));
            const __m256i e1 = _mm256_shuffle_epi8(table, _mm256_and_si256(c1, nibble));
            const __m256i o1 = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(c1, 4), nibble));
            const __m256i ws = scale_ints(w + b * 16 + h * 8), ws_odd = _mm256_srli_epi64(ws, 32);
            const int at = k + b * BLOCK;
            for (int m = 0; m < M; m++) {
                const int8_t *x = a[m].codes + at;
                const __m256i p =
                    _mm256_add_epi16(_mm256_maddubs_epi16(e0, dword(x)), _mm256_maddubs_epi16(o0, dword(x + 4)));
                const __m256i q =
                    _mm256_add_epi16(_mm256_maddubs_epi16(e1, dword(x + 8)), _mm256_maddubs_epi16(o1, dword(x + 12)));
                __m256i s = _mm256_madd_epi16(_mm256_add_epi16(p, q), ones);
                s = _mm256_add_epi32(s, _mm256_set1_epi32(a[m].bias[at / BLOCK]));
                s = _mm256_mullo_epi32(s, _mm256_set1_epi32(a[m].scale[at / BLOCK]));
                even[m] = _mm256_add_epi64(even[m], _mm256_mul_epi32(s, ws));
                odd[m] = _mm256_add_epi64(odd[m], _mm256_mul_epi32(_mm256_srli_epi64(s, 32), ws_odd));
            }
        }
    }
    for (int m = 0; m < M; m++) {
        int64_t sums[2][4];
        _mm256_storeu_si256((__m256i *)(void *)sums[0], even[m]);
        _mm256_storeu_si256((__m256i *)(void *)sums[1], odd[m]);
        for (int r = 0; r < HALF; r++) {
            const int64_t sum = sums[r % 2][r / 2];
            y[m * ldy + h * HALF + r] = (float)sum;
        }
    }
}

/* A half at a time: the second finds the panel in the cache. */
static void dot(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a, int M) {
    for (int p = 0; p < n; p++, y += NV_ROWS, panels += stride)
        for (int h = 0; h < 2; h++) {
            int m = 0;
            for (; m + 2 <= M; m += 2) half_rows(y + m * ldy, ldy, panels, Kp, a + m, 2, h, m + h == 0);
            if (m < M) half_rows(y + m * ldy, ldy, panels, Kp, a + m, 1, h, m + h == 0);
        }
}

/* ---- weight-only: two tables of eight values, chosen by bit 3 ---- */

INLINE void half_float(float *y, const uint8_t *w, int Kp, const nv_act *a, int h, bool fetch) {
    const __m256 plus = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256 minus = _mm256_setr_ps(0, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m256 acc = _mm256_setzero_ps();
    for (int k = 0; k < Kp; k += NV_COLS, w += NV_GROUP_BYTES) {
        __m256 p[4];
        if (fetch)
            for (int i = 0; i < 9; i++) _mm_prefetch((const char *)w + AHEAD_BYTES + i * 64, _MM_HINT_T0);
        for (int b = 0; b < 4; b++) p[b] = _mm256_setzero_ps();
        for (int o = 0; o < 2; o++) {
            __m256i c[4];
            for (int b = 0; b < 4; b++) c[b] = load(w + 64 + (b * 2 + o) * 64 + h * 32);
            for (int j = 0; j < 8; j++)
                for (int b = 0; b < 4; b++) { /* by the low three bits */
                    const __m256 v =
                        _mm256_blendv_ps(_mm256_permutevar8x32_ps(plus, c[b]), _mm256_permutevar8x32_ps(minus, c[b]),
                                         _mm256_castsi256_ps(_mm256_slli_epi32(c[b], 28)));
                    c[b] = _mm256_srli_epi32(c[b], 4);
                    p[b] = _mm256_fmadd_ps(v, _mm256_set1_ps(a->x[k + b * BLOCK + o * 8 + j]), p[b]);
                }
        }
        for (int b = 0; b < 4; b++)
            acc = _mm256_fmadd_ps(p[b], _mm256_mul_ps(scale_halves(w + b * 16 + h * 8), _mm256_set1_ps(256.0f)), acc);
    }
    _mm256_storeu_ps(y + h * HALF, acc);
}

static void dot_float(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a,
                      int M) {
    for (int p = 0; p < n; p++, y += NV_ROWS, panels += stride)
        for (int m = 0; m < M; m++)
            for (int h = 0; h < 2; h++) half_float(y + m * ldy, panels, Kp, a + m, h, m + h == 0);
}

/* ---- inputs ---- */

static void act_fp4(nv_act *a, const uint8_t *codes, const uint8_t *scales, int K) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(15), ones8 = _mm_set1_epi8(1), ones16 = _mm_set1_epi16(1);
    bool bad = false;
    nv_act_clear_tail(a, K);
    for (int b = 0; b < K / BLOCK; b++) {
        const __m128i c = _mm_loadl_epi64((const __m128i *)(const void *)(codes + b * 8));
        const __m128i e = _mm_and_si128(c, nibble), o = _mm_and_si128(_mm_srli_epi32(c, 4), nibble);
        const __m128i v = _mm_shuffle_epi8(table, _mm_unpacklo_epi32(e, o));
        _mm_storeu_si128((__m128i *)(void *)(a->codes + b * BLOCK), v);
        const __m128i s = _mm_madd_epi16(_mm_maddubs_epi16(ones8, v), ones16);
        const __m128i t = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
        a->bias[b] = -12 * (_mm_cvtsi128_si32(t) + _mm_extract_epi32(t, 1));
        bad |= (scales[b] & 0x7f) == 0x7f;
        a->scale[b] = e4m3_times_512(scales[b]);
    }
    a->bad = bad;
}

void nv_init_avx2(nv_kern *k) {
    k->isa = ISA_AVX2;
    k->act_fp4 = act_fp4;
    k->dot = dot;
    k->dot_float = dot_float;
}
