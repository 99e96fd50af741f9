/* The new files, all in one hidden folder; then the rename that decides. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file.h"
#include "model/names.h"
#include "quant/requant.h"

enum { PIECE = 16 << 20 };

typedef struct run {
    const requant *r;
    const requant_job *job;
    char *target, *partial; /* the folder that grows, and its name when it is complete */
    err *e;
} run;

static void step(const run *x, const char *what) {
    if (x->job->on_step) x->job->on_step(x->job->ctx, what);
}

static bool stopped(const run *x) { return x->job->options.cancel && *x->job->options.cancel; }

static bool fail_stopped(err *e) {
    return fail(e, ERR_INTERRUPTED, "E-QUANT-STOPPED", "stopped; the export is as it was (run it again)");
}

static const char *file_name(const st_file *f) { return strrchr(f->path, '/') + 1; }

static bool put(const run *x, const char *name, const buf *b) {
    char *path = path_join(x->partial, name);
    const bool ok = file_write_atomic(path, b->p, b->n, x->e);
    free(path);
    if (ok) step(x, name);
    return ok;
}

/* ---- files that keep their other tensors ---- */

static void header_of(buf *b, const st_file *f) {
    uint64_t at = 0;
    st_header_begin(b, f->metadata);
    for (int i = 0; i < f->count; i++) {
        const st_tensor *t = &f->tensors[i];
        if (!name_is_mtp(t->name)) at = st_header_entry(b, t->name, t->type, t->rank, t->shape, at, t->bytes);
    }
    st_header_end(b);
}

static bool copy_tensor(const run *x, file_out *out, const st_tensor *t) {
    for (uint64_t at = 0; at < t->bytes; at += PIECE) {
        if (stopped(x)) return fail_stopped(x->e);
        if (!file_out_write(out, t->data + at, t->bytes - at < PIECE ? t->bytes - at : PIECE, x->e)) return false;
    }
    return true;
}

static bool rewrite(const run *x, const st_file *f) {
    char *path = path_join(x->partial, file_name(f));
    file_out out = { 0 };
    buf header = { 0 };
    header_of(&header, f);
    bool ok = file_out_open(&out, path, x->e) && file_out_write(&out, header.p, header.n, x->e);
    for (int i = 0; ok && i < f->count; i++)
        ok = name_is_mtp(f->tensors[i].name) || copy_tensor(x, &out, &f->tensors[i]);
    ok = ok && file_out_commit(&out, x->e);
    file_out_abort(&out);
    buf_free(&header);
    free(path);
    if (ok) step(x, file_name(f));
    return ok;
}

static bool rewrite_all(const run *x) {
    const ckpt *c = &x->r->dst;
    for (int s = 0; s < c->shard_count; s++)
        if (x->r->fate[s] == FATE_REWRITE && !rewrite(x, &c->shards[s])) return false;
    return true;
}

/* ---- index, configs, list of removals ---- */

static bool is_parameter(const st_tensor *t) { return !name_is_scale(t->name) && !name_is_kv_scale(t->name); }

/* A single file without a head beside it needs none. */
static bool needs_index(const run *x) {
    char *old = path_join(x->r->dst.dir, "model.safetensors.index.json");
    const bool there = file_exists(old);
    free(old);
    return there || x->job->head;
}

static bool write_index(const run *x) {
    const ckpt *c = &x->r->dst;
    const plan *p = x->job->head;
    if (!needs_index(x)) return true;
    index_entry *v = xmalloc(((size_t)c->tensor_count + (p ? (size_t)p->n_tensors : 0) + 1) * sizeof *v);
    uint64_t parameters = 0, bytes = p ? p->total_bytes : 0;
    int n = 0;
    for (int i = 0; i < c->tensor_count; i++) {
        const st_tensor *t = ckpt_at(c, i);
        if (name_is_mtp(t->name)) continue;
        v[n++] = (index_entry){ t->name, file_name(&c->shards[t->shard]) };
        bytes += t->bytes;
        if (is_parameter(t)) parameters += t->elems;
    }
    for (int i = 0; p && i < p->n_tensors; i++) v[n++] = (index_entry){ p->tensors[i].name, p->head_file };
    const json *old = json_get(c->index_metadata, "total_parameters");
    if (json_is(old, JSON_INT) && old->u.i > 0) parameters = (uint64_t)old->u.i; /* the head never counts */
    buf text = { 0 };
    plan_index_text(&text, c->index_metadata, parameters, bytes, v, n);
    const bool ok = put(x, "model.safetensors.index.json", &text);
    buf_free(&text);
    free(v);
    return ok;
}

static bool write_configs(const run *x) {
    const requant *r = x->r;
    buf config = { 0 }, quant = { 0 };
    bool ok = requant_config_text(&config, r, x->job->head, x->e) && put(x, "config.json", &config);
    ok = ok && (!r->dst.hf_quant || (requant_hf_quant_text(&quant, r, x->job->head, x->job->from, x->e) &&
                                     put(x, "hf_quant_config.json", &quant)));
    buf_free(&config);
    buf_free(&quant);
    return ok;
}

static bool write_removals(const run *x) {
    buf list = { 0 };
    for (int s = 0; s < x->r->dst.shard_count; s++) {
        const char *name = file_name(&x->r->dst.shards[s]);
        if (x->r->fate[s] != FATE_REMOVE || (x->job->head && strcmp(name, x->r->head_file) == 0)) continue;
        buf_puts(&list, name);
        buf_byte(&list, '\n');
    }
    const bool ok = list.n == 0 || x->job->out || put(x, REQUANT_REMOVE, &list);
    buf_free(&list);
    return ok;
}

/* The fragment of a model card that quantize wrote: its lines about the head. */
static void card_text(buf *out, str old, const run *x) {
    const plan *p = x->job->head;
    const bool nvfp4 = p && p->recipe.mtp == MTP_NVFP4;
    while (old.n) {
        const char *end = memchr(old.p, '\n', old.n);
        const str line = { old.p, end ? (size_t)(end - old.p) + 1 : old.n };
        old = str_skip(old, line.n);
        if (str_starts(line, STR("| draft head: ")) || str_starts(line, STR("- Draft head's maxima: "))) continue;
        if (!str_starts(line, STR("- Draft head: "))) {
            buf_str(out, line);
            continue;
        }
        buf_printf(out, "- Draft head: %s%s\n",
                   !p      ? "none"
                   : nvfp4 ? "NVFP4, scales "
                           : "BF16",
                   x->job->from->mtp_scales);
        if (nvfp4) buf_printf(out, "- Draft head's maxima: %s\n", x->job->from->calibration);
    }
}

static bool write_card(const run *x) {
    enum { MAX = 1 << 20 };
    static const char name[] = "QUANTIZATION.md";
    char *path = path_join(x->r->dst.dir, name);
    buf old = { 0 }, text = { 0 };
    err ignored = { 0 };
    bool ok = true;
    if (file_exists(path) && file_read(&old, path, MAX, &ignored)) {
        card_text(&text, buf_view(&old), x);
        if (!str_eq(buf_view(&old), buf_view(&text))) ok = put(x, name, &text);
    }
    buf_free(&old);
    buf_free(&text);
    free(path);
    return ok;
}

/* ---- another folder: what does not change is linked, or copied where links do not reach ---- */

static bool carry(const run *x, const char *name) {
    char *from = path_join(x->r->dst.dir, name), *to = path_join(x->partial, name), *real = realpath(from, NULL);
    struct stat s;
    bool ok = true;
    if (real && stat(real, &s) == 0 && S_ISREG(s.st_mode) && lstat(to, &s) != 0 && link(real, to) != 0) {
        mapping m;
        file_out out = { 0 };
        ok = mapping_open(&m, real, x->e);
        if (ok) {
            ok = file_out_open(&out, to, x->e);
            for (size_t at = 0; ok && at < m.size; at += PIECE)
                ok = (!stopped(x) || fail_stopped(x->e)) &&
                     file_out_write(&out, m.data + at, m.size - at < PIECE ? m.size - at : PIECE, x->e);
            ok = ok && file_out_commit(&out, x->e);
            file_out_abort(&out);
            mapping_close(&m);
        }
    }
    free(from);
    free(to);
    free(real);
    return ok;
}

static bool is_removed(const requant *r, const char *name) {
    for (int s = 0; s < r->dst.shard_count; s++)
        if (r->fate[s] == FATE_REMOVE && strcmp(file_name(&r->dst.shards[s]), name) == 0) return true;
    return false;
}

static bool carry_all(const run *x) {
    DIR *d = opendir(x->r->dst.dir);
    bool ok = d != NULL || fail(x->e, ERR_INPUT, "E-FILE-OPEN", "%s: %s", x->r->dst.dir, strerror(errno));
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *f; ok && d && (f = readdir(d));)
        if (f->d_name[0] != '.' && !is_removed(x->r, f->d_name)) ok = carry(x, f->d_name);
    if (d) closedir(d);
    return ok;
}

/* ---- all of it ---- */

static bool enough_space(const run *x) {
    const plan *p = x->job->head;
    const uint64_t need = x->r->rewrite_bytes + (p ? p->total_bytes : 0);
    struct statvfs v;
    if (x->job->out || statvfs(x->r->dst.dir, &v) != 0 || (uint64_t)v.f_bavail * v.f_frsize >= need) return true;
    return fail(x->e, ERR_MACHINE, "E-QUANT-SPACE", "%s: the new files need %.3f GB, %.3f GB are free", x->r->dst.dir,
                (double)need / 1e9, (double)v.f_bavail * (double)v.f_frsize / 1e9);
}

static bool make_folder(const run *x) {
    if (mkdir(x->partial, 0777) == 0) return true;
    return fail(x->e, errno == EACCES || errno == EROFS || errno == EEXIST || errno == ENOENT ? ERR_INPUT : ERR_MACHINE,
                "E-QUANT-DST", "%s: cannot be made: %s (check the folder and its permissions)", x->partial,
                strerror(errno));
}

static bool write_head(const run *x, quantize_result *result) {
    char *partial = NULL;
    if (!x->job->head) return make_folder(x);
    const bool ok = quantize_shards(result, &partial, x->job->head, x->target, &x->job->options, x->e);
    free(partial);
    if (!ok && x->e->kind == ERR_INTERRUPTED) {
        *x->e = (err){ 0 };
        return fail_stopped(x->e);
    }
    if (ok) step(x, x->job->head->head_file);
    return ok;
}

static bool stage(const run *x, quantize_result *result) {
    const requant_job *job = x->job;
    if (!enough_space(x) || !write_head(x, result)) return false;
    if (job->on_head) job->on_head(job->ctx, result);
    return rewrite_all(x) && write_index(x) && write_configs(x) && write_card(x) && write_removals(x) &&
           (!job->summary || put(x, "nibble_mtp_summary.json", job->summary)) && (!job->out || carry_all(x)) &&
           (!stopped(x) || fail_stopped(x->e)) && quantize_commit(x->partial, x->target, x->e);
}

bool requant_check_target(const requant *r, const char *out, err *e) {
    struct stat s;
    if (!out)
        return access(r->dst.dir, W_OK | X_OK) == 0 ||
               fail(e, ERR_INPUT, "E-QUANT-DST", "%s: cannot be changed: %s (check its permissions, or -o OUT)",
                    r->dst.dir, strerror(errno));
    buf partial = { 0 };
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/') n--;
    buf_printf(&partial, "%.*s.partial", (int)n, out);
    const char *there = !*out || lstat(out, &s) == 0 ? out : lstat(partial.p, &s) == 0 ? partial.p : NULL;
    const bool ok =
        !there || fail(e, ERR_INPUT, "E-QUANT-DST", "%s: exists already (choose another name, or remove it)", there);
    buf_free(&partial);
    return ok;
}

bool requant_run(quantize_result *result, const requant *r, const requant_job *job, err *e) {
    run x = { .r = r, .job = job, .e = e };
    *result = (quantize_result){ 0 };
    x.target = job->out ? xstrdup(job->out) : path_join(r->dst.dir, REQUANT_STAGE);
    for (size_t n = strlen(x.target); n > 1 && x.target[n - 1] == '/'; n--) x.target[n - 1] = 0;
    buf name = { 0 };
    buf_printf(&name, "%s.partial", x.target);
    x.partial = name.p;
    if (!job->out) requant_remove_folder(x.partial); /* of a run that ended early: the export is as it was */
    bool ok = requant_check_target(r, job->out, e);
    const bool fresh = ok;
    ok = ok && stage(&x, result);
    if (!ok && fresh) requant_remove_folder(x.partial);
    if (ok) step(&x, "decided");
    ok = ok && (job->out || requant_finish(r->dst.dir, job->on_step, job->ctx, e));
    free(x.target);
    free(x.partial);
    return ok;
}
