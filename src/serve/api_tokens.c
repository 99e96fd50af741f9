/* POST /tokenize and /detokenize. */
#include "serve/api.h"

static chat_prompt *one_prompt(chat_request *r, fault *f) {
    chat_prompt *p = arena_take(r->mem, 1, sizeof *p);
    if (!p) return fault_set(f, 503, NULL, "no memory for the request"), NULL;
    *p = (chat_prompt){ 0 };
    r->prompts = p;
    r->n_prompts = 1;
    return p;
}

static bool parse_text(chat *c, const json *body, fault *f) {
    static const char *const known[] = { "model", "prompt", "add_special_tokens", "parse_special", NULL };
    chat_request *r = &c->request;
    chat_prompt *p = one_prompt(r, f);
    bool bos = false;
    if (!p) return false;
    chat_ignored(c, body, known);
    r->raw_special = true;
    if (!chat_check_model(c, body, f) || !body_str(body, "prompt", &p->text, f) ||
        !body_bool(body, "add_special_tokens", &bos, f) || !body_bool(body, "parse_special", &r->raw_special, f))
        return false;
    if (!body_get(body, "prompt")) return fault_field(f, "prompt", "prompt is missing");
    return true;
}

static void reply_ids(chat *c) {
    buf b = { 0 };
    buf_printf(&b, "{\"count\":%d,\"max_model_len\":%d,\"tokens\":[", c->prompt_tokens, c->model->ctx);
    for (size_t i = 0; i < c->prompt.n; i++) buf_printf(&b, "%s%d", i ? "," : "", c->prompt.v[i]);
    buf_puts(&b, "]}");
    chat_reply_headers(c);
    http_reply_json(c->call, 200, &b);
    buf_free(&b);
}

static bool parse_ids(chat *c, const json *body, fault *f) {
    static const char *const known[] = { "model", "tokens", NULL };
    chat_request *r = &c->request;
    const json *v = NULL;
    chat_prompt *p = one_prompt(r, f);
    if (!p) return false;
    chat_ignored(c, body, known);
    if (!chat_check_model(c, body, f) || !body_array(body, "tokens", &v, f)) return false;
    if (!v) return fault_field(f, "tokens", "tokens is missing");
    return api_read_ids(r->mem, v, "tokens", c->model->g->n.real_vocab, &p->ids, &p->n_ids, f);
}

static void reply_text(chat *c) {
    buf text = { 0 }, b = { 0 };
    err e = { 0 };
    fault f = { 0 };
    if (!tokenizer_decode(c->model->g->tok, &text, c->prompt.v, c->prompt.n, false, &e)) {
        fault_field(&f, "tokens", "%s", e.msg);
        chat_fail(c, &f);
    } else {
        buf_puts(&b, "{\"prompt\":");
        json_write_str(&b, buf_view(&text));
        buf_byte(&b, '}');
        chat_reply_headers(c);
        http_reply_json(c->call, 200, &b);
    }
    buf_free(&text);
    buf_free(&b);
}

const chat_dialect api_tokenize = { .path = "/tokenize", .parse = parse_text, .start = reply_ids, .count_only = true };
const chat_dialect api_detokenize = {
    .path = "/detokenize", .parse = parse_ids, .start = reply_text, .count_only = true
};
