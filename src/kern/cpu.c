/* What this CPU and this kernel of the operating system let us use. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kern/kern_isa.h"

static char cpu_name[64];

#if defined(__x86_64__)
#include <cpuid.h>

/* XCR0: the register states that the OS saves on a context switch. Without a bit its registers are not ours. */
static uint64_t xcr0(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

enum { STATE_AVX = 0x6, STATE_AVX512 = 0xe6, STATE_AMX = 0x60000 };
static bool os_saves(uint64_t states) { return (xcr0() & states) == states; }

bool kern_cpu_has_fma(void) {
    uint32_t a, b, c, d;
    return os_saves(STATE_AVX) && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_FMA) && (c & bit_AVX);
}

static bool has_avx2(void) {
    uint32_t a, b, c, d;
    if (!kern_cpu_has_fma() || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

static bool has_avx512(void) {
    uint32_t a, b, c, d;
    const uint32_t need = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    return has_avx2() && os_saves(STATE_AVX512) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & need) == need &&
           (c & 1u << 11); /* VNNI */
}

static bool has_amx(void) {
    uint32_t a, b, c, d;
    const uint32_t need = 1u << 24 | 1u << 25, bytes = 1u << 1 | 1u << 6; /* TILE, INT8; VBMI, VBMI2 */
    if (!has_avx512() || !os_saves(STATE_AMX)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & need) != need || (c & bytes) != bytes) return false;
    /* Tile data is large, so Linux grants it only on request (ARCH_REQ_XCOMP_PERM, XTILEDATA). */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

bool kern_isa_supported(kern_isa isa) {
    switch (isa) {
    case ISA_REF: return true;
    case ISA_AVX2: return has_avx2();
    case ISA_AVX512: return has_avx512();
    case ISA_AMX: return has_amx();
    default: return false;
    }
}

static void find_name(void) {
    uint32_t r[12] = { 0 };
    char text[49] = { 0 };
    for (uint32_t i = 0; i < 3; i++)
        if (!__get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3])) break;
    memcpy(text, r, 48);
    const char *p = text + strspn(text, " ");
    size_t n = strlen(p);
    while (n && p[n - 1] == ' ') n--;
    snprintf(cpu_name, sizeof cpu_name, "%.*s", n ? (int)n : 14, n ? p : "unknown x86-64");
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

bool kern_cpu_has_fma(void) { return true; }
/* Advanced SIMD is part of the base architecture, sdot is not. */
bool kern_isa_supported(kern_isa isa) {
    return isa == ISA_REF || isa == ISA_NEON || (isa == ISA_DOTPROD && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP));
}

/* Names of the implementer/part numbers of cores that this program is likely to meet. */
static const struct {
    unsigned implementer, part;
    const char *name;
} cores[] = {
    { 0x41, 0xd08, "ARM Cortex-A72" },  { 0x41, 0xd0b, "ARM Cortex-A76" },  { 0x41, 0xd0c, "ARM Neoverse-N1" },
    { 0x41, 0xd40, "ARM Neoverse-V1" }, { 0x41, 0xd49, "ARM Neoverse-N2" }, { 0x41, 0xd4f, "ARM Neoverse-V2" },
    { 0x41, 0xd83, "ARM Neoverse-V3" }, { 0x41, 0xd85, "ARM Cortex-X925" }, { 0x41, 0xd87, "ARM Cortex-A725" },
    { 0xc0, 0xac3, "Ampere-1" },
};

static void find_name(void) {
    unsigned implementer = 0, part = 0;
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f && fgets(line, sizeof line, f)) {
        const char *colon = strchr(line, ':');
        if (!colon) continue;
        if (strncmp(line, "CPU implementer", 15) == 0) sscanf(colon + 1, "%i", (int *)&implementer);
        if (strncmp(line, "CPU part", 8) == 0 && part == 0) sscanf(colon + 1, "%i", (int *)&part);
    }
    if (f) fclose(f);
    for (size_t i = 0; i < ARRAY_LEN(cores); i++)
        if (cores[i].implementer == implementer && cores[i].part == part) {
            snprintf(cpu_name, sizeof cpu_name, "%s", cores[i].name);
            return;
        }
    if (implementer)
        snprintf(cpu_name, sizeof cpu_name, "aarch64 (implementer 0x%02x, part 0x%03x)", implementer, part);
    else
        snprintf(cpu_name, sizeof cpu_name, "aarch64");
}

#else

bool kern_cpu_has_fma(void) { return false; }
bool kern_isa_supported(kern_isa isa) { return isa == ISA_REF; }
static void find_name(void) { snprintf(cpu_name, sizeof cpu_name, "unknown CPU"); }

#endif

const char *kern_cpu_name(void) {
    enum { UNKNOWN, BUSY, READY };
    static atomic_int state;
    int now = UNKNOWN;
    if (atomic_compare_exchange_strong(&state, &now, BUSY)) {
        find_name();
        atomic_store(&state, READY);
    }
    while (atomic_load(&state) != READY) {
        /* another thread is writing the name */
    }
    return cpu_name;
}
