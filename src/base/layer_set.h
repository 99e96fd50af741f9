/* layer_set.h - some layers of a model, by number. Zeroed: none. */
#ifndef NIBBLE_LAYER_SET_H
#define NIBBLE_LAYER_SET_H

#include "base/base.h"
#include "base/err.h"

enum { LAYER_SET_MOST = 1024 };

typedef struct layer_set {
    bool all;
    int top; /* 1 + the largest number that was named; 0: none was */
    uint64_t bits[LAYER_SET_MOST / 64];
} layer_set;

/* "3", "0-19", "0-19,30,35-39"; numbers below LAYER_SET_MOST. False: anything else (*s is then undefined). */
NODISCARD bool layer_set_parse(layer_set *s, const char *text);
bool layer_set_has(const layer_set *s, int layer);
bool layer_set_empty(const layer_set *s);

#endif
