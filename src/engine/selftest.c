/* The self-test as a call of its own: a loop with nothing but the test. */
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/loop_impl.h"

static bool test(engine *g, int depth, int tokens, bool alone, int *slots, err *e) {
    loop *l;
    const loop_options o = { .depth = depth, .fixed_depth = true };
    if (!loop_open(&l, g, &o, e)) return false;
    l->alone = true;
    *slots = l->slots;
    bool ok = alarm_test(l, tokens, e);
    while (ok && loop_step(l)) continue;
    ok = ok && (!alone || alarm_test_alone(l, tokens, e)) && alarm_tested(l, e);
    loop_close(l);
    return ok;
}

bool engine_selftest(engine *g, int depth, int tokens, err *e) {
    int slots;
    return test(g, depth, tokens, false, &slots, e);
}

bool engine_selftest_all(engine *g, int depth, err *e) {
    const double t0 = clock_seconds();
    int slots;
    if (!test(g, depth, ENGINE_TEST_TOKENS, true, &slots, e)) return false;
    char drafts[48] = "no draft head", batch[32] = "";
    if (g->n.has_mtp) snprintf(drafts, sizeof drafts, "%d drafts per round", depth);
    const int together = slots < 2 * ALARM_PROMPTS ? slots : 2 * ALARM_PROMPTS;
    if (together > 1) snprintf(batch, sizeof batch, " and %d at a time", together);
    log_say(
        "N-SPEC-TESTED",
        "%s: self-test passed in %.2f s: greedy answers to %d prompts, %d tokens each, are the same without drafts and "
        "with (%s), alone%s",
        g->files.dir, clock_seconds() - t0, ALARM_PROMPTS, ENGINE_TEST_TOKENS, drafts, batch);
    return true;
}
