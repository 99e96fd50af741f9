/* api.h - the dialects and the other endpoints. Private to serve/. */
#ifndef NIBBLE_API_H
#define NIBBLE_API_H

#include "serve/chat.h"

extern const chat_dialect api_chat, api_completions, api_render, api_tokenize, api_detokenize;
extern const chat_dialect api_responses, api_anthropic, api_anthropic_count;

/* Fields of OpenAI's bodies that both of its endpoints have: stream, stream_options, n, max_tokens (no fewer than told). */
bool api_read_common(chat *c, const json *body, int least_tokens, fault *f);
/* Types of what is accepted without effect in all of OpenAI's bodies. */
bool api_check_indifferent(const json *body, fault *f);
/* Known members that ask for what is not served: refused by name. `names` ends with NULL. */
bool api_refuse(const json *body, const char *const *names, fault *f);
/* Is `name` among the request's tools? */
bool api_has_tool(const chat_request *r, str name);
/* reasoning_effort and what it means for thinking; `param` names it in faults. */
bool api_set_effort(chat_request *r, str effort, const char *param, fault *f);
/* ,"speculative":{...} when there was any. */
void api_write_speculative(buf *out, const chat_usage *u);
/* A list of token ids, copied to mem. */
bool api_read_ids(arena *mem, const json *v, const char *param, int vocab, const int32_t **out, int *n, fault *f);

/* 24 random letters and digits. */
void api_random_id(char out[25]);

#endif
