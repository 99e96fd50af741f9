/* toolcall.h - a tool call's values: raw parameter texts to JSON, typed by the tool's schema.
 *
 * A model writes values as plain text. What they mean stands in the tool's parameter schema:
 * - string: the text itself ("03106" stays text);
 * - integer, number, boolean: the value when the text is one (True/False too), else the text as a string; numbers keep
 *   their digits, so integers beyond 2^63 stay exact;
 * - object, array: JSON, or Python literals (single quotes, True, None, tuples, trailing commas), else a string;
 * - null or None where null is allowed or the type is no string: null;
 * - several types (type arrays, anyOf, oneOf, allOf, local $ref, enum, const): the first in their order that fits;
 * - no type: objects and arrays are parsed, everything else stays text; an unknown parameter is a string. */
#ifndef NIBBLE_TOOLCALL_H
#define NIBBLE_TOOLCALL_H

#include "base/buf.h"
#include "base/json.h"
#include "base/str.h"

/* The function object of tools[] with this name ({type, function: {...}} or {name, ...}), or NULL. */
const json *toolcall_find(const json *tools, str name);
/* Is `key` a declared parameter of the tool? */
bool toolcall_declares(const json *tools, str name, str key);
/* The parameter schema of the tool with this name, or NULL; the root that local references start at. */
const json *toolcall_schema(const json *tools, str name);
/* `text` without one line end at each side, which the format puts around a value. */
str toolcall_strip(str text);
/* Can a value be written while it is read? STRING: always its text. STRING_OR_NULL: its text unless that is null. */
typedef enum toolcall_form { FORM_STRING, FORM_STRING_OR_NULL, FORM_OTHER } toolcall_form;
toolcall_form toolcall_form_of(const json *schema, const json *root);
/* Append `text` as a value of `schema` (may be NULL); $ref is looked up in `root`. */
void toolcall_value(buf *out, const json *schema, const json *root, str text);

#endif
