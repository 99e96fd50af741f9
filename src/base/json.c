/* The adapter around yajl, and the only file that includes its header. yajl tokenizes and checks the
 * grammar; this file adds what it lacks: whole UTF-8 validation, no lone surrogates, RFC white space,
 * limits, unique keys, and the tree. */
#include "base/json.h"

#include <endian.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <yajl/yajl_parse.h>

#include "base/file.h"
#include "base/strtab.h"

enum { TEXT_BLOCK = 64 << 10, INTERN_SLOTS = 256, INTERN_MAX = 64, SMALL_OBJECT = 16 };

typedef struct frame {
    size_t first; /* stack index of the first child */
    bool object;
} frame;

/* Children wait on `stack` until their container closes and are then copied to the arena in one piece.
 * Slots are members; array items leave the key unused. */
typedef struct builder {
    arena *mem;
    err *e;
    const char *what;
    str text;
    yajl_handle parser;
    json_member *stack;
    size_t used, cap;
    frame *frames;
    int depth, max_depth;
    bool allow_duplicates;
    char *room; /* rest of the current block of string bytes */
    size_t room_n;
    str intern[INTERN_SLOTS]; /* recently seen short strings: keys and enum-like values repeat a lot */
    strtab keys;              /* scratch of the search for duplicates */
} builder;

/* ---- errors ---- */

static bool fail_at(builder *b, const char *id, size_t at, const char *message) {
    size_t line = 1, start = 0;
    if (at > b->text.n) at = b->text.n;
    for (const char *p = b->text.p, *end = p + at; p < end && (p = memchr(p, '\n', (size_t)(end - p))); p++) {
        line++;
        start = (size_t)(p - b->text.p) + 1;
    }
    return fail(b->e, ERR_INPUT, id, "%s: byte %zu (line %zu, column %zu): %s", b->what, at, line, at - start + 1,
                message);
}

static bool fail_memory(builder *b) {
    return fail(b->e, ERR_MACHINE, "E-JSON-SIZE",
                "%s: its %zu bytes need more memory than allowed (is it the right file?)", b->what, b->text.n);
}

static size_t position(const builder *b) { return yajl_get_bytes_consumed(b->parser); }

/* ---- bytes before grammar ---- */

/* Length of the well-formed UTF-8 sequence at p (RFC 3629: no overlong forms, no surrogates, at most
 * U+10FFFF), or 0. */
static inline size_t utf8_length(const unsigned char *p, size_t n) {
    const unsigned char c = p[0];
    if (c < 0x80) return 1;
    if (c < 0xc2 || c > 0xf4 || n < 2) return 0;
    const unsigned char lo = c == 0xe0   ? 0xa0
                             : c == 0xf0 ? 0x90
                                         : 0x80,
                        hi = c == 0xed   ? 0x9f
                             : c == 0xf4 ? 0x8f
                                         : 0xbf;
    if (p[1] < lo || p[1] > hi) return 0;
    const size_t k = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    if (n < k) return 0;
    for (size_t i = 2; i < k; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return k;
}

/* Bytes of w that are not printable ASCII have their top bit set. Only the first such byte is exact: the
 * borrow of the subtraction runs upward. */
static inline uint64_t unusual_bytes(const unsigned char *p) {
    uint64_t w;
    memcpy(&w, p, 8);
    w = le64toh(w);
    return (w | (w - 0x2020202020202020u)) & 0x8080808080808080u;
}

/* UTF-8 throughout, and no control byte but tab, newline and return (yajl takes \v and \f for space).
 * Eight bytes at a time where they are printable ASCII. */
static bool check_bytes(builder *b) {
    const unsigned char *p = (const unsigned char *)b->text.p;
    const size_t n = b->text.n;
    for (size_t i = 0; i < n;) {
        if (n - i >= 8) {
            const uint64_t unusual = unusual_bytes(p + i);
            if (unusual == 0) {
                i += 8;
                continue;
            }
            i += (size_t)__builtin_ctzll(unusual) / 8;
        }
        const size_t k = utf8_length(p + i, n - i);
        if (k == 0) return fail_at(b, "E-JSON-UTF8", i, "bytes that are not UTF-8 (save the file as UTF-8)");
        if (p[i] < 0x20 && p[i] != '\t' && p[i] != '\n' && p[i] != '\r')
            return fail_at(b, "E-JSON-SYNTAX", i, "control character (escape it as \\u00XX inside a string)");
        i += k;
    }
    return true;
}

static int hex4(const char *p) {
    int v = 0;
    for (int i = 0; i < 4; i++) {
        const char c = p[i];
        const int d = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

/* yajl turns a lone surrogate into '?' or pairs it with whatever follows. Backslashes stand only inside
 * strings of a valid text, so they can be walked without knowing the grammar. */
static bool check_surrogates(builder *b) {
    const char *p = b->text.p, *end = p + b->text.n;
    while (p < end && (p = memchr(p, '\\', (size_t)(end - p)))) {
        if (end - p < 6 || p[1] != 'u') {
            p += 2;
            continue;
        }
        const int unit = hex4(p + 2);
        const bool pair = unit >= 0xd800 && unit <= 0xdbff && end - p >= 12 && p[6] == '\\' && p[7] == 'u' &&
                          (hex4(p + 8) & ~0x3ff) == 0xdc00;
        if (unit >= 0xd800 && unit <= 0xdfff && !pair)
            return fail_at(b, "E-JSON-UTF8", (size_t)(p - b->text.p),
                           "lone surrogate escape (write the pair \\uD8xx\\uDCxx)");
        p += pair ? 12 : 6;
    }
    return true;
}

/* ---- the tree ---- */

/* Copy of a string with NUL. Blocks are cut without alignment: most strings are shorter than 16 bytes. */
static const char *copy_text(builder *b, const char *p, size_t n) {
    if (n + 1 > b->room_n) {
        /* All strings that can still come are no longer than the text that is left, NUL for quote. */
        size_t block = b->text.n - position(b) + n + 2;
        if (block > TEXT_BLOCK) block = TEXT_BLOCK;
        if (n + 1 > block / 4) return arena_copy(b->mem, p, n);
        char *room = arena_take(b->mem, block, 1);
        if (!room) return NULL;
        b->room = room;
        b->room_n = block;
    }
    char *s = b->room;
    if (n) memcpy(s, p, n);
    s[n] = 0;
    b->room += n + 1;
    b->room_n -= n + 1;
    return s;
}

static const char *store_text(builder *b, const unsigned char *bytes, size_t n) {
    const char *p = (const char *)bytes;
    if (n == 0) return "";
    if (n > INTERN_MAX) return copy_text(b, p, n);
    const unsigned h = (unsigned)n * 7u + bytes[0] * 31u + bytes[n / 2] * 17u + bytes[n - 1] * 5u + bytes[n * 3 / 4];
    str *seen = &b->intern[h % INTERN_SLOTS];
    if (seen->n == n && memcmp(seen->p, p, n) == 0) return seen->p;
    const char *s = copy_text(b, p, n);
    if (s) *seen = (str){ s, n };
    return s;
}

/* The arena's limit holds for the scratch as well, so a caller that sets it bounds everything. */
static json_member *push(builder *b) {
    if (b->used == b->cap) {
        const size_t cap = b->cap ? b->cap * 2 : 256;
        json_member *grown = NULL;
        if (!b->mem->limit || cap == 256 || cap <= b->mem->limit / sizeof *grown)
            grown = realloc(b->stack, cap * sizeof *grown);
        if (!grown) {
            fail_memory(b);
            return NULL;
        }
        b->stack = grown;
        b->cap = cap;
    }
    return &b->stack[b->used++];
}

/* Where the next value goes: behind its key, or a new slot of an array or of the root. */
static json *next_value(builder *b) {
    if (b->depth > 0 && b->frames[b->depth - 1].object) return &b->stack[b->used - 1].value;
    json_member *m = push(b);
    if (!m) return NULL;
    m->key = (str){ 0 };
    return &m->value;
}

static int on_literal(builder *b, json_type type) {
    json *v = next_value(b);
    if (!v) return 0;
    *v = (json){ .type = (uint8_t)type };
    return 1;
}

static int on_null(void *ctx) { return on_literal(ctx, JSON_NULL); }
static int on_bool(void *ctx, int value) { return on_literal(ctx, value ? JSON_TRUE : JSON_FALSE); }

/* An int64 written as digits only. "-0" is left to JSON_REAL, which keeps its sign. */
static bool to_int(int64_t *out, const char *p, size_t n) {
    const bool negative = p[0] == '-';
    int64_t v = 0;
    for (size_t i = negative; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') return false;
        const int d = p[i] - '0';
        if (__builtin_mul_overflow(v, 10, &v)) return false;
        if (negative ? __builtin_sub_overflow(v, d, &v) : __builtin_add_overflow(v, d, &v)) return false;
    }
    *out = v;
    return !(negative && v == 0);
}

static int on_number(void *ctx, const char *p, size_t n) {
    builder *b = ctx;
    json *v = next_value(b);
    if (!v) return 0;
    *v = (json){ .type = JSON_INT };
    if (to_int(&v->u.i, p, n)) return 1;
    v->type = JSON_REAL;
    v->n = (uint32_t)n;
    v->u.s = copy_text(b, p, n);
    return v->u.s ? 1 : fail_memory(b);
}

static int on_string(void *ctx, const unsigned char *p, size_t n) {
    builder *b = ctx;
    json *v = next_value(b);
    if (!v) return 0;
    *v = (json){ .type = JSON_STRING, .n = (uint32_t)n, .u.s = store_text(b, p, n) };
    return v->u.s ? 1 : fail_memory(b);
}

static int on_key(void *ctx, const unsigned char *p, size_t n) {
    builder *b = ctx;
    json_member *m = push(b);
    if (!m) return 0;
    m->key = (str){ store_text(b, p, n), n };
    m->value = (json){ 0 };
    return m->key.p ? 1 : fail_memory(b);
}

static int on_open(builder *b, bool object) {
    if (b->depth == b->max_depth) {
        char message[80];
        snprintf(message, sizeof message, "nested deeper than %d levels (flatten it)", b->max_depth);
        return fail_at(b, "E-JSON-DEPTH", position(b), message);
    }
    if (!next_value(b)) return 0;
    b->frames[b->depth++] = (frame){ b->used, object };
    return 1;
}

static int on_object(void *ctx) { return on_open(ctx, true); }
static int on_array(void *ctx) { return on_open(ctx, false); }

static str member_key(const void *ctx, uint32_t i) { return ((const json_member *)ctx)[i].key; }

static bool fail_duplicate(builder *b, str key) {
    char message[200];
    snprintf(message, sizeof message, "key \"%.*s\" appears twice in the object that ends here (remove one)",
             (int)(key.n > 120 ? 120 : key.n), key.p);
    return fail_at(b, "E-JSON-DUP", position(b), message);
}

static bool check_unique(builder *b, const json_member *m, size_t n) {
    if (n <= SMALL_OBJECT) {
        for (size_t i = 1; i < n; i++)
            for (size_t j = 0; j < i; j++)
                if (str_eq(m[i].key, m[j].key)) return fail_duplicate(b, m[i].key);
        return true;
    }
    if (!strtab_init(&b->keys, n)) return fail_memory(b);
    for (size_t i = 0; i < n; i++)
        if (strtab_put(&b->keys, m[i].key, (uint32_t)i, member_key, m) != i) return fail_duplicate(b, m[i].key);
    return true;
}

static int on_close(void *ctx) {
    builder *b = ctx;
    const frame f = b->frames[--b->depth];
    const json_member *from = b->stack + f.first;
    const size_t n = b->used - f.first;
    json *v = &b->stack[f.first - 1].value;
    *v = (json){ .type = f.object ? JSON_OBJECT : JSON_ARRAY, .n = (uint32_t)n };
    b->used = f.first;
    if (n == 0) return 1;
    if (f.object) {
        if (!b->allow_duplicates && !check_unique(b, from, n)) return 0;
        json_member *to = arena_take(b->mem, n, sizeof *to);
        if (!to) return fail_memory(b);
        memcpy(to, from, n * sizeof *to);
        v->u.members = to;
    } else {
        json *to = arena_take(b->mem, n, sizeof *to);
        if (!to) return fail_memory(b);
        for (size_t i = 0; i < n; i++) to[i] = from[i].value;
        v->u.items = to;
    }
    return 1;
}

/* ---- parse ---- */

/* yajl does not look at what its allocator returns. */
static void *parser_malloc(void *ctx, size_t n) { return (void)ctx, xmalloc(n); }
static void *parser_realloc(void *ctx, void *p, size_t n) { return (void)ctx, xrealloc(p, n); }
static void parser_free(void *ctx, void *p) { (void)ctx, free(p); }

static bool fail_syntax(builder *b, size_t at) {
    unsigned char *text = yajl_get_error(b->parser, 0, NULL, 0);
    char message[160];
    int n = text ? (int)strcspn((const char *)text, "\n") : 0;
    if (n > 120) n = 120;
    snprintf(message, sizeof message, "%.*s (correct the JSON)", n, text ? (const char *)text : "");
    if (text) yajl_free_error(b->parser, text);
    return fail_at(b, "E-JSON-SYNTAX", at, message);
}

static bool run_parser(builder *b) {
    static const yajl_callbacks callbacks = {
        .yajl_null = on_null,
        .yajl_boolean = on_bool,
        .yajl_number = on_number,
        .yajl_string = on_string,
        .yajl_map_key = on_key,
        .yajl_start_map = on_object,
        .yajl_start_array = on_array,
        .yajl_end_map = on_close,
        .yajl_end_array = on_close,
    };
    yajl_alloc_funcs alloc = { parser_malloc, parser_realloc, parser_free, NULL };
    b->parser = yajl_alloc(&callbacks, &alloc, b);
    yajl_config(b->parser, yajl_dont_validate_strings, 1); /* check_bytes did, and strictly */
    yajl_status status = yajl_parse(b->parser, (const unsigned char *)b->text.p, b->text.n);
    size_t at = position(b);
    if (status == yajl_status_ok) {
        status = yajl_complete_parse(b->parser);
        at = b->text.n;
    }
    const bool ok = status == yajl_status_ok || (status == yajl_status_error && fail_syntax(b, at));
    yajl_free(b->parser);
    return ok;
}

bool json_parse(const json **out, arena *a, str text, const char *what, const json_limits *limits, err *e) {
    const size_t max_bytes = limits && limits->max_bytes ? limits->max_bytes : (size_t)1 << 30;
    *out = NULL;
    if (text.n > max_bytes || text.n >= UINT32_MAX)
        return fail(e, ERR_INPUT, "E-JSON-SIZE",
                    "%s: %zu bytes of JSON exceed the limit of %zu (is it the right file?)", what, text.n,
                    max_bytes < UINT32_MAX ? max_bytes : (size_t)UINT32_MAX - 1);
    builder *b = xcalloc(1, sizeof *b);
    *b = (builder){ .mem = a, .e = e, .what = what, .text = text, .max_depth = 128 };
    if (limits && limits->max_depth > 0)
        b->max_depth = limits->max_depth < JSON_DEPTH_MAX ? limits->max_depth : JSON_DEPTH_MAX;
    b->allow_duplicates = limits && limits->allow_duplicates;
    b->frames = xmalloc((size_t)b->max_depth * sizeof *b->frames);
    bool ok = check_bytes(b) && check_surrogates(b) && run_parser(b);
    json *root = ok ? arena_take(a, 1, sizeof *root) : NULL;
    if (ok && !root) ok = fail_memory(b);
    if (ok) {
        *root = b->stack[0].value;
        *out = root;
    }
    strtab_free(&b->keys);
    free(b->frames);
    free(b->stack);
    free(b);
    return ok;
}

bool json_parse_file(const json **out, arena *a, const char *path, const json_limits *limits, err *e) {
    mapping m;
    *out = NULL;
    if (!mapping_open(&m, path, e)) return false;
    const bool ok = json_parse(out, a, (str){ m.size ? (const char *)m.data : "", m.size }, path, limits, e);
    mapping_close(&m);
    return ok;
}

/* ---- reading the tree ---- */

const json *json_get_str(const json *v, str key) {
    if (!v || v->type != JSON_OBJECT) return NULL;
    for (uint32_t i = v->n; i-- > 0;)
        if (str_eq(v->u.members[i].key, key)) return &v->u.members[i].value;
    return NULL;
}

const json *json_get(const json *v, const char *key) { return json_get_str(v, str_of(key)); }

static locale_t c_locale;

static void make_locale(void) {
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    CHECK(c_locale, "the C locale is missing");
}

static locale_t locale_of_json(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_locale);
    return c_locale;
}

double json_double(const json *v) {
    if (v->type == JSON_INT) return (double)v->u.i;
    CHECK(v->type == JSON_REAL, "json_double of type %d", v->type);
    return strtod_l(v->u.s, NULL, locale_of_json());
}

/* ---- writing ---- */

void json_write_str(buf *b, str s) {
    static const char hex[] = "0123456789abcdef";
    static const char named[0x20] = { ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r' };
    const unsigned char *p = (const unsigned char *)s.p;
    size_t from = 0;
    buf_reserve(b, s.n + 2);
    buf_byte(b, '"');
    for (size_t i = 0; i < s.n;) {
        const unsigned char c = p[i];
        const size_t k = c >= 0x20 && c < 0x80 ? 1 : utf8_length(p + i, s.n - i);
        if (k > 0 && c >= 0x20 && c != '"' && c != '\\') {
            i += k;
            continue;
        }
        buf_add(b, s.p + from, i - from);
        from = ++i;
        if (k == 0)
            buf_puts(b, "\xef\xbf\xbd"); /* never write what no parser would take back */
        else if (c >= 0x20)
            buf_add(b, (char[]){ '\\', (char)c }, 2);
        else if (named[c])
            buf_add(b, (char[]){ '\\', named[c] }, 2);
        else
            buf_add(b, (char[]){ '\\', 'u', '0', '0', hex[c >> 4], hex[c & 15] }, 6);
    }
    if (s.n > from) buf_add(b, s.p + from, s.n - from);
    buf_byte(b, '"');
}

/* 15 digits always suffice for a normal number that has a text of at most 15, 17 for every number.
 * Subnormals have fewer bits, so for them the search starts at one digit. */
void json_write_double(buf *b, double v) {
    if (!isfinite(v)) {
        buf_puts(b, "null");
        return;
    }
    const locale_t c = locale_of_json(), old = uselocale(c);
    char text[40];
    for (int digits = v == 0 || fabs(v) >= 0x1p-1022 ? 15 : 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (strtod_l(text, NULL, c) == v) break;
    }
    uselocale(old);
    buf_puts(b, text);
}

/* Recursion is bounded: json_parse builds no tree deeper than JSON_DEPTH_MAX. */
void json_write(buf *b, const json *v) {
    switch ((json_type)v->type) {
    case JSON_NULL: buf_puts(b, "null"); break;
    case JSON_FALSE: buf_puts(b, "false"); break;
    case JSON_TRUE: buf_puts(b, "true"); break;
    case JSON_INT: buf_printf(b, "%lld", (long long)v->u.i); break;
    case JSON_REAL: buf_add(b, v->u.s, v->n); break;
    case JSON_STRING: json_write_str(b, json_str(v)); break;
    case JSON_ARRAY:
        buf_byte(b, '[');
        for (uint32_t i = 0; i < v->n; i++) {
            if (i) buf_byte(b, ',');
            json_write(b, &v->u.items[i]);
        }
        buf_byte(b, ']');
        break;
    case JSON_OBJECT:
        buf_byte(b, '{');
        for (uint32_t i = 0; i < v->n; i++) {
            if (i) buf_byte(b, ',');
            json_write_str(b, v->u.members[i].key);
            buf_byte(b, ':');
            json_write(b, &v->u.members[i].value);
        }
        buf_byte(b, '}');
        break;
    }
}
