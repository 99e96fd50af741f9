#include "cmd/calibration.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "quant/calib_data.h"

/* ---- progress ---- */

static const double LINE_SECONDS = 10;

/* A launcher of several processes passes lines on, it is no terminal: without any, hours would be silent. */
static void show(progress *p, double done, double total, const char *unit) {
    const double now = clock_seconds(), t = now - p->start, pause = p->tty ? 0.2 : LINE_SECONDS;
    const bool lines = p->d && p->d->on && !p->tty;
    if (!(p->tty || lines) || cmd_common()->quiet || (p->d && p->d->rank > 0)) return;
    if (now - p->last < pause && (lines || done < total)) return;
    p->last = now;
    const double eta = done > 0 ? t * (total - done) / done : 0;
    fprintf(stderr, "%s%s %3.0f %%  %.2f of %.2f %s  %.2f %s/s  %.0f s left%s", lines ? "" : "\r", p->step,
            100 * done / total, done, total, unit, t > 0 ? done / t : 0, unit, eta, lines ? "\n" : " \033[K");
}

void progress_bytes(void *ctx, uint64_t done, uint64_t total) {
    progress *p = ctx;
    show(p, (double)(p->d ? dist_progress(p->d, done) : done) / 1e9, (double)total / 1e9, "GB");
}
void progress_layers(void *ctx, int done, int total) { show(ctx, done, total, "layers"); }

progress progress_begin(const char *step) {
    const double now = clock_seconds();
    const bool tty = isatty(STDERR_FILENO);
    return (progress){ .start = now, .last = tty ? 0 : now, .tty = tty, .step = step };
}

void progress_wipe(const progress *p) {
    if (p->tty && !cmd_common()->quiet) fputs("\r\033[K", stderr);
}

void progress_end(const progress *p, const char *fmt, double x, double y) {
    if (cmd_common()->quiet || (p->d && p->d->rank > 0)) return;
    progress_wipe(p);
    fprintf(stderr, "%s: %.2f s, ", p->step, clock_seconds() - p->start);
    fprintf(stderr, fmt, x, y); /* fmt is one of ours */
    fputc('\n', stderr);
}

/* ---- options ---- */

static bool parse_scales(calib_args *o, err *e) {
    const char *s = o->mtp_text;
    o->factor = 4;
    if (!s || strcmp(s, "calibrated") == 0)
        o->scales = MTP_CALIBRATED;
    else if (strcmp(s, "borrow") == 0)
        o->scales = MTP_BORROW;
    else if (strncmp(s, "generous", 8) == 0 &&
             (s[8] == 0 || (s[8] == ':' && args_double(&o->factor, s + 9) && o->factor >= 1 && o->factor <= 1e6)))
        o->scales = MTP_GENEROUS;
    else
        return fail(e, ERR_USAGE, "E-USAGE",
                    "--mtp-scales %s: expected calibrated, borrow, generous or generous:FACTOR (1 or more)", s);
    return true;
}

bool calib_args_check(calib_args *a, const char *command, err *e) {
    if ((a->calib != NULL) + (a->calib_ids != NULL) + (a->amax != NULL) > 1)
        return fail(e, ERR_USAGE, "E-USAGE", "%s: --calib, --calib-ids and --amax exclude one another", command);
    if (a->has_seed && !(a->calib && strcmp(a->calib, "self") == 0))
        return fail(e, ERR_USAGE, "E-USAGE", "%s: --seed is for --calib self; nothing else is random", command);
    return parse_scales(a, e);
}

/* Hours of calibration must not end at a file that cannot be written. */
bool calib_args_check_save(const calib_args *o, err *e) {
    file_out probe = { 0 };
    const bool ok = !o->save_amax || file_out_open(&probe, o->save_amax, e);
    file_out_abort(&probe);
    return ok;
}

void calib_args_scales_text(char *out, size_t n, const calib_args *a) {
    static const char *const names[] = { "calibrated", "borrow", "generous" };
    snprintf(out, n, a->scales == MTP_GENEROUS ? "%s:%g" : "%s", names[a->scales], a->factor);
}

arg_opt calib_args_mtp_option(calib_args *a) {
    return (arg_opt){ .type = ARG_STR,
                      .name = "mtp-scales",
                      .meta = "HOW",
                      .dst = &a->mtp_text,
                      .none = "calibrated",
                      .help = "calibrated, borrow (K and V of the last attention layer) or generous[:F] (data-free)" };
}

void calib_args_options(arg_opt *opts, calib_args *a) {
    *a = (calib_args){ .seq = 512, .seed = 20260 };
    const arg_opt table[CALIB_OPTIONS] = {
        { .type = ARG_GROUP, .help = "Calibration" },
        { .type = ARG_STR,
          .name = "calib",
          .meta = "FILE",
          .dst = &a->calib,
          .none = "the built-in corpus",
          .help = "text or JSONL (messages or text), or `self`: the model writes its own" },
        { .type = ARG_STR,
          .name = "calib-ids",
          .meta = "FILE",
          .dst = &a->calib_ids,
          .help = "token ids as JSON; needs no tokenizer" },
        { .type = ARG_INT,
          .name = "samples",
          .meta = "N",
          .dst = &a->samples,
          .lo = 1,
          .hi = INT32_MAX,
          .none = "all",
          .help = "at most N sequences" },
        { .type = ARG_INT,
          .name = "seq",
          .meta = "N",
          .dst = &a->seq,
          .lo = 4,
          .hi = 1 << 24,
          .help = "tokens per sequence" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &a->seed,
          .given = &a->has_seed,
          .lo = 0,
          .hi = INT64_MAX,
          .help = "of `--calib self`: same seed, same text" },
        { .type = ARG_STR,
          .name = "amax",
          .meta = "FILE",
          .dst = &a->amax,
          .help = "maxima saved earlier instead of calibrating" },
        { .type = ARG_STR,
          .name = "save-amax",
          .meta = "FILE",
          .dst = &a->save_amax,
          .help = "save the maxima (safetensors)" },
        { .type = ARG_BYTES,
          .name = "max-ram",
          .meta = "BYTES",
          .dst = &a->max_ram,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "no limit",
          .help = "hidden states beyond this go to disk, weights leave memory after their layer" },
    };
    memcpy(opts, table, sizeof table);
}

/* ---- calibration ---- */

char *calibration_bundled(const char *name, err *e) {
    const char *dir;
    const arg_strings none = { 0 };
    const int level = log_level();
    log_set_level(0);
    const bool ok = cmd_model_dir(&dir, &none, 0, e);
    log_set_level(level);
    if (!ok) return NULL;
    char *up = path_join(dir, ".."), *path = path_join(up, name);
    free(up);
    if (file_exists(path)) return path;
    fail(e, ERR_MACHINE, "E-QUANT-CORPUS", "%s: not installed beside the program (give --calib FILE)", path);
    free(path);
    return NULL;
}

bool calibration_data(calib_data *d, const calib_args *o, const char *src, err *e) {
    const calib_source s = {
        .model_dir = src, .samples = o->samples, .seq = o->seq, .seed = (uint64_t)o->seed, .cancel = cmd_interrupt_all()
    };
    if (o->calib_ids) return calib_data_ids(d, o->calib_ids, o->samples, o->seq, e);
    const bool self = o->calib && strcmp(o->calib, "self") == 0;
    char *path = o->calib && !self ? xstrdup(o->calib)
                                   : calibration_bundled(self ? "calibration-prompts.jsonl" : "calibration.jsonl", e);
    if (!path) return false;
    const ops_options backend = cmd_ops_options();
    const bool ok = self ? calib_data_self(d, &s, path, &backend, e)
                         : calib_data_file(d, &s, path, o->calib ? o->calib : "built-in corpus", e);
    free(path);
    return ok;
}

bool calibration_kl_texts(calib_data *d, const char *src, err *e) {
    const calib_source s = { .model_dir = src, .samples = KL_TEXTS, .seq = KL_TOKENS, .cancel = cmd_interrupt_all() };
    char *path = calibration_bundled("calibration-prompts.jsonl", e);
    if (!path) return false;
    const ops_options backend = cmd_ops_options();
    const bool ok = calib_data_self(d, &s, path, &backend, e);
    free(path);
    if (ok) kl_texts(d);
    return ok;
}

static void report_coverage(const calib_report *r) {
    const int unseen = calib_unseen(r);
    if (unseen)
        log_say("W-CALIB-UNSEEN",
                "%d of %d routed experts saw no token; their input scale is the layer's own, shared by all its experts",
                unseen, r->layers * r->experts);
    if (r->spilled) log_say("N-CALIB-SPILLED", "hidden states were kept in a temporary file (--max-ram)");
}

static uint64_t data_hash(const calib_data *d) {
    uint64_t h = (uint64_t)d->n;
    for (int i = 0; i < d->n; i++)
        h = h * 31 + str_hash((str){ (const char *)d->v[i].v, d->v[i].n * sizeof *d->v[i].v });
    return h;
}

static void merge(dist *d, amax_table *t, calib_report *r) {
    dist_merge_amax(d, t);
    dist_sum(d, r->routed, (size_t)r->layers * (size_t)r->experts);
    dist_max(d, &r->seconds);
}

bool calibrate(amax_table *t, char *what, size_t n, const calib_args *o, const char *src, bool head, err *e) {
    calib_data data;
    calib_report report;
    progress bar = progress_begin("calibrate");
    bar.d = o->d;
    if (!calibration_data(&data, o, src, e)) return false;
    if (o->d && !dist_same(o->d, data_hash(&data), "calibration data", e)) return calib_data_free(&data), false;
    const calib_options opt = { .ops = cmd_ops_options(),
                                .max_ram_bytes = o->max_ram,
                                .rank = o->d ? o->d->rank : 0,
                                .ranks = o->d ? o->d->ranks : 1,
                                .mtp_steps = head ? 2 : 0,
                                .on_progress = progress_layers,
                                .ctx = &bar,
                                .cancel = cmd_interrupt_all() };
    const bool ok = calib_run(t, &report, src, &data, &opt, e);
    snprintf(what, n, "%s", data.what);
    if (ok) {
        if (o->d) merge(o->d, t, &report);
        progress_end(&bar, "%.0f tokens, %.0f tokens/s", (double)data.tokens, (double)data.tokens / report.seconds);
        report_coverage(&report);
        calib_report_free(&report);
    } else {
        progress_wipe(&bar);
    }
    calib_data_free(&data);
    return ok;
}
