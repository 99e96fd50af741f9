#include "engine/choose.h"

enum { MOST_EDITS = 4096 };

bool choose_few(const engine *g, const sampler_params *p, int logprobs) {
    return g->n.heads.top && logprobs == 0 && (sampler_is_greedy(p) || (p->top_k > 0 && p->top_k <= HEAD_MAX_TOP));
}

bool choose_uses_top(const engine *g, const sampler_params *p, int logprobs) {
    return choose_few(g, p, logprobs) && sampler_is_plain(p);
}

int choose_top_count(const engine *g, const sampler_params *p) {
    return sampler_is_greedy(p) ? 1 : (int)min_i64(p->top_k, g->n.real_vocab);
}

/* ---- edits ---- */

/* Beyond a quarter of the rows the whole head is not much more to read. */
int choose_most_edits(const engine *g) { return (int)min_i64(MOST_EDITS, g->n.real_vocab / 4); }

static void add(id_set *edits, const engine *g, int32_t id) {
    if (id >= 0 && id < g->n.real_vocab) id_set_add(edits, id);
}

bool choose_edits_open(id_set *edits, const engine *g, const sampler_params *p, const history *seen, err *e) {
    if (!id_set_open(edits, choose_most_edits(g)))
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "request: no memory for what it edits");
    for (int i = 0; i < p->n_bias; i++) add(edits, g, p->bias[i].id);
    for (int i = 0; i < p->n_stop_ids && p->min_tokens > 0; i++) add(edits, g, p->stop_ids[i]);
    const bool prompt_counts = p->repetition != 0 && p->repetition != 1;
    for (int i = 0; i < seen->n_ids; i++)
        if (prompt_counts || history_count(seen, seen->ids[i]) > 0) add(edits, g, seen->ids[i]);
    return true;
}

void choose_edits_push(id_set *edits, const engine *g, const sampler_params *p, int32_t id) {
    if (edits->v && sampler_has_penalties(p)) add(edits, g, id);
}

/* ---- the choice ---- */

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

/* The n best and the edited ids, which are others, as one row in order of id. */
static int merge(const choose_room *m, const choose_row *r, int n) {
    int at = 0, i = 0, j = 0;
    while (i < n || j < r->n_edits) {
        const bool best = j == r->n_edits || (i < n && r->ids[i] < r->edit_ids[j]);
        m->ids[at] = best ? r->ids[i] : r->edit_ids[j];
        m->logits[at++] = best ? r->logits[i++] : r->edit_logits[j++];
    }
    return at;
}

bool choose_from_top(engine *g, int32_t *id, const sampler_params *p, const choose_row *r, const choose_room *room,
                     err *e) {
    int n = by_id(r->ids, r->logits, r->k);
    if (n + r->n_edits == 0)
        return fail(e, ERR_INPUT, "E-ENGINE-NONFINITE",
                    "position %lld: the hidden state is not finite (`nibble inspect --scan` finds NaN or Inf in the "
                    "weights)",
                    (long long)r->position);
    if (r->n_edits == 0 && r->k == 1) return *id = r->ids[0], true;
    sampler_row x = {
        .logits = r->logits, .ids = r->ids, .position = r->position, .generated = r->generated, .seen = r->seen
    };
    if (r->n_edits > 0) {
        n = merge(room, r, n);
        x.logits = room->logits;
        x.ids = room->ids;
        x.allowed = r->allowed;
    }
    x.n = n;
    return sampler_draw(&g->sm, id, p, &x, e);
}
