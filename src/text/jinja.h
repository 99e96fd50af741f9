/* jinja.h - a Jinja2 interpreter for chat templates: text in, text out, nothing else.
 *
 * The language is jinja2 3.1's, set up as HF sets it up: ImmutableSandboxedEnvironment with trim_blocks,
 * lstrip_blocks, loop controls, autoescape off; `tojson` is json.dumps(ensure_ascii=False);
 * raise_exception and strftime_now are globals; {% generation %} is transparent. What is left out, and
 * every limit, stands in docs/TEMPLATE.md.
 *
 * A compiled template is immutable and may be rendered by many threads at once. Rendering is deterministic
 * but for strftime_now and the time limit. All text is UTF-8; lengths and indices count code points. */
#ifndef NIBBLE_JINJA_H
#define NIBBLE_JINJA_H

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/str.h"

typedef struct jinja jinja;

/* One template variable: a JSON value, or text when value is NULL. Borrowed during the render. */
typedef struct jinja_var {
    str name;
    const json *value;
    str text;
} jinja_var;

/* Bounds of one render; 0 means the default given behind each. */
typedef struct jinja_limits {
    uint64_t max_steps;      /* nodes evaluated and units of work of operations: 50 million */
    size_t max_memory_bytes; /* values made by the template: 256 MiB */
    size_t max_output_bytes; /* text written, captured text included: 64 MiB */
    int max_depth;           /* nested evaluations, macro calls included: 2000 */
    double max_seconds;      /* wall time: 10 */
} jinja_limits;

/* Compile source[0..n). Errors: E-TEMPLATE-SYNTAX (with the line), E-TEMPLATE-LIMIT (source over 1 MiB,
 * nesting over 200). */
NODISCARD bool jinja_compile(jinja **out, str source, err *e);
void jinja_free(jinja *t);

/* Render with `vars` (later ones win); appends to out, which is left as it was on failure.
 * limits may be NULL. Errors: E-TEMPLATE-RUN, E-TEMPLATE-RAISE, E-TEMPLATE-LIMIT, all with the line. */
NODISCARD bool jinja_render(const jinja *t, buf *out, const jinja_var *vars, size_t n_vars, const jinja_limits *limits,
                            err *e);

#endif
