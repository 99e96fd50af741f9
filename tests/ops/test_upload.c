/* Large matrices arrive whole on the device, whatever pieces they are sent in: every row is read back by embed. */
#include "ops/ops.h"
#include "support.h"

enum { ROWS = 6001, COLS = 2000 }; /* 24 MB: more than the ring of the CUDA backend, and no multiple of its pieces */

static void test_rows(void **state) {
    (void)state;
    err e = { 0 };
    ops *o;
    linear *w;
    void *ids, *y;
    uint16_t *m = malloc((size_t)ROWS * COLS * sizeof *m);
    for (int64_t i = 0; i < (int64_t)ROWS * COLS; i++) m[i] = (uint16_t)(0x3000 + (i * 2654435761u >> 16) % 0x1000);
    OK(ops_open(&o, &(ops_options){ .device = getenv("NIBBLE_TEST_DEVICE"), .threads = 1, .isa = ISA_COUNT }, &e));
    const linear_desc d = { .name = "large", .type = DT_BF16, .rows = ROWS, .cols = COLS, .data = m };
    OK(o->linear_new(o, &w, &d, &e));
    OK(o->mem_new(o, &ids, sizeof(int32_t), &e));
    OK(o->mem_new(o, &y, COLS * sizeof(float), &e));
    for (int32_t r = 0; r < ROWS; r++) {
        float got[COLS];
        o->upload(o, ids, &r, sizeof r);
        o->embed(o, y, w, ids, 1);
        o->download(o, got, y, sizeof got);
        for (int c = 0; c < COLS; c++) {
            uint32_t bits;
            memcpy(&bits, &got[c], sizeof bits);
            if (bits != (uint32_t)m[(int64_t)r * COLS + c] << 16) fail_msg("row %d, column %d", r, c);
        }
    }
    OK(o->sync(o, &e));
    o->mem_free(o, ids);
    o->mem_free(o, y);
    o->linear_free(o, w);
    o->close(o);
    free(m);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_rows) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
