/* nibble inspect: what a checkpoint is and holds, without running it. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "model/census.h"
#include "model/scan.h"
#include "text/template.h"

typedef struct report {
    const char *dir;
    ckpt files;
    model_config config;
    census census;
    bool scanned, has_template;
    scan_result scan;
    double scan_seconds;
    template_traits traits;
} report;

/* ---- shared by both forms ---- */

static bool mtp_present(const report *r) { return r->census.of[WC_MTP].tensors > 0; }

/* As the checkpoint declares, else BF16. */
static bool kv_fp8(const report *r) {
    return r->census.kv_declared && str_starts(str_of(r->census.kv_declared), STR("FP8"));
}
static int64_t kv_bytes(const report *r) { return config_kv_bytes_per_token(&r->config, kv_fp8(r) ? 1 : 2, false); }
static int64_t kv_bytes_mtp(const report *r) {
    return mtp_present(r) ? config_kv_bytes_per_token(&r->config, kv_fp8(r) ? 1 : 2, true) - kv_bytes(r) : 0;
}

static void class_format(buf *b, const census_class *k) {
    buf_clear(b);
    census_format_text(b, k);
}

/* "[3, 0, 17]": where flat index i lies in a tensor. */
static void coordinates(buf *b, const st_tensor *t, int64_t i) {
    int64_t at[ST_MAX_RANK];
    for (int k = t->rank - 1; k >= 0; k--) {
        at[k] = i % t->shape[k];
        i /= t->shape[k];
    }
    buf_byte(b, '[');
    for (int k = 0; k < t->rank; k++) buf_printf(b, "%s%lld", k ? ", " : "", (long long)at[k]);
    buf_byte(b, ']');
}

/* ---- JSON ---- */

static void j_key(buf *b, const char *key) {
    if (b->p[b->n - 1] != '{') buf_puts(b, ", ");
    json_write_str(b, str_of(key));
    buf_puts(b, ": ");
}

static void j_int(buf *b, const char *key, int64_t v) {
    j_key(b, key);
    buf_printf(b, "%lld", (long long)v);
}

static void j_bool(buf *b, const char *key, bool v) {
    j_key(b, key);
    buf_puts(b, v ? "true" : "false");
}

static void j_double(buf *b, const char *key, double v) {
    j_key(b, key);
    json_write_double(b, v);
}

static void j_str(buf *b, const char *key, const char *v) {
    j_key(b, key);
    if (v)
        json_write_str(b, str_of(v));
    else
        buf_puts(b, "null");
}

static void j_open(buf *b, const char *key) {
    j_key(b, key);
    buf_byte(b, '{');
}

static void j_shape(buf *b, const model_config *c) {
    j_open(b, "shape");
    const struct {
        const char *key;
        int v;
    } fields[] = { { "vocab", c->vocab },
                   { "hidden", c->hidden },
                   { "gdn_layers", c->gdn_layers },
                   { "attention_layers", c->attn_layers },
                   { "heads", c->heads },
                   { "kv_heads", c->kv_heads },
                   { "head_dim", c->head_dim },
                   { "rotary_dim", c->rotary_dim },
                   { "linear_key_heads", c->lin_k_heads },
                   { "linear_value_heads", c->lin_v_heads },
                   { "linear_key_dim", c->lin_k_dim },
                   { "linear_value_dim", c->lin_v_dim },
                   { "conv_kernel", c->conv_kernel },
                   { "experts", c->experts },
                   { "experts_per_token", c->topk },
                   { "expert_width", c->moe_inter },
                   { "shared_expert_width", c->shared_inter },
                   { "dense_width", c->inter } };
    for (int i = 0; i < (int)ARRAY_LEN(fields); i++) j_int(b, fields[i].key, fields[i].v);
    j_bool(b, "tied_head", c->tied);
    j_bool(b, "attention_gate", c->attn_gate);
    j_str(b, "rope", c->rope == ROPE_YARN ? "yarn" : "default");
    j_double(b, "rope_theta", c->rope_theta);
    buf_byte(b, '}');
}

static void j_classes(buf *b, const report *r) {
    buf format = { 0 };
    j_open(b, "bytes");
    for (int k = 0; k <= WC_COUNT; k++) {
        const census_class *c = &r->census.of[k];
        if (!c->tensors) continue;
        class_format(&format, c);
        j_open(b, weight_class_name((weight_class)k));
        j_str(b, "format", format.p);
        j_int(b, "params", c->params);
        j_int(b, "bytes", (int64_t)c->bytes);
        j_int(b, "tensors", c->tensors);
        buf_byte(b, '}');
    }
    buf_byte(b, '}');
    buf_free(&format);
}

static void j_kv_pair(buf *b, const char *key, const kv_scale *s) {
    j_key(b, key);
    buf_byte(b, '[');
    if (s->has_k)
        json_write_double(b, s->k);
    else
        buf_puts(b, "null");
    buf_puts(b, ", ");
    if (s->has_v)
        json_write_double(b, s->v);
    else
        buf_puts(b, "null");
    buf_byte(b, ']');
}

static void j_mtp_kv(buf *b, const report *r) {
    const census *a = &r->census;
    buf format = { 0 };
    class_format(&format, &a->of[WC_MTP]);
    j_open(b, "mtp");
    j_bool(b, "present", mtp_present(r));
    j_int(b, "declared_layers", r->config.mtp_layers);
    j_str(b, "format", mtp_present(r) ? format.p : NULL);
    j_open(b, "scales");
    j_int(b, "weight", a->mtp_weight_scales);
    j_int(b, "input", a->mtp_input_scales);
    if (a->kv_mtp.has_k || a->kv_mtp.has_v) j_kv_pair(b, "kv", &a->kv_mtp);
    buf_puts(b, "}}");
    buf_free(&format);

    j_open(b, "kv");
    j_str(b, "declared", a->kv_declared);
    j_open(b, "scales");
    for (int i = 0; i < CONFIG_MAX_LAYERS; i++) {
        char layer[16];
        snprintf(layer, sizeof layer, "%d", i);
        if (a->kv[i].has_k || a->kv[i].has_v) j_kv_pair(b, layer, &a->kv[i]);
    }
    buf_puts(b, "}}");
}

/* Where the scales came from, as the export itself records it (quant/configs.h). */
static const json *provenance_of(const report *r) { return json_get(r->files.hf_quant, "nibble"); }

static void j_provenance(buf *b, const report *r) {
    const json *p = provenance_of(r);
    j_key(b, "provenance");
    if (json_is(p, JSON_OBJECT))
        json_write(b, p);
    else
        buf_puts(b, "null");
}

static void j_scan(buf *b, const report *r) {
    if (!r->scanned) return;
    j_open(b, "scan");
    j_int(b, "tensors", r->scan.tensors);
    j_int(b, "bytes", (int64_t)r->scan.bytes);
    j_int(b, "nonfinite", r->scan.count);
    j_double(b, "seconds", r->scan_seconds);
    j_key(b, "findings");
    buf_byte(b, '[');
    for (int i = 0; i < r->scan.n; i++) {
        const scan_finding *f = &r->scan.found[i];
        buf_puts(b, i ? ", {" : "{");
        j_str(b, "tensor", f->tensor->name.p);
        j_int(b, "count", f->count);
        j_int(b, "first_index", f->first);
        j_key(b, "first");
        coordinates(b, f->tensor, f->first);
        buf_byte(b, '}');
    }
    buf_puts(b, "]}");
}

static void print_json(const report *r) {
    const model_config *c = &r->config;
    const census *a = &r->census;
    buf b = { 0 };
    buf_byte(&b, '{');
    j_str(&b, "schema", "nibble.inspect/1");
    j_str(&b, "path", r->dir);
    j_str(&b, "architecture", c->architecture);
    j_str(&b, "model_type", c->model_type);
    j_str(&b, "dtype", dtype_name(c->type));
    j_int(&b, "layers", c->layers);
    j_int(&b, "parameters", a->total.params);
    j_int(&b, "total_bytes", (int64_t)a->total.bytes);
    j_int(&b, "tensors", a->total.tensors);
    j_int(&b, "shards", r->files.shard_count);
    j_shape(&b, c);
    j_classes(&b, r);
    j_str(&b, "quantization", a->quant_algo);
    j_provenance(&b, r);
    j_mtp_kv(&b, r);
    j_open(&b, "vision");
    j_bool(&b, "present", a->of[WC_VISION].tensors > 0);
    j_int(&b, "tensors", a->of[WC_VISION].tensors);
    j_int(&b, "bytes", (int64_t)a->of[WC_VISION].bytes);
    buf_byte(&b, '}');
    j_int(&b, "context", c->max_position);
    j_int(&b, "state_bytes_per_sequence", config_state_bytes(c));
    j_int(&b, "kv_bytes_per_token", kv_bytes(r));
    j_int(&b, "kv_bytes_per_token_mtp", kv_bytes_mtp(r));
    j_key(&b, "stop_ids");
    buf_byte(&b, '[');
    for (int i = 0; i < c->stop_count; i++) buf_printf(&b, "%s%d", i ? ", " : "", c->stop_ids[i]);
    buf_byte(&b, ']');
    j_int(&b, "bytes_per_token", (int64_t)a->bytes_per_token);
    if (r->has_template) {
        j_open(&b, "template");
        j_bool(&b, "tools", r->traits.tools);
        j_bool(&b, "thinking_switch", r->traits.thinking_switch);
        j_bool(&b, "system", r->traits.system);
        j_bool(&b, "images", r->traits.images);
        j_bool(&b, "reasoning_content", r->traits.reasoning_content);
        buf_byte(&b, '}');
    } else {
        j_str(&b, "template", NULL);
    }
    j_scan(&b, r);
    buf_puts(&b, "}\n");
    fwrite(b.p, 1, b.n, stdout);
    buf_free(&b);
}

/* ---- table ---- */

/* 1234567 -> "1.23 M" (unit "") or "1.23 MB" (unit "B"); three digits are enough for people, --json has them all. */
static const char *human(char *out, size_t n, double v, const char *unit) {
    static const char *const scale[] = { "", "K", "M", "G", "T" };
    int u = 0;
    while (v >= 999.5 && u < 4) v /= 1000, u++;
    const int digits = u == 0 || v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2;
    snprintf(out, n, "%.*f%s%s%s", digits, v, u || *unit ? " " : "", scale[u], unit);
    return out;
}

static void print_shape(const report *r) {
    const model_config *c = &r->config;
    printf("layers       %d: %d gated delta net, %d full attention; hidden %d, vocabulary %d%s\n", c->layers,
           c->gdn_layers, c->attn_layers, c->hidden, c->vocab, c->tied ? " (head tied to the embedding)" : "");
    printf("attention    %d query and %d key/value heads of %d%s; RoPE over %d dimensions, theta %g%s\n", c->heads,
           c->kv_heads, c->head_dim, c->attn_gate ? ", gated" : "", c->rotary_dim, c->rope_theta,
           c->rope == ROPE_YARN ? ", YaRN" : "");
    printf("delta net    %d key and %d value heads of %d x %d; convolution over %d tokens\n", c->lin_k_heads,
           c->lin_v_heads, c->lin_k_dim, c->lin_v_dim, c->conv_kernel);
    if (c->is_moe)
        printf("experts      %d, %d per token, width %d; shared expert of width %d\n", c->experts, c->topk,
               c->moe_inter, c->shared_inter);
    else
        printf("MLP          width %d\n", c->inter);
}

static void print_classes(const report *r) {
    char params[24], bytes[24];
    buf format = { 0 };
    printf("\n%-14s %8s %10s %10s  %s\n", "class", "tensors", "params", "bytes", "format");
    for (int k = 0; k <= WC_COUNT + 1; k++) {
        const census_class *c = k <= WC_COUNT ? &r->census.of[k] : &r->census.total;
        if (!c->tensors) continue;
        class_format(&format, c);
        printf("%-14s %8d %10s %10s  %s\n", k <= WC_COUNT ? weight_class_name((weight_class)k) : "total", c->tensors,
               human(params, sizeof params, (double)c->params, ""), human(bytes, sizeof bytes, (double)c->bytes, "B"),
               format.p);
    }
    buf_free(&format);
}

static void print_kv_scales(const census *a) {
    if (a->kv_declared || a->kv_scales)
        printf("KV cache     declared %s, %d scale tensors\n", a->kv_declared ? a->kv_declared : "nothing",
               a->kv_scales);
    for (int i = 0; i < CONFIG_MAX_LAYERS; i++)
        if (a->kv[i].has_k || a->kv[i].has_v)
            printf("  layer %-5d k %-10.5g v %.5g\n", i, (double)a->kv[i].k, (double)a->kv[i].v);
    if (a->kv_mtp.has_k || a->kv_mtp.has_v)
        printf("  draft head  k %-10.5g v %.5g\n", (double)a->kv_mtp.k, (double)a->kv_mtp.v);
}

static void print_provenance(const report *r) {
    const json *p = provenance_of(r);
    if (!r->census.quant_algo) return;
    printf("quantized    %s%s\n", r->census.quant_algo,
           json_is(p, JSON_OBJECT) ? "" : "; where its scales came from is not recorded");
    for (uint32_t i = 0; json_is(p, JSON_OBJECT) && i < p->n; i++) {
        const json_member *m = &p->u.members[i];
        if (m->value.type == JSON_STRING && json_str(&m->value).n)
            printf("  " STR_FMT "%*s " STR_FMT "\n", STR_ARG(m->key), m->key.n < 12 ? 12 - (int)m->key.n : 0, "",
                   STR_ARG(json_str(&m->value)));
    }
}

static void print_scan(const report *r) {
    char bytes[24];
    printf("scan         %d tensors, %s in %.2f s: ", r->scan.tensors,
           human(bytes, sizeof bytes, (double)r->scan.bytes, "B"), r->scan_seconds);
    if (!r->scan.count)
        printf("all finite\n");
    else
        printf("%lld NaN or Inf in %d tensors\n", (long long)r->scan.count, r->scan.n);
    buf where = { 0 };
    for (int i = 0; i < r->scan.n; i++) {
        const scan_finding *f = &r->scan.found[i];
        buf_clear(&where);
        coordinates(&where, f->tensor, f->first);
        printf("  %s: %lld of %llu, first at %s\n", f->tensor->name.p, (long long)f->count,
               (unsigned long long)f->tensor->elems, where.p);
    }
    buf_free(&where);
}

static void print_table(const report *r) {
    const model_config *c = &r->config;
    const census *a = &r->census;
    char n[24], m[24];
    printf("%s\n%s (%s), %s parameters, %s in %d file%s\n\n", r->dir,
           c->architecture[0] ? c->architecture : "no architecture named", c->model_type,
           human(n, sizeof n, (double)a->total.params, ""), human(m, sizeof m, (double)a->total.bytes, "B"),
           r->files.shard_count, r->files.shard_count == 1 ? "" : "s");
    print_shape(r);
    print_classes(r);
    printf("\ndraft head   %s\n",
           !mtp_present(r) ? (c->mtp_layers ? "absent, though declared" : "absent") : "present (mtp)");
    printf("vision       %s\n", a->of[WC_VISION].tensors ? "present, not used" : "absent");
    printf("per token    reads %s of weights (one sequence), keeps %s of %s KV",
           human(n, sizeof n, (double)a->bytes_per_token, "B"), human(m, sizeof m, (double)kv_bytes(r), "B"),
           kv_fp8(r) ? "FP8" : "BF16");
    if (mtp_present(r)) printf(" + %s for the draft head", human(m, sizeof m, (double)kv_bytes_mtp(r), "B"));
    printf("\n");
    printf("per sequence %s of recurrent state; context %d tokens\n",
           human(n, sizeof n, (double)config_state_bytes(c), "B"), c->max_position);
    printf("stop ids    ");
    for (int i = 0; i < c->stop_count; i++) printf(" %d", c->stop_ids[i]);
    printf("%s\n", c->stop_count ? "" : " none");
    if (r->has_template)
        printf("template     %s%s%s%s%s\n", r->traits.system ? "system " : "", r->traits.tools ? "tools " : "",
               r->traits.thinking_switch ? "thinking-switch " : "", r->traits.reasoning_content ? "reasoning " : "",
               r->traits.images ? "images" : "");
    else
        printf("template     none\n");
    print_provenance(r);
    print_kv_scales(a);
    if (r->scanned) print_scan(r);
}

/* ---- the command ---- */

/* A checkpoint without a template is whole; one with a broken template is worth a line. */
static void read_template(report *r) {
    chat_template *t;
    err e = { 0 };
    if (template_open(&t, r->dir, &e)) {
        r->traits = template_describe(t);
        r->has_template = true;
        template_close(t);
    } else if (!str_is(str_of(e.id), "E-TEMPLATE-MISSING")) {
        log_say("W-INSPECT-TEMPLATE", "%s", e.msg);
    }
}

static bool scan(report *r, err *e) {
    pool *p;
    if (!pool_new(&p, cmd_common()->threads, e)) return false;
    const double t0 = clock_seconds();
    scan_checkpoint(&r->scan, &r->files, p);
    r->scan_seconds = clock_seconds() - t0;
    r->scanned = true;
    pool_free(p);
    return true;
}

static bool make_report(report *r, bool want_scan, err *e) {
    if (!ckpt_open(&r->files, r->dir, e) ||
        !config_read(&r->config, r->files.config, r->files.generation, r->files.dir, e))
        return false;
    census_take(&r->census, &r->files, &r->config);
    read_template(r);
    return !want_scan || scan(r, e);
}

int cmd_inspect(int argc, char **argv, err *e) {
    bool want_scan = false;
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Inspect" },
        { .type = ARG_FLAG,
          .name = "scan",
          .dst = &want_scan,
          .help = "read all tensors and name those with NaN or Inf; exit 1 when there are any" },
    };
    const arg_spec spec = {
        .usage = "inspect [options] [MODEL_DIR]",
        .about = "What a checkpoint is and holds: shape, parameters and bytes by class and format, draft head, "
                 "KV cache, context, template.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble inspect\n  nibble inspect MODEL --scan\n  nibble inspect MODEL --json\n"
    };
    arg_strings pos = { 0 };
    bool done;
    int code = 0;
    report r = { 0 };
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && cmd_model_dir(&r.dir, &pos, 0, e) &&
        make_report(&r, want_scan, e)) {
        cmd_common()->json ? print_json(&r) : print_table(&r);
        code = r.scan.count ? 1 : 0;
    }
    scan_free(&r.scan);
    ckpt_close(&r.files);
    arg_strings_free(&pos);
    return code;
}
