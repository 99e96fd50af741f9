/* pretty.h - JSON with indentation, as Python's json.dumps(indent=4) lays it out. */
#ifndef NIBBLE_PRETTY_H
#define NIBBLE_PRETTY_H

#include "base/json.h"

typedef struct pretty {
    buf b;
    int depth;
    bool first; /* nothing was written yet in the open container; true at the start */
} pretty;

/* Start of an item: comma, new line, indentation. */
void pretty_line(pretty *o);
/* pretty_line and the key of a member; its value must follow. */
void pretty_key(pretty *o, str k);
void pretty_open(pretty *o, char c); /* '{' or '[' */
void pretty_close(pretty *o, char c);
void pretty_tree(pretty *o, const json *v);
void pretty_text(pretty *o, const char *k, str v);        /* member with a string */
void pretty_raw(pretty *o, const char *k, const char *v); /* member with JSON text */
void pretty_strings(pretty *o, const char *k, const str *v, int n);

#endif
