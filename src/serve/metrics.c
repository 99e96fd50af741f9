#include "serve/metrics.h"

#include <stdio.h>

#include "base/json.h"

static const double seconds_bounds[METRICS_BUCKETS] = { .001, .0025, .005, .01, .025, .05, .1, .25,
                                                        .5,   1,     2.5,  5,   10,   30,  60, 300 };
static const double token_bounds[METRICS_BUCKETS] = { 1,   2,    5,    10,   20,    50,    100,   200,
                                                      500, 1000, 2000, 5000, 10000, 20000, 50000, 200000 };

static void observe(histogram *h, const double *bounds, double v) {
    int i = 0;
    while (i < METRICS_BUCKETS && v > bounds[i]) i++;
    h->count[i]++;
    h->sum += v;
    h->n++;
}

void metrics_seconds(histogram *h, double seconds) { observe(h, seconds_bounds, seconds); }
void metrics_tokens(histogram *h, int tokens) { observe(h, token_bounds, tokens); }

typedef struct writer {
    buf *out;
    const char *model;
} writer;

static void head(const writer *w, const char *name, const char *type, const char *help) {
    buf_printf(w->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* {model_name="..." extra} */
static void labels(const writer *w, const char *extra) {
    buf_puts(w->out, "{model_name=");
    json_write_str(w->out, str_of(w->model));
    buf_printf(w->out, "%s}", extra);
}

static void number(const writer *w, const char *name, const char *extra, double v) {
    buf_puts(w->out, name);
    labels(w, extra);
    buf_byte(w->out, ' ');
    json_write_double(w->out, v);
    buf_byte(w->out, '\n');
}

static void one(const writer *w, const char *name, const char *type, const char *help, double v) {
    head(w, name, type, help);
    number(w, name, "", v);
}

static void write_histogram(const writer *w, const char *name, const char *help, const histogram *h,
                            const double *bounds) {
    char full[96], extra[48];
    int64_t sum = 0;
    head(w, name, "histogram", help);
    snprintf(full, sizeof full, "%s_bucket", name);
    for (int i = 0; i <= METRICS_BUCKETS; i++) {
        sum += h->count[i];
        if (i < METRICS_BUCKETS)
            snprintf(extra, sizeof extra, ",le=\"%g\"", bounds[i]);
        else
            snprintf(extra, sizeof extra, ",le=\"+Inf\"");
        number(w, full, extra, (double)sum);
    }
    snprintf(full, sizeof full, "%s_sum", name);
    number(w, full, "", h->sum);
    snprintf(full, sizeof full, "%s_count", name);
    number(w, full, "", (double)h->n);
}

static void write_requests(const writer *w, const metrics *m, const metrics_gauges *g) {
    static const char *const names[8] = { NULL, "stop", "length", "tool_calls", "deadline", NULL, NULL, NULL };
    static const char *const statuses[6] = { "none", "1xx", "2xx", "3xx", "4xx", "5xx" };
    char extra[48];
    one(w, "nibble_requests_total", "counter", "generation requests received", (double)m->requests);
    one(w, "nibble_requests_finished_total", "counter", "answered in full", (double)m->finished);
    one(w, "nibble_requests_cancelled_total", "counter", "the client left before the end", (double)m->cancelled);
    one(w, "nibble_requests_refused_total", "counter", "malformed, too long or the queue was full", (double)m->refused);
    one(w, "nibble_requests_failed_total", "counter", "failed while being answered", (double)m->failed);
    head(w, "nibble_http_responses_total", "counter", "HTTP responses by class; none: the client left first");
    for (int i = 0; i < 6; i++) {
        snprintf(extra, sizeof extra, ",status=\"%s\"", statuses[i]);
        number(w, "nibble_http_responses_total", extra, (double)m->http[i]);
    }
    head(w, "vllm:request_success_total", "counter", "answers by the reason of their end");
    for (int i = 0; i < 8; i++) {
        if (!names[i]) continue;
        snprintf(extra, sizeof extra, ",finished_reason=\"%s\"", names[i]);
        number(w, "vllm:request_success_total", extra, (double)m->finish[i]);
    }
    one(w, "nibble_requests_preparing", "gauge", "being parsed, rendered and encoded", g->preparing);
    one(w, "nibble_connections", "gauge", "open connections", g->connections);
    one(w, "nibble_ready", "gauge", "1 when requests are served", g->ready);
    one(w, "nibble_uptime_seconds", "gauge", "since the start", g->uptime_seconds);
    one(w, "nibble_load_seconds", "gauge", "from the start until the model was loaded", g->load_seconds);
}

static void write_tokens(const writer *w, const metrics *m) {
    one(w, "nibble_prompt_tokens_total", "counter", "tokens of accepted prompts", (double)m->prompt_tokens);
    one(w, "vllm:prompt_tokens_total", "counter", "as nibble_prompt_tokens_total", (double)m->prompt_tokens);
    one(w, "vllm:prefix_cache_queries_total", "counter", "tokens looked up in the prefix cache",
        (double)m->prompt_tokens);
    one(w, "nibble_cached_tokens_total", "counter", "prompt tokens taken from the prefix cache",
        (double)m->cached_tokens);
    one(w, "nibble_output_tokens_total", "counter", "tokens of finished answers", (double)m->output_tokens);
    one(w, "nibble_reasoning_tokens_total", "counter", "of these, tokens of thoughts", (double)m->reasoning_tokens);
    write_histogram(w, "vllm:time_to_first_token_seconds", "from the submission to the first token", &m->ttft,
                    seconds_bounds);
    write_histogram(w, "vllm:inter_token_latency_seconds", "between tokens of a request", &m->inter_token,
                    seconds_bounds);
    write_histogram(w, "vllm:e2e_request_latency_seconds", "from the submission to the end", &m->latency,
                    seconds_bounds);
    write_histogram(w, "vllm:request_prompt_tokens", "prompt length", &m->prompt_length, token_bounds);
    write_histogram(w, "vllm:request_generation_tokens", "answer length", &m->output_length, token_bounds);
}

static void write_speculation(const writer *w, const loop_stats *l) {
    char extra[48];
    one(w, "vllm:spec_decode_num_drafts_total", "counter", "verify rounds", (double)l->rounds);
    one(w, "vllm:spec_decode_num_draft_tokens_total", "counter", "drafted tokens", (double)l->drafted);
    one(w, "vllm:spec_decode_num_accepted_tokens_total", "counter", "accepted drafts", (double)l->accepted);
    head(w, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", "accepted drafts by position");
    for (int i = 0; i < ENGINE_MAX_DRAFT; i++) {
        snprintf(extra, sizeof extra, ",position=\"%d\"", i);
        number(w, "vllm:spec_decode_num_accepted_tokens_per_pos_total", extra, (double)l->accepted_at[i]);
    }
    head(w, "nibble_spec_drafted_at_total", "counter", "rounds that proposed a draft at this position");
    for (int i = 0; i < ENGINE_MAX_DRAFT; i++) {
        snprintf(extra, sizeof extra, ",position=\"%d\"", i);
        number(w, "nibble_spec_drafted_at_total", extra, (double)l->drafted_at[i]);
    }
    one(w, "nibble_spec_accept_length", "gauge", "accepted drafts plus one, per round, since the start",
        l->rounds ? (double)(l->accepted + l->rounds) / (double)l->rounds : 0);
    const int64_t alarms[] = { l->spec_floor, l->spec_pinned, l->spec_corrupt };
    static const char *const ids[] = { "W-SPEC-FLOOR", "W-SPEC-PINNED", "E-SPEC-CORRUPT" };
    head(w, "nibble_spec_alarms_total", "counter",
         "windows of rounds whose acceptance was implausible, failed self-tests");
    for (size_t i = 0; i < ARRAY_LEN(ids); i++) {
        snprintf(extra, sizeof extra, ",id=\"%s\"", ids[i]);
        number(w, "nibble_spec_alarms_total", extra, (double)alarms[i]);
    }
    head(w, "nibble_steps_by_depth_total", "counter", "passes with generating sequences, by drafts per round");
    for (int i = 0; i <= ENGINE_MAX_DRAFT; i++) {
        snprintf(extra, sizeof extra, ",depth=\"%d\"", i);
        number(w, "nibble_steps_by_depth_total", extra, (double)l->depth_steps[i]);
    }
}

/* Different experts over layers is what a layer reads; by the largest number of rows of the passes counted. */
static void write_experts(const writer *w, const loop_stats *l) {
    char extra[48];
    const struct {
        const char *name, *help;
        const int64_t *v;
    } all[] = {
        { "nibble_moe_layers_total", "layers of routed experts computed, by rows of the pass (up to)", l->moe_layers },
        { "nibble_moe_experts_total", "different experts that these read", l->moe_experts },
    };
    for (size_t k = 0; k < ARRAY_LEN(all); k++) {
        head(w, all[k].name, "counter", all[k].help);
        for (int c = 0; c < LOOP_ROWS_CLASSES; c++) {
            if (c == LOOP_ROWS_CLASSES - 1)
                snprintf(extra, sizeof extra, ",rows=\"more\"");
            else
                snprintf(extra, sizeof extra, ",rows=\"%d\"", loop_rows_class_most(c));
            number(w, all[k].name, extra, (double)all[k].v[c]);
        }
    }
}

static void write_engine(const writer *w, const loop_stats *l) {
    one(w, "vllm:num_requests_running", "gauge", "choices that have a slot", l->running);
    one(w, "vllm:num_requests_waiting", "gauge", "choices that wait for one", l->waiting);
    one(w, "nibble_sequences", "gauge", "choices that can run at once, each with a GDN state", l->slots);
    one(w, "vllm:kv_cache_usage_perc", "gauge", "share of the KV cache that running choices alone hold, 0 to 1",
        l->kv_pages ? (double)(l->kv_used - l->kv_kept) / (double)l->kv_pages : 0);
    one(w, "nibble_kv_pages", "gauge", "pages of the KV cache", l->kv_pages);
    one(w, "nibble_kv_pages_used", "gauge", "pages that hold something", l->kv_used);
    one(w, "nibble_kv_pages_kept", "gauge", "of these, pages of the prefix cache", l->kv_kept);
    one(w, "nibble_choices_failed_total", "counter", "choices that failed, as with values that are not finite",
        (double)l->failed);
    one(w, "vllm:generation_tokens_total", "counter", "generated tokens", (double)l->output_tokens);
    one(w, "nibble_choices_preempted_total", "counter", "choices that lost their slot for a while",
        (double)l->preempted);
    one(w, "nibble_choices_expired_total", "counter", "choices that ended at their deadline", (double)l->expired);
    one(w, "nibble_choices_shared_total", "counter", "choices that took over another's prompt", (double)l->shared);
    one(w, "nibble_steps_total", "counter", "passes of the engine", (double)l->steps);
    one(w, "nibble_prompt_rows_total", "counter", "rows of prompts in passes", (double)l->prompt_rows);
    one(w, "nibble_decode_rows_total", "counter", "rows of generating sequences in passes", (double)l->decode_rows);
    one(w, "nibble_step_seconds_total", "counter", "time in steps", l->step_seconds);
    one(w, "nibble_work_seconds_total", "counter", "of these in the model, in sampling and in hand-over",
        l->work_seconds);
    one(w, "nibble_prefix_hits_total", "counter", "prompts that took up what an earlier one left",
        (double)l->prefix_hits);
    one(w, "nibble_prefix_hit_tokens_total", "counter", "prompt tokens saved so", (double)l->prefix_tokens);
    one(w, "vllm:prefix_cache_hits_total", "counter", "as nibble_prefix_hit_tokens_total", (double)l->prefix_tokens);
    one(w, "nibble_prefix_entries", "gauge", "states kept", (double)l->prefix_entries);
    one(w, "nibble_prefix_bytes", "gauge", "their memory", (double)l->prefix_bytes);
    one(w, "nibble_prefix_made_total", "counter", "states kept so far", (double)l->prefix_made);
    one(w, "nibble_prefix_evicted_total", "counter", "given up for room", (double)l->prefix_evicted);
    one(w, "nibble_prefix_files", "gauge", "states in the folder of the prefix cache", l->prefix_files);
    one(w, "nibble_prefix_file_bytes", "gauge", "their size", (double)l->prefix_file_bytes);
    one(w, "nibble_prefix_loaded_total", "counter", "states read from there", (double)l->prefix_loaded);
    one(w, "nibble_prefix_forgotten_total", "counter", "dropped because their sequence came out not finite",
        (double)l->prefix_forgotten);
    write_speculation(w, l);
    write_experts(w, l);
}

void metrics_write(buf *out, const metrics *m, const loop_stats *l, const metrics_gauges *g) {
    const writer w = { out, g->model };
    write_requests(&w, m, g);
    write_tokens(&w, m);
    if (l) write_engine(&w, l);
}
