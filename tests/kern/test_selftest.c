/* The self-test at start accepts every level of this CPU, and names a kernel that lies. */
#include "kern/selftest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static kern k;
static quant_kern q;
static nv_kern nv;

static void tables(kern_isa isa) {
    kern_init(&k, isa);
    quant_kern_init(&q, isa);
    nv_kern_init(&nv, isa);
}

static void every_level(void **state) {
    (void)state;
    for (kern_isa isa = ISA_REF; isa < ISA_COUNT; isa++) {
        err e = { 0 };
        tables(isa);
        if (!kern_selftest(&k, &q, &nv, &e)) fail_msg("%s: %s", kern_isa_name(isa), e.msg);
    }
}

static nv_kern honest;
static void one_bit_off(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a,
                        int M) {
    honest.dot(y, ldy, panels, stride, n, Kp, a, M);
    uint32_t u;
    memcpy(&u, y + (M - 1) * ldy + 3, 4);
    u ^= 1;
    memcpy(y + (M - 1) * ldy + 3, &u, 4);
}
static void wrong_norm(float *y, const float *x, const float *w, int n, float eps) {
    k.l2norm(y, x, n, eps, 1);
    (void)w;
}

static void liars(void **state) {
    (void)state;
    err e = { 0 };
    tables(ISA_COUNT);
    honest = nv;
    nv.dot = one_bit_off;
    assert_false(kern_selftest(&k, &q, &nv, &e));
    assert_string_equal(e.id, "E-MACHINE-KERNEL");
    assert_non_null(strstr(e.msg, "nvfp4 dot"));
    nv = honest;
    const kern real = k;
    k.rmsnorm = wrong_norm;
    e = (err){ 0 };
    assert_false(kern_selftest(&k, &q, &nv, &e));
    assert_non_null(strstr(e.msg, "rmsnorm"));
    k = real;
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_level), cmocka_unit_test(liars) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
