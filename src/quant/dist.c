#include "quant/dist.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "quant/dist_mpi.h"

enum { TOKEN_BYTES = 32 };
static const double SHARED_WAIT = 3;  /* seconds: attribute caches of network filesystems lag behind */
static const double SILENT_WAIT = 10; /* seconds: for the speaking rank to end the job */

static const char *const marks[] = { "PMIX_RANK", "PMI_RANK" };

/* How many processes the launcher says it started: 0 when none is seen, -1 when it gives no number. */
static int launched(void) {
    static const char *const sizes[] = { "OMPI_COMM_WORLD_SIZE", "PMI_SIZE" };
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        const char *s = getenv(sizes[i]);
        if (s && atoi(s) > 0) return atoi(s);
    }
    for (size_t i = 0; i < ARRAY_LEN(marks); i++)
        if (getenv(marks[i])) return -1;
    return 0;
}

static void nap_ms(long ms) {
    const struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&t, NULL);
}

const char *dist_build(void) {
    const char *s = comm_version();
    return s ? s : "no MPI";
}

bool dist_open(dist *d, err *e) {
    const int n = launched();
    *d = (dist){ .ranks = 1, .speaker = -1 };
    if (n == 0 || n == 1) return true;
    if (!comm_version())
        return fail(
            e, ERR_USAGE, "E-DIST-BUILD",
            "started as one of several processes, but built without MPI (build with Open MPI installed, or start "
            "one process)");
    if (!comm_open(&d->rank, &d->ranks))
        return fail(e, ERR_MACHINE, "E-DIST-START", "MPI: cannot be initialized (try `mpirun -n 2 true`)");
    if (n > 0 && n != d->ranks)
        return fail(e, ERR_USAGE, "E-DIST-START",
                    "MPI: the launcher started %d processes, this one sees %d (use mpirun of %s)", n, d->ranks,
                    comm_version());
    d->on = true;
    d->heard = xcalloc((size_t)d->ranks, sizeof *d->heard);
    return true;
}

bool dist_alone(const char *command, err *e) {
    const int n = launched();
    bool alone = n <= 1;
    for (size_t i = 0; n < 0 && i < ARRAY_LEN(marks); i++) {
        const char *rank = getenv(marks[i]);
        if (rank && strcmp(rank, "0") != 0) alone = false;
    }
    return alone || fail(e, ERR_USAGE, "E-DIST-ALONE",
                         "%s: started as one of several processes, all of which would write the same files (start one "
                         "process)",
                         command);
}

static void release(dist *d) {
    free(d->heard);
    free(d->token);
    *d = (dist){ .ranks = 1, .speaker = -1 };
}

void dist_close(dist *d) {
    if (d->on) comm_close();
    release(d);
}

bool dist_agree(dist *d, bool ok, err *e) {
    int64_t first = ok ? d->ranks : d->rank;
    if (!d->on) return ok;
    comm_reduce(&first, 1, COMM_MIN_I64);
    if (first == d->ranks) return true;
    d->speaker = (int)first;
    return fail(e, ERR_MACHINE, "E-DIST-PEER", "rank %d failed (its own message says why)", d->speaker);
}

bool dist_same(dist *d, uint64_t hash, const char *what, err *e) {
    uint64_t first = hash;
    if (!d->on) return true;
    comm_bcast(&first, sizeof first);
    const bool ok =
        first == hash || fail(e, ERR_INPUT, "E-DIST-DIFFERS",
                              "%s: not the same as rank 0's (give every rank the same source and options)", what);
    return dist_agree(d, ok, e);
}

/* Rank 0's folder by its own path on another machine may be another folder, or none. */
static bool see_token(const dist *d, const char *content, const char *folder, err *e) {
    buf b = { 0 };
    bool same = false;
    for (const double end = clock_seconds() + SHARED_WAIT; !same; nap_ms(50)) {
        err trouble = { 0 };
        buf_clear(&b);
        same = file_read(&b, d->token, TOKEN_BYTES, &trouble) && b.n == TOKEN_BYTES &&
               memcmp(b.p, content, TOKEN_BYTES) == 0;
        if (same || clock_seconds() > end) break;
    }
    buf_free(&b);
    if (same) return true;
    return fail(e, ERR_INPUT, "E-DIST-SHARED",
                "%s: rank 0's folder of this name is not seen here (all ranks need one shared filesystem, and the same "
                "path to it)",
                folder);
}

bool dist_share(dist *d, const char *folder, bool ok, err *e) {
    char content[TOKEN_BYTES] = { 0 };
    if (!d->on) return ok;
    d->token = path_join(folder, ".token");
    if (ok && d->rank == 0)
        ok = (getrandom(content, sizeof content, 0) == (ssize_t)sizeof content ||
              fail(e, ERR_MACHINE, "E-DIST-START", "no random bytes from the kernel")) &&
             file_write_atomic(d->token, content, sizeof content, e);
    if (!dist_agree(d, ok, e)) return false;
    comm_bcast(content, sizeof content);
    return dist_agree(d, d->rank == 0 || see_token(d, content, folder, e), e);
}

void dist_unshare(dist *d) {
    if (!d->on) return;
    int64_t nothing = 0;
    comm_reduce(&nothing, 1, COMM_SUM_I64); /* nobody may need the token any more */
    if (d->rank == 0 && d->token) unlink(d->token);
    free(d->token);
    d->token = NULL;
    d->speaker = 0;
}

void dist_wait_turn(const dist *d, err_kind kind) {
    if (!d->on) return;
    /* Of several unlinks one succeeds; and it needs no room on a full disk. */
    const bool mine = d->speaker >= 0 ? d->speaker == d->rank : !d->token || unlink(d->token) == 0;
    if (mine) return;
    if (kind == ERR_INTERRUPTED) _exit(err_exit_code(kind)); /* by the launcher, which ends the job */
    signal(SIGTERM, SIG_DFL);                                /* what it sends next */
    for (const double end = clock_seconds() + SILENT_WAIT; clock_seconds() < end;) nap_ms(100);
}

void dist_abort(dist *d, int status) {
    if (!d->on) exit(status);
    comm_abort(status);
}

/* ---- what travels ---- */

static void put_table(buf *b, const amax_table *t) {
    for (int i = 0; i < t->n; i++) {
        const uint32_t n = (uint32_t)t->v[i].name.n;
        buf_add(b, &n, sizeof n);
        buf_str(b, t->v[i].name);
        buf_add(b, &t->v[i].value, sizeof t->v[i].value);
    }
}

static void take_table(amax_table *t, const buf *b) {
    uint32_t n;
    float v;
    for (size_t at = 0; at < b->n; at += n + sizeof v) {
        memcpy(&n, b->p + at, sizeof n);
        at += sizeof n;
        CHECK(n < 4096 && at + n + sizeof v <= b->n, "a name of %u bytes", n);
        memcpy(&v, b->p + at + n, sizeof v);
        amax_raise(t, (str){ b->p + at, n }, v);
    }
}

void dist_merge_amax(dist *d, amax_table *t) {
    buf mine = { 0 }, all = { 0 };
    if (!d->on) return;
    amax_table merged = { .source = t->source };
    put_table(&mine, t);
    comm_gather(&mine, &all);
    take_table(&merged, &all);
    buf_free(&mine);
    buf_free(&all);
    amax_free(t);
    *t = merged;
}

void dist_sum(dist *d, int64_t *v, size_t n) {
    if (d->on) comm_reduce(v, n, COMM_SUM_I64);
}

void dist_max(dist *d, double *v) {
    if (d->on) comm_reduce(v, 1, COMM_MAX_F64);
}

void dist_union(dist *d, void *p, size_t bytes) {
    if (d->on) comm_reduce(p, bytes, COMM_OR_U8);
}

uint64_t dist_progress(dist *d, uint64_t done) {
    const double now = clock_seconds();
    uint64_t sum = 0, v;
    int rank;
    if (!d->on) return done;
    if (d->rank > 0) {
        if (now - d->last_sent > 0.2) {
            d->last_sent = now;
            comm_send_counter(done);
        }
        return done;
    }
    while (comm_receive_counter(&rank, &v)) d->heard[rank] = v;
    d->heard[0] = done;
    for (int i = 0; i < d->ranks; i++) sum += d->heard[i];
    return sum;
}
