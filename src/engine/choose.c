#include "engine/choose.h"

bool choose_uses_top(const engine *g, const sampler_params *p, int logprobs) {
    return g->n.heads.top && logprobs == 0 && sampler_is_plain(p) &&
           (sampler_is_greedy(p) || (p->top_k > 0 && p->top_k <= HEAD_MAX_TOP));
}

int choose_top_count(const engine *g, const sampler_params *p) {
    return sampler_is_greedy(p) ? 1 : (int)min_i64(p->top_k, g->n.real_vocab);
}

/* Put k best entries in order of id, as the sampler's tie rule wants them. Returns how many there are. */
static int by_id(int32_t *ids, float *logits, int k) {
    int n = 0;
    for (int i = 0; i < k && ids[i] >= 0; i++) {
        const int32_t id = ids[i];
        const float logit = logits[i];
        int at = n++;
        for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1], logits[at] = logits[at - 1];
        ids[at] = id;
        logits[at] = logit;
    }
    return n;
}

bool choose_from_top(engine *g, int32_t *id, const sampler_params *p, int32_t *ids, float *logits, int k,
                     int64_t position, int generated, err *e) {
    const int n = by_id(ids, logits, k);
    int32_t at = 0;
    if (n == 0)
        return fail(e, ERR_INPUT, "E-ENGINE-NONFINITE",
                    "position %lld: the hidden state is not finite (`nibble inspect --scan` finds NaN or Inf in the "
                    "weights)",
                    (long long)position);
    const sampler_row x = { .logits = logits, .n = n, .position = position, .generated = generated };
    if (k > 1 && !sampler_draw(&g->sm, &at, p, &x, e)) return false;
    *id = ids[at];
    return true;
}
