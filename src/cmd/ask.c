#include "cmd/ask.h"

#include "base/json.h"

void cmd_turn_done(void *ctx, int choice, const gen_result *r, const err *e) {
    cmd_turn *t = ctx;
    (void)choice;
    t->r = *r;
    t->fault = *e;
    t->ended = true;
}

bool cmd_ask(loop *l, cmd_turn *t, const loop_request *q, err *e) {
    CHECK(q->ctx == t && q->on_done == cmd_turn_done && q->choices <= 1, "a request of another kind");
    volatile const int *stop = cmd_interrupt();
    uint64_t handle;
    *t = (cmd_turn){ .ended = false };
    if (!loop_submit(l, &handle, q, e)) return false;
    while (!t->ended) {
        if (*stop) loop_cancel(l, handle);
        loop_step(l);
    }
    if (!t->fault.id) return true;
    *e = t->fault;
    return false;
}

static double rate(int n, double seconds) { return seconds > 0 ? n / seconds : 0; }

static void write_alarms(buf *b, const loop_stats *s) {
    const struct {
        const char *id;
        bool raised;
    } all[] = { { "W-SPEC-FLOOR", s->spec_floor > 0 },
                { "W-SPEC-PINNED", s->spec_pinned > 0 },
                { "E-SPEC-CORRUPT", s->spec_corrupt > 0 } };
    int n = 0;
    buf_puts(b, ",\"alarms\":[");
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        if (all[i].raised) buf_printf(b, "%s\"%s\"", n++ ? "," : "", all[i].id);
    buf_byte(b, ']');
}

static void write_speculative(buf *b, const gen_result *r, int depth, const loop_stats *stats) {
    buf_printf(b, "\"speculative\":{\"rounds\":%lld,\"drafted\":%lld,\"accepted\":%lld,\"accept_length\":",
               (long long)r->rounds, (long long)r->drafted, (long long)r->accepted);
    json_write_double(b, gen_accept_length(r));
    buf_puts(b, ",\"per_position\":[");
    for (int i = 0; i < depth; i++) {
        if (i) buf_byte(b, ',');
        json_write_double(b, r->drafted_at[i] ? (double)r->accepted_at[i] / (double)r->drafted_at[i] : 0);
    }
    buf_byte(b, ']');
    write_alarms(b, stats);
    buf_byte(b, '}');
}

void cmd_write_result(buf *b, const gen_result *r, int depth, double load_seconds, const loop_stats *stats) {
    const int decoded = r->output_tokens > 1 ? r->output_tokens - 1 : 0;
    buf_printf(b,
               "\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d,"
               "\"prompt_tokens_details\":{\"cached_tokens\":%d}},",
               r->prompt_tokens, r->output_tokens, r->prompt_tokens + r->output_tokens, r->cached_tokens);
    buf_printf(b,
               "\"timings\":{\"load_ms\":%.3f,\"prompt_ms\":%.3f,\"decode_ms\":%.3f,\"prompt_per_second\":%.3f,"
               "\"decode_per_second\":%.3f},",
               load_seconds * 1e3, r->prompt_seconds * 1e3, r->decode_seconds * 1e3,
               rate(r->prompt_tokens - r->cached_tokens, r->prompt_seconds), rate(decoded, r->decode_seconds));
    write_speculative(b, r, depth, stats);
}
