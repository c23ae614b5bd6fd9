/* Operations on rows with AVX-512 (rows_avx512.h). */
#include "internal.h"

#if defined(CP_X86)
#include "rows_avx512.h"
#include "vector_avx512.h"

#define T __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")))

/* No path that uses this wants `wide`. */
T int cp_quantize_avx512(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d,
                         int32_t *s)
{
    const __m512i half_step = _mm512_set1_epi32(1 << (CP_FIRST_TERM_BITS - 1));
    __m512i whole[2];
    int i;
    (void)wide;
    if (!cp_round_group_avx512(x, low ? CP_TWO_TERM_STEPS : 127, whole, d, s))
        return 0;
    for (i = 0; i < 2; i++) {
        __m512i first = whole[i];
        if (low) {
            first = _mm512_srai_epi32(_mm512_add_epi32(first, half_step), CP_FIRST_TERM_BITS);
            _mm_storeu_si128((__m128i *)(low + 16 * i),
                             _mm512_cvtepi32_epi8(_mm512_sub_epi32(
                                 whole[i], _mm512_slli_epi32(first, CP_FIRST_TERM_BITS))));
        }
        _mm_storeu_si128((__m128i *)(q + 16 * i), _mm512_cvtepi32_epi8(first));
    }
    return 1;
}

T void cp_silu_mul_avx512(float *gate, const float *up, int32_t n)
{
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    int32_t i;
    for (i = 0; i < n; i += 16) { /* n is a multiple of 32 */
        __m512 x = _mm512_loadu_ps(gate + i);
        __m512 y = _mm512_add_ps(one, cp_exp_16(_mm512_xor_ps(x, sign)));
        _mm512_storeu_ps(gate + i, _mm512_mul_ps(_mm512_div_ps(x, y), _mm512_loadu_ps(up + i)));
    }
}

T int cp_all_finite_avx512(const float *x, int32_t n)
{
    __mmask16 bad = 0;
    int32_t i;
    for (i = 0; i + 16 <= n; i += 16)
        bad |= _mm512_fpclass_ps_mask(_mm512_loadu_ps(x + i), 0x99); /* NaN, +-infinity */
    return !bad && cp_all_finite(x + i, n - i);
}

#else
typedef int cp_no_rows_avx512; /* a translation unit must not be empty */
#endif
