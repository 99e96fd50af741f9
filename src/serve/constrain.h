/* constrain.h - response_format and tool_choice as a rule for the engine. Private to serve/. */
#ifndef NIBBLE_CONSTRAIN_H
#define NIBBLE_CONSTRAIN_H

#include "serve/chat.h"
#include "text/grammar.h"

static inline bool constrain_may_call(const chat_request *r) { return r->tools && r->tool_choice != TOOLS_NONE; }
static inline bool constrain_must_call(const chat_request *r) {
    return r->tools && (r->tool_choice == TOOLS_REQUIRED || r->tool_choice == TOOLS_NAMED);
}
/* JSON or calls: what does not begin with a call has none in it, whatever its strings spell. */
static inline bool constrain_calls_first(const chat_request *r) {
    return r->format != FORMAT_TEXT && constrain_may_call(r) && r->separate_reasoning;
}
/* Preparing thread, when the prompt is known: c->grammar, NULL when anything may be said. Faults: a schema or a tool that
 * cannot be enforced, combinations that contradict each other. */
bool constrain_prepare(chat *c, fault *f);
/* What the job needs while it runs; it outlives the chat. NULL when there is no grammar. */
typedef struct constraint constraint;
NODISCARD bool constraint_new(constraint **out, chat *c, const int32_t *end_ids, int n_end_ids, err *e);
token_rule constraint_rule(constraint *k);
void constraint_free(void *k);

#endif
