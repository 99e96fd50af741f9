/* bench.h - what the parts of `nibble bench` share: options, the model, the measured read bandwidth, tables and plots. */
#ifndef NIBBLE_BENCH_H
#define NIBBLE_BENCH_H

#include "cmd/cmd.h"
#include "model/mock.h"

enum { BENCH_MAX_LIST = 16, BENCH_MAX_REPEAT = 99 };

typedef struct bench_list { /* "0,1024,4096" */
    int v[BENCH_MAX_LIST], n;
} bench_list;
/* "0,1024,4096": numbers within [lo, hi], none twice, at most BENCH_MAX_LIST. Error: E-USAGE (names the option). */
NODISCARD bool bench_read_list(bench_list *out, const char *option, const char *text, int lo, int hi, err *e);

typedef struct bench_options {
    const char *dir;       /* NULL with a synthetic model */
    int synthetic, layers; /* preset; < 0: none */
    bench_list frontier, depth, batch, prompt, rows;
    int repeat, tokens, ms, kv, act, head;
    const char *draft_head, *csv, *svg;
    double accept[ENGINE_MAX_DRAFT]; /* of draft i when those before it were right */
    bool has_accept, adaptive;
    int64_t seed;
} bench_options;

/* ---- values ---- */

typedef struct bench_series {
    double v[BENCH_MAX_REPEAT];
    int n;
} bench_series;
typedef struct bench_spread {
    double median, min, max;
} bench_spread;
bench_spread bench_spread_of(bench_series *s); /* sorts; n >= 1 */

/* ---- the machine ---- */

/* A buffer beyond the caches (as far as `like_bytes`, the size of what is compared, goes beyond them) and a pool of the
 * same threads that read it in streams. */
typedef struct bench_reader {
    pool *p;
    uint8_t *mem;
    size_t bytes;
    uint64_t sums[1024];
} bench_reader;
NODISCARD bool bench_reader_open(bench_reader *r, int threads, size_t like_bytes, err *e);
double bench_read(bench_reader *r); /* bytes per second, median of five passes */
void bench_reader_close(bench_reader *r);

/* ---- the model ---- */

typedef struct bench_model {
    engine *g;
    mock s; /* zero for a checkpoint */
    bench_reader reader;
    char name[256];
} bench_model;
/* ctx, slots: as in engine_options. Errors: engine_open's, E-BENCH-LAYERS, E-MACHINE-MEMORY. */
NODISCARD bool bench_model_open(bench_model *m, const bench_options *o, int ctx, int slots, err *e);
void bench_model_close(bench_model *m);

/* Bytes of memory that one pass of decoding must read (the state: and write), by part. */
typedef struct bench_bytes {
    double nvfp4, plain, head, state, kv, draft;
} bench_bytes;
/* A round of `sequences` with `depth` drafts each (on average) that yields `yield` tokens of each (1 without drafts), at
 * `context` cached positions. `candidates`: exact head rows per screened row. `experts`: different experts that a layer's
 * pass reads; 0: not counted, so routing of rows is taken as independent. */
typedef struct bench_round {
    double sequences, depth, yield, context, candidates, experts;
} bench_round;
bench_bytes bench_bytes_of(const engine *g, const bench_round *r); /* per token */
double bench_bytes_total(const bench_bytes *b);
/* Multiply-accumulates of one row through the trunk's matrices, the head apart. */
double bench_macs(const engine *g);

/* ---- tables ---- */

enum {
    BENCH_MAIN = 1,
    BENCH_PARTS = 2,
    BENCH_HIDDEN = 4
}; /* which table of the terminal shows a column; JSON and CSV have all */

typedef struct bench_column {
    const char *name, *head; /* in JSON and CSV; on the terminal */
    int digits, tables;      /* digits < 0: text */
} bench_column;
typedef struct bench_cell {
    double v; /* NaN: none */
    char text[160];
} bench_cell;
typedef struct bench_table {
    const bench_column *cols;
    int n_cols, rows, at;
    bench_cell *cells;
} bench_table;
void bench_number(bench_table *t, double v); /* the next cell, row by row */
void bench_text(bench_table *t, const char *text);
void bench_table_print(const bench_table *t, int table);
void bench_table_free(bench_table *t);

/* Everything said besides the table: lines on the terminal, members of the JSON object. */
typedef struct bench_report {
    const char *command; /* "bench" when NULL: of the schema and the heading */
    const char *what;
    bench_table table;
    buf lines, members, notes;
} bench_report;
void bench_note(bench_report *r, const char *fmt, ...) PRINTF_LIKE(2, 3); /* what a reader must know */
void bench_machine(bench_report *r, const char *model, const ops *o);
/* JSON or tables on standard output, then the CSV file. */
NODISCARD bool bench_report_write(bench_report *r, const bench_options *o, err *e);
void bench_report_free(bench_report *r);

/* ---- plots ---- */

typedef struct bench_plot { /* a row of the table with one group text is a line (or bars) over x */
    const char *title, *x, *y;
    int group_col, group2_col, x_col, y_col, lo_col, hi_col, ref_col; /* -1: none; ref: dashed (the roofline) */
    bool bars;
} bench_plot;
/* SVG of the table into o->svg when that is asked for. Errors: E-FILE-WRITE. */
NODISCARD bool bench_plot_write(const bench_table *t, const bench_plot *p, const bench_options *o, err *e);

/* ---- the benchmarks: 0, or 130 when interrupted; e is filled on failure ---- */

int bench_decode(const bench_options *o, err *e);
int bench_prefill(const bench_options *o, err *e);
int bench_kernels(const bench_options *o, err *e);
int bench_batch(const bench_options *o, err *e); /* decode with --batch */
/* Rounds as o->accept wants them; count[depth]: rounds so far. */
int bench_simulate(const bench_options *o, int64_t *count, int depth);
/* Exact rows of the screened head per row between two counts; a row that the bounds did not help counts as all of them. */
double bench_candidates(const engine *g, head_counts from, head_counts to);
head_counts bench_head_counts(const engine *g); /* zero without a screened head */
void bench_note_made_up(bench_report *r, const bench_options *o);
/* A prompt of made-up ids: ids[from .. to). */
void bench_prompt(int32_t *ids, int from, int to, int vocab);

#endif
