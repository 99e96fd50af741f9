/* The self-test as a call of its own: a loop with nothing but the test. */
#include "engine/loop_impl.h"

bool engine_selftest(engine *g, int depth, int tokens, err *e) {
    loop *l;
    const loop_options o = { .depth = depth, .fixed_depth = true };
    if (!loop_open(&l, g, &o, e)) return false;
    l->alone = true;
    bool ok = alarm_test(l, tokens, e);
    while (ok && loop_step(l)) continue;
    ok = ok && alarm_tested(l, e);
    loop_close(l);
    return ok;
}
