/* calib_data.h - where calibration tokens come from: text, JSONL, token ids, or the model itself. */
#ifndef NIBBLE_CALIB_DATA_H
#define NIBBLE_CALIB_DATA_H

#include "quant/calib.h"

typedef struct calib_source {
    const char *model_dir; /* tokenizer and template */
    int samples;           /* at most so many sequences; 0 = all */
    int seq;               /* tokens per sequence: longer ones are cut, a plain text is split; 0 = all (self: 512) */
    uint64_t seed;         /* of what the model writes (calib_data_self) */
    volatile const int *cancel; /* stops calib_data_self: E-CALIB-STOPPED; may be NULL */
} calib_source;

/* A file of JSON lines ({"messages": [...], ...} rendered by the model's template, {"text": "..."}, or a JSON string), or any
 * other file as one plain text. `label` names it in the provenance. A conversation that ends with the assistant gets no
 * generation prompt behind it; other keys of a line are template variables. A line that the template refuses is skipped and
 * counted (W-CALIB-SKIPPED). Errors: E-FILE-*, E-CALIB-LINE (not JSON: line number), E-CALIB-EMPTY, E-TEXT-UTF8, E-TOK-*. */
NODISCARD bool calib_data_file(calib_data *out, const calib_source *s, const char *path, const char *label, err *e);
/* Token ids: a list, a list of lists, an object with `sequences`. Needs no tokenizer. Errors: E-FILE-*, E-CMD-IDS. */
NODISCARD bool calib_data_ids(calib_data *out, const char *path, int samples, int seq, err *e);
/* The model writes: answers to a JSONL file of prompts, sampled at temperature 1 until it stops or a sequence has `seq`
 * tokens, prompt included. The same seed gives the same tokens on every backend and thread count. Errors: those of
 * calib_data_file and engine_open; E-CALIB-LONG (the context is shorter than `seq`). */
NODISCARD bool calib_data_self(calib_data *out, const calib_source *s, const char *prompts_path,
                               const ops_options *backend, err *e);

#endif
