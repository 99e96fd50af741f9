/* Where the export goes: checks of the destination, the unfinished folder, its last rename. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file.h"
#include "quant/tasks.h"

#define SUFFIX ".partial"

/* "dst" without slashes at its end, and with `suffix`. */
static char *name_with(const char *dst, const char *suffix) {
    buf b = { 0 };
    size_t n = strlen(dst);
    while (n > 1 && dst[n - 1] == '/') n--;
    buf_printf(&b, "%.*s%s", (int)n, dst, suffix);
    return b.p;
}

static char *parent_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash) return xstrdup(".");
    char *dir = xstrdup(path);
    dir[slash == path ? 1 : slash - path] = 0;
    return dir;
}

static bool same_folder(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static bool enough_space(const plan *p, const char *dir, err *e) {
    struct statvfs v;
    if (statvfs(dir, &v) != 0) return true; /* unknown: the writes will tell */
    const uint64_t room = (uint64_t)v.f_bavail * v.f_frsize;
    if (room >= p->total_bytes) return true;
    return fail(e, ERR_MACHINE, "E-QUANT-SPACE", "%s: the export needs %.3f GB, %.3f GB are free", dir,
                (double)p->total_bytes / 1e9, (double)room / 1e9);
}

static bool fail_parent(err *e, const char *dir, int error) {
    return fail(e, error == ENOENT || error == ENOTDIR || error == EACCES || error == EROFS ? ERR_INPUT : ERR_MACHINE,
                "E-QUANT-DST", "%s: no folder can be made here: %s (check the path and its permissions)", dir,
                strerror(error));
}

/* A folder that does not exist yet needs a parent that may be written, with room. */
static bool check_parent(const plan *p, const char *dst, err *e) {
    char *parent = parent_of(dst);
    const bool ok = access(parent, W_OK | X_OK) == 0 ? file_is_dir(parent) || fail_parent(e, parent, ENOTDIR)
                                                     : fail_parent(e, parent, errno);
    const bool fits = ok && enough_space(p, parent, e);
    free(parent);
    return fits;
}

static bool check_names(const plan *p, const char *name, const char *partial, bool resume, err *e) {
    struct stat s;
    if (!*name) return fail(e, ERR_USAGE, "E-QUANT-DST", "'': no destination (give the name of a new folder)");
    if (same_folder(name, p->src->dir))
        return fail(e, ERR_USAGE, "E-QUANT-DST", "%s: source and destination are the same folder", name);
    if (same_folder(partial, p->src->dir))
        return fail(e, ERR_USAGE, "E-QUANT-DST", "%s: the source would be the unfinished folder of this destination",
                    partial);
    if (lstat(name, &s) == 0)
        return fail(e, ERR_INPUT, "E-QUANT-DST", "%s: exists already (choose another name, or remove it)", name);
    if (lstat(partial, &s) != 0) return check_parent(p, name, e);
    if (!S_ISDIR(s.st_mode))
        return fail(e, ERR_INPUT, "E-QUANT-DST", "%s: is in the way and no folder (remove it)", partial);
    if (resume) return true;
    return fail(e, ERR_INPUT, "E-QUANT-DST",
                "%s: left by an unfinished run (--resume continues it; remove it to start anew)", partial);
}

bool quantize_check_dst(const plan *p, const char *dst, bool resume, err *e) {
    char *name = name_with(dst, ""), *partial = name_with(dst, SUFFIX);
    const bool ok = check_names(p, name, partial, resume, e);
    free(name);
    free(partial);
    return ok;
}

bool quantize_folder(char **partial, const plan *p, const char *dst, int rank, bool resume, err *e) {
    *partial = name_with(dst, SUFFIX);
    if (rank > 0) return true;
    if (!quantize_check_dst(p, dst, resume, e)) return false;
    if (mkdir(*partial, 0777) == 0 || (errno == EEXIST && resume)) return true;
    return fail(e, ERR_MACHINE, "E-QUANT-DST", "%s: %s", *partial, strerror(errno));
}

static bool is_of(const plan *p, const char *name) {
    for (int i = 0; i < p->n_shards; i++)
        if (str_is(p->shards[i].file, name)) return true;
    return false;
}

/* Remove from the folder every entry that `drop` names. */
static void sweep(const char *dir, bool (*drop)(const char *name, const plan *p), const plan *p) {
    DIR *d = opendir(dir);
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *f; d && (f = readdir(d));) {
        if (!drop(f->d_name, p)) continue;
        char *path = path_join(dir, f->d_name);
        unlink(path); /* what is no file stays */
        free(path);
    }
    if (d) closedir(d);
}

static bool is_stray(const char *name, const plan *p) {
    const str s = str_of(name);
    return str_ends(s, STR(".safetensors.index.json")) || (str_ends(s, STR(".safetensors")) && !is_of(p, name));
}
/* Journals, and temporary siblings that a killed process left. */
static bool is_hidden(const char *name, const plan *p) {
    (void)p;
    return name[0] == '.';
}

void dest_remove_strays(const char *partial, const plan *p) { sweep(partial, is_stray, p); }

static int sync_folder(const char *path) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno;
    const int error = fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : errno;
    close(fd);
    return error;
}

bool quantize_commit(const char *partial, const char *dst, err *e) {
    char *name = name_with(dst, ""), *parent = parent_of(name);
    int error = sync_folder(partial);
    if (!error) {
        sweep(partial, is_hidden, NULL);
        error = rename(partial, name) == 0 ? sync_folder(parent) : errno;
    }
    if (error) fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: cannot get its final name: %s", name, strerror(error));
    free(name);
    free(parent);
    return error == 0;
}

static bool is_any(const char *name, const plan *p) {
    (void)p;
    return strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

void quantize_discard(const char *partial) {
    if (!partial) return;
    sweep(partial, is_any, NULL);
    rmdir(partial);
}
