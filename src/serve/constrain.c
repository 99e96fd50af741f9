#include "serve/constrain.h"

#include <stdlib.h>
#include <string.h>

struct constraint {
    grammar *g;
    grammar_run *run;
};

/* The field that asks for the rule. */
static const char *asking(const chat_request *r) {
    return r->format != FORMAT_TEXT ? "response_format" : "tool_choice";
}

/* Errors in the tools are told apart from those in response_format. */
static bool make(grammar **out, bool *in_tools, const chat *c, err *e) {
    const chat_request *r = &c->request;
    const grammar_options o = { .thinking = c->thinks };
    char name[160] = "";
    const size_t n = r->tool_name.n < sizeof name - 1 ? r->tool_name.n : sizeof name - 1;
    if (n) memcpy(name, r->tool_name.p, n);
    const grammar_calls k = { .name = r->tool_choice == TOOLS_NAMED ? name : NULL, .parallel = r->parallel_tool_calls };
    const json *schema = r->format == FORMAT_JSON_SCHEMA ? r->schema : NULL;
    *in_tools = constrain_must_call(r);
    if (*in_tools) return grammar_tool_calls(out, r->tools, &k, &o, e);
    if (constrain_may_call(r)) return grammar_answer_or_calls(out, in_tools, schema, r->tools, &k, &o, e);
    return schema ? grammar_json_schema(out, schema, &o, e) : grammar_json_object(out, &o, e);
}

static bool check(const chat *c, fault *f) {
    const chat_request *r = &c->request;
    if (r->ignore_eos) return fault_field(f, "ignore_eos", "ignore_eos: the end is where %s has it", asking(r));
    if (r->continue_final)
        return fault_field(f, "continue_final_message", "continue_final_message: %s starts at the beginning",
                           asking(r));
    return true;
}

bool constrain_prepare(chat *c, fault *f) {
    const chat_request *r = &c->request;
    if (r->format == FORMAT_TEXT && !constrain_must_call(r)) return true;
    if (!check(c, f)) return false;
    err e = { 0 };
    bool in_tools;
    if (make(&c->grammar, &in_tools, c, &e)) return true;
    c->grammar = NULL;
    return e.kind == ERR_INPUT ? fault_field(f, in_tools ? "tools" : "response_format", "%s", e.msg) : fault_of(f, &e);
}

bool constraint_new(constraint **out, chat *c, const int32_t *end_ids, int n_end_ids, err *e) {
    *out = NULL;
    if (!c->grammar) return true;
    constraint *k = xcalloc(1, sizeof *k);
    k->g = c->grammar;
    c->grammar = NULL;
    if (grammar_run_new(&k->run, k->g, c->model->vocab, c->request.n, end_ids, n_end_ids, e)) return *out = k, true;
    constraint_free(k);
    return false;
}

token_rule constraint_rule(constraint *k) {
    return k ? (token_rule){ grammar_mask, grammar_accept, k->run } : (token_rule){ 0 };
}

void constraint_free(void *p) {
    constraint *k = p;
    if (!k) return;
    if (k->run) grammar_run_free(k->run);
    grammar_free(k->g);
    free(k);
}
