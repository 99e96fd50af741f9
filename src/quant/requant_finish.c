/* The renames that put a complete change into place; every one may be the last before a kill, and the next run goes on. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "quant/requant.h"

static bool fail_at(err *e, const char *path, const char *what) {
    return fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: cannot be %s: %s (check the folder and its permissions)", path,
                what, strerror(errno));
}

bool requant_sync_folder(const char *path, err *e) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail_at(e, path, "opened");
    const bool ok = fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP || fail_at(e, path, "made durable");
    close(fd);
    return ok;
}

bool requant_is_unfinished(const char *dir) {
    char *stage = path_join(dir, REQUANT_STAGE);
    const bool there = file_is_dir(stage);
    free(stage);
    return there;
}

void requant_remove_folder(const char *path) {
    DIR *d = opendir(path);
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *f; d && (f = readdir(d));) {
        char *name = path_join(path, f->d_name);
        unlink(name); /* "." and ".." refuse */
        free(name);
    }
    if (d) closedir(d);
    rmdir(path);
}

/* Shards must be there before the index names them, and the index before the configs promise what it holds. */
static int rank_of(const char *name) {
    if (str_ends(str_of(name), STR(".safetensors"))) return 0;
    if (str_ends(str_of(name), STR(".index.json"))) return 1;
    return strcmp(name, "hf_quant_config.json") == 0 ? 2 : strcmp(name, "config.json") == 0 ? 3 : 4;
}

static int by_rank(const void *a, const void *b) {
    const char *x = *(char *const *)a, *y = *(char *const *)b;
    return rank_of(x) != rank_of(y) ? rank_of(x) - rank_of(y) : strcmp(x, y);
}

/* Names of the files in the stage, in the order in which they move. */
static int staged(char ***out, const char *stage) {
    int n = 0;
    char **v = NULL;
    DIR *d = opendir(stage);
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (struct dirent *f; d && (f = readdir(d));) {
        if (f->d_name[0] == '.' || strcmp(f->d_name, REQUANT_REMOVE) == 0) continue;
        v = xrealloc(v, (size_t)(n + 1) * sizeof *v);
        v[n++] = xstrdup(f->d_name);
    }
    if (d) closedir(d);
    if (n) qsort(v, (size_t)n, sizeof *v, by_rank);
    *out = v;
    return n;
}

typedef struct mover {
    const char *dir, *stage;
    void (*on_step)(void *ctx, const char *what);
    void *ctx;
} mover;

static bool move(const mover *m, const char *name, err *e) {
    char *from = path_join(m->stage, name), *to = path_join(m->dir, name);
    const bool ok = (rename(from, to) == 0 || fail_at(e, to, "put into place")) && requant_sync_folder(m->dir, e);
    if (ok && m->on_step) m->on_step(m->ctx, name);
    free(from);
    free(to);
    return ok;
}

/* Only files of the folder that are shards: the list came from a disk. */
static bool removable(str name) {
    if (name.n == 0 || name.n > 255 || name.p[0] == '.' || !str_ends(name, STR(".safetensors"))) return false;
    return !memchr(name.p, '/', name.n) && !memchr(name.p, 0, name.n);
}

static bool remove_old(const mover *m, err *e) {
    char *path = path_join(m->stage, REQUANT_REMOVE);
    buf list = { 0 };
    bool ok = !file_exists(path) || file_read(&list, path, 1 << 24, e);
    for (str rest = buf_view(&list); ok && rest.n;) {
        const char *end = memchr(rest.p, '\n', rest.n);
        const str name = { rest.p, end ? (size_t)(end - rest.p) : rest.n };
        rest = str_skip(rest, end ? name.n + 1 : name.n);
        if (!removable(name)) continue;
        char text[256];
        snprintf(text, sizeof text, STR_FMT, STR_ARG(name));
        char *old = path_join(m->dir, text);
        ok = unlink(old) == 0 || errno == ENOENT || fail_at(e, old, "removed");
        if (ok && m->on_step) m->on_step(m->ctx, text);
        free(old);
    }
    buf_free(&list);
    free(path);
    return ok;
}

bool requant_finish(const char *dir, void (*on_step)(void *ctx, const char *what), void *ctx, err *e) {
    char *stage = path_join(dir, REQUANT_STAGE);
    const mover m = { dir, stage, on_step, ctx };
    char **names;
    const int n = staged(&names, stage);
    bool ok = true;
    for (int i = 0; i < n; i++) {
        ok = ok && move(&m, names[i], e);
        free(names[i]);
    }
    free(names);
    ok = ok && remove_old(&m, e) && requant_sync_folder(dir, e);
    if (ok) requant_remove_folder(stage);
    free(stage);
    return ok;
}
