/* The radix tree against a list of all that was put, and the file format against every cut and every flipped bit. The seed is
 * printed; SEED=n takes another. */
#include <sys/stat.h>
#include <unistd.h>

#include "engine/prefix.h"
#include "lib/scratch.h"
#include "lib/toytok.h"
#include "support.h"

enum { CTX = 256, LONGEST = 40, MOST = 400 };

static uint64_t seed;

typedef struct known {
    int32_t v[LONGEST];
    int n;
} known;

static int random_tokens(int32_t *out, rnd *r) {
    const int n = 1 + (int)rnd_below(r, LONGEST);
    for (int i = 0; i < n; i++) out[i] = (int32_t)rnd_below(r, rnd_below(r, 3) ? 1 : 3); /* much in common */
    return n;
}

static int same(const known *k, const int32_t *v, int n) {
    int i = 0;
    while (i < k->n && i < n && k->v[i] == v[i]) i++;
    return i;
}

/* The row that was put with entry i. */
static void put(engine *g, prefix *p, known *k, int i, const int32_t *v, int n) {
    const float mark = (float)i;
    memcpy(k->v, v, (size_t)n * sizeof *v);
    k->n = n;
    assert_true(kv_pages_grow(&g->st.pages, 0, n));
    g->o->upload(g->o, g->sc.hidden, &mark, sizeof mark);
    assert_true(prefix_put(p, v, n, 0, g->sc.hidden));
    kv_pages_drop(&g->st.pages, 0);
}

static engine *open_spare(int spare, int pages) {
    engine *g = open_tiny((engine_options){ .ctx = CTX, .no_text = true, .ops = { .isa = ISA_COUNT } });
    const int64_t page = state_page_bytes(&g->config, g->kv_type, g->n.has_mtp), one = config_state_bytes(&g->config);
    engine_close(g);
    return open_tiny((engine_options){ .ctx = CTX,
                                       .no_text = true,
                                       .prefix_state_bytes = spare * one,
                                       .prefix_kv_bytes = pages * page,
                                       .ops = { .isa = ISA_COUNT } });
}

/* spare < MOST: entries go, so what is found need only be right; else it must also be the deepest. */
static void tree(int spare) {
    err e = { 0 };
    rnd r = rnd_open(seed + (uint64_t)spare);
    engine *g = open_spare(spare, MOST);
    prefix *p;
    OK(prefix_open(&p, &g->st, spare, MOST, &e));
    known *all = calloc(MOST, sizeof *all);
    int n_all = 0, found = 0;
    for (int step = 0; step < MOST; step++) {
        int32_t v[LONGEST];
        const int n = random_tokens(v, &r);
        int deepest = 0, common = 0, shared;
        for (int i = 0; i < n_all; i++) {
            const int s = same(&all[i], v, n);
            if (s > common) common = s;
            if (s == all[i].n && s > deepest) deepest = s;
        }
        prefix_entry *x = prefix_find(p, &shared, v, n);
        const int length = x ? prefix_length(x) : 0;
        if (spare == MOST) assert_int_equal(length, deepest);
        if (spare == MOST) assert_int_equal(shared, common);
        assert_in_range(length, 0, deepest);
        assert_in_range(shared, length, common);
        if (x) {
            float mark;
            assert_true(prefix_restore(p, x, 0, g->sc.hidden));
            g->o->download(g->o, &mark, g->sc.hidden, sizeof mark);
            const known *k = &all[(int)mark];
            assert_int_equal(k->n, length);
            assert_int_equal(same(k, v, n), length);
            kv_pages_drop(&g->st.pages, 0);
            found++;
        }
        if (length < n) put(g, p, &all[n_all], n_all, v, n), n_all++;
        assert_int_equal(prefix_counted(p).entries, spare < n_all ? spare : n_all);
    }
    assert_true(found > (spare == MOST ? MOST / 8 : 3) && n_all > MOST / 8);
    prefix_forget(p, all[n_all - 1].v, all[n_all - 1].n, 1);
    assert_null(prefix_find(p, NULL, all[n_all - 1].v, all[n_all - 1].n));
    while (prefix_evict(p, NULL)) continue;
    int shared;
    assert_null(prefix_find(p, &shared, all[0].v, all[0].n));
    assert_int_equal(shared, 0);
    prefix_close(p);
    assert_int_equal(g->st.pages.n_unused, g->st.pages.pages);
    free(all);
    engine_close(g);
}

static void test_tree(void **state) {
    (void)state;
    tree(MOST);
    tree(7);
    tree(1);
}

/* Shared pages, taken and given back in any order. */
static void test_pages(void **state) {
    (void)state;
    err e = { 0 };
    ops *o;
    kv_pages p;
    OK(ops_open(&o, &(ops_options){ .threads = 1, .isa = ISA_COUNT }, &e));
    OK(kv_pages_open(&p, o, 4, 2, 640, 12, &e));
    assert_int_equal(p.slot_pages, 10);
    assert_int_equal(kv_pages_for(64), 1);
    assert_int_equal(kv_pages_for(65), 2);
    assert_true(kv_pages_grow(&p, 0, 300));
    assert_true(kv_pages_own(&p, 0, 0, 300));
    kv_pages_share(&p, 2, 0, 3); /* a spare one */
    assert_false(kv_pages_own(&p, 0, 191, 2));
    assert_true(kv_pages_own(&p, 0, 192, 100));
    assert_int_equal(p.n_kept, 3);
    assert_int_equal(p.n_unused, 7);
    assert_int_equal(kv_pages_only_kept(&p, -1), 0);
    kv_pages_share(&p, 1, 2, 2);
    kv_pages_drop(&p, 0);
    assert_int_equal(p.n_unused, 9);
    assert_int_equal(kv_pages_only_kept(&p, -1), 1);
    assert_int_equal(kv_pages_only_kept(&p, 2), 0);
    assert_false(kv_pages_grow(&p, 1, 640 + 64 * 2));
    assert_true(kv_pages_grow(&p, 1, 640));
    assert_false(kv_pages_grow(&p, 0, 65));
    assert_int_equal(p.held[0], 0);
    kv_pages_drop(&p, 1);
    kv_pages_drop(&p, 2);
    assert_int_equal(p.n_kept, 0);
    assert_int_equal(p.n_unused, 12);
    kv_pages_close(&p);
    o->close(o);
}

/* ---- files ---- */

enum { TOKENS = 9, PAYLOAD = 101, ID = 77 };

static size_t make_file(uint8_t *out) {
    int32_t tokens[TOKENS];
    uint8_t payload[PAYLOAD];
    for (int i = 0; i < TOKENS; i++) tokens[i] = 1000 * i;
    for (int i = 0; i < PAYLOAD; i++) payload[i] = (uint8_t)(3 * i);
    prefix_file_head(out, ID, tokens, TOKENS, payload, PAYLOAD);
    const size_t head = prefix_file_head_bytes(TOKENS);
    memcpy(out + head, payload, PAYLOAD);
    return head + PAYLOAD;
}

static bool good(const uint8_t *p, size_t n) {
    prefix_view v;
    return !prefix_file_check(&v, p, n, ID) && v.n == TOKENS && v.payload_bytes == PAYLOAD && prefix_file_sound(&v, p);
}

static void test_format(void **state) {
    (void)state;
    uint8_t file[400] = { 0 }, copy[400] = { 0 };
    prefix_view v;
    const size_t n = make_file(file);
    assert_true(good(file, n));
    assert_non_null(prefix_file_check(&v, file, n, ID + 1));
    assert_non_null(prefix_file_check(&v, file, n + 1, ID));
    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *exact = malloc(cut + 1); /* so that a sanitizer sees what is read behind the end */
        memcpy(exact, file, cut);
        assert_non_null(prefix_file_check(&v, exact, cut, ID));
        free(exact);
    }
    for (size_t bit = 0; bit < 8 * n; bit++) {
        memcpy(copy, file, n);
        copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (good(copy, n)) fail_msg("bit %zu flipped unnoticed", bit);
    }
}

static char last[64];

static void note(void *ctx, const char *id, const char *line) {
    (void)ctx, (void)line;
    snprintf(last, sizeof last, "%s", id);
}

static void count_found(void *ctx, const int32_t *tokens, int n, size_t bytes) {
    assert_int_equal(n, TOKENS);
    assert_int_equal(tokens[3], 3000);
    assert_true(bytes > PAYLOAD);
    ++*(int *)ctx;
}

static void test_folder(void **state) {
    (void)state;
    err e = { 0 };
    prefix_disk *d;
    int32_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = 1000 * i;
    char *folder = scratch_new(), *dir = scratch_path(folder, "new");
    log_set_sink(note, NULL);
    OK(prefix_disk_open(&d, dir, ID, &e));
    prefix_disk_write(d, tokens, TOKENS, calloc(1, PAYLOAD), PAYLOAD);
    prefix_disk_close(d);
    free(scratch_put(dir, "notes.txt", "x", 1));
    OK(prefix_disk_open(&d, dir, ID, &e));
    int found = 0;
    prefix_disk_scan(d, count_found, &found);
    assert_int_equal(found, 1);
    mapping map;
    const uint8_t *payload;
    assert_true(prefix_disk_read(d, &map, &payload, tokens, TOKENS, PAYLOAD));
    assert_int_equal(payload[PAYLOAD - 1], 0);
    mapping_close(&map);
    assert_string_equal(last, "");
    assert_false(prefix_disk_read(d, &map, &payload, tokens, TOKENS, PAYLOAD + 1)); /* another shape */
    assert_string_equal(last, "W-PREFIX-FILE");
    assert_false(prefix_disk_read(d, &map, &payload, tokens, TOKENS, PAYLOAD)); /* it was removed */
    /* A folder that goes away: said once, nothing else. */
    char *gone = scratch_path(folder, "gone");
    assert_int_equal(rename(dir, gone), 0);
    for (int i = 0; i < 2; i++) prefix_disk_write(d, tokens, TOKENS, calloc(1, PAYLOAD), PAYLOAD);
    prefix_disk_close(d);
    assert_string_equal(last, "W-PREFIX-DISK");
    log_set_sink(NULL, NULL);
    free(gone);
    free(dir);
    scratch_free(folder);
}

int main(void) {
    const char *s = getenv("SEED");
    seed = s ? strtoull(s, NULL, 0) : 20261202;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_tree), cmocka_unit_test(test_pages),
                                        cmocka_unit_test(test_format), cmocka_unit_test(test_folder) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
