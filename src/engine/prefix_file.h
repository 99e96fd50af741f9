/* prefix_file.h - an entry of the prefix cache as a file: header, tokens, payload, each under a checksum.
 *
 *   0 magic "NBPREFIX"   8 u32 version   12 u32 tokens   16 u64 identity   24 u64 payload bytes
 *  32 u64 sum of the tokens   40 u64 sum of the payload   48 u64 sum of bytes [0, 48)   56 u64 zero
 *  64 i32 tokens[]   then the payload; little endian, nothing behind it
 *
 * The identity says which model, caches and arithmetic made the payload. The sums find damage, not intent: whoever can write
 * to the folder can also write the checkpoint. */
#ifndef NIBBLE_PREFIX_FILE_H
#define NIBBLE_PREFIX_FILE_H

#include "base/base.h"

enum { PREFIX_FILE_VERSION = 1, PREFIX_FILE_HEADER = 64, PREFIX_FILE_TOKENS = 1 << 24 };

typedef struct prefix_view { /* into the file's bytes */
    const uint8_t *tokens;   /* [n] int32, maybe unaligned */
    int n;
    const uint8_t *payload;
    size_t payload_bytes;
} prefix_view;

/* Detects every change of one 8-byte word, and others but for chance. */
uint64_t prefix_sum(const void *p, size_t n, uint64_t seed);
/* Bytes of header and tokens for `out`. */
size_t prefix_file_head_bytes(int n);
void prefix_file_head(uint8_t *out, uint64_t identity, const int32_t *tokens, int n, const void *payload, size_t bytes);
/* Header and tokens are sound and of this identity, and the size fits. NULL, or what is wrong. */
const char *prefix_file_check(prefix_view *out, const void *data, size_t size, uint64_t identity);
/* Is the payload as it was written? */
bool prefix_file_sound(const prefix_view *v, const void *data);

#endif
