/* json.h - JSON in (strict, bounded, positions in errors) and out. The only user of the JSON library.
 *
 * A document is an immutable tree in an arena: children of a container are contiguous, key order is
 * kept. Strict RFC 8259: valid UTF-8, no comments, no trailing bytes, no NaN. Lone surrogate escapes
 * (\ud800) are refused. Duplicate keys are refused unless allowed. Thread-safe once built. */
#ifndef NIBBLE_JSON_H
#define NIBBLE_JSON_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

typedef enum json_type {
    JSON_NULL,
    JSON_FALSE,
    JSON_TRUE,
    JSON_INT,  /* fits int64 and was written without fraction or exponent */
    JSON_REAL, /* any other number, as text: fractions, exponents, integers beyond int64, and -0 */
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
} json_type;

typedef struct json json;
typedef struct json_member json_member;

struct json {
    uint8_t type; /* json_type */
    uint32_t n;   /* children, or bytes of the string; for JSON_REAL bytes of the number's text */
    union {
        int64_t i;
        const char *s;              /* JSON_STRING: UTF-8, NUL behind; JSON_REAL: text as written */
        const json *items;          /* JSON_ARRAY [n] */
        const json_member *members; /* JSON_OBJECT [n] */
    } u;
};

struct json_member {
    str key;
    json value;
};

enum { JSON_DEPTH_MAX = 1024 };

typedef struct json_limits {
    size_t max_bytes;      /* of the text; 0 = 1 GiB */
    int max_depth;         /* 0 = 128; never more than JSON_DEPTH_MAX */
    bool allow_duplicates; /* the last one wins in json_get; all stay in members[] */
} json_limits;

/* Parse text[0..n). `what` names the object in messages (a file name). The tree lives in `a` and does
 * not point into text. Errors: E-JSON-SYNTAX (byte offset), E-JSON-DEPTH, E-JSON-SIZE, E-JSON-DUP,
 * E-JSON-UTF8. Linear time, no recursion on input depth. A tree can take 24 times the bytes of a hostile
 * text (ordinary ones 1 to 4): set a.limit to bound it; scratch memory keeps to the same limit. */
NODISCARD bool json_parse(const json **out, arena *a, str text, const char *what, const json_limits *limits, err *e);
/* Map the file and parse it (E-FILE-*). */
NODISCARD bool json_parse_file(const json **out, arena *a, const char *path, const json_limits *limits, err *e);

/* Absence is NULL: no such key, or v is NULL or no object. Linear in members. */
const json *json_get(const json *v, const char *key);
const json *json_get_str(const json *v, str key);
static inline bool json_is(const json *v, json_type t) { return v && v->type == t; }
static inline bool json_is_bool(const json *v) { return v && (v->type == JSON_FALSE || v->type == JSON_TRUE); }
static inline bool json_is_number(const json *v) { return v && (v->type == JSON_INT || v->type == JSON_REAL); }
static inline str json_str(const json *v) { return (str){ v->u.s, v->n }; } /* JSON_STRING only */
/* Value of JSON_INT or JSON_REAL (correctly rounded; huge exponents give inf). */
double json_double(const json *v);

/* ---- writing: appends to a buf ---- */
void json_write_str(buf *b, str s);       /* quoted, escaped; UTF-8 kept, a byte that is none -> U+FFFD */
void json_write_double(buf *b, double v); /* shortest text that reads back equal; nan/inf -> null */
void json_write(buf *b, const json *v);   /* compact: no spaces; numbers as written */

#endif
