#include "base/log.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "ckpt/ckpt.h"
#include "lib/scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG "{\"model_type\":\"qwen3_5_moe\"}"
#define INDEX "model.safetensors.index.json"

static char *dir;
static int warnings;
static char last_warning[400];

static void keep_warning(void *ctx, const char *id, const char *line) {
    (void)ctx;
    warnings++;
    snprintf(last_warning, sizeof last_warning, "%s: %s", id, line);
}

static int setup(void **state) {
    (void)state;
    dir = scratch_new();
    warnings = 0;
    log_set_sink(keep_warning, NULL);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    log_set_sink(NULL, NULL);
    scratch_free(dir);
    return 0;
}

static void put(const char *name, const char *text) { free(scratch_puts(dir, name, text)); }

static void drop(const char *name) {
    char *path = scratch_path(dir, name);
    assert_int_equal(remove(path), 0);
    free(path);
}

/* A shard with one-byte tensors of these names (separated by spaces). */
static void put_shard(const char *file, const char *names) {
    char copy[400], *path = scratch_path(dir, file), *rest = copy;
    st_out out[20];
    int n = 0;
    snprintf(copy, sizeof copy, "%s", names);
    for (char *name; (name = strsep(&rest, " "));)
        if (*name) out[n++] = (st_out){ name, DT_U8, 1, { 1 }, "x" };
    err e = { 0 };
    assert_true(st_write(path, out, n, &e));
    free(path);
}

/* map: "tensor=file tensor=file" */
static void put_index(const char *metadata, const char *map) {
    char copy[2000], *rest = copy;
    buf b = { 0 };
    snprintf(copy, sizeof copy, "%s", map);
    buf_printf(&b, "{\"metadata\":%s,\"weight_map\":{", metadata);
    const char *comma = "";
    for (char *pair; (pair = strsep(&rest, " "));) {
        char *file = strchr(pair, '=');
        buf_printf(&b, "%s\"%.*s\":\"%s\"", comma, (int)(file - pair), pair, file + 1);
        comma = ",";
    }
    buf_puts(&b, "}}");
    put(INDEX, b.p);
    buf_free(&b);
}

#define A "model-00001-of-00002.safetensors"
#define B "model-00002-of-00002.safetensors"

/* Two shards: p q in A, r in B. */
static void put_model(void) {
    put("config.json", CONFIG);
    put_shard(A, "p q");
    put_shard(B, "r");
    put_index("{\"total_size\":3}", "q=" A " r=" B " p=" A);
}

static void refuse_path(const char *path, const char *id, const char *says) {
    ckpt c;
    err e = { 0 };
    if (ckpt_open(&c, path, &e)) fail_msg("%s opened, expected %s", path, id);
    if (strcmp(e.id, id) != 0 || !strstr(e.msg, says)) fail_msg("%s: %s; expected %s '%s'", e.id, e.msg, id, says);
    assert_int_equal(e.kind, ERR_INPUT);
    assert_null(c.dir);
    assert_int_equal(c.shard_count, 0);
}

static void refuse(const char *id, const char *says) { refuse_path(dir, id, says); }

static void accept_path(const char *path, int tensors) {
    ckpt c;
    err e = { 0 };
    if (!ckpt_open(&c, path, &e)) fail_msg("%s: %s", e.id, e.msg);
    assert_int_equal(c.tensor_count, tensors);
    for (int i = 0; i < tensors; i++) assert_ptr_equal(ckpt_find(&c, ckpt_at(&c, i)->name), ckpt_at(&c, i));
    ckpt_close(&c);
    ckpt_close(&c);
}

/* ---- what is right ---- */

static void test_shards(void **state) {
    (void)state;
    put_model();
    put("generation_config.json", "{\"top_k\":20}");
    ckpt c;
    err e = { 0 };
    if (!ckpt_open(&c, dir, &e)) fail_msg("%s: %s", e.id, e.msg);
    assert_int_equal(c.shard_count, 2);
    assert_int_equal(c.tensor_count, 3);
    assert_true(c.tensor_bytes == 3);
    assert_true(str_is(json_str(json_get(c.config, "model_type")), "qwen3_5_moe"));
    assert_true(json_get(c.generation, "top_k")->u.i == 20);
    assert_null(c.hf_quant);
    assert_true(json_get(c.index_metadata, "total_size")->u.i == 3);
    const st_tensor *r = ckpt_find(&c, STR("r"));
    assert_int_equal(r->shard, 1);
    assert_true(str_ends(str_of(ckpt_shard_path(&c, r)), STR("/" B)));
    assert_true(str_ends(str_of(ckpt_shard_path(&c, ckpt_find(&c, STR("p")))), STR("/" A)));
    assert_null(ckpt_find(&c, STR("s")));
    assert_null(ckpt_find(&c, STR("")));
    assert_int_equal(warnings, 0);
    ckpt_close(&c);
    assert_null(ckpt_find(&c, STR("r")));
}

static void test_single(void **state) {
    (void)state;
    put("config.json", CONFIG);
    put("hf_quant_config.json", "{\"quantization\":{}}");
    put_shard("model.safetensors", "a b");
    put("tokenizer.json", "anything");
    put(".hidden.safetensors", "left over");
    ckpt c;
    err e = { 0 };
    assert_true(ckpt_open(&c, dir, &e));
    assert_int_equal(c.shard_count, 1);
    assert_non_null(c.hf_quant);
    assert_null(c.index_metadata);
    ckpt_close(&c);
    put_index("{}", "a=model.safetensors b=model.safetensors"); /* an index that agrees does no harm */
    accept_path(dir, 2);
}

static void test_tiny(void **state) {
    (void)state;
    ckpt c;
    err e = { 0 };
    if (!ckpt_open(&c, "assets/qwen36-tiny", &e)) fail_msg("%s: %s", e.id, e.msg);
    assert_int_equal(c.shard_count, 2);
    assert_true(json_get(c.index_metadata, "total_size")->u.i == (int64_t)c.tensor_bytes);
    assert_int_equal(warnings, 0);
    assert_non_null(ckpt_find(&c, STR("mtp.fc.weight")));
    ckpt_close(&c);
}

static void test_configs_only(void **state) {
    (void)state;
    ckpt c;
    err e = { 0 };
    put("config.json", CONFIG);
    assert_true(ckpt_open_configs(&c, dir, &e));
    assert_int_equal(c.shard_count, 0);
    assert_non_null(c.config);
    assert_null(ckpt_find(&c, STR("a")));
    ckpt_close(&c);
    put("model.safetensors", "broken");
    assert_true(ckpt_open_configs(&c, dir, &e));
    ckpt_close(&c);
}

/* ---- the directory ---- */

static void test_directory(void **state) {
    (void)state;
    char *file = scratch_puts(dir, "x.safetensors", ""), *gguf = scratch_puts(dir, "x.gguf", ""),
         *none = scratch_path(dir, "none");
    refuse_path(file, "E-CKPT-DIR", "give the directory");
    refuse_path(gguf, "E-CKPT-DIR", "GGUF");
    refuse_path(none, "E-CKPT-DIR", "no such directory");
    refuse_path("", "E-CKPT-DIR", "give its path");
    refuse("E-CKPT-CONFIG", "no config.json");
    drop("x.safetensors");
    refuse("E-CKPT-DIR", "not a model directory");
    put("config.json", CONFIG);
    refuse("E-CKPT-DIR", "holds no model");
    put("pytorch_model.bin", "");
    refuse("E-CKPT-DIR", "convert pytorch_model.bin");
    free(file);
    free(gguf);
    free(none);
}

static void test_configs(void **state) {
    (void)state;
    put_model();
    static const char *const names[] = { "config.json", "generation_config.json", "hf_quant_config.json" };
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        put(names[i], "{\"a\":}");
        refuse("E-CKPT-CONFIG", names[i]);
        put(names[i], "");
        refuse("E-CKPT-CONFIG", names[i]);
        put(names[i], "[]");
        refuse("E-CKPT-CONFIG", "not a JSON object");
        put(names[i], "{\"a\":1,\"a\":1}");
        refuse("E-CKPT-CONFIG", "twice");
        drop(names[i]);
        char *path = scratch_path(dir, names[i]);
        assert_int_equal(symlink("gone", path), 0);
        refuse("E-FILE-OPEN", names[i]); /* there, but leading nowhere: not the same as absent */
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkfifo(path, 0600), 0);
        refuse("E-FILE-KIND", names[i]);
        assert_int_equal(unlink(path), 0);
        free(path);
        put(names[i], CONFIG);
    }
    accept_path(dir, 3);
    FILE *f;
    char *path = scratch_path(dir, "config.json");
    f = fopen(path, "w");
    fputs("{\"a\":\"", f);
    for (int i = 0; i < (17 << 20); i++) fputc('x', f);
    fputs("\"}", f);
    fclose(f);
    free(path);
    refuse("E-CKPT-CONFIG", "limit");
}

/* ---- index and files ---- */

static void test_missing_shard(void **state) {
    (void)state;
    put_model();
    drop(A);
    refuse("E-CKPT-SHARD-MISSING",
           A ", which " INDEX " names for 2 tensors, is not there; 1 of 2 files are missing (download");
    char *path = scratch_path(dir, A);
    assert_int_equal(symlink("../../blobs/0123", path), 0);
    refuse("E-CKPT-SHARD-MISSING", "is a symbolic link to nothing");
    assert_int_equal(unlink(path), 0);
    free(path);
    put_shard("model.safetensors", "p q r"); /* a stale index beside the right single file */
    refuse("E-CKPT-SHARD-MISSING", "model.safetensors is not in the index");
    drop(B);
    refuse("E-CKPT-SHARD-MISSING", "2 of 2 files are missing");
    drop(INDEX);
    accept_path(dir, 3);
}

static void test_extra_shard(void **state) {
    (void)state;
    put_model();
    put_shard("model-00003-of-00002.safetensors", "z");
    refuse("E-CKPT-SHARD-EXTRA", "model-00003-of-00002.safetensors is not in");
    put("a-first.safetensors", "");
    refuse("E-CKPT-SHARD-EXTRA", "a-first.safetensors"); /* the first by name, whatever the folder's order */
    drop("a-first.safetensors");
    drop("model-00003-of-00002.safetensors");
    put_shard("model.safetensors", "p q r");
    refuse("E-CKPT-SHARD-EXTRA", "two models in one folder");
    drop("model.safetensors");
    accept_path(dir, 3);
    drop(INDEX);
    refuse("E-CKPT-INDEX", INDEX " is missing");
    put_shard("model.safetensors", "p q r");
    refuse("E-CKPT-SHARD-EXTRA", A " stands beside model.safetensors");
}

/* What is beside a model without being a part of it: skipped and said. */
static void test_foreign_file(void **state) {
    (void)state;
    put_model();
    put_shard("amax.safetensors", "model.layers.0.q_proj.input_quantizer mtp.fc.weight_quantizer");
    put_shard("logits.safetensors", "0.logits");
    accept_path(dir, 3);
    put_shard("head.safetensors", "mtp.fc.weight"); /* a forgotten draft head is not */
    refuse("E-CKPT-SHARD-EXTRA", "head.safetensors");
    drop("head.safetensors");
    drop(INDEX);
    drop(A);
    drop(B);
    refuse("E-CKPT-DIR", "holds no model"); /* maxima alone are no model */
    put_shard("model.safetensors", "p q r");
    accept_path(dir, 3);
}

static void test_bad_index(void **state) {
    (void)state;
    put_model();
    static const struct {
        const char *text, *says;
    } c[] = {
        { "", "byte" },
        { "{", "byte" },
        { "[]", "no weight_map" },
        { "{}", "no weight_map" },
        { "{\"weight_map\":[]}", "no weight_map" },
        { "{\"weight_map\":{}}", "no weight_map" },
        { "{\"weight_map\":null}", "no weight_map" },
        { "{\"weight_map\":{\"p\":1}}", "tensor p: its file is not a string" },
        { "{\"weight_map\":{\"p\":\"" A "\",\"p\":\"" B "\"}}", "twice" },
        { "{\"metadata\":5,\"weight_map\":{\"p\":\"" A "\"}}", "metadata" },
        { "{\"weight_map\":{\"p\":\"\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"../x.safetensors\"}}", "'../x.safetensors' is no plain" },
        { "{\"weight_map\":{\"p\":\"/abs/x.safetensors\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"a/../../b.safetensors\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"a/b.safetensors\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"./b.safetensors\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"..\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\".\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\".b.safetensors\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"x\\u0000.safetensors\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"pytorch_model.bin\"}}", "no plain" },
        { "{\"weight_map\":{\"p\":\"config.json\"}}", "no plain" },
    };
    for (size_t i = 0; i < ARRAY_LEN(c); i++) {
        put(INDEX, c[i].text);
        refuse("E-CKPT-INDEX", c[i].says);
    }
    buf b = { 0 };
    buf_puts(&b, "{\"weight_map\":{\"p\":\"");
    for (int i = 0; i < 5000; i++) buf_byte(&b, 'n');
    buf_puts(&b, ".safetensors\"}}");
    put(INDEX, b.p);
    refuse("E-CKPT-INDEX", "no plain");
    buf_clear(&b);
    buf_puts(&b, "{\"weight_map\":{");
    for (int i = 0; i < 10001; i++) buf_printf(&b, "%s\"t%d\":\"s%d.safetensors\"", i ? "," : "", i, i);
    buf_puts(&b, "}}");
    put(INDEX, b.p);
    refuse("E-CKPT-INDEX", "more than 10000 files");
    buf_free(&b);
    drop(INDEX);
    char *path = scratch_path(dir, INDEX);
    assert_int_equal(mkdir(path, 0700), 0);
    refuse("E-FILE-KIND", INDEX);
    free(path);
}

/* ---- index and tensors ---- */

static void test_missing_tensor(void **state) {
    (void)state;
    put_model();
    put_index("{}", "p=" A " q=" A " r=" B " s=" B " t=" A);
    refuse("E-CKPT-TENSOR-MISSING", "tensor s: the index puts it in " B ", but no file holds it; 2 of 5");
}

static void test_extra_tensor(void **state) {
    (void)state;
    put_model();
    put_index("{}", "p=" A " r=" B);
    refuse("E-CKPT-TENSOR-EXTRA", "tensor q is in " A ", but not in " INDEX "; 1 of 3");
    put_shard(B, "r r1 r2");
    put_index("{}", "p=" A " q=" A " r1=" B);
    refuse("E-CKPT-TENSOR-EXTRA", "tensor r is in " B ", but not in " INDEX "; 2 of 5");
}

static void test_swapped(void **state) {
    (void)state;
    put_model();
    put_shard(A, "r");
    put_shard(B, "p q");
    refuse("E-CKPT-INDEX",
           "tensor q: the index puts it in " A ", but it is in " B "; 3 of 3 tensors lie elsewhere (swapped");
    put_shard(A, "p");
    put_shard(B, "q r");
    refuse("E-CKPT-INDEX", "tensor q: the index puts it in " A ", but it is in " B "; 1 of 3");
}

static void test_duplicate_tensor(void **state) {
    (void)state;
    put_model();
    put_shard(B, "q r");
    refuse("E-CKPT-DUP", "tensor q is in " A " and also in this file");
    char *a = scratch_path(dir, A), *b = scratch_path(dir, B);
    assert_int_equal(unlink(b), 0);
    assert_int_equal(symlink(A, b), 0); /* one file under both names */
    refuse("E-CKPT-DUP", "and also in this file");
    free(a);
    free(b);
}

static void test_broken_shard(void **state) {
    (void)state;
    put_model();
    put(B, "short");
    refuse("E-ST-SHORT", B);
    char *path = scratch_path(dir, B);
    put_shard(B, "r");
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, st.st_size - 1), 0);
    refuse("E-ST-SHORT", "tensor r: 1 of its 1 bytes are missing");
    assert_int_equal(truncate(path, st.st_size), 0);
    accept_path(dir, 3);
    assert_int_equal(truncate(path, st.st_size + 16), 0);
    refuse("E-ST-TRAILING", "16 bytes");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    refuse("E-FILE-KIND", "a directory");
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    refuse("E-FILE-KIND", "a FIFO");
    free(path);
}

static void test_total_size(void **state) {
    (void)state;
    put_model();
    static const char *const quiet[] = { "{}", "null", "{\"total_size\":3}", "{\"total_size\":3,\"other\":[1,{}]}" };
    for (size_t i = 0; i < ARRAY_LEN(quiet); i++) {
        put_index(quiet[i], "p=" A " q=" A " r=" B);
        accept_path(dir, 3);
        assert_int_equal(warnings, 0);
    }
    static const char *const loud[] = { "{\"total_size\":4}", "{\"total_size\":-3}", "{\"total_size\":3.0}",
                                        "{\"total_size\":\"3\"}" };
    for (size_t i = 0; i < ARRAY_LEN(loud); i++) {
        put_index(loud[i], "p=" A " q=" A " r=" B);
        accept_path(dir, 3);
        assert_int_equal(warnings, (int)i + 1);
        assert_int_equal(strncmp(last_warning, "W-CKPT-TOTAL: ", 14), 0);
    }
}

/* ---- Hugging Face cache folders ---- */

static char *below(const char *name) { return scratch_path(dir, name); }

static void make_dirs(const char *const *names, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char *p = below(names[i]);
        assert_int_equal(mkdir(p, 0700), 0);
        free(p);
    }
}

static void link_blob(const char *snapshot, const char *file, const char *blob) {
    char name[300], target[300];
    snprintf(name, sizeof name, "%s/%s", snapshot, file);
    snprintf(target, sizeof target, "../../blobs/%s", blob);
    char *p = below(name);
    assert_int_equal(symlink(target, p), 0);
    free(p);
}

static void test_hf_cache(void **state) {
    (void)state;
    static const char *const dirs[] = { "blobs", "refs", "snapshots", "snapshots/abc123" };
    make_dirs(dirs, ARRAY_LEN(dirs));
    put("blobs/1", CONFIG);
    put_shard("blobs/2", "p q");
    put_shard("blobs/3", "r");
    put("blobs/4", "{\"weight_map\":{\"p\":\"" A "\",\"q\":\"" A "\",\"r\":\"" B "\"}}");
    link_blob("snapshots/abc123", "config.json", "1");
    link_blob("snapshots/abc123", A, "2");
    link_blob("snapshots/abc123", B, "3");
    link_blob("snapshots/abc123", INDEX, "4");
    char *snapshot = below("snapshots/abc123");
    accept_path(snapshot, 3);
    accept_path(dir, 3); /* the only snapshot */
    put("refs/main", "abc123\n");
    accept_path(dir, 3);
    ckpt c;
    err e = { 0 };
    assert_true(ckpt_open(&c, dir, &e));
    assert_string_equal(c.dir, snapshot);
    ckpt_close(&c);
    static const char *const second[] = { "snapshots/def456" };
    make_dirs(second, 1);
    accept_path(dir, 3); /* refs/main decides */
    put("refs/main", "def456");
    refuse("E-CKPT-DIR", "def456: no config.json");
    put("refs/main", "789");
    refuse("E-CKPT-DIR", "snapshot 789, which is not there");
    static const char *const hostile[] = { "", "..", "../..", "/etc", "a/b", "abc123/../abc123", "a b" };
    for (size_t i = 0; i < ARRAY_LEN(hostile); i++) { /* not a revision: as if it were absent */
        put("refs/main", hostile[i]);
        refuse("E-CKPT-DIR", "2 snapshots and no refs/main");
    }
    drop("refs/main");
    refuse("E-CKPT-DIR", "2 snapshots and no refs/main");
    drop("blobs/3");
    refuse_path(snapshot, "E-CKPT-SHARD-MISSING", "symbolic link to nothing");
    free(snapshot);
}

/* ---- full size ---- */

static size_t peak_kb(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (size_t)u.ru_maxrss;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED true
#endif
#endif
#ifndef SANITIZED
#define SANITIZED false
#endif

/* Sanitizers and emulators need memory of their own for every page and every block. */
static bool own_memory(void) {
    const char *runner = getenv("RUNNER");
    return !SANITIZED && !(runner && *runner);
}

/* 124,615 tensors, 31 MB of JSON, three files of up to 10 GB with nothing in them. */
static void test_full_size(void **state) {
    (void)state;
    char command[600];
    snprintf(command, sizeof command, "python3 tools/make_sparse.py '%s' > /dev/null", dir);
    assert_int_equal(system(command), 0);
    const size_t before = peak_kb();
    ckpt c;
    err e = { 0 };
    if (!ckpt_open(&c, dir, &e)) fail_msg("%s: %s", e.id, e.msg);
    const size_t extra = peak_kb() - before;
    print_message("%d tensors, %zu MB more at the peak\n", c.tensor_count, extra / 1000);
    size_t held = c.mem.total; /* what stays after opening, wherever the test runs */
    for (int i = 0; i < c.shard_count; i++) held += c.shards[i].mem.total;
    assert_true(held < 50 * 1000 * 1000);
    if (!own_memory())
        print_message("(peak not judged)\n");
    else
        assert_true(extra < 150 * 1000);
    assert_int_equal(c.tensor_count, 124615);
    assert_int_equal(c.shard_count, 3);
    int quantized = 0, scalars = 0;
    for (int i = 0; i < c.tensor_count; i++) {
        const st_tensor *t = ckpt_at(&c, i);
        if (str_ends(t->name, STR(".weight_scale_2"))) quantized++;
        if (t->rank == 0) scalars++;
    }
    assert_int_equal(4 * quantized, 123880);
    assert_int_equal(scalars, 2 * quantized + 20);
    const st_tensor *t = ckpt_find(&c, STR("model.language_model.layers.39.mlp.experts.255.down_proj.weight"));
    assert_non_null(t);
    assert_int_equal(t->type, DT_U8);
    assert_true(t->rank == 2 && t->shape[0] == 2048 && t->shape[1] == 256);
    const st_file *f = &c.shards[0];
    assert_true(f->map.size > 9000000000u); /* beyond 32 bits */
    const st_tensor *last = &f->tensors[f->count - 1];
    assert_int_equal(last->data[last->bytes - 1], 0); /* reached through the mapping, far behind 4 GB */
    assert_ptr_equal(last->data + last->bytes, f->map.data + f->map.size);
    ckpt_close(&c);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_full_size), /* first: the peak of memory is that of the whole process */
        CASE(test_shards),       CASE(test_single),           CASE(test_tiny),           CASE(test_configs_only),
        CASE(test_directory),    CASE(test_configs),          CASE(test_missing_shard),  CASE(test_extra_shard),
        CASE(test_foreign_file), CASE(test_bad_index),        CASE(test_missing_tensor), CASE(test_extra_tensor),
        CASE(test_swapped),      CASE(test_duplicate_tensor), CASE(test_broken_shard),   CASE(test_total_size),
        CASE(test_hf_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
