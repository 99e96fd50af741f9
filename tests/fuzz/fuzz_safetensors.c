/* Any bytes: refused, or every tensor lies inside the file and is found by its name. */
#include "ckpt/safetensors.h"

#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    st_file f;
    err e = { 0 };
    if (!st_open_bytes(&f, p, n, "fuzz", &e)) {
        CHECK(e.kind != ERR_NONE && e.msg[0], "failed without a reason");
        return 0;
    }
    const uint8_t *at = f.count ? f.tensors[0].data : p + n;
    unsigned sum = 0;
    for (int i = 0; i < f.count; i++) {
        const st_tensor *t = &f.tensors[i];
        CHECK(t->data == at, "tensor %d does not follow its neighbour", i);
        at += t->bytes;
        for (uint64_t k = 0; k < t->bytes; k++) sum += t->data[k];
        CHECK(st_find(&f, t->name) == t, "tensor %d is not found", i);
        CHECK(t->bytes == t->elems * (uint64_t)dtype_bytes(t->type), "tensor %d: size", i);
    }
    CHECK(at == p + n && sum < UINT32_MAX, "the file is not covered");
    st_close(&f);
    return 0;
}
