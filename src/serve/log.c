/* The access log: one JSON object a line, without prompt text unless asked. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "serve/server_impl.h"

bool access_log_open(server *s, err *e) {
    const char *path = s->o->access_log;
    if (!path) return true;
    if (strcmp(path, "-") == 0) return s->log_fd = 2, true;
    const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
    if (fd < 0) return fail(e, ERR_MACHINE, "E-SERVE-LOG", "%s: cannot be opened: %s", path, strerror(errno));
    if (s->log_fd > 2) close(s->log_fd);
    s->log_fd = fd;
    return true;
}

static void write_prompt(buf *b, const chat *c) {
    buf text = { 0 };
    if (c->rendered.n == 0) /* a prompt that no template made */
        for (size_t i = 0; i < c->prompt.n; i++) buf_str(&text, tokenizer_bytes(c->model->g->tok, c->prompt.v[i]));
    if (c->rendered.n || text.n) {
        buf_puts(b, ",\"prompt\":");
        json_write_str(b, c->rendered.n ? buf_view(&c->rendered) : buf_view(&text));
    }
    buf_free(&text);
}

static void write_chat(buf *b, const server *s, const chat *c) {
    const chat_usage u = c->choices ? chat_total_usage(c) : (chat_usage){ .prompt_tokens = c->prompt_tokens };
    buf_printf(b,
               ",\"id\":\"%s\",\"stream\":%s,\"prompt_tokens\":%d,\"cached_tokens\":%d,\"completion_tokens\":%d,"
               "\"reasoning_tokens\":%d",
               c->id, c->request.stream ? "true" : "false", u.prompt_tokens, u.cached_tokens, u.completion_tokens,
               u.reasoning_tokens);
    if (c->choices && c->choices[0].finish != CHAT_OPEN)
        buf_printf(b, ",\"finish\":\"%s\"", chat_finish_word(c->choices[0].finish));
    else if (c->counted)
        buf_printf(b, ",\"finish\":\"%s\"", c->call ? "failed" : "cancelled");
    if (c->first_token_at > 0) {
        buf_puts(b, ",\"ttft_ms\":");
        json_write_double(b, (double)(int64_t)((c->first_token_at - c->submitted_at) * 1e6) / 1e3);
    }
    if (u.rounds) {
        buf_puts(b, ",\"accept_length\":");
        json_write_double(b, (double)(u.accepted + u.rounds) / (double)u.rounds);
    }
    if (s->o->log_prompts) write_prompt(b, c);
}

void access_log(server *s, http_call *call, const chat *c) {
    if (s->log_fd < 0) return;
    buf b = { 0 };
    char when[40];
    struct timespec now;
    struct tm t;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &t);
    const size_t n = strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &t);
    snprintf(when + n, sizeof when - n, ".%03ldZ", now.tv_nsec / 1000000);
    buf_printf(&b, "{\"time\":\"%s\",\"peer\":", when);
    json_write_str(&b, str_of(http_call_peer(call)));
    buf_printf(&b, ",\"method\":\"%s\",\"path\":", http_call_method_name(call));
    str path = http_call_path(call);
    if (path.n > 200) path.n = 200;
    json_write_str(&b, path);
    buf_printf(&b, ",\"status\":%d,\"bytes\":%zu,\"ms\":", http_call_status(call), http_call_bytes_out(call));
    json_write_double(&b, (double)(int64_t)((clock_seconds() - http_call_started(call)) * 1e6) / 1e3);
    if (c) write_chat(&b, s, c);
    buf_puts(&b, "}\n");
    /* One write, so that lines of several processes do not mix; a full disk loses the line, not the request. */
    if (write(s->log_fd, b.p, b.n) < 0) s->log_lost++;
    buf_free(&b);
}
