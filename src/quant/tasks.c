#include "quant/tasks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

enum { PIECE = 16 << 20 };

static int *index_array(int n) {
    int *v = xmalloc((size_t)n * sizeof *v);
    for (int i = 0; i < n; i++) v[i] = -1;
    return v;
}

static void add(task_list *t, int *cap, qtask task) {
    if (t->n == *cap) {
        *cap = *cap ? *cap * 2 : 1024;
        t->v = xrealloc(t->v, (size_t)*cap * sizeof *t->v);
    }
    t->v[t->n++] = task;
    t->source_bytes += task.source_bytes;
}

static uint64_t group_bytes(const plan *p, int first) {
    uint64_t bytes = 0;
    for (int i = first; i < p->n_modules && i <= first + 4; i++)
        if (p->modules[i].group == first && p->modules[i].format != QF_KEEP)
            bytes += (uint64_t)p->modules[i].rows * (uint64_t)p->modules[i].cols *
                     (uint64_t)dtype_bytes(p->modules[i].src->type);
    return bytes;
}

task_list tasks_make(const plan *p) {
    task_list t = { .weight_of = index_array(p->n_modules),
                    .scale_of = index_array(p->n_modules),
                    .scale_2_of = index_array(p->n_modules),
                    .input_of = index_array(p->n_modules) };
    int cap = 0;
    for (int i = 0; i < p->n_tensors; i++) {
        const qtensor *x = &p->tensors[i];
        switch (x->part) {
        case QP_COPY:
        case QP_SLICE:
            for (uint64_t at = 0; at < x->bytes || at == 0; at += PIECE) {
                const uint64_t n = x->bytes - at < PIECE ? x->bytes - at : PIECE;
                add(&t, &cap, (qtask){ .tensor = i, .begin = at, .bytes = n, .module = -1, .source_bytes = n });
            }
            break;
        case QP_WEIGHT: {
            t.weight_of[x->module] = i;
            const qmodule *m = &p->modules[x->module];
            if (m->group == x->module)
                add(&t, &cap, (qtask){ .tensor = -1, .module = x->module, .source_bytes = group_bytes(p, x->module) });
            break;
        }
        case QP_SCALE: t.scale_of[x->module] = i; break;
        case QP_SCALE_2: t.scale_2_of[x->module] = i; break;
        case QP_INPUT_SCALE: t.input_of[x->module] = i; break;
        case QP_K_SCALE:
        case QP_V_SCALE: break; /* written with the scalars that need no source */
        }
    }
    return t;
}

void tasks_free(task_list *t) {
    free(t->v);
    free(t->weight_of);
    free(t->scale_of);
    free(t->scale_2_of);
    free(t->input_of);
    *t = (task_list){ 0 };
}

/* The rank in whose equal part of the source bytes the middle of a task lies: rises with the task. */
void tasks_share(const task_list *t, int rank, int ranks, int *first, int *last) {
    uint64_t before = 0;
    *first = *last = 0;
    for (int i = 0; i < t->n; i++) {
        const double middle = (double)before + 0.5 * (double)t->v[i].source_bytes;
        const int owner = t->source_bytes ? (int)(middle / (double)t->source_bytes * ranks) : 0;
        if (owner < rank) *first = i + 1;
        if (owner <= rank) *last = i + 1;
        before += t->v[i].source_bytes;
    }
}

/* ---- journal ---- */

#define PREFIX ".journal."

typedef struct journal_head {
    char magic[8];
    uint64_t job;
    int32_t tasks, result_bytes;
} journal_head;

typedef struct journal_record {
    int32_t task, module; /* module -1: end of the task's record */
    uint64_t check;       /* of the bytes that follow (a qresult), or of the task number */
} journal_record;

static uint64_t check_of(const void *p, size_t n, uint64_t salt) {
    return str_hash((str){ p, n }) ^ salt * 0x9E3779B97F4A7C15u;
}

static bool put(journal *j, const void *p, size_t n, err *e) {
    for (const char *at = p; n > 0;) {
        const ssize_t w = write(j->fd, at, n);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return fail(e, ERR_MACHINE, "E-FILE-WRITE", "journal: %s", w < 0 ? strerror(errno) : "short write");
        at += w;
        n -= (size_t)w;
    }
    return true;
}

bool journal_add(journal *j, int i, const task_list *t, const plan *p, const qresult *results, err *e) {
    enum { MAX = 8 * (sizeof(journal_record) + sizeof(qresult)) };
    uint8_t bytes[MAX];
    size_t n = 0;
    const int first = t->v[i].module;
    for (int m = first; first >= 0 && m < p->n_modules && m <= first + 4; m++) {
        if (p->modules[m].group != first || p->modules[m].format == QF_KEEP) continue;
        const journal_record r = { i, m, check_of(&results[m], sizeof results[m], (uint64_t)m + 1) };
        memcpy(bytes + n, &r, sizeof r);
        memcpy(bytes + n + sizeof r, &results[m], sizeof results[m]);
        n += sizeof r + sizeof results[m];
    }
    const journal_record end = { i, -1, check_of(&i, sizeof i, 77) };
    memcpy(bytes + n, &end, sizeof end);
    return put(j, bytes, n + sizeof end, e); /* what is cut off at the end does not count */
}

/* Read the records of an earlier run; returns the length of the part that is whole. */
static size_t replay(journal *j, const uint8_t *bytes, size_t size, const task_list *t, const plan *p,
                     qresult *results) {
    size_t at = sizeof(journal_head), whole = at;
    while (size - at >= sizeof(journal_record)) {
        journal_record r;
        memcpy(&r, bytes + at, sizeof r);
        at += sizeof r;
        if (r.task < 0 || r.task >= t->n) break;
        if (r.module < 0) {
            if (r.check != check_of(&r.task, sizeof r.task, 77)) break;
            j->n_done += !j->done[r.task];
            j->done[r.task] = 1;
            whole = at;
            continue;
        }
        if (r.module >= p->n_modules || size - at < sizeof(qresult)) break;
        qresult q;
        memcpy(&q, bytes + at, sizeof q);
        if (r.check != check_of(&q, sizeof q, (uint64_t)r.module + 1)) break;
        results[r.module] = q;
        at += sizeof q;
    }
    return whole;
}

static bool read_whole(buf *b, int fd) {
    char piece[1 << 16];
    ssize_t n;
    while ((n = read(fd, piece, sizeof piece)) > 0 || (n < 0 && errno == EINTR))
        if (n > 0) buf_add(b, piece, (size_t)n);
    return n == 0;
}

/* Call fn for every journal of the folder. */
typedef bool journal_fn(void *ctx, const char *path, int rank, err *e);
static bool each_journal(const char *folder, journal_fn *fn, void *ctx, err *e) {
    DIR *d = opendir(folder);
    bool ok = true;
    if (!d) return fail(e, ERR_MACHINE, "E-FILE-READ", "%s: %s", folder, strerror(errno));
    /* cppcheck-suppress readdirCalled ; the stream is ours alone */
    for (const struct dirent *f; ok && (f = readdir(d));) {
        if (strncmp(f->d_name, PREFIX, sizeof PREFIX - 1) != 0) continue;
        char *path = path_join(folder, f->d_name);
        ok = fn(ctx, path, atoi(f->d_name + sizeof PREFIX - 1), e);
        free(path);
    }
    closedir(d);
    return ok;
}

typedef struct reading {
    journal *j;
    journal_head head;
    const task_list *t;
    const plan *p;
    qresult *results;
    int rank;     /* whose journal is continued */
    size_t whole; /* bytes of that one which are complete */
} reading;

static bool read_journal(void *ctx, const char *path, int rank, err *e) {
    reading *r = ctx;
    buf b = { 0 };
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && read_whole(&b, fd);
    if (!ok) fail(e, ERR_MACHINE, "E-FILE-READ", "%s: %s", path, strerror(errno));
    if (ok && b.n >= sizeof r->head) {
        ok = memcmp(b.p, &r->head, sizeof r->head) == 0 ||
             fail(e, ERR_INPUT, "E-QUANT-RESUME",
                  "%s: was made by another job (other source, options or scales; remove the "
                  ".partial folder to start anew)",
                  path);
        const size_t whole = ok ? replay(r->j, (const uint8_t *)b.p, b.n, r->t, r->p, r->results) : 0;
        if (rank == r->rank) r->whole = whole;
    }
    if (fd >= 0) close(fd);
    buf_free(&b);
    return ok;
}

/* Lock before reading: a journal that is still written says nothing. */
static bool lock_journal(journal *j, const char *path, err *e) {
    j->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (j->fd < 0) return fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: %s", path, strerror(errno));
    if (flock(j->fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    return fail(e, ERR_INPUT, "E-QUANT-BUSY", "%s: another process is writing this export (let it finish)", path);
}

bool journal_open(journal *j, const char *folder, int rank, uint64_t job, const task_list *t, const plan *p,
                  qresult *results, bool resume, err *e) {
    char name[40];
    reading r = { j, { "nibbleQ", job, t->n, (int32_t)sizeof(qresult) }, t, p, results, rank, 0 };
    *j = (journal){ .fd = -1, .done = xcalloc((size_t)t->n + 1, 1) };
    snprintf(name, sizeof name, PREFIX "%d", rank);
    char *path = path_join(folder, name);
    bool ok = lock_journal(j, path, e) && (!resume || each_journal(folder, read_journal, &r, e));
    if (ok && (ftruncate(j->fd, (off_t)r.whole) != 0 || lseek(j->fd, (off_t)r.whole, SEEK_SET) < 0))
        ok = fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: %s", path, strerror(errno));
    free(path);
    return ok && (r.whole > 0 || put(j, &r.head, sizeof r.head, e));
}

static bool drop_journal(void *ctx, const char *path, int rank, err *e) {
    (void)e;
    if (rank != *(const int *)ctx) unlink(path);
    return true;
}

void journal_forget(journal *j, int rank, const char *folder) {
    err ignored = { 0 };
    if (ftruncate(j->fd, 0) == 0) fsync(j->fd);
    if (!each_journal(folder, drop_journal, &rank, &ignored)) return; /* then --resume will fail the same way */
}

void journal_close(journal *j) {
    if (j->done && j->fd >= 0) close(j->fd);
    free(j->done);
    *j = (journal){ .fd = -1 };
}
