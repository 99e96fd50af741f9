#include "engine/prefix_file.h"

#include <string.h>

static const char magic[8] = "NBPREFIX";

/* Both steps are one-to-one for a given word, so two inputs that differ in one word never agree. */
static uint64_t mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

uint64_t prefix_sum(const void *p, size_t n, uint64_t seed) {
    const uint8_t *at = p;
    uint64_t h = mix(seed, n), word;
    for (; n >= 8; at += 8, n -= 8) {
        memcpy(&word, at, 8);
        h = mix(h, word);
    }
    word = 0;
    if (n > 0) memcpy(&word, at, n);
    return mix(h, word);
}

static void put32(uint8_t *at, uint32_t v) {
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(v >> 8 * i);
}

static void put64(uint8_t *at, uint64_t v) {
    put32(at, (uint32_t)v);
    put32(at + 4, (uint32_t)(v >> 32));
}

static uint32_t get32(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t get64(const uint8_t *at) { return get32(at) | (uint64_t)get32(at + 4) << 32; }

size_t prefix_file_head_bytes(int n) { return PREFIX_FILE_HEADER + (size_t)n * sizeof(int32_t); }

void prefix_file_head(uint8_t *out, uint64_t identity, const int32_t *tokens, int n, const void *payload,
                      size_t bytes) {
    memset(out, 0, PREFIX_FILE_HEADER);
    memcpy(out, magic, sizeof magic);
    put32(out + 8, PREFIX_FILE_VERSION);
    put32(out + 12, (uint32_t)n);
    put64(out + 16, identity);
    put64(out + 24, bytes);
    for (int i = 0; i < n; i++) put32(out + PREFIX_FILE_HEADER + 4 * (size_t)i, (uint32_t)tokens[i]);
    put64(out + 32, prefix_sum(out + PREFIX_FILE_HEADER, 4 * (size_t)n, 1));
    put64(out + 40, prefix_sum(payload, bytes, 2));
    put64(out + 48, prefix_sum(out, 48, 3));
}

const char *prefix_file_check(prefix_view *out, const void *data, size_t size, uint64_t identity) {
    const uint8_t *p = data;
    if (size < PREFIX_FILE_HEADER) return "is cut off";
    if (memcmp(p, magic, sizeof magic) != 0) return "is no entry of a prefix cache";
    if (get32(p + 8) != PREFIX_FILE_VERSION) return "has another version";
    if (get64(p + 48) != prefix_sum(p, 48, 3) || get64(p + 56) != 0) return "has a damaged header";
    if (get64(p + 16) != identity) return "belongs to another model or other settings";
    const uint32_t n = get32(p + 12);
    if (n == 0 || n > PREFIX_FILE_TOKENS) return "has a damaged header";
    const size_t head = prefix_file_head_bytes((int)n);
    if (size < head || size - head != get64(p + 24)) return "is cut off";
    if (get64(p + 32) != prefix_sum(p + PREFIX_FILE_HEADER, 4 * (size_t)n, 1)) return "has damaged tokens";
    *out = (prefix_view){
        .tokens = p + PREFIX_FILE_HEADER, .n = (int)n, .payload = p + head, .payload_bytes = size - head
    };
    return NULL;
}

bool prefix_file_sound(const prefix_view *v, const void *data) {
    return get64((const uint8_t *)data + 40) == prefix_sum(v->payload, v->payload_bytes, 2);
}
