/* nibble eval gsm8k: word problems with a number as the answer, in-process or over an OpenAI-compatible API. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "cmd/eval.h"
#include "eval/client.h"
#include "eval/question.h"
#include "text/reply.h"

typedef struct options {
    const char *data, *url, *model, *api_key, *out, *compare, *draft_head;
    int limit, shots, max_tokens, think, ctx, kv, act, sampling, concurrency, depth;
    int64_t seed, memory;
    double require, timeout;
    bool resume, has_require, has_depth;
} options;

typedef struct record {
    bool done, right, right_flexible, empty, truncated, failed;
    char strict[QUESTION_NUMBER], flexible[QUESTION_NUMBER];
    int64_t tokens, rounds, accepted;
} record;

typedef struct exam {
    const options *o;
    workload w;
    record *v; /* [w.n] */
    int fd;    /* of the transcripts; -1: none */
    engine *g;
    batch_item *items; /* in-process */
    int *index;        /* items[i] answers question index[i] */
    eval_progress p;
    int answered, total, next;
    client *c;
    bool write_failed;
    char why[200];    /* the first failure */
    char served[200]; /* the server's first model */
} exam;

/* ---- transcripts ---- */

/* What must be equal for two runs to be one. */
static void settings(buf *b, const options *o, const exam *x, const char *dir) {
    buf_puts(b, "{\"schema\":\"nibble.eval.gsm8k.transcript/1\",\"model\":");
    json_write_str(b, str_of(o->url ? o->model ? o->model : o->url : dir));
    buf_puts(b, ",\"data\":");
    json_write_str(b, str_of(o->data));
    buf_printf(b, ",\"questions\":%d,\"shots\":%d,\"think\":%d,\"sampling\":\"%s\",\"max_tokens\":%d,\"seed\":%lld}\n",
               x->w.n, o->shots, o->think, o->sampling ? "model" : "greedy", o->max_tokens, (long long)o->seed);
}

static void write_line(exam *x, const buf *b) {
    if (x->fd >= 0 && write(x->fd, b->p, b->n) != (ssize_t)b->n) x->write_failed = true;
}

static void number_or_null(buf *b, const char *key, const char *number) {
    buf_printf(b, ",\"%s\":", key);
    if (*number)
        json_write_str(b, str_of(number));
    else
        buf_puts(b, "null");
}

/* An answer has come: judge it, write it down. */
static void judge(exam *x, int i, str text, str thought, str finish, const char *error, int64_t tokens,
                  const gen_result *r) {
    record *q = &x->v[i];
    char want[QUESTION_NUMBER] = "";
    buf b = { 0 };
    question_expected(want, x->w.v[i].answer);
    *q = (record){ .done = true, .tokens = tokens, .failed = error != NULL };
    question_number(q->strict, text, true);
    question_number(q->flexible, text, false);
    q->right = !error && strcmp(q->strict, want) == 0;
    q->right_flexible = !error && strcmp(q->flexible, want) == 0;
    q->empty = !error && text.n == 0;
    q->truncated = !error && !str_is(finish, "stop");
    if (error && !x->why[0]) snprintf(x->why, sizeof x->why, "%s", error);
    if (r) q->rounds = r->rounds, q->accepted = r->accepted;
    buf_printf(&b, "{\"i\":%d,\"question\":", i);
    json_write_str(&b, x->w.v[i].question);
    number_or_null(&b, "expected", want);
    number_or_null(&b, "strict", q->strict);
    number_or_null(&b, "flexible", q->flexible);
    buf_printf(&b, ",\"right\":%s,\"right_flexible\":%s,\"finish\":", q->right ? "true" : "false",
               q->right_flexible ? "true" : "false");
    json_write_str(&b, finish);
    buf_printf(&b, ",\"tokens\":%lld,\"rounds\":%lld,\"accepted\":%lld,\"error\":", (long long)q->tokens,
               (long long)q->rounds, (long long)q->accepted);
    if (error)
        json_write_str(&b, str_of(error));
    else
        buf_puts(&b, "null");
    buf_puts(&b, ",\"reasoning\":");
    json_write_str(&b, thought);
    buf_puts(&b, ",\"output\":");
    json_write_str(&b, text);
    buf_puts(&b, "}\n");
    write_line(x, &b);
    buf_free(&b);
    x->answered++;
    eval_progress_show(&x->p, "questions", x->answered, x->total);
}

static int64_t int_of(const json *v, const char *key) {
    const json *x = json_get(v, key);
    return json_is(x, JSON_INT) ? x->u.i : 0;
}

static bool true_of(const json *v, const char *key) { return json_is(json_get(v, key), JSON_TRUE); }

static void number_of(char out[QUESTION_NUMBER], const json *v, const char *key) {
    const json *x = json_get(v, key);
    snprintf(out, QUESTION_NUMBER, "%.*s", json_is(x, JSON_STRING) ? (int)x->n : 0,
             json_is(x, JSON_STRING) ? x->u.s : "");
}

/* The records of a file of transcripts by question; *head: its first line. A last line without an end was cut off by a
 * stop and does not count; *whole: bytes up to it. */
static bool read_records(record *v, int n, buf *head, size_t *whole, const char *path, err *e) {
    buf text = { 0 };
    bool ok = file_read(&text, path, (size_t)1 << 30, e);
    str rest = buf_view(&text);
    *whole = 0;
    for (int line = 0; ok && rest.n; line++) {
        const char *end = memchr(rest.p, '\n', rest.n);
        if (!end) break;
        const str one = { rest.p, (size_t)(end - rest.p) };
        rest = str_skip(rest, one.n + 1);
        *whole += one.n + 1;
        if (line == 0) {
            buf_str(head, one);
            buf_byte(head, '\n');
            continue;
        }
        arena mem = { 0 };
        const json *j;
        err why = { 0 };
        if (!json_parse(&j, &mem, one, path, NULL, &why)) {
            ok = fail(e, ERR_INPUT, "E-EVAL-TRANSCRIPT", "%s: line %d: %s", path, line + 1, why.msg);
        } else {
            const int64_t i = json_is(json_get(j, "i"), JSON_INT) ? int_of(j, "i") : -1;
            if (i < 0 || i >= n) {
                ok = fail(e, ERR_INPUT, "E-EVAL-TRANSCRIPT", "%s: line %d: no question %lld here (other data?)", path,
                          line + 1, (long long)i);
            } else {
                record *q = &v[i];
                *q = (record){ .done = true,
                               .right = true_of(j, "right"),
                               .right_flexible = true_of(j, "right_flexible"),
                               .tokens = int_of(j, "tokens"),
                               .rounds = int_of(j, "rounds"),
                               .accepted = int_of(j, "accepted"),
                               .failed = json_is(json_get(j, "error"), JSON_STRING) };
                const json *out = json_get(j, "output"), *finish = json_get(j, "finish");
                number_of(q->strict, j, "strict");
                number_of(q->flexible, j, "flexible");
                q->empty = !q->failed && json_is(out, JSON_STRING) && out->n == 0;
                q->truncated = !q->failed && json_is(finish, JSON_STRING) && !str_is(json_str(finish), "stop");
            }
        }
        arena_free(&mem);
    }
    buf_free(&text);
    return ok;
}

static bool open_out(exam *x, const char *dir, err *e) {
    const options *o = x->o;
    buf mine = { 0 }, old = { 0 };
    size_t whole = 0;
    bool ok = true;
    x->fd = -1;
    if (!o->out) return true;
    settings(&mine, o, x, dir);
    const bool there = file_exists(o->out);
    if (there && !o->resume)
        ok = fail(e, ERR_INPUT, "E-EVAL-TRANSCRIPT", "%s: is there already (--resume goes on with it)", o->out);
    if (ok && there) {
        ok = read_records(x->v, x->w.n, &old, &whole, o->out, e);
        if (ok && old.n && !str_eq(buf_view(&old), buf_view(&mine)))
            ok = fail(e, ERR_INPUT, "E-EVAL-TRANSCRIPT", "%s: was made with other settings (its first line says which)",
                      o->out);
        for (int i = 0; ok && i < x->w.n; i++)
            if (x->v[i].failed) x->v[i] = (record){ 0 }; /* asked again */
    }
    if (ok) {
        x->fd = open(o->out, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        if (x->fd < 0 || ftruncate(x->fd, (off_t)whole) != 0 || lseek(x->fd, 0, SEEK_END) < 0)
            ok = fail(e, ERR_INPUT, "E-FILE-WRITE", "%s: %s", o->out, strerror(errno));
    }
    if (ok && whole == 0) write_line(x, &mine);
    buf_free(&mine);
    buf_free(&old);
    return ok;
}

/* ---- in-process ---- */

static void on_item(void *ctx, int index, int done) {
    exam *x = ctx;
    const batch_item *b = &x->items[index];
    reply r;
    (void)done;
    const int i = x->index[index];
    reply_init(&r, x->g->tok, x->w.v[i].thinks, NULL, NULL, 0);
    for (size_t k = 0; k < b->output.n; k++)
        if (!reply_push(&r, b->output.v[k])) break;
    reply_end(&r);
    const bool ok = !b->error.id;
    judge(x, i, buf_view(&r.text), buf_view(&r.thought), str_of(ok ? gen_finish_name(b->result.finish) : "error"),
          ok ? NULL : b->error.msg, (int64_t)b->output.n, &b->result);
    reply_free(&r);
}

static bool ask_engine(exam *x, double *seconds, err *e) {
    const options *o = x->o;
    const engine *g = x->g;
    sampler_params model = { 0 };
    int n = 0;
    if (o->sampling && !eval_model_sampling(&model, g, e)) return false;
    x->items = xcalloc((size_t)x->w.n, sizeof *x->items);
    x->index = xcalloc((size_t)x->w.n, sizeof *x->index);
    for (int i = 0; i < x->w.n; i++) {
        if (x->v[i].done) continue;
        sampler_params p = model;
        p.seed = (uint64_t)o->seed;
        p.choice = (uint32_t)i;
        x->index[n] = i;
        x->items[n++] = (batch_item){
            .prompt = x->w.v[i].ids, .n_prompt = x->w.v[i].n, .sampling = p, .max_tokens = o->max_tokens
        };
    }
    const batch_options bo = { .concurrency = o->concurrency,
                               .depth = !g->n.has_mtp ? 0 : o->depth,
                               .stop_ids = g->config.stop_ids,
                               .n_stop_ids = g->config.stop_count,
                               .on_item = on_item,
                               .ctx = x,
                               .cancel = cmd_interrupt() };
    const bool ok = batch_run(x->g, x->items, n, &bo, seconds, e);
    batch_free(x->items, n);
    free(x->items);
    free(x->index);
    return ok;
}

/* ---- over the wire ---- */

typedef struct asked {
    exam *x;
    int i;
} asked;

static void ask_next(exam *x);

static void judge_answer(exam *x, int i, const json *v) {
    const json *choices = json_get(v, "choices"),
               *first = json_is(choices, JSON_ARRAY) && choices->n ? &choices->u.items[0] : NULL;
    const json *message = json_get(first, "message"), *content = json_get(message, "content"),
               *thought = json_get(message, "reasoning_content"), *finish = json_get(first, "finish_reason"),
               *usage = json_get(v, "usage"), *spec = json_get(usage, "speculative");
    gen_result r = { 0 };
    const str none = { "", 0 };
    if (!thought) thought = json_get(message, "reasoning");
    r.rounds = int_of(spec, "rounds");
    r.accepted = int_of(spec, "accepted");
    if (!message)
        judge(x, i, none, none, STR("error"), "the answer holds no choices[0].message", 0, NULL);
    else
        judge(x, i, json_is(content, JSON_STRING) ? json_str(content) : none,
              json_is(thought, JSON_STRING) ? json_str(thought) : none,
              json_is(finish, JSON_STRING) ? json_str(finish) : none, NULL, int_of(usage, "completion_tokens"), &r);
}

static void on_end(void *ctx, int status, str body) {
    asked *a = ctx;
    exam *x = a->x;
    arena mem = { 0 };
    const json *v;
    err why = { 0 };
    char text[300];
    const str none = { "", 0 };
    if (status == 200 && json_parse(&v, &mem, body, "answer", NULL, &why)) {
        judge_answer(x, a->i, v);
    } else {
        if (status == 0)
            snprintf(text, sizeof text, "no answer (connection refused, closed, or silent for %.0f s)", x->o->timeout);
        else if (status == 200)
            snprintf(text, sizeof text, "%.200s", why.msg);
        else
            snprintf(text, sizeof text, "status %d: %.*s", status, (int)(body.n < 200 ? body.n : 200), body.p);
        judge(x, a->i, none, none, STR("error"), text, 0, NULL);
    }
    arena_free(&mem);
    free(a);
    if (!*cmd_interrupt()) ask_next(x);
}

static void ask_next(exam *x) {
    const options *o = x->o;
    while (x->next < x->w.n && x->v[x->next].done) x->next++;
    if (x->next >= x->w.n) return;
    const int i = x->next++;
    asked *a = xcalloc(1, sizeof *a);
    *a = (asked){ x, i };
    buf b = { 0 };
    buf_puts(&b, "{\"model\":");
    json_write_str(&b, str_of(o->model ? o->model : x->served));
    buf_printf(&b, ",\"max_tokens\":%d,\"seed\":%lld", o->max_tokens, (long long)o->seed + i);
    if (!o->sampling) buf_puts(&b, ",\"temperature\":0");
    if (o->think >= 0)
        buf_printf(&b, ",\"chat_template_kwargs\":{\"enable_thinking\":%s}", o->think ? "true" : "false");
    buf_puts(&b, ",\"messages\":");
    buf_str(&b, x->w.v[i].messages);
    buf_byte(&b, '}');
    const client_call call = { .path = "/chat/completions", .body = buf_view(&b), .on_end = on_end, .ctx = a };
    client_send(x->c, &call);
    buf_free(&b);
}

static bool ask_server(exam *x, double *seconds, err *e) {
    const double start = clock_seconds();
    const char *key = x->o->api_key ? x->o->api_key : getenv("OPENAI_API_KEY");
    if (!x->o->model && !client_first_model(x->served, sizeof x->served, x->o->url, key, x->o->timeout, e))
        return false;
    if (!client_open(&x->c, x->o->url, key, x->o->timeout, e)) return false;
    for (int k = 0; k < x->o->concurrency; k++) ask_next(x);
    while (!*cmd_interrupt() && client_step(x->c)) {
    }
    *seconds = clock_seconds() - start;
    const bool stopped = *cmd_interrupt() && client_pending(x->c);
    client_close(x->c);
    return !stopped ||
           fail(e, ERR_INTERRUPTED, "E-EVAL-STOPPED", "eval: stopped (--out FILE and --resume go on later)");
}

/* ---- figures ---- */

typedef struct figures {
    int n, right, flexible, empty, truncated, failed;
    int64_t tokens, rounds, accepted;
} figures;

static figures count(const record *v, int n) {
    figures f = { 0 };
    for (int i = 0; i < n; i++) {
        if (!v[i].done) continue;
        f.n++;
        f.right += v[i].right;
        f.flexible += v[i].right_flexible;
        f.empty += v[i].empty;
        f.truncated += v[i].truncated;
        f.failed += v[i].failed;
        f.tokens += v[i].tokens;
        f.rounds += v[i].rounds;
        f.accepted += v[i].accepted;
    }
    return f;
}

typedef struct pairs {
    int both, neither, only_this, only_other, n;
} pairs;

static pairs pair_up(const record *a, const record *b, int n) {
    pairs p = { 0 };
    for (int i = 0; i < n; i++) {
        if (!a[i].done || !b[i].done) continue;
        p.n++;
        if (a[i].right && b[i].right)
            p.both++;
        else if (a[i].right)
            p.only_this++;
        else if (b[i].right)
            p.only_other++;
        else
            p.neither++;
    }
    return p;
}

static void print_json(const exam *x, const char *dir, const figures *f, double seconds, const pairs *p) {
    const options *o = x->o;
    buf b = { 0 };
    buf_puts(&b, "{\"schema\":\"nibble.eval.gsm8k/1\",");
    eval_json_command(&b);
    buf_byte(&b, ',');
    if (x->g) {
        eval_json_model(&b, "model", x->g);
    } else {
        buf_puts(&b, "\"model\":{\"url\":");
        json_write_str(&b, str_of(dir));
        buf_byte(&b, '}');
    }
    buf_puts(&b, ",\"data\":");
    json_write_str(&b, str_of(o->data));
    buf_printf(&b,
               ",\"shots\":%d,\"think\":%s,\"sampling\":\"%s\",\"max_tokens\":%d,\"seed\":%lld,\"concurrency\":%d,"
               "\"questions\":%d,",
               o->shots,
               o->think < 0 ? "null"
               : o->think   ? "true"
                            : "false",
               o->sampling ? "model" : "greedy", o->max_tokens, (long long)o->seed, o->concurrency, f->n);
    eval_json_interval(&b, "accuracy", stat_wilson(f->right, f->n));
    buf_byte(&b, ',');
    eval_json_interval(&b, "accuracy_flexible", stat_wilson(f->flexible, f->n));
    buf_printf(&b,
               ",\"right\":%d,\"right_flexible\":%d,\"empty\":%d,\"truncated\":%d,\"errors\":%d,\"tokens\":%lld,"
               "\"seconds\":%.3f,\"accept_length\":",
               f->right, f->flexible, f->empty, f->truncated, f->failed, (long long)f->tokens, seconds);
    json_write_double(&b, f->rounds ? (double)(f->accepted + f->rounds) / (double)f->rounds : NAN);
    if (o->compare) {
        buf_puts(&b, ",\"compared\":{\"with\":");
        json_write_str(&b, str_of(o->compare));
        buf_printf(&b, ",\"questions\":%d,\"both\":%d,\"neither\":%d,\"only_this\":%d,\"only_other\":%d,\"mcnemar_p\":",
                   p->n, p->both, p->neither, p->only_this, p->only_other);
        json_write_double(&b, stat_mcnemar(p->only_this, p->only_other));
        buf_byte(&b, '}');
    }
    buf_puts(&b, "}\n");
    fwrite(b.p, 1, b.n, stdout);
    buf_free(&b);
}

static void print_text(const exam *x, const char *about, const figures *f, double seconds, const pairs *p) {
    const stat_interval a = stat_wilson(f->right, f->n), b = stat_wilson(f->flexible, f->n);
    printf("%s\n%s: %d questions, %d shots, %s, thinking %s, at most %d tokens, seed %lld\n", about, x->o->data, f->n,
           x->o->shots, x->o->sampling ? "sampled as the model asks" : "greedy",
           x->o->think < 0 ? "as the template does"
           : x->o->think   ? "on"
                           : "off",
           x->o->max_tokens, (long long)x->o->seed);
    printf("  right            %6d  %.2f %%   95 %%: %.2f to %.2f\n", f->right, 100 * a.value, 100 * a.lo, 100 * a.hi);
    printf("  right, flexible  %6d  %.2f %%   95 %%: %.2f to %.2f\n", f->flexible, 100 * b.value, 100 * b.lo,
           100 * b.hi);
    printf("  empty %d, truncated %d, errors %d\n", f->empty, f->truncated, f->failed);
    printf("  %lld tokens in %.1f s", (long long)f->tokens, seconds);
    if (f->rounds) printf(", accept length %.3f", (double)(f->accepted + f->rounds) / (double)f->rounds);
    putchar('\n');
    if (x->o->compare)
        printf(
            "  beside %s, %d questions: both right %d, only this %d, only the other %d, neither %d; McNemar p = %.3g\n",
            x->o->compare, p->n, p->both, p->only_this, p->only_other, p->neither,
            stat_mcnemar(p->only_this, p->only_other));
}

static int run(options *o, const char *dir, err *e) {
    exam x = { .o = o, .fd = -1 };
    char about[600], default_data[1200];
    double seconds = 0;
    int rows, code = 0;
    pairs p = { 0 };
    bool ok = cmd_draft_head(&rows, o->draft_head, e);
    if (ok && !o->data) { /* the embedded model's own problems lie beside it */
        char *path = dir ? path_join(dir, "word_problems.jsonl") : NULL;
        if (path && file_exists(path))
            snprintf(default_data, sizeof default_data, "%s", path), o->data = default_data;
        else
            ok = fail(e, ERR_USAGE, "E-USAGE",
                      "eval gsm8k: --data FILE is needed (JSON lines with `question` and `answer`)");
        free(path);
    }
    const engine_options eo = { .ops = cmd_ops_options(),
                                .ctx = o->ctx,
                                .slots = o->concurrency,
                                .kv = (kv_mode)o->kv,
                                .act = (act_mode)o->act,
                                .heads = { .draft_rows = rows },
                                .memory_bytes = o->memory,
                                .need_text = true };
    ok = ok && (o->url || engine_open(&x.g, dir, &eo, e));
    const workload_options wo = {
        .limit = o->limit, .think = o->think, .shots = o->shots, .requests_only = o->url != NULL
    };
    ok = ok && workload_read(&x.w, "gsm8k", o->data, x.g ? x.g->tok : NULL, x.g ? x.g->tmpl : NULL, &wo, e);
    for (int i = 0; ok && i < x.w.n; i++) {
        char want[QUESTION_NUMBER];
        if (!question_expected(want, x.w.v[i].answer))
            ok = fail(e, ERR_INPUT, "E-EVAL-LINE", "%s: question %d: `answer` holds no number", o->data, i);
    }
    record *other = NULL;
    if (ok) {
        x.v = xcalloc((size_t)x.w.n, sizeof *x.v);
        if (o->compare) {
            buf head = { 0 };
            size_t whole;
            other = xcalloc((size_t)x.w.n, sizeof *other);
            ok = read_records(other, x.w.n, &head, &whole, o->compare, e);
            buf_free(&head);
        }
    }
    ok = ok && open_out(&x, dir, e);
    if (ok) {
        for (int i = 0; i < x.w.n; i++) x.total += !x.v[i].done;
        x.p = eval_progress_begin();
        ok = o->url ? ask_server(&x, &seconds, e) : ask_engine(&x, &seconds, e);
        eval_progress_end(&x.p);
        if (ok && x.write_failed)
            ok = fail(e, ERR_MACHINE, "E-FILE-WRITE", "%s: transcripts could not be written (full disk?)", o->out);
    }
    if (ok) {
        const figures f = count(x.v, x.w.n);
        if (other) p = pair_up(x.v, other, x.w.n);
        if (x.g)
            eval_describe(about, sizeof about, x.g);
        else
            snprintf(about, sizeof about, "%s at %s",
                     o->model    ? o->model
                     : *x.served ? x.served
                                 : "the server's model",
                     o->url);
        if (cmd_common()->json)
            print_json(&x, o->url ? o->url : dir, &f, seconds, &p);
        else
            print_text(&x, about, &f, seconds, &p);
        code = o->has_require && (double)f.right < o->require * f.n;
        if (f.failed && f.failed == f.n)
            fail(e, ERR_MACHINE, "E-EVAL-SERVER", "%s: no question was answered: %s", o->url ? o->url : dir, x.why);
    }
    if (x.fd >= 0) close(x.fd);
    free(other);
    free(x.v);
    workload_free(&x.w);
    engine_close(x.g);
    return code;
}

int eval_gsm8k(int argc, char **argv, err *e) {
    static const char *const samplings[] = { "greedy", "model", NULL };
    options o = { .max_tokens = 2048, .think = -1, .seed = 1, .concurrency = 8, .depth = 2, .timeout = 600 };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Questions" },
        { .type = ARG_STR,
          .name = "data",
          .meta = "FILE",
          .dst = &o.data,
          .none = "the model's word_problems.jsonl",
          .help = "JSON lines with `question` and `answer` (a number, or text that ends with #### and the number)" },
        { .type = ARG_INT,
          .name = "limit",
          .meta = "N",
          .dst = &o.limit,
          .lo = 0,
          .hi = INT32_MAX,
          .none = "all",
          .help = "ask the first N" },
        { .type = ARG_INT,
          .name = "shots",
          .meta = "N",
          .dst = &o.shots,
          .lo = 0,
          .hi = 8,
          .help = "the file's first N lines become answered examples" },
        { .type = ARG_SET,
          .name = "think",
          .dst = &o.think,
          .value = 1,
          .none = "",
          .help = "let the model think first" },
        { .type = ARG_SET, .name = "no-think", .dst = &o.think, .value = 0, .none = "", .help = "do not" },
        { .type = ARG_ENUM,
          .name = "sampling",
          .dst = &o.sampling,
          .choices = samplings,
          .help = "greedy, or as generation_config.json says" },
        { .type = ARG_INT,
          .name = "max-tokens",
          .key = 'n',
          .meta = "N",
          .dst = &o.max_tokens,
          .lo = 1,
          .hi = 1 << 20,
          .help = "longest answer, thought included" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &o.seed,
          .lo = 0,
          .hi = INT32_MAX,
          .help = "of sampling" },
        { .type = ARG_INT,
          .name = "concurrency",
          .meta = "N",
          .dst = &o.concurrency,
          .lo = 1,
          .hi = 256,
          .help = "questions in work at once" },
        { .type = ARG_GROUP, .help = "Another server" },
        { .type = ARG_STR,
          .name = "url",
          .meta = "URL",
          .dst = &o.url,
          .none = "",
          .help = "ask this OpenAI-compatible server instead of loading a model" },
        { .type = ARG_STR,
          .name = "model",
          .meta = "NAME",
          .dst = &o.model,
          .none = "the first it lists",
          .help = "the model's name there" },
        { .type = ARG_STR,
          .name = "api-key",
          .meta = "KEY",
          .dst = &o.api_key,
          .none = "OPENAI_API_KEY",
          .help = "bearer token" },
        { .type = ARG_DOUBLE,
          .name = "timeout",
          .meta = "S",
          .dst = &o.timeout,
          .flo = 1,
          .fhi = 86400,
          .help = "seconds without an answer that count as an error" },
        { .type = ARG_GROUP, .help = "Engine" },
        { .type = ARG_INT,
          .name = "depth",
          .meta = "N",
          .dst = &o.depth,
          .lo = 0,
          .hi = ENGINE_MAX_DRAFT,
          .help = "drafts per round" },
        { .type = ARG_INT,
          .name = "ctx",
          .meta = "N",
          .dst = &o.ctx,
          .lo = 1,
          .hi = 1 << 30,
          .none = "the model's limit, at most 32768",
          .help = "positions per sequence" },
        { .type = ARG_ENUM, .name = "kv", .dst = &o.kv, .choices = cmd_kv_choices, .help = "KV cache type" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &o.act,
          .choices = cmd_act_choices,
          .help = "inputs of quantized Linears" },
        { .type = ARG_STR,
          .name = "draft-head",
          .meta = "full|N",
          .dst = &o.draft_head,
          .none = "65536 of a large vocabulary",
          .help = "rows of the NVFP4 head that drafts come from" },
        { .type = ARG_BYTES,
          .name = "memory",
          .meta = "SIZE",
          .dst = &o.memory,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "what is available",
          .help = "refuse to plan for more" },
        { .type = ARG_GROUP, .help = "Output" },
        { .type = ARG_STR,
          .name = "out",
          .key = 'o',
          .meta = "FILE",
          .dst = &o.out,
          .none = "",
          .help = "every question with its answer, as JSON lines" },
        { .type = ARG_FLAG, .name = "resume", .dst = &o.resume, .help = "go on with FILE; errors are asked again" },
        { .type = ARG_STR,
          .name = "compare",
          .meta = "FILE",
          .dst = &o.compare,
          .none = "",
          .help = "another run's transcripts: who was right where, McNemar's test" },
        { .type = ARG_DOUBLE,
          .name = "require",
          .meta = "P",
          .dst = &o.require,
          .given = &o.has_require,
          .flo = 0,
          .fhi = 1,
          .none = "",
          .help = "exit 1 when a smaller share is right" },
    };
    const arg_spec spec = {
        .usage = "eval gsm8k [options] [MODEL_DIR | --url URL]",
        .about = "Share of word problems answered right: strict (the number behind the last ####) and flexible (the "
                 "last number), with Wilson "
                 "intervals; empty, truncated and failed answers are counted, not hidden.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble eval gsm8k MODEL-NVFP4 --data gsm8k_test.jsonl --shots 4 --limit 400 -o nvfp4.jsonl\n"
                    "  nibble eval gsm8k MODEL --data gsm8k_test.jsonl --shots 4 --limit 400 --compare nvfp4.jsonl\n"
                    "  nibble eval gsm8k --url http://127.0.0.1:30000 --data gsm8k_test.jsonl\n"
    };
    arg_strings pos = { 0 };
    bool done;
    const char *dir = NULL;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done) {
        if (o.url && pos.n)
            fail(e, ERR_USAGE, "E-USAGE", "eval gsm8k: a model and --url exclude each other");
        else if (o.resume && !o.out)
            fail(e, ERR_USAGE, "E-USAGE", "eval gsm8k: --resume goes with --out FILE");
        else if (o.url || cmd_model_dir(&dir, &pos, 0, e))
            code = run(&o, dir, e);
    }
    arg_strings_free(&pos);
    return code;
}
