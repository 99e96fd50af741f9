#include "base/pool.h" /* before cmocka.h, which defines a macro `fail` */

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"

enum { MAX = 70 };

static pool *open_pool(int threads) {
    err e = { 0 };
    pool *p = NULL;
    if (!pool_new(&p, threads, &e)) fail_msg("%s: %s", e.id, e.msg);
    assert_int_equal(pool_threads(p), threads);
    return p;
}

typedef struct job {
    pool *p;
    int calls[MAX]; /* plain ints on purpose: the pool must order them */
    int in[MAX], out[MAX];
    int rounds, threads;
} job;

static void count_me(void *ctx, int thread, int threads) {
    job *j = ctx;
    CHECK(threads == j->threads, "%d threads", threads);
    j->calls[thread]++;
}

static void every_thread_runs_once(void **state) {
    (void)state;
    static const int sizes[] = { 1, 2, 3, 5, 64 };
    for (size_t s = 0; s < ARRAY_LEN(sizes); s++) {
        pool *p = open_pool(sizes[s]);
        job j = { .p = p, .threads = sizes[s] };
        for (int run = 1; run <= 200; run++) {
            pool_run(p, count_me, &j);
            for (int t = 0; t < sizes[s]; t++) assert_int_equal(j.calls[t], run);
        }
        pool_free(p);
    }
}

/* Each round a thread reads what its left neighbour wrote in the round before. */
static void pass_on(void *ctx, int thread, int threads) {
    job *j = ctx;
    const int left = (thread + threads - 1) % threads;
    for (int r = 0; r < j->rounds; r++) {
        j->out[thread] = j->in[left] + 1;
        pool_barrier(j->p);
        j->in[thread] = j->out[thread];
        pool_barrier(j->p);
    }
}

static void barrier_orders_writes(void **state) {
    (void)state;
    static const int sizes[] = { 1, 2, 3, 7, 33 };
    for (size_t s = 0; s < ARRAY_LEN(sizes); s++) {
        const int n = sizes[s];
        pool *p = open_pool(n);
        job j = { .p = p, .rounds = 50 };
        for (int t = 0; t < n; t++) j.in[t] = 1000 * t;
        for (int run = 1; run <= 4; run++) {
            pool_run(p, pass_on, &j);
            for (int t = 0; t < n; t++)
                assert_int_equal(j.in[t], 1000 * (((t - run * j.rounds) % n + n) % n) + run * j.rounds);
        }
        pool_free(p);
    }
}

static void workers_wake_from_sleep(void **state) {
    (void)state;
    pool *p = open_pool(3);
    job j = { .p = p, .threads = 3 };
    for (int run = 1; run <= 20; run++) {
        usleep(2000); /* far beyond the spin */
        pool_run(p, count_me, &j);
        for (int t = 0; t < 3; t++) assert_int_equal(j.calls[t], run);
    }
    pool_free(p);
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void idle_pool_burns_nothing(void **state) {
    (void)state;
    pool *p = open_pool(4);
    job j = { .p = p, .threads = 4 };
    pool_run(p, count_me, &j);
    const double before = cpu_seconds();
    usleep(300000);
    assert_true(cpu_seconds() - before < 0.1); /* three spinning workers would show 0.3 and more */
    pool_free(p);
}

static void many_threads_on_few_cpus_do_not_crawl(void **state) {
    (void)state;
    pool *p = open_pool(64);
    job j = { .p = p, .rounds = 10 };
    const double start = clock_seconds();
    for (int run = 0; run < 10; run++) pool_run(p, pass_on, &j); /* 200 barriers of 64 threads */
    const double took = clock_seconds() - start;
    pool_free(p);
    print_message("64 threads, 200 barriers: %.1f ms\n", 1e3 * took);
    assert_true(took < 10); /* with spinning waiters, minutes */
}

static void start_and_stop_without_runs(void **state) {
    (void)state;
    for (int i = 0; i < 50; i++) pool_free(open_pool(i % 5 + 1));
    pool_free(NULL);
}

static void too_many_threads_is_an_error(void **state) {
    (void)state;
    err e = { 0 };
    pool *p = (pool *)&e;
    assert_false(pool_new(&p, 1 << 20, &e));
    assert_null(p);
    assert_int_equal(e.kind, ERR_MACHINE);
    assert_string_equal(e.id, "E-MACHINE-THREADS");
}

static void cpus_follow_the_affinity_mask(void **state) {
    (void)state;
    cpu_set_t old, one;
    assert_int_equal(sched_getaffinity(0, sizeof old, &old), 0);
    assert_in_range(pool_cpus(), 1, CPU_COUNT(&old));
    CPU_ZERO(&one);
    for (int c = 0; c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &old)) {
            CPU_SET(c, &one);
            break;
        }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(pool_cpus(), 1);
    err e = { 0 };
    pool *p;
    assert_true(pool_new(&p, 0, &e));
    assert_int_equal(pool_threads(p), 1);
    pool_free(p);
    assert_int_equal(sched_setaffinity(0, sizeof old, &old), 0);
}

static void shares_cover_everything_once(void **state) {
    (void)state;
    for (int64_t n = 0; n < 200; n += 7)
        for (int64_t grain = 1; grain <= 16; grain *= 4)
            for (int threads = 1; threads <= 9; threads++) {
                int64_t at = 0, b, t;
                for (int i = 0; i < threads; i++) {
                    pool_share(n, grain, i, threads, &b, &t);
                    assert_int_equal(b, at);
                    assert_true(t >= b && (b % grain == 0 || b == n));
                    at = t;
                }
                assert_int_equal(at, n);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_thread_runs_once),
        cmocka_unit_test(barrier_orders_writes),
        cmocka_unit_test(workers_wake_from_sleep),
        cmocka_unit_test(idle_pool_burns_nothing),
        cmocka_unit_test(many_threads_on_few_cpus_do_not_crawl),
        cmocka_unit_test(start_and_stop_without_runs),
        cmocka_unit_test(too_many_threads_is_an_error),
        cmocka_unit_test(cpus_follow_the_affinity_mask),
        cmocka_unit_test(shares_cover_everything_once),
    };
    return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}
