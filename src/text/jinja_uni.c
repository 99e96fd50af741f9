#include "text/jinja_uni.h"

#include <utf8proc.h>

#include "text/unicode.h"

bool uni_valid(str s) { return utf8_valid(s) == s.n; }

bool uni_ascii(str s) {
    size_t i = 0;
    for (; i + 8 <= s.n; i += 8) {
        uint64_t w;
        memcpy(&w, s.p + i, 8);
        if (w & 0x8080808080808080u) return false;
    }
    for (; i < s.n; i++)
        if ((unsigned char)s.p[i] & 0x80) return false;
    return true;
}

static inline bool is_continuation(char c) { return ((unsigned char)c & 0xc0) == 0x80; }

size_t uni_len(str s) {
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += !is_continuation(s.p[i]);
    return n;
}

int32_t uni_next(const char **p, const char *end) {
    const unsigned char c = (unsigned char)**p;
    if (c < 0x80) {
        ++*p;
        return c;
    }
    const ptrdiff_t left = end - *p;
    utf8proc_int32_t cp;
    const utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)*p, left > 4 ? 4 : left, &cp);
    if (k <= 0) {
        ++*p;
        return c;
    }
    *p += k;
    return cp;
}

int32_t uni_prev(const char *begin, const char **p) {
    const char *end = *p, *q = end - 1;
    while (q > begin && is_continuation(*q)) q--;
    *p = q;
    return uni_next(&q, end);
}

const char *uni_at(str s, size_t k) {
    const char *p = s.p, *end = s.p + s.n;
    if (k >= s.n) return end;
    for (; p < end; p++) {
        if (is_continuation(*p)) continue;
        if (k-- == 0) return p;
    }
    return end;
}

size_t uni_put(char out[4], int32_t cp) { return (size_t)utf8proc_encode_char(cp, (utf8proc_uint8_t *)out); }

bool uni_space(int32_t c) {
    if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool in_group(int32_t c, utf8proc_category_t from, utf8proc_category_t to) {
    const utf8proc_category_t k = utf8proc_category(c);
    return k >= from && k <= to;
}

bool uni_alpha(int32_t c) { return in_group(c, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LO); }
bool uni_decimal(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_ND; }
bool uni_numeric(int32_t c) { return in_group(c, UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NO); }
bool uni_alnum(int32_t c) { return uni_alpha(c) || uni_numeric(c); }
bool uni_upper(int32_t c) { return utf8proc_isupper(c); }
bool uni_lower(int32_t c) { return utf8proc_islower(c); }
bool uni_title(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LT; }
bool uni_cased(int32_t c) { return uni_upper(c) || uni_lower(c) || uni_title(c); }
bool uni_word_start(int32_t c) { return c == '_' || uni_alpha(c) || utf8proc_category(c) == UTF8PROC_CATEGORY_NL; }
bool uni_word_continue(int32_t c) {
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return uni_word_start(c) || c == 0xb7 || c == 0x387;
    }
}
bool uni_word(int32_t c) { return c == '_' || uni_alnum(c); }

/* Digits that are no decimals: superscripts, circled digits and the like (Numeric_Type=Digit). */
bool uni_digit(int32_t c) {
    static const int32_t ranges[][2] = {
        { 0xb2, 0xb3 },     { 0xb9, 0xb9 },       { 0x1369, 0x1371 },   { 0x19da, 0x19da },   { 0x2070, 0x2070 },
        { 0x2074, 0x2079 }, { 0x2080, 0x2089 },   { 0x2460, 0x2468 },   { 0x2474, 0x247c },   { 0x2488, 0x2490 },
        { 0x24ea, 0x24ea }, { 0x24f5, 0x24fd },   { 0x24ff, 0x24ff },   { 0x2776, 0x277e },   { 0x2780, 0x2788 },
        { 0x278a, 0x2792 }, { 0x10a40, 0x10a43 }, { 0x10e60, 0x10e68 }, { 0x11052, 0x1105a }, { 0x1f100, 0x1f10a },
    };
    if (uni_decimal(c)) return true;
    for (size_t i = 0; i < ARRAY_LEN(ranges); i++)
        if (c >= ranges[i][0] && c <= ranges[i][1]) return true;
    return false;
}

bool uni_printable(int32_t c) {
    if (c == ' ') return true;
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
    }
}

/* Case_Ignorable: what may stand between a letter and a final sigma. */
bool uni_case_ignorable(int32_t c) {
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK: return true;
    default:
        return c == '\'' || c == '.' || c == ':' || c == 0xb7 || c == 0x387 || c == 0x55f || c == 0x5f4 ||
               c == 0x2018 || c == 0x2019 || c == 0x2024 || c == 0x2027 || c == 0xfe13 || c == 0xfe52 || c == 0xfe55 ||
               c == 0xff07 || c == 0xff0e || c == 0xff1a;
    }
}

/* Decimal digits come in runs of ten whose first code point ends a run of non-digits; the value is the
 * distance to the start of the run, modulo ten (a few runs stand back to back). */
int uni_decimal_value(int32_t c) {
    if (c < 0x80) return c >= '0' && c <= '9' ? c - '0' : -1;
    if (!uni_decimal(c)) return -1;
    int32_t first = c;
    while (uni_decimal(first - 1)) first--;
    return (c - first) % 10;
}

/* Full case mappings of more than one code point (SpecialCasing.txt): upper, title. */
static const struct special {
    int32_t c, upper[3], title[3];
} special[] = {
    { 0xdf, { 0x53, 0x53 }, { 0x53, 0x73 } },
    { 0x149, { 0x2bc, 0x4e }, { 0x2bc, 0x4e } },
    { 0x1f0, { 0x4a, 0x30c }, { 0x4a, 0x30c } },
    { 0x390, { 0x399, 0x308, 0x301 }, { 0x399, 0x308, 0x301 } },
    { 0x3b0, { 0x3a5, 0x308, 0x301 }, { 0x3a5, 0x308, 0x301 } },
    { 0x587, { 0x535, 0x552 }, { 0x535, 0x582 } },
    { 0x1e96, { 0x48, 0x331 }, { 0x48, 0x331 } },
    { 0x1e97, { 0x54, 0x308 }, { 0x54, 0x308 } },
    { 0x1e98, { 0x57, 0x30a }, { 0x57, 0x30a } },
    { 0x1e99, { 0x59, 0x30a }, { 0x59, 0x30a } },
    { 0x1e9a, { 0x41, 0x2be }, { 0x41, 0x2be } },
    { 0x1f50, { 0x3a5, 0x313 }, { 0x3a5, 0x313 } },
    { 0x1f52, { 0x3a5, 0x313, 0x300 }, { 0x3a5, 0x313, 0x300 } },
    { 0x1f54, { 0x3a5, 0x313, 0x301 }, { 0x3a5, 0x313, 0x301 } },
    { 0x1f56, { 0x3a5, 0x313, 0x342 }, { 0x3a5, 0x313, 0x342 } },
    { 0x1f80, { 0x1f08, 0x399 }, { 0x1f88 } },
    { 0x1f81, { 0x1f09, 0x399 }, { 0x1f89 } },
    { 0x1f82, { 0x1f0a, 0x399 }, { 0x1f8a } },
    { 0x1f83, { 0x1f0b, 0x399 }, { 0x1f8b } },
    { 0x1f84, { 0x1f0c, 0x399 }, { 0x1f8c } },
    { 0x1f85, { 0x1f0d, 0x399 }, { 0x1f8d } },
    { 0x1f86, { 0x1f0e, 0x399 }, { 0x1f8e } },
    { 0x1f87, { 0x1f0f, 0x399 }, { 0x1f8f } },
    { 0x1f88, { 0x1f08, 0x399 }, { 0x1f88 } },
    { 0x1f89, { 0x1f09, 0x399 }, { 0x1f89 } },
    { 0x1f8a, { 0x1f0a, 0x399 }, { 0x1f8a } },
    { 0x1f8b, { 0x1f0b, 0x399 }, { 0x1f8b } },
    { 0x1f8c, { 0x1f0c, 0x399 }, { 0x1f8c } },
    { 0x1f8d, { 0x1f0d, 0x399 }, { 0x1f8d } },
    { 0x1f8e, { 0x1f0e, 0x399 }, { 0x1f8e } },
    { 0x1f8f, { 0x1f0f, 0x399 }, { 0x1f8f } },
    { 0x1f90, { 0x1f28, 0x399 }, { 0x1f98 } },
    { 0x1f91, { 0x1f29, 0x399 }, { 0x1f99 } },
    { 0x1f92, { 0x1f2a, 0x399 }, { 0x1f9a } },
    { 0x1f93, { 0x1f2b, 0x399 }, { 0x1f9b } },
    { 0x1f94, { 0x1f2c, 0x399 }, { 0x1f9c } },
    { 0x1f95, { 0x1f2d, 0x399 }, { 0x1f9d } },
    { 0x1f96, { 0x1f2e, 0x399 }, { 0x1f9e } },
    { 0x1f97, { 0x1f2f, 0x399 }, { 0x1f9f } },
    { 0x1f98, { 0x1f28, 0x399 }, { 0x1f98 } },
    { 0x1f99, { 0x1f29, 0x399 }, { 0x1f99 } },
    { 0x1f9a, { 0x1f2a, 0x399 }, { 0x1f9a } },
    { 0x1f9b, { 0x1f2b, 0x399 }, { 0x1f9b } },
    { 0x1f9c, { 0x1f2c, 0x399 }, { 0x1f9c } },
    { 0x1f9d, { 0x1f2d, 0x399 }, { 0x1f9d } },
    { 0x1f9e, { 0x1f2e, 0x399 }, { 0x1f9e } },
    { 0x1f9f, { 0x1f2f, 0x399 }, { 0x1f9f } },
    { 0x1fa0, { 0x1f68, 0x399 }, { 0x1fa8 } },
    { 0x1fa1, { 0x1f69, 0x399 }, { 0x1fa9 } },
    { 0x1fa2, { 0x1f6a, 0x399 }, { 0x1faa } },
    { 0x1fa3, { 0x1f6b, 0x399 }, { 0x1fab } },
    { 0x1fa4, { 0x1f6c, 0x399 }, { 0x1fac } },
    { 0x1fa5, { 0x1f6d, 0x399 }, { 0x1fad } },
    { 0x1fa6, { 0x1f6e, 0x399 }, { 0x1fae } },
    { 0x1fa7, { 0x1f6f, 0x399 }, { 0x1faf } },
    { 0x1fa8, { 0x1f68, 0x399 }, { 0x1fa8 } },
    { 0x1fa9, { 0x1f69, 0x399 }, { 0x1fa9 } },
    { 0x1faa, { 0x1f6a, 0x399 }, { 0x1faa } },
    { 0x1fab, { 0x1f6b, 0x399 }, { 0x1fab } },
    { 0x1fac, { 0x1f6c, 0x399 }, { 0x1fac } },
    { 0x1fad, { 0x1f6d, 0x399 }, { 0x1fad } },
    { 0x1fae, { 0x1f6e, 0x399 }, { 0x1fae } },
    { 0x1faf, { 0x1f6f, 0x399 }, { 0x1faf } },
    { 0x1fb2, { 0x1fba, 0x399 }, { 0x1fba, 0x345 } },
    { 0x1fb3, { 0x391, 0x399 }, { 0x1fbc } },
    { 0x1fb4, { 0x386, 0x399 }, { 0x386, 0x345 } },
    { 0x1fb6, { 0x391, 0x342 }, { 0x391, 0x342 } },
    { 0x1fb7, { 0x391, 0x342, 0x399 }, { 0x391, 0x342, 0x345 } },
    { 0x1fbc, { 0x391, 0x399 }, { 0x1fbc } },
    { 0x1fc2, { 0x1fca, 0x399 }, { 0x1fca, 0x345 } },
    { 0x1fc3, { 0x397, 0x399 }, { 0x1fcc } },
    { 0x1fc4, { 0x389, 0x399 }, { 0x389, 0x345 } },
    { 0x1fc6, { 0x397, 0x342 }, { 0x397, 0x342 } },
    { 0x1fc7, { 0x397, 0x342, 0x399 }, { 0x397, 0x342, 0x345 } },
    { 0x1fcc, { 0x397, 0x399 }, { 0x1fcc } },
    { 0x1fd2, { 0x399, 0x308, 0x300 }, { 0x399, 0x308, 0x300 } },
    { 0x1fd3, { 0x399, 0x308, 0x301 }, { 0x399, 0x308, 0x301 } },
    { 0x1fd6, { 0x399, 0x342 }, { 0x399, 0x342 } },
    { 0x1fd7, { 0x399, 0x308, 0x342 }, { 0x399, 0x308, 0x342 } },
    { 0x1fe2, { 0x3a5, 0x308, 0x300 }, { 0x3a5, 0x308, 0x300 } },
    { 0x1fe3, { 0x3a5, 0x308, 0x301 }, { 0x3a5, 0x308, 0x301 } },
    { 0x1fe4, { 0x3a1, 0x313 }, { 0x3a1, 0x313 } },
    { 0x1fe6, { 0x3a5, 0x342 }, { 0x3a5, 0x342 } },
    { 0x1fe7, { 0x3a5, 0x308, 0x342 }, { 0x3a5, 0x308, 0x342 } },
    { 0x1ff2, { 0x1ffa, 0x399 }, { 0x1ffa, 0x345 } },
    { 0x1ff3, { 0x3a9, 0x399 }, { 0x1ffc } },
    { 0x1ff4, { 0x38f, 0x399 }, { 0x38f, 0x345 } },
    { 0x1ff6, { 0x3a9, 0x342 }, { 0x3a9, 0x342 } },
    { 0x1ff7, { 0x3a9, 0x342, 0x399 }, { 0x3a9, 0x342, 0x345 } },
    { 0x1ffc, { 0x3a9, 0x399 }, { 0x1ffc } },
    { 0xfb00, { 0x46, 0x46 }, { 0x46, 0x66 } },
    { 0xfb01, { 0x46, 0x49 }, { 0x46, 0x69 } },
    { 0xfb02, { 0x46, 0x4c }, { 0x46, 0x6c } },
    { 0xfb03, { 0x46, 0x46, 0x49 }, { 0x46, 0x66, 0x69 } },
    { 0xfb04, { 0x46, 0x46, 0x4c }, { 0x46, 0x66, 0x6c } },
    { 0xfb05, { 0x53, 0x54 }, { 0x53, 0x74 } },
    { 0xfb06, { 0x53, 0x54 }, { 0x53, 0x74 } },
    { 0xfb13, { 0x544, 0x546 }, { 0x544, 0x576 } },
    { 0xfb14, { 0x544, 0x535 }, { 0x544, 0x565 } },
    { 0xfb15, { 0x544, 0x53b }, { 0x544, 0x56b } },
    { 0xfb16, { 0x54e, 0x546 }, { 0x54e, 0x576 } },
    { 0xfb17, { 0x544, 0x53d }, { 0x544, 0x56d } },
};

static const struct special *special_find(int32_t c) {
    if (c < special[0].c) return NULL;
    size_t lo = 0, hi = ARRAY_LEN(special);
    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        if (special[mid].c < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < ARRAY_LEN(special) && special[lo].c == c ? &special[lo] : NULL;
}

static int special_copy(const int32_t from[3], int32_t out[3]) {
    int n = 0;
    while (n < 3 && from[n]) {
        out[n] = from[n];
        n++;
    }
    return n;
}

int uni_to_upper(int32_t c, int32_t out[3]) {
    const struct special *s = special_find(c);
    if (s) return special_copy(s->upper, out);
    out[0] = utf8proc_toupper(c);
    return 1;
}

int uni_to_title(int32_t c, int32_t out[3]) {
    const struct special *s = special_find(c);
    if (s) return special_copy(s->title, out);
    out[0] = utf8proc_totitle(c);
    return 1;
}

int uni_to_lower(int32_t c, int32_t out[3]) {
    if (c == 0x130) {
        out[0] = 'i';
        out[1] = 0x307;
        return 2;
    }
    out[0] = utf8proc_tolower(c);
    return 1;
}

int uni_to_fold(int32_t c, int32_t out[3]) {
    utf8proc_int32_t got[4];
    const utf8proc_ssize_t n = utf8proc_decompose_char(c, got, 4, UTF8PROC_CASEFOLD, NULL);
    if (n < 1 || n > 3) {
        out[0] = c;
        return 1;
    }
    memcpy(out, got, (size_t)n * sizeof *got);
    return (int)n;
}
