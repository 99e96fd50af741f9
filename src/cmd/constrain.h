/* constrain.h - --json-schema and --json-object: a grammar, the vocabulary and one run of it, as a rule for the engine. */
#ifndef NIBBLE_CONSTRAIN_H
#define NIBBLE_CONSTRAIN_H

#include "engine/engine.h"
#include "text/grammar.h"

typedef struct cmd_constraint {
    grammar *g;
    grammar_vocab *v;
    grammar_run *run;
} cmd_constraint; /* zeroed = none */

/* `schema`: a file, or JSON that begins with '{'; NULL with `object`: any JSON object. Neither: nothing, *rule zeroed. p: its
 * stop ids end the answer; min_tokens becomes 0, since the grammar says where the end is. thinks: the prompt ends inside a
 * thought. Errors: those of grammar.h, E-JSON-*, E-FILE-*. */
NODISCARD bool cmd_constrain(cmd_constraint *c, token_rule *rule, const char *schema, bool object, const engine *g,
                             bool thinks, sampler_params *p, err *e);
void cmd_constraint_free(cmd_constraint *c);

#endif
