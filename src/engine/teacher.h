/* teacher.h - teacher-forced passes over given ids: what `logits`, evaluation and the oracle tests read. */
#ifndef NIBBLE_TEACHER_H
#define NIBBLE_TEACHER_H

#include "engine/engine.h"

typedef struct teacher_result { /* host memory, owned; teacher_free */
    int rows;                   /* tokens */
    float *hidden;              /* [layers][rows, H] input of layer k, or NULL unless asked */
    float *final_norm;          /* [rows, H] */
    float *mtp1;                /* [rows, H] draft step 1 after mtp.norm, or NULL unless asked */
    float *mtp2;                /* [rows, H] draft step 2 */
} teacher_result;

/* Trunk over ids[0..n) from an empty state in slot 0; with `mtp` both draft steps as the oracle makes them: next ids =
 * ids shifted by one with the trunk's argmax appended; step 2 is a second full pass with its own KV, ids shifted again with
 * step 1's argmax appended. `g` must have been opened with 2 slots for mtp (the second holds step 2's KV); its state is
 * overwritten, so no session may be open. argmax runs over the whole vocabulary. Errors: E-ENGINE-*. */
NODISCARD bool teacher_run(teacher_result *out, engine *g, const int32_t *tokens, int n, bool hidden, bool mtp, err *e);
void teacher_free(teacher_result *r);

/* logits [rows, vocab] host = head(hidden [rows, H] host). */
NODISCARD bool teacher_logits(engine *g, float *logits, const float *hidden, int rows, err *e);

#endif
