/* nibble eval load: clients for an OpenAI-compatible server, and what they had to wait for. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/rng.h"
#include "cmd/eval.h"
#include "eval/load.h"

typedef struct options {
    const char *url, *model, *api_key, *data, *concurrency, *csv, *svg;
    int requests, prompt_words, max_tokens, limit;
    double rate, timeout;
    int64_t seed;
    bool has_rate, stop_early, greedy, has_requests;
} options;

/* ---- a server of our own ---- */

typedef struct server {
    pid_t pid;
    char url[100];
} server;

/* The server's lines so far: true when one says that it is ready; `last` its last other line. */
static bool look_for_ready(server *s, char *last, size_t n, FILE *f) {
    char line[600];
    rewind(f);
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "ready %99s", s->url) == 1) return true;
        snprintf(last, n, "%s", line);
    }
    return false;
}

/* Its standard error goes to a file without a name: a pipe would fill up under load and hold it up. */
static bool start_server(server *s, const char *dir, err *e) {
    char threads[16], last[600] = "it said nothing";
    FILE *f = tmpfile();
    snprintf(threads, sizeof threads, "%d", cmd_common()->threads);
    const char *argv[] = { "nibble", "serve", dir, "--port", "0", "--threads", threads, "-q", NULL };
    if (!f) return fail(e, ERR_MACHINE, "E-EVAL-SERVER", "nibble serve: %s", strerror(errno));
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, fileno(f), STDERR_FILENO);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    const int failed = posix_spawn(&s->pid, "/proc/self/exe", &files, NULL, (char *const *)(uintptr_t)argv, environ);
    posix_spawn_file_actions_destroy(&files);
    bool ready = false, gone = failed != 0;
    if (failed) s->pid = 0;
    while (!ready && !gone && !*cmd_interrupt()) {
        const struct timespec moment = { 0, 20000000 };
        nanosleep(&moment, NULL);
        gone = waitpid(s->pid, NULL, WNOHANG) == s->pid;
        ready = look_for_ready(s, last, sizeof last, f);
    }
    fclose(f);
    if (gone) s->pid = 0;
    if (*cmd_interrupt()) return fail(e, ERR_INTERRUPTED, "E-EVAL-STOPPED", "eval: stopped");
    return ready || fail(e, ERR_INPUT, "E-EVAL-SERVER", "%s: nibble serve did not start: %.400s", dir,
                         failed ? strerror(failed) : last);
}

static void stop_server(server *s) {
    if (s->pid <= 0) return;
    kill(s->pid, SIGTERM);
    while (waitpid(s->pid, NULL, 0) < 0 && errno == EINTR) {
    }
    s->pid = 0;
}

/* ---- requests ---- */

typedef struct requests {
    load_request *v;
    int n;
    arena mem;
    workload w;
} requests;

/* A prompt that no cache knows: a different run of words for each request, the same for one seed. */
static str made_up(arena *mem, uint64_t seed, int index, int words) {
    static const char *const vocabulary[] = { "river",  "count",  "seven",   "garden", "letter", "under",
                                              "bright", "engine", "market",  "silver", "window", "carry",
                                              "north",  "paper",  "between", "summer", "bridge", "answer",
                                              "twelve", "quiet",  "story",   "planet", "after",  "copper" };
    const double words_known = (int)ARRAY_LEN(vocabulary);
    buf b = { 0 };
    buf_puts(&b, "[{\"role\":\"user\",\"content\":\"Continue these words with a long story:");
    for (int i = 0; i < words; i++)
        buf_printf(&b, " %s", vocabulary[(int)(rng_uniform(seed, (uint32_t)index, (uint64_t)i, 77) * words_known)]);
    buf_puts(&b, "\"}]");
    const str s = arena_str(mem, buf_view(&b));
    buf_free(&b);
    return s;
}

static bool make_requests(requests *r, const options *o, err *e) {
    if (o->data) {
        const workload_options wo = { .think = -1, .limit = o->limit, .requests_only = true };
        if (!workload_read(&r->w, "load", o->data, NULL, NULL, &wo, e)) return false;
    }
    r->n = o->has_requests ? o->requests : o->data ? r->w.n : o->requests;
    r->v = xcalloc((size_t)r->n, sizeof *r->v);
    double at = 0;
    for (int i = 0; i < r->n; i++) {
        load_request *q = &r->v[i];
        const workload_item *item = o->data ? &r->w.v[i % r->w.n] : NULL;
        *q =
            (load_request){ .messages = item ? item->messages : made_up(&r->mem, (uint64_t)o->seed, i, o->prompt_words),
                            .max_tokens = o->max_tokens };
        if (item) q->tools = item->tools;
        if (item && item->max_tokens > 0) q->max_tokens = item->max_tokens;
        if (!q->messages.p) return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "no memory for %d prompts", r->n);
        /* Open loop: a recorded time, or Poisson arrivals. */
        if (item && item->at >= 0 && !o->has_rate)
            q->at = item->at;
        else if (o->has_rate)
            q->at = at += -log(1 - rng_uniform((uint64_t)o->seed, 1, (uint64_t)i, 78)) / o->rate;
    }
    return true;
}

/* ---- the table ---- */

static const bench_column columns[] = {
    { "loop", "loop", -1, 1 },
    { "concurrency", "clients", 0, 1 },
    { "requests", "requests", 0, 1 },
    { "failed", "failed", 0, 1 },
    { "prompt_tokens", "prompt", 0, 1 },
    { "output_tokens", "output", 0, 1 },
    { "tokens_per_second", "tokens/s", 1, 1 },
    { "requests_per_second", "requests/s", 2, 1 },
    { "ttft_p50", "TTFT p50", 3, 1 },
    { "ttft_p90", "p90", 3, BENCH_HIDDEN },
    { "ttft_p99", "p99", 3, 1 },
    { "itl_p50", "ITL p50", 4, 1 },
    { "itl_p90", "p90", 4, BENCH_HIDDEN },
    { "itl_p99", "p99", 4, 1 },
    { "e2e_p50", "E2E p50", 3, 1 },
    { "e2e_p90", "p90", 3, BENCH_HIDDEN },
    { "e2e_p99", "p99", 3, 1 },
    { "fairness", "most/least", 2, 1 },
    { "type_token", "type/token", 2, 1 },
    { "top_word", "top word", 2, 1 },
    { "loops", "loops", 0, 1 },
    { "same_text", "same text", 0, 1 },
    { "same_length", "same length", 0, BENCH_HIDDEN },
    { "seconds", "seconds", 2, BENCH_HIDDEN },
};

typedef struct state {
    bench_report report;
    eval_progress p;
    int broken, failed, ok;
    char why[160];
} state;

static void on_done(void *ctx, int done, int total) { eval_progress_show(&((state *)ctx)->p, "requests", done, total); }

static void quantiles(bench_table *t, double *v, int n) {
    bench_number(t, stat_quantile(v, n, 0.5));
    bench_number(t, stat_quantile(v, n, 0.9));
    bench_number(t, stat_quantile(v, n, 0.99));
}

static void add_row(state *s, const load_result *res, const requests *r, int concurrency, double seconds) {
    bench_table *t = &s->report.table;
    double *ttft = xmalloc(((size_t)r->n + 1) * sizeof *ttft), *e2e = xmalloc(((size_t)r->n + 1) * sizeof *e2e),
           *gaps = NULL, prompt = 0, output = 0, least = INFINITY, most = 0;
    int n = 0, n_gaps = 0, failed = 0;
    for (int i = 0; i < r->n; i++) {
        const load_result *x = &res[i];
        if (x->failed) {
            failed++;
            if (!s->why[0]) snprintf(s->why, sizeof s->why, "%s", x->error);
            continue;
        }
        ttft[n] = x->first - x->start;
        e2e[n++] = x->end - x->start;
        prompt += (double)x->prompt_tokens;
        output += (double)x->output_tokens;
        const double rate = (double)x->output_tokens / (x->end - x->start);
        least = fmin(least, rate);
        most = fmax(most, rate);
        if (!x->n_gaps) continue;
        gaps = xrealloc(gaps, (size_t)(n_gaps + x->n_gaps) * sizeof *gaps);
        memcpy(gaps + n_gaps, x->gaps, (size_t)x->n_gaps * sizeof *gaps);
        n_gaps += x->n_gaps;
    }
    const load_health h = load_check(res, r->v, r->n);
    bench_text(t, concurrency ? "closed" : "open");
    bench_number(t, concurrency ? concurrency : NAN);
    bench_number(t, r->n);
    bench_number(t, failed);
    bench_number(t, n ? prompt / n : NAN);
    bench_number(t, n ? output / n : NAN);
    bench_number(t, output / seconds);
    bench_number(t, n / seconds);
    quantiles(t, ttft, n);
    quantiles(t, gaps, n_gaps);
    quantiles(t, e2e, n);
    bench_number(t, n ? most / least : NAN);
    bench_number(t, h.answers ? h.type_token : NAN);
    bench_number(t, h.answers ? h.top_word : NAN);
    bench_number(t, h.loops);
    bench_number(t, h.same_text);
    bench_number(t, h.same_length);
    bench_number(t, seconds);
    s->failed += failed;
    s->ok += n;
    /* The pass lines of the published checkpoint's makers: type/token at least 0.5, no loops. */
    s->broken += h.answers && (h.type_token < 0.5 || h.loops > 0 || (h.same_text > 1 && h.same_text > n / 2));
    free(ttft);
    free(e2e);
    free(gaps);
}

static bool one_load(state *s, const requests *r, const options *o, const char *url, const char *model, int concurrency,
                     err *e) {
    client *c;
    double seconds;
    if (!client_open(&c, url, o->api_key ? o->api_key : getenv("OPENAI_API_KEY"), o->timeout, e)) return false;
    load_result *res = xcalloc((size_t)r->n, sizeof *res);
    const load_options lo = { .model = model,
                              .concurrency = concurrency,
                              .ignore_eos = !o->stop_early,
                              .greedy = o->greedy,
                              .seed = o->seed,
                              .on_done = on_done,
                              .ctx = s,
                              .cancel = cmd_interrupt() };
    s->p = eval_progress_begin();
    const bool ok = load_run(res, r->v, r->n, c, &lo, &seconds, e);
    eval_progress_end(&s->p);
    if (ok) add_row(s, res, r, concurrency, seconds);
    client_close(c);
    load_free(res, r->n);
    free(res);
    return ok;
}

static bool measure(state *s, const requests *r, const options *o, const char *url, const char *model,
                    const bench_list *levels, err *e) {
    bool timed = o->has_rate;
    for (int i = 0; i < r->n; i++) timed = timed || r->v[i].at > 0;
    if (timed) return one_load(s, r, o, url, model, 0, e);
    for (int i = 0; i < levels->n; i++)
        if (!one_load(s, r, o, url, model, levels->v[i], e)) return false;
    return true;
}

static int run(const options *o, const char *dir, const bench_list *levels, err *e) {
    state s = { .report = {
                    .command = "eval", .what = "load", .table = { .cols = columns, .n_cols = ARRAY_LEN(columns) } } };
    server own = { 0 };
    requests r = { 0 };
    char model[200] = "";
    bool ok = make_requests(&r, o, e) && (o->url || start_server(&own, dir, e));
    const char *url = o->url ? o->url : own.url;
    if (ok)
        ok = o->model ? (snprintf(model, sizeof model, "%s", o->model), true)
                      : client_first_model(model, sizeof model, url, o->api_key, o->timeout, e);
    if (ok) {
        buf_printf(&s.report.lines, "%s at %s\n", model, url);
        buf_puts(&s.report.members, "\"model\":");
        json_write_str(&s.report.members, str_of(model));
        buf_puts(&s.report.members, ",\"url\":");
        json_write_str(&s.report.members, str_of(url));
        ok = measure(&s, &r, o, url, model, levels, e);
    }
    stop_server(&own);
    if (ok) {
        const bench_options bo = { .csv = o->csv, .svg = o->svg };
        static const bench_plot plot = { .title = "tokens/s by clients",
                                         .x = "clients",
                                         .y = "tokens/s",
                                         .group_col = 0,
                                         .group2_col = -1,
                                         .x_col = 1,
                                         .y_col = 6,
                                         .lo_col = -1,
                                         .hi_col = -1,
                                         .ref_col = -1 };
        bench_note(&s.report, "seconds; TTFT: to the first piece of an answer, ITL: between pieces, E2E: to the end; "
                              "most/least: tokens/s of the fastest client by the slowest's");
        if (s.failed) bench_note(&s.report, "%d requests failed; the first: %s", s.failed, s.why);
        if (s.broken)
            bench_note(&s.report, "FAILED: answers repeat themselves or each other (type/token below 0.5, loops, or "
                                  "one text for different prompts)");
        ok = bench_report_write(&s.report, &bo, e) && (!o->svg || bench_plot_write(&s.report.table, &plot, &bo, e));
        if (ok && s.ok == 0) ok = fail(e, ERR_MACHINE, "E-EVAL-SERVER", "%s: no request was answered: %s", url, s.why);
    }
    bench_report_free(&s.report);
    workload_free(&r.w);
    arena_free(&r.mem);
    free(r.v);
    return ok && (s.failed || s.broken) ? 1 : 0;
}

int eval_load(int argc, char **argv, err *e) {
    options o = {
        .concurrency = "1,4,8", .requests = 32, .prompt_words = 512, .max_tokens = 128, .timeout = 600, .seed = 1
    };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Server" },
        { .type = ARG_STR,
          .name = "url",
          .meta = "URL",
          .dst = &o.url,
          .none = "serve MODEL_DIR for the time",
          .help = "an OpenAI-compatible server, plain http" },
        { .type = ARG_STR,
          .name = "model",
          .meta = "NAME",
          .dst = &o.model,
          .none = "the first it lists",
          .help = "the model's name there" },
        { .type = ARG_STR,
          .name = "api-key",
          .meta = "KEY",
          .dst = &o.api_key,
          .none = "OPENAI_API_KEY",
          .help = "bearer token" },
        { .type = ARG_DOUBLE,
          .name = "timeout",
          .meta = "S",
          .dst = &o.timeout,
          .flo = 1,
          .fhi = 86400,
          .help = "seconds of silence that count as a failure" },
        { .type = ARG_GROUP, .help = "Load" },
        { .type = ARG_STR,
          .name = "concurrency",
          .meta = "LIST",
          .dst = &o.concurrency,
          .help = "closed loop: clients at once, one row each" },
        { .type = ARG_DOUBLE,
          .name = "rate",
          .meta = "R",
          .dst = &o.rate,
          .given = &o.has_rate,
          .flo = 1e-3,
          .fhi = 1e6,
          .none = "",
          .help = "open loop: requests per second, Poisson arrivals" },
        { .type = ARG_INT,
          .name = "requests",
          .meta = "N",
          .dst = &o.requests,
          .given = &o.has_requests,
          .lo = 1,
          .hi = 1 << 20,
          .none = "32, or all of --data",
          .help = "requests of a row" },
        { .type = ARG_STR,
          .name = "data",
          .meta = "FILE",
          .dst = &o.data,
          .none = "made-up words",
          .help = "prompts as JSON lines; `max_tokens` and `at` (seconds) of a line are a recorded trace" },
        { .type = ARG_INT,
          .name = "limit",
          .meta = "N",
          .dst = &o.limit,
          .lo = 0,
          .hi = INT32_MAX,
          .none = "all",
          .help = "lines of --data" },
        { .type = ARG_INT,
          .name = "prompt-words",
          .meta = "N",
          .dst = &o.prompt_words,
          .lo = 1,
          .hi = 1 << 20,
          .help = "words of a made-up prompt" },
        { .type = ARG_INT,
          .name = "max-tokens",
          .key = 'n',
          .meta = "N",
          .dst = &o.max_tokens,
          .lo = 1,
          .hi = 1 << 20,
          .help = "tokens of an answer" },
        { .type = ARG_FLAG,
          .name = "stop-early",
          .dst = &o.stop_early,
          .help = "answers end where the model ends them (without: ignore_eos)" },
        { .type = ARG_FLAG,
          .name = "greedy",
          .dst = &o.greedy,
          .help = "temperature 0 instead of the server's default" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &o.seed,
          .lo = 0,
          .hi = INT32_MAX,
          .help = "of prompts, arrivals and sampling" },
        { .type = ARG_GROUP, .help = "Output" },
        { .type = ARG_STR, .name = "csv", .meta = "FILE", .dst = &o.csv, .none = "", .help = "the table as CSV" },
        { .type = ARG_STR, .name = "svg", .meta = "FILE", .dst = &o.svg, .none = "", .help = "a plot as SVG" },
    };
    const arg_spec spec = {
        .usage = "eval load [options] [MODEL_DIR | --url URL]",
        .about = "A server under load: time to the first token, between tokens and to the end, tokens/s, and whether "
                 "answers still make sense "
                 "(repetition, collapse). Exit 1 when requests failed or answers collapsed.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples =
            "  nibble eval load --url http://127.0.0.1:8000 --concurrency 1,4,8,16,32 -n 512 --prompt-words 800\n"
            "  nibble eval load MODEL --rate 2 --requests 100 --svg load.svg\n"
    };
    arg_strings pos = { 0 };
    bool done;
    const char *dir = NULL;
    bench_list levels;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done) {
        if (o.url && pos.n)
            fail(e, ERR_USAGE, "E-USAGE", "eval load: a model and --url exclude each other");
        else if (bench_read_list(&levels, "concurrency", o.concurrency, 1, 1024, e) &&
                 (o.url || cmd_model_dir(&dir, &pos, 0, e)))
            code = run(&o, dir, &levels, e);
    }
    arg_strings_free(&pos);
    return code;
}
