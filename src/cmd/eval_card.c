/* nibble eval card: a model card from what was measured, and nothing else. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "cmd/eval.h"

typedef struct result { /* one --results file */
    const char *path;
    const json *v;
    const char *kind; /* "kl", "gsm8k", ... */
} result;

enum { MAX_RESULTS = 32 };

typedef struct card {
    const char *dir, *name;
    const json *summary; /* nibble_quant_summary.json; NULL: none */
    result r[MAX_RESULTS];
    int n;
    arena mem;
    buf b;
} card;

static const struct {
    const char *schema, *kind;
} schemas[] = {
    { "nibble.check/1", "check" },      { "nibble.eval.kl/1", "kl" },         { "nibble.eval.ppl/1", "ppl" },
    { "nibble.eval.gsm8k/1", "gsm8k" }, { "nibble.eval.accept/1", "accept" }, { "nibble.eval.ab/1", "ab" },
    { "nibble.eval.load/1", "load" },   { "nibble.bench/1", "bench" },
};

static double num(const json *v, const char *key) {
    const json *x = json_get(v, key);
    return json_is_number(x) ? json_double(x) : NAN;
}

static const char *text(const json *v, const char *key) {
    const json *x = json_get(v, key);
    return json_is(x, JSON_STRING) ? x->u.s : "";
}

static double at(const json *v, const char *key, uint32_t i) {
    const json *x = json_get(v, key);
    return json_is(x, JSON_ARRAY) && i < x->n && json_is_number(&x->u.items[i]) ? json_double(&x->u.items[i]) : NAN;
}

/* "97.1 (95 %: 96.0 to 98.0)" */
static void interval(buf *b, const json *v, const char *key, double scale, int digits) {
    buf_printf(b, "%.*f", digits, scale * at(v, key, 0));
    if (!isnan(at(v, key, 1)))
        buf_printf(b, " (95 %%: %.*f to %.*f)", digits, scale * at(v, key, 1), digits, scale * at(v, key, 2));
}

static void command(card *c, const result *r) {
    const char *line = text(r->v, "command");
    if (*line) buf_printf(&c->b, "\n```sh\n%s\n```\n", line);
}

/* ---- sections ---- */

static void section_sizes(card *c) {
    buf *b = &c->b;
    const json *s = c->summary, *classes = json_get(s, "classes");
    buf_puts(b, "## What is in it\n\n");
    if (!s) {
        buf_puts(b, "Not known: no nibble_quant_summary.json beside the weights.\n\n");
        return;
    }
    buf_printf(b,
               "%.2f GB, from %.2f GB. Recipe `%s`, algorithm `%s`, %s arithmetic. Calibration: %s. Scales of the "
               "draft head: %s.\n\n",
               num(s, "export_bytes") / 1e9, num(s, "source_bytes") / 1e9, text(s, "recipe"), text(s, "algorithm"),
               text(s, "arith"), text(s, "calibration"), *text(s, "mtp_scales") ? text(s, "mtp_scales") : "none");
    buf_puts(b, "| class | format | modules | MB | relative error |\n|---|---|---|---|---|\n");
    for (uint32_t i = 0; json_is(classes, JSON_ARRAY) && i < classes->n; i++) {
        const json *x = &classes->u.items[i];
        const double error = num(x, "relative_error");
        buf_printf(b, "| %s%s | %s | %.0f | %.2f | ", json_is(json_get(x, "mtp"), JSON_TRUE) ? "draft head: " : "",
                   text(x, "class"), text(x, "format"), num(x, "modules"), num(x, "bytes_after") / 1e6);
        buf_printf(b, isnan(error) ? "-" : "%.4f", error);
        buf_puts(b, " |\n");
    }
    buf_byte(b, '\n');
}

static void section_check(card *c, const result *r) {
    buf *b = &c->b;
    buf_printf(b, "Verdict **%s**: %.0f errors, %.0f warnings, %.0f notes over %.0f tensors.\n", text(r->v, "verdict"),
               num(r->v, "errors"), num(r->v, "warnings"), num(r->v, "notes"), num(r->v, "tensors"));
    const json *f = json_get(r->v, "findings");
    for (uint32_t i = 0; json_is(f, JSON_ARRAY) && i < f->n; i++)
        buf_printf(b, "- %s `%s`: %s: %s\n", text(&f->u.items[i], "severity"), text(&f->u.items[i], "rule"),
                   text(&f->u.items[i], "object"), text(&f->u.items[i], "message"));
    command(c, r);
}

static void section_kl(card *c, const result *r) {
    buf *b = &c->b;
    const json *all = json_get(r->v, "all");
    const bool ref = json_get(all, "kl_mean") != NULL;
    buf_printf(b, "%s, %.0f positions.\n\n", text(r->v, "data"), num(all, "positions"));
    if (ref) {
        buf_printf(b, "- against %s\n- KL divergence, mean: ", text(json_get(r->v, "reference"), "path"));
        interval(b, all, "kl_mean", 1, 5);
        buf_printf(b, " nats; median %.5f, p99 %.4f, worst %.4f\n- same most likely token: ", num(all, "kl_median"),
                   num(all, "kl_p99"), num(all, "kl_max"));
        interval(b, all, "same_top", 100, 2);
        buf_printf(b, " %%\n- perplexity: %.3f, the reference's %.3f\n", exp(at(all, "nll", 0)),
                   exp(at(all, "reference_nll", 0)));
    } else {
        buf_printf(b, "- perplexity: %.3f (95 %%: %.3f to %.3f)\n", exp(at(all, "nll", 0)), exp(at(all, "nll", 1)),
                   exp(at(all, "nll", 2)));
    }
    command(c, r);
}

static void section_gsm8k(card *c, const result *r) {
    buf *b = &c->b;
    const json *p = json_get(r->v, "compared"), *m = json_get(r->v, "model");
    buf_printf(b, "%s: %.0f questions, %.0f shots, %s, at most %.0f tokens, seed %.0f.\n\n- right: ",
               *text(m, "path") ? text(m, "path") : text(m, "url"), num(r->v, "questions"), num(r->v, "shots"),
               text(r->v, "sampling"), num(r->v, "max_tokens"), num(r->v, "seed"));
    interval(b, r->v, "accuracy", 100, 2);
    buf_puts(b, " %; flexible extraction: ");
    interval(b, r->v, "accuracy_flexible", 100, 2);
    buf_printf(b, " %%\n- empty %.0f, truncated %.0f, errors %.0f\n", num(r->v, "empty"), num(r->v, "truncated"),
               num(r->v, "errors"));
    if (!isnan(num(r->v, "accept_length")))
        buf_printf(b, "- accept length meanwhile: %.3f\n", num(r->v, "accept_length"));
    if (p)
        buf_printf(
            b, "- beside %s: both right %.0f, only this %.0f, only the other %.0f, neither %.0f; McNemar p = %.3g\n",
            text(p, "with"), num(p, "both"), num(p, "only_this"), num(p, "only_other"), num(p, "neither"),
            num(p, "mcnemar_p"));
    command(c, r);
}

/* Columns of a table's rows, as they stand. */
typedef struct column {
    const char *key, *head;
    int digits; /* < 0: text */
} column;

static void rows(card *c, const result *r, const column *cols, int n) {
    buf *b = &c->b;
    const json *list = json_get(r->v, "rows");
    for (int k = 0; k < n; k++) buf_printf(b, "| %s ", cols[k].head);
    buf_puts(b, "|\n");
    for (int k = 0; k < n; k++) buf_puts(b, "|---");
    buf_puts(b, "|\n");
    for (uint32_t i = 0; json_is(list, JSON_ARRAY) && i < list->n; i++) {
        for (int k = 0; k < n; k++) {
            const double v = num(&list->u.items[i], cols[k].key);
            if (cols[k].digits < 0)
                buf_printf(b, "| %s ", text(&list->u.items[i], cols[k].key));
            else if (isnan(v))
                buf_puts(b, "| - ");
            else
                buf_printf(b, "| %.*f ", cols[k].digits, v);
        }
        buf_puts(b, "|\n");
    }
    const json *notes = json_get(r->v, "notes");
    buf_byte(b, '\n');
    for (uint32_t i = 0; json_is(notes, JSON_ARRAY) && i < notes->n; i++)
        if (notes->u.items[i].type == JSON_STRING) buf_printf(b, "- %s\n", notes->u.items[i].u.s);
    command(c, r);
}

static void section_rows(card *c, const result *r) {
    static const column accept[] = { { "workload", "workload", -1 },          { "sampling", "sampling", -1 },
                                     { "concurrency", "sequences", 0 },       { "depth", "depth", 0 },
                                     { "accept_length", "accept length", 3 }, { "accept_length_95", "95 %", -1 },
                                     { "tokens_per_second", "tokens/s", 1 },  { "gain", "x off", 2 } },
                        ab[] = { { "arm", "arm", -1 },
                                 { "formats", "draft head", -1 },
                                 { "accept_length", "accept length", 3 },
                                 { "accept_length_95", "95 %", -1 },
                                 { "difference", "less the first", 3 },
                                 { "difference_95", "95 %", -1 },
                                 { "tokens_per_second", "tokens/s", 1 },
                                 { "different_outputs", "other outputs", 0 } },
                        load[] = { { "loop", "loop", -1 },
                                   { "concurrency", "clients", 0 },
                                   { "requests", "requests", 0 },
                                   { "failed", "failed", 0 },
                                   { "prompt_tokens", "prompt", 0 },
                                   { "output_tokens", "output", 0 },
                                   { "tokens_per_second", "tokens/s", 1 },
                                   { "ttft_p50", "TTFT p50", 3 },
                                   { "ttft_p99", "p99", 3 },
                                   { "itl_p50", "ITL p50", 4 },
                                   { "itl_p99", "p99", 4 } },
                        bench[] = { { "context", "context", 0 },
                                    { "depth", "depth", 0 },
                                    { "prompt", "prompt", 0 },
                                    { "tokens_per_second", "tokens/s", 1 } };
    buf_printf(&c->b, "%s, %s, %.0f threads.\n\n", *text(r->v, "machine") ? text(r->v, "machine") : text(r->v, "url"),
               text(r->v, "isa"), num(r->v, "threads"));
    if (strcmp(r->kind, "accept") == 0)
        rows(c, r, accept, ARRAY_LEN(accept));
    else if (strcmp(r->kind, "ab") == 0)
        rows(c, r, ab, ARRAY_LEN(ab));
    else if (strcmp(r->kind, "load") == 0)
        rows(c, r, load, ARRAY_LEN(load));
    else
        rows(c, r, bench, ARRAY_LEN(bench));
}

static const struct section {
    const char *kind, *title;
    void (*write)(card *c, const result *r);
    bool gate; /* its absence is said */
} sections[] = {
    { "check", "Check", section_check, true },         { "kl", "Distance from the original", section_kl, true },
    { "ppl", "Perplexity", section_kl, false },        { "gsm8k", "Word problems", section_gsm8k, true },
    { "accept", "Accept length", section_rows, true }, { "ab", "Draft heads side by side", section_rows, true },
    { "load", "Under load", section_rows, false },     { "bench", "Speed", section_rows, false },
};

static void write_card(card *c) {
    buf *b = &c->b;
    const char *base = strrchr(c->dir, '/');
    buf_printf(b, "# %s\n\nEvery figure below was measured; what was not is said. Intervals are at 95 %%.\n\n",
               c->name           ? c->name
               : base && base[1] ? base + 1
                                 : c->dir);
    section_sizes(c);
    for (size_t s = 0; s < ARRAY_LEN(sections); s++) {
        int seen = 0;
        for (int i = 0; i < c->n; i++) {
            if (strcmp(c->r[i].kind, sections[s].kind) != 0) continue;
            if (!seen++) buf_printf(b, "## %s\n\n", sections[s].title);
            sections[s].write(c, &c->r[i]);
            buf_byte(b, '\n');
        }
        if (!seen && sections[s].gate) buf_printf(b, "## %s\n\nNot measured.\n\n", sections[s].title);
    }
}

/* ---- files ---- */

static bool read_results(card *c, const arg_strings *paths, err *e) {
    if (paths->n > MAX_RESULTS) return fail(e, ERR_USAGE, "E-USAGE", "eval card: at most %d --results", MAX_RESULTS);
    for (int i = 0; i < paths->n; i++) {
        result *r = &c->r[c->n++];
        *r = (result){ .path = paths->v[i] };
        if (!json_parse_file(&r->v, &c->mem, r->path, NULL, e)) return false;
        for (size_t k = 0; k < ARRAY_LEN(schemas); k++)
            if (strcmp(text(r->v, "schema"), schemas[k].schema) == 0) r->kind = schemas[k].kind;
        if (!r->kind)
            return fail(e, ERR_INPUT, "E-EVAL-RESULTS",
                        "%s: schema '%.60s' is no result of check, eval or bench (make it with --json)", r->path,
                        text(r->v, "schema"));
    }
    return true;
}

static bool run(const char *dir, const char *name, const char *out, const arg_strings *paths, err *e) {
    card c = { .dir = dir, .name = name };
    char *summary = path_join(dir, "nibble_quant_summary.json");
    bool ok = !file_exists(summary) || json_parse_file(&c.summary, &c.mem, summary, NULL, e);
    ok = ok && read_results(&c, paths, e);
    if (ok) {
        write_card(&c);
        if (out)
            ok = file_write_atomic(out, c.b.p, c.b.n, e);
        else
            fwrite(c.b.p, 1, c.b.n, stdout);
    }
    free(summary);
    buf_free(&c.b);
    arena_free(&c.mem);
    return ok;
}

int eval_card(int argc, char **argv, err *e) {
    arg_strings paths = { 0 }, pos = { 0 };
    const char *out = NULL, *name = NULL, *dir;
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Card" },
        { .type = ARG_LIST,
          .name = "results",
          .meta = "FILE",
          .dst = &paths,
          .none = "",
          .help = "what check, eval or bench printed with --json; repeatable" },
        { .type = ARG_STR,
          .name = "name",
          .meta = "NAME",
          .dst = &name,
          .none = "the folder's",
          .help = "the model's name" },
        { .type = ARG_STR,
          .name = "output",
          .key = 'o',
          .meta = "FILE",
          .dst = &out,
          .none = "standard output",
          .help = "Markdown file to write" },
    };
    const arg_spec spec = {
        .usage = "eval card [options] [MODEL_DIR]",
        .about = "A model card made of measured results only: formats and sizes, where the scales come from, the gates "
                 "with their intervals, and the "
                 "commands that reproduce them. Gates that were not run are named as not measured.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble check MODEL-NVFP4 --json > check.json\n"
                    "  nibble eval kl MODEL-NVFP4 --against MODEL --json > kl.json\n"
                    "  nibble eval card MODEL-NVFP4 --results check.json --results kl.json -o README.md\n"
    };
    bool done;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && cmd_model_dir(&dir, &pos, 0, e) &&
        !run(dir, name, out, &paths, e))
        CHECK(e->kind != ERR_NONE, "a failure without a reason");
    arg_strings_free(&pos);
    arg_strings_free(&paths);
    return 0;
}
