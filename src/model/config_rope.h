/* config_rope.h - rotary frequencies from a config (private to model/). */
#ifndef NIBBLE_CONFIG_ROPE_H
#define NIBBLE_CONFIG_ROPE_H

#include "model/config.h"
#include "model/fields.h"

/* Fills rotary_dim, rope*, inv_freq, rope_axis, yarn_factor and, for YaRN, raises max_position. Needs head_dim and
 * max_position. Errors: E-CONFIG-FIELD, E-CONFIG-ROPE. */
NODISCARD bool config_read_rope(model_config *c, const fields *text, err *e);

#endif
