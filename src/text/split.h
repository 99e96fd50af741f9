/* split.h - streaming splitter of generated text into thought, answer and tool calls.
 *
 * Bytes in any chunking, the same events out (pieces of one kind may be cut differently; their concatenation and
 * the order of events do not change). Starts inside or outside thinking as the rendered prompt implies (it ends
 * with an open <think> block or not). Tool calls are recognised only when the request has tools (ruling 10: opener
 * <tool_call>, or a line starting <function=NAME> with NAME among the tools; not inside thinking, not inside code
 * fences; a generation that ends inside thinking right after a complete call counts as that call). Nothing of a tag
 * leaks into text; what turns out not to be a tag comes out as text.
 *
 * In detail:
 * - Everything up to the first </think> is thought, byte for byte, but for a <think> that repeats the prompt's. White
 *   space between </think> and what follows belongs to nobody. When the prompt opened no block, a <think> that begins
 *   the answer does. A </think> before the answer's first word is dropped; later ones, and later <think>, are text.
 * - With tools, white space before a call or at the end of calls is dropped, closing tags left over after a call too.
 * - A call needs `<function=NAME>` followed by a parameter or its end; otherwise it is prose. A value ends at
 *   </parameter>; when that is missing, at a <parameter=...> that begins a line or names a declared parameter, or at
 *   a </function> (or </tool_call>) behind which the call ends or another begins. Any other `<` belongs to the value.
 * - A call is told as soon as its first <parameter=...> or its end was read. Of equal parameters the first counts.
 * - At the end of the generation an unfinished tag is dropped from the answer (a lone `<` is kept unless it begins a
 *   line), also a call that was not yet told. A told call that ends behind a whole parameter is complete; inside a value
 *   it is cut: a string ends there, any other value is left out. An unfinished call in the thought is thought. */
#ifndef NIBBLE_SPLIT_H
#define NIBBLE_SPLIT_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/json.h"

typedef struct split split;
typedef enum split_kind {
    SPLIT_THOUGHT,
    SPLIT_TEXT,
    SPLIT_CALL,
    SPLIT_ARGS,
    SPLIT_CALL_END,
    SPLIT_CALL_CUT
} split_kind;
/* THOUGHT, TEXT: a piece, in whole UTF-8 characters (invalid bytes become U+FFFD). CALL: a call begins, text is its name.
 * ARGS: a piece of its arguments; together they are one JSON object, typed by the tool's parameter schema where it has
 * one. CALL_END: that call is complete; or CALL_CUT: the generation ended inside it, and its arguments are what there
 * was of them, closed so as to be JSON. Between CALL and its end only ARGS come. Pieces are never empty, but for the
 * two ends, whose text is. */
typedef void split_event(void *ctx, split_kind kind, str text);

/* True when the rendered prompt ends inside an open thinking block: a <think> with neither </think> nor a control
 * token (<|...) behind it. */
bool split_prompt_thinks(str prompt);
/* tools: the request's tools array or NULL (no call parsing); borrowed until split_free. */
split *split_new(bool thinking, const json *tools, split_event *fn, void *ctx);
/* An answer that does not begin with a call has none: all of it is text. Before the first push. */
void split_calls_first(split *s);
void split_push(split *s, str bytes);
void split_end(split *s); /* flush; the last call but split_free */
void split_free(split *s);

#endif
