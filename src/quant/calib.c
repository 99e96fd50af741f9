#include "quant/calib.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "kern/quant.h"
#include "model/names.h"

void calib_data_add(calib_data *d, const int32_t *tokens, size_t n) {
    if (n == 0) return;
    d->v = xrealloc(d->v, (size_t)(d->n + 1) * sizeof *d->v);
    d->kind = xrealloc(d->kind, (size_t)(d->n + 1) * sizeof *d->kind);
    d->kind[d->n][0] = 0;
    id_list *one = &d->v[d->n++];
    *one = (id_list){ .v = xmalloc(n * sizeof *tokens), .n = n, .cap = n };
    memcpy(one->v, tokens, n * sizeof *tokens);
    d->tokens += (int64_t)n;
}

void calib_data_free(calib_data *d) {
    for (int i = 0; i < d->n; i++) ids_free(&d->v[i]);
    free(d->v);
    free(d->kind);
    *d = (calib_data){ 0 };
}

/* ---- the tap ---- */

typedef struct watch {
    amax_table *out;
    calib_report *report;
    quant_kern k;
    err *e;
    int layer;      /* row of report->routed */
    char attn[300]; /* "...self_attn" of the attention block that runs now */
} watch;

static void raise(watch *w, const char *name, const float *x, int64_t ld, int rows, int cols) {
    float amax = 0;
    if (ld == cols) {
        amax = w->k.amax_f32(x, (int64_t)rows * cols);
    } else {
        for (int r = 0; r < rows; r++) {
            const float a = w->k.amax_f32(x + r * ld, cols);
            if (!(a <= amax)) amax = a;
        }
    }
    if (isfinite(amax))
        amax_raise(w->out, str_of(name), amax);
    else
        fail(w->e, ERR_INPUT, "E-CALIB-NONFINITE",
             "%s: NaN or Inf in its input (`nibble inspect --scan` looks for them in the weights)", name);
}

static void on_linear(watch *w, const ops_event *ev) {
    char name[400];
    str module = str_of(linear_name(ev->w));
    if (str_ends(module, STR(".weight"))) module.n -= 7;
    snprintf(name, sizeof name, STR_FMT ".input_quantizer", STR_ARG(module));
    raise(w, name, ev->in, ev->in_ld, ev->rows, ev->in_cols);
    if (str_ends(module, STR(".v_proj"))) snprintf(w->attn, sizeof w->attn, STR_FMT, (int)(module.n - 7), module.p);
}

static void on_moe(watch *w, const ops_event *ev) {
    char name[400];
    const char *name_of = experts_name(ev->ex);
    snprintf(name, sizeof name, "%s.gate_up_proj_input_quantizer", name_of);
    raise(w, name, ev->in, ev->in_ld, ev->rows, ev->in_cols);
    snprintf(name, sizeof name, "%s.down_proj_input_quantizer", name_of);
    raise(w, name, ev->in2, ev->in2_cols, ev->rows * ev->k, ev->in2_cols);
    int64_t *routed = w->report->routed + (int64_t)w->layer * w->report->experts;
    for (int i = 0; i < ev->rows * ev->k; i++)
        if (ev->index[i] >= 0 && ev->index[i] < w->report->experts) routed[ev->index[i]]++;
}

static void on_op(void *ctx, ops *inner, const ops_event *ev) {
    watch *w = ctx;
    char name[400];
    (void)inner; /* calibration runs on CPU backends: device memory is memory */
    if (strcmp(ev->op, "linear") == 0) {
        on_linear(w, ev);
    } else if (strcmp(ev->op, "moe") == 0) {
        on_moe(w, ev);
    } else if (strcmp(ev->op, "kv_append") == 0) {
        snprintf(name, sizeof name, "%s.k_bmm_quantizer", w->attn);
        raise(w, name, ev->in, ev->in_cols, ev->rows, ev->in_cols);
        snprintf(name, sizeof name, "%s.v_bmm_quantizer", w->attn);
        raise(w, name, ev->in2, ev->in2_cols, ev->rows, ev->in2_cols);
    }
}

/* ---- hidden states of all sequences ---- */

typedef struct store {
    float *x; /* [tokens, H] */
    size_t bytes;
    bool spilled;
} store;

/* A file without a name, so that nothing is left behind however the process ends; not tmpfile(), which does not look at
 * TMPDIR. /var/tmp: /tmp is often memory. -1: errno says why. */
static int spill_file(void) {
    const char *dir = getenv("TMPDIR");
    char *path = path_join(dir && *dir ? dir : "/var/tmp", "nibble-calibration-XXXXXX");
    const int fd = mkstemp(path), why = errno;
    if (fd >= 0) unlink(path);
    free(path);
    errno = why;
    return fd;
}

static bool store_open(store *s, int64_t tokens, int hidden, int64_t max_ram, err *e) {
    *s = (store){ .bytes = (size_t)(tokens ? tokens : 1) * (size_t)hidden * sizeof(float) };
    s->spilled = max_ram > 0 && (int64_t)s->bytes > max_ram;
    void *p = NULL;
    if (s->spilled) {
        const int fd = spill_file();
        /* Room is taken at once: a full disk is an error here, not a SIGBUS in the middle of the work. */
        if (fd >= 0 && (errno = posix_fallocate(fd, 0, (off_t)s->bytes)) == 0)
            p = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) p = NULL;
        const int why = errno;
        if (fd >= 0) close(fd); /* the mapping outlives it */
        errno = why;
    } else {
        p = malloc(s->bytes);
    }
    if (!p)
        return fail(e, ERR_MACHINE, "E-CALIB-SPILL", "%zu bytes of hidden states: %s (set TMPDIR to a disk with room)",
                    s->bytes, strerror(errno));
    s->x = p;
    return true;
}

static void store_close(store *s) {
    if (!s->x) return;
    if (s->spilled)
        munmap(s->x, s->bytes);
    else
        free(s->x);
}

/* ---- the walk ---- */

typedef struct calibration {
    engine *g;
    const calib_data *data;
    const calib_options *opt;
    store hidden;
    watch w;
    int chunk;
} calibration;

/* Pages of a layer's weights are not needed again: let them go at once instead of under pressure. */
static void forget_layer(const calibration *c, int layer, bool mtp) {
    const ckpt *files = &c->g->files;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (c->opt->max_ram_bytes <= 0) return;
    for (int i = 0; i < files->tensor_count; i++) {
        const st_tensor *t = ckpt_at(files, i);
        if (name_is_mtp(t->name) != mtp || (!mtp && name_layer(t->name) != layer)) continue;
        const uintptr_t from = ((uintptr_t)t->data + page - 1) / page * page,
                        to = ((uintptr_t)t->data + t->bytes) / page * page;
        if (to > from) madvise((void *)from, to - from, MADV_DONTNEED);
    }
}

static bool check_step(calibration *c, err *e) {
    if (c->opt->cancel && *c->opt->cancel) return fail(e, ERR_INTERRUPTED, "E-CALIB-STOPPED", "calibration: stopped");
    return c->g->o->sync(c->g->o, e) && e->kind == ERR_NONE;
}

typedef enum stage { STAGE_EMBED, STAGE_LAYER, STAGE_NORM } stage;

/* One stage over one sequence, its hidden states at x [n, H] in place. */
static bool run_sequence(calibration *c, const id_list *seq, float *x, stage what, int layer, err *e) {
    engine *g = c->g;
    const int h = g->config.hidden, n = (int)seq->n;
    ops *o = g->o;
    if (what == STAGE_LAYER && g->n.layers[layer].kind == LAYER_GDN)
        state_reset_gdn(&g->st, 0, g->n.layers[layer].index);
    for (int at = 0; at < n; at += c->chunk) {
        const int rows = n - at < c->chunk ? n - at : c->chunk;
        const size_t bytes = (size_t)rows * (size_t)h * sizeof(float);
        const ops_span span = { .rows = rows, .pos0 = at };
        const pass p = forward_begin(&g->sc, &g->st, seq->v + at, NULL, &span, 1);
        if (what == STAGE_EMBED)
            forward_embed(&p);
        else
            o->upload(o, g->sc.x, x + (int64_t)at * h, bytes);
        if (what == STAGE_LAYER) forward_layer(&p, layer);
        if (what == STAGE_NORM) forward_norm(&p);
        o->download(o, x + (int64_t)at * h, what == STAGE_NORM ? g->sc.hidden + h : g->sc.x, bytes);
        if (!check_step(c, e)) return false;
    }
    return true;
}

static bool run_stage(calibration *c, stage what, int layer, err *e) {
    float *x = c->hidden.x;
    for (int i = 0; i < c->data->n; i++) {
        if (!run_sequence(c, &c->data->v[i], x, what, layer, e)) return false;
        x += (int64_t)c->data->v[i].n * c->g->config.hidden;
    }
    return true;
}

/* Draft step `step` (1 or 2) over one sequence: slot p holds (token p + step, hidden p); in-place on x. */
static bool draft_sequence(calibration *c, const id_list *seq, float *x, int step, err *e) {
    engine *g = c->g;
    const int h = g->config.hidden, n = (int)seq->n - step;
    ops *o = g->o;
    for (int at = 0; at < n; at += c->chunk) {
        const int rows = n - at < c->chunk ? n - at : c->chunk;
        const size_t bytes = (size_t)rows * (size_t)h * sizeof(float);
        const ops_span span = { .rows = rows, .pos0 = at };
        o->upload(o, g->sc.hidden + h, x + (int64_t)at * h, bytes);
        forward_mtp(&g->sc, &g->st, seq->v + at + step, g->sc.hidden + h, &span, 1);
        o->download(o, x + (int64_t)at * h, g->sc.mtp_hidden, bytes);
        if (!check_step(c, e)) return false;
    }
    return true;
}

static bool run_draft(calibration *c, err *e) {
    for (int step = 1; step <= c->opt->mtp_steps; step++) {
        float *x = c->hidden.x;
        for (int i = 0; i < c->data->n; i++) {
            if (!draft_sequence(c, &c->data->v[i], x, step, e)) return false;
            x += (int64_t)c->data->v[i].n * c->g->config.hidden;
        }
    }
    return true;
}

static bool walk(calibration *c, err *e) {
    const int layers = c->g->config.layers, total = layers + (c->opt->mtp_steps > 0);
    if (!run_stage(c, STAGE_EMBED, 0, e)) return false;
    for (int l = 0; l < layers; l++) {
        c->w.layer = l;
        if (!run_stage(c, STAGE_LAYER, l, e)) return false;
        forget_layer(c, l, false);
        if (c->opt->on_progress) c->opt->on_progress(c->opt->ctx, l + 1, total);
    }
    if (c->opt->mtp_steps == 0) return true;
    c->w.layer = layers;
    if (!run_stage(c, STAGE_NORM, 0, e) || !run_draft(c, e)) return false;
    forget_layer(c, 0, true);
    if (c->opt->on_progress) c->opt->on_progress(c->opt->ctx, total, total);
    return true;
}

static bool check_data(const calib_data *d, const model_config *c, err *e) {
    for (int i = 0; i < d->n; i++)
        for (size_t k = 0; k < d->v[i].n; k++)
            if (d->v[i].v[k] < 0 || d->v[i].v[k] >= c->vocab)
                return fail(e, ERR_INPUT, "E-ENGINE-TOKEN",
                            "calibration: sample %d: id %d is outside the vocabulary of %d", i, d->v[i].v[k], c->vocab);
    return true;
}

/* The sequences of one rank, borrowed. */
static calib_data share_of(const calib_data *d, int rank, int ranks) {
    calib_data out = { .v = xmalloc((size_t)d->n * sizeof *d->v + 1) };
    for (int i = rank; i < d->n; i += ranks) {
        out.v[out.n++] = d->v[i];
        out.tokens += (int64_t)d->v[i].n;
    }
    return out;
}

/* Index of the longest sequence. */
static int longest(const calib_data *d) {
    int best = 0;
    for (int i = 1; i < d->n; i++)
        if (d->v[i].n > d->v[best].n) best = i;
    return best;
}

/* All data is checked, whatever the share: a sample keeps its number. */
static bool open_model(calibration *c, const char *dir, const calib_data *all, err *e) {
    if (all->n == 0) return fail(e, ERR_INPUT, "E-CALIB-EMPTY", "calibration: no tokens in the given data");
    const int sample = longest(all);
    const size_t tokens = all->v[sample].n;
    const engine_options o = { .ops = c->opt->ops,
                               .ctx = tokens > INT32_MAX ? INT32_MAX : (int)tokens,
                               .chunk = c->chunk,
                               .kv = KV_CACHE_F32,
                               .no_text = true };
    err opened = { 0 };
    if (engine_open(&c->g, dir, &o, &opened)) return check_data(all, &c->g->config, e);
    if (strcmp(opened.id, "E-ENGINE-CTX") != 0) return *e = opened, false;
    return fail(e, ERR_INPUT, "E-CALIB-LONG",
                "calibration: sample %d has %zu tokens, more than the model's context (lower --seq)", sample, tokens);
}

bool calib_run(amax_table *out, calib_report *report, const char *dir, const calib_data *data, const calib_options *opt,
               err *e) {
    const double t0 = clock_seconds();
    calib_data share = share_of(data, opt->ranks > 1 ? opt->rank : 0, opt->ranks > 1 ? opt->ranks : 1);
    calibration c = { .data = &share, .opt = opt, .chunk = opt->chunk > 0 ? opt->chunk : 512 };
    ops *tap = NULL, *plain = NULL;
    *out = (amax_table){ .source = data->what };
    *report = (calib_report){ .tokens = data->tokens };
    bool ok =
        open_model(&c, dir, data, e) && store_open(&c.hidden, share.tokens, c.g->config.hidden, opt->max_ram_bytes, e);
    if (ok && opt->mtp_steps > 0 && !c.g->n.has_mtp)
        ok = fail(e, ERR_INPUT, "E-QUANT-MTP", "%s: no draft head to calibrate (use --mtp none)", dir);
    if (ok) {
        report->layers = c.g->config.layers + (opt->mtp_steps > 0);
        report->experts = c.g->config.experts;
        report->routed = xcalloc((size_t)(report->layers * report->experts) + 1, sizeof *report->routed);
        report->spilled = c.hidden.spilled;
        c.w = (watch){ .out = out, .report = report, .e = e };
        quant_kern_init(&c.w.k, opt->ops.isa);
        plain = c.g->n.o;
        ok = ops_tap_open(&tap, plain, on_op, &c.w, e);
    }
    if (ok) {
        c.g->n.o = tap;
        ok = walk(&c, e);
        c.g->n.o = plain;
    }
    if (tap) tap->close(tap);
    store_close(&c.hidden);
    engine_close(c.g);
    free(share.v);
    report->seconds = clock_seconds() - t0;
    if (!ok) amax_free(out), calib_report_free(report);
    return ok;
}

void calib_report_free(calib_report *r) {
    free(r->routed);
    *r = (calib_report){ 0 };
}

int calib_unseen(const calib_report *r) {
    int n = 0;
    for (int64_t i = 0; i < (int64_t)r->layers * r->experts; i++) n += r->routed[i] == 0;
    return n;
}
