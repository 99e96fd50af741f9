#include "text/template.h"

#include <stdlib.h>

#include "base/arena.h"
#include "base/file.h"
#include "text/jinja.h"

enum { TEMPLATE_MAX_BYTES = 1 << 20, CONFIG_MAX_BYTES = 64 << 20 };

struct chat_template {
    jinja *main, *with_tools; /* with_tools: NULL unless the checkpoint has a template of its own for tools */
    str source;
    arena mem; /* source text and tokenizer_config.json */
    jinja_var *tokens;
    size_t n_tokens, cap_tokens;
};

static chat_template *template_new(void) { return xcalloc(1, sizeof(chat_template)); }

void template_close(chat_template *t) {
    if (!t) return;
    jinja_free(t->main);
    jinja_free(t->with_tools);
    free(t->tokens);
    arena_free(&t->mem);
    free(t);
}

static bool compile_text(chat_template *t, str text, err *e) {
    t->source = arena_str(&t->mem, text);
    if (!t->source.p) return fail(e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory");
    return jinja_compile(&t->main, t->source, e);
}

static bool compile_file(chat_template *t, const char *path, err *e) {
    buf b = { 0 };
    bool ok = file_read(&b, path, TEMPLATE_MAX_BYTES, e);
    if (ok && !compile_text(t, buf_view(&b), e)) ok = fail_prefix(e, "%s", path);
    buf_free(&b);
    return ok;
}

/* ---- tokenizer_config.json ---- */

static bool parse_config(arena *a, const json **out, const char *dir, err *e) {
    char *path = path_join(dir, "tokenizer_config.json");
    const json_limits limits = { .max_bytes = CONFIG_MAX_BYTES, .allow_duplicates = true };
    *out = NULL;
    const bool ok = !file_exists(path) || json_parse_file(out, a, path, &limits, e);
    free(path);
    return ok;
}

static void add_token(chat_template *t, jinja_var v) {
    if (t->n_tokens == t->cap_tokens) {
        t->cap_tokens = t->cap_tokens ? t->cap_tokens * 2 : 8;
        t->tokens = xrealloc(t->tokens, t->cap_tokens * sizeof *t->tokens);
    }
    t->tokens[t->n_tokens++] = v;
}

static const json *token_text(const json *v) {
    if (json_is(v, JSON_OBJECT)) v = json_get(v, "content");
    return json_is(v, JSON_STRING) ? v : NULL;
}

/* bos_token and the like; unset ones stay undefined, as in HF. */
static void read_tokens(chat_template *t, const json *config) {
    if (!json_is(config, JSON_OBJECT)) return;
    for (uint32_t i = 0; i < config->n; i++) {
        const json_member *m = &config->u.members[i];
        if (str_is(m->key, "additional_special_tokens") && json_is(&m->value, JSON_ARRAY)) {
            add_token(t, (jinja_var){ .name = m->key, .value = &m->value });
        } else if (str_is(m->key, "extra_special_tokens") && json_is(&m->value, JSON_OBJECT)) {
            read_tokens(t, &m->value);
        } else if (str_ends(m->key, STR("_token")) && token_text(&m->value)) {
            add_token(t, (jinja_var){ .name = m->key, .value = token_text(&m->value) });
        }
    }
}

bool template_read_tokens(chat_template *t, const char *dir, err *e) {
    const json *config;
    if (!parse_config(&t->mem, &config, dir, e)) return false;
    read_tokens(t, config);
    return true;
}

static const json *named_template(const json *list, const char *name) {
    for (uint32_t i = 0; i < list->n; i++) {
        const json *n = json_get(&list->u.items[i], "name"), *text = json_get(&list->u.items[i], "template");
        if (json_is(n, JSON_STRING) && json_is(text, JSON_STRING) && str_is(json_str(n), name)) return text;
    }
    return NULL;
}

static bool compile_config(chat_template *t, const json *config, const char *dir, err *e) {
    const json *v = json_get(config, "chat_template"), *tools = NULL;
    if (json_is(v, JSON_ARRAY)) {
        tools = named_template(v, "tool_use");
        v = named_template(v, "default");
    }
    if (!json_is(v, JSON_STRING))
        return fail(e, ERR_INPUT, "E-TEMPLATE-MISSING",
                    "%s: no chat_template.jinja, and no chat_template in tokenizer_config.json (give --template FILE)",
                    dir);
    if (!compile_text(t, json_str(v), e)) return fail_prefix(e, "%s/tokenizer_config.json", dir);
    if (tools && !jinja_compile(&t->with_tools, json_str(tools), e))
        return fail_prefix(e, "%s/tokenizer_config.json: tool_use", dir);
    return true;
}

static bool open_dir(chat_template *t, const char *dir, err *e) {
    const json *config;
    if (!file_is_dir(dir)) return fail(e, ERR_INPUT, "E-FILE-OPEN", "%s: no such directory", dir);
    if (!parse_config(&t->mem, &config, dir, e)) return false;
    read_tokens(t, config);
    char *path = path_join(dir, "chat_template.jinja");
    const bool ok = file_exists(path) ? compile_file(t, path, e) : compile_config(t, config, dir, e);
    free(path);
    return ok;
}

static bool finish(chat_template **out, chat_template *t, bool ok) {
    if (!ok) template_close(t);
    *out = ok ? t : NULL;
    return ok;
}

bool template_open(chat_template **out, const char *dir, err *e) {
    chat_template *t = template_new();
    return finish(out, t, open_dir(t, dir, e));
}

bool template_open_file(chat_template **out, const char *path, err *e) {
    chat_template *t = template_new();
    return finish(out, t, compile_file(t, path, e));
}

/* ---- rendering ---- */

bool template_render(const chat_template *t, buf *out, const json *request, err *e) {
    static const json none = { .type = JSON_NULL }, yes = { .type = JSON_TRUE };
    if (!json_is(request, JSON_OBJECT))
        return fail(e, ERR_INPUT, "E-TEMPLATE-REQUEST", "request: not a JSON object (it needs at least messages)");
    size_t n = 0;
    jinja_var *v = malloc((t->n_tokens + 3 + request->n) * sizeof *v);
    if (!v) return fail(e, ERR_MACHINE, "E-TEMPLATE-MEMORY", "chat template: out of memory");
    v[n++] = (jinja_var){ .name = STR("tools"), .value = &none };
    v[n++] = (jinja_var){ .name = STR("documents"), .value = &none };
    v[n++] = (jinja_var){ .name = STR("add_generation_prompt"), .value = &yes };
    if (t->n_tokens) memcpy(v + n, t->tokens, t->n_tokens * sizeof *v);
    n += t->n_tokens;
    for (uint32_t i = 0; i < request->n; i++)
        v[n++] = (jinja_var){ .name = request->u.members[i].key, .value = &request->u.members[i].value };
    const json *tools = json_get(request, "tools");
    const bool has_tools = tools && tools->type != JSON_NULL && !(tools->type == JSON_ARRAY && tools->n == 0);
    const bool ok = jinja_render(has_tools && t->with_tools ? t->with_tools : t->main, out, v, n, NULL, e);
    free(v);
    return ok;
}

/* ---- traits ---- */

template_traits template_describe(const chat_template *t) {
    buf b = { 0 };
    str s = t->source;
    for (ptrdiff_t at; (at = str_find(s, STR("{#"))) >= 0;) { /* comments say nothing about behaviour */
        buf_add(&b, s.p, (size_t)at);
        const ptrdiff_t end = str_find(str_skip(s, (size_t)at), STR("#}"));
        s = end < 0 ? str_skip(s, s.n) : str_skip(s, (size_t)(at + end) + 2);
    }
    buf_str(&b, s);
    s = buf_view(&b);
    const template_traits x = {
        .tools = t->with_tools || str_find(s, STR("tools")) >= 0,
        .thinking_switch = str_find(s, STR("enable_thinking")) >= 0,
        .system = str_find(s, STR("'system'")) >= 0 || str_find(s, STR("\"system\"")) >= 0,
        .images = str_find(s, STR("image")) >= 0,
        .reasoning_content = str_find(s, STR("reasoning_content")) >= 0,
    };
    buf_free(&b);
    return x;
}
