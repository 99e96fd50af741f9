#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "quant/quantize_job.h"

bool job_read(const job *j, const st_tensor *t, uint64_t at, void *to, uint64_t n, err *e) {
    const st_file *f = &j->p->src->shards[t->shard];
    uint64_t from = (uint64_t)(t->data - f->map.data) + at;
    for (uint8_t *p = to; n > 0;) {
        const ssize_t r = pread(j->src_fd[t->shard], p, n, (off_t)from);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0)
            return fail(e, r < 0 ? ERR_MACHINE : ERR_INPUT, "E-QUANT-READ", "%s: " STR_FMT ": %s", f->path,
                        STR_ARG(t->name), r < 0 ? strerror(errno) : "the file became shorter while it was read");
        p += r;
        from += (uint64_t)r;
        n -= (uint64_t)r;
    }
    return true;
}

bool job_write(job *j, write_behind *b, const qtensor *t, uint64_t at, const void *from, uint64_t n, err *e) {
    const qshard *s = &j->p->shards[t->shard];
    const uint64_t to = s->header_bytes + t->offset + at;
    const int fd = j->dst_fd[t->shard];
    bool lost = false;
    atomic_fetch_add(&j->written, n);
    if (j->o->discard) return true;
    if (!write_place(fd, to, from, n, s->file, e)) return false;
    const bool ok = !b || write_started(b, fd, to, n, s->file, &lost, e);
    if (lost) atomic_store(&j->lost, 1);
    return ok;
}

uint64_t job_id(const job *j) {
    buf b = { 0 };
    for (int i = 0; i < j->p->n_shards; i++) buf_str(&b, str_of(j->p->shards[i].header));
    for (int i = 0; i < j->p->src->shard_count; i++) {
        const struct stat *s = &j->src_stat[i];
        buf_printf(&b, "|%s:%lld:%lld.%ld:%llu", strrchr(j->p->src->shards[i].path, '/') + 1, (long long)s->st_size,
                   (long long)s->st_mtim.tv_sec, s->st_mtim.tv_nsec, (unsigned long long)s->st_ino);
    }
    buf_printf(&b, "|arith %d algorithm %d", j->o->arith, j->o->algorithm);
    for (int i = 0; i < j->p->n_modules; i++) {
        const float a = j->o->amax ? amax_get(j->o->amax, j->p->modules[i].input_key) : -2;
        buf_add(&b, &a, sizeof a);
    }
    for (int i = 0; j->o->amax && i < j->o->amax->n; i++)
        if (str_ends(j->o->amax->v[i].name, STR("bmm_quantizer"))) buf_add(&b, &j->o->amax->v[i].value, sizeof(float));
    const uint64_t id = str_hash(buf_view(&b));
    buf_free(&b);
    return id;
}

static int64_t mtime_ns(const struct stat *s) { return (int64_t)s->st_mtim.tv_sec * 1000000000 + s->st_mtim.tv_nsec; }

bool job_open_sources(job *j, err *e) {
    const ckpt *c = j->p->src;
    for (int i = 0; i < c->shard_count; i++) {
        j->src_fd[i] = open(c->shards[i].path, O_RDONLY | O_CLOEXEC);
        if (j->src_fd[i] < 0 || fstat(j->src_fd[i], &j->src_stat[i]) != 0)
            return fail(e, ERR_INPUT, "E-FILE-OPEN", "%s: %s", c->shards[i].path, strerror(errno));
        if ((uint64_t)j->src_stat[i].st_size != c->shards[i].map.size ||
            (uint64_t)j->src_stat[i].st_ino != c->shards[i].map.inode ||
            mtime_ns(&j->src_stat[i]) != c->shards[i].map.mtime_ns)
            return fail(e, ERR_INPUT, "E-QUANT-CHANGED", "%s: changed since it was opened (start anew)",
                        c->shards[i].path);
        posix_fadvise(j->src_fd[i], 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    return true;
}

/* A source that changed while it was read has left a mixture: the export is not renamed. */
bool job_check_sources(const job *j, err *e) {
    for (int i = 0; i < j->p->src->shard_count; i++) {
        struct stat s;
        const struct stat *was = &j->src_stat[i];
        if (fstat(j->src_fd[i], &s) != 0 || s.st_size != was->st_size || mtime_ns(&s) != mtime_ns(was))
            return fail(e, ERR_INPUT, "E-QUANT-CHANGED",
                        "%s: changed while it was read (remove the .partial folder and start anew from a quiet source)",
                        j->p->src->shards[i].path);
    }
    return true;
}

/* A file per shard stays open: some systems allow 1024 by default. */
bool job_allow_files(const plan *p, err *e) {
    struct rlimit r;
    const rlim_t need = (rlim_t)p->n_shards + (rlim_t)p->src->shard_count + 64;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur >= need) return true;
    if (r.rlim_max != RLIM_INFINITY && r.rlim_max < need)
        return fail(e, ERR_MACHINE, "E-QUANT-SHARDS",
                    "%d shards need more open files than the limit of %llu "
                    "(`ulimit -n`, or a larger --shard-size)",
                    p->n_shards, (unsigned long long)r.rlim_max);
    r.rlim_cur = need;
    return setrlimit(RLIMIT_NOFILE, &r) == 0 ||
           fail(e, ERR_MACHINE, "E-QUANT-SHARDS", "%d shards: %s (a larger --shard-size)", p->n_shards,
                strerror(errno));
}

/* Shards get their full length and header before any task runs, so that one of another length was tampered with. Open
 * for writing only: once a network filesystem has read a page, it may write back more of it than this rank wrote. */
static bool open_output(job *j, int i, const char *path, err *e) {
    const qshard *s = &j->p->shards[i];
    const uint64_t size = s->header_bytes + s->data_bytes, length = s->header_bytes - 8;
    struct stat now;
    uint8_t head[8];
    for (int b = 0; b < 8; b++) head[b] = (uint8_t)(length >> (8 * b));
    const int fd = j->dst_fd[i] = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || fstat(fd, &now) != 0) return fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: %s", path, strerror(errno));
    if (j->log.n_done > 0 && (uint64_t)now.st_size != size)
        return fail(e, ERR_INPUT, "E-QUANT-RESUME",
                    "%s: is not as the unfinished run left it (remove the .partial folder to start anew)", path);
    if (ftruncate(fd, (off_t)size) != 0) return fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: %s", path, strerror(errno));
    return write_place(fd, 0, head, 8, s->file, e) && write_place(fd, 8, s->header, length, s->file, e);
}

bool job_open_outputs(job *j, const char *partial, err *e) {
    for (int i = 0; i < j->p->n_shards; i++) {
        char *path = path_join(partial, j->p->shards[i].file.p);
        const bool ok = open_output(j, i, path, e);
        free(path);
        if (!ok) return false;
    }
    return true;
}

/* What a failed fsync lost is reported once and then forgotten by the kernel, so nothing written so far counts. */
bool job_sync_outputs(job *j, const char *partial, err *e) {
    for (int i = 0; i < j->p->n_shards; i++)
        if (fsync(j->dst_fd[i]) != 0) {
            fail(e, ERR_MACHINE, "E-FILE-WRITE", STR_FMT ": cannot be flushed: %s", STR_ARG(j->p->shards[i].file),
                 strerror(errno));
            journal_forget(&j->log, j->o->rank, partial);
            return false;
        }
    return true;
}
