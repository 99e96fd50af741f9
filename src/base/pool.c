#include "base/pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"

/* How long to spin before sleeping: longer than the gap between two ops of a decode step, short enough that an idle
 * server costs nothing. */
#define SPIN_SECONDS 50e-6

enum { MAX_THREADS = 1024 };

/* A counter that threads wait on: `value` changes, sleepers are woken only when there are any. Each stands in cache
 * lines of its own. */
typedef struct gate {
    _Alignas(128) atomic_uint value;
    atomic_uint sleepers;
} gate;

struct pool {
    gate run;   /* value: number of the current run, one more for each pool_run and for the end */
    gate done;  /* value: runs completed by all workers */
    gate phase; /* value: barriers passed */
    _Alignas(128) atomic_int unfinished; /* workers still inside fn */
    _Alignas(128) atomic_int arrived;    /* threads waiting at the barrier */
    _Alignas(128) pool_fn *fn;           /* of the current run; ordered by `run` */
    void *ctx;
    bool stop, running;
    bool may_spin;
    int threads, started;
    struct worker *workers;
};

typedef struct worker {
    pool *p;
    pthread_t id;
    int thread;
} worker;

static void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(atomic_uint *at, unsigned while_value) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, while_value, NULL, NULL,
            0); /* early returns are rechecked by the caller */
}

static void futex_wake_all(atomic_uint *at) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

/* Wait until g->value differs from `old`; returns the new value. What was written before gate_advance is visible. */
static unsigned gate_wait(gate *g, unsigned old, bool may_spin) {
    unsigned v = atomic_load_explicit(&g->value, memory_order_acquire);
    if (v != old) return v;
    if (may_spin) {
        const double until = clock_seconds() + SPIN_SECONDS;
        do {
            for (int i = 0; i < 32; i++) {
                v = atomic_load_explicit(&g->value, memory_order_acquire);
                if (v != old) return v;
                cpu_relax();
            }
        } while (clock_seconds() < until);
    }
    /* Either the one who advances sees this sleeper, or futex_wait sees the new value: both sides order their write
     * before their read (seq_cst). */
    atomic_fetch_add(&g->sleepers, 1);
    while ((v = atomic_load(&g->value)) == old) futex_wait(&g->value, old);
    atomic_fetch_sub(&g->sleepers, 1);
    return v;
}

static void gate_advance(gate *g) {
    atomic_fetch_add(&g->value, 1);
    if (atomic_load(&g->sleepers) > 0) futex_wake_all(&g->value);
}

static void *worker_main(void *arg) {
    const worker *w = arg;
    pool *p = w->p;
    for (unsigned seen = 0;;) {
        seen = gate_wait(&p->run, seen, p->may_spin);
        if (p->stop) return NULL;
        p->fn(p->ctx, w->thread, p->threads);
        if (atomic_fetch_sub_explicit(&p->unfinished, 1, memory_order_acq_rel) == 1) gate_advance(&p->done);
    }
}

void pool_run(pool *p, pool_fn *fn, void *ctx) {
    CHECK(!p->running, "pool_run inside pool_run");
    p->running = true;
    if (p->threads == 1) {
        fn(ctx, 0, 1);
    } else {
        const unsigned done = atomic_load_explicit(&p->done.value, memory_order_relaxed);
        p->fn = fn;
        p->ctx = ctx;
        atomic_store_explicit(&p->unfinished, p->threads - 1, memory_order_relaxed);
        gate_advance(&p->run);
        fn(ctx, 0, p->threads);
        gate_wait(&p->done, done, p->may_spin);
    }
    p->running = false;
}

void pool_barrier(pool *p) {
    if (p->threads == 1) return;
    const unsigned phase = atomic_load_explicit(&p->phase.value, memory_order_acquire);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        gate_advance(&p->phase);
    } else {
        gate_wait(&p->phase, phase, p->may_spin);
    }
}

int pool_threads(const pool *p) { return p->threads; }

static bool start_workers(pool *p, err *e) {
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* a fault of the thread itself: blocked, it would end the process without a word */
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the threads that know what to do with them */
    int rc = 0;
    for (int i = 1; i < p->threads && rc == 0; i++) {
        worker *w = &p->workers[i];
        *w = (worker){ .p = p, .thread = i };
        rc = pthread_create(&w->id, NULL, worker_main, w);
        if (rc == 0) p->started = i;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc == 0) return true;
    return fail(e, ERR_MACHINE, "E-MACHINE-THREADS", "thread %d of %d cannot be started: %s (use fewer threads)",
                p->started + 1, p->threads, strerror(rc));
}

bool pool_new(pool **out, int threads, err *e) {
    *out = NULL;
    const int cpus = pool_cpus();
    if (threads <= 0) threads = cpus < MAX_THREADS ? cpus : MAX_THREADS;
    if (threads > MAX_THREADS)
        return fail(e, ERR_MACHINE, "E-MACHINE-THREADS", "%d threads asked for: at most %d (use fewer threads)",
                    threads, MAX_THREADS);
    void *mem = NULL;
    CHECK(posix_memalign(&mem, _Alignof(pool), sizeof(pool)) == 0, "out of memory for a pool");
    pool *p = memset(mem, 0, sizeof(pool));
    p->threads = threads;
    p->may_spin = threads <= cpus;
    p->workers = xcalloc((size_t)threads, sizeof *p->workers);
    if (!start_workers(p, e)) {
        pool_free(p);
        return false;
    }
    *out = p;
    return true;
}

void pool_free(pool *p) {
    if (!p) return;
    p->stop = true;
    gate_advance(&p->run);
    for (int i = 1; i <= p->started; i++) pthread_join(p->workers[i].id, NULL);
    free(p->workers);
    free(p);
}

/* ---- how many CPUs there are for us ---- */

static bool read_line(const char *path, char *line, size_t size) {
    FILE *f = fopen(path, "re");
    if (!f) return false;
    const bool ok = fgets(line, (int)size, f) != NULL;
    fclose(f);
    return ok;
}

/* The number at the start of a file's first line, -1 when there is none ("max"). */
static double read_number(const char *path, char **rest, char *line, size_t size) {
    if (!read_line(path, line, size)) return -1;
    char *end;
    const double v = strtod(line, &end);
    if (rest) *rest = end;
    return end > line && isfinite(v) ? v : -1;
}

/* CPUs that the quota of one cgroup folder allows (v2 file, then v1), INFINITY when it sets none. */
static double quota_of(const char *dir) {
    char path[1400], line[128], *rest;
    snprintf(path, sizeof path, "%s/cpu.max", dir); /* "150000 100000" or "max 100000" */
    double quota = read_number(path, &rest, line, sizeof line), period;
    if (quota > 0) {
        period = strtod(rest, NULL);
    } else {
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", dir);
        quota = read_number(path, NULL, line, sizeof line);
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", dir);
        period = read_number(path, NULL, line, sizeof line);
    }
    return quota > 0 && period > 0 ? quota / period : INFINITY;
}

/* The least quota from `root`/`group` up to `root`: an ancestor's limit binds its children. A path that this mount
 * namespace does not show is skipped. */
static double quota_up(const char *root, const char *group) {
    char dir[1300];
    snprintf(dir, sizeof dir, "%s%s", root, group);
    double least = INFINITY;
    for (;;) {
        least = fmin(least, quota_of(dir));
        char *slash = strrchr(dir, '/');
        if (!slash || strlen(dir) <= strlen(root)) return least;
        *slash = 0;
    }
}

/* Does the comma-separated list hold "cpu"? */
static bool names_cpu(const char *list, size_t n) {
    for (const char *p = list, *end = list + n; p < end;) {
        const char *comma = memchr(p, ',', (size_t)(end - p));
        const size_t len = (size_t)((comma ? comma : end) - p);
        if (len == 3 && memcmp(p, "cpu", 3) == 0) return true;
        p += len + 1;
    }
    return false;
}

static double cgroup_quota(void) {
    double least = INFINITY;
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return least;
    char line[1100];
    while (fgets(line, sizeof line, f)) { /* "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1) */
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        if (!path) continue;
        const size_t n = (size_t)(path - list - 1);
        if (strcmp(path + 1, "/") == 0) path++; /* the root itself */
        if (n == 0)
            least = fmin(least, quota_up("/sys/fs/cgroup", path + 1));
        else if (names_cpu(list + 1, n)) {
            least = fmin(least, quota_up("/sys/fs/cgroup/cpu", path + 1));
            least = fmin(least, quota_up("/sys/fs/cgroup/cpu,cpuacct", path + 1));
        }
    }
    fclose(f);
    return least;
}

int pool_cpus(void) {
    int cpus = 1;
    /* The kernel refuses a mask smaller than its own: grow until it fits. */
    for (int bits = 1024; bits <= 1 << 20; bits *= 2) {
        cpu_set_t *set = CPU_ALLOC(bits);
        if (!set) break;
        const bool ok = sched_getaffinity(0, CPU_ALLOC_SIZE(bits), set) == 0;
        const bool small = !ok && errno == EINVAL;
        if (ok) cpus = CPU_COUNT_S(CPU_ALLOC_SIZE(bits), set);
        CPU_FREE(set);
        if (!small) break;
    }
    const double quota = cgroup_quota();
    if (quota < cpus) cpus = (int)(quota + 0.5); /* nearest: 1.9 CPUs are two threads, 1.2 are one */
    return cpus > 1 ? cpus : 1;
}
