#include "text/utf8_feed.h"

#include "text/unicode.h"

static const str REPLACEMENT = { "\xef\xbf\xbd", 3 };

/* Pass on what is decided of the bytes held; a proper prefix of a character stays. */
static void settle(utf8_feed *f, buf *out) {
    while (f->n) {
        const int k = utf8_step(f->held, (size_t)f->n), used = k < 0 ? -k : k;
        if (k == 0) return;
        if (k > 0)
            buf_add(out, f->held, (size_t)k);
        else
            buf_str(out, REPLACEMENT);
        f->n -= used;
        memmove(f->held, f->held + used, (size_t)f->n);
    }
}

void utf8_feed_bytes(utf8_feed *f, str bytes, buf *out) {
    for (size_t i = 0; i < bytes.n;) {
        size_t plain = i;
        while (f->n == 0 && plain < bytes.n && (uint8_t)bytes.p[plain] < 0x80) plain++;
        if (plain > i) {
            buf_add(out, bytes.p + i, plain - i);
            i = plain;
        } else {
            f->held[f->n++] = (uint8_t)bytes.p[i++];
            settle(f, out);
        }
    }
}

void utf8_feed_end(utf8_feed *f, buf *out) {
    if (f->n) buf_str(out, REPLACEMENT);
    f->n = 0;
}
