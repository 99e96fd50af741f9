/* nibble eval: finds the kind of evaluation. */
#include "cmd/eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "cmd/calibration.h"

static const struct {
    const char *name, *about;
    cmd_fn *run;
} kinds[] = {
    { "kl", "KL divergence, agreement and perplexity against a reference model or its saved logits", eval_kl },
    { "ppl", "perplexity of one model", eval_ppl },
    { "gsm8k", "word problems answered right, by a model or by any OpenAI-compatible server", eval_gsm8k },
    { "accept", "accept length of the draft head by workload, depth and concurrency", eval_accept },
    { "ab", "models or draft heads side by side: the same prompts and seeds, in turn", eval_ab },
    { "load", "a server under load: waiting times, tokens/s, collapse", eval_load },
    { "card", "a model card of measured results only", eval_card },
};

static void help(FILE *to) {
    fputs("usage: nibble eval KIND [options] ...\n\nNumbers with error bars: is the quantized model still the same "
          "model?\n\n",
          to);
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) fprintf(to, "  %-8s %s\n", kinds[i].name, kinds[i].about);
    fputs("\n`nibble eval KIND --help` says more.\n\nexamples:\n  nibble eval kl MODEL-NVFP4 --against MODEL\n", to);
}

int cmd_eval(int argc, char **argv, err *e) {
    const char *names[ARRAY_LEN(kinds)];
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
        names[i] = kinds[i].name;
        if (argc > 1 && strcmp(argv[1], names[i]) == 0) return kinds[i].run(argc - 1, argv + 1, e);
    }
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) return help(stdout), 0;
    const char *near = argc > 1 ? args_nearest(argv[1], names, (int)ARRAY_LEN(kinds)) : NULL;
    fail(e, ERR_USAGE, "E-USAGE", "eval: %s%.40s%s%s%s (nibble eval --help lists the kinds)",
         argc > 1 ? "no kind " : "what kind?", argc > 1 ? argv[1] : "", near ? "; did you mean `" : "",
         near ? near : "", near ? "`?" : "");
    return 2;
}

/* ---- progress ---- */

eval_progress eval_progress_begin(void) {
    return (eval_progress){ .start = clock_seconds(), .tty = isatty(STDERR_FILENO) && !cmd_common()->quiet };
}

void eval_progress_show(eval_progress *p, const char *what, int64_t done, int64_t total) {
    const double now = clock_seconds();
    if (!p->tty || (now - p->last < 0.2 && done < total)) return;
    p->last = now;
    p->shown = true;
    const double left = done > 0 ? (now - p->start) * (double)(total - done) / (double)done : 0;
    fprintf(stderr, "\r\033[K%s: %lld of %lld, %.0f s left", what, (long long)done, (long long)total, left);
    fflush(stderr);
}

void eval_progress_end(eval_progress *p) {
    if (p->shown) fputs("\r\033[K", stderr);
    p->shown = false;
}

/* ---- prompts ---- */

static bool add_work(eval_works *w, const char *text, const engine *g, int limit, int think, err *e) {
    char name[32];
    const char *eq = strchr(text, '='), *path = eq ? eq + 1 : text, *base = strrchr(path, '/');
    if (w->n == EVAL_MAX_WORK) return fail(e, ERR_USAGE, "E-USAGE", "--data: at most %d workloads", EVAL_MAX_WORK);
    if (eq)
        snprintf(name, sizeof name, "%.*s", (int)(eq - text), text);
    else
        snprintf(name, sizeof name, "%s", base ? base + 1 : path);
    const workload_options wo = { .limit = limit, .think = think };
    if (!workload_read(&w->v[w->n], name, path, g->tok, g->tmpl, &wo, e)) return false;
    w->n++;
    return true;
}

bool eval_read_works(eval_works *w, const arg_strings *data, const engine *g, int limit, int think, bool by_kind,
                     err *e) {
    static const char *const sorts[] = { "math", "code", "chat", "tools", "stories" };
    for (int i = 0; i < data->n; i++)
        if (!add_work(w, data->v[i], g, limit, think, e)) return false;
    if (w->n) return true;
    char *path = calibration_bundled("workloads.jsonl", e);
    bool ok = path != NULL;
    for (size_t i = 0; ok && i < (by_kind ? ARRAY_LEN(sorts) : 1); i++) {
        const workload_options wo = { .limit = limit, .think = think, .kind = by_kind ? sorts[i] : NULL };
        ok = workload_read(&w->v[w->n], by_kind ? sorts[i] : "built-in", path, g->tok, g->tmpl, &wo, e);
        w->n += ok;
    }
    free(path);
    return ok;
}

void eval_works_free(eval_works *w) {
    for (int i = 0; i < w->n; i++) workload_free(&w->v[i]);
    w->n = 0;
}

/* ---- sampling ---- */

bool eval_model_sampling(sampler_params *out, const engine *g, err *e) {
    cmd_sampling s;
    arg_opt opts[CMD_SAMPLING_OPTIONS];
    cmd_sampling_options(opts, &s);
    const bool ok = cmd_sampler(out, &s, g, e);
    out->bias = NULL; /* borrowed from s, and nobody asked for any */
    out->n_bias = 0;
    out->stop_ids = NULL;
    out->n_stop_ids = out->min_tokens = 0;
    cmd_sampling_free(&s);
    return ok;
}

/* ---- figures ---- */

void eval_json_interval(buf *b, const char *key, stat_interval v) {
    buf_printf(b, "\"%s\":[", key);
    json_write_double(b, v.value);
    buf_byte(b, ',');
    json_write_double(b, v.lo);
    buf_byte(b, ',');
    json_write_double(b, v.hi);
    buf_byte(b, ']');
}

void eval_table_interval(bench_table *t, stat_interval v, int digits) {
    char text[40] = "-";
    if (!isnan(v.lo)) snprintf(text, sizeof text, "%.*f to %.*f", digits, v.lo, digits, v.hi);
    bench_number(t, v.value);
    bench_text(t, text);
}

/* argv was cut into pieces on its way here; the system has all of it. */
void eval_json_command(buf *b) {
    buf raw = { 0 }, line = { 0 };
    err none = { 0 };
    if (!file_read(&raw, "/proc/self/cmdline", 1 << 20, &none)) buf_clear(&raw);
    for (size_t at = 0; at < raw.n; at += strlen(raw.p + at) + 1) {
        const char *word = at ? raw.p + at : "nibble";
        if (at) buf_byte(&line, ' ');
        const bool plain =
            *word &&
            strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=+@%") == strlen(word);
        if (!plain) buf_byte(&line, '\'');
        for (const char *c = word; *c; c++)
            if (*c == '\'')
                buf_puts(&line, "'\\''");
            else
                buf_byte(&line, *c);
        if (!plain) buf_byte(&line, '\'');
    }
    buf_puts(b, "\"command\":");
    json_write_str(b, buf_view(&line));
    buf_free(&raw);
    buf_free(&line);
}

static const char *act_name(const engine *g) {
    return !g->w.quantized ? "none" : g->n.act == ACT_AUTO ? "as exported" : cmd_act_choices[g->n.act];
}

void eval_describe(char *out, size_t n, const engine *g) {
    snprintf(out, n, "%s (%s, KV %s, input quantization %s)", g->files.dir, g->w.quantized ? "quantized" : "plain",
             dtype_name(g->kv_type), act_name(g));
}

void eval_json_model(buf *b, const char *key, const engine *g) {
    buf_printf(b, "\"%s\":{\"path\":", key);
    json_write_str(b, str_of(g->files.dir));
    buf_printf(b, ",\"quantized\":%s,\"kv\":\"%s\",\"act\":\"%s\",\"device\":\"%s\",\"isa\":\"%s\",\"threads\":%d}",
               g->w.quantized ? "true" : "false", dtype_name(g->kv_type), act_name(g), g->o->device, g->o->isa,
               g->o->threads);
}
