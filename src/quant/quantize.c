#include "quant/quantize.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/pool.h"
#include "num/bf16.h"
#include "quant/quantize_job.h"

enum { CHUNK = 4 << 20, GROUP = 5 }; /* source bytes in hand at a time; most modules of a group */
enum { AHEAD_BYTES = 16 << 20 };     /* of a task that is asked for before its turn */

/* What one thread works with. */
typedef struct hands {
    uint64_t cap; /* bytes of each buffer of source rows */
    struct {
        uint8_t *rows;
        const qmodule *of; /* what is in it: a module of one chunk (an expert) is not read again after its maximum */
        int row, n;
    } held[GROUP]; /* by place in the group */
    uint8_t *in;   /* the one in use */
    uint8_t *codes, *scales;
    float *wide; /* F16 sources, upcast */
    write_behind behind;
} hands;

static bool stop_with(job *j, bool ok, const err *mine) {
    if (ok) return true;
    pthread_mutex_lock(&j->lock);
    if (j->e->kind == ERR_NONE) *j->e = *mine;
    pthread_mutex_unlock(&j->lock);
    atomic_store(&j->failed, 1);
    return false;
}

/* ---- weights ---- */

static int rows_per_chunk(const qmodule *m) {
    const int64_t row = (int64_t)m->cols * dtype_bytes(m->src->type), n = CHUNK / row;
    return n < 1 ? 1 : n > m->rows ? m->rows : (int)n;
}

static bool load_rows(const job *j, hands *h, const qmodule *m, int row, int rows, err *e) {
    const uint64_t row_bytes = (uint64_t)m->cols * (uint64_t)dtype_bytes(m->src->type);
    const int slot = (int)(m - j->p->modules) - m->group;
    CHECK(slot >= 0 && slot < GROUP, "module %d of its group", slot);
    if (!h->held[slot].rows) h->held[slot].rows = xmalloc(h->cap);
    h->in = h->held[slot].rows;
    if (h->held[slot].of != m || h->held[slot].row != row || h->held[slot].n != rows) {
        h->held[slot].of = NULL;
        if (!job_read(j, m->src, ((uint64_t)m->row0 + (uint64_t)row) * row_bytes, h->in, (uint64_t)rows * row_bytes, e))
            return false;
        h->held[slot].of = m;
        h->held[slot].row = row;
        h->held[slot].n = rows;
    }
    if (m->src->type == DT_F16)
        for (int64_t i = 0; i < (int64_t)rows * m->cols; i++) h->wide[i] = f16_to_f32(((const uint16_t *)h->in)[i]);
    return true;
}

static const float *wide_rows(const hands *h, const qmodule *m) {
    return m->src->type == DT_F16 ? h->wide : (const float *)(const void *)h->in;
}

static bool amax_pass(job *j, hands *h, const qmodule *m, float *amax, err *e) {
    const int step = rows_per_chunk(m);
    *amax = 0;
    for (int r = 0; r < m->rows; r += step) {
        const int rows = m->rows - r < step ? m->rows - r : step;
        const int64_t n = (int64_t)rows * m->cols;
        if (!load_rows(j, h, m, r, rows, e)) return false;
        const bool narrow = m->src->type == DT_BF16;
        const float a = narrow ? j->k.amax_bf16((const uint16_t *)h->in, n) : j->k.amax_f32(wide_rows(h, m), n);
        if (!isfinite(a)) {
            const int64_t at =
                narrow ? j->k.nonfinite_bf16((const uint16_t *)h->in, n) : j->k.nonfinite_f32(wide_rows(h, m), n);
            return fail(e, ERR_INPUT, "E-QUANT-NONFINITE",
                        STR_FMT ": NaN or Inf at row %lld, column %lld (of module " STR_FMT ")", STR_ARG(m->src->name),
                        (long long)(m->row0 + r + at / m->cols), (long long)(at % m->cols), STR_ARG(m->name));
        }
        if (a > *amax) *amax = a;
    }
    return true;
}

static bool write_scalar(job *j, int tensor, float v, err *e) {
    return tensor < 0 || job_write(j, NULL, &j->p->tensors[tensor], 0, &v, sizeof v, e);
}

/* The scale of a group, 1 when its weights are all zero or so small that float32 has no scale for them: then every code is
 * written as for zeros. FP8 on CUDA divides by the scale rounded to bfloat16, which must not vanish either. */
static float group_scale(const job *j, qformat format, float amax) {
    const float s = format == QF_FP8 ? fp8_scale(amax, j->o->arith) : quant_scale_2(j->o->algorithm, amax, j->o->arith);
    const float used = format == QF_FP8 ? fp8_weight_divisor(s, j->o->arith) : s;
    return used > 0 ? s : 1.0f;
}

/* No weight of this size has scale 1, so 1 means that the group has none. */
static bool vanished(const qresult *q) { return q->scale_2 == 1.0f && q->weight_amax < 0x1p-100f; }

static bool encode_fp8(job *j, hands *h, const qmodule *m, int index, qresult *q, err *e) {
    const float divisor = fp8_weight_divisor(q->scale_2, j->o->arith);
    const int step = rows_per_chunk(m);
    if (m->src->type != DT_BF16)
        return fail(e, ERR_INPUT, "E-QUANT-DTYPE", STR_FMT ": FP8 weights are defined for BF16 sources, this is %s",
                    STR_ARG(m->src->name), dtype_name(m->src->type));
    for (int r = 0; r < m->rows; r += step) {
        const int rows = m->rows - r < step ? m->rows - r : step;
        const int64_t n = (int64_t)rows * m->cols;
        if (!load_rows(j, h, m, r, rows, e)) return false;
        if (vanished(q))
            memset(h->codes, 0, (size_t)n);
        else
            j->k.fp8_weight(h->codes, (const uint16_t *)h->in, n, divisor);
        quant_stats_fp8(&j->k, &q->stats.error, (const uint16_t *)h->in, h->codes, n, q->scale_2);
        if (!job_write(j, &h->behind, &j->p->tensors[j->tasks.weight_of[index]], (uint64_t)r * (uint64_t)m->cols,
                       h->codes, (uint64_t)n, e))
            return false;
    }
    return true;
}

enum { ZERO_SCALE = 0x38 }; /* 1.0: the scale of a block of zeros */

static void encode_rows(const job *j, hands *h, const qmodule *m, quant_algorithm how, int64_t n, float s2) {
    if (m->src->type == DT_BF16)
        quant_encode_bf16(&j->k, how, h->codes, h->scales, (const uint16_t *)h->in, n, s2, j->o->arith);
    else
        quant_encode_f32(&j->k, how, h->codes, h->scales, wide_rows(h, m), n, s2, j->o->arith);
}

static void measure(const job *j, const hands *h, const qmodule *m, quant_stats *s, int64_t n, float s2) {
    if (m->src->type == DT_BF16)
        quant_stats_bf16(&j->k, s, (const uint16_t *)h->in, h->codes, h->scales, n, s2);
    else
        quant_stats_f32(&j->k, s, wide_rows(h, m), h->codes, h->scales, n, s2);
}

/* What the plain rule would have made of these rows: the yardstick of the searched ones. */
static void measure_max(const job *j, hands *h, const qmodule *m, qresult *q, int64_t n) {
    const float s2 = quant_scale_2(QUANT_MAX, q->weight_amax, j->o->arith);
    quant_stats s = { .error = q->max_error };
    encode_rows(j, h, m, QUANT_MAX, n, s2);
    measure(j, h, m, &s, n, s2);
    q->max_error = s.error;
}

static bool encode_nvfp4(job *j, hands *h, const qmodule *m, int index, qresult *q, err *e) {
    const int step = rows_per_chunk(m);
    const qtensor *weight = &j->p->tensors[j->tasks.weight_of[index]],
                  *scale = &j->p->tensors[j->tasks.scale_of[index]];
    for (int r = 0; r < m->rows; r += step) {
        const int rows = m->rows - r < step ? m->rows - r : step;
        const int64_t n = (int64_t)rows * m->cols;
        if (!load_rows(j, h, m, r, rows, e)) return false;
        if (vanished(q)) {
            memset(h->codes, 0, (size_t)n / 2);
            memset(h->scales, ZERO_SCALE, (size_t)n / 16);
            measure(j, h, m, &q->stats, n, q->scale_2);
        } else {
            if (j->o->algorithm != QUANT_MAX) measure_max(j, h, m, q, n);
            encode_rows(j, h, m, j->o->algorithm, n, q->scale_2);
            measure(j, h, m, &q->stats, n, q->scale_2);
        }
        const uint64_t at = (uint64_t)r * (uint64_t)m->cols;
        if (!job_write(j, &h->behind, weight, at / 2, h->codes, (uint64_t)n / 2, e) ||
            !job_write(j, &h->behind, scale, at / 16, h->scales, (uint64_t)n / 16, e))
            return false;
    }
    return true;
}

/* input_scale of a module: the maximum over its group's quantizers; 1.0 when the export is data-free. */
static bool input_scale(const job *j, int first, float *out, err *e) {
    const plan *p = j->p;
    const qmodule *m = &p->modules[first];
    float amax = -1;
    if (!j->o->amax) return *out = 1.0f, true;
    for (int i = first; i < p->n_modules && i <= first + 4; i++)
        if (p->modules[i].group == first && p->modules[i].format != QF_KEEP) {
            const float a = amax_get(j->o->amax, p->modules[i].input_key);
            if (a > amax) amax = a;
        }
    if (!(amax > 0))
        return fail(e, ERR_INPUT, "E-QUANT-AMAX", STR_FMT ": %s (calibrate with more varied text, or --no-calib)",
                    STR_ARG(m->input_key), amax < 0 ? "no maximum for this quantizer" : "its calibrated maximum is 0");
    *out = m->format == QF_FP8 ? fp8_scale(amax, j->o->arith) : nvfp4_scale_2(amax, j->o->arith);
    return *out > 0 || fail(e, ERR_INPUT, "E-QUANT-AMAX", STR_FMT ": a maximum of %g has no float32 scale",
                            STR_ARG(m->input_key), (double)amax);
}

static bool group_task(job *j, hands *h, int first, err *e) {
    const plan *p = j->p;
    float group = 0, in_scale = 0;
    for (int i = first; i < p->n_modules && i <= first + 4; i++) {
        if (p->modules[i].group != first || p->modules[i].format == QF_KEEP) continue;
        qresult *q = &j->out->modules[i];
        *q = (qresult){ 0 };
        if (!amax_pass(j, h, &p->modules[i], &q->own_amax, e)) return false;
        if (q->own_amax > group) group = q->own_amax;
    }
    if (p->modules[first].format != QF_NVFP4_W && !input_scale(j, first, &in_scale, e)) return false;
    for (int i = first; i < p->n_modules && i <= first + 4; i++) {
        const qmodule *m = &p->modules[i];
        if (m->group != first || m->format == QF_KEEP) continue;
        qresult *q = &j->out->modules[i];
        q->weight_amax = group;
        q->input_scale = in_scale;
        q->scale_2 = group_scale(j, m->format, group);
        if (!(m->format == QF_FP8 ? encode_fp8(j, h, m, i, q, e) : encode_nvfp4(j, h, m, i, q, e)) ||
            !write_scalar(j, j->tasks.scale_2_of[i], q->scale_2, e) ||
            !write_scalar(j, j->tasks.input_of[i], in_scale, e))
            return false;
    }
    return true;
}

/* ---- verbatim ---- */

static bool copy_task(job *j, hands *h, const qtask *t, err *e) {
    const qtensor *x = &j->p->tensors[t->tensor];
    const st_tensor *src = x->src;
    uint64_t from = t->begin;
    if (!h->held[0].rows) h->held[0].rows = xmalloc(h->cap);
    h->held[0].of = NULL;
    h->in = h->held[0].rows;
    if (x->part == QP_SLICE) {
        const qmodule *m = &j->p->modules[x->module];
        src = m->src;
        from += (uint64_t)m->row0 * (uint64_t)m->cols * (uint64_t)dtype_bytes(src->type);
    }
    for (uint64_t at = 0; at < t->bytes; at += CHUNK) {
        const uint64_t n = t->bytes - at < CHUNK ? t->bytes - at : CHUNK;
        if (!job_read(j, src, from + at, h->in, n, e) || !job_write(j, &h->behind, x, t->begin + at, h->in, n, e))
            return false;
    }
    return true;
}

/* ---- workers ---- */

/* A chunk is CHUNK bytes, or one row when a row is longer. */
static uint64_t longest_row(const plan *p) {
    uint64_t n = CHUNK;
    for (int i = 0; i < p->n_modules; i++) {
        const uint64_t row = (uint64_t)p->modules[i].cols * (uint64_t)dtype_bytes(p->modules[i].src->type);
        if (row > n) n = row;
    }
    return n;
}

static bool finish_task(job *j, int i, err *e) {
    if (j->o->discard) return true;
    pthread_mutex_lock(&j->lock);
    const bool ok = journal_add(&j->log, i, &j->tasks, j->p, j->out->modules, e);
    pthread_mutex_unlock(&j->lock);
    return ok;
}

static void will_need(const job *j, const st_tensor *t, uint64_t at, uint64_t n) {
    const uint64_t from = (uint64_t)(t->data - j->p->src->shards[t->shard].map.data) + at;
    (void)posix_fadvise(j->src_fd[t->shard], (off_t)from, (off_t)min_i64((int64_t)n, AHEAD_BYTES), POSIX_FADV_WILLNEED);
}

/* Ask for the source of a later task: threads at several places of one file defeat the kernel's own reading ahead. */
static void read_ahead(const job *j, int i) {
    if (i >= j->last || j->log.done[i]) return;
    const qtask *t = &j->tasks.v[i];
    const plan *p = j->p;
    if (t->tensor >= 0 && p->tensors[t->tensor].part == QP_COPY)
        will_need(j, p->tensors[t->tensor].src, t->begin, t->bytes);
    for (int m = t->module; m >= 0 && m < p->n_modules && m < t->module + GROUP && p->modules[m].group == t->module;
         m++) {
        const qmodule *q = &p->modules[m];
        const uint64_t row_bytes = (uint64_t)q->cols * (uint64_t)dtype_bytes(q->src->type);
        will_need(j, q->src, (uint64_t)q->row0 * row_bytes, (uint64_t)q->rows * row_bytes);
    }
}

static void worker(void *ctx, int thread, int threads) {
    job *j = ctx;
    const uint64_t cap = longest_row(j->p);
    hands h = { .cap = cap, .codes = xmalloc(cap), .scales = xmalloc(cap / 16 + 16), .wide = xmalloc(cap * 2) };
    while (!atomic_load(&j->failed)) {
        const int i = atomic_fetch_add(&j->next, 1);
        if (i >= j->last) break;
        const qtask *t = &j->tasks.v[i];
        if (j->log.done[i]) continue;
        read_ahead(j, i + 4 * threads);
        err mine = { 0 };
        bool ok = !(j->o->cancel && *j->o->cancel) ||
                  fail(&mine, ERR_INTERRUPTED, "E-QUANT-STOPPED", "stopped; `--resume` continues where it was");
        ok = ok && (t->tensor >= 0 ? copy_task(j, &h, t, &mine) : group_task(j, &h, t->module, &mine)) &&
             finish_task(j, i, &mine);
        if (!stop_with(j, ok, &mine)) break;
        const uint64_t done = atomic_fetch_add(&j->done_bytes, t->source_bytes) + t->source_bytes;
        if (thread == 0 && j->o->on_progress) j->o->on_progress(j->o->ctx, done, j->tasks.source_bytes);
    }
    for (int i = 0; i < GROUP; i++) free(h.held[i].rows);
    free(h.codes);
    free(h.scales);
    free(h.wide);
}

/* ---- scales that need no source: K and V ---- */

/* "<layer>.self_attn.{k,v}_bmm_quantizer" of the projection "<layer>.self_attn.{k,v}_proj". */
static bool kv_scale(const job *j, const qtensor *t, float *out, err *e) {
    char key[512];
    str name = t->name;
    name.n -= strlen(t->part == QP_K_SCALE ? "k_proj.k_scale" : "v_proj.v_scale");
    const int n =
        snprintf(key, sizeof key, STR_FMT "%c_bmm_quantizer", STR_ARG(name), t->part == QP_K_SCALE ? 'k' : 'v');
    const float amax = j->o->amax ? amax_get(j->o->amax, (str){ key, (size_t)n }) : -1;
    if (!(amax > 0))
        return fail(e, ERR_INPUT, "E-QUANT-AMAX",
                    "%s: no maximum for this quantizer (--kv fp8-cast or none needs none)", key);
    *out = fp8_scale(amax, j->o->arith);
    return *out > 0 ||
           fail(e, ERR_INPUT, "E-QUANT-AMAX", "%s: a maximum of %g has no float32 scale", key, (double)amax);
}

static bool kv_scales(job *j, err *e) {
    for (int i = 0; i < j->p->n_tensors; i++) {
        const qtensor *t = &j->p->tensors[i];
        float v;
        if ((t->part == QP_K_SCALE || t->part == QP_V_SCALE) &&
            (!kv_scale(j, t, &v, e) || !job_write(j, NULL, t, 0, &v, sizeof v, e)))
            return false;
    }
    return true;
}

/* Every scale that the table of maxima must give, before the first byte is read. */
static bool check_scales(const job *j, err *e) {
    float v;
    for (int i = 0; i < j->tasks.n; i++) {
        const int m = j->tasks.v[i].module;
        if (m >= 0 && j->p->modules[m].format != QF_NVFP4_W && !input_scale(j, m, &v, e)) return false;
    }
    for (int i = 0; i < j->p->n_tensors; i++) {
        const qtensor *t = &j->p->tensors[i];
        if ((t->part == QP_K_SCALE || t->part == QP_V_SCALE) && !kv_scale(j, t, &v, e)) return false;
    }
    return true;
}

void quantize_count_zeros(quantize_result *r, const plan *p) {
    for (int i = 0; i < p->n_modules; i++) {
        const qmodule *m = &p->modules[i];
        const float amax = r->modules[i].weight_amax;
        if (m->format == QF_KEEP || m->group != i || !vanished(&r->modules[i])) continue;
        if (amax == 0)
            log_say("W-QUANT-ZERO", STR_FMT ": all weights are zero; written with scale 1.0 and codes 0",
                    STR_ARG(m->name));
        else
            log_say("W-QUANT-ZERO",
                    STR_FMT ": the largest weight is %g, too small for a scale; written as zeros with scale 1.0",
                    STR_ARG(m->name), (double)amax);
        r->zero_modules++;
    }
}

/* The journal first: the shards of another job are not to be touched. */
static bool open_destination(job *j, const char *partial, err *e) {
    if (j->o->discard) return j->log.done = xcalloc((size_t)j->tasks.n + 1, 1), true;
    if (!journal_open(&j->log, partial, j->o->rank, job_id(j), &j->tasks, j->p, j->out->modules, j->o->resume, e))
        return false;
    if (j->o->resume && j->o->rank == 0) dest_remove_strays(partial, j->p);
    return job_open_outputs(j, partial, e);
}

static bool run_tasks(job *j, const char *partial, err *e) {
    pool *workers = NULL;
    bool ok = job_open_sources(j, e) && open_destination(j, partial, e) && pool_new(&workers, j->o->threads, e);
    if (ok) {
        int first;
        tasks_share(&j->tasks, j->o->rank, j->o->ranks, &first, &j->last);
        atomic_store(&j->next, first);
        for (int i = first; i < j->last; i++) {
            if (!j->log.done[i]) continue;
            j->out->resumed_tasks++;
            atomic_fetch_add(&j->done_bytes, j->tasks.v[i].source_bytes);
        }
        pool_run(workers, worker, j);
        if (atomic_load(&j->lost)) journal_forget(&j->log, j->o->rank, partial);
        ok = j->e->kind == ERR_NONE && (j->o->rank != 0 || kv_scales(j, e)) && job_check_sources(j, e) &&
             (j->o->discard || job_sync_outputs(j, partial, e));
    }
    pool_free(workers);
    journal_close(&j->log);
    return ok;
}

bool quantize_shards(quantize_result *out, char **partial, const plan *p, const char *dst, const quantize_options *o,
                     err *e) {
    const double t0 = clock_seconds();
    job j = { .p = p, .o = o, .out = out, .e = e, .lock = PTHREAD_MUTEX_INITIALIZER, .log = { .fd = -1 } };
    *out = (quantize_result){ .modules = xcalloc((size_t)p->n_modules, sizeof *out->modules) };
    *partial = NULL;
    CHECK(o->ranks >= 1 && o->rank >= 0 && o->rank < o->ranks, "rank %d of %d", o->rank, o->ranks);
    j.src_fd = xmalloc((size_t)p->src->shard_count * sizeof *j.src_fd);
    j.dst_fd = xmalloc((size_t)p->n_shards * sizeof *j.dst_fd);
    j.src_stat = xcalloc((size_t)p->src->shard_count, sizeof *j.src_stat);
    for (int i = 0; i < p->src->shard_count; i++) j.src_fd[i] = -1;
    for (int i = 0; i < p->n_shards; i++) j.dst_fd[i] = -1;
    quant_kern_init(&j.k, o->isa);
    j.tasks = tasks_make(p);
    if (o->partial) *partial = xstrdup(o->partial);
    const bool ok = check_scales(&j, e) && job_allow_files(p, e) &&
                    (o->partial || o->discard || quantize_folder(partial, p, dst, o->rank, o->resume, e)) &&
                    run_tasks(&j, *partial, e);
    if (ok && o->ranks == 1) quantize_count_zeros(out, p);
    out->tasks = j.tasks.n;
    out->read_bytes = atomic_load(&j.done_bytes);
    out->written_bytes = atomic_load(&j.written);
    out->seconds = clock_seconds() - t0;
    for (int i = 0; i < p->src->shard_count; i++)
        if (j.src_fd[i] >= 0) close(j.src_fd[i]);
    for (int i = 0; i < p->n_shards; i++)
        if (j.dst_fd[i] >= 0) close(j.dst_fd[i]);
    tasks_free(&j.tasks);
    free(j.src_fd);
    free(j.dst_fd);
    free(j.src_stat);
    return ok;
}

void quantize_result_free(quantize_result *r) {
    free(r->modules);
    *r = (quantize_result){ 0 };
}
