/* Which instruction sets there are, and which of them this CPU has. */
#define _DEFAULT_SOURCE /* syscall */
#include "internal.h"

#if defined(CP_X86)
#include <cpuid.h>
#endif
#if defined(CP_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(CP_NEON)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1ul << 20)
#endif
#endif

#if defined(CP_X86)
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

#if defined(CP_X86)
static int has_avx512vnni(void)
{
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && has_f16c();
}
#endif

#if defined(CP_AMX)
/* Linux lends tiles to a process that asks for them; its threads and forked children have them too.
 * It refuses where it has not heard of them, where a thread's signal stack is too small for them, or
 * where somebody forbade the call. */
static int has_amx(void)
{
    const long ask_for_state = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    const unsigned bf16 = 1u << 22, tiles = 1u << 24;
    unsigned a, b, c, d;
    return has_avx512vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16) &&
           (d & tiles) && syscall(SYS_arch_prctl, ask_for_state, tile_data) == 0;
}
#endif

const cp_path *cp_path_at(int32_t index)
{
    switch (index) {
    case CP_PORTABLE:
        return &cp_path_portable;
#if defined(CP_X86)
    case CP_AVX2:
        return __builtin_cpu_supports("avx2") && has_f16c() ? &cp_path_avx2 : NULL;
    case CP_AVX512VNNI:
        return has_avx512vnni() ? &cp_path_avx512vnni : NULL;
#endif
#if defined(CP_AMX)
    case CP_AMX_BF16:
        return has_amx() ? &cp_path_amx : NULL;
#endif
#if defined(CP_NEON)
    case CP_NEON_DOT:
        return getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? &cp_path_neon : NULL;
#endif
    default:
        return NULL;
    }
}

int cp_has_path(int32_t path)
{
    return cp_path_at(path) != NULL;
}
