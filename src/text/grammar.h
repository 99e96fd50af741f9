/* grammar.h - constrained decoding: which tokens may follow, so that the answer is JSON, fits a schema, or is tool calls.
 *
 * A grammar is compiled to rules over bytes (a pushdown automaton); a token is allowed when some complete answer begins
 * with what was written and its bytes. Every state that can be reached can also be completed, so there is always a token
 * to choose as long as the vocabulary has one for each single byte. States are numbers and are never changed: going back
 * to before rejected drafts means to forget the newer ones.
 *
 * The language of a schema (a subset of the JSON texts that validate):
 * - Properties come in the order of the schema, optional ones may be left out. Further ones come last; they need
 *   additionalProperties (true or a schema) or a schema that declares none: where properties are declared, the default is
 *   that there are no others. Keys, and strings of enum and const, are in their usual spelling; numbers of enum and const as
 *   the schema writes them. That no further key comes twice is not enforced.
 * - White space: before a value, key or closing bracket either nothing, one space, or one newline with at most 32
 *   spaces (tabs are not used). None before ',' and ':', and none at the end.
 * - Strings are well-formed UTF-8 with any JSON escape (\uD800.. only in pairs); lengths count characters. Under
 *   `pattern` characters stand for themselves or have their short escape; only other control characters use \u00XX.
 *   A pattern is searched for, as the specification says: anchor it with ^ and $.
 * - Numbers have at most 20 digits before the point, 20 behind it and 3 in the exponent.
 * - At most 60 to 120 levels of nesting, by their kind.
 * - A schema without a type is taken for what its other keywords speak of (properties: an object, and so on).
 *
 * Schema keywords: type, enum, const, properties, required, additionalProperties, items, prefixItems, minItems, maxItems,
 * minLength, maxLength, pattern, minimum, maximum, exclusiveMinimum, exclusiveMaximum (of integers), anyOf, oneOf (when no
 * value can fit two branches for all we can tell by types, const and enum), allOf (when the parts can be merged), $ref to
 * #..., $defs, definitions, nullable; annotations (title, description, default, examples, format, deprecated, readOnly,
 * writeOnly, discriminator, $id, $schema, $comment, and what begins with x-) are ignored. Anything else that constrains is
 * refused by name.
 *
 * Errors: E-GRAMMAR-SCHEMA (keyword and JSON pointer: not supported, malformed, or no value can fit), E-GRAMMAR-SIZE (too
 * large a grammar: time and memory of everything here are bounded), E-GRAMMAR-TOOL (tools that cannot be called so),
 * E-GRAMMAR-TOKEN (no token fits; the vocabulary lacks a byte), E-MACHINE-MEMORY. */
#ifndef NIBBLE_GRAMMAR_H
#define NIBBLE_GRAMMAR_H

#include "base/err.h"
#include "base/json.h"
#include "text/tokenizer.h"

/* ---- what may be written ---- */

typedef struct grammar grammar; /* immutable once made: any number of threads and runs may use it */

typedef struct grammar_options {
    /* The rendered prompt ends inside a thought (split_prompt_thinks): free text up to </think>, which has to come, and
     * at most two newlines; then the grammar. */
    bool thinking;
} grammar_options;

/* Any JSON object (response_format json_object). `o` may be NULL here and below: all false. */
NODISCARD bool grammar_json_object(grammar **out, const grammar_options *o, err *e);
/* Texts of values that fit `schema` (an object, or true or false). The tree is not needed afterwards. */
NODISCARD bool grammar_json_schema(grammar **out, const json *schema, const grammar_options *o, err *e);

typedef struct grammar_calls {
    const char *name; /* the one tool to be called; NULL: any */
    bool parallel;    /* one call or more; else exactly one */
} grammar_calls;
/* Calls of tools[] in the form of the model's family (split.h reads them back): tool_choice required (name NULL) or named.
 * Required parameters are there; each parameter comes once, in the order of the schema. Values are what toolcall_value
 * reads as a value of the schema: text for strings, JSON for the rest. A text holds none of the four tags
 * </parameter>, <parameter=, </function>, </tool_call>. Schema errors name the tool. */
NODISCARD bool grammar_tool_calls(grammar **out, const json *tools, const grammar_calls *c, const grammar_options *o,
                                  err *e);
/* A text of a value that fits `schema` (NULL: any object), or such calls. The first character tells: a call begins with '<'.
 * *in_tools: an error is in the tools, not in the schema. */
NODISCARD bool grammar_answer_or_calls(grammar **out, bool *in_tools, const json *schema, const json *tools,
                                       const grammar_calls *c, const grammar_options *o, err *e);
void grammar_free(grammar *g);

/* ---- the vocabulary ---- */

/* Tokens as bytes, made once per tokenizer (about 0.2 s and 20 MB for 248k tokens); immutable, borrows nothing. Special
 * tokens and others written <|...|> are no text. */
typedef struct grammar_vocab grammar_vocab;
/* `vocab`: ids from 0 that the model's head has (engine: net.real_vocab). */
NODISCARD bool grammar_vocab_new(grammar_vocab **out, const tokenizer *t, int vocab, err *e);
void grammar_vocab_free(grammar_vocab *v);

/* ---- one request ---- */

/* The states of `choices` answers under one grammar. One thread at a time. Borrows g and v. Memory is bounded: a few MB as a
 * rule, 48 at most (what is remembered beyond that is thrown away and found again). */
typedef struct grammar_run grammar_run;
/* end_ids: the tokens that may end the answer, and only when it is complete (the stop ids of the request). */
NODISCARD bool grammar_run_new(grammar_run **out, const grammar *g, const grammar_vocab *v, int choices,
                               const int32_t *end_ids, int n_end_ids, err *e);
void grammar_run_free(grammar_run *r);

/* The next two have the form of the engine's token_rule, with ctx a grammar_run:
 *     .rule = { grammar_mask, grammar_accept, run }
 * Set sampling.min_tokens to 0: the end is where the grammar says. */

/* Which ids may come after what choice `choice` has accepted and then ahead[0..n) (drafts, each allowed where it stands):
 * bit id % 64 of allowed[id / 64], (vocab + 63) / 64 words. Never empty. Errors: E-GRAMMAR-TOKEN (also when ahead does not
 * fit). */
NODISCARD bool grammar_mask(void *ctx, int choice, const int32_t *ahead, int n, uint64_t *allowed, err *e);
/* The choice got its next token. One that does not fit makes every later mask fail, except that end ids change nothing. */
void grammar_accept(void *ctx, int choice, int32_t id);

/* Is what the choice accepted a complete answer? */
bool grammar_complete(const grammar_run *r, int choice);
/* Bytes instead of tokens: are these a beginning of some answer (*complete: also a whole one)? For tests and tools. */
bool grammar_accepts(const grammar *g, str text, bool *complete);

#endif
