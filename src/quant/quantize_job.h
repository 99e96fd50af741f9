/* quantize_job.h - internal to quantize: the running job and its files (quantize_files.c). */
#ifndef NIBBLE_QUANTIZE_JOB_H
#define NIBBLE_QUANTIZE_JOB_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "quant/quantize_write.h"
#include "quant/tasks.h"

typedef struct job {
    const plan *p;
    const quantize_options *o;
    quantize_result *out;
    quant_kern k;
    task_list tasks;
    journal log;
    int *src_fd, *dst_fd;
    struct stat *src_stat;
    atomic_int next, failed, lost; /* lost: bytes written earlier did not reach the disk */
    int last;                      /* end of this rank's tasks */
    atomic_ullong done_bytes, written;
    pthread_mutex_t lock; /* journal, error, zero count */
    err *e;
} job;

/* n bytes of a source tensor's data from byte `at`, whole or an error. Errors: E-QUANT-READ. */
NODISCARD bool job_read(const job *j, const st_tensor *t, uint64_t at, void *to, uint64_t n, err *e);
/* n bytes to a tensor of the export from its byte `at`, and their way to the disk started; `b`, the thread's, is NULL for a
 * few bytes. Errors: E-FILE-WRITE. */
NODISCARD bool job_write(job *j, write_behind *b, const qtensor *t, uint64_t at, const void *from, uint64_t n, err *e);

/* Identity of the job: everything that decides an output byte. */
uint64_t job_id(const job *j);
/* Room for a file per shard of both sides. Errors: E-QUANT-SHARDS. */
NODISCARD bool job_allow_files(const plan *p, err *e);
/* Errors: E-FILE-OPEN, E-QUANT-CHANGED. */
NODISCARD bool job_open_sources(job *j, err *e);
/* Before the export gets its name: has a source changed since it was opened? Errors: E-QUANT-CHANGED. */
NODISCARD bool job_check_sources(const job *j, err *e);
/* Shards with their full length and header. Errors: E-QUANT-RESUME, E-FILE-WRITE. */
NODISCARD bool job_open_outputs(job *j, const char *partial, err *e);
/* Flush the shards; after an error no task counts as done. Errors: E-FILE-WRITE. */
NODISCARD bool job_sync_outputs(job *j, const char *partial, err *e);

#endif
