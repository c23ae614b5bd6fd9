/* The rounding mode the kernel computes in: nearest, subnormals kept, nothing trapped.
 *
 * A host may have set flush-to-zero (a library built with -ffast-math does it for the process when
 * it is loaded); results would then differ from the reference. Set on entry, restored on return.
 */
#ifndef CELLPIPE_FPMODE_H
#define CELLPIPE_FPMODE_H

#include <stdint.h>

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned cp_fpmode;
static inline cp_fpmode cp_fpmode_enter(void)
{
    cp_fpmode old = _mm_getcsr();
    _mm_setcsr(0x1f80u);
    return old;
}
static inline void cp_fpmode_leave(cp_fpmode old)
{
    _mm_setcsr(old);
}
#elif defined(__aarch64__) && defined(__GNUC__)
typedef uint64_t cp_fpmode;
static inline cp_fpmode cp_fpmode_enter(void)
{
    uint64_t old, clean = 0;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(old));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(clean));
    return old;
}
static inline void cp_fpmode_leave(cp_fpmode old)
{
    __asm__ __volatile__("msr fpcr, %0" : : "r"(old));
}
#else
typedef int cp_fpmode;
static inline cp_fpmode cp_fpmode_enter(void)
{
    return 0;
}
static inline void cp_fpmode_leave(cp_fpmode old)
{
    (void)old;
}
#endif

#endif
