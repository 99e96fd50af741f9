#include "engine/sampler.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "engine/sampler_impl.h"

enum { PURPOSE_TOKEN = 0, MAX_VOCAB = 1 << 23 };

bool sampler_open(sampler *s, int vocab, kern_isa isa, err *e) {
    CHECK(vocab > 0 && vocab <= MAX_VOCAB, "a sampler for %d ids", vocab);
    const size_t v = (size_t)vocab, blocks = (v + KERN_BLOCK - 1) / KERN_BLOCK;
    *s = (sampler){ .vocab = vocab, .blocks = (int)blocks };
    kern_init(&s->k, isa);
    s->maxima = malloc(blocks * sizeof *s->maxima);
    s->stale = calloc(blocks, 1);
    s->masked = malloc(v * sizeof *s->masked);
    s->undo = malloc((v + SAMPLER_MAX_BIAS + SAMPLER_MAX_STOPS) * sizeof *s->undo);
    s->list = malloc(v * sizeof *s->list);
    s->bins = malloc(v * sizeof *s->bins);
    if (s->maxima && s->stale && s->masked && s->undo && s->list && s->bins) return true;
    sampler_close(s);
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "sampler: no memory for a vocabulary of %d", vocab);
}

void sampler_close(sampler *s) {
    free(s->maxima);
    free(s->stale);
    free(s->masked);
    free(s->undo);
    free(s->list);
    free(s->bins);
    *s = (sampler){ 0 };
}

/* ---- parameters ---- */

static bool repeats(const sampler_params *p) { return p->repetition != 0 && p->repetition != 1; }

bool sampler_has_penalties(const sampler_params *p) { return p->presence != 0 || p->frequency != 0 || repeats(p); }

bool sampler_is_plain(const sampler_params *p) {
    return !sampler_has_penalties(p) && p->n_bias == 0 && (p->n_stop_ids == 0 || p->min_tokens == 0);
}

static bool in_range(const char *name, double v, double lo, double hi, err *e) {
    if (v >= lo && v <= hi) return true; /* false for NaN */
    return fail(e, ERR_INPUT, "E-SAMPLE-PARAM", "%s: %g is outside [%g, %g]", name, v, lo, hi);
}

bool sampler_check(const sampler_params *p, int vocab, err *e) {
    if (!in_range("temperature", p->temperature, 0, 100, e) || !in_range("top_k", p->top_k, 0, 1 << 24, e) ||
        !in_range("top_p", p->top_p, 0, 1, e) || !in_range("min_p", p->min_p, 0, 1, e) ||
        !in_range("presence_penalty", p->presence, -2, 2, e) ||
        !in_range("frequency_penalty", p->frequency, -2, 2, e) ||
        (p->repetition != 0 && !in_range("repetition_penalty", p->repetition, 0.01, 100, e)) ||
        !in_range("min_tokens", p->min_tokens, 0, INT32_MAX, e) ||
        !in_range("logit_bias entries", p->n_bias, 0, SAMPLER_MAX_BIAS, e) ||
        !in_range("stop ids", p->n_stop_ids, 0, SAMPLER_MAX_STOPS, e))
        return false;
    for (int i = 0; i < p->n_bias; i++) {
        const sampler_bias *b = &p->bias[i];
        if (b->id < 0 || b->id >= vocab)
            return fail(e, ERR_INPUT, "E-SAMPLE-PARAM", "logit_bias: id %d is outside the vocabulary of %d", b->id,
                        vocab);
        if (!in_range("logit_bias", b->value, -100, 100, e)) return false;
    }
    for (int i = 0; i < p->n_stop_ids; i++)
        if (p->stop_ids[i] < 0 || p->stop_ids[i] >= vocab)
            return fail(e, ERR_INPUT, "E-SAMPLE-PARAM", "stop id %d is outside the vocabulary of %d", p->stop_ids[i],
                        vocab);
    return true;
}

/* ---- the row ---- */

bool sampler_scan(sampler *s, const float *x, int n) { return s->k.block_max(s->maxima, x, n); }

float sampler_top(const sampler *s, int n) {
    float top = -INFINITY;
    for (int b = 0; b * KERN_BLOCK < n; b++)
        if (s->maxima[b] > top) top = s->maxima[b];
    return top;
}

int32_t sampler_find(const sampler *s, const float *x, int n, float logit) {
    int b = 0;
    while (s->maxima[b] != logit) b++;
    for (int i = b * KERN_BLOCK; i < n; i++)
        if (x[i] == logit) return i;
    CHECK(false, "no logit %g in block %d", (double)logit, b);
}

/* Where the logit of `id` is; -1: the row has none. */
static int place_of(const sampler_row *r, int32_t id) {
    if (!r->ids) return id < r->n ? id : -1;
    int lo = 0, hi = r->n;
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (r->ids[mid] < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < r->n && r->ids[lo] == id ? lo : -1;
}

static void edit(sampler *s, const sampler_row *r, int at, float value) {
    s->undo[s->n_undo++] = (sampler_undo){ r->logits[at], at };
    r->logits[at] = value;
    s->stale[at / KERN_BLOCK] = 1;
}

/* What stays finite without an edit stays finite with it. */
static float bounded(float v) { return v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v; }

static void penalize(sampler *s, const sampler_params *p, const sampler_row *r) {
    const float repetition = (float)p->repetition, frequency = (float)p->frequency, presence = (float)p->presence;
    const history *h = r->seen;
    const bool prompt_counts = repeats(p);
    for (int i = 0; i < h->n_ids; i++) {
        const int32_t id = h->ids[i];
        const uint32_t count = history_count(h, id);
        const int at = count > 0 || prompt_counts ? place_of(r, id) : -1;
        if (at < 0) continue;
        float v = r->logits[at];
        if (prompt_counts) v = v > 0 ? v / repetition : v * repetition;
        if (count > 0) v = (v - frequency * (float)count) - presence;
        edit(s, r, at, bounded(v));
    }
}

static void add_bias(sampler *s, const sampler_params *p, const sampler_row *r) {
    for (int i = 0; i < p->n_bias; i++) {
        const int at = place_of(r, p->bias[i].id);
        if (at >= 0) edit(s, r, at, bounded(r->logits[at] + p->bias[i].value));
    }
}

static void ban_stops(sampler *s, const sampler_params *p, const sampler_row *r) {
    for (int i = 0; i < p->n_stop_ids; i++) {
        const int at = place_of(r, p->stop_ids[i]);
        if (at >= 0) edit(s, r, at, -INFINITY);
    }
}

/* Maxima of the blocks that edits touched. */
static void refresh(sampler *s, const sampler_row *r) {
    for (int b = 0; b * KERN_BLOCK < r->n; b++) {
        if (!s->stale[b]) continue;
        const int first = b * KERN_BLOCK, left = r->n - first;
        s->stale[b] = 0;
        (void)s->k.block_max(&s->maxima[b], r->logits + first, left < KERN_BLOCK ? left : KERN_BLOCK);
    }
}

static void restore(sampler *s, const sampler_row *r) {
    while (s->n_undo > 0) { /* newest first: an id may have been edited twice */
        s->n_undo--;
        r->logits[s->undo[s->n_undo].id] = s->undo[s->n_undo].old;
    }
}

/* The row with every id that is not allowed at -inf, and its maxima. */
static void mask(sampler *s, const sampler_row *r) {
    for (int i = 0; r->ids && i < r->n; i++) {
        const int32_t id = r->ids[i];
        s->masked[i] = r->allowed[id / 64] >> id % 64 & 1 ? r->logits[i] : -INFINITY;
    }
    for (int first = 0; !r->ids && first < r->n; first += 64) {
        const uint64_t word = r->allowed[first / 64];
        const int count = r->n - first < 64 ? r->n - first : 64;
        float *y = s->masked + first;
        memcpy(y, r->logits + first, (size_t)count * sizeof *y);
        if (word != UINT64_MAX)
            for (int i = 0; i < count; i++)
                if (!(word >> i & 1)) y[i] = -INFINITY;
    }
    (void)s->k.block_max(s->maxima, s->masked, r->n);
}

/* ---- the choice ---- */

/* Length and mass of the shortest prefix with at least `share` of `total`, at most `count` candidates. */
static int nucleus(sampler *s, uint64_t *total, int count, double share) {
    const double want = ceil(share * (double)*total);
    const uint64_t need = want < (double)*total ? (uint64_t)want : *total;
    uint64_t sum = 0;
    int keep = 0;
    while (keep < count && (keep == 0 || sum < need)) sum += rank_at(s, keep++)->mass;
    *total = sum;
    return keep;
}

static int32_t draw_filtered(sampler *s, const sampler_params *p, const float *x, const sampler_row *r, float top) {
    const float t = (float)p->temperature;
    const bool few = p->top_k > 0 && p->top_k <= SAMPLER_SELECT;
    uint64_t total;
    if (few) {
        rank_select(s, x, r->n, p->top_k);
        total = rank_weigh(s, t);
    } else {
        total = rank_all(s, x, r->n, top, t);
    }
    int count = s->n_list;
    if (p->top_k > 0 && p->top_k < count) {
        total = 0;
        for (count = 0; count < p->top_k; count++) total += rank_at(s, count)->mass;
    }
    if (p->top_p < 1) count = nucleus(s, &total, count, p->top_p);
    const uint64_t least = p->min_p > 0 ? (uint64_t)ceil(p->min_p * SAMPLER_UNIT) : 0;
    if (least > 0) {
        total = 0;
        for (int i = 0; i < count; i++) total += s->list[i].mass >= least ? s->list[i].mass : 0;
    }
    const double u = rng_uniform(p->seed, p->choice, (uint64_t)r->position, PURPOSE_TOKEN) * (double)total;
    const uint64_t target = (uint64_t)u < total ? (uint64_t)u : total - 1;
    uint64_t sum = 0;
    for (int i = 0;; i++) { /* ends: the masses that count add up to total > target */
        const sampler_entry *c = rank_at(s, i);
        if (c->mass >= least) sum += c->mass;
        if (sum > target) return c->id;
    }
}

bool sampler_draw(sampler *s, int32_t *id, const sampler_params *p, const sampler_row *r, err *e) {
    CHECK(r->n > 0 && r->n <= s->vocab, "%d logits in a sampler for %d", r->n, s->vocab);
    if (!sampler_scan(s, r->logits, r->n))
        return fail(
            e, ERR_INPUT, "E-ENGINE-NONFINITE",
            "position %lld: the logits are not finite (`nibble inspect --scan` finds NaN or Inf in the weights)",
            (long long)r->position);
    if (r->seen && sampler_has_penalties(p)) penalize(s, p, r);
    add_bias(s, p, r);
    if (r->generated < p->min_tokens) ban_stops(s, p, r);
    if (s->n_undo > 0) refresh(s, r);
    const float *x = r->logits;
    if (r->allowed) mask(s, r), x = s->masked;
    const float top = sampler_top(s, r->n);
    bool ok = true;
    if (top == -INFINITY)
        ok = fail(e, ERR_INPUT, "E-SAMPLE-MASKED", "position %lld: no token may be chosen (mask, min_tokens)",
                  (long long)r->position);
    else
        *id = sampler_is_greedy(p) ? sampler_find(s, x, r->n, top) : draw_filtered(s, p, x, r, top);
    if (ok && r->ids) *id = r->ids[*id];
    restore(s, r);
    return ok;
}
