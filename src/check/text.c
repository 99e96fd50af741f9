/* text.c - tokenizer, chat template and stop ids, tried out. */
#include "check/view.h"

#include <stdio.h>

#include "ckpt/index.h"
#include "text/template.h"
#include "text/tokenizer.h"

#define MARK "NIBBLEMARK"

static bool render(const chat_template *t, buf *out, const char *request, err *e) {
    arena mem = { 0 };
    const json *r;
    const bool ok = json_parse(&r, &mem, str_of(request), "request", NULL, e) && template_render(t, out, r, e);
    arena_free(&mem);
    return ok;
}

static bool is_stop(const check_view *v, int32_t id) {
    for (int i = 0; i < v->model.stop_count; i++)
        if (v->model.stop_ids[i] == id) return true;
    return false;
}

/* What the template writes behind an answer is what the model was taught to end with. */
static void check_turn_end(check_view *v, const chat_template *t, const tokenizer *k) {
    err e = { 0 };
    buf text = { 0 };
    id_list ids = { 0 };
    if (v->model.stop_count &&
        render(
            t, &text,
            "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"" MARK
            "\"}], \"add_generation_prompt\": false}",
            &e)) {
        const ptrdiff_t at = str_find(buf_view(&text), STR(MARK));
        const str rest = at < 0 ? (str){ "", 0 } : str_skip(buf_view(&text), (size_t)at + sizeof MARK - 1);
        if (tokenizer_encode(k, &ids, rest, NULL, &e) && ids.n && tokenizer_is_special(k, ids.v[0]) &&
            !is_stop(v, ids.v[0])) {
            const str token = tokenizer_bytes(k, ids.v[0]);
            finding_add(v->found, "C-STOP-TURN", NULL, STR("generation_config.json"),
                        "the template ends an answer with " STR_FMT " (%d), which is no stop id: answers would not end",
                        STR_ARG(token), ids.v[0]);
        }
    }
    ids_free(&ids);
    buf_free(&text);
}

static void check_template(check_view *v, const tokenizer *k) {
    chat_template *t;
    err e = { 0 };
    buf text = { 0 };
    if (!template_open(&t, v->dir, &e)) {
        if (!str_is(str_of(e.id), "E-TEMPLATE-MISSING"))
            finding_add(v->found, "C-TEXT-TEMPLATE", NULL, STR("chat template"), "%s", e.msg);
        return;
    }
    if (!render(t, &text, "{\"messages\": [{\"role\": \"user\", \"content\": \"" MARK "\"}]}", &e))
        finding_add(v->found, "C-TEXT-TEMPLATE", NULL, STR("chat template"), "it does not render one user message: %s",
                    e.msg);
    else if (str_find(buf_view(&text), STR(MARK)) < 0)
        finding_add(v->found, "C-TEXT-TEMPLATE", "drops", STR("chat template"), "it drops the user's message");
    else if (v->has_model && k && !v->bad_generation)
        check_turn_end(v, t, k);
    buf_free(&text);
    template_close(t);
}

static void check_stops(check_view *v, const tokenizer *k) {
    const model_config *c = &v->model;
    if (!c->stop_count)
        finding_add(v->found, "C-STOP-NONE", NULL, STR("eos_token_id"),
                    "neither generation_config.json nor config.json has a stop id");
    for (int i = 0; i < c->stop_count; i++) {
        char id[24];
        snprintf(id, sizeof id, "%d", c->stop_ids[i]);
        if (c->stop_ids[i] >= c->vocab)
            finding_add(v->found, "C-STOP-RANGE", NULL, str_of(id), "stop id %d is beyond the %d rows of the head",
                        c->stop_ids[i], c->vocab);
        else if (k && !tokenizer_exists(k, c->stop_ids[i]))
            finding_add(v->found, "C-STOP-RANGE", "token", str_of(id), "stop id %d is no token of the tokenizer",
                        c->stop_ids[i]);
    }
}

void view_text(check_view *v) {
    tokenizer *k = NULL;
    err e = { 0 };
    if (ckpt_entry_exists(v->dir, "tokenizer.json") && !tokenizer_open(&k, v->dir, &e)) {
        finding_add(v->found, "C-TEXT-TOKENIZER", NULL, STR("tokenizer.json"), "%s", e.msg);
        k = NULL;
    }
    if (v->has_model) {
        if (k && tokenizer_vocab(k) > v->model.vocab)
            finding_add(v->found, "C-TEXT-VOCAB", NULL, STR("tokenizer.json"),
                        "ids up to %d, but the embedding has %d rows", tokenizer_vocab(k) - 1, v->model.vocab);
        if (!v->bad_generation) check_stops(v, k);
    }
    check_template(v, k);
    if (k) tokenizer_close(k);
}
