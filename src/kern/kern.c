#include "kern/kern.h"

#include <string.h>

#include "kern/kern_isa.h"

static const char *const names[ISA_COUNT] = { "ref", "avx2", "avx512", "amx", "neon", "dotprod" };

const char *kern_isa_name(kern_isa isa) { return isa >= 0 && isa < ISA_COUNT ? names[isa] : "?"; }

bool kern_isa_parse(kern_isa *out, const char *name) {
    for (int i = 0; i < ISA_COUNT; i++)
        if (strcmp(name, names[i]) == 0) return *out = (kern_isa)i, true;
    return false;
}

void kern_init_ref_plain(kern *k) {
    *k = (kern){ .isa = ISA_REF };
    linear_init_ref(k);
    row_init_ref(k);
    gdn_init_ref(k);
    attn_init_ref(k);
}

static void init_ref(kern *k) {
    kern_init_ref_plain(k);
#ifdef __x86_64__
    if (!kern_cpu_has_fma()) return;
    linear_init_ref_fma(k);
    row_init_ref_fma(k);
    gdn_init_ref_fma(k);
    attn_init_ref_fma(k);
#endif
}

void kern_init(kern *k, kern_isa cap) {
    init_ref(k);
#if defined(__x86_64__)
    if (cap == ISA_NEON || cap == ISA_DOTPROD) return;
    if (cap >= ISA_AVX2 && kern_isa_supported(ISA_AVX2)) kern_init_avx2(k);
    /* No AMX kernel exists yet: a cap of amx is avx512 and says so in k->isa. */
    if (cap >= ISA_AVX512 && kern_isa_supported(ISA_AVX512)) kern_init_avx512(k);
#elif defined(__aarch64__)
    if (cap >= ISA_NEON) kern_init_neon(k);
#else
    (void)cap;
#endif
}
