/* jinja_uni.h - code points of UTF-8 text and Python's character classes and case mappings (Unicode 14). */
#ifndef NIBBLE_JINJA_UNI_H
#define NIBBLE_JINJA_UNI_H

#include "base/buf.h"
#include "base/str.h"

bool uni_valid(str s); /* well-formed UTF-8 */
bool uni_ascii(str s);
size_t uni_len(str s); /* code points */
/* Next code point; *p advances. Malformed bytes count as themselves, so any input ends. */
int32_t uni_next(const char **p, const char *end);
int32_t uni_prev(const char *begin, const char **p);
const char *uni_at(str s, size_t k); /* start of code point k, or the end */
size_t uni_put(char out[4], int32_t cp);

bool uni_space(int32_t c);
bool uni_alpha(int32_t c);
bool uni_decimal(int32_t c);
bool uni_digit(int32_t c);
bool uni_numeric(int32_t c);
bool uni_alnum(int32_t c);
bool uni_upper(int32_t c);
bool uni_lower(int32_t c);
bool uni_title(int32_t c);
bool uni_printable(int32_t c);
bool uni_cased(int32_t c);
bool uni_case_ignorable(int32_t c);
int uni_decimal_value(int32_t c); /* -1: no decimal digit */
bool uni_word_start(int32_t c);   /* identifiers */
bool uni_word_continue(int32_t c);
bool uni_word(int32_t c); /* regular expressions' \w */

/* Full mappings: up to 3 code points; returns how many. */
int uni_to_upper(int32_t c, int32_t out[3]);
int uni_to_lower(int32_t c, int32_t out[3]);
int uni_to_title(int32_t c, int32_t out[3]);
int uni_to_fold(int32_t c, int32_t out[3]);

#endif
