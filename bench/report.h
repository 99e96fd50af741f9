/* report.h - what the programs of bench/ share: order statistics and --help. */
#ifndef NIBBLE_BENCH_REPORT_H
#define NIBBLE_BENCH_REPORT_H

#include <stdio.h>
#include <stdlib.h>

#include "base/args.h"

static inline int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts v. The upper of the two middle ones when n is even. */
static inline double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static inline void print_help(const arg_spec *spec) {
    buf text = { 0 };
    args_help(&text, spec);
    fwrite(text.p, 1, text.n, stdout);
    buf_free(&text);
}

#endif
