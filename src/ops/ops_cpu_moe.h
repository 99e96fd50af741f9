/* ops_cpu_moe.h - the job that a batch through routed experts is, for plain and for packed weights. Internal to ops_cpu*.c.
 *
 * (row, expert) pairs are sorted by expert, so that an expert shared by several rows of the batch is read once. */
#ifndef NIBBLE_OPS_CPU_MOE_H
#define NIBBLE_OPS_CPU_MOE_H

#include "ops/ops_cpu.h"

enum { PAIR_BLOCK = 64, COL_GRAIN = 16 };

/* A (row, expert) pair; pairs are sorted by expert. */
typedef struct group { /* the pairs of one expert */
    int expert, begin, end;
    double before; /* cost of the groups in front */
} group;

typedef struct moe_job {
    cpu *c;
    float *y, *hidden_out;
    const float *x, *wt;
    const experts *ex;
    int rows, k, n_groups;
    group *groups;
    int32_t *pair; /* [pairs] index into idx and wt, in order of expert */
    float *h;      /* [pairs, inter] in that order */
    double cost;
    /* packed weights: quantized inputs by row (same_in) or by pair, in order of expert; those of down by pair */
    nv_act *gate_act, *up_act, *down_act;
} moe_job;

/* Packed experts: quantize the inputs [begin, end) of gate and up (rows or pairs) or of down (pairs); rows [i0, i1) of
 * gate and up for all pairs of a group; columns [c0, c1) of y. i0 and c0 are multiples of 16. */
int packed_inputs(const moe_job *j);
void packed_quantize_in(const moe_job *j, int begin, int end);
void packed_quantize_down(const moe_job *j, int begin, int end);
void packed_gate_up(const moe_job *j, const group *g, int i0, int i1, float *own);
void packed_down(const moe_job *j, int c0, int c1, float *own);
/* Bytes for the inputs, and their layout in `mem`; bytes of each thread's work memory. */
size_t packed_act_bytes(const moe_job *j);
void packed_act_layout(moe_job *j, char *mem);
size_t packed_own_bytes(const cpu *c, const experts *ex);

#endif
