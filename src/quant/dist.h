/* dist.h - several processes on one export: `mpirun -n N nibble quantize ...`.
 *
 * Nothing of MPI runs, and nothing is printed, unless the environment says that a launcher started this process as one of
 * several. All ranks see one folder (a shared filesystem, which is checked), so weights never travel: what does are
 * maxima, counts and errors. Every call not marked otherwise is made by all ranks in the same order, by the thread that
 * called dist_open, and returns at once when the process is alone.
 *
 * Failure: where all ranks meet ("agreed") they learn who failed. In between, a rank that fails ends the job at once; the
 * token file says which of several speaks. */
#ifndef NIBBLE_DIST_H
#define NIBBLE_DIST_H

#include "base/buf.h"
#include "base/err.h"
#include "quant/amax.h"

typedef struct dist {
    int rank, ranks; /* 0 of 1 when alone */
    bool on;         /* MPI was initialized */
    int speaker;     /* rank that prints an agreed failure, -1: none was agreed */
    char *token;     /* path of the job's token file; NULL before dist_share and after dist_unshare */
    uint64_t *heard; /* [ranks] rank 0: progress of each */
    double last_sent;
} dist;

/* What this program was built with: "Open MPI 4.1.4", or "no MPI". */
const char *dist_build(void);

/* Find out who this process is. Errors: E-DIST-BUILD (one of several, but built without MPI), E-DIST-START (the launcher
 * belongs to another MPI, or initialization failed). */
NODISCARD bool dist_open(dist *d, err *e);
/* For a command that has no work to divide: refuse to be one of several, each of which would write the same files. Needs no
 * dist_open and no MPI; where the launcher gives no number of processes, only its first goes on. Errors: E-DIST-ALONE. */
NODISCARD bool dist_alone(const char *command, err *e);
/* Wait for all ranks and finalize: after success only. */
void dist_close(dist *d);

/* True when every rank brought ok. Otherwise false everywhere, and the lowest rank that failed speaks (the others get
 * E-DIST-PEER unless they failed too). */
NODISCARD bool dist_agree(dist *d, bool ok, err *e);
/* Compare with rank 0's hash of `what` ("plan", "calibration data"). Errors, agreed: E-DIST-DIFFERS. */
NODISCARD bool dist_same(dist *d, uint64_t hash, const char *what, err *e);
/* Rank 0 (whose `ok` says that it made `folder`) puts a token with random content there, the others read it.
 * Errors, agreed: E-DIST-SHARED (another folder is seen), E-FILE-WRITE. */
NODISCARD bool dist_share(dist *d, const char *folder, bool ok, err *e);
/* All have finished with the folder: rank 0 takes the token away and goes on alone. */
void dist_unshare(dist *d);

/* Not collective, after a failure of this kind and before printing it: returns at once on the rank that is to speak. The
 * others are ended while they wait; if not within ten seconds, a message too many is better than none. */
void dist_wait_turn(const dist *d, err_kind kind);
/* Not collective: ends all ranks with this exit status. */
_Noreturn void dist_abort(dist *d, int status);

/* t = the maxima of all ranks, on all of them and in the same order: rank 0's, then what others add. */
void dist_merge_amax(dist *d, amax_table *t);
void dist_sum(dist *d, int64_t *v, size_t n);
void dist_max(dist *d, double *v);
/* Bitwise or: for arrays whose elements are zero on all ranks but one, or equal. */
void dist_union(dist *d, void *p, size_t bytes);

/* Not collective. Ranks above 0 say how far they are (at most five times a second), rank 0 adds up what it has heard: the
 * result is the sum there, `done` elsewhere. */
uint64_t dist_progress(dist *d, uint64_t done);

#endif
