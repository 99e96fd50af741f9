/* tasks.h - internal to quantize: the list of tasks, the journal of finished ones, the unfinished folder. */
#ifndef NIBBLE_TASKS_H
#define NIBBLE_TASKS_H

#include "quant/quantize.h"

typedef struct qtask {
    int tensor;            /* QP_COPY or QP_SLICE: index of the tensor; -1: a group */
    uint64_t begin, bytes; /* the piece of a verbatim tensor */
    int module;            /* first module of the group */
    uint64_t source_bytes;
} qtask;

typedef struct task_list {
    qtask *v;
    int n;
    uint64_t source_bytes;
    int *weight_of, *scale_of, *scale_2_of, *input_of; /* [n_modules] tensor indices or -1 */
} task_list;

task_list tasks_make(const plan *p);
void tasks_free(task_list *t);
/* Tasks [*first, *last) of one rank. Unbroken runs: each machine reads and writes a region of its own. */
void tasks_share(const task_list *t, int rank, int ranks, int *first, int *last);

/* Journal: a header that identifies the job, then one record per finished task. Appended after the task's bytes were
 * written, so a record implies the bytes (a killed process loses nothing that the kernel has). */
typedef struct journal {
    int fd;
    uint8_t *done; /* [tasks] */
    int n_done;
} journal;
/* The journal of `rank` in `folder`, created when it is not there. When resuming, the records of all ranks' journals count,
 * so that the number of ranks may change.
 * Errors: E-QUANT-RESUME (another job's), E-QUANT-BUSY (locked by a running process), E-FILE-READ, E-FILE-WRITE. */
NODISCARD bool journal_open(journal *j, const char *folder, int rank, uint64_t job, const task_list *t, const plan *p,
                            qresult *results, bool resume, err *e);
/* Record task `i`; for groups with the results of their modules. One writer at a time (the caller locks). */
NODISCARD bool journal_add(journal *j, int i, const task_list *t, const plan *p, const qresult *results, err *e);
/* No task counts as done any more, of any rank. */
void journal_forget(journal *j, int rank, const char *folder);
void journal_close(journal *j);

/* dest.c: remove shards and indices of another layout, which a run killed at an unlucky moment may have left. */
void dest_remove_strays(const char *partial, const plan *p);

#endif
