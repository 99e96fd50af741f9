/* Reference gated delta net: the causal convolution and the recurrence, one channel or column at a time. */
#include <math.h>

#include "kern/kern_isa.h"
#include "num/mathf_inline.h"

static void conv_silu(float *c, const float *const *u, const float *w, int taps, int n) {
    for (int64_t ch = 0; ch < n; ch++) {
        float acc = 0;
        for (int j = 0; j < taps; j++) acc = fmaf(w[ch * taps + j], u[j][ch], acc);
        c[ch] = num_silu_inline(acc);
    }
}

static void gdn_step(float *o, float *S, int64_t ld, const float *q, const float *k, const float *v, float beta,
                     float decay, int dk, int cols) {
    for (int64_t c = 0; c < cols; c++) {
        float m = 0, out = 0;
        for (int64_t i = 0; i < dk; i++) m = fmaf(S[i * ld + c] * decay, k[i], m);
        const float d = beta * (v[c] - m);
        for (int64_t i = 0; i < dk; i++) {
            S[i * ld + c] = fmaf(k[i], d, S[i * ld + c] * decay);
            if (o) out = fmaf(S[i * ld + c], q[i], out);
        }
        if (o) o[c] = out;
    }
}

void KERN_REF(gdn_init)(kern *k) {
    k->conv_silu = conv_silu;
    k->gdn_step = gdn_step;
}
