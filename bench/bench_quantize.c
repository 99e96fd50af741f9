/* bench_quantize - the quantizer in parts and whole, side by side in one run.
 * usage: bench_quantize MODEL_DIR WORK_DIR [--program build/nibble] [--threads N] [--runs N] [--cold] [--parts]
 *
 * encode   the encode kernel alone, one thread, every ISA level of this CPU, working set in the second-level cache
 * pack     read (page cache), amax, encode, statistics with N threads, nothing written
 * command  `nibble quantize --no-calib`, from process start to renamed folder
 * copy     a plain program's work: N threads read the same source bytes once and write as many bytes as the export has to
 *          as many files, then fsync; command and copies take turns
 * behind   the same, but what is on the disk leaves the page cache at once, as the command does it
 * --cold drops the source from the page cache before each of those; --parts leaves command and copy out. WORK_DIR lies on
 * the disk to measure and is used for DST folders. GB/s (10^9) count BF16 source bytes. One JSON object; medians, with the
 * lowest and highest of the runs. *_cpu is the rate by CPU time (user and system, times the threads): on a busy machine, what
 * the wall clock would say on an idle one with a disk that is never waited for. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "quant/quantize.h"
#include "quant/quantize_write.h"

#include "report.h"

static const double MODELOPT = 0.145; /* GB/s of ModelOpt 0.47's packing, 2 CPU cores, no file; docs/BENCH.md */
enum { MAX_RUNS = 99, PIECE = 4 << 20 };

static struct {
    const char *model, *work, *program;
    int threads, runs;
    bool cold, parts;
} opt = { .program = "build/nibble", .threads = 2, .runs = 3 };

static _Noreturn void die(const char *id, const char *msg) {
    fprintf(stderr, "bench_quantize: %s: %s\n", id, msg);
    exit(4);
}

/* "name":[median,lowest,highest] */
static double print_runs(const char *name, double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    const double median = n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
    printf(",\n \"%s\":[%.3f,%.3f,%.3f]", name, median, v[0], v[n - 1]);
    fflush(stdout);
    return median;
}

/* Two views on one run: GB/s of source by wall clock and by CPU time. */
typedef struct rates {
    double wall[MAX_RUNS], cpu[MAX_RUNS];
} rates;

static double cpu_seconds(int who) {
    struct rusage u;
    getrusage(who, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void note(rates *r, int run, uint64_t bytes, double wall, double cpu) {
    r->wall[run] = (double)bytes / wall * 1e-9;
    r->cpu[run] = (double)bytes / cpu * opt.threads * 1e-9;
}

static double print_rates(const char *name, rates *r) {
    char cpu[60];
    const double median = print_runs(name, r->wall, opt.runs);
    snprintf(cpu, sizeof cpu, "%s_cpu", name);
    print_runs(cpu, r->cpu, opt.runs);
    return median;
}

/* ---- the kernel ---- */

static double encode_rate(const quant_kern *k, const uint16_t *x, uint8_t *codes, uint8_t *scales, int64_t n) {
    const double t0 = clock_seconds();
    double t = t0, bytes = 0;
    while (t - t0 < 0.1) {
        for (int i = 0; i < 8; i++) k->encode_bf16(codes, scales, x, n, 1e-4f, ARITH_CUDA);
        bytes += 8 * 2.0 * (double)n;
        t = clock_seconds();
    }
    return bytes / (t - t0) * 1e-9;
}

static void bench_encode(void) {
    enum { N = 64 * 1024 };
    uint16_t *x = xmalloc(N * sizeof *x);
    uint8_t *codes = xmalloc(N / 2), *scales = xmalloc(N / 16);
    quant_kern all[ISA_COUNT];
    double rate[ISA_COUNT][9];
    int levels = 0;
    uint32_t s = 1;
    for (int i = 0; i < N; i++) { /* both signs, seven binades around 0.02 */
        s = s * 1664525u + 1013904223u;
        x[i] = (uint16_t)((s >> 16 & 0x8000) | (0x3a00 + (s >> 20 & 0x3ff)));
    }
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        quant_kern_init(&all[levels], (kern_isa)isa);
        if (all[levels].isa == (kern_isa)isa) levels++;
    }
    for (int r = 0; r < 9; r++)
        for (int l = 0; l < levels; l++) rate[l][r] = encode_rate(&all[l], x, codes, scales, N);
    for (int l = 0; l < levels; l++) {
        char name[40];
        snprintf(name, sizeof name, "encode_%s", kern_isa_name(all[l].isa));
        print_runs(name, rate[l], 9);
    }
    free(x);
    free(codes);
    free(scales);
}

/* ---- the model ---- */

typedef struct source {
    ckpt files;
    model_config config;
    plan p;
    uint64_t bytes; /* of the tensors */
} source;

static void open_source(source *s) {
    err e = { 0 };
    const recipe r = { .preset = RECIPE_NVFP4, .kv = KV_NONE, .mtp = MTP_NVFP4 };
    if (!ckpt_open(&s->files, opt.model, &e) ||
        !config_read(&s->config, s->files.config, s->files.generation, opt.model, &e) ||
        !plan_make(&s->p, &s->files, &s->config, &r, 10000000000u, &e))
        die(e.id, e.msg);
    s->bytes = s->files.tensor_bytes;
}

static void pack_once(const source *s, rates *out, int run) {
    err e = { 0 };
    quantize_result r;
    char *none;
    const quantize_options o = { .threads = opt.threads, .isa = ISA_COUNT, .ranks = 1, .discard = true };
    const double t = clock_seconds(), cpu = cpu_seconds(RUSAGE_SELF);
    if (!quantize_shards(&r, &none, &s->p, "", &o, &e)) die(e.id, e.msg);
    quantize_result_free(&r);
    note(out, run, s->bytes, clock_seconds() - t, cpu_seconds(RUSAGE_SELF) - cpu);
}

static void touch_or_drop(const source *s, bool drop) {
    char *piece = xmalloc(PIECE);
    for (int i = 0; i < s->files.shard_count; i++) {
        const int fd = open(s->files.shards[i].path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) die("open", s->files.shards[i].path);
        if (drop)
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        else
            while (read(fd, piece, PIECE) > 0) {
            }
        close(fd);
    }
    free(piece);
}

/* ---- copying as many bytes ---- */

typedef struct copy {
    const source *s;
    int *in, *out;
    atomic_ullong next;
    double share; /* bytes out per byte in */
    bool behind;  /* take what was written out of the page cache, as the command does */
} copy;

static void *copy_thread(void *ctx) {
    copy *c = ctx;
    const source *s = c->s;
    char *piece = xmalloc(PIECE);
    write_behind b = { 0 };
    err e = { 0 };
    bool lost = false;
    for (;;) {
        uint64_t at = atomic_fetch_add(&c->next, PIECE);
        int i = 0;
        for (; i < s->files.shard_count && at >= s->files.shards[i].map.size;)
            at -= (s->files.shards[i++].map.size + PIECE - 1) / PIECE * PIECE;
        if (i == s->files.shard_count) break;
        const ssize_t n = pread(c->in[i], piece, PIECE, (off_t)at);
        const size_t put = n > 0 ? (size_t)((double)n * c->share) : 0;
        if (n <= 0 || pwrite(c->out[i], piece, put, (off_t)((double)at * c->share)) != (ssize_t)put)
            die("copy", opt.work);
        if (c->behind && !write_started(&b, c->out[i], (uint64_t)((double)at * c->share), put, STR("copy"), &lost, &e))
            die(e.id, e.msg);
    }
    free(piece);
    return NULL;
}

static void copy_once(const source *s, rates *result, int run, bool behind) {
    enum { FILES = 1024, THREADS = 256 };
    int in[FILES], out[FILES];
    char path[4200];
    pthread_t t[THREADS];
    copy c = { .s = s, .in = in, .out = out, .share = (double)s->p.total_bytes / (double)s->bytes, .behind = behind };
    if (s->files.shard_count > FILES || opt.threads > THREADS) die("copy", "too many files or threads");
    const double t0 = clock_seconds(), cpu = cpu_seconds(RUSAGE_SELF);
    for (int i = 0; i < s->files.shard_count; i++) {
        snprintf(path, sizeof path, "%s/bench.copy.%d", opt.work, i);
        in[i] = open(s->files.shards[i].path, O_RDONLY | O_CLOEXEC);
        out[i] = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (in[i] < 0 || out[i] < 0) die("open", path);
    }
    for (int i = 0; i < opt.threads; i++)
        if (pthread_create(&t[i], NULL, copy_thread, &c) != 0) die("thread", "cannot be started");
    for (int i = 0; i < opt.threads; i++) pthread_join(t[i], NULL);
    for (int i = 0; i < s->files.shard_count; i++) {
        if (fsync(out[i]) != 0) die("fsync", opt.work);
        close(in[i]);
        close(out[i]);
    }
    note(result, run, s->bytes, clock_seconds() - t0, cpu_seconds(RUSAGE_SELF) - cpu);
    for (int i = 0; i < s->files.shard_count; i++) {
        snprintf(path, sizeof path, "%s/bench.copy.%d", opt.work, i);
        unlink(path);
    }
}

/* ---- the command ---- */

static int run_program(char *const argv[]) {
    int status;
    const pid_t pid = fork();
    if (pid == 0) {
        const int null = open("/dev/null", O_WRONLY);
        if (null >= 0) dup2(null, 1);
        execvp(argv[0], argv);
        _exit(127);
    }
    if (pid < 0 || waitpid(pid, &status, 0) < 0 || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status);
}

static void command_once(const source *s, rates *out, int run) {
    char dst[4200], threads[20], program[4200], model[4200];
    snprintf(dst, sizeof dst, "%s/bench.out", opt.work);
    snprintf(threads, sizeof threads, "%d", opt.threads);
    snprintf(program, sizeof program, "%s", opt.program);
    snprintf(model, sizeof model, "%s", opt.model);
    char *const argv[] = { program,
                           (char[]){ "quantize" },
                           model,
                           (char[]){ "-o" },
                           dst,
                           (char[]){ "--no-calib" },
                           (char[]){ "-q" },
                           (char[]){ "-t" },
                           threads,
                           NULL };
    char *const clean[] = { (char[]){ "rm" }, (char[]){ "-rf" }, dst, NULL };
    const double t0 = clock_seconds(), cpu = cpu_seconds(RUSAGE_CHILDREN);
    if (run_program(argv) != 0) die(opt.program, "failed (its own line says why)");
    note(out, run, s->bytes, clock_seconds() - t0, cpu_seconds(RUSAGE_CHILDREN) - cpu);
    if (run_program(clean) != 0) die("rm", dst);
}

static void bench_whole(const source *s) {
    static rates command, plain, behind;
    double ratio[MAX_RUNS], ratio_behind[MAX_RUNS];
    for (int r = 0; r < opt.runs; r++) {
        for (int k = 0; k < 3; k++) { /* whichever is first takes turns */
            touch_or_drop(s, opt.cold);
            sync();
            const int who = (k + r) % 3;
            if (who == 0)
                command_once(s, &command, r);
            else
                copy_once(s, who == 1 ? &plain : &behind, r, who == 2);
        }
        ratio[r] = command.wall[r] / plain.wall[r];
        ratio_behind[r] = command.wall[r] / behind.wall[r];
    }
    print_rates("copy", &plain);
    print_rates("behind", &behind);
    print_rates("command", &command);
    print_runs("command_of_copy", ratio, opt.runs);
    print_runs("command_of_behind", ratio_behind, opt.runs);
}

static bool parse(int argc, char **argv) {
    const char *pos[2] = { 0 };
    int n = 0;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *next = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(a, "--cold") == 0)
            opt.cold = true;
        else if (strcmp(a, "--parts") == 0)
            opt.parts = true;
        else if (strcmp(a, "--program") == 0)
            opt.program = next, i++;
        else if (strcmp(a, "--threads") == 0)
            opt.threads = atoi(next), i++;
        else if (strcmp(a, "--runs") == 0)
            opt.runs = atoi(next), i++;
        else if (a[0] == '-' || n == 2)
            return false;
        else
            pos[n++] = a;
    }
    opt.model = pos[0];
    opt.work = pos[1];
    return n == 2 && opt.threads >= 1 && opt.threads <= 256 && opt.runs >= 1 && opt.runs <= MAX_RUNS;
}

int main(int argc, char **argv) {
    static source s;
    static rates pack;
    if (!parse(argc, argv)) {
        fprintf(stderr, "usage: bench_quantize MODEL_DIR WORK_DIR [--program FILE] [--threads N] [--runs N] [--cold] "
                        "[--parts]\n");
        return 2;
    }
    log_set_level(0);
    open_source(&s);
    printf("{\"schema\":\"nibble.bench_quantize/1\",\"threads\":%d,\"runs\":%d,\"cold\":%s,\"source_bytes\":%llu,"
           "\"export_bytes\":%llu",
           opt.threads, opt.runs, opt.cold ? "true" : "false", (unsigned long long)s.bytes,
           (unsigned long long)s.p.total_bytes);
    bench_encode();
    touch_or_drop(&s, false);
    for (int r = 0; r < opt.runs; r++) pack_once(&s, &pack, r);
    const double median = print_rates("pack", &pack);
    printf(",\n \"pack_of_modelopt\":%.1f", median / MODELOPT);
    if (!opt.parts) bench_whole(&s);
    printf("}\n");
    plan_free(&s.p);
    ckpt_close(&s.files);
    return 0;
}
