/* check.h - is this checkpoint sound, for whom, and is it still the same model? The door of check/.
 *
 * Reads every byte once (twice with a source), stops at nothing, and reports one finding per cause. Rules: docs/CHECKS.md. */
#ifndef NIBBLE_CHECK_H
#define NIBBLE_CHECK_H

#include "check/against.h"
#include "check/fix.h"
#include "check/scan_values.h"
#include "check/target.h"
#include "check/view.h"

typedef struct check_options {
    const char *source; /* the model it was made from, or NULL */
    target *targets;    /* [n_targets] engines to predict for; their outcome is filled in */
    int n_targets;
    int threads;
    kern_isa isa;
    void (*on_progress)(void *ctx, uint64_t done, uint64_t total); /* bytes; from the calling thread; may be NULL */
    void *ctx;
    volatile const int *cancel; /* may be NULL */
} check_options;

typedef struct check_report {
    findings found;
    check_view view;
    bool loads;          /* nibble itself would load it */
    err refused;         /* why not */
    compare_result with; /* of `source`; families empty without one */
    const target *targets;
    int n_targets;
    uint64_t bytes; /* read */
    double seconds;
} check_report;

/* Errors: E-CKPT-DIR (no such folder), E-MACHINE-THREADS, for the source those of ckpt_open and config_read;
 * ERR_INTERRUPTED E-CHECK-STOPPED. Findings are no errors. */
NODISCARD bool check_run(check_report *out, const char *dir, const check_options *o, err *e);
void check_free(check_report *r);

/* "sound", "sound with warnings", "sound, but not for a target", "broken". */
const char *check_verdict(const check_report *r);
/* The report for people, and as one JSON object ("nibble.check/1"). */
void check_text(buf *out, const check_report *r, bool all_names);
void check_json(buf *out, const check_report *r, const char *path);

#endif
