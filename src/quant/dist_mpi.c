#include "quant/dist_mpi.h"

#include <stdlib.h>
#include <time.h>

#ifndef NIBBLE_MPI

const char *comm_version(void) { return NULL; }
bool comm_open(int *rank, int *ranks) {
    *rank = 0;
    *ranks = 1;
    return false;
}
void comm_close(void) {}
void comm_abort(int status) { exit(status); }
void comm_reduce(void *p, size_t n, comm_op op) { (void)p, (void)n, (void)op; }
void comm_bcast(void *p, size_t bytes) { (void)p, (void)bytes; }
void comm_gather(const buf *mine, buf *all) { buf_add(all, mine->p, mine->n); }
void comm_send_counter(uint64_t v) { (void)v; }
bool comm_receive_counter(int *rank, uint64_t *v) {
    *rank = 0;
    *v = 0;
    return false;
}

#else

#include <limits.h>
#include <mpi.h>
#include <stdio.h>

enum { TAG_COUNTER = 1 };

static MPI_Request sending = MPI_REQUEST_NULL;
static uint64_t sent;

const char *comm_version(void) {
    static char text[40];
    snprintf(text, sizeof text, "Open MPI %d.%d.%d", OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION);
    return text;
}

/* MPI's default error handler ends the job itself, so return codes say nothing. */
bool comm_open(int *rank, int *ranks) {
    int given;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &given) != MPI_SUCCESS || given < MPI_THREAD_FUNNELED)
        return false;
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, ranks);
    return true;
}

/* MPI's own waiting burns a CPU. */
static void wait_for(MPI_Request *r) {
    struct timespec t = { .tv_nsec = 20000 };
    for (int done = 0;;) {
        MPI_Test(r, &done, MPI_STATUS_IGNORE);
        if (done) return;
        nanosleep(&t, NULL);
        if (t.tv_nsec < 2000000) t.tv_nsec *= 2;
    }
}

void comm_close(void) {
    MPI_Request all;
    int rank;
    uint64_t v;
    if (sending != MPI_REQUEST_NULL) wait_for(&sending);
    MPI_Ibarrier(MPI_COMM_WORLD, &all);
    wait_for(&all);
    while (comm_receive_counter(&rank, &v)) {
    } /* none may be left unread */
    MPI_Finalize();
}

void comm_abort(int status) {
    MPI_Abort(MPI_COMM_WORLD, status);
    _Exit(status);
}

void comm_reduce(void *p, size_t n, comm_op op) {
    const MPI_Datatype types[] = { MPI_INT64_T, MPI_INT64_T, MPI_DOUBLE, MPI_UINT8_T };
    const MPI_Op ops[] = { MPI_SUM, MPI_MIN, MPI_MAX, MPI_BOR };
    const size_t width = op == COMM_OR_U8 ? 1 : 8;
    for (size_t at = 0; at < n; at += 1 << 24) { /* MPI counts in int */
        const size_t some = n - at < 1 << 24 ? n - at : 1 << 24;
        MPI_Request r;
        MPI_Iallreduce(MPI_IN_PLACE, (uint8_t *)p + at * width, (int)some, types[op], ops[op], MPI_COMM_WORLD, &r);
        wait_for(&r);
    }
}

void comm_bcast(void *p, size_t bytes) {
    MPI_Request r;
    CHECK(bytes <= INT_MAX, "%zu bytes", bytes);
    MPI_Ibcast(p, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD, &r);
    wait_for(&r);
}

void comm_gather(const buf *mine, buf *all) {
    int ranks;
    int64_t total = 0;
    MPI_Request r;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int *n = xmalloc((size_t)ranks * sizeof *n), *at = xmalloc((size_t)ranks * sizeof *at);
    CHECK(mine->n <= INT_MAX, "%zu bytes", mine->n);
    const int own = (int)mine->n;
    MPI_Iallgather(&own, 1, MPI_INT, n, 1, MPI_INT, MPI_COMM_WORLD, &r);
    wait_for(&r);
    for (int i = 0; i < ranks; i++) {
        at[i] = (int)total;
        total += n[i];
        CHECK(total <= INT_MAX, "%lld bytes in all", (long long)total);
    }
    buf_reserve(all, (size_t)total);
    MPI_Iallgatherv(mine->p, own, MPI_BYTE, all->p + all->n, n, at, MPI_BYTE, MPI_COMM_WORLD, &r);
    wait_for(&r);
    all->n += (size_t)total;
    free(n);
    free(at);
}

void comm_send_counter(uint64_t v) {
    int done = 1;
    if (sending != MPI_REQUEST_NULL) MPI_Test(&sending, &done, MPI_STATUS_IGNORE);
    if (!done) return;
    sent = v;
    MPI_Isend(&sent, 1, MPI_UINT64_T, 0, TAG_COUNTER, MPI_COMM_WORLD, &sending);
}

bool comm_receive_counter(int *rank, uint64_t *v) {
    MPI_Status s;
    int there;
    MPI_Iprobe(MPI_ANY_SOURCE, TAG_COUNTER, MPI_COMM_WORLD, &there, &s);
    if (!there) return false;
    MPI_Recv(v, 1, MPI_UINT64_T, s.MPI_SOURCE, TAG_COUNTER, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    *rank = s.MPI_SOURCE;
    return true;
}

#endif
