/* Sixteen floats at a time: exp, and the rounding of a group of activations. */
#ifndef CELLPIPE_VECTOR_AVX512_H
#define CELLPIPE_VECTOR_AVX512_H

#include "internal.h"
#include "numbers.h"

#include <immintrin.h>

#define CP_INLINE_AVX512                                                                           \
    static inline __attribute__((always_inline, unused,                                            \
                                 target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")))

/* cp_exp1 (numbers.h), sixteen times. */
CP_INLINE_AVX512 __m512 cp_exp_16(__m512 whole)
{
    const __m512 rounder = _mm512_set1_ps(12582912.0f);
    __m512 x = _mm512_min_ps(_mm512_max_ps(whole, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    __m512 r = _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), rounder), n, p;
    __m512i scale =
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(r), _mm512_set1_epi32(127)), 23);
    n = _mm512_sub_ps(r, rounder);
    r = _mm512_sub_ps(x, _mm512_mul_ps(n, _mm512_set1_ps(0.693359375f)));
    r = _mm512_sub_ps(r, _mm512_mul_ps(n, _mm512_set1_ps(-2.12194440e-4f)));
    p = _mm512_set1_ps(1.0f / 720.0f);
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0.5f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(p, _mm512_castsi512_ps(scale));
}

/* exp for softmax: 0 below -87. */
CP_INLINE_AVX512 __m512 cp_exp_or_zero_16(__m512 x)
{
    __mmask16 small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    return _mm512_maskz_mov_ps((__mmask16)~small, cp_exp_16(x));
}

/* Values 0..15 and 16..31 of a group as whole numbers of at most `steps`; their d and sum. Returns 0 if
 * a value is not finite. */
CP_INLINE_AVX512 int cp_round_group_avx512(const float *x, int32_t steps, __m512i whole[2],
                                           float *d, int32_t *s)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i most = _mm512_set1_epi32(steps), least = _mm512_set1_epi32(-steps);
    __m512 values[2];
    uint32_t max_bits;
    float id = 0.0f;
    int i;
    values[0] = _mm512_loadu_ps(x);
    values[1] = _mm512_loadu_ps(x + 16);
    max_bits = _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(values[0]), magnitude),
                         _mm512_and_si512(_mm512_castps_si512(values[1]), magnitude)));
    if (max_bits >= 0x7f800000u)
        return 0;
    *d = 0.0f;
    if (max_bits >= (127u - 100u) << 23) { /* 2^-100 */
        id = (float)steps / cp_float(max_bits);
        *d = cp_float(max_bits) / (float)steps;
    }
    for (i = 0; i < 2; i++) {
        whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], _mm512_set1_ps(id)));
        whole[i] = _mm512_max_epi32(_mm512_min_epi32(whole[i], most), least);
    }
    *s = _mm512_reduce_add_epi32(_mm512_add_epi32(whole[0], whole[1]));
    return 1;
}

#endif
