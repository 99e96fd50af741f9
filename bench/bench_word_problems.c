/* bench_word_problems - share of word problems answered right, and accept length, of one or more checkpoints.
 *
 * usage: bench_word_problems PROBLEMS.jsonl MODEL_DIR...
 * Each line is {"question": ..., "answer": "... #### N"}. Greedy, thinking off (or on), two drafts per round when there is a
 * head; an answer is right when the last `#### N` of the text is the expected number. Intervals are Wilson's, 95 %. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args.h"
#include "base/file.h"
#include "base/log.h"
#include "engine/engine.h"
#include "text/reply.h"

typedef struct options {
    int problems, threads;
    bool think;
    act_mode act;
} options;

static bool on_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    return reply_push(ctx, id);
}

/* The number behind the last "#### ", or false. */
static bool last_number(str text, long *out) {
    bool found = false;
    for (ptrdiff_t at; (at = str_find(text, STR("#### "))) >= 0;) {
        text = str_skip(text, (size_t)at + 5);
        char digits[24];
        const size_t n = text.n < sizeof digits - 1 ? text.n : sizeof digits - 1;
        memcpy(digits, text.p, n);
        digits[n] = 0;
        char *end;
        const long v = strtol(digits, &end, 10);
        if (end != digits) *out = v, found = true;
    }
    return found;
}

typedef struct score {
    int right, asked;
    int64_t rounds, accepted;
} score;

static bool ask(score *sc, engine *g, session *s, const json *problem, const options *o, err *e) {
    buf request = { 0 }, prompt = { 0 };
    arena mem = { 0 };
    id_list ids = { 0 };
    const json *v;
    reply r;
    gen_result res;
    long want = 0, got = 0;
    const json *question = json_get(problem, "question"), *answer = json_get(problem, "answer");
    if (!json_is(question, JSON_STRING) || !json_is(answer, JSON_STRING) || !last_number(json_str(answer), &want))
        return fail(e, ERR_INPUT, "E-BENCH-PROBLEM", "problem %d: no question, or no answer with `#### N`", sc->asked);
    buf_puts(&request, "{\"messages\":[{\"role\":\"user\",\"content\":");
    json_write_str(&request, json_str(question));
    buf_printf(&request, "}],\"enable_thinking\":%s}", o->think ? "true" : "false");
    bool ok = json_parse(&v, &mem, buf_view(&request), "problem", NULL, e) && template_render(g->tmpl, &prompt, v, e) &&
              tokenizer_encode(g->tok, &ids, buf_view(&prompt), NULL, e);
    if (ok) session_reset(s);
    ok = ok && session_set(s, ids.v, (int)ids.n, e);
    if (ok) {
        reply_init(&r, g->tok, split_prompt_thinks(buf_view(&prompt)), NULL, NULL, 0);
        const gen_options gen = { .max_tokens = 200,
                                  .depth = g->n.has_mtp ? 2 : 0,
                                  .stop_ids = g->config.stop_ids,
                                  .n_stop_ids = g->config.stop_count,
                                  .on_token = on_token,
                                  .ctx = &r };
        ok = session_generate(s, &gen, &res, e);
        reply_end(&r);
        if (ok) {
            sc->asked++;
            sc->right += last_number(buf_view(&r.text), &got) && got == want;
            sc->rounds += res.rounds;
            sc->accepted += res.accepted;
        }
        reply_free(&r);
    }
    buf_free(&request);
    buf_free(&prompt);
    ids_free(&ids);
    arena_free(&mem);
    return ok;
}

static bool one_model(const char *dir, str lines, const options *o, err *e) {
    engine *g = NULL;
    session s = { 0 };
    score sc = { 0 };
    const engine_options eo = {
        .ctx = 1024, .need_text = true, .act = o->act, .ops = { .threads = o->threads, .isa = ISA_COUNT }
    };
    bool ok = engine_open(&g, dir, &eo, e) && session_open(&s, g, true, e);
    if (ok && !g->tmpl) ok = fail(e, ERR_INPUT, "E-TEMPLATE-MISSING", "%s: no chat template", dir);
    while (ok && lines.n && sc.asked < o->problems) {
        const char *end = memchr(lines.p, '\n', lines.n);
        const str line = { lines.p, end ? (size_t)(end - lines.p) : lines.n };
        lines = str_skip(lines, end ? line.n + 1 : line.n);
        if (line.n == 0) continue;
        arena mem = { 0 };
        const json *v;
        ok = json_parse(&v, &mem, line, "problems", NULL, e) && ask(&sc, g, &s, v, o, e);
        arena_free(&mem);
    }
    if (ok && sc.asked) {
        const double n = sc.asked, p = sc.right / n, z = 1.96, mid = (p + z * z / (2 * n)) / (1 + z * z / n),
                     half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n);
        printf("%-40s %d of %d right (%.1f %%, 95 %% interval %.1f to %.1f), accept length %.3f of 3, KV %s\n", dir,
               sc.right, sc.asked, 100 * p, 100 * (mid - half), 100 * (mid + half),
               sc.rounds ? (double)(sc.accepted + sc.rounds) / (double)sc.rounds : 0.0, dtype_name(g->kv_type));
    }
    session_close(&s);
    engine_close(g);
    return ok;
}

int main(int argc, char **argv) {
    static const char *const acts[] = { "auto", "fp4", "int8", "bf16", NULL };
    options o = { .problems = 100 };
    int act = 0;
    const arg_opt opts[] = {
        { .type = ARG_INT,
          .name = "problems",
          .meta = "N",
          .dst = &o.problems,
          .lo = 1,
          .hi = 1 << 20,
          .help = "ask the first N" },
        { .type = ARG_INT,
          .name = "threads",
          .meta = "N",
          .dst = &o.threads,
          .lo = 0,
          .hi = 1024,
          .none = "all CPUs",
          .help = "compute threads" },
        { .type = ARG_FLAG, .name = "think", .dst = &o.think, .help = "let the model think first" },
        { .type = ARG_ENUM, .name = "act", .dst = &act, .choices = acts, .help = "inputs of NVFP4 Linears" },
    };
    const arg_spec spec = { .usage = "bench_word_problems [options] PROBLEMS.jsonl MODEL_DIR...",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .min_positional = 2,
                            .max_positional = -1 };
    arg_strings pos = { 0 };
    buf text = { 0 };
    err e = { 0 };
    bool help = false, ok = args_parse(&spec, argc, argv, &pos, &help, &e);
    if (ok && help) {
        args_help(&text, &spec);
        fwrite(text.p, 1, text.n, stdout);
    } else if (ok) {
        log_set_level(0);
        o.act = (act_mode)act;
        ok = file_read(&text, pos.v[0], 64 << 20, &e);
        for (int i = 1; ok && i < pos.n; i++) ok = one_model(pos.v[i], buf_view(&text), &o, &e);
    }
    if (!ok) fprintf(stderr, "bench_word_problems: %s: %s\n", e.id, e.msg);
    buf_free(&text);
    arg_strings_free(&pos);
    return err_exit_code(e.kind);
}
