/* Numbers: bits, fp16, rint, exp, sums of 8 lanes. Branch-free where a loop should vectorise.
 *
 * No libm: its last bit differs between systems. Subnormals are met without arithmetic on them
 * where that is cheap, since many CPUs take 100 cycles and more for each.
 */
#ifndef CELLPIPE_NUMBERS_H
#define CELLPIPE_NUMBERS_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "binary32 operations must round to binary32 at once (on x86: -msse2 -mfpmath=sse)"
#endif

static inline uint32_t cp_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float cp_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* yes or no, by a mask: a branch would keep a loop from being vectorised. */
static inline uint32_t cp_select(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* Rounded to an integer, ties to even, for |x| < 2^22. Adding 1.5 * 2^23 pushes the fraction out. */
#define CP_ROUNDER 12582912.0f

static inline float cp_rint(float x)
{
    return (x + CP_ROUNDER) - CP_ROUNDER;
}

static inline int32_t cp_rint_int(float x)
{
    return (int32_t)(cp_bits(x + CP_ROUNDER) - cp_bits(CP_ROUNDER));
}

/* fp16 -> binary32, exact. Infinity and NaN are not met: weights are refused when packed, KV is
 * clamped; they would come out as numbers from 65536 up. A subnormal gets an exponent it does not
 * have, which the subtraction takes away again. */
static inline float cp_from_half1(uint32_t h)
{
    uint32_t magnitude = (h & 0x7fffu) << 13;
    uint32_t normal = magnitude + (112u << 23);
    float subnormal = cp_float(magnitude + (113u << 23)) - 6.103515625e-05f; /* 2^-14 */
    uint32_t u = cp_select(magnitude < (1u << 23), cp_bits(subnormal), normal);
    return cp_float(u | (h & 0x8000u) << 16);
}

/* binary32 -> fp16, to nearest even, clamped to +-65504. x must not be NaN. */
static inline uint32_t cp_to_half1(float x)
{
    uint32_t u = cp_bits(x);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t magnitude = u & 0x7fffffffu;
    uint32_t max = 0x477fe000u; /* 65504 */
    uint32_t normal, subnormal;
    magnitude = magnitude > max ? max : magnitude;
    normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* Below 2^-14 the unit is 2^-24: adding 0.5 makes the FPU round there. */
    subnormal = cp_bits(cp_float(magnitude) + 0.5f) - 0x3f000000u;
    return sign | cp_select(magnitude < (113u << 23), subnormal, normal);
}

/* 2^n * p(r) with x = n ln 2 + r. */
static inline float cp_exp1(float x)
{
    float n, r, p;
    uint32_t scale;
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    r = x * 1.44269504f;
    scale = (uint32_t)(cp_rint_int(r) + 127) << 23;
    n = cp_rint(r);
    r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    p = 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * cp_float(scale);
}

/* A series below 1/2, a quotient from there; branch-free. */
static inline float cp_tanh1(float x)
{
    float z = x * x, magnitude = cp_float(cp_bits(x) & 0x7fffffffu), e, p, quotient;
    p = -929569.0f / 638512875.0f;
    p = p * z + 21844.0f / 6081075.0f;
    p = p * z + -1382.0f / 155925.0f;
    p = p * z + 62.0f / 2835.0f;
    p = p * z + -17.0f / 315.0f;
    p = p * z + 2.0f / 15.0f;
    p = p * z + -1.0f / 3.0f;
    e = cp_exp1(-2.0f * magnitude);
    quotient = (1.0f - e) / (1.0f + e);
    return cp_float(cp_select(magnitude < 0.5f, cp_bits(x + x * (z * p)),
                              cp_bits(quotient) | (cp_bits(x) & 0x80000000u)));
}

static inline float cp_softcap1(float x, float cap)
{
    return cap * cp_tanh1(x / cap);
}

static inline float cp_sum_lanes(const float lane[8])
{
    float a0 = lane[0] + lane[4], a1 = lane[1] + lane[5];
    float a2 = lane[2] + lane[6], a3 = lane[3] + lane[7];
    float b0 = a0 + a2, b1 = a1 + a3;
    return b0 + b1;
}

/* n is a multiple of 8. */
static inline float cp_dot8(const float *x, const float *y, int32_t n)
{
    float lane[8] = {0};
    int32_t i, j;
    for (i = 0; i < n; i += 8)
        for (j = 0; j < 8; j++)
            lane[j] += x[i + j] * y[i + j];
    return cp_sum_lanes(lane);
}

static inline int cp_all_finite(const float *x, int32_t n)
{
    uint32_t bad = 0;
    int32_t i;
    for (i = 0; i < n; i++)
        bad |= (cp_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return !bad;
}

#endif
