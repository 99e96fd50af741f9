#include "engine/rule.h"

#include "engine/engine.h"

bool engine_ask(engine *g, int row, const token_rule *rule, int choice, const int32_t *ahead, int n, err *e) {
    const size_t words = rule_words(g->n.real_vocab), rows = (size_t)g->sc.head_rows;
    CHECK(row < g->sc.head_rows, "row %d of %d", row, g->sc.head_rows);
    if (!g->asked) g->asked = xcalloc(rows, sizeof *g->asked);
    g->asked[row] = (head_query){ 0 };
    if (!rule->mask) return true;
    if (!g->masks) g->masks = xcalloc(rows * words, sizeof *g->masks);
    uint64_t *allowed = g->masks + (size_t)row * words;
    if (!rule->mask(rule->ctx, choice, ahead, n, allowed, e)) return false;
    g->asked[row].allowed = allowed;
    return true;
}

bool engine_redraft(engine *g, int32_t *id, int row, const float *hidden, const token_rule *rule, int choice,
                    const int32_t *ahead, int n, err *e) {
    err unused = { 0 }; /* asked again, and told then, when the token is chosen */
    if (!rule->mask || !engine_ask(g, 0, rule, choice, ahead, n, &unused)) return true;
    const uint64_t *allowed = g->asked[0].allowed;
    return rule_allows(allowed, *id) || forward_redraft(&g->sc, id, row, hidden, allowed, g->host_logits, e);
}
