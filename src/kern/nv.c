#include "kern/nv.h"

#include <string.h>

size_t nv_act_bytes(int K) {
    const size_t k = (size_t)nv_padded(K);
    return 4 * k + 64; /* as float inputs; the integer form needs 1.5 k */
}

nv_act nv_act_at(void *mem, int K) {
    uint8_t *p = mem;
    const size_t k = (size_t)nv_padded(K);
    return (nv_act){ .codes = (int8_t *)p,
                     .scale = (int32_t *)(void *)(p + k),
                     .bias = (int32_t *)(void *)(p + k + k / 4),
                     .x = (float *)(void *)p,
                     .factor = 1 };
}

void nv_act_clear_tail(nv_act *a, int K) {
    const int tail = nv_padded(K) - K, blocks = tail / 16, first = K / 16;
    memset(a->codes + K, 0, (size_t)tail);
    memset(a->scale + first, 0, (size_t)blocks * sizeof *a->scale);
    memset(a->bias + first, 0, (size_t)blocks * sizeof *a->bias);
}

void nv_kern_init(nv_kern *k, kern_isa cap) {
    nv_init_ref(k);
#if defined(__x86_64__)
    if (cap == ISA_NEON || cap == ISA_DOTPROD) return;
    if (cap >= ISA_AVX2 && kern_isa_supported(ISA_AVX2)) nv_init_avx2(k);
    if (cap >= ISA_AVX512 && kern_isa_supported(ISA_AVX512)) nv_init_avx512(k);
    if (cap >= ISA_AMX && kern_isa_supported(ISA_AMX)) nv_init_amx(k);
#elif defined(__aarch64__)
    if (cap >= ISA_NEON && kern_isa_supported(ISA_NEON)) nv_init_neon(k);
    if (cap >= ISA_DOTPROD && kern_isa_supported(ISA_DOTPROD)) nv_init_dotprod(k);
#else
    (void)cap;
#endif
}
