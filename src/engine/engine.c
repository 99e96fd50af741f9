#include "engine/engine.h"

#include "base/file.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_CTX = 32768, DEFAULT_CHUNK = 512, HEAD_ROWS = 8, MOST_HEAD_ROWS = 64 };

static bool has_file(const char *dir, const char *name) {
    char *path = path_join(dir, name);
    const bool yes = file_exists(path);
    free(path);
    return yes;
}

static bool open_text(engine *g, const char *dir, bool need, err *e) {
    if ((need || has_file(dir, "tokenizer.json")) && !tokenizer_open(&g->tok, dir, e)) return false;
    if (!need && !has_file(dir, "chat_template.jinja") && !has_file(dir, "tokenizer_config.json")) return true;
    if (template_open(&g->tmpl, dir, e)) return true;
    /* A base model has no template; only what renders messages needs one, and says so itself. */
    if (strcmp(e->id, "E-TEMPLATE-MISSING") != 0) return false;
    *e = (err){ 0 };
    return true;
}

static bool open_model(engine *g, const char *dir, const engine_options *opt, err *e) {
    if (!ckpt_open(&g->files, dir, e)) return false;
    if (!config_read(&g->config, g->files.config, g->files.generation, g->files.dir, e)) return false;
    if (!weights_bind(&g->w, &g->files, &g->config, e)) return false;
    if (opt->edit) opt->edit(opt->edit_ctx, &g->w);
    if (!opt->no_text && !open_text(g, g->files.dir, opt->need_text, e)) return false;
    return ops_open(&g->o, &opt->ops, e);
}

/* Pages and spare slots from bytes. */
static bool shape_memory(state_shape *s, int *prefix_pages, const engine *g, const engine_options *opt, err *e) {
    const int64_t page = state_page_bytes(&g->config, s->kv_type, g->w.mtp.present), most = INT32_MAX / 2;
    const int64_t full = (int64_t)s->slots * kv_pages_for(s->capacity);
    const int64_t asked = opt->kv_bytes > 0 ? min_i64(opt->kv_bytes / max_i64(page, 1), full) : full;
    if (asked < kv_pages_for(s->capacity))
        return fail(e, ERR_USAGE, "E-ENGINE-CTX",
                    "%.2f GB of KV hold %lld positions, a context has %d (give more, or lower --ctx)",
                    (double)opt->kv_bytes / 1e9, (long long)asked * OPS_KV_PAGE, s->capacity);
    const int64_t spare = min_i64(opt->prefix_state_bytes / max_i64(config_state_bytes(&g->config), 1), most);
    *prefix_pages = spare > 0 ? (int)min_i64(opt->prefix_kv_bytes / max_i64(page, 1), most) : 0;
    s->spare = *prefix_pages > 0 ? (int)spare : 0;
    if (s->spare == 0) *prefix_pages = 0;
    if (s->spare == 0 && opt->prefix_state_bytes > 0)
        log_say("W-PREFIX-SMALL",
                "prefix cache: %.3f GB for states and %.3f for KV, but one takes %.3f and %.3f: nothing is kept",
                (double)opt->prefix_state_bytes / 1e9, (double)opt->prefix_kv_bytes / 1e9,
                (double)config_state_bytes(&g->config) / 1e9, (double)page / 1e9);
    s->pages = (int)min_i64(asked + *prefix_pages, INT32_MAX);
    return true;
}

/* An expert whose logit is NaN is chosen last: a bad row of a router would never show in a hidden state. */
static bool routers_finite(const weights *w, const model_config *c, err *e) {
    for (int i = 0; i <= c->layers; i++) {
        const wmat *r = i < c->layers ? &w->layers[i].ffn.router : &w->mtp.layer.ffn.router;
        if (r->data && r->q.format == WF_PLAIN && !wmat_finite(r, r->rows))
            return fail(
                e, ERR_INPUT, "E-ENGINE-ROUTER",
                "%s: NaN or Inf (experts would be left out silently; `nibble inspect --scan` finds the element)",
                r->name);
    }
    return true;
}

/* The layers named in cpu_experts exist. */
static bool experts_placed(const engine *g, const layer_set *s, err *e) {
    const int layers = g->config.layers + g->w.mtp.present;
    if (layer_set_empty(s) || (g->config.experts > 0 && s->top <= layers)) return true;
    if (g->config.experts == 0)
        return fail(e, ERR_USAGE, "E-ENGINE-EXPERTS", "--experts cpu: the model has no routed experts (leave it out)");
    return fail(e, ERR_USAGE, "E-ENGINE-EXPERTS", "--experts cpu: layer %d, but the model has layers 0 to %d%s",
                s->top - 1, layers - 1, g->w.mtp.present ? " (the last is the draft layer)" : "");
}

static bool open_state(engine *g, const engine_options *opt, err *e) {
    const model_config *c = &g->config;
    if (!experts_placed(g, &opt->ops.cpu_experts, e)) return false;
    const int limit = c->max_position, want = opt->ctx > 0 ? opt->ctx : DEFAULT_CTX,
              slots = opt->slots > 0 ? opt->slots : 1;
    if (opt->ctx > limit)
        return fail(e, ERR_USAGE, "E-ENGINE-CTX", "--ctx %d: the model's limit is %d positions", opt->ctx, limit);
    static const dtype types[] = { [KV_CACHE_F32] = DT_F32, [KV_CACHE_BF16] = DT_BF16, [KV_CACHE_FP8] = DT_F8_E4M3 };
    g->kv_type = opt->kv != KV_CACHE_AUTO ? types[opt->kv] : g->w.kv_fp8 ? DT_F8_E4M3 : DT_F32;
    if (g->kv_type == DT_F8_E4M3 && !g->w.kv_fp8)
        log_say("W-KV-NO-SCALES", "%s: --kv fp8, but the checkpoint declares no FP8 cache: every scale is 1.0",
                g->files.dir);
    g->act = opt->act;
    g->chunk = opt->chunk > 0 ? opt->chunk : g->o->prompt_rows > 0 ? g->o->prompt_rows : DEFAULT_CHUNK;
    /* A pass of many sequences: a row of each besides a chunk of a prompt; the head, which is read once per call, takes a
     * few verified rows of each. */
    const int rows = (g->chunk > OPS_MAX_PENDING + 1 ? g->chunk : OPS_MAX_PENDING + 1) + (slots > 1 ? slots : 0);
    const int head_rows = (int)min_i64(max_i64(HEAD_ROWS, 3 * (int64_t)slots), MOST_HEAD_ROWS);
    state_shape shape = { .slots = slots, .capacity = want < limit ? want : limit, .kv_type = g->kv_type };
    int prefix_pages = 0;
    if (!shape_memory(&shape, &prefix_pages, g, opt, e)) return false;
    memory_plan_make(&g->plan, c, &g->w, &opt->heads, &shape, prefix_pages, rows, head_rows);
    if (g->o->memory_available) {
        /* What CUDA calls free leaves out the page cache, which a machine with one memory gives back. */
        const int64_t left = g->o->shared_memory ? memory_available() : g->o->memory_available(g->o);
        if (g->o->work_bytes) {
            const int64_t more = g->o->work_bytes(g->o, c->vocab, c->head_dim, shape.capacity);
            g->plan.work_bytes += more;
            g->plan.total_bytes += more;
        }
        memory_plan_device(&g->plan, c, &g->w, &opt->ops.cpu_experts, rows, left, g->o->shared_memory);
    }
    if (!memory_plan_check(&g->plan, opt->memory_bytes, e)) return false;
    if (!opt->any_values && !routers_finite(&g->w, c, e)) return false;
    if (!net_open(&g->n, g->o, c, &g->w, g->tok ? tokenizer_vocab(g->tok) : 0, opt->act, &opt->heads,
                  &opt->ops.cpu_experts, e))
        return false;
    if (!sampler_open(&g->sm, g->n.real_vocab, opt->ops.isa, e)) return false;
    if (!state_open(&g->st, &g->n, &g->w, &shape, e)) return false;
    if (!scratch_open(&g->sc, &g->n, rows, head_rows, e)) return false;
    g->host_logits = xmalloc((size_t)head_rows * (size_t)g->n.real_vocab * sizeof(float));
    g->slot_used = xcalloc((size_t)slots, 1);
    g->pages_left = shape.pages;
    g->prefix_pages = prefix_pages;
    return true;
}

bool engine_open(engine **out, const char *dir, const engine_options *opt, err *e) {
    engine *g = xcalloc(1, sizeof *g);
    if (open_model(g, dir, opt, e) && open_state(g, opt, e)) return *out = g, true;
    engine_close(g);
    *out = NULL;
    return false;
}

bool engine_open_weights(engine **out, const char *name, weights *w, const model_config *c, const engine_options *opt,
                         err *e) {
    engine *g = xcalloc(1, sizeof *g);
    g->w = *w;
    g->config = *c;
    *w = (weights){ 0 };
    g->files.dir = xmalloc(strlen(name) + 1);
    strcpy(g->files.dir, name);
    if (ops_open(&g->o, &opt->ops, e) && open_state(g, opt, e)) return *out = g, true;
    engine_close(g);
    *out = NULL;
    return false;
}

void engine_close(engine *g) {
    if (!g) return;
    scratch_close(&g->sc);
    state_close(&g->st);
    net_close(&g->n);
    if (g->o) g->o->close(g->o);
    template_close(g->tmpl);
    tokenizer_close(g->tok);
    weights_free(&g->w);
    ckpt_close(&g->files);
    sampler_close(&g->sm);
    free(g->host_logits);
    free(g->masks);
    free(g->asked);
    free(g->slot_used);
    free(g);
}

bool engine_check_prompt(const engine *g, const int32_t *ids, int n, err *e) {
    if (n <= 0) return fail(e, ERR_INPUT, "E-ENGINE-EMPTY", "prompt: no tokens");
    if (n >= g->st.capacity)
        return fail(e, ERR_INPUT, "E-ENGINE-CONTEXT",
                    "prompt: %d tokens do not fit a context of %d with room for an answer "
                    "(raise --ctx, or shorten it)",
                    n, g->st.capacity);
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= g->config.vocab)
            return fail(e, ERR_INPUT, "E-ENGINE-TOKEN", "prompt: id %d at position %d is outside the vocabulary of %d",
                        ids[i], i, g->config.vocab);
    return true;
}

/* ---- sessions ---- */

bool session_open(session *s, engine *g, bool drafting, err *e) {
    *s = (session){ .g = g, .drafting = drafting && g->n.has_mtp };
    while (s->slot < g->st.slots && g->slot_used[s->slot]) s->slot++;
    if (s->slot == g->st.slots)
        return fail(e, ERR_MACHINE, "E-ENGINE-SLOTS", "all %d sequences are in use (raise --max-seqs)", g->st.slots);
    if (g->pages_left < g->st.pages.slot_pages)
        return fail(e, ERR_MACHINE, "E-ENGINE-SLOTS", "all KV memory is in use (raise --max-seqs)");
    void *keep = NULL;
    if (g->n.heads.draft && !id_set_open(&s->own, DRAFT_HEAD_OWN))
        return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "session: no memory");
    if (!g->o->mem_new(g->o, &keep, (size_t)OPS_MAX_PENDING * (size_t)g->config.hidden * sizeof(float), e)) {
        id_set_close(&s->own);
        return false;
    }
    s->keep = keep;
    s->cap = g->st.capacity + 1;
    s->tokens = xmalloc((size_t)s->cap * sizeof *s->tokens);
    g->slot_used[s->slot] = 1;
    g->pages_left -= g->st.pages.slot_pages;
    session_reset(s);
    return true;
}

void session_close(session *s) {
    if (!s->g || !s->tokens) return;
    s->g->o->mem_free(s->g->o, s->keep);
    s->g->slot_used[s->slot] = 0;
    kv_pages_drop(&s->g->st.pages, s->slot);
    s->g->pages_left += s->g->st.pages.slot_pages;
    free(s->tokens);
    history_close(&s->seen);
    id_set_close(&s->own);
    *s = (session){ 0 };
}

void session_reset(session *s) {
    state_reset(&s->g->st, s->slot);
    s->n_tokens = s->done = s->pending = s->mtp_done = s->kept = 0;
    s->own.n = 0;
}

bool session_set(session *s, const int32_t *prompt, int n, err *e) {
    if (!engine_check_prompt(s->g, prompt, n, e)) return false;
    /* At least one token must be left to process: its hidden state yields the first new token. */
    if (s->done >= n || memcmp(s->tokens, prompt, (size_t)s->done * sizeof *prompt) != 0) session_reset(s);
    memcpy(s->tokens, prompt, (size_t)n * sizeof *prompt);
    s->n_tokens = n;
    heads_note(&s->g->n.heads, &s->own, prompt, n);
    /* The newest draft slot was made with a token that this prompt may not continue with. */
    if (s->mtp_done > s->done - 1) s->mtp_done = s->done > 0 ? s->done - 1 : 0;
    return true;
}
