/* nibble chat: a conversation on the terminal. */
#include <editline/readline.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cmd/ask.h"
#include "text/reply.h"

/* For what is known of earlier turns. */
static const int64_t MOST_KEPT_BYTES = (int64_t)2 << 30;

typedef struct chat {
    cmd_turn turn; /* first: callbacks get it */
    engine *g;
    loop *l;
    cmd_sampling opt;
    sampler_params sampling;
    int depth;
    buf messages; /* JSON objects, comma-separated */
    bool tty;
    reply r;
} chat;

static void show_piece(void *ctx, split_kind kind, str piece) {
    const chat *c = ctx;
    if (kind == SPLIT_THOUGHT)
        fprintf(c->tty ? stdout : stderr, c->tty ? "\033[2m" STR_FMT "\033[0m" : STR_FMT, STR_ARG(piece));
    else if (kind == SPLIT_TEXT)
        fwrite(piece.p, 1, piece.n, stdout);
    fflush(stdout);
}

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)choice, (void)logprob, (void)top, (void)values;
    return reply_push(&((chat *)ctx)->r, id);
}

static void add_message(chat *c, const char *role, str content, str thought) {
    if (c->messages.n) buf_byte(&c->messages, ',');
    buf_printf(&c->messages, "{\"role\":\"%s\",\"content\":", role);
    json_write_str(&c->messages, content);
    if (thought.n) {
        buf_puts(&c->messages, ",\"reasoning_content\":");
        json_write_str(&c->messages, thought);
    }
    buf_byte(&c->messages, '}');
}

static void restart(chat *c) {
    buf_clear(&c->messages);
    if (c->opt.system) add_message(c, "system", str_of(c->opt.system), (str){ 0 });
}

static bool prompt_ids(chat *c, id_list *out, bool *thinks, err *e) {
    arena mem = { 0 };
    buf request = { 0 }, text = { 0 };
    const json *v;
    buf_printf(&request, "{\"messages\":[%s]", c->messages.p);
    if (c->opt.think) buf_printf(&request, ",\"enable_thinking\":%s", c->opt.think == 1 ? "true" : "false");
    buf_byte(&request, '}');
    const bool ok = json_parse(&v, &mem, buf_view(&request), "conversation", NULL, e) &&
                    template_render(c->g->tmpl, &text, v, e) &&
                    tokenizer_encode(c->g->tok, out, buf_view(&text), NULL, e);
    *thinks = ok && split_prompt_thinks(buf_view(&text));
    buf_free(&text);
    buf_free(&request);
    arena_free(&mem);
    return ok;
}

static void report(const chat *c) {
    const gen_result *r = &c->turn.r;
    if (r->finish == GEN_CANCEL) fprintf(stderr, "(stopped)\n");
    if (r->finish == GEN_CONTEXT)
        fprintf(stderr, "(the context of %d tokens is full: /reset starts anew)\n", c->g->st.capacity);
    if (!cmd_common()->quiet)
        fprintf(stderr, "(%d + %d tokens, %d kept from before, %.1f/s, accept length %.2f)\n", r->prompt_tokens,
                r->output_tokens, r->cached_tokens,
                r->decode_seconds > 0 ? (r->output_tokens - 1) / r->decode_seconds : 0.0, gen_accept_length(r));
}

static bool answer(chat *c, const id_list *prompt, bool thinks, err *e) {
    int marks[TOKENIZER_MAX_TURNS];
    const sampler_params *p = &c->sampling;
    reply_init(&c->r, c->g->tok, thinks, NULL, c->opt.stops.v, c->opt.stops.n);
    c->r.min_tokens = p->min_tokens;
    c->r.on_piece = show_piece;
    c->r.ctx = c;
    const loop_request q = { .prompt = prompt->v,
                             .n_prompt = (int)prompt->n,
                             .marks = marks,
                             .n_marks = tokenizer_turns(c->g->tok, marks, prompt->v, (int)prompt->n),
                             .max_tokens = c->opt.max_tokens,
                             .depth = -1,
                             .whole_rounds = true,
                             .sampling = *p,
                             .stop_ids = p->stop_ids,
                             .n_stop_ids = p->n_stop_ids,
                             .on_token = on_token,
                             .on_done = cmd_turn_done,
                             .ctx = c };
    const bool ok = cmd_ask(c->l, &c->turn, &q, e);
    reply_end(&c->r);
    if (ok) add_message(c, "assistant", buf_view(&c->r.text), buf_view(&c->r.thought));
    reply_free(&c->r);
    return ok;
}

/* One turn. A failure of this turn (a prompt too long, say) leaves the conversation as it was before. */
static bool turn(chat *c, const char *line, err *e) {
    const size_t before = c->messages.n;
    id_list prompt = { 0 };
    bool thinks;
    add_message(c, "user", str_of(line), (str){ 0 });
    const bool ok = prompt_ids(c, &prompt, &thinks, e) && answer(c, &prompt, thinks, e);
    if (ok) {
        printf("\n");
        fflush(stdout); /* whoever reads through a pipe has the whole answer before what is said of it */
        report(c);
    } else {
        buf_truncate(&c->messages, before);
    }
    ids_free(&prompt);
    return ok;
}

static char *read_line(const chat *c) {
    if (c->tty) return readline("> ");
    char *line = NULL;
    size_t cap = 0;
    const ssize_t n = getline(&line, &cap, stdin);
    if (n < 0) return free(line), NULL;
    if (n > 0 && line[n - 1] == '\n') line[n - 1] = 0;
    return line;
}

static void commands(void) {
    puts("/reset        forget the conversation\n/system TEXT  set the system message and start anew\n"
         "/think        think first     /no-think  answer at once\n/help         this list\n/quit         leave (or "
         "Ctrl-D)");
}

/* True when the line was a command; *quit on /quit. */
static bool command(chat *c, const char *line, bool *quit) {
    static char *system_text;
    if (line[0] != '/') return false;
    if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0)
        *quit = true;
    else if (strcmp(line, "/reset") == 0)
        restart(c), puts("(a new conversation)");
    else if (strncmp(line, "/system ", 8) == 0) {
        free(system_text);
        c->opt.system = system_text = xstrdup(line + 8);
        restart(c);
        puts("(a new conversation)");
    } else if (strcmp(line, "/think") == 0)
        c->opt.think = 1;
    else if (strcmp(line, "/no-think") == 0)
        c->opt.think = 2;
    else
        commands();
    return true;
}

static int talk(chat *c, err *e) {
    bool quit = false;
    restart(c);
    if (c->tty) puts("Type a message; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.");
    while (!quit) {
        char *line = read_line(c);
        if (!line) break;
        if (line[0] && !command(c, line, &quit)) {
            if (c->tty) add_history(line);
            err mine = { 0 };
            if (!turn(c, line, &mine)) {
                if (!c->tty ||
                    mine.kind == ERR_MACHINE) { /* a script wants the failure; a broken machine ends a chat */
                    *e = mine;
                    free(line);
                    return 0;
                }
                fprintf(stderr, "nibble: %s: %s\n", mine.id, mine.msg);
            }
        }
        free(line);
    }
    return 0;
}

int cmd_chat(int argc, char **argv, err *e) {
    chat c = { .tty = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO) };
    arg_opt opts[CMD_SAMPLING_OPTIONS];
    cmd_sampling_options(opts, &c.opt);
    const arg_spec spec = {
        .usage = "chat [options] [MODEL_DIR]",
        .about = "Talk to a model. Ctrl-C stops the answer, not the program; lines are read from standard "
                 "input when it is no terminal.",
        .opts = opts,
        .count = CMD_SAMPLING_OPTIONS - 1,
        .max_positional = 1,
        .examples = "  nibble chat\n  nibble chat Qwen3.6-35B-A3B --no-think --system \"Answer briefly.\"\n"
    };
    arg_strings pos = { 0 };
    bool done;
    const char *dir;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && cmd_model_dir(&dir, &pos, 0, e) &&
        cmd_open_engine(&c.g, dir, &c.opt, true, min_i64(memory_available() / 8, MOST_KEPT_BYTES), e)) {
        if (!c.g->tmpl) {
            fail(e, ERR_INPUT, "E-TEMPLATE-MISSING", "%s: no chat template (use `nibble run --raw`)", dir);
        } else if (cmd_sampler(&c.sampling, &c.opt, c.g, e)) {
            c.depth = !c.g->n.has_mtp ? 0 : c.opt.has_spec ? c.opt.spec : 2;
            const loop_options lo = { .depth = c.depth, .fixed_depth = true };
            if ((!c.opt.selftest || engine_selftest_all(c.g, c.depth, e)) && loop_open(&c.l, c.g, &lo, e))
                code = talk(&c, e);
            loop_close(c.l);
        }
    }
    engine_close(c.g);
    buf_free(&c.messages);
    arg_strings_free(&pos);
    cmd_sampling_free(&c.opt);
    return code;
}
