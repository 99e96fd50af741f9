/* nibble quantize: BF16 checkpoint in, NVFP4 checkpoint out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "quant/calib_data.h"
#include "quant/mtp_scales.h"
#include "quant/report.h"

typedef struct options {
    const char *out, *calib, *calib_ids, *amax, *save_amax, *mtp_text;
    int preset, kv, mtp, arith, samples, seq;
    bool no_calib, keep_qkv, resume, dry_run, portable, has_seed;
    arg_strings include, exclude;
    int64_t shard_bytes, max_ram, seed;
    mtp_scales scales; /* parsed from mtp_text */
    double factor;
} options;

/* ---- progress: a bar on a terminal, one line per step otherwise ---- */

typedef struct progress {
    double start, last;
    bool tty;
    const char *step;
} progress;

static void show(progress *p, double done, double total, const char *unit) {
    const double now = clock_seconds(), t = now - p->start;
    if (!p->tty || cmd_common()->quiet || (now - p->last < 0.2 && done < total)) return;
    p->last = now;
    const double eta = done > 0 ? t * (total - done) / done : 0;
    fprintf(stderr, "\r%s %3.0f %%  %.2f of %.2f %s  %.2f %s/s  %.0f s left \033[K", p->step, 100 * done / total, done,
            total, unit, t > 0 ? done / t : 0, unit, eta);
}

static void on_bytes(void *ctx, uint64_t done, uint64_t total) {
    show(ctx, (double)done / 1e9, (double)total / 1e9, "GB");
}
static void on_layer(void *ctx, int done, int total) { show(ctx, done, total, "layers"); }

static progress begin(const char *step) {
    return (progress){ .start = clock_seconds(), .tty = isatty(STDERR_FILENO), .step = step };
}

/* The bar must not stay in front of a message. */
static void wipe(const progress *p) {
    if (p->tty && !cmd_common()->quiet) fputs("\r\033[K", stderr);
}

static void end(const progress *p, const char *fmt, double x, double y) {
    if (cmd_common()->quiet) return;
    wipe(p);
    fprintf(stderr, "%s: %.2f s, ", p->step, clock_seconds() - p->start);
    fprintf(stderr, fmt, x, y); /* fmt is one of ours */
    fputc('\n', stderr);
}

/* ---- options ---- */

static bool parse_scales(options *o, err *e) {
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

static bool check(options *o, err *e) {
    const int sources = (o->calib != NULL) + (o->calib_ids != NULL) + (o->amax != NULL) + o->no_calib;
    if (!o->out && !o->dry_run) return fail(e, ERR_USAGE, "E-USAGE", "quantize: -o DST is needed");
    if (sources > 1)
        return fail(e, ERR_USAGE, "E-USAGE",
                    "quantize: --calib, --calib-ids, --amax and --no-calib exclude one another");
    if (o->no_calib && o->mtp_text)
        return fail(e, ERR_USAGE, "E-USAGE", "quantize: --mtp-scales needs maxima of some kind; --no-calib has none");
    if (o->save_amax && o->no_calib) return fail(e, ERR_USAGE, "E-USAGE", "quantize: --save-amax needs calibration");
    if (o->has_seed && !(o->calib && strcmp(o->calib, "self") == 0))
        return fail(e, ERR_USAGE, "E-USAGE", "quantize: --seed is for --calib self; nothing else is random");
    return parse_scales(o, e);
}

/* Does any module of the plan need an input maximum, or any layer a KV maximum? */
static bool needs_amax(const plan *p) {
    for (int i = 0; i < p->n_tensors; i++) {
        const qpart part = p->tensors[i].part;
        if (part == QP_INPUT_SCALE || part == QP_K_SCALE || part == QP_V_SCALE) return true;
    }
    return false;
}

/* ---- calibration ---- */

/* "share/nibble/NAME" beside an installed program, "assets/NAME" in a source tree: next to the embedded model. */
static char *bundled(const char *name, err *e) {
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

static bool load_data(calib_data *d, const options *o, const char *src, err *e) {
    const calib_source s = {
        .model_dir = src, .samples = o->samples, .seq = o->seq, .seed = (uint64_t)o->seed, .cancel = cmd_interrupt_all()
    };
    if (o->calib_ids) return calib_data_ids(d, o->calib_ids, o->samples, o->seq, e);
    const bool self = o->calib && strcmp(o->calib, "self") == 0;
    char *path =
        o->calib && !self ? xstrdup(o->calib) : bundled(self ? "calibration-prompts.jsonl" : "calibration.jsonl", e);
    if (!path) return false;
    const ops_options backend = cmd_ops_options();
    const bool ok = self ? calib_data_self(d, &s, path, &backend, e)
                         : calib_data_file(d, &s, path, o->calib ? o->calib : "built-in corpus", e);
    free(path);
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

static bool calibrate(amax_table *t, char *what, size_t n, const options *o, const char *src, const plan *p, err *e) {
    calib_data data;
    calib_report report;
    progress bar = begin("calibrate");
    if (!load_data(&data, o, src, e)) return false;
    const bool head = p->has_mtp && p->recipe.mtp == MTP_NVFP4 && o->scales != MTP_GENEROUS;
    const calib_options opt = { .ops = cmd_ops_options(),
                                .max_ram_bytes = o->max_ram,
                                .mtp_steps = head ? 2 : 0,
                                .on_progress = on_layer,
                                .ctx = &bar,
                                .cancel = cmd_interrupt_all() };
    const bool ok = calib_run(t, &report, src, &data, &opt, e);
    snprintf(what, n, "%s", data.what);
    if (ok) {
        end(&bar, "%.0f tokens, %.0f tokens/s", (double)data.tokens, (double)data.tokens / report.seconds);
        report_coverage(&report);
        calib_report_free(&report);
    } else {
        wipe(&bar);
    }
    calib_data_free(&data);
    return ok;
}

/* Maxima by whatever way was asked for; t stays empty when none are needed. */
static bool get_amax(amax_table *t, char *what, size_t n, const options *o, const char *src, const plan *p, err *e) {
    if (o->no_calib) {
        snprintf(what, n, "none (data-free)");
        log_say("W-QUANT-DATA-FREE", "no calibration: every input_scale is 1.0 (blocks up to 2688 are covered, small "
                                     "activations lose precision)");
        return true;
    }
    if (o->amax) {
        snprintf(what, n, "maxima of %s", o->amax);
        if (!amax_load(t, o->amax, e)) return false;
    } else if (!needs_amax(p) && !o->save_amax) {
        snprintf(what, n, "none needed");
        return true;
    } else if (!calibrate(t, what, n, o, src, p, e)) {
        return false;
    }
    if (p->has_mtp && p->recipe.mtp == MTP_NVFP4 && !mtp_scales_fill(t, p, o->scales, o->factor, e)) return false;
    return !o->save_amax || amax_save(t, o->save_amax, e);
}

/* ---- the command ---- */

static bool put_text(const char *dir, const char *name, const buf *b, err *e) {
    char *path = path_join(dir, name);
    const bool ok = file_write_atomic(path, b->p, b->n, e);
    free(path);
    return ok;
}

static bool finish(const options *o, plan *p, const quantize_result *r, const char *partial, const provenance *from,
                   err *e) {
    buf json_text = { 0 }, card = { 0 };
    report_result(&json_text, p, r, from, true);
    report_card(&card, p, r, from);
    const bool ok = configs_write(partial, p, from, e) &&
                    put_text(partial, "nibble_quant_summary.json", &json_text, e) &&
                    put_text(partial, "QUANTIZATION.md", &card, e) && quantize_commit(partial, o->out, e);
    if (ok && cmd_common()->json) {
        fwrite(json_text.p, 1, json_text.n, stdout);
    } else if (ok) {
        buf text = { 0 };
        report_result(&text, p, r, from, false);
        fwrite(text.p, 1, text.n, stdout);
        buf_free(&text);
    }
    buf_free(&json_text);
    buf_free(&card);
    return ok;
}

/* Hours of calibration must not end at a file that cannot be written. */
static bool check_save(const options *o, err *e) {
    file_out probe = { 0 };
    const bool ok = !o->save_amax || file_out_open(&probe, o->save_amax, e);
    file_out_abort(&probe);
    return ok;
}

static bool export_model(options *o, plan *p, const char *src, err *e) {
    volatile const int *cancel = cmd_interrupt_all();
    char what[300], scales[40] = "";
    amax_table t = { 0 };
    quantize_result r = { 0 };
    char *partial = NULL;
    if (!quantize_check_dst(p, o->out, o->resume, e) || !check_save(o, e) ||
        !get_amax(&t, what, sizeof what, o, src, p, e))
        return false;
    if (p->has_mtp && p->recipe.mtp == MTP_NVFP4) {
        static const char *const names[] = { "calibrated", "borrow", "generous" };
        snprintf(scales, sizeof scales, o->scales == MTP_GENEROUS ? "%s:%g" : "%s",
                 o->no_calib ? "data-free" : names[o->scales], o->factor);
    }
    const provenance from = {
        .calibration = what, .mtp_scales = scales, .arith = o->arith ? "cpu" : "cuda", .algorithm = "max"
    };
    progress bar = begin("quantize");
    const quantize_options qo = { .arith = o->arith ? ARITH_CPU : ARITH_CUDA,
                                  .amax = o->no_calib || t.n == 0 ? NULL : &t,
                                  .threads = cmd_common()->threads,
                                  .isa = cmd_ops_options().isa,
                                  .resume = o->resume,
                                  .ranks = 1,
                                  .on_progress = on_bytes,
                                  .ctx = &bar,
                                  .cancel = cancel };
    bool ok = quantize_shards(&r, &partial, p, o->out, &qo, e);
    if (ok) {
        end(&bar, "%.2f GB read, %.2f GB written", (double)r.read_bytes / 1e9, (double)r.written_bytes / 1e9);
        ok = finish(o, p, &r, partial, &from, e);
    } else {
        wipe(&bar);
    }
    free(partial);
    quantize_result_free(&r);
    amax_free(&t);
    return ok;
}

static bool run(options *o, const char *src, err *e) {
    ckpt files;
    model_config config;
    plan p = { 0 };
    if (!ckpt_open(&files, src, e)) return false;
    const bool no_kv = o->no_calib && o->kv == KV_FP8;
    if (no_kv) log_say("W-QUANT-NO-KV", "--no-calib: no K and V maxima, so the export declares no KV cache format");
    const recipe r = { .preset = (recipe_preset)o->preset,
                       .kv = no_kv ? KV_NONE : (recipe_kv)o->kv,
                       .mtp = o->portable ? MTP_BF16 : (recipe_mtp)o->mtp,
                       .keep_qkv = o->keep_qkv,
                       .include = o->include.v,
                       .n_include = o->include.n,
                       .exclude = o->exclude.v,
                       .n_exclude = o->exclude.n };
    bool ok = config_read(&config, files.config, files.generation, src, e) && weights_check(&files, &config, e) &&
              plan_make(&p, &files, &config, &r, (uint64_t)o->shard_bytes, e);
    if (ok && o->dry_run) {
        buf text = { 0 };
        report_plan(&text, &p, cmd_common()->json);
        fwrite(text.p, 1, text.n, stdout);
        buf_free(&text);
    } else if (ok) {
        ok = export_model(o, &p, src, e);
    }
    if (p.n_modules) plan_free(&p);
    ckpt_close(&files);
    return ok;
}

int cmd_quantize(int argc, char **argv, err *e) {
    static const char *const kv_choices[] = { "fp8", "fp8-cast", "none", NULL },
                             *const mtp_choices[] = { "nvfp4", "bf16", "none", NULL },
                             *const arith_choices[] = { "cuda", "cpu", NULL };
    options o = { .seq = 512, .shard_bytes = 10000000000, .seed = 20260 };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Output" },
        { .type = ARG_STR,
          .name = "output",
          .key = 'o',
          .meta = "DST",
          .dst = &o.out,
          .help = "folder to make; it must not exist" },
        { .type = ARG_BYTES,
          .name = "shard-size",
          .meta = "BYTES",
          .dst = &o.shard_bytes,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "10 GB",
          .help = "limit of a shard's data" },
        { .type = ARG_FLAG,
          .name = "resume",
          .dst = &o.resume,
          .help = "continue a run that was stopped; the bytes are the same" },
        { .type = ARG_FLAG,
          .name = "dry-run",
          .dst = &o.dry_run,
          .help = "print formats, sizes and the decode bound; write nothing" },
        { .type = ARG_FLAG,
          .name = "portable",
          .dst = &o.portable,
          .help = "an export every stock loader takes: the draft head stays BF16" },
        { .type = ARG_GROUP, .help = "Formats" },
        { .type = ARG_ENUM,
          .name = "recipe",
          .dst = &o.preset,
          .choices = recipe_names,
          .help = "what is quantized, and how" },
        { .type = ARG_ENUM,
          .name = "kv",
          .dst = &o.kv,
          .choices = kv_choices,
          .help = "KV cache: calibrated scales, scale 1, or none declared" },
        { .type = ARG_ENUM, .name = "mtp", .dst = &o.mtp, .choices = mtp_choices, .help = "draft head" },
        { .type = ARG_STR,
          .name = "mtp-scales",
          .meta = "HOW",
          .dst = &o.mtp_text,
          .none = "calibrated",
          .help = "calibrated, borrow (K and V of the last attention layer) or generous[:F] (data-free)" },
        { .type = ARG_ENUM,
          .name = "arith",
          .dst = &o.arith,
          .choices = arith_choices,
          .help = "whose rounding to follow where ModelOpt's machines differ" },
        { .type = ARG_LIST,
          .name = "include",
          .meta = "GLOB",
          .dst = &o.include,
          .help = "also quantize modules whose name components match (repeatable)" },
        { .type = ARG_LIST,
          .name = "exclude",
          .meta = "GLOB",
          .dst = &o.exclude,
          .help = "keep modules whose name components match (repeatable)" },
        { .type = ARG_FLAG, .name = "keep-qkv", .dst = &o.keep_qkv, .help = "keep q, k and v of full attention" },
        { .type = ARG_GROUP, .help = "Calibration" },
        { .type = ARG_STR,
          .name = "calib",
          .meta = "FILE",
          .dst = &o.calib,
          .none = "the built-in corpus",
          .help = "text or JSONL (messages or text), or `self`: the model writes its own" },
        { .type = ARG_STR,
          .name = "calib-ids",
          .meta = "FILE",
          .dst = &o.calib_ids,
          .help = "token ids as JSON; needs no tokenizer" },
        { .type = ARG_FLAG,
          .name = "no-calib",
          .dst = &o.no_calib,
          .help = "data-free: input_scale 1.0, no KV scales" },
        { .type = ARG_INT,
          .name = "samples",
          .meta = "N",
          .dst = &o.samples,
          .lo = 1,
          .hi = INT32_MAX,
          .none = "all",
          .help = "at most N sequences" },
        { .type = ARG_INT,
          .name = "seq",
          .meta = "N",
          .dst = &o.seq,
          .lo = 4,
          .hi = 1 << 24,
          .help = "tokens per sequence" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &o.seed,
          .given = &o.has_seed,
          .lo = 0,
          .hi = INT64_MAX,
          .help = "of `--calib self`: same seed, same text" },
        { .type = ARG_STR,
          .name = "amax",
          .meta = "FILE",
          .dst = &o.amax,
          .help = "maxima saved earlier instead of calibrating" },
        { .type = ARG_STR,
          .name = "save-amax",
          .meta = "FILE",
          .dst = &o.save_amax,
          .help = "save the maxima (safetensors)" },
        { .type = ARG_BYTES,
          .name = "max-ram",
          .meta = "BYTES",
          .dst = &o.max_ram,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "no limit",
          .help = "hidden states beyond this go to disk, weights leave memory after their layer" },
    };
    const arg_spec spec = { .usage = "quantize [options] SRC -o DST",
                            .about = "Write an NVFP4 checkpoint: ModelOpt's bytes where ModelOpt defines them, and the "
                                     "draft head it leaves out.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .min_positional = 0,
                            .max_positional = 1,
                            .examples =
                                "  nibble quantize Qwen3.6-35B-A3B -o Qwen3.6-35B-A3B-NVFP4\n"
                                "  nibble quantize SRC --dry-run --recipe nvfp4-experts\n"
                                "  nibble quantize SRC -o DST --calib chats.jsonl --save-amax amax.safetensors\n" };
    arg_strings pos = { 0 };
    bool done;
    const char *src;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && check(&o, e) && cmd_model_dir(&src, &pos, 0, e) &&
        !run(&o, src, e))
        CHECK(e->kind != ERR_NONE, "a failure without a reason");
    arg_strings_free(&pos);
    arg_strings_free(&o.include);
    arg_strings_free(&o.exclude);
    return 0;
}
