/* quantize.h - the pipeline: read, amax, encode, write at known offsets; bounded memory, resumable.
 *
 * Work is cut into tasks (a fusion group, or a piece of a verbatim tensor). Every output byte belongs to exactly one task
 * and its place is known from the plan, so threads, processes and a killed run can take tasks in any order and the
 * result is the same bytes. Output grows in `DST.partial` and is renamed when complete. */
#ifndef NIBBLE_QUANTIZE_H
#define NIBBLE_QUANTIZE_H

#include "kern/quant.h"
#include "quant/amax.h"
#include "quant/plan.h"

typedef struct quantize_options {
    quant_arith arith;
    quant_algorithm algorithm; /* of NVFP4 weights; FP8 ones are always by their maximum */
    const amax_table *amax;    /* input and KV maxima; NULL: data-free (input_scale 1.0, no KV scales may be planned) */
    int threads;               /* <= 0: all CPUs */
    kern_isa isa;
    bool resume;         /* continue DST.partial when it was made by the same plan and inputs */
    int rank, ranks;     /* this process's share: an unbroken run of tasks, equal in source bytes; 0, 1 alone */
    const char *partial; /* the folder that quantize_folder made; NULL: make it now */
    bool discard;        /* for measuring: read and encode everything, write nothing; dst is not looked at */
    void (*on_progress)(
        void *ctx, uint64_t done_bytes,
        uint64_t total_bytes); /* source bytes of this share and of all; from the calling thread; may be NULL */
    void *ctx;
    volatile const int *cancel;
} quantize_options;

typedef struct qresult {                     /* of one quantized module */
    float weight_amax, scale_2, input_scale; /* weight_amax is the group's; input_scale 0 when there is none */
    float own_amax;
    quant_stats stats;     /* FP8: only .error */
    stats_error max_error; /* what QUANT_MAX would give; zero when that was the algorithm, and for FP8 */
} qresult;

typedef struct quantize_result {
    qresult *modules; /* [plan.n_modules], zero for kept ones */
    uint64_t read_bytes, written_bytes;
    double seconds;
    int resumed_tasks, tasks;
    int zero_modules; /* weights all zero or too small for a scale, see quantize_count_zeros */
} quantize_result;

/* May DST be made here? For callers with long work to do first; quantize_shards checks again.
 * Errors: E-QUANT-DST (exists, is the source, lies nowhere, or DST.partial is there and `resume` is not), E-QUANT-SPACE. */
NODISCARD bool quantize_check_dst(const plan *p, const char *dst, bool resume, err *e);

/* For several processes, which need the folder first: rank 0 makes DST.partial (or finds it when resuming) under the checks
 * above, others only get its name. *partial is malloc'ed, on failure too. */
NODISCARD bool quantize_folder(char **partial, const plan *p, const char *dst, int rank, bool resume, err *e);

/* Create or reopen DST.partial and write this process's part of the shards, fsynced. *partial (malloc'ed) is the folder.
 * Errors: those of quantize_check_dst, E-QUANT-SHARDS (too many for the system), E-QUANT-AMAX (a quantizer without a
 * maximum: names it), E-QUANT-NONFINITE (tensor, row, column), E-QUANT-CHANGED (a source file changed meanwhile),
 * E-QUANT-RESUME (DST.partial belongs to another job or was tampered with), E-QUANT-BUSY, E-QUANT-READ, E-FILE-WRITE;
 * ERR_INTERRUPTED E-QUANT-STOPPED. */
NODISCARD bool quantize_shards(quantize_result *out, char **partial, const plan *p, const char *dst,
                               const quantize_options *o, err *e);
/* Say which modules are all zero (W-QUANT-ZERO) and count them; quantize_shards does when it is alone, otherwise it has to
 * wait until `r` holds the results of all ranks. */
void quantize_count_zeros(quantize_result *r, const plan *p);
/* Rename DST.partial to DST after configs and sidecars were added; removes the journal and all other hidden files. */
NODISCARD bool quantize_commit(const char *partial, const char *dst, err *e);
/* Remove an unfinished export and what is in its folder (files; a folder in it, and then it, stays). */
void quantize_discard(const char *partial);
void quantize_result_free(quantize_result *r);

#endif
