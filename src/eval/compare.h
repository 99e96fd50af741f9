/* compare.h - one model's logits beside another's, position by position: KL divergence, agreement, perplexity. */
#ifndef NIBBLE_COMPARE_H
#define NIBBLE_COMPARE_H

#include "eval/stat.h"
#include "quant/calib.h"

typedef struct compare_row {
    int seq, pos;
    double kl;        /* sum p log(p / q), p the reference's distribution, in nats; NaN without a reference */
    double nll, want; /* -log of the next token of the text by the model and by the reference; NaN behind the last */
    bool same_top;    /* both have the same most likely id */
} compare_row;

/* Logits of a reference that were saved by `nibble logits` ("<i>.logits" [T or fewer rows, V]), or a model. */
typedef struct compare_source {
    engine *g;     /* NULL: a file */
    st_file saved; /* mapped */
    const char *name;
} compare_source;
/* A directory is a model (activations, KV cache and head as it declares them), anything else is taken for a file. Errors:
 * those of engine_open and st_open. */
NODISCARD bool compare_open(compare_source *out, const char *path, const engine_options *opt, err *e);
void compare_close(compare_source *s);

typedef struct compare_result {
    compare_row *rows; /* [n], by sequence and position */
    int n;
    int vocab;
} compare_result;
void compare_free(compare_result *r);

/* Runs both over every sequence of `d` (teacher-forced). `ref` NULL: perplexity only. skip: positions at the start of each
 * sequence that are left out. Errors: E-EVAL-VOCAB (vocabularies differ), E-EVAL-LOGITS (a saved tensor is missing or has
 * another shape), those of teacher_run; E-EVAL-STOPPED. */
NODISCARD bool compare_run(compare_result *out, engine *got, const compare_source *ref, const calib_data *d, int skip,
                           volatile const int *cancel, err *e);

/* One pair of rows [vocab]; next < 0: none; want NULL: no reference. */
compare_row compare_logits(const float *got, const float *want, int vocab, int next);

typedef struct compare_figures {
    int sequences, positions;
    stat_interval kl; /* mean, its bootstrap over sequences */
    double kl_median, kl_p99, kl_worst;
    stat_interval top;            /* share of positions with the same most likely id, Wilson */
    stat_interval nll, want_nll;  /* mean nats per token (bootstrap over sequences); perplexity is exp of each */
    stat_interval nll_difference; /* nll - want_nll, paired */
} compare_figures;
/* Over the rows for which pick(ctx, row) holds; pick NULL: all. */
compare_figures compare_summary(const compare_result *r, bool (*pick)(const void *ctx, const compare_row *row),
                                const void *ctx, uint64_t seed);

#endif
