/* A whole directory: the input is cut at bytes 0xff, the pieces become config.json, the index and up to three shards.
 * It is refused, or each tensor is found where the index puts it. */
#include "base/log.h"
#include "ckpt/ckpt.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static const char *const names[] = { "config.json",       "model.safetensors.index.json",
                                     "a.safetensors",     "b.safetensors",
                                     "model.safetensors", "generation_config.json" };
static char dir[] = "/tmp/nibble-fuzz-XXXXXX";
static char *paths[ARRAY_LEN(names)];

static void quiet(void *ctx, const char *id, const char *line) { (void)ctx, (void)id, (void)line; }

static void clean(void) {
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        unlink(paths[i]);
        free(paths[i]);
    }
    rmdir(dir);
}

static void set_up(void) {
    if (paths[0]) return;
    CHECK(mkdtemp(dir), "no temporary folder");
    for (size_t i = 0; i < ARRAY_LEN(names); i++) paths[i] = path_join(dir, names[i]);
    log_set_sink(quiet, NULL);
    atexit(clean);
}

/* An empty piece is no file at all. */
static void put(const char *path, const uint8_t *p, size_t n) {
    unlink(path);
    if (n == 0) return;
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(p, 1, n, f) == n && fclose(f) == 0, "cannot write %s", path);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    set_up();
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const uint8_t *cut = n ? memchr(p, 0xff, n) : NULL;
        const size_t piece = cut && i + 1 < ARRAY_LEN(names) ? (size_t)(cut - p) : n;
        put(paths[i], p, piece);
        p += piece + (piece < n);
        n -= piece + (piece < n);
    }
    ckpt c;
    err e = { 0 };
    if (!ckpt_open(&c, dir, &e)) {
        CHECK(e.kind != ERR_NONE && e.msg[0], "failed without a reason");
        return 0;
    }
    uint64_t bytes = 0;
    for (int i = 0; i < c.tensor_count; i++) {
        const st_tensor *t = ckpt_at(&c, i);
        CHECK(ckpt_find(&c, t->name) == t && ckpt_shard_path(&c, t), "tensor %d is lost", i);
        bytes += t->bytes;
    }
    CHECK(bytes == c.tensor_bytes, "bytes do not add up");
    ckpt_close(&c);
    return 0;
}
