/* sha256.h - FIPS 180-4 SHA-256 of a byte string, for oracle files that record only a digest. */
#ifndef NIBBLE_SHA256_H
#define NIBBLE_SHA256_H

#include <stddef.h>

/* 64 lower-case hexadecimal digits and a NUL. */
void sha256_hex(char out[65], const void *p, size_t n);

#endif
