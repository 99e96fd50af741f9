/* utf8_feed.h - bytes in any chunking to whole UTF-8 characters; what is none becomes U+FFFD (one per maximal part). */
#ifndef NIBBLE_UTF8_FEED_H
#define NIBBLE_UTF8_FEED_H

#include "base/buf.h"
#include "base/str.h"

typedef struct utf8_feed {
    uint8_t held[4];
    int n;   /* bytes of an unfinished character */
} utf8_feed; /* zeroed: empty */

void utf8_feed_bytes(utf8_feed *f, str bytes, buf *out);
void utf8_feed_end(utf8_feed *f, buf *out);

#endif
