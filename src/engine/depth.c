#include "engine/depth.h"

#include <math.h>

static const double FIRST_GUESS = 0.8, /* of acceptance */
    FIRST_COST = 0.3,                  /* of a draft, in steps without drafts, until one was measured */
    ACCEPT_WEIGHT = 1.0 / 128, SECONDS_WEIGHT = 1.0 / 16, MARGIN = 0.02, PROBE_SHARE = 0.004, FIRST_CREDIT = 0.7,
                    CREDIT_SHARE = 0.01, MOST_CREDIT = 4;
enum { GUESS_SAMPLES = 4, PROBE_STEPS = 2, FEW = 3, REST_AFTER = 8, MOST_BUDGET = 4, DOUBTFUL = 8 };

/* Batches of up to 8 sequences are told apart, larger ones in steps of half a power of two. */
static int class_of(int n) {
    if (n <= 8) return n - 1;
    int c = 8, limit = 12;
    for (; n > limit && c < DEPTH_CLASSES - 1; c++) limit = c % 2 ? limit / 4 * 6 : limit / 3 * 4;
    return c;
}

void depth_init(depth_model *m) {
    *m = (depth_model){ .credit = FIRST_CREDIT };
    for (int i = 0; i < DEPTH_MAX; i++) m->accept[i] = FIRST_GUESS;
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

/* Seconds of depth d over those of depth 0, from the nearest batch size where both are known. */
static double cost_ratio(const depth_model *m, int class, int d) {
    for (int away = 0; away < DEPTH_CLASSES; away++)
        for (int side = -1; side <= 1; side += 2) {
            const int c = class + side * away;
            if (c < 0 || c >= DEPTH_CLASSES) continue;
            const depth_cell *row = m->cell[c];
            if (row[0].seconds > 0 && row[d].seconds > 0) return row[d].seconds / row[0].seconds;
        }
    return 1 + FIRST_COST * d;
}

/* Of a batch size of which nothing is known, in steps without drafts. */
static double seconds_of(const depth_model *m, int class, int d) {
    const depth_cell *row = m->cell[class];
    if (row[d].seconds > 0) return row[d].seconds;
    return (row[0].seconds > 0 ? row[0].seconds : 1) * cost_ratio(m, class, d);
}

/* Tokens per second of a sequence; `share` of them draft, which may cost as much as if all did. */
static double rate(const depth_model *m, int class, double share, int d) {
    return (1 + share * (expected(m, d) - 1)) / seconds_of(m, class, d);
}

static int best_of(const depth_model *m, int class, double share, int cap) {
    int best = 0;
    double most = (1 + MARGIN) * rate(m, class, share, 0);
    for (int d = 1; d <= cap; d++) {
        const double r = rate(m, class, share, d);
        if (r > most) most = r, best = d;
    }
    return best;
}

/* Starts a probe when the budget pays for it: the time that the same tokens would take at the best depth, less. */
static void plan_probe(depth_model *m, int class, int cap, int best) {
    const double s = seconds_of(m, class, best);
    /* When one draft does not pay, more hardly can: whether it does is what one draft shows for the least. */
    int d = best == 0 ? 1 : m->turn % (cap + 1);
    if (d == best) d = ++m->turn % (cap + 1);
    m->budget = fmin(m->budget + PROBE_SHARE * s, MOST_BUDGET * s);
    double cost = seconds_of(m, class, d) - s * expected(m, d) / expected(m, best);
    cost = PROBE_STEPS * fmin(fmax(cost, 0.1 * s), (1 + d) * s);
    if (cap == 0 || m->budget < cost) return;
    m->budget -= cost;
    m->turn++;
    m->probe = d;
    m->probe_left = PROBE_STEPS;
}

/* Of drafts in place i nothing is known before there were some in front of it. */
static int known_cap(const depth_model *m, int cap) {
    while (cap > 1 && m->seen[cap - 2] < FEW) cap--;
    return cap;
}

/* At most d, what may be lost by one step of it. When that is less than was wanted, what is known of acceptance was worth so
 * little that what comes next counts for more. */
static int affordable(depth_model *m, int class, int d) {
    const int want = d;
    while (d > 0 && m->credit < fmin(seconds_of(m, class, d) / seconds_of(m, class, 0) - 1, MOST_CREDIT)) d--;
    for (int i = 0; d < want && i < DEPTH_MAX; i++)
        if (m->seen[i] > DOUBTFUL) m->seen[i] = DOUBTFUL;
    return d;
}

static int choose(depth_model *m, int class, double share, int cap, bool probe) {
    if (probe && m->cell[class][0].samples < FEW) return 0;
    cap = known_cap(m, cap);
    const int best = affordable(m, class, best_of(m, class, share, cap));
    if (best > 0) m->resting = 0;
    if (!probe) return best;
    if (best == 0 && m->resting < REST_AFTER) m->resting++;
    if (m->probe_left == 0) plan_probe(m, class, cap, best);
    if (m->probe_left == 0) return best;
    m->probe_left--;
    return affordable(m, class, m->probe < cap ? m->probe : cap);
}

int depth_pick(depth_model *m, int n, int can, int cap, bool probe) {
    const int d = choose(m, class_of(n), (double)can / n, cap, probe);
    m->right = 0;
    /* With more drafts than before, the draft layer first catches up on rows that it was spared. */
    m->settled = d <= m->last;
    m->last = d;
    return d;
}

bool depth_rests(const depth_model *m) { return m->resting >= REST_AFTER && m->credit < FIRST_CREDIT; }

void depth_caught_up(depth_model *m, int n, double seconds) {
    const double off = m->cell[class_of(n)][0].seconds;
    if (off > 0) m->credit = fmax(m->credit - seconds / off, -MOST_CREDIT);
}

void depth_accepted(depth_model *m, int depth, int accepted) {
    m->right += accepted;
    for (int i = 0; i < depth && i <= accepted; i++) {
        const double w = fmax(ACCEPT_WEIGHT, 1.0 / (double)(++m->seen[i] + GUESS_SAMPLES));
        m->accept[i] += w * ((i < accepted) - m->accept[i]);
    }
}

/* What the step has gained or lost against one without drafts, catching up included. */
static void settle(depth_model *m, int n, int depth, double seconds) {
    const depth_cell *row = m->cell[class_of(n)];
    const double off = row[0].seconds, known = row[depth].seconds;
    double gain = CREDIT_SHARE;
    if (depth > 0 && off > 0) { /* something else may have had the machine */
        const double most = known <= 0 ? (1 + depth) * off : m->settled ? 1.5 * known : known + off;
        gain = (double)m->right / n + 1 - fmin(seconds, most) / off;
    }
    m->credit = fmax(fmin(m->credit + gain, MOST_CREDIT), -MOST_CREDIT);
}

/* Nothing is fast by accident: of the first few steps the fastest counts, and later what is much faster than the mean counts
 * more than what is slower. */
void depth_timed(depth_model *m, int n, int depth, double seconds) {
    depth_cell *c = &m->cell[class_of(n)][depth];
    settle(m, n, depth, seconds);
    if (!m->settled && c->samples > 0) return;
    if (c->samples == 0) {
        c->seconds = seconds;
    } else if (c->samples < FEW) {
        c->seconds = fmin(c->seconds, seconds);
    } else {
        seconds = fmin(seconds, 2 * c->seconds); /* something else had the machine */
        c->seconds += (seconds < 0.7 * c->seconds ? 0.5 : SECONDS_WEIGHT) * (seconds - c->seconds);
    }
    c->samples += m->settled; /* a step that is not like the others counts until there is another */
}
