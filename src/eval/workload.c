#include "eval/workload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "text/split.h"

enum { MAX_FILE = 1 << 30 };

typedef struct reader {
    workload *w;
    const tokenizer *tok;
    const chat_template *tmpl;
    const workload_options *o;
    buf shots; /* messages of the examples, each with a comma behind it */
    int seen;
} reader;

static void message(buf *b, const char *role, str content) {
    buf_printf(b, "{\"role\":\"%s\",\"content\":", role);
    json_write_str(b, content);
    buf_puts(b, "},");
}

static str text_of(const json *v, const char *key) {
    const json *x = json_get(v, key);
    return json_is(x, JSON_STRING) ? json_str(x) : (str){ "", 0 };
}

/* The messages of a line without the answer that a recorded conversation ends with. */
static void messages_of(buf *b, const json *list) {
    uint32_t n = list->n;
    while (n > 0 && str_is(text_of(&list->u.items[n - 1], "role"), "assistant")) n--;
    for (uint32_t i = 0; i < n; i++) {
        json_write(b, &list->u.items[i]);
        buf_byte(b, ',');
    }
}

/* The conversation as a JSON array; false: the line asks nothing. */
static bool conversation(buf *b, const reader *r, const json *v) {
    const json *messages = json_get(v, "messages");
    str question = text_of(v, "question");
    if (!question.n) question = text_of(v, "prompt");
    if (!question.n) question = text_of(v, "text");
    if (!question.n && !json_is(messages, JSON_ARRAY)) return false;
    buf_byte(b, '[');
    if (r->o->system) message(b, "system", str_of(r->o->system));
    buf_str(b, buf_view(&r->shots));
    if (json_is(messages, JSON_ARRAY))
        messages_of(b, messages);
    else
        message(b, "user", question);
    buf_truncate(b, b->n - (b->p[b->n - 1] == ','));
    buf_byte(b, ']');
    return true;
}

/* The request as `nibble render` takes it: the line's other keys (tools, ...) are variables of the template. */
static void request_of(buf *b, const reader *r, const json *v, str messages) {
    buf_byte(b, '{');
    for (uint32_t i = 0; json_is(json_get(v, "messages"), JSON_ARRAY) && i < v->n; i++) {
        const json_member *m = &v->u.members[i];
        if (str_is(m->key, "messages") || str_is(m->key, "enable_thinking") || str_is(m->key, "add_generation_prompt"))
            continue;
        json_write_str(b, m->key);
        buf_byte(b, ':');
        json_write(b, &m->value);
        buf_byte(b, ',');
    }
    if (r->o->think >= 0) buf_printf(b, "\"enable_thinking\":%s,", r->o->think ? "true" : "false");
    buf_puts(b, "\"add_generation_prompt\":true,\"messages\":");
    buf_str(b, messages);
    buf_byte(b, '}');
}

static bool add_item(reader *r, const id_list *ids, const json *v, str messages, bool thinks, err *e) {
    buf tools = { 0 };
    workload *w = r->w;
    w->v = xrealloc(w->v, (size_t)(w->n + 1) * sizeof *w->v);
    str question = text_of(v, "question");
    if (!question.n) question = text_of(v, "prompt");
    workload_item *i = &w->v[w->n];
    *i = (workload_item){ .ids = (int32_t *)(void *)arena_take(&w->mem, ids->n + 1, sizeof *i->ids),
                          .n = (int)ids->n,
                          .thinks = thinks };
    i->question = arena_str(&w->mem, question);
    i->answer = arena_str(&w->mem, text_of(v, "answer"));
    const json *at = json_get(v, "at"), *most = json_get(v, "max_tokens");
    i->at = json_is_number(at) ? json_double(at) : -1;
    i->max_tokens = json_is(most, JSON_INT) && most->u.i > 0 && most->u.i <= 1 << 20 ? (int)most->u.i : 0;
    i->messages = arena_str(&w->mem, messages);
    if (json_is(json_get(v, "tools"), JSON_ARRAY)) json_write(&tools, json_get(v, "tools"));
    i->tools = arena_str(&w->mem, buf_view(&tools));
    buf_free(&tools);
    if (!i->ids || !i->question.p || !i->answer.p || !i->messages.p || !i->tools.p)
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "no memory for the prompts");
    if (ids->n) memcpy(i->ids, ids->v, ids->n * sizeof *i->ids);
    w->n++;
    return true;
}

static bool given_ids(id_list *out, const json *list) {
    for (uint32_t i = 0; i < list->n; i++) {
        const json *x = &list->u.items[i];
        if (!json_is(x, JSON_INT) || x->u.i < 0 || x->u.i > INT32_MAX) return false;
        ids_add(out, (int32_t)x->u.i);
    }
    return list->n > 0;
}

static bool one_line(reader *r, const json *v, err *e) {
    if (r->o->kind && !str_is(text_of(v, "kind"), r->o->kind)) return true;
    const json *ids = json_get(v, "ids");
    buf request = { 0 }, prompt = { 0 }, messages = { 0 };
    id_list list = { 0 };
    arena mem = { 0 };
    bool ok;
    if (r->seen++ < r->o->shots) { /* an example for the others */
        const str q = text_of(v, "question"), a = text_of(v, "answer");
        if (!q.n || !a.n) return fail(e, ERR_INPUT, "E-EVAL-LINE", "an example needs `question` and `answer`");
        message(&r->shots, "user", q);
        message(&r->shots, "assistant", a);
        return true;
    }
    const json *q;
    if (json_is(ids, JSON_ARRAY) && !r->o->requests_only)
        ok = given_ids(&list, ids) || fail(e, ERR_INPUT, "E-EVAL-LINE", "`ids` holds something that is no token id");
    else if (!conversation(&messages, r, v))
        ok = fail(e, ERR_INPUT, "E-EVAL-LINE", "none of `question`, `prompt`, `text`, `messages`, `ids`");
    else if (r->o->requests_only)
        ok = true;
    else if (!r->tmpl || !r->tok)
        ok = fail(e, ERR_INPUT, "E-TEMPLATE-MISSING", "the model has no tokenizer or no chat template (give `ids`)");
    else {
        request_of(&request, r, v, buf_view(&messages));
        ok = json_parse(&q, &mem, buf_view(&request), "line", NULL, e) && template_render(r->tmpl, &prompt, q, e) &&
             tokenizer_encode(r->tok, &list, buf_view(&prompt), NULL, e);
    }
    ok = ok && add_item(r, &list, v, buf_view(&messages), split_prompt_thinks(buf_view(&prompt)), e);
    arena_free(&mem);
    buf_free(&request);
    buf_free(&messages);
    buf_free(&prompt);
    ids_free(&list);
    return ok;
}

bool workload_read(workload *w, const char *name, const char *path, const tokenizer *tok, const chat_template *tmpl,
                   const workload_options *o, err *e) {
    reader r = { .w = w, .tok = tok, .tmpl = tmpl, .o = o };
    buf text = { 0 };
    *w = (workload){ 0 };
    snprintf(w->name, sizeof w->name, "%s", name);
    bool ok = file_read(&text, path, MAX_FILE, e);
    str rest = buf_view(&text);
    for (int line = 1; ok && rest.n && (o->limit <= 0 || w->n < o->limit); line++) {
        const char *end = memchr(rest.p, '\n', rest.n);
        const str one = { rest.p, end ? (size_t)(end - rest.p) : rest.n };
        rest = str_skip(rest, end ? one.n + 1 : one.n);
        if (one.n == 0 || (one.n == 1 && one.p[0] == '\r')) continue;
        arena mem = { 0 };
        const json *v;
        err why = { 0 };
        if (!json_parse(&v, &mem, one, path, NULL, &why))
            ok = fail(e, ERR_INPUT, "E-EVAL-LINE", "%s: line %d: %s", path, line, why.msg);
        else
            ok = one_line(&r, v, e) || fail_prefix(e, "%s: line %d", path, line);
        arena_free(&mem);
    }
    if (ok && w->n == 0) ok = fail(e, ERR_INPUT, "E-CALIB-EMPTY", "%s: no prompt (beyond %d examples)", path, o->shots);
    buf_free(&text);
    buf_free(&r.shots);
    if (!ok) workload_free(w);
    return ok;
}

void workload_free(workload *w) {
    free(w->v);
    arena_free(&w->mem);
    *w = (workload){ 0 };
}
