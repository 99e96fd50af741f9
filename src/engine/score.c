/* Log-probabilities of a prompt's tokens, from the rows of the pass that processes it. */
#include "engine/loop_impl.h"
#include "engine/sampler_impl.h"

/* logits: of the position in front of `at`. */
static bool tell(loop *l, seq *s, int at, const float *logits) {
    const loop_request *q = &s->r->q;
    engine *g = l->g;
    int32_t top[LOOP_MAX_LOGPROBS];
    double logprobs[LOOP_MAX_LOGPROBS];
    if (!sampler_scan(&g->sm, logits, g->n.real_vocab))
        return fail(&s->fault, ERR_INPUT, "E-ENGINE-NONFINITE",
                    "position %d: the logits are not finite (`nibble inspect --scan` finds NaN or Inf in the weights)",
                    at);
    const double logprob = sampler_logprobs(&g->sm, top, logprobs, q->logprobs, logits, g->n.real_vocab, s->tokens[at]);
    q->on_prompt_token(q->ctx, at, s->tokens[at], logprob, top, logprobs);
    return true;
}

bool score_prompt(loop *l, seq *s, err *e) {
    request *r = s->r;
    engine *g = l->g;
    const int64_t h = g->config.hidden, v = g->n.real_vocab;
    const int end = s->done + s->rows < r->q.n_prompt ? s->done + s->rows : r->q.n_prompt - 1;
    /* Position p says what token p + 1 is worth. Another choice, or this one before it was preempted, may have told some. */
    for (int p = r->scored > s->done ? r->scored : s->done, n; p < end; p += n) {
        n = end - p < g->sc.head_rows ? end - p : g->sc.head_rows;
        forward_real_logits(&g->sc, g->sc.hidden + (1 + s->row0 + p - s->done) * h, n);
        g->o->download(g->o, g->host_logits, g->sc.logits, (size_t)n * (size_t)v * sizeof(float));
        if (!g->o->sync(g->o, e)) return false;
        for (int i = 0; i < n && !s->fault.id; i++)
            if (tell(l, s, p + i + 1, g->host_logits + i * v)) r->scored = p + i + 1;
        if (s->fault.id) return true;
    }
    return true;
}
