/* Tool calls as the model's family writes them:
 *   <tool_call>\n<function=NAME>\n{<parameter=KEY>\nVALUE\n</parameter>\n}</function>\n</tool_call> */
#include "text/grammar_impl.h"
#include "text/toolcall.h"

enum { CALLS_MAX = 64, TOOLS_MAX = 512 };

static bool plain_name(str s) {
    for (size_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] <= 0x20 || s.p[i] == '>' || s.p[i] == '<' || s.p[i] == '"' || s.p[i] == '\'')
            return false;
    return s.n > 0 && s.n <= 256;
}

static const json *function_of(const json *tool) {
    const json *fn = json_get(tool, "function");
    return json_is(fn, JSON_OBJECT) ? fn : tool;
}

static bool required(const json *schema, str key) {
    const json *r = json_get(schema, "required");
    for (uint32_t i = 0; json_is(r, JSON_ARRAY) && i < r->n; i++)
        if (json_is(&r->u.items[i], JSON_STRING) && str_eq(json_str(&r->u.items[i]), key)) return true;
    return false;
}

/* The parameters from `from` to `to`, in the order of the schema. */
static bool add_parameters(grammar *g, const json *schema, str tool, uint32_t from, uint32_t to, err *e) {
    const json *properties = json_get(schema, "properties"), *need = json_get(schema, "required");
    const uint32_t rule = g->states[from].rule;
    for (uint32_t i = 0; json_is(need, JSON_ARRAY) && i < need->n; i++)
        if (!json_is(&need->u.items[i], JSON_STRING) || !json_get_str(properties, json_str(&need->u.items[i])))
            return fail(e, ERR_INPUT, "E-GRAMMAR-TOOL",
                        "tool " STR_FMT ": a required parameter is not among its properties", STR_ARG(tool));
    schema_compiler *c = schema_begin(g, schema, true);
    bool ok = true;
    for (uint32_t i = 0; json_is(properties, JSON_OBJECT) && i < properties->n && ok; i++) {
        const str key = properties->u.members[i].key;
        uint32_t value;
        ok = plain_name(key) ||
             fail(e, ERR_INPUT, "E-GRAMMAR-TOOL", "tool " STR_FMT ": a parameter cannot be named \"" STR_FMT "\"",
                  STR_ARG(tool), STR_ARG(key));
        if (!ok || !(ok = schema_rule(c, &value, &properties->u.members[i].value, true, e))) break;
        uint32_t at = grammar_add_text(g, from, STR("<parameter="));
        at = grammar_add_text(g, grammar_add_text(g, at, key), STR(">\n"));
        const uint32_t behind = grammar_add_state(g, rule), next = grammar_add_text(g, behind, STR("\n"));
        if (g->full) break;
        grammar_add_call(g, at, value, behind);
        if (!required(schema, key)) grammar_add_edge(g, from, EDGE_EPS, next);
        from = next;
    }
    if (ok) grammar_add_edge(g, from, EDGE_EPS, to);
    schema_free(c);
    return ok;
}

static bool add_tool(grammar *g, const json *fn, uint32_t from, uint32_t to, err *e) {
    const json *name = json_get(fn, "name"), *schema = json_get(fn, "parameters");
    if (!schema) schema = json_get(fn, "input_schema");
    if (!json_is(name, JSON_STRING) || !plain_name(json_str(name)))
        return fail(e, ERR_INPUT, "E-GRAMMAR-TOOL",
                    "tools: a function without a name, or with one that cannot be called");
    const uint32_t at = grammar_add_text(
                       g, grammar_add_text(g, grammar_add_text(g, from, STR("<function=")), json_str(name)),
                       STR(">\n")),
                   body = grammar_add_state(g, g->states[from].rule), end = grammar_add_state(g, g->states[from].rule);
    if (g->full) return true;
    grammar_add_edge(g, at, EDGE_EPS, body);
    if (!add_parameters(g, schema, json_str(name), body, end, e))
        return fail_prefix(e, "tool " STR_FMT, STR_ARG(json_str(name)));
    grammar_add_edge(g, grammar_add_text(g, end, STR("</function>\n")), EDGE_EPS, to);
    return true;
}

static bool calls_rule(grammar *g, uint32_t *rule, const json *tools, const grammar_calls *c, err *e) {
    const str name = { c->name, c->name ? strlen(c->name) : 0 };
    if (!json_is(tools, JSON_ARRAY) || tools->n == 0 || tools->n > TOOLS_MAX)
        return fail(e, ERR_INPUT, "E-GRAMMAR-TOOL", "tools: not a list of 1 to %d tools", TOOLS_MAX);
    if (c->name && !toolcall_find(tools, name))
        return fail(e, ERR_INPUT, "E-GRAMMAR-TOOL", "tools: none is named \"" STR_FMT "\"", STR_ARG(name));
    const uint32_t r = *rule = grammar_add_rule(g, 1, c->parallel ? CALLS_MAX : 1), open = grammar_add_state(g, r),
                   close = grammar_add_state(g, r), again = grammar_add_state(g, r);
    grammar_add_edge(g, g->rules[r].start, EDGE_INC, open);
    const uint32_t fn = grammar_add_text(g, open, STR("<tool_call>\n")),
                   behind = grammar_add_text(g, close, STR("</tool_call>"));
    bool ok = true;
    if (!g->full) {
        g->states[behind].final = true;
        grammar_add_edge(g, behind, EDGE_INC, again);
        grammar_add_edge(g, grammar_add_text(g, again, STR("\n")), EDGE_EPS, open);
    }
    for (uint32_t i = 0; i < tools->n && ok && !g->full; i++) {
        const json *f = function_of(&tools->u.items[i]), *n = json_get(f, "name");
        if (!c->name || (json_is(n, JSON_STRING) && str_eq(json_str(n), name))) ok = add_tool(g, f, fn, close, e);
    }
    return ok;
}

/* The schema's value; NULL: any object. */
static bool answer_rule(grammar *g, uint32_t *rule, const json *schema, err *e) {
    if (!schema) {
        json_rules j;
        grammar_json(g, &j, false);
        return *rule = j.object, true;
    }
    schema_compiler *c = schema_begin(g, schema, false);
    const bool ok = schema_rule(c, rule, schema, false, e);
    schema_free(c);
    return ok;
}

static bool finish(grammar **out, grammar *g, bool ok, uint32_t body, const grammar_options *o, err *e) {
    *out = g;
    if (ok) return grammar_finish(out, body, o, e);
    grammar_free(g);
    *out = NULL;
    return false;
}

bool grammar_tool_calls(grammar **out, const json *tools, const grammar_calls *c, const grammar_options *o, err *e) {
    grammar *g = grammar_begin();
    uint32_t calls = 0;
    const bool ok = calls_rule(g, &calls, tools, c, e);
    return finish(out, g, ok, calls, o, e);
}

bool grammar_answer_or_calls(grammar **out, bool *in_tools, const json *schema, const json *tools,
                             const grammar_calls *c, const grammar_options *o, err *e) {
    grammar *g = grammar_begin();
    uint32_t answer = 0, calls = 0;
    *in_tools = false;
    bool ok = answer_rule(g, &answer, schema, e);
    if (ok) *in_tools = !(ok = calls_rule(g, &calls, tools, c, e));
    const uint32_t either = grammar_add_rule(g, 0, 0), end = grammar_add_state(g, either);
    if (ok && !g->full) {
        g->states[end].final = true;
        grammar_add_call(g, g->rules[either].start, answer, end);
        grammar_add_call(g, g->rules[either].start, calls, end);
    }
    return finish(out, g, ok, either, o, e);
}
