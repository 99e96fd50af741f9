/* api.h - the dialects and the other endpoints. Private to serve/. */
#ifndef NIBBLE_API_H
#define NIBBLE_API_H

#include "serve/chat.h"

extern const chat_dialect api_chat, api_completions, api_render, api_tokenize, api_detokenize;

/* Fields of OpenAI's bodies that both of its endpoints have: stream, stream_options, n, max_tokens (or the name given). */
bool api_read_common(chat *c, const json *body, fault *f);
/* Known members that ask for what is not served: refused by name. `names` ends with NULL. */
bool api_refuse(const json *body, const char *const *names, fault *f);
/* A list of token ids, copied to mem. */
bool api_read_ids(arena *mem, const json *v, const char *param, int vocab, const int32_t **out, int *n, fault *f);

#endif
