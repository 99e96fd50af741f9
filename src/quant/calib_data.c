#include "quant/calib_data.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"

enum { MAX_FILE = 1 << 30 };

typedef struct reader {
    tokenizer *tok;
    chat_template *tmpl; /* NULL: no template, messages are refused */
    const calib_source *s;
    calib_data *out;
    int skipped;
} reader;

static bool reader_open(reader *r, const calib_source *s, calib_data *out, err *e) {
    *r = (reader){ .s = s, .out = out };
    if (!tokenizer_open(&r->tok, s->model_dir, e)) return false;
    err none = { 0 };
    if (!template_open(&r->tmpl, s->model_dir, &none)) r->tmpl = NULL;
    return true;
}

static void reader_close(reader *r) {
    tokenizer_close(r->tok);
    template_close(r->tmpl);
}

static bool enough(const reader *r) { return r->s->samples > 0 && r->out->n >= r->s->samples; }

/* One sample; `split` makes as many sequences of `seq` tokens as the text has. */
static bool add_text(reader *r, str text, bool split, err *e) {
    id_list v = { 0 };
    const size_t seq = r->s->seq > 0 ? (size_t)r->s->seq : SIZE_MAX;
    const bool ok = tokenizer_encode(r->tok, &v, text, NULL, e);
    for (size_t at = 0; ok && at < v.n && !enough(r); at += seq) {
        calib_data_add(r->out, v.v + at, v.n - at < seq ? v.n - at : seq);
        if (!split) break;
    }
    ids_free(&v);
    return ok;
}

/* A conversation that ends with the assistant's words is complete: no opening of another turn behind it, unless the line
 * itself says so. The request with that said, in `mem`. */
static const json *complete_request(arena *mem, const json *v) {
    const json *messages = json_get(v, "messages");
    if (messages->n == 0) return v;
    const json *role = json_get(&messages->u.items[messages->n - 1], "role");
    if (!json_is(role, JSON_STRING) || !str_eq(json_str(role), STR("assistant")) ||
        json_get(v, "add_generation_prompt"))
        return v;
    json_member *members = arena_take(mem, (size_t)v->n + 1, sizeof *members);
    json *whole = arena_take(mem, 1, sizeof *whole);
    CHECK(members && whole, "out of memory");
    memcpy(members, v->u.members, v->n * sizeof *members);
    members[v->n] = (json_member){ .key = STR("add_generation_prompt"), .value = { .type = JSON_FALSE } };
    *whole = (json){ .type = JSON_OBJECT, .n = v->n + 1, .u.members = members };
    return whole;
}

/* "kind" or "class" of a line goes with the sequence that it became. */
static void name_kind(calib_data *d, int before, const json *v) {
    const json *kind = json_get(v, "kind");
    if (!kind) kind = json_get(v, "class");
    for (int i = before; i < d->n && json_is(kind, JSON_STRING); i++)
        snprintf(d->kind[i], sizeof d->kind[i], STR_FMT, STR_ARG(json_str(kind)));
}

static bool add_line(reader *r, arena *mem, const json *v, const char *path, int line, err *e) {
    const json *text = json_is(v, JSON_STRING) ? v : json_get(v, "text");
    if (json_is(text, JSON_STRING)) return add_text(r, json_str(text), false, e);
    if (!json_is(json_get(v, "messages"), JSON_ARRAY))
        return fail(e, ERR_INPUT, "E-CALIB-LINE", "%s: line %d: neither `messages` nor `text`", path, line);
    buf rendered = { 0 };
    err refused = { 0 };
    bool ok = true;
    if (r->tmpl && template_render(r->tmpl, &rendered, complete_request(mem, v), &refused))
        ok = add_text(r, buf_view(&rendered), false, e);
    else
        r->skipped++;
    buf_free(&rendered);
    return ok;
}

static bool add_lines(reader *r, str text, const char *path, err *e) {
    int line = 0;
    while (text.n > 0 && !enough(r)) {
        const char *end = memchr(text.p, '\n', text.n);
        const str one = { text.p, end ? (size_t)(end - text.p) : text.n };
        text = str_skip(text, end ? one.n + 1 : one.n);
        line++;
        if (one.n == 0 || (one.n == 1 && one.p[0] == '\r')) continue;
        arena mem = { 0 };
        const json *v;
        err mine = { 0 };
        bool ok = json_parse(&v, &mem, one, path, NULL, &mine);
        if (!ok) fail(e, ERR_INPUT, "E-CALIB-LINE", "%s: line %d: %s", path, line, mine.msg);
        const int before = r->out->n;
        ok = ok && add_line(r, &mem, v, path, line, e);
        name_kind(r->out, before, v);
        arena_free(&mem);
        if (!ok) return false;
    }
    return true;
}

bool calib_data_file(calib_data *out, const calib_source *s, const char *path, const char *label, err *e) {
    reader r;
    buf text = { 0 };
    *out = (calib_data){ 0 };
    if (!reader_open(&r, s, out, e)) return false;
    bool ok = file_read(&text, path, MAX_FILE, e);
    if (ok) {
        const bool lines = str_ends(str_of(path), STR(".jsonl")) || (text.n && text.p[0] == '{');
        ok = lines ? add_lines(&r, buf_view(&text), path, e) : add_text(&r, buf_view(&text), true, e);
    }
    if (ok && out->n == 0) ok = fail(e, ERR_INPUT, "E-CALIB-EMPTY", "%s: no text to calibrate with", path);
    if (ok && r.skipped)
        log_say("W-CALIB-SKIPPED", "%s: %d lines that the chat template refuses were left out", path, r.skipped);
    if (ok)
        snprintf(out->what, sizeof out->what, "%s: %d sequences, %lld tokens", label, out->n, (long long)out->tokens);
    buf_free(&text);
    reader_close(&r);
    if (!ok) calib_data_free(out);
    return ok;
}

static bool add_ids(calib_data *out, const json *v, const char *path, int seq, err *e) {
    id_list one = { 0 };
    for (uint32_t i = 0; i < v->n; i++) {
        const json *x = &v->u.items[i];
        if (!json_is(x, JSON_INT) || x->u.i < 0 || x->u.i > INT32_MAX) {
            ids_free(&one);
            return fail(e, ERR_INPUT, "E-CMD-IDS", "%s: sequence %d, element %u is not a token id", path, out->n, i);
        }
        ids_add(&one, (int32_t)x->u.i);
    }
    calib_data_add(out, one.v, seq > 0 && one.n > (size_t)seq ? (size_t)seq : one.n);
    ids_free(&one);
    return true;
}

bool calib_data_ids(calib_data *out, const char *path, int samples, int seq, err *e) {
    arena mem = { 0 };
    const json *v;
    *out = (calib_data){ 0 };
    bool ok = json_parse_file(&v, &mem, path, NULL, e);
    if (ok && json_is(v, JSON_OBJECT)) v = json_get(v, "sequences");
    if (ok && (!json_is(v, JSON_ARRAY) || v->n == 0))
        ok = fail(e, ERR_INPUT, "E-CMD-IDS",
                  "%s: expected a list of token ids, a list of lists, or an object with `sequences`", path);
    if (ok && v->u.items[0].type != JSON_ARRAY) {
        ok = add_ids(out, v, path, seq, e);
    } else {
        for (uint32_t i = 0; ok && i < v->n && (samples <= 0 || out->n < samples); i++)
            ok = json_is(&v->u.items[i], JSON_ARRAY)
                     ? add_ids(out, &v->u.items[i], path, seq, e)
                     : fail(e, ERR_INPUT, "E-CMD-IDS", "%s: element %u is no list", path, i);
    }
    if (ok && out->n == 0) ok = fail(e, ERR_INPUT, "E-CALIB-EMPTY", "%s: no tokens", path);
    if (ok)
        snprintf(out->what, sizeof out->what, "token ids of %s: %d sequences, %lld tokens", path, out->n,
                 (long long)out->tokens);
    arena_free(&mem);
    if (!ok) calib_data_free(out);
    return ok;
}

/* ---- the model's own text ---- */

static bool keep_token(void *ctx, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)logprob, (void)top, (void)values;
    ids_add(ctx, id);
    return true;
}

static bool continue_one(engine *g, session *s, id_list *tokens, int seq, uint64_t seed, int index, err *e) {
    gen_result r;
    const int room = seq - (int)tokens->n;
    if (room <= 0) return true;
    const int depth = s->drafting ? 2 : 0;
    const gen_options opt = { .max_tokens = room,
                              .depth = depth,
                              .stop_ids = g->config.stop_ids,
                              .n_stop_ids = g->config.stop_count,
                              .sampling = { .temperature = 1, .top_p = 1, .seed = seed, .choice = (uint32_t)index },
                              .on_token = keep_token,
                              .ctx = tokens };
    session_reset(s);
    return session_set(s, tokens->v, (int)tokens->n, e) && session_generate(s, &opt, &r, e);
}

bool calib_data_self(calib_data *out, const calib_source *s, const char *prompts_path, const ops_options *backend,
                     err *e) {
    calib_data prompts;
    engine *g = NULL;
    session one = { 0 };
    const int seq = s->seq > 0 ? s->seq : 512;
    *out = (calib_data){ 0 };
    if (!calib_data_file(&prompts, s, prompts_path, "prompts", e)) return false;
    const engine_options eo = { .ops = *backend, .ctx = seq + 1, .kv = KV_CACHE_F32, .need_text = true };
    err opened = { 0 };
    bool ok = engine_open(&g, s->model_dir, &eo, &opened);
    if (!ok && strcmp(opened.id, "E-ENGINE-CTX") == 0)
        fail(e, ERR_INPUT, "E-CALIB-LONG", "calibration: the model's context has no room for %d tokens (lower --seq)",
             seq);
    else if (!ok)
        *e = opened;
    ok = ok && session_open(&one, g, true, e);
    for (int i = 0; ok && i < prompts.n; i++) {
        if (s->cancel && *s->cancel)
            ok = fail(e, ERR_INTERRUPTED, "E-CALIB-STOPPED", "calibration: stopped");
        else
            ok = continue_one(g, &one, &prompts.v[i], seq, s->seed, i, e);
        if (ok) calib_data_add(out, prompts.v[i].v, prompts.v[i].n);
    }
    if (ok)
        snprintf(out->what, sizeof out->what, "the model's own text (seed %llu): %d sequences, %lld tokens",
                 (unsigned long long)s->seed, out->n, (long long)out->tokens);
    session_close(&one);
    engine_close(g);
    calib_data_free(&prompts);
    if (!ok) calib_data_free(out);
    return ok;
}
