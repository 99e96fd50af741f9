/* state.h - what sequences leave on the device: KV, GDN state, conv windows, rotary table.
 *
 * `slots` sequences of up to `capacity` positions each. Memory is reserved at once and touched as it is used. */
#ifndef NIBBLE_STATE_H
#define NIBBLE_STATE_H

#include "engine/net.h"

enum { STATE_ROPE_STEP = 512 };

typedef struct seq_state {
    const net *n;
    int slots, capacity;
    ops_kv *kv;       /* [attn_layers] */
    ops_kv mtp_kv;    /* the draft layer's own; k NULL without MTP */
    ops_conv *conv;   /* [gdn_layers] */
    ops_gdn *gdn;     /* [gdn_layers] */
    float *cos, *sin; /* [capacity, rotary_dim / 2] */
    int rope_rows;    /* rows filled so far */
    float *stage;     /* host [2, STATE_ROPE_STEP, rotary_dim / 2] */
} seq_state;

/* kv_type DT_F32, DT_BF16, or DT_F8_E4M3 with the scales of `w` (1.0 where the file has none). Errors: E-MACHINE-MEMORY. */
NODISCARD bool state_open(seq_state *out, const net *n, const weights *w, int slots, int capacity, dtype kv_type,
                          err *e);
void state_close(seq_state *s);
/* Forget a slot: its GDN state and conv windows become zero (KV need not be cleared). */
void state_reset(seq_state *s, int slot);
/* The same for one GDN layer (index among its kind). */
void state_reset_gdn(seq_state *s, int slot, int index);
/* Slot dst becomes a copy of slot src, which holds `positions` positions and `mtp_positions` draft slots and has no pending
 * rows. */
void state_copy(seq_state *s, int dst, int src, int positions, int mtp_positions);
/* Make the rotary table cover positions [0, upto). */
void state_cover(seq_state *s, int upto);
/* Bytes reserved for one slot. */
int64_t state_slot_bytes(const model_config *c, int capacity, dtype kv_type, bool with_mtp);

#endif
