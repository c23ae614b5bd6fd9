/* Operations on rows with AVX2 and F16C (rows_avx2.h); the AVX-512 path uses them too. */
#include "internal.h"

#if defined(CP_X86)
#include "numbers.h"
#include "rows_avx2.h"
#include "vector_avx2.h"

#define T CP_TARGET_AVX2

T int cp_quantize_avx2(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d, int32_t *s)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    const int32_t steps = low ? CP_TWO_TERM_STEPS : 127;
    const __m256i limit = _mm256_set1_epi32(steps), half_step = _mm256_set1_epi32(128);
    /* packs works on halves of 128 bits: this puts the pieces of 4 bytes in order again */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i v[4], first[4], sum, max = _mm256_setzero_si256();
    __m128i half;
    uint32_t max_bits;
    float amax, id = 0.0f;
    int i;
    for (i = 0; i < 4; i++) {
        v[i] = _mm256_castps_si256(_mm256_loadu_ps(x + 8 * i));
        max = _mm256_max_epu32(max, _mm256_and_si256(v[i], magnitude));
    }
    half = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    max_bits = (uint32_t)_mm_cvtsi128_si32(half);
    if (max_bits >= 0x7f800000u)
        return 0;
    amax = cp_float(max_bits);
    *d = 0.0f;
    if (max_bits >= (127u - 100u) << 23) { /* 2^-100 */
        id = (float)steps / amax;
        *d = amax / (float)steps;
    }
    sum = _mm256_setzero_si256();
    for (i = 0; i < 4; i++) {
        v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(v[i]), _mm256_set1_ps(id)));
        v[i] = _mm256_min_epi32(v[i], limit);
        v[i] = _mm256_max_epi32(v[i], _mm256_sub_epi32(_mm256_setzero_si256(), limit));
        sum = _mm256_add_epi32(sum, v[i]);
    }
    half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    *s = _mm_cvtsi128_si32(half);
    if (wide)
        for (i = 0; i < 2; i++)
            _mm256_storeu_si256((__m256i *)(wide + 16 * i),
                                _mm256_permute4x64_epi64(
                                    _mm256_packs_epi32(v[2 * i], v[2 * i + 1]), 0xd8));
    for (i = 0; i < 4; i++) {
        first[i] = v[i];
        if (low) {
            first[i] =
                _mm256_srai_epi32(_mm256_add_epi32(v[i], half_step), CP_FIRST_TERM_BITS);
            v[i] = _mm256_sub_epi32(v[i], _mm256_slli_epi32(first[i], CP_FIRST_TERM_BITS));
        }
    }
    _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(
                                          _mm256_packs_epi16(_mm256_packs_epi32(first[0], first[1]),
                                                             _mm256_packs_epi32(first[2], first[3])),
                                          order));
    if (low)
        _mm256_storeu_si256((__m256i *)low,
                            _mm256_permutevar8x32_epi32(
                                _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]),
                                                   _mm256_packs_epi32(v[2], v[3])),
                                order));
    return 1;
}

T float cp_dot8_avx2(const float *x, const float *y, int32_t n)
{
    __m256 lanes = _mm256_setzero_ps();
    int32_t i;
    for (i = 0; i < n; i += 8)
        lanes = _mm256_add_ps(lanes, _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    return cp_sum_lanes_8(lanes);
}

T void cp_scale_by_avx2(const float *x, float factor, const float *weight, int32_t n, float *out)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = (x[i] * factor) * weight[i];
}

T void cp_rope_avx2(float *x, const float *cos, const float *sin, int32_t heads, int32_t head_dim,
                    int32_t half_pairing)
{
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    int32_t half = head_dim / 2, h, i;
    for (h = 0; h < heads; h++, x += head_dim) {
        if (half_pairing) {
            for (i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a * cos[i] - b * sin[i];
                x[i + half] = a * sin[i] + b * cos[i];
            }
            continue;
        }
        for (i = 0; i < half; i += 4) {
            __m256 pairs = _mm256_loadu_ps(x + 2 * i);
            __m256 c = _mm256_permutevar8x32_ps(
                _mm256_castps128_ps256(_mm_loadu_ps(cos + i)), twice);
            __m256 s = _mm256_permutevar8x32_ps(
                _mm256_castps128_ps256(_mm_loadu_ps(sin + i)), twice);
            __m256 turned = _mm256_mul_ps(_mm256_permute_ps(pairs, 0xb1), s); /* b*s, a*s */
            _mm256_storeu_ps(x + 2 * i, _mm256_addsub_ps(_mm256_mul_ps(pairs, c), turned));
        }
    }
}

T void cp_silu_mul_avx2(float *gate, const float *up, int32_t n)
{
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    int32_t i;
    for (i = 0; i < n; i += 8) { /* n is a multiple of 32 */
        __m256 x = _mm256_loadu_ps(gate + i);
        __m256 y = _mm256_add_ps(one, cp_exp_8(_mm256_xor_ps(x, sign)));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(_mm256_div_ps(x, y), _mm256_loadu_ps(up + i)));
    }
}

T void cp_add_to_avx2(float *x, const float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        x[i] += y[i];
}

T int cp_all_finite_avx2(const float *x, int32_t n)
{
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    __m256i bad = _mm256_setzero_si256();
    int32_t i;
    for (i = 0; i + 8 <= n; i += 8) {
        __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        bad = _mm256_or_si256(bad, _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent));
    }
    return _mm256_testz_si256(bad, bad) && cp_all_finite(x + i, n - i);
}

T void cp_exp_avx2(const float *x, float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, cp_exp_8(_mm256_loadu_ps(x + i)));
    for (; i < n; i++)
        out[i] = cp_exp1(x[i]);
}

T void cp_to_half_avx2(const float *x, uint16_t *out, int32_t n)
{
    const __m256 max = _mm256_set1_ps(65504.0f), min = _mm256_set1_ps(-65504.0f);
    int32_t i;
    for (i = 0; i + 8 <= n; i += 8) {
        __m256 v = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(x + i), max), min);
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(v, 0)); /* 0: nearest even */
    }
    for (; i < n; i++)
        out[i] = (uint16_t)cp_to_half1(x[i]);
}

T void cp_from_half_avx2(const uint16_t *x, float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    for (; i < n; i++)
        out[i] = cp_from_half1(x[i]);
}

T uint64_t cp_read_avx2(const uint8_t *bytes, uint64_t n)
{
    __m256i sum[4];
    uint64_t i, words[4];
    int j;
    for (j = 0; j < 4; j++)
        sum[j] = _mm256_setzero_si256();
    for (i = 0; i + 256 <= n; i += 256) {
        _mm_prefetch((const char *)bytes + i + 4096, _MM_HINT_T0);
        _mm_prefetch((const char *)bytes + i + 4160, _MM_HINT_T0);
        _mm_prefetch((const char *)bytes + i + 4224, _MM_HINT_T0);
        _mm_prefetch((const char *)bytes + i + 4288, _MM_HINT_T0);
        for (j = 0; j < 8; j++)
            sum[j & 3] = _mm256_xor_si256(
                sum[j & 3], _mm256_loadu_si256((const __m256i *)(bytes + i + 32 * (uint64_t)j)));
    }
    sum[0] = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
    _mm256_storeu_si256((__m256i *)words, sum[0]);
    return words[0] ^ words[1] ^ words[2] ^ words[3];
}

#else
typedef int cp_no_rows_avx2; /* a translation unit must not be empty */
#endif
