/* unicode.h - UTF-8 and the Unicode properties that tokenization needs, as HF tokenizers applies them.
 *
 * General categories, white space and word characters are Unicode 16.0's from generated tables, not those of the
 * libraries installed here: what a character is must not depend on the machine. All functions are thread-safe. */
#ifndef NIBBLE_UNICODE_H
#define NIBBLE_UNICODE_H

#include "base/buf.h"
#include "base/str.h"

/* ---- UTF-8 ---- */

/* One step at p[0..n), n >= 1: the length 1..4 of a valid sequence; 0 when p[0..n) is a proper prefix of one; or
 * -k when the first k bytes are a maximal invalid subpart (what becomes one U+FFFD). */
int utf8_step(const uint8_t *p, size_t n);

/* Length of the longest valid prefix; s.n when all is valid. */
size_t utf8_valid(str s);

/* Append s with each maximal invalid subpart replaced by U+FFFD, as Python's errors="replace". */
void utf8_replace(buf *out, str s);

/* Decode the sequence at p, which must be valid; *len receives its length. */
static inline uint32_t utf8_get(const uint8_t *p, size_t *len) {
    const uint32_t a = p[0];
    if (a < 0x80) return *len = 1, a;
    if (a < 0xE0) return *len = 2, (a & 31) << 6 | (p[1] & 63u);
    if (a < 0xF0) return *len = 3, (a & 15) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    return *len = 4, (a & 7) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
}

/* Write a code point as UTF-8; returns the length. */
int utf8_put(uint8_t out[4], uint32_t code);

/* ---- properties ---- */

enum { UNICODE_CODES = 0x110000, UNICODE_GC_COUNT = 30 };

/* Two-letter names of the general categories; the index is the category's number. */
extern const char unicode_gc_name[UNICODE_GC_COUNT][3];

/* Runs of equal category in ascending order: run i covers [first, next first) and the last one ends at UNICODE_CODES. */
size_t unicode_gc_runs(void);
void unicode_gc_run(size_t i, uint32_t *first, uint32_t *end, int *category);
/* The same for word characters (Alphabetic, M, Nd, Pc, Join_Control): runs that are alternately no words and words. */
size_t unicode_word_runs(void);
void unicode_word_run(size_t i, uint32_t *first, uint32_t *end, bool *word);

bool unicode_is_word(uint32_t code);
bool unicode_is_space(uint32_t code); /* White_Space */

/* ---- NFC ---- */

/* Append the NFC form of s (valid UTF-8) and return true; or return false and leave `out` alone when a quick check
 * shows that s is in NFC already. Linear time. Characters that HF's normalizer does not know yet stay as they are and
 * bound what composes. */
bool unicode_nfc_append(buf *out, str s);

#endif
