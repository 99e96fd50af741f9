/* nibble quantize: BF16 checkpoint in, NVFP4 checkpoint out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "cmd/calibration.h"
#include "cmd/cmd.h"
#include "cmd/quantize_kl.h"
#include "quant/dist.h"
#include "quant/report.h"

typedef struct options {
    const char *out;
    calib_args c;
    int preset, kv, mtp, arith, algorithm;
    bool no_calib, keep_qkv, resume, dry_run, portable, report_kl;
    bool has_preset, has_kv, has_mtp; /* given */
    arg_strings include, exclude;
    int64_t shard_bytes;
    dist d;        /* alone, or one of several processes */
    char *partial; /* the folder they share */
} options;

/* ---- options ---- */

static bool check(options *o, err *e) {
    if (!o->out && !o->dry_run) return fail(e, ERR_USAGE, "E-USAGE", "quantize: -o DST is needed");
    if (o->portable && (o->has_preset || o->has_kv || o->has_mtp))
        return fail(e, ERR_USAGE, "E-USAGE", "quantize: --portable chooses --recipe, --kv and --mtp itself");
    if (o->no_calib && (o->c.calib || o->c.calib_ids || o->c.amax))
        return fail(e, ERR_USAGE, "E-USAGE",
                    "quantize: --calib, --calib-ids, --amax and --no-calib exclude one another");
    if (o->no_calib && o->c.mtp_text)
        return fail(e, ERR_USAGE, "E-USAGE", "quantize: --mtp-scales needs maxima of some kind; --no-calib has none");
    if (o->c.save_amax && o->no_calib) return fail(e, ERR_USAGE, "E-USAGE", "quantize: --save-amax needs calibration");
    return calib_args_check(&o->c, "quantize", e);
}

/* ---- calibration ---- */

/* Is the draft head itself to be measured? */
static bool wants_head(const plan *p, const options *o) {
    return p->has_mtp && p->recipe.mtp == MTP_NVFP4 && o->c.scales != MTP_GENEROUS;
}

/* Maxima by whatever way was asked for; t stays empty when none are needed. */
static bool get_amax(amax_table *t, char *what, size_t n, const options *o, const char *src, const plan *p, err *e) {
    if (o->no_calib) {
        snprintf(what, n, "none (data-free)");
        log_say("W-QUANT-DATA-FREE", "no calibration: every input_scale is 1.0 (blocks up to 2688 are covered, small "
                                     "activations lose precision)");
        return true;
    }
    if (o->c.amax) {
        snprintf(what, n, "maxima of %s", o->c.amax);
        if (!amax_load(t, o->c.amax, e)) return false;
    } else if (!plan_needs_amax(p) && !o->c.save_amax) {
        snprintf(what, n, "none needed");
        return true;
    } else if (!calibrate(t, what, n, &o->c, src, wants_head(p, o), e)) {
        return false;
    }
    if (p->has_mtp && p->recipe.mtp == MTP_NVFP4 && !mtp_scales_fill(t, p, o->c.scales, o->c.factor, e)) return false;
    return !o->c.save_amax || o->d.rank > 0 || amax_save(t, o->c.save_amax, e);
}

/* ---- the command ---- */

static bool put_text(const char *dir, const char *name, const buf *b, err *e) {
    char *path = path_join(dir, name);
    const bool ok = file_write_atomic(path, b->p, b->n, e);
    free(path);
    return ok;
}

static bool finish(const options *o, plan *p, const quantize_result *r, const char *partial, const provenance *made,
                   const quantize_options *qo, const char *src, err *e) {
    kl_figures kl[2] = { 0 };
    provenance told = *made;
    const provenance *from = &told;
    if (!configs_write(partial, p, from, e) ||
        (o->report_kl && !quantize_kl(&kl[0], &kl[1], p, src, partial, o->out, qo, from, e)))
        return false;
    if (o->report_kl) {
        told.kl = &kl[0];
        told.kl_max = o->algorithm == QUANT_MAX ? NULL : &kl[1];
    }
    buf json_text = { 0 }, card = { 0 };
    quantize_result timeless = *r;
    timeless.seconds = 0;
    report_result(&json_text, p, &timeless, from, true);
    report_card(&card, p, r, from);
    const bool ok = put_text(partial, "nibble_quant_summary.json", &json_text, e) &&
                    put_text(partial, "QUANTIZATION.md", &card, e) && quantize_commit(partial, o->out, e);
    if (ok) {
        buf text = { 0 };
        report_result(&text, p, r, from, cmd_common()->json);
        fwrite(text.p, 1, text.n, stdout);
        buf_free(&text);
    }
    buf_free(&json_text);
    buf_free(&card);
    return ok;
}

/* Several processes need the folder before the work, to see that it is one; alone, it can wait. */
static bool check_destination(options *o, const plan *p, err *e) {
    bool ok = o->d.on ? quantize_folder(&o->partial, p, o->out, o->d.rank, o->resume, e)
                      : quantize_check_dst(p, o->out, o->resume, e);
    ok = ok && (o->d.rank > 0 || calib_args_check_save(&o->c, e));
    return dist_share(&o->d, o->partial, ok, e);
}

/* Results of all ranks on all of them. */
static void merge_results(dist *d, quantize_result *r, const plan *p) {
    int64_t sums[] = { (int64_t)r->read_bytes, (int64_t)r->written_bytes, r->resumed_tasks };
    if (!d->on) return;
    dist_union(d, r->modules, (size_t)p->n_modules * sizeof *r->modules);
    dist_sum(d, sums, ARRAY_LEN(sums));
    dist_max(d, &r->seconds);
    r->read_bytes = (uint64_t)sums[0];
    r->written_bytes = (uint64_t)sums[1];
    r->resumed_tasks = (int)sums[2];
    if (d->ranks > 1) quantize_count_zeros(r, p);
}

static bool export_model(options *o, plan *p, const char *src, err *e) {
    volatile const int *cancel = cmd_interrupt_all();
    char what[300], scales[40] = "";
    amax_table t = { 0 };
    quantize_result r = { 0 };
    char *partial = NULL;
    if (!check_destination(o, p, e) || !get_amax(&t, what, sizeof what, o, src, p, e)) return false;
    if (p->has_mtp && p->recipe.mtp == MTP_NVFP4) {
        if (o->no_calib)
            snprintf(scales, sizeof scales, "data-free");
        else
            calib_args_scales_text(scales, sizeof scales, &o->c);
    }
    const provenance from = { .calibration = what,
                              .mtp_scales = scales,
                              .arith = o->arith ? "cpu" : "cuda",
                              .algorithm = quant_algorithms[o->algorithm] };
    progress bar = progress_begin("quantize");
    bar.d = &o->d;
    const quantize_options qo = { .arith = o->arith ? ARITH_CPU : ARITH_CUDA,
                                  .algorithm = (quant_algorithm)o->algorithm,
                                  .amax = o->no_calib || t.n == 0 ? NULL : &t,
                                  .threads = cmd_common()->threads,
                                  .isa = cmd_ops_options().isa,
                                  .resume = o->resume,
                                  .rank = o->d.rank,
                                  .ranks = o->d.ranks,
                                  .partial = o->partial,
                                  .on_progress = progress_bytes,
                                  .ctx = &bar,
                                  .cancel = cancel };
    bool ok = quantize_shards(&r, &partial, p, o->out, &qo, e);
    if (ok) {
        merge_results(&o->d, &r, p);
        dist_unshare(&o->d);
        progress_end(&bar, "%.2f GB read, %.2f GB written", (double)r.read_bytes / 1e9, (double)r.written_bytes / 1e9);
        ok = o->d.rank > 0 || finish(o, p, &r, partial, &from, &qo, src, e);
    } else {
        progress_wipe(&bar);
    }
    free(partial);
    quantize_result_free(&r);
    amax_free(&t);
    return ok;
}

/* What decides the bytes besides the weights, as far as the plan knows it. */
static uint64_t plan_hash(const plan *p, const options *o) {
    buf b = { 0 };
    for (int i = 0; i < p->n_shards; i++) buf_puts(&b, p->shards[i].header);
    buf_printf(&b, "|%d %d %d %d %g %d", o->arith, o->algorithm, o->resume, o->c.scales, o->c.factor, o->no_calib);
    const uint64_t h = str_hash(buf_view(&b));
    buf_free(&b);
    return h;
}

static bool run(options *o, const char *src, err *e) {
    ckpt files;
    model_config config;
    plan p = { 0 };
    if (!dist_agree(&o->d, ckpt_open(&files, src, e), e)) return false;
    const bool no_kv = o->no_calib && o->kv == KV_FP8 && !o->portable;
    if (no_kv) log_say("W-QUANT-NO-KV", "--no-calib: no K and V maxima, so the export declares no KV cache format");
    recipe r = { .preset = (recipe_preset)o->preset,
                 .kv = no_kv || o->portable ? KV_NONE : (recipe_kv)o->kv,
                 .mtp = o->portable ? MTP_BF16 : (recipe_mtp)o->mtp,
                 .keep_qkv = o->keep_qkv,
                 .include = o->include.v,
                 .n_include = o->include.n,
                 .exclude = o->exclude.v,
                 .n_exclude = o->exclude.n };
    bool ok = config_read(&config, files.config, files.generation, src, e) && weights_check(&files, &config, e);
    if (ok && o->portable) r.preset = config.is_moe ? RECIPE_NVFP4_EXPERTS : RECIPE_NVFP4_MLP;
    ok = ok && plan_make(&p, &files, &config, &r, (uint64_t)o->shard_bytes, e);
    ok = dist_agree(&o->d, ok, e) && dist_same(&o->d, plan_hash(&p, o), "plan", e);
    if (ok && o->dry_run) {
        buf text = { 0 };
        report_plan(&text, &p, cmd_common()->json);
        if (o->d.rank == 0) fwrite(text.p, 1, text.n, stdout);
        buf_free(&text);
    } else if (ok) {
        ok = export_model(o, &p, src, e);
    }
    if (p.n_modules) plan_free(&p);
    ckpt_close(&files);
    return ok;
}

static void drop_line(void *ctx, const char *id, const char *line) { (void)ctx, (void)id, (void)line; }

/* A failure of one of several processes ends them all; alone, main says what happened. */
static void leave(options *o, const err *e) {
    if (e->kind != ERR_NONE && o->d.on) {
        dist_wait_turn(&o->d, e->kind);
        if (o->partial) rmdir(o->partial); /* when nothing is in it, there is nothing to resume */
        fprintf(stderr, "nibble: %s: rank %d of %d: %s\n", e->id, o->d.rank, o->d.ranks, e->msg);
        dist_abort(&o->d, err_exit_code(e->kind));
    }
    dist_close(&o->d);
    free(o->partial);
}

int cmd_quantize(int argc, char **argv, err *e) {
    static const char *const kv_choices[] = { "fp8", "fp8-cast", "none", NULL },
                             *const mtp_choices[] = { "nvfp4", "bf16", "none", NULL },
                             *const arith_choices[] = { "cuda", "cpu", NULL };
    options o = { .shard_bytes = 10000000000 };
    enum { OWN = 17 };
    arg_opt opts[OWN + CALIB_OPTIONS + 1] = {
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
          .name = "report-kl",
          .dst = &o.report_kl,
          .help = "also run source and export over a few texts and report the KL divergence of their logits" },
        { .type = ARG_FLAG,
          .name = "portable",
          .dst = &o.portable,
          .help = "what every engine with NVFP4 takes: only routed experts (or the MLP) are NVFP4, BF16 draft head and "
                  "KV" },
        { .type = ARG_GROUP, .help = "Formats" },
        { .type = ARG_ENUM,
          .name = "recipe",
          .dst = &o.preset,
          .given = &o.has_preset,
          .choices = recipe_names,
          .help = "what is quantized, and how" },
        { .type = ARG_ENUM,
          .name = "kv",
          .dst = &o.kv,
          .given = &o.has_kv,
          .choices = kv_choices,
          .help = "KV cache: calibrated scales, scale 1, or none declared" },
        { .type = ARG_ENUM,
          .name = "mtp",
          .dst = &o.mtp,
          .given = &o.has_mtp,
          .choices = mtp_choices,
          .help = "draft head" },
        calib_args_mtp_option(&o.c),
        { .type = ARG_ENUM,
          .name = "algorithm",
          .dst = &o.algorithm,
          .choices = quant_algorithms,
          .help =
              "how block scales of NVFP4 weights are chosen: by the maximum (ModelOpt's default), or by least error" },
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
    };
    calib_args_options(opts + OWN, &o.c);
    opts[OWN + CALIB_OPTIONS] = (arg_opt){
        .type = ARG_FLAG, .name = "no-calib", .dst = &o.no_calib, .help = "data-free: input_scale 1.0, no KV scales"
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
    bool done = false;
    const char *src = NULL;
    if (!dist_open(&o.d, e)) return 0;
    o.c.d = &o.d;
    if (o.d.rank > 0) log_set_sink(drop_line, NULL); /* rank 0 says it */
    const bool ok =
        cmd_parse(&spec, argc, argv, &pos, &done, e) && (done || (check(&o, e) && cmd_model_dir(&src, &pos, 0, e)));
    if (dist_agree(&o.d, ok, e) && !done && !run(&o, src, e)) CHECK(e->kind != ERR_NONE, "a failure without a reason");
    leave(&o, e);
    arg_strings_free(&pos);
    arg_strings_free(&o.include);
    arg_strings_free(&o.exclude);
    return 0;
}
