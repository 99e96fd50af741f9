#include <stdio.h>
#include <stdlib.h>

#include "base/json.h"
#include "quant/plan.h"

enum { MAX_SHARDS = 10000 }; /* as ckpt/index.c reads */

/* Inside a file safetensors orders by dtype, widest first, then by name. */
static int type_rank(dtype t) {
    static const dtype order[] = { DT_U64, DT_I64, DT_F64,     DT_F32,     DT_U32, DT_I32, DT_BF16, DT_F16,
                                   DT_U16, DT_I16, DT_F8_E4M3, DT_F8_E5M2, DT_I8,  DT_U8,  DT_BOOL };
    for (size_t i = 0; i < ARRAY_LEN(order); i++)
        if (order[i] == t) return (int)i;
    return (int)ARRAY_LEN(order);
}

static int in_file_order(const void *pa, const void *pb) {
    const qtensor *a = *(qtensor *const *)pa, *b = *(qtensor *const *)pb;
    if (a->shard != b->shard) return a->shard - b->shard;
    const int d = type_rank(a->type) - type_rank(b->type);
    return d ? d : str_cmp(a->name, b->name);
}

/* transformers counts the parameters of its own class as stored (a packed byte once): no scales, no draft head. */
static bool is_parameter(const qtensor *t) {
    return (t->part == QP_COPY || t->part == QP_SLICE || t->part == QP_WEIGHT) && !str_starts(t->name, STR("mtp."));
}

/* Greedy in state-dict order, as huggingface_hub splits; returns the number of shards. */
static int assign_shards(plan *p, uint64_t limit) {
    int shard = 0;
    uint64_t used = 0;
    for (int i = 0; i < p->n_tensors; i++) {
        qtensor *t = &p->tensors[i];
        if (used > 0 && used + t->bytes > limit) {
            shard++;
            used = 0;
        }
        t->shard = shard;
        used += t->bytes;
        p->total_bytes += t->bytes;
        if (is_parameter(t)) p->total_elems += t->bytes / (uint64_t)dtype_bytes(t->type);
    }
    return shard + 1;
}

static void finish_shard(plan *p, int s, buf *header, uint64_t data_bytes) {
    buf_byte(header, '}');
    while (header->n % 8) buf_byte(header, ' ');
    char name[64];
    if (p->n_shards == 1)
        snprintf(name, sizeof name, "%s", p->head_file ? p->head_file : "model.safetensors");
    else
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", s + 1, p->n_shards);
    const char *text = arena_copy(&p->mem, header->p, header->n);
    const str file = arena_str(&p->mem, str_of(name));
    CHECK(text && file.p, "out of memory");
    p->shards[s] = (qshard){ file, data_bytes, header->n + 8, text };
}

bool plan_layout(plan *p, uint64_t shard_bytes, err *e) {
    if (shard_bytes == 0) return fail(e, ERR_USAGE, "E-USAGE", "--shard-size: must be positive");
    p->n_shards = assign_shards(p, shard_bytes);
    if (p->n_shards > MAX_SHARDS)
        return fail(e, ERR_USAGE, "E-QUANT-SHARDS",
                    "--shard-size %llu makes %d shards, loaders take at most %d (a larger one)",
                    (unsigned long long)shard_bytes, p->n_shards, MAX_SHARDS);
    p->shards = xcalloc((size_t)p->n_shards, sizeof *p->shards);
    qtensor **sorted = xmalloc((size_t)p->n_tensors * sizeof *sorted);
    for (int i = 0; i < p->n_tensors; i++) sorted[i] = &p->tensors[i];
    qsort(sorted, (size_t)p->n_tensors, sizeof *sorted, in_file_order);
    buf header = { 0 };
    for (int i = 0; i < p->n_tensors;) {
        const int s = sorted[i]->shard;
        uint64_t offset = 0;
        buf_clear(&header);
        buf_puts(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
        for (; i < p->n_tensors && sorted[i]->shard == s; i++) {
            qtensor *t = sorted[i];
            t->offset = offset;
            offset = st_header_entry(&header, t->name, t->type, t->rank, t->shape, offset, t->bytes);
        }
        finish_shard(p, s, &header, offset);
    }
    buf_free(&header);
    free(sorted);
    return true;
}

static int by_name(const void *a, const void *b) {
    return str_cmp(((const index_entry *)a)->name, ((const index_entry *)b)->name);
}

void plan_index_text(buf *out, const json *metadata, uint64_t parameters, uint64_t bytes, index_entry *v, int n) {
    if (n) qsort(v, (size_t)n, sizeof *v, by_name);
    buf_printf(out, "{\n  \"metadata\": {\n    \"total_parameters\": %llu,\n    \"total_size\": %llu",
               (unsigned long long)parameters, (unsigned long long)bytes);
    for (uint32_t i = 0; metadata && i < metadata->n; i++) {
        const json_member *m = &metadata->u.members[i];
        if (str_is(m->key, "total_parameters") || str_is(m->key, "total_size")) continue;
        buf_puts(out, ",\n    ");
        json_write_str(out, m->key);
        buf_puts(out, ": ");
        json_write(out, &m->value);
    }
    buf_puts(out, "\n  },\n  \"weight_map\": {\n");
    for (int i = 0; i < n; i++) {
        buf_puts(out, "    ");
        json_write_str(out, v[i].name);
        buf_printf(out, ": \"%s\"%s\n", v[i].file, i + 1 < n ? "," : "");
    }
    buf_puts(out, "  }\n}\n");
}

const char *plan_index_json(plan *p, size_t *n) {
    if (p->n_shards == 1) return NULL;
    buf b = { 0 };
    index_entry *v = xmalloc((size_t)p->n_tensors * sizeof *v);
    for (int i = 0; i < p->n_tensors; i++)
        v[i] = (index_entry){ p->tensors[i].name, p->shards[p->tensors[i].shard].file.p };
    plan_index_text(&b, NULL, p->total_elems, p->total_bytes, v, p->n_tensors);
    free(v);
    const char *text = arena_copy(&p->mem, b.p, b.n);
    CHECK(text, "out of memory");
    *n = b.n;
    buf_free(&b);
    return text;
}

bool plan_needs_amax(const plan *p) {
    for (int i = 0; i < p->n_tensors; i++) {
        const qpart part = p->tensors[i].part;
        if (part == QP_INPUT_SCALE || part == QP_K_SCALE || part == QP_V_SCALE) return true;
    }
    return false;
}
