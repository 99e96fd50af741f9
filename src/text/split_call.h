/* split_call.h - recognising one XML-style tool call in a growing buffer; split.c decides where calls may stand. */
#ifndef NIBBLE_SPLIT_CALL_H
#define NIBBLE_SPLIT_CALL_H

#include "base/buf.h"
#include "base/json.h"

typedef enum tag_match { TAG_NONE, TAG_PART, TAG_WHOLE } tag_match; /* PART: the buffer ends inside the tag */

/* Does `tag` stand at `at`? On WHOLE *n is its length. */
tag_match tag_at(const buf *b, size_t at, const char *tag, size_t *n);
/* <tool_call>, or at the start of a line <function=NAME> of a known tool. *n = bytes of <tool_call>, else 0. */
tag_match call_opener(const buf *b, size_t at, bool line_start, const json *tools, size_t *n);
/* </tool_call>, </function> or </parameter>. */
tag_match call_closer(const buf *b, size_t at, size_t *n);

typedef struct span {
    size_t from, n;
} span; /* of the buffer */
typedef struct call_param {
    span key, value;
} call_param;

typedef enum call_state { CALL_OPEN, CALL_NAME, CALL_BODY, CALL_KEY, CALL_VALUE, CALL_DONE } call_state;
typedef struct call_parser {
    bool active, wrapped; /* wrapped: opened by <tool_call> */
    call_state state;
    size_t at; /* parsed up to here; a value is searched up to here */
    span name, key;
    size_t value_from;
    call_param *v;
    size_t n, cap;
} call_parser;

typedef enum call_verdict { CALL_WAIT, CALL_REJECT, CALL_COMPLETE } call_verdict;

/* Start at `at`, `opener` bytes of <tool_call> being read. Storage of an earlier call is kept. */
void call_begin(call_parser *c, size_t at, size_t opener);
/* Read on. strict (inside thinking): the name must be a tool's, and junk or </think> ends it. REJECT: c->at is where it
 * ceased to be a call. COMPLETE: c->at is behind its end. final: nothing more will come. */
call_verdict call_step(call_parser *c, const buf *b, const json *tools, bool strict, bool final);
/* Waiting at the end of the generation: is this more than the bare words <tool_call>? */
bool call_committed(const call_parser *c, const buf *b);
str call_name(const call_parser *c, const buf *b);
void call_free(call_parser *c);

#endif
