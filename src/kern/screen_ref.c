/* The reference level of screen.h. */
#include "kern/screen.h"

#ifndef KERN_REF_FMA /* nothing here multiplies and adds: a second build with FMA would be the same code */

#include <math.h>
#include <string.h>

static float largest(const float *w, int K, bool *finite) {
    float top = 0;
    *finite = true;
    for (int i = 0; i < K; i++) {
        if (!isfinite(w[i])) *finite = false;
        if (fabsf(w[i]) > top) top = fabsf(w[i]);
    }
    return top;
}

static double fold16(double *l) {
    for (int half = 8; half >= 1; half /= 2)
        for (int j = 0; j < half; j++) l[j] = l[j] + l[j + half];
    return l[0];
}

static void pack(int8_t *codes, screen_row *row, const float *w, int K) {
    *row = (screen_row){ .finite = true };
    memset(codes, 0, (size_t)screen_stride(K));
    const float top = largest(w, K, &row->finite);
    if (!row->finite) return;
    const bool small = top < 0x1p-100f; /* 127 / top stays finite, top / 127 normal */
    const float inverse = small ? 0 : 127 / top;
    double norm2[16] = { 0 }, err2[16] = { 0 };
    row->scale = small ? 0 : top / 127;
    for (int i = 0; i < K; i++) {
        const float q = rintf(w[i] * inverse);
        const int c = q > 127 ? 127 : q < -127 ? -127 : (int)q;
        const double d = (double)w[i] - (double)row->scale * c;
        codes[i] = (int8_t)c;
        row->sum += c;
        row->code2 += c * c;
        norm2[i % 16] = norm2[i % 16] + (double)w[i] * w[i];
        err2[i % 16] = err2[i % 16] + d * d;
    }
    row->norm2 = fold16(norm2);
    row->err2 = fold16(err2);
}

static void dots(int64_t *y, int64_t ldy, const int8_t *codes, const int32_t *sums, const screen_act *x, int M, int N,
                 int64_t stride) {
    (void)sums;
    for (int n = 0; n < N; n++, codes += stride)
        for (int m = 0; m < M; m++) {
            int64_t sum = 0;
            for (int64_t i = 0; i < stride; i++) sum += (int32_t)codes[i] * x[m].q[i];
            y[m * ldy + n] = sum;
        }
}

void screen_init_ref(screen_kern *k) { *k = (screen_kern){ .isa = ISA_REF, .pack = pack, .dots = dots }; }

#endif
