/* One sequence of a batch comes out not finite, from its keys, values, recurrent state or conv window in mid-answer: it alone
 * fails, what it leaves in the prefix cache goes, its mates get their bits, and the same request works the second time. What only
 * drafts are made from may be anything: nothing shows. A logit that is not finite fails everyone, and ends nothing. */
#include <sys/mman.h>

#include "engine/loop_impl.h"
#include "lib/jobs.h"

#include "support.h"

enum { MATES = 4, CTX = 192 };

static uint64_t seed;

typedef enum place { KEYS, VALUES, GDN, CONV, DRAFT_KEYS, KEPT, PLACES } place;
static const char *const place_names[PLACES] = {
    "keys", "values", "GDN state", "conv window", "draft keys", "kept rows"
};

static engine *open_engine(int slots, kv_mode kv) {
    engine *g = open_tiny((engine_options){ .ctx = 64, .kv = kv, .no_text = true, .ops = { .isa = ISA_COUNT } });
    const int64_t page = state_page_bytes(&g->config, g->kv_type, g->n.has_mtp), one = config_state_bytes(&g->config);
    engine_close(g);
    return open_tiny((engine_options){ .ctx = CTX,
                                       .slots = slots,
                                       .chunk = 64,
                                       .kv = kv,
                                       .no_text = true,
                                       .prefix_kv_bytes = slots > 1 ? 40 * page : 0,
                                       .prefix_state_bytes = slots > 1 ? 20 * one : 0,
                                       .ops = { .threads = 2, .isa = ISA_COUNT } });
}

/* 0xFF everywhere is a NaN as float32, BF16 and E4M3. */
static void spoil(engine *g, void *at, size_t bytes) {
    uint8_t *bad = malloc(bytes);
    memset(bad, 0xff, bytes);
    g->o->upload(g->o, at, bad, bytes);
    free(bad);
}

static void spoil_kv(engine *g, const ops_kv *kv, void *which, int slot) {
    const size_t page = (size_t)OPS_KV_PAGE * (size_t)kv->kv_heads * (size_t)kv->dim * (size_t)dtype_bytes(kv->type);
    spoil(g, (char *)which + (size_t)kv_page(&g->st.pages, slot, 0) * page, page);
}

static void poison(engine *g, const loop *l, const seq *s, place where) {
    seq_state *st = &g->st;
    const int slot = l->slot_of[s->slot];
    const ops_gdn *d = &st->gdn[0];
    const ops_conv *c = &st->conv[0];
    const int64_t floats = (int64_t)d->v_heads * d->k_dim * d->v_dim, window = (int64_t)(c->taps - 1) * c->channels;
    switch (where) {
    case KEYS: spoil_kv(g, &st->kv[0], st->kv[0].k, slot); break;
    case VALUES: spoil_kv(g, &st->kv[0], st->kv[0].v, slot); break;
    case GDN: spoil(g, d->state + slot * floats, sizeof *d->state); break;
    case CONV: spoil(g, c->window + (slot + 1) * window - c->channels, sizeof *c->window); break; /* its newest row */
    case DRAFT_KEYS: spoil_kv(g, &st->mtp_kv, st->mtp_kv.k, slot); break;
    case KEPT:
        spoil(g, l->keep + (int64_t)s->slot * LOOP_KEEP_ROWS * g->config.hidden,
              (size_t)LOOP_KEEP_ROWS * (size_t)g->config.hidden * sizeof *l->keep);
        break;
    case PLACES: break;
    }
}

static const seq *seq_of(const loop *l, const job_run *run) {
    for (int i = 0; i < l->n_active; i++)
        if (l->active[i]->r->q.ctx == run) return l->active[i];
    return NULL;
}

static void start(job_run *run, loop *l, engine *g, const job *j, const job_world *w) {
    err e = { 0 };
    *run = (job_run){ 0 };
    OK(job_start(run, l, g, j, w, &(job_submit){ .depth = -1 }, &e));
}

static void same(job_run *run, const char *what) {
    const char *why = job_differs(run);
    if (why) fail_msg("%s: %s", what, why);
    job_run_free(run);
}

static void one_place(const job *all, const job_world *w, place where, kv_mode kv, int depth) {
    err e = { 0 };
    loop *l;
    job_run *runs = calloc(MATES, sizeof *runs), *victim = &runs[1];
    engine *g = open_engine(MATES, kv);
    OK(loop_open(&l, g, &(loop_options){ .depth = depth, .fixed_depth = true }, &e));
    for (int i = 0; i < MATES; i++) start(&runs[i], l, g, &all[i], w);
    while (victim->got[0].n < 4) assert_true(loop_step(l));
    const seq *s = seq_of(l, victim);
    assert_non_null(s);
    const int64_t entries = loop_counted(l).prefix_entries;
    poison(g, l, s, where);
    while (loop_step(l)) continue;
    for (int i = 0; i < MATES; i++)
        if (&runs[i] != victim) same(&runs[i], place_names[where]);
    if (where < DRAFT_KEYS) {
        assert_int_equal(victim->ended, 1);
        if (!victim->fault[0].id) fail_msg("%s: no error", place_names[where]);
        assert_string_equal(victim->fault[0].id, "E-ENGINE-NONFINITE");
        assert_in_range(victim->got[0].n, 4, victim->j->alone[0].n - 1);
        assert_memory_equal(victim->got[0].id, victim->j->alone[0].id, (size_t)victim->got[0].n * sizeof(int32_t));
        assert_int_equal(loop_counted(l).failed, 1);
        assert_true(entries > 0 && loop_counted(l).prefix_forgotten > 0);
        job_run_free(victim);
    } else {
        same(victim, place_names[where]);
        assert_int_equal(loop_counted(l).failed, 0);
    }
    start(victim, l, g, &all[1], w); /* the second time */
    while (loop_step(l)) continue;
    same(victim, "the same again");
    loop_close(l);
    engine_close(g);
    free(runs);
}

static void each_place(kv_mode kv) {
    err e = { 0 };
    job all[MATES] = { 0 };
    job_world w;
    rnd r = rnd_open(seed + (uint64_t)kv);
    engine *one = open_engine(1, kv);
    OK(jobs_open(&w, one, true, &e));
    for (int i = 0; i < MATES; i++) /* nobody shares a prompt; the victim's goes beyond a page and its answer is long */
        do {
            job_free(&all[i]);
            OK(job_make(&all[i], 0, &w, one, &r, &e));
        } while (i == 1 && (all[i].choices > 1 || all[i].alone[0].n < 16 || (all[i].n_prompt < 66 && !is_short())));
    for (int p = 0; p < PLACES; p++) {
        if (is_short() && p != GDN && p != KEPT) continue;
        if (p < DRAFT_KEYS) one_place(all, &w, (place)p, kv, 0);
        if (p != CONV)
            one_place(all, &w, (place)p, kv, 2); /* three accepted rows would replace the whole window unread */
    }
    for (int i = 0; i < MATES; i++) job_free(&all[i]);
    jobs_close(&w);
    engine_close(one);
}

static void test_f32(void **state) {
    (void)state;
    each_place(KV_CACHE_F32);
}
static void test_bf16(void **state) {
    (void)state;
    if (is_short()) skip();
    each_place(KV_CACHE_BF16);
}
static void test_fp8(void **state) {
    (void)state;
    if (is_short()) skip();
    each_place(KV_CACHE_FP8);
}

/* ---- what everyone uses ---- */

static void change(const void *at, size_t bytes, const void *to) {
    const uintptr_t page = 4096, first = (uintptr_t)at / page * page;
    assert_int_equal(mprotect((void *)first, (uintptr_t)at + bytes - first, PROT_READ | PROT_WRITE), 0);
    memcpy((void *)(uintptr_t)at, to, bytes);
}

static void all_fail(loop *l, engine *g, const job *all, const job_world *w, bool fail_now) {
    job_run *runs = calloc(MATES, sizeof *runs);
    for (int i = 0; i < MATES; i++) start(&runs[i], l, g, &all[i], w);
    while (loop_step(l)) continue;
    for (int i = 0; i < MATES; i++) {
        if (!fail_now) {
            same(&runs[i], "when it is finite again");
            continue;
        }
        for (int c = 0; c < all[i].choices; c++) {
            assert_non_null(runs[i].fault[c].id);
            assert_string_equal(runs[i].fault[c].id, "E-ENGINE-NONFINITE");
            assert_int_equal(runs[i].got[c].n, 0);
        }
        job_run_free(&runs[i]);
    }
    free(runs);
}

/* A row of the head is not finite in this process's copy of the page; then it is again. */
static void test_logits(void **state) {
    (void)state;
    err e = { 0 };
    job all[MATES] = { 0 };
    job_world w;
    loop *l;
    rnd r = rnd_open(seed);
    engine *one = open_engine(1, KV_CACHE_F32), *g = open_engine(MATES, KV_CACHE_F32);
    OK(jobs_open(&w, one, true, &e));
    for (int i = 0; i < MATES; i++) OK(job_make(&all[i], 0, &w, one, &r, &e));
    OK(loop_open(&l, g, &(loop_options){ .depth = 2 }, &e));
    const wmat *m = &g->w.head;
    uint16_t was[2048], bad[2048];
    const size_t bytes = (size_t)m->cols * sizeof bad[0];
    assert_true(m->type == DT_BF16 && m->cols <= 2048);
    memcpy(was, m->data, bytes);
    for (int k = 0; k < m->cols; k++) bad[k] = was[k] & 0x8000 ? 0xff80 : 0x7f80; /* Inf: a logit of Inf or NaN */
    change(m->data, bytes, bad);
    all_fail(l, g, all, &w, true);
    change(m->data, bytes, was);
    all_fail(l, g, all, &w, false);
    loop_close(l);
    for (int i = 0; i < MATES; i++) job_free(&all[i]);
    jobs_close(&w);
    engine_close(g);
    engine_close(one);
}

static void quiet(void *ctx, const char *id, const char *line) { (void)ctx, (void)id, (void)line; }

int main(void) {
    log_set_sink(quiet, NULL); /* FP8 without scales */
    const char *s = getenv("SEED");
    seed = s ? strtoull(s, NULL, 0) : 20261202;
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_f32), cmocka_unit_test(test_bf16),
                                        cmocka_unit_test(test_fp8), cmocka_unit_test(test_logits) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
