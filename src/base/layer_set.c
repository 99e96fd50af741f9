#include "base/layer_set.h"

/* Digits at *p; moves behind them. */
static bool number(int *out, const char **p) {
    const char *q = *p;
    int v = 0;
    for (; *q >= '0' && *q <= '9' && v < LAYER_SET_MOST; q++) v = 10 * v + (*q - '0');
    if (q == *p || v >= LAYER_SET_MOST) return false;
    *p = q;
    *out = v;
    return true;
}

bool layer_set_parse(layer_set *s, const char *text) {
    *s = (layer_set){ 0 };
    for (const char *p = text;; p++) {
        int from, to;
        if (!number(&from, &p)) return false;
        to = from;
        if (*p == '-' && (p++, !number(&to, &p) || to < from)) return false;
        for (int i = from; i <= to; i++) s->bits[i / 64] |= (uint64_t)1 << i % 64;
        if (to >= s->top) s->top = to + 1;
        if (*p == 0) return true;
        if (*p != ',') return false;
    }
}

bool layer_set_has(const layer_set *s, int layer) {
    return s->all || (layer >= 0 && layer < LAYER_SET_MOST && s->bits[layer / 64] >> layer % 64 & 1);
}

bool layer_set_empty(const layer_set *s) { return !s->all && s->top == 0; }
