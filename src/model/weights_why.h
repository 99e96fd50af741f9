/* weights_why.h - what is probably wrong when a checkpoint does not bind (private to model/). */
#ifndef NIBBLE_WEIGHTS_WHY_H
#define NIBBLE_WEIGHTS_WHY_H

#include "model/weights.h"

/* A parameter that no tensor fills: E-LOAD-UNFILLED with a guess. `prefix` indexes name_prefixes. */
bool why_unfilled(const ckpt *c, const model_config *cfg, int prefix, str name, err *e);
/* No known prefix leads to an embedding at all. */
bool why_no_model(const ckpt *c, err *e);
/* `count` tensors were bound by nothing; first[0..shown) are some of them: E-LOAD-UNUSED with a guess. */
bool why_unused(const ckpt *c, const model_config *cfg, int prefix, const st_tensor *const *first, int shown, int count,
                err *e);

#endif
