/* calib_data.h - where calibration tokens come from: text, JSONL, token ids, or the model itself. */
#ifndef NIBBLE_CALIB_DATA_H
#define NIBBLE_CALIB_DATA_H

#include "quant/calib.h"

typedef struct calib_source {
    const char *model_dir; /* tokenizer and template */
    int samples;           /* at most so many sequences; 0 = all */
    int seq;               /* tokens per sequence: longer ones are cut, a plain text is split */
} calib_source;

/* A file of JSON lines ({"messages": [...], ...} rendered by the model's template, {"text": "..."}, or a JSON string), or any
 * other file as one plain text. `label` names it in the provenance. A line that the template refuses is skipped and counted
 * (W-CALIB-SKIPPED). Errors: E-FILE-*, E-CALIB-LINE (not JSON: line number), E-CALIB-EMPTY, E-TEXT-UTF8, E-TOK-*. */
NODISCARD bool calib_data_file(calib_data *out, const calib_source *s, const char *path, const char *label, err *e);
/* Token ids: a list, a list of lists, an object with `sequences`. Needs no tokenizer. Errors: E-FILE-*, E-CMD-IDS. */
NODISCARD bool calib_data_ids(calib_data *out, const char *path, int samples, int seq, err *e);
/* The model writes: sampled answers (temperature 1, fixed seed) to the first messages of a JSONL file of prompts. */
NODISCARD bool calib_data_self(calib_data *out, const calib_source *s, const char *prompts_path,
                               const ops_options *backend, err *e);

#endif
