#include "cmd/constrain.h"

static bool read_schema(grammar **out, const char *arg, const grammar_options *o, err *e) {
    const json_limits limits = { .max_bytes = 8u << 20 };
    arena mem = { .limit = 256u << 20 };
    const json *schema;
    const bool ok = (arg[0] == '{' ? json_parse(&schema, &mem, str_of(arg), "--json-schema", &limits, e)
                                   : json_parse_file(&schema, &mem, arg, &limits, e)) &&
                    grammar_json_schema(out, schema, o, e);
    arena_free(&mem);
    return ok;
}

bool cmd_constrain(cmd_constraint *c, token_rule *rule, const char *schema, bool object, const engine *g, bool thinks,
                   sampler_params *p, err *e) {
    const grammar_options o = { .thinking = thinks };
    *c = (cmd_constraint){ 0 };
    *rule = (token_rule){ 0 };
    if (!schema && !object) return true;
    CHECK(g->tok, "a constraint without a tokenizer");
    p->min_tokens = 0;
    if (!(schema ? read_schema(&c->g, schema, &o, e) : grammar_json_object(&c->g, &o, e)) ||
        !grammar_vocab_new(&c->v, g->tok, g->n.real_vocab, e) ||
        !grammar_run_new(&c->run, c->g, c->v, 1, p->stop_ids, p->n_stop_ids, e))
        return false;
    *rule = (token_rule){ grammar_mask, grammar_accept, c->run };
    return true;
}

void cmd_constraint_free(cmd_constraint *c) {
    grammar_run_free(c->run);
    grammar_vocab_free(c->v);
    grammar_free(c->g);
    *c = (cmd_constraint){ 0 };
}
