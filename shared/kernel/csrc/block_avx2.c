/* Row blocks with AVX2.
 *
 * int4: 8 rows x 4 inputs a register; products of unsigned weights and signed activations are summed
 * in 16 bits over the whole group (8 of at most 2 * 15 * 128: 30,720 fits), then widened once.
 * int8: weights widened to 16 bits, 4 rows x 4 inputs a register, times activations in one 16-bit
 * piece: no term is computed apart, and nothing saturates.
 */
#include "internal.h"

#if defined(CP_X86)
#include "rows_avx2.h"

#include <immintrin.h>

#define T __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) T
#define AHEAD_INT4 4096 /* bytes that are fetched ahead of a stream of weights */
#define AHEAD_INT8 6144 /* the same, of a stream that is computed faster */
/* Keeps a sum in its register: the compiler would turn sums of integers into trees, whose leaves are
 * too many for 16 registers. */
#define KEEP(sum) __asm__("" : "+x"(sum))
typedef int32_t __attribute__((may_alias)) word;
typedef int64_t __attribute__((may_alias)) long_word;

INLINE __m256 half8(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* Weights that will have left the caches anyway pass them by, and spare what others keep there. */
INLINE void prefetch(const uint8_t *p, const int lines, int32_t passing)
{
    int i;
#pragma GCC unroll 8
    for (i = 0; i < lines; i++) {
        if (passing)
            _mm_prefetch((const char *)p + 64 * i, _MM_HINT_NTA);
        else
            _mm_prefetch((const char *)p + 64 * i, _MM_HINT_T0);
    }
}

/* a += (scale * d) * dot */
INLINE void accumulate(float *a, __m256 scale, float d, __m256i dot)
{
    __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(d));
    _mm256_storeu_ps(a, _mm256_add_ps(_mm256_loadu_ps(a),
                                      _mm256_mul_ps(factor, _mm256_cvtepi32_ps(dot))));
}

/* One group, `num` (at most 4) rows or terms of rows: sums of products in 16 bits, for outputs 0..7 and
 * 8..15. Both at once: an activation is read for two products, which a Zen 5, that can do two of each a
 * cycle, has no time for otherwise. */
INLINE void int4_sums(const uint8_t *group, const int8_t *q, const int num, __m256i sum[2][4])
{
    const __m256i low = _mm256_set1_epi8(15);
    int t, p;
#pragma GCC unroll 4
    for (t = 0; t < num; t++)
        sum[0][t] = sum[1][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (p = 0; p < 8; p++) {
        const __m256i *slab = (const __m256i *)(group + 64 + 64 * (p % 4));
        __m256i w0 = _mm256_loadu_si256(slab), w1 = _mm256_loadu_si256(slab + 1);
        if (p >= 4) {
            w0 = _mm256_srli_epi16(w0, 4);
            w1 = _mm256_srli_epi16(w1, 4);
        }
        w0 = _mm256_and_si256(w0, low);
        w1 = _mm256_and_si256(w1, low);
#pragma GCC unroll 4
        for (t = 0; t < num; t++) {
            __m256i x = _mm256_set1_epi32(((const word *)(q + t * CP_GROUP))[p]);
            sum[0][t] = _mm256_add_epi16(sum[0][t], _mm256_maddubs_epi16(w0, x));
            sum[1][t] = _mm256_add_epi16(sum[1][t], _mm256_maddubs_epi16(w1, x));
            KEEP(sum[0][t]);
            KEEP(sum[1][t]);
        }
    }
}

/* Rows first..first+n-1 of a group; n * terms <= 4. */
INLINE void int4_group(const uint8_t *group, const int8_t *q, const float *d, const int n,
                       const int terms, float a[][CP_BLOCK])
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[2][4];
    int t, half;
    int4_sums(group, q, n * terms, sum);
#pragma GCC unroll 2
    for (half = 0; half < 2; half++) {
        __m256 scale = half8(group + 16 * half);
#pragma GCC unroll 4
        for (t = 0; t < n; t++) {
            __m256i dot = _mm256_madd_epi16(sum[half][t * terms], ones);
            if (terms == 2)
                dot = _mm256_add_epi32(_mm256_slli_epi32(dot, CP_FIRST_TERM_BITS),
                                       _mm256_madd_epi16(sum[half][t * 2 + 1], ones));
            accumulate(&a[t][8 * half], scale, d[t], dot);
        }
    }
}

INLINE void int4_rows(const uint8_t *block, const cp_tile *x, int32_t first, const int n,
                      const int terms, float *out, size_t stride)
{
    const int step = n * terms <= 4 ? n : 4 / terms; /* rows at once */
    const int8_t *q = x->q + (size_t)(first * terms * CP_GROUP);
    const float *d = x->d + first, *ds = x->ds + first;
    const uint8_t *at = block;
    float a[8][CP_BLOCK];
    __m256 b[8];
    int32_t g;
    int t, half;
    for (t = 0; t < n; t++)
        for (half = 0; half < 2; half++)
            _mm256_storeu_ps(&a[t][8 * half], _mm256_setzero_ps());
    for (g = 0; g < x->groups; g++, at += CP_INT4_GROUP) {
        if (n <= 4)
            prefetch(at + AHEAD_INT4, 5, x->passing);
#pragma GCC unroll 4
        for (t = 0; t < n; t += step)
            int4_group(at, q + t * terms * CP_GROUP, d + t, step, terms, a + t);
        q += x->n * terms * CP_GROUP;
        d += x->n;
    }
    /* The sum of mins in a pass of its own, for 8 outputs at a time. */
    for (half = 0; half < 2; half++) {
#pragma GCC unroll 8
        for (t = 0; t < n; t++)
            b[t] = _mm256_setzero_ps();
        for (g = 0; g < x->groups; g++) {
            __m256 min = half8(block + g * CP_INT4_GROUP + 32 + 16 * half);
#pragma GCC unroll 8
            for (t = 0; t < n; t++)
                b[t] = _mm256_add_ps(b[t],
                                     _mm256_mul_ps(min, _mm256_set1_ps(ds[g * x->n + t])));
        }
#pragma GCC unroll 8
        for (t = 0; t < n; t++)
            _mm256_storeu_ps(out + (size_t)t * stride + 8 * half,
                             _mm256_add_ps(_mm256_loadu_ps(&a[t][8 * half]), b[t]));
    }
}

/* One group for n (1 or 2) rows of the tile. */
INLINE void int8_group(const uint8_t *slabs, const int16_t *wide, const float *d, const int n,
                       __m256 scale[2], float a[][CP_BLOCK])
{
    __m256i sum[2][4];
    int t, p, i;
#pragma GCC unroll 2
    for (t = 0; t < n; t++)
#pragma GCC unroll 4
        for (i = 0; i < 4; i++)
            sum[t][i] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (p = 0; p < 8; p++)
#pragma GCC unroll 4
        for (i = 0; i < 4; i++) {
            __m256i w = _mm256_cvtepi8_epi16(
                _mm_loadu_si128((const __m128i *)(slabs + 64 * p + 16 * i)));
#pragma GCC unroll 2
            for (t = 0; t < n; t++) {
                const long_word *quads = (const long_word *)(wide + t * CP_GROUP);
                sum[t][i] = _mm256_add_epi32(
                    sum[t][i], _mm256_madd_epi16(w, _mm256_set1_epi64x(quads[p])));
                KEEP(sum[t][i]);
            }
        }
#pragma GCC unroll 2
    for (t = 0; t < n; t++)
#pragma GCC unroll 2
        for (i = 0; i < 2; i++) /* rows 0 1 4 5 | 2 3 6 7 of eight, then in order */
            accumulate(&a[t][8 * i], scale[i], d[t],
                       _mm256_permute4x64_epi64(
                           _mm256_hadd_epi32(sum[t][2 * i], sum[t][2 * i + 1]), 0xd8));
}

INLINE void int8_rows(const uint8_t *block, const cp_tile *x, int32_t first, const int n,
                      float *out, size_t stride)
{
    const uint8_t *slabs = block + cp_int8_scale_bytes(x->cols);
    const int16_t *wide = x->wide + (size_t)(first * CP_GROUP);
    const float *d = x->d + first;
    float a[8][CP_BLOCK];
    int32_t g;
    int t, half;
    for (t = 0; t < n; t++)
        for (half = 0; half < 2; half++)
            _mm256_storeu_ps(&a[t][8 * half], _mm256_setzero_ps());
    for (g = 0; g < x->groups; g++, slabs += CP_INT8_GROUP) {
        __m256 scale[2];
        if (n <= 4)
            prefetch(slabs + AHEAD_INT8, 8, x->passing);
        for (half = 0; half < 2; half++)
            scale[half] = half8(block + g * CP_BLOCK * 2 + 16 * half);
#pragma GCC unroll 4
        for (t = 0; t < n; t += 2)
            int8_group(slabs, wide + t * CP_GROUP, d + t, n - t < 2 ? 1 : 2, scale, a + t);
        wide += x->n * CP_GROUP;
        d += x->n;
    }
    for (t = 0; t < n; t++)
        for (half = 0; half < 2; half++)
            _mm256_storeu_ps(out + (size_t)t * stride + 8 * half,
                             _mm256_loadu_ps(&a[t][8 * half]));
}

/* Tiles are cut into pieces that are compiled for their size. */
T static void int4_one(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    int32_t t = 0;
    for (; x->n - t >= 8; t += 8)
        int4_rows(block, x, t, 8, 1, out + (size_t)t * stride, stride);
    for (; x->n - t >= 4; t += 4)
        int4_rows(block, x, t, 4, 1, out + (size_t)t * stride, stride);
    for (; t < x->n; t++)
        int4_rows(block, x, t, 1, 1, out + (size_t)t * stride, stride);
}

T static void int4_two(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    int32_t t = 0;
    for (; x->n - t >= 4; t += 4)
        int4_rows(block, x, t, 4, 2, out + (size_t)t * stride, stride);
    for (; t < x->n; t++)
        int4_rows(block, x, t, 1, 2, out + (size_t)t * stride, stride);
}

static void block_int4(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    (x->terms == 1 ? int4_one : int4_two)(block, x, out, stride);
}

T static void block_int8(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    int32_t t = 0;
    for (; x->n - t >= 8; t += 8)
        int8_rows(block, x, t, 8, out + (size_t)t * stride, stride);
    for (; x->n - t >= 2; t += 2)
        int8_rows(block, x, t, 2, out + (size_t)t * stride, stride);
    for (; t < x->n; t++)
        int8_rows(block, x, t, 1, out + (size_t)t * stride, stride);
}

/* Multiply and add in 16 bits, ten sums. */
T static uint64_t peak(uint64_t rounds)
{
    __m256i sum[10], w = _mm256_set1_epi8(3), q = _mm256_set1_epi8(5);
    uint64_t i;
    int j;
#pragma GCC unroll 10
    for (j = 0; j < 10; j++)
        sum[j] = _mm256_setzero_si256();
    for (i = 0; i < rounds; i++) {
#pragma GCC unroll 10
        for (j = 0; j < 10; j++) {
            __asm__ __volatile__("" : "+x"(w));
            sum[j] = _mm256_add_epi16(sum[j], _mm256_maddubs_epi16(w, q));
        }
#pragma GCC unroll 10
        for (j = 0; j < 10; j++)
            __asm__ __volatile__("" : "+x"(sum[j]));
    }
    return rounds * 10 * 32;
}

const cp_path cp_path_avx2 = {
    "avx2", 1, 0, block_int4, block_int8, NULL, NULL, 0, cp_quantize_avx2, cp_dot8_avx2,
    cp_scale_by_avx2, cp_rope_avx2, cp_silu_mul_avx2, cp_add_to_avx2, cp_all_finite_avx2, cp_exp_avx2,
    cp_to_half_avx2, cp_from_half_avx2, cp_widen_avx2, cp_attend_avx2, NULL, peak, cp_read_avx2};

#else
typedef int cp_no_block_avx2; /* a translation unit must not be empty */
#endif
