/* dtype.h - element types of safetensors files that this model family uses. */
#ifndef NIBBLE_DTYPE_H
#define NIBBLE_DTYPE_H

#include "base/str.h"

typedef enum dtype {
    DT_BOOL,
    DT_U8,
    DT_I8,
    DT_I16,
    DT_U16,
    DT_I32,
    DT_U32,
    DT_I64,
    DT_U64,
    DT_F8_E4M3,
    DT_F8_E5M2,
    DT_F16,
    DT_BF16,
    DT_F32,
    DT_F64,
    DT_COUNT
} dtype;

int dtype_bytes(dtype t);            /* 1, 2, 4 or 8 */
const char *dtype_name(dtype t);     /* the safetensors spelling: "BF16", "F8_E4M3" ... */
bool dtype_parse(dtype *out, str s); /* false: unknown */

#endif
