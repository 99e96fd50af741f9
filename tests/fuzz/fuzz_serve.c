/* Any bytes as the body of any POST endpoint: a prompt, or a fault that says which status and why, as JSON.
 * First byte: the endpoint. */
#include <stdlib.h>
#include <string.h>

#include "serve/api.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static const chat_dialect *const dialects[] = {
    &api_chat,       &api_completions, &api_render,    &api_tokenize,
    &api_detokenize, &api_responses,   &api_anthropic, &api_anthropic_count
};

/* As much of an engine as preparing looks at. */
static chat_model *model(void) {
    static engine g;
    static chat_model m;
    static int32_t special[64];
    if (m.g) return &m;
    err e = { 0 };
    CHECK(tokenizer_open(&g.tok, "assets/qwen36-tiny", &e) && template_open(&g.tmpl, "assets/qwen36-tiny", &e), "%s",
          e.msg);
    g.st.capacity = 4096;
    g.n.real_vocab = g.config.vocab = 1570;
    m = (chat_model){
        .name = "tiny", .g = &g, .ctx = 4096, .max_choices = 64, .max_answers = 72, .thinking = -1, .special = special
    };
    m.defaults = (sampler_params){ .temperature = 1, .top_p = 1 };
    for (int id = 0; id < tokenizer_vocab(g.tok) && m.n_special < 64; id++)
        if (tokenizer_is_special(g.tok, id)) special[m.n_special++] = id;
    return &m;
}

static void check_fault(const fault *f) {
    buf b = { 0 };
    arena a = { 0 };
    const json *v;
    err e = { 0 };
    CHECK(f->status == 400 || f->status == 404 || f->status == 413 || f->status == 503, "status %d", f->status);
    CHECK(f->message[0], "no message");
    fault_write(&b, f);
    CHECK(json_parse(&v, &a, buf_view(&b), "fault", NULL, &e) && json_is(json_get(v, "error"), JSON_OBJECT), "%s",
          e.msg);
    buf_free(&b);
    arena_free(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    if (n == 0) return 0;
    const chat_model *m = model();
    const chat_dialect *d = dialects[p[0] % ARRAY_LEN(dialects)];
    chat *c = chat_new(d, m, NULL);
    fault f = { 0 };
    if (chat_prepare(c, (str){ (const char *)p + 1, n - 1 }, &f)) {
        int all = 0;
        for (int i = 0; i < c->n_parts; all += c->parts[i++].n)
            CHECK(c->parts[i].from == all && (d->count_only || (c->parts[i].n > 0 && c->parts[i].n < m->ctx)),
                  "prompt %d of %d tokens", i, c->parts[i].n);
        CHECK(f.status == 0 && all == c->prompt_tokens && c->n_choices == c->n_parts * c->request.n, "%d tokens", all);
        CHECK(c->request.n >= 1 && c->request.n <= CHAT_MAX_CHOICES && c->request.max_tokens >= 0, "n %d",
              c->request.n);
        for (int i = 0; i < c->request.n_stops; i++) CHECK(c->request.stops[i][0], "an empty stop string");
    } else {
        check_fault(&f);
    }
    chat_free(c);
    return 0;
}
