/* A loop with a thread of its own under everything that happens to one, for as long as wanted: random requests of every kind from
 * another thread, some cancelled, late, abandoned or poisoned; engines of random settings with memory so short that choices are
 * preempted and entries of the prefix cache go, come back from a folder, and are damaged there; loops that are stopped, started
 * and closed in the middle. Every answer is compared, token by token, with the same request alone.
 *
 * usage: test_soak [--seconds N] [--seed S]        without options: a few seconds, as a test
 * Says every ten seconds how far it is; the last line is the verdict, the exit status 1 when an answer differed or memory grew. */
#include <dirent.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "lib/jobs.h"

#include "export.h"
#include "lib/scratch.h"

enum { CTX = 192, JOBS = 14, FLYING = 24, BAD = 1600 }; /* BAD: an embedding row that no token has */

typedef struct soak {
    rnd r;
    uint64_t seed;
    double begun, until, said;
    const char *dir[2]; /* the tiny model and its export */
    char *cache;
    engine *alone[2][4]; /* by kind of activations */
    job_world w;
    job jobs[2][4][JOBS];
    int made[2][4];
    job bad;
    /* of the engine at hand */
    int model, act;
    engine *g;
    loop *l;
    /* shared with the loop's thread */
    pthread_mutex_t lock;
    pthread_cond_t some_over;
    job_run *over[FLYING];
    int n_over, flying;
    job_run *runs[FLYING];
    /* what happened */
    int64_t engines, requests, tokens, whole, cancelled, late, poisoned, preempted, accepted, hits, evicted, loaded,
        rules;
    int64_t rss_early, rss_late;
    char failure[600];
} soak;

static void on_over(job_run *run) {
    soak *s = run->user;
    pthread_mutex_lock(&s->lock);
    s->over[s->n_over++] = run;
    pthread_cond_signal(&s->some_over);
    pthread_mutex_unlock(&s->lock);
}

/* ---- answers ---- */

static void judge(soak *s, job_run *run) {
    const job *j = run->j;
    for (int c = 0; c < j->choices; c++) {
        s->tokens += run->got[c].n;
        s->cancelled += run->got[c].finish == GEN_CANCEL;
        s->late += run->got[c].finish == GEN_DEADLINE;
        s->whole += run->got[c].finish != GEN_CANCEL && run->got[c].finish != GEN_DEADLINE;
    }
    s->requests++;
    s->rules += j->rule != JOB_FREE;
    if (j == &s->bad) {
        for (int c = 0; c < j->choices; c++) {
            const bool failed = run->fault[c].id && strcmp(run->fault[c].id, "E-ENGINE-NONFINITE") == 0;
            s->poisoned += failed;
            if (run->got[c].n > 0 || (run->fault[c].id && !failed))
                snprintf(s->failure, sizeof s->failure, "a poisoned request: %d tokens, %s", run->got[c].n,
                         run->fault[c].id ? run->fault[c].id : "no error");
        }
    } else {
        const char *why = job_differs(run);
        if (why)
            snprintf(s->failure, sizeof s->failure, "seed %llu, engine %lld, model %d, act %d, job %d: %s",
                     (unsigned long long)s->seed, (long long)s->engines, s->model, s->act,
                     (int)(j - s->jobs[s->model][s->act]), why);
    }
    job_run_free(run);
    free(run);
}

/* Judge what is over; wait until at most `most` fly. */
static void land(soak *s, int most) {
    for (;;) {
        job_run *done[FLYING];
        pthread_mutex_lock(&s->lock);
        while (s->n_over == 0 && s->flying > most) pthread_cond_wait(&s->some_over, &s->lock);
        const int n = s->n_over;
        memcpy(done, s->over, (size_t)n * sizeof done[0]);
        s->n_over = 0;
        s->flying -= n;
        const int left = s->flying;
        pthread_mutex_unlock(&s->lock);
        for (int i = 0; i < n; i++) {
            for (int k = 0; k < FLYING; k++)
                if (s->runs[k] == done[i]) s->runs[k] = NULL;
            judge(s, done[i]);
        }
        if (left <= most) return;
    }
}

/* ---- requests ---- */

static void launch(soak *s) {
    rnd *r = &s->r;
    err e = { 0 };
    int at = 0;
    while (s->runs[at]) at++;
    job_run *run = xcalloc(1, sizeof *run);
    const job *j = rnd_below(r, 40) == 0 ? &s->bad : &s->jobs[s->model][s->act][rnd_below(r, JOBS)];
    const job_submit how = { .depth = rnd_below(r, 3) ? -1 : (int)rnd_below(r, 6),
                             .priority = (int)rnd_below(r, 3),
                             .deadline_seconds = rnd_below(r, 8) ? 0 : clock_seconds() + 0.001 * rnd_below(r, 400) };
    run->on_over = on_over;
    run->user = s;
    if (rnd_below(r, 6) == 0) run->leave_after = 1 + (int)rnd_below(r, 30);
    pthread_mutex_lock(&s->lock);
    s->flying++;
    s->runs[at] = run;
    pthread_mutex_unlock(&s->lock);
    if (job_start(run, s->l, s->g, j, &s->w, &how, &e)) return;
    snprintf(s->failure, sizeof s->failure, "refused: %s: %.300s", e.id, e.msg);
    s->flying--;
    s->runs[at] = NULL;
    job_run_free(run);
    free(run);
}

/* `handle` is written by loop_submit on this thread before anything is cancelled. */
static void cancel_one(soak *s) {
    const job_run *run = s->runs[rnd_below(&s->r, FLYING)];
    if (run) loop_cancel(s->l, run->handle);
}

/* ---- engines ---- */

static int64_t rss_bytes(void) {
    long pages = 0, all = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f) return 0;
    if (fscanf(f, "%ld %ld", &all, &pages) != 2) pages = 0;
    fclose(f);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

static void poison(const engine *g, int32_t id) {
    const size_t row = (size_t)g->config.hidden * 2;
    const uintptr_t at = (uintptr_t)g->w.embed.data + (size_t)id * row, page = (uintptr_t)sysconf(_SC_PAGESIZE),
                    first = at / page * page;
    CHECK(mprotect((void *)first, at + row - first, PROT_READ | PROT_WRITE) == 0, "the embedding cannot be changed");
    for (size_t i = 0; i < row / 2; i++) ((uint16_t *)at)[i] = 0x7fc0;
}

static const act_mode acts[] = { ACT_AUTO, ACT_FP4, ACT_INT8, ACT_BF16 };

static bool open_alone(soak *s, err *e) {
    engine **g = &s->alone[s->model][s->act];
    const engine_options o = { .ctx = CTX,
                               .act = acts[s->act],
                               .kv = s->act == 3 ? KV_CACHE_BF16 : KV_CACHE_AUTO,
                               .ops = { .threads = 1, .isa = ISA_COUNT } };
    if (!*g && !engine_open(g, s->dir[s->model], &o, e)) return false;
    if (!s->w.words && !jobs_open(&s->w, *g, false, e)) return false;
    /* All at first, then two others. */
    int *made = &s->made[s->model][s->act];
    job *all = s->jobs[s->model][s->act];
    if (*made == JOBS) {
        *made -= 2;
        for (int i = 0; i < 2; i++) job_free(&all[i]);
        memmove(all, all + 2, (size_t)*made * sizeof all[0]);
    }
    for (; *made < JOBS; ++*made)
        if (!job_make(all, *made, &s->w, *g, &s->r, e)) return false;
    return true;
}

static bool open_engine(soak *s, err *e) {
    rnd *r = &s->r;
    static const int chunks[] = { 1, 7, 32, 64, 256 }, slots[] = { 1, 2, 4, 8 }, threads[] = { 1, 2, 3 };
    const engine *one = s->alone[s->model][s->act];
    const int64_t page = state_page_bytes(&one->config, one->kv_type, one->n.has_mtp),
                  state = config_state_bytes(&one->config);
    const int entries = rnd_below(r, 5) ? 2 + (int)rnd_below(r, 8) : 0, heads = (int)rnd_below(r, 3);
    const engine_options o = { .ctx = CTX,
                               .slots = slots[rnd_below(r, ARRAY_LEN(slots))],
                               .chunk = chunks[rnd_below(r, ARRAY_LEN(chunks))],
                               .kv = s->act == 3 ? KV_CACHE_BF16 : KV_CACHE_AUTO,
                               .act = acts[s->act],
                               .kv_bytes = rnd_below(r, 3) ? (4 + rnd_below(r, 4)) * page : 0,
                               .prefix_kv_bytes = entries * page,
                               .prefix_state_bytes = entries * state,
                               .heads = { .mode = heads > 0 ? HEAD_SCREENED : HEAD_FULL,
                                          .draft_rows = heads > 1 ? 500 : DRAFT_HEAD_FULL },
                               .ops = { .threads = threads[rnd_below(r, ARRAY_LEN(threads))], .isa = ISA_COUNT } };
    const loop_options lo = { .budget_rows = rnd_below(r, 2) ? 0 : 1 + (int)rnd_below(r, 60),
                              .depth = (int)rnd_below(r, 6),
                              .fixed_depth = rnd_below(r, 2),
                              .prefix_every = 16 + (int)rnd_below(r, 100),
                              .prefix_dir = rnd_below(r, 3) ? s->cache : NULL,
                              .prefix_dir_bytes = 100000 + (int64_t)rnd_below(r, 3000000) };
    s->engines++;
    if (!engine_open(&s->g, s->dir[s->model], &o, e)) return false;
    poison(s->g, BAD);
    return loop_open(&s->l, s->g, &lo, e) && loop_start(s->l, e);
}

static void count(soak *s) {
    const loop_stats c = loop_counted(s->l);
    s->preempted += c.preempted, s->accepted += c.accepted;
    s->hits += c.prefix_hits, s->evicted += c.prefix_evicted, s->loaded += c.prefix_loaded;
}

/* A byte of one file in the folder changes. */
static void damage(soak *s) {
    DIR *d = opendir(s->cache);
    char *path = NULL;
    uint32_t n = 0;
    for (struct dirent *x; d && (x = readdir(d));) {
        if (x->d_name[0] == '.' || rnd_below(&s->r, ++n) != 0) continue;
        free(path);
        path = path_join(s->cache, x->d_name);
    }
    if (d) closedir(d);
    struct stat st;
    FILE *f = path && stat(path, &st) == 0 && st.st_size > 0 ? fopen(path, "r+b") : NULL;
    if (f) {
        const long at = (long)rnd_below(&s->r, (uint32_t)st.st_size);
        fseek(f, at, SEEK_SET);
        const int c = fgetc(f);
        fseek(f, at, SEEK_SET);
        fputc(c ^ 1 << rnd_below(&s->r, 8), f);
        fclose(f);
    }
    free(path);
}

static bool loop_again(soak *s, err *e) {
    loop_stop(s->l);
    return loop_start(s->l, e);
}

static bool one_engine(soak *s, double seconds, err *e) {
    rnd *r = &s->r;
    s->model = (int)rnd_below(r, 2);
    s->act = s->model ? (int)rnd_below(r, 4) : 3 * (int)rnd_below(r, 2);
    if (!open_alone(s, e) || !open_engine(s, e)) return false;
    const double end = clock_seconds() + seconds;
    const int crowd = 1 + (int)rnd_below(r, FLYING);
    while (clock_seconds() < end && !s->failure[0]) {
        land(s, crowd - 1);
        launch(s);
        if (rnd_below(r, 8) == 0) cancel_one(s);
        if (rnd_below(r, 6) == 0) usleep(rnd_below(r, 4000));
        if (rnd_below(r, 60) == 0 && !loop_again(s, e)) return false;
        (void)loop_counted(s->l);
    }
    if (rnd_below(r, 2)) land(s, 0);
    loop_stop(s->l);
    count(s);
    loop_close(s->l); /* ends what still flies */
    s->l = NULL;
    land(s, 0);
    if (s->g->st.pages.n_unused != s->g->st.pages.pages)
        snprintf(s->failure, sizeof s->failure, "seed %llu, engine %lld: %d of %d pages came back",
                 (unsigned long long)s->seed, (long long)s->engines, s->g->st.pages.n_unused, s->g->st.pages.pages);
    engine_close(s->g);
    s->g = NULL;
    if (rnd_below(r, 2)) damage(s);
    return true;
}

/* ---- the whole ---- */

static void say(soak *s, const char *verdict) {
    printf("soak: %s%.0f s, %lld engines, %lld requests (%lld ruled), %lld tokens; choices: %lld whole, %lld "
           "cancelled, %lld late, "
           "%lld poisoned, %lld preempted; %lld drafts accepted; cache: %lld taken up, %lld evicted, %lld from files; "
           "RSS %lld MB\n",
           verdict, clock_seconds() - s->begun, (long long)s->engines, (long long)s->requests, (long long)s->rules,
           (long long)s->tokens, (long long)s->whole, (long long)s->cancelled, (long long)s->late,
           (long long)s->poisoned, (long long)s->preempted, (long long)s->accepted, (long long)s->hits,
           (long long)s->evicted, (long long)s->loaded, (long long)(rss_bytes() >> 20));
    fflush(stdout);
}

static void watch_memory(soak *s) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)s; /* sanitizers hold back what is freed */
#else
    const int64_t now = rss_bytes();
    const double part = (clock_seconds() - s->begun) / (s->until - s->begun);
    if (part < 0.5 && now > s->rss_early) s->rss_early = now;
    if (part >= 0.5 && now > s->rss_late) s->rss_late = now;
#endif
}

static bool run(soak *s, double seconds) {
    err e = { 0 };
    s->begun = s->said = clock_seconds();
    s->until = s->begun + seconds;
    s->r = rnd_open(s->seed);
    s->bad = (job){ .n_prompt = 40, .max_tokens = 5, .choices = 2, .narrow = 2 };
    for (int i = 0; i < 40; i++) s->bad.prompt[i] = 100 + i;
    s->bad.prompt[25] = BAD;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->some_over, NULL);
    while (clock_seconds() < s->until && !s->failure[0]) {
        if (!one_engine(s, seconds < 60 ? 0.5 : 3, &e))
            snprintf(s->failure, sizeof s->failure, "%s: %.300s", e.id, e.msg);
        watch_memory(s);
        if (clock_seconds() - s->said >= 10) say(s, ""), s->said = clock_seconds();
    }
    for (int m = 0; m < 2; m++)
        for (int a = 0; a < 4; a++) {
            for (int i = 0; i < JOBS; i++) job_free(&s->jobs[m][a][i]);
            if (s->alone[m][a]) engine_close(s->alone[m][a]);
        }
    jobs_close(&s->w);
    pthread_cond_destroy(&s->some_over);
    pthread_mutex_destroy(&s->lock);
    if (!s->failure[0] && seconds >= 60 && s->rss_late > s->rss_early + s->rss_early / 4 + (16 << 20))
        snprintf(s->failure, sizeof s->failure, "memory grew from %lld to %lld MB", (long long)(s->rss_early >> 20),
                 (long long)(s->rss_late >> 20));
    if (s->failure[0]) printf("soak: %s\n", s->failure);
    say(s, s->failure[0] ? "FAILED: " : "passed: ");
    return !s->failure[0];
}

static void quiet(void *ctx, const char *id, const char *line) { (void)ctx, (void)id, (void)line; }

static soak all;
static char *folder, *export_dir;

static int setup(void **state) {
    (void)state;
    log_set_level(0);
    log_set_sink(quiet, NULL); /* files of the cache that are damaged */
    folder = scratch_new();
    export_dir = scratch_path(folder, "nvfp4");
    all.cache = scratch_path(folder, "cache");
    export_tiny(export_dir);
    all.dir[0] = TINY;
    all.dir[1] = export_dir;
    return 0;
}

static int teardown(void **state) {
    (void)state;
    free(export_dir);
    free(all.cache);
    scratch_free(folder);
    return 0;
}

static double seconds = 5;

static void test_soak(void **state) {
    (void)state;
    if (!run(&all, is_short() ? 2 : seconds)) fail_msg("%s", all.failure);
    assert_true(all.whole > 0);
}

int main(int argc, char **argv) {
    const char *given = getenv("SEED");
    all.seed = given ? strtoull(given, NULL, 0) : 20261202;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seconds") == 0) seconds = atof(argv[i + 1]);
        if (strcmp(argv[i], "--seed") == 0) all.seed = strtoull(argv[i + 1], NULL, 0);
    }
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_soak) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
