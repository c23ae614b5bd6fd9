/* Which instruction sets there are, and which of them this CPU has. */
#include "internal.h"

#if defined(CP_X86)
#include <cpuid.h>
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

const cp_path *cp_path_at(int32_t index)
{
    switch (index) {
    case CP_PORTABLE:
        return &cp_path_portable;
#if defined(CP_X86)
    case CP_AVX2:
        return __builtin_cpu_supports("avx2") && has_f16c() ? &cp_path_avx2 : NULL;
    case CP_AVX512VNNI:
        return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512dq") && has_f16c()
                   ? &cp_path_avx512vnni
                   : NULL;
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
