/* Packed NVFP4 for many rows with AMX int8: exact sums from digits in base 256.
 *
 * A scale is an integer; per panel and per input row the largest power of two that divides all its scales goes into a
 * shift. What is left, W = code * scale >> shift and A likewise, is a signed integer of at most 22 bits:
 *     V = V0 + 256 V1 + 65536 V2,    V0 unsigned, V1 and V2 signed, V2 = (V + 32768) >> 16 = 0 if V fits 16 bits,
 * and a sum of products is the sum over i, j of 256^(i + j) times an ordinary int8 product of planes i and j over all
 * of K. None of those overflows: the largest, A0 W1 + A1 W0, is below 65280 K < 2^31 for K <= 32768; |V2| <= 42.
 * The sum is put together in 64 bits and rounded once, so tiles, slices and threads do not show.
 *
 * A panel's planes are expanded 512 columns at a time into L1 and used there by all tiles of 16 rows of a chunk; their
 * 32-bit sums are parked in memory between slices.
 *
 * Tile instructions are inline assembly: GCC's intrinsics for them do not say that they touch memory. */
#include <immintrin.h>
#include <string.h>

#include "base/base.h"
#include "kern/nv.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    BLOCK = 16,
    TILE = 1024,           /* 16 rows x 64 bytes, of inputs, of weights or of sums */
    SLICE = 8,             /* groups of 64 columns expanded at once: 16 KB of planes */
    CHUNK = 16,            /* tiles of rows that share an expansion */
    CHUNK_BYTES = 1 << 20, /* and their planes' share of L2 */
    MAX_K = 32768,
    FIT_8 = 255,        /* scales whose products come from one vpmaddubsw */
    FIT_16 = 32767 / 12 /* scales whose products need no third digit */
};

/* Planes of 16 input rows; G = Kp / 64. */
typedef struct rows16 {
    const int32_t *shift; /* [16] */
    const uint8_t *wide;  /* [G] does plane 2 of this group have anything; wide[-1]: of any */
    const uint8_t *low;   /* [G][2][16][64] planes 0 and 1 */
    const uint8_t *high;  /* [G][16][64] plane 2 */
} rows16;

static rows16 rows16_at(const void *planes, int Kp) {
    const uint8_t *p = planes;
    const int64_t G = Kp / NV_COLS, head = 64 + (G + 64) / 64 * 64;
    return (
        rows16){ .shift = (const int32_t *)planes, .wide = p + 65, .low = p + head, .high = p + head + G * 2 * TILE };
}

/* Sums of one tile of 16 rows x 16 outputs, by weight. X: what third digits add, by turns into two tiles. */
typedef struct sums {
    int32_t t0[256], t1a[256], t1b[256], t2[256];
    int32_t x2[2][256], x3[2][256], x4[256];
} sums;

typedef struct work {
    uint8_t low[SLICE][2][TILE];
    uint8_t high[SLICE][TILE];
    sums s[CHUNK];
    uint8_t zeros[128];         /* by scale code: trailing zeros of the integer */
    uint8_t mul[128], exp[128]; /* by scale code: scale >> shift = mul << exp */
    uint8_t wide[SLICE];
} work;

/* ---- tiles ---- */

#define TILE_LOAD(reg, p) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #reg : : "r"(p), "r"((int64_t)64) : "memory")
#define TILE_STORE(p, reg) \
    __asm__ volatile("tilestored %%tmm" #reg ", (%0,%1,1)" : : "r"(p), "r"((int64_t)64) : "memory")
#define TILE_ZERO(reg) __asm__ volatile("tilezero %tmm" #reg)
/* to += a . b; u and s say how a's and b's bytes are read. */
#define TILE_DOT(kind, to, a, b) __asm__ volatile("tdpb" #kind "d %tmm" #b ", %tmm" #a ", %tmm" #to)

static void tiles_on(void) {
    _Alignas(64) uint8_t config[64] = { 1 };
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;
        config[48 + i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
static void tiles_off(void) { __asm__ volatile("tilerelease" ::: "memory"); }

INLINE void group_dot(const uint8_t *a, const uint8_t *w) {
    TILE_LOAD(4, a);
    TILE_LOAD(6, w);
    TILE_DOT(uu, 0, 4, 6);
    TILE_LOAD(7, w + TILE);
    TILE_DOT(us, 1, 4, 7);
    TILE_LOAD(5, a + TILE);
    TILE_DOT(su, 2, 5, 6);
    TILE_DOT(ss, 3, 5, 7);
}

INLINE void sums_load(const sums *s, bool first) {
    if (first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, s->t0);
        TILE_LOAD(1, s->t1a);
        TILE_LOAD(2, s->t1b);
        TILE_LOAD(3, s->t2);
    }
}
INLINE void sums_store(sums *s) {
    TILE_STORE(s->t0, 0);
    TILE_STORE(s->t1a, 1);
    TILE_STORE(s->t1b, 2);
    TILE_STORE(s->t2, 3);
}

/* The products of third digits of one group; which of them have any. */
#define GROUP_WIDE(x2, x3)                 \
    do {                                   \
        if (wa) {                          \
            TILE_LOAD(5, high);            \
            TILE_LOAD(6, w);               \
            TILE_DOT(su, x2, 5, 6);        \
            TILE_LOAD(7, w + TILE);        \
            TILE_DOT(ss, x3, 5, 7);        \
        }                                  \
        if (ww) {                          \
            TILE_LOAD(6, w2);              \
            if (wa) TILE_DOT(ss, 4, 5, 6); \
            TILE_LOAD(5, a);               \
            TILE_DOT(us, x2, 5, 6);        \
            TILE_LOAD(7, a + TILE);        \
            TILE_DOT(ss, x3, 7, 6);        \
        }                                  \
    } while (0)

static void slice_wide(sums *s, const work *k, const rows16 *r, int g0, int n, bool first) {
    if (first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        TILE_ZERO(4);
    } else {
        TILE_LOAD(0, s->x2[0]);
        TILE_LOAD(1, s->x3[0]);
        TILE_LOAD(2, s->x2[1]);
        TILE_LOAD(3, s->x3[1]);
        TILE_LOAD(4, s->x4);
    }
    for (int i = 0; i < n; i++) {
        const bool wa = r->wide[g0 + i], ww = k->wide[i];
        const uint8_t *a = r->low + (int64_t)(g0 + i) * 2 * TILE, *high = r->high + (int64_t)(g0 + i) * TILE;
        const uint8_t *w = k->low[i][0], *w2 = k->high[i];
        if (i & 1)
            GROUP_WIDE(2, 3);
        else
            GROUP_WIDE(0, 1);
    }
    TILE_STORE(s->x2[0], 0);
    TILE_STORE(s->x3[0], 1);
    TILE_STORE(s->x2[1], 2);
    TILE_STORE(s->x3[1], 3);
    TILE_STORE(s->x4, 4);
}

/* ---- weights: a group of the stream into planes ---- */

typedef enum kind { BYTE_SCALES, TWO_DIGITS, THREE_DIGITS } kind;

typedef struct plan {
    kind kind;
    int shift;
    int64_t next; /* bytes to a panel to fetch meanwhile; 0: none */
    uint8_t fit;  /* the largest scale code whose products need no third digit */
} plan;

INLINE __m512i table_of(const uint8_t *t, __m512i codes) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(t), codes, _mm512_loadu_si512(t + 64));
}

/* The panel's shift, how wide its scales are without it, and the tables that take it out. */
static plan panel_plan(work *k, const uint8_t *panel, int G) {
    __m512i low = _mm512_set1_epi8(-1), high = _mm512_setzero_si512();
    for (int g = 0; g < G; g++) {
        const __m512i c =
            _mm512_and_si512(_mm512_loadu_si512(panel + (int64_t)g * NV_GROUP_BYTES), _mm512_set1_epi8(127));
        low = _mm512_min_epu8(low, table_of(k->zeros, c));
        high = _mm512_max_epu8(high, c);
    }
    uint8_t zeros[64], codes[64], min = 255, max = 0;
    _mm512_storeu_si512(zeros, low);
    _mm512_storeu_si512(codes, high);
    for (int i = 0; i < 64; i++) {
        min = zeros[i] < min ? zeros[i] : min;
        max = codes[i] > max ? codes[i] : max;
    }
    plan p = { .shift = min == 255 ? 0 : min, .fit = max };
    const int32_t top = e4m3_times_512(max) >> p.shift;
    p.kind = top <= FIT_8 ? BYTE_SCALES : top <= FIT_16 ? TWO_DIGITS : THREE_DIGITS;
    while (e4m3_times_512(p.fit) >> p.shift > FIT_16) p.fit--;

    const __m512i shift = _mm512_set1_epi32(p.shift), zero = _mm512_setzero_si512();
    for (int i = 0; i < 128; i += 16) {
        const __m512i c = _mm512_add_epi32(_mm512_set1_epi32(i),
                                           _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        const __m512i e = _mm512_srli_epi32(c, 3);
        const __mmask16 normal = _mm512_test_epi32_mask(e, e);
        __m512i m = _mm512_and_si512(c, _mm512_set1_epi32(7));
        m = _mm512_mask_or_epi32(m, normal, m, _mm512_set1_epi32(8));
        m = _mm512_mask_mov_epi32(m, _mm512_cmpeq_epi32_mask(c, _mm512_set1_epi32(127)), zero);
        const __m512i at = _mm512_sub_epi32(_mm512_mask_sub_epi32(zero, normal, e, _mm512_set1_epi32(1)), shift);
        const __m512i up = _mm512_max_epi32(at, zero), down = _mm512_max_epi32(_mm512_sub_epi32(zero, at), zero);
        m = _mm512_srlv_epi32(m, down);
        if (p.kind == BYTE_SCALES) m = _mm512_sllv_epi32(m, up);
        _mm_storeu_si128((__m128i *)(void *)(k->mul + i), _mm512_cvtepi32_epi8(m));
        _mm_storeu_si128((__m128i *)(void *)(k->exp + i), _mm512_cvtepi32_epi8(up));
    }
    return p;
}

/* Four columns of 16 rows: codes times scales in 16 bits, split into bytes. Words hold columns 0, 2 and 1, 3. */
INLINE void expand_four(uint8_t *low, uint8_t *high, __m512i code, __m512i mul, __m512i exp, const kind how) {
    const __mmask64 odd = 0xaaaaaaaaaaaaaaaau;
    const __m512i a = _mm512_maddubs_epi16(mul, code), b = _mm512_maddubs_epi16(_mm512_slli_epi16(mul, 8), code);
    const __m512i va = how == BYTE_SCALES ? a : _mm512_sllv_epi16(a, exp);
    const __m512i vb = how == BYTE_SCALES ? b : _mm512_sllv_epi16(b, exp);
    const __m512i x = _mm512_shrdi_epi16(va, vb, 8);
    _mm512_store_si512(low, _mm512_mask_blend_epi8(odd, va, x));
    _mm512_store_si512(low + TILE, _mm512_mask_blend_epi8(odd, x, vb));
    if (how != THREE_DIGITS) return;
    /* ((v << e) + 2^15) >> 16 in 16 bits; e = 0 has no third digit and e = 1 gives 0 for it too. */
    const __m512i e = _mm512_max_epu16(exp, _mm512_set1_epi16(1));
    const __m512i half = _mm512_sllv_epi16(_mm512_set1_epi16(1), _mm512_sub_epi16(_mm512_set1_epi16(15), e));
    const __m512i down = _mm512_sub_epi16(_mm512_set1_epi16(16), e);
    const __m512i ha = _mm512_srav_epi16(_mm512_add_epi16(a, half), down);
    const __m512i hb = _mm512_srav_epi16(_mm512_add_epi16(b, half), down);
    _mm512_store_si512(high, _mm512_mask_blend_epi8(odd, ha, _mm512_slli_epi16(hb, 8)));
}

INLINE void expand_group(work *k, int i, const uint8_t *w, uint8_t fit, const kind how) {
    const __m512i twice =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m512i nibble = _mm512_set1_epi8(15);
    const __mmask64 even = 0x5555555555555555u;
    const __m512i scales = _mm512_load_si512(w);
    const __m512i mul = table_of(k->mul, scales), exp = how == BYTE_SCALES ? scales : table_of(k->exp, scales);
    __m512i lane = _mm512_mullo_epi32(_mm512_set1_epi32(0x01010101),
                                      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    uint8_t *low = k->low[i][0], *high = k->high[i];
    for (int b = 0; b < 4; b++) {
        const __m512i m = _mm512_maskz_permutexvar_epi8(even, lane, mul);
        const __m512i e = how == BYTE_SCALES ? m : _mm512_maskz_permutexvar_epi8(even, lane, exp);
        for (int o = 0; o < 2; o++) {
            const __m512i c = _mm512_load_si512(w + 64 + (b * 2 + o) * 64);
            const __m512i c0 = _mm512_shuffle_epi8(twice, _mm512_and_si512(c, nibble));
            const __m512i c1 = _mm512_shuffle_epi8(twice, _mm512_and_si512(_mm512_srli_epi16(c, 4), nibble));
            const int at = (b * 2 + o) * 128;
            expand_four(low + at, high + at, c0, m, e, how);
            expand_four(low + at + 64, high + at + 64, c1, m, e, how);
        }
        lane = _mm512_add_epi8(lane, _mm512_set1_epi8(16));
    }
    if (how == THREE_DIGITS)
        k->wide[i] =
            _mm512_cmpgt_epu8_mask(_mm512_and_si512(scales, _mm512_set1_epi8(127)), _mm512_set1_epi8((char)fit)) != 0;
}

/* ---- one slice of a panel ---- */

/* Expand it and multiply the first tile of rows on the way: the two use different parts of the core. */
INLINE void slice_first(work *k, const uint8_t *w, const uint8_t *a, int n, int64_t next, uint8_t fit, const kind how) {
    for (int i = 0; i < n; i++, w += NV_GROUP_BYTES) {
        if (next)
            for (int j = 0; j < NV_GROUP_BYTES; j += 64) _mm_prefetch((const char *)w + next + j, _MM_HINT_T1);
        expand_group(k, i, w, fit, how);
        if (i > 0) group_dot(a + (i - 1) * 2 * TILE, k->low[i - 1][0]);
    }
    group_dot(a + (n - 1) * 2 * TILE, k->low[n - 1][0]);
}

static void panel_slice(work *k, const plan *p, const uint8_t *w, const rows16 *r, int tiles, int g0, int n) {
    for (int t = 0; t < tiles; t++) {
        const uint8_t *a = r[t].low + (int64_t)g0 * 2 * TILE;
        sums_load(&k->s[t], g0 == 0);
        if (t > 0) {
            for (int i = 0; i < n; i++) group_dot(a + i * 2 * TILE, k->low[i][0]);
        } else {
            switch (p->kind) {
            case BYTE_SCALES: slice_first(k, w, a, n, p->next, p->fit, BYTE_SCALES); break;
            case TWO_DIGITS: slice_first(k, w, a, n, p->next, p->fit, TWO_DIGITS); break;
            default: slice_first(k, w, a, n, p->next, p->fit, THREE_DIGITS); break;
            }
        }
        sums_store(&k->s[t]);
        if (p->kind == THREE_DIGITS || r[t].wide[-1]) slice_wide(&k->s[t], k, &r[t], g0, n, g0 == 0);
    }
}

/* ---- sums to outputs ---- */

INLINE __m512i lanes64(__m512i v, int half) {
    return _mm512_cvtepi32_epi64(half ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v));
}
INLINE __m512i sum_row(const int32_t *tile, int m) { return _mm512_load_si512(tile + m * 16); }

INLINE void outputs(float *y, int64_t ldy, const sums *s, const rows16 *r, int rows, int shift, const bool wide) {
    for (int m = 0; m < rows; m++) {
        const __m512i t1 = _mm512_add_epi32(sum_row(s->t1a, m), sum_row(s->t1b, m));
        const __m512i t1_low = _mm512_slli_epi32(_mm512_and_si512(t1, _mm512_set1_epi32(255)), 8);
        const __m512i low = _mm512_add_epi32(sum_row(s->t0, m), t1_low);
        __m512i high = _mm512_add_epi32(sum_row(s->t2, m), _mm512_srai_epi32(t1, 8)), x3 = high, x4 = high;
        if (wide) {
            high = _mm512_add_epi32(high, _mm512_add_epi32(sum_row(s->x2[0], m), sum_row(s->x2[1], m)));
            x3 = _mm512_add_epi32(sum_row(s->x3[0], m), sum_row(s->x3[1], m));
            x4 = sum_row(s->x4, m);
        }
        __m256 f[2];
        for (int h = 0; h < 2; h++) {
            __m512i v = _mm512_add_epi64(_mm512_slli_epi64(lanes64(high, h), 16), lanes64(low, h));
            if (wide) {
                v = _mm512_add_epi64(v, _mm512_slli_epi64(lanes64(x3, h), 24));
                v = _mm512_add_epi64(v, _mm512_slli_epi64(lanes64(x4, h), 32));
            }
            f[h] = _mm512_cvtepi64_ps(v);
        }
        const __m512 v = _mm512_insertf32x8(_mm512_castps256_ps512(f[0]), f[1], 1);
        const __m512 unit = _mm512_castsi512_ps(_mm512_set1_epi32((127 + shift + r->shift[m]) << 23));
        _mm512_storeu_ps(y + m * ldy, _mm512_mul_ps(v, unit));
    }
}

/* One panel against the rows of a chunk. */
static void panel_gemm(float *y, int64_t ldy, work *k, const uint8_t *panel, int Kp, const rows16 *r, int rows,
                       int64_t next) {
    const int G = Kp / NV_COLS, tiles = (rows + 15) / 16;
    plan p = panel_plan(k, panel, G);
    p.next = next;
    memset(k->wide, 0, sizeof k->wide);
    for (int g = 0; g < G; g += SLICE)
        panel_slice(k, &p, panel + (int64_t)g * NV_GROUP_BYTES, r, tiles, g, G - g < SLICE ? G - g : SLICE);
    for (int t = 0; t < tiles; t++) {
        const int n = rows - t * 16 < 16 ? rows - t * 16 : 16;
        if (p.kind == THREE_DIGITS || r[t].wide[-1])
            outputs(y + (int64_t)t * 16 * ldy, ldy, &k->s[t], &r[t], n, p.shift, true);
        else
            outputs(y + (int64_t)t * 16 * ldy, ldy, &k->s[t], &r[t], n, p.shift, false);
    }
}

static void gemm(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const void *planes, int M,
                 void *memory) {
    work *k = memory;
    CHECK(Kp <= MAX_K, "K %d: 32-bit sums hold %d columns", Kp, MAX_K);
    for (int c = 0; c < 128; c++) {
        const int32_t s = e4m3_times_512((uint8_t)c);
        k->zeros[c] = s ? (uint8_t)__builtin_ctz((unsigned)s) : 255;
    }
    const int64_t tile_bytes = nv_tile_bytes(Kp);
    int chunk = CHUNK_BYTES / (Kp * 32);
    chunk = chunk < 4 ? 4 : chunk > CHUNK ? CHUNK : chunk;
    tiles_on();
    for (int m = 0; m < M; m += chunk * 16) {
        const int rows = M - m < chunk * 16 ? M - m : chunk * 16;
        rows16 r[CHUNK];
        for (int t = 0; t * 16 < rows; t++) r[t] = rows16_at((const uint8_t *)planes + (m / 16 + t) * tile_bytes, Kp);
        for (int p = 0; p < n; p++)
            panel_gemm(y + m * ldy + p * NV_ROWS, ldy, k, panels + p * stride, Kp, r, rows, m == 0 ? stride : 0);
    }
    tiles_off();
}

/* ---- inputs ---- */

/* Row m of a tile; returns nothing but marks the groups with third digits. */
static void row_planes(uint8_t *low, uint8_t *high, uint8_t *wide, int32_t *shift, const nv_act *a, int m, int Kp) {
    __m512i any = _mm512_setzero_si512();
    int b = 0;
    int32_t rest = 0;
    for (; b + 16 <= Kp / BLOCK; b += 16) any = _mm512_or_si512(any, _mm512_loadu_si512(a->scale + b));
    for (; b < Kp / BLOCK; b++) rest |= a->scale[b];
    rest |= _mm512_reduce_or_epi32(any);
    *shift = rest ? __builtin_ctz((unsigned)rest) : 0;
    for (int g = 0; g < Kp / NV_COLS; g++) {
        __m512i top[4], some = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) {
            const int8_t *codes = a->codes + g * NV_COLS + i * BLOCK;
            const __m512i c = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
            const __m512i v = _mm512_mullo_epi32(c, _mm512_set1_epi32(a->scale[g * 4 + i] >> *shift));
            uint8_t *to = low + g * 2 * TILE + m * 64 + i * BLOCK;
            _mm_store_si128((__m128i *)(void *)to, _mm512_cvtepi32_epi8(v));
            _mm_store_si128((__m128i *)(void *)(to + TILE), _mm512_cvtepi32_epi8(_mm512_srli_epi32(v, 8)));
            top[i] = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(32768)), 16);
            some = _mm512_or_si512(some, top[i]);
        }
        if (!_mm512_test_epi32_mask(some, some) && !wide[g]) continue;
        if (!wide[g]) memset(high + g * TILE, 0, TILE);
        wide[-1] = wide[g] = 1;
        for (int i = 0; i < 4; i++)
            _mm_store_si128((__m128i *)(void *)(high + g * TILE + m * 64 + i * BLOCK), _mm512_cvtepi32_epi8(top[i]));
    }
}

static void planes(void *out, const nv_act *const *rows, int n, int Kp) {
    const rows16 r = rows16_at(out, Kp);
    uint8_t *p = out, *low = p + (r.low - p), *high = p + (r.high - p), *wide = p + (r.wide - p);
    int32_t *shift = out;
    memset(p, 0, (size_t)(r.low - p));
    for (int m = 0; m < n; m++) row_planes(low, high, wide, shift + m, rows[m], m, Kp);
    for (int m = n; m < 16; m++)
        for (int g = 0; g < Kp / NV_COLS; g++)
            for (int i = 0; i < 2; i++) memset(low + (g * 2 + i) * TILE + m * 64, 0, 64);
}

void nv_init_amx(nv_kern *k) {
    nv_init_avx512(k);
    k->isa = ISA_AMX;
    k->gemm_bytes = sizeof(work);
    k->planes = planes;
    k->gemm = gemm;
}
