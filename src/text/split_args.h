/* split_args.h - the arguments of one call as JSON, written while the call is still being read.
 *
 * The pieces of a call concatenate to one JSON object, the same for every chunking. A string is written as it comes; a
 * value of any other type when its end is known. The first of equal parameters counts: it may already be sent. */
#ifndef NIBBLE_SPLIT_ARGS_H
#define NIBBLE_SPLIT_ARGS_H

#include "text/split_call.h"
#include "text/toolcall.h"

typedef struct call_args {
    const json *schema; /* of the tool's parameters, or NULL */
    bool any;           /* a parameter was written */
    bool begun;         /* the open parameter was looked at: `form` holds */
    bool in_string;     /* its opening quote was written */
    toolcall_form form;
    size_t done; /* parameters dealt with */
    size_t sent; /* of the open string: buffer offset behind what was written */
} call_args;

/* Is this a call for sure? Then its name may be told. */
bool args_may_begin(const call_parser *c);
void args_begin(call_args *a, buf *out, const json *tools, str name);
/* Append what the parser's progress allows. */
void args_step(call_args *a, buf *out, const call_parser *c, const buf *b);
/* Append the end. In the middle of a value: a string that was begun ends there, anything else is left out. */
void args_end(call_args *a, buf *out, const call_parser *c, const buf *b);

#endif
