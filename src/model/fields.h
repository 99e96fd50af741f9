/* fields.h - bounded reads of a config file's fields (private to model/).
 *
 * A field is looked up in `inner`, then in `outer`; JSON null counts as absent, as in transformers. Every refusal
 * is ERR_INPUT, names file, field and value: "DIR/config.json: hidden_size: -5 is not a whole number from 1 to 65536". */
#ifndef NIBBLE_FIELDS_H
#define NIBBLE_FIELDS_H

#include "base/err.h"
#include "base/json.h"

typedef struct fields {
    const json *inner, *outer; /* objects; outer may be NULL */
    const char *dir, *file;    /* for messages: "dir/file" */
} fields;

const json *field_get(const fields *f, const char *key); /* NULL: absent or null */

/* E-CONFIG-FIELD: "<key>: <value> is not <want>". Returns false. */
bool field_bad(const fields *f, const char *key, const json *v, const char *want, err *e);
/* The same under another id, for values that are well-formed but mean something nibble does not do. */
bool field_refuse(const fields *f, const char *id, const char *key, const json *v, const char *why, err *e);
bool field_missing(const fields *f, const char *key, err *e); /* E-CONFIG-FIELD */

/* Required. Whole numbers are JSON integers: 2048.0 and "2048" are refused. */
NODISCARD bool field_int(const fields *f, const char *key, int lo, int hi, int *out, err *e);
NODISCARD bool field_double(const fields *f, const char *key, double lo, double hi, double *out, err *e);
/* Optional: *out keeps the value it has when the field is absent; *found may be NULL. */
NODISCARD bool field_int_opt(const fields *f, const char *key, int lo, int hi, int *out, bool *found, err *e);
NODISCARD bool field_double_opt(const fields *f, const char *key, double lo, double hi, double *out, bool *found,
                                err *e);
NODISCARD bool field_bool_opt(const fields *f, const char *key, bool *out, bool *found, err *e);
NODISCARD bool field_str_opt(const fields *f, const char *key, str *out, err *e); /* .p NULL when absent */

#endif
