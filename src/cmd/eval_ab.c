/* nibble eval ab: models, or draft heads made from one BF16 source, with the same prompts and seeds in turn. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "cmd/eval.h"
#include "eval/arms.h"

typedef struct options {
    arg_strings data;
    const char *heads, *trunk, *work, *draft_head, *csv, *svg, *samples;
    int limit, max_tokens, think, ctx, kv, act, depth;
    int64_t seed, memory;
    bool sampled;
} options;

enum { MAX_ARMS = 8 };

typedef struct head_set { /* exports made for --heads */
    char *dir, *path[4];
    bool made_dir;
} head_set;

/* ---- the heads ---- */

/* This program again with other arguments, its report thrown away: exactly what a user would type, and it is shown. */
static bool run_self(const char *const *args, err *e) {
    const char *argv[32] = { "nibble" };
    int n = 1, status = 0;
    char threads[16];
    buf shown = { 0 };
    while (*args) argv[n++] = *args++;
    for (int i = 1; i < n; i++) buf_printf(&shown, " %s", argv[i]);
    if (!cmd_common()->quiet) fprintf(stderr, "nibble%s\n", shown.p);
    snprintf(threads, sizeof threads, "%d", cmd_common()->threads);
    argv[n++] = "--threads";
    argv[n++] = threads;
    argv[n++] = "-q";
    argv[n] = NULL;
    pid_t child;
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    const int failed = posix_spawn(&child, "/proc/self/exe", &files, NULL, (char *const *)(uintptr_t)argv, environ);
    posix_spawn_file_actions_destroy(&files);
    while (!failed && waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    const bool ok = !failed && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!ok && !failed && WIFEXITED(status) && WEXITSTATUS(status) == 130)
        fail(e, ERR_INTERRUPTED, "E-EVAL-STOPPED", "eval: stopped");
    else if (!ok)
        fail(e, ERR_INPUT, "E-EVAL-HEADS", "`nibble%s` failed (its own message says why)", shown.p);
    buf_free(&shown);
    return ok;
}

static bool make_dir(head_set *h, const options *o, err *e) {
    const char *tmp = getenv("TMPDIR");
    h->dir = o->work ? xstrdup(o->work) : path_join(tmp && *tmp ? tmp : "/var/tmp", "nibble-heads-XXXXXX");
    h->made_dir = !o->work;
    if (o->work ? mkdir(h->dir, 0777) == 0 : mkdtemp(h->dir) != NULL) return true;
    fail(e, ERR_INPUT, "E-EVAL-HEADS", "%s: cannot be made: %s (--work DIR names a folder that does not exist yet)",
         h->dir, strerror(errno));
    free(h->dir);
    h->dir = NULL;
    return false;
}

static bool make_heads(head_set *h, const options *o, err *e) {
    static const char *const names[] = { "bf16", "calibrated", "generous", "borrow" };
    if (!make_dir(h, o, e)) return false;
    for (int i = 0; i < 4; i++) h->path[i] = path_join(h->dir, names[i]);
    char *amax = path_join(h->dir, "amax.safetensors");
    const char *samples = o->samples ? o->samples : "128";
    bool ok;
    if (o->trunk)
        ok = run_self((const char *[]){ "requant-mtp", o->trunk, "--source", o->heads, "--mtp", "bf16", "-o",
                                        h->path[0], NULL },
                      e) &&
             run_self((const char *[]){ "requant-mtp", o->trunk, "--source", o->heads, "--samples", samples,
                                        "--save-amax", amax, "-o", h->path[1], NULL },
                      e);
    else
        ok = run_self((const char *[]){ "quantize", o->heads, "-o", h->path[1], "--samples", samples, "--save-amax",
                                        amax, NULL },
                      e) &&
             run_self((const char *[]){ "requant-mtp", h->path[1], "--source", o->heads, "--mtp", "bf16", "-o",
                                        h->path[0], NULL },
                      e);
    ok = ok &&
         run_self((const char *[]){ "requant-mtp", h->path[1], "--source", o->heads, "--mtp-scales", "generous", "-o",
                                    h->path[2], NULL },
                  e) &&
         run_self((const char *[]){ "requant-mtp", h->path[1], "--source", o->heads, "--mtp-scales", "borrow", "--amax",
                                    amax, "-o", h->path[3], NULL },
                  e);
    free(amax);
    return ok;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st, (void)type, (void)at;
    return remove(path);
}

static void drop_heads(head_set *h) {
    if (h->dir && h->made_dir && nftw(h->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT) != 0)
        log_say("W-EVAL-WORK", "%s: could not be removed: %s", h->dir, strerror(errno));
    for (int i = 0; i < 4; i++) free(h->path[i]);
    free(h->dir);
}

static int head_arms(arm *arms, const head_set *h) {
    arms[0] = (arm){ .name = "BF16", .dir = h->path[0] };
    arms[1] = (arm){ .name = "calibrated", .dir = h->path[1] };
    arms[2] = (arm){ .name = "generous", .dir = h->path[2] };
    arms[3] = (arm){ .name = "borrowed KV", .dir = h->path[3] };
    arms[4] = (arm){ .name = "KV scale 1.0", .dir = h->path[1], .edit = ARM_HEAD_KV_ONE };
    arms[5] = (arm){ .name = "KV scale wrong", .dir = h->path[1], .edit = ARM_HEAD_KV_WRONG };
    arms[6] = (arm){ .name = "W4A16", .dir = h->path[1], .edit = ARM_HEAD_W4A16 };
    return 7;
}

/* ---- the table ---- */

static const bench_column columns[] = {
    { "arm", "arm", -1, 1 },
    { "formats", "draft head", -1, 1 },
    { "tokens", "tokens", 0, 1 },
    { "rounds", "rounds", 0, 1 },
    { "accept_length", "accept", 3, 1 },
    { "accept_length_95", "95 %", -1, 1 },
    { "difference", "less first", 3, 1 },
    { "difference_95", "95 %", -1, 1 },
    { "rate_1", "1st", 3, 1 },
    { "rate_2", "2nd", 3, 1 },
    { "tokens_per_second", "tokens/s", 1, 1 },
    { "tokens_per_second_95", "95 %", -1, BENCH_HIDDEN },
    { "speed_difference", "less first", 1, 1 },
    { "speed_difference_95", "95 %", -1, 1 },
    { "different_outputs", "other outputs", 0, 1 },
};

static void table_row(bench_table *t, const arm *a, const arm_figures *f) {
    bench_text(t, a->name);
    bench_text(t, a->formats);
    bench_number(t, (double)f->tokens);
    bench_number(t, (double)f->rounds);
    eval_table_interval(t, f->accept, 3);
    eval_table_interval(t, f->accept_difference, 3);
    for (int k = 0; k < 2; k++)
        bench_number(t, f->drafted_at[k] ? (double)f->accepted_at[k] / (double)f->drafted_at[k] : NAN);
    eval_table_interval(t, f->rate, 1);
    eval_table_interval(t, f->rate_difference, 1);
    bench_number(t, f->different);
}

typedef struct state {
    bench_report report;
    eval_progress p;
    int different;
} state;

static void on_prompt(void *ctx, int done, int total) {
    eval_progress_show(&((state *)ctx)->p, "answers", done, total);
}

static bool measure(state *s, arm *arms, int n, const options *o, const engine_options *eo, bool one_at_a_time,
                    err *e) {
    engine *g = NULL;
    eval_works *works = xcalloc(1, sizeof *works);
    sampler_params sampling = { 0 };
    /* The prompts are made once, by the first arm's tokenizer and template. */
    bool ok = engine_open(&g, arms[0].dir, eo, e) &&
              eval_read_works(works, &o->data, g, o->limit, o->think, false, e) &&
              (!o->sampled || eval_model_sampling(&sampling, g, e));
    if (ok && works->n > 1)
        ok = fail(e, ERR_USAGE, "E-USAGE", "eval ab: one --data (run it again for another workload)");
    if (ok) {
        const bool fits = g->plan.total_bytes * n < memory_available() + g->plan.total_bytes;
        bench_machine(&s->report, arms[0].dir, g->o);
        if (!fits || one_at_a_time)
            bench_note(&s->report,
                       "one arm after the other (%s): tokens/s of different arms are less comparable than in turn",
                       fits ? "--one-at-a-time" : "all at once do not fit into memory");
        engine_close(g);
        g = NULL;
        sampling.seed = (uint64_t)o->seed;
        arms_options ao = { .engine = *eo,
                            .depth = o->depth,
                            .max_tokens = o->max_tokens,
                            .sampling = sampling,
                            .one_at_a_time = !fits || one_at_a_time,
                            .on_prompt = on_prompt,
                            .ctx = s,
                            .cancel = cmd_interrupt() };
        s->p = eval_progress_begin();
        ok = arms_run(arms, n, &works->v[0], &ao, e);
        eval_progress_end(&s->p);
        for (int k = 0; ok && k < n; k++) {
            const arm_figures f = arms_compare(&arms[k], &arms[0], works->v[0].n, (uint64_t)o->seed);
            table_row(&s->report.table, &arms[k], &f);
            s->different += f.different;
        }
        if (ok)
            bench_note(&s->report,
                       "%d prompts of %s, %s, %d drafts per round, seed %lld; intervals: 95 %%, bootstrap over "
                       "prompts, differences paired",
                       works->v[0].n, works->v[0].name, o->sampled ? "sampled as the model asks" : "greedy", o->depth,
                       (long long)o->seed);
    }
    arms_free(arms, n, works->n ? works->v[0].n : 0);
    eval_works_free(works);
    free(works);
    engine_close(g);
    return ok;
}

static int run(const options *o, const arg_strings *pos, bool one_at_a_time, err *e) {
    state s = { .report = {
                    .command = "eval", .what = "ab", .table = { .cols = columns, .n_cols = ARRAY_LEN(columns) } } };
    arm arms[MAX_ARMS] = { 0 };
    head_set heads = { 0 };
    int n = pos->n, rows;
    bool ok = cmd_draft_head(&rows, o->draft_head, e);
    for (int k = 0; k < n && k < MAX_ARMS; k++) arms[k] = (arm){ .name = pos->v[k], .dir = pos->v[k] };
    if (ok && o->heads) {
        ok = make_heads(&heads, o, e);
        n = ok ? head_arms(arms, &heads) : 0;
    }
    const engine_options eo = { .ops = cmd_ops_options(),
                                .ctx = o->ctx,
                                .kv = (kv_mode)o->kv,
                                .act = (act_mode)o->act,
                                .heads = { .draft_rows = rows },
                                .memory_bytes = o->memory,
                                .need_text = false };
    ok = ok && measure(&s, arms, n, o, &eo, one_at_a_time, e);
    if (ok) {
        const bench_options bo = { .csv = o->csv, .svg = o->svg };
        static const bench_plot plot = { .title = "accept length",
                                         .x = "arm",
                                         .y = "accept length",
                                         .group_col = 0,
                                         .group2_col = -1,
                                         .x_col = 0,
                                         .y_col = 4,
                                         .lo_col = -1,
                                         .hi_col = -1,
                                         .ref_col = -1,
                                         .bars = true };
        if (o->heads)
            bench_note(
                &s.report,
                s.different
                    ? "FAILED: outputs differ although only the draft head does: speculation can be seen"
                    : "all outputs are identical, token by token: the head costs or gains speed and nothing else");
        ok = bench_report_write(&s.report, &bo, e) && (!o->svg || bench_plot_write(&s.report.table, &plot, &bo, e));
    }
    bench_report_free(&s.report);
    drop_heads(&heads);
    return ok && o->heads && s.different ? 1 : 0;
}

int eval_ab(int argc, char **argv, err *e) {
    options o = { .limit = 64, .max_tokens = 256, .think = -1, .seed = 1, .depth = 2 };
    bool one = false;
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Arms" },
        { .type = ARG_STR,
          .name = "heads",
          .meta = "SRC",
          .dst = &o.heads,
          .none = "",
          .help = "a BF16 model: one trunk, and draft heads BF16, calibrated, generous, with borrowed KV scales, with "
                  "KV scales of 1.0, with wrong ones (a thousandth), and W4A16" },
        { .type = ARG_STR,
          .name = "trunk",
          .meta = "EXPORT",
          .dst = &o.trunk,
          .none = "quantize SRC",
          .help = "with --heads: the export of SRC whose trunk is used" },
        { .type = ARG_STR,
          .name = "samples",
          .meta = "N",
          .dst = &o.samples,
          .none = "128",
          .help = "with --heads: samples to calibrate with" },
        { .type = ARG_STR,
          .name = "work",
          .meta = "DIR",
          .dst = &o.work,
          .none = "a temporary folder, removed again",
          .help = "with --heads: keep the exports in DIR" },
        { .type = ARG_FLAG, .name = "one-at-a-time", .dst = &one, .help = "one model in memory at a time" },
        { .type = ARG_GROUP, .help = "Workload" },
        { .type = ARG_LIST,
          .name = "data",
          .meta = "[NAME=]FILE",
          .dst = &o.data,
          .none = "the built-in prompts",
          .help = "JSON lines with `question`, `prompt` or `messages`" },
        { .type = ARG_INT,
          .name = "limit",
          .meta = "N",
          .dst = &o.limit,
          .lo = 0,
          .hi = INT32_MAX,
          .help = "prompts; 0 = all" },
        { .type = ARG_INT,
          .name = "max-tokens",
          .key = 'n',
          .meta = "N",
          .dst = &o.max_tokens,
          .lo = 1,
          .hi = 1 << 20,
          .help = "longest answer" },
        { .type = ARG_INT,
          .name = "depth",
          .meta = "N",
          .dst = &o.depth,
          .lo = 0,
          .hi = ENGINE_MAX_DRAFT,
          .help = "drafts per round" },
        { .type = ARG_FLAG,
          .name = "sampled",
          .dst = &o.sampled,
          .help = "as generation_config.json says, instead of greedy" },
        { .type = ARG_SET,
          .name = "think",
          .dst = &o.think,
          .value = 1,
          .none = "",
          .help = "let the model think first" },
        { .type = ARG_SET, .name = "no-think", .dst = &o.think, .value = 0, .none = "", .help = "do not" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &o.seed,
          .lo = 0,
          .hi = INT64_MAX,
          .help = "of sampling and of the bootstrap" },
        { .type = ARG_GROUP, .help = "Engine" },
        { .type = ARG_INT,
          .name = "ctx",
          .meta = "N",
          .dst = &o.ctx,
          .lo = 1,
          .hi = 1 << 30,
          .none = "the model's limit, at most 32768",
          .help = "positions per sequence" },
        { .type = ARG_ENUM, .name = "kv", .dst = &o.kv, .choices = cmd_kv_choices, .help = "KV cache type" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &o.act,
          .choices = cmd_act_choices,
          .help = "inputs of quantized Linears" },
        { .type = ARG_STR,
          .name = "draft-head",
          .meta = "full|N",
          .dst = &o.draft_head,
          .none = "65536 of a large vocabulary",
          .help = "rows of the output head that drafts come from" },
        { .type = ARG_BYTES,
          .name = "memory",
          .meta = "SIZE",
          .dst = &o.memory,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "what is available",
          .help = "refuse to plan for more" },
        { .type = ARG_GROUP, .help = "Output" },
        { .type = ARG_STR, .name = "csv", .meta = "FILE", .dst = &o.csv, .none = "", .help = "the table as CSV" },
        { .type = ARG_STR, .name = "svg", .meta = "FILE", .dst = &o.svg, .none = "", .help = "a plot as SVG" },
    };
    const arg_spec spec = { .usage = "eval ab [options] MODEL_A MODEL_B... | --heads SRC",
                            .about = "Models side by side: the same prompts and seeds to every arm in turn. Accept "
                                     "length, its difference to the first arm's and "
                                     "tokens/s with 95 % intervals; outputs are compared token by token. With --heads "
                                     "only the draft head differs, so outputs "
                                     "must be identical: exit 1 when they are not.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .max_positional = MAX_ARMS,
                            .examples = "  nibble eval ab MODEL-NVFP4 MODEL-NVFP4-generous --data math=gsm8k.jsonl\n"
                                        "  nibble eval ab --heads Qwen3.6-35B-A3B --trunk Qwen3.6-35B-A3B-NVFP4\n" };
    arg_strings pos = { 0 };
    bool done;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done) {
        if (o.heads ? pos.n > 0 : pos.n < 2)
            fail(e, ERR_USAGE, "E-USAGE", "eval ab: two models or more, or --heads SRC alone");
        else if (!o.heads && (o.trunk || o.work || o.samples))
            fail(e, ERR_USAGE, "E-USAGE", "eval ab: --trunk, --work and --samples go with --heads");
        else
            code = run(&o, &pos, one, e);
    }
    arg_strings_free(&pos);
    arg_strings_free(&o.data);
    return code;
}
