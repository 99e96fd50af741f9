/* eval.h - what the parts of `nibble eval` share. Each kind has its own options, as a command of its own. */
#ifndef NIBBLE_CMD_EVAL_H
#define NIBBLE_CMD_EVAL_H

#include "cmd/bench.h"
#include "eval/stat.h"

cmd_fn eval_kl, eval_ppl;

/* A progress line on a terminal, nothing otherwise; `done` of `total` of what `unit` names. Wiped by eval_progress_end. */
typedef struct eval_progress {
    double start, last;
    bool tty, shown;
} eval_progress;
eval_progress eval_progress_begin(void);
void eval_progress_show(eval_progress *p, const char *what, int64_t done, int64_t total);
void eval_progress_end(eval_progress *p);

/* "key":[value,lo,hi] with null for what is NaN. */
void eval_json_interval(buf *b, const char *key, stat_interval v);
/* Two cells of a table: the value, and "lo to hi" with so many digits. */
void eval_table_interval(bench_table *t, stat_interval v, int digits);
/* Model, machine, formats: members of the JSON object, without braces; the terminal's first line. */
void eval_json_model(buf *b, const char *key, const engine *g);
void eval_describe(char *out, size_t n, const engine *g);

#endif
