/* Row blocks with NEON and its dot product instruction: 4 rows x 4 inputs a register. int4 weights are
 * 0..15, so they are signed bytes as they stand. Operations on rows are those in plain C, which
 * compilers turn into NEON code.
 */
#include "internal.h"

#if defined(CP_NEON)
#include "rows.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))
#define ROWS 4 /* rows that share the unpacked weights: 16 sums of 4 outputs */

INLINE float32x4_t half4(const uint8_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(const void *)p)));
}

/* sum += 4 rows x 4 inputs times the activations in lane p */
#define DOT(sum, w, x, p)                                                                          \
    ((p) == 0   ? vdotq_laneq_s32(sum, w, x, 0)                                                    \
     : (p) == 1 ? vdotq_laneq_s32(sum, w, x, 1)                                                    \
     : (p) == 2 ? vdotq_laneq_s32(sum, w, x, 2)                                                    \
                : vdotq_laneq_s32(sum, w, x, 3))

/* dot[t][i] = 4 dot products of rows 4i..4i+3 of a group with n runs of 32 activations */
INLINE void dots(const uint8_t *slabs, const int int4, const int8_t *q, const int apart,
                 const int n, int32x4_t dot[ROWS][4])
{
    int8x16_t low[ROWS], high[ROWS];
    int t, p, i;
    for (t = 0; t < n; t++) {
        low[t] = vld1q_s8(q + t * apart);
        high[t] = vld1q_s8(q + t * apart + 16);
        for (i = 0; i < 4; i++)
            dot[t][i] = vdupq_n_s32(0);
    }
#pragma GCC unroll 4
    for (p = 0; p < 4; p++)
#pragma GCC unroll 4
        for (i = 0; i < 4; i++) {
            uint8x16_t pairs = vld1q_u8(slabs + 64 * p + 16 * i);
            int8x16_t even, odd;
            if (int4) {
                even = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
                odd = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
            } else {
                even = vreinterpretq_s8_u8(pairs);
                odd = vreinterpretq_s8_u8(vld1q_u8(slabs + 256 + 64 * p + 16 * i));
            }
#pragma GCC unroll 4
            for (t = 0; t < n; t++) {
                dot[t][i] = DOT(dot[t][i], even, low[t], p);
                dot[t][i] = DOT(dot[t][i], odd, high[t], p);
            }
        }
}

/* Rows first..first+n-1 of the tile. */
INLINE void rows(const uint8_t *block, const cp_tile *x, int32_t first, const int n,
                 const int int4, float *out, size_t stride)
{
    const uint8_t *scales = block, *slabs = block + (int4 ? 64 : cp_int8_scale_bytes(x->cols));
    float32x4_t a[ROWS][4], b[ROWS][4];
    int apart = x->terms * CP_GROUP, t, i;
    int32_t g;
    for (t = 0; t < n; t++)
        for (i = 0; i < 4; i++)
            a[t][i] = b[t][i] = vdupq_n_f32(0.0f);
    for (g = 0; g < x->groups; g++) {
        size_t at = (size_t)g * (size_t)x->n + (size_t)first;
        const int8_t *q = x->q + at * (size_t)apart;
        int32x4_t dot[ROWS][4], second[ROWS][4];
        dots(slabs, int4, q, apart, n, dot);
        if (x->terms == 2) {
            dots(slabs, int4, q + CP_GROUP, apart, n, second);
            for (t = 0; t < n; t++)
                for (i = 0; i < 4; i++)
                    dot[t][i] = vmlaq_n_s32(second[t][i], dot[t][i], CP_FIRST_TERM);
        }
        for (i = 0; i < 4; i++) {
            float32x4_t scale = half4(scales + 8 * i);
            float32x4_t min = int4 ? half4(scales + 32 + 8 * i) : scale;
            for (t = 0; t < n; t++) {
                float32x4_t factor = vmulq_n_f32(scale, x->d[at + (size_t)t]);
                a[t][i] = vaddq_f32(a[t][i], vmulq_f32(factor, vcvtq_f32_s32(dot[t][i])));
                if (int4)
                    b[t][i] = vaddq_f32(b[t][i], vmulq_n_f32(min, x->ds[at + (size_t)t]));
            }
        }
        scales += int4 ? CP_INT4_GROUP : CP_BLOCK * 2;
        slabs += int4 ? CP_INT4_GROUP : CP_INT8_GROUP;
    }
    for (t = 0; t < n; t++)
        for (i = 0; i < 4; i++)
            vst1q_f32(out + (size_t)t * stride + 4 * i,
                      int4 ? vaddq_f32(a[t][i], b[t][i]) : a[t][i]);
}

static void block_int4(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    int32_t t = 0;
    for (; x->n - t >= ROWS; t += ROWS)
        rows(block, x, t, ROWS, 1, out + (size_t)t * stride, stride);
    for (; t < x->n; t++)
        rows(block, x, t, 1, 1, out + (size_t)t * stride, stride);
}

static void block_int8(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    int32_t t = 0;
    for (; x->n - t >= ROWS; t += ROWS)
        rows(block, x, t, ROWS, 0, out + (size_t)t * stride, stride);
    for (; t < x->n; t++)
        rows(block, x, t, 1, 0, out + (size_t)t * stride, stride);
}

/* Sixteen sums, so that none waits for its predecessor. */
static uint64_t peak(uint64_t rounds)
{
    int32x4_t sum[16];
    int8x16_t w = vdupq_n_s8(3), q = vdupq_n_s8(5);
    uint64_t i;
    int j;
    for (j = 0; j < 16; j++)
        sum[j] = vdupq_n_s32(0);
    for (i = 0; i < rounds; i++)
#pragma GCC unroll 16
        for (j = 0; j < 16; j++) {
            sum[j] = vdotq_s32(sum[j], w, q);
            __asm__ __volatile__("" : "+w"(sum[j]));
        }
    return rounds * 16 * 16;
}

const cp_path cp_path_neon = {
    "neon", 0, 0, block_int4, block_int8, NULL, NULL, 0, cp_quantize_c, cp_dot8_c, cp_scale_by_c, cp_rope_c,
    cp_silu_mul_c, cp_add_to_c, cp_all_finite_c, cp_exp_c, cp_to_half_c, cp_from_half_c,
    cp_widen_c, cp_attend_c, NULL, peak, cp_read_c};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int cp_no_block_neon; /* a translation unit must not be empty */
#endif
