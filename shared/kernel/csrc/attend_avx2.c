/* Attention to one page with AVX2: sixteen scores at once, each in its own 8 lanes. */
#include "internal.h"

#if defined(CP_X86)
#include "numbers.h"
#include "rows_avx2.h"
#include "vector_avx2.h"

#define T CP_TARGET_AVX2

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
    __m256 sum[4];
    int32_t j, k;
    for (k = 0; k < num; k++)
        sum[k] = _mm256_loadu_ps(acc + 8 * k);
    for (j = 0; j < n; j++) {
        __m256 w = _mm256_broadcast_ss(p + j);
        for (k = 0; k < num; k++)
            sum[k] = _mm256_add_ps(
                sum[k], _mm256_mul_ps(w, _mm256_loadu_ps(values + j * head_dim + 8 * k)));
    }
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

CP_INLINE T int attend_one(const float *q, const float *tile, int32_t head_dim, int32_t n,
                           __m256 scale, float *max, float *total, float *acc)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i count = _mm256_set1_epi32(n);
    const __m256 absent = _mm256_set1_ps(-FLT_MAX);
    __m256 here[2], s[2], p[2], m;
    float scores[CP_PAGE], weights[CP_PAGE], page_max;
    int32_t i, j;
    scores_16(q, tile, head_dim, scale, scores);
    if (!cp_all_finite_avx2(scores, n))
        return 0;
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
    for (i = 0; i + 32 <= head_dim; i += 32)
        add_values(tile + CP_PAGE * head_dim + i, weights, n, head_dim, 4, acc + i);
    for (; i < head_dim; i += 8)
        add_values(tile + CP_PAGE * head_dim + i, weights, n, head_dim, 1, acc + i);
    return 1;
}

T int cp_attend_avx2(const float *q, int32_t num, const float *tile, int32_t head_dim, int32_t n,
                     float score_scale, float *max, float *total, float *acc)
{
    __m256 scale = _mm256_set1_ps(score_scale);
    int32_t h;
    for (h = 0; h < num; h++, q += head_dim, acc += head_dim)
        if (!attend_one(q, tile, head_dim, n, scale, max + h, total + h, acc))
            return 0;
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
