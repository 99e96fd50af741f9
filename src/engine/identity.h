/* identity.h - which model, with which caches and which arithmetic: what a kept state depends on besides its tokens. */
#ifndef NIBBLE_IDENTITY_H
#define NIBBLE_IDENTITY_H

#include "engine/engine.h"

/* A 64-bit sum over shape, settings, all vectors and scales, and pieces of every matrix. `drafting`: states include draft
 * slots. It tells models apart that were trained, merged or quantized in different ways; it is no proof against intent. */
uint64_t engine_identity(const engine *g, bool drafting);

#endif
