/* How many drafts a round should propose: the tokens a step is expected to yield over the seconds it took. Guesses decide
 * about speed only; tokens never depend on them. */
#include <stdlib.h>

#include "engine/loop_impl.h"

/* Batches of up to 8 sequences are told apart, larger ones in steps of half a power of two. */
enum { CLASSES = 20, PROBE_EVERY = 32, DEPTHS = ENGINE_MAX_DRAFT + 1 };

static const double FIRST_GUESS = 0.8, ACCEPT_WEIGHT = 1.0 / 64, SECONDS_WEIGHT = 1.0 / 8;

static int class_of(int n) {
    if (n <= 8) return n - 1;
    int c = 8, limit = 12;
    for (; n > limit && c < CLASSES - 1; c++) limit = c % 2 ? limit / 4 * 6 : limit / 3 * 4;
    return c;
}

bool depth_open(depth_model *m) {
    *m = (depth_model){ .seconds = calloc((size_t)CLASSES * DEPTHS, sizeof *m->seconds) };
    for (int i = 0; i < ENGINE_MAX_DRAFT; i++) m->accept[i] = FIRST_GUESS;
    return m->seconds != NULL;
}

void depth_close(depth_model *m) {
    free(m->seconds);
    *m = (depth_model){ 0 };
}

/* Tokens of a round with d drafts: 1 + p1 + p1 p2 + ... */
static double expected(const depth_model *m, int d) {
    double sum = 1, all = 1;
    for (int i = 0; i < d; i++) {
        all *= m->accept[i];
        sum += all;
    }
    return sum;
}

int depth_pick(depth_model *m, int n, int cap, bool probe) {
    const double *seconds = m->seconds + class_of(n) * DEPTHS;
    int best = -1;
    for (int d = cap; d >= 0; d--) {
        if (seconds[d] <= 0) {
            if (probe) return d; /* not measured yet, deepest first */
            continue;
        }
        if (best < 0 || expected(m, d) / seconds[d] > expected(m, best) / seconds[best]) best = d;
    }
    if (best < 0) return cap;
    if (!probe || ++m->picks % PROBE_EVERY != 0) return best;
    const int to = best + (m->picks / PROBE_EVERY % 2 ? 1 : -1); /* a neighbour, so that what changed is noticed */
    return to < 0 || to > cap ? best : to;
}

void depth_accepted(depth_model *m, int depth, int accepted) {
    for (int i = 0; i < depth && i <= accepted; i++) m->accept[i] += ACCEPT_WEIGHT * ((i < accepted) - m->accept[i]);
}

void depth_timed(depth_model *m, int n, int depth, double seconds) {
    double *at = m->seconds + class_of(n) * DEPTHS + depth;
    *at = *at <= 0 ? seconds : *at + SECONDS_WEIGHT * (seconds - *at);
}
