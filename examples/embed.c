/* Two questions to one model at the same time; the second answer is cancelled after eight tokens (docs/EMBEDDING.md). */
#include <stdio.h>

#include "engine/engine.h"
#define ASK(text) "{\"messages\":[{\"role\":\"user\",\"content\":\"" text "\"}],\"enable_thinking\":false}"

typedef struct question {
    const char *request;
    loop *l;
    uint64_t handle;
    const tokenizer *tok;
    detok partial; /* bytes of a character that is not whole yet */
    buf text;
    int tokens, most; /* cancelled after so many; 0 = never */
    bool over, failed;
} question;

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    question *q = ctx;
    (void)choice, (void)logprob, (void)top, (void)values;
    detok_push(q->tok, &q->partial, id, true, &q->text);
    if (++q->tokens == q->most) loop_cancel(q->l, q->handle);
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e) {
    question *q = ctx;
    q->over = choice == 0;
    q->failed = e->id != NULL;
    detok_end(&q->partial, &q->text);
    printf(STR_FMT "\n[%s: %d prompt tokens, %d new, accept length %.2f]\n", STR_ARG(buf_view(&q->text)),
           e->id ? e->id : gen_finish_name(r->finish), r->prompt_tokens, r->output_tokens, gen_accept_length(r));
    buf_free(&q->text);
}

/* Request -> the checkpoint's chat template -> token ids -> the loop, which copies what it needs of them. */
static bool submit(question *q, loop *l, const engine *g, err *e) {
    arena mem = { 0 };
    buf prompt = { 0 };
    id_list ids = { 0 };
    const json *request;
    q->l = l;
    q->tok = g->tok;
    bool ok = json_parse(&request, &mem, str_of(q->request), "request", NULL, e) &&
              template_render(g->tmpl, &prompt, request, e) &&
              tokenizer_encode(g->tok, &ids, buf_view(&prompt), NULL, e);
    const loop_request r = { .prompt = ids.v,
                             .n_prompt = (int)ids.n,
                             .max_tokens = 64,
                             .depth = -1, /* the loop's */
                             .stop_ids = g->config.stop_ids,
                             .n_stop_ids = g->config.stop_count,
                             .on_token = on_token,
                             .on_done = on_done,
                             .ctx = q };
    ok = ok && loop_submit(l, &q->handle, &r, e);
    ids_free(&ids);
    buf_free(&prompt);
    arena_free(&mem);
    return ok;
}

int main(int argc, char **argv) {
    question a = { .request = ASK("Tom has 3 apples and buys 4. How many?") },
             b = { .request = ASK("Tell me a story."), .most = 8 };
    const engine_options eo = { .ops = { .isa = ISA_COUNT }, .slots = 2, .ctx = 1024, .need_text = true };
    engine *g = NULL;
    loop *l = NULL;
    err e = { 0 };
    bool ok = argc == 2 || fail(&e, ERR_USAGE, "E-USAGE", "usage: embed MODEL_DIR");
    ok = ok && engine_open(&g, argv[1], &eo, &e) && loop_open(&l, g, &(loop_options){ .depth = 2 }, &e) &&
         submit(&a, l, g, &e) && submit(&b, l, g, &e);
    while (ok && !(a.over && b.over)) loop_step(l);
    const loop_stats s = ok ? loop_counted(l) : (loop_stats){ 0 };
    printf("%lld finished, %lld cancelled\n", (long long)s.finished, (long long)s.cancelled);
    loop_close(l);
    engine_close(g);
    if (!ok) fprintf(stderr, "embed: %s: %s\n", e.id, e.msg);
    return ok ? a.failed || b.failed : err_exit_code(e.kind);
}
