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

/* One token through one column, whose dk elements stand next to each other. */
static void step(float *s, const gdn_token *t, int64_t c, int dk) {
    float m = 0, out = 0;
    for (int i = 0; i < dk; i++) m = fmaf(s[i] * t->decay, t->k[i], m);
    const float d = t->beta * (t->v[c] - m);
    for (int i = 0; i < dk; i++) {
        s[i] = fmaf(t->k[i], d, s[i] * t->decay);
        if (t->o) out = fmaf(s[i], t->q[i], out);
    }
    if (t->o) t->o[c] = out;
}

static void gdn_steps(float *S, int64_t ld, const gdn_token *t, int n, int keep, float *work, int dk, int cols) {
    for (int64_t c = 0; c < cols; c++) {
        for (int64_t i = 0; i < dk; i++) work[i] = S[i * ld + c];
        for (int j = 0; j < n; j++) {
            step(work, &t[j], c, dk);
            for (int64_t i = 0; j == keep - 1 && i < dk; i++) S[i * ld + c] = work[i];
        }
    }
}

void KERN_REF(gdn_init)(kern *k) {
    k->conv_silu = conv_silu;
    k->gdn_steps = gdn_steps;
}
