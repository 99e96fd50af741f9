#include "quant/report.h"

#include <math.h>
#include <stdio.h>

/* One row per (class, format), trunk and draft head apart. */
typedef struct row {
    const char *name;
    bool is_mtp;
    qfamily family;
    qformat format;
    int modules;
    uint64_t elems, before, after;
    double err2, ref2, worst;
    double max_err2; /* what algorithm max would give */
    stats_blocks blocks;
    double amax_ratio; /* largest group amax / own amax */
    const qmodule *worst_module;
} row;

enum { MAX_ROWS = QM_COUNT * 4 * 2 };

typedef struct table {
    row v[MAX_ROWS];
    int n;
} table;

static row *row_of(table *t, const qmodule *m) {
    for (int i = 0; i < t->n; i++)
        if (t->v[i].family == m->family && t->v[i].format == m->format && t->v[i].is_mtp == m->is_mtp) return &t->v[i];
    row *r = &t->v[t->n++];
    *r = (row){ .name = qfamily_name(m->family), .is_mtp = m->is_mtp, .family = m->family, .format = m->format };
    return r;
}

static uint64_t bytes_after(const qmodule *m) {
    const uint64_t n = (uint64_t)m->rows * (uint64_t)m->cols;
    switch (m->format) {
    case QF_KEEP: return n * (uint64_t)dtype_bytes(m->src->type);
    case QF_FP8: return n + 8;
    case QF_NVFP4: return n / 2 + n / 16 + 8;
    case QF_NVFP4_W: return n / 2 + n / 16 + 4;
    }
    return 0;
}

static void add_stats(row *r, const qmodule *m, const qresult *q) {
    double err2 = 0, ref2 = 0, max_err2 = 0;
    for (int i = 0; i < 16; i++) {
        err2 += q->stats.error.err2[i];
        ref2 += q->stats.error.ref2[i];
        max_err2 += q->max_error.ref2[i] > 0 ? q->max_error.err2[i] : q->stats.error.err2[i];
    }
    const double relative = ref2 > 0 ? sqrt(err2 / ref2) : 0;
    r->err2 += err2;
    r->ref2 += ref2;
    r->max_err2 += max_err2;
    if (relative > r->worst || !r->worst_module) r->worst = relative, r->worst_module = m;
    r->blocks.blocks += q->stats.blocks.blocks;
    r->blocks.zero += q->stats.blocks.zero;
    r->blocks.saturated += q->stats.blocks.saturated;
    r->blocks.floored += q->stats.blocks.floored;
    r->blocks.clipped += q->stats.blocks.clipped;
    if (q->own_amax > 0 && q->weight_amax / q->own_amax > r->amax_ratio) r->amax_ratio = q->weight_amax / q->own_amax;
}

static table collect(const plan *p, const quantize_result *res) {
    table t = { .n = 0 };
    for (int i = 0; i < p->n_modules; i++) {
        const qmodule *m = &p->modules[i];
        row *r = row_of(&t, m);
        const uint64_t n = (uint64_t)m->rows * (uint64_t)m->cols;
        r->modules++;
        r->elems += n;
        r->before += n * (uint64_t)dtype_bytes(m->src->type);
        r->after += bytes_after(m);
        if (res && m->format != QF_KEEP) add_stats(r, m, &res->modules[i]);
    }
    return t;
}

static uint64_t source_bytes(const plan *p) {
    uint64_t n = 0;
    for (int i = 0; i < p->src->shard_count; i++)
        for (int k = 0; k < p->src->shards[i].count; k++) n += p->src->shards[i].tensors[k].bytes;
    return n;
}

/* Weight bytes that one decoded token reads at batch 1 without drafts: everything but embedding, vision and draft head, of the
 * routed experts topk out of all. */
static double bytes_per_token(const plan *p) {
    const model_config *c = p->config;
    double n = 0;
    for (int i = 0; i < p->n_modules; i++) {
        const qmodule *m = &p->modules[i];
        if (m->is_mtp) continue;
        n += (double)bytes_after(m) * (m->family == QM_EXPERTS ? (double)c->topk / c->experts : 1);
    }
    if (c->tied) n += (double)c->vocab * c->hidden * 2;
    return n;
}

static double relative(const row *r) { return r->ref2 > 0 ? sqrt(r->err2 / r->ref2) : 0; }
static double relative_max(const row *r) { return r->ref2 > 0 ? sqrt(r->max_err2 / r->ref2) : 0; }

static void json_rows(buf *b, const table *t, bool results) {
    buf_puts(b, "\"classes\":[");
    for (int i = 0; i < t->n; i++) {
        const row *r = &t->v[i];
        buf_printf(b,
                   "%s{\"class\":\"%s\",\"mtp\":%s,\"format\":\"%s\",\"modules\":%d,\"params\":%llu,\"bytes_before\":%"
                   "llu,\"bytes_after\":%llu",
                   i ? "," : "", r->name, r->is_mtp ? "true" : "false", qformat_name(r->format), r->modules,
                   (unsigned long long)r->elems, (unsigned long long)r->before, (unsigned long long)r->after);
        if (results && r->format != QF_KEEP) {
            buf_puts(b, ",\"relative_error\":");
            json_write_double(b, relative(r));
            buf_puts(b, ",\"relative_error_max\":");
            json_write_double(b, relative_max(r));
            buf_puts(b, ",\"worst_error\":");
            json_write_double(b, r->worst);
            buf_puts(b, ",\"worst_module\":");
            json_write_str(b, r->worst_module->name);
            buf_printf(b,
                       ",\"blocks\":%lld,\"zero_blocks\":%lld,\"saturated_blocks\":%lld,\"floored_blocks\":%lld,"
                       "\"clipped_blocks\":%lld,\"group_amax_ratio\":",
                       (long long)r->blocks.blocks, (long long)r->blocks.zero, (long long)r->blocks.saturated,
                       (long long)r->blocks.floored, (long long)r->blocks.clipped);
            json_write_double(b, r->amax_ratio);
        }
        buf_byte(b, '}');
    }
    buf_byte(b, ']');
}

static void text_rows(buf *b, const table *t, bool results) {
    buf_printf(b, "%-22s %-12s %8s %12s %12s %6s", "class", "format", "modules", "before", "after", "bits");
    buf_puts(b, results ? "  rel. error  with max   worst  saturated   floored   clipped  amax ratio\n" : "\n");
    for (int i = 0; i < t->n; i++) {
        const row *r = &t->v[i];
        char name[64];
        snprintf(name, sizeof name, "%s%s", r->is_mtp ? "draft head " : "",
                 r->is_mtp && r->family == QM_MTP_FC ? "fc" : r->name);
        buf_printf(b, "%-22s %-12s %8d %9.2f MB %9.2f MB %6.2f", name, qformat_name(r->format), r->modules,
                   (double)r->before / 1e6, (double)r->after / 1e6, 8.0 * (double)r->after / (double)r->elems);
        if (results && r->format != QF_KEEP)
            buf_printf(b, "  %10.4f  %8.4f  %6.4f  %9lld  %8lld  %8lld  %10.2f", relative(r), relative_max(r), r->worst,
                       (long long)r->blocks.saturated, (long long)r->blocks.floored, (long long)r->blocks.clipped,
                       r->amax_ratio);
        buf_byte(b, '\n');
    }
}

void report_plan(buf *out, const plan *p, bool as_json) {
    static const double bandwidths[] = { 25, 100, 273, 1792, 4300 };
    const table t = collect(p, NULL);
    const double per_token = bytes_per_token(p);
    if (as_json) {
        buf_printf(out,
                   "{\"schema\":\"nibble.quantize-plan/"
                   "1\",\"recipe\":\"%s\",\"source_bytes\":%llu,\"export_bytes\":%llu,\"shards\":%d,\"tensors\":%d,"
                   "\"bytes_per_token\":%.0f,",
                   recipe_names[p->recipe.preset], (unsigned long long)source_bytes(p),
                   (unsigned long long)p->total_bytes, p->n_shards, p->n_tensors, per_token);
        json_rows(out, &t, false);
        buf_puts(out, "}\n");
        return;
    }
    text_rows(out, &t, false);
    buf_printf(out, "\n%.3f GB -> %.3f GB in %d file%s, %d tensors; %.3f GB of weights per decoded token\n",
               (double)source_bytes(p) / 1e9, (double)p->total_bytes / 1e9, p->n_shards, p->n_shards == 1 ? "" : "s",
               p->n_tensors, per_token / 1e9);
    buf_puts(out, "bound of tokens/s at batch 1 without drafts, by read bandwidth:");
    for (size_t i = 0; i < ARRAY_LEN(bandwidths); i++)
        buf_printf(out, "  %.0f GB/s %.1f", bandwidths[i], bandwidths[i] * 1e9 / per_token);
    buf_byte(out, '\n');
}

static void json_kl(buf *b, const char *key, const kl_figures *k) {
    if (!k) return;
    buf_printf(b, ",\"%s\":{\"positions\":%d,\"kl_mean\":", key, k->positions);
    json_write_double(b, k->mean);
    buf_puts(b, ",\"kl_worst\":");
    json_write_double(b, k->worst);
    buf_puts(b, ",\"same_top\":");
    json_write_double(b, k->same_top);
    buf_byte(b, '}');
}

static void text_kl(buf *b, const char *name, const kl_figures *k) {
    if (k)
        buf_printf(
            b, "logits %s: KL %.2e nats on average, %.2e at worst, the same first token at %.1f %% of %d positions\n",
            name, k->mean, k->worst, 100 * k->same_top, k->positions);
}

void report_result(buf *out, const plan *p, const quantize_result *r, const provenance *from, bool as_json) {
    const table t = collect(p, r);
    if (as_json) {
        buf_printf(out,
                   "{\"schema\":\"nibble.quantize/"
                   "1\",\"recipe\":\"%s\",\"arith\":\"%s\",\"algorithm\":\"%s\",\"calibration\":",
                   recipe_names[p->recipe.preset], from->arith, from->algorithm);
        json_write_str(out, str_of(from->calibration));
        buf_printf(out, ",\"mtp_scales\":\"%s\",\"source_bytes\":%llu,\"export_bytes\":%llu,\"zero_modules\":%d,",
                   from->mtp_scales, (unsigned long long)source_bytes(p), (unsigned long long)p->total_bytes,
                   r->zero_modules);
        if (r->seconds > 0)
            buf_printf(out, "\"seconds\":%.3f,\"gb_per_second\":%.3f,\"resumed_tasks\":%d,", r->seconds,
                       (double)r->read_bytes / r->seconds / 1e9, r->resumed_tasks);
        json_rows(out, &t, true);
        json_kl(out, "logits", from->kl);
        json_kl(out, "logits_max", from->kl_max);
        buf_puts(out, "}\n");
        return;
    }
    text_rows(out, &t, true);
    buf_printf(out, "\n%.3f GB -> %.3f GB in %.2f s (%.2f GB/s of source)\n", (double)source_bytes(p) / 1e9,
               (double)p->total_bytes / 1e9, r->seconds, r->seconds > 0 ? (double)r->read_bytes / r->seconds / 1e9 : 0);
    text_kl(out, from->algorithm, from->kl);
    text_kl(out, "max", from->kl_max);
}

void report_classes(buf *out, const plan *p, const quantize_result *r, bool as_json) {
    const table t = collect(p, r);
    if (as_json)
        json_rows(out, &t, r != NULL);
    else
        text_rows(out, &t, r != NULL);
}

void report_card(buf *out, const plan *p, const quantize_result *r, const provenance *from) {
    const table t = collect(p, r);
    buf_printf(
        out,
        "# Quantization\n\nMade with nibble, recipe `%s`, algorithm `%s` (%s arithmetic).\n\n- Calibration: "
        "%s\n- Draft head: %s%s%s\n\n"
        "| class | format | modules | bits per weight | relative error | with `max` |\n|---|---|---|---|---|---|\n",
        recipe_names[p->recipe.preset], from->algorithm, from->arith, from->calibration,
        !p->has_mtp || p->recipe.mtp == MTP_NONE ? "none"
        : p->recipe.mtp == MTP_BF16              ? "BF16"
                                                 : "NVFP4, scales ",
        from->mtp_scales, "");
    for (int i = 0; i < t.n; i++) {
        const row *x = &t.v[i];
        buf_printf(out, "| %s%s | %s | %d | %.2f | ", x->is_mtp ? "draft head: " : "", x->name, qformat_name(x->format),
                   x->modules, 8.0 * (double)x->after / (double)x->elems);
        if (x->format == QF_KEEP)
            buf_puts(out, "0 | 0 |\n");
        else
            buf_printf(out, "%.4f | %.4f |\n", relative(x), relative_max(x));
    }
}
