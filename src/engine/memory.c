#include "engine/memory.h"

#include <stdio.h>

#include "engine/forward.h"
#include "kern/nv.h"

static void add_mat(memory_plan *p, const wmat *m) {
    if (!m->data) return;
    if (m->q.format == WF_NVFP4)
        p->packed_bytes += nv_matrix_bytes(m->rows, m->cols);
    else
        p->mapped_bytes += (int64_t)m->rows * m->cols * dtype_bytes(m->type);
}

static void add_experts(memory_plan *p, const wexperts *x) {
    if (x->count > 0 && x->gate_q && x->gate_q[0].format == WF_NVFP4)
        p->packed_bytes += x->count * (2 * nv_matrix_bytes(x->inter, x->hidden) + nv_matrix_bytes(x->hidden, x->inter));
    else
        p->mapped_bytes += (int64_t)x->count * 3 * x->inter * x->hidden * dtype_bytes(x->type);
}

static void add_layer(memory_plan *p, const wlayer *l) {
    const wmat *all[LAYER_MATS];
    wlayer_mats(all, l);
    for (int i = 0; i < LAYER_MATS; i++) add_mat(p, all[i]);
    add_experts(p, &l->ffn.experts);
}

/* The smallest "now - used" of the control groups we can see, v2. */
static int64_t group_left(void) {
    int64_t max = 0, used = 0;
    FILE *f = fopen("/sys/fs/cgroup/memory.max", "r");
    const bool limited = f && fscanf(f, "%lld", (long long *)&max) == 1; /* "max" is no number */
    if (f) fclose(f);
    if (!limited) return INT64_MAX;
    f = fopen("/sys/fs/cgroup/memory.current", "r");
    if (f && fscanf(f, "%lld", (long long *)&used) != 1) used = 0;
    if (f) fclose(f);
    return max > used ? max - used : 0;
}

int64_t memory_available(void) {
    char line[256];
    long long kb = -1;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && kb < 0 && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lld kB", &kb) != 1) kb = -1;
    if (f) fclose(f);
    const int64_t machine = kb < 0 ? INT64_MAX : (int64_t)kb * 1024, group = group_left();
    return machine < group ? machine : group;
}

void memory_plan_make(memory_plan *p, const model_config *c, const weights *w, const heads_options *heads,
                      const state_shape *shape, int prefix_pages, int rows, int head_rows) {
    *p = (memory_plan){ 0 };
    add_mat(p, &w->embed);
    if (w->head.data != w->embed.data) add_mat(p, &w->head);
    for (int i = 0; i < c->layers; i++) add_layer(p, &w->layers[i]);
    if (w->mtp.present) {
        add_mat(p, &w->mtp.fc);
        add_layer(p, &w->mtp.layer);
    }
    heads_bytes(&p->screen_bytes, &p->draft_bytes, &w->head, c->vocab, heads);
    p->prefix_bytes =
        shape->spare * config_state_bytes(c) + prefix_pages * state_page_bytes(c, shape->kv_type, w->mtp.present);
    p->state_bytes = state_bytes(c, shape, w->mtp.present) - p->prefix_bytes;
    /* What ops keep besides the scratch grows with the pairs of rows and experts. */
    const int64_t pairs = (int64_t)rows * c->topk;
    p->work_bytes =
        scratch_bytes(c, rows, head_rows) + (int64_t)head_rows * c->vocab * 4 + pairs * (c->inter + c->hidden) * 16;
    p->total_bytes =
        p->packed_bytes + p->screen_bytes + p->draft_bytes + p->state_bytes + p->prefix_bytes + p->work_bytes;
    p->available_bytes = memory_available();
}

static void experts_bytes(int64_t *packed, int64_t *mapped, const wexperts *x) {
    memory_plan p = { 0 };
    add_experts(&p, x);
    *packed = p.packed_bytes;
    *mapped = p.mapped_bytes;
}

void memory_plan_device(memory_plan *p, const model_config *c, const weights *w, const layer_set *on_cpu, int rows,
                        int64_t available, bool shared_memory) {
    p->on_device = true;
    p->shared_memory = shared_memory;
    p->total_bytes -= p->screen_bytes; /* devices read the whole head: no 8-bit copy of it */
    p->screen_bytes = 0;
    for (int i = 0; i < c->layers + w->mtp.present; i++) {
        int64_t packed, mapped;
        experts_bytes(&packed, &mapped, i < c->layers ? &w->layers[i].ffn.experts : &w->mtp.layer.ffn.experts);
        if (!layer_set_has(on_cpu, i)) {
            p->layer_experts_bytes = max_i64(p->layer_experts_bytes, packed + mapped);
            continue;
        }
        p->host_packed_bytes += packed;
        p->host_mapped_bytes += mapped;
    }
    p->packed_bytes -= p->host_packed_bytes;
    p->mapped_bytes -= p->host_mapped_bytes;
    p->total_bytes += p->mapped_bytes - p->host_packed_bytes;
    if (!layer_set_empty(on_cpu)) /* inputs and sums; what the CPU's op keeps for pairs of rows and experts */
        p->host_work_bytes =
            (int64_t)rows * (c->hidden * 8 + c->topk * 8) + (int64_t)rows * c->topk * (c->inter + c->hidden) * 4;
    p->host_bytes = p->host_packed_bytes + p->host_work_bytes;
    p->available_bytes = available;
    p->host_available_bytes = memory_available();
}

static double gb(int64_t bytes) { return (double)bytes / 1e9; }

void memory_plan_text(char *out, size_t bytes, const memory_plan *p) {
    const int n = snprintf(out, bytes,
                           "%.2f GB%s: packed weights %.2f, screened head %.2f, draft head %.2f, sequences %.2f, "
                           "prefix cache %.2f, work %.2f%s%.2f%s",
                           gb(p->total_bytes), p->on_device ? " on the device" : "", gb(p->packed_bytes),
                           gb(p->screen_bytes), gb(p->draft_bytes), gb(p->state_bytes), gb(p->prefix_bytes),
                           gb(p->work_bytes), p->on_device ? ", other weights " : "; ", gb(p->mapped_bytes),
                           p->on_device ? "" : " GB of weights in place from the page cache");
    if (p->on_device && p->host_bytes > 0 && n > 0 && (size_t)n < bytes)
        snprintf(
            out + n, bytes - (size_t)n,
            "; %.2f GB on the CPU: packed experts %.2f, work %.2f; %.2f GB of experts in place from the page cache",
            gb(p->host_bytes), gb(p->host_packed_bytes), gb(p->host_work_bytes), gb(p->host_mapped_bytes));
}

/* What would make the device's part fit. */
static void device_remedy(char *out, size_t bytes, const memory_plan *p, int64_t over) {
    const int64_t layers =
        p->layer_experts_bytes > 0 ? (over + p->layer_experts_bytes - 1) / p->layer_experts_bytes : 0;
    if (layers > 0 && !p->shared_memory)
        snprintf(out, bytes,
                 "keep the experts of %lld more layers with --experts cpu:LAYERS, lower --ctx, or use --kv fp8",
                 (long long)layers);
    else
        snprintf(out, bytes, "lower --ctx, or use --kv fp8");
}

bool memory_plan_check(const memory_plan *p, int64_t limit_bytes, err *e) {
    const int64_t limit = limit_bytes > 0 ? limit_bytes : p->available_bytes;
    const int64_t need = p->total_bytes + (p->shared_memory ? p->host_bytes : 0);
    const bool host_fits = p->shared_memory || p->host_bytes <= p->host_available_bytes;
    if (need <= limit && host_fits) return true;
    char text[500], remedy[160];
    memory_plan_text(text, sizeof text, p);
    if (need <= limit)
        return fail(e, ERR_MACHINE, "E-MACHINE-PLAN",
                    "the machine has %.2f GB, the engine needs %s (name fewer layers in --experts cpu)",
                    gb(p->host_available_bytes), text);
    device_remedy(remedy, sizeof remedy, p, need - limit);
    return fail(e, ERR_MACHINE, "E-MACHINE-PLAN", "%s has %.2f GB, the engine needs %s (%s)",
                limit_bytes > 0 ? "--memory"
                : p->on_device  ? "the device"
                                : "the machine",
                gb(limit), text, remedy);
}
