/* state.h - what sequences leave on the device: KV, GDN state, conv windows, rotary table.
 *
 * `slots` sequences of up to `capacity` positions each, and `spare` slots that only keep what a sequence left. Memory is
 * reserved at once and touched as it is used. KV lies in pages that slots take as they grow (kvpages.h). */
#ifndef NIBBLE_STATE_H
#define NIBBLE_STATE_H

#include "engine/kvpages.h"
#include "engine/net.h"

enum { STATE_ROPE_STEP = 512 };

typedef struct seq_state {
    const net *n;
    int slots, capacity;
    kv_pages pages;
    ops_kv *kv;       /* [attn_layers] */
    ops_kv mtp_kv;    /* the draft layer's own; k NULL without MTP */
    ops_conv *conv;   /* [gdn_layers] */
    ops_gdn *gdn;     /* [gdn_layers] */
    float *cos, *sin; /* [capacity, rotary_dim / 2] */
    int rope_rows;    /* rows filled so far */
    float *stage;     /* host [2, STATE_ROPE_STEP, rotary_dim / 2] */
} seq_state;

typedef struct state_shape {
    int slots, spare, capacity;
    int pages; /* of KV for all of them; 0 = enough for `slots` full ones */
    dtype kv_type;
} state_shape;

/* kv_type DT_F32, DT_BF16, or DT_F8_E4M3 with the scales of `w` (1.0 where the file has none). Errors: E-MACHINE-MEMORY. */
NODISCARD bool state_open(seq_state *out, const net *n, const weights *w, const state_shape *shape, err *e);
void state_close(seq_state *s);
/* Forget a slot: its GDN state and conv windows become zero, its pages go. */
void state_reset(seq_state *s, int slot);
/* The same for one GDN layer (index among its kind). */
void state_reset_gdn(seq_state *s, int slot, int index);
/* Slot dst becomes a copy of slot src, which holds `positions` positions and `mtp_positions` draft slots and has no pending
 * rows. Pages that neither will write again are shared. False, dst without pages, when too few are unused. */
NODISCARD bool state_copy(seq_state *s, int dst, int src, int positions, int mtp_positions);
/* Pages that state_copy takes at most, beyond those it shares. */
int state_copy_pages(const seq_state *s, int positions, int mtp_positions);
/* Apply the first `rows` pending rows of a slot to its GDN states and conv windows; the others are dropped. */
void state_commit(seq_state *s, int slot, int rows);
/* Visit the memory of a slot's first `positions` positions in a fixed order: GDN states and conv windows, then KV. */
void state_visit(const seq_state *s, int slot, int positions, void (*see)(void *ctx, void *device, size_t bytes),
                 void *ctx);
/* Bytes that it visits. */
int64_t state_visit_bytes(const seq_state *s, int positions);
/* Make the rotary table cover positions [0, upto). */
void state_cover(seq_state *s, int upto);
/* Bytes that state_open reserves. */
int64_t state_bytes(const model_config *c, const state_shape *shape, bool with_mtp);
int64_t state_page_bytes(const model_config *c, dtype kv_type, bool with_mtp);

#endif
