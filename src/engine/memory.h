/* memory.h - what an engine is about to hold, computed before anything is allocated, and the refusal when it is too much.
 *
 * Swapping is worse than an error: an engine that does not fit is refused with the part that is largest. */
#ifndef NIBBLE_MEMORY_H
#define NIBBLE_MEMORY_H

#include "engine/heads.h"
#include "engine/state.h"
#include "model/config.h"
#include "model/weights.h"

typedef struct memory_plan {
    int64_t packed_bytes; /* NVFP4 weights, repacked */
    int64_t
        mapped_bytes; /* weights used in place: page cache, which the kernel may drop and read again; not in total */
    int64_t screen_bytes, draft_bytes;
    int64_t state_bytes;  /* GDN state and conv windows of all sequences, their pages of KV */
    int64_t prefix_bytes; /* the same of the prefix cache */
    int64_t work_bytes;   /* activations of one pass, logits on the device and the host */
    int64_t total_bytes;
    int64_t available_bytes; /* memory_available(), or what the device has left */
    /* A device with memory of its own: all weights are copied there (total holds mapped), except experts that stay with the
     * CPU. */
    bool on_device;
    int64_t host_packed_bytes, host_mapped_bytes; /* those; mapped: in place, as above */
    int64_t host_work_bytes;                      /* their inputs and sums on the way */
    int64_t host_bytes, host_available_bytes;     /* without mapped */
    int64_t layer_experts_bytes;                  /* of the largest layer on the device */
    bool shared_memory;                           /* device and CPU have the same memory */
} memory_plan;

/* MemAvailable, or what the control group leaves of it; INT64_MAX when unknown. */
int64_t memory_available(void);
void memory_plan_make(memory_plan *p, const model_config *c, const weights *w, const heads_options *heads,
                      const state_shape *shape, int prefix_pages, int rows, int head_rows);
/* The same plan on a device that has `available` bytes left; experts of `on_cpu` stay with the CPU. */
void memory_plan_device(memory_plan *p, const model_config *c, const weights *w, const layer_set *on_cpu, int rows,
                        int64_t available, bool shared_memory);
/* limit_bytes 0: what is available. Error: E-MACHINE-PLAN (what is needed, what there is, what to lower). */
NODISCARD bool memory_plan_check(const memory_plan *p, int64_t limit_bytes, err *e);
/* One line: "4.6 GB weights + ..." */
void memory_plan_text(char *out, size_t bytes, const memory_plan *p);

#endif
