/* target.h - what other engines make of a checkpoint: loader behaviours, the versions in which they hold, and their sources.
 *
 * A table, not a simulation: a row says which property of a checkpoint meets which behaviour of an engine. What no row covers
 * counts as working, so "works" means: no known obstacle. */
#ifndef NIBBLE_TARGET_H
#define NIBBLE_TARGET_H

#include "check/view.h"

/* From harmless to fatal. */
typedef enum outcome { OUT_WORKS, OUT_DEGRADES, OUT_NO_DRAFTS, OUT_WRONG, OUT_FAILS } outcome;
extern const char
    *const outcome_names[]; /* "works", "works, degraded", "works without drafts", "wrong output", "does not load" */

typedef struct target {
    const char *name; /* "sglang" */
    char version[24]; /* as given; "" = the newest known */
    outcome worst;    /* filled by target_predict */
} target;

/* "NAME" or "NAME@VERSION" (such as 0.5.17, 0.5.15.post1, b8400, main). Errors: E-USAGE. */
NODISCARD bool target_parse(target *out, const char *text, err *e);
/* The i-th engine's name, or NULL. */
const char *target_name(int i);
/* Add a finding for each behaviour that the checkpoint meets: C-TARGET-*. */
void target_predict(target *t, check_view *v);
/* The table, for --target list. */
void target_list(buf *out);

#endif
