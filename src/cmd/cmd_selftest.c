/* nibble selftest: does a device return the bits of the CPU? Whole models, one verdict per claim. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "cmd/cmd.h"
#include "engine/teacher.h"
#include "model/mock.h"

enum { MOST_IDS = 70, MOST_TOKENS = 16, CTX = 256 };

/* What is asked of both sides: passes in pieces of several sizes, then answers. */
static const int chunks[] = { 256, 16, 3, 1 };
static const int depths[] = { 0, 1, 2, 5 };
enum { CHUNKS = ARRAY_LEN(chunks), DEPTHS = ARRAY_LEN(depths), ANSWERS = 2 * DEPTHS };

typedef struct answers {
    float *states[CHUNKS];                /* final norm, then both draft steps: [3][ids, hidden] */
    float *logits;                        /* of the last row */
    int32_t tokens[ANSWERS][MOST_TOKENS]; /* greedy, then sampled; by depth */
    int n_tokens[ANSWERS];
    size_t state_bytes, logit_bytes;
} answers;

typedef struct subject {
    const char *name, *dir; /* dir NULL: synthetic */
    int preset, layers, ids, tokens;
} subject;

typedef struct collected {
    int32_t *v;
    int n;
} collected;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    collected *c = ctx;
    if (c->n < MOST_TOKENS) c->v[c->n++] = id;
    return true;
}

static bool open_subject(engine **g, mock *m, const subject *s, const ops_options *oo, int chunk, err *e) {
    const engine_options eo = {
        .ops = *oo, .ctx = CTX, .slots = 2, .chunk = chunk, .no_text = true, .heads = { .draft_rows = 500 }
    };
    if (s->dir) return engine_open(g, s->dir, &eo, e);
    pool *p;
    if (!mock_plan(m, s->preset, s->layers, e) || !pool_new(&p, cmd_common()->threads, e)) return false;
    const bool ok = mock_build(m, p, e);
    pool_free(p);
    return ok && engine_open_weights(g, s->name, &m->w, &m->config, &eo, e);
}

static bool run_teacher(answers *a, int at, engine *g, const int32_t *ids, int n, err *e) {
    teacher_result r;
    if (!teacher_run(&r, g, ids, n, false, g->n.has_mtp, e)) return false;
    const size_t floats = (size_t)n * (size_t)g->config.hidden;
    a->state_bytes = 3 * floats * sizeof(float);
    a->states[at] = xcalloc(3 * floats, sizeof(float));
    memcpy(a->states[at], r.final_norm, floats * sizeof(float));
    if (r.mtp1) memcpy(a->states[at] + floats, r.mtp1, floats * sizeof(float));
    if (r.mtp2) memcpy(a->states[at] + 2 * floats, r.mtp2, floats * sizeof(float));
    bool ok = true;
    if (at == 0) {
        a->logit_bytes = (size_t)g->config.vocab * sizeof(float);
        a->logits = xmalloc(a->logit_bytes);
        ok = teacher_logits(g, a->logits, r.final_norm + floats - (size_t)g->config.hidden, 1, e);
    }
    teacher_free(&r);
    return ok;
}

static bool run_answers(answers *a, engine *g, const int32_t *ids, int n, int tokens, err *e) {
    for (int i = 0; i < ANSWERS; i++) {
        session s;
        gen_result r;
        collected c = { .v = a->tokens[i] };
        if (!session_open(&s, g, true, e)) return false;
        const gen_options opt = {
            .max_tokens = tokens,
            .depth = depths[i % DEPTHS],
            .sampling = { .temperature = i < DEPTHS ? 0 : 1, .top_p = 0.95, .top_k = 20, .repetition = 1, .seed = 7 },
            .on_token = on_token,
            .ctx = &c
        };
        const bool ok = session_set(&s, ids, n, e) && session_generate(&s, &opt, &r, e);
        a->n_tokens[i] = c.n;
        session_close(&s);
        if (!ok) return false;
    }
    return true;
}

/* passes: how many of the piece sizes. */
static bool run_subject(answers *a, const subject *s, const ops_options *oo, int passes, err *e) {
    int32_t ids[MOST_IDS];
    bool ok = true;
    for (int i = 0; i < passes && ok; i++) {
        engine *g = NULL;
        mock m = { 0 };
        ok = open_subject(&g, &m, s, oo, chunks[i], e);
        for (int k = 0; ok && k < s->ids; k++)
            ids[k] = (int32_t)(rng_uniform(1, 2, (uint64_t)k, 3) * (g->n.real_vocab < 2000 ? g->n.real_vocab : 2000));
        ok = ok && run_teacher(a, i, g, ids, s->ids, e) && (i > 0 || run_answers(a, g, ids, s->ids / 2, s->tokens, e));
        engine_close(g);
        mock_free(&m);
    }
    return ok;
}

static void free_answers(answers *a) {
    for (int i = 0; i < CHUNKS; i++) free(a->states[i]);
    free(a->logits);
}

/* ---- verdicts ---- */

typedef struct report {
    buf json;
    int passed, failed;
} report;

static void verdict(report *r, const subject *s, const char *claim, bool holds) {
    (holds ? &r->passed : &r->failed)[0]++;
    if (cmd_common()->json)
        buf_printf(&r->json, "%s{\"model\":\"%s\",\"claim\":\"%s\",\"holds\":%s}", r->json.n ? "," : "", s->name, claim,
                   holds ? "true" : "false");
    else
        printf("%-5s %-28s %s\n", holds ? "ok" : "FAIL", s->name, claim);
}

static void compare(report *r, const subject *s, const answers *a, const answers *b) {
    for (int i = 0; i < CHUNKS; i++) {
        char claim[80];
        snprintf(claim, sizeof claim, "hidden states in pieces of %d rows: same bits", chunks[i]);
        verdict(r, s, claim, memcmp(a->states[0], b->states[i], a->state_bytes) == 0);
    }
    verdict(r, s, "logits: same bits", memcmp(a->logits, b->logits, a->logit_bytes) == 0);
    for (int i = 0; i < ANSWERS; i++) {
        const int want = i / DEPTHS * DEPTHS; /* depth 0 of the CPU */
        char claim[80];
        snprintf(claim, sizeof claim, "%s, %d drafts: same tokens", i < DEPTHS ? "greedy" : "sampled",
                 depths[i % DEPTHS]);
        verdict(r, s, claim,
                a->n_tokens[want] == b->n_tokens[i] &&
                    memcmp(a->tokens[want], b->tokens[i], sizeof a->tokens[want]) == 0);
    }
}

static bool test_subject(report *r, const subject *s, const ops_options *base, const ops_options *device, err *e) {
    answers a = { 0 }, b = { 0 };
    const bool ok = run_subject(&a, s, base, 1, e) && run_subject(&b, s, device, CHUNKS, e);
    if (ok) compare(r, s, &a, &b);
    free_answers(&a);
    free_answers(&b);
    return ok;
}

int cmd_selftest(int argc, char **argv, err *e) {
    bool wide = false;
    const arg_opt opts[] = {
        { .type = ARG_FLAG,
          .name = "wide",
          .dst = &wide,
          .help = "also four layers of the shape of Qwen3.6-35B-A3B, made up (4 GB of memory)" },
    };
    const arg_spec spec = {
        .usage = "selftest [options] [MODEL_DIR]",
        .about = "Run models on --device and on the CPU (on `ref` when the device is the CPU) and compare "
                 "bits and tokens: whole and in pieces, with drafts and without. Exit 1 when any differs.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble selftest --device cuda --wide\n"
    };
    arg_strings pos = { 0 };
    bool done = false;
    report r = { 0 };
    const char *dir = NULL;
    bool ok = cmd_parse(&spec, argc, argv, &pos, &done, e) && (done || cmd_model_dir(&dir, &pos, 0, e));
    if (ok && !done) {
        const ops_options device = cmd_ops_options();
        const ops_options base = { .device = strcmp(device.device, "cpu") == 0 ? "ref" : "cpu",
                                   .threads = device.threads,
                                   .isa = ISA_COUNT };
        const subject subjects[] = { { "checkpoint", dir, 0, 0, MOST_IDS, MOST_TOKENS },
                                     { "synthetic tiny, NVFP4", NULL, MOCK_TINY, 4, MOST_IDS, MOST_TOKENS },
                                     { "synthetic wide4, NVFP4", NULL, MOCK_WIDE4, 4, 40, 12 } };
        for (size_t i = 0; ok && i < ARRAY_LEN(subjects) - !wide; i++)
            ok = test_subject(&r, &subjects[i], &base, &device, e);
        if (ok && cmd_common()->json)
            printf("{\"schema\":\"nibble.selftest/1\",\"device\":\"%s\",\"against\":\"%s\",\"verdicts\":[%.*s]}\n",
                   device.device, base.device, (int)r.json.n, r.json.p ? r.json.p : "");
        else if (ok)
            printf("%s against %s: %d hold, %d do not\n", device.device, base.device, r.passed, r.failed);
    }
    buf_free(&r.json);
    arg_strings_free(&pos);
    return !ok ? err_exit_code(e->kind) : r.failed > 0;
}
