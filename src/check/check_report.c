#include <stdio.h>

#include "base/json.h"
#include "check/check.h"
#include "quant/plan.h"

enum { PATTERNS = 3, PATTERNS_JSON = 100 };

static const char *const made_of[] = { "trunk", "draft head" };

/* ---- for people ---- */

static void text_finding(buf *out, const finding *x, bool all) {
    buf_printf(out, "%-7s  %s  ", severity_names[x->severity], x->rule);
    finding_objects(out, x, all ? x->count : PATTERNS);
    if (x->count > 1) buf_printf(out, " (%d)", x->count);
    buf_printf(out, "\n         %s%s\n", x->count > 1 ? "the first: " : "", x->message);
    buf_printf(out, "         -> %s\n", x->remedy);
}

static void text_families(buf *out, const compare_result *c) {
    buf_printf(out, "\n%-11s %-14s %8s %9s %9s %9s  %s\n", "source", "family", "matrices", "as quant.", "mean err",
               "worst", "in");
    for (int m = 0; m < 2; m++)
        for (int f = 0; f < QM_COUNT; f++) {
            const compare_family *x = &c->family[m][f];
            if (x->matrices)
                buf_printf(out, "%-11s %-14s %8d %9d %9.4f %9.4f  " STR_FMT "\n", made_of[m], qfamily_name((qfamily)f),
                           x->matrices, x->equal, x->mean, x->worst, STR_ARG(x->worst_name));
        }
    buf_printf(out,
               "\nmade by      %s rounding, algorithm %s: %d of %d matrices are byte for byte what quantize writes",
               c->made[MADE_CUDA] >= c->made[MADE_CPU] ? "cuda" : "cpu", quant_algorithms[c->algorithm], c->equal,
               c->matrices);
    if (c->bytes_different)
        buf_printf(out, "; %lld of %lld bytes differ", (long long)c->bytes_different, (long long)c->bytes_compared);
    buf_printf(out, "\ncopies       %d of %d verbatim tensors are equal\n", c->copies_equal, c->copies);
}

void check_text(buf *out, const check_report *r, bool all_names) {
    const check_view *v = &r->view;
    int quantized = 0;
    for (int i = 0; i < v->n_linears; i++)
        quantized += v->linears[i].format == LIN_NVFP4 || v->linears[i].format == LIN_FP8;
    buf_printf(out, "%s\n%d tensors in %d file%s, %.2f GB; %d of %d Linears quantized; read in %.2f s (%.1f GB/s)\n\n",
               v->dir, v->n, v->n_shards, v->n_shards == 1 ? "" : "s", (double)v->bytes / 1e9, quantized, v->n_linears,
               r->seconds, r->seconds > 0 ? (double)r->bytes / 1e9 / r->seconds : 0);
    for (int i = 0; i < r->found.n; i++) text_finding(out, &r->found.v[i], all_names);
    if (r->with.done) text_families(out, &r->with);
    for (int i = 0; i < r->n_targets; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s%s%s", r->targets[i].name, *r->targets[i].version ? "@" : "",
                 r->targets[i].version);
        buf_printf(out, "%s%-12s %s\n", i || r->with.done ? "" : "\n", name, outcome_names[r->targets[i].worst]);
    }
    buf_printf(out, "%sverdict      %s: %d errors, %d warnings, %d notes%s%s\n",
               r->found.n && !r->with.done && !r->n_targets ? "\n" : "", check_verdict(r),
               findings_of(&r->found, SEV_ERROR), findings_of(&r->found, SEV_WARNING), findings_of(&r->found, SEV_NOTE),
               r->loads ? "" : "; nibble refuses to load it: ", r->loads ? "" : r->refused.id);
}

/* ---- for programs ---- */

static void put_text(buf *b, const char *key, str s) {
    buf_printf(b, "\"%s\": ", key);
    json_write_str(b, s);
}

static void json_finding(buf *b, const finding *x) {
    buf objects = { 0 };
    finding_objects(&objects, x, PATTERNS_JSON);
    buf_byte(b, '{');
    put_text(b, "rule", str_of(x->rule));
    buf_puts(b, ", ");
    put_text(b, "severity", str_of(severity_names[x->severity]));
    buf_puts(b, ", ");
    put_text(b, "object", buf_view(&objects));
    buf_puts(b, ", ");
    put_text(b, "message", str_of(x->message));
    buf_puts(b, ", ");
    put_text(b, "remedy", str_of(x->remedy));
    buf_printf(b, ", \"count\": %d}", x->count);
    buf_free(&objects);
}

static void json_source(buf *b, const compare_result *c) {
    buf_puts(b, ", \"source\": {\"families\": [");
    bool first = true;
    for (int m = 0; m < 2; m++)
        for (int f = 0; f < QM_COUNT; f++) {
            const compare_family *x = &c->family[m][f];
            if (!x->matrices) continue;
            buf_printf(
                b, "%s{\"part\": \"%s\", \"family\": \"%s\", \"matrices\": %d, \"as_quantize\": %d, \"mean_error\": ",
                first ? "" : ", ", made_of[m], qfamily_name((qfamily)f), x->matrices, x->equal);
            json_write_double(b, x->mean);
            buf_puts(b, ", \"worst_error\": ");
            json_write_double(b, x->worst);
            buf_puts(b, ", ");
            put_text(b, "worst", x->worst_name);
            buf_byte(b, '}');
            first = false;
        }
    buf_printf(b,
               "], \"arithmetic\": \"%s\", \"algorithm\": \"%s\", \"matrices\": %d, \"as_quantize\": %d, "
               "\"bytes_compared\": %lld, "
               "\"bytes_different\": %lld, \"copies\": %d, \"copies_equal\": %d}",
               c->made[MADE_CUDA] >= c->made[MADE_CPU] ? "cuda" : "cpu", quant_algorithms[c->algorithm], c->matrices,
               c->equal, (long long)c->bytes_compared, (long long)c->bytes_different, c->copies, c->copies_equal);
}

void check_json(buf *b, const check_report *r, const char *path) {
    buf_puts(b, "{\"schema\": \"nibble.check/1\", ");
    put_text(b, "path", str_of(path));
    buf_puts(b, ", ");
    put_text(b, "verdict", str_of(check_verdict(r)));
    buf_printf(b, ", \"errors\": %d, \"warnings\": %d, \"notes\": %d, \"loads\": %s, ",
               findings_of(&r->found, SEV_ERROR), findings_of(&r->found, SEV_WARNING), findings_of(&r->found, SEV_NOTE),
               r->loads ? "true" : "false");
    put_text(b, "refused", str_of(r->loads || !r->refused.id ? "" : r->refused.id));
    buf_puts(b, ", \"findings\": [");
    for (int i = 0; i < r->found.n; i++) {
        if (i) buf_puts(b, ", ");
        json_finding(b, &r->found.v[i]);
    }
    buf_printf(b, "], \"tensors\": %d, \"shards\": %d, \"tensor_bytes\": %llu, \"read_bytes\": %llu, \"seconds\": ",
               r->view.n, r->view.n_shards, (unsigned long long)r->view.bytes, (unsigned long long)r->bytes);
    json_write_double(b, r->seconds);
    if (r->with.done) json_source(b, &r->with);
    if (r->n_targets) buf_puts(b, ", \"targets\": [");
    for (int i = 0; i < r->n_targets; i++)
        buf_printf(b, "%s{\"name\": \"%s\", \"version\": \"%s\", \"outcome\": \"%s\"}", i ? ", " : "",
                   r->targets[i].name, *r->targets[i].version ? r->targets[i].version : "main",
                   outcome_names[r->targets[i].worst]);
    if (r->n_targets) buf_byte(b, ']');
    buf_puts(b, "}\n");
}
