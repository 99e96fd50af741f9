/* kerncheck - every kernel at every level of this CPU against the plain-C reference, bit for bit.
 *
 *   kerncheck [--seed N] [--only MEMBER] [--rounds N] [--bench] [--fault] [--all]
 *
 * Operands end at an unreadable page and start only element-aligned, outputs carry a pattern around what may be written,
 * sizes sweep all tails, fills are random and adversarial. The last test freezes the bits themselves (a hash of
 * the reference's results on fixed inputs), so that all architectures are compared with each other.
 * --fault flips one bit of one result per member: every line must then say FAILED. --freeze prints the hashes anew. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "kern/kern_isa.h"
#include "num/bf16.h"
#include "num/fp8.h"

/* ---- random numbers: splitmix64 ---- */

static uint64_t rng_state;
static uint64_t rng(void) {
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static int below(int n) { return (int)(rng() % (uint64_t)n); }
static int between(int a, int b) { return a + below(b - a + 1); }
static float uniform(void) { return (float)(rng() >> 40) * 0x1p-24f; }

/* ---- guarded memory ---- */

enum { SLOTS = 16, SLOT_BYTES = 4 << 20 };
static uint8_t *slot_end[SLOTS];
static void guard_init(void) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < SLOTS; i++) {
        uint8_t *p = mmap(NULL, SLOT_BYTES + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p + SLOT_BYTES, page, PROT_NONE) != 0) exit(2);
        slot_end[i] = p + SLOT_BYTES;
    }
}

/* ---- one case ---- */

enum { MAX_IN = 8, MAX_OUT = 3 };
typedef struct operand {
    uint8_t *p;
    size_t bytes;
} operand;
typedef struct testcase {
    operand in[MAX_IN], out[MAX_OUT];
    int n_in, n_out, slots;
    uint8_t *before[MAX_OUT], *want[MAX_OUT]; /* contents at entry; the reference's results */
    int64_t a, b, c, d, e, f;                 /* shape; what they mean is the member's affair */
    float s1, s2;
    bool flag;
    int fill;
    char text[160];
} testcase;

static void *take(testcase *t, size_t bytes) {
    if (t->slots >= SLOTS || bytes > SLOT_BYTES) exit(2);
    return slot_end[t->slots++] - bytes;
}

/* Element kinds of an operand. The last four bytes of a row of floats are an element like any other. */
enum { F32, BF16, F16, E4M3 };
enum {
    FILL_NORMAL,
    FILL_BITS,
    FILL_DENORMAL,
    FILL_HUGE,
    FILL_TIES,
    FILL_SPRINKLE,
    FILL_NEG_ZERO,
    FILL_EXP,
    FILL_ZEROS,
    FILL_COUNT
};

static float bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static float value(int fill) {
    static const float special[] = { INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 0x1p-149f, -0x1p-149f, 0x1.fffffep127f };
    switch (fill) {
    case FILL_BITS: return bits((uint32_t)rng());
    case FILL_DENORMAL: return bits((uint32_t)rng() & 0x80ffffffu);
    case FILL_HUGE: return bits(((uint32_t)rng() & 0x81ffffffu) + 0x7d800000u);
    case FILL_TIES: return (float)(between(-3, 3));
    case FILL_SPRINKLE: return below(12) ? uniform() * 4 - 2 : special[below((int)ARRAY_LEN(special))];
    case FILL_NEG_ZERO: return -0.0f;
    case FILL_EXP: return uniform() * 220 - 112;
    case FILL_ZEROS: return below(2) ? 0.0f : -0.0f;
    default: break;
    }
    const float a = uniform(), b = uniform(), c = uniform(), scale = bits((uint32_t)(between(120, 130) << 23));
    return (a + b + c - 1.5f) * scale;
}

static void fill_operand(void *p, size_t n, int kind, int fill) {
    for (size_t i = 0; i < n; i++) {
        const float f = value(fill);
        if (kind == E4M3) {
            ((uint8_t *)p)[i] = fill == FILL_BITS ? (uint8_t)rng() : e4m3_from_f32(f);
            continue;
        }
        const uint16_t h = kind == BF16 ? (uint16_t)(fill == FILL_BITS ? rng() : bf16_from_f32(f))
                                        : (uint16_t)(fill == FILL_BITS ? rng() : f16_from_f32(f));
        if (kind == F32)
            memcpy((uint8_t *)p + 4 * i, &f, 4);
        else
            memcpy((uint8_t *)p + 2 * i, &h, 2);
    }
}

static int width(int kind) { return kind == F32 ? 4 : kind == E4M3 ? 1 : 2; }

static void *input(testcase *t, int64_t n, int kind) {
    operand *o = &t->in[t->n_in++];
    o->bytes = (size_t)n * (size_t)width(kind);
    o->p = take(t, o->bytes);
    fill_operand(o->p, (size_t)n, kind, t->fill);
    return o->p;
}

/* An output starts as random finite numbers: some members read it, and what must not be written must stay. */
static void *output(testcase *t, int64_t n, int kind) {
    operand *o = &t->out[t->n_out];
    o->bytes = (size_t)n * (size_t)width(kind);
    o->p = take(t, o->bytes);
    fill_operand(o->p, (size_t)n, kind, kind == F32 ? t->fill : FILL_NORMAL);
    t->before[t->n_out] = malloc(o->bytes + 1);
    t->want[t->n_out] = malloc(o->bytes + 1);
    memcpy(t->before[t->n_out++], o->p, o->bytes);
    return o->p;
}

/* ---- the members: shape(t, step) makes operands, call(k, t) runs ---- */

typedef struct member {
    const char *name;
    void (*shape)(testcase *t, int step);
    void (*call)(const kern *k, testcase *t);
    int out_kind;
    int steps;
} member;

#define IN(i, type) ((type *)(void *)t->in[i].p)
#define OUT(i, type) ((type *)(void *)t->out[i].p)

/* a = M, b = N, c = K, d = ldx, e = ldy */
static void gemm_shape(testcase *t, int step, int kind) {
    if (step < 70)
        t->a = 1 + step % 9, t->b = between(1, 40), t->c = step + 1;
    else if (step < 110)
        t->a = below(3) ? between(1, 9) : between(10, 27), t->b = step - 69, t->c = between(1, 300);
    else
        t->a = between(1, 10), t->b = below(4) ? between(1, 20) : between(40, 130), t->c = between(1000, 2200);
    t->d = t->c + below(2) * between(0, 5);
    t->e = t->b + below(2) * between(0, 5);
    input(t, (t->a - 1) * t->d + t->c, F32);
    input(t, t->b * t->c, kind);
    output(t, (t->a - 1) * t->e + t->b, F32);
}
static void gemm_bf16_shape(testcase *t, int step) { gemm_shape(t, step, BF16); }
static void gemm_f16_shape(testcase *t, int step) { gemm_shape(t, step, F16); }
static void gemm_f32_shape(testcase *t, int step) { gemm_shape(t, step, F32); }
#define GEMM_CALL(name, type)                                                                           \
    static void name##_call(const kern *k, testcase *t) {                                               \
        k->name(OUT(0, float), t->e, IN(0, float), t->d, IN(1, type), (int)t->a, (int)t->b, (int)t->c); \
    }
GEMM_CALL(gemm_bf16, uint16_t)
GEMM_CALL(gemm_f16, uint16_t)
GEMM_CALL(gemm_f32, float)

/* a = n; every length up to 100, then longer ones */
static int row_length(int step) { return step < 100 ? step + 1 : between(100, 2100); }

static void upcast_shape(testcase *t, int step) {
    t->a = row_length(step);
    input(t, t->a, BF16);
    output(t, t->a, F32);
}
static void upcast_call(const kern *k, testcase *t) { k->bf16_to_f32(OUT(0, float), IN(0, uint16_t), t->a); }
static void downcast_shape(testcase *t, int step) {
    t->a = row_length(step);
    input(t, t->a, F32);
    if (step % 3 == 0) /* ties of the rounding */
        for (int64_t i = 0; i < t->a; i++) {
            uint32_t u;
            memcpy(&u, t->in[0].p + 4 * i, 4);
            u = (u & 0xffff0000u) | 0x8000u;
            memcpy(t->in[0].p + 4 * i, &u, 4);
        }
    output(t, t->a, BF16);
}
static void downcast_call(const kern *k, testcase *t) { k->f32_to_bf16(OUT(0, uint16_t), IN(0, float), t->a); }

/* flag: in place */
static void row_shape(testcase *t, int step, int inputs) {
    t->a = row_length(step);
    t->flag = below(2);
    t->s1 = step % 5 ? 1e-6f : 0.0f;
    t->s2 = value(step % 4 ? FILL_NORMAL : t->fill);
    output(t, t->a, F32);
    for (int i = 0; i < inputs; i++) input(t, t->a, F32);
}
static void row1_shape(testcase *t, int step) { row_shape(t, step, 1); }
static void row2_shape(testcase *t, int step) { row_shape(t, step, 2); }
static void row3_shape(testcase *t, int step) { row_shape(t, step, 3); }
#define ROW_X (t->flag ? OUT(0, float) : IN(0, float))

static void rmsnorm_call(const kern *k, testcase *t) {
    k->rmsnorm(OUT(0, float), ROW_X, IN(1, float), (int)t->a, t->s1);
}
static void gated_norm_call(const kern *k, testcase *t) {
    k->gated_norm(OUT(0, float), ROW_X, IN(1, float), IN(2, float), (int)t->a, t->s1);
}
static void l2norm_call(const kern *k, testcase *t) { k->l2norm(OUT(0, float), ROW_X, (int)t->a, t->s1, t->s2); }
static void silu_mul_call(const kern *k, testcase *t) {
    if (t->fill & 1)
        k->silu_mul(OUT(0, float), ROW_X, IN(1, float), t->a);
    else
        k->silu_mul(OUT(0, float), IN(1, float), ROW_X, t->a);
}
static void sigmoid_mul_call(const kern *k, testcase *t) { k->sigmoid_mul(OUT(0, float), ROW_X, IN(1, float), t->a); }
static void add_call(const kern *k, testcase *t) { k->add(OUT(0, float), IN(0, float), t->a); }
static void add_scaled_call(const kern *k, testcase *t) { k->add_scaled(OUT(0, float), t->s2, IN(0, float), t->a); }
static void exp_call(const kern *k, testcase *t) { k->exp(OUT(0, float), ROW_X, t->a); }
static void scale_div_call(const kern *k, testcase *t) { k->scale_div(OUT(0, float), ROW_X, t->s2, t->a); }

static void index_shape(testcase *t, int step) {
    t->a = row_length(step) - (step < 100); /* 0 is a length here */
    input(t, t->a, F32);
    if (t->fill == FILL_NEG_ZERO && step % 2) /* nothing but NaN, or but one */
        for (int64_t i = 0; i < t->a; i++) IN(0, float)[i] = step % 3 || i != t->a / 2 ? NAN : -INFINITY;
    output(t, 2, F32);
}
static void index_store(testcase *t, int64_t v) { memcpy(t->out[0].p, &v, 8); }
static void argmax_call(const kern *k, testcase *t) { index_store(t, k->argmax(IN(0, float), t->a)); }
static void nonfinite_call(const kern *k, testcase *t) { index_store(t, k->nonfinite(IN(0, float), t->a)); }
/* c = the flag that the call returned, as an output of its own */
static void block_max_shape(testcase *t, int step) {
    t->a = step < 60 ? between(1, 300) : between(1, 2100);
    input(t, t->a, F32);
    if (step % 4 == 1) /* finite but for the last element */
        for (int64_t i = 0; i < t->a; i++)
            IN(0, float)[i] = i < t->a - 1 || step % 8 == 1 ? uniform() - 0.5f : INFINITY;
    output(t, (t->a + KERN_BLOCK - 1) / KERN_BLOCK, F32);
    output(t, 1, F32);
}
static void block_max_call(const kern *k, testcase *t) {
    *OUT(1, float) = k->block_max(OUT(0, float), IN(0, float), t->a) ? 1.0f : 0.0f;
}

/* a = channels, b = taps */
static void conv_shape(testcase *t, int step) {
    t->a = row_length(step);
    t->b = step % 4 ? 4 : between(1, 7);
    for (int j = 0; j < t->b; j++) input(t, t->a, F32);
    input(t, t->a * t->b, F32);
    output(t, t->a, F32);
}
static void conv_call(const kern *k, testcase *t) {
    const float *u[MAX_IN];
    for (int j = 0; j < t->b; j++) u[j] = IN(j, float);
    k->conv_silu(OUT(0, float), u, IN(t->b, float), (int)t->b, (int)t->a);
}

/* a = dk, b = cols, c = ld, flag = with output, s1 = beta, s2 = decay */
static void gdn_shape(testcase *t, int step) {
    t->a = step % 4 ? between(1, 40) : 128;
    t->b = step < 80 ? step + 1 : between(60, 150);
    t->c = t->b + below(2) * between(0, 9);
    t->flag = step % 5 != 0;
    t->s1 = t->fill == FILL_NORMAL ? uniform() : value(t->fill);
    t->s2 = t->fill == FILL_NORMAL ? uniform() : value(t->fill);
    input(t, t->a, F32);
    input(t, t->a, F32);
    input(t, t->b, F32);
    output(t, t->b, F32);
    output(t, (t->a - 1) * t->c + t->b, F32);
}
static float gdn_work[128 * KERN_GDN_COLS];
static void gdn_call(const kern *k, testcase *t) {
    const gdn_token one = { .q = IN(0, float),
                            .k = IN(1, float),
                            .v = IN(2, float),
                            .o = t->flag ? OUT(0, float) : NULL,
                            .beta = t->s1,
                            .decay = t->s2 };
    k->gdn_steps(OUT(1, float), t->c, &one, 1, 1, gdn_work, (int)t->a, (int)t->b);
}

/* a, b, c as above, d = tokens, e = kept, f = the first with output; inputs: q, k, v, gates of all tokens */
static void gdn_steps_shape(testcase *t, int step) {
    t->a = step % 4 ? between(1, 40) : 128;
    t->b = step < 80 ? step + 1 : between(60, 150);
    t->c = t->b + below(2) * between(0, 9);
    t->d = between(1, 7);
    t->e = step % 3 ? below((int)t->d + 1) : t->d;
    t->f = below((int)t->d + 1);
    input(t, t->d * t->a, F32);
    input(t, t->d * t->a, F32);
    input(t, t->d * t->b, F32);
    input(t, t->d * 2, F32);
    for (int64_t i = 0; t->fill == FILL_NORMAL && i < t->d * 2; i++) IN(3, float)[i] = uniform();
    output(t, t->d * t->b, F32);
    output(t, (t->a - 1) * t->c + t->b, F32);
}
static void gdn_steps_call(const kern *k, testcase *t) {
    gdn_token tokens[7];
    for (int64_t i = 0; i < t->d; i++)
        tokens[i] = (gdn_token){ .q = IN(0, float) + i * t->a,
                                 .k = IN(1, float) + i * t->a,
                                 .v = IN(2, float) + i * t->b,
                                 .o = i < t->f ? NULL : OUT(0, float) + i * t->b,
                                 .beta = IN(3, float)[2 * i],
                                 .decay = IN(3, float)[2 * i + 1] };
    k->gdn_steps(OUT(1, float), t->c, tokens, (int)t->d, (int)t->e, gdn_work, (int)t->a, (int)t->b);
}

/* a = n, b = G, c = D, d = ld, s1 = scale; inputs q k v */
static void attn_shape(testcase *t, int step, int kind) {
    t->a = step < 64 ? step + 1 : between(1, 64);
    t->b = step % 3 ? between(1, 4) : between(1, 17);
    t->c = step % 4 == 0 ? 256 : step % 4 == 1 ? between(1, 70) : 32 * between(1, 4);
    t->d = t->c * between(1, 2) + below(3);
    t->s1 = 1.0f / sqrtf((float)t->c);
    input(t, t->b * t->c, F32);
    input(t, (t->a - 1) * t->d + t->c, kind);
    input(t, (t->a - 1) * t->d + t->c, kind);
    output(t, t->b * t->c, F32);
    output(t, t->b, F32);
    output(t, t->b, F32);
}
static void attn_f32_shape(testcase *t, int step) { attn_shape(t, step, F32); }
static void attn_bf16_shape(testcase *t, int step) { attn_shape(t, step, BF16); }
#define ATTN_CALL(name, type)                                                                                         \
    static void name##_call(const kern *k, testcase *t) {                                                             \
        k->name(OUT(0, float), OUT(1, float), OUT(2, float), IN(0, float), IN(1, type), IN(2, type), t->d, (int)t->a, \
                (int)t->b, (int)t->c, t->s1);                                                                         \
    }
ATTN_CALL(attn_tile_f32, float)
ATTN_CALL(attn_tile_bf16, uint16_t)

static void attn_fp8_shape(testcase *t, int step) {
    attn_shape(t, step, E4M3);
    if (step % 7 == 1) IN(0, float)[below((int)(t->b * t->c))] = 0x1p125f; /* times 256 is too much */
    if (step % 7 == 2) t->in[1 + below(2)].p[below((int)t->in[1].bytes)] |= 0x7f;
}
static void attn_tile_fp8_call(const kern *k, testcase *t) {
    static float work[KERN_ATTN_WORK(17, 256)];
    k->attn_tile_fp8(OUT(0, float), OUT(1, float), OUT(2, float), IN(0, float), IN(1, uint8_t), IN(2, uint8_t), t->d,
                     (int)t->a, (int)t->b, (int)t->c, t->s1, work);
}

static void merge_shape(testcase *t, int step) {
    t->a = row_length(step);
    t->s1 = value(t->fill);
    t->s2 = fabsf(value(t->fill));
    input(t, t->a, F32);
    output(t, t->a, F32);
    output(t, 1, F32);
    output(t, 1, F32);
    if (step % 3 == 0) { /* the start of a running triple */
        const float start = -INFINITY;
        memset(t->before[0], 0, t->out[0].bytes);
        memcpy(t->before[1], &start, 4);
        memset(t->before[2], 0, 4);
    }
}
static void merge_call(const kern *k, testcase *t) {
    k->attn_merge(OUT(0, float), OUT(1, float), OUT(2, float), IN(0, float), t->s1, t->s2, (int)t->a);
}

static const member members[] = {
    { "gemm_bf16", gemm_bf16_shape, gemm_bf16_call, F32, 130 },
    { "gemm_f16", gemm_f16_shape, gemm_f16_call, F32, 130 },
    { "gemm_f32", gemm_f32_shape, gemm_f32_call, F32, 130 },
    { "bf16_to_f32", upcast_shape, upcast_call, F32, 110 },
    { "f32_to_bf16", downcast_shape, downcast_call, BF16, 110 },
    { "rmsnorm", row2_shape, rmsnorm_call, F32, 110 },
    { "gated_norm", row3_shape, gated_norm_call, F32, 110 },
    { "l2norm", row1_shape, l2norm_call, F32, 110 },
    { "silu_mul", row2_shape, silu_mul_call, F32, 110 },
    { "sigmoid_mul", row2_shape, sigmoid_mul_call, F32, 110 },
    { "add", row1_shape, add_call, F32, 110 },
    { "add_scaled", row1_shape, add_scaled_call, F32, 110 },
    { "exp", row1_shape, exp_call, F32, 110 },
    { "argmax", index_shape, argmax_call, -1, 110 },
    { "nonfinite", index_shape, nonfinite_call, -1, 110 },
    { "block_max", block_max_shape, block_max_call, F32, 110 },
    { "conv_silu", conv_shape, conv_call, F32, 110 },
    { "gdn_steps of one", gdn_shape, gdn_call, F32, 90 },
    { "gdn_steps", gdn_steps_shape, gdn_steps_call, F32, 90 },
    { "attn_tile_f32", attn_f32_shape, attn_tile_f32_call, F32, 70 },
    { "attn_tile_bf16", attn_bf16_shape, attn_tile_bf16_call, F32, 70 },
    { "attn_tile_fp8", attn_fp8_shape, attn_tile_fp8_call, F32, 140 },
    { "attn_merge", merge_shape, merge_call, F32, 110 },
    { "scale_div", row1_shape, scale_div_call, F32, 110 },
};

/* ---- comparing ---- */

static void case_make(testcase *t, const member *m, int step, int fill) {
    memset(t, 0, sizeof *t);
    t->fill = fill;
    m->shape(t, step);
    snprintf(t->text, sizeof t->text,
             "step %d fill %d shape %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " flag %d", step, fill,
             t->a, t->b, t->c, t->d, t->e, t->flag);
}
static void case_free(testcase *t) {
    for (int i = 0; i < t->n_out; i++) free(t->before[i]), free(t->want[i]);
}
static void case_run(testcase *t, const member *m, const kern *k) {
    for (int i = 0; i < t->n_out; i++) memcpy(t->out[i].p, t->before[i], t->out[i].bytes);
    m->call(k, t);
}
static bool is_nan(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

/* Bytes equal, or both float32 NaN. Returns the first differing element or -1. */
static int64_t first_difference(const uint8_t *a, const uint8_t *b, size_t bytes, int kind) {
    if (memcmp(a, b, bytes) == 0) return -1;
    const size_t w = kind == BF16 ? 2 : 4;
    for (size_t i = 0; i < bytes / w; i++) {
        uint32_t x = 0, y = 0;
        memcpy(&x, a + w * i, w);
        memcpy(&y, b + w * i, w);
        if (x != y && !(kind == F32 && is_nan(x) && is_nan(y))) return (int64_t)i;
    }
    return -1;
}

/* Message and false when the results in place differ from the reference's. */
static bool case_equal(const testcase *t, const member *m, const char *who) {
    for (int i = 0; i < t->n_out; i++) {
        const int64_t at = first_difference(t->want[i], t->out[i].p, t->out[i].bytes, m->out_kind);
        if (at < 0) continue;
        uint32_t want = 0, got = 0;
        const size_t w = m->out_kind == BF16 ? 2 : 4;
        memcpy(&want, t->want[i] + w * (size_t)at, w);
        memcpy(&got, t->out[i].p + w * (size_t)at, w);
        printf("%s %s: output %d element %" PRId64 ": want %08x got %08x (%s)\n", m->name, who, i, at, want, got,
               t->text);
        return false;
    }
    return true;
}

typedef struct level {
    char name[16];
    kern k;
} level;
static level levels[8];
static int n_levels;
static kern plain;
static int failed;

static void levels_init(void) {
    kern_init_ref_plain(&plain);
    kern_init(&levels[0].k, ISA_REF);
    snprintf(levels[0].name, sizeof levels[0].name, "%s", levels[0].k.add == plain.add ? "ref" : "ref_fma");
    n_levels = 1;
    for (int isa = ISA_REF + 1; isa < ISA_COUNT; isa++) {
        kern k;
        kern_init(&k, (kern_isa)isa);
        if ((int)k.isa != isa) continue;
        levels[n_levels].k = k;
        snprintf(levels[n_levels++].name, sizeof levels[0].name, "%s", kern_isa_name((kern_isa)isa));
    }
}

static void report(bool ok, const char *name, const char *what) {
    printf("%s %s %s\n", ok ? "[       OK ]" : "[  FAILED  ]", name, what);
    fflush(stdout);
    failed += !ok;
}

static void check_member(const member *m, int rounds, bool fault) {
    bool ok[8];
    for (int l = 0; l < n_levels; l++) ok[l] = true;
    const int faulty = below(m->steps * rounds);
    int done = 0;
    for (int round = 0; round < rounds; round++)
        for (int step = 0; step < m->steps; step++, done++) {
            testcase t;
            case_make(&t, m, step, step % 2 ? FILL_NORMAL : below(FILL_COUNT));
            case_run(&t, m, &plain);
            for (int i = 0; i < t.n_out; i++) memcpy(t.want[i], t.out[i].p, t.out[i].bytes);
            for (int l = 0; l < n_levels; l++) {
                case_run(&t, m, &levels[l].k);
                if (fault && done == faulty) {
                    /* The lowest bit of the last element, unless that is a NaN. */
                    t.out[0].p[t.out[0].bytes - 4] ^= 1;
                    if (m->out_kind == F32 && is_nan(*(uint32_t *)(void *)(t.out[0].p + t.out[0].bytes - 4)))
                        memset(t.out[0].p + t.out[0].bytes - 4, 1, 4);
                }
                if (ok[l]) ok[l] = case_equal(&t, m, levels[l].name);
            }
            case_free(&t);
        }
    for (int l = 0; l < n_levels; l++) report(ok[l], m->name, levels[l].name);
}

/* The comparison itself: each single bit of a float and of a BF16 must be seen, NaN payloads must not. */
static void check_comparison(void) {
    bool ok = true;
    float a[2] = { 1.5f, -0.0f }, b[2];
    for (int bit = 0; bit < 64; bit++) {
        memcpy(b, a, 8);
        ((uint8_t *)b)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        ok &= first_difference((uint8_t *)a, (uint8_t *)b, 8, F32) == bit / 32;
        ok &= first_difference((uint8_t *)a, (uint8_t *)b, 8, BF16) == bit / 16;
    }
    a[0] = bits(0x7fc00001), a[1] = b[1] = 1, b[0] = bits(0xffc00002);
    ok &= first_difference((uint8_t *)a, (uint8_t *)b, 8, F32) == -1;
    b[0] = bits(0x7f800000);
    ok &= first_difference((uint8_t *)a, (uint8_t *)b, 8, F32) == 0;
    report(ok, "comparison", "sees every single bit");
}

/* ---- frozen bits ---- */

static uint64_t hash_outputs(const testcase *t, int kind, uint64_t h) {
    for (int i = 0; i < t->n_out; i++)
        for (size_t at = 0; at < t->out[i].bytes; at += 2) {
            uint32_t u = 0;
            memcpy(&u, t->out[i].p + at, 2);
            if (kind == F32) {
                uint32_t whole;
                memcpy(&whole, t->out[i].p + at / 4 * 4, 4);
                if (is_nan(whole)) u = 0x7fc0;
            }
            h = (h ^ (u & 0xff)) * 1099511628211u;
            h = (h ^ u >> 8) * 1099511628211u;
        }
    return h;
}

/* Golden: made by --freeze. A change of any bit is a change of the contract. */
static const uint64_t frozen[ARRAY_LEN(members)] = {
    0x433f391561068592, /* gemm_bf16 */
    0x5d6cfa913ebdca61, /* gemm_f16 */
    0x998fe438ada80fbd, /* gemm_f32 */
    0xc73f7ccc121ea222, /* bf16_to_f32 */
    0x4140919a94c180ac, /* f32_to_bf16 */
    0x1a6d30428562f55b, /* rmsnorm */
    0xdee56ee1a8cb023a, /* gated_norm */
    0xecdaf4198b2904be, /* l2norm */
    0x071ae7706887850c, /* silu_mul */
    0x7c2c2e49781c197e, /* sigmoid_mul */
    0x329156ac204b4acf, /* add */
    0x948a920603868b70, /* add_scaled */
    0x59ac262df4bcbfe2, /* exp */
    0x6dd9fcfe5d38a0ae, /* argmax */
    0xb282300d60420002, /* nonfinite */
    0x5f417a324e104404, /* block_max */
    0x9683de9e8c8559b2, /* conv_silu */
    0xd52439c4e74b6744, /* gdn_steps of one */
    0xee88e4e1c61f2474, /* gdn_steps */
    0xa671dc32cdd0f435, /* attn_tile_f32 */
    0x0e8a473dc5daaed7, /* attn_tile_bf16 */
    0x25cc603a706b7891, /* attn_tile_fp8 */
    0x1c37320d70ee6e0c, /* attn_merge */
    0x4921c884f8d7e035, /* scale_div */
};

static void check_frozen(bool print) {
    const kern *k = &levels[n_levels - 1].k;
    for (size_t i = 0; i < ARRAY_LEN(members); i++) {
        const member *m = &members[i];
        uint64_t h = 1469598103934665603u;
        rng_state = 12345;
        for (int step = 0; step < m->steps; step += 3) {
            testcase t;
            case_make(&t, m, step, step % FILL_COUNT);
            case_run(&t, m, k);
            h = hash_outputs(&t, m->out_kind, h);
            case_free(&t);
        }
        if (print)
            printf("    0x%016" PRIx64 ", /* %s */\n", h, m->name);
        else {
            if (h != frozen[i]) printf("%s: hash %016" PRIx64 " instead of %016" PRIx64 "\n", m->name, h, frozen[i]);
            report(h == frozen[i], m->name, "frozen bits");
        }
    }
}

/* ---- the elementary functions over all of float32, by a stride (--all: exp of every one) ---- */

static void check_sweep(uint32_t step) {
    enum { BLOCK = 4096 };
    static float x[BLOCK], one[BLOCK], want[3][BLOCK], got[3][BLOCK];
    for (int i = 0; i < BLOCK; i++) one[i] = 1.0f;
    for (int l = step == 1 && n_levels > 1; l < n_levels; l++) {
        const kern *a = step == 1 ? &levels[0].k : &plain, *b = &levels[l].k;
        bool ok = true;
        for (uint64_t u = 0; u < 1ull << 32;) {
            int n = 0;
            for (; n < BLOCK && u < 1ull << 32; u += step) x[n++] = bits((uint32_t)u);
            a->exp(want[0], x, n);
            b->exp(got[0], x, n);
            if (step > 1) {
                a->silu_mul(want[1], x, one, n);
                a->sigmoid_mul(want[2], one, x, n);
                b->silu_mul(got[1], x, one, n);
                b->sigmoid_mul(got[2], one, x, n);
            }
            for (int f = 0; f < (step > 1 ? 3 : 1); f++) {
                const int64_t at =
                    first_difference((uint8_t *)want[f], (uint8_t *)got[f], sizeof(float) * (size_t)n, F32);
                if (at >= 0 && ok) printf("function %d at %a\n", f, (double)x[at]);
                ok &= at < 0;
            }
        }
        report(ok, "exp silu sigmoid", levels[l].name);
    }
}

/* ---- names and dispatch ---- */

static void check_dispatch(void) {
    bool ok = true;
    kern k;
    for (int i = 0; i < ISA_COUNT; i++) {
        kern_isa back = ISA_COUNT;
        ok &= kern_isa_parse(&back, kern_isa_name((kern_isa)i)) && (int)back == i;
        kern_init(&k, (kern_isa)i);
        ok &= kern_isa_supported(k.isa) && (k.isa == ISA_REF || (int)k.isa <= i);
        void *const *slot = (void *const *)&k.gemm_bf16;
        for (; slot < (void *const *)(&k + 1); slot++) ok &= *slot != NULL;
    }
    kern_isa none;
    ok &= !kern_isa_parse(&none, "sse9") && kern_isa_supported(ISA_REF);
    kern_init(&k, ISA_COUNT);
    ok &= k.isa == levels[n_levels - 1].k.isa && kern_cpu_name()[0] != 0;
#ifdef __x86_64__
    kern_init(&k, ISA_NEON);
    ok &= k.isa == ISA_REF && !kern_isa_supported(ISA_NEON);
#else
    kern_init(&k, ISA_AVX512);
    ok &= k.isa == ISA_REF && !kern_isa_supported(ISA_AVX2);
#endif
    report(ok, "dispatch", "caps and names");
}

/* ---- timing: the same member in the same place, ns per call ---- */

static void bench_member(const member *m) {
    testcase t;
    case_make(&t, m, m->steps - 2, FILL_NORMAL);
    printf("%-16s", m->name);
    for (int l = 0; l < n_levels; l++) {
        int64_t calls = 0;
        const double start = clock_seconds();
        double spent = 0;
        for (; spent < 0.02; calls += 10, spent = clock_seconds() - start)
            for (int i = 0; i < 10; i++) m->call(&levels[l].k, &t);
        printf("  %s %.0f ns", levels[l].name, 1e9 * spent / (double)calls);
    }
    printf("  (%s)\n", t.text);
    case_free(&t);
}

int main(int argc, char **argv) {
    const char *env = getenv("SEED");
    uint64_t seed = env ? strtoull(env, NULL, 0) : 20261202;
    const char *only = NULL;
    bool bench = false, fault = false, freeze = false, all = false;
    int rounds = 2;
    for (int i = 1; i < argc; i++) {
        const char *next = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(next, NULL, 0), i++;
        else if (strcmp(argv[i], "--only") == 0)
            only = next, i++;
        else if (strcmp(argv[i], "--rounds") == 0)
            rounds = atoi(next), i++;
        else if (strcmp(argv[i], "--bench") == 0)
            bench = true;
        else if (strcmp(argv[i], "--fault") == 0)
            fault = true;
        else if (strcmp(argv[i], "--all") == 0)
            all = true;
        else if (strcmp(argv[i], "--freeze") == 0)
            freeze = true;
        else
            return fprintf(stderr, "usage: kerncheck [--seed N] [--only MEMBER] [--rounds N] [--bench] [--fault] "
                                   "[--all] [--freeze]\n"),
                   2;
    }
    guard_init();
    levels_init();
    if (freeze) return check_frozen(true), 0;
    printf("kerncheck --seed %" PRIu64 " on %s\n", seed, kern_cpu_name());
    rng_state = seed;
    for (size_t i = 0; i < ARRAY_LEN(members); i++) {
        if (only && strcmp(only, members[i].name) != 0) continue;
        if (bench)
            bench_member(&members[i]);
        else
            check_member(&members[i], rounds < 1 ? 1 : rounds, fault);
        fflush(stdout);
    }
    if (!bench && !only) {
        check_comparison();
        check_sweep(all ? 1 : 8191);
        check_dispatch();
        check_frozen(false);
    }
    return failed != 0;
}
