/* A step of the loop that only goes on takes no memory and gives none back: every call of malloc's family by any thread of the
 * process is counted between two steps, with a batch of greedy, sampled, penalized, ruled and watched choices, with drafts, with
 * a prefix cache, with each kind of head. Where a sanitizer owns malloc, what the library counts of itself must do. */
#include <stdatomic.h>

#include "base/rng.h"

#include "export.h"
#include "lib/scratch.h"

enum { N = 6, CTX = 512, WARM = 60, STEPS = 24 };

static atomic_bool counting;
static atomic_int calls;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { WATCHED = 0 };
#else
enum { WATCHED = 1 };

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t alignment, size_t n);
extern void __libc_free(void *p);

static void noted(void) {
    if (atomic_load_explicit(&counting, memory_order_relaxed)) atomic_fetch_add(&calls, 1);
}

void *malloc(size_t n) { return noted(), __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return noted(), __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return noted(), __libc_realloc(p, n); }
void *aligned_alloc(size_t alignment, size_t n) { return noted(), __libc_memalign(alignment, n); }
void *memalign(size_t alignment, size_t n) { return noted(), __libc_memalign(alignment, n); }
int posix_memalign(void **out, size_t alignment, size_t n) {
    noted();
    return (*out = __libc_memalign(alignment, n)) ? 0 : 12;
}
void free(void *p) {
    if (p) noted();
    __libc_free(p);
}
#endif

/* Half of the ids, another half at every position: drafts are replaced, masks made for every row. */
static bool half_mask(void *ctx, int choice, const int32_t *ahead, int n, uint64_t *allowed, err *e) {
    const int vocab = *(const int *)ctx;
    (void)e;
    const uint64_t odd = 0x5555555555555555u << ((choice + n + (n > 0 ? ahead[n - 1] : 0)) & 1);
    for (size_t i = 0; i < rule_words(vocab); i++) allowed[i] = odd;
    if (vocab % 64) allowed[vocab / 64] &= ((uint64_t)1 << vocab % 64) - 1;
    return true;
}

static bool on_token(void *ctx, int choice, int32_t id, double p, const int32_t *top, const double *values) {
    (void)choice, (void)id, (void)p, (void)top, (void)values;
    ++*(int *)ctx;
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    (void)ctx, (void)choice, (void)r;
    if (e->id && strcmp(e->id, "E-ENGINE-NONFINITE") == 0) fail_msg("%s", e->msg);
}

static void submit_all(loop *l, engine *g, int *tokens, int *vocab) {
    static const sampler_bias bias[] = { { 17, 2 }, { 300, -100 } };
    static const sampler_params kinds[] = {
        { .temperature = 0 },
        { .temperature = 1, .top_p = 0.95, .seed = 1 },
        { .temperature = 0.7, .top_k = 20, .top_p = 0.9, .seed = 2 },
        { .presence = 1, .frequency = 0.5, .repetition = 1.1 },
        { .temperature = 1, .top_k = 40, .top_p = 1, .repetition = 1.2, .bias = bias, .n_bias = 2, .seed = 3 },
        { .temperature = 1, .top_p = 1, .min_p = 0.05, .seed = 4 },
    };
    int32_t prompt[8];
    *vocab = g->n.real_vocab;
    for (int i = 0; i < N; i++) {
        err e = { 0 };
        for (int k = 0; k < 8; k++) prompt[k] = (int32_t)(rng_uniform(7, 1, (uint64_t)(i * 8 + k), 0) * 1500);
        loop_request q = { .prompt = prompt,
                           .n_prompt = 8,
                           .sampling = kinds[i % (int)ARRAY_LEN(kinds)],
                           .depth = -1,
                           .logprobs = i % 4 == 3 ? 5 : 0,
                           .on_token = on_token,
                           .on_done = on_done,
                           .ctx = tokens };
        if (i % 3 == 2) q.rule = (token_rule){ half_mask, NULL, vocab };
        OK(loop_submit(l, NULL, &q, &e));
    }
}

static void one_engine(const char *dir, engine_options o, int depth) {
    err e = { 0 };
    engine *g;
    loop *l;
    int tokens = 0, vocab;
    o.ctx = CTX, o.slots = N, o.no_text = true, o.ops.isa = ISA_COUNT;
    OK(engine_open(&g, dir, &o, &e));
    OK(loop_open(&l, g, &(loop_options){ .depth = depth, .fixed_depth = true }, &e));
    submit_all(l, g, &tokens, &vocab);
    for (int i = 0; i < WARM; i++) assert_true(loop_step(l));
    const int before = tokens;
    const int64_t blocks = alloc_count();
    atomic_store(&calls, 0);
    atomic_store(&counting, true);
    bool busy = true;
    for (int i = 0; i < STEPS; i++) busy = loop_step(l) && busy;
    atomic_store(&counting, false);
    assert_true(busy);
    assert_true(tokens - before >= N * STEPS);
    assert_int_equal(loop_counted(l).running, N);
    if (atomic_load(&calls) > 0) fail_msg("%s, depth %d: %d calls of malloc's family", dir, depth, atomic_load(&calls));
    assert_int_equal(alloc_count() - blocks, 0);
    loop_close(l);
    engine_close(g);
}

static void test_the_watch_works(void **state) {
    (void)state;
    atomic_store(&calls, 0);
    atomic_store(&counting, true);
    void *volatile p = malloc(100);
    p = realloc(p, 200);
    free(p);
    atomic_store(&counting, false);
    assert_int_equal(atomic_load(&calls), 3 * WATCHED);
}

static char *folder, *nvfp4;

static void test_bf16(void **state) {
    (void)state;
    if (!is_short()) one_engine(TINY, (engine_options){ .ops = { .threads = 1 } }, 0);
    if (!is_short()) one_engine(TINY, (engine_options){ .ops = { .threads = 2 } }, 2);
    one_engine(TINY, (engine_options){ .heads = { .mode = HEAD_SCREENED, .draft_rows = 600 }, .ops = { .threads = 2 } },
               3);
}

static void test_nvfp4(void **state) {
    (void)state;
    static const act_mode acts[] = { ACT_FP4, ACT_INT8, ACT_BF16 };
    for (int i = 0; i < (is_short() ? 1 : 3); i++)
        one_engine(nvfp4,
                   (engine_options){
                       .act = acts[i], .heads = { .mode = HEAD_SCREENED, .draft_rows = 600 }, .ops = { .threads = 2 } },
                   2);
}

static void test_prefix_cache(void **state) {
    (void)state;
    one_engine(TINY,
               (engine_options){ .prefix_kv_bytes = 1 << 22, .prefix_state_bytes = 1 << 22, .ops = { .threads = 1 } },
               2);
}

static int setup(void **state) {
    (void)state;
    log_set_level(0);
    folder = scratch_new();
    nvfp4 = scratch_path(folder, "nvfp4");
    export_tiny(nvfp4);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    free(nvfp4);
    scratch_free(folder);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_the_watch_works), cmocka_unit_test(test_bf16),
                                        cmocka_unit_test(test_nvfp4), cmocka_unit_test(test_prefix_cache) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
