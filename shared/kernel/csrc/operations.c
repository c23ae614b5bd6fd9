/* Operations on rows: rms_norm, rope, silu; and the element-wise ones that tests call alone. */
#include "internal.h"
#include "numbers.h"

#include <math.h> /* sqrtf, which IEEE 754 defines to the last bit */

int cp_rms_norm(const float *x, const float *weight, float eps, int32_t n, float *out)
{
    float ms = cp_dot8(x, x, n) / (float)n;
    float inv = 1.0f / sqrtf(ms + eps);
    int32_t i;
    if (!cp_all_finite(&ms, 1))
        return 0;
    for (i = 0; i < n; i++)
        out[i] = (x[i] * inv) * weight[i];
    return 1;
}

void cp_rope(float *x, const float *cos, const float *sin, int32_t heads, int32_t head_dim,
             int32_t half_pairing)
{
    int32_t half = head_dim / 2, h, i;
    for (h = 0; h < heads; h++, x += head_dim)
        for (i = 0; i < half; i++) {
            int32_t first = half_pairing ? i : 2 * i;
            int32_t second = half_pairing ? i + half : 2 * i + 1;
            float a = x[first], b = x[second];
            x[first] = a * cos[i] - b * sin[i];
            x[second] = a * sin[i] + b * cos[i];
        }
}

void cp_silu_mul(float *gate, const float *up, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++) {
        float x = gate[i];
        gate[i] = (x / (1.0f + cp_exp1(-x))) * up[i];
    }
}

int32_t cp_unfinished_row(const float *x, int32_t rows, int32_t cols)
{
    int32_t r;
    for (r = 0; r < rows; r++)
        if (!cp_all_finite(x + (size_t)r * (size_t)cols, cols))
            return r;
    return -1;
}

int32_t cp_norm_quantized(const float *x, const float *weight, float eps, int32_t rows,
                          int32_t cols, int32_t terms, float *norm, cp_acts *acts)
{
    int32_t r;
    for (r = 0; r < rows; r++) {
        size_t at = (size_t)r * (size_t)cols;
        if (!cp_rms_norm(x + at, weight, eps, cols, norm + at))
            return r;
    }
    return cp_quantize(norm, rows, cols, terms, acts);
}

void cp_exp(const float *x, float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = cp_exp1(x[i]);
}

void cp_to_half(const float *x, uint16_t *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = (uint16_t)cp_to_half1(x[i]);
}

void cp_from_half(const uint16_t *x, float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = cp_from_half1(x[i]);
}
