/* Load and encode time of a tokenizer on one text: bench_tokenizer DIR TEXT [--json]. Medians; see bench_tokenizer.py. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "text/tokenizer.h"

#include "report.h"

enum { LOADS = 7, RUNS = 7 };

int main(int argc, char **argv) {
    double load[LOADS], run[RUNS];
    tokenizer *t = NULL;
    buf text = { 0 };
    id_list out = { 0 };
    err e = { 0 };
    if (argc < 3) return fprintf(stderr, "usage: bench_tokenizer DIR TEXT [--json]\n"), 2;
    bool ok = file_read(&text, argv[2], (size_t)1 << 30, &e);
    for (int i = 0; ok && i < LOADS; i++) {
        tokenizer_close(t);
        const double t0 = clock_seconds();
        ok = tokenizer_open(&t, argv[1], &e);
        load[i] = clock_seconds() - t0;
    }
    for (int i = 0; ok && i < RUNS; i++) {
        out.n = 0;
        const double t0 = clock_seconds();
        ok = tokenizer_encode(t, &out, buf_view(&text), NULL, &e);
        run[i] = clock_seconds() - t0;
    }
    if (!ok) return fprintf(stderr, "%s: %s\n", e.id, e.msg), err_exit_code(e.kind);
    uint64_t sum = 0;
    for (size_t i = 0; i < out.n; i++) sum = sum * 31 + (uint64_t)out.v[i];
    const double load_ms = 1e3 * median(load, LOADS), rate = 1e-6 * (double)text.n / median(run, RUNS);
    if (argc > 3 && strcmp(argv[3], "--json") == 0)
        printf("{\"schema\": \"nibble.bench/1\", \"load_ms\": %.1f, \"encode_mb_s\": %.1f, \"tokens\": %zu, "
               "\"checksum\": \"%" PRIu64 "\"}\n",
               load_ms, rate, out.n, sum);
    else
        printf("load %.1f ms, encode %.1f MB/s, %zu tokens from %zu bytes\n", load_ms, rate, out.n, text.n);
    tokenizer_close(t);
    ids_free(&out);
    buf_free(&text);
    return 0;
}
