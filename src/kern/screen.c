#include "kern/screen.h"

void screen_kern_init(screen_kern *k, kern_isa cap) {
    screen_init_ref(k);
#if defined(__x86_64__)
    if (cap == ISA_NEON || cap == ISA_DOTPROD) return;
    if (cap >= ISA_AVX2 && kern_isa_supported(ISA_AVX2)) screen_init_avx2(k);
    if (cap >= ISA_AVX512 && kern_isa_supported(ISA_AVX512)) screen_init_avx512(k);
#elif defined(__aarch64__)
    if (cap >= ISA_NEON && kern_isa_supported(ISA_NEON)) screen_init_neon(k);
#else
    (void)cap;
#endif
}
