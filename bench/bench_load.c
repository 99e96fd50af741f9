/* bench_load - how long an engine takes to open a checkpoint (map, check, repack, build the heads, reserve the caches), in
 * turn with a copy of as many bytes into fresh memory, and how much memory that takes at its height.
 *
 * Each opening runs in a process of its own, so that its peak is its own. With --cold the files' pages are dropped first, and
 * a plain read of the same files, pages dropped as well, runs in turn. Bytes are those that must be read: packed matrices, and
 * the head that its screen is made from. */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/pool.h"
#include "engine/engine.h"
#include "report.h"

enum { MOST = 99, BLOCK = 8 << 20, SOURCE = 256 << 20 };

typedef struct opened {                           /* what the child tells */
    double seconds, user_seconds, system_seconds; /* the latter two of all threads */
    int64_t peak_bytes, anon_bytes, read_bytes;
    memory_plan plan;
} opened;

typedef struct copy_job {
    uint8_t *from, *to;
    size_t bytes;
} copy_job;

static void copy_part(void *ctx, int thread, int threads) {
    const copy_job *j = ctx;
    int64_t at, end;
    pool_share((int64_t)j->bytes, 4096, thread, threads, &at, &end);
    memcpy(j->to + at, j->from + at, (size_t)(end - at));
}

static uint8_t *pages(size_t bytes) {
    /* cppcheck-suppress invalidFunctionArg ; what MAP_ANONYMOUS asks for */
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_PRIVATE, -1, 0);
    CHECK(p != MAP_FAILED, "no memory for a copy");
    madvise(p, bytes, MADV_HUGEPAGE); /* as the packed weights have it */
    return p;
}

/* Bytes per second into memory that was never used before, as the load does, and as much of it: a machine that is itself a
 * guest gets the first of its memory faster than the rest. The source is read again and again. */
static double copy_rate(pool *p, size_t bytes) {
    const size_t block = bytes < SOURCE ? bytes : SOURCE;
    uint8_t *to = pages(bytes);
    copy_job j = { .from = pages(block) };
    memset(j.from, 1, block);
    const double t0 = clock_seconds();
    for (size_t at = 0; at < bytes; at += j.bytes) {
        j.to = to + at;
        j.bytes = bytes - at < block ? bytes - at : block;
        pool_run(p, copy_part, &j);
    }
    const double rate = (double)bytes / (clock_seconds() - t0);
    munmap(j.from, block);
    munmap(to, bytes);
    return rate;
}

static int64_t status_bytes(const char *key) {
    char line[200];
    long long kb = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) kb = atoll(line + strlen(key) + 1);
    if (f) fclose(f);
    return kb * 1024;
}

/* Every file of the folder: pages dropped, then, when asked for, read; bytes per second. */
static double visit_files(const char *dir, bool read_them) {
    uint8_t *block = xmalloc(BLOCK);
    double bytes = 0, seconds = 0;
    DIR *d = opendir(dir);
    for (struct dirent *f; d && (f = readdir(d));) {
        char *path = path_join(dir, f->d_name);
        const size_t n = strlen(path);
        const int fd = n > 12 && strcmp(path + n - 12, ".safetensors") == 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        free(path);
        if (fd < 0) continue;
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        const double t0 = clock_seconds();
        for (ssize_t got = 1; read_them && got > 0; bytes += (double)got) got = read(fd, block, BLOCK);
        seconds += clock_seconds() - t0;
        if (read_them) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    if (d) closedir(d);
    free(block);
    return seconds > 0 ? bytes / seconds : 0;
}

static void child(const char *dir, int threads, int to) {
    opened r = { 0 };
    err e = { 0 };
    engine *g = NULL;
    const engine_options eo = {
        .ops = { .device = "cpu", .threads = threads, .isa = ISA_COUNT }, .slots = 1, .ctx = 2048, .no_text = true
    };
    const double t0 = clock_seconds();
    if (engine_open(&g, dir, &eo, &e)) {
        r.seconds = clock_seconds() - t0;
        struct rusage u;
        getrusage(RUSAGE_SELF, &u);
        r.user_seconds = (double)u.ru_utime.tv_sec + (double)u.ru_utime.tv_usec * 1e-6;
        r.system_seconds = (double)u.ru_stime.tv_sec + (double)u.ru_stime.tv_usec * 1e-6;
        r.peak_bytes = status_bytes("VmHWM:");
        r.anon_bytes = status_bytes("RssAnon:");
        r.plan = g->plan;
        r.read_bytes = g->plan.packed_bytes + (g->plan.screen_bytes ? (int64_t)g->w.head.rows * g->w.head.cols * 2 : 0);
    } else {
        fprintf(stderr, "bench_load: %s: %s\n", e.id, e.msg);
    }
    if (write(to, &r, sizeof r) != (ssize_t)sizeof r) _exit(1);
    _exit(r.seconds > 0 ? 0 : 1);
}

static bool open_once(opened *r, const char *dir, int threads) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) != 0) return perror("pipe"), false;
    const pid_t pid = fork();
    if (pid == 0) child(dir, threads, fds[1]);
    close(fds[1]);
    const bool told = pid > 0 && read(fds[0], r, sizeof *r) == (ssize_t)sizeof *r && r->seconds > 0;
    close(fds[0]);
    if (pid > 0) waitpid(pid, NULL, 0);
    return told;
}

static void row(const char *what, double *v, int n) {
    const double m = median(v, n);
    printf("| %s | %.3g | %.3g..%.3g |\n", what, m, v[0], v[n - 1]);
}

static bool bench(const char *dir, int threads, int rounds, bool cold) {
    static double seconds[MOST], gb[MOST], copy[MOST], share[MOST], disk[MOST], peak[MOST], over[MOST];
    static double user[MOST], sys[MOST];
    opened r;
    err e = { 0 };
    if (!open_once(&r, dir, threads)) return false; /* not counted: pages come into the cache */
    for (int i = 0; i < rounds; i++) {
        pool *p; /* of each round: a child has no threads of its parent */
        if (!pool_new(&p, threads, &e)) return false;
        copy[i] = copy_rate(p, (size_t)r.read_bytes) / 1e9;
        pool_free(p);
        double least = copy[i];
        if (cold) {
            disk[i] = visit_files(dir, true) / 1e9;
            if (disk[i] < least) least = disk[i];
        }
        if (!open_once(&r, dir, threads)) return false;
        seconds[i] = r.seconds;
        user[i] = r.user_seconds / (double)r.read_bytes * 1e9;
        sys[i] = r.system_seconds / (double)r.read_bytes * 1e9;
        gb[i] = (double)r.read_bytes / r.seconds / 1e9;
        share[i] = gb[i] / least;
        peak[i] = (double)r.peak_bytes / 1e9;
        const memory_plan *m = &r.plan;
        over[i] = (double)(r.peak_bytes - m->packed_bytes - m->mapped_bytes - m->screen_bytes - m->draft_bytes -
                           m->state_bytes - m->prefix_bytes) /
                  1e9;
    }
    printf("%s: %s page cache, %.2f GB to read; packed %.2f GB, in place %.2f, screened head %.2f, draft head %.2f, "
           "caches %.2f\n\n",
           dir, cold ? "no" : "warm", (double)r.read_bytes / 1e9, (double)r.plan.packed_bytes / 1e9,
           (double)r.plan.mapped_bytes / 1e9, (double)r.plan.screen_bytes / 1e9, (double)r.plan.draft_bytes / 1e9,
           (double)(r.plan.state_bytes + r.plan.prefix_bytes) / 1e9);
    puts("| | median | spread |\n|---|---|---|");
    row("open, s", seconds, rounds);
    row("open, GB/s", gb, rounds);
    row("user seconds per GB, all threads", user, rounds);
    row("system seconds per GB, all threads", sys, rounds);
    row("copy into fresh memory, GB/s", copy, rounds);
    if (cold) row("plain read of the files, GB/s", disk, rounds);
    row("open / the lower of these (aim 0.8)", share, rounds);
    row("peak RSS, GB", peak, rounds);
    row("peak RSS beyond weights, heads and caches, GB (aim 0.5)", over, rounds);
    return true;
}

int main(int argc, char **argv) {
    int rounds = 3, threads = 0;
    bool cold = false;
    const arg_opt opts[] = {
        { .type = ARG_INT, .name = "rounds", .dst = &rounds, .lo = 1, .hi = MOST, .help = "openings" },
        { .type = ARG_INT, .name = "threads", .dst = &threads, .lo = 0, .hi = 1024, .help = "0: all CPUs" },
        { .type = ARG_FLAG, .name = "cold", .dst = &cold, .help = "drop the files from the page cache before each" },
    };
    const arg_spec spec = { .usage = "bench_load [options] MODEL_DIR",
                            .about = "Time and memory of opening a checkpoint.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .min_positional = 1,
                            .max_positional = 1 };
    arg_strings pos = { 0 };
    bool help;
    err e = { 0 };
    if (!args_parse(&spec, argc, argv, &pos, &help, &e))
        return fprintf(stderr, "bench_load: %s: %s\n", e.id, e.msg), err_exit_code(e.kind);
    if (help) return print_help(&spec), 0;
    const bool ok = bench(pos.v[0], threads, rounds, cold);
    arg_strings_free(&pos);
    return ok ? 0 : 1;
}
