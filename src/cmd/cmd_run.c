/* nibble run: one prompt in, one answer out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "cmd/ask.h"
#include "cmd/constrain.h"
#include "text/reply.h"

typedef struct options {
    cmd_sampling s;
    const char *prompt, *request, *ids;
    const char *json_schema;
    bool raw, trace_rounds, json_object;
    int logprobs;
} options;

/* What one run gathers while tokens arrive. */
typedef struct live {
    engine *g;
    reply r;
    bool text; /* a tokenizer is there */
    bool show; /* stream to the terminal as it comes */
    bool tty;  /* dim the thought */
    id_list out;
    buf rounds, logprobs;
    int n_logprobs;
} live;

static void show_piece(void *ctx, split_kind kind, str piece) {
    live *l = ctx;
    if (!l->show) return;
    if (kind == SPLIT_TEXT) {
        fwrite(piece.p, 1, piece.n, stdout);
        fflush(stdout);
        return;
    }
    if (kind != SPLIT_THOUGHT) return;
    /* The thought is not the answer: it goes where progress goes. */
    fprintf(stderr, l->tty ? "\033[2m" STR_FMT "\033[0m" : STR_FMT, STR_ARG(piece));
}

static void add_logprobs(live *l, int32_t id, double logprob, const int32_t *top, const double *values, int n) {
    buf *b = &l->logprobs;
    if (l->n_logprobs++) buf_byte(b, ',');
    buf_printf(b, "{\"id\":%d,\"logprob\":", id);
    json_write_double(b, logprob);
    buf_puts(b, ",\"top\":[");
    for (int i = 0; i < n && top[i] >= 0; i++) {
        buf_printf(b, "%s{\"id\":%d,\"logprob\":", i ? "," : "", top[i]);
        json_write_double(b, values[i]);
        buf_byte(b, '}');
    }
    buf_puts(b, "]}");
}

typedef struct context {
    cmd_turn turn; /* first */
    live *l;
    int logprobs;
} context;

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    const context *c = ctx;
    (void)choice;
    ids_add(&c->l->out, id);
    if (top) add_logprobs(c->l, id, logprob, top, values, c->logprobs);
    return !c->l->text || reply_push(&c->l->r, id);
}

static void on_round(void *ctx, int choice, const gen_round *r) {
    (void)choice;
    buf *b = &((const context *)ctx)->l->rounds;
    buf_printf(b, "%s{\"known\":%d,\"draft\":[", b->n ? "," : "", r->known);
    for (int i = 0; i < r->depth; i++) buf_printf(b, "%s%d", i ? "," : "", r->draft[i]);
    buf_puts(b, "],\"target\":[");
    for (int i = 0; i <= r->depth; i++) buf_printf(b, "%s%d", i ? "," : "", r->target[i]);
    buf_printf(b, "],\"accepted\":%d}", r->accepted);
}

/* {"messages": [...]} of -p, --system and --think. */
static void request_of(buf *b, const options *o) {
    buf_puts(b, "{\"messages\":[");
    if (o->s.system) {
        buf_puts(b, "{\"role\":\"system\",\"content\":");
        json_write_str(b, str_of(o->s.system));
        buf_puts(b, "},");
    }
    buf_puts(b, "{\"role\":\"user\",\"content\":");
    json_write_str(b, str_of(o->prompt));
    buf_puts(b, "}]");
    if (o->s.think) buf_printf(b, ",\"enable_thinking\":%s", o->s.think == 1 ? "true" : "false");
    buf_byte(b, '}');
}

static bool read_ids(id_list *out, arena *mem, const char *arg, err *e) {
    const json *v;
    const bool literal = arg[0] == '[';
    if (!(literal ? json_parse(&v, mem, str_of(arg), "--ids", NULL, e) : json_parse_file(&v, mem, arg, NULL, e)))
        return false;
    if (!json_is(v, JSON_ARRAY)) return fail(e, ERR_INPUT, "E-CMD-IDS", "--ids: not a JSON list of token ids");
    for (uint32_t i = 0; i < v->n; i++) {
        const json *x = &v->u.items[i];
        if (!json_is(x, JSON_INT) || x->u.i < 0 || x->u.i > INT32_MAX)
            return fail(e, ERR_INPUT, "E-CMD-IDS", "--ids: element %u is not a token id", i);
        ids_add(out, (int32_t)x->u.i);
    }
    return true;
}

/* The request as a tree (NULL for --raw and --ids) and the prompt's token ids; *thinks: it ends inside a thought. */
static bool make_prompt(const options *o, engine *g, arena *mem, const json **request, id_list *prompt, bool *thinks,
                        err *e) {
    *request = NULL;
    *thinks = false;
    if (o->ids) return read_ids(prompt, mem, o->ids, e);
    buf text = { 0 };
    bool ok = true;
    if (o->raw) {
        buf_puts(&text, o->prompt);
    } else {
        if (!g->tmpl)
            return fail(e, ERR_INPUT, "E-TEMPLATE-MISSING", "%s: no chat template (use --raw or --ids)", g->files.dir);
        buf json_text = { 0 };
        if (!o->request) request_of(&json_text, o);
        ok = (o->request ? json_parse_file(request, mem, o->request, NULL, e)
                         : json_parse(request, mem, buf_view(&json_text), "-p", NULL, e)) &&
             template_render(g->tmpl, &text, *request, e);
        buf_free(&json_text);
        *thinks = ok && split_prompt_thinks(buf_view(&text));
    }
    ok = ok && tokenizer_encode(g->tok, prompt, buf_view(&text), NULL, e);
    buf_free(&text);
    return ok;
}

static void write_ids(buf *b, const char *key, const id_list *v) {
    buf_printf(b, "\"%s\":[", key);
    for (size_t i = 0; i < v->n; i++) buf_printf(b, "%s%d", i ? "," : "", v->v[i]);
    buf_puts(b, "],");
}

static double rate(int n, double seconds) { return seconds > 0 ? n / seconds : 0; }

static void report_json(const options *o, const live *l, const id_list *prompt, const gen_result *r,
                        const sampler_params *p, int depth, double load_seconds, const loop_stats *stats) {
    buf b = { 0 };
    buf_puts(&b, "{\"schema\":\"nibble.run/1\",");
    write_ids(&b, "prompt_ids", prompt);
    write_ids(&b, "output_ids", &l->out);
    buf_puts(&b, "\"text\":");
    json_write_str(&b, buf_view(&l->r.text));
    buf_puts(&b, ",\"reasoning\":");
    json_write_str(&b, buf_view(&l->r.thought));
    buf_printf(&b, ",\"tool_calls\":[" STR_FMT "],\"finish_reason\":\"%s\",", (int)l->r.calls.n,
               l->r.calls.n ? l->r.calls.p : "",
               l->r.n_calls && !l->r.cut && r->finish == GEN_STOP ? "tool_calls" : gen_finish_name(r->finish));
    cmd_write_result(&b, r, depth, load_seconds, stats);
    if (o->logprobs)
        buf_printf(&b, ",\"logprobs\":[" STR_FMT "]", (int)l->logprobs.n, l->logprobs.n ? l->logprobs.p : "");
    if (o->trace_rounds) buf_printf(&b, ",\"rounds\":[" STR_FMT "]", (int)l->rounds.n, l->rounds.n ? l->rounds.p : "");
    buf_printf(&b,
               ",\"sampling\":{\"temperature\":%g,\"top_k\":%d,\"top_p\":%g,\"min_p\":%g,\"presence_penalty\":%g,"
               "\"frequency_penalty\":%g,\"repetition_penalty\":%g,\"min_tokens\":%d,\"seed\":%llu}",
               p->temperature, p->top_k, p->top_p, p->min_p, p->presence, p->frequency, p->repetition, p->min_tokens,
               (unsigned long long)p->seed);
    buf_printf(&b, ",\"device\":\"%s\",\"isa\":\"%s\",\"threads\":%d}\n", l->g->o->device, l->g->o->isa,
               l->g->o->threads);
    fwrite(b.p, 1, b.n, stdout);
    buf_free(&b);
}

static void report_stats(const live *l, const gen_result *r, const sampler_params *p, double load_seconds) {
    const int decoded = r->output_tokens > 1 ? r->output_tokens - 1 : 0;
    fprintf(stderr, "%s%d prompt tokens at %.1f/s, %d output tokens at %.1f/s, load %.0f ms, first token after %.0f ms",
            "\n", r->prompt_tokens, rate(r->prompt_tokens, r->prompt_seconds), r->output_tokens,
            rate(decoded, r->decode_seconds), load_seconds * 1e3, (load_seconds + r->prompt_seconds) * 1e3);
    if (r->rounds)
        fprintf(stderr, ", accept length %.2f of %d", gen_accept_length(r),
                1 + (int)((r->drafted + r->rounds - 1) / r->rounds));
    if (r->rounds && l->g->n.heads.draft)
        fprintf(stderr, ", draft head of %d rows (%.0f MB, %.1f%% of the tokens in no draft's reach)",
                l->g->n.heads.draft_rows, (double)heads_draft_bytes(&l->g->n.heads) / 1e6,
                r->output_tokens ? 100.0 * (double)r->out_of_list / r->output_tokens : 0);
    if (l->g->n.heads.top) fprintf(stderr, ", screened head (%.0f MB)", (double)head_bytes(l->g->n.heads.top) / 1e6);
    if (!sampler_is_greedy(p)) fprintf(stderr, ", seed %llu", (unsigned long long)p->seed);
    fprintf(stderr, " (%s, %d threads)\n", l->g->o->isa, l->g->o->threads);
}

static bool check_options(const options *o, err *e) {
    const int given = (o->prompt != NULL) + (o->request != NULL) + (o->ids != NULL);
    if (given != 1)
        return fail(e, ERR_USAGE, "E-USAGE", "run: give exactly one of -p TEXT, --request FILE, --ids JSON");
    if ((o->json_schema || o->json_object) && (o->ids || (o->json_schema && o->json_object)))
        return fail(e, ERR_USAGE, "E-USAGE", "run: one of --json-schema and --json-object, and not with --ids");
    if (o->raw && !o->prompt) return fail(e, ERR_USAGE, "E-USAGE", "run: --raw goes with -p");
    if ((o->s.system || o->s.think) && (!o->prompt || o->raw))
        return fail(e, ERR_USAGE, "E-USAGE",
                    "run: --system, --think and --no-think go with -p (a request carries its own)");
    return true;
}

static int answer(options *o, engine *g, double load_seconds, err *e) {
    arena mem = { 0 };
    const json *request;
    id_list prompt = { 0 };
    bool thinks;
    int code = 0;
    loop *lp = NULL;
    sampler_params p;
    const int depth = !g->n.has_mtp ? 0 : o->s.has_spec ? o->s.spec : 2;
    if (o->s.has_spec && o->s.spec > 0 && !g->n.has_mtp)
        log_say("W-SPEC-NO-HEAD", "%s: no draft head, --spec %d is ignored", g->files.dir, o->s.spec);
    live l = { .g = g, .text = g->tok != NULL, .show = !cmd_common()->json, .tty = isatty(STDERR_FILENO) };
    context c = { .l = &l, .logprobs = o->logprobs };
    cmd_constraint shape = { 0 };
    token_rule rule = { 0 };
    loop_stats stats = { 0 };
    const gen_result *r = &c.turn.r;
    bool ok = (!o->s.selftest || engine_selftest_all(g, depth, e)) && cmd_sampler(&p, &o->s, g, e) &&
              make_prompt(o, g, &mem, &request, &prompt, &thinks, e) &&
              cmd_constrain(&shape, &rule, o->json_schema, o->json_object, g, thinks, &p, e) &&
              loop_open(&lp, g, &(loop_options){ .depth = depth, .fixed_depth = true }, e);
    if (ok) {
        if (l.text) {
            reply_init(&l.r, g->tok, thinks, json_get(request, "tools"), o->s.stops.v, o->s.stops.n);
            l.r.min_tokens = p.min_tokens;
            l.r.on_piece = show_piece;
            l.r.ctx = &l;
        }
        const loop_request q = { .prompt = prompt.v,
                                 .n_prompt = (int)prompt.n,
                                 .max_tokens = o->s.max_tokens,
                                 .depth = -1,
                                 .whole_rounds = true,
                                 .sampling = p,
                                 .rule = rule,
                                 .stop_ids = p.stop_ids,
                                 .n_stop_ids = p.n_stop_ids,
                                 .logprobs = o->logprobs,
                                 .on_token = on_token,
                                 .on_round = o->trace_rounds ? on_round : NULL,
                                 .on_done = cmd_turn_done,
                                 .ctx = &c };
        ok = cmd_ask(lp, &c.turn, &q, e);
        stats = loop_counted(lp);
        if (l.text) reply_end(&l.r);
    }
    if (ok && cmd_common()->json)
        report_json(o, &l, &prompt, r, &p, depth, load_seconds, &stats);
    else if (ok) {
        if (!l.text)
            for (size_t i = 0; i < l.out.n; i++) printf("%s%d", i ? " " : "", l.out.v[i]);
        putchar('\n');
        fflush(stdout);
        for (int i = 0; i < l.r.n_calls && i < 1; i++)
            fprintf(stderr, "tool calls: [" STR_FMT "]\n", (int)l.r.calls.n, l.r.calls.p);
        if (!cmd_common()->quiet) report_stats(&l, r, &p, load_seconds);
    }
    if (ok && r->finish == GEN_CANCEL) code = 130;
    if (l.text && l.r.s) reply_free(&l.r);
    buf_free(&l.rounds);
    buf_free(&l.logprobs);
    ids_free(&l.out);
    ids_free(&prompt);
    loop_close(lp);
    cmd_constraint_free(&shape);
    arena_free(&mem);
    return code;
}

int cmd_run(int argc, char **argv, err *e) {
    options o = { 0 };
    static const char *const prefill_choices[] = { "exact", NULL };
    int prefill = 0;
    arg_opt opts[CMD_SAMPLING_OPTIONS + 12] = {
        { .type = ARG_GROUP, .help = "Prompt" },
        { .type = ARG_STR,
          .name = "prompt",
          .key = 'p',
          .meta = "TEXT",
          .dst = &o.prompt,
          .help = "one user message, rendered by the chat template" },
        { .type = ARG_STR,
          .name = "request",
          .meta = "FILE",
          .dst = &o.request,
          .help = "JSON request: messages, tools, template variables" },
        { .type = ARG_STR,
          .name = "ids",
          .meta = "JSON",
          .dst = &o.ids,
          .help = "prompt as token ids: a JSON list, or a file that holds one" },
        { .type = ARG_FLAG, .name = "raw", .dst = &o.raw, .help = "tokenize -p as it is, no template" },
    };
    int n = 5;
    cmd_sampling_options(opts + n, &o.s);
    n += CMD_SAMPLING_OPTIONS;
    const arg_opt more[] = {
        { .type = ARG_INT,
          .name = "logprobs",
          .meta = "N",
          .dst = &o.logprobs,
          .lo = 0,
          .hi = 64,
          .help = "with --json: the N likeliest ids of each position" },
        { .type = ARG_FLAG,
          .name = "trace-rounds",
          .dst = &o.trace_rounds,
          .help = "with --json: every draft-verify round" },
        { .type = ARG_STR,
          .name = "json-schema",
          .meta = "FILE|JSON",
          .dst = &o.json_schema,
          .help = "the answer is JSON that fits this schema" },
        { .type = ARG_FLAG, .name = "json-object", .dst = &o.json_object, .help = "the answer is a JSON object" },
        { .type = ARG_ENUM,
          .name = "prefill",
          .dst = &prefill,
          .choices = prefill_choices,
          .help = "arithmetic of the prompt pass (CPUs have one: exact)" },
    };
    memcpy(opts + n, more, sizeof more);
    n += (int)ARRAY_LEN(more);
    const arg_spec spec = {
        .usage = "run [options] [MODEL_DIR] (-p TEXT | --request FILE | --ids JSON)",
        .about = "Answer one prompt. The answer goes to standard output, thoughts and statistics to standard error.",
        .opts = opts,
        .count = n,
        .max_positional = 1,
        .examples = "  nibble run -p \"Tom has 3 apples and buys 4. How many?\"\n"
                    "  nibble run Qwen3.6-35B-A3B -p \"Hello\" --no-think --temperature 0\n"
                    "  nibble run --request request.json --json | jq .tool_calls\n"
    };
    arg_strings pos = { 0 };
    bool done;
    const char *dir;
    engine *g = NULL;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && check_options(&o, e) &&
        cmd_model_dir(&dir, &pos, 0, e)) {
        const double t0 = clock_seconds();
        if (cmd_open_engine(&g, dir, &o.s, !o.ids, 0, e)) code = answer(&o, g, clock_seconds() - t0, e);
        engine_close(g);
    }
    arg_strings_free(&pos);
    cmd_sampling_free(&o.s);
    return code;
}
