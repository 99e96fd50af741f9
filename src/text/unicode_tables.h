/* unicode_tables.h - generated property tables (tools/make_unicode_tables.py); used by unicode.c only. */
#ifndef NIBBLE_UNICODE_TABLES_H
#define NIBBLE_UNICODE_TABLES_H

#include "base/base.h"

/* Each is sorted and starts at code point 0; an entry holds up to the next one's code point. */
extern const uint32_t unicode_gc[], unicode_word[], unicode_nfc[];
extern const size_t unicode_gc_count, unicode_word_count, unicode_nfc_count;

#endif
