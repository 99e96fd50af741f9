/* calibration.h - how quantize and requant-mtp come by activation maxima: the options, the data, the run, the progress. */
#ifndef NIBBLE_CALIBRATION_H
#define NIBBLE_CALIBRATION_H

#include "base/args.h"
#include "quant/calib.h"
#include "quant/dist.h"
#include "quant/kl.h"
#include "quant/mtp_scales.h"

/* ---- progress: a bar on a terminal, one line per step otherwise; of several processes rank 0 shows the sum ---- */

typedef struct progress {
    double start, last;
    bool tty;
    const char *step;
    dist *d; /* NULL: alone */
} progress;
progress progress_begin(const char *step);
/* Callbacks of quantize_options and calib_options; ctx is the progress. */
void progress_bytes(void *ctx, uint64_t done, uint64_t total);
void progress_layers(void *ctx, int done, int total);
/* The bar must not stay in front of a message. */
void progress_wipe(const progress *p);
/* The step's time, then `fmt` with x and y. */
void progress_end(const progress *p, const char *fmt, double x, double y);

/* ---- calibration ---- */

typedef struct calib_args {
    const char *calib, *calib_ids, *amax, *save_amax, *mtp_text;
    int samples, seq;
    int64_t max_ram, seed;
    bool has_seed;
    mtp_scales scales; /* parsed from mtp_text by calib_args_check */
    double factor;
    dist *d; /* share the data with other processes; NULL: alone */
} calib_args;

enum { CALIB_OPTIONS = 9 };
/* Fill opts[CALIB_OPTIONS] (a group heading and what stands under it) for `a`, and set a to its defaults. */
void calib_args_options(arg_opt *opts, calib_args *a);
/* --mtp-scales, for the command's own group of formats. */
arg_opt calib_args_mtp_option(calib_args *a);
/* E-USAGE: --mtp-scales is not understood, or two sources of maxima are given. */
NODISCARD bool calib_args_check(calib_args *a, const char *command, err *e);
/* Hours of calibration must not end at a file that cannot be written: E-FILE-WRITE. */
NODISCARD bool calib_args_check_save(const calib_args *a, err *e);
/* "calibrated", "borrow", "generous:4": for the provenance. */
void calib_args_scales_text(char *out, size_t n, const calib_args *a);

/* A file that comes with the program: "share/nibble/NAME" beside an installed one, "assets/NAME" in a source tree, next to the
 * embedded model. NULL: E-QUANT-CORPUS. Owned by the caller. */
char *calibration_bundled(const char *name, err *e);
/* The sequences that calib, calib_ids, samples, seq and seed of `a` ask for (nothing: the built-in corpus), in src's tokens. */
NODISCARD bool calibration_data(calib_data *d, const calib_args *a, const char *src, err *e);

/* Run the model in `src` over the data that was asked for (default: the built-in corpus) and collect its maxima; with
 * `head` those of the draft head for both draft steps too. what[n] tells of the data. Errors: those of calib_run and
 * calib_data_*; E-QUANT-CORPUS; E-DIST-DIFFERS (ranks have other data). */
NODISCARD bool calibrate(amax_table *t, char *what, size_t n, const calib_args *a, const char *src, bool head, err *e);

/* The texts that --report-kl runs over: what the model in `src` answers to the first built-in prompts. Errors: as above. */
NODISCARD bool calibration_kl_texts(calib_data *d, const char *src, err *e);

#endif
