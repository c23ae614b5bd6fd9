/* Eight floats at a time: exp, and the tree that ends a sum of 8 lanes. */
#ifndef CELLPIPE_VECTOR_AVX2_H
#define CELLPIPE_VECTOR_AVX2_H

#include <immintrin.h>

#define CP_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#define CP_INLINE static inline __attribute__((always_inline))

/* cp_exp1 (numbers.h), eight times. */
CP_INLINE CP_TARGET_AVX2 __m256 cp_exp_8(__m256 x)
{
    const __m256 rounder = _mm256_set1_ps(12582912.0f);
    __m256 n, r, p;
    __m256i scale;
    x = _mm256_max_ps(x, _mm256_set1_ps(-87.0f));
    x = _mm256_min_ps(x, _mm256_set1_ps(88.0f));
    r = _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), rounder);
    scale = _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(r), _mm256_set1_epi32(127)), 23);
    n = _mm256_sub_ps(r, rounder);
    r = _mm256_sub_ps(x, _mm256_mul_ps(n, _mm256_set1_ps(0.693359375f)));
    r = _mm256_sub_ps(r, _mm256_mul_ps(n, _mm256_set1_ps(-2.12194440e-4f)));
    p = _mm256_set1_ps(1.0f / 720.0f);
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f / 120.0f));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f / 24.0f));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f / 6.0f));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(0.5f));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(scale));
}

/* exp for softmax: 0 below -87. */
CP_INLINE CP_TARGET_AVX2 __m256 cp_exp_or_zero_8(__m256 x)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ), cp_exp_8(x));
}

/* (l0+l4, l1+l5, l2+l6, l3+l7), (a0+a2, a1+a3), b0+b1. */
CP_INLINE CP_TARGET_AVX2 float cp_sum_lanes_8(__m256 lanes)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

/* The same for eight vectors of lanes: sum i in lane i. */
CP_INLINE CP_TARGET_AVX2 __m256 cp_sum_lanes_8x8(const __m256 v[8])
{
    __m256 a[4], b[2], c;
    int i;
    for (i = 0; i < 4; i++) /* vectors i and i + 4, in the low and the high half */
        a[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                             _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    for (i = 0; i < 2; i++)
        b[i] = _mm256_add_ps(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                             _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    c = _mm256_add_ps(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd));
    return c;
}

#endif
