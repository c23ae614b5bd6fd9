/* Attention to one page with AVX-512: a register holds the 8 lanes of two positions, so that sixteen
 * scores are eight sums.
 */
#include "internal.h"

#if defined(CP_X86)
#include "attend_avx512.h"
#include "numbers.h"
#include "vector_avx2.h"
#include "vector_avx512.h"

#define T __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")))
#define HEADS 4
#define POSITIONS 8 /* of a page, whose scores of many rows are under way together */
#define INLINE static inline __attribute__((always_inline)) T

/* Keys of two positions lie together, 8 dimensions of the one and the same 8 of the other; values as
 * they are. The whole page is widened: what lies behind its end is masked where it would count. */
T void cp_widen_avx512(const uint16_t *keys, const uint16_t *values, int32_t n, int32_t head_dim,
                       float *tile)
{
    int32_t j, i;
    for (j = 0; j < CP_PAGE; j += 2)
        for (i = 0; i < head_dim; i += 8, tile += 16) {
            __m256i both = _mm256_inserti128_si256(
                _mm256_castsi128_si256(
                    _mm_loadu_si128((const __m128i *)(keys + j * head_dim + i))),
                _mm_loadu_si128((const __m128i *)(keys + (j + 1) * head_dim + i)), 1);
            _mm512_storeu_ps(tile, _mm512_cvtph_ps(both));
        }
    n = (n + 1) / 2 * 2; /* then n * head_dim is a multiple of 16 */
    for (i = 0; i < n * head_dim; i += 16)
        _mm512_storeu_ps(tile + i, _mm512_cvtph_ps(_mm256_loadu_si256(
                                       (const __m256i *)(values + i))));
}

/* The trees of sixteen sums of 8 lanes, two sums in each register: sum i in lane i. */
INLINE __m512 sum_lanes_16(const __m512 v[8])
{
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 a[4], b[2], c;
    int i;
#pragma GCC unroll 4
    for (i = 0; i < 4; i++) /* four sums, one in each 128 bits */
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
#pragma GCC unroll 2
    for (i = 0; i < 2; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    c = _mm512_add_ps(_mm512_shuffle_ps(b[0], b[1], 0x88), _mm512_shuffle_ps(b[0], b[1], 0xdd));
    return _mm512_permutexvar_ps(order, c);
}

/* The tree of 8 lanes that are registers. */
INLINE __m512 sum_of_lanes(const __m512 l[8])
{
    __m512 even = _mm512_add_ps(_mm512_add_ps(l[0], l[4]), _mm512_add_ps(l[2], l[6]));
    __m512 odd = _mm512_add_ps(_mm512_add_ps(l[1], l[5]), _mm512_add_ps(l[3], l[7]));
    return _mm512_add_ps(even, odd);
}

INLINE __m512 scores_16(const float *q, const float *keys, int32_t head_dim, __m512 scale)
{
    __m512 lanes[8];
    int32_t i;
    int j;
#pragma GCC unroll 8
    for (j = 0; j < 8; j++)
        lanes[j] = _mm512_setzero_ps();
    for (i = 0; i < head_dim; i += 8, keys += 16) {
        __m512 x = _mm512_broadcast_f32x8(_mm256_loadu_ps(q + i));
#pragma GCC unroll 8
        for (j = 0; j < 8; j++)
            lanes[j] = _mm512_add_ps(
                lanes[j], _mm512_mul_ps(x, _mm512_loadu_ps(keys + j * 2 * head_dim)));
    }
    return _mm512_mul_ps(sum_lanes_16(lanes), scale);
}

/* acc += p_j * v_j, j ascending, for 16 * num dimensions (fewer than 16: those of the mask). */
INLINE void add_values(const float *values, const float *p, int32_t n, int32_t head_dim,
                       const int num, __mmask16 mask, float *acc)
{
    __m512 sum[4];
    int32_t j;
    int k;
#pragma GCC unroll 4
    for (k = 0; k < num; k++)
        sum[k] = _mm512_maskz_loadu_ps(mask, acc + 16 * k);
    for (j = 0; j < n; j++, values += head_dim) {
        __m512 w = _mm512_set1_ps(p[j]);
#pragma GCC unroll 4
        for (k = 0; k < num; k++)
            sum[k] = _mm512_add_ps(
                sum[k], _mm512_mul_ps(w, _mm512_maskz_loadu_ps(mask, values + 16 * k)));
    }
#pragma GCC unroll 4
    for (k = 0; k < num; k++)
        _mm512_mask_storeu_ps(acc + 16 * k, mask, sum[k]);
}

/* The softmax of one head's scores: sets the weights, and scales what was summed before. */
INLINE void weigh(__m512 s, __mmask16 here, int32_t head_dim, float *max, float *total, float *acc,
                  float weights[CP_PAGE])
{
    float page_max = _mm512_mask_reduce_max_ps(here, s);
    __m512 p;
    int32_t i;
    if (page_max > *max) {
        float shift = *max - page_max;
        float c = shift < -87.0f ? 0.0f : cp_exp1(shift);
        *total *= c;
        for (i = 0; i < head_dim; i++)
            acc[i] *= c;
        *max = page_max;
    }
    p = _mm512_maskz_mov_ps(here, cp_exp_or_zero_16(_mm512_sub_ps(s, _mm512_set1_ps(*max))));
    _mm512_storeu_ps(weights, p);
    *total += cp_sum_lanes_8(
        _mm256_add_ps(_mm512_castps512_ps256(p), _mm512_extractf32x8_ps(p, 1)));
}

INLINE void add_all_values(const float *values, const float *p, int32_t n, int32_t head_dim,
                           float *acc)
{
    int32_t i;
    for (i = 0; i + 64 <= head_dim; i += 64)
        add_values(values + i, p, n, head_dim, 4, 0xffff, acc + i);
    for (; i + 16 <= head_dim; i += 16)
        add_values(values + i, p, n, head_dim, 1, 0xffff, acc + i);
    if (i < head_dim)
        add_values(values + i, p, n, head_dim, 1, 0x00ff, acc + i);
}

/* Step by step for several heads: each step of one head is a long chain of operations that wait for
 * each other, and the CPU fills the gaps with another head's. */
T int cp_attend_avx512(const float *q, int32_t num, const float *tile, int32_t head_dim,
                       int32_t n, float score_scale, float *max, float *total, float *acc)
{
    const __m512 scale = _mm512_set1_ps(score_scale);
    const __mmask16 here = (__mmask16)((1u << n) - 1);
    int32_t first, h;
    for (first = 0; first < num; first += HEADS) {
        int32_t end = num - first < HEADS ? num - first : HEADS;
        float weights[HEADS][CP_PAGE];
        __m512 s[HEADS];
        __mmask16 bad = 0;
        for (h = 0; h < end; h++) {
            s[h] = scores_16(q + (first + h) * head_dim, tile, head_dim, scale);
            bad |= _mm512_mask_fpclass_ps_mask(here, s[h], 0x99); /* NaN, +-infinity */
        }
        if (bad)
            return 0;
        for (h = 0; h < end; h++)
            weigh(s[h], here, head_dim, max + first + h, total + first + h,
                  acc + (first + h) * head_dim, weights[h]);
        for (h = 0; h < end; h++)
            add_all_values(tile + CP_PAGE * head_dim, weights[h], n, head_dim,
                           acc + (first + h) * head_dim);
    }
    return 1;
}

/* Lanes e and e + 4 of the scores of 16 rows and POSITIONS positions, added up. A lane is a row, so that
 * each sum of 8 lanes is of registers, and nothing is shuffled. Keys lie as cp_widen_avx512 puts them.
 * Two lanes of many positions at a time, not all lanes of two: a column is then read for 8 products. */
INLINE void two_lanes_of_rows(const float *columns, const float *keys, int32_t head_dim, int e,
                              __m512 sums[POSITIONS])
{
    __m512 low[POSITIONS], high[POSITIONS];
    int32_t i;
    int j;
#pragma GCC unroll 8
    for (j = 0; j < POSITIONS; j++)
        low[j] = high[j] = _mm512_setzero_ps();
    columns += e * CP_ATTENTION_ROWS;
    keys += e;
    for (i = 0; i < head_dim; i += 8, keys += 16, columns += 8 * CP_ATTENTION_ROWS) {
        __m512 x = _mm512_loadu_ps(columns), y = _mm512_loadu_ps(columns + 4 * CP_ATTENTION_ROWS);
#pragma GCC unroll 8
        for (j = 0; j < POSITIONS; j++) {
            const float *key = keys + j / 2 * 2 * head_dim + j % 2 * 8;
            low[j] = _mm512_add_ps(low[j], _mm512_mul_ps(x, _mm512_set1_ps(key[0])));
            high[j] = _mm512_add_ps(high[j], _mm512_mul_ps(y, _mm512_set1_ps(key[4])));
        }
    }
#pragma GCC unroll 8
    for (j = 0; j < POSITIONS; j++)
        sums[j] = _mm512_add_ps(low[j], high[j]);
}

INLINE void scores_of_rows(const float *columns, const float *keys, int32_t head_dim, __m512 scale,
                           __m512 scores[POSITIONS])
{
    __m512 sums[4][POSITIONS];
    int e, j;
    for (e = 0; e < 4; e++)
        two_lanes_of_rows(columns, keys, head_dim, e, sums[e]);
    for (j = 0; j < POSITIONS; j++)
        scores[j] = _mm512_mul_ps(_mm512_add_ps(_mm512_add_ps(sums[0][j], sums[2][j]),
                                                _mm512_add_ps(sums[1][j], sums[3][j])),
                                  scale);
}

/* acc += p_j * v_j, j ascending, for n rows and 16 * num dimensions (fewer than 16: those of the mask).
 * Weights of a row are CP_ATTENTION_ROWS apart. */
INLINE void add_values_of_rows(const float *values, const float *p, int32_t num_positions,
                               int32_t head_dim, const int n, const int num, __mmask16 mask,
                               float *acc, size_t stride)
{
    __m512 sum[2][4];
    int32_t j;
    int k, r;
#pragma GCC unroll 2
    for (r = 0; r < n; r++)
#pragma GCC unroll 4
        for (k = 0; k < num; k++)
            sum[r][k] = _mm512_maskz_loadu_ps(mask, acc + (size_t)r * stride + 16 * k);
    for (j = 0; j < num_positions; j++, values += head_dim, p += CP_ATTENTION_ROWS)
#pragma GCC unroll 4
        for (k = 0; k < num; k++) {
            __m512 v = _mm512_maskz_loadu_ps(mask, values + 16 * k);
#pragma GCC unroll 2
            for (r = 0; r < n; r++)
                sum[r][k] =
                    _mm512_add_ps(sum[r][k], _mm512_mul_ps(_mm512_set1_ps(p[r]), v));
        }
#pragma GCC unroll 2
    for (r = 0; r < n; r++)
#pragma GCC unroll 4
        for (k = 0; k < num; k++)
            _mm512_mask_storeu_ps(acc + (size_t)r * stride + 16 * k, mask, sum[r][k]);
}

INLINE void add_all_values_of_rows(const float *values, const float *p, int32_t num_positions,
                                   int32_t head_dim, const int n, float *acc, size_t stride)
{
    int32_t i;
    for (i = 0; i + 64 <= head_dim; i += 64)
        add_values_of_rows(values + i, p, num_positions, head_dim, n, 4, 0xffff, acc + i, stride);
    for (; i + 16 <= head_dim; i += 16)
        add_values_of_rows(values + i, p, num_positions, head_dim, n, 1, 0xffff, acc + i, stride);
    if (i < head_dim)
        add_values_of_rows(values + i, p, num_positions, head_dim, n, 1, 0x00ff, acc + i, stride);
}

/* Rows whose page has a larger score than all before: scales what was summed. */
INLINE __m512 raise_max(__m512 page_max, float *max, float *total, int32_t head_dim, float *acc,
                        size_t stride)
{
    __m512 old = _mm512_loadu_ps(max), sum = _mm512_loadu_ps(total);
    __mmask16 larger = _mm512_cmp_ps_mask(page_max, old, _CMP_GT_OQ);
    float factors[CP_ATTENTION_ROWS];
    __m512 c;
    int32_t r, i;
    if (!larger)
        return old;
    c = cp_exp_or_zero_16(_mm512_sub_ps(old, page_max));
    old = _mm512_mask_mov_ps(old, larger, page_max);
    _mm512_storeu_ps(max, old);
    _mm512_storeu_ps(total, _mm512_mask_mul_ps(sum, larger, sum, c));
    _mm512_storeu_ps(factors, c);
    for (r = 0; r < CP_ATTENTION_ROWS; r++, acc += stride)
        if (larger >> r & 1)
            for (i = 0; i < head_dim; i++)
                acc[i] *= factors[r];
    return old;
}

T int cp_attend_rows_avx512(const float *columns, const float *tile, int32_t head_dim,
                            int32_t first, float score_scale, float *max, float *total, float *acc,
                            size_t stride)
{
    const __m512 scale = _mm512_set1_ps(score_scale);
    const float *values = tile + CP_PAGE * head_dim;
    float weights[CP_PAGE][CP_ATTENTION_ROWS];
    __m512 s[CP_PAGE], most = _mm512_set1_ps(cp_float(0xff800000u)), lanes[8];
    __mmask16 sees[CP_PAGE], bad = 0;
    int j, r;
    for (j = 0; j < CP_PAGE; j += POSITIONS)
        scores_of_rows(columns, tile + j * head_dim, head_dim, scale, s + j);
#pragma GCC unroll 16
    for (j = 0; j < CP_PAGE; j++) { /* row r sees position j if j <= first + r */
        sees[j] = j > first ? (__mmask16)(0xffff << (j - first)) : 0xffff;
        bad |= _mm512_mask_fpclass_ps_mask(sees[j], s[j], 0x99); /* NaN, +-infinity */
        most = _mm512_mask_max_ps(most, sees[j], most, s[j]);
    }
    if (bad)
        return bad;
    most = raise_max(most, max, total, head_dim, acc, stride);
#pragma GCC unroll 16
    for (j = 0; j < CP_PAGE; j++) {
        s[j] = _mm512_maskz_mov_ps(sees[j], cp_exp_or_zero_16(_mm512_sub_ps(s[j], most)));
        _mm512_storeu_ps(weights[j], s[j]);
    }
#pragma GCC unroll 8
    for (j = 0; j < 8; j++)
        lanes[j] = _mm512_add_ps(s[j], s[8 + j]);
    _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), sum_of_lanes(lanes)));
    if (first + 1 >= CP_PAGE) {
        for (r = 0; r < CP_ATTENTION_ROWS; r += 2)
            add_all_values_of_rows(values, weights[0] + r, CP_PAGE, head_dim, 2,
                                   acc + (size_t)r * stride, stride);
        return 0;
    }
    for (r = 0; r < CP_ATTENTION_ROWS; r++) {
        int32_t n = first + r + 1 < CP_PAGE ? first + r + 1 : CP_PAGE;
        add_all_values_of_rows(values, weights[0] + r, n, head_dim, 1, acc + (size_t)r * stride,
                               stride);
    }
    return 0;
}

#else
typedef int cp_no_attend_avx512; /* a translation unit must not be empty */
#endif
