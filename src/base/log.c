#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int level = 1;
static log_sink *sink;
static void *sink_ctx;

void log_say(const char *id, const char *fmt, ...) {
    char line[1000];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    for (char *s = line; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f) *s = '?';
    pthread_mutex_lock(&lock);
    if (sink)
        sink(sink_ctx, id, line);
    else if (id[0] != 'N' || level > 0)
        fprintf(stderr, "nibble: %s: %s\n", id, line);
    pthread_mutex_unlock(&lock);
}

void log_set_level(int new_level) {
    pthread_mutex_lock(&lock);
    level = new_level;
    pthread_mutex_unlock(&lock);
}

int log_level(void) {
    pthread_mutex_lock(&lock);
    const int now = level;
    pthread_mutex_unlock(&lock);
    return now;
}

void log_set_sink(log_sink *new_sink, void *ctx) {
    pthread_mutex_lock(&lock);
    sink = new_sink;
    sink_ctx = ctx;
    pthread_mutex_unlock(&lock);
}
