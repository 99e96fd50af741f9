/* The reference level over the packed layout. */
#include <math.h>
#include <string.h>

#include "kern/nv.h"
#include "num/fp8.h"
#include "num/nvfp4.h"

enum { BLOCK = NVFP4_BLOCK };

#ifndef KERN_REF_FMA

static const int8_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

static void pack(uint8_t *panel, const uint8_t *codes, const uint8_t *scales, int rows, int K) {
    memset(panel, 0, (size_t)nv_panel_bytes(K));
    for (int r = 0; r < rows; r++) {
        const uint8_t *c = codes + (int64_t)r * (K / 2), *s = scales + (int64_t)r * (K / BLOCK);
        for (int b = 0; b < K / BLOCK; b++) {
            uint8_t *group = panel + (int64_t)(b / 4) * NV_GROUP_BYTES;
            group[b % 4 * NV_ROWS + r] = s[b];
            for (int o = 0; o < 2; o++) memcpy(group + 64 + ((b % 4 * 2 + o) * NV_ROWS + r) * 4, c + b * 8 + o * 4, 4);
        }
    }
}

static void act_fp4(nv_act *a, const uint8_t *codes, const uint8_t *scales, int K) {
    nv_act_clear_tail(a, K);
    a->bad = false;
    for (int b = 0; b < K / BLOCK; b++) {
        int sum = 0;
        for (int i = 0; i < BLOCK / 2; i++) {
            const uint8_t c = codes[b * BLOCK / 2 + i];
            int8_t *octet = a->codes + b * BLOCK + i / 4 * 8;
            octet[i % 4] = twice[c & 15];
            octet[i % 4 + 4] = twice[c >> 4];
            sum += twice[c & 15] + twice[c >> 4];
        }
        a->bad |= (scales[b] & 0x7f) == 0x7f; /* a NaN in the block: it must not look like a zero */
        a->scale[b] = e4m3_times_512(scales[b]);
        a->bias[b] = -12 * sum;
    }
}

static void act_int8(nv_act *a, const float *x, int K) {
    float amax = 0;
    bool bad = false;
    for (int i = 0; i < K; i++) {
        bad |= isnan(x[i]);
        if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
    }
    const float t = amax / 121920.0f;
    a->factor = t;
    a->bad = bad;
    nv_act_clear_tail(a, K);
    for (int b = 0; b < K / BLOCK; b++) {
        float m = 0;
        for (int i = 0; i < BLOCK; i++) m = fabsf(x[b * BLOCK + i]) > m ? fabsf(x[b * BLOCK + i]) : m;
        a->scale[b] = t > 0 ? nv_round_up_4_bits(m / (127.0f * t)) : 1;
        const float den = t * (float)a->scale[b];
        int sum = 0;
        for (int i = 0; i < BLOCK; i++) {
            float q = t > 0 ? rintf(x[b * BLOCK + i] / den) : 0;
            if (!(q <= 127)) q = 127;
            if (q < -127) q = -127;
            a->codes[b * BLOCK + i / 8 * 8 + i % 8 / 2 + i % 2 * 4] = (int8_t)q;
            sum += (int)q;
        }
        a->bias[b] = -12 * sum;
    }
}

static void dot(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a, int M) {
    for (int p = 0; p < n; p++)
        for (int m = 0; m < M; m++)
            for (int r = 0; r < NV_ROWS; r++) {
                int64_t sum = 0;
                for (int b = 0; b < Kp / BLOCK; b++) {
                    const uint8_t *group = panels + p * stride + (int64_t)(b / 4) * NV_GROUP_BYTES;
                    const int8_t *x = a[m].codes + b * BLOCK;
                    int32_t isum = 0;
                    for (int i = 0; i < BLOCK / 2; i++) {
                        const uint8_t c = group[64 + ((b % 4 * 2 + i / 4) * NV_ROWS + r) * 4 + i % 4];
                        isum += twice[c & 15] * x[i / 4 * 8 + i % 4] + twice[c >> 4] * x[i / 4 * 8 + i % 4 + 4];
                    }
                    sum += (int64_t)isum * a[m].scale[b] * e4m3_times_512(group[b % 4 * NV_ROWS + r]);
                }
                y[m * ldy + p * NV_ROWS + r] = (float)sum;
            }
}

static void dot_float(float *y, int64_t ldy, const uint8_t *panels, int64_t stride, int n, int Kp, const nv_act *a,
                      int M) {
    for (int p = 0; p < n; p++)
        for (int m = 0; m < M; m++)
            for (int r = 0; r < NV_ROWS; r++) {
                float acc = 0;
                for (int b = 0; b < Kp / BLOCK; b++) {
                    const uint8_t *group = panels + p * stride + (int64_t)(b / 4) * NV_GROUP_BYTES;
                    float s = 0;
                    for (int i = 0; i < BLOCK; i++) {
                        const uint8_t c = group[64 + ((b % 4 * 2 + i / 8) * NV_ROWS + r) * 4 + i % 8 / 2];
                        s = fmaf(0.5f * (float)twice[i % 2 ? c >> 4 : c & 15], a[m].x[b * BLOCK + i], s);
                    }
                    acc = fmaf(s, e4m3_to_f32(group[b % 4 * NV_ROWS + r]), acc);
                }
                y[m * ldy + p * NV_ROWS + r] = acc;
            }
}

void nv_init_ref(nv_kern *k) {
    *k = (nv_kern){
        .isa = ISA_REF, .pack = pack, .act_fp4 = act_fp4, .act_int8 = act_int8, .dot = dot, .dot_float = dot_float
    };
}

#endif
