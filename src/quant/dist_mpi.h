/* dist_mpi.h - internal to dist: the few MPI calls it needs. Built without MPI, only comm_version may be called. */
#ifndef NIBBLE_DIST_MPI_H
#define NIBBLE_DIST_MPI_H

#include "base/buf.h"

typedef enum comm_op { COMM_SUM_I64, COMM_MIN_I64, COMM_MAX_F64, COMM_OR_U8 } comm_op;

/* "Open MPI 4.1.4", or NULL when built without. */
const char *comm_version(void);
/* False when MPI does not start. */
bool comm_open(int *rank, int *ranks);
void comm_close(void);
_Noreturn void comm_abort(int status);

/* Collective; n elements in place on all ranks. Waiting ranks sleep: a rank that computes may need the CPU. */
void comm_reduce(void *p, size_t n, comm_op op);
void comm_bcast(void *p, size_t bytes); /* from rank 0 */
/* Byte strings of all ranks, one after the other, on all of them. */
void comm_gather(const buf *mine, buf *all);

/* Counters to rank 0, without waiting: send drops the value while an earlier one is on its way, receive takes what has
 * come. */
void comm_send_counter(uint64_t v);
bool comm_receive_counter(int *rank, uint64_t *v);

#endif
