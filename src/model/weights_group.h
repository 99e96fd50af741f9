/* weights_group.h - internal to weights: do Linears that read the same input share their scales?
 *
 * The NVFP4 layout gives q, k and v, in_proj_qkv and in_proj_z, and gate and up (of a shared, dense or routed expert) one
 * weight_scale_2 and one input_scale each, because engines fuse them into one product. nibble runs every Linear with its
 * own scales, so members that differ are right here and wrong elsewhere: said, never merged. FP8 per tensor has no groups. */
#ifndef NIBBLE_WEIGHTS_GROUP_H
#define NIBBLE_WEIGHTS_GROUP_H

#include "model/weights.h"

/* W-LOAD-GROUP, once, with the number of differing groups and the first one's names and values. */
void group_check(const weights *w, const model_config *config, const char *dir);

#endif
