/* nibble eval kl, nibble eval ppl: teacher-forced comparison over texts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "cmd/calibration.h"
#include "cmd/eval.h"
#include "eval/html.h"
#include "eval/swap.h"

typedef struct options {
    const char *against, *data, *ids, *html;
    int samples, seq, skip, kv, act, ref_kv;
    int64_t seed, memory;
    bool per_layer, has_against;
} options;

/* ---- groups of positions ---- */

typedef struct group {
    char label[40];
    const calib_data *d;
    const char *kind; /* NULL: by position */
    int lo, hi;
} group;

static bool in_group(const void *ctx, const compare_row *r) {
    const group *g = ctx;
    return g->kind ? strcmp(g->d->kind[r->seq], g->kind) == 0 : r->pos >= g->lo && r->pos < g->hi;
}

enum { MAX_GROUPS = 64 };

typedef struct groups {
    group v[MAX_GROUPS];
    compare_figures f[MAX_GROUPS];
    int n;
} groups;

static void add_group(groups *s, const group *g, const compare_result *r, uint64_t seed) {
    if (s->n == MAX_GROUPS) return;
    const compare_figures f = compare_summary(r, in_group, g, seed);
    if (f.positions == 0) return;
    s->f[s->n] = f;
    s->v[s->n++] = *g;
}

static void find_groups(groups *s, const compare_result *r, const calib_data *d, uint64_t seed) {
    for (int i = 0; i < d->n; i++) {
        bool seen = !d->kind[i][0];
        for (int k = 0; k < s->n; k++) seen = seen || strcmp(s->v[k].kind, d->kind[i]) == 0;
        if (seen) continue;
        group g = { .d = d, .kind = d->kind[i] };
        snprintf(g.label, sizeof g.label, "%s", d->kind[i]);
        add_group(s, &g, r, seed);
    }
    for (int lo = 0, hi = 16; lo < 1 << 20; lo = hi, hi *= 4) {
        group g = { .lo = lo, .hi = hi };
        snprintf(g.label, sizeof g.label, "positions %d to %d", lo, hi - 1);
        add_group(s, &g, r, seed);
    }
}

/* ---- parts ---- */

typedef struct part {
    char label[40];
    swap_part p;
    compare_figures f;
} part;

typedef struct parts {
    part *v;
    int n;
} parts;

static void add_part(parts *s, const engine *g, int layer, int family) {
    s->v = xrealloc(s->v, (size_t)(s->n + 1) * sizeof *s->v);
    part *p = &s->v[s->n++];
    *p = (part){ .p = { layer, family } };
    if (layer < 0)
        snprintf(p->label, sizeof p->label, "all %s", swap_family_name((swap_family)family));
    else
        snprintf(p->label, sizeof p->label, "layer %d (%s)", layer,
                 g->config.layer[layer] == LAYER_ATTN ? "attention" : "gdn");
}

/* The families and layers in which `from` keeps other matrices than `ref`. */
static void list_parts(parts *s, const engine *from) {
    for (int f = 0; f < SWAP_FAMILIES; f++) add_part(s, from, -1, f);
    for (int i = 0; i < from->config.layers; i++) add_part(s, from, i, -1);
}

static bool run_parts(parts *s, compare_source *ref, const engine *from, const options *o, const calib_data *d,
                      err *e) {
    engine *hybrid = NULL;
    const engine_options eo = { .ops = cmd_ops_options(),
                                .ctx = ref->g->st.capacity,
                                .kv = (kv_mode)o->ref_kv,
                                .memory_bytes = o->memory,
                                .no_text = true };
    if (!engine_open(&hybrid, ref->g->files.dir, &eo, e)) return false;
    list_parts(s, from);
    eval_progress p = eval_progress_begin();
    bool ok = true;
    for (int i = 0; ok && i < s->n; i++) {
        swap sw;
        compare_result r = { 0 };
        eval_progress_show(&p, "parts", i, s->n);
        ok = swap_in(&sw, hybrid, from, s->v[i].p, e) && compare_run(&r, hybrid, ref, d, o->skip, cmd_interrupt(), e);
        if (ok) s->v[i].f = compare_summary(&r, NULL, NULL, (uint64_t)o->seed);
        swap_out(&sw);
        compare_free(&r);
    }
    eval_progress_end(&p);
    engine_close(hybrid);
    return ok;
}

/* ---- reports ---- */

static void json_figures(buf *b, const char *label, const compare_figures *f, bool ref) {
    buf_puts(b, "{\"name\":");
    json_write_str(b, str_of(label));
    buf_printf(b, ",\"texts\":%d,\"positions\":%d,", f->sequences, f->positions);
    eval_json_interval(b, "nll", f->nll);
    buf_puts(b, ",\"perplexity\":");
    json_write_double(b, exp(f->nll.value));
    if (ref) {
        buf_byte(b, ',');
        eval_json_interval(b, "kl_mean", f->kl);
        buf_puts(b, ",\"kl_median\":");
        json_write_double(b, f->kl_median);
        buf_puts(b, ",\"kl_p99\":");
        json_write_double(b, f->kl_p99);
        buf_puts(b, ",\"kl_max\":");
        json_write_double(b, f->kl_worst);
        buf_byte(b, ',');
        eval_json_interval(b, "same_top", f->top);
        buf_byte(b, ',');
        eval_json_interval(b, "reference_nll", f->want_nll);
        buf_byte(b, ',');
        eval_json_interval(b, "nll_difference", f->nll_difference);
    }
    buf_byte(b, '}');
}

static const bench_column columns[] = {
    { "name", "", -1, 1 },
    { "texts", "texts", 0, 1 },
    { "positions", "positions", 0, 1 },
    { "ppl", "perplexity", 3, 1 },
    { "ppl_95", "95 %", -1, 1 },
    { "kl", "KL mean", 6, 2 },
    { "kl_95", "95 %", -1, 2 },
    { "kl_median", "median", 6, 2 },
    { "kl_p99", "p99", 5, 2 },
    { "kl_max", "worst", 5, 2 },
    { "top", "same top", 4, 2 },
    { "top_95", "95 %", -1, 2 },
    { "ref_ppl", "reference", 3, 2 },
};

static stat_interval exp_of(stat_interval v) { return (stat_interval){ exp(v.value), exp(v.lo), exp(v.hi) }; }

static void table_row(bench_table *t, const char *label, const compare_figures *f) {
    bench_text(t, label);
    bench_number(t, f->sequences);
    bench_number(t, f->positions);
    eval_table_interval(t, exp_of(f->nll), 3);
    eval_table_interval(t, f->kl, 6);
    bench_number(t, f->kl_median);
    bench_number(t, f->kl_p99);
    bench_number(t, f->kl_worst);
    eval_table_interval(t, f->top, 4);
    bench_number(t, exp(f->want_nll.value));
}

static void html_figures_row(buf *b, const char *label, const compare_figures *f, bool ref) {
    html_row_begin(b);
    html_cell(b, false, "%s", label);
    html_cell(b, false, "%d", f->positions);
    if (ref) {
        html_cell(b, false, "%.3g", f->kl.value);
        if (isnan(f->kl.lo)) /* one text has no spread */
            html_cell(b, false, "-");
        else
            html_cell(b, false, "%.3g to %.3g", f->kl.lo, f->kl.hi);
        html_cell(b, false, "%.3g", f->kl_p99);
        html_cell(b, false, "%.2f %%", 100 * f->top.value);
        html_cell(b, false, "%.5g", exp(f->want_nll.value));
    }
    html_cell(b, false, "%.5g", exp(f->nll.value));
    html_row_end(b);
}

static void html_bars_of(buf *b, const char *title, const char *const *labels, const compare_figures *const *f, int n,
                         bool ref) {
    html_bar *bars = xcalloc((size_t)n + 1, sizeof *bars);
    for (int i = 0; i < n; i++) bars[i] = (html_bar){ labels[i], ref ? f[i]->kl : exp_of(f[i]->nll) };
    html_bars(b, title, bars, n, 3);
    free(bars);
}

static bool write_html(const options *o, const char *about, const compare_figures *all, const groups *g, const parts *s,
                       err *e) {
    buf b = { 0 };
    const bool ref = o->has_against;
    static const char *const heads[] = { "",    "positions", "KL mean (nats)", "95 %",
                                         "p99", "same top",  "PPL reference",  "PPL" };
    const char *labels[MAX_GROUPS];
    const compare_figures *f[MAX_GROUPS];
    html_begin(&b, ref ? "KL divergence from the reference" : "Perplexity");
    html_text(&b, str_of(about));
    html_table_begin(&b);
    html_row_begin(&b);
    for (size_t i = 0; i < ARRAY_LEN(heads); i++)
        if (ref || i < 2 || i == ARRAY_LEN(heads) - 1) html_cell(&b, true, "%s", heads[i]);
    html_row_end(&b);
    html_figures_row(&b, "all", all, ref);
    for (int i = 0; i < g->n; i++) {
        html_figures_row(&b, g->v[i].label, &g->f[i], ref);
        labels[i] = g->v[i].label;
        f[i] = &g->f[i];
    }
    html_table_end(&b);
    html_bars_of(&b, ref ? "Mean KL by sort of text and position" : "Perplexity by sort of text and position", labels,
                 f, g->n, ref);
    if (s->n) {
        html_heading(&b, "One part at a time");
        html_text(
            &b,
            STR("Each row is the reference with only this part taken from the model. Sums need not equal the whole."));
        const char **names = xmalloc((size_t)s->n * sizeof *names);
        const compare_figures **figures = xmalloc((size_t)s->n * sizeof *figures);
        for (int i = 0; i < s->n; i++) names[i] = s->v[i].label, figures[i] = &s->v[i].f;
        html_bars_of(&b, "Mean KL of one part alone", names, figures, s->n, true);
        free(names);
        free(figures);
    }
    html_end(&b);
    const bool ok = file_write_atomic(o->html, b.p, b.n, e);
    buf_free(&b);
    return ok;
}

static void print_tables(const char *about, const compare_figures *all, const groups *g, const parts *s, bool ref) {
    bench_table t = { .cols = columns, .n_cols = ARRAY_LEN(columns) };
    table_row(&t, "all", all);
    for (int i = 0; i < g->n; i++) table_row(&t, g->v[i].label, &g->f[i]);
    puts(about);
    bench_table_print(&t, ref ? 3 : 1);
    bench_table_free(&t);
    if (!s->n) return;
    puts("\nKL of the reference with one part of the model in it:");
    double most = 0;
    for (int i = 0; i < s->n; i++) most = fmax(most, s->v[i].f.kl.value);
    for (int i = 0; i < s->n; i++) {
        const double x = s->v[i].f.kl.value;
        const int bar = most > 0 ? (int)(40 * x / most + 0.5) : 0;
        printf("  %-22s %.3e  ", s->v[i].label, x);
        for (int k = 0; k < bar; k++) fputs("\u2588", stdout);
        putchar('\n');
    }
}

static void print_json(const options *o, const char *kind, const engine *g, const compare_source *ref,
                       const calib_data *d, const compare_figures *all, const groups *gr, const parts *s) {
    buf b = { 0 };
    buf_printf(&b, "{\"schema\":\"nibble.eval.%s/1\",", kind);
    eval_json_command(&b);
    buf_byte(&b, ',');
    eval_json_model(&b, "model", g);
    if (ref && ref->g) {
        buf_byte(&b, ',');
        eval_json_model(&b, "reference", ref->g);
    } else if (ref) {
        buf_puts(&b, ",\"reference\":{\"path\":");
        json_write_str(&b, str_of(ref->name));
        buf_puts(&b, ",\"saved_logits\":true}");
    }
    buf_puts(&b, ",\"data\":");
    json_write_str(&b, str_of(d->what));
    buf_printf(&b, ",\"tokens\":%lld,\"skip\":%d,\"seed\":%lld,\"all\":", (long long)d->tokens, o->skip,
               (long long)o->seed);
    json_figures(&b, "all", all, ref != NULL);
    for (int positions = 0; positions < 2; positions++) {
        buf_puts(&b, positions ? ",\"by_position\":[" : ",\"by_kind\":[");
        int n = 0;
        for (int i = 0; i < gr->n; i++) {
            if ((gr->v[i].kind == NULL) != positions) continue;
            if (n++) buf_byte(&b, ',');
            json_figures(&b, gr->v[i].label, &gr->f[i], ref != NULL);
        }
        buf_byte(&b, ']');
    }
    if (s->n) {
        buf_puts(&b, ",\"parts\":[");
        for (int i = 0; i < s->n; i++) {
            if (i) buf_byte(&b, ',');
            json_figures(&b, s->v[i].label, &s->v[i].f, true);
        }
        buf_byte(&b, ']');
    }
    buf_puts(&b, "}\n");
    fwrite(b.p, 1, b.n, stdout);
    buf_free(&b);
}

static bool run(const options *o, const char *kind, const char *dir, err *e) {
    calib_data d = { 0 };
    compare_source ref = { 0 };
    compare_result r = { 0 };
    groups *gr = xcalloc(1, sizeof *gr);
    parts s = { 0 };
    engine *g = NULL;
    const calib_args ca = {
        .calib = o->data, .calib_ids = o->ids, .samples = o->samples, .seq = o->seq, .seed = o->seed
    };
    int longest = 1;
    bool ok = calibration_data(&d, &ca, dir, e);
    for (int i = 0; i < d.n; i++) longest = (int)d.v[i].n > longest ? (int)d.v[i].n : longest;
    const engine_options eo = { .ops = cmd_ops_options(),
                                .ctx = longest,
                                .kv = (kv_mode)o->kv,
                                .act = (act_mode)o->act,
                                .memory_bytes = o->memory,
                                .no_text = true },
                         re = { .ops = cmd_ops_options(),
                                .ctx = longest,
                                .kv = (kv_mode)o->ref_kv,
                                .memory_bytes = o->memory,
                                .no_text = true };
    ok = ok && engine_open(&g, dir, &eo, e) && (!o->has_against || compare_open(&ref, o->against, &re, e));
    if (ok && o->per_layer && !ref.g)
        ok = fail(e, ERR_USAGE, "E-USAGE", "eval %s: --per-layer needs --against a model, not saved logits", kind);
    const compare_source *with = o->has_against ? &ref : NULL;
    ok = ok && compare_run(&r, g, with, &d, o->skip, cmd_interrupt(), e);
    if (ok && r.n == 0)
        ok = fail(e, ERR_INPUT, "E-CALIB-EMPTY", "eval %s: no position is left to compare (lower --skip)", kind);
    ok = ok && (!o->per_layer || run_parts(&s, &ref, g, o, &d, e));
    if (ok) {
        char a[400], about[1400];
        const compare_figures all = compare_summary(&r, NULL, NULL, (uint64_t)o->seed);
        find_groups(gr, &r, &d, (uint64_t)o->seed);
        eval_describe(a, sizeof a, g);
        int n = snprintf(about, sizeof about, "%s", a);
        if (ref.g)
            eval_describe(a, sizeof a, ref.g);
        else
            snprintf(a, sizeof a, "%s", o->has_against ? ref.name : "");
        if (o->has_against) n += snprintf(about + n, sizeof about - (size_t)n, " against %s", a);
        snprintf(about + n, sizeof about - (size_t)n, ". Texts: %s.", d.what);
        if (o->html) ok = write_html(o, about, &all, gr, &s, e);
        if (ok && cmd_common()->json)
            print_json(o, kind, g, with, &d, &all, gr, &s);
        else if (ok)
            print_tables(about, &all, gr, &s, o->has_against);
    }
    free(s.v);
    free(gr);
    compare_free(&r);
    compare_close(&ref);
    engine_close(g);
    calib_data_free(&d);
    return ok;
}

static int command(int argc, char **argv, bool kl, err *e) {
    options o = { .samples = 64, .seq = 256, .seed = 1 };
    arg_opt opts[16];
    int n = 0;
    opts[n++] = (arg_opt){ .type = ARG_GROUP, .help = kl ? "Comparison" : "Perplexity" };
    if (kl) {
        opts[n++] = (arg_opt){ .type = ARG_STR,
                               .name = "against",
                               .meta = "MODEL|FILE",
                               .dst = &o.against,
                               .given = &o.has_against,
                               .none = "",
                               .help = "the reference: a model, or logits saved by `nibble logits` from the same ids" };
        opts[n++] =
            (arg_opt){ .type = ARG_FLAG,
                       .name = "per-layer",
                       .dst = &o.per_layer,
                       .help = "also the reference with one family, and one layer, of the model in it at a time" };
        opts[n++] = (arg_opt){ .type = ARG_ENUM,
                               .name = "against-kv",
                               .dst = &o.ref_kv,
                               .choices = cmd_kv_choices,
                               .help = "KV cache of the reference" };
    }
    opts[n++] =
        (arg_opt){ .type = ARG_STR,
                   .name = "data",
                   .meta = "FILE",
                   .dst = &o.data,
                   .none = "the built-in corpus",
                   .help =
                       "text, or JSON lines with `text` or `messages` and perhaps `kind`; `self`: the model writes" };
    opts[n++] = (arg_opt){ .type = ARG_STR,
                           .name = "ids",
                           .meta = "FILE",
                           .dst = &o.ids,
                           .none = "",
                           .help = "token ids instead, as for `nibble logits`" };
    opts[n++] = (arg_opt){ .type = ARG_INT,
                           .name = "samples",
                           .meta = "N",
                           .dst = &o.samples,
                           .lo = 0,
                           .hi = INT32_MAX,
                           .help = "at most so many texts; 0 = all" };
    opts[n++] = (arg_opt){ .type = ARG_INT,
                           .name = "seq",
                           .meta = "N",
                           .dst = &o.seq,
                           .lo = 0,
                           .hi = 1 << 24,
                           .help = "tokens per text; 0 = all" };
    opts[n++] = (arg_opt){ .type = ARG_INT,
                           .name = "skip",
                           .meta = "N",
                           .dst = &o.skip,
                           .lo = 0,
                           .hi = 1 << 24,
                           .help = "leave out the first N positions of each" };
    opts[n++] = (arg_opt){ .type = ARG_INT64,
                           .name = "seed",
                           .meta = "N",
                           .dst = &o.seed,
                           .lo = 0,
                           .hi = INT64_MAX,
                           .help = "of the bootstrap, and of `self`" };
    opts[n++] = (arg_opt){
        .type = ARG_ENUM, .name = "kv", .dst = &o.kv, .choices = cmd_kv_choices, .help = "KV cache of the model"
    };
    opts[n++] = (arg_opt){ .type = ARG_ENUM,
                           .name = "act",
                           .dst = &o.act,
                           .choices = cmd_act_choices,
                           .help = "inputs of quantized Linears" };
    opts[n++] = (arg_opt){ .type = ARG_BYTES,
                           .name = "memory",
                           .meta = "SIZE",
                           .dst = &o.memory,
                           .lo = 1,
                           .hi = INT64_MAX,
                           .none = "what is available",
                           .help = "refuse to plan for more" };
    opts[n++] = (arg_opt){
        .type = ARG_STR, .name = "html", .meta = "FILE", .dst = &o.html, .none = "", .help = "a report to look at"
    };
    const arg_spec spec = {
        .usage = kl ? "eval kl [options] [MODEL_DIR] --against MODEL|FILE" : "eval ppl [options] [MODEL_DIR]",
        .about =
            kl ? "How far a model's next-token distributions are from a reference's, over the same texts: mean, median "
                 "and worst KL "
                 "divergence in nats, agreement on the most likely token, perplexities; with 95 % intervals over texts."
               : "Perplexity over texts with a 95 % interval over texts.",
        .opts = opts,
        .count = n,
        .max_positional = 1,
        .examples = kl ? "  nibble eval kl MODEL-NVFP4 --against MODEL --per-layer --html kl.html\n"
                         "  nibble eval kl MODEL-NVFP4 --against bf16-logits.safetensors --ids ids.json\n"
                       : "  nibble eval ppl MODEL --data book.txt --seq 2048\n",
    };
    arg_strings pos = { 0 };
    bool done;
    const char *dir;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done) {
        if (kl && !o.has_against)
            fail(e, ERR_USAGE, "E-USAGE", "eval kl: --against MODEL or FILE is needed");
        else if (o.data && o.ids)
            fail(e, ERR_USAGE, "E-USAGE", "eval: --data and --ids exclude each other");
        else if (cmd_model_dir(&dir, &pos, 0, e) && !run(&o, kl ? "kl" : "ppl", dir, e))
            CHECK(e->kind != ERR_NONE, "a failure without a reason");
    }
    arg_strings_free(&pos);
    return 0;
}

int eval_kl(int argc, char **argv, err *e) { return command(argc, argv, true, e); }
int eval_ppl(int argc, char **argv, err *e) { return command(argc, argv, false, e); }
