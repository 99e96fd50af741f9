#include "text/unicode.h"

#include <stdlib.h>
#include <utf8proc.h>

#include "text/unicode_tables.h"

const char unicode_gc_name[UNICODE_GC_COUNT][3] = { "Cn", "Cc", "Cf", "Co", "Cs", "Ll", "Lm", "Lo", "Lt", "Lu",
                                                    "Mc", "Me", "Mn", "Nd", "Nl", "No", "Pc", "Pd", "Pe", "Pf",
                                                    "Pi", "Po", "Ps", "Sc", "Sk", "Sm", "So", "Zl", "Zp", "Zs" };

/* ---- UTF-8 ---- */

static bool is_tail(uint8_t c) { return (c & 0xC0) == 0x80; }

int utf8_step(const uint8_t *p, size_t n) {
    const uint8_t a = p[0];
    if (a < 0x80) return 1;
    if (a < 0xC2 || a > 0xF4) return -1;
    const int len = a < 0xE0 ? 2 : a < 0xF0 ? 3 : 4;
    if (n == 1) return 0;
    /* The second byte excludes overlong forms, surrogates and codes above U+10FFFF. */
    const uint8_t lo = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80, hi = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
    if (p[1] < lo || p[1] > hi) return -1;
    for (int i = 2; i < len; i++) {
        if ((size_t)i == n) return 0;
        if (!is_tail(p[i])) return -i;
    }
    return len;
}

/* Bytes below 0x80 at the start of p[0..n), eight at a time. */
static size_t ascii_prefix(const uint8_t *p, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t w;
        memcpy(&w, p + i, 8);
        if (w & 0x8080808080808080u) break;
    }
    while (i < n && p[i] < 0x80) i++;
    return i;
}

size_t utf8_valid(str s) {
    const uint8_t *p = (const uint8_t *)s.p;
    size_t i = 0;
    while (i < s.n) {
        if (p[i] < 0x80) {
            i += ascii_prefix(p + i, s.n - i);
            continue;
        }
        const int k = utf8_step(p + i, s.n - i);
        if (k <= 0) return i;
        i += (size_t)k;
    }
    return i;
}

void utf8_replace(buf *out, str s) {
    while (s.n) {
        const size_t ok = utf8_valid(s);
        buf_add(out, s.p, ok);
        s = str_skip(s, ok);
        if (s.n == 0) return;
        const int k = utf8_step((const uint8_t *)s.p, s.n);
        buf_add(out, "\xEF\xBF\xBD", 3);
        s = str_skip(s, k == 0 ? s.n : (size_t)-k); /* an unfinished sequence can only be the end of s */
    }
}

int utf8_put(uint8_t out[4], uint32_t c) {
    if (c < 0x80) return out[0] = (uint8_t)c, 1;
    if (c < 0x800) return out[0] = (uint8_t)(0xC0 | c >> 6), out[1] = (uint8_t)(0x80 | (c & 63)), 2;
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xE0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 63));
        out[2] = (uint8_t)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (uint8_t)(0xF0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 63));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 63));
    out[3] = (uint8_t)(0x80 | (c & 63));
    return 4;
}

/* ---- properties ---- */

/* Index of the last entry whose first code point is <= code. */
static size_t run_of(const uint32_t *table, size_t count, int shift, uint32_t code) {
    size_t lo = 0, hi = count;
    while (hi - lo > 1) {
        const size_t mid = lo + (hi - lo) / 2;
        if (table[mid] >> shift <= code)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

size_t unicode_gc_runs(void) { return unicode_gc_count; }

void unicode_gc_run(size_t i, uint32_t *first, uint32_t *end, int *category) {
    *first = unicode_gc[i] >> 8;
    *end = i + 1 < unicode_gc_count ? unicode_gc[i + 1] >> 8 : UNICODE_CODES;
    *category = (int)(unicode_gc[i] & 255);
}

size_t unicode_word_runs(void) { return unicode_word_count; }

void unicode_word_run(size_t i, uint32_t *first, uint32_t *end, bool *word) {
    *first = unicode_word[i] >> 1;
    *end = i + 1 < unicode_word_count ? unicode_word[i + 1] >> 1 : UNICODE_CODES;
    *word = unicode_word[i] & 1;
}

bool unicode_is_word(uint32_t code) { return unicode_word[run_of(unicode_word, unicode_word_count, 1, code)] & 1; }

bool unicode_is_space(uint32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
    return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
           c == 0x202F || c == 0x205F || c == 0x3000;
}

/* ---- NFC ----
 * A "region" is one inert or foreign starter with the characters behind it that may compose with it, decompose or
 * have to be reordered. Regions are independent: nothing composes across an inert starter's left edge, and a foreign
 * character (class 255: one that HF's older tables do not know) takes part in nothing. utf8proc supplies mappings and
 * composition; ordering is done here, because its own is quadratic in the length of a run of marks. */

enum { NFC_INERT = 0, NFC_ACTIVE = 1, NFC_FOREIGN = 255 };

typedef struct nfc_cursor {
    size_t run; /* the last run found: texts stay in one script */
} nfc_cursor;

static int nfc_class(nfc_cursor *c, uint32_t code) {
    const size_t i = c->run;
    if (unicode_nfc[i] >> 8 > code || (i + 1 < unicode_nfc_count && unicode_nfc[i + 1] >> 8 <= code))
        c->run = run_of(unicode_nfc, unicode_nfc_count, 8, code);
    return (int)(unicode_nfc[c->run] & 255);
}

/* The next region that is not in NFC, from *at on: sets [*first, *end) and returns true; *at moves behind it. */
static bool next_region(nfc_cursor *cur, const uint8_t *p, size_t n, size_t *at, size_t *first, size_t *end) {
    size_t i = *at, start = i;
    bool change = false;
    int order = 0; /* of the last mark in this region */
    while (i < n) {
        if (p[i] < 0xCC) { /* everything below U+0300 is inert */
            if (change) break;
            const size_t ascii = p[i] < 0x80 ? ascii_prefix(p + i, n - i) : 0;
            start = ascii ? i + ascii - 1 : i;
            i = ascii ? i + ascii : i + 2;
            order = 0;
            continue;
        }
        size_t len;
        const uint32_t code = utf8_get(p + i, &len);
        const int k = nfc_class(cur, code);
        if (k == NFC_INERT || k == NFC_FOREIGN) {
            if (change) break;
            start = k == NFC_FOREIGN ? i + len : i;
            order = 0;
        } else if (k == NFC_ACTIVE || k < order) {
            change = true;
        } else {
            order = k;
        }
        i += len;
    }
    *first = start;
    *end = *at = i;
    return change;
}

typedef struct nfc_work {
    utf8proc_int32_t *code, *sorted;
    size_t n, cap;
} nfc_work;

static int combining(utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; }

static void work_decompose(nfc_work *w, const uint8_t *p, size_t n) {
    w->n = 0;
    for (size_t i = 0; i < n;) {
        size_t len;
        const uint32_t code = utf8_get(p + i, &len);
        i += len;
        if (w->cap - w->n < 8) { /* no canonical mapping is longer than four */
            w->cap = w->cap ? 2 * w->cap : 64;
            w->code = xrealloc(w->code, w->cap * sizeof *w->code);
            w->sorted = xrealloc(w->sorted, w->cap * sizeof *w->sorted);
        }
        int boundary = 0;
        const utf8proc_ssize_t k =
            utf8proc_decompose_char((utf8proc_int32_t)code, w->code + w->n, (utf8proc_ssize_t)(w->cap - w->n),
                                    UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &boundary);
        CHECK(k > 0 && (size_t)k <= w->cap - w->n, "decomposition of U+%04X", (unsigned)code);
        w->n += (size_t)k;
    }
}

/* Stable counting sort of one run of marks by combining class. */
static void sort_marks(nfc_work *w, size_t first, size_t end) {
    size_t at[257] = { 0 };
    for (size_t i = first; i < end; i++) at[combining(w->code[i]) + 1]++;
    for (int c = 0; c < 256; c++) at[c + 1] += at[c];
    for (size_t i = first; i < end; i++) w->sorted[first + at[combining(w->code[i])]++] = w->code[i];
    memcpy(w->code + first, w->sorted + first, (end - first) * sizeof *w->code);
}

static void work_order(nfc_work *w) {
    for (size_t i = 0; i < w->n;) {
        int last = combining(w->code[i]);
        size_t end = i + 1;
        if (last == 0) {
            i = end;
            continue;
        }
        bool sorted = true;
        for (int c; end < w->n && (c = combining(w->code[end])) != 0; end++) {
            sorted &= c >= last;
            last = c;
        }
        if (!sorted) sort_marks(w, i, end);
        i = end;
    }
}

static void work_emit(nfc_work *w, buf *out) {
    const utf8proc_ssize_t n =
        utf8proc_normalize_utf32(w->code, (utf8proc_ssize_t)w->n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    CHECK(n >= 0, "composition failed");
    for (utf8proc_ssize_t i = 0; i < n; i++) {
        uint8_t c[4];
        buf_add(out, c, (size_t)utf8_put(c, (uint32_t)w->code[i]));
    }
}

bool unicode_nfc_append(buf *out, str s) {
    const uint8_t *p = (const uint8_t *)s.p;
    nfc_cursor cur = { 0 };
    nfc_work w = { 0 };
    size_t at = 0, done = 0, first, end;
    bool any = false;
    while (at < s.n && next_region(&cur, p, s.n, &at, &first, &end)) {
        any = true;
        buf_add(out, p + done, first - done);
        work_decompose(&w, p + first, end - first);
        work_order(&w);
        work_emit(&w, out);
        done = end;
    }
    if (any) buf_add(out, p + done, s.n - done);
    free(w.code);
    free(w.sorted);
    return any;
}
