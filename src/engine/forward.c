#include "engine/forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/rule.h"

static int widest(const model_config *c) {
    int w = c->heads * c->head_dim * (c->attn_gate ? 2 : 1);
    const int other[] = { config_conv_dim(c), config_value_dim(c),       c->inter,  c->shared_inter,
                          c->hidden,          c->kv_heads * c->head_dim, c->experts };
    for (size_t i = 0; i < ARRAY_LEN(other); i++)
        if (other[i] > w) w = other[i];
    return w;
}

/* The buffers of a scratch: where each is kept, and its 4-byte words. */
typedef struct part {
    void **at;
    int64_t words;
} part;
enum { PARTS = 17 };

static void parts_of(part out[PARTS], scratch *s, const model_config *c, int rows, int head_rows) {
    const int64_t h = c->hidden, r = rows, w = widest(c);
    const part all[PARTS] = { { (void **)&s->ids, r },
                              { (void **)&s->pos3, r * 3 },
                              { (void **)&s->idx, r * c->topk },
                              { (void **)&s->wt, r * c->topk },
                              { (void **)&s->x, r * h },
                              { (void **)&s->h, r * h },
                              { (void **)&s->hidden, (r + 1) * h },
                              { (void **)&s->pair, r * 2 * h },
                              { (void **)&s->mtp_hidden, r * h },
                              { (void **)&s->wide[0], r * w },
                              { (void **)&s->wide[1], r * w },
                              { (void **)&s->wide[2], r * w },
                              { (void **)&s->wide[3], r * w },
                              { (void **)&s->gate_a, r * c->lin_v_heads },
                              { (void **)&s->gate_b, r * c->lin_v_heads },
                              { (void **)&s->logits, (int64_t)head_rows * c->vocab },
                              { (void **)&s->choice, head_rows } };
    memcpy(out, all, sizeof all);
}

int64_t scratch_bytes(const model_config *c, int rows, int head_rows) {
    scratch none;
    part parts[PARTS];
    int64_t bytes = 0;
    parts_of(parts, &none, c, rows, head_rows);
    for (int i = 0; i < PARTS; i++) bytes += parts[i].words * 4;
    return bytes;
}

bool scratch_open(scratch *s, const net *n, int rows, int head_rows, err *e) {
    part parts[PARTS];
    *s = (scratch){ .n = n, .rows = rows, .head_rows = head_rows };
    s->host = xmalloc((size_t)rows * 3 * sizeof *s->host);
    s->draft_logits = xmalloc((size_t)head_rows * sizeof *s->draft_logits);
    s->own = xcalloc((size_t)head_rows, sizeof *s->own);
    if (n->heads.draft) s->own_logits = xmalloc((size_t)head_rows * DRAFT_HEAD_OWN * sizeof *s->own_logits);
    parts_of(parts, s, n->c, rows, head_rows);
    for (int i = 0; i < PARTS; i++)
        if (!n->o->mem_new(n->o, parts[i].at, (size_t)max_i64(parts[i].words, 1) * 4, e)) {
            *parts[i].at = NULL;
            scratch_close(s);
            return false;
        }
    return true;
}

void scratch_close(scratch *s) {
    if (!s->n) return;
    part parts[PARTS];
    parts_of(parts, s, s->n->c, 0, 0);
    for (int i = 0; i < PARTS; i++)
        if (*parts[i].at) s->n->o->mem_free(s->n->o, *parts[i].at);
    free(s->host);
    free(s->draft_logits);
    free(s->own_logits);
    free(s->own);
    *s = (scratch){ 0 };
}

static void project(const pass *p, float *y, const float *x, const linear *w) {
    ops *o = p->s->n->o;
    o->linear(o, y, linear_rows(w), x, linear_cols(w), w, p->rows);
}

enum { MOST_PROJECTIONS = 4 };

/* Several projections of the normed residual, which is left in s->h when `keep`. */
static void norm_project(const pass *p, const float *norm, float *const *y, const linear *const *w, int n, bool keep) {
    scratch *s = p->s;
    const model_config *c = s->n->c;
    ops *o = s->n->o;
    CHECK(n <= MOST_PROJECTIONS, "%d projections", n);
    if (o->norm_linears && o->norm_linears(o, y, keep ? s->h : NULL, w, n, s->x, norm, c->rms_eps, p->rows)) return;
    o->rmsnorm(o, s->h, s->x, c->hidden, norm, p->rows, c->hidden, c->rms_eps);
    for (int i = 0; i < n; i++) project(p, y[i], s->h, w[i]);
}

/* x += projection of h. */
static void project_add(const pass *p, const float *h, const linear *w) {
    scratch *s = p->s;
    ops *o = s->n->o;
    if (o->linear_add && o->linear_add(o, s->x, h, w, p->rows)) return;
    project(p, s->wide[0], h, w);
    o->add(o, s->x, s->wide[0], (int64_t)p->rows * s->n->c->hidden);
}

/* Gated DeltaNet, added to the residual. docs/MODEL.md. */
static void gdn_half(const pass *p, const net_layer *l) {
    scratch *s = p->s;
    const model_config *c = s->n->c;
    ops *o = s->n->o;
    float *qkv = s->wide[0], *z = s->wide[1], *conv = s->wide[2], *out = s->wide[3];
    float *const y[] = { qkv, z, s->gate_b, s->gate_a };
    const linear *const w[] = { l->in_qkv, l->in_z, l->in_b, l->in_a };
    norm_project(p, l->norm1, y, w, 4, false);
    o->conv(o, conv, qkv, l->conv, &p->st->conv[l->index], p->spans, p->n_spans);
    o->gdn(o, out, conv, s->gate_a, s->gate_b, l->neg_a, l->dt_bias, &p->st->gdn[l->index], p->spans, p->n_spans);
    if (o->gated_linear_add && o->gated_linear_add(o, s->x, out, z, l->gdn_norm, c->lin_v_heads, c->lin_v_dim,
                                                   c->rms_eps, l->gdn_out, p->rows))
        return;
    o->gated_norm(o, out, out, z, l->gdn_norm, p->rows, c->lin_v_heads, c->lin_v_dim, c->rms_eps);
    project_add(p, out, l->gdn_out);
}

/* Gated full attention, added to the residual; `kv` is the layer's own cache. */
static void attn_half(const pass *p, const net_layer *l, ops_kv *kv) {
    scratch *s = p->s;
    const model_config *c = s->n->c;
    ops *o = s->n->o;
    const ops_rope rope = { p->st->cos, p->st->sin, s->n->rope_axis, c->rotary_dim / 2 };
    const float scale = (float)(1.0 / __builtin_sqrt((double)c->head_dim));
    float *qg = s->wide[0], *k = s->wide[1], *v = s->wide[2], *q = s->wide[3];
    float *const y[] = { qg, k, v };
    const linear *const w[] = { l->q, l->k, l->v };
    norm_project(p, l->norm1, y, w, 3, false);
    o->qk_rope(o, q, k, qg, l->q_norm, l->k_norm, s->pos3, &rope, p->rows, c->heads, c->kv_heads, c->head_dim,
               c->attn_gate, c->rms_eps);
    o->kv_append(o, kv, k, v, p->spans, p->n_spans);
    o->attention(o, v, q, c->attn_gate ? qg : NULL, kv, c->heads, scale, p->spans, p->n_spans);
    project_add(p, v, l->o);
}

/* The experts of the layer in one op, where the device has it. */
static bool experts_at_once(const pass *p, const net_layer *l) {
    const net *n = p->s->n;
    const net_ffn *f = &l->ffn;
    if (!n->o->moe_block || !f->experts || !f->gate || !f->shared_gate) return false;
    const ops_moe_block b = { .norm = l->norm2,
                              .eps = n->c->rms_eps,
                              .router = f->router,
                              .shared_gate = f->shared_gate,
                              .gate = f->gate,
                              .up = f->up,
                              .down = f->down,
                              .ex = f->experts,
                              .k = n->c->topk };
    return n->o->moe_block(n->o, p->s->x, &b, p->rows);
}

/* Dense FFN, or routed experts and the shared expert: advances the residual x. */
static void ffn_half(const pass *p, const net_layer *l) {
    scratch *s = p->s;
    const model_config *c = s->n->c;
    ops *o = s->n->o;
    const net_ffn *f = &l->ffn;
    if (experts_at_once(p, l)) return;
    float *gate = s->wide[0], *up = s->wide[1], *down = s->wide[1], *logits = s->wide[2], *routed = s->wide[3];
    float *share = f->shared_gate ? s->pair : NULL; /* free outside the start of a draft step */
    float *y[MOST_PROJECTIONS];
    const linear *w[MOST_PROJECTIONS];
    int n = 0;
    if (f->gate) {
        y[n] = gate, w[n++] = f->gate;
        y[n] = up, w[n++] = f->up;
    }
    if (f->experts) y[n] = logits, w[n++] = f->router;
    if (f->experts && share) y[n] = share, w[n++] = f->shared_gate;
    norm_project(p, l->norm2, y, w, n, f->experts != NULL);
    if (f->gate) {
        o->silu_mul(o, gate, gate, up, (int64_t)p->rows * f->inter);
        project(p, down, gate, f->down);
    }
    if (!f->experts) {
        o->add(o, s->x, down, (int64_t)p->rows * c->hidden);
        return;
    }
    o->route(o, s->idx, s->wt, logits, p->rows, c->experts, c->topk);
    o->moe(o, routed, s->h, f->experts, s->idx, s->wt, p->rows, c->topk);
    o->moe_combine(o, s->x, routed, f->gate ? down : NULL, share, p->rows, c->hidden);
}

static void run_layer(const pass *p, const net_layer *l, ops_kv *kv) {
    if (l->kind == LAYER_GDN)
        gdn_half(p, l);
    else
        attn_half(p, l, kv);
    ffn_half(p, l);
}

/* Check the spans, upload ids and positions, extend the rotary table. */
pass forward_begin(scratch *s, seq_state *st, const int32_t *ids, const int32_t *pos3, const ops_span *spans,
                   int n_spans) {
    ops *o = s->n->o;
    int rows = 0, top = 0;
    for (int i = 0; i < n_spans; i++) {
        const ops_span *sp = &spans[i];
        CHECK(sp->row0 == rows && sp->rows > 0 && sp->pos0 >= 0 && sp->pos0 + sp->rows <= st->capacity &&
                  rows + sp->rows <= s->rows,
              "span %d: rows %d+%d at position %d of %d", i, sp->row0, sp->rows, sp->pos0, st->capacity);
        for (int r = 0; r < sp->rows && !pos3; r++)
            for (int a = 0; a < 3; a++) s->host[(rows + r) * 3 + a] = sp->pos0 + r;
        rows += sp->rows;
        if (sp->pos0 + sp->rows > top) top = sp->pos0 + sp->rows;
        CHECK(kv_pages_grow(&st->pages, sp->slot, sp->pos0 + sp->rows) &&
                  kv_pages_own(&st->pages, sp->slot, sp->pos0, sp->rows),
              "span %d: no pages of its own for slot %d", i, sp->slot);
    }
    for (int r = 0; pos3 && r < rows * 3; r++)
        if (pos3[r] >= top) top = pos3[r] + 1;
    state_cover(st, top);
    o->upload(o, s->pos3, pos3 ? pos3 : s->host, (size_t)rows * 3 * sizeof(int32_t));
    o->upload(o, s->ids, ids, (size_t)rows * sizeof(int32_t));
    return (pass){ s, st, spans, n_spans, rows };
}

void forward_embed(const pass *p) {
    const net *n = p->s->n;
    n->o->embed(n->o, p->s->x, n->embed, p->s->ids, p->rows);
}

void forward_layer(const pass *p, int layer) {
    const net_layer *l = &p->s->n->layers[layer];
    run_layer(p, l, l->kind == LAYER_ATTN ? &p->st->kv[l->index] : NULL);
}

void forward_norm(const pass *p) {
    const net *n = p->s->n;
    const int h = n->c->hidden;
    n->o->rmsnorm(n->o, p->s->hidden + h, p->s->x, h, n->norm, p->rows, h, n->c->rms_eps);
}

void forward_trunk(scratch *s, seq_state *st, const int32_t *ids, const int32_t *pos3, const ops_span *spans,
                   int n_spans) {
    ops *o = s->n->o;
    const pass p = forward_begin(s, st, ids, pos3, spans, n_spans);
    if (o->series_begin && o->series_begin(o, st, s->hidden, spans, n_spans)) return;
    forward_embed(&p);
    for (int i = 0; i < s->n->c->layers; i++) forward_layer(&p, i);
    forward_norm(&p);
    if (o->series_end) o->series_end(o);
}

/* The norm of rows of x into one half of the pair rows: dot32 runs over both halves, so they must lie side by side. */
static void pair_half(const pass *p, int half, const float *x, const float *w) {
    scratch *s = p->s;
    ops *o = s->n->o;
    const int h = s->n->c->hidden;
    float *to = p->rows == 1 ? s->pair + half * (int64_t)h : s->h;
    o->rmsnorm(o, to, x, h, w, p->rows, h, s->n->c->rms_eps);
    for (int64_t r = 0; r < p->rows && p->rows > 1; r++)
        o->copy(o, s->pair + (2 * r + half) * h, s->h + r * h, (size_t)h * sizeof(float));
}

void forward_mtp(scratch *s, seq_state *st, const int32_t *next, const float *hidden, const ops_span *spans,
                 int n_spans) {
    const net *n = s->n;
    ops *o = n->o;
    const int h = n->c->hidden;
    const pass p = forward_begin(s, st, next, NULL, spans, n_spans);
    if (o->series_begin && o->series_begin(o, &st->mtp_kv, hidden, spans, n_spans)) return;
    o->embed(o, s->x, n->embed, s->ids, p.rows);
    pair_half(&p, 0, s->x, n->mtp_norm_embed);
    pair_half(&p, 1, hidden, n->mtp_norm_hidden);
    project(&p, s->x, s->pair, n->mtp_fc);
    run_layer(&p, &n->mtp, &st->mtp_kv);
    o->rmsnorm(o, s->mtp_hidden, s->x, h, n->mtp_norm, p.rows, h, n->c->rms_eps);
    if (o->series_end) o->series_end(o);
}

void forward_logits(scratch *s, const float *hidden, int rows) {
    const net *n = s->n;
    CHECK(rows <= s->head_rows, "%d rows of logits in a scratch of %d", rows, s->head_rows);
    n->o->linear(n->o, s->logits, n->c->vocab, hidden, n->c->hidden, n->head, rows);
}

void forward_real_logits(scratch *s, const float *hidden, int rows) {
    const net *n = s->n;
    CHECK(rows <= s->head_rows, "%d rows of logits in a scratch of %d", rows, s->head_rows);
    n->o->linear(n->o, s->logits, n->real_vocab, hidden, n->c->hidden, n->head_real, rows);
}

bool forward_argmax(scratch *s, int32_t *choice, const float *hidden, int rows, err *e) {
    const net *n = s->n;
    ops *o = n->o;
    for (int r = 0; r < rows; r += s->head_rows) {
        const int m = rows - r < s->head_rows ? rows - r : s->head_rows;
        forward_real_logits(s, hidden + (int64_t)r * n->c->hidden, m);
        o->argmax(o, s->choice, s->logits, m, n->real_vocab);
        o->download(o, choice + r, s->choice, (size_t)m * sizeof *choice);
    }
    return o->sync(o, e);
}

bool forward_top(scratch *s, int32_t *ids, float *logits, float *extra, const float *hidden, int rows, int k,
                 const head_query *q, err *e) {
    const net *n = s->n;
    n->o->head_top(n->o, ids, logits, extra, n->heads.top, hidden, rows, k, q);
    return n->o->sync(n->o, e);
}

/* best [rows]: rows of the draft head, of logits s->logits -> ids. */
static void draft_ids(scratch *s, int32_t *ids, const float *hidden, const id_set *const *own, int rows) {
    const net_heads *h = &s->n->heads;
    ops *o = s->n->o;
    const float *logit = s->own_logits;
    int all = 0;
    for (int r = 0; r < rows; r++) {
        s->own[r] = (head_query){ .extra = own[r]->v, .n_extra = own[r]->n };
        all += own[r]->n;
    }
    if (all > 0) o->head_top(o, NULL, NULL, s->own_logits, h->exact, hidden, rows, 0, s->own);
    for (int r = 0; r < rows; r++) {
        float best = 0;
        if (own[r]->n > 0) o->download(o, &best, s->logits + (int64_t)r * h->draft_rows + ids[r], sizeof best);
        ids[r] = heads_draft_id(h, ids[r]);
        for (int i = 0; i < own[r]->n; i++, logit++)
            if (*logit > best) best = *logit, ids[r] = own[r]->v[i];
    }
}

bool forward_draft(scratch *s, int32_t *ids, const float *hidden, const id_set *const *own, int rows, err *e) {
    const net *n = s->n;
    const net_heads *h = &n->heads;
    CHECK(rows <= s->head_rows, "%d rows of drafts in a scratch of %d", rows, s->head_rows);
    if (!h->draft && !h->top) return forward_argmax(s, ids, hidden, rows, e);
    if (!h->draft) {
        if (!forward_top(s, ids, s->draft_logits, NULL, hidden, rows, 1, NULL, e)) return false;
        for (int i = 0; i < rows; i++) ids[i] = ids[i] < 0 ? 0 : ids[i]; /* not finite: verification will say so */
        return true;
    }
    n->o->linear(n->o, s->logits, h->draft_rows, hidden, n->c->hidden, h->draft, rows);
    n->o->argmax(n->o, s->choice, s->logits, rows, h->draft_rows);
    n->o->download(n->o, ids, s->choice, (size_t)rows * sizeof *ids);
    if (!n->o->sync(n->o, e)) return false;
    draft_ids(s, ids, hidden, own, rows);
    return n->o->sync(n->o, e);
}

bool forward_redraft(scratch *s, int32_t *id, int row, const float *hidden, const uint64_t *allowed, float *room,
                     err *e) {
    const net *n = s->n;
    const net_heads *h = &n->heads;
    const int rows = h->draft ? h->draft_rows : n->real_vocab;
    int32_t best = -1;
    if (!h->draft && h->top) {
        const head_query q = { .allowed = allowed };
        n->o->head_top(n->o, &best, room, NULL, h->top, hidden, 1, 1, &q);
    } else {
        n->o->download(n->o, room, s->logits + (int64_t)row * rows, (size_t)rows * sizeof *room);
    }
    if (!n->o->sync(n->o, e)) return false;
    if (h->draft || !h->top) {
        float top = -INFINITY;
        for (int i = 0; i < rows; i++) {
            const int32_t at = h->draft ? heads_draft_id(h, i) : i;
            if (room[i] > top && rule_allows(allowed, at)) top = room[i], best = at;
        }
    }
    for (int32_t i = 0; best < 0 && i < n->real_vocab; i++)
        if (rule_allows(allowed, i)) best = i;
    *id = best < 0 ? 0 : best;
    return true;
}
