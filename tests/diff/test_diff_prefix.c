/* A prefix cache changes speed, not bytes: conversations that go on, branch and repeat, served together, with room for
 * everything, for little, and with so few pages that sequences are preempted; each request yields the tokens and
 * log-probabilities that it would get alone, and its drafts fare as without a cache. The seed is printed; SEED=n takes another. */
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/scratch.h"
#include "lib/toytok.h"
#include "support.h"

enum { CTX = 512, MOST_TURNS = 26, MOST_ANSWER = 40, VOCAB = 1544 };

static uint64_t seed;

typedef struct text {
    int32_t v[CTX + 1];
    int n;
} text;

/* A request, what it yields alone, and what the loop gave. */
typedef struct turn {
    text prompt;
    int marks[4], n_marks, max_tokens, leave_after, choices, depth, priority, logprobs;
    sampler_params sampling;
    text want[2], got[2];
    double want_p[2][MOST_ANSWER], got_p[2][MOST_ANSWER];
    gen_result alone[2], result[2];
    err fault;
    int ended;
} turn;

typedef struct sink {
    text *t;
    double *p;
    int leave_after;
} sink;

static bool collect(void *ctx, int32_t id, double p, const int32_t *top, const double *values) {
    (void)top, (void)values;
    const sink *s = ctx;
    s->p[s->t->n] = p;
    s->t->v[s->t->n++] = id;
    return s->leave_after == 0 || s->t->n < s->leave_after;
}

static void run_alone(engine *g, turn *t, int depth) {
    for (int c = 0; c < t->choices; c++) {
        err e = { 0 };
        session s;
        t->want[c].n = 0;
        sink to = { &t->want[c], t->want_p[c], t->leave_after };
        gen_options o = { .max_tokens = t->max_tokens,
                          .depth = depth,
                          .sampling = t->sampling,
                          .logprobs = t->logprobs,
                          .on_token = collect,
                          .ctx = &to };
        o.sampling.choice += (uint32_t)c;
        OK(session_open(&s, g, depth > 0, &e));
        OK(session_set(&s, t->prompt.v, t->prompt.n, &e));
        OK(session_generate(&s, &o, &t->alone[c], &e));
        session_close(&s);
    }
}

static bool on_token(void *ctx, int choice, int32_t id, double p, const int32_t *top, const double *values) {
    turn *t = ctx;
    sink to = { &t->got[choice], t->got_p[choice], t->leave_after };
    return collect(&to, id, p, top, values);
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    turn *t = ctx;
    t->result[choice] = *r;
    if (e->id) t->fault = *e;
    t->ended++;
}

static void submit(loop *l, turn *t) {
    err e = { 0 };
    t->ended = 0;
    memset(t->got, 0, sizeof t->got);
    const loop_request q = { .prompt = t->prompt.v,
                             .n_prompt = t->prompt.n,
                             .marks = t->marks,
                             .n_marks = t->n_marks,
                             .sampling = t->sampling,
                             .choices = t->choices,
                             .max_tokens = t->max_tokens,
                             .depth = t->depth,
                             .priority = t->priority,
                             .logprobs = t->logprobs,
                             .on_token = on_token,
                             .on_done = on_done,
                             .ctx = t };
    OK(loop_submit(l, NULL, &q, &e));
}

static void check(const turn *t, const char *what) {
    if (t->fault.id) fail_msg("%s: %s: %s", what, t->fault.id, t->fault.msg);
    assert_int_equal(t->ended, t->choices);
    for (int c = 0; c < t->choices; c++) {
        if (t->got[c].n != t->want[c].n ||
            memcmp(t->got[c].v, t->want[c].v, sizeof(int32_t) * (size_t)t->want[c].n) != 0)
            fail_msg("%s changed the tokens", what);
        if (memcmp(t->got_p[c], t->want_p[c], sizeof(double) * (size_t)t->want[c].n) != 0)
            fail_msg("%s changed log-probabilities", what);
        assert_in_range(t->result[c].cached_tokens, 0, t->prompt.n - 1);
    }
}

static void append_random(text *t, int n, rnd *r) {
    while (n-- > 0) t->v[t->n++] = (int32_t)rnd_below(r, VOCAB);
}

/* A new conversation, one that goes on behind an answer, one that leaves an earlier one somewhere, or a repetition. */
static void make_turn(turn *t, const turn *all, int n, rnd *r) {
    *t = (turn){ .max_tokens = 1 + (int)rnd_below(r, MOST_ANSWER - 1),
                 .choices = rnd_below(r, 5) == 0 ? 2 : 1,
                 .depth = (int)rnd_below(r, 5) - 1,
                 .priority = (int)rnd_below(r, 2),
                 .logprobs = rnd_below(r, 3) == 0 ? 2 : 0,
                 .sampling = { .seed = rnd_next(r), .temperature = rnd_below(r, 2) ? 0.8 : 0, .top_p = 1 } };
    if (rnd_below(r, 4) == 0) t->sampling.presence = 1;
    const turn *from = n > 0 && rnd_below(r, 5) > 0 ? &all[rnd_below(r, (uint32_t)n)] : NULL;
    if (!from) {
        append_random(&t->prompt, 1 + (int)rnd_below(r, 200), r);
    } else {
        t->prompt = from->prompt;
        const uint32_t kind = rnd_below(r, 4);
        if (kind == 0) t->prompt.n = 1 + (int)rnd_below(r, (uint32_t)t->prompt.n); /* part of it */
        for (int i = 0; kind >= 2 && i < from->want[0].n; i++) t->prompt.v[t->prompt.n++] = from->want[0].v[i];
        t->marks[t->n_marks++] = t->prompt.n;
        if (kind != 1) append_random(&t->prompt, (int)rnd_below(r, 40), r);
    }
    if (t->prompt.n > CTX - 2 * MOST_ANSWER) t->prompt.n = CTX - 2 * MOST_ANSWER;
    if (t->n_marks > 0 && t->marks[0] > t->prompt.n) t->n_marks = 0;
}

typedef struct scenario {
    const char *name;
    int slots, chunk, threads, depth, every;
    int states, pages, kv_pages; /* kv_pages 0: full contexts */
    kv_mode kv;
    bool together;   /* all arrive at once */
    const char *dir; /* NULL: entries that go are lost */
    int64_t dir_bytes;
} scenario;

static engine *open_scenario(const scenario *x) {
    engine *g = open_tiny((engine_options){ .ctx = 64, .no_text = true, .kv = x->kv, .ops = { .isa = ISA_COUNT } });
    const int64_t page = state_page_bytes(&g->config, g->kv_type, g->n.has_mtp), one = config_state_bytes(&g->config);
    engine_close(g);
    return open_tiny((engine_options){ .ctx = CTX,
                                       .slots = x->slots,
                                       .chunk = x->chunk,
                                       .no_text = true,
                                       .kv = x->kv,
                                       .kv_bytes = x->kv_pages * page,
                                       .prefix_kv_bytes = x->pages * page,
                                       .prefix_state_bytes = x->states * one,
                                       .ops = { .threads = x->threads, .isa = ISA_COUNT } });
}

static loop_stats run_scenario(const scenario *x, turn *all, int n, rnd *r) {
    err e = { 0 };
    loop *l;
    engine *g = open_scenario(x);
    const loop_options o = { .depth = x->depth,
                             .fixed_depth = rnd_below(r, 2),
                             .prefix_every = x->every,
                             .prefix_dir = x->dir,
                             .prefix_dir_bytes = x->dir_bytes };
    OK(loop_open(&l, g, &o, &e));
    for (int i = 0; i < n; i++) {
        submit(l, &all[i]);
        for (uint32_t k = rnd_below(r, 12); k > 0 && !x->together; k--) loop_step(l);
    }
    for (int steps = 0; loop_step(l); steps++) assert_true(steps < 100000);
    const loop_stats s = loop_counted(l);
    loop_close(l);
    assert_int_equal(g->st.pages.n_unused, g->st.pages.pages);
    assert_int_equal(g->st.pages.n_kept, 0);
    engine_close(g);
    for (int i = 0; i < n; i++) check(&all[i], x->name);
    printf("%s: %lld of %lld prompts took up %lld tokens; %lld entries left, %lld evicted, %lld preempted\n", x->name,
           (long long)s.prefix_hits, (long long)s.submitted, (long long)s.prefix_tokens, (long long)s.prefix_made,
           (long long)s.prefix_evicted, (long long)s.preempted);
    return s;
}

static void test_conversations(void **state) {
    (void)state;
    static const scenario all[] = {
        { "no cache", 4, 64, 1, 2, 0, 0, 0, 0, KV_CACHE_F32, false, NULL, 0 },
        { "room for all", 4, 64, 2, 3, 100, 200, 2000, 0, KV_CACHE_F32, false, NULL, 0 },
        { "few states", 3, 32, 1, 0, 64, 3, 2000, 0, KV_CACHE_F32, false, NULL, 0 },
        { "few pages", 4, 48, 2, 1, 70, 50, 9, 0, KV_CACHE_F32, false, NULL, 0 },
        { "few pages for all", 6, 64, 1, 2, 128, 20, 4, 9, KV_CACHE_F32, false, NULL, 0 },
        { "one context", 5, 16, 2, 3, 1, 6, 3, 8, KV_CACHE_F32, false, NULL, 0 },
    };
    const int turns = is_short() ? 10 : MOST_TURNS;
    rnd r = rnd_open(seed);
    turn *t = calloc(MOST_TURNS, sizeof *t);
    engine *one = open_scenario(&(scenario){ .slots = 1, .threads = 1 });
    for (int i = 0; i < turns; i++) {
        make_turn(&t[i], t, i, &r);
        run_alone(one, &t[i], 0);
    }
    engine_close(one);
    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        if (is_short() && i != 1 && i != 4) continue; /* room for all, and short of everything */
        const loop_stats s = run_scenario(&all[i], t, turns, &r);
        if (all[i].states == 0 || !is_short()) assert_int_equal(s.prefix_hits > 0, all[i].states > 0);
        if (all[i].states > 0 && all[i].states < 10) assert_true(s.prefix_evicted > 0);
    }
    free(t);
}

static int warned;

static void count_warning(void *ctx, const char *id, const char *line) {
    (void)ctx, (void)line;
    warned += strcmp(id, "W-PREFIX-FILE") == 0;
}

/* Do something to every file of a folder; returns how many there are. */
static int each_file(const char *dir, void (*change)(const char *path, int at)) {
    char *paths[500];
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *entry; (entry = readdir(d));)
        if (entry->d_name[0] != '.' && n < 500) paths[n++] = path_join(dir, entry->d_name);
    closedir(d);
    for (int i = 0; i < n; i++) {
        if (change) change(paths[i], i);
        free(paths[i]);
    }
    return n;
}

/* A byte of the head, of the tokens or of the payload, or the end. */
static void damage(const char *path, int at) {
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    const long where[] = { 20, 66, st.st_size / 2, st.st_size - 1 };
    if (at % 5 == 4) {
        assert_int_equal(truncate(path, st.st_size - 1), 0);
        return;
    }
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, where[at % 5], SEEK_SET);
    const int c = fgetc(f);
    fseek(f, where[at % 5], SEEK_SET);
    fputc(c ^ 0x10, f);
    fclose(f);
}

/* Entries that went for room come back from the folder, in the same process and in the next; what is damaged does no harm. */
static void test_disk(void **state) {
    (void)state;
    enum { N = 14 };
    char *folder = scratch_new(), *dir = scratch_path(folder, "prefix");
    scenario x = { "disk", 3, 64, 2, 2, 100, 2, 40, 0, KV_CACHE_F32, false, dir, 0 };
    rnd r = rnd_open(seed + 9);
    turn *t = calloc(N, sizeof *t);
    engine *one = open_scenario(&(scenario){ .slots = 1 });
    for (int i = 0; i < N; i++) make_turn(&t[i], t, i, &r), run_alone(one, &t[i], 0);
    engine_close(one);
    warned = 0;
    log_set_sink(count_warning, NULL);
    loop_stats s = run_scenario(&x, t, N, &r);
    assert_true(s.prefix_files > 4 && s.prefix_hits > 0);
    s = run_scenario(&x, t, N, &r);
    assert_true(s.prefix_loaded > 2);
    assert_true(s.prefix_hits >= N / 2);
    assert_int_equal(warned, 0);
    const int files = each_file(dir, damage);
    assert_true(files > 4);
    x.slots = 2; /* no part of what a state depends on */
    (void)run_scenario(&x, t, N, &r);
    assert_true(warned > files / 2); /* the payload only of those that are asked for */
    /* Another kind of cache is another model: it leaves the files alone, and finds none. */
    const int before = each_file(dir, NULL);
    warned = 0;
    x.kv = KV_CACHE_BF16;
    err e = { 0 };
    loop *l;
    engine *g = open_scenario(&x);
    OK(loop_open(&l, g, &(loop_options){ .depth = 2, .prefix_dir = dir }, &e));
    loop_step(l);
    assert_int_equal(loop_counted(l).prefix_files, 0);
    loop_close(l);
    engine_close(g);
    assert_int_equal(each_file(dir, NULL), before);
    /* A small folder. */
    x.kv = KV_CACHE_F32;
    x.dir_bytes = 400000;
    s = run_scenario(&x, t, N, &r);
    assert_true(s.prefix_file_bytes <= x.dir_bytes);
    assert_int_equal(warned, 0);
    /* Not a folder. */
    g = open_scenario(&x);
    assert_false(loop_open(&l, g, &(loop_options){ .depth = 2, .prefix_dir = TINY "/config.json" }, &e));
    assert_string_equal(e.id, "E-PREFIX-DIR");
    engine_close(g);
    log_set_sink(NULL, NULL);
    free(t);
    free(dir);
    scratch_free(folder);
}

/* The draft layer goes on from an entry as from its own past: the same drafts are accepted. BF16 caches on the way. */
static void test_drafts(void **state) {
    (void)state;
    const scenario x = { .slots = 1, .chunk = 64, .states = 100, .pages = 1000, .every = 90, .kv = KV_CACHE_BF16 };
    engine *one = open_scenario(&(scenario){ .slots = 1, .kv = KV_CACHE_BF16 });
    for (int depth = is_short() ? 2 : 1; depth <= (is_short() ? 2 : 3); depth++) {
        err e = { 0 };
        rnd r = rnd_open(seed + (uint64_t)depth);
        engine *g = open_scenario(&x);
        loop *l;
        OK(loop_open(&l, g, &(loop_options){ .depth = depth, .fixed_depth = true, .prefix_every = x.every }, &e));
        turn t = { .leave_after = 30, .choices = 1, .depth = -1 }; /* max_tokens would shorten the last round */
        append_random(&t.prompt, 70, &r);
        int64_t accepted = 0, cached = 0;
        for (int i = 0; i < 6; i++) {
            run_alone(one, &t, depth);
            submit(l, &t);
            while (loop_step(l)) continue;
            check(&t, "an entry");
            assert_int_equal(t.result[0].rounds, t.alone[0].rounds);
            assert_int_equal(t.result[0].accepted, t.alone[0].accepted);
            if (i % 2 == 1) assert_int_equal(t.result[0].cached_tokens, t.prompt.n - 1); /* the same again */
            cached += t.result[0].cached_tokens;
            accepted += t.alone[0].accepted;
            for (int k = 0; i % 2 == 1 && k < t.want[0].n; k++) t.prompt.v[t.prompt.n++] = t.want[0].v[k];
            if (i % 2 == 1) append_random(&t.prompt, 9, &r);
        }
        /* Of an answer all but its newest token is kept at least. */
        assert_true(cached + 3 >= 70 + 2 * (70 + 29) + 9 + (70 + 2 * 39 - 10));
        printf("depth %d: %lld drafts accepted\n", depth, (long long)accepted);
        assert_true(accepted > 5);
        loop_close(l);
        engine_close(g);
    }
    engine_close(one);
}

/* Answers that outgrow the pages, of which enough are there when they begin: the newest are recomputed, with and without a cache. */
static void test_short_memory(void **state) {
    (void)state;
    enum { N = 4 };
    for (int states = is_short() ? 4 : 0; states <= 4; states += 4) {
        const scenario x = { "short memory", N, 64, 1, 2, 0, states, 3, 8, KV_CACHE_F32, true, NULL, 0 };
        rnd r = rnd_open(seed);
        engine *one = open_scenario(&(scenario){ .slots = 1 });
        turn *t = calloc(N, sizeof *t);
        for (int i = 0; i < N; i++) {
            t[i] = (turn){ .max_tokens = MOST_ANSWER, .choices = 1, .depth = -1 };
            append_random(&t[i].prompt, 118 + i, &r);
            run_alone(one, &t[i], 0);
        }
        engine_close(one);
        assert_true(run_scenario(&x, t, N, &r).preempted > 0);
        free(t);
    }
}

/* With chunks of a token more hidden rows can wait for the draft layer than a pass holds: those of a request that does not
 * draft, kept for others that will. */
static void test_short_passes(void **state) {
    (void)state;
    err e = { 0 };
    loop *l;
    rnd r = rnd_open(seed);
    engine *one = open_scenario(&(scenario){ .slots = 1 });
    engine *g = open_scenario(&(scenario){ .slots = 1, .chunk = 1, .states = 10, .pages = 100 });
    OK(loop_open(&l, g, &(loop_options){ .depth = 2, .fixed_depth = true }, &e));
    turn t = { .max_tokens = 10, .choices = 1 };
    append_random(&t.prompt, 5, &r);
    for (int i = 0; i < 3; i++, t.max_tokens += 13, t.depth = -(i > 1)) {
        run_alone(one, &t, 0);
        submit(l, &t);
        while (loop_step(l)) continue;
        check(&t, "a short pass");
    }
    loop_close(l);
    engine_close(g);
    engine_close(one);
}

/* The second request that leaves a path leaves an entry there; the third takes it up. */
static void test_branches(void **state) {
    (void)state;
    err e = { 0 };
    loop *l;
    rnd r = rnd_open(seed);
    engine *g = open_scenario(&(scenario){ .slots = 2, .chunk = 256, .states = 20, .pages = 200 });
    OK(loop_open(&l, g, &(loop_options){ .depth = 1 }, &e));
    turn t[4] = { 0 };
    for (int i = 0; i < 4; i++) {
        t[i] = (turn){ .max_tokens = 2, .choices = 1, .depth = -1 };
        t[i].prompt = t[0].prompt;
        t[i].prompt.n = i == 0 ? 0 : i == 3 ? 40 : 150;
        append_random(&t[i].prompt, i == 0 ? 200 : 20, &r);
        submit(l, &t[i]);
        while (loop_step(l)) continue;
    }
    assert_int_equal(t[1].result[0].cached_tokens, 0);
    assert_int_equal(t[2].result[0].cached_tokens, 150);
    assert_int_equal(t[3].result[0].cached_tokens, 0); /* too little in common to be worth a state */
    loop_close(l);
    engine_close(g);
}

/* Whoever comes out not finite takes the entries that it used along; the next is computed from nothing, and well. */
static void test_poison(void **state) {
    (void)state;
    err e = { 0 };
    loop *l;
    rnd r = rnd_open(seed);
    engine *one = open_scenario(&(scenario){ .slots = 1 });
    engine *g = open_scenario(&(scenario){ .slots = 2, .chunk = 256, .states = 20, .pages = 200 });
    OK(loop_open(&l, g, &(loop_options){ .depth = 2 }, &e));
    turn t = { .max_tokens = 8, .choices = 1, .depth = -1 }, other = t;
    append_random(&t.prompt, 130, &r);
    append_random(&other.prompt, 50, &r);
    turn further = t;
    append_random(&further.prompt, 20, &r);
    turn *all[] = { &t, &other, &further };
    for (int i = 0; i < 3; i++) {
        run_alone(one, all[i], 0);
        submit(l, all[i]);
        while (loop_step(l)) continue;
        check(all[i], "before");
    }
    const int64_t entries = loop_counted(l).prefix_entries;
    const ops_gdn *s = &g->st.gdn[0];
    const int64_t floats = (int64_t)s->v_heads * s->k_dim * s->v_dim;
    const float bad = NAN;
    for (int64_t i = g->st.slots * floats; i < g->st.pages.slots * floats; i += floats)
        g->o->upload(g->o, s->state + i, &bad, sizeof bad); /* every state that is kept */
    turn probe = t;
    append_random(&probe.prompt, 5, &r);
    run_alone(one, &probe, 0);
    submit(l, &probe);
    while (loop_step(l)) continue;
    assert_string_equal(probe.fault.id, "E-ENGINE-NONFINITE");
    assert_int_equal(probe.got[0].n, 0);
    probe.fault = (err){ 0 };
    const loop_stats c = loop_counted(l);
    assert_true(c.prefix_forgotten >= 2); /* further's begin with the one that was taken up */
    assert_true(c.prefix_entries < entries && c.prefix_entries > 0);
    submit(l, &probe);
    submit(l, &further);
    while (loop_step(l)) continue;
    check(&probe, "after a poisoned entry");
    check(&further, "after a poisoned entry");
    loop_close(l);
    engine_close(g);
    engine_close(one);
}

int main(void) {
    const char *s = getenv("SEED");
    seed = s ? strtoull(s, NULL, 0) : 20261202;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_conversations), cmocka_unit_test(test_drafts),
                                        cmocka_unit_test(test_disk),          cmocka_unit_test(test_short_memory),
                                        cmocka_unit_test(test_branches),      cmocka_unit_test(test_short_passes),
                                        cmocka_unit_test(test_poison) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
