/* template.h - the checkpoint's own chat template, run by our Jinja interpreter.
 *
 * Source: chat_template.jinja, else "chat_template" of tokenizer_config.json (a string, or a list of
 * {name, template} of which "default" is taken, "tool_use" when tools are given). Immutable once open;
 * threads may render at once. The language and its limits: docs/TEMPLATE.md. */
#ifndef NIBBLE_TEMPLATE_H
#define NIBBLE_TEMPLATE_H

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

typedef struct chat_template chat_template;

/* From a model directory, or from one file. Errors: E-FILE-*, E-JSON-*, E-TEMPLATE-MISSING,
 * E-TEMPLATE-SYNTAX (line), E-TEMPLATE-LIMIT (source too long or nested too deeply). */
NODISCARD bool template_open(chat_template **out, const char *dir, err *e);
NODISCARD bool template_open_file(chat_template **out, const char *path, err *e);
/* Take bos_token, eos_token, ... from dir/tokenizer_config.json (template_open did); no such file is fine. */
NODISCARD bool template_read_tokens(chat_template *t, const char *dir, err *e);
void template_close(chat_template *t);

/* Every key of the request object is a template variable, as HF's apply_chat_template does; as there, `tools` and
 * `documents` are none when absent, but add_generation_prompt defaults to true. bos_token, eos_token, ... come from
 * tokenizer_config.json. Appends to out, which stays as it was on failure.
 * Errors: E-TEMPLATE-RUN (line, jinja's reason), E-TEMPLATE-RAISE (raise_exception's own text and the line),
 * E-TEMPLATE-LIMIT (steps, depth, memory, output, time), E-TEMPLATE-REQUEST (the request is no object). */
NODISCARD bool template_render(const chat_template *t, buf *out, const json *request, err *e);

/* What the template reacts to, for `inspect`: found by reading its source. */
typedef struct template_traits {
    bool tools, thinking_switch, system, images, reasoning_content;
} template_traits;
template_traits template_describe(const chat_template *t);

#endif
