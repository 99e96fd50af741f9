#include "check/against.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/names.h"
#include "num/bf16.h"

const char *const made_names[] = { "cuda", "cpu", "either", "unknown" };

/* Relative errors beyond these are no rounding (docs/NVFP4.md, 10; FP8 has 3 mantissa bits). */
static const double NVFP4_BAND = 0.12, FP8_BAND = 0.05;
enum { CHUNK_ROWS_BYTES = 1 << 20 };

typedef struct mate { /* of one linear */
    const st_tensor *src;
    int64_t row0;
    float amax;
    bool vanished; /* no scale for weights this small: written as zeros */
    made_by made;
    bool own; /* the scale is that of its own maximum, not of its group's */
    quant_algorithm algorithm;
    double error;
    int64_t bytes, different, first; /* first differing byte */
    bool first_in_scales;
} mate;

typedef struct job {
    check_view *v;
    ckpt source;
    mate *m; /* [n_linears] */
    quant_kern k;
    atomic_int next, stopped;
    atomic_ullong done;
    uint64_t total;
    const check_progress *progress;
    int pass; /* 0 maxima, 1 bytes and errors */
} job;

/* ---- which part of the source ---- */

static const st_tensor *source_find(const ckpt *c, str name) {
    const st_tensor *t = ckpt_find(c, name);
    const int prefix = name_prefix(name);
    char other[512];
    for (int i = 0; !t && prefix >= 0 && i < NAME_PREFIXES; i++) {
        const int n = snprintf(other, sizeof other, "%s" STR_FMT, name_prefixes[i],
                               STR_ARG(str_skip(name, strlen(name_prefixes[prefix]))));
        if (n > 0 && n < (int)sizeof other) t = ckpt_find(c, (str){ other, (size_t)n });
    }
    return t;
}

static bool is_plain(dtype t) { return t == DT_BF16 || t == DT_F16 || t == DT_F32; }

/* One projection of a routed expert inside a fused source tensor. */
static bool in_fused(const job *j, const linear *l, mate *m) {
    const ptrdiff_t at = str_find(l->name, STR(".experts."));
    if (at < 0 || l->expert < 0) return false;
    const bool down = str_ends(l->name, STR("down_proj")), up = str_ends(l->name, STR("up_proj"));
    char name[512];
    const int n = snprintf(name, sizeof name, STR_FMT ".experts.%s", STR_ARG(((str){ l->name.p, (size_t)at })),
                           down ? "down_proj" : "gate_up_proj");
    m->src = n < (int)sizeof name ? source_find(&j->source, (str){ name, (size_t)n }) : NULL;
    if (!m->src || m->src->rank != 3 || m->src->shape[1] != (down ? 1 : 2) * (int64_t)l->rows ||
        m->src->shape[2] != l->cols || l->expert >= m->src->shape[0])
        return false;
    m->row0 = l->expert * m->src->shape[1] + (up ? l->rows : 0);
    return true;
}

static void find_mate(job *j, int i) {
    const linear *l = &j->v->linears[i];
    mate *m = &j->m[i];
    char name[512];
    const int n = snprintf(name, sizeof name, STR_FMT ".weight", STR_ARG(l->name));
    m->src = source_find(&j->source, (str){ name, (size_t)n });
    if (!m->src && !in_fused(j, l, m)) {
        m->src = NULL;
        finding_add(j->v->found, "C-SRC-MISSING", "module", l->name, "the source has no such matrix");
    } else if (!is_plain(m->src->type) ||
               (m->src->rank == 2 && (m->src->shape[0] != l->rows || m->src->shape[1] != l->cols))) {
        finding_add(j->v->found, "C-SRC-SHAPE", NULL, l->name, "the source's matrix has another shape or dtype");
        m->src = NULL;
    }
}

/* ---- the work of a thread ---- */

typedef struct hands {
    uint8_t *codes, *scales;
    float *wide;
    uint16_t *narrow; /* for unaligned sources */
    int64_t cap;      /* elements */
} hands;

static void hands_make(hands *h, const job *j) {
    h->cap = CHUNK_ROWS_BYTES / 2;
    for (int i = 0; i < j->v->n_linears; i++)
        if (j->v->linears[i].cols > h->cap) h->cap = j->v->linears[i].cols;
    h->codes = xmalloc((size_t)h->cap);
    h->scales = xmalloc((size_t)h->cap / 16 + 1);
    h->wide = xmalloc((size_t)h->cap * sizeof *h->wide);
    h->narrow = xmalloc((size_t)h->cap * sizeof *h->narrow);
}

static void hands_free(hands *h) {
    free(h->codes);
    free(h->scales);
    free(h->wide);
    free(h->narrow);
}

/* Source elements [at, at + n) as BF16 (*half) or float32. */
static const float *source_rows(hands *h, const mate *m, int64_t at, int64_t n, const uint16_t **half) {
    const uint8_t *p = m->src->data + at * dtype_bytes(m->src->type);
    *half = NULL;
    if (m->src->type == DT_BF16) {
        if ((uintptr_t)p % 2 == 0) return *half = (const uint16_t *)(const void *)p, NULL;
        memcpy(h->narrow, p, (size_t)n * 2);
        return *half = h->narrow, NULL;
    }
    if (m->src->type == DT_F32) {
        memcpy(h->wide, p, (size_t)n * 4);
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint16_t x;
            memcpy(&x, p + 2 * i, 2);
            h->wide[i] = f16_to_f32(x);
        }
    }
    return h->wide;
}

static int64_t chunk_of(const hands *h, const linear *l) {
    const int64_t rows = h->cap / l->cols;
    return (rows < 1 ? 1 : rows > l->rows ? l->rows : rows) * l->cols;
}

static void find_amax(job *j, hands *h, const linear *l, mate *m) {
    const int64_t total = (int64_t)l->rows * l->cols, step = chunk_of(h, l), base = m->row0 * l->cols;
    for (int64_t at = 0; at < total; at += step) {
        const int64_t n = total - at < step ? total - at : step;
        const uint16_t *half;
        const float *wide = source_rows(h, m, base + at, n, &half);
        const float a = half ? j->k.amax_bf16(half, n) : j->k.amax_f32(wide, n);
        if (!(a <= m->amax)) m->amax = a;
    }
}

/* Compare what was made with what is there; counts, and the first difference. */
static void compare_bytes(mate *m, const uint8_t *made, const uint8_t *there, int64_t n, int64_t at, bool scales) {
    m->bytes += n;
    if (memcmp(made, there, (size_t)n) == 0) return;
    for (int64_t i = 0; i < n; i++) {
        if (made[i] == there[i]) continue;
        if (!m->different++) m->first = at + i, m->first_in_scales = scales;
    }
}

static void compare_nvfp4(job *j, hands *h, const linear *l, mate *m) {
    const int64_t total = (int64_t)l->rows * l->cols, step = chunk_of(h, l), base = m->row0 * l->cols;
    const quant_arith arith = m->made == MADE_CPU ? ARITH_CPU : ARITH_CUDA;
    stats_error err2 = { 0 };
    for (int64_t at = 0; at < total; at += step) {
        const int64_t n = total - at < step ? total - at : step;
        const uint16_t *half;
        const float *wide = source_rows(h, m, base + at, n, &half);
        const uint8_t *codes = l->weight->data + at / 2, *scales = l->scale->data + at / 16;
        if (m->vanished) {
            memset(h->codes, 0, (size_t)n / 2);
            memset(h->scales, 0x38, (size_t)n / 16);
        } else if (half) {
            quant_encode_bf16(&j->k, m->algorithm, h->codes, h->scales, half, n, l->scale_2, arith);
        } else {
            quant_encode_f32(&j->k, m->algorithm, h->codes, h->scales, wide, n, l->scale_2, arith);
        }
        compare_bytes(m, h->scales, scales, n / 16, at / 16, true);
        compare_bytes(m, h->codes, codes, n / 2, at / 2, false);
        if (half) { /* the decoded values need the room of `wide` */
            j->k.decode_f32(h->wide, codes, scales, n, l->scale_2);
            j->k.error_bf16(&err2, half, h->wide, n);
        } else {
            quant_stats s = { .error = err2 };
            quant_stats_f32(&j->k, &s, wide, codes, scales, n, l->scale_2);
            err2 = s.error;
        }
    }
    m->error = stats_error_relative(&err2);
}

static void compare_fp8(job *j, hands *h, const linear *l, mate *m) {
    const int64_t total = (int64_t)l->rows * l->cols, step = chunk_of(h, l), base = m->row0 * l->cols;
    const float divisor = fp8_weight_divisor(l->scale_2, m->made == MADE_CPU ? ARITH_CPU : ARITH_CUDA);
    stats_error err2 = { 0 };
    if (m->src->type != DT_BF16) return; /* defined for BF16 sources only */
    for (int64_t at = 0; at < total; at += step) {
        const int64_t n = total - at < step ? total - at : step;
        const uint16_t *half;
        source_rows(h, m, base + at, n, &half);
        if (m->vanished)
            memset(h->codes, 0, (size_t)n);
        else
            j->k.fp8_weight(h->codes, half, n, divisor);
        compare_bytes(m, h->codes, l->weight->data + at, n, at, false);
        quant_stats_fp8(&j->k, &err2, half, l->weight->data + at, n, l->scale_2);
    }
    m->error = stats_error_relative(&err2);
}

static bool usable(const linear *l) {
    return (l->format == LIN_NVFP4 || l->format == LIN_FP8) && l->has_scale_2 && isfinite(l->scale_2) && l->scale_2 > 0;
}

static void share(void *ctx, int thread, int threads) {
    job *j = ctx;
    hands h;
    (void)threads;
    hands_make(&h, j);
    for (int i; (i = atomic_fetch_add(&j->next, 1)) < j->v->n_linears && !atomic_load(&j->stopped);) {
        const linear *l = &j->v->linears[i];
        mate *m = &j->m[i];
        if (!m->src || !usable(l)) continue;
        if (j->pass == 0)
            find_amax(j, &h, l, m);
        else if (l->format == LIN_NVFP4)
            compare_nvfp4(j, &h, l, m);
        else
            compare_fp8(j, &h, l, m);
        atomic_fetch_add(&j->done, (uint64_t)l->rows * (uint64_t)l->cols);
        if (thread == 0 && j->progress && j->progress->report)
            j->progress->report(j->progress->ctx, atomic_load(&j->done), j->total);
        if (j->progress && j->progress->cancel && *j->progress->cancel) atomic_store(&j->stopped, 1);
    }
    hands_free(&h);
}

/* ---- which rule made the scale ---- */

static bool try_scale(mate *m, const linear *l, float amax, quant_algorithm how) {
    const float cuda = l->format == LIN_FP8 ? fp8_scale(amax, ARITH_CUDA) : quant_scale_2(how, amax, ARITH_CUDA),
                cpu = l->format == LIN_FP8 ? fp8_scale(amax, ARITH_CPU) : quant_scale_2(how, amax, ARITH_CPU);
    if (!same_scale(l->scale_2, cuda) && !same_scale(l->scale_2, cpu)) return false;
    m->algorithm = how;
    m->made = same_scale(cuda, cpu) ? MADE_BOTH : same_scale(l->scale_2, cuda) ? MADE_CUDA : MADE_CPU;
    return true;
}

static void judge_scale(job *j, int i, float group) {
    const linear *l = &j->v->linears[i];
    mate *m = &j->m[i];
    m->vanished = l->scale_2 == 1.0f && group < 0x1p-100f;
    if (m->vanished) {
        m->made = MADE_BOTH;
    } else if (try_scale(m, l, group, QUANT_MAX) ||
               (l->format == LIN_NVFP4 && try_scale(m, l, group, QUANT_FOUR_OVER_SIX))) {
        return;
    } else if (try_scale(m, l, m->amax, QUANT_MAX)) {
        m->own = true;
    } else {
        m->made = MADE_UNKNOWN;
        finding_add(j->v->found, "C-SRC-SCALE", NULL, l->name,
                    "its weight scale %.9g is that of no rule here (the source's maximum %.9g would give %.9g)",
                    (double)l->scale_2, (double)group,
                    (double)(l->format == LIN_FP8 ? fp8_scale(group, ARITH_CUDA) : nvfp4_scale_2(group, ARITH_CUDA)));
    }
}

static void judge_scales(job *j) {
    const check_view *v = j->v;
    for (int i = 0; i < v->n_linears;) {
        int n = 1;
        const int fusion = v->linears[i].fusion;
        while (fusion >= 0 && i + n < v->n_linears && v->linears[i + n].fusion == fusion) n++;
        float group = 0;
        for (int k = i; k < i + n; k++)
            if (j->m[k].src && v->linears[k].format == LIN_NVFP4 && j->m[k].amax > group) group = j->m[k].amax;
        for (int k = i; k < i + n; k++)
            if (j->m[k].src && usable(&v->linears[k]))
                judge_scale(j, k, v->linears[k].format == LIN_NVFP4 ? group : j->m[k].amax);
        i += n;
    }
}

/* A max export and an mse export have the same tensor scales: a wrong guess shows in the block scales, so try the other. */
static void retry_mse(job *j) {
    hands h;
    hands_make(&h, j);
    int tried = 0, better = 0;
    for (int i = 0; i < j->v->n_linears && tried < 3; i++) {
        const linear *l = &j->v->linears[i];
        mate *m = &j->m[i];
        if (!m->src || !usable(l) || l->format != LIN_NVFP4 || m->algorithm != QUANT_MAX || m->made == MADE_UNKNOWN ||
            m->vanished)
            continue;
        mate as_max = *m, as_mse = *m;
        as_mse.algorithm = QUANT_MSE;
        compare_nvfp4(j, &h, l, &as_max);
        compare_nvfp4(j, &h, l, &as_mse);
        tried++;
        better += as_mse.different < as_max.different;
    }
    hands_free(&h);
    if (!tried || better * 2 <= tried) return;
    for (int i = 0; i < j->v->n_linears; i++)
        if (j->m[i].src && j->v->linears[i].format == LIN_NVFP4 && j->m[i].algorithm == QUANT_MAX)
            j->m[i].algorithm = QUANT_MSE;
}

/* ---- findings ---- */

static void report_linear(job *j, int i, compare_result *r) {
    const linear *l = &j->v->linears[i];
    const mate *m = &j->m[i];
    compare_family *f = &r->family[l->is_mtp][l->family];
    const double band = l->format == LIN_FP8 ? FP8_BAND : NVFP4_BAND;
    f->matrices++;
    r->matrices++;
    f->equal += m->different == 0 && m->made != MADE_UNKNOWN;
    r->equal += m->different == 0 && m->made != MADE_UNKNOWN;
    f->mean += m->error;
    if (m->error >= f->worst) f->worst = m->error, f->worst_name = l->name;
    r->made[m->made]++;
    r->by_algorithm[m->algorithm]++;
    r->bytes_compared += m->bytes;
    r->bytes_different += m->different;
    if (!(m->error <= band))
        finding_add(j->v->found, "C-SRC-ERROR", l->format == LIN_FP8 ? "fp8" : NULL, l->name,
                    "relative error %.4f against the source (sound: at most %.2f)", m->error, band);
    if (m->own)
        finding_add(
            j->v->found, "C-SRC-SCALE", "own", l->name,
            "its weight scale is that of its own maximum, not of its group's: engines that fuse the group differ");
    if (m->different && m->made != MADE_UNKNOWN)
        finding_add(j->v->found, "C-SRC-BYTES", NULL, l->name,
                    "%lld of %lld bytes are not what quantize writes from the source; the first is byte %lld of its %s",
                    (long long)m->different, (long long)m->bytes, (long long)m->first,
                    m->first_in_scales ? "weight_scale" : "weight");
}

/* Tensors that are taken over as they are. */
static void compare_copies(job *j, compare_result *r) {
    check_view *v = j->v;
    const st_tensor **quantized = xcalloc((size_t)v->n + 1, sizeof *quantized);
    for (int i = 0; i < v->n_linears; i++)
        if (v->linears[i].format != LIN_PLAIN)
            quantized[view_number(v, v->linears[i].weight->name)] = v->linears[i].weight;
    for (int i = 0; i < v->n; i++) {
        const st_tensor *t = v->all[i];
        if (quantized[i] || name_is_scale(t->name)) continue;
        const st_tensor *s = source_find(&j->source, t->name);
        mate sliced = { 0 };
        const uint8_t *from = s ? s->data : NULL;
        if (!s && str_ends(t->name, STR(".weight")) && t->rank == 2) {
            const linear l = { .name = { t->name.p, t->name.n - 7 },
                               .expert = name_expert(t->name),
                               .rows = (int)t->shape[0],
                               .cols = (int)t->shape[1] };
            if (in_fused(j, &l, &sliced))
                s = sliced.src, from = s->data + sliced.row0 * t->shape[1] * dtype_bytes(s->type);
        }
        if (!s) {
            finding_add(v->found, "C-SRC-MISSING", "tensor", t->name, "the source has no such tensor");
            continue;
        }
        r->copies++;
        const bool fits = s->type == t->type && (sliced.src || s->bytes == t->bytes);
        if (fits && memcmp(from, t->data, t->bytes) == 0) {
            r->copies_equal++;
            continue;
        }
        uint64_t at = 0;
        while (fits && from[at] == t->data[at]) at++;
        if (fits)
            finding_add(v->found, "C-SRC-COPY", NULL, t->name, "differs from the source, first at byte %llu",
                        (unsigned long long)at);
        else
            finding_add(v->found, "C-SRC-COPY", "dtype", t->name, "%s of %llu bytes here, %s of %llu in the source",
                        dtype_name(t->type), (unsigned long long)t->bytes, dtype_name(s->type),
                        (unsigned long long)s->bytes);
    }
    free(quantized);
}

/* Source tensors that left no trace here. Fused experts appear split, so only classes and the draft head are looked at. */
static void compare_absent(job *j) {
    int mtp = 0, vision = 0;
    for (int i = 0; i < j->source.tensor_count; i++) {
        mtp += name_is_mtp(ckpt_at(&j->source, i)->name);
        vision += name_is_vision(ckpt_at(&j->source, i)->name);
    }
    const json *c = json_get(json_get(j->v->hf_quant, "nibble"), "mtp");
    const bool meant = json_is(c, JSON_STRING) && str_is(json_str(c), "none");
    if (mtp && !j->v->mtp_tensors && !meant)
        finding_add(j->v->found, "C-SRC-MISSING", "mtp", STR("mtp.*"),
                    "the source has a draft head (%d tensors), this has none", mtp);
    if (vision && !j->v->vision_tensors)
        finding_add(j->v->found, "C-SRC-MISSING", "vision", STR("model.visual.*"),
                    "the source has a vision tower (%d tensors), this has none", vision);
}

static void differs(job *j, const char *field, double here, double there) {
    if (here != there)
        finding_add(j->v->found, "C-SRC-CONFIG", field, str_of(field), "%.9g here, %.9g in the source", here, there);
}

/* What changes the arithmetic must have survived, however it is spelled. */
static void compare_configs(job *j, const model_config *b) {
    const model_config *a = &j->v->model;
    const struct {
        const char *field;
        double here, there;
    } fields[] = { { "vocab_size", a->vocab, b->vocab },
                   { "hidden_size", a->hidden, b->hidden },
                   { "num_hidden_layers", a->layers, b->layers },
                   { "rms_norm_eps", (double)a->rms_eps, (double)b->rms_eps },
                   { "tie_word_embeddings", a->tied, b->tied },
                   { "num_attention_heads", a->heads, b->heads },
                   { "num_key_value_heads", a->kv_heads, b->kv_heads },
                   { "head_dim", a->head_dim, b->head_dim },
                   { "attn_output_gate", a->attn_gate, b->attn_gate },
                   { "linear_num_key_heads", a->lin_k_heads, b->lin_k_heads },
                   { "linear_num_value_heads", a->lin_v_heads, b->lin_v_heads },
                   { "num_experts", a->experts, b->experts },
                   { "num_experts_per_tok", a->topk, b->topk },
                   { "rope_type", a->rope, b->rope },
                   { "rope_theta", a->rope_theta, b->rope_theta },
                   { "partial_rotary_factor", a->rotary_dim, b->rotary_dim },
                   { "rope_parameters.factor", a->yarn_factor, b->yarn_factor },
                   { "max_position_embeddings", a->max_position, b->max_position },
                   { "layer_types", memcmp(a->layer, b->layer, sizeof a->layer) != 0, 0 },
                   { "mrope_section", memcmp(a->rope_axis, b->rope_axis, sizeof a->rope_axis) != 0, 0 } };
    if (!j->v->has_model) return;
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) differs(j, fields[i].field, fields[i].here, fields[i].there);
}

static void summarize(job *j, compare_result *r) {
    for (int m = 0; m < 2; m++)
        for (int f = 0; f < QM_COUNT; f++)
            if (r->family[m][f].matrices) r->family[m][f].mean /= r->family[m][f].matrices;
    for (int k = 1; k < 3; k++)
        if (r->by_algorithm[k] > r->by_algorithm[r->algorithm]) r->algorithm = (quant_algorithm)k;
    r->source_bytes = j->source.tensor_bytes;
    r->done = true;
}

static bool open_source(job *j, model_config *config, const char *source, err *e) {
    if (!ckpt_open(&j->source, source, e)) return false;
    if (!config_read(config, j->source.config, j->source.generation, j->source.dir, e))
        return ckpt_close(&j->source), false;
    for (int i = 0; i < j->source.tensor_count; i++) {
        const st_tensor *t = ckpt_at(&j->source, i);
        if (t->type != DT_U8 && t->type != DT_F8_E4M3) continue;
        fail(e, ERR_INPUT, "E-QUANT-ALREADY", "%s: %s is quantized (give the BF16 model)", source, t->name.p);
        ckpt_close(&j->source);
        return false;
    }
    return true;
}

bool view_compare(compare_result *out, check_view *v, const char *source, pool *p, kern_isa isa,
                  const check_progress *progress, err *e) {
    job j = { .v = v, .progress = progress };
    *out = (compare_result){ 0 };
    model_config config;
    if (!open_source(&j, &config, source, e)) return false;
    quant_kern_init(&j.k, isa);
    j.m = xcalloc((size_t)v->n_linears + 1, sizeof *j.m);
    for (int i = 0; i < v->n_linears; i++)
        if (usable(&v->linears[i])) {
            find_mate(&j, i);
            if (j.m[i].src) j.total += 2 * (uint64_t)v->linears[i].rows * (uint64_t)v->linears[i].cols;
        }
    pool_run(p, share, &j);
    judge_scales(&j);
    retry_mse(&j);
    atomic_store(&j.next, 0);
    j.pass = 1;
    if (!atomic_load(&j.stopped)) pool_run(p, share, &j);
    const bool ok = !atomic_load(&j.stopped) || fail(e, ERR_INTERRUPTED, "E-CHECK-STOPPED", "stopped");
    for (int i = 0; ok && i < v->n_linears; i++)
        if (j.m[i].src && usable(&v->linears[i])) report_linear(&j, i, out);
    if (ok) {
        compare_copies(&j, out);
        compare_absent(&j);
        compare_configs(&j, &config);
        summarize(&j, out);
    }
    free(j.m);
    ckpt_close(&j.source);
    return ok;
}
