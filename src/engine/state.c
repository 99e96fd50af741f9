#include "engine/state.h"

#include <stdlib.h>

#include "num/mathf.h"

static bool take(const net *n, float **out, int64_t count, err *e) {
    void *p = NULL;
    const bool ok = n->o->mem_new(n->o, &p, (size_t)count * sizeof **out, e);
    *out = p;
    return ok;
}

static bool open_kv(seq_state *s, ops_kv *kv, const wlayer *l, dtype type, err *e) {
    const net *n = s->n;
    const model_config *c = n->c;
    *kv = (ops_kv){ .type = type,
                    .pages = s->pages.device,
                    .slot_pages = s->pages.slot_pages,
                    .kv_heads = c->kv_heads,
                    .dim = c->head_dim,
                    .capacity = s->capacity,
                    .k_scale = l->k_scale > 0 ? l->k_scale : 1,
                    .v_scale = l->v_scale > 0 ? l->v_scale : 1 };
    const size_t bytes =
        (size_t)s->pages.pages * OPS_KV_PAGE * (size_t)(c->kv_heads * c->head_dim) * (size_t)dtype_bytes(type);
    return n->o->mem_new(n->o, &kv->k, bytes, e) && n->o->mem_new(n->o, &kv->v, bytes, e);
}

static bool open_gdn(const net *n, ops_conv *conv, ops_gdn *g, int slots, int running, err *e) {
    const model_config *c = n->c;
    const int64_t pend = (int64_t)running * OPS_MAX_PENDING;
    *conv = (ops_conv){ .channels = config_conv_dim(c), .taps = c->conv_kernel };
    *g =
        (ops_gdn){ .k_heads = c->lin_k_heads, .v_heads = c->lin_v_heads, .k_dim = c->lin_k_dim, .v_dim = c->lin_v_dim };
    return take(n, &conv->window, (int64_t)slots * (c->conv_kernel - 1) * conv->channels, e) &&
           take(n, &conv->pending, pend * conv->channels, e) &&
           take(n, &g->state, (int64_t)slots * c->lin_v_heads * c->lin_k_dim * c->lin_v_dim, e) &&
           take(n, &g->pend_k, pend * config_key_dim(c), e) && take(n, &g->pend_v, pend * config_value_dim(c), e) &&
           take(n, &g->pend_beta, pend * c->lin_v_heads, e) && take(n, &g->pend_decay, pend * c->lin_v_heads, e);
}

/* A BF16 head in an FP8 export has no K/V scales of its own, and a made-up one would clip or blur: its cache stays BF16. */
static dtype mtp_kv_type(const weights *w, dtype kv_type) {
    return kv_type == DT_F8_E4M3 && !(w->mtp.layer.k_scale > 0) ? DT_BF16 : kv_type;
}

static int pages_of(const state_shape *s) { return s->pages > 0 ? s->pages : s->slots * kv_pages_for(s->capacity); }

bool state_open(seq_state *out, const net *n, const weights *w, const state_shape *shape, err *e) {
    const model_config *c = n->c;
    const dtype kv_type = shape->kv_type;
    const int slots = shape->slots + shape->spare, capacity = shape->capacity;
    *out = (seq_state){ .n = n, .slots = shape->slots, .capacity = capacity };
    out->kv = xcalloc((size_t)c->attn_layers, sizeof *out->kv);
    out->conv = xcalloc((size_t)c->gdn_layers, sizeof *out->conv);
    out->gdn = xcalloc((size_t)c->gdn_layers, sizeof *out->gdn);
    out->stage = xmalloc((size_t)STATE_ROPE_STEP * (size_t)c->rotary_dim * sizeof *out->stage);
    const int64_t rope = (int64_t)capacity * (c->rotary_dim / 2);
    bool ok = take(n, &out->cos, rope, e) && take(n, &out->sin, rope, e) &&
              kv_pages_open(&out->pages, n->o, slots, shape->slots, capacity, pages_of(shape), e);
    for (int i = 0; ok && i < c->layers; i++)
        if (c->layer[i] == LAYER_ATTN) ok = open_kv(out, &out->kv[n->layers[i].index], &w->layers[i], kv_type, e);
    for (int i = 0; ok && i < c->gdn_layers; i++) ok = open_gdn(n, &out->conv[i], &out->gdn[i], slots, out->slots, e);
    if (ok && n->has_mtp) ok = open_kv(out, &out->mtp_kv, &w->mtp.layer, mtp_kv_type(w, kv_type), e);
    if (!ok) state_close(out);
    return ok;
}

static void drop(const net *n, void *p) {
    if (p) n->o->mem_free(n->o, p);
}

void state_close(seq_state *s) {
    if (!s->n) return;
    const net *n = s->n;
    drop(n, s->cos);
    drop(n, s->sin);
    drop(n, s->mtp_kv.k);
    drop(n, s->mtp_kv.v);
    for (int i = 0; i < n->c->attn_layers; i++) {
        drop(n, s->kv[i].k);
        drop(n, s->kv[i].v);
    }
    for (int i = 0; i < n->c->gdn_layers; i++) {
        void *all[] = { s->conv[i].window, s->conv[i].pending,  s->gdn[i].state,     s->gdn[i].pend_k,
                        s->gdn[i].pend_v,  s->gdn[i].pend_beta, s->gdn[i].pend_decay };
        for (size_t k = 0; k < ARRAY_LEN(all); k++) drop(n, all[k]);
    }
    kv_pages_close(&s->pages);
    free(s->stage);
    free(s->kv);
    free(s->conv);
    free(s->gdn);
    *s = (seq_state){ 0 };
}

void state_reset_gdn(seq_state *s, int slot, int index) {
    ops *o = s->n->o;
    const ops_conv *w = &s->conv[index];
    const ops_gdn *g = &s->gdn[index];
    const int64_t window = (int64_t)(w->taps - 1) * w->channels;
    const int64_t heads = (int64_t)g->v_heads * g->k_dim * g->v_dim;
    o->fill_zero(o, w->window + slot * window, (size_t)window * sizeof(float));
    o->fill_zero(o, g->state + slot * heads, (size_t)heads * sizeof(float));
}

void state_reset(seq_state *s, int slot) {
    for (int i = 0; i < s->n->c->gdn_layers; i++) state_reset_gdn(s, slot, i);
    kv_pages_drop(&s->pages, slot);
}

static void copy_page(const net *n, const ops_kv *kv, int32_t dst, int32_t src) {
    const int64_t page = (int64_t)OPS_KV_PAGE * kv->kv_heads * kv->dim * dtype_bytes(kv->type);
    n->o->copy(n->o, (char *)kv->k + dst * page, (const char *)kv->k + src * page, (size_t)page);
    n->o->copy(n->o, (char *)kv->v + dst * page, (const char *)kv->v + src * page, (size_t)page);
}

/* Pages in which both the trunk and the draft layer are done. */
static int full_pages(const seq_state *s, int positions, int mtp_positions) {
    return (s->mtp_kv.k && mtp_positions < positions ? mtp_positions : positions) / OPS_KV_PAGE;
}

int state_copy_pages(const seq_state *s, int positions, int mtp_positions) {
    return kv_pages_for(positions) - full_pages(s, positions, mtp_positions);
}

static bool copy_pages(seq_state *s, int dst, int src, int positions, int mtp_positions) {
    kv_pages *p = &s->pages;
    const int full = full_pages(s, positions, mtp_positions);
    kv_pages_drop(p, dst);
    kv_pages_share(p, dst, src, full);
    if (!kv_pages_grow(p, dst, positions)) return kv_pages_drop(p, dst), false;
    for (int i = full; i < p->held[dst]; i++) {
        const int32_t to = kv_page(p, dst, i), from = kv_page(p, src, i);
        for (int k = 0; k < s->n->c->attn_layers; k++) copy_page(s->n, &s->kv[k], to, from);
        if (s->mtp_kv.k) copy_page(s->n, &s->mtp_kv, to, from);
    }
    return true;
}

static int64_t window_floats(const ops_conv *c) { return (int64_t)(c->taps - 1) * c->channels; }

static int64_t state_floats(const ops_gdn *g) { return (int64_t)g->v_heads * g->k_dim * g->v_dim; }

static size_t kv_row_bytes(const ops_kv *kv) {
    return (size_t)kv->kv_heads * (size_t)kv->dim * (size_t)dtype_bytes(kv->type);
}

void state_visit(const seq_state *s, int slot, int positions, void (*see)(void *ctx, void *device, size_t bytes),
                 void *ctx) {
    const model_config *c = s->n->c;
    for (int i = 0; i < c->gdn_layers; i++) {
        const int64_t window = window_floats(&s->conv[i]), state = state_floats(&s->gdn[i]);
        see(ctx, s->conv[i].window + slot * window, (size_t)window * sizeof(float));
        see(ctx, s->gdn[i].state + slot * state, (size_t)state * sizeof(float));
    }
    for (int k = 0; k < c->attn_layers + (s->mtp_kv.k != NULL); k++) {
        const ops_kv *kv = k < c->attn_layers ? &s->kv[k] : &s->mtp_kv;
        for (int p = 0; p < positions; p += OPS_KV_PAGE) {
            const int64_t at = kv_page(&s->pages, slot, p / OPS_KV_PAGE) * (int64_t)(OPS_KV_PAGE * kv_row_bytes(kv));
            const size_t bytes = (size_t)min_i64(OPS_KV_PAGE, positions - p) * kv_row_bytes(kv);
            see(ctx, (char *)kv->k + at, bytes);
            see(ctx, (char *)kv->v + at, bytes);
        }
    }
}

int64_t state_visit_bytes(const seq_state *s, int positions) {
    const model_config *c = s->n->c;
    int64_t bytes = 0;
    for (int i = 0; i < c->gdn_layers; i++)
        bytes += (window_floats(&s->conv[i]) + state_floats(&s->gdn[i])) * (int64_t)sizeof(float);
    for (int k = 0; k < c->attn_layers + (s->mtp_kv.k != NULL); k++)
        bytes += 2 * positions * (int64_t)kv_row_bytes(k < c->attn_layers ? &s->kv[k] : &s->mtp_kv);
    return bytes;
}

bool state_copy(seq_state *s, int dst, int src, int positions, int mtp_positions) {
    ops *o = s->n->o;
    if (!copy_pages(s, dst, src, positions, mtp_positions)) return false;
    for (int i = 0; i < s->n->c->gdn_layers; i++) {
        const ops_conv *w = &s->conv[i];
        const ops_gdn *g = &s->gdn[i];
        const int64_t window = window_floats(w), heads = state_floats(g);
        o->copy(o, w->window + dst * window, w->window + src * window, (size_t)window * sizeof(float));
        o->copy(o, g->state + dst * heads, g->state + src * heads, (size_t)heads * sizeof(float));
    }
    return true;
}

void state_commit(seq_state *s, int slot, int rows) {
    if (rows == 0) return;
    const net *n = s->n;
    const ops_span span = { .slot = slot, .commit = rows };
    for (int i = 0; i < n->c->layers; i++) {
        const net_layer *l = &n->layers[i];
        if (l->kind != LAYER_GDN) continue;
        ops_conv *c = &s->conv[l->index];
        ops_gdn *g = &s->gdn[l->index];
        /* No rows, so what stands for them is neither read nor written. */
        n->o->conv(n->o, c->pending, c->pending, l->conv, c, &span, 1);
        n->o->gdn(n->o, g->pend_v, g->pend_v, g->pend_beta, g->pend_beta, l->neg_a, l->dt_bias, g, &span, 1);
    }
}

/* Rows [first, first + rows) of the table. The angle is a float32 product, as transformers computes it: at 262k positions a
 * double product would differ by 5e-3. Its sine and cosine are rounded once (NUMERICS 1). */
static void fill_rope(seq_state *s, int first, int rows) {
    const model_config *c = s->n->c;
    const int half = c->rotary_dim / 2;
    const size_t bytes = (size_t)rows * (size_t)half * sizeof(float);
    float *cs = s->stage, *sn = s->stage + (int64_t)STATE_ROPE_STEP * half;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < half; i++) {
            const float angle = (float)(first + r) * c->inv_freq[i];
            float sine, cosine;
            num_sincos((double)angle, &sine, &cosine);
            cs[(int64_t)r * half + i] = cosine * c->rope_scaling;
            sn[(int64_t)r * half + i] = sine * c->rope_scaling;
        }
    s->n->o->upload(s->n->o, s->cos + (int64_t)first * half, cs, bytes);
    s->n->o->upload(s->n->o, s->sin + (int64_t)first * half, sn, bytes);
}

/* Grown in steps, so that a short run starts at once. */
void state_cover(seq_state *s, int upto) {
    while (s->rope_rows < upto && s->n->c->rotary_dim > 1) {
        const int left = s->capacity - s->rope_rows, rows = left < STATE_ROPE_STEP ? left : STATE_ROPE_STEP;
        CHECK(rows > 0, "position %d of %d", upto, s->capacity);
        fill_rope(s, s->rope_rows, rows);
        s->rope_rows += rows;
    }
}

int64_t state_page_bytes(const model_config *c, dtype kv_type, bool with_mtp) {
    return OPS_KV_PAGE * config_kv_bytes_per_token(c, dtype_bytes(kv_type), with_mtp);
}

int64_t state_bytes(const model_config *c, const state_shape *shape, bool with_mtp) {
    return (shape->slots + shape->spare) * config_state_bytes(c) +
           pages_of(shape) * state_page_bytes(c, shape->kv_type, with_mtp);
}
