#include "lib/toytok.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/buf.h"
#include "base/json.h"
#include "lib/scratch.h"
#include "text/unicode.h"

void toytok_code(buf *out, uint32_t code) {
    uint8_t c[4];
    buf_add(out, c, (size_t)utf8_put(c, code));
}

rnd rnd_open(uint64_t seed) {
    const char *given = getenv("SEED");
    if (given) seed = strtoull(given, NULL, 0);
    printf("SEED=%llu\n", (unsigned long long)seed);
    return (rnd){ seed };
}

uint64_t rnd_next(rnd *r) {
    uint64_t z = r->state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void add_alphabet(buf *b) {
    int next = 0;
    for (uint32_t i = 0; i < 256; i++) {
        /* 188 bytes stand for themselves, the other 68 follow as U+0100 and up. */
        uint32_t code = 33 + i;
        if (i >= 94) code = 161 + i - 94;
        if (i >= 106) code = 174 + i - 106;
        if (i >= 188) code = 256 + (uint32_t)next++;
        uint8_t c[4];
        const int n = utf8_put(c, code);
        buf_puts(b, i ? ", " : "");
        json_write_str(b, (str){ (const char *)c, (size_t)n });
        buf_printf(b, ": %u", (unsigned)i);
    }
}

static const char *or_else(const char *s, const char *absent) { return s ? s : absent; }

void toytok_write(const char *dir, const toytok *s) {
    buf b = { 0 };
    buf_printf(&b, "{\"version\": \"1.0\", \"added_tokens\": %s, \"normalizer\": %s, ", or_else(s->added, "[]"),
               or_else(s->normalizer, "{\"type\": \"NFC\"}"));
    buf_printf(&b, "\"pre_tokenizer\": %s, \"post_processor\": %s, \"decoder\": %s, ",
               or_else(s->pre, "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": true}"),
               or_else(s->post, "null"), or_else(s->decoder, "{\"type\": \"ByteLevel\"}"));
    buf_puts(&b, "\"model\": {\"type\": \"BPE\", \"vocab\": ");
    if (s->vocab) {
        buf_puts(&b, s->vocab);
    } else {
        buf_puts(&b, "{");
        add_alphabet(&b);
        buf_printf(&b, "%s}", or_else(s->vocab_more, ""));
    }
    buf_printf(&b, ", \"merges\": %s%s}%s}", or_else(s->merges, "[]"), or_else(s->model_more, ""),
               or_else(s->top_more, ""));
    free(scratch_put(dir, "tokenizer.json", b.p, b.n));
    if (s->config) free(scratch_puts(dir, "tokenizer_config.json", s->config));
    buf_free(&b);
}

bool toytok_open(tokenizer **out, const toytok *s, err *e) {
    char *dir = scratch_new();
    toytok_write(dir, s);
    const bool ok = tokenizer_open(out, dir, e);
    scratch_free(dir);
    return ok;
}

const char *toytok_ids(const tokenizer *t, str text, const encode_options *o) {
    static char out[4096];
    id_list a = { 0 };
    err e = { 0 };
    if (!tokenizer_encode(t, &a, text, o, &e)) return e.id;
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; i < a.n && n + 16 < sizeof out; i++)
        n += (size_t)snprintf(out + n, sizeof out - n, "%s%d", i ? " " : "", (int)a.v[i]);
    ids_free(&a);
    return out;
}
