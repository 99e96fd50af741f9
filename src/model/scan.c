#include "model/scan.h"

#include <stdlib.h>
#include <string.h>

static bool is_float(dtype t) {
    return t == DT_F32 || t == DT_F64 || t == DT_F16 || t == DT_BF16 || t == DT_F8_E4M3 || t == DT_F8_E5M2;
}

/* One element, as its bits: an exponent of all ones is Inf or NaN; E4M3 has only the NaN S.1111.111. */
static bool nonfinite(const uint8_t *p, dtype t) {
    uint16_t h;
    uint32_t w;
    uint64_t d;
    switch (t) {
    case DT_F8_E4M3: return (*p & 0x7f) == 0x7f;
    case DT_F8_E5M2: return (*p & 0x7c) == 0x7c;
    case DT_BF16: return memcpy(&h, p, 2), (h & 0x7f80) == 0x7f80;
    case DT_F16: return memcpy(&h, p, 2), (h & 0x7c00) == 0x7c00;
    case DT_F32: return memcpy(&w, p, 4), (w & 0x7f800000u) == 0x7f800000u;
    case DT_F64: return memcpy(&d, p, 8), (d & 0x7ff0000000000000u) == 0x7ff0000000000000u;
    default: return false;
    }
}

/* Does any of the eight bytes' elements have all its marked bits set? Adding the lowest marked bit carries into the
 * bit above the marked run exactly then; the sign (or payload) bits are masked away first. */
static bool any_in_word(uint64_t x, dtype t) {
    switch (t) {
    case DT_F8_E4M3: return ((x & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u) & 0x8080808080808080u;
    case DT_F8_E5M2: return ((x & 0x7c7c7c7c7c7c7c7cu) + 0x0404040404040404u) & 0x8080808080808080u;
    case DT_BF16: return ((x & 0x7f807f807f807f80u) + 0x0080008000800080u) & 0x8000800080008000u;
    case DT_F16: return ((x & 0x7c007c007c007c00u) + 0x0400040004000400u) & 0x8000800080008000u;
    case DT_F32: return ((x & 0x7f8000007f800000u) + 0x0080000000800000u) & 0x8000000080000000u;
    default: return ((x & 0x7ff0000000000000u) + 0x0010000000000000u) & 0x8000000000000000u;
    }
}

int64_t scan_elements(const uint8_t *p, dtype t, int64_t n, int64_t *first) {
    if (!is_float(t)) return 0;
    const int size = dtype_bytes(t), per_word = 8 / size;
    int64_t found = 0, i = 0;
    while (i < n) {
        uint64_t x;
        if (n - i >= per_word) {
            memcpy(&x, p + i * size, 8);
            if (LIKELY(!any_in_word(x, t))) {
                i += per_word;
                continue;
            }
        }
        const int64_t end = n - i >= per_word ? i + per_word : n;
        for (; i < end; i++)
            if (nonfinite(p + i * size, t) && !found++) *first = i;
    }
    return found;
}

/* Each thread takes one stretch of the concatenation of all floating-point tensors. */
typedef struct part {
    scan_finding *found;
    int n, cap;
} part;

typedef struct job {
    const ckpt *c;
    uint64_t bytes;
    part *parts;
} job;

static void add(part *p, const st_tensor *t, int64_t n, int64_t first) {
    if (p->n == p->cap) {
        p->cap = p->cap ? 2 * p->cap : 16;
        p->found = xrealloc(p->found, (size_t)p->cap * sizeof *p->found);
    }
    p->found[p->n++] = (scan_finding){ t, n, first };
}

static void scan_part(void *ctx, int thread, int threads) {
    job *j = ctx;
    int64_t begin, end, at = 0;
    pool_share((int64_t)j->bytes, 4096, thread, threads, &begin, &end);
    for (int s = 0; s < j->c->shard_count; s++)
        for (int i = 0; i < j->c->shards[s].count; i++) {
            const st_tensor *t = &j->c->shards[s].tensors[i];
            if (!is_float(t->type)) continue;
            const int64_t size = dtype_bytes(t->type), n = (int64_t)t->elems, off = at;
            at += n * size;
            if (off >= end || at <= begin) continue;
            /* Elements that start inside the stretch. */
            const int64_t from = begin > off ? (begin - off + size - 1) / size : 0,
                          to = end < at ? (end - off + size - 1) / size : n;
            int64_t first = 0;
            const int64_t bad = scan_elements(t->data + from * size, t->type, to - from, &first);
            if (bad) add(&j->parts[thread], t, bad, from + first);
        }
}

void scan_checkpoint(scan_result *out, const ckpt *c, pool *p) {
    *out = (scan_result){ 0 };
    for (int s = 0; s < c->shard_count; s++)
        for (int i = 0; i < c->shards[s].count; i++)
            if (is_float(c->shards[s].tensors[i].type)) out->tensors++, out->bytes += c->shards[s].tensors[i].bytes;
    const int threads = p ? pool_threads(p) : 1;
    job j = { c, out->bytes, xcalloc((size_t)threads, sizeof *j.parts) };
    if (p)
        pool_run(p, scan_part, &j);
    else
        scan_part(&j, 0, 1);
    part all = { 0 };
    for (int k = 0; k < threads; k++) {
        for (int i = 0; i < j.parts[k].n; i++) {
            const scan_finding *f = &j.parts[k].found[i];
            if (all.n && all.found[all.n - 1].tensor == f->tensor)
                all.found[all.n - 1].count += f->count; /* a tensor that two stretches share */
            else
                add(&all, f->tensor, f->count, f->first);
            out->count += f->count;
        }
        free(j.parts[k].found);
    }
    free(j.parts);
    out->found = all.found;
    out->n = all.n;
}

void scan_free(scan_result *r) {
    free(r->found);
    *r = (scan_result){ 0 };
}
