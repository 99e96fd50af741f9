/* metrics.h - counters and histograms of the server, and their Prometheus text. Event thread only. */
#ifndef NIBBLE_METRICS_H
#define NIBBLE_METRICS_H

#include "base/buf.h"
#include "engine/engine.h"

enum { METRICS_BUCKETS = 16 };

typedef struct histogram {
    int64_t count[METRICS_BUCKETS + 1];
    double sum;
    int64_t n;
} histogram;

typedef struct metrics {
    int64_t requests, refused, failed, cancelled, finished;
    int64_t http[6]; /* by hundred of the status; 0: the peer left before an answer */
    int64_t prompt_tokens, cached_tokens, output_tokens, reasoning_tokens;
    int64_t finish[8]; /* by chat_finish */
    histogram ttft, inter_token, latency, prompt_length, output_length;
} metrics;

typedef struct metrics_gauges {
    int preparing, active, connections, ready;
    const char *model, *version;
    double uptime_seconds, load_seconds;
} metrics_gauges;

void metrics_seconds(histogram *h, double seconds);
void metrics_tokens(histogram *h, int tokens);
/* Prometheus text format 0.0.4: nibble_*, and vllm:* where the meaning is the same. `l` may be NULL (not loaded yet). */
void metrics_write(buf *out, const metrics *m, const loop_stats *l, const metrics_gauges *g);

#endif
