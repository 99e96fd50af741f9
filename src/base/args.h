/* args.h - one table of options per command: parsing, suggestions and --help from the same source.
 *
 * Forms: `--name value`, `--name=value`, `-n value`, `-nvalue`, bundled short flags `-vq`; `--` ends
 * options; a lone `-` is a positional. A value may start with '-', but one that spells a known long option
 * is taken for a forgotten value (write `--name=--value`). The last of repeated options wins, except
 * lists. Every failure is ERR_USAGE, id E-USAGE, and names the option.
 *
 *     int tokens = 512; bool json = false; bool given = false;
 *     const arg_opt opts[] = {
 *         { .type = ARG_GROUP, .help = "Output" },
 *         { .type = ARG_FLAG, .name = "json", .dst = &json, .help = "one JSON object" },
 *         { .type = ARG_INT, .name = "max-tokens", .key = 'n', .meta = "N", .dst = &tokens, .given = &given,
 *           .lo = 1, .hi = 1 << 20, .help = "stop after N tokens" },
 *     };
 *     const arg_spec spec = { .usage = "run [options] [DIR]", .about = "Answer a prompt.", .opts = opts,
 *                             .count = ARRAY_LEN(opts), .max_positional = 1 };
 *     arg_strings pos = {0}; bool help;
 *     if (!args_parse(&spec, argc, argv, &pos, &help, e)) ...
 *     if (help) args_help(&text, &spec);
 *
 * Defaults are what the destinations hold before parsing; args_help shows them, and args_parse leaves them
 * untouched when --help is asked for. Strings are borrowed from argv. Not thread-safe per table. */
#ifndef NIBBLE_ARGS_H
#define NIBBLE_ARGS_H

#include "base/buf.h"
#include "base/err.h"

typedef enum arg_type {
    ARG_GROUP,  /* a heading of the help text; only .help is used */
    ARG_FLAG,   /* bool *: set true */
    ARG_SET,    /* int *: set to .value (--think / --no-think on one int) */
    ARG_COUNT,  /* int *: plus one each time */
    ARG_INT,    /* int *: within [lo, hi] */
    ARG_INT64,  /* int64_t *: within [lo, hi] */
    ARG_BYTES,  /* int64_t *: a size such as 512M, 4G, 1.5GiB or plain bytes; K M G T are powers of 1024 */
    ARG_DOUBLE, /* double *: finite, within [flo, fhi] (both 0: no bounds) */
    ARG_STR,    /* const char ** */
    ARG_LIST,   /* arg_strings *: every occurrence is added */
    ARG_ENUM    /* int *: index of the choice */
} arg_type;

typedef struct arg_strings {
    const char **v; /* [n], owned; the strings are argv's */
    int n;
} arg_strings;

typedef struct arg_opt {
    arg_type type;
    char key;         /* one-letter alias or 0 */
    bool hidden;      /* accepted, not listed */
    const char *name; /* without dashes */
    const char *meta; /* name of the value in the help text; NULL: by type */
    const char *help; /* one line; wrapped by args_help */
    void *dst;
    bool *given;    /* set when the option occurs; may be NULL */
    int64_t lo, hi; /* INT, INT64, BYTES; both 0: no bounds */
    double flo, fhi;
    int value;                  /* SET */
    const char *const *choices; /* ENUM: NULL-terminated */
    const char *none;           /* how the default reads in the help when it is not the value (e.g. "all CPUs"); ""
                                   shows none */
} arg_opt;

typedef struct arg_spec {
    const char *usage; /* behind "usage: nibble " */
    const char *about; /* paragraph, wrapped */
    const arg_opt *opts;
    int count;
    const arg_opt *common; /* a second table, such as the options every command has; may be NULL */
    int common_count;
    int min_positional, max_positional; /* max < 0: any number */
    const char *examples;               /* lines printed as they are, or NULL */
} arg_spec;

/* Parse argv[1..argc). Positionals are added to *pos (may be NULL when none are allowed). *help is set when
 * --help or -h (unless the table uses 'h') occurs before any `--`; then nothing else was changed. */
NODISCARD bool args_parse(const arg_spec *spec, int argc, char *const *argv, arg_strings *pos, bool *help, err *e);
/* Help text, at most 100 columns. */
void args_help(buf *out, const arg_spec *spec);

/* The candidate nearest to `word` when it is near enough to be a typing error, else NULL. NULL entries are skipped. */
const char *args_nearest(const char *word, const char *const *candidates, int count);
/* Text to int64 with bounds / to bytes / to a finite double; false when it is none. */
bool args_int(int64_t *out, const char *text);
bool args_bytes(int64_t *out, const char *text);
bool args_double(double *out, const char *text);
void arg_strings_add(arg_strings *s, const char *text);
void arg_strings_free(arg_strings *s);

#endif
