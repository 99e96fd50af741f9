#include "engine/prefix_disk.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"

enum { MOST_FILES = 1 << 16 };

static const char suffix[] = ".nbprefix";

typedef struct job {
    char *path;
    uint8_t *head;
    size_t head_bytes;
    void *payload;
    size_t bytes;
} job;

struct prefix_disk {
    char *dir;
    uint64_t identity;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    job next; /* path NULL: nothing to write */
    bool busy, stop, threaded, warned;
};

static char *path_of(const prefix_disk *d, const int32_t *tokens, int n) {
    char name[64];
    snprintf(name, sizeof name, "%016llx-%016llx%s", (unsigned long long)d->identity,
             (unsigned long long)prefix_sum(tokens, (size_t)n * sizeof *tokens, d->identity), suffix);
    return path_join(d->dir, name);
}

static void remove_bad(const char *path, const char *why) {
    log_say("W-PREFIX-FILE", "%s: %s; it is removed", path, why);
    unlink(path);
}

/* ---- writing ---- */

static bool write_job(const job *j, err *e) {
    file_out f;
    const bool ok = file_out_open(&f, j->path, e) && file_out_write(&f, j->head, j->head_bytes, e) &&
                    file_out_write(&f, j->payload, j->bytes, e) && file_out_commit(&f, e);
    file_out_abort(&f); /* nothing but its names after a commit */
    return ok;
}

static void free_job(job *j) {
    free(j->path);
    free(j->head);
    free(j->payload);
    *j = (job){ 0 };
}

static void *run(void *arg) {
    prefix_disk *d = arg;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        while (!d->next.path && !d->stop) pthread_cond_wait(&d->changed, &d->lock);
        if (!d->next.path) break;
        job j = d->next;
        d->next = (job){ 0 };
        pthread_mutex_unlock(&d->lock);
        err e = { 0 };
        const bool ok = write_job(&j, &e);
        free_job(&j);
        pthread_mutex_lock(&d->lock);
        if (!ok && !d->warned) {
            log_say("W-PREFIX-DISK", "%s: entries are not kept: %s", d->dir, e.msg);
            d->warned = true;
        }
        d->busy = false;
        pthread_cond_broadcast(&d->changed);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

static void wait_idle(prefix_disk *d) {
    pthread_mutex_lock(&d->lock);
    while (d->busy) pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

bool prefix_disk_busy(prefix_disk *d) {
    pthread_mutex_lock(&d->lock);
    const bool busy = d->busy;
    pthread_mutex_unlock(&d->lock);
    return busy;
}

void prefix_disk_write(prefix_disk *d, const int32_t *tokens, int n, void *payload, size_t bytes) {
    wait_idle(d);
    job j = {
        .path = path_of(d, tokens, n), .head_bytes = prefix_file_head_bytes(n), .payload = payload, .bytes = bytes
    };
    j.head = xmalloc(j.head_bytes);
    prefix_file_head(j.head, d->identity, tokens, n, payload, bytes);
    pthread_mutex_lock(&d->lock);
    d->next = j;
    d->busy = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

/* ---- reading ---- */

static bool open_sound(prefix_disk *d, mapping *map, prefix_view *v, const char *path) {
    err e = { 0 };
    if (!mapping_open(map, path, &e)) return false;
    const char *why = prefix_file_check(v, map->data, map->size, d->identity);
    if (!why) return true;
    remove_bad(path, why);
    mapping_close(map);
    return false;
}

bool prefix_disk_read(prefix_disk *d, mapping *map, const uint8_t **payload, const int32_t *tokens, int n,
                      size_t bytes) {
    prefix_view v;
    char *path = path_of(d, tokens, n);
    wait_idle(d);
    bool ok = open_sound(d, map, &v, path);
    if (ok && (v.payload_bytes != bytes || v.n != n || memcmp(v.tokens, tokens, (size_t)n * sizeof *tokens) != 0 ||
               !prefix_file_sound(&v, map->data))) {
        remove_bad(path, "is damaged");
        mapping_close(map);
        ok = false;
    }
    if (ok) *payload = v.payload;
    free(path);
    return ok;
}

void prefix_disk_remove(prefix_disk *d, const int32_t *tokens, int n) {
    char *path = path_of(d, tokens, n);
    wait_idle(d);
    unlink(path);
    free(path);
}

/* ---- the folder ---- */

typedef struct listed {
    char *path;
    int64_t mtime_ns;
} listed;

static int by_age(const void *a, const void *b) {
    const listed *x = a, *y = b;
    if (x->mtime_ns != y->mtime_ns) return x->mtime_ns < y->mtime_ns ? -1 : 1;
    return strcmp(x->path, y->path);
}

enum { NAME = 16 + 1 + 16 };

static bool is_ours(const prefix_disk *d, const char *name) {
    char begin[32];
    const int n = snprintf(begin, sizeof begin, "%016llx-", (unsigned long long)d->identity);
    return strlen(name) == NAME + sizeof suffix - 1 && strncmp(name, begin, (size_t)n) == 0 &&
           strspn(name + n, "0123456789abcdef") == 16 && strcmp(name + NAME, suffix) == 0;
}

/* What a process that was killed left half written (the names of file_out). */
static bool is_litter(const char *name, const struct stat *st) {
    const size_t n = strlen(name);
    return name[0] == '.' && n > 4 && strcmp(name + n - 4, ".tmp") == 0 && strstr(name, suffix) &&
           time(NULL) - st->st_mtim.tv_sec > 3600;
}

static int list_files(const prefix_disk *d, listed *out) {
    int n = 0;
    DIR *dir = opendir(d->dir);
    if (!dir) return 0;
    /* The stream is ours alone, and glibc's readdir is safe on separate streams. */
    /* cppcheck-suppress readdirCalled */
    for (struct dirent *entry; n < MOST_FILES && (entry = readdir(dir));) {
        struct stat st;
        char *path = path_join(d->dir, entry->d_name);
        const bool regular = lstat(path, &st) == 0 && S_ISREG(st.st_mode);
        if (regular && is_ours(d, entry->d_name)) {
            out[n++] = (listed){ path, (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec };
            continue;
        }
        if (regular && is_litter(entry->d_name, &st)) unlink(path);
        free(path);
    }
    closedir(dir);
    qsort(out, (size_t)n, sizeof *out, by_age);
    return n;
}

void prefix_disk_scan(prefix_disk *d, void (*found)(void *ctx, const int32_t *tokens, int n, size_t bytes), void *ctx) {
    listed *all = xcalloc(MOST_FILES, sizeof *all);
    const int n = list_files(d, all);
    for (int i = 0; i < n; i++) {
        mapping map;
        prefix_view v;
        if (open_sound(d, &map, &v, all[i].path)) {
            int32_t *tokens = xmalloc((size_t)v.n * sizeof *tokens);
            memcpy(tokens, v.tokens, (size_t)v.n * sizeof *tokens);
            const size_t bytes = map.size;
            mapping_close(&map);
            char *want = path_of(d, tokens, v.n);
            if (strcmp(want, all[i].path) != 0)
                remove_bad(all[i].path, "has another entry's name");
            else
                found(ctx, tokens, v.n, bytes);
            free(want);
            free(tokens);
        }
        free(all[i].path);
    }
    free(all);
}

bool prefix_disk_open(prefix_disk **out, const char *dir, uint64_t identity, err *e) {
    *out = NULL;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return fail(e, ERR_INPUT, "E-PREFIX-DIR", "%s: cannot be made: %s (name a folder that can be written)", dir,
                    strerror(errno));
    if (!file_is_dir(dir) || access(dir, R_OK | W_OK | X_OK) != 0)
        return fail(e, ERR_INPUT, "E-PREFIX-DIR", "%s: is no folder that can be read and written", dir);
    prefix_disk *d = xcalloc(1, sizeof *d);
    d->dir = xstrdup(dir);
    d->identity = identity;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* as in pool.c: signals belong to the threads that know what to do with them */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    d->threaded = pthread_create(&d->thread, NULL, run, d) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (d->threaded) return *out = d, true;
    prefix_disk_close(d);
    return fail(e, ERR_MACHINE, "E-MACHINE-THREADS", "prefix cache: cannot start a thread");
}

void prefix_disk_close(prefix_disk *d) {
    if (!d) return;
    if (d->threaded) {
        pthread_mutex_lock(&d->lock);
        d->stop = true;
        pthread_cond_broadcast(&d->changed);
        pthread_mutex_unlock(&d->lock);
        pthread_join(d->thread, NULL);
    }
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    free(d->dir);
    free(d);
}
