/* convert.h - bodies of other dialects in OpenAI's chat form: pure functions from JSON to JSON.
 *
 * What they write is then checked like a chat request (chat_set_messages, chat_set_tools). A fault names the field of the
 * body as the client wrote it. */
#ifndef NIBBLE_CONVERT_H
#define NIBBLE_CONVERT_H

#include "base/buf.h"
#include "base/json.h"
#include "serve/fault.h"

/* Anthropic's `system` and `messages`. Text blocks of a message are joined by line ends; tool results become tool messages;
 * thinking blocks become reasoning_content; redacted thinking is left out. *prefill: the last message is an assistant's, to
 * be continued. */
bool anthropic_messages(buf *out, const json *body, bool *prefill, fault *f);
/* Anthropic's tools with an input_schema; tools that run on their servers are refused. */
bool anthropic_tools(buf *out, const json *tools, fault *f);

/* OpenAI's `instructions` and `input`: a string, or items. Reasoning, message and function calls that follow each other are
 * one turn of the assistant. */
bool responses_messages(buf *out, const json *body, fault *f);
bool responses_tools(buf *out, const json *tools, fault *f);

/* ---- shared by both ---- */

typedef struct convert_out {
    buf *out;
    bool any;
} convert_out;
/* {"role": role, "content": text with neither closing brace, so that members can follow. */
void convert_begin(convert_out *o, const char *role, str text);
/* Append text to a block of texts: a line end goes between two. */
void convert_join(buf *to, str text);
/* The string member `name` of v; else a fault "where.name must be a string". */
bool convert_str(const json *v, const char *name, const char *where, str *out, fault *f);
/* {"type":"function","function":{...}}; description and parameters may be NULL. */
void convert_tool(buf *out, str name, const json *description, const json *parameters);

#endif
