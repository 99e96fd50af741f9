/* nibble trace: every op of one pass, what it gave, and where it leaves a reference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmd/cmd.h"
#include "cmd/eval.h"
#include "eval/trace.h"
#include "quant/calib_data.h"

typedef struct options {
    const char *ids, *text, *out, *against;
    int kv, act, seq;
    double band;
} options;

static bool read_ids(id_list *out, const options *o, const engine *g, err *e) {
    calib_data d = { 0 };
    if (!o->ids) return tokenizer_encode(g->tok, out, str_of(o->text), NULL, e);
    if (!calib_data_ids(&d, o->ids, 1, o->seq, e)) return false;
    for (size_t i = 0; i < d.v[0].n; i++) ids_add(out, d.v[0].v[i]);
    calib_data_free(&d);
    return true;
}

static int first_apart(const trace_result *r, double band) {
    for (int i = 0; i < r->n; i++)
        if (r->v[i].compared && !(r->v[i].error <= band)) return i;
    return -1;
}

static void print_text(const options *o, const trace_result *r, int apart) {
    size_t wide = 4;
    for (int i = 0; i < r->n; i++) wide = strlen(r->v[i].name) > wide ? strlen(r->v[i].name) : wide;
    printf("  %4s  %-*s  %-11s %13s %12s %12s %12s%s\n", "", (int)wide, "op", "kind", "shape", "absmax", "mean", "rms",
           o->against ? "   from dump" : "");
    for (int i = 0; i < r->n; i++) {
        const trace_entry *t = &r->v[i];
        char shape[32], error[32] = "";
        snprintf(shape, sizeof shape, "%dx%d", t->rows, t->cols);
        if (t->compared) snprintf(error, sizeof error, "   %9.2e", t->error);
        printf("%s %4d  %-*s  %-11s %13s %12.5g %12.5g %12.5g%s\n", i == apart || i == r->bad ? ">" : " ", i, (int)wide,
               t->name, t->op, shape, t->absmax, t->mean, t->rms, error);
    }
    if (r->bad >= 0) {
        const trace_entry *t = &r->v[r->bad];
        printf("%s: %lld values are not finite, the first at row %d, column %d; nothing before it is\n", t->name,
               (long long)t->nonfinite, t->bad_row, t->bad_col);
    }
    if (o->against && apart >= 0)
        printf("%s: relative error %.3g, above the band of %.3g (worst row %d); %d outputs were compared\n",
               r->v[apart].name, r->v[apart].error, o->band, r->v[apart].worst_row, r->compared);
    else if (o->against)
        printf("%d outputs compared, all within %.3g\n", r->compared, o->band);
}

static void print_json(const options *o, const engine *g, const trace_result *r, int apart) {
    buf b = { 0 };
    buf_puts(&b, "{\"schema\":\"nibble.trace/1\",");
    eval_json_model(&b, "model", g);
    buf_puts(&b, ",\"ops\":[");
    for (int i = 0; i < r->n; i++) {
        const trace_entry *t = &r->v[i];
        buf_puts(&b, i ? ",{\"name\":" : "{\"name\":");
        json_write_str(&b, str_of(t->name));
        buf_printf(&b, ",\"op\":\"%s\",\"rows\":%d,\"cols\":%d,\"absmax\":", t->op, t->rows, t->cols);
        json_write_double(&b, t->absmax);
        buf_puts(&b, ",\"mean\":");
        json_write_double(&b, t->mean);
        buf_puts(&b, ",\"rms\":");
        json_write_double(&b, t->rms);
        buf_printf(&b, ",\"nonfinite\":%lld", (long long)t->nonfinite);
        if (t->nonfinite) buf_printf(&b, ",\"row\":%d,\"col\":%d", t->bad_row, t->bad_col);
        if (t->compared) {
            buf_puts(&b, ",\"error\":");
            json_write_double(&b, t->error);
            buf_printf(&b, ",\"worst_row\":%d", t->worst_row);
        }
        buf_byte(&b, '}');
    }
    buf_puts(&b, "],\"first_nonfinite\":");
    if (r->bad >= 0)
        json_write_str(&b, str_of(r->v[r->bad].name));
    else
        buf_puts(&b, "null");
    if (o->against) {
        buf_puts(&b, ",\"band\":");
        json_write_double(&b, o->band);
        buf_printf(&b, ",\"compared\":%d,\"first_out_of_band\":", r->compared);
        if (apart >= 0)
            json_write_str(&b, str_of(r->v[apart].name));
        else
            buf_puts(&b, "null");
    }
    buf_puts(&b, "}\n");
    fwrite(b.p, 1, b.n, stdout);
    buf_free(&b);
}

static int run(const options *o, const char *dir, err *e) {
    engine *g = NULL;
    st_file dump = { 0 };
    id_list ids = { 0 };
    trace_result r = { 0 };
    int apart = -1;
    const engine_options eo = { .ops = cmd_ops_options(),
                                .ctx = o->seq + 1,
                                .chunk = o->seq,
                                .kv = (kv_mode)o->kv,
                                .act = (act_mode)o->act,
                                .any_values = true,
                                .need_text = o->text != NULL,
                                .no_text = o->text == NULL };
    bool ok = (!o->against || st_open(&dump, o->against, e)) && engine_open(&g, dir, &eo, e) && read_ids(&ids, o, g, e);
    const trace_options to = { .against = o->against ? &dump : NULL, .out = o->out };
    ok = ok && trace_run(&r, g, ids.v, (int)ids.n, &to, e);
    if (ok && o->against && r.compared == 0)
        ok = fail(e, ERR_INPUT, "E-TRACE-DUMP",
                  "%s: holds no F32 tensor that this trace has too (hidden.K, final_norm, ... of %zu tokens)",
                  o->against, ids.n);
    if (ok) {
        apart = first_apart(&r, o->band);
        if (cmd_common()->json)
            print_json(o, g, &r, apart);
        else
            print_text(o, &r, apart);
    }
    const int code = ok && (r.bad >= 0 || apart >= 0);
    trace_free(&r);
    ids_free(&ids);
    engine_close(g);
    st_close(&dump);
    return code;
}

int cmd_trace(int argc, char **argv, err *e) {
    options o = { .seq = 512, .band = 1e-3 };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Trace" },
        { .type = ARG_STR,
          .name = "text",
          .key = 'p',
          .meta = "TEXT",
          .dst = &o.text,
          .none = "",
          .help = "the tokens of this text, as it is" },
        { .type = ARG_STR,
          .name = "ids",
          .meta = "FILE",
          .dst = &o.ids,
          .none = "",
          .help = "the first sequence of token ids in FILE, as for `nibble logits`" },
        { .type = ARG_INT,
          .name = "seq",
          .meta = "N",
          .dst = &o.seq,
          .lo = 1,
          .hi = 1 << 14,
          .help = "at most so many tokens" },
        { .type = ARG_STR,
          .name = "against",
          .meta = "FILE",
          .dst = &o.against,
          .none = "",
          .help = "safetensors to compare with: an earlier -o, `nibble logits --hidden`, or hidden.K and final_norm "
                  "from elsewhere" },
        { .type = ARG_DOUBLE,
          .name = "band",
          .meta = "X",
          .dst = &o.band,
          .flo = 0,
          .fhi = 1e9,
          .help = "relative error that is still sound; 0: bit for bit" },
        { .type = ARG_STR,
          .name = "output",
          .key = 'o',
          .meta = "FILE",
          .dst = &o.out,
          .none = "",
          .help = "keep every output, as safetensors" },
        { .type = ARG_ENUM, .name = "kv", .dst = &o.kv, .choices = cmd_kv_choices, .help = "KV cache type" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &o.act,
          .choices = cmd_act_choices,
          .help = "inputs of quantized Linears" },
    };
    const arg_spec spec = { .usage = "trace [options] [MODEL_DIR] (-p TEXT | --ids FILE)",
                            .about = "Run one pass and show every op in the order it ran: largest magnitude, mean, "
                                     "values that are not finite, distance from a "
                                     "reference. Ends at the first op that gives NaN or Inf. Exit 1 when something is "
                                     "not finite or out of band.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .max_positional = 1,
                            .examples =
                                "  nibble trace MODEL-NVFP4 -p \"The capital of France is\"\n"
                                "  nibble trace MODEL --ids ids.json -o bf16.safetensors\n"
                                "  nibble trace MODEL-NVFP4 --ids ids.json --against bf16.safetensors --band 0.1\n" };
    arg_strings pos = { 0 };
    bool done;
    const char *dir;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done) {
        if (!o.ids == !o.text)
            fail(e, ERR_USAGE, "E-USAGE", "trace: -p TEXT or --ids FILE is needed");
        else if (cmd_model_dir(&dir, &pos, 0, e))
            code = run(&o, dir, e);
    }
    arg_strings_free(&pos);
    return code;
}
