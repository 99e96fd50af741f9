/* Packed NVFP4 with AVX-512 VNNI: 16 output rows in the lanes, one vector per octet of columns. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kern/kern_isa.h"
#include "kern/nv.h"

enum { BLOCK = 16, MB = 4, MOST = 12, AHEAD_GROUPS = 4, AHEAD_BYTES = 2304 };

/* Doubled E2M1 plus 12: unsigned, as vpdpbusd wants one operand; the row's bias takes it back. */
INLINE __m512i lut(void) {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

/* E4M3 without sign x 512, exact: its bits as a half are the value / 256. */
INLINE __m512i scale_ints(const uint8_t *s) {
    const __m256i h = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)s)), 7);
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(131072.0f)));
}

INLINE __m512i dword(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

/* P panels, `stride` bytes apart, against M rows: even and odd lanes accumulate in 64 bits. Several panels at a time are
 * several streams, one to a page: hardware prefetchers stop at page borders, and what one stream waits for is hidden by the
 * others. `ahead`: as far behind w as the lines that are fetched. */
INLINE void panel_rows(float *y, int64_t ldy, const uint8_t *w, int64_t stride, int64_t ahead, int Kp, const nv_act *a,
                       const int M, const int P) {
    const __m512i table = lut(), nibble = _mm512_set1_epi8(15);
    __m512i even[MOST], odd[MOST];
    UNROLL for (int m = 0; m < M * P; m++) even[m] = odd[m] = _mm512_setzero_si512();
    const int turn = Kp - AHEAD_GROUPS * NV_COLS;
    for (int k = 0; k < Kp; k += NV_COLS, w += NV_GROUP_BYTES) {
        const uint8_t *next = w + (k < turn ? 0 : ahead) + AHEAD_GROUPS * NV_GROUP_BYTES;
        UNROLL for (int p = 0; p < P; p++) for (int i = 0; i < 9; i++)
            _mm_prefetch((const char *)next + p * stride + i * 64, _MM_HINT_T0);
        for (int b = 0; b < 4; b++) {
            const int at = k + b * BLOCK;
            UNROLL for (int p = 0; p < P; p++) {
                const uint8_t *g = w + p * stride;
                const __m512i c0 = _mm512_load_si512(g + 64 + b * 128), c1 = _mm512_load_si512(g + 128 + b * 128);
                const __m512i e0 = _mm512_shuffle_epi8(table, _mm512_and_si512(c0, nibble));
                const __m512i o0 = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(c0, 4), nibble));
                const __m512i e1 = _mm512_shuffle_epi8(table, _mm512_and_si512(c1, nibble));
                const __m512i o1 = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(c1, 4), nibble));
                const __m512i ws = scale_ints(g + b * 16), ws_odd = _mm512_srli_epi64(ws, 32);
                UNROLL for (int m = 0; m < M; m++) {
                    const int8_t *x = a[m].codes + at;
                    const int i = p * M + m;
                    __m512i s = _mm512_set1_epi32(a[m].bias[at / BLOCK]);
                    s = _mm512_dpbusd_epi32(s, e0, dword(x));
                    s = _mm512_dpbusd_epi32(s, o0, dword(x + 4));
                    s = _mm512_dpbusd_epi32(s, e1, dword(x + 8));
                    s = _mm512_dpbusd_epi32(s, o1, dword(x + 12));
                    s = _mm512_mullo_epi32(s, _mm512_set1_epi32(a[m].scale[at / BLOCK]));
                    even[i] = _mm512_add_epi64(even[i], _mm512_mul_epi32(s, ws));
                    odd[i] = _mm512_add_epi64(odd[i], _mm512_mul_epi32(_mm512_srli_epi64(s, 32), ws_odd));
                }
            }
        }
    }
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int m = 0; m < M; m++) { /* one rounding each, then back into the order of rows */
        const int i = p * M + m;
        const __m512 lo = _mm512_castps256_ps512(_mm512_cvtepi64_ps(even[i]));
        const __m512 hi = _mm512_castps256_ps512(_mm512_cvtepi64_ps(odd[i]));
        const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        _mm512_storeu_ps(y + m * ldy + p * NV_ROWS, _mm512_permutex2var_ps(lo, order, hi));
    }
}

/* n panels, P at a time while there are P; the last ones singly. */
INLINE void rows_at_once(float *y, int64_t ldy, const uint8_t *w, int64_t stride, int n, int Kp, const nv_act *a,
                         const int M, const int P) {
    int p = 0;
    for (; p + P <= n; p += P) panel_rows(y + p * NV_ROWS, ldy, w + p * stride, stride, (P - 1) * stride, Kp, a, M, P);
    for (; p < n; p++) panel_rows(y + p * NV_ROWS, ldy, w + p * stride, stride, 0, Kp, a, M, 1);
}

static void dot(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a, int M) {
    enum { TOGETHER = 12 }; /* panels that stay in the second-level cache for all rows */
    for (int p = 0; p < n; p += TOGETHER, panels += TOGETHER * stride, y += TOGETHER * NV_ROWS) {
        const int N = n - p < TOGETHER ? n - p : TOGETHER;
        int m = 0;
        /* What a block's codes take to unpack is shared by eight rows, whose sums just fit into registers. */
        for (; m + 8 <= M; m += 8) rows_at_once(y + m * ldy, ldy, panels, stride, N, Kp, a + m, 8, 1);
        for (; m + 4 <= M; m += 4) rows_at_once(y + m * ldy, ldy, panels, stride, N, Kp, a + m, 4, 3);
        switch (M - m) {
        case 3: rows_at_once(y + m * ldy, ldy, panels, stride, N, Kp, a + m, 3, 3); break;
        case 2: rows_at_once(y + m * ldy, ldy, panels, stride, N, Kp, a + m, 2, 4); break;
        case 1: rows_at_once(y + m * ldy, ldy, panels, stride, N, Kp, a + m, 1, 4); break;
        default: break;
        }
    }
}

/* ---- weight-only: the four blocks of a group are independent chains ---- */

INLINE void panel_float(float *y, int64_t ldy, const uint8_t *w, int Kp, const nv_act *a, const int M) {
    const __m512 value = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512 acc[MB];
    for (int m = 0; m < M; m++) acc[m] = _mm512_setzero_ps();
    for (int k = 0; k < Kp; k += NV_COLS, w += NV_GROUP_BYTES) {
        __m512 p[4][MB];
        for (int i = 0; i < 9; i++) _mm_prefetch((const char *)w + AHEAD_BYTES + i * 64, _MM_HINT_T0);
        for (int b = 0; b < 4; b++)
            for (int m = 0; m < M; m++) p[b][m] = _mm512_setzero_ps();
        for (int o = 0; o < 2; o++) {
            __m512i c[4];
            for (int b = 0; b < 4; b++) c[b] = _mm512_load_si512(w + 64 + (b * 2 + o) * 64);
            for (int j = 0; j < 8; j++)
                for (int b = 0; b < 4; b++) {
                    const __m512 v = _mm512_permutexvar_ps(c[b], value); /* by the low four bits */
                    c[b] = _mm512_srli_epi32(c[b], 4);
                    for (int m = 0; m < M; m++)
                        p[b][m] = _mm512_fmadd_ps(v, _mm512_set1_ps(a[m].x[k + b * BLOCK + o * 8 + j]), p[b][m]);
                }
        }
        for (int b = 0; b < 4; b++) {
            const __m256i h =
                _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)(const void *)(w + b * 16))), 7);
            const __m512 ws = _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
            for (int m = 0; m < M; m++) acc[m] = _mm512_fmadd_ps(p[b][m], ws, acc[m]);
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(y + m * ldy, acc[m]);
}

static void dot_float(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a,
                      int M) {
    for (int p = 0; p < n; p++, y += NV_ROWS, panels += stride) {
        int m = 0;
        for (; m + 4 <= M; m += 4) panel_float(y + m * ldy, ldy, panels, Kp, a + m, 4);
        switch (M - m) {
        case 3: panel_float(y + m * ldy, ldy, panels, Kp, a + m, 3); break;
        case 2: panel_float(y + m * ldy, ldy, panels, Kp, a + m, 2); break;
        case 1: panel_float(y + m * ldy, ldy, panels, Kp, a + m, 1); break;
        default: break;
        }
    }
}

/* ---- inputs ---- */

/* -12 x the sums of the blocks: 16 bytes each. */
static void biases(nv_act *a, int K) {
    const __m128i ones = _mm_set1_epi8(1);
    for (int b = 0; b < K / BLOCK; b++) {
        const __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(a->codes + b * BLOCK));
        const __m128i s = _mm_dpbusd_epi32(_mm_setzero_si128(), ones, c);
        const __m128i t = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
        a->bias[b] = -12 * (_mm_cvtsi128_si32(t) + _mm_extract_epi32(t, 1));
    }
}

static void act_fp4(nv_act *a, const uint8_t *codes, const uint8_t *scales, int K) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(15);
    bool bad = false;
    nv_act_clear_tail(a, K);
    for (int b = 0; b < K / BLOCK; b++) {
        const __m128i c = _mm_loadl_epi64((const __m128i *)(const void *)(codes + b * 8));
        const __m128i e = _mm_and_si128(c, nibble), o = _mm_and_si128(_mm_srli_epi32(c, 4), nibble);
        _mm_storeu_si128((__m128i *)(void *)(a->codes + b * BLOCK), _mm_shuffle_epi8(table, _mm_unpacklo_epi32(e, o)));
        bad |= (scales[b] & 0x7f) == 0x7f;
        a->scale[b] = e4m3_times_512(scales[b]);
    }
    biases(a, K);
    a->bad = bad;
}

INLINE __m512 absolute(__m512 v) { return _mm512_abs_ps(v); }

static void act_int8(nv_act *a, const float *x, int K) {
    __m512 top = _mm512_setzero_ps();
    __mmask16 nan = 0;
    nv_act_clear_tail(a, K);
    for (int i = 0; i < K; i += BLOCK) {
        const __m512 v = _mm512_loadu_ps(x + i);
        nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        top = _mm512_max_ps(absolute(v), top); /* the second operand when either is NaN */
    }
    const float t = _mm512_reduce_max_ps(top) / 121920.0f;
    a->factor = t;
    a->bad = nan != 0;
    const __m512i octets = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int b = 0; b < K / BLOCK; b++) {
        const __m512 v = _mm512_loadu_ps(x + b * BLOCK);
        const float m = _mm512_reduce_max_ps(_mm512_max_ps(absolute(v), _mm512_setzero_ps()));
        a->scale[b] = t > 0 ? nv_round_up_4_bits(m / (127.0f * t)) : 1;
        const float den = t * (float)a->scale[b];
        __m512 q = _mm512_setzero_ps();
        if (t > 0) {
            q = _mm512_roundscale_ps(_mm512_div_ps(v, _mm512_set1_ps(den)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            q = _mm512_min_ps(q, _mm512_set1_ps(127.0f)); /* 127 for NaN */
            q = _mm512_max_ps(q, _mm512_set1_ps(-127.0f));
        }
        const __m512i order = _mm512_permutexvar_epi32(octets, _mm512_cvtps_epi32(q));
        _mm_storeu_si128((__m128i *)(void *)(a->codes + b * BLOCK), _mm512_cvtepi32_epi8(order));
    }
    biases(a, K);
}

/* A group is a 16 x 8 transpose of dwords; scatter by column vector keeps it simple and near memory speed. */
static void pack(uint8_t *panel, const uint8_t *codes, const uint8_t *scales, int rows, int K) {
    const int64_t cs = K / 2, ss = K / BLOCK;
    if (rows < NV_ROWS || K % NV_COLS) {
        nv_kern ref;
        nv_init_ref(&ref);
        ref.pack(panel, codes, scales, rows, K);
        return;
    }
    for (int k = 0; k < K; k += NV_COLS, panel += NV_GROUP_BYTES) {
        __m256i r[16];
        int32_t four[16];
        for (int i = 0; i < 16; i++) {
            r[i] = _mm256_loadu_si256((const __m256i *)(const void *)(codes + i * cs + k / 2));
            memcpy(&four[i], scales + i * ss + k / BLOCK, 4);
        }
        const __m512i all = _mm512_loadu_si512(four); /* row r: bytes b = 0..3 */
        const __m512i by_block = _mm512_shuffle_epi8(
            all, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
        const __m512i turned =
            _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), by_block);
        _mm512_store_si512(panel, turned);
        for (int half = 0; half < 2; half++) { /* rows 8 half ..: an 8 x 8 transpose of dwords */
            const __m256i *q = r + half * 8;
            __m256i u[8], v[8];
            for (int i = 0; i < 4; i++) {
                u[2 * i] = _mm256_unpacklo_epi32(q[2 * i], q[2 * i + 1]);
                u[2 * i + 1] = _mm256_unpackhi_epi32(q[2 * i], q[2 * i + 1]);
            }
            for (int i = 0; i < 2; i++) {
                v[4 * i] = _mm256_unpacklo_epi64(u[4 * i], u[4 * i + 2]);
                v[4 * i + 1] = _mm256_unpackhi_epi64(u[4 * i], u[4 * i + 2]);
                v[4 * i + 2] = _mm256_unpacklo_epi64(u[4 * i + 1], u[4 * i + 3]);
                v[4 * i + 3] = _mm256_unpackhi_epi64(u[4 * i + 1], u[4 * i + 3]);
            }
            for (int i = 0; i < 4; i++) {
                uint8_t *to = panel + 64 + half * 32;
                _mm256_store_si256((__m256i *)(void *)(to + i * 64), _mm256_permute2x128_si256(v[i], v[4 + i], 0x20));
                _mm256_store_si256((__m256i *)(void *)(to + (4 + i) * 64),
                                   _mm256_permute2x128_si256(v[i], v[4 + i], 0x31));
            }
        }
    }
}

void nv_init_avx512(nv_kern *k) {
    *k = (nv_kern){
        .isa = ISA_AVX512, .pack = pack, .act_fp4 = act_fp4, .act_int8 = act_int8, .dot = dot, .dot_float = dot_float
    };
}
