/* workload.h - prompts for generation, from files of questions, conversations or texts. */
#ifndef NIBBLE_WORKLOAD_H
#define NIBBLE_WORKLOAD_H

#include "base/arena.h"
#include "engine/engine.h"

typedef struct workload_item {
    int32_t *ids; /* [n] the rendered prompt; NULL with requests_only */
    int n;
    str messages, tools;  /* JSON arrays for an API; empty when the line has none */
    str question, answer; /* as in the file; empty when it has none */
    bool thinks;          /* the prompt ends inside a thinking block */
    double at;            /* `at` of the line, seconds; negative: none */
    int max_tokens;       /* of the line; 0: none */
} workload_item;

typedef struct workload {
    char name[32];
    arena mem;
    workload_item *v;
    int n;
} workload;

typedef struct workload_options {
    int limit;          /* at most so many lines; 0 = all */
    int think;          /* 1, 0; negative: as the template does by default */
    int shots;          /* the file's first lines are shown as answered examples before every later one */
    const char *system; /* a system message; may be NULL */
    const char *kind;   /* only lines of this `kind`; NULL: all */
    bool requests_only; /* messages are wanted, no ids */
} workload_options;

/* JSON lines: {"question", "answer"}, {"prompt"}, {"text"}, or {"messages": [...], "tools": ...} (an assistant's answer at
 * the end is left out), rendered by the model's template; {"ids": [...]} needs neither. tok and tmpl may be NULL for such.
 * Errors: E-FILE-*, E-EVAL-LINE (names the line), E-CALIB-EMPTY, E-TEMPLATE-*. */
NODISCARD bool workload_read(workload *w, const char *name, const char *path, const tokenizer *tok,
                             const chat_template *tmpl, const workload_options *o, err *e);
void workload_free(workload *w);

#endif
