/* depth.h - how many drafts a round should propose: the tokens a step is expected to yield over the seconds it took.
 *
 * A pure function of what it was told (no clock, no randomness), so its promise can be tested without a model: whatever
 * acceptance and step times are, drafting costs at most 2 % against not drafting in the long run. Depth 0 of a batch size is
 * measured before any other, one draft before two; another depth is chosen when it is expected to be faster by more than
 * MARGIN; depths that look slower are tried again from a budget of PROBE_SHARE of the time spent. Whatever is expected, the
 * steps that drafting has really lost against not drafting are kept within a credit: FIRST_CREDIT of a step, and
 * CREDIT_SHARE of the steps without drafts. Tokens never depend on any of this. */
#ifndef NIBBLE_DEPTH_H
#define NIBBLE_DEPTH_H

#include "base/base.h"

enum { DEPTH_MAX = 5, DEPTH_CLASSES = 20 };

typedef struct depth_cell { /* steps of one batch size and depth */
    double seconds;         /* running mean; 0 = not measured yet */
    int samples;
} depth_cell;

typedef struct depth_model {
    double accept[DEPTH_MAX]; /* draft i is accepted when those before it are: running means */
    int64_t seen[DEPTH_MAX];
    depth_cell cell[DEPTH_CLASSES][DEPTH_MAX + 1];
    double budget; /* seconds that probes may cost */
    double credit; /* steps that all drafting may still lose against none: what it gained, less what it cost */
    int64_t right; /* drafts accepted since the last pick */
    int last;      /* depth of the previous pick */
    bool settled;  /* the step just picked is like those that follow it at the same depth: worth timing */
    int probe, probe_left, turn;
    int resting; /* picks in a row for which no drafts were best */
} depth_model;

void depth_init(depth_model *m);
/* Drafts per round of the next step for n >= 1 sequences, 0..cap, of which `can` may draft. `probe`: the step will be timed
 * and all can draft, so it may be used to learn something. */
int depth_pick(depth_model *m, int n, int can, int cap, bool probe);
/* No drafts have been best for a while, and the credit does not pay for running the draft layer over what a sequence was
 * spared: it need not draft again. */
bool depth_rests(const depth_model *m);
/* A round of `depth` drafts of which `accepted` were right. */
void depth_accepted(depth_model *m, int depth, int accepted);
/* Before a step without drafts the draft layer caught up, for so long; the step itself is timed without that, or not at all. */
void depth_caught_up(depth_model *m, int n, double seconds);
/* The step of the last pick took so long. */
void depth_timed(depth_model *m, int n, int depth, double seconds);

#endif
