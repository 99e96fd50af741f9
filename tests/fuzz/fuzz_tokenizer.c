/* tokenizer.json: the input is the file. What opens must encode and decode without fault, too. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static char dir[] = "/tmp/fuzz-tokenizer-XXXXXX";

static void remove_folder(void) {
    char path[128];
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    unlink(path);
    rmdir(dir);
}

static void quiet(void *ctx, const char *id, const char *line) { (void)ctx, (void)id, (void)line; }

static void start(void) {
    log_set_sink(quiet, NULL);
    if (!mkdtemp(dir)) abort();
    atexit(remove_folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    static bool started;
    static const char text[] = "Hello, wor\xC5\xBF"
                               "d's  <|x|>\n\n123 e\xCC\x81\xE4\xB8\xAD\xF0\x9F\x99\x82   ";
    char path[128];
    if (!started) start();
    started = true;
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    FILE *f = fopen(path, "wb");
    if (!f) abort();
    fwrite(p, 1, n, f);
    fclose(f);
    tokenizer *t = NULL;
    id_list a = { 0 };
    buf out = { 0 };
    err e = { 0 };
    if (tokenizer_open(&t, dir, &e)) {
        if (tokenizer_encode(t, &a, STR(text), NULL, &e)) {
            if (!tokenizer_decode(t, &out, a.v, a.n, false, &e)) abort(); /* what it gave it must know */
            detok d = { 0 };
            for (size_t i = 0; i < a.n; i++) detok_push(t, &d, a.v[i], i & 1, &out);
            detok_end(&d, &out);
        }
    } else if (!e.id || e.kind == ERR_NONE) {
        abort();
    }
    tokenizer_close(t);
    ids_free(&a);
    buf_free(&out);
    return 0;
}
