/* support.h - what several test programs share: opening the tiny model and comparing arrays. */
#ifndef NIBBLE_TEST_SUPPORT_H
#define NIBBLE_TEST_SUPPORT_H

/* Before cmocka.h, whose macro fail() would hide ours. */
#include "base/log.h"
#include "engine/engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TINY "assets/qwen36-tiny"
#define ORACLE "tests/oracle/qwen36-tiny/"

/* Fail the test with the error's own words. */
#define OK(call)                                                       \
    do {                                                               \
        if (!(call)) fail_msg("%s: %s", e.id ? e.id : "no id", e.msg); \
    } while (0)

/* Under qemu-user (scripts/test.sh arm) a program runs a hundred times slower: then a loop over many cases may take fewer. */
static inline bool is_emulated(void) {
    const char *runner = getenv("RUNNER");
    return runner && strstr(runner, "qemu");
}

/* Few combinations, but every kind once: NIBBLE_TEST_SHORT=1 asks for it. NIBBLE_TEST_LONG=1 asks for whole products. */
static inline bool is_short(void) {
    const char *v = getenv("NIBBLE_TEST_SHORT");
    return is_emulated() || (v && *v && strcmp(v, "0") != 0);
}
static inline bool is_long(void) {
    const char *v = getenv("NIBBLE_TEST_LONG");
    return v && *v && strcmp(v, "0") != 0;
}

/* The tests of whole engines run on the device that NIBBLE_TEST_DEVICE names (the CPU without it), unless they name one. */
static inline engine *open_tiny(engine_options opt) {
    if (!opt.ops.device) opt.ops.device = getenv("NIBBLE_TEST_DEVICE");
    err e = { 0 };
    engine *g;
    log_set_level(0);
    OK(engine_open(&g, TINY, &opt, &e));
    return g;
}

/* Tensor "<i>.<what>" of an oracle file; NULL when it is not there. */
static inline const st_tensor *oracle_tensor(const st_file *f, int i, const char *what) {
    char name[64];
    snprintf(name, sizeof name, "%d.%s", i, what);
    return st_find(f, str_of(name));
}

/* float32 copy of an F32 tensor (its bytes may be unaligned). */
static inline float *oracle_floats(const st_tensor *t) {
    assert_non_null(t);
    assert_int_equal(t->type, DT_F32);
    float *v = malloc(t->bytes);
    memcpy(v, t->data, t->bytes);
    return v;
}

static inline int32_t *oracle_ids(const st_tensor *t) {
    assert_non_null(t);
    assert_int_equal(t->type, DT_I32);
    int32_t *v = malloc(t->bytes);
    memcpy(v, t->data, t->bytes);
    return v;
}

static inline double max_abs_diff(const float *a, const float *b, int64_t n) {
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - b[i]);
        if (!(d <= worst)) worst = d; /* a NaN sticks */
    }
    return worst;
}

/* sqrt(sum (a - b)^2 / sum b^2) */
static inline double relative_rms(const float *a, const float *b, int64_t n) {
    double num = 0, den = 0;
    for (int64_t i = 0; i < n; i++) {
        num += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        den += (double)b[i] * b[i];
    }
    return sqrt(num / den);
}

/* KL(softmax(want) || softmax(got)) averaged over rows, in double. */
static inline double mean_kl(const float *got, const float *want, int64_t rows, int n) {
    double total = 0;
    for (int64_t r = 0; r < rows; r++, got += n, want += n) {
        double zg = 0, zw = 0, mg = got[0], mw = want[0], kl = 0;
        for (int i = 1; i < n; i++) {
            if (got[i] > mg) mg = got[i];
            if (want[i] > mw) mw = want[i];
        }
        for (int i = 0; i < n; i++) zg += exp(got[i] - mg), zw += exp(want[i] - mw);
        for (int i = 0; i < n; i++) {
            const double lw = want[i] - mw - log(zw), lg = got[i] - mg - log(zg);
            kl += exp(lw) * (lw - lg);
        }
        total += kl;
    }
    return total / (double)rows;
}

#endif
