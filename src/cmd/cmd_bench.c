/* nibble bench: options of decode, prefill and kernels. */
#include <stdlib.h>
#include <string.h>

#include "cmd/bench.h"

bool bench_read_list(bench_list *out, const char *option, const char *text, int lo, int hi, err *e) {
    *out = (bench_list){ .n = 0 };
    for (const char *at = text;; at++) {
        char *end = NULL;
        const long v = strtol(at, &end, 10);
        if (*at < '0' || *at > '9' || v < lo || v > hi || (*end && *end != ',') || out->n == BENCH_MAX_LIST)
            return fail(e, ERR_USAGE, "E-USAGE", "--%s: '%.80s' is no list of at most %d numbers within %d and %d",
                        option, text, BENCH_MAX_LIST, lo, hi);
        for (int i = 0; i < out->n; i++)
            if (out->v[i] == v) return fail(e, ERR_USAGE, "E-USAGE", "--%s: %ld stands there twice", option, v);
        out->v[out->n++] = (int)v;
        at = end;
        if (!*at) return true;
    }
}

/* "0.9,0.8": of the first drafts; the last number holds for those behind it. */
static bool read_accept(bench_options *o, const char *text, err *e) {
    const char *at = text;
    int n = 0;
    for (; n < ENGINE_MAX_DRAFT; at++) {
        char *end = NULL;
        const double p = strtod(at, &end);
        if (end == at || !(p >= 0 && p <= 1) || (*end && *end != ',')) break;
        o->accept[n++] = p;
        at = end;
        if (!*at) {
            for (; n < ENGINE_MAX_DRAFT; n++) o->accept[n] = p;
            return o->has_accept = true;
        }
    }
    return fail(e, ERR_USAGE, "E-USAGE", "--accept: '%.80s' is no list of at most %d numbers within 0 and 1", text,
                ENGINE_MAX_DRAFT);
}

typedef struct lists {
    const char *frontier, *depth, *batch, *accept, *prompt, *rows;
} lists;

typedef enum bench_kind { BENCH_DECODE, BENCH_PREFILL, BENCH_KERNELS, BENCH_KINDS } bench_kind;

static const struct {
    const char *name;
    int (*run)(const bench_options *o, err *e);
} kinds[BENCH_KINDS] = {
    { "decode", bench_decode },
    { "prefill", bench_prefill },
    { "kernels", bench_kernels },
};

/* An option that another benchmark has is a misunderstanding, not something to pass over. */
static bool check_options(bench_options *o, const lists *l, bench_kind k, bool has_tokens, bool has_ms, err *e) {
    const struct {
        const char *name;
        bool given;
        bench_kind of;
    } own[] = { { "frontier", l->frontier, BENCH_DECODE },
                { "depth", l->depth, BENCH_DECODE },
                { "batch", l->batch, BENCH_DECODE },
                { "adaptive", o->adaptive, BENCH_DECODE },
                { "accept", l->accept, BENCH_DECODE },
                { "max-tokens", has_tokens, BENCH_DECODE },
                { "prompt", l->prompt, BENCH_PREFILL },
                { "rows", l->rows, BENCH_KERNELS },
                { "ms", has_ms, BENCH_KERNELS } };
    for (size_t i = 0; i < ARRAY_LEN(own); i++)
        if (own[i].given && own[i].of != k)
            return fail(e, ERR_USAGE, "E-USAGE", "bench %s: --%s belongs to bench %s", kinds[k].name, own[i].name,
                        kinds[own[i].of].name);
    if (o->layers && o->synthetic < 0)
        return fail(e, ERR_USAGE, "E-USAGE", "bench %s: --layers goes with --synthetic", kinds[k].name);
    if (!bench_read_list(&o->frontier, "frontier",
                         l->frontier ? l->frontier
                         : l->batch  ? "0"
                                     : "0,1024",
                         0, 1 << 20, e) ||
        !bench_read_list(&o->depth, "depth", l->depth ? l->depth : "0,2", 0, ENGINE_MAX_DRAFT, e) ||
        (l->batch && !bench_read_list(&o->batch, "batch", l->batch, 1, 512, e)) ||
        (l->accept && !read_accept(o, l->accept, e)) ||
        !bench_read_list(&o->prompt, "prompt", l->prompt ? l->prompt : "128,512", 1, 1 << 20, e) ||
        !bench_read_list(&o->rows, "rows", l->rows ? l->rows : "1,3,4,8,16,128,512", 1, 1 << 14, e))
        return false;
    for (int i = 1; i < o->frontier.n; i++)
        if (o->frontier.v[i] < o->frontier.v[i - 1])
            return fail(e, ERR_USAGE, "E-USAGE", "--frontier: contexts grow, so write them in order");
    int deepest = 0;
    for (int i = 0; i < o->depth.n; i++) deepest = o->depth.v[i] > deepest ? o->depth.v[i] : deepest;
    if (o->batch.n > 0 && o->frontier.n > 1)
        return fail(e, ERR_USAGE, "E-USAGE", "bench decode: --batch takes one --frontier");
    if (o->adaptive && (o->batch.n == 0 || deepest == 0))
        return fail(e, ERR_USAGE, "E-USAGE",
                    "bench decode: --adaptive goes with --batch and drafts (--depth 1 and more)");
    if (o->has_accept && deepest == 0)
        return fail(e, ERR_USAGE, "E-USAGE", "bench decode: --accept goes with drafts (--depth 1 and more)");
    return true;
}

static bool find_kind(bench_kind *k, const arg_strings *pos, err *e) {
    const char *names[BENCH_KINDS];
    for (int i = 0; i < BENCH_KINDS; i++) {
        names[i] = kinds[i].name;
        if (pos->n > 0 && strcmp(pos->v[0], names[i]) == 0) return *k = (bench_kind)i, true;
    }
    if (pos->n == 0) return fail(e, ERR_USAGE, "E-USAGE", "bench: decode, prefill or kernels?");
    const char *near = args_nearest(pos->v[0], names, BENCH_KINDS);
    return fail(e, ERR_USAGE, "E-USAGE", "bench: '%.40s' is none of decode, prefill, kernels%s%s%s", pos->v[0],
                near ? "; did you mean `" : "", near ? near : "", near ? "`?" : "");
}

int cmd_bench(int argc, char **argv, err *e) {
    bench_options o = { .synthetic = -1, .repeat = 5, .tokens = 32, .ms = 200 };
    lists l = { 0 };
    bool has_tokens = false, has_ms = false;
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Model" },
        { .type = ARG_ENUM,
          .name = "synthetic",
          .dst = &o.synthetic,
          .choices = mock_presets,
          .none = "",
          .help =
              "made-up NVFP4 weights of real shape, built in memory; full: Qwen3.6-35B-A3B, wide4: 4 layers of it" },
        { .type = ARG_INT,
          .name = "layers",
          .meta = "N",
          .dst = &o.layers,
          .lo = 1,
          .hi = CONFIG_MAX_LAYERS,
          .none = "the preset's",
          .help = "with --synthetic: fewer or more layers (a multiple of 4)" },
        { .type = ARG_ENUM, .name = "kv", .dst = &o.kv, .choices = cmd_kv_choices, .help = "KV cache type" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &o.act,
          .choices = cmd_act_choices,
          .help = "inputs of NVFP4 Linears; auto is as exported" },
        { .type = ARG_ENUM,
          .name = "head",
          .dst = &o.head,
          .choices = cmd_head_choices,
          .help = "how the output head is read" },
        { .type = ARG_STR,
          .name = "draft-head",
          .meta = "full|N",
          .dst = &o.draft_head,
          .none = "65536 of a large vocabulary",
          .help = "rows of the NVFP4 head that drafts come from" },
        { .type = ARG_GROUP, .help = "Measurement" },
        { .type = ARG_STR,
          .name = "frontier",
          .meta = "LIST",
          .dst = &l.frontier,
          .none = "0,1024",
          .help = "decode: tokens of context" },
        { .type = ARG_STR,
          .name = "depth",
          .meta = "LIST",
          .dst = &l.depth,
          .none = "0,2",
          .help = "decode: drafts per round" },
        { .type = ARG_STR,
          .name = "batch",
          .meta = "LIST",
          .dst = &l.batch,
          .none = "one sequence alone",
          .help = "decode: sequences at once, through the loop that serves requests" },
        { .type = ARG_FLAG,
          .name = "adaptive",
          .dst = &o.adaptive,
          .help = "decode --batch: besides, with the drafts that the loop chooses, up to the most of --depth" },
        { .type = ARG_STR,
          .name = "accept",
          .meta = "P,..",
          .dst = &l.accept,
          .none = "as verified",
          .help =
              "decode: count draft i as accepted with its probability, whatever the model drew (simulated); the last "
              "holds for those behind it" },
        { .type = ARG_INT,
          .name = "max-tokens",
          .key = 'n',
          .meta = "N",
          .dst = &o.tokens,
          .given = &has_tokens,
          .lo = 2,
          .hi = 1 << 16,
          .help = "decode: tokens of a run" },
        { .type = ARG_STR,
          .name = "prompt",
          .meta = "LIST",
          .dst = &l.prompt,
          .none = "128,512",
          .help = "prefill: prompt lengths" },
        { .type = ARG_STR,
          .name = "rows",
          .meta = "LIST",
          .dst = &l.rows,
          .none = "1,3,4,8,16,128,512",
          .help = "kernels: rows of input" },
        { .type = ARG_INT,
          .name = "ms",
          .meta = "N",
          .dst = &o.ms,
          .given = &has_ms,
          .lo = 1,
          .hi = 60000,
          .help = "kernels: milliseconds of a run" },
        { .type = ARG_INT,
          .name = "repeat",
          .meta = "N",
          .dst = &o.repeat,
          .lo = 1,
          .hi = BENCH_MAX_REPEAT,
          .help = "runs; the median is shown, with the slowest and the fastest" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &o.seed,
          .lo = 0,
          .hi = INT64_MAX,
          .help = "of --accept" },
        { .type = ARG_GROUP, .help = "Output" },
        { .type = ARG_STR, .name = "csv", .meta = "FILE", .dst = &o.csv, .none = "", .help = "the table as CSV" },
        { .type = ARG_STR, .name = "svg", .meta = "FILE", .dst = &o.svg, .none = "", .help = "a plot as SVG" },
    };
    const arg_spec spec = {
        .usage = "bench decode|prefill|kernels [options] [MODEL_DIR | --synthetic PRESET]",
        .about =
            "Measure speed: medians of several runs beside the read bandwidth of the memory, measured with the same "
            "threads before and after.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 2,
        .examples = "  nibble bench decode --synthetic wide4 --frontier 0,4096 --depth 0,1,2,3 --accept 0.85\n"
                    "  nibble bench decode --synthetic wide4 --batch 1,8,32 --depth 0,2 --adaptive --accept 0.85,0.8\n"
                    "  nibble bench prefill Qwen3.6-35B-A3B-NVFP4 --prompt 128,512,2048\n"
                    "  nibble bench kernels --synthetic full --svg kernels.svg\n"
    };
    arg_strings pos = { 0 };
    bool done;
    bench_kind k = BENCH_DECODE;
    int code = 0;
    bool ok = cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && find_kind(&k, &pos, e) &&
              check_options(&o, &l, k, has_tokens, has_ms, e);
    if (ok && o.synthetic >= 0 && pos.n > 1)
        ok = fail(e, ERR_USAGE, "E-USAGE", "bench: a model and --synthetic exclude each other");
    if (ok && k == BENCH_KERNELS) {
        if (pos.n > 1)
            ok = fail(e, ERR_USAGE, "E-USAGE", "bench kernels: takes the shapes of --synthetic PRESET, no model");
        else if (o.synthetic < 0)
            o.synthetic = MOCK_FULL;
    }
    ok = ok && (o.synthetic >= 0 || cmd_model_dir(&o.dir, &pos, 1, e));
    if (ok) code = kinds[k].run(&o, e);
    arg_strings_free(&pos);
    return code;
}
