/* Attention to one page with AVX2: sixteen scores at once, each in its own 8 lanes. */
#include "internal.h"

#if defined(CP_X86)
#include "numbers.h"
#include "rows_avx2.h"
#include "vector_avx2.h"

#define T CP_TARGET_AVX2
#define HEADS 4

/* Scores of all 16 positions; those from n on come out as rubbish and are masked by the caller. */
CP_INLINE T void scores_16(const float *q, const float *keys, int32_t head_dim, __m256 scale,
                           float s[CP_PAGE])
{
    int32_t j, i, k;
    for (j = 0; j < CP_PAGE; j += 8) {
        __m256 lanes[8];
        for (k = 0; k < 8; k++)
            lanes[k] = _mm256_setzero_ps();
        for (i = 0; i < head_dim; i += 8) {
            __m256 x = _mm256_loadu_ps(q + i);
            for (k = 0; k < 8; k++)
                lanes[k] = _mm256_add_ps(
                    lanes[k],
                    _mm256_mul_ps(x, _mm256_loadu_ps(keys + (j + k) * head_dim + i)));
        }
        _mm256_storeu_ps(s + j, _mm256_mul_ps(cp_sum_lanes_8x8(lanes), scale));
    }
}

CP_INLINE T void add_values(const float *values, const float *p, int32_t n, int32_t head_dim,
                            const int num, float *acc)
{
    __m256 sum[8];
    int32_t j;
    int k;
#pragma GCC unroll 8
    for (k = 0; k < num; k++)
        sum[k] = _mm256_loadu_ps(acc + 8 * k);
    for (j = 0; j < n; j++) {
        __m256 w = _mm256_broadcast_ss(p + j);
#pragma GCC unroll 8
    for (k = 0; k < num; k++)
            sum[k] = _mm256_add_ps(
                sum[k], _mm256_mul_ps(w, _mm256_loadu_ps(values + j * head_dim + 8 * k)));
    }
#pragma GCC unroll 8
    for (k = 0; k < num; k++)
        _mm256_storeu_ps(acc + 8 * k, sum[k]);
}

/* max over the lanes: no order matters. */
CP_INLINE T float max_16(__m256 a, __m256 b)
{
    __m256 m = _mm256_max_ps(a, b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}

/* The softmax of one head's scores: sets the weights, and scales what was summed before. */
CP_INLINE T void weigh(const float scores[CP_PAGE], int32_t n, int32_t head_dim, float *max,
                       float *total, float *acc, float weights[CP_PAGE])
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i count = _mm256_set1_epi32(n);
    const __m256 absent = _mm256_set1_ps(-FLT_MAX);
    __m256 here[2], s[2], p[2], m;
    float page_max;
    int32_t i, j;
    for (j = 0; j < 2; j++) {
        __m256i index = _mm256_add_epi32(lane, _mm256_set1_epi32(8 * j));
        here[j] = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, index));
        s[j] = _mm256_blendv_ps(absent, _mm256_loadu_ps(scores + 8 * j), here[j]);
    }
    page_max = max_16(s[0], s[1]);
    if (page_max > *max) {
        float shift = *max - page_max;
        float c = shift < -87.0f ? 0.0f : cp_exp1(shift);
        *total *= c;
        for (i = 0; i < head_dim; i++)
            acc[i] *= c;
        *max = page_max;
    }
    m = _mm256_set1_ps(*max);
    for (j = 0; j < 2; j++) {
        p[j] = _mm256_and_ps(cp_exp_or_zero_8(_mm256_sub_ps(s[j], m)), here[j]);
        _mm256_storeu_ps(weights + 8 * j, p[j]);
    }
    *total += cp_sum_lanes_8(_mm256_add_ps(p[0], p[1]));
}

CP_INLINE T void add_all_values(const float *values, const float *p, int32_t n, int32_t head_dim,
                                float *acc)
{
    int32_t i;
    for (i = 0; i + 64 <= head_dim; i += 64)
        add_values(values + i, p, n, head_dim, 8, acc + i);
    for (; i < head_dim; i += 8)
        add_values(values + i, p, n, head_dim, 1, acc + i);
}

/* Step by step for several heads: each step of one head is a long chain of operations that wait for
 * each other, and the CPU fills the gaps with another head's. */
T int cp_attend_avx2(const float *q, int32_t num, const float *tile, int32_t head_dim, int32_t n,
                     float score_scale, float *max, float *total, float *acc)
{
    const __m256 scale = _mm256_set1_ps(score_scale);
    int32_t first, h;
    for (first = 0; first < num; first += HEADS) {
        int32_t end = num - first < HEADS ? num - first : HEADS;
        float scores[HEADS][CP_PAGE], weights[HEADS][CP_PAGE];
        for (h = 0; h < end; h++)
            scores_16(q + (first + h) * head_dim, tile, head_dim, scale, scores[h]);
        for (h = 0; h < end; h++)
            if (!cp_all_finite_avx2(scores[h], n))
                return 0;
        for (h = 0; h < end; h++)
            weigh(scores[h], n, head_dim, max + first + h, total + first + h,
                  acc + (first + h) * head_dim, weights[h]);
        for (h = 0; h < end; h++)
            add_all_values(tile + CP_PAGE * head_dim, weights[h], n, head_dim,
                           acc + (first + h) * head_dim);
    }
    return 1;
}

T void cp_widen_avx2(const uint16_t *keys, const uint16_t *values, int32_t n, int32_t head_dim,
                     float *tile)
{
    cp_from_half_avx2(keys, tile, n * head_dim);
    cp_from_half_avx2(values, tile + CP_PAGE * head_dim, n * head_dim);
}

#else
typedef int cp_no_attend_avx2; /* a translation unit must not be empty */
#endif
