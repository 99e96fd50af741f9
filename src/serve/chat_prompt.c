/* Request to prompt: the template's variables, the rendered text, token ids.
 *
 * Only the template may make control tokens. A special token that text of the request spells is broken up before rendering by
 * a mark (a noncharacter the request does not use); afterwards the marks go, and what they stood in is encoded as text. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/chat.h"
#include "text/split.h"

/* ---- template variables ---- */

static bool is_reserved(str key) {
    static const char *const names[] = { "messages", "tools", "add_generation_prompt", "continue_final_message" };
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (str_is(key, names[i])) return true;
    return false;
}

static bool write_variables(buf *out, const chat *c, fault *f) {
    const chat_request *r = &c->request;
    buf_puts(out, "{\"messages\":");
    json_write(out, r->messages);
    if (r->tools && r->tool_choice != TOOLS_NONE) {
        buf_puts(out, ",\"tools\":");
        json_write(out, r->tools);
    }
    buf_printf(out, ",\"add_generation_prompt\":%s", r->generation_prompt && !r->continue_final ? "true" : "false");
    bool has_thinking = false, has_effort = false;
    for (uint32_t i = 0; r->template_args && i < r->template_args->n; i++) {
        const json_member *m = &r->template_args->u.members[i];
        if (is_reserved(m->key))
            return fault_field(f, "chat_template_kwargs", "chat_template_kwargs: '" STR_FMT "' cannot be set here",
                               STR_ARG(m->key));
        if (str_is(m->key, "enable_thinking")) {
            if (r->thinking >= 0) continue;
            has_thinking = true;
        }
        if (str_is(m->key, "reasoning_effort")) has_effort = true;
        buf_byte(out, ',');
        json_write_str(out, m->key);
        buf_byte(out, ':');
        json_write(out, &m->value);
    }
    const int thinking = r->thinking >= 0 ? r->thinking : c->model->thinking;
    if (!has_thinking && thinking >= 0) buf_printf(out, ",\"enable_thinking\":%s", thinking ? "true" : "false");
    if (!has_effort && r->reasoning_effort.n) {
        buf_puts(out, ",\"reasoning_effort\":");
        json_write_str(out, r->reasoning_effort);
    }
    buf_byte(out, '}');
    return true;
}

/* ---- control tokens in the request's text ---- */

typedef struct specials {
    const tokenizer *t;
    int32_t *ids;
    int n;
} specials;

static void find_specials(specials *s, const chat_model *m, str text) {
    *s = (specials){ .t = m->g->tok };
    for (int i = 0; i < m->n_special; i++) {
        if (str_find(text, tokenizer_bytes(s->t, m->special[i])) < 0) continue;
        s->ids = xrealloc(s->ids, (size_t)(s->n + 1) * sizeof *s->ids);
        s->ids[s->n++] = m->special[i];
    }
}

/* The longest of them that begins at p; *id. 0: none. */
static size_t special_at(const specials *s, str text, size_t at, int32_t *id) {
    size_t best = 0;
    for (int i = 0; i < s->n; i++) {
        const str content = tokenizer_bytes(s->t, s->ids[i]);
        if (content.n > best && str_starts(str_skip(text, at), content)) {
            best = content.n;
            *id = s->ids[i];
        }
    }
    return best;
}

/* A noncharacter U+FDD0..U+FDEF that does not occur in text. */
static bool pick_mark(char mark[4], str text) {
    for (int i = 0; i < 32; i++) {
        mark[0] = (char)0xef;
        mark[1] = (char)0xb7;
        mark[2] = (char)(0x90 + i);
        mark[3] = 0;
        if (str_find(text, (str){ mark, 3 }) < 0) return true;
    }
    return false;
}

/* text with a mark behind the first character of every special token it spells. */
static void add_marks(buf *out, const specials *s, str text, const char *mark) {
    for (size_t i = 0; i < text.n;) {
        int32_t id;
        const size_t n = special_at(s, text, i, &id);
        if (!n) {
            buf_byte(out, text.p[i++]);
            continue;
        }
        size_t first = 1;
        while (first < n && ((unsigned char)text.p[i + first] & 0xc0) == 0x80) first++;
        buf_add(out, text.p + i, first);
        buf_puts(out, mark);
        buf_add(out, text.p + i + first, n - first);
        i += n;
    }
}

/* Rendered text with marks: without them into *plain, ids into *ids. */
static bool encode_marked(const chat *c, id_list *ids, buf *plain, const buf *rendered, const char *mark, err *e) {
    const tokenizer *t = c->model->g->tok;
    const encode_options as_text = { .no_special = true };
    specials s;
    find_specials(&s, c->model, buf_view(rendered));
    const str text = buf_view(rendered);
    size_t from = plain->n;
    bool ok = true;
    for (size_t i = 0; ok && i < text.n;) {
        int32_t id;
        if (str_starts(str_skip(text, i), (str){ mark, 3 })) {
            i += 3;
            continue;
        }
        const size_t n = special_at(&s, text, i, &id);
        if (!n) {
            buf_byte(plain, text.p[i++]);
            continue;
        }
        ok = tokenizer_encode(t, ids, str_skip(buf_view(plain), from), &as_text, e);
        ids_add(ids, id);
        buf_add(plain, text.p + i, n);
        from = plain->n;
        i += n;
    }
    ok = ok && (plain->n == from || tokenizer_encode(t, ids, str_skip(buf_view(plain), from), &as_text, e));
    free(s.ids);
    return ok;
}

/* ---- rendering ---- */

static bool err_to_field(fault *f, const char *param, const err *e) {
    return e->kind == ERR_INPUT ? fault_field(f, param, "%s", e->msg) : fault_of(f, e);
}

/* Keep the rendered text up to the end of the final message, as HF does. */
static bool cut_final(const chat *c, buf *text, fault *f) {
    const json *last = &c->request.messages->u.items[c->request.messages->n - 1];
    str content = json_str(json_get(last, "content"));
    if (!str_is(json_str(json_get(last, "role")), "assistant"))
        return fault_field(f, "continue_final_message",
                           "continue_final_message: the last message is not an assistant's");
    while (content.n && strchr(" \t\r\n", content.p[content.n - 1])) content.n--;
    while (content.n && strchr(" \t\r\n", content.p[0])) content = str_skip(content, 1);
    ptrdiff_t at = -1;
    for (size_t from = 0; content.n;) {
        const ptrdiff_t next = str_find(str_skip(buf_view(text), from), content);
        if (next < 0) break;
        at = (ptrdiff_t)from + next;
        from = (size_t)at + 1;
    }
    if (at < 0)
        return fault_field(f, "continue_final_message",
                           "continue_final_message: the template does not show the last message as it is");
    buf_truncate(text, (size_t)at + content.n);
    return true;
}

static bool render(chat *c, buf *variables, buf *text, fault *f) {
    err e = { 0 };
    const json *tree = chat_json(&c->mem, variables);
    if (!tree) return fault_field(f, "messages", "the request is nested too deeply or too large");
    if (!c->model->g->tmpl)
        return fault_set(f, 400, "no_chat_template", "this model has no chat template (use /v1/completions)");
    if (!template_render(c->model->g->tmpl, text, tree, &e)) return err_to_field(f, "messages", &e);
    return true;
}

static bool from_messages(chat *c, fault *f) {
    buf variables = { 0 }, marked = { 0 }, text = { 0 };
    char mark[4] = "";
    err e = { 0 };
    specials s = { 0 };
    const tokenizer *t = c->model->g->tok;
    bool ok = write_variables(&variables, c, f);
    if (ok) find_specials(&s, c->model, buf_view(&variables));
    if (ok && s.n) {
        if (!pick_mark(mark, buf_view(&variables)))
            ok = fault_field(f, "messages", "messages spell control tokens and every noncharacter U+FDD0 to U+FDEF");
        else
            add_marks(&marked, &s, buf_view(&variables), mark);
    }
    ok = ok && render(c, s.n ? &marked : &variables, &text, f);
    if (ok && c->request.continue_final && s.n)
        ok = fault_field(f, "continue_final_message", "continue_final_message: messages spell control tokens");
    ok = ok && (!c->request.continue_final || cut_final(c, &text, f));
    if (ok) {
        const bool encoded = s.n ? encode_marked(c, &c->prompt, &c->rendered, &text, mark, &e)
                                 : tokenizer_encode(t, &c->prompt, buf_view(&text), NULL, &e);
        if (!encoded) ok = err_to_field(f, "messages", &e);
        if (ok && !s.n) buf_str(&c->rendered, buf_view(&text));
    }
    if (ok) c->thinks = split_prompt_thinks(buf_view(&c->rendered));
    free(s.ids);
    buf_free(&variables);
    buf_free(&marked);
    buf_free(&text);
    return ok;
}

static bool from_plain(chat *c, const chat_prompt *p, fault *f) {
    err e = { 0 };
    const encode_options o = { .no_special = !c->request.raw_special, .bos = true };
    for (int i = 0; i < p->n_ids; i++) ids_add(&c->prompt, p->ids[i]);
    return p->ids || tokenizer_encode(c->model->g->tok, &c->prompt, p->text, &o, &e) || err_to_field(f, "prompt", &e);
}

static bool check_part(const chat *c, const chat_part *p, fault *f) {
    const int ctx = c->model->ctx;
    err e = { 0 };
    if (p->n >= ctx)
        return fault_set(
            f, 400, "context_length_exceeded",
            "the prompt has %d tokens, and this server's context length is %d (one position at least is for the "
            "answer)",
            p->n, ctx);
    return engine_check_prompt(c->model->g, c->prompt.v + p->from, p->n, &e) || err_to_field(f, "prompt", &e);
}

bool chat_name_prompt(fault *f, int prompt) {
    char said[sizeof f->message];
    memcpy(said, f->message, sizeof said);
    snprintf(f->message, sizeof f->message, "prompt %d: %.*s", prompt, (int)sizeof said - 24, said);
    return false;
}

static bool make_parts(chat *c, fault *f) {
    const chat_request *r = &c->request;
    c->n_parts = r->messages ? 1 : r->n_prompts;
    c->n_choices = c->n_parts * r->n;
    c->parts = xcalloc((size_t)c->n_parts, sizeof *c->parts);
    for (int i = 0; i < c->n_parts; i++) {
        chat_part *p = &c->parts[i];
        *p = (chat_part){ .owner = c, .from = (int)c->prompt.n, .first = i * r->n };
        bool ok = r->messages ? from_messages(c, f) : from_plain(c, &r->prompts[i], f);
        p->n = (int)c->prompt.n - p->from;
        ok = ok && (c->dialect->count_only || check_part(c, p, f));
        if (!ok) return c->n_parts > 1 ? chat_name_prompt(f, i) : false;
    }
    return true;
}

bool chat_make_prompt(chat *c, fault *f) {
    const bool ok = make_parts(c, f);
    c->prompt_tokens = (int)c->prompt.n;
    return ok;
}
