#include "eval/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

typedef struct run run;
typedef struct client_seat {
    run *r;
    load_result *res;
    const load_request *q;
    sse_reader sse;
    double last;
} seat;

struct run {
    load_result *results;
    const load_request *requests;
    client *c;
    const load_options *o;
    int n, next, done;
};

static void begin(run *r, int i);

/* ---- pieces ---- */

static int64_t count_of(const json *v, const char *key) {
    const json *x = json_get(v, key);
    return json_is(x, JSON_INT) ? x->u.i : 0;
}

static bool add_text(buf *b, const json *delta, const char *key) {
    const json *x = json_get(delta, key);
    if (!json_is(x, JSON_STRING) || x->n == 0) return false;
    buf_str(b, json_str(x));
    return true;
}

static void on_event(void *ctx, str data) {
    seat *s = ctx;
    arena mem = { 0 };
    const json *v;
    err none = { 0 };
    if (str_is(data, "[DONE]")) return;
    if (!json_parse(&v, &mem, data, "event", NULL, &none)) {
        snprintf(s->res->error, sizeof s->res->error, "an event that is no JSON");
        s->res->failed = true;
    } else {
        const json *choices = json_get(v, "choices"), *usage = json_get(v, "usage"), *error = json_get(v, "error");
        const json *delta = json_is(choices, JSON_ARRAY) && choices->n ? json_get(&choices->u.items[0], "delta") : NULL;
        const bool thought = add_text(&s->res->text, delta, "reasoning_content"),
                   said = add_text(&s->res->text, delta, "content"),
                   text = thought || said || json_is(json_get(delta, "tool_calls"), JSON_ARRAY);
        if (text) {
            const double now = clock_seconds();
            load_result *r = s->res;
            if (r->first == 0) {
                r->first = now;
            } else {
                if (r->n_gaps == r->cap_gaps) {
                    r->cap_gaps = r->cap_gaps ? 2 * r->cap_gaps : 256;
                    r->gaps = xrealloc(r->gaps, (size_t)r->cap_gaps * sizeof *r->gaps);
                }
                r->gaps[r->n_gaps++] = now - s->last;
            }
            s->last = now;
        }
        if (json_is(usage, JSON_OBJECT)) {
            s->res->prompt_tokens = count_of(usage, "prompt_tokens");
            s->res->output_tokens = count_of(usage, "completion_tokens");
        }
        if (json_is(error, JSON_OBJECT)) {
            const json *m = json_get(error, "message");
            s->res->failed = true;
            snprintf(s->res->error, sizeof s->res->error, "%.150s",
                     json_is(m, JSON_STRING) ? m->u.s : "an error event");
        }
    }
    arena_free(&mem);
}

static void on_data(void *ctx, str piece) { sse_reader_push(&((seat *)ctx)->sse, piece); }

static void on_end(void *ctx, int status, str body) {
    seat *s = ctx;
    run *r = s->r;
    s->res->done = true;
    s->res->end = clock_seconds();
    if (status != 200) {
        s->res->failed = true;
        if (status == 0)
            snprintf(s->res->error, sizeof s->res->error, "no answer, or cut off");
        else
            snprintf(s->res->error, sizeof s->res->error, "status %d: %.*s", status, (int)(body.n < 120 ? body.n : 120),
                     body.p);
    } else if (s->res->first == 0 && !s->res->failed) {
        s->res->failed = true;
        snprintf(s->res->error, sizeof s->res->error, "an answer without a token");
    }
    sse_reader_free(&s->sse);
    free(s);
    r->done++;
    if (r->o->on_done) r->o->on_done(r->o->ctx, r->done, r->n);
    if (r->o->concurrency && r->next < r->n && !(r->o->cancel && *r->o->cancel)) begin(r, r->next++);
}

/* ---- requests ---- */

static void begin(run *r, int i) {
    const load_request *q = &r->requests[i];
    seat *s = xcalloc(1, sizeof *s);
    buf b = { 0 };
    *s = (seat){ .r = r, .res = &r->results[i], .q = q, .sse = { .on_data = on_event, .ctx = s } };
    buf_puts(&b, "{\"model\":");
    json_write_str(&b, str_of(r->o->model));
    buf_printf(&b, ",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"max_tokens\":%d,\"seed\":%lld",
               q->max_tokens, (long long)r->o->seed + i);
    if (r->o->ignore_eos) buf_puts(&b, ",\"ignore_eos\":true");
    if (r->o->greedy) buf_puts(&b, ",\"temperature\":0");
    if (q->tools.n) {
        buf_puts(&b, ",\"tools\":");
        buf_str(&b, q->tools);
    }
    buf_puts(&b, ",\"messages\":");
    buf_str(&b, q->messages);
    buf_byte(&b, '}');
    s->res->start = clock_seconds();
    const client_call call = {
        .path = "/chat/completions", .body = buf_view(&b), .on_data = on_data, .on_end = on_end, .ctx = s
    };
    client_send(r->c, &call);
    buf_free(&b);
}

typedef struct alarm_ctx {
    run *r;
    int i;
} alarm_ctx;

static void on_alarm(void *ctx) {
    alarm_ctx *a = ctx;
    begin(a->r, a->i);
}

bool load_run(load_result *results, const load_request *requests, int n, client *c, const load_options *o,
              double *seconds, err *e) {
    run r = { .results = results, .requests = requests, .c = c, .o = o, .n = n };
    alarm_ctx *alarms = NULL;
    const double start = clock_seconds();
    if (o->concurrency) {
        while (r.next < n && r.next < o->concurrency) begin(&r, r.next++);
    } else {
        alarms = xcalloc((size_t)n, sizeof *alarms);
        for (int i = 0; i < n; i++) {
            alarms[i] = (alarm_ctx){ &r, i };
            client_after(c, requests[i].at, on_alarm, &alarms[i]);
        }
    }
    while (r.done < n && !(o->cancel && *o->cancel) && client_step(c)) {
    }
    *seconds = clock_seconds() - start;
    const bool stopped = r.done < n;
    if (!stopped) free(alarms); /* else timers still point to it, until client_close */
    return !stopped || fail(e, ERR_INTERRUPTED, "E-EVAL-STOPPED", "eval: stopped");
}

void load_free(load_result *results, int n) {
    for (int i = 0; i < n; i++) {
        free(results[i].gaps);
        buf_free(&results[i].text);
    }
}

/* ---- health ---- */

static bool space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

static int words_of(str *out, int most, str text) {
    int n = 0;
    for (size_t i = 0; i < text.n && n < most;) {
        while (i < text.n && space(text.p[i])) i++;
        const size_t from = i;
        while (i < text.n && !space(text.p[i])) i++;
        if (i > from) out[n++] = (str){ text.p + from, i - from };
    }
    return n;
}

static int by_number(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* How many of v[0..n) equal another one: n minus the number of different values; *most: of the most frequent. */
static int duplicates(uint64_t *v, int n, int *most) {
    int different = 0, run_length = 0;
    *most = 0;
    qsort(v, (size_t)n, sizeof *v, by_number);
    for (int i = 0; i < n; i++) {
        run_length = i && v[i] == v[i - 1] ? run_length + 1 : 1;
        different += run_length == 1;
        if (run_length > *most) *most = run_length;
    }
    return n - different;
}

enum { WORDS = 1 << 16, RUN = 8, FIRST = 100 };

static void check_answer(load_health *h, str text, str *words, uint64_t *hash, uint64_t *work) {
    const int n = words_of(words, WORDS, text);
    int most;
    if (n < 20) return;
    h->answers++;
    for (int i = 0; i < n; i++) hash[i] = str_hash(words[i]);
    const int first = n < FIRST ? n : FIRST;
    memcpy(work, hash, (size_t)first * sizeof *work);
    const double kinds = 1 - (double)duplicates(work, first, &most) / first;
    if (h->answers == 1 || kinds < h->type_token) h->type_token = kinds;
    memcpy(work, hash, (size_t)n * sizeof *work);
    duplicates(work, n, &most);
    if ((double)most / n > h->top_word) h->top_word = (double)most / n;
    const int runs = n - RUN + 1;
    for (int i = 0; i < runs; i++) {
        work[i] = 1469598103934665603u;
        for (int k = 0; k < RUN; k++) work[i] = (work[i] ^ hash[i + k]) * 1099511628211u;
    }
    const double again = (double)duplicates(work, runs, &most) / runs;
    if (again > h->repeated) h->repeated = again;
    h->loops += again > 0.5;
}

load_health load_check(const load_result *results, const load_request *requests, int n) {
    load_health h = { 0 };
    str *words = xmalloc(WORDS * sizeof *words);
    uint64_t *hash = xmalloc(WORDS * sizeof *hash), *work = xmalloc((WORDS + (size_t)n) * sizeof *work);
    int m = 0;
    for (int i = 0; i < n; i++)
        if (results[i].done && !results[i].failed) check_answer(&h, buf_view(&results[i].text), words, hash, work);
    for (int i = 0; i < n; i++)
        if (results[i].done && !results[i].failed) work[m++] = results[i].text.n;
    duplicates(work, m, &h.same_length);
    /* One text for different prompts: count each (prompt, text) once, then texts. */
    uint64_t *pairs = xmalloc(((size_t)n + 1) * sizeof *pairs);
    m = 0;
    for (int i = 0; i < n; i++) {
        if (!results[i].done || results[i].failed) continue;
        bool seen = false;
        for (int k = 0; k < i && !seen; k++)
            seen = results[k].done && !results[k].failed && str_eq(requests[k].messages, requests[i].messages) &&
                   str_eq(buf_view(&results[k].text), buf_view(&results[i].text));
        if (!seen) pairs[m++] = str_hash(buf_view(&results[i].text));
    }
    duplicates(pairs, m, &h.same_text);
    free(pairs);
    free(words);
    free(hash);
    free(work);
    return h;
}
