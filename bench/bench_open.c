/* How long opening a checkpoint takes, and how much memory it needs at its peak.
 *
 * usage: bench_open [DIR] [ROUNDS]      (without DIR: the full 35B layout, written sparse to a temporary folder)
 * One CSV row each for the whole directory (with the growth of peak RSS) and for the JSON of its index alone. */
#include "base/clock.h"
#include "ckpt/ckpt.h"

#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

enum { MAX_ROUNDS = 1000 };

static size_t peak_kb(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (size_t)u.ru_maxrss;
}

static int report(const char *what, double *ms, int rounds, const char *extra_mb, const err *e) {
    if (e->kind) return fprintf(stderr, "%s: %s\n", e->id, e->msg), 1;
    qsort(ms, (size_t)rounds, sizeof *ms, by_value);
    printf("%s,%d,%.1f,%.1f,%.1f,%s\n", what, rounds, ms[0], ms[rounds / 2], ms[rounds - 1], extra_mb);
    return 0;
}

static int bench_json(const char *path, double *ms, int rounds) {
    err e = { 0 };
    for (int i = 0; i < rounds && !e.kind; i++) {
        arena a = { 0 };
        const json *v;
        const double t = clock_seconds();
        (void)!json_parse_file(&v, &a, path, NULL, &e);
        ms[i] = (clock_seconds() - t) * 1e3;
        arena_free(&a);
    }
    return report("index_json", ms, rounds, "", &e);
}

static int bench_open(const char *dir, double *ms, int rounds) {
    const size_t before = peak_kb();
    char extra[40];
    err e = { 0 };
    for (int i = 0; i < rounds && !e.kind; i++) {
        ckpt c;
        const double t = clock_seconds();
        if (!ckpt_open(&c, dir, &e)) break;
        ms[i] = (clock_seconds() - t) * 1e3;
        if (i == 0)
            fprintf(stderr, "%d tensors in %d files, %.1f GB\n", c.tensor_count, c.shard_count,
                    (double)c.tensor_bytes / 1e9);
        ckpt_close(&c);
    }
    snprintf(extra, sizeof extra, "%.1f", (double)(peak_kb() - before) / 1000);
    return report("ckpt_open", ms, rounds, extra, &e);
}

int main(int argc, char **argv) {
    static double ms[MAX_ROUNDS];
    char temp[] = "/tmp/nibble-bench-XXXXXX", command[200];
    const char *dir = argc > 1 ? argv[1] : mkdtemp(temp);
    int rounds = argc > 2 ? atoi(argv[2]) : 11, bad = 0;
    if (!dir) return perror(temp), 4;
    if (rounds < 1 || rounds > MAX_ROUNDS) rounds = 11;
    if (argc < 2) {
        snprintf(command, sizeof command, "python3 tools/make_sparse.py %s >&2", temp);
        bad = system(command) != 0;
    }
    puts("what,rounds,min_ms,median_ms,max_ms,extra_peak_mb");
    bad = bad || bench_open(dir, ms, rounds); /* first: later rows cannot see a peak that was passed before */
    char *index = path_join(dir, "model.safetensors.index.json");
    if (!bad && file_exists(index)) bad = bench_json(index, ms, rounds);
    free(index);
    if (argc < 2) {
        snprintf(command, sizeof command, "rm -r %s", temp);
        bad |= system(command) != 0;
    }
    return bad;
}
