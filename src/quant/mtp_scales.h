/* mtp_scales.h - activation maxima of the draft head that calibration did not measure.
 *
 * `borrow`: K and V of the last full-attention layer. `generous`: data-free, as the published checkpoint did: factor x the
 * input maximum of the same role in the last full-attention layer, K and V borrowed. */
#ifndef NIBBLE_MTP_SCALES_H
#define NIBBLE_MTP_SCALES_H

#include "kern/quant.h"
#include "quant/amax.h"
#include "quant/plan.h"

typedef enum mtp_scales { MTP_CALIBRATED, MTP_BORROW, MTP_GENEROUS } mtp_scales;

/* Fill the head's entries of `t` from layer p->last_attn. BORROW replaces only K and V (the head's input maxima must be
 * there already); GENEROUS replaces all. Errors: E-QUANT-AMAX (a maximum of that layer is missing). */
NODISCARD bool mtp_scales_fill(amax_table *t, const plan *p, mtp_scales how, double factor, err *e);

/* Set the maxima of layer p->last_attn (K and V only, or all roles that the head needs) from the scales of an export whose
 * text tensors stand behind `prefix`: values that give exactly these scales again under `arith` where there are such. A scale
 * that the export lacks leaves its maximum as it was. */
void mtp_scales_from_export(amax_table *t, const plan *p, const ckpt *from, str prefix, bool kv_only,
                            quant_arith arith);

#endif
