#include "kern/selftest.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_M = 17, MAX_N = 48, MAX_K = 192 };

typedef struct shape {
    int M, N, K;
} shape;
static const shape shapes[] = { { 1, 16, 64 }, { 3, 37, 176 }, { MAX_M, MAX_N, MAX_K } };

/* Operands and results; 64-byte aligned members first. */
typedef struct workbench {
    _Alignas(64) uint8_t panels[3 * 3 * NV_GROUP_BYTES];
    _Alignas(64) char act[2][MAX_M][4 * MAX_K + 64];
    _Alignas(64) float x[MAX_M * MAX_K], w[MAX_K], y[2][MAX_M * MAX_N + MAX_K * MAX_M];
    uint16_t bf16[MAX_N * MAX_K];
    uint8_t codes[MAX_N * MAX_K / 2], scales[MAX_N * MAX_K / 16], made[2][MAX_K], kv[300 + 64 * 40];
} workbench;

static uint32_t next(uint32_t *s) { return *s = *s * 1664525u + 1013904223u; }

static void fill(workbench *b) {
    uint32_t s = 20261202;
    for (size_t i = 0; i < ARRAY_LEN(b->x); i++) b->x[i] = (float)((int32_t)next(&s) >> 12) * 0x1p-17f;
    for (size_t i = 0; i < ARRAY_LEN(b->w); i++) b->w[i] = 0.5f + (float)(next(&s) >> 9) * 0x1p-23f;
    for (size_t i = 0; i < ARRAY_LEN(b->bf16); i++) b->bf16[i] = (uint16_t)(next(&s) >> 16 & 0xbfff) % 0x3f80;
    for (size_t i = 0; i < ARRAY_LEN(b->codes); i++) b->codes[i] = (uint8_t)(next(&s) >> 24);
    for (size_t i = 0; i < ARRAY_LEN(b->scales); i++) b->scales[i] = (uint8_t)((next(&s) >> 24) % 0x7f);
}

typedef struct tester {
    const kern *k[2];
    const quant_kern *q[2];
    const nv_kern *nv[2]; /* 0: the reference */
    workbench *b;
    const shape *s;
    err *e;
} tester;

static bool same(const tester *t, const char *name, kern_isa isa, const void *a, const void *b, size_t bytes) {
    if (memcmp(a, b, bytes) == 0) return true;
    return fail(t->e, ERR_MACHINE, "E-MACHINE-KERNEL",
                "%s kernel '%s' returns other bits than the reference for M %d, N %d, K %d (cap it: --isa %s)",
                kern_isa_name(isa), name, t->s->M, t->s->N, t->s->K,
                isa >= ISA_AVX512 && isa <= ISA_AMX ? "avx2" : "ref");
}

static bool test_rows(const tester *t) {
    workbench *b = t->b;
    const int M = t->s->M, N = t->s->N, K = t->s->K;
    const kern_isa isa = t->k[1]->isa;
    for (int i = 0; i < 2; i++) t->k[i]->gemm_bf16(b->y[i], N, b->x, K, b->bf16, M, N, K);
    if (!same(t, "gemm_bf16", isa, b->y[0], b->y[1], (size_t)(M * N) * sizeof(float))) return false;
    for (int i = 0; i < 2; i++) {
        t->k[i]->rmsnorm(b->y[i], b->x, b->w, K, 1e-6f);
        t->k[i]->silu_mul(b->y[i] + K, b->x, b->y[i], K);
        t->k[i]->l2norm(b->y[i] + 2 * K, b->x, K, 1e-6f, 0.125f);
        t->k[i]->gated_norm(b->y[i] + 3 * K, b->x, b->w, b->w, K, 1e-6f);
    }
    return same(t, "rmsnorm, silu_mul, l2norm, gated_norm", isa, b->y[0], b->y[1], (size_t)(4 * K) * sizeof(float));
}

static bool test_inputs(const tester *t, nv_act a[2][MAX_M], bool int8) {
    workbench *b = t->b;
    const int K = t->s->K;
    const size_t used = (size_t)nv_padded(K) * 3 / 2;
    for (int m = 0; m < t->s->M; m++) {
        for (int i = 0; i < 2; i++) {
            a[i][m] = nv_act_at(b->act[i][m], K);
            if (int8) {
                t->nv[i]->act_int8(&a[i][m], b->x + m * K, K);
                continue;
            }
            t->q[i]->act_encode(b->made[i], b->made[i] + MAX_K / 2, b->x + m * K, K, 0.01f);
            t->nv[i]->act_fp4(&a[i][m], b->made[i], b->made[i] + MAX_K / 2, K);
        }
        if (!same(t, int8 ? "act_int8" : "act_fp4", t->nv[1]->isa, b->act[0][m], b->act[1][m], used)) return false;
    }
    return true;
}

/* One GDN step and one attention tile: 64 x 32 of state, 37 positions of 64. */
static bool test_sequence(const tester *t) {
    enum { DK = 32, COLS = 32, POS = 37, D = 64, G = 3 };
    workbench *b = t->b;
    const kern_isa isa = t->k[1]->isa;
    for (int i = 0; i < 2; i++) {
        float S[DK * COLS], *o = b->y[i];
        gdn_token tokens[2];
        memcpy(S, b->x, sizeof S);
        for (int j = 0; j < 2; j++)
            tokens[j] = (gdn_token){ .q = b->x + 40 + j,
                                     .k = b->x + 80 + j,
                                     .v = b->x + 120 + j,
                                     .o = o + j * COLS,
                                     .beta = 0.5f,
                                     .decay = 0.75f };
        t->k[i]->gdn_steps(S, COLS, tokens, 2, 2, b->y[i] + 1000, DK, COLS);
        memcpy(o + 2 * COLS, S, 64 * sizeof *S);
        memset(b->y[i] + 1000, 0, DK * COLS * sizeof *S);
    }
    if (!same(t, "gdn_steps", isa, b->y[0], b->y[1], (2 * COLS + 64) * sizeof(float))) return false;
    for (int i = 0; i < 2; i++) {
        float *o = b->y[i];
        memset(b->y[i], 0, sizeof b->y[i]);
        t->k[i]->attn_tile_f32(o, o + G * D, o + G * D + G, b->x, b->x + 200, b->x + 300, 7, POS, G, D, 0.125f);
    }
    const size_t bytes = (size_t)(G * D + 2 * G) * sizeof(float);
    if (!same(t, "attn_tile_f32", isa, b->y[0], b->y[1], bytes)) return false;
    float *work = xmalloc(KERN_ATTN_WORK(G, D) * sizeof *work);
    for (size_t i = 0; i < sizeof b->kv; i++)
        b->kv[i] = b->codes[i] & 0xbf; /* no NaN codes: any NaN may come of them */
    for (int i = 0; i < 2; i++) {
        float *o = b->y[i];
        t->k[i]->attn_tile_fp8(o, o + G * D, o + G * D + G, b->x, b->kv, b->kv + 300, D, POS, G, D, 0.125f, work);
    }
    free(work);
    return same(t, "attn_tile_fp8", isa, b->y[0], b->y[1], bytes);
}

static bool test_nvfp4(const tester *t, bool int8) {
    workbench *b = t->b;
    const int M = t->s->M, K = t->s->K, Kp = nv_padded(K), n = nv_panels(t->s->N);
    const int64_t stride = nv_panel_bytes(K);
    nv_act a[2][MAX_M];
    if (!test_inputs(t, a, int8)) return false;
    for (int p = 0; p < n; p++)
        t->nv[1]->pack(b->panels + p * stride, b->codes + p * 8 * K, b->scales + p * K,
                       t->s->N - p * 16 < 16 ? t->s->N - p * 16 : 16, K);
    for (int i = 0; i < 2; i++) t->nv[i]->dot(b->y[i], n * 16, b->panels, stride, n, Kp, a[0], M);
    const size_t bytes = (size_t)(M * n * 16) * sizeof(float);
    if (!same(t, "nvfp4 dot", t->nv[1]->isa, b->y[0], b->y[1], bytes)) return false;
    if (!t->nv[1]->gemm || M < 8) return true;
    const int64_t tile = nv_tile_bytes(Kp);
    const int tiles = (M + 15) / 16;
    char *mem = NULL;
    CHECK(posix_memalign((void **)&mem, 64, (size_t)(tiles * tile) + t->nv[1]->gemm_bytes) == 0, "out of memory");
    for (int i = 0; i < tiles; i++) {
        const nv_act *rows[16];
        const int count = M - i * 16 < 16 ? M - i * 16 : 16;
        for (int r = 0; r < count; r++) rows[r] = &a[0][i * 16 + r];
        t->nv[1]->planes(mem + i * tile, rows, count, Kp);
    }
    t->nv[1]->gemm(b->y[1], n * 16, b->panels, stride, n, Kp, mem, M, mem + tiles * tile);
    const bool ok = same(t, "nvfp4 gemm", t->nv[1]->isa, b->y[0], b->y[1], bytes);
    free(mem);
    return ok;
}

bool kern_selftest(const kern *k, const quant_kern *q, const nv_kern *nv, err *e) {
    kern k_ref;
    quant_kern q_ref;
    nv_kern nv_ref;
    kern_init(&k_ref, ISA_REF);
    quant_kern_init(&q_ref, ISA_REF);
    nv_kern_init(&nv_ref, ISA_REF);
    void *mem = NULL;
    CHECK(posix_memalign(&mem, 64, sizeof(workbench)) == 0, "out of memory");
    tester t = { { &k_ref, k }, { &q_ref, q }, { &nv_ref, nv }, memset(mem, 0, sizeof(workbench)), shapes, e };
    fill(t.b);
    bool ok = true;
    for (t.s = shapes; ok && t.s < shapes + ARRAY_LEN(shapes); t.s++)
        ok = test_rows(&t) && test_sequence(&t) && test_nvfp4(&t, false) && test_nvfp4(&t, true);
    free(mem);
    return ok;
}
