/* opscheck - every op, the serial reference against the CPU backend at every level and several thread counts, bit for bit.
 * With NIBBLE_TEST_DEVICE=cuda, against that backend instead.
 *
 * Random shapes (odd sizes included), random values with zeros, denormals, huge numbers, infinities and NaN mixed in, several
 * sequences with commits and tentative rows. A NaN equals any NaN. `--seed N` repeats a run, `--rounds N` makes it longer. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/rng.h"
#include "num/bf16.h"
#include "num/nvfp4.h"
#include "ops/ops.h"

static uint64_t seed;
static uint64_t counter;
static bool wild; /* special values among the numbers */

static uint32_t draw(uint32_t below) { return (uint32_t)(rng_uniform(seed, 0, counter++, 9) * below); }
static int between(int lo, int hi) { return lo + (int)draw((uint32_t)(hi - lo + 1)); }

static float value(void) {
    static const float special[] = { 0.0f, -0.0f, 1e-42f, -1e-40f, 3e38f, -3e38f, INFINITY, -INFINITY, NAN, 1.0f };
    if (wild && draw(200) == 0) return special[draw(10)];
    return (float)(rng_uniform(seed, 1, counter++, 3) * 4 - 2);
}

static float *floats(int64_t n) {
    float *v = malloc((size_t)(n > 0 ? n : 1) * sizeof *v);
    for (int64_t i = 0; i < n; i++) v[i] = value();
    return v;
}

static void *weights_of(dtype t, int64_t n) {
    if (t == DT_F32) return floats(n);
    uint16_t *v = malloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) v[i] = t == DT_BF16 ? bf16_from_f32(value()) : f16_from_f32(value());
    return v;
}

/* ---- backends under test ---- */

enum { MAX_BACKENDS = 24 };
static ops *backends[MAX_BACKENDS];
static int n_backends;
static const char *what;
static int failures, checks;

static void open_backends(void) {
    static const int threads[] = { 1, 2, 3, 5 };
    err e = { 0 };
    CHECK(ops_open(&backends[n_backends++], &(ops_options){ .device = "ref" }, &e), "%s", e.msg);
    const char *device = getenv("NIBBLE_TEST_DEVICE");
    if (device && strcmp(device, "cpu") != 0) {
        CHECK(ops_open(&backends[n_backends++], &(ops_options){ .device = device }, &e), "%s", e.msg);
        return;
    }
    for (int isa = ISA_REF; isa < ISA_COUNT; isa++) {
        if (!kern_isa_supported((kern_isa)isa)) continue;
        for (size_t t = 0; t < ARRAY_LEN(threads); t++) {
            if (isa != ISA_REF && isa != ISA_AVX512 && isa != ISA_NEON && threads[t] > 2) continue;
            CHECK(ops_open(&backends[n_backends++],
                           &(ops_options){ .device = "cpu", .threads = threads[t], .isa = (kern_isa)isa }, &e),
                  "%s", e.msg);
        }
    }
}

/* Device memory with a copy of `host`, given back by give() at the end of each backend's turn. */
enum { MAX_LENT = 64 };
static void *lent[MAX_LENT];
static int n_lent;

static void *dev(ops *o, const void *host, int64_t bytes) {
    err e = { 0 };
    void *p;
    CHECK(n_lent < MAX_LENT && o->mem_new(o, &p, (size_t)bytes, &e), "%s", e.msg);
    if (host) o->upload(o, p, host, (size_t)bytes);
    return lent[n_lent++] = p;
}
static float *dev_floats(ops *o, const float *host, int64_t n) { return dev(o, host, n * (int64_t)sizeof *host); }

static void give(ops *o) {
    err e = { 0 };
    CHECK(o->sync(o, &e), "%s", e.msg);
    while (n_lent > 0) o->mem_free(o, lent[--n_lent]);
}

static bool same(const float *a, const float *b, int64_t n, int64_t *at) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) != 0 && !(isnan(a[i]) && isnan(b[i]))) return *at = i, false;
    return true;
}

/* Compare backend k's result, in its memory, with the reference's; `want` is filled when k is 0. */
static void compare(int k, float *want, const float *result, int64_t n, const char *part) {
    int64_t at;
    ops *o = backends[k];
    float *got = malloc((size_t)(n > 0 ? n : 1) * sizeof *got);
    o->download(o, got, result, (size_t)n * sizeof *got);
    if (k == 0) memcpy(want, got, (size_t)n * sizeof *got);
    checks += k > 0;
    if (k == 0 || same(want, got, n, &at)) {
        free(got);
        return;
    }
    failures++;
    printf("%s %s: backend %s/%s with %d threads: element %lld of %lld is %a, the reference has %a (seed %llu)\n", what,
           part, backends[k]->device, backends[k]->isa, backends[k]->threads, (long long)at, (long long)n,
           (double)got[at], (double)want[at], (unsigned long long)seed);
    free(got);
}

/* ---- ops ---- */

static void check_linear(void) {
    static const dtype types[] = { DT_BF16, DT_F16, DT_F32 };
    const int N = between(1, 90), K = draw(2) ? between(1, 300) : 32 * between(1, 9), M = between(1, 20);
    const dtype t = types[draw(3)];
    float *x = floats((int64_t)M * K), *want = malloc(sizeof(float) * (size_t)(M * N));
    void *w = weights_of(t, (int64_t)N * K);
    float rows_want[3 * 300];
    err e = { 0 };
    for (int k = 0; k < n_backends; k++) {
        ops *o = backends[k];
        linear *l;
        CHECK(o->linear_new(o, &l, &(linear_desc){ .name = "w", .type = t, .rows = N, .cols = K, .data = w }, &e), "%s",
              e.msg);
        float *y = dev_floats(o, NULL, (int64_t)M * N), *row = dev_floats(o, NULL, 3LL * K);
        o->linear(o, y, N, dev_floats(o, x, (int64_t)M * K), K, l, M);
        compare(k, want, y, (int64_t)M * N, dtype_name(t));
        const int32_t ids[3] = { 0, N - 1, N + 5 };
        o->embed(o, row, l, dev(o, ids, sizeof ids), 3);
        compare(k, rows_want, row, 3LL * K, "embed");
        o->linear_free(o, l);
        give(o);
    }
    free(x);
    free(want);
    free(w);
}

/* Random NVFP4 or FP8 weights of [N, K]: codes, positive scales. */
static linear_quant quant_weights(void **data, dtype *type, int N, int K, bool fp8, linear_act act) {
    linear_quant q = { .format = fp8 ? LINEAR_FP8 : LINEAR_NVFP4,
                       .act = act,
                       .scale_2 = 0.01f + (float)draw(100) * 1e-3f,
                       .input_scale =
                           act == LINEAR_ACT_FP4 || act == LINEAR_ACT_FP8 ? 0.002f + (float)draw(100) * 1e-4f : 0 };
    const size_t bytes = (size_t)N * (size_t)K / (fp8 ? 1 : 2);
    uint8_t *codes = malloc(bytes), *scales = malloc((size_t)N * (size_t)K / 16 + 1);
    for (size_t i = 0; i < bytes; i++) {
        codes[i] = (uint8_t)draw(256);
        if (fp8 && (codes[i] & 0x7f) == 0x7f) codes[i] = 0x30;
    }
    for (size_t i = 0; i < (size_t)N * (size_t)K / 16; i++) scales[i] = (uint8_t)(1 + draw(0x7e));
    q.scales = scales;
    *data = codes;
    *type = fp8 ? DT_F8_E4M3 : DT_U8;
    return q;
}

static void check_quant_linear(void) {
    static const linear_act acts[] = { LINEAR_ACT_FLOAT, LINEAR_ACT_FP4, LINEAR_ACT_INT8, LINEAR_ACT_FP8 };
    const bool fp8 = draw(3) == 0;
    linear_act act = acts[draw(fp8 ? 1 : 3)];
    if (fp8 && draw(2)) act = LINEAR_ACT_FP8;
    const bool wide = draw(4) == 0; /* shapes that backends have kernels of their own for */
    const int N = between(1, draw(4) ? 70 : 300), K = wide ? 512 << draw(4) : (draw(2) ? 16 : 64) * between(1, 12),
              M = wide || draw(4) ? between(1, 9) : between(8, 290);
    void *data;
    dtype t;
    const linear_quant q = quant_weights(&data, &t, N, K, fp8, act);
    float *x = floats((int64_t)M * K), *want = malloc(sizeof(float) * (size_t)(M * N));
    err e = { 0 };
    for (int k = 0; k < n_backends; k++) {
        ops *o = backends[k];
        linear *l;
        CHECK(o->linear_new(o, &l, &(linear_desc){ .name = "q", .type = t, .rows = N, .cols = K, .data = data, .q = q },
                            &e),
              "%s", e.msg);
        float *y = dev_floats(o, NULL, (int64_t)M * N);
        o->linear(o, y, N, dev_floats(o, x, (int64_t)M * K), K, l, M);
        compare(k, want, y, (int64_t)M * N, fp8 ? "FP8" : "NVFP4");
        o->linear_free(o, l);
        give(o);
    }
    free(x);
    free(want);
    free(data);
    free((void *)(uintptr_t)q.scales);
}

static void check_rows(void) {
    const int rows = between(1, 9), n = between(1, 400);
    const int64_t all = (int64_t)rows * n;
    float *x = floats(all), *w = floats(n), *u = floats(all), *want = malloc(sizeof(float) * (size_t)all * 5);
    int32_t index[9], best[9], best_want[9];
    for (int r = 0; r < rows; r++) index[r] = (int32_t)draw((uint32_t)rows);
    for (int k = 0; k < n_backends; k++) {
        ops *o = backends[k];
        float *y = dev_floats(o, NULL, all), *dx = dev_floats(o, x, all), *dw = dev_floats(o, w, n),
              *du = dev_floats(o, u, all);
        int32_t *found = dev(o, NULL, sizeof best);
        o->rmsnorm(o, y, dx, n, dw, rows, n, 1e-6f);
        compare(k, want, y, all, "rmsnorm");
        o->copy(o, y, dx, sizeof(float) * (size_t)all);
        o->add(o, y, du, all);
        compare(k, want + all, y, all, "add");
        o->silu_mul(o, y, dx, du, all);
        compare(k, want + 2 * all, y, all, "silu_mul");
        o->gated_norm(o, y, dx, du, dw, rows, 1, n, 1e-6f);
        compare(k, want + 3 * all, y, all, "gated_norm");
        o->gather_rows(o, y, dx, dev(o, index, (int64_t)sizeof *index * rows), rows, n);
        compare(k, want + 4 * all, y, all, "gather_rows");
        o->argmax(o, found, dx, rows, n);
        o->download(o, best, found, sizeof *best * (size_t)rows);
        if (k == 0) memcpy(best_want, best, sizeof best);
        for (int r = 0; r < rows; r++)
            if (best[r] != best_want[r])
                failures++, printf("argmax: backend %s row %d: %d, not %d\n", o->isa, r, best[r], best_want[r]);
        give(o);
    }
    free(x);
    free(w);
    free(u);
    free(want);
}

enum { SLOTS = 3 };

/* Spans over several slots with what each may commit; returns the rows. */
static int make_spans(ops_span *s, int *n, int *pending, const int *pos) {
    int rows = 0;
    *n = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        if (draw(4) == 0 && !(slot == SLOTS - 1 && *n == 0)) continue;
        const bool tentative = draw(3) == 0;
        ops_span *x = &s[(*n)++];
        *x = (ops_span){ .slot = slot,
                         .row0 = rows,
                         .rows = tentative      ? between(1, OPS_MAX_PENDING)
                                 : draw(8) == 0 ? between(30, 75)
                                                : between(1, 11),
                         .pos0 = pos[slot],
                         .commit = pending[slot] ? between(0, pending[slot]) : 0,
                         .tentative = tentative };
        rows += x->rows;
        pending[slot] = tentative ? x->rows : 0;
    }
    return rows;
}

static void check_gdn(void) {
    const bool wide = draw(8) == 0;
    const int taps = 4, kh = between(1, 3), ratio = between(1, 4), vh = kh * ratio, kd = wide ? 128 : between(1, 40),
              vd = wide ? 128 : between(1, 70);
    const int channels = 2 * kh * kd + vh * vd, steps = 4;
    float *w = floats((int64_t)channels * taps), *neg_a = floats(vh), *dt = floats(vh);
    for (int i = 0; i < vh; i++) neg_a[i] = -fabsf(neg_a[i]);
    ops_span spans[4][SLOTS];
    int n_spans[4], rows[4], pending[SLOTS] = { 0 }, pos[SLOTS] = { 0 };
    float *u[4], *a[4], *b[4], *want[4], *want_c[4];
    for (int s = 0; s < steps; s++) {
        rows[s] = make_spans(spans[s], &n_spans[s], pending, pos);
        u[s] = floats((int64_t)rows[s] * channels);
        a[s] = floats((int64_t)rows[s] * vh);
        b[s] = floats((int64_t)rows[s] * vh);
        want[s] = malloc(sizeof(float) * (size_t)(rows[s] * vh * vd));
        want_c[s] = malloc(sizeof(float) * (size_t)(rows[s] * channels));
    }
    const int64_t state = (int64_t)SLOTS * vh * kd * vd;
    float *state_want = malloc(sizeof(float) * (size_t)state);
    for (int k = 0; k < n_backends; k++) {
        ops *o = backends[k];
        ops_conv conv = { .channels = channels, .taps = taps };
        ops_gdn g = { .k_heads = kh, .v_heads = vh, .k_dim = kd, .v_dim = vd };
        void *mem[7];
        const int64_t sizes[7] = { (int64_t)SLOTS * (taps - 1) * channels,
                                   (int64_t)SLOTS * OPS_MAX_PENDING * channels,
                                   state,
                                   (int64_t)SLOTS * OPS_MAX_PENDING * kh * kd,
                                   (int64_t)SLOTS * OPS_MAX_PENDING * vh * vd,
                                   (int64_t)SLOTS * OPS_MAX_PENDING * vh,
                                   (int64_t)SLOTS * OPS_MAX_PENDING * vh };
        err e = { 0 };
        for (int i = 0; i < 7; i++) CHECK(o->mem_new(o, &mem[i], (size_t)sizes[i] * sizeof(float), &e), "%s", e.msg);
        conv.window = mem[0];
        conv.pending = mem[1];
        g.state = mem[2];
        g.pend_k = mem[3];
        g.pend_v = mem[4];
        g.pend_beta = mem[5];
        g.pend_decay = mem[6];
        float *dw = dev_floats(o, w, (int64_t)channels * taps), *da = dev_floats(o, neg_a, vh),
              *dd = dev_floats(o, dt, vh);
        for (int s = 0; s < steps; s++) {
            const int64_t n = rows[s];
            float *c = dev_floats(o, NULL, n * channels), *out = dev_floats(o, NULL, n * vh * vd);
            o->conv(o, c, dev_floats(o, u[s], n * channels), dw, &conv, spans[s], n_spans[s]);
            compare(k, want_c[s], c, n * channels, "conv");
            o->gdn(o, out, c, dev_floats(o, a[s], n * vh), dev_floats(o, b[s], n * vh), da, dd, &g, spans[s],
                   n_spans[s]);
            compare(k, want[s], out, n * vh * vd, "gdn");
        }
        compare(k, state_want, g.state, state, "gdn state");
        for (int i = 0; i < 7; i++) o->mem_free(o, mem[i]);
        give(o);
    }
    for (int s = 0; s < steps; s++) {
        free(u[s]);
        free(a[s]);
        free(b[s]);
        free(want[s]);
        free(want_c[s]);
    }
    free(w);
    free(neg_a);
    free(dt);
    free(state_want);
}

static void check_attention(void) {
    static const dtype types[] = { DT_F32, DT_BF16, DT_F8_E4M3 };
    const bool wide = draw(6) == 0; /* a shape that backends have kernels of their own for */
    const int kvh = between(1, 3), group = wide ? 8 : between(1, 5), heads = kvh * group,
              dim = wide ? 256 : 2 * between(1, 40), half = between(0, dim / 2);
    const bool gated = draw(2) == 0;
    const int capacity = between(70, 300), qrow = heads * dim * (gated ? 2 : 1), kvrow = kvh * dim;
    ops_span spans[SLOTS];
    int n_spans = 0, rows = 0;
    for (int s = 0; s < SLOTS; s++) {
        const int pos = draw(2) ? 0 : between(0, capacity - 20);
        const int n = between(1, 12);
        spans[n_spans++] = (ops_span){ .slot = s, .row0 = rows, .rows = n, .pos0 = pos };
        rows += n;
    }
    const dtype type = types[draw(3)];
    const int slot_pages = (capacity + OPS_KV_PAGE - 1) / OPS_KV_PAGE, pages = SLOTS * slot_pages;
    const int64_t cache = (int64_t)pages * OPS_KV_PAGE * kvrow;
    int32_t table[SLOTS * (300 / OPS_KV_PAGE + 1)];
    for (int i = 0; i < pages; i++) { /* a random permutation */
        const int j = (int)draw((uint32_t)i + 1);
        table[i] = table[j];
        table[j] = i;
    }
    float *qg = floats((int64_t)rows * qrow), *k0 = floats((int64_t)rows * kvrow), *v = floats((int64_t)rows * kvrow),
          *qn = floats(dim), *kn = floats(dim);
    float *cs = floats((int64_t)capacity * (half ? half : 1)), *sn = floats((int64_t)capacity * (half ? half : 1)),
          *fill = floats(2 * cache);
    float *want_q = malloc(sizeof(float) * (size_t)(rows * heads * dim)),
          *want_k = malloc(sizeof(float) * (size_t)(rows * kvrow)),
          *want_y = malloc(sizeof(float) * (size_t)(rows * heads * dim));
    uint8_t *axis = malloc((size_t)half + 1);
    int32_t *pos3 = malloc(sizeof *pos3 * 3 * (size_t)rows);
    for (int i = 0; i < half; i++) axis[i] = (uint8_t)draw(3);
    for (int i = 0; i < 3 * rows; i++) pos3[i] = (int32_t)draw((uint32_t)capacity);
    for (int b = 0; b < n_backends; b++) {
        ops *o = backends[b];
        ops_kv kv = { .type = type,
                      .pages = dev(o, table, (int64_t)sizeof *table * pages),
                      .slot_pages = slot_pages,
                      .kv_heads = kvh,
                      .dim = dim,
                      .capacity = capacity,
                      .k_scale = 0.03f,
                      .v_scale = 0.02f };
        const int64_t angles = (int64_t)capacity * (half ? half : 1), bytes = cache * dtype_bytes(type);
        const ops_rope rope = { dev_floats(o, cs, angles), dev_floats(o, sn, angles), dev(o, axis, half + 1), half };
        uint8_t *host[2];
        for (int j = 0; j < 2; j++) host[j] = malloc((size_t)bytes);
        for (int64_t i = 0; i < cache; i++) /* earlier positions */
            for (int j = 0; j < 2; j++) {
                const float x = fill[j * cache + i];
                if (type == DT_F32)
                    ((float *)(void *)host[j])[i] = x;
                else if (type == DT_BF16)
                    ((uint16_t *)(void *)host[j])[i] = bf16_from_f32(x);
                else
                    host[j][i] = e4m3_from_f32(x / 0.02f);
            }
        kv.k = dev(o, host[0], bytes);
        kv.v = dev(o, host[1], bytes);
        float *q = dev_floats(o, NULL, (int64_t)rows * heads * dim), *kk = dev_floats(o, k0, (int64_t)rows * kvrow),
              *y = dev_floats(o, NULL, (int64_t)rows * heads * dim), *dqg = dev_floats(o, qg, (int64_t)rows * qrow);
        o->qk_rope(o, q, kk, dqg, dev_floats(o, qn, dim), dev_floats(o, kn, dim),
                   dev(o, pos3, (int64_t)sizeof *pos3 * 3 * rows), &rope, rows, heads, kvh, dim, gated, 1e-6f);
        compare(b, want_q, q, (int64_t)rows * heads * dim, "qk_rope q");
        compare(b, want_k, kk, (int64_t)rows * kvrow, "qk_rope k");
        o->kv_append(o, &kv, kk, dev_floats(o, v, (int64_t)rows * kvrow), spans, n_spans);
        o->attention(o, y, q, gated ? dqg : NULL, &kv, heads, 0.125f, spans, n_spans);
        compare(b, want_y, y, (int64_t)rows * heads * dim, dtype_name(type));
        for (int j = 0; j < 2; j++) free(host[j]);
        give(o);
    }
    void *all[] = { qg, k0, v, qn, kn, cs, sn, fill, want_q, want_k, want_y, axis, pos3 };
    for (size_t i = 0; i < ARRAY_LEN(all); i++) free(all[i]);
}

static void check_moe(void) {
    const bool quant = draw(2) == 0, wide = quant && draw(8) == 0;
    const bool crowd = quant && !wide && draw(6) == 0; /* many rows of few experts */
    const int unit = draw(2) ? 16 : 64;
    const int count = wide ? 9 : between(2, crowd ? 3 : 24), k = wide ? 8 : between(1, count < 6 ? count : 6),
              inter = wide    ? 512
                      : crowd ? 16 * between(4, 20)
                      : quant ? unit * between(1, 4)
                              : between(1, 40),
              hidden = wide    ? 1024 << draw(2)
                       : crowd ? 16 * between(4, 36)
                       : quant ? unit * between(1, 6)
                               : between(1, 90),
              rows = between(1, wide    ? 2
                                : crowd ? 320
                                        : 30);
    const void *gate[24], *up[24], *down[24];
    linear_quant gq[24], uq[24], dq[24];
    static const linear_act acts[] = { LINEAR_ACT_FLOAT, LINEAR_ACT_FP4, LINEAR_ACT_INT8 };
    const linear_act act = acts[draw(3)];
    dtype type = DT_BF16;
    for (int e = 0; e < count; e++) {
        if (quant) {
            void *d;
            gq[e] = quant_weights(&d, &type, inter, hidden, false, act);
            gate[e] = d;
            uq[e] = quant_weights(&d, &type, inter, hidden, false, act);
            up[e] = d;
            dq[e] = quant_weights(&d, &type, hidden, inter, false, act);
            down[e] = d;
            if (crowd && rows % 4 > 0) uq[e].input_scale = gq[e].input_scale;
            if (crowd && rows % 4 > 1) gq[e].input_scale = uq[e].input_scale = gq[0].input_scale;
        } else {
            gate[e] = weights_of(DT_BF16, (int64_t)inter * hidden);
            up[e] = weights_of(DT_BF16, (int64_t)inter * hidden);
            down[e] = weights_of(DT_BF16, (int64_t)inter * hidden);
        }
    }
    float *x = floats((int64_t)rows * hidden), *logits = floats((int64_t)rows * count),
          *share = floats((int64_t)rows * hidden), *sg = floats(rows);
    float *res = floats((int64_t)rows * hidden), *want = malloc(sizeof(float) * (size_t)(3 * rows * hidden)),
          *wt_want = malloc(sizeof(float) * (size_t)(rows * k));
    int32_t *idx = malloc(sizeof *idx * (size_t)(rows * k)), *idx_want = malloc(sizeof *idx * (size_t)(rows * k));
    float *hid_want = malloc(sizeof(float) * (size_t)(rows * k * inter));
    err e = { 0 };
    for (int b = 0; b < n_backends; b++) {
        ops *o = backends[b];
        experts *ex;
        const experts_desc d = { .name = "x",
                                 .type = type,
                                 .count = count,
                                 .inter = inter,
                                 .hidden = hidden,
                                 .gate = gate,
                                 .up = up,
                                 .down = down,
                                 .gate_q = quant ? gq : NULL,
                                 .up_q = quant ? uq : NULL,
                                 .down_q = quant ? dq : NULL };
        CHECK(o->experts_new(o, &ex, &d, &e), "%s", e.msg);
        const int64_t in = (int64_t)rows * hidden, pairs = (int64_t)rows * k;
        int32_t *di = dev(o, NULL, pairs * (int64_t)sizeof *di);
        float *dwt = dev_floats(o, NULL, pairs), *dx = dev_floats(o, x, in), *y = dev_floats(o, NULL, in),
              *hid = dev_floats(o, NULL, pairs * inter);
        o->route(o, di, dwt, dev_floats(o, logits, (int64_t)rows * count), rows, count, k);
        o->download(o, idx, di, sizeof *idx * (size_t)pairs);
        if (b == 0) memcpy(idx_want, idx, sizeof *idx * (size_t)(rows * k));
        if (memcmp(idx, idx_want, sizeof *idx * (size_t)(rows * k)) != 0)
            failures++, printf("route: backend %s: other experts\n", o->isa);
        compare(b, wt_want, dwt, pairs, "route");
        o->moe(o, y, dx, ex, di, dwt, rows, k);
        compare(b, want, y, (int64_t)rows * hidden, quant ? "moe NVFP4" : "moe");
        o->moe_hidden(o, y, hid, dx, ex, di, dwt, rows, k);
        compare(b, want + (int64_t)rows * hidden, y, (int64_t)rows * hidden, "moe_hidden y");
        compare(b, hid_want, hid, (int64_t)rows * k * inter, "moe_hidden");
        o->upload(o, y, res, sizeof(float) * (size_t)in);
        o->moe_combine(o, y, dx, dev_floats(o, share, in), dev_floats(o, sg, rows), rows, hidden);
        compare(b, want + 2LL * rows * hidden, y, (int64_t)rows * hidden, "moe_combine");
        o->experts_free(o, ex);
        give(o);
    }
    for (int i = 0; i < count; i++) {
        free((void *)(uintptr_t)gate[i]);
        free((void *)(uintptr_t)up[i]);
        free((void *)(uintptr_t)down[i]);
        if (!quant) continue;
        free((void *)(uintptr_t)gq[i].scales);
        free((void *)(uintptr_t)uq[i].scales);
        free((void *)(uintptr_t)dq[i].scales);
    }
    void *all[] = { x, logits, share, sg, res, want, wt_want, idx, idx_want, hid_want };
    for (size_t i = 0; i < ARRAY_LEN(all); i++) free(all[i]);
}

/* ---- several ops at once, where a backend has them: against the reference's single ops ---- */

enum { FUSED_K = 2048, FUSED_INTER = 512, FUSED_COUNT = 12, FUSED_TOP = 8, FUSED_ROWS = 5 };

static linear *random_linear(ops *o, const linear_desc *d) {
    err e = { 0 };
    linear *l;
    CHECK(o->linear_new(o, &l, d, &e), "%s", e.msg);
    return l;
}

static linear_desc random_desc(int N, int K, bool quant, linear_act act, float input_scale) {
    linear_desc d = { .name = "f", .type = DT_BF16, .rows = N, .cols = K };
    void *data;
    if (quant) {
        d.q = quant_weights(&data, &d.type, N, K, false, act);
        if (act == LINEAR_ACT_FP4 && input_scale > 0) d.q.input_scale = input_scale;
        d.data = data;
    } else {
        d.data = weights_of(DT_BF16, (int64_t)N * K);
    }
    return d;
}
static void free_desc(const linear_desc *d) {
    free((void *)(uintptr_t)d->data);
    free((void *)(uintptr_t)d->q.scales);
}

static void check_norm_linears(void) {
    enum { MOST = 4 };
    static const linear_act acts[] = { LINEAR_ACT_FLOAT, LINEAR_ACT_FP4, LINEAR_ACT_INT8 };
    const linear_act act = draw(2) ? LINEAR_ACT_FP4 : LINEAR_ACT_INT8;
    const int n = between(1, MOST), rows = between(1, draw(4) ? FUSED_ROWS : 40);
    const bool mixed = draw(3) == 0, keep = draw(2) == 0;
    linear_desc d[MOST];
    float *want[MOST], *x = floats((int64_t)rows * FUSED_K), *norm = floats(FUSED_K),
                       *h = floats((int64_t)rows * FUSED_K), *want_h = malloc(sizeof(float) * (size_t)(rows * FUSED_K)),
                       *want_add = malloc(sizeof(float) * (size_t)(rows * 70));
    for (int i = 0; i < n; i++) {
        d[i] = random_desc(between(1, 70), FUSED_K, draw(2) == 0, mixed ? acts[draw(3)] : act, draw(2) ? 0.003f : 0);
        want[i] = malloc(sizeof(float) * (size_t)(rows * d[i].rows));
    }
    const linear_desc add = random_desc(between(1, 70), 512 << draw(4), true, act, 0);
    float *in = floats((int64_t)rows * add.cols), *gate = floats((int64_t)rows * add.cols),
          *want_gated = malloc(sizeof(float) * (size_t)(rows * 70)), *res = floats((int64_t)rows * add.rows);
    for (int b = 0; b < n_backends; b++) {
        ops *o = backends[b];
        linear *w[MOST];
        const linear *cw[MOST];
        float *y[MOST], *dx = dev_floats(o, x, (int64_t)rows * FUSED_K), *dn = dev_floats(o, norm, FUSED_K),
                        *dh = dev_floats(o, h, (int64_t)rows * FUSED_K);
        for (int i = 0; i < n; i++) {
            cw[i] = w[i] = random_linear(o, &d[i]);
            y[i] = dev_floats(o, NULL, (int64_t)rows * d[i].rows);
        }
        if (!o->norm_linears || !o->norm_linears(o, y, keep ? dh : NULL, cw, n, dx, dn, 1e-6f, rows)) {
            o->rmsnorm(o, dh, dx, FUSED_K, dn, rows, FUSED_K, 1e-6f);
            for (int i = 0; i < n; i++) o->linear(o, y[i], d[i].rows, dh, FUSED_K, w[i], rows);
        }
        for (int i = 0; i < n; i++) compare(b, want[i], y[i], (int64_t)rows * d[i].rows, "norm_linears");
        if (keep) compare(b, want_h, dh, (int64_t)rows * FUSED_K, "normed rows");
        linear *wa = random_linear(o, &add);
        float *dr = dev_floats(o, res, (int64_t)rows * add.rows), *din = dev_floats(o, in, (int64_t)rows * add.cols),
              *dy = dev_floats(o, NULL, (int64_t)rows * add.rows);
        if (!o->linear_add || !o->linear_add(o, dr, din, wa, rows)) {
            o->linear(o, dy, add.rows, din, add.cols, wa, rows);
            o->add(o, dr, dy, (int64_t)rows * add.rows);
        }
        compare(b, want_add, dr, (int64_t)rows * add.rows, "linear_add");
        const int dim = 128, heads = add.cols / dim;
        float *gn = dev_floats(o, norm, dim), *z = dev_floats(o, gate, (int64_t)rows * add.cols),
              *t = dev_floats(o, NULL, (int64_t)rows * add.cols);
        if (!o->gated_linear_add || !o->gated_linear_add(o, dr, din, z, gn, heads, dim, 1e-6f, wa, rows)) {
            o->gated_norm(o, t, din, z, gn, rows, heads, dim, 1e-6f);
            o->linear(o, dy, add.rows, t, add.cols, wa, rows);
            o->add(o, dr, dy, (int64_t)rows * add.rows);
        }
        compare(b, want_gated, dr, (int64_t)rows * add.rows, "gated_linear_add");
        o->linear_free(o, wa);
        for (int i = 0; i < n; i++) o->linear_free(o, w[i]);
        give(o);
    }
    for (int i = 0; i < n; i++) {
        free_desc(&d[i]);
        free(want[i]);
    }
    free_desc(&add);
    void *all[] = { x, norm, h, want_h, want_add, want_gated, in, gate, res };
    for (size_t i = 0; i < ARRAY_LEN(all); i++) free(all[i]);
}

static void moe_single_ops(ops *o, float *x, const ops_moe_block *b, int rows) {
    const int64_t in = (int64_t)rows * FUSED_K;
    float *h = dev_floats(o, NULL, in), *logits = dev_floats(o, NULL, (int64_t)rows * FUSED_COUNT),
          *wt = dev_floats(o, NULL, (int64_t)rows * FUSED_TOP), *sg = dev_floats(o, NULL, rows),
          *gate = dev_floats(o, NULL, (int64_t)rows * FUSED_INTER),
          *up = dev_floats(o, NULL, (int64_t)rows * FUSED_INTER), *down = dev_floats(o, NULL, in),
          *routed = dev_floats(o, NULL, in);
    int32_t *idx = dev(o, NULL, (int64_t)sizeof *idx * rows * FUSED_TOP);
    o->rmsnorm(o, h, x, FUSED_K, b->norm, rows, FUSED_K, b->eps);
    o->linear(o, logits, FUSED_COUNT, h, FUSED_K, b->router, rows);
    o->linear(o, sg, 1, h, FUSED_K, b->shared_gate, rows);
    o->linear(o, gate, FUSED_INTER, h, FUSED_K, b->gate, rows);
    o->linear(o, up, FUSED_INTER, h, FUSED_K, b->up, rows);
    o->silu_mul(o, gate, gate, up, (int64_t)rows * FUSED_INTER);
    o->linear(o, down, FUSED_K, gate, FUSED_INTER, b->down, rows);
    o->route(o, idx, wt, logits, rows, FUSED_COUNT, FUSED_TOP);
    o->moe(o, routed, h, b->ex, idx, wt, rows, FUSED_TOP);
    o->moe_combine(o, x, routed, down, sg, rows, FUSED_K);
}

static void check_moe_block(void) {
    if (draw(5)) return; /* large */
    const linear_act act = draw(2) ? LINEAR_ACT_FP4 : LINEAR_ACT_INT8;
    const int rows = between(1, FUSED_ROWS);
    const float shared_in = 0.003f;
    linear_desc d[5] = { random_desc(FUSED_COUNT, FUSED_K, false, act, 0), random_desc(1, FUSED_K, false, act, 0),
                         random_desc(FUSED_INTER, FUSED_K, true, act, shared_in),
                         random_desc(FUSED_INTER, FUSED_K, true, act, shared_in),
                         random_desc(FUSED_K, FUSED_INTER, true, act, 0) };
    linear_desc e[3][FUSED_COUNT];
    const void *data[3][FUSED_COUNT];
    linear_quant q[3][FUSED_COUNT];
    for (int i = 0; i < FUSED_COUNT; i++)
        for (int k = 0; k < 3; k++) {
            const float g = 0.002f + 1e-4f * (float)i; /* gate and up alike */
            e[k][i] =
                random_desc(k == 2 ? FUSED_K : FUSED_INTER, k == 2 ? FUSED_INTER : FUSED_K, true, act, k < 2 ? g : 0);
            data[k][i] = e[k][i].data;
            q[k][i] = e[k][i].q;
        }
    const experts_desc ed = { .name = "x",
                              .type = DT_U8,
                              .count = FUSED_COUNT,
                              .inter = FUSED_INTER,
                              .hidden = FUSED_K,
                              .gate = data[0],
                              .up = data[1],
                              .down = data[2],
                              .gate_q = q[0],
                              .up_q = q[1],
                              .down_q = q[2] };
    float *x = floats((int64_t)rows * FUSED_K), *norm = floats(FUSED_K),
          *want = malloc(sizeof(float) * (size_t)(rows * FUSED_K));
    if (draw(3) == 0) memset((void *)(uintptr_t)d[0].data, 0, (size_t)FUSED_COUNT * FUSED_K * 2); /* all ties */
    for (int b = 0; b < n_backends; b++) {
        ops *o = backends[b];
        err err_of = { 0 };
        linear *w[5];
        experts *ex;
        for (int i = 0; i < 5; i++) w[i] = random_linear(o, &d[i]);
        CHECK(o->experts_new(o, &ex, &ed, &err_of), "%s", err_of.msg);
        float *dx = dev_floats(o, x, (int64_t)rows * FUSED_K);
        const ops_moe_block m = { .norm = dev_floats(o, norm, FUSED_K),
                                  .eps = 1e-6f,
                                  .router = w[0],
                                  .shared_gate = w[1],
                                  .gate = w[2],
                                  .up = w[3],
                                  .down = w[4],
                                  .ex = ex,
                                  .k = FUSED_TOP };
        if (!o->moe_block || !o->moe_block(o, dx, &m, rows)) moe_single_ops(o, dx, &m, rows);
        compare(b, want, dx, (int64_t)rows * FUSED_K, "moe_block");
        for (int i = 0; i < 5; i++) o->linear_free(o, w[i]);
        o->experts_free(o, ex);
        give(o);
    }
    for (int i = 0; i < 5; i++) free_desc(&d[i]);
    for (int i = 0; i < FUSED_COUNT; i++)
        for (int k = 0; k < 3; k++) free_desc(&e[k][i]);
    free(x);
    free(norm);
    free(want);
}

static void run(const char *name, void (*fn)(void), int rounds) {
    const int before = failures;
    what = name;
    printf("[ RUN      ] %s\n", name);
    for (int i = 0; i < rounds && failures - before < 5; i++) {
        wild = i % 3 == 2;
        fn();
    }
    printf(failures > before ? "[  FAILED  ] %s\n" : "[       OK ] %s\n", name);
}

int main(int argc, char **argv) {
    int rounds = 30;
    seed = (uint64_t)time(NULL);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0) seed = strtoull(argv[i + 1], NULL, 0);
        if (strcmp(argv[i], "--rounds") == 0) rounds = atoi(argv[i + 1]);
    }
    printf("seed %llu\n", (unsigned long long)seed);
    open_backends();
    run("linear", check_linear, rounds);
    run("quantized linear", check_quant_linear, rounds);
    run("rows", check_rows, rounds);
    run("conv and gdn", check_gdn, rounds);
    run("attention", check_attention, rounds);
    run("moe", check_moe, rounds);
    run("norm_linears", check_norm_linears, rounds);
    run("moe_block", check_moe_block, rounds);
    for (int i = 0; i < n_backends; i++) backends[i]->close(backends[i]);
    printf("%d comparisons, %d failures\n", checks, failures);
    return failures > 0;
}
