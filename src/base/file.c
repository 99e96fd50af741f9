#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bus.h"

/* A path the user can correct, or the machine's trouble? */
static err_kind kind_of(int error) {
    switch (error) {
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EACCES:
    case EPERM:
    case ELOOP:
    case ENAMETOOLONG:
    case EINVAL:
    case ENXIO: return ERR_INPUT;
    default: return ERR_MACHINE;
    }
}

static bool fail_open(err *e, const char *path, int error) {
    return fail(e, kind_of(error), "E-FILE-OPEN", "%s: cannot be opened: %s (check the path and its permissions)", path,
                strerror(error));
}

static const char *kind_name(mode_t mode) {
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

/* Open for reading and make sure that it is a regular file. O_NONBLOCK: a FIFO must not hang us. */
static bool open_regular(int *fd, struct stat *st, const char *path, err *e) {
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd < 0) {
        const int error = errno;
        if (stat(path, st) == 0 && !S_ISREG(st->st_mode)) /* sockets cannot be opened at all */
            return fail(e, ERR_INPUT, "E-FILE-KIND", "%s: is %s (a regular file is needed)", path,
                        kind_name(st->st_mode));
        return fail_open(e, path, error);
    }
    bool ok = fstat(*fd, st) == 0;
    if (!ok)
        fail_open(e, path, errno);
    else if (!S_ISREG(st->st_mode))
        ok = fail(e, ERR_INPUT, "E-FILE-KIND", "%s: is %s (a regular file is needed)", path, kind_name(st->st_mode));
    if (!ok) close(*fd);
    return ok;
}

bool mapping_open(mapping *out, const char *path, err *e) {
    int fd;
    struct stat st;
    *out = (mapping){ 0 };
    if (!open_regular(&fd, &st, path, e)) return false;
    out->dev = (uint64_t)st.st_dev;
    out->inode = (uint64_t)st.st_ino;
    out->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    if (st.st_size > 0) {
        void *p = (uint64_t)st.st_size > SIZE_MAX / 2 ? MAP_FAILED
                                                      : mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            fail(e, ERR_MACHINE, "E-FILE-MAP", "%s: cannot map %lld bytes: %s (check `ulimit -v`)", path,
                 (long long)st.st_size, strerror(errno));
            close(fd);
            return false;
        }
        out->data = p;
        out->size = (size_t)st.st_size;
        bus_watch(p, out->size, path);
    }
    close(fd);
    return true;
}

void mapping_close(mapping *m) {
    union {
        const uint8_t *mapped;
        void *p; /* munmap takes no const */
    } region = { m->data };
    if (m->data) {
        bus_forget(m->data);
        munmap(region.p, m->size);
    }
    *m = (mapping){ 0 };
}

static bool fail_size(err *e, const char *path, size_t max_bytes) {
    return fail(e, ERR_INPUT, "E-FILE-SIZE", "%s: is larger than the limit of %zu bytes (is it the right file?)", path,
                max_bytes);
}

/* Reads to the end instead of trusting st_size: files under /proc say 0, and a file may grow. */
static bool read_all(buf *out, int fd, size_t max_bytes, const char *path, err *e) {
    const size_t start = out->n;
    for (;;) {
        const size_t have = out->n - start;
        size_t want = out->cap > out->n + 1 ? out->cap - out->n - 1 : 64 << 10;
        if (want > max_bytes - have) want = max_bytes - have;
        char extra;
        if (want) buf_reserve(out, want);
        const ssize_t got = read(fd, want ? out->p + out->n : &extra, want ? want : 1);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fail(e, ERR_MACHINE, "E-FILE-READ", "%s: cannot be read: %s (check the disk)", path,
                        strerror(errno));
        if (got == 0) return true;
        if (want == 0) return fail_size(e, path, max_bytes);
        out->n += (size_t)got;
        out->p[out->n] = 0;
    }
}

bool file_read(buf *out, const char *path, size_t max_bytes, err *e) {
    int fd;
    struct stat st;
    if (!open_regular(&fd, &st, path, e)) return false;
    const size_t start = out->n;
    bool ok = true;
    if ((uint64_t)st.st_size > max_bytes)
        ok = fail_size(e, path, max_bytes);
    else
        buf_reserve(out, (size_t)st.st_size);
    ok = ok && read_all(out, fd, max_bytes, path, e);
    close(fd);
    if (!ok && out->p) out->n = start, out->p[start] = 0;
    return ok;
}

/* ---- writing ---- */

static bool fail_write(err *e, const char *path, const char *what, int error) {
    return fail(e, kind_of(error), "E-FILE-WRITE",
                "%s: cannot %s: %s (check the folder, its permissions and free space)", path, what, strerror(error));
}

/* Hidden sibling, so that neither a glob for *.safetensors nor a listing takes it for an output. */
static char *temp_name(const char *path, unsigned attempt) {
    const char *slash = strrchr(path, '/');
    const int dir = slash ? (int)(slash - path + 1) : 0;
    buf b = { 0 };
    buf_printf(&b, "%.*s.%.200s.%ld-%u.tmp", dir, path, path + dir, (long)getpid(), attempt);
    return b.p;
}

/* Where the bytes really go: through symbolic links, and never over a device such as /dev/null. */
static bool target_of(char **out, const char *path, err *e) {
    struct stat st;
    *out = NULL;
    if (stat(path, &st) == 0) {
        if (!S_ISREG(st.st_mode))
            return fail(e, ERR_INPUT, "E-FILE-WRITE", "%s: is %s (name a regular file)", path, kind_name(st.st_mode));
        *out = realpath(path, NULL);
        if (!*out) return fail_write(e, path, "be resolved", errno);
        return true;
    }
    const size_t n = strlen(path);
    if (n == 0 || path[n - 1] == '/')
        return fail(e, ERR_INPUT, "E-FILE-WRITE", "%s: names no file (give a file name)", n ? path : "''");
    *out = xstrdup(path);
    return true;
}

bool file_out_open(file_out *f, const char *path, err *e) {
    static unsigned counter;
    *f = (file_out){ .fd = -1 };
    if (!target_of(&f->path, path, e)) return false;
    for (int tries = 0; tries < 100; tries++) {
        f->temp = temp_name(f->path, __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED));
        f->fd = open(f->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (f->fd >= 0) return true;
        if (errno != EEXIST) break;
        free(f->temp);
        f->temp = NULL;
    }
    fail_write(e, path, "be created", f->temp ? errno : EEXIST);
    free(f->temp);
    f->temp = NULL;
    file_out_abort(f);
    return false;
}

bool file_out_write(file_out *f, const void *p, size_t n, err *e) {
    CHECK(f->temp, "write to a file_out that is not open");
    for (const char *at = p; n > 0;) {
        const ssize_t put = write(f->fd, at, n < (1u << 30) ? n : (1u << 30));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return fail_write(e, f->path, "be written", put ? errno : ENOSPC);
        at += put;
        n -= (size_t)put;
    }
    return true;
}

/* The rename itself must reach the disk; some filesystems refuse fsync on a directory, which is no harm. */
static bool sync_dir(const char *path, err *e) {
    const char *slash = strrchr(path, '/');
    char *dir = slash ? xstrdup(path) : xstrdup(".");
    if (slash) dir[slash == path ? 1 : slash - path] = 0;
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(dir);
    if (fd < 0) return true;
    const int error = fsync(fd) ? errno : 0;
    close(fd);
    return error == 0 || error == EINVAL || error == EROFS || error == EBADF || error == ENOTSUP
               ? true
               : fail_write(e, path, "be made durable", error);
}

bool file_out_commit(file_out *f, err *e) {
    CHECK(f->temp, "commit of a file_out that is not open");
    if (fsync(f->fd) && errno != EINVAL && errno != ENOTSUP) return fail_write(e, f->path, "be flushed", errno);
    const int fd = f->fd;
    f->fd = -1;
    if (close(fd)) return fail_write(e, f->path, "be closed", errno);
    if (rename(f->temp, f->path)) return fail_write(e, f->path, "be renamed into place", errno);
    free(f->temp);
    f->temp = NULL;
    return sync_dir(f->path, e);
}

void file_out_abort(file_out *f) {
    if (f->temp) {
        if (f->fd >= 0) close(f->fd);
        unlink(f->temp);
    }
    free(f->temp);
    free(f->path);
    *f = (file_out){ .fd = -1 };
}

bool file_write_atomic(const char *path, const void *p, size_t n, err *e) {
    file_out f = { 0 };
    const bool ok = file_out_open(&f, path, e) && file_out_write(&f, p, n, e) && file_out_commit(&f, e);
    file_out_abort(&f);
    return ok;
}

bool file_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

bool file_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

char *path_join(const char *dir, const char *name) {
    const size_t n = strlen(dir);
    buf b = { 0 };
    buf_printf(&b, "%s%s%s", dir, n > 0 && dir[n - 1] != '/' ? "/" : "", name);
    return b.p;
}
