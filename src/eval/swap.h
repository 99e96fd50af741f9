/* swap.h - which part of a quantized model costs what: one layer, or one family of matrices, of it inside the reference.
 *
 * Both engines' prepared weights live side by side; a hybrid is the reference whose handles for the part are the quantized
 * model's (with the inputs quantized as that model does), and whose KV cache stays the reference's. */
#ifndef NIBBLE_SWAP_H
#define NIBBLE_SWAP_H

#include "eval/compare.h"

typedef enum swap_family {
    SWAP_GDN,
    SWAP_ATTN,
    SWAP_EXPERTS,
    SWAP_FFN,
    SWAP_ROUTER,
    SWAP_HEAD,
    SWAP_FAMILIES
} swap_family;
const char *swap_family_name(swap_family f); /* "gdn" "attention" "experts" "shared" "router" "head" */

typedef struct swap_part {
    int layer;  /* < 0: all layers */
    int family; /* < 0: all families */
} swap_part;

/* Put the part of `from` into `into` (same shapes: CHECK) and back again. Between the two, into's passes are the hybrid's.
 * One at a time. */
typedef struct swap {
    engine *into;
    net saved;
    net_layer *layers;
} swap;
/* Errors: E-EVAL-SHAPE (the models differ in shape). */
NODISCARD bool swap_in(swap *s, engine *into, const engine *from, swap_part part, err *e);
void swap_out(swap *s);

#endif
