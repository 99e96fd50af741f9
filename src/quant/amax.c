#include "quant/amax.h"

#include <math.h>
#include <stdlib.h>

#include "ckpt/safetensors.h"
#include "num/bf16.h"

/* Slot of `name`: its own, or the empty one where it belongs. */
static int *slot_of(const amax_table *t, str name) {
    const unsigned mask = (unsigned)t->slot_cap - 1;
    unsigned at = (unsigned)str_hash(name) & mask;
    while (t->slots[at] >= 0 && !str_eq(t->v[t->slots[at]].name, name)) at = (at + 1) & mask;
    return &t->slots[at];
}

static void grow(amax_table *t) {
    t->cap = t->cap ? t->cap * 2 : 256;
    t->v = xrealloc(t->v, (size_t)t->cap * sizeof *t->v);
    t->slot_cap = t->cap * 2;
    t->slots = xrealloc(t->slots, (size_t)t->slot_cap * sizeof *t->slots);
    for (int i = 0; i < t->slot_cap; i++) t->slots[i] = -1;
    for (int i = 0; i < t->n; i++) *slot_of(t, t->v[i].name) = i;
}

void amax_raise(amax_table *t, str name, float value) {
    CHECK(isfinite(value) && value >= 0, STR_FMT ": amax %g", STR_ARG(name), (double)value);
    if (t->n == t->cap) grow(t);
    int *slot = slot_of(t, name);
    if (*slot >= 0) {
        amax_entry *old = &t->v[*slot];
        if (value > old->value) old->value = value;
        return;
    }
    const str own = arena_str(&t->mem, name);
    CHECK(own.p, "out of memory");
    *slot = t->n;
    t->v[t->n++] = (amax_entry){ own, value };
}

void amax_set(amax_table *t, str name, float value) {
    amax_raise(t, name, value);
    t->v[*slot_of(t, name)].value = value;
}

float amax_get(const amax_table *t, str name) {
    if (t->n == 0) return -1;
    const int *slot = slot_of(t, name);
    return *slot >= 0 ? t->v[*slot].value : -1;
}

void amax_merge(amax_table *t, const amax_table *other) {
    for (int i = 0; i < other->n; i++) amax_raise(t, other->v[i].name, other->v[i].value);
}

void amax_free(amax_table *t) {
    arena_free(&t->mem);
    free(t->v);
    free(t->slots);
    *t = (amax_table){ 0 };
}

static bool read_entry(amax_table *t, const st_tensor *x, const char *path, err *e) {
    float v;
    uint16_t h;
    if (x->elems != 1 || (x->type != DT_F32 && x->type != DT_BF16))
        return fail(e, ERR_INPUT, "E-AMAX-ENTRY", "%s: " STR_FMT ": not an F32 or BF16 scalar", path, STR_ARG(x->name));
    if (x->type == DT_F32)
        memcpy(&v, x->data, sizeof v);
    else
        memcpy(&h, x->data, sizeof h), v = bf16_to_f32(h);
    if (!isfinite(v) || v < 0)
        return fail(e, ERR_INPUT, "E-AMAX-ENTRY", "%s: " STR_FMT ": %g is no maximum of |x| (calibrate again)", path,
                    STR_ARG(x->name), (double)v);
    amax_raise(t, x->name, v);
    return true;
}

bool amax_load(amax_table *out, const char *path, err *e) {
    st_file f;
    *out = (amax_table){ .source = path };
    if (!st_open(&f, path, e)) return false;
    bool ok = true;
    for (int i = 0; ok && i < f.count; i++) ok = read_entry(out, &f.tensors[i], path, e);
    st_close(&f);
    if (!ok) amax_free(out);
    return ok;
}

static int by_name(const void *a, const void *b) {
    return str_cmp(((const amax_entry *)a)->name, ((const amax_entry *)b)->name);
}

bool amax_save(const amax_table *t, const char *path, err *e) {
    amax_entry *sorted = xmalloc((size_t)t->n * sizeof *sorted);
    st_out *out = xcalloc((size_t)t->n, sizeof *out);
    if (t->n) memcpy(sorted, t->v, (size_t)t->n * sizeof *sorted);
    qsort(sorted, (size_t)t->n, sizeof *sorted, by_name);
    for (int i = 0; i < t->n; i++)
        out[i] = (st_out){ .name = sorted[i].name.p, .type = DT_F32, .data = &sorted[i].value };
    const bool ok = st_write(path, out, t->n, e);
    free(sorted);
    free(out);
    return ok;
}
