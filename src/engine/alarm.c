/* When acceptance looks wrong. A draft head that is never right was damaged or belongs to another model; one that is always
 * right can mean that drafts and model read the same broken memory. Good text can be that easy too, so the latter only starts
 * a test: the same greedy tokens with drafts and without, and two memories that differ. Only its failure is an error. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/loop_impl.h"
#include "engine/prefix_file.h"

enum { WINDOW_ROUNDS = 200, WINDOW_PROMPTS = SPEC_WATCH_PROMPTS };

static const double FLOOR_LENGTH = 1.2, PIN_SHARE = 0.99;

/* ---- the windows ---- */

static void note_prompt(spec_watch *w, const request *r) {
    const uint64_t h = prefix_sum(r->prompt, (size_t)r->q.n_prompt * sizeof *r->prompt, 0);
    for (int i = 0; i < w->n_prompts; i++)
        if (w->prompts[i] == h) return;
    if (w->n_prompts < WINDOW_PROMPTS) w->prompts[w->n_prompts++] = h;
}

static void check_floor(loop *l) {
    spec_watch *w = &l->watch;
    if (w->rounds < WINDOW_ROUNDS) return;
    const double length = (double)(w->accepted + w->rounds) / (double)w->rounds;
    if (length < FLOOR_LENGTH && l->counts.spec_floor++ == 0)
        log_say("W-SPEC-FLOOR",
                "%s: accept length %.2f over %lld rounds: nearly no draft is right (a damaged draft head, or another "
                "model's; --spec 0 does without)",
                l->g->files.dir, length, (long long)w->rounds);
    w->rounds = w->accepted = 0;
}

static void check_pin(loop *l) {
    spec_watch *w = &l->watch;
    if (w->pin_rounds < WINDOW_ROUNDS) return;
    const bool pinned = (double)w->pin_full >= PIN_SHARE * (double)w->pin_rounds;
    if (pinned && w->n_prompts < WINDOW_PROMPTS) return; /* one text may well be that easy */
    if (pinned) {
        if (l->counts.spec_pinned++ == 0)
            log_say(
                "W-SPEC-PINNED",
                "%s: all drafts were accepted in %lld of %lld rounds of different prompts: easy text, or broken memory "
                "(testing which)",
                l->g->files.dir, (long long)w->pin_full, (long long)w->pin_rounds);
        /* A model that is always right is tested now and then, not all the time. */
        w->test_due = w->test_due || l->counts.spec_pinned >= w->next_test;
    }
    w->pin_rounds = w->pin_full = 0;
    w->n_prompts = 0;
}

void alarm_round(loop *l, const seq *s, int accepted) {
    spec_watch *w = &l->watch;
    w->rounds++;
    w->accepted += accepted;
    w->pin_rounds++;
    w->pin_full += accepted == s->depth;
    if (w->n_prompts < WINDOW_PROMPTS) note_prompt(w, s->r);
    check_floor(l);
    check_pin(l);
}

/* ---- the test ---- */

typedef struct answer {
    spec_test *t;
    request *r;
    int32_t ids[ENGINE_TEST_TOKENS];
    int n, want;
} answer;

struct spec_test {
    loop *l;
    answer plain[ALARM_PROMPTS], drafted[ALARM_PROMPTS];
    int open;
    bool cut; /* the loop was closed */
    const char *wrong;
    err fault;
};

/* Do the draft layer's rows of KV equal those of the trunk's last attention layer? Both were made from different numbers. */
static bool memory_shared(const loop *l, const seq *s) {
    const seq_state *st = &l->g->st;
    const int layers = l->g->config.attn_layers, rows = (int)min_i64(min_i64(s->mtp_done, s->done), OPS_KV_PAGE);
    if (layers == 0 || rows < 1) return false;
    const ops_kv *a = &st->kv[layers - 1], *b = &st->mtp_kv;
    if (a->type != b->type || a->kv_heads != b->kv_heads || a->dim != b->dim) return false;
    const size_t row = (size_t)a->kv_heads * (size_t)a->dim * (size_t)dtype_bytes(a->type), n = (size_t)rows * row;
    const size_t at = (size_t)kv_page(&st->pages, l->slot_of[s->slot], 0) * OPS_KV_PAGE * row;
    uint8_t *copy = malloc(2 * n);
    if (!copy) return false;
    l->g->o->download(l->g->o, copy, (const uint8_t *)a->k + at, n);
    l->g->o->download(l->g->o, copy + n, (const uint8_t *)b->k + at, n);
    const bool same = memcmp(copy, copy + n, n) == 0;
    free(copy);
    return same;
}

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    answer *a = ctx;
    (void)logprob, (void)top, (void)values;
    a->ids[a->n++] = id;
    const seq *s = &a->r->seqs[choice];
    if (a->r->q.depth > 0 && s->drafting && memory_shared(a->t->l, s))
        a->t->wrong = "the draft layer's KV cache holds the model's";
    return a->n < a->want;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    const answer *a = ctx;
    spec_test *t = a->t;
    (void)choice;
    if (e->id && !t->fault.id) t->fault = *e;
    t->cut |= r->finish == GEN_CANCEL && !e->id;
    t->open--;
}

/* Texts for a model with a tokenizer, numbers for one without. */
static bool make_prompt(const engine *g, id_list *out, int which, err *e) {
    static const char *const texts[ALARM_PROMPTS] = { "The answer to this question is", "1, 2, 3, 4, 5, 6, 7, 8,",
                                                      "Once upon a time there was a", "def main():\n    print(" };
    out->n = 0;
    if (g->tok && !tokenizer_encode(g->tok, out, str_of(texts[which]), NULL, e)) return false;
    for (int i = 0; !g->tok && i < 8; i++) ids_add(out, (int32_t)((which * 7919 + i * 104729 + 17) % g->n.real_vocab));
    if ((int)out->n + ENGINE_TEST_TOKENS >= g->st.capacity) out->n = 1; /* a context too small to test more in */
    return true;
}

static bool ask(spec_test *t, answer *a, const id_list *prompt, int depth, int tokens, err *e) {
    loop *l = t->l;
    const loop_request q = { .prompt = prompt->v,
                             .n_prompt = (int)prompt->n,
                             .max_tokens = tokens,
                             .depth = depth,
                             .on_token = on_token,
                             .on_done = on_done,
                             .ctx = a };
    *a = (answer){ .t = t, .want = tokens };
    if (!request_new(&a->r, l, &q, e)) return false;
    request_adopt(l, a->r);
    t->open++;
    return true;
}

bool alarm_test(loop *l, int tokens, err *e) {
    CHECK(!l->test && tokens >= 1 && tokens <= ENGINE_TEST_TOKENS, "a test of %d tokens", tokens);
    spec_test *t = l->test = xcalloc(1, sizeof *t);
    id_list prompt = { 0 };
    bool ok = true;
    t->l = l;
    for (int i = 0; ok && i < ALARM_PROMPTS; i++)
        ok = make_prompt(l->g, &prompt, i, e) && ask(t, &t->plain[i], &prompt, 0, tokens, e) &&
             ask(t, &t->drafted[i], &prompt, l->opt.depth, tokens, e);
    ids_free(&prompt);
    return ok;
}

static bool same(const answer *a, const answer *b) {
    return a->n == b->n && memcmp(a->ids, b->ids, (size_t)a->n * sizeof *a->ids) == 0;
}

static const char *verdict(const spec_test *t) {
    if (t->wrong) return t->wrong;
    for (int i = 0; i < ALARM_PROMPTS; i++)
        if (!same(&t->plain[i], &t->drafted[i]))
            return t->l->opt.depth > 0 ? "other tokens with drafts than without" : "two answers to one question";
    return NULL;
}

bool alarm_test_alone(loop *l, int tokens, err *e) {
    spec_test *t = l->test;
    id_list prompt = { 0 };
    answer a;
    bool ok = true;
    CHECK(t && t->open == 0 && l->n_active == 0, "a test alone while others run");
    for (int i = 0; ok && i < 2 * ALARM_PROMPTS && !t->fault.id; i++) {
        ok = make_prompt(l->g, &prompt, i / 2, e) && ask(t, &a, &prompt, i % 2 ? l->opt.depth : 0, tokens, e);
        while (ok && t->open > 0) loop_step(l);
        if (ok && !same(&a, &t->plain[i / 2])) t->wrong = "other tokens alone than among others";
    }
    ids_free(&prompt);
    return ok;
}

/* Nothing that was made with drafts can be trusted, nor what it left behind. */
static void distrust(loop *l, const err *e) {
    log_say("E-SPEC-CORRUPT", "%s", e->msg);
    l->counts.spec_corrupt++;
    l->opt.depth = 0;
    for (int i = l->n_active - 1; i >= 0; i--) {
        seq *s = l->active[i];
        if (s->out.rounds == 0) continue;
        s->fault = *e;
        request_fail(l, s);
    }
    if (l->prefix) prefix_clear(l->prefix);
}

bool alarm_tested(loop *l, err *e) {
    spec_test *t = l->test;
    if (!t || t->open > 0) return true;
    const char *wrong = t->cut ? NULL : verdict(t);
    err fault = t->fault;
    l->test = NULL;
    free(t);
    if (fault.id) return *e = fault, false;
    if (!wrong) return true;
    return fail(e, ERR_MACHINE, "E-SPEC-CORRUPT",
                "%s: self-test: %s (broken memory or a bug; --spec 0 does without drafts)", l->g->files.dir, wrong);
}

void alarm_step(loop *l) {
    err e = { 0 };
    spec_watch *w = &l->watch;
    if (l->alone) return;
    if (l->test && l->test->open == 0 && !alarm_tested(l, &e) && strcmp(e.id, "E-SPEC-CORRUPT") == 0) distrust(l, &e);
    if (!w->test_due || l->test || l->opt.depth == 0) return;
    w->test_due = false;
    w->next_test = 2 * l->counts.spec_pinned;
    err unused = { 0 }; /* no memory: another time */
    if (!alarm_test(l, ENGINE_TEST_TOKENS, &unused)) l->test->cut = true;
}

void alarm_close(loop *l) { free(l->test); }
