/* split.h - streaming splitter of generated text into thought, answer and tool calls.
 *
 * Bytes in any chunking, the same events out. Starts inside or outside thinking as the rendered prompt
 * implies (it ends with an open <think> block or not). Tool calls are recognised only when the request has
 * tools (ruling 10: opener <tool_call>, or a line starting <function=NAME> with NAME among the tools; not
 * inside thinking, not inside code fences; a generation that ends inside thinking right after a complete call
 * counts as that call). Nothing of a tag leaks into text; what turns out not to be a tag comes out as text. */
#ifndef NIBBLE_SPLIT_H
#define NIBBLE_SPLIT_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/json.h"

typedef struct split split;
typedef enum split_kind { SPLIT_THOUGHT, SPLIT_TEXT, SPLIT_CALL } split_kind;
/* THOUGHT and TEXT: a piece of UTF-8 text. CALL: name and arguments (a JSON object as text) of one
 * complete call, typed by the tool's parameter schema where it has one. */
typedef void split_event(void *ctx, split_kind kind, str text, str call_name);

/* True when the rendered prompt ends inside an open thinking block. */
bool split_prompt_thinks(str prompt);
/* tools: the request's tools array or NULL (no call parsing). */
split *split_new(bool thinking, const json *tools, split_event *fn, void *ctx);
void split_push(split *s, str bytes);
void split_end(split *s);
void split_free(split *s);

#endif
