/* names.h - tensor names of the family: prefixes, classes, companions of quantized weights.
 *
 * Text tensors stand behind one of three prefixes (model.language_model., model., language_model.model.), the draft
 * head behind mtp., the vision tower behind model.visual. or visual.; lm_head stands alone. Pure functions. */
#ifndef NIBBLE_NAMES_H
#define NIBBLE_NAMES_H

#include "base/str.h"

enum { NAME_PREFIXES = 3 };
extern const char *const name_prefixes[NAME_PREFIXES]; /* most specific first */

bool name_is_vision(str name);
bool name_is_mtp(str name);
/* Index into name_prefixes, or -1. "model.visual.x" and "model.mtp.x" have none. */
int name_prefix(str name);
/* Layer number behind "layers." of a text or MTP tensor, or -1. */
int name_layer(str name);
/* Expert number behind "experts." of a split expert tensor, or -1. */
int name_expert(str name);

/* A scale that belongs to a quantized weight (or to the KV cache): it is no parameter of its own. */
bool name_is_scale(str name);
bool name_is_kv_scale(str name);

#endif
