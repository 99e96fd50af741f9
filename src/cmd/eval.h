/* eval.h - what the parts of `nibble eval` share. Each kind has its own options, as a command of its own. */
#ifndef NIBBLE_EVAL_H
#define NIBBLE_EVAL_H

#include "cmd/bench.h"
#include "eval/batch.h"
#include "eval/stat.h"
#include "eval/workload.h"

cmd_fn eval_kl, eval_ppl, eval_accept, eval_ab, eval_gsm8k, eval_load, eval_card;

/* A progress line on a terminal, nothing otherwise; `done` of `total` of what `unit` names. Wiped by eval_progress_end. */
typedef struct eval_progress {
    double start, last;
    bool tty, shown;
} eval_progress;
eval_progress eval_progress_begin(void);
void eval_progress_show(eval_progress *p, const char *what, int64_t done, int64_t total);
void eval_progress_end(eval_progress *p);

enum { EVAL_MAX_WORK = 16 };
typedef struct eval_works {
    workload v[EVAL_MAX_WORK];
    int n;
} eval_works;
/* --data: each "NAME=FILE", or FILE, whose name it then has; none: the built-in prompts, by_kind a workload for each kind
 * (math, code, chat, tools, stories), else one of all. Errors: workload_read's. */
NODISCARD bool eval_read_works(eval_works *w, const arg_strings *data, const engine *g, int limit, int think,
                               bool by_kind, err *e);
void eval_works_free(eval_works *w);

/* What the checkpoint's generation_config.json asks for; the caller sets seed and choice. Errors: cmd_sampler's. */
NODISCARD bool eval_model_sampling(sampler_params *out, const engine *g, err *e);

/* "key":[value,lo,hi] with null for what is NaN. */
void eval_json_interval(buf *b, const char *key, stat_interval v);
/* Two cells of a table: the value, and "lo to hi" with so many digits. */
void eval_table_interval(bench_table *t, stat_interval v, int digits);
/* The command line as it was typed, quoted for a shell: a member of the JSON object. */
void eval_json_command(buf *b);
/* Model, machine, formats: members of the JSON object, without braces; the terminal's first line. */
void eval_json_model(buf *b, const char *key, const engine *g);
void eval_describe(char *out, size_t n, const engine *g);

#endif
