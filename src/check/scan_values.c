#include "check/scan_values.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/names.h"
#include "model/scan.h"
#include "num/bf16.h"

/* A block scale is never smaller than 2^-9 (byte 01); from 04 on the largest value of a block cannot decode to 0. */
enum { BYTE_ONE = 0x38, BYTE_MAX = 0x7e, BYTE_SMALL = 0x04 };

typedef struct value_stats {
    int64_t nonfinite, first; /* NaN or Inf, and the first one's index */
    bool all_zero;
    /* block scales: */
    int64_t zero, negative, first_bad, saturated, floored;
    uint8_t first_byte;
    /* codes: blocks of zeros under a scale that says otherwise */
    int64_t holes, first_hole;
} value_stats;

typedef struct job {
    check_view *v;
    const linear **of; /* [n] the Linear whose codes a tensor holds, or NULL */
    bool *is_scale;    /* [n] block scales */
    value_stats *s;    /* [n] */
    atomic_int next, stopped;
    atomic_ullong done;
    const check_progress *progress;
} job;

static bool all_zero(const uint8_t *p, uint64_t n) {
    uint64_t x, any = 0, i = 0;
    for (; i + 8 <= n && !any; i += 8) memcpy(&x, p + i, 8), any |= x;
    for (; i < n; i++) any |= p[i];
    return !any;
}

static void scan_block_scales(value_stats *s, const uint8_t *p, int64_t n) {
    int64_t count[256] = { 0 };
    s->all_zero = all_zero(p, (uint64_t)n);
    for (int64_t i = 0; i < n; i++) count[p[i]]++;
    s->zero = count[0];
    s->nonfinite = count[0x7f] + count[0xff];
    for (int b = 0x80; b < 0xff; b++) s->negative += count[b];
    s->saturated = count[BYTE_MAX];
    s->floored = count[1];
    s->first_bad = -1;
    if (!s->zero && !s->nonfinite && !s->negative) return;
    int64_t i = 0;
    while (p[i] != 0 && p[i] < 0x7f) i++;
    s->first_bad = i;
    s->first_byte = p[i];
}

/* The largest value of a block maps to 6, or near it: a block of zero codes has the scale byte of zeros (or a tiny one). */
static void scan_codes(value_stats *s, const uint8_t *codes, const uint8_t *scales, int64_t blocks) {
    uint64_t any = 0;
    s->first_hole = -1;
    for (int64_t i = 0; i < blocks; i++) {
        uint64_t x;
        memcpy(&x, codes + 8 * i, 8);
        x &= 0x7777777777777777u; /* -0 is zero too */
        any |= x;
        if (LIKELY(x) || scales[i] == BYTE_ONE || scales[i] <= BYTE_SMALL) continue;
        if (!s->holes++) s->first_hole = i;
    }
    s->all_zero = !any;
}

static void scan_tensor(job *j, int i) {
    const st_tensor *t = j->v->all[i];
    value_stats *s = &j->s[i];
    if (j->is_scale[i]) {
        scan_block_scales(s, t->data, (int64_t)t->elems);
    } else if (j->of[i] && j->of[i]->format == LIN_NVFP4) {
        scan_codes(s, t->data, j->of[i]->scale->data, (int64_t)t->bytes / 8);
    } else {
        s->nonfinite = scan_elements(t->data, t->type, (int64_t)t->elems, &s->first);
        s->all_zero = all_zero(t->data, t->bytes);
    }
}

static void scan_share(void *ctx, int thread, int threads) {
    job *j = ctx;
    (void)threads;
    for (int i; (i = atomic_fetch_add(&j->next, 1)) < j->v->n && !atomic_load(&j->stopped);) {
        scan_tensor(j, i);
        atomic_fetch_add(&j->done, j->v->all[i]->bytes);
        if (thread == 0 && j->progress && j->progress->report)
            j->progress->report(j->progress->ctx, atomic_load(&j->done), j->v->bytes);
        if (j->progress && j->progress->cancel && *j->progress->cancel) atomic_store(&j->stopped, 1);
    }
}

/* ---- findings ---- */

static void report_block_scales(check_view *v, const st_tensor *t, const value_stats *s) {
    const struct {
        const char *rule, *what;
        int64_t n;
    } kinds[] = { { "C-SCALE-NAN", "NaN", s->nonfinite },
                  { "C-SCALE-ZERO", "zero", s->zero },
                  { "C-SCALE-NEGATIVE", "negative", s->negative } };
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (kinds[i].n)
            finding_add(v->found, kinds[i].rule, "block", t->name,
                        "%lld of %llu block scales are %s; the first bad one (byte %02X) has index %lld",
                        (long long)kinds[i].n, (unsigned long long)t->elems, kinds[i].what, s->first_byte,
                        (long long)s->first_bad);
    if (s->saturated * 20 > (int64_t)t->elems && s->saturated > 16)
        finding_add(v->found, "C-SCALE-SATURATED", NULL, t->name, "%lld of %llu block scales are at the ceiling of 448",
                    (long long)s->saturated, (unsigned long long)t->elems);
    if (s->floored * 2 > (int64_t)t->elems && s->floored > 16)
        finding_add(v->found, "C-SCALE-COARSE", NULL, t->name, "%lld of %llu block scales are at the floor of 2^-9",
                    (long long)s->floored, (unsigned long long)t->elems);
}

static void report_values(job *j, int i) {
    check_view *v = j->v;
    const st_tensor *t = v->all[i];
    const value_stats *s = &j->s[i];
    if (j->is_scale[i]) return report_block_scales(v, t, s);
    if (name_is_scale(t->name)) return; /* scalars are looked at with their Linear */
    if (s->nonfinite)
        finding_add(v->found, "C-VALUE-NONFINITE", NULL, t->name,
                    "%lld of %llu values are NaN or Inf, the first at index %lld", (long long)s->nonfinite,
                    (unsigned long long)t->elems, (long long)s->first);
    if (s->all_zero && t->rank >= 2 && t->elems > 1)
        finding_add(v->found, "C-VALUE-ZERO", NULL, t->name, "all %llu values are zero",
                    (unsigned long long)t->elems * (t->type == DT_U8 ? 2 : 1));
    else if (s->holes)
        finding_add(v->found, "C-VALUE-HOLE", NULL, t->name,
                    "%lld blocks hold only zeros under a scale that was made for other values; the first is block %lld",
                    (long long)s->holes, (long long)s->first_hole);
}

static void check_scalar(check_view *v, const linear *l, const char *tail, float x) {
    char name[600];
    const int n = snprintf(name, sizeof name, STR_FMT ".%s", STR_ARG(l->name), tail);
    const str object = { name, (size_t)n };
    if (!isfinite(x))
        finding_add(v->found, "C-SCALE-NAN", tail, object, "%g", (double)x);
    else if (x == 0)
        finding_add(v->found, "C-SCALE-ZERO", tail, object, "0");
    else if (x < 0)
        finding_add(v->found, "C-SCALE-NEGATIVE", tail, object, "%g", (double)x);
}

/* By its own record, an export without calibration has input scales of 1. */
static bool data_free(const check_view *v) {
    const json *c = json_get(json_get(v->hf_quant, "nibble"), "calibration");
    return json_is(c, JSON_STRING) && str_find(json_str(c), STR("data-free")) >= 0;
}

static void check_scalars(job *j, const linear *l) {
    check_view *v = j->v;
    const int at = view_number(v, l->weight->name);
    if (l->has_scale_2) check_scalar(v, l, l->format == LIN_FP8 ? "weight_scale" : "weight_scale_2", l->scale_2);
    if (l->has_input) check_scalar(v, l, "input_scale", l->input_scale);
    if (l->has_scale_2 && l->scale_2 == 1.0f && at >= 0 && !j->s[at].all_zero)
        finding_add(v->found, "C-SCALE-ONE", "weight", l->name, "its weight scale is exactly 1");
    if (l->has_input && l->input_scale == 1.0f)
        finding_add_as(v->found, data_free(v) ? SEV_NOTE : SEV_WARNING, "C-SCALE-ONE", "input", l->name,
                       "input_scale is exactly 1%s", data_free(v) ? ", as its own record (data-free) says" : "");
}

/* ---- roles: what is far from its kind ---- */

static int by_role(const void *a, const void *b) {
    const linear *x = *(const linear *const *)a, *y = *(const linear *const *)b;
    const int d = strcmp(x->role, y->role);
    return d ? d : (x > y) - (x < y);
}

static int by_float(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static float scale_of(const linear *l, bool input) {
    const float x = input ? (l->has_input ? l->input_scale : 0) : (l->has_scale_2 ? l->scale_2 : 0);
    return isfinite(x) && x > 0 ? x : 0;
}

/* How far a scale may be from the median of its role: weights of one kind are alike, inputs grow through the layers. */
static void outliers(check_view *v, const linear *const *of, int n, bool input) {
    const float limit = input ? 4096.0f : 128.0f;
    float *all = xmalloc((size_t)n * sizeof *all);
    int m = 0;
    for (int i = 0; i < n; i++)
        if (scale_of(of[i], input) > 0) all[m++] = scale_of(of[i], input);
    if (m >= 3) {
        qsort(all, (size_t)m, sizeof *all, by_float);
        const float median = all[m / 2];
        for (int i = 0; i < n; i++) {
            const float x = scale_of(of[i], input), factor = x > median ? x / median : median / x;
            if (x > 0 && x != 1.0f && factor > limit)
                finding_add(v->found, "C-SCALE-OUTLIER", input ? "input" : "weight", of[i]->name,
                            "%s %g is %.3g times %s than the median of %d of its kind (%g)",
                            input ? "input_scale" : "weight scale", (double)x, (double)factor,
                            x > median ? "larger" : "smaller", m, (double)median);
        }
    }
    free(all);
}

static void mixed_inputs(check_view *v, const linear *const *of, int n) {
    int with = 0, total = 0;
    for (int i = 0; i < n; i++)
        if (of[i]->format == LIN_NVFP4) total++, with += of[i]->has_input;
    if (!with || with == total) return;
    for (int i = 0; i < n; i++)
        if (of[i]->format == LIN_NVFP4 && of[i]->has_input != (2 * with > total))
            finding_add(v->found, "C-INPUT-MIXED", of[i]->role, of[i]->name,
                        "%d of %d modules of its kind have an input_scale", with, total);
}

static void check_roles(check_view *v) {
    const linear **all = xmalloc(((size_t)v->n_linears + 1) * sizeof *all);
    int n = 0;
    for (int i = 0; i < v->n_linears; i++)
        if ((v->linears[i].format == LIN_NVFP4 || v->linears[i].format == LIN_FP8) && !v->linears[i].is_mtp)
            all[n++] = &v->linears[i];
    if (n) qsort(all, (size_t)n, sizeof *all, by_role);
    for (int i = 0; i < n;) {
        int m = 1;
        while (i + m < n && strcmp(all[i + m]->role, all[i]->role) == 0) m++;
        outliers(v, all + i, m, false);
        outliers(v, all + i, m, true);
        mixed_inputs(v, all + i, m);
        i += m;
    }
    free(all);
}

/* ---- groups ---- */

static void check_pair(check_view *v, const linear *a, const linear *b) {
    if (a->format == LIN_BROKEN || b->format == LIN_BROKEN) return;
    if (a->format != b->format) {
        if (a->format == LIN_NVFP4 || b->format == LIN_NVFP4)
            finding_add(v->found, "C-SCALE-GROUP", "format", b->name,
                        "%s, but " STR_FMT ", which reads the same input, is %s", lin_format_names[b->format],
                        STR_ARG(a->name), lin_format_names[a->format]);
    } else if (a->format == LIN_NVFP4 && a->has_scale_2 && b->has_scale_2 && !same_scale(a->scale_2, b->scale_2)) {
        finding_add(v->found, "C-SCALE-GROUP", "weight_scale_2", b->name, "weight_scale_2 %g, but " STR_FMT " has %g",
                    (double)b->scale_2, STR_ARG(a->name), (double)a->scale_2);
    } else if (a->format == LIN_NVFP4 && a->has_input && b->has_input && !same_scale(a->input_scale, b->input_scale)) {
        finding_add(v->found, "C-SCALE-GROUP", "input_scale", b->name, "input_scale %g, but " STR_FMT " has %g",
                    (double)b->input_scale, STR_ARG(a->name), (double)a->input_scale);
    }
}

static void check_groups(check_view *v) {
    for (int i = 0; i < v->n_linears; i++) {
        const linear *a = &v->linears[i];
        if (a->fusion < 0 || (i > 0 && v->linears[i - 1].fusion == a->fusion)) continue;
        for (int k = i + 1; k < v->n_linears && v->linears[k].fusion == a->fusion; k++)
            check_pair(v, a, &v->linears[k]);
    }
}

/* ---- inputs: what a norm lets through is known without data ---- */

/* x = (1 + w) * u with mean(u^2) = 1, so max|x| is at least the root mean square of 1 + w over all tokens (roughly), and never
 * more than max|1 + w| * sqrt(n). */
static bool norm_range(const check_view *v, const linear *l, double *rms, double *top) {
    char name[512];
    if (!l->norm || !v->prefix) return false;
    const int n = l->is_mtp ? snprintf(name, sizeof name, "mtp.layers.0.%s", l->norm)
                            : snprintf(name, sizeof name, "%slayers.%d.%s", v->prefix, l->layer, l->norm);
    const st_tensor *t = view_find(v, (str){ name, (size_t)n });
    if (!t || t->rank != 1 || (t->type != DT_BF16 && t->type != DT_F32) || (int64_t)t->elems != l->cols) return false;
    double sum = 0;
    *top = 0;
    for (uint64_t i = 0; i < t->elems; i++) {
        float w;
        uint16_t h;
        if (t->type == DT_F32)
            memcpy(&w, t->data + 4 * i, 4);
        else
            memcpy(&h, t->data + 2 * i, 2), w = bf16_to_f32(h);
        const double g = fabs(1.0 + (double)w);
        sum += g * g;
        if (g > *top) *top = g;
    }
    *rms = sqrt(sum / (double)t->elems);
    *top *= sqrt((double)t->elems);
    return isfinite(*rms) && *rms > 0;
}

static void check_inputs(check_view *v) {
    for (int i = 0; i < v->n_linears; i++) {
        const linear *l = &v->linears[i];
        double rms, top;
        if (!l->has_input || !(scale_of(l, true) > 0) || l->expert > 0 || !norm_range(v, l, &rms, &top)) continue;
        const double covers = (double)l->input_scale * (l->format == LIN_FP8 ? 448 : 2688);
        if (covers < 0.5 * rms)
            finding_add(
                v->found, "C-INPUT-CLIPS", NULL, l->name,
                "input_scale %g covers inputs up to %.3g, but those behind its norm have a root mean square near %.3g",
                (double)l->input_scale, covers, rms);
        else if (covers > 1000 * top)
            finding_add(v->found, "C-INPUT-LOOSE", NULL, l->name,
                        "input_scale %g covers inputs up to %.3g, %.0f times more than its norm can let through (%.3g)",
                        (double)l->input_scale, covers, covers / top, top);
    }
}

/* ---- the whole ---- */

bool view_values(check_view *v, pool *p, const check_progress *progress, err *e) {
    job j = { .v = v,
              .of = xcalloc((size_t)v->n + 1, sizeof *j.of),
              .is_scale = xcalloc((size_t)v->n + 1, sizeof *j.is_scale),
              .s = xcalloc((size_t)v->n + 1, sizeof *j.s),
              .progress = progress };
    for (int i = 0; i < v->n_linears; i++) {
        const linear *l = &v->linears[i];
        if (l->weight) j.of[view_number(v, l->weight->name)] = l;
        if (l->scale) j.is_scale[view_number(v, l->scale->name)] = true;
    }
    pool_run(p, scan_share, &j);
    const bool ok = !atomic_load(&j.stopped) || fail(e, ERR_INTERRUPTED, "E-CHECK-STOPPED", "stopped");
    for (int i = 0; ok && i < v->n; i++) report_values(&j, i);
    for (int i = 0; ok && i < v->n_linears; i++) check_scalars(&j, &v->linears[i]);
    if (ok) check_roles(v), check_groups(v), check_inputs(v);
    free(j.of);
    free(j.is_scale);
    free(j.s);
    return ok;
}
