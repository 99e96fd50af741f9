/* kern_isa.h - the parts kern_init is put together from; private to kern/ and its tests.
 *
 * Every *_ref.c is compiled twice: as it stands (fmaf may be a libm call) and, on x86-64, as *_ref_fma.o with
 * -mfma -DKERN_REF_FMA. Both fill a table with the same functions and the same bits. */
#ifndef NIBBLE_KERN_ISA_H
#define NIBBLE_KERN_ISA_H

#include "kern/kern.h"

#ifdef KERN_REF_FMA
#define KERN_REF(name) name##_ref_fma
#else
#define KERN_REF(name) name##_ref
#endif

#define INLINE static inline __attribute__((always_inline))
/* Before a loop with a constant count: arrays of vectors become registers only when it is unrolled. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

void linear_init_ref(kern *k);
void row_init_ref(kern *k);
void gdn_init_ref(kern *k);
void attn_init_ref(kern *k);

void linear_init_ref_fma(kern *k);
void row_init_ref_fma(kern *k);
void gdn_init_ref_fma(kern *k);
void attn_init_ref_fma(kern *k);

/* One level of one ISA: overwrite what it has. Only called on CPUs that have it. */
void kern_init_avx2(kern *k);
void kern_init_avx512(kern *k);
void kern_init_neon(kern *k);

/* The reference as compiled for the plain architecture, whatever the CPU has. */
void kern_init_ref_plain(kern *k);

bool kern_cpu_has_fma(void);

#endif
