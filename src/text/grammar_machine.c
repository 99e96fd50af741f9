/* The machine: all readings of a text at once, as configurations that are stored once and numbered. */
#include <stdlib.h>

#include "text/grammar_impl.h"

enum { BOTTOM = UINT32_MAX, SET_TABLE = 1 << 15, CONFIG_TABLE = 1 << 13, WORK_MAX = 1 << 14 };

static void *grown(void *p, uint32_t *cap, uint32_t need, size_t size) {
    if (need <= *cap) return p;
    while (*cap < need) *cap = *cap ? *cap * 2 : 256;
    return xrealloc(p, (size_t)*cap * size);
}

static uint32_t mix(uint32_t h, uint32_t x) {
    h = (h ^ x) * 0x9e3779b1u;
    return h ^ h >> 15;
}

/* ---- stack sets ---- */

static uint32_t set_of(machine *m, const stack_frame *f, uint32_t n) {
    uint32_t h = n, depth = 0;
    for (uint32_t i = 0; i < n; i++) h = mix(mix(mix(h, f[i].state), f[i].count_lo), f[i].below);
    uint32_t *head = &m->set_table[h % SET_TABLE];
    for (uint32_t s = *head; s; s = m->sets[s].next)
        if (m->sets[s].n == n && memcmp(m->frames + m->sets[s].first, f, n * sizeof *f) == 0) return s;
    for (uint32_t i = 0; i < n; i++)
        if (f[i].state != BOTTOM && m->sets[f[i].below].depth + 1 > depth) depth = m->sets[f[i].below].depth + 1;
    m->frames = grown(m->frames, &m->cap_frames, m->n_frames + n, sizeof *m->frames);
    m->sets = grown(m->sets, &m->cap_sets, m->n_sets + 1, sizeof *m->sets);
    memcpy(m->frames + m->n_frames, f, n * sizeof *f);
    m->sets[m->n_sets] = (stack_set){ .first = m->n_frames, .n = n, .depth = depth, .next = *head };
    m->n_frames += n;
    return *head = m->n_sets++;
}

static int frame_cmp(const stack_frame *a, const stack_frame *b) {
    if (a->state != b->state) return a->state < b->state ? -1 : 1;
    return a->count_lo < b->count_lo ? -1 : a->count_lo > b->count_lo;
}

static uint32_t set_union(machine *m, uint32_t a, uint32_t b) {
    if (a == b) return a;
    if (a > b) {
        const uint32_t t = a;
        a = b, b = t;
    }
    const uint32_t slot = mix(a, b) % ARRAY_LEN(m->memo[0]);
    if (m->memo[0][slot] == a && m->memo[1][slot] == b) return m->memo[2][slot];
    uint32_t i = 0, k = 0, n = 0;
    const uint32_t na = m->sets[a].n, nb = m->sets[b].n;
    stack_frame *f = xmalloc((size_t)(na + nb) * sizeof *f);
    while (i < na || k < nb) { /* the arrays may move while sets are made */
        const stack_frame *x = m->frames + m->sets[a].first + i, *y = m->frames + m->sets[b].first + k;
        const int c = i == na ? 1 : k == nb ? -1 : frame_cmp(x, y);
        f[n] = c <= 0 ? *x : *y;
        if (c == 0 && x->below != y->below) f[n].below = set_union(m, x->below, y->below);
        i += c <= 0;
        k += c >= 0;
        n++;
    }
    const uint32_t s = set_of(m, f, n);
    free(f);
    m->memo[0][slot] = a, m->memo[1][slot] = b, m->memo[2][slot] = s;
    return s;
}

/* ---- closures ---- */

/* An item to be followed; one that is there already takes the new stacks in. */
static void add(machine *m, uint32_t state, uint32_t count, uint32_t stack) {
    const uint32_t need = m->g->states[state].need;
    if (m->sets[stack].depth + need > GRAMMAR_MAX_FRAMES) return;
    for (uint32_t i = 0; i < m->n_work; i++)
        if (m->work[i].state == state && m->work[i].count == count) {
            const uint32_t all = set_union(m, m->work[i].stack, stack);
            if (all == m->work[i].stack) return;
            /* followed once more, with all stacks, at the end of the list */
            memmove(m->work + i, m->work + i + 1, (m->n_work - i - 1) * sizeof *m->work);
            m->work[m->n_work - 1] = (machine_item){ state, count, all };
            m->at -= i <= m->at; /* may wrap below 0: the loop adds one */
            return;
        }
    if (m->n_work == WORK_MAX) {
        m->overflow = true;
        return;
    }
    m->work = grown(m->work, &m->cap_work, m->n_work + 1, sizeof *m->work);
    m->work[m->n_work++] = (machine_item){ state, count, stack };
}

static void call(machine *m, const grammar_edge *x, machine_item it) {
    const grammar_state *back = &m->g->states[x->to];
    const uint32_t start = m->g->rules[x->rule].start;
    if (back->final && !back->first) {
        add(m, start, 0, it.stack);
        return;
    }
    if (m->sets[it.stack].depth + back->need > GRAMMAR_MAX_FRAMES ||
        m->sets[it.stack].depth + 1 + m->g->states[start].need > GRAMMAR_MAX_FRAMES)
        return;
    add(m, start, 0, set_of(m, &(stack_frame){ x->to, it.count, it.stack }, 1));
}

static void follow(machine *m, machine_item it) {
    const grammar *g = m->g;
    const grammar_state *q = &g->states[it.state];
    const grammar_rule *r = &g->rules[q->rule];
    if (q->final)
        for (uint32_t i = 0; i < m->sets[it.stack].n; i++) {
            const stack_frame f = m->frames[m->sets[it.stack].first + i];
            if (f.state == BOTTOM)
                m->accept = true;
            else
                add(m, f.state, f.count_lo, f.below);
        }
    for (uint32_t k = q->first; k; k = g->edges[k].next) {
        const grammar_edge *x = &g->edges[k];
        switch ((edge_kind)x->kind) {
        case EDGE_BYTE: break;
        case EDGE_EPS: add(m, x->to, it.count, it.stack); break;
        case EDGE_INC:
            if (r->max < 0)
                add(m, x->to, it.count < r->min ? it.count + 1 : it.count, it.stack);
            else if (it.count < r->max)
                add(m, x->to, it.count + 1, it.stack);
            break;
        case EDGE_EXIT:
            if (it.count >= r->min) add(m, x->to, 0, it.stack);
            break;
        case EDGE_CALL: call(m, x, it); break;
        }
    }
}

static int item_cmp(const void *pa, const void *pb) {
    const machine_item *a = pa, *b = pb;
    if (a->state != b->state) return a->state < b->state ? -1 : 1;
    if (a->count != b->count) return a->count < b->count ? -1 : 1;
    return a->stack < b->stack ? -1 : a->stack > b->stack;
}

static bool reads(const grammar *g, uint32_t state) {
    for (uint32_t k = g->states[state].first; k; k = g->edges[k].next)
        if (g->edges[k].kind == EDGE_BYTE) return true;
    return false;
}

static uint32_t config_of(machine *m, const machine_item *v, uint32_t n, bool accept) {
    if (n == 0 && !accept) return MACHINE_DEAD;
    uint32_t h = n + accept;
    for (uint32_t i = 0; i < n; i++) h = mix(mix(mix(h, v[i].state), v[i].count), v[i].stack);
    uint32_t *head = &m->config_table[h % CONFIG_TABLE];
    for (uint32_t c = *head; c; c = m->configs[c].next)
        if (m->configs[c].n == n && m->configs[c].accept == accept &&
            (n == 0 || (m->items && memcmp(m->items + m->configs[c].first, v, n * sizeof *v) == 0)))
            return c;
    m->items = grown(m->items, &m->cap_items, m->n_items + n, sizeof *m->items);
    m->configs = grown(m->configs, &m->cap_configs, m->n_configs + 1, sizeof *m->configs);
    if (n) memcpy(m->items + m->n_items, v, n * sizeof *v);
    m->configs[m->n_configs] = (machine_config){ m->n_items, n, *head, accept, -1, NULL };
    m->n_items += n;
    return *head = m->n_configs++;
}

/* What m->work leads to without reading. */
static uint32_t close_work(machine *m) {
    m->accept = false;
    for (m->at = 0; m->at < m->n_work; m->at++) follow(m, m->work[m->at]);
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_work; i++)
        if (reads(m->g, m->work[i].state)) m->work[n++] = m->work[i];
    if (n) qsort(m->work, n, sizeof *m->work, item_cmp);
    const uint32_t c = config_of(m, m->work, n, m->accept);
    m->n_work = 0;
    return c;
}

uint32_t machine_step_slow(machine *m, uint32_t config, uint8_t byte) {
    const grammar *g = m->g;
    if (config == MACHINE_DEAD) return MACHINE_DEAD;
    if (m->n_configs >= 4 * MACHINE_CONFIGS || m->n_sets >= 4 * MACHINE_SETS) return m->overflow = true, MACHINE_DEAD;
    m->n_work = 0;
    for (uint32_t i = 0; i < m->configs[config].n; i++) {
        const machine_item it = m->items[m->configs[config].first + i];
        for (uint32_t k = g->states[it.state].first; k; k = g->edges[k].next) {
            const grammar_edge *x = &g->edges[k];
            if (x->kind == EDGE_BYTE && byte >= x->lo && byte <= x->hi) add(m, x->to, it.count, it.stack);
        }
    }
    const uint32_t to = close_work(m);
    machine_config *c = &m->configs[config];
    if (!c->row) {
        c->row = xmalloc((size_t)g->classes * sizeof *c->row);
        memset(c->row, 0xff, (size_t)g->classes * sizeof *c->row);
    }
    return c->row[g->class_of[byte]] = to;
}

uint32_t machine_without_plain(machine *m, uint32_t c) {
    m->n_work = 0;
    for (uint32_t i = 0; i < m->configs[c].n; i++) {
        const machine_item it = m->items[m->configs[c].first + i];
        if (m->g->states[it.state].plain) continue;
        m->work = grown(m->work, &m->cap_work, m->n_work + 1, sizeof *m->work);
        m->work[m->n_work++] = it;
    }
    const uint32_t n = m->n_work;
    m->n_work = 0;
    return config_of(m, m->work, n, false);
}

/* ---- life ---- */

static void open_tables(machine *m) {
    m->set_table = xcalloc(SET_TABLE, sizeof *m->set_table);
    m->config_table = xcalloc(CONFIG_TABLE, sizeof *m->config_table);
    m->sets = grown(m->sets, &m->cap_sets, 1, sizeof *m->sets);
    m->configs = grown(m->configs, &m->cap_configs, 1, sizeof *m->configs);
    m->sets[0] = (stack_set){ 0 };
    m->configs[0] = (machine_config){ .mask = -1 };
    m->n_sets = m->n_configs = 1;
}

void machine_open(machine *m, const grammar *g) {
    *m = (machine){ .g = g };
    open_tables(m);
    add(m, g->rules[g->top].start, 0, set_of(m, &(stack_frame){ BOTTOM, 0, 0 }, 1));
    m->start = close_work(m);
}

void machine_close(machine *m) {
    for (uint32_t i = 0; i < m->n_configs; i++) free(m->configs[i].row);
    void *own[] = { m->frames, m->sets, m->items, m->work, m->configs, m->set_table, m->config_table };
    for (size_t i = 0; i < ARRAY_LEN(own); i++) free(own[i]);
    *m = (machine){ 0 };
}

bool machine_is_full(const machine *m) { return m->n_configs > MACHINE_CONFIGS || m->n_sets > MACHINE_SETS; }

static uint32_t copy_set(machine *to, const machine *from, uint32_t s, uint32_t *map) {
    if (map[s]) return map[s];
    const stack_set *x = &from->sets[s];
    stack_frame *f = xmalloc(x->n * sizeof *f);
    for (uint32_t i = 0; i < x->n; i++) {
        f[i] = from->frames[x->first + i];
        if (f[i].state != BOTTOM) f[i].below = copy_set(to, from, f[i].below, map);
    }
    map[s] = set_of(to, f, x->n);
    free(f);
    return map[s];
}

static uint32_t copy_config(machine *to, const machine *from, uint32_t c, uint32_t *map) {
    const machine_config *x = &from->configs[c];
    machine_item *v = xmalloc((x->n + 1) * sizeof *v);
    for (uint32_t i = 0; i < x->n; i++) {
        v[i] = from->items[x->first + i];
        v[i].stack = copy_set(to, from, v[i].stack, map);
    }
    qsort(v, x->n, sizeof *v, item_cmp);
    const uint32_t id = config_of(to, v, x->n, x->accept);
    free(v);
    return id;
}

void machine_compact(machine *m, uint32_t *keep, int n) {
    machine to = { .g = m->g };
    open_tables(&to);
    uint32_t *map = xcalloc(m->n_sets, sizeof *map);
    for (int i = 0; i < n; i++) keep[i] = copy_config(&to, m, keep[i], map);
    to.start = copy_config(&to, m, m->start, map);
    free(map);
    machine_close(m);
    *m = to;
}
