#include "ckpt/safetensors.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "lib/scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A file in memory: length, header, data. */
static void build(buf *b, const char *header, size_t data) {
    const size_t n = strlen(header);
    buf_clear(b);
    for (int i = 0; i < 8; i++) buf_byte(b, (char)((uint64_t)n >> (8 * i) & 0xff));
    buf_add(b, header, n);
    for (size_t i = 0; i < data; i++) buf_byte(b, (char)(i * 7 + 1));
}

/* Open a copy of the exact size at an odd address: no read beyond the end, no alignment assumed. */
static bool open_copy(st_file *f, uint8_t **copy, const void *p, size_t n, err *e) {
    *copy = malloc(n + 1);
    if (n) memcpy(*copy + 1, p, n);
    return st_open_bytes(f, *copy + 1, n, "m.safetensors", e);
}

static void refuse_bytes(const void *p, size_t n, const char *id, const char *says) {
    st_file f;
    uint8_t *copy;
    err e = { 0 };
    if (open_copy(&f, &copy, p, n, &e)) fail_msg("accepted, expected %s %s", id, says);
    if (strcmp(e.id, id) != 0 || !strstr(e.msg, says)) fail_msg("%s: %s; expected %s '%s'", e.id, e.msg, id, says);
    assert_int_equal(e.kind, ERR_INPUT);
    if (!strstr(e.msg, "m.safetensors")) fail_msg("'%s' does not name the file", e.msg);
    assert_null(f.tensors);
    assert_null(f.path);
    free(copy);
}

static void refuse(const char *header, size_t data, const char *id, const char *says) {
    buf b = { 0 };
    build(&b, header, data);
    refuse_bytes(b.p, b.n, id, says);
    buf_free(&b);
}

static void accept(const char *header, size_t data, int count) {
    buf b = { 0 };
    st_file f;
    uint8_t *copy;
    err e = { 0 };
    build(&b, header, data);
    if (!open_copy(&f, &copy, b.p, b.n, &e)) fail_msg("%s: %s for %s", e.id, e.msg, header);
    assert_int_equal(f.count, count);
    st_close(&f);
    st_close(&f);
    free(copy);
    buf_free(&b);
}

/* ---- what is right ---- */

#define TENSOR(name, type, shape, b, e) \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" #b "," #e "]}"

static void test_layout(void **state) {
    (void)state;
    buf b = { 0 };
    st_file f;
    uint8_t *copy;
    err e = { 0 };
    build(&b,
          "{" TENSOR("b", "BF16", "[2,3]", 3, 15) ",\"__metadata__\":{\"format\":\"pt\",\"k\":\"\\u20ac\"}," TENSOR(
              "scalar", "F32", "[]", 15, 19) "," TENSOR("a\\u00e9", "U8", "[3]", 0, 3) "," TENSOR("none", "F64",
                                                                                                  "[0,5]", 3, 3) "}   ",
          19);
    if (!open_copy(&f, &copy, b.p, b.n, &e)) fail_msg("%s", e.msg);
    assert_int_equal(f.count, 4);
    static const char *const order[] = { "a\xc3\xa9", "none", "b", "scalar" }; /* by offset, not as written */
    for (int i = 0; i < 4; i++) {
        assert_string_equal(f.tensors[i].name.p, order[i]);
        assert_ptr_equal(st_find(&f, str_of(order[i])), &f.tensors[i]);
    }
    const st_tensor *t = st_find(&f, STR("b"));
    assert_int_equal(t->type, DT_BF16);
    assert_int_equal(t->rank, 2);
    assert_true(t->shape[0] == 2 && t->shape[1] == 3 && t->elems == 6 && t->bytes == 12);
    assert_memory_equal(t->data, b.p + b.n - 16, 12);
    t = st_find(&f, STR("none"));
    assert_true(t->elems == 0 && t->bytes == 0 && t->rank == 2);
    t = st_find(&f, STR("scalar"));
    assert_true(t->elems == 1 && t->bytes == 4 && t->rank == 0 && t->uses == 0 && t->shard == 0);
    assert_null(st_find(&f, STR("c")));
    assert_null(st_find(&f, STR("")));
    assert_null(st_find(&f, STR("__metadata__")));
    assert_true(str_is(json_str(json_get(f.metadata, "k")), "\xe2\x82\xac"));
    assert_true(str_is(json_str(json_get(f.metadata, "format")), "pt"));
    st_close(&f);
    assert_null(st_find(&f, STR("b")));
    free(copy);
    buf_free(&b);
}

static void test_accepted(void **state) {
    (void)state;
    accept("{}", 0, 0);
    accept("{}      ", 0, 0);
    accept("{\"__metadata__\":{}}", 0, 0);
    accept("{" TENSOR("x", "U8", "[1,1,1,1,1,1,1,5]", 0, 5) "}", 5, 1);
    accept("{" TENSOR("x", "U8", "[0,9223372036854775807,4]", 0, 0) "}", 0, 1);
    accept("{" TENSOR("a", "U8", "[0]", 0, 0) "," TENSOR("b", "U8", "[0]", 0, 0) "}", 0, 2);
    accept("{" TENSOR("a", "U8", "[2]", 0, 2) "," TENSOR("b", "U8", "[0]", 2, 2) "," TENSOR("c", "U8", "[0]", 0, 0) "}",
           2, 3);
    accept("{\"x\":{\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"BOOL\"}}", 1, 1);
    for (int t = 0; t < DT_COUNT; t++) {
        char header[120];
        snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%d]}}",
                 dtype_name((dtype)t), 3 * dtype_bytes((dtype)t));
        accept(header, (size_t)(3 * dtype_bytes((dtype)t)), 1);
    }
}

/* ---- what is refused ---- */

static void test_length(void **state) {
    (void)state;
    static const uint64_t lengths[] = {
        0, 1, 3, 1u << 31, ST_MAX_HEADER, ST_MAX_HEADER + 1ull, 1ull << 63, UINT64_MAX - 7, UINT64_MAX
    };
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        uint8_t p[10];
        for (int k = 0; k < 8; k++) p[k] = (uint8_t)(lengths[i] >> (8 * k));
        p[8] = '{', p[9] = '}';
        const bool absurd = lengths[i] < 2 || lengths[i] > ST_MAX_HEADER;
        refuse_bytes(p, sizeof p, absurd ? "E-ST-HEADER" : "E-ST-SHORT", absurd ? "header length" : "cut off");
    }
    refuse_bytes("", 0, "E-ST-SHORT", "0 bytes");
    refuse_bytes("\2\0\0\0\0\0\0", 7, "E-ST-SHORT", "7 bytes");
    refuse_bytes("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", 63, "E-ST-HEADER",
                 "git lfs pull");
    refuse_bytes("<!DOCTYPE html><html></html>", 28, "E-ST-HEADER", "is it a safetensors file?");
}

static void test_header(void **state) {
    (void)state;
    refuse("[]", 0, "E-ST-HEADER", "begin with '{'");
    refuse("null", 0, "E-ST-HEADER", "begin with '{'");
    refuse(" {}", 0, "E-ST-HEADER", "begin with '{'");
    refuse("{\"x\":}", 0, "E-ST-JSON", "byte");
    refuse("{}{}", 0, "E-ST-JSON", "byte");
    refuse("{} \x01", 0, "E-ST-JSON", "byte");
    refuse("{\"\xff\":1}", 0, "E-ST-JSON", "UTF-8");
    refuse("{\"a\":{\"b\":{\"c\":{\"d\":{}}}}}", 0, "E-ST-JSON", "nested");
    refuse("{\"x\":5}", 0, "E-ST-HEADER", "tensor x");
    refuse("{\"x\":[]}", 0, "E-ST-HEADER", "tensor x");
    refuse("{\"\":{}}", 0, "E-ST-HEADER", "empty");
    refuse("{\"a\\u0000b\":{}}", 0, "E-ST-HEADER", "NUL");
    refuse("{\"__metadata__\":5}", 0, "E-ST-HEADER", "__metadata__");
    refuse("{\"__metadata__\":[]}", 0, "E-ST-HEADER", "__metadata__");
    refuse("{\"__metadata__\":{\"a\":1}}", 0, "E-ST-HEADER", "__metadata__");
    refuse("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "E-ST-DUP", "\"a\"");
    refuse("{\"x\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1],\"extra\":1}}", 1, "E-ST-HEADER", "'extra'");
    refuse("{" TENSOR("x", "U8", "[]", 0, 1) "," TENSOR("x", "U8", "[]", 1, 2) "}", 2, "E-ST-DUP", "\"x\"");
    refuse("{" TENSOR("x", "U8", "[]", 0, 1) "," TENSOR("\\u0078", "U8", "[]", 1, 2) "}", 2, "E-ST-DUP", "\"x\"");
    refuse("{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, "E-ST-DUP", "dtype");
}

static void test_long_name(void **state) {
    (void)state;
    for (int n = ST_MAX_NAME; n <= ST_MAX_NAME + 1; n++) {
        buf h = { 0 };
        buf_puts(&h, "{\"");
        for (int i = 0; i < n; i++) buf_byte(&h, 'n');
        buf_puts(&h, "\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}");
        if (n <= ST_MAX_NAME)
            accept(h.p, 1, 1);
        else
            refuse(h.p, 1, "E-ST-HEADER", "longer than");
        buf_free(&h);
    }
}

static void test_fields(void **state) {
    (void)state;
    static const struct {
        const char *dtype, *shape, *offsets, *id, *says;
    } c[] = {
        { "\"BF17\"", "[1]", "[0,2]", "E-ST-DTYPE", "BF17" },
        { "\"bf16\"", "[1]", "[0,2]", "E-ST-DTYPE", "bf16" },
        { "\"\"", "[1]", "[0,2]", "E-ST-DTYPE", "dtype" },
        { "\"F4\"", "[2]", "[0,1]", "E-ST-DTYPE", "F4" },
        { "16", "[1]", "[0,2]", "E-ST-DTYPE", "not a string" },
        { "null", "[1]", "[0,2]", "E-ST-DTYPE", "not a string" },
        { "\"U8\"", "{}", "[0,2]", "E-ST-SHAPE", "not a list" },
        { "\"U8\"", "2", "[0,2]", "E-ST-SHAPE", "not a list" },
        { "\"U8\"", "[-1]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[1,-2]", "[0,2]", "E-ST-SHAPE", "dimension 1" },
        { "\"U8\"", "[1.5]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[2.0]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[2e0]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[-0]", "[0,0]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[\"2\"]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[null]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[true]", "[0,1]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[[2]]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[9223372036854775808]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[18446744073709551618]", "[0,2]", "E-ST-SHAPE", "dimension 0" },
        { "\"U8\"", "[4611686018427387904,4]", "[0,0]", "E-ST-SHAPE", "overflows" },
        { "\"U8\"", "[4294967296,4294967296]", "[0,0]", "E-ST-SHAPE", "overflows" },
        { "\"F32\"", "[4611686018427387904]", "[0,0]", "E-ST-SHAPE", "overflows" },
        { "\"F64\"", "[2305843009213693952]", "[0,0]", "E-ST-SHAPE", "overflows" },
        { "\"U8\"", "[9223372036854775807]", "[0,2]", "E-ST-SHAPE", "needs" },
        { "\"U8\"", "[1,1,1,1,1,1,1,1,2]", "[0,2]", "E-ST-SHAPE", "9 dimensions" },
        { "\"BF16\"", "[2]", "[0,2]", "E-ST-SHAPE", "needs 4 bytes, its offsets span 2" },
        { "\"U8\"", "[3]", "[0,2]", "E-ST-SHAPE", "needs 3 bytes" },
        { "\"U8\"", "[2]", "[0,2,2]", "E-ST-OFFSETS", "two" },
        { "\"U8\"", "[2]", "[2]", "E-ST-OFFSETS", "two" },
        { "\"U8\"", "[2]", "[]", "E-ST-OFFSETS", "two" },
        { "\"U8\"", "[2]", "{}", "E-ST-OFFSETS", "two" },
        { "\"U8\"", "[2]", "2", "E-ST-OFFSETS", "two" },
        { "\"U8\"", "[2]", "[2,0]", "E-ST-OFFSETS", "begin <= end" },
        { "\"U8\"", "[2]", "[-2,0]", "E-ST-OFFSETS", "begin <= end" },
        { "\"U8\"", "[2]", "[-0,2]", "E-ST-OFFSETS", "begin <= end" },
        { "\"U8\"", "[2]", "[0,2.0]", "E-ST-OFFSETS", "begin <= end" },
        { "\"U8\"", "[2]", "[0,2e0]", "E-ST-OFFSETS", "begin <= end" },
        { "\"U8\"", "[2]", "[\"0\",\"2\"]", "E-ST-OFFSETS", "begin <= end" },
        { "\"U8\"", "[2]", "[0,18446744073709551618]", "E-ST-OFFSETS", "begin <= end" },
        { "\"U8\"", "[2]", "[9223372036854775805,9223372036854775807]", "E-ST-GAP", "before it" },
        { "\"U8\"", "[2]", "[1099511627776,1099511627778]", "E-ST-GAP", "before it" },
    };
    for (size_t i = 0; i < ARRAY_LEN(c); i++) {
        char header[300], says[60];
        snprintf(header, sizeof header, "{\"the.name\":{\"dtype\":%s,\"shape\":%s,\"data_offsets\":%s}}", c[i].dtype,
                 c[i].shape, c[i].offsets);
        refuse(header, 2, c[i].id, c[i].says);
        snprintf(says, sizeof says, "tensor the.name: ");
        refuse(header, 2, c[i].id, says);
    }
    refuse("{\"x\":{\"shape\":[2],\"data_offsets\":[0,2]}}", 2, "E-ST-DTYPE", "tensor x: has no dtype");
    refuse("{\"x\":{\"dtype\":\"U8\",\"data_offsets\":[0,2]}}", 2, "E-ST-SHAPE", "tensor x: has no shape");
    refuse("{\"x\":{\"dtype\":\"U8\",\"shape\":[2]}}", 2, "E-ST-OFFSETS", "tensor x: has no data_offsets");
    refuse("{\"x\":{}}", 2, "E-ST-DTYPE", "tensor x");
}

static void test_coverage(void **state) {
    (void)state;
    refuse("{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[4]", 3, 7) "}", 7, "E-ST-OVERLAP",
           "tensor b: begins at 3 inside tensor a");
    refuse("{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[4]", 0, 4) "}", 4, "E-ST-OVERLAP", "tensor b");
    refuse("{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[0]", 2, 2) "}", 4, "E-ST-OVERLAP", "tensor b");
    refuse("{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[4]", 12, 16) "}", 16, "E-ST-GAP",
           "tensor b: 8 bytes");
    refuse("{" TENSOR("a", "U8", "[4]", 1, 5) "}", 5, "E-ST-GAP", "tensor a: 1 bytes");
    refuse("{" TENSOR("a", "U8", "[4]", 0, 4) "}", 20, "E-ST-TRAILING", "16 bytes follow");
    refuse("{}", 1, "E-ST-TRAILING", "1 bytes follow");
    refuse("{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[8]", 4, 12) "}", 9, "E-ST-SHORT",
           "tensor b: 3 of its 8 bytes are missing");
    refuse("{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[8]", 4, 12) "}", 0, "E-ST-SHORT",
           "tensor a: 4 of its 4 bytes are missing");
}

/* ---- damage ---- */

static const char small[] =
    "{\"__metadata__\":{\"format\":\"pt\"}," TENSOR("one.weight", "BF16", "[2,2]", 0, 8) "," TENSOR(
        "two", "F8_E4M3", "[3]", 8, 11) "," TENSOR("s", "F32", "[]", 11, 15) "}";

static void test_every_truncation(void **state) {
    (void)state;
    buf b = { 0 };
    build(&b, small, 15);
    for (size_t n = 0; n < b.n; n++) refuse_bytes(b.p, n, "E-ST-SHORT", n < b.n - 15 ? "" : "missing");
    accept(small, 15, 3);
    buf_free(&b);
}

/* Any other byte in any place: refused with an id of this module, or opened with everything inside the file. */
static void test_every_byte(void **state) {
    (void)state;
    static const uint8_t others[] = { 0,   1,   0x7f, 0x80, 0xff, '"', '{', '}', '[',
                                      ']', '9', '-',  'e',  '.',  ',', ' ', '\\' };
    buf b = { 0 };
    build(&b, small, 15);
    int opened = 0, refused = 0;
    for (size_t at = 0; at < b.n; at++)
        for (size_t k = 0; k < ARRAY_LEN(others) + 8; k++) {
            const char old = b.p[at];
            b.p[at] = k < 8 ? (char)(old ^ 1 << k) : (char)others[k - 8];
            st_file f;
            uint8_t *copy;
            err e = { 0 };
            if (open_copy(&f, &copy, b.p, b.n, &e)) {
                uint64_t sum = 0;
                for (int i = 0; i < f.count; i++) {
                    assert_true(f.tensors[i].data >= copy + 1 &&
                                f.tensors[i].data + f.tensors[i].bytes <= copy + 1 + b.n);
                    sum += f.tensors[i].bytes;
                    assert_ptr_equal(st_find(&f, f.tensors[i].name), &f.tensors[i]);
                }
                assert_int_equal(sum, 15);
                opened++;
                st_close(&f);
            } else {
                assert_int_equal(strncmp(e.id, "E-ST-", 5), 0);
                refused++;
            }
            free(copy);
            b.p[at] = old;
        }
    assert_true(opened > 100 && refused > 1000);
    buf_free(&b);
}

/* A hostile header may not take much more memory than its own size. */
static void test_hostile_header(void **state) {
    (void)state;
    static const char *const units[] = { "0,", "[],", "{},", "\"a\"," };
    for (size_t u = 0; u < ARRAY_LEN(units); u++) {
        buf h = { 0 };
        buf_puts(&h, "{\"x\":[");
        for (int i = 0; i < 500000; i++) buf_puts(&h, units[u]);
        buf_puts(&h, "0]}");
        buf b = { 0 };
        build(&b, h.p, 0);
        st_file f;
        err e = { 0 };
        assert_false(st_open_bytes(&f, (const uint8_t *)b.p, b.n, "m.safetensors", &e));
        assert_string_equal(e.id, "E-ST-JSON");
        buf_free(&h);
        buf_free(&b);
    }
}

/* ---- many tensors, in a shuffled order ---- */

static void test_many(void **state) {
    (void)state;
    enum { N = 30000 };
    uint64_t seed = (uint64_t)time(NULL);
    print_message("seed %llu\n", (unsigned long long)seed);
    int *order = malloc(N * sizeof *order);
    for (int i = 0; i < N; i++) order[i] = i;
    for (int i = N - 1; i > 0; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const int j = (int)((seed >> 33) % (uint64_t)(i + 1)), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    buf h = { 0 }, b = { 0 };
    for (int i = 0; i < N; i++)
        buf_printf(&h, "%s\"layer.%d.w\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[%d,%d]}", i ? "," : "{",
                   order[i], 3 * order[i], 3 * order[i] + 3);
    buf_byte(&h, '}');
    build(&b, h.p, 3 * (size_t)N);
    st_file f;
    err e = { 0 };
    assert_true(st_open_bytes(&f, (const uint8_t *)b.p, b.n, "m", &e));
    assert_int_equal(f.count, N);
    for (int i = 0; i < N; i++) {
        char name[40];
        snprintf(name, sizeof name, "layer.%d.w", i);
        const st_tensor *t = st_find(&f, str_of(name));
        assert_ptr_equal(t, &f.tensors[i]);
        assert_ptr_equal(t->data, (const uint8_t *)b.p + b.n - 3 * (N - i));
    }
    st_close(&f);
    free(order);
    buf_free(&h);
    buf_free(&b);
}

/* ---- files ---- */

static void test_files(void **state) {
    (void)state;
    char *dir = scratch_new(), *empty = scratch_puts(dir, "empty.safetensors", "");
    st_file f;
    err e = { 0 };
    assert_false(st_open(&f, dir, &e));
    assert_string_equal(e.id, "E-FILE-KIND");
    e = (err){ 0 };
    assert_false(st_open(&f, empty, &e));
    assert_string_equal(e.id, "E-ST-SHORT");
    e = (err){ 0 };
    assert_false(st_open(&f, "/no/such.safetensors", &e));
    assert_string_equal(e.id, "E-FILE-OPEN");
    free(empty);
    scratch_free(dir);
}

static void test_oracle_file(void **state) {
    (void)state;
    st_file f;
    err e = { 0 };
    if (!st_open(&f, "tests/oracle/codec/nvfp4_inputs.safetensors", &e)) fail_msg("%s", e.msg);
    assert_true(f.count > 0);
    uint64_t bytes = 0;
    for (int i = 0; i < f.count; i++) bytes += f.tensors[i].bytes;
    assert_ptr_equal(f.tensors[f.count - 1].data + f.tensors[f.count - 1].bytes, f.map.data + f.map.size);
    assert_true(bytes < f.map.size);
    st_close(&f);
}

/* ---- writing ---- */

static void test_write(void **state) {
    (void)state;
    char *dir = scratch_new(), *path = scratch_path(dir, "out.safetensors");
    const float matrix[6] = { 1, -2, 3.5f, 0, 1e30f, -0.0f };
    const uint8_t bytes[3] = { 1, 2, 255 };
    const uint16_t half = 0x3f80;
    const st_out out[] = {
        { "m \"quoted\"\xc3\xa9", DT_F32, 2, { 2, 3 }, matrix },
        { "bytes", DT_U8, 1, { 3 }, bytes },
        { "scalar", DT_BF16, 0, { 0 }, &half },
        { "none", DT_I64, 2, { 0, 7 }, NULL },
    };
    err e = { 0 };
    assert_true(st_write(path, out, ARRAY_LEN(out), &e));
    st_file f;
    if (!st_open(&f, path, &e)) fail_msg("%s", e.msg);
    assert_int_equal(f.count, 4);
    assert_int_equal((f.map.size - 24 - 3 - 2) % 8, 0); /* the data section begins at a multiple of 8 */
    for (size_t i = 0; i < ARRAY_LEN(out); i++) {
        const st_tensor *t = st_find(&f, str_of(out[i].name));
        assert_non_null(t);
        assert_int_equal(t->type, out[i].type);
        assert_int_equal(t->rank, out[i].rank);
        for (int d = 0; d < t->rank; d++) assert_int_equal(t->shape[d], out[i].shape[d]);
        if (t->bytes) assert_memory_equal(t->data, out[i].data, t->bytes);
    }
    st_close(&f);
    assert_true(st_write(path, NULL, 0, &e)); /* nothing at all is a file, too */
    assert_true(st_open(&f, path, &e));
    assert_int_equal(f.count, 0);
    assert_int_equal(f.map.size, 16);
    st_close(&f);
    assert_false(st_write("/no/such/dir/x", out, 1, &e));
    assert_string_equal(e.id, "E-FILE-WRITE");
    free(path);
    scratch_free(dir);
}

static void test_stream(void **state) {
    (void)state;
    char *dir = scratch_new(), *path = scratch_puts(dir, "out.safetensors", "old");
    const st_out plan[] = { { "a", DT_U8, 1, { 5 }, NULL }, { "b", DT_F32, 1, { 1 }, NULL } };
    st_writer w = { 0 };
    err e = { 0 };
    st_writer_abort(&w);
    assert_true(st_writer_open(&w, path, plan, 2, &e));
    assert_int_equal(w.expected, 9);
    assert_true(st_writer_add(&w, "ab", 2, &e) && st_writer_add(&w, "cde", 3, &e) &&
                st_writer_add(&w, "\1\2\3\4", 4, &e));
    assert_true(st_writer_commit(&w, &e));
    st_writer_abort(&w);
    st_file f;
    assert_true(st_open(&f, path, &e));
    assert_memory_equal(st_find(&f, STR("a"))->data, "abcde", 5);
    assert_memory_equal(st_find(&f, STR("b"))->data, "\1\2\3\4", 4);
    st_close(&f);
    assert_true(st_writer_open(&w, path, plan, 2, &e));
    assert_true(st_writer_add(&w, "xx", 2, &e));
    st_writer_abort(&w); /* what was there stays */
    assert_true(st_open(&f, path, &e));
    st_close(&f);
    free(path);
    scratch_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),      cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_length),      cmocka_unit_test(test_header),
        cmocka_unit_test(test_long_name),   cmocka_unit_test(test_fields),
        cmocka_unit_test(test_coverage),    cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_every_byte),  cmocka_unit_test(test_hostile_header),
        cmocka_unit_test(test_many),        cmocka_unit_test(test_files),
        cmocka_unit_test(test_oracle_file), cmocka_unit_test(test_write),
        cmocka_unit_test(test_stream),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
