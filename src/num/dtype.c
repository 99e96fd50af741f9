#include "num/dtype.h"

static const struct {
    const char *name;
    int bytes;
} table[DT_COUNT] = {
    [DT_BOOL] = { "BOOL", 1 },       [DT_U8] = { "U8", 1 },           [DT_I8] = { "I8", 1 },
    [DT_I16] = { "I16", 2 },         [DT_U16] = { "U16", 2 },         [DT_I32] = { "I32", 4 },
    [DT_U32] = { "U32", 4 },         [DT_I64] = { "I64", 8 },         [DT_U64] = { "U64", 8 },
    [DT_F8_E4M3] = { "F8_E4M3", 1 }, [DT_F8_E5M2] = { "F8_E5M2", 1 }, [DT_F16] = { "F16", 2 },
    [DT_BF16] = { "BF16", 2 },       [DT_F32] = { "F32", 4 },         [DT_F64] = { "F64", 8 },
};

int dtype_bytes(dtype t) { return table[t].bytes; }
const char *dtype_name(dtype t) { return table[t].name; }

bool dtype_parse(dtype *out, str s) {
    for (int t = 0; t < DT_COUNT; t++)
        if (str_is(s, table[t].name)) return *out = (dtype)t, true;
    return false;
}
