/* nibble requant-mtp: the draft head of an existing export, from the model it was made of. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "cmd/calibration.h"
#include "cmd/cmd.h"
#include "quant/dist.h"
#include "quant/report.h"
#include "quant/requant.h"

typedef struct options {
    const char *source, *out;
    calib_args c;
    int mtp, arith, algorithm;
    bool dry_run, has_arith, has_algorithm;
} options;

static bool check(const options *o, calib_args *c, err *e) {
    if (!o->source && o->mtp != MTP_NONE)
        return fail(e, ERR_USAGE, "E-USAGE", "requant-mtp: --source SRC is needed (the BF16 original)");
    if (c->mtp_text && o->mtp != MTP_NVFP4)
        return fail(e, ERR_USAGE, "E-USAGE",
                    "requant-mtp: --mtp-scales is for --mtp nvfp4; other heads have no scales");
    return calib_args_check(c, "requant-mtp", e);
}

/* ---- maxima ---- */

/* Generous and borrowed scales need only what the export's own scales tell, unless a calibration is asked for. */
static bool from_export(amax_table *t, const options *o, const requant *r, const plan *p, quant_arith arith) {
    err why = { 0 };
    if (o->c.scales != MTP_GENEROUS || o->c.calib || o->c.calib_ids) return false;
    mtp_scales_from_export(t, p, &r->dst, r->prefix, false, arith);
    return mtp_scales_fill(t, p, o->c.scales, o->c.factor, &why);
}

static bool get_amax(amax_table *t, char *what, size_t n, const options *o, const requant *r, const plan *p,
                     quant_arith arith, err *e) {
    if (!plan_needs_amax(p)) {
        snprintf(what, n, "none needed");
        return true;
    }
    if (o->c.amax) {
        snprintf(what, n, "maxima of %s", o->c.amax);
        if (!amax_load(t, o->c.amax, e)) return false;
    } else if (from_export(t, o, r, p, arith)) {
        snprintf(what, n, "the export's own scales");
        return true;
    } else {
        if (!calib_args_check_save(&o->c, e) ||
            !calibrate(t, what, n, &o->c, o->source, o->c.scales != MTP_GENEROUS, e))
            return false;
        if (o->c.scales != MTP_CALIBRATED) mtp_scales_from_export(t, p, &r->dst, r->prefix, true, arith);
    }
    return mtp_scales_fill(t, p, o->c.scales, o->c.factor, e) && (!o->c.save_amax || amax_save(t, o->c.save_amax, e));
}

/* ---- report ---- */

typedef struct report {
    const options *o;
    const requant *r;
    const plan *head; /* NULL: none */
    const provenance *from;
    buf json;
} report;

static const char *mtp_name(const report *x) {
    return !x->head ? "none" : x->head->recipe.mtp == MTP_NVFP4 ? "nvfp4" : "bf16";
}

static void files_json(buf *b, const char *key, const requant *r, requant_fate fate) {
    buf_printf(b, ",\"%s\":[", key);
    for (int s = 0, n = 0; s < r->dst.shard_count; s++)
        if (r->fate[s] == fate) {
            if (n++) buf_byte(b, ',');
            json_write_str(b, str_of(strrchr(r->dst.shards[s].path, '/') + 1));
        }
    buf_byte(b, ']');
}

/* What this run found and did; not part of the export's own record, which is the same whatever was there before. */
static void run_json(buf *b, const report *x) {
    buf_printf(b, "\"dry_run\":%s,\"export\":", x->o->dry_run ? "true" : "false");
    json_write_str(b, str_of(x->o->out && !x->o->dry_run ? x->o->out : x->r->dst.dir));
    buf_puts(b, ",\"source\":");
    if (x->o->source)
        json_write_str(b, str_of(x->o->source));
    else
        buf_puts(b, "null");
    buf_printf(b, ",\"before\":\"%s\",\"bytes_before\":%llu", x->r->had, (unsigned long long)x->r->head_bytes);
    files_json(b, "rewritten", x->r, FATE_REWRITE);
    files_json(b, "removed", x->r, FATE_REMOVE);
    buf_byte(b, ',');
}

static void report_json(buf *b, const report *x, const quantize_result *q, bool record) {
    buf_puts(b, "{\"schema\":\"nibble.requant-mtp/1\",");
    if (!record) run_json(b, x);
    buf_printf(b, "\"mtp\":\"%s\",\"mtp_scales\":\"%s\",\"arith\":\"%s\",\"algorithm\":\"%s\",\"calibration\":",
               mtp_name(x), x->from->mtp_scales, x->from->arith, x->from->algorithm);
    json_write_str(b, str_of(x->from->calibration));
    buf_printf(b, ",\"bytes_after\":%llu,\"file\":", (unsigned long long)(x->head ? x->head->total_bytes : 0));
    if (x->head)
        json_write_str(b, str_of(x->head->head_file));
    else
        buf_puts(b, "null");
    if (x->head) {
        buf_byte(b, ',');
        report_classes(b, x->head, q, true);
    }
    buf_puts(b, "}\n");
}

static void files_text(buf *b, const char *what, const requant *r, requant_fate fate) {
    for (int s = 0; s < r->dst.shard_count; s++)
        if (r->fate[s] == fate) buf_printf(b, "%s %s\n", what, strrchr(r->dst.shards[s].path, '/') + 1);
}

static void report_text(buf *b, const report *x, const quantize_result *q) {
    if (x->head) {
        report_classes(b, x->head, q, false);
        buf_byte(b, '\n');
    }
    buf_printf(b, "draft head: %s, %.2f MB -> %s, %.2f MB", x->r->had, (double)x->r->head_bytes / 1e6, mtp_name(x),
               x->head ? (double)x->head->total_bytes / 1e6 : 0.0);
    if (x->head) buf_printf(b, " in %s", x->head->head_file);
    buf_byte(b, '\n');
    if (x->from->mtp_scales[0]) buf_printf(b, "scales: %s; maxima: %s\n", x->from->mtp_scales, x->from->calibration);
    files_text(b, "without the old head:", x->r, FATE_REWRITE);
    files_text(b, x->o->out ? "left out, held only the old head:" : "replaced, held only the old head:", x->r,
               FATE_REMOVE);
}

static void print(const report *x, const quantize_result *q) {
    buf b = { 0 };
    if (cmd_common()->json)
        report_json(&b, x, q, false);
    else
        report_text(&b, x, q);
    fwrite(b.p, 1, b.n, stdout);
    buf_free(&b);
}

static void on_head(void *ctx, const quantize_result *q) {
    report *x = ctx;
    report_json(&x->json, x, q, true);
}

/* ---- the command ---- */

static bool replace(report *x, const provenance *from, const amax_table *t, quant_arith arith,
                    quant_algorithm algorithm, err *e) {
    quantize_result q;
    const requant_job job = { .head = x->head,
                              .from = from,
                              .options = { .arith = arith,
                                           .algorithm = algorithm,
                                           .amax = t,
                                           .threads = cmd_common()->threads,
                                           .isa = cmd_ops_options().isa,
                                           .ranks = 1,
                                           .cancel = cmd_interrupt_all() },
                              .out = x->o->out,
                              .summary = &x->json,
                              .on_head = on_head,
                              .ctx = x };
    const bool ok = requant_run(&q, x->r, &job, e);
    if (ok) print(x, &q);
    quantize_result_free(&q);
    buf_free(&x->json);
    return ok;
}

static bool work(const options *o, const requant *r, const plan *head, err *e) {
    char what[300] = "none needed", scales[40] = "";
    const quant_arith arith = o->has_arith ? (o->arith ? ARITH_CPU : ARITH_CUDA) : r->arith;
    const quant_algorithm algorithm = o->has_algorithm ? (quant_algorithm)o->algorithm : r->algorithm;
    amax_table t = { 0 };
    const bool nvfp4 = head && head->recipe.mtp == MTP_NVFP4;
    if (nvfp4) calib_args_scales_text(scales, sizeof scales, &o->c);
    const provenance from = { .calibration = what,
                              .mtp_scales = scales,
                              .arith = arith == ARITH_CPU ? "cpu" : "cuda",
                              .algorithm = quant_algorithms[algorithm] };
    report x = { .o = o, .r = r, .head = head, .from = &from };
    if (o->dry_run) {
        snprintf(what, sizeof what, "not looked at");
        print(&x, NULL);
        return true;
    }
    const bool ok = requant_check_target(r, o->out, e) &&
                    (!nvfp4 || get_amax(&t, what, sizeof what, o, r, head, arith, e)) &&
                    replace(&x, &from, &t, arith, algorithm, e);
    amax_free(&t);
    return ok;
}

static bool with_source(const options *o, const requant *r, err *e) {
    ckpt files;
    model_config config;
    plan p = { 0 };
    if (!o->source) return work(o, r, NULL, e); /* taking the head out needs none */
    if (!ckpt_open(&files, o->source, e)) return false;
    bool ok =
        config_read(&config, files.config, files.generation, o->source, e) && requant_match(r, &files, &config, e);
    if (ok && r->recipe.mtp != MTP_NONE)
        ok = plan_make_head(&p, &files, &config, &r->recipe, r->head_file, e) && weights_check(&files, &config, e);
    ok = ok && work(o, r, r->recipe.mtp == MTP_NONE ? NULL : &p, e);
    if (p.n_tensors) plan_free(&p);
    ckpt_close(&files);
    return ok;
}

static bool run(const options *o, const char *dst, err *e) {
    requant r;
    if (!requant_open(&r, dst, (recipe_mtp)o->mtp, o->dry_run, e)) return false;
    const bool ok = with_source(o, &r, e);
    requant_close(&r);
    return ok;
}

int cmd_requant_mtp(int argc, char **argv, err *e) {
    static const char *const mtp_choices[] = { "nvfp4", "bf16", "none", NULL }, *const arith_choices[] = { "cuda",
                                                                                                           "cpu",
                                                                                                           NULL };
    options o = { 0 };
    enum { OWN = 8 };
    arg_opt opts[OWN + CALIB_OPTIONS] = {
        { .type = ARG_GROUP, .help = "Draft head" },
        { .type = ARG_STR,
          .name = "source",
          .meta = "SRC",
          .dst = &o.source,
          .help = "the BF16 model that the export was made of: its head is taken" },
        { .type = ARG_ENUM,
          .name = "mtp",
          .dst = &o.mtp,
          .choices = mtp_choices,
          .help = "what the export's head becomes" },
        calib_args_mtp_option(&o.c),
        { .type = ARG_ENUM,
          .name = "arith",
          .dst = &o.arith,
          .given = &o.has_arith,
          .choices = arith_choices,
          .none = "as the export says, else cuda",
          .help = "whose rounding to follow where ModelOpt's machines differ" },
        { .type = ARG_ENUM,
          .name = "algorithm",
          .dst = &o.algorithm,
          .given = &o.has_algorithm,
          .choices = quant_algorithms,
          .none = "as the export says, else max",
          .help = "how block scales are found" },
        { .type = ARG_STR,
          .name = "output",
          .key = 'o',
          .meta = "OUT",
          .dst = &o.out,
          .none = "change DST",
          .help = "make a new export instead; files that do not change are hard links where possible" },
        { .type = ARG_FLAG, .name = "dry-run", .dst = &o.dry_run, .help = "say what would be done; write nothing" },
    };
    calib_args_options(opts + OWN, &o.c);
    const arg_spec spec = {
        .usage = "requant-mtp [options] DST --source SRC",
        .about = "Add, replace or take out the draft head of an existing export; no other tensor changes. "
                 "A run that is stopped leaves the export as it was, or is finished by the next run.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .min_positional = 1,
        .max_positional = 1,
        .examples = "  nibble requant-mtp Qwen3.6-35B-A3B-NVFP4 --source Qwen3.6-35B-A3B\n"
                    "  nibble requant-mtp DST --source SRC --mtp-scales generous --dry-run\n"
                    "  nibble requant-mtp DST --source SRC --mtp bf16 -o DST-portable\n"
    };
    arg_strings pos = { 0 };
    bool done;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && dist_alone("requant-mtp", e) && check(&o, &o.c, e) &&
        !run(&o, pos.v[0], e))
        CHECK(e->kind != ERR_NONE, "a failure without a reason");
    arg_strings_free(&pos);
    return 0;
}
